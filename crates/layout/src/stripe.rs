//! Which bytes of an extent lie in which block of which shard.
//!
//! With S = [`shard_len`], data shard j holds the bytes `j * S .. (j + 1) * S` of the extent, padded with zeros to
//! S. So a small read touches one drive. Shards are whole blocks of 4 KiB, the unit of checksum and I/O.

use std::iter::FusedIterator;
use std::ops::Range;

use base::ShardIndex;
use base::units::{BLOCK_BYTES, MIB, align_up};

use crate::{Profile, SHARDS_MAX};

const BLOCK: u32 = BLOCK_BYTES as u32;

/// The most bytes that one extent of this profile holds: k MiB, so that a shard is at most 1 MiB.
pub fn extent_bytes_max(profile: Profile) -> u32 {
    u32::from(profile.k()) * MIB as u32
}

/// Bytes of every shard, data or parity, of an extent of `extent_len` bytes: a multiple of 4096, at least one block.
pub fn shard_len(extent_len: u32, k: u8) -> u32 {
    assert!((1..=SHARDS_MAX).contains(&k), "a profile has 1 to 20 data shards");
    let share = u64::from(extent_len.div_ceil(u32::from(k))).max(1);
    u32::try_from(align_up(share, BLOCK_BYTES)).expect("an extent is far below 4 GiB")
}

/// The bytes of the extent in data shard `shard`. The range is shorter than the shard, or empty, if padding follows.
pub fn shard_data_range(extent_len: u32, k: u8, shard: ShardIndex) -> Range<u32> {
    assert!(shard.0 < k, "only data shards hold bytes of the extent");
    let shard_len = u64::from(shard_len(extent_len, k));
    let clip = |offset: u64| u32::try_from(offset.min(u64::from(extent_len))).expect("clipped to a u32");
    let start = u64::from(shard.0) * shard_len;
    clip(start)..clip(start + shard_len)
}

/// A read of one shard in whole blocks, and the requested bytes among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardRead {
    /// The data shard. With k = 1 every shard of the extent is a copy and may stand in for shard 0.
    pub shard: ShardIndex,
    /// First block.
    pub first_block: u32,
    /// How many blocks; at least one.
    pub blocks: u32,
    /// Bytes of the first block that come before the wanted ones.
    pub skip_bytes: u32,
    /// Wanted bytes.
    pub len_bytes: u32,
}

/// The reads that together give a range of an extent, in the order of its bytes. At most k of them.
#[derive(Debug, Clone)]
pub struct ReadPlan {
    shard_len: u32,
    offset: u32,
    end: u32,
}

/// Plans the read of `len` bytes at `offset` of an extent of `extent_len` bytes. An empty range needs no reads.
///
/// # Panics
/// If the range leaves the extent: callers clip to the length that the metadata states.
pub fn read_plan(extent_len: u32, k: u8, offset: u32, len: u32) -> ReadPlan {
    let end = offset.checked_add(len).filter(|end| *end <= extent_len);
    let end = end.expect("a read stays inside its extent");
    ReadPlan { shard_len: shard_len(extent_len, k), offset, end }
}

impl Iterator for ReadPlan {
    type Item = ShardRead;

    fn next(&mut self) -> Option<ShardRead> {
        if self.offset >= self.end {
            return None;
        }
        let shard = self.offset / self.shard_len;
        let start = self.offset % self.shard_len;
        let len_bytes = (self.end - self.offset).min(self.shard_len - start);
        self.offset += len_bytes;
        Some(ShardRead {
            shard: ShardIndex(u8::try_from(shard).expect("an extent has at most 20 data shards")),
            first_block: start / BLOCK,
            blocks: (start + len_bytes).div_ceil(BLOCK) - start / BLOCK,
            skip_bytes: start % BLOCK,
            len_bytes,
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let shards = self.end.div_ceil(self.shard_len).saturating_sub(self.offset / self.shard_len);
        let left = if self.offset < self.end { shards as usize } else { 0 };
        (left, Some(left))
    }
}

impl ExactSizeIterator for ReadPlan {}
impl FusedIterator for ReadPlan {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shards_are_whole_blocks_and_never_empty() {
        for (extent_len, k, expected) in [
            (0, 4, 4096),
            (1, 1, 4096),
            (1, 16, 4096),
            (4096, 1, 4096),
            (4097, 1, 8192),
            (16384, 4, 4096),
            (16385, 4, 8192),
            (4 << 20, 4, 1 << 20),
            (7 << 20, 7, 1 << 20),
            ((7 << 20) - 1, 7, 1 << 20),
        ] {
            assert_eq!(shard_len(extent_len, k), expected, "{extent_len} {k}");
        }
        assert_eq!(extent_bytes_max("8+2".parse().unwrap()), 8 << 20);
        assert_eq!(extent_bytes_max("r3".parse().unwrap()), 1 << 20);
    }

    #[track_caller]
    fn check(extent_len: u32, k: u8, offset: u32, len: u32, expected: &[(u8, u32, u32, u32, u32)]) {
        let plan = read_plan(extent_len, k, offset, len);
        assert_eq!(plan.len(), expected.len());
        let reads: Vec<_> =
            plan.map(|r| (r.shard.0, r.first_block, r.blocks, r.skip_bytes, r.len_bytes)).collect();
        assert_eq!(reads, expected);
    }

    #[test]
    fn a_small_read_touches_one_shard_and_only_its_blocks() {
        check(4 << 20, 4, 0, 1, &[(0, 0, 1, 0, 1)]);
        check(4 << 20, 4, (1 << 20) + 5000, 10, &[(1, 1, 1, 904, 10)]);
        check(4 << 20, 4, 4095, 2, &[(0, 0, 2, 4095, 2)]);
        check(4 << 20, 4, (1 << 20) - 1, 2, &[(0, 255, 1, 4095, 1), (1, 0, 1, 0, 1)]);
        check(
            4 << 20,
            4,
            1 << 20,
            3 << 20,
            &[(1, 0, 256, 0, 1 << 20), (2, 0, 256, 0, 1 << 20), (3, 0, 256, 0, 1 << 20)],
        );
        check(1 << 20, 1, 8192, 4096, &[(0, 2, 1, 0, 4096)]);
        check(100, 4, 100, 0, &[]);
    }

    #[test]
    #[should_panic(expected = "a read stays inside its extent")]
    fn a_read_beyond_the_extent_is_a_bug() {
        read_plan(100, 4, 90, 11);
    }

    /// Cuts an extent into padded data shards, as a writer does.
    fn cut(extent: &[u8], k: u8) -> Vec<Vec<u8>> {
        let extent_len = extent.len() as u32;
        (0..k)
            .map(|shard| {
                let range = shard_data_range(extent_len, k, ShardIndex(shard));
                let mut bytes = extent[range.start as usize..range.end as usize].to_vec();
                bytes.resize(shard_len(extent_len, k) as usize, 0);
                bytes
            })
            .collect()
    }

    proptest! {
        #[test]
        fn planned_reads_concatenate_to_the_range(
            k in 1u8..=20,
            extent_len in 0u32..300_000,
            from in 0.0f64..=1.0,
            part in 0.0f64..=1.0,
        ) {
            let extent: Vec<u8> = (0..extent_len).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let offset = (f64::from(extent_len) * from) as u32;
            let len = (f64::from(extent_len - offset) * part) as u32;
            let shards = cut(&extent, k);
            let plan = read_plan(extent_len, k, offset, len);
            prop_assert_eq!(plan.len(), plan.clone().count());
            let mut bytes = Vec::new();
            for read in plan {
                let shard = &shards[usize::from(read.shard.0)];
                let blocks = &shard[(read.first_block * BLOCK) as usize..][..(read.blocks * BLOCK) as usize];
                prop_assert!(read.skip_bytes < BLOCK);
                prop_assert!(read.skip_bytes + read.len_bytes > (read.blocks - 1) * BLOCK, "a block is not needed");
                bytes.extend_from_slice(&blocks[read.skip_bytes as usize..][..read.len_bytes as usize]);
            }
            prop_assert_eq!(&bytes, &extent[offset as usize..][..len as usize]);
        }

        #[test]
        fn data_shards_hold_every_byte_once(k in 1u8..=20, extent_len in 0u32..30_000_000) {
            let mut next = 0;
            for shard in 0..k {
                let range = shard_data_range(extent_len, k, ShardIndex(shard));
                prop_assert_eq!(range.start, next);
                prop_assert!(range.len() as u32 <= shard_len(extent_len, k));
                next = range.end;
            }
            prop_assert_eq!(next, extent_len);
        }
    }
}
