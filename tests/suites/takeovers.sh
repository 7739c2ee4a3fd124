#!/usr/bin/env bash
# How long others wait when the owner of the metadata goes: FOREBAY_TAKEOVERS times, printed as a table. The victim is the machine with
# the owner of all ledgers and the leader of etcd. The wait is the longest pause of a program that creates durable files at another one.
# FOREBAY_KEEP=DIR keeps the logs of each.
LIMIT_S=7200
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
source "$(dirname "$0")/../machines.sh"
ROUNDS=${FOREBAY_TAKEOVERS:-20}
NODES=(1 2 3)
# How long a program creates files, from two seconds before the fault.
WORK_S=30

begin() {
    local node token
    for node in "${NODES[@]}"; do wait_until 30 etcd_answers "$node"; done
    for node in "${NODES[@]}"; do echo "$WORK/$node" >>"$WORK/.nodes"; done
    on 1 timeout 120 "$FOREBAY" start "$WORK/1" --log "$ENGINE?prefix=test" --drives 2 --drive-size 1GiB --profile r2 --memory "$MEMORY" \
        --address "$(address 1)" --no-s3 --no-mount </dev/null
    token=$(on 1 "$FOREBAY" token create "$WORK/1" --uses 2)
    for node in 2 3; do
        on "$node" timeout 120 "$FOREBAY" join "$token" "$WORK/$node" --drives 2 --drive-size 1GiB --name "n$node" </dev/null
        on "$node" timeout 60 "$FOREBAY" stop "$WORK/$node" </dev/null
        member_start "$node" --no-s3
    done
    wait_until 60 healthy 1
}

# etcd_says NODE METHOD BODY: an answer of a member of etcd, as JSON.
etcd_says() { on "$1" timeout 5 curl -sf "http://$(address "$1"):2379/v3/maintenance/$2" -d "$3"; }
# The leader of etcd moves to a machine.
leader_to() {
    local target at
    target=$(etcd_says "$1" status '{}' | jq -r .header.member_id)
    for at in "${NODES[@]}"; do
        if [ "$(etcd_says "$at" status '{}' | jq -r '.header.member_id == .leader')" = true ]; then
            [ "$at" = "$1" ] || etcd_says "$at" transfer-leadership "{\"targetID\": \"$target\"}"
        fi
    done
    etcd_says "$1" status '{}' | jq -e '.header.member_id == .leader' >/dev/null
}

mount_at() { mounted "$1" || on "$1" "$FOREBAY" mount "$WORK/$1" "$WORK/$1/mnt" </dev/null; }
unmount_at() { ! mounted "$1" || on "$1" "$FOREBAY" umount "$WORK/$1" </dev/null; }

stops() { on "$1" timeout 120 "$FOREBAY" stop "$WORK/$1" </dev/null >/dev/null; }
dies_alone() { machine_kill "$1"; }
dies_with_mount() { machine_kill "$1"; }

# keep_logs DIR: for a person who looks where the time went.
keep_logs() {
    local node
    mkdir -p "$1"
    for node in "${NODES[@]}"; do cp "$WORK/$node/log/forebay.log" "$1/$node.log"; done
}

# one_takeover CASE: adds the longest pause to the list of the case.
one_takeover() {
    local what=$1 victim other creates
    victim=$(owner 1) || victim=$(owner 2) || victim=$(owner 3)
    other=$((victim % 3 + 1))
    wait_until 20 leader_to "$victim"
    mount_at "$other"
    unmount_at "$victim"
    if [ "$what" = dies_with_mount ]; then
        mount_at "$victim"
        # It has a session with leases, also for the directory in which others work.
        mkdir -p "$WORK/$victim/mnt/$RANDOM" && ls "$WORK/$victim/mnt" >/dev/null
    fi
    python3 "$ROOT/tests/posix/creates.py" "$WORK/$other/mnt/creates-$RANDOM$RANDOM" "$WORK_S" >"$WORK/creates" &
    creates=$!
    sleep 2
    "$what" "$victim"
    wait "$creates"
    sed 's/.*longest pause //; s/ s$//' "$WORK/creates" >>"$WORK/$what"
    tail -1 "$WORK/$what"
    [ -z "${FOREBAY_KEEP:-}" ] || keep_logs "$FOREBAY_KEEP/$what-$(date +%s)"
    owner_is_not "$other" "$victim"
    [ "$what" = stops ] || etcd_start "$victim"
    wait_until 30 etcd_answers "$victim"
    member_start "$victim" --no-s3
    wait_until 90 healthy "$other"
}

# Medians and maxima of all cases so far.
table() {
    local what
    printf '%-18s %6s %9s %9s\n' case rounds median_s max_s
    for what in stops dies_alone dies_with_mount; do
        [ -e "$WORK/$what" ] || continue
        sort -n "$WORK/$what" | awk -v what="$what" '{ all[NR] = $1 }
            END { printf "%-18s %6d %9.1f %9.1f\n", what, NR, all[int((NR + 1) / 2)], all[NR] }'
    done
}

# takeovers CASE ROUNDS MEDIAN_MAX MAX: repeats it, and compares with the aims.
takeovers() {
    local round
    for ((round = 0; round < $2; round++)); do one_takeover "$1"; done
    table
    sort -n "$WORK/$1" | awk -v median="$3" -v most="$4" '{ all[NR] = $1 } END { exit !(all[int((NR + 1) / 2)] <= median && all[NR] <= most) }'
}

machines_begin
for node in "${NODES[@]}"; do etcd_start "$node"; done
check "three machines" begin || exit 1
check "owners stop in order" takeovers stops "$(((ROUNDS + 3) / 4))" 1 2
check "machines of owners die" takeovers dies_alone "$ROUNDS" 5 10
check "machines of owners die together with a mount" takeovers dies_with_mount "$(((ROUNDS + 3) / 4))" 20 20
table | tee "$FOREBAY_LOGS/takeovers.txt"
