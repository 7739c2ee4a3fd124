//! A connection within a machine. A thread wakes for it only when there is something to read, or room that it waited for: other
//! streams wake it each time the other side has read.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

/// One end of a connection.
pub(super) struct LocalStream {
    fd: Arc<OwnedFd>,
    readable: AsyncFd<OwnedFd>,
    /// While a write waits for room.
    writable: Option<AsyncFd<OwnedFd>>,
}

/// A descriptor of its own, so that the two directions are watched one by one.
fn register(fd: &OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    let fd = fd.try_clone()?;
    // SAFETY: an `OwnedFd` always names the same open descriptor.
    #[allow(unsafe_code, reason = "the safe function is deprecated")]
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

impl LocalStream {
    /// Call this inside a runtime.
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let fd = Arc::new(OwnedFd::from(stream));
        let readable = register(&fd, Interest::READABLE)?;
        Ok(Self { fd, readable, writable: None })
    }

    /// The descriptor, for writes that do not wait.
    pub(super) fn fd(&self) -> Arc<OwnedFd> {
        self.fd.clone()
    }

    fn poll_writing(
        &mut self,
        context: &mut Context<'_>,
        write: impl Fn(&OwnedFd) -> Result<usize, Errno>,
    ) -> Poll<io::Result<usize>> {
        loop {
            match write(&self.fd) {
                Err(Errno::AGAIN) => {}
                Err(Errno::INTR) => continue,
                done => {
                    self.writable = None;
                    return Poll::Ready(Ok(done?));
                }
            }
            let waiting = match &mut self.writable {
                Some(waiting) => waiting,
                none => none.insert(register(&self.fd, Interest::WRITABLE)?),
            };
            ready!(waiting.poll_write_ready(context))?.clear_ready();
        }
    }
}

impl Drop for LocalStream {
    fn drop(&mut self) {
        // Others may have the descriptor for a while; the other side must not wait for them.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }
}

impl AsyncRead for LocalStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.readable.poll_read_ready(context))?;
            match rustix::io::read(&self.fd, buffer.initialize_unfilled()) {
                Ok(read) => {
                    buffer.advance(read);
                    return Poll::Ready(Ok(()));
                }
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }
}

impl AsyncWrite for LocalStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().poll_writing(context, |fd| rustix::io::write(fd, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().poll_writing(context, |fd| rustix::io::writev(fd, slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Write);
        Poll::Ready(Ok(()))
    }
}
