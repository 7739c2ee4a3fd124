//! Maps of files: the extents that hold their bytes, and the references that share an extent.

use base::{Epoch, ExtentId, FsError, Ino, LeaseId, MapId, PgId};
use wire::meta::{
    CommitPiece, Content, ExtentRef, FILE_BYTES_MAX, FileKind, INLINE_BYTES_MAX, MapPiece, MetaReply,
    OwedShard, SetAttr,
};

use super::guard::{check_adding, check_unguarded};
use super::tier::{Written, origin_at};
use super::{Intent, Op, Outcome};
use crate::keys::Keys;
use crate::values::{COMPOSED_MAP, ExtentPlace, ExtentUse, Inode, Piece, PieceContent};

/// Most pieces that one operation removes; further operations remove the rest. Keeps batches bounded.
const PIECES_PER_OP_MAX: usize = 20_000;
const MAP_PAGE_MAX: u32 = 8192;
/// About the inline bytes in one answer.
const MAP_INLINE_BYTES: usize = 1 << 20;

impl Op<'_> {
    fn regular(&self, ino: Ino) -> Result<Inode, FsError> {
        let inode = self.inode(ino)?;
        match inode.attr.kind {
            FileKind::Regular => Ok(inode),
            FileKind::Directory => Err(FsError::IsDirectory),
            _ => Err(FsError::Invalid),
        }
    }

    /// Pieces that intersect `[from, to)`, at most `limit`, in order. Ranges of other maps are resolved.
    pub(super) fn pieces(
        &self,
        map: MapId,
        from: u64,
        to: u64,
        limit: usize,
    ) -> Result<Vec<MapPiece>, FsError> {
        let mut pieces = Vec::new();
        self.pieces_into(&mut pieces, map, (from, to), limit)?;
        Ok(pieces)
    }

    fn pieces_into(
        &self,
        out: &mut Vec<MapPiece>,
        map: MapId,
        (from, to): (u64, u64),
        limit: usize,
    ) -> Result<(), FsError> {
        let mut at = from;
        while out.len() < limit {
            let asked = limit - out.len();
            let found = self.stored_pieces(map, at, to, asked)?;
            let more = found.len() == asked;
            for stored in found {
                if out.len() >= limit {
                    return Ok(());
                }
                at = stored.end();
                match stored.piece.content {
                    PieceContent::Data(content) => {
                        out.push(MapPiece { off: stored.off, len: stored.piece.len, content });
                    }
                    PieceContent::Map { map: inner, off } => {
                        let (start, end) = (stored.off.max(from), stored.end().min(to));
                        let range = (start - stored.off + off, end - stored.off + off);
                        let first = out.len();
                        self.pieces_into(out, inner, range, limit)?;
                        for piece in &mut out[first..] {
                            piece.off = piece.off - off + stored.off;
                        }
                    }
                }
            }
            if !more {
                break;
            }
        }
        Ok(())
    }

    /// As [`Op::pieces`], but ranges of other maps are not resolved.
    pub(super) fn stored_pieces(
        &self,
        map: MapId,
        from: u64,
        to: u64,
        limit: usize,
    ) -> Result<Vec<Stored>, FsError> {
        let mut pieces = Vec::new();
        if let Some(before) = self.piece_before(map, from)?
            && before.end() > from
        {
            pieces.push(before);
        }
        let left = limit.saturating_sub(pieces.len());
        for (key, bytes) in self.txn.scan(&self.keys.pieces(map, from, to), left)? {
            let piece: Piece = self.txn.decode(&key, &bytes)?;
            pieces.push(Stored { off: Keys::off_of_piece(&key), piece });
        }
        Ok(pieces)
    }

    /// The last piece that begins before `off`, if it is near enough to reach `off`.
    fn piece_before(&self, map: MapId, off: u64) -> Result<Option<Stored>, FsError> {
        // No piece of a plain map is longer than an extent, so it begins at most that far below. A composed map may
        // have longer pieces.
        let reach = if map.0 & COMPOSED_MAP == 0 { PIECE_BYTES_MAX } else { FILE_BYTES_MAX };
        let Some((key, bytes)) = self.txn.last(&self.keys.pieces(map, off.saturating_sub(reach), off))?
        else {
            return Ok(None);
        };
        let piece: Piece = self.txn.decode(&key, &bytes)?;
        Ok(Some(Stored { off: Keys::off_of_piece(&key), piece }))
    }

    pub(super) fn getmap(&mut self, ino: Ino, off: u64, limit: u32) -> Outcome {
        self.clear(ino, Intent::Read)?;
        let inode = self.regular(ino)?;
        let limit = limit.clamp(1, MAP_PAGE_MAX) as usize;
        let Some(map) = inode.map() else { return Ok(MetaReply::Map { pieces: Vec::new(), end: true }) };
        let pieces = self.pieces(map, off, FILE_BYTES_MAX, limit)?;
        let mut end = pieces.len() < limit;
        let mut pieces =
            pieces.into_iter().map(|piece| self.resolve(piece)).collect::<Result<Vec<_>, _>>()?;
        // Inline bytes are in the answer, which must stay short.
        let mut inline_bytes = 0;
        let whole = pieces.iter().take_while(|piece| {
            let fits = inline_bytes < MAP_INLINE_BYTES;
            inline_bytes += if let Content::Inline(bytes) = &piece.content { bytes.len() } else { 0 };
            fits
        });
        let count = whole.count();
        end &= count == pieces.len();
        pieces.truncate(count);
        Ok(MetaReply::Map { pieces, end })
    }

    pub(super) fn commit(
        &mut self,
        ino: Ino,
        lease: LeaseId,
        pieces: &[CommitPiece],
        size: u64,
        times: CommitTimes<'_>,
    ) -> Outcome {
        let mut inode = self.regular(ino)?;
        if !self.volatile.leases.may_write(ino, self.session, lease) {
            return Err(FsError::StaleLease.into());
        }
        self.volatile.leases.note_progress(ino, self.session, self.now.awake_ns);
        if size > FILE_BYTES_MAX {
            return Err(FsError::TooLarge.into());
        }
        if times.set.size.is_some() {
            return Err(FsError::Invalid.into());
        }
        check_apart(pieces)?;
        check_adding(&inode.attr)?;
        for commit in pieces {
            self.check_piece(&commit.piece)?;
            let before = inode.attr.stored_bytes;
            self.replace(&mut inode, &commit.piece)?;
            if inode.attr.guard.append_only && inode.attr.stored_bytes - before < commit.piece.len {
                // This would remove content that is already there.
                return Err(FsError::NotPermitted.into());
            }
            self.note_placed(commit)?;
        }
        let end = pieces.iter().map(|commit| commit.piece.end()).max().unwrap_or(0);
        inode.attr.size = inode.attr.size.max(size).max(end);
        inode.attr.mtime_ns = times.mtime_ns;
        inode.attr.data_ver += 1;
        self.set(&mut inode, times.set)?;
        self.touch_at(&mut inode.attr, times.set.ctime_ns.unwrap_or(i64::MIN).max(times.mtime_ns));
        self.put_inode(&inode);
        Ok(MetaReply::Attr(inode.attr))
    }

    pub(super) fn check_piece(&self, piece: &MapPiece) -> Result<(), FsError> {
        if piece.len == 0 || piece.off.checked_add(piece.len).is_none_or(|end| end > FILE_BYTES_MAX) {
            return Err(FsError::TooLarge);
        }
        match &piece.content {
            Content::Inline(bytes) => {
                let fits = bytes.len() as u64 == piece.len && bytes.len() <= INLINE_BYTES_MAX;
                if fits { Ok(()) } else { Err(FsError::Invalid) }
            }
            Content::Extent(extent) => {
                let inside = u64::from(extent.extent_off) + piece.len <= u64::from(extent.extent_len);
                let short = u64::from(extent.extent_len) <= PIECE_BYTES_MAX;
                let shaped = extent.k >= 1 && extent.k <= extent.n && extent.n <= 20;
                if !inside || !short || !shaped || !self.may_commit(extent.id) {
                    return Err(FsError::Invalid);
                }
                Ok(())
            }
            Content::Tiered(..) => Err(FsError::Invalid),
        }
    }

    pub(super) fn may_commit(&self, id: ExtentId) -> bool {
        let mut ranges = self.volatile.ranges.iter();
        ranges.any(|range| {
            range.session == self.session && id >= range.first && id.0 - range.first.0 < range.count
        })
    }

    /// Notes what a new extent of a commit lacks on drives.
    pub(super) fn note_placed(&mut self, commit: &CommitPiece) -> Result<(), FsError> {
        match &commit.piece.content {
            Content::Extent(extent) => self.note_extent(extent, &commit.owed, commit.placed),
            _ => Ok(()),
        }
    }

    /// Notes which shards a new extent lacks. An extent that an older epoch of its group placed is refused: its shards may be
    /// on drives that have lost their positions, where no rebuild searches for them any more.
    pub(super) fn note_extent(
        &mut self,
        extent: &ExtentRef,
        owed: &[OwedShard],
        placed: Epoch,
    ) -> Result<(), FsError> {
        if self.volatile.groups.get(&extent.pg).is_some_and(|epoch| placed < *epoch) {
            return Err(FsError::StaleMap);
        }
        for owed in owed {
            let place = ExtentPlace {
                pg: extent.pg,
                n: extent.n,
                k: extent.k,
                shard: owed.shard.0,
                extent_len: extent.extent_len,
            };
            self.txn.put(self.keys.owed(owed.drive, extent.id), &place);
        }
        Ok(())
    }

    /// From now on, extents that older epochs of these groups placed are not committed.
    pub(super) fn advance_groups(&mut self, groups: &[(PgId, Epoch)]) -> Outcome {
        for (pg, epoch) in groups {
            let key = self.keys.group(*pg);
            // If another session has asked for it, the answer waits until that is durable.
            if self.txn.get::<u64>(&key)?.is_none_or(|known| known < epoch.0) {
                self.txn.update(key, &epoch.0);
                self.volatile.groups.insert(*pg, *epoch);
            }
        }
        Ok(MetaReply::Done)
    }

    /// Puts a piece in place of the present content of its range.
    pub(super) fn replace(&mut self, inode: &mut Inode, piece: &MapPiece) -> Result<(), FsError> {
        let map = inode.map().ok_or(FsError::Io)?;
        let removed = self.remove_range(map, piece.off, piece.end(), usize::MAX)?;
        self.txn.put(self.keys.piece(map, piece.off), &Piece::of(piece));
        if let Content::Extent(extent) = &piece.content {
            let origin = origin_at(inode.attr.ino, map, piece.off, extent);
            self.enqueue_new(extent, Written { directory: inode.packed_with(), origin })?;
        }
        if let Content::Extent(extent) = &piece.content
            && u64::from(extent.extent_len) != piece.len
        {
            // Several pieces of one commit may share a new extent; each refers to a part of it.
            let key = self.keys.extent(extent.id);
            let used = self.txn.get::<ExtentUse>(&key)?.unwrap_or(ExtentUse { refs: 0, live_bytes: 0 });
            let next = ExtentUse { refs: used.refs + 1, live_bytes: used.live_bytes + piece.len };
            self.txn.update(key, &next);
        }
        self.stored(inode, piece.len as i64 - removed.bytes as i64)
    }

    fn stored(&mut self, inode: &mut Inode, bytes: i64) -> Result<(), FsError> {
        let stored = inode.attr.stored_bytes.checked_add_signed(bytes);
        let stored = stored.ok_or_else(|| inconsistent("stored bytes of an inode"))?;
        inode.attr.stored_bytes = stored;
        self.account(bytes, 0)
    }

    /// Empties `[from, to)` of a map, but removes at most `limit` pieces.
    pub(super) fn remove_range(
        &mut self,
        map: MapId,
        from: u64,
        to: u64,
        limit: usize,
    ) -> Result<Removed, FsError> {
        let found = self.stored_pieces(map, from, to, limit)?;
        let all = found.len() < limit;
        let mut removed = Removed { bytes: 0, pieces: 0, done: from };
        for stored in &found {
            let left = limit.saturating_sub(removed.pieces);
            if left == 0 {
                return Ok(removed);
            }
            let (start, end) = (stored.off.max(from), stored.end().min(to));
            if start >= end {
                continue;
            }
            let kept = [stored.clip(0, from), stored.clip(to, u64::MAX)];
            match &stored.piece.content {
                PieceContent::Data(content) => {
                    removed.bytes += end - start;
                    if let Content::Extent(extent) = content {
                        self.unuse(extent, end - start, kept.iter().flatten().count() as u32)?;
                    }
                }
                PieceContent::Map { map: inner, off } => {
                    let range = (start - stored.off + off, end - stored.off + off);
                    let inside = self.remove_range(*inner, range.0, range.1, left)?;
                    removed.bytes += inside.bytes;
                    removed.pieces += inside.pieces;
                    if inside.done < range.1 {
                        removed.done = inside.done - off + stored.off;
                        return Ok(removed);
                    }
                }
            }
            removed.pieces += 1;
            removed.done = end;
            self.txn.delete(self.keys.piece(map, stored.off));
            let kept: Vec<Stored> = kept.into_iter().flatten().collect();
            self.move_loss(map, stored.off, kept.iter().map(|part| part.off))?;
            for part in kept {
                self.txn.update_part(
                    &self.keys.piece(map, stored.off),
                    self.keys.piece(map, part.off),
                    &part.piece,
                );
            }
        }
        if all {
            removed.done = to;
        }
        Ok(removed)
    }

    /// Turns one reference to an extent into `parts` references, with `dead_bytes` fewer live bytes in total.
    fn unuse(&mut self, extent: &ExtentRef, dead_bytes: u64, parts: u32) -> Result<(), FsError> {
        let key = self.keys.extent(extent.id);
        let whole = ExtentUse { refs: 1, live_bytes: u64::from(extent.extent_len) };
        let used = self.txn.get::<ExtentUse>(&key)?.unwrap_or(whole);
        let refs = used.refs - 1 + parts;
        if refs == 0 {
            if self.forget_extent(extent.id)? {
                let place = ExtentPlace { pg: extent.pg, n: extent.n, k: extent.k, shard: 0, extent_len: 0 };
                self.txn.put(self.keys.free(self.seq.0, extent.id), &place);
            }
            self.txn.delete(key);
            return Ok(());
        }
        let live_bytes = used.live_bytes.checked_sub(dead_bytes);
        let live_bytes = live_bytes.ok_or_else(|| inconsistent("live bytes of an extent"))?;
        self.use_extent(extent, ExtentUse { refs, live_bytes })
    }

    fn share(&mut self, extent: &ExtentRef, bytes: u64) -> Result<(), FsError> {
        let key = self.keys.extent(extent.id);
        let whole = ExtentUse { refs: 1, live_bytes: u64::from(extent.extent_len) };
        let used = self.txn.get::<ExtentUse>(&key)?.unwrap_or(whole);
        self.use_extent(extent, ExtentUse { refs: used.refs + 1, live_bytes: used.live_bytes + bytes })
    }

    fn use_extent(&mut self, extent: &ExtentRef, used: ExtentUse) -> Result<(), FsError> {
        let before = self.live_before(extent)?;
        self.txn.update(self.keys.extent(extent.id), &used);
        self.note_live(extent, before)
    }

    /// Sets the size. Cutting off very many pieces takes several steps, each with a shorter file. The caller sees from
    /// the size whether to continue.
    pub(super) fn truncate(&mut self, inode: &mut Inode, size: u64) -> Result<(), FsError> {
        let Some(map) = inode.map() else { return Ok(()) };
        if size >= inode.attr.size {
            inode.attr.size = size;
            return Ok(());
        }
        if size == 0 && inode.attr.stored_bytes > 0 {
            self.txn.put(self.keys.purge(map), &0u64);
            inode.segments = self.next_segments(map)?;
            let stored = inode.attr.stored_bytes as i64;
            inode.attr.size = 0;
            return self.stored(inode, -stored);
        }
        let cut = self.cut_point(map, size, inode.attr.size)?;
        let removed = self.remove_range(map, cut, FILE_BYTES_MAX, usize::MAX)?;
        inode.attr.size = cut;
        self.stored(inode, -(removed.bytes as i64))
    }

    /// The lowest offset at or above `size` with at most [`PIECES_PER_OP_MAX`] pieces from there on.
    fn cut_point(&self, map: MapId, size: u64, end: u64) -> Result<u64, FsError> {
        let few = |from: u64| -> Result<bool, FsError> {
            Ok(self.pieces(map, from, FILE_BYTES_MAX, PIECES_PER_OP_MAX + 1)?.len() <= PIECES_PER_OP_MAX)
        };
        let (mut low, mut high) = (size, end);
        if few(low)? {
            return Ok(low);
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if few(middle)? { high = middle } else { low = middle }
        }
        Ok(high)
    }

    pub(super) fn punch(&mut self, ino: Ino, off: u64, len: u64) -> Outcome {
        let mut inode = self.regular(ino)?;
        check_unguarded(&inode.attr)?;
        self.clear(ino, Intent::Change)?;
        let end = off.checked_add(len).filter(|end| *end <= FILE_BYTES_MAX).ok_or(FsError::TooLarge)?;
        let mut next_off = end;
        if let Some(map) = inode.map() {
            let removed = self.remove_range(map, off, end, PIECES_PER_OP_MAX)?;
            next_off = removed.done;
            self.stored(&mut inode, -(removed.bytes as i64))?;
        }
        self.touch_content(&mut inode.attr);
        self.put_inode(&inode);
        Ok(MetaReply::Punched { attr: inode.attr, next_off })
    }

    pub(super) fn clone_range(&mut self, from: (Ino, u64), to: (Ino, u64), len: u64) -> Outcome {
        let source = self.regular(from.0)?;
        let mut target = self.regular(to.0)?;
        check_unguarded(&target.attr)?;
        self.clear(from.0, Intent::Read)?;
        self.clear(to.0, Intent::Change)?;
        let end = to.1.checked_add(len).filter(|end| *end <= FILE_BYTES_MAX).ok_or(FsError::TooLarge)?;
        let source_end = from.1.checked_add(len).ok_or(FsError::TooLarge)?;
        if source_end > source.attr.size {
            return Err(FsError::Invalid.into());
        }
        let (Some(source_map), Some(target_map)) = (source.map(), target.map()) else {
            return Err(FsError::Io.into());
        };
        let pieces = self.pieces(source_map, from.1, source_end, PIECES_PER_OP_MAX + 1)?;
        if pieces.len() > PIECES_PER_OP_MAX {
            return Err(FsError::TooLarge.into());
        }
        let copies: Vec<MapPiece> =
            pieces.iter().filter_map(|piece| piece.clip(from.1, source_end)).collect();
        // Share first: emptying the target range must not free extents to which the copies refer.
        for copy in &copies {
            if let Content::Extent(extent) = &copy.content {
                self.share(extent, copy.len)?;
            }
        }
        let removed = self.remove_range(target_map, to.1, end, usize::MAX)?;
        let mut added = 0;
        for mut copy in copies {
            copy.off = copy.off - from.1 + to.1;
            added += copy.len;
            self.txn.put(self.keys.piece(target_map, copy.off), &Piece::of(&copy));
        }
        self.stored(&mut target, added as i64 - removed.bytes as i64)?;
        target.attr.size = target.attr.size.max(end);
        self.touch_content(&mut target.attr);
        self.put_inode(&target);
        Ok(MetaReply::Attr(target.attr))
    }
}

/// Checks that the pieces of one commit do not overlap. A piece that covers another one would free an extent that both
/// share.
pub(super) fn check_apart(pieces: &[CommitPiece]) -> Result<(), FsError> {
    let mut ranges: Vec<(u64, u64)> =
        pieces.iter().map(|commit| (commit.piece.off, commit.piece.len)).collect();
    ranges.sort_unstable();
    let apart = ranges.windows(2).all(|pair| pair[0].0.saturating_add(pair[0].1) <= pair[1].0);
    if apart { Ok(()) } else { Err(FsError::Invalid) }
}

/// Logs that counters contradict each other: the ledger is damaged. The request must fail and change nothing.
pub(super) fn inconsistent(what: &str) -> FsError {
    tracing::error!(what, "ledger is inconsistent");
    FsError::Io
}

/// The time of a change of content, and the attributes that change with it.
pub(super) struct CommitTimes<'a> {
    pub(super) mtime_ns: i64,
    pub(super) set: &'a SetAttr,
}

/// A piece of a map as it is stored.
pub(super) struct Stored {
    pub(super) off: u64,
    pub(super) piece: Piece,
}

impl Stored {
    pub(super) fn end(&self) -> u64 {
        self.off + self.piece.len
    }

    /// The part inside `[from, to)`, if any.
    fn clip(&self, from: u64, to: u64) -> Option<Stored> {
        let (start, end) = (self.off.max(from), self.end().min(to));
        if start >= end {
            return None;
        }
        let piece = match &self.piece.content {
            PieceContent::Data(content) => {
                let whole = MapPiece { off: self.off, len: self.piece.len, content: content.clone() };
                Piece::of(&whole.clip(from, to)?)
            }
            PieceContent::Map { map, off } => Piece::of_map(*map, off + (start - self.off), end - start),
        };
        Some(Stored { off: start, piece })
    }
}

/// The result of emptying a range.
pub(super) struct Removed {
    /// Sum of the lengths of the removed pieces.
    pub(super) bytes: u64,
    /// Number of removed pieces.
    pieces: usize,
    /// The range is empty up to here.
    pub(super) done: u64,
}

/// Longest piece: the largest extent is 16 data shards of 1 MiB.
pub(super) const PIECE_BYTES_MAX: u64 = 16 << 20;
