//! Movement of content that gives way to users, unless it is urgent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use client::Client;
use wire::store::MovePace;

use crate::pace::Pace;

/// The limit on all rests of one blob or one step of fetching. A request has a deadline, which must leave time for slow
/// lines.
const RESTS_MAX: Duration = Duration::from_secs(60);

/// The pace of a blob or of a step of fetching: half the rate of background work while the filesystem is in use.
pub struct GivesWay {
    client: Client,
    pace: Arc<Pace>,
    is_urgent: Box<dyn Fn(&Client) -> bool + Send + Sync>,
    rested_ns: AtomicU64,
}

impl GivesWay {
    /// There are no rests while `is_urgent` returns `true`.
    pub fn new(
        client: Client,
        pace: Arc<Pace>,
        is_urgent: impl Fn(&Client) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { client, pace, is_urgent: Box::new(is_urgent), rested_ns: AtomicU64::new(0) }
    }
}

impl MovePace for GivesWay {
    fn rest_after(&self, bytes: u64) -> Duration {
        if !self.client.is_in_use() || (self.is_urgent)(&self.client) {
            return Duration::ZERO;
        }
        within_limit(self.pace.rest_in_use(bytes), &self.rested_ns)
    }
}

/// The pace of a blob that another node planned, while users are to be given way to.
pub struct Steady {
    bytes_per_s: u64,
    rested_ns: AtomicU64,
}

impl Steady {
    /// A pace of at most `bytes_per_s`; `None` if that is 0: the blob need not give way.
    pub fn at(bytes_per_s: u64) -> Option<Arc<dyn MovePace>> {
        (bytes_per_s > 0)
            .then(|| Arc::new(Self { bytes_per_s, rested_ns: AtomicU64::new(0) }) as Arc<dyn MovePace>)
    }
}

impl MovePace for Steady {
    fn rest_after(&self, bytes: u64) -> Duration {
        let rest = Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / self.bytes_per_s);
        within_limit(rest, &self.rested_ns)
    }
}

/// A rest, or what is left of all that one transfer may take.
fn within_limit(rest: Duration, rested_ns: &AtomicU64) -> Duration {
    let before_ns = rested_ns.fetch_add(rest.as_nanos() as u64, Ordering::Relaxed);
    rest.min(RESTS_MAX.saturating_sub(Duration::from_nanos(before_ns)))
}
