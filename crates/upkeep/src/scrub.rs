//! Reads everything on the drives now and then and compares it with its checksums, so that damage is found while enough
//! other shards are good.
//!
//! A pass over a drive takes about [`PASS_S`], regardless of its fill. On demand it goes as fast as the pace of
//! background work allows. Damaged shards are handed to the repair of their filesystem.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::env::Env;
use base::units::MIB;
use base::{DriveId, LedgerId, ShardIndex};
use client::Client;
use tokio::runtime::Handle;
use tokio::sync::watch;
use wire::drive::{DriveHealth, DriveService, ShardKey};

use crate::pace::{Pace, Permit};
use crate::task::{Stopped, Task};

/// The time for a full pass in the background, in seconds.
const PASS_S: u64 = 14 * 24 * 3600;
const TICK: Duration = Duration::from_secs(1);
/// Bytes verified at a time in the background, and on demand.
const STEP_BYTES: u64 = MIB;
const STEP_BYTES_NOW: u64 = 8 * MIB;
/// Steps on demand before the other drives get a turn.
const STEPS_NOW: u32 = 16;
/// How often to check whether more damage can be reported, and the pause between two checks.
const FULL_TRIES: u32 = 100;
const FULL_PAUSE: Duration = Duration::from_millis(100);

/// The drives to scrub, and the clients to which damage is reported. Replaced as a whole when drives or filesystems
/// change.
#[derive(Clone, Default)]
pub struct ScrubTargets {
    /// The drives.
    pub drives: BTreeMap<DriveId, Arc<dyn DriveService>>,
    /// The filesystems by their ledgers.
    pub clients: BTreeMap<LedgerId, Client>,
}

/// The progress of the scrub of a drive. Times are of the wall clock, in nanoseconds since 1970: they survive restarts
/// and are for people only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScrubMark {
    /// When the pass under way began; `None` before the first.
    pub started_ns: Option<i64>,
    /// Where the pass continues.
    pub after: Option<ShardKey>,
    /// All older data was verified after this time; `None` until the first pass ends.
    pub verified_ns: Option<i64>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Drive {
    mark: ScrubMark,
    /// Bytes that may be verified now.
    credit_bytes: u64,
    now: bool,
    bad_shards: u64,
}

#[derive(Default)]
struct Shared {
    drives: Mutex<BTreeMap<DriveId, Drive>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<DriveId, Drive>> {
        self.drives.lock().expect("no holder of this lock panics")
    }
}

/// The state of the scrub of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScrubStat {
    /// Its progress.
    pub mark: ScrubMark,
    /// Damaged shards found since the start.
    pub bad_shards: u64,
    /// Whether a pass was requested and has not ended.
    pub now: bool,
}

/// Scrubs the drives of a node, in the background.
pub struct Scrubber {
    shared: Arc<Shared>,
    task: Task,
}

impl Scrubber {
    /// Starts with the marks of a former process.
    pub fn start(
        env: Env,
        marks: impl IntoIterator<Item = (DriveId, ScrubMark)>,
        targets: watch::Receiver<ScrubTargets>,
        pace: Arc<Pace>,
        runtime: &Handle,
    ) -> Self {
        let drives = marks.into_iter().map(|(id, mark)| (id, Drive { mark, ..Drive::default() }));
        let shared = Arc::new(Shared { drives: Mutex::new(drives.collect()) });
        let for_work = shared.clone();
        let work = |stopped| Work { env, shared: for_work, targets, pace, stopped }.run();
        Self { shared, task: Task::start(runtime, work) }
    }

    /// Stops after the step under way.
    pub async fn stop(self) {
        self.task.stop().await;
    }

    /// Begins a pass over a drive at once.
    pub fn scrub_now(&self, drive: DriveId) {
        let mut drives = self.shared.lock();
        let drive = drives.entry(drive).or_default();
        drive.now = true;
        (drive.mark.started_ns, drive.mark.after) = (None, None);
    }

    /// The state of every drive.
    pub fn stats(&self) -> BTreeMap<DriveId, ScrubStat> {
        let stat =
            |drive: &Drive| ScrubStat { mark: drive.mark, bad_shards: drive.bad_shards, now: drive.now };
        self.shared.lock().iter().map(|(id, drive)| (*id, stat(drive))).collect()
    }
}

struct Work {
    env: Env,
    shared: Arc<Shared>,
    targets: watch::Receiver<ScrubTargets>,
    pace: Arc<Pace>,
    stopped: Stopped,
}

impl Work {
    async fn run(mut self) {
        while !self.stopped.now() {
            let targets = self.targets.borrow().clone();
            let strained = targets.clients.values().any(Client::strained);
            let mut busy = false;
            for (id, service) in &targets.drives {
                if service.health() == DriveHealth::Up && !self.stopped.now() {
                    busy |= self.scrub(&targets, *id, &**service, strained).await;
                }
            }
            if !busy {
                self.stopped.or_after(TICK).await;
            }
        }
    }

    /// Scrubs a drive for a while. Returns whether to continue at once.
    async fn scrub(
        &self,
        targets: &ScrubTargets,
        id: DriveId,
        service: &dyn DriveService,
        strained: bool,
    ) -> bool {
        let now = {
            let mut drives = self.shared.lock();
            let drive = drives.entry(id).or_default();
            let earned = service.stat().live_bytes.div_ceil(PASS_S) * TICK.as_secs();
            drive.credit_bytes = (drive.credit_bytes + earned).min(2 * STEP_BYTES);
            if !drive.now && (drive.credit_bytes < STEP_BYTES || strained || self.pace.is_paused()) {
                return false;
            }
            drive.now
        };
        if !now {
            self.step(targets, id, service, STEP_BYTES).await;
            return false;
        }
        for _ in 0..STEPS_NOW {
            if self.stopped.now() || self.pace.permit(STEP_BYTES_NOW, strained).await == Permit::NotYet {
                return true;
            }
            if !self.step(targets, id, service, STEP_BYTES_NOW).await {
                return false;
            }
        }
        true
    }

    /// Verifies a part of a drive. Returns whether the pass continues.
    async fn step(
        &self,
        targets: &ScrubTargets,
        id: DriveId,
        service: &dyn DriveService,
        budget_bytes: u64,
    ) -> bool {
        let after = {
            let mut drives = self.shared.lock();
            let mark = &mut drives.entry(id).or_default().mark;
            mark.started_ns.get_or_insert(self.env.clock.wall_ns());
            mark.after
        };
        // A failed drive shows in its health.
        let Ok(step) = service.scrub(after, budget_bytes).await else { return false };
        for key in &step.bad {
            tracing::error!(drive = %id, ?key, "scrub found a damaged shard");
            report(targets, service, *key).await;
        }
        let mut drives = self.shared.lock();
        let drive = drives.entry(id).or_default();
        drive.bad_shards += step.bad.len() as u64;
        drive.credit_bytes = drive.credit_bytes.saturating_sub(step.verified_bytes);
        drive.mark.after = step.next;
        if step.next.is_none() {
            drive.mark.verified_ns = drive.mark.started_ns.take();
            drive.now = false;
        }
        step.next.is_some()
    }
}

/// Hands a damaged shard to repair. The list of the drive tells its shape.
async fn report(targets: &ScrubTargets, service: &dyn DriveService, key: ShardKey) {
    let before = match key.shard.0.checked_sub(1) {
        Some(shard) => ShardKey { shard: ShardIndex(shard), ..key },
        None => ShardKey {
            extent: base::ExtentId(key.extent.0.saturating_sub(1)),
            shard: ShardIndex(u8::MAX),
            ..key
        },
    };
    let Ok(list) = service.list(Some(before), 1).await else { return };
    if let (Some(entry), Some(client)) =
        (list.first().filter(|entry| entry.key == key), targets.clients.get(&key.ledger))
    {
        // Repair takes reported damage before the scrub finds more.
        for _ in 0..FULL_TRIES {
            if !client.is_full_of_damage() {
                break;
            }
            tokio::time::sleep(FULL_PAUSE).await;
        }
        client.report_damaged(entry);
    }
}
