//! The cleaner: moves the live shards of a mostly dead segment to another one, so that the segment can be reused.

use std::collections::HashMap;
use std::io;
use std::time::Duration;

use base::checksum::blocks_match;
use bytes::Bytes;
use wire::drive::ShardKey;

use super::append::{Item, Plan};
use super::{Durability, Engine, Job, Reading, Then};
use crate::buffer::AlignedBuf;
use crate::device::{Device, Op, ReadVia};
use crate::format::BLOCK;
use crate::format::frame::{NOTE_BYTES, RecordOp, decode_note};
use crate::index::{Entry, Index, Purpose};

/// Index entries visited per step of the search for the victim's shards.
const SCAN_STEP: usize = 16_384;
/// Payload moved by one job.
const MOVE_BYTES: u64 = 1 << 20;
/// Records moved by one job.
const MOVE_RECORDS: usize = 256;
/// Cleaning a victim must give back at least this part of a segment: a quarter if there is time, little if a request
/// waits. The reserve leaves room for 2 % of tombstones, and the bytes that those make dead exceed this part of some
/// segment.
const WORTH: u64 = 4;
const WORTH_IN_NEED: u64 = 256;
/// Free room at which waiting requests go on: enough for a few requests, at most 3 % of a small drive, at least a
/// segment.
const ROOM_BYTES: u64 = 4 << 20;
/// Time without user requests after which the drive counts as idle.
const IDLE_NS: u64 = 200_000_000;
/// Cleaning rate in idle time: flash should not wear for space that no request waits for.
const IDLE_BYTES_PER_S: u64 = 64 << 20;
/// Ranges closer than this are read together.
const READ_GAP_BLOCKS: u32 = 4;

enum Stage {
    /// Searching the index for the victim's shards.
    Scanning(Option<ShardKey>),
    /// Between two moves.
    Idle,
    /// Reading the shards that are moved next.
    Reading { waiting: HashMap<u64, u32> },
    /// The shards are read; the next job writes them.
    Ready,
}

/// A segment that is being emptied.
pub(super) struct Cleaning {
    victim: u32,
    stage: Stage,
    /// Shards still to move, the last one first.
    left: Vec<(ShardKey, Entry)>,
    group: Vec<(ShardKey, Entry)>,
    /// The pieces read: first block in the segment, and bytes.
    pieces: Vec<(u32, AlignedBuf)>,
}

impl Cleaning {
    /// Whether cleaning can go on without a completion.
    pub(super) fn wants_step(&self) -> bool {
        !matches!(self.stage, Stage::Reading { .. })
    }
}

impl Engine {
    /// Whether cleaning or a checkpoint can still make room.
    pub(super) fn can_reclaim(&self, index: &Index) -> bool {
        if self.cleaning.is_some() || self.checkpoint.is_some() || index.dead_count() > 0 {
            return true;
        }
        // The same conditions as in `choose_victim`, so that a request that waits for cleaning waits for real work.
        self.may_clean(index)
            && self.vain_worth < WORTH_IN_NEED
            && index.victim(index.geometry.segment_bytes / WORTH_IN_NEED).is_some()
    }

    fn may_clean(&self, index: &Index) -> bool {
        self.closing.is_none()
            && index.may_open(Purpose::Move)
            && self.cleaned_in_vain <= index.geometry.segments
    }

    /// Whether a request waits for room: then a victim with little dead space is good enough.
    pub(super) fn is_pressed(&self) -> bool {
        self.pressed || !self.room_waiters.is_empty()
    }

    /// Answers the requests for room that need not wait any longer.
    pub(super) fn answer_room_waiters(&mut self) {
        self.room_waiters.retain(|waiter| !waiter.is_closed());
        if self.room_waiters.is_empty() {
            return;
        }
        let index = self.shared.index();
        let wanted =
            (ROOM_BYTES / index.geometry.segment_bytes).min((index.geometry.segments / 32).into()).max(1);
        let has_room = u64::from(index.free_segments()) >= u64::from(index.user_reserve()) + wanted;
        let is_over = has_room || (self.running.is_none() && !self.can_reclaim(&index));
        drop(index);
        if is_over {
            for waiter in self.room_waiters.drain(..) {
                // The receiver is gone if the caller gave up.
                let _ = waiter.send(());
            }
        }
    }

    /// Whether room is short, or a request waits for room.
    fn is_needed(&self, index: &Index) -> bool {
        self.is_pressed() || index.free_segments() <= index.user_reserve() + 1 + index.geometry.segments / 32
    }

    /// Whether no user request came for [`IDLE_NS`].
    fn is_idle(&self) -> bool {
        let since_ns = self.clock.boot_ns().saturating_sub(self.last_request_ns);
        since_ns >= IDLE_NS && self.backlog() == 0 && self.closing.is_none()
    }

    /// Whether cleaning that has begun goes on now: unless room is needed, it pauses for users.
    pub(super) fn may_step(&self, index: &Index) -> bool {
        self.is_needed(index) || self.is_idle()
    }

    /// Whether idle work is due and not yet known to be empty.
    pub(super) fn idle_work_ready(&self) -> bool {
        !self.nothing_idle && self.is_idle() && self.clock.boot_ns() >= self.idle_not_before_ns
    }

    /// How long to wait for idle work, if there may be some.
    pub(crate) fn idle_wait(&self) -> Option<Duration> {
        if let Some(retry_ns) = self.host_retry_ns() {
            let left_ns = retry_ns.saturating_sub(self.clock.boot_ns());
            return Some(Duration::from_nanos(left_ns).max(Duration::from_millis(1)));
        }
        let waits = self.running.is_none()
            && self.closing.is_none()
            && !self.shared.has_failed()
            && !self.trimming.is_under_way();
        if !waits || self.nothing_idle {
            return None;
        }
        let due_ns = (self.last_request_ns + IDLE_NS).max(self.idle_not_before_ns);
        let left_ns = due_ns.saturating_sub(self.clock.boot_ns());
        Some(Duration::from_nanos(left_ns).max(Duration::from_millis(1)))
    }

    /// Chooses a victim, searches its shards, starts reads.
    pub(super) fn step_cleaning(&mut self, device: &mut dyn Device) {
        if self.cleaning.is_none() {
            self.choose_victim(device);
        } else if !self.may_step(&self.shared.index()) {
            return;
        }
        let Some(mut cleaning) = self.cleaning.take() else { return };
        match cleaning.stage {
            Stage::Scanning(cursor) => {
                cleaning.stage = self.scan(cursor, cleaning.victim, &mut cleaning.left);
                self.cleaning = Some(cleaning);
            }
            Stage::Idle if cleaning.left.is_empty() => {
                self.cleaned_in_vain = self.cleaned_in_vain.saturating_add(1);
                let pause_ns = self.shared.geometry.segment_bytes * 1_000_000_000 / IDLE_BYTES_PER_S;
                self.idle_not_before_ns = self.clock.boot_ns() + pause_ns;
            }
            Stage::Idle => {
                self.read_group(&mut cleaning, device);
                self.cleaning = Some(cleaning);
            }
            Stage::Reading { .. } | Stage::Ready => self.cleaning = Some(cleaning),
        }
    }

    fn choose_victim(&mut self, device: &mut dyn Device) {
        let index = self.shared.index();
        let worth = if self.is_pressed() { WORTH_IN_NEED } else { WORTH };
        let gain_min_bytes = index.geometry.segment_bytes / worth;
        let may_clean = self.may_clean(&index);
        let victim = if self.is_needed(&index) {
            let found = if self.vain_worth < worth { index.victim(gain_min_bytes) } else { None };
            self.vain_worth = if found.is_none() { self.vain_worth.max(worth) } else { 0 };
            found.filter(|_| may_clean)
        } else if self.idle_work_ready() {
            index.old_victim(gain_min_bytes, self.counters.durable_seq).filter(|_| may_clean)
        } else {
            return;
        };
        drop(index);
        let Some(victim) = victim else {
            if self.idle_work_ready() {
                self.clean_up_idle(device);
            }
            return;
        };
        self.cleaning = Some(Cleaning {
            victim,
            stage: Stage::Scanning(None),
            left: Vec::new(),
            group: Vec::new(),
            pieces: Vec::new(),
        });
    }

    /// No victim is worth moving. Entirely dead segments come back with one or two checkpoints, if there are enough of
    /// them. After that the drive has time to give space back to the host.
    fn clean_up_idle(&mut self, device: &mut dyn Device) {
        let index = self.shared.index();
        let due = index.dead_count() > index.geometry.segments / 32;
        drop(index);
        if due && self.checkpoint.is_none() && self.running.is_none() {
            self.start_checkpoint();
        } else if !due && !self.step_trimming(device) {
            self.nothing_idle = true;
        }
    }

    fn scan(&self, cursor: Option<ShardKey>, victim: u32, found: &mut Vec<(ShardKey, Entry)>) -> Stage {
        let index = self.shared.index();
        let mut last = cursor;
        let mut seen = 0;
        for (key, entry) in index.after(cursor).take(SCAN_STEP) {
            seen += 1;
            last = Some(*key);
            if entry.segment == victim {
                found.push((*key, *entry));
            }
        }
        if seen == SCAN_STEP {
            return Stage::Scanning(last);
        }
        found.sort_by_key(|(_, entry)| std::cmp::Reverse(entry.block));
        Stage::Idle
    }

    fn read_group(&mut self, cleaning: &mut Cleaning, device: &mut dyn Device) {
        let mut bytes = 0;
        cleaning.group.clear();
        cleaning.pieces.clear();
        while bytes < MOVE_BYTES && cleaning.group.len() < MOVE_RECORDS {
            let Some((key, entry)) = cleaning.left.pop() else { break };
            bytes += entry.live_bytes();
            cleaning.group.push((key, entry));
        }
        let mut waiting = HashMap::new();
        for (first, end) in ranges(&cleaning.group) {
            let token = self.token();
            self.reads.insert(token, Reading::Cleaner);
            waiting.insert(token, first);
            let offset = self.shared.geometry.offset(cleaning.victim, first);
            let buffer = AlignedBuf::any_blocks(end - first);
            device.submit(Op::Read { token, offset, buffer, via: ReadVia::Direct });
        }
        cleaning.stage = if waiting.is_empty() { Stage::Ready } else { Stage::Reading { waiting } };
    }

    /// Handles a read of the cleaner. Shards that could not be read count as damaged.
    pub(super) fn cleaner_read(&mut self, token: u64, result: io::Result<AlignedBuf>) {
        let Some(cleaning) = &mut self.cleaning else { return };
        let Stage::Reading { waiting } = &mut cleaning.stage else { return };
        let Some(first) = waiting.remove(&token) else { return };
        if let Ok(buffer) = result {
            cleaning.pieces.push((first, buffer));
        }
        if waiting.is_empty() {
            cleaning.stage = Stage::Ready;
        }
    }

    /// The job that writes the group that was read.
    pub(super) fn move_job(&mut self) -> Option<Job> {
        let cleaning = self.cleaning.as_mut()?;
        if !matches!(cleaning.stage, Stage::Ready) {
            return None;
        }
        let shared = self.shared.clone();
        let mut index = shared.index_mut();
        let class = index.segment(cleaning.victim).class;
        let mut plan = Plan::default();
        let mut unplaced = Vec::new();
        for (key, entry) in std::mem::take(&mut cleaning.group) {
            // Deleted or rewritten since: nothing to move. No batch can come between this check and the write.
            if index.get(&key) != Some(entry) {
                continue;
            }
            let item = moved_item(key, entry, &cleaning.pieces);
            if plan.add(&mut index, &mut self.counters, class, Purpose::Move, item).is_err() {
                unplaced.push((key, entry));
            }
        }
        cleaning.pieces.clear();
        cleaning.stage = Stage::Idle;
        cleaning.left.extend(unplaced.iter().rev());
        if plan.is_empty() {
            if !unplaced.is_empty() {
                // No segment is free to move into: the next checkpoint may free one.
                self.cleaning = None;
                self.cleaned_in_vain = self.cleaned_in_vain.saturating_add(1);
            }
            return None;
        }
        let last_seq = plan.commit_space(&mut index);
        self.sums.needed_moves += u64::from(self.is_needed(&index));
        drop(index);
        let encoded = plan.encode(shared.geometry, shared.uuid, self.counters.durable_seq);
        let moved_bytes = encoded.writes.iter().map(|(_, buffer)| buffer.len() as u64).sum::<u64>();
        self.appended_bytes += moved_bytes;
        self.sums.reclaimed_bytes = self.sums.reclaimed_bytes.saturating_sub(moved_bytes);
        let then = Then::Moved { changes: encoded.changes, headers: encoded.headers, last_seq };
        Some(Job { writes: encoded.writes, durability: Durability::Now, then })
    }
}

/// The block ranges to read for these shards, joined where they are close: (first, end).
fn ranges(group: &[(ShardKey, Entry)]) -> Vec<(u32, u32)> {
    let mut wanted = Vec::new();
    for (_, entry) in group.iter().filter(|(_, entry)| !entry.damaged) {
        wanted.push((entry.block, entry.block + entry.blocks));
        wanted.push(sums_range(entry));
    }
    wanted.sort_unstable();
    let mut joined: Vec<(u32, u32)> = Vec::new();
    for (first, end) in wanted {
        match joined.last_mut() {
            Some(last) if first <= last.1 + READ_GAP_BLOCKS => last.1 = last.1.max(end),
            _ => joined.push((first, end)),
        }
    }
    joined
}

/// The blocks that hold a shard's checksums.
fn sums_range(entry: &Entry) -> (u32, u32) {
    let end = entry.sums_at + entry.blocks * 4;
    // The note lies in front of the checksums.
    ((entry.sums_at - NOTE_BYTES as u32) / BLOCK as u32, end.div_ceil(BLOCK as u32))
}

/// Bytes `at..at + len` of the segment, taken from the pieces that were read.
fn extract(pieces: &[(u32, AlignedBuf)], at: usize, len: usize) -> Option<&[u8]> {
    pieces.iter().find_map(|(first, bytes)| {
        let start = at.checked_sub(*first as usize * BLOCK)?;
        bytes.get(start..start + len)
    })
}

/// The item to append for a shard: its bytes with their old checksums, or a record that its bytes are lost.
fn moved_item(key: ShardKey, entry: Entry, pieces: &[(u32, AlignedBuf)]) -> Item {
    let intact = || {
        let payload = extract(pieces, entry.block as usize * BLOCK, entry.blocks as usize * BLOCK)?;
        let sums = extract(pieces, entry.sums_at as usize, entry.blocks as usize * 4)?;
        let sums: Vec<u32> =
            sums.chunks_exact(4).map(|sum| u32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]])).collect();
        blocks_match(key.extent, key.shard, 0, payload, &sums).then_some((payload, sums))
    };
    let note = extract(pieces, entry.sums_at as usize - NOTE_BYTES, NOTE_BYTES);
    let note = note.and_then(decode_note).unwrap_or_default();
    match if entry.damaged { None } else { intact() } {
        Some((payload, sums)) => Item {
            op: RecordOp::Put,
            key,
            shape: entry.shape,
            note,
            blocks: entry.blocks,
            sums,
            payload: Bytes::copy_from_slice(payload),
        },
        None => Item {
            op: RecordOp::Damaged,
            key,
            shape: entry.shape,
            note,
            blocks: entry.blocks,
            sums: Vec::new(),
            payload: Bytes::new(),
        },
    }
}
