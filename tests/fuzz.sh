#!/usr/bin/env bash
# fuzz.sh SECONDS [TARGET...]: runs every fuzz target, or the given ones, for this number of seconds each. Two at a
# time. Findings are kept in fuzz/artifacts, inputs that reach new code in fuzz/corpus.
set -uo pipefail
cd "$(dirname "$0")/../fuzz" || exit 1
SECONDS_EACH=${1:-600}
shift
# libFuzzer's instrumentation without cargo-fuzz: these passes are in the stable compiler.
FLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
FLAGS+=" -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table"
FLAGS+=" -Cllvm-args=-sanitizer-coverage-trace-compares"
HOST=$(rustc -vV | sed -n 's/^host: //p')
TARGET=${CARGO_TARGET_DIR:-$PWD/../target}/fuzz
# With --target, build scripts and macros are not instrumented.
RUSTFLAGS=$FLAGS cargo build --release --quiet --locked --target "$HOST" --target-dir "$TARGET" --bin decoders || exit 1
DECODERS=$TARGET/$HOST/release/decoders
mkdir -p corpus artifacts
FUZZ_SEEDS=corpus "$DECODERS" || exit 1

if [ $# = 0 ]; then mapfile -t TARGETS < <(sed -n 's/^    ("\([a-z]*\)", .*/\1/p' src/targets.rs); else TARGETS=("$@"); fi

run_one() {
    local log=artifacts/$1.log
    mkdir -p "corpus/$1"
    if FUZZ_TARGET=$1 timeout $((SECONDS_EACH + 60)) "$DECODERS" -max_total_time="$SECONDS_EACH" -max_len=16384 -timeout=5 \
        -rss_limit_mb=1024 -print_final_stats=1 -artifact_prefix="artifacts/$1-" "corpus/$1" >"$log" 2>&1 </dev/null; then
        echo "ok   $1: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs, $(grep -o 'cov: [0-9]*' "$log" | tail -n 1)"
        return 0
    fi
    echo "FAIL $1"
    tail -n 15 "$log" | sed 's/^/     | /'
    echo "     repeat: FUZZ_TARGET=$1 $DECODERS $(ls -t "$PWD/artifacts/$1-"* 2>/dev/null | head -n 1)"
    return 1
}

status=0
for ((i = 0; i < ${#TARGETS[@]}; i += 2)); do
    run_one "${TARGETS[i]}" &
    first=$!
    if [ -n "${TARGETS[i + 1]:-}" ]; then run_one "${TARGETS[i + 1]}" || status=1; fi
    wait "$first" || status=1
done
exit "$status"
