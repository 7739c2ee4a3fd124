# Machines of a test, each a network namespace with an address of its own: source it after lib.sh.
# Seconds of work in each check that disturbs it.
LOAD_S=${FOREBAY_CLUSTER_LOAD_S:-$([ "$LONG" = 1 ] && echo 120 || echo 6)}
# Namespaces have a name for the whole machine.
PREFIX=fb$$
NODES=(1 2 3 4)
# Nodes are steady again after 20 s instead of 5 min, and a node that has taken over gives up drives as soon.
export FOREBAY_HASTE=15

trap 'machines_end; cleanup' EXIT

machines_end() {
    local node
    [ "$BASHPID" = $$ ] || return
    for node in "${NODES[@]}"; do ip netns pids "$PREFIX-$node" 2>/dev/null | xargs -r kill -KILL 2>/dev/null; done
    for node in "${NODES[@]}"; do ip netns del "$PREFIX-$node" 2>/dev/null; done
    ip netns del "$PREFIX-switch" 2>/dev/null
}

# The addresses are those of documentation (RFC 5737), which no network has.
address() { echo "192.0.2.$1"; }

machines_begin() {
    local node
    ip netns add "$PREFIX-switch"
    ip -n "$PREFIX-switch" link add switch type bridge
    ip -n "$PREFIX-switch" link set switch up
    for node in "${NODES[@]}"; do
        ip netns add "$PREFIX-$node"
        ip -n "$PREFIX-switch" link add "port$node" type veth peer name eth0 netns "$PREFIX-$node"
        ip -n "$PREFIX-switch" link set "port$node" master switch up
        ip -n "$PREFIX-$node" addr add "$(address "$node")/24" dev eth0
        ip -n "$PREFIX-$node" link set eth0 up
        ip -n "$PREFIX-$node" link set lo up
    done
}

# on NODE COMMAND…: runs a command at a machine. Only its network is another one: all see the same files and mounts.
on() { nsenter --net="/run/netns/$PREFIX-$1" "${@:2}"; }
link() { ip -n "$PREFIX-switch" link set "port$1" "$2"; }

# A machine dies: first its network is gone, then all its processes.
machine_kill() {
    link "$1" down
    ip netns pids "$PREFIX-$1" | xargs -r kill -KILL
    wait_until 30 machine_is_dead "$1"
    # What it had mounted is gone with it.
    umount -l "$WORK/$1/mnt" 2>/dev/null || true
    link "$1" up
}
machine_is_dead() { [ -z "$(ip netns pids "$PREFIX-$1")" ]; }

# filter NAME RULE…: a chain of its own, so that faults may overlap.
filter() {
    local name=$1 rule
    shift
    {
        echo "add table bridge faults"
        echo "add chain bridge faults $name { type filter hook forward priority 0; }"
        for rule in "$@"; do echo "add rule bridge faults $name $rule"; done
    } | ip netns exec "$PREFIX-switch" nft -f -
}
filter_ends() { ip netns exec "$PREFIX-switch" nft delete chain bridge faults "$1"; }
from_to() { echo "iifname \"port$1\" oifname \"port$2\" ${3:-} drop"; }

member_start() { on "$1" timeout 120 "$FOREBAY" start "$WORK/$1" "${@:2}" </dev/null; }
member_kill() { node_kill "$1"; }
member_pid() { node_pid "$1"; }
status() { on "$1" timeout 30 "$FOREBAY" status "$WORK/$1" --json; }
healthy() { status "$1" | jq -e '.state == "healthy" and all(.filesystems[]; .owed_shards == 0) and all(.drives[]; .state == "up" or .state == "suspect")' >/dev/null; }
explain() {
    for node in "${NODES[@]}"; do
        status "$node" | jq -c --arg node "$node" '{$node, state, problems, owed: [.filesystems[].owed_shards], drives: [.drives[] | {id, state}]}' || true
    done
}
mounted() { mountpoint -q "$WORK/$1/mnt"; }

# s3 NODE put|get BUCKET KEY FILE: at the endpoint of a node, with the credentials in CREDENTIALS.
s3() {
    AWS_SHARED_CREDENTIALS_FILE=${CREDENTIALS:-$WORK/1/admin-credentials} \
        on "$1" "$PYTHON" - "$(status "$1" | jq -r .s3)" "${@:2}" <<'PY'
import sys, boto3, botocore
url, what, bucket, key, path = sys.argv[1:]
config = botocore.config.Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1})
s3 = boto3.client("s3", endpoint_url=url, region_name="us-east-1", config=config)
s3.upload_file(path, bucket, key) if what == "put" else s3.download_file(bucket, key, path)
PY
}
s3_served() { [ "$(status "$1" | jq -r .s3)" != null ]; }

PYTHON=$HOME/.cache/forebay/venv/bin/python

# under NODE PROGRAM…: works on the mounts of nodes while PROGRAM disturbs them. The work must never fail.
under() {
    local node=$1 load disturber worked=0
    shift
    python3 "$ROOT/tests/posix/outlive.py" "$WORK/$node/mnt/load-$RANDOM" "$LOAD_S" "$SEED$RANDOM" &
    load=$!
    sleep 1
    # In a shell of its own: `||` would let all but its last command fail.
    (set -e; "$@") &
    disturber=$!
    wait "$disturber" || worked=1
    wait "$load" || worked=1
    return "$worked"
}

# beside NODE PROGRAM…: two programs work at a machine while PROGRAM disturbs them; one says how long it had to wait.
beside() {
    local node=$1 creates worked=0
    python3 "$ROOT/tests/posix/creates.py" "$WORK/$node/mnt/creates-$RANDOM" "$((LOAD_S + 4))" >"$WORK/creates" &
    creates=$!
    under "$@" || worked=1
    wait "$creates" || worked=1
    cat "$WORK/creates"
    return "$worked"
}

# A member of etcd on each of the first three machines.
etcd_start() {
    local node=$1 all
    all="m1=http://$(address 1):2380,m2=http://$(address 2):2380,m3=http://$(address 3):2380"
    setsid nsenter --net="/run/netns/$PREFIX-$node" etcd --name "m$node" --data-dir "$WORK/etcd$node" --initial-cluster "$all" --initial-cluster-state new \
        --listen-client-urls "http://$(address "$node"):2379" --advertise-client-urls "http://$(address "$node"):2379" \
        --listen-peer-urls "http://$(address "$node"):2380" --initial-advertise-peer-urls "http://$(address "$node"):2380" \
        --logger zap --log-outputs "$WORK/etcd$node.log" </dev/null >/dev/null 2>&1 &
    disown
}
etcd_answers() { on 1 timeout 3 curl -sf "http://$(address "$1"):2379/health" | grep -q true; }
ENGINE="etcd://$(address 1):2379,$(address 2):2379,$(address 3):2379"

# An etcd that Forebay runs: its member at a node, and its end with the suite.
etcd_pid() { cat "$WORK/$1/engine/pid"; }
etcd_runs() { [ -e "$WORK/$1/engine/pid" ] && grep -qs "$WORK/$1/engine" "/proc/$(etcd_pid "$1")/cmdline"; }
end_etcd() { [ "$BASHPID" != $$ ] || pkill -KILL -f "data-dir $WORK/" 2>/dev/null; }

# follows NODE COUNT: so many nodes have all ledgers up to their ends, or nearly, as this node says.
follows() {
    on "$1" timeout 30 "$FOREBAY" log show "$WORK/$1" --json |
        jq -e --argjson count "$2" 'all(.ledgers[]; .last_seq as $last | [.standbys[] | select(.stored_seq + 5 >= $last)] | length == $count)' >/dev/null
}

# The number of the machine with the owner of the metadata, asked at another one: nodes count from 0.
owner() { on "$1" timeout 30 "$FOREBAY" node list "$WORK/$1" --json | jq -e '[.[] | select(.owner)][0].id + 1'; }
# Fails also while nobody knows who it is.
owner_is_not() { local now; now=$(owner "$1") && [ "$now" != "$2" ]; }

# A machine that died is back, with its member of etcd.
machine_returns() {
    wait_until 30 etcd_answers "$1"
    member_start "$1"
    wait_until 30 mounted "$1"
    wait_until 90 healthy "$1"
}
