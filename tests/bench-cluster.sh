#!/usr/bin/env bash
# bench-cluster.sh [--quick]: a cluster of three machines with drives and one without, each a network namespace, its logs in etcd, beside a
# single node with its logs in files. All share the processors and the disk of this machine, so that costs per operation say more than rates.
# A cost is the CPU time of all processes of Forebay that take part, at all machines; that of etcd is shown by itself.
set -o pipefail
QUICK=${1:-}
source "$(dirname "$0")/lib.sh"
source "$(dirname "$0")/machines.sh"
NODES=(1 2 3 4 5)
JOBS=(1 16 64 256)
set -e
trap 'set +e; pkill -KILL -f "data-dir $WORK/" 2>/dev/null; machines_end; cleanup' EXIT

begin() {
    local token node
    machines_begin
    for node in 1 2 3; do etcd_start "$node"; done
    for node in 1 2 3; do wait_until 30 etcd_answers "$node"; done
    for node in "${NODES[@]}"; do echo "$WORK/$node" >>"$WORK/.nodes"; done
    on 1 "$FOREBAY" start "$WORK/1" --log "$ENGINE?prefix=test" --drives 2 --drive-size 2GiB --profile r2 --address "$(address 1)" --no-s3 \
        --mount "$WORK/1/mnt" --mount-options process=own </dev/null >/dev/null
    token=$(on 1 "$FOREBAY" token create "$WORK/1" --uses 2)
    for node in 2 3; do
        on "$node" "$FOREBAY" join "$token" "$WORK/$node" --drives 2 --drive-size 2GiB --name "n$node" </dev/null >/dev/null
    done
    on 2 "$FOREBAY" mount "$WORK/2" "$WORK/2/mnt" </dev/null >/dev/null
    token=$(on 1 "$FOREBAY" token create "$WORK/1" --role client --squash none)
    on 4 "$FOREBAY" join "$token" "$WORK/4" </dev/null >/dev/null
    on 4 "$FOREBAY" mount "$WORK/4" "$WORK/4/mnt" </dev/null >/dev/null
    on 5 "$FOREBAY" start "$WORK/5" --drives 6 --drive-size 2GiB --profile r2 --no-s3 --mount "$WORK/5/mnt" --mount-options process=own </dev/null >/dev/null
    wait_until 60 healthy 1
}

# pids MACHINE…: all processes of Forebay there, joined by +.
pids() {
    local node
    for node in "$@"; do ip netns pids "$PREFIX-$node"; done | while read -r pid; do
        [ "$(readlink "/proc/$pid/exe")" != "$(readlink -f "$FOREBAY")" ] || echo "$pid"
    done | paste -sd+
}
commits() { on "$1" "$FOREBAY" metrics "$WORK/$1" | awk '/^forebay_filesystem_commits_total/ { sum += $2 } END { print sum }'; }
etcd_ticks() { local pid sum=0; for pid in $(pgrep -f "data-dir $WORK/"); do sum=$((sum + $(awk '{ print $14 + $15 }' "/proc/$pid/stat"))); done; echo "$sum"; }

# bench OPTIONS…: a JSON object for each figure.
bench() { "$XTASK" bench --dir "$WORK" ${QUICK:+--quick} --json "$@" 2>>"$WORK/bench.log" | jq -c '.[]' || { tail "$WORK/bench.log" >&2 && return 1; }; }

# measure NAME MACHINE PROCESSES: all figures of the mount at a machine.
measure() {
    local name=$1 node=$2 processes=$3 jobs before ticks at=1
    [ "$node" != 5 ] || at=5
    echo "measuring $name" >&2
    mkdir "$WORK/$node/mnt/bench-$name"
    for jobs in "${JOBS[@]}"; do
        before=$(commits "$at") ticks=$(etcd_ticks)
        bench --given "$name=$WORK/$node/mnt/bench-$name=$processes" --parts creates --jobs "$jobs" >"$WORK/figure"
        jq -c --argjson commits "$(($(commits "$at") - before))" --argjson ticks "$(($(etcd_ticks) - ticks))" \
            '. + {commits_per_operation: ($commits / .operations), etcd_us_per_operation: ($ticks * 10000 / .operations)}' "$WORK/figure"
    done
    bench --given "$name=$WORK/$node/mnt/bench-$name=$processes" --parts data,fsync --jobs 1,16
    rm -r "$WORK/$node/mnt/bench-$name"
}

begin
{
    measure files 5 "$(pids 5)"
    measure owner 1 "$(pids 1 2 3)"
    measure node 2 "$(pids 1 2 3)"
    measure client 4 "$(pids 1 2 3 4)"
} >"$WORK/figures"
jq -s -r '
    def short: if . >= 100000 then "\(. / 1000 | round)k" elif . >= 100 then round else . * 10 | round / 10 end | tostring;
    (map(.subject) | reduce .[] as $it ([]; if index($it) then . else . + [$it] end)) as $subjects
    | (map(.name) | reduce .[] as $it ([]; if index($it) then . else . + [$it] end)) as $names
    | . as $all
    | def cell($name; $subject): first($all[] | select(.name == $name and .subject == $subject)) // null;
      (["", ($subjects[] | "\(.): rate", "CPU us/op", "commits/op", "etcd us/op")] | join("|")),
      ($names[] as $name | [$name, ($subjects[] as $subject | cell($name; $subject)
        | if . == null then "-", "-", "-", "-" else
            "\(.rate | short) \(if .bytes > 0 then "MB/s" else "/s" end)",
            "\(.cpu_us_per_operation | short)",
            (if .commits_per_operation then "\(.commits_per_operation * 1000 | round / 1000)" else "-" end),
            (if .etcd_us_per_operation then "\(.etcd_us_per_operation | short)" else "-" end) end)] | join("|"))
    ' "$WORK/figures" | column -t -s '|'
echo
echo "files: one node, 6 drives, r2, logs in files; owner, node, client: mounts at the machine with the metadata, at another one with drives, and at one"
echo "without; 3 machines with 2 drives each, r2, logs in etcd. CPU: of all processes of Forebay at all machines, a 1 MiB read or write is an operation."
exit 0
