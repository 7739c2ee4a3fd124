//! Pieces of files that move to other extents with the same bytes.

use base::{Ino, MapId};
use serde::{Deserialize, Serialize};

use crate::meta::{ExtentRef, MapPiece, OwedShard};

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
