//! The node's services for clients in other processes on this machine: owners, drives, and what the clients must know of
//! filesystems. The socket is in a directory of root, so its clients are trusted.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::net::UnixListener as StdListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use base::env::Env;
use base::{DriveId, Epoch, FsError, LedgerId};
use client::Client;
use control::CONTROL_LEDGER;
use tokio::net::UnixListener;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use wire::BoxFuture;
use wire::drive::DriveService;
use wire::link::{Connection, Server, Services, Trust};
use wire::meta::MetaService;
use wire::replica::ReplicaService;
use wire::view::{
    BLOB_PART_MAX, BlobPart, FilesystemView, NEWS_WAIT_MAX, ViewReply, ViewRequest, ViewService,
};

use super::{NodeDir, State};
use crate::identity::OWNER;

/// The name of the socket.
pub(crate) const CLIENTS_SOCKET: &str = "clients.sock";
/// Pause after a connection could not be accepted: there are too many descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A filesystem as others see it.
#[derive(Clone)]
struct Shown {
    view: watch::Receiver<Arc<FilesystemView>>,
    client: Client,
}

/// The filesystems, by name, and the epoch of the owner of the ledgers where only the first node may own them.
struct Views {
    shown: Mutex<BTreeMap<String, Shown>>,
    only_epoch: Epoch,
}

impl Views {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Shown>> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn client(&self, name: &str) -> Result<Client, FsError> {
        self.all().get(name).map(|shown| shown.client.clone()).ok_or(FsError::NotFound)
    }

    async fn filesystem(&self, name: &str, known: u64, wait: Duration) -> Result<ViewReply, FsError> {
        let view = self.all().get(name).map(|shown| shown.view.clone());
        let mut view = view.ok_or(FsError::NotFound)?;
        let news = view.wait_for(|view| view.number != known);
        match tokio::time::timeout(wait, news).await {
            Ok(Ok(view)) => Ok(ViewReply::Filesystem(Box::new(FilesystemView::clone(&view)))),
            Ok(Err(_)) | Err(_) => Ok(ViewReply::Same),
        }
    }
}

impl ViewService for Views {
    fn ask(&self, request: ViewRequest) -> BoxFuture<'_, Result<ViewReply, FsError>> {
        let wait = |wait_ms: u32| Duration::from_millis(wait_ms.into()).min(NEWS_WAIT_MAX);
        Box::pin(async move {
            match request {
                ViewRequest::Filesystem { name, known, wait_ms } => {
                    self.filesystem(&name, known, wait(wait_ms)).await
                }
                ViewRequest::Blob { filesystem, serial, term, off, len } => {
                    let client = self.client(&filesystem)?;
                    if len == 0 || len > BLOB_PART_MAX {
                        return Err(FsError::Invalid);
                    }
                    let end = off.checked_add(len.into()).ok_or(FsError::Invalid)?;
                    let read = client.read_blob(serial, term, off..end).await;
                    Ok(ViewReply::Blob(read.map(|bytes| BlobPart { bytes })))
                }
                ViewRequest::Reads { filesystem, ino, off, len } => {
                    self.client(&filesystem)?.bring_back_for(ino, off, len).await.map(|()| ViewReply::Same)
                }
                ViewRequest::Owner { known, .. } if known != self.only_epoch => {
                    Ok(ViewReply::Owner(OWNER, self.only_epoch))
                }
                ViewRequest::Owner { wait_ms, .. } => {
                    tokio::time::sleep(wait(wait_ms)).await;
                    Ok(ViewReply::Same)
                }
            }
        })
    }
}

/// The services, and the task that accepts connections.
pub(crate) struct Clients {
    server: Arc<Server>,
    views: Arc<Views>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

impl Clients {
    /// `only_epoch` is what [`Views`] has.
    pub(crate) fn new(env: &Env, only_epoch: Epoch) -> Self {
        let server = Server::new(env, Services::default());
        let views = Arc::new(Views { shown: Mutex::default(), only_epoch });
        Self { server, views, accepting: Mutex::default() }
    }

    /// Serves what the node has now. Returns it.
    pub(super) fn update(&self, state: &State, control: Arc<dyn ReplicaService>) -> Services {
        let owners = state.filesystems.values().map(|entry| {
            let opened = entry.owner.stat().epoch;
            (entry.record.ledger, (opened, entry.owner.clone() as Arc<dyn MetaService>))
        });
        let drives: BTreeMap<DriveId, Arc<dyn DriveService>> = state
            .drives
            .iter()
            .filter_map(|(id, entry)| Some((*id, entry.service.as_ref()?.local()?)))
            .collect();
        let clients: HashMap<LedgerId, Client> =
            state.filesystems.values().map(|entry| (entry.record.ledger, entry.client.clone())).collect();
        let note_use: Arc<dyn Fn(LedgerId) + Send + Sync> = Arc::new(move |ledger| {
            if let Some(client) = clients.get(&ledger) {
                client.note_use();
            }
        });
        let shown = state.filesystems.iter().map(|(name, entry)| {
            (name.clone(), Shown { view: entry.view.subscribe(), client: entry.client.clone() })
        });
        *self.views.all() = shown.collect();
        let replicas = state
            .filesystems
            .values()
            .map(|entry| (entry.record.ledger, entry.owner.clone() as Arc<dyn ReplicaService>));
        let services = Services {
            owners: owners.collect(),
            replicas: replicas.chain([(CONTROL_LEDGER, control)]).collect(),
            note_use: Some(note_use),
            views: Some(self.views.clone()),
            drives,
            ..Services::default()
        };
        self.server.set_services(services.clone());
        services
    }

    /// Serves these from now on.
    pub(crate) fn serve(&self, services: Services) {
        self.server.set_services(services);
    }

    /// Begins to accept connections.
    pub(crate) fn listen(&self, dir: &NodeDir, runtime: &Handle) -> Result<()> {
        let socket = dir.socket_named(CLIENTS_SOCKET);
        let listening = || -> std::io::Result<UnixListener> {
            let listener = StdListener::bind(socket.as_path())?;
            listener.set_nonblocking(true)?;
            UnixListener::from_std(listener)
        };
        let listener =
            listening().with_context(|| format!("cannot listen at {}", socket.as_path().display()))?;
        let server = self.server.clone();
        let accepting = runtime.spawn(async move {
            // They end with this task.
            let mut serving = JoinSet::new();
            loop {
                let accepted = tokio::select! {
                    Some(_) = serving.join_next() => continue,
                    accepted = listener.accept() => accepted.and_then(|(stream, _)| stream.into_std()),
                };
                match accepted.and_then(Connection::local) {
                    Ok(connection) => {
                        serving.spawn(server.clone().serve(connection, Trust::Full));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "the connection of a client was not accepted");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        });
        *self.accepting.lock().unwrap_or_else(PoisonError::into_inner) = Some(accepting);
        Ok(())
    }

    /// Ends all connections. Clients wait for the next start.
    pub(crate) async fn stop(&self) {
        let accepting = self.accepting.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(accepting) = accepting {
            accepting.abort();
            let _ = accepting.await;
        }
        self.server.set_services(Services::default());
        self.views.all().clear();
    }
}
