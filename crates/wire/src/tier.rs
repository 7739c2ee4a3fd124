//! Tiering as the owner of a ledger keeps it: which extents lie on drives, in blobs of an object store, or both.
//!
//! Extents are uploaded as a whole, so an upload does not change maps of files. A place in a blob is valid as long as
//! the map that came with it: a blob is deleted only when no read uses an older map.

use base::{Epoch, ExtentId, Ino, MapId, PgId};
use serde::{Deserialize, Serialize};

use crate::meta::ExtentRef;

/// Where an extent lies in a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlobPlace {
    /// The blob's number in the ledger.
    pub serial: u64,
    /// Epoch of the owner that numbered it: part of its name.
    pub term: Epoch,
    /// Where the extent's first byte is in the blob.
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

/// The file that an extent was written for, and where the extent begins in it. A hint: files change, and an extent
/// packed from several files has no origin.
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
    /// The whole extent.
    pub extent: ExtentRef,
    /// When it was written or attached, whichever was later, in seconds since 1970.
    pub written_s: u64,
    /// The directory of its origin, or the file itself if that has none; 0: not known.
    pub directory: Ino,
    /// The file that it was written for.
    pub origin: Origin,
}

/// Age and size of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgedExtent {
    /// When it was written or attached, whichever was later, in seconds since 1970.
    pub written_s: u64,
    /// Its bytes.
    pub bytes: u32,
    /// Its bytes on drives, with redundancy.
    pub raw_bytes: u32,
}

/// The space and requests that a retention needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forecast {
    /// Bytes of content on drives.
    pub drive_bytes: u64,
    /// The same with redundancy.
    pub drive_raw_bytes: u64,
    /// Bytes of content in the store: older than the cue.
    pub store_bytes: u64,
    /// Bytes written each day that still exist.
    pub written_bytes_per_day: u64,
    /// Blobs stored each day.
    pub puts_per_day: u64,
    /// Seconds of known history. A longer retention is extrapolated from the rate of writing.
    pub known_s: u64,
}

/// An extent in a new blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uploaded {
    /// The extent.
    pub id: ExtentId,
    /// Where its first byte is in the blob.
    pub off: u32,
    /// The blob that its bytes were read from; `None`: drives.
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
    /// Bytes of it that files refer to.
    pub live_bytes: u64,
}

/// An extent in a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct InBlob {
    /// The whole extent.
    pub extent: ExtentRef,
    /// Its place in the blob.
    pub place: BlobPlace,
    /// Whether drives also have it.
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
    /// Where it lies; `None`: on drives, and not queued for an upload.
    pub stage: Option<Stage>,
}

/// Extents and their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StageStat {
    /// Number of extents.
    pub extents: u64,
    /// Their bytes, before redundancy.
    pub bytes: u64,
}

/// Whether a ledger tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TierMode {
    /// It does not, and has nothing in blobs.
    #[default]
    Off,
    /// New extents are queued for upload.
    On,
    /// All extents return to drives.
    Leaving,
}

/// Sums over a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TierStat {
    /// Whether it tiers.
    pub mode: TierMode,
    /// Some extents from before tiering are not queued yet.
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
    /// Bytes of them that files refer to.
    pub live_bytes: u64,
}

impl TierStat {
    /// Dead bytes in the store, in thousandths of the live bytes.
    pub fn overhead_per_mille(&self) -> u64 {
        let dead = self.stored_bytes.saturating_sub(self.live_bytes);
        match self.live_bytes {
            0 if dead > 0 => u64::MAX,
            0 => 0,
            live => (u128::from(dead) * 1000 / u128::from(live)) as u64,
        }
    }
}

/// Requests to the owner about tiering.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields have the names that are used elsewhere")]
pub enum TierRequest {
    /// Starts tiering: new extents are queued for upload, and all others step by step. Extents that are in blobs only
    /// must be in the same store. Cancels a `Leave`.
    Attach,
    /// Queues a bounded number of extents from before tiering. Answer: `More`.
    QueueStep,
    /// Starts to leave the store: no extent waits for upload any more. The caller must fetch extents that are in blobs
    /// only.
    Leave,
    /// Forgets the place in a blob of a bounded number of extents that are also on drives. Answer: `More`. The ledger
    /// stops tiering when there are no more, nothing is in blobs only and no blob waits for its deletion.
    LeaveStep,
    /// Extents in this stage after `after` that were written at or before `before_s`, oldest first. Answer: `Due`.
    Due { stage: Stage, before_s: u64, after: Option<(u64, ExtentId)>, limit: u32 },
    /// All extents after `after` that tier, in any stage. Answer: `Ages`.
    Ages { after: Option<ExtentId>, limit: u32 },
    /// A number for a new blob. Answer: `Reserved`.
    Reserve,
    /// The blob is stored, at this place. Answer: `Committed`.
    Commit {
        serial: u64,
        bytes: u32,
        extents: Vec<Uploaded>,
        #[serde(default)]
        place: u64,
    },
    /// Nothing will refer to the blobs that the session has reserved and did not commit, but these: they must be deleted.
    Abandon { keep: Vec<u64> },
    /// Frees the shards of extents that are on drives and in a blob. Answer: `Released`.
    Release { ids: Vec<ExtentId> },
    /// Blobs in use after `after`. Answer: `Blobs`.
    Blobs { after: Option<u64>, limit: u32 },
    /// Extents of a blob after `after`. Answer: `Inside`.
    Inside { serial: u64, after: Option<ExtentId>, limit: u32 },
    /// Blobs that nothing refers to and no reader uses. Answer: `Dead`.
    Dead { limit: u32 },
    /// These blobs are no longer in the store.
    Deleted { serials: Vec<u64> },
    /// Parts of a file from `off` on, in order. Answer: `Parts`.
    Parts { ino: Ino, off: u64, limit: u32 },
    /// Answer: `Stat`.
    Stat,
    /// The place of the store, from now on until the owner ends: blobs that were stored at another one are refused.
    Place { place: u64 },
}

/// The answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the variants are named by the requests they answer")]
pub enum TierReply {
    Done,
    More(bool),
    Due(Vec<DueExtent>),
    /// `next`: where to continue, if there may be more.
    Ages {
        ages: Vec<AgedExtent>,
        next: Option<ExtentId>,
    },
    Reserved {
        serial: u64,
        term: Epoch,
    },
    /// Bytes of extents that refer to the blob now; if none, the blob must be deleted.
    Committed {
        bytes: u64,
    },
    /// Number and bytes of the released extents.
    Released(StageStat),
    Blobs(Vec<BlobStat>),
    Inside(Vec<InBlob>),
    Dead(Vec<(u64, Epoch)>),
    /// `next`: where to continue, if there may be more.
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
