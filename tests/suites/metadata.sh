#!/usr/bin/env bash
# Metadata in several directories: full, damaged, lost and stale ones. Each is a small filesystem in memory.
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && { skipped "all" "a plain directory has no metadata"; exit 0; }
MNT=$WORK/n/mnt
A=$WORK/disk-a
B=$WORK/disk-b
C=$WORK/disk-c
COPIES='[.control, .filesystems[].ledger.copies] | map(map(select(.log_complete and .problem == null)) | length) | min'

make_disks() {
    local disk
    for disk in "$A" "$B" "$C"; do mkdir "$disk" && mount -t tmpfs -o size=160M tmpfs "$disk"; done
}

start() { node_start n --drives 3 --drive-size 128M --profile 2+1 --meta-dir "$A/meta" --meta-dir "$B/meta"; }
copies() { "$FOREBAY" status "$WORK/n" --json | jq -r "$COPIES"; }
copies_are() { [ "$(copies)" = "$1" ]; }
ledger_is() { [ "$("$FOREBAY" status "$WORK/n" --json | jq -r '.filesystems[0].ledger.state')" = "$1" ]; }

write_files() {
    local i
    mkdir -p "$MNT/$1"
    for ((i = 0; i < 200; i++)); do echo "$1 $i" >"$MNT/$1/$i"; done
    head -c 3M /dev/urandom >"$MNT/$1/large"
    find "$MNT/$1" -type f -exec sync {} +
    (cd "$MNT" && find "$1" -type f -exec sha256sum {} +) >>"$WORK/sums"
}

intact() { (cd "$MNT" && sha256sum --check --quiet "$WORK/sums"); }
two_copies() { write_files first && copies_are 2 && ! [ -e "$WORK/n/meta/ledger-0" ]; }

restart_knows() { node_stop n && node_start n && copies_are 2 && intact; }

fill_disk() { dd if=/dev/zero of="$1/filler" bs=64k status=none || true; }

# Makes names until there is no room. Does not write to the drives.
names_end_with_enospc() {
    fill_disk "$1"
    mkdir -p "$MNT/names"
    perl -e 'for (0 .. 500000) { mkdir "$ARGV[0]/$_" or do { print "$!\n"; exit !$!{ENOSPC} } } print "never\n"; exit 1' \
        "$MNT/names"
    echo "after $(ls "$MNT/names" | wc -l) directories"
}

reading_and_deleting_go_on() {
    intact
    ledger_is no_space
    rmdir "$MNT"/names/?? "$MNT"/names/???
}

recovers() {
    rm "$1/filler"
    wait_until 30 mkdir "$MNT/names/again"
    wait_until 10 ledger_is serving
    find "$MNT/names" -mindepth 1 -delete
    wait_until 20 told_of_full_metadata
    intact
}
told_of_full_metadata() {
    "$FOREBAY" events "$WORK/n"
    "$FOREBAY" events "$WORK/n" --json |
        jq -e '[.[] | select(.subject == "filesystem main").kind][-2:] == ["metadata full", "metadata has room"]' >/dev/null
}

flip() { # flip FILE OFFSET
    printf '\xa5\x5a\xa5\x5a' | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

# Damages each page of a local store but the first: not every page is in use.
flip_pages() {
    local at
    for ((at = 4096 + 904; at < $(stat -c %s "$1"); at += 4096)); do flip "$1" "$at"; done
}

# restored_are NODE PATTERN: there are events of the damaged stores of both ledgers, and no others.
restored_are() {
    "$FOREBAY" events "$WORK/$1" --json | jq '[.[] | select(.kind == "metadata restored")]' >"$WORK/restored"
    cat "$WORK/restored"
    jq -e --arg text "$2" 'map(.subject) == ["cluster", "filesystem main"] and all(.text | test($text))' "$WORK/restored"
}

damaged_copies() {
    local log
    node_stop n
    flip_pages "$A/meta/ledger-1/state.redb"
    flip_pages "$A/meta/ledger-0/state.redb"
    log=$(find "$B/meta/ledger-1/log" -name '*.log' | sort | head -n 1)
    flip "$log" 40
    node_start n
    copies_are 2
    intact
    restored_are n "$A/meta/ledger-[01]/state.redb was damaged.*from another copy"
}

lost_store() {
    node_kill n
    rm "$B/meta/ledger-1/state.redb"
    node_start n
    copies_are 2
    intact
}

# A disk loses the file while the node runs.
store_comes_back() {
    rm "$B/meta/ledger-1/state.redb"
    write_files beside
    wait_until 60 test -e "$B/meta/ledger-1/state.redb"
    wait_until 60 copies_are 2
    node_stop n
    # The restored directory is complete: the node starts with it alone.
    rm "$A/meta/ledger-1/state.redb"
    node_start n
    copies_are 2
    intact
}

# A missing disk: without it the node cannot know whether that disk was used alone and is newer.
refused_without() {
    node_stop n
    umount "$1"
    expect_fail 'may be newer.*force-stale-metadata' "$FOREBAY" start "$WORK/n"
}

forced() {
    timeout 120 "$FOREBAY" start "$WORK/n" --force-stale-metadata </dev/null
    intact
    copies_are 1
    "$FOREBAY" status "$WORK/n" --json | jq -e '.state == "degraded"' >/dev/null
    write_files second
}

# A directory that returns empty or with an older copy is rewritten.
comes_back() {
    node_stop n
    mount -t tmpfs -o size=160M tmpfs "$B"
    mkdir "$B/meta" && touch "$B/meta/forebay-meta"
    node_start n
    copies_are 2
    intact
}

another_directory() {
    "$FOREBAY" meta add-dir "$WORK/n" "$C/meta"
    copies_are 3
    write_files third
    "$FOREBAY" meta remove-dir "$WORK/n" "$A/meta"
    copies_are 2
    expect_fail 'metadata is not there' "$FOREBAY" meta remove-dir "$WORK/n" "$A/meta"
    node_stop n
    umount "$A"
    node_start n
    copies_are 2
    intact
}

crash() { node_kill n && node_start n && copies_are 2 && intact; }

# status_is STATUS PATTERN COMMAND…
status_is() {
    local expected=$1 pattern=$2 status=0 output
    shift 2
    output=$("$@" 2>&1) || status=$?
    echo "$output"
    [ "$status" = "$expected" ] && grep -qE "$pattern" <<<"$output"
}

fsck_findings() {
    node_fsck n
    node_stop n
    node_fsck n
    mkdir "$WORK/away"
    mv "$WORK"/n/drives/[01].img "$WORK/away"
    status_is 1 'unreadable: extent [0-9]+ of inode [0-9]+ cannot be read: 1 of 2' "$FOREBAY" fsck "$WORK/n"
    { "$FOREBAY" fsck "$WORK/n" --json || true; } 2>/dev/null | jq -e '.[0].findings[0].code == "unreadable"' >/dev/null
    mv "$WORK"/away/*.img "$WORK/n/drives"
    node_fsck n
    status_is 2 'there is no node' "$FOREBAY" fsck "$WORK/away"
    [ -z "$(ls -A "$WORK/away")" ]
    node_start n
}

gone() {
    node_stop n
    rm -r "$B/meta" "$C/meta"
    expect_fail 'may be newer|metadata' "$FOREBAY" start "$WORK/n"
}

check "disks in memory" make_disks || exit 0
check "the node starts with two directories" start || exit 0
check "both copies are complete" two_copies
check "a restart knows the directories" restart_knows
check "a full disk ends writing names with ENOSPC" names_end_with_enospc "$A"
check "reading and deleting go on" reading_and_deleting_go_on
check "it recovers by itself" recovers "$A"
check "the same with the other disk" eval 'names_end_with_enospc "$B" && reading_and_deleting_go_on && recovers "$B"'
check "damaged copies are repaired" damaged_copies
check "a lost store is rewritten" lost_store
check "a store that is lost comes back while the node runs" store_comes_back
check "after a crash both are complete" crash
check "without a disk the node does not start" refused_without "$B"
check "it starts with --force-stale-metadata" forced
check "the disk returns and is rewritten" comes_back
check "a directory is added, another removed" another_directory
check "fsck reports its findings" fsck_findings
check "without metadata the node does not start" gone
node_end "$WORK/n"

# With only one copy: the log of a young node is complete.
alone() {
    node_start alone --drive-size 256M
    head -c 3M /dev/urandom >"$WORK/alone/mnt/file" && mkdir "$WORK/alone/mnt/dir" && sync "$WORK/alone/mnt/file"
    (cd "$WORK/alone/mnt" && sha256sum file) >"$WORK/alone.sum"
    node_stop alone
    flip_pages "$WORK/alone/meta/ledger-0/state.redb"
    flip_pages "$WORK/alone/meta/ledger-1/state.redb"
    node_start alone
    (cd "$WORK/alone/mnt" && sha256sum --check --quiet "$WORK/alone.sum" && [ -d dir ])
    [ -e "$WORK/alone/meta/ledger-0/state.damaged" ]
    [ -e "$WORK/alone/meta/ledger-1/state.damaged" ]
    # One event for each ledger, which a further start does not repeat.
    restored_are alone 'made anew from the log.*state.damaged'
    node_stop alone
    node_start alone
    restored_are alone 'made anew from the log.*state.damaged'
    node_fsck alone
}
check "a damaged store without a copy is rewritten from the log" alone
node_end "$WORK/alone"
exit 0
