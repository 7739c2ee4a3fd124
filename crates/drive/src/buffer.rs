//! Memory that `O_DIRECT` accepts: aligned to 4096 bytes, a multiple of 4096 long.
//!
//! Large buffers are kept for their next use, because zeroing a mebibyte costs as much as its checksum.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{LazyLock, Mutex};

use base::units::{BLOCK_BYTES, align_up};

/// Smaller buffers are not kept: the allocator serves them.
const KEPT_BYTES_MIN: usize = 32 << 10;
/// Default limit on the bytes that are kept in all.
const SPARE_BYTES_MAX: usize = 32 << 20;

static SPARE: LazyLock<Mutex<Spare>> = LazyLock::new(|| Mutex::new(Spare::new(SPARE_BYTES_MAX)));

/// Keeps at most `bytes_max` bytes of buffers for their next use, for all drives of the process.
pub fn keep_spare_buffers(bytes_max: usize) {
    SPARE.lock().expect("no holder of this lock panics").bytes_max = bytes_max;
}

/// Unused memory by capacity.
struct Spare {
    by_capacity: HashMap<usize, Vec<NonNull<u8>>>,
    bytes: usize,
    bytes_max: usize,
}

// SAFETY: it owns the memory that its pointers lead to, and no other pointers to that memory exist.
unsafe impl Send for Spare {}

impl Spare {
    fn new(bytes_max: usize) -> Self {
        Self { by_capacity: HashMap::new(), bytes: 0, bytes_max }
    }

    fn take(&mut self, capacity: usize) -> Option<NonNull<u8>> {
        let start = self.by_capacity.get_mut(&capacity)?.pop()?;
        self.bytes -= capacity;
        Some(start)
    }

    /// Keeps memory. Returns the memory that must be freed: unused memory of other capacities, or this memory itself if
    /// freeing those is not enough.
    fn put(&mut self, start: NonNull<u8>, capacity: usize) -> Vec<(NonNull<u8>, usize)> {
        let kept =
            (KEPT_BYTES_MIN..=self.bytes_max).contains(&capacity) && capacity == reused_capacity(capacity);
        if !kept {
            return vec![(start, capacity)];
        }
        let mut freed = Vec::new();
        for (other, starts) in self.by_capacity.iter_mut().filter(|(other, _)| **other != capacity) {
            while self.bytes + capacity > self.bytes_max
                && let Some(start) = starts.pop()
            {
                self.bytes -= other;
                freed.push((start, *other));
            }
        }
        if self.bytes + capacity > self.bytes_max {
            freed.push((start, capacity));
            return freed;
        }
        self.by_capacity.entry(capacity).or_default().push(start);
        self.bytes += capacity;
        freed
    }
}

/// Four capacities from one power of two to the next, so that buffers of about the same length serve each other.
fn reused_capacity(len_bytes: usize) -> usize {
    let step = (len_bytes.next_power_of_two() / 8).max(BLOCK_BYTES as usize);
    len_bytes.next_multiple_of(step)
}

/// An owned, aligned run of initialised bytes; dereferences to a slice.
pub(crate) struct AlignedBuf {
    start: NonNull<u8>,
    len_bytes: usize,
    capacity: usize,
}

// SAFETY: the buffer owns its memory and hands it out only through `&self` and `&mut self`.
unsafe impl Send for AlignedBuf {}
// SAFETY: as above; `&AlignedBuf` gives read access only.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// At least `len_bytes` zero bytes, rounded up to whole blocks; at least one block.
    pub(crate) fn zeroed(len_bytes: usize) -> Self {
        let len_bytes = align_up(len_bytes.max(1) as u64, BLOCK_BYTES) as usize;
        Self { start: allocate(len_bytes), len_bytes, capacity: len_bytes }
    }

    /// A buffer of `blocks` blocks of 4096 bytes, all zero.
    pub(crate) fn blocks(blocks: u32) -> Self {
        Self::zeroed(blocks as usize * BLOCK_BYTES as usize)
    }

    /// A buffer of `blocks` blocks of 4096 bytes with arbitrary content, for callers that fill all of it.
    pub(crate) fn any_blocks(blocks: u32) -> Self {
        let len_bytes = blocks.max(1) as usize * BLOCK_BYTES as usize;
        let capacity = reused_capacity(len_bytes);
        let spare = SPARE.lock().expect("no holder of this lock panics").take(capacity);
        Self { start: spare.unwrap_or_else(|| allocate(capacity)), len_bytes, capacity }
    }

    /// A copy of `bytes`, padded with zeros to whole blocks.
    pub(crate) fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Self::zeroed(bytes.len());
        buffer[..bytes.len()].copy_from_slice(bytes);
        buffer
    }
}

fn layout(capacity: usize) -> Layout {
    Layout::from_size_align(capacity, BLOCK_BYTES as usize).expect("lengths are far below isize::MAX")
}

/// Allocates zero bytes; `capacity` is at least one block.
fn allocate(capacity: usize) -> NonNull<u8> {
    let layout = layout(capacity);
    // SAFETY: the layout's size is not zero: it is at least one block.
    let start = unsafe { alloc_zeroed(layout) };
    let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
    start
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
        let freed = SPARE.lock().expect("no holder of this lock panics").put(self.start, self.capacity);
        for (start, capacity) in freed {
            // SAFETY: the memory came from `allocate` with this capacity, and no pointer to it is used after this.
            unsafe { dealloc(start.as_ptr(), layout(capacity)) }
        }
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

    #[test]
    fn large_buffers_are_used_again_and_zeroed_ones_are_zero() {
        // No other test uses this length.
        let blocks = 77;
        let mut first = AlignedBuf::any_blocks(blocks);
        first.fill(7);
        let place = first.as_ptr();
        drop(first);
        assert!(AlignedBuf::blocks(blocks).iter().all(|byte| *byte == 0));
        let second = AlignedBuf::any_blocks(blocks);
        assert_eq!((second.as_ptr(), second.len()), (place, 77 * 4096));
    }

    #[test]
    fn no_more_is_kept_than_allowed() {
        let mut spare = Spare::new(SPARE_BYTES_MAX);
        let place = NonNull::dangling();
        assert_eq!(spare.put(place, 4096), [(place, 4096)], "small ones are left to the allocator");
        assert!(spare.put(place, SPARE_BYTES_MAX).is_empty());
        assert!(spare.put(place, KEPT_BYTES_MIN) == [(place, SPARE_BYTES_MAX)], "the others make room");
        assert!(spare.take(SPARE_BYTES_MAX).is_none());
        assert!(spare.take(KEPT_BYTES_MIN).is_some());
        assert_eq!(spare.bytes, 0);
        let most = SPARE_BYTES_MAX / (1 << 20);
        let freed: Vec<usize> = (0..most + 3).map(|_| spare.put(place, 1 << 20).len()).collect();
        assert_eq!(freed.iter().sum::<usize>(), 3, "what there is too much of is not kept");
        assert_eq!((spare.bytes, freed[most]), (SPARE_BYTES_MAX, 1));
    }

    #[test]
    fn capacities_are_few_and_little_larger() {
        for len in (1..=4096).map(|blocks| blocks * 4096) {
            let capacity = reused_capacity(len);
            assert!(
                capacity >= len && capacity - len <= len / 4 && capacity.is_multiple_of(4096),
                "{len}: {capacity}"
            );
            assert_eq!(reused_capacity(capacity), capacity);
        }
    }
}
