//! Steps that gather pieces of maps into new extents: read them, write the extent, make the maps refer to it.
//!
//! Nothing is locked during these steps. A piece that changes before the last one stays as it is, and its copy in the
//! new extent is dead from the start.

use std::collections::HashMap;

use base::units::BLOCK_BYTES;
use base::{DriveId, FsError};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use futures_util::stream;
use layout::{PackedPiece, Profile, encode_packed_table, extent_bytes_max, packed_table_bytes};
use wire::drive::{GetPurpose, PutPurpose, ShardNote};
use wire::meta::{
    Content, ExtentRef, MapEntry, MapPiece, MetaReply, MetaRequest, PACK_MOVES_MAX, PackMove, PiecePosition,
};

use crate::Client;
use crate::blobs::Reach;
use crate::extents::{
    COPIES_BYTES_MAX, Protection, ReadExtentError, WriteExtentError, WriteHow, WrittenExtent,
};
use crate::topology::Beside;

/// Pieces asked for at a time.
const PAGE: u32 = 1024;
/// Pieces read at a time.
const READS: usize = 16;
/// Every piece of a packed extent begins at a multiple of this.
pub const PACK_ALIGN: u64 = 64;

/// The present shape of new extents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackTarget {
    /// How new extents are protected.
    pub profile: Profile,
    /// Whether that is only so while drives are missing.
    pub narrowed: bool,
    /// Bytes of a full extent.
    pub extent_bytes: u32,
    /// Extents up to this length are kept as copies.
    pub copies_bytes: u32,
}

/// The result of packing pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PackOutcome {
    /// Bytes of pieces that lie in the new extent now.
    pub moved_bytes: u64,
    /// Bytes of pieces that changed in the meantime or could not be read.
    pub left_bytes: u64,
}

impl Client {
    /// Pieces of all maps after `after`, in order, and where to continue.
    pub async fn scan_map(
        &self,
        after: Option<PiecePosition>,
    ) -> Result<(Vec<MapEntry>, Option<PiecePosition>), FsError> {
        match self.call(MetaRequest::ScanMap { after, limit: PAGE }).await? {
            MetaReply::Scan { entries, next } => Ok((entries, next)),
            _ => Err(FsError::Io),
        }
    }

    /// The present shape of new extents.
    pub fn pack_target(&self) -> PackTarget {
        let topology = self.inner.extents.topology();
        PackTarget {
            profile: topology.profile,
            narrowed: topology.groups.iter().any(|group| topology.narrow.contains(group)),
            extent_bytes: extent_bytes_max(topology.profile),
            copies_bytes: COPIES_BYTES_MAX,
        }
    }

    /// The newest ledger version that a heartbeat reported.
    pub fn ledger_version(&self) -> u64 {
        self.inner.session.version()
    }

    /// Whether shards wait for repair or rebuild on drives that accept them.
    pub async fn repair_is_due(&self) -> Result<bool, FsError> {
        if !self.rebuild_groups().is_empty() {
            return Ok(true);
        }
        let mut cursor = None;
        loop {
            let page = self.owed_page(cursor).await?;
            cursor = page.next;
            if !page.payable.is_empty() || cursor.is_none() {
                return Ok(!page.payable.is_empty());
            }
        }
    }

    /// Whether the drives have room for twice as much: packed pieces lie there twice until the old extents are deleted.
    pub fn has_spare_room(&self, bytes: u64) -> bool {
        self.inner.room.drives() >= bytes.saturating_mul(2)
    }

    /// Gathers pieces into one new extent: at most [`PACK_MOVES_MAX`] pieces, and at most the bytes of a full extent.
    ///
    /// # Errors
    /// If the extent could not be written; then nothing has changed.
    pub async fn pack(&self, entries: Vec<MapEntry>) -> Result<PackOutcome, FsError> {
        let wanted: u64 = entries.iter().map(|entry| entry.piece.len).sum();
        let reads = stream::iter(entries).map(|entry| async move {
            let bytes = self.piece_bytes(&entry.piece).await;
            if bytes.as_ref().is_err_and(|error| *error != ReadExtentError::Gone) {
                self.suspect(&entry.piece.content, None);
            }
            Some((entry, bytes.ok()?))
        });
        let read: Vec<(MapEntry, Bytes)> =
            reads.buffered(READS).filter_map(|read| async move { read }).collect().await;
        let (data, moves) = lay_out(read);
        self.write_packed(data, moves, wanted).await
    }

    /// Moves pieces of one extent to a new one. They overlap there as they do now, so clones still share their bytes.
    /// At most [`PACK_MOVES_MAX`] pieces, over at most the bytes of a full extent.
    ///
    /// # Errors
    /// If the extent could not be written; then nothing has changed.
    pub async fn pack_shared(&self, entries: Vec<MapEntry>) -> Result<PackOutcome, FsError> {
        let wanted: u64 = entries.iter().map(|entry| entry.piece.len).sum();
        let left = Ok(PackOutcome { moved_bytes: 0, left_bytes: wanted });
        let Some(Overlaid { extent, len, moves }) = lay_over(entries) else { return left };
        let mut data = BytesMut::zeroed(len);
        if self
            .inner
            .extents
            .read_into(&extent, extent.extent_off, &mut data, GetPurpose::Move)
            .await
            .is_err()
        {
            return left;
        }
        self.write_packed(data.freeze(), moves, wanted).await
    }

    async fn write_packed(
        &self,
        data: Bytes,
        moves: Vec<PackMove>,
        wanted: u64,
    ) -> Result<PackOutcome, FsError> {
        if moves.is_empty() || moves.len() > PACK_MOVES_MAX {
            return Ok(PackOutcome { moved_bytes: 0, left_bytes: wanted });
        }
        let data = with_table(data, &moves, self.pack_target().extent_bytes);
        let coded = data.len() > COPIES_BYTES_MAX as usize;
        let protection = if coded { Protection::Coded } else { Protection::Copies };
        let next_id = || self.inner.session.next_extent();
        // It gathers pieces of several files.
        let (purpose, beside) = (PutPurpose::Repair, self.beside_most(&moves));
        let how = WriteHow { protection, purpose, beside, note: ShardNote::default() };
        let written = self.inner.extents.write(data, how, next_id).await;
        let written = written.map_err(|error| match error {
            // Extents have just become narrower: the next round packs less at a time.
            WriteExtentError::TooLong { .. } => FsError::Io,
            WriteExtentError::Failed(error) => error,
        })?;
        let moved_bytes = self.move_pieces(written, moves).await?;
        Ok(PackOutcome { moved_bytes, left_bytes: wanted - moved_bytes })
    }

    /// The first drive of the extent with the most bytes of these pieces: what was written on one node stays near to it.
    fn beside_most(&self, moves: &[PackMove]) -> Beside {
        let topology = self.inner.extents.topology();
        let mut bytes: HashMap<DriveId, u64> = HashMap::new();
        for PackMove { piece, .. } in moves {
            let group = piece.content.extent().and_then(|extent| topology.map.group(extent.pg));
            if let Some(drive) = group.and_then(|group| group.members.first()) {
                *bytes.entry(*drive).or_default() += piece.len;
            }
        }
        let most = bytes.into_iter().max_by_key(|(drive, bytes)| (*bytes, *drive));
        most.map_or(Beside::Nothing, |(drive, _)| Beside::Drive(drive))
    }

    async fn move_pieces(&self, written: WrittenExtent, moves: Vec<PackMove>) -> Result<u64, FsError> {
        let WrittenExtent { extent, owed, placed } = written;
        match self.call(MetaRequest::Repack { extent, owed, moves, placed }).await {
            Ok(MetaReply::Repacked { moved_bytes }) => {
                if moved_bytes == 0 {
                    self.inner.extents.discard_refused([extent].into_iter()).await;
                }
                Ok(moved_bytes)
            }
            Ok(_) => Err(FsError::Io),
            Err(error) => {
                // As with a commit: without an answer the extent may be in the ledger.
                if !matches!(error, FsError::Unknown | FsError::Io) {
                    self.inner.extents.discard_refused([extent].into_iter()).await;
                }
                Err(error)
            }
        }
    }

    async fn piece_bytes(&self, piece: &MapPiece) -> Result<Bytes, ReadExtentError> {
        match &piece.content {
            Content::Inline(bytes) => Ok(bytes.clone()),
            Content::Extent(extent) => {
                let mut out = BytesMut::zeroed(piece.len as usize);
                self.inner.extents.read_into(extent, extent.extent_off, &mut out, GetPurpose::Move).await?;
                Ok(out.freeze())
            }
            Content::Tiered(extent, place) => {
                let mut out = BytesMut::zeroed(piece.len as usize);
                self.inner
                    .blobs
                    .read_into(*place, extent.extent_len, extent.extent_off, &mut out, Reach::Usual)
                    .await?;
                Ok(out.freeze())
            }
        }
    }
}

/// The bytes of a new extent, and the place of each piece in it. Pieces of whole blocks come first, so that their
/// blocks stay whole; the rest lies close together.
fn lay_out(mut read: Vec<(MapEntry, Bytes)>) -> (Bytes, Vec<PackMove>) {
    read.sort_by_key(|(entry, _)| !entry.piece.len.is_multiple_of(BLOCK_BYTES));
    let mut data = BytesMut::new();
    let mut moves = Vec::with_capacity(read.len());
    for (entry, bytes) in read {
        data.resize(data.len().next_multiple_of(PACK_ALIGN as usize), 0);
        let extent_off = u32::try_from(data.len()).expect("an extent is at most 16 MiB");
        data.extend_from_slice(&bytes);
        moves.push(PackMove { map: entry.map, piece: entry.piece, extent_off });
    }
    (data.freeze(), moves)
}

/// Adds the table of the pieces, unless all are of one file in its order, which the extent's origin tells, or it does
/// not fit.
fn with_table(data: Bytes, moves: &[PackMove], extent_bytes: u32) -> Bytes {
    let begins = |step: &PackMove| (step.map, step.piece.off.wrapping_sub(step.extent_off.into()));
    let is_one = moves.windows(2).all(|pair| begins(&pair[0]) == begins(&pair[1]));
    if is_one || data.len() + packed_table_bytes(moves.len()) > extent_bytes as usize {
        return data;
    }
    let pieces = moves.iter().map(|step| PackedPiece {
        map: step.map,
        off: step.piece.off,
        extent_off: step.extent_off,
        len: step.piece.len as u32,
    });
    let table = encode_packed_table(&pieces.collect::<Vec<_>>());
    [data, table.into()].concat().into()
}

/// Pieces that overlap in one extent.
struct Overlaid {
    /// The part of the extent that they cover.
    extent: ExtentRef,
    len: usize,
    /// The place of each piece in a copy of that part.
    moves: Vec<PackMove>,
}

/// `None` if the pieces are not of one extent.
fn lay_over(entries: Vec<MapEntry>) -> Option<Overlaid> {
    let extents = entries.iter().map(|entry| match entry.piece.content {
        Content::Extent(extent) => Some((extent, u64::from(extent.extent_off) + entry.piece.len)),
        Content::Inline(_) | Content::Tiered(..) => None,
    });
    let extents: Vec<(ExtentRef, u64)> = extents.collect::<Option<_>>()?;
    let (whole, _) = *extents.first()?;
    let first = extents.iter().map(|(extent, _)| extent.extent_off).min()?;
    // Whole blocks stay whole.
    let from = first - first % BLOCK_BYTES as u32;
    let end = extents.iter().map(|(_, end)| *end).max()?;
    if extents.iter().any(|(extent, _)| extent.id != whole.id) || end > u64::from(whole.extent_len) {
        return None;
    }
    let moves = entries.into_iter().zip(&extents).map(|(entry, (extent, _))| PackMove {
        map: entry.map,
        piece: entry.piece,
        extent_off: extent.extent_off - from,
    });
    let len = (end - u64::from(from)) as usize;
    Some(Overlaid { extent: ExtentRef { extent_off: from, ..whole }, len, moves: moves.collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::MapId;

    #[test]
    fn whole_blocks_stay_whole_and_the_rest_lies_close() {
        let lens = [100usize, 4096, 5000, 8192];
        let entry = |(index, len): (usize, &usize)| {
            let bytes = Bytes::from(vec![index as u8 + 1; *len]);
            let piece = MapPiece { off: 0, len: *len as u64, content: Content::Inline(bytes.clone()) };
            (MapEntry { map: MapId(index as u64), piece, live_bytes: None, in_store: false }, bytes)
        };
        let (data, moves) = lay_out(lens.iter().enumerate().map(entry).collect());
        let places: Vec<_> = moves.iter().map(|step| (step.map.0, step.extent_off)).collect();
        assert_eq!(places, [(1, 0), (3, 4096), (0, 12_288), (2, 12_416)]);
        assert_eq!(data.len(), 12_416 + 5000);
        for step in &moves {
            let at = step.extent_off as usize;
            let part = &data[at..at + step.piece.len as usize];
            assert!(part.iter().all(|byte| *byte == step.map.0 as u8 + 1));
        }
        let whole = with_table(data.clone(), &moves, 1 << 20);
        let table = layout::decode_packed_table(&whole);
        let told: Vec<_> = table.iter().map(|piece| (piece.map.0, piece.extent_off)).collect();
        assert_eq!(told, places);
        assert_eq!(with_table(data.clone(), &moves, data.len() as u32 + 8), data);
        assert_eq!(with_table(data.clone(), &moves[..1], 1 << 20), data);
    }
}
