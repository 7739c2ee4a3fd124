//! Paths of a node's files below its directory.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use base::LedgerId;
use rustix::fs::{Mode, OFlags};

/// Longest path in the address of a Unix socket, with some to spare.
const SOCKET_PATH_MAX: usize = 100;

/// A node's directory.
#[derive(Debug, Clone)]
pub(crate) struct NodeDir {
    root: PathBuf,
}

/// A path to a socket. Valid until it is dropped.
pub(crate) struct SocketPath {
    path: PathBuf,
    _dir: Option<OwnedFd>,
}

impl SocketPath {
    pub(crate) fn as_path(&self) -> &Path {
        &self.path
    }
}

impl NodeDir {
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: std::path::absolute(root).unwrap_or_else(|_| root.to_owned()) }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    pub(crate) fn node_json(&self) -> PathBuf {
        self.root.join("node.json")
    }

    pub(crate) fn log_file(&self) -> PathBuf {
        self.root.join("log").join("forebay.log")
    }

    /// The key that seals the secrets of access keys.
    pub(crate) fn node_key(&self) -> PathBuf {
        self.root.join("node.key")
    }

    /// The first administrator's access key.
    pub(crate) fn admin_credentials(&self) -> PathBuf {
        self.root.join("admin-credentials")
    }

    pub(crate) fn audit(&self) -> PathBuf {
        self.root.join("audit")
    }

    pub(crate) fn drives(&self) -> PathBuf {
        self.root.join("drives")
    }

    /// Where the drives of this machine are.
    pub(crate) fn drives_json(&self) -> PathBuf {
        self.root.join("drives.json")
    }

    /// Where this machine mounts filesystems.
    pub(crate) fn mounts_json(&self) -> PathBuf {
        self.root.join("mounts.json")
    }

    pub(crate) fn meta(&self) -> PathBuf {
        self.root.join("meta")
    }

    /// List of the directories with metadata.
    pub(crate) fn meta_dirs(&self) -> PathBuf {
        self.root.join("meta-dirs.json")
    }

    /// There while an import of metadata is under way, or has not ended.
    pub(crate) fn meta_import(&self) -> PathBuf {
        self.root.join("meta-import")
    }

    /// A ledger's copy in a directory with metadata.
    pub(crate) fn ledger_in(dir: &Path, ledger: LedgerId) -> PathBuf {
        dir.join(format!("ledger-{ledger}"))
    }

    /// Settings of `start` that the next start keeps.
    pub(crate) fn settings(&self) -> PathBuf {
        self.root.join("settings.json")
    }

    /// Key and certificate of the node, and its place in the cluster.
    pub(crate) fn identity(&self) -> PathBuf {
        self.root.join("identity")
    }

    /// The member of etcd that runs on this node, if any.
    pub(crate) fn engine(&self) -> PathBuf {
        self.root.join("engine")
    }

    /// Directory of the S3 endpoint: settings, certificate and key.
    pub(crate) fn s3(&self) -> PathBuf {
        self.root.join("s3")
    }

    pub(crate) fn run(&self) -> PathBuf {
        self.root.join("run")
    }

    /// Why the last stop was not clean; removed by the next start.
    pub(crate) fn stop_error(&self) -> PathBuf {
        self.run().join("stop-error")
    }

    /// The place of a client, which is no node, in its cluster.
    pub(crate) fn client_json(&self) -> PathBuf {
        self.root.join("client.json")
    }

    pub(crate) fn default_mount(&self) -> PathBuf {
        self.root.join("mnt")
    }

    /// The management socket.
    pub(crate) fn socket(&self) -> SocketPath {
        self.socket_named("admin.sock")
    }

    /// A socket of the node. In a deep directory it is reached through a descriptor, because the address of a socket holds only
    /// 107 bytes.
    pub(crate) fn socket_named(&self, name: &str) -> SocketPath {
        let path = self.run().join(name);
        if path.as_os_str().len() <= SOCKET_PATH_MAX {
            return SocketPath { path, _dir: None };
        }
        match rustix::fs::open(self.run(), OFlags::PATH | OFlags::DIRECTORY, Mode::empty()) {
            Ok(dir) => {
                use std::os::fd::AsRawFd;
                let path = PathBuf::from(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()));
                SocketPath { path, _dir: Some(dir) }
            }
            Err(_) => SocketPath { path, _dir: None },
        }
    }
}
