#!/usr/bin/env bash
# Drives fail, vanish and rot: what was written stays readable, and writing goes on for as long as the profile says.
source "$(dirname "$0")/../lib.sh"
FILES=${FOREBAY_DEGRADED_FILES:-400}
[ "$PLAIN" = 1 ] && { skipped "all" "a plain directory has no drives"; exit 0; }

# Nothing may come from the kernel's caches.
same() {
    node_unmount "$1" && node_mount "$1" && diff -rq --no-dereference "$WORK/source" "$WORK/$1/mnt/$2"
}

copy() { cp -a "$WORK/source" "$WORK/$1/mnt/$2" && sync_tree "$WORK/$1/mnt/$2"; }
sync_tree() { find "$1" -type f -print0 | xargs -0 -n 200 sync; }
fail_drive() { "$FOREBAY" drive fail "$WORK/$1" "$2" "${@:3}"; }
state_is() { [ "$("$FOREBAY" status "$WORK/$1" --json | jq -r .state)" = "$2" ]; }

# write_fails NODE: with too few drives for w shards, fsync says so within a bounded time, and nothing hangs.
write_fails() {
    if timeout 60 dd if=/dev/urandom of="$WORK/$1/mnt/too-much" bs=1M count=8 conv=fsync 2>"$WORK/dd"; then
        echo "a write was acknowledged with too few drives"
        return 1
    fi
    cat "$WORK/dd"
    grep -q 'Input/output error' "$WORK/dd"
}

restart() { node_stop "$1" && node_start "$1"; }

# profile_survives NODE PROFILE DRIVES WRITES READS: that many drives may go before writing and before reading stops.
profile_survives() {
    local node=$1 profile=$2 drives=$3 writes=$4 reads=$5 gone
    check "$profile: the node starts" node_start "$node" --drives "$drives" --drive-size 1G --profile "$profile" || return
    check "$profile: a tree is written" copy "$node" before
    for ((gone = 0; gone < writes; gone++)); do check "$profile: drive $gone fails" fail_drive "$node" "$gone"; done
    if [ "$writes" -gt 0 ]; then
        check "$profile: status says that it is degraded" state_is "$node" degraded
        check "$profile: everything is readable without $writes" same "$node" before
        check "$profile: writing goes on without $writes" copy "$node" during
        check "$profile: and that is readable" same "$node" during
        check "$profile: also after a restart" restart "$node"
        check "$profile: readable after a restart" same "$node" during
    fi
    for ((; gone < reads; gone++)); do check "$profile: drive $gone fails" fail_drive "$node" "$gone"; done
    check "$profile: everything is readable without $reads" same "$node" before
    check "$profile: one more is refused without --force" expect_fail 'would lose data' fail_drive "$node" "$gone"
    [ "$reads" -gt "$writes" ] && check "$profile: writing without $reads fails and does not hang" write_fails "$node"
    check "$profile: the node stops or says what it could not write" stop_or_say "$node"
    rm -rf --one-file-system "${WORK:?}/$node"
}

stop_or_say() { node_stop "$1" || ! "$FOREBAY" status "$WORK/$1"; }

missing_drive() {
    node_stop gone && rm "$WORK/gone/drives/2.img" && node_start gone &&
        "$FOREBAY" drive list "$WORK/gone" --json | jq -e '.[2].state == "missing"' && same gone before
}

too_many_missing() {
    node_stop gone && rm "$WORK/gone/drives/0.img" "$WORK/gone/drives/1.img" &&
        expect_fail 'survives 2 lost drives, and 3 do not answer' "$FOREBAY" start "$WORK/gone"
}

# Overwrites a MiB in every 16 of one drive, past the superblocks, while nobody looks.
rot() {
    local image=$WORK/$1/drives/$2.img at
    node_stop "$1"
    for ((at = 9; at < 240; at += 16)); do
        dd if=/dev/urandom of="$image" bs=1M seek="$at" count=1 conv=notrunc status=none
    done
    node_start "$1"
}

# A drive that was away while files were written is as good as lost to them, and everybody says so.
returned_drive() {
    local dir=$WORK/back
    node_stop back && mv "$dir/drives/1.img" "$WORK/away.img" && node_start back && copy back during &&
        node_stop back && mv "$WORK/away.img" "$dir/drives/1.img" && node_start back && state_is back degraded &&
        "$FOREBAY" why "$(find "$dir/mnt/during" -type f -size +300k | head -n 1)" --json |
        jq -e '.state == "degraded" and any(.extents[].shards[]; .drive == 1 and .state == "owed")' >/dev/null &&
        fail_drive back 2 && expect_fail 'would lose data' fail_drive back 3 && same back during
}

check "a real tree is staged" stage_tree "$FILES" "$WORK/source" || exit 0
profile_survives d1 r2 2 0 1
profile_survives d2 r3 3 1 2
profile_survives d3 4+2 6 1 2
profile_survives d4 12/7/9 12 3 5
check "missing: the node starts" node_start gone --drives 6 --drive-size 256M --profile 4+2
check "missing: a tree is written" copy gone before
check "missing: without the file of a drive everything is readable" missing_drive
check "missing: with too few drives the node says why it does not start" too_many_missing
node_end gone
check "returned: the node starts" node_start back --drives 6 --drive-size 256M --profile 4+2
check "returned: a drive that was away counts as lost where it is owed shards" returned_drive
check "returned: the node stops" node_stop back
check "rot: the node starts" node_start rot --drives 6 --drive-size 256M --profile 4+2
check "rot: a tree is written" copy rot before
check "rot: two drives are damaged" eval 'rot rot 1 && rot rot 4'
check "rot: damage is never returned, everything is readable" same rot before
check "rot: the node stops" node_stop rot
exit 0
