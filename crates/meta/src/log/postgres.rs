//! The log of a ledger in PostgreSQL: an engine that several nodes reach.
//!
//! An append is one statement, and so is a seal. What must be true for it is compared in the row of the log, which the statement
//! writes. So nothing that this side remembers can hide that the log is another's, or went backwards. What tells the end of a log
//! writes as well, and so waits for the synchronous standby: after a failover it is still true. The format is in
//! `docs/formats/log.md`.

mod client;
mod moving;
mod session;
mod statements;
#[cfg(test)]
pub(super) mod tests;
mod tls;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use base::{Epoch, LedgerId, Seq};
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use wire::BoxFuture;

use super::entry::{self, ENTRY_BYTES_MAX};
use super::remote::{APPEND, LEASE, LONG, LogEngine, Patience, RENEWAL, SEAL_TRIES, SHORT};
use super::seals::Seals;
use super::{AppendError, Fence, LedgerLog, LogCaps, LogEntry, LogError, Room, Sealed, Tail};
use client::{CallError, Client};
use session::Parameter;
use statements::Found;

/// Entries that one statement deletes. Other changes of the log wait for it.
const TRIM_STEP: u64 = 256;
/// Limits of a page of entries. One entry may go beyond the limit of bytes.
const PAGE_ENTRIES_MAX: i64 = 4096;
const PAGE_BYTES_MAX: usize = 16 << 20;

/// How the servers of PostgreSQL are reached.
#[derive(Clone, Default)]
pub struct PostgresOptions {
    /// The servers, `host:port`: the primary and those that may become it.
    pub hosts: Vec<String>,
    /// The database. It has the tables of all clusters that use it.
    pub database: String,
    /// The role, which may make tables or finds them made.
    pub user: String,
    /// Its password, if the servers ask for one.
    pub password: Option<String>,
    /// The authorities that may have signed the servers' certificates, as PEM. With it, only TLS is used.
    pub ca_pem: Option<Vec<u8>>,
    /// What all logs are filed under, such as `forebay/<cluster>`. Nothing else may use it.
    pub prefix: String,
    /// A primary without a synchronous standby is accepted. Logs are lost with its machine.
    pub is_single: bool,
}

/// A database of PostgreSQL that several logs share.
#[derive(Clone)]
pub struct Postgres {
    client: Arc<Client>,
    prefix: String,
}

impl Postgres {
    /// Connects to the primary, and makes the tables if they are missing. The caller's runtime carries out all statements, so it must
    /// have threads of its own and time and network enabled, and last as long as the logs. Connections come back by themselves.
    ///
    /// # Errors
    /// `Io` if no primary answers, it is older than 13, may lose what it confirms, or a setting is wrong.
    pub async fn connect(options: &PostgresOptions) -> Result<Self, LogError> {
        let client = Arc::new(Client::connect(options).await?);
        let rows = client.repeat(statements::ARE_TABLES_THERE, &[], LONG).await?;
        if !rows.first().is_some_and(|row| row.try_get(0).unwrap_or(false)) {
            client.batch(statements::MAKE_TABLES, LONG.total).await?;
        }
        Ok(Self { client, prefix: options.prefix.clone() })
    }

    /// Makes the row of a log, if there is none.
    async fn make_log(&self, ledger: LedgerId) -> Result<(), LogError> {
        let parameters: [Parameter<'_>; 2] = [(&self.prefix, Type::TEXT), (&id(ledger), Type::INT8)];
        self.client.repeat(statements::MAKE_LOG, &parameters, SHORT).await?;
        Ok(())
    }

    /// Carries work out on the client's runtime.
    async fn run<T, W>(&self, work: impl FnOnce(Self) -> W) -> Result<T, LogError>
    where
        T: Send + 'static,
        W: Future<Output = Result<T, LogError>> + Send + 'static,
    {
        self.client.run(work(self.clone())).await?
    }
}

impl LogEngine for Postgres {
    fn open(&self, ledger: LedgerId) -> BoxFuture<'_, Result<Arc<dyn LedgerLog>, LogError>> {
        Box::pin(async move { Ok(Arc::new(PostgresLog::open(self, ledger).await?) as Arc<dyn LedgerLog>) })
    }

    fn claim(&self, number: u64, first: (LedgerId, Epoch)) -> BoxFuture<'_, Result<bool, LogError>> {
        Box::pin(self.run(move |engine| async move { engine.claim_place(number, first).await }))
    }

    fn is_free(&self, number: u64) -> BoxFuture<'_, Result<bool, LogError>> {
        Box::pin(self.run(move |engine| async move { engine.is_place_free(number).await }))
    }

    fn system(&self) -> String {
        format!("PostgreSQL system {}", self.client.system())
    }

    fn number(&self) -> BoxFuture<'_, Result<u64, LogError>> {
        Box::pin(self.run(|engine| async move { engine.number_of_move().await }))
    }

    fn begin(
        &self,
        number: u64,
        ledger: LedgerId,
        end: (Epoch, Seq),
    ) -> BoxFuture<'_, Result<bool, LogError>> {
        Box::pin(self.run(move |engine| async move { engine.begin_log(number, ledger, end).await }))
    }

    /// A server answers if it is a primary that may be used, or a standby.
    fn members(&self, limit: Duration) -> BoxFuture<'_, Vec<(String, bool)>> {
        let client = self.client.clone();
        Box::pin(
            async move { self.client.run(async move { client.look(limit).await }).await.unwrap_or_default() },
        )
    }
}

/// See the module.
pub struct PostgresLog {
    inner: Arc<Inner>,
}

struct Inner {
    client: Arc<Client>,
    prefix: String,
    ledger: i64,
    seals: Seals,
    /// A lower bound of the oldest entry.
    first: AtomicU64,
    /// Entries up to this one are at the standby too. A read gives no later ones: a failover could take them back.
    safe: AtomicU64,
    is_full: AtomicBool,
}

/// The number of a ledger as PostgreSQL keeps it.
fn id(ledger: LedgerId) -> i64 {
    i64::from(ledger.0)
}

/// The number of an entry as PostgreSQL keeps it. No log gets longer.
fn position(seq: Seq) -> i64 {
    i64::try_from(seq.0).unwrap_or(i64::MAX)
}

impl PostgresLog {
    /// The log of a ledger. It may be new.
    ///
    /// # Errors
    /// `Io` if PostgreSQL does not answer, `Damaged` or `NewerFormat` if what it has cannot be used.
    pub async fn open(engine: &Postgres, ledger: LedgerId) -> Result<Self, LogError> {
        let inner = Inner {
            client: engine.client.clone(),
            prefix: engine.prefix.clone(),
            ledger: id(ledger),
            seals: Seals::default(),
            first: AtomicU64::new(1),
            safe: AtomicU64::new(0),
            is_full: AtomicBool::new(false),
        };
        engine.run(move |engine| async move { engine.make_log(ledger).await }).await?;
        let log = Self { inner: Arc::new(inner) };
        log.run(|inner| async move { inner.look(SHORT).await }).await?;
        Ok(log)
    }

    /// Carries work out on the client's runtime.
    async fn run<T, W>(&self, work: impl FnOnce(Arc<Inner>) -> W) -> Result<T, LogError>
    where
        T: Send + 'static,
        W: Future<Output = Result<T, LogError>> + Send + 'static,
    {
        self.inner.client.run(work(self.inner.clone())).await?
    }
}

impl LedgerLog for PostgresLog {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        Box::pin(self.run(move |inner| async move { inner.seal(Sealed { epoch, nonce }).await }))
    }

    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        Box::pin(self.run(|inner| async move { Ok(inner.look(SHORT).await?.fence) }))
    }

    fn renew(&self, owner: Sealed) -> BoxFuture<'_, Result<(), LogError>> {
        Box::pin(self.run(move |inner| async move { inner.renew(owner).await }))
    }

    fn append(
        &self,
        epoch: Epoch,
        first: Seq,
        batches: Vec<Vec<u8>>,
    ) -> BoxFuture<'_, Result<(), AppendError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let appended = self.inner.client.run(async move { inner.append(epoch, first, &batches).await });
            appended.await.map_err(AppendError::Unknown)?
        })
    }

    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
        Box::pin(self.run(move |inner| async move { inner.read(from, limit_bytes).await }))
    }

    fn trim(&self, up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
        Box::pin(self.run(move |inner| async move { inner.trim(up_to).await }))
    }

    /// As of the log in etcd.
    fn caps(&self) -> LogCaps {
        LogCaps { entry_bytes_max: ENTRY_BYTES_MAX, batches_per_append: 1, lease: Some(LEASE) }
    }

    /// The oldest entry when this object last looked.
    fn first(&self) -> Seq {
        Seq(self.inner.first.load(Ordering::Relaxed))
    }

    fn room(&self) -> Room {
        if self.inner.is_full.load(Ordering::Relaxed) { Room::Reserve } else { Room::Enough }
    }
}

impl Inner {
    /// The parameters of a statement that changes the row of the log.
    fn parameters<'a>(&'a self, more: &[Parameter<'a>]) -> Vec<Parameter<'a>> {
        let log: [Parameter<'_>; 2] = [(&self.prefix, Type::TEXT), (&self.ledger, Type::INT8)];
        log.into_iter().chain(more.iter().cloned()).collect()
    }

    /// The answer to a change, which the standby has.
    fn found(&self, rows: &[Row]) -> Result<Found, LogError> {
        let found = Found::read(rows)?;
        self.first.fetch_max(found.first.0, Ordering::Relaxed);
        self.safe.fetch_max(found.fence.tail.0, Ordering::Relaxed);
        Ok(found)
    }

    async fn look(&self, patience: Patience) -> Result<Found, LogError> {
        let rows = self.client.repeat(&statements::look(), &self.parameters(&[]), patience).await?;
        self.found(&rows)
    }

    async fn seal(&self, owner: Sealed) -> Result<Tail, LogError> {
        let (epoch, nonce) = (owner.epoch.0.cast_signed(), owner.nonce.cast_signed());
        for _ in 0..SEAL_TRIES {
            let fence = self.look(SHORT).await?.fence;
            if owner.epoch <= fence.epoch {
                return Err(LogError::Fenced(fence.epoch));
            }
            let (last_epoch, last_nonce) = (fence.epoch.0.cast_signed(), fence.nonce.cast_signed());
            self.seals.attempt(owner);
            let numbers = [&last_epoch, &last_nonce, &epoch, &nonce];
            let parameters = self.parameters(&numbers.map(|number| (number as _, Type::INT8)));
            let found =
                self.found(&self.client.once(&statements::seal(), &parameters, SHORT.attempt).await?)?;
            if found.held {
                self.seals.done(owner);
                return Ok(Tail { seq: found.fence.tail });
            }
        }
        Err(io::Error::other("others seal the log all the time").into())
    }

    async fn renew(&self, owner: Sealed) -> Result<(), LogError> {
        let (epoch, nonce) = (owner.epoch.0.cast_signed(), owner.nonce.cast_signed());
        let parameters = self.parameters(&[(&epoch, Type::INT8), (&nonce, Type::INT8)]);
        let found = self.found(&self.client.repeat(&statements::renew(), &parameters, RENEWAL).await?)?;
        if found.held { Ok(()) } else { Err(LogError::Fenced(found.fence.epoch)) }
    }

    async fn append(&self, epoch: Epoch, first: Seq, batches: &[Vec<u8>]) -> Result<(), AppendError> {
        let unknown = |error: LogError| AppendError::Unknown(io::Error::other(error));
        entry::append_bytes(batches).ok_or(AppendError::TooLarge)?;
        let before = first.0.checked_sub(1).map(Seq);
        let (Some(owner), Some(before)) = (self.seals.find(|sealed| sealed.epoch == epoch), before) else {
            let fence = self.look(SHORT).await.map_err(unknown)?.fence;
            return Err(AppendError::Fenced(fence.epoch));
        };
        let encode = |(seq, batch): (u64, &Vec<u8>)| entry::encode_entry(Seq(seq), epoch, batch);
        let values: Vec<Vec<u8>> = (first.0..).zip(batches).map(encode).collect();
        let (nonce, sealed) = (owner.nonce.cast_signed(), epoch.0.cast_signed());
        let last = position(before);
        let parameters = self.parameters(&[
            (&sealed, Type::INT8),
            (&nonce, Type::INT8),
            (&last, Type::INT8),
            (&values, Type::BYTEA_ARRAY),
        ]);
        let rows = match self.client.once(&statements::append(), &parameters, APPEND).await {
            Ok(rows) => rows,
            Err(CallError::NoSpace(error)) => return Err(self.full(before, error).await),
            Err(CallError::Unknown(error)) => return Err(AppendError::Unknown(error)),
            Err(error) => return Err(unknown(error.into())),
        };
        let found = self.found(&rows).map_err(unknown)?;
        if !found.held {
            return Err(AppendError::Fenced(found.fence.epoch));
        }
        self.is_full.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// PostgreSQL reports that it has no room.
    async fn full(&self, before: Seq, error: io::Error) -> AppendError {
        self.is_full.store(true, Ordering::Relaxed);
        match self.look(SHORT).await {
            Ok(found) if found.fence.tail == before => AppendError::Full(error),
            _ => AppendError::Unknown(error),
        }
    }

    async fn read(&self, from: Seq, limit_bytes: usize) -> Result<Vec<LogEntry>, LogError> {
        let mut from = from;
        if from == Seq(0) {
            from = self.look(SHORT).await?.first;
        }
        let (page, tail) = self.read_page(from, limit_bytes).await?;
        if !page.is_empty() || tail < from {
            return Ok(page);
        }
        // There is more than what the standby was known to have.
        self.look(SHORT).await?;
        Ok(self.read_page(from, limit_bytes).await?.0)
    }

    /// The next safe entries, and the end of the log.
    async fn read_page(&self, from: Seq, limit_bytes: usize) -> Result<(Vec<LogEntry>, Seq), LogError> {
        let safe = Seq(self.safe.load(Ordering::Relaxed));
        let (next, last) = (position(from), position(safe));
        let bytes = limit_bytes.clamp(1, PAGE_BYTES_MAX) as i64;
        let parameters = self.parameters(&[
            (&next, Type::INT8),
            (&last, Type::INT8),
            (&PAGE_ENTRIES_MAX, Type::INT8),
            (&bytes, Type::INT8),
        ]);
        let rows = self.client.repeat(statements::PAGE, &parameters, LONG).await?;
        let row = rows.first().ok_or_else(statements::gone)?;
        statements::check_format(row)?;
        let tail = Seq(statements::number(row, "tail")?);
        let first = Seq(statements::number(row, "first")?);
        self.first.fetch_max(first.0, Ordering::Relaxed);
        if from < first {
            return Err(LogError::Damaged(format!("entries up to {} are trimmed", first.0 - 1)));
        }
        let mut page = Vec::new();
        for (row, seq) in rows.iter().zip(from.0..) {
            match statements::field::<Option<i64>>(row, "seq")? {
                None if from > tail.min(safe) => break,
                Some(found) if found.cast_unsigned() == seq => {}
                found => {
                    return Err(LogError::Damaged(format!(
                        "entry {seq} is missing in PostgreSQL: tail={tail} found={found:?}"
                    )));
                }
            }
            page.push(entry::decode_entry(Seq(seq), statements::field(row, "value")?)?);
        }
        Ok((page, tail))
    }

    async fn trim(&self, up_to: Seq) -> Result<(), LogError> {
        let mut first = self.first.load(Ordering::Relaxed);
        if up_to.0 < first {
            return Ok(());
        }
        let found = self.look(SHORT).await?;
        let last = found.owner();
        let owner = self.seals.find(|sealed| sealed == last).ok_or(LogError::Fenced(last.epoch))?;
        let (epoch, nonce) = (owner.epoch.0.cast_signed(), owner.nonce.cast_signed());
        let end = up_to.min(found.fence.tail).0 + 1;
        first = first.max(found.first.0);
        let started = Instant::now();
        while first < end && started.elapsed() < SHORT.total {
            let step = end.min(first + TRIM_STEP);
            let (oldest, newest) = (position(Seq(first)), position(Seq(step - 1)));
            let numbers = [&epoch, &nonce, &oldest, &newest];
            let parameters = self.parameters(&numbers.map(|number| (number as _, Type::INT8)));
            let found = self.found(&self.client.repeat(&statements::trim(), &parameters, SHORT).await?)?;
            if !found.held {
                return Err(LogError::Fenced(found.fence.epoch));
            }
            first = step;
        }
        Ok(())
    }
}
