#!/usr/bin/env bash
# The logs of the metadata are lost for good: they begin anew behind what a node has of them, and all nodes follow.
LIMIT_S=$([ "${FOREBAY_TEST_LONG:-0}" = 1 ] && echo 900 || echo 300)
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
source "$(dirname "$0")/../machines.sh"
NODES=(1 2 3)

log_at() { on "$1" timeout 30 "$FOREBAY" log show "$WORK/$1" --json | jq -er .at; }
recover() { on "$1" timeout 150 "$FOREBAY" cluster recover "$WORK/$1" "${@:2}"; }
trap 'end_etcd; machines_end; cleanup' EXIT

is_owner() { [ "$(owner "$2")" = "$1" ]; }
all_same() {
    local node
    for node in "$@"; do
        wait_until 30 mounted "$node"
        same_tree "$WORK/tree" "$WORK/$node/mnt/tree"
    done
}

begin() {
    local token node
    for node in 1 2 3; do echo "$WORK/$node" >>"$WORK/.nodes"; done
    on 1 timeout 120 "$FOREBAY" start "$WORK/1" --drives 2 --drive-size 512MiB --profile r2 --mount "$WORK/1/mnt" --mount-options process=own \
        --memory "$MEMORY" --address "$(address 1)" </dev/null
    expect_fail "not in an engine" recover 1
    token=$(on 1 "$FOREBAY" token create "$WORK/1" --uses 2)
    for node in 2 3; do
        on "$node" timeout 120 "$FOREBAY" join "$token" "$WORK/$node" --drives 2 --drive-size 512MiB --name "n$node" </dev/null
        on "$node" "$FOREBAY" mount "$WORK/$node" "$WORK/$node/mnt"
    done
    on 1 "$FOREBAY" fs set "$WORK/1" main --profile r3
    on 1 timeout 150 "$FOREBAY" log move "$WORK/1" etcd
    wait_until 60 follows 3 2
    stage_tree 200 "$WORK/tree"
    cp -a "$WORK/tree" "$WORK/2/mnt/tree"
    sync_files "$WORK/2/mnt/tree"
    wait_until 60 healthy 3
}

# Nothing is lost, or another node would lose more.
refused() {
    local here
    here=$(owner 2)
    expect_fail "another process uses|is running|locked" recover "$here"
    on "$here" timeout 60 "$FOREBAY" stop "$WORK/$here" </dev/null
    expect_fail "nothing is to be recovered" recover "$here"
    member_start "$here"
    wait_until 60 healthy "$here"
}

# All members of etcd have lost their data while the nodes run.
all_data_lost() {
    local node here first
    sleep 3
    here=$(owner 1) first=$here
    for node in 1 2 3; do rm -r "$WORK/$node"/engine/etcd-*; done
    pkill -KILL -f "data-dir $WORK/"
    sleep 2
    on "$here" timeout 60 "$FOREBAY" stop "$WORK/$here" </dev/null || true
    # A standby may have stored more than the owner, which tells its number.
    if ! recover "$here" >"$WORK/looked" 2>&1; then
        cat "$WORK/looked"
        here=$(($(sed -n 's/.*: node \([0-9]\) has more.*recover there.*/\1/p' "$WORK/looked") + 1))
        on "$here" timeout 60 "$FOREBAY" stop "$WORK/$here" </dev/null || true
        recover "$here" >"$WORK/looked"
    fi
    cat "$WORK/looked"
    grep -q "nothing was changed" "$WORK/looked"
    [ "$(grep -c " main " "$WORK/looked")" = 3 ]
    recover "$here" --yes --json | jq -e '.log | test("run=own.*prefix=forebay/.*[.]256$")'
    expect_fail "nothing is to be recovered" recover "$here" --yes
    member_start "$here"
    [ "$first" = "$here" ] || member_start "$first"
    for node in 1 2 3; do wait_until 60 is_owner "$here" "$node"; done
    all_same 1 2 3
    # Names of the last second may be gone, and numbers that they had come back to nobody.
    status 1 | jq -e 'any(.problems[]; test("meta settle"))'
    works_again after
    for node in 1 2 3; do [ "$node" = "$here" ] || [ -e "$WORK/$node/meta/ledger-0/state.former" ]; done
}
# works_again NAME: nothing is in doubt any more, machines see each other's new file, and any machine may be lost again.
works_again() {
    local node
    on 1 "$FOREBAY" meta settle "$WORK/1"
    echo "$1" >"$WORK/3/mnt/$1"
    sync "$WORK/3/mnt/$1"
    [ "$(cat "$WORK/2/mnt/$1")" = "$1" ]
    for node in 1 2 3; do wait_until 90 has_all_members "$node"; done
    wait_until 90 healthy 1
    wait_until 60 follows 3 2
}
has_all_members() { log_at "$1" | grep -q "$(address 1):7741,$(address 2):7741,$(address 3):7741"; }

# Two machines are lost, and come back later with logs of their own that have a majority.
one_left() {
    local node
    for node in 2 3; do machine_kill "$node"; done
    on 1 timeout 60 "$FOREBAY" stop "$WORK/1" </dev/null || true
    expect_fail "node 2 does not answer" recover 1 --yes --without 1
    recover 1 --yes --without 1,2
    member_start 1
    wait_until 60 is_owner 1 1
    on 1 "$FOREBAY" mount "$WORK/1" "$WORK/1/mnt" 2>/dev/null || mounted 1
    all_same 1
    # The others meet each other first.
    link 1 down
    for node in 2 3; do member_start "$node" & done
    wait
    wait_until 60 one_of_them_owns
    link 1 up
    for node in 1 2 3; do wait_until 60 is_owner 1 "$node"; done
    all_same 1 2 3
    works_again again
    # It is a cluster like any other.
    beside 2 machine_kill 1
    owner_is_not 2 1
    member_start 1
    wait_until 90 healthy 1
    all_same 1 2 3
}
one_of_them_owns() { is_owner 2 2 || is_owner 3 3; }

whole() {
    local node
    on 1 timeout 200 "$FOREBAY" fsck "$WORK/1" </dev/null
    for node in 1 2 3; do on "$node" timeout 60 "$FOREBAY" stop "$WORK/$node" </dev/null; done
    for node in 2 3 1; do member_start "$node" & done
    wait
    wait_until 90 healthy 1
    all_same 1 2 3
    for node in 1 2 3; do on "$node" timeout 60 "$FOREBAY" stop "$WORK/$node" </dev/null; done
}

# An etcd of the operator, which is put back from a backup.
one_etcd() {
    setsid nsenter --net="/run/netns/$PREFIX-1" etcd --data-dir "$WORK/etcd" --listen-client-urls "http://$(address 1):2379" \
        --advertise-client-urls "http://$(address 1):2379" --logger zap --log-outputs "$WORK/etcd.log" </dev/null >/dev/null 2>&1 &
    disown
    wait_until 30 etcd_answers 1
}
one_etcd_ends() { pkill -KILL -f "data-dir $WORK/etcd " && wait_until 10 not pgrep -f "data-dir $WORK/etcd "; }
restored() {
    local dir=$WORK/other
    echo "$dir" >>"$WORK/.nodes"
    one_etcd
    on 1 timeout 120 "$FOREBAY" start "$dir" --log "etcd://$(address 1):2379" --drives 2 --drive-size 512MiB --profile r2 --memory "$MEMORY" \
        --address "$(address 1):7800" --mount "$dir/mnt" </dev/null
    cp -a "$WORK/tree" "$dir/mnt/tree"
    sync_files "$dir/mnt/tree"
    # A backup of the log.
    one_etcd_ends
    cp -a "$WORK/etcd" "$WORK/backup"
    one_etcd
    wait_until 30 writes "$dir/mnt/later"
    sleep 2
    one_etcd_ends
    rm -r "$WORK/etcd"
    mv "$WORK/backup" "$WORK/etcd"
    one_etcd
    on 1 timeout 60 "$FOREBAY" stop "$dir" </dev/null || true
    on 1 timeout 150 "$FOREBAY" cluster recover "$dir" | grep "went backwards"
    on 1 timeout 150 "$FOREBAY" cluster recover "$dir" --yes
    on 1 timeout 120 "$FOREBAY" start "$dir" </dev/null
    wait_until 30 mountpoint -q "$dir/mnt"
    same_tree "$WORK/tree" "$dir/mnt/tree"
    [ "$(cat "$dir/mnt/later")" = later ]
    on 1 "$FOREBAY" meta settle "$dir"
    on 1 timeout 200 "$FOREBAY" fsck "$dir" </dev/null
    on 1 timeout 60 "$FOREBAY" stop "$dir" </dev/null
}
writes() { timeout 20 sh -c 'echo later >"$1" && sync "$1"' - "$1"; }

machines_begin
check "three machines, their metadata in an etcd of Forebay" begin || exit 1
check "what is not lost is not recovered" refused
check "all members of etcd have lost their data" all_data_lost || exit 1
check "one machine is left; the others return with a majority of the old logs" one_left
check "all is whole, and starts again as it was" whole
check "an etcd is put back from a backup" restored
