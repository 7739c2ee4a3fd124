//! Uploads give way to users, unless they are urgent.

use std::sync::Arc;
use std::time::Duration;

use client::Client;
use wire::store::SendPace;

use crate::pace::Pace;

/// The pace of a blob that is not urgent.
pub(super) struct GivesWay {
    pub(super) client: Client,
    pub(super) pace: Arc<Pace>,
}

impl SendPace for GivesWay {
    fn rest_after(&self, bytes: u64) -> Duration {
        // A writer that waits for room is not helped by rests.
        if self.client.is_in_use() && !self.client.makes_room() {
            self.pace.rest_in_use(bytes)
        } else {
            Duration::ZERO
        }
    }
}
