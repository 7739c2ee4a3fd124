//! The file by which commands find a running node; drawn in `docs/formats/node.md`.

use std::path::PathBuf;

use base::ClusterId;
use serde::{Deserialize, Serialize};

/// `node.json`: how to reach a running node. Removed when it stops.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NodeFile {
    /// Its process.
    pub(crate) pid: u32,
    /// Where its first filesystem is mounted.
    pub(crate) mount: Option<PathBuf>,
    /// Where it listens.
    pub(crate) addresses: Addresses,
    /// Where it serves S3: a URL. TLS is spoken on the same port.
    #[serde(default)]
    pub(crate) s3: Option<String>,
    /// Its first filesystem.
    pub(crate) filesystem: String,
    /// The cluster's identity.
    pub(crate) cluster: ClusterId,
    /// Version of the program.
    pub(crate) version: String,
}

/// Where a node listens.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Addresses {
    /// The management socket.
    pub(crate) admin: PathBuf,
}
