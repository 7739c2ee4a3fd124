//! Requests to one drive: put, get, delete and list shards. Drives know extents, never files.

use base::{DriveId, DriveUuid, Epoch, ExtentId, Ino, LedgerId, PgId, ShardIndex};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::BoxFuture;
use crate::position::{KnownLedger, Position};

/// The full name of a shard on a drive. A shard is written once: other content needs another extent id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ShardKey {
    /// The ledger whose extent it is. Extent ids are unique inside a ledger only.
    pub ledger: LedgerId,
    /// The extent.
    pub extent: ExtentId,
    /// Which of its shards.
    pub shard: ShardIndex,
}

impl ShardKey {
    /// Sorts before or at all shards of a ledger.
    pub fn first_of(ledger: LedgerId) -> Self {
        Self { ledger, extent: ExtentId(0), shard: ShardIndex(0) }
    }

    /// Sorts after or at all shards of a ledger.
    pub fn last_of(ledger: LedgerId) -> Self {
        Self { ledger, extent: ExtentId(u64::MAX), shard: ShardIndex(u8::MAX) }
    }
}

/// The encoding of a shard's extent, kept with the shard so that an inventory can be read without metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardShape {
    /// The placement group that the extent was written to.
    pub pg: PgId,
    /// Data shards.
    pub k: u8,
    /// Parity shards.
    pub m: u8,
    /// Bytes of file data in the whole extent.
    pub extent_len: u32,
}

/// A writer's note beside a shard. The drive keeps it and does not use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct ShardNote {
    /// The file that the extent was written for; 0: not known, or several files. A hint in case metadata is lost: files
    /// change.
    pub ino: Ino,
    /// Where the extent begins in that file, in bytes.
    pub off: u64,
    /// Version of the key that encrypts its bytes; 0: they are not encrypted.
    pub key_version: u32,
}

/// Selects the segments for a shard: shards with similar lifetimes lie together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ShardClass {
    /// Replicated pieces up to 256 KiB, short-lived because the packer gathers them.
    Small,
    /// Shards of erasure-coded and packed extents.
    Bulk,
}

/// The purpose of a write. Each purpose stops at another fill level of the drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PutPurpose {
    /// New data. Stops at 95 % of the drive.
    Write,
    /// A shard that an extent should have already. Stops at 98 %, and takes turns with new data.
    Repair,
}

/// Stores one shard durably.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutShard {
    /// Its name.
    pub key: ShardKey,
    /// Its encoding.
    pub shape: ShardShape,
    /// The note beside it.
    pub note: ShardNote,
    /// The newest durable position of the ledger that the writer knows, if it knows one. The drive keeps it.
    pub position: Option<Position>,
    /// Its lifetime class.
    pub class: ShardClass,
    /// The purpose of the write.
    pub purpose: PutPurpose,
    /// The placement group's epoch that the writer knows.
    pub pg_epoch: Epoch,
    /// Whole blocks; the last one padded with zeros. At most 16 MiB, at least one block. They travel beside the message.
    #[serde(skip)]
    pub bytes: Bytes,
    /// [`base::checksum::block_checksum`] of every block, computed by the writer.
    pub checksums: Vec<u32>,
}

/// Forgets shards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeleteShards {
    /// Their names.
    pub keys: Vec<ShardKey>,
    /// The newest durable position of the ledger that asks, if it is known. The drive keeps it.
    pub position: Option<Position>,
    /// No commit will ever name these extents: the drive refuses puts of these shards that come later.
    #[serde(default)]
    pub is_void: bool,
}

impl From<Vec<ShardKey>> for DeleteShards {
    fn from(keys: Vec<ShardKey>) -> Self {
        Self { keys, position: None, is_void: false }
    }
}

/// The purpose of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GetPurpose {
    /// A user waits for the blocks, and may soon read the neighbouring ones.
    Read,
    /// Data is moved. Reads of users go first, and caches do not keep the blocks.
    Move,
}

/// Reads blocks of one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetShard {
    /// Its name.
    pub key: ShardKey,
    /// First block.
    pub first_block: u32,
    /// How many blocks; at least one.
    pub blocks: u32,
    /// The purpose of the read.
    pub purpose: GetPurpose,
}

/// Blocks as they lie on the drive. The reader verifies their checksums: end to end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardBlocks {
    /// `blocks` x 4096 bytes. They travel beside the message.
    #[serde(skip)]
    pub bytes: Bytes,
    /// The checksum kept for each block.
    pub checksums: Vec<u32>,
    /// The note beside the shard, if it was read for [`GetPurpose::Move`].
    pub note: Option<ShardNote>,
}

/// One shard in an inventory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// Its name.
    pub key: ShardKey,
    /// Its encoding.
    pub shape: ShardShape,
    /// Bytes of the shard, whole blocks.
    pub len_bytes: u32,
}

/// Whether a drive serves requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriveHealth {
    /// Reads and writes are served.
    Up,
    /// An I/O error ended its service; nothing retries it.
    Failed,
    /// Its node does not answer. That says nothing about the drive.
    Unreachable,
}

/// How a drive reaches its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IoPath {
    /// io_uring.
    IoUring,
    /// A pool of threads with pread and pwrite, because io_uring is not available.
    ThreadPool,
    /// A simulated device.
    Simulated,
}

/// A point in the history of a drive. A mark kept elsewhere shows when the drive was replaced by an older copy of
/// itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct DriveMark {
    /// How often it was opened.
    pub incarnation: u32,
    /// Its last durable write.
    pub seq: u64,
}

/// The space and state of a drive. `live + garbage + reserved + free = capacity`, always.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveStat {
    /// The id written on it.
    pub uuid: DriveUuid,
    /// The current point in its history.
    pub mark: DriveMark,
    /// Whether it serves requests.
    pub health: DriveHealth,
    /// Why it failed, for people.
    pub failure: Option<String>,
    /// How it reaches its device.
    pub io_path: IoPath,
    /// Size of the device or file.
    pub capacity_bytes: u64,
    /// Shards that were not deleted, with their frame headers.
    pub live_bytes: u64,
    /// Deleted shards and old frames not reclaimed yet.
    pub garbage_bytes: u64,
    /// Superblocks, index checkpoints and the room kept for cleaning.
    pub reserved_bytes: u64,
    /// Room for new shards.
    pub free_bytes: u64,
    /// The filesystem that holds the drive's file is full: nothing is written until it has room, reads go on.
    pub host_full: bool,
    /// A write found no room, and little was deleted since: cleaning cannot make room either.
    pub full: bool,
    /// Bytes given back to the filesystem or device below since the drive was opened.
    pub trimmed_bytes: u64,
    /// Most bytes of new data per second while cleaning is behind; `None`: no limit.
    pub write_limit_bytes_per_s: Option<u64>,
    /// Shards stored.
    pub shards: u64,
    /// Stored shards that a read, a scrub or the cleaner found damaged.
    pub bad_shards: u64,
    /// How old these figures are; 0: they were read for this answer.
    #[serde(default)]
    pub age_ms: u32,
    /// Of the garbage, the bytes that cleaning gives back. The rest are ends of segments, too short for another shard.
    #[serde(default)]
    pub cleanable_bytes: u64,
    /// What users had to wait for.
    #[serde(default)]
    pub foreground: Foreground,
}

/// Requests of users to a drive in the last one to two seconds. Repair, scrubs and moves do not count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Foreground {
    /// How many were answered.
    pub requests: u32,
    /// 99 % of them took at most so long, in microseconds, to within a quarter.
    pub p99_us: u32,
}

impl DriveStat {
    /// That of a drive of which nothing is known.
    pub fn unknown() -> Self {
        Self {
            uuid: DriveUuid([0; 16]),
            mark: DriveMark::default(),
            health: DriveHealth::Unreachable,
            failure: None,
            io_path: IoPath::ThreadPool,
            capacity_bytes: 0,
            live_bytes: 0,
            garbage_bytes: 0,
            reserved_bytes: 0,
            free_bytes: 0,
            host_full: false,
            full: false,
            trimmed_bytes: 0,
            write_limit_bytes_per_s: None,
            shards: 0,
            bad_shards: 0,
            age_ms: u32::MAX,
            cleanable_bytes: 0,
            foreground: Foreground::default(),
        }
    }

    /// Bytes of new shards for which it has room now.
    pub fn room_bytes(&self) -> u64 {
        if self.host_full { 0 } else { self.free_bytes }
    }

    /// As [`DriveStat::room_bytes`], plus garbage that cleaning can reclaim. A drive that refused a write promises nothing:
    /// what is free are ends of open segments, too short for that write.
    pub fn reclaimable_bytes(&self) -> u64 {
        if self.host_full || self.full { 0 } else { self.free_bytes + self.cleanable_bytes }
    }
}

/// A drive at a machine that is not reached. Every request fails.
#[derive(Debug)]
pub struct AwayDrive(pub DriveId);

impl AwayDrive {
    fn failed<T: Send + 'static>(&self) -> BoxFuture<'_, Result<T, DriveFailed>> {
        let drive = self.0;
        Box::pin(async move { Err(DriveFailed { drive }) })
    }
}

impl DriveService for AwayDrive {
    fn put(&self, _: PutShard) -> BoxFuture<'_, Result<(), PutShardError>> {
        let drive = self.0;
        Box::pin(async move { Err(PutShardError::Failed { drive }) })
    }

    fn get(&self, _: GetShard) -> BoxFuture<'_, Result<ShardBlocks, GetShardError>> {
        let drive = self.0;
        Box::pin(async move { Err(GetShardError::Failed { drive }) })
    }

    fn delete(&self, _: DeleteShards) -> BoxFuture<'_, Result<(), DriveFailed>> {
        self.failed()
    }

    fn keep_positions(&self, _: Vec<Position>, _: bool) -> BoxFuture<'_, Result<(), DriveFailed>> {
        self.failed()
    }

    fn known_ledgers(&self) -> BoxFuture<'_, Result<Vec<KnownLedger>, DriveFailed>> {
        self.failed()
    }

    fn list(&self, _: Option<ShardKey>, _: usize) -> BoxFuture<'_, Result<Vec<ShardEntry>, DriveFailed>> {
        self.failed()
    }

    fn scrub(&self, _: Option<ShardKey>, _: u64) -> BoxFuture<'_, Result<ScrubStep, DriveFailed>> {
        self.failed()
    }

    fn make_room(&self) -> BoxFuture<'_, Result<(), DriveFailed>> {
        self.failed()
    }

    fn health(&self) -> DriveHealth {
        DriveHealth::Unreachable
    }

    fn stat(&self) -> DriveStat {
        DriveStat::unknown()
    }
}

/// The result of one step of a scrub.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStep {
    /// Where to continue; `None` at the end of the pass.
    pub next: Option<ShardKey>,
    /// Bytes that matched their checksums.
    pub verified_bytes: u64,
    /// Shards that did not match or could not be read. Another put of a shard repairs it.
    pub bad: Vec<ShardKey>,
}

/// Why a shard was not stored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PutShardError {
    /// The drive has no room for user data; another placement group may.
    #[error("drive is full: drive={drive}")]
    NoSpace {
        /// Where.
        drive: DriveId,
    },
    /// The queue is longer than the drive's work of a tenth of a second. Nothing was stored; try again.
    #[error("drive is busy: drive={drive} retry_after_ms={retry_after_ms}")]
    Busy {
        /// Where.
        drive: DriveId,
        /// Estimated time until the queue has room.
        retry_after_ms: u32,
    },
    /// The same shard exists with other bytes: the writer reused an id, which it must never do.
    #[error("shard exists with other content: drive={drive} shard={key:?}")]
    Conflict {
        /// Where.
        drive: DriveId,
        /// Which.
        key: ShardKey,
    },
    /// The request breaks a limit or its checksums do not match its bytes.
    #[error("bad request: drive={drive} reason={reason}")]
    Invalid {
        /// Where.
        drive: DriveId,
        /// The broken rule.
        reason: String,
    },
    /// The drive's service has ended or cannot be reached. The shard may or may not be stored.
    #[error("drive has failed: drive={drive}")]
    Failed {
        /// Where.
        drive: DriveId,
    },
    /// The shard was deleted because its extent will never be committed.
    #[error("shard of a discarded extent: drive={drive}")]
    Void {
        /// Where.
        drive: DriveId,
    },
}

/// Why blocks were not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum GetShardError {
    /// The drive does not hold the shard: it was deleted, or is owed.
    #[error("no such shard: drive={drive} shard={key:?}")]
    NotFound {
        /// Where.
        drive: DriveId,
        /// Which.
        key: ShardKey,
    },
    /// The drive holds the shard, but its bytes are damaged; use another shard of the stripe.
    #[error("checksum mismatch: drive={drive} shard={key:?}")]
    Corrupt {
        /// Where.
        drive: DriveId,
        /// Which.
        key: ShardKey,
    },
    /// The blocks are outside the shard.
    #[error("out of range: drive={drive} shard={key:?}")]
    OutOfRange {
        /// Where.
        drive: DriveId,
        /// Which.
        key: ShardKey,
    },
    /// The drive's service has ended or cannot be reached.
    #[error("drive has failed: drive={drive}")]
    Failed {
        /// Where.
        drive: DriveId,
    },
}

/// The drive's service has ended or cannot be reached, or the request makes no sense. There are no other errors here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("drive has failed: drive={drive}")]
pub struct DriveFailed {
    /// Where.
    pub drive: DriveId,
}

/// One drive as its users see it. Cheap to call from any thread; every future resolves.
pub trait DriveService: Send + Sync {
    /// Stores a shard. It is durable after `Ok`.
    ///
    /// A second put of the same bytes is `Ok`, and rewrites a shard that is known to be damaged. Concurrent puts have
    /// no order.
    fn put(&self, request: PutShard) -> BoxFuture<'_, Result<(), PutShardError>>;

    /// Reads blocks of a shard with their checksums; never a short read.
    fn get(&self, request: GetShard) -> BoxFuture<'_, Result<ShardBlocks, GetShardError>>;

    /// Forgets shards, durably once it returns. Unknown shards are no error: a retry is harmless.
    fn delete(&self, request: DeleteShards) -> BoxFuture<'_, Result<(), DriveFailed>>;

    /// Keeps these positions, durably once it returns. Each replaces the kept position of its ledger if it is newer, or
    /// in any case if `replace` is set.
    fn keep_positions(
        &self,
        positions: Vec<Position>,
        replace: bool,
    ) -> BoxFuture<'_, Result<(), DriveFailed>>;

    /// The drive's knowledge of each ledger, in order of ledger numbers.
    fn known_ledgers(&self) -> BoxFuture<'_, Result<Vec<KnownLedger>, DriveFailed>>;

    /// The shards after `after` in key order, at most `limit` of them.
    fn list(
        &self,
        after: Option<ShardKey>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<ShardEntry>, DriveFailed>>;

    /// Verifies shards after `after` in key order, past every cache, until `budget_bytes` were read; at least one
    /// shard. Yields to reads and writes.
    fn scrub(
        &self,
        after: Option<ShardKey>,
        budget_bytes: u64,
    ) -> BoxFuture<'_, Result<ScrubStep, DriveFailed>>;

    /// Reclaims dead space for new data, even in parts that give back little. Returns once there is room for a few
    /// requests or nothing more to reclaim. Stops when its future is dropped.
    fn make_room(&self) -> BoxFuture<'_, Result<(), DriveFailed>>;

    /// Whether it serves requests, as far as is known here; from memory.
    fn health(&self) -> DriveHealth;

    /// Space and state, as far as is known here; from memory, never waits for the drive.
    fn stat(&self) -> DriveStat;
}
