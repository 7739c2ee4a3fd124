//! A node that joined a cluster: it serves its drives, mounts filesystems of the cluster, and passes on what operators want to the
//! owner of the ledgers. Where an engine has the logs of the ledgers, it may become their owner itself.

mod admission;
mod candidate;
mod gate;
mod helping;
mod host;
mod join;
mod manage;
mod mounts;
mod owner;
mod recover;
mod stores;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use base::DriveId;
use base::env::{Env, File};
use base::program::VERSION;
use control::{Cluster, ClusterRecord, ControlError, DriveRecord, Follower};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use wire::cluster::{ClusterReply, ClusterRequest, HostService};
use wire::link::Services;

use crate::engine::{EngineAddress, Supervised};
use crate::identity::{IdentityFiles, Membership, OWNER, RENEW_EVERY, Starts, only_epoch};
use crate::node::{
    Addresses, CLIENTS_SOCKET, Clients, DriveMaker, DriveSettings, LocalDrives, MemoryPlan, Mounts, Network,
    Node, NodeDir, NodeFile, StartOptions, addresses_of, be_first_node, kept_settings, memory_budget,
    prepare_dir, proof_key, remove_leftovers, tell_metrics,
};
use crate::remote::{OwnDrives, Routes};
use admission::{Admission, is_copy};
use candidate::Candidate;
use gate::MemberGate;
use helping::Helper;
use host::DriveHost;
use manage::Manager;
use mounts::MemberMounts;
use owner::{ForAll, KnownOwner};
use stores::MemberStores;

use join::reached_at;
pub(crate) use join::{JoinOptions, Known, ask_as_stranger, join};
pub(crate) use recover::{OtherNode, RecoverOptions, Recovery, recover};

/// How often the node looks after its drives and mounts.
const TICK: Duration = Duration::from_secs(1);
/// Pause after a question to the owner that has no answer.
const ASK_PAUSE: Duration = Duration::from_millis(500);
/// How long a start waits for an owner of the ledgers: the last one must be gone for certain before another takes them.
const OWNER_PATIENCE: Duration = Duration::from_secs(10);
/// The same where only the first node may own them.
const FILES_PATIENCE: Duration = Duration::from_secs(2);
/// The pause after the certificate was not renewed.
const RENEW_PAUSE: Duration = Duration::from_secs(60);
/// Pause after S3 could not be started.
const GATE_PAUSE: Duration = Duration::from_secs(5);
/// Drives among which memory is divided, at least.
const DRIVES_MIN: usize = 2;
/// How long a stop waits for what is to be noted in the ledgers, and how long while their logs do not answer.
const LEDGERS_PATIENCE: Duration = Duration::from_secs(9);
const VAIN_PATIENCE: Duration = Duration::from_secs(2);

/// Refuses options of `start` that are for the node with the metadata.
fn refuse_foreign(membership: &Membership, options: &StartOptions) -> Result<()> {
    if membership.log.is_some() {
        // Those of the first start may be given again.
        if options.accept_older_metadata || options.force_stale_metadata {
            anyhow::bail!(
                "the logs of this cluster are in an engine, which has no older copies: leave that option out"
            );
        }
        return Ok(());
    }
    let given = [
        ("--drives", options.drives.is_some()),
        ("--drive-size", options.drive_bytes.is_some()),
        ("--profile", options.profile.is_some()),
        ("--mount", options.mount.is_some() || options.mount_options.is_some()),
        ("--degraded", options.degraded),
        ("--meta-dir", !options.meta_dirs.is_empty()),
        ("--force-stale-metadata", options.force_stale_metadata),
        ("--accept-older-metadata", options.accept_older_metadata),
        ("--log", options.log.is_some()),
    ];
    if let Some((name, _)) = given.into_iter().find(|(_, given)| *given) {
        anyhow::bail!("{name} is for the node that has the metadata; this one has joined a cluster");
    }
    Ok(())
}

/// The place of this node in its cluster, changed by the options of this start.
fn kept_membership(identity: &IdentityFiles, options: &StartOptions) -> Result<Membership> {
    let mut membership = identity.membership()?.context("this node has not joined a cluster")?;
    refuse_foreign(&membership, options)?;
    let known = membership.clone();
    if let Some(log) = &known.log
        && let Some(next) = &options.log
    {
        let at: EngineAddress = log.parse()?;
        let is_there = |left: &String| left.parse().is_ok_and(|left: EngineAddress| left.is_meant_by(next));
        if !at.is_meant_by(next) && known.left.iter().any(is_there) {
            tracing::warn!(at = log, given = %next, "--log is out of date, because the logs have moved: leave it out");
        } else {
            membership.log = Some(at.moved_to(next.clone())?.to_string());
        }
    }
    if options.listen.is_some() || !options.advertise.is_empty() {
        membership.listen = options.listen.unwrap_or(membership.listen);
        membership.addresses = reached_at(membership.listen, options.advertise.clone())?;
    }
    if membership != known {
        identity.keep_membership(&membership)?;
    }
    Ok(membership)
}

/// A node that joined a cluster.
pub(crate) struct Member {
    env: Env,
    dir: NodeDir,
    identity: IdentityFiles,
    membership: Mutex<Membership>,
    network: Arc<Network>,
    host: Arc<DriveHost>,
    /// The node that owns the ledgers.
    owner: KnownOwner,
    /// The owner of the ledgers, if it is this node.
    role: Mutex<Option<Arc<Node>>>,
    /// What it serves.
    offers: watch::Sender<Services>,
    /// The engine that has the logs of the ledgers, so that this node may come to own them. It may come later.
    engine: Mutex<Option<EngineAddress>>,
    /// Held while a member of an engine is made here.
    making_engine: tokio::sync::Mutex<()>,
    /// Its process is looked after.
    keeps_engine: AtomicBool,
    /// This is the first node of a cluster with its logs in files from now on.
    is_first_node: AtomicBool,
    /// This node follows the ledgers.
    stands: AtomicBool,
    renewal: Renewal,
    /// Where their local stores are.
    meta_dirs: Vec<PathBuf>,
    candidate: Mutex<Option<Arc<Candidate>>>,
    /// This node owned the ledgers, and another one does now: it must begin anew.
    deposed: watch::Sender<bool>,
    admission: Admission,
    /// Why this process cannot serve in this cluster.
    unfit: watch::Sender<Option<String>>,
    /// Its drives were opened, and its mounts made, as far as that was possible.
    has_looked: watch::Sender<bool>,
    memory: MemoryPlan,
    out_after: Option<Duration>,
    /// Where metrics are told.
    metrics: Option<SocketAddr>,
    /// Services for mounts on this machine.
    clients: Clients,
    mounts: MemberMounts,
    /// Drives that were named for this start.
    named: Vec<PathBuf>,
    gate: MemberGate,
    helper: Helper,
    stores: MemberStores,
    /// Whether this start mounts what was mounted last.
    mounts_again: bool,
    runtime: Handle,
    started_ns: u64,
    /// What the cluster should be, as far as this node knows; `None`: it knows nothing yet.
    cluster: watch::Sender<Option<Arc<Cluster>>>,
    /// Why the owner of the control ledger does not answer.
    problem: Mutex<Option<String>>,
    stopping: watch::Sender<bool>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    /// Follows the records, and finds the owner. It ends after the mounts, whose sessions the owner ends.
    following: Mutex<Option<JoinHandle<()>>>,
    /// The thread of the management socket.
    serving: Mutex<Option<std::thread::JoinHandle<()>>>,
    _lock: Arc<dyn File>,
}

/// The renewal of the certificate.
#[derive(Default)]
struct Renewal {
    /// It is due now.
    asked: Notify,
    /// Held by the one that renews it.
    one: tokio::sync::Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Member {
    /// Whether the node in a directory has joined a cluster of others.
    ///
    /// # Errors
    /// If that cannot be read: it must not be taken for a new directory.
    pub(crate) fn is_in(env: &Env, dir: &NodeDir) -> Result<bool> {
        Ok(IdentityFiles::new(env, dir).membership()?.is_some())
    }

    /// Starts the node. After an error nothing runs and nothing is mounted.
    pub(crate) async fn start(env: Env, dir: NodeDir, options: StartOptions) -> Result<Arc<Self>> {
        let (runtime, held) = (Handle::current(), prepare_dir(&env, &dir)?);
        let identity = IdentityFiles::new(&env, &dir);
        let membership = kept_membership(&identity, &options)?;
        let others = StartOptions { listen: None, advertise: Vec::new(), ..options.clone() };
        let settings = kept_settings(&env, &dir, &others)?;
        let network = Arc::new(Network::new(&env, &runtime, &identity)?);
        let engine = membership.log.as_deref().map(str::parse).transpose()?;
        remove_leftovers(&env, &dir)?;
        let paths = Arc::new(LocalDrives::load(&env, &dir, Vec::new())?);
        let budget_bytes = memory_budget(&env, settings.memory_bytes)?;
        let memory = MemoryPlan::new(budget_bytes, paths.count().max(DRIVES_MIN), 1, 1);
        let maker = DriveMaker {
            env: env.clone(),
            dir: dir.clone(),
            cluster: membership.cluster,
            node: membership.node,
            settings: DriveSettings { io: options.io, trim: settings.trim, memory: memory.drive },
            paths,
        };
        let member = Arc::new(Self {
            started_ns: env.clock.boot_ns(),
            mounts: MemberMounts::load(&env, &dir, membership.node, memory)?,
            mounts_again: !options.no_mount,
            named: options.drive_paths.clone(),
            helper: Helper::new(&env, &memory),
            stores: MemberStores::default(),
            gate: MemberGate::new(&env, &dir, &runtime, memory, options.s3.clone())?,
            clients: Clients::new(&env, only_epoch(membership.recoveries)),
            owner: KnownOwner::new(engine.is_some(), membership.recoveries),
            role: Mutex::default(),
            offers: watch::Sender::new(Services::default()),
            engine: Mutex::new(engine),
            making_engine: tokio::sync::Mutex::default(),
            keeps_engine: AtomicBool::new(false),
            is_first_node: AtomicBool::new(false),
            stands: AtomicBool::new(false),
            renewal: Renewal::default(),
            meta_dirs: options.meta_dirs.clone(),
            candidate: Mutex::default(),
            deposed: watch::Sender::new(false),
            admission: Admission::begin(&identity)?,
            unfit: watch::Sender::new(None),
            has_looked: watch::Sender::new(false),
            memory,
            out_after: options.out_after,
            metrics: settings.metrics,
            host: DriveHost::new(maker),
            env,
            dir,
            identity,
            membership: Mutex::new(membership),
            network,
            runtime,
            cluster: watch::Sender::new(None),
            problem: Mutex::default(),
            stopping: watch::Sender::new(false),
            tasks: Mutex::default(),
            following: Mutex::default(),
            serving: Mutex::default(),
            _lock: held,
        });
        if let Err(error) = member.begin().await {
            let _ = member.stop(Mounts::KeepEarlier).await;
            return Err(error);
        }
        Ok(member)
    }

    async fn begin(self: &Arc<Self>) -> Result<()> {
        let membership = lock(&self.membership).clone();
        self.network.set_nodes(&membership.nodes, &self.runtime);
        self.publish().await;
        self.clients.listen(&self.dir, &self.runtime)?;
        self.network.listen(membership.listen, &self.runtime).await?;
        *lock(&self.following) = Some(self.runtime.spawn(follow(self.clone())));
        let tasks = [
            self.runtime.spawn(publish_changes(self.clone())),
            self.runtime.spawn(look_after(self.clone())),
            self.runtime.spawn(renew(self.clone())),
        ];
        lock(&self.tasks).extend(tasks);
        self.keep_engine();
        let engine = lock(&self.engine).clone();
        let patience = if engine.is_some() { OWNER_PATIENCE } else { FILES_PATIENCE };
        if let Some(address) = engine {
            self.stand(address);
        }
        let mut looked = self.has_looked.subscribe();
        // Without an owner, everything waits for it.
        let looked = tokio::time::timeout(patience, looked.wait_for(|looked| *looked));
        tokio::select! {
            _ = looked => {}
            // The process begins anew at once.
            () = self.deposed() => {}
            unfit = self.unfit() => return Err(unfit),
        }
        let (socket, stopped) = (self.dir.socket(), self.stopping.subscribe());
        let manager = Arc::new(Manager::new(self.clone()));
        if let Some(address) = self.metrics {
            tell_metrics(address, manager.clone(), stopped.clone()).await?;
        }
        let serving = admin::serve_answers(manager, socket.as_path(), self.runtime.clone(), stopped)?;
        *lock(&self.serving) = Some(serving);
        self.write_node_file()
    }

    /// Starts this node's member of an engine now, and again whenever it has ended: also before this node knows that the logs are
    /// there. Others may wait for it to tell.
    fn keep_engine(&self) {
        let own = self.engine_here();
        if !own.exists() || self.keeps_engine.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Err(error) = own.start() {
            tracing::error!(error = %format!("{error:#}"), "the member of etcd does not run");
        }
        lock(&self.tasks).push(self.runtime.spawn(own.keep_running()));
    }

    /// Follows the ledgers, whose logs are in an engine, and owns them if need be. Once.
    fn stand(self: &Arc<Self>, address: EngineAddress) {
        let member = self.clone();
        if address.is_own() {
            // Without a member, this node does not reach the engine, and others own the ledgers.
            if !self.engine_here().exists() {
                return;
            }
        }
        if lock(&self.membership).witness || self.stands.swap(true, Ordering::Relaxed) {
            return;
        }
        let standing = self.runtime.spawn(async move {
            candidate::run(member.clone(), address).await;
            member.deposed.send_replace(true);
        });
        lock(&self.tasks).push(standing);
    }

    fn engine_here(&self) -> Supervised {
        Supervised::new(&self.env, &self.dir)
    }

    /// Takes note of an engine to which the logs have moved since this node joined.
    fn follow_logs(self: &Arc<Self>, log: String, authority_key: &str) -> Result<()> {
        if log.is_empty() || lock(&self.engine).is_some() {
            return Ok(());
        }
        let address: EngineAddress = log.parse()?;
        if !authority_key.is_empty() {
            self.identity.keep_authority(authority_key)?;
        }
        self.change_membership(|membership| membership.log = Some(log))?;
        tracing::warn!(engine = %address, "the logs of the ledgers have moved to an engine");
        *lock(&self.engine) = Some(address.clone());
        self.stand(address);
        Ok(())
    }

    /// Takes note of other members of the engine.
    fn follow_engine(&self, log: &str) -> Result<()> {
        let known = lock(&self.engine).clone();
        let Some(known) = known.filter(|known| known.is_own() && known.to_string() != log) else {
            return Ok(());
        };
        let next = known.moved_to(log.parse()?)?;
        self.change_membership(|membership| membership.log = Some(next.to_string()))?;
        tracing::warn!(engine = %next, "the engine has other members");
        *lock(&self.engine) = Some(next.clone());
        let candidate = lock(&self.candidate).clone();
        candidate.map_or(Ok(()), |candidate| candidate.follow_engine(self, &next))
    }

    /// Takes note that the logs are elsewhere, because they have moved or were lost: this process begins anew, with them. Returns whether
    /// that is so.
    fn follow_recovery(&self, record: &ClusterRecord) -> Result<bool> {
        let known = lock(&self.membership).clone();
        if record.recoveries <= known.recoveries {
            return Ok(false);
        }
        let is_elsewhere = known.log.as_ref().is_some_and(|log| *log != record.log);
        let (from, to) = (known.log.as_deref().unwrap_or_default(), record.log.as_str());
        let is_own = |log: &str| log.parse().is_ok_and(|log: EngineAddress| log.is_own());
        if is_elsewhere && let Some(number) = record.moved_since(known.recoveries) {
            let candidate = lock(&self.candidate).clone();
            candidate.map_or(Ok(()), |candidate| candidate.ledgers().may_go_on(number))?;
        }
        if is_elsewhere && record.log.is_empty() && known.node == OWNER {
            be_first_node(&self.env, &self.dir, &known)?;
            self.is_first_node.store(true, Ordering::Relaxed);
        } else {
            let member = self.engine_here().number().filter(|_| is_own(from) && !is_own(to));
            self.change_membership(|membership| {
                membership.recoveries = record.recoveries;
                if is_elsewhere {
                    membership.log = (!to.is_empty()).then(|| to.to_owned());
                    membership.leaves_engine = member;
                    membership.leave(from.to_owned());
                }
            })?;
        }
        if is_elsewhere {
            tracing::warn!(from, to, "the logs of the ledgers are elsewhere");
            self.deposed.send_replace(true);
        }
        Ok(is_elsewhere)
    }

    /// Ends the member of an engine that the logs have left, once an owner at the new place was heard: before that, other nodes may need it
    /// to find out about the move.
    fn leave_engine(&self) -> Result<()> {
        let Some(number) = lock(&self.membership).leaves_engine else { return Ok(()) };
        let own = self.engine_here();
        if own.number() == Some(number) {
            self.runtime.spawn_blocking(move || give_up(&own));
        }
        self.change_membership(|membership| membership.leaves_engine = None)
    }

    /// What comes before the process begins anew as the first node of a cluster with its logs in files: it needs no member of an engine.
    pub(crate) async fn before_anew(&self) {
        let own = self.engine_here();
        if self.is_first_node.load(Ordering::Relaxed) && own.exists() {
            let _ = tokio::task::spawn_blocking(move || give_up(&own)).await;
        }
    }

    /// Changes the place of this node in its cluster, and keeps that.
    fn change_membership(&self, change: impl FnOnce(&mut Membership)) -> Result<()> {
        let mut membership = lock(&self.membership);
        let mut next = membership.clone();
        change(&mut next);
        self.identity.keep_membership(&next)?;
        *membership = next;
        Ok(())
    }

    /// Starts S3 once the cluster is known, however long the owner takes to answer.
    fn begin_gate(self: &Arc<Self>) {
        if *self.stopping.borrow() {
            return;
        }
        let member = self.clone();
        let begin = self.runtime.spawn(async move {
            let routes = member.routes();
            while let Err(error) = member.gate.start(&routes, member.owner.node()).await {
                tracing::error!(error = %format!("{error:#}"), "S3 is not served, trying again");
                tokio::time::sleep(GATE_PAUSE).await;
            }
        });
        lock(&self.tasks).push(begin);
    }

    /// The ways to the drives and owners of all nodes.
    fn routes(&self) -> Arc<Routes> {
        let (here, drives) = (self.network.here(), self.host.clone() as Arc<dyn OwnDrives>);
        let Network { fabric, stores, .. } = &*self.network;
        Routes::of_node((&self.env, &self.dir), here, drives, fabric.clone(), stores.clone())
    }

    fn nodes(&self) -> Vec<wire::cluster::NodeAddresses> {
        lock(&self.membership).nodes.clone()
    }

    fn write_node_file(&self) -> Result<()> {
        let file = NodeFile {
            pid: std::process::id(),
            mount: None,
            addresses: Addresses { admin: self.dir.run().join("admin.sock") },
            s3: None,
            filesystem: String::new(),
            cluster: lock(&self.membership).cluster,
            version: VERSION.to_owned(),
        };
        let bytes = serde_json::to_vec_pretty(&file).context("encoding node.json")?;
        self.env.files.write_atomic(&self.dir.node_json(), &bytes).context("writing node.json")
    }

    /// The owner of the ledgers, if it is this node.
    fn role(&self) -> Option<Arc<Node>> {
        lock(&self.role).clone()
    }

    /// Whether another copy of this node's directory was started since this one was. Then this process ends.
    fn refuses_start(&self, cluster: &Cluster) -> bool {
        let record = cluster.nodes.get(&self.network.here());
        let Some(refusal) = record.and_then(|record| self.admission.refusal(record)) else { return false };
        self.unfit.send_replace(Some(refusal));
        true
    }

    /// Waits until this node knows that its process cannot serve in this cluster. Returns the reason.
    pub(crate) async fn unfit(&self) -> anyhow::Error {
        let mut unfit = self.unfit.subscribe();
        // The sender lives as long as this.
        let reason = unfit.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
        anyhow!(reason.unwrap_or_default())
    }

    /// Waits until another node owns the ledgers that this one owned. Its process must begin anew then: what it has in memory is of no
    /// use any more.
    pub(crate) async fn deposed(&self) {
        // The sender lives as long as this.
        let _ = self.deposed.subscribe().wait_for(|deposed| *deposed).await;
    }

    /// Serves what there is now.
    async fn publish(self: &Arc<Self>) {
        if *self.stopping.borrow() {
            return;
        }
        let all = Arc::new(ForAll(self.clone()));
        let host: Arc<dyn HostService> = all.clone();
        let services = Services {
            drives: self.host.services().await,
            host: Some(host),
            views: Some(all.clone()),
            cluster: Some(all.clone()),
            joins: Some(all),
            proofs: proof_key(&self.env, &self.dir),
            ..self.offers.borrow().clone()
        };
        self.clients.serve(services.clone());
        self.network.serve(services);
    }

    /// Takes the newest records over.
    async fn take_over(self: &Arc<Self>, follower: &Follower) -> Result<()> {
        let view = follower.view()?;
        let cluster = Arc::new(Cluster::of(&view)?);
        let nodes = addresses_of(&cluster);
        if lock(&self.membership).nodes != nodes {
            self.network.set_nodes(&nodes, &self.runtime);
            self.change_membership(|membership| membership.nodes.clone_from(&nodes))?;
        }
        let here = self.network.here();
        self.network.set_witnesses(&cluster);
        self.admission.note(&self.identity, cluster.nodes.get(&here).map_or(0, |record| record.start))?;
        self.network.set_guests(cluster.client_rights(), &self.runtime);
        if self.follow_recovery(&cluster.record)? || *self.deposed.borrow() {
            return Ok(());
        }
        self.leave_engine()?;
        self.leave_seat(&cluster);
        self.follow_engine(&cluster.record.log)?;
        let drives: BTreeMap<DriveId, DriveRecord> = cluster
            .drives
            .iter()
            .filter(|(_, drive)| drive.node == here)
            .map(|(id, drive)| (*id, drive.clone()))
            .collect();
        if !cluster.record.log.is_empty() && lock(&self.engine).is_none() {
            self.renewal.asked.notify_one();
        }
        let is_witness = lock(&self.membership).witness;
        if !is_witness {
            self.gate.take_over(&view)?;
            let accounts = self.gate.accounts();
            self.stores.take_over(&view, (&self.env, &self.runtime), &self.network, &accounts)?;
        }
        if self.cluster.borrow().is_none()
            && let Err(error) = self.host.note_places(cluster.record.id, &drives, &self.named).await
        {
            tracing::error!(error = %format!("{error:#}"), "places of drives are not noted");
        }
        self.host.follow(&drives).await;
        let is_first = self.cluster.borrow().is_none();
        if is_first {
            self.mounts.recall(&cluster, self.mounts_again);
        }
        self.cluster.send_replace(Some(cluster));
        if is_first && !is_witness {
            self.begin_gate();
        }
        Ok(())
    }

    /// Stops all parts in the order of their dependencies. Returns the first error.
    pub(crate) async fn stop(&self, mounts: Mounts) -> Result<()> {
        let _ = self.stopping.send(true);
        // One of them may be starting S3.
        let tasks = std::mem::take(&mut *lock(&self.tasks));
        for task in tasks {
            task.abort();
            let _ = task.await;
        }
        // What comes after this must not wait for a cluster that does not answer.
        let (gate, unmounted, ()) =
            tokio::join!(self.gate.stop(), self.mounts.stop(mounts), self.helper.stop());
        let mut result = gate.and(unmounted);
        let following = lock(&self.following).take();
        if let Some(following) = following {
            following.abort();
            let _ = following.await;
        }
        let role = lock(&self.role).take();
        if let Some(role) = role {
            let patience = if role.holds() { LEDGERS_PATIENCE } else { VAIN_PATIENCE };
            match tokio::time::timeout(patience, role.stop(mounts)).await {
                Ok(stopped) => result = result.and(stopped),
                // What their clients on this node wrote is written out, or is known not to be.
                Err(_) => {
                    tracing::warn!("the ledgers end as in a crash: their logs do not answer");
                    let _ = tokio::time::timeout(VAIN_PATIENCE, role.give_back()).await;
                }
            }
        }
        if let Some(candidate) = lock(&self.candidate).take() {
            candidate.stop();
        }
        self.clients.stop().await;
        self.network.stop_answering().await;
        self.network.end();
        self.host.stop().await;
        for path in
            [self.dir.node_json(), self.dir.run().join("admin.sock"), self.dir.run().join(CLIENTS_SOCKET)]
        {
            if self.env.files.exists(&path) {
                result = result.and(self.env.files.remove_file(&path).context("removing the runtime files"));
            }
        }
        result
    }
}

/// Follows the records of the control ledger.
async fn follow(member: Arc<Member>) {
    let mut follower = Follower::default();
    loop {
        let Err(error) = follow_once(&member, &mut follower).await else { continue };
        let text = format!("{error:#}");
        if let Some(ControlError::TooOld { .. }) = error.downcast_ref() {
            member.unfit.send_replace(Some(text));
            return;
        }
        let before = lock(&member.problem).replace(text.clone());
        if before.as_ref() != Some(&text) {
            tracing::warn!(error = text, "the owner of the control ledger does not answer");
        }
        member.look_for_owner().await;
        tokio::time::sleep(ASK_PAUSE).await;
    }
}

async fn follow_once(member: &Arc<Member>, follower: &mut Follower) -> Result<()> {
    if !member.admission.is_admitted() {
        renew_once(member).await?;
    }
    let mut owner = member.owner.newest();
    owner.borrow_and_update();
    let answer = tokio::select! {
        answer = member.ask_owner(follower.question()) => answer?,
        // The earlier one is not waited for.
        _ = owner.changed() => return Ok(()),
    };
    let ClusterReply::Records(news) = answer else { anyhow::bail!("it gave another answer") };
    if lock(&member.problem).take().is_some() {
        tracing::info!("the owner of the control ledger answers again");
    }
    if follower.take(news)?
        && let Err(error) = member.take_over(follower).await
    {
        // They are asked for again.
        *follower = Follower::default();
        return Err(error);
    }
    if follower.is_whole() {
        member.gate.note_contact();
    }
    Ok(())
}

/// Renews the certificate at each start, and then at intervals.
async fn renew(member: Arc<Member>) {
    loop {
        match renew_once(&member).await {
            Ok(()) => {
                tokio::select! {
                    () = tokio::time::sleep(RENEW_EVERY) => {}
                    () = member.renewal.asked.notified() => {}
                }
            }
            Err(error) => {
                tracing::debug!(error = %format!("{error:#}"), "the certificate is not renewed yet");
                tokio::select! {
                    () = tokio::time::sleep(RENEW_PAUSE) => {}
                    () = member.renewal.asked.notified() => tokio::time::sleep(ASK_PAUSE).await,
                }
            }
        }
    }
}

async fn renew_once(member: &Arc<Member>) -> Result<()> {
    let _one_at_a_time = member.renewal.one.lock().await;
    let request = member.identity.key()?.request.into();
    let addresses = lock(&member.membership).addresses.clone();
    let node = member.network.here();
    let Starts { last: last_start, this: this_start } = member.admission.starts();
    let request = ClusterRequest::Renew { node, request, addresses, last_start, this_start };
    let (certificate, authorities, log, authority_key) = match member.ask_owner(request).await? {
        ClusterReply::Renewed { certificate, authorities, log, authority_key } => {
            (certificate, authorities, log, authority_key)
        }
        ClusterReply::IsCopy { addresses, answers } => {
            let text = is_copy(node, &addresses, answers);
            if member.admission.is_refused(answers) {
                member.unfit.send_replace(Some(text.clone()));
            }
            anyhow::bail!(text);
        }
        _ => anyhow::bail!("it gave another answer"),
    };
    member.admission.admit();
    member.identity.keep(&certificate, &authorities)?;
    member.network.renew(&member.identity)?;
    member.follow_logs(log, &authority_key)
}

/// Ends a member of an engine that is not needed any more. Must not run on a thread of the runtime.
fn give_up(own: &Supervised) {
    if let Err(error) = own.give_up() {
        tracing::warn!(error = %format!("{error:#}"), "the member of etcd that the logs have left does not end");
    }
}

/// Publishes each change of the list of drives.
async fn publish_changes(member: Arc<Member>) {
    let (mut drives, mut offers) = (member.host.changes(), member.offers.subscribe());
    // The senders live as long as the node.
    loop {
        tokio::select! {
            _ = drives.changed() => {}
            _ = offers.changed() => {}
        }
        member.publish().await;
    }
}

/// Opens drives that are missing, and looks after mounts.
async fn look_after(member: Arc<Member>) {
    let mut cluster = member.cluster.subscribe();
    loop {
        let knows = cluster.borrow_and_update().is_some();
        member.host.open_missing(member.env.clock.boot_ns()).await;
        let owner = member.owner.now().map(|owner| owner.node);
        member.mounts.look_after((owner, &member.nodes())).await;
        member.helper.tidy().await;
        if knows {
            member.has_looked.send_replace(true);
        }
        // The sender lives as long as the node.
        let _ = tokio::time::timeout(TICK, cluster.changed()).await;
    }
}
