//! The listener: one address for HTTP/1.1 and TLS, a bounded number of connections, an orderly stop. When there are too
//! many connections, the oldest are closed after their current answer.
//!
//! The first byte of a connection tells whether it speaks TLS. [`Gate`] serves the requests; this module does not know
//! S3.

mod body;
mod chunked;
mod connection;
mod finish;
mod form;
mod io;
mod strict;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsAcceptor;

use crate::gate::Gate;
use connection::{Connection, Http};

pub(crate) use body::{BodyRules, Coding, RequestBody, Unread};
pub(crate) use chunked::{Chunked, ChunkedError, Framing};
pub(crate) use finish::Finisher;
pub(crate) use form::{FormFields, FormHead};
pub(crate) use strict::Answering;

/// Limits of one client, and of all clients together.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Connections at once; beyond that, the oldest are closed after their current answer.
    pub connections_max: usize,
    /// How long a handshake, a request's headers, or the wait for the next request may take.
    pub header_timeout: Duration,
    /// How long a client may be idle while it should send or receive.
    pub idle_timeout: Duration,
    /// Least speed of bodies and answers in bytes per second, after the first idle timeout.
    pub body_bytes_per_s_min: u64,
    /// How long requests under way may go on after the server was stopped.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 2048,
            header_timeout: Duration::from_secs(60),
            idle_timeout: Duration::from_secs(30),
            body_bytes_per_s_min: 512,
            grace: Duration::from_secs(5),
        }
    }
}

/// Why the server did not start.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen for S3: address={address}")]
pub struct ListenError {
    address: SocketAddr,
    #[source]
    source: std::io::Error,
}

impl ListenError {
    /// Nothing listens at `address`, because of `source`.
    pub fn new(address: SocketAddr, source: std::io::Error) -> Self {
        Self { address, source }
    }

    /// Whether another process uses the address.
    pub fn is_in_use(&self) -> bool {
        self.source.kind() == std::io::ErrorKind::AddrInUse
    }
}

/// State of the stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Serving,
    /// Requests under way end; no new ones begin.
    Draining,
}

/// A server that listens.
pub struct Server {
    address: SocketAddr,
    gate: Arc<Gate>,
    phase: watch::Sender<Phase>,
    accepting: JoinHandle<()>,
    grace: Duration,
}

impl Server {
    /// Starts to serve on `listen`; port 0 takes a free one.
    pub async fn start(
        runtime: &Handle,
        listen: SocketAddr,
        gate: Arc<Gate>,
        tls: Arc<rustls::ServerConfig>,
        limits: Limits,
    ) -> Result<Self, ListenError> {
        let failed = |source| ListenError::new(listen, source);
        let listener = bind(listen).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let (phase, _) = watch::channel(Phase::Serving);
        let grace = limits.grace;
        let accept = Accept {
            listener,
            gate: gate.clone(),
            tls: TlsAcceptor::from(tls),
            limits: Arc::new(limits),
            phase: phase.subscribe(),
            leave: Arc::default(),
        };
        Ok(Self { address, gate, phase, accepting: runtime.spawn(accept.run()), grace })
    }

    /// The address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts no more connections, lets requests under way end within the grace, then cuts them. No operation on the
    /// filesystem is under way when this returns.
    pub async fn stop(self) {
        let _ = self.phase.send(Phase::Draining);
        let mut accepting = self.accepting;
        if tokio::time::timeout(self.grace, &mut accepting).await.is_err() {
            // Dropping the tasks of the connections leaves their requests to the finisher, which lets them fail.
            accepting.abort();
            let _ = accepting.await;
        }
        self.gate.finish().await;
    }
}

/// Entry point for the fuzzer: serves one HTTP/1.1 connection over a stream in memory, until its client ends it.
#[cfg(any(fuzzing, feature = "fuzzing"))]
pub async fn serve_stream<S>(gate: Arc<Gate>, stream: S, limits: Limits)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (_phase, phase) = watch::channel(Phase::Serving);
    let peer = SocketAddr::from((std::net::Ipv4Addr::LOCALHOST, 1));
    Http { gate, limits: Arc::new(limits), phase, leave: Arc::default(), peer }.serve(stream, false).await;
}

struct Accept {
    listener: TcpListener,
    gate: Arc<Gate>,
    tls: TlsAcceptor,
    limits: Arc<Limits>,
    phase: watch::Receiver<Phase>,
    /// Each notice goes to the connection that has been registered for longest.
    leave: Arc<Notify>,
}

/// Pause after an accept that failed, mostly for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Length of the kernel's queue of connections before accept; the kernel may limit it further.
const BACKLOG: u32 = 4096;
/// Pause before the next connection is told to leave: time for a new connection to send a request, and for the one that
/// was told last to send its answer.
const LEAVE_PAUSE: Duration = Duration::from_millis(20);

fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // Otherwise the address of a node that has just stopped stays in use.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

impl Accept {
    async fn run(mut self) {
        let room = Arc::new(Semaphore::new(self.limits.connections_max));
        let mut connections: JoinSet<()> = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                _ = self.phase.changed() => break,
                Some(_) = connections.join_next() => continue,
                accepted = self.listener.accept() => accepted,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept S3 connections");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let permit = tokio::select! {
                _ = self.phase.changed() => break,
                permit = make_room(&room, &self.leave) => permit,
            };
            let http = Http {
                gate: self.gate.clone(),
                limits: self.limits.clone(),
                phase: self.phase.clone(),
                leave: self.leave.clone(),
                peer,
            };
            let connection = Connection { tls: self.tls.clone(), http };
            connections.spawn(async move {
                let _permit = permit;
                connection.serve(stream).await;
            });
        }
        drop(self.listener);
        while connections.join_next().await.is_some() {}
    }
}

/// Waits for a free connection slot.
async fn make_room(room: &Arc<Semaphore>, leave: &Notify) -> OwnedSemaphorePermit {
    loop {
        if let Ok(permit) = room.clone().try_acquire_owned() {
            return permit;
        }
        leave.notify_one();
        if let Ok(permit) = tokio::time::timeout(LEAVE_PAUSE, room.clone().acquire_owned()).await {
            return permit.expect("nobody closes it");
        }
    }
}
