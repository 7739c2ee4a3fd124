//! Drives at other nodes: taken into use when they answer, and looked at again when they were opened anew.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::{DriveId, NodeId};
use control::DriveRecord;
use futures_util::future::join_all;
use layout::DriveState;
use wire::cluster::{HostReply, HostRequest, HostService, HostedDrive};
use wire::drive::{DriveHealth, DriveService};
use wire::link::{Peer, RemoteDrive, RemoteHost};

use super::Node;
use super::drives::{DriveEntry, OpenDrive};

/// How long a start waits for nodes that do not answer.
const FIRST_CONTACT: Duration = Duration::from_secs(5);
/// How long a new drive may take until its node tells its state.
const FIRST_FACT: Duration = Duration::from_secs(10);
const FACT_POLL: Duration = Duration::from_millis(100);
/// Pause after a drive was not taken into use.
const REFUSED_PAUSE_NS: u64 = 10_000_000_000;

impl Node {
    fn peer(&self, node: NodeId) -> Result<Arc<Peer>> {
        self.others
            .network
            .fabric
            .peer(node)
            .with_context(|| format!("there is no node {node} (see `forebay node list`)"))
    }

    /// Waits until all other nodes with drives answer, for a while.
    pub(super) async fn wait_for_nodes(&self) {
        let nodes: Vec<NodeId> = {
            let state = self.state.lock().await;
            let here = self.others.network.here();
            let drives = state.cluster.drives.values().filter(|drive| drive.state != DriveState::Out);
            drives.map(|drive| drive.node).filter(|node| *node != here).collect()
        };
        let contacts =
            nodes.into_iter().filter_map(|node| Some(self.others.network.fabric.peer(node)?.contact()));
        let waits = contacts.map(|mut contact| async move {
            // If the node is gone, nobody waits for it.
            let _ = contact.wait_for(|contact| contact.is_there).await;
        });
        if tokio::time::timeout(FIRST_CONTACT, join_all(waits)).await.is_err() {
            tracing::warn!("not all nodes with drives answer");
        }
    }

    /// Takes drives at other nodes into use that answer. Those that were opened anew since are admitted again.
    pub(super) async fn follow_drives_elsewhere(&self) -> Result<()> {
        // An order about drives may be making one.
        let Ok(_alone) = self.drives_lock.try_lock() else { return Ok(()) };
        for (record, drive) in self.answering_elsewhere().await {
            let id = record.id;
            if let Err(error) = self.admit_from_elsewhere(record, drive).await {
                self.note_problem(id, &format!("{error:#}")).await;
            }
            let mut state = self.state.lock().await;
            if let Some(entry) = state.drives.get_mut(&id).filter(|entry| entry.service.is_none()) {
                entry.retry_ns = self.env.clock.boot_ns() + REFUSED_PAUSE_NS;
            }
        }
        Ok(())
    }

    /// Drives that answer and are not in use.
    async fn answering_elsewhere(&self) -> Vec<(DriveRecord, Arc<RemoteDrive>)> {
        let here = self.others.network.here();
        let mut found = Vec::new();
        let mut state = self.state.lock().await;
        let mut is_another = false;
        for (id, entry) in &mut state.drives {
            let is_wanted = matches!(entry.record.state, DriveState::Up | DriveState::Leaving);
            if entry.record.node == here || !is_wanted {
                continue;
            }
            if entry.service.as_ref().is_some_and(|drive| !drive.is_another()) {
                continue;
            }
            is_another |= entry.service.take().is_some();
            let peer = self.others.network.fabric.peer(entry.record.node);
            let drive = peer.and_then(|peer| RemoteDrive::if_told(&peer, *id));
            let drive = drive.filter(|drive| drive.stat().health == DriveHealth::Up);
            match drive {
                Some(_) if self.env.clock.boot_ns() < entry.retry_ns => {}
                Some(drive) => found.push((entry.record.clone(), drive)),
                None => entry.problem = Some(format!("node {} does not serve it", entry.record.node)),
            }
        }
        if is_another {
            self.publish(&mut state);
        }
        found
    }

    async fn admit_from_elsewhere(&self, record: DriveRecord, drive: Arc<RemoteDrive>) -> Result<()> {
        let (id, uuid) = (record.id, drive.stat().uuid);
        if uuid != record.uuid {
            bail!("node {} has another drive of this number: uuid={uuid}", record.node);
        }
        let hosted = self.hosted(record.node, id).await?.context("its node does not know it any more")?;
        let entry = DriveEntry {
            record,
            path: Some(PathBuf::from(hosted.path)),
            service: Some(OpenDrive::there(drive, hosted.older)),
            problem: None,
            retry_ns: 0,
        };
        if self.accepts_older
            && let Some(drive) = &entry.service
        {
            // As for the drives of this machine, at the start.
            let positions = self.positions(&*self.state.lock().await);
            drive.keep_positions(positions, true).await?;
        }
        let path = entry.path.clone();
        if self.admit(entry).await?.is_none() {
            let mut state = self.state.lock().await;
            if let Some(entry) = state.drives.get_mut(&id) {
                entry.path = path;
            }
            self.publish(&mut state);
        }
        Ok(())
    }

    /// A drive, as its node sees it.
    async fn hosted(&self, node: NodeId, drive: DriveId) -> Result<Option<HostedDrive>> {
        match RemoteHost::new(&self.peer(node)?).ask(HostRequest::Drives).await? {
            HostReply::Drives(drives) => Ok(drives.into_iter().find(|hosted| hosted.drive == drive)),
            HostReply::Done | HostReply::Formatted { .. } => bail!("node {node} gave another answer"),
        }
    }

    /// Lets another node format a drive and open it.
    pub(super) async fn format_elsewhere(
        &self,
        node: NodeId,
        drive: DriveId,
        path: Option<String>,
        size_bytes: Option<u64>,
    ) -> Result<DriveEntry> {
        let peer = self.peer(node)?;
        let mut contact = peer.contact();
        let reached = async { contact.wait_for(|contact| contact.is_there).await.is_ok() };
        if !tokio::time::timeout(FIRST_CONTACT, reached).await.unwrap_or(false) {
            bail!("node {node} does not answer this one: look at `forebay node list` and its address");
        }
        let request = HostRequest::Format { drive, path, size_bytes };
        let reply = RemoteHost::new(&peer).ask(request).await.with_context(|| format!("node {node}"))?;
        let HostReply::Formatted { uuid, capacity_bytes } = reply else {
            bail!("node {node} gave another answer")
        };
        let told = tokio::time::timeout(FIRST_FACT, RemoteDrive::new(&peer, drive)).await;
        if told.is_err() {
            self.close_elsewhere(node, drive).await;
        }
        let service =
            told.with_context(|| format!("node {node} does not tell the state of the new drive"))?;
        let path = self.hosted(node, drive).await?.map(|hosted| PathBuf::from(hosted.path));
        let record = DriveRecord::new(drive, uuid, node, capacity_bytes);
        let service = Some(OpenDrive::there(service, None));
        Ok(DriveEntry { record, path, service, problem: None, retry_ns: 0 })
    }

    /// Lets another node close a drive that was made and is not used after all.
    pub(super) async fn close_elsewhere(&self, node: NodeId, drive: DriveId) {
        let Ok(peer) = self.peer(node) else { return };
        if let Err(error) = RemoteHost::new(&peer).ask(HostRequest::Close { drive }).await {
            tracing::warn!(%node, %drive, %error, "a drive that is not used stays open");
        }
    }

    /// Lets the node of a drive open it again.
    pub(super) async fn reopen_elsewhere(&self, record: DriveRecord) -> Result<DriveEntry> {
        let peer = self.peer(record.node)?;
        RemoteHost::new(&peer).ask(HostRequest::Reopen { drive: record.id }).await?;
        let hosted =
            self.hosted(record.node, record.id).await?.context("its node does not know it any more")?;
        let drive = RemoteDrive::if_told(&peer, record.id).context("its node has not told its state")?;
        let begun = tokio::time::Instant::now();
        while hosted.problem.is_none() && drive.health() != DriveHealth::Up && begun.elapsed() < FIRST_FACT {
            tokio::time::sleep(FACT_POLL).await;
        }
        let service = hosted.problem.is_none().then(|| OpenDrive::there(drive, hosted.older));
        let path = Some(PathBuf::from(hosted.path));
        Ok(DriveEntry { record, path, service, problem: hosted.problem, retry_ns: 0 })
    }
}
