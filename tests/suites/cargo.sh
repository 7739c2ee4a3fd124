#!/usr/bin/env bash
# Unit, property and documentation tests of all crates. Each test is a result; each test binary prints one line.
source "$(dirname "$0")/../lib.sh"
cd "$ROOT" || exit 1

log=$LOGS/cargo-tests.log
started=$EPOCHREALTIME
timeout 3600 cargo test --profile "$BUILD" --workspace --no-fail-fast </dev/null >"$log" 2>&1
status=$?

# Lines of the test harness: `test NAME ... ok|FAILED|ignored`, after a line that names the binary.
awk -v suite="$SUITE" -v results="$RESULTS" '
    /^ +Running |^ +Doc-tests / { binary = $0; sub(/^ +/, "", binary); sub(/^Running /, "", binary); sub(/ \(.*/, "", binary) }
    /^test .* \.\.\. ok$/       { print "ok\t" suite "\t" $2 >> results; next }
    /^test .* \.\.\. FAILED$/   { print "FAIL\t" suite "\t" $2 >> results; print "FAIL " suite ": " $2; next }
    /^test .* \.\.\. ignored/   { print "skip\t" suite "\t" $2 " (ignored)" >> results; next }
    /^test result: / && $4 + $6 > 0 { printf "%-4s %s: %s, %d passed, %d failed\n", $6 ? "FAIL" : "ok", suite, binary, $4, $6 }
' "$log"

# A binary that does not compile or dies has no line for the tests in it.
if [ "$status" = 0 ]; then
    passed "all test binaries ended well" "$(seconds_since "$started") s"
else
    failed "all test binaries ended well" "status $status"
    # What the failed tests printed stands far above the end.
    awk '/^failures:$/ { shown = !shown } shown && lines++ < 100' "$log" | sed 's/^/     | /'
    show_log "$log"
fi
exit 0
