#!/usr/bin/env bash
# Tiering under load, with small drives: files are changed and removed at random while the node and the store are killed,
# and ten times the size of the drives is written and read back. Then all content must be intact, and the store must not
# have much more than the files. Called by tests/tier.sh; not part of `make test`.
source "$(dirname "$0")/../lib.sh"
LIMIT_S=1200
STORE_SIZE=6G
source "$ROOT/tests/tier/lib.sh"

# What is written is compared with a plain directory.
strict_mounts
SHADOW=$WORK/shadow
mkdir "$SHADOW"
ROUNDS=${FOREBAY_TIER_ROUNDS:-8}
RANDOM=$SEED

check "the store starts: $STORE, $FAULTS of 100 requests harmed" store_start || exit 0
check "a node starts" node_start home --drives 6 --drive-size 64M --profile 4+2 || exit 0
check "the store is added" add_store || exit 0
attached() { fs attach main cold --retention 30s --tiering-cue 10s; }
check "a filesystem is attached" attached || exit 0

# Starts a killed store again, and sets its new port.
store_again() {
    store_start
    "$FOREBAY" store update "$NODE" cold --port "$(reached_port)"
}
attempts() { if [ "$FAULTS" = 0 ]; then echo 1; else echo 5; fi; }
as_written() {
    cold_cache
    "$VENV/bin/python" "$ROOT/tests/tier/storm.py" verify "$MNT" "$SHADOW" "$(attempts)"
}
storm() {
    local load round
    "$VENV/bin/python" "$ROOT/tests/tier/storm.py" run "$MNT" "$SHADOW" $((ROUNDS * 15)) "$SEED" &
    load=$!
    for round in $(seq "$ROUNDS"); do
        sleep $((4 + RANDOM % 14))
        case $((RANDOM % 3)) in
        0)
            echo "round $round: the node"
            node_kill home
            node_start home
            ;;
        1)
            echo "round $round: the store"
            store_kill
            sleep $((RANDOM % 8))
            store_again
            ;;
        2)
            echo "round $round: both"
            store_kill
            node_kill home
            node_start home
            store_again
            ;;
        esac
        tier_status | jq -c '.[0] | {queued_bytes, both_bytes, away_bytes, blobs, overhead_percent, problem}'
    done
    wait "$load"
}
check "SIGKILL of the node, the store and both while files are changed and removed" storm
check "every byte is as it was written" as_written

# The state after the load stops: all content is in the store, which has little else.
settled() {
    wait_until 240 tier_is ".queued_extents == 0 and .problem == null and $DENSE" || {
        tier_status
        return 1
    }
    wait_until 60 orphans_are_gone
    tier_status | jq -c '.[0] | {live_bytes, stored_bytes, overhead_percent, blobs, rewritten_bytes, deleted_blobs}'
}
check "the store holds less than 13 % more than files have, and no orphaned blob" settled
check "a file system check finds nothing" node_fsck home

overcommitted() {
    local capacity number=0 bytes=0 size=20000000
    capacity=$(df -B1 --output=size "$MNT" | tail -1)
    : >"$SUMS"
    while [ $bytes -lt $((10 * capacity)) ]; do
        number=$((number + 1))
        head -c $size /dev/urandom | tee "$MNT/over$number" | sha256sum | sed "s/-/over$number/" >>"$SUMS"
        bytes=$((bytes + size))
    done
    sync_files "$MNT"
    echo "$bytes bytes on drives of $capacity after $SECONDS s"
}
check "ten times what the drives hold is written" overcommitted
read_back() {
    local before=$SECONDS
    tier_is '.away_bytes > 5 * .both_bytes'
    cold_cache
    same_sums
    echo "$(stored_kib) KiB in the store, read back in $((SECONDS - before)) s"
}
check "ten times what the drives hold is read back as written" read_back
removed() {
    local before
    wait_until 240 tier_is '.queued_extents == 0'
    before=$(stored_kib)
    rm "$MNT"/over*
    wait_until 120 shrunk $((before / 4))
    echo "$before KiB before, $(stored_kib) KiB now"
}
shrunk() { [ "$(stored_kib)" -lt "$1" ]; }
check "the bucket shrinks when files are removed" removed
check "the store holds less than 13 % more than files have after all" settled
check "every byte is as it was written after all" as_written
check "a file system check finds nothing after all" node_fsck home
emptied() {
    rm "$MNT"/*
    wait_until 120 tier_is '.blobs == 0 and .queued_extents == 0'
    wait_until 60 orphans_are_gone
    [ "$(blobs)" = 0 ]
}
check "nothing is left in the bucket when every file is removed" emptied
check "the node stays within its memory" node_stop home
exit 0
