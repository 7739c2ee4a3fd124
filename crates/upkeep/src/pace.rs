//! How fast background work may go: a token bucket shared by all reconcilers of a node.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use base::env::Env;
use base::units::MIB;

use crate::bucket::Bucket;

/// The default rate.
const DEFAULT_BYTES_PER_S: u64 = 256 * MIB;
/// The lowest rate: slower work would never finish.
pub const BYTES_PER_S_MIN: u64 = MIB;
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
}

impl Pace {
    /// A pace at the default rate.
    pub fn new(env: Env) -> Self {
        let tokens = Bucket::new(env.clock.boot_ns());
        Self { env, bytes_per_s: AtomicU64::new(DEFAULT_BYTES_PER_S), paused: AtomicBool::new(false), tokens }
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

    /// The rest of work that is not urgent after it moved `bytes` while the filesystem is in use: it goes evenly, at
    /// half the rate.
    pub(crate) fn rest_in_use(&self, bytes: u64) -> Duration {
        Duration::from_nanos(bytes.saturating_mul(2_000_000_000) / self.bytes_per_s())
    }

    /// Takes `bytes` if they may move now; otherwise returns how long to wait.
    fn take(&self, bytes: u64, strained: bool, now_ns: u64) -> Result<(), Duration> {
        if self.is_paused() {
            return Err(WAIT_MAX);
        }
        let rate = self.bytes_per_s() / if strained { 2 } else { 1 };
        self.tokens.take(bytes, rate, rate * BURST_S, now_ns).map_err(|wait| wait.min(WAIT_MAX))
    }

    /// As [`Pace::permit`], for work that has a limit of its own and only reads from drives: it waits only when drives
    /// are strained or background work is paused.
    pub(crate) async fn permit_if_strained(&self, bytes: u64, strained: bool) -> Permit {
        if strained || self.is_paused() { self.permit(bytes, strained).await } else { Permit::Given }
    }

    /// Waits for permission to move `bytes`, at most for a moment.
    pub(crate) async fn permit(&self, bytes: u64, strained: bool) -> Permit {
        match self.take(bytes, strained, self.env.clock.boot_ns()) {
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
        let (mut now, mut bytes) = (10 * S, 0);
        let end = now + seconds * S;
        while now < end {
            match pace.take(MIB, strained, now) {
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
