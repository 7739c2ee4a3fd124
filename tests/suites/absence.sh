#!/usr/bin/env bash
# Machines that come and go, that stay away, and so many at once that a person has to decide.
LIMIT_S=$([ "${FOREBAY_TEST_LONG:-0}" = 1 ] && echo 900 || echo 240)
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
source "$(dirname "$0")/../machines.sh"

# Seconds until others take over what a drive held.
OUT_S=30

begin() {
    local node token
    for node in 1 2 3; do wait_until 30 etcd_answers "$node"; done
    for node in "${NODES[@]}"; do echo "$WORK/$node" >>"$WORK/.nodes"; done
    on 1 timeout 120 "$FOREBAY" start "$WORK/1" --log "$ENGINE?prefix=test" --drives 2 --drive-size 512MiB --profile r2 \
        --memory "$MEMORY" --address "$(address 1)" --no-s3 </dev/null
    token=$(on 1 "$FOREBAY" token create "$WORK/1" --uses 3)
    for node in 2 3 4; do
        on "$node" timeout 120 "$FOREBAY" join "$token" "$WORK/$node" --drives 2 --drive-size 512MiB --name "n$node" </dev/null
    done
    # Any of them may come to own the metadata.
    for node in "${NODES[@]}"; do
        on "$node" timeout 60 "$FOREBAY" stop "$WORK/$node" </dev/null
        member_start "$node" --out-after "$OUT_S"
    done
    wait_until 60 healthy 1
    wait_until 30 mounted 1
    stage_tree 300 "$WORK/tree"
    cp -a "$WORK/tree" "$WORK/1/mnt/tree"
    sync_files "$WORK/1/mnt/tree"
}

# drives_are NODE STATE: whether all drives of a node are in a state, as seen at the first.
drives_are() {
    status 1 | jq -e --argjson node $(($1 - 1)) --arg state "$2" '[.drives[] | select(.node == $node) | .state == $state] | length > 0 and all' >/dev/null
}
serves() { drives_are "$1" up || drives_are "$1" suspect; }
shards() { status 1 | jq --argjson node $(($1 - 1)) '[.drives[] | select(.node == $node) | .shards] | add'; }

# A node that was lost three times gets no new data for a while.
comes_and_goes() {
    local round before at
    for ((round = 0; round < 3; round++)); do
        kill -KILL "$(member_pid 4)"
        wait_until 20 drives_are 4 missing
        member_start 4 --out-after "$OUT_S"
        wait_until 30 serves 4
    done
    wait_until 5 drives_are 4 suspect
    status 1 | jq -e '[.problems[] | select(contains("came and went"))] | length == 2'
    wait_until 20 nothing_owed
    # Clients know it.
    sleep 1
    before=$(shards 4)
    # Many files, so that each placement group that is in use would get some.
    mkdir "$WORK/1/mnt/spared"
    for at in {1..60}; do head -c 100000 /dev/urandom >"$WORK/1/mnt/spared/$at"; done
    sync_files "$WORK/1/mnt/spared"
    [ "$(shards 4)" -le "$before" ]
    wait_until 30 healthy 1
    drives_are 4 up
}
nothing_owed() { status 1 | jq -e 'all(.filesystems[]; .owed_shards == 0)' >/dev/null; }

# A drive is put into another machine: it serves there with what it has, and nothing is rebuilt.
moves_house() {
    local drive groups
    drive=$(status 1 | jq '[.drives[] | select(.node == 3)][0].id')
    groups=$(status 1 | jq --argjson id "$drive" '.drives[] | select(.id == $id).groups')
    expect_fail "in use: node=3" on 3 "$FOREBAY" drive add "$WORK/3" --path "$WORK/4/drives/$drive.img"
    # A copy of one in the same machine is refused, and the next start does not take it for the drive.
    cp --sparse=always "$WORK/3/drives/4.img" "$WORK/3/copy.img"
    expect_fail "in use: node=2" on 3 "$FOREBAY" drive add "$WORK/3" --path "$WORK/3/copy.img"
    not grep -q copy.img "$WORK/3/drives.json"
    on 4 timeout 60 "$FOREBAY" stop "$WORK/4" </dev/null
    mv "$WORK/4/drives/$drive.img" "$WORK/3/came.img"
    on 3 "$FOREBAY" drive add "$WORK/3" --path "$WORK/3/came.img" --json | tee "$WORK/moved"
    jq -e --argjson id "$drive" --argjson groups "$groups" '.id == $id and .node == 2 and (.state == "up" or .state == "suspect") and .groups == $groups' "$WORK/moved"
    # With all but that one of the other machine's drives, everything is readable.
    same_tree "$WORK/tree" "$WORK/1/mnt/tree"
    member_start 4 --out-after "$OUT_S"
    wait_until 60 healthy 1
    [ "$(status 1 | jq --argjson id "$drive" '[.drives[] | select(.node == 2)] | length')" = 3 ]
    # Also after the next start.
    on 3 timeout 60 "$FOREBAY" stop "$WORK/3" </dev/null
    member_start 3 --out-after "$OUT_S"
    wait_until 60 healthy 1
}

# Half of the drives are away: they are waited for.
too_many() {
    local node
    for node in 3 4; do kill -KILL "$(member_pid "$node")"; done
    wait_until 20 drives_are 4 missing
    sleep $((OUT_S + 5))
    drives_are 3 missing
    drives_are 4 missing
    status 1 | jq -e '.problems | map(contains("4 of 8 drives are away at once")) | any'
    status 1 | jq -e '.problems | map(contains("nobody takes over what it held by itself")) | any'
    for node in 3 4; do member_start "$node" --out-after "$OUT_S"; done
    wait_until 60 healthy 1
    same_tree "$WORK/tree" "$WORK/1/mnt/tree"
}

# One machine stays away: others take over what it held.
stays_away() {
    machine_kill 4
    wait_until 60 drives_are 4 out
    wait_until 60 is_whole
    same_tree "$WORK/tree" "$WORK/1/mnt/tree"
    # Each restored what its own drives got; some went to drives that are not the owner's.
    status 1 | jq '.filesystems[0].repair'
    status 1 | jq -e '.filesystems[0].repair | .rebuilt_shards > 0 and .helped_shards > 0 and .helped_shards <= .rebuilt_shards'
    cat "$WORK"/[123]/log/forebay.log | not grep "does not restore shards"
}
is_whole() { status 1 | jq -e '.state == "healthy" and all(.drives[]; .groups == 0 or .state == "up")' >/dev/null; }

# A node is emptied while programs work, and is not needed then.
leaves() {
    on 2 "$FOREBAY" node drain "$WORK/2" 2 --dry-run --json | jq -e '(.drives | length) == 3 and .move_bytes > 0 and .free_bytes > .move_bytes and .eta_s >= 0'
    not drives_are 3 leaving
    expect_fail "no drives in use" on 2 "$FOREBAY" node drain "$WORK/2" 3
    expect_fail "no such node" on 2 "$FOREBAY" node drain "$WORK/2" 9
    under 1 changes_its_mind
    under 1 drain_third
    # Two copies need both of the nodes that are left.
    expect_fail "no other drive to go to" on 2 "$FOREBAY" node drain "$WORK/2" 1
    wait_until 30 is_whole
    on 3 timeout 60 "$FOREBAY" stop "$WORK/3" </dev/null
    same_tree "$WORK/tree" "$WORK/1/mnt/tree"
}
# The drives of a node are in use again that is not emptied after all.
changes_its_mind() {
    expect_fail "is not being emptied" on 2 "$FOREBAY" node drain "$WORK/2" 2 --abort
    on 2 "$FOREBAY" upkeep "$WORK/2" --rate 1MiB
    on 2 "$FOREBAY" node drain "$WORK/2" 2
    drives_are 3 leaving
    sleep 2
    on 2 "$FOREBAY" node drain "$WORK/2" 2 --abort
    on 2 "$FOREBAY" upkeep "$WORK/2" --rate 256MiB
    drives_are 3 up
    wait_until 60 is_whole
    # What did not move is still there, and used.
    status 1 | jq -e '[.drives[] | select(.node == 2) | .groups] | add > 0'
    same_tree "$WORK/tree" "$WORK/1/mnt/tree"
}
drain_third() {
    on 2 "$FOREBAY" node drain "$WORK/2" 2
    expect_fail "being emptied already|no drives in use" on 2 "$FOREBAY" node drain "$WORK/2" 2
    wait_until 90 drives_are 3 out
}

machines_begin
for node in 1 2 3; do etcd_start "$node"; done
check "four machines" begin || exit 1
check "a node that comes and goes gets no new data for a while" comes_and_goes
check "a drive moves to another machine" moves_house
check "half of the drives are away, and are waited for" too_many
check "a machine stays away, and others take over" stays_away
check "a node is emptied while programs work" leaves
