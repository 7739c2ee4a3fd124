//! Content: maps, truncation, holes, shared extents, and extents that become free.

use std::collections::BTreeSet;

use base::{DriveId, ShardIndex};
use wire::meta::{FreeExtent, INLINE_BYTES_MAX, OwedEntry, OwedShard, SetAttr};

use super::audit::audit;
use super::*;

use FileKind::Regular;

struct Files {
    ledger: Ledger,
    me: SessionId,
    one: Ino,
    two: Ino,
    /// The first extent id that may be committed.
    id: u64,
}

fn files() -> Files {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    let one = ledger.make(me, Ino::ROOT, "one", Regular);
    let two = ledger.make(me, Ino::ROOT, "two", Regular);
    let id = ledger.extents(me);
    Files { ledger, me, one, two, id }
}

impl Files {
    fn write(&mut self, ino: Ino, pieces: &[MapPiece]) {
        self.ledger.write(self.me, ino, pieces).unwrap();
    }

    fn truncate(&mut self, ino: Ino, size: u64) -> Attr {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        self.ledger.attr(self.me, MetaRequest::SetAttr { ino, set })
    }

    fn punch(&mut self, ino: Ino, off: u64, len: u64) {
        let reply = self.ledger.ask(self.me, MetaRequest::Punch { ino, off, len });
        assert!(
            matches!(reply, Ok(MetaReply::Punched { next_off, .. }) if next_off == off + len),
            "{reply:?}"
        );
    }

    fn clone_range(&mut self, from: (Ino, u64), to: (Ino, u64), len: u64) {
        let request = MetaRequest::CloneRange { from: from.0, from_off: from.1, to: to.0, to_off: to.1, len };
        self.ledger.attr(self.me, request);
    }

    /// Checks the map of a file, the extents that are free once everything is durable, and the audit.
    #[track_caller]
    fn check(&mut self, ino: Ino, map: &[MapPiece], free: &[u64], issued: &[u64]) {
        self.ledger.store();
        let me = self.me;
        assert_eq!(self.ledger.map(me, ino), map);
        self.ledger.beat(me);
        let mut found = self.ledger.free(me);
        found.sort_unstable();
        assert_eq!(found, free);
        audit(&self.ledger.dump(), &issued.iter().copied().collect::<BTreeSet<_>>());
    }
}

#[test]
fn a_page_of_a_map_has_about_a_mebibyte_of_inline_bytes() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    let ino = ledger.make(me, Ino::ROOT, "file", Regular);
    let text = "x".repeat(wire::meta::INLINE_BYTES_MAX);
    let pieces: Vec<MapPiece> = (0..300).map(|at| inline(at * text.len() as u64, &text)).collect();
    ledger.write(me, ino, &pieces).unwrap();
    let mut off = 0;
    for page in 0.. {
        let Ok(MetaReply::Map { pieces, end }) =
            ledger.ask(me, MetaRequest::GetMap { ino, off, limit: 8192 })
        else {
            panic!("a map is answered")
        };
        assert!(pieces.len() <= 129, "{}", pieces.len());
        off = pieces.last().unwrap().end();
        if end {
            assert_eq!((page, off), (2, 300 * text.len() as u64));
            return;
        }
    }
}

#[test]
fn an_overwritten_extent_is_free_and_a_partly_overwritten_one_is_not() {
    let mut f = files();
    let (one, id) = (f.one, f.id);
    f.write(one, &[piece(0, 1000, id, 0, 1000)]);
    f.check(one, &[piece(0, 1000, id, 0, 1000)], &[], &[id]);
    f.write(one, &[piece(200, 300, id + 1, 0, 300)]);
    let cut = [piece(0, 200, id, 0, 1000), piece(200, 300, id + 1, 0, 300), piece(500, 500, id, 500, 1000)];
    f.check(one, &cut, &[], &[id, id + 1]);
    f.write(one, &[piece(500, 500, id + 2, 0, 500)]);
    f.write(one, &[inline(0, &"x".repeat(200))]);
    let map = [inline(0, &"x".repeat(200)), piece(200, 300, id + 1, 0, 300), piece(500, 500, id + 2, 0, 500)];
    f.check(one, &map, &[id], &[id, id + 1, id + 2]);
}

#[test]
fn pieces_of_one_commit_may_share_an_extent() {
    let mut f = files();
    let (one, id) = (f.one, f.id);
    let pieces = [piece(0, 10, id, 0, 100), piece(50, 10, id, 10, 100), piece(90, 80, id, 20, 100)];
    f.write(one, &pieces);
    f.check(one, &pieces, &[], &[id]);
    f.punch(one, 0, 60);
    f.check(one, &pieces[2..], &[], &[id]);
    f.punch(one, 90, 80);
    f.check(one, &[], &[id], &[id]);
}

#[test]
fn pieces_of_one_commit_may_not_overlap() {
    let mut f = files();
    let (one, id, me) = (f.one, f.id, f.me);
    let lease = f.ledger.write_lease(me, one);
    for pieces in [
        [piece(0, 10, id, 0, 100), piece(0, 20, id, 10, 100)],
        [piece(5, 10, id, 0, 100), inline(0, "abcdef")],
        [inline(9, "a"), piece(0, 10, id, 0, 100)],
    ] {
        let pieces = pieces.map(|piece| CommitPiece { piece, owed: Vec::new(), placed: Epoch(0) }).to_vec();
        let commit =
            MetaRequest::Commit { ino: one, lease, pieces, size: 20, mtime_ns: 1, set: SetAttr::default() };
        f.ledger.refuses(me, commit, FsError::Invalid);
    }
}

#[test]
fn truncation_cuts_the_last_piece_and_frees_what_is_behind() {
    let mut f = files();
    let (one, id) = (f.one, f.id);
    f.write(one, &[piece(0, 100, id, 0, 100), piece(100, 100, id + 1, 0, 100), inline(300, "tail")]);
    let attr = f.truncate(one, 150);
    assert_eq!((attr.size, attr.stored_bytes), (150, 150));
    f.check(one, &[piece(0, 100, id, 0, 100), piece(100, 50, id + 1, 0, 100)], &[], &[id, id + 1]);
    let attr = f.truncate(one, 1000);
    assert_eq!((attr.size, attr.stored_bytes), (1000, 150));
    f.truncate(one, 100);
    f.check(one, &[piece(0, 100, id, 0, 100)], &[id + 1], &[id, id + 1]);
    let attr = f.truncate(one, 0);
    assert_eq!((attr.size, attr.stored_bytes), (0, 0));
    let me = f.me;
    f.ledger.purge(me);
    f.check(one, &[], &[id, id + 1], &[id, id + 1]);
}

#[test]
fn a_hole_keeps_the_size_and_both_ends() {
    let mut f = files();
    let (one, id) = (f.one, f.id);
    f.write(one, &[piece(0, 100, id, 0, 100), inline(100, "abcdefgh")]);
    f.punch(one, 90, 14);
    assert_eq!(f.ledger.stat(f.me, one).size, 108);
    f.check(one, &[piece(0, 90, id, 0, 100), inline(104, "efgh")], &[], &[id]);
    f.punch(one, 0, 1 << 40);
    f.check(one, &[], &[id], &[id]);
}

#[test]
fn a_clone_shares_extents_until_the_last_reference_is_gone() {
    let mut f = files();
    let (one, two, id) = (f.one, f.two, f.id);
    f.write(one, &[piece(0, 100, id, 0, 100), inline(100, "abcd")]);
    f.write(two, &[piece(0, 50, id + 1, 0, 50)]);
    f.clone_range((one, 20), (two, 10), 84);
    let map = [piece(0, 10, id + 1, 0, 50), piece(10, 80, id, 20, 100), inline(90, "abcd")];
    f.check(two, &map, &[], &[id, id + 1]);
    f.truncate(one, 0);
    let me = f.me;
    f.ledger.purge(me);
    f.check(two, &map, &[], &[id, id + 1]);
    f.punch(two, 0, 94);
    f.check(two, &[], &[id, id + 1], &[id, id + 1]);
}

#[test]
fn a_clone_onto_the_same_file_keeps_what_it_copies_from() {
    let mut f = files();
    let (one, id) = (f.one, f.id);
    f.write(one, &[piece(0, 100, id, 0, 100)]);
    f.clone_range((one, 0), (one, 200), 100);
    f.clone_range((one, 0), (one, 50), 100);
    let map = [piece(0, 50, id, 0, 100), piece(50, 100, id, 0, 100), piece(200, 100, id, 0, 100)];
    f.check(one, &map, &[], &[id]);
}

#[test]
fn a_commit_needs_a_lease_its_own_extents_and_sound_pieces() {
    let mut f = files();
    let (one, id, me) = (f.one, f.id, f.me);
    let other = f.ledger.session();
    let foreign = f.ledger.extents(other);
    let lease = f.ledger.write_lease(me, one);
    let commit = |lease, piece| MetaRequest::Commit {
        ino: one,
        lease,
        pieces: vec![CommitPiece { piece, owed: Vec::new(), placed: Epoch(0) }],
        size: 10,
        mtime_ns: 1,
        set: SetAttr::default(),
    };
    let shaped = |k, n| {
        let extent = ExtentRef { id: ExtentId(id), pg: PgId(0), k, n, extent_len: 10, extent_off: 0 };
        MapPiece { off: 0, len: 10, content: Content::Extent(extent) }
    };
    for (bad, error) in [
        (inline(0, ""), FsError::TooLarge),
        (inline(0, &"x".repeat(INLINE_BYTES_MAX + 1)), FsError::Invalid),
        (MapPiece { len: 3, ..inline(0, "ab") }, FsError::Invalid),
        (inline((1 << 60) - 1, "ab"), FsError::TooLarge),
        (inline(u64::MAX, "ab"), FsError::TooLarge),
        (piece(0, 10, id, 1, 10), FsError::Invalid),
        (piece(0, 17 << 20, id, 0, 17 << 20), FsError::Invalid),
        (piece(0, 10, foreign, 0, 10), FsError::Invalid),
        (piece(0, 10, id + (1 << 16), 0, 10), FsError::Invalid),
        (shaped(0, 2), FsError::Invalid),
        (shaped(4, 3), FsError::Invalid),
        (shaped(4, 21), FsError::Invalid),
    ] {
        f.ledger.refuses(me, commit(lease, bad), error);
    }
    f.ledger.refuses(me, commit(LeaseId(999), inline(0, "a")), FsError::StaleLease);
    f.ledger.refuses(other, commit(lease, inline(0, "a")), FsError::StaleLease);
    f.ledger.ask(me, commit(lease, piece(0, 10, id, 0, 10))).unwrap();
    // A read by another session has downgraded the lease.
    f.ledger.ask(other, MetaRequest::Acquire { ino: one, kind: LeaseKind::Read }).unwrap();
    f.ledger.refuses(me, commit(lease, inline(0, "a")), FsError::StaleLease);
}

#[test]
fn a_commit_makes_the_file_reach_over_its_pieces() {
    let mut f = files();
    let (one, me) = (f.one, f.me);
    let lease = f.ledger.write_lease(me, one);
    let pieces = vec![CommitPiece { piece: inline(10, "abcd"), owed: Vec::new(), placed: Epoch(0) }];
    let attr = f.ledger.attr(
        me,
        MetaRequest::Commit { ino: one, lease, pieces, size: 0, mtime_ns: 1, set: SetAttr::default() },
    );
    assert_eq!(attr.size, 14);
    f.check(one, &[inline(10, "abcd")], &[], &[]);
}

#[test]
fn ranges_beyond_the_largest_file_are_refused() {
    let mut f = files();
    let (one, two, me) = (f.one, f.two, f.me);
    let dir = Ino::ROOT;
    let set = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    let clone = |from_off, to_off, len| MetaRequest::CloneRange { from: one, from_off, to: two, to_off, len };
    for (request, error) in [
        (MetaRequest::SetAttr { ino: one, set: set((1 << 60) + 1) }, FsError::TooLarge),
        (MetaRequest::SetAttr { ino: dir, set: set(0) }, FsError::IsDirectory),
        (MetaRequest::Punch { ino: one, off: 1 << 60, len: 1 }, FsError::TooLarge),
        (MetaRequest::Punch { ino: one, off: u64::MAX, len: 2 }, FsError::TooLarge),
        (MetaRequest::Punch { ino: dir, off: 0, len: 1 }, FsError::IsDirectory),
        (MetaRequest::GetMap { ino: dir, off: 0, limit: 1 }, FsError::IsDirectory),
        (clone(0, 0, 1), FsError::Invalid),
        (clone(u64::MAX, 0, 2), FsError::TooLarge),
        (clone(0, u64::MAX, 2), FsError::TooLarge),
    ] {
        f.ledger.refuses(me, request, error);
    }
    f.truncate(one, 1 << 60);
    f.check(one, &[], &[], &[]);
}

#[test]
fn a_commit_records_the_shards_that_it_went_ahead_without() {
    let mut f = files();
    let (one, id, me) = (f.one, f.id, f.me);
    let lease = f.ledger.write_lease(me, one);
    let owed = vec![OwedShard { shard: ShardIndex(5), drive: DriveId(3) }];
    let pieces = vec![CommitPiece { piece: piece(0, 10, id, 0, 10), owed, placed: Epoch(0) }];
    f.ledger.attr(
        me,
        MetaRequest::Commit { ino: one, lease, pieces, size: 10, mtime_ns: 1, set: SetAttr::default() },
    );
    let key = Keys::new(LEDGER).owed(DriveId(3), ExtentId(id));
    let place: crate::values::ExtentPlace = f.ledger.core.store.begin().get(&key).unwrap().unwrap();
    assert_eq!((place.pg, place.n, place.k, place.shard, place.extent_len), (PgId(0), 6, 4, 5, 10));
}

#[test]
fn what_an_older_epoch_of_its_group_placed_is_not_committed_also_by_the_next_owner() {
    let mut f = files();
    let (one, id, me) = (f.one, f.id, f.me);
    let lease = f.ledger.write_lease(me, one);
    let commit = |id, placed| MetaRequest::Commit {
        ino: one,
        lease,
        pieces: vec![CommitPiece { piece: piece(0, 10, id, 0, 10), owed: Vec::new(), placed: Epoch(placed) }],
        size: 10,
        mtime_ns: 1,
        set: SetAttr::default(),
    };
    f.ledger.attr(me, commit(id, 2));
    let advance = |group, epoch| MetaRequest::AdvanceGroups { groups: vec![(PgId(group), Epoch(epoch))] };
    f.ledger.ask(me, advance(0, 5)).unwrap();
    // An older map that comes late changes nothing, and other groups are on their own.
    f.ledger.ask(me, advance(0, 4)).unwrap();
    f.ledger.ask(me, advance(1, 9)).unwrap();
    let before = f.ledger.dump();
    f.ledger.refuses(me, commit(id + 1, 4), FsError::StaleMap);
    assert_eq!(f.ledger.dump(), before);
    f.ledger.attr(me, commit(id + 1, 5));
    f.ledger.commit();
    let mut next = f.ledger.restart();
    let me = next.session();
    let (ino, id) = (next.make(me, Ino::ROOT, "more", Regular), next.extents(me));
    let lease = next.write_lease(me, ino);
    let commit = |placed| MetaRequest::Commit {
        ino,
        lease,
        pieces: vec![CommitPiece { piece: piece(0, 10, id, 0, 10), owed: Vec::new(), placed: Epoch(placed) }],
        size: 10,
        mtime_ns: 1,
        set: SetAttr::default(),
    };
    next.refuses(me, commit(4), FsError::StaleMap);
    next.attr(me, commit(5));
}

#[test]
fn an_answer_to_new_groups_waits_until_they_are_durable_whoever_asked_first() {
    let mut f = files();
    let other = f.ledger.session();
    f.ledger.commit();
    let request = MetaRequest::AdvanceGroups { groups: vec![(PgId(0), Epoch(5))] };
    let mut after = |session| {
        let id = f.ledger.next_id(session);
        match f.ledger.core.execute(id, Terms::default(), &request, f.ledger.now) {
            Executed::Reply { reply: Ok(MetaReply::Done), after, .. } => after,
            executed => panic!("{executed:?}"),
        }
    };
    let first = after(f.me);
    assert!(first.0 > 0);
    assert_eq!(after(other), first);
}

#[test]
fn a_repaired_shard_is_owed_no_more_and_one_of_a_freed_extent_is_named() {
    let mut f = files();
    let (one, id, me) = (f.one, f.id, f.me);
    let lease = f.ledger.write_lease(me, one);
    let commit = |off: u64, id, drives: &[u32]| {
        let owed = drives.iter().map(|drive| OwedShard { shard: ShardIndex(5), drive: DriveId(*drive) });
        CommitPiece { piece: piece(off, 10, id, 0, 10), owed: owed.collect(), placed: Epoch(0) }
    };
    let pieces = vec![commit(0, id, &[3, 7]), commit(10, id + 1, &[3])];
    let set = SetAttr::default();
    f.ledger.attr(me, MetaRequest::Commit { ino: one, lease, pieces, size: 20, mtime_ns: 1, set });
    let owed = |f: &mut Files, after, limit| match f.ledger.ask(me, MetaRequest::Owed { after, limit }) {
        Ok(MetaReply::Owed(owed)) => owed,
        reply => panic!("{reply:?}"),
    };
    let entry = |drive, id| OwedEntry {
        drive: DriveId(drive),
        id: ExtentId(id),
        pg: PgId(0),
        shard: ShardIndex(5),
        k: 4,
        n: 6,
        extent_len: 10,
    };
    assert_eq!(owed(&mut f, None, 2), [entry(3, id), entry(3, id + 1)]);
    assert_eq!(owed(&mut f, Some((DriveId(3), ExtentId(id + 1))), 2), [entry(7, id)]);
    // The extent is deleted while a session repairs it.
    let free = FreeExtent { free_ver: 1, id: ExtentId(id), pg: PgId(0), n: 6 };
    f.ledger
        .ask(me, MetaRequest::Freed { extents: vec![free], drives: vec![DriveId(3), DriveId(7)] })
        .unwrap();
    let shards = vec![(DriveId(3), ExtentId(id)), (DriveId(3), ExtentId(id + 1))];
    let reply = f.ledger.ask(me, MetaRequest::Repaired { shards });
    assert_eq!(reply, Ok(MetaReply::NotOwed(vec![(DriveId(3), ExtentId(id))])));
    assert_eq!(owed(&mut f, None, 9), []);
}

#[test]
fn what_a_running_read_uses_is_not_given_out_as_free() {
    let mut f = files();
    let (one, id, me) = (f.one, f.id, f.me);
    f.write(one, &[piece(0, 10, id, 0, 10)]);
    f.ledger.commit();
    let reader = f.ledger.session();
    let in_use_ver = f.ledger.core.committed.0;
    f.write(one, &[piece(0, 10, id + 1, 0, 10)]);
    f.ledger.beat(me);
    for session in [me, reader] {
        f.ledger.ask(session, MetaRequest::Heartbeat { in_use_ver: u64::MAX }).unwrap();
    }
    assert_eq!(f.ledger.next_free(me), (Vec::new(), true), "its batch is not durable");
    f.ledger.ask(reader, MetaRequest::Heartbeat { in_use_ver }).unwrap();
    f.ledger.commit();
    f.ledger.beat(me);
    assert_eq!(f.ledger.next_free(me), (Vec::new(), true), "a reader may use it");
    f.ledger.beat(reader);
    f.ledger.beat(me);
    let (extents, withheld) = f.ledger.next_free(me);
    assert_eq!((extents[0].id, extents.len(), withheld), (ExtentId(id), 1, false));
    f.ledger.ask(me, MetaRequest::Freed { extents, drives: Vec::new() }).unwrap();
    f.check(one, &[piece(0, 10, id + 1, 0, 10)], &[], &[id + 1]);
}

#[test]
fn a_file_of_very_many_pieces_is_cut_in_steps() {
    const PIECES: u64 = 50_000;
    let mut f = files();
    let (one, me) = (f.one, f.me);
    for first in (0..PIECES).step_by(5_000) {
        let pieces: Vec<MapPiece> = (first..first + 5_000).map(|at| inline(at * 10, "x")).collect();
        f.write(one, &pieces);
    }
    f.ledger.store();
    let mut steps = 0;
    loop {
        let attr = f.truncate(one, 5);
        steps += 1;
        let left = attr.size.div_ceil(10);
        assert_eq!(attr.stored_bytes, left, "every step is a shorter file");
        if attr.size == 5 {
            break;
        }
    }
    assert!((2..=4).contains(&steps), "{steps}");
    f.check(one, &[inline(0, "x")], &[], &[]);
    let pieces: Vec<MapPiece> = (0..25_000).map(|at| inline(at * 10, "x")).collect();
    f.write(one, &pieces);
    let mut off = 0;
    while off < 250_000 {
        let reply = f.ledger.ask(me, MetaRequest::Punch { ino: one, off, len: 250_000 - off });
        let Ok(MetaReply::Punched { next_off, attr }) = reply else { panic!("{reply:?}") };
        assert!(next_off > off);
        off = next_off;
        assert_eq!(attr.stored_bytes, (250_000 - off) / 10);
    }
}

#[test]
fn content_changed_when_it_was_written_and_a_read_changes_nothing() {
    let mut f = files();
    let (one, me) = (f.one, f.me);
    let lease = f.ledger.write_lease(me, one);
    let commit = |f: &mut Files, mtime_ns, set| {
        let pieces = vec![CommitPiece { piece: inline(0, "x"), owed: Vec::new(), placed: Epoch(0) }];
        f.ledger.attr(me, MetaRequest::Commit { ino: one, lease, pieces, size: 1, mtime_ns, set })
    };
    let written_ns = f.ledger.now.wall_ns + 10;
    f.ledger.now.wall_ns += 100;
    let attr = commit(&mut f, written_ns, SetAttr::default());
    assert_eq!((attr.mtime_ns, attr.ctime_ns), (written_ns, written_ns));
    // Attributes that changed after the content, and an mtime set by a request.
    let changed = |at| SetAttr { mtime_ns: Some(3), ctime_ns: Some(at), ..SetAttr::default() };
    let attr = commit(&mut f, written_ns + 1, changed(written_ns + 2));
    assert_eq!((attr.mtime_ns, attr.ctime_ns), (3, written_ns + 2));
    let attr = f.ledger.attr(me, MetaRequest::SetAttr { ino: one, set: changed(written_ns + 4) });
    assert_eq!(attr.ctime_ns, written_ns + 4);
    // The owner's own change in between is later than the earlier write.
    let linked =
        f.ledger.ask(me, MetaRequest::Link { ino: one, parent: Ino::ROOT, name: name("three") }).unwrap();
    let MetaReply::Entry { attr: linked, .. } = linked else { panic!("{linked:?}") };
    assert!(linked.ctime_ns > written_ns + 4);
    assert_eq!(commit(&mut f, written_ns + 5, SetAttr::default()).ctime_ns, linked.ctime_ns);
    let atime_ns = f.ledger.now.wall_ns + 50;
    let read = f.ledger.attr(me, MetaRequest::NoteRead { ino: one, atime_ns });
    assert_eq!((read.atime_ns, read.ctime_ns), (atime_ns, linked.ctime_ns));
    assert!(read.attr_ver > linked.attr_ver, "whoever caches attributes learns of it");
    let earlier = f.ledger.attr(me, MetaRequest::NoteRead { ino: one, atime_ns: 5 });
    assert_eq!(earlier.atime_ns, atime_ns);
}
