//! The other nodes of a cluster, and where they are.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::NodeId;
use base::env::Env;
use tokio::runtime::Handle;

use super::{Connection, Connector, Dial, Peer, PeerOptions};
use crate::identity::Party;
use crate::rights::Proofs;

/// How long one address of a node is tried.
const PATIENCE: Duration = Duration::from_secs(2);

/// The other nodes of the cluster: a [`Peer`] for each, made when it is first asked for.
pub struct Fabric {
    env: Env,
    runtime: Handle,
    data_connections: usize,
    connector: Arc<Shared<Arc<Connector>>>,
    nodes: Shared<BTreeMap<NodeId, Node>>,
    proofs: Arc<Proofs>,
}

struct Node {
    addresses: Arc<Shared<Addresses>>,
    peer: Option<Arc<Peer>>,
}

/// What changes while others use it.
struct Shared<T>(Mutex<T>);

impl<T> Shared<T> {
    fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a node is, and which address is tried first: the one that worked last, or the one after that which failed last.
struct Addresses {
    list: Arc<[String]>,
    first: usize,
}

impl Addresses {
    fn of(list: Vec<String>) -> Self {
        Self { list: list.into(), first: 0 }
    }

    /// Begins with this address the next time, unless the list has changed since.
    fn begin_with(&mut self, list: &Arc<[String]>, first: usize) {
        if Arc::ptr_eq(&self.list, list) {
            self.first = first % list.len();
        }
    }
}

impl Fabric {
    /// No nodes yet. Each will have this many connections for data, beside the one for metadata.
    pub fn new(env: Env, runtime: Handle, connector: Connector, data_connections: usize) -> Arc<Self> {
        let connector = Arc::new(Shared::new(Arc::new(connector)));
        let (nodes, proofs) = (Shared::new(BTreeMap::new()), Arc::default());
        Arc::new(Self { env, runtime, data_connections, connector, nodes, proofs })
    }

    /// The nodes and their addresses, as they are now. Peers of nodes that are gone end: their calls fail. A changed address is
    /// used by the next connection.
    pub fn set_nodes(&self, nodes: BTreeMap<NodeId, Vec<String>>) {
        let mut known = self.nodes.lock();
        for (_, gone) in known.extract_if(.., |id, _| !nodes.contains_key(id)) {
            gone.peer.iter().for_each(|peer| peer.end());
        }
        for (id, list) in nodes {
            let Some(node) = known.get(&id) else {
                let addresses = Arc::new(Shared::new(Addresses::of(list)));
                known.insert(id, Node { addresses, peer: None });
                continue;
            };
            let mut addresses = node.addresses.lock();
            if *addresses.list != list[..] {
                *addresses = Addresses::of(list);
            }
        }
    }

    /// The peer of a node; `None`: there is no such node.
    pub fn peer(&self, node: NodeId) -> Option<Arc<Peer>> {
        let mut nodes = self.nodes.lock();
        let Node { addresses, peer } = nodes.get_mut(&node)?;
        let peer = peer.get_or_insert_with(|| {
            Peer::new(PeerOptions {
                env: self.env.clone(),
                runtime: self.runtime.clone(),
                dial: self.dial(node, addresses.clone()),
                data_connections: self.data_connections,
                proofs: self.proofs.clone(),
            })
        });
        Some(peer.clone())
    }

    /// A new identity (certificate renewed): used by the next connections.
    pub fn set_connector(&self, connector: Connector) {
        *self.connector.lock() = Arc::new(connector);
    }

    fn dial(&self, node: NodeId, addresses: Arc<Shared<Addresses>>) -> Dial {
        let connector = self.connector.clone();
        Arc::new(move || {
            let (connector, addresses) = (connector.clone(), addresses.clone());
            Box::pin(async move { dial(node, &connector, &addresses).await })
        })
    }
}

/// Tries the addresses of a node one after another. This may be given up at any time: what did not answer comes last then.
async fn dial(
    node: NodeId,
    connector: &Shared<Arc<Connector>>,
    addresses: &Shared<Addresses>,
) -> io::Result<Connection> {
    let (list, first) = {
        let addresses = addresses.lock();
        (addresses.list.clone(), addresses.first)
    };
    let mut failed = io::Error::new(io::ErrorKind::NotFound, format!("node {node} has no address"));
    for index in (first..list.len()).chain(0..first) {
        let address = &list[index];
        let connector = connector.lock().clone();
        let connecting = connector.connect(address, Party::Node(node));
        match tokio::time::timeout(PATIENCE, connecting).await {
            Ok(Ok(connection)) => {
                addresses.lock().begin_with(&list, index);
                return Ok(connection);
            }
            Ok(Err(error)) => failed = error,
            Err(_) => {
                let text = format!("no answer within {} s: {address}", PATIENCE.as_secs());
                failed = io::Error::new(io::ErrorKind::TimedOut, text);
            }
        }
        tracing::debug!(%node, error = %failed, "address of a node does not work");
        addresses.lock().begin_with(&list, index + 1);
    }
    Err(failed)
}
