//! State shared by the clients of one filesystem on a machine, one for each protocol: when users last made a request,
//! whether a writer waits for room, uploads under way, and damage that was met.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::Client;
use crate::damage::DamageBook;
use crate::room::RoomCheck;

/// How long after a request a filesystem counts as in use.
const IN_USE_NS: u64 = 50_000_000;

/// The shared state. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Peers(pub(crate) Arc<Shared>);

#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// When a user last made a request.
    last_use_ns: AtomicU64,
    /// Held while a client hastens the return of deleted space. It holds the result of the last such check.
    pub(crate) making_room: tokio::sync::Mutex<RoomCheck>,
    /// The number of such checks that have begun.
    pub(crate) room_checks: AtomicU64,
    /// The room that must be left before the last refused write would be accepted.
    pub(crate) wanted_bytes: Mutex<Option<u64>>,
    /// Held while a blob is filled from drives, unless it gives way to users.
    pub(crate) reading_blob: tokio::sync::Mutex<()>,
    /// Blobs that are being made or are on their way to the store.
    uploading: AtomicU64,
    /// Bytes of extents that were uploaded.
    pub(crate) uploaded_bytes: AtomicU64,
    pub(crate) damage: DamageBook,
}

/// A blob on its way, until this is dropped.
pub struct Uploading(Arc<Shared>);

impl Uploading {
    /// It has bytes of extents now.
    pub fn stored(&self, bytes: u64) {
        self.0.uploaded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for Uploading {
    fn drop(&mut self) {
        self.0.uploading.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Peers {
    fn note_use(&self, now_ns: u64) {
        self.0.last_use_ns.store(now_ns, Ordering::Relaxed);
    }

    fn is_in_use(&self, now_ns: u64) -> bool {
        let last_ns = self.0.last_use_ns.load(Ordering::Relaxed);
        last_ns > 0 && now_ns.saturating_sub(last_ns) < IN_USE_NS
    }

    pub(crate) fn begin_upload(&self) -> Uploading {
        self.0.uploading.fetch_add(1, Ordering::AcqRel);
        Uploading(self.0.clone())
    }

    pub(crate) fn is_uploading(&self) -> bool {
        self.0.uploading.load(Ordering::Acquire) > 0
    }
}

impl Client {
    /// Notes a request of a user, over any protocol.
    pub fn note_use(&self) {
        self.inner.peers.note_use(self.inner.env.clock.boot_ns());
    }

    /// Whether a user made a request a moment ago, also through another client. Upkeep gives way then.
    pub fn is_in_use(&self) -> bool {
        self.inner.peers.is_in_use(self.inner.env.clock.boot_ns())
    }

    /// Whether a blob is being made, is on its way to the store, or is not noted in the ledger yet.
    pub fn is_uploading(&self) -> bool {
        self.inner.peers.is_uploading()
    }

    /// Another node makes a blob: writers here wait for room as if this one did.
    pub fn uploading_elsewhere(&self) -> Uploading {
        self.inner.peers.begin_upload()
    }

    /// Whether a writer waits for room right now, through any client, even if room is on its way back.
    pub fn makes_room(&self) -> bool {
        self.inner.peers.0.making_room.try_lock().is_err()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filesystem_is_in_use_for_a_moment_after_each_request_to_any_of_its_clients() {
        let gate = Peers::default();
        let upkeep = gate.clone();
        assert!(!upkeep.is_in_use(1), "no request yet");
        gate.note_use(1_000_000_000);
        assert!(upkeep.is_in_use(1_000_000_000 + IN_USE_NS - 1));
        assert!(!upkeep.is_in_use(1_000_000_000 + IN_USE_NS));
    }

    #[test]
    fn an_upload_is_seen_by_all_clients_until_it_ends() {
        let gate = Peers::default();
        let upkeep = gate.clone();
        let uploads = [upkeep.begin_upload(), upkeep.begin_upload()];
        assert!(gate.is_uploading());
        drop(uploads);
        assert!(!gate.is_uploading());
    }
}
