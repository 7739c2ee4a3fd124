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
        let rest = self.pace.rest_in_use(bytes);
        let rested_ns = self.rested_ns.fetch_add(rest.as_nanos() as u64, Ordering::Relaxed);
        rest.min(RESTS_MAX.saturating_sub(Duration::from_nanos(rested_ns)))
    }
}
