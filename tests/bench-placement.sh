#!/usr/bin/env bash
# bench-placement.sh [--quick]: what `--placement local` changes where the network is slower than the drives. Three machines, each a network
# namespace, with links of 1 Gbit/s; two filesystems of copies, one with each placement. One machine writes a file and reads it. Rates, and
# bytes through that machine's link for each byte of the file; medians, the placements in turns.
set -o pipefail
QUICK=${1:-}
source "$(dirname "$0")/lib.sh"
source "$(dirname "$0")/machines.sh"
NODES=(1 2 3)
MIB=$([ -n "$QUICK" ] && echo 128 || echo 512)
ROUNDS=$([ -n "$QUICK" ] && echo 3 || echo 7)
RATE=1gbit
set -e

begin() {
    local token node placement
    machines_begin
    for node in "${NODES[@]}"; do
        # Both directions: what leaves the machine, and what the switch sends to it.
        tc -n "$PREFIX-$node" qdisc add dev eth0 root tbf rate $RATE burst 256kb latency 50ms
        tc -n "$PREFIX-switch" qdisc add dev "port$node" root tbf rate $RATE burst 256kb latency 50ms
        echo "$WORK/$node" >>"$WORK/.nodes"
    done
    on 1 "$FOREBAY" start "$WORK/1" --drives 2 --drive-size 4GiB --profile r2 --address "$(address 1)" --no-s3 --no-mount </dev/null >/dev/null
    token=$(on 1 "$FOREBAY" token create "$WORK/1" --uses 2)
    for node in 2 3; do
        on "$node" "$FOREBAY" join "$token" "$WORK/$node" --drives 2 --drive-size 4GiB --name "n$node" </dev/null >/dev/null
    done
    for placement in spread local; do
        on 1 "$FOREBAY" fs create "$WORK/1" "$placement" --profile r2 --placement "$placement" >/dev/null
        mkdir "$WORK/$placement"
    done
    wait_until 60 healthy 1
    sleep 2
}
seconds() { awk -v from="$1" -v to="$EPOCHREALTIME" 'BEGIN { print to - from }'; }
link_bytes() { ip -n "$PREFIX-2" -s -j link show eth0 | jq '.[0].stats64 | .rx.bytes + .tx.bytes'; }
mounted_at() { on 2 "$FOREBAY" mount "$WORK/2" "$WORK/$1" --fs "$1" </dev/null >/dev/null; }
unmounted() { on 2 "$FOREBAY" umount "$WORK/2" --fs "$1" </dev/null >/dev/null; }

# measured PLACEMENT write|read COMMAND…: prints a line of JSON.
measured() {
    local placement=$1 what=$2 start before
    shift 2
    before=$(link_bytes) start=$EPOCHREALTIME
    "$@"
    jq -nc --arg placement "$placement" --arg what "$what" --argjson mib "$MIB" --argjson s "$(seconds "$start")" \
        --argjson bytes "$(($(link_bytes) - before))" \
        '{placement: $placement, what: $what, rate: ($mib * 1.048576 / $s), link: ($bytes / $mib / 1048576)}'
}
copied_in() { dd if="$WORK/data" of="$1" bs=1M conv=fsync status=none; }
copied_out() { dd if="$1" of=/dev/null bs=1M status=none; }

begin
head -c "${MIB}M" /dev/urandom >"$WORK/data"
for ((round = 0; round < ROUNDS; round++)); do
    for placement in spread local; do
        mounted_at "$placement"
        measured "$placement" write copied_in "$WORK/$placement/file"
        # Nothing of it is in a cache then.
        unmounted "$placement"
        mounted_at "$placement"
        measured "$placement" read copied_out "$WORK/$placement/file"
        rm "$WORK/$placement/file"
        unmounted "$placement"
    done
done >"$WORK/figures"
jq -s -r '
    def median: sort | .[length / 2 | floor];
    . as $all
    | ["", "spread", "local", "local/spread", "spread: bytes on the link per byte", "local"],
      (("write", "read") as $what | [$what]
        + ([("spread", "local") as $placement | [$all[] | select(.what == $what and .placement == $placement)] | {rate: (map(.rate) | median), link: (map(.link) | median)}]
          | ["\(.[0].rate | round) MB/s", "\(.[1].rate | round) MB/s", "\(.[1].rate / .[0].rate * 100 | round / 100)",
             "\(.[0].link * 100 | round / 100)", "\(.[1].link * 100 | round / 100)"]))
    | join("|")' "$WORK/figures" | column -t -s '|'
echo
echo "r2, three machines with two drives each, links of $RATE, a file of $MIB MiB written with an fsync and read after a new mount at one machine; medians of $ROUNDS."
exit 0
