//! What can be asked of a node, and the answers.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wire::BoxFuture;
use wire::event::Event;

use crate::damage::DamageInfo;
use crate::filesystem_groups::FilesystemGroupControl;
use crate::stores::StoreControl;
use crate::tiers::{TierControl, TierInfo};
use crate::users::{AuditInfo, UserControl};

/// Why a request was refused: a code for programs, a sentence for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct AdminError {
    /// `not_found`, `conflict`, `invalid` or `failed`.
    pub code: String,
    /// What happened, to what, and what to do next.
    pub message: String,
}

impl AdminError {
    /// There is no such thing.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self { code: "not_found".to_owned(), message: message.into() }
    }

    /// It is not possible in the present state.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self { code: "conflict".to_owned(), message: message.into() }
    }

    /// The request makes no sense.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self { code: "invalid".to_owned(), message: message.into() }
    }

    /// Something broke on the way.
    pub fn failed(error: impl std::fmt::Display) -> Self {
        Self { code: "failed".to_owned(), message: error.to_string() }
    }
}

/// Space in bytes. `live + owed + garbage + reserved + free = capacity`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceInfo {
    /// Size of the devices.
    pub capacity_bytes: u64,
    /// Shards in use.
    pub live_bytes: u64,
    /// Room that owed shards will take once they are stored.
    pub owed_bytes: u64,
    /// Deleted shards that are not reclaimed yet.
    pub garbage_bytes: u64,
    /// Kept for the format, cleaning and repair.
    pub reserved_bytes: u64,
    /// Room for new shards.
    pub free_bytes: u64,
}

impl SpaceInfo {
    /// Counts free room as that of owed shards, as far as there is some.
    pub fn set_aside(&mut self, owed_bytes: u64) {
        let owed_bytes = owed_bytes.min(self.free_bytes);
        self.owed_bytes += owed_bytes;
        self.free_bytes -= owed_bytes;
    }
}

/// A drive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveInfo {
    /// Its number.
    pub id: u32,
    /// What is written on it.
    pub uuid: String,
    /// Device or file.
    pub path: String,
    /// `up`, `suspect` (much slower than its peers), `leaving` (read until it is empty), `failed`, `missing` or `out`.
    pub state: String,
    /// Why it is not up.
    pub reason: Option<String>,
    /// Whether it takes no new data for lack of room.
    pub full: bool,
    /// `io_uring` or `thread_pool`.
    pub io_path: Option<String>,
    /// Its space.
    pub space: SpaceInfo,
    /// Shards on it.
    pub shards: u64,
    /// Given back to the filesystem or device below since it was opened.
    pub trimmed_bytes: u64,
    /// New data that it takes per second while deleted space grows faster than it is cleaned; `None` is no limit.
    pub write_limit_bytes_per_s: Option<u64>,
    /// Placement groups that need it: as a member, or for what was not moved off it yet.
    pub groups: u32,
    /// Its scrub.
    pub scrub: ScrubInfo,
    /// Shards on it that are known to be damaged now.
    #[serde(default)]
    pub damaged_shards: u64,
}

/// How well the shards of a drive are known to be good.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubInfo {
    /// Seconds since the oldest verification of a shard; `None` before the first pass is over.
    pub oldest_s: Option<u64>,
    /// Whether a pass was asked for and is not over.
    pub running: bool,
    /// Damaged shards found since the start of the node.
    pub bad_shards: u64,
}

/// What repair and rebuild of a filesystem do. Sums are since the start of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairInfo {
    /// Owed shards that were stored.
    pub repaired_shards: u64,
    /// Their bytes.
    pub repaired_bytes: u64,
    /// Placement groups with positions that are rebuilt onto other drives.
    pub rebuilding_groups: u64,
    /// Shards restored for them.
    pub rebuilt_shards: u64,
    /// Their bytes.
    pub rebuilt_bytes: u64,
    /// Bytes that are still to be rebuilt, as of the last look.
    pub rebuild_left_bytes: u64,
    /// Shards that reads found damaged or missing, and that were restored.
    pub healed_shards: u64,
    /// Bytes per second while there is something to do.
    pub bytes_per_s: u64,
    /// Seconds until what can be repaired and rebuilt now is done.
    pub eta_s: Option<u64>,
    /// Extents of which fewer shards are left than reading needs.
    pub lost_extents: u64,
}

/// What packing of a filesystem does, and how its content lies on the drives. Sums of what was done are since the start
/// of the node, the others are of the last look at everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackInfo {
    /// Looks at everything; nothing is known before the first.
    pub sweeps: u64,
    /// `idle`, `packing`, `paused`, `repair_first` or `no_room`.
    pub state: String,
    /// Bytes that were gathered into new extents.
    pub packed_bytes: u64,
    /// New extents.
    pub extents: u64,
    /// Bytes of small pieces and of extents that are mostly dead. They move once they are old enough and there are
    /// enough of them.
    pub left_bytes: u64,
    /// Bytes in extents of another profile than new data gets: all of them are written anew.
    pub convert_bytes: u64,
    /// Bytes per second, of the last work.
    pub bytes_per_s: u64,
    /// Seconds until what is left is packed and converted.
    pub eta_s: Option<u64>,
    /// Bytes of content in extents.
    pub stored_bytes: u64,
    /// Bytes of content in the metadata.
    pub inline_bytes: u64,
    /// What the extents take on drives, without frame headers.
    pub allocated_bytes: u64,
    /// Of these, what small, sparse and foreign extents take beyond full ones.
    pub waste_bytes: u64,
}

/// The search for extents that nothing refers to. Sums are since the start of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrphanInfo {
    /// Ranges of extent ids that writers use.
    pub open_ranges: u64,
    /// Ranges of writers that have ended, in which orphans may be left.
    pub closed_ranges: u64,
    /// Ranges that were searched, and have none any more.
    pub verified_ranges: u64,
    /// Extents deleted.
    pub deleted_extents: u64,
    /// Seconds since the last search; `None` before the first.
    pub searched_s: Option<u64>,
}

/// Limits of background work.
#[derive(Debug, Clone, Default, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpkeepInfo {
    /// Whether repair, rebuild, packing and the search for orphans rest.
    pub paused: bool,
    /// Bytes per second that they may write; half of that while foreground requests take twice as long as usual.
    pub rate_bytes_per_s: u64,
}

/// Changes to the limits of background work; `None` leaves one as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetUpkeep {
    /// Whether repair, rebuild, packing and the search for orphans rest.
    pub paused: Option<bool>,
    /// Bytes per second that they may write.
    pub rate_bytes_per_s: Option<u64>,
}

/// A ledger's copy in one directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaCopyInfo {
    /// The directory with metadata.
    pub dir: String,
    /// Bytes that its files have, on the disk of that directory and beside the drives.
    pub size_bytes: u64,
    /// Whether the log there has everything that was acknowledged.
    pub log_complete: bool,
    /// The newest batch in the local store there, if there is one.
    pub stored_seq: Option<u64>,
    /// What is wrong with it.
    pub problem: Option<String>,
}

/// A directory with metadata.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetaDir {
    /// Its path.
    pub path: String,
}

/// A ledger and its owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerInfo {
    /// Its number.
    pub id: u32,
    /// The owner's epoch.
    pub epoch: u64,
    /// The newest durable batch.
    pub committed_seq: u64,
    /// The newest batch in the local store.
    pub stored_seq: u64,
    /// `serving`, `no_space` (reads and deletions only) or `halted`.
    pub state: String,
    /// Why it is not serving.
    pub reason: Option<String>,
    /// Whether drives may hold what only newer metadata refers to, so that nothing is taken for an orphan.
    pub in_doubt: bool,
    /// Its copies.
    pub copies: Vec<MetaCopyInfo>,
}

/// A filesystem has no room for new data, or next to none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShortageInfo {
    /// What is used up: its `drives`, its `ssd_quota` of them, or its `size`.
    pub of: String,
    /// Bytes of content that can still be written.
    pub left_bytes: u64,
    /// Whether a write was refused for it, and would be again; else so little is left that one soon may be.
    pub refusing: bool,
    /// Whether content leaves its drives for an object store, so that writes wait for that first.
    pub tiered: bool,
}

/// A filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemInfo {
    /// Its name.
    pub name: String,
    /// How new data is to be protected.
    pub profile: String,
    /// How it is protected now: narrower than the profile while too few drives are up.
    pub write_profile: String,
    /// Bytes of data that are narrower than the profile, counted from the drives' inventories now and then.
    pub narrow_bytes: u64,
    /// What that means on the drives there are now.
    pub protection: String,
    /// Where it is mounted.
    pub mount: Option<String>,
    /// Size as `df` shows it.
    pub total_bytes: u64,
    /// Bytes that can still be written.
    pub free_bytes: u64,
    /// Bytes of content stored, before redundancy.
    pub used_bytes: u64,
    /// What it may hold at most; `None`: whatever the drives do.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// Those of them that may lie on drives.
    #[serde(default)]
    pub ssd_bytes: Option<u64>,
    /// Bytes of content on drives, before redundancy.
    #[serde(default)]
    pub ssd_used_bytes: u64,
    /// What is used up, if writes are refused for lack of room or soon may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shortage: Option<ShortageInfo>,
    /// Files, directories and the rest.
    pub inodes: u64,
    /// Its metadata.
    pub ledger: LedgerInfo,
    /// Shards that writes went ahead without and that are not repaired. Counted up to 100,000.
    pub owed_shards: u64,
    /// Their bytes.
    pub owed_bytes: u64,
    /// The drives that should hold them: to the extents concerned these are lost.
    pub owed_drives: Vec<u32>,
    /// Repair and rebuild.
    pub repair: RepairInfo,
    /// Extents deleted since the start.
    pub reclaimed_extents: u64,
    /// Extents whose deletion waits for a drive.
    pub waiting_extents: u64,
    /// Packing.
    pub pack: PackInfo,
    /// The search for orphans.
    pub orphans: OrphanInfo,
    /// Damage.
    #[serde(default)]
    pub damage: DamageInfo,
    /// The filesystem group that it belongs to.
    #[serde(default)]
    pub group: String,
    /// Its object store, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<TierInfo>,
}

/// The node as a whole.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// `healthy`, `degraded`, `damaged` if some data cannot be read for good, or `stuck` if the node does not answer; then
    /// most of the rest is what it last said.
    pub state: String,
    /// What keeps it from being healthy, one sentence each.
    pub problems: Vec<String>,
    /// The cluster's identity.
    pub cluster: String,
    /// Version of the program.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Its directory.
    pub dir: String,
    /// Seconds since it was started.
    pub uptime_s: u64,
    /// All drives together.
    pub space: SpaceInfo,
    /// Bytes of all copies of the metadata. They are on the disks of the metadata directories, not on the drives.
    pub metadata_bytes: u64,
    /// Limits of background work.
    pub upkeep: UpkeepInfo,
    /// Memory of the process.
    pub memory: MemoryInfo,
    /// Where S3 is served: a URL.
    #[serde(default)]
    pub s3: Option<String>,
    /// The control ledger's copies.
    pub control: Vec<MetaCopyInfo>,
    /// The audit log.
    pub audit: AuditInfo,
    /// Each drive.
    pub drives: Vec<DriveInfo>,
    /// Each filesystem.
    pub filesystems: Vec<FilesystemInfo>,
}

/// Memory of a node's process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryInfo {
    /// What it may take: `start --memory`, or what suits the machine.
    pub budget_bytes: u64,
    /// What it has now.
    pub resident_bytes: u64,
}

/// How a drive is taken out of service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FailDrive {
    /// Even if a filesystem loses data by it.
    pub force: bool,
}

/// A drive to add.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddDrive {
    /// Device or file; `None` makes a file in the node's directory.
    pub path: Option<String>,
    /// Size of a file; `None` is as large as the smallest drive.
    pub size_bytes: Option<u64>,
}

/// How a drive is removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveDrive {
    /// Even if data is lost that only it holds.
    pub force: bool,
}

/// A drive that takes the place of another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplaceDrive {
    /// Device or file.
    pub path: String,
    /// Size of a file; `None` is as large as the drive that it replaces.
    pub size_bytes: Option<u64>,
    /// Even if data is lost that only the old drive holds.
    pub force: bool,
}

/// The profile that new data of a filesystem gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetProfile {
    /// Such as `4+2`.
    pub profile: String,
}

/// A filesystem to create.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateFilesystem {
    /// Its name.
    pub name: String,
    /// How its data is protected.
    pub profile: String,
    /// Bytes that it may hold, and size as `df` shows it; `None` or 0: whatever the drives hold.
    pub size_bytes: Option<u64>,
    /// Those of them that may lie on drives; `None` or 0: whatever these hold.
    #[serde(default)]
    pub ssd_bytes: Option<u64>,
    /// The filesystem group that it is to belong to; `None`: `default`.
    #[serde(default)]
    pub group: Option<String>,
}

/// How much a filesystem may hold. `None`: as before; 0: whatever the drives hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetLimits {
    /// In all, and size as `df` shows it.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// On drives.
    #[serde(default)]
    pub ssd_bytes: Option<u64>,
}

/// Where to mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MountRequest {
    /// An existing directory; `None` is `mnt` in the node's directory.
    pub path: Option<String>,
    /// Options such as `ro,noatime`; `None` is those of the last time.
    pub options: Option<String>,
}

/// A shard of an extent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardInfo {
    /// Its number; below k it holds data.
    pub shard: u8,
    /// The drive.
    pub drive: u32,
    /// `up`, `owed`, `rebuilding`, or what the drive is; of a piece that cannot be read, `damaged` or `lost`.
    pub state: String,
}

/// A piece of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentInfo {
    /// Offset in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// `inline`, `copies`, `coded` or `object_store`.
    pub kind: String,
    /// The extent's number.
    pub extent: Option<u64>,
    /// Where in the extent these bytes begin.
    pub extent_offset: Option<u64>,
    /// `n/k`.
    pub shape: Option<String>,
    /// The placement group.
    pub group: Option<u32>,
    /// Where its shards lie.
    pub shards: Vec<ShardInfo>,
    /// Why it cannot be read, if that is known.
    #[serde(default)]
    pub reason: Option<String>,
    /// `ok`, `degraded` or `unreadable`.
    pub state: String,
}

/// Where a file's bytes are and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WhyInfo {
    /// The path inside the filesystem.
    pub path: String,
    /// The filesystem.
    pub filesystem: String,
    /// Its inode.
    pub inode: u64,
    /// `regular`, `directory`, ...
    pub kind: String,
    /// Size in bytes.
    pub size: u64,
    /// The profile that new data gets.
    pub profile: String,
    /// Its pieces, at most the first 4096.
    pub extents: Vec<ExtentInfo>,
    /// Whether there are more pieces than shown.
    pub truncated: bool,
    /// `ok`, `degraded` or `unreadable`: the worst of its pieces.
    pub state: String,
}

/// Something that a check found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckFinding {
    /// A short name for programs.
    pub code: String,
    /// What is wrong, and with what.
    pub what: String,
    /// What it means or what to do.
    pub advice: String,
}

/// A filesystem that was checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckFilesystem {
    /// Its name.
    pub name: String,
    /// How many findings there are.
    pub findings_count: u64,
    /// The first of them.
    pub findings: Vec<FsckFinding>,
    /// What was looked at: `inodes`, `names`, `pieces`, `extents`, `shards` and more.
    pub counts: BTreeMap<String, u64>,
}

/// A check of all filesystems.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckInfo {
    /// Whether it still runs.
    pub running: bool,
    /// What is being looked at.
    pub phase: String,
    /// How much of that was.
    pub items: u64,
    /// Why it could not be done.
    pub error: Option<String>,
    /// What was found, once it has ended.
    pub filesystems: Vec<FsckFilesystem>,
}

/// What a node lets its operator see and do.
pub trait NodeControl: FilesystemGroupControl + StoreControl + TierControl + UserControl + 'static {
    /// Everything at a glance.
    fn status(&self) -> BoxFuture<'_, Result<NodeStatus, AdminError>>;
    /// What is known without asking anybody and without a lock that others hold for long: for a node that is stuck.
    fn status_without_waiting(&self) -> NodeStatus;
    /// The last events, oldest first.
    fn events(&self) -> BoxFuture<'_, Result<Vec<Event>, AdminError>>;
    /// Adds a drive; new data uses it at once.
    fn add_drive(&self, request: AddDrive) -> BoxFuture<'_, Result<DriveInfo, AdminError>>;
    /// Takes a drive out of service for good, as if it had died.
    fn fail_drive(&self, id: u32, request: FailDrive) -> BoxFuture<'_, Result<DriveInfo, AdminError>>;
    /// Uses a drive again that failed or was taken out of service, with what it has.
    fn return_drive(&self, id: u32) -> BoxFuture<'_, Result<DriveInfo, AdminError>>;
    /// Moves everything off a drive, or rebuilds it from others if it does not answer.
    fn remove_drive(&self, id: u32, request: RemoveDrive) -> BoxFuture<'_, Result<DriveInfo, AdminError>>;
    /// Puts a new drive in the place of another.
    fn replace_drive(&self, id: u32, request: ReplaceDrive) -> BoxFuture<'_, Result<DriveInfo, AdminError>>;
    /// Verifies everything on a drive now; `None`: on all of them.
    fn scrub_drive(&self, id: Option<u32>) -> BoxFuture<'_, Result<Vec<DriveInfo>, AdminError>>;
    /// Changes the limits of background work.
    fn set_upkeep(&self, request: SetUpkeep) -> BoxFuture<'_, Result<UpkeepInfo, AdminError>>;
    /// Changes the profile. New data has it at once, the rest is converted in the background.
    fn set_profile(
        &self,
        name: String,
        request: SetProfile,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>>;
    /// Changes how much a filesystem may hold.
    fn set_limits(
        &self,
        name: String,
        request: SetLimits,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>>;
    /// Creates a filesystem.
    fn create_filesystem(
        &self,
        request: CreateFilesystem,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>>;
    /// Mounts a filesystem.
    fn mount(&self, name: String, request: MountRequest)
    -> BoxFuture<'_, Result<FilesystemInfo, AdminError>>;
    /// Unmounts it.
    fn unmount(&self, name: String) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>>;
    /// Adds a directory with a copy of all metadata.
    fn add_meta_dir(&self, request: MetaDir) -> BoxFuture<'_, Result<NodeStatus, AdminError>>;
    /// Goes on without the copy of the metadata in a directory.
    fn remove_meta_dir(&self, request: MetaDir) -> BoxFuture<'_, Result<NodeStatus, AdminError>>;
    /// Says that metadata that is newer than what the node has will not come back: orphans are looked for again.
    fn settle_metadata(&self) -> BoxFuture<'_, Result<NodeStatus, AdminError>>;
    /// Begins a check of all filesystems, unless one runs.
    fn start_fsck(self: Arc<Self>) -> BoxFuture<'static, Result<FsckInfo, AdminError>>;
    /// How far it is, or what it found.
    fn fsck(&self) -> BoxFuture<'_, Result<FsckInfo, AdminError>>;
    /// Explains where a path's bytes are.
    fn why(&self, name: String, path: String) -> BoxFuture<'_, Result<WhyInfo, AdminError>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owed_room_comes_out_of_what_is_free_and_the_sum_stays() {
        for (owed_bytes, free_bytes) in [(0, 30), (20, 10), (500, 0)] {
            let mut space =
                SpaceInfo { capacity_bytes: 100, live_bytes: 50, free_bytes: 30, ..SpaceInfo::default() };
            (space.garbage_bytes, space.reserved_bytes) = (15, 5);
            space.set_aside(owed_bytes);
            let parts = [
                space.live_bytes,
                space.owed_bytes,
                space.garbage_bytes,
                space.reserved_bytes,
                space.free_bytes,
            ];
            assert_eq!((space.free_bytes, parts.iter().sum()), (free_bytes, space.capacity_bytes));
        }
    }
}
