//! Takes connections from other machines in.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

use super::{Acceptor, Server, Trust};
use crate::identity::Party;

/// Most handshakes at a time. More wait in the backlog of the system.
const HANDSHAKES_MAX: usize = 64;
/// Most connections without a certificate at a time.
const STRANGERS_MAX: usize = 16;
/// How long a connection without a certificate may last.
const STRANGER_TIME: Duration = Duration::from_secs(30);
/// The pause after the system gave no connection, for want of descriptors for example.
const PAUSE: Duration = Duration::from_millis(100);

struct Door<T> {
    server: Arc<Server>,
    trust: T,
    strangers: Semaphore,
}

/// Serves connections for ever, each as its party is trusted; `None` ends it. When this future is dropped, they end. The newest
/// acceptor takes the next connection.
pub async fn accept_loop(
    listener: TcpListener,
    acceptor: watch::Receiver<Arc<Acceptor>>,
    server: Arc<Server>,
    trust: impl Fn(Option<Party>) -> Option<Trust> + Send + Sync + 'static,
) {
    let door = Arc::new(Door { server, trust, strangers: Semaphore::new(STRANGERS_MAX) });
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(_) = connections.join_next() => {}
            next = next(&listener, &handshakes) => {
                let Some((stream, handshake)) = next else { continue };
                let (door, acceptor) = (door.clone(), acceptor.borrow().clone());
                connections.spawn(async move {
                    if let Err(error) = door.serve(stream, &acceptor, handshake).await {
                        tracing::debug!(%error, "connection ended");
                    }
                });
            }
        }
    }
}

/// The next connection, when there is room for its handshake.
async fn next(
    listener: &TcpListener,
    handshakes: &Arc<Semaphore>,
) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    let handshake = handshakes.clone().acquire_owned().await.expect("it is never closed");
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, handshake)),
        Err(error) => {
            tracing::warn!(%error, "no connection could be taken in");
            tokio::time::sleep(PAUSE).await;
            None
        }
    }
}

impl<T: Fn(Option<Party>) -> Option<Trust>> Door<T> {
    async fn serve(
        &self,
        stream: TcpStream,
        acceptor: &Acceptor,
        handshake: OwnedSemaphorePermit,
    ) -> io::Result<()> {
        let (connection, party) = acceptor.accept(stream).await?;
        drop(handshake);
        let Some(trust) = (self.trust)(party) else { return Ok(()) };
        let serving = self.server.clone().serve(connection, trust);
        if party.is_some() {
            return serving.await;
        }
        let _stranger = self.strangers.try_acquire().map_err(io::Error::other)?;
        tokio::time::timeout(STRANGER_TIME, serving).await?
    }
}
