#!/usr/bin/env bash
# Tiering, end to end: a node's filesystem is attached to an S3 server. Aged content moves there, is read from there,
# returns and leaves no blobs, while the store fails and the node is killed.
source "$(dirname "$0")/../lib.sh"
# A harmed request causes a pause or a wait of up to 2 s; data beyond the size of the drives takes thousands of requests.
LIMIT_S=$([ "${FOREBAY_TIER_FAULTS:-0}" = 0 ] && echo 300 || echo 660)
source "$ROOT/tests/tier/lib.sh"

check "the store starts: $STORE, $FAULTS of 100 requests harmed" store_start || exit 0
check "a node starts" node_start home --drives 6 --drive-size 128M --profile 4+2 || exit 0
check "the store is added" add_store || exit 0

refusals() {
    expect_fail 'no such store' fs attach main none --retention 1d --tiering-cue 1h
    expect_fail 'no such filesystem' fs attach none cold --retention 1d --tiering-cue 1h
    expect_fail 'third of the retention' fs attach main cold --retention 30s --tiering-cue 11s
    expect_fail '10s' fs attach main cold --retention 1d --tiering-cue 9s
    expect_fail 'not a duration' fs attach main cold --retention 1y --tiering-cue 1h
    tier_status | jq -e '. == []'
    expect_fail 'has no object store' fs detach main
}
check "invalid commands are refused" refusals

written() {
    random_file "$MNT/before" 3000000
    sync_files "$MNT"
    fs attach main cold --retention 1h --tiering-cue 10s
    expect_fail 'main' "$FOREBAY" store remove "$NODE" cold
    mkdir "$MNT/small"
    random_file "$MNT/big" 60000000
    for i in $(seq 60); do random_file "$MNT/small/$i" $((131072 + i)); done
    random_file "$MNT/tiny" 3000
    random_file "$MNT/copy" 20000
    note_sums
    tier_is '.queued_bytes > 0'
}
check "a filesystem is attached and written to" written
# ranges_name FILE: the blobs name the file and offset of each of its extents.
ranges_name() {
    local ino
    ino=$(stat -c %i "$1")
    "$FOREBAY" why "$1" --json | jq -c '[.extents[] | {extent, off: (.offset - .extent_offset)}] | sort' >"$WORK/extents"
    find "$WORK/blobs" -type f -exec "$FOREBAY" blob dump --json {} \; |
        jq -cs --argjson ino "$ino" '[.[].ranges[] | select(.ino == $ino) | {extent, off}] | sort' >"$WORK/ranges"
    [ "$(jq length "$WORK/extents")" -gt 0 ] && cmp "$WORK/extents" "$WORK/ranges"
}
# in_blobs FILE: writes the content of a file to standard output, read from the blobs alone.
in_blobs() {
    jq -r --argjson ino "$(stat -c %i "$1")" 'select(.ino == $ino) | "\(.off) \(.file) \(.range)"' "$WORK/told" | sort -n |
        while read -r _ file range; do "$FOREBAY" blob cat "$file" "$range"; done
}
# files_from_blobs: every range in the blobs tells its file, or lists pieces that do, and files can be read from them.
files_from_blobs() {
    local blob file
    find "$WORK/blobs" -type f | while read -r blob; do
        "$FOREBAY" blob dump --json "$blob" | jq -c --arg file "$blob" '.ranges[]
            | (select(.pieces == []) | {ino, off, file: $file, range: "\(.index)"}),
              (.index as $range | .pieces[] | {ino, off, file: $file, range: "\($range).\(.index)"})'
    done >"$WORK/told"
    jq -s -e 'length > 0 and all(.ino > 0)' "$WORK/told"
    for file in "$MNT"/small/* "$MNT/before" "$MNT/big"; do in_blobs "$file" | cmp - "$file"; done
}
uploaded() {
    wait_until 90 tier_is '.queued_extents == 0 and (.queueing | not) and .both_bytes > 60000000'
    located "$MNT/big" 0 60000000 0
    located "$MNT/before" 0 3000000 0
    aws_store s3 cp --quiet --recursive s3://cold "$WORK/blobs"
    find "$WORK/blobs" -type f -print0 | while read -rd '' blob; do "$FOREBAY" blob dump "$blob" >/dev/null; done
    [ "$(blobs)" = "$(tier_status | jq '.[0].blobs')" ]
    ranges_name "$MNT/big"
    files_from_blobs
    [ "$(find "$WORK/blobs" -type f -size +8M | wc -l)" = 0 ]
    rm -r "$WORK/blobs"
    tier ops "$NODE" cold --json | jq -e '.[0].ops | map(select(.verb == "PUT" and .state == "done")) | length > 0'
    tier ops "$NODE" none --json | jq -e '. == []'
    tier_is '.store_health.up and .problem == null and [.store_health.nodes[] | [.node, .up]] == [[0, true]]'
    echo "$(blobs) blobs, $(stored_kib) KiB"
}
check "aged content is uploaded in valid blobs" uploaded
forecast() {
    tier forecast "$NODE" | grep -E '^ *.?main .*1h \(now\)'
    tier forecast "$NODE" --retention 7d --json |
        jq -e '[.[].retention_s] == [3600, 604800] and .[0].drive_bytes > 60000000 and .[1].drive_bytes >= .[0].drive_bytes
            and .[0].drive_raw_bytes > .[0].drive_bytes and .[0].store_bytes > 60000000'
    expect_fail 'not a duration' tier forecast "$NODE" --retention 7
}
check "a forecast has the space of retentions" forecast
# Releases big files and others, and waits until the drives have deleted them: until then reads use the drives.
live_bytes() { "$FOREBAY" status "$NODE" --json | jq .space.live_bytes; }
lives_less() { [ "$(live_bytes)" -lt "$1" ]; }
release() {
    local before
    before=$(live_bytes)
    tier release "$@"
    wait_until 30 lives_less $((before - 40000000))
}
released() {
    release "$MNT/big" "$MNT/before" "$MNT/small/7"
    located "$MNT/big" 0 0 60000000
    cold_cache
    same_sums
    wait_until 30 came_back "$MNT/small/7" 131079
}
# Content that was read returns to the drives by itself; if that fails, after the next read.
came_back() {
    [ "$FAULTS" = 0 ] || dd if="$1" of=/dev/null bs=1M iflag=direct status=none
    located "$1" 0 "$2" 0
}
check "released content is read unchanged, and returns" released
fetched() {
    tier release "$MNT/big"
    cold_cache
    tier fetch "$MNT/big"
    located "$MNT/big" 0 60000000 0
    same_sums
}
check "a file is fetched before it is read" fetched
# Short files in several blobs; one is a link, another is in the metadata.
fetched_tree() {
    mkdir "$MNT/small/deeper"
    cp "$MNT/tiny" "$MNT/small/deeper/tiny"
    cp --reflink=auto "$MNT/before" "$MNT/small/deeper/before"
    ln -s ../big "$MNT/small/link"
    tier release "$MNT/small"
    tier location "$MNT/small" --json | jq -e 'length == 62 and (map(.object_store_bytes) | add) >= 60 * 131072 + 3000000'
    cold_cache
    tier fetch "$MNT/small" --json | jq -e 'length == 62 and (map(.fetched_bytes) | add) >= 60 * 131072 + 3000000'
    tier location "$MNT/small" --json | jq -e 'map(.object_store_bytes) | add == 0'
    same_sums
    rm -r "$MNT/small/deeper" "$MNT/small/link"
}
check "a tree is fetched before it is read" fetched_tree
# A pipe cannot return.
fetched_beside() {
    mkfifo "$MNT/pipe"
    tier release "$MNT/small/7"
    expect_fail 'did not come back: 1 of 2$' tier fetch "$MNT/pipe" "$MNT/small/7"
    located "$MNT/small/7" 0 131079 0
    rm "$MNT/pipe"
}
check "a file that does not return does not delay others" fetched_beside
# `tier` commands cannot name paths that are not UTF-8.
odd_names() {
    local verb odd=$MNT/small/$'caf\xe9'
    random_file "$odd" 20000
    for verb in location fetch release; do
        expect_fail ' 1 of 61$' tier "$verb" "$MNT/small"
        not tier "$verb" "$MNT/small" --json >"$WORK/asked" 2>/dev/null
        jq -e 'length == 60' "$WORK/asked"
    done
    rm "$odd"
}
check "a name that is not UTF-8 is reported and does not delay others" odd_names
changing_tree() {
    local changes round rounds=0
    (while [ ! -e "$WORK/enough" ]; do
        mkdir "$MNT/small/now"
        touch "$MNT"/small/now/{1..20} "$MNT"/small/now{1..20}
        rm -r "$MNT"/small/now*
    done) &
    changes=$!
    for round in $(seq 15); do
        tier location "$MNT/small" --json >"$WORK/asked" && tier fetch "$MNT/small" >/dev/null || break
        rounds=$round
    done
    touch "$WORK/enough"
    wait "$changes"
    [ "$rounds" = 15 ]
    jq -e 'length >= 60' "$WORK/asked"
    tier release "$MNT/small"
}
check "commands on a changing tree work" changing_tree
# Written in turns and due at the same time. Half of it is too little to compact blobs.
by_directory() {
    local i before
    fs attach main cold --tiering-cue 20m
    mkdir "$MNT/this" "$MNT/that"
    for i in $(seq 36); do random_file "$MNT/this/$i" 250000 && random_file "$MNT/that/$i" 250000; done
    sync_files "$MNT"
    wait_until 10 tier_is '.queued_bytes >= 17000000'
    sleep 12
    fs attach main cold --tiering-cue 10s
    wait_until 90 tier_is '.queued_extents == 0'
    before=$(blobs)
    rm -r "$MNT/this"
    wait_until 60 has_fewer_blobs "$before"
    note_sums
}
check "files of a directory lie together in the store" by_directory
check "a file system check finds nothing" node_fsck home

overwritten() {
    local part=$WORK/part
    random_file "$part" 5000000
    tier release "$MNT/big"
    dd if="$part" of="$MNT/big" bs=1000000 seek=20 conv=notrunc status=none
    truncate -s 50000000 "$MNT/big"
    cp --reflink=auto "$MNT/big" "$MNT/clone"
    mv "$MNT/before" "$MNT/after"
    rm "$MNT/small/1"
    cmp <(head -c 25000000 "$MNT/big" | tail -c 5000000) "$part"
    note_sums
    [ "$(grep -c "$(sha256sum <"$MNT/big" | cut -d' ' -f1)" "$SUMS")" = 2 ]
    cold_cache
    same_sums
}
check "tiered content is overwritten, cut, cloned, renamed and removed" overwritten

store_down() {
    local began=$SECONDS
    wait_until 90 tier_is '.queued_extents == 0'
    release "$MNT/big"
    cold_cache
    store_kill
    expect_fail 'Input/output error' sha256sum "$MNT/big"
    echo "EIO after $((SECONDS - began)) s"
    random_file "$MNT/meanwhile" 1000000
    sync_files "$MNT"
    sha256sum "$MNT/tiny" "$MNT/meanwhile" >/dev/null
    wait_until 60 tier_is '.problem != null and .store_health.up == false'
    "$FOREBAY" status "$NODE" | grep -i 'cold'
    known_to_be_down
    # A state that ends within seconds makes no event.
    wait_until 60 happened 'store cold' down
    store_start
    "$FOREBAY" store update "$NODE" cold --port "$(reached_port)"
    note_sums
    wait_until 60 tier_is '.problem == null and .store_health.up and .queued_extents == 0'
    wait_until 60 happened 'store cold' down up
}
# Reads fail fast once the store has been down for 20 s.
known_to_be_down() {
    local began
    sleep 20
    began=$SECONDS
    expect_fail 'Input/output error' sha256sum "$MNT/big"
    # The first error has the reason; the fetch still handles files on the drives.
    expect_fail 'store cold is DOWN: ' tier fetch "$MNT/big" "$MNT/meanwhile"
    echo "EIO and no fetch after $((SECONDS - began)) s"
    [ $((SECONDS - began)) -le 15 ]
}
# happened SUBJECT KIND…: the last events of this subject were these, in this order.
happened() {
    local subject=$1
    shift
    "$FOREBAY" events "$NODE" --json |
        jq -e --arg subject "$subject" '[.[] | select(.subject == $subject).kind][-($ARGS.positional | length):] == $ARGS.positional' --args "$@"
}
check "a store that is down costs an error, is named, and is used again" store_down
killed() {
    local round
    for round in 1 2; do
        random_file "$MNT/round$round" 20000000
        sync_files "$MNT"
        note_sums
        sleep $((6 + 5 * round))
        node_kill home
        node_start home
        same_sums
        tier release "$MNT/big" "$MNT/clone" >/dev/null
    done
    node_fsck home
    wait_until 90 tier_is '.queued_extents == 0'
    wait_until 60 orphans_are_gone
}
check "SIGKILL while blobs are made and left" killed

refuse() { echo "$*" >"$WORK/refusal.new" && mv "$WORK/refusal.new" "$WORK/refusal"; }
# The reasons why tiering pauses, as shown to people.
told() { tier_status | jq -r '.[0].problem // ""' | grep -Ei -- "$1"; }
# A deletion is under way.
deletes() { tier ops "$NODE" cold --json | jq -e '.[0].ops | any(.verb == "DELETE" and .state == "running")' >/dev/null; }
named() {
    local port before
    port=$(free_port)
    begin_process refuser "$port" "$VENV/bin/python" "$ROOT/tests/tier/faulty.py" "$port" "$(cat "$AT/store.port")" "$SEED" 0 \
        "$WORK/refusal"
    "$FOREBAY" store update "$NODE" cold --protocol HTTP --port "$port"
    random_file "$MNT/later" 10000000
    sync_files "$MNT"
    note_sums
    refuse '*' 403 InvalidAccessKeyId
    wait_until 30 told 'refused: .*InvalidAccessKeyId.*does not know the access key'
    refuse '*' 403 SignatureDoesNotMatch
    wait_until 30 told 'SignatureDoesNotMatch.*check the secret key'
    refuse '*' 400 ExpiredToken
    wait_until 30 told 'ExpiredToken.*not good any more'
    refuse '*' 403 RequestTimeTooSkewed
    wait_until 30 told 'RequestTimeTooSkewed.*clocks'
    refuse PUT 507 XMinioStorageFull
    wait_until 60 told 'uploads pause: the store is full: .*XMinioStorageFull.*make room'
    "$FOREBAY" status "$NODE" | grep 'the store is full'
    # Operations that free space in a full store go on.
    before=$(blobs)
    rm "$MNT"/round*
    sed -i '\,\./round,d' "$SUMS"
    wait_until 60 has_fewer_blobs "$before"
    tier_is '.queued_bytes >= 10000000 and .store_health.up'
    refuse PUT 403 QuotaExceeded
    wait_until 60 told 'QuotaExceeded'
    # Hanging deletions do not delay other operations.
    refuse DELETE slow 60
    rm -r "$MNT/that"
    sed -i '\,\./that/,d' "$SUMS"
    wait_until 30 deletes
    random_file "$MNT/beside" 10000000
    sync_files "$MNT"
    note_sums
    wait_until 45 tier_is '.queued_extents == 0'
    deletes
    rm "$WORK/refusal"
    wait_until 90 tier_is '.queued_extents == 0 and .problem == null'
    case "$STORE" in
    forebay-https) "$FOREBAY" store update "$NODE" cold --protocol HTTPS --port "$(reached_port)" ;;
    *) "$FOREBAY" store update "$NODE" cold --port "$(reached_port)" ;;
    esac
    end_process refuser
    same_sums
}
check "a store that is full or refuses is named, and used again by itself" named

overcommitted() {
    local i
    fs attach main cold --retention 30s --tiering-cue 10s
    for i in $(seq 12); do random_file "$MNT/more$i" 70000000; done
    sync_files "$MNT"
    tier_is '.away_bytes > 0'
    df -B1 --output=size,used,avail "$MNT"
    note_sums
    cold_cache
    same_sums
}
check "more is written than the drives hold" overcommitted
on_ssd() { "$FOREBAY" fs show "$NODE" main --json | jq -e ".ssd_used_bytes $1"; }
limited() {
    local i
    expect_fail 'ssd=2.00 GiB size=1.00 GiB' fs set main --size 1GiB --ssd 2GiB
    expect_fail 'holds more than that' fs set main --size 100MiB
    fs set main --size 2GiB --ssd 128MiB
    # Content leaves the drives until the quota holds.
    wait_until 60 on_ssd '<= 128 * 1048576'
    for i in $(seq 13 16); do random_file "$MNT/more$i" 70000000; done
    sync_files "$MNT"
    on_ssd '<= 128 * 1048576'
    [ "$(df -B1 --output=size "$MNT" | tail -1)" = $((2 << 30)) ]
    note_sums
    cold_cache
    same_sums
    fs set main --size 1300MiB
    expect_fail 'No space left' random_file "$MNT/toomuch" 400000000
    rm "$MNT/toomuch"
    refuses_detach
    node_kill home
    node_start home
    [ "$(df -B1 --output=size "$MNT" | tail -1)" = $((1300 << 20)) ]
    fs set main --size none --ssd none
}
refuses_detach() { expect_fail 'drives' fs detach main; }
check "quotas hold, and content beyond the drives' quota moves to the store" limited
check "a store is not left while the drives cannot hold everything" refuses_detach
shrinks() {
    local before
    wait_until 90 tier_is '.queued_extents == 0'
    before=$(stored_kib)
    rm "$MNT"/more*
    random_file "$MNT/last" 1000000
    note_sums
    wait_until 120 tier_is ".queued_extents == 0 and $DENSE"
    wait_until 60 orphans_are_gone
    [ "$(stored_kib)" -lt $((before / 3)) ]
    echo "$before KiB before, $(stored_kib) KiB now"
    same_sums
}
check "the bucket shrinks when files are removed" shrinks
# While the store is down no content returns, so the detach is still under way.
stays() {
    local waiter
    tier release "$MNT/last" "$MNT/small"
    store_kill
    fs detach main
    fs detach main --wait >"$WORK/waiting" 2>&1 &
    waiter=$!
    expect_fail 'nothing leaves them now' tier release "$MNT/last"
    wait_until 30 tier_is '.problem != null'
    fs attach main cold | grep 'the detach is cancelled'
    not wait "$waiter"
    grep 'attached to store cold again' "$WORK/waiting"
    tier_is '.state == "tiering" and .away_bytes > 0'
    store_start
    "$FOREBAY" store update "$NODE" cold --port "$(reached_port)"
    wait_until 90 tier_is '.queued_extents == 0 and (.queueing | not) and .problem == null'
    cold_cache
    same_sums
}
check "a running detach is cancelled" stays
detached() {
    fs detach main --wait
    tier_status | jq -e '. == []'
    [ "$(blobs)" = 0 ]
    cold_cache
    same_sums
    "$FOREBAY" store remove "$NODE" cold
}
check "detaching brings everything back and empties the bucket" detached
check "a file system check finds nothing after all" node_fsck home
check "the nodes stay within their memory" node_stop home
exit 0
