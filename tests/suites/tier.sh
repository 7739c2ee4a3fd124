#!/usr/bin/env bash
# Tiering, end to end: a node's filesystem is attached to an S3 server. What ages goes there, is read from there, comes back
# and leaves nothing behind, while the store fails and the node is killed.
#
#   FOREBAY_TIER_STORE   the server: forebay (default; the endpoint of another node), forebay-https, minio, versitygw
#   FOREBAY_TIER_FAULTS  so many of a hundred requests are harmed on their way: see tests/tier/faulty.py (default: 0)
source "$(dirname "$0")/../lib.sh"
LIMIT_S=240

if [ "$PLAIN" = 1 ]; then
    skipped "all" "needs the binary"
    exit 0
fi

NODE=$WORK/home
MNT=$NODE/mnt
SUMS=$WORK/sums
STORE=${FOREBAY_TIER_STORE:-forebay}
FAULTS=${FOREBAY_TIER_FAULTS:-0}
VENV=$HOME/.cache/forebay/venv
# Whatever is not told here is in files, as each check is a process of its own: the port and pid of the store and the proxy.
AT=$WORK/at
mkdir "$AT"
trap 'status=$?; end_process store; end_process proxy; (exit "$status"); cleanup' EXIT

# --- the store -----------------------------------------------------------------------------------------------------

free_port() { "$VENV/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
# begin_process NAME PORT COMMAND…
begin_process() {
    local name=$1 port=$2
    shift 2
    setsid "$@" >>"$WORK/$name.log" 2>&1 </dev/null &
    echo $! >"$AT/$name.pid"
    echo "$port" >"$AT/$name.port"
    wait_until 30 listens "$port"
}
end_process() {
    [ -e "$AT/$1.pid" ] || return 0
    kill -KILL "$(cat "$AT/$1.pid")" 2>/dev/null
    wait_until 30 process_is_gone "$(cat "$AT/$1.pid")"
    rm "$AT/$1.pid"
}
store_key() { [ -e "$WORK/store/admin-credentials" ] && awk -F' = ' '/access_key_id/ { print $2 }' "$WORK/store/admin-credentials" || echo tester; }
store_secret() { [ -e "$WORK/store/admin-credentials" ] && awk -F' = ' '/secret/ { print $2 }' "$WORK/store/admin-credentials" || echo tester-secret; }
# Starts the store, for the first time or again, and the proxy before it.
store_start() {
    local port
    case "$STORE" in
    forebay | forebay-https)
        node_start store --drives 1 --drive-size 4G --profile 1+0
        jq -er .s3 "$WORK/store/node.json" | sed 's/.*://; s,/$,,' >"$AT/store.port"
        mkdir -p "$WORK/store/mnt/cold"
        ;;
    minio)
        mkdir -p "$WORK/store/cold"
        port=$(free_port)
        begin_process store "$port" env MINIO_ROOT_USER=tester MINIO_ROOT_PASSWORD=tester-secret \
            "$TOOLS/minio" server --quiet --address "127.0.0.1:$port" --console-address 127.0.0.1:0 "$WORK/store"
        ;;
    versitygw)
        mkdir -p "$WORK/store/cold"
        port=$(free_port)
        begin_process store "$port" "$TOOLS/versitygw" --access tester --secret tester-secret --port "127.0.0.1:$port" \
            posix "$WORK/store"
        ;;
    *)
        echo "no such store: $STORE"
        return 1
        ;;
    esac
    [ "$FAULTS" = 0 ] || {
        port=$(free_port)
        end_process proxy
        begin_process proxy "$port" "$VENV/bin/python" "$ROOT/tests/tier/faulty.py" "$port" "$(cat "$AT/store.port")" "$SEED" "$FAULTS"
    }
}
store_kill() { case "$STORE" in forebay*) node_kill store ;; *) end_process store ;; esac }
# Where the node reaches it.
reached_port() { [ "$FAULTS" = 0 ] && cat "$AT/store.port" || cat "$AT/proxy.port"; }
aws_store() {
    AWS_ACCESS_KEY_ID=$(store_key) AWS_SECRET_ACCESS_KEY=$(store_secret) "$VENV/bin/aws" \
        --endpoint-url "http://127.0.0.1:$(cat "$AT/store.port")" --region us-east-1 "$@"
}
# Sizes of all objects, as the store says.
listing() { aws_store s3api list-objects-v2 --bucket cold --output json | jq -s '[.[].Contents // [] | .[].Size]'; }
blobs() { listing | jq length; }
stored_kib() { listing | jq 'add // 0 | . / 1024 | floor'; }

# --- the filesystem ------------------------------------------------------------------------------------------------

# forebay VERB… of the node that tiers
fs() { "$FOREBAY" fs "$1" "$NODE" "${@:2}"; }
tier() { "$FOREBAY" tier "$@"; }
tier_status() { tier status "$NODE" --json; }
# Whether the status of tiering fits a filter of jq.
tier_is() { tier_status | jq -e ".[0] | $1" >/dev/null; }
# located PATH WRITE-CACHE READ-CACHE STORE: how many bytes of a file lie where.
located() {
    local found
    found=$(tier location "$1" --json | jq -r '.[0] | "\(.ssd_write_cache_bytes) \(.ssd_read_cache_bytes) \(.object_store_bytes)"')
    echo "$1: $found"
    [ "$found" = "$2 $3 $4" ]
}
random_file() { head -c "$2" /dev/urandom >"$1"; }
note_sums() { (cd "$MNT" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum) >"$SUMS"; }
# Every file has the bytes that it had. A store that harms requests may cost errors, never other bytes.
same_sums() {
    local attempt
    for attempt in 1 2 3 4 5; do
        if (cd "$MNT" && sha256sum --check --quiet "$SUMS") >"$WORK/checked" 2>&1; then return 0; fi
        cat "$WORK/checked"
        not grep -q ': FAILED$' "$WORK/checked"
        [ "$FAULTS" != 0 ] || return 1
        echo "errors, attempt $attempt"
    done
    return 1
}
cold_cache() {
    node_unmount home
    node_mount home
}

check "the store starts: $STORE, $FAULTS of 100 requests harmed" store_start || exit 0
check "a node starts" node_start home --drives 6 --drive-size 128M --profile 4+2 || exit 0
add_store() {
    local reach=(--protocol HTTP)
    [ "$STORE" != forebay-https ] || reach=(--protocol HTTPS --ca "$WORK/store/s3/cert.pem")
    "$FOREBAY" store add "$NODE" cold --hostname 127.0.0.1 --port "$(reached_port)" "${reach[@]}" --bucket cold --blob-size 8MiB \
        --access-key-id "$(store_key)" --secret-key "$(store_secret)"
}
check "the store is added" add_store || exit 0

refusals() {
    expect_fail 'no such store' fs attach main none --retention 1d --tiering-cue 1h
    expect_fail 'no such filesystem' fs attach none cold --retention 1d --tiering-cue 1h
    expect_fail 'third of the retention' fs attach main cold --retention 30s --tiering-cue 11s
    expect_fail '10s' fs attach main cold --retention 1d --tiering-cue 9s
    expect_fail 'not a duration' fs attach main cold --retention 1y --tiering-cue 1h
    tier_status | jq -e '. == []'
    expect_fail 'has no object store' fs detach main
}
check "what makes no sense is refused" refusals

written() {
    random_file "$MNT/before" 3000000
    sync -f "$MNT"
    fs attach main cold --retention 1h --tiering-cue 10s
    expect_fail 'main' "$FOREBAY" store remove "$NODE" cold
    mkdir "$MNT/small"
    random_file "$MNT/big" 60000000
    for i in $(seq 60); do random_file "$MNT/small/$i" $((131072 + i)); done
    random_file "$MNT/tiny" 3000
    random_file "$MNT/copy" 20000
    note_sums
    tier_is '.queued_bytes > 0'
}
check "a filesystem is attached and written to" written
uploaded() {
    wait_until 90 tier_is '.queued_extents == 0 and (.queueing | not) and .both_bytes > 60000000'
    located "$MNT/big" 0 60000000 0
    located "$MNT/before" 0 3000000 0
    aws_store s3 cp --quiet --recursive s3://cold "$WORK/blobs"
    find "$WORK/blobs" -type f -print0 | while read -rd '' blob; do "$FOREBAY" blob dump "$blob" >/dev/null; done
    [ "$(blobs)" = "$(tier_status | jq '.[0].blobs')" ]
    [ "$(find "$WORK/blobs" -type f -size +8M | wc -l)" = 0 ]
    rm -r "$WORK/blobs"
    tier ops "$NODE" cold --json | jq -e '.[0].ops | map(select(.verb == "PUT" and .state == "done")) | length > 0'
    tier ops "$NODE" none --json | jq -e '. == []'
    tier_is '.store_health.up and .problem == null'
    echo "$(blobs) blobs, $(stored_kib) KiB"
}
check "what has aged is uploaded in blobs that are what they say" uploaded
released() {
    tier release "$MNT/big" "$MNT/before" "$MNT/small/7"
    located "$MNT/big" 0 0 60000000
    cold_cache
    same_sums
    wait_until 30 located "$MNT/small/7" 0 131079 0
}
check "what left the drives is read as before, and comes back" released
fetched() {
    tier release "$MNT/big"
    cold_cache
    tier fetch "$MNT/big"
    located "$MNT/big" 0 60000000 0
    same_sums
}
check "a file is fetched before it is read" fetched
check "a file system check finds nothing" node_fsck home

overwritten() {
    local part=$WORK/part
    random_file "$part" 5000000
    tier release "$MNT/big"
    dd if="$part" of="$MNT/big" bs=1000000 seek=20 conv=notrunc status=none
    truncate -s 50000000 "$MNT/big"
    cp --reflink=auto "$MNT/big" "$MNT/clone"
    mv "$MNT/before" "$MNT/after"
    rm "$MNT/small/1"
    cmp <(head -c 25000000 "$MNT/big" | tail -c 5000000) "$part"
    note_sums
    [ "$(grep -c "$(sha256sum <"$MNT/big" | cut -d' ' -f1)" "$SUMS")" = 2 ]
    cold_cache
    same_sums
}
check "what is away is overwritten, cut, cloned, renamed and removed" overwritten

store_down() {
    local began=$SECONDS
    wait_until 90 tier_is '.queued_extents == 0'
    tier release "$MNT/big"
    cold_cache
    store_kill
    expect_fail 'Input/output error' sha256sum "$MNT/big"
    echo "EIO after $((SECONDS - began)) s"
    random_file "$MNT/meanwhile" 1000000
    sync -f "$MNT"
    sha256sum "$MNT/tiny" "$MNT/meanwhile" >/dev/null
    wait_until 60 tier_is '.problem != null and .store_health.up == false'
    "$FOREBAY" status "$NODE" | grep -i 'cold'
    store_start
    "$FOREBAY" store update "$NODE" cold --port "$(reached_port)"
    note_sums
    wait_until 60 tier_is '.problem == null and .store_health.up and .queued_extents == 0'
}
check "a store that is down costs an error, is named, and is used again" store_down
killed() {
    local round
    for round in 1 2 3; do
        random_file "$MNT/round$round" 20000000
        sync -f "$MNT"
        note_sums
        sleep $((8 + 3 * round))
        node_kill home
        node_start home
        same_sums
        tier release "$MNT/big" "$MNT/clone" >/dev/null
    done
    node_fsck home
    wait_until 90 tier_is '.queued_extents == 0'
    wait_until 60 orphans_are_gone
}
orphans_are_gone() { [ "$(blobs)" = "$(tier_status | jq '.[0].blobs')" ]; }
check "SIGKILL while blobs are made and left" killed

overcommitted() {
    local i
    fs attach main cold --retention 30s --tiering-cue 10s
    for i in $(seq 12); do random_file "$MNT/more$i" 70000000; done
    sync -f "$MNT"
    tier_is '.away_bytes > 0'
    df -B1 --output=size,used,avail "$MNT"
    note_sums
    cold_cache
    same_sums
}
check "more is written than the drives hold" overcommitted
refuses_detach() { expect_fail 'drives' fs detach main; }
check "a store is not left while the drives cannot hold everything" refuses_detach
shrinks() {
    local before
    wait_until 90 tier_is '.queued_extents == 0'
    before=$(stored_kib)
    rm "$MNT"/more* "$MNT"/round*
    random_file "$MNT/last" 1000000
    note_sums
    wait_until 120 tier_is '.queued_extents == 0 and .overhead_percent < 13'
    wait_until 60 orphans_are_gone
    [ "$(stored_kib)" -lt $((before / 3)) ]
    echo "$before KiB before, $(stored_kib) KiB now"
    same_sums
}
check "the bucket shrinks when files are removed" shrinks
detached() {
    fs detach main --wait
    tier_status | jq -e '. == []'
    [ "$(blobs)" = 0 ]
    cold_cache
    same_sums
    "$FOREBAY" store remove "$NODE" cold
}
check "detaching brings everything back and empties the bucket" detached
check "a file system check finds nothing after all" node_fsck home
check "the nodes stay within their memory" node_stop home
exit 0
