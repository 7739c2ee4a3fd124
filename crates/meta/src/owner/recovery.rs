//! Steps before a ledger is served: fences earlier owners and replays the log.

use std::sync::Arc;
use std::time::Duration;

use base::{Epoch, LedgerId, Seq};

use crate::batch::Assembler;
use crate::history::OlderLedger;
use crate::log::{Fence, LedgerLog, LogError, NOBODY, Sealed, Vacancy};
use crate::state::{Applied, State, StateError};

/// Why a ledger could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OwnerError {
    /// The log cannot be used.
    #[error("cannot open ledger {ledger}")]
    Log {
        /// The ledger.
        ledger: LedgerId,
        #[source]
        /// Error of the log.
        source: LogError,
    },
    /// The local store cannot be used.
    #[error("cannot open the store of ledger {ledger}")]
    Store {
        /// The ledger.
        ledger: LedgerId,
        #[source]
        /// Error of the store.
        source: StateError,
    },
    /// The log ends before a batch that this node has seen: it was rolled back or replaced.
    #[error("metadata of ledger {ledger} went backwards from {seen} to {tail}: restore the newer log")]
    RolledBack {
        /// The ledger.
        ledger: LedgerId,
        /// The newest batch that the local store has.
        seen: Seq,
        /// The last batch in the log.
        tail: Seq,
    },
    /// The log does not hold all that the local store lacks: it was trimmed in the meantime.
    #[error(
        "the store of ledger {ledger} ends at {applied}, and the log begins at {first}: copy a newer store"
    )]
    Behind {
        /// The ledger.
        ledger: LedgerId,
        /// The newest entry that the local store has.
        applied: Seq,
        /// The oldest entry in the log.
        first: Seq,
    },
    /// Drives have seen a newer ledger.
    #[error(transparent)]
    Older(#[from] OlderLedger),
    /// A batch in the log cannot be decoded, or the state is of a newer version.
    #[error("ledger {ledger} is damaged or newer than this version: {what}")]
    Damaged {
        /// The ledger.
        ledger: LedgerId,
        /// The damage, as text.
        what: String,
    },
}

/// Attempts to reach the log before a ledger is given up, and the pause between them.
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(100);

/// The fence of the log, which may be out of reach for a moment.
async fn fence(log: &dyn LedgerLog) -> Result<Fence, LogError> {
    let mut attempts = 0;
    loop {
        match log.fence().await {
            Err(LogError::Io(error)) if attempts < ATTEMPTS => {
                tracing::debug!(%error, "ledger log does not answer, trying again");
                attempts += 1;
                tokio::time::sleep(PAUSE).await;
            }
            answer => return answer,
        }
    }
}

/// Seals the log under the next epoch: only if it is `vacant` as the caller saw it, or in any case.
async fn seal(log: &dyn LedgerLog, nonce: u64, vacant: Option<Vacancy>) -> Result<(Sealed, Seq), LogError> {
    let last = fence(log).await?;
    if vacant.is_some_and(|vacant| vacant != last.vacancy()) {
        return Err(LogError::Fenced(last.epoch));
    }
    let (epoch, nonce) = (Epoch(last.epoch.0 + 1), if nonce == NOBODY { 1 } else { nonce });
    let owner = Sealed { epoch, nonce };
    let tail = match log.seal(epoch, nonce).await {
        Ok(tail) => tail.seq,
        // It may have succeeded all the same.
        Err(LogError::Io(error)) => match fence(log).await {
            Ok(fence) if (fence.epoch, fence.nonce) == (epoch, nonce) => fence.tail,
            _ => return Err(LogError::Io(error)),
        },
        Err(error) => return Err(error),
    };
    if let Some(vacant) = vacant {
        outlast(log, owner, vacant).await?;
    }
    Ok((owner, tail))
}

/// Waits until the last owner knows that it is none. It may have woken up, and given a sign of life, just before the seal: then
/// it answers from what it has for a lease.
async fn outlast(log: &dyn LedgerLog, owner: Sealed, vacant: Vacancy) -> Result<(), LogError> {
    let sealed = fence(log).await?;
    if (sealed.epoch, sealed.nonce) != (owner.epoch, owner.nonce) {
        return Err(LogError::Fenced(sealed.epoch));
    }
    let Some(lease) = log.caps().lease.filter(|_| sealed.alive != vacant.alive) else { return Ok(()) };
    tracing::info!("the last owner was alive at the seal: waiting for the end of its lease");
    for _ in 0..SIGNS {
        tokio::time::sleep(lease / SIGNS).await;
        // For others that wait for this one.
        log.renew(owner).await?;
    }
    Ok(())
}

/// Signs of life in a lease.
const SIGNS: u32 = 3;
/// Bytes of the log that are read at a time.
const PAGE_BYTES: usize = 32 << 20;

/// Applies the entries of a log to a local store, in order.
pub(super) struct Follower {
    ledger: LedgerId,
    log: Arc<dyn LedgerLog>,
    state: Arc<dyn State>,
    assembler: Assembler,
    /// The last entry that was read. The store may lack the beginning of a batch up to here.
    read: Seq,
}

impl Follower {
    /// Begins behind the last entry that the store has.
    pub(super) fn new(
        ledger: LedgerId,
        log: Arc<dyn LedgerLog>,
        state: Arc<dyn State>,
    ) -> Result<Self, OwnerError> {
        let read = state.applied().map_err(|source| OwnerError::Store { ledger, source })?.seq;
        Ok(Self { ledger, log, state, assembler: Assembler::default(), read })
    }

    /// Applies all entries up to `tail`, the end of the log. Parts of a batch at the end stay out.
    pub(super) async fn catch_up(&mut self, tail: Seq) -> Result<(), OwnerError> {
        let ledger = self.ledger;
        let store_error = |source| OwnerError::Store { ledger, source };
        let seen = self.state.newest().map_err(store_error)?.seq;
        if tail < seen {
            return Err(OwnerError::RolledBack { ledger, seen, tail });
        }
        while self.read < tail {
            self.check_first()?;
            if let Err(error) = self.apply_page().await {
                // What was read is not in the store. Perhaps the log was trimmed just then.
                (self.read, self.assembler) =
                    (self.state.applied().map_err(store_error)?.seq, Assembler::default());
                self.check_first()?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Fails if the log has been trimmed beyond the next entry.
    fn check_first(&self) -> Result<(), OwnerError> {
        let first = self.log.first();
        if first.0 > self.read.0 + 1 {
            return Err(OwnerError::Behind { ledger: self.ledger, applied: self.read, first });
        }
        Ok(())
    }

    async fn apply_page(&mut self) -> Result<(), OwnerError> {
        let ledger = self.ledger;
        let damaged =
            |seq: Seq, what: &str| OwnerError::Damaged { ledger, what: format!("entry {seq}: {what}") };
        let next = Seq(self.read.0 + 1);
        let entries = self.log.read(next, PAGE_BYTES).await;
        let entries = entries.map_err(|source| OwnerError::Log { ledger, source })?;
        if entries.first().is_none_or(|first| first.seq != next) {
            return Err(damaged(next, "missing from the log"));
        }
        let (mut changes, mut position) = (std::collections::BTreeMap::new(), None);
        for entry in &entries {
            let pushed = self.assembler.push(entry);
            if let Some(batch) = pushed.map_err(|error| damaged(entry.seq, &error.to_string()))? {
                changes.extend(batch.changes);
                position = Some(Applied { seq: entry.seq, epoch: entry.epoch });
            }
            self.read = entry.seq;
        }
        if let Some(position) = position {
            let mut pairs = changes.iter().map(|(key, value)| (key.as_slice(), value.as_deref()));
            self.state.apply(&mut pairs, position).map_err(|source| OwnerError::Store { ledger, source })?;
        }
        Ok(())
    }
}

/// Seals the log and brings the local store up to the log's end. `nonce` is a random number that tells this owner from
/// others.
///
/// # Errors
/// `Fenced` of the log, if it is not `vacant` as it was, or another node seals it at the same time.
pub(crate) async fn recover(
    (ledger, log, state): (LedgerId, &Arc<dyn LedgerLog>, &Arc<dyn State>),
    nonce: u64,
    vacant: Option<Vacancy>,
) -> Result<(Sealed, Seq), OwnerError> {
    let sealed = seal(&**log, nonce, vacant).await;
    let (owner, tail) = sealed.map_err(|source| OwnerError::Log { ledger, source })?;
    Follower::new(ledger, log.clone(), state.clone())?.catch_up(tail).await?;
    Ok((owner, tail))
}

/// Gives the ledger back: another node may take it at once. Does nothing where no other node reaches the log. If it fails,
/// other nodes wait for the end of the lease.
pub(crate) async fn give_back(log: &dyn LedgerLog, owner: Sealed) {
    if log.caps().lease.is_none() {
        return;
    }
    let given = match log.fence().await {
        // Of a log that went backwards, another node may be the owner.
        Ok(fence) if (fence.epoch, fence.nonce) != (owner.epoch, owner.nonce) => {
            Err(LogError::Fenced(fence.epoch))
        }
        Ok(_) => log.seal(Epoch(owner.epoch.0 + 1), NOBODY).await,
        Err(error) => Err(error),
    };
    if let Err(error) = given {
        tracing::debug!(%error, "the ledger is not given back");
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind::TimedOut;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use wire::BoxFuture;

    use super::*;
    use crate::log::{AppendError, LogCaps, LogEntry, MemLog, Tail};

    const LEASE: Duration = Duration::from_secs(3);

    /// A log whose next seal, or the answer to it, is lost, or comes after a sign of life of the last owner.
    struct Lossy {
        log: MemLog,
        loses: AtomicBool,
        hides: AtomicBool,
        wakes: Mutex<Option<Sealed>>,
    }

    impl Lossy {
        fn new() -> Self {
            let (loses, hides) = (AtomicBool::new(false), AtomicBool::new(false));
            Self { log: MemLog::shared(LEASE), loses, hides, wakes: Mutex::default() }
        }
    }

    impl LedgerLog for Lossy {
        fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
            Box::pin(async move {
                if self.loses.swap(false, Ordering::Relaxed) {
                    return Err(LogError::Io(TimedOut.into()));
                }
                let woken = self.wakes.lock().unwrap().take();
                if let Some(owner) = woken {
                    self.log.renew(owner).await?;
                }
                let sealed = self.log.seal(epoch, nonce).await;
                if self.hides.swap(false, Ordering::Relaxed) {
                    Err(LogError::Io(TimedOut.into()))
                } else {
                    sealed
                }
            })
        }

        fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
            self.log.fence()
        }

        fn append(
            &self,
            epoch: Epoch,
            first: Seq,
            batches: Vec<Vec<u8>>,
        ) -> BoxFuture<'_, Result<(), AppendError>> {
            self.log.append(epoch, first, batches)
        }

        fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
            self.log.read(from, limit_bytes)
        }

        fn trim(&self, up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
            self.log.trim(up_to)
        }

        fn caps(&self) -> LogCaps {
            self.log.caps()
        }
    }

    #[tokio::test]
    async fn the_fence_tells_whether_a_seal_without_an_answer_took_the_ledger() {
        let log = Lossy::new();
        log.hides.store(true, Ordering::Relaxed);
        let vacant = |epoch| Some(Vacancy { epoch: Epoch(epoch), alive: 0 });
        let (owner, _) = seal(&log, 7, vacant(0)).await.unwrap();
        assert_eq!(owner, Sealed { epoch: Epoch(1), nonce: 7 });
        log.loses.store(true, Ordering::Relaxed);
        assert!(matches!(seal(&log, 8, vacant(1)).await, Err(LogError::Io(_))));
        let (owner, _) = seal(&log, 8, vacant(1)).await.unwrap();
        assert_eq!(owner, Sealed { epoch: Epoch(2), nonce: 8 });
        assert!(matches!(seal(&log, 9, vacant(1)).await, Err(LogError::Fenced(Epoch(2)))));
        assert!(matches!(seal(&log, 9, vacant(3)).await, Err(LogError::Fenced(Epoch(2)))));
        assert_eq!(seal(&log, 9, None).await.unwrap().0.epoch, Epoch(3));
    }

    #[tokio::test(start_paused = true)]
    async fn an_owner_that_comes_back_is_left_alone_or_outlasted() {
        let log = Lossy::new();
        let (one, _) = seal(&log, 7, Some(Vacancy::default())).await.unwrap();
        let vacancy = log.fence().await.unwrap().vacancy();
        // It comes back before others look again.
        log.log.renew(one).await.unwrap();
        assert!(matches!(seal(&log, 8, Some(vacancy)).await, Err(LogError::Fenced(Epoch(1)))));
        // It comes back behind their look: it counts itself as the owner for a lease.
        let vacancy = log.fence().await.unwrap().vacancy();
        *log.wakes.lock().unwrap() = Some(one);
        let sealed = tokio::time::Instant::now();
        let (two, _) = seal(&log, 8, Some(vacancy)).await.unwrap();
        assert!(sealed.elapsed() >= LEASE, "{:?}", sealed.elapsed());
        // It does not come back: nobody waits.
        let (vacancy, sealed) = (log.fence().await.unwrap().vacancy(), tokio::time::Instant::now());
        assert_eq!((vacancy.epoch, vacancy.alive), (two.epoch, 2));
        seal(&log, 9, Some(vacancy)).await.unwrap();
        assert_eq!(sealed.elapsed(), Duration::ZERO);
    }

    #[tokio::test]
    async fn no_owner_seals_as_nobody() {
        let log = MemLog::shared(LEASE);
        let (owner, _) = seal(&log, NOBODY, None).await.unwrap();
        assert_ne!(owner.nonce, NOBODY);
        assert_eq!(log.fence().await.unwrap().nonce, owner.nonce);
    }

    #[tokio::test]
    async fn an_owner_gives_back_only_what_is_its_own() {
        let fence_after = async |log: MemLog, owner: Sealed| {
            log.seal(Epoch(2), 7).await.unwrap();
            give_back(&log, owner).await;
            let fence = log.fence().await.unwrap();
            (fence.epoch.0, fence.nonce)
        };
        let owner = Sealed { epoch: Epoch(2), nonce: 7 };
        assert_eq!(fence_after(MemLog::shared(LEASE), owner).await, (3, NOBODY));
        assert_eq!(fence_after(MemLog::new(), owner).await, (2, 7));
        for other in [Sealed { nonce: 8, ..owner }, Sealed { epoch: Epoch(3), ..owner }] {
            // The log went backwards, and is another's now.
            assert_eq!(fence_after(MemLog::shared(LEASE), other).await, (2, 7), "{other:?}");
        }
    }
}
