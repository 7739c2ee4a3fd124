#!/usr/bin/env bash
# What is found without building anything.
source "$(dirname "$0")/../lib.sh"
cd "$ROOT" || exit 1

check "rustfmt" cargo fmt --check
exit 0
