//! The statements, and what they answer: what `docs/formats/log.md` draws.

use base::{Epoch, Seq};
use tokio_postgres::Row;

use super::super::entry::FORMAT;
use super::super::{Fence, LogError, Sealed};

/// Whether the tables are there.
pub(super) const ARE_TABLES_THERE: &str = "SELECT to_regclass('forebay_moves') IS NOT NULL";

/// Makes the tables, in one transaction. Of several nodes one makes them and the others wait.
/// Entries are stored as they are: they hardly compress, and would cost time. Rows of logs change often, and have room for that.
pub(super) const MAKE_TABLES: &str = "
SELECT pg_advisory_xact_lock(5144752318962274);
CREATE TABLE IF NOT EXISTS forebay_logs (
    id bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    prefix text NOT NULL,
    ledger bigint NOT NULL,
    format smallint NOT NULL DEFAULT 1,
    epoch bigint NOT NULL DEFAULT 0,
    nonce bigint NOT NULL DEFAULT 0,
    tail bigint NOT NULL DEFAULT 0,
    first bigint NOT NULL DEFAULT 1,
    alive bigint NOT NULL DEFAULT 0,
    seals bigint NOT NULL DEFAULT 0,
    looks bigint NOT NULL DEFAULT 0,
    held boolean NOT NULL DEFAULT false,
    PRIMARY KEY (prefix, ledger)
) WITH (fillfactor = 20);
CREATE TABLE IF NOT EXISTS forebay_entries (
    log bigint NOT NULL,
    seq bigint NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (log, seq)
);
ALTER TABLE forebay_entries ALTER COLUMN value SET STORAGE EXTERNAL;
CREATE TABLE IF NOT EXISTS forebay_moves (
    prefix text PRIMARY KEY,
    format smallint NOT NULL DEFAULT 1,
    number bigint NOT NULL
)";

/// Makes the row of a log that has none.
pub(super) const MAKE_LOG: &str =
    "INSERT INTO forebay_logs (prefix, ledger) VALUES ($1, $2) ON CONFLICT DO NOTHING";

/// Is true while the seal with epoch $3 and nonce $4 is the last.
const IS_OWNER: &str = "epoch = $3 AND nonce = $4";

/// Changes the row of a log if the condition holds, and answers what is there then. The row is written in any case: the answer waits
/// for the standby, so nothing is told that a failover could undo.
pub(super) fn change(condition: &str, changes: &[(&str, &str)]) -> String {
    let changes = changes
        .iter()
        .map(|(column, value)| format!(", {column} = CASE WHEN {condition} THEN {value} ELSE {column} END"));
    format!(
        "UPDATE forebay_logs SET looks = looks + 1, held = ({condition}){} WHERE prefix = $1 AND ledger = $2 \
         RETURNING id, format, epoch, nonce, tail, first, alive, held",
        changes.collect::<String>()
    )
}

/// Changes nothing but the count of looks.
pub(super) fn look() -> String {
    change("true", &[])
}

/// Seals a log whose last seal has epoch $3 and nonce $4 with epoch $5 and nonce $6.
pub(super) fn seal() -> String {
    change(IS_OWNER, &[("epoch", "$5"), ("nonce", "$6"), ("seals", "seals + 1")])
}

pub(super) fn renew() -> String {
    change(IS_OWNER, &[("alive", "alive + 1")])
}

/// Appends the values $6 behind the entry $5, if that is the last.
pub(super) fn append() -> String {
    let condition = format!("{IS_OWNER} AND tail = $5");
    let changed = change(&condition, &[("tail", "tail + cardinality($6::bytea[])")]);
    format!(
        "WITH changed AS ({changed}), \
         added AS (INSERT INTO forebay_entries (log, seq, value) \
         SELECT changed.id, $5 + given.place, given.value \
         FROM changed, unnest($6::bytea[]) WITH ORDINALITY AS given (value, place) WHERE changed.held) \
         SELECT * FROM changed"
    )
}

/// Deletes the entries $5 to $6.
pub(super) fn trim() -> String {
    let condition = format!("{IS_OWNER} AND tail >= $6");
    let changed = change(&condition, &[("first", "greatest(first, $6 + 1)")]);
    format!(
        "WITH changed AS ({changed}), \
         gone AS (DELETE FROM forebay_entries USING changed \
         WHERE changed.held AND log = changed.id AND seq BETWEEN $5 AND $6) \
         SELECT * FROM changed"
    )
}

/// A page of entries: from $3 to $4, up to $5 of them, and up to $6 bytes and one entry more. All at one moment, with the ends of the
/// log. Without entries the answer is one row.
pub(super) const PAGE: &str = "
SELECT l.format, l.tail, l.first, e.seq, e.value
FROM forebay_logs l LEFT JOIN (
    SELECT log, seq, value FROM (
        SELECT log, seq, value, sum(octet_length(value)) OVER (ORDER BY seq) - octet_length(value) AS before
        FROM (
            SELECT log, seq, value FROM forebay_entries
            WHERE log = (SELECT id FROM forebay_logs WHERE prefix = $1 AND ledger = $2) AND seq BETWEEN $3 AND $4
            ORDER BY seq LIMIT $5
        ) AS next
    ) AS sized WHERE before < $6
) AS e ON e.log = l.id
WHERE l.prefix = $1 AND l.ledger = $2 ORDER BY e.seq";

/// The row of a log.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    pub(super) fence: Fence,
    /// The oldest entry that it holds, or would hold.
    pub(super) first: Seq,
    /// Whether the condition of the change held.
    pub(super) held: bool,
}

impl Found {
    /// Of the answer to a change.
    pub(super) fn read(rows: &[Row]) -> Result<Self, LogError> {
        let row = rows.first().ok_or_else(gone)?;
        check_format(row)?;
        let (tail, first) = (Seq(number(row, "tail")?), Seq(number(row, "first")?));
        if first.0 == 0 || first.0 > tail.0 + 1 {
            return Err(LogError::Damaged(format!("a log begins behind its end: first={first} tail={tail}")));
        }
        let (epoch, nonce) = (Epoch(number(row, "epoch")?), number(row, "nonce")?);
        let fence = Fence { epoch, nonce, tail, alive: number(row, "alive")? };
        Ok(Self { fence, first, held: field(row, "held")? })
    }

    pub(super) fn owner(&self) -> Sealed {
        Sealed { epoch: self.fence.epoch, nonce: self.fence.nonce }
    }
}

pub(super) fn gone() -> LogError {
    LogError::Damaged("its row in PostgreSQL is gone".to_owned())
}

pub(super) fn check_format(row: &Row) -> Result<(), LogError> {
    match field::<i16>(row, "format")? {
        format if format == i16::from(FORMAT) => Ok(()),
        newer => Err(LogError::NewerFormat(format!("its row in PostgreSQL has format {newer}"))),
    }
}

/// A number of 64 bits without a sign, as PostgreSQL keeps it.
pub(super) fn number(row: &Row, name: &str) -> Result<u64, LogError> {
    Ok(field::<i64>(row, name)?.cast_unsigned())
}

pub(super) fn field<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a Row,
    name: &str,
) -> Result<T, LogError> {
    row.try_get(name).map_err(|error| LogError::Damaged(format!("column {name} in PostgreSQL: {error}")))
}
