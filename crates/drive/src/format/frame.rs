//! The frame: the unit of appending to a segment. A header of whole blocks, and the payloads after it.

use base::checksum::crc32c;
use base::codec::{DecodeError, Reader, Writer};
use base::{ExtentId, Ino, LedgerId, Lineage, PgId, Seq, ShardIndex};
use wire::drive::{ShardKey, ShardNote, ShardShape};
use wire::position::Position;

use super::{BLOCK, crc_matches, require, seal_crc};

const MAGIC: u32 = u32::from_le_bytes(*b"FBFR");
const CRC_AT: usize = 4;
/// Bytes of the fixed fields in front of the records.
pub(crate) const FRAME_FIXED_BYTES: usize = 64;
/// Bytes of a record without its checksums.
pub(crate) const RECORD_FIXED_BYTES: usize = 64;
/// Bytes of the note of a record with its own checksum. It ends the record's fixed fields, in front of the block
/// checksums.
pub(crate) const NOTE_BYTES: usize = 24;
/// Bytes of a ledger position.
pub(crate) const POSITION_BYTES: usize = 24;
/// Longest header: 1 MiB. Bounds the bytes that a decoder reads.
pub(crate) const HEADER_BLOCKS_MAX: u32 = 256;
/// Longest payload of a frame: 32 MiB.
pub(crate) const PAYLOAD_BLOCKS_MAX: u32 = 8192;

/// The statement of a record about its shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RecordOp {
    /// The shard is stored here.
    Put,
    /// The shard is deleted.
    Tombstone,
    /// The shard was stored, but the cleaner found its bytes damaged.
    Damaged,
}

impl RecordOp {
    fn code(self) -> u8 {
        match self {
            Self::Put => 1,
            Self::Tombstone => 2,
            Self::Damaged => 3,
        }
    }

    fn from_code(code: u8) -> Result<Self, DecodeError> {
        match code {
            1 => Ok(Self::Put),
            2 => Ok(Self::Tombstone),
            3 => Ok(Self::Damaged),
            _ => Err(DecodeError { field: "record op" }),
        }
    }
}

/// One record of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) op: RecordOp,
    pub(crate) key: ShardKey,
    /// Zeros in a tombstone.
    pub(crate) shape: ShardShape,
    /// Zeros in a tombstone.
    pub(crate) note: ShardNote,
    /// Length of the shard; only a put has that many blocks of payload.
    pub(crate) blocks: u32,
    /// First payload block, counted from the start of the frame.
    pub(crate) payload_block: u32,
    /// Bytes from the start of the frame to the checksums; follows from the place of the record.
    pub(crate) sums_at: u32,
    /// One per block of a put; otherwise empty.
    pub(crate) sums: Vec<u32>,
}

/// The fields in front of the records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct FrameHeader {
    /// Generation of the segment that it was written to.
    pub generation: u64,
    /// Sequence number of the frame, unique and rising over the whole drive.
    pub seq: u64,
    /// Sequence number of the frame before it in the same segment; 0 for the first frame.
    pub prev_seq: u64,
    /// All frames up to this one were durable when this frame was written.
    pub durable_seq: u64,
    /// The segment.
    pub segment: u32,
    /// First block of the frame in the segment.
    pub start_block: u32,
    /// Length of the header, in blocks.
    pub header_blocks: u32,
    /// Length of the payload behind the header, in blocks.
    pub payload_blocks: u32,
    /// Number of records in the header.
    pub records: u32,
    /// Number of ledger positions behind the records.
    pub positions: u32,
}

/// A decoded header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) fields: FrameHeader,
    pub(crate) records: Vec<Record>,
    pub(crate) positions: Vec<Position>,
}

/// Number of header blocks for records and positions of these many bytes.
pub(crate) fn header_blocks(record_bytes: usize) -> u32 {
    (FRAME_FIXED_BYTES + record_bytes).div_ceil(BLOCK) as u32
}

/// Bytes of a record with `sums` checksums.
pub(crate) fn record_bytes(sums: usize) -> usize {
    RECORD_FIXED_BYTES + 4 * sums
}

impl FrameHeader {
    /// Fills the header blocks. `bytes` must be `header_blocks` long.
    pub(crate) fn encode_into(&self, records: &[Record], positions: &[Position], bytes: &mut [u8]) {
        assert_eq!(bytes.len(), self.header_blocks as usize * BLOCK, "the header has its planned length");
        let mut writer = Writer::new();
        writer.u32(MAGIC).u32(0);
        writer.u64(self.generation).u64(self.seq).u64(self.prev_seq).u64(self.durable_seq);
        writer.u32(self.segment).u32(self.start_block).u32(self.header_blocks).u32(self.payload_blocks);
        writer.u32(self.records).u32(self.positions);
        debug_assert_eq!(writer.len(), FRAME_FIXED_BYTES);
        for record in records {
            encode_record(&mut writer, record);
        }
        for position in positions {
            encode_position(&mut writer, position);
        }
        let encoded = writer.finish();
        bytes[..encoded.len()].copy_from_slice(&encoded);
        bytes[encoded.len()..].fill(0);
        seal_crc(bytes, CRC_AT);
    }

    /// Reads the fixed fields of a first header block, which are not verified yet.
    pub(crate) fn peek(block: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(block);
        require(reader.u32("magic")? == MAGIC, "magic")?;
        reader.u32("crc")?;
        let header = Self {
            generation: reader.u64("generation")?,
            seq: reader.u64("seq")?,
            prev_seq: reader.u64("previous seq")?,
            durable_seq: reader.u64("durable seq")?,
            segment: reader.u32("segment")?,
            start_block: reader.u32("start block")?,
            header_blocks: reader.u32("header blocks")?,
            payload_blocks: reader.u32("payload blocks")?,
            records: reader.u32("records")?,
            positions: reader.u32("positions")?,
        };
        require((1..=HEADER_BLOCKS_MAX).contains(&header.header_blocks), "header blocks")?;
        require(header.payload_blocks <= PAYLOAD_BLOCKS_MAX, "payload blocks")?;
        Ok(header)
    }

    /// Verifies and reads a whole header.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Header, DecodeError> {
        let header = Self::peek(bytes)?;
        require(bytes.len() == header.header_blocks as usize * BLOCK, "header length")?;
        require(crc_matches(bytes, CRC_AT), "crc")?;
        let mut reader = Reader::new(&bytes[FRAME_FIXED_BYTES..]);
        // A record has at least its fixed bytes, so this bounds the allocation by the input.
        require(header.records as usize <= bytes.len() / RECORD_FIXED_BYTES, "records")?;
        let mut records = Vec::with_capacity(header.records as usize);
        for _ in 0..header.records {
            let at = bytes.len() - reader.rest().len();
            records.push(decode_record(&mut reader, at, &header)?);
        }
        require(header.positions as usize <= reader.rest().len() / POSITION_BYTES, "positions")?;
        let positions = (0..header.positions).map(|_| decode_position(&mut reader));
        let positions = positions.collect::<Result<_, _>>()?;
        Ok(Header { fields: header, records, positions })
    }

    /// Length of the whole frame, in blocks.
    pub(crate) fn blocks(&self) -> u32 {
        self.header_blocks + self.payload_blocks
    }
}

fn encode_record(writer: &mut Writer, record: &Record) {
    let ShardKey { ledger, extent, shard } = record.key;
    let shape = record.shape;
    writer.u8(record.op.code()).u8(0).u8(shard.0).u8(shape.k).u8(shape.m).bytes(&[0; 3]);
    writer.u32(ledger.0).u32(shape.pg.0).u64(extent.0);
    writer.u32(shape.extent_len).u32(record.blocks).u32(record.payload_block).u32(record.sums.len() as u32);
    writer.bytes(&encode_note(&record.note));
    for sum in &record.sums {
        writer.u32(*sum);
    }
}

fn decode_record(reader: &mut Reader<'_>, at: usize, header: &FrameHeader) -> Result<Record, DecodeError> {
    let op = RecordOp::from_code(reader.u8("op")?)?;
    reader.u8("flags")?;
    let shard = ShardIndex(reader.u8("shard")?);
    let (k, m) = (reader.u8("k")?, reader.u8("m")?);
    reader.bytes(3, "padding")?;
    let ledger = LedgerId(reader.u32("ledger")?);
    let pg = PgId(reader.u32("pg")?);
    let extent = ExtentId(reader.u64("extent")?);
    let extent_len = reader.u32("extent length")?;
    let (blocks, payload_block) = (reader.u32("blocks")?, reader.u32("payload block")?);
    let count = reader.u32("checksums")?;
    let note = decode_note(reader.bytes(NOTE_BYTES, "note")?).unwrap_or_default();
    let end = payload_block.checked_add(count).ok_or(DecodeError { field: "payload block" })?;
    match op {
        RecordOp::Put => {
            require(count == blocks && count > 0, "checksums")?;
            require(payload_block >= header.header_blocks && end <= header.blocks(), "payload block")?;
        }
        RecordOp::Tombstone | RecordOp::Damaged => require(count == 0, "checksums")?,
    }
    let sums = reader.bytes(count as usize * 4, "checksums")?;
    let sums = sums.chunks_exact(4).map(|sum| u32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]])).collect();
    Ok(Record {
        op,
        key: ShardKey { ledger, extent, shard },
        shape: ShardShape { pg, k, m, extent_len },
        note,
        blocks,
        payload_block,
        sums_at: (at + RECORD_FIXED_BYTES) as u32,
        sums,
    })
}

fn encode_note(note: &ShardNote) -> [u8; NOTE_BYTES] {
    let mut writer = Writer::new();
    writer.u64(note.ino.0).u64(note.off).u32(note.key_version);
    let fields = writer.finish();
    let mut bytes = [0; NOTE_BYTES];
    bytes[..fields.len()].copy_from_slice(&fields);
    bytes[fields.len()..].copy_from_slice(&crc32c(&fields).to_le_bytes());
    bytes
}

/// Reads a note; `None` if it is damaged. It has its own checksum because it is read without the rest of the header.
pub(crate) fn decode_note(bytes: &[u8]) -> Option<ShardNote> {
    let (fields, crc) = bytes.split_at_checked(NOTE_BYTES - 4)?;
    if crc32c(fields).to_le_bytes() != crc {
        return None;
    }
    let mut reader = Reader::new(fields);
    let (ino, off) = (Ino(reader.u64("inode").ok()?), reader.u64("offset").ok()?);
    Some(ShardNote { ino, off, key_version: reader.u32("key version").ok()? })
}

/// 24 bytes.
pub(super) fn encode_position(writer: &mut Writer, position: &Position) {
    writer.u32(position.ledger.0).u32(0).u64(position.lineage.0).u64(position.seq.0);
}

pub(super) fn decode_position(reader: &mut Reader<'_>) -> Result<Position, DecodeError> {
    let ledger = LedgerId(reader.u32("ledger")?);
    reader.u32("padding")?;
    Ok(Position { ledger, lineage: Lineage(reader.u64("lineage")?), seq: Seq(reader.u64("position")?) })
}

#[cfg(test)]
mod tests;
