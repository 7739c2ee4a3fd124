#!/usr/bin/env bash
# A full filesystem: writes fail with ENOSPC, acknowledged data is intact, and deletions work and return the space.
source "$(dirname "$0")/../lib.sh"
MNT=$WORK/n/mnt
# Seconds within which deleted space can be written again.
RETURN_S=60
BLOCK_BYTES=$((4 << 20))

# In a plain directory, the test would fill the disk of the machine: use a small filesystem in memory.
start() {
    if [ "$PLAIN" = 1 ]; then
        mkdir -p "$MNT"
        mount -t tmpfs -o size=256M tmpfs "$MNT"
    else
        node_start n --drives 6 --drive-size 64M --profile 4+2
    fi
}

available_bytes() { df --output=avail -B 1 "$MNT" | tail -n 1; }

# fill DIR: writes files of one size until one fails. Files acknowledged by fsync are listed with their checksums.
fill() {
    local i file
    mkdir -p "$1"
    head -c "$BLOCK_BYTES" /dev/urandom >"$WORK/block"
    for ((i = 0; i < 1000; i++)); do
        file=$1/$(printf '%04d' "$i")
        # A different beginning makes every file different.
        { echo "$file"; cat "$WORK/block"; } >"$WORK/one"
        if ! dd if="$WORK/one" of="$file" bs=1M conv=fsync 2>"$WORK/dd"; then
            cat "$WORK/dd"
            grep -q 'No space left on device' "$WORK/dd"
            echo "$file" >"$WORK/last"
            echo "$i files were acknowledged"
            [ "$i" -gt 0 ]
            return
        fi
        (cd "$MNT" && sha256sum "${file#"$MNT/"}") >>"$WORK/sums"
    done
    echo "never full"
    return 1
}

until_full() {
    : >"$WORK/sums"
    fill "$MNT/first"
}

# Small writes also fail with ENOSPC, not with another error.
small_writes_fail() {
    local i
    for ((i = 0; i < 20000; i++)); do
        if ! dd if=/dev/zero of="$MNT/small-$i" bs=16k count=1 conv=fsync 2>"$WORK/dd"; then
            cat "$WORK/dd"
            grep -q 'No space left on device' "$WORK/dd"
            return
        fi
    done
    echo "never full"
    return 1
}

# Writes fail, so `df` promises less than one more file.
df_promises_nothing() {
    local available
    available=$(available_bytes)
    echo "available: $available"
    [ "$available" -lt "$BLOCK_BYTES" ] && return
    # For the log: whether that promise would be kept.
    dd if=/dev/zero of="$MNT/promised" bs="$BLOCK_BYTES" count=1 conv=fsync || true
    "$FOREBAY" drive list "$WORK/n"
    return 1
}

acknowledged_is_intact() { (cd "$MNT" && sha256sum --check --quiet "$WORK/sums"); }

# The file of the failed write may have some of its bytes, but no others.
failed_file_is_not_torn() {
    local file size
    file=$(cat "$WORK/last")
    [ -e "$file" ] || return 0
    size=$(stat -c %s "$file")
    { echo "$file"; cat "$WORK/block"; } >"$WORK/one"
    [ "$size" -le "$(stat -c %s "$WORK/one")" ]
    # Parts that were not written to drives are holes.
    cmp -n "$size" "$file" "$WORK/one" || {
        cmp -l -n "$size" "$file" "$WORK/one" | awk '$2 != 0 { print "foreign byte", $0; bad = 1; exit } END { exit bad }'
    }
}

# The file that did not fit cannot be flushed: stop reports that and still stops the node.
stop_or_say() { node_stop n || not "$FOREBAY" status "$WORK/n"; }

after_restart() {
    [ "$PLAIN" = 1 ] || { stop_or_say && node_start n; }
    acknowledged_is_intact
}

after_crash() {
    [ "$PLAIN" = 1 ] || { node_kill n && node_start n; }
    acknowledged_is_intact
}

# The same through S3: during the writes, the first acknowledged file is removed and the second one is read.
uploads_when_full() {
    local first second
    [ "$PLAIN" = 1 ] && return
    first=$(awk 'NR == 1 { print $2 }' "$WORK/sums")
    second=$(awk 'NR == 2 { print $2 }' "$WORK/sums")
    ENDPOINT=$(jq -er .s3 "$WORK/n/node.json") CERTIFICATE=$WORK/n/s3/cert.pem NODE=$WORK/n MNT=$MNT \
        AWS_SHARED_CREDENTIALS_FILE=$WORK/n/admin-credentials AWS_DEFAULT_REGION=us-east-1 PYTHONPATH=$ROOT/tests/s3 \
        BUCKET=first REMOVED=${first#first/} KEPT=${second#first/} PYTHONDONTWRITEBYTECODE=1 \
        env -u AWS_ACCESS_KEY_ID -u AWS_SECRET_ACCESS_KEY -u AWS_PROFILE -u AWS_CA_BUNDLE "$HOME/.cache/forebay/venv/bin/python3" "$ROOT/tests/s3/hostile.py" full_puts
    sed -i 1d "$WORK/sums"
    acknowledged_is_intact
}

delete_half() {
    find "$MNT" -maxdepth 1 -name 'small-*' -delete
    local file
    # Every second file, so that no segment becomes free as a whole.
    awk 'NR % 2 { print $2 }' "$WORK/sums" | while read -r file; do rm "$MNT/$file"; done
    awk 'NR % 2 == 0' "$WORK/sums" >"$WORK/kept"
    mv "$WORK/kept" "$WORK/sums"
    rm -f "$(cat "$WORK/last")"
}

enough_is_available() { [ "$(available_bytes)" -ge "$1" ]; }

# Half of the data was deleted; a third of the space must be free for writes within a bounded time.
space_returns() {
    local kept_bytes=$(($(wc -l <"$WORK/sums") * BLOCK_BYTES))
    wait_until "$RETURN_S" enough_is_available $((kept_bytes * 2 / 3)) || {
        echo "available: $(available_bytes), expected: $((kept_bytes * 2 / 3))"
        return 1
    }
}

write_one() { dd if="$WORK/block" of="$MNT/again" bs=1M conv=fsync; }

writing_works_again() {
    wait_until "$RETURN_S" write_one
    cmp "$MNT/again" "$WORK/block"
    rm "$MNT/again"
}

# The same amount fits repeatedly: no space leaks.
fill_again() {
    local round count before
    before=$(wc -l <"$WORK/sums")
    for round in 1 2 3; do
        cp "$WORK/sums" "$WORK/kept"
        fill "$MNT/round$round"
        count=$(($(wc -l <"$WORK/sums") - before))
        echo "round $round: $count files; before: $before"
        acknowledged_is_intact
        rm -r "$MNT/round$round"
        mv "$WORK/kept" "$WORK/sums"
        [ "$count" -ge $((before / 2)) ]
        wait_until "$RETURN_S" enough_is_available $((before * BLOCK_BYTES * 2 / 3))
        # The space that df shows as available can be written.
        df -B 1 "$MNT"
    done
}

numbers_make_sense() {
    df -B 1 "$MNT"
    df --output=size,used,avail -B 1 "$MNT" | tail -n 1 | awk '{ exit !($1 >= $2 && $2 + $3 <= $1 && $1 > 0) }'
}

delete_all() {
    rm -r "${MNT:?}"/*
    [ -z "$(ls -A "$MNT")" ]
}

# --- status and events ---

small_node() { node_start small --drives 6 --drive-size 128M --profile 4+2; }

# Writes files of two extents until one does not fit. Bytes of the last file may or may not remain.
fill_small() {
    local i
    for ((i = 0; i < 200; i++)); do
        head -c $((8 << 20)) /dev/zero | dd of="$WORK/small/mnt/$i" bs=8M iflag=fullblock 2>"$WORK/dd" || break
    done
    cat "$WORK/dd"
    grep -q 'No space left on device' "$WORK/dd"
    echo "$i files fit"
}

# says_it_is_full WHAT NEXT: a problem in `status` contains WHAT and the advice NEXT, and the newest event is `full`.
says_it_is_full() {
    "$FOREBAY" status "$WORK/small" --json | jq -e --arg what "$1" --arg next "$2" \
        '.state != "healthy" and any(.problems[]; startswith("filesystem main") and contains($what) and contains($next))' >/dev/null &&
        last_event_is full
}
has_room_again() {
    "$FOREBAY" status "$WORK/small" --json | jq -e '.state == "healthy"' >/dev/null && last_event_is 'has room'
}
last_event_is() {
    "$FOREBAY" events "$WORK/small" --json |
        jq -e --arg kind "$1" '[.[] | select(.subject == "filesystem main").kind] | last == $kind' >/dev/null
}

full_drives_are_told() {
    local round
    for ((round = 0; round < ${FOREBAY_FULL_ROUNDS:-1}; round++)); do
        fill_small
        wait_until 15 says_it_is_full 'drives are full' 'forebay drive add'
        [ $((round % 2)) = 1 ] || rm "$(find "$WORK/small/mnt" -type f -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d' ' -f2)"
        rm -f "$WORK"/small/mnt/[0-9]
        wait_until 30 has_room_again
        rm -f "$WORK"/small/mnt/*
        wait_until 30 has_room_again
    done
}

full_size_is_told() {
    "$FOREBAY" fs set "$WORK/small" main --size 64MiB
    fill_small
    wait_until 15 says_it_is_full 'size' 'forebay fs set --size'
    "$FOREBAY" fs set "$WORK/small" main --size none
    wait_until 15 has_room_again
}

full_quota_is_told() {
    rm -f "$WORK"/small/mnt/*
    "$FOREBAY" fs set "$WORK/small" main --ssd 64MiB
    fill_small
    wait_until 15 says_it_is_full 'SSD quota' 'forebay fs attach'
    rm -f "$WORK"/small/mnt/*
    wait_until 15 has_room_again
}

if [ "$PLAIN" != 1 ]; then
    check "events: the node starts" small_node &&
        check "events: full drives, and free ones again" full_drives_are_told &&
        check "events: a full size, and a larger one" full_size_is_told &&
        check "events: a full SSD quota, and room in it again" full_quota_is_told &&
        check "events: the node stops" node_stop small
    node_end "$WORK/small"
    rm -rf --one-file-system "${WORK:?}/small"
fi

check "the node starts" start || exit 0
check "df adds up when empty" numbers_make_sense
check "writing ends with ENOSPC" until_full || exit 0
check "small writes end with ENOSPC" small_writes_fail
check "acknowledged files are intact" acknowledged_is_intact
check "the file that did not fit is not torn" failed_file_is_not_torn
check "df adds up when full" numbers_make_sense
check "df promises no room where writes fail" df_promises_nothing
check "acknowledged files are intact after a restart" after_restart
check "acknowledged files are intact after a crash" after_crash
check "uploads to full drives are answered and do not block deletions" uploads_when_full
check "deleting works when full" delete_half &&
    check "space returns within $RETURN_S s" space_returns &&
    check "writing works again" writing_works_again &&
    check "the rest is intact" acknowledged_is_intact &&
    check "filling up and deleting can be repeated" fill_again
check "everything can be deleted" delete_all
check "df adds up when empty again" numbers_make_sense
check "the node stops" stop_or_say
exit 0
