#!/usr/bin/env bash
# Crashes: nothing that was acknowledged is lost, nothing deleted comes back. See `cargo xtask crash`.
source "$(dirname "$0")/../lib.sh"
ROUNDS=$([ "$LONG" = 1 ] && echo 100 || echo 10)
LIMIT_S=$([ "$LONG" = 1 ] && echo 3600 || echo 300)

# crash_rounds PROFILE DRIVES SEED
crash_rounds() {
    local dir=$WORK/crash-${1//[^0-9a-z]/-}
    mkdir "$dir"
    if [ "$PLAIN" = 1 ]; then
        "$XTASK" crash --dir "$dir" --plain --rounds "$ROUNDS" --seed "$3"
        return
    fi
    # The trap must find the node if the checker itself is ended.
    echo "$dir/node" >>"$WORK/.nodes"
    "$XTASK" crash --dir "$dir" --forebay "$FOREBAY" --profile "$1" --drives "$2" --rounds "$ROUNDS" --seed "$3" || return
    "$FOREBAY" fsck "$dir/node"
}

check "1+0, $ROUNDS crashes, seed $SEED" crash_rounds 1+0 1 "$SEED"
check "r3, $ROUNDS crashes, seed $((SEED + 1))" crash_rounds r3 3 $((SEED + 1))
check "4+2, $ROUNDS crashes, seed $((SEED + 2))" crash_rounds 4+2 6 $((SEED + 2))
exit 0
