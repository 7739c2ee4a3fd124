#!/usr/bin/env bash
# Random faults of machines, processes, drives and the network, while programs on all machines work on the same files through mounts and S3.
# No program at another machine sees an error or waits for long, and nothing that was acknowledged is lost. tests/load/cluster.py judges that.
#
#   FOREBAY_FAULT_ROUNDS  how many rounds; each ten begin a new cluster. Without it: two rounds with faults that no other suite has
#   FOREBAY_FAULT_ONLY    only these faults, of those in FAULTS
#   FOREBAY_FAULT_SETUP   ENGINE PROFILE NODES OPTIONS STORE, such as "own 4+2 3 process=own store", instead of those that the seed draws
LIMIT_S=420
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
source "$(dirname "$0")/../machines.sh"
ROUNDS=${FOREBAY_FAULT_ROUNDS:-$([ "$LONG" = 1 ] && echo 50 || echo 2)}
SHORT=$([ "$LONG" = 1 ] || [ -n "${FOREBAY_FAULT_ROUNDS:-}" ] || echo 1)
FAULTS=(kill sleep sleep-etcd sleep-both machine cut cut-owner cut-pair cut-from cut-to lossy slow flap kill-etcd drive-fail drive-lost rolling)
[ -z "${FOREBAY_FAULT_ONLY:-}" ] || read -ra FAULTS <<<"$FOREBAY_FAULT_ONLY"
# Rounds with the same cluster.
CLUSTER_ROUNDS=10
HEALTHY_S=90
# The machine with the object store.
STORE_AT=9
RUN=$WORK

trap 'cleanup_etcd; NODES+=("$STORE_AT"); machines_end; [ "$BASHPID" != $$ ] || WORK=$RUN; cleanup' EXIT
cleanup_etcd() { [ "$BASHPID" != $$ ] || pkill -KILL -f "data-dir $RUN/" 2>/dev/null; }

# --- the cluster ---------------------------------------------------------------------------------------------------

# drawn KEY COUNT: a number below COUNT that depends on KEY alone, and so on the seed. pick KEY WORD…: one of the words.
drawn() { local sum; sum=$(sha256sum <<<"$1"); echo $((16#${sum::12} % $2)); }
pick() { local words=("${@:2}"); echo "${words[$(drawn "$1" ${#words[@]})]}"; }

# setup SEED: what the cluster is made of.
setup() {
    local setup=${FOREBAY_FAULT_SETUP:-} node
    [ -n "$setup" ] || setup="$(pick "$1 engine" own etcd) $(pick "$1 profile" 4+2 r2 r3) $(pick "$1 nodes" 3 3 4) \
        $(pick "$1 options" process=own process=own,strict process=own,readcache) $(pick "$1 store" store none)"
    read -r -d '' AT PROFILE COUNT OPTIONS STORE <<<"$setup"
    NODES=()
    for ((node = 1; node <= COUNT; node++)); do NODES+=("$node"); done
}

begin() {
    local node token log=()
    for node in "${NODES[@]}"; do echo "$WORK/$node" >>"$RUN/.nodes"; done
    if [ "$AT" = etcd ]; then
        for node in 1 2 3; do wait_until 30 etcd_answers "$node"; done
        log=(--log "$ENGINE")
    fi
    on 1 timeout 120 "$FOREBAY" start "$WORK/1" "${log[@]}" --drives 2 --drive-size 512MiB --profile r2 --mount "$WORK/1/mnt" --mount-options "$OPTIONS" \
        --s3 127.0.0.1:9000 --memory "$MEMORY" --address "$(address 1)" </dev/null
    token=$(on 1 "$FOREBAY" token create "$WORK/1" --uses 3)
    for node in "${NODES[@]:1}"; do
        on "$node" timeout 120 "$FOREBAY" join "$token" "$WORK/$node" --drives 2 --drive-size 512MiB --name "n$node" </dev/null
        on "$node" "$FOREBAY" mount "$WORK/$node" "$WORK/$node/mnt" -o "$OPTIONS"
    done
    on 1 "$FOREBAY" fs set "$WORK/1" main --profile "$PROFILE"
    [ "$AT" = etcd ] || on 1 timeout 150 "$FOREBAY" log move "$WORK/1" etcd
    [ "$STORE" != store ] || attach_store
    wait_until "$HEALTHY_S" all_serve || unwell
    wait_until "$HEALTHY_S" follow_all || unwell
    : >"$WORK/outages"
}
# An object store on a machine of its own, which has no faults. What was written moves there soon, and is read from there.
attach_store() {
    local credentials=$RUN/store/admin-credentials
    echo "$RUN/store" >>"$RUN/.nodes"
    on "$STORE_AT" timeout 120 "$FOREBAY" start "$RUN/store" --drives 1 --drive-size 2GiB --profile 1+0 --memory "$MEMORY" \
        --s3 "$(address "$STORE_AT"):9000" </dev/null
    mkdir "$RUN/store/mnt/cold"
    on 1 "$FOREBAY" store add "$WORK/1" cold --hostname "$(address "$STORE_AT")" --port 9000 --protocol HTTP --bucket cold --blob-size 4MiB \
        --access-key-id "$(awk -F' = ' '/access_key_id/ { print $2 }' "$credentials")" \
        --secret-key "$(awk -F' = ' '/secret/ { print $2 }' "$credentials")"
    on 1 "$FOREBAY" fs attach "$WORK/1" main cold --retention 30s --tiering-cue 10s
}
# The store has the blobs that are in use, and no others.
store_is_tidy() {
    local used
    used=$(on 2 timeout 30 "$FOREBAY" tier status "$WORK/2" --json | jq '.[0].blobs')
    [ "$used" = "$(find "$RUN/store/mnt/cold" -type f | wc -l)" ] && echo "$used blobs"
}
# All that a machine should do.
serves() { mounted "$1" && healthy "$1" && ready "$1"; }
ready() { on "$1" timeout 5 curl -sf -o /dev/null http://127.0.0.1:9000/ready; }
# Two others have all changes, so that any node may be lost.
follow_all() {
    on 2 timeout 30 "$FOREBAY" log show "$WORK/2" --json |
        jq -e 'all(.ledgers[]; .last_seq as $last | [.standbys[] | select(.stored_seq + 5 >= $last)] | length >= 2)' >/dev/null
}

# --- the network ---------------------------------------------------------------------------------------------------

slow_begins() {
    ip netns exec "$PREFIX-switch" tc qdisc add dev "port$1" root tbf rate "$2" burst 16kb latency 400ms
    on "$1" tc qdisc add dev eth0 root tbf rate "$2" burst 16kb latency 400ms
}
slow_ends() {
    ip netns exec "$PREFIX-switch" tc qdisc del dev "port$1" root
    on "$1" tc qdisc del dev eth0 root
}

# --- faults --------------------------------------------------------------------------------------------------------

uptime_s() { cut -d' ' -f1 /proc/uptime; }
# away NODE all|s3: programs at this machine may fail from now on, until all is well again.
away() { echo "$(uptime_s) open $1 $2" >>"$WORK/outages"; }
all_back() {
    local node kind
    for node in "${NODES[@]}"; do for kind in all s3; do echo "$(uptime_s) close $node $kind" >>"$WORK/outages"; done; done
}
back() { wait_until "$HEALTHY_S" mounted "$1" && wait_until "$HEALTHY_S" ready "$1"; }
# Processes of etcd at a machine: ours, or that of Forebay.
etcd_pids() { pgrep -f -- "data-dir $WORK/(etcd$1|$1/engine/[^ ]*) "; }
etcd_returns() {
    [ "$AT" != etcd ] || etcd_start "$1"
    wait_until 60 etcd_is_there "$1"
}
etcd_is_there() { [ -n "$(etcd_pids "$1")" ]; }
# While a machine does not do its part, the status at another one says so.
told() {
    local other=$1 seconds=$2
    sleep "$seconds"
    [ "$seconds" -lt 12 ] || status "$other" | jq -e '.state != "healthy"' >/dev/null || {
        echo "the status at machine $other says that all is well: $(status "$other")"
        return 1
    }
}

# fault KIND NODE OTHER SECONDS: disturbs one machine, and heals it. OTHER is another one.
fault() {
    local kind=$1 node=$2 other=$3 seconds=$4 worked=0 pid drive rest one
    pid=$(member_pid "$node")
    case $kind in
    none) sleep "$seconds" ;;
    kill)
        away "$node" s3
        kill -KILL "$pid"
        told "$other" "$seconds" || worked=1
        member_start "$node"
        back "$node"
        ;;
    sleep | sleep-both)
        away "$node" all
        [ "$kind" = sleep ] || etcd_pids "$node" | xargs kill -STOP
        kill -STOP "$pid"
        told "$other" "$seconds" || worked=1
        kill -CONT "$pid"
        [ "$kind" = sleep ] || etcd_pids "$node" | xargs kill -CONT
        back "$node"
        ;;
    sleep-etcd)
        etcd_pids "$node" | xargs kill -STOP
        sleep "$seconds"
        etcd_pids "$node" | xargs kill -CONT
        ;;
    kill-etcd)
        etcd_pids "$node" | xargs kill -KILL
        sleep "$seconds"
        etcd_returns "$node"
        ;;
    machine)
        away "$node" all
        machine_kill "$node"
        told "$other" "$seconds" || worked=1
        [ "$AT" != etcd ] || [ "$node" -gt 3 ] || etcd_start "$node"
        member_start "$node"
        back "$node"
        ;;
    cut)
        away "$node" all
        filter "$kind$node" "iifname \"port$node\" drop" "oifname \"port$node\" drop"
        told "$other" "$seconds" || worked=1
        filter_ends "$kind$node"
        back "$node"
        ;;
    cut-owner)
        # Programs at a machine that does not reach the owner wait, or fail.
        one=$(owner "$node")
        [ "$one" != "$node" ] || one=$other
        away "$node" all
        away "$one" all
        filter "$kind$node" "$(from_to "$node" "$one")" "$(from_to "$one" "$node")"
        sleep "$seconds"
        filter_ends "$kind$node"
        back "$node"
        back "$one"
        ;;
    cut-pair)
        # Neither owns the metadata, so that nobody notices.
        one=$(owner "$node")
        for rest in "${NODES[@]}"; do [ "$rest" = "$one" ] || [ "$rest" = "$node" ] || other=$rest; done
        [ "$node" != "$one" ] || for rest in "${NODES[@]}"; do [ "$rest" = "$one" ] || [ "$rest" = "$other" ] || node=$rest; done
        filter "$kind$node" "$(from_to "$node" "$other")" "$(from_to "$other" "$node")"
        sleep "$seconds"
        filter_ends "$kind$node"
        ;;
    cut-from | cut-to)
        away "$node" all
        [ "$kind" = cut-from ] && filter "$kind$node" "iifname \"port$node\" drop" || filter "$kind$node" "oifname \"port$node\" drop"
        told "$other" "$seconds" || worked=1
        filter_ends "$kind$node"
        back "$node"
        ;;
    lossy)
        filter "$kind$node" "iifname \"port$node\" numgen random mod 100 < $((3 + seconds % 10)) drop" \
            "oifname \"port$node\" numgen random mod 100 < $((3 + seconds % 10)) drop"
        sleep "$seconds"
        filter_ends "$kind$node"
        ;;
    slow)
        slow_begins "$node" "$((4 + seconds % 12))mbit"
        sleep "$seconds"
        slow_ends "$node"
        ;;
    flap)
        away "$node" all
        for ((one = 0; one < seconds / 3; one++)); do
            link "$node" down
            sleep 1.$((one % 10))
            link "$node" up
            sleep 1.$((9 - one % 10))
        done
        back "$node"
        ;;
    drive-fail)
        drive=$(on "$other" "$FOREBAY" drive list "$WORK/$other" --json | jq --argjson node $((node - 1)) '[.[] | select(.node == $node)][0].id')
        on "$other" "$FOREBAY" drive fail "$WORK/$other" "$drive" </dev/null
        told "$other" "$seconds" || worked=1
        on "$other" "$FOREBAY" drive return "$WORK/$other" "$drive" </dev/null
        ;;
    drive-lost)
        away "$node" s3
        kill -KILL "$pid"
        wait_until 30 process_is_gone "$pid"
        drive=$(ls "$WORK/$node/drives" | head -1)
        mv "$WORK/$node/drives/$drive" "$WORK/$node/kept-$drive"
        member_start "$node"
        back "$node"
        told "$other" "$seconds" || worked=1
        away "$node" s3
        timeout 60 kill -KILL "$(member_pid "$node")"
        wait_until 30 process_is_gone "$(member_pid "$node")"
        mv "$WORK/$node/kept-$drive" "$WORK/$node/drives/$drive"
        member_start "$node"
        back "$node"
        ;;
    rolling)
        for one in "${NODES[@]}"; do
            away "$one" s3
            on "$one" timeout 120 "$FOREBAY" stop "$WORK/$one" --keep-mounts </dev/null
            member_start "$one"
            back "$one"
            wait_until "$HEALTHY_S" serves "$one"
        done
        ;;
    esac
    return "$worked"
}

# second_fault KEY KIND: a fault of the same machine, so that both are survived as one is.
second_fault() {
    case $2 in
    kill | sleep | cut | cut-from | cut-to | flap) pick "$1" none none sleep-etcd kill-etcd lossy ;;
    lossy | slow) pick "$1" none kill sleep drive-fail ;;
    *) echo none ;;
    esac
}

# round NUMBER SEED VICTIM KIND SECOND SECONDS: one line of the table.
round() {
    local number=$1 seed=$2 victim=$3 kind=$4 second=$5 seconds=$6 node other load disturber pair= worked=0 healed within=never before
    rm -f "$WORK/stop" "$WORK/pause"
    [ "$victim" != owner ] || victim=$(owner 1)
    # Members of etcd are on the first three.
    case "$kind $second" in *etcd* | *both*) [ "$victim" -le 3 ] || victim=2 ;; esac
    other=$((victim % COUNT + 1))
    before=$(owner 1)
    printf 'round %s: %s and %s of machine %s for %s s, owner %s, %s\n' "$number" "$kind" "$second" "$victim" "$seconds" "$before" "$(uptime_s)"
    "$PYTHON" "$ROOT/tests/load/cluster.py" work "$WORK" "$PREFIX" "$number" "$seed" "${NODES[@]}" >"$WORK/load-$number" 2>&1 &
    load=$!
    wait_until 60 grep -q "work begins" "$WORK/load-$number" || worked=1
    sleep 2
    # An owner that is not heard of in time is replaced, and its process begins anew: its mounts go on, S3 there does not.
    [ "$kind" = none ] || away "$before" s3
    # In shells of their own: `||` would let all but their last command fail.
    (set -e; fault "$kind" "$victim" "$other" "$seconds") &
    disturber=$!
    if [ "$second" != none ]; then
        (set -e; sleep $((seconds / 4)); fault "$second" "$victim" "$other" $((seconds / 2 + 1))) &
        pair=$!
    fi
    wait "$disturber" || worked=1
    [ -z "$pair" ] || wait "$pair" || worked=1
    [ "$worked" = 0 ] || echo "the fault, its end or the status did not work"
    healed=$SECONDS
    # A node that does not own the metadata any more learns of that when it reaches the others, and begins anew.
    sleep 1
    if wait_until "$HEALTHY_S" all_serve; then
        within=$((SECONDS - healed))
        all_back
    else
        worked=1
        unwell || true
    fi
    sleep 2
    touch "$WORK/stop"
    wait_until 180 process_is_gone "$load" || kill -KILL "$load"
    wait "$load" || worked=1
    cat "$WORK/load-$number"
    [ ! -e "$WORK/pauses-$number" ] || head -n 400 "$WORK/pauses-$number"
    [ "$worked" = 0 ] || keep_logs "$number"
    printf '| %s | %s %s %s%s %s | %s%s | %s | %s s | %s s | %s s | %s |\n' "$seed/$number" "$AT" "$PROFILE" "$COUNT" "$([ "$STORE" != store ] || echo " store")" "${OPTIONS#process=own}" "$kind" \
        "$([ "$second" = none ] || echo " + $second")" "$victim$([ "$victim" != "$before" ] || echo " (owner)")" "$seconds" "$(cat "$WORK/pause" 2>/dev/null || echo -)" \
        "$within" "$([ "$worked" = 0 ] && echo ok || echo FAIL)" >>"$TABLE"
    return "$worked"
}
unwell() {
    local node
    for node in "${NODES[@]}"; do serves "$node" || echo "machine $node is not well after $HEALTHY_S s: $(mounted "$node" || echo "not mounted") $(status "$node")"; done
    on 2 timeout 30 "$FOREBAY" log show "$WORK/2"
    return 1
}
all_serve() { local node; for node in "${NODES[@]}"; do serves "$node" || return 1; done; }

# What a person needs to find the reason.
keep_logs() {
    local node to=$LOGS/$SUITE-seed-$SEED-round-$1
    mkdir -p "$to"
    for node in "${NODES[@]}"; do
        mkdir -p "$to/$node"
        cp -r "$WORK/$node/log" "$to/$node/" 2>/dev/null || true
        status "$node" >"$to/$node/status" 2>&1 || true
    done
    cp "$WORK"/outages "$WORK"/load-* "$WORK"/calls-* "$WORK"/pauses-* "$WORK"/etcd*.log "$to" 2>/dev/null || true
    echo "logs of the machines: $to"
}

whole_or_logs() {
    local worked=0 work
    # In a shell of its own: `||` would let all but its last command fail.
    (set -e; whole) &
    work=$!
    wait "$work" || worked=1
    [ "$worked" = 0 ] || keep_logs end
    return "$worked"
}
whole() {
    local node started=$SECONDS starts=()
    on 1 timeout 200 "$FOREBAY" fsck "$WORK/1" </dev/null
    # Each round has compared all but S3.
    [ -n "$SHORT" ] || everywhere
    losses_are_told
    for node in "${NODES[@]}"; do on "$node" timeout 120 "$FOREBAY" stop "$WORK/$node" </dev/null; done
    not mounted 2
    echo "checked and stopped after $((SECONDS - started)) s"
    # All at once, as after a power cut.
    for node in "${NODES[@]}"; do
        member_start "$node" &
        starts+=($!)
    done
    for node in "${starts[@]}"; do wait "$node"; done
    wait_until "$HEALTHY_S" all_serve || unwell
    echo "started after $((SECONDS - started)) s"
    everywhere
    [ "$STORE" != store ] || wait_until 90 store_is_tidy
    [ -n "$SHORT" ] || on 2 timeout 200 "$FOREBAY" fsck "$WORK/2" </dev/null
}
# longest_absence NODE: seconds. The term of a session is 15 s, of which a heartbeat may have taken one or two.
longest_absence() {
    awk -v node="$1" '$3 == node && $4 == "all" { if ($2 == "open") at = at ? at : $1; else if (at) { if ($1 - at > most) most = $1 - at; at = 0 } }
        END { print most + 0 }' "$WORK/outages"
}
# What a mount could not make durable because it was cut off for longer than its term is told once, to the first that asks for everything.
losses_are_told() {
    local node
    for node in "${NODES[@]}"; do
        on "$node" timeout 60 "$FOREBAY" sync "$WORK/$node/mnt" </dev/null && continue
        longest_absence "$node" | awk '{ exit !($1 >= 13) }'
        echo "machine $node was away, and lost changes:"
        grep -rh "is lost" "$WORK/$node/log" | tail -3
        on "$node" timeout 60 "$FOREBAY" sync "$WORK/$node/mnt" </dev/null
    done
}
everywhere() {
    AWS_SHARED_CREDENTIALS_FILE=$WORK/1/admin-credentials timeout 200 "$PYTHON" "$ROOT/tests/load/cluster.py" check "$WORK" "$PREFIX" "${NODES[@]}"
}

# cluster SEED ROUND…: one cluster and its rounds. Ends at the first failure: what comes then may be its consequence.
cluster() {
    local seed=$1 number line
    shift
    # A name for each, so that nothing of one is taken for another's.
    WORK=$RUN/$seed
    mkdir -p "$WORK"
    setup "$seed"
    export AWS_SHARED_CREDENTIALS_FILE=$WORK/1/admin-credentials
    NODES+=("$STORE_AT")
    machines_begin
    unset 'NODES[-1]'
    if [ "$AT" = etcd ]; then for node in 1 2 3; do etcd_start "$node"; done; fi
    check "seed $seed: $COUNT machines, $PROFILE, etcd $([ "$AT" = own ] && echo "of Forebay" || echo "from outside"), $OPTIONS$([ "$STORE" != store ] || echo ", a store")" begin || return 1
    for number in "$@"; do
        line=($(draw "$seed" "$number"))
        check "seed $seed, round $number: ${line[1]} of ${line[0]}$([ "${line[2]}" = none ] || echo " + ${line[2]}") for ${line[3]} s" round "$number" "$seed" "${line[@]}" || return 1
    done
    check "seed $seed: all is whole, and starts again as it was" whole_or_logs || return 1
}
cluster_ends() {
    local node
    for node in "${NODES[@]}"; do timeout 30 "$FOREBAY" stop "$WORK/$node" </dev/null &>/dev/null; done
    pkill -KILL -f "data-dir $WORK/" 2>/dev/null
    timeout 30 "$FOREBAY" stop "$RUN/store" </dev/null &>/dev/null
    NODES+=("$STORE_AT")
    machines_end
    rm -rf --one-file-system "$RUN/store"
    for node in "${NODES[@]}"; do umount -l "$WORK/$node/mnt" 2>/dev/null; done
    sleep 1
    rm -rf --one-file-system "$WORK"
    WORK=$RUN
}

# draw SEED ROUND: victim, fault, second fault, seconds.
draw() {
    local kind
    if [ -n "$SHORT" ]; then
        [ "$2" = 0 ] && echo "owner cut-from lossy 9" || echo "owner sleep-both none 7"
        return
    fi
    kind=$(pick "$* kind" "${FAULTS[@]}")
    echo "$(pick "$* victim" owner "$(pick "$* machine" "${NODES[@]}")") $kind $(second_fault "$* second" "$kind") $((2 + $(drawn "$* seconds" 39)))"
}

failed=0
TABLE=$RUN/table
: >"$TABLE"
for ((first = 0; first < ROUNDS; first += CLUSTER_ROUNDS)); do
    last=$((first + CLUSTER_ROUNDS < ROUNDS ? first + CLUSTER_ROUNDS : ROUNDS))
    cluster "$((SEED + first / CLUSTER_ROUNDS))" $(seq "$first" $((last - 1))) || failed=1
    cluster_ends
done
echo "| seed/round | cluster | fault | machine | for | longest pause of the others | healthy again after | |"
cat "$TABLE"
exit 0
