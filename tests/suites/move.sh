#!/usr/bin/env bash
# The logs of a cluster that began on one machine move from files into etcd while programs work; machines that joined before and after
# that can take over then. From there they move to another engine, and back to files. A move that fails or is killed at any moment leaves either the files or the engine, and nothing is lost.
LIMIT_S=$([ "${FOREBAY_TEST_LONG:-0}" = 1 ] && echo 3600 || echo 480)
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
source "$(dirname "$0")/../machines.sh"
NODES=(1 2 3)
# So many moves are killed.
ROUNDS=${FOREBAY_MOVE_ROUNDS:-$([ "$LONG" = 1 ] && echo 40 || echo 3)}

log_at() { on "$1" timeout 30 "$FOREBAY" log show "$WORK/$1" --json | jq -r .at; }
move() { on "$1" timeout 150 "$FOREBAY" log move "$WORK/$1" "${@:2}" </dev/null; }
# put KEY VALUE: what another user of etcd puts there.
put() {
    on 1 curl -sf "http://$(address 1):2379/v3/kv/put" -d "{\"key\":\"$(printf %s "$1" | base64)\",\"value\":\"$(printf %s "$2" | base64)\"}" >/dev/null
}

# --- checks --------------------------------------------------------------------------------------------------------

begin() {
    local node token
    for node in 1 2 3; do wait_until 30 etcd_answers "$node"; done
    for node in 1 2 3; do echo "$WORK/$node" >>"$WORK/.nodes"; done
    on 1 timeout 120 "$FOREBAY" start "$WORK/1" --drives 2 --drive-size 512MiB --profile r2 --mount "$WORK/1/mnt" \
        --memory "$MEMORY" --address "$(address 1)" </dev/null
    token=$(on 1 "$FOREBAY" token create "$WORK/1")
    on 2 timeout 120 "$FOREBAY" join "$token" "$WORK/2" --drives 2 --drive-size 512MiB --name n2 </dev/null
    on 2 "$FOREBAY" mount "$WORK/2" "$WORK/2/mnt"
    stage_tree 200 "$WORK/tree"
    cp -a "$WORK/tree" "$WORK/1/mnt/tree"
    sync_files "$WORK/1/mnt/tree"
    on 1 "$FOREBAY" log show "$WORK/1" | grep -q "files of node 0; while it is away, everything waits"
}

# Nothing happens to the node, whose process goes on.
refused() {
    local pid
    pid=$(member_pid 1)
    put taken/x y
    expect_fail "etcd://HOST:PORT" move 1 http://a:1
    expect_fail "cannot be used" move 1 "etcd://$(address 1):9"
    expect_fail "mounts in the node's own process.*--remount" move 1 "$ENGINE"
    [ "$(log_at 2)" = files ]
    [ "$(member_pid 1)" = "$pid" ]
    on 1 "$FOREBAY" umount "$WORK/1"
    on 1 "$FOREBAY" mount "$WORK/1" "$WORK/1/mnt" -o process=own
    pid=$(member_pid 1)
    expect_fail "of another cluster" move 1 "$ENGINE?prefix=taken"
    [ "$(log_at 2)" = files ]
    [ "$(member_pid 1)" = "$pid" ]
    # The other node, which may own the metadata later, does not reach that engine.
    filter engine "$(from_to 2 3 'tcp dport 2379')"
    expect_fail "node 1 could not take over.*no answer|node 1 could not take over.*cannot be used" \
        move 1 "etcd://$(address 3):2379?prefix=elsewhere"
    filter_ends engine
    [ "$(log_at 2)" = files ]
    # Everything is in the engine, and the last step fails: the next move goes there too, with what has changed until then.
    mkdir "$WORK/1/identity/membership.json.new"
    expect_fail "stay where they are.*membership" move 1 "$ENGINE?prefix=moved"
    rmdir "$WORK/1/identity/membership.json.new"
    [ "$(log_at 2)" = files ]
    on 1 "$FOREBAY" log show "$WORK/1" | grep -q "last attempt to move failed"
    # A node that was asked to stop in the meantime stops when it has moved, or has not.
    mkdir "$WORK/1/identity/membership.json.new"
    # Asked at this node: another one would ask again once it runs, when nothing is in the way any more.
    move 1 "$ENGINE?prefix=moved" &
    wait_until 20 is_moving
    on 1 timeout 60 "$FOREBAY" stop "$WORK/1" --keep-mounts </dev/null
    rmdir "$WORK/1/identity/membership.json.new"
    member_start 1
    wait || true
    wait_until 60 mounted 1
    [ "$(log_at 2)" = files ]
    same_tree "$WORK/tree" "$WORK/1/mnt/tree"
}

is_moving() { jq -e '.tries == 2' "$WORK/1/log-move.json" >/dev/null; }

# Programs work at both machines, and see no error.
moves() {
    beside 1 moves_beside_two
    [ "$(log_at 1)" = "$ENGINE?prefix=moved" ]
    wait_until 60 follows 2 1
    status 2 | jq -e .log.at
    wait_until 60 healthy 1
    not ls "$WORK"/1/meta/ledger-*/log/*.log
    not test -e "$WORK/1/log-move.json"
    expect_fail "the logs are there already" move 2 "$ENGINE"
    expect_fail "the logs are there already" move 2 "$ENGINE?prefix=moved"
    expect_fail "cannot be used" move 2 "etcd://$(address 1):9"
    expect_fail "of another cluster" move 2 "$ENGINE?prefix=taken"
    for node in 1 2; do same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
}
moves_beside_two() { under 2 move 2 "$ENGINE?prefix=moved"; }

joins_later() {
    local token
    token=$(on 2 "$FOREBAY" token create "$WORK/2")
    on 3 timeout 120 "$FOREBAY" join "$token" "$WORK/3" --drives 2 --drive-size 512MiB --name n3 </dev/null
    on 3 "$FOREBAY" mount "$WORK/3" "$WORK/3/mnt"
    on 3 "$FOREBAY" fs set "$WORK/3" main --profile 4+2
    wait_until 60 follows 3 2
    wait_until 60 healthy 3
}

first_machine_dies() {
    beside 3 machine_kill 1
    owner_is_not 3 1
    etcd_start 1
    machine_returns 1
    same_tree "$WORK/tree" "$WORK/1/mnt/tree"
}

# The first node had a copy of its directory from before the move: with that it does not begin a cluster of its own.
old_copy() {
    local node
    on 1 timeout 120 "$FOREBAY" stop "$WORK/1" </dev/null
    rm -rf "$WORK/kept"
    mkdir "$WORK/kept"
    mv "$WORK"/1/{meta,meta-dirs.json,identity} "$WORK/kept"
    cp -a "$WORK"/old/{meta,meta-dirs.json,identity} "$WORK/1/"
    expect_fail "newer|older" on 1 timeout 120 "$FOREBAY" start "$WORK/1"
    rm -rf "$WORK"/1/{meta,meta-dirs.json,identity}
    mv "$WORK"/kept/* "$WORK/1/"
    member_start 1
    wait_until 90 healthy 1
    for node in 1 2 3; do same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
}
keep_copy() {
    rm -rf "$WORK/old"
    mkdir "$WORK/old"
    on 1 timeout 120 "$FOREBAY" stop "$WORK/1" --keep-mounts </dev/null
    cp -a "$WORK"/1/{meta,meta-dirs.json,identity} "$WORK/old/"
    member_start 1
    wait_until 60 mounted 1
}

# The process is killed at any moment of a move: the next start finds the files or the engine.
killed() {
    local round pid at asking killing dir="$WORK/k" moved=0
    for ((round = 0; round < ROUNDS; round++)); do
        rm -rf "$dir"
        on 1 timeout 120 "$FOREBAY" start "$dir" --drives 1 --drive-size 256MiB --mount "$dir/mnt" --mount-options process=own \
            --memory "$MEMORY" --address "$(address 1):7799" --s3 127.0.0.1:0 --meta-dir "$dir/meta" --meta-dir "$dir/meta2" </dev/null
        echo "$dir" >>"$WORK/.nodes"
        stage_tree 20 "$dir/mnt/tree"
        sync_files "$dir/mnt/tree"
        cp -a "$dir/mnt/tree" "$WORK/killed-$round"
        pid=$(node_pid k)
        rm -f "$WORK/looks"
        case $round in
            0) kill_with "$pid" "$dir/log-move.json" & ;;
            1) kill_with "$pid" "$dir/identity/membership.json" & ;;
            # The steps themselves take some hundredths of a second, the start after them longer.
            *)
                touch "$WORK/looks"
                (sleep "0.$((RANDOM % 2 * RANDOM % 5))$((RANDOM % 10))$((RANDOM % 10))" && kill -KILL "$pid") &
                ;;
        esac
        killing=$!
        wait_until 30 test -e "$WORK/looks"
        on 1 timeout 60 "$FOREBAY" log move "$dir" "$ENGINE?prefix=killed-$round" </dev/null &
        asking=$!
        wait "$killing"
        kill "$asking" || true
        on 1 timeout 120 "$FOREBAY" start "$dir" </dev/null
        # In an engine, an owner that was killed counts as alive for some seconds.
        wait_until 60 log_shown "$dir"
        at=$(log_shown "$dir")
        echo "round $round: $at"
        case $round in
            0) [ "$at" = files ] ;;
            1) [ "$at" != files ] ;;
        esac
        same_tree "$WORK/killed-$round" "$dir/mnt/tree"
        if [ "$at" = files ]; then
            echo more >"$dir/mnt/tree/more"
            sync_files "$dir/mnt/tree"
            on 1 timeout 60 "$FOREBAY" log move "$dir" "$ENGINE?prefix=killed-$round" </dev/null
            [ "$(cat "$dir/mnt/tree/more")" = more ]
        else
            moved=$((moved + 1))
        fi
        if [ "$round" = 1 ]; then
            # Back, into both directories. One that is away is not left behind with older logs.
            mv "$dir/meta2" "$dir/meta2.away"
            expect_fail "directory of the metadata is not there" on 1 timeout 60 "$FOREBAY" log move "$dir" files
            mv "$dir/meta2.away" "$dir/meta2"
            on 1 timeout 60 "$FOREBAY" log move "$dir" files </dev/null
            same_tree "$WORK/killed-$round" "$dir/mnt/tree"
            ls "$dir"/meta/ledger-*/log/*.log "$dir"/meta2/ledger-*/log/*.log
        fi
        on 1 timeout 60 "$FOREBAY" stop "$dir" </dev/null
        on 1 timeout 60 "$FOREBAY" start "$dir" </dev/null
        wait_until 30 mountpoint -q "$dir/mnt"
        on 1 timeout 200 "$FOREBAY" fsck "$dir" </dev/null
        on 1 timeout 60 "$FOREBAY" stop "$dir" </dev/null
    done
    echo "$moved of $ROUNDS had moved"
}

# Kills a process as soon as a file is there: the one that a move begins with, and the one that decides it.
kill_with() {
    python3 -c 'import os, sys, time
open(sys.argv[3], "w").close()
end = time.monotonic() + 30
while not os.path.exists(sys.argv[2]):
    if time.monotonic() > end: sys.exit("no such file")
os.kill(int(sys.argv[1]), 9)' "$1" "$2" "$WORK/looks"
}
log_shown() { on 1 timeout 30 "$FOREBAY" log show "$1" --json | jq -er .at; }

# To an etcd of Forebay and back, while programs work.
between_engines() {
    local node
    beside 1 moves_to_own
    wait_until 60 follows 1 2
    wait_until 60 healthy 1
    for node in 1 2 3; do test -d "$WORK/$node/engine" && same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
    # The owner's machine dies: the stores of others have gone on with the new logs.
    node=$(owner 1)
    beside "$((node % 3 + 1))" machine_kill "$node"
    owner_is_not "$((node % 3 + 1))" "$node"
    etcd_start "$node"
    machine_returns "$node"
    wait_until 60 follows 1 2
    beside 2 moves_back
    wait_until 60 follows 3 2
    wait_until 60 healthy 3
    for node in 1 2 3; do
        not test -e "$WORK/$node/engine"
        ls -d "$WORK/$node"/engine.former-*
        same_tree "$WORK/tree" "$WORK/$node/mnt/tree"
        # Nothing was copied anew.
        not ls -d "$WORK/$node"/meta/ledger-*/state.former
    done
    not pgrep -f "etcd .*--data-dir $WORK/[123]/"
}
moves_to_own() { under 2 move 3 etcd && [[ $(log_at 2) == *run=own* ]]; }
moves_back() { under 3 move 1 "$ENGINE?prefix=back" && [ "$(log_at 2)" = "$ENGINE?prefix=back" ]; }

# The process of the owner, or of all nodes, is killed at any moment of a move: the cluster finds the one engine or the other. First, the owner
# cannot write down at its own place where the logs are: the others find them all the same.
killed_between() {
    local round node at asking victim victims
    node=$(owner 1)
    mkdir "$WORK/$node/identity/membership.json.new"
    move "$((node % 3 + 1))" "$ENGINE?prefix=stuck"
    owner_is_not "$((node % 3 + 1))" "$node"
    rmdir "$WORK/$node/identity/membership.json.new"
    # Its process may have ended, because nothing can be written there.
    member_start "$node" || true
    for node in 1 2 3; do wait_until 60 is_log_at "$node" "$ENGINE?prefix=stuck"; done
    for ((round = 0; round < ROUNDS; round++)); do
        node=$(owner 1)
        move "$((node % 3 + 1))" "$ENGINE?prefix=between-$round" &
        asking=$!
        victims=("$node")
        ((round % 2 == 0)) || victims=(1 2 3)
        sleep "0.$((RANDOM % 10))$((RANDOM % 10))"
        for victim in "${victims[@]}"; do kill -KILL "$(cat "$WORK/$victim/lock")"; done
        for victim in "${victims[@]}"; do member_start "$victim"; done
        wait "$asking" || true
        for node in 1 2 3; do wait_until 60 follows "$node" 2; done
        at=$(log_at 1)
        echo "round $round: $at"
        for node in 1 2 3; do
            wait_until 60 is_log_at "$node" "$at"
            echo "$round $node" >"$WORK/$node/mnt/round-$round-$node"
            sync_files "$WORK/$node/mnt"
        done
        for node in 1 2 3; do [ "$(cat "$WORK/$((node % 3 + 1))/mnt/round-$round-$node")" = "$round $node" ]; done
    done
}
is_log_at() { [ "$(log_at "$1")" = "$2" ]; }

# Back to files of the first node, also if another one owns the metadata, and from there to an engine.
back_to_files() {
    local node
    owner 1
    [ "$(owner 1)" != 1 ] || on 1 "$FOREBAY" node maintenance "$WORK/1" 0 --for 1m
    wait_until 30 owner_is_not 2 1
    wait_until 30 maintenance_ends
    beside 2 moves_to_files
    wait_until 60 healthy 3
    for node in 1 2 3; do same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
    expect_fail "in files already" move 2 files
    # It starts as such a node, and the others find it.
    on 1 timeout 120 "$FOREBAY" stop "$WORK/1" --keep-mounts </dev/null
    member_start 1
    wait_until 60 healthy 2
    on 2 timeout 30 "$FOREBAY" log show "$WORK/2" | grep -q "files of node 0"
    beside 3 moves_again
    wait_until 60 follows 1 2
    wait_until 60 healthy 1
}
maintenance_ends() { on 2 "$FOREBAY" node maintenance "$WORK/2" 0 --end </dev/null; }
moves_to_files() { under 3 move 3 files && [ "$(log_at 1)" = files ]; }
moves_again() { under 2 move 2 "$ENGINE?prefix=again"; }

whole() {
    local node
    wait_until 90 healthy 2
    on 2 timeout 200 "$FOREBAY" fsck "$WORK/2" </dev/null
    for node in 3 1 2; do on "$node" timeout 120 "$FOREBAY" stop "$WORK/$node" </dev/null; done
    for node in 1 2 3; do member_start "$node"; done
    wait_until 90 healthy 3
    for node in 1 2 3; do wait_until 30 mounted "$node" && same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
}

machines_begin
for node in 1 2 3; do etcd_start "$node"; done
check "two machines, their metadata in files of the first" begin || exit 1
check "moves that cannot work are refused, and change nothing" refused
check "the node stops and starts as before" keep_copy
check "the logs move under load at two machines" moves || exit 1
check "another machine joins and follows" joins_later
check "the first machine dies" first_machine_dies
check "an old copy of the first node's directory does not start" old_copy
check "moves that are killed" killed
check "the logs move under load from one engine to another" between_engines
check "moves between engines whose owner is killed" killed_between
check "the logs move back to files under load, and on to an engine" back_to_files
check "all is whole, and starts again as it was" whole
