#!/usr/bin/env bash
# Three machines, each a network namespace with an address of its own: they join, share one filesystem, and lose one another while
# programs work. No program sees an error, and nothing that was acknowledged is lost.
LIMIT_S=$([ "${FOREBAY_TEST_LONG:-0}" = 1 ] && echo 1800 || echo 240)
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
source "$(dirname "$0")/../machines.sh"
NODES=(1 2 3 4)

# --- checks --------------------------------------------------------------------------------------------------------

begin() {
    machines_begin
    echo "$WORK/1" >>"$WORK/.nodes"
    on 1 timeout 120 "$FOREBAY" start "$WORK/1" --drives 2 --drive-size 512MiB --profile r2 --mount "$WORK/1/mnt" \
        --memory "$MEMORY" --s3 "$(address 1):9000" --address "$(address 1)" </dev/null
}

join_two() {
    local token node
    token=$(on 1 "$FOREBAY" token create "$WORK/1" --uses 2)
    for node in 2 3; do
        echo "$WORK/$node" >>"$WORK/.nodes"
        on "$node" timeout 120 "$FOREBAY" join "$token" "$WORK/$node" --drives 2 --drive-size 512MiB --name "n$node" \
            --domain "rack=r$node" </dev/null
    done
    on 3 "$FOREBAY" node list "$WORK/3" --json | jq -e 'length == 3 and all(.[]; .state == "up") and .[1].rack == "r2"'
    # A repetition changes nothing.
    on 3 "$FOREBAY" join "$token" "$WORK/3" --drives 2 --name n3 </dev/null
    on 1 "$FOREBAY" drive list "$WORK/1" --json | jq -e 'length == 6 and ([.[].node] | sort) == [0, 0, 1, 1, 2, 2]'
}

bad_tokens() {
    local token used=$WORK/used
    used=$(on 1 "$FOREBAY" token create "$WORK/1" --expires 1s)
    token=$(on 1 "$FOREBAY" token create "$WORK/1")
    sleep 1.5
    expect_fail "expired" on 2 "$FOREBAY" join "$used" "$WORK/x" --name n4 --address "$(address 2):7799"
    expect_fail "not a token" on 2 "$FOREBAY" join "${token::-2}" "$WORK/x"
    expect_fail "name=n3" on 2 "$FOREBAY" join "$token" "$WORK/x" --name n3 --address "$(address 2):7799"
    expect_fail "belongs to another|is a cluster" on 1 "$FOREBAY" join "$token" "$WORK/1"
    expect_fail "cannot listen" on 2 "$FOREBAY" join "$token" "$WORK/x" --address "$(address 2)"
    on 1 "$FOREBAY" token remove "$WORK/1" 2
    expect_fail "removed" on 2 "$FOREBAY" join "$token" "$WORK/x" --name n4 --address "$(address 2):7799"
    on 1 "$FOREBAY" token list "$WORK/1" --json | jq -e '[.[].state] == ["used", "expired"]'
    on 1 "$FOREBAY" node list "$WORK/1" --json | jq -e 'length == 3'
    # It took part in nothing.
    not test -e "$WORK/x/node.json"
}

# Plain bytes, and a stranger that wants more than to join.
strangers() {
    on 2 timeout 10 bash -c "head -c 100000 /dev/urandom >/dev/tcp/$(address 1)/7740" || true
    on 2 timeout 15 openssl s_client -connect "$(address 1):7740" -alpn forebay/1 </dev/null | grep -q "forebay.internal"
    status 1 | jq -e '.state == "healthy"'
}

spread() {
    on 2 "$FOREBAY" fs set "$WORK/2" main --profile 4+2
    on 2 "$FOREBAY" mount "$WORK/2" "$WORK/2/mnt"
    on 3 "$FOREBAY" mount "$WORK/3" "$WORK/3/mnt"
    on 3 "$FOREBAY" fs create "$WORK/3" scratch --profile 4+2 --json | jq -re .protection | tee /dev/stderr | grep -q "1 nodes"
}

one_namespace() {
    stage_tree 300 "$WORK/tree"
    cp -a "$WORK/tree" "$WORK/2/mnt/tree"
    sync_files "$WORK/2/mnt/tree"
    same_tree "$WORK/tree" "$WORK/3/mnt/tree"
    same_tree "$WORK/tree" "$WORK/1/mnt/tree"
    mkdir "$WORK/3/mnt/bucket"
    head -c 9000000 /dev/urandom >"$WORK/object"
    s3 1 put bucket object "$WORK/object"
    cmp "$WORK/object" "$WORK/3/mnt/bucket/object"
    # Locks and appends of two machines.
    local node
    for node in 2 3; do
        (for i in {1..100}; do flock "$WORK/$node/mnt/lock" sh -c 'n=$(cat '"$WORK/$node/mnt/counter"' 2>/dev/null || echo 0); echo $((n + 1)) >'"$WORK/$node/mnt/counter"; done) &
    done
    wait
    [ "$(cat "$WORK/1/mnt/counter")" = 200 ]
}

# The same users, keys and objects at every node. A key that is withdrawn at one is refused at the others.
s3_everywhere() {
    local node key=$WORK/key
    for node in 2 3; do wait_until 20 s3_served "$node"; done
    on 2 "$FOREBAY" s3 endpoints "$WORK/2" --json >"$WORK/endpoints"
    jq -e 'length == 3 and ([.[].local] == [false, true, true])' "$WORK/endpoints"
    for node in 1 2 3; do [ "$(jq -r ".[$node - 1].url" "$WORK/endpoints")" = "$(status "$node" | jq -r .s3)" ]; done
    on 3 "$FOREBAY" node list "$WORK/3" --json | jq -e 'all(.[]; (.version | test("^[0-9]")) and .latency_us > 0 and (.clock_ahead_ms | fabs) < 1000 and .uptime_s >= 0)'
    head -c 20000000 /dev/urandom >"$WORK/object2"
    s3 2 put bucket dir/object2 "$WORK/object2"
    s3 3 get bucket dir/object2 "$WORK/got" && cmp "$WORK/object2" "$WORK/got"
    s3 1 get bucket dir/object2 "$WORK/got" && cmp "$WORK/object2" "$WORK/got"
    cmp "$WORK/object2" "$WORK/3/mnt/bucket/dir/object2"
    on 3 "$FOREBAY" key add "$WORK/3" admin --json >"$key.json"
    jq -r '"[default]\naws_access_key_id = \(.access_key)\naws_secret_access_key = \(.secret_key)"' "$key.json" >"$key"
    sleep 1
    CREDENTIALS=$key s3 2 get bucket object "$WORK/got"
    on 1 "$FOREBAY" key disable "$WORK/1" "$(jq -r .access_key "$key.json")"
    sleep 1
    CREDENTIALS=$key expect_fail "InvalidAccessKeyId|403" s3 2 get bucket object "$WORK/got"
    CREDENTIALS=$key expect_fail "InvalidAccessKeyId|403" s3 3 get bucket object "$WORK/got"
}
# A machine without drives has the same files. When it is removed, nobody answers it any more.
without_drives() {
    local token
    token=$(on 2 "$FOREBAY" token create "$WORK/2")
    echo "$WORK/4" >>"$WORK/.nodes"
    on 4 "$FOREBAY" join "$token" "$WORK/4" --drives 0 --name n4 </dev/null
    on 4 "$FOREBAY" mount "$WORK/4" "$WORK/4/mnt"
    same_tree "$WORK/tree" "$WORK/4/mnt/tree"
    echo four >"$WORK/4/mnt/four"
    [ "$(cat "$WORK/2/mnt/four")" = four ]
    on 4 "$FOREBAY" umount "$WORK/4"
    expect_fail "has drives" on 1 "$FOREBAY" node remove "$WORK/1" 1
    expect_fail "owns the metadata" on 2 "$FOREBAY" node remove "$WORK/2" 0
    on 2 "$FOREBAY" node remove "$WORK/2" 3
    wait_until 10 is_refused 4
    on 1 "$FOREBAY" node list "$WORK/1" --json | jq -e 'length == 3'
    # Others have noticed nothing.
    same_tree "$WORK/tree" "$WORK/3/mnt/tree"
    on 4 timeout 120 "$FOREBAY" stop "$WORK/4" </dev/null
}
is_refused() { status "$1" | jq -e '.problems[0] | contains("does not answer")'; }

# A node's directory was copied, like the image of a machine: one of both runs, and it is the one that started last before the copy, or was
# told to join again.
copies() {
    local token copy=$WORK/copy name
    mkdir "$copy"
    for name in identity drives.json node.key; do cp -a "$WORK/3/$name" "$copy/"; done
    echo "$copy" >>"$WORK/.nodes"
    # The original runs.
    copy_start || true
    wait_until 30 says_copy "which answers at $(address 3):7740 now"
    wait_until 20 has_ended "$copy"
    on 1 "$FOREBAY" node list "$WORK/1" --json | jq -e --arg at "$(address 3):7740" '.[2].addresses == [$at] and .[2].certificate_days >= 364'
    same_tree "$WORK/tree" "$WORK/3/mnt/tree"
    # It has started again since.
    on 3 timeout 120 "$FOREBAY" stop "$WORK/3" --keep-mounts </dev/null
    member_start 3
    on 3 timeout 120 "$FOREBAY" stop "$WORK/3" --keep-mounts </dev/null
    copy_start || true
    wait_until 30 says_copy "was started at $(address 3):7740 after this copy was made"
    wait_until 20 has_ended "$copy"
    # A person says that the copy counts, and then that the original does.
    token=$(on 1 "$FOREBAY" token create "$WORK/1")
    on 4 timeout 60 "$FOREBAY" join "$token" "$copy" --address "$(address 4)" </dev/null
    wait_until 30 node_is_at 4
    expect_fail "was started at $(address 4):7740 after" member_start 3
    on 4 timeout 120 "$FOREBAY" stop "$copy" </dev/null
    token=$(on 1 "$FOREBAY" token create "$WORK/1")
    on 3 timeout 60 "$FOREBAY" join "$token" "$WORK/3" --address "$(address 3)" </dev/null
    wait_until 30 node_is_at 3
    wait_until 30 mounted 3
    wait_until 60 healthy 1
    same_tree "$WORK/tree" "$WORK/3/mnt/tree"
}
copy_start() { on 4 timeout 60 "$FOREBAY" start "$WORK/copy" --address "$(address 4)" --no-mount --no-s3 </dev/null; }
says_copy() { grep -q "copy of that of node 2.*$1" "$WORK/copy/log/forebay.log"; }
has_ended() { flock -n "$1/lock" true; }
node_is_at() { on 1 "$FOREBAY" node list "$WORK/1" --json | jq -e --arg at "$(address "$1"):7740" '.[2].addresses == [$at] and .[2].state == "up"'; }

# A drive of another node is taken out of service and used again; that node moves to another address.
orders_from_elsewhere() {
    local drive
    drive=$(on 1 "$FOREBAY" drive list "$WORK/1" --json | jq '[.[] | select(.node == 2)][0].id')
    on 2 "$FOREBAY" drive fail "$WORK/2" "$drive"
    head -c 3000000 /dev/urandom >"$WORK/2/mnt/while-failed"
    sync "$WORK/2/mnt/while-failed"
    sleep 1
    on 1 "$FOREBAY" drive return "$WORK/1" "$drive"
    wait_until 60 healthy 1
    on 3 timeout 120 "$FOREBAY" stop "$WORK/3" --keep-mounts </dev/null
    expect_fail "has the metadata" on 3 "$FOREBAY" start "$WORK/3" --profile r2
    member_start 3 --address "$(address 3):7741"
    on 1 "$FOREBAY" node list "$WORK/1" --json | jq -e '.[2].addresses[0] | endswith(":7741")' || sleep 2
    wait_until 60 healthy 1
    on 1 "$FOREBAY" node list "$WORK/1" --json | jq -e '.[2].addresses[0] | endswith(":7741")'
    same_tree "$WORK/tree" "$WORK/3/mnt/tree"
    # A place in the list that is not known any more.
    on 3 timeout 120 "$FOREBAY" stop "$WORK/3" --keep-mounts </dev/null
    mv "$WORK/3/drives/$drive.img" "$WORK/3/moved.img"
    member_start 3 --drive "$WORK/3/moved.img"
    wait_until 60 healthy 1
}

# New data goes first to the node that writes it, from the next second on, and is read there without the network.
local_writes() {
    on 2 "$FOREBAY" fs create "$WORK/2" near --profile r2 --json | jq -e '.placement == "spread"'
    on 3 "$FOREBAY" fs set "$WORK/3" near --placement local --json | jq -e '.placement == "local"'
    expect_fail "possible values: spread, local" on 3 "$FOREBAY" fs set "$WORK/3" near --placement near
    mkdir "$WORK/2/near"
    on 2 "$FOREBAY" mount "$WORK/2" "$WORK/2/near" --fs near
    sleep 1
    head -c 40000000 /dev/urandom >"$WORK/local"
    cp "$WORK/local" "$WORK/2/near/file"
    sync "$WORK/2/near/file"
    on 2 "$FOREBAY" why "$WORK/2/near/file" --json >"$WORK/why"
    # Without it, a third would be.
    jq -e '[.extents[].shards | (.[0].drive | . == 2 or . == 3) and (.[1].drive | . != 2 and . != 3)] | length >= 10 and (map(select(.)) | length) >= 0.9 * length' "$WORK/why"
    on 2 "$FOREBAY" umount "$WORK/2" --fs near
    # Of what is late here, the other copy is asked for.
    wait_until 60 is_read_here
}
is_read_here() {
    local before after
    on 2 "$FOREBAY" mount "$WORK/2" "$WORK/2/near" --fs near
    before=$(received 2)
    cmp "$WORK/local" "$WORK/2/near/file" || exit 1
    after=$(received 2)
    on 2 "$FOREBAY" umount "$WORK/2" --fs near
    echo "$((after - before)) bytes received"
    [ $((after - before)) -lt 2000000 ]
}
received() { ip -n "$PREFIX-$1" -s -j link show eth0 | jq '.[0].stats64.rx.bytes'; }

# A filesystem is for the drives of some nodes: what it has and gets is there, and moves while programs use it.
some_nodes() {
    on 1 "$FOREBAY" fs create "$WORK/1" walled --profile r2 --nodes 0,1 --json >"$WORK/walled"
    # Two thirds of the drives.
    jq -e --argjson all "$(status 1 | jq '.filesystems[] | select(.name == "near").total_bytes')" \
        '.nodes == [0, 1] and (.total_bytes / $all | . > 0.6 and . < 0.72)' "$WORK/walled"
    mkdir "$WORK/3/walled"
    on 3 "$FOREBAY" mount "$WORK/3" "$WORK/3/walled" --fs walled
    cp "$WORK/local" "$WORK/3/walled/file"
    sync "$WORK/3/walled/file"
    lies_on 0 1 2 3
    on 3 "$FOREBAY" fs set "$WORK/3" walled --nodes 1,2 --dry-run --json | jq -e '.groups > 0 and .move_bytes > 30000000 and (.balancing | not)'
    on 3 "$FOREBAY" fs show "$WORK/3" walled --json | jq -e '.nodes == [0, 1]'
    expect_fail "no such node: id=9" on 3 "$FOREBAY" fs set "$WORK/3" walled --nodes 1,9
    expect_fail "too few for filesystem three .r3.*name more nodes" set_three_copies 0
    expect_fail "numbers of nodes, such as" on 3 "$FOREBAY" fs set "$WORK/3" walled --nodes one
    on 3 "$FOREBAY" fs set "$WORK/3" walled --nodes 1,2 | grep "walled is being balanced: .* placement groups move"
    # New data does not wait for that, once mounts have heard of it.
    wait_until 20 new_lies_there
    wait_until 60 has_moved
    lies_on 2 3 4 5
    cmp "$WORK/local" "$WORK/3/walled/file"
    on 1 "$FOREBAY" fs list "$WORK/1" | grep "r2, nodes 1 2"
    on 3 "$FOREBAY" umount "$WORK/3" --fs walled
}
# lies_on DRIVE DRIVE DRIVE DRIVE [FILE]: all of a file is on these drives, and on each of them.
lies_on() {
    on 3 "$FOREBAY" why "$WORK/3/walled/${5:-file}" --json >"$WORK/why"
    jq -e --argjson drives "[$1, $2, $3, $4]" '[.extents[].shards[].drive] | unique == $drives' "$WORK/why"
}
new_lies_there() {
    local new=$WORK/3/walled/new-$RANDOM
    head -c 10000000 "$WORK/local" >"$new" || exit 1
    sync "$new"
    on 3 "$FOREBAY" why "$new" --json | jq -e '[.extents[].shards[].drive] | unique - [2, 3, 4, 5] == []'
}
set_three_copies() {
    on 3 "$FOREBAY" fs create "$WORK/3" three --profile r3 --nodes "$1"
}
has_moved() { on 1 "$FOREBAY" fs show "$WORK/1" walled --json | jq -e '.balancing == false and .groups_elsewhere == null and .repair.rebuilding_groups == 0'; }

# The machine is back, and has everything that it missed.
machine_returns() {
    member_start "$1"
    wait_until 30 mounted "$1"
    wait_until 60 healthy 1
}

lose_machine() {
    on 1 "$FOREBAY" fs verify "$WORK/1" main --now --json | jq -e '.last | .expected_shards > 100 and .unknown_shards == 0 and .missing_shards == 0'
    under 2 machine_kill 3
    same_tree "$WORK/tree" "$WORK/2/mnt/tree"
    cmp "$WORK/object" "$WORK/2/mnt/bucket/object"
    # Two of six shards of each stripe are there, or not: nobody knows.
    on 2 "$FOREBAY" fs verify "$WORK/2" main --now --json | jq -e '.last | .unknown_shards > 30 and .missing_shards == 0'
    machine_returns 3
    same_tree "$WORK/tree" "$WORK/3/mnt/tree"
}

restart_process() {
    member_kill "$1"
    sleep 2
    member_start "$1"
}
lose_process() {
    under 3 restart_process 2
    wait_until 60 healthy 1
    same_tree "$WORK/tree" "$WORK/2/mnt/tree"
}

# Nodes say which requests of others they answer. The number of a request by S3 is in the logs of all that work on it.
traced() {
    local node got put
    for node in 2 3; do
        on "$node" timeout 120 "$FOREBAY" stop "$WORK/$node" --keep-mounts </dev/null
        FOREBAY_LOG=info,wire=debug member_start "$node"
    done
    wait_until 60 healthy 1
    wait_until 30 s3_served 2
    s3_request 2 put >"$WORK/put"
    s3_request 2 get >"$WORK/get"
    put=$(cat "$WORK/put") && got=$(cat "$WORK/get")
    [ "$put" != "$got" ]
    grep "operation=\"Put\".*trace=$put" "$WORK/3/log/forebay.log"
    grep "operation=\"Get\".*trace=$got" "$WORK/3/log/forebay.log"
    grep -rh "\"request_id\":\"$put\"" "$WORK/2/audit"
    for node in 2 3; do
        on "$node" timeout 120 "$FOREBAY" stop "$WORK/$node" --keep-mounts </dev/null
        member_start "$node"
    done
    wait_until 60 healthy 1
}
# s3_request NODE put|get: prints the number of the request.
s3_request() {
    AWS_SHARED_CREDENTIALS_FILE=$WORK/1/admin-credentials on "$1" "$PYTHON" - "$(status "$1" | jq -r .s3)" "$2" <<'PY'
import sys, boto3, botocore
url, what = sys.argv[1:]
config = botocore.config.Config(s3={"addressing_style": "path"})
s3 = boto3.client("s3", endpoint_url=url, region_name="us-east-1", config=config)
body = bytes(range(256)) * 12000
answer = s3.put_object(Bucket="bucket", Key="traced", Body=body) if what == "put" else s3.get_object(Bucket="bucket", Key="traced")
if what == "get":
    assert answer["Body"].read() == body
print(answer["ResponseMetadata"]["RequestId"])
PY
}

# Machines 2 and 3 do not reach each other, and neither owns the metadata. They go through the first one.
lose_pair() {
    under 2 pair_is_parted
    wait_until 30 reaches_all 2
    wait_until 60 healthy 1
    same_tree "$WORK/tree" "$WORK/3/mnt/tree"
}
pair_is_parted() {
    filter pair "$(from_to 2 3)" "$(from_to 3 2)"
    wait_until 20 is_led 2
    wait_until 20 is_led 3
    head -c 9000000 /dev/urandom >"$WORK/parted"
    timeout 15 cp "$WORK/parted" "$WORK/2/mnt/parted"
    timeout 15 sync "$WORK/2/mnt/parted"
    timeout 15 cmp "$WORK/parted" "$WORK/3/mnt/parted"
    # What was owed in the first seconds comes there, too.
    wait_until 30 healthy 1
    filter_ends pair
}
is_led() { status "$1" | jq -e 'any(.problems[]; contains("through node 0 only"))' >/dev/null; }
reaches_all() { not is_led "$1"; }

# The owner of the metadata dies and comes back: all others wait.
lose_owner() {
    under 2 owner_dies
    wait_until 60 healthy 1
    same_tree "$WORK/tree" "$WORK/3/mnt/tree"
}
owner_dies() {
    machine_kill 1
    status 2 | jq -e '.problems[0] | contains("does not answer")'
    sleep 2
    machine_returns 1
}

# Two of three machines are away: everything waits, and goes on when one is back.
lose_two() {
    under 2 two_die
    wait_until 60 healthy 1
}
two_die() {
    machine_kill 3
    member_kill 1
    sleep 2
    member_start 1
    sleep 2
    machine_returns 3
}

# Each machine looks at itself and at the ways to the others, and says what is wrong with them.
names() {
    mkdir "$WORK/1/mnt/names"
    python3 "$ROOT/tests/posix/names.py" "$LOAD_S" 8 "$WORK/1/mnt/names" "$WORK/2/mnt/names" "$WORK/3/mnt/names"
}
look_around() {
    on 2 "$FOREBAY" upgrade status "$WORK/2" --json | jq -e '.format_level == 1 and .behind == [] and .finalize_to == null and (.nodes | length == 3)'
    on 3 "$FOREBAY" upgrade finalize "$WORK/3" | grep -q "level 1 are written; there is no newer one"
    # A node that took long to start may be reached through another one for five seconds.
    wait_until 15 finds_no_problem 2
    # Small messages arrive, and large ones are lost.
    filter large "$(from_to 1 3 'meta length > 1000')"
    problem_at 1 mtu "node 2 .*answers small messages"
    filter_ends large
    link 3 down
    wait_until 20 problem_at 1 network "node 2 .*is not reached"
    expect_fail "node 2 is not reached" on 1 "$FOREBAY" check "$WORK/1" --all --no-drives
    link 3 up
    wait_until 60 healthy 1
    on 1 "$FOREBAY" check "$WORK/1"
}
# The check of all machines, at a node.
finds_no_problem() {
    local found=$WORK/found
    on "$1" "$FOREBAY" check "$WORK/$1" --all --json >"$found"
    jq -c '.[].findings[] | select(.grade != "ok")' "$found"
    jq -e 'length == 3 and ([.[].node] == [0, 1, 2]) and all(.[]; ([.findings[] | select(.code == "network")] | length) == 2)' "$found" &&
        jq -e 'all(.[].findings[]; .grade != "problem" and ((.grade == "warning") == (.cost != "" and .advice != "")))' "$found"
}
# problem_at NODE CODE PATTERN: what the check of a node finds, and nothing else that is as grave.
problem_at() {
    local status=0 found
    found=$(on "$1" "$FOREBAY" check "$WORK/$1" --no-drives --json) || status=$?
    [ "$status" = 1 ] && jq -e --arg code "$2" --arg pattern "$3" '[.[].findings[] | select(.grade == "problem")] | length == 1 and .[0].code == $code and (.[0].found | test($pattern))' <<<"$found"
}

whole() {
    local node
    on 1 timeout 200 "$FOREBAY" fsck "$WORK/1" </dev/null
    for node in 3 2 1; do on "$node" timeout 120 "$FOREBAY" stop "$WORK/$node" </dev/null; done
    not mounted 2
    for node in 1 2 3; do machine_is_dead "$node"; done
    for node in 1 2 3; do member_start "$node"; done
    wait_until 60 healthy 1
    wait_until 30 mounted 2
    same_tree "$WORK/tree" "$WORK/2/mnt/tree"
}

check "a node with an address starts" begin || exit 1
check "two machines join" join_two || exit 1
check "bad tokens and places are refused, and say why" bad_tokens
check "strangers get nothing" strangers
check "4+2 over three machines survives one of them" spread || exit 1
check "one namespace on three machines, by S3 too" one_namespace || exit 1
check "kernels that change names of one directory do not wait for one another" names
check "S3 at every node, with the same users" s3_everywhere
check "a machine without drives takes part and is removed" without_drives
check "of copies of a node's directory, one runs" copies
check "drives and addresses of another node change" orders_from_elsewhere
check "new data goes to the node that writes it" local_writes
check "a filesystem is for some nodes, and moves to others" some_nodes
check "machines say what is wrong with them and the ways to others" look_around
check "a machine dies while others work" lose_machine
check "the process of a node is killed beside its mount" lose_process
check "the number of a request is in the logs of all nodes that work on it" traced
check "two machines that do not reach each other go through the third" lose_pair
check "the machine with the metadata dies and comes back" lose_owner
check "two of three machines are away: everything waits" lose_two
check "all is whole, and starts again as it was" whole
