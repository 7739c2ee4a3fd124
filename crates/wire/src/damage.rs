//! The owner's notes of unreadable content: which pieces of which files, and why.
//!
//! Only proven damage is noted: every drive answered, or the store did. The batch that removes a piece removes its
//! note.

use base::{Ino, MapId};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::meta::{MapPiece, PiecePosition};

/// Most pieces that a ledger notes. More are counted.
pub const LOST_PIECES_MAX: u64 = 10_000;

/// Why a piece cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LossCause {
    /// All its drives answered, and fewer than k shards are good. One bit per shard.
    Shards {
        /// Shards whose bytes do not match their checksums.
        damaged: u32,
        /// Shards that their drives do not have.
        missing: u32,
    },
    /// The store does not have its blob.
    BlobMissing {
        /// The blob.
        serial: u64,
    },
    /// The store returns other bytes than were stored.
    BlobDamaged {
        /// The blob.
        serial: u64,
    },
}

impl LossCause {
    /// Number of bad shards or blobs.
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
    /// The piece; `None`: there is nothing now, or another piece than was noted.
    pub piece: Option<MapPiece>,
    /// The file that it belongs to; 0: not known.
    pub ino: Ino,
    /// When the damage was found, in seconds since 1970.
    pub found_s: u64,
    /// Why it cannot be read.
    pub cause: LossCause,
}

/// Counts of the damage found since the ledger was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DamageSums {
    /// Pieces noted now.
    pub pieces: u64,
    /// Damaged shards that were restored.
    pub repaired: u64,
    /// Damaged or missing shards and blobs that could not be restored.
    pub unrepairable: u64,
    /// Unreadable pieces without a note, because there was no room.
    pub unnoted: u64,
    /// When the last of these was found, in seconds since 1970.
    pub unnoted_s: u64,
}

/// The search for a name continues after this entry of this directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamePosition {
    /// The directory.
    pub dir: Ino,
    /// The sort key of the last entry that was searched.
    pub sort_name: Bytes,
}

/// Where to search for a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NameSearch {
    /// In the directory in which the inode was made, or to which it moved last.
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

/// Requests to the owner about damage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields have the names that are used elsewhere")]
pub enum DamageRequest {
    /// Finds the piece that holds the byte at `off` of a file. Answer: `Piece`.
    PieceAt { ino: Ino, off: u64 },
    /// Finds files after `after` with content in these maps. Searches a bounded number of files. Answer: `Files`.
    FilesOf { maps: Vec<MapId>, after: Ino },
    /// Finds a name of an inode. Searches a bounded number of entries. Answer: `Name`.
    NameOf { ino: Ino, search: NameSearch },
    /// Notes that this piece cannot be read, if it is still there. Answer: `Noted`.
    Note { position: PiecePosition, piece: MapPiece, ino: Ino, cause: LossCause },
    /// Removes the notes of these pieces, which are readable again or gone.
    Settle { positions: Vec<PiecePosition> },
    /// Counts damaged shards that were restored.
    Repaired { shards: u64 },
    /// All content was checked after this time: damage found before, for which there was no room, is noted now or gone.
    LookedAtAll { since_s: u64 },
    /// Noted pieces after `after`, and the sums. Answer: `Lost`.
    List { after: Option<PiecePosition>, limit: u32 },
}

/// The answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the variants are named by the requests they answer")]
pub enum DamageReply {
    Done,
    Piece(Option<(PiecePosition, MapPiece)>),
    /// `next`: where to continue, if there may be more.
    Files {
        files: Vec<(MapId, Ino)>,
        next: Option<Ino>,
    },
    /// `next`: where to continue, if no name was found yet.
    Name {
        found: Option<(Ino, Bytes)>,
        next: Option<NamePosition>,
    },
    /// Whether the piece is noted now. It is not if it is gone or there is no room.
    Noted(bool),
    Lost {
        pieces: Vec<LostPiece>,
        sums: DamageSums,
    },
}
