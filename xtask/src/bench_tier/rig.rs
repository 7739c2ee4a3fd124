//! A node with a filesystem attached to MinIO, both on one disk.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Pid;
use serde_json::Value;

use crate::bench::meter::process_ticks;
use crate::bench_s3::server::{NAME, start_minio};
use crate::node::{Drives, Node, NodeOptions, run};

/// Longest wait for any step.
const PATIENCE: Duration = Duration::from_secs(300);
/// Longest wait for the start of the store.
const START_PATIENCE: Duration = Duration::from_secs(30);
/// Content older than this is uploaded without a wait for more: the shortest cue plus the time to gather a blob.
pub(super) const SETTLED: Duration = Duration::from_secs(21);
const BUCKET: &str = "cold";
const RETENTION: &str = "1d";

/// The protocol of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    Http,
    Https,
}

impl Protocol {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Http => "HTTP",
            Self::Https => "HTTPS",
        }
    }
}

/// A node and its store.
pub(super) struct Rig {
    pub(super) protocol: Protocol,
    forebay: PathBuf,
    directory: PathBuf,
    node: Node,
    store: Store,
}

/// The process of the store. Killed when dropped.
struct Store(Child);

impl Drop for Store {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// CPU time of node and store, in hundredths of a second.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ticks {
    pub(super) node: u64,
    pub(super) store: u64,
}

/// The limits of the store.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit {
    pub(super) put_mb_s: f64,
    pub(super) get_mb_s: f64,
    pub(super) round_trip_ms: f64,
}

fn make_certificate(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory)?;
    run(Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
        .args(["-days", "30", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"])
        .args(["-addext", "basicConstraints=critical,CA:FALSE"])
        .arg("-keyout")
        .arg(directory.join("private.key"))
        .arg("-out")
        .arg(directory.join("public.crt")))
}

impl Rig {
    /// Starts both and attaches the filesystem, with a cue that is never reached.
    pub(super) fn new(home: &Path, forebay: &Path, minio: &str, protocol: Protocol) -> Result<Self> {
        let certificates = home.join("certificates");
        make_certificate(&certificates)?;
        let tls = (protocol == Protocol::Https).then_some(certificates.as_path());
        std::fs::create_dir_all(home.join("store/data").join(BUCKET))?;
        let (child, address) = start_minio(minio, &home.join("store"), tls)?;
        let store = Store(child);
        let directory = home.join("node");
        let options = NodeOptions {
            binary: forebay.to_path_buf(),
            profile: "1+0".to_owned(),
            drives: Drives::Files { count: 1, size: "12G".to_owned() },
            memory_mib: None,
            mount_options: String::new(),
        };
        let node = Node::create(&options, &directory, &directory.join("mnt"))?;
        let rig = Self { protocol, forebay: forebay.to_path_buf(), directory, node, store };
        let port = address.port().to_string();
        let add = |rig: &Self| {
            let mut command =
                rig.command(&["store", "add"], &["cold", "--hostname", "127.0.0.1", "--port", &port]);
            command.args(["--protocol", protocol.name(), "--bucket", BUCKET]);
            command.args(["--access-key-id", NAME, "--secret-key", NAME]);
            if tls.is_some() {
                command.arg("--ca").arg(certificates.join("public.crt"));
            }
            run(&mut command)
        };
        let deadline = Instant::now() + START_PATIENCE;
        while let Err(error) = add(&rig) {
            ensure!(Instant::now() < deadline, "{error:#}");
            std::thread::sleep(Duration::from_millis(200));
        }
        rig.attach("1h")?;
        Ok(rig)
    }

    /// `forebay VERB… DIR ARGUMENTS…`
    fn command(&self, verb: &[&str], arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.forebay);
        command.args(verb).arg(&self.directory).args(arguments).stdin(Stdio::null());
        command
    }

    fn ask(&self, verb: &[&str], arguments: &[&str]) -> Result<Value> {
        let output = self.command(verb, arguments).arg("--json").output().context("run forebay")?;
        if !output.status.success() {
            bail!("forebay {}: {}", verb.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        serde_json::from_slice(&output.stdout).with_context(|| format!("parse what {} says", verb.join(" ")))
    }

    pub(super) fn mount(&self) -> &Path {
        self.node.mount()
    }

    pub(super) fn set_blob_size(&self, mib: u64) -> Result<()> {
        run(&mut self.command(&["store", "update"], &["cold", "--blob-size", &format!("{mib}MiB")]))
    }

    /// Attaches the filesystem, or changes its cue.
    pub(super) fn attach(&self, cue: &str) -> Result<()> {
        let cue = ["main", "cold", "--retention", RETENTION, "--tiering-cue", cue];
        run(&mut self.command(&["fs", "attach"], &cue))
    }

    pub(super) fn limit(&self, seconds: u64) -> Result<Limit> {
        let speed = self.ask(&["store", "bench"], &["cold", "--seconds", &seconds.to_string()])?;
        let number = |name: &str| speed[name].as_f64().with_context(|| format!("{name} of the store"));
        Ok(Limit {
            put_mb_s: number("put_bytes_per_s")? / 1e6,
            get_mb_s: number("get_bytes_per_s")? / 1e6,
            round_trip_ms: number("round_trip_us")? / 1e3,
        })
    }

    /// The answer of `tier status`, without a process for each query, which would disturb the measurement.
    fn tiers(&self) -> Result<Value> {
        let mut stream =
            UnixStream::connect(self.directory.join("run/admin.sock")).context("ask the node")?;
        stream.set_read_timeout(Some(START_PATIENCE))?;
        stream.write_all(b"GET /v1/tiers HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("an answer has a head")?;
        ensure!(head.starts_with("HTTP/1.1 200 "), "the node does not tell how it tiers: {answer}");
        serde_json::from_str(body).context("parse how it tiers")
    }

    /// The numbers with these names in the status of tiering.
    pub(super) fn status<const N: usize>(&self, names: [&str; N]) -> Result<[u64; N]> {
        let status = self.tiers()?;
        let mut numbers = [0; N];
        for (number, name) in numbers.iter_mut().zip(names) {
            *number = status[0][name].as_u64().with_context(|| format!("{name} in the status of tiering"))?;
        }
        Ok(numbers)
    }

    pub(super) fn wait_until(&self, what: &str, reached: impl Fn(&Self) -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !reached(self)? {
            ensure!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Uploads everything, and waits until at most `left_bytes` are left.
    pub(super) fn upload_all(&self, left_bytes: u64) -> Result<()> {
        self.attach("10s")?;
        self.wait_until("uploads", |rig| Ok(rig.status(["queued_bytes"])?[0] <= left_bytes))?;
        self.attach("1h")
    }

    /// `tier fetch` or `tier release` of files and directories.
    pub(super) fn tier(&self, verb: &str, paths: &[PathBuf]) -> Result<()> {
        run(Command::new(&self.forebay).args(["tier", verb]).args(paths))
    }

    /// The time of the slowest of the last reads of content from the store since the start of the node.
    pub(super) fn slowest_answer(&self) -> Result<Duration> {
        let operations = self.ask(&["tier", "ops"], &[])?;
        let operations = operations.as_array().context("operations of the store")?;
        let took = operations.iter().flat_map(|store| store["ops"].as_array().into_iter().flatten());
        let took = took.filter(|one| one["verb"] == "GET").filter_map(|one| one["took_ms"].as_u64()).max();
        Ok(Duration::from_millis(took.context("the store was asked for nothing")?))
    }

    pub(super) fn ticks(&self) -> Result<Ticks> {
        let store = Pid::from_raw(i32::try_from(self.store.0.id())?).context("a child has a process id")?;
        Ok(Ticks { node: process_ticks(self.node.pid()?)?, store: process_ticks(store)? })
    }

    /// Drops the caches of the node.
    pub(super) fn restart(&self) -> Result<()> {
        self.node.stop()?;
        self.node.start()
    }

    /// Drops the caches of the kernel, which the store uses too, and of the node by a restart.
    pub(super) fn make_cold(&self) -> Result<()> {
        self.restart()?;
        rustix::fs::sync();
        std::fs::write("/proc/sys/vm/drop_caches", "3").context("drop caches; this needs root")
    }
}
