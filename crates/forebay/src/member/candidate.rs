//! A node that may come to own the ledgers: it follows the logs of all of them, and takes them when their owner is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::{Epoch, FsError, LedgerId};
use control::CONTROL_LEDGER;
use meta::owner::{Standby, StandbyOptions};
use tokio::task::JoinHandle;
use wire::BoxFuture;
use wire::link::{RemoteReplica, Services};
use wire::replica::{ReplicaReply, ReplicaRequest, ReplicaService};

use super::owner::Owner;
use super::{Member, lock};
use crate::node::{CONTROL_CACHE_BYTES, MetaDirs, Mounts, Node, Seat};

/// The number of nodes that may own ledgers: the first ones of the cluster.
const CANDIDATES_MAX: usize = 3;
/// How long owners keep the log for a standby that is away.
const WAIT: Duration = Duration::from_secs(600);
/// Pause after a ledger could not be followed or taken.
const PAUSE: Duration = Duration::from_secs(1);
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
    /// When it was last seen without an owner.
    vacant: Arc<Mutex<Option<tokio::time::Instant>>>,
}

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
    pub(super) fn new(ledgers: MetaDirs) -> Self {
        Self { ledgers, standbys: Mutex::default() }
    }

    /// Stops following all ledgers.
    pub(super) fn stop(&self) {
        lock(&self.standbys).clear();
    }
}

impl Member {
    /// Whether this node is among those that may own ledgers. Until it has heard of the cluster, it may.
    fn may_own(&self) -> bool {
        let cluster = self.cluster.borrow().clone();
        cluster.is_none_or(|cluster| {
            cluster.nodes.keys().take(CANDIDATES_MAX).any(|node| *node == self.network.here())
        })
    }

    async fn standby(self: &Arc<Self>, candidate: &Candidate, ledger: LedgerId) -> Result<Standby> {
        let (ledgers, cache_bytes) = (candidate.ledgers.clone(), self.cache_bytes(ledger));
        let files = tokio::task::spawn_blocking(move || ledgers.open(ledger, cache_bytes)).await??;
        Ok(Standby::new(StandbyOptions {
            ledger,
            log: files.log.clone(),
            state: files.state.clone(),
            owner: Arc::new(OwnerAnywhere { member: self.clone(), ledger }),
            replica: u64::from(self.network.here().0) + 1,
            wait: WAIT,
        })?)
    }

    fn cache_bytes(&self, ledger: LedgerId) -> usize {
        if ledger == CONTROL_LEDGER { CONTROL_CACHE_BYTES } else { self.memory.store_cache_bytes }
    }

    /// Follows the ledgers of all filesystems while this node may own them.
    fn follow_filesystems(self: &Arc<Self>, candidate: &Arc<Candidate>) {
        let Some(cluster) = self.cluster.borrow().clone().filter(|_| self.role().is_none()) else { return };
        let wanted: BTreeSet<LedgerId> = match self.may_own() {
            true => cluster.filesystems.values().map(|record| record.ledger).collect(),
            false => BTreeSet::new(),
        };
        let mut standbys = lock(&candidate.standbys);
        standbys.retain(|ledger, _| wanted.contains(ledger));
        for ledger in wanted {
            standbys.entry(ledger).or_insert_with(|| {
                let vacant = Arc::new(Mutex::new(None));
                let following = follow(self.clone(), candidate.clone(), ledger, vacant.clone());
                Following { task: self.runtime.spawn(following), vacant }
            });
        }
    }

    /// Waits until the last owner of a ledger is gone, and stops following it.
    async fn vacated(self: &Arc<Self>, candidate: &Arc<Candidate>, ledger: LedgerId) -> Result<()> {
        let vacant = {
            let mut standbys = lock(&candidate.standbys);
            let following = standbys.entry(ledger).or_insert_with(|| {
                let vacant = Arc::new(Mutex::new(None));
                let following = follow(self.clone(), candidate.clone(), ledger, vacant.clone());
                Following { task: self.runtime.spawn(following), vacant }
            });
            following.vacant.clone()
        };
        let seen = async {
            while lock(&vacant).is_none_or(|at| at.elapsed() > VACANT) {
                tokio::time::sleep(LOOK).await;
            }
        };
        if tokio::time::timeout(VACATED_PATIENCE, seen).await.is_err() {
            bail!("ledger {ledger} still has its last owner, or its log cannot be read");
        }
        let following = lock(&candidate.standbys).remove(&ledger);
        if let Some(mut following) = following {
            following.task.abort();
            let _ = (&mut following.task).await;
        }
        Ok(())
    }

    fn seat(self: &Arc<Self>, candidate: &Arc<Candidate>) -> Seat {
        let (member, followed) = (self.clone(), candidate.clone());
        Seat {
            network: self.network.clone(),
            host: self.host.clone(),
            drives: self.host.clone(),
            paths: self.host.paths(),
            drive_settings: self.host.settings(),
            audit: self.gate.audit(),
            ledgers: candidate.ledgers.clone(),
            memory: self.memory,
            out_after: self.out_after,
            offers: self.offers.clone(),
            vacated: Box::new(move |ledger| {
                let (member, followed) = (member.clone(), followed.clone());
                Box::pin(async move { member.vacated(&followed, ledger).await })
            }),
        }
    }
}

/// Follows a ledger of a filesystem, and notes when it has no owner.
async fn follow(
    member: Arc<Member>,
    candidate: Arc<Candidate>,
    ledger: LedgerId,
    vacant: Arc<Mutex<Option<tokio::time::Instant>>>,
) {
    loop {
        let followed = async {
            let mut standby = member.standby(&candidate, ledger).await?;
            loop {
                standby.follow(&*member.env.clock).await?;
                *lock(&vacant) = Some(tokio::time::Instant::now());
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

/// Follows the control ledger, and takes all ledgers when it has no owner. Ends when this node has owned them, and another one does
/// now.
pub(super) async fn run(member: Arc<Member>, candidate: Arc<Candidate>) {
    loop {
        let waited = wait_for_vacancy(&member, &candidate).await;
        let after = match waited {
            Ok(after) => after,
            Err(error) => {
                tracing::error!(error = %format!("{error:#}"), "the control ledger cannot be followed, trying again");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        if !member.may_own() {
            tokio::time::sleep(PAUSE).await;
            continue;
        }
        tracing::warn!(epoch = %after, "the ledgers have no owner: taking them");
        match take(&member, &candidate, after).await {
            Ok(role) => {
                role.keep().await;
                return;
            }
            Err(error) => {
                tracing::warn!(error = %format!("{error:#}"), "this node did not become the owner of the ledgers");
                tokio::time::sleep(LOOK).await;
            }
        }
    }
}

/// Follows the control ledger until it has no owner. Returns the epoch of the last one.
async fn wait_for_vacancy(member: &Arc<Member>, candidate: &Arc<Candidate>) -> Result<Epoch> {
    let mut standby = member.standby(candidate, CONTROL_LEDGER).await?;
    let followed = standby.follow(&*member.env.clock);
    tokio::pin!(followed);
    loop {
        tokio::select! {
            after = &mut followed => return after.context("following the control ledger"),
            () = tokio::time::sleep(PAUSE) => member.follow_filesystems(candidate),
        }
    }
}

async fn take(member: &Arc<Member>, candidate: &Arc<Candidate>, after: Epoch) -> Result<Arc<Node>> {
    let seat = member.seat(candidate);
    let taken = Node::take(member.env.clone(), member.dir.clone(), seat, after).await;
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
    member.tell_owner(owner).await;
    Ok(role)
}
