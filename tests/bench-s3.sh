#!/usr/bin/env bash
# bench-s3.sh [--quick] [--json] [--only WORD]: `cargo xtask bench-s3` in a temporary directory that is removed afterwards.
source "$(dirname "$0")/lib.sh"
"$XTASK" bench-s3 --dir "$WORK" --forebay "$FOREBAY" --minio "$TOOLS/minio" "$@"
