//! I20, I21: compares the object store with the ledger's tables of blobs.

use std::collections::{BTreeMap, BTreeSet};

use base::checksum::block_checksums;
use base::{DriveId, ExtentId, LedgerId, ShardIndex};
use layout::{BlobId, shard_len};
use meta::fsck::{Fsck, FsckProgress, Inventory};
use meta::state::State;
use meta::values::{BlobRecord, Residence};
use wire::drive::{ShardEntry, ShardKey};

use crate::node::{CLUSTER, LEDGER};
use crate::world::World;

/// Shards by drive.
pub(super) type Shards = BTreeMap<DriveId, BTreeMap<(ExtentId, u8), ShardEntry>>;

/// The ledger's tables of tiering.
#[derive(Default)]
pub(super) struct TierTables {
    /// Residence of each tiered extent.
    pub(super) residences: BTreeMap<ExtentId, Residence>,
    pub(super) blobs: BTreeMap<u64, BlobRecord>,
    /// Blobs that are being stored or are to be deleted.
    pub(super) loose: BTreeSet<u64>,
}

impl TierTables {
    /// Every blob in use is in the store, with the bytes of its extents, and the store has no other blobs.
    pub(super) fn check(&self, world: &World, wrong: &mut Vec<String>) {
        if !world.is_faulty() {
            for serial in &self.loose {
                wrong.push(format!("I6: blob {serial} is not deleted"));
            }
        }
        let objects = world.bucket.objects();
        let mut unknown: BTreeSet<&String> = objects.keys().collect();
        for (serial, blob) in &self.blobs {
            let key = BlobId { ledger: LEDGER, serial: *serial, term: blob.term }.key(CLUSTER);
            unknown.remove(&key);
            let Some(bytes) = objects.get(&key) else {
                wrong.push(format!("I21: blob {serial} is in use and not in the store"));
                continue;
            };
            if bytes.len() != blob.bytes as usize {
                wrong.push(format!("I20: blob {serial} has {} bytes and not {}", bytes.len(), blob.bytes));
            }
            let inside = self.residences.iter().filter_map(|(id, residence)| {
                let (of, off) = residence.blob?;
                (of == *serial).then_some((*id, off, residence))
            });
            for (id, off, residence) in inside {
                if !holds(world, bytes, off, id, residence) {
                    wrong.push(format!("I20: blob {serial} has other bytes of extent {id}"));
                }
            }
        }
        if self.loose.is_empty() {
            for key in unknown {
                wrong.push(format!("I6: nobody knows object {key}"));
            }
        }
    }
}

/// Whether the blob has at `off` the bytes that were written to the drives as this extent.
fn holds(world: &World, blob: &[u8], off: u32, id: ExtentId, residence: &Residence) -> bool {
    let (k, extent_len) = (residence.place.k, residence.place.extent_len);
    let Some(bytes) = blob.get(off as usize..(off + extent_len) as usize) else { return false };
    let shard_bytes = shard_len(extent_len, k) as usize;
    let mut padded = bytes.to_vec();
    padded.resize(shard_bytes * usize::from(k), 0);
    let promises = world.promises();
    (0..k).zip(padded.chunks_exact(shard_bytes)).all(|(shard, bytes)| {
        let shard = ShardIndex(shard);
        let key = ShardKey { ledger: LEDGER, extent: id, shard };
        let known = promises.shards.get(&key);
        known.is_none_or(|sums| *sums == block_checksums(id, shard, 0, bytes))
    })
}

struct Listed<'a>(&'a Shards);

impl Inventory for Listed<'_> {
    fn drives(&self) -> Vec<DriveId> {
        self.0.keys().copied().collect()
    }

    fn visit(
        &self,
        drive: DriveId,
        ledger: LedgerId,
        (from, to): (u64, u64),
        visit: &mut dyn FnMut(ShardEntry),
    ) -> Result<(), String> {
        let entries = self.0.get(&drive).into_iter().flat_map(BTreeMap::values);
        let wanted =
            |entry: &&ShardEntry| entry.key.ledger == ledger && (from..to).contains(&entry.key.extent.0);
        entries.filter(wanted).for_each(|entry| visit(*entry));
        Ok(())
    }
}

/// Runs the checks of `forebay fsck`; if drives are damaged, only those of tiers.
pub(super) fn run_fsck(world: &World, state: &dyn State, shards: &Shards, wrong: &mut Vec<String>) {
    let only_tiers = world.is_faulty() || !world.promises().hurt_drives.is_empty();
    let map = world.cluster().map();
    let fsck = Fsck {
        ledger: LEDGER,
        state,
        map: &map,
        inventory: &Listed(shards),
        progress: &FsckProgress::default(),
    };
    match fsck.run() {
        Ok(report) => {
            let told = report.findings.iter().filter(|finding| {
                !only_tiers || finding.code.starts_with("tier") || finding.code.contains("blob")
            });
            wrong.extend(told.map(|finding| format!("fsck: {}: {}", finding.code, finding.what)));
        }
        Err(error) => wrong.push(format!("fsck: {error}")),
    }
}
