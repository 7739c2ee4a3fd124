//! Shards of discarded extents: a put of one that comes late must not store it.
//!
//! A rebuild restores shards that it finds in inventories, also of extents that are not committed yet. If such an extent is
//! discarded, a shard that is on its way then would stay until its range of ids is closed. The list is in memory and bounded,
//! for that is a matter of space only: what it misses is found as an orphan.

use std::collections::{HashSet, VecDeque};

use wire::drive::ShardKey;

/// Most shards that are remembered; the oldest are forgotten first.
const SHARDS_MAX: usize = 1 << 16;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Voids {
    keys: HashSet<ShardKey>,
    order: VecDeque<ShardKey>,
}

impl Voids {
    /// Notes shards that must not be stored any more.
    pub(super) fn add(&mut self, keys: &[ShardKey]) {
        for key in keys.iter().filter(|key| self.keys.insert(**key)) {
            self.order.push_back(*key);
        }
        while self.order.len() > SHARDS_MAX {
            if let Some(oldest) = self.order.pop_front() {
                self.keys.remove(&oldest);
            }
        }
    }

    pub(super) fn has(&self, key: &ShardKey) -> bool {
        self.keys.contains(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::{ExtentId, LedgerId, ShardIndex};

    #[test]
    fn the_newest_are_remembered() {
        let key = |extent: usize| ShardKey {
            ledger: LedgerId(1),
            extent: ExtentId(extent as u64),
            shard: ShardIndex(0),
        };
        let mut voids = Voids::default();
        (0..SHARDS_MAX).for_each(|extent| voids.add(&[key(extent), key(extent)]));
        assert!(voids.has(&key(0)) && !voids.has(&key(SHARDS_MAX)));
        voids.add(&[key(SHARDS_MAX), key(SHARDS_MAX + 1)]);
        assert!(!voids.has(&key(0)) && !voids.has(&key(1)) && voids.has(&key(2)));
        assert!(voids.has(&key(SHARDS_MAX + 1)));
        assert_eq!((voids.keys.len(), voids.order.len()), (SHARDS_MAX, SHARDS_MAX));
    }
}
