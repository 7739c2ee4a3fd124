//! Pieces of files: what a map says about the content of a range.

use base::{DriveId, Epoch, ExtentId, PgId, ShardIndex};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::tier::BlobPlace;

/// An extent as a map refers to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentRef {
    /// Which.
    pub id: ExtentId,
    /// Where its shards lie.
    pub pg: PgId,
    /// Data shards.
    pub k: u8,
    /// All shards.
    pub n: u8,
    /// Bytes of the whole extent.
    pub extent_len: u32,
    /// Where the piece begins inside the extent.
    pub extent_off: u32,
}

/// The content of a piece of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// The bytes themselves.
    Inline(Bytes),
    /// Bytes of an extent on drives.
    Extent(ExtentRef),
    /// Bytes of an extent that only a blob has. Maps do not contain this: the owner adds it to its answers.
    Tiered(ExtentRef, BlobPlace),
}

impl Content {
    /// The extent, wherever it lies.
    pub fn extent(&self) -> Option<&ExtentRef> {
        match self {
            Self::Inline(_) => None,
            Self::Extent(extent) | Self::Tiered(extent, _) => Some(extent),
        }
    }
}

/// A piece of a file's map. Gaps between pieces are holes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapPiece {
    /// File offset in bytes.
    pub off: u64,
    /// Length in bytes, at least 1.
    pub len: u64,
    /// Its content.
    pub content: Content,
}

impl MapPiece {
    /// The first byte after the piece.
    pub fn end(&self) -> u64 {
        self.off + self.len
    }

    /// The part of this piece inside `[from, to)`, if any.
    pub fn clip(&self, from: u64, to: u64) -> Option<MapPiece> {
        let (off, end) = (self.off.max(from), self.end().min(to));
        if off >= end {
            return None;
        }
        let skip = off - self.off;
        let content = match &self.content {
            Content::Inline(bytes) => Content::Inline(bytes.slice(skip as usize..(end - self.off) as usize)),
            Content::Extent(extent) => {
                Content::Extent(ExtentRef { extent_off: extent.extent_off + skip as u32, ..*extent })
            }
            Content::Tiered(extent, place) => {
                Content::Tiered(ExtentRef { extent_off: extent.extent_off + skip as u32, ..*extent }, *place)
            }
        };
        Some(MapPiece { off, len: end - off, content })
    }

    /// The piece as maps store it: without the place in a blob.
    pub fn stored(&self) -> MapPiece {
        match &self.content {
            Content::Tiered(extent, _) => MapPiece { content: Content::Extent(*extent), ..*self },
            _ => self.clone(),
        }
    }
}

/// New content for a range of a file, durable on drives or inline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitPiece {
    /// Where and what.
    pub piece: MapPiece,
    /// Shards that were not stored; the commit records them so that repair writes them.
    pub owed: Vec<OwedShard>,
    /// The epoch of the placement group by which its extent was written.
    #[serde(default)]
    pub placed: Epoch,
}

impl CommitPiece {
    /// Bytes that the ledger keeps itself.
    pub fn inline(off: u64, bytes: Bytes) -> Self {
        let piece = MapPiece { off, len: bytes.len() as u64, content: Content::Inline(bytes) };
        Self { piece, owed: Vec::new(), placed: Epoch(0) }
    }
}

/// A shard that a commit went ahead without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwedShard {
    /// Which of the extent's shards.
    pub shard: ShardIndex,
    /// The drive that should hold it.
    pub drive: DriveId,
}

/// An owed shard as the ledger keeps it: everything that repair needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct OwedEntry {
    /// The drive that should hold it.
    pub drive: DriveId,
    /// The extent.
    pub id: ExtentId,
    /// Where its shards lie.
    pub pg: PgId,
    /// Which of them is owed.
    pub shard: ShardIndex,
    /// Data shards.
    pub k: u8,
    /// All shards.
    pub n: u8,
    /// Bytes of the whole extent.
    pub extent_len: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clipped_piece_keeps_pointing_at_the_same_bytes() {
        let extent =
            ExtentRef { id: ExtentId(1), pg: PgId(2), k: 4, n: 6, extent_len: 1000, extent_off: 100 };
        let piece = MapPiece { off: 5000, len: 500, content: Content::Extent(extent) };
        let clipped = piece.clip(5100, 9999).unwrap();
        assert_eq!((clipped.off, clipped.len), (5100, 400));
        assert_eq!(clipped.content, Content::Extent(ExtentRef { extent_off: 200, ..extent }));
        assert_eq!(piece.clip(5500, 6000), None);
        let inline = MapPiece { off: 10, len: 4, content: Content::Inline(Bytes::from_static(b"abcd")) };
        assert_eq!(inline.clip(11, 13).unwrap().content, Content::Inline(Bytes::from_static(b"bc")));
    }
}
