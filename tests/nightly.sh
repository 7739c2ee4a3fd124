#!/usr/bin/env bash
# nightly.sh [TARGET…]: runs the long targets of the Makefile, one after another, and prints a table of the results. Exit
# status 1 if anything failed. Logs are kept in run/nightly.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

TARGETS=(test-long crash conformance fuzz tier sim mutations cluster-faults takeovers upgrade bench bench-s3 bench-tier)
[ $# = 0 ] || TARGETS=("$@")
LOGS=run/nightly
mkdir -p "$LOGS"

# Half of the seeds are new each day.
FIRST=${FIRST:-$(date +%Y%m%d)000}
rows=()
failed=0
for target in "${TARGETS[@]}"; do
    started=$SECONDS
    if make "$target" FIRST="$FIRST" >"$LOGS/$target.log" 2>&1 </dev/null; then result=ok; else result=FAIL && failed=1; fi
    last=$(grep -v '^$' "$LOGS/$target.log" | tail -n 1 | cut -c1-60)
    rows+=("$(printf '%-12s %-5s %6d s  %s' "$target" "$result" $((SECONDS - started)) "$last")")
    echo "${rows[-1]}"
done
echo
printf '%-12s %-5s %8s  %s\n' TARGET RESULT TIME "LAST LINE"
printf '%s\n' "${rows[@]}"
exit "$failed"
