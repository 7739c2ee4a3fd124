//! Writes past the page cache beside reads through it.
//!
//! Before a write with O_DIRECT the kernel drops the pages of the range, and after it again, but not after one that a
//! program did not wait for (io_submit, io_uring): pages that a read brought in meanwhile stay, old for ever. So they
//! are dropped here, before such a write is answered.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use base::Ino;
use fuser::{INodeNo, Notifier, OpenFlags, WriteFlags};
use tokio::time::Instant;

/// How long the answer to a write waits for pages to go. One that is locked by this very write, where the kernel does
/// what a direct write has left by an ordinary one, goes after the answer only; and it is not old.
const PATIENCE: Duration = Duration::from_millis(500);

/// No write is longer on its way from where the kernel drops pages to here.
const WRITE_AGE_MAX: Duration = Duration::from_secs(60);

/// Files of which the kernel may have pages, and when it was given the last of them.
#[derive(Debug, Default)]
pub(super) struct CachedFiles(Mutex<HashMap<Ino, Instant>>);

fn is_direct(flags: OpenFlags) -> bool {
    flags.0 & libc::O_DIRECT != 0
}

impl CachedFiles {
    /// A read is about to be answered.
    pub(super) fn note_read(&self, ino: Ino, flags: OpenFlags) {
        if !is_direct(flags) {
            self.0.lock().expect("no holder of this lock panics").insert(ino, Instant::now());
        }
    }

    /// The kernel has forgotten the inode, and with it the pages.
    pub(super) fn forget(&self, ino: Ino) {
        self.0.lock().expect("no holder of this lock panics").remove(&ino);
    }

    /// Whether a write with these flags may pass pages by that came after the kernel dropped those that were there.
    pub(super) fn are_passed(&self, ino: Ino, open: OpenFlags, write: WriteFlags) -> bool {
        let is_passing = is_direct(open) && !write.contains(WriteFlags::FUSE_WRITE_CACHE);
        let is_recent = |read: &Instant| read.elapsed() < WRITE_AGE_MAX;
        is_passing && self.0.lock().expect("no holder of this lock panics").get(&ino).is_some_and(is_recent)
    }
}

/// Makes the kernel drop its pages of a range. It waits for reads under way, so this is on a thread of its own.
pub(super) async fn drop_pages(kernel: Arc<OnceLock<Notifier>>, ino: Ino, off: u64, len: usize) {
    let work = move || {
        if let Some(notifier) = kernel.get() {
            // The kernel answers ENOENT for what it does not cache.
            let _ = notifier.inval_inode(INodeNo(ino.0), off as i64, len as i64);
        }
    };
    let _ = tokio::time::timeout(PATIENCE, tokio::task::spawn_blocking(work)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_direct_writes_to_what_was_read_otherwise_pass_pages_by() {
        let files = CachedFiles::default();
        let (direct, plain) = (OpenFlags(libc::O_DIRECT), OpenFlags(libc::O_RDWR));
        let passed = |open| files.are_passed(Ino(3), open, WriteFlags::empty());
        files.note_read(Ino(3), direct);
        assert!(!passed(direct));
        files.note_read(Ino(3), plain);
        assert!(passed(direct) && !passed(plain));
        assert!(
            !files.are_passed(Ino(3), direct, WriteFlags::FUSE_WRITE_CACHE),
            "pages that are written back"
        );
        assert!(!files.are_passed(Ino(4), direct, WriteFlags::empty()));
        files.forget(Ino(3));
        assert!(!passed(direct));
    }
}
