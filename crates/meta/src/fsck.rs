//! Checks a whole ledger, and what lies on the drives against it.
//!
//! Works on one snapshot of the state and changes nothing. Memory is bounded whatever the size of the filesystem: what
//! has to be compared is taken in windows of at most [`WINDOW`] inodes, maps or extents, and tables are read once more
//! for each further window. On top come the inventories of one drive and the table of id ranges.

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
/// Findings that are named; more are counted.
const NAMED_MAX: usize = 1000;
/// Extents that a second look is taken at.
const SUSPECTS_MAX: usize = 100_000;
/// How often one is taken: each is newer than the one before.
const LOOKS_MAX: usize = 3;

/// Something that is not as it must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// A short name for programs.
    pub code: String,
    /// What is wrong, and with what.
    pub what: String,
    /// What it means or what to do.
    pub advice: String,
}

/// The result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckReport {
    /// The first findings.
    pub findings: Vec<Finding>,
    /// How many there are.
    pub findings_count: u64,
    /// Inodes looked at.
    pub inodes: u64,
    /// Names.
    pub names: u64,
    /// Pieces of files.
    pub pieces: u64,
    /// Extents that are referred to.
    pub extents: u64,
    /// Extents that wait for deletion.
    pub free_extents: u64,
    /// Extents that only blobs have.
    pub away_extents: u64,
    /// Blobs that hold extents.
    pub blobs: u64,
    /// Shards found on drives.
    pub shards: u64,
    /// Shards that drives are owed.
    pub owed_shards: u64,
    /// Those of them whose extents nothing uses any more.
    pub stale_owed: u64,
    /// Shards that are not yet on the drives that took over from others.
    pub rebuilding_shards: u64,
    /// Shards on drives that are not up.
    pub unreachable_shards: u64,
    /// Shards of writes that were not finished or cut off: space that reclamation may take back.
    pub unreferenced_shards: u64,
    /// Bytes of these.
    pub unreferenced_bytes: u64,
}

/// How far a check is, for people.
#[derive(Debug, Default)]
pub struct FsckProgress {
    phase: Mutex<&'static str>,
    items: AtomicU64,
}

impl FsckProgress {
    /// What is being looked at, and how much of it was.
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
    /// Which drives can be asked.
    fn drives(&self) -> Vec<DriveId>;

    /// Visits the shards of a ledger whose extents are in `[from, to)`, in any order.
    ///
    /// # Errors
    /// Why the drive cannot be read, for people.
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

/// What is checked.
pub struct Fsck<'a> {
    /// Which ledger.
    pub ledger: LedgerId,
    /// Its content, which does not change meanwhile.
    pub state: &'a dyn State,
    /// Drives and placement groups.
    pub map: &'a ClusterMap,
    /// What lies on drives; may be newer than the state.
    pub inventory: &'a dyn Inventory,
    /// Told how far it is.
    pub progress: &'a FsckProgress,
}

impl Fsck<'_> {
    /// Checks everything.
    ///
    /// # Errors
    /// If something could not be looked at; what was found so far is lost then.
    pub fn run(&self) -> Result<FsckReport, FsckError> {
        self.run_windowed(WINDOW, None).map(|(report, _)| report)
    }

    /// Checks a ledger that changes meanwhile: what may only look wrong because drives are newer than the state is looked
    /// at again, with a newer state, before it is reported.
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

/// Extents whose findings may be due to drives that are newer than the state.
#[derive(Debug, Default)]
struct Suspects {
    ids: BTreeSet<u64>,
    findings: u64,
}

/// A check under way.
struct Check<'a> {
    input: &'a Fsck<'a>,
    keys: Keys,
    window: usize,
    only: Option<&'a BTreeSet<u64>>,
    report: FsckReport,
    suspects: Suspects,
}

impl FsckReport {
    /// Whether nothing is wrong.
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

    /// Visits a range; values that cannot be decoded are findings.
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
        // A damaged value is found when its table is visited.
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
