#!/usr/bin/env bash
# bench.sh [--quick] [--json]: `cargo xtask bench` in a temporary directory that is removed afterwards.
source "$(dirname "$0")/lib.sh"
"$XTASK" bench --dir "$WORK" --forebay "$FOREBAY" "$@"
exit $?
