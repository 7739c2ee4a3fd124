//! Frames on their way out of a connection, in order. The thread that has a frame writes it at once if the connection takes it:
//! that spares a thread's waking. What does not fit is written by the task of the connection.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Buf, Bytes};
use rustix::io::Errno;
use tokio::io::{AsyncWrite, AsyncWriteExt, WriteHalf};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::Stream;
use crate::frame::Frame;

/// Most frames that leave together: two slices each, and sockets take 64 at once.
const BATCH_FRAMES: usize = 32;

/// A descriptor of a connection to which any thread may write. Writes never wait.
#[derive(Clone)]
pub(super) struct Direct(Arc<Shared>);

struct Shared {
    fd: Arc<OwnedFd>,
    /// Frames that the task of the connection has yet to write: later ones come after them.
    waiting: Mutex<usize>,
}

impl Direct {
    pub(super) fn new(fd: Arc<OwnedFd>) -> Self {
        Self(Arc::new(Shared { fd, waiting: Mutex::new(0) }))
    }

    fn waiting(&self) -> MutexGuard<'_, usize> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The rest of a frame, and its share of the memory for payloads.
struct Outgoing {
    head: Bytes,
    payload: Bytes,
    _memory: Option<OwnedSemaphorePermit>,
}

impl Outgoing {
    /// Takes `bytes` from the front, or all that is left. Returns how many it took.
    fn remove(&mut self, bytes: usize) -> usize {
        let of_head = bytes.min(self.head.len());
        let of_payload = (bytes - of_head).min(self.payload.len());
        self.head.advance(of_head);
        self.payload.advance(of_payload);
        of_head + of_payload
    }

    fn is_written(&self) -> bool {
        self.head.is_empty() && self.payload.is_empty()
    }

    /// Writes as much as the connection takes. Returns whether that is all.
    fn write(&mut self, fd: &OwnedFd) -> bool {
        loop {
            let slices = [IoSlice::new(&self.head), IoSlice::new(&self.payload)];
            match rustix::io::writev(fd, &slices) {
                Ok(written) => {
                    self.remove(written);
                    if self.is_written() {
                        return true;
                    }
                }
                Err(Errno::INTR) => {}
                // If the connection is broken, its task finds out.
                Err(_) => return false,
            }
        }
    }
}

/// Where frames go out.
#[derive(Clone)]
pub(super) struct Outbox {
    queue: mpsc::UnboundedSender<Outgoing>,
    direct: Option<Direct>,
}

/// The part of the task of the connection.
pub(super) struct Outlet {
    queue: mpsc::UnboundedReceiver<Outgoing>,
    direct: Option<Direct>,
}

pub(super) fn outbox(direct: Option<Direct>) -> (Outbox, Outlet) {
    let (sender, receiver) = mpsc::unbounded_channel();
    (Outbox { queue: sender, direct: direct.clone() }, Outlet { queue: receiver, direct })
}

impl Outbox {
    /// Sends a frame. If the connection has ended, that is lost: its calls are sent again on the next one.
    pub(super) fn send(&self, frame: &Frame) {
        self.send_with(frame, None);
    }

    /// As [`Outbox::send`], with a share of the memory for payloads that is given back when it has left.
    pub(super) fn send_with(&self, frame: &Frame, memory: Option<OwnedSemaphorePermit>) {
        let payload = frame.message.payload.clone();
        let mut outgoing = Outgoing { head: frame.head(), payload, _memory: memory };
        if let Some(direct) = &self.direct {
            let mut waiting = direct.waiting();
            if *waiting == 0 && outgoing.write(&direct.0.fd) {
                return;
            }
            *waiting += 1;
            // The lock keeps the order.
            let _ = self.queue.send(outgoing);
        } else {
            let _ = self.queue.send(outgoing);
        }
    }
}

/// Frames that leave together: small ones share a record of TLS, and a call of the system.
#[derive(Default)]
struct Batch(VecDeque<Outgoing>);

impl Batch {
    /// Writes as much as the connection takes.
    async fn write(&mut self, to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        let parts = self.0.iter().flat_map(|frame| [&frame.head, &frame.payload]);
        let slices: Vec<_> = parts.filter(|part| !part.is_empty()).map(|part| IoSlice::new(part)).collect();
        let written = to.write_vectored(&slices).await?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.remove(written);
        Ok(())
    }

    /// These bytes are written. Frames of which nothing is left give their memory back.
    fn remove(&mut self, mut bytes: usize) {
        while let Some(frame) = self.0.front_mut() {
            bytes -= frame.remove(bytes);
            if !frame.is_written() {
                break;
            }
            self.0.pop_front();
        }
    }
}

impl Outlet {
    /// Writes what threads did not. A side that takes nothing for `patience` ends the connection.
    ///
    /// # Errors
    /// If the connection fails.
    pub(super) async fn run(mut self, mut to: WriteHalf<impl Stream>, patience: Duration) -> io::Result<()> {
        let mut batch = Batch::default();
        while let Some(first) = self.queue.recv().await {
            batch.0.push_back(first);
            while batch.0.len() < BATCH_FRAMES
                && let Ok(next) = self.queue.try_recv()
            {
                batch.0.push_back(next);
            }
            let frames = batch.0.len();
            while !batch.0.is_empty() {
                tokio::time::timeout(patience, batch.write(&mut to)).await??;
            }
            // TLS keeps what the connection did not take.
            tokio::time::timeout(patience, to.flush()).await??;
            if let Some(direct) = &self.direct {
                *direct.waiting() -= frames;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, BufStream, split};

    use super::*;
    use crate::frame::{FrameKind, read_frame, write_frame};
    use crate::message::Packed;

    const PATIENCE: Duration = Duration::from_secs(5);

    fn frame(call: u64) -> Frame {
        let of = |len: usize| Bytes::from(vec![call as u8; len]);
        let message = Packed { code: 1, body: of(call as usize % 50), payload: of(call as usize * 7 % 5000) };
        Frame { kind: FrameKind::Call, service: 7, call, message }
    }

    fn block_on<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async { tokio::time::timeout(PATIENCE * 4, work).await.expect("nothing hangs") })
    }

    #[test]
    fn frames_that_leave_together_arrive_one_by_one() {
        block_on(async {
            // Takes a few bytes at a time, so that writes end anywhere.
            let (here, mut there) = tokio::io::duplex(33);
            let (out, outlet) = outbox(None);
            (0..500).for_each(|call| out.send(&frame(call)));
            drop(out);
            let read = async {
                for call in 0..500 {
                    assert_eq!(read_frame(&mut there).await.unwrap(), Some(frame(call)));
                }
            };
            let (written, ()) = tokio::join!(outlet.run(split(here).1, PATIENCE), read);
            written.unwrap();
        });
    }

    #[test]
    fn no_part_of_a_frame_waits_in_the_stream_for_the_next_one() {
        block_on(async {
            // Keeps all until it is told to send it, as TLS keeps what does not fit.
            let (here, mut there) = tokio::io::duplex(1 << 20);
            let mut here = BufStream::new(here);
            write_frame(&mut here, &frame(3)).await.unwrap();
            assert_eq!(read_frame(&mut there).await.unwrap(), Some(frame(3)));
            let (out, outlet) = outbox(None);
            out.send(&frame(4));
            tokio::select! {
                _ = outlet.run(split(here).1, PATIENCE) => panic!("the outbox is there"),
                read = read_frame(&mut there) => assert_eq!(read.unwrap(), Some(frame(4))),
            }
        });
    }

    #[test]
    fn a_side_that_takes_nothing_ends_the_connection_and_a_slow_one_does_not() {
        let run = |reads: usize| {
            block_on(async {
                let (here, mut there) = tokio::io::duplex(1);
                let (out, outlet) = outbox(None);
                out.send(&frame(1));
                drop(out);
                let slow = async {
                    for _ in 0..reads {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                        there.read_u8().await.unwrap();
                    }
                };
                tokio::join!(outlet.run(split(here).1, Duration::from_millis(300)), slow).0
            })
        };
        let bytes = frame(1).head().len() + frame(1).message.payload.len();
        run(bytes).unwrap();
        assert_eq!(run(bytes / 2).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
