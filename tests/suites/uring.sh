#!/usr/bin/env bash
# The mount over io_uring: the same promises, and /dev/fuse where the kernel does not offer it.
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && { skipped "all" "a plain directory has no transport"; exit 0; }
SWITCH=/sys/module/fuse/parameters/enable_uring
[ -w "$SWITCH" ] || { skipped "all" "this kernel has no FUSE over io_uring"; exit 0; }
BEFORE=$(cat "$SWITCH")
trap 'echo "$BEFORE" >"$SWITCH"; cleanup' EXIT
export FOREBAY_MOUNT_OPTIONS=transport=uring
NODE=node
MNT=$WORK/$NODE/mnt

transport() { "$FOREBAY" fs show "$WORK/$NODE" main --json | jq -r .transport; }

falls_back() {
    echo N >"$SWITCH"
    node_start "$NODE" --drives 1 --drive-size 1G
    [ "$(transport)" = device ]
    grep 'no FUSE over io_uring' "$WORK/$NODE/log/forebay.log"
    echo here >"$MNT/file"
}

uses_rings() {
    echo Y >"$SWITCH"
    node_unmount "$NODE"
    node_mount "$NODE"
    [ "$(transport)" = uring ]
    [ "$(cat "$MNT/file")" = here ]
}

calls() { timeout 120 python3 "$ROOT/tests/posix/calls.py" "$MNT"; }

# More programs at once than a ring has slots, with data of all sizes.
many_programs() {
    local i pids=()
    for i in {1..100}; do
        head -c $((i * i * 300)) /dev/urandom >"$WORK/data$i"
        (cp "$WORK/data$i" "$MNT/data$i" && sync "$MNT/data$i" && cmp "$WORK/data$i" "$MNT/data$i") &
        pids+=($!)
    done
    for i in "${pids[@]}"; do wait "$i"; done
    node_unmount "$NODE"
    node_mount "$NODE"
    for i in {1..100}; do cmp "$WORK/data$i" "$MNT/data$i"; done
}

outlives_a_kill() {
    local i
    kill -KILL "$(node_pid "$NODE")"
    wait_until 20 process_is_gone "$(node_pid "$NODE")"
    node_start "$NODE"
    [ "$(transport)" = uring ]
    for i in {1..100}; do cmp "$WORK/data$i" "$MNT/data$i"; done
}

syncs_everything() {
    head -c 3M /dev/urandom >"$WORK/three"
    cp "$WORK/three" "$MNT/three"
    "$FOREBAY" sync "$MNT"
    kill -KILL "$(node_pid "$NODE")"
    wait_until 20 process_is_gone "$(node_pid "$NODE")"
    node_start "$NODE"
    cmp "$WORK/three" "$MNT/three"
    expect_fail 'not on a mounted Forebay filesystem' "$FOREBAY" sync "$WORK"
}

posix_tests() {
    FOREBAY_RESULTS=$WORK/results bash "$ROOT/tests/suites/pjdfstest.sh" </dev/null
    grep '^ok' "$WORK/results"
    ! grep '^FAIL' "$WORK/results"
}

check "a mount falls back to /dev/fuse and says so" falls_back || exit 0
check "a mount uses rings" uses_rings || exit 0
check "locks, signals, and calls of few programs" calls
check "a hundred programs at once" many_programs
check "a killed node comes back" outlives_a_kill
check "forebay sync makes everything durable" syncs_everything
check "pjdfstest" posix_tests
check "the node stops" node_stop "$NODE"
check "a file system check finds nothing" node_fsck "$NODE"
exit 0
