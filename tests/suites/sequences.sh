#!/usr/bin/env bash
# Regression tests: short sequences of commands that once failed, found by the larger suites and reduced.
source "$(dirname "$0")/../lib.sh"

# A client that knows only the end of a file's map, because it read nothing else since the start, overwrites the whole file.
overwrite_after_reading_the_middle() {
    local file=$MNT/middle
    head -c 1M /dev/urandom >"$WORK/new"
    head -c 1M /dev/urandom >"$file"
    node_stop "$NODE"
    node_start "$NODE"
    dd if="$file" of=/dev/null bs=4k skip=100 count=1 iflag=direct
    dd if="$WORK/new" of="$file" bs=1M conv=notrunc,fsync
    dd if="$file" of="$WORK/found" bs=4k skip=120 count=10 iflag=direct
    cmp "$WORK/found" <(dd if="$WORK/new" bs=4k skip=120 count=10 status=none)
}

# The space of overwritten bytes must be reclaimed: the file is always a small part of the drive.
overwrite_many_times() {
    local i
    head -c 2M /dev/urandom >"$WORK/two"
    for ((i = 1; i <= 200; i++)); do
        dd if="$WORK/two" of="$MNT/again" bs=1M conv=notrunc,fsync status=none || {
            echo "failed in round $i"
            df "$MNT"
            return 1
        }
    done
    cmp "$WORK/two" "$MNT/again"
}

create_and_delete_many_times() {
    local i
    head -c 2M /dev/urandom >"$WORK/two"
    for ((i = 1; i <= 200; i++)); do
        dd if="$WORK/two" of="$MNT/once" bs=1M conv=fsync status=none || {
            echo "failed in round $i"
            df "$MNT"
            return 1
        }
        rm "$MNT/once"
    done
}

# O_RDONLY|O_TRUNC is a write: a running program is not truncated.
truncate_a_running_program() {
    local status=0
    cp "$(command -v sleep)" "$MNT/program"
    "$MNT/program" 20 &
    wait_until 5 grep -qs program "/proc/$!/comm"
    perl -MFcntl -e 'sysopen(F, $ARGV[0], O_RDONLY | O_TRUNC) and exit 1; $!{ETXTBSY} or exit 2' "$MNT/program" || status=$?
    kill $!
    wait $! || true
    echo "status $status: 1 is opened, 2 is another error"
    [ "$status" = 0 ]
    # The kernel may refuse after the filesystem has truncated: only the stored size counts.
    node_stop "$NODE"
    node_start "$NODE"
    cmp "$(command -v sleep)" "$MNT/program"
}

# A second process must refuse to start before it changes anything, even if the lock file was deleted.
deleted_lock_file() {
    echo precious >"$MNT/precious"
    sync "$MNT/precious"
    rm "$WORK/$NODE/lock"
    expect_fail 'in use by another process' "$FOREBAY" start "$WORK/$NODE"
    "$FOREBAY" status "$WORK/$NODE" --json | jq -e '.state == "healthy"' >/dev/null
    kill -TERM "$(node_pid "$NODE")"
    wait_until 20 not test -e "$WORK/$NODE/node.json"
    node_start "$NODE"
    grep -qx precious "$MNT/precious"
}

# The kernel would keep pages that a read loaded during an asynchronous direct write.
buffered_reads_beside_direct_writes() { python3 "$ROOT/tests/posix/direct.py" "$MNT/shared" 5; }

# Locks, signals, O_TMPFILE, O_NOATIME, the time of creation.
calls_of_few_programs() { python3 "$ROOT/tests/posix/calls.py" "$MNT"; }

# Tools copy whole blocks, and some loop or lose data if a hole begins within one.
holes_are_whole_blocks() {
    truncate -s 30000 "$MNT/sparse"
    printf x | dd of="$MNT/sparse" bs=1 seek=13000 conv=notrunc status=none
    printf y | dd of="$MNT/sparse" bs=1 seek=29999 conv=notrunc status=none
    xfs_io -c 'seek -ar 0' "$MNT/sparse" | tee "$WORK/found"
    diff <(printf '%s\n' 'Whence	Result' 'HOLE	0' 'DATA	12288' 'HOLE	16384' 'DATA	28672' 'HOLE	30000') "$WORK/found"
    cp --sparse=auto "$MNT/sparse" "$WORK/copy"
    cmp "$MNT/sparse" "$WORK/copy"
}

# Times of change and modification from the node, not from the kernel's cache.
times_of() { stat --cached=never -c '%z %y' "$1"; }

# If a time moves without a change, `tar` says "file changed as we read it" and `git status` reads all files again.
times_stay_after_a_write() {
    local i first
    echo some >"$MNT/file"
    first=$(times_of "$MNT/file")
    for ((i = 0; i < 300; i++)); do
        [ "$(times_of "$MNT/file")" = "$first" ] || {
            echo "round $i: $(times_of "$MNT/file"), before: $first"
            return 1
        }
        [ "$i" != 150 ] || cat "$MNT/file" >"$WORK/out"
        sleep 0.01
    done
    [ "$(times_of "$MNT/file")" = "$first" ]
    node_unmount "$NODE"
    node_mount "$NODE"
    [ "$(times_of "$MNT/file")" = "$first" ]
}

tar_of_what_was_just_written() {
    local i
    head -c 6M /dev/urandom >"$WORK/six"
    for ((i = 0; i < 10; i++)); do
        cat "$WORK/six" >"$MNT/file"
        # Drops the page cache, so that the read asks the node, and so does tar after the read.
        dd if="$MNT/file" iflag=nocache count=0 status=none
        tar --create --directory="$MNT" file 2>>"$WORK/said" | { sleep 0.1; cat >"$WORK/out"; }
    done
    cat "$WORK/said"
    [ ! -s "$WORK/said" ]
}

# The stat data that git stores for a written file stays the same: git does not read files again.
git_status_after_a_checkout() {
    local i
    git init -q "$WORK/origin"
    for ((i = 0; i < 50; i++)); do echo "$i" >"$WORK/origin/$i"; done
    git -C "$WORK/origin" add .
    git -C "$WORK/origin" -c user.name=t -c user.email=t@t commit -qm all
    git clone -q "$WORK/origin" "$MNT/copy"
    sleep 2
    cat "$MNT"/copy/* >"$WORK/out"
    sleep 2
    git -C "$MNT/copy" ls-files --debug | awk '/ctime:/ { print $2 }' | sort >"$WORK/remembered"
    # Seconds and nanoseconds, without leading zeros.
    (cd "$MNT/copy" && stat -c %.Z ./[0-9]*) | awk -F. '{ print $1 ":" $2 + 0 }' | sort >"$WORK/seen"
    diff "$WORK/remembered" "$WORK/seen"
    rm -rf "$WORK/origin"
}

# set_id_file UID:GID MODE: makes a file with some content that every user can reach.
set_id_file() {
    chmod a+x "$WORK" "$WORK/$NODE"
    head -c 20000 /dev/zero >"$MNT/set-id"
    chown "$1" "$MNT/set-id"
    chmod "$2" "$MNT/set-id"
}

# as_user COMMAND…: runs it as user and group 1000, without other groups.
as_user() { setpriv --reuid 1000 --regid 1000 --clear-groups "$@"; }

# mode_is MODE: the mode both in the kernel's cache, which is asked first and only for the mode, and in the node.
mode_is() {
    local seen remembered
    remembered=$(stat -c %a "$MNT/set-id")
    seen=$(stat --cached=never -c %a "$MNT/set-id")
    [ "$seen $remembered" = "$1 $1" ] || {
        echo "mode $seen, in the kernel $remembered, not $1"
        return 1
    }
}

# As on ext4, a file loses SUID and SGID when an ordinary user changes it.
set_id_bits_after_a_change() {
    local change
    head -c 9000 /dev/zero >"$MNT/source"
    for change in "fallocate -l 40000" "fallocate -n -l 60000" "fallocate -p -o 0 -l 4096" "fallocate -z -o 0 -l 4096" \
        "truncate -s 10" "xfs_io -c 'pwrite -q 0 1'" "xfs_io -c 'copy_range $MNT/source'"; do
        echo "$change"
        set_id_file 1000:1000 6777
        as_user bash -c "$change '$MNT/set-id'"
        mode_is 777
        set_id_file 1000:1000 6777
        bash -c "$change '$MNT/set-id'"
        mode_is 6777
    done
    # Without the right to execute, the group decides whether set-gid is lost.
    set_id_file 1000:5 2767
    as_user bash -c "echo >>'$MNT/set-id'"
    mode_is 767
    set_id_file 1000:1000 2767
    as_user bash -c "echo >>'$MNT/set-id'"
    mode_is 2767
}

# As with chmod(2), only members of the group keep set-gid.
set_gid_after_an_access_list() {
    set_id_file 1000:5 6777
    as_user setfacl -m u:7:rwx "$MNT/set-id"
    mode_is 4777
    getfacl -cp "$MNT/set-id" | grep -qx 'user:lp:rwx'
    set_id_file 1000:1000 6777
    as_user setfacl -m u:7:rwx "$MNT/set-id"
    mode_is 6777
    set_id_file 1000:5 6777
    setpriv --reuid 1000 --regid 1000 --groups 4,5 setfacl -m u:7:rwx "$MNT/set-id"
    mode_is 6777
    setfacl -m u:8:rwx "$MNT/set-id"
    mode_is 6777
}

# A file protected by chattr is protected from every user, also through S3.
append_only_and_immutable() {
    local url key secret
    echo text >"$MNT/file"
    chattr +a "$MNT/file"
    [ "$(lsattr -d "$MNT/file" | cut -d' ' -f1 | tr -d -)" = a ]
    echo more >>"$MNT/file"
    diff <(printf 'text\nmore\n') "$MNT/file"
    expect_fail 'not permitted' bash -c "echo over >'$MNT/file'"
    expect_fail 'not permitted' dd if=/dev/zero of="$MNT/file" bs=1 count=1 conv=notrunc
    expect_fail 'not permitted' dd if=/dev/zero of="$MNT/file" bs=1 count=1 oflag=append
    expect_fail 'not permitted' rm "$MNT/file"
    expect_fail 'not permitted' mv "$MNT/file" "$MNT/moved"
    expect_fail 'not permitted' ln "$MNT/file" "$MNT/second"
    expect_fail 'not permitted' fallocate -p -o 0 -l 4 "$MNT/file"
    # A file that becomes protected while a writer has it open.
    exec 9>"$MNT/open"
    echo before >&9
    chattr +i "$MNT/open" "$MNT/file"
    expect_fail 'not permitted' bash -c 'echo after >&9'
    exec 9>&-
    [ "$(cat "$MNT/open")" = before ]
    expect_fail 'not permitted' bash -c "echo more >>'$MNT/file'"
    expect_fail 'not permitted' chmod 600 "$MNT/file"
    expect_fail 'not permitted' setfattr -n user.a -v b "$MNT/file"
    mkdir "$MNT/bucket"
    echo object >"$MNT/bucket/object"
    chattr +i "$MNT/bucket/object"
    url=$(jq -r .s3 "$WORK/$NODE/node.json")
    key=$(awk '/access_key_id/ { print $3 }' "$WORK/$NODE/admin-credentials")
    secret=$(awk '/secret_access/ { print $3 }' "$WORK/$NODE/admin-credentials")
    s3() { curl -s -H 'x-amz-content-sha256: UNSIGNED-PAYLOAD' --aws-sigv4 aws:amz:us-east-1:s3 --user "$key:$secret" "$@"; }
    s3 -T "$WORK/$NODE/node.json" "$url/bucket/object" | tee /dev/stderr | grep -q AccessDenied
    s3 -X DELETE "$url/bucket/object" | tee /dev/stderr | grep -q AccessDenied
    [ "$(s3 "$url/bucket/object")" = object ]
    node_stop "$NODE"
    node_start "$NODE"
    [ "$(lsattr -d "$MNT/file" | cut -d' ' -f1 | tr -d -)" = ia ]
    chattr +i "$MNT/bucket"
    expect_fail 'not permitted' touch "$MNT/bucket/new"
    expect_fail 'not supported' chattr +d "$MNT/file"
    chattr -R -ia "$MNT/bucket" "$MNT/file" "$MNT/open"
    rm -r "$MNT/bucket" "$MNT/file" "$MNT/open"
}

# As overlayfs renames a file that a lower layer also has.
rename_with_whiteout() {
    mkdir "$MNT/upper"
    echo text >"$MNT/upper/file"
    python3 -c '
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
old, new = (os.fsencode(name) for name in sys.argv[1:])
if libc.renameat2(-100, old, -100, new, 4) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))' "$MNT/upper/file" "$MNT/upper/moved"
    [ "$(cat "$MNT/upper/moved")" = text ]
    [ "$(stat -c '%F %t:%T %a' "$MNT/upper/file")" = 'character special file 0:0 0' ]
    # shellcheck disable=SC2012 # the names are known
    [ "$(ls "$MNT/upper" | tr '\n' ' ')" = 'file moved ' ]
}

# fallocate refuses a range that cannot have room, independent of the file's size, and keeps the size if told to.
fallocate_without_room() {
    truncate -s 1T "$MNT/sparse"
    expect_fail 'no space' fallocate -l 1T "$MNT/sparse"
    expect_fail 'no space' fallocate -n -l 1G "$MNT/sparse"
    [ "$(stat -c %s "$MNT/sparse")" = $((1 << 40)) ]
    echo text >"$MNT/small"
    fallocate -n -o 0 -l 16M "$MNT/small"
    [ "$(cat "$MNT/small")" = text ]
    fallocate -l 1M "$MNT/small"
    [ "$(stat -c %s "$MNT/small")" = $((1 << 20)) ]
    # Existing blocks need no more room: the file takes more than half of the drive.
    head -c 20M /dev/urandom >"$MNT/half"
    fallocate -l 20M "$MNT/half"
}

# Every sequence has its own small node, so that it does not depend on the state of another one.
sequence() {
    local name=$1
    shift
    NODE=$1
    MNT=$WORK/$1/mnt
    check "$name" on_a_node "$1"
    [ "$PLAIN" = 1 ] || node_end "$WORK/$1"
    rm -rf --one-file-system "${WORK:?}/$1"
}

on_a_node() {
    node_start "$1" --drives 1 --drive-size 64M --profile 1+0
    "$1"
    node_fsck "$1"
    node_stop "$1"
    node_fsck "$1"
}

sequence "overwriting after a read in the middle" overwrite_after_reading_the_middle
sequence "overwriting 200 times what fits ten times" overwrite_many_times
sequence "creating and deleting 200 times what fits ten times" create_and_delete_many_times
sequence "a running program is not truncated by O_RDONLY|O_TRUNC" truncate_a_running_program
sequence "a deleted lock file does no harm" deleted_lock_file
sequence "times stay as they are after a write and a read" times_stay_after_a_write
sequence "tar of what was just written says nothing" tar_of_what_was_just_written
sequence "git remembers the times of what it checked out" git_status_after_a_checkout
sequence "an ordinary change takes SUID and SGID away" set_id_bits_after_a_change
sequence "an access list by an outsider takes SGID away" set_gid_after_an_access_list
sequence "holes are whole blocks" holes_are_whole_blocks
sequence "locks, signals, and calls of few programs" calls_of_few_programs
sequence "buffered reads beside asynchronous direct writes" buffered_reads_beside_direct_writes
sequence "append-only and immutable files, also through S3" append_only_and_immutable
sequence "a rename that leaves a whiteout" rename_with_whiteout
sequence "fallocate without room" fallocate_without_room
exit 0
