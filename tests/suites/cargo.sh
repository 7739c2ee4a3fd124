#!/usr/bin/env bash
# Unit, property and documentation tests of all crates. Each test is a result; each test binary prints one line. Binaries run two at a time:
# most of them wait, and the simulation takes all processors that it gets.
source "$(dirname "$0")/../lib.sh"
cd "$ROOT" || exit 1
# Those that take longest begin first.
LONGEST=(sim meta client drive)
BESIDE=2

log=$LOGS/cargo-tests.log
binaries=$LOGS/cargo-binaries
started=$EPOCHREALTIME

# built: writes a line for each test binary: its crate's directory, and its path.
built() {
    local crate
    timeout 3600 cargo test --profile "$BUILD" --workspace --no-run --message-format=json </dev/null 2>"$log" >"$binaries.json" || return 1
    jq -r 'select(.executable and .profile.test) | "\(.manifest_path | rtrimstr("/Cargo.toml")) \(.executable)"' "$binaries.json" >"$binaries.all"
    for crate in "${LONGEST[@]}"; do grep "/crates/$crate " "$binaries.all"; done >"$binaries"
    grep -vxFf "$binaries" "$binaries.all" >>"$binaries"
}

# run_binary NUMBER CRATE BINARY: runs all tests of a binary, as cargo does, with a log of its own.
run_binary() {
    local number=$1 crate=$2 binary=$3 status
    {
        echo "     Running $(basename "$crate"): $(basename "$binary")"
        (cd "$crate" && CARGO_MANIFEST_DIR=$crate timeout 1800 "$binary" </dev/null 2>&1)
        status=$?
        # A binary that dies has no lines for the tests in it.
        [ "$status" = 0 ] || echo "binary ended with status $status: $binary"
    } >"$log.$number"
    return "$status"
}
export -f run_binary
export log

status=0 documented=0
built && nl -w 1 -s ' ' "$binaries" | xargs -P "$BESIDE" -L 1 bash -c 'run_binary "$@"' _ || status=$?
cat "$log".* >>"$log" 2>/dev/null
timeout 1800 cargo test --profile "$BUILD" --workspace --doc </dev/null >>"$log" 2>&1 || documented=$?
[ "$status" != 0 ] || status=$documented

# Lines of the test harness: `test NAME ... ok|FAILED|ignored`, after a line that names the binary.
awk -v suite="$SUITE" -v results="$RESULTS" '
    /^ +Running |^ +Doc-tests / { binary = $0; sub(/^ +/, "", binary); sub(/^Running /, "", binary) }
    /^test .* \.\.\. ok$/       { print "ok\t" suite "\t" $2 >> results; next }
    /^test .* \.\.\. FAILED$/   { print "FAIL\t" suite "\t" $2 >> results; print "FAIL " suite ": " $2; next }
    /^test .* \.\.\. ignored/   { print "skip\t" suite "\t" $2 " (ignored)" >> results; next }
    /^test result: / && $4 + $6 > 0 { printf "%-4s %s: %s, %d passed, %d failed, %s\n", $6 ? "FAIL" : "ok", suite, binary, $4, $6, $NF }
' "$log"

if [ "$status" = 0 ]; then
    passed "all test binaries ended well" "$(seconds_since "$started") s"
else
    failed "all test binaries ended well" "status $status"
    # What the failed tests printed stands far above the end.
    awk '/^failures:$/ { shown = !shown } shown && lines++ < 100' "$log" | sed 's/^/     | /'
    show_log "$log"
fi
exit 0
