//! How a client reaches nodes: the one in its machine without the network, others over it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use anyhow::{Context, Result};
use base::env::Env;
use base::{DriveId, Epoch, NodeId};
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::sync::watch;
use wire::BoxFuture;
use wire::cluster::NodeAddresses;
use wire::drive::DriveService;
use wire::link::{Connection, Connector, Dial, Fabric, Peer, PeerOptions, RemoteDrive, RemoteViews};
use wire::view::{NEWS_WAIT_MAX, ViewReply, ViewRequest, ViewService};

use crate::identity::IdentityFiles;
use crate::node::{CLIENTS_SOCKET, DATA_CONNECTIONS, NodeDir};
use crate::stores::Stores;

/// How often the node's certificate is read again.
const IDENTITY_LOOK: Duration = Duration::from_secs(86_400);
/// How long a client waits for the first word of drives.
const FIRST_FACT: Duration = Duration::from_secs(5);
/// Pause after the node beside did not say which node owns the ledgers.
const OWNER_PAUSE: Duration = Duration::from_millis(500);
/// How long the node beside may be away before others are asked, and how long these may take.
const AWAY: Duration = Duration::from_secs(1);
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);
/// How long all nodes wait for news of the owner, where there is no node beside.
const OTHERS_WAIT: Duration = Duration::from_secs(1);

/// Drives that are in this process.
pub(crate) trait OwnDrives: Send + Sync {
    /// Those that are open now.
    fn open(&self) -> BoxFuture<'_, BTreeMap<DriveId, Arc<dyn DriveService>>>;
}

/// The ways to the nodes of the cluster.
pub(crate) struct Routes {
    /// The node of this machine, by its socket; `None`: there is none.
    beside: Option<(NodeId, Arc<Peer>)>,
    /// Its drives, if this is its process.
    own: Option<Arc<dyn OwnDrives>>,
    others: Arc<Fabric>,
    /// Which ones these are.
    known: Mutex<Vec<NodeId>>,
    /// The object stores that this process uses.
    pub(super) stores: Arc<Stores>,
}

impl Routes {
    /// Those of a process beside a node, which has its files in `dir`.
    pub(crate) fn beside(env: &Env, dir: &NodeDir, home: NodeId) -> Result<Arc<Self>> {
        Self::elsewhere(env, dir, Some((home, beside(env, dir, DATA_CONNECTIONS))))
    }

    /// Those of a process on a machine without a node, whose certificate is in `dir`.
    pub(crate) fn of_guest(env: &Env, dir: &NodeDir, nodes: &[NodeAddresses]) -> Result<Arc<Self>> {
        let routes = Self::elsewhere(env, dir, None)?;
        routes.set_nodes(nodes);
        Ok(routes)
    }

    fn elsewhere(env: &Env, dir: &NodeDir, beside: Option<(NodeId, Arc<Peer>)>) -> Result<Arc<Self>> {
        let identity = IdentityFiles::new(env, dir).load()?.context("there is no certificate")?;
        let connector = Connector::new(&identity)?;
        let others = Fabric::new(env.clone(), Handle::current(), connector, DATA_CONNECTIONS);
        tokio::spawn(follow_identity(IdentityFiles::new(env, dir), Arc::downgrade(&others)));
        let (known, stores) = Default::default();
        Ok(Arc::new(Self { beside, own: None, others, known, stores }))
    }

    /// Those of a node, which keeps `others` up to date itself. It may become the owner of the ledgers, so it reaches that by its
    /// own socket, too.
    pub(crate) fn of_node(
        (env, dir): (&Env, &NodeDir),
        home: NodeId,
        drives: Arc<dyn OwnDrives>,
        others: Arc<Fabric>,
        stores: Arc<Stores>,
    ) -> Arc<Self> {
        Arc::new(Self {
            beside: Some((home, beside(env, dir, 0))),
            own: Some(drives),
            others,
            known: Mutex::default(),
            stores,
        })
    }

    /// The nodes and their addresses, as they are now.
    pub(crate) fn set_nodes(&self, nodes: &[NodeAddresses]) {
        if self.own.is_none() {
            let is_other = |node: &&NodeAddresses| !self.is_beside(node.node);
            *self.known() = nodes.iter().filter(is_other).map(|node| node.node).collect();
            let others = nodes.iter().filter(is_other);
            self.others.set_nodes(others.map(|node| (node.node, node.addresses.clone())).collect());
        }
    }

    /// The node of this machine.
    pub(crate) fn here(&self) -> Option<NodeId> {
        self.beside.as_ref().map(|(node, _)| *node)
    }

    /// The way to a node; `None`: it is gone.
    pub(crate) fn to(&self, node: NodeId) -> Option<Arc<Peer>> {
        match &self.beside {
            Some((home, beside)) if *home == node => Some(beside.clone()),
            _ => self.others.peer(node),
        }
    }

    fn is_beside(&self, node: NodeId) -> bool {
        self.beside.as_ref().is_some_and(|(home, _)| *home == node)
    }

    fn known(&self) -> MutexGuard<'_, Vec<NodeId>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The node that owns the ledgers, as the node beside knows it, or any other while that is away; until one answers, `first`.
    pub(crate) fn follow_owner(self: &Arc<Self>, first: Option<NodeId>) -> watch::Receiver<Option<NodeId>> {
        let (tell, owner) = watch::channel(first);
        tokio::spawn(follow_owner(self.clone(), tell));
        owner
    }

    /// Asks all other nodes for an owner that is later than the known one. They wait so long for one.
    async fn ask_others(&self, known: Epoch, wait: Duration) -> Option<(NodeId, Epoch)> {
        let nodes = self.known().clone();
        let asks = nodes.into_iter().filter_map(|node| {
            let views = RemoteViews::new(&self.others.peer(node)?);
            Some(async move {
                let asked = views.ask(ViewRequest::Owner { known, wait_ms: wait.as_millis() as u32 });
                match tokio::time::timeout(wait + ANSWER_PATIENCE, asked).await {
                    Ok(Ok(ViewReply::Owner(node, epoch))) if epoch > known => Some((node, epoch)),
                    _ => None,
                }
            })
        });
        let answers = futures_util::future::join_all(asks).await;
        answers.into_iter().flatten().max_by_key(|(_, epoch)| *epoch)
    }

    /// These drives, each with its node. Those that do not answer now count as not reached.
    pub(crate) async fn drives(
        &self,
        wanted: impl Iterator<Item = (DriveId, NodeId)>,
    ) -> Vec<(DriveId, Arc<dyn DriveService>)> {
        let own = match &self.own {
            Some(drives) => drives.open().await,
            None => BTreeMap::new(),
        };
        let mut found = Vec::new();
        let mut first_words = Vec::new();
        for (id, node) in wanted {
            if let Some(drive) = own.get(&id) {
                found.push((id, drive.clone()));
            } else if let Some(peer) = self.to(node).filter(|_| self.own.is_none() || !self.is_beside(node)) {
                found.push((id, RemoteDrive::expected(&peer, id) as Arc<dyn DriveService>));
                first_words.push(async move { drop(RemoteDrive::new(&peer, id).await) });
            }
        }
        // If they do not come in time, requests wait for them.
        let _ = tokio::time::timeout(FIRST_FACT, futures_util::future::join_all(first_words)).await;
        found
    }
}

/// Shows the newest certificate of the node on later connections.
async fn follow_identity(files: IdentityFiles, others: Weak<Fabric>) {
    loop {
        tokio::time::sleep(IDENTITY_LOOK).await;
        let Some(others) = others.upgrade() else { return };
        let connector =
            files.load().and_then(|identity| Ok(identity.map(|it| Connector::new(&it)).transpose()?));
        match connector {
            Ok(Some(connector)) => others.set_connector(connector),
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(error = %format!("{error:#}"), "the node's certificate cannot be read")
            }
        }
    }
}

/// The node in a directory of this machine.
fn beside(env: &Env, dir: &NodeDir, data_connections: usize) -> Arc<Peer> {
    let (env, runtime) = (env.clone(), Handle::current());
    Peer::new(PeerOptions { env, runtime, dial: dial(dir), data_connections, proofs: Arc::default() })
}

/// Asks again and again which node owns the ledgers.
async fn follow_owner(routes: Arc<Routes>, tell: watch::Sender<Option<NodeId>>) {
    let mut known = Epoch(0);
    let beside = routes.beside.as_ref().map(|(_, beside)| (beside, RemoteViews::new(beside)));
    while !tell.is_closed() {
        let wait_ms = NEWS_WAIT_MAX.as_millis() as u32;
        let answer = match &beside {
            None => routes.ask_others(known, OTHERS_WAIT).await,
            Some((beside, views)) => tokio::select! {
                answer = views.ask(ViewRequest::Owner { known, wait_ms }) => match answer {
                    Ok(ViewReply::Owner(node, epoch)) => Some((node, epoch)),
                    Ok(_) => continue,
                    Err(_) => None,
                },
                () = beside.is_away(AWAY) => routes.ask_others(known, Duration::ZERO).await,
            },
        };
        match answer {
            Some((node, epoch)) => {
                known = epoch;
                tell.send_if_modified(|owner| owner.replace(node) != Some(node));
            }
            None => tokio::time::sleep(OWNER_PAUSE).await,
        }
    }
}

/// Connects to the node in a directory.
fn dial(dir: &NodeDir) -> Dial {
    let dir = dir.clone();
    Arc::new(move || {
        let socket = dir.socket_named(CLIENTS_SOCKET);
        Box::pin(async move {
            let stream = UnixStream::connect(socket.as_path()).await?;
            Connection::local(stream.into_std()?)
        })
    })
}
