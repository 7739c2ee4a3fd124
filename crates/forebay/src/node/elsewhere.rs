//! Drives of other hosts, which are other nodes, or this machine if it opens its drives by itself: taken into use when they answer,
//! and looked at again when they were opened anew.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use admin::{AdminError, NodeCheck};
use anyhow::{Context, Result, bail};
use base::program::{FORMAT_LEVEL, VERSION};
use base::{DriveId, DriveUuid, NodeId};
use control::DriveRecord;
use futures_util::future::join_all;
use layout::DriveState;
use wire::cluster::{
    CheckParts, EngineCondition, EngineSeat, Finding, HostReply, HostRequest, HostService, HostedDrive,
    NodeCondition, StoredLedger,
};
use wire::drive::{DriveHealth, DriveService};
use wire::link::{Peer, RemoteDrive, RemoteHost};

use super::Node;
use super::drives::{DriveEntry, OpenDrive};
use super::management::failed;
use super::network::addresses_of;
use crate::checks::{self, Ways};
use crate::engine::Supervised;

/// How long a start waits for nodes that do not answer.
const FIRST_CONTACT: Duration = Duration::from_secs(5);
/// How long a new drive may take until its node tells its state.
const FIRST_FACT: Duration = Duration::from_secs(10);
const FACT_POLL: Duration = Duration::from_millis(100);
/// How long it may take to take a drive into use.
const ADMISSION: Duration = Duration::from_secs(12);
/// How long a node may take to say how it is.
const CONDITION: Duration = Duration::from_secs(2);
/// Pause after a drive was not taken into use.
const REFUSED_PAUSE_NS: u64 = 5_000_000_000;

/// How a node is, and how it is reached.
pub(super) struct Told {
    pub(super) condition: NodeCondition,
    /// How long its answer took.
    pub(super) latency: Duration,
    /// How far its clock is ahead of the one here, to within half of the latency.
    pub(super) ahead_ns: i64,
}

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
            let drives = state.cluster.drives.values().filter(|drive| drive.state != DriveState::Out);
            drives.map(|drive| drive.node).filter(|node| *node != self.here()).collect()
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
        let found = self.answering_elsewhere().await;
        // A node that does not answer must not hold up the drives of others.
        join_all(found.into_iter().map(|(record, drive)| self.try_to_admit(record, drive))).await;
        Ok(())
    }

    /// Waits for a while until all drives are in use whose nodes answer.
    pub(super) async fn wait_for_drives(&self) -> Result<()> {
        let begun = tokio::time::Instant::now();
        while begun.elapsed() < FIRST_CONTACT && self.lacks_drives().await {
            self.follow_drives_elsewhere().await?;
            tokio::time::sleep(FACT_POLL).await;
        }
        Ok(())
    }

    async fn lacks_drives(&self) -> bool {
        let state = self.state.lock().await;
        let missing = state.drives.values().filter(|entry| entry.service.is_none());
        let mut wanted =
            missing.filter(|entry| matches!(entry.record.state, DriveState::Up | DriveState::Leaving));
        wanted.any(|entry| !self.opens(entry.record.node) && self.is_reached(entry.record.node))
    }

    async fn try_to_admit(&self, record: DriveRecord, drive: Arc<dyn DriveService>) {
        let id = record.id;
        let admitted = tokio::time::timeout(ADMISSION, self.admit_from_elsewhere(record, drive)).await;
        let why = match admitted {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(format!("{error:#}")),
            Err(_) => Some("its node answers too slowly".to_owned()),
        };
        if let Some(why) = why {
            self.note_problem(id, &why).await;
        }
        let mut state = self.state.lock().await;
        if let Some(entry) = state.drives.get_mut(&id).filter(|entry| entry.service.is_none()) {
            entry.retry_ns = self.env.clock.boot_ns() + REFUSED_PAUSE_NS;
        }
    }

    /// Drives that answer and are not in use.
    async fn answering_elsewhere(&self) -> Vec<(DriveRecord, Arc<dyn DriveService>)> {
        let of_machine = match &self.seat {
            Some(seat) => seat.drives.open().await,
            None => BTreeMap::new(),
        };
        let is_reached = |node| self.is_reached(node);
        let mut found = Vec::new();
        let mut state = self.state.lock().await;
        let mut is_another = false;
        for (id, entry) in &mut state.drives {
            let is_wanted = matches!(entry.record.state, DriveState::Up | DriveState::Leaving);
            if self.opens(entry.record.node) || !is_wanted {
                continue;
            }
            let is_here = entry.record.node == self.here();
            let is_same = |drive: &OpenDrive| match is_here {
                true => of_machine.get(id).is_some_and(|now| drive.is_the(now)),
                false => !drive.is_another(),
            };
            if entry.service.as_ref().is_some_and(is_same) {
                continue;
            }
            is_another |= entry.service.take().is_some();
            let drive = match is_here {
                true => of_machine.get(id).cloned(),
                false => self.told_drive(entry.record.node, *id),
            };
            let drive = drive.filter(|drive| drive.stat().health == DriveHealth::Up);
            match drive {
                Some(_) if self.env.clock.boot_ns() < entry.retry_ns => {}
                Some(drive) => found.push((entry.record.clone(), drive)),
                None if is_reached(entry.record.node) => {
                    entry.problem = Some(format!("node {} does not serve it", entry.record.node));
                }
                None => entry.problem = Some(format!("node {} is not reached", entry.record.node)),
            }
        }
        if is_another {
            self.publish(&mut state);
        }
        found
    }

    /// A drive at another node, if that has told its state.
    fn told_drive(&self, node: NodeId, id: DriveId) -> Option<Arc<dyn DriveService>> {
        let peer = self.others.network.fabric.peer(node).filter(|_| self.is_reached(node))?;
        RemoteDrive::if_told(&peer, id).map(|drive| drive as Arc<dyn DriveService>)
    }

    /// Whether a node answers now.
    pub(super) fn is_reached(&self, node: NodeId) -> bool {
        let is_there =
            || self.others.network.fabric.peer(node).is_some_and(|peer| peer.contact().borrow().is_there);
        node == self.here() || is_there()
    }

    /// What opens the drives of a node.
    fn host(&self, node: NodeId) -> Result<Arc<dyn HostService>> {
        match &self.seat {
            Some(seat) if node == self.here() => Ok(seat.host.clone()),
            _ => Ok(Arc::new(RemoteHost::new(&self.peer(node)?))),
        }
    }

    /// Lets a node run a member of an engine.
    pub(super) async fn start_engine_at(&self, node: NodeId, seat: EngineSeat) -> Result<()> {
        if self.opens(node) {
            let (own, listen) = (Supervised::new(&self.env, &self.dir), self.others.settings.listen);
            let listen = listen.context("this node has no address")?.ip();
            return tokio::task::spawn_blocking(move || own.begin(listen, &seat)).await?;
        }
        self.host(node)?.ask(HostRequest::StartEngine(seat)).await?;
        Ok(())
    }

    /// Lets a node end the member of an attempt that has failed.
    pub(super) async fn end_engine_at(&self, node: NodeId, number: u64) -> Result<()> {
        if self.opens(node) {
            let own = Supervised::new(&self.env, &self.dir);
            return tokio::task::spawn_blocking(move || own.undo(number)).await?;
        }
        self.host(node)?.ask(HostRequest::EndEngine { number }).await?;
        Ok(())
    }

    /// Fails if another node could not use the logs at that place. Returns which servers it finds there.
    pub(super) async fn try_log_at(&self, node: NodeId, log: String, number: u64) -> Result<String> {
        match self.host(node)?.ask(HostRequest::TryLog { log, number }).await? {
            HostReply::TriedLog { system } => Ok(system),
            _ => bail!("node {node} gave another answer"),
        }
    }

    /// How far the local stores of another node have come.
    pub(super) async fn stored_at(&self, node: NodeId) -> Result<Vec<StoredLedger>> {
        match self.host(node)?.ask(HostRequest::Stored).await? {
            HostReply::Stored(stored) => Ok(stored),
            _ => bail!("node {node} gave another answer"),
        }
    }

    /// How the nodes are that answer soon.
    pub(super) async fn conditions(&self) -> BTreeMap<NodeId, Told> {
        let nodes: Vec<NodeId> = self.state.lock().await.cluster.nodes.keys().copied().collect();
        let asks = nodes.into_iter().map(|node| async move {
            match tokio::time::timeout(CONDITION, self.condition_of(node)).await {
                Ok(Ok(told)) => Some((node, told)),
                _ => None,
            }
        });
        join_all(asks).await.into_iter().flatten().collect()
    }

    /// Seconds since the process of a node began.
    pub(super) async fn uptime_of(&self, node: NodeId) -> Result<u64> {
        Ok(self.condition_of(node).await?.condition.uptime_s)
    }

    async fn condition_of(&self, node: NodeId) -> Result<Told> {
        let (begun_ns, wall_ns) = (self.env.clock.boot_ns(), self.env.clock.wall_ns());
        let condition = match self.ask_condition(node).await? {
            HostReply::Condition(condition) => condition,
            _ => bail!("node {node} gave another answer"),
        };
        let latency_ns = self.env.clock.boot_ns() - begun_ns;
        let ahead_ns = condition.wall_ns - (wall_ns + latency_ns as i64 / 2);
        Ok(Told { condition, latency: Duration::from_nanos(latency_ns), ahead_ns })
    }

    async fn ask_condition(&self, node: NodeId) -> Result<HostReply> {
        if node == self.here() && self.seat.is_none() {
            return Ok(HostReply::Condition(NodeCondition {
                version: VERSION.to_owned(),
                format_level: FORMAT_LEVEL,
                uptime_s: (self.env.clock.boot_ns() - self.started_ns) / 1_000_000_000,
                wall_ns: self.env.clock.wall_ns(),
                s3: self.s3_url(),
                stores: Vec::new(),
            }));
        }
        if !self.is_reached(node) {
            bail!("node {node} is not reached");
        }
        Ok(self.host(node)?.ask(HostRequest::Condition).await?)
    }

    /// What a node finds when it looks at its machine.
    pub(super) async fn check_now(&self, id: u32, what: CheckParts) -> Result<NodeCheck, AdminError> {
        let node = NodeId(id);
        let (name, nodes) = {
            let state = self.state.lock().await;
            let record = state.cluster.nodes.get(&node).ok_or_else(|| {
                AdminError::not_found(format!("no such node: id={id} (see `forebay node list`)"))
            })?;
            (record.name.clone(), addresses_of(&state.cluster))
        };
        let findings = if node == self.here() && self.seat.is_none() {
            let ways = Ways { fabric: &self.others.network.fabric, here: node, nodes: &nodes };
            checks::look(&self.env, &self.dir, what, Some(ways)).await
        } else {
            self.ask_to_check(node, what).await.map_err(failed)?
        };
        Ok(NodeCheck { node: id, name, findings })
    }

    async fn ask_to_check(&self, node: NodeId, what: CheckParts) -> Result<Vec<Finding>> {
        if !self.is_reached(node) {
            bail!("node {node} is not reached: run `forebay check` there");
        }
        match self.host(node)?.ask(HostRequest::Check { what }).await? {
            HostReply::Checked(findings) => Ok(findings),
            _ => bail!("node {node} gave another answer"),
        }
    }

    /// The condition of a node's member of the engine.
    pub(super) async fn engine_at(&self, node: NodeId) -> Result<EngineCondition> {
        if !self.is_reached(node) {
            bail!("node {node} is not reached");
        }
        match self.host(node)?.ask(HostRequest::Engine).await? {
            HostReply::Engine(condition) => Ok(condition),
            _ => bail!("node {node} gave another answer"),
        }
    }

    /// A drive of a host, once its state is known.
    async fn drive_of(&self, node: NodeId, id: DriveId) -> Result<Arc<dyn DriveService>> {
        if node == self.here()
            && let Some(seat) = &self.seat
        {
            return seat.drives.open().await.remove(&id).context("it is not open");
        }
        let told = tokio::time::timeout(FIRST_FACT, RemoteDrive::new(&self.peer(node)?, id)).await;
        Ok(told.with_context(|| format!("node {node} does not tell the state of drive {id}"))?)
    }

    async fn admit_from_elsewhere(&self, record: DriveRecord, drive: Arc<dyn DriveService>) -> Result<()> {
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
        match self.host(node)?.ask(HostRequest::Drives).await? {
            HostReply::Drives(drives) => Ok(drives.into_iter().find(|hosted| hosted.drive == drive)),
            _ => bail!("node {node} gave another answer"),
        }
    }

    /// Waits for a while until a node answers.
    async fn wait_for_node(&self, node: NodeId) -> Result<()> {
        if node == self.here() {
            return Ok(());
        }
        let mut contact = self.peer(node)?.contact();
        let reached = async { contact.wait_for(|contact| contact.is_there).await.is_ok() };
        match tokio::time::timeout(FIRST_CONTACT, reached).await {
            Ok(true) => Ok(()),
            _ => bail!("node {node} does not answer this one: look at `forebay node list` and its address"),
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
        self.wait_for_node(node).await?;
        let request = HostRequest::Format { drive, path, size_bytes };
        let reply = self.host(node)?.ask(request).await.with_context(|| format!("node {node}"))?;
        let HostReply::Formatted { uuid, capacity_bytes } = reply else {
            bail!("node {node} gave another answer")
        };
        let service = self.drive_of(node, drive).await;
        if service.is_err() {
            self.close_elsewhere(node, drive).await;
        }
        let service = service?;
        let path = self.hosted(node, drive).await?.map(|hosted| PathBuf::from(hosted.path));
        let record = DriveRecord::new(drive, uuid, node, capacity_bytes);
        let service = Some(OpenDrive::there(service, None));
        Ok(DriveEntry { record, path, service, problem: None, retry_ns: 0 })
    }

    /// The drive of the cluster that is at a path of a node, which notes that.
    pub(super) async fn locate_at(&self, node: NodeId, path: &str) -> Result<Option<DriveUuid>> {
        self.wait_for_node(node).await?;
        match self.host(node)?.ask(HostRequest::Locate { path: path.to_owned() }).await? {
            HostReply::Located(uuid) => Ok(uuid),
            _ => bail!("node {node} gave another answer"),
        }
    }

    /// Lets another node close a drive that was made and is not used after all.
    pub(super) async fn close_elsewhere(&self, node: NodeId, drive: DriveId) {
        let Ok(host) = self.host(node) else { return };
        if let Err(error) = host.ask(HostRequest::Close { drive }).await {
            tracing::warn!(%node, %drive, %error, "a drive that is not used stays open");
        }
    }

    /// Lets the node of a drive open it again.
    pub(super) async fn reopen_elsewhere(&self, record: DriveRecord) -> Result<DriveEntry> {
        self.host(record.node)?.ask(HostRequest::Reopen { drive: record.id }).await?;
        let hosted =
            self.hosted(record.node, record.id).await?.context("its node does not know it any more")?;
        let drive = self.drive_of(record.node, record.id).await?;
        let begun = tokio::time::Instant::now();
        while hosted.problem.is_none() && drive.health() != DriveHealth::Up && begun.elapsed() < FIRST_FACT {
            tokio::time::sleep(FACT_POLL).await;
        }
        let service = hosted.problem.is_none().then(|| OpenDrive::there(drive, hosted.older));
        let path = Some(PathBuf::from(hosted.path));
        Ok(DriveEntry { record, path, service, problem: hosted.problem, retry_ns: 0 })
    }
}
