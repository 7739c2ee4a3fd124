//! A member of etcd that Forebay runs on a node, for the logs of the cluster: its files in `DIR/engine`, and its process, which goes on
//! while the process of the node begins anew or is killed.

use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::ClusterId;
use base::env::Env;
use control::Authority;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, waitpid};
use serde::{Deserialize, Serialize};
use wire::cluster::{EngineCondition, EngineMember, EngineSeat};

use crate::node::{NodeDir, read_proc};

/// The program.
const ETCD: &str = "etcd";
/// How often a member is looked at, and the longest pause before one that ends at once is started again.
pub(crate) const LOOK: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Size of a member's log at which its next start begins a new one.
const LOG_BYTES_MAX: u64 = 16 << 20;
/// How long a new member must have run.
const TRIAL: Duration = Duration::from_millis(1500);
/// How long a member may take to end, and the pause between two looks.
const END_PATIENCE: Duration = Duration::from_secs(5);
const END_LOOK: Duration = Duration::from_millis(20);

/// `member.json`: what the member on this node is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Seat {
    /// The number of the attempt that made the members, or by which the others know a member that joined them.
    number: u64,
    /// The name of this one.
    name: String,
    /// Where it listens.
    listen: IpAddr,
    /// All members.
    members: Vec<EngineMember>,
    /// It was started once: without its data it must not come back under this name.
    has_begun: bool,
    /// The others ran already when it was made.
    #[serde(default)]
    joins: bool,
}

/// The member on a node. There is one if its files are there.
#[derive(Clone)]
pub(crate) struct Supervised {
    env: Env,
    dir: NodeDir,
}

impl Supervised {
    pub(crate) fn new(env: &Env, dir: &NodeDir) -> Self {
        Self { env: env.clone(), dir: dir.clone() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.engine().join(name)
    }

    /// Certificate of the authority, and certificate and key of this node.
    pub(super) fn certificates(&self) -> [PathBuf; 3] {
        ["authority.pem", "certificate.pem", "key.pem"].map(|name| self.path(name))
    }

    fn read(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.path(name);
        self.env.files.read(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path(name);
        self.env.files.write_atomic(&path, bytes).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Whether there is a member on this node.
    pub(crate) fn exists(&self) -> bool {
        self.env.files.exists(&self.path("member.json"))
    }

    /// The number of the attempt that made the member; `None`: there is none.
    pub(crate) fn number(&self) -> Option<u64> {
        self.exists().then(|| self.seat().ok()).flatten().map(|seat| seat.number)
    }

    fn seat(&self) -> Result<Seat> {
        serde_json::from_slice(&self.read("member.json")?)
            .with_context(|| format!("not understood: {}", self.path("member.json").display()))
    }

    fn keep(&self, seat: &Seat) -> Result<()> {
        self.write("member.json", &serde_json::to_vec_pretty(seat)?)
    }

    /// The directory of its data.
    fn data(&self, number: u64) -> PathBuf {
        self.path(&format!("etcd-{number:016x}"))
    }

    /// Makes the files of the member. What another attempt has left goes. The caller knows that no cluster relies on that.
    fn prepare(&self, listen: IpAddr, asked: &EngineSeat) -> Result<()> {
        if self.exists() && self.seat()?.number == asked.number {
            return Ok(());
        }
        self.end()?;
        let me = asked.members.iter().find(|member| member.name == asked.name);
        let me = me.with_context(|| format!("there is no member {} among those to come", asked.name))?;
        let root = self.dir.engine();
        if root.exists() {
            std::fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
        }
        self.env.files.create_dir_all(&root).with_context(|| format!("cannot create {}", root.display()))?;
        rustix::fs::chmod(&root, Mode::RWXU)?;
        let authority = Authority::of_pem(&asked.authority, &asked.authority_key)?;
        let (certificate, key) = authority.issue_to_host(&me.host, self.env.clock.wall_ns())?;
        self.write("authority.pem", asked.authority.as_bytes())?;
        self.write("authority-key.pem", asked.authority_key.as_bytes())?;
        self.write("certificate.pem", certificate.as_bytes())?;
        self.write("key.pem", key.as_bytes())?;
        self.keep(&Seat {
            number: asked.number,
            name: asked.name.clone(),
            listen,
            members: asked.members.clone(),
            has_begun: false,
            joins: asked.joins,
        })
    }

    /// Starts the member unless it runs.
    pub(crate) fn start(&self) -> Result<()> {
        if self.running().is_some() {
            return Ok(());
        }
        let seat = self.seat()?;
        if !self.has_data(&seat) {
            bail!(
                "the data of this member of etcd is gone: {}; it must not come back empty under its name",
                self.data(seat.number).display()
            );
        }
        self.shorten_log()?;
        self.keep(&Seat { has_begun: true, ..seat.clone() })?;
        let child = self.command(&seat)?.spawn();
        let child = child.with_context(|| {
            format!("cannot run {ETCD}, which keeps the logs: install it (Debian: apt install etcd-server)")
        })?;
        tracing::info!(pid = child.id(), name = seat.name, "a member of etcd was started");
        self.write("pid", child.id().to_string().as_bytes())
    }

    /// Starts a new member, and looks whether it stays: its ports may be in use.
    pub(crate) fn begin(&self, listen: IpAddr, asked: &EngineSeat) -> Result<()> {
        // Its process is known by this path.
        self.dir.engine().to_str().context("the path of the node's directory is not UTF-8")?;
        self.prepare(listen, asked)?;
        let logged = self.log_bytes();
        self.start()?;
        std::thread::park_timeout(TRIAL);
        match self.running() {
            Some(_) => Ok(()),
            None => {
                bail!("etcd has ended at once: {} (see {})", self.last_error(logged), self.log().display())
            }
        }
    }

    /// The condition of the member.
    pub(crate) fn condition(&self) -> Result<EngineCondition> {
        if !self.exists() {
            return Ok(EngineCondition::Absent);
        }
        let has_data = self.has_data(&self.seat()?);
        Ok(if has_data { EngineCondition::Present } else { EngineCondition::Lost })
    }

    fn has_data(&self, seat: &Seat) -> bool {
        !seat.has_begun || self.env.files.exists(&self.data(seat.number).join("member"))
    }

    /// The certificate and the key of the members' authority.
    pub(crate) fn authority(&self) -> Result<(String, String)> {
        let text = |name| anyhow::Ok(String::from_utf8(self.read(name)?)?);
        Ok((text("authority.pem")?, text("authority-key.pem")?))
    }

    /// Ends the member of an engine that is lost, or that the logs have left, and puts its files aside.
    pub(crate) fn give_up(&self) -> Result<()> {
        if !self.exists() {
            return Ok(());
        }
        let number = self.seat()?.number;
        let root = self.dir.engine();
        // Each try has its own: what the first one puts aside is the last that is left of the lost engine.
        let aside = root.with_extension(format!("former-{number:016x}"));
        self.env.files.rename(&root, &aside).with_context(|| format!("cannot rename {}", root.display()))?;
        // Nobody starts it again now.
        self.end()
    }

    /// Ends the member of an attempt that has failed, and removes its files.
    pub(crate) fn undo(&self, number: u64) -> Result<()> {
        if !self.exists() || self.seat()?.number != number {
            return Ok(());
        }
        self.end()?;
        let root = self.dir.engine();
        std::fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))
    }

    fn log(&self) -> PathBuf {
        self.dir.log_file().with_file_name("etcd.log")
    }

    fn log_bytes(&self) -> u64 {
        rustix::fs::stat(self.log()).map_or(0, |about| about.st_size as u64)
    }

    /// Before a start, a long log becomes the earlier one.
    fn shorten_log(&self) -> Result<()> {
        if self.log_bytes() > LOG_BYTES_MAX {
            let earlier = self.log().with_extension("log.1");
            self.env.files.rename(&self.log(), &earlier).context("renaming etcd.log")?;
        }
        Ok(())
    }

    /// The last error in the member's log after the first `behind` bytes, or the last line there.
    fn last_error(&self, behind: u64) -> String {
        let log = self.env.files.read(&self.log()).unwrap_or_default();
        let log = String::from_utf8_lossy(log.get(behind as usize..).unwrap_or(&log)).into_owned();
        let entries =
            log.lines().rev().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let mut errors = entries.filter_map(|entry| Some(entry.get("error")?.as_str()?.to_owned()));
        let last = || log.lines().last().map(str::to_owned);
        errors.next().or_else(last).unwrap_or_else(|| "it does not say why".to_owned())
    }

    fn command(&self, seat: &Seat) -> Result<Command> {
        let me = seat.members.iter().find(|member| member.name == seat.name).context("it is not a member")?;
        let at = |host: &str, port: u16| format!("https://{}:{port}", bracketed(host));
        let peers = seat.members.iter().map(|it| format!("{}={}", it.name, at(&it.host, it.peer_port)));
        let peers: Vec<String> = peers.collect();
        let listen = seat.listen.to_string();
        let [authority, certificate, key] = self.certificates();
        let mut command = Command::new(ETCD);
        // Settings of the system's own etcd are not for this one.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("ETCD_")) {
            command.env_remove(name);
        }
        command
            .args(["--name", &seat.name, "--initial-cluster", &peers.join(",")])
            .args(["--initial-cluster-state", if seat.joins { "existing" } else { "new" }])
            .args(["--initial-cluster-token", &format!("forebay-{:016x}", seat.number)])
            .args(["--listen-client-urls", &at(&listen, me.client_port)])
            .args(["--advertise-client-urls", &at(&me.host, me.client_port)])
            .args(["--listen-peer-urls", &at(&listen, me.peer_port)])
            .args(["--initial-advertise-peer-urls", &at(&me.host, me.peer_port)])
            .args(["--client-cert-auth", "--peer-client-cert-auth", "--pre-vote"])
            .args(["--experimental-initial-corrupt-check", "--logger", "zap"]);
        for (name, path) in [
            ("--data-dir", &self.data(seat.number)),
            ("--log-outputs", &self.log()),
            ("--trusted-ca-file", &authority),
            ("--cert-file", &certificate),
            ("--key-file", &key),
            ("--peer-trusted-ca-file", &authority),
            ("--peer-cert-file", &certificate),
            ("--peer-key-file", &key),
        ] {
            command.arg(name).arg(path);
        }
        let append = OFlags::CREATE | OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC;
        let log = rustix::fs::open(self.log(), append, Mode::RUSR | Mode::WUSR);
        let log = log.with_context(|| format!("cannot write {}", self.log().display()))?;
        // Signals to the node's group are not for it.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Ok(command)
    }

    /// The process of the member. The node may have been killed before it could note its number.
    fn running(&self) -> Option<Pid> {
        let noted = self.env.files.read(&self.path("pid")).ok();
        let noted = noted.and_then(|text| Pid::from_raw(String::from_utf8(text).ok()?.parse().ok()?));
        // If it has ended as a child of this process, this lets it go.
        if let Some(pid) = noted {
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
        noted.filter(|pid| self.is_it(*pid)).or_else(|| {
            let numbers = self.env.files.list(Path::new("/proc")).unwrap_or_default().into_iter();
            let mut pids =
                numbers.filter_map(|path| Pid::from_raw(path.file_name()?.to_str()?.parse().ok()?));
            pids.find(|pid| self.is_it(*pid))
        })
    }

    /// Whether a process is that of the member.
    fn is_it(&self, pid: Pid) -> bool {
        let is_it = || {
            let command = read_proc(Path::new(&format!("/proc/{}/cmdline", pid.as_raw_nonzero()))).ok()?;
            let mut words = command.split('\0');
            let (program, data) = (words.next()?, self.path("etcd-"));
            Some(program.ends_with(ETCD) && words.any(|word| word.starts_with(data.to_str().unwrap_or("/"))))
        };
        is_it() == Some(true)
    }

    /// Ends the member.
    pub(crate) fn end(&self) -> Result<()> {
        for (signal, patience) in [(Signal::TERM, END_PATIENCE), (Signal::KILL, END_PATIENCE)] {
            let Some(pid) = self.running() else { return Ok(()) };
            if let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) {
                pidfd_send_signal(&process, signal).context("ending the member of etcd")?;
            }
            let begun = self.env.clock.boot_ns();
            while self.running().is_some()
                && Duration::from_nanos(self.env.clock.boot_ns() - begun) < patience
            {
                std::thread::park_timeout(END_LOOK);
            }
        }
        match self.running() {
            None => Ok(()),
            Some(pid) => bail!("a member of etcd does not end: pid={}", pid.as_raw_nonzero()),
        }
    }

    /// Starts the member again whenever it has ended.
    pub(crate) async fn keep_running(self) {
        let mut pause = LOOK;
        loop {
            tokio::time::sleep(pause).await;
            let member = self.clone();
            let looked = tokio::task::spawn_blocking(move || match member.running() {
                None if member.exists() => member.start().map(|()| true),
                _ => Ok(false),
            });
            pause = match looked.await {
                Ok(Ok(false)) => LOOK,
                Ok(Ok(true)) => {
                    tracing::error!("the member of etcd had ended: it was started again (see etcd.log)");
                    (pause * 2).min(PAUSE_MAX)
                }
                Ok(Err(error)) => {
                    tracing::error!(error = %format!("{error:#}"), "the member of etcd does not run");
                    (pause * 2).min(PAUSE_MAX)
                }
                Err(_) => return,
            };
        }
    }
}

/// The authority of the members of a new engine: its certificate and its key.
pub(crate) fn new_authority(cluster: ClusterId, now_ns: i64) -> Result<(String, String)> {
    let authority = Authority::make_named(format!("Forebay engine of cluster {cluster}"), now_ns)?;
    Ok((authority.certificate_pem().to_owned(), authority.key_pem().to_owned()))
}

/// A host as it stands in a URL.
pub(crate) fn bracketed(host: &str) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() }
}
