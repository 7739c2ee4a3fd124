#!/usr/bin/env bash
# SQLite: byte-range locks, fsync, truncation, shared memory in WAL mode; two writers at once.
source "$(dirname "$0")/../lib.sh"
TRANSACTIONS=$([ "$LONG" = 1 ] && echo 1000 || echo 50)
ROWS=40

# write_rows DATABASE WRITER: writes one line to $WORK/acknowledged for every committed transaction.
write_rows() {
    local i
    for ((i = 0; i < TRANSACTIONS; i++)); do
        # In journal mode `delete`, a transaction ends with the name of its journal.
        sqlite3 -cmd '.timeout 30000' -cmd 'PRAGMA synchronous=EXTRA' "$1" "
            BEGIN IMMEDIATE;
            WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < $ROWS)
            INSERT INTO rows(writer, data) SELECT $2, randomblob(500) FROM n;
            UPDATE counters SET count = count + $ROWS WHERE writer = $2;
            COMMIT;"
        echo "$2" >>"$WORK/acknowledged"
    done
}

check_database() {
    [ "$(sqlite3 "$1" 'PRAGMA integrity_check')" = ok ]
    [ "$(sqlite3 "$1" 'SELECT count(*) FROM rows')" = $((2 * TRANSACTIONS * ROWS)) ]
    [ "$(sqlite3 "$1" 'SELECT sum(count) FROM counters')" = $((2 * TRANSACTIONS * ROWS)) ]
}

two_writers() {
    local mode=$1 database=$WORK/n/mnt/$1.db first second
    sqlite3 "$database" "PRAGMA journal_mode = $mode;
        CREATE TABLE rows(id INTEGER PRIMARY KEY, writer INTEGER, data BLOB);
        CREATE TABLE counters(writer INTEGER PRIMARY KEY, count INTEGER);
        INSERT INTO counters VALUES (1, 0), (2, 0);"
    write_rows "$database" 1 &
    first=$!
    write_rows "$database" 2 &
    second=$!
    wait "$first"
    wait "$second"
    check_database "$database"
}

# Committed transactions survive a crash; the transaction under way is complete or absent.
crash_between() {
    local mode=$1 database=$WORK/n/mnt/$1.db writer total
    : >"$WORK/acknowledged"
    write_rows "$database" 1 &
    writer=$!
    sleep 1
    node_kill n
    wait "$writer" || true
    node_start n
    [ "$(sqlite3 "$database" 'PRAGMA integrity_check')" = ok ]
    total=$(sqlite3 "$database" 'SELECT count(*) FROM rows')
    [ "$total" = "$(sqlite3 "$database" 'SELECT sum(count) FROM counters')" ]
    echo "rows: $total, acknowledged: $(((2 * TRANSACTIONS + $(wc -l <"$WORK/acknowledged")) * ROWS))"
    [ "$total" -ge $(((2 * TRANSACTIONS + $(wc -l <"$WORK/acknowledged")) * ROWS)) ]
}

check "the node starts" node_start n --drives 6 --drive-size 512M --profile 4+2 || exit 0
for mode in delete wal; do
    check "two writers, journal mode $mode" two_writers $mode &&
        check "a crash under a writer, journal mode $mode" crash_between $mode
done
check "the node stops" node_stop n
exit 0
