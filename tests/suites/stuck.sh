#!/usr/bin/env bash
# A disk hangs: `status` answers and names the stuck locks and calls; the node recovers with the disk, and can be stopped
# while the disk hangs.
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && { skipped "all" "a plain directory has no node"; exit 0; }
MNT=$WORK/mnt
HOST=$WORK/host
DIR=$HOST/dir
DISKS=$WORK/disks
DISKS_PID=
# Time of each operation of the disk, and the time after which a call is reported as stuck.
SLOW_MS=600000
STUCK_S=45

end_disks() {
    umount -l "$HOST" 2>/dev/null
    losetup -j "$DISKS/0" | cut -d: -f1 | xargs -r losetup -d
    umount -l "$DISKS" 2>/dev/null
    # The server of the disks ends by itself once they are unmounted.
    [ -z "$DISKS_PID" ] || kill "$DISKS_PID" 2>/dev/null || true
}
trap 'end_disks; cleanup' EXIT

node_on_a_disk() {
    wait_until 10 mountpoint -q "$DISKS"
    mkfs.ext4 -q "$DISKS/0"
    mount -o loop "$DISKS/0" "$HOST"
    echo "$DIR" >>"$WORK/.nodes"
    # Calls must wait for the disk.
    timeout 60 "$FOREBAY" start "$DIR" --mount "$MNT" --mount-options strict --memory "$MEMORY" --s3 127.0.0.1:0 \
        --drive "$WORK/drive" --drive-size 256M </dev/null
    mkdir "$MNT"/many{1..12}
    echo before >"$MNT/before"
    sync "$MNT/before"
}

disk_takes() { echo "slow 0 $1" >"$DISKS/control"; }
problems() { timeout 20 "$FOREBAY" status "$DIR" --json | jq -r '.state, .problems[]'; }
says_what_is_stuck() { problems | tee "$WORK/problems" | grep -q 'has not moved for'; }

status_answers() {
    disk_takes "$SLOW_MS"
    mkdir "$MNT/waits" &
    local waits=$!
    wait_until "$STUCK_S" says_what_is_stuck
    cat "$WORK/problems"
    # Programs that wait for the disk can be killed, more of them than the mount has threads, also after a signal that one
    # catches.
    local pid many=()
    for pid in {1..12}; do stat "$MNT/many$pid/missing" & many+=($!); done
    sleep 1
    wait_until 5 is_killed TERM "$waits"
    kill -TERM "${many[@]}" 2>/dev/null || true
    for pid in "${many[@]}"; do wait_until 10 process_is_gone "$pid"; done
    python3 -c 'import os, signal, sys; signal.signal(signal.SIGUSR1, lambda *_: None); os.mkdir(sys.argv[1])' "$MNT/also" &
    sleep 1
    kill -USR1 $!
    sleep 1
    wait_until 5 is_killed KILL $!
    # With its thread, its place in the source, and where the thread waits.
    grep -qE "append to a ledger's log\" has not moved for [0-9]+ s: thread=[0-9]+ at=crates/[^ ]+; thread=[0-9]+ name=.* in [a-z_]+" "$WORK/problems"
    timeout 20 "$FOREBAY" status "$DIR" --json | jq -r '.stacks[]' >"$WORK/stacks"
    grep 'name=watchdog in ' "$WORK/stacks"
    # The watchdog looks every five seconds. Its log is on the same disk.
    sleep 6
}

# is_killed SIGNAL PID: whether the process is gone after a signal.
is_killed() { kill "-$1" "$2" 2>/dev/null || true; process_is_gone "$2"; }

log_has_stacks() { wait_until 30 grep -A 5 'threads of this process' "$DIR/log/forebay.log"; }

goes_on() {
    disk_takes 0
    wait_until 60 test -d "$MNT/waits"
    wait_until 30 is_healthy
    [ "$(cat "$MNT/before")" = before ]
}
is_healthy() { ! problems | grep -q 'has not moved'; }

# The process ends once the kernel releases it: the kernel waits for the process's requests to the disk.
is_ended() {
    local pid
    pid=$(jq -r .pid "$DIR/node.json")
    disk_takes "$SLOW_MS"
    mkdir "$MNT/again" &
    sleep 1
    timeout 60 "$FOREBAY" stop "$DIR" &
    sleep 10
    # What the command waits for: a sleep of its own, or a file on the disk.
    cat "/proc/$(pgrep -f "^$FOREBAY stop $DIR")/stack" || true
    wait $! || true
    disk_takes 0
    wait_until 60 process_is_gone "$pid"
}

mkdir -p "$HOST" "$MNT" "$DISKS" "$WORK/images"
"$XTASK" disks --dir "$WORK/images" --mount "$DISKS" --count 1 --size-mib 256 >"$LOGS/stuck-disks.log" 2>&1 </dev/null &
DISKS_PID=$!
check "a node with its metadata on a separate disk starts" node_on_a_disk || exit 0
check "status answers and names the stuck calls" status_answers
check "the node recovers with the disk" goes_on
check "the log has the stacks of all threads" log_has_stacks
check "stop ends the node while the disk does not answer" is_ended
exit 0
