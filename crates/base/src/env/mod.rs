//! The only access to clock, randomness, threads and files, real or simulated.
//!
//! Code that gets these from [`Env`] can be replayed under a seed. `clippy.toml` forbids direct use.

mod real;
pub mod sim;

use std::io;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use real::{abort_on_panic, after_blocking, blocking_allowed, spawn_thread, with_blocking};

/// Clock, randomness and files of the process, or of a simulated node.
#[derive(Clone)]
pub struct Env {
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Unpredictable numbers, or a seeded sequence in simulation.
    pub random: Arc<dyn Random>,
    /// Files and directories.
    pub files: Arc<dyn Files>,
}

impl Env {
    /// The machine's own clock, randomness and files.
    pub fn real() -> Self {
        Self {
            clock: Arc::new(real::RealClock),
            random: Arc::new(real::RealRandom),
            files: Arc::new(real::RealFiles),
        }
    }
}

/// Time. Only `boot_ns` may drive decisions; `wall_ns` is for timestamps that people read.
pub trait Clock: Send + Sync {
    /// Nanoseconds since boot, suspend included (`CLOCK_BOOTTIME`); never goes back.
    fn boot_ns(&self) -> u64;
    /// Nanoseconds since 1970 UTC; may jump.
    fn wall_ns(&self) -> i64;
}

/// Randomness.
pub trait Random: Send + Sync {
    /// Fills `bytes`.
    fn fill(&self, bytes: &mut [u8]);

    /// One random number.
    fn next_u64(&self) -> u64 {
        let mut bytes = [0u8; 8];
        self.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }
}

/// How a file is opened; it is always readable and writable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// The file must exist.
    Existing,
    /// Created if missing.
    Create,
    /// Must not exist yet.
    CreateNew,
}

/// How a file's bytes move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caching {
    /// Through the page cache.
    Buffered,
    /// `O_DIRECT`: offsets, lengths and memory must be multiples of 4096. Falls back to buffered where the
    /// filesystem refuses it.
    Direct,
}

/// An open file or block device. Calls block; offsets are bytes.
#[allow(clippy::len_without_is_empty, reason = "no caller needs it")]
pub trait File: Send + Sync {
    /// Fills `buffer` from `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file ends before the buffer is full.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `bytes` at `offset`. Not durable before [`File::sync_data`].
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Makes every write that returned before the call durable. After an error their state is unknown, and a second
    /// call proves nothing.
    fn sync_data(&self) -> io::Result<()>;
    /// Size in bytes; of a block device, its capacity.
    fn len(&self) -> io::Result<u64>;
    /// Truncates or extends the file.
    fn set_len(&self, len_bytes: u64) -> io::Result<()>;
    /// Reserves space for the first `len_bytes` bytes and extends the file to at least that.
    fn allocate(&self, len_bytes: u64) -> io::Result<()>;
    /// Gives `len_bytes` bytes at `offset` back to the filesystem or device; they read as zeros.
    ///
    /// # Errors
    /// `Unsupported` if the device would have to write zeros; nothing has changed then.
    fn punch(&self, offset: u64, len_bytes: u64) -> io::Result<()>;
    /// Takes an exclusive advisory lock for the life of this file.
    ///
    /// # Errors
    /// `WouldBlock` if another process holds it.
    fn try_lock(&self) -> io::Result<()>;
    /// Gives the lock up.
    fn unlock(&self) -> io::Result<()>;
    /// Whether it is a block device.
    fn is_device(&self) -> bool {
        false
    }
    /// The descriptor for io_uring, if there is a real one.
    fn raw_fd(&self) -> Option<RawFd>;
    /// How long a task that may not block must wait for one operation; `None` if operations block.
    /// Simulated files have a latency, drawn anew each time.
    fn latency(&self) -> Option<Duration> {
        None
    }
}

/// Files and directories.
pub trait Files: Send + Sync {
    /// Opens or creates a file.
    fn open(&self, path: &Path, mode: OpenMode, caching: Caching) -> io::Result<Arc<dyn File>>;
    /// Creates a directory and its parents; succeeds if it exists.
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;
    /// The entries of a directory, in no order.
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>>;
    /// Renames atomically, replacing the destination.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Makes creations, renames and removals in a directory durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Whether the path exists.
    fn exists(&self, path: &Path) -> bool;
    /// Bytes free on the filesystem that holds `path`.
    fn free_bytes(&self, path: &Path) -> io::Result<u64>;

    /// The whole content of a file.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let file = self.open(path, OpenMode::Existing, Caching::Buffered)?;
        let mut bytes = vec![0; usize::try_from(file.len()?).map_err(io::Error::other)?];
        file.read_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    /// Replaces a file's content, durably once it returns. A crash leaves either the old or the new content.
    fn write_atomic(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut staged = path.as_os_str().to_owned();
        staged.push(".new");
        let staged = PathBuf::from(staged);
        let file = self.open(&staged, OpenMode::Create, Caching::Buffered)?;
        file.set_len(0)?;
        file.write_at(bytes, 0)?;
        file.sync_data()?;
        self.rename(&staged, path)?;
        match path.parent() {
            Some(parent) => self.sync_dir(parent),
            None => Ok(()),
        }
    }
}
