//! The process of a mount. It reaches the node's owner and drives by a socket, and waits while the node is away.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use base::env::Env;
use base::{FsError, SessionId};
use client::{Client, ClientOptions, Limits, Peers, Reach, TierLink, Topology};
use posix::fuse::{Mount, MountFlags, MountOptions, Transport, UnmountMode};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
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
/// A drive is left out if the node does not tell its state by then.
const FIRST_FACT: Duration = Duration::from_secs(5);
/// Pause after writing out has failed.
const SYNC_PAUSE: Duration = Duration::from_secs(1);
/// Pause after a question for news that has no answer.
const NEWS_PAUSE: Duration = Duration::from_secs(1);
/// How often the process looks whether it was unmounted by hand.
const LOOK: Duration = Duration::from_millis(200);
/// How long the end of the session may take.
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
        // The node reads no more than the first line.
        let _ = writeln!(std::io::stdout(), "{error:#}");
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
    // Without these files, the node knows that everything is written out.
    let cleared = place.clear(&env);
    log.flush();
    // Threads of the kernel's requests may wait for programs.
    runtime.shutdown_background();
    ended.and(cleared)
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
        Told { topology, store },
    ));
    let flags: MountFlags = spec.options.parse()?;
    let options = MountOptions::new(&spec.path, spec.source(), flags);
    let listener = listen(dir, &Place { dir, id: spec.id })?;
    if !is_awaited() {
        anyhow::bail!("the node that started the mount is gone");
    }
    let (mounting, runtime) = (client.clone(), Handle::current());
    let mount = tokio::task::spawn_blocking(move || Mount::new(mounting, runtime, &options)).await??;
    let mut mounted = Mounted { env, dir, spec, client: &client, mount: Some(mount), told: None };
    let ended = mounted.answer(&listener).await;
    if ended.is_err() {
        mounted.end().await.context("unmounting after an error")?;
    }
    news.abort();
    let closed = async {
        // A node that has just come back is told first.
        client.refresh_use().await?;
        client.close().await
    };
    if tokio::time::timeout(CLOSE_PATIENCE, closed).await.is_err() {
        tracing::warn!("the session ends by its silence: the node is away");
    }
    ended
}

/// Whether a process still reads what this one prints.
fn is_awaited() -> bool {
    let out = std::io::stdout();
    let mut polled = [PollFd::new(&out, PollFlags::OUT)];
    let _ = poll(&mut polled, Some(&Timespec::default()));
    !polled[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
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
            Ok(ViewReply::Same) | Err(FsError::Disconnected) if is_awaited() => {
                tokio::time::sleep(NEWS_PAUSE).await;
            }
            Ok(ViewReply::Same) => anyhow::bail!("the node that started the mount is gone"),
            Err(error) => return Err(error).with_context(|| format!("asking for filesystem {name}")),
        }
    }
}

async fn topology_of(peer: &Arc<Peer>, view: &FilesystemView) -> Arc<Topology> {
    let mut drives = Topology::default().drives;
    for id in &view.drives {
        // A drive that has gone since says nothing.
        if let Ok(drive) = tokio::time::timeout(FIRST_FACT, RemoteDrive::new(peer, *id)).await {
            drives.insert(*id, drive as Arc<dyn DriveService>);
        }
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

/// What the client is told of the filesystem.
struct Told {
    topology: watch::Sender<Arc<Topology>>,
    store: watch::Sender<Option<Arc<dyn ObjectStore>>>,
}

/// Publishes each later view.
async fn follow_news(env: Env, peer: Arc<Peer>, name: String, mut view: FilesystemView, client: Told) {
    let views = RemoteViews::new(&peer);
    loop {
        let wait_ms = NEWS_WAIT_MAX.as_millis() as u32;
        let request = ViewRequest::Filesystem { name: name.clone(), known: view.number, wait_ms };
        match views.ask(request).await {
            Ok(ViewReply::Filesystem(news)) => {
                if news.store != view.store {
                    client.store.send_replace(store_of(&env, &news));
                }
                client.topology.send_replace(topology_of(&peer, &news).await);
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

/// The mount while it serves.
struct Mounted<'a> {
    env: &'a Env,
    dir: &'a NodeDir,
    spec: &'a Spec,
    client: &'a Client,
    mount: Option<Mount>,
    /// The session that the file about the process names.
    told: Option<SessionId>,
}

impl Mounted<'_> {
    /// Says that the mount serves, and answers the node until it was unmounted and everything is written out.
    async fn answer(&mut self, listener: &UnixListener) -> Result<()> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        self.tell()?;
        tracing::info!(path = %self.spec.path.display(), "mounted");
        writeln!(std::io::stdout(), "{READY}").context("the node that started the mount is gone")?;
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted.ok(),
                _ = terminate.recv() => return self.end().await,
                _ = interrupt.recv() => return self.end().await,
                () = tokio::time::sleep(LOOK) => None,
            };
            if let Err(error) = self.tell() {
                // Where there is no room for the file, the mount goes on.
                tracing::warn!("the node cannot be told of the new session: {error:#}");
            }
            // Unmounted by hand, or at the node's request, and not all could be written out.
            if self.mount.take_if(|mount| !mount.is_alive()).is_some() || self.mount.is_none() {
                tracing::info!("unmounted");
                return self.end().await;
            }
            let Some((stream, _)) = accepted else { continue };
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            if !matches!(tokio::time::timeout(PATIENCE, stream.read_line(&mut line)).await, Ok(Ok(_))) {
                continue;
            }
            let Ok(ask) = serde_json::from_str::<Ask>(&line) else { continue };
            let done = self.execute(ask).await;
            let ends = ask != Ask::Sync && done.is_ok();
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

    /// Takes the mount away and writes out, however long the node is away.
    async fn end(&mut self) -> Result<()> {
        self.unmount(UnmountMode::Detach).await?;
        while let Err(error) = self.client.sync().await {
            tracing::error!(%error, "not everything that was written is durable, trying again");
            tokio::time::sleep(SYNC_PAUSE).await;
        }
        Ok(())
    }

    async fn execute(&mut self, ask: Ask) -> Result<()> {
        match ask {
            Ask::Sync => {}
            Ask::Unmount => self.unmount(UnmountMode::IfIdle).await?,
            Ask::Detach => self.unmount(UnmountMode::Detach).await?,
        }
        self.client.sync().await.context("writing out")
    }

    async fn unmount(&mut self, mode: UnmountMode) -> Result<()> {
        let Some(mut mount) = self.mount.take() else { return Ok(()) };
        let work = move || (mount.unmount(mode), mount);
        let (unmounted, mount) = tokio::task::spawn_blocking(work).await?;
        if unmounted.is_err() {
            self.mount = Some(mount);
        }
        Ok(unmounted?)
    }

    /// Writes the file about the process, if that is news.
    fn tell(&mut self) -> Result<()> {
        let session = self.client.session();
        if self.told == Some(session) {
            return Ok(());
        }
        let transport = self.mount.as_ref().map_or(Transport::Device, Mount::transport);
        let about = About {
            pid: std::process::id(),
            path: self.spec.path.clone(),
            source: self.spec.source(),
            transport: transport.name().to_owned(),
            session,
        };
        let path = Place { dir: self.dir, id: self.spec.id }.file("json");
        self.env.files.write_atomic(&path, &serde_json::to_vec(&about)?)?;
        self.told = Some(session);
        Ok(())
    }
}

fn listen(dir: &NodeDir, place: &Place<'_>) -> Result<UnixListener> {
    let socket = dir.socket_named(&place.name("sock"));
    UnixListener::bind(socket.as_path())
        .with_context(|| format!("cannot listen at {}", place.file("sock").display()))
}
