//! The bytes of a simulated file, in pages that clones share. Pages of zeros take no memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

const PAGE: usize = 4096;
static ZEROS: [u8; PAGE] = [0; PAGE];

/// The content of a file. Cloning is cheap; a clone does not see later writes.
#[derive(Clone, Default)]
pub(super) struct Image {
    len: usize,
    /// Pages that are not all zeros, by number. Bytes of a page beyond the end are zeros.
    pages: BTreeMap<usize, Arc<[u8; PAGE]>>,
}

impl Image {
    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let mut image = Self::default();
        image.write(0, bytes);
        image
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Truncates, or extends with zeros.
    pub(super) fn resize(&mut self, len: usize) {
        if len < self.len {
            self.pages.split_off(&len.div_ceil(PAGE));
            if let Some(page) = self.pages.get_mut(&(len / PAGE)) {
                Arc::make_mut(page)[len % PAGE..].fill(0);
            }
        }
        self.len = len;
    }

    /// Fills `buffer` from `offset`; `None` if the file ends before the buffer is full.
    pub(super) fn read(&self, offset: usize, buffer: &mut [u8]) -> Option<()> {
        if offset.checked_add(buffer.len())? > self.len {
            return None;
        }
        for (at, page, inside) in parts(offset, buffer.len()) {
            let part = &mut buffer[at..at + inside.len()];
            match self.pages.get(&page) {
                Some(bytes) => part.copy_from_slice(&bytes[inside]),
                None => part.fill(0),
            }
        }
        Some(())
    }

    /// Writes, extending the file if need be.
    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.len = self.len.max(offset + bytes.len());
        for (at, page, inside) in parts(offset, bytes.len()) {
            let part = &bytes[at..at + inside.len()];
            if part == &ZEROS[..part.len()] && !self.pages.contains_key(&page) {
                continue;
            }
            match <&[u8; PAGE]>::try_from(part) {
                Ok(zeros) if *zeros == ZEROS => drop(self.pages.remove(&page)),
                Ok(whole) => drop(self.pages.insert(page, Arc::new(*whole))),
                Err(_) => {
                    let page = self.pages.entry(page).or_insert_with(|| Arc::new(ZEROS));
                    Arc::make_mut(page)[inside].copy_from_slice(part);
                }
            }
        }
    }

    /// Writes zeros, extending the file if need be.
    pub(super) fn zero(&mut self, offset: usize, len: usize) {
        self.len = self.len.max(offset + len);
        for used in self.used_ranges(offset..offset + len) {
            if used.len() == PAGE {
                self.pages.remove(&(used.start / PAGE));
            } else if let Some(page) = self.pages.get_mut(&(used.start / PAGE)) {
                Arc::make_mut(page)[used.start % PAGE..][..used.len()].fill(0);
            }
        }
    }

    /// The parts of a range in pages that are not all zeros, page by page.
    pub(super) fn used_ranges(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let pages = self.pages.range(range.start / PAGE..range.end.div_ceil(PAGE));
        let part = |page: usize| range.start.max(page * PAGE)..range.end.min((page + 1) * PAGE);
        pages.map(|(page, _)| part(*page)).collect()
    }

    /// Copies the pages of `[offset, offset + len)` from `other`.
    pub(super) fn share(&mut self, other: &Image, offset: usize, len: usize) {
        let pages = offset / PAGE..(offset + len).div_ceil(PAGE);
        let stale: Vec<usize> = self.pages.range(pages.clone()).map(|(page, _)| *page).collect();
        for page in stale {
            self.pages.remove(&page);
        }
        self.pages.extend(other.pages.range(pages).map(|(page, bytes)| (*page, bytes.clone())));
    }

    /// Flips one bit; does nothing beyond the end.
    pub(super) fn flip(&mut self, byte: usize, bit: u8) {
        let mut one = [0];
        if self.read(byte, &mut one).is_some() {
            self.write(byte, &[one[0] ^ 1 << (bit % 8)]);
        }
    }

    /// Numbers of the pages that are not all zeros.
    pub(super) fn used_pages(&self) -> impl Iterator<Item = u64> {
        self.pages.keys().map(|page| *page as u64)
    }
}

/// Splits a range at page borders: offset in the range, page, bytes of the page.
fn parts(offset: usize, len: usize) -> impl Iterator<Item = (usize, usize, Range<usize>)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        if at >= len {
            return None;
        }
        let start = (offset + at) % PAGE;
        let part = (PAGE - start).min(len - at);
        let found = (at, (offset + at) / PAGE, start..start + part);
        at += part;
        Some(found)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Write(usize, usize, u8),
        Zero(usize, usize),
        Resize(usize),
        Flip(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..20_000usize, 0..9_000usize, 0..3u8).prop_map(|(at, len, byte)| Step::Write(at, len, byte)),
            1 => (0..20_000usize, 0..9_000usize).prop_map(|(at, len)| Step::Zero(at, len)),
            1 => (0..30_000usize).prop_map(Step::Resize),
            1 => (0..30_000usize).prop_map(Step::Flip),
        ]
    }

    proptest! {
        #[test]
        fn an_image_equals_a_plain_buffer(steps in proptest::collection::vec(step(), 0..30)) {
            let (mut image, mut model) = (Image::default(), Vec::new());
            let mut copy = image.clone();
            for step in steps {
                match step {
                    Step::Write(at, len, byte) => {
                        image.write(at, &vec![byte; len]);
                        if model.len() < at + len {
                            model.resize(at + len, 0);
                        }
                        model[at..at + len].fill(byte);
                        copy.resize(image.len());
                        copy.share(&image, at, len);
                    }
                    Step::Zero(at, len) => {
                        image.zero(at, len);
                        if model.len() < at + len {
                            model.resize(at + len, 0);
                        }
                        model[at..at + len].fill(0);
                        copy.resize(image.len());
                        copy.share(&image, at, len);
                    }
                    Step::Resize(len) => {
                        image.resize(len);
                        model.resize(len, 0);
                        copy = image.clone();
                    }
                    Step::Flip(at) => {
                        image.flip(at, 3);
                        if let Some(byte) = model.get_mut(at) {
                            *byte ^= 8;
                        }
                        copy.share(&image, at, 1);
                    }
                }
                prop_assert_eq!(image.len(), model.len());
                for image in [&image, &copy] {
                    let mut found = vec![9; model.len()];
                    image.read(0, &mut found).unwrap();
                    prop_assert!(found == model);
                }
                prop_assert!(image.read(1, &mut vec![0; model.len()]).is_none());
            }
        }
    }
}
