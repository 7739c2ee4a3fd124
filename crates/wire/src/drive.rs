//! What one drive is asked: put, get, delete and list shards. Drives know extents, never files.

use base::{DriveId, DriveUuid, Epoch, ExtentId, Ino, LedgerId, PgId, ShardIndex};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::BoxFuture;
use crate::position::{KnownLedger, Position};

/// The full name of a shard on a drive. Written once; another content needs another extent id.
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
    /// In front of or at all shards of a ledger.
    pub fn first_of(ledger: LedgerId) -> Self {
        Self { ledger, extent: ExtentId(0), shard: ShardIndex(0) }
    }

    /// Behind or at all shards of a ledger.
    pub fn last_of(ledger: LedgerId) -> Self {
        Self { ledger, extent: ExtentId(u64::MAX), shard: ShardIndex(u8::MAX) }
    }
}

/// How the extent of a shard was encoded; kept with the shard so that an inventory explains itself.
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

/// What a writer notes beside a shard. The drive keeps it and does not use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct ShardNote {
    /// The file that the extent was written for; 0: not known, or several. A hint for when metadata is lost: files
    /// change.
    pub ino: Ino,
    /// Where the extent begins in that file, in bytes.
    pub off: u64,
    /// The version of the key that its bytes are encrypted with; 0: they are not encrypted.
    pub key_version: u32,
}

/// Which segments a shard goes to: shards that die together lie together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ShardClass {
    /// Replicated pieces up to 256 KiB, short-lived because the packer gathers them.
    Small,
    /// Shards of erasure-coded and packed extents.
    Bulk,
}

/// What a shard is written for: each stops at another level of free space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PutPurpose {
    /// New data. Stops at 95 % of the drive.
    Write,
    /// A shard that an extent should have already. Stops at 98 %, and takes turns with new data.
    Repair,
}

/// Stores one shard durably.
#[derive(Debug, Clone)]
pub struct PutShard {
    /// Its name.
    pub key: ShardKey,
    /// Its encoding.
    pub shape: ShardShape,
    /// What is noted beside it.
    pub note: ShardNote,
    /// The newest durable position of the ledger that the writer knows, if it knows one. The drive keeps it.
    pub position: Option<Position>,
    /// Its lifetime class.
    pub class: ShardClass,
    /// What it is written for.
    pub purpose: PutPurpose,
    /// The placement group's epoch that the writer knows.
    pub pg_epoch: Epoch,
    /// Whole blocks; the last one padded with zeros. At most 16 MiB, at least one block.
    pub bytes: Bytes,
    /// [`base::checksum::block_checksum`] of every block, computed by the writer.
    pub checksums: Vec<u32>,
}

/// Forgets shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeleteShards {
    /// Which.
    pub keys: Vec<ShardKey>,
    /// The newest durable position of the ledger that asks, if it is known. The drive keeps it.
    pub position: Option<Position>,
}

impl From<Vec<ShardKey>> for DeleteShards {
    fn from(keys: Vec<ShardKey>) -> Self {
        Self { keys, position: None }
    }
}

/// What blocks are read for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GetPurpose {
    /// Somebody waits for them, and may soon read what is beside them.
    Read,
    /// Data is moved. Reads of users go first, and nothing is kept in a cache for it.
    Move,
}

/// Reads blocks of one shard.
#[derive(Debug, Clone, Copy)]
pub struct GetShard {
    /// Its name.
    pub key: ShardKey,
    /// First block.
    pub first_block: u32,
    /// How many blocks; at least one.
    pub blocks: u32,
    /// What they are read for.
    pub purpose: GetPurpose,
}

/// Blocks as they lie on the drive. The reader verifies them against the checksums: end to end.
#[derive(Debug, Clone)]
pub struct ShardBlocks {
    /// `blocks` x 4096 bytes.
    pub bytes: Bytes,
    /// The checksum kept for each block.
    pub checksums: Vec<u32>,
    /// What is noted beside the shard, if it was read for [`GetPurpose::Move`].
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

/// Whether a drive serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriveHealth {
    /// Reads and writes are served.
    Up,
    /// An I/O error ended its service; nothing retries it.
    Failed,
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

/// How far the history of a drive has come. Kept apart from the drive, it shows that an older copy of it was put in its
/// place.
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
    /// What is written on it.
    pub uuid: DriveUuid,
    /// How far its own history has come.
    pub mark: DriveMark,
    /// Whether it serves.
    pub health: DriveHealth,
    /// Why it failed, for people.
    pub failure: Option<String>,
    /// How it does I/O.
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
    /// The filesystem that holds the drive has no room: nothing is written until it has, reads go on.
    pub host_full: bool,
    /// A write found no room, and little was deleted since: not even cleaning makes room for it.
    pub full: bool,
    /// Given back to the filesystem or device below since the drive was opened.
    pub trimmed_bytes: u64,
    /// New data that it takes per second while cleaning is behind; `None` if that is not limited.
    pub write_limit_bytes_per_s: Option<u64>,
    /// Shards stored.
    pub shards: u64,
    /// Of these, the ones known to be damaged: found so by a read, by a scrub or by the cleaner.
    pub bad_shards: u64,
}

impl DriveStat {
    /// Bytes of new shards that it would take now.
    pub fn room_bytes(&self) -> u64 {
        if self.host_full { 0 } else { self.free_bytes }
    }

    /// As [`DriveStat::room_bytes`], once what is deleted is reclaimed, as far as that can be.
    pub fn reclaimable_bytes(&self) -> u64 {
        self.room_bytes() + if self.host_full || self.full { 0 } else { self.garbage_bytes }
    }
}

/// What one step of a scrub found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStep {
    /// Where to go on; `None` at the end of the pass.
    pub next: Option<ShardKey>,
    /// Bytes that matched their checksums.
    pub verified_bytes: u64,
    /// Shards that did not, or could not be read. Putting one again heals it.
    pub bad: Vec<ShardKey>,
}

/// Why a shard was not stored.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PutShardError {
    /// The drive has no room for user data; another placement group may.
    #[error("drive is full: drive={drive}")]
    NoSpace {
        /// Where.
        drive: DriveId,
    },
    /// More is waiting than the drive does in a tenth of a second. Nothing was stored; come again.
    #[error("drive is busy: drive={drive} retry_after_ms={retry_after_ms}")]
    Busy {
        /// Where.
        drive: DriveId,
        /// When there will be room in the queue, about.
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
        /// What is wrong.
        reason: String,
    },
    /// The drive's service has ended. Whether the shard is there is unknown.
    #[error("drive has failed: drive={drive}")]
    Failed {
        /// Where.
        drive: DriveId,
    },
}

/// Why blocks were not read.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum GetShardError {
    /// The drive does not hold the shard: deleted meanwhile, or owed.
    #[error("no such shard: drive={drive} shard={key:?}")]
    NotFound {
        /// Where.
        drive: DriveId,
        /// Which.
        key: ShardKey,
    },
    /// The drive holds it but cannot vouch for it; use another shard of the stripe.
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
    /// The drive's service has ended.
    #[error("drive has failed: drive={drive}")]
    Failed {
        /// Where.
        drive: DriveId,
    },
}

/// The drive's service has ended or the request makes no sense; nothing else can go wrong here.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
#[error("drive has failed: drive={drive}")]
pub struct DriveFailed {
    /// Where.
    pub drive: DriveId,
}

/// One drive as its users see it. Cheap to call from any thread; every future resolves.
pub trait DriveService: Send + Sync {
    /// Stores a shard. After `Ok` it survives power loss.
    ///
    /// Storing the same bytes again is `Ok`, and rewrites a shard that is known to be damaged. Order among
    /// concurrent puts is not kept.
    fn put(&self, request: PutShard) -> BoxFuture<'_, Result<(), PutShardError>>;

    /// Reads blocks of a shard with their checksums; never a short read.
    fn get(&self, request: GetShard) -> BoxFuture<'_, Result<ShardBlocks, GetShardError>>;

    /// Forgets shards, durably once it returns. Unknown shards are fine: a retry is harmless.
    fn delete(&self, request: DeleteShards) -> BoxFuture<'_, Result<(), DriveFailed>>;

    /// Keeps these positions, durably once it returns. Each replaces the kept position of its ledger if it is newer, or in
    /// any case if `replace` is set.
    fn keep_positions(
        &self,
        positions: Vec<Position>,
        replace: bool,
    ) -> BoxFuture<'_, Result<(), DriveFailed>>;

    /// What it knows of each ledger, in order of their numbers.
    fn known_ledgers(&self) -> BoxFuture<'_, Result<Vec<KnownLedger>, DriveFailed>>;

    /// The shards after `after` in key order, at most `limit` of them.
    fn list(
        &self,
        after: Option<ShardKey>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<ShardEntry>, DriveFailed>>;

    /// Reads shards after `after` in key order past every cache and compares them with their checksums, until
    /// `budget_bytes` were read; at least one shard. Yields to reads and writes.
    fn scrub(
        &self,
        after: Option<ShardKey>,
        budget_bytes: u64,
    ) -> BoxFuture<'_, Result<ScrubStep, DriveFailed>>;

    /// Makes room for new data out of dead space, however little each part gives back. Returns once there is room for
    /// a few requests or nothing more comes back. Goes on only as long as it is waited for.
    fn make_room(&self) -> BoxFuture<'_, Result<(), DriveFailed>>;

    /// Whether it serves. Costs nothing.
    fn health(&self) -> DriveHealth;

    /// Space and state, from memory; never waits for the drive.
    fn stat(&self) -> DriveStat;
}
