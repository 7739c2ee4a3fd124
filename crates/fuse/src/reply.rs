//! Replies.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rustix::io::Errno;
use tokio::sync::Notify;

use crate::abi::{FileAttr, FileType, Lock, OpenFlags, Out};
use crate::channel::{Channel, Parts};

/// How long the kernel may keep an answer about a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// That the name is there, or is not.
    pub name: Duration,
    /// The attributes of its inode.
    pub attr: Duration,
}

/// Room in a filesystem, for statfs(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "as in statfs(2)")]
pub struct StatFs {
    pub blocks: u64,
    pub free: u64,
    pub files: u64,
    pub free_files: u64,
    pub block_bytes: u32,
    pub name_max: u32,
}

/// The way to answer a request, from any thread. One that is dropped answers with EIO.
///
/// Methods that grant something, such as a reference to an inode or an open file, return whether the kernel took the reply.
/// If it did not, it will not give that back.
pub struct Reply {
    channel: Arc<Channel>,
    unique: u64,
    pid: u32,
    is_sent: bool,
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.is_sent {
            tracing::error!(unique = self.unique, "a request was dropped without an answer");
            self.send(Some(Errno::IO), Parts::Slices(&[]));
        }
    }
}

impl Out {
    fn entry(&mut self, attr: &FileAttr, terms: Terms) -> &mut Self {
        // Inode numbers are never used again, so that one generation is enough.
        self.u64(attr.ino).u64(0).u64(terms.name.as_secs()).u64(terms.attr.as_secs());
        self.u32(terms.name.subsec_nanos()).u32(terms.attr.subsec_nanos()).attr(attr)
    }

    fn opened(&mut self, handle: u64, flags: OpenFlags) -> &mut Self {
        self.u64(handle).u32(flags.0).u32(0)
    }
}

impl Reply {
    pub(crate) fn new(channel: Arc<Channel>, unique: u64, pid: u32) -> Self {
        Self { channel, unique, pid, is_sent: false }
    }

    /// The thread whose request it answers; 0: not one that this process can see.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    fn send(&mut self, error: Option<Errno>, parts: Parts<'_>) -> bool {
        self.is_sent = true;
        self.channel.interrupts.end(self.unique, &self.channel)
            && self.channel.answer(self.unique, error, parts)
    }

    fn ok(mut self, fill: impl FnOnce(&mut Out)) -> bool {
        let mut out = Out(Vec::with_capacity(160));
        fill(&mut out);
        self.send(None, Parts::Slices(&[&out.0]))
    }

    /// The request is not answered at once: its program stays killable. Call this before another thread can answer.
    pub fn park(&self) -> Parking {
        Parking { channel: self.channel.clone(), unique: self.unique, pid: self.pid }
    }

    /// As [`Reply::park`], for a wait that ends with EINTR on any signal: then the result is notified.
    pub fn park_until_signal(&self) -> Arc<Notify> {
        let signal = Arc::new(Notify::new());
        self.channel.interrupts.park(self.unique, self.pid, &self.channel, Some(signal.clone()));
        signal
    }

    /// The request failed.
    pub fn error(mut self, error: Errno) {
        self.send(Some(error), Parts::Slices(&[]));
    }

    /// Done.
    pub fn done(self) {
        self.granted();
    }

    /// A lock is granted.
    pub fn granted(mut self) -> bool {
        self.send(None, Parts::Slices(&[]))
    }

    /// Attributes, which the kernel may keep for the term.
    pub fn attr(self, attr: &FileAttr, term: Duration) {
        self.ok(|out| {
            out.u64(term.as_secs()).u32(term.subsec_nanos()).u32(0).attr(attr);
        });
    }

    /// Attributes with the time of creation.
    pub fn statx(self, attr: &FileAttr, term: Duration) {
        self.ok(|out| {
            out.u64(term.as_secs()).u32(term.subsec_nanos()).u32(0).zeros(16).statx(attr);
        });
    }

    /// A name and its inode, to which the kernel has one reference more from now on.
    pub fn entry(self, attr: &FileAttr, terms: Terms) -> bool {
        self.ok(|out| {
            out.entry(attr, terms);
        })
    }

    /// The name is not there, which the kernel may keep for the term.
    pub fn no_entry(self, term: Duration) {
        self.ok(|out| {
            // A number of 0.
            out.zeros(16).u64(term.as_secs()).u64(0).u32(term.subsec_nanos()).u32(0).zeros(88);
        });
    }

    /// As [`Reply::entry`], for a file that was made and opened.
    pub fn created(self, attr: &FileAttr, terms: Terms, handle: u64, flags: OpenFlags) -> bool {
        self.ok(|out| {
            out.entry(attr, terms).opened(handle, flags);
        })
    }

    /// Opened.
    pub fn opened(self, handle: u64, flags: OpenFlags) -> bool {
        self.ok(|out| {
            out.opened(handle, flags);
        })
    }

    /// Bytes.
    pub fn data(mut self, bytes: &[u8]) {
        self.send(None, Parts::Slices(&[bytes]));
    }

    /// Bytes in parts, which are not joined.
    pub fn parts(mut self, parts: &[Bytes]) {
        self.send(None, Parts::Shared(parts));
    }

    /// The number of bytes that were written or copied.
    pub fn written(self, count: u32) {
        self.ok(|out| {
            out.u32(count).u32(0);
        });
    }

    /// The number of bytes that were copied, in 64 bits.
    pub fn copied(self, count: u64) {
        self.ok(|out| {
            out.u64(count);
        });
    }

    /// The length of an attribute, or of the list of them.
    pub fn xattr_size(self, size: u32) {
        self.written(size);
    }

    /// A position in a file.
    pub fn position(self, offset: u64) {
        self.copied(offset);
    }

    /// A lock that is in the way; of kind `F_UNLCK` if none is.
    pub fn lock(self, lock: &Lock) {
        self.ok(|out| {
            out.lock(lock);
        });
    }

    /// The output of an ioctl(2) that succeeded.
    pub fn ioctl(self, data: &[u8]) {
        self.ok(|out| {
            out.i32(0).u32(0).u32(0).u32(0).bytes(data);
        });
    }

    /// Room.
    pub fn stat_fs(self, stat: &StatFs) {
        self.ok(|out| {
            out.u64(stat.blocks).u64(stat.free).u64(stat.free).u64(stat.files).u64(stat.free_files);
            out.u32(stat.block_bytes).u32(stat.name_max).u32(stat.block_bytes).zeros(28);
        });
    }

    /// Entries of a directory.
    pub fn dir(mut self, entries: &DirReply) -> bool {
        self.send(None, Parts::Slices(&[&entries.out.0]))
    }
}

/// What registers a request that is about to wait; see [`Reply::park`].
pub struct Parking {
    channel: Arc<Channel>,
    unique: u64,
    pid: u32,
}

impl Parking {
    /// Registers it.
    pub fn park(&self) {
        self.channel.interrupts.park(self.unique, self.pid, &self.channel, None);
    }
}

/// Entries of a directory, as many as fit.
pub struct DirReply {
    out: Out,
    size: usize,
}

impl DirReply {
    /// For a request of this size.
    pub fn new(size: u32) -> Self {
        Self { out: Out(Vec::with_capacity(size.min(64 << 10) as usize)), size: size as usize }
    }

    fn fits(&self, name: &[u8], head: usize) -> bool {
        self.out.0.len() + (head + DIRENT_BYTES + name.len()).next_multiple_of(8) <= self.size
    }

    fn entry(&mut self, ino: u64, kind: FileType, cookie: u64, name: &[u8]) {
        self.out.u64(ino).u64(cookie).u32(name.len() as u32).u32(kind.mode() >> 12).bytes(name);
        let padding = self.out.0.len().next_multiple_of(8) - self.out.0.len();
        self.out.zeros(padding);
    }

    /// Adds an entry; `cookie` is where the next read continues. Returns whether it fitted.
    pub fn add(&mut self, ino: u64, kind: FileType, cookie: u64, name: &[u8]) -> bool {
        let fits = self.fits(name, 0);
        if fits {
            self.entry(ino, kind, cookie, name);
        }
        fits
    }

    /// Adds an entry with its attributes. The kernel has one more reference to the inode, but for `.` and `..`. Returns
    /// whether it fitted.
    pub fn add_plus(&mut self, attr: &FileAttr, terms: Terms, cookie: u64, name: &[u8]) -> bool {
        let fits = self.fits(name, ENTRY_BYTES);
        if fits {
            self.out.entry(attr, terms);
            self.entry(attr.ino, attr.kind, cookie, name);
        }
        fits
    }
}

const DIRENT_BYTES: usize = 24;
const ENTRY_BYTES: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    const ATTR: FileAttr = FileAttr {
        ino: 9,
        kind: FileType::Regular,
        mode: 0o644,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        size: 1,
        blocks: 8,
        block_bytes: 4096,
        atime_ns: 0,
        mtime_ns: 0,
        ctime_ns: 0,
        btime_ns: 0,
    };
    const TERMS: Terms = Terms { name: Duration::from_millis(1500), attr: Duration::from_secs(3) };

    #[test]
    fn entries_have_the_size_that_the_kernel_expects() {
        let mut out = Out::default();
        out.entry(&ATTR, TERMS);
        assert_eq!(out.0.len(), ENTRY_BYTES);
        assert_eq!(out.0[16..24], 1u64.to_ne_bytes());
        assert_eq!(out.0[32..36], 500_000_000u32.to_ne_bytes());
        out.opened(1, OpenFlags::KEEP_CACHE);
        assert_eq!(out.0.len(), ENTRY_BYTES + 16);
    }

    #[test]
    fn a_directory_takes_as_many_entries_as_fit() {
        let mut dir = DirReply::new(70);
        assert!(dir.add(1, FileType::Directory, 1, b"."));
        assert_eq!(dir.out.0.len(), 32);
        assert!(!dir.add(1, FileType::Regular, 2, &[b'x'; 20]));
        assert!(dir.add(1, FileType::Regular, 2, b"12345678"));
        assert_eq!((dir.out.0.len(), &dir.out.0[56..64]), (64, &b"12345678"[..]));
        assert_eq!(dir.out.0[52..56], 8u32.to_ne_bytes());
        let mut plus = DirReply::new(160);
        assert!(plus.add_plus(&ATTR, TERMS, 3, b"name"));
        assert!(!plus.add_plus(&ATTR, TERMS, 4, b"name"));
        assert_eq!(plus.out.0.len(), 160);
    }
}
