//! Frames on their way out of a connection, in order. The thread that has a frame writes it at once if the connection takes it:
//! that spares a thread's waking. What does not fit is written by the task of the connection.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Buf, Bytes};
use rustix::io::Errno;
use tokio::io::AsyncWriteExt;
use tokio::io::WriteHalf;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::Stream;
use crate::frame::Frame;

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
    /// Writes as much as the connection takes. Returns whether that is all.
    fn write(&mut self, fd: &OwnedFd) -> bool {
        loop {
            let slices = [IoSlice::new(&self.head), IoSlice::new(&self.payload)];
            match rustix::io::writev(fd, &slices) {
                Ok(written) => {
                    let of_head = written.min(self.head.len());
                    self.head.advance(of_head);
                    self.payload.advance(written - of_head);
                    if self.head.is_empty() && self.payload.is_empty() {
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

impl Outlet {
    /// Writes what threads did not. A side that takes nothing for `patience` ends the connection.
    ///
    /// # Errors
    /// If the connection fails.
    pub(super) async fn run(mut self, mut to: WriteHalf<impl Stream>, patience: Duration) -> io::Result<()> {
        while let Some(Outgoing { head, payload, _memory }) = self.queue.recv().await {
            let mut bytes = head.chain(payload);
            tokio::time::timeout(patience, to.write_all_buf(&mut bytes)).await??;
            if let Some(direct) = &self.direct {
                *direct.waiting() -= 1;
            }
        }
        Ok(())
    }
}
