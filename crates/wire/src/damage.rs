//! Content that cannot be read any more, as the owner of a ledger keeps it: which pieces of which files, and why.
//!
//! What is noted here was proven: every drive answered, or the store did. A note goes in the batch that removes its piece.

use base::{Ino, MapId};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::meta::{MapPiece, PiecePosition};

/// Most pieces that a ledger notes. More are counted.
pub const LOST_PIECES_MAX: u64 = 10_000;

/// Why a piece cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LossCause {
    /// All its drives answered, and fewer than k shards are left. A bit for each shard.
    Shards {
        /// Shards whose bytes do not match their checksums.
        damaged: u32,
        /// Shards that their drives do not have.
        missing: u32,
    },
    /// The store does not have its blob.
    BlobMissing {
        /// Which.
        serial: u64,
    },
    /// What the store gives is not what was stored.
    BlobDamaged {
        /// Which.
        serial: u64,
    },
}

impl LossCause {
    /// Shards or blobs that are bad.
    pub fn bad(self) -> u64 {
        match self {
            Self::Shards { damaged, missing } => u64::from((damaged | missing).count_ones()),
            Self::BlobMissing { .. } | Self::BlobDamaged { .. } => 1,
        }
    }
}

/// A piece that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostPiece {
    /// Where it is.
    pub position: PiecePosition,
    /// What is there now; `None`: something else than what was noted, or nothing.
    pub piece: Option<MapPiece>,
    /// The file that it belongs to; 0: not known.
    pub ino: Ino,
    /// When that was found, in seconds since 1970.
    pub found_s: u64,
    /// Why it cannot be read.
    pub cause: LossCause,
}

/// What was found in a ledger since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DamageSums {
    /// Pieces noted now.
    pub pieces: u64,
    /// Shards that were found damaged and restored.
    pub repaired: u64,
    /// Shards and blobs that were found damaged or missing when it was too late.
    pub unrepairable: u64,
    /// Pieces that cannot be read and that there was no room to note.
    pub unnoted: u64,
    /// When the last of those was found, in seconds since 1970.
    pub unnoted_s: u64,
}

/// Where the search for a name goes on: after this entry of this directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamePosition {
    /// The directory.
    pub dir: Ino,
    /// What the last entry that was looked at sorts by.
    pub sort_name: Bytes,
}

/// Where a name is looked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NameSearch {
    /// In the directory that the inode was made in or moved to last.
    Parent {
        /// After this.
        after: Option<NamePosition>,
    },
    /// Everywhere.
    All {
        /// After this.
        after: Option<NamePosition>,
    },
}

/// What the owner is asked about damage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named as what they hold is elsewhere")]
pub enum DamageRequest {
    /// Which piece of which map holds the byte at `off` of a file. Answer: `Piece`.
    PieceAt { ino: Ino, off: u64 },
    /// Files, beyond the one given, that have content in these maps. Looks at a bounded number. Answer: `Files`.
    FilesOf { maps: Vec<MapId>, after: Ino },
    /// A name of an inode. Looks at a bounded number of entries. Answer: `Name`.
    NameOf { ino: Ino, search: NameSearch },
    /// This piece cannot be read, if it is still there. Answer: `Noted`.
    Note { position: PiecePosition, piece: MapPiece, ino: Ino, cause: LossCause },
    /// Removes the notes of these pieces: they can be read again, or are gone.
    Settle { positions: Vec<PiecePosition> },
    /// So many damaged shards were restored.
    Repaired { shards: u64 },
    /// Everything was looked at after this time: what was found before and not noted is noted now, or settled.
    LookedAtAll { since_s: u64 },
    /// Noted pieces beyond the one given, and the sums. Answer: `Lost`.
    List { after: Option<PiecePosition>, limit: u32 },
}

/// The answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the variants are named by the requests they answer")]
pub enum DamageReply {
    Done,
    Piece(Option<(PiecePosition, MapPiece)>),
    /// `next`: where to go on, if there may be more.
    Files {
        files: Vec<(MapId, Ino)>,
        next: Option<Ino>,
    },
    /// `next`: where to go on if it was not found yet.
    Name {
        found: Option<(Ino, Bytes)>,
        next: Option<NamePosition>,
    },
    /// Whether it is noted now; if not, the piece is gone, or there is no room.
    Noted(bool),
    Lost {
        pieces: Vec<LostPiece>,
        sums: DamageSums,
    },
}
