//! Positions in the history of a ledger. Drives keep the newest position that they received of each ledger: they are
//! witnesses if metadata goes back in time.

use base::{LedgerId, Lineage, Seq};
use serde::{Deserialize, Serialize};

/// A durable batch of a ledger. The lineage tells it from a batch with the same number in another history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Position {
    /// The ledger.
    pub ledger: LedgerId,
    /// The stretch of its history that the batch belongs to.
    pub lineage: Lineage,
    /// The batch.
    pub seq: Seq,
}

/// A drive's knowledge of a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownLedger {
    /// The ledger.
    pub ledger: LedgerId,
    /// The newest position that it received.
    pub position: Option<Position>,
    /// The highest extent of which it stores a shard.
    pub highest_extent: Option<base::ExtentId>,
}
