#!/usr/bin/env bash
# Real S3 clients: s3cmd, rclone, mc, restic, s3fs, pyarrow, pandas and deltalake, each checked through the mount too, and the
# tests that minio-go has for servers; tests/minio-go.expected has those that do not pass.
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

mc_() { "$TOOLS/mc" --config-dir "$WORK/mc-settings" --quiet --no-color "$@"; }
mc_tree() {
    mc_ alias set x "$URL" "$AWS_ACCESS_KEY_ID" "$AWS_SECRET_ACCESS_KEY"
    mc_ mb x/from-mc
    mc_ cp --attr 'Cache-Control=max-age=9;owner=me' --tags 'a=1&b=two' "$TREE/big" x/from-mc/big
    cmp "$TREE/big" "$MNT/from-mc/big"
    [ "$(mc_ stat --json x/from-mc/big | jq -r '.size, .metadata["X-Amz-Meta-Owner"]' | xargs)" = "20000000 me" ]
    [ "$(mc_ tag list --json x/from-mc/big | jq -r '.tagset.b')" = two ]
    mc_ pipe x/from-mc/piped <"$TREE/big"
    cmp "$TREE/big" <(mc_ cat x/from-mc/piped)
    [ "$(mc_ cat --offset 19999990 x/from-mc/big | wc -c)" = 10 ]
    mc_ cp x/from-mc/big x/from-mc/copied
    mc_ mv x/from-mc/copied x/from-mc/moved
    cmp "$TREE/big" "$MNT/from-mc/moved"
    not mc_ stat x/from-mc/copied
    curl -sf "$(mc_ share download --json x/from-mc/big | jq -r .share)" | cmp - "$TREE/big"
    mc_ anonymous set download x/from-mc
    curl -sf "$URL/from-mc/big" | cmp - "$TREE/big"
    mc_ anonymous set private x/from-mc
    not curl -sf "$URL/from-mc/big" -o "$WORK/forbidden"
}
# Names that URLs and XML change.
mc_mirrors() {
    local name names=('with space' 'plus+and&amp' 'percent%41%' 'hash#q?mark' 'größe-日本' "quote'\"x" 'back\slash' 'semi;colon,=@(a)[b]{c}')
    cp -r "$TREE" "$WORK/mc-tree"
    for name in "${names[@]}"; do echo "$name" >"$WORK/mc-tree/$name"; done
    mc_ mirror "$WORK/mc-tree" x/from-mc/tree
    diff -r "$WORK/mc-tree" "$MNT/from-mc/tree"
    mc_ mirror x/from-mc/tree "$WORK/mc-back"
    diff -r "$WORK/mc-tree" "$WORK/mc-back"
    # No copy is older than its source, so that names and sizes are compared.
    mc_ mirror x/from-mc/tree x/from-mc/again
    [ -z "$(mc_ diff x/from-mc/tree x/from-mc/again)" ]
    rm "$MNT/from-mc/again/big"
    mc_ diff x/from-mc/tree x/from-mc/again >"$WORK/differs"
    [ "$(wc -l <"$WORK/differs")" = 1 ]
    grep -q big "$WORK/differs"
    [ "$(mc_ find x/from-mc/tree | wc -l)" = "$(find "$WORK/mc-tree" -type f | wc -l)" ]
    [ "$(mc_ find x/from-mc/tree --name big)" = x/from-mc/tree/big ]
    mc_ rm --recursive --force x/from-mc/again
    not ls "$MNT/from-mc/again"
    not mc_ rb x/from-mc
    mc_ rb --force x/from-mc
    not ls "$MNT/from-mc"
}
if [ -x "$TOOLS/mc" ]; then
    check "mc" mc_tree && check "mc: trees" mc_mirrors
else
    skipped "mc" "installed by tests/deps.sh long"
fi

# minio_go_results FILE: names of what did not pass, once each.
minio_go_results() { jq -r 'select(.status != "PASS").name' "$1" | sed 's/^minio-go: //' | sort -u; }
minio_go() {
    mkdir "$WORK/minio-go"
    (
        cd "$WORK/minio-go"
        SERVER_ENDPOINT=${URL#http://} ACCESS_KEY=$AWS_ACCESS_KEY_ID SECRET_KEY=$AWS_SECRET_ACCESS_KEY ENABLE_HTTPS=0 MINT_MODE=full \
            RUN_ON_FAIL=1 "$1" >results.json
    )
    jq -r '.status' "$WORK/minio-go/results.json" | sort | uniq -c
    jq -c 'select(.status == "FAIL") | [.name, .message, .error]' "$WORK/minio-go/results.json"
    [ "$(grep -c '"status":"PASS"' "$WORK/minio-go/results.json")" -gt 60 ]
    diff <(awk '!/^#/ && NF { print $1 }' "$ROOT/tests/minio-go.expected" | sort) <(minio_go_results "$WORK/minio-go/results.json")
}
MINIO_GO=$(find "$TOOLS" -name 'minio-go-v*' | sort -V | tail -n 1)
if [ -x "$MINIO_GO" ]; then check "the tests of minio-go" minio_go "$MINIO_GO"; else skipped "the tests of minio-go" "built by tests/deps.sh long"; fi

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
