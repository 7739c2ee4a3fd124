//! Writes past the page cache beside reads through it.
//!
//! Around a write with O_DIRECT the kernel drops the pages of the range. But after an asynchronous write (io_submit,
//! io_uring) it does not drop them again: a page that a read brought in during the write stays stale for ever. So this
//! module drops the pages before such a write is answered.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use base::Ino;
use fuse::Kernel;
use fuse::abi::WRITE_CACHE;
use tokio::time::Instant;

/// How long the answer to a write waits until its pages are dropped. A page may be locked by this same write, if the
/// kernel finishes a direct write as a buffered one. Such a page is dropped after the answer only; it is not stale.
const PATIENCE: Duration = Duration::from_millis(500);

/// Longest time between the kernel's drop of the pages and the arrival of the write here.
const WRITE_AGE_MAX: Duration = Duration::from_secs(60);

/// Files of which the kernel may have pages, and the time of the last read of each.
#[derive(Debug, Default)]
pub(super) struct CachedFiles(Mutex<HashMap<Ino, Instant>>);

fn is_direct(flags: i32) -> bool {
    flags & libc::O_DIRECT != 0 || is_append_only(flags)
}

/// A file that is opened in this way can neither be read nor mapped, and all writes append.
pub(super) fn is_append_only(flags: i32) -> bool {
    flags & libc::O_APPEND != 0 && flags & libc::O_ACCMODE == libc::O_WRONLY
}

impl CachedFiles {
    /// Notes that a read is about to be answered.
    pub(super) fn note_read(&self, ino: Ino, flags: i32) {
        if !is_direct(flags) {
            self.0.lock().expect("no holder of this lock panics").insert(ino, Instant::now());
        }
    }

    /// The kernel has forgotten the inode, and with it the pages.
    pub(super) fn forget(&self, ino: Ino) {
        self.0.lock().expect("no holder of this lock panics").remove(&ino);
    }

    /// Whether a write with these flags may leave stale pages, brought in after the kernel dropped the range.
    pub(super) fn are_passed(&self, ino: Ino, open: i32, write: u32) -> bool {
        let is_passing = is_direct(open) && write & WRITE_CACHE == 0;
        let is_recent = |read: &Instant| read.elapsed() < WRITE_AGE_MAX;
        is_passing && self.0.lock().expect("no holder of this lock panics").get(&ino).is_some_and(is_recent)
    }
}

/// Makes the kernel drop its pages of a range. The call waits for running reads, so it uses a thread of its own.
pub(super) async fn drop_pages(kernel: Kernel, ino: Ino, off: u64, len: usize) {
    let work = move || kernel.forget_pages(ino.0, off as i64, len as i64);
    let _ = tokio::time::timeout(PATIENCE, tokio::task::spawn_blocking(work)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_direct_writes_to_what_was_read_otherwise_pass_pages_by() {
        let files = CachedFiles::default();
        let (direct, plain) = (libc::O_DIRECT, libc::O_RDWR);
        let passed = |open| files.are_passed(Ino(3), open, 0);
        files.note_read(Ino(3), direct);
        assert!(!passed(direct));
        files.note_read(Ino(3), plain);
        assert!(passed(direct) && !passed(plain));
        assert!(!files.are_passed(Ino(3), direct, WRITE_CACHE), "pages that are written back");
        assert!(!files.are_passed(Ino(4), direct, 0));
        files.forget(Ino(3));
        assert!(!passed(direct));
    }
}
