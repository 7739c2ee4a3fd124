//! FUSE over io_uring: requests come as completions of a ring for each CPU, and replies leave with the wish for the next
//! request, so that one system call does both.
//!
//! A ring belongs to one thread, which alone submits to it. Each of its slots has buffers. They belong to the kernel while
//! the slot waits for a request, and then to the thread that answers the request. The kernel needs rings of all CPUs before
//! it sends anything. Interrupts and forgotten references still come from `/dev/fuse`.

use std::cell::UnsafeCell;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use io_uring::squeue::Entry128;
use io_uring::{IoUring, cqueue, opcode, types};
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use crate::abi::{IN_HEADER_BYTES, OUT_HEADER_BYTES, Out};
use crate::channel::{Channel, Parts};
use crate::interrupt::Interrupts;
use crate::session::Shared;

/// Requests under way at once on each CPU. More wait in the kernel.
const DEPTH: usize = 32;

/// `struct fuse_uring_req_header`: a header, the structure of the kind of request, and the state of the slot.
const HEADER_BYTES: usize = 288;
const OP_AT: usize = 128;
const OP_BYTES: usize = 128;
const COMMIT_ID_AT: usize = 264;
const PAYLOAD_LEN_AT: usize = 272;

/// Commands to the kernel.
const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;

/// Pause after an error of a ring.
const PAUSE: Duration = Duration::from_millis(100);

/// User data of the read that waits for answers from other threads.
const WAKE: u64 = u64::MAX;

/// The buffers of a slot.
struct Buffers {
    header: Box<[u8]>,
    payload: Box<[u8]>,
}

struct Slot {
    buffers: UnsafeCell<Buffers>,
    /// The request in it.
    unique: AtomicU64,
}

// SAFETY: the buffers of a slot are used by one thread at a time: by the thread of the ring from the completion that
// brings a request until it is parsed, and by the one that answers it, which is the only one by `Interrupts::end`, until it
// adds the slot to `answered`, under a lock.
unsafe impl Sync for Slot {}

// SAFETY: nobody reads `wakeups`, and only the kernel writes to it.
unsafe impl Sync for Ring {}

/// What a ring shares with those who answer its requests.
pub(crate) struct Ring {
    slots: Vec<Slot>,
    /// Slots with an answer.
    answered: Mutex<Vec<usize>>,
    wakeup: OwnedFd,
    /// Where the kernel puts the counter of `wakeup`. It lives as long as those who write to that.
    wakeups: UnsafeCell<u64>,
    /// The thread that submits.
    thread: Mutex<Option<ThreadId>>,
}

impl Ring {
    fn new(payload_bytes: usize) -> Result<Self, Errno> {
        let slot = |_| Slot {
            buffers: UnsafeCell::new(Buffers {
                header: vec![0; HEADER_BYTES].into(),
                payload: vec![0; payload_bytes].into(),
            }),
            unique: AtomicU64::new(0),
        };
        Ok(Self {
            slots: (0..DEPTH).map(slot).collect(),
            answered: Mutex::default(),
            wakeup: rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?,
            wakeups: UnsafeCell::new(0),
            thread: Mutex::default(),
        })
    }

    /// Answers the request in a slot. Returns whether it is still there.
    pub(crate) fn answer(&self, index: usize, unique: u64, error: i32, parts: Parts<'_>) -> bool {
        let slot = &self.slots[index];
        if slot.unique.compare_exchange(unique, 0, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return false;
        }
        // SAFETY: see `Slot`. The exchange above succeeds once for each request.
        let buffers = unsafe { &mut *slot.buffers.get() };
        let mut len = 0;
        parts.for_each(|part| {
            let end = (len + part.len()).min(buffers.payload.len());
            buffers.payload[len..end].copy_from_slice(&part[..end - len]);
            len = end;
        });
        let mut header = Out(Vec::with_capacity(OUT_HEADER_BYTES));
        header.u32((OUT_HEADER_BYTES + len) as u32).i32(error).u64(unique);
        buffers.header[..OUT_HEADER_BYTES].copy_from_slice(&header.0);
        buffers.header[PAYLOAD_LEN_AT..PAYLOAD_LEN_AT + 4].copy_from_slice(&(len as u32).to_ne_bytes());
        self.answered.lock().unwrap_or_else(PoisonError::into_inner).push(index);
        let submits = *self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if submits != Some(std::thread::current().id()) {
            // It fails only if the counter overflows, and then the thread wakes up anyway.
            let _ = rustix::io::write(&self.wakeup, &1u64.to_ne_bytes());
        }
        true
    }
}

/// A command to the kernel: `struct io_uring_sqe` of 128 bytes. The library's own builder has no length, which a
/// registration needs.
fn command(
    device: i32,
    operation: u32,
    iovecs: &[libc::iovec],
    commit_id: u64,
    queue: u16,
    user_data: u64,
) -> Entry128 {
    const OPCODE: u8 = 46;
    let mut entry = [0u8; 128];
    let mut put = |at: usize, bytes: &[u8]| entry[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &[OPCODE]);
    put(4, &device.to_ne_bytes());
    put(8, &operation.to_ne_bytes());
    if !iovecs.is_empty() {
        put(16, &(iovecs.as_ptr() as u64).to_ne_bytes());
        put(24, &(iovecs.len() as u32).to_ne_bytes());
    }
    put(32, &user_data.to_ne_bytes());
    put(56, &commit_id.to_ne_bytes());
    put(64, &queue.to_ne_bytes());
    // SAFETY: the type is the structure of the kernel, of integers, and has its size.
    unsafe { std::mem::transmute::<[u8; 128], Entry128>(entry) }
}

/// A ring that was set up, before its thread runs.
pub(crate) struct Queue {
    number: u16,
    ring: Arc<Ring>,
    channels: Vec<Arc<Channel>>,
}

/// The number of CPUs that the machine may have: the kernel wants a ring for each.
fn possible_cpus() -> Result<u16, Errno> {
    let text = crate::session::read_text("/sys/devices/system/cpu/possible")?;
    let last = text.trim().rsplit([',', '-']).next().and_then(|last| last.parse::<u16>().ok());
    last.map(|last| last + 1).ok_or(Errno::INVAL)
}

/// Prepares a queue for each CPU.
///
/// # Errors
/// Without io_uring, or without memory.
pub(crate) fn queues(payload_bytes: usize, interrupts: &Arc<Interrupts>) -> Result<Vec<Queue>, Errno> {
    // Whether the system allows rings at all: later there is no way back.
    new_ring().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOSYS))?;
    let queue = |number| {
        let ring = Arc::new(Ring::new(payload_bytes)?);
        let channels =
            (0..DEPTH).map(|index| Channel::of_slot(ring.clone(), index, interrupts.clone())).collect();
        Ok(Queue { number, ring, channels })
    };
    (0..possible_cpus()?).map(queue).collect()
}

type Submitting = IoUring<Entry128, cqueue::Entry>;

fn new_ring() -> std::io::Result<Submitting> {
    IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(2 * DEPTH as u32)
}

impl Queue {
    pub(crate) fn channels(&self) -> &[Arc<Channel>] {
        &self.channels
    }

    /// Serves requests until the filesystem is unmounted. `ready` gets the result of the registration.
    pub(crate) fn run(self, device: &impl AsFd, shared: &Arc<Shared>, ready: impl FnOnce(Result<(), Errno>)) {
        // Elsewhere, each request of a program that waits for it would wake another CPU: half as many a second.
        let mut cpu = rustix::thread::CpuSet::new();
        cpu.set(self.number.into());
        // A CPU that is not there yet: its requests will come from others.
        let _ = rustix::thread::sched_setaffinity(None, &cpu);
        *self.ring.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::thread::current().id());
        let device = device.as_fd().as_raw_fd();
        let mut submitting = match self.register(device) {
            Ok(submitting) => submitting,
            Err(error) => return ready(Err(error)),
        };
        ready(Ok(()));
        let mut alive = DEPTH;
        while alive > 0 {
            match submitting.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
                Err(error) => {
                    // Without memory, say. Nobody else can serve the requests of this CPU.
                    tracing::error!(%error, cpu = self.number, "a ring of the mount does not work, trying again");
                    std::thread::park_timeout(PAUSE);
                }
            }
            let done: Vec<(u64, i32)> =
                submitting.completion().map(|entry| (entry.user_data(), entry.result())).collect();
            let mut is_woken = false;
            for (user_data, result) in done {
                match user_data {
                    WAKE => is_woken = true,
                    // The filesystem is not mounted any more.
                    _ if result < 0 => alive -= 1,
                    index => self.serve(index as usize, shared),
                }
            }
            self.commit(device, &mut submitting);
            if is_woken {
                self.listen(&mut submitting);
            }
        }
    }

    fn register(&self, device: i32) -> Result<Submitting, Errno> {
        let failed = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        let mut submitting = new_ring().map_err(failed)?;
        let iovecs: Vec<[libc::iovec; 2]> = (self.ring.slots.iter())
            .map(|slot| {
                // SAFETY: nobody else uses the buffers yet.
                let buffers = unsafe { &mut *slot.buffers.get() };
                [&mut buffers.header, &mut buffers.payload]
                    .map(|buffer| libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() })
            })
            .collect();
        for (index, iovecs) in iovecs.iter().enumerate() {
            push(&mut submitting, &command(device, REGISTER, iovecs, 0, self.number, index as u64));
        }
        self.listen(&mut submitting);
        submitting.submit().map_err(failed)?;
        let refused = submitting.completion().find(|entry| entry.user_data() != WAKE && entry.result() < 0);
        match refused {
            Some(entry) => Err(Errno::from_raw_os_error(-entry.result())),
            None => Ok(submitting),
        }
    }

    /// Waits for answers of other threads.
    fn listen(&self, submitting: &mut Submitting) {
        let fd = types::Fd(self.ring.wakeup.as_raw_fd());
        let read = opcode::Read::new(fd, self.ring.wakeups.get().cast(), 8).build().user_data(WAKE);
        push(submitting, &read.into());
    }

    /// Sends the answers, and asks for the next requests.
    fn commit(&self, device: i32, submitting: &mut Submitting) {
        let answered =
            std::mem::take(&mut *self.ring.answered.lock().unwrap_or_else(PoisonError::into_inner));
        for index in answered {
            // SAFETY: see `Slot`: the one that answered has given it back.
            let header = unsafe { &(*self.ring.slots[index].buffers.get()).header };
            let commit_id = word(header, COMMIT_ID_AT);
            let entry = command(device, COMMIT_AND_FETCH, &[], commit_id, self.number, index as u64);
            push(submitting, &entry);
        }
    }

    fn serve(&self, index: usize, shared: &Arc<Shared>) {
        let slot = &self.ring.slots[index];
        // SAFETY: see `Slot`: the completion has given the buffers to this thread.
        let Buffers { header, payload } = unsafe { &*slot.buffers.get() };
        let payload_len = word(header, PAYLOAD_LEN_AT) as u32 as usize;
        let whole_len = word(header, 0) as u32 as usize;
        let unique = word(header, 8);
        slot.unique.store(unique, Ordering::Release);
        let op_len = whole_len.saturating_sub(IN_HEADER_BYTES + payload_len).min(OP_BYTES);
        let mut message = BytesMut::with_capacity(IN_HEADER_BYTES + op_len + payload_len);
        message.put_slice(&header[..IN_HEADER_BYTES]);
        message.put_slice(&header[OP_AT..OP_AT + op_len]);
        message.put_slice(payload.get(..payload_len).unwrap_or_default());
        shared.serve_message(&self.channels[index], &Bytes::from(message));
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].try_into().map_or(0, u64::from_ne_bytes)
}

fn push(submitting: &mut Submitting, entry: &Entry128) {
    // SAFETY: commands refer to `iovecs`, which outlive their submission, and to buffers of the `Ring`, which outlives that of the
    // kernel: the thread that drops the latter has the former.
    while unsafe { submitting.submission().push(entry) }.is_err() {
        // There are more entries than slots, so that this is rare.
        let _ = submitting.submit();
    }
}
