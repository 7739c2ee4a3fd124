//! The in-memory index: the place of every shard, the state of every segment, and the sums of space.
//!
//! Invariant: `live_bytes` of a segment is the sum over the shards that lie in it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use base::LedgerId;
use wire::drive::{ShardEntry, ShardKey, ShardShape};
use wire::position::{KnownLedger, Position};

use crate::format::checkpoint::{ENTRY_BYTES, RUN_BLOCKS_MAX, SEGMENT_BYTES, SegmentNote, items_per_run};
use crate::format::frame::record_bytes;
use crate::format::segment::SegmentClass;
use crate::format::superblock::INDEX_SEGMENTS_MAX;
use crate::format::{BLOCK, Geometry};

/// Checkpoints on the drive while one is being written.
const CHECKPOINTS: u32 = 3;

/// The place of one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) segment: u32,
    /// First payload block, counted from the start of the segment.
    pub(crate) block: u32,
    pub(crate) blocks: u32,
    /// Bytes from the start of the segment to the checksums.
    pub(crate) sums_at: u32,
    pub(crate) shape: ShardShape,
    /// The bytes are known to be lost; only the record of the loss is kept, in `segment`.
    pub(crate) damaged: bool,
}

impl Entry {
    /// Bytes that the shard keeps alive in its segment: its payload and its record.
    pub(crate) fn live_bytes(&self) -> u64 {
        if self.damaged {
            return record_bytes(0) as u64;
        }
        u64::from(self.blocks) * BLOCK as u64 + record_bytes(self.blocks as usize) as u64
    }
}

/// The present use of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SegmentState {
    /// No recovery needs its content.
    Free,
    /// Frames are appended to it.
    Open,
    /// Holds frames; closed for appends.
    Sealed,
    /// Holds runs of a checkpoint.
    Index,
}

/// One segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    pub(crate) state: SegmentState,
    pub(crate) class: SegmentClass,
    pub(crate) generation: u64,
    /// Blocks up to the append point, header included.
    pub(crate) used_blocks: u32,
    pub(crate) live_bytes: u64,
    /// Sequence number of the last frame in it.
    pub(crate) last_seq: u64,
    /// Whether a free segment was given back to the host.
    pub(crate) trimmed: bool,
}

impl Segment {
    /// Bytes that cleaning it gives back once it is sealed.
    ///
    /// A tail that is too small for the next shard would stay unused again. So only a tail larger than any shard
    /// counts: that of a segment that was sealed by a crash.
    fn gain_bytes(&self, segment_bytes: u64) -> u64 {
        let used = u64::from(self.used_blocks) * BLOCK as u64;
        let tail = segment_bytes - used;
        let is_sealed = self.state == SegmentState::Sealed;
        // A dead segment comes back whole.
        let counts = is_sealed && (self.live_bytes == 0 || tail > segment_bytes / 2);
        (used - BLOCK as u64).saturating_sub(self.live_bytes) + if counts { tail } else { 0 }
    }
}

/// The purpose of a new segment. Each purpose stops at another level of free space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// New shards: these stop first.
    Put,
    /// Shards that extents should already have: these stop later.
    Repair,
    /// Tombstones: must work on a full drive.
    Delete,
    /// Tombstones while cleaning has nothing to give back.
    DeleteInNeed,
    /// The cleaner: it gives back more than it takes.
    Move,
}

/// Sums over all segments; they add up to the capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Usage {
    pub(crate) live_bytes: u64,
    pub(crate) garbage_bytes: u64,
    pub(crate) reserved_bytes: u64,
    pub(crate) free_bytes: u64,
    /// The part of the garbage that cleaning gives back.
    pub(crate) cleanable_bytes: u64,
}

/// Sums over segments, updated with every change of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Totals {
    live_bytes: u64,
    garbage_bytes: u64,
    cleanable_bytes: u64,
    reserved_bytes: u64,
    /// Bytes behind the append points of open segments.
    tail_bytes: u64,
    /// Sealed segments without a live shard.
    dead_segments: u32,
    index_segments: u32,
}

impl Totals {
    fn of(segment: &Segment, segment_bytes: u64) -> Self {
        let used = u64::from(segment.used_blocks) * BLOCK as u64;
        let header = BLOCK as u64;
        let mut totals = Self::default();
        match segment.state {
            SegmentState::Free => {}
            SegmentState::Index => (totals.reserved_bytes, totals.index_segments) = (segment_bytes, 1),
            SegmentState::Open | SegmentState::Sealed => {
                totals.reserved_bytes = header;
                totals.live_bytes = segment.live_bytes;
                totals.garbage_bytes = used - header - segment.live_bytes;
                totals.cleanable_bytes = segment.gain_bytes(segment_bytes);
                if segment.state == SegmentState::Open {
                    totals.tail_bytes = segment_bytes - used;
                } else {
                    totals.garbage_bytes += segment_bytes - used;
                    totals.dead_segments = u32::from(segment.live_bytes == 0);
                }
            }
        }
        totals
    }

    fn add(&mut self, other: Self) {
        self.live_bytes += other.live_bytes;
        self.garbage_bytes += other.garbage_bytes;
        self.cleanable_bytes += other.cleanable_bytes;
        self.reserved_bytes += other.reserved_bytes;
        self.tail_bytes += other.tail_bytes;
        self.dead_segments += other.dead_segments;
        self.index_segments += other.index_segments;
    }

    fn subtract(&mut self, other: Self) {
        self.live_bytes -= other.live_bytes;
        self.garbage_bytes -= other.garbage_bytes;
        self.cleanable_bytes -= other.cleanable_bytes;
        self.reserved_bytes -= other.reserved_bytes;
        self.tail_bytes -= other.tail_bytes;
        self.dead_segments -= other.dead_segments;
        self.index_segments -= other.index_segments;
    }
}

/// Shards and segments of a drive.
pub(crate) struct Index {
    pub(crate) geometry: Geometry,
    entries: BTreeMap<ShardKey, Entry>,
    /// Shards whose bytes are known to be damaged, `Entry::damaged` or not.
    bad: BTreeSet<ShardKey>,
    /// The newest known position of each ledger.
    positions: BTreeMap<LedgerId, Position>,
    segments: Vec<Segment>,
    totals: Totals,
    free: VecDeque<u32>,
    /// A free segment that is being given back to the host; it must not be taken until that is done.
    held: Option<u32>,
    /// The segments to which frames are appended, at most one of each class.
    open: Vec<u32>,
}

impl Index {
    /// The segments of an empty drive.
    pub(crate) fn free_drive(geometry: Geometry) -> Vec<Segment> {
        let free = Segment {
            state: SegmentState::Free,
            class: SegmentClass::Bulk,
            generation: 0,
            used_blocks: 0,
            live_bytes: 0,
            last_seq: 0,
            trimmed: false,
        };
        vec![free; geometry.segments as usize]
    }

    /// The index of an empty drive.
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            entries: BTreeMap::new(),
            bad: BTreeSet::new(),
            positions: BTreeMap::new(),
            segments: Self::free_drive(geometry),
            totals: Totals::default(),
            free: (0..geometry.segments).collect(),
            held: None,
            open: Vec::new(),
        }
    }

    /// The index that recovery found.
    pub(crate) fn recovered(
        geometry: Geometry,
        entries: BTreeMap<ShardKey, Entry>,
        positions: BTreeMap<LedgerId, Position>,
        segments: Vec<Segment>,
    ) -> Self {
        let mut index = Self::new(geometry);
        index.segments = segments;
        index.free =
            (0..geometry.segments).filter(|id| index.segment(*id).state == SegmentState::Free).collect();
        index.open =
            (0..geometry.segments).filter(|id| index.segment(*id).state == SegmentState::Open).collect();
        for segment in &mut index.segments {
            segment.live_bytes = 0;
        }
        for entry in entries.values() {
            index.segments[entry.segment as usize].live_bytes += entry.live_bytes();
        }
        for segment in &index.segments {
            index.totals.add(Totals::of(segment, geometry.segment_bytes));
        }
        index.bad = entries.iter().filter(|(_, entry)| entry.damaged).map(|(key, _)| *key).collect();
        index.entries = entries;
        index.positions = positions;
        index
    }

    /// Changes a segment and updates the totals.
    fn change(&mut self, id: u32, change: impl FnOnce(&mut Segment)) {
        let segment = &mut self.segments[id as usize];
        self.totals.subtract(Totals::of(segment, self.geometry.segment_bytes));
        change(segment);
        self.totals.add(Totals::of(segment, self.geometry.segment_bytes));
    }

    /// The place of a shard.
    pub(crate) fn get(&self, key: &ShardKey) -> Option<Entry> {
        self.entries.get(key).copied()
    }

    /// One segment.
    pub(crate) fn segment(&self, id: u32) -> &Segment {
        &self.segments[id as usize]
    }

    /// Stores or moves a shard.
    pub(crate) fn set(&mut self, key: ShardKey, entry: Entry) {
        self.change(entry.segment, |segment| segment.live_bytes += entry.live_bytes());
        if let Some(old) = self.entries.insert(key, entry) {
            self.change(old.segment, |segment| segment.live_bytes -= old.live_bytes());
        }
        if entry.damaged {
            self.bad.insert(key)
        } else {
            self.bad.remove(&key)
        };
    }

    /// Notes that the bytes of a shard are damaged, if the shard still lies at `entry`.
    pub(crate) fn mark_bad(&mut self, key: ShardKey, entry: &Entry) {
        if self.entries.get(&key) == Some(entry) {
            self.bad.insert(key);
        }
    }

    /// Whether the bytes of a shard are known to be damaged.
    pub(crate) fn is_bad(&self, key: &ShardKey) -> bool {
        self.bad.contains(key)
    }

    /// Number of shards that are known to be damaged.
    pub(crate) fn bad_len(&self) -> usize {
        self.bad.len()
    }

    /// Removes a shard from the index.
    pub(crate) fn remove(&mut self, key: &ShardKey) {
        if let Some(old) = self.entries.remove(key) {
            self.change(old.segment, |segment| segment.live_bytes -= old.live_bytes());
            self.bad.remove(key);
        }
    }

    /// The newest position of a ledger that is durable here.
    pub(crate) fn position(&self, ledger: LedgerId) -> Option<Position> {
        self.positions.get(&ledger).copied()
    }

    /// Positions of the ledgers after `after`.
    pub(crate) fn positions_after(&self, after: Option<LedgerId>) -> impl Iterator<Item = &Position> {
        let start = after.map_or(std::ops::Bound::Unbounded, std::ops::Bound::Excluded);
        self.positions.range((start, std::ops::Bound::Unbounded)).map(|(_, position)| position)
    }

    /// Stores the newest position of a ledger.
    pub(crate) fn set_position(&mut self, position: Position) {
        self.positions.insert(position.ledger, position);
    }

    /// The position and shards known of each ledger.
    pub(crate) fn known_ledgers(&self) -> Vec<KnownLedger> {
        let mut ledgers: BTreeSet<LedgerId> = self.positions.keys().copied().collect();
        let mut rest = self.entries.range(..);
        while let Some((key, _)) = rest.next() {
            ledgers.insert(key.ledger);
            let Some(next) = key.ledger.0.checked_add(1) else { break };
            rest = self.entries.range(ShardKey::first_of(LedgerId(next))..);
        }
        let known = |ledger: LedgerId| {
            let all = ShardKey::first_of(ledger)..=ShardKey::last_of(ledger);
            let highest_extent = self.entries.range(all).next_back().map(|(key, _)| key.extent);
            KnownLedger { ledger, position: self.position(ledger), highest_extent }
        };
        ledgers.into_iter().map(known).collect()
    }

    /// Number of shards stored.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Shards after `after` in key order.
    pub(crate) fn after(&self, after: Option<ShardKey>) -> impl Iterator<Item = (&ShardKey, &Entry)> {
        let start = match after {
            Some(key) => std::ops::Bound::Excluded(key),
            None => std::ops::Bound::Unbounded,
        };
        self.entries.range((start, std::ops::Bound::Unbounded))
    }

    /// Up to `limit` shards after `after`, in the form of the drive interface.
    pub(crate) fn list(&self, after: Option<ShardKey>, limit: usize) -> Vec<ShardEntry> {
        let entry = |(key, entry): (&ShardKey, &Entry)| ShardEntry {
            key: *key,
            shape: entry.shape,
            len_bytes: entry.blocks * BLOCK as u32,
        };
        self.after(after).take(limit).map(entry).collect()
    }

    /// The data segments for a checkpoint, without the segments in `leaving`.
    pub(crate) fn notes(&self, leaving: &[u32]) -> Vec<SegmentNote> {
        let note = |(id, segment): (usize, &Segment)| {
            let open = match segment.state {
                SegmentState::Open => true,
                SegmentState::Sealed => false,
                SegmentState::Free | SegmentState::Index => return None,
            };
            let note = SegmentNote {
                segment: id as u32,
                class: segment.class,
                open,
                generation: segment.generation,
                used_blocks: segment.used_blocks,
                last_seq: segment.last_seq,
            };
            (!leaving.contains(&note.segment)).then_some(note)
        };
        self.segments.iter().enumerate().filter_map(note).collect()
    }
}

/// Accounting of space.
impl Index {
    /// Number of free segments, the reserved ones included.
    pub(crate) fn free_segments(&self) -> u32 {
        self.free.len() as u32
    }

    /// Most segments that the next checkpoint needs.
    pub(crate) fn checkpoint_segments(&self) -> u32 {
        let usable = self.geometry.segment_blocks() - 1;
        let runs_per_segment = (usable / RUN_BLOCKS_MAX).max(1);
        let run_blocks = usable.min(RUN_BLOCKS_MAX);
        // Margin for shards stored while the checkpoint is written.
        let entries = self.entries.len() + self.entries.len() / 8 + 1024;
        let bytes = entries * ENTRY_BYTES + self.segments.len() * SEGMENT_BYTES;
        // Each of the two kinds may leave a block half empty, and every run has a header.
        if bytes.div_ceil(BLOCK) + 4 <= run_blocks.min(usable - 1) as usize {
            return 1;
        }
        let runs = entries.div_ceil(items_per_run(run_blocks, ENTRY_BYTES))
            + self.segments.len().div_ceil(items_per_run(run_blocks, SEGMENT_BYTES));
        runs.div_ceil(runs_per_segment as usize) as u32
    }

    /// Free segments reserved for checkpoints: with the index segments in use they hold one checkpoint more than is
    /// kept.
    fn checkpoint_reserve(&self) -> u32 {
        (self.checkpoint_segments() * CHECKPOINTS).saturating_sub(self.totals.index_segments)
    }

    /// Free segments that new shards must leave: 5 % of the drive, at least one more than repairs.
    pub(crate) fn user_reserve(&self) -> u32 {
        (self.checkpoint_reserve() + 4).max(self.geometry.segments.div_ceil(20))
    }

    /// Free segments that repairs must leave: 2 % of the drive, at least the checkpoints' reserve and three more: two
    /// for tombstones and one to clean into.
    fn repair_reserve(&self) -> u32 {
        (self.checkpoint_reserve() + 3).max(self.geometry.segments.div_ceil(50))
    }

    /// Bytes of free segments and of the tails of open ones.
    pub(crate) fn room_bytes(&self) -> u64 {
        u64::from(self.free_segments()) * self.geometry.segment_bytes + self.totals.tail_bytes
    }

    /// Whether appending `blocks` blocks leaves the room reserved for other purposes. Cleaning and deletes may always
    /// append: they give back more than they take.
    pub(crate) fn may_append(&self, purpose: Purpose, blocks: u32) -> bool {
        let keep = match purpose {
            Purpose::Put => self.user_reserve(),
            Purpose::Repair => self.repair_reserve(),
            Purpose::Delete | Purpose::DeleteInNeed | Purpose::Move => return true,
        };
        let keep_bytes = u64::from(keep) * self.geometry.segment_bytes;
        self.room_bytes() >= keep_bytes + u64::from(blocks) * BLOCK as u64
    }

    /// Whether a segment may be opened.
    pub(crate) fn may_open(&self, purpose: Purpose) -> bool {
        let keep = match purpose {
            Purpose::Put => self.user_reserve(),
            Purpose::Repair => self.repair_reserve(),
            Purpose::Delete => self.checkpoint_reserve() + 2,
            Purpose::DeleteInNeed => self.checkpoint_reserve() + 1,
            Purpose::Move => self.checkpoint_reserve(),
        };
        self.free_segments() > keep
    }

    /// Whether the index can take one more shard and still be named by a superblock.
    pub(crate) fn may_grow(&self) -> bool {
        (self.checkpoint_segments() as usize) < INDEX_SEGMENTS_MAX
    }

    /// Takes the segment that was freed first, for `class`.
    pub(crate) fn take_free(
        &mut self,
        state: SegmentState,
        class: SegmentClass,
        generation: u64,
    ) -> Option<u32> {
        let at = self.free.iter().position(|id| Some(*id) != self.held)?;
        let id = self.free.remove(at).expect("it was found there");
        let taken =
            Segment { state, class, generation, used_blocks: 1, live_bytes: 0, last_seq: 0, trimmed: false };
        self.change(id, |segment| *segment = taken);
        if state == SegmentState::Open {
            self.open.push(id);
        }
        Some(id)
    }

    /// The open segment of a class.
    pub(crate) fn open_segment(&self, class: SegmentClass) -> Option<u32> {
        self.open.iter().copied().find(|id| self.segment(*id).class == class)
    }

    /// Moves the append point behind a frame.
    pub(crate) fn append(&mut self, id: u32, used_blocks: u32, last_seq: u64) {
        self.change(id, |segment| (segment.used_blocks, segment.last_seq) = (used_blocks, last_seq));
    }

    /// Closes the segment for appends.
    pub(crate) fn seal(&mut self, id: u32) {
        self.change(id, |segment| segment.state = SegmentState::Sealed);
        self.open.retain(|open| *open != id);
    }

    /// Frees a segment. Only for segments that no recovery needs.
    pub(crate) fn release(&mut self, id: u32) {
        let segment = self.segment(id);
        assert!(segment.live_bytes == 0, "a segment with live shards is never released");
        assert!(segment.state != SegmentState::Free, "a segment is released once");
        self.change(id, |segment| (segment.state, segment.used_blocks) = (SegmentState::Free, 0));
        self.free.push_back(id);
    }

    /// Holds the free segment that would be taken last, unless it was given back to the host already.
    pub(crate) fn hold_untrimmed(&mut self) -> Option<u32> {
        // The last free segment may be needed at any moment.
        if self.free.len() < 2 {
            return None;
        }
        self.held = self.free.iter().rev().copied().find(|id| !self.segment(*id).trimmed);
        self.held
    }

    /// Ends the hold: the segment was given back, or that failed.
    pub(crate) fn end_hold(&mut self, id: u32) {
        self.held = None;
        self.segments[id as usize].trimmed = true;
    }

    /// Sealed segments without a live shard: free once a checkpoint that records their death is durable.
    pub(crate) fn dead_segments(&self) -> Vec<u32> {
        let dead =
            |id: &u32| self.segment(*id).state == SegmentState::Sealed && self.segment(*id).live_bytes == 0;
        (0..self.geometry.segments).filter(dead).collect()
    }

    /// Bytes that cleaning a sealed segment gives back.
    fn gain_bytes(&self, id: u32) -> u64 {
        self.segment(id).gain_bytes(self.geometry.segment_bytes)
    }

    /// The sealed segment with the highest gain, if that is at least `gain_min_bytes`.
    pub(crate) fn victim(&self, gain_min_bytes: u64) -> Option<u32> {
        (0..self.geometry.segments)
            .filter(|id| self.segment(*id).state == SegmentState::Sealed && self.segment(*id).live_bytes > 0)
            .max_by_key(|id| self.gain_bytes(*id))
            .filter(|id| self.gain_bytes(*id) >= gain_min_bytes)
    }

    /// As [`Index::victim`], but the segment with the highest dead part x age: a segment that has long been partly dead
    /// is not about to die by itself. `newest_seq` is the frame that was written last.
    pub(crate) fn old_victim(&self, gain_min_bytes: u64, newest_seq: u64) -> Option<u32> {
        let weight = |id: u32| {
            let age = newest_seq.saturating_sub(self.segment(id).last_seq) + 1;
            u128::from(self.gain_bytes(id)) * u128::from(age)
        };
        (0..self.geometry.segments)
            .filter(|id| self.segment(*id).state == SegmentState::Sealed && self.segment(*id).live_bytes > 0)
            .filter(|id| self.gain_bytes(*id) >= gain_min_bytes)
            .max_by_key(|id| weight(*id))
    }

    /// Number of [`Index::dead_segments`].
    pub(crate) fn dead_count(&self) -> u32 {
        self.totals.dead_segments
    }

    /// The division of the capacity by use.
    pub(crate) fn usage(&self) -> Usage {
        let room = self.room_bytes();
        let kept = room.min(u64::from(self.user_reserve()) * self.geometry.segment_bytes);
        Usage {
            live_bytes: self.totals.live_bytes,
            garbage_bytes: self.totals.garbage_bytes,
            cleanable_bytes: self.totals.cleanable_bytes,
            reserved_bytes: self.geometry.outside_bytes() + self.totals.reserved_bytes + kept,
            free_bytes: room - kept,
        }
    }
}
