//! Blobs: ranges of files in one object of an object store. `docs/formats/blob.md` draws every byte.
//!
//! The header and index of a blob come before its data: one ranged read of its front is enough to find a file's bytes
//! without any metadata. Every 4 KiB block has a checksum, so that any aligned part can be verified on its own.

use std::fmt;
use std::ops::Range;

use base::checksum::{Crc32c, crc32c};
use base::codec::{DecodeError, Reader, Writer};
use base::units::BLOCK_BYTES;
use base::{ClusterId, Epoch, ExtentId, Ino, LedgerId, MapId};
use bytes::Bytes;

/// First bytes of every blob.
const MAGIC: [u8; 8] = *b"FOREBAYB";
/// Version of the format.
const FORMAT: u32 = 1;
/// Where the header's checksum lies.
const CRC_AT: Range<usize> = 8..12;
/// Where the fields of the header end; zeros follow.
const HEADER_END: usize = 72;
/// Bytes of a range's entry.
const RANGE_BYTES: usize = 56;
const BLOCK: usize = BLOCK_BYTES as usize;

/// Bytes of the header.
pub const BLOB_HEADER_BYTES: usize = BLOCK;
/// Largest blob, and the usual one.
pub const BLOB_BYTES_MAX: u32 = 64 << 20;
/// Smallest limit on the size of blobs.
pub const BLOB_BYTES_MIN: u32 = 4 << 20;

/// The identity of a blob: never reused, because the epoch of an owner is never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlobId {
    /// The ledger whose files are in it.
    pub ledger: LedgerId,
    /// Numbers the blobs of the ledger.
    pub serial: u64,
    /// Epoch of the owner that wrote it.
    pub term: Epoch,
}

impl BlobId {
    /// The key of its object, without the prefix of the store.
    pub fn key(&self, cluster: ClusterId) -> String {
        let (bucket, serial) = (Reversed(self.ledger.0.into()), Reversed(self.serial));
        format!("B_{bucket}/{cluster}/d/I_{serial}/{}", self.term)
    }

    /// The blob whose object has this key; `None`: a blob of the cluster has no such key.
    pub fn of_key(key: &str, cluster: ClusterId) -> Option<Self> {
        let reversed = |digits: &str| digits.chars().rev().collect::<String>().parse().ok();
        let mut parts = key.split('/');
        let bucket: u64 = reversed(parts.next()?.strip_prefix("B_")?)?;
        let serial = reversed(parts.nth(2)?.strip_prefix("I_")?)?;
        let term = Epoch(parts.next()?.parse().ok()?);
        let id = Self { ledger: LedgerId(bucket.try_into().ok()?), serial, term };
        Some(id).filter(|id| id.key(cluster) == key)
    }
}

/// Decimal digits from the last to the first. Keys of consecutive numbers then differ early and spread over the
/// partitions of a store.
struct Reversed(u64);

impl fmt::Display for Reversed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.to_string().chars().rev().try_for_each(|digit| write!(f, "{digit}"))
    }
}

/// A run of a file's bytes in a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlobRange {
    /// The file that it was uploaded for.
    pub ino: Ino,
    /// The map that refers to it.
    pub map: MapId,
    /// Where in the file it begins.
    pub off: u64,
    /// Its bytes.
    pub len: u32,
    /// The block of the blob's data where it begins.
    pub block: u32,
    /// The extent that it was uploaded from.
    pub extent: ExtentId,
    /// The snapshot layer that it was written in; 0 without snapshots.
    pub layer: u64,
    /// CRC-32C of its bytes.
    pub crc32c: u32,
}

impl BlobRange {
    /// Its blocks, counted in the data of the blob.
    fn blocks(&self) -> Range<u64> {
        let first = u64::from(self.block);
        first..first + u64::from(self.len).div_ceil(BLOCK_BYTES)
    }
}

/// The front of a blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlobHeader {
    /// The cluster that wrote it.
    pub cluster: ClusterId,
    /// Its identity.
    pub id: BlobId,
    /// The filesystem whose files are in it.
    pub filesystem: u32,
    /// Ranges in it.
    pub ranges: u32,
    /// Blocks of data in it.
    pub blocks: u32,
    /// CRC-32C of the index.
    index_crc32c: u32,
}

impl BlobHeader {
    /// Bytes of the index, which follows the header.
    pub fn index_bytes(&self) -> usize {
        (self.ranges as usize * RANGE_BYTES + self.blocks as usize * 4).next_multiple_of(BLOCK)
    }

    /// Where the data begins.
    pub fn data_off(&self) -> usize {
        BLOB_HEADER_BYTES + self.index_bytes()
    }

    /// Bytes of the whole blob.
    pub fn blob_bytes(&self) -> usize {
        self.data_off() + self.blocks as usize * BLOCK
    }

    fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        writer.bytes(&MAGIC).u32(0).u32(FORMAT).bytes(&self.cluster.0);
        writer.u32(self.id.ledger.0).u32(self.filesystem).u64(self.id.serial).u64(self.id.term.0);
        // No key version: blobs are not encrypted yet.
        writer.u32(0).u32(self.ranges).u32(self.blocks).u32(self.index_crc32c);
        let mut bytes = writer.finish();
        bytes.resize(BLOB_HEADER_BYTES, 0);
        let crc = crc32c(&bytes);
        bytes[CRC_AT].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads the first [`BLOB_HEADER_BYTES`] of a blob.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        require(bytes.len() == BLOB_HEADER_BYTES, "blob header length")?;
        let mut reader = Reader::new(bytes);
        require(reader.bytes(8, "magic")? == MAGIC, "magic")?;
        let crc = reader.u32("crc")?;
        let mut unsigned = bytes.to_vec();
        unsigned[CRC_AT].fill(0);
        require(crc32c(&unsigned) == crc, "crc")?;
        require(reader.u32("format")? == FORMAT, "format")?;
        let cluster = ClusterId(reader.bytes(16, "cluster")?.try_into().expect("sixteen bytes were taken"));
        let ledger = LedgerId(reader.u32("ledger")?);
        let filesystem = reader.u32("filesystem")?;
        let (serial, term) = (reader.u64("serial")?, Epoch(reader.u64("term")?));
        require(reader.u32("key version")? == 0, "key version")?;
        let (ranges, blocks) = (reader.u32("ranges")?, reader.u32("blocks")?);
        let index_crc32c = reader.u32("index crc")?;
        require(bytes[HEADER_END..].iter().all(|byte| *byte == 0), "header end")?;
        let id = BlobId { ledger, serial, term };
        let header = Self { cluster, id, filesystem, ranges, blocks, index_crc32c };
        // No range is empty, and no blob is larger. With this check the code below cannot overflow or allocate too
        // much.
        require(ranges <= blocks && blocks <= BLOB_BYTES_MAX / BLOCK as u32, "blocks")?;
        require(header.blob_bytes() <= BLOB_BYTES_MAX as usize, "blob length")?;
        Ok(header)
    }
}

/// The contents of a blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlobIndex {
    /// Ranges in the order of their blocks, without gaps.
    pub ranges: Vec<BlobRange>,
    /// CRC-32C of each block of data.
    pub sums: Vec<u32>,
}

impl BlobIndex {
    fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        for range in &self.ranges {
            writer.u64(range.ino.0).u64(range.map.0).u64(range.off).u32(range.len).u32(range.block);
            // The last field is for the place of authentication tags.
            writer.u64(range.extent.0).u64(range.layer).u32(range.crc32c).u32(0);
        }
        for sum in &self.sums {
            writer.u32(*sum);
        }
        let mut bytes = writer.finish();
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        bytes
    }

    /// Reads the [`BlobHeader::index_bytes`] behind the header.
    pub fn decode(header: &BlobHeader, bytes: &[u8]) -> Result<Self, DecodeError> {
        require(bytes.len() == header.index_bytes(), "index length")?;
        require(crc32c(bytes) == header.index_crc32c, "index crc")?;
        let mut reader = Reader::new(bytes);
        let mut next = 0;
        let mut ranges = Vec::with_capacity(header.ranges as usize);
        for _ in 0..header.ranges {
            let range = BlobRange {
                ino: Ino(reader.u64("ino")?),
                map: MapId(reader.u64("map")?),
                off: reader.u64("off")?,
                len: reader.u32("len")?,
                block: reader.u32("block")?,
                extent: ExtentId(reader.u64("extent")?),
                layer: reader.u64("layer")?,
                crc32c: reader.u32("range crc")?,
            };
            require(reader.u32("tags")? == 0, "tags")?;
            require(range.len > 0 && u64::from(range.block) == next, "range")?;
            require(range.off.checked_add(range.len.into()).is_some(), "range end")?;
            next = range.blocks().end;
            ranges.push(range);
        }
        require(next == u64::from(header.blocks), "blocks of ranges")?;
        let sums = (0..header.blocks).map(|_| reader.u32("sum")).collect::<Result<_, _>>()?;
        Ok(Self { ranges, sums })
    }

    /// Whether `bytes` match the checksums of the blocks of data from `first` on.
    pub fn blocks_match(&self, first: u32, bytes: &[u8]) -> bool {
        let first = first as usize;
        let sums = first.checked_add(bytes.len() / BLOCK).and_then(|end| self.sums.get(first..end));
        bytes.len().is_multiple_of(BLOCK)
            && sums.is_some_and(|sums| {
                bytes.chunks_exact(BLOCK).zip(sums).all(|(block, sum)| crc32c(block) == *sum)
            })
    }
}

/// A finished blob.
#[derive(Debug, Clone)]
pub struct Blob {
    /// Its header.
    pub header: BlobHeader,
    /// Its index.
    pub index: BlobIndex,
    /// All its bytes, in consecutive parts.
    pub parts: Vec<Bytes>,
}

/// Computes which ranges fit into a blob, from their lengths alone.
#[derive(Debug)]
pub struct BlobPlan {
    bytes_max: usize,
    ranges: usize,
    blocks: usize,
}

impl BlobPlan {
    /// A blob of at most `bytes_max` bytes.
    pub fn new(bytes_max: u32) -> Self {
        Self { bytes_max: bytes_max as usize, ranges: 0, blocks: 0 }
    }

    /// Adds a range of `len` bytes if it still fits. The first range always fits: it may exceed `bytes_max`.
    pub fn add(&mut self, len: u32) -> bool {
        let (ranges, blocks) = (self.ranges + 1, self.blocks + (len as usize).div_ceil(BLOCK));
        let fits = self.ranges == 0 || Self { ranges, blocks, ..*self }.bytes() <= self.bytes_max;
        if fits {
            (self.ranges, self.blocks) = (ranges, blocks);
        }
        fits
    }

    /// Bytes of a blob of these ranges.
    pub fn bytes(&self) -> usize {
        let index = (self.ranges * RANGE_BYTES + self.blocks * 4).next_multiple_of(BLOCK);
        BLOB_HEADER_BYTES + index + self.blocks * BLOCK
    }

    /// The limit that a blob of these ranges needs.
    pub fn limit(&self) -> u32 {
        self.bytes().max(self.bytes_max) as u32
    }
}

/// Gathers ranges into a blob.
#[derive(Debug)]
pub struct BlobBuilder {
    bytes_max: usize,
    index: BlobIndex,
    data: Vec<Bytes>,
}

impl BlobBuilder {
    /// A blob of at most `bytes_max` bytes, which is between [`BLOB_BYTES_MIN`] and [`BLOB_BYTES_MAX`].
    pub fn new(bytes_max: u32) -> Self {
        assert!((BLOB_BYTES_MIN..=BLOB_BYTES_MAX).contains(&bytes_max), "settings are checked before");
        let index = BlobIndex { ranges: Vec::new(), sums: Vec::new() };
        Self { bytes_max: bytes_max as usize, index, data: Vec::new() }
    }

    /// Whether it has no ranges.
    pub fn is_empty(&self) -> bool {
        self.index.ranges.is_empty()
    }

    /// The block of data where the next range begins.
    pub fn next_block(&self) -> u32 {
        self.index.sums.len() as u32
    }

    /// Bytes of the longest range that still fits; 0 if none fits.
    pub fn room(&self) -> u32 {
        // Whole blocks of data, each with its sum, beside the header and the entries.
        let entries = (self.index.ranges.len() + 1) * RANGE_BYTES;
        let blocks_max = |blocks: usize| {
            BLOB_HEADER_BYTES + (entries + blocks * 4).next_multiple_of(BLOCK) + blocks * BLOCK
                <= self.bytes_max
        };
        let used = self.index.sums.len();
        let mut most = self.bytes_max / BLOCK;
        while most > used && !blocks_max(most) {
            most -= 1;
        }
        (most.saturating_sub(used) * BLOCK) as u32
    }

    /// Adds a range in consecutive parts, all but the last in whole blocks. Sets its length, block and checksum.
    ///
    /// # Panics
    /// If the range is empty or there is no [`room`](Self::room) for it.
    pub fn push(&mut self, range: BlobRange, parts: Vec<Bytes>) {
        let len: usize = parts.iter().map(Bytes::len).sum();
        assert!(len > 0 && len <= self.room() as usize, "the caller asked for the room");
        let block = self.index.sums.len() as u32;
        let mut digest = Crc32c::default();
        let mut ended = false;
        for bytes in parts {
            assert!(!ended, "only the last part may end within a block");
            digest.update(&bytes);
            let (whole, rest) = bytes.split_at(bytes.len() / BLOCK * BLOCK);
            self.index.sums.extend(whole.chunks_exact(BLOCK).map(crc32c));
            self.data.push(bytes.slice(..whole.len()));
            if !rest.is_empty() {
                let mut last = rest.to_vec();
                last.resize(BLOCK, 0);
                self.index.sums.push(crc32c(&last));
                self.data.push(last.into());
                ended = true;
            }
        }
        self.index.ranges.push(BlobRange { len: len as u32, block, crc32c: digest.finish(), ..range });
    }

    /// Makes the blob with this identity.
    pub fn finish(self, cluster: ClusterId, id: BlobId, filesystem: u32) -> Blob {
        let index = self.index.encode();
        let header = BlobHeader {
            cluster,
            id,
            filesystem,
            ranges: self.index.ranges.len() as u32,
            blocks: self.index.sums.len() as u32,
            index_crc32c: crc32c(&index),
        };
        let mut parts: Vec<Bytes> = vec![header.encode().into(), index.into()];
        parts.extend(self.data.into_iter().filter(|part| !part.is_empty()));
        Blob { header, index: self.index, parts }
    }
}

fn require(holds: bool, field: &'static str) -> Result<(), DecodeError> {
    if holds { Ok(()) } else { Err(DecodeError { field }) }
}

/// For the fuzzer: gives the front of a blob the right checksums, then decodes it.
#[cfg(any(fuzzing, feature = "fuzzing"))]
pub fn fuzz_blob(data: &[u8]) {
    let mut front = data[..data.len().min(BLOB_HEADER_BYTES)].to_vec();
    front.resize(BLOB_HEADER_BYTES, 0);
    front[..MAGIC.len()].copy_from_slice(&MAGIC);
    front[HEADER_END..].fill(0);
    let sign = |front: &mut [u8]| {
        front[CRC_AT].fill(0);
        let crc = crc32c(front);
        front[CRC_AT].copy_from_slice(&crc.to_le_bytes());
    };
    sign(&mut front);
    let Ok(header) = BlobHeader::decode(&front) else { return };
    assert_eq!(header.encode(), front);
    let mut bytes = data.get(BLOB_HEADER_BYTES..).unwrap_or_default().to_vec();
    bytes.resize(header.index_bytes(), 0);
    let header = BlobHeader { index_crc32c: crc32c(&bytes), ..header };
    if let Ok(index) = BlobIndex::decode(&header, &bytes) {
        let again = index.encode();
        assert_eq!(
            BlobIndex::decode(&BlobHeader { index_crc32c: crc32c(&again), ..header }, &again),
            Ok(index)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CLUSTER: ClusterId = ClusterId([0xab; 16]);
    const ID: BlobId = BlobId { ledger: LedgerId(1), serial: 120, term: Epoch(7) };

    #[test]
    fn a_key_names_its_blob_and_nothing_else_does() {
        let ids = [ID, BlobId { ledger: LedgerId(120), serial: 0, term: Epoch(u64::MAX) }];
        for id in ids {
            assert_eq!(BlobId::of_key(&id.key(CLUSTER), CLUSTER), Some(id));
            assert_eq!(BlobId::of_key(&id.key(CLUSTER), ClusterId([1; 16])), None);
        }
        let key = ID.key(CLUSTER);
        let others = [
            format!("{key}/"),
            format!("{key}0x"),
            format!("/{key}"),
            key.replace("/d/", "/../d/"),
            String::new(),
        ];
        for other in others.iter().chain([&key.replace("I_021", "I_0210"), &key.replace("I_021", "I_0+21")]) {
            assert_eq!(BlobId::of_key(other, CLUSTER), None, "{other}");
        }
    }

    fn range(ino: u64) -> BlobRange {
        BlobRange {
            ino: Ino(ino),
            map: MapId(ino + 100),
            off: ino << 20,
            len: 0,
            block: 0,
            extent: ExtentId(ino + 200),
            layer: 0,
            crc32c: 0,
        }
    }

    fn blob_of(contents: &[Bytes]) -> Blob {
        let mut builder = BlobBuilder::new(BLOB_BYTES_MIN);
        for (ino, bytes) in (1..).zip(contents) {
            builder.push(range(ino), vec![bytes.clone()]);
        }
        builder.finish(CLUSTER, ID, 1)
    }

    fn read(bytes: &[u8]) -> Result<(BlobHeader, BlobIndex), DecodeError> {
        let (front, rest) =
            bytes.split_at_checked(BLOB_HEADER_BYTES).ok_or(DecodeError { field: "front" })?;
        let header = BlobHeader::decode(front)?;
        let index = rest.get(..header.index_bytes()).ok_or(DecodeError { field: "index" })?;
        let index = BlobIndex::decode(&header, index)?;
        Ok((header, index))
    }

    #[test]
    fn names_have_reversed_numbers_that_keep_their_zeros() {
        let key = ID.key(CLUSTER);
        assert_eq!(key, "B_1/abababab-abab-abab-abab-abababababab/d/I_021/7");
        let other = BlobId { ledger: LedgerId(123), serial: 789, term: Epoch(456) };
        assert_eq!(other.key(CLUSTER), "B_321/abababab-abab-abab-abab-abababababab/d/I_987/456");
    }

    #[test]
    fn a_blob_has_the_bytes_of_the_documentation() {
        let blob = blob_of(&[Bytes::from_static(b"abc"), vec![7u8; 4097].into()]);
        let bytes = blob.parts.concat();
        let hex =
            |range: Range<usize>| bytes[range].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(bytes.len(), blob.header.blob_bytes());
        assert_eq!(hex(0..8), "464f524542415942");
        assert_eq!(hex(12..16), "01000000");
        assert_eq!(hex(16..32), "ab".repeat(16));
        assert_eq!(hex(32..56), "010000000100000078000000000000000700000000000000");
        assert_eq!(hex(56..68), "000000000200000003000000");
        assert!(bytes[72..4096].iter().all(|byte| *byte == 0));
        let second = "0200000000000000660000000000000000002000000000000110000001000000ca000000000000000000000000000000";
        assert_eq!(hex(4096 + 56..4096 + 104), second);
        assert_eq!(&bytes[8192..8195], b"abc");
        assert_eq!(bytes[12_288], 7);
    }

    #[test]
    fn a_blob_does_not_depend_on_the_parts_of_its_bytes() {
        let bytes: Bytes = (0..20_000u32).map(|i| (i % 251) as u8).collect();
        let mut parts = BlobBuilder::new(BLOB_BYTES_MIN);
        let cut = |range: Range<usize>| bytes.slice(range);
        parts.push(range(1), vec![cut(0..8192), cut(8192..8192), cut(8192..12_288), cut(12_288..20_000)]);
        let blob = parts.finish(CLUSTER, ID, 1);
        assert_eq!(blob.parts.concat(), blob_of(&[bytes]).parts.concat());
    }

    #[test]
    fn a_flipped_bit_anywhere_is_noticed() {
        let blob = blob_of(&[vec![1u8; 5000].into(), vec![2u8; 100].into()]);
        let bytes = blob.parts.concat();
        let data_off = blob.header.data_off();
        for at in (0..bytes.len()).step_by(7) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << (at % 8);
            match read(&damaged) {
                Err(_) => assert!(at < data_off),
                Ok((_, index)) => assert!(!index.blocks_match(0, &damaged[data_off..]), "at {at}"),
            }
        }
    }

    #[test]
    fn a_full_blob_is_no_larger_than_allowed_and_nearly_so() {
        for len in [1usize, 100, 4096, 5000, 128 << 10, 3 << 20] {
            let mut builder = BlobBuilder::new(BLOB_BYTES_MIN);
            while builder.room() as usize >= len {
                builder.push(range(1), vec![vec![3; len].into()]);
            }
            let last = builder.room();
            if last > 0 {
                builder.push(range(2), vec![vec![4; last as usize].into()]);
            }
            assert_eq!(builder.room(), 0);
            let (mut plan, mut planned) = (BlobPlan::new(BLOB_BYTES_MIN), 0);
            while plan.add(len as u32) {
                planned += 1;
            }
            assert_eq!(planned, builder.index.ranges.len() - usize::from(last > 0), "len {len}");
            let blob = builder.finish(CLUSTER, ID, 1);
            let size = blob.header.blob_bytes();
            assert_eq!(size, blob.parts.iter().map(Bytes::len).sum::<usize>());
            let bounds = BLOB_BYTES_MIN as usize - 2 * BLOCK..=BLOB_BYTES_MIN as usize;
            assert!(bounds.contains(&size), "len {len}: {size}");
        }
    }

    proptest! {
        #[test]
        fn the_index_finds_every_range(lens in prop::collection::vec(1usize..20_000, 1..20)) {
            let contents: Vec<Bytes> =
                (1u8..).zip(&lens).map(|(fill, len)| vec![fill; *len].into()).collect();
            let bytes = blob_of(&contents).parts.concat();
            let (header, index) = read(&bytes).unwrap();
            let data = &bytes[header.data_off()..];
            prop_assert!(index.blocks_match(0, data));
            prop_assert_eq!(index.ranges.len(), contents.len());
            for (range, content) in index.ranges.iter().zip(&contents) {
                let at = range.block as usize * BLOCK;
                prop_assert_eq!(&data[at..at + range.len as usize], &content[..]);
                prop_assert_eq!(crc32c(content), range.crc32c);
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..9000), at in 0usize..200) {
            let _ = read(&bytes);
            // Again with a valid front, so that the decoder reads further.
            let blob = blob_of(&[vec![9u8; 300].into()]).parts.concat();
            for (byte, right) in bytes.iter_mut().zip(&blob).take(at * 45) {
                *byte = *right;
            }
            let _ = read(&bytes);
        }
    }
}
