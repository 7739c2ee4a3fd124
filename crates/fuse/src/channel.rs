//! Descriptors of `/dev/fuse`.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use bytes::Bytes;
use rustix::io::Errno;

use crate::abi::{OUT_HEADER_BYTES, Out, notice};
use crate::interrupt::Interrupts;
use crate::uring::Ring;

/// Most parts of one message: the kernel takes no more.
const PARTS_MAX: usize = 1000;

/// How replies go to the kernel.
enum Way {
    Device(OwnedFd),
    Slot(Arc<Ring>, usize),
}

/// Bytes of a reply.
#[derive(Clone, Copy)]
pub(crate) enum Parts<'a> {
    Slices(&'a [&'a [u8]]),
    Shared(&'a [Bytes]),
}

impl<'a> Parts<'a> {
    /// Calls the function with each part, in order.
    pub(crate) fn for_each(self, take: impl FnMut(&'a [u8])) {
        match self {
            Self::Slices(parts) => parts.iter().copied().for_each(take),
            Self::Shared(parts) => parts.iter().map(|part| &part[..]).for_each(take),
        }
    }
}

/// A descriptor from which one thread reads requests, or a slot of a ring, by which they are answered.
pub(crate) struct Channel {
    way: Way,
    pub(crate) interrupts: Arc<Interrupts>,
    serving: Serving,
}

/// The request that the thread of a channel works on, until it is answered or parked.
#[derive(Default)]
struct Serving {
    /// 0 if there is none.
    unique: AtomicU64,
    pid: AtomicU32,
    /// 1 + the time since which the thread does not read, as the caller counts it; 0 while it reads.
    busy_since: AtomicU64,
}

impl Channel {
    pub(crate) fn new(fd: OwnedFd, interrupts: Arc<Interrupts>) -> Arc<Self> {
        Arc::new(Self { way: Way::Device(fd), interrupts, serving: Serving::default() })
    }

    pub(crate) fn of_slot(ring: Arc<Ring>, index: usize, interrupts: Arc<Interrupts>) -> Arc<Self> {
        Arc::new(Self { way: Way::Slot(ring, index), interrupts, serving: Serving::default() })
    }

    /// The descriptor.
    ///
    /// # Errors
    /// A slot has none.
    pub(crate) fn device(&self) -> Result<&OwnedFd, Errno> {
        match &self.way {
            Way::Device(fd) => Ok(fd),
            Way::Slot(..) => Err(Errno::BADF),
        }
    }

    /// The thread begins to work on a request.
    pub(crate) fn begin(&self, unique: u64, pid: u32) {
        self.serving.pid.store(pid, Ordering::SeqCst);
        self.serving.unique.store(unique, Ordering::SeqCst);
    }

    /// The request is answered or parked, if the thread still works on it.
    pub(crate) fn leave(&self, unique: u64) {
        let _ = self.serving.unique.compare_exchange(unique, 0, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// The process that sent the request, if the thread works on it.
    pub(crate) fn serves(&self, unique: u64) -> Option<u32> {
        (self.serving.unique.load(Ordering::SeqCst) == unique)
            .then(|| self.serving.pid.load(Ordering::SeqCst))
    }

    /// The thread reads, or does other work from now on: requests that it answered or parked may be followed by more.
    pub(crate) fn set_busy(&self, since: Option<u64>) {
        self.serving.busy_since.store(since.map_or(0, |since| since + 1), Ordering::SeqCst);
    }

    /// For how long the thread has not read.
    pub(crate) fn busy_for(&self, now: u64) -> u64 {
        match self.serving.busy_since.load(Ordering::SeqCst) {
            0 => 0,
            since => (now + 1).saturating_sub(since),
        }
    }

    /// Sends a reply. Returns whether the kernel took it: it does not if the request is gone.
    pub(crate) fn answer(&self, unique: u64, error: Option<Errno>, parts: Parts<'_>) -> bool {
        let error = error.map_or(0, |error| -error.raw_os_error());
        let fd = match &self.way {
            Way::Device(fd) => fd,
            Way::Slot(ring, index) => return ring.answer(*index, unique, error, parts),
        };
        match send(fd, unique, error, parts) {
            Ok(()) => true,
            // The program was killed, or the filesystem is not mounted any more.
            Err(Errno::NOENT | Errno::NODEV) => false,
            Err(errno) => {
                tracing::error!(unique, error, %errno, "the kernel did not take a reply");
                false
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn closed(interrupts: Arc<Interrupts>) -> Arc<Self> {
        let fd = rustix::fs::open("/dev/null", rustix::fs::OFlags::WRONLY, rustix::fs::Mode::empty());
        Self::new(fd.expect("/dev/null is there"), interrupts)
    }
}

fn send(fd: &OwnedFd, unique: u64, error: i32, parts: Parts<'_>) -> Result<(), Errno> {
    let mut slices = vec![IoSlice::new(&[]); 1];
    parts.for_each(|part| {
        if !part.is_empty() {
            slices.push(IoSlice::new(part));
        }
    });
    let body: usize = slices.iter().map(|part| part.len()).sum();
    let mut header = Out(Vec::with_capacity(OUT_HEADER_BYTES));
    header.u32((OUT_HEADER_BYTES + body) as u32).i32(error).u64(unique);
    let joined;
    if slices.len() > PARTS_MAX {
        joined = slices.iter().map(|part| &part[..]).collect::<Vec<_>>().concat();
        slices = vec![IoSlice::new(&[]), IoSlice::new(&joined)];
    }
    slices[0] = IoSlice::new(&header.0);
    loop {
        match rustix::io::writev(fd, &slices) {
            Err(Errno::INTR) => {}
            sent => return sent.map(drop),
        }
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
        match self.0.device().and_then(|fd| send(fd, 0, code, Parts::Slices(&[body]))) {
            // It does not have it in its caches, or nothing is mounted any more.
            Ok(()) | Err(Errno::NOENT | Errno::NODEV | Errno::NOTDIR) => {}
            Err(error) => tracing::warn!(code, %error, "the kernel did not take a notice"),
        }
    }
}
