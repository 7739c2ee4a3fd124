//! A mounted filesystem: the handshake, and threads that read requests.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};

use crate::abi::{IN_HEADER_BYTES, InitFlags, MAJOR, MINOR, MINOR_LEAST, Out, opcode};
use crate::channel::{Channel, Kernel, Parts};
use crate::interrupt::Interrupts;
use crate::reply::Reply;
use crate::request::{BadRequest, Op, Request};
use crate::uring::{self, Queue};

/// Answers requests.
pub trait Serve: Send + Sync + 'static {
    /// Answers a request, now or later. The thread that calls this reads the next one when it returns.
    fn serve(&self, request: Request, reply: Reply);

    /// The kernel has dropped references to inodes: the number of each.
    fn forget(&self, references: &[(u64, u64)]);
}

/// How a filesystem is mounted.
#[derive(Debug, Clone)]
pub struct Options {
    /// The source that `mount` shows.
    pub source: String,
    /// The type that `mount` shows, after `fuse.`.
    pub subtype: &'static str,
    /// The kernel refuses changes.
    pub read_only: bool,
    /// Threads that read requests.
    pub threads: usize,
    /// Wanted parts of the protocol. Those that the kernel does not have are left out.
    pub wanted: InitFlags,
    /// Most bytes of one read or write.
    pub request_bytes_max: u32,
    /// Most bytes to read ahead.
    pub read_ahead_bytes: u32,
    /// Most requests of the page cache at a time.
    pub background_max: u16,
    /// How requests come, if the kernel agrees.
    pub transport: Transport,
}

/// How requests come from the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// By reading `/dev/fuse`.
    #[default]
    Device,
    /// By io_uring, with a thread for each CPU.
    Uring,
}

impl Transport {
    /// Its name in options and answers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Uring => "uring",
        }
    }

    /// The transport of this name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Device, Self::Uring].into_iter().find(|transport| transport.name() == name)
    }
}

/// A mounted filesystem. It stays mounted until it is unmounted: then its threads end.
pub struct Session {
    shared: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
    rings: Vec<JoinHandle<()>>,
}

/// What the threads of a session share.
pub(crate) struct Shared {
    server: Arc<dyn Serve>,
    interrupts: Arc<Interrupts>,
    request_bytes_max: u32,
    readers: Mutex<Vec<(Arc<Channel>, JoinHandle<()>)>>,
    /// Counts looks of the watcher.
    now: AtomicU64,
    /// At most one reader is left that does not hang.
    is_stalled: AtomicBool,
    /// Threads that serve one request each.
    helpers: AtomicUsize,
    has_ended: Mutex<bool>,
    ended: Condvar,
}

/// How often the watcher looks at the threads, and at programs that got a signal.
const LOOK: Duration = Duration::from_millis(500);
const LOOK_SOON: Duration = Duration::from_millis(50);
/// A thread that has not read for this number of looks hangs.
const HANGS_LOOKS: u64 = 2;
/// Most threads that read requests.
const READERS_MAX: usize = 64;
/// Most threads that serve one request each.
const HELPERS_MAX: usize = 256;

/// `_IOR(229, 0, uint32_t)`: makes a new descriptor one of the connection of another.
const CLONE: rustix::ioctl::Opcode = 0x8004_e500;
const DEVICE: &str = "/dev/fuse";
/// Room for the header of a request and the structure before its bytes.
const HEAD_BYTES: u32 = 4096;

impl Session {
    /// Opens `/dev/fuse`.
    ///
    /// # Errors
    /// Of open(2): the kernel has no FUSE, or the device is not there.
    pub fn open_device() -> Result<OwnedFd, Errno> {
        rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
    }

    /// Mounts at `path`. The kernel checks permissions by the mode of each inode.
    ///
    /// # Errors
    /// Of mount(2): EPERM without the right to mount. `Unsupported` if the kernel is too old.
    pub fn mount(
        device: OwnedFd,
        path: &Path,
        options: &Options,
        server: impl FnOnce(Kernel, Transport) -> Arc<dyn Serve>,
    ) -> io::Result<Self> {
        let root = rustix::fs::stat(path)?;
        let data = format!(
            "fd={},rootmode={:o},user_id={},group_id={},default_permissions,allow_other",
            device.as_raw_fd(),
            root.st_mode,
            rustix::process::getuid().as_raw(),
            rustix::process::getgid().as_raw(),
        );
        let flags = if options.read_only { MountFlags::RDONLY } else { MountFlags::empty() };
        let kind = format!("fuse.{}", options.subtype);
        mount(options.source.as_str(), path, kind.as_str(), flags, Some(CString::new(data)?.as_c_str()))?;
        let session = Self::begin(device, options, server);
        if session.is_err() {
            let _ = rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH);
        }
        session
    }

    fn begin(
        device: OwnedFd,
        options: &Options,
        server: impl FnOnce(Kernel, Transport) -> Arc<dyn Serve>,
    ) -> io::Result<Self> {
        let interrupts = Arc::new(Interrupts::default());
        let session = Self::begin_with(device, options, server, &interrupts);
        if session.is_err() {
            interrupts.drop_channels();
        }
        session
    }

    fn begin_with(
        device: OwnedFd,
        options: &Options,
        server: impl FnOnce(Kernel, Transport) -> Arc<dyn Serve>,
        interrupts: &Arc<Interrupts>,
    ) -> io::Result<Self> {
        let first = Channel::new(device, interrupts.clone());
        let queues = match options.transport {
            Transport::Device => Ok(Vec::new()),
            Transport::Uring => uring::queues(options.request_bytes_max as usize, interrupts),
        };
        let queues = queues.unwrap_or_else(|error| {
            tracing::warn!(%error, "the system does not allow the rings that the mount needs");
            Vec::new()
        });
        let wanted = if queues.is_empty() { Transport::Device } else { Transport::Uring };
        let agreed = negotiate(&first, options, wanted)?;
        let is_uring = agreed.contains(InitFlags::OVER_IO_URING);
        let (queues, transport) =
            if is_uring { (queues, Transport::Uring) } else { (Vec::new(), Transport::Device) };
        let shared = Arc::new(Shared {
            server: server(Kernel(first.clone()), transport),
            interrupts: interrupts.clone(),
            request_bytes_max: options.request_bytes_max,
            readers: Mutex::default(),
            now: AtomicU64::new(0),
            is_stalled: AtomicBool::new(false),
            helpers: AtomicUsize::new(0),
            has_ended: Mutex::new(false),
            ended: Condvar::new(),
        });
        let rings = start_rings(queues, &first, &shared)?;
        let mut channels = vec![first];
        // With rings, only interrupts and forgotten references are left for the readers.
        let threads = if rings.is_empty() { options.threads } else { 1 };
        for _ in 1..threads {
            channels.push(Channel::new(clone_of(&channels[0])?, shared.interrupts.clone()));
        }
        channels.into_iter().for_each(|channel| shared.add_reader(channel));
        let watching = shared.clone();
        let watcher = Some(base::env::spawn_thread("fuse-watch", move || watching.watch()));
        Ok(Self { shared, watcher, rings })
    }

    /// How requests come.
    pub fn transport(&self) -> Transport {
        if self.rings.is_empty() { Transport::Device } else { Transport::Uring }
    }

    /// Whether the kernel still sends requests: it does until the filesystem is unmounted and no file is open.
    pub fn is_alive(&self) -> bool {
        self.shared.readers().iter().any(|(_, thread)| !thread.is_finished())
    }

    /// Whether all threads have ended. They may take a moment after [`Session::is_alive`] says so, or live on where a copy of
    /// the mount is in another namespace.
    pub fn has_ended(&self) -> bool {
        !self.is_alive() && self.rings.iter().all(JoinHandle::is_finished)
    }

    /// Waits until the filesystem is unmounted and no file is open.
    pub fn join(mut self) {
        self.rings.drain(..).for_each(|ring| drop(ring.join()));
        loop {
            // The watcher adds threads, and drops none.
            let Some((_, thread)) = self.shared.readers().pop() else { return };
            let _ = thread.join();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        *self.shared.has_ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.ended.notify_all();
        self.watcher.take().into_iter().for_each(|watcher| drop(watcher.join()));
        self.shared.interrupts.drop_channels();
    }
}

impl Shared {
    fn readers(&self) -> MutexGuard<'_, Vec<(Arc<Channel>, JoinHandle<()>)>> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add_reader(self: &Arc<Self>, channel: Arc<Channel>) {
        self.interrupts.add_channel(channel.clone());
        let (shared, reading) = (self.clone(), channel.clone());
        let thread = base::env::spawn_thread("fuse", move || shared.read_requests(&reading));
        self.readers().push((channel, thread));
    }

    /// Looks at the programs that got a signal, and adds a reader when all hang: a disk below may not answer, and then
    /// signals must be heard.
    fn watch(self: &Arc<Self>) {
        let mut has_ended = self.has_ended.lock().unwrap_or_else(PoisonError::into_inner);
        let mut looks = 0;
        while !*has_ended {
            let pause = if self.interrupts.is_watching() { LOOK_SOON } else { LOOK };
            has_ended = self.ended.wait_timeout(has_ended, pause).unwrap_or_else(PoisonError::into_inner).0;
            self.interrupts.look();
            looks += 1;
            if pause == LOOK || looks % (LOOK.as_millis() / LOOK_SOON.as_millis()) == 0 {
                self.look_at_readers();
            }
        }
    }

    fn look_at_readers(self: &Arc<Self>) {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        let (count, hanging, first) = {
            let readers = self.readers();
            let hanging = readers.iter().filter(|(channel, _)| channel.busy_for(now) >= HANGS_LOOKS);
            (readers.len(), hanging.count(), readers.first().map(|(channel, _)| channel.clone()))
        };
        self.is_stalled.store(hanging > 0 && hanging + 1 >= count, Ordering::SeqCst);
        let Some(first) = first.filter(|_| hanging == count && count < READERS_MAX) else { return };
        match clone_of(&first) {
            Ok(fd) => self.add_reader(Channel::new(fd, self.interrupts.clone())),
            Err(error) => {
                tracing::warn!(%error, "all threads of the mount hang, and there is no room for another")
            }
        }
    }
}

fn clone_of(channel: &Channel) -> io::Result<OwnedFd> {
    let clone = Session::open_device()?;
    let mut of = channel.device()?.as_raw_fd() as u32;
    // SAFETY: the operation reads a descriptor from the integer and keeps no pointer to it.
    unsafe { rustix::ioctl::ioctl(&clone, rustix::ioctl::Updater::<CLONE, u32>::new(&mut of)) }?;
    Ok(clone)
}

/// Starts a thread for each queue, and waits until the kernel has all of them.
fn start_rings(
    queues: Vec<Queue>,
    device: &Arc<Channel>,
    shared: &Arc<Shared>,
) -> io::Result<Vec<JoinHandle<()>>> {
    let count = queues.len();
    let (ready, results) = std::sync::mpsc::channel();
    let mut rings = Vec::new();
    for queue in queues {
        queue.channels().iter().for_each(|channel| shared.interrupts.add_channel(channel.clone()));
        let (device, shared, ready) = (device.clone(), shared.clone(), ready.clone());
        rings.push(base::env::spawn_thread("fuse-ring", move || {
            let Ok(fd) = device.device() else { return };
            queue.run(fd, &shared, move |result| {
                // The receiver is gone after the first failure.
                let _ = ready.send(result);
            });
        }));
    }
    drop(ready);
    let mut registered = 0;
    for result in results {
        result?;
        registered += 1;
    }
    match registered == count {
        true => Ok(rings),
        false => Err(io::Error::other("a thread of the mount did not start")),
    }
}

/// Reads a message. `None` once nothing is mounted any more.
fn read(channel: &Channel, buffer: &mut [u8]) -> Option<usize> {
    let fd = channel.device().ok()?;
    loop {
        match rustix::io::read(fd, &mut *buffer) {
            Ok(len) => return Some(len),
            // A request was taken back while it was read.
            Err(Errno::INTR | Errno::NOENT | Errno::AGAIN) => {}
            Err(Errno::NODEV) => return None,
            Err(error) => {
                tracing::error!(%error, "requests of the kernel cannot be read");
                return None;
            }
        }
    }
}

/// Answers the kernel's first request. Returns the parts of the protocol that both sides want.
fn negotiate(channel: &Channel, options: &Options, transport: Transport) -> io::Result<InitFlags> {
    let unsupported = |what: String| io::Error::new(io::ErrorKind::Unsupported, what);
    loop {
        let mut buffer = vec![0; buffer_bytes(options.request_bytes_max)];
        let len = read(channel, &mut buffer)
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, "unmounted during the handshake"))?;
        let message = &buffer[..len];
        let word = |at: usize| message.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
        let unique = message.get(8..16).and_then(|bytes| bytes.try_into().ok()).map(u64::from_ne_bytes);
        let at = |field: usize| word(IN_HEADER_BYTES + 4 * field).unwrap_or(0);
        let (Some(opcode::INIT), Some(unique)) = (word(4), unique) else {
            return Err(unsupported("the kernel does not begin with a handshake".to_owned()));
        };
        let (major, minor, read_ahead) = (at(0), at(1), at(2));
        if major > MAJOR {
            // It asks again, with a version of ours.
            let mut out = Out::default();
            out.u32(MAJOR).u32(MINOR).zeros(56);
            channel.answer(unique, None, Parts::Slices(&[&out.0]));
            continue;
        }
        if (major, minor) < (MAJOR, MINOR_LEAST) {
            channel.answer(unique, Some(Errno::PROTO), Parts::Slices(&[]));
            let least = format!("{MAJOR}.{MINOR_LEAST} (Linux 5.4)");
            return Err(unsupported(format!("the kernel speaks FUSE {major}.{minor}, needed is {least}")));
        }
        let mut offered = u64::from(at(3));
        if InitFlags(offered).contains(InitFlags::INIT_EXT) {
            offered |= u64::from(at(4)) << 32;
        }
        let always = InitFlags::BIG_WRITES | InitFlags::MAX_PAGES | InitFlags::INIT_EXT;
        let mut wanted = options.wanted | always;
        if transport == Transport::Uring {
            wanted = wanted | InitFlags::OVER_IO_URING;
        }
        let agreed = InitFlags(offered) & wanted;
        let mut out = Out::default();
        out.u32(MAJOR)
            .u32(minor.min(MINOR))
            .u32(read_ahead.min(options.read_ahead_bytes))
            .u32(agreed.0 as u32);
        out.u16(options.background_max).u16(options.background_max / 4 * 3).u32(options.request_bytes_max);
        // Times have nanoseconds.
        out.u32(1)
            .u16((options.request_bytes_max / rustix::param::page_size() as u32) as u16)
            .u16(0)
            .u32((agreed.0 >> 32) as u32);
        out.zeros(28);
        return match channel.answer(unique, None, Parts::Slices(&[&out.0])) {
            true => Ok(agreed),
            false => Err(unsupported("the kernel did not take the handshake".to_owned())),
        };
    }
}

/// A request has its header and its own structure before the bytes.
fn buffer_bytes(request_bytes_max: u32) -> usize {
    (request_bytes_max + HEAD_BYTES) as usize
}

impl Shared {
    fn read_requests(self: Arc<Self>, channel: &Arc<Channel>) {
        let mut buffer = BytesMut::zeroed(buffer_bytes(self.request_bytes_max));
        loop {
            channel.set_busy(None);
            let Some(len) = read(channel, &mut buffer) else { return };
            channel.set_busy(Some(self.now.load(Ordering::Relaxed)));
            let is_write = buffer.get(4..8) == Some(&opcode::WRITE.to_ne_bytes());
            if !is_write {
                // Small: a request that waits does not hold the whole buffer.
                self.serve_message(channel, &Bytes::copy_from_slice(&buffer[..len]));
                continue;
            }
            let whole = std::mem::take(&mut buffer).freeze();
            self.serve_message(channel, &whole.slice(..len));
            let length = buffer_bytes(self.request_bytes_max);
            buffer = whole.try_into_mut().unwrap_or_else(|_| BytesMut::zeroed(length));
        }
    }

    pub(crate) fn serve_message(self: &Arc<Self>, channel: &Arc<Channel>, message: &Bytes) {
        match Request::parse(message) {
            Ok(Request { op: Op::Forget(references), .. }) => self.server.forget(&references),
            Ok(Request { op: Op::Interrupt { unique }, .. }) => {
                self.interrupts.interrupted(unique);
                self.ended.notify_all();
            }
            Ok(request) => {
                let reply = Reply::new(channel.clone(), request.unique, request.pid);
                match request.op {
                    Op::Destroy => reply.done(),
                    _ => self.serve(channel, request, reply),
                }
            }
            Err(BadRequest::Unsupported { unique, opcode }) => {
                tracing::debug!(opcode, "request of an unknown kind");
                channel.answer(unique, Some(Errno::NOSYS), Parts::Slices(&[]));
            }
            Err(BadRequest::Malformed { unique, opcode }) => {
                tracing::error!(opcode, "a request of the kernel is malformed");
                channel.answer(unique, Some(Errno::IO), Parts::Slices(&[]));
            }
            Err(BadRequest::NoHeader) => tracing::error!("a message of the kernel has no header"),
        }
    }

    fn serve(self: &Arc<Self>, channel: &Arc<Channel>, request: Request, reply: Reply) {
        let is_stalled = self.is_stalled.load(Ordering::Relaxed);
        if is_stalled && self.helpers.fetch_add(1, Ordering::SeqCst) < HELPERS_MAX {
            // This thread goes on reading.
            reply.park().park();
            let shared = self.clone();
            drop(base::env::spawn_thread("fuse-helper", move || {
                shared.server.serve(request, reply);
                shared.helpers.fetch_sub(1, Ordering::SeqCst);
            }));
            return;
        }
        if is_stalled {
            self.helpers.fetch_sub(1, Ordering::SeqCst);
        }
        let unique = request.unique;
        channel.begin(unique, request.pid);
        self.server.serve(request, reply);
        channel.leave(unique);
    }
}

/// The text of a file in `/proc`.
pub(crate) fn read_text(path: &str) -> Result<String, Errno> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut text = Vec::new();
    let mut part = [0; 4096];
    loop {
        match rustix::io::read(&file, &mut part)? {
            0 => return Ok(String::from_utf8_lossy(&text).into_owned()),
            len => text.extend_from_slice(&part[..len]),
        }
    }
}
