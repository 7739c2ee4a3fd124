//! The progress of a repairer, and its rate.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use base::env::Env;
use base::{Epoch, NodeId, PgId};
use client::RepairOutcome;

use super::Kind;

/// The shortest time over which a rate is measured.
const RATE_NS: u64 = 1_000_000_000;
/// Of each new rate, one part in this many counts: what is left is told from the last ten seconds or so.
const SMOOTHING: u64 = 8;

/// The progress of a repairer since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RepairStat {
    /// Owed shards that were stored.
    pub repaired_shards: u64,
    /// Their bytes.
    pub repaired_bytes: u64,
    /// Shards that were restored on drives that took over positions.
    pub rebuilt_shards: u64,
    /// Their bytes.
    pub rebuilt_bytes: u64,
    /// Bytes of such shards that are still missing, as of the last pass.
    pub rebuild_left_bytes: u64,
    /// Shards that reads found damaged or missing and that were restored.
    pub healed_shards: u64,
    /// Bytes per second while repair is at work, smoothed over some ten seconds; 0 when it is idle.
    pub bytes_per_s: u64,
    /// Extents with fewer shards left than a read needs.
    pub lost_extents: u64,
    /// The time until the last node has rebuilt what its drives lack, at its present rate.
    pub slowest: Duration,
    /// Other nodes that restore shards now.
    pub helpers: u32,
    /// Shards that other nodes restored.
    pub helped_shards: u64,
    /// Bytes in extents that are narrower than the filesystem's profile, as of the last count.
    pub narrow_bytes: u64,
}

impl RepairStat {
    /// The time that repair of these bytes takes at the present rates; `None`: repair is idle.
    pub fn time_for(&self, bytes: u64) -> Option<Duration> {
        Some(time_for(bytes, self.bytes_per_s)?.max(self.slowest))
    }
}

fn time_for(bytes: u64, bytes_per_s: u64) -> Option<Duration> {
    (bytes_per_s > 0).then(|| Duration::from_millis(bytes.saturating_mul(1000) / bytes_per_s))
}

/// Bytes per second, smoothed over some ten seconds.
#[derive(Default)]
struct Gauge {
    since_ns: Option<u64>,
    bytes: u64,
    per_s: u64,
}

impl Gauge {
    fn add(&mut self, bytes: u64, now_ns: u64) {
        self.bytes += bytes;
        let since_ns = *self.since_ns.get_or_insert(now_ns);
        let elapsed = now_ns.saturating_sub(since_ns);
        if elapsed < RATE_NS {
            return;
        }
        let rate = (u128::from(self.bytes) * 1_000_000_000 / u128::from(elapsed)) as u64;
        self.per_s = match self.per_s {
            0 => rate,
            before => (before.saturating_mul(SMOOTHING - 1).saturating_add(rate)) / SMOOTHING,
        };
        (self.since_ns, self.bytes) = (Some(now_ns), 0);
    }
}

/// What one node restores.
#[derive(Default)]
struct AtNode {
    gauge: Gauge,
    /// Bytes that are still missing on its drives.
    left_bytes: u64,
    /// It is another node, and restored shards since repair was idle last.
    helps: bool,
}

#[derive(Default)]
struct State {
    stat: RepairStat,
    lost_owed: u64,
    gauge: Gauge,
    /// What each node restores; `None`: this one.
    nodes: BTreeMap<Option<NodeId>, AtNode>,
    rebuilt: HashMap<PgId, Epoch>,
}

/// Shared between a repairer's task and the callers of [`Progress::stat`].
pub(super) struct Progress {
    env: Env,
    state: Mutex<State>,
}

impl Progress {
    pub(super) fn new(env: Env) -> Self {
        Self { env, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Another node has restored shards.
    pub(super) fn helped(&self, node: NodeId, outcomes: &[RepairOutcome]) {
        let mut state = self.lock();
        state.nodes.entry(Some(node)).or_default().helps = true;
        let stored = outcomes.iter().filter(|outcome| matches!(outcome, RepairOutcome::Stored { .. }));
        state.stat.helped_shards += stored.count() as u64;
    }

    /// A node has restored a shard; `None`: this one.
    pub(super) fn stored(&self, node: Option<NodeId>, kind: Kind, bytes: u64) {
        let now_ns = self.env.clock.boot_ns();
        let mut state = self.lock();
        let state = &mut *state;
        let at_node = state.nodes.entry(node).or_default();
        let stat = &mut state.stat;
        match kind {
            Kind::Owed => {
                stat.repaired_shards += 1;
                stat.repaired_bytes += bytes;
            }
            Kind::Damaged | Kind::NotFound => stat.healed_shards += 1,
            Kind::Missing => {
                stat.rebuilt_shards += 1;
                stat.rebuilt_bytes += bytes;
                stat.rebuild_left_bytes = stat.rebuild_left_bytes.saturating_sub(bytes);
                at_node.left_bytes = at_node.left_bytes.saturating_sub(bytes);
            }
        }
        at_node.gauge.add(bytes, now_ns);
        state.gauge.add(bytes, now_ns);
        stat.bytes_per_s = state.gauge.per_s;
    }

    pub(super) fn idle(&self) {
        let mut state = self.lock();
        state.gauge = Gauge::default();
        state.nodes.clear();
        state.stat.bytes_per_s = 0;
    }

    /// The bytes that are missing on the drives of each node.
    pub(super) fn set_left(&self, bytes: &BTreeMap<Option<NodeId>, u64>) {
        let mut state = self.lock();
        state.stat.rebuild_left_bytes = bytes.values().sum();
        state.nodes.values_mut().for_each(|node| node.left_bytes = 0);
        for (node, bytes) in bytes {
            state.nodes.entry(*node).or_default().left_bytes = *bytes;
        }
    }

    pub(super) fn set_narrow(&self, bytes: u64) {
        self.lock().stat.narrow_bytes = bytes;
    }

    pub(super) fn set_lost_owed(&self, lost: u64) {
        self.lock().lost_owed = lost;
    }

    pub(super) fn add_lost(&self, lost: u64) {
        self.lock().stat.lost_extents += lost;
    }

    pub(super) fn set_rebuilt(&self, group: PgId, epoch: Epoch) {
        self.lock().rebuilt.insert(group, epoch);
    }

    pub(super) fn rebuilt(&self) -> HashMap<PgId, Epoch> {
        self.lock().rebuilt.clone()
    }

    pub(super) fn stat(&self) -> RepairStat {
        let state = self.lock();
        let left = state.nodes.values().filter_map(|node| time_for(node.left_bytes, node.gauge.per_s));
        RepairStat {
            lost_extents: state.stat.lost_extents + state.lost_owed,
            slowest: left.max().unwrap_or_default(),
            helpers: state.nodes.values().filter(|node| node.helps).count() as u32,
            ..state.stat
        }
    }
}

#[cfg(test)]
mod tests {
    use base::env::sim::Sim;

    use super::*;

    #[test]
    fn a_rate_is_that_of_some_seconds_and_ends_with_the_work() {
        let sim = Sim::new(1);
        let progress = Progress::new(sim.env());
        let work = |seconds: u64, bytes: u64| {
            for _ in 0..seconds {
                progress.stored(None, Kind::Missing, bytes);
                sim.clock.advance_ns(RATE_NS);
            }
            progress.stat().bytes_per_s
        };
        work(2, 100);
        assert!((90..=200).contains(&work(20, 100)));
        let steady = work(20, 100);
        assert!((99..=101).contains(&steady), "{steady}");
        let after_a_gap = work(2, 0);
        assert!((70..=steady).contains(&after_a_gap), "a moment without work changes little: {after_a_gap}");
        assert!(work(60, 400) > 390);
        progress.idle();
        assert_eq!(progress.stat().bytes_per_s, 0);
    }

    #[test]
    fn a_rebuild_ends_with_its_slowest_node() {
        let sim = Sim::new(1);
        let progress = Progress::new(sim.env());
        let (one, two) = (None, Some(NodeId(2)));
        progress.set_left(&[(one, 10_000), (two, 40_000)].into());
        for _ in 0..60 {
            progress.stored(one, Kind::Missing, 100);
            progress.stored(two, Kind::Missing, 200);
            sim.clock.advance_ns(RATE_NS);
        }
        let stat = progress.stat();
        assert_eq!(stat.rebuild_left_bytes, 50_000 - 60 * 300);
        let left = stat.time_for(stat.rebuild_left_bytes).unwrap();
        // 28,000 bytes at 200 a second, not 32,000 at 300.
        assert!((138..=146).contains(&left.as_secs()), "{left:?}");
        progress.set_left(&[].into());
        assert_eq!((progress.stat().slowest, progress.stat().rebuild_left_bytes), (Duration::ZERO, 0));
    }
}
