//! Backups of all metadata: one file with a copy of each ledger, made while the cluster runs, from which the stores of a node are made
//! again.

mod export;
mod file;
mod import;

use base::LedgerId;
use control::{CONTROL_LEDGER, Cluster};
use meta::state::Applied;
use serde::Serialize;

pub(crate) use export::{Exported, export};
use file::Totals;
pub(crate) use import::{Imported, Next, import};

/// Is told how many bytes were written or read so far, of how many if that is known.
pub(crate) type Tell<'a> = dyn FnMut(u64, Option<u64>) + Send + 'a;

/// A ledger in a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct LedgerInfo {
    /// Its filesystem, or `cluster`.
    pub(crate) name: String,
    /// The last entry in it.
    pub(crate) seq: u64,
    /// Keys.
    pub(crate) rows: u64,
    /// Bytes of keys and values.
    pub(crate) bytes: u64,
}

fn ledger_info(cluster: &Cluster, ledger: LedgerId, at: Applied, totals: Totals) -> LedgerInfo {
    let filesystem = cluster.filesystems.values().find(|record| record.ledger == ledger);
    let name = match filesystem {
        Some(record) => record.name.clone(),
        None if ledger == CONTROL_LEDGER => "cluster".to_owned(),
        None => format!("ledger {ledger}"),
    };
    LedgerInfo { name, seq: at.seq.0, rows: totals.rows, bytes: totals.bytes }
}
