#!/usr/bin/env bash
# Object stores: adding, trying, changing and removing them. The store is the node's own endpoint, over HTTP and HTTPS, so
# that every failure is one that a real S3 server gives.
source "$(dirname "$0")/../lib.sh"
LIMIT_S=120

if [ "$PLAIN" = 1 ]; then
    skipped "all" "needs the binary"
    exit 0
fi

NODE=$WORK/node
export AWS_SHARED_CREDENTIALS_FILE=$NODE/admin-credentials

check "a node with an endpoint starts" node_start node --drives 1 --drive-size 512M --profile 1+0 || exit 0
PORT=$(jq -er .s3 "$NODE/node.json" | sed 's/.*://; s,/$,,')
KEY=$(awk -F' = ' '/access_key_id/ { print $2 }' "$AWS_SHARED_CREDENTIALS_FILE")
SECRET=$(awk -F' = ' '/secret/ { print $2 }' "$AWS_SHARED_CREDENTIALS_FILE")
mkdir "$NODE/mnt/Archive"

# store VERB NAME [OPTION…]
store() { "$FOREBAY" store "$1" "$NODE" "${@:2}"; }
# added NAME [OPTION…]: with the settings that work, and those given in their place.
added() {
    local name=$1 option rest=()
    local -A settings=([hostname]=127.0.0.1 [port]=$PORT [protocol]=HTTP [bucket]=Archive/cold
        [access-key-id]=$KEY [secret-key]=$SECRET)
    shift
    while [ $# -gt 0 ]; do
        case "$1" in
        --secret-stdin | --skip-verification) rest+=("$1") ;;
        *) settings[${1#--}]=$2 && shift ;;
        esac
        shift
    done
    for option in "${!settings[@]}"; do rest+=("--$option" "${settings[$option]}"); done
    store add "$name" "${rest[@]}"
}
shown() { store show "$1" --json | jq -e "$2"; }
nothing_is_left() { [ -z "$(find "$NODE/mnt/Archive" -type f)" ]; }

good_store() {
    added cold
    nothing_is_left
    shown cold '.hostname == "127.0.0.1" and .bucket == "Archive/cold" and .auth_method == "AWSSignature4" and .problem == null'
    shown cold '.limits == {"blob_bytes": 67108864, "uploads_max": 64, "downloads_max": 64, "removals_max": 64}'
    store list | grep -E "cold +HTTP +127.0.0.1:$PORT +Archive/cold +us-east-1 +$KEY +ready"
    store validate cold | grep -c '^ok' | grep -x 4
    expect_fail 'store exists: name=cold' added cold
}
check "a store is tried and added, and leaves nothing behind" good_store
measured() {
    store bench cold --size 1MiB --parallel 4 --seconds 1 --json |
        jq -e '.plan.parallel == 4 and .put_bytes_per_s > 0 and .get_bytes_per_s > 0 and .round_trip_us > 0'
    store bench cold --size 100KiB --parallel 1 --seconds 1 | grep -E '^PUT .*/s, 1 of 100(.00)? KiB at a time'
    nothing_is_left
    expect_fail 'memory' store bench cold --parallel 1000
    expect_fail 'no such store' store bench nowhere
}
check "its speed is measured, and nothing is left" measured
secret_is_sealed() {
    not grep -qF "$SECRET" <(store show cold; store show cold --json; store list --json)
    not grep -rqF "$SECRET" "$NODE/meta" "$NODE/log" "$NODE/node.json"
    expect_fail 'cannot be used with' added piped --secret-stdin
    store add piped --hostname 127.0.0.1 --port "$PORT" --protocol HTTP --bucket Archive --access-key-id "$KEY" \
        --secret-stdin <<<"$SECRET"
    store validate piped
    store remove piped | grep 'still there'
}
check "its secret is neither shown nor readable on disk" secret_is_sealed
old_signatures() {
    added old --auth-method AWSSignature2
    store validate old --json | jq -e '.passed'
    store remove old
}
check "signatures of version 2" old_signatures

# Each failure names the step, the store's own words and what to look at.
wrong() {
    expect_fail "$1" added wrong "${@:2}"
    expect_fail 'no such store' store show wrong
}
check "no such bucket" wrong 'PUT .*NoSuchBucket.*case counts' --bucket archive
check "no such key" wrong 'InvalidAccessKeyId.*access key' --access-key-id AKIANOBODY
check "a wrong secret" wrong 'SignatureDoesNotMatch.*secret key' --secret-key wrong
check "nobody listens" wrong 'cannot connect.*port' --port 9
check "a name that does not resolve" wrong 'resolve' --hostname nowhere.invalid
check "a blob size that there is not" wrong 'blob-size must be 4MiB to 64MiB' --blob-size 1MiB
check "a host that is none" wrong 'hostname must be' --hostname http://127.0.0.1
check "a protocol that is none" wrong 'not one of HTTP, HTTPS, HTTPS_UNVERIFIED' --protocol FTP
check "no bucket" wrong 'bucket must be' --bucket ''
no_secret() {
    expect_fail 'secret key is needed' store add wrong --hostname 127.0.0.1 --bucket Archive --access-key-id "$KEY"
}
check "no secret" no_secret
unverified() {
    added later --bucket archive --skip-verification
    expect_fail 'does not work' store validate later
    jq -e '(.passed | not) and .checks[0].advice != null' <(store validate later --json 2>/dev/null)
    store remove later
}
check "settings can be kept untried" unverified

updates() {
    store update cold --bandwidth 800
    shown cold '.limits.bandwidth_mbps == 800'
    store update cold --bandwidth 0
    shown cold '.limits | has("bandwidth_mbps") | not'
    store update cold --region eu-1 --blob-size 8MiB --max-up 3
    shown cold '.region == "eu-1" and .limits.blob_bytes == 8388608 and .limits.uploads_max == 3'
    shown cold ".auth_method == \"AWSSignature4\" and .port == $PORT and .bucket == \"Archive/cold\""
    expect_fail 'does not work' store update cold --bucket nowhere
    shown cold '.bucket == "Archive/cold"'
    expect_fail 'no such store: name=none' store update none --port 1
}
check "what an update does not name stays" updates

tls() {
    wrong 'certificate.*--ca' --protocol HTTPS
    added verified --protocol HTTPS --ca "$NODE/s3/cert.pem"
    shown verified '.has_ca'
    store validate verified
    added unverified --protocol HTTPS_UNVERIFIED
    expect_fail 'certificates' store update unverified --protocol HTTPS --ca "$ROOT/README.md"
    store remove verified
    store remove unverified
}
check "HTTPS wants a certificate that is vouched for, HTTPS_UNVERIFIED takes any" tls

survives() {
    local before
    before=$(store list --json)
    node_kill node
    node_start node
    PORT=$(jq -er .s3 "$NODE/node.json" | sed 's/.*://; s,/$,,')
    store update cold --port "$PORT"
    [ "$(store list --json | jq 'del(.[].port)')" = "$(jq 'del(.[].port)' <<<"$before")" ]
    store validate cold
}
# A store that a filesystem has blobs in: they must be where it is to be from now on.
moves() {
    local second=$WORK/second
    mkdir "$second"
    mkdir "$NODE/mnt/Archive/empty" "$NODE/mnt/Other"
    added blobs --bucket Archive/empty
    "$FOREBAY" fs create "$NODE" second --profile 1+0
    "$FOREBAY" mount "$NODE" "$second" --fs second
    "$FOREBAY" fs attach "$NODE" second blobs --retention 1h --tiering-cue 10s
    # Nothing is there yet.
    store update blobs --bucket Archive/blobs
    head -c 9000000 /dev/urandom | tee "$WORK/file" >"$second/file"
    sync -f "$second"
    wait_until 60 has_blobs
    expect_fail 'second has blobs in store blobs that are not at the new place: bucket Other .*NoSuchKey' \
        store update blobs --bucket Other
    expect_fail 'not at the new place' store update blobs --bucket Archive/empty --skip-verification
    expect_fail 'not at the new place: .*at 127.0.0.1:9: .*cannot connect' store update blobs --port 9 --skip-verification
    shown blobs ".bucket == \"Archive/blobs\" and .port == $PORT"
    store update blobs --hostname localhost --max-up 5
    cp -r "$NODE/mnt/Archive/blobs/." "$NODE/mnt/Other"
    store update blobs --bucket Other
    rm -r "$NODE/mnt/Archive/blobs"
    "$FOREBAY" tier release "$second/file"
    cmp "$second/file" "$WORK/file"
    "$FOREBAY" fs detach "$NODE" second --wait
    [ -z "$(find "$NODE/mnt/Other" -type f)" ]
    store remove blobs
    "$FOREBAY" umount "$NODE" --fs second
}
has_blobs() { "$FOREBAY" tier status "$NODE" --json | jq -e '.[0] | .blobs > 0 and .queued_extents == 0'; }
check "a store with blobs moves only to where they are" moves

check "stores survive SIGKILL" survives
lost_key() {
    "$FOREBAY" stop "$NODE"
    mv "$NODE/node.key" "$WORK/node.key"
    node_start node
    store list | grep unusable
    expect_fail 'secret key is needed' store validate cold
    "$FOREBAY" stop "$NODE"
    mv "$WORK/node.key" "$NODE/node.key"
    node_start node
    shown cold '.problem == null'
}
check "a lost node.key is said" lost_key
numbers() {
    local before
    before=$(store show cold --json | jq .id)
    store remove cold
    added cold
    shown cold ".id > $before"
}
check "a name is free again, a number is not" numbers
check "fsck finds nothing" node_fsck node
exit 0
