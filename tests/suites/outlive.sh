#!/usr/bin/env bash
# Mounts in processes of their own outlive their node: it is killed again and again, and stopped in order, while programs work.
# None of them sees an error, and nothing is lost.
LIMIT_S=$([ "${FOREBAY_TEST_LONG:-0}" = 1 ] && echo 3600 || echo 300)
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
# In each of six checks; at full length a thousand in all.
ROUNDS=${FOREBAY_OUTLIVE_ROUNDS:-$([ "$LONG" = 1 ] && echo 170 || echo 10)}
export FOREBAY_MOUNT_OPTIONS=process=own
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_AUTHOR_NAME=t GIT_AUTHOR_EMAIL=t@t
export GIT_COMMITTER_NAME=t GIT_COMMITTER_EMAIL=t@t
MNT=$WORK/n/mnt

# disturb HOW: ends the node ROUNDS times and starts it again, until programs have ended or rounds are over.
disturb() {
    local how=$1 round
    for ((round = 0; round < ROUNDS; round++)); do
        sleep "0.$((RANDOM % 10))$((RANDOM % 10))"
        "$how" n || return 1
        # Sometimes for longer than a drive may be silent.
        sleep "$((RANDOM % 12 == 0 ? 6 : 0)).$((RANDOM % 8))"
        "$FOREBAY" start "$WORK/n" </dev/null >/dev/null || return 1
    done
}
node_replace() { timeout 60 "$FOREBAY" stop "$WORK/$1" --keep-mounts </dev/null >/dev/null; }
mount_process() { "$FOREBAY" status "$WORK/n" --json | jq .filesystems[0].mount_process; }

# under HOW PROGRAM…: runs the program over and over while the node is ended in some way. It must never fail.
under() {
    local how=$1 disturber runs=0 failed=0
    shift
    disturb "$how" &
    disturber=$!
    while kill -0 "$disturber" 2>/dev/null || [ "$runs" = 0 ]; do
        "$@" "$how-$runs" || failed=1
        runs=$((runs + 1))
        [ "$failed" = 0 ] || break
    done
    # The next program needs a node.
    wait "$disturber" || failed=1
    echo "$runs runs beside $ROUNDS ends of the node"
    return "$failed"
}

files() {
    local first
    python3 "$ROOT/tests/posix/outlive.py" "$MNT/files-$1-a" 5 "$SEED$RANDOM" &
    first=$!
    python3 "$ROOT/tests/posix/outlive.py" "$MNT/files-$1-b" 5 "$SEED$RANDOM" || return 1
    wait "$first" || return 1
    rm -r "$MNT/files-$1-a" "$MNT/files-$1-b"
}

database() {
    local mode file=$MNT/db-$1
    mode=$([ $((RANDOM % 2)) = 0 ] && echo wal || echo delete)
    sqlite3 "$file" "PRAGMA journal_mode = $mode; CREATE TABLE rows(id INTEGER PRIMARY KEY, data BLOB);" >/dev/null || return 1
    for _ in {1..20}; do
        sqlite3 "$file" 'WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 50)
            INSERT INTO rows(data) SELECT randomblob(700) FROM n;' || return 1
    done
    [ "$(sqlite3 "$file" 'PRAGMA integrity_check; SELECT count(*) FROM rows;' | tr '\n' ' ')" = "ok 1000 " ]
}

repository() {
    local repo=$MNT/repo-$1
    git init -q -b main "$repo" || return 1
    for i in 1 2 3; do
        mkdir -p "$repo/d$i"
        for j in {1..60}; do echo "$i $j $RANDOM" >"$repo/d$i/f$j"; done
        git -C "$repo" add -A && git -C "$repo" commit -q -m "$i" || return 1
    done
    git -C "$repo" gc -q && git -C "$repo" fsck --full --strict 2>&1 && [ -z "$(git -C "$repo" status --porcelain)" ]
}

# The process of the mount is killed: what was open fails, and the filesystem is mounted again.
killed_mount() {
    local process
    echo kept >"$MNT/kept"
    sync "$MNT/kept"
    process=$(mount_process)
    exec 7<"$MNT/kept"
    kill -KILL "$process"
    wait_until 20 grep -qs kept "$MNT/kept"
    expect_fail "endpoint|connected" cat <&7
    [ "$(mount_process)" != "$process" ]
}

by_hand() {
    cd "$MNT"
    expect_fail "busy" "$FOREBAY" umount "$WORK/n"
    cd /
    umount "$MNT"
    wait_until 10 no_process
    "$FOREBAY" mount "$WORK/n"
    grep -q kept "$MNT/kept"
    "$FOREBAY" umount "$WORK/n"
    no_process
    "$FOREBAY" mount "$WORK/n"
}
no_process() { not pgrep -f "mount-process.*$WORK/n\"" >/dev/null; }

# A program that waits for the node can be killed, and the mount can be taken away.
gone_for_good() {
    local reader
    node_kill n
    cat "$MNT/kept" >/dev/null &
    reader=$!
    sleep 1
    kill -KILL "$reader"
    wait_until 5 process_is_gone "$reader"
    umount -l "$MNT"
    wait_until 20 no_process
    node_start n
    grep -q kept "$MNT/kept"
}

# What a program wrote is not lost if the mount is taken away right after, or its process is asked to end.
written_before_the_end() {
    local file=$MNT/written-$1
    head -c 30000000 /dev/urandom >"$WORK/data"
    cp "$WORK/data" "$file"
    case $1 in
    hand) umount "$MNT" ;;
    signal) pkill -TERM -f "mount-process.*$WORK/n\"" ;;
    esac
    wait_until 20 no_process
    not mountpoint -q "$MNT"
    "$FOREBAY" mount "$WORK/n"
    cmp "$WORK/data" "$file"
}

# A start with the same options, as a service gives them, keeps the mount.
same_options() {
    local process
    process=$(mount_process)
    node_replace n
    "$FOREBAY" start "$WORK/n" --mount-options process=own </dev/null
    [ "$(mount_process)" = "$process" ]
    node_replace n
    "$FOREBAY" start "$WORK/n" --mount-options process=own,noatime </dev/null
    [ "$(mount_process)" != "$process" ]
    grep -q kept "$MNT/kept"
}

# A stop right after the process of the mount was killed leaves no dead mount.
stopped_dead() {
    kill -KILL "$(mount_process)"
    "$FOREBAY" stop "$WORK/n" || true
    not mountpoint -q "$MNT"
    ls "$MNT" >/dev/null
    node_start n
    grep -q kept "$MNT/kept"
}

leaves_nothing() {
    "$FOREBAY" stop "$WORK/n"
    no_process
    not mountpoint -q "$MNT"
    [ "$(ls "$WORK/n/run")" = mount-1.lock ]
}

check "the node starts" node_start n --drives 6 --drive-size 1G --profile 4+2 || exit 0
for how in node_kill node_replace; do
    check "files, locks and open files ($how)" under "$how" files
    check "SQLite ($how)" under "$how" database
    check "git ($how)" under "$how" repository
done
check "nothing is owed, and everything is valid" node_fsck n
check "the process of a mount is killed" killed_mount
check "unmounting by hand, and while in use" by_hand
check "programs that wait can be killed, and the mount taken away" gone_for_good
for way in hand signal; do
    check "what was written right before the end ($way)" written_before_the_end "$way"
done
check "a start with the same options keeps the mount" same_options
check "a stop after the process was killed" stopped_dead
check "a stop leaves nothing behind" leaves_nothing
exit 0
