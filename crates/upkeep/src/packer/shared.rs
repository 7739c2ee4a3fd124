//! Extents that several pieces share, as after `cp --reflink`: each is rewritten once, and all pieces move to the copy.

use std::collections::BTreeMap;

use base::ExtentId;
use client::{MapEntry, PackTarget};
use wire::meta::{Content, ExtentRef, PACK_MOVES_MAX};

use super::assess::{Load, Verdict};

/// Pieces remembered in one sweep, and the number beyond which no further extent is begun. The others are left for the
/// next sweep. Some dozens of megabytes.
const PIECES_MAX: usize = 262_144;
const PIECES_BEGUN: usize = PIECES_MAX / 2;

/// The shared extents that a sweep found.
#[derive(Default)]
pub(super) struct Shared {
    extents: BTreeMap<ExtentId, Vec<MapEntry>>,
    pieces: usize,
}

impl Shared {
    /// Remembers a piece. Returns whether there was room.
    pub(super) fn put(&mut self, entry: MapEntry) -> bool {
        let Some(ExtentRef { id, .. }) = extent_of(&entry) else { return false };
        let begins = !self.extents.contains_key(&id);
        if self.pieces >= if begins { PIECES_BEGUN } else { PIECES_MAX } {
            return false;
        }
        self.pieces += 1;
        self.extents.entry(id).or_default().push(entry);
        true
    }

    /// The loads, one for each new extent.
    pub(super) fn loads(self, target: &PackTarget) -> Vec<Load> {
        let step = u64::from(target.extent_bytes);
        self.extents.into_values().flat_map(|entries| loads_of(&entries, step)).collect()
    }
}

fn extent_of(entry: &MapEntry) -> Option<ExtentRef> {
    match entry.piece.content {
        Content::Extent(extent) => Some(extent),
        Content::Inline(_) | Content::Tiered(..) => None,
    }
}

/// The pieces of one extent, cut at multiples of `step` if it is longer.
fn loads_of(entries: &[MapEntry], step: u64) -> Vec<Load> {
    let ends =
        entries.iter().filter_map(|entry| Some(u64::from(extent_of(entry)?.extent_off) + entry.piece.len));
    let end = ends.max().unwrap_or(0);
    let mut loads = Vec::new();
    for from in (0..end).step_by(step as usize) {
        let parts: Vec<MapEntry> =
            entries.iter().filter_map(|entry| part(entry, from, from + step)).collect();
        for parts in parts.chunks(PACK_MOVES_MAX) {
            let mut load = Load::default();
            parts.iter().for_each(|part| load.put(part.clone(), Verdict::MoveAlone));
            // The pieces overlap.
            load.bytes = load.bytes.min(end.min(from + step) - from);
            loads.push(load);
        }
    }
    loads
}

/// The part of a piece whose bytes lie in `[from, end)` of its extent.
fn part(entry: &MapEntry, from: u64, end: u64) -> Option<MapEntry> {
    let at = u64::from(extent_of(entry)?.extent_off);
    let off = entry.piece.off;
    let piece = entry.piece.clip((off + from).saturating_sub(at), (off + end).saturating_sub(at))?;
    Some(MapEntry { piece, ..entry.clone() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use base::{MapId, PgId};
    use wire::meta::MapPiece;

    fn piece(id: u64, map: u64, off: u64, extent_off: u32, len: u64) -> MapEntry {
        let extent = ExtentRef { id: ExtentId(id), pg: PgId(0), k: 4, n: 6, extent_len: 4000, extent_off };
        let piece = MapPiece { off, len, content: Content::Extent(extent) };
        MapEntry { map: MapId(map), piece, live_bytes: Some(8000), in_store: false }
    }

    #[test]
    fn pieces_of_an_extent_are_cut_where_the_new_ones_end() {
        let entries = [piece(1, 1, 0, 0, 4000), piece(1, 2, 10, 1500, 1000), piece(1, 3, 77, 100, 50)];
        let loads = loads_of(&entries, 1600);
        let places: Vec<Vec<_>> = loads
            .iter()
            .map(|load| {
                let place = |entry: &MapEntry| {
                    (entry.map.0, entry.piece.off, extent_of(entry).unwrap().extent_off, entry.piece.len)
                };
                load.entries.iter().map(place).collect()
            })
            .collect();
        assert_eq!(
            places,
            [
                vec![(1, 0, 0, 1600), (2, 10, 1500, 100), (3, 77, 100, 50)],
                vec![(1, 1600, 1600, 1600), (2, 110, 1600, 900)],
                vec![(1, 3200, 3200, 800)],
            ]
        );
        assert_eq!(loads.iter().map(|load| load.bytes).collect::<Vec<_>>(), [1600, 1600, 800]);
    }

    #[test]
    fn very_many_pieces_are_spread_over_a_few_copies() {
        let entries: Vec<_> = (0..5000).map(|map| piece(1, map, 0, 0, 4000)).collect();
        let lens: Vec<_> = loads_of(&entries, 4000).iter().map(|load| load.entries.len()).collect();
        assert_eq!(lens, [2048, 2048, 904]);
    }

    #[test]
    fn the_number_of_remembered_pieces_is_bounded() {
        let mut shared = Shared::default();
        for id in 0..PIECES_MAX as u64 {
            assert_eq!(shared.put(piece(id, 1, 0, 0, 1)), id < PIECES_BEGUN as u64);
        }
        assert!(shared.put(piece(0, 2, 0, 0, 1)), "further pieces of a begun extent are taken");
    }
}
