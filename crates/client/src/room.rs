//! Room on the drives: how much there is, and waiting for more when what was deleted is on its way back.

use std::sync::atomic::Ordering;
use std::time::Duration;

use base::FsError;
use tokio::time::{sleep, timeout};

use crate::Client;

/// Pause between two looks at whether room has come back.
const PAUSE: Duration = Duration::from_millis(100);
/// Looks without any progress after which the drives are taken to be full.
const IDLE_ROUNDS_MAX: u32 = 10;
/// The same while deleted space waits for reads that may use it. Sessions say every 3 s which they run: longer than a
/// few times that, also on a busy machine.
const IDLE_ROUNDS_WITHHELD: u32 = 100;
/// The same with a store, which may not be asked at once.
const IDLE_ROUNDS_TIERED: u32 = 150;
/// The same while blobs are on their way to it: so long a large one takes on a slow line.
const IDLE_ROUNDS_UPLOADING: u32 = 900;
/// Looks while nothing leaves for a store: a writer does not wait longer, even if room comes back too slowly.
const ROUNDS_MAX: u32 = 200;
/// Bytes that are taken from the drives at each look, if a store has them.
const RELEASED_PER_ROUND: u64 = 64 << 20;
/// Purge steps and pages of free extents per look.
const STEPS_PER_ROUND: u32 = 64;

/// Somebody's wait for deleted space.
#[derive(Debug, Default)]
pub(crate) struct RoomWait {
    rounds: u32,
    idle: u32,
    used_bytes: u64,
    uploaded_bytes: u64,
}

/// What hastening reclamation did.
#[derive(Debug, Clone, Copy)]
struct Reclaimed {
    /// Something was deleted, or there is more to do.
    progress: bool,
    /// Deleted space waits for reads that may use it.
    withheld: bool,
}

impl RoomWait {
    /// Hastens reclamation and gives the drives a moment. Returns whether it is worth trying again.
    pub(crate) async fn step(&mut self, client: &Client) -> Result<bool, FsError> {
        // Everybody who finds the drives full waits for the same work.
        let _one = client.inner.making_room.lock().await;
        let released = client.make_room_in_tier().await?;
        let reclaimed = client.hasten_reclaim().await?;
        let drives = client.inner.extents.topology();
        let (made, ()) = tokio::join!(timeout(PAUSE, drives.make_room()), sleep(PAUSE));
        let used_bytes = client.inner.extents.topology().used_bytes();
        let uploaded_bytes = client.uploaded_bytes();
        let leaves = released > 0 || uploaded_bytes > self.uploaded_bytes;
        // A drive that has not answered makes room still.
        let progress = reclaimed.progress || used_bytes < self.used_bytes || leaves || made.is_err();
        (self.used_bytes, self.uploaded_bytes) = (used_bytes, uploaded_bytes);
        let away = &client.inner.away;
        let idle_max = match (away.is_uploading(), away.store().is_some(), reclaimed.withheld) {
            (true, ..) => IDLE_ROUNDS_UPLOADING,
            (_, true, _) => IDLE_ROUNDS_TIERED,
            (_, _, true) => IDLE_ROUNDS_WITHHELD,
            _ => IDLE_ROUNDS_MAX,
        };
        Ok(self.goes_on(progress, leaves, idle_max))
    }

    /// Whether to look again after a look that saw `progress`, or that content `leaves` for a store.
    fn goes_on(&mut self, progress: bool, leaves: bool, idle_max: u32) -> bool {
        self.idle = if progress { 0 } else { self.idle + 1 };
        // As long as content leaves for the store, room is on its way.
        let waits_for_blobs = leaves || idle_max == IDLE_ROUNDS_UPLOADING;
        self.rounds = if leaves { 0 } else { self.rounds + u32::from(!waits_for_blobs) };
        self.idle <= idle_max && self.rounds <= ROUNDS_MAX
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

    /// Whether somebody waits for room right now, however much of it is on its way back.
    pub fn makes_room(&self) -> bool {
        self.inner.making_room.try_lock().is_err()
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

    /// Takes from the drives what the store has, oldest first, whatever its age. Returns how many extents.
    async fn make_room_in_tier(&self) -> Result<u64, FsError> {
        if self.inner.away.store().is_none() {
            return Ok(0);
        }
        self.release_by(u64::MAX - 1, RELEASED_PER_ROUND).await.map(|released| released.extents)
    }

    /// What the reclaimer does in its own time.
    async fn hasten_reclaim(&self) -> Result<Reclaimed, FsError> {
        self.inner.session.heartbeat().await?;
        let mut purging = true;
        for _ in 0..STEPS_PER_ROUND {
            purging = self.purge_step().await?;
            if !purging {
                break;
            }
        }
        let mut reclaimed = Reclaimed { progress: purging, withheld: false };
        let mut cursor = None;
        for _ in 0..STEPS_PER_ROUND {
            let step = self.reclaim_step(cursor).await?;
            reclaimed.progress |= step.deleted > 0;
            reclaimed.withheld = step.withheld;
            cursor = step.next;
            if cursor.is_none() {
                break;
            }
        }
        Ok(reclaimed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_waits_as_long_as_blobs_arrive_in_a_store_however_slow_it_is() {
        let mut wait = RoomWait::default();
        for look in 0..10_000 {
            let leaves = look % 400 == 0;
            assert!(wait.goes_on(leaves, leaves, IDLE_ROUNDS_UPLOADING), "look {look}");
        }
        // Others make room and take it: that ends.
        let looks = (0..10_000).take_while(|_| wait.goes_on(true, false, IDLE_ROUNDS_TIERED)).count();
        assert_eq!(looks, ROUNDS_MAX as usize);
    }

    #[test]
    fn a_writer_does_not_wait_for_a_store_that_takes_nothing() {
        for idle_max in [IDLE_ROUNDS_MAX, IDLE_ROUNDS_WITHHELD, IDLE_ROUNDS_TIERED, IDLE_ROUNDS_UPLOADING] {
            let mut wait = RoomWait::default();
            let looks = (0..10_000).take_while(|_| wait.goes_on(false, false, idle_max)).count();
            assert_eq!(looks, idle_max as usize);
        }
    }
}
