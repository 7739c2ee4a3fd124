//! CRC-32C (RFC 3720) with the identity of the checked bytes bound into the sum.
//!
//! A plain checksum accepts intact bytes of another place. Block checksums include (extent, shard, block),
//! so that a misplaced or stale block never matches.

use crate::ids::{ExtentId, ShardIndex};
use crate::units::BLOCK_BYTES;

/// CRC-32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// CRC-32C of bytes that arrive in parts.
pub struct Crc32c(crc_fast::Digest);

impl Default for Crc32c {
    fn default() -> Self {
        Self(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi))
    }
}

impl Crc32c {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes added.
    pub fn finish(&self) -> u32 {
        self.0.finalize() as u32
    }
}

/// The checksum of block `block` of a shard: CRC-32C of its bytes, xor the CRC-32C of its identity.
///
/// The identity is 16 little-endian bytes: extent u64, block u32, shard u8, three zero bytes.
pub fn block_checksum(extent: ExtentId, shard: ShardIndex, block: u32, bytes: &[u8]) -> u32 {
    let mut identity = [0u8; 16];
    identity[..8].copy_from_slice(&extent.0.to_le_bytes());
    identity[8..12].copy_from_slice(&block.to_le_bytes());
    identity[12] = shard.0;
    crc32c(bytes) ^ crc32c(&identity)
}

/// The checksums of consecutive blocks of a shard, the first of them numbered `first_block`.
///
/// `bytes` must be a multiple of 4096 long.
pub fn block_checksums(extent: ExtentId, shard: ShardIndex, first_block: u32, bytes: &[u8]) -> Vec<u32> {
    assert!((bytes.len() as u64).is_multiple_of(BLOCK_BYTES), "shards are whole blocks");
    let blocks = bytes.chunks_exact(BLOCK_BYTES as usize);
    (first_block..).zip(blocks).map(|(block, bytes)| block_checksum(extent, shard, block, bytes)).collect()
}

/// Whether the blocks in `bytes` match `checksums`. `bytes` must be whole blocks.
pub fn blocks_match(
    extent: ExtentId,
    shard: ShardIndex,
    first_block: u32,
    bytes: &[u8],
    checksums: &[u32],
) -> bool {
    let blocks = bytes.chunks_exact(BLOCK_BYTES as usize);
    blocks.len() == checksums.len()
        && blocks.remainder().is_empty()
        && (first_block..)
            .zip(blocks.zip(checksums))
            .all(|(block, (bytes, sum))| block_checksum(extent, shard, block, bytes) == *sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_gives_the_rfc_3720_test_vector() {
        assert_eq!(crc32c(&[0u8; 32]), 0x8a91_36aa);
    }

    #[test]
    fn parts_have_the_sum_of_the_whole() {
        let bytes: Vec<u8> = (0..10_000u32).map(|i| (i * 7) as u8).collect();
        let mut parts = Crc32c::default();
        assert_eq!(parts.finish(), crc32c(&[]));
        for part in [&bytes[..1], &bytes[1..1], &bytes[1..4097], &bytes[4097..]] {
            parts.update(part);
        }
        assert_eq!(parts.finish(), crc32c(&bytes));
    }

    #[test]
    fn the_same_bytes_in_another_place_do_not_match() {
        let bytes = vec![7u8; 8192];
        let sums = block_checksums(ExtentId(5), ShardIndex(1), 3, &bytes);
        assert!(blocks_match(ExtentId(5), ShardIndex(1), 3, &bytes, &sums));
        assert!(!blocks_match(ExtentId(6), ShardIndex(1), 3, &bytes, &sums));
        assert!(!blocks_match(ExtentId(5), ShardIndex(2), 3, &bytes, &sums));
        assert!(!blocks_match(ExtentId(5), ShardIndex(1), 4, &bytes, &sums));
        assert!(!blocks_match(ExtentId(5), ShardIndex(1), 3, &bytes[..4096], &sums));
    }
}
