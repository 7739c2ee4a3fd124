//! Space: extent ids for sessions, extents to delete, maps to purge, usage sums.

use base::{DriveId, ExtentId, FsError, SessionId, ShardIndex};
use wire::meta::{EXTENT_RANGE_IDS, FILE_BYTES_MAX, FreeExtent, MetaReply, OwedEntry};
use wire::tier::TierMode;

use super::{Op, OpenRange, Outcome, Stop, Volatile};
use crate::keys::Keys;
use crate::values::{ExtentPlace, IdRange, RangeState, Usage};

/// Pieces removed by one step of a purge.
const PURGE_PIECES: usize = 2048;
const FREE_PAGE_MAX: u32 = 4096;
/// Ranges that a session may commit ids of. No write lasts until the session has used up all the other ranges.
pub(super) const OPEN_RANGES_MAX: usize = 64;

impl Op<'_> {
    pub(super) fn alloc_extents(&mut self) -> Outcome {
        let first = ExtentId(self.advance("next_extent", EXTENT_RANGE_IDS)?);
        let range = IdRange { session: self.session, count: EXTENT_RANGE_IDS, open: RangeState::Open };
        self.txn.put(self.keys.range(first), &range);
        self.close_oldest_ranges()?;
        self.volatile.ranges.push(OpenRange { first, count: EXTENT_RANGE_IDS, session: self.session });
        Ok(MetaReply::Range { first, count: EXTENT_RANGE_IDS })
    }

    /// Closes the oldest ranges of a session, so that a long session leaves no more ranges behind than one that ends.
    /// Closed ranges are searched for orphans and then dropped.
    fn close_oldest_ranges(&mut self) -> Result<(), FsError> {
        let own = self.volatile.ranges.iter().filter(|range| range.session == self.session);
        let mut own: Vec<ExtentId> = own.map(|range| range.first).collect();
        own.sort_unstable();
        let surplus = (own.len() + 1).saturating_sub(OPEN_RANGES_MAX);
        for first in own.into_iter().take(surplus) {
            let key = self.keys.range(first);
            if let Some(range) = self.txn.get::<IdRange>(&key)? {
                self.txn.update(key, &IdRange { open: RangeState::Closed, ..range });
            }
            self.volatile.ranges.retain(|range| range.first != first);
        }
        Ok(())
    }

    pub(super) fn close_ranges(&mut self, session: SessionId) -> Result<(), Stop> {
        self.volatile.ranges.retain(|range| range.session != session);
        for (key, bytes) in self.txn.scan(&self.keys.ranges(), usize::MAX)? {
            let range: IdRange = self.txn.decode(&key, &bytes)?;
            if range.session == session && range.open == RangeState::Open {
                self.txn.update(key, &IdRange { open: RangeState::Closed, ..range });
            }
        }
        Ok(())
    }

    pub(super) fn statfs(&mut self) -> Outcome {
        let usage = self.usage()?;
        Ok(MetaReply::StatFs { used_bytes: usage.stored_bytes, inodes: usage.inodes })
    }

    fn usage(&self) -> Result<Usage, Stop> {
        Ok(self.txn.get(&self.keys.value("usage"))?.unwrap_or_default())
    }

    pub(super) fn heartbeat(&mut self, in_use_ver: u64) -> Outcome {
        self.must_be_heard()?;
        self.volatile.sessions.insert(self.session, in_use_ver);
        // The sums need not be durable: while the log is full, a session must not fall silent for them.
        let (used_bytes, tier) =
            self.txn.aside(|| Ok::<_, Stop>((self.usage()?.stored_bytes, self.tier_state()?.stat)))?;
        let staged = tier.queued.bytes + tier.both.bytes;
        let drive_bytes = match tier.mode {
            TierMode::On if !tier.queueing => staged,
            // Not all extents are counted yet, and clones are counted once per reference.
            _ => staged.max(used_bytes.saturating_sub(tier.away.bytes)),
        };
        // The caller counts events.
        Ok(MetaReply::Beat { version: self.committed.0, used_bytes, drive_bytes, events: 0 })
    }

    /// The answer prolongs the session's term: it must not leave while the ledger may still say that the session was silent.
    pub(super) fn must_be_heard(&self) -> Result<(), FsError> {
        self.txn.get_bytes(&self.keys.session(self.session)).map(drop)
    }

    /// What a session gets after a rest counts once the next owner waits for it.
    pub(super) fn must_be_awake(&self) -> Result<(), FsError> {
        if self.volatile.woken.contains_key(&self.session) { self.must_be_heard() } else { Ok(()) }
    }

    /// The oldest ledger version that running reads use. Those of a session that was not heard of for too long do not count.
    pub(super) fn oldest_in_use(&self) -> u64 {
        let Volatile { sessions, leases, .. } = &*self.volatile;
        let alive = sessions.iter().filter(|(session, _)| !leases.is_silent(**session, self.now.awake_ns));
        alive.map(|(_, in_use_ver)| *in_use_ver).min().unwrap_or(u64::MAX)
    }

    /// Extents whose last reference was removed in a durable batch that every running read has seen.
    pub(super) fn next_free(&mut self, after: Option<(u64, ExtentId)>, limit: u32) -> Outcome {
        let in_use = self.oldest_in_use();
        let before = in_use.min(self.committed.0 + 1);
        let limit = limit.clamp(1, FREE_PAGE_MAX) as usize;
        let mut extents = Vec::new();
        let mut range = self.keys.frees(before);
        if let Some((free_ver, id)) = after {
            range.0 = self.keys.free(free_ver, id);
            range.0.push(0);
        }
        for (key, bytes) in self.txn.scan(&range, limit)? {
            let (free_ver, id) = Keys::free_of_key(&key);
            let place: ExtentPlace = self.txn.decode(&key, &bytes)?;
            extents.push(FreeExtent { free_ver, id, pg: place.pg, n: place.n });
        }
        let withheld = !self.txn.scan(&self.keys.frees_from(before), 1)?.is_empty();
        Ok(MetaReply::Free { extents, withheld })
    }

    pub(super) fn freed(&mut self, extents: &[FreeExtent], drives: &[DriveId]) -> Outcome {
        let anything_owed = !self.txn.scan(&self.keys.all_owed(), 1)?.is_empty();
        for extent in extents {
            self.txn.delete(self.keys.free(extent.free_ver, extent.id));
            for drive in drives.iter().filter(|_| anything_owed) {
                let key = self.keys.owed(*drive, extent.id);
                if self.txn.get_bytes(&key)?.is_some() {
                    self.txn.delete(key);
                }
            }
        }
        Ok(MetaReply::Done)
    }

    pub(super) fn owed(&mut self, after: Option<(DriveId, ExtentId)>, limit: u32) -> Outcome {
        let mut range = self.keys.all_owed();
        if let Some((drive, extent)) = after {
            range.0 = self.keys.owed(drive, extent);
            range.0.push(0);
        }
        let mut found = Vec::new();
        for (key, bytes) in self.txn.scan(&range, limit.clamp(1, FREE_PAGE_MAX) as usize)? {
            let (drive, id) = Keys::owed_of_key(&key);
            let ExtentPlace { pg, n, k, shard, extent_len } = self.txn.decode(&key, &bytes)?;
            found.push(OwedEntry { drive, id, pg, shard: ShardIndex(shard), k, n, extent_len });
        }
        Ok(MetaReply::Owed(found))
    }

    pub(super) fn repaired(&mut self, shards: &[(DriveId, ExtentId)]) -> Outcome {
        let mut gone = Vec::new();
        for (drive, extent) in shards {
            let key = self.keys.owed(*drive, *extent);
            match self.txn.get_bytes(&key)? {
                Some(_) => self.txn.delete(key),
                None => gone.push((*drive, *extent)),
            }
        }
        Ok(MetaReply::NotOwed(gone))
    }

    pub(super) fn purge_step(&mut self) -> Outcome {
        let Some((key, _)) = self.txn.scan(&self.keys.purges(), 1)?.pop() else {
            return self.purge_bucket();
        };
        let removed = self.remove_range(Keys::map_of_purge(&key), 0, FILE_BYTES_MAX, PURGE_PIECES)?;
        if removed.done >= FILE_BYTES_MAX {
            self.txn.delete(key);
        }
        Ok(MetaReply::Purged { more: true })
    }
}

// A range or page without progress would be an endless loop in the caller.
const _: () = assert!(EXTENT_RANGE_IDS > 0 && PURGE_PIECES > 1);
