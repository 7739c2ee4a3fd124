//! The mount of a filesystem: in the node's process, or in one of its own.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::env::Env;
use client::Client;
use posix::fuse::{Mount, MountFlags, MountOptions, Process, Transport, UnmountMode};
use tokio::runtime::Handle;
use wire::meta::{MetaRequest, MetaService, RequestId};

use super::filesystems::FilesystemEntry;
use super::memory::MemoryPlan;
use super::{Node, NodeDir, State};
use crate::identity::OWNER;
use crate::mount::{Home, MountProcess, Spec};
use crate::remote::Memory;

/// How long a mount that was removed by hand may take to end.
const LEAVING_PATIENCE: Duration = Duration::from_secs(3);
const LEAVING_POLL: Duration = Duration::from_millis(10);
/// How long a mount in its own process may write out.
const WRITE_OUT: Duration = Duration::from_secs(60);

/// How long the end of a session may take.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);
/// Pause between attempts to mount again.
const REVIVE_PAUSE: Duration = Duration::from_secs(10);

/// A mount whose process has ended.
pub(super) struct Broken {
    path: PathBuf,
    /// When the node last tried to mount again.
    tried: Option<tokio::time::Instant>,
}

/// A mounted filesystem.
pub(super) enum Mounted {
    /// In this process.
    Here(Mount),
    /// In a process of its own.
    Elsewhere(Arc<MountProcess>),
}

impl Mounted {
    fn is_alive(&self) -> bool {
        match self {
            Self::Here(mount) => mount.is_alive(),
            Self::Elsewhere(process) => process.is_alive(),
        }
    }

    /// Whether a user has unmounted it by hand, and it still ends.
    fn is_leaving(&self) -> bool {
        match self {
            Self::Here(mount) => mount.is_alive() && !mount.is_in_tree(),
            Self::Elsewhere(process) => process.is_alive() && !process.is_in_tree(),
        }
    }

    /// Whether nothing is left of it. If its process was killed, the mount is left.
    fn has_left(&self) -> bool {
        match self {
            Self::Here(mount) => !mount.is_alive(),
            Self::Elsewhere(process) => !process.is_alive() && !process.is_in_tree(),
        }
    }

    fn path(&self) -> &Path {
        match self {
            Self::Here(mount) => mount.path(),
            Self::Elsewhere(process) => process.path(),
        }
    }

    fn transport(&self) -> Transport {
        match self {
            Self::Here(mount) => mount.transport(),
            Self::Elsewhere(process) => process.transport(),
        }
    }
}

impl Node {
    /// Looks after mounts whose processes have ended.
    pub(super) async fn revive_mounts(&self, state: &mut State) {
        for entry in state.filesystems.values_mut() {
            let node = (&self.env, &self.dir, &self.runtime);
            let options = self.local_mounts.of(entry.record.id).options;
            if let Err(error) = entry.revive_mount(node, &options, &self.memory).await {
                tracing::error!(filesystem = %entry.record.name, error = %format!("{error:#}"), "cannot mount again, trying again");
            }
        }
    }
}

impl FilesystemEntry {
    fn live_mount(&self) -> Option<&Mounted> {
        self.mount.as_ref().filter(|mount| mount.is_alive())
    }

    pub(super) fn mount_path(&self) -> Option<PathBuf> {
        self.live_mount().map(|mount| mount.path().to_owned())
    }

    /// How requests come from the kernel.
    pub(super) fn mount_transport(&self) -> Option<&'static str> {
        self.live_mount().map(|mount| mount.transport().name())
    }

    /// The process of the mount, if it is one of its own.
    pub(super) fn mount_process(&self) -> Option<&Arc<MountProcess>> {
        match self.live_mount()? {
            Mounted::Here(_) => None,
            Mounted::Elsewhere(process) => Some(process),
        }
    }

    pub(super) async fn mount(
        &mut self,
        (env, dir, runtime): (&Env, &NodeDir, &Handle),
        path: &Path,
        options: &str,
        memory: &MemoryPlan,
    ) -> Result<()> {
        self.unmount_dead();
        let flags: MountFlags = options.parse()?;
        let mounted = match flags.process {
            Process::Node => {
                let source = format!("{}#{}", dir.root().display(), self.record.name);
                let options = MountOptions::new(path, source, flags);
                let (client, runtime) = (self.client.clone(), runtime.clone());
                let mount = tokio::task::spawn_blocking(move || Mount::new(client, runtime, &options));
                Mounted::Here(mount.await??)
            }
            Process::Own => {
                let spec = Spec {
                    dir: dir.root().to_owned(),
                    id: self.record.id,
                    filesystem: self.record.name.clone(),
                    path: path.to_owned(),
                    options: options.to_owned(),
                    memory: Memory::from(memory),
                    home: Home {
                        node: Some(OWNER),
                        owner: Some(OWNER),
                        nodes: self.view.borrow().nodes.clone(),
                    },
                };
                let env = env.clone();
                let process = tokio::task::spawn_blocking(move || MountProcess::start(&env, &spec));
                Mounted::Elsewhere(Arc::new(process.await??))
            }
        };
        (self.mount, self.broken) = (Some(mounted), None);
        Ok(())
    }

    /// Waits for the end of a mount that a user has just unmounted by hand.
    pub(super) async fn unmount_leaving(&mut self) -> Result<()> {
        let begun = tokio::time::Instant::now();
        while self.mount.as_ref().is_some_and(Mounted::is_leaving) {
            if begun.elapsed() > LEAVING_PATIENCE {
                bail!("it was unmounted while files on it were open: close them first");
            }
            tokio::time::sleep(LEAVING_POLL).await;
        }
        self.unmount_dead();
        Ok(())
    }

    /// Mounts again where the process of a mount has ended and the mount was left: every call on it fails.
    pub(super) async fn revive_mount(
        &mut self,
        node: (&Env, &NodeDir, &Handle),
        options: &str,
        memory: &MemoryPlan,
    ) -> Result<()> {
        if let Some(Mounted::Elsewhere(process)) = &self.mount
            && !process.is_alive()
            && process.is_in_tree()
        {
            tracing::error!(path = %process.path().display(), "the process of the mount has ended: mounting again; programs with open files fail");
            self.broken.get_or_insert(Broken { path: process.path().to_owned(), tried: None });
            // Nobody waits for what it held.
            let id = RequestId { session: process.session(), slot: 0, seq: u64::MAX };
            let closed = self.owner.call(id.into(), MetaRequest::CloseSession);
            if tokio::time::timeout(CLOSE_PATIENCE, closed).await.is_err() {
                tracing::warn!(session = %process.session(), "the session of the mount ends by its silence");
            }
        }
        let Some(broken) = &mut self.broken else { return Ok(()) };
        if broken.tried.is_some_and(|tried| tried.elapsed() < REVIVE_PAUSE) {
            return Ok(());
        }
        broken.tried = Some(tokio::time::Instant::now());
        let path = broken.path.clone();
        self.mount(node, &path, options, memory).await
    }

    /// Readies the mount that an earlier run of the node left, which has the options `before`. Returns whether it stays, at this
    /// place and with these options.
    pub(super) async fn keeps_mount(
        &mut self,
        path: &Path,
        options: Option<&str>,
        before: &str,
    ) -> Result<bool> {
        let flags = |options: &str| options.parse::<MountFlags>().ok();
        let is_same = options.is_none_or(|options| flags(options) == flags(before));
        let is_whole = self.mount.as_ref().is_some_and(|mount| mount.is_alive() && !mount.is_leaving());
        if is_whole && is_same && self.mount_path().as_deref() == Some(path) {
            return Ok(true);
        }
        self.unmount(UnmountMode::Detach).await?;
        Ok(false)
    }

    /// Drops a mount that a user unmounted by hand.
    pub(super) fn unmount_dead(&mut self) {
        if self.mount.as_ref().is_some_and(Mounted::has_left) {
            self.mount = None;
        }
    }

    /// Begins to unmount. Nobody else mounts or unmounts until [`FilesystemEntry::end_unmount`].
    pub(super) fn begin_unmount(&mut self) -> Unmounting {
        self.broken = None;
        self.is_unmounting = true;
        Unmounting { mount: self.mount.take(), client: self.client.clone() }
    }

    /// Takes back what is left after an attempt to unmount.
    pub(super) fn end_unmount(&mut self, unmounting: Unmounting) {
        self.mount = unmounting.mount;
        self.is_unmounting = false;
    }

    /// Whether somebody unmounts it now.
    pub(super) fn is_unmounting(&self) -> bool {
        self.is_unmounting
    }

    pub(super) async fn unmount(&mut self, mode: UnmountMode) -> Result<()> {
        let mut unmounting = self.begin_unmount();
        let result = unmounting.run(mode).await;
        self.end_unmount(unmounting);
        result
    }
}

/// A mount on its way out.
pub(super) struct Unmounting {
    mount: Option<Mounted>,
    client: Client,
}

impl Unmounting {
    /// Unmounts and writes out, which may take long: nobody may wait for the caller.
    pub(super) async fn run(&mut self, mode: UnmountMode) -> Result<()> {
        match self.mount.take() {
            None => return Ok(()),
            Some(Mounted::Here(mut mount)) => {
                let work = move || (mount.unmount(mode), mount);
                let (result, mount) = tokio::task::spawn_blocking(work).await?;
                if result.is_err() {
                    self.mount = Some(Mounted::Here(mount));
                }
                result?;
            }
            Some(Mounted::Elsewhere(process)) => {
                let result = process.clone().unmount(mode, WRITE_OUT).await;
                if result.is_err() {
                    self.mount = Some(Mounted::Elsewhere(process));
                }
                result?;
            }
        }
        let synced = tokio::time::timeout(WRITE_OUT, self.client.sync()).await;
        let synced = synced
            .context("it is unmounted, and what was written is not durable yet: drives do not answer")?;
        synced.context("writing out after unmounting")
    }
}
