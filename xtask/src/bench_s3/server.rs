//! The measured servers, each in its own directory.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Pid;

use crate::node::{Drives, Node, NodeOptions};
use crate::s3::{Keys, Target};

/// How long a server may take to answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// Access key and secret of MinIO.
pub(crate) const NAME: &str = "forebay-bench";

/// A running server.
pub(super) struct Server {
    pub(super) target: Arc<Target>,
    pub(super) pid: Pid,
    _process: Process,
}

/// The process that ends with the server.
enum Process {
    Node { _node: Node },
    Child(Child),
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Self::Child(child) = self {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Whether MinIO says that it is ready: it listens before it can serve.
fn is_ready(address: SocketAddr) -> bool {
    let ask = || {
        let mut stream = TcpStream::connect(address)?;
        stream.write_all(
            b"GET /minio/health/cluster HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok::<_, std::io::Error>(answer)
    };
    ask().is_ok_and(|answer| answer.split(' ').nth(1) == Some("200"))
}

/// Memory of the node, the same for every load.
const MEMORY_MIB: u64 = 512;

impl Server {
    /// A node with one drive file, so that it writes as many bytes as a plain file.
    pub(super) fn forebay(binary: &Path, directory: &Path) -> Result<Self> {
        let options = NodeOptions {
            binary: binary.to_path_buf(),
            profile: "1+0".to_owned(),
            drives: Drives::Files { count: 1, size: "16G".to_owned() },
            memory_mib: Some(MEMORY_MIB),
            mount_options: String::new(),
        };
        let node = Node::create(&options, directory, &directory.join("mnt"))?;
        let (target, pid) = (Target::of_node(directory)?, node.pid()?);
        Ok(Self { target, pid, _process: Process::Node { _node: node } })
    }

    /// MinIO with its defaults on one directory.
    pub(super) fn minio(binary: &str, directory: &Path) -> Result<Self> {
        let (child, address) = start_minio(binary, directory, None)?;
        let pid = Pid::from_raw(i32::try_from(child.id())?).context("a child has a process id")?;
        let process = Process::Child(child);
        let deadline = Instant::now() + PATIENCE;
        while !is_ready(address) {
            ensure!(Instant::now() < deadline, "MinIO is not ready");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(Self { target: Target::new(address, Keys::new(NAME, NAME)), pid, _process: process })
    }
}

/// Starts MinIO in its own directory, over TLS if there is a directory with a certificate. Does not wait for it.
pub(crate) fn start_minio(
    binary: &str,
    directory: &Path,
    certificates: Option<&Path>,
) -> Result<(Child, SocketAddr)> {
    std::fs::create_dir_all(directory)?;
    let free = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?.local_addr()?;
    let log = std::fs::File::create(directory.join("log"))?;
    let mut command = Command::new(binary);
    command.args(["server", "--quiet", "--address", &free.to_string()]).arg(directory.join("data"));
    if let Some(certificates) = certificates {
        command.arg("--certs-dir").arg(certificates);
    }
    let child = command
        .env("MINIO_ROOT_USER", NAME)
        .env("MINIO_ROOT_PASSWORD", NAME)
        .env("MINIO_BROWSER", "off")
        .env("HOME", directory)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("run {binary}; tests/deps.sh bench installs it"))?;
    Ok((child, free))
}
