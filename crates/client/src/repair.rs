//! Steps that pay owed shards: reconstruct them, store them, tell the owner.

use std::collections::HashMap;

use base::{DriveId, Epoch, ExtentId, FsError, NodeId};
use layout::{DriveState, shard_len};
use wire::cluster::RepairOutcome;
use wire::drive::{ShardEntry, ShardShape};
use wire::meta::{ExtentRef, MetaReply, MetaRequest, OwedEntry};

use crate::Client;
use crate::damage::Flaw;
use crate::extents::RestoreShardError;

/// Where a pass over the owed shards continues.
pub type OwedCursor = Option<(DriveId, ExtentId)>;

/// Owed shards asked for at a time.
const PAGE: u32 = 1024;

/// Owed shards that can be paid now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwedPage {
    /// Owed shards whose drive accepts shards.
    pub payable: Vec<OwedEntry>,
    /// Where to continue; `None` at the end of the pass.
    pub next: OwedCursor,
}

impl Client {
    /// The next owed shards, without those whose drive is away.
    pub async fn owed_page(&self, after: OwedCursor) -> Result<OwedPage, FsError> {
        let MetaReply::Owed(page) = self.call(MetaRequest::Owed { after, limit: PAGE }).await? else {
            return Err(FsError::Io);
        };
        let full = page.len() == PAGE as usize;
        let last = page.last().map(|entry| (entry.drive, entry.id)).filter(|_| full);
        let topology = self.inner.extents.topology();
        let waits = |drive| {
            let up = topology.map.drive(drive).is_some_and(|drive| drive.state == DriveState::Up);
            up && topology.usable(drive).is_none()
        };
        // A drive that is away for a while may be owed very many shards, so all its entries are skipped at once.
        let next =
            last.map(|(drive, id)| if waits(drive) { (drive, ExtentId(u64::MAX)) } else { (drive, id) });
        let can_pay = |entry: &OwedEntry| {
            let member =
                topology.map.group(entry.pg).and_then(|group| group.members.get(entry.shard.0 as usize));
            member.is_some_and(|drive| topology.usable(*drive).is_some())
        };
        Ok(OwedPage { payable: page.into_iter().filter(can_pay).collect(), next })
    }

    /// The node with the drive that gets a shard when it is restored.
    pub fn node_of(&self, shard: &OwedEntry) -> Option<NodeId> {
        let topology = self.inner.extents.topology();
        let drive = topology.map.group(shard.pg)?.members.get(usize::from(shard.shard.0))?;
        topology.map.drive(*drive).map(|drive| NodeId(drive.place.node))
    }

    /// The bytes of these extents that each node has, without redundancy.
    pub fn bytes_by_node<'a>(&self, extents: impl Iterator<Item = &'a ExtentRef>) -> HashMap<NodeId, u64> {
        let topology = self.inner.extents.topology();
        let nodes: HashMap<DriveId, NodeId> =
            topology.map.drives.iter().map(|drive| (drive.id, NodeId(drive.place.node))).collect();
        let mut held = HashMap::new();
        for extent in extents {
            let Some(group) = topology.map.group(extent.pg) else { continue };
            for drive in group.members.iter().take(extent.k.into()) {
                if let Some(node) = nodes.get(drive) {
                    *held.entry(*node).or_default() += u64::from(shard_len(extent.extent_len, extent.k));
                }
            }
        }
        held
    }

    /// The epoch of the cluster map that is used now.
    pub fn map_epoch(&self) -> Epoch {
        self.inner.extents.topology().map.epoch
    }

    /// Waits until the cluster map is the one of this epoch, or a later one.
    pub async fn has_map(&self, epoch: Epoch) {
        let mut topologies = self.inner.extents.topologies();
        if topologies.wait_for(|topology| topology.map.epoch >= epoch).await.is_err() {
            // The last one stays.
            std::future::pending().await
        }
    }

    /// Runs `restoring`. This client deletes no shards until that has ended.
    pub async fn without_deletions<T>(&self, restoring: impl Future<Output = T>) -> T {
        let _not_deleting = self.inner.deleting.read().await;
        restoring.await
    }

    /// Reconstructs a shard that is owed, missing or damaged, and stores it on the drive that now has its position in
    /// the group. [`Client::tell_repaired`] tells the owner of shards that were owed. An extent that is deleted in the
    /// meantime stays deleted.
    pub async fn repair_shard(&self, entry: &OwedEntry) -> RepairOutcome {
        let OwedEntry { id, pg, k, n, extent_len, .. } = *entry;
        let extent = ExtentRef { id, pg, k, n, extent_len, extent_off: 0 };
        match self.without_deletions(self.inner.extents.restore_shard(&extent, entry.shard)).await {
            Ok(bytes) => RepairOutcome::Stored { bytes },
            Err(RestoreShardError::NotNow) => RepairOutcome::NotNow,
            Err(RestoreShardError::Gone) => RepairOutcome::Gone,
            Err(RestoreShardError::Unreadable) => RepairOutcome::Unreadable,
        }
    }

    /// Notes a damaged shard that was found by other means than a read here.
    pub fn report_damaged(&self, entry: &ShardEntry) {
        let ShardShape { pg, k, m, extent_len } = entry.shape;
        let id = entry.key.extent;
        let extent = ExtentRef { id, pg, k, n: k + m, extent_len, extent_off: 0 };
        self.inner.peers.0.damage.note(&extent, entry.key.shard, Flaw::Damaged);
    }

    /// Tells the owner which owed shards are stored now. Shards of extents that were freed in the meantime are deleted
    /// again.
    pub async fn tell_repaired(&self, stored: &[OwedEntry]) -> Result<(), FsError> {
        if stored.is_empty() {
            return Ok(());
        }
        let shards = stored.iter().map(|entry| (entry.drive, entry.id)).collect();
        let MetaReply::NotOwed(gone) = self.call(MetaRequest::Repaired { shards }).await? else {
            return Err(FsError::Io);
        };
        let by_name: HashMap<_, _> = stored.iter().map(|entry| ((entry.drive, entry.id), entry)).collect();
        for entry in gone.iter().filter_map(|name| by_name.get(name)) {
            self.inner.extents.drop_shard(entry.pg, entry.id, entry.shard).await;
        }
        Ok(())
    }
}
