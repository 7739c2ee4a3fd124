//! State that the callers' threads and the drive's thread share.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use base::{DriveId, DriveUuid};
use wire::drive::{DriveHealth, DriveMark, ShardKey};

use crate::admission::Admission;
use crate::engine::append::HeaderBlocks;
use crate::foreground::Waits;
use crate::format::{BLOCK, Geometry};
use crate::index::{Entry, Index, Usage};
use crate::sums::{BlockId, SumsCache};

/// Totals of the index, as of its last change. Reading them needs no lock on the index, which a batch may hold.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Summary {
    pub(crate) usage: Usage,
    pub(crate) shards: u64,
    pub(crate) bad_shards: u64,
}

impl Summary {
    fn of(index: &Index) -> Self {
        Self { usage: index.usage(), shards: index.len() as u64, bad_shards: index.bad_len() as u64 }
    }
}

/// A write that found no room.
#[derive(Debug, Clone, Copy)]
struct Refused {
    /// Free space and garbage at that time.
    usable_bytes: u64,
    len_bytes: u64,
}

/// Write access to the index. Dropping it updates the summary.
pub(crate) struct IndexMut<'a> {
    index: RwLockWriteGuard<'a, Index>,
    summary: &'a Mutex<Summary>,
}

impl Deref for IndexMut<'_> {
    type Target = Index;

    fn deref(&self) -> &Index {
        &self.index
    }
}

impl DerefMut for IndexMut<'_> {
    fn deref_mut(&mut self) -> &mut Index {
        &mut self.index
    }
}

impl Drop for IndexMut<'_> {
    fn drop(&mut self) {
        *lock(self.summary) = Summary::of(&self.index);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("a panic ends the process, so no lock is poisoned")
}

/// The parts of a drive's state that belong to no single thread.
pub(crate) struct Shared {
    pub(crate) drive: DriveId,
    pub(crate) uuid: DriveUuid,
    incarnation: u32,
    durable_seq: AtomicU64,
    pub(crate) geometry: Geometry,
    pub(crate) sums: SumsCache,
    pub(crate) admission: Arc<Admission>,
    index: RwLock<Index>,
    summary: Mutex<Summary>,
    failed: AtomicBool,
    closed: AtomicBool,
    failure: Mutex<Option<String>>,
    host_full: AtomicBool,
    refused: Mutex<Option<Refused>>,
    corrupt_reads: AtomicU64,
    trimmed_bytes: AtomicU64,
    pub(crate) waits: Waits,
}

impl Shared {
    pub(crate) fn new(
        drive: DriveId,
        uuid: DriveUuid,
        mark: DriveMark,
        index: Index,
        sums_cache_bytes: u64,
        admission: Arc<Admission>,
    ) -> Self {
        Self {
            drive,
            uuid,
            incarnation: mark.incarnation,
            durable_seq: AtomicU64::new(mark.seq),
            geometry: index.geometry,
            sums: SumsCache::new(sums_cache_bytes),
            admission,
            summary: Mutex::new(Summary::of(&index)),
            index: RwLock::new(index),
            failed: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            failure: Mutex::new(None),
            host_full: AtomicBool::new(false),
            refused: Mutex::new(None),
            corrupt_reads: AtomicU64::new(0),
            trimmed_bytes: AtomicU64::new(0),
            waits: Waits::new(),
        }
    }

    pub(crate) fn index(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().expect("a panic ends the process, so no lock is poisoned")
    }

    pub(crate) fn index_mut(&self) -> IndexMut<'_> {
        let index = self.index.write().expect("a panic ends the process, so no lock is poisoned");
        IndexMut { index, summary: &self.summary }
    }

    /// The drive's mark.
    pub(crate) fn mark(&self) -> DriveMark {
        DriveMark { incarnation: self.incarnation, seq: self.durable_seq.load(Ordering::Relaxed) }
    }

    /// Notes that every frame up to this one is durable.
    pub(crate) fn set_durable_seq(&self, seq: u64) {
        self.durable_seq.store(seq, Ordering::Relaxed);
    }

    /// Totals of the index.
    pub(crate) fn summary(&self) -> Summary {
        *lock(&self.summary)
    }

    /// Ends the service for good. The first reason is kept.
    pub(crate) fn fail(&self, reason: String) {
        let mut failure = lock(&self.failure);
        if failure.is_none() {
            tracing::error!(drive = %self.drive, uuid = %self.uuid, reason, "drive failed");
            *failure = Some(reason);
        }
        self.failed.store(true, Ordering::Release);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// The device may be used by others from now on.
    pub(crate) fn note_closed(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn health(&self) -> DriveHealth {
        match (self.has_failed(), self.is_closed()) {
            (true, _) => DriveHealth::Failed,
            (false, true) => DriveHealth::Unreachable,
            (false, false) => DriveHealth::Up,
        }
    }

    /// Sets whether the filesystem that holds the drive is full.
    pub(crate) fn set_host_full(&self, full: bool) {
        self.host_full.store(full, Ordering::Relaxed);
    }

    /// Notes that a write of `len_bytes` found no room.
    pub(crate) fn refuse(&self, usage: &Usage, len_bytes: u64) {
        let len_bytes = lock(&self.refused).map_or(len_bytes, |before| before.len_bytes.min(len_bytes));
        *lock(&self.refused) =
            Some(Refused { usable_bytes: usage.free_bytes + usage.garbage_bytes, len_bytes });
    }

    /// Notes that a write of `len_bytes` found room.
    pub(crate) fn take(&self, len_bytes: u64) {
        let mut refused = lock(&self.refused);
        if refused.is_some_and(|refused| len_bytes >= refused.len_bytes) {
            *refused = None;
        }
    }

    /// Whether a write was refused and deletes since then did not make room for it.
    pub(crate) fn is_full(&self, usage: &Usage) -> bool {
        let usable_bytes = usage.free_bytes + usage.garbage_bytes;
        lock(&self.refused).is_some_and(|refused| usable_bytes < refused.usable_bytes + refused.len_bytes)
    }

    pub(crate) fn is_host_full(&self) -> bool {
        self.host_full.load(Ordering::Relaxed)
    }

    pub(crate) fn failure(&self) -> Option<String> {
        lock(&self.failure).clone()
    }

    /// Caches the header blocks of a new frame: freshly written shards are often read soon.
    pub(crate) fn remember_header(&self, header: &HeaderBlocks) {
        for (block, bytes) in (header.first_block..).zip(header.bytes.chunks_exact(BLOCK)) {
            self.sums
                .insert(BlockId { segment: header.segment, generation: header.generation, block }, bytes);
        }
    }

    /// Counts a damaged shard, and allows the next put of it to rewrite it.
    pub(crate) fn note_corrupt(&self, key: ShardKey, entry: &Entry) {
        self.index_mut().mark_bad(key, entry);
        self.corrupt_reads.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(drive = %self.drive, ?key, "shard is damaged on the drive");
    }

    /// Counts space that was given back to the host.
    pub(crate) fn note_trimmed(&self, len_bytes: u64) {
        self.trimmed_bytes.fetch_add(len_bytes, Ordering::Relaxed);
    }

    pub(crate) fn trimmed_bytes(&self) -> u64 {
        self.trimmed_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn corrupt_reads(&self) -> u64 {
        self.corrupt_reads.load(Ordering::Relaxed)
    }
}
