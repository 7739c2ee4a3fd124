#!/usr/bin/env bash
# Real S3 clients: s3cmd, rclone, restic, s3fs, pyarrow, pandas and deltalake, each checked through the mount too.
source "$(dirname "$0")/../lib.sh"

if [ "$PLAIN" = 1 ]; then
    skipped "all" "needs the binary"
    exit 0
fi

NODE=$WORK/node
MNT=$NODE/mnt
PYTHON=$HOME/.cache/forebay/venv-clients/bin/python3
TREE=$WORK/tree

check "a node with an endpoint starts" node_start node --drives 6 --drive-size 2G --profile 4+2 || exit 0
URL=$(jq -er .s3 "$NODE/node.json") || exit 0
CREDENTIALS=$NODE/admin-credentials
AWS_ACCESS_KEY_ID=$(awk -F' = ' '/access_key_id/ { print $2 }' "$CREDENTIALS")
AWS_SECRET_ACCESS_KEY=$(awk -F' = ' '/secret/ { print $2 }' "$CREDENTIALS")
unset AWS_PROFILE AWS_CA_BUNDLE
export URL AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_DEFAULT_REGION=us-east-1 AWS_EC2_METADATA_DISABLED=true
mkdir "$MNT/clients"
stage_tree "$([ "$LONG" = 1 ] && echo 4000 || echo 400)" "$TREE"
# Objects have no links.
find "$TREE" -type l -delete
find "$TREE" -type d -empty -delete
head -c 20000000 /dev/urandom >"$TREE/big"

s3cmd_() { s3cmd --config=/dev/null --no-ssl --host="${URL#http://}" --host-bucket="${URL#http://}" --access_key="$AWS_ACCESS_KEY_ID" --secret_key="$AWS_SECRET_ACCESS_KEY" "$@"; }
s3cmd_tree() {
    s3cmd_ --quiet sync "$TREE/" s3://clients/s3cmd/
    diff -r "$TREE" "$MNT/clients/s3cmd"
    mkdir "$WORK/s3cmd"
    s3cmd_ --quiet sync s3://clients/s3cmd/ "$WORK/s3cmd/"
    diff -r "$TREE" "$WORK/s3cmd"
    # These set the ACL of the source on the copy.
    s3cmd_ --quiet cp s3://clients/s3cmd/big s3://clients/s3cmd/copied
    s3cmd_ --quiet mv s3://clients/s3cmd/copied s3://clients/s3cmd/moved
    cmp "$TREE/big" "$MNT/clients/s3cmd/moved"
    not ls "$MNT/clients/s3cmd/copied"
    s3cmd_ --quiet del --recursive s3://clients/s3cmd/
    not ls "$MNT/clients/s3cmd"
}
check "s3cmd" s3cmd_tree

rclone_() { rclone --config /dev/null --s3-provider Other --s3-endpoint "$URL" --s3-env-auth --s3-force-path-style "$@"; }
rclone_tree() {
    rclone_ sync "$TREE" :s3:clients/rclone
    rclone_ check "$TREE" :s3:clients/rclone
    diff -r "$TREE" "$MNT/clients/rclone"
    rm -rf "$MNT/clients/rclone/big"
    not rclone_ check "$TREE" :s3:clients/rclone
    cp -r "$TREE" "$MNT/clients/posix"
    rclone_ sync :s3:clients/posix "$WORK/rclone"
    diff -r "$TREE" "$WORK/rclone"
    rclone_ --s3-chunk-size 5M --s3-upload-cutoff 5M copyto "$TREE/big" :s3:clients/parts
    cmp "$TREE/big" "$MNT/clients/parts"
}
check "rclone" rclone_tree

restic_backup() {
    local repository=s3:$URL/clients/restic
    export RESTIC_PASSWORD=x RESTIC_CACHE_DIR=$WORK/restic-cache
    restic -q -r "$repository" init
    restic -q -r "$repository" backup "$TREE"
    restic -q -r "$repository" check --read-data
    restic -q -r "$repository" restore latest --target "$WORK/restored"
    diff -r "$TREE" "$WORK/restored$TREE"
    restic -q -r "$repository" forget --keep-last 1 --prune
}
check "restic" restic_backup

s3fs_mount() {
    (umask 077 && echo "$AWS_ACCESS_KEY_ID:$AWS_SECRET_ACCESS_KEY" >"$WORK/passwd")
    mkdir -p "$WORK/s3fs"
    s3fs clients "$WORK/s3fs" -o "passwd_file=$WORK/passwd,url=$URL,use_path_request_style"
    wait_until 10 mountpoint -q "$WORK/s3fs"
    mkdir "$WORK/s3fs/from-s3fs"
    cp "$TREE/big" "$WORK/s3fs/from-s3fs/a"
    mv "$WORK/s3fs/from-s3fs/a" "$WORK/s3fs/from-s3fs/b"
    cmp "$TREE/big" "$MNT/clients/from-s3fs/b"
    fusermount -u "$WORK/s3fs"
}
check "s3fs" s3fs_mount

for part in arrow pandas delta; do
    check "$part" "$PYTHON" "$ROOT/tests/s3/tables.py" "$part"
done
check "the node stops" node_stop node
check "a file system check finds nothing" node_fsck node
exit 0
