//! Restores redundancy: pays owed shards, and rebuilds the shards of drives that are gone.
//!
//! The ledger lists owed shards: the commit that went ahead without a shard wrote the entry, so a drive that was away
//! for a while gets exactly the shards that it missed. Shards of a lost drive are found by comparing the inventories of
//! the others with the placement groups. Both may be repeated without harm, because a shard never has two contents.

mod progress;
mod rebuild;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use base::env::Env;
use base::{DriveId, Epoch, ExtentId, FsError, PgId};
use client::{Client, Flaw, OwedEntry, RepairOutcome};
use futures_util::future::join_all;
use layout::shard_len;
use tokio::runtime::Handle;

use crate::pace::{Pace, Permit, Urgency};
use crate::task::{Stopped, Task};
use progress::Progress;

pub use progress::RepairStat;

/// Pause when there is nothing to do.
const IDLE: Duration = Duration::from_millis(500);
/// Shards restored at a time: each holds k shards, usually of 1 MiB, in memory.
const PARALLEL: usize = 4;

/// Repairs and rebuilds one filesystem, in the background.
pub struct Repairer {
    progress: Arc<Progress>,
    task: Task,
}

/// One repairer's task.
struct Work {
    env: Env,
    client: Client,
    pace: Arc<Pace>,
    progress: Arc<Progress>,
    stopped: Stopped,
    /// Drives that did not accept a shard in this pass.
    silent: HashSet<DriveId>,
    rebuild: rebuild::Memory,
}

impl Repairer {
    /// Starts repair.
    pub fn start(env: Env, client: Client, pace: Arc<Pace>, runtime: &Handle) -> Self {
        let progress = Arc::new(Progress::new(env.clone()));
        let (silent, rebuild) = Default::default();
        let work_progress = progress.clone();
        let work =
            |stopped| Work { env, client, pace, progress: work_progress, stopped, silent, rebuild }.run();
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
            self.silent.clear();
            if let Err(error) = self.pass().await {
                tracing::warn!(%error, "repair pauses");
            }
            self.progress.idle();
            self.stopped.or_after(IDLE).await;
        }
    }

    async fn pass(&mut self) -> Result<(), FsError> {
        self.pay().await?;
        self.heal().await;
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
            for some in page.payable.chunks(PARALLEL) {
                let is_bare = some.iter().any(|shard| owed[&shard.id] >= shard.n - shard.k);
                let restored = self.restore(some, Kind::Owed, urgency(is_bare)).await;
                lost += restored.lost;
                self.client.tell_repaired(&restored.stored).await?;
                if self.stopped.now() {
                    return Ok(());
                }
            }
            cursor = page.next;
            if cursor.is_none() {
                self.progress.set_lost_owed(lost);
                return Ok(());
            }
        }
    }

    /// Restores shards that reads found damaged or missing. If one cannot be restored now, another read finds it again.
    async fn heal(&mut self) {
        let (damaged, missing): (Vec<_>, Vec<_>) =
            self.client.take_damaged().into_iter().partition(|(_, flaw)| *flaw == Flaw::Damaged);
        for (shards, kind) in [(damaged, Kind::Damaged), (missing, Kind::NotFound)] {
            let shards: Vec<OwedEntry> = shards.into_iter().map(|(shard, _)| shard).collect();
            for some in shards.chunks(PARALLEL) {
                self.restore(some, kind, Urgency::Usual).await;
            }
        }
    }

    /// Restores a few shards at once, when the pace allows it. A drive that did not accept one is skipped for the rest
    /// of the pass.
    async fn restore(&mut self, shards: &[OwedEntry], kind: Kind, urgency: Urgency) -> Restored {
        let mut restored = Restored::default();
        let wanted: Vec<OwedEntry> =
            shards.iter().filter(|shard| !self.silent.contains(&shard.drive)).copied().collect();
        restored.put_off = (shards.len() - wanted.len()) as u64;
        let bytes: u64 = wanted.iter().map(|shard| u64::from(shard_len(shard.extent_len, shard.k))).sum();
        while self.pace.permit_of(bytes, self.client.strained(), urgency).await == Permit::NotYet {
            if self.stopped.now() {
                restored.put_off += wanted.len() as u64;
                return restored;
            }
        }
        let client = &self.client;
        let outcomes = join_all(wanted.iter().map(|shard| client.repair_shard(shard)));
        for (shard, outcome) in wanted.iter().zip(outcomes.await) {
            match outcome {
                RepairOutcome::Stored { bytes } => {
                    self.progress.stored(kind, bytes);
                    self.client.forget_damaged(shard);
                    self.client.count_repaired(u64::from(kind == Kind::Damaged));
                    restored.stored.push(*shard);
                }
                RepairOutcome::NotNow => {
                    self.silent.insert(shard.drive);
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
        restored
    }
}

fn urgency(is_bare: bool) -> Urgency {
    if is_bare { Urgency::Bare } else { Urgency::Usual }
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

/// The result for a few shards.
#[derive(Debug, Default)]
struct Restored {
    stored: Vec<OwedEntry>,
    /// Shards that have to be tried again.
    put_off: u64,
    /// Shards of extents with fewer than k other readable shards.
    lost: u64,
}
