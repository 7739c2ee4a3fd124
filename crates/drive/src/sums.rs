//! A bounded cache of frame header blocks, where the block checksums of shards lie.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use crate::format::BLOCK;

/// A block of a segment in one of its generations: a reused segment never hits old content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct BlockId {
    pub(crate) segment: u32,
    pub(crate) generation: u64,
    pub(crate) block: u32,
}

type Block = Arc<[u8; BLOCK]>;

#[derive(Default)]
struct Inner {
    /// The flag says whether the block was used since the clock hand passed it.
    blocks: HashMap<BlockId, (Block, bool)>,
    hand: VecDeque<BlockId>,
}

/// Second-chance cache. Its locks are held for a lookup only.
pub(crate) struct SumsCache {
    shards: Vec<Mutex<Inner>>,
    blocks_per_shard: usize,
}

impl SumsCache {
    /// An empty cache that keeps at most `limit_bytes`.
    pub(crate) fn new(limit_bytes: u64) -> Self {
        let shards = 8;
        let blocks_per_shard = (limit_bytes as usize / BLOCK / shards).max(1);
        Self { shards: (0..shards).map(|_| Mutex::default()).collect(), blocks_per_shard }
    }

    fn shard(&self, id: &BlockId) -> std::sync::MutexGuard<'_, Inner> {
        let shard = &self.shards[(id.block as usize ^ id.segment as usize) % self.shards.len()];
        shard.lock().expect("no holder of this lock panics")
    }

    /// The block, if it is cached.
    pub(crate) fn get(&self, id: &BlockId) -> Option<Block> {
        let mut inner = self.shard(id);
        let (block, used) = inner.blocks.get_mut(id)?;
        *used = true;
        Some(block.clone())
    }

    /// Caches a block of 4096 bytes.
    pub(crate) fn insert(&self, id: BlockId, bytes: &[u8]) {
        let block: Block = Arc::new(bytes.try_into().expect("callers pass whole blocks"));
        let mut inner = self.shard(&id);
        if inner.blocks.insert(id, (block, false)).is_none() {
            inner.hand.push_back(id);
        }
        while inner.blocks.len() > self.blocks_per_shard {
            let Some(oldest) = inner.hand.pop_front() else { return };
            match inner.blocks.get_mut(&oldest) {
                Some((_, used)) if *used => {
                    *used = false;
                    inner.hand.push_back(oldest);
                }
                _ => {
                    inner.blocks.remove(&oldest);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_blocks_stay_and_the_limit_holds() {
        let cache = SumsCache::new(8 * 4 * BLOCK as u64);
        let id = |block: u32| BlockId { segment: 0, generation: 1, block: block * 8 };
        cache.insert(id(0), &[7; BLOCK]);
        for block in 1..100 {
            cache.insert(id(block), &[0; BLOCK]);
            assert_eq!(cache.get(&id(0)).unwrap()[0], 7);
        }
        assert!((0..100).filter(|block| cache.get(&id(*block)).is_some()).count() <= 4);
    }
}
