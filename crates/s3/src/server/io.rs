//! A stream that fails when its peer does not take bytes.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// A fast peer gets no more credit than this: its speed is measured anew.
const EARNED_S_MAX: u64 = 3600;

/// Fails a write that makes no progress for `timeout`, and a write to a peer that stays below the least speed for
/// longer. Reads have their deadlines in the callers.
pub(super) struct TimedIo<S> {
    stream: S,
    timeout: Duration,
    bytes_per_s_min: u64,
    /// Start of the time in which the peer has not taken everything at once, and bytes that it took since.
    behind: Option<(Instant, u64)>,
    /// Set while a write waits.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> TimedIo<S> {
    pub(super) fn new(stream: S, timeout: Duration, bytes_per_s_min: u64) -> Self {
        Self { stream, timeout, bytes_per_s_min, behind: None, waiting: None }
    }

    fn check<T>(
        &mut self,
        result: Poll<io::Result<T>>,
        taken: impl Fn(&T) -> usize,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if let Poll::Ready(done) = &result {
            let has_waited = self.waiting.take().is_some();
            let bytes = done.as_ref().map_or(0, taken) as u64;
            self.behind = self.behind.filter(|_| has_waited).map(|(since, sum)| (since, sum + bytes));
            return result;
        }
        let now = Instant::now();
        let (since, sum) = *self.behind.get_or_insert((now, 0));
        let earned = Duration::from_secs((sum / self.bytes_per_s_min.max(1)).min(EARNED_S_MAX));
        let end = (now + self.timeout).min(since + self.timeout + earned);
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(end)));
        std::task::ready!(waiting.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer takes no bytes, or too few")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimedIo<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.check(result, |taken| *taken, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.check(result, |taken| *taken, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(context);
        self.check(result, |()| 0, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_shutdown(context);
        self.check(result, |()| 0, context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_takes_nothing_is_given_up() {
        let (stream, _peer) = tokio::io::duplex(16);
        let mut stream = TimedIo::new(stream, Duration::from_secs(30), 512);
        let error = stream.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    /// A peer that takes `step` bytes every `pause`; the answer has 100,000 bytes.
    async fn slow_peer(step: usize, pause: Duration) -> io::Result<()> {
        let (stream, mut peer) = tokio::io::duplex(step);
        let mut stream = TimedIo::new(stream, Duration::from_secs(30), 512);
        let taking = async {
            let mut bytes = vec![0; step];
            while peer.read_exact(&mut bytes).await.is_ok() {
                tokio::time::sleep(pause).await;
            }
        };
        tokio::select! {
            written = stream.write_all(&[0; 100_000]) => written,
            () = taking => panic!("the writer has not ended"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_takes_too_little_is_given_up_and_a_slow_one_is_not() {
        assert_eq!(slow_peer(100, Duration::from_secs(1)).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        slow_peer(1000, Duration::from_secs(1)).await.unwrap();
    }
}
