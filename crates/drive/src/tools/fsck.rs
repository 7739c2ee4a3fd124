//! Verifies every shard of a drive. Changes nothing.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use base::checksum::blocks_match;
use base::env::{Env, File};
use wire::drive::ShardKey;

use super::{OpenedDevice, ToolError};
use crate::format::{BLOCK, Geometry};
use crate::index::{Entry, Index};
use crate::recovery::{RecoveryReport, recover};
use crate::scan::{ScanFrom, read_blocks, scan_segment};

/// Most damaged shards named in a report; further ones are only counted.
const NAMED_MAX: usize = 1000;

/// The findings of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct FsckReport {
    /// Readable superblocks, of two.
    pub superblocks: u32,
    /// Why the index could not be read; in that case nothing below was checked.
    pub index_error: Option<String>,
    /// The report of the recovery that opening the drive would do.
    pub recovery: RecoveryReport,
    /// Shards stored.
    pub shards: u64,
    /// Bytes read and compared with their checksums.
    pub verified_bytes: u64,
    /// Shards whose bytes or checksums are damaged or unreadable.
    pub damaged_shards: u64,
    /// The first damaged shards, at most 1000.
    pub damaged: Vec<ShardKey>,
    /// Frames whose headers are damaged. Shards in them are counted above if the index knows them.
    pub lost_frames: u64,
    /// Shards that are in the index but in no frame.
    pub unexplained_shards: u64,
    /// Whether there are no findings.
    pub clean: bool,
}

/// Reads and verifies the whole drive. Takes as long as reading all its shards.
///
/// # Errors
/// `NotDrive`, `InUse` or `Io`. Damage is no error: it is in the report.
pub fn fsck(env: &Env, path: &Path) -> Result<FsckReport, ToolError> {
    let OpenedDevice { file, superblocks, superblock, geometry } = OpenedDevice::lock(env, path)?;
    let mut report = FsckReport {
        superblocks: superblocks.slots.iter().flatten().count() as u32,
        ..FsckReport::default()
    };
    match recover(&*file, geometry, &superblock) {
        Ok(recovered) => {
            report.recovery = recovered.report;
            check_shards(&*file, geometry, &recovered.index, &mut report);
        }
        Err(reason) => report.index_error = Some(reason),
    }
    report.clean = report.superblocks == 2
        && report.index_error.is_none()
        && !report.recovery.fell_back
        && report.damaged_shards == 0
        && report.unexplained_shards == 0
        && report.lost_frames == 0
        && report.recovery.lost_frames == 0;
    Ok(report)
}

fn check_shards(file: &dyn File, geometry: Geometry, index: &Index, report: &mut FsckReport) {
    let mut by_segment: BTreeMap<u32, Vec<(ShardKey, Entry)>> = BTreeMap::new();
    for (key, entry) in index.after(None) {
        by_segment.entry(entry.segment).or_default().push((*key, *entry));
    }
    for (id, mut shards) in by_segment {
        shards.sort_by_key(|(_, entry)| entry.block);
        let from = ScanFrom { segment: id, generation: index.segment(id).generation, block: 1, last_seq: 0 };
        let scan = scan_segment(file, geometry, from);
        report.lost_frames += u64::from(scan.gaps);
        let mut names = HashMap::new();
        for frame in &scan.frames {
            for record in &frame.records {
                names.insert((frame.header.start_block + record.payload_block, record.key), record.blocks);
            }
        }
        for (key, entry) in shards {
            report.shards += 1;
            let explained = names.get(&(entry.block, key)) == Some(&entry.blocks);
            report.unexplained_shards += u64::from(!explained);
            if entry.damaged || !is_intact(file, geometry, key, &entry) {
                report.damaged_shards += 1;
                if report.damaged.len() < NAMED_MAX {
                    report.damaged.push(key);
                }
            } else {
                report.verified_bytes += u64::from(entry.blocks) * BLOCK as u64;
            }
        }
    }
}

/// Whether a shard's bytes match the checksums kept for them.
fn is_intact(file: &dyn File, geometry: Geometry, key: ShardKey, entry: &Entry) -> bool {
    let data = read_blocks(file, geometry.offset(entry.segment, entry.block), entry.blocks);
    let first = entry.sums_at / BLOCK as u32;
    let end = (entry.sums_at + entry.blocks * 4).div_ceil(BLOCK as u32);
    let sums = read_blocks(file, geometry.offset(entry.segment, first), end - first);
    let (Ok(data), Ok(sums)) = (data, sums) else { return false };
    let start = entry.sums_at as usize - first as usize * BLOCK;
    let sums = sums[start..start + entry.blocks as usize * 4].chunks_exact(4);
    let sums: Vec<u32> = sums.map(|sum| u32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]])).collect();
    blocks_match(key.extent, key.shard, 0, &data, &sums)
}
