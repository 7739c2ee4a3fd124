//! Rebuilding: restores the shards of lost positions, group by group, the most exposed first.

use std::collections::{BTreeMap, HashMap, HashSet};

use base::{ExtentId, FsError, NodeId, PgId};
use client::{OwedEntry, RebuildGroup};
use layout::shard_len;

use super::{Kind, Work};

/// An extent that has had too few shards for this long is lost, and not in the middle of a write or deletion.
const SHORT_NS: u64 = 15_000_000_000;
/// Counting narrow bytes takes at most one part in this many of the time ...
const NARROW_SHARE: u64 = 20;
/// ... and is done at most this often.
const NARROW_EVERY_NS: u64 = 5_000_000_000;

/// State that is kept from one pass to the next.
#[derive(Default)]
pub(super) struct Memory {
    /// Extents with too few shards, and the time at which that was first seen.
    short: HashMap<ExtentId, u64>,
    narrow_at_ns: u64,
}

/// The result of one walk through the inventories.
#[derive(Default)]
struct Swept {
    short: Vec<ExtentId>,
    /// Whether a shard has to be tried again.
    unfinished: bool,
}

impl Work {
    pub(super) async fn rebuild(&mut self) -> Result<(), FsError> {
        let done = self.progress.rebuilt();
        let mut groups = self.client.rebuild_groups();
        groups.retain(|group| done.get(&group.pg) != Some(&group.epoch));
        if groups.is_empty() {
            self.progress.set_left(&BTreeMap::new());
            self.rebuild.short.clear();
            return Ok(());
        }
        self.client.advance_groups(&groups).await?;
        let all: HashSet<PgId> = groups.iter().map(|group| group.pg).collect();
        let left = self.missing_bytes(&all).await?;
        self.progress.set_left(&left);
        let mut short = HashSet::new();
        for some in groups.chunk_by(|one, other| one.exposed == other.exposed) {
            let exposed = some.first().map_or(0, |group| group.exposed);
            let swept = self.sweep(&some.iter().map(|group| group.pg).collect(), exposed).await?;
            short.extend(swept.short.iter().copied());
            self.conclude(some, &swept).await?;
            // Another drive may have been lost in the meantime, which changes the order.
            if self.stopped.now() || swept.unfinished {
                break;
            }
        }
        self.rebuild.short.retain(|id, _| short.contains(id));
        Ok(())
    }

    /// The bytes that are missing on the drives of each node.
    async fn missing_bytes(&self, groups: &HashSet<PgId>) -> Result<BTreeMap<Option<NodeId>, u64>, FsError> {
        let (mut bytes, mut after) = (BTreeMap::new(), None);
        loop {
            let page = self.client.missing_page(groups, after).await?;
            for shard in &page.missing {
                *bytes.entry(self.node_of(shard)).or_default() +=
                    u64::from(shard_len(shard.extent_len, shard.k));
            }
            after = page.next;
            if after.is_none() || self.stopped.now() {
                return Ok(bytes);
            }
        }
    }

    /// Restores all shards that are missing in these groups. `exposed` positions of each group cannot be read.
    async fn sweep(&self, groups: &HashSet<PgId>, exposed: u8) -> Result<Swept, FsError> {
        let (mut swept, mut after) = (Swept::default(), None);
        let is_bare = |shard: &OwedEntry| exposed >= shard.n - shard.k;
        loop {
            let page = self.client.missing_page(groups, after).await?;
            let restored = self.restore(&page.missing, Kind::Missing, &is_bare).await?;
            swept.unfinished |= restored.put_off + restored.lost > 0;
            if self.stopped.now() {
                swept.unfinished = true;
                return Ok(swept);
            }
            swept.short.extend(page.short);
            after = page.next;
            if after.is_none() {
                return Ok(swept);
            }
        }
    }

    /// Marks groups as rebuilt. Extents with too few shards are checked again until they are certainly lost.
    async fn conclude(&mut self, groups: &[RebuildGroup], swept: &Swept) -> Result<(), FsError> {
        let now = self.env.clock.boot_ns();
        let short: HashSet<ExtentId> = swept.short.iter().copied().collect();
        for id in &short {
            self.rebuild.short.entry(*id).or_insert(now);
        }
        let settled = |id: &ExtentId| now.saturating_sub(self.rebuild.short[id]) >= SHORT_NS;
        let complete = groups.iter().all(|group| group.complete);
        if swept.unfinished || !short.iter().all(settled) || !(short.is_empty() || complete) {
            return Ok(());
        }
        let lost = self.referred(short).await?;
        if !lost.is_empty() {
            let some: Vec<&ExtentId> = lost.iter().take(16).collect();
            tracing::error!(extents = lost.len(), ?some, "extents have too few shards left to be read");
            self.progress.add_lost(lost.len() as u64);
        }
        let clearable: Vec<&RebuildGroup> = groups.iter().filter(|group| group.clearable).collect();
        if self.clear(&clearable).await? {
            clearable.iter().for_each(|group| self.progress.set_rebuilt(group.pg, group.epoch));
        }
        Ok(())
    }

    /// Deletes what drives that stay in use still have of the positions that they gave up. Readers look at the new members first.
    /// Returns whether nothing is left.
    async fn clear(&self, groups: &[&RebuildGroup]) -> Result<bool, FsError> {
        let (groups, mut after) = (groups.iter().map(|group| group.pg).collect(), None);
        loop {
            let page = self.client.left_page(&groups, after).await?;
            after = page.next;
            self.client.delete_left(page).await?;
            if after.is_none() {
                return Ok(true);
            }
            if self.stopped.now() {
                return Ok(false);
            }
        }
    }

    /// Those of these extents that a map refers to. Drives that came back also have shards of other extents: those
    /// deleted while they were away, and those of writers that never committed.
    async fn referred(&self, extents: HashSet<ExtentId>) -> Result<HashSet<ExtentId>, FsError> {
        let (mut found, mut after) = (HashSet::new(), None);
        while !extents.is_empty() {
            let (entries, next) = self.client.scan_map(after).await?;
            let named =
                entries.iter().filter_map(|entry| entry.piece.content.extent()).map(|extent| extent.id);
            found.extend(named.filter(|id| extents.contains(id)));
            after = next;
            if after.is_none() {
                break;
            }
        }
        Ok(found)
    }

    /// Counts narrow bytes now and then.
    pub(super) async fn count_narrow(&mut self) -> Result<(), FsError> {
        let begun = self.env.clock.boot_ns();
        if begun < self.rebuild.narrow_at_ns {
            return Ok(());
        }
        let bytes = self.client.narrow_bytes().await?;
        self.progress.set_narrow(bytes);
        let ended = self.env.clock.boot_ns();
        let rest = NARROW_EVERY_NS.max(NARROW_SHARE * ended.saturating_sub(begun));
        self.rebuild.narrow_at_ns = ended + rest;
        Ok(())
    }
}
