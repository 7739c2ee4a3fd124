//! The node among others: its certificate and the cluster's authority, the port at which others reach it, and the ways to them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::NodeId;
use base::env::Env;
use base::program::Program;
use control::{Authority, Cluster, ClusterRecord, Control, NodeRecord, Plan};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use wire::cluster::NodeAddresses;
use wire::identity::{Fingerprint, Party};
use wire::link::{Acceptor, Connector, Fabric, Server, Services, Trust, accept_loop};
use wire::rights::{ProofKey, Rights};

use super::NodeDir;
use super::settings::Settings;
use crate::identity::{IdentityFiles, OWNER, hostname};
use crate::stores::Stores;

/// Connections for data to each other node, beside the one for metadata.
pub(crate) const DATA_CONNECTIONS: usize = 4;
/// How long a node may be silent of which an answer is awaited.
pub(crate) const SILENCE_PATIENCE: Duration = Duration::from_secs(15);
/// The port of a node, where none is given.
pub(crate) const PORT: u16 = 7740;

/// This process among those of its cluster.
pub(crate) struct Network {
    /// The ways to other nodes.
    pub(crate) fabric: Arc<Fabric>,
    /// What others may ask here.
    server: Arc<Server>,
    acceptor: watch::Sender<Arc<Acceptor>>,
    /// The nodes of the cluster: others are refused.
    members: Arc<Mutex<BTreeSet<NodeId>>>,
    witnesses: Mutex<BTreeSet<NodeId>>,
    /// The clients that are no nodes, and what they may do.
    guests: Arc<Mutex<BTreeMap<u32, Arc<Rights>>>>,
    here: NodeId,
    listening: Mutex<Option<Listening>>,
    /// The object stores that this process uses.
    pub(crate) stores: Arc<Stores>,
}

/// The port, and the task that takes connections in.
struct Listening {
    listener: std::net::TcpListener,
    task: JoinHandle<()>,
}

/// The cluster's authority, and what a token says of it.
pub(super) struct Issuer {
    pub(super) authority: Authority,
    pub(super) fingerprint: Fingerprint,
}

impl Network {
    /// The network of a process that has a certificate.
    pub(crate) fn new(env: &Env, runtime: &Handle, files: &IdentityFiles) -> Result<Self> {
        let identity = files.load()?.context("this node has no certificate")?;
        let Party::Node(here) = identity.party() else { bail!("the certificate is not that of a node") };
        let fabric = Fabric::new(env.clone(), runtime.clone(), Connector::new(&identity)?, DATA_CONNECTIONS);
        let acceptor = watch::Sender::new(Arc::new(Acceptor::new(&identity)?));
        let server = Server::new(env, Services::default());
        let (members, guests, listening) = (Arc::default(), Arc::default(), Mutex::default());
        let stores = Arc::default();
        let witnesses = Mutex::default();
        Ok(Self { fabric, server, acceptor, members, witnesses, guests, here, listening, stores })
    }

    /// How many nodes there are that work on data.
    pub(crate) fn nodes_count(&self) -> u16 {
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner).len();
        let workers = members.saturating_sub(self.witnesses().len());
        u16::try_from(workers).unwrap_or(u16::MAX).max(1)
    }

    /// The nodes that work on no data.
    pub(crate) fn witnesses(&self) -> BTreeSet<NodeId> {
        self.witnesses.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_witnesses(&self, cluster: &Cluster) {
        let witnesses = cluster.nodes.values().filter(|node| node.witness).map(|node| node.id);
        *self.witnesses.lock().unwrap_or_else(PoisonError::into_inner) = witnesses.collect();
    }

    /// The other nodes that answer now.
    pub(crate) fn reached(&self) -> Vec<NodeId> {
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_there = |node: &NodeId| {
            *node != self.here && self.fabric.peer(*node).is_some_and(|peer| peer.contact().borrow().is_there)
        };
        members.into_iter().filter(is_there).collect()
    }

    /// The number of this node.
    pub(crate) fn here(&self) -> NodeId {
        self.here
    }

    fn listening(&self) -> MutexGuard<'_, Option<Listening>> {
        self.listening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to take connections in.
    pub(crate) async fn listen(&self, address: SocketAddr, runtime: &Handle) -> Result<()> {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot listen at {address}: give another with --address"))?
            .into_std()?;
        let task = self.take_in(&listener, runtime)?;
        *self.listening() = Some(Listening { listener, task });
        Ok(())
    }

    fn take_in(&self, listener: &std::net::TcpListener, runtime: &Handle) -> Result<JoinHandle<()>> {
        let _inside = runtime.enter();
        let listener = TcpListener::from_std(listener.try_clone()?)?;
        let (members, guests) = (self.members.clone(), self.guests.clone());
        let trust = move |party: Option<Party>| match party {
            None => Some(Trust::Stranger),
            Some(Party::Node(node)) => {
                members.lock().unwrap_or_else(PoisonError::into_inner).contains(&node).then_some(Trust::Full)
            }
            Some(Party::Client(client)) => {
                let guests = guests.lock().unwrap_or_else(PoisonError::into_inner);
                guests.get(&client).cloned().map(Trust::Client)
            }
        };
        let (acceptor, server) = (self.acceptor.subscribe(), self.server.clone());
        let services = (server, self.fabric.clone());
        Ok(runtime.spawn(accept_loop(listener, acceptor, services, trust)))
    }

    /// Ends all connections that others have opened. They open new ones, unless they are refused now.
    fn end_connections(&self, runtime: &Handle) -> Result<()> {
        if let Some(listening) = &mut *self.listening() {
            listening.task.abort();
            listening.task = self.take_in(&listening.listener, runtime)?;
        }
        Ok(())
    }

    /// Shows another certificate on the next connections.
    pub(crate) fn renew(&self, files: &IdentityFiles) -> Result<()> {
        let identity = files.load()?.context("this node has no certificate")?;
        self.fabric.set_connector(Connector::new(&identity)?);
        self.acceptor.send_replace(Arc::new(Acceptor::new(&identity)?));
        Ok(())
    }

    /// Whether others can reach this node.
    pub(crate) fn is_listening(&self) -> bool {
        self.listening().is_some()
    }

    /// Others may ask for these services from now on.
    pub(crate) fn serve(&self, services: Services) {
        self.server.set_services(services);
    }

    /// The nodes of the cluster, as they are now.
    pub(crate) fn set_nodes(&self, nodes: &[NodeAddresses], runtime: &Handle) {
        let members: BTreeSet<NodeId> = nodes.iter().map(|node| node.node).collect();
        let before = {
            let mut known = self.members.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *known, members.clone())
        };
        if !before.is_subset(&members)
            && let Err(error) = self.end_connections(runtime)
        {
            tracing::error!(error = %format!("{error:#}"), "connections of a removed node are still open");
        }
        let others = nodes.iter().filter(|node| node.node != self.here);
        let others: BTreeMap<NodeId, Vec<String>> =
            others.map(|node| (node.node, node.addresses.clone())).collect();
        self.fabric.set_nodes(others);
    }

    /// The programs of clients that are no nodes, as they told this node last.
    pub(super) fn client_programs(&self) -> BTreeMap<u32, Program> {
        self.server.programs()
    }

    /// The clients that are no nodes, as they are now. Connections end if one of them may do less than before.
    pub(crate) fn set_guests(&self, guests: BTreeMap<u32, Rights>, runtime: &Handle) {
        let guests: BTreeMap<u32, Arc<Rights>> =
            guests.into_iter().map(|(client, rights)| (client, Arc::new(rights))).collect();
        let before = {
            let mut known = self.guests.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *known, guests.clone())
        };
        let keeps = |(client, rights): (&u32, &Arc<Rights>)| {
            guests.get(client).is_some_and(|now| now.include(rights))
        };
        if !before.iter().all(keeps)
            && let Err(error) = self.end_connections(runtime)
        {
            tracing::error!(error = %format!("{error:#}"), "connections of a removed client are still open");
        }
    }

    /// Ends all connections that others have opened, and takes no more in.
    pub(crate) async fn stop_answering(&self) {
        let listening = self.listening().take();
        if let Some(Listening { task, .. }) = listening {
            task.abort();
            let _ = task.await;
        }
        self.server.set_services(Services::default());
    }

    /// Ends the ways to others.
    pub(crate) fn end(&self) {
        self.fabric.set_nodes(BTreeMap::new());
    }
}

impl Issuer {
    /// The authority whose key this machine was given when it joined.
    pub(super) fn load(env: &Env, dir: &NodeDir, cluster: &ClusterRecord) -> Result<Self> {
        let files = IdentityFiles::new(env, dir);
        let authority = files.authority(&cluster.authorities)?.with_context(|| no_authority(dir))?;
        let fingerprint = Fingerprint::of_pem(authority.certificate_pem())?;
        Ok(Self { authority, fingerprint })
    }
}

fn no_authority(dir: &NodeDir) -> String {
    let path = dir.identity();
    format!("the key of the cluster's authority is missing in {}: restore it from a backup", path.display())
}

/// The key of what nodes give to clients. Each node has that of the cluster.
pub(crate) fn proof_key(env: &Env, dir: &NodeDir) -> Option<ProofKey> {
    env.files.read(&dir.node_key()).ok().map(|secret| ProofKey::of(&secret))
}

/// The nodes of a cluster that others reach, with their addresses.
pub(crate) fn addresses_of(cluster: &Cluster) -> Vec<NodeAddresses> {
    let node = |record: &NodeRecord| NodeAddresses { node: record.id, addresses: record.addresses.clone() };
    cluster.nodes.values().map(node).collect()
}

/// Readies the identity of the first node of a cluster, which has its authority. Renews the certificate.
pub(super) async fn ready_owner(
    env: &Env,
    dir: &NodeDir,
    control: &Control,
    settings: &Settings,
) -> Result<Issuer> {
    let files = IdentityFiles::new(env, dir);
    let cluster = control.view()?.cluster()?;
    let (authorities, now_ns) = (cluster.authorities, env.clock.wall_ns());
    let authority = match authorities.is_empty() {
        true => {
            let authority = Authority::make(cluster.id, now_ns)?;
            // First the key: without it the certificate is worth nothing.
            files.keep_authority(authority.key_pem())?;
            authority
        }
        false => files.authority(&authorities)?.with_context(|| no_authority(dir))?,
    };
    let key = files.key()?;
    let issued = authority.issue(cluster.id, Party::Node(OWNER), &key.request, now_ns)?;
    files.keep(&issued.certificate_pem, authority.certificate_pem())?;
    let decide = |plan: &mut Plan| -> Result<()> {
        if plan.next().record.authorities.is_empty() {
            plan.set_cluster(|cluster| cluster.authorities = authority.certificate_pem().to_owned());
        }
        let known = plan.next().nodes.get(&OWNER).cloned();
        if known.is_none() && plan.next().record.next_node == OWNER.0 {
            // An earlier version made the cluster.
            plan.set_cluster(|cluster| cluster.next_node = OWNER.0 + 1);
        }
        let record = known.clone().unwrap_or_else(|| NodeRecord::new(OWNER, hostname()));
        let record = NodeRecord { key: issued.key.clone(), addresses: settings.advertised(), ..record };
        if known.as_ref() != Some(&record) {
            plan.set_node(record);
        }
        plan.certify_node(OWNER, now_ns / 1_000_000_000);
        Ok(())
    };
    control.plan(decide).await?;
    let fingerprint = Fingerprint::of_pem(authority.certificate_pem())?;
    Ok(Issuer { authority, fingerprint })
}
