//! Checks a whole ledger, and the shards on the drives against it.
//!
//! Works on one snapshot of the state and changes nothing. Memory is bounded for filesystems of any size: items to be
//! compared are taken in windows of at most [`WINDOW`] inodes, maps or extents, and the tables are read again for each
//! further window. In addition it holds the inventory of one drive and the table of id ranges.

mod blobs;
mod extents;
mod lost;
mod maps;
#[cfg(test)]
mod tests;
mod tree;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::{DriveId, LedgerId};
use layout::ClusterMap;
use serde::{Deserialize, Serialize};
use wire::drive::ShardEntry;

use crate::keys::{KeyRange, Keys};
use crate::state::{State, StateError};
use crate::values::Value;

/// Inodes, maps or extents in memory at a time: at most some 100 MiB.
const WINDOW: usize = 1 << 20;
/// Most findings that are named; further ones are only counted.
const NAMED_MAX: usize = 1000;
/// Most extents that are checked a second time.
const SUSPECTS_MAX: usize = 100_000;
/// Most repeated checks, each with a newer state.
const LOOKS_MAX: usize = 3;

/// A violated rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// A short name of the rule, for programs.
    pub code: String,
    /// The violation, with the ids concerned.
    pub what: String,
    /// Its meaning, or what the operator can do.
    pub advice: String,
}

/// The result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckReport {
    /// The first findings.
    pub findings: Vec<Finding>,
    /// Number of all findings.
    pub findings_count: u64,
    /// Inodes checked.
    pub inodes: u64,
    /// Names checked.
    pub names: u64,
    /// Pieces of files checked.
    pub pieces: u64,
    /// Extents in use.
    pub extents: u64,
    /// Extents that wait for their deletion from the drives.
    pub free_extents: u64,
    /// Extents that only blobs hold.
    pub away_extents: u64,
    /// Blobs that hold extents.
    pub blobs: u64,
    /// Shards found on drives.
    pub shards: u64,
    /// Shards that are owed to drives.
    pub owed_shards: u64,
    /// Owed shards whose extents are no longer in use.
    pub stale_owed: u64,
    /// Shards that are not yet on the drives that took over from other drives.
    pub rebuilding_shards: u64,
    /// Shards on drives that are not up.
    pub unreachable_shards: u64,
    /// Shards of unfinished or interrupted writes: reclamation may free their space.
    pub unreferenced_shards: u64,
    /// Bytes of the unreferenced shards.
    pub unreferenced_bytes: u64,
}

/// Progress of a check, for people.
#[derive(Debug, Default)]
pub struct FsckProgress {
    phase: Mutex<&'static str>,
    items: AtomicU64,
}

impl FsckProgress {
    /// The present phase, and the number of items checked in it.
    pub fn now(&self) -> (&'static str, u64) {
        (*self.phase.lock().expect("no holder of this lock panics"), self.items.load(Ordering::Relaxed))
    }

    fn begin(&self, phase: &'static str) {
        *self.phase.lock().expect("no holder of this lock panics") = phase;
        self.items.store(0, Ordering::Relaxed);
    }

    fn count(&self) {
        self.items.fetch_add(1, Ordering::Relaxed);
    }
}

/// The shards on the drives that are up.
pub trait Inventory {
    /// The drives that can be listed.
    fn drives(&self) -> Vec<DriveId>;

    /// Visits the shards of a ledger whose extents are in `[from, to)`, in any order.
    ///
    /// # Errors
    /// Why the drive cannot be read, as text.
    fn visit(
        &self,
        drive: DriveId,
        ledger: LedgerId,
        range: (u64, u64),
        visit: &mut dyn FnMut(ShardEntry),
    ) -> Result<(), String>;
}

/// Why a ledger could not be checked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FsckError {
    /// The state cannot be read.
    #[error(transparent)]
    State(#[from] StateError),
    /// A drive that is up cannot be read.
    #[error("cannot list drive {0}: {1}")]
    Drive(DriveId, String),
}

/// The input of a check.
pub struct Fsck<'a> {
    /// The ledger to check.
    pub ledger: LedgerId,
    /// A snapshot of its state.
    pub state: &'a dyn State,
    /// Drives and placement groups.
    pub map: &'a ClusterMap,
    /// The shards on the drives; may be newer than the state.
    pub inventory: &'a dyn Inventory,
    /// Receives the progress of the check.
    pub progress: &'a FsckProgress,
}

impl Fsck<'_> {
    /// Checks everything.
    ///
    /// # Errors
    /// If something cannot be read. The findings so far are lost then.
    pub fn run(&self) -> Result<FsckReport, FsckError> {
        self.run_windowed(WINDOW, None).map(|(report, _)| report)
    }

    /// Checks a ledger that is in use. Drives are newer than the state, so some findings may be false. They are checked
    /// again with a newer state before they are reported.
    pub fn run_again(
        &self,
        newer: impl Fn() -> Result<Arc<dyn State>, String>,
    ) -> Result<FsckReport, FsckError> {
        let (mut report, mut suspects) = self.run_windowed(WINDOW, None)?;
        for _ in 0..LOOKS_MAX {
            if suspects.ids.is_empty() {
                break;
            }
            let state = newer().map_err(|error| FsckError::State(StateError::Failed(error)))?;
            let again = Fsck { state: &*state, ..*self };
            let (second, still) = again.run_windowed(WINDOW, Some(&suspects.ids))?;
            report.findings_count -= suspects.findings;
            report.findings.retain(|finding| !extents::is_suspect(&finding.code));
            for finding in second.findings.into_iter().filter(|finding| extents::is_suspect(&finding.code)) {
                report.add(finding);
            }
            suspects = still;
        }
        Ok(report)
    }

    fn run_windowed(
        &self,
        window: usize,
        only: Option<&BTreeSet<u64>>,
    ) -> Result<(FsckReport, Suspects), FsckError> {
        let mut check = Check {
            input: self,
            keys: Keys::new(self.ledger),
            window,
            only,
            report: FsckReport::default(),
            suspects: Suspects::default(),
        };
        if only.is_none() {
            check.tree()?;
            check.maps()?;
            check.blobs()?;
            check.lost()?;
        }
        check.extents()?;
        Ok((check.report, check.suspects))
    }
}

/// Extents whose findings may be false because drives are newer than the state.
#[derive(Debug, Default)]
struct Suspects {
    ids: BTreeSet<u64>,
    findings: u64,
}

/// A running check.
struct Check<'a> {
    input: &'a Fsck<'a>,
    keys: Keys,
    window: usize,
    only: Option<&'a BTreeSet<u64>>,
    report: FsckReport,
    suspects: Suspects,
}

impl FsckReport {
    /// Whether there are no findings.
    pub fn is_clean(&self) -> bool {
        self.findings_count == 0
    }

    fn add(&mut self, finding: Finding) {
        self.findings_count += 1;
        if self.findings.len() < NAMED_MAX {
            self.findings.push(finding);
        }
    }
}

impl Check<'_> {
    fn find(&mut self, code: &str, what: String, advice: &str) {
        self.report.add(Finding { code: code.to_owned(), what, advice: advice.to_owned() });
    }

    /// Visits a range. A value that cannot be decoded is a finding.
    fn each<V: Value>(
        &mut self,
        range: &KeyRange,
        key_len: std::ops::RangeInclusive<usize>,
        mut visit: impl FnMut(&mut Self, &[u8], V) -> ControlFlow<()>,
    ) -> Result<(), FsckError> {
        let input = self.input;
        input.state.scan(range, &mut |key, value| {
            input.progress.count();
            match V::decode(value) {
                Ok(value) if key_len.contains(&key.len()) => visit(self, key, value),
                _ => {
                    self.find(
                        "damaged_value",
                        format!("a value cannot be decoded: key={}", hex(key)),
                        "the local store is damaged: restart with another copy of the metadata",
                    );
                    ControlFlow::Continue(())
                }
            }
        })?;
        Ok(())
    }

    fn get<V: Value>(&self, key: &[u8]) -> Result<Option<V>, FsckError> {
        // A damaged value becomes a finding when its own table is visited.
        Ok(self.input.state.get(key)?.and_then(|bytes| V::decode(&bytes).ok()))
    }

    fn number(&self, name: &str) -> Result<u64, FsckError> {
        Ok(self.get::<u64>(&self.keys.value(name))?.unwrap_or(1))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn u64_at(key: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(key[at..at + 8].try_into().expect("the key's length was checked"))
}
