#!/usr/bin/env bash
# Two machines with drives and a witness: any of the three may be lost. A third machine with drives takes the seat of the witness.
LIMIT_S=$([ "${FOREBAY_TEST_LONG:-0}" = 1 ] && echo 900 || echo 240)
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
source "$(dirname "$0")/../machines.sh"
NODES=(1 2 3 4)

trap 'end_etcd; machines_end; cleanup' EXIT

# Writes go on while one of the two is away.
begin() {
    local token
    for node in 1 2 3; do echo "$WORK/$node" >>"$WORK/.nodes"; done
    on 1 timeout 120 "$FOREBAY" start "$WORK/1" --drives 2 --drive-size 512MiB --profile 2/1/1 --mount "$WORK/1/mnt" --mount-options process=own \
        --memory "$MEMORY" --address "$(address 1)" </dev/null
    token=$(on 1 "$FOREBAY" token create "$WORK/1")
    on 2 timeout 120 "$FOREBAY" join "$token" "$WORK/2" --drives 2 --drive-size 512MiB --name n2 </dev/null
    on 2 "$FOREBAY" mount "$WORK/2" "$WORK/2/mnt"
    stage_tree 200 "$WORK/tree"
    cp -a "$WORK/tree" "$WORK/2/mnt/tree"
    sync_files "$WORK/2/mnt/tree"
    on 1 "$FOREBAY" fs balance "$WORK/1" main
    expect_fail "needs 3 nodes.* --role witness" on 2 timeout 60 "$FOREBAY" log move "$WORK/2" etcd
}

joins() {
    local token
    expect_fail "limit clients" on 1 "$FOREBAY" token create "$WORK/1" --role witness --ro
    token=$(on 1 "$FOREBAY" token create "$WORK/1" --role witness)
    on 1 "$FOREBAY" token list "$WORK/1" --json | jq -e '.[-1] | .role == "witness" and .state == "valid"'
    expect_fail "which have no drives" on 3 "$FOREBAY" join "$token" "$WORK/3" --drives 1
    on 3 timeout 120 "$FOREBAY" join "$token" "$WORK/3" --name w </dev/null | grep "has joined as a witness"
    on 2 "$FOREBAY" node list "$WORK/2" --json | jq -e '.[2] | .witness and .drives == 0 and .state == "up" and .s3 == null'
    on 2 "$FOREBAY" node list "$WORK/2" | grep "^.*w .*witness"
    expect_fail "is a witness, which has no drives" on 3 "$FOREBAY" drive add "$WORK/3"
    expect_fail "is a witness, which mounts nothing" on 3 "$FOREBAY" mount "$WORK/3" "$WORK/3/mnt"
    # It has no keys of the cluster.
    not cmp "$WORK/3/node.key" "$WORK/1/node.key"
}

moves() {
    under 2 on 2 timeout 150 "$FOREBAY" log move "$WORK/2" etcd
    wait_until 60 follows 2 1
    wait_until 90 healthy 1
    etcd_runs 3
    [ ! -e "$WORK/3/identity/authority-key.pem" ] && [ ! -e "$WORK/3/meta" ]
    # All of it, without the program.
    [ "$(du -sm --apparent-size "$WORK/3" | cut -f1)" -lt 200 ]
    echo "memory in KiB: $(memory_kib "$(member_pid 3)") and etcd $(memory_kib "$(etcd_pid 3)")"
    [ "$(memory_kib "$(member_pid 3)")" -lt 100000 ]
    for node in 1 2 3; do wait_until 60 may_stop "$node"; done
}
memory_kib() { awk '/^RssAnon/ { print $2 }' "/proc/$1/status"; }
may_stop() { on 2 "$FOREBAY" node stop-check "$WORK/2" $(($1 - 1)); }

# The machine with the metadata dies: the other one goes on, because the witness votes.
owner_dies() {
    beside 2 machine_kill 1
    [ "$(owner 2)" = 2 ]
    same_tree "$WORK/tree" "$WORK/2/mnt/tree"
    member_start 1 --out-after 8
    wait_until 30 mounted 1
    wait_until 90 healthy 1
    same_tree "$WORK/tree" "$WORK/1/mnt/tree"
}

# It owns nothing, however long it is the only one beside a majority.
witness_dies() {
    beside 2 machine_kill 3
    status 2 | jq -e 'any(.problems[]; test("1 of 3 members of the etcd.*192.0.2.3:7741; without 1 more"))'
    expect_fail "2 of 3|1 of 3 members, and needs 2" on 2 "$FOREBAY" node stop-check "$WORK/2" 0
    member_start 3
    wait_until 90 healthy 2
    etcd_runs 3
}

# The processes of both others are gone, their members of etcd are not: it could take the metadata, and does not.
alone() {
    member_kill 1
    member_kill 2
    etcd_runs 1 && etcd_runs 2
    sleep 10
    on 3 timeout 30 "$FOREBAY" status "$WORK/3" --json | jq -e '.state != "healthy"'
    [ ! -e "$WORK/3/meta" ]
    not grep -q "taking them" "$WORK/3/log/forebay.log"
    for node in 1 2; do member_start "$node" --out-after 8; done
    wait_until 90 healthy 1
    for node in 1 2; do wait_until 30 mounted "$node" && same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
}

# A third machine with drives has the vote then, and the witness may go.
replaced() {
    local token
    token=$(on 1 "$FOREBAY" token create "$WORK/1")
    on 4 timeout 120 "$FOREBAY" join "$token" "$WORK/4" --drives 2 --drive-size 512MiB --name n4 </dev/null
    echo "$WORK/4" >>"$WORK/.nodes"
    # It is not there yet: the witness votes on.
    member_kill 4
    sleep 8
    etcd_runs 3
    on 1 "$FOREBAY" log show "$WORK/1" --json | jq -e '.at | contains("192.0.2.3")'
    member_start 4
    on 4 "$FOREBAY" mount "$WORK/4" "$WORK/4/mnt"
    wait_until 60 etcd_runs 4
    wait_until 60 etcd_is_gone 3
    wait_until 60 follows 2 2
    on 1 "$FOREBAY" node remove "$WORK/1" 2 </dev/null
    wait_until 90 healthy 1
    beside 4 machine_kill 1
    owner_is_not 4 1
    same_tree "$WORK/tree" "$WORK/4/mnt/tree"
    member_start 1
    wait_until 30 mounted 1
    wait_until 90 healthy 4
    on 4 timeout 200 "$FOREBAY" fsck "$WORK/4" </dev/null
}
etcd_is_gone() { [ ! -e "$WORK/$1/engine" ] && ! pgrep -f "data-dir $WORK/$1/" >/dev/null; }

machines_begin
check "two machines share a filesystem, and need a third for an engine" begin || exit 1
check "a witness joins, and stores, mounts and serves nothing" joins || exit 1
check "the logs move into an etcd with a member on the witness, under load" moves || exit 1
check "the machine with the metadata dies, and the other one goes on" owner_dies
check "the witness dies, and nobody waits" witness_dies
check "a witness alone takes nothing" alone
check "a third machine with drives takes the seat of the witness" replaced
