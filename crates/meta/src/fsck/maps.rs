//! Maps of files: pieces do not overlap, each map has an owner, and sums are right.

use std::collections::HashSet;
use std::ops::ControlFlow;

use base::{Ino, MapId};
use wire::meta::Content;

use super::{Check, FsckError, u64_at};
use crate::keys::Keys;
use crate::values::{COMPOSED_MAP, Inode, Part, Piece, PieceContent, Upload, Usage, Value};

/// The pieces of a map.
struct Map {
    map: u64,
    stored: u64,
    end: u64,
    owner: Option<Owner>,
}

/// The owner of a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Inode(u64),
    Part {
        upload: u64,
        number: u16,
    },
    /// A composed map.
    Map(u64),
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Owner::Inode(ino) => write!(f, "inode {ino}"),
            Owner::Part { upload, number } => write!(f, "part {number} of upload {upload}"),
            Owner::Map(map) => write!(f, "map {map}"),
        }
    }
}

/// The map with this number in a window.
fn map_in(maps: &mut [Map], map: u64) -> Option<&mut Map> {
    let at = maps.binary_search_by_key(&map, |map| map.map).ok()?;
    Some(&mut maps[at])
}

const PIECE_KEY: std::ops::RangeInclusive<usize> = 25..=25;

impl Check<'_> {
    pub(super) fn maps(&mut self) -> Result<(), FsckError> {
        let mut from = 0;
        loop {
            let (mut maps, to) = self.maps_from(from)?;
            self.owners_into(&mut maps, from, to)?;
            self.parts_into(&mut maps, from, to)?;
            self.ranges_into(&mut maps, from, to)?;
            for map in &maps {
                let purged = self.input.state.get(&self.keys.purge(MapId(map.map)))?.is_some();
                if map.owner.is_some() == purged {
                    let owner = map.owner.as_ref().map_or("nobody".to_owned(), Owner::to_string);
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

    /// Sums of the maps from `from` on, and the start of the next window.
    fn maps_from(&mut self, from: u64) -> Result<(Vec<Map>, u64), FsckError> {
        self.input.progress.begin("pieces");
        let mut maps: Vec<Map> = Vec::new();
        let mut to = u64::MAX;
        let limit = self.window;
        let (next_map, next_ino) = (self.number("next_map")?, self.number("next_ino")?);
        let range = (self.keys.piece(MapId(from), 0), self.keys.table_end(b'M'));
        let mut failed = None;
        self.each::<Piece>(&range, PIECE_KEY, |check, key, piece| {
            let (map, off) = (u64_at(key, 5), Keys::off_of_piece(key));
            if maps.last().is_none_or(|last| last.map != map) {
                if maps.len() >= limit {
                    to = map;
                    return ControlFlow::Break(());
                }
                maps.push(Map { map, stored: 0, end: 0, owner: None });
                let (number, next) = match MapId(map).file() {
                    Some(ino) => (ino.0, next_ino),
                    None => (map & !COMPOSED_MAP, next_map),
                };
                if number >= next {
                    check.find(
                        "map_number",
                        format!("map {map} exists and the next number is {next}"),
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
            last.stored += match piece.content {
                PieceContent::Data(_) => piece.len,
                PieceContent::Map { map, off } => match check.stored_in(map, off, piece.len) {
                    Ok(stored) => stored,
                    Err(error) => {
                        failed = Some(error);
                        return ControlFlow::Break(());
                    }
                },
            };
            last.end = last.end.max(off.saturating_add(piece.len));
            ControlFlow::Continue(())
        })?;
        match failed {
            Some(error) => Err(error),
            None => Ok((maps, to)),
        }
    }

    /// Bytes of the pieces in a range of a map to which a composed map refers.
    fn stored_in(&self, map: MapId, off: u64, len: u64) -> Result<u64, FsckError> {
        let mut stored = 0;
        let end = off.saturating_add(len);
        let range = self.keys.pieces(map, off, end);
        self.input.state.scan(&range, &mut |key, value| {
            // A piece that extends beyond the range belongs to two ranges.
            let inside = end - Keys::off_of_piece(key).min(end);
            stored += Piece::decode(value).map_or(0, |piece| piece.len.min(inside));
            ControlFlow::Continue(())
        })?;
        Ok(stored)
    }

    /// Registers parts of uploads as owners of maps, like inodes.
    fn parts_into(&mut self, maps: &mut [Map], from: u64, to: u64) -> Result<(), FsckError> {
        let mut uploads = HashSet::new();
        if from == 0 {
            self.each::<Upload>(&self.keys.table(b'A'), 23..=1100, |_, key, _| {
                uploads.insert(Keys::upload_of_key(key).1);
                ControlFlow::Continue(())
            })?;
        }
        self.each::<Part>(&self.keys.table(b'G'), 15..=15, |check, key, part| {
            let (upload, number) = (u64_at(key, 5), Keys::number_of_part(key));
            if from == 0 && !uploads.contains(&upload) {
                check.find(
                    "part_without_upload",
                    format!("part {number} belongs to upload {upload}, which does not exist"),
                    "its space does not come back",
                );
            }
            if !(from..to).contains(&part.map.0) {
                return ControlFlow::Continue(());
            }
            let owner = Owner::Part { upload, number };
            let found = map_in(maps, part.map.0);
            let (stored, end) = found.as_ref().map_or((0, 0), |map| (map.stored, map.end));
            check.own(found, owner);
            if part.stored_bytes != stored || end > part.len {
                check.find(
                    "stored_bytes",
                    format!(
                        "{owner} says {} stored bytes and length {}; its pieces have {stored} bytes and end at {end}",
                        part.stored_bytes, part.len
                    ),
                    "usage is wrong by that much",
                );
            }
            ControlFlow::Continue(())
        })
    }

    /// Registers composed maps as owners of the maps in their ranges. A part that was cut may leave several ranges of
    /// one map.
    fn ranges_into(&mut self, maps: &mut [Map], from: u64, to: u64) -> Result<(), FsckError> {
        let range = (self.keys.piece(MapId(COMPOSED_MAP), 0), self.keys.table_end(b'M'));
        self.each::<Piece>(&range, PIECE_KEY, |check, key, piece| {
            if let PieceContent::Map { map, .. } = piece.content
                && (from..to).contains(&map.0)
            {
                let owner = Owner::Map(u64_at(key, 5));
                let found = map_in(maps, map.0).filter(|map| map.owner != Some(owner));
                check.own(found, owner);
            }
            ControlFlow::Continue(())
        })
    }

    fn own(&mut self, map: Option<&mut Map>, owner: Owner) {
        let Some(map) = map else { return };
        if let Some(other) = map.owner.replace(owner) {
            let what = format!("map {} belongs to {other} and {owner}", map.map);
            self.find("map_owner", what, "copy both files, remove one");
        }
    }

    /// Compares inodes with their maps in `[from, to)`.
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
            let found = map_in(maps, map);
            let (stored, end) = found.as_ref().map_or((0, 0), |map| (map.stored, map.end));
            check.own(found, Owner::Inode(ino));
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
        self.each::<Part>(&self.keys.table(b'G'), 15..=15, |_, _, part| {
            total.stored_bytes = total.stored_bytes.wrapping_add(part.stored_bytes);
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
    /// A file that refers to an extent, for messages. Looked up only for findings.
    pub(super) fn file_of_extent(&self, extent: u64) -> Result<String, FsckError> {
        let mut map = None;
        self.input.state.scan(&self.keys.table(b'M'), &mut |key, value| {
            let refers = Piece::decode(value).is_ok_and(
                |piece| matches!(piece.content, PieceContent::Data(Content::Extent(found)) if found.id.0 == extent),
            );
            map = refers.then(|| u64_at(key, 5));
            if refers { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        let Some(map) = map else { return Ok("no file".to_owned()) };
        let mut ino = None;
        self.input.state.scan(&self.keys.table(b'I'), &mut |key, value| {
            let owns = Inode::decode(value).is_ok_and(|inode| inode.map() == Some(MapId(map)));
            ino = owns.then(|| Ino(u64_at(key, 5)));
            if owns { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        Ok(ino.map_or_else(|| format!("map {map}, which is being removed"), |ino| format!("inode {ino}")))
    }
}
