#!/usr/bin/env bash
# Builds the binaries that the other suites run, together with all tests: separate builds would need other features of
# the same crates and build most of them twice.
source "$(dirname "$0")/../lib.sh"
LIMIT_S=3600
cd "$ROOT" || exit 1

check "binaries build" cargo build --profile "$BUILD" --workspace --bins --tests || exit 1
exit 0
