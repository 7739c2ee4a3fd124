//! The process of a mount. It reaches the node's owner and drives by a socket, and waits while the node is away.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use base::FsError;
use base::env::Env;
use client::{Client, ClientOptions, Limits, Peers, Reach, TierLink, Topology};
use posix::fuse::{Mount, MountFlags, MountOptions, UnmountMode};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::watch;
use upkeep::{DamageKeeper, Pace, S3Store, StoreSettings};
use wire::drive::DriveService;
use wire::link::{Connection, Dial, Peer, PeerOptions, RemoteDrive, RemoteOwner, RemoteViews};
use wire::meta::MetaService;
use wire::store::{ObjectStore, StoreAddress};
use wire::view::{FilesystemView, NEWS_WAIT_MAX, ViewReply, ViewRequest, ViewService};

use super::{About, Answer, Ask, PATIENCE, Place, READY, Spec, take_lock};
use crate::log::{Log, Sink};
use crate::node::{CLIENTS_SOCKET, NodeDir};

/// Connections for data, beside the one for metadata.
const DATA_CONNECTIONS: usize = 4;
/// How long the node may take to tell of the filesystem.
const FIRST_VIEW: Duration = Duration::from_secs(30);
/// Pause after a question for news that has no answer.
const NEWS_PAUSE: Duration = Duration::from_secs(1);
/// How often the process looks whether it was unmounted by hand.
const LOOK: Duration = Duration::from_millis(200);
/// How long writing out may take at the end.
const CLOSE_PATIENCE: Duration = Duration::from_secs(8);
/// Threads that continue requests which waited.
const WORKERS: usize = 2;

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

    fn open(env: &Env, json: &[u8]) -> Result<Arc<S3Store>> {
        let Self { address, secret_key } = serde_json::from_slice(json)?;
        Ok(S3Store::new(env.clone(), StoreSettings { address, secret_key })?)
    }
}

/// The program of the process. Prints one line: that it serves, or why not.
pub(crate) fn serve(spec: &str) -> Result<()> {
    let served = run(spec);
    if let Err(error) = &served {
        tracing::error!("{error:#}");
        println!("{error:#}");
    }
    served
}

fn run(spec: &str) -> Result<()> {
    let spec: Spec = serde_json::from_str(spec).context("reading what to mount")?;
    // Fails only in a leader of a process group, which is detached enough.
    let _ = rustix::process::setsid();
    let (env, dir) = (Env::real(), NodeDir::new(&spec.dir));
    let place = Place { dir: &dir, id: spec.id };
    let _lock = take_lock(&env, &place)?;
    let log = Log::start(&env, Sink::file(&env, &place.log())?);
    log.abort_on_panic();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build()?;
    let ended = runtime.block_on(mount(&env, &dir, &spec));
    if let Err(error) = &ended {
        tracing::error!("the mount ends: {error:#}");
    }
    for kind in ["json", "sock"] {
        let _ = env.files.remove_file(&place.file(kind));
    }
    log.flush();
    // Threads of the kernel's requests may wait for programs.
    runtime.shutdown_background();
    ended
}

async fn mount(env: &Env, dir: &NodeDir, spec: &Spec) -> Result<()> {
    let peer = Peer::new(PeerOptions {
        env: env.clone(),
        runtime: Handle::current(),
        dial: dial(dir),
        data_connections: DATA_CONNECTIONS,
    });
    let views = RemoteViews::new(&peer);
    let first = tokio::time::timeout(FIRST_VIEW, first_view(&views, &spec.filesystem)).await;
    let view = first.context("the node does not answer")??;
    let (topology, told_topology) = watch::channel(topology_of(&peer, &view).await);
    let (store, told_store) = watch::channel(store_of(env, &view));
    let client = open_client(env, spec, &peer, &view, told_topology, told_store).await?;
    let _damage = DamageKeeper::start(
        env.clone(),
        client.clone(),
        Arc::new(Pace::new(env.clone())),
        &Handle::current(),
    );
    let news = tokio::spawn(follow_news(
        env.clone(),
        peer.clone(),
        spec.filesystem.clone(),
        view,
        (topology, store),
    ));
    let flags: MountFlags = spec.options.parse()?;
    let options = MountOptions {
        path: spec.path.clone(),
        source: spec.source(),
        threads: std::thread::available_parallelism().map_or(4, |cores| cores.get().clamp(4, 16)),
        flags,
    };
    let (mounting, runtime) = (client.clone(), Handle::current());
    let mount = tokio::task::spawn_blocking(move || Mount::new(mounting, runtime, &options)).await??;
    let ended = answer(env, dir, spec, &client, mount).await;
    news.abort();
    let closed = tokio::time::timeout(CLOSE_PATIENCE, client.close()).await;
    ended.and(closed.context("writing out took too long")?.context("writing out"))
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

async fn first_view(views: &RemoteViews, name: &str) -> Result<FilesystemView> {
    loop {
        let request = ViewRequest::Filesystem { name: name.to_owned(), known: 0, wait_ms: 0 };
        match views.ask(request).await {
            Ok(ViewReply::Filesystem(view)) => return Ok(*view),
            Ok(ViewReply::Same) | Err(FsError::Disconnected) => tokio::time::sleep(NEWS_PAUSE).await,
            Err(error) => return Err(error).with_context(|| format!("asking for filesystem {name}")),
        }
    }
}

async fn topology_of(peer: &Arc<Peer>, view: &FilesystemView) -> Arc<Topology> {
    let mut drives = Topology::default().drives;
    for id in &view.drives {
        drives.insert(*id, RemoteDrive::new(peer, *id).await as Arc<dyn DriveService>);
    }
    Arc::new(Topology {
        map: view.map.clone(),
        drives,
        groups: view.groups.clone(),
        profile: view.write_profile,
        narrow: view.narrow.clone(),
        limits: Limits { provisioned_bytes: view.provisioned_bytes, ssd_bytes: view.ssd_bytes },
    })
}

fn store_of(env: &Env, view: &FilesystemView) -> Option<Arc<dyn ObjectStore>> {
    if view.store.is_empty() {
        return None;
    }
    match StoreAccess::open(env, &view.store) {
        Ok(store) => Some(store),
        Err(error) => {
            tracing::error!("the object store cannot be used: {error:#}");
            None
        }
    }
}

async fn open_client(
    env: &Env,
    spec: &Spec,
    peer: &Arc<Peer>,
    view: &FilesystemView,
    topology: watch::Receiver<Arc<Topology>>,
    store: watch::Receiver<Option<Arc<dyn ObjectStore>>>,
) -> Result<Client> {
    let owner = RemoteOwner::new(peer, view.ledger);
    let (publish, seat) = watch::channel(owner.clone() as Arc<dyn MetaService>);
    tokio::spawn(follow_owner(peer.clone(), owner, view.ledger, publish));
    let options = ClientOptions {
        env: env.clone(),
        runtime: Handle::current(),
        ledger: view.ledger,
        owner: seat,
        topology,
        profile: view.profile,
        dirty_bytes_max: spec.memory.dirty,
        map_bytes_max: spec.memory.map,
        tier: TierLink {
            cluster: view.cluster,
            filesystem: view.id,
            fetched_bytes_max: spec.memory.fetched,
            returning_bytes_max: spec.memory.returning,
            store,
        },
        peers: Peers::default(),
        reach: Reach::hard(peer.contact()),
    };
    Client::open(options).await.context("registering with the owner of the ledger")
}

/// Tells the client of each opening of the ledger.
async fn follow_owner(
    peer: Arc<Peer>,
    mut owner: Arc<RemoteOwner>,
    ledger: base::LedgerId,
    publish: watch::Sender<Arc<dyn MetaService>>,
) {
    while !publish.is_closed() {
        owner.lost().await;
        owner = RemoteOwner::new(&peer, ledger);
        publish.send_replace(owner.clone());
    }
}

/// Publishes each later view.
async fn follow_news(
    env: Env,
    peer: Arc<Peer>,
    name: String,
    mut view: FilesystemView,
    (topology, store): (watch::Sender<Arc<Topology>>, watch::Sender<Option<Arc<dyn ObjectStore>>>),
) {
    let views = RemoteViews::new(&peer);
    loop {
        let wait_ms = NEWS_WAIT_MAX.as_millis() as u32;
        let request = ViewRequest::Filesystem { name: name.clone(), known: view.number, wait_ms };
        match views.ask(request).await {
            Ok(ViewReply::Filesystem(news)) => {
                if news.store != view.store {
                    store.send_replace(store_of(&env, &news));
                }
                topology.send_replace(topology_of(&peer, &news).await);
                view = *news;
            }
            Ok(ViewReply::Same) => {}
            Err(error) => {
                tracing::debug!(%error, "no news of the filesystem");
                tokio::time::sleep(NEWS_PAUSE).await;
            }
        }
    }
}

/// Says that the mount serves, and answers the node until the mount ends.
async fn answer(env: &Env, dir: &NodeDir, spec: &Spec, client: &Client, mut mount: Mount) -> Result<()> {
    let place = Place { dir, id: spec.id };
    let listener = listen(env, dir, &place)?;
    let about = About {
        pid: std::process::id(),
        path: spec.path.clone(),
        source: spec.source(),
        transport: mount.transport().name().to_owned(),
        session: client.session(),
    };
    env.files.write_atomic(&place.file("json"), &serde_json::to_vec(&about)?)?;
    tracing::info!(path = %spec.path.display(), "mounted");
    println!("{READY}");
    std::io::stdout().flush()?;
    loop {
        let accepted = tokio::time::timeout(LOOK, listener.accept()).await;
        if !mount.is_alive() {
            tracing::info!("unmounted by hand");
            return Ok(());
        }
        let Ok(Ok((stream, _))) = accepted else { continue };
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        if !matches!(tokio::time::timeout(PATIENCE, stream.read_line(&mut line)).await, Ok(Ok(_))) {
            continue;
        }
        let Ok(ask) = serde_json::from_str::<Ask>(&line) else { continue };
        let (done, back) = execute(ask, client, mount).await?;
        mount = back;
        let ends = ask == Ask::Detach || ask == Ask::Unmount && done.is_ok();
        let answer: Answer = done.err().map(|error| format!("{error:#}"));
        let mut text = serde_json::to_vec(&answer)?;
        text.push(b'\n');
        // If the node does not wait any more, it asks again.
        let _ = stream.write_all(&text).await;
        if ends {
            return Ok(());
        }
    }
}

async fn execute(ask: Ask, client: &Client, mut mount: Mount) -> Result<(Result<()>, Mount)> {
    let mode = match ask {
        Ask::Sync => return Ok((client.sync().await.context("writing out"), mount)),
        Ask::Unmount => UnmountMode::IfIdle,
        Ask::Detach => UnmountMode::Detach,
    };
    let work = move || (mount.unmount(mode), mount);
    let (unmounted, mount) = tokio::task::spawn_blocking(work).await?;
    let done = match unmounted {
        Ok(()) => client.sync().await.context("writing out after unmounting"),
        Err(error) => Err(error.into()),
    };
    Ok((done, mount))
}

fn listen(env: &Env, dir: &NodeDir, place: &Place<'_>) -> Result<UnixListener> {
    let path = place.file("sock");
    remove(env, &path)?;
    let socket = dir.socket_named(&place.name("sock"));
    UnixListener::bind(socket.as_path()).with_context(|| format!("cannot listen at {}", path.display()))
}

/// Removes what an earlier process left.
fn remove(env: &Env, path: &Path) -> Result<()> {
    if env.files.exists(path) {
        env.files.remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}
