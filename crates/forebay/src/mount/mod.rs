//! A mount in a process of its own: while the node is away, programs wait. The node starts the process, finds it again after a
//! restart, and asks it to write out and to unmount.
//!
//! The process holds a lock for as long as it lives. Beside it are a file that tells about the process, and the socket on which
//! it is asked: one line of JSON for a question, one for the answer.

mod serve;

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::env::{Caching, Env, File, OpenMode};
use base::{NodeId, SessionId};
use posix::fuse::{Transport, UnmountMode, forebay_mounts};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use wire::cluster::NodeAddresses;

use crate::node::NodeDir;
use crate::remote::Memory;

pub(crate) use serve::serve;

/// Begins the line that the process prints when it serves. Any other line is the reason why it does not.
const READY: &str = "ready";
/// How long an answer may take that does not wait for drives.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long writing out may take.
const SYNC_PATIENCE: Duration = Duration::from_secs(600);
/// How long the process may take to mount.
const START_PATIENCE: Duration = Duration::from_secs(40);
/// How long an orphan of an interrupted start may hold the lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
const LOCK_POLL: Duration = Duration::from_millis(50);
/// How long the process may take to end after it has unmounted.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// What the process is told when it starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Spec {
    /// The node's directory.
    pub(crate) dir: PathBuf,
    /// The number of the filesystem.
    pub(crate) id: u32,
    /// Its name.
    pub(crate) filesystem: String,
    /// The mount point.
    pub(crate) path: PathBuf,
    /// Mount options.
    pub(crate) options: String,
    /// Limits of memory.
    pub(crate) memory: Memory,
    /// The node that started the process, and where the others are.
    pub(crate) home: Home,
}

/// The place of a mount in its cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Home {
    /// The node in this machine, which is reached by a socket; `None`: there is none, the machine is a client.
    pub(crate) node: Option<NodeId>,
    /// The node that owns the filesystem's ledger, if that was known; the node in this machine knows when it changes.
    pub(crate) owner: Option<NodeId>,
    /// All nodes, with their addresses.
    pub(crate) nodes: Vec<NodeAddresses>,
}

impl Spec {
    /// What the mount table shows.
    fn source(&self) -> String {
        format!("{}#{}", self.dir.display(), self.filesystem)
    }
}

/// What the process tells about itself, in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct About {
    pid: u32,
    path: PathBuf,
    /// As the mount table shows it.
    source: String,
    transport: String,
    /// Its present session with the owner.
    session: SessionId,
}

/// A question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Ask {
    /// Make everything durable.
    Sync,
    /// Unmount if no files are open, write out, and end.
    Unmount,
    /// Take the mount out of the tree at once, write out, and end.
    Detach,
}

/// The answer: `None`, or what went wrong.
type Answer = Option<String>;

/// Files of a mount process.
struct Place<'a> {
    dir: &'a NodeDir,
    id: u32,
}

impl Place<'_> {
    fn file(&self, kind: &str) -> PathBuf {
        self.dir.run().join(self.name(kind))
    }

    fn name(&self, kind: &str) -> String {
        format!("mount-{}.{kind}", self.id)
    }

    /// Removes all but the lock.
    fn clear(&self, env: &Env) -> Result<()> {
        for path in
            ["json", "sock"].map(|kind| self.file(kind)).into_iter().filter(|path| env.files.exists(path))
        {
            env.files.remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
        Ok(())
    }

    fn log(&self) -> PathBuf {
        self.dir.log_file().with_file_name(self.name("log"))
    }
}

/// A mount process, as the node sees it.
pub(crate) struct MountProcess {
    env: Env,
    dir: NodeDir,
    id: u32,
    about: About,
    process: OwnedFd,
    is_earlier: bool,
}

impl MountProcess {
    /// Starts a process, and waits until it serves.
    pub(crate) fn start(env: &Env, spec: &Spec) -> Result<Self> {
        // A newer version may have replaced the file.
        let mut child = Command::new("/proc/self/exe")
            .args(["mount-process", &serde_json::to_string(spec)?])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("starting the process of the mount")?;
        let mut line = String::new();
        let out = child.stdout.take().context("standard output of the process of the mount")?;
        let patience = Timespec::try_from(START_PATIENCE)?;
        if !poll(&mut [PollFd::new(&out, PollFlags::IN)], Some(&patience)).is_ok_and(|ready| ready > 0) {
            let _ = child.kill();
            let _ = child.wait();
            bail!("the filesystem was not mounted within {START_PATIENCE:?}: its metadata does not answer");
        }
        BufReader::new(out).read_line(&mut line).context("waiting for the mount")?;
        let dir = NodeDir::new(&spec.dir);
        if line.trim() != READY {
            let status = child.wait().context("waiting for the mount")?;
            let log = Place { dir: &dir, id: spec.id }.log();
            match line.trim() {
                "" => bail!("the process of the mount ended: {status} (see {})", log.display()),
                reason => bail!("{reason}"),
            }
        }
        // It ends when it likes; nothing is left of it then.
        base::env::spawn_thread("mount-end", move || drop(child.wait()));
        let started = Self::find(env, &dir, spec.id).context("the mount has ended again")?;
        Ok(Self { is_earlier: false, ..started })
    }

    /// The process of a filesystem that an earlier run of the node started, if it is there.
    pub(crate) fn find(env: &Env, dir: &NodeDir, id: u32) -> Option<Self> {
        let place = Place { dir, id };
        let lock = env.files.open(&place.file("lock"), OpenMode::Existing, Caching::Buffered).ok()?;
        if lock.try_lock().is_ok() {
            return None;
        }
        let about: About = serde_json::from_slice(&env.files.read(&place.file("json")).ok()?).ok()?;
        let process = pidfd_open(Pid::from_raw(about.pid as i32)?, PidfdFlags::empty()).ok()?;
        Some(Self { env: env.clone(), dir: dir.clone(), id, about, process, is_earlier: true })
    }

    pub(crate) fn is_alive(&self) -> bool {
        !self.ends_within(Duration::ZERO)
    }

    /// Whether its mount is in the mount table. After an unmount by hand it is not, and the process ends a moment later.
    pub(crate) fn is_in_tree(&self) -> bool {
        forebay_mounts().is_ok_and(|mounts| mounts.iter().any(|mount| mount.source == self.about.source))
    }

    fn ends_within(&self, time: Duration) -> bool {
        let Ok(time) = Timespec::try_from(time) else { return false };
        poll(&mut [PollFd::new(&self.process, PollFlags::IN)], Some(&time)).is_ok_and(|ended| ended > 0)
    }

    /// Whether an earlier run of the node started it.
    pub(crate) fn is_earlier(&self) -> bool {
        self.is_earlier
    }

    /// Its session with the owner.
    pub(crate) fn session(&self) -> SessionId {
        self.about.session
    }

    pub(crate) fn pid(&self) -> u32 {
        self.about.pid
    }

    pub(crate) fn path(&self) -> &Path {
        &self.about.path
    }

    pub(crate) fn transport(&self) -> Transport {
        Transport::named(&self.about.transport).unwrap_or_default()
    }

    /// Makes everything durable that was written on the mount.
    pub(crate) async fn sync(self: Arc<Self>) -> Result<()> {
        self.ask(Ask::Sync, SYNC_PATIENCE).await
    }

    /// Unmounts, and waits until the process has written everything out and ended.
    pub(crate) async fn unmount(self: Arc<Self>, mode: UnmountMode, patience: Duration) -> Result<()> {
        let asked = match mode {
            UnmountMode::IfIdle => self.ask(Ask::Unmount, patience).await,
            UnmountMode::Detach => self.ask(Ask::Detach, patience).await,
        };
        if self.is_alive()
            && let Err(error) = asked
        {
            return Err(error);
        }
        let process = self.clone();
        let ended = tokio::task::spawn_blocking(move || process.ends_within(END_PATIENCE)).await?;
        if !ended {
            // It has nothing left to write.
            tracing::warn!(pid = self.about.pid, "the process of a mount does not end, it is killed");
            let _ = pidfd_send_signal(&self.process, Signal::KILL);
        }
        self.clear_dead();
        // A process that has written everything out takes this file along.
        if self.env.files.exists(&Place { dir: &self.dir, id: self.id }.file("json")) && ended {
            bail!("the process of the mount ended before it had written everything out");
        }
        Ok(())
    }

    /// Takes a mount whose process has ended out of the tree.
    fn clear_dead(&self) {
        if self.is_in_tree()
            && let Err(error) = rustix::mount::unmount(&self.about.path, UnmountFlags::DETACH)
        {
            tracing::warn!(path = %self.about.path.display(), %error, "dead mount cannot be removed");
        }
    }

    async fn ask(&self, ask: Ask, patience: Duration) -> Result<()> {
        let socket = self.dir.socket_named(&Place { dir: &self.dir, id: self.id }.name("sock"));
        let asked = async {
            let mut stream = tokio::io::BufReader::new(UnixStream::connect(socket.as_path()).await?);
            let mut line = serde_json::to_vec(&ask)?;
            line.push(b'\n');
            stream.write_all(&line).await?;
            let mut answer = String::new();
            stream.read_line(&mut answer).await?;
            anyhow::Ok(serde_json::from_str::<Answer>(&answer)?)
        };
        let asked = tokio::time::timeout(patience.max(PATIENCE), asked).await;
        match asked
            .context("the process of the mount does not answer")?
            .context("asking the process of the mount")?
        {
            None => Ok(()),
            Some(problem) => bail!("{problem}"),
        }
    }
}

/// Takes the lock of a mount process, and removes what an earlier process left.
fn take_lock(env: &Env, place: &Place<'_>) -> Result<Arc<dyn File>> {
    let lock = env.files.open(&place.file("lock"), OpenMode::Create, Caching::Buffered)?;
    let begun_ns = env.clock.boot_ns();
    while lock.try_lock().is_err() {
        if env.clock.boot_ns() - begun_ns > LOCK_PATIENCE.as_nanos() as u64 {
            bail!("the filesystem is mounted by another process");
        }
        std::thread::park_timeout(LOCK_POLL);
    }
    place.clear(env)?;
    Ok(lock)
}
