//! io_uring: one ring that belongs to the drive's thread.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::EventfdFlags;
use wire::drive::IoPath;

use super::{Device, DeviceFiles, Done, Op, ReadVia, Wake};
use crate::buffer::AlignedBuf;

/// Entries of the submission queue; more operations wait in memory.
const ENTRIES: u32 = 256;
/// User data of the read that waits for the wakeup descriptor; operation tokens start at 0 and never get there.
const WAKE_TOKEN: u64 = u64::MAX;

/// Whether the system allows io_uring.
///
/// # Errors
/// Why it does not.
pub fn io_uring_works() -> io::Result<()> {
    IoUring::new(1).map(drop)
}

enum Kind {
    Read(RawFd),
    Write(RawFd),
    Sync(RawFd),
    /// Descriptor and bytes.
    Punch(RawFd, u64),
}

/// An operation that the kernel works on. Its buffer stays here until the completion has arrived.
struct InFlight {
    kind: Kind,
    offset: u64,
    buffer: Option<AlignedBuf>,
    /// Bytes that earlier, short completions have moved.
    moved: usize,
}

/// A device served by one ring, used by the drive's thread only.
pub(crate) struct UringDevice {
    ring: IoUring,
    // Keeps the descriptors open while the kernel uses them.
    files: DeviceFiles,
    in_flight: HashMap<u64, InFlight>,
    /// Tokens of operations that found the submission queue full.
    waiting: VecDeque<u64>,
    wakeup: Arc<Wakeup>,
    /// Where the kernel puts the counter of the wakeup descriptor. Boxed: its address must not change.
    wake_count: Box<u64>,
    wake_armed: bool,
}

struct Wakeup {
    event: OwnedFd,
}

impl Wake for Wakeup {
    fn wake(&self) {
        // The write fails only if the counter overflows, and then the thread wakes up anyway.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

impl UringDevice {
    /// Sets up a ring for the calling thread, which must be the one that uses it.
    ///
    /// # Errors
    /// If the system forbids or lacks io_uring; the thread pool works instead.
    pub(crate) fn new(files: &DeviceFiles) -> io::Result<Self> {
        if files.direct.raw_fd().is_none() {
            return Err(io::Error::other("not a file of the kernel"));
        }
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(ENTRIES)
            // Kernels before 6.1 do not know these flags.
            .or_else(|_| IoUring::new(ENTRIES))?;
        if !ring.params().is_feature_ext_arg() {
            return Err(io::Error::other("waiting with a timeout needs Linux 5.11"));
        }
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self {
            ring,
            files: files.clone(),
            in_flight: HashMap::new(),
            waiting: VecDeque::new(),
            wakeup: Arc::new(Wakeup { event }),
            wake_count: Box::new(0),
            wake_armed: false,
        })
    }

    pub(crate) fn waker(&self) -> Arc<dyn Wake> {
        self.wakeup.clone()
    }

    fn entry(&mut self, token: u64) -> squeue::Entry {
        let operation = self.in_flight.get_mut(&token).expect("tokens are queued while in flight");
        let moved = operation.moved;
        let offset = operation.offset + moved as u64;
        let (start, len) = match &mut operation.buffer {
            Some(buffer) => (buffer[moved..].as_mut_ptr(), (buffer.len() - moved) as u32),
            None => (std::ptr::null_mut(), 0),
        };
        let entry = match operation.kind {
            Kind::Read(fd) => opcode::Read::new(types::Fd(fd), start, len).offset(offset).build(),
            Kind::Write(fd) => opcode::Write::new(types::Fd(fd), start, len).offset(offset).build(),
            Kind::Sync(fd) => opcode::Fsync::new(types::Fd(fd)).flags(types::FsyncFlags::DATASYNC).build(),
            Kind::Punch(fd, len_bytes) => opcode::Fallocate::new(types::Fd(fd), len_bytes)
                .offset(offset)
                .mode(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
                .build(),
        };
        entry.user_data(token)
    }

    fn arm_wakeup(&mut self) {
        let start = std::ptr::from_mut(self.wake_count.as_mut()).cast::<u8>();
        let entry = opcode::Read::new(types::Fd(self.wakeup.event.as_raw_fd()), start, 8).build();
        // SAFETY: the counter is boxed and lives until `drop` has seen this read complete.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(WAKE_TOKEN)) };
        self.wake_armed = pushed.is_ok();
    }

    fn fill_queue(&mut self) {
        if !self.wake_armed {
            self.arm_wakeup();
        }
        while let Some(token) = self.waiting.front().copied() {
            let entry = self.entry(token);
            // SAFETY: the buffer and descriptor of the operation stay in `in_flight` and `files` until its
            // completion has arrived; `drop` waits for all of them.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                return;
            }
            self.waiting.pop_front();
        }
    }

    fn enter(&mut self, want: usize) {
        match self.ring.submit_and_wait(want) {
            Ok(_) => {}
            // A signal arrived, or completions must be collected first: the caller's loop retries.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {}
            Err(error) => panic!("io_uring_enter cannot fail on a ring that was set up: {error}"),
        }
    }

    fn enter_for(&mut self, timeout: Duration) {
        let timespec = types::Timespec::from(timeout);
        let args = types::SubmitArgs::new().timespec(&timespec);
        let entered = self.ring.submitter().submit_with_args(1, &args);
        let quiet = [libc::ETIME, libc::EINTR, libc::EBUSY, libc::EAGAIN];
        match entered {
            Ok(_) => {}
            // The timeout has passed, or as in `enter`.
            Err(error) if error.raw_os_error().is_some_and(|code| quiet.contains(&code)) => {}
            Err(error) => panic!("io_uring_enter cannot fail on a ring that was set up: {error}"),
        }
    }

    fn reap(&mut self, done: &mut Vec<Done>) -> bool {
        let completions: Vec<(u64, i32)> =
            self.ring.completion().map(|completion| (completion.user_data(), completion.result())).collect();
        for (token, result) in &completions {
            if *token == WAKE_TOKEN {
                self.wake_armed = false;
            } else if let Some(one) = self.finish(*token, *result) {
                done.push(one);
            }
        }
        !completions.is_empty()
    }

    /// Ends an operation, or queues the rest of a short read or write.
    fn finish(&mut self, token: u64, result: i32) -> Option<Done> {
        let operation = self.in_flight.get_mut(&token).expect("the kernel completes what was submitted");
        let outcome = if result >= 0 {
            operation.moved += result as usize;
            let wanted = operation.buffer.as_ref().map_or(0, |buffer| buffer.len());
            if operation.moved < wanted && result > 0 {
                self.waiting.push_back(token);
                return None;
            }
            if operation.moved < wanted { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
        } else if matches!(-result, libc::EINTR | libc::EAGAIN) && !matches!(operation.kind, Kind::Sync(_)) {
            self.waiting.push_back(token);
            return None;
        } else {
            Err(io::Error::from_raw_os_error(-result))
        };
        let operation = self.in_flight.remove(&token).expect("it was there a moment ago");
        Some(Done { token, result: outcome, buffer: operation.buffer })
    }
}

impl Device for UringDevice {
    fn submit(&mut self, op: Op) {
        let descriptor = |via| self.files.for_read(via).raw_fd().expect("checked when the ring was set up");
        let (token, kind, offset, buffer) = match op {
            Op::Read { token, offset, buffer, via } => {
                (token, Kind::Read(descriptor(via)), offset, Some(buffer))
            }
            Op::Write { token, offset, buffer } => {
                (token, Kind::Write(descriptor(ReadVia::Direct)), offset, Some(buffer))
            }
            Op::Sync { token } => (token, Kind::Sync(descriptor(ReadVia::Direct)), 0, None),
            Op::Punch { token, offset, len_bytes } => {
                (token, Kind::Punch(descriptor(ReadVia::Direct), len_bytes), offset, None)
            }
        };
        self.in_flight.insert(token, InFlight { kind, offset, buffer, moved: 0 });
        self.waiting.push_back(token);
    }

    fn wait(&mut self, done: &mut Vec<Done>, timeout: Option<Duration>) {
        loop {
            self.fill_queue();
            match timeout {
                Some(timeout) => self.enter_for(timeout),
                None => self.enter(1),
            }
            if self.reap(done) || timeout.is_some() {
                return;
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        self.fill_queue();
        self.enter(0);
        self.reap(done);
    }

    fn io_path(&self) -> IoPath {
        IoPath::IoUring
    }
}

impl Drop for UringDevice {
    fn drop(&mut self) {
        // The kernel may still write into the buffers and the counter: wait for every completion.
        self.abandon_waiting();
        if self.wake_armed {
            self.wakeup.wake();
        }
        let mut done = Vec::new();
        while self.wake_armed || !self.in_flight.is_empty() {
            self.enter(1);
            self.reap(&mut done);
            self.abandon_waiting();
        }
    }
}

impl UringDevice {
    /// Drops operations that are queued in memory only: the kernel does not know them.
    fn abandon_waiting(&mut self) {
        for token in std::mem::take(&mut self.waiting) {
            self.in_flight.remove(&token);
        }
    }
}
