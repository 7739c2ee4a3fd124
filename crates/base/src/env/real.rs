//! The machine's own clock, randomness, threads and files.
#![allow(clippy::disallowed_methods, reason = "the only module that may use them")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::fs::{FallocateFlags, FlockOperation, OFlags};
use rustix::time::ClockId;

use super::{Caching, Clock, File, Files, OpenMode, Random};

/// Starts a named thread. The caller keeps the handle and joins it.
///
/// # Panics
/// If the system has no thread left: the process cannot go on without it.
pub fn spawn_thread<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body).expect("the system has threads left")
}

/// From now on a panic of any thread is printed and then ends the process. A broken invariant must not reach a drive,
/// and no thread may wait for one that is gone.
pub fn abort_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::abort();
    }));
}

type Job = Box<dyn FnOnce()>;

thread_local! {
    /// Jobs left for the end of [`with_blocking`] on this thread; `None` outside of it.
    static JOBS: RefCell<Option<VecDeque<Job>>> = const { RefCell::new(None) };
}

/// Runs `work`, which may do blocking I/O, and then the jobs given to [`after_blocking`]. For threads that are not
/// workers of a runtime.
pub fn with_blocking(work: impl FnOnce()) {
    if blocking_allowed() {
        return work();
    }
    JOBS.set(Some(VecDeque::new()));
    work();
    while let Some(job) = JOBS.with_borrow_mut(|jobs| jobs.as_mut().and_then(VecDeque::pop_front)) {
        job();
    }
    JOBS.set(None);
}

/// Whether the caller is inside [`with_blocking`]. Elsewhere, on a worker of a runtime, blocking delays other tasks.
pub fn blocking_allowed() -> bool {
    JOBS.with_borrow(Option::is_some)
}

/// Queues a job for the end of the enclosing [`with_blocking`], in order. Returns it as the error outside of one.
pub fn after_blocking<J: FnOnce() + 'static>(job: J) -> Result<(), J> {
    JOBS.with_borrow_mut(|jobs| match jobs {
        Some(jobs) => {
            jobs.push_back(Box::new(job));
            Ok(())
        }
        None => Err(job),
    })
}

pub(super) struct RealClock;

impl Clock for RealClock {
    fn boot_ns(&self) -> u64 {
        let now = rustix::time::clock_gettime(ClockId::Boottime);
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }

    fn wall_ns(&self) -> i64 {
        let now = rustix::time::clock_gettime(ClockId::Realtime);
        now.tv_sec * 1_000_000_000 + now.tv_nsec
    }
}

pub(super) struct RealRandom;

impl Random for RealRandom {
    fn fill(&self, bytes: &mut [u8]) {
        getrandom::fill(bytes).expect("the kernel's generator is ready once the system has booted");
    }
}

pub(super) struct RealFiles;

impl Files for RealFiles {
    fn open(&self, path: &Path, mode: OpenMode, caching: Caching) -> io::Result<Arc<dyn File>> {
        let open = |flags: i32| {
            let mut options = fs::OpenOptions::new();
            options.read(true).write(true).mode(0o600).custom_flags(flags);
            match mode {
                OpenMode::Existing => {}
                OpenMode::Create => {
                    options.create(true);
                }
                OpenMode::CreateNew => {
                    options.create_new(true);
                }
            }
            options.open(path)
        };
        let file = match caching {
            Caching::Buffered => open(0)?,
            // tmpfs and some others refuse O_DIRECT at open with EINVAL.
            Caching::Direct => match open(OFlags::DIRECT.bits() as i32) {
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => open(0)?,
                other => other?,
            },
        };
        Ok(Arc::new(RealFile { file }))
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        fs::File::open(path)?.sync_all()
    }

    fn exists(&self, path: &Path) -> bool {
        path.exists()
    }

    fn free_bytes(&self, path: &Path) -> io::Result<u64> {
        let stat = rustix::fs::statvfs(path)?;
        Ok(stat.f_bavail * stat.f_frsize)
    }
}

struct RealFile {
    file: fs::File,
}

impl File for RealFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn len(&self) -> io::Result<u64> {
        // Seeking to the end gives the capacity of a block device too, where metadata says 0.
        Ok(rustix::fs::seek(&self.file, rustix::fs::SeekFrom::End(0))?)
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.file.set_len(len_bytes)
    }

    fn allocate(&self, len_bytes: u64) -> io::Result<()> {
        Ok(rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, len_bytes)?)
    }

    fn punch(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // On a device the kernel deallocates the range, and refuses if it would have to write zeros.
        Ok(rustix::fs::fallocate(&self.file, flags, offset, len_bytes)?)
    }

    fn try_lock(&self) -> io::Result<()> {
        Ok(rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive)?)
    }

    fn unlock(&self) -> io::Result<()> {
        Ok(rustix::fs::flock(&self.file, FlockOperation::Unlock)?)
    }

    fn is_device(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device())
    }

    fn raw_fd(&self) -> Option<RawFd> {
        Some(self.file.as_raw_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Env;
    use super::*;

    #[test]
    fn an_atomic_write_replaces_the_content() {
        let env = Env::real();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        env.files.write_atomic(&path, b"long content").unwrap();
        env.files.write_atomic(&path, b"short").unwrap();
        assert_eq!(env.files.read(&path).unwrap(), b"short");
        assert_eq!(env.files.list(dir.path()).unwrap(), [path]);
    }

    #[test]
    fn a_second_lock_is_refused() {
        let env = Env::real();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = env.files.open(&path, OpenMode::Create, Caching::Buffered).unwrap();
        let second = env.files.open(&path, OpenMode::Existing, Caching::Buffered).unwrap();
        first.try_lock().unwrap();
        assert_eq!(second.try_lock().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
