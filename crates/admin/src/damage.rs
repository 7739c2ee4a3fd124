//! What is said of damaged data.

use serde::{Deserialize, Serialize};

/// A file that cannot be read everywhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostFileInfo {
    /// A path inside the filesystem; `None` if it has no name, or its inode is not known.
    pub path: Option<String>,
    /// Its inode; 0: parts of uploads, and content whose file is not known.
    pub inode: u64,
    /// Its pieces that cannot be read.
    pub pieces: u64,
    /// Their bytes.
    pub bytes: u64,
    /// When the first was found, in seconds since 1970.
    pub found_s: u64,
}

/// Damage of a filesystem. What cannot be read was proven, and is kept until it is settled; sums are since the filesystem
/// was made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamageInfo {
    /// Files that cannot be read everywhere.
    pub lost_files: u64,
    /// Their pieces that cannot be read.
    pub lost_pieces: u64,
    /// Bytes of these.
    pub lost_bytes: u64,
    /// Pieces that cannot be read beyond those, for which there was no room: whose they are is not known.
    pub unnoted_pieces: u64,
    /// The first of the files, by the time when they were found.
    pub files: Vec<LostFileInfo>,
    /// Shards and blobs that were found damaged.
    pub found: u64,
    /// Those of them that were restored.
    pub repaired: u64,
    /// Those of them for which it was too late.
    pub unrepairable: u64,
}

impl DamageInfo {
    /// Whether some data is known to be unreadable.
    pub fn is_lost(&self) -> bool {
        self.lost_pieces + self.unnoted_pieces > 0
    }
}
