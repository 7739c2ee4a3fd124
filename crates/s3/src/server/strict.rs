//! The byte stream of a connection, between the socket and the HTTP library: heads of requests are parsed strictly, and
//! refusals by the library are replaced by S3 errors.
//!
//! The library writes a bare status for a head that it cannot parse, without calling the service. So bytes that are
//! written while no answer is under way, and none waits to be flushed, are such a refusal.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

/// How long a refused client may still send, so that it reads the error and does not see a closed connection.
const LINGER_TIME_MAX: Duration = Duration::from_secs(2);
/// Bytes read and dropped at a time while the connection lingers.
const LINGER_BYTES: usize = 16 << 10;

/// Position in the head of a request.
#[derive(Debug, Default)]
struct Head {
    /// Bytes of the current line without its line end.
    line_len: usize,
    /// The last byte was a carriage return.
    after_cr: bool,
    /// A line that is not empty has come.
    has_begun: bool,
}

impl Head {
    /// Reads on. Returns the number of bytes that belong to the head, once it ends. A line feed without a carriage
    /// return is replaced by a zero byte, which no head may contain.
    fn read(&mut self, bytes: &mut [u8], has_bare_line: &mut bool) -> Option<usize> {
        for (at, byte) in bytes.iter_mut().enumerate() {
            let after_cr = std::mem::replace(&mut self.after_cr, *byte == b'\r');
            match *byte {
                b'\r' => {}
                b'\n' if after_cr => {
                    if self.line_len == 0 && self.has_begun {
                        return Some(at + 1);
                    }
                    self.line_len = 0;
                }
                b'\n' => {
                    *byte = 0;
                    *has_bare_line = true;
                }
                _ => {
                    self.line_len += 1;
                    self.has_begun = true;
                }
            }
        }
        None
    }
}

/// What the client sends next.
#[derive(Debug)]
enum Next {
    Head(Head),
    /// A head is complete; the service will tell the length of the body.
    Unknown,
    /// The number of bytes that are left of a body.
    Body(u64),
    /// A body of unknown length: no further request follows it.
    Endless,
}

#[derive(Debug)]
struct State {
    next: Next,
    has_bare_line: bool,
    /// Answers that the library has not sent completely.
    answering: usize,
    /// All bytes of answers were flushed to the socket.
    is_flushed: bool,
    /// The client may still be sending when the connection ends.
    lingers: bool,
}

impl State {
    /// How many of these bytes the library may have now: it never gets a head and body bytes together.
    fn pass(&mut self, bytes: &mut [u8]) -> usize {
        let len = bytes.len();
        match &mut self.next {
            Next::Unknown | Next::Endless => len,
            Next::Body(left) => {
                let passing = usize::try_from(*left).unwrap_or(usize::MAX).min(len);
                *left -= passing as u64;
                if *left == 0 {
                    self.next = Next::Head(Head::default());
                }
                passing
            }
            Next::Head(head) => match head.read(bytes, &mut self.has_bare_line) {
                Some(head_len) => {
                    self.next = Next::Unknown;
                    head_len
                }
                None => len,
            },
        }
    }
}

/// State shared by the service and the byte stream of a connection.
#[derive(Debug)]
pub(super) struct Wire(Mutex<State>);

impl Wire {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(State {
            next: Next::Head(Head::default()),
            has_bare_line: false,
            answering: 0,
            is_flushed: true,
            lingers: false,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// Begins a request, with the length of its body if it is known.
    pub(super) fn begin(self: &Arc<Self>, body_len: Option<u64>) -> Answering {
        let mut state = self.state();
        state.answering += 1;
        state.is_flushed = false;
        state.next = match body_len {
            Some(0) => Next::Head(Head::default()),
            Some(len) => Next::Body(len),
            None => Next::Endless,
        };
        drop(state);
        Answering(self.clone())
    }

    /// The client may still be sending a body that has no reader.
    pub(super) fn linger(&self) {
        self.state().lingers = true;
    }
}

/// An answer is under way until this is dropped.
#[derive(Debug)]
pub(crate) struct Answering(Arc<Wire>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.state().answering -= 1;
    }
}

/// The stream of a connection.
pub(super) struct StrictIo<S> {
    stream: S,
    wire: Arc<Wire>,
    /// Makes request ids for refusals.
    make_id: Box<dyn Fn() -> String + Send>,
    /// Bytes after the current head or body, for later.
    held: BytesMut,
    /// The bytes that replace the library's refusal.
    refusal: Bytes,
}

impl<S> StrictIo<S> {
    pub(super) fn new(stream: S, wire: Arc<Wire>, make_id: impl Fn() -> String + Send + 'static) -> Self {
        let (held, refusal) = (BytesMut::new(), Bytes::new());
        Self { stream, wire, make_id: Box::new(make_id), held, refusal }
    }

    /// Replaces a refusal by the library. Returns whether `written` was one.
    fn take_refusal(&mut self, written: &[u8]) -> bool {
        let mut state = self.wire.state();
        if state.answering > 0 || !state.is_flushed {
            return false;
        }
        let status = written.strip_prefix(b"HTTP/1.1 ").and_then(|rest| rest.get(..3));
        let Some(status) = status.and_then(|digits| std::str::from_utf8(digits).ok()) else { return false };
        self.refusal = refusal(status, state.has_bare_line, &(self.make_id)()).into();
        state.lingers = true;
        true
    }
}

/// The answer to a request whose head cannot be read.
fn refusal(status: &str, has_bare_line: bool, request_id: &str) -> String {
    let (status, code, message) = match status {
        "414" => (
            "414 URI Too Long",
            "InvalidURI",
            "The address of the request is too long: it has at most 65,534 bytes.",
        ),
        "431" => (
            "431 Request Header Fields Too Large",
            "RequestHeaderSectionTooLarge",
            "Your request header section exceeds the maximum allowed size: 128 headers with 128 KiB.",
        ),
        _ if has_bare_line => (
            "400 Bad Request",
            "BadRequest",
            "A line of the request's head ends without a carriage return before its line feed.",
        ),
        _ => ("400 Bad Request", "BadRequest", "An error occurred when parsing the HTTP request."),
    };
    let document = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>{message}</Message>\
         <RequestId>{request_id}</RequestId></Error>"
    );
    format!(
        "HTTP/1.1 {status}\r\nServer: Forebay\r\nx-amz-request-id: {request_id}\r\nContent-Type: application/xml\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{document}",
        document.len()
    )
}

impl<S: AsyncRead + AsyncWrite + Unpin> StrictIo<S> {
    /// At the end of a connection: waits up to [`LINGER_TIME_MAX`] for the client to read the last answer.
    pub(super) async fn linger(&mut self) {
        if !self.wire.state().lingers {
            return;
        }
        let reading = async {
            self.flush().await?;
            self.stream.shutdown().await?;
            let mut dropped = vec![0; LINGER_BYTES];
            while self.stream.read(&mut dropped).await? > 0 {}
            io::Result::Ok(())
        };
        // The connection is closed next, also after a timeout.
        let _ = tokio::time::timeout(LINGER_TIME_MAX, reading).await;
    }

    fn poll_refusal(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.refusal.has_remaining() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.refusal))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.refusal.advance(written);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StrictIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        if self.held.is_empty() {
            ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        } else {
            let len = buffer.remaining().min(self.held.len());
            buffer.put_slice(&self.held.split_to(len));
        }
        let came = &mut buffer.filled_mut()[before..];
        if came.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let passing = self.wire.state().pass(came);
        if passing < came.len() {
            let mut held = BytesMut::from(&came[passing..]);
            held.extend_from_slice(&self.held);
            self.held = held;
            buffer.set_filled(before + passing);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for StrictIo<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.take_refusal(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Some(first) = slices.first()
            && self.take_refusal(first)
        {
            return Poll::Ready(Ok(slices.iter().map(|slice| slice.len()).sum()));
        }
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_refusal(context))?;
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        let mut state = self.wire.state();
        state.is_flushed = state.answering == 0;
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_refusal(context))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends in pieces of `step` bytes; returns what the library gets before the service is called for the first time.
    async fn read_head(sent: &str, step: usize) -> (String, bool) {
        let (stream, mut peer) = tokio::io::duplex(step);
        let wire = Wire::new();
        let mut io = StrictIo::new(stream, wire.clone(), String::new);
        let sent = sent.as_bytes().to_vec();
        let sending = tokio::spawn(async move {
            let _ = peer.write_all(&sent).await;
        });
        let (mut head, mut buffer) = (Vec::new(), [0; 64]);
        while !matches!(wire.state().next, Next::Unknown) {
            match io.read(&mut buffer).await.unwrap() {
                0 => break,
                len => head.extend_from_slice(&buffer[..len]),
            }
        }
        drop(io);
        sending.await.unwrap();
        let has_bare_line = wire.state().has_bare_line;
        (String::from_utf8(head).unwrap(), has_bare_line)
    }

    #[tokio::test]
    async fn a_head_comes_alone_and_bare_line_feeds_spoil_it() {
        for step in [1, 3, 1000] {
            let get = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
            assert_eq!(read_head(&format!("{get}body\nand more"), step).await, (get.to_owned(), false));
            let led = format!("\r\n{get}");
            assert_eq!(read_head(&format!("{led}{get}"), step).await, (led, false));
            let (head, has_bare_line) =
                read_head("GET / HTTP/1.1\r\nHost: a\nX-Evil: 1\r\n\r\nbody\n", step).await;
            assert_eq!(head, "GET / HTTP/1.1\r\nHost: a\0X-Evil: 1\r\n\r\n");
            assert!(has_bare_line);
        }
    }

    #[tokio::test]
    async fn bodies_pass_as_they_are_and_the_next_head_is_read_strictly() {
        let (stream, mut peer) = tokio::io::duplex(1000);
        let wire = Wire::new();
        let mut io = StrictIo::new(stream, wire.clone(), String::new);
        peer.write_all(b"PUT / HTTP/1.1\r\n\r\na\nb\ncGET / HTTP/1.1\n\r\n").await.unwrap();
        let mut buffer = [0; 1000];
        let mut next = async |expected: &[u8]| {
            let len = io.read(&mut buffer).await.unwrap();
            assert_eq!(&buffer[..len], expected);
        };
        next(b"PUT / HTTP/1.1\r\n\r\n").await;
        let _answering = wire.begin(Some(5));
        next(b"a\nb\nc").await;
        next(b"GET / HTTP/1.1\0\r\n").await;
        assert!(wire.state().has_bare_line);
    }

    #[tokio::test]
    async fn only_what_the_library_writes_by_itself_is_a_refusal() {
        let (stream, mut peer) = tokio::io::duplex(10_000);
        let wire = Wire::new();
        let mut io = StrictIo::new(stream, wire.clone(), || "ID".to_owned());
        let answering = wire.begin(Some(0));
        let likeness = b"HTTP/1.1 400 Bad Request\r\n\r\n";
        io.write_all(likeness).await.unwrap();
        io.flush().await.unwrap();
        io.write_all(likeness).await.unwrap();
        drop(answering);
        io.write_all(likeness).await.unwrap();
        io.flush().await.unwrap();
        let mut got = vec![0; 3 * likeness.len()];
        peer.read_exact(&mut got).await.unwrap();
        assert_eq!(got, likeness.repeat(3));
        io.write_all(b"HTTP/1.1 431 Request Header Fields Too Large\r\n\r\n").await.unwrap();
        io.shutdown().await.unwrap();
        let mut got = String::new();
        peer.read_to_string(&mut got).await.unwrap();
        assert!(got.starts_with("HTTP/1.1 431 ") && got.contains("x-amz-request-id: ID\r\n"), "{got}");
        assert!(got.contains("<Code>RequestHeaderSectionTooLarge</Code>"), "{got}");
        assert!(got.ends_with("<RequestId>ID</RequestId></Error>"), "{got}");
    }
}
