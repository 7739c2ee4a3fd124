//! Requests to a node, and their answers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wire::BoxFuture;
use wire::event::Event;

use crate::backups::{BackupControl, BackupsInfo};
use crate::balancing::{BalanceFilesystem, FilesystemBalance};
use crate::damage::DamageInfo;
use crate::filesystem_groups::FilesystemGroupControl;
use crate::logs::{LogControl, LogInfo};
use crate::nodes::NodesControl;
use crate::placement::{Placement, SetNodes, SetPlacement, none_elsewhere};
use crate::stores::StoreControl;
use crate::tiers::{TierControl, TierInfo};
use crate::users::{AuditInfo, UserControl};
use crate::verification::{FilesystemVerification, VerifiedInfo, VerifyFilesystem};

/// A refusal: a code for programs, a sentence for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct AdminError {
    /// `not_found`, `conflict`, `invalid` or `failed`.
    pub code: String,
    /// What happened, to what, and what to do next.
    pub message: String,
}

impl AdminError {
    /// The object of the request does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self { code: "not_found".to_owned(), message: message.into() }
    }

    /// The present state does not allow it.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self { code: "conflict".to_owned(), message: message.into() }
    }

    /// The request is not valid.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self { code: "invalid".to_owned(), message: message.into() }
    }

    /// The operation failed.
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
    /// Space for owed shards once they are stored.
    pub owed_bytes: u64,
    /// Deleted shards that are not reclaimed yet.
    pub garbage_bytes: u64,
    /// Space for the format, cleaning and repair.
    pub reserved_bytes: u64,
    /// Room for new shards.
    pub free_bytes: u64,
}

impl std::iter::Sum for SpaceInfo {
    fn sum<I: Iterator<Item = Self>>(spaces: I) -> Self {
        spaces.fold(Self::default(), |sum, space| Self {
            capacity_bytes: sum.capacity_bytes + space.capacity_bytes,
            live_bytes: sum.live_bytes + space.live_bytes,
            owed_bytes: sum.owed_bytes + space.owed_bytes,
            garbage_bytes: sum.garbage_bytes + space.garbage_bytes,
            reserved_bytes: sum.reserved_bytes + space.reserved_bytes,
            free_bytes: sum.free_bytes + space.free_bytes,
        })
    }
}

impl SpaceInfo {
    /// Moves free space to the owed space, as far as it suffices.
    pub fn set_aside(&mut self, owed_bytes: u64) {
        let owed_bytes = owed_bytes.min(self.free_bytes);
        self.owed_bytes += owed_bytes;
        self.free_bytes -= owed_bytes;
    }
}

/// A drive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveInfo {
    /// Number of the drive.
    pub id: u32,
    /// UUID on the drive.
    pub uuid: String,
    /// The node that has it.
    #[serde(default)]
    pub node: u32,
    /// Path of the device or file there.
    pub path: String,
    /// `up`, `suspect` (much slower than its peers), `leaving` (read until it is empty), `failed`, `missing` or `out`.
    pub state: String,
    /// Why the drive is not up.
    pub reason: Option<String>,
    /// Whether the drive is full and takes no new data.
    pub full: bool,
    /// `io_uring` or `thread_pool`.
    pub io_path: Option<String>,
    /// Space of the drive.
    pub space: SpaceInfo,
    /// Shards on the drive.
    pub shards: u64,
    /// Bytes given back to the filesystem or device below since the drive was opened.
    pub trimmed_bytes: u64,
    /// Limit of new data in bytes per second while deleted space grows faster than it is cleaned; `None`: no limit.
    pub write_limit_bytes_per_s: Option<u64>,
    /// Placement groups that need the drive: as a member, or for shards that were not moved off it yet.
    pub groups: u32,
    /// The scrub of the drive.
    pub scrub: ScrubInfo,
    /// Shards on the drive that are known to be damaged now.
    #[serde(default)]
    pub damaged_shards: u64,
}

/// Verification of the shards of a drive.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubInfo {
    /// Seconds since the oldest verification of a shard; `None` before the first pass is over.
    pub oldest_s: Option<u64>,
    /// Whether a requested pass is still running.
    pub running: bool,
    /// Damaged shards found since the start of the node.
    pub bad_shards: u64,
}

/// Work of repair and rebuild in a filesystem. Sums count from the start of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairInfo {
    /// Owed shards that were stored.
    pub repaired_shards: u64,
    /// Bytes of these shards.
    pub repaired_bytes: u64,
    /// Placement groups with positions that are being rebuilt onto other drives.
    pub rebuilding_groups: u64,
    /// Shards restored by these rebuilds.
    pub rebuilt_shards: u64,
    /// Bytes of these shards.
    pub rebuilt_bytes: u64,
    /// Bytes left to rebuild, as of the last look.
    pub rebuild_left_bytes: u64,
    /// Shards that reads found damaged or missing, and that were restored.
    pub healed_shards: u64,
    /// Bytes per second while there is work.
    pub bytes_per_s: u64,
    /// Other nodes that restore shards on their drives now.
    #[serde(default)]
    pub helpers: u32,
    /// Shards that other nodes restored.
    #[serde(default)]
    pub helped_shards: u64,
    /// Seconds until everything is done that can be repaired and rebuilt now.
    pub eta_s: Option<u64>,
    /// Extents with fewer shards left than a read needs.
    pub lost_extents: u64,
}

/// Packing of a filesystem, and the layout of its content on the drives. Counters of work are since the start of the
/// node, the other values are of the last sweep.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackInfo {
    /// Sweeps over all extents; before the first one nothing is known.
    pub sweeps: u64,
    /// `idle`, `packing`, `paused`, `repair_first` or `no_room`.
    pub state: String,
    /// Bytes packed into new extents.
    pub packed_bytes: u64,
    /// New extents written by packing.
    pub extents: u64,
    /// Bytes in small pieces and in mostly dead extents. They are packed once they are old enough and there are enough
    /// of them.
    pub left_bytes: u64,
    /// Bytes in extents with another profile than new data gets: all of them are rewritten.
    pub convert_bytes: u64,
    /// Bytes per second of the last packing.
    pub bytes_per_s: u64,
    /// Seconds until the rest is packed and converted.
    pub eta_s: Option<u64>,
    /// Bytes of content in extents.
    pub stored_bytes: u64,
    /// Bytes of content in the metadata.
    pub inline_bytes: u64,
    /// Bytes of the extents on drives, without frame headers.
    pub allocated_bytes: u64,
    /// Share of these bytes that small, sparse and foreign extents take in addition to full ones.
    pub waste_bytes: u64,
}

/// The search for extents that nothing refers to. Sums are since the start of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrphanInfo {
    /// Extent id ranges in use by writers.
    pub open_ranges: u64,
    /// Extent id ranges of writers that have ended; they may contain orphans.
    pub closed_ranges: u64,
    /// Ranges that were searched and have no orphans left.
    pub verified_ranges: u64,
    /// Orphans deleted.
    pub deleted_extents: u64,
    /// Seconds since the last search; `None` before the first.
    pub searched_s: Option<u64>,
}

/// Limits of background work.
#[derive(Debug, Clone, Default, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpkeepInfo {
    /// Whether repair, rebuild, packing and the search for orphans are paused.
    pub paused: bool,
    /// Limit of their writes in bytes per second at each node; halved while foreground requests take twice as long as usual.
    pub rate_bytes_per_s: u64,
    /// Microseconds that 99 of 100 requests of users should not exceed at any drive: else they are held back, to an eighth of the rate
    /// at least. 0: they are not.
    #[serde(default)]
    pub keep_p99_below_us: u64,
    /// What that was in the last seconds, at the drive where users waited longest; 0: there were no users.
    #[serde(default)]
    pub p99_us: u64,
    /// Bytes per second to which they are held back now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_to_bytes_per_s: Option<u64>,
}

/// Changes to the limits of background work; `None` leaves one as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetUpkeep {
    /// Whether repair, rebuild, packing and the search for orphans are paused.
    pub paused: Option<bool>,
    /// Limit of their writes in bytes per second at each node.
    pub rate_bytes_per_s: Option<u64>,
    /// Microseconds that 99 of 100 requests of users should not exceed at any drive; 0: no limit.
    #[serde(default)]
    pub keep_p99_below_us: Option<u64>,
}

/// Space of the drives that stays free, so that others can take over what lost failure domains held.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpareInfo {
    /// The number of failure domains that may be lost.
    pub domains: u32,
    /// Their level: `drive`, `node`, `rack` or `zone`.
    pub level: String,
    /// Bytes that stay free, spread over all drives.
    pub kept_bytes: u64,
    /// Of these, bytes for further losses; the rest is there because shards are not spread evenly.
    pub left_bytes: u64,
    /// Bytes that are not any more, because drives were lost.
    pub used_bytes: u64,
    /// Capacity of the drives in use.
    pub all_bytes: u64,
}

/// How much of the drives is to stay free.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetSpares {
    /// The capacity of the largest failure domains, this number of them; 0: nothing.
    pub domains: u32,
    /// Their level; `None`: that over which shards are spread.
    #[serde(default)]
    pub level: Option<String>,
}

/// A ledger's copy in one directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaCopyInfo {
    /// The directory with metadata.
    pub dir: String,
    /// Size of its files in bytes, on the disk of that directory, in addition to the drives.
    pub size_bytes: u64,
    /// Whether the log there has every acknowledged batch.
    pub log_complete: bool,
    /// The newest batch in the local store there, if there is one.
    pub stored_seq: Option<u64>,
    /// The problem of this copy.
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
    /// Number of the ledger.
    pub id: u32,
    /// The owner's epoch.
    pub epoch: u64,
    /// The newest durable batch.
    pub committed_seq: u64,
    /// The newest batch in the local store.
    pub stored_seq: u64,
    /// `serving`, `no_space` (reads and deletions only) or `halted`.
    pub state: String,
    /// Why the ledger is not serving.
    pub reason: Option<String>,
    /// Whether drives may hold extents that only newer metadata refers to. If so, no extent counts as an orphan.
    pub in_doubt: bool,
    /// Copies of the ledger.
    pub copies: Vec<MetaCopyInfo>,
}

/// A filesystem without room for new data, or nearly so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShortageInfo {
    /// The limit that is reached: `drives`, `ssd_quota` or `size`.
    pub of: String,
    /// Bytes of content that can still be written.
    pub left_bytes: u64,
    /// Whether a write was refused for it, and would be refused again; otherwise one may soon be.
    pub refusing: bool,
    /// Whether content moves to an object store, so that writes wait for that before they are refused.
    pub tiered: bool,
}

/// A filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemInfo {
    /// Name of the filesystem.
    pub name: String,
    /// Profile for new data.
    pub profile: String,
    /// Profile of new data now: narrower than `profile` while too few drives are up.
    pub write_profile: String,
    /// Bytes of data narrower than the profile, counted at intervals from the drives' inventories.
    pub narrow_bytes: u64,
    /// Protection by this profile on the present drives.
    pub protection: String,
    /// Whether stored data is being moved until every drive has its share.
    #[serde(default)]
    pub balancing: bool,
    /// Placement groups of which data has still to move for that; `None`: not known yet, or it is not being balanced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balance_left_groups: Option<u64>,
    /// Mount point.
    pub mount: Option<String>,
    /// How requests of the mount come from the kernel: `device` or `uring`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<String>,
    /// The process of the mount, if it is one of its own, which outlives the node.
    #[serde(default)]
    pub mount_process: Option<u32>,
    /// Size as `df` shows it.
    pub total_bytes: u64,
    /// Bytes that can still be written.
    pub free_bytes: u64,
    /// Bytes of content stored, before redundancy.
    pub used_bytes: u64,
    /// Where new data goes.
    #[serde(default)]
    pub placement: Placement,
    /// The nodes whose drives its data is for; none: all nodes.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub nodes: BTreeSet<u32>,
    /// Placement groups with data at other nodes than these.
    #[serde(default, skip_serializing_if = "none_elsewhere")]
    pub groups_elsewhere: u64,
    /// Most bytes of content; `None`: as much as the drives hold.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// Most bytes of content on drives.
    #[serde(default)]
    pub ssd_bytes: Option<u64>,
    /// Bytes of content on drives, before redundancy.
    #[serde(default)]
    pub ssd_used_bytes: u64,
    /// The limit that is reached, if writes are refused for lack of room or soon may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shortage: Option<ShortageInfo>,
    /// Number of inodes: files, directories and other kinds.
    pub inodes: u64,
    /// Ledger of the filesystem.
    pub ledger: LedgerInfo,
    /// Shards that acknowledged writes lack and repair has not written yet. Counted up to 100,000.
    pub owed_shards: u64,
    /// Bytes of these shards.
    pub owed_bytes: u64,
    /// The drives that should hold these shards; for the affected extents they count as lost.
    pub owed_drives: Vec<u32>,
    /// Work of repair and rebuild.
    pub repair: RepairInfo,
    /// Extents deleted since the start of the node.
    pub reclaimed_extents: u64,
    /// Extents whose deletion waits for a drive.
    pub waiting_extents: u64,
    /// Work of packing.
    pub pack: PackInfo,
    /// The search for orphans.
    pub orphans: OrphanInfo,
    /// The last comparison of all shards with the metadata; `None`: there was none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verified: Option<VerifiedInfo>,
    /// Damage of the filesystem.
    #[serde(default)]
    pub damage: DamageInfo,
    /// Name of its filesystem group.
    #[serde(default)]
    pub group: String,
    /// Name of its object store, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<TierInfo>,
}

/// The node as a whole.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// The node that owns the metadata does not answer: only what this node knows by itself is here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub alone: bool,
    /// `healthy`, `degraded`, `damaged` if some data cannot be read for good, or `stuck` if the node does not answer;
    /// then most other fields are from its last answer.
    pub state: String,
    /// The problems, one sentence each.
    pub problems: Vec<String>,
    /// If a lock or call is stuck: all threads of the process, and the kernel functions they wait in, innermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stacks: Vec<String>,
    /// Id of the cluster.
    pub cluster: String,
    /// Version of the program.
    pub version: String,
    /// Process id.
    pub pid: u32,
    /// Directory of the node.
    pub dir: String,
    /// Seconds since the start.
    pub uptime_s: u64,
    /// Space of all drives together.
    pub space: SpaceInfo,
    /// Bytes of all copies of the metadata, on the disks of the metadata directories and not on the drives.
    pub metadata_bytes: u64,
    /// Limits of background work.
    pub upkeep: UpkeepInfo,
    /// Space that stays free for a loss; `None`: there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spare: Option<SpareInfo>,
    /// Backups of the metadata; `None`: nobody has asked for any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backups: Option<BackupsInfo>,
    /// Memory of the process.
    pub memory: MemoryInfo,
    /// URL of the S3 endpoint.
    #[serde(default)]
    pub s3: Option<String>,
    /// Where the logs of the ledgers are.
    #[serde(default)]
    pub log: LogInfo,
    /// Copies of the control ledger.
    pub control: Vec<MetaCopyInfo>,
    /// State of the audit log.
    pub audit: AuditInfo,
    /// All drives.
    pub drives: Vec<DriveInfo>,
    /// All filesystems.
    pub filesystems: Vec<FilesystemInfo>,
}

/// Memory of a node's process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryInfo {
    /// Limit in bytes: `start --memory`, or the default for the machine.
    pub budget_bytes: u64,
    /// Present use in bytes.
    pub resident_bytes: u64,
}

/// How a drive is taken out of service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FailDrive {
    /// Also if a filesystem loses data.
    pub force: bool,
}

/// A drive to add.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddDrive {
    /// Device or file; `None` makes a file in the node's directory.
    pub path: Option<String>,
    /// Size of a new file; `None`: size of the smallest drive.
    pub size_bytes: Option<u64>,
    /// The node that has it; `None`: the one that was asked.
    #[serde(default)]
    pub node: Option<u32>,
}

/// How a drive is removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveDrive {
    /// Also if the drive holds the last copy of data.
    pub force: bool,
}

/// A drive that replaces another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplaceDrive {
    /// Device or file.
    pub path: String,
    /// Size of a new file; `None`: size of the replaced drive.
    pub size_bytes: Option<u64>,
    /// Also if the old drive holds the last copy of data.
    pub force: bool,
}

/// The profile that new data of a filesystem gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetProfile {
    /// Profile such as `4+2`.
    pub profile: String,
}

/// A filesystem to create.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateFilesystem {
    /// Name of the filesystem.
    pub name: String,
    /// Profile for its data.
    pub profile: String,
    /// Most bytes of content, and size in `df`; `None` or 0: as much as the drives hold.
    pub size_bytes: Option<u64>,
    /// Most bytes of content on drives; `None` or 0: as much as they hold.
    #[serde(default)]
    pub ssd_bytes: Option<u64>,
    /// Name of its filesystem group; `None`: `default`.
    #[serde(default)]
    pub group: Option<String>,
    /// Where new data goes.
    #[serde(default, skip_serializing_if = "Placement::is_default")]
    pub placement: Placement,
    /// The nodes whose drives its data is for; none: all nodes.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub nodes: BTreeSet<u32>,
}

/// Limits of a filesystem in bytes. `None`: unchanged; 0: as much as the drives hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetLimits {
    /// Most bytes of content, and size in `df`.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// Most bytes of content on drives.
    #[serde(default)]
    pub ssd_bytes: Option<u64>,
}

/// Mount point and options.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MountRequest {
    /// An existing directory; `None`: `mnt` in the node's directory.
    pub path: Option<String>,
    /// Options such as `ro,noatime`; `None`: those of the last mount.
    pub options: Option<String>,
}

/// A shard of an extent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardInfo {
    /// Number of the shard; below k it holds data.
    pub shard: u8,
    /// Number of the drive.
    pub drive: u32,
    /// `up`, `owed`, `rebuilding`, or the state of the drive; in an unreadable piece also `damaged` or `lost`.
    pub state: String,
}

/// A piece of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentInfo {
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// `inline`, `copies`, `coded` or `object_store`.
    pub kind: String,
    /// Id of the extent.
    pub extent: Option<u64>,
    /// Offset of these bytes in the extent.
    pub extent_offset: Option<u64>,
    /// `n/k`.
    pub shape: Option<String>,
    /// Id of the placement group.
    pub group: Option<u32>,
    /// Shards of the extent.
    pub shards: Vec<ShardInfo>,
    /// Why the piece cannot be read, if known.
    #[serde(default)]
    pub reason: Option<String>,
    /// `ok`, `degraded` or `unreadable`.
    pub state: String,
}

/// The place of a file's bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WhyInfo {
    /// Path inside the filesystem.
    pub path: String,
    /// The filesystem.
    pub filesystem: String,
    /// Inode of the file.
    pub inode: u64,
    /// `regular`, `directory`, ...
    pub kind: String,
    /// Size in bytes.
    pub size: u64,
    /// Profile for new data.
    pub profile: String,
    /// Pieces of the file, at most the first 4096.
    pub extents: Vec<ExtentInfo>,
    /// Whether the file has more pieces.
    pub truncated: bool,
    /// `ok`, `degraded` or `unreadable`: the worst state of its pieces.
    pub state: String,
}

/// A finding of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckFinding {
    /// Short name for programs.
    pub code: String,
    /// The object and its fault.
    pub what: String,
    /// Meaning or advice.
    pub advice: String,
}

/// A filesystem that was checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckFilesystem {
    /// Name of the filesystem.
    pub name: String,
    /// Number of findings.
    pub findings_count: u64,
    /// The first findings.
    pub findings: Vec<FsckFinding>,
    /// Number of checked objects by kind: `inodes`, `names`, `pieces`, `extents`, `shards` and more.
    pub counts: BTreeMap<String, u64>,
}

/// A check of all filesystems.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckInfo {
    /// Whether the check still runs.
    pub running: bool,
    /// Present phase of the check.
    pub phase: String,
    /// Objects checked in this phase.
    pub items: u64,
    /// Why the check failed.
    pub error: Option<String>,
    /// Results, once the check has ended.
    pub filesystems: Vec<FsckFilesystem>,
}

/// The management interface of a node.
pub trait NodeControl:
    BackupControl
    + FilesystemGroupControl
    + LogControl
    + NodesControl
    + StoreControl
    + TierControl
    + UserControl
    + 'static
{
    /// State of the whole node.
    fn status(&self) -> BoxFuture<'_, Result<NodeStatus, AdminError>>;
    /// The state that is known without requests to other parts and without contended locks: for a node that is stuck.
    fn status_without_waiting(&self) -> NodeStatus;
    /// The last events, oldest first.
    fn events(&self) -> BoxFuture<'_, Result<Vec<Event>, AdminError>>;
    /// Adds a drive; new data uses it at once.
    fn add_drive(&self, request: AddDrive) -> BoxFuture<'_, Result<DriveInfo, AdminError>>;
    /// Takes a drive out of service permanently, as if it had died.
    fn fail_drive(&self, id: u32, request: FailDrive) -> BoxFuture<'_, Result<DriveInfo, AdminError>>;
    /// Uses a drive again that failed or was taken out of service, with its shards.
    fn return_drive(&self, id: u32) -> BoxFuture<'_, Result<DriveInfo, AdminError>>;
    /// Moves all shards off a drive, or rebuilds them from other drives if it does not answer.
    fn remove_drive(&self, id: u32, request: RemoveDrive) -> BoxFuture<'_, Result<DriveInfo, AdminError>>;
    /// Replaces a drive by a new one.
    fn replace_drive(&self, id: u32, request: ReplaceDrive) -> BoxFuture<'_, Result<DriveInfo, AdminError>>;
    /// Verifies all shards on a drive now; `None`: on all drives.
    fn scrub_drive(&self, id: Option<u32>) -> BoxFuture<'_, Result<Vec<DriveInfo>, AdminError>>;
    /// Changes the limits of background work.
    fn set_upkeep(&self, request: SetUpkeep) -> BoxFuture<'_, Result<UpkeepInfo, AdminError>>;
    /// Changes how much of the drives stays free for a loss. The drives that were lost before do not count any more.
    fn set_spares(&self, request: SetSpares) -> BoxFuture<'_, Result<Option<SpareInfo>, AdminError>>;
    /// Changes the profile. New data gets it at once, stored data is converted in the background.
    fn set_profile(
        &self,
        name: String,
        request: SetProfile,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>>;
    /// Moves stored data until every drive has its share, says what that would move, or ends it.
    fn balance(
        &self,
        name: String,
        request: BalanceFilesystem,
    ) -> BoxFuture<'_, Result<FilesystemBalance, AdminError>>;
    /// Changes where new data of a filesystem goes.
    fn set_placement(
        &self,
        name: String,
        request: SetPlacement,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>>;
    /// Changes the nodes whose drives a filesystem's data is for, or says what would move.
    fn set_nodes(
        &self,
        name: String,
        request: SetNodes,
    ) -> BoxFuture<'_, Result<FilesystemBalance, AdminError>>;
    /// Whether the drives have all shards of a filesystem.
    fn verify(
        &self,
        name: String,
        request: VerifyFilesystem,
    ) -> BoxFuture<'_, Result<FilesystemVerification, AdminError>>;
    /// Changes the limits of a filesystem's content.
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
    /// Unmounts a filesystem.
    fn unmount(&self, name: String) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>>;
    /// Makes all that the mount and the endpoints of a filesystem have written durable.
    fn sync(&self, name: String) -> BoxFuture<'_, Result<(), AdminError>>;
    /// Adds a directory with a copy of all metadata.
    fn add_meta_dir(&self, request: MetaDir) -> BoxFuture<'_, Result<NodeStatus, AdminError>>;
    /// Stops using the copy of the metadata in a directory.
    fn remove_meta_dir(&self, request: MetaDir) -> BoxFuture<'_, Result<NodeStatus, AdminError>>;
    /// Gives up metadata that is newer than the node's: orphans are searched for again.
    fn settle_metadata(&self) -> BoxFuture<'_, Result<NodeStatus, AdminError>>;
    /// Begins a check of all filesystems, unless one runs.
    fn start_fsck(self: Arc<Self>) -> BoxFuture<'static, Result<FsckInfo, AdminError>>;
    /// Progress of the check, or its findings.
    fn fsck(&self) -> BoxFuture<'_, Result<FsckInfo, AdminError>>;
    /// The place of a path's bytes.
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
