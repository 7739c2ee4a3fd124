//! Pieces of files as upkeep scans them, and as it moves them to other extents with the same bytes.

use base::{Ino, MapId};
use serde::{Deserialize, Serialize};

use crate::meta::{ExtentRef, MapPiece, OwedShard};

/// A piece among those of all maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PiecePosition {
    /// Which map.
    pub map: MapId,
    /// Where in it the piece begins.
    pub off: u64,
}

/// A piece of some map, for upkeep.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapEntry {
    /// Which map.
    pub map: MapId,
    /// The piece.
    pub piece: MapPiece,
    /// Of an extent that is shared or partly dead: the sum of the lengths of all pieces that refer to it.
    pub live_bytes: Option<u64>,
    /// Its extent is on drives, and a blob has it as well.
    pub in_store: bool,
}

impl MapEntry {
    /// Its place.
    pub fn position(&self) -> PiecePosition {
        PiecePosition { map: self.map, off: self.piece.off }
    }
}

/// A piece that moves to another extent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackMove {
    /// Which map.
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
    /// All of it is this piece.
    pub extent: ExtentRef,
    /// Shards that it lacks.
    pub owed: Vec<OwedShard>,
}

/// Most pieces in one [`MetaRequest::Rehydrate`].
pub const REHYDRATED_MAX: usize = 256;

/// Most pieces that one [`MetaRequest::Repack`] moves: an extent is filled by one request or never.
pub const PACK_MOVES_MAX: usize = 2048;
