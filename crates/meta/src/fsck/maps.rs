//! Maps of files: pieces do not overlap, belong to somebody, and what is summed up is right.

use std::ops::ControlFlow;

use base::{Ino, MapId};

use super::{Check, FsckError, u64_at};
use crate::keys::Keys;
use crate::values::{Inode, Piece, Usage};

/// The pieces of a map.
struct Map {
    map: u64,
    stored: u64,
    end: u64,
    owner: Option<u64>,
}

const PIECE_KEY: std::ops::RangeInclusive<usize> = 25..=25;

impl Check<'_> {
    pub(super) fn maps(&mut self) -> Result<(), FsckError> {
        let mut from = 0;
        loop {
            let (mut maps, to) = self.maps_from(from)?;
            self.owners_into(&mut maps, from, to)?;
            for map in &maps {
                let purged = self.input.state.get(&self.keys.purge(MapId(map.map)))?.is_some();
                if map.owner.is_some() == purged {
                    let owner = map.owner.map_or("nobody".to_owned(), |ino| format!("inode {ino}"));
                    let not = if purged { "" } else { "not " };
                    self.find(
                        "map_owner",
                        format!("map {} belongs to {owner} and is {not}to be removed", map.map),
                        if purged {
                            "data in use is being deleted: stop the node and copy the metadata"
                        } else {
                            "its space does not come back"
                        },
                    );
                }
            }
            if to == u64::MAX {
                return Ok(());
            }
            from = to;
        }
    }

    /// Sums of the maps from `from` on, and where the next window begins.
    fn maps_from(&mut self, from: u64) -> Result<(Vec<Map>, u64), FsckError> {
        self.input.progress.begin("pieces");
        let mut maps: Vec<Map> = Vec::new();
        let mut to = u64::MAX;
        let limit = self.window;
        let next_map = self.number("next_map")?;
        let range = (self.keys.piece(MapId(from), 0), self.keys.table_end(b'M'));
        self.each::<Piece>(&range, PIECE_KEY, |check, key, piece| {
            let (map, off) = (u64_at(key, 5), Keys::off_of_piece(key));
            if maps.last().is_none_or(|last| last.map != map) {
                if maps.len() >= limit {
                    to = map;
                    return ControlFlow::Break(());
                }
                maps.push(Map { map, stored: 0, end: 0, owner: None });
                if map >= next_map {
                    check.find(
                        "map_number",
                        format!("map {map} exists and the next number is {next_map}"),
                        "the number may be given to a new file: copy the data away",
                    );
                }
            }
            check.report.pieces += 1;
            let last = maps.last_mut().expect("one was just pushed");
            if off < last.end || piece.len == 0 {
                check.find(
                    "overlap",
                    format!(
                        "pieces of map {map} overlap at offset {off}: the one before ends at {}",
                        last.end
                    ),
                    "what the file reads there is not certain: restore it",
                );
            }
            last.stored += piece.len;
            last.end = last.end.max(off.saturating_add(piece.len));
            ControlFlow::Continue(())
        })?;
        Ok((maps, to))
    }

    /// Compares inodes with the maps in `[from, to)`.
    fn owners_into(&mut self, maps: &mut [Map], from: u64, to: u64) -> Result<(), FsckError> {
        self.input.progress.begin("inodes");
        let mut total = Usage::default();
        let range = self.keys.table(b'I');
        self.each::<Inode>(&range, 17..=17, |check, key, inode| {
            let ino = u64_at(key, 5);
            total.inodes += 1;
            total.stored_bytes = total.stored_bytes.wrapping_add(inode.attr.stored_bytes);
            let map = inode.map().map_or(0, |map| map.0);
            if !(from..to).contains(&map) {
                return ControlFlow::Continue(());
            }
            let found = maps.binary_search_by_key(&map, |map| map.map).ok();
            let (stored, end) = found.map_or((0, 0), |at| (maps[at].stored, maps[at].end));
            if let Some(at) = found
                && let Some(other) = maps[at].owner.replace(ino)
            {
                check.find("map_owner", format!("map {map} belongs to inodes {other} and {ino}"), "copy both files, remove one");
            }
            if inode.attr.stored_bytes != stored || end > inode.attr.size {
                check.find(
                    "stored_bytes",
                    format!(
                        "inode {ino} says {} stored bytes and size {}; its pieces have {stored} bytes and end at {end}",
                        inode.attr.stored_bytes, inode.attr.size
                    ),
                    "usage is wrong by that much",
                );
            }
            ControlFlow::Continue(())
        })?;
        let usage = self.get::<Usage>(&self.keys.value("usage"))?.unwrap_or_default();
        if from == 0 && usage != total {
            self.find(
                "usage",
                format!(
                    "the filesystem says {} bytes in {} inodes; they are {} in {}",
                    usage.stored_bytes, usage.inodes, total.stored_bytes, total.inodes
                ),
                "df is wrong by that much",
            );
        }
        Ok(())
    }
}

impl Check<'_> {
    /// A file that refers to an extent, for messages: looked up only when something is wrong.
    pub(super) fn file_of_extent(&self, extent: u64) -> Result<String, FsckError> {
        let mut map = None;
        self.input.state.scan(&self.keys.table(b'M'), &mut |key, value| {
            use crate::values::Value;
            let refers = Piece::decode(value).is_ok_and(
                |piece| matches!(piece.content, wire::meta::Content::Extent(found) if found.id.0 == extent),
            );
            map = refers.then(|| u64_at(key, 5));
            if refers { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        let Some(map) = map else { return Ok("no file".to_owned()) };
        let mut ino = None;
        self.input.state.scan(&self.keys.table(b'I'), &mut |key, value| {
            use crate::values::Value;
            let owns = Inode::decode(value).is_ok_and(|inode| inode.map() == Some(MapId(map)));
            ino = owns.then(|| Ino(u64_at(key, 5)));
            if owns { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        Ok(ino.map_or_else(|| format!("map {map}, which is being removed"), |ino| format!("inode {ino}")))
    }
}
