//! Tiering as the owner of a ledger keeps it: which extents lie on drives, in blobs of an object store, or both.
//!
//! An extent is uploaded as a whole, so maps of files never change for it. Every answer that names a blob's place is
//! valid as long as extents of the same map are: a blob is deleted only when no read uses a map from before.

use base::{Epoch, ExtentId, Ino, MapId, PgId};
use serde::{Deserialize, Serialize};

use crate::meta::ExtentRef;

/// Where an extent lies in a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlobPlace {
    /// Which blob of the ledger.
    pub serial: u64,
    /// Epoch of the owner that numbered it: part of its name.
    pub term: Epoch,
    /// Where in the blob the extent's first byte is.
    pub off: u32,
    /// Bytes of the whole blob.
    pub blob_bytes: u32,
}

/// Where an extent lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// On drives only; it waits for its upload.
    Queued,
    /// On drives and in a blob.
    Both,
    /// In a blob only.
    Tiered,
}

/// The file that an extent was written for, and where in it the extent begins. A hint: files change, and what gathers
/// several files has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Origin {
    /// The file; 0: not known.
    pub ino: Ino,
    /// Its map; 0: not known.
    pub map: MapId,
    /// Where the extent begins in the map.
    pub off: u64,
}

/// An extent whose time for the next step may have come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DueExtent {
    /// Which, as a whole.
    pub extent: ExtentRef,
    /// When it was written, or attached if that was later, in seconds since 1970.
    pub written_s: u64,
    /// The directory of the file that it was written for, or that file if it had none; 0: not known.
    pub directory: Ino,
    /// That file.
    pub origin: Origin,
}

/// How old an extent is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgedExtent {
    /// When it was written, or attached if that was later, in seconds since 1970.
    pub written_s: u64,
    /// Its bytes.
    pub bytes: u32,
    /// What they take on drives.
    pub raw_bytes: u32,
}

/// What a retention takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forecast {
    /// Bytes of content on drives.
    pub drive_bytes: u64,
    /// The same with redundancy.
    pub drive_raw_bytes: u64,
    /// Bytes of content in the store: what is older than the cue.
    pub store_bytes: u64,
    /// Bytes written each day that are still there.
    pub written_bytes_per_day: u64,
    /// Blobs stored each day.
    pub puts_per_day: u64,
    /// How far back what is known reaches, in seconds. A longer retention is reckoned from the rate of writing.
    pub known_s: u64,
}

/// An extent in a new blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uploaded {
    /// Which.
    pub id: ExtentId,
    /// Where in the blob its first byte is.
    pub off: u32,
    /// The blob that its bytes were taken from; `None`: from drives.
    pub from: Option<u64>,
}

/// A blob that is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobStat {
    /// Its number.
    pub serial: u64,
    /// Epoch of the owner that numbered it.
    pub term: Epoch,
    /// Bytes of the object.
    pub bytes: u32,
    /// Bytes of it that files have.
    pub live_bytes: u64,
}

/// An extent in a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct InBlob {
    /// Which, as a whole.
    pub extent: ExtentRef,
    /// Where in the blob.
    pub place: BlobPlace,
    /// Whether drives have it too.
    pub stage: Stage,
    /// The file that it was written for.
    pub origin: Origin,
}

/// A part of a file and where it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePart {
    /// Bytes of the file.
    pub bytes: u64,
    /// The extent, unless the bytes are in the ledger.
    pub extent: Option<ExtentId>,
    /// Where it lies; `None`: on drives, and it does not wait for anything.
    pub stage: Option<Stage>,
}

/// Extents and their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StageStat {
    /// How many.
    pub extents: u64,
    /// Their bytes, before redundancy.
    pub bytes: u64,
}

/// Whether a ledger tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TierMode {
    /// It does not, and nothing of it is in blobs.
    #[default]
    Off,
    /// New extents wait for their upload.
    On,
    /// Everything comes back to drives.
    Leaving,
}

/// Sums over a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TierStat {
    /// Whether it tiers.
    pub mode: TierMode,
    /// What was there before it tiered is not all queued yet.
    pub queueing: bool,
    /// Extents that wait for their upload.
    pub queued: StageStat,
    /// Extents on drives and in blobs.
    pub both: StageStat,
    /// Extents in blobs only.
    pub away: StageStat,
    /// Blobs in use.
    pub blobs: u64,
    /// Their bytes in the store.
    pub stored_bytes: u64,
    /// Bytes of them that files have.
    pub live_bytes: u64,
}

impl TierStat {
    /// Bytes in the store beyond those that files have, in thousandths of the latter.
    pub fn overhead_per_mille(&self) -> u64 {
        let dead = self.stored_bytes.saturating_sub(self.live_bytes);
        match self.live_bytes {
            0 if dead > 0 => u64::MAX,
            0 => 0,
            live => (u128::from(dead) * 1000 / u128::from(live)) as u64,
        }
    }
}

/// What the owner is asked about tiering.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named as what they hold is elsewhere")]
pub enum TierRequest {
    /// From now on new extents wait for their upload, and step by step all others. Those that are away must be in the same
    /// store: whoever was leaving it stays.
    Attach,
    /// Queues a bounded number of the extents that were there before. Answer: `More`.
    QueueStep,
    /// No extent waits for its upload any more. What is away must be fetched by whoever asks.
    Leave,
    /// Forgets a bounded number of blobs' extents that are on drives too. Answer: `More`; when there is no more, and
    /// nothing is away or waits to be deleted, the ledger does not tier any more.
    LeaveStep,
    /// Extents in this stage that were written at or before `before_s`, oldest first, beyond the one given.
    /// Answer: `Due`.
    Due { stage: Stage, before_s: u64, after: Option<(u64, ExtentId)>, limit: u32 },
    /// All extents that tier, wherever they lie, beyond the one given. Answer: `Ages`.
    Ages { after: Option<ExtentId>, limit: u32 },
    /// A number for a new blob. Answer: `Reserved`.
    Reserve,
    /// The blob is stored. Answer: `Committed`.
    Commit { serial: u64, bytes: u32, extents: Vec<Uploaded> },
    /// Nothing will refer to the blob: it is to be deleted.
    Abandon { serial: u64 },
    /// Takes extents that are in both places from the drives. Answer: `Released`.
    Release { ids: Vec<ExtentId> },
    /// Blobs in use beyond the one given. Answer: `Blobs`.
    Blobs { after: Option<u64>, limit: u32 },
    /// Extents in a blob beyond the one given. Answer: `Inside`.
    Inside { serial: u64, after: Option<ExtentId>, limit: u32 },
    /// Blobs that nothing refers to and no reader uses. Answer: `Dead`.
    Dead { limit: u32 },
    /// They are no longer in the store.
    Deleted { serials: Vec<u64> },
    /// Parts of a file from `off` on, in order. Answer: `Parts`.
    Parts { ino: Ino, off: u64, limit: u32 },
    /// Answer: `Stat`.
    Stat,
}

/// The answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the variants are named by the requests they answer")]
pub enum TierReply {
    Done,
    More(bool),
    Due(Vec<DueExtent>),
    /// `next`: where to go on, if there may be more.
    Ages {
        ages: Vec<AgedExtent>,
        next: Option<ExtentId>,
    },
    Reserved {
        serial: u64,
        term: Epoch,
    },
    /// Bytes of extents that refer to the blob now; if none, it is to be deleted.
    Committed {
        bytes: u64,
    },
    /// How many were, and their bytes.
    Released(StageStat),
    Blobs(Vec<BlobStat>),
    Inside(Vec<InBlob>),
    Dead(Vec<(u64, Epoch)>),
    /// `next`: where to go on, if there may be more.
    Parts {
        parts: Vec<FilePart>,
        next: Option<u64>,
    },
    Stat(TierStat),
}

/// Most extents that one request names.
pub const TIER_EXTENTS_MAX: usize = 16_384;

/// A whole extent, for requests that name no part of it.
pub fn whole(id: ExtentId, pg: PgId, (k, n): (u8, u8), extent_len: u32) -> ExtentRef {
    ExtentRef { id, pg, k, n, extent_len, extent_off: 0 }
}
