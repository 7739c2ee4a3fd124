//! One connection, with or without TLS, from its first byte to its end.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use hyper::Request;
use hyper::body::{Body as _, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};
use tokio_rustls::TlsAcceptor;

use super::io::TimedIo;
use super::strict::{StrictIo, Wire};
use super::{LEAVE_PAUSE, Limits, Phase};
use crate::gate::{Gate, LeftUnread, Origin};

/// First byte of a TLS record with a handshake (RFC 8446, section 5.1).
const TLS_HANDSHAKE: u8 = 22;
/// Bytes that a connection's headers and read buffer take at most.
const BUFFER_BYTES_MAX: usize = 128 << 10;
const HEADERS_MAX: usize = 128;

pub(super) struct Connection {
    pub(super) tls: TlsAcceptor,
    pub(super) http: Http,
}

/// The HTTP library and its limits for one connection.
pub(crate) struct Http {
    pub(crate) gate: Arc<Gate>,
    pub(crate) limits: Arc<Limits>,
    pub(crate) phase: watch::Receiver<Phase>,
    /// Notified when other connections need this one's slot.
    pub(crate) leave: Arc<Notify>,
    pub(crate) peer: SocketAddr,
}

impl Connection {
    pub(super) async fn serve(self, stream: TcpStream) {
        // Answers are written whole; Nagle's algorithm would only delay them.
        let _ = stream.set_nodelay(true);
        let mut first = [0];
        let Self { tls, http } = self;
        let timeout = http.limits.header_timeout;
        let (idle_timeout, rate) = (http.limits.idle_timeout, http.limits.body_bytes_per_s_min);
        let timed = |stream| TimedIo::new(stream, idle_timeout, rate);
        let spoken = tokio::select! {
            biased;
            spoken = tokio::time::timeout(timeout, stream.peek(&mut first)) => spoken,
            () = http.told_to_leave() => return,
        };
        match spoken {
            Ok(Ok(1)) if first[0] == TLS_HANDSHAKE => {
                let handshake = tls.accept(timed(stream));
                let shaken = tokio::select! {
                    biased;
                    shaken = tokio::time::timeout(timeout, handshake) => shaken,
                    () = http.leave.notified() => return,
                };
                match shaken {
                    Ok(Ok(stream)) => {
                        http.serve(stream, true).await;
                    }
                    Ok(Err(error)) => tracing::debug!(peer = %http.peer, %error, "TLS handshake failed"),
                    Err(_) => tracing::debug!(peer = %http.peer, "TLS handshake took too long"),
                }
            }
            Ok(Ok(1)) => {
                http.serve(timed(stream), false).await;
            }
            // The client closed the connection or sent nothing.
            _ => {}
        }
    }
}

impl Http {
    pub(crate) async fn serve<S>(mut self, stream: S, is_secure: bool)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let origin = Origin { ip: self.peer.ip(), is_secure };
        let (gate, limits) = (self.gate.clone(), self.limits.clone());
        let (wire, ids) = (Wire::new(), self.gate.clone());
        let mut io = StrictIo::new(stream, wire.clone(), move || ids.new_request_id());
        let service = service_fn(move |request: Request<Incoming>| {
            // Before the first await: the stream needs the length to read what comes next.
            let body_len = request.body().size_hint().exact();
            let (wire, answering) = (wire.clone(), wire.begin(body_len));
            let finisher = gate.finisher().clone();
            let (gate, limits) = (gate.clone(), limits.clone());
            async move {
                // A client that leaves before its request has a slot is not waited for.
                let slot = gate.slot(&request).await;
                let answer = gate.answer(request, origin, limits, slot);
                let mut response = finisher.run(answer).await;
                response.body_mut().keep(answering);
                if body_len.is_none() {
                    // The end of such a body is unknown here, and so is the start of the next head.
                    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                }
                if response.extensions().get::<LeftUnread>().is_some() {
                    wire.linger();
                }
                Ok::<_, Infallible>(response)
            }
        });
        let served = {
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(self.limits.header_timeout)
                .max_buf_size(BUFFER_BYTES_MAX)
                .max_headers(HEADERS_MAX)
                .serve_connection(TokioIo::new(&mut io), service);
            tokio::pin!(connection);
            tokio::select! {
                biased;
                served = &mut connection => served,
                () = self.asked_to_end() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            }
        };
        if let Err(error) = served {
            tracing::debug!(peer = %self.peer, %error, "S3 connection ended early");
        }
        io.linger().await;
    }

    /// Waits for a notice to leave. A new connection has a moment to send its request.
    async fn told_to_leave(&self) {
        tokio::time::sleep(LEAVE_PAUSE).await;
        self.leave.notified().await;
    }

    async fn asked_to_end(&mut self) {
        tokio::select! {
            _ = self.phase.changed() => {}
            () = self.leave.notified() => {}
        }
    }
}
