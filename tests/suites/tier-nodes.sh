#!/usr/bin/env bash
# Tiering by all machines of a cluster: each uploads, one that does not reach the store holds nothing up, and takeovers amid uploads
# and amid the return of everything lose and leave nothing.
LIMIT_S=$([ "${FOREBAY_TEST_LONG:-0}" = 1 ] && echo 900 || echo 300)
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
source "$(dirname "$0")/../machines.sh"

# The store is a node by itself, on the fourth machine.
STORE_DIR=$WORK/store
MEMBERS=(1 2 3)

begin() {
    local node token
    for node in "${MEMBERS[@]}"; do wait_until 30 etcd_answers "$node"; done
    for node in "${MEMBERS[@]}"; do echo "$WORK/$node" >>"$WORK/.nodes"; done
    echo "$STORE_DIR" >>"$WORK/.nodes"
    on 4 timeout 120 "$FOREBAY" start "$STORE_DIR" --drives 1 --drive-size 2GiB --profile 1+0 --memory "$MEMORY" --s3 "$(address 4):9000" </dev/null
    mkdir "$STORE_DIR/mnt/cold"
    on 1 timeout 120 "$FOREBAY" start "$WORK/1" --log "$ENGINE?prefix=test" --drives 2 --drive-size 512MiB --profile r2 \
        --memory "$MEMORY" --address "$(address 1)" --no-s3 </dev/null
    token=$(on 1 "$FOREBAY" token create "$WORK/1" --uses 2)
    for node in 2 3; do
        on "$node" timeout 120 "$FOREBAY" join "$token" "$WORK/$node" --drives 2 --drive-size 512MiB --name "n$node" </dev/null
    done
    # Any of them may come to own the metadata.
    for node in "${MEMBERS[@]}"; do
        on "$node" timeout 60 "$FOREBAY" stop "$WORK/$node" </dev/null
        member_start "$node"
    done
    wait_until 60 healthy 1
    wait_until 30 mounted 1
    for node in 2 3; do on "$node" "$FOREBAY" mount "$WORK/$node" "$WORK/$node/mnt" </dev/null; done
}

credential() { awk -F' = ' -v name="$1" '$1 ~ name { print $2 }' "$STORE_DIR/admin-credentials"; }
# tier_at NODE FILTER: whether the status of tiering at a node matches a filter of jq.
tier_status() { on "$1" timeout 30 "$FOREBAY" tier status "$WORK/$1" --json; }
tier_at() { tier_status "$1" | jq -e ".[0] | $2" >/dev/null; }
uploaded() { tier_at "$1" '.queued_extents == 0 and (.queueing | not)'; }
# write NODE NAME MIB: a directory of files of 4 MiB, and a copy of it outside.
write() {
    local at
    mkdir "$WORK/copy/$2"
    for ((at = 0; at < $3 / 4; at++)); do head -c 4M /dev/urandom >"$WORK/copy/$2/$at"; done
    cp -r "$WORK/copy/$2" "$WORK/$1/mnt/$2"
    sync_files "$WORK/$1/mnt/$2"
}
same_files() { diff -r "$WORK/copy" "$WORK/$1/mnt"; }

attached() {
    mkdir "$WORK/copy"
    on 1 "$FOREBAY" store add "$WORK/1" cold --hostname "$(address 4)" --port 9000 --protocol HTTP --bucket cold --blob-size 4MiB \
        --access-key-id "$(credential access_key_id)" --secret-key "$(credential secret)"
    on 1 "$FOREBAY" fs attach "$WORK/1" main cold --retention 30s --tiering-cue 10s
    write 1 first 96
    wait_until 90 uploaded 2
    tier_status 2 | jq '.[0].uploaded_by'
    tier_at 2 '(.uploaded_by | keys) == ["0", "1", "2"] and ([.uploaded_by[]] | add) == .uploaded_bytes'
    # Each has some of it, also the one that has the least.
    tier_at 2 '([.uploaded_by[]] | min) * 10 > .uploaded_bytes'
    on 2 "$FOREBAY" tier status "$WORK/2" | grep "uploaded by .*node 0 .*node 1 .*node 2 "
    wait_until 20 tier_at 2 '[.store_health.nodes[] | [.node, .up]] == [[0, true], [1, true], [2, true]]'
}

# One machine does not reach the store; then the owner of the metadata does not; then none does.
cut_off() {
    local owner other
    owner=$(owner 1)
    other=$((owner % 3 + 1))
    echo "$(date +%T) cut off: $other, owner $owner"
    filter other "$(from_to "$other" 4)"
    wait_until 60 tier_at "$owner" ".store_health.up and .store_health.nodes[$((other - 1))].up == false"
    tier_at "$owner" ".problem | contains(\"node $((other - 1)) does not reach it\")"
    write 1 second 32
    wait_until 90 uploaded "$owner"
    echo "$(date +%T) the owner, too"
    filter owner "$(from_to "$owner" 4)"
    wait_until 60 tier_at "$owner" ".store_health.up and .store_health.nodes[$((owner - 1))].up == false"
    # The owner lacks the store, and the third machine uploads.
    write 1 third 32
    wait_until 120 uploaded "$owner"
    echo "$(date +%T) all"
    filter last "$(from_to "$((other % 3 + 1))" 4)"
    wait_until 60 tier_at "$owner" '.store_health.up == false'
    on 1 "$FOREBAY" tier status "$WORK/1" | grep "cold (DOWN since .*node 0 DOWN .*node 1 DOWN .*node 2 DOWN"
    echo "$(date +%T) all are back"
    for chain in other owner last; do filter_ends "$chain"; done
    wait_until 60 tier_at "$owner" '.store_health.up and all(.store_health.nodes[]; .up) and .problem == null'
    same_files 1
}

# The owner of the metadata dies while all machines upload.
taken_over() {
    local before mount
    before=$(owner 1)
    mount=$((before % 3 + 1))
    write "$mount" fourth 96
    wait_until 30 uploads_begin "$mount" "$(tier_status "$mount" | jq '.[0].both_bytes + .[0].away_bytes')"
    kill -KILL "$(member_pid "$before")"
    wait_until 40 owner_is_not "$mount" "$before"
    wait_until 120 uploaded "$mount"
    same_files "$mount"
    member_start "$before"
    wait_until 60 healthy "$mount"
    wait_until 60 nothing_left_over "$mount"
}
uploads_begin() { tier_at "$1" ".both_bytes + .away_bytes > $2"; }
# The store has the blobs that are in use, and no others.
blobs() { find "$STORE_DIR/mnt/cold" -type f | wc -l; }
nothing_left_over() { [ "$(tier_status "$1" | jq '.[0].blobs')" = "$(blobs)" ]; }

# Everything returns, while the owner of the metadata changes.
detached() {
    local before mount
    before=$(owner 1)
    mount=$((before % 3 + 1))
    wait_until 120 tier_at "$mount" '.away_bytes > 200000000'
    on "$mount" "$FOREBAY" fs detach "$WORK/$mount" main
    wait_until 60 tier_at "$mount" '.returned_bytes > 0'
    kill -KILL "$(member_pid "$before")"
    wait_until 40 owner_is_not "$mount" "$before"
    member_start "$before"
    wait_until 120 left "$mount"
    same_files "$mount"
    [ "$(blobs)" = 0 ]
    wait_until 60 healthy "$mount"
}
left() { tier_status "$1" | jq -e '. == []' >/dev/null; }

machines_begin
for node in "${MEMBERS[@]}"; do etcd_start "$node"; done
check "three machines, and a store on a fourth" begin || exit 1
check "all machines upload, and tell whether the store answers" attached
check "machines that do not reach the store hold nothing up" cut_off
check "the owner dies while machines upload: nothing is lost or left over" taken_over
check "everything returns through a takeover, and the store is empty" detached
