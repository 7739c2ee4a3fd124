//! Which node owns the ledgers: every node knows it, or looks for it, and tells others.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::program::{FORMAT_LEVEL, VERSION};
use base::{Epoch, FsError, NodeId};
use control::Cluster;
use futures_util::future::join_all;
use meta::log::StaleCopies;
use tokio::sync::watch;
use wire::BoxFuture;
use wire::cluster::{
    CheckParts, ClusterReply, ClusterRequest, ClusterService, Declined, EngineSeat, Finding, HostReply,
    HostRequest, HostService, JoinReply, JoinRequest, JoinService, NodeCondition, StoredLedger, TRY_LOG_MAX,
};
use wire::link::RemoteCluster;
use wire::view::{NEWS_WAIT_MAX, ViewReply, ViewRequest, ViewService};

use super::recover::LocalCopy;
use super::{Member, lock};
use crate::checks::{self, Ways};
use crate::engine::{Engine, EngineAddress};
use crate::identity::{OWNER, only_epoch};
use crate::node::{MetaDirs, SILENCE_PATIENCE, addresses_of, client_address};

/// How long a node may take to say whether it is the owner.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);

/// Whether two owners may execute a request.
fn may_repeat(request: &ClusterRequest) -> bool {
    !matches!(request, ClusterRequest::Manage { method, .. } if method != "GET")
}

/// An owner of the ledgers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) node: NodeId,
    /// Each owner has a higher one.
    pub(super) epoch: Epoch,
}

/// The newest owner that this node knows.
pub(super) struct KnownOwner {
    /// The number of recoveries that this node knows of. It ignores an owner whose epoch has a lower one.
    recoveries: u32,
    newest: watch::Sender<Option<Owner>>,
    node: watch::Sender<Option<NodeId>>,
}

impl KnownOwner {
    /// Of a cluster in which it may be any node, or only the first.
    pub(super) fn new(may_move: bool, recoveries: u32) -> Self {
        let known = Self { recoveries, newest: watch::Sender::new(None), node: watch::Sender::new(None) };
        if !may_move {
            known.note(Owner { node: OWNER, epoch: only_epoch(recoveries) });
        }
        known
    }

    pub(super) fn now(&self) -> Option<Owner> {
        *self.newest.borrow()
    }

    /// As it becomes another one.
    pub(super) fn newest(&self) -> watch::Receiver<Option<Owner>> {
        self.newest.subscribe()
    }

    /// Its number, as it becomes another one.
    pub(super) fn node(&self) -> watch::Receiver<Option<NodeId>> {
        self.node.subscribe()
    }

    /// Takes note of an owner, unless it is an earlier one.
    pub(super) fn note(&self, owner: Owner) {
        if owner.epoch.recoveries() < self.recoveries {
            return;
        }
        let is_news = self.newest.send_if_modified(|newest| {
            let is_news = newest.is_none_or(|newest| owner.epoch > newest.epoch);
            if is_news {
                *newest = Some(owner);
            }
            is_news
        });
        if is_news {
            tracing::info!(node = %owner.node, epoch = %owner.epoch, "the ledgers have an owner");
            self.node.send_if_modified(|node| node.replace(owner.node) != Some(owner.node));
        }
    }
}

impl Member {
    /// Asks the owner of the control ledger, which may be this node. If another node becomes the owner before it answers, this asks that
    /// one, but does not repeat what two owners must not both execute.
    pub(super) async fn ask_owner(&self, request: ClusterRequest) -> Result<ClusterReply> {
        let mut newest = self.owner.newest();
        loop {
            let owner = (*newest.borrow_and_update()).context("no node is known to own the metadata")?;
            if owner.node == self.network.here() {
                let role = self.role().context("this node does not own the metadata any more")?;
                let answers = role.for_others().context("this node is about to stop")?;
                return Ok(answers.ask(request).await?);
            }
            let peer = self.network.fabric.peer(owner.node);
            let peer = peer.with_context(|| format!("node {} is not in the cluster any more", owner.node))?;
            let asked = RemoteCluster::new(&peer);
            tokio::select! {
                answer = asked.ask(request.clone()) => return Ok(answer?),
                _ = newest.wait_for(|next| next.is_some_and(|next| next.node != owner.node)) => {}
                () = peer.is_away(SILENCE_PATIENCE) => bail!("node {} is not reached", owner.node),
            }
            if !may_repeat(&request) {
                bail!(
                    "node {} owned it and has not answered: look whether it is done, and ask again",
                    owner.node
                );
            }
        }
    }

    /// Asks all nodes which one owns the ledgers.
    pub(super) async fn look_for_owner(&self) {
        let others = self.nodes().into_iter().filter(|node| node.node != self.network.here());
        let asks = others.filter_map(|node| {
            let peer = self.network.fabric.peer(node.node)?;
            Some(async move {
                let asked = RemoteCluster::new(&peer).ask(ClusterRequest::IsOwner).await;
                let ClusterReply::Owner(Some(epoch)) = asked.ok()? else { return None };
                self.owner.note(Owner { node: node.node, epoch });
                Some(())
            })
        });
        // Each that answers in time is noted.
        let _ = tokio::time::timeout(ANSWER_PATIENCE, join_all(asks)).await;
    }

    /// Asks a node of which another says that it owns the ledgers.
    fn confirm_owner(self: &Arc<Self>, node: NodeId) {
        let Some(peer) = self.network.fabric.peer(node) else { return };
        let member = self.clone();
        // It ends with its answer, or after the limit of a call.
        self.runtime.spawn(async move {
            if let Ok(ClusterReply::Owner(Some(epoch))) =
                RemoteCluster::new(&peer).ask(ClusterRequest::IsOwner).await
            {
                member.owner.note(Owner { node, epoch });
            }
        });
    }

    /// Tells all nodes that this one owns the ledgers.
    pub(super) async fn tell_owner(&self, owner: Owner) {
        let others = self.nodes().into_iter().filter(|node| node.node != owner.node);
        let tells =
            others.filter_map(|node| {
                let peer = self.network.fabric.peer(node.node)?;
                let Owner { node, epoch } = owner;
                Some(async move {
                    drop(RemoteCluster::new(&peer).ask(ClusterRequest::Owns { node, epoch }).await)
                })
            });
        // The rest ask when they hear nothing of the earlier one.
        let _ = tokio::time::timeout(ANSWER_PATIENCE, join_all(tells)).await;
    }
}

/// What every node answers to other nodes and to processes beside it.
pub(super) struct ForAll(pub(super) Arc<Member>);

impl ForAll {
    fn elsewhere(&self) -> Declined {
        let owner = match self.0.owner.now() {
            Some(owner) if owner.node != self.0.network.here() => format!("node {} does", owner.node),
            _ => "no node is known to".to_owned(),
        };
        Declined(format!("this node does not own the metadata of the cluster: {owner}"))
    }
}

impl ClusterService for ForAll {
    fn ask(&self, request: ClusterRequest) -> BoxFuture<'_, Result<ClusterReply, Declined>> {
        Box::pin(async move {
            if let ClusterRequest::Owns { node, .. } = request {
                self.0.confirm_owner(node);
                return Ok(ClusterReply::Owner(None));
            }
            if let ClusterRequest::Probe { .. } = request {
                return Ok(ClusterReply::Probed { wall_ns: self.0.env.clock.wall_ns() });
            }
            match self.0.role().and_then(|role| role.for_others()) {
                Some(owner) => owner.ask(request).await,
                None if request == ClusterRequest::IsOwner => Ok(ClusterReply::Owner(None)),
                None => Err(self.elsewhere()),
            }
        })
    }
}

/// What is checked for drives and mounts only.
const FOR_DATA: [&str; 4] = ["fuse", "io_uring", "cpu", "governor"];

impl HostService for ForAll {
    fn ask(&self, request: HostRequest) -> BoxFuture<'_, Result<HostReply, Declined>> {
        Box::pin(async move {
            let answer = match request {
                HostRequest::StartEngine(seat) => self.0.start_engine(seat).await.map(|()| HostReply::Done),
                HostRequest::EndEngine { number } => {
                    self.0.end_engine(number).await.map(|()| HostReply::Done)
                }
                HostRequest::Engine => self.0.engine_here().condition().map(HostReply::Engine),
                HostRequest::Stored => self.0.stored().await.map(HostReply::Stored),
                HostRequest::TryLog { log, number } => {
                    self.0.try_log(&log, number).await.map(|system| HostReply::TriedLog { system })
                }
                HostRequest::Condition => Ok(HostReply::Condition(self.0.condition())),
                HostRequest::Check { what } => Ok(HostReply::Checked(self.0.check(what).await)),
                HostRequest::Restore(order) => {
                    let restored = self.0.helper.restore(order, self.0.routes(), self.0.owner.node());
                    restored.await.map(HostReply::Restored)
                }
                HostRequest::Upload(order) => {
                    let made = self.0.helper.upload(order, self.0.routes(), self.0.owner.node());
                    made.await.map(|bytes| HostReply::Uploaded { bytes })
                }
                request => return self.0.host.ask(request).await,
            };
            answer.map_err(|error| Declined(format!("{error:#}")))
        })
    }
}

impl Member {
    /// Fails if this node could not use the logs of the ledgers at another place. Returns which servers it finds there.
    async fn try_log(&self, log: &str, number: u64) -> Result<String> {
        let address: EngineAddress = log.parse()?;
        let tried = async {
            let engine = Engine::connect(&self.env, &self.dir, &address).await?;
            if !engine.is_free(number).await? {
                bail!("it finds something of another cluster there");
            }
            Ok(engine.system())
        };
        let tried = tokio::time::timeout(TRY_LOG_MAX, tried).await;
        tried.with_context(|| format!("no answer within {} s", TRY_LOG_MAX.as_secs()))?
    }

    /// Runs a member of an engine: of one to which the logs of the ledgers are about to move, or of the one that has them.
    async fn start_engine(self: &Arc<Self>, seat: EngineSeat) -> Result<()> {
        let _one_at_a_time = self.making_engine.lock().await;
        let engine = lock(&self.engine).clone();
        match &engine {
            Some(engine) if engine.is_own() && !seat.joins => {
                bail!("the logs of this cluster are in an etcd of Forebay already")
            }
            Some(engine) if seat.joins && !engine.is_own() => {
                bail!("the logs of this cluster are not in an etcd of Forebay")
            }
            None if seat.joins => bail!("this node does not know yet that the logs are in an engine"),
            _ => {}
        }
        let (own, listen) = (self.engine_here(), lock(&self.membership).listen.ip());
        tokio::task::spawn_blocking(move || own.begin(listen, &seat)).await??;
        self.keep_engine();
        if let Some(address) = engine {
            self.stand(address);
        }
        Ok(())
    }

    /// How far the local stores of this node have come.
    async fn stored(&self) -> Result<Vec<StoredLedger>> {
        let candidate = lock(&self.candidate).clone();
        let ledgers = match candidate {
            Some(candidate) => candidate.ledgers(),
            // It has not reached the engine yet.
            None => MetaDirs::load(&self.env, &self.dir, &[], StaleCopies::Refuse)?,
        };
        let copy = tokio::task::spawn_blocking(move || LocalCopy::read(&ledgers)).await??;
        Ok(copy.map(|copy| copy.stored()).unwrap_or_default())
    }

    /// How this node is.
    fn condition(&self) -> NodeCondition {
        NodeCondition {
            version: VERSION.to_owned(),
            format_level: FORMAT_LEVEL,
            uptime_s: self.uptime_s(),
            wall_ns: self.env.clock.wall_ns(),
            s3: self.gate.url(),
            stores: self.stores.seen(self.network.here().0),
        }
    }

    /// Seconds since this process began.
    pub(super) fn uptime_s(&self) -> u64 {
        (self.env.clock.boot_ns() - self.started_ns) / 1_000_000_000
    }

    /// Looks at this machine.
    pub(super) async fn check(&self, what: CheckParts) -> Vec<Finding> {
        let (fabric, here) = (&*self.network.fabric, self.network.here());
        let ways = Ways { fabric, here, nodes: &self.nodes() };
        let mut findings = checks::look(&self.env, &self.dir, what, Some(ways)).await;
        if lock(&self.membership).witness {
            findings.retain(|finding| !FOR_DATA.contains(&finding.code.as_str()));
        }
        findings
    }

    /// Ends the member of an attempt to move the logs, which has failed.
    async fn end_engine(&self, number: u64) -> Result<()> {
        let _one_at_a_time = self.making_engine.lock().await;
        if lock(&self.engine).as_ref().is_some_and(EngineAddress::is_own) {
            bail!("the logs of this cluster are in an etcd of Forebay");
        }
        let own = self.engine_here();
        tokio::task::spawn_blocking(move || own.undo(number)).await?
    }

    /// Ends the member of an engine of a witness whose seat another node has now.
    pub(super) fn leave_seat(self: &Arc<Self>, cluster: &Cluster) {
        let here = self.network.here();
        let Ok(log) = cluster.record.log.parse::<EngineAddress>() else { return };
        if !log.is_own() || cluster.seats().contains(&here) || !lock(&self.membership).witness {
            return;
        }
        let own = self.engine_here();
        let address = addresses_of(cluster).iter().find(|node| node.node == here).and_then(client_address);
        // Until the others go on without it, it may be needed.
        if own.exists() && address.is_some_and(|address| !log.has_server(&address)) {
            tracing::warn!("another node has the seat of this witness now: its member of etcd ends");
            let member = self.clone();
            self.runtime.spawn(async move {
                if let Err(error) = member.end_spare_member().await {
                    tracing::warn!(error = %format!("{error:#}"), "the member of etcd does not end");
                }
            });
        }
    }

    /// Ends the member of an engine here, and removes its data, unless this node has a seat again.
    async fn end_spare_member(&self) -> Result<()> {
        let _one_at_a_time = self.making_engine.lock().await;
        let here = self.network.here();
        let is_needed = self.cluster.borrow().as_ref().is_some_and(|cluster| cluster.seats().contains(&here));
        let own = self.engine_here();
        match own.number().filter(|_| !is_needed) {
            Some(number) => tokio::task::spawn_blocking(move || own.undo(number)).await?,
            None => Ok(()),
        }
    }
}

impl JoinService for ForAll {
    fn join(&self, request: JoinRequest) -> BoxFuture<'_, Result<JoinReply, Declined>> {
        Box::pin(async move {
            if let Some(owner) = self.0.role().and_then(|role| role.for_others()) {
                return owner.join(request).await;
            }
            let owner = self.0.owner.now().filter(|owner| owner.node != self.0.network.here());
            match owner.and_then(|owner| self.0.network.fabric.peer(owner.node)) {
                Some(peer) => wire::link::join(&peer, &request).await,
                None => Err(self.elsewhere()),
            }
        })
    }
}

impl ViewService for ForAll {
    fn ask(&self, request: ViewRequest) -> BoxFuture<'_, Result<ViewReply, FsError>> {
        Box::pin(async move {
            match request {
                ViewRequest::Filesystem { .. } | ViewRequest::Blob { .. } | ViewRequest::Reads { .. } => {
                    let views = self.0.offers.borrow().views.clone();
                    views.ok_or(FsError::Disconnected)?.ask(request).await
                }
                ViewRequest::Owner { known, wait_ms } => {
                    let mut owner = self.0.owner.newest();
                    let wait = Duration::from_millis(wait_ms.into()).min(NEWS_WAIT_MAX);
                    let news = owner.wait_for(|owner| owner.is_some_and(|owner| owner.epoch != known));
                    let news = tokio::time::timeout(wait, news).await;
                    Ok(match news.ok().and_then(Result::ok).and_then(|owner| *owner) {
                        Some(owner) => ViewReply::Owner(owner.node, owner.epoch),
                        None => ViewReply::Same,
                    })
                }
            }
        })
    }
}
