#!/usr/bin/env bash
# Other programs fill the filesystem below a node for a while: calls are answered, acknowledged data is not lost, and
# the node recovers by itself when there is room. The node's standard error is a pipe without a reader, as after every
# `forebay start`.
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && { skipped "all" "a plain directory has no node"; exit 0; }
MNT=$WORK/mnt
HOST=$WORK/host
DIR=$HOST/dir
# Longest time of a call, in seconds.
ANSWER_S=60

# host SIZE: a small filesystem without a reserve for root.
host() {
    mkdir -p "$HOST" "$MNT" "$WORK/elsewhere"
    truncate -s "$1" "$WORK/image"
    mkfs.ext4 -q -m 0 "$WORK/image"
    mount -o loop "$WORK/image" "$HOST"
    echo "$DIR" >>"$WORK/.nodes"
}

# end_host: removes the filesystem. The node must have ended.
end_host() {
    umount "$HOST"
    rm -rf "$WORK/image" "$WORK/elsewhere" "$WORK/sums"
    : >"$WORK/.nodes"
}

start_node() { timeout 120 "$FOREBAY" start "$DIR" --mount "$MNT" --memory "$MEMORY" "$@" </dev/null; }
stop_node() { timeout 60 "$FOREBAY" stop "$DIR"; }
status_of() { timeout 20 "$FOREBAY" status "$DIR" --json | jq -r "$1"; }
no_drive_failed() { [ "$(status_of '[.drives[] | select(.state != "up")] | length')" = 0 ]; }
answered() { timeout "$ANSWER_S" "$@"; }

# Fills the host to the last byte.
fill_host() {
    dd if=/dev/zero of="$HOST/filler" bs=1M status=none || true
    dd if=/dev/zero of="$HOST/filler-2" bs=512 status=none || true
}
free_host() { rm -f "$HOST"/filler "$HOST"/filler-2; }

# write_some NAME COUNT BYTES: writes durable files and records the successful ones with their checksums.
write_some() {
    answered python3 - "$MNT" "$1" "$2" "$3" "$WORK/sums" <<'END'
import errno, hashlib, os, sys
mount, name, count, size, account = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
done = 0
with open(account, "a") as sums:
    for number in range(count):
        path = f"{mount}/{name}-{number}"
        data = os.urandom(size)
        try:
            file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
            try:
                os.write(file, data)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EIO, errno.EAGAIN):
                raise
            print(f"{done} of {count}: {error}")
            break
        sums.write(f"{hashlib.sha256(data).hexdigest()}  {path}\n")
        done += 1
print(f"{done} files")
sys.exit(0 if done == count else 3)
END
}
intact() { answered sha256sum --check --quiet "$WORK/sums"; }

# --- metadata on a full filesystem, drives elsewhere ---------------------------------------------------------------

metadata_node() {
    host 120M
    start_node --drive "$WORK/elsewhere/a" --drive "$WORK/elsewhere/b" --drive "$WORK/elsewhere/c" \
        --drive "$WORK/elsewhere/d" --drive-size 512M --profile 2+2
    mkdir "$MNT/bucket"
    dd if=/dev/zero of="$HOST/filler" bs=1M count=30 status=none
}

names_until_full() {
    expect_full write_some small 20000 8000
    [ "$(wc -l <"$WORK/sums")" -gt 100 ]
}
expect_full() { local status=0; "$@" || status=$?; [ "$status" = 3 ]; }

# Long enough that the log finds no room either.
stays_full() {
    sleep 10
    fill_host
    sleep 5
    answered ls "$MNT" >/dev/null
    status_of '.state, .problems[]'
}

# s3_put KEY: a small object into the bucket `bucket`; prints the status, the code and the message of a refusal.
s3_put() {
    AWS_SHARED_CREDENTIALS_FILE=$DIR/admin-credentials ENDPOINT=$(jq -r .s3 "$DIR/node.json") answered env \
        -u AWS_ACCESS_KEY_ID -u AWS_SECRET_ACCESS_KEY -u AWS_PROFILE "$HOME/.cache/forebay/venv/bin/python3" - "$1" <<'END'
import os, sys
import boto3, botocore
config = botocore.config.Config(retries={"max_attempts": 0}, read_timeout=50)
s3 = boto3.client("s3", endpoint_url=os.environ["ENDPOINT"], region_name="us-east-1", config=config)
try:
    s3.put_object(Bucket="bucket", Key=sys.argv[1], Body=b"x" * 20000)
    print("200")
except botocore.exceptions.ClientError as error:
    answer = error.response
    print(answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"], answer["Error"]["Message"])
END
}
s3_put_is() { s3_put object >"$WORK/put" && grep -qE "$1" "$WORK/put"; }

# refused_for_metadata: the log may have had room left, for many objects.
refused_for_metadata() {
    write_some "more-$((more += 1))" 20000 8000 || true
    s3_put_is '^507 InsufficientStorage .*for the metadata'
}
# The drives have room: neither S3 nor `status` may say that they are full.
metadata_is_named() {
    local more=0
    wait_until 30 refused_for_metadata || { cat "$WORK/put" && return 1; }
    cat "$WORK/put"
    not grep -q 'on the drives\.' "$WORK/put"
    status_of '.problems[]' | tee "$WORK/problems"
    grep -q "takes no new data.*metadata is in $DIR/meta" "$WORK/problems"
    not grep -qE 'drives? .*(are|is) full' "$WORK/problems"
    status_of '[.drives[].full] | any' | grep -qx false
}

unlink_half() {
    local path
    awk 'NR % 2 { print $2 }' "$WORK/sums" >"$WORK/gone"
    awk 'NR % 2 == 0' "$WORK/sums" >"$WORK/kept"
    mv "$WORK/kept" "$WORK/sums"
    answered xargs rm <"$WORK/gone"
    answered ls "$MNT" | wc -l
    intact
}

goes_on() {
    free_host
    wait_until 60 write_some "$1" 20 8000
    intact
    no_drive_failed
}

# The events were recorded as soon as there was room for them.
metadata_events() {
    wait_until 30 s3_put_is '^200'
    wait_until 30 told_of_metadata
}
told_of_metadata() {
    timeout 20 "$FOREBAY" events "$DIR" --json |
        jq -e '[.[] | select(.subject == "filesystem main").kind] | .[-2:] == ["metadata full", "metadata has room"]' >/dev/null
}

# --- drives on the same filesystem, with space given back ---------------------------------------------------------

drives_node() {
    host 1200M
    start_node --drives 4 --drive-size 256M --profile 2+2 --trim always
    write_some first 20 1000000
}

writes_end() {
    fill_host
    # Some writes succeed in blocks that were allocated earlier.
    expect_full write_some large 300 1000000
    no_drive_failed
    intact
    answered ls -l "$MNT" >/dev/null
    status_of '.problems[]'
    status_of '[.drives[].reason] | map(select(. != null)) | .[0]' | grep -q 'is full'
}

reads_go_on() {
    sleep 5
    intact
    no_drive_failed
}

comes_back() {
    free_host
    wait_until 60 write_some later 20 1000000
    no_drive_failed
    intact
}

crash_while_full() {
    fill_host
    expect_full write_some again 300 1000000
    kill -KILL "$(jq -r .pid "$DIR/node.json")"
    umount -l "$MNT"
    free_host
    start_node
    intact
    write_some after 20 1000000
    no_drive_failed
    timeout 120 "$FOREBAY" fsck "$DIR"
}


check "a node with its metadata on a small filesystem starts" metadata_node || exit 0
check "names end with ENOSPC" names_until_full
check "status and listings answer while it stays full" stays_full
check "S3 and status name the metadata, not the drives" metadata_is_named
check "deleting goes on" unlink_half
check "it recovers by itself when there is room" goes_on later
check "events tell of it, and S3 takes objects again" metadata_events
check "it stops" stop_node
end_host

check "a node with its drives on a small filesystem starts" drives_node || exit 0
check "writing ends, and no drive fails" writes_end
check "reading goes on" reads_go_on
check "writing goes on by itself when there is room" comes_back
check "a crash while it is full loses nothing" crash_while_full
check "the node stops" stop_node
end_host
exit 0
