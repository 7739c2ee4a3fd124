//! Steps before a ledger is served: fences earlier owners and replays the log.

use std::sync::Arc;
use std::time::Duration;

use base::{Epoch, LedgerId, Seq};

use crate::batch::Assembler;
use crate::history::OlderLedger;
use crate::log::{Fence, LedgerLog, LogError, Sealed};
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

/// Seals the log under the next epoch.
async fn seal(log: &dyn LedgerLog, nonce: u64) -> Result<(Sealed, Seq), LogError> {
    let epoch = Epoch(fence(log).await?.epoch.0 + 1);
    let owner = Sealed { epoch, nonce };
    match log.seal(epoch, nonce).await {
        Ok(tail) => Ok((owner, tail.seq)),
        // It may have succeeded all the same.
        Err(LogError::Io(error)) => match fence(log).await {
            Ok(fence) if (fence.epoch, fence.nonce) == (epoch, nonce) => Ok((owner, fence.tail)),
            _ => Err(LogError::Io(error)),
        },
        Err(error) => Err(error),
    }
}

/// Seals the log and brings the local store up to the log's end. `nonce` is a random number that tells this owner from
/// others.
pub(crate) async fn recover(
    ledger: LedgerId,
    log: &Arc<dyn LedgerLog>,
    state: &Arc<dyn State>,
    nonce: u64,
) -> Result<(Sealed, Seq), OwnerError> {
    const PAGE_BYTES: usize = 32 << 20;
    let log_error = |source| OwnerError::Log { ledger, source };
    let store_error = |source| OwnerError::Store { ledger, source };
    let (owner, tail) = seal(&**log, nonce).await.map_err(log_error)?;
    let mut read = state.applied().map_err(store_error)?.seq;
    let seen = state.newest().map_err(store_error)?.seq;
    if tail < seen {
        return Err(OwnerError::RolledBack { ledger, seen, tail });
    }
    let mut assembler = Assembler::default();
    while read < tail {
        let entries = log.read(Seq(read.0 + 1), PAGE_BYTES).await.map_err(log_error)?;
        let damaged =
            |seq: Seq, what: &str| OwnerError::Damaged { ledger, what: format!("entry {seq}: {what}") };
        let mut changes = std::collections::BTreeMap::new();
        let mut position = None;
        if entries.first().is_none_or(|first| first.seq.0 != read.0 + 1) {
            return Err(damaged(Seq(read.0 + 1), "missing from the log"));
        }
        for entry in &entries {
            read = entry.seq;
            let pushed = assembler.push(entry).map_err(|error| damaged(entry.seq, &error.to_string()))?;
            if let Some(batch) = pushed {
                changes.extend(batch.changes);
                position = Some(Applied { seq: entry.seq, epoch: entry.epoch });
            }
        }
        if let Some(position) = position {
            let mut pairs = changes.iter().map(|(key, value)| (key.as_slice(), value.as_deref()));
            state.apply(&mut pairs, position).map_err(store_error)?;
        }
    }
    Ok((owner, tail))
}
