//! Entry points for fuzzers to the decoders of the drive format. Only in builds of fuzzers and tests.
//!
//! Each entry point first corrects the checksum: without that no input would pass it, and a checksum does not protect
//! against bytes that a faulty or foreign program wrote.

use crate::format::checkpoint::Run;
use crate::format::frame::FrameHeader;
use crate::format::{seal_crc, segment::SegmentHeader, superblock::Superblock};

/// Corrects the checksum at `crc_at`.
fn sealed(bytes: &[u8], crc_at: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if let Some(crc) = bytes.get_mut(crc_at..crc_at + 4) {
        crc.fill(0);
        seal_crc(&mut bytes, crc_at);
    }
    bytes
}

/// Decodes a superblock. An accepted one must encode to the same bytes.
pub fn superblock(bytes: &[u8]) {
    let bytes = sealed(bytes, 8);
    if let Ok(superblock) = Superblock::decode(&bytes)
        && superblock.version == crate::FORMAT_VERSION
    {
        let again = superblock.encode();
        assert_eq!(Superblock::decode(&again).as_ref(), Ok(&superblock));
    }
}

/// Decodes the header of a segment.
pub fn segment(bytes: &[u8]) {
    if let Ok(header) = SegmentHeader::decode(&sealed(bytes, 8)) {
        assert_eq!(SegmentHeader::decode(&header.encode()), Ok(header));
    }
}

/// Decodes the header of a frame with its records.
pub fn frame(bytes: &[u8]) {
    let _ = FrameHeader::peek(bytes);
    if let Ok(header) = FrameHeader::decode(&sealed(bytes, 4)) {
        assert_eq!(header.records.len(), header.fields.records as usize);
        assert_eq!(header.positions.len(), header.fields.positions as usize);
        assert!(header.fields.blocks() >= header.fields.header_blocks);
    }
}

/// Decodes a run of an index checkpoint.
pub fn run(bytes: &[u8]) {
    let _ = Run::decode(&sealed(bytes, 4));
}
