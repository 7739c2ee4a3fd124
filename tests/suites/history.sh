#!/usr/bin/env bash
# Older copies of metadata and of drives replace newer ones: the node detects them, gives advice, and loses none of its
# data.
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && { skipped "all" "a plain directory has no metadata"; exit 0; }
N=$WORK/n
MNT=$N/mnt
OLDER='older than the drives.*--accept-older-metadata'

start() { node_start n --drives 6 --drive-size 128M --profile 4+2; }
problems() { "$FOREBAY" status "$N" --json | jq -r '.problems[]'; }
says() { problems | grep -E "$1"; }
told() { "$FOREBAY" events "$N" --json | jq -e --arg kind "$1" 'any(.[]; .kind == $kind)' >/dev/null; }

# Files with content in the ledger and files on drives.
write_files() { # write_files NAME
    local i
    mkdir "$MNT/$1"
    for ((i = 0; i < 40; i++)); do echo "$1 $i" >"$MNT/$1/small-$i"; done
    for ((i = 0; i < 6; i++)); do head -c 3M /dev/urandom >"$MNT/$1/large-$i"; done
    sync "$MNT/$1"/* "$MNT/$1"
    (cd "$MNT" && find "$1" -type f -exec sha256sum {} +) >"$WORK/sums-$1"
}
intact() { # intact NAME…
    local name
    for name in "$@"; do (cd "$MNT" && sha256sum --check --quiet "$WORK/sums-$name"); done
}

keep_metadata() { rm -rf "$WORK/meta-$1" && cp -a "$N/meta" "$WORK/meta-$1"; }
put_metadata() { rm -rf "$N/meta" && cp -a "$WORK/meta-$1" "$N/meta"; }
keep_drives() { mkdir -p "$WORK/drives-$1" && cp --sparse=always "$N"/drives/*.img "$WORK/drives-$1/"; }
put_drives() { # put_drives NAME NUMBER…
    local from=$1 drive
    shift
    for drive in "$@"; do cp --sparse=always "$WORK/drives-$from/$drive.img" "$N/drives/$drive.img"; done
}
refused() { expect_fail "$OLDER" "$FOREBAY" start "$N"; }

begin() {
    start
    write_files first
    node_stop n
    keep_metadata first
    keep_drives first
}

# Small files are in the metadata only: the node sends the position to the drives when it stops.
small_files_only() {
    node_start n
    mkdir "$MNT/inline"
    echo new >"$MNT/inline/file"
    sync "$MNT/inline/file" "$MNT/inline"
    node_stop n
    keep_metadata inline
    put_metadata first
    refused
    put_metadata inline
    node_start n
    [ "$(cat "$MNT/inline/file")" = new ]
    intact first
}

deletes_only() {
    rm "$MNT/inline/file"
    rmdir "$MNT/inline"
    node_stop n
    keep_metadata deleted
    put_metadata inline
    refused
    put_metadata deleted
    node_start n
    not test -e "$MNT/inline"
    intact first
}

# The node also sends positions to the drives while it runs.
killed() {
    mkdir "$MNT/names"
    sync "$MNT/names"
    sleep 13
    node_kill n
    keep_metadata names
    put_metadata deleted
    refused
    put_metadata names
    node_start n
    test -d "$MNT/names"
}

# The drives are the same. Metadata that lost only unacknowledged batches in a crash is not older metadata.
crashes_are_no_reason() {
    local i
    for i in 1 2 3 4 5; do
        mkdir "$MNT/names/$i"
        head -c 1M /dev/urandom >"$MNT/names/$i/file"
        node_kill n
        node_start n
    done
    not says 'older'
    intact first
}

accepted() {
    write_files second
    node_stop n
    keep_metadata second
    put_metadata first
    refused
    timeout 120 "$FOREBAY" start "$N" --accept-older-metadata </dev/null
    intact first
    not test -e "$MNT/second"
    says 'goes on with older metadata.*meta settle'
    write_files third
    node_stop n
    node_start n
    intact first third
    says 'goes on with older metadata'
}

# Metadata that was given up returns: it lacks the data written since.
fork_is_noticed() {
    node_stop n
    keep_metadata third
    put_metadata second
    refused
    put_metadata third
    node_start n
    intact first third
}

settled() {
    "$FOREBAY" meta settle "$N"
    not says 'older metadata'
    node_stop n
    node_start n
    not says 'older metadata'
    intact first third
}

older_drives() { # older_drives NUMBER…
    node_stop n
    rm -r "$WORK/drives-first"
    keep_drives first
    node_start n
    rm -r "$MNT/third"
    write_files "fourth-$#"
    write_files third
    "$FOREBAY" upkeep "$N" --pause
    node_stop n
    put_drives first "$@"
    node_start n
    told "older copy"
    "$FOREBAY" status "$N" | grep "reads survive $((2 - $#)) drives"
    intact first third "fourth-$#"
}
no_other_may_go() {
    expect_fail 'would lose data' "$FOREBAY" drive fail "$N" "$1"
}
restored() { # restored NUMBER…: the drives that were older copies; after the rebuild two others may fail
    local drive others=()
    "$FOREBAY" upkeep "$N" --resume
    wait_until 90 whole
    not says 'DATA LOSS'
    for drive in 0 1 2 3 4 5; do
        [[ " $* " == *" $drive "* ]] || others+=("$drive")
    done
    "$FOREBAY" drive fail "$N" "${others[0]}"
    "$FOREBAY" drive fail "$N" "${others[1]}"
    echo 3 >/proc/sys/vm/drop_caches
    intact first third "fourth-$#"
    "$FOREBAY" drive return "$N" "${others[0]}"
    "$FOREBAY" drive return "$N" "${others[1]}"
    wait_until 60 whole
    node_stop n
    node_start n
    whole
}
whole() { "$FOREBAY" status "$N" | grep "reads survive 2 drives"; }

check "a node starts, and copies are made" begin || exit 0
check "older metadata without the last small files is refused" small_files_only
check "older metadata without the last deletes is refused" deletes_only
check "also after SIGKILL, if the drives knew the position" killed
check "crashes alone are no reason" crashes_are_no_reason
check "older metadata is used with --accept-older-metadata" accepted
check "metadata that was given up is refused" fork_is_noticed
check "newer metadata is given up" settled
check "an older copy of a drive does not count" older_drives 0
check "its missing shards are restored" restored 0
check "two older copies do not count" older_drives 1 4
check "no other drive may fail" no_other_may_go 2
check "their missing shards are restored" restored 1 4
check "a file system check finds nothing" node_fsck n
check "the node stops" node_stop n
