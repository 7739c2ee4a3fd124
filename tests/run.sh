#!/usr/bin/env bash
# run.sh [--long] [--plain] [--conformance] [SUITE…]: runs suites and adds up their results. Exit status 1 if anything
# failed. The last line is `N passed, N failed`.
#
# Stages that need no node run first, one after another; if one fails, the rest is skipped. Then come the suites that
# need a whole machine, then the others, four at a time (JOBS=4), each with its own nodes and ports.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

# The longest of those that run beside each other begin first: suites that mostly wait, beside suites that mostly work.
SUITES=(format build lint cargo cli overload crash s3-crash tier tier-nodes outlive takeover cluster-faults log-postgres move engine witness recover backup clients absence cluster tree space damage fsx degraded stores git stuck s3 full history host-full metadata sequences pjdfstest sqlite uring)
# Suites that all others depend on.
STAGES=(format build lint cargo)
# Suites that measure speed or memory of a whole machine, use fixed ports, or keep all cores busy.
ALONE=(cli overload crash s3-crash fio projects postgres stress archives)
JOBS=${JOBS:-4}
# Suites of real programs, at full length.
CONFORMANCE=(pjdfstest fsx fio projects git sqlite postgres stress archives s3 s3-clients)

while [ $# -gt 0 ]; do
    case "$1" in
    --long) export FOREBAY_TEST_LONG=1 ;;
    --conformance) export FOREBAY_TEST_LONG=1 FOREBAY_FSX_OPERATIONS=${FOREBAY_FSX_OPERATIONS:-1000000} && SUITES=("${CONFORMANCE[@]}") ;;
    --plain) export FOREBAY_PLAIN=1 ;;
    -*)
        echo "usage: run.sh [--long] [--plain] [--conformance] [SUITE…]; suites: ${SUITES[*]} ${CONFORMANCE[*]}" >&2
        exit 2
        ;;
    *) break ;;
    esac
    shift
done
if [ $# -gt 0 ]; then SUITES=("$@"); fi

# Seconds after which a suite counts as hanging.
LIMIT_S=${FOREBAY_SUITE_LIMIT_S:-$([ "${FOREBAY_TEST_LONG:-0}" = 1 ] && echo 14400 || echo 1500)}

export FOREBAY_LOGS
FOREBAY_LOGS=$(mktemp -d "${TMPDIR:-/tmp}/forebay-logs.XXXXXX")
export FOREBAY_RESULTS=$FOREBAY_LOGS/results
: >"$FOREBAY_RESULTS"

children=()
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'for child in "${children[@]}"; do kill -TERM "$child" 2>/dev/null; done; wait' EXIT

count() { grep -c "^$1" "$FOREBAY_RESULTS"; }
# among WORD…: whether the first word is one of the others.
among() { case " ${*:2} " in *" $1 "*) ;; *) return 1 ;; esac; }

# run_suite SUITE: runs it with its own file of results, which is added to the common one at the end.
run_suite() {
    local suite=$1 started=$SECONDS results=$FOREBAY_LOGS/results-$1 limit_s=$LIMIT_S status child
    : >"$results"
    # A machine that has built nothing yet may be slow.
    if among "$suite" "${STAGES[@]}"; then limit_s=3600; fi
    FOREBAY_RESULTS=$results timeout --foreground --kill-after=60 "$limit_s" bash "tests/suites/$suite.sh" </dev/null &
    child=$!
    trap 'kill -TERM "$child" 2>/dev/null; wait "$child"; exit 143' TERM
    wait "$child"
    status=$?
    # A suite reports its failures itself. A suite that ended early or without results has not tested anything.
    if [ "$status" != 0 ] || [ ! -s "$results" ]; then
        printf 'FAIL %s: ended early (status %s)\n' "$suite" "$status"
        printf 'FAIL\t%s\tended early\n' "$suite" >>"$results"
    fi
    echo "     $suite took $((SECONDS - started)) s"
    cat "$results" >>"$FOREBAY_RESULTS"
    ! grep -q '^FAIL' "$results"
}

# Starts a suite in parallel to others; its output is shown at its end.
run_beside() {
    local out=$FOREBAY_LOGS/out-$1
    run_suite "$1" >"$out" 2>&1
    # Locked, so that outputs do not mix.
    flock "$FOREBAY_LOGS" cat "$out"
}

for suite in "${SUITES[@]}"; do
    [ -e "tests/suites/$suite.sh" ] || {
        echo "no such suite: $suite; there are: $(cd tests/suites && echo *.sh)" >&2
        exit 2
    }
done

beside=()
stopped=
for suite in "${SUITES[@]}"; do
    if [ "$JOBS" -gt 1 ] && ! among "$suite" "${STAGES[@]}" "${ALONE[@]}"; then
        beside+=("$suite")
        continue
    fi
    run_suite "$suite" &
    children=($!)
    if ! wait "${children[0]}" && among "$suite" "${STAGES[@]}"; then
        stopped=$suite
        break
    fi
done
children=()
if [ -n "$stopped" ]; then
    echo "the rest is left out, because $stopped failed"
elif [ "${#beside[@]}" = 1 ]; then
    run_suite "${beside[0]}" &
    children=($!)
    wait "${children[0]}"
else
    for suite in "${beside[@]}"; do
        while [ "$(jobs -pr | wc -l)" -ge "$JOBS" ]; do wait -n; done
        run_beside "$suite" &
        children+=($!)
    done
    wait
fi

passed=$(count ok)
failed=$(count FAIL)
if [ "$(count skip)" != 0 ]; then
    echo "skipped:"
    grep '^skip' "$FOREBAY_RESULTS" | cut -f2- | sed 's/\t/: /; s/^/  /' | head -n 40
fi
if [ "$failed" != 0 ]; then
    echo "failed:"
    grep '^FAIL' "$FOREBAY_RESULTS" | cut -f2- | sed 's/\t/: /; s/^/  /'
    echo "logs: $FOREBAY_LOGS"
else
    rm -rf "$FOREBAY_LOGS"
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
