//! The byte formats on a device. Drawn for people in `docs/formats/drive.md`.
//!
//! Everything here is pure: bytes in, values out. Decoding never panics, for any bytes.

pub(crate) mod checkpoint;
pub(crate) mod frame;
pub(crate) mod segment;
pub(crate) mod superblock;

use base::checksum::crc32c;
use base::codec::DecodeError;
use base::units::{GIB, KIB, MIB};

/// Format version that this code writes; it reads no other.
pub const FORMAT_VERSION: u32 = 2;
/// One block as a `usize`.
pub(crate) const BLOCK: usize = base::units::BLOCK_BYTES as usize;
/// Offsets of the two superblocks: far enough apart that one damaged flash page does not hit both.
pub(crate) const SUPERBLOCK_OFFSETS: [u64; 2] = [0, 64 * KIB];
/// Offset of segment 0.
pub(crate) const SEGMENTS_START: u64 = MIB;
/// Smallest and largest segment.
pub(crate) const SEGMENT_BYTES_MIN: u64 = MIB;
/// See [`SEGMENT_BYTES_MIN`].
pub(crate) const SEGMENT_BYTES_MAX: u64 = 256 * MIB;
/// With fewer segments there is no room for cleaning and checkpoints.
pub(crate) const SEGMENTS_MIN: u32 = 15;
/// Largest shard.
pub(crate) const SHARD_BYTES_MAX: u64 = 16 * MIB;

/// The division of a device into segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Used bytes of the device.
    pub(crate) capacity_bytes: u64,
    /// Size of a segment, a power of two.
    pub(crate) segment_bytes: u64,
    /// Number of segments.
    pub(crate) segments: u32,
}

impl Geometry {
    /// A device smaller than this cannot hold a drive.
    pub(crate) const SMALLEST_BYTES: u64 = SEGMENTS_START + SEGMENTS_MIN as u64 * SEGMENT_BYTES_MIN;

    /// Divides a device; `None` if it is too small or the segment size is not allowed.
    pub(crate) fn new(capacity_bytes: u64, segment_bytes: u64) -> Option<Self> {
        let allowed = (SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&segment_bytes);
        if !allowed || !segment_bytes.is_power_of_two() {
            return None;
        }
        let segments = capacity_bytes.checked_sub(SEGMENTS_START)? / segment_bytes;
        let segments = u32::try_from(segments).ok()?;
        (segments >= SEGMENTS_MIN).then_some(Self { capacity_bytes, segment_bytes, segments })
    }

    /// The segment size for a device: 64 MiB, larger on very large devices, smaller on small ones, as about
    /// seven segments are reserved.
    pub(crate) fn default_segment_bytes(capacity_bytes: u64) -> u64 {
        if capacity_bytes >= 4096 * GIB {
            return SEGMENT_BYTES_MAX;
        }
        // A shard of 1 MiB needs segments of 4 MiB to pack well, so small devices get fewer of those.
        let smallest = if capacity_bytes >= 64 * MIB { 4 * MIB } else { SEGMENT_BYTES_MIN };
        let mut segment_bytes = 64 * MIB;
        while segment_bytes > smallest && capacity_bytes / segment_bytes < 128 {
            segment_bytes /= 2;
        }
        segment_bytes
    }

    /// Blocks in a segment, its header included.
    pub(crate) fn segment_blocks(&self) -> u32 {
        (self.segment_bytes / BLOCK as u64) as u32
    }

    /// Offset of a block of a segment on the device.
    pub(crate) fn offset(&self, segment: u32, block: u32) -> u64 {
        SEGMENTS_START + u64::from(segment) * self.segment_bytes + u64::from(block) * BLOCK as u64
    }

    /// The largest shard that this device accepts. It bounds the unused tail of a segment, into which no shard fits.
    pub(crate) fn shard_bytes_max(&self) -> u64 {
        SHARD_BYTES_MAX.min(self.segment_bytes / 2 - 128 * KIB)
    }

    /// Bytes in front of and behind the segments.
    pub(crate) fn outside_bytes(&self) -> u64 {
        self.capacity_bytes - u64::from(self.segments) * self.segment_bytes
    }
}

/// Writes the checksum of `bytes` into their four bytes at `at`, which must be zero.
pub(crate) fn seal_crc(bytes: &mut [u8], at: usize) {
    let crc = crc32c(bytes);
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Whether the four bytes at `at` are the checksum of all the others with zeros in their place.
pub(crate) fn crc_matches(bytes: &[u8], at: usize) -> bool {
    let Some(stored) = bytes.get(at..at + 4) else { return false };
    let stored = u32::from_le_bytes(stored.try_into().expect("four bytes were taken"));
    // A copy of a few KiB is cheap, and simpler than a streaming digest.
    let mut copy = bytes.to_vec();
    copy[at..at + 4].fill(0);
    crc32c(&copy) == stored
}

/// Fails with the field's name unless `condition` holds.
pub(crate) fn require(condition: bool, field: &'static str) -> Result<(), DecodeError> {
    if condition { Ok(()) } else { Err(DecodeError { field }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_shrink_with_the_device() {
        for (capacity, segment) in [
            (16 * MIB, MIB),
            (64 * MIB, 4 * MIB),
            (GIB, 8 * MIB),
            (2 * GIB, 16 * MIB),
            (8 * GIB, 64 * MIB),
            (1024 * GIB, 64 * MIB),
            (8192 * GIB, 256 * MIB),
        ] {
            assert_eq!(Geometry::default_segment_bytes(capacity), segment, "{capacity}");
            assert!(Geometry::new(capacity, segment).is_some(), "{capacity}");
        }
        assert!(Geometry::new(8 * MIB, MIB).is_none());
        assert!(Geometry::new(GIB, 3 * MIB).is_none());
    }
}
