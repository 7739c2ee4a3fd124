#!/usr/bin/env bash
# Three machines whose metadata is in an etcd of three members, one on each: any of them may be lost, the owner of the metadata among
# them. No program sees an error, and nothing that was acknowledged is lost.
LIMIT_S=$([ "${FOREBAY_TEST_LONG:-0}" = 1 ] && echo 3600 || echo 400)
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
source "$(dirname "$0")/../machines.sh"
NODES=(1 2 3 4)
# The machine with the owner dies so often.
ROUNDS=$([ "$LONG" = 1 ] && echo 20 || echo 1)

# Some machine but these.
another() { printf '%s\n' 1 2 3 | grep -vx -f <(printf '%s\n' "$@") | head -1; }

# --- checks --------------------------------------------------------------------------------------------------------

bad_engines() {
    expect_fail "etcd://HOST:PORT" on 1 "$FOREBAY" start "$WORK/x" --log http://a:1 --address "$(address 1)"
    expect_fail "no parameter" on 1 "$FOREBAY" start "$WORK/x" --log "$ENGINE?prefi=x" --address "$(address 1)"
    expect_fail "needs an address" on 1 "$FOREBAY" start "$WORK/x" --log "$ENGINE"
    expect_fail "cannot be used" on 1 timeout 60 "$FOREBAY" start "$WORK/x" --log "etcd://$(address 1):9" --address "$(address 1)"
    not test -e "$WORK/x/identity/membership.json"
    rm -rf "$WORK/x"
}

begin() {
    local node token
    for node in 1 2 3; do wait_until 30 etcd_answers "$node"; done
    for node in 1 2 3 4; do echo "$WORK/$node" >>"$WORK/.nodes"; done
    # An attempt that fails leaves nothing in the way.
    expect_fail "no such device" on 1 "$FOREBAY" start "$WORK/1" --log "$ENGINE?prefix=test" --drive /dev/none --address "$(address 1)"
    on 1 timeout 120 "$FOREBAY" start "$WORK/1" --log "$ENGINE?prefix=test" --drives 2 --drive-size 512MiB --profile r2 \
        --memory "$MEMORY" --address "$(address 1)" </dev/null
    mounted 1
    expect_fail "another cluster" on 2 "$FOREBAY" start "$WORK/x" --log "$ENGINE?prefix=test" --address "$(address 2)"
    rm -rf "$WORK/x"
    token=$(on 1 "$FOREBAY" token create "$WORK/1" --uses 2)
    for node in 2 3; do
        on "$node" timeout 120 "$FOREBAY" join "$token" "$WORK/$node" --drives 2 --drive-size 512MiB --name "n$node" </dev/null
        on "$node" "$FOREBAY" mount "$WORK/$node" "$WORK/$node/mnt"
    done
    on 2 "$FOREBAY" fs set "$WORK/2" main --profile 4+2
    stage_tree 200 "$WORK/tree"
    cp -a "$WORK/tree" "$WORK/2/mnt/tree"
    sync_files "$WORK/2/mnt/tree"
    wait_until 60 healthy 3
    for node in 1 2 3; do same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
}

# The owner's machine dies, and with it a member of etcd.
owner_machine_dies() {
    local round here other
    for ((round = 0; round < ROUNDS; round++)); do
        here=$(owner 2) || here=$(owner 3)
        other=$(another "$here")
        beside "$other" machine_kill "$here"
        owner_is_not "$other" "$here"
        etcd_start "$here"
        machine_returns "$here"
        same_tree "$WORK/tree" "$WORK/$here/mnt/tree"
    done
}

# The owner's process dies beside its mount, which goes on with the next owner.
owner_process_dies() {
    local here other
    here=$(owner 1)
    other=$(another "$here")
    beside "$here" kill -KILL "$(member_pid "$here")"
    # What an operator asks goes to the next owner.
    on "$other" timeout 12 "$FOREBAY" node list "$WORK/$other"
    owner_is_not "$other" "$here"
    member_start "$here"
    wait_until 90 healthy "$here"
}

# An owner that slept is no owner any more, and knows it at once.
owner_sleeps() {
    local here other
    here=$(owner 1)
    other=$(another "$here")
    beside "$other" sleep_for "$here" 6
    owner_is_not "$other" "$here"
    grep -q "begins anew" "$WORK/$here/log/forebay.log"
    wait_until 90 healthy "$here"
    same_tree "$WORK/tree" "$WORK/$here/mnt/tree"
}
sleep_for() {
    local pid
    pid=$(member_pid "$1")
    kill -STOP "$pid"
    sleep "$2"
    kill -CONT "$pid"
}

# An owner that stops in order hands over.
owner_stops() {
    local here other
    here=$(owner 1)
    other=$(another "$here")
    beside "$other" on "$here" timeout 120 "$FOREBAY" stop "$WORK/$here" </dev/null
    # What an operator asks goes to the next owner.
    on "$other" timeout 12 "$FOREBAY" node list "$WORK/$other"
    owner_is_not "$other" "$here"
    member_start "$here"
    wait_until 90 healthy "$here"
}

# A drive in the owner's machine, and one of another machine, are taken out of service and used again.
drives_return() {
    local here at drive
    here=$(owner 1)
    for at in "$here" "$(another "$here")"; do
        drive=$(on 1 "$FOREBAY" drive list "$WORK/1" --json | jq --argjson at $((at - 1)) '[.[] | select(.node == $at)][0].id')
        on 2 "$FOREBAY" drive fail "$WORK/2" "$drive"
        head -c 3000000 /dev/urandom >"$WORK/2/mnt/while-failed"
        sync "$WORK/2/mnt/while-failed"
        sleep 1
        on 3 "$FOREBAY" drive return "$WORK/3" "$drive"
        wait_until 60 healthy 1
    done
    same_tree "$WORK/tree" "$WORK/1/mnt/tree"
}

# Without a majority of etcd everything waits, and goes on when there is one again.
no_quorum() {
    local here
    here=$(owner 1)
    under "$here" engine_away "$here"
    wait_until 90 healthy "$here"
}
engine_away() {
    local status=0
    pkill -STOP -f "data-dir $WORK/etcd[12] "
    sleep 4
    status "$1" | jq -e '.problems[0] | contains("engine with the logs does not answer")' || status=1
    pkill -CONT -f "data-dir $WORK/etcd[12] "
    return "$status"
}

# A node starts without etcd, serves its drives, and follows once etcd is back.
starts_without_etcd() {
    local here other worked=0
    here=$(owner 1)
    other=$(another "$here")
    kill -KILL "$(member_pid "$other")"
    pkill -STOP -f "data-dir $WORK/etcd[123] "
    member_start "$other" || worked=1
    pkill -CONT -f "data-dir $WORK/etcd[123] "
    [ "$worked" = 0 ]
    wait_until 90 healthy "$other"
    same_tree "$WORK/tree" "$WORK/$other/mnt/tree"
}

# Only the first three nodes own ledgers: another one, that was removed and still reaches etcd, takes none.
removed_stays_out() {
    local here other
    here=$(owner 1)
    other=$(another "$here")
    on "$here" "$FOREBAY" token create "$WORK/$here" >"$WORK/token"
    on 4 timeout 120 "$FOREBAY" join "$(cat "$WORK/token")" "$WORK/4" --drives 0 --name n4 </dev/null
    on "$other" "$FOREBAY" node remove "$WORK/$other" 3
    kill -KILL "$(member_pid "$here")"
    wait_until 30 owner_is_not "$other" "$here"
    not grep -q "taking them" "$WORK/4/log/forebay.log"
    on 4 timeout 120 "$FOREBAY" stop "$WORK/4" </dev/null
    member_start "$here"
    wait_until 90 healthy "$here"
}

# All processes die at once. In any order they find their way.
all_at_once() {
    local node
    for node in 1 2 3; do kill -KILL "$(member_pid "$node")"; done
    for node in 3 1 2; do member_start "$node"; done
    wait_until 90 healthy 2
    for node in 1 2 3; do same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
}

whole() {
    local node
    wait_until 90 healthy 1
    on 1 timeout 200 "$FOREBAY" fsck "$WORK/1" </dev/null
    for node in 3 2 1; do on "$node" timeout 120 "$FOREBAY" stop "$WORK/$node" </dev/null; done
    not mounted 2
    for node in 2 3; do member_start "$node"; done
    wait_until 30 mounted 2
    same_tree "$WORK/tree" "$WORK/2/mnt/tree"
    member_start 1
    wait_until 90 healthy 1
}

machines_begin
for node in 1 2 3; do etcd_start "$node"; done
check "engines that do not work are refused, and say why" bad_engines
check "three machines, their metadata in etcd" begin || exit 1
check "the owner's machine dies, a member of etcd with it" owner_machine_dies
check "the owner's process dies beside its mount" owner_process_dies
check "an owner that slept begins anew" owner_sleeps
check "an owner that stops hands over" owner_stops
check "drives are taken out of service and used again" drives_return
check "etcd without a majority: everything waits" no_quorum
check "a node starts while etcd is away" starts_without_etcd
check "a fourth node, removed, does not take over" removed_stays_out
check "all are killed at once" all_at_once
check "all is whole, and starts again as it was" whole
