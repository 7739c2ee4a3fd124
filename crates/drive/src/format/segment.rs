//! The segment header: the first block of a segment in use.

use base::DriveUuid;
use base::codec::{DecodeError, Reader, Writer};
use wire::drive::ShardClass;

use super::superblock::array;
use super::{BLOCK, FORMAT_VERSION, crc_matches, require, seal_crc};
use crate::buffer::AlignedBuf;

const MAGIC: [u8; 8] = *b"FBSEGMNT";
const CRC_AT: usize = 8;

/// The kind of content of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SegmentClass {
    /// Short-lived shards, and tombstones.
    Small,
    /// Long-lived shards.
    Bulk,
    /// Runs of an index checkpoint.
    Index,
}

impl SegmentClass {
    /// The class as a number on the device.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Small => 1,
            Self::Bulk => 2,
            Self::Index => 3,
        }
    }

    /// The class of a number on the device.
    pub(crate) fn from_code(code: u8) -> Result<Self, DecodeError> {
        match code {
            1 => Ok(Self::Small),
            2 => Ok(Self::Bulk),
            3 => Ok(Self::Index),
            _ => Err(DecodeError { field: "segment class" }),
        }
    }
}

impl From<ShardClass> for SegmentClass {
    fn from(class: ShardClass) -> Self {
        match class {
            ShardClass::Small => Self::Small,
            ShardClass::Bulk => Self::Bulk,
        }
    }
}

/// The fields of a segment header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct SegmentHeader {
    /// UUID of the drive that it belongs to.
    pub uuid: DriveUuid,
    /// Index of the segment on the device.
    pub segment: u32,
    /// Never used twice on a drive; frames of another generation in the segment are stale.
    pub generation: u64,
    /// Class of its content.
    pub class: SegmentClass,
}

impl SegmentHeader {
    /// Fills one block.
    pub(crate) fn encode_into(&self, block: &mut [u8]) {
        let mut writer = Writer::new();
        writer.bytes(&MAGIC).u32(0).u32(FORMAT_VERSION).u64(self.generation).u32(self.segment);
        writer.u8(self.class.code()).bytes(&[0; 3]).bytes(&self.uuid.0);
        let bytes = writer.finish();
        block[..bytes.len()].copy_from_slice(&bytes);
        block[bytes.len()..].fill(0);
        seal_crc(block, CRC_AT);
    }

    /// One block, ready to be written.
    pub(crate) fn encode(&self) -> AlignedBuf {
        let mut block = AlignedBuf::blocks(1);
        self.encode_into(&mut block);
        block
    }

    /// Reads one block.
    pub(crate) fn decode(block: &[u8]) -> Result<Self, DecodeError> {
        require(block.len() == BLOCK, "segment header length")?;
        let mut reader = Reader::new(block);
        require(reader.bytes(8, "magic")? == MAGIC, "magic")?;
        require(crc_matches(block, CRC_AT), "crc")?;
        reader.u32("crc")?;
        require(reader.u32("version")? <= FORMAT_VERSION, "version")?;
        let generation = reader.u64("generation")?;
        let segment = reader.u32("segment")?;
        let class = SegmentClass::from_code(reader.u8("class")?)?;
        reader.bytes(3, "padding")?;
        Ok(Self { uuid: DriveUuid(array(&mut reader, "uuid")?), segment, generation, class })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_comes_back_and_damage_is_noticed() {
        let header =
            SegmentHeader { uuid: DriveUuid([3; 16]), segment: 7, generation: 9, class: SegmentClass::Bulk };
        let mut block = header.encode();
        assert_eq!(SegmentHeader::decode(&block), Ok(header));
        block[16] ^= 1;
        assert!(SegmentHeader::decode(&block).is_err());
    }
}
