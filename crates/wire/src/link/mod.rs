//! Connections: services in another process, reached over a stream of bytes.
//!
//! A [`Server`] has owners and drives, and answers calls on any number of connections. A [`Peer`] is the other side: it opens
//! connections, opens them anew when they break, and sends calls without an answer again. [`RemoteOwner`], [`RemoteReplica`],
//! [`RemoteDrive`] and [`RemoteViews`] are the services as their clients see them.
//!
//! Servers never open connections: events come on the client's.
//!
//! Between machines, an [`Acceptor`] and a [`Connector`] make connections of TCP and TLS, [`accept_loop`] serves them, and a
//! [`Fabric`] has a peer for each other node. A node that does not answer is reached through another one.

mod cluster;
mod drive;
mod fabric;
mod listener;
mod local;
mod outbox;
mod owner;
mod peer;
mod replica;
mod server;
mod tls;
mod view;
mod way;

#[cfg(test)]
pub(crate) mod authority;
#[cfg(test)]
mod tests;

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};

use local::LocalStream;
use outbox::Direct;

pub use cluster::{RemoteCluster, RemoteHost, join};
pub use drive::RemoteDrive;
pub use fabric::Fabric;
pub use listener::accept_loop;
pub use owner::RemoteOwner;
pub use peer::{Contact, Peer, PeerOptions};
pub use replica::RemoteReplica;
pub use server::{Server, Services, Trust};
pub use tls::{Acceptor, Connector, connect_as_stranger};
pub use view::RemoteViews;

use crate::BoxFuture;

/// A stream of bytes.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + ?Sized> Stream for T {}

/// A connection.
pub struct Connection {
    stream: Box<dyn Stream>,
    direct: Option<Direct>,
}

impl Connection {
    /// Over any stream.
    pub fn over(stream: impl Stream + 'static) -> Self {
        Self { stream: Box::new(stream), direct: None }
    }

    /// Within a machine. Call this inside a runtime.
    ///
    /// # Errors
    /// If there is no room for another descriptor.
    pub fn local(stream: UnixStream) -> io::Result<Self> {
        let stream = LocalStream::new(stream)?;
        let direct = Some(Direct::new(stream.fd()));
        Ok(Self { stream: Box::new(stream), direct })
    }
}

/// Opens a connection to the other side.
pub type Dial = Arc<dyn Fn() -> BoxFuture<'static, io::Result<Connection>> + Send + Sync>;

/// How often each side of a connection gives a sign of life.
const PING: Duration = Duration::from_secs(1);
/// A connection on which nothing came for so long is broken.
const SILENCE: Duration = Duration::from_secs(5);
/// Most calls under way on one connection. A client has far fewer slots; the connection ends if it sends more.
const CALLS_MAX: usize = 1024;
/// Most bytes of payloads on one connection for which the server has memory: it reads no further until some are done.
const PAYLOADS_BYTES_MAX: usize = 64 << 20;
/// Most events of a stream that wait for a connection. A client that stayed away for longer claims its leases anew.
const EVENTS_MAX: usize = 1 << 16;
/// The most events that a client takes before it acknowledges them.
const ACKNOWLEDGE_EVENTS: u64 = 64;
