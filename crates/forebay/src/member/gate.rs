//! S3 at a node without metadata: users and policies follow the control ledger, and the filesystem is reached over the network.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use base::NodeId;
use base::env::Env;
use control::ControlView;
use s3::{Accounts, AuditLog};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::lock;
use crate::node::{
    Endpoint, EndpointParts, FIRST_FILESYSTEM, MemoryPlan, NodeDir, S3Options, account_set, load_node_key,
};
use crate::remote::{Memory, RemoteFilesystem, Routes, Wanted};

/// How long requests are answered after the last word of the control ledger: a key may have been withdrawn since.
const TRUSTED_NS: u64 = 60_000_000_000;
/// How long a request waits for drives and owners that are not reached.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the end of the session may take.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

/// The S3 endpoint of this node.
pub(super) struct MemberGate {
    parts: EndpointParts,
    options: S3Options,
    running: Mutex<Option<(Endpoint, RemoteFilesystem)>>,
}

impl MemberGate {
    pub(super) fn new(
        env: &Env,
        dir: &NodeDir,
        runtime: &Handle,
        memory: MemoryPlan,
        options: S3Options,
    ) -> Result<Self> {
        let accounts = Accounts::new(env.clone(), load_node_key(env, dir)?);
        accounts.set_valid_until(0);
        let parts = EndpointParts {
            env: env.clone(),
            dir: dir.clone(),
            runtime: runtime.clone(),
            memory,
            accounts: Arc::new(accounts),
            audit: Arc::new(AuditLog::start(env, &dir.audit())),
        };
        Ok(Self { parts, options, running: Mutex::default() })
    }

    /// Takes users, keys and policies over.
    pub(super) fn take_over(&self, view: &ControlView) -> Result<()> {
        self.parts.accounts.replace(account_set(view, &self.parts.accounts)?);
        Ok(())
    }

    /// The owner of the control ledger has just answered, and all that it said was taken over.
    pub(super) fn note_contact(&self) {
        self.parts.accounts.set_valid_until(self.parts.env.clock.boot_ns() + TRUSTED_NS);
    }

    /// Serves the filesystem, unless that is switched off.
    pub(super) async fn start(
        &self,
        routes: &Arc<Routes>,
        owner: watch::Receiver<Option<NodeId>>,
    ) -> Result<()> {
        let env = &self.parts.env;
        let memory = MemoryPlan { dirty_bytes: self.parts.memory.s3_dirty_bytes, ..self.parts.memory };
        let mut opened = None;
        let open = async {
            let wanted = Wanted {
                owner,
                name: FIRST_FILESYSTEM.to_owned(),
                memory: Memory::from(&memory),
                patience: Some(PATIENCE),
            };
            let filesystem = RemoteFilesystem::open(env, routes, wanted).await?;
            let client = filesystem.client.clone();
            opened = Some(filesystem);
            Ok(Some(client))
        };
        let endpoint = self.parts.start(&self.options, open).await?;
        if let Some(endpoint) = endpoint
            && let Some(filesystem) = opened
        {
            tracing::info!(url = endpoint.url(), "S3 is served");
            *lock(&self.running) = Some((endpoint, filesystem));
        }
        Ok(())
    }

    /// Users, keys, and the key of the cluster.
    pub(super) fn accounts(&self) -> Arc<Accounts> {
        self.parts.accounts.clone()
    }

    /// The audit log of the node.
    pub(super) fn audit(&self) -> Arc<AuditLog> {
        self.parts.audit.clone()
    }

    /// URL of the endpoint.
    pub(super) fn url(&self) -> Option<String> {
        lock(&self.running).as_ref().map(|(endpoint, _)| endpoint.url())
    }

    /// Ends all requests and makes their writes durable.
    pub(super) async fn stop(&self) -> Result<()> {
        let running = lock(&self.running).take();
        let Some((endpoint, filesystem)) = running else { return Ok(()) };
        let client = endpoint.stop().await;
        let written = tokio::time::timeout(CLOSE_PATIENCE * 2, client.sync()).await;
        let written = written.context("what came through S3 is not written out: the cluster does not answer");
        filesystem.close(CLOSE_PATIENCE).await;
        let audit = self.parts.audit.clone();
        let audited = tokio::task::spawn_blocking(move || audit.stop()).await;
        written.and_then(|written| Ok(written?)).and(audited.map_err(Into::into).map(drop))
    }
}
