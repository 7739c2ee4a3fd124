#!/usr/bin/env bash
# PostgreSQL with page checksums: pgbench, a crash of the database, a crash of the node, pg_amcheck, checksums of all pages.
source "$(dirname "$0")/../lib.sh"
LIMIT_S=600
TIME_S=$([ "$LONG" = 1 ] && echo 30 || echo 5)
SCALE=$([ "$LONG" = 1 ] && echo 10 || echo 2)
BIN=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1)
DATA=$WORK/n/mnt/data
SOCKETS=$WORK/sockets

as_postgres() { (cd / && setpriv --reuid postgres --regid postgres --init-groups "$@"); }
sql() { as_postgres "$BIN/psql" -h "$SOCKETS" -Atc "$1" postgres; }

prepare() {
    mkdir -p "$SOCKETS" "$DATA"
    chown postgres "$SOCKETS" "$DATA"
    chmod 755 "$WORK" "$WORK/n"
    chmod 700 "$DATA"
    as_postgres "$BIN/initdb" --data-checksums -D "$DATA" >/dev/null
}

# A socket in our own directory: no port is used.
database_start() {
    as_postgres "$BIN/pg_ctl" -w -t 120 -D "$DATA" -l "$SOCKETS/log" start \
        -o "-c listen_addresses= -c unix_socket_directories=$SOCKETS" || { tail -n 20 "$SOCKETS/log"; return 1; }
}

database_end() { as_postgres "$BIN/pg_ctl" -w -m fast -D "$DATA" stop; }

initialise() {
    database_start
    as_postgres "$BIN/pgbench" -h "$SOCKETS" -i -q -s "$SCALE" postgres
    sql "CREATE EXTENSION amcheck"
}

bench() { as_postgres "$BIN/pgbench" -h "$SOCKETS" -n -c 4 -j 2 -T "$TIME_S" postgres; }

# The sums of all tables agree if every transaction is complete.
consistent() {
    local sums
    sums=$(sql "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(bbalance) FROM pgbench_branches),
        (SELECT sum(tbalance) FROM pgbench_tellers), (SELECT coalesce(sum(delta), 0) FROM pgbench_history)")
    echo "sums: $sums"
    awk -F'|' '{ exit !($1 == $2 && $2 == $3 && $3 == $4) }' <<<"$sums"
    [ "$(sql 'SELECT count(*) FROM pgbench_accounts')" = $((SCALE * 100000)) ]
}

checked() {
    consistent
    as_postgres "$BIN/pg_amcheck" -h "$SOCKETS" --heapallindexed --parent-check postgres
    database_end
    as_postgres "$BIN/pg_checksums" --check -D "$DATA"
}

# crash COMMAND...: ends the database, or the node below it, under load.
crash() {
    local load history
    bench >"$WORK/bench.log" 2>&1 &
    load=$!
    sleep 3
    history=$(sql 'SELECT count(*) FROM pgbench_history')
    "$@"
    wait "$load" || true
    # Rows committed before the crash are there.
    database_start
    echo "committed before: $history, now: $(sql 'SELECT count(*) FROM pgbench_history')"
    [ "$(sql 'SELECT count(*) FROM pgbench_history')" -ge "$history" ]
    checked
    database_start
}

kill_database() {
    local pid
    pid=$(head -n 1 "$DATA/postmaster.pid")
    kill -KILL -- "$pid"
    # Its children notice that and end.
    wait_until 30 not pgrep -P "$pid" >/dev/null
    wait_until 30 not pgrep -u postgres -f "postgres: " >/dev/null || true
    rm -f "$DATA/postmaster.pid" "$SOCKETS"/.s.*
}

kill_node() {
    local pid
    pid=$(head -n 1 "$DATA/postmaster.pid")
    node_kill n
    kill -KILL -- "$pid" 2>/dev/null || true
    wait_until 30 not pgrep -u postgres -f "postgres: " >/dev/null || true
    node_start n
    rm -f "$DATA/postmaster.pid" "$SOCKETS"/.s.*
}

[ -n "$BIN" ] || { failed "PostgreSQL is installed"; exit 0; }
check "the node starts" node_start n --drives 6 --drive-size 1G --profile 4+2 || exit 0
check "a database with page checksums is made" prepare && check "pgbench fills it" initialise &&
    check "pgbench runs $TIME_S s" bench && check "its sums agree" consistent &&
    check "the database is killed under load" crash kill_database &&
    if [ "$PLAIN" = 1 ]; then skipped "the node is killed under load" "no node"; else
        check "the node is killed under load" crash kill_node
    fi
check "the database stops" eval 'database_end && as_postgres "$BIN/pg_checksums" --check -D "$DATA"'
check "the node stops" node_stop n
exit 0
