//! Room on the drives: how much there is, and waiting for more when what was deleted is on its way back.

use std::sync::atomic::Ordering;
use std::time::Duration;

use base::FsError;

use crate::Client;

/// Pause between two looks at whether room has come back.
const PAUSE: Duration = Duration::from_millis(100);
/// Looks without any progress after which the drives are taken to be full. Longer than a few heartbeats of a session
/// that reads: until the next one after its read, deleted space waits for it.
const IDLE_ROUNDS_MAX: u32 = 15;
/// Looks altogether: a writer does not wait longer, even if room comes back too slowly.
const ROUNDS_MAX: u32 = 200;
/// Purge steps and pages of free extents per look.
const STEPS_PER_ROUND: u32 = 64;

/// Somebody's wait for deleted space.
#[derive(Debug, Default)]
pub(crate) struct RoomWait {
    rounds: u32,
    idle: u32,
    used_bytes: u64,
}

impl RoomWait {
    /// Hastens reclamation and gives the drives a moment. Returns whether it is worth trying again.
    pub(crate) async fn step(&mut self, client: &Client) -> Result<bool, FsError> {
        // Everybody who finds the drives full waits for the same work.
        let _one = client.inner.making_room.lock().await;
        let deleted = client.hasten_reclaim().await?;
        tokio::time::sleep(PAUSE).await;
        let used_bytes = client.inner.extents.topology().used_bytes();
        let progress = deleted > 0 || used_bytes < self.used_bytes;
        self.used_bytes = used_bytes;
        self.idle = if progress { 0 } else { self.idle + 1 };
        self.rounds += 1;
        Ok(self.idle <= IDLE_ROUNDS_MAX && self.rounds <= ROUNDS_MAX)
    }
}

impl Client {
    /// Looks at how much room the drives have.
    pub(crate) fn refresh_room(&self) {
        let room = self.inner.extents.topology().room_bytes();
        self.inner.room_bytes.store(room, Ordering::Relaxed);
        let mut stalled = self.inner.stalled.lock().expect("no holder of this lock panics");
        if *stalled == Some(FsError::NoSpace) && room / 2 > self.inner.dirty_bytes.load(Ordering::Relaxed) {
            *stalled = None;
        }
    }

    /// Whether there is room for what is dirty and `bytes` more.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        let dirty = self.inner.dirty_bytes.load(Ordering::Relaxed);
        dirty + bytes <= self.inner.room_bytes.load(Ordering::Relaxed)
    }

    /// Hastens and awaits the return of deleted space.
    ///
    /// # Errors
    /// `NoSpace` when nothing more comes back.
    pub(crate) async fn wait_for_room(&self, bytes: u64) -> Result<(), FsError> {
        let mut wait = RoomWait::default();
        loop {
            self.refresh_room();
            if self.has_room(bytes) {
                return Ok(());
            }
            if !wait.step(self).await? {
                return Err(FsError::NoSpace);
            }
        }
    }

    /// What the reclaimer does in its own time. Returns how many extents were deleted.
    async fn hasten_reclaim(&self) -> Result<u64, FsError> {
        self.inner.session.heartbeat().await?;
        for _ in 0..STEPS_PER_ROUND {
            if !self.purge_step().await? {
                break;
            }
        }
        let (mut cursor, mut deleted) = (None, 0);
        for _ in 0..STEPS_PER_ROUND {
            let step = self.reclaim_step(cursor).await?;
            deleted += step.deleted;
            cursor = step.next;
            if cursor.is_none() {
                break;
            }
        }
        Ok(deleted)
    }
}
