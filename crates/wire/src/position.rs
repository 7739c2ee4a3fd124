//! Places in the history of a ledger. Drives keep the newest that they were told of each ledger, so that metadata which
//! went back in time is noticed.

use base::{LedgerId, Lineage, Seq};
use serde::{Deserialize, Serialize};

/// A durable batch of a ledger, named so that a batch of the same number in another history is told from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Position {
    /// The ledger.
    pub ledger: LedgerId,
    /// The stretch of its history that the batch belongs to.
    pub lineage: Lineage,
    /// The batch.
    pub seq: Seq,
}

/// What a drive knows of a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownLedger {
    /// Which.
    pub ledger: LedgerId,
    /// The newest position that it was told.
    pub position: Option<Position>,
    /// The highest extent of which it stores a shard.
    pub highest_extent: Option<base::ExtentId>,
}
