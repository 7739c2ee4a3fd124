//! A machine that mounts filesystems of a cluster and is no node: it has a directory with its certificate and its mounts, and no
//! process but those of the mounts.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::env::Env;
use base::{ClusterId, FsError};
use bytes::Bytes;
use control::Token;
use posix::fuse::{MountFlags, UnmountMode};
use serde::{Deserialize, Serialize};
use wire::cluster::{JoinReply, JoinRequest, NewClient, NodeAddresses};
use wire::view::FilesystemView;

use crate::identity::{IdentityFiles, RENEW_EVERY, hostname};
use crate::member::{Known, ask_as_stranger};
use crate::mount::{Home, MountProcess, Spec};
use crate::node::{MemoryPlan, NodeDir, memory_budget};
use crate::remote::{Memory, Routes, view_of};

/// How long writing out may take before a mount goes.
const WRITE_OUT: Duration = Duration::from_secs(600);
/// How long a mount waits for another certificate.
const RENEWAL_PATIENCE: Duration = Duration::from_secs(5);
/// The pause after the certificate was not renewed.
const RENEWAL_PAUSE: Duration = Duration::from_secs(3600);
/// Drives among which the memory of a client is divided.
const DRIVES: usize = 2;

/// `client.json`: the place of the client in its cluster, and its mounts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Guest {
    cluster: ClusterId,
    /// The number of the client.
    pub(crate) client: u32,
    /// The nodes, with their addresses, as they were last.
    nodes: Vec<NodeAddresses>,
    /// The client may change nothing.
    read_only: bool,
    /// Filesystems that were mounted.
    mounts: Vec<GuestMount>,
}

/// A mount of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GuestMount {
    /// The number of the filesystem.
    id: u32,
    name: String,
    path: PathBuf,
    options: String,
}

impl Guest {
    /// The client in a directory, if there is one.
    pub(crate) fn load(env: &Env, dir: &NodeDir) -> Result<Option<Self>> {
        let path = dir.client_json();
        if !env.files.exists(&path) {
            return Ok(None);
        }
        let bytes = env.files.read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let parsed = serde_json::from_slice(&bytes);
        parsed.map(Some).with_context(|| format!("not understood: {}", path.display()))
    }

    fn save(&self, env: &Env, dir: &NodeDir) -> Result<()> {
        let (path, bytes) = (dir.client_json(), serde_json::to_vec_pretty(self)?);
        env.files.write_atomic(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Joins a cluster with a token for clients. A client that joined before asks again: it gets another certificate.
    pub(crate) async fn join(env: &Env, dir: &NodeDir, token: &Token, name: Option<String>) -> Result<Self> {
        let root = dir.root().display();
        let identity = IdentityFiles::new(env, dir);
        if identity.membership()?.is_some() || env.files.exists(&dir.meta_dirs()) {
            bail!("there is a node in {root}: join in another directory");
        }
        let known = Self::load(env, dir)?;
        if let Some(known) = known.as_ref().filter(|known| known.cluster != token.cluster) {
            bail!("the client in {root} belongs to another cluster: cluster={}", known.cluster);
        }
        let private = rustix::fs::Mode::RWXU;
        for path in [dir.root().to_owned(), dir.run()] {
            env.files.create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
            rustix::fs::chmod(&path, private)
                .with_context(|| format!("cannot protect {}", path.display()))?;
        }
        let request = JoinRequest::JoinClient(NewClient {
            token: token.id,
            secret: token.secret.clone(),
            name: name.unwrap_or_else(hostname),
            request: Bytes::from(identity.key()?.request),
        });
        let JoinReply::JoinedClient { client, certificate, authorities, nodes, read_only } =
            ask_as_stranger(env, token.into(), &request).await?
        else {
            bail!("the node gave another answer");
        };
        identity.keep(&certificate, &authorities)?;
        let mounts = known.map(|known| known.mounts).unwrap_or_default();
        let guest = Self { cluster: token.cluster, client, nodes, read_only, mounts };
        // This file makes it a client.
        guest.save(env, dir)?;
        Ok(guest)
    }

    /// Gets another certificate for the same key, also after the last one has expired.
    async fn renew(&self, env: &Env, dir: &NodeDir) -> Result<()> {
        let identity = IdentityFiles::new(env, dir);
        let addresses = self.nodes.iter().flat_map(|node| node.addresses.clone()).collect();
        let known = Known { cluster: self.cluster, authority: identity.believed()?, addresses };
        let request = Bytes::from(identity.key()?.request);
        let request = JoinRequest::RenewClient { client: self.client, request };
        let JoinReply::JoinedClient { certificate, authorities, .. } =
            ask_as_stranger(env, known, &request).await?
        else {
            bail!("the node gave another answer");
        };
        identity.keep(&certificate, &authorities)
    }

    /// Mounts a filesystem, and remembers where. Returns the place.
    pub(crate) async fn mount(
        mut self,
        env: &Env,
        dir: &NodeDir,
        name: &str,
        (path, options): (Option<PathBuf>, Option<String>),
    ) -> Result<PathBuf> {
        let renewed = tokio::time::timeout(RENEWAL_PATIENCE, self.renew(env, dir)).await;
        if let Ok(Err(error)) = renewed {
            tracing::debug!(error = %format!("{error:#}"), "the certificate is not renewed");
        }
        let routes = Routes::of_guest(env, dir, &self.nodes)?;
        let owner = routes.follow_owner(None);
        let view: FilesystemView =
            view_of(&routes, owner.clone(), name).await.map_err(|error| {
                match error.downcast_ref::<FsError>() {
                    Some(FsError::NotPermitted) => {
                        error.context(format!("client {} has no right to filesystem {name}", self.client))
                    }
                    _ => error.context(format!(
                        "is client {} still one of the cluster (forebay client list, at a node)?",
                        self.client
                    )),
                }
            })?;
        let known = self.mounts.iter().find(|mount| mount.id == view.id);
        let path = path.or_else(|| known.map(|mount| mount.path.clone()));
        let path = path.unwrap_or_else(|| dir.default_mount());
        let options = options.or_else(|| known.map(|mount| mount.options.clone())).unwrap_or_default();
        let options = match self.read_only && !options.split(',').any(|word| word == "ro") {
            true => [options.as_str(), "ro"]
                .iter()
                .filter(|it| !it.is_empty())
                .copied()
                .collect::<Vec<_>>()
                .join(","),
            false => options,
        };
        options.parse::<MountFlags>()?;
        if MountProcess::find(env, dir, view.id).is_some() {
            bail!("filesystem {name} is mounted already by this client");
        }
        if !env.files.exists(&path) {
            // A dead mount shows as missing.
            let _ = env.files.create_dir_all(&path);
        }
        let memory = MemoryPlan::new(memory_budget(env, None)?, DRIVES, 1, 1);
        let spec = Spec {
            dir: dir.root().to_owned(),
            id: view.id,
            filesystem: name.to_owned(),
            path: path.clone(),
            options: options.clone(),
            memory: Memory::from(&memory),
            home: Home { node: None, owner: *owner.borrow(), nodes: view.nodes.clone() },
        };
        let starting = env.clone();
        tokio::task::spawn_blocking(move || MountProcess::start(&starting, &spec)).await??;
        self.mounts.retain(|mount| mount.id != view.id);
        let mount = GuestMount { id: view.id, name: name.to_owned(), path: path.clone(), options };
        self.mounts.push(mount);
        self.nodes = view.nodes;
        self.save(env, dir)?;
        Ok(path)
    }

    /// A filesystem that is mounted, and the process of its mount.
    fn mounted(&self, env: &Env, dir: &NodeDir, name: &str) -> Result<(&GuestMount, Arc<MountProcess>)> {
        let mount = self.mounts.iter().find(|mount| mount.name == name);
        let process = mount.and_then(|mount| MountProcess::find(env, dir, mount.id)).map(Arc::new);
        let mounted = mount.zip(process);
        mounted.with_context(|| format!("filesystem {name} is not mounted by this client"))
    }

    /// Makes everything durable that was written through a mount.
    pub(crate) async fn sync(&self, env: &Env, dir: &NodeDir, name: &str) -> Result<()> {
        self.mounted(env, dir, name)?.1.sync().await
    }

    /// Unmounts a filesystem, if it is not in use.
    pub(crate) async fn unmount(&self, env: &Env, dir: &NodeDir, name: &str) -> Result<()> {
        let (mount, process) = self.mounted(env, dir, name)?;
        let unmounted = process.unmount(UnmountMode::IfIdle, WRITE_OUT).await;
        unmounted.with_context(|| {
            format!("cannot unmount {}; close the files that are open on it", mount.path.display())
        })
    }

    /// Unmounts everything.
    pub(crate) async fn stop(&self, env: &Env, dir: &NodeDir) -> Result<()> {
        let mut result = Ok(());
        for mount in &self.mounts {
            let Some(process) = MountProcess::find(env, dir, mount.id) else { continue };
            let ended = Arc::new(process).unmount(UnmountMode::Detach, WRITE_OUT).await;
            result = result.and(ended.with_context(|| format!("unmounting {}", mount.path.display())));
        }
        result
    }
}

/// Renews the certificate of the client in a directory, for as long as a mount lasts. Later connections show the newest.
pub(crate) async fn keep_certificate(env: Env, dir: NodeDir) {
    let mut pause = RENEW_EVERY;
    loop {
        tokio::time::sleep(pause).await;
        let renewed = match Guest::load(&env, &dir) {
            Ok(Some(guest)) => guest.renew(&env, &dir).await,
            Ok(None) => return,
            Err(error) => Err(error),
        };
        pause = match renewed {
            Ok(()) => RENEW_EVERY,
            Err(error) => {
                tracing::warn!(error = %format!("{error:#}"), "the certificate is not renewed");
                RENEWAL_PAUSE
            }
        };
    }
}
