//! One connection: TLS or not, HTTP/1.1 or 2, and its end.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};
use tokio_rustls::TlsAcceptor;

use super::io::TimedIo;
use super::{Limits, Phase};
use crate::gate::{Gate, Origin};

/// First byte of a TLS record with a handshake (RFC 8446, section 5.1).
const TLS_HANDSHAKE: u8 = 22;
/// Bytes that a connection's headers and read buffer take at most.
const BUFFER_BYTES_MAX: usize = 128 << 10;
const HEADERS_MAX: usize = 128;
/// HTTP/2: requests at once on a connection, and bytes of their headers.
const STREAMS_MAX: u32 = 64;
const HEADER_LIST_BYTES_MAX: u32 = 64 << 10;
/// HTTP/2: bytes that a client may send ahead, for each request and for all.
const WINDOW_BYTES: u32 = 128 << 10;
const WINDOWS_BYTES: u32 = 256 << 10;

pub(super) struct Connection {
    pub(super) tls: TlsAcceptor,
    pub(super) http: Http,
}

/// What speaks HTTP on it.
pub(crate) struct Http {
    pub(crate) gate: Arc<Gate>,
    pub(crate) limits: Arc<Limits>,
    pub(crate) phase: watch::Receiver<Phase>,
    /// Others need its place.
    pub(crate) leave: Arc<Notify>,
    pub(crate) peer: SocketAddr,
}

impl Connection {
    pub(super) async fn serve(self, stream: TcpStream) {
        // Answers are written whole; waiting to fill a segment only delays them.
        let _ = stream.set_nodelay(true);
        let mut first = [0];
        let Self { tls, http } = self;
        let (timeout, idle_timeout) = (http.limits.header_timeout, http.limits.idle_timeout);
        let spoken = tokio::select! {
            biased;
            spoken = tokio::time::timeout(timeout, stream.peek(&mut first)) => spoken,
            () = http.leave.notified() => return,
        };
        match spoken {
            Ok(Ok(1)) if first[0] == TLS_HANDSHAKE => {
                let handshake = tls.accept(TimedIo::new(stream, idle_timeout));
                let shaken = tokio::select! {
                    biased;
                    shaken = tokio::time::timeout(timeout, handshake) => shaken,
                    () = http.leave.notified() => return,
                };
                match shaken {
                    Ok(Ok(stream)) => {
                        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                        http.serve(stream, is_http2, true).await;
                    }
                    Ok(Err(error)) => tracing::debug!(peer = %http.peer, %error, "TLS handshake failed"),
                    Err(_) => tracing::debug!(peer = %http.peer, "TLS handshake took too long"),
                }
            }
            Ok(Ok(1)) => {
                http.serve(TimedIo::new(stream, idle_timeout), false, false).await;
            }
            // Nobody spoke.
            _ => {}
        }
    }
}

impl Http {
    pub(crate) async fn serve<S>(mut self, stream: S, is_http2: bool, is_secure: bool)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let origin = Origin { ip: self.peer.ip(), is_secure };
        let (gate, limits) = (self.gate.clone(), self.limits.clone());
        let service = service_fn(move |request: Request<Incoming>| {
            let finisher = gate.finisher().clone();
            let (gate, limits) = (gate.clone(), limits.clone());
            async move {
                // Whoever goes away before it is their turn is not waited for.
                let turn = gate.turn(&request).await;
                let answer = gate.answer(request, origin, limits, turn);
                Ok::<_, Infallible>(finisher.run(answer).await)
            }
        });
        let io = TokioIo::new(stream);
        let served = if is_http2 {
            let connection = http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .max_concurrent_streams(STREAMS_MAX)
                .max_header_list_size(HEADER_LIST_BYTES_MAX)
                .initial_stream_window_size(WINDOW_BYTES)
                .initial_connection_window_size(WINDOWS_BYTES)
                .keep_alive_interval(self.limits.header_timeout)
                .keep_alive_timeout(self.limits.idle_timeout)
                .serve_connection(io, service);
            tokio::pin!(connection);
            tokio::select! {
                biased;
                served = &mut connection => served,
                () = self.asked_to_end() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            }
        } else {
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(self.limits.header_timeout)
                .max_buf_size(BUFFER_BYTES_MAX)
                .max_headers(HEADERS_MAX)
                .serve_connection(io, service);
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
    }

    async fn asked_to_end(&mut self) {
        tokio::select! {
            _ = self.phase.changed() => {}
            () = self.leave.notified() => {}
        }
    }
}
