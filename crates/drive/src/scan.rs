//! Reading a device without an engine: superblocks, checkpoints and the frames of a segment.

use std::io;

use base::DriveUuid;
use base::checksum::blocks_match;
use base::env::File;

use crate::buffer::AlignedBuf;
use crate::format::checkpoint::{Items, Run, SegmentNote};
use crate::format::frame::{FrameHeader, HEADER_BLOCKS_MAX, Header, NOTE_BYTES, Record};
use crate::format::segment::SegmentHeader;
use crate::format::superblock::{CheckpointPointer, MAGIC, Superblock};
use crate::format::{BLOCK, Geometry, SUPERBLOCK_OFFSETS};
use crate::index::Entry;
use wire::drive::ShardKey;
use wire::position::Position;

/// Blocks read at once while scanning.
const WINDOW_BLOCKS: u32 = 256;

/// Reads whole blocks into fresh memory.
pub(crate) fn read_blocks(file: &dyn File, offset: u64, blocks: u32) -> io::Result<AlignedBuf> {
    let mut buffer = AlignedBuf::blocks(blocks);
    file.read_at(&mut buffer, offset)?;
    Ok(buffer)
}

/// The readable superblocks, and whether the device looks like a drive at all.
pub(crate) struct Superblocks {
    pub(crate) slots: [Option<Superblock>; 2],
    /// At least one of them starts with the magic.
    pub(crate) magic_seen: bool,
    /// The error, if one could not be read at all.
    pub(crate) error: Option<io::Error>,
}

impl Superblocks {
    pub(crate) fn read(file: &dyn File) -> Self {
        let (mut magic_seen, mut failure) = (false, None);
        let slots = SUPERBLOCK_OFFSETS.map(|offset| match read_blocks(file, offset, 1) {
            Ok(block) => {
                magic_seen |= block.starts_with(&MAGIC);
                Superblock::decode(&block).ok()
            }
            // A device that is too short is no drive; any other error comes from the device.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => None,
            Err(error) => {
                failure = Some(error);
                None
            }
        });
        Self { slots, magic_seen, error: failure }
    }

    /// The valid superblock with the highest sequence.
    pub(crate) fn newest(&self) -> Option<&Superblock> {
        self.slots.iter().flatten().max_by_key(|superblock| superblock.sequence)
    }
}

/// The content of a checkpoint.
#[derive(Default)]
pub(crate) struct CheckpointContent {
    pub(crate) entries: Vec<(ShardKey, Entry)>,
    pub(crate) notes: Vec<SegmentNote>,
    pub(crate) positions: Vec<Position>,
}

/// Reads and verifies the checkpoint that a superblock points to.
///
/// # Errors
/// A description of the damage. No part of a damaged checkpoint is used.
pub(crate) fn read_checkpoint(
    file: &dyn File,
    geometry: Geometry,
    pointer: &CheckpointPointer,
) -> Result<CheckpointContent, String> {
    let mut content = CheckpointContent::default();
    let mut next_run = 0;
    for segment in &pointer.segments {
        let mut block = 1;
        while next_run < pointer.runs && block < geometry.segment_blocks() {
            let at = geometry.offset(*segment, block);
            let first = read_blocks(file, at, 1).map_err(|error| format!("run {next_run}: {error}"))?;
            let expected_here =
                Run::peek_blocks(&first).ok().filter(|blocks| block + blocks <= geometry.segment_blocks());
            // There is no run here: the rest of the segment was too short for the next one.
            let Some(blocks) = expected_here else { break };
            let bytes = read_blocks(file, at, blocks).map_err(|error| format!("run {next_run}: {error}"))?;
            let run = Run::decode(&bytes).map_err(|error| format!("run {next_run}: {error}"))?;
            if run.generation != pointer.generation || run.index != next_run {
                break;
            }
            match run.items {
                Items::Entries(entries) => content.entries.extend(entries),
                Items::Segments(notes) => content.notes.extend(notes),
                Items::Positions(positions) => content.positions.extend(positions),
            }
            next_run += 1;
            block += blocks;
        }
    }
    if next_run != pointer.runs || content.entries.len() as u64 != pointer.entries {
        return Err(format!("incomplete: runs={next_run} expected={}", pointer.runs));
    }
    check_places(&content, geometry)?;
    Ok(content)
}

fn check_places(content: &CheckpointContent, geometry: Geometry) -> Result<(), String> {
    let blocks = geometry.segment_blocks();
    let inside = |entry: &Entry| {
        let end = entry.block.checked_add(entry.blocks);
        let sums_end = entry.sums_at.checked_add(entry.blocks.saturating_mul(4));
        entry.segment < geometry.segments
            && (entry.damaged || end.is_some_and(|end| end <= blocks))
            && entry.sums_at >= NOTE_BYTES as u32
            && sums_end.is_some_and(|end| u64::from(end) <= geometry.segment_bytes)
    };
    let entries_fit = content.entries.iter().all(|(_, entry)| inside(entry));
    let note_fits =
        |note: &SegmentNote| note.segment < geometry.segments && (1..=blocks).contains(&note.used_blocks);
    if entries_fit && content.notes.iter().all(note_fits) {
        return Ok(());
    }
    Err("an entry lies outside the device".to_owned())
}

/// Decodes the header of a segment, if it belongs to this drive and this place.
pub(crate) fn segment_header(block: &[u8], uuid: DriveUuid, segment: u32) -> Option<SegmentHeader> {
    SegmentHeader::decode(block).ok().filter(|header| header.uuid == uuid && header.segment == segment)
}

/// A frame whose header is intact.
pub(crate) struct FoundFrame {
    pub(crate) header: FrameHeader,
    pub(crate) records: Vec<Record>,
    pub(crate) positions: Vec<Position>,
}

/// The frames of a segment from some block on.
pub(crate) struct Scan {
    pub(crate) frames: Vec<FoundFrame>,
    /// Places where a frame is missing: its header is damaged.
    pub(crate) gaps: u32,
    /// The block behind the last frame.
    pub(crate) end_block: u32,
}

/// The start of a scan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScanFrom {
    pub(crate) segment: u32,
    pub(crate) generation: u64,
    pub(crate) block: u32,
    /// Sequence number of the frame before `block`; 0 at the start of a segment.
    pub(crate) last_seq: u64,
}

/// Finds the frames of one generation of a segment. Damage does not end the scan: it goes on to the next intact header.
/// A header names its own place, so stored data that looks like a frame is not mistaken for one.
pub(crate) fn scan_segment(file: &dyn File, geometry: Geometry, from: ScanFrom) -> Scan {
    let mut window = Window::new(file, geometry, from.segment);
    let mut scan = Scan { frames: Vec::new(), gaps: 0, end_block: from.block };
    let mut last_seq = from.last_seq;
    let mut block = from.block;
    while block < geometry.segment_blocks() {
        let Some(found) = frame_at(&mut window, geometry, from, block) else {
            block += 1;
            continue;
        };
        if found.header.prev_seq != last_seq {
            scan.gaps += 1;
        }
        last_seq = found.header.seq;
        block += found.header.blocks();
        scan.end_block = block;
        scan.frames.push(found);
    }
    scan
}

fn frame_at(window: &mut Window<'_>, geometry: Geometry, from: ScanFrom, block: u32) -> Option<FoundFrame> {
    let header = FrameHeader::peek(window.block(block)?).ok()?;
    let here = header.generation == from.generation
        && header.segment == from.segment
        && header.start_block == block
        && header.seq > header.prev_seq
        && header.header_blocks <= HEADER_BLOCKS_MAX
        && block + header.blocks() <= geometry.segment_blocks();
    if !here {
        return None;
    }
    let mut bytes = Vec::with_capacity(header.header_blocks as usize * BLOCK);
    for index in 0..header.header_blocks {
        bytes.extend_from_slice(window.block(block + index)?);
    }
    let Header { fields: header, records, positions } = FrameHeader::decode(&bytes).ok()?;
    Some(FoundFrame { header, records, positions })
}

/// For each record, whether its payload matches its checksums; true for records without payload.
pub(crate) fn verify_payloads(file: &dyn File, geometry: Geometry, frame: &FoundFrame) -> Vec<bool> {
    let first = frame.header.start_block + frame.header.header_blocks;
    let at = geometry.offset(frame.header.segment, first);
    let whole = read_blocks(file, at, frame.header.payload_blocks.max(1)).ok();
    let intact = |record: &Record| {
        if record.sums.is_empty() {
            return true;
        }
        let start = (record.payload_block - frame.header.header_blocks) as usize * BLOCK;
        let len = record.blocks as usize * BLOCK;
        let key = record.key;
        let matches = |bytes: &[u8]| blocks_match(key.extent, key.shard, 0, bytes, &record.sums);
        match &whole {
            Some(bytes) => bytes.get(start..start + len).is_some_and(matches),
            // One bad sector fails the whole read: read each record separately.
            None => read_blocks(file, at + start as u64, record.blocks).is_ok_and(|bytes| matches(&bytes)),
        }
    };
    frame.records.iter().map(intact).collect()
}

/// Reads a segment front to back in large pieces.
struct Window<'a> {
    file: &'a dyn File,
    geometry: Geometry,
    segment: u32,
    first: u32,
    bytes: Option<AlignedBuf>,
}

impl<'a> Window<'a> {
    fn new(file: &'a dyn File, geometry: Geometry, segment: u32) -> Self {
        Self { file, geometry, segment, first: 0, bytes: None }
    }

    /// One block; `None` if it cannot be read.
    fn block(&mut self, block: u32) -> Option<&[u8]> {
        let have = self.bytes.as_ref().map_or(0, |bytes| (bytes.len() / BLOCK) as u32);
        if block < self.first || block >= self.first + have {
            let blocks = WINDOW_BLOCKS.min(self.geometry.segment_blocks() - block);
            let at = self.geometry.offset(self.segment, block);
            self.first = block;
            let read = read_blocks(self.file, at, blocks).or_else(|_| read_blocks(self.file, at, 1));
            self.bytes = read.ok();
        }
        let at = (block - self.first) as usize * BLOCK;
        self.bytes.as_ref()?.get(at..at + BLOCK)
    }
}
