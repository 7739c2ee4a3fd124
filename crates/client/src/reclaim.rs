//! Steps that return space: purge maps of removed files, delete extents that nothing refers to.

use std::collections::BTreeMap;
use std::time::Duration;

use base::{DriveId, ExtentId, FsError, ShardIndex};
use futures_util::future::join_all;
use wire::drive::ShardKey;
use wire::meta::{FreeExtent, MetaReply, MetaRequest, OwedEntry};

use crate::Client;

/// Where a pass over the free extents continues.
pub type FreeCursor = Option<(u64, ExtentId)>;

/// The result of one step of reclamation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReclaimStep {
    /// Where to continue; `None` at the end of the pass.
    pub next: FreeCursor,
    /// Extents whose shards are gone from all drives.
    pub deleted: u64,
    /// Extents that wait for a drive that does not answer.
    pub waiting: u64,
    /// More extents become free once their release is durable and reads that may use them have ended.
    pub withheld: bool,
}

const PAGE: u32 = 1024;
/// A drive that has not deleted a page after this time is asked again later.
pub(crate) const DELETE_TIMEOUT: Duration = Duration::from_secs(10);

impl Client {
    /// Empties a bounded part of the map of one removed file. Returns whether there may be more.
    pub async fn purge_step(&self) -> Result<bool, FsError> {
        match self.call(MetaRequest::PurgeStep).await? {
            MetaReply::Purged { more } => Ok(more),
            _ => Err(FsError::Io),
        }
    }

    /// Deletes the shards of a page of extents that nothing refers to and no read uses.
    pub async fn reclaim_step(&self, after: FreeCursor) -> Result<ReclaimStep, FsError> {
        let reply = self.call(MetaRequest::NextFree { after, limit: PAGE }).await?;
        let MetaReply::Free { extents, withheld } = reply else { return Err(FsError::Io) };
        let next = if extents.len() < PAGE as usize {
            None
        } else {
            extents.last().map(|extent| (extent.free_ver, extent.id))
        };
        let found = extents.len() as u64;
        let gone = self.delete_shards(extents).await;
        let deleted = gone.len() as u64;
        if !gone.is_empty() {
            let drives = self.inner.extents.topology().map.drives.iter().map(|drive| drive.id).collect();
            self.call(MetaRequest::Freed { extents: gone, drives }).await?;
        }
        Ok(ReclaimStep { next, deleted, waiting: found - deleted, withheld })
    }

    /// Shards that commits went ahead without, about `limit` at most.
    pub async fn owed(&self, limit: usize) -> Result<Vec<OwedEntry>, FsError> {
        let (mut owed, mut after) = (Vec::new(), None);
        while owed.len() < limit {
            let MetaReply::Owed(page) = self.call(MetaRequest::Owed { after, limit: PAGE }).await? else {
                return Err(FsError::Io);
            };
            after = page.last().map(|entry| (entry.drive, entry.id));
            let end = page.len() < PAGE as usize;
            owed.extend(page);
            if end {
                break;
            }
        }
        Ok(owed)
    }

    /// Deletes shards, drive by drive. Returns the extents that no drive holds any more.
    async fn delete_shards(&self, free: Vec<FreeExtent>) -> Vec<FreeExtent> {
        let _deleting = self.inner.deleting.write().await;
        let topology = self.inner.extents.topology();
        let mut per_drive: BTreeMap<DriveId, Vec<ShardKey>> = BTreeMap::new();
        for extent in &free {
            for shard in (0..extent.n).map(ShardIndex) {
                let key = ShardKey { ledger: self.inner.ledger, extent: extent.id, shard };
                for drive in topology.holders(extent.pg, shard).filter(|drive| !topology.is_out(*drive)) {
                    per_drive.entry(drive).or_default().push(key);
                }
            }
        }
        let deletes = per_drive.into_iter().map(|(drive, keys)| {
            let service = topology.readable(drive).cloned();
            let deletion = self.inner.extents.deletion(keys);
            async move {
                let Some(service) = service else { return Some(drive) };
                let deleted = tokio::time::timeout(DELETE_TIMEOUT, service.delete(deletion)).await;
                if matches!(deleted, Ok(Ok(()))) { None } else { Some(drive) }
            }
        });
        let silent: Vec<DriveId> = join_all(deletes).await.into_iter().flatten().collect();
        let done = |extent: &FreeExtent| {
            let mut holders = (0..extent.n).flat_map(|shard| topology.holders(extent.pg, ShardIndex(shard)));
            !holders.any(|drive| silent.contains(&drive))
        };
        free.into_iter().filter(done).collect()
    }
}
