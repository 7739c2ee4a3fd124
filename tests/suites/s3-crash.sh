#!/usr/bin/env bash
# S3 across crashes: SIGKILL under puts, multipart uploads, conditional writes, copies, deletions and changes of the same
# files on the mount. See tests/s3/crash.py.
#   FOREBAY_CRASH_ROUNDS   four times the number of crashes (default: 8 crashes, long: 60)
source "$(dirname "$0")/../lib.sh"
ROUNDS=$((${FOREBAY_CRASH_ROUNDS:-$([ "$LONG" = 1 ] && echo 240 || echo 32)} / 4))
LIMIT_S=$((120 + ROUNDS * 15))

if [ "$PLAIN" = 1 ]; then
    skipped "all" "needs the binary"
    exit 0
fi

NODE=$WORK/node
export NODE FOREBAY PYTHONDONTWRITEBYTECODE=1
export AWS_SHARED_CREDENTIALS_FILE=$NODE/admin-credentials AWS_EC2_METADATA_DISABLED=true
unset AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_PROFILE AWS_CA_BUNDLE

# The account of changes on the mount knows no others.
strict_mounts
check "a node with an endpoint starts" node_start node --drives 6 --drive-size 1G --profile 4+2 || exit 0
live_bytes() { "$FOREBAY" status "$NODE" --json | jq .space.live_bytes; }
check "$ROUNDS crashes, seed $SEED" "$HOME/.cache/forebay/venv/bin/python3" "$ROOT/tests/s3/crash.py" "$ROUNDS" "$SEED"
few() { [ "$(live_bytes)" -lt 4000000 ]; }
# After a minute, the node searches for orphans of killed writers, every 20 s.
check "space of deleted objects and aborted uploads returns" wait_until 110 few
check "the node stops" node_stop node
check "a file system check finds nothing" node_fsck node
exit 0
