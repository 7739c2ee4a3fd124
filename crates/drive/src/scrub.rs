//! Scrub: reads stored shards past every cache and compares them with their checksums.

use wire::drive::{DriveFailed, GetPurpose, GetShard, GetShardError, ScrubStep, ShardKey};

use crate::drive::Drive;
use crate::format::BLOCK;

/// Shards per lookup in the index.
const PAGE: usize = 256;

impl Drive {
    /// Verifies shards after `after` until `budget_bytes` were read.
    pub(crate) async fn scrub_step(
        &self,
        after: Option<ShardKey>,
        budget_bytes: u64,
    ) -> Result<ScrubStep, DriveFailed> {
        let mut step = ScrubStep { next: after, verified_bytes: 0, bad: Vec::new() };
        let mut read_bytes = 0;
        loop {
            if self.shared.has_failed() {
                return Err(self.failed());
            }
            let page: Vec<(ShardKey, u32)> = {
                let index = self.shared.index();
                index.after(step.next).take(PAGE).map(|(key, entry)| (*key, entry.blocks)).collect()
            };
            if page.is_empty() {
                step.next = None;
                return Ok(step);
            }
            for (key, blocks) in page {
                let len_bytes = u64::from(blocks) * BLOCK as u64;
                let whole = GetShard { key, first_block: 0, blocks, purpose: GetPurpose::Move };
                match self.read_device(whole).await {
                    Ok(_) => step.verified_bytes += len_bytes,
                    Err(GetShardError::Corrupt { .. }) => step.bad.push(key),
                    Err(GetShardError::Failed { .. }) => return Err(self.failed()),
                    // The shard was deleted or rewritten since the lookup; a rewritten one is new.
                    Err(_) => {}
                }
                step.next = Some(key);
                read_bytes += len_bytes;
                if read_bytes >= budget_bytes {
                    return Ok(step);
                }
            }
        }
    }
}
