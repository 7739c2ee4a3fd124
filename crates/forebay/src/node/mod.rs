//! A node: drives, ledgers, filesystems and the management socket, put together and taken apart in order.

mod control;
mod drives;
mod filesystems;
mod ledgers;
mod node_file;
mod paths;
mod start;
mod why;

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result};
use base::env::{Env, File};
use base::{ClusterId, DriveId};
use meta::control::Control;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, watch};

use drives::DriveEntry;
use filesystems::FilesystemEntry;
use ledgers::{LedgerFiles, MetaDirs};

pub(crate) use control::read_node_file;
pub(crate) use node_file::{Addresses, NodeFile};
pub(crate) use paths::NodeDir;
pub(crate) use start::{IoChoice, StartOptions};

/// A running node.
pub(crate) struct Node {
    env: Env,
    dir: NodeDir,
    cluster: ClusterId,
    control: Control,
    control_files: LedgerFiles,
    runtime: Handle,
    io: IoChoice,
    started_ns: u64,
    state: Mutex<State>,
    stop_serving: watch::Sender<bool>,
    /// Held for as long as the node runs.
    _lock: Arc<dyn File>,
}

struct State {
    drives: BTreeMap<DriveId, DriveEntry>,
    filesystems: BTreeMap<String, FilesystemEntry>,
    meta_dirs: MetaDirs,
}

impl Node {
    /// Writes everything out and stops in the order of dependence. Returns the first error.
    pub(crate) async fn stop(&self) -> Result<()> {
        // Nobody may be listening any more.
        let _ = self.stop_serving.send(true);
        let mut result = Ok(());
        let mut state = self.state.lock().await;
        for (name, entry) in std::mem::take(&mut state.filesystems) {
            let stopped = entry.stop().await.with_context(|| format!("stopping filesystem {name}"));
            result = result.and(stopped);
        }
        for (id, entry) in std::mem::take(&mut state.drives) {
            let closed = entry.close().await.with_context(|| format!("closing drive {id}"));
            result = result.and(closed);
        }
        for path in [self.dir.node_json(), self.dir.run().join("admin.sock")] {
            if self.env.files.exists(&path) {
                result = result.and(self.env.files.remove_file(&path).context("removing the runtime files"));
            }
        }
        result
    }

    async fn write_node_file(&self) -> Result<()> {
        let state = self.state.lock().await;
        let first = state.filesystems.values().min_by_key(|entry| entry.record.id);
        let file = NodeFile {
            pid: std::process::id(),
            mount: first.and_then(|entry| entry.mount_path()),
            addresses: Addresses { admin: self.dir.run().join("admin.sock") },
            filesystem: first.map(|entry| entry.record.name.clone()).unwrap_or_default(),
            cluster: self.cluster,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        let bytes = serde_json::to_vec_pretty(&file).context("encoding node.json")?;
        self.env.files.write_atomic(&self.dir.node_json(), &bytes).context("writing node.json")
    }
}
