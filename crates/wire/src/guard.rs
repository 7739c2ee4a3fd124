//! The protection of inodes from changes.

use serde::{Deserialize, Serialize};

/// The protection set by chattr(1). It holds for every user, root included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guard {
    /// Content can only be appended; a directory can only get new names.
    pub append_only: bool,
    /// Nothing can change.
    pub immutable: bool,
}

impl Guard {
    /// Whether there is any protection.
    pub fn is_set(self) -> bool {
        self.append_only || self.immutable
    }
}
