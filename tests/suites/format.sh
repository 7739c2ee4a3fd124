#!/usr/bin/env bash
# Checks that need no build.
source "$(dirname "$0")/../lib.sh"
cd "$ROOT" || exit 1

check "rustfmt" cargo fmt --check
exit 0
