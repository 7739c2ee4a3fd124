//! Doors for the fuzzers to the decoders of what lies on a drive. Only in builds of fuzzers and tests.
//!
//! Checksums are made right first: without that no input would get past them, and a checksum does not protect against
//! what a faulty or foreign program wrote.

use crate::format::checkpoint::Run;
use crate::format::frame::FrameHeader;
use crate::format::{seal_crc, segment::SegmentHeader, superblock::Superblock};

/// Where the structure has its checksum.
fn sealed(bytes: &[u8], crc_at: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if let Some(crc) = bytes.get_mut(crc_at..crc_at + 4) {
        crc.fill(0);
        seal_crc(&mut bytes, crc_at);
    }
    bytes
}

/// A superblock; what is accepted is written as it was read.
pub fn superblock(bytes: &[u8]) {
    let bytes = sealed(bytes, 8);
    if let Ok(superblock) = Superblock::decode(&bytes)
        && superblock.version == crate::FORMAT_VERSION
    {
        let again = superblock.encode();
        assert_eq!(Superblock::decode(&again).as_ref(), Ok(&superblock));
    }
}

/// The header of a segment.
pub fn segment(bytes: &[u8]) {
    if let Ok(header) = SegmentHeader::decode(&sealed(bytes, 8)) {
        assert_eq!(SegmentHeader::decode(&header.encode()), Ok(header));
    }
}

/// The header of a frame with its records.
pub fn frame(bytes: &[u8]) {
    let _ = FrameHeader::peek(bytes);
    if let Ok(header) = FrameHeader::decode(&sealed(bytes, 4)) {
        assert_eq!(header.records.len(), header.fields.records as usize);
        assert_eq!(header.positions.len(), header.fields.positions as usize);
        assert!(header.fields.blocks() >= header.fields.header_blocks);
    }
}

/// A run of an index checkpoint.
pub fn run(bytes: &[u8]) {
    let _ = Run::decode(&sealed(bytes, 4));
}
