//! Filesystem groups: what can be asked of a node, and the answers.

use serde::{Deserialize, Serialize};
use wire::BoxFuture;

use crate::api::{AdminError, FilesystemInfo};

/// Filesystems that share how long content stays on drives, and when it is copied to an object store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemGroupInfo {
    /// Its name.
    pub name: String,
    /// How long what was uploaded stays on drives too, in seconds.
    pub retention_s: u64,
    /// How long after it was written anything is uploaded, in seconds.
    pub cue_s: u64,
    /// Filesystems that belong to it, by number, whether they have a store or not.
    pub filesystems: Vec<String>,
}

/// Times of a filesystem group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SetFilesystemGroup {
    /// How long what was uploaded stays on drives too, in seconds. `None`: as it was, or a day in a new group.
    pub retention_s: Option<u64>,
    /// How long after it was written anything is uploaded, in seconds. `None`: as it was; in a new group an hour, or a
    /// third of the retention if that is less.
    pub cue_s: Option<u64>,
}

/// The group that a filesystem is to belong to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveFilesystem {
    /// Its name.
    pub group: String,
}

/// Filesystem groups of a node.
pub trait FilesystemGroupControl: Send + Sync {
    /// All groups by number; the first is `default`.
    fn filesystem_groups(&self) -> BoxFuture<'_, Result<Vec<FilesystemGroupInfo>, AdminError>>;
    /// Adds one.
    fn add_filesystem_group(
        &self,
        name: String,
        settings: SetFilesystemGroup,
    ) -> BoxFuture<'_, Result<FilesystemGroupInfo, AdminError>>;
    /// Changes times of one, at once for all filesystems that belong to it and have none of their own.
    fn update_filesystem_group(
        &self,
        name: String,
        settings: SetFilesystemGroup,
    ) -> BoxFuture<'_, Result<FilesystemGroupInfo, AdminError>>;
    /// Removes one that no filesystem belongs to.
    fn remove_filesystem_group(&self, name: String)
    -> BoxFuture<'_, Result<FilesystemGroupInfo, AdminError>>;
    /// Has a filesystem belong to another group, whose times it follows at once.
    fn move_filesystem(
        &self,
        name: String,
        request: MoveFilesystem,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>>;
}
