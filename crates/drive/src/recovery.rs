//! Recovery: reads the checkpoint, then replays the frames behind its frontier. Changes nothing on the device.
//!
//! A frame that is not intact either was never acknowledged, because a crash tore it, or was damaged later. Every frame
//! names the last frame that was durable when it was written, which tells the two apart: up to that number it is
//! damage, and only the records concerned are lost.

use std::collections::BTreeMap;

use base::env::File;
use base::{DriveUuid, LedgerId};
use wire::drive::{DriveMark, ShardKey};
use wire::position::Position;

use crate::engine::append::entry_of;
use crate::format::Geometry;
use crate::format::segment::SegmentClass;
use crate::format::superblock::{CheckpointPointer, Superblock};
use crate::index::{Entry, Index, Segment, SegmentState};
use crate::scan::{
    CheckpointContent, FoundFrame, Scan, ScanFrom, read_blocks, read_checkpoint, scan_segment,
    segment_header, verify_payloads,
};

/// The findings of a recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct RecoveryReport {
    /// Whether the drive was closed properly, so that nothing had to be replayed.
    pub was_closed: bool,
    /// Whether the newest checkpoint was damaged and the older one was used.
    pub fell_back: bool,
    /// Shards in the checkpoint.
    pub checkpoint_entries: u64,
    /// Frames replayed.
    pub frames: u64,
    /// Frames dropped because a crash tore them; no such frame was acknowledged.
    pub torn_frames: u64,
    /// Records of acknowledged frames whose bytes are damaged.
    pub damaged_records: u64,
    /// Frames whose headers are damaged: their shards are unknown.
    pub lost_frames: u64,
    /// The drive's mark before it was opened.
    pub found: DriveMark,
    /// Whether the mark was higher once: the writes since then are missing, and no extent lists them as owed.
    pub has_gap: bool,
}

/// The state of a drive, read from its device.
pub(crate) struct Recovered {
    pub(crate) index: Index,
    pub(crate) next_seq: u64,
    /// The checkpoint that was used.
    pub(crate) checkpoint: CheckpointPointer,
    /// The older checkpoint, if it may still be needed.
    pub(crate) previous: CheckpointPointer,
    pub(crate) report: RecoveryReport,
}

/// Rebuilds the index.
///
/// # Errors
/// A sentence for people if the checkpoint and the one before it are damaged.
pub(crate) fn recover(
    file: &dyn File,
    geometry: Geometry,
    superblock: &Superblock,
) -> Result<Recovered, String> {
    let (basis, content) = basis(file, geometry, superblock)?;
    let Basis { pointer, previous, closed, fell_back, .. } = basis.clone();
    let mut segments = segments_of(&content, geometry, &basis);
    let mut report = RecoveryReport {
        was_closed: closed,
        fell_back,
        checkpoint_entries: content.entries.len() as u64,
        ..RecoveryReport::default()
    };
    let mut next_seq = pointer.frontier_seq + 1;
    let mut entries: BTreeMap<ShardKey, Entry> = content.entries.into_iter().collect();
    let by_ledger = |position: Position| (position.ledger, position);
    let mut positions: BTreeMap<LedgerId, Position> = content.positions.into_iter().map(by_ledger).collect();
    if !closed {
        let mut frames = Vec::new();
        for (segment, scan) in scans(file, geometry, &basis, &mut segments) {
            adopt_scan(&mut segments[segment as usize], &scan);
            report.lost_frames += u64::from(scan.gaps);
            frames.extend(scan.frames);
        }
        frames.sort_by_key(|frame| frame.header.seq);
        next_seq = frames.last().map_or(next_seq, |frame| next_seq.max(frame.header.seq + 1));
        let frames = intact_frames(file, geometry, pointer.frontier_seq, &frames, &mut report);
        for (frame, intact) in frames {
            replay(frame, &intact, &mut entries, &mut report);
            positions.extend(frame.positions.iter().copied().map(by_ledger));
        }
    }
    forget_unknown_places(&segments, &mut entries, &mut report);
    report.found = DriveMark { incarnation: superblock.incarnation, seq: next_seq - 1 };
    let index = Index::recovered(geometry, entries, positions, segments);
    Ok(Recovered { index, next_seq, checkpoint: pointer, previous, report })
}

/// The start of a recovery.
#[derive(Clone)]
struct Basis {
    uuid: DriveUuid,
    pointer: CheckpointPointer,
    /// Kept after a close only: the next open decides once, in its checkpoint, which frames a crash tore. A recovery
    /// from an older checkpoint must not decide that again.
    previous: CheckpointPointer,
    /// No frame was appended behind the checkpoint.
    closed: bool,
    fell_back: bool,
}

/// The newest checkpoint that can be read.
fn basis(
    file: &dyn File,
    geometry: Geometry,
    superblock: &Superblock,
) -> Result<(Basis, CheckpointContent), String> {
    let uuid = superblock.uuid;
    let none = CheckpointPointer::default;
    let reason = match read_checkpoint(file, geometry, &superblock.checkpoint) {
        Ok(content) => {
            let closed = superblock.closed;
            let previous = if closed { superblock.previous.clone() } else { none() };
            let pointer = superblock.checkpoint.clone();
            return Ok((Basis { uuid, pointer, previous, closed, fell_back: false }, content));
        }
        Err(reason) if superblock.previous.generation == 0 => return Err(reason),
        Err(reason) => reason,
    };
    tracing::warn!(%uuid, reason, "index checkpoint is damaged, using the one before");
    let content = read_checkpoint(file, geometry, &superblock.previous)
        .map_err(|second| format!("{reason}; and the one before: {second}"))?;
    let pointer = superblock.previous.clone();
    Ok((Basis { uuid, pointer, previous: none(), closed: false, fell_back: true }, content))
}

/// The segments as the checkpoint knows them; all others are free.
fn segments_of(content: &CheckpointContent, geometry: Geometry, basis: &Basis) -> Vec<Segment> {
    let mut segments = Index::free_drive(geometry);
    for note in &content.notes {
        let state = if note.open { SegmentState::Open } else { SegmentState::Sealed };
        segments[note.segment as usize] = Segment {
            state,
            class: note.class,
            generation: note.generation,
            used_blocks: note.used_blocks,
            live_bytes: 0,
            last_seq: note.last_seq,
            trimmed: false,
        };
    }
    for id in basis.pointer.segments.iter().chain(&basis.previous.segments) {
        let segment = &mut segments[*id as usize];
        (segment.state, segment.class, segment.used_blocks) = (SegmentState::Index, SegmentClass::Index, 1);
    }
    segments
}

/// Scans every segment that may hold frames behind the frontier.
fn scans(file: &dyn File, geometry: Geometry, basis: &Basis, segments: &mut [Segment]) -> Vec<(u32, Scan)> {
    let mut scans = Vec::new();
    for id in 0..geometry.segments {
        let segment = &mut segments[id as usize];
        if basis.fell_back
            && segment.state == SegmentState::Sealed
            && opened_later(file, geometry, basis, id).is_some()
        {
            // The segment was dead already and has been reused since that checkpoint.
            (segment.state, segment.used_blocks) = (SegmentState::Free, 0);
        }
        let from = match segment.state {
            SegmentState::Sealed | SegmentState::Index => continue,
            SegmentState::Open => ScanFrom {
                segment: id,
                generation: segment.generation,
                block: segment.used_blocks,
                last_seq: segment.last_seq,
            },
            SegmentState::Free => match opened_later(file, geometry, basis, id) {
                Some((class, generation)) => {
                    segment.class = class;
                    ScanFrom { segment: id, generation, block: 1, last_seq: 0 }
                }
                None => continue,
            },
        };
        let scan = scan_segment(file, geometry, from);
        if segment.state == SegmentState::Free && !scan.frames.is_empty() {
            segment.generation = from.generation;
            segment.state = SegmentState::Open;
            segment.used_blocks = 1;
        }
        scans.push((id, scan));
    }
    scans
}

/// Class and generation of a segment that was opened after the checkpoint.
fn opened_later(file: &dyn File, geometry: Geometry, basis: &Basis, id: u32) -> Option<(SegmentClass, u64)> {
    let bytes = read_blocks(file, geometry.offset(id, 0), 2).ok()?;
    let (first, second) = bytes.split_at(crate::format::BLOCK);
    let newest = basis.pointer.next_segment_generation;
    if let Some(header) = segment_header(first, basis.uuid, id) {
        let data = header.class != SegmentClass::Index && header.generation >= newest;
        return data.then_some((header.class, header.generation));
    }
    // The header is damaged or torn: the first frame has the generation too.
    let frame = crate::format::frame::FrameHeader::peek(second).ok()?;
    (frame.generation >= newest).then_some((SegmentClass::Bulk, frame.generation))
}

/// Adopts the frames of a scan. Nothing is ever appended behind a frame that a crash may have torn.
fn adopt_scan(segment: &mut Segment, scan: &Scan) {
    if segment.state == SegmentState::Open {
        segment.state = SegmentState::Sealed;
        segment.used_blocks = segment.used_blocks.max(scan.end_block);
        segment.last_seq = scan.frames.last().map_or(segment.last_seq, |frame| frame.header.seq);
    }
}

/// The intact frames behind the frontier, and for each record whether its bytes are intact. A frame that a crash tore
/// was not acknowledged.
fn intact_frames<'a>(
    file: &dyn File,
    geometry: Geometry,
    frontier_seq: u64,
    frames: &'a [FoundFrame],
    report: &mut RecoveryReport,
) -> Vec<(&'a FoundFrame, Vec<bool>)> {
    let durable_seq =
        frames.iter().map(|frame| frame.header.durable_seq).max().unwrap_or(0).max(frontier_seq);
    let mut counted = Vec::new();
    for frame in frames.iter().filter(|frame| frame.header.seq > frontier_seq) {
        let intact = verify_payloads(file, geometry, frame);
        if frame.header.seq > durable_seq && intact.contains(&false) {
            report.torn_frames += 1;
        } else {
            counted.push((frame, intact));
        }
    }
    counted
}

fn replay(
    frame: &FoundFrame,
    intact: &[bool],
    entries: &mut BTreeMap<ShardKey, Entry>,
    report: &mut RecoveryReport,
) {
    report.frames += 1;
    for (record, intact) in frame.records.iter().zip(intact) {
        let place = (record.blocks, record.payload_block, record.sums_at);
        match entry_of(&frame.header, record.op, place.0, place.1, place.2, record.shape) {
            Some(mut entry) => {
                report.damaged_records += u64::from(!intact);
                entry.damaged |= !intact;
                entries.insert(record.key, entry);
            }
            None => {
                entries.remove(&record.key);
            }
        }
    }
}

/// Drops shards without a place. A checkpoint may list a shard of a frame behind its frontier; if that frame is lost,
/// so is the shard.
fn forget_unknown_places(
    segments: &[Segment],
    entries: &mut BTreeMap<ShardKey, Entry>,
    report: &mut RecoveryReport,
) {
    let known = |entry: &Entry| {
        let segment = &segments[entry.segment as usize];
        let data = matches!(segment.state, SegmentState::Open | SegmentState::Sealed);
        data && (entry.damaged || entry.block + entry.blocks <= segment.used_blocks)
    };
    let before = entries.len();
    entries.retain(|_, entry| known(entry));
    report.damaged_records += (before - entries.len()) as u64;
}
