//! Steps by which space returns: purging maps of removed files, deleting extents that nothing refers to.

use std::collections::{BTreeMap, HashSet};

use base::{DriveId, ExtentId, FsError, ShardIndex};
use futures_util::future::join_all;
use wire::drive::ShardKey;
use wire::meta::{FreeExtent, MetaReply, MetaRequest};

use crate::Client;

/// Where a pass over the free extents goes on.
pub type FreeCursor = Option<(u64, ExtentId)>;

/// What one step of reclamation did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReclaimStep {
    /// Where to go on; `None` at the end of the pass.
    pub next: FreeCursor,
    /// Extents whose shards are gone from all drives.
    pub deleted: u64,
    /// Extents that wait for a drive that does not answer.
    pub waiting: u64,
}

const PAGE: u32 = 1024;

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
        let MetaReply::Free(free) = self.call(MetaRequest::NextFree { after, limit: PAGE }).await? else {
            return Err(FsError::Io);
        };
        let next = if free.len() < PAGE as usize {
            None
        } else {
            free.last().map(|extent| (extent.free_ver, extent.id))
        };
        let found = free.len() as u64;
        let gone = self.delete_shards(free).await;
        let deleted = gone.len() as u64;
        if !gone.is_empty() {
            let drives = self.inner.extents.topology().map.drives.iter().map(|drive| drive.id).collect();
            self.call(MetaRequest::Freed { extents: gone, drives }).await?;
        }
        Ok(ReclaimStep { next, deleted, waiting: found - deleted })
    }

    /// Shards that commits went ahead without, as (drive, extent). At most about `limit`.
    pub async fn owed(&self, limit: usize) -> Result<HashSet<(DriveId, ExtentId)>, FsError> {
        let (mut owed, mut after) = (HashSet::new(), None);
        while owed.len() < limit {
            let MetaReply::Owed(page) = self.call(MetaRequest::Owed { after, limit: PAGE }).await? else {
                return Err(FsError::Io);
            };
            after = page.last().copied();
            let end = page.len() < PAGE as usize;
            owed.extend(page);
            if end {
                break;
            }
        }
        Ok(owed)
    }

    /// Deletes shards drive by drive. Returns the extents that no drive holds any more.
    async fn delete_shards(&self, free: Vec<FreeExtent>) -> Vec<FreeExtent> {
        let topology = self.inner.extents.topology();
        let mut per_drive: BTreeMap<DriveId, Vec<ShardKey>> = BTreeMap::new();
        for extent in &free {
            let Some(group) = topology.map.group(extent.pg) else { continue };
            for (shard, drive) in (0..extent.n).zip(&group.members) {
                let key = ShardKey { ledger: self.inner.ledger, extent: extent.id, shard: ShardIndex(shard) };
                per_drive.entry(*drive).or_default().push(key);
            }
        }
        let deletes = per_drive.into_iter().map(|(drive, keys)| {
            let service = topology.usable(drive).cloned();
            async move {
                let Some(service) = service else { return Some(drive) };
                service.delete(keys).await.err().map(|_| drive)
            }
        });
        let silent: Vec<DriveId> = join_all(deletes).await.into_iter().flatten().collect();
        let done = |extent: &FreeExtent| {
            let group = topology.map.group(extent.pg);
            group.is_none_or(|group| {
                let mut members = group.members.iter().take(usize::from(extent.n));
                !members.any(|drive| silent.contains(drive))
            })
        };
        free.into_iter().filter(done).collect()
    }
}
