//! Ways around: a node that is not reached directly is reached through a third one. That passes bytes on and cannot read them: TLS goes
//! from end to end, inside the connection to the third.
//!
//! The side that wants a way connects with the protocol `forebay-way/1` and sends the number of the node that it wants (u32, little
//! endian). The answer is one byte: 1 if bytes go there and back from now on, 0 if that node is not reached from there either.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use base::NodeId;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::sync::watch;

use super::{SILENCE, Stream};
use crate::BoxFuture;

/// How long the third node may take to reach the other.
const REACH: Duration = Duration::from_secs(1);
/// How long the answer may take.
const ANSWER: Duration = Duration::from_secs(2);
/// A way on which nothing goes for so long has ended: both ends give signs of life each second.
const IDLE: Duration = SILENCE.saturating_mul(3);
/// Bytes that are passed on at once.
const BUFFER_BYTES: usize = 64 << 10;

/// Asks for the way to a node.
pub(super) async fn ask(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), node: NodeId) -> io::Result<()> {
    let answer = async {
        stream.write_u32_le(node.0).await?;
        stream.flush().await?;
        stream.read_u8().await
    };
    match tokio::time::timeout(ANSWER, answer).await?? {
        1 => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::HostUnreachable, "the node is not reached from there either")),
    }
}

/// Leads the other side to the node that it names.
pub(super) async fn lead(mut from: impl Stream, addresses: impl Fn(NodeId) -> Vec<String>) -> io::Result<()> {
    let node = NodeId(tokio::time::timeout(ANSWER, from.read_u32_le()).await??);
    let Some(to) = reach(addresses(node)).await else {
        from.write_u8(0).await?;
        return from.shutdown().await;
    };
    from.write_u8(1).await?;
    from.flush().await?;
    let (from_there, to_there) = tokio::io::split(to);
    let (from_here, to_here) = tokio::io::split(from);
    // When one direction ends, so does the other.
    tokio::select! {
        passed = pass(from_here, to_there) => passed,
        passed = pass(from_there, to_here) => passed,
    }
}

async fn reach(addresses: Vec<String>) -> Option<TcpStream> {
    for address in addresses {
        if let Ok(Ok(stream)) = tokio::time::timeout(REACH, TcpStream::connect(&address)).await
            && stream.set_nodelay(true).is_ok()
        {
            return Some(stream);
        }
    }
    None
}

async fn pass(mut from: ReadHalf<impl Stream>, mut to: WriteHalf<impl Stream>) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let count = tokio::time::timeout(IDLE, from.read(&mut buffer)).await??;
        if count == 0 {
            return to.shutdown().await;
        }
        let written = async {
            to.write_all(&buffer[..count]).await?;
            to.flush().await
        };
        tokio::time::timeout(IDLE, written).await??;
    }
}

/// A stream that ends when its node is reached directly again.
pub(super) struct Detour<T> {
    stream: T,
    back: BoxFuture<'static, ()>,
    is_over: bool,
}

impl<T> Detour<T> {
    /// It ends at the next change of `back`.
    pub(super) fn new(stream: T, mut back: watch::Receiver<u64>) -> Self {
        let back = Box::pin(async move {
            if back.changed().await.is_err() {
                // The fabric is gone, and so will its connections be.
                std::future::pending().await
            }
        });
        Self { stream, back, is_over: false }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Detour<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.is_over = self.is_over || self.back.as_mut().poll(context).is_ready();
        if self.is_over {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Detour<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
