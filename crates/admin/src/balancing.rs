//! Stored data that moves until every drive has its share.

use serde::{Deserialize, Serialize};

/// A filesystem that is to be balanced, or not any more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalanceFilesystem {
    /// Only say what would move.
    #[serde(default)]
    pub dry_run: bool,
    /// End it: what is moving goes back, what has moved stays.
    #[serde(default)]
    pub abort: bool,
}

/// What moves when a filesystem is balanced, or what goes back if that is aborted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemBalance {
    /// Its name.
    pub filesystem: String,
    /// Whether it is being balanced now.
    pub balancing: bool,
    /// Placement groups of which data has still to move, or goes back.
    pub groups: u64,
    /// What is to move, in bytes on drives.
    pub move_bytes: u64,
    /// Seconds that it takes at the present rate of background work.
    pub eta_s: u64,
    /// What it waits for, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
    /// Losses that all stored data survives now.
    pub survives: Survives,
    /// Those that it survives at the end.
    pub survives_after: Survives,
    /// The drives that are not given up.
    pub drives: Vec<DriveShare>,
}

/// How many of a kind may be lost, whichever they are, so that all data can still be read; -1: some cannot be read now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survives {
    /// Drives.
    pub drives: i32,
    /// Nodes.
    pub nodes: i32,
}

/// What a drive holds, of all filesystems.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveShare {
    /// Its number.
    pub id: u32,
    /// The node that has it.
    pub node: u32,
    /// Its size in bytes.
    pub capacity_bytes: u64,
    /// Bytes in use now.
    pub used_bytes: u64,
    /// Bytes in use at the end, if nothing else is written or deleted.
    pub used_after_bytes: u64,
}

impl DriveShare {
    /// Use in percent, now and at the end.
    pub fn percent(&self) -> (u64, u64) {
        let part = |bytes: u64| bytes.saturating_mul(100) / self.capacity_bytes.max(1);
        (part(self.used_bytes), part(self.used_after_bytes))
    }
}
