#!/usr/bin/env bash
# A copy of a real tree stays the same: after the copy, a remount, a restart and a crash; for several profiles.
source "$(dirname "$0")/../lib.sh"
FILES=${FOREBAY_TEST_FILES:-$([ "$LONG" = 1 ] && echo 30000 || echo 4000)}
LIMIT_S=$([ "$LONG" = 1 ] && echo 3600 || echo 600)
DRIVE_SIZE=$([ "$LONG" = 1 ] && echo 4G || echo 1G)

copy() {
    cp -a "$WORK/source" "$WORK/$1/mnt/copy"
    same_tree "$WORK/source" "$WORK/$1/mnt/copy"
}

after_remount() {
    node_unmount "$1"
    node_mount "$1"
    same_tree "$WORK/source" "$WORK/$1/mnt/copy"
}

after_restart() {
    node_stop "$1"
    node_start "$1"
    same_tree "$WORK/source" "$WORK/$1/mnt/copy"
}

after_crash() {
    node_kill "$1"
    node_start "$1"
    same_tree "$WORK/source" "$WORK/$1/mnt/copy"
}

# The crash comes right after the last fsync.
after_sync_and_crash() {
    cp -a "$WORK/source" "$WORK/$1/mnt/second"
    find "$WORK/$1/mnt/second" -type f -exec sync {} +
    node_kill "$1"
    node_start "$1"
    same_tree "$WORK/source" "$WORK/$1/mnt/second"
}

remove() {
    rm -r "$WORK/$1/mnt/copy"
    if [ "$PLAIN" != 1 ]; then [ -z "$(find "$WORK/$1/mnt" -mindepth 1 -maxdepth 1 ! -name second)" ]; fi
}

run_profile() {
    local profile=$1 drives=$2 node=p${1//[^0-9a-z]/-}
    check "$profile: the node starts" node_start "$node" --drives "$drives" --drive-size "$DRIVE_SIZE" --profile "$profile" || return
    check "$profile: a copy is the same" copy "$node" &&
        check "$profile: after a remount" after_remount "$node" &&
        check "$profile: after a restart" after_restart "$node" &&
        check "$profile: after a crash" after_crash "$node" &&
        check "$profile: a second copy, after fsync and a crash" after_sync_and_crash "$node" &&
        check "$profile: rm -r removes it" remove "$node"
    check "$profile: fsck finds nothing while it runs" node_fsck "$node"
    check "$profile: the node stops" node_stop "$node"
    check "$profile: fsck finds nothing" node_fsck "$node"
    # The next profile needs the room, even after a failure above.
    [ "$PLAIN" = 1 ] || node_end "$WORK/$node"
    rm -rf --one-file-system "${WORK:?}/$node"
}

check "a real tree is staged" stage_tree "$FILES" "$WORK/source" || exit 0
tail -n 1 "$LOGS/tree-a-real-tree-is-staged.log" | sed 's/^/     /'
run_profile 1+0 1
run_profile r3 3
run_profile 4+2 6
run_profile 12/7/9 12
exit 0
