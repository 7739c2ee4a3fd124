//! The other nodes of a cluster, and where they are.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use base::NodeId;
use base::env::Env;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

use super::{Connection, Connector, Dial, Peer, PeerOptions};
use crate::identity::Party;
use crate::rights::Proofs;

/// How long one address of a node is tried.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a node may take before a way around is looked for.
const DIRECT: Duration = Duration::from_secs(1);
/// The pause between two attempts to connect directly while a way around is looked for.
const AGAIN: Duration = Duration::from_millis(100);
/// How long a node that did not take a connection is tried directly after a way around was found.
const STARTS: Duration = Duration::from_millis(500);
/// Nodes that are asked for a way at a time.
const ASKED: usize = 3;
/// The pause after no way was found.
const SEARCH_PAUSE_NS: u64 = 2_000_000_000;
/// How often a node that is reached through another is tried directly.
const PROBE: Duration = Duration::from_secs(5);

/// The other nodes of the cluster: a [`Peer`] for each, made when it is first asked for. A node that does not answer is reached through
/// another one that reaches it.
pub struct Fabric {
    env: Env,
    runtime: Handle,
    data_connections: usize,
    connector: Arc<Shared<Arc<Connector>>>,
    nodes: Arc<Nodes>,
    proofs: Arc<Proofs>,
}

type Nodes = Shared<BTreeMap<NodeId, Node>>;

struct Node {
    way: Arc<Way>,
    peer: Option<Arc<Peer>>,
}

/// The way to a node.
struct Way {
    node: NodeId,
    env: Env,
    runtime: Handle,
    connector: Arc<Shared<Arc<Connector>>>,
    addresses: Shared<Addresses>,
    others: Weak<Nodes>,
    around: Shared<Around>,
    /// One connection at a time looks for a way around.
    search: tokio::sync::Mutex<()>,
    /// Grows when the node is reached directly again: connections through others end.
    back: watch::Sender<u64>,
}

/// How a node is reached that does not answer.
#[derive(Default)]
struct Around {
    /// Through this one.
    via: Option<NodeId>,
    /// When no way was found last.
    failed_ns: Option<u64>,
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
        let (nodes, proofs) = (Arc::new(Shared::new(BTreeMap::new())), Arc::default());
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
                known.insert(id, Node { way: Arc::new(self.way(id, list)), peer: None });
                continue;
            };
            let mut addresses = node.way.addresses.lock();
            if *addresses.list != list[..] {
                *addresses = Addresses::of(list);
            }
        }
    }

    fn way(&self, node: NodeId, list: Vec<String>) -> Way {
        Way {
            node,
            env: self.env.clone(),
            runtime: self.runtime.clone(),
            connector: self.connector.clone(),
            addresses: Shared::new(Addresses::of(list)),
            others: Arc::downgrade(&self.nodes),
            around: Shared::new(Around::default()),
            search: tokio::sync::Mutex::default(),
            back: watch::Sender::new(0),
        }
    }

    /// The peer of a node; `None`: there is no such node.
    pub fn peer(&self, node: NodeId) -> Option<Arc<Peer>> {
        let mut nodes = self.nodes.lock();
        let Node { way, peer } = nodes.get_mut(&node)?;
        let peer = peer.get_or_insert_with(|| {
            Peer::new(PeerOptions {
                env: self.env.clone(),
                runtime: self.runtime.clone(),
                dial: dial(way.clone()),
                data_connections: self.data_connections,
                proofs: self.proofs.clone(),
            })
        });
        Some(peer.clone())
    }

    /// Where a node is: `host:port`. Empty if there is no such node.
    pub fn addresses(&self, node: NodeId) -> Vec<String> {
        self.nodes.lock().get(&node).map(|node| node.way.addresses.lock().list.to_vec()).unwrap_or_default()
    }

    /// Nodes that are reached through others only, each with the one that leads there.
    pub fn detours(&self) -> Vec<(NodeId, NodeId)> {
        let nodes = self.nodes.lock();
        nodes.iter().filter_map(|(id, node)| Some((*id, node.way.around.lock().via?))).collect()
    }

    /// A new identity (certificate renewed): used by the next connections.
    pub fn set_connector(&self, connector: Connector) {
        *self.connector.lock() = Arc::new(connector);
    }
}

fn dial(way: Arc<Way>) -> Dial {
    Arc::new(move || {
        let way = way.clone();
        Box::pin(async move { way.connect().await })
    })
}

impl Way {
    /// Connects directly. If that takes long or fails, it looks for a way through another node, and keeps trying directly: the node may
    /// be about to start.
    async fn connect(self: &Arc<Self>) -> io::Result<Connection> {
        let is_around = self.around.lock().via.is_some();
        let (failed, error) = (Notify::new(), Shared::new(None));
        let direct = async {
            loop {
                match self.directly().await {
                    Ok(connection) => return connection,
                    Err(now) => *error.lock() = Some(now),
                }
                failed.notify_one();
                tokio::time::sleep(AGAIN).await;
            }
        };
        let around = async {
            if !is_around {
                // Whichever comes first.
                let _ = tokio::time::timeout(DIRECT, failed.notified()).await;
            }
            self.around().await
        };
        tokio::pin!(direct, around);
        let connected = tokio::select! {
            connection = &mut direct => return Ok(connection),
            connected = &mut around => connected,
        };
        let is_silent = error.lock().is_none();
        if is_silent && connected.is_err() {
            tokio::select! {
                connection = &mut direct => return Ok(connection),
                () = failed.notified() => {}
            }
        }
        match connected {
            // Its machine was reached and did not take the connection: it may be about to start.
            Ok(around) if !is_silent => Ok(tokio::time::timeout(STARTS, direct).await.unwrap_or(around)),
            Ok(around) => Ok(around),
            Err(none) => Err(error.lock().take().unwrap_or(none)),
        }
    }

    /// Tries the addresses one after another. This may be given up at any time: what did not answer comes last then.
    async fn directly(&self) -> io::Result<Connection> {
        let (list, first) = {
            let addresses = self.addresses.lock();
            (addresses.list.clone(), addresses.first)
        };
        let node = self.node;
        let mut failed = io::Error::new(io::ErrorKind::NotFound, format!("node {node} has no address"));
        for index in (first..list.len()).chain(0..first) {
            let address = &list[index];
            let connector = self.connector.lock().clone();
            let connecting = connector.connect(address, Party::Node(node));
            match tokio::time::timeout(PATIENCE, connecting).await {
                Ok(Ok(connection)) => {
                    self.addresses.lock().begin_with(&list, index);
                    self.is_direct();
                    return Ok(connection);
                }
                Ok(Err(error)) => failed = error,
                Err(_) => {
                    let text = format!("no answer within {} s: {address}", PATIENCE.as_secs());
                    failed = io::Error::new(io::ErrorKind::TimedOut, text);
                }
            }
            tracing::debug!(%node, error = %failed, "address of a node does not work");
            self.addresses.lock().begin_with(&list, index + 1);
        }
        Err(failed)
    }

    /// The node answers by itself: connections through others end.
    fn is_direct(&self) {
        if let Some(via) = self.around.lock().via.take() {
            tracing::info!(node = %self.node, %via, "the node is reached directly again");
            self.back.send_modify(|count| *count += 1);
        }
    }

    /// Connects through another node: the known one, or any that reaches it.
    async fn around(self: &Arc<Self>) -> io::Result<Connection> {
        let none = || io::Error::new(io::ErrorKind::HostUnreachable, "no other node leads there");
        if let Some(connection) = self.known_way().await {
            return Ok(connection);
        }
        let _one_at_a_time = self.search.lock().await;
        if let Some(connection) = self.known_way().await {
            return Ok(connection);
        }
        let now_ns = self.env.clock.boot_ns();
        let failed_ns = self.around.lock().failed_ns;
        if failed_ns.is_some_and(|at| now_ns.saturating_sub(at) < SEARCH_PAUSE_NS) {
            return Err(none());
        }
        let mut asked: FuturesUnordered<_> = self
            .candidates()
            .into_iter()
            .map(|via| async move { Some((via.node, self.through(&via).await.ok()?)) })
            .collect();
        while let Some(answer) = asked.next().await {
            let Some((via, connection)) = answer else { continue };
            tracing::warn!(node = %self.node, %via, "the node is reached through another only");
            *self.around.lock() = Around { via: Some(via), failed_ns: None };
            self.runtime.spawn(probe(Arc::downgrade(self)));
            return Ok(connection);
        }
        self.around.lock().failed_ns = Some(self.env.clock.boot_ns());
        Err(none())
    }

    async fn known_way(&self) -> Option<Connection> {
        let id = self.around.lock().via?;
        let via = self.others.upgrade().and_then(|nodes| Some(nodes.lock().get(&id)?.way.clone()));
        let connected = match via {
            Some(via) => self.through(&via).await,
            None => Err(io::ErrorKind::NotFound.into()),
        };
        if connected.is_err() {
            let mut around = self.around.lock();
            around.via.take_if(|now| *now == id);
        }
        connected.ok()
    }

    /// Some other nodes, in an order of chance.
    fn candidates(&self) -> Vec<Arc<Way>> {
        let Some(nodes) = self.others.upgrade() else { return Vec::new() };
        let mut others: Vec<Arc<Way>> =
            nodes.lock().values().map(|node| node.way.clone()).filter(|way| way.node != self.node).collect();
        let mut chosen = Vec::new();
        while chosen.len() < ASKED && !others.is_empty() {
            let index = self.env.random.next_u64() % others.len() as u64;
            chosen.push(others.swap_remove(index as usize));
        }
        chosen
    }

    async fn through(&self, via: &Way) -> io::Result<Connection> {
        let connector = self.connector.lock().clone();
        // Only the address that worked last: whether it works now says nothing of the way behind it.
        let address = {
            let addresses = via.addresses.lock();
            addresses.list.get(addresses.first).cloned().ok_or(io::ErrorKind::NotFound)?
        };
        let connecting = connector.connect_through(&address, via.node, self.node, self.back.subscribe());
        tokio::time::timeout(2 * PATIENCE, connecting).await?
    }
}

/// Tries a node directly while it is reached through another.
async fn probe(way: Weak<Way>) {
    loop {
        tokio::time::sleep(PROBE).await;
        let Some(way) = way.upgrade() else { return };
        if way.around.lock().via.is_none() || way.directly().await.is_ok() {
            return;
        }
    }
}
