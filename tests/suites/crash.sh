#!/usr/bin/env bash
# Crashes: no acknowledged data is lost, no deleted data comes back. SIGKILL, power cuts of all disks, disks that fail, are
# slow or full. With --early, the mount is not strict. See `cargo xtask crash`.
#   FOREBAY_CRASH_ROUNDS   rounds of all plans together (default: 40, long: 240)
source "$(dirname "$0")/../lib.sh"
TOTAL=${FOREBAY_CRASH_ROUNDS:-$([ "$LONG" = 1 ] && echo 240 || echo 40)}
LIMIT_S=$((120 + TOTAL * 8))

# crash_rounds SEED PROFILE DRIVES LAYOUT ROUNDS FAULTS [OPTION…]
crash_rounds() {
    local seed=$1 profile=$2 drives=$3 layout=$4 rounds=$5 faults=$6 dir
    shift 6
    dir=$WORK/crash-$seed
    mkdir "$dir"
    # The trap must find the node if the checker itself is ended.
    echo "$dir/node" >>"$WORK/.nodes"
    echo "$dir/machine/node" >>"$WORK/.nodes"
    "$XTASK" crash --dir "$dir" --forebay "$FOREBAY" --layout "$layout" --profile "$profile" --drives "$drives" \
        --rounds "$rounds" --faults "$faults" --seed "$seed" "$@"
    rm -rf --one-file-system "$dir"
}

if [ "$PLAIN" = 1 ]; then
    mkdir "$WORK/plain"
    check "plain, 10 rounds, seed $SEED" "$XTASK" crash --dir "$WORK/plain" --plain --rounds 10 --seed "$SEED"
    exit 0
fi

# Profile, drives, layout, percentage of the rounds, percentage of the rounds with faults, options.
PLANS=(
    "4+2 6 host 10 0"
    "1+0 1 host 5 0"
    "4+2 6 devices 20 10 --may-lose-drive"
    "4+2 6 devices 10 0 --early"
    "1+0 1 ext4 5 0 --early"
    "r3 3 ext4 10 5"
    "4+2 6 xfs 10 5"
    "1+0 1 devices 15 10"
    "12/7/9 12 devices 15 5 --may-lose-drive"
)
seed=$SEED
for plan in "${PLANS[@]}"; do
    read -r profile drives layout share fault_share options <<<"$plan"
    faults=$(((TOTAL * fault_share + 99) / 100))
    rounds=$(((TOTAL * share + 99) / 100 - faults))
    # shellcheck disable=SC2086 # options are words
    check "$profile on $layout${options:+ $options}, $rounds crashes and $faults faults, seed $seed" \
        crash_rounds "$seed" "$profile" "$drives" "$layout" "$rounds" "$faults" $options
    seed=$((seed + 1))
done
exit 0
