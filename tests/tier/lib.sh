# Functions for the suites of tiering: a store, a node whose filesystem is attached to it, and their state. Sourced.
#
#   FOREBAY_TIER_STORE   the server: forebay (default; the endpoint of another node), forebay-https, minio, versitygw, garage
#   FOREBAY_TIER_FAULTS  harmed requests in a hundred: see faulty.py (default: 0)

if [ "$PLAIN" = 1 ]; then
    skipped "all" "needs the binary"
    exit 0
fi

NODE=$WORK/home
MNT=$NODE/mnt
SUMS=$WORK/sums
STORE=${FOREBAY_TIER_STORE:-forebay}
FAULTS=${FOREBAY_TIER_FAULTS:-0}
STORE_SIZE=${STORE_SIZE:-4G}
VENV=$HOME/.cache/forebay/venv
# The ports and pids of the store and the proxies are in files, because each check is a separate process.
AT=$WORK/at
mkdir "$AT"
trap 'status=$?; for one in store proxy refuser; do end_process $one; done; (exit "$status"); cleanup' EXIT

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
# The key for servers that accept any; garage needs a special form.
KEY=tester SECRET=tester-secret
[ "$STORE" != garage ] || KEY=GK$(printf '5a%.0s' {1..12}) SECRET=$(printf '5a%.0s' {1..32})
store_key() { [ -e "$WORK/store/admin-credentials" ] && awk -F' = ' '/access_key_id/ { print $2 }' "$WORK/store/admin-credentials" || echo "$KEY"; }
store_secret() { [ -e "$WORK/store/admin-credentials" ] && awk -F' = ' '/secret/ { print $2 }' "$WORK/store/admin-credentials" || echo "$SECRET"; }
garage_config() {
    cat <<EOF
metadata_dir = "$WORK/store/meta"
data_dir = "$WORK/store/data"
db_engine = "lmdb"
replication_factor = 1
rpc_bind_addr = "127.0.0.1:$(free_port)"
rpc_secret = "$(printf '5a%.0s' {1..32})"
[s3_api]
s3_region = "us-east-1"
api_bind_addr = "127.0.0.1:$1"
EOF
}
# Starts the store, for the first time or again, and the proxy in front of it.
store_start() {
    local port
    case "$STORE" in
    forebay | forebay-https)
        node_start store --drives 1 --drive-size "$STORE_SIZE" --profile 1+0
        jq -er .s3 "$WORK/store/node.json" | sed 's/.*://; s,/$,,' >"$AT/store.port"
        mkdir -p "$WORK/store/mnt/cold"
        ;;
    minio)
        mkdir -p "$WORK/store/cold"
        port=$(free_port)
        begin_process store "$port" env MINIO_ROOT_USER="$KEY" MINIO_ROOT_PASSWORD="$SECRET" \
            "$TOOLS/minio" server --quiet --address "127.0.0.1:$port" --console-address 127.0.0.1:0 "$WORK/store"
        ;;
    versitygw)
        mkdir -p "$WORK/store/cold"
        port=$(free_port)
        begin_process store "$port" "$TOOLS/versitygw" --access "$KEY" --secret "$SECRET" --port "127.0.0.1:$port" \
            posix "$WORK/store"
        ;;
    garage)
        port=$(free_port)
        mkdir -p "$WORK/store"
        garage_config "$port" >"$WORK/garage.toml"
        begin_process store "$port" env GARAGE_DEFAULT_ACCESS_KEY="$KEY" GARAGE_DEFAULT_SECRET_KEY="$SECRET" \
            GARAGE_DEFAULT_BUCKET=cold "$TOOLS/garage" -c "$WORK/garage.toml" server --single-node --default-bucket
        wait_until 30 aws_store s3api head-bucket --bucket cold
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
# The port at which the node reaches the store.
reached_port() { [ "$FAULTS" = 0 ] && cat "$AT/store.port" || cat "$AT/proxy.port"; }
aws_store() {
    AWS_ACCESS_KEY_ID=$(store_key) AWS_SECRET_ACCESS_KEY=$(store_secret) "$VENV/bin/aws" \
        --endpoint-url "http://127.0.0.1:$(cat "$AT/store.port")" --region us-east-1 "$@"
}
# Sizes of all objects in the store's listing.
listing() { aws_store s3api list-objects-v2 --bucket cold --output json | jq -s '[.[].Contents // [] | .[].Size]'; }
blobs() { listing | jq length; }
has_fewer_blobs() { [ "$(blobs)" -lt "$1" ]; }
stored_kib() { listing | jq 'add // 0 | . / 1024 | floor'; }

# --- the filesystem ------------------------------------------------------------------------------------------------

# forebay fs VERB… for the node that tiers
fs() { "$FOREBAY" fs "$1" "$NODE" "${@:2}"; }
tier() { "$FOREBAY" tier "$@"; }
tier_status() { tier status "$NODE" --json; }
# The store's dead bytes are less than 13 % of the live ones. (`overhead_percent` is rounded up.)
DENSE='(.stored_bytes - .live_bytes) * 100 < 13 * .live_bytes'
# Whether the status of tiering matches a jq filter.
tier_is() { tier_status | jq -e ".[0] | $1" >/dev/null; }
# located PATH WRITE-CACHE READ-CACHE STORE: whether this many bytes of a file lie in each place.
located() {
    local found
    found=$(tier location "$1" --json | jq -r '.[0] | "\(.ssd_write_cache_bytes) \(.ssd_read_cache_bytes) \(.object_store_bytes)"')
    echo "$1: $found"
    [ "$found" = "$2 $3 $4" ]
}
random_file() { head -c "$2" /dev/urandom >"$1"; }
note_sums() { (cd "$MNT" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum) >"$SUMS"; }
# Every file has its original bytes. A store that harms requests may cause errors, never wrong bytes.
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
orphans_are_gone() { [ "$(blobs)" = "$(tier_status | jq '.[0].blobs')" ]; }
add_store() {
    local reach=(--protocol HTTP)
    [ "$STORE" != forebay-https ] || reach=(--protocol HTTPS --ca "$WORK/store/s3/cert.pem")
    "$FOREBAY" store add "$NODE" cold --hostname 127.0.0.1 --port "$(reached_port)" "${reach[@]}" --bucket cold --blob-size 8MiB \
        --access-key-id "$(store_key)" --secret-key "$(store_secret)"
}
