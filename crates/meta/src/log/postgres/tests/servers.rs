//! Real servers of PostgreSQL on this machine, which end with the tests however these end.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use base::LedgerId;
use base::env::{Caching, Env, OpenMode};
use tokio::runtime::{Handle, Runtime};
use tokio::time::{Instant, sleep};

use super::super::{Postgres, PostgresOptions};
use crate::log::LogError;

/// Ends the server when the test's end of the pipe is closed, be it by a crash of the test.
const KEEPER: &str = r#""$@" >>"$0" 2>&1 & echo $!; read -r _; kill -9 $!; wait"#;
pub(super) const PASSWORD: &str = "not a word of 'people'";
const SETTINGS: &str = "
max_connections = 60
shared_buffers = 16MB
max_wal_size = 128MB
wal_receiver_status_interval = 1s
wal_retrieve_retry_interval = 100ms
listen_addresses = '127.0.0.1'
lc_messages = 'C'
";

/// Where Debian has the programs of the server.
fn programs() -> PathBuf {
    let found = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = found.map(|entry| entry.path().join("bin")).collect();
    found.sort();
    found.pop().expect(
        "PostgreSQL is missing, and these tests need it: run tests/deps.sh, or install Debian's postgresql",
    )
}

/// A command of PostgreSQL, which root may not carry out.
fn command(program: &str) -> Command {
    let program = programs().join(program);
    let mut command = if is_root() {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "postgres", "--regid", "postgres", "--init-groups"]).arg(program);
        command
    } else {
        Command::new(program)
    };
    command.current_dir("/");
    command
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").unwrap().uid() == 0
}

#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn append_to(path: &Path, text: &str, mode: OpenMode) {
    let len = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    let files = Env::real().files;
    let file = files.open(path, mode, Caching::Buffered);
    file.unwrap().write_at(text.as_bytes(), len).unwrap();
}

/// Becomes true in time.
#[track_caller]
pub(super) fn wait_until(what: &str, mut is_true: impl FnMut() -> bool) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while !is_true() {
        assert!(Instant::now() < end, "{what}");
        runtime.block_on(async { sleep(Duration::from_millis(20)).await });
    }
}

struct Running {
    keeper: Child,
    pid: u32,
    /// Closed when it is dropped.
    _life: ChildStdin,
}

/// One server, running or not.
pub(super) struct Server {
    pub(super) data: PathBuf,
    pub(super) port: u16,
    running: Option<Running>,
}

impl Server {
    /// With the files in this directory.
    fn new(data: PathBuf) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Self { data, port, running: None }
    }

    fn sockets(&self) -> &Path {
        self.data.parent().unwrap()
    }

    pub(super) fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// More settings. Of two for the same the last counts.
    pub(super) fn set(&self, settings: &str) {
        append_to(&self.data.join("postgresql.conf"), &format!("\n{settings}\n"), OpenMode::Existing);
        if let Some(running) = &self.running {
            run(Command::new("kill").args(["-HUP", &running.pid.to_string()]));
        }
    }

    pub(super) fn start(&mut self) {
        let log = self.data.with_extension("log");
        let mut server = command("postgres");
        server.arg("-D").arg(&self.data).arg("-p").arg(self.port.to_string()).arg("-k").arg(self.sockets());
        let mut keeper = Command::new("sh");
        keeper.arg("-c").arg(KEEPER).arg(&log).arg(server.get_program()).args(server.get_args());
        let mut keeper =
            keeper.stdin(Stdio::piped()).stdout(Stdio::piped()).current_dir("/").spawn().unwrap();
        let (life, output) = (keeper.stdin.take().unwrap(), keeper.stdout.take().unwrap());
        let mut pid = String::new();
        BufReader::new(output).read_line(&mut pid).unwrap();
        self.running = Some(Running { keeper, pid: pid.trim().parse().unwrap(), _life: life });
        wait_until("a server answers", || {
            if Path::new(&format!("/proc/{}/stat", pid.trim())).exists() {
                return self.psql("postgres", "SELECT 1").output().unwrap().status.success();
            }
            panic!("{}", std::fs::read_to_string(&log).unwrap());
        });
    }

    /// Ends it at once, as a power cut of its processes.
    pub(super) fn kill(&mut self) {
        let Some(Running { mut keeper, pid, _life, .. }) = self.running.take() else { return };
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        drop(_life);
        keeper.wait().unwrap();
        // They notice that their parent is gone, and hold what the next start needs.
        for child in children.split_whitespace() {
            wait_until("a process of the server ends", || {
                let stat = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
                stat.is_empty() || stat.contains(") Z ") || !stat.contains("(postgres)")
            });
        }
    }

    fn psql(&self, database: &str, statement: &str) -> Command {
        let mut command = command("psql");
        command.args([
            "-XqAt",
            "-U",
            "postgres",
            "-d",
            database,
            "-p",
            &self.port.to_string(),
            "-c",
            statement,
        ]);
        command.arg("-h").arg(self.sockets());
        command
    }

    /// As the operator.
    #[track_caller]
    pub(super) fn sql(&self, statement: &str) -> String {
        run(&mut self.psql("forebay", statement))
    }

    /// A file of the server's own.
    pub(super) fn write(&self, name: &str, text: &str) {
        let path = self.data.join(name);
        append_to(&path, text, OpenMode::CreateNew);
        run(Command::new("chmod").arg("600").arg(&path));
        run(Command::new("chown").arg("--reference").arg(&self.data).arg(&path));
    }

    /// Another system, with nothing in it.
    pub(super) fn make_anew(&mut self) {
        assert!(self.running.is_none());
        std::fs::remove_dir_all(&self.data).unwrap();
        make(self);
    }

    /// A standby becomes the primary.
    pub(super) fn promote(&self) {
        run(command("pg_ctl").arg("promote").arg("-w").arg("-D").arg(&self.data));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A primary with a database for logs, and perhaps its synchronous standby.
pub(super) struct Servers {
    pub(super) primary: Server,
    pub(super) standby: Option<Server>,
    pub(super) runtime: Runtime,
    dir: tempfile::TempDir,
    _template: Arc<tempfile::TempDir>,
}

/// A directory that the servers may use.
fn directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    if is_root() {
        run(Command::new("chown").arg("postgres").arg(dir.path()));
    }
    dir
}

/// Makes the files of a primary once for tests that run at a time, because that takes long.
fn template() -> Arc<tempfile::TempDir> {
    static TEMPLATE: Mutex<Weak<tempfile::TempDir>> = Mutex::new(Weak::new());
    let mut template = TEMPLATE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(made) = template.upgrade() {
        return made;
    }
    let dir = directory();
    let mut server = Server::new(dir.path().join("data"));
    make(&mut server);
    let made = Arc::new(dir);
    *template = Arc::downgrade(&made);
    made
}

/// Makes the files of a primary with a database for logs.
fn make(server: &mut Server) {
    let mut init = command("initdb");
    init.args(["--no-sync", "-U", "postgres", "-E", "UTF8", "--locale", "C"]);
    run(init.args(["--auth-local", "trust", "--auth-host", "scram-sha-256"]).arg("-D").arg(&server.data));
    server.set(SETTINGS);
    server.start();
    let role = format!("CREATE ROLE forebay LOGIN PASSWORD '{}'", PASSWORD.replace('\'', "''"));
    run(&mut server.psql("postgres", &role));
    run(&mut server.psql("postgres", "CREATE DATABASE forebay OWNER forebay"));
    run(command("pg_ctl").args(["stop", "-w", "-m", "fast", "-D"]).arg(&server.data));
    server.kill();
}

impl Servers {
    /// A primary alone.
    pub(super) fn single() -> Self {
        let (dir, template) = (directory(), template());
        let data = dir.path().join("primary");
        run(Command::new("cp").arg("-a").arg(template.path().join("data")).arg(&data));
        let mut primary = Server::new(data);
        primary.start();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        Self { primary, standby: None, runtime: runtime.unwrap(), dir, _template: template }
    }

    /// A primary with a synchronous standby.
    pub(super) fn pair() -> Self {
        let mut servers = Self::single();
        let data = servers.dir.path().join("standby");
        let mut copy = command("pg_basebackup");
        copy.args(["-R", "-X", "stream", "-c", "fast", "--no-sync", "-U", "postgres", "-h"]);
        copy.arg(servers.dir.path()).args(["-p", &servers.primary.port.to_string(), "-D"]).arg(&data);
        run(&mut copy);
        let mut standby = Server::new(data);
        standby.start();
        servers.primary.set("synchronous_standby_names = '*'");
        servers.standby = Some(standby);
        servers.wait_for_standby();
        servers
    }

    /// Waits until the standby has what the primary has.
    pub(super) fn wait_for_standby(&self) {
        let has_sync = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
        wait_until("the standby follows", || self.primary.sql(has_sync) == "1");
    }

    pub(super) fn standby(&mut self) -> &mut Server {
        self.standby.as_mut().unwrap()
    }

    pub(super) fn options(&self) -> PostgresOptions {
        let servers = std::iter::once(&self.primary).chain(&self.standby);
        PostgresOptions {
            hosts: servers.map(Server::host).collect(),
            database: "forebay".to_owned(),
            user: "forebay".to_owned(),
            password: Some(PASSWORD.to_owned()),
            ca_pem: None,
            prefix: "forebay/test".to_owned(),
            is_single: self.standby.is_none(),
        }
    }

    pub(super) fn try_connect(&self, options: &PostgresOptions) -> Result<Postgres, LogError> {
        self.runtime.block_on(Postgres::connect(options))
    }

    pub(super) fn connect(&self) -> Postgres {
        self.try_connect(&self.options()).unwrap()
    }
}

/// Tests with servers of their own run one after the other: each would disturb the others' deadlines.
pub(super) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Servers for all tests that only need a database. They end with the last of them.
#[derive(Clone)]
pub(in super::super::super) struct Shared(Arc<(Servers, Postgres, AtomicU32)>);

impl Shared {
    pub(in super::super::super) fn get() -> Self {
        static SHARED: Mutex<Weak<(Servers, Postgres, AtomicU32)>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(running) = shared.upgrade() {
            return Self(running);
        }
        let servers = Servers::pair();
        let engine = servers.connect();
        let started = Arc::new((servers, engine, AtomicU32::new(1)));
        *shared = Arc::downgrade(&started);
        Self(started)
    }

    pub(in super::super::super) fn engine(&self) -> &Postgres {
        &self.0.1
    }

    pub(super) fn servers(&self) -> &Servers {
        &self.0.0
    }

    pub(in super::super::super) fn runtime(&self) -> Handle {
        self.0.0.runtime.handle().clone()
    }

    /// A ledger that no other test uses.
    pub(in super::super::super) fn next_ledger(&self) -> LedgerId {
        LedgerId(self.0.2.fetch_add(1, Ordering::Relaxed))
    }

    /// A prefix that no other test uses.
    pub(in super::super::super) fn place(&self) -> Postgres {
        let engine = self.engine();
        Postgres { prefix: format!("{}/move-{}", engine.prefix, self.next_ledger()), ..engine.clone() }
    }
}
