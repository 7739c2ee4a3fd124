//! Whether a filesystem has room, for people: what of it is used up, once a write was refused or next to nothing is left.

use std::sync::atomic::Ordering;

use crate::Client;

/// Next to nothing is left when it is less than this part of the whole, or than one extent.
const LITTLE: u64 = 1000;

/// What of a filesystem is used up first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scarce {
    /// Its drives are full.
    Drives,
    /// It has taken what it may of the drives.
    SsdQuota,
    /// It holds what it may hold in all.
    Size,
}

/// A filesystem has no room for a write, or as good as none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// What is used up.
    pub of: Scarce,
    /// Bytes of content that can still be written.
    pub left_bytes: u64,
    /// A write was refused, and there is no room for it yet. Otherwise so little is left that one may be soon.
    pub is_refusing: bool,
}

/// How much of something is left, of how much.
#[derive(Debug, Clone, Copy)]
struct Supply {
    of: Scarce,
    left_bytes: u64,
    all_bytes: u64,
}

impl Client {
    /// What is used up, if a write through any client of the filesystem was refused for lack of room that is not back yet,
    /// or if next to nothing is left.
    pub fn shortage(&self) -> Option<Shortage> {
        let Supply { of, left_bytes, all_bytes } = self.scarcest()?;
        let not_dirty = left_bytes.saturating_sub(self.inner.dirty_bytes.load(Ordering::Relaxed));
        let is_refusing = {
            let mut wanted = self.inner.peers.0.wanted_bytes.lock().expect("no holder of this lock panics");
            *wanted = wanted.filter(|wanted| not_dirty < *wanted);
            wanted.is_some()
        };
        let is_little = left_bytes < self.inner.window.max(all_bytes / LITTLE);
        (is_refusing || is_little).then_some(Shortage { of, left_bytes, is_refusing })
    }

    /// Notes that there was no room for this many bytes on top of the dirty ones.
    pub(crate) fn note_refused(&self, bytes: u64) {
        self.note_wanted(bytes, self.inner.dirty_bytes.load(Ordering::Relaxed));
    }

    /// Notes that drives refused this many dirty bytes, although they may report room.
    pub(crate) fn note_refused_by_drives(&self, bytes: u64) {
        // Or else the disk with the metadata had no room.
        if self.inner.extents.topology().is_refusing() {
            self.note_wanted(bytes, 0);
        }
    }

    fn note_wanted(&self, bytes: u64, dirty_bytes: u64) {
        let Some(Supply { left_bytes, .. }) = self.scarcest() else { return };
        let wanted = left_bytes.saturating_sub(dirty_bytes) + bytes;
        *self.inner.peers.0.wanted_bytes.lock().expect("no holder of this lock panics") = Some(wanted);
    }

    /// What the next write that is refused would be refused for. With so few drives that writes fail, room is not what
    /// they fail for.
    fn scarcest(&self) -> Option<Supply> {
        let topology = self.inner.extents.topology();
        let (used, on_drives) = self.inner.session.used();
        let of_limit = |of, limit: Option<u64>, used| {
            limit.map(|limit| Supply { of, left_bytes: limit.saturating_sub(used), all_bytes: limit })
        };
        let drives = topology.can_write().then(|| Supply {
            of: Scarce::Drives,
            left_bytes: topology.reclaimable_bytes(),
            all_bytes: topology.capacity_bytes(self.inner.profile),
        });
        let limits = topology.limits;
        let supplies = [
            of_limit(Scarce::Size, limits.provisioned_bytes, used),
            of_limit(Scarce::SsdQuota, limits.ssd_bytes, on_drives),
            drives,
        ];
        supplies.into_iter().flatten().min_by_key(|supply| supply.left_bytes)
    }
}
