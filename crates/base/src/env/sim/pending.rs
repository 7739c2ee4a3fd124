//! Unsynced writes, and their effect after a crash.

use std::ops::Range;

use super::SplitMix;
use super::image::Image;

const SECTOR: usize = 512;

/// An unsynced write.
pub(super) struct Pending {
    pub(super) offset: usize,
    pub(super) written: Written,
}

pub(super) enum Written {
    Bytes(Vec<u8>),
    /// A number of zeros, without a buffer: holes may be long.
    Zeros(usize),
}

impl Written {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Zeros(len) => *len,
        }
    }

    pub(super) fn truncate(&mut self, len: usize) {
        match self {
            Self::Bytes(bytes) => bytes.truncate(len),
            Self::Zeros(zeros) => *zeros = len.min(*zeros),
        }
    }
}

impl Pending {
    pub(super) fn apply(&self, content: &mut Image) {
        match &self.written {
            Written::Bytes(bytes) => content.write(self.offset, bytes),
            Written::Zeros(len) => content.zero(self.offset, *len),
        }
    }
}

/// Applies a random choice of the sectors of `write`. Sectors are aligned in the file.
pub(super) fn tear(content: &mut Image, write: &Pending, random: &mut SplitMix) {
    let bytes = match &write.written {
        Written::Bytes(bytes) => bytes,
        Written::Zeros(len) => return tear_zeros(content, write.offset..write.offset + len, random),
    };
    let mut at = 0;
    while at < bytes.len() {
        let len = (SECTOR - (write.offset + at) % SECTOR).min(bytes.len() - at);
        if random.below(2) == 0 {
            content.write(write.offset + at, &bytes[at..at + len]);
        }
        at += len;
    }
}

/// As [`tear`] for zeros. Skips pages that are zeros already.
fn tear_zeros(content: &mut Image, range: Range<usize>, random: &mut SplitMix) {
    for used in content.used_ranges(range) {
        let mut at = used.start;
        while at < used.end {
            let len = (SECTOR - at % SECTOR).min(used.end - at);
            if random.below(2) == 0 {
                content.zero(at, len);
            }
            at += len;
        }
    }
}
