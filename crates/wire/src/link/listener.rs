//! Takes connections from other machines in.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

use super::tls::Wants;
use super::{Acceptor, Fabric, Server, Trust, way};
use crate::identity::Party;

/// Most handshakes at a time. More wait in the backlog of the system.
const HANDSHAKES_MAX: usize = 64;
/// Most connections without a certificate at a time.
const STRANGERS_MAX: usize = 16;
/// How long a connection without a certificate may last.
const STRANGER_TIME: Duration = Duration::from_secs(30);
/// Most ways to other nodes at a time: of nodes, and as many of clients.
const WAYS_MAX: usize = 128;
/// The pause after the system gave no connection, for want of descriptors for example.
const PAUSE: Duration = Duration::from_millis(100);

struct Door<T> {
    server: Arc<Server>,
    others: Arc<Fabric>,
    trust: T,
    strangers: Semaphore,
    node_ways: Semaphore,
    client_ways: Semaphore,
}

/// Serves connections for ever, each as its party is trusted; `None` ends it. Nodes and clients that do not reach one of `others` are led
/// there. When this future is dropped, all connections end. The newest acceptor takes the next connection.
pub async fn accept_loop(
    listener: TcpListener,
    acceptor: watch::Receiver<Arc<Acceptor>>,
    (server, others): (Arc<Server>, Arc<Fabric>),
    trust: impl Fn(Option<Party>) -> Option<Trust> + Send + Sync + 'static,
) {
    let (node_ways, client_ways) = (Semaphore::new(WAYS_MAX), Semaphore::new(WAYS_MAX));
    let strangers = Semaphore::new(STRANGERS_MAX);
    let door = Arc::new(Door { server, others, trust, strangers, node_ways, client_ways });
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
        let (connection, party, wants) = acceptor.accept(stream).await?;
        drop(handshake);
        let Some(trust) = (self.trust)(party) else { return Ok(()) };
        if wants == Wants::Way {
            let ways = match trust {
                Trust::Full => &self.node_ways,
                Trust::Client(_) => &self.client_ways,
                Trust::Stranger => {
                    return Err(io::Error::other("no way for a process without a certificate"));
                }
            };
            let _one_of_few = ways.try_acquire().map_err(io::Error::other)?;
            return way::lead(connection.stream, |node| self.others.addresses(node)).await;
        }
        let serving = self.server.clone().serve(connection, trust);
        if party.is_some() {
            return serving.await;
        }
        let _stranger = self.strangers.try_acquire().map_err(io::Error::other)?;
        tokio::time::timeout(STRANGER_TIME, serving).await?
    }
}
