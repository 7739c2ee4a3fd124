//! How fast background work may go: a token bucket shared by all reconcilers of a node.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use base::NodeId;
use base::env::Env;
use base::units::MIB;
use wire::drive::Foreground;

use crate::bucket::Bucket;

/// The default rate.
const DEFAULT_BYTES_PER_S: u64 = 256 * MIB;
/// The lowest rate: slower work would never finish.
pub const BYTES_PER_S_MIN: u64 = MIB;
/// How long 99 of 100 requests of users may take at a drive, if nothing else was asked.
const KEEP_P99_BELOW: Duration = Duration::from_millis(100);
/// With fewer requests, nobody is held up.
const REQUESTS_MIN: u32 = 16;
/// Shares of the rate, in thousandths: the lowest to which background work is held back, so that it ends; what a look that
/// finds users waiting leaves of it; what one that does not gives back, and one that finds no users.
const SHARE_LEAST: u64 = 125;
const SHARE_LEFT: u64 = 700;
const SHARE_BACK: u64 = 50;
const SHARE_BACK_UNUSED: u64 = 250;
const SHARE_ALL: u64 = 1000;
/// Seconds' worth of bytes that may move at once after a rest.
const BURST_S: u64 = 1;
/// The longest wait, so that a stop or a change of the rate is noticed.
const WAIT_MAX: Duration = Duration::from_millis(200);

/// Whether background work may go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Permit {
    /// Now.
    Given,
    /// Ask again: the wait for permission ended without it.
    NotYet,
}

/// The limits of background work.
pub struct Pace {
    env: Env,
    bytes_per_s: AtomicU64,
    paused: AtomicBool,
    tokens: Bucket,
    /// The same of other nodes, for what is done there.
    elsewhere: Mutex<BTreeMap<NodeId, Bucket>>,
    /// In microseconds; 0: however long users wait.
    keep_p99_below_us: AtomicU64,
    /// As it was at the last look, in microseconds; 0: there were no users.
    p99_us: AtomicU64,
    share: AtomicU64,
}

/// Whether work may be held back for users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Usual.
    Usual,
    /// Another loss would lose data.
    Bare,
}

impl Pace {
    /// A pace at the default rate.
    pub fn new(env: Env) -> Self {
        let tokens = Bucket::new(env.clock.boot_ns());
        Self {
            env,
            bytes_per_s: AtomicU64::new(DEFAULT_BYTES_PER_S),
            paused: AtomicBool::new(false),
            tokens,
            elsewhere: Mutex::default(),
            keep_p99_below_us: AtomicU64::new(KEEP_P99_BELOW.as_micros() as u64),
            p99_us: AtomicU64::new(0),
            share: AtomicU64::new(SHARE_ALL),
        }
    }

    /// Bytes per second.
    pub fn bytes_per_s(&self) -> u64 {
        self.bytes_per_s.load(Ordering::Relaxed)
    }

    /// Changes the rate to `bytes_per_s`, but at least [`BYTES_PER_S_MIN`].
    pub fn set_bytes_per_s(&self, bytes_per_s: u64) {
        self.bytes_per_s.store(bytes_per_s.max(BYTES_PER_S_MIN), Ordering::Relaxed);
    }

    /// Whether background work is paused.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// Pauses background work or lets it continue.
    pub fn set_paused(&self, paused: bool) {
        self.paused.store(paused, Ordering::Relaxed);
    }

    /// The time in microseconds that 99 of 100 requests of users should not exceed at any drive; 0: there is no limit.
    pub fn keep_p99_below_us(&self) -> u64 {
        self.keep_p99_below_us.load(Ordering::Relaxed)
    }

    /// Changes that limit.
    pub fn set_keep_p99_below_us(&self, limit_us: u64) {
        self.keep_p99_below_us.store(limit_us, Ordering::Relaxed);
        if limit_us == 0 {
            self.share.store(SHARE_ALL, Ordering::Relaxed);
        }
    }

    /// What it was at the last look, in microseconds; 0: there were no users.
    pub fn p99_us(&self) -> u64 {
        self.p99_us.load(Ordering::Relaxed)
    }

    /// Bytes per second to which background work is held back now for users; `None`: it is not.
    pub fn held_to_bytes_per_s(&self) -> Option<u64> {
        let share = self.share.load(Ordering::Relaxed);
        (share < SHARE_ALL).then(|| self.shared(share))
    }

    fn shared(&self, share: u64) -> u64 {
        (self.bytes_per_s() / SHARE_ALL * share).max(BYTES_PER_S_MIN)
    }

    /// Looks at what users wait for, about once a second: at the drive where they wait longest.
    pub fn look(&self, drives: impl Iterator<Item = Foreground>) {
        let used = drives.filter(|drive| drive.requests >= REQUESTS_MIN);
        let p99_us = used.map(|drive| u64::from(drive.p99_us)).max();
        self.p99_us.store(p99_us.unwrap_or(0), Ordering::Relaxed);
        let (limit, share) = (self.keep_p99_below_us(), self.share.load(Ordering::Relaxed));
        let share = match p99_us {
            _ if limit == 0 => SHARE_ALL,
            Some(p99_us) if p99_us > limit => (share * SHARE_LEFT / SHARE_ALL).max(SHARE_LEAST),
            Some(_) => (share + SHARE_BACK).min(SHARE_ALL),
            None => (share + SHARE_BACK_UNUSED).min(SHARE_ALL),
        };
        self.share.store(share, Ordering::Relaxed);
    }

    /// The rest of work that is not urgent after it moved `bytes` while the filesystem is in use: it goes evenly, at
    /// half the rate.
    pub(crate) fn rest_in_use(&self, bytes: u64) -> Duration {
        Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / self.bytes_per_s_in_use())
    }

    /// The rate of such work.
    pub(crate) fn bytes_per_s_in_use(&self) -> u64 {
        (self.bytes_per_s() / 2).max(1)
    }

    /// Takes `bytes` if they may move now, at another node or here; otherwise returns how long to wait.
    fn take(
        &self,
        node: Option<NodeId>,
        bytes: u64,
        (strained, urgency): (bool, Urgency),
        now_ns: u64,
    ) -> Result<(), Duration> {
        if self.is_paused() {
            return Err(WAIT_MAX);
        }
        let held = match urgency {
            Urgency::Usual => self.shared(self.share.load(Ordering::Relaxed)),
            Urgency::Bare => self.bytes_per_s(),
        };
        let rate = held / if strained { 2 } else { 1 };
        let take = |tokens: &Bucket| tokens.take(bytes, rate, rate * BURST_S, now_ns);
        let taken = match node {
            None => take(&self.tokens),
            Some(node) => {
                let mut elsewhere = self.elsewhere.lock().expect("no holder of this lock panics");
                take(elsewhere.entry(node).or_insert_with(|| Bucket::new(now_ns)))
            }
        };
        taken.map_err(|wait| wait.min(WAIT_MAX))
    }

    /// As [`Pace::permit`], for work that has a limit of its own and only reads from drives: it waits only when drives
    /// are strained or background work is paused.
    pub(crate) async fn permit_if_strained(&self, bytes: u64, strained: bool) -> Permit {
        if strained || self.is_paused() { self.permit(bytes, strained).await } else { Permit::Given }
    }

    /// Waits for permission to move `bytes`, at most for a moment.
    pub(crate) async fn permit(&self, bytes: u64, strained: bool) -> Permit {
        self.permit_at(None, bytes, (strained, Urgency::Usual)).await
    }

    /// The same for work that may be urgent, and may be done at another node: each has the whole rate.
    pub(crate) async fn permit_at(
        &self,
        node: Option<NodeId>,
        bytes: u64,
        pressure: (bool, Urgency),
    ) -> Permit {
        match self.take(node, bytes, pressure, self.env.clock.boot_ns()) {
            Ok(()) => Permit::Given,
            Err(wait) => {
                tokio::time::sleep(wait).await;
                Permit::NotYet
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::env::sim::Sim;

    const S: u64 = 1_000_000_000;

    /// Bytes moved in `seconds` by steps of 1 MiB at the highest rate allowed.
    fn moved(pace: &Pace, seconds: u64, strained: bool) -> u64 {
        moved_of(pace, seconds, strained, Urgency::Usual)
    }

    fn moved_of(pace: &Pace, seconds: u64, strained: bool, urgency: Urgency) -> u64 {
        let (mut now, mut bytes) = (10 * S, 0);
        let end = now + seconds * S;
        while now < end {
            match pace.take(None, MIB, (strained, urgency), now) {
                Ok(()) => bytes += MIB,
                Err(wait) => now += (wait.as_nanos() as u64).max(1000),
            }
        }
        bytes
    }

    #[test]
    fn the_rate_is_kept_and_halved_under_strain() {
        for (strained, expected) in [(false, 20 * MIB), (true, 10 * MIB)] {
            let pace = Pace::new(Sim::new(1).env());
            pace.set_bytes_per_s(20 * MIB);
            let moved = moved(&pace, 10, strained);
            assert!((expected * 10..=expected * 11 + 2 * MIB).contains(&moved), "{moved}");
        }
    }

    #[test]
    fn work_that_is_not_urgent_goes_at_half_the_rate_while_the_filesystem_is_in_use() {
        let pace = Pace::new(Sim::new(1).env());
        pace.set_bytes_per_s(64 * MIB);
        assert_eq!(pace.rest_in_use(MIB / 4) * 4 * 32, Duration::from_secs(1));
        assert!(pace.rest_in_use(u64::MAX) > Duration::from_secs(200));
    }

    #[test]
    fn work_is_held_back_while_users_wait_and_gets_its_rate_back() {
        let pace = Pace::new(Sim::new(1).env());
        pace.set_bytes_per_s(80 * MIB);
        let look = |requests: u32, p99_ms: u32| {
            let quiet = Foreground { requests: 1000, p99_us: 200 };
            pace.look([quiet, Foreground { requests, p99_us: p99_ms * 1000 }].into_iter());
            pace.held_to_bytes_per_s()
        };
        assert_eq!(look(1000, 100), None, "not above the limit");
        assert_eq!(look(15, 5000), None, "a few requests are no users");
        assert_eq!(look(1000, 101).map(|held| held / MIB), Some(55));
        assert!(look(1000, 101) < Some(40 * MIB));
        (0..20).for_each(|_| assert!(look(1000, 101).is_some()));
        let least = look(1000, 5000).unwrap();
        assert_eq!(least / MIB, 9);
        assert_eq!(pace.p99_us(), 5_000_000);
        let moved = moved_of(&pace, 10, false, Urgency::Usual) / MIB;
        assert!((90..=120).contains(&moved), "{moved}");
        let pace_of_bare = Pace::new(Sim::new(1).env());
        pace_of_bare.set_bytes_per_s(80 * MIB);
        (0..20).for_each(|_| pace_of_bare.look([Foreground { requests: 99, p99_us: 900_000 }].into_iter()));
        let moved = moved_of(&pace_of_bare, 10, false, Urgency::Bare) / MIB;
        assert!(moved >= 790, "{moved}");
        let looks = (0..).find(|_| look(1000, 50).is_none()).unwrap();
        assert!((10..30).contains(&looks), "{looks}");
        look(1000, 500);
        (0..2).for_each(|_| pace.look(std::iter::empty()));
        assert_eq!((pace.held_to_bytes_per_s(), pace.p99_us()), (None, 0));
        look(1000, 500);
        pace.set_keep_p99_below_us(0);
        assert_eq!(pace.held_to_bytes_per_s(), None);
        assert_eq!(look(1000, 5000), None, "no limit");
    }

    #[test]
    fn a_pause_stops_everything_and_ends() {
        let pace = Pace::new(Sim::new(1).env());
        pace.set_paused(true);
        assert_eq!(moved(&pace, 5, false), 0);
        pace.set_paused(false);
        assert!(moved(&pace, 5, false) > 0);
        pace.set_bytes_per_s(1);
        assert_eq!(pace.bytes_per_s(), BYTES_PER_S_MIN);
    }
}
