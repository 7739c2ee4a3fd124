//! Notes of pieces that cannot be read. A note stays until the piece is gone or readable again.
//!
//! A note is bound to its piece: the batch that removes the piece removes the note. If a piece is cut, its remaining
//! parts keep the note until a read of them succeeds. So notes never have to be compared with maps.

use std::collections::HashSet;

use base::{FsError, Ino, MapId};
use bytes::Bytes;
use wire::damage::{
    DamageReply, DamageRequest, DamageSums, LOST_PIECES_MAX, LossCause, LostPiece, NamePosition, NameSearch,
};
use wire::meta::{Content, MapPiece, PiecePosition};

use super::{Op, Stop};
use crate::keys::{KeyRange, Keys};
use crate::values::{COMPOSED_MAP, Dentry, Inode, LostRecord, PieceContent};

/// Most inodes visited by one request; pieces of composed maps count as well.
const INODES_MAX: usize = 4096;
const PARTS_MAX: usize = 16_384;
/// Most directory entries visited by one request.
const ENTRIES_MAX: usize = 8192;
const LIST_MAX: u32 = 1024;

type Answer = Result<DamageReply, Stop>;

impl Op<'_> {
    pub(super) fn damage(&mut self, request: &DamageRequest) -> Answer {
        use DamageRequest as R;
        match request {
            R::PieceAt { ino, off } => self.piece_at(*ino, *off),
            R::FilesOf { maps, after } => self.files_of(maps, *after),
            R::NameOf { ino, search } => self.name_of(*ino, search),
            R::Note { position, piece, ino, cause } => self.note_loss(*position, piece, *ino, *cause),
            R::Settle { positions } => {
                for PiecePosition { map, off } in positions {
                    self.move_loss(*map, *off, std::iter::empty())?;
                }
                Ok(DamageReply::Done)
            }
            R::Repaired { shards } => {
                let sums = self.damage_sums()?;
                self.put_sums(&DamageSums { repaired: sums.repaired + shards, ..sums });
                Ok(DamageReply::Done)
            }
            R::LookedAtAll { since_s } => {
                let sums = self.damage_sums()?;
                if sums.unnoted > 0 && sums.unnoted_s < *since_s {
                    self.put_sums(&DamageSums { unnoted: 0, unnoted_s: 0, ..sums });
                }
                Ok(DamageReply::Done)
            }
            R::List { after, limit } => self.list_lost(*after, *limit),
        }
    }

    fn damage_sums(&self) -> Result<DamageSums, Stop> {
        Ok(self.txn.get(&self.keys.value("damage"))?.unwrap_or_default())
    }

    fn put_sums(&mut self, sums: &DamageSums) {
        self.txn.update(self.keys.value("damage"), sums);
    }

    /// Moves the note of a piece to the parts that replaced it, if there are any.
    pub(super) fn move_loss(
        &mut self,
        map: MapId,
        off: u64,
        parts: impl Iterator<Item = u64>,
    ) -> Result<(), FsError> {
        // Almost always the map has no notes, and no lookup is needed.
        if !self.volatile.lost_in.contains(&map) {
            return Ok(());
        }
        let Some(record) = self.txn.get::<LostRecord>(&self.keys.lost(map, off))? else { return Ok(()) };
        self.txn.delete(self.keys.lost(map, off));
        let mut count = 0;
        for part in parts {
            self.txn.update_part(&self.keys.lost(map, off), self.keys.lost(map, part), &record);
            count += 1;
        }
        let sums: DamageSums = self.txn.get(&self.keys.value("damage"))?.unwrap_or_default();
        self.put_sums(&DamageSums { pieces: sums.pieces.saturating_sub(1) + count, ..sums });
        Ok(())
    }

    fn note_loss(
        &mut self,
        PiecePosition { map, off }: PiecePosition,
        piece: &MapPiece,
        ino: Ino,
        cause: LossCause,
    ) -> Answer {
        let Some(extent) = piece.content.extent().filter(|_| piece.off == off) else {
            return Err(FsError::Invalid.into());
        };
        let begins_there =
            self.stored_pieces(map, off, off + 1, 1)?.first().is_some_and(|now| now.off == off);
        if !begins_there || !self.has_piece(map, piece)? {
            return Ok(DamageReply::Noted(false));
        }
        let key = self.keys.lost(map, off);
        let (before, now_s) = (self.txn.get::<LostRecord>(&key)?, self.now_s());
        let known = before.filter(|before| before.extent == extent.id);
        let mut sums = self.damage_sums()?;
        match known {
            None if sums.pieces >= LOST_PIECES_MAX => {
                self.put_sums(&DamageSums { unnoted: sums.unnoted + 1, unnoted_s: now_s, ..sums });
                return Ok(DamageReply::Noted(false));
            }
            None => {
                sums.pieces += u64::from(before.is_none());
                sums.unrepairable += cause.bad();
                self.put_sums(&sums);
            }
            Some(known) if known.cause == cause && (ino == Ino(0) || known.ino == ino) => {
                return Ok(DamageReply::Noted(true));
            }
            Some(_) => {}
        }
        let found_s = known.map_or(now_s, |known| known.found_s);
        let ino = if ino == Ino(0) { known.map_or(ino, |known| known.ino) } else { ino };
        self.txn.update(key, &LostRecord { extent: extent.id, ino, found_s, cause });
        self.volatile.lost_in.insert(map);
        Ok(DamageReply::Noted(true))
    }

    fn list_lost(&mut self, after: Option<PiecePosition>, limit: u32) -> Answer {
        let range = self.keys.all_lost(after.map(|after| (after.map, after.off)));
        let mut pieces = Vec::new();
        for (key, bytes) in self.txn.scan(&range, limit.clamp(1, LIST_MAX) as usize)? {
            let (map, off) = Keys::piece_of_lost(&key);
            let LostRecord { extent, ino, found_s, cause } = self.txn.decode(&key, &bytes)?;
            let now = self.stored_pieces(map, off, off + 1, 1)?.pop();
            let now = now.filter(|now| now.off == off).and_then(|now| now.piece.at(off));
            let now = now.filter(|now| now.content.extent().is_some_and(|now| now.id == extent));
            let piece = now.map(|now| self.resolve(now)).transpose()?;
            pieces.push(LostPiece { position: PiecePosition { map, off }, piece, ino, found_s, cause });
        }
        Ok(DamageReply::Lost { pieces, sums: self.damage_sums()? })
    }

    fn piece_at(&mut self, ino: Ino, off: u64) -> Answer {
        let Some(mut map) = self.inode(ino)?.map() else { return Ok(DamageReply::Piece(None)) };
        let mut at = off;
        while let Some(stored) = self.stored_pieces(map, at, at + 1, 1)?.pop() {
            match stored.piece.content {
                PieceContent::Map { map: inner, off: inner_off } => {
                    (map, at) = (inner, at - stored.off + inner_off);
                }
                PieceContent::Data(_) => {
                    let piece = stored.piece.at(stored.off);
                    let piece = piece.filter(|piece| !matches!(piece.content, Content::Inline(_)));
                    let Some(piece) = piece.map(|piece| self.resolve(piece)).transpose()? else { break };
                    return Ok(DamageReply::Piece(Some((PiecePosition { map, off: stored.off }, piece))));
                }
            }
        }
        Ok(DamageReply::Piece(None))
    }

    fn files_of(&mut self, maps: &[MapId], after: Ino) -> Answer {
        let wanted: HashSet<MapId> = maps.iter().copied().collect();
        let range = (self.keys.inode(Ino(after.0 + 1)), self.keys.table_end(b'I'));
        let found = self.txn.scan(&range, INODES_MAX)?;
        let mut more = found.len() == INODES_MAX;
        let (mut files, mut last, mut parts) = (Vec::new(), None, 0);
        for (key, bytes) in found {
            if parts >= PARTS_MAX {
                more = true;
                break;
            }
            let inode: Inode = self.txn.decode(&key, &bytes)?;
            last = Some(inode.attr.ino);
            let Some(map) = inode.map() else { continue };
            if wanted.contains(&map) {
                files.push((map, inode.attr.ino));
            }
            if map.0 & COMPOSED_MAP != 0 {
                let inner = self.stored_pieces(map, 0, u64::MAX, usize::MAX)?;
                parts += inner.len();
                files.extend(inner.iter().filter_map(|stored| match &stored.piece.content {
                    PieceContent::Map { map, .. } if wanted.contains(map) => Some((*map, inode.attr.ino)),
                    _ => None,
                }));
            }
        }
        Ok(DamageReply::Files { files, next: last.filter(|_| more) })
    }

    fn name_of(&mut self, ino: Ino, search: &NameSearch) -> Answer {
        let parent = match self.inode(ino) {
            Err(FsError::Stale) => return Ok(DamageReply::Name { found: None, next: None }),
            inode => inode?.parent,
        };
        let (range, after): (KeyRange, _) = match search {
            NameSearch::Parent { after } => (self.keys.dentries(parent), after),
            NameSearch::All { after } => (self.keys.table(b'D'), after),
        };
        let first = match after {
            Some(NamePosition { dir, sort_name }) => {
                let mut first = self.keys.dentries_from(*dir, sort_name).0;
                // A key ends in the name's final 0 and the layer: this key sorts behind the entry itself.
                first.extend_from_slice(&[0, u8::MAX, u8::MAX, u8::MAX, u8::MAX, u8::MAX]);
                first
            }
            None => range.0,
        };
        let entries = self.txn.scan(&(first, range.1), ENTRIES_MAX)?;
        let more = entries.len() == ENTRIES_MAX;
        let mut next = None;
        for (key, bytes) in entries {
            let dentry: Dentry = self.txn.decode(&key, &bytes)?;
            if dentry.ino == ino {
                let name = Bytes::copy_from_slice(Keys::name_of_dentry(&key));
                return Ok(DamageReply::Name { found: Some((Keys::dir_of_dentry(&key), name)), next: None });
            }
            next = more.then_some(key);
        }
        let next = next.map(|key| NamePosition {
            dir: Keys::dir_of_dentry(&key),
            sort_name: Bytes::copy_from_slice(Keys::sort_name_of_dentry(&key)),
        });
        Ok(DamageReply::Name { found: None, next })
    }
}
