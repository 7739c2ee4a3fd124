//! Uploads give way to users, unless they are urgent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use client::Client;
use wire::store::SendPace;

use super::CROWDED_PER_MILLE;
use crate::pace::Pace;
use crate::task::Stopped;

/// All rests of one blob together: a request to a store has a deadline, which must leave time for slow lines.
const RESTS_MAX: Duration = Duration::from_secs(60);

/// The pace of a blob that is not urgent.
pub(super) struct GivesWay {
    client: Client,
    pace: Arc<Pace>,
    stopped: Stopped,
    rested_ns: AtomicU64,
}

impl GivesWay {
    pub(super) fn new(client: Client, pace: Arc<Pace>, stopped: Stopped) -> Self {
        Self { client, pace, stopped, rested_ns: AtomicU64::new(0) }
    }

    /// Whether nobody is helped by rests: who waits for room, or for the end of this, and drives that are filling up.
    fn is_urgent_now(&self) -> bool {
        let client = &self.client;
        self.stopped.now() || client.makes_room() || client.fill_per_mille() >= CROWDED_PER_MILLE
    }
}

impl SendPace for GivesWay {
    fn rest_after(&self, bytes: u64) -> Duration {
        if !self.client.is_in_use() || self.is_urgent_now() {
            return Duration::ZERO;
        }
        let rest = self.pace.rest_in_use(bytes);
        let rested_ns = self.rested_ns.fetch_add(rest.as_nanos() as u64, Ordering::Relaxed);
        rest.min(RESTS_MAX.saturating_sub(Duration::from_nanos(rested_ns)))
    }
}
