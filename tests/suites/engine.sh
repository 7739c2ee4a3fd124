#!/usr/bin/env bash
# Forebay runs an etcd of its own on three machines: made by one command, it survives the loss of any of them, and comes back with it.
LIMIT_S=$([ "${FOREBAY_TEST_LONG:-0}" = 1 ] && echo 900 || echo 240)
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
source "$(dirname "$0")/../machines.sh"
NODES=(1 2 3 4)

log_at() { on "$1" timeout 30 "$FOREBAY" log show "$WORK/$1" --json | jq -er .at; }
no_etcd_runs() { ! pgrep -f "data-dir $WORK/" >/dev/null; }
trap 'end_etcd; machines_end; cleanup' EXIT

# etcdctl NODE ARGUMENTS…: at the member of a node, with the certificate of that node.
members() {
    on "$1" timeout 10 curl -sf --cacert "$WORK/$1/engine/authority.pem" --cert "$WORK/$1/engine/certificate.pem" --key "$WORK/$1/engine/key.pem" \
        "https://$(address "$1"):7741/v3/cluster/member/list" -d '{}' | jq -r '.members[].name' | sort | xargs
}

begin() {
    local token
    for node in 1 2 3; do echo "$WORK/$node" >>"$WORK/.nodes"; done
    on 1 timeout 120 "$FOREBAY" start "$WORK/1" --drives 2 --drive-size 512MiB --profile r2 --mount "$WORK/1/mnt" --mount-options process=own \
        --memory "$MEMORY" --address "$(address 1)" </dev/null
    token=$(on 1 "$FOREBAY" token create "$WORK/1" --uses 2)
    on 2 timeout 120 "$FOREBAY" join "$token" "$WORK/2" --drives 2 --drive-size 512MiB --name n2 </dev/null
    expect_fail "needs 3 nodes" on 2 timeout 60 "$FOREBAY" log move "$WORK/2" etcd
    on 3 timeout 120 "$FOREBAY" join "$token" "$WORK/3" --drives 2 --drive-size 512MiB --name n3 </dev/null
    for node in 2 3; do on "$node" "$FOREBAY" mount "$WORK/$node" "$WORK/$node/mnt"; done
    expect_fail "it alone has the metadata" on 2 "$FOREBAY" node stop-check "$WORK/2" 0
    expect_fail "no such node" on 2 "$FOREBAY" node stop-check "$WORK/2" 7
    on 1 "$FOREBAY" fs set "$WORK/1" main --profile 4+2
    stage_tree 200 "$WORK/tree"
    cp -a "$WORK/tree" "$WORK/2/mnt/tree"
    sync_files "$WORK/2/mnt/tree"
}

voters() {
    on "$1" timeout 10 curl -sf --cacert "$WORK/$1/engine/authority.pem" --cert "$WORK/$1/engine/certificate.pem" --key "$WORK/$1/engine/key.pem" \
        "https://$(address "$1"):7741/v3/cluster/member/list" -d '{}' | jq '[.members[] | select(.isLearner | not)] | length'
}

# Ports are in use: the command says so, and the next try begins anew.
listens() { on 1 timeout 2 bash -c "exec 3<>/dev/tcp/$(address "$1")/7742" 2>/dev/null; }
refused() {
    local node worked=0
    for node in 2 3; do
        on "$node" python3 -m http.server --bind "$(address "$node")" 7742 >/dev/null 2>&1 &
    done
    for node in 2 3; do wait_until 20 listens "$node"; done
    expect_fail "no engine could be made: node 1 .*address already in use" on 1 timeout 150 "$FOREBAY" log move "$WORK/1" etcd || worked=1
    pkill -f "http.server --bind"
    [ "$(log_at 2)" = files ]
    [ "$worked" = 0 ]
}

moves() {
    beside 1 moves_beside_two
    log_at 3 | grep -q "run=own"
    wait_until 60 follows 2 2
    wait_until 60 healthy 1
    [ "$(members 2)" = "node-0 node-1 node-2" ]
    # What was on the first machine alone is spread by then.
    for node in 1 2 3; do wait_until 90 may_stop "$node"; done
    for node in 1 2 3; do etcd_runs "$node" && same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
    # Without a certificate of the engine's authority, nobody gets in: that of a node is none.
    not on 2 timeout 10 curl -sf -k "https://$(address 1):7741/health"
    not on 2 timeout 10 curl -sf -k --cert "$WORK/2/identity/certificate.pem" --key "$WORK/2/identity/key.pem" "https://$(address 1):7741/health"
}
may_stop() { on 2 "$FOREBAY" node stop-check "$WORK/2" $(($1 - 1)); }
moves_beside_two() { under 2 on 2 timeout 150 "$FOREBAY" log move "$WORK/2" etcd; }

machine_dies() {
    beside 3 machine_kill 1
    owner_is_not 3 1
    not etcd_runs 1
    status 3 | jq -e '.state == "degraded" and any(.problems[]; test("1 of 3 members of the etcd.*192.0.2.1:7741; without 1 more"))'
    # The second one of three, of 4+2.
    expect_fail "node 1 must not be stopped now" on 3 "$FOREBAY" node maintenance "$WORK/3" 1 --for 1h
    expect_fail "content of filesystem main could not be read" on 3 "$FOREBAY" node stop-check "$WORK/3" 1
    { on 3 "$FOREBAY" node stop-check "$WORK/3" 1 --json || true; } | jq -e 'any(.stops[]; test("1 of 3 members, and needs 2"))'
    on 3 "$FOREBAY" node stop-check "$WORK/3" 0
    member_start 1 --out-after 8
    wait_until 30 mounted 1
    etcd_runs 1
    wait_until 90 healthy 1
}

# The process of a node and its member of etcd do not need each other.
process_dies() {
    local pid
    pid=$(etcd_pid 2)
    member_kill 2
    etcd_runs 2
    member_start 2 --out-after 8
    [ "$(etcd_pid 2)" = "$pid" ]
    kill -KILL "$pid"
    wait_until 20 etcd_is_new "$pid"
    wait_until 90 healthy 2
    [ "$(members 2)" = "node-0 node-1 node-2" ]
}
etcd_is_new() { etcd_runs 2 && [ "$(etcd_pid 2)" != "$1" ]; }

# The node that owns the metadata is going to be away: another one takes that over, and programs hardly notice.
owner_leaves() {
    local was id
    was=$(owner 2)
    id=$((was - 1))
    expect_fail "between a second and 7 days" on 2 "$FOREBAY" node maintenance "$WORK/2" "$id" --for 8d
    beside 3 on 2 "$FOREBAY" node maintenance "$WORK/2" "$id" --for 1h
    wait_until 20 moved_from "$was"
    on 2 "$FOREBAY" node list "$WORK/2" --json | jq -e --argjson id "$id" 'any(.[]; .id == $id and .maintenance_s > 3500)'
    on 2 "$FOREBAY" node maintenance "$WORK/2" "$id" --end | grep -q "not in maintenance"
    wait_until 60 healthy 2
    wait_until 60 follows 2 2
}

# An operator names the next owner.
owner_is_named() {
    local was next
    was=$(owner 2)
    next=$((was % 3 + 1))
    on 2 "$FOREBAY" ledger list "$WORK/2" --json | jq -e --argjson owner $((was - 1)) 'map(.ledger) == ["cluster", "main"] and all(.[]; .owner == $owner and (.standbys | length) == 2)'
    expect_fail "owns the metadata already" on 2 "$FOREBAY" ledger move "$WORK/2" $((was - 1))
    expect_fail "no such node: id=9" on 2 "$FOREBAY" ledger move "$WORK/2" 9
    on 3 "$FOREBAY" node maintenance "$WORK/3" $((next - 1)) --for 1h --force
    expect_fail "is in maintenance" on 2 "$FOREBAY" ledger move "$WORK/2" $((next - 1))
    on 3 "$FOREBAY" node maintenance "$WORK/3" $((next - 1)) --end
    beside 3 names_owner "$next"
    [ "$(owner 3)" = "$next" ]
    # And back: what was said before does not hold any more.
    on 3 "$FOREBAY" ledger move "$WORK/3" $((was - 1)) | grep "main .*node $((was - 1)) "
    wait_until 60 healthy 2
    wait_until 60 follows 2 2
}
names_owner() { on 2 "$FOREBAY" ledger move "$WORK/2" $(($1 - 1)); }
moved_from() { local now && now=$(owner 2) && [ "$now" != "$1" ]; }

# Its data is gone: it does not vote as if it knew nothing. The others take it in anew.
data_gone() {
    local data
    on 3 timeout 60 "$FOREBAY" stop "$WORK/3" </dev/null
    data=$(ls -d "$WORK"/3/engine/etcd-*)
    rm -r "$data"
    member_start 3 --out-after 8
    wait_until 60 is_whole 3 "node-0 node-1 node-2"
    [ ! -e "$data" ]
    wait_until 90 healthy 3
    same_tree "$WORK/tree" "$WORK/3/mnt/tree"
}
is_whole() { etcd_runs "$1" && [ "$(members "$1")" = "$2" ] && [ "$(voters "$1")" = 3 ]; }

# A machine is gone for good. Another one gets its drives' content, follows the ledgers, and has a member of etcd.
replaced() {
    local token
    token=$(on 1 "$FOREBAY" token create "$WORK/1")
    on 4 timeout 120 "$FOREBAY" join "$token" "$WORK/4" --drives 2 --drive-size 512MiB --name n4 </dev/null
    echo "$WORK/4" >>"$WORK/.nodes"
    on 4 "$FOREBAY" mount "$WORK/4" "$WORK/4/mnt"
    not etcd_runs 4
    # While it is away on purpose, nobody takes over what it held.
    on 3 "$FOREBAY" node maintenance "$WORK/3" 1 --for 1h
    beside 3 machine_kill 2
    sleep 12
    status 1 | jq -e 'all(.drives[] | select(.node == 1); .state == "missing") and any(.problems[]; test("in maintenance, and nobody.*for 59m"))'
    on 3 "$FOREBAY" node list "$WORK/3" | grep -q "unreachable, in maintenance for 59m"
    on 3 "$FOREBAY" node maintenance "$WORK/3" 1 --end
    wait_until 90 drives_are_out
    wait_until 90 removed
    wait_until 60 is_whole 4 "node-0 node-2 node-3"
    wait_until 60 follows 4 2
    wait_until 90 healthy_again 1
    wait_until 30 knows_members 3
    # Now it counts.
    beside 4 machine_kill 1
    owner_is_not 4 1
    same_tree "$WORK/tree" "$WORK/4/mnt/tree"
    member_start 1
    wait_until 30 mounted 1
    wait_until 90 healthy_again 4
}
# Drives that were removed are still shown.
healthy_again() { status "$1" | jq -e '.state == "healthy" and all(.filesystems[]; .owed_shards == 0) and all(.drives[] | select(.node != 1); .state == "up")' >/dev/null; }
drives_are_out() { status 1 | jq -e 'all(.drives[] | select(.node == 1); .state == "out" and .groups == 0)' >/dev/null; }
removed() { on 1 "$FOREBAY" node remove "$WORK/1" 1 </dev/null; }
knows_members() { grep -q "$(address 4):7741" "$WORK/$1/identity/membership.json" && ! grep -q "$(address 2):7741" "$WORK/$1/identity/membership.json"; }

whole() {
    local node started
    on 1 timeout 200 "$FOREBAY" fsck "$WORK/1" </dev/null
    # Where the last one stops, the logs do not answer any more.
    for node in 3 4 1; do
        started=$SECONDS
        on "$node" timeout 60 "$FOREBAY" stop "$WORK/$node" </dev/null
        [ $((SECONDS - started)) -le 16 ]
    done
    no_etcd_runs
    # As if two of them had lost power before they heard that the logs have moved.
    for node in 1 3; do
        jq 'del(.log)' "$WORK/$node/identity/membership.json" >"$WORK/membership"
        cp "$WORK/membership" "$WORK/$node/identity/membership.json"
    done
    for node in 4 1 3; do member_start "$node"; done
    wait_until 90 healthy_again 1
    for node in 1 3 4; do wait_until 30 mounted "$node" && same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
}

machines_begin
check "three machines, their metadata in files of the first" begin || exit 1
check "members that cannot run are named, and nothing moves" refused
check "the logs move into an etcd of Forebay, under load" moves || exit 1
check "the first machine dies, its member of etcd with it" machine_dies
check "a node's process is killed, and its member of etcd" process_dies
check "the owner of the metadata leaves" owner_leaves
check "the ledgers go to the node that an operator names" owner_is_named
check "a member without its data is replaced" data_gone
check "a machine is gone for good: the next one takes its place" replaced
check "all is whole, and starts again as it was" whole
