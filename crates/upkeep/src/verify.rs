//! Compares now and then all shards that the ledger expects with those that the drives list, and has restored what is missing.
//!
//! A read finds a missing shard only if it needs it, so a missing parity shard would be found when it is too late. The ledger is
//! scanned in parts. The drives are asked a second time about a shard that none of them has listed, because extents are deleted and shards
//! move during a scan. The shard is missing if the drives do not list it again, a file still uses the extent after that, and the shard was
//! not owed before.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::env::Env;
use base::{ExtentId, FsError, PgId, ShardIndex};
use client::{Client, ShardCount};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use wire::meta::{Content, ExtentRef, MapEntry, PiecePosition};

use crate::pace::Pace;
use crate::task::{Stopped, Task};

/// The pause after a part of the ledger is this many times as long as the part took: a fifth of a core at most.
const REST: u32 = 4;
const REST_MAX: Duration = Duration::from_secs(5);
/// Pause before the second look, and while background work is paused or repair has enough to do.
const PAUSE: Duration = Duration::from_secs(1);
/// Extents that several pieces share, as far as they are remembered to be counted once.
const SHARED_MAX: usize = 1 << 20;
/// Owed shards that are looked at. If there are more, nothing is called missing.
const OWED_MAX: usize = 100_000;
/// Pause after a sweep that failed, or that found something missing: the next one says whether that was restored. It doubles while that
/// does not get less.
const AGAIN: Duration = Duration::from_secs(10);
/// The pauses are as many times longer while users wait for drives.
const STRAINED: u32 = 8;

/// When a verifier acts.
#[derive(Debug, Clone, Copy)]
pub struct VerifyOptions {
    /// Pause before the first sweep.
    pub begin: Duration,
    /// Pause between two sweeps.
    pub pause: Duration,
}

impl Default for VerifyOptions {
    fn default() -> Self {
        Self { begin: Duration::from_secs(60), pause: Duration::from_secs(3600) }
    }
}

/// A comparison of everything.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sweep {
    /// Its number since the start, from 1.
    pub number: u64,
    /// When it ended (boot clock).
    pub ended_ns: u64,
    /// How long it took.
    pub took: Duration,
    /// What it found, by placement group.
    pub groups: Arc<BTreeMap<PgId, ShardCount>>,
    /// The sum over all groups.
    pub total: ShardCount,
}

/// The progress of a verifier since its start.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VerifyStat {
    /// The last sweep that came to its end.
    pub last: Option<Sweep>,
    /// The number of the sweep that is under way, and how many shards it has looked for.
    pub now: Option<(u64, u64)>,
    /// Missing shards that all sweeps have found.
    pub found: u64,
}

/// Verifies the redundancy of one filesystem in the background.
pub struct Verifier {
    stat: Arc<Mutex<VerifyStat>>,
    asked: Arc<Notify>,
    task: Task,
}

impl Verifier {
    /// Starts verifying.
    pub fn start(
        env: Env,
        client: Client,
        pace: Arc<Pace>,
        options: VerifyOptions,
        runtime: &Handle,
    ) -> Self {
        let (stat, asked): (Arc<Mutex<VerifyStat>>, Arc<Notify>) = Default::default();
        let (work_stat, work_asked) = (stat.clone(), asked.clone());
        let work = move |stopped| {
            Work { env, client, pace, options, stat: work_stat, asked: work_asked, stopped }.run()
        };
        Self { stat, asked, task: Task::start(runtime, work) }
    }

    /// Stops after the step under way.
    pub async fn stop(self) {
        self.task.stop().await;
    }

    /// Progress so far.
    pub fn stat(&self) -> VerifyStat {
        lock(&self.stat).clone()
    }

    /// Begins a sweep now, or when the present one ends. Returns its number.
    pub fn verify_now(&self) -> u64 {
        let stat = lock(&self.stat);
        let last = stat.last.as_ref().map_or(0, |sweep| sweep.number);
        self.asked.notify_one();
        stat.now.map_or(last, |(number, _)| number) + 1
    }
}

fn lock(stat: &Mutex<VerifyStat>) -> MutexGuard<'_, VerifyStat> {
    stat.lock().expect("no holder of this lock panics")
}

struct Work {
    env: Env,
    client: Client,
    pace: Arc<Pace>,
    options: VerifyOptions,
    stat: Arc<Mutex<VerifyStat>>,
    asked: Arc<Notify>,
    stopped: Stopped,
}

impl Work {
    async fn run(mut self) {
        let mut pause = self.options.begin;
        let mut number = 1;
        loop {
            let asked = self.asked.clone();
            tokio::select! {
                () = self.stopped.or_after(pause) => {}
                () = asked.notified() => {}
            }
            if self.stopped.now() {
                return;
            }
            lock(&self.stat).now = Some((number, 0));
            let swept = self.sweep(number).await;
            pause = match swept {
                Ok(Some(sweep)) => {
                    number += 1;
                    self.done(sweep, pause)
                }
                Ok(None) => return,
                Err(error) => {
                    lock(&self.stat).now = None;
                    tracing::warn!(%error, "the comparison of drives with the ledger pauses");
                    AGAIN
                }
            };
        }
    }

    /// Notes what a sweep found. Returns the pause before the next one, after the `last` pause.
    fn done(&self, sweep: Sweep, last: Duration) -> Duration {
        let missing = sweep.total.missing;
        let mut stat = lock(&self.stat);
        let before = stat.last.as_ref().map_or(0, |sweep| sweep.total.missing);
        // What was missing before and could not be restored is no news.
        stat.found += missing.saturating_sub(before);
        (stat.last, stat.now) = (Some(sweep), None);
        drop(stat);
        if missing > 0 {
            tracing::warn!(
                missing,
                before,
                "drives do not have shards that they should have: they are restored if enough others are there"
            );
        }
        match missing {
            0 => self.options.pause,
            _ if before > 0 && missing >= before => (last * 2).clamp(AGAIN, self.options.pause.max(AGAIN)),
            _ => AGAIN.min(self.options.pause),
        }
    }

    /// Compares everything; `None` if it is to stop.
    async fn sweep(&mut self, number: u64) -> Result<Option<Sweep>, FsError> {
        let began_ns = self.env.clock.boot_ns();
        let (mut groups, mut shared, mut after) = (BTreeMap::new(), HashSet::new(), None);
        loop {
            while self.pace.is_paused() || self.client.is_full_of_damage() {
                self.stopped.or_after(PAUSE).await;
                if self.stopped.now() {
                    return Ok(None);
                }
            }
            let step_ns = self.env.clock.boot_ns();
            after = self.step(after, &mut groups, &mut shared).await?;
            let now_ns = self.env.clock.boot_ns();
            if after.is_none() {
                let took = Duration::from_nanos(now_ns.saturating_sub(began_ns));
                let total = groups.values().fold(ShardCount::default(), |sum, count| sum.and(*count));
                return Ok(Some(Sweep { number, ended_ns: now_ns, took, groups: Arc::new(groups), total }));
            }
            let took = Duration::from_nanos(now_ns.saturating_sub(step_ns));
            let times = if self.client.strained() { REST * STRAINED } else { REST };
            self.stopped.or_after((took * times).min(REST_MAX)).await;
            if self.stopped.now() {
                return Ok(None);
            }
        }
    }

    /// Compares the part of the ledger after a piece. Returns where the next part begins.
    async fn step(
        &mut self,
        after: Option<PiecePosition>,
        groups: &mut BTreeMap<PgId, ShardCount>,
        shared: &mut HashSet<ExtentId>,
    ) -> Result<Option<PiecePosition>, FsError> {
        let (entries, next) = self.client.scan_map(after).await?;
        let extents: Vec<ExtentRef> = entries.iter().filter_map(|entry| once(entry, shared)).collect();
        let mut verified = self.client.verify(&extents).await;
        for (extent, shard, look) in self.look_again(after, &verified.missing).await? {
            let count = verified.groups.entry(extent.pg).or_default();
            count.missing -= u64::from(look != SecondLook::Missing);
            count.owed += u64::from(look == SecondLook::Owed);
            count.unknown += u64::from(look == SecondLook::Unknown);
            if look == SecondLook::Missing {
                tracing::debug!(extent = %extent.id, shard = shard.0, group = %extent.pg, "a drive lacks a shard");
                self.client.report_missing(&extent, shard);
            }
        }
        let looked: u64 = verified.groups.values().map(|count| count.expected).sum();
        for (group, count) in verified.groups {
            let sum: &mut ShardCount = groups.entry(group).or_default();
            *sum = sum.and(count);
        }
        if let Some((_, so_far)) = &mut lock(&self.stat).now {
            *so_far += looked;
        }
        Ok(next)
    }

    /// What is true of shards that were not found in a part of the ledger.
    async fn look_again(
        &mut self,
        after: Option<PiecePosition>,
        missing: &[(ExtentRef, ShardIndex)],
    ) -> Result<Vec<(ExtentRef, ShardIndex, SecondLook)>, FsError> {
        if missing.is_empty() {
            return Ok(Vec::new());
        }
        self.stopped.or_after(PAUSE).await;
        let owed = self.client.owed(OWED_MAX).await?;
        let is_whole = owed.len() < OWED_MAX;
        let owed: HashSet<(ExtentId, ShardIndex)> =
            owed.iter().map(|entry| (entry.id, entry.shard)).collect();
        let mut extents: Vec<ExtentRef> = missing.iter().map(|(extent, _)| *extent).collect();
        extents.dedup_by_key(|extent| extent.id);
        let again = self.client.verify(&extents).await;
        let again: HashSet<(ExtentId, ShardIndex)> =
            again.missing.iter().map(|(extent, shard)| (extent.id, *shard)).collect();
        let (entries, _) = self.client.scan_map(after).await?;
        let referred: HashSet<ExtentId> =
            entries.iter().filter_map(on_drives).map(|extent| extent.id).collect();
        let second = |(extent, shard): &(ExtentRef, ShardIndex)| {
            let name = (extent.id, *shard);
            let look = match () {
                () if owed.contains(&name) => SecondLook::Owed,
                () if !again.contains(&name) || !referred.contains(&extent.id) => SecondLook::There,
                () if is_whole => SecondLook::Missing,
                () => SecondLook::Unknown,
            };
            (*extent, *shard, look)
        };
        Ok(missing.iter().map(second).collect())
    }
}

/// What a second look says of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SecondLook {
    Missing,
    Owed,
    Unknown,
    /// It is there now, or nothing refers to it any more.
    There,
}

/// The extent of a piece, if it is on drives.
fn on_drives(entry: &MapEntry) -> Option<ExtentRef> {
    match &entry.piece.content {
        Content::Extent(extent) => Some(*extent),
        Content::Inline(_) | Content::Tiered(..) => None,
    }
}

/// The extent of a piece, unless another piece that shares it came before.
fn once(entry: &MapEntry, shared: &mut HashSet<ExtentId>) -> Option<ExtentRef> {
    let extent = on_drives(entry)?;
    let is_shared = entry.live_bytes.is_some() && shared.len() < SHARED_MAX;
    (!is_shared || shared.insert(extent.id)).then_some(extent)
}
