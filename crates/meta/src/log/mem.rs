//! A log in memory: the reference for the other engines, and the log of simulations.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::{Epoch, Seq};
use wire::BoxFuture;

use super::frame::ENTRY_BYTES_MAX;
use super::{AppendError, Fence, LedgerLog, LogCaps, LogEntry, LogError, Sealed, Tail};

#[derive(Debug, Default)]
struct Inner {
    epoch: Epoch,
    nonce: u64,
    alive: u64,
    trimmed: Seq,
    entries: Vec<LogEntry>,
}

impl Inner {
    fn tail(&self) -> Seq {
        self.entries.last().map_or(self.trimmed, |entry| entry.seq)
    }
}

/// A log that lives as long as its clones.
#[derive(Debug, Clone, Default)]
pub struct MemLog {
    inner: Arc<Mutex<Inner>>,
    lease: Option<Duration>,
}

impl MemLog {
    /// An empty log.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty log whose owners live by this lease, as on an engine that several nodes reach.
    pub fn shared(lease: Duration) -> Self {
        Self { lease: Some(lease), ..Self::default() }
    }

    /// Drops the newest entries, as an engine that was restored from an older copy.
    pub fn roll_back(&self, entries: usize) {
        self.with(|inner| inner.entries.truncate(inner.entries.len().saturating_sub(entries)));
    }

    fn with<T>(&self, act: impl FnOnce(&mut Inner) -> T) -> T {
        act(&mut self.inner.lock().expect("no holder of this lock panics"))
    }
}

impl LedgerLog for MemLog {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        let result = self.with(|inner| {
            if epoch <= inner.epoch {
                return Err(LogError::Fenced(inner.epoch));
            }
            (inner.epoch, inner.nonce) = (epoch, nonce);
            Ok(Tail { seq: inner.tail() })
        });
        Box::pin(async { result })
    }

    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        let fence = self.with(|inner| Fence {
            epoch: inner.epoch,
            nonce: inner.nonce,
            tail: inner.tail(),
            alive: inner.alive,
        });
        Box::pin(async move { Ok(fence) })
    }

    fn renew(&self, owner: Sealed) -> BoxFuture<'_, Result<(), LogError>> {
        let result = self.with(|inner| {
            if (owner.epoch, owner.nonce) != (inner.epoch, inner.nonce) {
                return Err(LogError::Fenced(inner.epoch));
            }
            inner.alive += 1;
            Ok(())
        });
        Box::pin(async { result })
    }

    fn append(
        &self,
        epoch: Epoch,
        first: Seq,
        batches: Vec<Vec<u8>>,
    ) -> BoxFuture<'_, Result<(), AppendError>> {
        let result = self.with(|inner| {
            if epoch != inner.epoch || first.0 != inner.tail().0 + 1 {
                return Err(AppendError::Fenced(inner.epoch));
            }
            if batches.iter().any(|batch| batch.len() > ENTRY_BYTES_MAX) {
                return Err(AppendError::TooLarge);
            }
            let entries = (first.0..).zip(batches);
            inner.entries.extend(entries.map(|(seq, batch)| LogEntry { seq: Seq(seq), epoch, batch }));
            Ok(())
        });
        Box::pin(async { result })
    }

    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
        let result = self.with(|inner| {
            if from <= inner.trimmed && from.0 > 0 && inner.trimmed.0 > 0 {
                return Err(LogError::Damaged(format!("entries up to {} are trimmed", inner.trimmed)));
            }
            let mut taken = 0;
            let wanted = inner.entries.iter().skip_while(|entry| entry.seq < from);
            let page = wanted.take_while(|entry| {
                let take = taken == 0 || taken + entry.batch.len() <= limit_bytes;
                taken += entry.batch.len().max(1);
                take
            });
            Ok(page.cloned().collect())
        });
        Box::pin(async { result })
    }

    fn trim(&self, up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
        self.with(|inner| {
            let up_to = up_to.min(inner.tail());
            inner.trimmed = inner.trimmed.max(up_to);
            inner.entries.retain(|entry| entry.seq > up_to);
        });
        Box::pin(async { Ok(()) })
    }

    fn first(&self) -> Seq {
        self.with(|inner| Seq(inner.trimmed.0 + 1))
    }

    fn caps(&self) -> LogCaps {
        LogCaps { entry_bytes_max: ENTRY_BYTES_MAX, batches_per_append: 64, lease: self.lease }
    }
}
