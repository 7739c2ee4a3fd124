#!/usr/bin/env bash
# Backups of the metadata: exported while programs write, at any node; what was synced before is whole after all metadata is lost and
# was imported. Files that are cut or changed are refused, and an import that is killed is given again.
LIMIT_S=200
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
source "$(dirname "$0")/../machines.sh"
# What upkeep packs after an export is not found by it: small files are packed half a minute after they were written, not two seconds.
unset FOREBAY_HASTE
NODES=(1 2 3)
BACKUP=$WORK/backup
ETCD=$WORK/etcd
trap 'etcd_ends; machines_end; cleanup' EXIT

export_at() { on "$1" timeout 60 "$FOREBAY" meta export "$WORK/$1" "${@:2}" </dev/null; }
import_at() { on "$1" timeout 60 "$FOREBAY" meta import "$WORK/$1" "${@:2}" </dev/null; }
stop_at() { on "$1" timeout 60 "$FOREBAY" stop "$WORK/$1" </dev/null; }
settle_at() { on "$1" timeout 60 "$FOREBAY" meta settle "$WORK/$1" </dev/null; }

begin() {
    local token node
    for node in 1 2 3; do echo "$WORK/$node" >>"$WORK/.nodes"; done
    on 1 timeout 120 "$FOREBAY" start "$WORK/1" --drives 3 --drive-size 256MiB --profile r2 --memory "$MEMORY" --s3 "$(address 1):9000" \
        --address "$(address 1)" --mount "$WORK/1/mnt" </dev/null
    token=$(on 1 "$FOREBAY" token create "$WORK/1")
    on 2 timeout 120 "$FOREBAY" join "$token" "$WORK/2" --drives 0 --name n2 </dev/null
    mkdir "$WORK/tree"
    cp -a "$ROOT/docs" "$ROOT/crates/meta/src" "$WORK/tree"
    head -c 9000000 /dev/urandom >"$WORK/tree/large"
    ln -s large "$WORK/tree/link"
    cp -a "$WORK/tree" "$WORK/1/mnt/tree"
    sync_files "$WORK/1/mnt/tree"
    head -c 3M /dev/urandom >"$WORK/object"
    mkdir "$WORK/1/mnt/bucket"
    s3 1 put bucket dir/object "$WORK/object"
}

# Writes small and large files until it is ended, and says which ones are durable, with their sums.
writer() {
    local number=0 file
    mkdir -p "$1"
    while [ ! -e "$WORK/enough" ]; do
        file=$1/$number
        head -c "$((number % 7 == 0 ? 700000 : number * 37 % 20000 + 1))" /dev/urandom >"$file"
        sync "$file" "$1"
        (cd "$1" && sha256sum "$number") >>"$WORK/durable"
        number=$((number + 1))
    done
}
has_written() { [ "$(wc -l <"$WORK/durable")" -ge "$1" ]; }

exported() {
    local before count writer
    : >"$WORK/durable"
    writer "$WORK/1/mnt/work" &
    writer=$!
    wait_until 30 has_written 20
    export_at 1 "$WORK/first" --json | jq -e '[.ledgers[].name] == ["cluster", "main"] and all(.ledgers[]; .rows > 0)'
    # More is durable when the second export begins, at another node.
    count=$(wc -l <"$WORK/durable")
    wait_until 30 has_written $((count + 20))
    cp "$WORK/durable" "$WORK/promised"
    export_at 2 "$BACKUP"
    before=$(wc -l <"$WORK/durable")
    wait_until 30 has_written $((before + 20))
    : >"$WORK/enough"
    wait "$writer"
    [ "$(stat -c %a "$BACKUP")" = 600 ]
    not test -e "$BACKUP.new"
    cmp -s "$WORK/first" "$BACKUP" && return 1
    expect_fail "is there already" export_at 1 "$BACKUP"
    export_at 1 "$WORK/first" --force
    expect_fail "is running" import_at 1 "$BACKUP"
    expect_fail "is running" import_at 1 "$BACKUP" --yes
}

schedule_at() { on "$1" timeout 60 "$FOREBAY" meta schedule "$WORK/$1" "${@:2}" </dev/null; }
made_are() { [ "$(schedule_at 1 --json | jq '.made | length')" = "$1" ] && schedule_at 1 --json | jq -e '.due | not' >/dev/null; }
has_begun() { schedule_at 1 --json | jq -e 'has("begun")' >/dev/null; }
complains() { status 1 | jq -e --arg of "$1" 'any(.problems[]; contains("is not backed up to") and contains($of))' >/dev/null; }

# The cluster makes backups, and keeps the last ones: in a directory, then in a store, of which one ends in the middle.
by_itself() {
    local names to=$WORK/backups objects=$WORK/1/mnt/vault/of/metadata
    [ "$(schedule_at 1)" = "the cluster makes no backups" ]
    expect_fail "say where they go" schedule_at 1 --every 1h
    expect_fail "no such store" schedule_at 1 --to store:none
    expect_fail "no such directory" schedule_at 1 --to "$to"
    mkdir "$to"
    expect_fail "each minute" schedule_at 1 --to "$to" --every 1s
    schedule_at 2 --to "$to" --every 1d --keep 2
    wait_until 20 made_are 1
    names=$(ls "$to")
    [ "$(stat -c %a "$to/$names")" = 600 ]
    schedule_at 1 --now
    wait_until 20 made_are 2
    schedule_at 1 --now
    wait_until 20 not test -e "$to/$names"
    wait_until 20 made_are 2
    [ "$(ls "$to")" = "$(schedule_at 2 --json | jq -r '.made[].name')" ]
    cp "$to/$(ls "$to" | tail -1)" "$WORK/by-itself"
    # What does not work is said, also if it would work at another disk.
    mv "$to" "$to.away"
    mkdir "$to"
    schedule_at 1 --now
    wait_until 20 complains "the same directory"
    [ -z "$(ls "$to")" ]
    rm -r "$to"
    schedule_at 1 --now
    wait_until 20 complains "$to"
    # In a store, which another node serves.
    stop_at 2
    member_start 2 --s3 "$(address 2):9000"
    wait_until 30 s3_served 2
    mkdir "$WORK/1/mnt/vault"
    on 1 "$FOREBAY" store add "$WORK/1" vault --hostname "$(address 2)" --port 9000 --protocol HTTP --bucket vault/of \
        --access-key-id "$(awk -F' = ' '/access_key_id/ { print $2 }' "$WORK/1/admin-credentials")" \
        --secret-key "$(awk -F' = ' '/secret/ { print $2 }' "$WORK/1/admin-credentials")"
    schedule_at 1 --to store:vault
    expect_fail "gets the backups" on 1 "$FOREBAY" store remove "$WORK/1" vault
    wait_until 90 made_are 1
    [ "$(ls "$objects")" = "$(schedule_at 1 --json | jq -r '.made[].name')" ]
    cat "$objects"/*/* >"$WORK/of-store"
    # The store hangs, and the node that owns the metadata dies.
    kill -STOP "$(member_pid 2)"
    schedule_at 1 --now
    wait_until 20 has_begun
    kill -KILL "$(member_pid 1)"
    kill -CONT "$(member_pid 2)"
    umount -l "$WORK/1/mnt"
    member_start 1
    wait_until 30 mounted 1
    wait_until 90 made_are 2
    [ "$(ls "$objects")" = "$(schedule_at 1 --json | jq -r '.made[].name')" ]
    # A store that has some does not move away from them.
    expect_fail "would not be at the other place" on 1 "$FOREBAY" store update "$WORK/1" vault --bucket vault/elsewhere --skip-verification
    schedule_at 1 --off
    schedule_at 1 --keep 3 | grep "off now"
    on 1 "$FOREBAY" store remove "$WORK/1" vault
}

# Everything in the directory of a node that an import could change.
all_sums() { (cd "$WORK/1" && find meta identity meta-dirs.json -type f -exec sha256sum {} + | sort -k 2); }

# flip FILE AT: changes a bit of a byte.
flip() {
    local byte
    byte=$(od -An -tu1 -j "$2" -N 1 "$1")
    printf "\\x$(printf %02x $((byte ^ 16)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

refused() {
    local size at
    stop_at 2
    expect_fail "no node runs" export_at 2 "$WORK/none"
    stop_at 1
    all_sums >"$WORK/sums"
    size=$(stat -c %s "$BACKUP")
    head -c $((size - 1)) "$BACKUP" >"$WORK/cut"
    expect_fail "not complete" import_at 1 "$WORK/cut" --yes
    head -c $((size / 2)) "$BACKUP" >"$WORK/cut"
    expect_fail "not complete" import_at 1 "$WORK/cut" --yes
    for at in 20 60 $((size / 3)) $((size - 3)); do
        cp "$BACKUP" "$WORK/flipped"
        flip "$WORK/flipped" "$at"
        expect_fail "is damaged" import_at 1 "$WORK/flipped" --yes
    done
    expect_fail "is no backup" import_at 1 "$WORK/object" --yes
    printf '\x63' | dd of="$WORK/flipped" bs=1 seek=8 conv=notrunc status=none
    expect_fail "newer version" import_at 1 "$WORK/flipped" --yes
    expect_fail "first node" import_at 2 "$BACKUP" --yes
    # Without --yes it is only checked.
    for at in "$BACKUP" "$WORK/by-itself" "$WORK/of-store"; do import_at 1 "$at" | grep "nothing was changed"; done
    diff "$WORK/sums" <(all_sums)
    # A new directory lacks the keys; another cluster has others.
    mkdir "$WORK/new"
    expect_fail "identity.*node.key" "$FOREBAY" meta import "$WORK/new" "$BACKUP" --yes
}

# The import is killed at any moment: the node starts with one of both, or asks for the import.
killed() {
    local delay round importing asked=0
    rm -r "$WORK/1/meta" "$WORK/1/meta-dirs.json"
    for delay in 0.05 0.2 0.4; do
        on 1 timeout -s KILL "$delay" "$FOREBAY" meta import "$WORK/1" "$BACKUP" --yes </dev/null >/dev/null || true
    done
    # Between the last steps.
    for round in 1 2 3 4 5; do
        "$FOREBAY" meta import "$WORK/1" "$BACKUP" --yes </dev/null >/dev/null &
        importing=$!
        while [ ! -e "$WORK/1/meta-import" ] && kill -0 "$importing" 2>/dev/null; do :; done
        kill -KILL "$importing" 2>/dev/null || true
        wait "$importing" || true
        [ -e "$WORK/1/meta-import" ] || continue
        asked=$((asked + 1))
        expect_fail "meta import. again" member_start 1
        expect_fail "meta import. again" "$FOREBAY" fsck "$WORK/1"
    done
    echo "killed between the last steps: $asked"
    [ "$asked" -ge 1 ]
}

whole_again() {
    import_at 1 "$BACKUP" --yes --json | jq -e '.done and .next == "start"'
    not test -e "$WORK/1/meta-import"
    not test -e "$WORK/1/meta/import"
    member_start 1
    wait_until 30 mounted 1
    promised_is_whole 1 mnt/work
    same_tree "$WORK/tree" "$WORK/1/mnt/tree"
    s3 1 get bucket dir/object "$WORK/object.back"
    cmp "$WORK/object" "$WORK/object.back"
    status 1 | jq -e 'any(.problems[]; test("meta settle"))'
    # Numbers that the lost metadata gave are not given again: new files change nothing of the others.
    cp -a "$WORK/tree" "$WORK/1/mnt/new"
    sync_files "$WORK/1/mnt/new"
    settle_at 1
    stop_at 1
    member_start 1
    member_start 2
    wait_until 60 healthy 2
    promised_is_whole 1 mnt/work
    same_tree "$WORK/tree" "$WORK/1/mnt/tree"
    same_tree "$WORK/tree" "$WORK/1/mnt/new"
    on 1 timeout 120 "$FOREBAY" fsck "$WORK/1" </dev/null
    # Another import puts this aside. What upkeep has moved meanwhile is lost, names are not.
    stop_at 2
    stop_at 1
    import_at 1 "$BACKUP" --yes --json | jq -e '.aside | length == 1'
    [ "$(ls -d "$WORK"/1/meta/former-*/ledger-0 | wc -l)" -ge 1 ]
    member_start 1
    [ "$(find "$WORK/1/mnt/tree" -type f | wc -l)" = "$(find "$WORK/tree" -type f | wc -l)" ]
    stop_at 1
}
promised_is_whole() { (cd "$WORK/$1/$2" && sha256sum --check --quiet "$WORK/promised") && echo "whole: $(wc -l <"$WORK/promised") files"; }

etcd_starts() {
    setsid nsenter --net="/run/netns/$PREFIX-3" etcd --data-dir "$ETCD" --listen-client-urls "http://$(address 3):2379" \
        --advertise-client-urls "http://$(address 3):2379" --logger zap --log-outputs "$WORK/etcd.log" </dev/null >/dev/null 2>&1 &
    echo $! >"$WORK/etcd.pid"
    disown
    wait_until 30 on 3 timeout 3 curl -sfo /dev/null "http://$(address 3):2379/health"
}
etcd_ends() { [ "$BASHPID" != $$ ] || [ ! -e "$WORK/etcd.pid" ] || kill -KILL "$(cat "$WORK/etcd.pid")" 2>/dev/null; }

# All of etcd is lost, and the metadata of the node that owned it.
etcd_is_lost() {
    local pid
    etcd_starts
    on 3 timeout 120 "$FOREBAY" start "$WORK/3" --log "etcd://$(address 3):2379" --drives 2 --drive-size 256MiB --profile r2 \
        --memory "$MEMORY" --address "$(address 3)" --mount "$WORK/3/mnt" </dev/null
    cp -a "$WORK/tree" "$WORK/3/mnt/tree"
    sync_files "$WORK/3/mnt/tree"
    export_at 3 "$WORK/backup3" --json | jq -e '.file_bytes > 0'
    echo later >"$WORK/3/mnt/later"
    sync "$WORK/3/mnt/later"
    stop_at 3
    pid=$(cat "$WORK/etcd.pid")
    kill -KILL "$pid"
    wait_until 10 process_is_gone "$pid"
    rm -r "$ETCD" "$WORK/3/meta"
    etcd_starts
    expect_fail "is of cluster" import_at 3 "$BACKUP" --yes
    import_at 3 "$WORK/backup3" --yes | grep "forebay cluster recover"
    on 3 timeout 100 "$FOREBAY" cluster recover "$WORK/3" --yes
    member_start 3
    wait_until 30 mounted 3
    same_tree "$WORK/tree" "$WORK/3/mnt/tree"
    not test -e "$WORK/3/mnt/later"
    settle_at 3
    on 3 timeout 120 "$FOREBAY" fsck "$WORK/3" </dev/null
    stop_at 3
}

machines_begin
check "a node with the metadata, and one without" begin || exit 1
# Content moves in the meantime, so that this comes before the export on which the rest relies.
check "the cluster makes backups by itself, and keeps the last ones" by_itself
check "exports at both while a program writes" exported || exit 1
check "what is cut, changed or of others is refused, and nothing changed" refused
check "a killed import is given again, or nothing has changed" killed
check "all metadata was lost: what was synced before the export is whole" whole_again
check "etcd and the metadata of its owner are lost: import, and recover" etcd_is_lost
