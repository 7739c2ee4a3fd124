//! The other nodes of the cluster, which share the background work that the owner of a ledger plans.

use std::collections::BTreeSet;

use base::{Epoch, NodeId};
use client::{OwedEntry, RepairOutcome};
use wire::BoxFuture;
use wire::tier::DueExtent;

/// See the module.
pub trait OtherNodes: Send + Sync {
    /// This node.
    fn here(&self) -> NodeId;

    /// Those that are reached now.
    fn reached(&self) -> Vec<NodeId>;

    /// The nodes, this one among them, that the object store does not answer, as far as is known.
    fn blind(&self) -> BTreeSet<NodeId>;

    /// Has another node restore shards on its drives, with the cluster map of this epoch or a later one. `None`: it does not.
    fn restore(
        &self,
        node: NodeId,
        map: Epoch,
        shards: Vec<OwedEntry>,
    ) -> BoxFuture<'_, Option<Vec<RepairOutcome>>>;

    /// Has another node put extents into a blob. Returns the bytes of extents in it, or why it does not do it.
    fn upload(&self, node: NodeId, load: BlobLoad) -> BoxFuture<'_, Result<u64, String>>;
}

/// Extents for one blob.
#[derive(Debug, Clone)]
pub struct BlobLoad {
    /// A cluster map that has the groups of the extents.
    pub map: Epoch,
    /// Which ones.
    pub extents: Vec<DueExtent>,
    /// Largest blob.
    pub blob_bytes: u32,
    /// Bytes per second at which it gives way to users; 0: it need not.
    pub bytes_per_s: u64,
}
