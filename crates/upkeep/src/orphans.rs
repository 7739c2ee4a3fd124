//! Finds and deletes extents that no map refers to and none ever will: those of writers that ended before they
//! committed.
//!
//! It checks only ids of closed ranges, and only some time after a range was closed, when no write of its session can
//! still arrive at a drive. First the drives list their shards, then all maps are scanned, then the owner confirms. A
//! range is forgotten once every drive was asked; a drive that is away keeps it closed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::env::Env;
use base::{DriveId, FsError};
use client::{Client, ClosedRange};
use tokio::runtime::Handle;
use wire::meta::Content;

use crate::pace::Pace;
use crate::task::{Stopped, Task};

/// Ranges checked in one pass: a few megabytes of memory.
const RANGES: usize = 64;
/// The pause after a pass is this many times as long as the pass, up to a limit.
const REST: u32 = 8;
const REST_MAX: Duration = Duration::from_secs(120);

/// When an orphan collector acts.
#[derive(Debug, Clone, Copy)]
pub struct OrphanOptions {
    /// How long a range must have been seen closed. It must exceed the time that a write to a drive may take.
    pub settle: Duration,
    /// Pause between two passes.
    pub pause: Duration,
}

impl Default for OrphanOptions {
    fn default() -> Self {
        Self { settle: Duration::from_secs(60), pause: Duration::from_secs(20) }
    }
}

/// The progress of a collector since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OrphanStat {
    /// Extents deleted.
    pub deleted_extents: u64,
    /// Ranges that are closed and not verified, as of the last pass.
    pub closed_ranges: u64,
    /// Ranges from which sessions may take ids, as of the last pass.
    pub open_ranges: u64,
    /// Ranges that were forgotten because no drive holds an orphan of them.
    pub verified_ranges: u64,
    /// When the drives were last compared with the maps (boot clock).
    pub swept_ns: Option<u64>,
}

/// Collects the orphans of one filesystem, in the background.
pub struct OrphanCollector {
    stat: Arc<Mutex<OrphanStat>>,
    task: Task,
}

impl OrphanCollector {
    /// Starts collecting.
    pub fn start(
        env: Env,
        client: Client,
        pace: Arc<Pace>,
        options: OrphanOptions,
        runtime: &Handle,
    ) -> Self {
        let stat: Arc<Mutex<OrphanStat>> = Arc::default();
        let (closed, asked) = Default::default();
        let work_stat = Arc::clone(&stat);
        let work =
            |stopped| Work { env, client, pace, options, stat: work_stat, stopped, closed, asked }.run();
        Self { stat, task: Task::start(runtime, work) }
    }

    /// Stops after the step under way.
    pub async fn stop(self) {
        self.task.stop().await;
    }

    /// Progress so far.
    pub fn stat(&self) -> OrphanStat {
        *lock(&self.stat)
    }
}

fn lock(stat: &Mutex<OrphanStat>) -> MutexGuard<'_, OrphanStat> {
    stat.lock().expect("no holder of this lock panics")
}

struct Work {
    env: Env,
    client: Client,
    pace: Arc<Pace>,
    options: OrphanOptions,
    stat: Arc<Mutex<OrphanStat>>,
    stopped: Stopped,
    /// When each closed range was first seen.
    closed: BTreeMap<ClosedRange, u64>,
    /// The drives that were asked about a range. It is checked again only when another drive can be asked.
    asked: BTreeMap<ClosedRange, BTreeSet<DriveId>>,
}

impl Work {
    async fn run(mut self) {
        while !self.stopped.now() {
            let began_ns = self.env.clock.boot_ns();
            if let Err(error) = self.pass().await {
                tracing::warn!(%error, "the collection of orphans pauses");
            }
            let took = Duration::from_nanos(self.env.clock.boot_ns().saturating_sub(began_ns));
            self.stopped.or_after(self.options.pause.max((took * REST).min(REST_MAX))).await;
        }
    }

    /// Checks the ranges that are due.
    async fn pass(&mut self) -> Result<(), FsError> {
        let now = self.env.clock.boot_ns();
        let ranges = self.client.extent_ranges().await?;
        let closed: BTreeSet<ClosedRange> = ranges.closed.into_iter().collect();
        {
            let mut stat = lock(&self.stat);
            (stat.closed_ranges, stat.open_ranges) = (closed.len() as u64, ranges.open);
        }
        self.closed.retain(|range, _| closed.contains(range));
        self.asked.retain(|range, _| closed.contains(range));
        for range in closed {
            self.closed.entry(range).or_insert(now);
        }
        let ready: BTreeSet<DriveId> = self.client.drives_to_ask().0.into_iter().collect();
        let settled = |since: &u64| now.saturating_sub(*since) >= self.options.settle.as_nanos() as u64;
        let news = |range: &ClosedRange| self.asked.get(range).is_none_or(|asked| !ready.is_subset(asked));
        let due = self.closed.iter().filter(|(range, since)| settled(since) && news(range));
        let due: Vec<ClosedRange> = due.map(|(range, _)| *range).take(RANGES).collect();
        if due.is_empty() || self.pace.is_paused() {
            return Ok(());
        }
        self.collect(&due).await
    }

    /// Deletes the orphans of these ranges.
    async fn collect(&mut self, ranges: &[ClosedRange]) -> Result<(), FsError> {
        let mut inventory = self.client.inventory(ranges).await;
        let mut after = None;
        loop {
            let (entries, next) = self.client.scan_map(after).await?;
            for entry in entries {
                // An extent that only a blob has needs no shards on drives.
                if let Content::Extent(extent) = &entry.piece.content {
                    inventory.referred(extent.id);
                }
            }
            after = next;
            if after.is_none() {
                break;
            }
            if self.stopped.now() {
                return Ok(());
            }
            tokio::task::yield_now().await;
        }
        let (deleted, everywhere) = self.client.delete_orphans(&inventory).await?;
        lock(&self.stat).deleted_extents += deleted;
        if deleted > 0 {
            tracing::info!(deleted, "extents that nothing refers to were deleted");
        }
        for range in ranges {
            if inventory.silent.is_empty() && everywhere {
                self.client.range_verified(*range).await?;
                self.closed.remove(range);
                let mut stat = lock(&self.stat);
                stat.verified_ranges += 1;
                stat.closed_ranges = stat.closed_ranges.saturating_sub(1);
            } else if everywhere {
                self.asked.insert(*range, inventory.asked.iter().copied().collect());
            }
        }
        lock(&self.stat).swept_ns = Some(self.env.clock.boot_ns());
        Ok(())
    }
}
