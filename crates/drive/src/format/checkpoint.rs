//! Runs: the pieces of an index checkpoint. Each is a whole number of blocks in an index segment.

use base::codec::{DecodeError, Reader, Writer};
use base::{ExtentId, LedgerId, PgId, ShardIndex};
use wire::drive::{ShardKey, ShardShape};
use wire::position::Position;

use super::frame::{POSITION_BYTES, decode_position, encode_position};
use super::segment::SegmentClass;
use super::{BLOCK, crc_matches, require, seal_crc};
use crate::buffer::AlignedBuf;
use crate::index::Entry;

const MAGIC: u32 = u32::from_le_bytes(*b"FBIX");
const CRC_AT: usize = 4;
/// Bytes of the fixed fields in front of the items.
pub(crate) const RUN_FIXED_BYTES: usize = 32;
/// Bytes of one shard in a run.
pub(crate) const ENTRY_BYTES: usize = 40;
/// Bytes of one segment in a run.
pub(crate) const SEGMENT_BYTES: usize = 32;
/// Longest run: bounds memory and the time for which one write delays others.
pub(crate) const RUN_BLOCKS_MAX: u32 = 128;
const FLAG_DAMAGED: u8 = 1;

/// The state of a data segment in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentNote {
    pub(crate) segment: u32,
    pub(crate) class: SegmentClass,
    /// Whether frames may still be appended.
    pub(crate) open: bool,
    pub(crate) generation: u64,
    /// Blocks up to the append point.
    pub(crate) used_blocks: u32,
    /// Sequence number of the last frame in it.
    pub(crate) last_seq: u64,
}

/// The items of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Items {
    Entries(Vec<(ShardKey, Entry)>),
    Segments(Vec<SegmentNote>),
    Positions(Vec<Position>),
}

/// One piece of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Run {
    /// The checkpoint that it belongs to.
    pub(crate) generation: u64,
    /// Its position among the checkpoint's runs.
    pub(crate) index: u32,
    pub(crate) items: Items,
}

/// The number of items of `item_bytes` bytes that fit into a run of `blocks` blocks.
pub(crate) fn items_per_run(blocks: u32, item_bytes: usize) -> usize {
    (blocks as usize * BLOCK - RUN_FIXED_BYTES) / item_bytes
}

impl Run {
    /// Encodes the run as whole blocks.
    pub(crate) fn encode(&self) -> AlignedBuf {
        let (kind, count, item_bytes) = match &self.items {
            Items::Entries(entries) => (1, entries.len(), ENTRY_BYTES),
            Items::Segments(segments) => (2, segments.len(), SEGMENT_BYTES),
            Items::Positions(positions) => (3, positions.len(), POSITION_BYTES),
        };
        let blocks = (RUN_FIXED_BYTES + count * item_bytes).div_ceil(BLOCK) as u32;
        let mut writer = Writer::new();
        writer.u32(MAGIC).u32(0).u64(self.generation).u32(self.index);
        writer.u8(kind).bytes(&[0; 3]).u32(blocks).u32(count as u32);
        match &self.items {
            Items::Entries(entries) => {
                entries.iter().for_each(|(key, entry)| encode_entry(&mut writer, key, entry))
            }
            Items::Segments(segments) => segments.iter().for_each(|note| encode_note(&mut writer, note)),
            Items::Positions(positions) => {
                positions.iter().for_each(|position| encode_position(&mut writer, position))
            }
        }
        let mut bytes = AlignedBuf::copy_of(&writer.finish());
        seal_crc(&mut bytes, CRC_AT);
        bytes
    }

    /// The length of a run in blocks, as its first block says; not verified.
    pub(crate) fn peek_blocks(block: &[u8]) -> Result<u32, DecodeError> {
        let mut reader = Reader::new(block);
        require(reader.u32("magic")? == MAGIC, "magic")?;
        reader.bytes(20, "run")?;
        let blocks = reader.u32("blocks")?;
        require((1..=RUN_BLOCKS_MAX).contains(&blocks), "blocks")?;
        Ok(blocks)
    }

    /// Verifies and reads a whole run.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let blocks = Self::peek_blocks(bytes)?;
        require(bytes.len() == blocks as usize * BLOCK, "run length")?;
        require(crc_matches(bytes, CRC_AT), "crc")?;
        let mut reader = Reader::new(&bytes[8..]);
        let generation = reader.u64("generation")?;
        let index = reader.u32("index")?;
        let kind = reader.u8("kind")?;
        reader.bytes(7, "padding and blocks")?;
        let count = reader.u32("count")? as usize;
        require(count <= items_per_run(blocks, POSITION_BYTES), "count")?;
        let items = match kind {
            1 => Items::Entries((0..count).map(|_| decode_entry(&mut reader)).collect::<Result<_, _>>()?),
            2 => Items::Segments((0..count).map(|_| decode_note(&mut reader)).collect::<Result<_, _>>()?),
            3 => {
                Items::Positions((0..count).map(|_| decode_position(&mut reader)).collect::<Result<_, _>>()?)
            }
            _ => return Err(DecodeError { field: "run kind" }),
        };
        Ok(Self { generation, index, items })
    }
}

fn encode_entry(writer: &mut Writer, key: &ShardKey, entry: &Entry) {
    let flags = if entry.damaged { FLAG_DAMAGED } else { 0 };
    writer.u32(key.ledger.0).u64(key.extent.0).u8(key.shard.0).u8(flags).u8(entry.shape.k).u8(entry.shape.m);
    writer.u32(entry.shape.pg.0).u32(entry.shape.extent_len);
    writer.u32(entry.segment).u32(entry.block).u32(entry.blocks).u32(entry.sums_at);
}

fn decode_entry(reader: &mut Reader<'_>) -> Result<(ShardKey, Entry), DecodeError> {
    let ledger = LedgerId(reader.u32("ledger")?);
    let extent = ExtentId(reader.u64("extent")?);
    let shard = ShardIndex(reader.u8("shard")?);
    let flags = reader.u8("flags")?;
    let (k, m) = (reader.u8("k")?, reader.u8("m")?);
    let pg = PgId(reader.u32("pg")?);
    let extent_len = reader.u32("extent length")?;
    let entry = Entry {
        segment: reader.u32("segment")?,
        block: reader.u32("block")?,
        blocks: reader.u32("blocks")?,
        sums_at: reader.u32("checksums")?,
        shape: ShardShape { pg, k, m, extent_len },
        damaged: flags & FLAG_DAMAGED != 0,
    };
    Ok((ShardKey { ledger, extent, shard }, entry))
}

fn encode_note(writer: &mut Writer, note: &SegmentNote) {
    writer.u32(note.segment).u8(note.class.code()).u8(u8::from(note.open)).bytes(&[0; 2]);
    writer.u64(note.generation).u32(note.used_blocks).u32(0).u64(note.last_seq);
}

fn decode_note(reader: &mut Reader<'_>) -> Result<SegmentNote, DecodeError> {
    let segment = reader.u32("segment")?;
    let class = SegmentClass::from_code(reader.u8("class")?)?;
    let open = reader.u8("open")? == 1;
    reader.bytes(2, "padding")?;
    let generation = reader.u64("generation")?;
    let used_blocks = reader.u32("used blocks")?;
    reader.u32("padding")?;
    Ok(SegmentNote { segment, class, open, generation, used_blocks, last_seq: reader.u64("last seq")? })
}

#[cfg(test)]
mod tests {
    use base::{Lineage, Seq};

    use super::*;

    #[test]
    fn runs_come_back_as_they_were() {
        let entry = Entry {
            segment: 1,
            block: 2,
            blocks: 3,
            sums_at: 4,
            shape: ShardShape { pg: PgId(5), k: 6, m: 7, extent_len: 8 },
            damaged: true,
        };
        let key = ShardKey { ledger: LedgerId(9), extent: ExtentId(10), shard: ShardIndex(11) };
        let note = SegmentNote {
            segment: 1,
            class: SegmentClass::Bulk,
            open: true,
            generation: 2,
            used_blocks: 3,
            last_seq: 4,
        };
        let position = Position { ledger: LedgerId(1), lineage: Lineage(2), seq: Seq(3) };
        let runs = [
            Items::Entries(vec![(key, entry); 300]),
            Items::Segments(vec![note; 200]),
            Items::Positions(vec![position; 400]),
        ];
        for items in runs {
            let run = Run { generation: 12, index: 13, items };
            let bytes = run.encode();
            assert_eq!(bytes.len() % BLOCK, 0);
            assert_eq!(Run::decode(&bytes), Ok(run));
        }
    }
}
