#!/usr/bin/env bash
# Object stores: add, test, change and remove them. The store is the node's own endpoint, over HTTP and HTTPS, so that
# every failure comes from a real S3 server.
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
# added NAME [OPTION…]: adds a store with working settings; options replace some of them.
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
check "a store is tested and added, and no object is left" good_store
measured() {
    store bench cold --size 1MiB --parallel 4 --seconds 1 --json |
        jq -e '.plan.parallel == 4 and .put_bytes_per_s > 0 and .get_bytes_per_s > 0 and .round_trip_us > 0'
    store bench cold --size 100KiB --parallel 1 --seconds 1 | grep -E '^PUT .*/s, 1 of 100(.00)? KiB at a time'
    nothing_is_left
    expect_fail 'memory' store bench cold --parallel 1000
    expect_fail 'no such store' store bench nowhere
}
check "its speed is measured, and no object is left" measured
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

# Each failure names the step, the error in the store's words, and advice.
wrong() {
    expect_fail "$1" added wrong "${@:2}"
    expect_fail 'no such store' store show wrong
}
check "no such bucket" wrong 'PUT .*NoSuchBucket.*case counts' --bucket archive
check "no such key" wrong 'InvalidAccessKeyId.*access key' --access-key-id AKIANOBODY
check "a wrong secret" wrong 'SignatureDoesNotMatch.*secret key' --secret-key wrong
check "no server" wrong 'cannot connect.*port' --port 9
check "a name that does not resolve" wrong 'resolve' --hostname nowhere.invalid
check "an invalid blob size" wrong 'blob-size must be 4MiB to 64MiB' --blob-size 1MiB
check "an invalid host" wrong 'hostname must be' --hostname http://127.0.0.1
check "an unknown protocol" wrong 'not one of HTTP, HTTPS, HTTPS_UNVERIFIED' --protocol FTP
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
check "settings can be stored without a test" unverified

updates() {
    store update cold --bandwidth 800
    shown cold '.limits.bandwidth_mbps == 800'
    store update cold --bandwidth 0
    shown cold '.limits | has("bandwidth_mbps") | not'
    store update cold --max-cluster 16
    shown cold '.limits.cluster_max == 16'
    store show cold | grep -F '64 removals at most per node, 16 of each in all'
    store update cold --max-cluster 0
    shown cold '.limits | has("cluster_max") | not'
    store update cold --region eu-1 --blob-size 8MiB --max-up 3
    shown cold '.region == "eu-1" and .limits.blob_bytes == 8388608 and .limits.uploads_max == 3'
    shown cold ".auth_method == \"AWSSignature4\" and .port == $PORT and .bucket == \"Archive/cold\""
    expect_fail 'does not work' store update cold --bucket nowhere
    shown cold '.bucket == "Archive/cold"'
    expect_fail 'no such store: name=none' store update none --port 1
}
check "an update keeps all other settings" updates

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
check "HTTPS needs a trusted certificate, HTTPS_UNVERIFIED takes any" tls

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
# A store with blobs of a filesystem: its new place must have them.
moves() {
    local second=$WORK/second
    mkdir "$second"
    mkdir "$NODE/mnt/Archive/empty" "$NODE/mnt/Other"
    added blobs --bucket Archive/empty
    "$FOREBAY" fs create "$NODE" second --profile 1+0
    "$FOREBAY" mount "$NODE" "$second" --fs second
    "$FOREBAY" fs attach "$NODE" second blobs --retention 1h --tiering-cue 10s
    # The store has no blobs yet.
    store update blobs --bucket Archive/blobs
    head -c 9000000 /dev/urandom | tee "$WORK/file" >"$second/file"
    sync_files "$second"
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
check "a store with blobs moves only to a place that has them" moves

# Filesystem groups: times that filesystems share, and own times of a filesystem.
group() { "$FOREBAY" fs group "$1" "$NODE" "${@:2}"; }
attach() { "$FOREBAY" fs attach "$NODE" "$1" grouped "${@:2}"; }
# timed FILESYSTEM GROUP RETENTION OWN CUE OWN
timed() {
    "$FOREBAY" tier status "$NODE" --json | jq -e --arg filesystem "$1" --arg times "$2 $3 $4 $5 $6" '.[]
        | select(.filesystem == $filesystem)
        | "\(.group) \(.retention_s) \(.has_own_retention) \(.cue_s) \(.has_own_cue)" == $times' || {
        echo "$*:"
        "$FOREBAY" tier status "$NODE" --json | jq -c '.[] | [.filesystem, .group, .retention_s, .has_own_retention, .cue_s, .has_own_cue]'
        return 1
    }
}
group_refusals() {
    group list --json | jq -e '. == [{"name": "default", "retention_s": 86400, "cue_s": 3600, "filesystems": ["main", "second"]}]'
    expect_fail 'cue must be between 10s and a third of the retention: cue=11s retention=30s' \
        group create wrong --retention 30s --tiering-cue 11s
    expect_fail 'cue=9s' group create wrong --tiering-cue 9s
    expect_fail 'not a duration' group create wrong --retention 1y
    expect_fail 'bad name of a filesystem group' group create 'a/b'
    expect_fail 'value is required' group create ''
    expect_fail 'no such filesystem group: name=none .*fs group list' group show none
    expect_fail 'no such filesystem group: name=none .*fs group list' group update none --retention 1d
    expect_fail 'no such filesystem group: name=none .*fs group list' group remove none
    expect_fail 'no such filesystem group: name=none' "$FOREBAY" fs create "$NODE" third --profile 1+0 --group none
    expect_fail 'no such filesystem group: name=none' "$FOREBAY" fs set "$NODE" main --group none
    expect_fail 'no such filesystem: name=none' "$FOREBAY" fs set "$NODE" none --group default
    expect_fail 'group default stays' group remove default
    group list --json | jq -e 'length == 1'
}
check "invalid filesystem groups are refused" group_refusals
groups() {
    group create fast --retention 1h --tiering-cue 4m --json | jq -e '.filesystems == [] and .retention_s == 3600 and .cue_s == 240'
    group create slow --retention 60s
    group show slow | grep -E 'slow +1m +20s +-'
    expect_fail 'exists: name=fast' group create fast
    "$FOREBAY" fs create "$NODE" third --profile 1+0 --group fast | grep -E 'third +fast'
    "$FOREBAY" fs set "$NODE" second --group fast | grep -E 'second +fast'
    "$FOREBAY" fs list "$NODE" --json | jq -e '[.[] | .group] == ["default", "fast", "fast"]'
    group show fast --json | jq -e '.filesystems == ["second", "third"]'
    mkdir "$NODE/mnt/Grouped"
    added grouped --bucket Grouped
    attach second | grep 'copied after 4m, from the drives after 1h, both as filesystem group fast says'
    attach third
    timed second fast 3600 false 240 false
    timed third fast 3600 false 240 false
    group update fast --retention 2h --tiering-cue 10m
    timed second fast 7200 false 600 false
    timed third fast 7200 false 600 false
    expect_fail 'cue=10m retention=29m' group update fast --retention 29m
    timed third fast 7200 false 600 false
    expect_fail 'fast has filesystem second: give it another' group remove fast
}
check "a filesystem group is changed for all its filesystems" groups
shared() {
    "$FOREBAY" tier ops "$NODE" grouped --json | jq -e '[.[] | [.store, .filesystems]] == [["grouped", ["second", "third"]]]'
    store update grouped --max-cluster 2
    "$FOREBAY" tier ops "$NODE" grouped --json | jq -e '[.[] | .filesystems] == [["second", "third"]]'
    store update grouped --max-cluster 0
}
check "filesystems reach their store together" shared
own_times() {
    expect_fail 'cue=9s retention=29s' attach third --retention 29s
    attach third --retention 1m
    timed third fast 60 true 20 false
    attach third --group-times
    attach third --tiering-cue 30m
    attach third
    timed third fast 7200 false 1800 true
    "$FOREBAY" fs show "$NODE" third | grep -F 'cue 30m (its own), retention 2h (the group'
    expect_fail 'filesystem third has times of its own that do not fit .*cue=30m retention=1h' group update fast --retention 1h
    timed second fast 7200 false 600 false
    group update fast --retention 3h
    timed second fast 10800 false 600 false
    timed third fast 10800 false 1800 true
    expect_fail 'third has times of its own that do not fit .*group slow' "$FOREBAY" fs set "$NODE" third --group slow
    "$FOREBAY" fs set "$NODE" second --group slow
    timed second slow 60 false 20 false
    attach third --group-times
    timed third fast 10800 false 600 false
    attach third --retention 1d --tiering-cue 1h
    group update fast --retention 1w
    timed third fast 86400 true 3600 true
}
check "own times of a filesystem stay" own_times
# The times of a group apply: content leaves the drives when the new times say so.
group_takes_effect() {
    local third=$WORK/third
    mkdir "$third"
    attach third --group-times
    "$FOREBAY" mount "$NODE" "$third" --fs third
    head -c 3000000 /dev/urandom >"$third/file"
    sync_files "$third"
    sleep 12
    not third_is '.both_extents + .away_extents > 0'
    group update fast --retention 30s --tiering-cue 10s
    wait_until 60 third_is '.queued_extents == 0 and .both_extents + .away_extents > 0'
    wait_until 60 third_is '.away_extents > 0'
    "$FOREBAY" umount "$NODE" --fs third
}
third_is() { "$FOREBAY" tier status "$NODE" --json | jq -e ".[] | select(.filesystem == \"third\") | $1" >/dev/null; }
check "times of a filesystem group take effect" group_takes_effect
groups_survive() {
    local before
    group update default --retention 2d
    attach third --retention 1d
    before=$(group list --json)
    node_kill node
    node_start node
    [ "$(group list --json)" = "$before" ]
    jq -e '.[0] == {"name": "default", "retention_s": 172800, "cue_s": 3600, "filesystems": ["main"]}' <<<"$before"
    timed second slow 60 false 20 false
    timed third fast 86400 true 10 false
    PORT=$(jq -er .s3 "$NODE/node.json" | sed 's/.*://; s,/$,,')
    store update grouped --port "$PORT"
    "$FOREBAY" fs detach "$NODE" second --wait
    "$FOREBAY" fs detach "$NODE" third --wait
    store remove grouped
    "$FOREBAY" fs set "$NODE" second --group default
    group remove slow | grep 'slow is removed'
    not group show slow
}
check "filesystem groups survive SIGKILL" groups_survive

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
check "a lost node.key is reported" lost_key
numbers() {
    local before
    before=$(store show cold --json | jq .id)
    store remove cold
    added cold
    shown cold ".id > $before"
}
check "a name is reused, a number is not" numbers
check "fsck finds nothing" node_fsck node
exit 0
