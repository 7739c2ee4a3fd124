//! The FUSE mount: each request of the kernel becomes one call of the client.
//!
//! Threads read the kernel's requests from cloned descriptors and start them at once. A request that must wait is
//! parked and answered from elsewhere (`requests`), so no request ever waits for another. Invalidations run on separate
//! threads, because the kernel may let them wait for running requests.

mod attr;
mod attrs;
mod dir;
mod direct;
mod files;
mod guard;
mod locks;
mod mounts;
mod names;
mod requests;
mod serve;
mod setid;

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::Ino;
use base::env::Env;
use base::units::parse_size;
use client::{AccessTimes, Client, Invalidate};
pub use fuse::Transport;
use fuse::{InitFlags, Kernel, Options, Session};
use rustix::mount::{UnmountFlags, unmount};
use tokio::runtime::Handle;

use dir::DirStream;
use direct::CachedFiles;
use locks::RangeHolders;
use names::Refused;

pub use mounts::{MountedFilesystem, forebay_mounts};

/// How a filesystem is mounted.
#[derive(Debug, Clone)]
pub struct MountOptions {
    /// Mount point; an existing directory.
    pub path: PathBuf,
    /// The source that `mount` shows, after `forebay:`. Unique: a dead mount with the same source is removed.
    pub source: String,
    /// Threads that read requests.
    pub threads: usize,
    /// Options given with `-o`.
    pub flags: MountFlags,
    /// The owner of the metadata checks the rights of each user: it does not trust this machine to have done so.
    pub sends_callers: bool,
}

impl MountOptions {
    /// With as many threads as suit the machine.
    pub fn new(path: &Path, source: String, flags: MountFlags) -> Self {
        let threads = std::thread::available_parallelism().map_or(4, |cores| cores.get().clamp(4, 16));
        Self { path: path.to_owned(), source, threads, flags, sends_callers: false }
    }
}

/// How the mount uses the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheMode {
    /// Reads come from the page cache, writes are made durable in the background. Durable after fsync.
    #[default]
    Write,
    /// As `Write`, but closing a file waits until it is durable and reports errors.
    Read,
    /// The page cache is not used: every read and write goes to this process.
    Direct,
}

/// Whether the mount may change the filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Access {
    /// Changes are allowed.
    #[default]
    ReadWrite,
    /// Changes are refused.
    ReadOnly,
}

/// Options given with `-o`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountFlags {
    /// How the mount uses the page cache.
    pub cache: CacheMode,
    /// Whether changes are allowed.
    pub access: Access,
    /// Which reads update the access time.
    pub access_times: AccessTimes,
    /// Most bytes that the kernel reads ahead of a sequential reader. It begins with few, doubles them while the reads
    /// stay sequential, and reads nothing ahead of random reads.
    pub read_ahead_bytes: u64,
    /// How requests come from the kernel, if it agrees.
    pub transport: Transport,
    /// When changes of names and attributes return.
    pub names: Names,
    /// The process that answers the kernel.
    pub process: Process,
}

/// The process that answers the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Process {
    /// The node's: nothing is faster, and the mount dies with it.
    #[default]
    Node,
    /// One of its own: while the node is away, programs wait.
    Own,
}

/// When changes of names and attributes return.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Names {
    /// When they are executed. They are durable milliseconds later; `fsync` waits for that.
    #[default]
    Early,
    /// When they are durable.
    Strict,
}

impl Default for MountFlags {
    fn default() -> Self {
        Self {
            cache: CacheMode::default(),
            access: Access::default(),
            access_times: AccessTimes::default(),
            // The kernel's default of 128 KiB keeps one drive busy; an extent is on several drives.
            read_ahead_bytes: 4 << 20,
            transport: Transport::default(),
            names: Names::default(),
            process: Process::default(),
        }
    }
}

/// Upper bound of the option: every reader takes that much of the page cache.
const READ_AHEAD_BYTES_MAX: u64 = 64 << 20;

/// An option that is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadMountOption {
    /// The option is unknown.
    #[error(
        "unknown mount option: {0:?} (known: ro, rw, noatime, relatime, writecache, readcache, direct, readahead=SIZE, strict, process=node, process=own, transport=device, transport=uring)"
    )]
    Unknown(String),
    /// The value is not a size, or too large.
    #[error("mount option readahead={0:?}: not a size from 0 to 64MiB, such as 16MiB")]
    ReadAhead(String),
}

impl std::str::FromStr for MountFlags {
    type Err = BadMountOption;

    fn from_str(text: &str) -> Result<Self, BadMountOption> {
        let mut flags = Self::default();
        for option in text.split(',').filter(|option| !option.is_empty()) {
            match option {
                "ro" => flags.access = Access::ReadOnly,
                "rw" => flags.access = Access::ReadWrite,
                // Directories have no access times here, so `nodiratime` is always in effect.
                "noatime" => flags.access_times = AccessTimes::Never,
                "relatime" | "nodiratime" => flags.access_times = AccessTimes::Relative,
                "writecache" => flags.cache = CacheMode::Write,
                "readcache" => flags.cache = CacheMode::Read,
                "direct" => flags.cache = CacheMode::Direct,
                "strict" => flags.names = Names::Strict,
                "process=node" => flags.process = Process::Node,
                "process=own" => flags.process = Process::Own,
                other => {
                    let unknown = || BadMountOption::Unknown(other.to_owned());
                    match other.split_once('=').ok_or_else(unknown)? {
                        ("readahead", size) => flags.read_ahead_bytes = read_ahead(size)?,
                        ("transport", name) => {
                            flags.transport = Transport::named(name).ok_or_else(unknown)?
                        }
                        _ => return Err(unknown()),
                    }
                }
            }
        }
        Ok(flags)
    }
}

fn read_ahead(size: &str) -> Result<u64, BadMountOption> {
    let bytes = parse_size(size).ok().filter(|bytes| *bytes <= READ_AHEAD_BYTES_MAX);
    bytes.ok_or_else(|| BadMountOption::ReadAhead(size.to_owned()))
}

/// Why a filesystem was not mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// Another filesystem is mounted there already.
    #[error("mount point is busy: path={0}")]
    Busy(PathBuf),
    /// There is no such directory.
    #[error("mount point is not a directory: path={0}")]
    NotDirectory(PathBuf),
    /// The kernel has no FUSE, or the device is not there.
    #[error("/dev/fuse cannot be opened: load the fuse module, or pass the device into the container")]
    NoFuse(#[source] io::Error),
    /// Any other error.
    #[error("cannot mount: path={path}")]
    Failed {
        /// Mount point.
        path: PathBuf,
        #[source]
        /// Error of the system.
        source: io::Error,
    },
}

/// A mounted filesystem.
pub struct Mount {
    session: Option<Session>,
    client: Client,
    path: PathBuf,
    source: String,
}

impl Mount {
    /// Mounts the filesystem. A dead mount of an earlier process at the same place is removed first.
    pub fn new(client: Client, runtime: Handle, options: &MountOptions) -> Result<Self, MountError> {
        let path = &options.path;
        clear_dead_mounts(&options.source);
        check_mount_point(path)?;
        let device = Session::open_device().map_err(|error| MountError::NoFuse(error.into()))?;
        let access_times = match options.flags.access {
            Access::ReadWrite => options.flags.access_times,
            Access::ReadOnly => AccessTimes::Never,
        };
        client.set_access_times(access_times);
        client.set_early(options.flags.names == Names::Early);
        let server = |kernel: Kernel, transport: Transport| {
            client.set_invalidate(Some(Arc::new(KernelCaches { kernel: kernel.clone() })));
            let fuse: Arc<dyn fuse::Serve> = Arc::new(Fuse {
                client: client.clone(),
                sends_callers: options.sends_callers,
                runtime,
                cache: options.flags.cache,
                dirs: Arc::default(),
                next_handle: Arc::new(AtomicU64::new(1)),
                next_trace: Arc::new(AtomicU64::new(Env::real().random.next_u64())),
                kernel,
                cached: Arc::default(),
                range_holders: Arc::default(),
                refused: Arc::default(),
                may_block: transport == Transport::Device,
            });
            fuse
        };
        let mounted = Session::mount(device, path, &session_options(options), server);
        let session = mounted.map_err(|source| {
            client.set_invalidate(None);
            MountError::Failed { path: path.clone(), source }
        })?;
        if options.flags.transport != session.transport() {
            tracing::warn!(path = %path.display(), "the kernel offers no FUSE over io_uring (fuse.enable_uring is off): requests come by /dev/fuse");
        }
        set_read_ahead(path, options.flags.read_ahead_bytes);
        Ok(Self { session: Some(session), client, path: path.clone(), source: options.source.clone() })
    }

    /// How requests come from the kernel.
    pub fn transport(&self) -> Transport {
        self.session.as_ref().map_or(Transport::Device, Session::transport)
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the mount still answers; an operator may have unmounted it by hand.
    pub fn is_alive(&self) -> bool {
        self.session.as_ref().is_some_and(Session::is_alive)
    }

    /// Whether the mount is in the mount table. After an unmount by hand it is not. Its threads may end a moment later,
    /// or much later if it was detached with open files.
    pub fn is_in_tree(&self) -> bool {
        mounts::forebay_mounts().is_ok_and(|mounts| mounts.iter().any(|mount| mount.source == self.source))
    }

    /// Unmounts. Fails with `ResourceBusy` if files are open on it and `mode` is [`UnmountMode::IfIdle`].
    pub fn unmount(&mut self, mode: UnmountMode) -> io::Result<()> {
        let Some(session) = self.session.take() else { return Ok(()) };
        let flags = match mode {
            UnmountMode::IfIdle => UnmountFlags::empty(),
            UnmountMode::Detach => UnmountFlags::DETACH,
        };
        match unmount(&self.path, flags) {
            // An operator may have unmounted it by hand.
            Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {}
            Err(error) => {
                self.session = Some(session);
                return Err(error.into());
            }
        }
        self.client.set_invalidate(None);
        if mode == UnmountMode::IfIdle {
            wait_for_end(&session);
        }
        Ok(())
    }
}

/// Waits for the threads of a mount that was unmounted. They do not end while a copy of it is in another mount namespace.
fn wait_for_end(session: &Session) {
    for _ in 0..END_POLLS {
        if session.has_ended() {
            return;
        }
        std::thread::park_timeout(END_POLL);
    }
    tracing::warn!("the filesystem is unmounted here, and in use elsewhere: in another mount namespace");
}

const END_POLL: Duration = Duration::from_millis(5);
const END_POLLS: u32 = 1000;

impl Drop for Mount {
    fn drop(&mut self) {
        // Programs that were cut off from the mount said nothing of their locks.
        self.client.give_up_locks();
    }
}

/// The treatment of files that are open on the mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnmountMode {
    /// Refuse to unmount.
    IfIdle,
    /// Take the mount out of the tree at once; open files fail when the process ends.
    Detach,
}

/// Most bytes in one request.
const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// Most background requests (read-ahead, write-back) of the kernel at a time.
const BACKGROUND_MAX: u16 = 128;

fn session_options(options: &MountOptions) -> Options {
    Options {
        source: format!("{}{}", mounts::SOURCE_PREFIX, options.source),
        subtype: "forebay",
        read_only: options.flags.access == Access::ReadOnly,
        threads: options.threads.max(1),
        // Not ATOMIC_O_TRUNC: with it the kernel drops the pages of a running program before it finds that O_TRUNC is not
        // allowed (ETXTBSY), and the program dies.
        wanted: InitFlags::ASYNC_READ
            | InitFlags::ASYNC_DIO
            | InitFlags::POSIX_LOCKS
            | InitFlags::FLOCK_LOCKS
            | InitFlags::EXPORT_SUPPORT
            | InitFlags::DONT_MASK
            | InitFlags::DO_READDIRPLUS
            | InitFlags::READDIRPLUS_AUTO
            | InitFlags::PARALLEL_DIROPS
            | InitFlags::POSIX_ACL
            | InitFlags::CACHE_SYMLINKS
            | InitFlags::HANDLE_KILLPRIV_V2
            | InitFlags::EXPLICIT_INVAL_DATA
            | InitFlags::DIRECT_IO_ALLOW_MMAP,
        request_bytes_max: REQUEST_BYTES_MAX,
        read_ahead_bytes: 4 * REQUEST_BYTES_MAX,
        background_max: BACKGROUND_MAX,
        transport: options.flags.transport,
    }
}

fn check_mount_point(path: &Path) -> Result<(), MountError> {
    let stat = rustix::fs::stat(path).map_err(|_| MountError::NotDirectory(path.to_owned()))?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Directory {
        return Err(MountError::NotDirectory(path.to_owned()));
    }
    let parent = rustix::fs::stat(path.join("..")).map_err(|_| MountError::NotDirectory(path.to_owned()))?;
    if parent.st_dev != stat.st_dev {
        return Err(MountError::Busy(path.to_owned()));
    }
    Ok(())
}

/// Removes the mounts of killed processes. The caller holds the lock of the node, or that of the mount's process, so a mount with this
/// source has no process any more, even if the kernel still answers some calls from its caches.
fn clear_dead_mounts(source: &str) {
    let Ok(mounts) = mounts::forebay_mounts() else { return };
    for mount in mounts.iter().filter(|mount| mount.source == source) {
        match unmount(&mount.path, UnmountFlags::DETACH) {
            Ok(()) => {
                tracing::info!(path = %mount.path.display(), "removed the mount of a process that died")
            }
            Err(error) => {
                tracing::warn!(path = %mount.path.display(), %error, "dead mount cannot be removed")
            }
        }
    }
}

fn set_read_ahead(path: &Path, bytes: u64) {
    let Ok(stat) = rustix::fs::stat(path) else { return };
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let knob = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    let flags = rustix::fs::OFlags::WRONLY;
    let written = rustix::fs::open(&knob, flags, rustix::fs::Mode::empty())
        .and_then(|file| rustix::io::write(&file, (bytes >> 10).to_string().as_bytes()));
    if let Err(error) = written {
        tracing::debug!(%error, knob, "read-ahead stays as it is");
    }
}

#[derive(Clone)]
struct Fuse {
    client: Client,
    /// Each request is made on behalf of the user of its program.
    sends_callers: bool,
    runtime: Handle,
    cache: CacheMode,
    dirs: Arc<Mutex<HashMap<u64, Arc<tokio::sync::Mutex<DirStream>>>>>,
    next_handle: Arc<AtomicU64>,
    /// The number of the next request, in logs.
    next_trace: Arc<AtomicU64>,
    kernel: Kernel,
    cached: Arc<CachedFiles>,
    range_holders: Arc<RangeHolders>,
    refused: Arc<Refused>,
    /// Whether the thread that reads a request may do blocking work for it. A thread of a ring must not: the other requests
    /// of its CPU would wait.
    may_block: bool,
}

const PAGE_BYTES: u64 = 4096;

struct KernelCaches {
    kernel: Kernel,
}

impl Invalidate for KernelCaches {
    fn inode(&self, ino: Ino) {
        self.kernel.forget_pages(ino.0, 0, 0);
    }

    fn inode_around(&self, ino: Ino, range: Range<u64>) {
        let (first, last) = (range.start / PAGE_BYTES * PAGE_BYTES, range.end.next_multiple_of(PAGE_BYTES));
        if first > 0 {
            self.kernel.forget_pages(ino.0, 0, first as i64);
        }
        self.kernel.forget_pages(ino.0, last as i64, 0);
    }

    fn entry(&self, parent: Ino, name: &[u8]) {
        self.kernel.forget_name(parent.0, name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_options_are_read_and_unknown_ones_refused() {
        assert_eq!("".parse(), Ok(MountFlags::default()));
        let flags: MountFlags = "ro,noatime,direct".parse().unwrap();
        assert_eq!(flags.access, Access::ReadOnly);
        assert_eq!(flags.access_times, AccessTimes::Never);
        assert_eq!(flags.cache, CacheMode::Direct);
        assert_eq!("rw,nocrc".parse::<MountFlags>(), Err(BadMountOption::Unknown("nocrc".to_owned())));
        assert_eq!(
            "transport=uring".parse::<MountFlags>().map(|flags| flags.transport),
            Ok(Transport::Uring)
        );
        let unknown = BadMountOption::Unknown("transport=tape".to_owned());
        assert_eq!("transport=tape".parse::<MountFlags>(), Err(unknown));
        let ahead = |text: &str| text.parse::<MountFlags>().map(|flags| flags.read_ahead_bytes);
        assert_eq!(ahead("ro"), Ok(4 << 20));
        assert_eq!(ahead("readahead=16MiB,ro"), Ok(16 << 20));
        assert_eq!(ahead("readahead=0"), Ok(0));
        for bad in ["65MiB", "", "much"] {
            assert_eq!(ahead(&format!("readahead={bad}")), Err(BadMountOption::ReadAhead(bad.to_owned())));
        }
    }
}
