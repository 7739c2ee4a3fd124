//! The state that a ledger's log produces, in a local key-value store.
//!
//! The log is durable; the store only keeps replay short. The store is committed about every second, together with the
//! position of its last batch, and recovery replays the batches after that.

mod mem;
mod mirror;
mod overlaid;
mod redb_state;

use std::ops::ControlFlow;
use std::sync::Arc;

use base::{Epoch, Seq};

use crate::keys::KeyRange;

pub use mem::MemState;
pub use mirror::{MirroredState, Remade, RemadeFrom, ReplicaStatus, WholeLog};
pub use overlaid::Overlaid;
pub use redb_state::RedbState;

/// Why the store could not be read or written.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The store has no room. Nothing was changed, and reads go on.
    #[error("metadata store has no room: {0}")]
    NoSpace(String),
    /// The content differs from what was written.
    #[error("metadata store is damaged: {0}")]
    Damaged(String),
    /// Another process uses the store.
    #[error("metadata store is in use by another process: {0}")]
    InUse(String),
    /// The storage failed. The ledger cannot go on with this store.
    #[error("metadata store failed: {0}")]
    Failed(String),
}

/// The position of the store in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Applied {
    /// The last batch.
    pub seq: Seq,
    /// Epoch of the owner that appended it.
    pub epoch: Epoch,
}

/// A key and its value.
pub type Pair = (Vec<u8>, Vec<u8>);

/// A function that gets keys and values in order, until it breaks.
pub type Visit<'a> = dyn FnMut(&[u8], &[u8]) -> ControlFlow<()> + 'a;

/// A local, ordered key-value store.
pub trait State: Send + Sync {
    /// The value of a key.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StateError>;

    /// Visits a range in key order, from one consistent view.
    fn scan(&self, range: &KeyRange, visit: &mut Visit<'_>) -> Result<(), StateError>;

    /// The last key of a range with its value.
    fn last(&self, range: &KeyRange) -> Result<Option<Pair>, StateError>;

    /// Applies changes and the new position in one durable step.
    fn apply(
        &self,
        changes: &mut dyn Iterator<Item = (&[u8], Option<&[u8]>)>,
        applied: Applied,
    ) -> Result<(), StateError>;

    /// The position of the last durable [`State::apply`]. With several replicas, that of the oldest one.
    fn applied(&self) -> Result<Applied, StateError>;

    /// The newest position of any replica.
    fn newest(&self) -> Result<Applied, StateError> {
        self.applied()
    }

    /// The present content, for reading while changes are applied. It ends at a batch boundary.
    fn snapshot(&self) -> Result<Arc<dyn State>, StateError>;
}

/// A range that holds every key.
pub fn every_key() -> KeyRange {
    (Vec::new(), vec![0xff; 16])
}

#[cfg(test)]
mod tests;
