#!/usr/bin/env bash
# soak.sh MINUTES [OPTION…]: `cargo xtask soak` in a temporary directory that is removed afterwards.
source "$(dirname "$0")/lib.sh"
echo "$WORK/node" >>"$WORK/.nodes"
"$XTASK" soak --dir "$WORK" --forebay "$FOREBAY" --minutes "$@"
exit $?
