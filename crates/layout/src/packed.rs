//! The table at the end of a packed extent: the files whose pieces are in it. `docs/formats/blob.md` draws every byte.
//!
//! Metadata alone decides which file has which bytes. The table is for a person who has only drives or blobs left.

use base::MapId;
use base::checksum::crc32c;
use base::codec::{Reader, Writer};

/// Begins the footer, the last [`FOOTER_BYTES`] of a packed extent.
const MAGIC: [u8; 8] = *b"FBPIECES";
/// Magic, number of pieces, checksum.
const FOOTER_BYTES: usize = 16;
/// Bytes of a piece's entry.
pub const PACKED_ENTRY_BYTES: usize = 24;

/// A piece of a file in a packed extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedPiece {
    /// The map that it was packed for.
    pub map: MapId,
    /// Where in that map it begins.
    pub off: u64,
    /// Where in the extent it begins.
    pub extent_off: u32,
    /// Its bytes.
    pub len: u32,
}

/// Bytes of a table with this number of pieces.
pub const fn packed_table_bytes(pieces: usize) -> usize {
    pieces * PACKED_ENTRY_BYTES + FOOTER_BYTES
}

/// The table of these pieces. It is the end of their extent.
pub fn encode_packed_table(pieces: &[PackedPiece]) -> Vec<u8> {
    let mut writer = Writer::new();
    for piece in pieces {
        writer.u64(piece.map.0).u64(piece.off).u32(piece.extent_off).u32(piece.len);
    }
    writer.bytes(&MAGIC).u32(u32::try_from(pieces.len()).expect("an extent is at most 16 MiB"));
    let mut bytes = writer.finish();
    bytes.extend_from_slice(&crc32c(&bytes).to_le_bytes());
    bytes
}

/// The pieces in a whole extent; empty if it does not end with a table.
pub fn decode_packed_table(extent: &[u8]) -> Vec<PackedPiece> {
    table(extent).unwrap_or_default()
}

fn table(extent: &[u8]) -> Option<Vec<PackedPiece>> {
    let (front, footer) = extent.split_at(extent.len().checked_sub(FOOTER_BYTES)?);
    let mut reader = Reader::new(footer);
    let is_table = reader.bytes(MAGIC.len(), "magic").ok()? == MAGIC;
    let (count, crc) = (reader.u32("pieces").ok()?, reader.u32("crc").ok()?);
    let from = front.len().checked_sub((count as usize).checked_mul(PACKED_ENTRY_BYTES)?)?;
    if !is_table || crc32c(&extent[from..extent.len() - 4]) != crc {
        return None;
    }
    let mut reader = Reader::new(&front[from..]);
    let mut pieces = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let (map, off) = (MapId(reader.u64("map").ok()?), reader.u64("offset").ok()?);
        let (extent_off, len) = (reader.u32("extent offset").ok()?, reader.u32("length").ok()?);
        let inside = extent_off.checked_add(len).is_some_and(|end| end as usize <= from);
        if !inside || off.checked_add(len.into()).is_none() {
            return None;
        }
        pieces.push(PackedPiece { map, off, extent_off, len });
    }
    Some(pieces)
}

/// For the fuzzer: gives the end of an extent the right magic and checksum, then decodes it.
#[cfg(any(fuzzing, feature = "fuzzing"))]
pub fn fuzz_packed_table(data: &[u8]) {
    assert!(data.len() < FOOTER_BYTES || decode_packed_table(data).len() <= data.len() / PACKED_ENTRY_BYTES);
    let mut pieces = Vec::new();
    for entry in data.chunks_exact(PACKED_ENTRY_BYTES) {
        let word = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().expect("eight bytes"));
        let (place, len) = (word(16) as u32, (word(16) >> 32) as u32);
        pieces.push(PackedPiece { map: MapId(word(0)), off: word(8), extent_off: place, len });
    }
    let found = decode_packed_table(&encode_packed_table(&pieces));
    assert!(found.is_empty() || found == pieces);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packed(data: usize) -> (Vec<u8>, Vec<PackedPiece>) {
        let pieces = vec![
            PackedPiece { map: MapId(7), off: 0, extent_off: 0, len: 100 },
            PackedPiece { map: MapId(1 << 62 | 9), off: 1 << 40, extent_off: 128, len: data as u32 - 128 },
        ];
        let mut bytes = vec![3; data];
        bytes.extend(encode_packed_table(&pieces));
        (bytes, pieces)
    }

    #[test]
    fn golden() {
        let table = encode_packed_table(&packed(200).1);
        assert_eq!(table.len(), packed_table_bytes(2));
        assert_eq!(crc32c(&table), GOLDEN, "the format changed");
        assert_eq!(&table[48..56], b"FBPIECES");
        assert_eq!(table[56..60], 2u32.to_le_bytes());
    }
    const GOLDEN: u32 = 1_214_729_159;

    #[test]
    fn any_change_of_a_table_is_seen_and_other_bytes_are_free() {
        let (bytes, pieces) = packed(200);
        assert_eq!(decode_packed_table(&bytes), pieces);
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            assert_eq!(decode_packed_table(&changed).is_empty(), at >= 200, "byte {at}");
        }
        assert_eq!(decode_packed_table(&bytes[..bytes.len() - 1]), []);
        // Pieces outside the extent.
        assert_eq!(decode_packed_table(&bytes[1..]), []);
    }

    proptest! {
        #[test]
        fn any_bytes_decode_without_a_panic(mut bytes: Vec<u8>, count: u32) {
            decode_packed_table(&bytes);
            bytes.extend(MAGIC);
            bytes.extend(count.to_le_bytes());
            bytes.extend(crc32c(&bytes).to_le_bytes());
            decode_packed_table(&bytes);
        }
    }
}
