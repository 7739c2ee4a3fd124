//! Filesystems and their object stores: requests to a node, and their answers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use wire::BoxFuture;
use wire::store::{StoreHealth, StoreOp};
use wire::tier::Forecast;

use crate::api::AdminError;

/// The store for a filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachStore {
    /// Name of the store.
    pub store: String,
    /// Retention: seconds that uploaded content stays on drives too. `None`: unchanged, or the filesystem group's.
    pub retention_s: Option<u64>,
    /// Cue: seconds between a write and the upload of its content. `None`: unchanged, or the filesystem group's.
    pub cue_s: Option<u64>,
    /// Removes the filesystem's own times, so that those of its group apply.
    #[serde(default)]
    pub group_times: bool,
}

/// A filesystem with a store. Sums count from the attach or the start of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierInfo {
    /// The filesystem.
    pub filesystem: String,
    /// The store.
    pub store: String,
    /// The filesystem group.
    #[serde(default)]
    pub group: String,
    /// Retention: seconds that uploaded content stays on drives too.
    pub retention_s: u64,
    /// Whether the retention is the filesystem's own, and not its group's.
    #[serde(default)]
    pub has_own_retention: bool,
    /// Cue: seconds between a write and the upload of its content.
    pub cue_s: u64,
    /// Whether the cue is the filesystem's own, and not its group's.
    #[serde(default)]
    pub has_own_cue: bool,
    /// `tiering` or `detaching`.
    pub state: String,
    /// The error that stops tiering.
    pub problem: Option<String>,
    /// Content that was stored before the attach is not completely queued yet.
    pub queueing: bool,
    /// Extents that wait for their upload.
    pub queued_extents: u64,
    /// Bytes of these extents.
    pub queued_bytes: u64,
    /// Extents on drives and in the store.
    pub both_extents: u64,
    /// Bytes of these extents.
    pub both_bytes: u64,
    /// Extents in the store only.
    pub away_extents: u64,
    /// Bytes of these extents.
    pub away_bytes: u64,
    /// Blobs in use.
    pub blobs: u64,
    /// Bytes of these blobs in the store.
    pub stored_bytes: u64,
    /// Bytes in these blobs that files refer to.
    pub live_bytes: u64,
    /// Bytes in the store beyond the live ones, in percent of these, rounded up; `None`: no bytes in the store are
    /// live.
    pub overhead_percent: Option<u64>,
    /// Bytes of extents that were uploaded.
    pub uploaded_bytes: u64,
    /// The nodes that uploaded them, by number.
    #[serde(default)]
    pub uploaded_by: BTreeMap<u32, u64>,
    /// Bytes of extents that left the drives.
    pub released_bytes: u64,
    /// Released bytes that left before the retention had passed, because drives were filling up.
    pub released_early_bytes: u64,
    /// Blobs deleted from the store.
    pub deleted_blobs: u64,
    /// Bytes of extents that were uploaded again so that their old blobs could be deleted.
    pub rewritten_bytes: u64,
    /// Bytes that came back because of a detach.
    pub returned_bytes: u64,
    /// Bytes of blobs fetched from the store.
    pub fetched_bytes: u64,
    /// Fill of the drives, or of the filesystem's quota on them if that is fuller, in percent.
    pub fill_percent: u64,
    /// Health of the store.
    pub store_health: StoreHealth,
}

/// Requests to a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierOpsInfo {
    /// Filesystems that use the store.
    pub filesystems: Vec<String>,
    /// The store.
    pub store: String,
    /// Requests under way, then recent ones, newest first.
    pub ops: Vec<StoreOp>,
}

/// Forecast of a filesystem's space with a retention, from the present age of its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForecastInfo {
    /// The filesystem.
    pub filesystem: String,
    /// Name of its store.
    pub store: String,
    /// Retention in seconds.
    pub retention_s: u64,
    /// Whether this is the filesystem's present retention.
    pub is_present: bool,
    /// The forecast.
    #[serde(flatten)]
    pub forecast: Forecast,
    /// Bytes fetched from the store since this node serves the filesystem.
    pub fetched_bytes: u64,
    /// Seconds since this node serves the filesystem.
    pub fetched_s: u64,
}

/// Parameters of a forecast.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ForecastRequest {
    /// Retention in seconds, in addition to the present one of each filesystem.
    pub retention_s: Option<u64>,
}

/// A file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierFile {
    /// Path inside the filesystem.
    pub path: String,
}

/// A step of fetching files to drives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FetchStep {
    /// The files; at most [`FETCH_FILES_MAX`].
    pub files: Vec<FetchFile>,
}

/// Most files in one step.
pub const FETCH_FILES_MAX: usize = 256;

/// A file to fetch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FetchFile {
    /// Path inside the filesystem.
    pub path: String,
    /// Offset in the file at which the step begins.
    pub offset: u64,
}

/// The place of a file's bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierLocationInfo {
    /// Path inside the filesystem.
    pub path: String,
    /// The filesystem.
    pub filesystem: String,
    /// Inode of the file.
    pub inode: u64,
    /// Size in bytes.
    pub size: u64,
    /// Bytes on drives only.
    pub ssd_write_cache_bytes: u64,
    /// Bytes on drives and in the store.
    pub ssd_read_cache_bytes: u64,
    /// Bytes in the store only.
    pub object_store_bytes: u64,
}

/// Result of one step for a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchFileInfo {
    /// Bytes that came back.
    pub bytes: u64,
    /// Offset of the next step; `None`: the whole file is on drives, unless there is a problem.
    pub next_offset: Option<u64>,
    /// Bytes that only the store had; only in a step that begins at offset 0.
    pub away_bytes: Option<u64>,
    /// Why the fetch of the file failed.
    pub problem: Option<String>,
}

/// Result of releasing a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseInfo {
    /// Bytes of extents that left the drives.
    pub released_bytes: u64,
    /// Bytes of the file that are not uploaded yet, and stay on drives.
    pub not_uploaded_bytes: u64,
}

/// Tiering of a node's filesystems.
pub trait TierControl: Send + Sync {
    /// Filesystems that have a store.
    fn tiers(&self) -> BoxFuture<'_, Result<Vec<TierInfo>, AdminError>>;
    /// Requests to the stores of filesystems.
    fn tier_ops(&self) -> BoxFuture<'_, Result<Vec<TierOpsInfo>, AdminError>>;
    /// Forecasts for each filesystem with a store: for its own retention, and for the requested one.
    fn tier_forecast(&self, request: ForecastRequest)
    -> BoxFuture<'_, Result<Vec<ForecastInfo>, AdminError>>;
    /// Starts tiering of a filesystem to a store; if the filesystem has this store, changes its times.
    fn attach_store(&self, name: String, request: AttachStore)
    -> BoxFuture<'_, Result<TierInfo, AdminError>>;
    /// Brings all content back to drives, then detaches the store.
    fn detach_store(&self, name: String) -> BoxFuture<'_, Result<TierInfo, AdminError>>;
    /// The place of a file's bytes.
    fn tier_location(
        &self,
        name: String,
        path: String,
    ) -> BoxFuture<'_, Result<TierLocationInfo, AdminError>>;
    /// Brings parts of files back to drives. Answers in the order of the request; a step may bring nothing of the last
    /// files.
    fn tier_fetch(
        &self,
        name: String,
        step: FetchStep,
    ) -> BoxFuture<'_, Result<Vec<FetchFileInfo>, AdminError>>;
    /// Releases from drives the bytes of a file that the store has.
    fn tier_release(&self, name: String, file: TierFile) -> BoxFuture<'_, Result<ReleaseInfo, AdminError>>;
}
