//! The client's registration with the owner: request ids, extent ids, running reads, heartbeats.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::{ExtentId, FsError, SessionId};
use tokio::sync::{Mutex as AsyncMutex, Semaphore};
use wire::meta::{EventSink, MetaReply, MetaRequest, MetaService, RequestId};

/// Requests under way at once.
const SLOTS: usize = 64;
/// Answers to events of the owner on their way at once. They never wait for others.
const ANSWER_SLOTS: usize = 16;

/// Slots that requests take one after another.
struct Lane {
    permits: Semaphore,
    slots: Mutex<Vec<(u32, u64)>>,
}

impl Lane {
    fn new(slots: std::ops::Range<usize>) -> Self {
        let permits = Semaphore::new(slots.len());
        Self { permits, slots: Mutex::new(slots.map(|slot| (slot as u32, 0)).collect()) }
    }
}

pub(crate) struct Session {
    meta: Arc<dyn MetaService>,
    id: SessionId,
    requests: Lane,
    /// Slots of their own, because requests may wait for other clients, and those for these answers.
    answers: Lane,
    ids: AsyncMutex<std::ops::Range<u64>>,
    /// The newest ledger version that a heartbeat reported.
    version: AtomicU64,
    /// Bytes of content, and those of them on drives, as of the last heartbeat.
    used_bytes: AtomicU64,
    drive_bytes: AtomicU64,
    /// Ledger versions at which running reads started, with the number of reads.
    reads: Mutex<BTreeMap<u64, u64>>,
}

/// Gives a slot back when the request is over or given up.
struct SlotGuard<'a> {
    lane: &'a Lane,
    slot: u32,
    seq: u64,
}

impl Drop for SlotGuard<'_> {
    fn drop(&mut self) {
        let mut slots = self.lane.slots.lock().expect("no holder of this lock panics");
        slots.push((self.slot, self.seq));
    }
}

/// Keeps the extents of maps that are known now from being deleted while a read uses them.
pub(crate) struct ReadGuard<'a> {
    session: &'a Session,
    version: u64,
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        let mut reads = self.session.reads.lock().expect("no holder of this lock panics");
        if let Some(count) = reads.get_mut(&self.version) {
            *count -= 1;
            if *count == 0 {
                reads.remove(&self.version);
            }
        }
    }
}

impl Session {
    pub(crate) async fn open(
        meta: Arc<dyn MetaService>,
        events: Arc<dyn EventSink>,
    ) -> Result<Self, FsError> {
        let id = meta.connect(events).await?;
        Ok(Self {
            meta,
            id,
            requests: Lane::new(0..SLOTS),
            answers: Lane::new(SLOTS..SLOTS + ANSWER_SLOTS),
            ids: AsyncMutex::new(0..0),
            version: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
            drive_bytes: AtomicU64::new(0),
            reads: Mutex::new(BTreeMap::new()),
        })
    }

    /// Sends a request. At most [`SLOTS`] are under way; further callers wait.
    pub(crate) async fn call(&self, request: MetaRequest) -> Result<MetaReply, FsError> {
        self.send(&self.requests, request).await
    }

    /// Sends an answer to an event, in slots of its own.
    pub(crate) async fn answer(&self, request: MetaRequest) -> Result<MetaReply, FsError> {
        self.send(&self.answers, request).await
    }

    async fn send(&self, lane: &Lane, request: MetaRequest) -> Result<MetaReply, FsError> {
        let _permit = lane.permits.acquire().await.map_err(|_| FsError::Unavailable)?;
        let slot = lane.slots.lock().expect("no holder of this lock panics").pop();
        let (slot, seq) = slot.expect("there are as many slots as permits");
        let guard = SlotGuard { lane, slot, seq: seq + 1 };
        let id = RequestId { session: self.id, slot, seq: guard.seq };
        self.meta.call(id, request).await
    }

    /// An extent id that was never used.
    pub(crate) async fn next_extent(&self) -> Result<ExtentId, FsError> {
        let mut ids = self.ids.lock().await;
        if ids.is_empty() {
            let MetaReply::Range { first, count } = self.call(MetaRequest::AllocExtents).await? else {
                return Err(FsError::Io);
            };
            *ids = first.0..first.0 + count;
        }
        ids.next().map(ExtentId).ok_or(FsError::Io)
    }

    /// Bytes of content, and those of them on drives, as of the last heartbeat.
    pub(crate) fn used(&self) -> (u64, u64) {
        (self.used_bytes.load(Ordering::Relaxed), self.drive_bytes.load(Ordering::Relaxed))
    }

    /// The newest ledger version that a heartbeat reported.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Begins a read of extents.
    pub(crate) fn reading(&self) -> ReadGuard<'_> {
        let version = self.version.load(Ordering::Acquire);
        *self.reads.lock().expect("no holder of this lock panics").entry(version).or_insert(0) += 1;
        ReadGuard { session: self, version }
    }

    /// Tells the owner that the session is alive, and the oldest ledger version that its reads use.
    pub(crate) async fn heartbeat(&self) -> Result<(), FsError> {
        let in_use_ver = {
            let reads = self.reads.lock().expect("no holder of this lock panics");
            // A read that starts later and finds an extent gone asks for the map again, so it needs no extent kept.
            reads.first_key_value().map_or(u64::MAX, |(oldest, _)| *oldest)
        };
        // Requests that wait for a lease of another client may occupy all other slots for a minute.
        let reply = self.answer(MetaRequest::Heartbeat { in_use_ver }).await?;
        let MetaReply::Beat { version, used_bytes, drive_bytes } = reply else { return Err(FsError::Io) };
        self.version.store(version, Ordering::Release);
        self.used_bytes.store(used_bytes, Ordering::Relaxed);
        self.drive_bytes.store(drive_bytes, Ordering::Relaxed);
        Ok(())
    }
}
