#!/usr/bin/env bash
# run.sh [--long] [--plain] [--conformance] [SUITE…]: runs suites one after another and sums them up. Exit status 1 if
# anything failed. The last line is `N passed, N failed`.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

SUITES=(build lint cargo cli sequences pjdfstest fsx sqlite git s3 s3-crash stores tier full host-full metadata degraded space tree overload fuzz crash)
# What real programs expect of a filesystem, at full length.
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
LIMIT_S=$([ "${FOREBAY_TEST_LONG:-0}" = 1 ] && echo 14400 || echo 1500)

export FOREBAY_LOGS
FOREBAY_LOGS=$(mktemp -d "${TMPDIR:-/tmp}/forebay-logs.XXXXXX")
export FOREBAY_RESULTS=$FOREBAY_LOGS/results
: >"$FOREBAY_RESULTS"

child=
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null; wait "$child"; fi' EXIT

count() { grep -c "^$1" "$FOREBAY_RESULTS"; }

for suite in "${SUITES[@]}"; do
    script=tests/suites/$suite.sh
    if [ ! -e "$script" ]; then
        echo "no such suite: $suite; there are: $(cd tests/suites && echo *.sh)" >&2
        exit 2
    fi
    started=$SECONDS
    before=$(wc -l <"$FOREBAY_RESULTS")
    timeout --foreground --kill-after=60 "$LIMIT_S" bash "$script" </dev/null &
    child=$!
    wait "$child"
    status=$?
    child=
    # A suite reports its failures itself; one that ended early or said nothing has not tested anything.
    if [ "$status" != 0 ] || [ "$(wc -l <"$FOREBAY_RESULTS")" = "$before" ]; then
        printf 'FAIL %s: ended early (status %s)\n' "$suite" "$status"
        printf 'FAIL\t%s\tended early\n' "$suite" >>"$FOREBAY_RESULTS"
        # Without binaries nothing else makes sense.
        [ "$suite" = build ] && break
    fi
    echo "     $suite took $((SECONDS - started)) s"
done

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
