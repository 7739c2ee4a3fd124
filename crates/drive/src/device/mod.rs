//! Access to the device: submit operations, wait for their completions. Three implementations of one trait.

pub(crate) mod delayed;
pub(crate) mod inline;
pub(crate) mod pool;
pub(crate) mod uring;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use base::env::File;
use wire::drive::IoPath;

use crate::buffer::AlignedBuf;

/// Attempts to lock a device that another process uses, and the pause between two of them.
const LOCK_ATTEMPTS: u32 = 60;
const LOCK_POLL: Duration = Duration::from_millis(50);

/// Locks a device for this process alone. Requests of a killed process may hold the lock for a moment after the process
/// is gone, so it is tried for three seconds.
///
/// # Errors
/// `WouldBlock` if another process keeps the lock.
pub(crate) fn lock(file: &dyn File) -> io::Result<()> {
    for _ in 1..LOCK_ATTEMPTS {
        match file.try_lock() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::park_timeout(LOCK_POLL),
            taken => return taken,
        }
    }
    file.try_lock()
}

/// The descriptor that a read uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadVia {
    /// Through the page cache.
    Cache,
    /// Past the page cache.
    Direct,
}

/// One operation. The token comes back with its completion.
pub(crate) enum Op {
    /// Fills the buffer.
    Read { token: u64, offset: u64, buffer: AlignedBuf, via: ReadVia },
    /// Writes the whole buffer, past the page cache where possible.
    Write { token: u64, offset: u64, buffer: AlignedBuf },
    /// Makes every earlier completed write durable.
    Sync { token: u64 },
    /// Gives a range back to the filesystem or device below.
    Punch { token: u64, offset: u64, len_bytes: u64 },
}

/// A completed operation.
pub(crate) struct Done {
    pub(crate) token: u64,
    pub(crate) result: io::Result<()>,
    /// The buffer of a read or write.
    pub(crate) buffer: Option<AlignedBuf>,
}

/// Interrupts [`Device::wait`] from another thread.
pub(crate) trait Wake: Send + Sync {
    fn wake(&self);
}

/// A device as the engine uses it. Belongs to one thread.
pub(crate) trait Device {
    /// Starts an operation. Never fails: errors arrive as completions.
    fn submit(&mut self, op: Op);
    /// Waits until something completed, [`Wake::wake`] was called or the time is over, and collects completions.
    fn wait(&mut self, done: &mut Vec<Done>, timeout: Option<Duration>);
    /// Collects completions without waiting, and passes submissions on.
    fn poll(&mut self, done: &mut Vec<Done>);
    /// The implementation, for reports.
    fn io_path(&self) -> IoPath;
}

/// The descriptors of a device.
#[derive(Clone)]
pub(crate) struct DeviceFiles {
    /// Past the page cache; also holds the lock.
    pub(crate) direct: Arc<dyn File>,
    /// Through the page cache; `None` if the cache is to be bypassed.
    pub(crate) cached: Option<Arc<dyn File>>,
}

impl DeviceFiles {
    /// The descriptor for a read.
    pub(crate) fn for_read(&self, via: ReadVia) -> &Arc<dyn File> {
        match (via, &self.cached) {
            (ReadVia::Cache, Some(cached)) => cached,
            _ => &self.direct,
        }
    }

    /// Does one operation and waits for it.
    pub(crate) fn execute(&self, op: Op) -> Done {
        match op {
            Op::Read { token, offset, mut buffer, via } => {
                let result = self.for_read(via).read_at(&mut buffer, offset);
                Done { token, result, buffer: Some(buffer) }
            }
            Op::Write { token, offset, buffer } => {
                let result = self.direct.write_at(&buffer, offset);
                Done { token, result, buffer: Some(buffer) }
            }
            Op::Sync { token } => Done { token, result: self.direct.sync_data(), buffer: None },
            Op::Punch { token, offset, len_bytes } => {
                Done { token, result: self.direct.punch(offset, len_bytes), buffer: None }
            }
        }
    }
}
