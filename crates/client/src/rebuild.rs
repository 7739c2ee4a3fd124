//! Steps that put the shards of a lost or leaving drive onto the drives that took its positions.
//!
//! Missing shards are found by comparing the drives' inventories, never by walking metadata. A shard of an extent that
//! is not committed yet is restored like any other; if the commit fails it is deleted with the rest.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use base::{DriveId, Epoch, ExtentId, FsError, PgId, ShardIndex};
use futures_util::future::join_all;
use layout::{PlacementGroup, shard_len};
use wire::drive::{ShardEntry, ShardKey, ShardShape};
use wire::meta::{MetaRequest, OwedEntry};

use crate::Client;
use crate::extents::COPIES_BYTES_MAX;
use crate::reclaim::DELETE_TIMEOUT;
use crate::topology::Topology;

/// Shards asked for at a time from each drive.
const PAGE: usize = 4096;
/// Groups with new members in one request.
const GROUPS_PER_REQUEST: usize = 1024;

/// A placement group with positions to rebuild.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RebuildGroup {
    /// Its id.
    pub pg: PgId,
    /// Its epoch. A group with another epoch is rebuilt anew.
    pub epoch: Epoch,
    /// Positions whose shards cannot be read now. Groups with more of them come first.
    pub exposed: u8,
    /// Whether all its members answer, so that shards that cannot be rebuilt now never can.
    pub complete: bool,
    /// Whether every drive answers that has given up a position and stays in use: what it has of that position is deleted at
    /// the end.
    pub clearable: bool,
}

/// Shards that are missing on the new members of groups.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MissingPage {
    /// The shards that can be restored.
    pub missing: Vec<OwedEntry>,
    /// Their bytes.
    pub bytes: u64,
    /// Extents with fewer than k shards left.
    pub short: Vec<ExtentId>,
    /// Where to continue; `None` at the end.
    pub next: Option<ExtentId>,
}

/// Shards on drives that have given up their positions, and whose new members have them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LeftPage {
    /// The shards, by drive.
    pub shards: BTreeMap<DriveId, Vec<ShardKey>>,
    /// The map for which that holds.
    pub map: Epoch,
    /// Where to continue; `None` at the end.
    pub next: Option<ExtentId>,
}

/// Tries of a commit that the ledger refuses because the cluster map is out of date.
const STALE_TRIES: u32 = 5;

/// Waits of a write for a newer cluster map.
pub(crate) struct NewerMap<'a> {
    client: &'a Client,
    /// The map when the last try began.
    known: Arc<Topology>,
    tries: u32,
}

impl<'a> NewerMap<'a> {
    pub(crate) fn new(client: &'a Client) -> Self {
        Self { client, known: client.inner.extents.topology(), tries: 0 }
    }

    /// Waits a moment for a newer map than that of the last try. Returns whether to try again.
    pub(crate) async fn step(&mut self) -> bool {
        self.client.inner.extents.newer_map(&self.known).await;
        self.known = self.client.inner.extents.topology();
        self.tries += 1;
        self.tries < STALE_TRIES
    }
}

/// Where the shards of one extent were found.
struct ExtentShards {
    shape: ShardShape,
    at: Vec<(DriveId, ShardIndex)>,
}

impl ExtentShards {
    /// Small pieces are copies under every profile.
    fn is_copies(&self) -> bool {
        self.shape.k == 1 && self.shape.extent_len <= COPIES_BYTES_MAX
    }

    /// Adds the missing shards of this extent.
    fn add_missing(&self, id: ExtentId, group: &PlacementGroup, topology: &Topology, page: &mut MissingPage) {
        let ShardShape { pg, k, m, extent_len } = self.shape;
        let n = k + m;
        let held: BTreeSet<ShardIndex> = self
            .at
            .iter()
            .filter(|(drive, shard)| topology.holders(pg, *shard).any(|holder| holder == *drive))
            .map(|(_, shard)| *shard)
            .collect();
        let positions: BTreeSet<u8> = group.rebuilding.iter().map(|rebuilding| rebuilding.position).collect();
        for position in positions.into_iter().filter(|position| *position < n) {
            let shard = ShardIndex(position);
            let Some(drive) = group.members.get(usize::from(position)).copied() else { continue };
            if self.at.contains(&(drive, shard)) {
                continue;
            }
            if held.len() < usize::from(k) {
                page.short.push(id);
                return;
            }
            page.bytes += u64::from(shard_len(extent_len, k));
            page.missing.push(OwedEntry { drive, id, pg, shard, k, n, extent_len });
        }
    }
}

impl Client {
    /// The groups with positions to rebuild onto drives that accept shards, the most exposed first.
    pub fn rebuild_groups(&self) -> Vec<RebuildGroup> {
        let topology = self.inner.extents.topology();
        let readable = |drive: DriveId| topology.readable(drive).is_some();
        let usable = |drive: &DriveId| topology.usable(*drive).is_some();
        let ready = |group: &&PlacementGroup| {
            let mut positions = group.rebuilding.iter();
            positions
                .all(|rebuilding| group.members.get(usize::from(rebuilding.position)).is_some_and(usable))
        };
        let groups = topology.map.groups.iter().filter(|group| !group.rebuilding.is_empty()).filter(ready);
        let mut groups: Vec<RebuildGroup> = groups
            .map(|group| {
                let is_new = |position: u8| group.is_rebuilding(position);
                let exposed = (0u8..).zip(&group.members).filter(|(position, member)| {
                    let has_all = !is_new(*position) && readable(**member);
                    !has_all && !group.sources(*position).any(readable)
                });
                let complete = group.members.iter().all(|member| readable(*member));
                let exposed = exposed.count() as u8;
                let mut left = topology.left(group).map(|(_, from)| from);
                let clearable = left.all(readable);
                RebuildGroup { pg: group.id, epoch: group.epoch, exposed, complete, clearable }
            })
            .collect();
        groups.sort_by_key(|group| (std::cmp::Reverse(group.exposed), group.pg));
        groups
    }

    /// Tells the ledger that these groups have new members. From then on, every shard of a committed extent that went to a
    /// drive that has lost its position is in an inventory or owed.
    ///
    /// # Errors
    /// Those of requests to the owner.
    pub async fn advance_groups(&self, groups: &[RebuildGroup]) -> Result<(), FsError> {
        for some in groups.chunks(GROUPS_PER_REQUEST) {
            let groups = some.iter().map(|group| (group.pg, group.epoch)).collect();
            self.call(MetaRequest::AdvanceGroups { groups }).await?;
        }
        Ok(())
    }

    /// Shards of these groups that are missing on new members, from the extents after `after`.
    ///
    /// # Errors
    /// `Unavailable` if a drive did not list its shards.
    pub async fn missing_page(
        &self,
        groups: &HashSet<PgId>,
        after: Option<ExtentId>,
    ) -> Result<MissingPage, FsError> {
        let topology = self.inner.extents.topology();
        let (found, next) = self.inventory_page(&topology, groups, after).await?;
        let mut page = MissingPage { next, ..MissingPage::default() };
        for (id, found) in found {
            if let Some(group) = topology.map.group(found.shape.pg) {
                found.add_missing(id, group, &topology, &mut page);
            }
        }
        Ok(page)
    }

    /// Shards of these groups on drives that gave up their positions, from the extents after `after`.
    ///
    /// # Errors
    /// `Unavailable` if a drive did not list its shards, or does not answer.
    pub async fn left_page(
        &self,
        groups: &HashSet<PgId>,
        after: Option<ExtentId>,
    ) -> Result<LeftPage, FsError> {
        let topology = self.inner.extents.topology();
        let of_groups = groups.iter().filter_map(|pg| topology.map.group(*pg));
        let mut left = of_groups.flat_map(|group| topology.left(group));
        if left.any(|(_, from)| topology.readable(from).is_none()) {
            return Err(FsError::Unavailable);
        }
        let (found, next) = self.inventory_page(&topology, groups, after).await?;
        let mut page = LeftPage { next, map: topology.map.epoch, ..LeftPage::default() };
        for (extent, ExtentShards { shape, at }) in found {
            let Some(group) = topology.map.group(shape.pg) else { continue };
            for (position, from) in topology.left(group) {
                let shard = ShardIndex(position);
                let member = group.members.get(usize::from(position));
                if member.is_some_and(|member| at.contains(&(*member, shard))) && at.contains(&(from, shard))
                {
                    let key = ShardKey { ledger: self.inner.ledger, extent, shard };
                    page.shards.entry(from).or_default().push(key);
                }
            }
        }
        Ok(page)
    }

    /// Deletes shards that new members have.
    ///
    /// # Errors
    /// `Unavailable` if a drive does not delete them, or if the map is another one by now: positions may have moved back. Then they
    /// have to be looked for again.
    pub async fn delete_left(&self, page: LeftPage) -> Result<(), FsError> {
        let topology = self.inner.extents.topology();
        if page.map != topology.map.epoch {
            return Err(FsError::Unavailable);
        }
        for (drive, keys) in page.shards {
            let service = topology.readable(drive).ok_or(FsError::Unavailable)?;
            let deletion = service.delete(self.inner.extents.deletion(keys));
            let deleted = tokio::time::timeout(DELETE_TIMEOUT, deletion).await;
            deleted.ok().and_then(Result::ok).ok_or(FsError::Unavailable)?;
        }
        Ok(())
    }

    /// The extents of these groups after `after`, as the drives list them, up to the end of the shortest list.
    async fn inventory_page(
        &self,
        topology: &Topology,
        groups: &HashSet<PgId>,
        after: Option<ExtentId>,
    ) -> Result<(BTreeMap<ExtentId, ExtentShards>, Option<ExtentId>), FsError> {
        let ledger = self.inner.ledger;
        let members = groups.iter().filter_map(|pg| topology.map.group(*pg)).flat_map(|group| {
            let sources = group.rebuilding.iter().map(|rebuilding| rebuilding.from);
            group.members.iter().copied().chain(sources)
        });
        let drives: BTreeSet<DriveId> = members.filter(|drive| topology.readable(*drive).is_some()).collect();
        let start = ShardKey { ledger, extent: after.unwrap_or_default(), shard: ShardIndex(u8::MAX) };
        let lists = drives.iter().filter_map(|drive| {
            let service = topology.readable(*drive)?;
            Some(async move { service.list(Some(start), PAGE).await.map(|list| (*drive, list)) })
        });
        let lists: Result<Vec<(DriveId, Vec<ShardEntry>)>, _> = join_all(lists).await.into_iter().collect();
        let lists = lists.map_err(|_| FsError::Unavailable)?;
        let ends = |list: &[ShardEntry]| {
            list.len() < PAGE || list.last().is_some_and(|last| last.key.ledger != ledger)
        };
        // An unfinished list may hold more shards of its last extent.
        let cut = lists.iter().filter(|(_, list)| !ends(list)).filter_map(|(_, list)| list.last());
        let next = cut.map(|last| ExtentId(last.key.extent.0 - 1)).min();
        let mut found: BTreeMap<ExtentId, ExtentShards> = BTreeMap::new();
        for (drive, list) in lists {
            for entry in list {
                let inside = entry.key.ledger == ledger && next.is_none_or(|next| entry.key.extent <= next);
                if inside && groups.contains(&entry.shape.pg) {
                    let extent = found.entry(entry.key.extent);
                    let extent =
                        extent.or_insert_with(|| ExtentShards { shape: entry.shape, at: Vec::new() });
                    extent.at.push((drive, entry.key.shard));
                }
            }
        }
        Ok((found, next))
    }

    /// Bytes of file data in extents that are narrower than the filesystem's profile, added up from the shards on the
    /// drives. Drives that do not answer are left out.
    pub async fn narrow_bytes(&self) -> Result<u64, FsError> {
        let topology = self.inner.extents.topology();
        let groups: HashSet<PgId> = topology.narrow.iter().copied().collect();
        let (mut parts, mut after) = (0u64, None);
        while !groups.is_empty() {
            let (found, next) = self.inventory_page(&topology, &groups, after).await?;
            for found in found.values().filter(|found| !found.is_copies()) {
                let ShardShape { k, m, extent_len, .. } = found.shape;
                let whole = found.at.len() >= usize::from(k + m);
                let share = u64::from(extent_len) * found.at.len() as u64 / u64::from(k + m);
                parts += if whole { u64::from(extent_len) } else { share };
            }
            after = next;
            if after.is_none() {
                break;
            }
        }
        Ok(parts)
    }

    /// Whether foreground requests to drives take twice as long as usual. Upkeep holds back then.
    pub fn strained(&self) -> bool {
        self.inner.extents.latencies.strained(self.inner.env.clock.boot_ns())
    }

    /// Drives that are much slower than their peers or do not answer. They are spared where others can do their work.
    pub fn slow_drives(&self) -> Vec<DriveId> {
        self.inner.extents.latencies.slow(self.inner.env.clock.boot_ns())
    }
}
