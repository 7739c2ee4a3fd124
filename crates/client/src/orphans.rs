//! Steps that find shards that no map refers to and none ever will.

use std::collections::BTreeMap;

use base::{DriveId, ExtentId, FsError, ShardIndex};
use futures_util::future::join_all;
use wire::drive::ShardKey;
use wire::meta::{EXTENT_RANGE_IDS, MetaReply, MetaRequest};

use crate::Client;

/// Shards asked for at a time from a drive.
const PAGE: usize = 4096;
/// Extents confirmed and deleted at a time.
const CONFIRM: usize = 1024;
/// Ranges that one request has checked again.
const RECHECK: usize = 256;
/// Most shards that an extent has.
const SHARDS: u8 = layout::SHARDS_MAX;

/// A range of extent ids that no commit may use any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClosedRange {
    /// The first id.
    pub first: ExtentId,
    /// How many.
    pub count: u64,
}

/// Ranges of extent ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtentRanges {
    /// Ranges that no session may commit to and that are not verified yet.
    pub closed: Vec<ClosedRange>,
    /// The number of ranges from which sessions may take ids.
    pub open: u64,
}

/// Extents of closed ranges that have shards on drives.
#[derive(Debug, Default)]
pub struct Inventory {
    /// One bit per id of each range.
    found: BTreeMap<ClosedRange, Vec<u64>>,
    /// Drives that have listed their shards.
    pub asked: Vec<DriveId>,
    /// Drives that have not.
    pub silent: Vec<DriveId>,
}

impl Inventory {
    fn of(ranges: &[ClosedRange]) -> Self {
        let bits = |range: &ClosedRange| (*range, vec![0; range.count.div_ceil(64) as usize]);
        Self { found: ranges.iter().map(bits).collect(), ..Self::default() }
    }

    fn bit(&mut self, id: ExtentId) -> Option<(&mut u64, u64)> {
        let after = ClosedRange { first: ExtentId(id.0 + 1), count: 0 };
        let (range, bits) = self.found.range_mut(..after).next_back()?;
        let at = id.0 - range.first.0;
        (at < range.count).then(|| (&mut bits[(at / 64) as usize], 1 << (at % 64)))
    }

    fn add(&mut self, id: ExtentId) {
        if let Some((word, bit)) = self.bit(id) {
            *word |= bit;
        }
    }

    /// Removes an extent that a map refers to.
    pub fn referred(&mut self, id: ExtentId) {
        if let Some((word, bit)) = self.bit(id) {
            *word &= !bit;
        }
    }

    /// The remaining extents.
    pub fn ids(&self) -> Vec<ExtentId> {
        let of_range = |(range, bits): (&ClosedRange, &Vec<u64>)| {
            let first = range.first.0;
            let set = (0..range.count).filter(|at| bits[(at / 64) as usize] >> (at % 64) & 1 == 1);
            set.map(|at| ExtentId(first + at)).collect::<Vec<_>>()
        };
        self.found.iter().flat_map(of_range).collect()
    }
}

impl Client {
    /// The ranges of extent ids that were given out and are not forgotten yet.
    pub async fn extent_ranges(&self) -> Result<ExtentRanges, FsError> {
        let MetaReply::Ranges { closed, open } = self.call(MetaRequest::ExtentRanges).await? else {
            return Err(FsError::Io);
        };
        let closed = closed.into_iter().map(|(first, count)| ClosedRange { first, count }).collect();
        Ok(ExtentRanges { closed, open })
    }

    /// The drives that can list their shards, and the drives that would have to but cannot.
    pub fn drives_to_ask(&self) -> (Vec<DriveId>, Vec<DriveId>) {
        let topology = self.inner.extents.topology();
        let needed = topology.map.drives.iter().map(|drive| drive.id).filter(|id| !topology.is_out(*id));
        needed.partition(|id| topology.readable(*id).is_some())
    }

    /// The extents of these ranges that have shards on drives.
    pub async fn inventory(&self, ranges: &[ClosedRange]) -> Inventory {
        let mut inventory = Inventory::of(ranges);
        let (ready, silent) = self.drives_to_ask();
        inventory.silent = silent;
        for drive in ready {
            let listed = self.take_stock(drive, ranges, &mut inventory).await.is_some();
            (if listed { &mut inventory.asked } else { &mut inventory.silent }).push(drive);
        }
        inventory
    }

    /// Adds the shards of one drive; `None` if it stopped answering.
    async fn take_stock(
        &self,
        drive: DriveId,
        ranges: &[ClosedRange],
        inventory: &mut Inventory,
    ) -> Option<()> {
        let ledger = self.inner.ledger;
        for range in ranges {
            let before = ExtentId(range.first.0.saturating_sub(1));
            let mut after = ShardKey { ledger, extent: before, shard: ShardIndex(u8::MAX) };
            loop {
                let service = self.inner.extents.topology().readable(drive)?.clone();
                let page = service.list(Some(after), PAGE).await.ok()?;
                let inside = |key: &ShardKey| {
                    key.ledger == ledger && key.extent.0.wrapping_sub(range.first.0) < range.count
                };
                page.iter()
                    .filter(|entry| inside(&entry.key))
                    .for_each(|entry| inventory.add(entry.key.extent));
                match page.last() {
                    Some(last) if page.len() == PAGE && inside(&last.key) => after = last.key,
                    _ => break,
                }
            }
        }
        Some(())
    }

    /// Makes the owner compare everything that a drive holds with the maps again. The drive may hold extents that were
    /// deleted while another drive had its place.
    pub async fn recheck(&self, drive: DriveId) -> Result<(), FsError> {
        let ledger = self.inner.ledger;
        let mut after = ShardKey { extent: ExtentId(0), ..ShardKey::first_of(ledger) };
        let mut ranges: Vec<(ExtentId, u64)> = Vec::new();
        loop {
            let service =
                self.inner.extents.topology().readable(drive).cloned().ok_or(FsError::Unavailable)?;
            let page = service.list(Some(after), PAGE).await.map_err(|_| FsError::Unavailable)?;
            for entry in page.iter().filter(|entry| entry.key.ledger == ledger) {
                let first = ExtentId(entry.key.extent.0 / EXTENT_RANGE_IDS * EXTENT_RANGE_IDS);
                if ranges.last().is_none_or(|last| last.0 != first) {
                    ranges.push((first, EXTENT_RANGE_IDS));
                }
            }
            match page.last() {
                Some(last) if page.len() == PAGE && last.key.ledger == ledger => after = last.key,
                _ => break,
            }
        }
        for some in ranges.chunks(RECHECK) {
            self.call(MetaRequest::RecheckRanges { ranges: some.to_vec() }).await?;
        }
        Ok(())
    }

    /// Notes whether drives may hold shards that only newer metadata refers to. In that case no shard counts as an
    /// orphan.
    pub async fn doubt(&self, in_doubt: bool) -> Result<(), FsError> {
        self.call(MetaRequest::Doubt { in_doubt }).await.map(drop)
    }

    /// Deletes the extents left in the inventory that the owner confirms as orphans, from every drive that answered.
    /// The caller must have scanned all maps since their ranges were closed, and removed every extent it met. Returns
    /// how many were deleted, and whether each of these drives did its part.
    pub async fn delete_orphans(&self, inventory: &Inventory) -> Result<(u64, bool), FsError> {
        let (mut deleted, mut everywhere) = (0, true);
        for some in inventory.ids().chunks(CONFIRM) {
            let request = MetaRequest::ConfirmOrphans { ids: some.to_vec() };
            let MetaReply::Orphans(orphans) = self.call(request).await? else { return Err(FsError::Io) };
            deleted += orphans.len() as u64;
            everywhere &= self.delete_from(&inventory.asked, &orphans).await;
        }
        Ok((deleted, everywhere))
    }

    async fn delete_from(&self, drives: &[DriveId], ids: &[ExtentId]) -> bool {
        // No shard of an extent may be restored while the extent is being deleted.
        let _deleting = self.inner.deleting.write().await;
        let topology = self.inner.extents.topology();
        let ledger = self.inner.ledger;
        let shards = |id: &ExtentId| {
            let extent = *id;
            (0..SHARDS).map(move |shard| ShardKey { ledger, extent, shard: ShardIndex(shard) })
        };
        let keys: Vec<ShardKey> = ids.iter().flat_map(shards).collect();
        let deletes = drives.iter().map(|drive| {
            let service = topology.readable(*drive).cloned();
            let deletion = self.inner.extents.deletion(keys.clone());
            // A drive that went out of use in the meantime is never read again.
            let is_out = topology.is_out(*drive);
            async move {
                match service {
                    Some(service) => service.delete(deletion).await.is_ok(),
                    None => is_out,
                }
            }
        });
        join_all(deletes).await.into_iter().all(|done| done)
    }

    /// Notes that no drive holds an orphan of this range: the owner forgets the range.
    pub async fn range_verified(&self, range: ClosedRange) -> Result<(), FsError> {
        self.call(MetaRequest::RangeVerified { first: range.first }).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inventory_knows_the_ids_of_its_ranges_only() {
        let ranges =
            [(10, 5), (100, 200)].map(|(first, count)| ClosedRange { first: ExtentId(first), count });
        let mut inventory = Inventory::of(&ranges);
        for id in [9, 10, 14, 15, 99, 100, 163, 164, 299, 300] {
            inventory.add(ExtentId(id));
        }
        inventory.referred(ExtentId(164));
        inventory.referred(ExtentId(7));
        assert_eq!(inventory.ids(), [10, 14, 100, 163, 299].map(ExtentId));
    }
}
