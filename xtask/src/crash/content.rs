//! Bytes that identify their place: a pure function of file, generation and offset.
//!
//! Every 512 bytes begin with a mark, the file, the number of the sector and the generation of the write; the rest is
//! a hash of those. Any range of bytes can be checked, and bytes in a wrong place name the place that they come from.

use crate::random::mix;

/// Identifies a file, across renames and after its deletion. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FileId(pub(crate) u64);

/// The number of a write. Generation 0 is for bytes that were never written, which are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Generation(pub(crate) u64);

pub(crate) const UNWRITTEN: Generation = Generation(0);
pub(crate) const SECTOR_BYTES: u64 = 512;

const MARK: u64 = u64::from_le_bytes(*b"forebay\n");
const WORDS_PER_SECTOR: u64 = SECTOR_BYTES / 8;

/// Fills `buffer` with the bytes that the write of `generation` puts at `offset`.
pub(crate) fn fill(file: FileId, generation: Generation, offset: u64, buffer: &mut [u8]) {
    if generation == UNWRITTEN {
        buffer.fill(0);
        return;
    }
    let lead = (offset % 8) as usize;
    let mut index = offset / 8;
    let mut rest = buffer;
    let mut skip = lead;
    while !rest.is_empty() {
        let bytes = word(file, generation, index).to_le_bytes();
        let len = rest.len().min(8 - skip);
        let (now, later) = rest.split_at_mut(len);
        now.copy_from_slice(&bytes[skip..skip + len]);
        (rest, skip, index) = (later, 0, index + 1);
    }
}

/// Whether `data`, read at `offset`, are the bytes that the write of `generation` put there.
pub(crate) fn matches(file: FileId, generation: Generation, offset: u64, data: &[u8]) -> bool {
    let mut expected = vec![0; data.len()];
    fill(file, generation, offset, &mut expected);
    expected == data
}

/// The mark of a sector, as text for people. `sector` starts at a multiple of 512 in its file.
pub(crate) fn describe(sector: &[u8]) -> String {
    let word = |index: usize| {
        let bytes = sector.get(index * 8..index * 8 + 8)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    };
    match (word(0), word(1), word(2), word(3)) {
        (Some(MARK), Some(file), Some(number), Some(generation)) => {
            format!("bytes of file={file:#x} offset={} generation={generation}", number * SECTOR_BYTES)
        }
        _ if sector.iter().all(|byte| *byte == 0) => "zeros".to_owned(),
        _ => format!("bytes without a mark: {:02x?}", &sector[..sector.len().min(16)]),
    }
}

fn word(file: FileId, generation: Generation, index: u64) -> u64 {
    match index % WORDS_PER_SECTOR {
        0 => MARK,
        1 => file.0,
        2 => index / WORDS_PER_SECTOR,
        3 => generation.0,
        _ => mix(mix(file.0 ^ generation.0.rotate_left(32)) ^ index),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_range_is_a_part_of_the_whole() {
        let mut whole = vec![0; 2000];
        fill(FileId(7), Generation(3), 0, &mut whole);
        for (start, end) in [(0, 1), (5, 9), (7, 1024), (511, 513), (1999, 2000)] {
            let mut part = vec![0; end - start];
            fill(FileId(7), Generation(3), start as u64, &mut part);
            assert_eq!(part, whole[start..end], "{start}..{end}");
        }
    }

    #[test]
    fn a_sector_names_its_place() {
        let mut sector = vec![0; 512];
        fill(FileId(7), Generation(3), 1024, &mut sector);
        assert_eq!(describe(&sector), "bytes of file=0x7 offset=1024 generation=3");
        assert_eq!(describe(&[0; 512]), "zeros");
    }

    #[test]
    fn files_generations_and_offsets_differ() {
        let mut data = vec![0; 64];
        fill(FileId(7), Generation(3), 64, &mut data);
        assert!(matches(FileId(7), Generation(3), 64, &data));
        assert!(!matches(FileId(8), Generation(3), 64, &data));
        assert!(!matches(FileId(7), Generation(4), 64, &data));
        assert!(!matches(FileId(7), Generation(3), 128, &data));
    }
}
