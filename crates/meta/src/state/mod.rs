//! The state that a ledger's log produces, in a local key-value store.
//!
//! The log is what is durable. The store only keeps replay short: it is committed every second or so, together
//! with the position of the last batch in it, and recovery replays what came after.

mod mem;
mod redb_state;

use std::ops::ControlFlow;

use base::{Epoch, Seq};

use crate::keys::KeyRange;

pub use mem::MemState;
pub use redb_state::RedbState;

/// The store could not be read or written. The ledger cannot go on.
#[derive(Debug, thiserror::Error)]
#[error("metadata store failed: {0}")]
pub struct StateError(pub String);

/// Up to where the log is in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Applied {
    /// The last batch.
    pub seq: Seq,
    /// Its owner's epoch.
    pub epoch: Epoch,
}

/// A key and its value.
pub type Pair = (Vec<u8>, Vec<u8>);

/// Called with keys and values in order until it breaks.
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

    /// The position of the last durable [`State::apply`].
    fn applied(&self) -> Result<Applied, StateError>;
}
