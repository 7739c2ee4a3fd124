#!/usr/bin/env bash
# Builds the binaries that the other suites run.
source "$(dirname "$0")/../lib.sh"
LIMIT_S=3600
cd "$ROOT" || exit 1

check "binaries build" cargo build --release --package forebay --package xtask || exit 1
exit 0
