#!/usr/bin/env bash
# Ten times the load that a node can take, through the mount and S3 at once: throughput stays about the same, no call
# fails, and memory stays within the budget.
source "$(dirname "$0")/../lib.sh"
LIMIT_S=900
[ "$PLAIN" = 1 ] && { skipped "all" "a plain directory has no S3"; exit 0; }
# Seconds of each step, and the least throughput under overload, as a part of the peak. The clients use much of the CPU.
STEP_S=$([ "$LONG" = 1 ] && echo 30 || echo 3)
SHARE=0.5
PYTHON=$HOME/.cache/forebay/venv/bin/python3
export AWS_SHARED_CREDENTIALS_FILE=$WORK/n/admin-credentials AWS_DEFAULT_REGION=us-east-1 AWS_EC2_METADATA_DISABLED=true
unset AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_PROFILE AWS_CA_BUNDLE

overload() { "$PYTHON" "$ROOT/tests/load/overload.py" "$WORK/n/mnt/load" "$(jq -er .s3 "$WORK/n/node.json")" "$STEP_S" "$SHARE"; }

check "the node starts" node_start n --drives 6 --drive-size 1G --profile 4+2 || exit 0
check "ten times the load has at least half of the peak throughput, and nothing fails" overload
check "memory stayed within the budget" node_within_memory n
check "a file system check finds nothing" node_fsck n
check "the node stops" node_stop n
exit 0
