//! A node that may come to own the ledgers: it follows the logs of all of them, and takes them when their owner is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::{FsError, LedgerId};
use control::{CONTROL_LEDGER, Cluster, Control, LogMoveRecord};
use meta::log::{LogError, StaleCopies, Vacancy};
use meta::owner::{OwnerError, Standby, StandbyOptions};
use meta::state::WholeLog;
use tokio::task::JoinHandle;
use wire::BoxFuture;
use wire::link::{RemoteReplica, Services};
use wire::replica::{ReplicaReply, ReplicaRequest, ReplicaService, STANDBY_WAIT_MAX};

use super::owner::{ForAll, Owner};
use super::{Member, lock};
use crate::engine::{Engine, EngineAddress};
use crate::identity::OWNER;
use crate::node::{
    CONTROL_CACHE_BYTES, Deposed, Ended, MetaDirs, Mounts, MovedOn, Node, Seat, is_unfinished,
    replica_of_node,
};

/// Pause after a ledger could not be followed or taken.
const PAUSE: Duration = Duration::from_secs(1);
/// Pause after this node could not own the ledgers, and after the engine did not answer.
const FAILED_PAUSE: Duration = Duration::from_secs(10);
const ENGINE_PAUSE: Duration = Duration::from_secs(3);
/// How long a node that is going to be away leaves the ledgers to others.
const HOLD_BACK: Duration = Duration::from_secs(4);
/// How long a ledger counts as vacant after its standby has seen that.
const VACANT: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(100);
/// How long the owner of another ledger may go on after the control ledger was taken.
const VACATED_PATIENCE: Duration = Duration::from_secs(15);

/// The ledgers that this node follows.
pub(super) struct Candidate {
    ledgers: MetaDirs,
    standbys: Mutex<BTreeMap<LedgerId, Following>>,
}

/// A ledger that is followed.
struct Following {
    task: JoinHandle<()>,
    vacant: Vacant,
}

/// When a ledger was last seen without an owner, and what its log showed.
type Vacant = Arc<Mutex<Option<(tokio::time::Instant, Vacancy)>>>;

impl Drop for Following {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The owner of a ledger, on whichever node it is.
struct OwnerAnywhere {
    member: Arc<Member>,
    ledger: LedgerId,
}

impl ReplicaService for OwnerAnywhere {
    fn ask(&self, request: ReplicaRequest) -> BoxFuture<'_, Result<ReplicaReply, FsError>> {
        Box::pin(async move {
            let owner = self.member.owner.now().filter(|owner| owner.node != self.member.network.here());
            let peer = owner.and_then(|owner| self.member.network.fabric.peer(owner.node));
            RemoteReplica::new(&peer.ok_or(FsError::Disconnected)?, self.ledger).ask(request).await
        })
    }
}

impl Candidate {
    pub(super) fn new(ledgers: MetaDirs) -> Arc<Self> {
        Arc::new(Self { ledgers, standbys: Mutex::default() })
    }

    /// The cluster, as far as the control ledger has come here: a node that was removed hears nothing of that from others.
    async fn stored(&self) -> Result<Cluster> {
        let files = self.ledgers.opened(CONTROL_LEDGER, CONTROL_CACHE_BYTES).await?;
        Ok(Cluster::of(&Control::view_only(files.state.clone()).view()?)?)
    }

    /// Goes to these members of the engine from now on.
    pub(super) fn follow_engine(&self, member: &Member, address: &EngineAddress) -> Result<()> {
        match self.ledgers.engine() {
            Some(engine) => engine.follow(&member.env, &member.dir, address),
            None => Ok(()),
        }
    }

    /// The local stores.
    pub(super) fn ledgers(&self) -> MetaDirs {
        self.ledgers.clone()
    }

    /// Stops following all ledgers.
    pub(super) fn stop(&self) {
        lock(&self.standbys).clear();
    }
}

impl Member {
    async fn standby(self: &Arc<Self>, candidate: &Candidate, ledger: LedgerId) -> Result<Standby> {
        let files = candidate.ledgers.opened(ledger, self.cache_bytes(ledger)).await?;
        Ok(Standby::new(StandbyOptions {
            ledger,
            log: files.log.clone(),
            state: files.state.clone(),
            owner: Arc::new(OwnerAnywhere { member: self.clone(), ledger }),
            replica: replica_of_node(self.network.here()),
            wait: STANDBY_WAIT_MAX,
        })?)
    }

    fn cache_bytes(&self, ledger: LedgerId) -> usize {
        if ledger == CONTROL_LEDGER { CONTROL_CACHE_BYTES } else { self.memory.store_cache_bytes }
    }

    /// Follows the ledgers of all filesystems while this node may own them. Until an owner tells which these are, this node's own store
    /// does: all nodes may have stopped.
    async fn follow_filesystems(self: &Arc<Self>, candidate: &Arc<Candidate>) {
        if self.role().is_some() {
            return;
        }
        let told = self.cluster.borrow().clone();
        let cluster = match told {
            Some(cluster) => cluster,
            None => match candidate.stored().await {
                Ok(cluster) => Arc::new(cluster),
                // The store is empty, or is copied just now.
                Err(_) => return,
            },
        };
        let wanted: BTreeSet<LedgerId> = match cluster.may_own(self.network.here()) {
            true => cluster.filesystems.values().map(|record| record.ledger).collect(),
            false => BTreeSet::new(),
        };
        let mut standbys = lock(&candidate.standbys);
        standbys.retain(|ledger, _| wanted.contains(ledger));
        for ledger in wanted {
            standbys.entry(ledger).or_insert_with(|| self.following(candidate, ledger));
        }
    }

    /// Begins to follow a ledger of a filesystem.
    fn following(self: &Arc<Self>, candidate: &Arc<Candidate>, ledger: LedgerId) -> Following {
        let vacant = Vacant::default();
        let following = follow(self.clone(), candidate.clone(), ledger, vacant.clone());
        Following { task: self.runtime.spawn(following), vacant }
    }

    /// Waits until the last owner of a ledger is gone, and stops following it. Returns what the log shows.
    async fn vacated(self: &Arc<Self>, candidate: &Arc<Candidate>, ledger: LedgerId) -> Result<Vacancy> {
        let vacant = {
            let mut standbys = lock(&candidate.standbys);
            let following = standbys.entry(ledger).or_insert_with(|| self.following(candidate, ledger));
            following.vacant.clone()
        };
        let seen = async {
            loop {
                let newest = *lock(&vacant);
                if let Some((_, vacancy)) = newest.filter(|(at, _)| at.elapsed() <= VACANT) {
                    return vacancy;
                }
                tokio::time::sleep(LOOK).await;
            }
        };
        let Ok(vacancy) = tokio::time::timeout(VACATED_PATIENCE, seen).await else {
            bail!("ledger {ledger} still has its last owner, or its log cannot be read");
        };
        let following = lock(&candidate.standbys).remove(&ledger);
        if let Some(mut following) = following {
            following.task.abort();
            let _ = (&mut following.task).await;
        }
        Ok(vacancy)
    }

    fn seat(self: &Arc<Self>, candidate: &Arc<Candidate>) -> Seat {
        let (member, followed) = (self.clone(), candidate.clone());
        Seat {
            network: self.network.clone(),
            host: Arc::new(ForAll(self.clone())),
            drives: self.host.clone(),
            paths: self.host.paths(),
            drive_settings: self.host.settings(),
            audit: self.gate.audit(),
            ledgers: candidate.ledgers.clone(),
            memory: self.memory,
            out_after: self.out_after,
            recoveries: lock(&self.membership).recoveries,
            offers: self.offers.clone(),
            vacated: Box::new(move |ledger| {
                let (member, followed) = (member.clone(), followed.clone());
                Box::pin(async move { member.vacated(&followed, ledger).await })
            }),
        }
    }
}

/// Follows a ledger of a filesystem, and notes when it has no owner.
async fn follow(member: Arc<Member>, candidate: Arc<Candidate>, ledger: LedgerId, vacant: Vacant) {
    loop {
        let followed = async {
            let mut standby = member.standby(&candidate, ledger).await?;
            loop {
                let vacancy = standby.follow(&*member.env.clock).await?;
                *lock(&vacant) = Some((tokio::time::Instant::now(), vacancy));
                tokio::time::sleep(LOOK).await;
            }
        };
        let followed: Result<()> = followed.await;
        if let Err(error) = followed {
            tracing::error!(%ledger, error = %format!("{error:#}"), "a ledger cannot be followed, trying again");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Follows the control ledger, and takes all ledgers when it has no owner. Ends when this node has owned them, and does so no more.
pub(super) async fn run(member: Arc<Member>, address: EngineAddress) {
    let candidate = begin(&member, &address).await;
    *lock(&member.candidate) = Some(candidate.clone());
    loop {
        match stand(&member, &candidate).await {
            Ok(role) => {
                match role.ended().await {
                    Ended::Deposed => {}
                    Ended::Halted => {
                        tracing::error!("a ledger has failed here: the ledgers are given back");
                        role.give_back().await;
                    }
                    Ended::Leaves => {
                        if let Err(error) = role.stop(Mounts::Keep).await {
                            tracing::warn!(error = %format!("{error:#}"), "the ledgers were not ended in order");
                        }
                    }
                    Ended::Moves => {
                        let moved = role.move_on().await.and_then(|record| member.follow_recovery(&record));
                        if let Err(error) = moved {
                            tracing::error!(error = %format!("{error:#}"), "the logs were not moved in order");
                        }
                    }
                }
                return;
            }
            Err(error) if error.is::<Deposed>() => return,
            Err(error) => {
                tracing::warn!(error = %format!("{error:#}"), "this node does not own the ledgers");
                // Others that could own them come first.
                tokio::time::sleep(FAILED_PAUSE).await;
            }
        }
    }
}

/// Connects to the engine, however long that takes: drives and mounts do not need it.
async fn begin(member: &Arc<Member>, address: &EngineAddress) -> Arc<Candidate> {
    loop {
        if is_first_node_now(member).await {
            // The process begins anew.
            return std::future::pending().await;
        }
        let connected = async {
            let engine = Engine::connect(&member.env, &member.dir, address).await?;
            let ledgers = MetaDirs::load(&member.env, &member.dir, &member.meta_dirs, StaleCopies::Refuse)?;
            // After a move, nobody else has what the stores of this node have.
            let is_alone = is_unfinished(&member.env, &member.dir);
            let whole = if is_alone { WholeLog::No } else { WholeLog::Yes };
            ledgers.with_engine(engine, &member.runtime, whole).await
        };
        match connected.await {
            Ok(ledgers) => return Candidate::new(ledgers),
            Err(error) => {
                tracing::error!(error = %format!("{error:#}"), "the ledgers cannot be followed, trying again");
                tokio::time::sleep(ENGINE_PAUSE).await;
            }
        }
    }
}

/// Whether the logs have moved to files of this node, as its own store knows: the engine that they have left is not needed to find out.
async fn is_first_node_now(member: &Arc<Member>) -> bool {
    if member.network.here() != OWNER {
        return false;
    }
    let (env, dir) = (member.env.clone(), member.dir.clone());
    let stored = tokio::task::spawn_blocking(move || -> Result<Cluster> {
        let ledgers = MetaDirs::load(&env, &dir, &[], StaleCopies::Refuse)?;
        let control = ledgers.store(CONTROL_LEDGER)?.context("there is no store")?;
        Ok(Cluster::of(&Control::view_only(control).view()?)?)
    });
    match stored.await {
        Ok(Ok(cluster)) if cluster.record.log.is_empty() => {
            member.follow_recovery(&cluster.record).unwrap_or(false)
        }
        _ => false,
    }
}

/// Waits until the ledgers have no owner, and takes them.
async fn stand(member: &Arc<Member>, candidate: &Arc<Candidate>) -> Result<Arc<Node>> {
    let mut held_back: Option<tokio::time::Instant> = None;
    loop {
        let vacancy = wait_for_vacancy(member, candidate).await?;
        let (here, cluster) = (member.network.here(), candidate.stored().await?);
        if member.follow_recovery(&cluster.record)? {
            return Err(Deposed.into());
        }
        if member.refuses_start(&cluster) {
            // The process ends.
            return std::future::pending().await;
        }
        if !cluster.may_own(here) {
            tokio::time::sleep(PAUSE).await;
            continue;
        }
        let now_s = member.env.clock.wall_ns() / 1_000_000_000;
        let is_leaving =
            cluster.nodes.get(&here).is_some_and(|node| node.maintenance_left_s(now_s).is_some());
        let begun = cluster.record.log_move.as_ref();
        let is_for_first = here != OWNER && begun.is_some_and(LogMoveRecord::waits_for_first_node);
        let is_for_another = cluster.record.next_owner.is_some_and(|next| next != here);
        if (is_leaving || is_for_first || is_for_another)
            && held_back.is_none_or(|since| since.elapsed() > 2 * HOLD_BACK)
        {
            // Others come first, if there are any.
            held_back = Some(tokio::time::Instant::now());
            tokio::time::sleep(HOLD_BACK).await;
            continue;
        }
        tracing::warn!(epoch = %vacancy.epoch, "the ledgers have no owner: taking them");
        match take(member, candidate, vacancy).await {
            // Another one was faster, or the owner is back.
            Err(error) if is_fenced(&error) => tokio::time::sleep(LOOK).await,
            // Its store has the change now that says so.
            Err(error) if error.is::<MovedOn>() => {}
            taken => return taken,
        }
    }
}

fn is_fenced(error: &anyhow::Error) -> bool {
    let opened = error.chain().find_map(|cause| cause.downcast_ref::<OwnerError>());
    matches!(opened, Some(OwnerError::Log { source: LogError::Fenced(_), .. }))
}

/// Follows the control ledger until it has no owner. Returns what its log shows.
async fn wait_for_vacancy(member: &Arc<Member>, candidate: &Arc<Candidate>) -> Result<Vacancy> {
    let mut standby = member.standby(candidate, CONTROL_LEDGER).await?;
    let filesystems = async {
        loop {
            member.follow_filesystems(candidate).await;
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::select! {
        vacancy = standby.follow(&*member.env.clock) => vacancy.context("following the control ledger"),
        () = filesystems => unreachable!("it never ends"),
    }
}

async fn take(member: &Arc<Member>, candidate: &Arc<Candidate>, vacancy: Vacancy) -> Result<Arc<Node>> {
    let seat = member.seat(candidate);
    let taken = Node::take(member.env.clone(), member.dir.clone(), seat, vacancy).await;
    let role = match taken {
        Ok(role) => role,
        Err(error) => {
            member.offers.send_replace(Services::default());
            return Err(error);
        }
    };
    if *member.stopping.borrow() {
        role.stop(Mounts::Keep).await?;
        bail!("this node is about to stop");
    }
    *lock(&member.role) = Some(role.clone());
    let owner = Owner { node: member.network.here(), epoch: role.epoch() };
    member.owner.note(owner);
    let telling = member.clone();
    member.runtime.spawn(async move { telling.tell_owner(owner).await });
    Ok(role)
}
