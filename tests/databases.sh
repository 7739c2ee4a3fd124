# PostgreSQL on machines of a test, with a database for logs: source it after machines.sh. One machine has the primary, another one its
# synchronous standby.
DATABASE_BIN=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1)
DATABASES=$WORK/databases

# The server refuses to run as root.
as_postgres() { (cd / && setpriv --reuid postgres --regid postgres --init-groups "$@"); }
# sql MACHINE STATEMENT: as the operator, by a socket: a machine's network may be down.
sql() { as_postgres "$DATABASE_BIN/psql" -XqAt -h "$DATABASES/$1" -d "${DATABASE:-forebay}" -c "$2"; }

# database_make MACHINE: a primary without a standby.
database_make() {
    chmod 755 "$WORK"
    mkdir -p "$DATABASES/$1"
    echo "secret of the tests" >"$WORK/password"
    chown -R postgres "$DATABASES"
    as_postgres "$DATABASE_BIN/initdb" -U postgres --no-sync --auth-local trust -D "$DATABASES/$1/data" >/dev/null
    cat >>"$DATABASES/$1/data/postgresql.conf" <<'CONF'
shared_buffers = 16MB
max_wal_size = 128MB
wal_retrieve_retry_interval = 100ms
CONF
    echo "host forebay forebay 192.0.2.0/24 scram-sha-256" >>"$DATABASES/$1/data/pg_hba.conf"
    database_start "$1"
    DATABASE=postgres sql "$1" "CREATE ROLE forebay LOGIN PASSWORD '$(cat "$WORK/password")'"
    DATABASE=postgres sql "$1" "CREATE DATABASE forebay OWNER forebay"
}

database_start() {
    setsid nsenter --net="/run/netns/$PREFIX-$1" setpriv --reuid postgres --regid postgres --init-groups \
        "$DATABASE_BIN/postgres" -D "$DATABASES/$1/data" -k "$DATABASES/$1" -c "listen_addresses=$(address "$1")" \
        </dev/null >>"$WORK/database$1.log" 2>&1 &
    disown
    wait_until 60 database_answers "$1"
}
database_answers() { DATABASE=postgres sql "$1" "SELECT 1" >/dev/null 2>&1; }

# Ends a server and all its processes at once.
database_kill() {
    local pid
    pid=$(head -n 1 "$DATABASES/$1/data/postmaster.pid")
    kill -KILL "$pid"
    wait_until 30 database_is_gone "$1"
    rm -f "$DATABASES/$1/data/postmaster.pid"
}
database_is_gone() { not machine_has_database "$1"; }
machine_has_database() { ip netns pids "$PREFIX-$1" | xargs -r ps -o comm= -p 2>/dev/null | grep -q postgres; }

# database_follow MACHINE PRIMARY: it becomes the synchronous standby of the primary on another machine.
database_follow() {
    rm -rf "${DATABASES:?}/$1"
    mkdir "$DATABASES/$1"
    chown postgres "$DATABASES/$1"
    as_postgres "$DATABASE_BIN/pg_basebackup" -R -X stream -c fast --no-sync -U postgres -h "$DATABASES/$2" -D "$DATABASES/$1/data"
    database_start "$1"
    DATABASE=postgres sql "$2" "ALTER SYSTEM SET synchronous_standby_names = '*'"
    DATABASE=postgres sql "$2" "SELECT pg_reload_conf()" >/dev/null
    wait_until 60 database_is_followed "$2"
}
database_is_followed() { [ "$(DATABASE=postgres sql "$1" "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'")" = 1 ]; }
database_promote() { as_postgres "$DATABASE_BIN/pg_ctl" promote -w -D "$DATABASES/$1/data" >/dev/null; }
