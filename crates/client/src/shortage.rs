//! Shortage of room, for people: which limit is reached, once a write was refused or hardly any room is left.

use std::sync::atomic::Ordering;

use crate::Client;

/// Hardly any room is left if it is less than this part of the whole, or than one extent.
const LITTLE: u64 = 1000;

/// The limit that is reached first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scarce {
    /// Its drives are full.
    Drives,
    /// What is left of its drives stays free, for what may be lost.
    Spare,
    /// The filesystem has used its quota of the drives.
    SsdQuota,
    /// The filesystem has reached its provisioned size.
    Size,
}

/// A filesystem has no room for a write, or hardly any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// The limit that is reached.
    pub of: Scarce,
    /// Bytes of content that can still be written.
    pub left_bytes: u64,
    /// A write was refused, and there is no room for it yet. Otherwise little room is left, and a write may be refused
    /// soon.
    pub is_refusing: bool,
}

/// The room left under one limit.
#[derive(Debug, Clone, Copy)]
struct Supply {
    of: Scarce,
    left_bytes: u64,
    all_bytes: u64,
}

impl Client {
    /// The present shortage: a write through any client of the filesystem was refused and its room is not back yet, or
    /// hardly any room is left.
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
        // Otherwise the disk with the metadata had no room.
        if self.inner.extents.topology().is_refusing() {
            self.note_wanted(bytes, 0);
        }
    }

    fn note_wanted(&self, bytes: u64, dirty_bytes: u64) {
        let Some(Supply { left_bytes, .. }) = self.scarcest() else { return };
        let wanted = left_bytes.saturating_sub(dirty_bytes) + bytes;
        *self.inner.peers.0.wanted_bytes.lock().expect("no holder of this lock panics") = Some(wanted);
    }

    /// The limit at which the next write would be refused. With too few drives for writes, the drives are left out,
    /// because writes fail for another reason.
    fn scarcest(&self) -> Option<Supply> {
        let topology = self.inner.extents.topology();
        let (used, on_drives) = self.inner.session.used();
        let of_limit = |of, limit: Option<u64>, used| {
            limit.map(|limit| Supply { of, left_bytes: limit.saturating_sub(used), all_bytes: limit })
        };
        let drives = topology.can_write().then(|| Supply {
            // Less to spare does not help drives that are full.
            of: match topology.limits.spare_millionths > 0 && !topology.is_refusing() {
                true => Scarce::Spare,
                false => Scarce::Drives,
            },
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
