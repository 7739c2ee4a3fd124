//! What the callers' threads and the drive's own thread both see.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use base::{DriveId, DriveUuid};
use wire::drive::ShardKey;

use crate::engine::append::HeaderBlocks;
use crate::format::{BLOCK, Geometry};
use crate::index::Index;
use crate::sums::{BlockId, SumsCache};

/// State of a drive that does not belong to one thread.
pub(crate) struct Shared {
    pub(crate) drive: DriveId,
    pub(crate) uuid: DriveUuid,
    pub(crate) geometry: Geometry,
    pub(crate) sums: SumsCache,
    index: RwLock<Index>,
    failed: AtomicBool,
    failure: Mutex<Option<String>>,
    corrupt_reads: AtomicU64,
}

impl Shared {
    pub(crate) fn new(drive: DriveId, uuid: DriveUuid, index: Index, sums_cache_bytes: u64) -> Self {
        Self {
            drive,
            uuid,
            geometry: index.geometry,
            sums: SumsCache::new(sums_cache_bytes),
            index: RwLock::new(index),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            corrupt_reads: AtomicU64::new(0),
        }
    }

    pub(crate) fn index(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().expect("a panic ends the process, so no lock is poisoned")
    }

    pub(crate) fn index_mut(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().expect("a panic ends the process, so no lock is poisoned")
    }

    /// Ends the service for good. The first reason is kept.
    pub(crate) fn fail(&self, reason: String) {
        let mut failure = self.failure.lock().expect("a panic ends the process, so no lock is poisoned");
        if failure.is_none() {
            tracing::error!(drive = %self.drive, uuid = %self.uuid, reason, "drive failed");
            *failure = Some(reason);
        }
        self.failed.store(true, Ordering::Release);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(crate) fn failure(&self) -> Option<String> {
        self.failure.lock().expect("a panic ends the process, so no lock is poisoned").clone()
    }

    /// Keeps the header blocks of a new frame: what was just written is often read soon.
    pub(crate) fn remember_header(&self, header: &HeaderBlocks) {
        for (block, bytes) in (header.first_block..).zip(header.bytes.chunks_exact(BLOCK)) {
            self.sums
                .insert(BlockId { segment: header.segment, generation: header.generation, block }, bytes);
        }
    }

    /// Counts a shard whose bytes are bad.
    pub(crate) fn note_corrupt(&self, key: ShardKey) {
        self.corrupt_reads.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(drive = %self.drive, ?key, "shard is damaged on the drive");
    }

    pub(crate) fn corrupt_reads(&self) -> u64 {
        self.corrupt_reads.load(Ordering::Relaxed)
    }
}
