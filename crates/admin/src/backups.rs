//! Backups of the metadata that the cluster makes by itself.

use serde::{Deserialize, Serialize};
use wire::BoxFuture;

use crate::api::AdminError;

/// When backups are made, and those that there are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupsInfo {
    /// Where they go: `store:NAME`, or a directory of the machine that owns the metadata.
    pub to: String,
    /// Seconds from one to the next.
    pub every_s: u64,
    /// How many are kept.
    pub keep: u32,
    /// None are made now.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub off: bool,
    /// One is being made, or should be.
    pub due: bool,
    /// One that is on its way to its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begun: Option<BackupInfo>,
    /// Those that there are, oldest first.
    pub made: Vec<BackupInfo>,
    /// Why the last attempt failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// A backup of the metadata.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupInfo {
    /// Name of the file, or of the group of objects.
    pub name: String,
    /// When it was begun, in seconds since 1970: all that was durable then is in it.
    pub begun_s: i64,
    /// Seconds since then.
    pub age_s: u64,
    /// Its size in bytes.
    pub size_bytes: u64,
}

/// Changes to the backups; `None` leaves one as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SetBackups {
    /// Where they go: `store:NAME`, or a directory.
    pub to: Option<String>,
    /// Seconds from one to the next.
    pub every_s: Option<u64>,
    /// How many are kept.
    pub keep: Option<u32>,
    /// No more are made.
    pub off: bool,
    /// One is made at once.
    pub now: bool,
}

/// The backups of the metadata.
pub trait BackupControl: Send + Sync {
    /// When they are made; `None`: nobody has asked for any.
    fn backups(&self) -> BoxFuture<'_, Result<Option<BackupsInfo>, AdminError>>;
    /// Changes when they are made, and where they go.
    fn set_backups(&self, request: SetBackups) -> BoxFuture<'_, Result<Option<BackupsInfo>, AdminError>>;
}
