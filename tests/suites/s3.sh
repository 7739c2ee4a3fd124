#!/usr/bin/env bash
# The S3 endpoint: calls of boto3 with assertions, the aws command line, s3s-e2e, and hostile requests. Data
# written through S3 is also read through the mount, and the other way round.
source "$(dirname "$0")/../lib.sh"
LIMIT_S=120

if [ "$PLAIN" = 1 ]; then
    skipped "all" "needs the binary"
    exit 0
fi

NODE=$WORK/node
VENV=$HOME/.cache/forebay/venv
PYTHON=$VENV/bin/python3
export MNT=$NODE/mnt PYTHONPATH=$ROOT/tests/s3 PYTHONDONTWRITEBYTECODE=1
export AWS_SHARED_CREDENTIALS_FILE=$NODE/admin-credentials AWS_DEFAULT_REGION=us-east-1 AWS_EC2_METADATA_DISABLED=true
unset AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_PROFILE AWS_CA_BUNDLE

matrix() { "$PYTHON" "$ROOT/tests/s3/matrix.py" "$@"; }
hostile() { NODE=$NODE "$PYTHON" "$ROOT/tests/s3/hostile.py" "$@"; }
aws() { "$VENV/bin/aws" --endpoint-url "$ENDPOINT" "$@"; }
endpoint() { jq -er .s3 "$NODE/node.json"; }

check "a node with an endpoint starts" node_start node --drives 6 --drive-size 512M --profile 4+2 || exit 0
check "node.json names the endpoint" endpoint || exit 0
ENDPOINT=$(endpoint)
export ENDPOINT CERTIFICATE=$NODE/s3/cert.pem
shows_endpoint() { "$FOREBAY" status "$NODE" | grep -F "$ENDPOINT" && "$FOREBAY" status "$NODE" --json | jq -e --arg url "$ENDPOINT" '.s3 == $url'; }
check "status shows it" shows_endpoint

for group in buckets objects names directories metadata tagging ranges conditions listing coherence copies multipart \
    checksums presigned parameters owners renewed forms transport cross_origin; do
    check "boto3: $group" matrix "$group"
done
for group in signatures clock rubbish unprintable lengths broken additions subresources slow_forms crowd slow_puts slow_gets; do
    check "hostile: $group" hostile "$group"
done

answers() { NODE=$NODE FOREBAY=$FOREBAY "$PYTHON" "$ROOT/tests/s3/answers.py" "$1"; }
for group in composite encryption documents heads far_ranges absent ownership emptied probes versions health canned form_answers \
    attributes small_things tag_policies regions; do
    check "answers: $group" answers "$group"
done

users() { NODE=$NODE FOREBAY=$FOREBAY "$PYTHON" "$ROOT/tests/s3/users.py" "$1"; }
for group in prefixes disabled expiring addresses renamed sessions copies audited; do
    check "users: $group" users "$group"
done

aws_command_line() {
    local tree=$WORK/tree
    mkdir -p "$tree/sub/deep"
    head -c 20000000 /dev/urandom >"$tree/big"
    for size in 0 1 700 9000 70000; do head -c "$size" /dev/urandom >"$tree/sub/f$size"; done
    cp "$tree/big" "$tree/sub/deep/copy of big"
    aws s3 mb s3://cli-bucket
    aws s3 sync --no-progress "$tree" s3://cli-bucket/tree
    diff -r "$tree" "$MNT/cli-bucket/tree"
    aws s3 sync --no-progress s3://cli-bucket/tree "$WORK/back"
    diff -r "$tree" "$WORK/back"
    aws s3 mv --no-progress s3://cli-bucket/tree/big s3://cli-bucket/moved
    cmp "$tree/big" "$MNT/cli-bucket/moved"
    cp -r "$tree/sub" "$MNT/cli-bucket/posix"
    aws s3 sync --no-progress s3://cli-bucket/posix "$WORK/posix"
    diff -r "$tree/sub" "$WORK/posix"
    aws s3 ls s3://cli-bucket/tree/sub/ >"$WORK/listed"
    grep -q 'PRE deep/' "$WORK/listed"
    aws s3 rm --quiet --recursive s3://cli-bucket/tree
    not ls "$MNT/cli-bucket/tree"
    # The bucket still has files. --force deletes them first; directories made on the mount go with the bucket.
    not aws s3 rb s3://cli-bucket
    aws s3 rb --force s3://cli-bucket
    not ls "$MNT/cli-bucket"
}
check "the aws command line" aws_command_line

e2e() {
    local key secret
    key=$(awk -F' = ' '/access_key_id/ { print $2 }' "$AWS_SHARED_CREDENTIALS_FILE")
    secret=$(awk -F' = ' '/secret/ { print $2 }' "$AWS_SHARED_CREDENTIALS_FILE")
    AWS_ACCESS_KEY_ID=$key AWS_SECRET_ACCESS_KEY=$secret AWS_REGION=us-east-1 AWS_ENDPOINT_URL=$ENDPOINT \
        "$TOOLS/s3s-e2e" | tee "$WORK/e2e"
    not grep -qi 'fail' <(grep -vi '0 failed' "$WORK/e2e")
}
if [ -x "$TOOLS/s3s-e2e" ]; then check "s3s-e2e" e2e; else skipped "s3s-e2e" "installed by tests/deps.sh long"; fi

survives_restart() {
    aws s3 mb s3://kept
    aws s3 cp --no-progress "$ROOT/README.md" s3://kept/a/b
    "$1" node
    node_start node
    [ "$(endpoint)" = "$ENDPOINT" ]
    aws s3 cp --no-progress s3://kept/a/b "$WORK/kept"
    cmp "$WORK/kept" "$ROOT/README.md"
    aws s3 rb --force s3://kept
}
check "address and objects survive a restart" survives_restart node_stop
check "address and objects survive a crash" survives_restart node_kill

space_returns() {
    rm -rf "${MNT:?}"/*
    # Only the space of metadata is left.
    few() { [ "$("$FOREBAY" status "$NODE" --json | jq .space.live_bytes)" -lt 4000000 ]; }
    wait_until 60 few
}
check "space of deleted objects, aborted and interrupted uploads returns" space_returns
check "the node stops" node_stop node
check "a file system check finds nothing" node_fsck node
exit 0
