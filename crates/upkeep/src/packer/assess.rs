//! Decides which pieces move, and with which others.

use base::ExtentId;
use base::checksum::crc32c;
use base::units::BLOCK_BYTES;
use client::{MapEntry, PACK_ALIGN, PackTarget};
use layout::{packed_table_bytes, shard_len};
use wire::meta::{Content, PACK_MOVES_MAX};

/// Shorter inline content costs less in the metadata than on drives.
const INLINE_BYTES_MIN: u64 = 1024;
/// The sixteenths of an extent that must be alive; otherwise it is rewritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Density(u64);

impl Density {
    /// For times of change: more of a partly dead extent will die soon.
    pub(super) const HALF: Self = Self(8);
    /// For times without change, if too much space is wasted.
    pub(super) const FULL: Self = Self(15);

    fn is_reached(self, live_bytes: u64, extent_len: u64) -> bool {
        live_bytes * 16 >= extent_len * self.0
    }
}

/// Whether a piece moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It stays.
    Stay,
    /// It moves with enough others, once it has been seen unchanged for a while.
    WhenOld,
    /// It moves with enough others.
    Move,
    /// It moves even alone, because it is not protected as it should be.
    MoveAlone,
    /// It moves even alone, together with all pieces that share its bytes.
    MoveShared,
}

pub(super) fn assess(entry: &MapEntry, target: &PackTarget, density: Density) -> Verdict {
    let extent = match &entry.piece.content {
        Content::Inline(_) if entry.piece.len < INLINE_BYTES_MIN => return Verdict::Stay,
        Content::Inline(_) => return Verdict::WhenOld,
        Content::Extent(extent) => extent,
        // Bringing it back only to pack it would cost more than it gains.
        Content::Tiered(..) => return Verdict::Stay,
    };
    let extent_len = u64::from(extent.extent_len);
    let live_bytes = entry.live_bytes.unwrap_or(extent_len);
    // Clones share it: moved one by one, each would get a copy of its own.
    let shared = live_bytes > extent_len;
    let small = extent.k == 1 && extent.extent_len <= target.copies_bytes;
    let profile = target.profile;
    let right =
        if small { extent.n == profile.m() + 1 } else { (extent.k, extent.n) == (profile.k(), profile.n()) };
    match () {
        () if !right && !target.narrowed && shared => Verdict::MoveShared,
        () if !right && !target.narrowed => Verdict::MoveAlone,
        () if shared => Verdict::Stay,
        // It would have to be uploaded again, and it leaves the drives anyway.
        () if small && entry.in_store => Verdict::Stay,
        () if small => Verdict::WhenOld,
        () if !density.is_reached(live_bytes, extent_len) => Verdict::Move,
        () => Verdict::Stay,
    }
}

/// Identifies the content of a piece from one sweep to the next.
pub(super) fn fingerprint(entry: &MapEntry) -> u64 {
    match &entry.piece.content {
        Content::Inline(bytes) => u64::from(crc32c(bytes)) << 32 | entry.piece.len,
        Content::Extent(extent) | Content::Tiered(extent, _) => {
            let ExtentId(id) = extent.id;
            id ^ u64::from(extent.extent_off).rotate_left(40)
        }
    }
}

/// The space of a piece's extent on all drives, divided among its live bytes.
pub(super) fn share_bytes(entry: &MapEntry) -> u64 {
    let Content::Extent(extent) = &entry.piece.content else { return 0 };
    let whole = u128::from(shard_len(extent.extent_len, extent.k)) * u128::from(extent.n);
    let live_bytes = entry.live_bytes.unwrap_or(extent.extent_len.into()).max(1);
    (whole * u128::from(entry.piece.len) / u128::from(live_bytes)) as u64
}

/// Pieces that go into the next extent.
#[derive(Default)]
pub(super) struct Load {
    pub(super) entries: Vec<MapEntry>,
    pub(super) bytes: u64,
    /// The pieces' share of the space of their present extents.
    pub(super) share_bytes: u64,
    /// Whether a piece must move even if there are few.
    urgent: bool,
    /// Whether they are not one run of a map's bytes; the extent then has a table of its pieces.
    scattered: bool,
}

impl Load {
    pub(super) fn takes(&self, entry: &MapEntry, target: &PackTarget) -> bool {
        let table = if self.continues(entry) { 0 } else { packed_table_bytes(self.entries.len() + 1) };
        let bytes = self.bytes + entry.piece.len.next_multiple_of(PACK_ALIGN) + table as u64;
        self.entries.len() < PACK_MOVES_MAX && bytes <= u64::from(target.extent_bytes)
    }

    /// Whether the pieces are one run of a map's bytes, also with this one.
    fn continues(&self, entry: &MapEntry) -> bool {
        let follows = |last: &MapEntry| {
            let whole = last.piece.len.is_multiple_of(BLOCK_BYTES);
            whole && (last.map, last.piece.end()) == (entry.map, entry.piece.off)
        };
        !self.scattered && self.entries.last().is_none_or(follows)
    }

    pub(super) fn put(&mut self, entry: MapEntry, verdict: Verdict) {
        self.scattered |= !self.continues(&entry);
        self.bytes += entry.piece.len.next_multiple_of(PACK_ALIGN);
        self.share_bytes += share_bytes(&entry);
        self.urgent |= verdict == Verdict::MoveAlone;
        self.entries.push(entry);
    }

    /// Whether packing these pieces saves space on the drives.
    pub(super) fn saves(&self, target: &PackTarget) -> bool {
        let bytes = self.bytes.min(u64::from(target.extent_bytes)) as u32;
        let (k, n) = if bytes > target.copies_bytes {
            (target.profile.k(), target.profile.n())
        } else {
            (1, target.profile.m() + 1)
        };
        u64::from(shard_len(bytes, k)) * u64::from(n) < self.share_bytes
    }

    /// Whether they are worth an extent that is not full.
    pub(super) fn pays(&self, target: &PackTarget, least_bytes: Option<u64>) -> bool {
        let quarter = u64::from(target.extent_bytes) / 4;
        self.urgent || self.bytes > least_bytes.unwrap_or(quarter.max(u64::from(target.copies_bytes)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use base::{MapId, PgId};
    use bytes::Bytes;
    use layout::extent_bytes_max;
    use wire::meta::{ExtentRef, MapPiece};

    fn target(profile: &str) -> PackTarget {
        let profile = profile.parse().unwrap();
        let extent_bytes = extent_bytes_max(profile);
        PackTarget { profile, narrowed: false, extent_bytes, copies_bytes: 256 << 10 }
    }

    /// A piece of an extent of `k` of `n` shards and `extent_len` bytes, with `live` live bytes.
    fn extent(k: u8, n: u8, extent_len: u32, live: Option<u64>) -> MapEntry {
        let extent = ExtentRef { id: ExtentId(7), pg: PgId(0), k, n, extent_len, extent_off: 0 };
        let len = live.unwrap_or(extent_len.into()).min(extent_len.into());
        let piece = MapPiece { off: 0, len, content: Content::Extent(extent) };
        MapEntry { map: MapId(1), piece, live_bytes: live, in_store: false }
    }

    fn inline(len: usize) -> MapEntry {
        let content = Content::Inline(Bytes::from(vec![1; len]));
        MapEntry {
            map: MapId(1),
            piece: MapPiece { off: 0, len: len as u64, content },
            live_bytes: None,
            in_store: false,
        }
    }

    #[test]
    fn fragments_move_and_full_extents_stay() {
        let mib = 1 << 20;
        let cases = [
            (inline(100), Verdict::Stay),
            (inline(4096), Verdict::WhenOld),
            (extent(1, 3, 9000, None), Verdict::WhenOld),
            (extent(4, 6, 4 * mib, None), Verdict::Stay),
            (extent(4, 6, 4 * mib, Some(3 << 20)), Verdict::Stay),
            (extent(4, 6, 4 * mib, Some(1 << 20)), Verdict::Move),
            // Two clones of a whole extent, and of half of one.
            (extent(4, 6, 4 * mib, Some(8 << 20)), Verdict::Stay),
            (extent(1, 3, 9000, Some(18_000)), Verdict::Stay),
            // The same extents, narrow or with fewer copies.
            (extent(2, 4, 2 * mib, Some(4 << 20)), Verdict::MoveShared),
            (extent(1, 2, 9000, Some(18_000)), Verdict::MoveShared),
            // Narrow, of another profile, with fewer copies.
            (extent(2, 4, 2 * mib, None), Verdict::MoveAlone),
            (extent(1, 2, mib, None), Verdict::MoveAlone),
            (extent(1, 1, 9000, None), Verdict::MoveAlone),
        ];
        for (entry, expected) in cases {
            assert_eq!(assess(&entry, &target("4+2"), Density::HALF), expected, "{entry:?}");
        }
    }

    #[test]
    fn a_small_piece_that_a_blob_has_moves_only_if_it_is_not_protected_as_it_should_be() {
        let judged = |entry| assess(&MapEntry { in_store: true, ..entry }, &target("4+2"), Density::FULL);
        assert_eq!(judged(extent(1, 3, 9000, None)), Verdict::Stay);
        assert_eq!(judged(extent(4, 6, 4 << 20, None)), Verdict::Stay);
        // Bytes that are dead on the drives are dead in the blob, too.
        assert_eq!(judged(extent(4, 6, 4 << 20, Some(1 << 20))), Verdict::Move);
        assert_eq!(judged(extent(1, 2, 9000, None)), Verdict::MoveAlone);
    }

    #[test]
    fn no_piece_is_made_narrow_while_drives_are_missing() {
        let narrowed = PackTarget { narrowed: true, ..target("2+2") };
        assert_eq!(assess(&extent(4, 6, 4 << 20, None), &narrowed, Density::HALF), Verdict::Stay);
        assert_eq!(assess(&extent(1, 3, 9000, None), &narrowed, Density::HALF), Verdict::WhenOld);
    }

    #[test]
    fn a_nearly_full_extent_moves_only_at_full_density() {
        let of_sixteen = |live: u64| extent(4, 6, 4 << 20, Some(live << 18));
        let verdict = |live, density| assess(&of_sixteen(live), &target("4+2"), density);
        assert_eq!(verdict(7, Density::HALF), Verdict::Move);
        assert_eq!(verdict(8, Density::HALF), Verdict::Stay);
        assert_eq!(verdict(14, Density::FULL), Verdict::Move);
        assert_eq!(verdict(15, Density::FULL), Verdict::Stay);
        let clones = extent(4, 6, 4 << 20, Some(8 << 20));
        assert_eq!(assess(&clones, &target("4+2"), Density::FULL), Verdict::Stay);
    }

    #[test]
    fn the_space_of_an_extent_is_divided_among_its_live_bytes() {
        let mib = 1 << 20;
        assert_eq!(share_bytes(&inline(5000)), 0);
        assert_eq!(share_bytes(&extent(1, 3, 9000, None)), 3 * 12_288);
        assert_eq!(share_bytes(&extent(4, 6, 4 * mib, None)), 6 << 20);
        assert_eq!(share_bytes(&extent(4, 6, 4 * mib, Some(1 << 20))), 6 << 20);
        // Two clones of the whole extent: half for each.
        assert_eq!(share_bytes(&extent(4, 6, 4 * mib, Some(8 << 20))), 3 << 20);
    }

    #[test]
    fn a_load_that_saves_space_is_told_from_one_that_takes_some() {
        let loads = [
            (extent(1, 3, 200_000, None), "4+2", 5, true),
            (extent(2, 4, 2 << 20, None), "4+2", 2, true),
            (extent(1, 2, 1 << 20, None), "r3", 1, false),
            (inline(4096), "4+2", 200, false),
        ];
        for (entry, profile, count, saves) in loads {
            let mut load = Load::default();
            (0..count).for_each(|_| load.put(entry.clone(), Verdict::Move));
            assert_eq!(load.saves(&target(profile)), saves, "{entry:?}");
        }
    }

    #[test]
    fn a_load_fits_an_extent_and_few_bytes_are_not_worth_one() {
        let target = target("4+2");
        let mut load = Load::default();
        while load.takes(&extent(1, 3, 1_000_000, None), &target) {
            assert_eq!(load.pays(&target, None), load.bytes > 1 << 20);
            load.put(extent(1, 3, 1_000_000, None), Verdict::Move);
        }
        assert_eq!(load.entries.len(), 4);
        // Four pieces of a quarter leave no room for the table, unless they are one run.
        for (step, count) in [(1 << 20, 4), (2 << 20, 3)] {
            let mut load = Load::default();
            let quarter = |index: u64| {
                let mut entry = extent(1, 3, 1 << 20, None);
                entry.piece.off = index * step;
                entry
            };
            while let Some(next) =
                Some(quarter(load.entries.len() as u64)).filter(|next| load.takes(next, &target))
            {
                load.put(next, Verdict::Move);
            }
            assert_eq!(load.entries.len(), count);
        }
        let mut whole = Load::default();
        assert!(whole.takes(&extent(4, 5, 4 << 20, None), &target));
        whole.put(extent(1, 1, 5, None), Verdict::MoveAlone);
        assert!(whole.pays(&target, None), "an unprotected piece moves even alone");
        let mut many = Load::default();
        (0..PACK_MOVES_MAX).for_each(|_| many.put(inline(1024), Verdict::Move));
        assert!(!many.takes(&inline(1024), &target));
    }
}
