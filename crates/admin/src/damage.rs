//! Reports of damaged data.

use serde::{Deserialize, Serialize};

/// A file with unreadable pieces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostFileInfo {
    /// Path inside the filesystem; `None` if the file has no name, or its inode is unknown.
    pub path: Option<String>,
    /// Inode of the file; 0: parts of uploads, and content whose file is unknown.
    pub inode: u64,
    /// Unreadable pieces of the file.
    pub pieces: u64,
    /// Bytes of these pieces.
    pub bytes: u64,
    /// Time when the first was found, seconds since 1970.
    pub found_s: u64,
}

/// Damage of a filesystem. Only pieces that are proven unreadable are listed, until they are settled. Sums count from
/// the creation of the filesystem.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamageInfo {
    /// Files with unreadable pieces.
    pub lost_files: u64,
    /// Unreadable pieces of these files.
    pub lost_pieces: u64,
    /// Bytes of these pieces.
    pub lost_bytes: u64,
    /// Further unreadable pieces that had no room in the notes; their files are unknown.
    pub unnoted_pieces: u64,
    /// The first of the files, by the time of discovery.
    pub files: Vec<LostFileInfo>,
    /// Shards and blobs found damaged.
    pub found: u64,
    /// Damaged shards and blobs that were restored.
    pub repaired: u64,
    /// Damaged shards and blobs that could not be restored.
    pub unrepairable: u64,
}

impl DamageInfo {
    /// Whether some data is known to be unreadable.
    pub fn is_lost(&self) -> bool {
        self.lost_pieces + self.unnoted_pieces > 0
    }
}
