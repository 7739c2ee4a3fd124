//! `start` and `stop`: the process of a node.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use admin::NodeStatus;
use anyhow::{Context, Result, anyhow, bail};
use base::env::{Caching, OpenMode, spawn_thread};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, pidfd_open, pidfd_send_signal, setrlimit, setsid,
};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::args::StartArgs;
use super::output::{Format, bytes, print};
use super::{ask, env, run_here, status_with_drives};
use crate::engine::Supervised;
use crate::guest::Guest;
use crate::identity::{IdentityFiles, OWNER};
use crate::log::{Log, Sink};
use crate::member::Member;
use crate::node::{
    LocalDrives, Mounts, Node, NodeDir, StartOptions, found, is_locked, last_pid, read_node_file, read_proc,
};
use crate::watchdog::Watchdog;

/// How long `stop` waits for the process to end.
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// Longest duration of a stop; after it the node gives up and reports that.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(25);
/// Time after that before the process is ended by force.
const FORCE_AFTER: Duration = Duration::from_secs(1);
/// How long a process may take until it handles signals.
const CATCH_PATIENCE: Duration = Duration::from_secs(5);
/// How often `stop` asks.
const ASK_AGAIN: Duration = Duration::from_millis(250);
/// How often `stop` looks for the lock of the node, and the pause.
const LOCK_LOOKS: u32 = 6;
const LOCK_LOOK: Duration = Duration::from_millis(50);
/// Looks at whether drives are held after the end of a node, and the pause between two of them: three seconds.
const DRIVE_LOOKS: u32 = 150;
const DRIVE_LOOK: Duration = Duration::from_millis(20);

pub(super) fn start(args: StartArgs) -> Result<()> {
    let dir = NodeDir::new(&args.dir);
    if args.foreground || args.background_child { serve(&dir, args) } else { start_in_background(&dir, args) }
}

fn options(args: &StartArgs) -> StartOptions {
    StartOptions {
        drives: args.drives,
        drive_paths: args.drive_paths.clone(),
        drive_bytes: args.drive_size,
        profile: args.profile,
        mount: args.mount.clone(),
        mount_options: args.mount_options.clone(),
        no_mount: args.no_mount,
        io: args.io,
        degraded: args.degraded,
        out_after: Some(Duration::from_secs(args.out_after)),
        meta_dirs: args.meta_dirs.clone(),
        force_stale_metadata: args.force_stale_metadata,
        accept_older_metadata: args.accept_older_metadata,
        s3: args.s3.options(),
        memory_bytes: args.memory,
        trim: args.trim,
        metrics: args.metrics,
        log: args.log.clone(),
        listen: args.address.address,
        advertise: args.address.advertise.clone(),
    }
}

/// Number of malloc arenas. The default is eight for each core, and memory freed in one arena is not used by the
/// others.
const ARENAS: &str = "2";

/// Starts this program as a detached process with these arguments, and waits for its one line: ready, or an error. Returns what
/// follows that.
pub(super) fn in_background(dir: &NodeDir, args: impl IntoIterator<Item = OsString>) -> Result<String> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut child = Command::new(program)
        .env("MALLOC_ARENA_MAX", ARENAS)
        .args(args)
        .arg("--background-child")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("starting the node's process")?;
    let out = child.stdout.take().context("standard output of the node's process")?;
    let mut line = String::new();
    BufReader::new(out).read_line(&mut line).context("waiting for the node")?;
    let Some(note) = line.trim().strip_prefix(READY).map(str::trim) else {
        let output = child.wait_with_output().context("waiting for the node")?;
        let text = String::from_utf8_lossy(&output.stderr);
        let text = text.trim().trim_start_matches("forebay: ");
        if text.is_empty() {
            bail!("node ended before it was ready: {} (see {})", output.status, dir.log_file().display());
        }
        bail!("{text}");
    };
    Ok(note.to_owned())
}

fn start_in_background(dir: &NodeDir, args: StartArgs) -> Result<()> {
    let known_admin = env().files.exists(&dir.admin_credentials());
    let membership = || IdentityFiles::new(&env(), dir).membership();
    let had_joined = membership()?.is_some();
    let note = in_background(dir, std::env::args_os().skip(1))?;
    // The first start of a cluster whose logs are in an engine makes one.
    let membership = membership()?;
    let (is_member, here) = (membership.is_some(), membership.map_or(OWNER, |it| it.node).0);
    let status = match is_member {
        true => status_with_drives(dir.root(), here)?,
        // It has opened its drives, as far as that is possible.
        false => ask(dir.root(), |client| async move { client.status().await })?,
    };
    let new_key = if known_admin || had_joined { String::new() } else { first_admin(dir)? };
    print(Format::from(args.json), &status, |status| {
        let mounts = status.filesystems.iter().map(|filesystem| {
            let mount = filesystem.mount.as_deref().unwrap_or("not mounted");
            format!(
                "  {:<10} {mount}  ({}, {})\n",
                filesystem.name, filesystem.profile, filesystem.protection
            )
        });
        let s3 = status.s3.as_ref().map(|url| format!("  {:<10} {url}\n", "s3")).unwrap_or_default();
        format!(
            "node is ready: pid={}\n{}{s3}  {:<10} {} in {}{}\n{}  {:<10} {}\n  {:<10} {}\n  {:<10} forebay stop {}\n\n{new_key}",
            status.pid,
            mounts.collect::<String>(),
            "drives",
            status.drives.iter().filter(|drive| drive.node == here).count(),
            dir.drives().display(),
            if new_key.is_empty() { String::new() } else { sizes(status) },
            if note.is_empty() { String::new() } else { format!("  {:<10} {note}\n", "") },
            "admin",
            dir.run().join("admin.sock").display(),
            "log",
            dir.log_file().display(),
            "stop with",
            status.dir,
        )
    })
}

/// Sizes of the drives in a new cluster, and how to get more room.
fn sizes(status: &NodeStatus) -> String {
    let sizes = status.drives.iter().map(|drive| drive.space.capacity_bytes);
    let (least, most) = (sizes.clone().min().unwrap_or(0), sizes.max().unwrap_or(0));
    let size = match least == most {
        true => bytes(least),
        false => format!("{} to {}", bytes(least), bytes(most)),
    };
    format!(", {size} each (--drive-size; for more room later: forebay drive add {})", status.dir)
}

/// The first access key of a new cluster: shown only now. The metadata of an import has one already.
fn first_admin(dir: &NodeDir) -> Result<String> {
    let path = dir.admin_credentials();
    if !env().files.exists(&path) {
        return Ok(String::new());
    }
    let text = env().files.read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim_start_matches([' ', '=']).to_owned()).unwrap_or_default()
    };
    Ok(format!(
        "new administrator of the S3 endpoint, shown once and kept in {}:\n  {:<10} {}\n  {:<10} {}",
        path.display(),
        "access key",
        value("aws_access_key_id"),
        "secret key",
        value("aws_secret_access_key"),
    ))
}

/// Begins the line that the background process prints once it serves. What to tell about new drives follows.
const READY: &str = "ready";

fn start_logging(dir: &NodeDir, args: &StartArgs) -> Result<Log> {
    let terminal = args.foreground && !args.background_child;
    let sink = if terminal { Sink::Terminal } else { Sink::file(&env(), &dir.log_file())? };
    let log = Log::start(&env(), sink);
    log.abort_on_panic();
    Ok(log)
}

/// Most descriptors are connections. Shells and service managers set a low soft limit, which a process may raise
/// itself.
fn raise_file_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

fn serve(dir: &NodeDir, args: StartArgs) -> Result<()> {
    if args.background_child {
        // Fails only in a leader of a process group, which is detached enough.
        let _ = setsid();
    }
    let log = start_logging(dir, &args)?;
    let result = run(dir, &args);
    if let Err(error) = &result {
        tracing::error!("the node ends: {error:#}");
    }
    log.flush();
    match result? {
        Ended::Stopped => Ok(()),
        Ended::Anew(asked) => Err(begin_anew(&asked)),
    }
}

/// Why a node serves no more.
enum Ended {
    Stopped,
    /// This node does not own the ledgers any more that it owned, or their logs have moved. It may have been asked to stop in the
    /// meantime.
    Anew(watch::Receiver<Option<Mounts>>),
}

/// Set for a process that begins anew: nobody reads its standard output. The value says whether it was asked to stop.
const ANEW: &str = "FOREBAY_ANEW";
const ANEW_VALUES: [(Option<Mounts>, &str); 3] =
    [(None, "serve"), (Some(Mounts::Unmount), "unmount"), (Some(Mounts::Keep), "keep")];

/// Replaces this process by a new one with the same arguments. Mounts are in processes of their own. Returns if that fails.
fn begin_anew(asked: &watch::Receiver<Option<Mounts>>) -> anyhow::Error {
    let asked = *asked.borrow();
    let value = ANEW_VALUES.iter().find(|(mounts, _)| *mounts == asked).map_or("serve", |(_, value)| value);
    let again = || -> Result<std::convert::Infallible> {
        // Also if an upgrade has replaced the file since.
        let arguments = std::env::args_os().skip(1);
        Err(Command::new("/proc/self/exe").args(arguments).env(ANEW, value).exec().into())
    };
    match again() {
        Err(error) => error.context("beginning anew"),
    }
}

/// A running node, of either kind.
enum Running {
    Node(Arc<Node>),
    /// With what to tell about the drives that this start made.
    Member(Arc<Member>, Option<String>),
}

impl Running {
    async fn start(dir: &NodeDir, options: StartOptions) -> Result<Self> {
        let is_member = Member::is_in(&env(), dir)?;
        if !is_member && options.log.is_none() {
            return Node::start(env(), dir.clone(), options).await.map(Self::Node);
        }
        let note = if is_member { None } else { found(&env(), dir, &options).await? };
        let member = Member::start(env(), dir.clone(), options).await?;
        Ok(Self::Member(member, note))
    }

    /// Waits until the process must begin anew.
    async fn must_begin_anew(&self) {
        match self {
            Self::Node(node) => node.asked_to_move().await,
            Self::Member(member, _) => {
                member.deposed().await;
                tracing::warn!("what this process knows of the metadata is out of date");
            }
        }
    }

    /// Waits until the node knows that its program is too old for the cluster. Returns what to do.
    async fn is_unfit(&self) -> anyhow::Error {
        match self {
            // The start of this one fails.
            Self::Node(_) => std::future::pending().await,
            Self::Member(member, _) => member.unfit().await,
        }
    }

    /// What comes before that. It must not be given up halfway.
    async fn before_anew(&self) {
        match self {
            Self::Node(node) => node.move_logs().await,
            Self::Member(member, _) => member.before_anew().await,
        }
    }

    /// What to tell about the drives that this start made.
    fn note(&self) -> Option<&str> {
        match self {
            Self::Node(node) => node.note(),
            Self::Member(_, note) => note.as_deref(),
        }
    }

    async fn stop(&self, mounts: Mounts) -> Result<()> {
        match self {
            Self::Node(node) => node.stop(mounts).await,
            Self::Member(member, _) => member.stop(mounts).await,
        }
    }
}

/// The runtime of a node.
fn runtime() -> Result<Runtime> {
    // A thread begins with the CPUs of the one that started it, which may be bound to one.
    let cpus = rustix::thread::sched_getaffinity(None)?;
    let use_all = move || {
        let _ = rustix::thread::sched_setaffinity(None, &cpus);
    };
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().on_thread_start(use_all).build()?)
}

fn run(dir: &NodeDir, args: &StartArgs) -> Result<Ended> {
    raise_file_limit();
    let known_admin = env().files.exists(&dir.admin_credentials()) || Member::is_in(&env(), dir)?;
    let runtime = runtime()?;
    let _watchdog = Watchdog::start(runtime.handle().clone());
    let mut asked = signals(dir)?;
    let later = asked.clone();
    let ended = runtime.block_on(async {
        let anew = std::env::var(ANEW).ok();
        let is_anew = anew.is_some();
        let options = if is_anew { options(args).of_known_node() } else { options(args) };
        let node = Running::start(dir, options).await?;
        tracing::info!(dir = %dir.root().display(), "node serves");
        if is_anew {
            tracing::info!("this is the process that begins anew");
        } else if args.background_child {
            println!("{READY} {}", node.note().unwrap_or_default());
            std::io::stdout().flush()?;
        } else if !known_admin {
            println!("{}", first_admin(dir)?);
            if let Some(note) = node.note() {
                println!("{note}");
            }
        }
        let before = ANEW_VALUES.iter().find(|(_, value)| anew.as_deref() == Some(value));
        let mounts = match before.and_then(|(mounts, _)| *mounts) {
            Some(mounts) => mounts,
            None => tokio::select! {
                // The sender's thread lives as long as the process.
                was_asked = asked.wait_for(|asked| asked.is_some()) =>
                    was_asked.ok().and_then(|asked| *asked).unwrap_or(Mounts::Unmount),
                unfit = node.is_unfit() => {
                    let _ = tokio::time::timeout(SHUTDOWN_DEADLINE, node.stop(Mounts::Keep)).await;
                    // This may be a copy, whose member of etcd has older data under the name of another.
                    let engine = Supervised::new(&env(), dir);
                    let _ = tokio::task::spawn_blocking(move || engine.end()).await;
                    return Err(unfit);
                }
                () = node.must_begin_anew() => {
                    node.before_anew().await;
                    tracing::warn!("the process begins anew");
                    return Ok(Ended::Anew(later));
                }
            },
        };
        let stopped = tokio::time::timeout(SHUTDOWN_DEADLINE, node.stop(mounts)).await;
        let mut result = stopped
            .unwrap_or_else(|_| Err(anyhow!("stopping took too long; everything acknowledged is safe")));
        if mounts == Mounts::Unmount {
            // However far the stop came. Only this keeps the logs reachable for it.
            let engine = Supervised::new(&env(), dir);
            result = result.and(tokio::task::spawn_blocking(move || engine.end()).await?);
        }
        match &result {
            Ok(()) => tracing::info!("node has stopped"),
            Err(error) => {
                tracing::error!("node stopped with an error: {error:#}");
                env().files.write_atomic(&dir.stop_error(), format!("{error:#}").as_bytes())?;
            }
        }
        result.map(|()| Ended::Stopped)
    });
    if !matches!(ended, Ok(Ended::Stopped)) {
        // Nothing waits for a disk that hangs.
        runtime.shutdown_background();
    }
    ended
}

/// Asks to stop at SIGINT or SIGTERM, and at SIGUSR1 to keep mounts. A thread of its own waits for the signal, and ends the process
/// by force if the node does not stop in time.
fn signals(dir: &NodeDir) -> Result<watch::Receiver<Option<Mounts>>> {
    let engine = Supervised::new(&env(), dir);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (ask, asked) = watch::channel(None);
    let (mut terminate, mut interrupt, mut keep) = {
        let _inside = runtime.enter();
        (
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
            signal(SignalKind::user_defined1())?,
        )
    };
    // The thread lives as long as the process.
    let _ = spawn_thread("signals", move || {
        runtime.block_on(async {
            let mounts = tokio::select! {
                _ = terminate.recv() => Mounts::Unmount,
                _ = interrupt.recv() => Mounts::Unmount,
                _ = keep.recv() => Mounts::Keep,
            };
            tracing::info!(?mounts, "asked to stop");
            ask.send_replace(Some(mounts));
            tokio::time::sleep(SHUTDOWN_DEADLINE + FORCE_AFTER).await;
            if mounts == Mounts::Unmount {
                let _ = engine.end();
            }
            tracing::error!("the node does not stop, ending by force; everything acknowledged is safe");
            tokio::time::sleep(FORCE_AFTER).await;
            std::process::abort();
        })
    });
    Ok(asked)
}

pub(super) fn stop(dir: &Path, keep_mounts: bool) -> Result<()> {
    let dir = NodeDir::new(dir);
    let root = dir.root().display();
    if let Some(client) = Guest::load(&env(), &dir)? {
        run_here(client.stop(&env(), &dir))?;
        println!("nothing is mounted any more: dir={root}");
        return Ok(());
    }
    // It may be starting, or begin anew.
    let pid = read_node_file(&env(), &dir).map(|file| file.pid).or_else(|| last_pid(&env(), &dir));
    let node = pid.and_then(|pid| Some((pid, running(pid)?)));
    // A node that holds the lock now is not another process that was given the node's number after its end.
    let Some((pid, node)) = node.filter(|_| is_locked_soon(&dir)) else {
        bail!("no node runs in {root}");
    };
    let signal = if keep_mounts { Signal::USR1 } else { Signal::TERM };
    // The lock is free a moment before the last of the node's files is closed.
    if !ends_when_asked(&node, pid, signal)? {
        bail!("node has not stopped after {STOP_DEADLINE:?}: see {}", dir.log_file().display());
    }
    wait_for_drives(&dir);
    if let Ok(error) = env().files.read(&dir.stop_error()) {
        let error = String::from_utf8_lossy(&error).into_owned();
        bail!(
            "node has stopped, but could not write everything out: {error} (see {})",
            dir.log_file().display()
        );
    }
    println!("node has stopped: dir={root}");
    Ok(())
}

/// Waits until nothing holds the drives, and the filesystems below them: the kernel closes files of an io_uring a moment after the end of
/// the process. What cannot be looked at is not waited for.
fn wait_for_drives(dir: &NodeDir) {
    let files = env().files;
    let Ok(drives) = LocalDrives::load(&env(), dir, Vec::new()) else { return };
    let is_held = |path: &PathBuf| {
        let file = files.open(path, OpenMode::Existing, Caching::Buffered);
        let lock = file.and_then(|file| file.try_lock());
        lock.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    let paths = drives.paths();
    for _ in 0..DRIVE_LOOKS {
        if !paths.iter().any(is_held) {
            return;
        }
        std::thread::park_timeout(DRIVE_LOOK);
    }
}

/// The process with a number, if it is there.
fn running(pid: u32) -> Option<OwnedFd> {
    pidfd_open(Pid::from_raw(pid as i32)?, PidfdFlags::empty()).ok()
}

/// Whether a process holds the lock. One that begins anew lets it go for a moment.
fn is_locked_soon(dir: &NodeDir) -> bool {
    (0..LOCK_LOOKS).any(|look| {
        std::thread::park_timeout(if look == 0 { Duration::ZERO } else { LOCK_LOOK });
        is_locked(&env(), dir)
    })
}

/// Asks a process to end, and waits until it has. It is asked again and again: a process that begins anew may have taken a signal
/// just before, and not know of it after.
fn ends_when_asked(process: &OwnedFd, pid: u32, signal: Signal) -> Result<bool> {
    let clock = env().clock;
    let started = clock.boot_ns();
    let waited = || Duration::from_nanos(clock.boot_ns() - started);
    while waited() < STOP_DEADLINE {
        // A process that has just begun would die of the signal, and leave its mounts.
        if catches(pid, signal) || waited() > CATCH_PATIENCE {
            match pidfd_send_signal(process, signal) {
                Ok(()) => {}
                Err(Errno::SRCH) => return Ok(true),
                Err(error) => return Err(error).context("cannot signal the node"),
            }
        }
        if ends_within(process, ASK_AGAIN)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a process has a handler of a signal.
fn catches(pid: u32, signal: Signal) -> bool {
    let status = read_proc(Path::new(&format!("/proc/{pid}/status"))).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal.as_raw() - 1) & 1 == 1
}

/// Waits until the process has ended and all its files are closed.
fn ends_within(process: &OwnedFd, timeout: Duration) -> Result<bool> {
    let clock = env().clock;
    let started = clock.boot_ns();
    loop {
        let waited = Duration::from_nanos(clock.boot_ns() - started);
        let left = Timespec::try_from(timeout.saturating_sub(waited))?;
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&left)) {
            Ok(ended) => return Ok(ended > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for the end of the node"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that takes a signal and forgets it, as one that begins anew, is asked again.
    #[test]
    fn a_process_that_forgets_a_signal_ends_at_the_next() {
        let script = "trap 'n=$((n + 1)); [ $n = 2 ] && exit 7' USR1; while :; do sleep 0.05; done";
        let mut child = Command::new("bash").args(["-c", script]).spawn().unwrap();
        let process = running(child.id()).unwrap();
        assert!(ends_when_asked(&process, child.id(), Signal::USR1).unwrap());
        assert_eq!(child.wait().unwrap().code(), Some(7), "it died of a signal that it had no handler for");
    }
}
