//! Descriptors of `/dev/fuse`.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use crate::abi::{OUT_HEADER_BYTES, Out, notice};
use crate::interrupt::Interrupts;

/// Most parts of one message: the kernel takes no more.
const PARTS_MAX: usize = 1000;

/// A descriptor from which requests are read and by which they are answered.
pub(crate) struct Channel {
    pub(crate) fd: OwnedFd,
    pub(crate) interrupts: Arc<Interrupts>,
}

impl Channel {
    /// Sends a reply. Returns whether the kernel took it: it does not if the request is gone.
    pub(crate) fn answer(&self, unique: u64, error: Option<Errno>, parts: &[&[u8]]) -> bool {
        let error = error.map_or(0, |error| -error.raw_os_error());
        match self.send(unique, error, parts) {
            Ok(()) => true,
            // The program was killed, or the filesystem is not mounted any more.
            Err(Errno::NOENT | Errno::NODEV) => false,
            Err(errno) => {
                tracing::error!(unique, error, %errno, "the kernel did not take a reply");
                false
            }
        }
    }

    fn send(&self, unique: u64, error: i32, parts: &[&[u8]]) -> Result<(), Errno> {
        let body: usize = parts.iter().map(|part| part.len()).sum();
        let mut header = Out(Vec::with_capacity(OUT_HEADER_BYTES));
        header.u32((OUT_HEADER_BYTES + body) as u32).i32(error).u64(unique);
        let joined;
        let parts = if parts.len() > PARTS_MAX {
            joined = parts.concat();
            &[joined.as_slice()]
        } else {
            parts
        };
        let mut slices = Vec::with_capacity(1 + parts.len());
        slices.push(IoSlice::new(&header.0));
        slices.extend(parts.iter().filter(|part| !part.is_empty()).map(|part| IoSlice::new(part)));
        loop {
            match rustix::io::writev(&self.fd, &slices) {
                Err(Errno::INTR) => {}
                sent => return sent.map(drop),
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn closed(interrupts: Arc<Interrupts>) -> Arc<Self> {
        let fd = rustix::fs::open("/dev/null", rustix::fs::OFlags::WRONLY, rustix::fs::Mode::empty());
        Arc::new(Self { fd: fd.expect("/dev/null is there"), interrupts })
    }
}

/// As the offset of [`Kernel::forget_pages`]: attributes only.
pub const ATTRIBUTES_ONLY: i64 = -1;

/// Tells the kernel what it must not keep in its caches. Such a notice may wait for requests that are running.
#[derive(Clone)]
pub struct Kernel(pub(crate) Arc<Channel>);

impl Kernel {
    /// Attributes of an inode, and its pages from `offset` on; `len` 0: to the end.
    pub fn forget_pages(&self, ino: u64, offset: i64, len: i64) {
        let mut out = Out::default();
        out.u64(ino).i64(offset).i64(len);
        self.notify(notice::INVAL_INODE, &out.0);
    }

    /// A name in a directory.
    pub fn forget_name(&self, parent: u64, name: &[u8]) {
        let mut out = Out::default();
        out.u64(parent).u32(name.len() as u32).u32(0).bytes(name).bytes(&[0]);
        self.notify(notice::INVAL_ENTRY, &out.0);
    }

    fn notify(&self, code: i32, body: &[u8]) {
        match self.0.send(0, code, &[body]) {
            // It does not have it in its caches, or nothing is mounted any more.
            Ok(()) | Err(Errno::NOENT | Errno::NODEV | Errno::NOTDIR) => {}
            Err(error) => tracing::warn!(code, %error, "the kernel did not take a notice"),
        }
    }
}
