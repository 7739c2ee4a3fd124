//! Filesystems and the object stores that they move data to: what can be asked of a node, and the answers.

use serde::{Deserialize, Serialize};
use wire::BoxFuture;
use wire::store::{StoreHealth, StoreOp};
use wire::tier::Forecast;

use crate::api::AdminError;

/// The store that a filesystem is to use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachStore {
    /// Its name.
    pub store: String,
    /// How long what was uploaded stays on drives too, in seconds. `None`: as it was, or as the filesystem group says.
    pub retention_s: Option<u64>,
    /// How long after it was written anything is uploaded, in seconds. `None`: as it was, or as the filesystem group says.
    pub cue_s: Option<u64>,
    /// Times that the filesystem had of its own are forgotten: those of its group count again.
    #[serde(default)]
    pub group_times: bool,
}

/// A filesystem that has a store. Sums of what was done are since it was attached or the node was started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierInfo {
    /// The filesystem.
    pub filesystem: String,
    /// The store.
    pub store: String,
    /// Its filesystem group.
    #[serde(default)]
    pub group: String,
    /// How long what was uploaded stays on drives too, in seconds.
    pub retention_s: u64,
    /// Whether that is the filesystem's own, not what its group says.
    #[serde(default)]
    pub has_own_retention: bool,
    /// How long after it was written anything is uploaded, in seconds.
    pub cue_s: u64,
    /// Whether that is the filesystem's own, not what its group says.
    #[serde(default)]
    pub has_own_cue: bool,
    /// `tiering` or `detaching`.
    pub state: String,
    /// Why something does not go on.
    pub problem: Option<String>,
    /// What was there before it was attached is not all queued yet.
    pub queueing: bool,
    /// Extents that wait for their upload.
    pub queued_extents: u64,
    /// Their bytes.
    pub queued_bytes: u64,
    /// Extents on drives and in the store.
    pub both_extents: u64,
    /// Their bytes.
    pub both_bytes: u64,
    /// Extents in the store only.
    pub away_extents: u64,
    /// Their bytes.
    pub away_bytes: u64,
    /// Blobs in use.
    pub blobs: u64,
    /// Their bytes in the store.
    pub stored_bytes: u64,
    /// Bytes of them that files have.
    pub live_bytes: u64,
    /// Bytes in the store beyond these, in percent of them, rounded up; `None`: files have nothing of what is there.
    pub overhead_percent: Option<u64>,
    /// Bytes of extents that were uploaded.
    pub uploaded_bytes: u64,
    /// Bytes of extents that left the drives.
    pub released_bytes: u64,
    /// Those of them that left before their time, because drives were filling up.
    pub released_early_bytes: u64,
    /// Blobs deleted from the store.
    pub deleted_blobs: u64,
    /// Bytes of extents that were stored again, so that their blobs could be deleted.
    pub rewritten_bytes: u64,
    /// Bytes that came back because the store is being left.
    pub returned_bytes: u64,
    /// Bytes of blobs that came from the store.
    pub fetched_bytes: u64,
    /// How full the drives are, or the filesystem's quota of them if that is fuller, in percent.
    pub fill_percent: u64,
    /// Whether the store answers.
    pub store_health: StoreHealth,
}

/// Requests to a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierOpsInfo {
    /// The filesystems that use it.
    pub filesystems: Vec<String>,
    /// The store.
    pub store: String,
    /// Those under way, then those that ended lately, the newest first.
    pub ops: Vec<StoreOp>,
}

/// What a filesystem takes with a retention, from how old its content is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForecastInfo {
    /// The filesystem.
    pub filesystem: String,
    /// Its store.
    pub store: String,
    /// The retention.
    pub retention_s: u64,
    /// Whether it is the one that the filesystem has.
    pub is_present: bool,
    /// What it takes.
    #[serde(flatten)]
    pub forecast: Forecast,
    /// Bytes that came from the store since this node serves the filesystem, and for how long it does.
    pub fetched_bytes: u64,
    /// See `fetched_bytes`.
    pub fetched_s: u64,
}

/// What is asked of a forecast.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ForecastRequest {
    /// A retention beside the one that each filesystem has.
    pub retention_s: Option<u64>,
}

/// A file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierFile {
    /// Its path inside the filesystem.
    pub path: String,
}

/// A step of bringing files back to drives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FetchStep {
    /// The files; at most [`FETCH_FILES_MAX`].
    pub files: Vec<FetchFile>,
}

/// Files in one step at most.
pub const FETCH_FILES_MAX: usize = 256;

/// A file that is brought back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FetchFile {
    /// Its path inside the filesystem.
    pub path: String,
    /// Where in the file the step begins.
    pub offset: u64,
}

/// Where a file's bytes are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierLocationInfo {
    /// The path inside the filesystem.
    pub path: String,
    /// The filesystem.
    pub filesystem: String,
    /// Its inode.
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

/// What a step brought back of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchFileInfo {
    /// Bytes that came back.
    pub bytes: u64,
    /// Where the next step begins; `None`: the file is on drives, unless there is a problem.
    pub next_offset: Option<u64>,
    /// If the step began with the file: how many bytes only the store had.
    pub away_bytes: Option<u64>,
    /// Why it is not.
    pub problem: Option<String>,
}

/// What left the drives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseInfo {
    /// Bytes of extents that left the drives.
    pub released_bytes: u64,
    /// Bytes of the file that are not uploaded yet, and stay.
    pub not_uploaded_bytes: u64,
}

/// Tiering of a node's filesystems.
pub trait TierControl: Send + Sync {
    /// Filesystems that have a store.
    fn tiers(&self) -> BoxFuture<'_, Result<Vec<TierInfo>, AdminError>>;
    /// Requests to their stores.
    fn tier_ops(&self) -> BoxFuture<'_, Result<Vec<TierOpsInfo>, AdminError>>;
    /// What retentions take: of each filesystem that has a store, its own, and the one that is asked for.
    fn tier_forecast(&self, request: ForecastRequest)
    -> BoxFuture<'_, Result<Vec<ForecastInfo>, AdminError>>;
    /// Moves data of a filesystem to a store from now on; with the store that it has, changes how.
    fn attach_store(&self, name: String, request: AttachStore)
    -> BoxFuture<'_, Result<TierInfo, AdminError>>;
    /// Brings everything back, and then leaves the store.
    fn detach_store(&self, name: String) -> BoxFuture<'_, Result<TierInfo, AdminError>>;
    /// Where a file's bytes are.
    fn tier_location(
        &self,
        name: String,
        path: String,
    ) -> BoxFuture<'_, Result<TierLocationInfo, AdminError>>;
    /// Brings some of files back to drives. Answers in their order; a step may bring nothing of the last ones.
    fn tier_fetch(
        &self,
        name: String,
        step: FetchStep,
    ) -> BoxFuture<'_, Result<Vec<FetchFileInfo>, AdminError>>;
    /// Takes what the store has of a file from the drives.
    fn tier_release(&self, name: String, file: TierFile) -> BoxFuture<'_, Result<ReleaseInfo, AdminError>>;
}
