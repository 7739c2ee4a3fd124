//! Frames of the file log: what `docs/formats/log.md` draws.
//!
//! ```text
//!  0  magic      u32   "FBLG"
//!  4  format     u8    1
//!  5  kind       u8    1 entry, 2 seal
//!  6  index      u16   entries of the same append before this one
//!  8  epoch      u64
//! 16  seq        u64   of a seal: the last entry before it
//! 24  len        u32   bytes of the batch; 0 in a seal
//! 28  checksum   u32   CRC-32C of bytes 0..28 and the batch
//! 32  batch
//! ```

use base::codec::{Reader, Writer};
use base::{Epoch, Seq};

/// Bytes before the batch.
pub(super) const HEADER_BYTES: usize = 32;
/// Largest accepted batch, in bytes.
pub(super) const ENTRY_BYTES_MAX: usize = 64 << 20;

const MAGIC: u32 = u32::from_le_bytes(*b"FBLG");
const FORMAT: u8 = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameKind {
    Entry,
    Seal,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame<'a> {
    pub(super) kind: FrameKind,
    pub(super) index: u16,
    pub(super) epoch: Epoch,
    pub(super) seq: Seq,
    pub(super) batch: &'a [u8],
}

/// Why bytes are not a valid frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BadFrame {
    /// Torn, overwritten or never written.
    Invalid,
    /// A valid frame of a newer version.
    NewerFormat(u8),
}

pub(super) fn checksum(header: &[u8], batch: &[u8]) -> u32 {
    base::checksum::crc32c(header) ^ base::checksum::crc32c(batch).rotate_left(1)
}

impl<'a> Frame<'a> {
    pub(super) fn append_to(&self, out: &mut Vec<u8>) {
        let mut w = Writer::new();
        let kind = match self.kind {
            FrameKind::Entry => 1,
            FrameKind::Seal => 2,
        };
        let len = u32::try_from(self.batch.len()).expect("batches are limited to 64 MiB");
        w.u32(MAGIC).u8(FORMAT).u8(kind).u16(self.index).u64(self.epoch.0).u64(self.seq.0).u32(len);
        let header = w.finish();
        out.extend_from_slice(&header);
        out.extend_from_slice(&checksum(&header, self.batch).to_le_bytes());
        out.extend_from_slice(self.batch);
    }

    /// Decodes the frame at the start of `bytes`.
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self, BadFrame> {
        let invalid = |_| BadFrame::Invalid;
        let mut r = Reader::new(bytes);
        let magic = r.u32("magic").map_err(invalid)?;
        let format = r.u8("format").map_err(invalid)?;
        let kind = r.u8("kind").map_err(invalid)?;
        let index = r.u16("index").map_err(invalid)?;
        let epoch = Epoch(r.u64("epoch").map_err(invalid)?);
        let seq = Seq(r.u64("seq").map_err(invalid)?);
        let len = r.u32("len").map_err(invalid)? as usize;
        let sum = r.u32("checksum").map_err(invalid)?;
        if magic != MAGIC || len > ENTRY_BYTES_MAX {
            return Err(BadFrame::Invalid);
        }
        let batch = r.bytes(len, "batch").map_err(invalid)?;
        if checksum(&bytes[..HEADER_BYTES - 4], batch) != sum {
            return Err(BadFrame::Invalid);
        }
        if format != FORMAT {
            return Err(BadFrame::NewerFormat(format));
        }
        let kind = match kind {
            1 => FrameKind::Entry,
            2 => FrameKind::Seal,
            _ => return Err(BadFrame::Invalid),
        };
        Ok(Self { kind, index, epoch, seq, batch })
    }

    pub(super) fn len_bytes(&self) -> usize {
        HEADER_BYTES + self.batch.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_keeps_its_bytes() {
        let frame = Frame { kind: FrameKind::Entry, index: 0, epoch: Epoch(2), seq: Seq(3), batch: b"abc" };
        let mut bytes = Vec::new();
        frame.append_to(&mut bytes);
        assert_eq!(&bytes[..28], b"FBLG\x01\x01\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\x03\0\0\0");
        assert_eq!(Frame::parse(&bytes), Ok(frame));
        for cut in 0..bytes.len() {
            assert_eq!(Frame::parse(&bytes[..cut]), Err(BadFrame::Invalid));
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Frame::parse(&flipped).is_err(), "bit {bit} is not covered");
        }
    }
}
