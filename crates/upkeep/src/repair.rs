//! Restores redundancy: pays owed shards, and rebuilds the shards of drives that are gone.
//!
//! The ledger lists owed shards: the commit that went ahead without a shard wrote the entry, so a drive that was away
//! for a while gets exactly the shards that it missed. Shards of a lost drive are found by comparing the inventories of
//! the others with the placement groups. Both may be repeated without harm, because a shard never has two contents.

mod progress;
mod rebuild;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::env::Env;
use base::{DriveId, Epoch, ExtentId, FsError, NodeId, PgId};
use client::{Client, Flaw, OwedEntry, RepairOutcome};
use futures_util::future::join_all;
use layout::shard_len;
use tokio::runtime::Handle;

use crate::others::OtherNodes;
use crate::pace::{Pace, Permit, Urgency};
use crate::task::{Stopped, Task};
use progress::Progress;

pub use progress::RepairStat;

/// Pause when there is nothing to do.
const IDLE: Duration = Duration::from_millis(500);
/// Shards in an order to a node. Each holds k shards, usually of 1 MiB, in memory.
const SHARDS: usize = 2;
/// Orders that each node works on at a time.
const ORDERS: usize = 2;

/// The time for which a node is not asked again that did not restore shards.
const HELP_PAUSE_NS: u64 = 30_000_000_000;

/// Repairs and rebuilds one filesystem, in the background.
pub struct Repairer {
    progress: Arc<Progress>,
    task: Task,
}

/// One repairer's task.
struct Work {
    env: Env,
    client: Client,
    others: Option<Arc<dyn OtherNodes>>,
    pace: Arc<Pace>,
    progress: Arc<Progress>,
    stopped: Stopped,
    /// Drives that did not accept a shard in this pass.
    silent: Mutex<HashSet<DriveId>>,
    /// Nodes that did not restore shards, with the boot time at which they are asked again.
    unhelpful: Mutex<HashMap<NodeId, u64>>,
    rebuild: rebuild::Memory,
}

impl Repairer {
    /// Starts repair, by all nodes if there are others.
    pub fn start(
        env: Env,
        client: Client,
        others: Option<Arc<dyn OtherNodes>>,
        pace: Arc<Pace>,
        runtime: &Handle,
    ) -> Self {
        let progress = Arc::new(Progress::new(env.clone()));
        let work = {
            let (silent, unhelpful, rebuild) = Default::default();
            let progress = progress.clone();
            move |stopped| {
                Work { env, client, others, pace, progress, stopped, silent, unhelpful, rebuild }.run()
            }
        };
        Self { progress, task: Task::start(runtime, work) }
    }

    /// Stops after the step under way.
    pub async fn stop(self) {
        self.task.stop().await;
    }

    /// Progress so far.
    pub fn stat(&self) -> RepairStat {
        self.progress.stat()
    }

    /// The groups whose new members have all their shards, with the epoch for which that holds.
    pub fn rebuilt(&self) -> HashMap<PgId, Epoch> {
        self.progress.rebuilt()
    }
}

impl Work {
    async fn run(mut self) {
        while !self.stopped.now() {
            lock(&self.silent).clear();
            if let Err(error) = self.pass().await {
                tracing::warn!(%error, "repair pauses");
            }
            self.progress.idle();
            self.stopped.or_after(IDLE).await;
        }
    }

    async fn pass(&mut self) -> Result<(), FsError> {
        self.pay().await?;
        self.heal().await?;
        self.rebuild().await?;
        self.count_narrow().await
    }

    /// Pays all shards that are owed to drives that accept them.
    async fn pay(&mut self) -> Result<(), FsError> {
        let (mut cursor, mut lost) = (None, 0);
        loop {
            let page = self.client.owed_page(cursor).await?;
            let mut owed: HashMap<ExtentId, u8> = HashMap::new();
            page.payable.iter().for_each(|shard| *owed.entry(shard.id).or_default() += 1);
            let is_bare = |shard: &OwedEntry| owed[&shard.id] >= shard.n - shard.k;
            lost += self.restore(&page.payable, Kind::Owed, &is_bare).await?.lost;
            cursor = page.next;
            if self.stopped.now() {
                return Ok(());
            }
            if cursor.is_none() {
                self.progress.set_lost_owed(lost);
                return Ok(());
            }
        }
    }

    /// Restores shards that reads found damaged or missing. If one cannot be restored now, another read finds it again.
    async fn heal(&mut self) -> Result<(), FsError> {
        let (damaged, missing): (Vec<_>, Vec<_>) =
            self.client.take_damaged().into_iter().partition(|(_, flaw)| *flaw == Flaw::Damaged);
        for (shards, kind) in [(damaged, Kind::Damaged), (missing, Kind::NotFound)] {
            let shards: Vec<OwedEntry> = shards.into_iter().map(|(shard, _)| shard).collect();
            self.restore(&shards, kind, &|_| false).await?;
        }
        Ok(())
    }

    /// Restores shards, those of each node there, as the pace allows it. `is_bare`: one more loss would lose the extent.
    async fn restore(
        &self,
        shards: &[OwedEntry],
        kind: Kind,
        is_bare: &(dyn Fn(&OwedEntry) -> bool + Sync),
    ) -> Result<Restored, FsError> {
        let mut by_node: BTreeMap<Option<NodeId>, VecDeque<OwedEntry>> = BTreeMap::new();
        for shard in shards {
            by_node.entry(self.node_of(shard)).or_default().push_back(*shard);
        }
        let queues: Vec<_> = by_node.into_iter().map(|(node, queue)| (node, Mutex::new(queue))).collect();
        let workers = queues.iter().flat_map(|queue| [queue; ORDERS]);
        let workers = workers.map(|(node, queue)| self.work_off(*node, queue, kind, is_bare));
        let restored: Vec<Result<Restored, FsError>> = join_all(workers).await;
        restored.into_iter().try_fold(Restored::default(), |all, some| Ok(all.and(some?)))
    }

    /// Restores shards of a queue at a node, a few at a time.
    async fn work_off(
        &self,
        node: Option<NodeId>,
        queue: &Mutex<VecDeque<OwedEntry>>,
        kind: Kind,
        is_bare: &(dyn Fn(&OwedEntry) -> bool + Sync),
    ) -> Result<Restored, FsError> {
        let mut restored = Restored::default();
        loop {
            let some: Vec<OwedEntry> = {
                let mut queue = lock(queue);
                let count = queue.len().min(SHARDS);
                queue.drain(..count).collect()
            };
            if some.is_empty() {
                return Ok(restored);
            }
            let urgency = if some.iter().any(is_bare) { Urgency::Bare } else { Urgency::Usual };
            restored = restored.and(self.restore_some(node, &some, (kind, urgency)).await?);
        }
    }

    /// The other node that restores a shard; `None`: this one does.
    fn node_of(&self, shard: &OwedEntry) -> Option<NodeId> {
        let others = self.others.as_ref()?;
        self.client.node_of(shard).filter(|node| *node != others.here() && self.helps(*node))
    }

    fn helps(&self, node: NodeId) -> bool {
        lock(&self.unhelpful).get(&node).is_none_or(|due| *due <= self.env.clock.boot_ns())
    }

    /// Restores a few shards at once. A drive that did not accept one is skipped for the rest of the pass.
    async fn restore_some(
        &self,
        node: Option<NodeId>,
        shards: &[OwedEntry],
        (kind, urgency): (Kind, Urgency),
    ) -> Result<Restored, FsError> {
        let mut restored = Restored::default();
        if self.stopped.now() {
            restored.put_off = shards.len() as u64;
            return Ok(restored);
        }
        let wanted: Vec<OwedEntry> = {
            let silent = lock(&self.silent);
            shards.iter().filter(|shard| !silent.contains(&shard.drive)).copied().collect()
        };
        restored.put_off = (shards.len() - wanted.len()) as u64;
        let bytes: u64 = wanted.iter().map(|shard| u64::from(shard_len(shard.extent_len, shard.k))).sum();
        while self.pace.permit_at(node, bytes, (self.client.strained(), urgency)).await == Permit::NotYet {
            if self.stopped.now() {
                restored.put_off += wanted.len() as u64;
                return Ok(restored);
            }
        }
        let outcomes = self.outcomes(node, &wanted).await;
        let mut stored = Vec::new();
        for (shard, outcome) in wanted.iter().zip(outcomes) {
            match outcome {
                RepairOutcome::Stored { bytes } => {
                    self.progress.stored(node, kind, bytes);
                    self.client.forget_damaged(shard);
                    self.client.count_repaired(u64::from(kind == Kind::Damaged));
                    stored.push(*shard);
                }
                RepairOutcome::NotNow => {
                    lock(&self.silent).insert(shard.drive);
                    restored.put_off += 1;
                }
                // The deletion of the extent also removes its owed shards.
                RepairOutcome::Gone => {}
                RepairOutcome::Unreadable => {
                    self.client.suspect_shard(shard);
                    restored.lost += 1;
                }
            }
        }
        if kind == Kind::Owed {
            self.client.tell_repaired(&stored).await?;
        }
        Ok(restored)
    }

    /// Has shards restored, by another node if it does that. What it cannot do, this one tries: the network may differ.
    async fn outcomes(&self, node: Option<NodeId>, shards: &[OwedEntry]) -> Vec<RepairOutcome> {
        let elsewhere = match node.filter(|node| self.helps(*node)) {
            Some(node) => self.outcomes_at(node, shards).await,
            None => Vec::new(),
        };
        let outcomes = shards.iter().enumerate().map(async |(at, shard)| match elsewhere.get(at) {
            Some(done @ (RepairOutcome::Stored { .. } | RepairOutcome::Gone)) => *done,
            _ => self.client.repair_shard(shard).await,
        });
        join_all(outcomes).await
    }

    /// What another node does; empty if it does nothing.
    async fn outcomes_at(&self, node: NodeId, shards: &[OwedEntry]) -> Vec<RepairOutcome> {
        let Some(others) = &self.others else { return Vec::new() };
        let order = others.restore(node, self.client.map_epoch(), shards.to_vec());
        let outcomes =
            self.client.without_deletions(order).await.filter(|outcomes| outcomes.len() == shards.len());
        match &outcomes {
            Some(outcomes) => self.progress.helped(node, outcomes),
            None => {
                let due = self.env.clock.boot_ns() + HELP_PAUSE_NS;
                lock(&self.unhelpful).insert(node, due);
            }
        }
        outcomes.unwrap_or_default()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder of this lock panics")
}

/// Why a shard is restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A commit went ahead without it.
    Owed,
    /// Its position now belongs to another drive.
    Missing,
    /// It was found damaged.
    Damaged,
    /// A read did not find it.
    NotFound,
}

/// The result for some shards.
#[derive(Debug, Clone, Copy, Default)]
struct Restored {
    /// Shards that have to be tried again.
    put_off: u64,
    /// Shards of extents with fewer than k other readable shards.
    lost: u64,
}

impl Restored {
    fn and(self, other: Self) -> Self {
        Self { put_off: self.put_off + other.put_off, lost: self.lost + other.lost }
    }
}
