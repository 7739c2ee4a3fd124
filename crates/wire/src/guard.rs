//! What inodes are protected from.

use serde::{Deserialize, Serialize};

/// What chattr(1) protects an inode from, whoever asks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guard {
    /// Content is only added at the end; to a directory names are only added.
    pub append_only: bool,
    /// Nothing changes.
    pub immutable: bool,
}

impl Guard {
    /// Whether there is one.
    pub fn is_set(self) -> bool {
        self.append_only || self.immutable
    }
}
