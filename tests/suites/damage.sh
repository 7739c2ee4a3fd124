#!/usr/bin/env bash
# Damage on drives and in a store: repairable damage is repaired and reported; unreadable data is reported by `status`,
# `events`, `why` and an exit status until it is settled, across restarts.
source "$(dirname "$0")/../lib.sh"
NODE=$WORK/home
MNT=$NODE/mnt
[ "$PLAIN" = 1 ] && { skipped "all" "a plain directory has no drives"; exit 0; }

status_json() { "$FOREBAY" status "${1:-$NODE}" --json || [ $? = 3 ]; }
status_is() { status_json | jq -e "$1" >/dev/null; }
# exit_is STATUS: the exit status of `status`.
exit_is() {
    local status=0
    "$FOREBAY" status "$NODE" >"$WORK/status" || status=$?
    cat "$WORK/status"
    [ "$status" = "$1" ]
}
# names_are PATH…: exactly these files are reported as unreadable.
names_are() {
    local expected
    expected=$(printf '%s\n' "$@" | LC_ALL=C sort | paste -sd' ')
    status_json | jq -r '.filesystems[] | select(.name == "main").damage.files[].path' | LC_ALL=C sort | paste -sd' ' >"$WORK/named"
    [ "$(cat "$WORK/named")" = "$expected" ]
}
come_to_be_named() { wait_until "$1" names_are "${@:2}" || { echo "named: $(cat "$WORK/named"), expected: ${*:2}" && return 1; }; }
is_healthy() { status_is '.state == "healthy" and .problems == [] and (.filesystems[0].damage.lost_files // 0) == 0'; }
becomes_healthy() { wait_until 60 is_healthy || { exit_is 0 && return 1; }; }
# has_event KIND PATTERN
has_event() { "$FOREBAY" events "$NODE" --json | jq -e --arg kind "$1" --arg text "$2" 'any(.[]; .kind == $kind and (.text | test($text)))' >/dev/null; }
events_of() { "$FOREBAY" events "$NODE" --json | jq "[.[] | select(.kind == \"$1\")] | length"; }
cold_cache() {
    node_unmount home
    node_mount home
}
cannot_be_read() { not cmp "$1" "$WORK/source/$(basename "$1")" 2>/dev/null; }
reads_well() { cmp "$1" "$WORK/source/$(basename "$1")"; }

# flip FILE OFFSET…: flips a bit of each block at these offsets of a file, in all drive files. The node must not run.
flip() { EACH=all flip_in "$@"; }
# flip_staggered FILE OFFSET…: the same, but each drive file with a copy gets only one bad block, each another.
flip_staggered() { EACH=one flip_in "$@"; }
flip_in() {
    perl - "$WORK/source/$1" "${@:2}" -- "$NODE"/drives/*.img <<'PERL'
use strict;
my $source = shift;
my @offsets;
push @offsets, shift while $ARGV[0] ne '--';
shift;
my %wanted;
open(my $in, '<:raw', $source) or die "$source: $!";
for my $offset (@offsets) {
    seek($in, $offset, 0);
    read($in, my $block, 4096) == 4096 or die "short";
    $wanted{$block} = $offset;
}
my %flipped;
for my $path (@ARGV) {
    # Of staggered damage, the offsets that no drive file before has.
    my $before = keys %flipped;
    open(my $image, '+<:raw', $path) or die "$path: $!";
    for (my $at = 0; sysseek($image, $at, 0) && sysread($image, my $piece, 1 << 20); $at += 1 << 20) {
        for (my $in = 0; $in < length $piece; $in += 4096) {
            my $block = substr($piece, $in, 4096);
            next unless exists $wanted{$block};
            next if $ENV{EACH} eq 'one' && $wanted{$block} != ($offsets[$before] // -1);
            sysseek($image, $at + $in + 77, 0);
            syswrite($image, chr(ord(substr($block, 77, 1)) ^ 4));
            $flipped{$wanted{$block}}++;
            print "$path: byte ", $at + $in + 77, " of offset $wanted{$block}\n";
        }
    }
}
exit(keys %flipped == @offsets ? 0 : 1);
PERL
}
MIB=$((1 << 20))

check "a node starts" node_start home --drives 6 --drive-size 256M --profile 4+2 || exit 0

written() {
    local name
    mkdir "$WORK/source" "$MNT/good" "$MNT/lost" "$MNT/small"
    for name in good-1 good-2 good-3 lost-a lost-b lost-c lost-d lost-e late; do
        head -c $((4 * MIB)) /dev/urandom >"$WORK/source/$name"
    done
    head -c 20480 /dev/urandom >"$WORK/source/copy"
    cp "$WORK"/source/good-* "$MNT/good"
    cp "$WORK"/source/lost-* "$MNT/lost"
    cp "$WORK/source/copy" "$MNT/small"
    cp "$WORK/source/late" "$MNT"
    sync_files "$MNT"
    exit_is 0
    is_healthy
    status_is '(.filesystems[0].damage.found // 0) == 0'
}
check "a healthy node says so, and ends with 0" written || exit 0

# Two bad blocks of a stripe can be repaired. Three cannot, and neither can damage to all copies.
rotten() {
    local name
    node_stop home
    for name in good-1 good-2 good-3; do flip "$name" 8192 $((MIB + 8192)); done
    for name in lost-a lost-b lost-c lost-d lost-e; do flip "$name" 8192 $((MIB + 8192)) $((2 * MIB + 8192)); done
    flip copy 4096
    node_start home
}
LOST=(/lost/lost-a /lost/lost-b /lost/lost-c /lost/lost-d /lost/lost-e /small/copy)
scrubbed() {
    "$FOREBAY" drive scrub "$NODE" --now
    come_to_be_named 60 "${LOST[@]}"
    exit_is 3
    grep -q 'damaged  cluster=' "$WORK/status"
    grep -q 'filesystem main: 6 files have data that cannot be read' "$WORK/status"
    grep -q '/lost/lost-' "$WORK/status"
    grep -q 'reads fail for some data' "$WORK/status"
    status_is '.filesystems[0].damage | .lost_files == 6 and .unrepairable > 0 and .found == .repaired + .unrepairable'
}
check "bits are flipped in drive files" rotten
check "a scrub finds what cannot be read, and status names it" scrubbed

repaired() {
    local name
    wait_until 30 status_is '.filesystems[0].damage.repaired >= 6'
    for name in good-1 good-2 good-3; do reads_well "$MNT/good/$name"; done
    for name in lost-a lost-e; do cannot_be_read "$MNT/lost/$name"; done
    wait_until 30 has_event "damage repaired" 'damaged shards were found and restored'
    wait_until 30 has_event "data unreadable" '/lost/lost-'
}
check "repaired data is readable; repairs and losses are events" repaired

explained() {
    local why
    why=$("$FOREBAY" why "$MNT/lost/lost-a" --json)
    jq -e '.state == "unreadable" and (.extents[0] | .state == "unreadable" and (.reason | test("3 of 6 shards are bad, and 4"))
        and ([.shards[] | select(.state == "damaged")] | length) == 3)' <<<"$why" >/dev/null
    "$FOREBAY" why "$MNT/lost/lost-a" | grep 'cannot be read: 3 of 6'
    "$FOREBAY" why "$MNT/small/copy" | grep 'cannot be read: 3 of 3'
    "$FOREBAY" why "$MNT/good/good-1" --json | jq -e '.state == "ok"' >/dev/null
}
check "why names the bad shards" explained

# Reads and repair fail again and again: the log counts what repeats.
few_lines() {
    local log=$NODE/log/forebay.log before end=$((SECONDS + 10)) written counted
    before=$(wc -l <"$log")
    while [ $SECONDS -lt $end ]; do
        cannot_be_read "$MNT/lost/lost-a"
        cannot_be_read "$MNT/small/copy"
    done
    "$FOREBAY" drive scrub "$NODE" --now
    sleep 12
    tail -n "+$((before + 1))" "$log" >"$WORK/lines"
    written=$(wc -l <"$WORK/lines")
    counted=$(sed -n 's/.*the same \([0-9]*\) times more in 10 s.*/\1/p' "$WORK/lines" | paste -sd+ | bc)
    echo "$written lines, and $counted that are only counted"
    [ "$written" -lt 500 ] && [ "$counted" -gt 500 ]
}
check "repair that keeps failing writes few lines of log" few_lines

kept() {
    local unreadable repaired
    unreadable=$(events_of "data unreadable")
    repaired=$(status_json | jq '.filesystems[0].damage.repaired')
    node_stop home
    node_start home
    names_are "${LOST[@]}"
    exit_is 3
    node_kill home
    node_start home
    names_are "${LOST[@]}"
    exit_is 3
    status_is ".filesystems[0].damage.repaired == $repaired"
    sleep 8
    [ "$(events_of "data unreadable")" = "$unreadable" ]
    node_fsck home
}
check "restarts and SIGKILL change nothing, and no event is repeated" kept

settled() {
    rm "$MNT/lost/lost-a" "$MNT/small/copy"
    cp "$WORK/source/lost-b" "$MNT/lost/lost-b"
    dd if="$WORK/source/lost-c" of="$MNT/lost/lost-c" bs=1M conv=notrunc,fsync status=none
    sync_files "$MNT"
    come_to_be_named 20 /lost/lost-d /lost/lost-e
    mv "$MNT/lost/lost-d" "$MNT/good/moved"
    come_to_be_named 60 /good/moved /lost/lost-e
    # Only some of the damaged bytes are rewritten: the rest is still reported.
    dd if="$WORK/source/lost-e" of="$MNT/lost/lost-e" bs=1M count=1 conv=notrunc,fsync status=none
    cannot_be_read "$MNT/lost/lost-e"
    names_are /good/moved /lost/lost-e
    rm "$MNT/good/moved"
    : >"$MNT/lost/lost-e"
    becomes_healthy
    exit_is 0
    wait_until 20 has_event "data readable" 'restored, written anew or deleted'
    reads_well "$MNT/lost/lost-b"
    reads_well "$MNT/lost/lost-c"
    node_fsck home
}
check "deletes and rewrites settle the damage, and then everything is healthy" settled

met_by_a_read() {
    node_stop home
    flip late 4096 $((MIB + 4096)) $((2 * MIB + 4096))
    node_start home
    is_healthy
    cannot_be_read "$MNT/late"
    come_to_be_named 20 /late
    exit_is 3
    wait_until 30 has_event "data unreadable" '/late'
    # As if the fault had not been on the drive: the data can be read again.
    node_stop home
    cp "$WORK/source/late" "$WORK/source/right"
    perl -e 'open(F, "+<", $ARGV[0]); for (4096, 1052672, 2101248) { seek(F, $_ + 77, 0); read(F, $b, 1); seek(F, $_ + 77, 0); print F chr(ord($b) ^ 4) }' "$WORK/source/late"
    flip late 4096 $((MIB + 4096)) $((2 * MIB + 4096))
    cp "$WORK/source/right" "$WORK/source/late"
    node_start home
    becomes_healthy
    reads_well "$MNT/late"
}
check "a read also finds damage, and data that is readable again is settled" met_by_a_read

# Three copies with one bad block each, and four of six shards with one: no shard is whole, but each row of blocks has
# enough intact ones.
staggered() {
    local bad
    head -c 20480 /dev/urandom >"$WORK/source/copies"
    head -c $((4 * MIB)) /dev/urandom >"$WORK/source/stripe"
    cp "$WORK/source/copies" "$WORK/source/stripe" "$MNT"
    sync_files "$MNT"
    wait_until 30 status_is '.filesystems[0].owed_shards == 0'
    node_stop home
    flip_staggered copies 0 4096 8192
    flip stripe 4096 $((MIB + 8192)) $((2 * MIB + 12288)) $((3 * MIB + 16384))
    node_start home
    bad=$(status_json | jq '.filesystems[0].damage.found')
    "$FOREBAY" drive scrub "$NODE" --now
    wait_until 60 status_is ".filesystems[0].damage | .found == $bad + 7 and .found == .repaired + .unrepairable and .lost_files == 0"
    becomes_healthy
    status_json | jq -c '.filesystems[0].damage'
    # The scrub has restored all shards: nothing more is found, and any two drives may fail.
    node_stop home
    node_start home
    "$FOREBAY" drive scrub "$NODE" --now
    wait_until 60 status_is 'all(.drives[]; .scrub.running == false)'
    status_json | jq -c '.filesystems[0].damage'
    status_is ".filesystems[0].damage.found == $bad + 7"
    "$FOREBAY" drive fail "$NODE" 0
    "$FOREBAY" drive fail "$NODE" 1
    reads_well "$MNT/copies"
    reads_well "$MNT/stripe"
    "$FOREBAY" drive return "$NODE" 0
    "$FOREBAY" drive return "$NODE" 1
    becomes_healthy
    node_fsck home
}
check "a scrub repairs shards that have bad blocks in different places" staggered

# A missing drive is no proof of damage.
away() {
    node_stop home
    flip late 4096 $((MIB + 4096))
    node_start home
    "$FOREBAY" drive fail "$NODE" 0
    "$FOREBAY" drive fail "$NODE" 1
    cannot_be_read "$MNT/late" || "$FOREBAY" drive fail "$NODE" 2 --force
    cold_cache
    cannot_be_read "$MNT/late"
    sleep 5
    status_is '.state == "degraded" and .filesystems[0].damage.lost_files == 0'
    exit_is 0
}
check "data that is unreadable because drives are missing is not reported as lost" away
node_end "$NODE"
rm -rf --one-file-system "${WORK:?}/home"

# --- in a store ----------------------------------------------------------------------------------------------------

STORE=forebay
source "$ROOT/tests/tier/lib.sh"
check "a store starts" store_start || exit 0
check "a node with tiering starts" node_start home --drives 6 --drive-size 128M --profile 4+2 || exit 0

# Each file is in a blob of its own.
COLD=$WORK/store/mnt/cold
in_store() {
    local name
    add_store
    fs attach main cold --retention 1h --tiering-cue 10s
    mkdir "$MNT/cold"
    for name in gone-1 gone-2 bad whole; do
        head -c $((6 * MIB)) /dev/urandom >"$WORK/source/$name"
        cp "$WORK/source/$name" "$MNT/cold"
        sync_files "$MNT"
        wait_until 60 tier_is '.queued_extents == 0'
    done
    tier release "$MNT"/cold/*
    cold_cache
    find "$COLD" -type f -printf '%T@ %p\n' | sort -n | cut -d' ' -f2 >"$WORK/blobs"
    cat "$WORK/blobs"
    [ "$(wc -l <"$WORK/blobs")" = 4 ]
    is_healthy
}
blob() { sed -n "$1p" "$WORK/blobs"; }
check "files are in a store only" in_store || exit 0

harmed() {
    mkdir "$WORK/kept"
    cp "$(blob 1)" "$WORK/kept/1"
    cp "$(blob 3)" "$WORK/kept/3"
    rm "$(blob 1)" "$(blob 2)"
    printf '\x5a\xa5\x5a\xa5' | dd of="$(blob 3)" bs=1 seek=3000000 conv=notrunc status=none
    sync_files "$WORK/store/mnt"
    cold_cache
    expect_fail 'blob .* is not in the store' tier fetch "$MNT/cold/gone-1"
    cannot_be_read "$MNT/cold/gone-2"
    expect_fail 'blob .* in the store is damaged' tier fetch "$MNT/cold/bad"
    reads_well "$MNT/cold/whole"
    come_to_be_named 30 /cold/gone-1 /cold/gone-2 /cold/bad
    exit_is 3
    "$FOREBAY" why "$MNT/cold/gone-1" | grep 'cannot be read: the object store does not have blob'
    "$FOREBAY" why "$MNT/cold/bad" | grep 'cannot be read: blob .* is not what was stored'
    "$FOREBAY" why "$MNT/cold/whole" --json | jq -e '.state == "ok"'
    wait_until 30 has_event "data unreadable" '/cold/'
}
check "lost and damaged blobs are reported, with their files" harmed

store_down() {
    node_stop store
    sleep 12
    names_are /cold/gone-1 /cold/gone-2 /cold/bad
    node_start store
    reads_well "$MNT/cold/whole"
    names_are /cold/gone-1 /cold/gone-2 /cold/bad
}
check "a store that is down adds nothing and settles nothing" store_down

blobs_back() {
    node_stop home
    node_start home
    exit_is 3
    cp "$WORK/kept/1" "$(blob 1)"
    cp "$WORK/kept/3" "$(blob 3)"
    sync_files "$WORK/store/mnt"
    come_to_be_named 60 /cold/gone-2
    reads_well "$MNT/cold/gone-1"
    reads_well "$MNT/cold/bad"
    cp "$WORK/source/gone-2" "$MNT/cold/gone-2"
    sync_files "$MNT"
    becomes_healthy
    exit_is 0
    wait_until 20 has_event "data readable" 'restored'
    node_fsck home
}
check "restored blobs and rewritten files settle the damage" blobs_back
