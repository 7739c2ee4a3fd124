//! Mounts of the cluster's filesystems on this machine, each in a process of its own.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use admin::AdminError;
use anyhow::{Context, Result, bail};
use base::NodeId;
use base::env::Env;
use control::Cluster;
use futures_util::future::join_all;
use posix::fuse::{MountFlags, UnmountMode};
use wire::cluster::NodeAddresses;

use super::lock;
use crate::mount::{Home, MountProcess, Spec};
use crate::node::{LocalMounts, MemoryPlan, MountPlace, Mounts, NodeDir};
use crate::remote::Memory;

/// How long a mount may write out.
const WRITE_OUT: Duration = Duration::from_secs(60);
/// The same at the end of the node.
const WRITE_OUT_AT_END: Duration = Duration::from_secs(10);
/// Pause between attempts to mount.
const RETRY_NS: u64 = 10_000_000_000;

/// The node that owns the ledgers, as far as it is known, and all nodes.
type OwnerAndNodes<'a> = (Option<NodeId>, &'a [NodeAddresses]);

/// The mounts of this node.
pub(super) struct MemberMounts {
    env: Env,
    dir: NodeDir,
    here: NodeId,
    memory: MemoryPlan,
    places: LocalMounts,
    mounts: Mutex<BTreeMap<u32, MemberMount>>,
}

/// A filesystem that is mounted, or should be.
#[derive(Clone)]
struct MemberMount {
    name: String,
    path: PathBuf,
    options: String,
    process: Option<Arc<MountProcess>>,
    /// Somebody mounts or unmounts it now.
    is_busy: bool,
    /// Time of the next attempt to mount, while there is no process.
    due_ns: u64,
}

impl MemberMounts {
    pub(super) fn load(env: &Env, dir: &NodeDir, here: NodeId, memory: MemoryPlan) -> Result<Self> {
        let places = LocalMounts::load(env, dir, Vec::new())?;
        Ok(Self { env: env.clone(), dir: dir.clone(), here, memory, places, mounts: Mutex::default() })
    }

    /// Where the filesystem is mounted.
    pub(super) fn path_of(&self, name: &str) -> Option<PathBuf> {
        let mounts = lock(&self.mounts);
        let mount = mounts.values().find(|mount| mount.name == name)?;
        mount.process.as_ref().filter(|process| process.is_alive()).map(|process| process.path().to_owned())
    }

    /// Finds the mounts of earlier runs of the node, and mounts again what was mounted last. Called when the filesystems are known
    /// for the first time.
    pub(super) fn recall(&self, cluster: &Cluster, mounts_again: bool) {
        for (id, place) in self.places.all() {
            let Some(record) = cluster.filesystems.get(&id) else { continue };
            let process = MountProcess::find(&self.env, &self.dir, id).map(Arc::new);
            let Some(path) = place.path.filter(|_| process.is_some() || mounts_again) else { continue };
            let mount = MemberMount {
                name: record.name.clone(),
                path: path.into(),
                options: place.options,
                process,
                is_busy: false,
                due_ns: 0,
            };
            lock(&self.mounts).entry(id).or_insert(mount);
        }
    }

    fn spec(&self, id: u32, mount: &MemberMount, (owner, nodes): OwnerAndNodes<'_>) -> Spec {
        Spec {
            dir: self.dir.root().to_owned(),
            id,
            filesystem: mount.name.clone(),
            path: mount.path.clone(),
            options: mount.options.clone(),
            memory: Memory::from(&self.memory),
            home: Home { node: Some(self.here), owner, nodes: nodes.to_vec() },
        }
    }

    /// Begins work on a mount that nobody else may do at the same time.
    fn take(&self, id: u32) -> Option<MemberMount> {
        let mut mounts = lock(&self.mounts);
        let mount = mounts.get_mut(&id).filter(|mount| !mount.is_busy)?;
        mount.is_busy = true;
        Some(mount.clone())
    }

    fn give_back(&self, id: u32, process: Option<Arc<MountProcess>>) {
        if let Some(mount) = lock(&self.mounts).get_mut(&id) {
            (mount.process, mount.is_busy) = (process, false);
            mount.due_ns = self.env.clock.boot_ns() + RETRY_NS;
        }
    }

    async fn start(&self, id: u32, mount: &MemberMount, nodes: OwnerAndNodes<'_>) -> Result<()> {
        let (env, spec) = (self.env.clone(), self.spec(id, mount, nodes));
        let start = move || -> Result<MountProcess> {
            if !env.files.exists(&spec.path) {
                // A dead mount shows as missing.
                let _ = env.files.create_dir_all(&spec.path);
            }
            MountProcess::start(&env, &spec)
        };
        let started = tokio::task::spawn_blocking(start).await?;
        let (process, result) = match started {
            Ok(process) => (Some(Arc::new(process)), Ok(())),
            Err(error) => (None, Err(error)),
        };
        self.give_back(id, process);
        result
    }

    /// Mounts a filesystem, and remembers where.
    pub(super) async fn mount(
        &self,
        (id, name): (u32, &str),
        path: Option<PathBuf>,
        options: Option<String>,
        nodes: OwnerAndNodes<'_>,
    ) -> Result<(), AdminError> {
        let known = self.places.of(id);
        let path = path.or(known.path.map(PathBuf::from)).unwrap_or_else(|| self.dir.default_mount());
        let options = options.unwrap_or(known.options);
        options.parse::<MountFlags>().map_err(|error| AdminError::invalid(error.to_string()))?;
        let mount = {
            let mut mounts = lock(&self.mounts);
            let known = mounts.get(&id);
            if known
                .is_some_and(|mount| mount.is_busy || mount.process.as_ref().is_some_and(|p| p.is_alive()))
            {
                return Err(AdminError::conflict(format!(
                    "filesystem {name} is mounted already on this node"
                )));
            }
            let mount =
                MemberMount { name: name.to_owned(), path, options, process: None, is_busy: true, due_ns: 0 };
            mounts.insert(id, mount.clone());
            mount
        };
        if let Err(error) = self.start(id, &mount, nodes).await {
            lock(&self.mounts).remove(&id);
            return Err(AdminError::failed(format!("{error:#}")));
        }
        let place = MountPlace {
            path: Some(mount.path.to_string_lossy().into_owned()),
            options: mount.options.clone(),
        };
        self.places.set(id, place).map_err(|error| AdminError::failed(format!("{error:#}")))
    }

    /// Unmounts a filesystem, if it is not in use.
    pub(super) async fn unmount(&self, id: u32, name: &str) -> Result<(), AdminError> {
        let not_mounted = || AdminError::conflict(format!("filesystem {name} is not mounted on this node"));
        let mount = self.take(id).ok_or_else(not_mounted)?;
        let Some(process) = mount.process.filter(|process| process.is_alive()) else {
            lock(&self.mounts).remove(&id);
            return Err(not_mounted());
        };
        let unmounted = process.clone().unmount(UnmountMode::IfIdle, WRITE_OUT).await;
        if let Err(error) = unmounted {
            self.give_back(id, Some(process));
            return Err(AdminError::conflict(format!(
                "cannot unmount {}: {error:#}; close the files that are open on it",
                mount.path.display()
            )));
        }
        lock(&self.mounts).remove(&id);
        Ok(())
    }

    /// Makes everything durable that was written on the mount of a filesystem, if there is one.
    pub(super) async fn sync(&self, name: &str) -> Result<()> {
        let process = lock(&self.mounts)
            .values()
            .find(|mount| mount.name == name)
            .and_then(|mount| mount.process.clone());
        match process {
            Some(process) => process.sync().await,
            None => Ok(()),
        }
    }

    /// Mounts again what should be mounted and is not, and forgets what users have unmounted by hand.
    pub(super) async fn look_after(&self, nodes: OwnerAndNodes<'_>) {
        let now_ns = self.env.clock.boot_ns();
        let ids: Vec<u32> = lock(&self.mounts).keys().copied().collect();
        for id in ids {
            let Some(mount) = self.take(id) else { continue };
            match &mount.process {
                Some(process) if process.is_alive() => self.give_back(id, mount.process),
                Some(process) if !process.is_in_tree() => drop(lock(&self.mounts).remove(&id)),
                Some(_) => {
                    let path = mount.path.display();
                    tracing::error!(%path, "the process of a mount has ended: mounting again; programs with open files fail");
                    self.mount_again(id, &mount, nodes).await;
                }
                None if mount.due_ns <= now_ns => self.mount_again(id, &mount, nodes).await,
                None => {
                    if let Some(mount) = lock(&self.mounts).get_mut(&id) {
                        mount.is_busy = false;
                    }
                }
            }
        }
    }

    async fn mount_again(&self, id: u32, mount: &MemberMount, nodes: OwnerAndNodes<'_>) {
        if let Err(error) = self.start(id, mount, nodes).await {
            tracing::error!(filesystem = mount.name, error = %format!("{error:#}"), "cannot mount, trying again");
        }
    }

    /// Unmounts everything, unless mounts are to stay.
    pub(super) async fn stop(&self, mounts: Mounts) -> Result<()> {
        let mut all = std::mem::take(&mut *lock(&self.mounts));
        // Those of earlier runs are not known yet if the owner was away since the start.
        let earlier =
            self.places.all().into_keys().filter_map(|id| MountProcess::find(&self.env, &self.dir, id));
        let mut processes: Vec<Arc<MountProcess>> =
            all.values_mut().filter_map(|mount| mount.process.take()).collect();
        for process in earlier {
            if processes.iter().all(|known| known.pid() != process.pid()) {
                processes.push(Arc::new(process));
            }
        }
        let ends = |process: &Arc<MountProcess>| match mounts {
            Mounts::Unmount => true,
            Mounts::KeepEarlier => !process.is_earlier(),
            Mounts::Keep => false,
        };
        let ending = processes.into_iter().filter(|process| process.is_alive() && ends(process));
        let unmounting = ending.map(|process| async move {
            let path = process.path().to_owned();
            let unmounted = process.unmount(UnmountMode::Detach, WRITE_OUT_AT_END).await;
            let unmounted = unmounted.with_context(|| format!("unmounting {}", path.display()));
            unmounted.err().map(|error| format!("{error:#}"))
        });
        let failed: Vec<String> = join_all(unmounting).await.into_iter().flatten().collect();
        if failed.is_empty() { Ok(()) } else { bail!("{}", failed.join("; ")) }
    }
}
