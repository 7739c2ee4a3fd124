//! Whether the drives have all shards that the metadata expects.

use serde::{Deserialize, Serialize};

/// How to look at the verification of a filesystem.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifyFilesystem {
    /// Begin to compare everything now.
    #[serde(default)]
    pub now: bool,
}

/// Shards that the metadata expects, and which of them were not found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardCounts {
    /// All of them.
    pub expected_shards: u64,
    /// Those that are owed: they were written without this drive, and are stored when it is up.
    pub owed_shards: u64,
    /// Not known: a drive does not answer, or they are on their way to another one.
    pub unknown_shards: u64,
    /// The drive that should have them did not. They are restored.
    pub missing_shards: u64,
}

/// The last comparison of all shards of a filesystem with its metadata.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifiedInfo {
    /// Its number since the node that owns the metadata began to.
    pub number: u64,
    /// Seconds since it ended.
    pub age_s: u64,
    /// How long it took, in milliseconds.
    pub took_ms: u64,
    /// What it found.
    #[serde(flatten)]
    pub shards: ShardCounts,
}

/// The verification of a filesystem.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemVerification {
    /// Its name.
    pub filesystem: String,
    /// The last comparison that came to its end; `None`: there was none since the node that owns the metadata began to.
    pub last: Option<VerifiedInfo>,
    /// The number of the comparison that is under way.
    pub running: Option<u64>,
    /// Shards that it has looked for.
    pub looked_shards: u64,
    /// The number of the comparison that was asked for, or of the next one.
    pub next: u64,
    /// Missing shards that were found since the node that owns the metadata began to.
    pub found_shards: u64,
    /// What the last comparison found in each placement group.
    pub groups: Vec<GroupVerification>,
}

/// The verification of a placement group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupVerification {
    /// Its number.
    pub group: u32,
    /// Its drives, in the order of shards.
    pub drives: Vec<u32>,
    /// What was found.
    #[serde(flatten)]
    pub shards: ShardCounts,
    /// Seconds since the oldest read of one of its shards by the scrub; `None`: some were not read yet.
    pub read_s: Option<u64>,
}
