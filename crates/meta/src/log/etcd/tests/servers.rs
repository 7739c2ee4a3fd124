//! Real members of etcd on this machine, which end with the tests however these end.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use base::LedgerId;
use base::env::Env;
use tokio::runtime::{Handle, Runtime};
use tokio::time::{Instant, sleep};

use super::super::client::Client;
use super::super::proto::{StatusRequest, StatusResponse};
use super::super::{Etcd, EtcdOptions, EtcdTls};
use crate::log::remote::Patience;

const ETCD: &str = "/usr/bin/etcd";
/// Ends the server when the test's end of the pipe is closed, be it by a crash of the test.
const KEEPER: &str = r#""$@" >>"$0" 2>&1 & echo $!; read -r _; kill -9 $!; wait"#;

struct Running {
    keeper: Child,
    pid: u32,
    /// Closed when it is dropped.
    _life: ChildStdin,
}

/// One member, running or not.
pub(super) struct Member {
    args: Vec<String>,
    log: PathBuf,
    pub(super) endpoint: String,
    data: PathBuf,
    running: Option<Running>,
}

impl Member {
    pub(super) fn start(&mut self) {
        assert!(
            Path::new(ETCD).exists(),
            "{ETCD} is missing, and these tests need it: run tests/deps.sh, or install Debian's etcd-server"
        );
        let mut keeper = Command::new("sh");
        keeper.arg("-c").arg(KEEPER).arg(&self.log).arg(ETCD).args(&self.args);
        // Debian sets some of etcd's arguments like this.
        std::env::vars().filter(|(name, _)| name.starts_with("ETCD_")).for_each(|(name, _)| {
            keeper.env_remove(name);
        });
        let mut keeper = keeper.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (life, output) = (keeper.stdin.take().unwrap(), keeper.stdout.take().unwrap());
        let mut pid = String::new();
        BufReader::new(output).read_line(&mut pid).unwrap();
        let pid = pid.trim().parse().unwrap();
        self.running = Some(Running { keeper, pid, _life: life });
    }

    /// Ends it at once, as a power cut of its process.
    pub(super) fn kill(&mut self) {
        let Some(Running { mut keeper, _life, .. }) = self.running.take() else { return };
        drop(_life);
        keeper.wait().unwrap();
    }

    pub(super) fn signal(&self, signal: &str) {
        let pid = self.running.as_ref().unwrap().pid.to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Puts an earlier copy of its data in place of the present one, or makes such a copy.
    pub(super) fn copy_data(&self, from: &str, to: &str) {
        assert!(self.running.is_none());
        let (from, to) = (self.data.with_extension(from), self.data.with_extension(to));
        let _ = std::fs::remove_dir_all(&to);
        assert!(Command::new("cp").arg("-r").args([from, to]).status().unwrap().success());
    }

    /// It begins again without data, as a member of another cluster.
    pub(super) fn forget(&mut self) {
        std::fs::remove_dir_all(&self.data).unwrap();
        self.args.extend(["--initial-cluster-token".to_owned(), "another".to_owned()]);
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The members of a cluster.
pub(super) struct Servers {
    pub(super) members: Vec<Member>,
    pub(super) runtime: Runtime,
    pub(super) tls: Option<EtcdTls>,
    _dir: tempfile::TempDir,
}

impl Servers {
    pub(super) fn start(count: usize) -> Self {
        Self::start_with(count, |_| (vec![], None))
    }

    /// With more arguments, and certificates, which may be files in the directory that `options` gets.
    pub(super) fn start_with(
        count: usize,
        options: impl Fn(&Path) -> (Vec<String>, Option<EtcdTls>),
    ) -> Self {
        // Somebody else may have taken a port just before the member does.
        for _ in 0..5 {
            let servers = Self::launch(count, &options);
            if servers.wait(Duration::from_secs(20)) {
                return servers;
            }
        }
        panic!("no cluster of etcd begins to work")
    }

    fn launch(count: usize, options: &impl Fn(&Path) -> (Vec<String>, Option<EtcdTls>)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (more, tls) = options(dir.path());
        let scheme = if tls.is_some() { "https" } else { "http" };
        let held: Vec<_> = (0..2 * count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let ports: Vec<u16> = held.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
        let peer = |index: usize| format!("http://127.0.0.1:{}", ports[2 * index + 1]);
        let cluster: Vec<_> = (0..count).map(|index| format!("m{index}={}", peer(index))).collect();
        let cluster = cluster.join(",");
        let member = |index: usize| {
            let endpoint = format!("{scheme}://127.0.0.1:{}", ports[2 * index]);
            let data = dir.path().join(format!("m{index}.data"));
            let flags = [
                ("--name", format!("m{index}")),
                ("--data-dir", data.display().to_string()),
                ("--listen-client-urls", endpoint.clone()),
                ("--advertise-client-urls", endpoint.clone()),
                ("--listen-peer-urls", peer(index)),
                ("--initial-advertise-peer-urls", peer(index)),
                ("--initial-cluster", cluster.clone()),
                ("--initial-cluster-state", "new".to_owned()),
            ];
            let flags = flags.into_iter().flat_map(|(name, value)| [name.to_owned(), value]);
            let args = flags.chain(more.clone()).collect();
            let log = dir.path().join(format!("m{index}.log"));
            Member { args, log, endpoint, data, running: None }
        };
        let mut members: Vec<_> = (0..count).map(member).collect();
        drop(held);
        members.iter_mut().for_each(Member::start);
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(2).enable_all().build().unwrap();
        Self { members, runtime, tls, _dir: dir }
    }

    /// Whether all members answer and have a leader before the time is over.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        self.runtime.block_on(async {
            let end = Instant::now() + limit;
            while Instant::now() < end {
                if self.leader_of_all().await.is_some() {
                    return true;
                }
                sleep(Duration::from_millis(50)).await;
            }
            false
        })
    }

    /// The leader that all members agree on.
    async fn leader_of_all(&self) -> Option<usize> {
        let (mut ids, mut leaders) = (vec![], vec![]);
        for member in &self.members {
            let status = self.status(member).await?;
            ids.push(status.header?.member_id);
            leaders.push(status.leader);
        }
        if leaders.iter().any(|leader| *leader != leaders[0]) {
            return None;
        }
        ids.iter().position(|id| *id == leaders[0])
    }

    async fn status(&self, member: &Member) -> Option<StatusResponse> {
        let client = Client::connect(&self.options(vec![member.endpoint.clone()])).await.ok()?;
        let patience = Patience { attempt: Duration::from_secs(1), total: Duration::from_secs(1) };
        client.repeat(StatusRequest {}, patience).await.ok()
    }

    /// The leader by the word of any member that runs.
    pub(super) fn leader(&self) -> Option<usize> {
        self.runtime.block_on(async {
            for (index, member) in
                self.members.iter().enumerate().filter(|(_, member)| member.running.is_some())
            {
                let status = self.status(member).await;
                if status.is_some_and(|status| {
                    status.header.is_some_and(|header| header.member_id == status.leader)
                }) {
                    return Some(index);
                }
            }
            None
        })
    }

    fn options(&self, endpoints: Vec<String>) -> EtcdOptions {
        EtcdOptions { endpoints, tls: self.tls.clone(), prefix: "forebay/test".to_owned() }
    }

    /// A client of all members.
    pub(super) fn connect(&self) -> Etcd {
        self.connect_to(self.members.iter().map(|member| member.endpoint.clone()).collect())
    }

    pub(super) fn connect_to(&self, endpoints: Vec<String>) -> Etcd {
        self.runtime.block_on(Etcd::connect(&self.options(endpoints), &Env::real())).unwrap()
    }
}

/// A cluster for all tests that only need one. It ends with the last of them.
#[derive(Clone)]
pub(in super::super::super) struct Shared(Arc<(Servers, Etcd, AtomicU32)>);

impl Shared {
    pub(in super::super::super) fn get() -> Self {
        static SHARED: Mutex<Weak<(Servers, Etcd, AtomicU32)>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(running) = shared.upgrade() {
            return Self(running);
        }
        let servers = Servers::start(3);
        let etcd = servers.connect();
        let started = Arc::new((servers, etcd, AtomicU32::new(1)));
        *shared = Arc::downgrade(&started);
        Self(started)
    }

    pub(in super::super::super) fn etcd(&self) -> &Etcd {
        &self.0.1
    }

    pub(in super::super::super) fn runtime(&self) -> Handle {
        self.0.0.runtime.handle().clone()
    }

    /// A ledger that no other test uses.
    pub(in super::super::super) fn next_ledger(&self) -> LedgerId {
        LedgerId(self.0.2.fetch_add(1, Ordering::Relaxed))
    }

    /// A prefix that no other test uses.
    pub(in super::super::super) fn place(&self) -> Etcd {
        let etcd = self.etcd();
        Etcd { prefix: format!("{}/move-{}", etcd.prefix, self.next_ledger()), ..etcd.clone() }
    }
}
