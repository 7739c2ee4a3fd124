//! Memory that `O_DIRECT` accepts: aligned to 4096 bytes, a multiple of 4096 long.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use base::units::{BLOCK_BYTES, align_up};

/// An owned, aligned, zeroed run of bytes; dereferences to a slice.
pub(crate) struct AlignedBuf {
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the buffer owns its memory and hands it out only through `&self` and `&mut self`.
unsafe impl Send for AlignedBuf {}
// SAFETY: as above; `&AlignedBuf` gives read access only.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// At least `len_bytes` zero bytes, rounded up to whole blocks; at least one block.
    pub(crate) fn zeroed(len_bytes: usize) -> Self {
        let len_bytes = align_up(len_bytes.max(1) as u64, BLOCK_BYTES) as usize;
        let layout = Self::layout(len_bytes);
        // SAFETY: the layout's size is not zero: it is at least one block.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Self { start, len_bytes }
    }

    /// The given blocks of 4096 bytes, all zero.
    pub(crate) fn blocks(blocks: u32) -> Self {
        Self::zeroed(blocks as usize * BLOCK_BYTES as usize)
    }

    /// A copy of `bytes`, padded with zeros to whole blocks.
    pub(crate) fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Self::zeroed(bytes.len());
        buffer[..bytes.len()].copy_from_slice(bytes);
        buffer
    }

    fn layout(len_bytes: usize) -> Layout {
        Layout::from_size_align(len_bytes, BLOCK_BYTES as usize).expect("lengths are far below isize::MAX")
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` points to `len_bytes` initialised bytes that live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes) }
    }
}

impl AsRef<[u8]> for AlignedBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with the same layout and freed only here.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.len_bytes)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_zeroed_and_whole_blocks() {
        for len in [0, 1, 4096, 4097, 1 << 20] {
            let buffer = AlignedBuf::zeroed(len);
            assert_eq!(buffer.as_ptr() as usize % 4096, 0);
            assert_eq!(buffer.len() % 4096, 0);
            assert!(buffer.len() >= len.max(1));
            assert!(buffer.iter().all(|byte| *byte == 0));
        }
        assert_eq!(&AlignedBuf::copy_of(b"abc")[..4], b"abc\0");
    }
}
