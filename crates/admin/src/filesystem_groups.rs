//! Filesystem groups: requests to a node, and their answers.

use serde::{Deserialize, Serialize};
use wire::BoxFuture;

use crate::api::{AdminError, FilesystemInfo};

/// Filesystems that share their retention and their cue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemGroupInfo {
    /// Name of the group.
    pub name: String,
    /// Retention: seconds that uploaded content stays on drives too.
    pub retention_s: u64,
    /// Cue: seconds between a write and the upload of its content.
    pub cue_s: u64,
    /// Filesystems of the group, by number, with and without a store.
    pub filesystems: Vec<String>,
}

/// Times of a filesystem group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SetFilesystemGroup {
    /// Retention in seconds. `None`: unchanged, or a day in a new group.
    pub retention_s: Option<u64>,
    /// Cue in seconds. `None`: unchanged; in a new group an hour, or a third of the retention if that is less.
    pub cue_s: Option<u64>,
}

/// The new group of a filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveFilesystem {
    /// Name of the group.
    pub group: String,
}

/// Filesystem groups of a node.
pub trait FilesystemGroupControl: Send + Sync {
    /// All groups by number; the first is `default`.
    fn filesystem_groups(&self) -> BoxFuture<'_, Result<Vec<FilesystemGroupInfo>, AdminError>>;
    /// Adds a group.
    fn add_filesystem_group(
        &self,
        name: String,
        settings: SetFilesystemGroup,
    ) -> BoxFuture<'_, Result<FilesystemGroupInfo, AdminError>>;
    /// Changes times of a group, at once for all its filesystems that have no times of their own.
    fn update_filesystem_group(
        &self,
        name: String,
        settings: SetFilesystemGroup,
    ) -> BoxFuture<'_, Result<FilesystemGroupInfo, AdminError>>;
    /// Removes a group without filesystems.
    fn remove_filesystem_group(&self, name: String)
    -> BoxFuture<'_, Result<FilesystemGroupInfo, AdminError>>;
    /// Moves a filesystem to another group; the times of that group apply at once.
    fn move_filesystem(
        &self,
        name: String,
        request: MoveFilesystem,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>>;
}
