//! Room on the drives: how much there is, and waiting for deleted space to return.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::FsError;
use tokio::time::{sleep, timeout};

use crate::Client;
use crate::topology::Limits;

/// Pause between two checks of the room.
const PAUSE: Duration = Duration::from_millis(100);
/// Checks without progress after which the drives count as full.
const IDLE_ROUNDS_MAX: u32 = 10;
/// The same while deleted space waits for reads that may use it. Sessions report their reads with every heartbeat; this
/// is many times longer, for busy machines.
const IDLE_ROUNDS_WITHHELD: u32 = 100;
/// The same with a store, which may not be asked at once.
const IDLE_ROUNDS_TIERED: u32 = 150;
/// The same while blobs are on their way to the store: a large one takes this long on a slow line.
const IDLE_ROUNDS_UPLOADING: u32 = 900;
/// Checks while no content leaves for a store. A writer waits no longer, even if room returns slowly.
const ROUNDS_MAX: u32 = 200;
/// Bytes that each check takes from the drives, if a store has them.
const RELEASED_PER_ROUND: u64 = 64 << 20;
/// Purge steps and pages of free extents per check.
const STEPS_PER_ROUND: u32 = 64;

/// How many more bytes of content can be stored, as of the last refresh.
#[derive(Debug, Default)]
pub(crate) struct Room {
    /// Bytes that fit on the drives.
    drives: AtomicU64,
    /// Bytes that the filesystem may still take of the drives.
    quota: AtomicU64,
    /// Bytes that the filesystem may still hold on all tiers.
    provisioned: AtomicU64,
}

impl Room {
    fn look(&self, drives: u64, limits: Limits, (used, on_drives): (u64, u64)) {
        let beyond = |limit: Option<u64>, used| limit.map_or(u64::MAX, |limit| limit.saturating_sub(used));
        self.drives.store(drives, Ordering::Relaxed);
        self.quota.store(beyond(limits.ssd_bytes, on_drives), Ordering::Relaxed);
        self.provisioned.store(beyond(limits.provisioned_bytes, used), Ordering::Relaxed);
    }

    /// Subtracts bytes that were stored since the last refresh.
    pub(crate) fn stored(&self, bytes: u64) {
        for limit in [&self.drives, &self.quota, &self.provisioned] {
            let less = |left: u64| (left < u64::MAX).then(|| left.saturating_sub(bytes));
            let _unlimited = limit.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    pub(crate) fn drives(&self) -> u64 {
        self.drives.load(Ordering::Relaxed)
    }

    pub(crate) fn fits_on_drives(&self, bytes: u64) -> bool {
        bytes <= self.drives().min(self.quota.load(Ordering::Relaxed))
    }

    fn provisioned(&self) -> u64 {
        self.provisioned.load(Ordering::Relaxed)
    }

    fn bytes(&self) -> u64 {
        self.drives().min(self.quota.load(Ordering::Relaxed)).min(self.provisioned())
    }
}

fn per_mille(used: u64, of: u64) -> u64 {
    (u128::from(used.min(of)) * 1000).div_ceil(u128::from(of.max(1))) as u64
}

/// State of one wait for deleted space.
#[derive(Debug, Default)]
pub(crate) struct RoomWait {
    /// Bytes that a writer waits for on top of the dirty ones, if it is a writer that waits.
    taking: Option<u64>,
    rounds: u32,
    idle: u32,
    /// Checks since the store last got content, while blobs are on their way to it.
    on_their_way: u32,
    used_bytes: u64,
    uploaded_bytes: u64,
}

/// The result of hastening reclamation.
#[derive(Debug, Clone, Copy, Default)]
struct Reclaimed {
    /// Extents were deleted, or there is more to purge.
    progress: bool,
    /// Deleted space waits for reads that may use it.
    withheld: bool,
}

/// The result of one check of the room. All waits that began before a check share it, so that any number of writers
/// find out together that the drives are full.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RoomCheck {
    /// Checks are numbered as they begin.
    number: u64,
    /// Extents that were released from the drives because a store has them.
    released: u64,
    reclaimed: Reclaimed,
    /// A drive has not answered yet: it is still making room.
    is_late: bool,
}

impl RoomWait {
    /// Hastens reclamation and waits for a moment. Returns whether trying again is worthwhile.
    pub(crate) async fn step(&mut self, client: &Client) -> Result<bool, FsError> {
        if self.is_beyond_provisioned(client) {
            return self.wait_for_deletion(client).await;
        }
        let RoomCheck { released, reclaimed, is_late, .. } = client.look_for_room().await?;
        let used_bytes = client.inner.extents.topology().used_bytes();
        let uploaded_bytes = client.uploaded_bytes();
        let leaves = released > 0 || uploaded_bytes > self.uploaded_bytes;
        let progress = reclaimed.progress || used_bytes < self.used_bytes || leaves || is_late;
        (self.used_bytes, self.uploaded_bytes) = (used_bytes, uploaded_bytes);
        let away = &client.inner.blobs;
        let idle_max = match (client.is_uploading(), away.store().is_some(), reclaimed.withheld) {
            (true, ..) => IDLE_ROUNDS_UPLOADING,
            (_, true, _) => IDLE_ROUNDS_TIERED,
            (_, _, true) => IDLE_ROUNDS_WITHHELD,
            _ => IDLE_ROUNDS_MAX,
        };
        Ok(self.goes_on(progress, leaves, idle_max))
    }

    fn is_beyond_provisioned(&self, client: &Client) -> bool {
        let dirty = client.inner.dirty_bytes.load(Ordering::Relaxed);
        self.taking.is_some_and(|bytes| dirty + bytes > client.inner.room.provisioned())
    }

    /// Waits for deletions, as nothing else helps. Files that were just deleted may still have to be closed.
    async fn wait_for_deletion(&mut self, client: &Client) -> Result<bool, FsError> {
        sleep(PAUSE).await;
        client.inner.session.heartbeat().await?;
        let (used_bytes, _) = client.inner.session.used();
        let progress = used_bytes < self.used_bytes;
        self.used_bytes = used_bytes;
        Ok(self.goes_on(progress, false, IDLE_ROUNDS_MAX))
    }

    /// Whether to check again, after a check that saw `progress`, or content that `leaves` for a store.
    fn goes_on(&mut self, progress: bool, leaves: bool, idle_max: u32) -> bool {
        self.idle = if progress { 0 } else { self.idle + 1 };
        // While content leaves for the store, room will come. Other progress does not extend the wait for ever.
        let waits_for_blobs = leaves || idle_max == IDLE_ROUNDS_UPLOADING;
        self.rounds = if leaves { 0 } else { self.rounds + u32::from(!waits_for_blobs) };
        self.on_their_way = if leaves || !waits_for_blobs { 0 } else { self.on_their_way + 1 };
        self.idle <= idle_max && self.rounds <= ROUNDS_MAX && self.on_their_way <= IDLE_ROUNDS_UPLOADING
    }
}

impl Client {
    /// Hastens the return of deleted space. If another caller began to do so after this call, it waits for that result
    /// instead.
    async fn look_for_room(&self) -> Result<RoomCheck, FsError> {
        let peers = &self.inner.peers.0;
        let begun = peers.room_checks.load(Ordering::Acquire);
        let mut last = peers.making_room.lock().await;
        if last.number > begun {
            // Each session gets its own figures of use.
            self.inner.session.heartbeat().await?;
            return Ok(*last);
        }
        let number = peers.room_checks.fetch_add(1, Ordering::AcqRel) + 1;
        let released = self.make_room_in_tier().await?;
        let reclaimed = self.hasten_reclaim().await?;
        let drives = self.inner.extents.topology();
        let (made, ()) = tokio::join!(timeout(PAUSE, drives.make_room()), sleep(PAUSE));
        *last = RoomCheck { number, released, reclaimed, is_late: made.is_err() };
        Ok(*last)
    }

    /// Refreshes the figures of room.
    pub(crate) fn refresh_room(&self) {
        let topology = self.inner.extents.topology();
        let drives = topology.room_bytes();
        self.inner.room.look(drives, topology.limits, self.inner.session.used());
        let mut stalled = self.inner.stalled.lock().expect("no holder of this lock panics");
        let room = self.inner.room.bytes();
        if *stalled == Some(FsError::NoSpace) && room / 2 > self.inner.dirty_bytes.load(Ordering::Relaxed) {
            *stalled = None;
        }
    }

    /// Whether there is room for the dirty bytes and `bytes` more.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        let dirty = self.inner.dirty_bytes.load(Ordering::Relaxed);
        dirty + bytes <= self.inner.room.bytes()
    }

    /// Hastens and awaits the return of deleted space.
    ///
    /// # Errors
    /// `NoSpace` when no more space returns.
    pub(crate) async fn wait_for_room(&self, bytes: u64) -> Result<(), FsError> {
        let mut wait = RoomWait { taking: Some(bytes), ..RoomWait::default() };
        self.inner.session.heartbeat().await?;
        loop {
            self.refresh_room();
            if self.has_room(bytes) {
                return Ok(());
            }
            if !wait.step(self).await? {
                self.note_refused(bytes);
                return Err(FsError::NoSpace);
            }
        }
    }

    /// Bytes of file data that the drives have room for, including deleted space that has not returned yet.
    pub fn free_bytes(&self) -> u64 {
        let topology = self.inner.extents.topology();
        let (_, on_drives) = self.inner.session.used();
        let quota = topology.limits.ssd_bytes.map_or(u64::MAX, |quota| quota.saturating_sub(on_drives));
        topology.reclaimable_bytes().min(quota)
    }

    /// The fill of the drives, or of the filesystem's share of them if that is fuller, in thousandths. Deleted space
    /// that has not returned yet does not count.
    pub fn fill_per_mille(&self) -> u64 {
        self.fills().map(|(used, capacity)| per_mille(used, capacity)).max().unwrap_or_default()
    }

    /// Bytes that must leave the drives until their fill is at most `to_per_mille`.
    pub fn excess_bytes(&self, to_per_mille: u64) -> u64 {
        let excess = |(used, capacity): (u64, u64)| used.saturating_sub(capacity / 1000 * to_per_mille);
        self.fills().map(excess).max().unwrap_or_default()
    }

    /// Bytes in use and capacity: of all drives, and of the filesystem's share of them.
    fn fills(&self) -> impl Iterator<Item = (u64, u64)> {
        let topology = self.inner.extents.topology();
        let capacity = topology.capacity_bytes(self.inner.profile);
        let used = capacity.saturating_sub(topology.reclaimable_bytes());
        let (_, on_drives) = self.inner.session.used();
        let quota = topology.limits.ssd_bytes.map(|quota| (on_drives, quota));
        std::iter::once((used, capacity)).chain(quota)
    }

    /// Releases extents from the drives that the store has, oldest first, regardless of age. Returns how many.
    async fn make_room_in_tier(&self) -> Result<u64, FsError> {
        if self.inner.blobs.store().is_none_or(|store| store.brings_back().is_some()) {
            return Ok(0);
        }
        self.release_by(u64::MAX - 1, RELEASED_PER_ROUND).await.map(|released| released.extents)
    }

    /// Runs the steps of the reclaimer at once.
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
    fn a_writer_waits_while_blobs_arrive_even_in_a_slow_store() {
        let mut wait = RoomWait::default();
        for look in 0..10_000 {
            let leaves = look % 400 == 0;
            assert!(wait.goes_on(leaves, leaves, IDLE_ROUNDS_UPLOADING), "look {look}");
        }
        // Others make room and take it: that wait ends.
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
        // A drive that does not answer does not extend the wait for such a store.
        let mut wait = RoomWait::default();
        let looks = (0..10_000).take_while(|_| wait.goes_on(true, false, IDLE_ROUNDS_UPLOADING)).count();
        assert_eq!(looks, IDLE_ROUNDS_UPLOADING as usize);
    }
}
