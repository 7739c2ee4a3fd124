#!/usr/bin/env bash
# bench-tier.sh [--quick] [--json] [--only WORD]: `cargo xtask bench-tier` in a temporary directory that is removed afterwards.
source "$(dirname "$0")/lib.sh"
"$XTASK" bench-tier --dir "$WORK" --forebay "$FOREBAY" --minio "$TOOLS/minio" "$@"
