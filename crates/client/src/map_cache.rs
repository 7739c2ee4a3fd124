//! The part of a file's map that a client knows, valid under its lease.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use wire::meta::{Content, MapPiece};

/// Most pieces remembered per file, about 25 MB of them. Further ones are asked for again.
const PIECES_MAX: usize = 262_144;
/// Memory for a piece, roughly.
const PIECE_BYTES: u64 = 128;
/// Changes remembered for answers to earlier requests.
const CHANGES_MAX: usize = 64;
/// Most bytes of inline content remembered per file.
const INLINE_BYTES_MAX: usize = 16 << 20;

/// Pieces by offset, complete inside the known ranges and cut to them.
#[derive(Debug, Default)]
pub(crate) struct MapCache {
    /// Disjoint ranges, not touching each other: start to end.
    known: BTreeMap<u64, u64>,
    pieces: BTreeMap<u64, MapPiece>,
    /// Bytes of inline content among them.
    inline_bytes: usize,
    /// Counts changes, so that an answer to a request from before a change does not count as current.
    generation: u64,
    /// The ranges of the last changes, newest last.
    changes: VecDeque<Range<u64>>,
}

impl MapCache {
    /// Whether the map of `[from, to)` is known.
    #[cfg(test)]
    fn covers(&self, from: u64, to: u64) -> bool {
        to <= self.known_end(from)
    }

    /// The end of the known range that contains `off`, or `off` itself.
    pub(crate) fn known_end(&self, off: u64) -> u64 {
        self.known.range(..=off).next_back().map_or(off, |(_, end)| off.max(*end))
    }

    /// Whether the map is known up to `off`, but not there: a sequential reader will ask for the rest.
    pub(crate) fn ends_at(&self, off: u64) -> bool {
        self.known.range(..off).next_back().is_some_and(|(_, end)| *end == off)
    }

    /// Memory in use, roughly.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.pieces.len() as u64 * PIECE_BYTES + self.inline_bytes as u64
    }

    /// How many pieces are remembered.
    pub(crate) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// The present generation, to be passed to [`MapCache::learn`] with the answer.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Makes answers that are on their way count as old.
    pub(crate) fn outdate(&mut self) {
        self.changed(0, u64::MAX);
    }

    /// Learns from an answer that is complete for `[from, to)`, up to the first change made since the request.
    pub(crate) fn learn(&mut self, generation: u64, from: u64, to: u64, pieces: Vec<MapPiece>) {
        let since = (self.generation - generation) as usize;
        if since > self.changes.len() {
            return;
        }
        let changed = self.changes.iter().rev().take(since).filter(|range| range.end > from);
        let to = changed.map(|range| range.start).min().unwrap_or(to).min(to);
        if to <= from {
            return;
        }
        if self.pieces.len() + pieces.len() > PIECES_MAX {
            self.clear();
        }
        self.cut(from, to);
        pieces.iter().filter_map(|piece| piece.clip(from, to)).for_each(|piece| self.insert(piece));
        self.know(from, to);
    }

    /// Learns that the file has no piece.
    pub(crate) fn learn_empty(&mut self) {
        self.forget();
        self.known.insert(0, u64::MAX);
    }

    /// Puts a committed piece in place of the old content of its range.
    pub(crate) fn replace(&mut self, piece: &MapPiece) {
        self.remove(piece.off, piece.end());
        if self.pieces.len() >= PIECES_MAX || self.inline_bytes >= INLINE_BYTES_MAX {
            self.clear();
        }
        self.know(piece.off, piece.end());
        self.insert(piece.clone());
    }

    /// Makes `[from, to)` a hole.
    pub(crate) fn remove(&mut self, from: u64, to: u64) {
        self.changed(from, to);
        self.cut(from, to);
    }

    /// Forgets everything.
    pub(crate) fn forget(&mut self) {
        self.changed(0, u64::MAX);
        self.clear();
    }

    fn clear(&mut self) {
        self.pieces.clear();
        self.known.clear();
        self.inline_bytes = 0;
    }

    fn insert(&mut self, piece: MapPiece) {
        self.inline_bytes += inline_len(&piece);
        self.pieces.insert(piece.off, piece);
    }

    fn changed(&mut self, from: u64, to: u64) {
        self.generation += 1;
        self.changes.push_back(from..to);
        if self.changes.len() > CHANGES_MAX {
            self.changes.pop_front();
        }
    }

    /// Removes pieces from a range; parts outside the range stay.
    fn cut(&mut self, from: u64, to: u64) {
        let first = self.pieces.range(..from).next_back().map_or(from, |(off, _)| *off);
        let touched: Vec<u64> = self.pieces.range(first..to).map(|(off, _)| *off).collect();
        for off in touched {
            let piece = self.pieces.remove(&off).expect("it was just found");
            self.inline_bytes -= inline_len(&piece);
            for part in [piece.clip(0, from), piece.clip(to, u64::MAX)].into_iter().flatten() {
                self.insert(part);
            }
        }
    }

    /// Marks `[from, to)` as known.
    fn know(&mut self, from: u64, to: u64) {
        let (mut from, mut to) = (from, to);
        while let Some((&start, &end)) = self.known.range(..=to).next_back() {
            if end < from {
                break;
            }
            self.known.remove(&start);
            (from, to) = (from.min(start), to.max(end));
        }
        self.known.insert(from, to);
    }

    /// The known pieces that reach into `[from, to)`, uncut.
    pub(crate) fn whole_pieces(&self, from: u64, to: u64) -> Vec<MapPiece> {
        let first = self.pieces.range(..from).next_back().map_or(from, |(off, _)| *off);
        self.pieces
            .range(first..to)
            .map(|(_, piece)| piece.clone())
            .filter(|piece| piece.end() > from)
            .collect()
    }

    /// The pieces in `[from, to)`, cut to that range.
    pub(crate) fn pieces(&self, from: u64, to: u64) -> Vec<MapPiece> {
        let first = self.pieces.range(..from).next_back().map_or(from, |(off, _)| *off);
        self.pieces.range(first..to).filter_map(|(_, piece)| piece.clip(from, to)).collect()
    }
}

fn inline_len(piece: &MapPiece) -> usize {
    match &piece.content {
        Content::Inline(bytes) => bytes.len(),
        Content::Extent(_) | Content::Tiered(..) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use proptest::prelude::*;

    fn piece(off: u64, text: &'static str) -> MapPiece {
        MapPiece {
            off,
            len: text.len() as u64,
            content: Content::Inline(Bytes::from_static(text.as_bytes())),
        }
    }

    fn text(cache: &MapCache, from: u64, to: u64) -> String {
        let mut out = vec![b'.'; (to - from) as usize];
        for piece in cache.pieces(from, to) {
            let Content::Inline(bytes) = piece.content else { unreachable!("only inline pieces here") };
            out[(piece.off - from) as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn commits_and_holes_cut_older_pieces() {
        let mut cache = MapCache::default();
        cache.learn_empty();
        cache.replace(&piece(0, "aaaaaaaa"));
        cache.replace(&piece(2, "bb"));
        cache.remove(5, 7);
        assert_eq!(text(&cache, 0, 10), "aabba..a..");
        assert_eq!(text(&cache, 3, 6), "ba.");
    }

    #[test]
    fn a_committed_piece_is_known_inside_and_outside_known_ranges() {
        for (off, known, expected) in [
            (7, vec![(7, 20)], ".......bbbbaaaaaaaaa....."),
            (10, vec![(10, 20)], "..........bbbbaaaaaa....."),
            (18, vec![(10, 22)], "..........aaaaaaaabbbb..."),
            (20, vec![(10, 24)], "..........aaaaaaaaaabbbb."),
            (5, vec![(5, 9), (10, 20)], ".....bbbb.aaaaaaaaaa....."),
            (21, vec![(10, 20), (21, 25)], "..........aaaaaaaaaa.bbbb"),
        ] {
            let mut cache = MapCache::default();
            cache.learn(cache.generation(), 10, 20, vec![piece(10, "aaaaaaaaaa")]);
            cache.replace(&piece(off, "bbbb"));
            assert_eq!(text(&cache, 0, 25), expected, "off={off}");
            assert_eq!(cache.known.into_iter().collect::<Vec<_>>(), known, "off={off}");
        }
    }

    #[test]
    fn an_answer_that_holds_a_committed_piece_again_does_not_double_it() {
        let mut cache = MapCache::default();
        cache.learn(cache.generation(), 4, 100, vec![piece(4, "aaaa")]);
        cache.replace(&piece(0, "bbbbbbbb"));
        cache.learn(cache.generation(), 0, 100, vec![piece(0, "bbbbbbbb")]);
        assert_eq!(cache.pieces(0, 100), [piece(0, "bbbbbbbb")]);
    }

    #[test]
    fn an_outdated_answer_counts_only_up_to_the_first_change() {
        let mut cache = MapCache::default();
        let generation = cache.generation();
        cache.remove(10, 20);
        cache.learn(generation, 15, 100, vec![piece(15, "old")]);
        assert!(!cache.covers(15, 16));
        cache.learn(generation, 8, 100, vec![piece(8, "oldold")]);
        assert_eq!(text(&cache, 0, 20), "........ol..........");
        assert!(cache.covers(8, 10) && !cache.covers(10, 11));
        cache.forget();
        cache.learn(generation, 0, 100, vec![piece(0, "old")]);
        assert!(!cache.covers(0, 1));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Commit(u64, u64),
        Hole(u64, u64),
        /// Asks for a range; the answer comes after this many further steps.
        Ask(u64, u64, usize),
        Forget,
    }

    fn step() -> impl Strategy<Value = Step> {
        let range = || (0..60u64, 1..12u64);
        prop_oneof![
            4 => range().prop_map(|(from, len)| Step::Commit(from, len)),
            1 => range().prop_map(|(from, len)| Step::Hole(from, len)),
            4 => (range(), 0..5usize).prop_map(|((from, len), late)| Step::Ask(from, len, late)),
            1 => Just(Step::Forget),
        ]
    }

    proptest! {
        /// The known ranges equal those of the owner.
        #[test]
        fn known_ranges_match_the_owner(steps in proptest::collection::vec(step(), 0..60)) {
            let mut owner: Vec<u8> = vec![0; 80];
            let mut cache = MapCache::default();
            let mut answers: Vec<(usize, u64, u64, u64, Vec<MapPiece>)> = Vec::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Commit(from, len) => {
                        let byte = (number % 250 + 1) as u8;
                        owner[from as usize..(from + len) as usize].fill(byte);
                        let content = Content::Inline(Bytes::from(vec![byte; len as usize]));
                        cache.replace(&MapPiece { off: from, len, content });
                    }
                    Step::Hole(from, len) => {
                        owner[from as usize..(from + len) as usize].fill(0);
                        cache.remove(from, from + len);
                    }
                    Step::Ask(from, len, late) => {
                        let pieces = (from..from + len).filter(|at| owner[*at as usize] > 0).map(|at| {
                            let content = Content::Inline(Bytes::from(vec![owner[at as usize]]));
                            MapPiece { off: at, len: 1, content }
                        });
                        answers.push((number + late, cache.generation(), from, from + len, pieces.collect()));
                    }
                    Step::Forget => cache.forget(),
                }
                let (due, later) = answers.into_iter().partition(|answer| answer.0 <= number);
                answers = later;
                for (_, generation, from, to, pieces) in Vec::into_iter(due) {
                    cache.learn(generation, from, to, pieces);
                }
                prop_assert_eq!(cache.inline_bytes, cache.pieces.values().map(inline_len).sum::<usize>());
                for (from, to) in cache.known.clone() {
                    let mut seen = vec![0; (to - from) as usize];
                    for piece in cache.pieces(from, to) {
                        let Content::Inline(bytes) = &piece.content else { unreachable!("only inline pieces") };
                        seen[(piece.off - from) as usize..][..bytes.len()].copy_from_slice(bytes);
                    }
                    prop_assert_eq!(&seen[..], &owner[from as usize..to as usize]);
                }
            }
        }
    }
}
