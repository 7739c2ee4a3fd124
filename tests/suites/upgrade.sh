#!/usr/bin/env bash
# Programs are replaced node after node while programs work at all machines: from an earlier one (FOREBAY_OLD), back, and on; then by one
# of the next format level (FOREBAY_NEXT), whose formats are written only after `forebay upgrade finalize`. make upgrade builds these two.
LIMIT_S=600
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
source "$(dirname "$0")/../machines.sh"
OLD=${FOREBAY_OLD:-}
NEXT=${FOREBAY_NEXT:-}
NEW=$FOREBAY
if [ -z "$OLD" ] || [ -z "$NEXT" ]; then
    echo "give the programs: make upgrade" >&2
    exit 2
fi
NODES=(1 2 3 4)
STORING=(1 2 3)

# --- machines ------------------------------------------------------------------------------------------------------

begin() {
    local node token
    for node in "${NODES[@]}"; do echo "$WORK/$node" >>"$WORK/.nodes"; done
    on 1 timeout 120 "$OLD" start "$WORK/1" --drives 2 --drive-size 512MiB --profile r2 --mount "$WORK/1/mnt" --mount-options process=own \
        --memory "$MEMORY" --address "$(address 1)" </dev/null
    token=$(on 1 "$OLD" token create "$WORK/1" --uses 2)
    for node in 2 3; do
        on "$node" timeout 120 "$OLD" join "$token" "$WORK/$node" --drives 2 --drive-size 512MiB --name "n$node" </dev/null
        on "$node" "$OLD" mount "$WORK/$node" "$WORK/$node/mnt" -o process=own
    done
    on 1 "$OLD" fs set "$WORK/1" main --profile 4+2
    on 1 timeout 150 "$OLD" log move "$WORK/1" etcd
    token=$(on 1 "$OLD" token create "$WORK/1" --role client --squash none)
    on 4 timeout 60 "$OLD" join "$token" "$WORK/4" --name client </dev/null
    on 4 timeout 60 "$OLD" mount "$WORK/4" "$WORK/4/mnt"
    stage_tree 200 "$WORK/tree"
    cp -a "$WORK/tree" "$WORK/1/mnt/tree"
    sync_files "$WORK/1/mnt/tree"
    mkdir "$WORK/1/mnt/bucket"
    for node in 1 2 3 4; do same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
    for node in 1 2 3; do wait_until 90 healthy "$node"; done
    wait_until 60 follow_all
}
follow_all() {
    on 2 timeout 30 "$FOREBAY" log show "$WORK/2" --json |
        jq -e 'all(.ledgers[]; .last_seq as $last | [.standbys[] | select(.stored_seq + 5 >= $last)] | length >= 2)' >/dev/null
}

# becomes NODE PROGRAM: the node is stopped in order, and started as another program; its mounts stay.
becomes() {
    local node=$1 program=$2
    on "$node" timeout 60 "$program" stop "$WORK/$node" --keep-mounts </dev/null
    on "$node" timeout 120 "$program" start "$WORK/$node" </dev/null
    wait_until 60 mounted "$node"
    wait_until 90 healthy "$node"
    wait_until 60 follow_all
}
# works_everywhere: what one machine writes, all others read, by mounts and by S3.
works_everywhere() {
    local node other name
    for node in 1 2 3 4; do
        name=mixed-$RANDOM$RANDOM
        head -c 3000000 /dev/urandom >"$WORK/$name"
        cp "$WORK/$name" "$WORK/$node/mnt/bucket/$name"
        sync_files "$WORK/$node/mnt/bucket/$name"
        for other in 1 2 3 4; do cmp "$WORK/$name" "$WORK/$other/mnt/bucket/$name"; done
    done
    for node in "${STORING[@]}"; do
        wait_until 30 s3_served "$node"
        s3 "$node" put bucket "$name.s3" "$WORK/$name"
        for other in "${STORING[@]}"; do
            s3 "$other" get bucket "$name.s3" "$WORK/got"
            cmp "$WORK/$name" "$WORK/got"
        done
        cmp "$WORK/$name" "$WORK/4/mnt/bucket/$name.s3"
    done
}
all_become() {
    local node
    for node in "$@"; do
        becomes "$node" "$PROGRAM"
        works_everywhere
    done
}
# The owner of the metadata comes last, or first.
in_order() {
    local first
    first=$(owner 2)
    ORDER=()
    for node in "${STORING[@]}"; do [ "$node" = "$first" ] || ORDER+=("$node"); done
    case $1 in
        last) ORDER+=("$first") ;;
        first) ORDER=("$first" "${ORDER[@]}") ;;
    esac
    echo "order of the nodes: ${ORDER[*]}, the owner $1"
}
# upgraded PROGRAM first|last: under load at two machines.
upgraded() {
    PROGRAM=$1
    in_order "$2"
    LOAD_S=60 beside 4 beside_two
    on 1 "$NEXT" node list "$WORK/1"
}
beside_two() { under 2 all_become "${ORDER[@]}"; }

# --- checks --------------------------------------------------------------------------------------------------------

levels() { on "$1" timeout 30 "$NEXT" upgrade status "$WORK/$1" --json; }
back_and_forth() {
    becomes 1 "$OLD"
    works_everywhere
    becomes 1 "$NEW"
    works_everywhere
    levels 1 | jq -e '.format_level == 1 and .newest_level == 1 and .behind == [] and .finalize_to == null'
}
next_level() {
    local node
    becomes 2 "$NEXT"
    levels 1 | jq -e '.format_level == 1 and .newest_level == 2 and .behind == [0, 2] and .finalize_to == null'
    on 1 "$NEXT" upgrade status "$WORK/1"
    expect_fail "node 0 .* has .*, level 1, node 2 .n3. has .*, level 1" on 2 "$NEXT" upgrade finalize "$WORK/2"
    works_everywhere
    # Older nodes refuse a message that they do not know, and nothing else.
    for ((node = 0; node < 10; node++)); do
        [ "$(owner 2)" != 2 ] || break
        owner_leaves "$(owner 2)"
    done
    levels 2 | jq -e '.behind == [0, 2] and all(.nodes[]; .version != null)'
    grep -h "a message of the next level is answered.*novel=Err" "$WORK/2/log/forebay.log" >/dev/null
    works_everywhere
    upgraded "$NEXT" last
    # One that does not answer may have gone back.
    on 3 timeout 60 "$NEXT" stop "$WORK/3" --keep-mounts </dev/null
    wait_until 30 owner_is_not 1 3
    levels 1 | jq -e '.finalize_to == null and .behind == [2]'
    expect_fail "node 2 .n3. does not answer" on 1 "$NEXT" upgrade finalize "$WORK/1"
    # Nothing was written that it could not read.
    on 3 timeout 120 "$NEW" start "$WORK/3" </dev/null
    wait_until 90 healthy 3
    becomes 3 "$NEXT"
    levels 1 | jq -e '.format_level == 1 and .finalize_to == 2 and .behind == [] and .novelty == null'
}
# owner_leaves NODE: another node owns the metadata from now on. The process of this one begins anew, so it is asked at node 2.
owner_leaves() {
    on 2 "$NEXT" node maintenance "$WORK/2" "$(($1 - 1))" --for 1m
    wait_until 30 owner_is_not 2 "$1"
    on 2 "$NEXT" node maintenance "$WORK/2" "$(($1 - 1))" --end
    wait_until 90 healthy "$1"
}
finalized() {
    on 3 "$NEXT" upgrade finalize "$WORK/3"
    levels 1 | jq -e '.format_level == 2 and .finalize_to == null and .novelty == "written"'
    on 1 "$NEXT" upgrade finalize "$WORK/1" --json | jq -e '.format_level == 2'
    works_everywhere
    # An older program does not start, says why, and harms nothing. The client goes on.
    on 3 timeout 60 "$NEXT" stop "$WORK/3" --keep-mounts </dev/null
    expect_fail "formats of level 2 since .*upgrade finalize.* knows those up to level 1" on 3 timeout 60 "$NEW" start "$WORK/3" </dev/null
    on 3 timeout 120 "$NEXT" start "$WORK/3" </dev/null
    wait_until 90 healthy 3
    works_everywhere
    # Nor does it own the metadata, if no other node runs.
    for node in 1 2 3; do on "$node" timeout 60 "$NEXT" stop "$WORK/$node" </dev/null; done
    for node in 2 3; do on "$node" timeout 120 "$NEXT" start "$WORK/$node" </dev/null & done
    wait
    on 2 timeout 60 "$NEXT" stop "$WORK/2" </dev/null
    expect_fail "level 2" on 2 timeout 60 "$NEW" start "$WORK/2" </dev/null
    on 2 timeout 120 "$NEXT" start "$WORK/2" </dev/null
    on 1 timeout 120 "$NEXT" start "$WORK/1" </dev/null
    for node in 1 2 3; do wait_until 60 mounted "$node" && wait_until 90 healthy "$node"; done
    works_everywhere
    local token
    token=$(on 1 "$NEXT" token create "$WORK/1")
    expect_fail "formats of level 2.*those up to level 1" on 4 timeout 60 "$NEW" join "$token" "$WORK/late" --drives 1 --address "$(address 4)" </dev/null
}
older_client() {
    levels 2 | jq -e '.clients | length == 1 and (.[0] | .name == "client")'
    on 2 "$NEXT" upgrade status "$WORK/2" | grep "client.*older; it may go on\|client.*not connected" >/dev/null
    same_tree "$WORK/tree" "$WORK/4/mnt/tree"
    # An error that it does not know is an error, and no more.
    expect_fail "Errno 5|Errno 18" python3 -c 'import os, sys; os.setxattr(sys.argv[1], "user.novel", b"x")' "$WORK/4/mnt/tree"
    works_everywhere
    # The message that only newer programs know was answered.
    grep -h "a message of the next level is answered.*novel=Ok" "$WORK"/[123]/log/forebay.log >/dev/null
}
whole() {
    local node
    wait_until 90 healthy 1
    for node in 1 2 3 4; do same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
    on 1 timeout 200 "$NEXT" fsck "$WORK/1" </dev/null
}

machines_begin
check "three machines of the old program, and a client" begin || exit 1
check "they become the new program under load, the owner last" upgraded "$NEW" last || exit 1
check "one goes back, and on again" back_and_forth
check "all go back under load, the owner first" upgraded "$OLD" first
check "all become the new program again, the owner first" upgraded "$NEW" first || exit 1
check "the next level waits until all nodes know it" next_level || exit 1
check "formats are finalized, and older programs do not start" finalized
check "an older client goes on, and is shown" older_client
check "all is whole" whole
