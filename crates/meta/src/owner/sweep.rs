//! Requests of upkeep that concern all maps: scan them, pack their pieces into new extents, find orphaned extents.
//!
//! Packing keeps the bytes of a piece, so no lease conflicts and no attribute changes. A session that has the old map
//! cached reads the old extent until it is deleted, and then asks again. An orphan is an extent of a closed range to
//! which nothing refers. A reference to an id of a closed range can only come from an existing reference: by cloning,
//! which leaves a key in table E until the last reference is gone, or by cutting a piece, which leaves its parts at or
//! behind its place, where a scan in order still comes. So an id that a whole scan did not meet, with no key in E and
//! none in F, has no reference and never gets one.

use std::collections::HashSet;

use base::{Epoch, ExtentId, FsError, Ino, MapId, SessionId};
use wire::meta::{
    Content, ExtentRef, MapEntry, MapPiece, MetaReply, OwedShard, PACK_MOVES_MAX, PackMove, PiecePosition,
};
use wire::tier::{Origin, Stage};

use super::data::PIECE_BYTES_MAX;
use super::tier::{Written, origin_at};
use super::{Op, Outcome};
use crate::keys::Keys;
use crate::values::{ExtentUse, IdRange, Piece, PieceContent, RangeState};

const SCAN_PIECES_MAX: u32 = 4096;
/// A page of a scan ends after this many inline bytes.
const SCAN_INLINE_BYTES: usize = 1 << 20;
/// Orphans are not searched while more extents than this wait for deletion.
const FREES_MAX: usize = 65_536;

/// The target of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    from: u64,
    end: u64,
    /// The source extent, and the offset of the target relative to it.
    shift: Option<(ExtentId, i64)>,
}

impl Place {
    fn of(step: &PackMove) -> Self {
        let shift = match &step.piece.content {
            Content::Extent(old) | Content::Tiered(old, _) => {
                Some((old.id, i64::from(step.extent_off) - i64::from(old.extent_off)))
            }
            Content::Inline(_) => None,
        };
        let from = u64::from(step.extent_off);
        Self { from, end: from.saturating_add(step.piece.len), shift }
    }
}

impl Op<'_> {
    pub(super) fn scan_map(&mut self, after: Option<PiecePosition>, limit: u32) -> Outcome {
        let limit = limit.clamp(1, SCAN_PIECES_MAX) as usize;
        let range = self.keys.all_pieces(after.map(|position| (position.map, position.off)));
        let found = self.txn.scan(&range, limit)?;
        let mut more = found.len() == limit;
        let (mut entries, mut inline_bytes) = (Vec::with_capacity(found.len()), 0);
        let mut last = None;
        for (key, bytes) in found {
            if inline_bytes > SCAN_INLINE_BYTES {
                more = true;
                break;
            }
            last = Some(PiecePosition { map: Keys::map_of_piece(&key), off: Keys::off_of_piece(&key) });
            let Some(piece) = self.txn.decode::<Piece>(&key, &bytes)?.at(Keys::off_of_piece(&key)) else {
                // A range of another map, which the scan visits by itself.
                continue;
            };
            let live_bytes = match &piece.content {
                Content::Inline(bytes) => {
                    inline_bytes += bytes.len();
                    None
                }
                Content::Extent(extent) | Content::Tiered(extent, _) => {
                    self.txn.get::<ExtentUse>(&self.keys.extent(extent.id))?.map(|used| used.live_bytes)
                }
            };
            let piece = self.resolve(piece)?;
            let in_store = match &piece.content {
                Content::Extent(extent) => self.is_in_both(extent.id)?,
                Content::Inline(_) | Content::Tiered(..) => false,
            };
            entries.push(MapEntry { map: Keys::map_of_piece(&key), piece, live_bytes, in_store });
        }
        let next = if more { last } else { None };
        Ok(MetaReply::Scan { entries, next })
    }

    pub(super) fn repack(
        &mut self,
        extent: &ExtentRef,
        (owed, placed): (&[OwedShard], Epoch),
        moves: &[PackMove],
    ) -> Outcome {
        self.check_pack(extent, moves)?;
        let mut used = ExtentUse { refs: 0, live_bytes: 0 };
        let (mut written_s, mut from, mut origins) = (None, Written::default(), HashSet::new());
        let mut ino = Ino(0);
        for step in moves {
            if !self.is_still(step)? {
                continue;
            }
            if let Some(old) = step.piece.content.extent() {
                // The new extent has the age and the directory of its youngest piece.
                let written = self.written(old.id)?;
                if let Some((_, of)) = written.filter(|(_, of)| of.origin.map == step.map) {
                    ino = of.origin.ino;
                }
                if let Some((at_s, of)) = written.filter(|(at_s, _)| written_s.is_none_or(|s| *at_s >= s)) {
                    (written_s, from) = (Some(at_s), of);
                }
            }
            self.remove_range(step.map, step.piece.off, step.piece.end(), usize::MAX)?;
            let moved = ExtentRef { extent_off: step.extent_off, ..*extent };
            origins.insert(origin_at(Ino(0), step.map, step.piece.off, &moved));
            let piece = Piece {
                len: step.piece.len,
                birth_layer: crate::keys::LIVE_LAYER,
                content: PieceContent::Data(Content::Extent(moved)),
            };
            self.txn.put(self.keys.piece(step.map, step.piece.off), &piece);
            used = ExtentUse { refs: used.refs + 1, live_bytes: used.live_bytes + step.piece.len };
        }
        if used.refs > 0 {
            if used != (ExtentUse { refs: 1, live_bytes: u64::from(extent.extent_len) }) {
                self.txn.put(self.keys.extent(extent.id), &used);
            }
            self.note_extent(extent, owed, placed)?;
            let is_one = origins.len() == 1;
            // An extent with pieces of several files has no origin; they are listed at its end.
            from.origin = match origins.into_iter().next() {
                Some(origin) if is_one && origin.ino == Ino(0) => Origin { ino, ..origin },
                Some(origin) if is_one => origin,
                _ => Origin::default(),
            };
            match written_s {
                Some(written_s) => self.enqueue_aged(extent, written_s, from)?,
                None => self.enqueue_new(extent, from)?,
            }
        }
        Ok(MetaReply::Repacked { moved_bytes: used.live_bytes })
    }

    /// Checks that this session may commit the new extent, that every move lies in it, and that moves overlap only if
    /// their pieces overlapped before.
    fn check_pack(&self, extent: &ExtentRef, moves: &[PackMove]) -> Result<(), FsError> {
        let shaped = extent.k >= 1 && extent.k <= extent.n && extent.n <= layout::SHARDS_MAX;
        let short = u64::from(extent.extent_len) <= PIECE_BYTES_MAX && moves.len() <= PACK_MOVES_MAX;
        let new = self.may_commit(extent.id) && self.txn.get_bytes(&self.keys.extent(extent.id))?.is_none();
        if !shaped || !short || !new {
            return Err(FsError::Invalid);
        }
        let mut places: Vec<Place> = moves.iter().map(Place::of).collect();
        places.sort_unstable();
        // Pieces that overlapped before may overlap again.
        let (mut end, mut shift, mut apart) = (0, None, true);
        for place in &places {
            if place.from >= end {
                (end, shift) = (place.end, place.shift);
            } else {
                apart &= shift.is_some() && place.shift == shift;
                end = end.max(place.end);
            }
        }
        let inside = places.iter().all(|place| place.end <= u64::from(extent.extent_len));
        if apart && inside { Ok(()) } else { Err(FsError::Invalid) }
    }

    /// Whether a piece, or a part of one, is unchanged since its bytes were read. Maps that wait for their purge do not
    /// count.
    fn is_still(&self, step: &PackMove) -> Result<bool, FsError> {
        self.has_piece(step.map, &step.piece)
    }

    /// Whether the map has this piece there, or a part of it.
    pub(super) fn has_piece(&self, map: MapId, piece: &MapPiece) -> Result<bool, FsError> {
        if piece.len == 0 || self.txn.get_bytes(&self.keys.purge(map))?.is_some() {
            return Ok(false);
        }
        let (from, to) = (piece.off, piece.end());
        let now = self.pieces(map, from, to, 1)?.pop();
        Ok(now.and_then(|now| now.clip(from, to)).as_ref() == Some(&piece.stored()))
    }

    /// Adds ranges of ids to the next search for orphans, except the parts that are open to a session.
    pub(super) fn recheck_ranges(&mut self, ranges: &[(ExtentId, u64)]) -> Outcome {
        let next = self.number("next_extent")?;
        for (first, count) in ranges {
            let end = first.0.saturating_add(*count).min(next);
            let mut from = first.0;
            // Ids in a range that is known already are searched with it.
            let (_, last) = self.keys.ranges();
            let known = self.txn.scan(&(self.keys.range(ExtentId(0)), last), usize::MAX)?;
            for (key, bytes) in known {
                let (start, range) =
                    (Keys::first_of_range(&key).0, self.txn.decode::<IdRange>(&key, &bytes)?);
                if start > from {
                    self.close_again(from, start.min(end));
                }
                from = from.max(start.saturating_add(range.count));
            }
            self.close_again(from, end);
        }
        Ok(MetaReply::Done)
    }

    fn close_again(&mut self, from: u64, end: u64) {
        if from < end {
            let range = IdRange { session: SessionId(0), count: end - from, open: RangeState::Closed };
            self.txn.put(self.keys.range(ExtentId(from)), &range);
        }
    }

    pub(super) fn extent_ranges(&mut self) -> Outcome {
        let (mut closed, mut open) = (Vec::new(), 0);
        for (key, bytes) in self.txn.scan(&self.keys.ranges(), usize::MAX)? {
            let range: IdRange = self.txn.decode(&key, &bytes)?;
            match range.open {
                // Drives may hold shards to which only a newer ledger refers: no search for orphans.
                RangeState::Closed if self.volatile.in_doubt => {}
                RangeState::Closed => closed.push((Keys::first_of_range(&key), range.count)),
                RangeState::Open => open += 1,
            }
        }
        Ok(MetaReply::Ranges { closed, open })
    }

    /// # Errors
    /// `WouldBlock` while too many extents wait for deletion: try later.
    pub(super) fn confirm_orphans(&mut self, ids: &[ExtentId]) -> Outcome {
        let frees = self.txn.scan(&self.keys.frees(u64::MAX), FREES_MAX)?;
        if frees.len() == FREES_MAX {
            return Err(FsError::WouldBlock.into());
        }
        let freed: HashSet<ExtentId> = frees.iter().map(|(key, _)| Keys::free_of_key(key).1).collect();
        let MetaReply::Ranges { closed, .. } = self.extent_ranges()? else { return Err(FsError::Io.into()) };
        let mut orphans = Vec::new();
        for id in ids {
            let in_closed = closed.iter().any(|(first, count)| id >= first && id.0 - first.0 < *count);
            let counted = self.txn.get_bytes(&self.keys.extent(*id))?.is_some();
            // An older copy of a drive may still have what only a blob should have.
            let is_tiered = self.residence(*id)?.is_some_and(|residence| residence.stage == Stage::Tiered);
            if in_closed && (!counted || is_tiered) && !freed.contains(id) {
                orphans.push(*id);
            }
        }
        Ok(MetaReply::Orphans(orphans))
    }

    pub(super) fn range_verified(&mut self, first: ExtentId) -> Outcome {
        let key = self.keys.range(first);
        let closed = |range: &IdRange| range.open == RangeState::Closed;
        if self.txn.get::<IdRange>(&key)?.as_ref().is_some_and(closed) {
            self.txn.delete(key);
        }
        Ok(MetaReply::Done)
    }
}
