#!/usr/bin/env bash
# Drives fail, vanish and are damaged: written data stays readable, and writes go on as long as the profile allows.
source "$(dirname "$0")/../lib.sh"
FILES=${FOREBAY_DEGRADED_FILES:-400}
[ "$PLAIN" = 1 ] && { skipped "all" "a plain directory has no drives"; exit 0; }

# Compares files without the kernel's caches.
same() {
    forget_cache "$1" && diff -rq --no-dereference "$WORK/source" "$WORK/$1/mnt/$2"
}

# While a process writes, the filesystem stays mounted.
forget_cache() {
    if [ -e "$WORK/$1.sums" ]; then echo 1 >/proc/sys/vm/drop_caches; else node_unmount "$1" && node_mount "$1"; fi
}

copy() { cp -a "$WORK/source" "$WORK/$1/mnt/$2" && sync_tree "$WORK/$1/mnt/$2"; }
sync_tree() { find "$1" -type f -print0 | xargs -0 -n 200 sync; }
fail_drive() { "$FOREBAY" drive fail "$WORK/$1" "$2" "${@:3}"; }
# failures_are NODE COUNT: this many drives failed, and each failure was reported once.
failures_are() { "$FOREBAY" events "$WORK/$1" --severity error --json | jq -e "[.[] | select(.kind == \"failed\").subject] | length == $2 and unique == ." >/dev/null; }
state_is() { [ "$("$FOREBAY" status "$WORK/$1" --json | jq -r .state)" = "$2" ]; }

# write_fails NODE: with too few drives for w shards, fsync fails within a bounded time, and no call hangs.
write_fails() {
    if timeout 60 dd if=/dev/urandom of="$WORK/$1/mnt/too-much" bs=1M count=8 conv=fsync 2>"$WORK/dd"; then
        echo "a write was acknowledged with too few drives"
        return 1
    fi
    cat "$WORK/dd"
    grep -q 'Input/output error' "$WORK/dd"
}

restart() { node_stop "$1" && node_start "$1"; }
json() { "$FOREBAY" status "$WORK/$1" --json; }
fs_number() { json "$1" | jq "[.filesystems[] | .$2] | add"; }
drive_state() { json "$1" | jq -r ".drives[$2].state"; }
drive_is() { [ "$(drive_state "$1" "$2")" = "$3" ]; }

# Nothing is owed, nothing is rebuilt, new data has the full profile.
whole() {
    json "$1" | jq -e 'all(.filesystems[]; .owed_shards == 0 and .repair.rebuilding_groups == 0 and
        .write_profile == .profile)' >/dev/null
}
becomes_whole() { wait_until 60 whole "$1" || { json "$1" && return 1; }; }

# close_to A B: A is at most B and at least 9 tenths of it.
close_to() {
    echo "moved $1 of $2"
    [ "$1" -le "$2" ] && [ $(($1 * 10)) -ge $(($2 * 9)) ]
}

# A drive lost some shards, and nobody was told. No read may need them, so they are looked for.
lost_shards() {
    local dir=$WORK/lost cluster lost
    "$FOREBAY" fs verify "$dir" main --now --json | tee "$WORK/verified.json" | jq -e '.last | .expected_shards > 100 and .missing_shards == 0 and .unknown_shards == 0'
    "$FOREBAY" upkeep "$dir" --pause
    cluster=$(jq -r .cluster "$dir/node.json")
    expect_fail "background work is paused" "$FOREBAY" fs verify "$dir" main --now
    node_stop lost
    lost=$("$TARGET/$BUILD/lose-shards" "$cluster" "$dir/drives/2.img" 1 25)
    [ "$lost" = 25 ]
    node_start lost
    "$FOREBAY" fs verify "$dir" main | grep "was not verified since"
    "$FOREBAY" upkeep "$dir" --resume
    expect_fail "25 shards of main were missing" "$FOREBAY" fs verify "$dir" main --now
    json lost | jq -e 'any(.problems[]; test("^25 shards of main were not on the drives"))'
    { "$FOREBAY" fs verify "$dir" main --json || true; } | jq -e '.found_shards == 25 and ([.groups[] | select(.missing_shards > 0) | .drives | contains([2])] | all)'
    wait_until 30 nothing_is_missing
    json lost | jq -e '.state == "healthy" and .filesystems[0].repair.healed_shards == 25'
    for drive in 0 1; do fail_drive lost "$drive"; done
    same lost before
}
nothing_is_missing() { "$FOREBAY" fs verify "$WORK/lost" main --now >/dev/null; }

# profile_survives NODE PROFILE DRIVES READS WRITES DEAD: the numbers of lost drives that reads and writes survive; without
# DEAD drives no write succeeds, in whichever order they failed.
profile_survives() {
    local node=$1 profile=$2 drives=$3 reads=$4 writes=$5 dead=$6 gone both
    both=$((reads < writes ? reads : writes))
    check "$profile: the node starts" node_start "$node" --drives "$drives" --drive-size $((drives > 3 ? 512 : 1024))M --profile "$profile" || return
    check "$profile: a tree is written" copy "$node" before
    for ((gone = 0; gone < both; gone++)); do check "$profile: drive $gone fails" fail_drive "$node" "$gone"; done
    if [ "$both" -gt 0 ]; then
        check "$profile: status says that it is degraded" state_is "$node" degraded
        check "$profile: everything is readable without $both" same "$node" before
        check "$profile: writing goes on without $both" copy "$node" during
        check "$profile: these files are readable" same "$node" during
        check "$profile: also after a restart" restart "$node"
        check "$profile: readable after a restart" same "$node" during
        check "$profile: each failure is an event, and no start repeats it" wait_until 10 failures_are "$node" "$both"
    fi
    for ((; gone < reads; gone++)); do check "$profile: drive $gone fails" fail_drive "$node" "$gone"; done
    check "$profile: everything is readable without $reads" same "$node" before
    check "$profile: one more is refused without --force" expect_fail 'would lose data' fail_drive "$node" "$gone"
    for ((; gone < writes; gone++)); do check "$profile: drive $gone fails too" fail_drive "$node" "$gone" --force; done
    [ "$writes" -gt "$reads" ] && check "$profile: writing goes on even without $writes" copy_new "$node"
    for ((; gone < dead; gone++)); do check "$profile: drive $gone fails as well" fail_drive "$node" "$gone" --force; done
    check "$profile: writing without $gone fails and does not hang" write_fails "$node"
    check "$profile: the node stops or reports the unwritten data" stop_or_say "$node"
    check "$profile: fsck reports only unreachable data" only_unreadable "$node"
    rm -rf --one-file-system "${WORK:?}/$node"
}

# Reads of older files may fail now, but files written now must be readable.
copy_new() {
    local sum
    dd if=/dev/urandom of="$WORK/$1/mnt/new" bs=1M count=8 conv=fsync status=none &&
        sum=$(sha256sum <"$WORK/$1/mnt/new") && forget_cache "$1" &&
        [ "$(sha256sum <"$WORK/$1/mnt/new")" = "$sum" ]
}

# More drives are gone than the profile survives: fsck may report that, and nothing else.
only_unreadable() {
    "$FOREBAY" fsck "$WORK/$1" --json >"$WORK/fsck.json" </dev/null || [ $? = 1 ]
    jq -e '[.[].findings[].code] - ["unreadable"] == []' "$WORK/fsck.json"
}

# Stops a node and makes room for the next.
node_gone() { node_stop "$1" && rm -rf --one-file-system "${WORK:?}/$1"; }
stop_or_say() { node_stop "$1" || ! "$FOREBAY" status "$WORK/$1"; }

missing_drive() {
    node_stop gone && rm "$WORK/gone/drives/2.img" && node_start gone &&
        "$FOREBAY" drive list "$WORK/gone" --json | jq -e '.[2].state == "missing"' && same gone before
}

too_many_missing() {
    node_stop gone && rm "$WORK/gone/drives/0.img" "$WORK/gone/drives/1.img" &&
        expect_fail 'survives 2 lost drives, and 3 do not answer' "$FOREBAY" start "$WORK/gone"
    { "$FOREBAY" start "$WORK/gone" || true; } 2>"$WORK/refused"
    cat "$WORK/refused"
    # Each drive with its path and the error of the system.
    [ "$(grep -cE 'drive [012]: .*/drives/[012]\.img.*: No such file or directory \(os error 2\)' "$WORK/refused")" = 3 ]
}

# Overwrites a MiB in every 16 of one drive, past the superblocks, while the node is stopped.
rot() {
    local image=$WORK/$1/drives/$2.img at
    node_stop "$1"
    for ((at = 9; at < 240; at += 16)); do
        dd if=/dev/urandom of="$image" bs=1M seek="$at" count=1 conv=notrunc status=none
    done
    node_start "$1"
}

# A drive returns while the node runs and gets the shards that it missed, nothing else.
returned_drive() {
    local dir=$WORK/back owed moved
    node_stop back && mv "$dir/drives/1.img" "$WORK/away.img" && node_start back && copy back during && state_is back degraded
    owed=$(fs_number back owed_bytes)
    [ "$owed" -gt 0 ]
    mv "$WORK/away.img" "$dir/drives/1.img"
    becomes_whole back
    moved=$(fs_number back repair.repaired_bytes)
    close_to "$moved" "$owed"
    fail_drive back 2 && fail_drive back 3 && same back before && same back during
    "$FOREBAY" drive return "$dir" 2 && "$FOREBAY" drive return "$dir" 3
    becomes_whole back && wait_until 20 state_is back healthy
}

# A drive that was taken out of service is used again by a command, not by a restart.
returned_by_command() {
    local dir=$WORK/back owed moved
    moved=$(fs_number back repair.repaired_bytes)
    fail_drive back 4 && copy back later && owed=$(fs_number back owed_bytes) && [ "$owed" -gt 0 ]
    drive_is back 4 failed && expect_fail 'drive is up' "$FOREBAY" drive return "$dir" 3
    "$FOREBAY" drive return "$dir" 4 && becomes_whole back
    close_to $(($(fs_number back repair.repaired_bytes) - moved)) "$owed"
    fail_drive back 0 && fail_drive back 5 && same back later && "$FOREBAY" drive return "$dir" 0
    restart back && drive_is back 5 failed && "$FOREBAY" drive return "$dir" 5 && becomes_whole back
}

# writer NODE: writes files, makes them durable and records their checksums, until it is stopped. After WRITTEN files it
# rewrites them, so that the drives do not fill up.
WRITTEN=400
writer() {
    local dir=$WORK/$1/mnt/load number=0
    mkdir -p "$dir"
    while [ ! -e "$WORK/$1.stop" ]; do
        head -c $((RANDOM * 40 + 1)) /dev/urandom >"$WORK/$1.data"
        dd if="$WORK/$1.data" of="$dir/$((number % WRITTEN))" bs=1M conv=fsync status=none || return 1
        echo "$(sha256sum <"$WORK/$1.data" | cut -d' ' -f1)  $((number % WRITTEN))" >>"$WORK/$1.sums"
        number=$((number + 1))
    done
}

# under_load NODE COMMAND…: runs the command while files are written. All must be durable and correct afterwards.
under_load() {
    local node=$1 writer status=0
    shift
    rm -f "$WORK/$node.stop"
    : >"$WORK/$node.sums"
    writer "$node" &
    writer=$!
    "$@" || status=$?
    touch "$WORK/$node.stop"
    wait "$writer" || status=$?
    echo "$(wc -l <"$WORK/$node.sums") files were written meanwhile"
    # Each file must have the bytes of its last write.
    [ "$status" = 0 ] && [ -s "$WORK/$node.sums" ] && tac "$WORK/$node.sums" | awk '!known[$2]++' >"$WORK/$node.written" &&
        rm "$WORK/$node.sums" && forget_cache "$node" && (cd "$WORK/$node/mnt/load" && sha256sum --quiet --strict -c "$WORK/$node.written")
}

# The shards of a drive move to another drive, and nothing else moves.
replaced_drive() {
    local dir=$WORK/$1 live moved
    live=$(json "$1" | jq ".drives[$2].space.live_bytes")
    moved=$(fs_number "$1" repair.rebuilt_bytes)
    "$FOREBAY" drive replace "$dir" "$2" --path "$dir/drives/new-$2.img"
    becomes_whole "$1"
    close_to $(($(fs_number "$1" repair.rebuilt_bytes) - moved)) "$live"
    wait_until 20 drive_is "$1" "$2" out
}
dead_drive_replaced() { fail_drive swap 3 && replaced_drive swap 3 && wait_until 20 state_is swap healthy; }
replace_under_load() {
    local dir=$WORK/swap
    fail_drive swap 1 && sleep 3 && "$FOREBAY" drive replace "$dir" 1 --path "$dir/drives/load-1.img" && becomes_whole swap &&
        "$FOREBAY" drive replace "$dir" 5 --path "$dir/drives/load-5.img" && becomes_whole swap
}
two_others_fail() { fail_drive swap 0 && fail_drive swap 4 && same swap before && "$FOREBAY" drive return "$WORK/swap" 0 &&
    "$FOREBAY" drive return "$WORK/swap" 4 && becomes_whole swap; }

# After a kill, a rebuild continues where it ended.
killed_while_rebuilding() {
    local dir=$WORK/swap
    "$FOREBAY" upkeep "$dir" --rate 1MiB
    "$FOREBAY" drive replace "$dir" 2 --path "$dir/drives/killed-2.img"
    wait_until 30 rebuilds_some swap
    "$FOREBAY" upkeep "$dir" --pause && json swap | jq -e '.upkeep.paused and .filesystems[0].repair.rebuilding_groups > 0'
    # Drives that leave still count, also while the node is down; and the pause survives the restart.
    node_kill swap && node_fsck swap && node_start swap
    json swap | jq -e '.upkeep.paused and .upkeep.rate_bytes_per_s == 1048576'
    "$FOREBAY" upkeep "$dir" --resume --rate 256MiB
    becomes_whole swap && wait_until 20 drive_is swap 2 out
}
rebuilds_some() { [ "$(fs_number "$1" repair.rebuilt_bytes)" -gt 0 ]; }

removed_without_a_spare() {
    expect_fail 'no other drive to go to' "$FOREBAY" drive remove "$WORK/swap" 0
    "$FOREBAY" drive add "$WORK/swap" && "$FOREBAY" drive remove "$WORK/swap" 0 && becomes_whole swap &&
        wait_until 20 drive_is swap 0 out && same swap before && state_is swap healthy
}

# Two drives more: what would move is said, and nothing does.
forecast_of_balance() {
    local dir=$WORK/share
    "$FOREBAY" fs balance "$dir" main --dry-run | grep 'main is balanced: nothing is to be moved'
    "$FOREBAY" drive add "$dir"
    "$FOREBAY" drive add "$dir"
    json share | jq -e '.drives[7].space.live_bytes < 1000000'
    forecast
    jq -e '.balancing == false and .groups > 16 and .eta_s > 0 and (.drives | length) == 8' "$WORK/forecast.json"
    jq -e '.survives.drives == 2 and .survives_after.drives == 2' "$WORK/forecast.json"
    # Two of eight drives get a quarter.
    jq -e '.move_bytes / ([.drives[].used_bytes] | add) | . > 0.2 and . < 0.3' "$WORK/forecast.json"
    "$FOREBAY" fs balance "$dir" main --dry-run | grep 'main would be balanced: '
    expect_fail 'is not being balanced' "$FOREBAY" fs balance "$dir" main --abort
    sleep 3
    has_its_share share
    whole share
}
forecast() { "$FOREBAY" fs balance "$WORK/share" main --dry-run --json | tee "$WORK/forecast.json"; }

# What moves goes back, and the new drives are as empty as before. While background work is paused, nothing begins.
balance_aborted() {
    local dir=$WORK/share
    "$FOREBAY" upkeep "$dir" --pause
    "$FOREBAY" fs balance "$dir" main | grep 'waits .*paused'
    sleep 3
    whole share
    [ "$(fs_number share repair.rebuilt_bytes)" = 0 ]
    "$FOREBAY" upkeep "$dir" --resume --rate 1MiB
    wait_until 30 rebuilds_some share
    "$FOREBAY" upkeep "$dir" --pause
    "$FOREBAY" status "$dir" | grep 'being balanced: [0-9]* placement groups left'
    json share | jq -e --slurpfile said "$WORK/forecast.json" '.filesystems[0].balance_left_groups | . > 16 and . <= $said[0].groups'
    "$FOREBAY" fs balance "$dir" main --abort --json | jq -e '.balancing == false and .groups > 0'
    has_its_share share
    same share before
    "$FOREBAY" upkeep "$dir" --resume --rate 256MiB
    becomes_whole share
    same share before
    drives_hold used_bytes
}

# drives_hold FIELD: each drive holds about what the forecast said.
drives_hold() {
    json share | jq -c '[.drives[].space.live_bytes]'
    json share | jq -e --arg field "$1" --slurpfile said "$WORK/forecast.json" '[.drives[].space.live_bytes] as $now |
        [$said[0].drives[][$field]] as $said | (($now | max) / 10) as $off | all(range(8); ($now[.] - $said[.] | fabs) < $off)'
}

# Data moves until each drive has its share, as was forecast, and leaves nothing behind. The node dies in between.
balanced() {
    local dir=$WORK/share rebuilt
    forecast
    "$FOREBAY" upkeep "$dir" --rate 32MiB
    rebuilt=$(fs_number share repair.rebuilt_bytes)
    "$FOREBAY" fs balance "$dir" main --json | jq -e .balancing
    wait_until 30 rebuilds_more share "$rebuilt"
    node_kill share
    node_start share
    json share | jq -e '.filesystems[0].balancing'
    "$FOREBAY" status "$dir" | grep 'being balanced'
    wait_until 180 has_its_share share
    becomes_whole share
    same share before
    drives_hold used_after_bytes
    json share | jq -e '[.drives[].space.live_bytes] | min * 3 > max * 2'
    "$FOREBAY" fs balance "$dir" main | grep 'nothing is to be moved'
    has_its_share share
    node_stop share
    node_fsck share
    node_start share
}
rebuilds_more() { [ "$(fs_number "$1" repair.rebuilt_bytes)" -gt "$2" ]; }
has_its_share() { json "$1" | jq -e '.filesystems[0].balancing == false' >/dev/null; }

# A drive that stays away is given up if there is another one.
given_up() {
    local dir=$WORK/spare
    node_stop spare && mv "$dir/drives/6.img" "$WORK/lost.img" && timeout 60 "$FOREBAY" start "$dir" --out-after 2 </dev/null &&
        wait_until 30 drive_is spare 6 out && becomes_whole spare && same spare before && wait_until 20 state_is spare healthy
    "$FOREBAY" fs set "$dir" main --profile r3 && copy spare as-copies && same spare as-copies
    json spare | jq -e '.filesystems[0].profile == "r3"'
}

# narrow_and_back NODE PROFILE DRIVE…: without these drives new data is narrower; when they return it has the full profile.
narrow_and_back() {
    local node=$1 profile=$2 drive
    shift 2
    for drive in "$@"; do fail_drive "$node" "$drive"; done
    copy "$node" "narrow-${*// /-}" && same "$node" "narrow-${*// /-}"
    json "$node" | jq -e --arg profile "$profile" '.filesystems[0].write_profile == $profile'
    # With the drives back the packer soon widens it.
    wait_until 20 shows_narrow "$node"
    for drive in "$@"; do "$FOREBAY" drive return "$WORK/$node" "$drive"; done
    becomes_whole "$node" && same "$node" "narrow-${*// /-}" && same "$node" before
}
shows_narrow() { [ "$(fs_number "$1" narrow_bytes)" -gt 0 ]; }

# every_loss NODE DRIVES LOST: every set of LOST drives (only a sample unless --long) fails and returns.
every_loss() {
    local node=$1 drives=$2 lost=$3 mask drive set sets=0
    for ((mask = 0; mask < 1 << drives; mask++)); do
        set=()
        for ((drive = 0; drive < drives; drive++)); do ((mask >> drive & 1)) && set+=("$drive"); done
        [ "${#set[@]}" = "$lost" ] || continue
        sets=$((sets + 1))
        [ "$LONG" = 1 ] || [ $((sets % 7)) = 1 ] || continue
        echo "without ${set[*]}"
        for drive in "${set[@]}"; do fail_drive "$node" "$drive"; done
        same "$node" before && copy_new "$node"
        for drive in "${set[@]}"; do "$FOREBAY" drive return "$WORK/$node" "$drive"; done
        becomes_whole "$node"
    done
}

scrubbed() {
    "$FOREBAY" drive scrub "$WORK/rot" --now && wait_until 60 all_verified && becomes_whole rot && wait_until 20 nothing_bad &&
        fail_drive rot 0 && same rot before
    # A drive with a damaged index cannot be opened, which is already a loss.
    if drive_is rot 4 up && drive_is rot 1 up; then fail_drive rot 3 && same rot before; fi
}
all_verified() { json rot | jq -e 'all(.drives[] | select(.state == "up"); .scrub.oldest_s != null and .scrub.running == false)' >/dev/null; }
# A second pass finds no damage.
nothing_bad() {
    local before
    before=$(json rot | jq '[.drives[].scrub.bad_shards] | add')
    "$FOREBAY" drive scrub "$WORK/rot" --now >/dev/null && wait_until 60 all_verified &&
        [ "$(json rot | jq '[.drives[].scrub.bad_shards] | add')" = "$before" ] && [ "$(fs_number rot repair.healed_shards)" -gt 0 ]
}

# The node waits without limit for a drive with the only copy of data.
last_holder() {
    local dir=$WORK/last
    node_stop last && mv "$dir/drives/1.img" "$WORK/last.img" &&
        timeout 60 "$FOREBAY" start "$dir" --degraded --out-after 0 </dev/null && wait_until 10 drive_is last 1 missing
    expect_fail 'would lose data' "$FOREBAY" drive remove "$dir" 1
    expect_fail 'would lose data' "$FOREBAY" drive replace "$dir" 1 --path "$dir/drives/other.img"
    sleep 3 && drive_is last 1 missing
    mv "$WORK/last.img" "$dir/drives/1.img" && wait_until 30 drive_is last 1 up && same last before
}

# What `status` says about the node `former`.
reads_survive() { json former | jq -r '.filesystems[0].protection' | tee /dev/stderr | grep "^reads survive $1 drives,"; }
# Data that was stored with less protection than its filesystem has now counts with its own protection.
counts_as_stored() {
    local i dir=$WORK/former
    node_start former --drives 6 --drive-size 256M --profile r2
    for ((i = 0; i < 150; i++)); do head -c 300000 /dev/urandom >"$dir/mnt/$i"; done
    sync "$dir"/mnt/*
    "$FOREBAY" upkeep "$dir" --pause
    reads_survive 1
    "$FOREBAY" fs set "$dir" main --profile 4+2
    reads_survive 1
    fail_drive former 0
    reads_survive 0
    expect_fail 'would lose data: what is stored as r2 survives 1 lost drives and 2 would be gone' fail_drive former 1
    echo 3 >/proc/sys/vm/drop_caches
    cat "$dir"/mnt/* | wc -c | grep -qx 45000000
}

# happened NODE SUBJECT KIND…: the last events of this subject were these, in this order.
happened() {
    local node=$1 subject=$2
    shift 2
    "$FOREBAY" events "$WORK/$node" --json |
        jq -e --arg subject "$subject" '[.[] | select(.subject == $subject).kind][-($ARGS.positional | length):] == $ARGS.positional' --args "$@"
}
problem() { json "$1" | jq -r '.problems[]' | grep -E -- "$2"; }

# Changes that last less than a second are reported too.
told_at_once() {
    local dir=$WORK/told
    fail_drive told 1 && "$FOREBAY" drive return "$dir" 1
    happened told "drive 1" failed up
    "$FOREBAY" fs set "$dir" main --profile r2 && "$FOREBAY" fs set "$dir" main --profile 4+2
    happened told "filesystem main" profile profile
}

# A drive is missing at the start and returns before the first check of the monitor.
told_of_a_short_absence() {
    local dir=$WORK/told
    node_stop told && mv "$dir/drives/2.img" "$WORK/short.img" && node_start told
    problem told '^drive 2 is missing: .*No such file.* within seconds .*drive replace DIR 2'
    mv "$WORK/short.img" "$dir/drives/2.img" && wait_until 30 drive_is told 2 up
    happened told "drive 2" missing up
    becomes_whole told
}

# An event that began before the process was killed ends after the restart.
told_after_a_kill() {
    local dir=$WORK/told
    "$FOREBAY" upkeep "$dir" --pause
    fail_drive told 3 && "$FOREBAY" drive replace "$dir" 3 --path "$dir/drives/next.img"
    happened told cluster "rebuild began"
    not problem told 'without a drive to spare'
    problem told 'what drive 3 held is being rebuilt'
    node_kill told && node_start told
    sleep 2
    "$FOREBAY" events "$dir" --json | jq -e '[.[] | select(.kind == "rebuild began")] | length == 1'
    "$FOREBAY" upkeep "$dir" --resume
    becomes_whole told
    wait_until 10 happened told cluster "rebuild began" "rebuild ended"
}

# With half of the drives, status shows the free space at once.
room_when_degraded() {
    local dir=$WORK/told
    node_stop told && mv "$dir/drives/0.img" "$WORK/0.img" && mv "$dir/drives/1.img" "$WORK/1.img" &&
        mv "$dir/drives/2.img" "$WORK/2.img" && timeout 60 "$FOREBAY" start "$dir" --degraded </dev/null
    json told | jq -e '.filesystems[0] | .total_bytes > .used_bytes and .free_bytes > 0'
    node_stop told && mv "$WORK/0.img" "$WORK/1.img" "$WORK/2.img" "$dir/drives/" && node_start told && becomes_whole told
}

check "a real tree is staged" stage_tree "$FILES" "$WORK/source" || exit 0
profile_survives d1 r2 2 1 0 1
profile_survives d2 r3 3 2 1 2
profile_survives d3 4+2 6 2 3 5
profile_survives d4 12/7/9 12 5 6 10
check "old data counts with its own profile, not with a new one" counts_as_stored
node_end "$WORK/former"
rm -rf --one-file-system "${WORK:?}/former"
check "events: the node starts" node_start told --drives 6 --drive-size 128M --profile 4+2
check "events: a tree is written" copy told before
check "events: a drive that fails and returns within a second, and two changes of the profile" told_at_once
check "events: a drive that was away for a moment" told_of_a_short_absence
check "events: the end of a rebuild that a kill interrupted" told_after_a_kill
check "events: free space with too few drives" room_when_degraded
check "events: the node stops" node_gone told
check "lost: the node starts" node_start lost --drives 6 --drive-size 256M --profile 4+2
check "lost: a tree is written" copy lost before
check "lost: shards that a drive does not have any more are found and restored" lost_shards
check "lost: the node stops" node_gone lost
check "missing: the node starts" node_start gone --drives 6 --drive-size 256M --profile 4+2
check "missing: a tree is written" copy gone before
check "missing: without the file of a drive everything is readable" missing_drive
check "missing: with too few drives the node says why it does not start" too_many_missing
node_end "$WORK/gone"
rm -rf --one-file-system "${WORK:?}/gone"
check "returned: the node starts" node_start back --drives 6 --drive-size 2G --profile 4+2
check "returned: a tree is written" copy back before
check "returned: a returned drive gets the shards that it missed, nothing else" returned_drive
check "returned: a drive that was taken out is used again" returned_by_command
check "returned: two of six leave 2+2, and all of them the full profile" narrow_and_back back 2+2 1 4
check "returned: every two drives of six fail and return" every_loss back 6 2
check "returned: the same while files are written" under_load back every_loss back 6 2
check "returned: the node stops" node_gone back
check "replaced: the node starts" node_start swap --drives 6 --drive-size 512M --profile 4+2
check "replaced: a tree is written" copy swap before
check "replaced: a dead drive is rebuilt on another, nothing else is moved" dead_drive_replaced
check "replaced: drives are replaced while files are written" under_load swap replace_under_load
check "replaced: any two may fail again" two_others_fail
check "replaced: rebuilding goes on after the process was killed" killed_while_rebuilding
check "replaced: a drive without a spare is not emptied, with one it is" removed_without_a_spare
check "replaced: the node stops" node_gone swap
check "balanced: the node starts" node_start share --drives 6 --drive-size 512M --profile 4+2
check "balanced: a tree is written" copy share before
check "balanced: a forecast says what would move to drives that were added" forecast_of_balance
check "balanced: an abort brings back what is moving, a pause begins nothing" balance_aborted
check "balanced: data moves to drives that were added" balanced
check "balanced: the node stops" node_gone share
check "spare: the node starts" node_start spare --drives 7 --drive-size 512M --profile 4+2
check "spare: a tree is written" copy spare before
check "spare: a drive that stays away is rebuilt on the others; a new profile holds at once" given_up
check "spare: the node stops" node_gone spare
check "last holder: the node starts" node_start last --drives 3 --drive-size 512M --profile 1+0
check "last holder: a tree is written" copy last before
check "last holder: a drive is not given up while data depends on it" last_holder
check "last holder: the node stops" node_gone last
if [ "$LONG" = 1 ]; then
    check "wide: the node starts" node_start wide --drives 12 --drive-size 512M --profile 12/7/9
    check "wide: a tree is written" copy wide before
    LIMIT_S=3000 check "wide: every three drives of twelve fail and return while files are written" under_load wide every_loss wide 12 3
    check "wide: the node stops" node_gone wide
else
    check "wide: the node starts" node_start wide --drives 12 --drive-size 512M --profile 12/7/9
    check "wide: a tree is written" copy wide before
    check "wide: four of twelve leave 8/3/5" narrow_and_back wide 8/3/5 0 3 7 11
    check "wide: the node stops" node_gone wide
fi
check "rot: the node starts" node_start rot --drives 6 --drive-size 256M --profile 4+2
check "rot: a tree is written" copy rot before
check "rot: two drives are damaged" eval 'rot rot 1 && rot rot 4'
check "rot: damage is never returned, everything is readable" same rot before
check "rot: a scrub restores bad shards: two other drives may fail" scrubbed
check "rot: the node stops" node_stop rot
exit 0
