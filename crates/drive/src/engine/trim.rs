//! Gives dead space back to the filesystem or device below: whole free segments, and long dead runs inside segments
//! that stay in use. Only in idle time, and only when there is nothing to clean.
//!
//! - A live byte, a frame header and a checksum are never given back.
//! - A run is given back once no recovery verifies it any more. All of it was dead at the frame `dead_seq`, so every
//!   checkpoint from which a recovery may start must cover that frame: the newest and the one before.
//! - A free segment is not taken while it is being given back.

use std::collections::HashMap;
use std::io;

use wire::drive::ShardKey;

use super::{Engine, Reading};
use crate::buffer::AlignedBuf;
use crate::device::{Device, Op, ReadVia};
use crate::format::BLOCK;
use crate::format::checkpoint::ENTRY_BYTES;
use crate::format::frame::FrameHeader;
use crate::format::segment::SegmentClass;
use crate::index::SegmentState;

/// Bytes given back per second of idle time. The rate is bounded because the filesystem below delays other work during
/// a punch.
const BYTES_PER_S: u64 = 256 << 20;
/// Index entries visited per step of the search for a segment's shards.
const SCAN_STEP: usize = 16_384;
/// Blocks read at the place of a frame: most headers are shorter.
const HEADER_READ_BLOCKS: u32 = 2;
/// Waiting runs must exceed a checkpoint's bytes by this factor: two checkpoints are needed to make the runs ready.
const WORTH: u64 = 8;

/// A run of blocks of a segment: first block and end.
type Run = (u32, u32);

/// Dead runs of a segment that wait for checkpoints.
struct Ready {
    segment: u32,
    generation: u64,
    runs: Vec<Run>,
    /// The frame at whose time everything in the runs was already dead.
    dead_seq: u64,
}

impl Ready {
    fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run_bytes(*run)).sum()
    }
}

/// The search for dead runs of one segment.
struct Search {
    segment: u32,
    generation: u64,
    /// Block at which the next frame starts.
    block: u32,
    /// Payloads of the frames found, and the tail.
    payloads: Vec<Run>,
    /// Live shards in the segment, and runs that were given back before.
    kept: Vec<Run>,
}

enum Stage {
    Idle,
    /// Reading a frame header of that many blocks.
    Walking(Search, u32),
    /// Searching the index for the shards of the segment.
    Scanning(Search, Option<ShardKey>),
}

/// The space that a running operation gives back.
#[derive(Clone, Copy)]
enum Punching {
    Segment(u32),
    Run(u32, u64, Run),
}

/// The state of giving space back; see the module.
pub(super) struct Trimming {
    /// Shortest run that is given back, in bytes; `None` if no space is given back.
    run_bytes_min: Option<u64>,
    stage: Stage,
    waiting: Vec<Ready>,
    punching: Option<(u64, Punching)>,
    /// Whether a header is being read.
    reading: bool,
    not_before_ns: u64,
    /// Generation of each used segment, and its runs that were given back.
    given: HashMap<u32, (u64, Vec<Run>)>,
    /// Generation and live bytes of a segment at the last look.
    looked_at: HashMap<u32, (u64, u64)>,
}

impl Trimming {
    pub(super) fn new(run_bytes_min: Option<u64>) -> Self {
        Self {
            run_bytes_min,
            stage: Stage::Idle,
            waiting: Vec::new(),
            punching: None,
            reading: false,
            not_before_ns: 0,
            given: HashMap::new(),
            looked_at: HashMap::new(),
        }
    }

    /// Whether an operation is under way.
    pub(super) fn is_under_way(&self) -> bool {
        self.punching.is_some() || self.reading
    }

    fn waiting_bytes(&self) -> u64 {
        self.waiting.iter().map(Ready::bytes).sum()
    }

    fn remember(&mut self, segment: u32, generation: u64, run: Run) {
        let given = self.given.entry(segment).or_insert((generation, Vec::new()));
        if given.0 != generation {
            *given = (generation, Vec::new());
        }
        given.1.push(run);
    }
}

impl Engine {
    /// Does one step, in idle time. Returns whether there is more to do, now or later.
    pub(super) fn step_trimming(&mut self, device: &mut dyn Device) -> bool {
        let Some(run_bytes_min) = self.trimming.run_bytes_min else { return false };
        if self.trimming.is_under_way() {
            return true;
        }
        let now_ns = self.clock.boot_ns();
        if now_ns < self.trimming.not_before_ns {
            self.idle_not_before_ns = self.trimming.not_before_ns;
            return true;
        }
        let untrimmed = self.shared.index_mut().hold_untrimmed();
        if let Some(segment) = untrimmed {
            let len_bytes = self.shared.geometry.segment_bytes;
            let offset = self.shared.geometry.offset(segment, 0);
            self.punch(Punching::Segment(segment), offset, len_bytes, device);
            return true;
        }
        if let Some((segment, generation, run)) = self.next_run() {
            let offset = self.shared.geometry.offset(segment, run.0);
            self.punch(Punching::Run(segment, generation, run), offset, run_bytes(run), device);
            return true;
        }
        self.search_runs(run_bytes_min, device) || self.checkpoint_for_runs()
    }

    fn punch(&mut self, punching: Punching, offset: u64, len_bytes: u64, device: &mut dyn Device) {
        let token = self.token();
        self.trimming.punching = Some((token, punching));
        self.trimming.not_before_ns = self.clock.boot_ns() + len_bytes * 1_000_000_000 / BYTES_PER_S;
        device.submit(Op::Punch { token, offset, len_bytes });
    }

    /// Handles the completion of a punch. Returns whether the token belongs to one.
    pub(super) fn punched(&mut self, token: u64, result: &io::Result<()>) -> bool {
        let Some((_, punching)) = self.trimming.punching.take_if(|(waited, _)| *waited == token) else {
            return false;
        };
        if let Err(error) = result {
            // No data is lost: the space stays with the drive.
            tracing::info!(drive = %self.shared.drive, %error, "space is not given back any more");
            self.trimming.run_bytes_min = None;
            self.trimming.waiting.clear();
        }
        match punching {
            Punching::Segment(segment) => {
                self.shared.index_mut().end_hold(segment);
                if result.is_ok() {
                    self.shared.note_trimmed(self.shared.geometry.segment_bytes);
                }
            }
            Punching::Run(segment, generation, run) if result.is_ok() => {
                self.trimming.remember(segment, generation, run);
                self.shared.note_trimmed(run_bytes(run));
            }
            Punching::Run(..) => {}
        }
        true
    }

    /// No recovery replays a frame up to this one, from whichever checkpoint it starts.
    fn settled_seq(&self) -> u64 {
        let (newest, previous) = (&self.superblock.checkpoint, &self.superblock.previous);
        if previous.generation == 0 {
            newest.frontier_seq
        } else {
            previous.frontier_seq.min(newest.frontier_seq)
        }
    }

    /// The next run that no recovery reads any more.
    fn next_run(&mut self) -> Option<(u32, u64, Run)> {
        let settled_seq = self.settled_seq();
        let index = self.shared.index();
        let in_use = |ready: &Ready| {
            let segment = index.segment(ready.segment);
            segment.generation == ready.generation && segment.state == SegmentState::Sealed
        };
        // Released segments are given back whole.
        self.trimming.waiting.retain(|ready| !ready.runs.is_empty() && in_use(ready));
        let ready = self.trimming.waiting.iter_mut().find(|ready| ready.dead_seq <= settled_seq)?;
        let run = ready.runs.pop()?;
        Some((ready.segment, ready.generation, run))
    }

    /// Whether enough runs wait to be worth the checkpoints that make them ready. Starts one if so.
    fn checkpoint_for_runs(&mut self) -> bool {
        let index_bytes = self.shared.index().len() as u64 * ENTRY_BYTES as u64;
        let waiting_bytes = self.trimming.waiting_bytes();
        if waiting_bytes == 0 || waiting_bytes < WORTH * index_bytes {
            return false;
        }
        if self.checkpoint.is_none() && self.running.is_none() {
            self.start_checkpoint();
        }
        true
    }

    /// Continues the search for dead runs. Returns whether there is anything to search.
    fn search_runs(&mut self, run_bytes_min: u64, device: &mut dyn Device) -> bool {
        match std::mem::replace(&mut self.trimming.stage, Stage::Idle) {
            Stage::Idle => {
                let Some(segment) = self.next_segment(run_bytes_min) else { return false };
                let generation = self.shared.index().segment(segment).generation;
                let search = Search { segment, generation, block: 1, payloads: Vec::new(), kept: Vec::new() };
                self.trimming.stage = Stage::Walking(search, HEADER_READ_BLOCKS);
            }
            Stage::Walking(search, blocks) => self.walk(search, blocks, device),
            Stage::Scanning(search, cursor) => self.scan_kept(search, cursor, run_bytes_min),
        }
        true
    }

    /// A segment that may have dead runs and was not searched since they died.
    fn next_segment(&mut self, run_bytes_min: u64) -> Option<u32> {
        let durable_seq = self.counters.durable_seq;
        let index = self.shared.index();
        let looked_at = &mut self.trimming.looked_at;
        let found = (0..index.geometry.segments).find(|id| {
            let segment = index.segment(*id);
            // A batch under way may still add shards to a segment that is sealed already.
            let settled = segment.state == SegmentState::Sealed && segment.last_seq <= durable_seq;
            if !settled || segment.class != SegmentClass::Bulk || segment.live_bytes == 0 {
                return false;
            }
            let dead_bytes = index.geometry.segment_bytes - BLOCK as u64 - segment.live_bytes;
            let seen = looked_at.get(id).filter(|(generation, _)| *generation == segment.generation);
            let died_bytes = seen.map_or(dead_bytes, |(_, live)| live.saturating_sub(segment.live_bytes));
            died_bytes >= run_bytes_min
        })?;
        let segment = index.segment(found);
        looked_at.insert(found, (segment.generation, segment.live_bytes));
        Some(found)
    }

    /// Whether the segment is unchanged since the search began.
    fn is_current(&self, search: &Search) -> bool {
        let index = self.shared.index();
        let segment = index.segment(search.segment);
        segment.generation == search.generation && segment.state == SegmentState::Sealed
    }

    fn walk(&mut self, mut search: Search, blocks: u32, device: &mut dyn Device) {
        if !self.is_current(&search) {
            return;
        }
        let (used_blocks, end) = {
            let index = self.shared.index();
            (index.segment(search.segment).used_blocks, index.geometry.segment_blocks())
        };
        if search.block >= used_blocks {
            search.payloads.push((used_blocks, end));
            self.trimming.stage = Stage::Scanning(search, None);
            return;
        }
        let blocks = blocks.min(end - search.block);
        let token = self.token();
        self.reads.insert(token, Reading::Trimming);
        self.trimming.reading = true;
        let offset = self.shared.geometry.offset(search.segment, search.block);
        self.trimming.stage = Stage::Walking(search, blocks);
        device.submit(Op::Read { token, offset, buffer: AlignedBuf::blocks(blocks), via: ReadVia::Direct });
    }

    /// Handles a frame header that was read. A damaged header ends the walk: the layout behind it is unknown.
    pub(super) fn header_read(&mut self, result: io::Result<AlignedBuf>) {
        self.trimming.reading = false;
        let Stage::Walking(mut search, blocks) = std::mem::replace(&mut self.trimming.stage, Stage::Idle)
        else {
            return;
        };
        let header = result.ok().and_then(|bytes| Some((FrameHeader::peek(&bytes[..BLOCK]).ok()?, bytes)));
        let segment_blocks = self.shared.geometry.segment_blocks();
        let here = |header: &FrameHeader| {
            header.generation == search.generation
                && header.segment == search.segment
                && header.start_block == search.block
                && header.start_block + header.blocks() <= segment_blocks
        };
        self.trimming.stage = match header.filter(|(header, _)| here(header)) {
            Some((header, _)) if header.header_blocks > blocks => {
                Stage::Walking(search, header.header_blocks)
            }
            Some((header, bytes))
                if FrameHeader::decode(&bytes[..header.header_blocks as usize * BLOCK]).is_ok() =>
            {
                let first = search.block + header.header_blocks;
                search.block += header.blocks();
                search.payloads.push((first, search.block));
                Stage::Walking(search, HEADER_READ_BLOCKS)
            }
            _ => Stage::Scanning(search, None),
        };
    }

    /// Searches the index for the live shards of the segment. At the end of the index the dead runs are known.
    fn scan_kept(&mut self, mut search: Search, cursor: Option<ShardKey>, run_bytes_min: u64) {
        if !self.is_current(&search) {
            return;
        }
        let (mut last, mut seen) = (cursor, 0);
        let index = self.shared.index();
        for (key, entry) in index.after(cursor).take(SCAN_STEP) {
            seen += 1;
            last = Some(*key);
            if entry.segment == search.segment {
                search.kept.push((entry.block, entry.block + entry.blocks));
            }
        }
        drop(index);
        if seen == SCAN_STEP {
            self.trimming.stage = Stage::Scanning(search, last);
            return;
        }
        let Search { segment, generation, payloads, mut kept, .. } = search;
        if let Some((given_in, runs)) = self.trimming.given.get(&segment)
            && *given_in == generation
        {
            kept.extend(runs);
        }
        let runs = dead_runs(&payloads, kept, run_bytes_min);
        if !runs.is_empty() {
            let dead_seq = self.counters.durable_seq;
            self.trimming.waiting.retain(|ready| ready.segment != segment);
            self.trimming.waiting.push(Ready { segment, generation, runs, dead_seq });
        }
    }
}

fn run_bytes((first, end): Run) -> u64 {
    u64::from(end - first) * BLOCK as u64
}

/// The parts of `payloads` that do not overlap `kept`, if they are long enough.
fn dead_runs(payloads: &[Run], mut kept: Vec<Run>, run_bytes_min: u64) -> Vec<Run> {
    kept.sort_unstable();
    let mut runs = Vec::new();
    for (first, end) in payloads {
        let mut at = *first;
        for (kept_first, kept_end) in &kept {
            if *kept_end <= at || *kept_first >= *end {
                continue;
            }
            runs.push((at, (*kept_first).max(at)));
            at = (*kept_end).min(*end);
        }
        runs.push((at, *end));
    }
    runs.retain(|run| run_bytes(*run) >= run_bytes_min.max(1));
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(payloads: &[Run], kept: &[Run], blocks_min: u64, expected: &[Run]) {
        assert_eq!(dead_runs(payloads, kept.to_vec(), blocks_min * BLOCK as u64), expected);
    }

    #[test]
    fn dead_runs_are_what_nothing_keeps() {
        check(&[(2, 10)], &[], 1, &[(2, 10)]);
        check(&[(2, 10)], &[(4, 6)], 1, &[(2, 4), (6, 10)]);
        check(&[(2, 10)], &[(8, 10), (2, 4)], 1, &[(4, 8)]);
        check(&[(2, 10)], &[(2, 10)], 1, &[]);
        check(&[(2, 10)], &[(0, 3), (9, 20), (5, 6)], 1, &[(3, 5), (6, 9)]);
    }

    #[test]
    fn runs_never_span_a_frame_header_and_short_ones_stay() {
        check(&[(2, 10), (11, 20)], &[], 1, &[(2, 10), (11, 20)]);
        check(&[(2, 10), (11, 20)], &[(12, 13)], 8, &[(2, 10)]);
        check(&[(2, 2)], &[], 0, &[]);
    }
}
