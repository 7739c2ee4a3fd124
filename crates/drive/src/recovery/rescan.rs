//! Recovery without a checkpoint: the newest record of each shard in all frames of all segments.
//!
//! What a scan cannot know: a shard was deleted, and the segment with its tombstone has been used again before the
//! one with the shard was. Such a shard is there again, with the bytes that it always had. It does no harm, since
//! nothing refers to its extent, and is deleted once the drive's shards are compared with what the ledgers refer to.
//! Nothing that was acknowledged and not deleted is missed, unless its own frame is damaged.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;

use base::env::File;
use wire::drive::ShardKey;

use super::{Recovered, RecoveryReport};
use crate::engine::append::entry_of;
use crate::format::Geometry;
use crate::format::segment::{SegmentClass, SegmentHeader};
use crate::format::superblock::{CheckpointPointer, Superblock};
use crate::index::{Entry, Index, Segment, SegmentState};
use crate::scan::{FoundFrame, ScanFrom, first_generation, read_blocks, scan_segment, verify_payloads};

/// Opens of a drive are counted in the upper half of a segment's generation.
const INCARNATION_SHIFT: u32 = 32;

/// Rebuilds the index from frames alone.
///
/// # Errors
/// A sentence for people if a segment cannot be read at all: nothing may be written to it then.
pub(super) fn rescan(
    file: &dyn File,
    geometry: Geometry,
    superblock: &Superblock,
) -> Result<Recovered, String> {
    let mut rescan = Rescan::new(geometry, superblock);
    for id in 0..geometry.segments {
        if rescan.segments[id as usize].state == SegmentState::Free
            && let Some((class, generation)) = opened(file, geometry, superblock, id)?
        {
            rescan.take_segment(file, geometry, id, class, generation);
        }
    }
    rescan.settle_doubtful(file, geometry);
    Ok(rescan.finish(geometry, superblock))
}

/// Class and generation of a segment that holds frames or did.
fn opened(
    file: &dyn File,
    geometry: Geometry,
    superblock: &Superblock,
    id: u32,
) -> Result<Option<(SegmentClass, u64)>, String> {
    let block = read_blocks(file, geometry.offset(id, 0), 1);
    if let Ok(block) = &block {
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        match SegmentHeader::decode(block) {
            // Of a drive that was here before.
            Ok(header) if header.uuid != superblock.uuid => return Ok(None),
            Ok(header) if header.segment == id => {
                let data = header.class != SegmentClass::Index;
                return Ok(data.then_some((header.class, header.generation)));
            }
            _ => {}
        }
    }
    // The header is damaged. Frames lie from the front on, so the first of them is as new as any.
    match (first_generation(file, geometry, id), block) {
        (Some(generation), _) => Ok(Some((SegmentClass::Bulk, generation))),
        (None, Ok(_)) => Ok(None),
        (None, Err(error)) => Err(format!("segment {id} cannot be read: {error}")),
    }
}

/// The last thing that frames say about a shard.
struct Told {
    /// Number and generation of the frame: a number may have been given twice if a crash tore the first.
    at: (u64, u64),
    /// `None` if it was deleted.
    entry: Option<Entry>,
}

struct Rescan {
    told: BTreeMap<ShardKey, Told>,
    segments: Vec<Segment>,
    /// By incarnation: the last frame that is known to have been durable then. What a later incarnation says of
    /// it says nothing about frames that a crash tore before.
    durable: BTreeMap<u64, u64>,
    /// Frames that a crash may have torn.
    doubtful: Vec<FoundFrame>,
    last_seq: u64,
    report: RecoveryReport,
}

impl Rescan {
    fn new(geometry: Geometry, superblock: &Superblock) -> Self {
        let mut segments = Index::free_drive(geometry);
        let CheckpointPointer { frontier_seq, next_segment_generation, .. } = superblock.checkpoint;
        for id in superblock.checkpoint.segments.iter().chain(&superblock.previous.segments) {
            // Released when the checkpoint that replaces these is written.
            let segment = &mut segments[*id as usize];
            (segment.state, segment.class, segment.used_blocks) =
                (SegmentState::Index, SegmentClass::Index, 1);
        }
        Self {
            told: BTreeMap::new(),
            segments,
            durable: BTreeMap::from([(next_segment_generation >> INCARNATION_SHIFT, frontier_seq)]),
            doubtful: Vec::new(),
            last_seq: frontier_seq,
            report: RecoveryReport { rescanned: true, ..RecoveryReport::default() },
        }
    }

    fn take_segment(
        &mut self,
        file: &dyn File,
        geometry: Geometry,
        id: u32,
        class: SegmentClass,
        generation: u64,
    ) {
        let scan = scan_segment(file, geometry, ScanFrom { segment: id, generation, block: 1, last_seq: 0 });
        self.report.lost_frames += u64::from(scan.gaps);
        let Some(last) = scan.frames.last() else { return };
        let last_seq = last.header.seq;
        self.segments[id as usize] = Segment {
            state: SegmentState::Sealed,
            class,
            generation,
            used_blocks: scan.end_block,
            live_bytes: 0,
            last_seq,
            trimmed: false,
        };
        let known = scan.frames.iter().map(|frame| frame.header.durable_seq).max().unwrap_or(0);
        let durable = self.durable.entry(generation >> INCARNATION_SHIFT).or_default();
        *durable = known.max(*durable);
        self.last_seq = self.last_seq.max(last_seq);
        for frame in scan.frames {
            if self.is_durable(&frame) { self.take(&frame) } else { self.doubtful.push(frame) }
        }
        // The checksums of frames are kept only as long as they may be needed.
        let doubtful = std::mem::take(&mut self.doubtful);
        let (certain, doubtful): (Vec<_>, Vec<_>) =
            doubtful.into_iter().partition(|frame| self.is_durable(frame));
        self.doubtful = doubtful;
        certain.iter().for_each(|frame| self.take(frame));
    }

    fn is_durable(&self, frame: &FoundFrame) -> bool {
        let incarnation = frame.header.generation >> INCARNATION_SHIFT;
        self.durable.get(&incarnation).is_some_and(|durable| frame.header.seq <= *durable)
    }

    /// Believes a whole frame.
    fn take(&mut self, frame: &FoundFrame) {
        self.report.frames += 1;
        for index in 0..frame.records.len() {
            self.tell(frame, index);
        }
    }

    fn tell(&mut self, frame: &FoundFrame, index: usize) {
        let (at, key) = (order(frame), frame.records[index].key);
        let entry = entry_in(frame, index);
        match self.told.entry(key) {
            Slot::Vacant(slot) => {
                slot.insert(Told { at, entry });
            }
            Slot::Occupied(mut slot) if slot.get().at <= at => {
                slot.insert(Told { at, entry });
            }
            Slot::Occupied(_) => {}
        }
    }

    /// A frame that is not known to have been durable may have been torn by a crash: then what it does not hold counts
    /// no more than when the drive was opened after that crash, and hides nothing that lies elsewhere.
    fn settle_doubtful(&mut self, file: &dyn File, geometry: Geometry) {
        for frame in std::mem::take(&mut self.doubtful) {
            let intact = verify_payloads(file, geometry, &frame);
            if !intact.contains(&false) {
                self.take(&frame);
                continue;
            }
            self.report.torn_frames += 1;
            for (index, intact) in intact.into_iter().enumerate() {
                if intact && entry_in(&frame, index).is_some() {
                    self.tell(&frame, index);
                }
            }
        }
    }

    fn finish(mut self, geometry: Geometry, superblock: &Superblock) -> Recovered {
        let entries: BTreeMap<ShardKey, Entry> =
            self.told.into_iter().filter_map(|(key, told)| Some((key, told.entry?))).collect();
        let mut lives = vec![false; self.segments.len()];
        for entry in entries.values() {
            lives[entry.segment as usize] = true;
        }
        for (segment, lives) in self.segments.iter_mut().zip(lives) {
            if segment.state == SegmentState::Sealed && !lives {
                (segment.state, segment.used_blocks) = (SegmentState::Free, 0);
            }
        }
        Recovered {
            index: Index::recovered(geometry, entries, self.segments),
            next_seq: self.last_seq + 1,
            checkpoint: superblock.checkpoint.clone(),
            previous: superblock.previous.clone(),
            report: self.report,
        }
    }
}

fn order(frame: &FoundFrame) -> (u64, u64) {
    (frame.header.seq, frame.header.generation)
}

fn entry_in(frame: &FoundFrame, index: usize) -> Option<Entry> {
    let record = &frame.records[index];
    entry_of(&frame.header, record.op, record.blocks, record.payload_block, record.sums_at, record.shape)
}
