//! The superblock: the identity of the drive, the division of the device, and the place of the index checkpoint.

use base::codec::{DecodeError, Reader, Writer};
use base::{ClusterId, DriveUuid};

use super::{BLOCK, FORMAT_VERSION, Geometry, crc_matches, require, seal_crc};
use crate::buffer::AlignedBuf;

/// First bytes of every Forebay device.
pub(crate) const MAGIC: [u8; 8] = *b"FOREBAYD";
const CRC_AT: usize = 8;
/// Index segments that a superblock can name for each of its two checkpoints.
pub(crate) const INDEX_SEGMENTS_MAX: usize = 480;

/// Feature bits of this version: there are none yet.
pub(crate) const KNOWN_FEATURES: Features = Features { compat: 0, read_only: 0, incompat: 0 };

/// Feature bits, by what a reader that does not know a bit may still do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Features {
    /// The reader may read and write.
    pub compat: u64,
    /// The reader may read, but not write.
    pub read_only: u64,
    /// The reader may do nothing.
    pub incompat: u64,
}

/// The place of an index checkpoint, and the last frame that it covers.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct CheckpointPointer {
    /// Number of the checkpoint; 0 if there is none yet.
    pub generation: u64,
    /// Sequence number of the last frame that it covers.
    pub frontier_seq: u64,
    /// Data segments opened later have at least this generation.
    pub next_segment_generation: u64,
    /// Number of its runs.
    pub runs: u32,
    /// Number of shards in it.
    pub entries: u64,
    /// The index segments with the runs, in order.
    pub segments: Vec<u32>,
}

/// The fields of a superblock.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Superblock {
    /// Format version of the device.
    pub version: u32,
    /// Feature bits.
    pub features: Features,
    /// The cluster that the drive belongs to.
    pub cluster: ClusterId,
    /// UUID of the drive.
    pub uuid: DriveUuid,
    /// Used bytes of the device.
    pub capacity_bytes: u64,
    /// Size of a segment.
    pub segment_bytes: u64,
    /// Counts superblock writes: the higher number is the newer superblock.
    pub sequence: u64,
    /// Counts opens. Part of every segment generation, so that no generation is used twice.
    pub incarnation: u32,
    /// Whether the drive was closed, with nothing written since.
    pub closed: bool,
    /// The last incarnation that began without some of the drive's earlier writes; 0 if there was none.
    pub gap_incarnation: u32,
    /// The newest index checkpoint.
    pub checkpoint: CheckpointPointer,
    /// The checkpoint before, for use if the newest is damaged; generation 0 if there is none.
    pub previous: CheckpointPointer,
}

impl Superblock {
    /// The division of the device; `None` if the numbers are inconsistent.
    pub(crate) fn geometry(&self) -> Option<Geometry> {
        Geometry::new(self.capacity_bytes, self.segment_bytes)
    }

    /// Encodes the superblock as one block.
    pub(crate) fn encode(&self) -> AlignedBuf {
        let mut writer = Writer::new();
        writer.bytes(&MAGIC).u32(0).u32(self.version);
        writer.u64(self.features.compat).u64(self.features.read_only).u64(self.features.incompat);
        writer.bytes(&self.cluster.0).bytes(&self.uuid.0);
        writer.u64(self.capacity_bytes).u64(self.segment_bytes);
        writer.u64(self.sequence).u32(self.incarnation).u32(u32::from(self.closed));
        writer.u32(self.gap_incarnation).u32(0);
        encode_pointer(&mut writer, &self.checkpoint);
        encode_pointer(&mut writer, &self.previous);
        let mut block = AlignedBuf::copy_of(&writer.finish());
        seal_crc(&mut block, CRC_AT);
        block
    }

    /// Decodes one block. The version and features are not checked: the caller decides.
    ///
    /// Another version may have other fields, so of it only the bytes up to the features are checked.
    pub(crate) fn decode(block: &[u8]) -> Result<Self, DecodeError> {
        require(block.len() == BLOCK, "superblock length")?;
        let mut reader = Reader::new(block);
        require(reader.bytes(8, "magic")? == MAGIC, "magic")?;
        require(crc_matches(block, CRC_AT), "crc")?;
        reader.u32("crc")?;
        let version = reader.u32("version")?;
        let features = Features {
            compat: reader.u64("compat")?,
            read_only: reader.u64("read_only")?,
            incompat: reader.u64("incompat")?,
        };
        let mut superblock = Self {
            version,
            features,
            cluster: ClusterId(array(&mut reader, "cluster")?),
            uuid: DriveUuid(array(&mut reader, "uuid")?),
            capacity_bytes: reader.u64("capacity")?,
            segment_bytes: reader.u64("segment size")?,
            sequence: reader.u64("sequence")?,
            incarnation: reader.u32("incarnation")?,
            closed: reader.u32("closed")? == 1,
            gap_incarnation: 0,
            checkpoint: CheckpointPointer::default(),
            previous: CheckpointPointer::default(),
        };
        if version != FORMAT_VERSION || features.incompat & !KNOWN_FEATURES.incompat != 0 {
            return Ok(superblock);
        }
        superblock.gap_incarnation = reader.u32("gap incarnation")?;
        reader.u32("padding")?;
        superblock.checkpoint = decode_pointer(&mut reader)?;
        superblock.previous = decode_pointer(&mut reader)?;
        let geometry = superblock.geometry().ok_or(DecodeError { field: "capacity" })?;
        let inside = |segment: &u32| *segment < geometry.segments;
        let mut segments = superblock.checkpoint.segments.iter().chain(&superblock.previous.segments);
        require(segments.all(inside), "index segment")?;
        Ok(superblock)
    }
}

fn encode_pointer(writer: &mut Writer, pointer: &CheckpointPointer) {
    assert!(pointer.segments.len() <= INDEX_SEGMENTS_MAX, "the engine never plans more index segments");
    writer.u64(pointer.generation).u64(pointer.frontier_seq).u64(pointer.next_segment_generation);
    writer.u64(pointer.entries).u32(pointer.runs).u32(pointer.segments.len() as u32);
    for segment in &pointer.segments {
        writer.u32(*segment);
    }
}

fn decode_pointer(reader: &mut Reader<'_>) -> Result<CheckpointPointer, DecodeError> {
    let mut pointer = CheckpointPointer {
        generation: reader.u64("checkpoint generation")?,
        frontier_seq: reader.u64("frontier")?,
        next_segment_generation: reader.u64("next segment generation")?,
        entries: reader.u64("entries")?,
        runs: reader.u32("runs")?,
        segments: Vec::new(),
    };
    let count = reader.u32("index segments")? as usize;
    require(count <= INDEX_SEGMENTS_MAX, "index segments")?;
    for _ in 0..count {
        pointer.segments.push(reader.u32("index segment")?);
    }
    Ok(pointer)
}

/// Takes 16 bytes.
pub(super) fn array(reader: &mut Reader<'_>, field: &'static str) -> Result<[u8; 16], DecodeError> {
    Ok(reader.bytes(16, field)?.try_into().expect("sixteen bytes were taken"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Superblock {
        Superblock {
            version: FORMAT_VERSION,
            features: Features::default(),
            cluster: ClusterId([1; 16]),
            uuid: DriveUuid([2; 16]),
            capacity_bytes: 64 << 20,
            segment_bytes: 1 << 20,
            sequence: 9,
            incarnation: 3,
            closed: true,
            gap_incarnation: 2,
            checkpoint: CheckpointPointer {
                generation: 4,
                frontier_seq: 77,
                next_segment_generation: 3 << 32 | 5,
                runs: 2,
                entries: 10,
                segments: (0..63).cycle().take(INDEX_SEGMENTS_MAX).collect(),
            },
            previous: CheckpointPointer {
                generation: 3,
                frontier_seq: 70,
                next_segment_generation: 3 << 32 | 4,
                runs: 1,
                entries: 9,
                segments: (0..63).cycle().take(INDEX_SEGMENTS_MAX).collect(),
            },
        }
    }

    #[test]
    fn a_superblock_comes_back_as_it_was() {
        assert_eq!(Superblock::decode(&sample().encode()), Ok(sample()));
    }

    #[test]
    fn any_flipped_bit_is_noticed() {
        let block = sample().encode();
        for bit in 0..BLOCK * 8 {
            let mut damaged = block.to_vec();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(&damaged).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn the_identity_of_another_version_is_readable() {
        for version in [1, FORMAT_VERSION + 1] {
            let other = Superblock { version, ..sample() };
            let read = Superblock::decode(&other.encode()).unwrap();
            assert_eq!((read.version, read.cluster), (version, other.cluster));
        }
    }
}
