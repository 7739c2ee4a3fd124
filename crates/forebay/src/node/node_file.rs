//! `node.json`, by which commands find a running node; drawn in `docs/formats/node.md`.

use std::path::PathBuf;

use base::ClusterId;
use serde::{Deserialize, Serialize};

/// How to reach a running node. The file is removed when the node stops.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NodeFile {
    /// Process id.
    pub(crate) pid: u32,
    /// Mount point of its first filesystem.
    pub(crate) mount: Option<PathBuf>,
    /// Addresses that the node listens on.
    pub(crate) addresses: Addresses,
    /// URL of the S3 endpoint. The same port speaks TLS too.
    #[serde(default)]
    pub(crate) s3: Option<String>,
    /// Its first filesystem.
    pub(crate) filesystem: String,
    /// The cluster's identity.
    pub(crate) cluster: ClusterId,
    /// Version of the program.
    pub(crate) version: String,
}

/// Addresses that a node listens on.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Addresses {
    /// The management socket.
    pub(crate) admin: PathBuf,
}
