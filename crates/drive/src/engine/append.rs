//! Plans where a batch appends its items, and encodes the plan.

use base::DriveUuid;
use bytes::Bytes;
use wire::drive::{ShardKey, ShardNote, ShardShape};
use wire::position::Position;

use crate::buffer::AlignedBuf;
use crate::format::frame::{
    FRAME_FIXED_BYTES, FrameHeader, HEADER_BLOCKS_MAX, PAYLOAD_BLOCKS_MAX, POSITION_BYTES, Record, RecordOp,
    header_blocks, record_bytes,
};
use crate::format::segment::{SegmentClass, SegmentHeader};
use crate::format::{BLOCK, Geometry};
use crate::index::{Entry, Index, Purpose, SegmentState};

/// Something to append.
pub(crate) struct Item {
    pub(crate) op: RecordOp,
    pub(crate) key: ShardKey,
    pub(crate) shape: ShardShape,
    pub(crate) note: ShardNote,
    /// Length of the shard.
    pub(crate) blocks: u32,
    /// Of a put only: one checksum per block.
    pub(crate) sums: Vec<u32>,
    /// Of a put only: `blocks` whole blocks.
    pub(crate) payload: Bytes,
}

impl Item {
    /// A record that the shard is deleted.
    pub(crate) fn tombstone(key: ShardKey) -> Self {
        let shape = ShardShape { pg: base::PgId(0), k: 0, m: 0, extent_len: 0 };
        Self {
            op: RecordOp::Tombstone,
            key,
            shape,
            note: ShardNote::default(),
            blocks: 0,
            sums: Vec::new(),
            payload: Bytes::new(),
        }
    }

    fn payload_blocks(&self) -> u32 {
        (self.payload.len() / BLOCK) as u32
    }
}

/// A change of the index, applied when the batch is durable.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Change {
    Set(ShardKey, Entry),
    Remove(ShardKey),
}

/// There is no room for the item at present.
#[derive(Debug)]
pub(crate) struct NoRoom;

struct FramePlan {
    segment: u32,
    class: SegmentClass,
    generation: u64,
    seq: u64,
    prev_seq: u64,
    start_block: u32,
    /// Whether the frame is preceded by a segment header.
    opens: bool,
    items: Vec<Item>,
    positions: Vec<Position>,
    /// Bytes of the records and the positions.
    record_bytes: usize,
    payload_blocks: u32,
}

impl FramePlan {
    fn blocks(&self) -> u32 {
        header_blocks(self.record_bytes) + self.payload_blocks
    }

    fn blocks_with(&self, item: &Item) -> Option<u32> {
        let header = header_blocks(self.record_bytes + record_bytes(item.sums.len()));
        let payload = self.payload_blocks + item.payload_blocks();
        (header <= HEADER_BLOCKS_MAX && payload <= PAYLOAD_BLOCKS_MAX).then_some(header + payload)
    }

    fn add(&mut self, item: Item) {
        self.record_bytes += record_bytes(item.sums.len());
        self.payload_blocks += item.payload_blocks();
        self.items.push(item);
    }
}

/// Numbers that the drive hands out, each one once.
pub(crate) struct Counters {
    pub(crate) next_seq: u64,
    pub(crate) durable_seq: u64,
    pub(crate) next_generation: u64,
}

/// A batch being planned. Planning changes segments, not shards.
#[derive(Default)]
pub(crate) struct Plan {
    frames: Vec<FramePlan>,
    /// Ledger positions that go into the first frame.
    positions: Vec<Position>,
    pub(crate) payload_bytes: u64,
    pub(crate) records: usize,
}

impl Plan {
    /// An empty batch that writes these positions if it gets a frame.
    pub(crate) fn with_positions(positions: Vec<Position>) -> Self {
        Self { positions, ..Self::default() }
    }

    fn positions_bytes(&self) -> usize {
        self.positions.len() * POSITION_BYTES
    }

    /// Adds a frame that holds only the positions. On error the plan is unchanged.
    pub(crate) fn add_positions(
        &mut self,
        index: &mut Index,
        counters: &mut Counters,
        purpose: Purpose,
    ) -> Result<(), NoRoom> {
        let needed = header_blocks(self.positions_bytes());
        if !index.may_append(purpose, needed) {
            return Err(NoRoom);
        }
        let frame = self.open_frame(index, counters, SegmentClass::Small, purpose, needed).ok_or(NoRoom)?;
        self.frames.push(frame);
        Ok(())
    }

    /// Adds an item. On error the plan is unchanged.
    pub(crate) fn add(
        &mut self,
        index: &mut Index,
        counters: &mut Counters,
        class: SegmentClass,
        purpose: Purpose,
        item: Item,
    ) -> Result<(), NoRoom> {
        let planned: u32 = self.frames.iter().map(FramePlan::blocks).sum();
        let more =
            header_blocks(record_bytes(item.sums.len()) + self.positions_bytes()) + item.payload_blocks();
        if !index.may_append(purpose, planned + more) {
            return Err(NoRoom);
        }
        self.payload_bytes += item.payload.len() as u64;
        self.records += 1;
        let segment_blocks = index.geometry.segment_blocks();
        // Only the last frame of a class may still grow.
        if let Some(frame) = self.frames.iter_mut().rfind(|frame| frame.class == class) {
            let fits = |blocks: u32| frame.start_block + blocks <= segment_blocks;
            if frame.blocks_with(&item).is_some_and(fits) {
                frame.add(item);
                return Ok(());
            }
        }
        let fresh = self.open_frame(index, counters, class, purpose, more);
        let Some(mut frame) = fresh else {
            self.payload_bytes -= item.payload.len() as u64;
            self.records -= 1;
            return Err(NoRoom);
        };
        frame.add(item);
        self.frames.push(frame);
        Ok(())
    }

    /// Starts a frame of at least `needed` blocks behind the last frame of the class, in the open segment of the class
    /// or a new one. The first frame takes the positions.
    fn open_frame(
        &mut self,
        index: &mut Index,
        counters: &mut Counters,
        class: SegmentClass,
        purpose: Purpose,
        needed: u32,
    ) -> Option<FramePlan> {
        let mut frame = self.place_frame(index, counters, class, purpose, needed)?;
        frame.record_bytes += self.positions_bytes();
        frame.positions = std::mem::take(&mut self.positions);
        Some(frame)
    }

    fn place_frame(
        &self,
        index: &mut Index,
        counters: &mut Counters,
        class: SegmentClass,
        purpose: Purpose,
        needed: u32,
    ) -> Option<FramePlan> {
        let open = index.open_segment(class);
        if let Some(id) = open {
            let before = self.frames.iter().rfind(|frame| frame.segment == id);
            let segment = index.segment(id);
            let start_block = before.map_or(segment.used_blocks, |frame| frame.start_block + frame.blocks());
            if start_block + needed <= index.geometry.segment_blocks() {
                let prev_seq = before.map_or(segment.last_seq, |frame| frame.seq);
                let generation = segment.generation;
                return Some(FramePlan::new(
                    id,
                    class,
                    generation,
                    counters.take_seq(),
                    prev_seq,
                    start_block,
                ));
            }
        }
        if !index.may_open(purpose) {
            return None;
        }
        let generation = counters.take_generation();
        let fresh = index.take_free(SegmentState::Open, class, generation)?;
        if let Some(id) = open {
            index.seal(id);
        }
        let plan = FramePlan::new(fresh, class, generation, counters.take_seq(), 0, 1);
        Some(FramePlan { opens: true, ..plan })
    }

    /// Whether nothing was added.
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Moves the append points behind the planned frames. Returns the sequence number of the last frame.
    pub(crate) fn commit_space(&self, index: &mut Index) -> u64 {
        let mut last_seq = 0;
        for frame in &self.frames {
            index.append(frame.segment, frame.start_block + frame.blocks(), frame.seq);
            last_seq = last_seq.max(frame.seq);
        }
        last_seq
    }

    /// Encodes the batch: its writes and the changes of the index.
    pub(crate) fn encode(self, geometry: Geometry, uuid: DriveUuid, durable_seq: u64) -> Encoded {
        let mut encoded = Encoded::default();
        for frame in self.frames {
            encode_frame(frame, geometry, uuid, durable_seq, &mut encoded);
        }
        encoded
    }
}

impl FramePlan {
    fn new(
        segment: u32,
        class: SegmentClass,
        generation: u64,
        seq: u64,
        prev_seq: u64,
        start_block: u32,
    ) -> Self {
        Self {
            segment,
            class,
            generation,
            seq,
            prev_seq,
            start_block,
            opens: false,
            items: Vec::new(),
            positions: Vec::new(),
            record_bytes: 0,
            payload_blocks: 0,
        }
    }
}

impl Counters {
    fn take_seq(&mut self) -> u64 {
        self.next_seq += 1;
        self.next_seq - 1
    }

    pub(crate) fn take_generation(&mut self) -> u64 {
        self.next_generation += 1;
        self.next_generation - 1
    }
}

/// Header blocks that were written, for the cache of checksums.
pub(crate) struct HeaderBlocks {
    pub(crate) segment: u32,
    pub(crate) generation: u64,
    pub(crate) first_block: u32,
    pub(crate) bytes: Vec<u8>,
}

/// An encoded batch.
#[derive(Default)]
pub(crate) struct Encoded {
    pub(crate) writes: Vec<(u64, AlignedBuf)>,
    pub(crate) changes: Vec<Change>,
    pub(crate) positions: Vec<Position>,
    pub(crate) headers: Vec<HeaderBlocks>,
}

fn encode_frame(
    frame: FramePlan,
    geometry: Geometry,
    uuid: DriveUuid,
    durable_seq: u64,
    encoded: &mut Encoded,
) {
    let header_blocks = header_blocks(frame.record_bytes);
    let lead = usize::from(frame.opens);
    let mut buffer = AlignedBuf::any_blocks(lead as u32 + frame.blocks());
    if frame.opens {
        let header =
            SegmentHeader { uuid, segment: frame.segment, generation: frame.generation, class: frame.class };
        header.encode_into(&mut buffer[..BLOCK]);
    }
    let bytes = &mut buffer[lead * BLOCK..];
    let header = FrameHeader {
        generation: frame.generation,
        seq: frame.seq,
        prev_seq: frame.prev_seq,
        durable_seq,
        segment: frame.segment,
        start_block: frame.start_block,
        header_blocks,
        payload_blocks: frame.payload_blocks,
        records: frame.items.len() as u32,
        positions: frame.positions.len() as u32,
    };
    let mut records = Vec::with_capacity(frame.items.len());
    let (mut payload_block, mut record_at) = (header_blocks, FRAME_FIXED_BYTES);
    for item in frame.items {
        let at = payload_block as usize * BLOCK;
        let (end, padded) = (at + item.payload.len(), at + item.payload_blocks() as usize * BLOCK);
        bytes[at..end].copy_from_slice(&item.payload);
        bytes[end..padded].fill(0);
        let sums_at = (record_at + record_bytes(0)) as u32;
        record_at += record_bytes(item.sums.len());
        let taken = item.payload_blocks();
        encoded.changes.push(change(&header, &item, payload_block, sums_at));
        records.push(Record {
            op: item.op,
            key: item.key,
            shape: item.shape,
            note: item.note,
            blocks: item.blocks,
            payload_block,
            sums_at,
            sums: item.sums,
        });
        payload_block += taken;
    }
    let header_bytes = header_blocks as usize * BLOCK;
    header.encode_into(&records, &frame.positions, &mut bytes[..header_bytes]);
    encoded.positions.extend(frame.positions);
    encoded.headers.push(HeaderBlocks {
        segment: frame.segment,
        generation: frame.generation,
        first_block: frame.start_block,
        bytes: bytes[..header_bytes].to_vec(),
    });
    encoded.writes.push((geometry.offset(frame.segment, frame.start_block - lead as u32), buffer));
}

fn change(header: &FrameHeader, item: &Item, payload_block: u32, sums_at: u32) -> Change {
    entry_of(header, item.op, item.blocks, payload_block, sums_at, item.shape)
        .map_or(Change::Remove(item.key), |entry| Change::Set(item.key, entry))
}

/// The index entry that a record describes; `None` for a tombstone.
pub(crate) fn entry_of(
    header: &FrameHeader,
    op: RecordOp,
    blocks: u32,
    payload_block: u32,
    sums_at: u32,
    shape: ShardShape,
) -> Option<Entry> {
    let damaged = match op {
        RecordOp::Put => false,
        RecordOp::Damaged => true,
        RecordOp::Tombstone => return None,
    };
    Some(Entry {
        segment: header.segment,
        block: header.start_block + payload_block,
        blocks,
        sums_at: header.start_block * BLOCK as u32 + sums_at,
        shape,
        damaged,
    })
}
