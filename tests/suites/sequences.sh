#!/usr/bin/env bash
# Short sequences of commands that went wrong once, found by the larger suites and reduced.
source "$(dirname "$0")/../lib.sh"

# A client that knows the map of a file's end only, because nothing else was read since the start, then overwrites all.
overwrite_after_reading_the_middle() {
    local file=$MNT/middle
    head -c 1M /dev/urandom >"$WORK/new"
    head -c 1M /dev/urandom >"$file"
    node_stop "$NODE"
    node_start "$NODE"
    dd if="$file" of=/dev/null bs=4k skip=100 count=1 iflag=direct
    dd if="$WORK/new" of="$file" bs=1M conv=notrunc,fsync
    dd if="$file" of="$WORK/found" bs=4k skip=120 count=10 iflag=direct
    cmp "$WORK/found" <(dd if="$WORK/new" bs=4k skip=120 count=10 status=none)
}

# Superseded bytes must give way to new ones: the file is a small part of the drive throughout.
overwrite_many_times() {
    local i
    head -c 2M /dev/urandom >"$WORK/two"
    for ((i = 1; i <= 200; i++)); do
        dd if="$WORK/two" of="$MNT/again" bs=1M conv=notrunc,fsync status=none || {
            echo "failed in round $i"
            df "$MNT"
            return 1
        }
    done
    cmp "$WORK/two" "$MNT/again"
}

create_and_delete_many_times() {
    local i
    head -c 2M /dev/urandom >"$WORK/two"
    for ((i = 1; i <= 200; i++)); do
        dd if="$WORK/two" of="$MNT/once" bs=1M conv=fsync status=none || {
            echo "failed in round $i"
            df "$MNT"
            return 1
        }
        rm "$MNT/once"
    done
}

# O_RDONLY|O_TRUNC is a write: a program that runs is not cut.
truncate_a_running_program() {
    local status=0
    cp "$(command -v sleep)" "$MNT/program"
    "$MNT/program" 20 &
    wait_until 5 grep -qs program "/proc/$!/comm"
    perl -MFcntl -e 'sysopen(F, $ARGV[0], O_RDONLY | O_TRUNC) and exit 1; $!{ETXTBSY} or exit 2' "$MNT/program" || status=$?
    kill $!
    wait $! || true
    echo "status $status: 1 is opened, 2 is another error"
    [ "$status" = 0 ]
    # The kernel may refuse after the filesystem has truncated: what counts is what is stored.
    node_stop "$NODE"
    node_start "$NODE"
    cmp "$(command -v sleep)" "$MNT/program"
}

# A second process must find out before it touches anything, whatever happened to the lock file.
deleted_lock_file() {
    echo precious >"$MNT/precious"
    sync "$MNT/precious"
    rm "$WORK/$NODE/lock"
    expect_fail 'in use by another process' "$FOREBAY" start "$WORK/$NODE"
    "$FOREBAY" status "$WORK/$NODE" --json | jq -e '.state == "healthy"' >/dev/null
    kill -TERM "$(node_pid "$NODE")"
    wait_until 20 not test -e "$WORK/$NODE/node.json"
    node_start "$NODE"
    grep -qx precious "$MNT/precious"
}

# Every sequence has a small node of its own, so that none depends on what another left behind.
sequence() {
    local name=$1
    shift
    NODE=$1
    MNT=$WORK/$1/mnt
    check "$name" on_a_node "$1"
    [ "$PLAIN" = 1 ] || node_end "$WORK/$1"
    rm -rf --one-file-system "${WORK:?}/$1"
}

on_a_node() {
    node_start "$1" --drives 1 --drive-size 64M --profile 1+0
    "$1"
    node_fsck "$1"
    node_stop "$1"
    node_fsck "$1"
}

sequence "overwriting after a read in the middle" overwrite_after_reading_the_middle
sequence "overwriting 200 times what fits ten times" overwrite_many_times
sequence "creating and deleting 200 times what fits ten times" create_and_delete_many_times
sequence "a running program is not truncated by O_RDONLY|O_TRUNC" truncate_a_running_program
sequence "a deleted lock file does no harm" deleted_lock_file
exit 0
