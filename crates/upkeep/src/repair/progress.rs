//! The progress of a repairer, and its rate.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use base::env::Env;
use base::{Epoch, PgId};

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
    /// Bytes in extents that are narrower than the filesystem's profile, as of the last count.
    pub narrow_bytes: u64,
}

#[derive(Default)]
struct State {
    stat: RepairStat,
    lost_owed: u64,
    rate_since_ns: Option<u64>,
    rate_bytes: u64,
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

    pub(super) fn stored(&self, kind: Kind, bytes: u64) {
        let now = self.env.clock.boot_ns();
        let mut state = self.lock();
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
            }
        }
        state.rate_bytes += bytes;
        let since_ns = *state.rate_since_ns.get_or_insert(now);
        let elapsed = now.saturating_sub(since_ns);
        if elapsed >= RATE_NS {
            let rate = (u128::from(state.rate_bytes) * 1_000_000_000 / u128::from(elapsed)) as u64;
            let before = state.stat.bytes_per_s;
            state.stat.bytes_per_s = match before {
                0 => rate,
                _ => (before.saturating_mul(SMOOTHING - 1).saturating_add(rate)) / SMOOTHING,
            };
            (state.rate_since_ns, state.rate_bytes) = (Some(now), 0);
        }
    }

    pub(super) fn idle(&self) {
        let mut state = self.lock();
        (state.rate_since_ns, state.rate_bytes, state.stat.bytes_per_s) = (None, 0, 0);
    }

    pub(super) fn set_left(&self, bytes: u64) {
        self.lock().stat.rebuild_left_bytes = bytes;
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
        RepairStat { lost_extents: state.stat.lost_extents + state.lost_owed, ..state.stat }
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
                progress.stored(Kind::Missing, bytes);
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
}
