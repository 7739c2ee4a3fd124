#!/usr/bin/env bash
# Space: small files are packed, orphans are deleted, content is converted to other profiles, and the parts of the raw
# space add up at any time.
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && { skipped "all" "a plain directory has no drives"; exit 0; }
COUNT=${FOREBAY_SPACE_FILES:-20000}
LIMIT_S=600
# Packing and the search for orphans wait only a sixth of the usual time.
export FOREBAY_HASTE=6
OVERWRITE_S=$([ "$LONG" = 1 ] && echo 300 || echo 20)

json() { "$FOREBAY" status "$WORK/$1" --json; }
fs_number() { json "$1" | jq ".filesystems[0].$2"; }
live_bytes() { json "$1" | jq .space.live_bytes; }
fs_is() { json "$1" | jq -e ".filesystems[0] | $2" >/dev/null; }
fail_drive() { "$FOREBAY" drive fail "$WORK/$1" "$2"; }
show() { json "$1" | jq -c '.space, (.filesystems[0] | .pack, .orphans, {narrow_bytes, owed_bytes, waiting_extents})'; }

# reaches SECONDS NODE CONDITION: waits until the status of the filesystem meets the condition.
reaches() { wait_until "$1" fs_is "$2" "$3" || { show "$2" && return 1; }; }

# sums DIR FILE: writes the checksums of all files.
sums() { (cd "$1" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 -r sha256sum) >"$2"; }

# same NODE DIR: all files are unchanged, checked without the kernel's caches.
same() {
    node_unmount "$1" && node_mount "$1" && sums "$WORK/$1/mnt/$2" "$WORK/now.sums" && cmp "$WORK/$1-$2.sums" "$WORK/now.sums"
}

# durable NODE DIR: makes the files durable and records their checksums.
durable() {
    sums "$WORK/$1/mnt/$2" "$WORK/$1-$2.sums" && node_unmount "$1" && node_mount "$1"
}

# Makes files of 4 KiB of random bytes.
write_small() {
    mkdir -p "$WORK/$1/mnt/$2" && head -c $(($3 * 4096)) /dev/urandom | split -b 4096 -a 5 -d - "$WORK/$1/mnt/$2/f" && durable "$1" "$2"
}

# write_large NODE DIR MIB: writes files of about 3 MiB, and some small ones.
write_large() {
    mkdir -p "$WORK/$1/mnt/$2" && head -c $(($3 << 20)) /dev/urandom | split -b 3000000 -a 4 -d - "$WORK/$1/mnt/$2/large" &&
        head -c 2000000 /dev/urandom | split -b 20000 -a 4 -d - "$WORK/$1/mnt/$2/small" && durable "$1" "$2"
}

# Checks all the time that the parts of the raw space add up, for every drive and for all. Ends at the stop file.
watch_sums() {
    local samples=0 wrong
    while [ ! -e "$WORK/$1.stop" ]; do
        # While the node is down there is nothing to add up.
        json "$1" >"$WORK/$1.status" 2>/dev/null || { sleep 0.2 && continue; }
        wrong=$(jq -c '.metadata_bytes as $metadata | .space, .drives[].space | select(.live_bytes + .owed_bytes + .garbage_bytes +
            .reserved_bytes + .free_bytes != .capacity_bytes or $metadata == 0)' "$WORK/$1.status")
        [ -z "$wrong" ] || echo "$wrong" >>"$WORK/$1.wrong"
        samples=$((samples + 1))
        sleep 0.2
        echo "$samples" >"$WORK/$1.samples"
    done
}
adds_up() {
    echo "$(cat "$WORK/$1.samples") samples"
    [ ! -e "$WORK/$1.wrong" ] || { head "$WORK/$1.wrong" && return 1; }
    [ "$(cat "$WORK/$1.samples")" -gt 20 ]
}

# Packed: less than a quarter of an extent is left for the next ones, and the old extents are gone.
PACKED='.pack.sweeps > 0 and .pack.left_bytes <= 1048576 and .pack.convert_bytes == 0 and .waiting_extents == 0'
# little_waste NODE BYTES: this much content, stored as 4+2, takes at most a tenth more than full extents would.
little_waste() {
    reaches 240 "$1" "$PACKED and .pack.allocated_bytes > 0 and .pack.waste_bytes * 10 <= .pack.allocated_bytes"
    wait_until 60 allocated_at_most "$1" $(($2 * 3 / 2 * 11 / 10)) || { show "$1" && return 1; }
    json "$1" | jq -r '.filesystems[0].pack | "status: \(.allocated_bytes) allocated for \(.stored_bytes), \(.inline_bytes) inline, waste \(.waste_bytes * 1000 / .allocated_bytes | round / 10) %"'
    echo "drives: $(live_bytes "$1") live with frame headers for $2 of content, waste $((1000 - $2 * 1500 / $(live_bytes "$1"))) per mille"
}
allocated_at_most() { [ "$(live_bytes "$1")" -le "$2" ]; }

# Deletes less than half of each extent, so that extents are packed only because the node is idle.
thin_out() {
    find "$WORK/$1/mnt/$2" -type f -name '*[1478]' -delete && durable "$1" "$2"
}

# crash_writer PATH SIZE: writes and syncs files until the node is gone.
crash_writer() {
    local number=0
    while dd if=/dev/urandom of="$1.$number" bs="$2" count=1 conv=fsync status=none 2>/dev/null; do number=$((number + 1)); done
}

# crash_with_orphans NODE: kills the node while extents are being written, until some are left without a reference.
crash_with_orphans() {
    local attempt number live writers
    # Beside other work, a crash may find no extent between its shards and its commit.
    for attempt in {1..20}; do
        mkdir -p "$WORK/$1/mnt/crash-$attempt"
        live=$(live_bytes "$1")
        writers=()
        for number in 1 2 3 4 5 6 7 8; do
            # Different sizes, so that the writers are not in step: some extents always wait for their commit.
            crash_writer "$WORK/$1/mnt/crash-$attempt/$number" "$((number * 100))k" &
            writers+=($!)
        done
        wait_until 30 allocated_more "$1" $((live + (4 << 20) * attempt))
        node_kill "$1"
        umount -l "$WORK/$1/mnt"
        wait "${writers[@]}"
        "$FOREBAY" fsck "$WORK/$1" --json >"$WORK/$1.fsck"
        jq -c '.[0].counts' "$WORK/$1.fsck"
        node_start "$1" && rm -rf "$WORK/$1/mnt"/crash-*
        if jq -e '.[0].counts.unreferenced_shards > 0' "$WORK/$1.fsck" >/dev/null; then return 0; fi
    done
    echo "no crash left an orphan"
    return 1
}
allocated_more() { [ "$(live_bytes "$1")" -gt "$2" ]; }

# Orphans of the crash are deleted, and nothing else.
orphans_go() {
    reaches 180 "$1" '.orphans.closed_ranges == 0 and .orphans.searched_s != null and .orphans.deleted_extents > 0'
    wait_until 60 nothing_unreferenced "$1" || { cat "$WORK/$1.fsck" && return 1; }
    wait_until 60 allocated_at_most "$1" $(($2 * 101 / 100)) || { echo "was $2" && show "$1" && return 1; }
    echo "$(fs_number "$1" orphans.deleted_extents) orphans deleted, $(live_bytes "$1") live, $2 before"
}
nothing_unreferenced() {
    "$FOREBAY" fsck "$WORK/$1" --json >"$WORK/$1.fsck" && jq -e '.[0].counts.unreferenced_shards == 0' "$WORK/$1.fsck" >/dev/null
}

narrow_becomes_wide() {
    fail_drive "$1" 1 && fail_drive "$1" 4 && reaches 30 "$1" '.write_profile == "2+2"'
    write_large "$1" narrow 24
    reaches 30 "$1" '.narrow_bytes > 20000000'
    "$FOREBAY" drive return "$WORK/$1" 1 && "$FOREBAY" drive return "$WORK/$1" 4
    reaches 180 "$1" '.write_profile == "4+2" and .owed_shards == 0 and .narrow_bytes == 0 and .pack.convert_bytes == 0'
}

# convert NODE PROFILE N/K: conversion waits while paused; then all extents get the new shape, and the old ones go.
convert() {
    local node=$1 profile=$2 shape=$3 file
    "$FOREBAY" upkeep "$WORK/$node" --pause && "$FOREBAY" fs set "$WORK/$node" main --profile "$profile"
    reaches 60 "$node" '.pack.state == "paused" and .pack.convert_bytes > 20000000'
    "$FOREBAY" upkeep "$WORK/$node" --rate 8MiB && "$FOREBAY" upkeep "$WORK/$node" --resume
    reaches 60 "$node" '.pack.state == "packing" and .pack.bytes_per_s > 0 and .pack.eta_s > 0'
    "$FOREBAY" status "$WORK/$node" | grep 'to convert'
    "$FOREBAY" upkeep "$WORK/$node" --rate 256MiB
    reaches 240 "$node" "$PACKED"
    for file in "$WORK/$node/mnt"/{large,clones}/*; do
        "$FOREBAY" why "$file" --json | jq -e --arg shape "$shape" 'all(.extents[]; .kind != "coded" or .shape == $shape)' >/dev/null || {
            "$FOREBAY" why "$file"
            return 1
        }
    done
}

# Makes copies that share extents with their sources.
clone_large() {
    mkdir "$WORK/$1/mnt/clones" && cp "$WORK/$1/mnt/$2"/* "$WORK/$1/mnt/clones" && sync "$WORK/$1/mnt/clones"/*
    cp "$WORK/$1-$2.sums" "$WORK/$1-clones.sums"
}

# ratio NODE N K: the drives have at most a tenth more than full extents of that shape. All content has a clone.
ratio() {
    local stored
    stored=$(($(fs_number "$1" pack.stored_bytes) / 2))
    wait_until 60 allocated_at_most "$1" $((stored * $2 / $3 * 11 / 10)) || { show "$1" && return 1; }
    echo "$(live_bytes "$1") live for $stored as $2/$3"
}

# overwrite_nearly_full NODE SECONDS: fills 85 % of the room, then overwrites files at random. Every write must succeed,
# and every tenth of the time must make progress.
overwrite_nearly_full() {
    local dir=$WORK/$1/mnt/files room count number part end done
    mkdir -p "$dir" && head -c 1048576 /dev/urandom >"$WORK/block"
    room=$(df --output=avail -B 1 "$dir" | tail -n 1)
    count=$((room * 85 / 100 / 1048576))
    for ((number = 0; number < count; number++)); do overwrite_one "$dir" "$number" first; done
    for part in 1 2 3 4 5 6 7 8 9 10; do
        end=$((SECONDS + $2 / 10)) done=0
        while [ $SECONDS -lt "$end" ]; do
            overwrite_one "$dir" $((RANDOM % count)) "$part-$done"
            done=$((done + 1))
        done
        echo "part $part: $done of $count files overwritten, $(json "$1" | jq -c '[.drives[].write_limit_bytes_per_s]')"
        [ "$done" -gt 0 ]
    done
    node_unmount "$1" && node_mount "$1"
    for ((number = 0; number < count; number++)); do
        { cat "$WORK/written-$number" && tail -c +65 "$WORK/block"; } | cmp - "$dir/$number"
    done
}
# overwrite_one DIR NUMBER MARK: writes a file whose first 64 bytes name the file and the write.
overwrite_one() {
    printf '%-64s' "$2 $3" >"$WORK/written-$2"
    { cat "$WORK/written-$2" && tail -c +65 "$WORK/block"; } | dd of="$1/$2" bs=1M iflag=fullblock conv=notrunc,fsync status=none
}

check "small: the node starts" node_start small --drives 6 --drive-size 192M --profile 4+2 || exit 0
watch_sums small &
WATCH=$!
check "small: $COUNT files of 4 KiB are written" write_small small files "$COUNT"
check "small: packed, the drives waste at most a tenth" little_waste small $((COUNT * 4096))
check "small: every file is as it was" same small files
check "small: four of ten files go" thin_out small files
check "small: packed again, the drives waste at most a tenth" little_waste small $(($(wc -l <"$WORK/small-files.sums") * 4096))
check "small: the other files are as they were" same small files
check "small: a file system check finds nothing" node_fsck small
LIVE=$(live_bytes small)
check "small: a killed node leaves orphans" crash_with_orphans small
check "small: they are collected, and space is what it was" orphans_go small "$LIVE"
check "small: every file is as it was after that" same small files
check "small: extents written without two drives are widened when these are back" narrow_becomes_wide small
check "small: these files are as they were" same small narrow
touch "$WORK/small.stop"
wait "$WATCH"
check "small: space added up at any time" adds_up small
check "small: a file system check finds nothing at the end" node_fsck small
check "small: the node stops" node_stop small
check "small: a file system check of the stopped node finds nothing" node_fsck small
rm -rf --one-file-system "${WORK:?}/small"

check "overwrite: the node starts" node_start overwrite --drives 6 --drive-size 256M --profile 4+2 --trim always || exit 0
check "overwrite: nearly full drives take overwrites without end" overwrite_nearly_full overwrite "$OVERWRITE_S"
# gives_back NODE: the drive files return deleted space to their filesystem and keep their size.
gives_back() {
    rm -r "$WORK/$1/mnt/files"
    wait_until 120 files_take_less_than_half "$1" || { ls -ls "$WORK/$1/drives" && json "$1" | jq -c '[.drives[].trimmed_bytes]' && return 1; }
    ls -ls "$WORK/$1/drives"
}
files_take_less_than_half() {
    local taken size
    taken=$(du -c -B 1 "$WORK/$1/drives"/*.img | tail -n 1 | cut -f1)
    size=$(du -c -B 1 --apparent-size "$WORK/$1/drives"/*.img | tail -n 1 | cut -f1)
    [ $((taken * 2)) -lt "$size" ]
}
check "overwrite: drive files return deleted space" gives_back overwrite
check "overwrite: a file system check finds nothing" node_fsck overwrite
check "overwrite: the node stops" node_stop overwrite
# The returned space had no live data.
drives_are_clean() { for drive in "$WORK/overwrite/drives"/*.img; do "$FOREBAY" drive fsck "$drive"; done; }
check "overwrite: drives with holes are clean" drives_are_clean
rm -rf --one-file-system "${WORK:?}/overwrite"

check "convert: the node starts" node_start convert --drives 6 --drive-size 192M --profile r2 || exit 0
check "convert: a tree is written" write_large convert large 48
check "convert: its files are cloned" clone_large convert large
check "convert: r2 becomes r3" convert convert r3 3/1
check "convert: r3 takes three times as much" ratio convert 3 1
check "convert: every file is as it was" same convert large
check "convert: every clone is as it was" same convert clones
check "convert: r3 becomes r2" convert convert r2 2/1
check "convert: r2 becomes 4+2" convert convert 4+2 6/4
check "convert: 4+2 becomes 2+2" convert convert 2+2 4/2
check "convert: 2+2 takes twice as much" ratio convert 4 2
check "convert: every file is as it was with 2+2" same convert large
check "convert: 2+2 becomes 4+2" convert convert 4+2 6/4
check "convert: 4+2 takes half as much again" ratio convert 6 4
check "convert: every file is as it was with 4+2" same convert large
check "convert: every clone is as it was with 4+2" same convert clones
check "convert: a file system check finds nothing" node_fsck convert
check "convert: the node stops" node_stop convert
exit 0

# spares_suffice NODE: written until nothing more fits, all of a lost drive finds a place on the others.
spares_suffice() {
    local dir=$WORK/$1/mnt/files whole
    [ "$("$FOREBAY" cluster spares "$WORK/$1")" = "nothing stays free for a loss" ]
    expect_fail "nothing that was lost finds another place" "$FOREBAY" cluster spares "$WORK/$1" 5
    whole=$(df --output=size -B 1 "$WORK/$1/mnt" | tail -n 1)
    "$FOREBAY" cluster spares "$WORK/$1" 1 --json | jq -e '.domains == 1 and .level == "drive" and .kept_bytes * 4 > .all_bytes and .used_bytes == 0'
    wait_until 5 smaller "$1" $((whole * 3 / 4))
    mkdir "$dir"
    # Many files, so that chance spreads them evenly.
    head -c 500000000 /dev/urandom | split -b 200000 -a 4 -d - "$dir/" 2>/dev/null && return 1
    rm "$(ls -d "$dir"/* | tail -n 1)"
    du -sh "$dir"
    durable "$1" files
    # As much more is refused as long as it is stored.
    expect_fail "would be left" "$FOREBAY" cluster spares "$WORK/$1" 2
    fail_drive "$1" 1
    "$FOREBAY" drive remove "$WORK/$1" 1
    wait_until 120 rebuilt_without "$1" 1
    json "$1" | jq -c '[.drives[].space | {live_bytes, free_bytes}]'
    json "$1" | jq -e '.spare.used_bytes > 0 and (.problems | map(contains("spare space is used")) | any)'
    same "$1" files
    # A drive of that size makes it whole. The others are too full for more until it has its share.
    "$FOREBAY" drive add "$WORK/$1"
    json "$1" | jq -e '.spare.used_bytes == 0'
    "$FOREBAY" fs balance "$WORK/$1" main
    same "$1" files
    find "$dir" -name '*[05]' -delete
    wait_until 90 node_has_room "$1" || { json "$1" | jq -c .problems && return 1; }
    "$FOREBAY" cluster spares "$WORK/$1" 0
    json "$1" | jq -e 'has("spare") | not'
}
smaller() { [ "$(df --output=size -B 1 "$WORK/$1/mnt" | tail -n 1)" -lt "$2" ]; }
rebuilt_without() { json "$1" | jq -e --argjson id "$2" '.filesystems[0].owed_shards == 0 and .filesystems[0].repair.rebuilding_groups == 0 and (.drives[] | select(.id == $id) | .groups) == 0' >/dev/null; }
node_has_room() { json "$1" | jq -e '.problems | map(contains("ENOSPC") | not) | all' >/dev/null; }

check "spares: the node starts" node_start spares --drives 4 --drive-size 192M --profile r2 || exit 0
check "spares: full drives take over what a lost one held" spares_suffice spares
check "spares: a file system check finds nothing" node_fsck spares
