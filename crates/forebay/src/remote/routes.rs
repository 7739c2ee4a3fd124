//! How a client reaches nodes: the one in its machine without the network, others over it.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::{Context, Result};
use base::env::Env;
use base::{DriveId, NodeId};
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use wire::BoxFuture;
use wire::cluster::NodeAddresses;
use wire::drive::DriveService;
use wire::link::{Connection, Connector, Dial, Fabric, Peer, PeerOptions, RemoteDrive};

use crate::identity::IdentityFiles;
use crate::node::{CLIENTS_SOCKET, DATA_CONNECTIONS, NodeDir};

/// How often the node's certificate is read again.
const IDENTITY_LOOK: Duration = Duration::from_secs(86_400);
/// How long a client waits for the first word of drives.
const FIRST_FACT: Duration = Duration::from_secs(5);

/// Drives that are in this process.
pub(crate) trait OwnDrives: Send + Sync {
    /// Those that are open now.
    fn open(&self) -> BoxFuture<'_, BTreeMap<DriveId, Arc<dyn DriveService>>>;
}

/// The node in this machine.
pub(crate) enum Here {
    /// Another process.
    Process(Arc<Peer>),
    /// This process.
    Own(Arc<dyn OwnDrives>),
}

/// The ways to the nodes of the cluster.
pub(crate) struct Routes {
    home: NodeId,
    here: Here,
    others: Arc<Fabric>,
}

impl Routes {
    /// Those of a process beside a node, which has its files in `dir`.
    pub(crate) fn beside(env: &Env, dir: &NodeDir, home: NodeId) -> Result<Arc<Self>> {
        let here = Peer::new(PeerOptions {
            env: env.clone(),
            runtime: Handle::current(),
            dial: dial(dir),
            data_connections: DATA_CONNECTIONS,
        });
        let identity = IdentityFiles::new(env, dir).load()?.context("this node has no certificate")?;
        let connector = Connector::new(&identity)?;
        let others = Fabric::new(env.clone(), Handle::current(), connector, DATA_CONNECTIONS);
        tokio::spawn(follow_identity(IdentityFiles::new(env, dir), Arc::downgrade(&others)));
        Ok(Arc::new(Self { home, here: Here::Process(here), others }))
    }

    /// Those of a node, which keeps `others` up to date itself.
    pub(crate) fn of_node(home: NodeId, drives: Arc<dyn OwnDrives>, others: Arc<Fabric>) -> Arc<Self> {
        Arc::new(Self { home, here: Here::Own(drives), others })
    }

    /// The nodes and their addresses, as they are now.
    pub(crate) fn set_nodes(&self, nodes: &[NodeAddresses]) {
        if let Here::Process(_) = self.here {
            let others = nodes.iter().filter(|node| node.node != self.home);
            self.others.set_nodes(others.map(|node| (node.node, node.addresses.clone())).collect());
        }
    }

    /// The way to a node; `None`: it is gone, or is this process.
    pub(crate) fn to(&self, node: NodeId) -> Option<Arc<Peer>> {
        match &self.here {
            Here::Process(peer) if node == self.home => Some(peer.clone()),
            Here::Own(_) if node == self.home => None,
            _ => self.others.peer(node),
        }
    }

    /// These drives, each with its node. Those that do not answer now count as not reached.
    pub(crate) async fn drives(
        &self,
        wanted: impl Iterator<Item = (DriveId, NodeId)>,
    ) -> Vec<(DriveId, Arc<dyn DriveService>)> {
        let own = match &self.here {
            Here::Own(drives) => drives.open().await,
            Here::Process(_) => BTreeMap::new(),
        };
        let mut found = Vec::new();
        let mut first_words = Vec::new();
        for (id, node) in wanted {
            if let Some(drive) = own.get(&id) {
                found.push((id, drive.clone()));
            } else if let Some(peer) = self.to(node) {
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
