//! How a node joins: it makes a key, shows the token to a node of the cluster, and keeps the certificate that it gets.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::ClusterId;
use base::env::Env;
use base::program::FORMAT_LEVEL;
use bytes::Bytes;
use control::{Token, check_address};
use tokio::runtime::Handle;
use wire::cluster::{JoinReply, JoinRequest, Joined, NewNode};
use wire::identity::Fingerprint;
use wire::link::{Dial, Peer, PeerOptions, connect_as_stranger};

use crate::identity::{IdentityFiles, Membership, hostname};
use crate::node::{NodeDir, PORT, is_locked, prepare_dir};

/// How long the cluster may take to answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long one address is tried.
const ADDRESS_PATIENCE: Duration = Duration::from_secs(3);

/// What a new node says of itself.
pub(crate) struct JoinOptions {
    pub(crate) token: Token,
    pub(crate) name: Option<String>,
    pub(crate) listen: Option<SocketAddr>,
    pub(crate) advertise: Vec<String>,
    pub(crate) zone: String,
    pub(crate) rack: String,
}

/// Joins the cluster of the token. A node that joined before and is not running asks again: the cluster may be elsewhere now.
pub(crate) async fn join(env: &Env, dir: &NodeDir, options: JoinOptions) -> Result<()> {
    let identity = IdentityFiles::new(env, dir);
    let root = dir.root().display();
    if env.files.exists(&dir.client_json()) {
        bail!("there is a client in {root}: join in another directory");
    }
    let known = identity.membership()?;
    // A node that joined may follow the metadata in stores of its own.
    if known.is_none() && (env.files.exists(&dir.meta_dirs()) || env.files.exists(&dir.meta())) {
        bail!("there is a cluster in {root} already: join in another directory, a new node has no data");
    }
    if let Some(known) = known.as_ref().filter(|known| known.cluster != options.token.cluster) {
        bail!("the node in {root} belongs to another cluster: cluster={}", known.cluster);
    }
    if known.is_some() && is_locked(env, dir) {
        return Ok(());
    }
    let _lock = prepare_dir(env, dir)?;
    let listen = match (options.listen, &known) {
        (Some(listen), _) => listen,
        (None, Some(known)) => known.listen,
        (None, None) => own_address(&options.token)?,
    };
    let addresses = reached_at(listen, options.advertise)?;
    // Found out before the token is used.
    let bound = std::net::TcpListener::bind(listen);
    drop(bound.with_context(|| format!("cannot listen at {listen}: give another address with --address"))?);
    let key = identity.key()?;
    let request = JoinRequest::Join(NewNode {
        token: options.token.id,
        secret: options.token.secret.clone(),
        name: options.name.unwrap_or_else(hostname),
        request: Bytes::from(key.request),
        addresses: addresses.clone(),
        zone: options.zone,
        rack: options.rack,
        format_level: FORMAT_LEVEL,
    });
    let JoinReply::Joined(joined) = ask_as_stranger(env, (&options.token).into(), &request).await? else {
        bail!("the node gave another answer");
    };
    let Joined { node, certificate, authorities, cluster_key, nodes, log, authority_key, witness } = joined;
    identity.keep(&certificate, &authorities)?;
    if !cluster_key.is_empty() {
        let path = dir.node_key();
        env.files
            .write_atomic(&path, &cluster_key)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    if !authority_key.is_empty() {
        identity.keep_authority(&authority_key)?;
    }
    // This file makes it a node.
    let log = Some(log).filter(|log| !log.is_empty());
    let (recoveries, left) = known.map(|known| (known.recoveries, known.left)).unwrap_or_default();
    let cluster = options.token.cluster;
    let membership = Membership {
        cluster,
        node,
        listen,
        addresses,
        nodes,
        log,
        recoveries,
        left,
        leaves_engine: None,
        witness,
    };
    identity.keep_membership(&membership)
}

/// Where others reach a node that listens there.
pub(super) fn reached_at(listen: SocketAddr, advertise: Vec<String>) -> Result<Vec<String>> {
    let addresses = match advertise.is_empty() {
        false => advertise,
        true if listen.ip().is_unspecified() => bail!(
            "{listen} is all addresses of this machine: say with --advertise HOST:PORT at which one others reach it"
        ),
        true => vec![listen.to_string()],
    };
    for address in &addresses {
        check_address(address)?;
    }
    Ok(addresses)
}

/// The address of this machine from which the cluster is reached.
fn own_address(token: &Token) -> Result<SocketAddr> {
    for address in &token.addresses {
        // Nothing is sent: the system says which way packets would go.
        let Ok(socket) =
            std::net::UdpSocket::bind(("::", 0)).or_else(|_| std::net::UdpSocket::bind(("0.0.0.0", 0)))
        else {
            continue;
        };
        if socket.connect(address.as_str()).is_err() {
            continue;
        }
        if let Ok(local) = socket.local_addr() {
            let ip = local.ip().to_canonical();
            return Ok(SocketAddr::new(ip, PORT));
        }
    }
    bail!("no way to {}: is this machine on the network of the cluster?", token.addresses.join(", "))
}

/// What a process without a certificate knows of a cluster.
#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) cluster: ClusterId,
    pub(crate) authority: Fingerprint,
    /// `host:port` of nodes.
    pub(crate) addresses: Vec<String>,
}

impl From<&Token> for Known {
    fn from(token: &Token) -> Self {
        Self { cluster: token.cluster, authority: token.authority, addresses: token.addresses.clone() }
    }
}

/// Asks one of the cluster's nodes without a certificate.
pub(crate) async fn ask_as_stranger(env: &Env, known: Known, request: &JoinRequest) -> Result<JoinReply> {
    if known.addresses.is_empty() {
        bail!("no address of a node is known");
    }
    let tried = known.addresses.join(", ");
    // Why no node was reached, and which address is next.
    let failed: Arc<std::sync::Mutex<(String, usize)>> = Arc::default();
    let noted = failed.clone();
    let dial: Dial = Arc::new(move || {
        let (known, noted) = (known.clone(), noted.clone());
        Box::pin(async move {
            let turn = {
                let mut noted = super::lock(&noted);
                noted.1 += 1;
                noted.1 - 1
            };
            let address = &known.addresses[turn % known.addresses.len()];
            let connecting = connect_as_stranger(address, known.cluster, known.authority);
            let connected = tokio::time::timeout(ADDRESS_PATIENCE, connecting).await;
            let connected = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
            if let Err(error) = &connected {
                super::lock(&noted).0 = format!("{address}: {error}");
            }
            connected
        })
    });
    let peer = Peer::new(PeerOptions {
        env: env.clone(),
        runtime: Handle::current(),
        dial,
        data_connections: 0,
        proofs: Arc::default(),
    });
    let answer = tokio::time::timeout(PATIENCE, wire::link::join(&peer, request)).await;
    match answer {
        Ok(Ok(reply)) => Ok(reply),
        Ok(Err(declined)) => bail!("the cluster declines: {declined}"),
        Err(_) => bail!("no node of the cluster answers: {} (tried {tried})", super::lock(&failed).0),
    }
}
