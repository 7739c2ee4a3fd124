#!/usr/bin/env bash
# Three machines whose metadata is in a PostgreSQL with a synchronous standby, on two more machines. The owner of the metadata dies, the
# database is killed, and its standby takes its place: no program sees an error, and nothing that was acknowledged is lost.
LIMIT_S=$([ "${FOREBAY_TEST_LONG:-0}" = 1 ] && echo 1800 || echo 300)
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
source "$(dirname "$0")/../machines.sh"
source "$(dirname "$0")/../databases.sh"
# Nodes are on the first three.
NODES=(1 2 3 4 5)
ETCD=$ENGINE
ROUNDS=$([ "$LONG" = 1 ] && echo 10 || echo 1)
# As the nodes are given it: password, prefix and more go behind.
ENGINE="postgres://$(address 4):5432,$(address 5):5432/forebay?password-file=$WORK/password"
# The machines with the primary and with its standby.
PRIMARY=4 STANDBY=5

another() { printf '%s\n' 1 2 3 | grep -vx "$1" | head -1; }
log_at() { on "$1" timeout 30 "$FOREBAY" log show "$WORK/$1" --json | jq -r .at; }

# --- checks --------------------------------------------------------------------------------------------------------

refused() {
    local try="on 1 timeout 60 $FOREBAY start $WORK/x --address $(address 1) --log"
    database_make 4
    expect_fail "postgres://HOST:PORT" $try "postgres://$(address 4):5432"
    expect_fail "no parameter" $try "$ENGINE&password=x"
    expect_fail "single=yes" $try "$ENGINE"
    database_follow 5 4
    expect_fail "no primary" $try "${ENGINE/$(address 4):5432,/}"
    expect_fail "password" $try "${ENGINE%\?*}"
    expect_fail "cannot read" $try "$ENGINE-of-others"
    not test -e "$WORK/x/identity/membership.json"
    rm -rf "$WORK/x"
}

begin() {
    local node token
    for node in 1 2 3; do echo "$WORK/$node" >>"$WORK/.nodes"; done
    on 1 timeout 120 "$FOREBAY" start "$WORK/1" --log "$ENGINE&prefix=test" --drives 2 --drive-size 512MiB --profile r2 \
        --memory "$MEMORY" --address "$(address 1)" </dev/null
    expect_fail "another cluster" on 2 "$FOREBAY" start "$WORK/x" --log "$ENGINE&prefix=test" --address "$(address 2)"
    rm -rf "$WORK/x"
    token=$(on 1 "$FOREBAY" token create "$WORK/1" --uses 2)
    for node in 2 3; do
        on "$node" timeout 120 "$FOREBAY" join "$token" "$WORK/$node" --drives 2 --drive-size 512MiB --name "n$node" </dev/null
        on "$node" "$FOREBAY" mount "$WORK/$node" "$WORK/$node/mnt"
    done
    on 2 "$FOREBAY" fs set "$WORK/2" main --profile 4+2
    stage_tree 200 "$WORK/tree"
    cp -a "$WORK/tree" "$WORK/2/mnt/tree"
    sync_files "$WORK/2/mnt/tree"
    wait_until 60 healthy 3
    for node in 1 2 3; do same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
    [ "$(log_at 3)" = "$ENGINE&prefix=test" ]
}

owner_machine_dies() {
    local round here other
    for ((round = 0; round < ROUNDS; round++)); do
        here=$(owner 2) || here=$(owner 3)
        other=$(another "$here")
        beside "$other" machine_kill "$here"
        owner_is_not "$other" "$here"
        member_start "$here"
        wait_until 30 mounted "$here"
        wait_until 90 healthy "$here"
        same_tree "$WORK/tree" "$WORK/$here/mnt/tree"
    done
}

# Programs wait, and go on.
database_dies() {
    local here
    here=$(owner 1)
    beside "$here" database_dies_now "$here"
    wait_until 90 healthy "$here"
}
# The owner says so.
database_dies_now() {
    local away=0
    database_kill "$PRIMARY"
    wait_until 15 engine_is_away "$1" || away=1
    database_start "$PRIMARY"
    return "$away"
}
engine_is_away() { status "$1" | jq -e 'any(.problems[]; contains("engine with the logs does not answer"))' >/dev/null; }

standby_is_away() {
    beside 2 standby_is_away_now
    wait_until 90 healthy 2
}
standby_is_away_now() {
    database_kill "$STANDBY"
    sleep 2
    database_start "$STANDBY"
}

# The machine of the primary is lost. Its standby takes its place, and gets a standby of its own there.
primary_is_replaced() {
    beside 3 primary_is_replaced_now
    wait_until 90 healthy 3
    for node in 1 2 3; do same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
}
primary_is_replaced_now() {
    machine_kill "$PRIMARY"
    database_promote "$STANDBY"
    DATABASE=postgres sql "$STANDBY" "ALTER SYSTEM SET synchronous_standby_names = '*'"
    DATABASE=postgres sql "$STANDBY" "SELECT pg_reload_conf()" >/dev/null
    database_follow "$PRIMARY" "$STANDBY"
}

# A cluster with its logs in files moves them, beside a program.
moves() {
    local dir=$WORK/k
    echo "$dir" >>"$WORK/.nodes"
    on 1 timeout 120 "$FOREBAY" start "$dir" --drives 1 --drive-size 256MiB --mount "$dir/mnt" --mount-options process=own \
        --memory "$MEMORY" --address "$(address 1):7799" --s3 127.0.0.1:0 </dev/null
    expect_fail "of another cluster.*DELETE FROM forebay_moves" on 1 timeout 60 "$FOREBAY" log move "$dir" "$ENGINE&prefix=test"
    under k on 1 timeout 60 "$FOREBAY" log move "$dir" "$ENGINE&prefix=moved"
    [ "$(on 1 "$FOREBAY" log show "$dir" --json | jq -r .at)" = "$ENGINE&prefix=moved" ]
    not ls "$dir"/meta/ledger-*/log/*.log
    on 1 timeout 60 "$FOREBAY" stop "$dir" </dev/null
    on 1 timeout 60 "$FOREBAY" start "$dir" </dev/null
    on 1 timeout 200 "$FOREBAY" fsck "$dir" </dev/null
    on 1 timeout 60 "$FOREBAY" stop "$dir" </dev/null
}

# To an etcd and back, while programs work.
etcd_and_back() {
    local node
    for node in 1 2 3; do etcd_start "$node"; done
    for node in 1 2 3; do wait_until 30 etcd_answers "$node"; done
    beside 2 moves_to "$ETCD?prefix=test"
    wait_until 60 healthy 1
    beside 3 moves_to "$ENGINE&prefix=back"
    wait_until 60 healthy 2
    for node in 1 2 3; do same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
}
moves_to() { on 3 timeout 150 "$FOREBAY" log move "$WORK/3" "$1" </dev/null && [ "$(log_at 2)" = "$1" ]; }

whole() {
    local node
    wait_until 90 healthy 2
    on 2 timeout 200 "$FOREBAY" fsck "$WORK/2" </dev/null
    for node in 3 1 2; do on "$node" timeout 120 "$FOREBAY" stop "$WORK/$node" </dev/null; done
    for node in 1 2 3; do member_start "$node"; done
    wait_until 90 healthy 3
    for node in 1 2 3; do wait_until 30 mounted "$node" && same_tree "$WORK/tree" "$WORK/$node/mnt/tree"; done
}

[ -n "$DATABASE_BIN" ] || { failed "PostgreSQL is installed"; exit 0; }
machines_begin
check "servers that may lose logs are refused, and say why" refused || exit 1
check "three machines, their metadata in PostgreSQL" begin || exit 1
check "the owner's machine dies" owner_machine_dies
check "the database is killed and comes back" database_dies
check "the standby of the database is away" standby_is_away
check "the standby takes the place of the primary" primary_is_replaced && PRIMARY=5 STANDBY=4
check "logs move from files" moves
check "logs move to an etcd and back" etcd_and_back
check "all is whole, and starts again as it was" whole
