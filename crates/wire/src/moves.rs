//! Pieces of files for upkeep, which scans them and moves them to other extents with the same bytes.

use base::{Epoch, Ino, MapId};
use serde::{Deserialize, Serialize};

use crate::meta::{ExtentRef, MapPiece, OwedShard};

/// The position of a piece among the pieces of all maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PiecePosition {
    /// The map.
    pub map: MapId,
    /// Where the piece begins in it.
    pub off: u64,
}

/// A piece of some map, for upkeep.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapEntry {
    /// Which map.
    pub map: MapId,
    /// The piece.
    pub piece: MapPiece,
    /// If its extent is shared or partly dead: the sum of the lengths of all pieces that refer to the extent.
    pub live_bytes: Option<u64>,
    /// Its extent is on drives and also in a blob.
    pub in_store: bool,
}

impl MapEntry {
    /// The position of the piece.
    pub fn position(&self) -> PiecePosition {
        PiecePosition { map: self.map, off: self.piece.off }
    }
}

/// A piece that moves to another extent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackMove {
    /// The map.
    pub map: MapId,
    /// The piece as it was read.
    pub piece: MapPiece,
    /// Where its bytes begin in the new extent.
    pub extent_off: u32,
}

/// A piece of a file that only a blob has, and the new extent that holds the same bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rehydrated {
    /// The file.
    pub ino: Ino,
    /// The piece as it was read.
    pub piece: MapPiece,
    /// The new extent: exactly the bytes of this piece.
    pub extent: ExtentRef,
    /// Shards that the new extent lacks.
    pub owed: Vec<OwedShard>,
    /// The epoch of the placement group by which it was written.
    #[serde(default)]
    pub placed: Epoch,
}

/// Most pieces in one [`MetaRequest::Rehydrate`].
pub const REHYDRATED_MAX: usize = 256;

/// Most pieces that one [`MetaRequest::Repack`] moves: an extent is filled by one request or never.
pub const PACK_MOVES_MAX: usize = 2048;
