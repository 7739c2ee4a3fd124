//! The log of a ledger in etcd: an engine that several nodes reach.
//!
//! An append is one transaction, and so is a seal. What must be true for it is compared in etcd itself: the owner, whose key
//! only a seal writes, and the end of the log. So nothing that this side remembers can hide that the log is another's, or
//! went backwards. The format is in `docs/formats/log.md`.

mod client;
mod membership;
mod moving;
mod proto;
#[cfg(test)]
pub(super) mod tests;
mod values;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::env::Env;
use base::{Epoch, LedgerId, Seq};
use bytes::Bytes;
use tokio::time::Instant;
use wire::BoxFuture;

use super::entry::{self, ENTRY_BYTES_MAX};
use super::remote::{APPEND, LEASE, LONG, LogEngine, Patience, RENEWAL, SEAL_TRIES, SHORT};
use super::seals::Seals;
use super::{AppendError, Fence, LedgerLog, LogCaps, LogEntry, LogError, Room, Sealed, Tail};
use client::{CallError, Client};
use proto::{CompactionRequest, Compare, KeyValue, RangeRequest, RequestOp, TxnRequest, TxnResponse};
use values::Keys;

pub use membership::EtcdMember;

/// Entries in one answer: up to 32 MiB.
const ENTRIES_PER_RANGE: u64 = 32;
/// What entries are taken to have before the first was read.
const ENTRY_BYTES_GUESS: usize = 64 << 10;
/// Entries that one transaction deletes. Other requests wait for it.
const TRIM_STEP: u64 = 256;
/// A page of entries that took as long is not continued.
const PAGE: Duration = Duration::from_secs(2);

/// etcd keeps old versions and deleted keys until it is told to forget them: after this time, or this many bytes.
const COMPACT_EVERY: Duration = Duration::from_secs(300);
const COMPACT_BYTES: u64 = 256 << 20;

/// Certificates for members that are reached over TLS.
#[derive(Clone)]
pub struct EtcdTls {
    /// The authorities that may have signed the members' certificates, as PEM.
    pub ca_pem: Vec<u8>,
    /// Certificate and key of this node, as PEM, if etcd asks for them.
    pub identity_pem: Option<(Vec<u8>, Vec<u8>)>,
}

/// How a cluster of etcd is reached.
#[derive(Clone)]
pub struct EtcdOptions {
    /// Its members: `http://host:port`, or `https://host:port` with `tls`.
    pub endpoints: Vec<String>,
    /// For `https` only.
    pub tls: Option<EtcdTls>,
    /// What all keys begin with, such as `forebay/<cluster>`. Nothing else may use it.
    pub prefix: String,
}

/// A cluster of etcd that several logs share.
#[derive(Clone)]
pub struct Etcd {
    client: Arc<Client>,
    prefix: String,
    env: Env,
}

impl Etcd {
    /// Connects to a cluster. The caller's runtime carries out all requests, so it must have threads of its own and time
    /// and network enabled, and last as long as the logs. Connections come back by themselves.
    ///
    /// # Errors
    /// `Io` if no member answers, one is older than 3.4, or a setting is wrong; `Damaged` if members are of different
    /// clusters.
    pub async fn connect(options: &EtcdOptions, env: &Env) -> Result<Self, LogError> {
        let client = Arc::new(Client::connect(options).await?);
        Ok(Self { client, prefix: options.prefix.clone(), env: env.clone() })
    }
}

impl LogEngine for Etcd {
    fn open(&self, ledger: LedgerId) -> BoxFuture<'_, Result<Arc<dyn LedgerLog>, LogError>> {
        Box::pin(async move { Ok(Arc::new(EtcdLog::open(self, ledger).await?) as Arc<dyn LedgerLog>) })
    }

    fn claim(&self, number: u64, first: (LedgerId, Epoch)) -> BoxFuture<'_, Result<bool, LogError>> {
        Box::pin(self.claim_place(number, first))
    }

    fn is_free(&self, number: u64) -> BoxFuture<'_, Result<bool, LogError>> {
        Box::pin(self.is_place_free(number))
    }

    fn system(&self) -> String {
        format!("etcd cluster {:016x}", self.client.cluster_id())
    }

    fn number(&self) -> BoxFuture<'_, Result<u64, LogError>> {
        Box::pin(self.number_of_move())
    }

    fn begin(
        &self,
        number: u64,
        ledger: LedgerId,
        end: (Epoch, Seq),
    ) -> BoxFuture<'_, Result<bool, LogError>> {
        Box::pin(self.begin_log(number, ledger, end))
    }

    /// A member answers if it is connected to the others.
    fn members(&self, limit: Duration) -> BoxFuture<'_, Vec<(String, bool)>> {
        let client = self.client.clone();
        Box::pin(
            async move { self.client.run(async move { client.look(limit).await }).await.unwrap_or_default() },
        )
    }
}

/// See the module.
pub struct EtcdLog {
    inner: Arc<Inner>,
}

/// What etcd may forget, and since when.
#[derive(Default)]
struct History {
    revision: i64,
    noted_ns: u64,
    /// Bytes appended since.
    bytes: u64,
}

struct Inner {
    client: Arc<Client>,
    keys: Keys,
    env: Env,
    seals: Seals,
    /// A lower bound of the oldest entry.
    first: AtomicU64,
    is_full: AtomicBool,
    history: Mutex<History>,
}

/// The state of a log at one moment.
struct Snapshot {
    fence: Fence,
    /// The revision of the last change of the owner; 0 if there was none.
    owner_revision: i64,
    revision: i64,
}

impl EtcdLog {
    /// The log of a ledger. It may be new.
    ///
    /// # Errors
    /// `Io` if etcd does not answer, `Damaged` or `NewerFormat` if what it has cannot be used.
    pub async fn open(etcd: &Etcd, ledger: LedgerId) -> Result<Self, LogError> {
        let inner = Inner {
            client: etcd.client.clone(),
            keys: Keys::new(&etcd.prefix, ledger),
            env: etcd.env.clone(),
            seals: Seals::default(),
            first: AtomicU64::new(1),
            is_full: AtomicBool::new(false),
            history: Mutex::default(),
        };
        let log = Self { inner: Arc::new(inner) };
        log.run(|inner| async move { inner.find_first().await }).await?;
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

impl LedgerLog for EtcdLog {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        Box::pin(self.run(move |inner| async move { inner.seal(Sealed { epoch, nonce }).await }))
    }

    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        Box::pin(self.run(|inner| async move { Ok(inner.snapshot(SHORT).await?.fence) }))
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

    /// One batch in an append, because entries may be as large as a request. More of them are taken if they fit.
    fn caps(&self) -> LogCaps {
        LogCaps { entry_bytes_max: ENTRY_BYTES_MAX, batches_per_append: 1, lease: Some(LEASE) }
    }

    /// The oldest entry when this object last looked: when it was opened, trimmed the log or missed an entry.
    fn first(&self) -> Seq {
        Seq(self.inner.first.load(Ordering::Relaxed))
    }

    fn room(&self) -> Room {
        if self.inner.is_full.load(Ordering::Relaxed) { Room::Reserve } else { Room::Enough }
    }
}

impl Inner {
    /// Holds while this owner's seal is the last.
    fn is_owner(&self, owner: Sealed) -> Compare {
        Compare::value(self.keys.owner(), values::encode_owner(owner))
    }

    /// Reads what a snapshot needs.
    fn look(&self) -> Vec<RequestOp> {
        let keys = [self.keys.owner(), self.keys.tail(), self.keys.alive()];
        keys.into_iter().map(RequestOp::get).collect()
    }

    async fn snapshot(&self, patience: Patience) -> Result<Snapshot, LogError> {
        let look = TxnRequest { success: self.look(), ..TxnRequest::default() };
        self.snapshot_of(self.client.repeat(look, patience).await?)
    }

    /// The result of [`Self::look`].
    fn snapshot_of(&self, answer: TxnResponse) -> Result<Snapshot, LogError> {
        let revision = answer.revision();
        let mut ranges = answer.into_ranges();
        let mut next = || ranges.next().and_then(|kvs| kvs.into_iter().next());
        let (owner, tail, alive) = (next(), next(), next());
        let alive = alive.map_or(0, |kv| kv.version.unsigned_abs());
        let (sealed, tail, owner_revision) = match (owner, tail) {
            (None, None) => (Sealed { epoch: Epoch(0), nonce: 0 }, Seq(0), 0),
            (Some(owner), Some(tail)) => {
                let tail = values::decode_tail(&tail.value)?;
                (values::decode_owner(&owner.value)?, tail, owner.mod_revision)
            }
            _ => return Err(LogError::Damaged("etcd has only one of the keys owner and tail".to_owned())),
        };
        let fence = Fence { epoch: sealed.epoch, nonce: sealed.nonce, tail, alive };
        Ok(Snapshot { fence, owner_revision, revision })
    }

    async fn seal(&self, owner: Sealed) -> Result<Tail, LogError> {
        for _ in 0..SEAL_TRIES {
            let Snapshot { fence, owner_revision, .. } = self.snapshot(SHORT).await?;
            if owner.epoch <= fence.epoch {
                return Err(LogError::Fenced(fence.epoch));
            }
            let key = self.keys.owner();
            let mut success = vec![RequestOp::put(key.clone(), values::encode_owner(owner))];
            if owner_revision == 0 {
                success.push(RequestOp::put(self.keys.tail(), values::encode_tail(Seq(0))));
            }
            success.extend(self.look());
            let compare = vec![Compare::mod_revision(key, owner_revision)];
            self.seals.attempt(owner);
            let answer =
                self.client.once(TxnRequest { compare, success, failure: vec![] }, SHORT.attempt).await?;
            if answer.succeeded {
                self.seals.done(owner);
                return Ok(Tail { seq: self.snapshot_of(answer)?.fence.tail });
            }
        }
        Err(io::Error::other("others seal the log all the time").into())
    }

    async fn renew(&self, owner: Sealed) -> Result<(), LogError> {
        let request = TxnRequest {
            compare: vec![self.is_owner(owner)],
            success: vec![RequestOp::put(self.keys.alive(), values::encode_alive(owner.nonce))],
            failure: self.look(),
        };
        let answer = self.client.repeat(request, RENEWAL).await?;
        if answer.succeeded { Ok(()) } else { Err(LogError::Fenced(self.snapshot_of(answer)?.fence.epoch)) }
    }

    async fn append(&self, epoch: Epoch, first: Seq, batches: &[Vec<u8>]) -> Result<(), AppendError> {
        let unknown = |error: LogError| AppendError::Unknown(io::Error::other(error));
        let bytes = entry::append_bytes(batches).ok_or(AppendError::TooLarge)?;
        let before = first.0.checked_sub(1);
        let (Some(owner), Some(before)) = (self.seals.find(|sealed| sealed.epoch == epoch), before) else {
            let fence = self.snapshot(SHORT).await.map_err(unknown)?.fence;
            return Err(AppendError::Fenced(fence.epoch));
        };
        let request = self.append_request(owner, Seq(before), batches);
        let answer = match self.client.once(request, APPEND).await {
            Ok(answer) => answer,
            Err(CallError::TooLarge) => return Err(AppendError::TooLarge),
            Err(CallError::NoSpace(error)) => return Err(self.full(Seq(before), error).await),
            Err(CallError::Unknown(error)) => return Err(AppendError::Unknown(error)),
            Err(error) => return Err(unknown(error.into())),
        };
        if !answer.succeeded {
            let fence = self.snapshot_of(answer).map_err(unknown)?.fence;
            return Err(AppendError::Fenced(fence.epoch));
        }
        self.is_full.store(false, Ordering::Relaxed);
        self.history.lock().expect("no holder of this lock panics").bytes += bytes as u64;
        Ok(())
    }

    fn append_request(&self, owner: Sealed, before: Seq, batches: &[Vec<u8>]) -> TxnRequest {
        let put = |(seq, batch): (u64, &Vec<u8>)| {
            let seq = Seq(seq);
            RequestOp::put(self.keys.entry(seq), entry::encode_entry(seq, owner.epoch, batch).into())
        };
        let mut success: Vec<RequestOp> = (before.0 + 1..).zip(batches).map(put).collect();
        let tail = Seq(before.0 + batches.len() as u64);
        success.push(RequestOp::put(self.keys.tail(), values::encode_tail(tail)));
        let ends_before = Compare::value(self.keys.tail(), values::encode_tail(before));
        TxnRequest { compare: vec![self.is_owner(owner), ends_before], success, failure: self.look() }
    }

    /// etcd reports that it has no room, perhaps after the append.
    async fn full(&self, before: Seq, error: io::Error) -> AppendError {
        self.is_full.store(true, Ordering::Relaxed);
        match self.snapshot(SHORT).await {
            Ok(snapshot) if snapshot.fence.tail == before => AppendError::Full(error),
            _ => AppendError::Unknown(error),
        }
    }

    async fn read(&self, from: Seq, limit_bytes: usize) -> Result<Vec<LogEntry>, LogError> {
        let started = Instant::now();
        let (mut page, mut taken, mut revision) = (Vec::new(), 0, 0);
        let mut next = from.max(Seq(1));
        if from == Seq(0) {
            next = self.find_first().await?;
        }
        loop {
            let average = if page.is_empty() { ENTRY_BYTES_GUESS } else { (taken / page.len()).max(1) };
            let count = (limit_bytes.saturating_sub(taken) / average) as u64;
            let range = self.read_range(next, count.clamp(1, ENTRIES_PER_RANGE), revision).await;
            let (entries, tail) = match range {
                Ok((entries, tail, at)) => {
                    revision = at;
                    (entries, tail)
                }
                // What was read is right, and the next call tells the rest.
                Err(_) if !page.is_empty() => return Ok(page),
                Err(error) => return Err(error),
            };
            for entry in entries {
                if !page.is_empty() && taken + entry.batch.len() > limit_bytes {
                    return Ok(page);
                }
                taken += entry.batch.len().max(1);
                next = Seq(entry.seq.0 + 1);
                page.push(entry);
            }
            if next > tail || taken >= limit_bytes || started.elapsed() >= PAGE {
                return Ok(page);
            }
        }
    }

    /// The next entries, up to `count`, the end of the log and the revision of both. `revision` is that of an earlier range
    /// of the same page, or 0.
    async fn read_range(
        &self,
        next: Seq,
        count: u64,
        revision: i64,
    ) -> Result<(Vec<LogEntry>, Seq, i64), LogError> {
        let end = next
            .0
            .checked_add(count)
            .map_or_else(|| self.keys.entries_end(), |end| self.keys.entry(Seq(end)));
        let get = |key: Bytes, range_end: Bytes| {
            RequestOp::range(RangeRequest { key, range_end, revision, ..RangeRequest::default() })
        };
        let success = vec![get(self.keys.tail(), Bytes::new()), get(self.keys.entry(next), end)];
        let answer = self.client.repeat(TxnRequest { success, ..TxnRequest::default() }, LONG).await?;
        let revision = if revision == 0 { answer.revision() } else { revision };
        let mut ranges = answer.into_ranges();
        let tail = ranges.next().and_then(|kvs| kvs.into_iter().next());
        let tail = tail.map_or(Ok(Seq(0)), |kv| values::decode_tail(&kv.value))?;
        let found = ranges.next().unwrap_or_default();
        let expected = (tail.0 + 1).saturating_sub(next.0).min(count);
        if found.len() as u64 != expected {
            return Err(self.missing(next, tail, found).await);
        }
        let entries = (next.0..).zip(found).map(|(seq, kv)| {
            let found = self.keys.seq_of(&kv.key)?;
            if found != Seq(seq) {
                return Err(LogError::Damaged(format!("entry {seq} is missing in etcd: found={found}")));
            }
            entry::decode_entry(found, &kv.value)
        });
        Ok((entries.collect::<Result<_, _>>()?, tail, revision))
    }

    /// Why there are not the entries that the end of the log promises.
    async fn missing(&self, next: Seq, tail: Seq, found: Vec<KeyValue>) -> LogError {
        match self.find_first().await {
            Ok(first) if first > next => {
                LogError::Damaged(format!("entries up to {} are trimmed", first.0 - 1))
            }
            Ok(_) => {
                let found = found.len();
                LogError::Damaged(format!(
                    "entries are missing in etcd: from={next} tail={tail} found={found}"
                ))
            }
            Err(error) => error,
        }
    }

    /// Looks for the oldest entry. Of an empty log, the first that it would hold.
    async fn find_first(&self) -> Result<Seq, LogError> {
        let oldest = RangeRequest {
            key: self.keys.entry(Seq(0)),
            range_end: self.keys.entries_end(),
            limit: 1,
            keys_only: true,
            ..RangeRequest::default()
        };
        let mut success = self.look();
        success.push(RequestOp::range(oldest));
        let answer = self.client.repeat(TxnRequest { success, ..TxnRequest::default() }, LONG).await?;
        let oldest = answer.clone().into_ranges().last().and_then(|kvs| kvs.into_iter().next());
        let tail = self.snapshot_of(answer)?.fence.tail;
        let first = oldest.map_or(Ok(Seq(tail.0 + 1)), |kv| self.keys.seq_of(&kv.key))?;
        if first.0 > tail.0 + 1 || first.0 == 0 {
            return Err(LogError::Damaged(format!(
                "entries in etcd are behind its end: first={first} tail={tail}"
            )));
        }
        self.first.fetch_max(first.0, Ordering::Relaxed);
        Ok(first)
    }

    async fn trim(&self, up_to: Seq) -> Result<(), LogError> {
        let mut first = self.first.load(Ordering::Relaxed);
        // Also a log that gets no entries has a history: the owner's signs of life.
        if up_to.0 < first && !self.is_history_due() {
            return Ok(());
        }
        let Snapshot { fence, revision, .. } = self.snapshot(SHORT).await?;
        let last = Sealed { epoch: fence.epoch, nonce: fence.nonce };
        let owner = self.seals.find(|sealed| sealed == last).ok_or(LogError::Fenced(fence.epoch))?;
        let end = up_to.min(fence.tail).0 + 1;
        let started = Instant::now();
        while first < end {
            let step = end.min(first + TRIM_STEP);
            let request = TxnRequest {
                compare: vec![self.is_owner(owner)],
                success: vec![RequestOp::delete(self.keys.entry(Seq(first)), self.keys.entry(Seq(step)))],
                failure: self.look(),
            };
            let answer = self.client.repeat(request, SHORT).await?;
            if !answer.succeeded {
                return Err(LogError::Fenced(self.snapshot_of(answer)?.fence.epoch));
            }
            first = step;
            self.first.fetch_max(first, Ordering::Relaxed);
            if started.elapsed() >= SHORT.total {
                break;
            }
        }
        self.compact(revision).await;
        Ok(())
    }

    /// Whether etcd may forget what came before the last look.
    fn is_history_due(&self) -> bool {
        let history = self.history.lock().expect("no holder of this lock panics");
        let age_ns = self.env.clock.boot_ns().saturating_sub(history.noted_ns);
        history.revision == 0 || age_ns >= COMPACT_EVERY.as_nanos() as u64 || history.bytes >= COMPACT_BYTES
    }

    /// Lets etcd forget the history before the last call that did so, if that was long ago. If it fails, a later call tries
    /// again.
    async fn compact(&self, revision: i64) {
        if !self.is_history_due() {
            return;
        }
        let now = History { revision, noted_ns: self.env.clock.boot_ns(), bytes: 0 };
        let due = std::mem::replace(&mut *self.history.lock().expect("no holder of this lock panics"), now)
            .revision;
        if due != 0
            && let Err(error) = self.client.once(CompactionRequest { revision: due }, LONG.attempt).await
        {
            tracing::debug!(%error, "etcd did not forget old versions");
        }
    }
}
