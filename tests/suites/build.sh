#!/usr/bin/env bash
# Builds the binaries that the other suites run, together with all tests: what is built apart gets other features of
# the same crates, and most of them would be built twice.
source "$(dirname "$0")/../lib.sh"
LIMIT_S=3600
cd "$ROOT" || exit 1

check "binaries build" cargo build --release --workspace --bins --tests || exit 1
exit 0
