//! The process of a mount. It reaches the node's owner and drives by a socket, and waits while the node is away.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use base::SessionId;
use base::env::Env;
use client::Client;
use posix::fuse::{Mount, MountFlags, MountOptions, Transport, UnmountMode};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixListener;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};

use super::{About, Answer, Ask, PATIENCE, Place, READY, Spec, take_lock};
use crate::guest::keep_certificate;
use crate::log::{Log, Sink};
use crate::node::NodeDir;
use crate::remote::{RemoteFilesystem, Routes, Wanted};

/// Pause after writing out has failed.
const SYNC_PAUSE: Duration = Duration::from_secs(1);
/// How often the process looks whether it was unmounted by hand.
const LOOK: Duration = Duration::from_millis(200);
/// How long the end of the session may take.
const CLOSE_PATIENCE: Duration = Duration::from_secs(8);
/// Threads that continue requests which waited.
const WORKERS: usize = 2;

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
    let routes = match spec.home.node {
        Some(node) => Routes::beside(env, dir, node)?,
        None => {
            tokio::spawn(keep_certificate(env.clone(), dir.clone()));
            Routes::of_guest(env, dir, &spec.home.nodes)?
        }
    };
    routes.set_nodes(&spec.home.nodes);
    let owner = routes.follow_owner(spec.home.owner);
    let wanted = Wanted { owner, name: spec.filesystem.clone(), memory: spec.memory, patience: None };
    let filesystem = tokio::select! {
        opened = RemoteFilesystem::open(env, &routes, wanted) => opened?,
        () = forsaken() => anyhow::bail!("the node that started the mount is gone"),
    };
    let client = filesystem.client.clone();
    let flags: MountFlags = spec.options.parse()?;
    let options = MountOptions {
        sends_callers: spec.home.node.is_none(),
        ..MountOptions::new(&spec.path, spec.source(), flags)
    };
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
    filesystem.close(CLOSE_PATIENCE).await;
    ended
}

/// Waits until nobody reads any more what this process prints.
async fn forsaken() {
    while is_awaited() {
        tokio::time::sleep(LOOK).await;
    }
}

/// Whether a process still reads what this one prints.
fn is_awaited() -> bool {
    let out = std::io::stdout();
    let mut polled = [PollFd::new(&out, PollFlags::OUT)];
    let _ = poll(&mut polled, Some(&Timespec::default()));
    !polled[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
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
            let is_done = done.is_ok();
            let answer: Answer = done.err().map(|error| format!("{error:#}"));
            let mut text = serde_json::to_vec(&answer)?;
            text.push(b'\n');
            // If the node does not wait any more, it asks again.
            let _ = stream.write_all(&text).await;
            // A loss is told once: nothing is left to write then.
            let is_written = is_done || self.mount.is_none() && self.client.sync().await.is_ok();
            if ask != Ask::Sync && is_written {
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
        self.client.sync().await.context("writing out (the log of the mount names what is lost)")
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
