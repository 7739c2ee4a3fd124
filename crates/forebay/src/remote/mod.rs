//! A filesystem whose owner and drives are in other processes, on this machine or elsewhere.

mod blobs;
mod routes;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use base::env::Env;
use base::{DriveId, FsError, LedgerId, NodeId};
use client::{Client, ClientOptions, Limits, Near, Peers, Reach, TierLink, Topology};
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use upkeep::{DamageKeeper, Pace, S3Store, StoreSettings};
use wire::drive::{AwayDrive, DriveService};
use wire::link::{Contact, Peer, RemoteOwner, RemoteViews};
use wire::meta::MetaService;
use wire::store::{ObjectStore, StoreAddress};
use wire::view::{FilesystemView, NEWS_WAIT_MAX, ViewReply, ViewRequest, ViewService};

use crate::node::MemoryPlan;
use crate::stores::Stores;
use blobs::OwnersStore;

pub(crate) use routes::{OwnDrives, Routes};

/// How long the owner may take to tell of the filesystem.
const FIRST_VIEW: Duration = Duration::from_secs(30);
/// Pause after a question for news that has no answer.
const NEWS_PAUSE: Duration = Duration::from_secs(1);

/// How to reach an object store: what a view carries as JSON.
#[derive(Serialize, Deserialize)]
pub(crate) struct StoreAccess {
    address: StoreAddress,
    secret_key: String,
}

impl StoreAccess {
    pub(crate) fn to_json(settings: &StoreSettings) -> Result<Vec<u8>> {
        let StoreSettings { address, secret_key } = settings.clone();
        Ok(serde_json::to_vec(&Self { address, secret_key })?)
    }

    fn open(env: &Env, stores: &Stores, json: &[u8]) -> Result<Arc<S3Store>> {
        let Self { address, secret_key } = serde_json::from_slice(json)?;
        Ok(stores.of(env, &Handle::current(), StoreSettings { address, secret_key })?)
    }
}

/// Limits of memory, in bytes, as those of a mount in the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Memory {
    pub(crate) dirty: u64,
    pub(crate) map: u64,
    pub(crate) fetched: u64,
    pub(crate) returning: u64,
}

impl From<&MemoryPlan> for Memory {
    fn from(plan: &MemoryPlan) -> Self {
        Self {
            dirty: plan.dirty_bytes,
            map: plan.map_bytes,
            fetched: plan.fetched_bytes,
            returning: plan.returning_bytes,
        }
    }
}

/// A filesystem to open.
pub(crate) struct Wanted {
    /// The node that owns its ledger, as it is known now; `None`: no node is known to.
    pub(crate) owner: watch::Receiver<Option<NodeId>>,
    /// Its name.
    pub(crate) name: String,
    pub(crate) memory: Memory,
    /// How long requests wait for drives and owners that are not reached; `None`: for ever.
    pub(crate) patience: Option<Duration>,
}

/// An open filesystem.
pub(crate) struct RemoteFilesystem {
    pub(crate) client: Client,
    news: JoinHandle<()>,
    _damage: DamageKeeper,
}

impl RemoteFilesystem {
    /// Asks the owner of a filesystem for it, and opens a client.
    pub(crate) async fn open(env: &Env, routes: &Arc<Routes>, wanted: Wanted) -> Result<Self> {
        let owner = Owner { routes: routes.clone(), node: wanted.owner.clone() };
        let first = tokio::time::timeout(FIRST_VIEW, first_view(owner.clone(), &wanted.name)).await;
        let view = first.context("the node that owns the metadata does not answer")??;
        let (topology, told_topology) = watch::channel(topology_of(routes, &view).await);
        let (store, told_store) =
            watch::channel(store_of(env, &owner, &view, (&wanted.name, wanted.patience)));
        let client = open_client(env, &wanted, owner.clone(), &view, told_topology, told_store).await?;
        let pace = Arc::new(Pace::new(env.clone()));
        let damage = DamageKeeper::start(env.clone(), client.clone(), pace, &Handle::current());
        let told = Told { topology, store };
        let news = follow_news(env.clone(), owner, (wanted.name, wanted.patience), view, told);
        Ok(Self { client, news: tokio::spawn(news), _damage: damage })
    }

    /// Ends the session, unless the owner stays away for so long.
    pub(crate) async fn close(self, patience: Duration) {
        let closed = async {
            // An owner that has just come back is told first.
            self.client.refresh_use().await?;
            self.client.close().await
        };
        if tokio::time::timeout(patience, closed).await.is_err() {
            tracing::warn!("the session ends by its silence: the owner is away");
        }
    }
}

impl Drop for RemoteFilesystem {
    fn drop(&mut self) {
        self.news.abort();
    }
}

/// The node that owns the ledgers, which may become another.
#[derive(Clone)]
struct Owner {
    routes: Arc<Routes>,
    node: watch::Receiver<Option<NodeId>>,
}

impl Owner {
    /// The way to it, once it is known.
    async fn peer(&mut self) -> Arc<Peer> {
        loop {
            let node = *self.node.borrow_and_update();
            if let Some(peer) = node.and_then(|node| self.routes.to(node)) {
                return peer;
            }
            // Its address may come later than its number.
            let _ = tokio::time::timeout(NEWS_PAUSE, self.changed()).await;
        }
    }

    /// Waits until it is another.
    async fn changed(&mut self) {
        if self.node.changed().await.is_err() {
            // The last word stays.
            std::future::pending().await
        }
    }
}

async fn first_view(mut owner: Owner, name: &str) -> Result<FilesystemView> {
    loop {
        let views = RemoteViews::new(&owner.peer().await);
        let request = ViewRequest::Filesystem { name: name.to_owned(), known: 0, wait_ms: 0 };
        let asked = tokio::time::timeout(NEWS_PAUSE * 5, views.ask(request)).await;
        match asked.unwrap_or(Err(FsError::Disconnected)) {
            Ok(ViewReply::Filesystem(view)) => return Ok(*view),
            Ok(ViewReply::Same | ViewReply::Owner(..) | ViewReply::Blob(_)) | Err(FsError::Disconnected) => {
                tokio::time::sleep(NEWS_PAUSE).await;
            }
            Err(error) => return Err(error).with_context(|| format!("asking for filesystem {name}")),
        }
    }
}

/// A filesystem, as its owner tells of it now.
pub(crate) async fn view_of(
    routes: &Arc<Routes>,
    node: watch::Receiver<Option<NodeId>>,
    name: &str,
) -> Result<FilesystemView> {
    let owner = Owner { routes: routes.clone(), node };
    let view = tokio::time::timeout(FIRST_VIEW, first_view(owner, name)).await;
    view.context("the node that owns the metadata does not answer")?
}

async fn topology_of(routes: &Routes, view: &FilesystemView) -> Arc<Topology> {
    routes.set_nodes(&view.nodes);
    let places: HashMap<DriveId, NodeId> =
        view.map.drives.iter().map(|drive| (drive.id, NodeId(drive.place.node))).collect();
    let wanted = view.drives.iter().filter_map(|id| Some((*id, *places.get(id)?)));
    let away = view.away.iter().map(|id| (*id, Arc::new(AwayDrive(*id)) as Arc<dyn DriveService>));
    let drives = routes.drives(wanted).await.into_iter().chain(away).collect();
    let here = routes.here().and_then(|node| view.places.iter().find(|place| place.node == node.0));
    let topology = Topology {
        map: view.map.clone(),
        drives,
        groups: view.groups.clone(),
        profile: view.write_profile,
        narrow: view.narrow.clone(),
        limits: Limits {
            provisioned_bytes: view.provisioned_bytes,
            ssd_bytes: view.ssd_bytes,
            spare_millionths: view.spare_millionths,
        },
        near: Near::default(),
        nodes: view.for_nodes.clone(),
    };
    Arc::new(topology.seen_from(here.copied(), view.writes_near))
}

fn store_of(
    env: &Env,
    owner: &Owner,
    view: &FilesystemView,
    (name, patience): (&str, Option<Duration>),
) -> Option<Arc<dyn ObjectStore>> {
    if view.store.is_empty() {
        return view.has_store.then(|| OwnersStore::new(owner, view, name, patience) as Arc<dyn ObjectStore>);
    }
    match StoreAccess::open(env, &owner.routes.stores, &view.store) {
        Ok(store) => Some(store),
        Err(error) => {
            tracing::error!("the object store cannot be used: {error:#}");
            None
        }
    }
}

async fn open_client(
    env: &Env,
    wanted: &Wanted,
    mut owner: Owner,
    view: &FilesystemView,
    topology: watch::Receiver<Arc<Topology>>,
    store: watch::Receiver<Option<Arc<dyn ObjectStore>>>,
) -> Result<Client> {
    let peer = owner.peer().await;
    let first = RemoteOwner::new(&peer, view.ledger);
    let (publish, seat) = watch::channel(first.clone() as Arc<dyn MetaService>);
    let (tell, contact) = watch::channel(*peer.contact().borrow());
    tokio::spawn(follow_contact(owner.clone(), tell));
    tokio::spawn(follow_owner(owner, (peer, first), view.ledger, publish));
    let reach = Reach::hard(contact);
    let reach = match wanted.patience {
        Some(patience) => reach.waiting_for_drives_at_most(patience).waiting_for_owner_at_most(patience),
        None => reach,
    };
    let options = ClientOptions {
        env: env.clone(),
        runtime: Handle::current(),
        ledger: view.ledger,
        owner: seat,
        topology,
        profile: view.profile,
        dirty_bytes_max: wanted.memory.dirty,
        map_bytes_max: wanted.memory.map,
        tier: TierLink {
            cluster: view.cluster,
            filesystem: view.id,
            fetched_bytes_max: wanted.memory.fetched,
            returning_bytes_max: wanted.memory.returning,
            store,
        },
        peers: Peers::default(),
        reach,
    };
    Client::open(options).await.context("registering with the owner of the ledger")
}

/// Tells the client of each opening of the ledger.
async fn follow_owner(
    mut owner: Owner,
    (mut peer, mut seat): (Arc<Peer>, Arc<RemoteOwner>),
    ledger: LedgerId,
    publish: watch::Sender<Arc<dyn MetaService>>,
) {
    loop {
        tokio::select! {
            () = publish.closed() => return,
            () = seat.lost() => {}
            () = owner.changed() => {
                let next = owner.peer().await;
                if Arc::ptr_eq(&next, &peer) {
                    continue;
                }
                peer = next;
            }
        }
        let earlier = std::mem::replace(&mut seat, RemoteOwner::new(&peer, ledger));
        publish.send_replace(seat.clone());
        earlier.give_up();
    }
}

/// Tells the client whether the owner can be reached. Another owner counts as a loss.
async fn follow_contact(mut owner: Owner, tell: watch::Sender<Contact>) {
    let mut before = 0;
    while !tell.is_closed() {
        let peer = owner.peer().await;
        let mut contact = peer.contact();
        loop {
            let now = *contact.borrow_and_update();
            tell.send_replace(Contact { is_there: now.is_there, losses: before + now.losses });
            tokio::select! {
                changed = contact.changed() => if changed.is_err() { break },
                () = owner.changed() => break,
                () = tell.closed() => return,
            }
        }
        before = tell.borrow().losses + 1;
        tell.send_replace(Contact { is_there: false, losses: before });
    }
}

/// What the client is told of the filesystem.
struct Told {
    topology: watch::Sender<Arc<Topology>>,
    store: watch::Sender<Option<Arc<dyn ObjectStore>>>,
}

/// Publishes each later view.
async fn follow_news(
    env: Env,
    mut owner: Owner,
    (name, patience): (String, Option<Duration>),
    mut view: FilesystemView,
    client: Told,
) {
    loop {
        let views = RemoteViews::new(&owner.peer().await);
        let wait_ms = NEWS_WAIT_MAX.as_millis() as u32;
        let request = ViewRequest::Filesystem { name: name.clone(), known: view.number, wait_ms };
        let answer = tokio::select! {
            answer = views.ask(request) => answer,
            () = owner.changed() => continue,
        };
        match answer {
            Ok(ViewReply::Filesystem(news)) => {
                if (&news.store, news.has_store) != (&view.store, view.has_store) {
                    client.store.send_replace(store_of(&env, &owner, &news, (&name, patience)));
                }
                client.topology.send_replace(topology_of(&owner.routes, &news).await);
                view = *news;
            }
            Ok(ViewReply::Same | ViewReply::Owner(..) | ViewReply::Blob(_)) => {}
            Err(error) => {
                tracing::debug!(%error, "no news of the filesystem");
                tokio::time::sleep(NEWS_PAUSE).await;
            }
        }
    }
}
