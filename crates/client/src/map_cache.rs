//! The part of a file's map that a client knows, valid under its lease.

use std::collections::BTreeMap;

use wire::meta::MapPiece;

/// Pieces by offset, complete inside one known range.
#[derive(Debug, Default)]
pub(crate) struct MapCache {
    known: std::ops::Range<u64>,
    pieces: BTreeMap<u64, MapPiece>,
    /// Counts changes, so that an answer that was asked for before a change is not taken for current.
    generation: u64,
}

/// Most pieces remembered per file; more are asked for again.
const PIECES_MAX: usize = 16_384;

impl MapCache {
    /// Whether everything about `[from, to)` is known.
    #[cfg(test)]
    fn covers(&self, from: u64, to: u64) -> bool {
        self.known.start <= from && to <= self.known.end
    }

    /// Up to where the map is known from `off` on; `off` itself if it is not.
    pub(crate) fn known_end(&self, off: u64) -> u64 {
        if self.known.contains(&off) { self.known.end } else { off }
    }

    /// To be given to [`MapCache::learn`] with the answer.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Refuses answers that are on their way.
    pub(crate) fn outdate(&mut self) {
        self.generation += 1;
    }

    /// Takes an answer that is complete for `[from, to)`. Refuses it if the map changed meanwhile.
    pub(crate) fn learn(&mut self, generation: u64, from: u64, to: u64, pieces: Vec<MapPiece>) -> bool {
        if generation != self.generation {
            return false;
        }
        let adjacent = self.known.start <= to && from <= self.known.end;
        if !adjacent || self.pieces.len() + pieces.len() > PIECES_MAX {
            self.pieces.clear();
            self.known = from..to;
        } else {
            self.known = self.known.start.min(from)..self.known.end.max(to);
        }
        self.pieces.extend(pieces.into_iter().map(|piece| (piece.off, piece)));
        true
    }

    /// A file known to be without any piece.
    pub(crate) fn learn_empty(&mut self) {
        self.generation += 1;
        self.pieces.clear();
        self.known = 0..u64::MAX;
    }

    /// Puts a committed piece in place of what was there.
    pub(crate) fn replace(&mut self, piece: &MapPiece) {
        self.remove(piece.off, piece.end());
        if self.pieces.len() >= PIECES_MAX {
            self.forget();
        } else if self.known.start <= piece.end() && piece.off <= self.known.end {
            // A piece that is only partly in the known range makes the rest of itself known.
            self.known = self.known.start.min(piece.off)..self.known.end.max(piece.end());
            self.pieces.insert(piece.off, piece.clone());
        }
    }

    /// `[from, to)` is a hole now.
    pub(crate) fn remove(&mut self, from: u64, to: u64) {
        self.generation += 1;
        let first = self.pieces.range(..from).next_back().map_or(from, |(off, _)| *off);
        let touched: Vec<u64> = self.pieces.range(first..to).map(|(off, _)| *off).collect();
        for off in touched {
            let piece = self.pieces.remove(&off).expect("it was just found");
            for part in [piece.clip(0, from), piece.clip(to, u64::MAX)].into_iter().flatten() {
                self.pieces.insert(part.off, part);
            }
        }
    }

    /// Forgets everything.
    pub(crate) fn forget(&mut self) {
        self.generation += 1;
        self.pieces.clear();
        self.known = 0..0;
    }

    /// The pieces in `[from, to)`, cut to it.
    pub(crate) fn pieces(&self, from: u64, to: u64) -> Vec<MapPiece> {
        let first = self.pieces.range(..from).next_back().map_or(from, |(off, _)| *off);
        self.pieces.range(first..to).filter_map(|(_, piece)| piece.clip(from, to)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use wire::meta::Content;

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
    fn commits_and_holes_cut_what_was_there() {
        let mut cache = MapCache::default();
        cache.learn_empty();
        cache.replace(&piece(0, "aaaaaaaa"));
        cache.replace(&piece(2, "bb"));
        cache.remove(5, 7);
        assert_eq!(text(&cache, 0, 10), "aabba..a..");
        assert_eq!(text(&cache, 3, 6), "ba.");
    }

    #[test]
    fn a_commit_that_reaches_over_the_known_range_is_known() {
        for (off, known, expected) in [
            (7, 7..20, ".......bbbbaaaaaaaaa....."),
            (10, 10..20, "..........bbbbaaaaaa....."),
            (16, 10..20, "..........aaaaaabbbb....."),
            (18, 10..22, "..........aaaaaaaabbbb..."),
            (20, 10..24, "..........aaaaaaaaaabbbb."),
            (5, 10..20, "..........aaaaaaaaaa....."),
            (21, 10..20, "..........aaaaaaaaaa....."),
        ] {
            let mut cache = MapCache::default();
            cache.learn(cache.generation(), 10, 20, vec![piece(10, "aaaaaaaaaa")]);
            cache.replace(&piece(off, "bbbb"));
            assert_eq!(text(&cache, 0, 25), expected, "off={off}");
            assert_eq!(cache.known, known, "off={off}");
        }
    }

    #[test]
    fn an_answer_that_holds_a_committed_piece_again_does_not_double_it() {
        let mut cache = MapCache::default();
        assert!(cache.learn(cache.generation(), 4, 100, vec![piece(4, "aaaa")]));
        cache.replace(&piece(0, "bbbbbbbb"));
        assert!(cache.learn(cache.generation(), 0, 100, vec![piece(0, "bbbbbbbb")]));
        assert_eq!(cache.pieces(0, 100), [piece(0, "bbbbbbbb")]);
    }

    #[test]
    fn an_answer_from_before_a_change_is_refused() {
        let mut cache = MapCache::default();
        let generation = cache.generation();
        cache.remove(0, 10);
        assert!(!cache.learn(generation, 0, 100, vec![piece(0, "old")]));
        assert!(!cache.covers(0, 1));
        assert!(cache.learn(cache.generation(), 0, 100, vec![piece(0, "new")]));
        assert_eq!(text(&cache, 0, 4), "new.");
        assert!(cache.covers(10, 100) && !cache.covers(10, 101));
    }
}
