//! Sessions: repeated requests, open files without a name, ids, restarts.

use std::collections::BTreeSet;

use super::audit::audit;
use super::*;
use wire::lock::{FileLock, LockSpace};
use wire::meta::{EXTENT_RANGE_IDS, SLOTS_MAX};

use crate::owner::space::OPEN_RANGES_MAX;
use crate::values::{IdRange, RangeState};

use FileKind::{Directory, Regular};

fn unlink(text: &str) -> MetaRequest {
    MetaRequest::Unlink { parent: Ino::ROOT, name: name(text) }
}

fn open(ino: Ino) -> MetaRequest {
    MetaRequest::Open { ino, intent: OpenIntent::Read }
}

/// An open file without a name; it has content.
fn orphan() -> (Ledger, SessionId, SessionId, Ino, BTreeSet<u64>) {
    let mut ledger = Ledger::new();
    let (me, other) = (ledger.session(), ledger.session());
    let ino = ledger.make(me, Ino::ROOT, "file", Regular);
    let id = ledger.extents(me);
    ledger.write(me, ino, &[piece(0, 10, id, 0, 10)]).unwrap();
    ledger.ask(me, open(ino)).unwrap();
    let attr = ledger.attr(other, unlink("file"));
    assert_eq!(attr.nlink, 0);
    (ledger, me, other, ino, BTreeSet::from([id]))
}

#[test]
fn an_open_file_without_a_name_lives_until_it_is_closed() {
    let (mut ledger, me, other, ino, issued) = orphan();
    assert_eq!(ledger.stat(me, ino).nlink, 0);
    assert_eq!(ledger.map(me, ino).len(), 1);
    ledger.refuses(me, MetaRequest::Link { ino, parent: Ino::ROOT, name: name("x") }, FsError::NotFound);
    ledger.ask(other, MetaRequest::Close { inos: vec![ino] }).unwrap();
    ledger.stat(me, ino);
    audit(&ledger.dump(), &issued);
    ledger.ask(me, MetaRequest::Close { inos: vec![ino] }).unwrap();
    ledger.refuses(me, MetaRequest::GetAttr { ino }, FsError::Stale);
    ledger.purge(me);
    audit(&ledger.dump(), &issued);
    ledger.commit();
    ledger.beat(me);
    ledger.beat(other);
    assert_eq!(ledger.free(me).len(), 1);
}

#[test]
fn a_session_has_a_bounded_number_of_slots() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    let request = MetaRequest::Make(node(Ino::ROOT, "file", Regular));
    for (slot, expected) in [(SLOTS_MAX, Err(FsError::Invalid)), (u32::MAX, Err(FsError::Invalid))] {
        assert_eq!(ledger.ask_as(RequestId { session: me, slot, seq: 1 }, &request), expected);
    }
    ledger.ask_as(RequestId { session: me, slot: SLOTS_MAX - 1, seq: 1 }, &request).unwrap();
    assert!(ledger.core.take_ended().is_empty());
    ledger.ask(me, MetaRequest::CloseSession).unwrap();
    assert_eq!(ledger.core.take_ended(), [me]);
}

#[test]
fn a_file_that_never_had_a_name_lives_until_it_is_closed_or_gets_one() {
    let mut ledger = Ledger::new();
    let (me, other) = (ledger.session(), ledger.session());
    let unnamed = || MetaRequest::MakeUnnamed(node(Ino::ROOT, "", Regular));
    let (closed, kept) = (ledger.attr(me, unnamed()).ino, ledger.attr(me, unnamed()).ino);
    assert_eq!(ledger.stat(me, kept).nlink, 0);
    // It may be open elsewhere when it gets its name.
    ledger.ask(other, open(kept)).unwrap();
    ledger.refuses(me, MetaRequest::MakeUnnamed(node(Ino::ROOT, "name", Regular)), FsError::Invalid);
    ledger.refuses(me, MetaRequest::MakeUnnamed(node(Ino::ROOT, "", Directory)), FsError::Invalid);
    let link = |text| MetaRequest::Link { ino: kept, parent: Ino::ROOT, name: name(text) };
    assert_eq!(ledger.attr(other, link("first")).nlink, 1);
    assert_eq!(ledger.attr(other, link("second")).nlink, 2);
    ledger.ask(me, MetaRequest::Close { inos: vec![closed, kept] }).unwrap();
    ledger.ask(other, MetaRequest::Close { inos: vec![kept] }).unwrap();
    ledger.refuses(me, MetaRequest::GetAttr { ino: closed }, FsError::Stale);
    assert_eq!(ledger.stat(me, kept).nlink, 2);
    audit(&ledger.dump(), &BTreeSet::new());
    // It has had a name: without one it is gone when it is closed.
    ledger.ask(me, open(kept)).unwrap();
    ledger.attr(me, unlink("first"));
    ledger.attr(me, unlink("second"));
    ledger.refuses(me, link("third"), FsError::NotFound);
}

#[test]
fn a_lock_that_is_asked_for_again_after_it_was_given_up_is_not_taken_again() {
    let mut ledger = Ledger::new();
    let (me, other) = (ledger.session(), ledger.session());
    let ino = ledger.make(me, Ino::ROOT, "file", Regular);
    let lock =
        FileLock { ino, owner: 5, space: LockSpace::Range, exclusive: true, start: 0, last: 9, pid: 1 };
    // The client sent it twice, because a connection broke. The second one comes late, as does that of the unlock.
    let id = |slot| RequestId { session: me, slot, seq: 1 };
    let (take, give_up) =
        (MetaRequest::Lock { lock, ticket: None }, MetaRequest::Unlock { lock, ticket: None });
    ledger.ask_as(id(7), &take).unwrap();
    ledger.ask_as(id(8), &give_up).unwrap();
    assert_eq!(ledger.ask_as(id(7), &take), Ok(MetaReply::Done));
    assert_eq!(ledger.ask(other, MetaRequest::TestLock { lock }), Ok(MetaReply::Locked(None)));
    ledger.ask_as(RequestId { seq: 2, ..id(7) }, &take).unwrap();
    assert_eq!(ledger.ask_as(id(8), &give_up), Ok(MetaReply::Done));
    assert_eq!(ledger.ask(other, MetaRequest::TestLock { lock }), Ok(MetaReply::Locked(Some(lock))));
}

#[test]
fn an_open_file_without_a_name_goes_with_its_session() {
    let (mut ledger, me, other, ino, issued) = orphan();
    ledger.ask(me, MetaRequest::CloseSession).unwrap();
    ledger.refuses(other, MetaRequest::GetAttr { ino }, FsError::Stale);
    audit(&ledger.dump(), &issued);
}

#[test]
fn an_open_file_without_a_name_goes_with_the_owner() {
    let (mut ledger, _, _, ino, issued) = orphan();
    ledger.commit();
    let mut next = ledger.restart();
    let me = next.session();
    next.refuses(me, MetaRequest::GetAttr { ino }, FsError::Stale);
    audit(&next.dump(), &issued);
}

#[test]
fn a_file_opened_after_it_lost_its_name_lives_until_its_last_close() {
    let (mut ledger, me, other, ino, issued) = orphan();
    ledger.ask(other, open(ino)).unwrap();
    audit(&ledger.dump(), &issued);
    ledger.ask(me, MetaRequest::Close { inos: vec![ino] }).unwrap();
    assert_eq!(ledger.stat(other, ino).nlink, 0);
    assert_eq!(ledger.map(other, ino).len(), 1);
    ledger.ask(other, MetaRequest::Close { inos: vec![ino] }).unwrap();
    ledger.refuses(other, MetaRequest::GetAttr { ino }, FsError::Stale);
    audit(&ledger.dump(), &issued);
}

#[test]
fn a_repeated_request_gets_its_first_reply_and_has_no_second_effect() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    ledger.make(me, Ino::ROOT, "dir", Directory);
    let requests = [
        MetaRequest::Make(node(Ino::ROOT, "file", Regular)),
        MetaRequest::Make(node(Ino::ROOT, "other", Directory)),
        unlink("file"),
        MetaRequest::Rmdir { parent: Ino::ROOT, name: name("dir") },
        MetaRequest::AllocExtents,
    ];
    for request in requests {
        let id = ledger.next_id(me);
        let first = ledger.ask_as(id, &request);
        assert!(first.is_ok(), "{request:?}");
        let before = ledger.dump();
        for commit in [false, true, true] {
            if commit {
                ledger.commit();
            }
            assert_eq!(ledger.ask_as(id, &request), first, "{request:?}");
            assert_eq!(ledger.dump(), before, "{request:?}");
        }
        let stale = RequestId { seq: id.seq - 1, ..id };
        assert_eq!(ledger.ask_as(stale, &request), Err(FsError::Invalid));
    }
}

#[test]
fn a_repeated_request_is_answered_only_when_its_first_effect_is_durable() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    ledger.commit();
    let request = MetaRequest::Make(node(Ino::ROOT, "file", Regular));
    let id = ledger.next_id(me);
    let after = |executed| match executed {
        Executed::Reply { after, .. } => after,
        Executed::Wait(wait) => panic!("waits for {wait:?}"),
    };
    let first = after(ledger.core.execute(id, Terms::default(), &request, ledger.now));
    assert!(first > ledger.core.committed);
    assert_eq!(after(ledger.core.execute(id, Terms::default(), &request, ledger.now)), first);
    let lookup = MetaRequest::Lookup { parent: Ino::ROOT, name: name("file") };
    // In a slot of its own: it comes again below, after a later request.
    let look = RequestId { slot: id.slot + 1, ..ledger.next_id(me) };
    assert_eq!(
        after(ledger.core.execute(look, Terms::default(), &lookup, ledger.now)),
        first,
        "no reader sees it earlier"
    );
    let again = MetaRequest::Make(node(Ino::ROOT, "file", Regular));
    let refused = ledger.next_id(me);
    assert_eq!(
        after(ledger.core.execute(refused, Terms::default(), &again, ledger.now)),
        first,
        "nor is told that it exists"
    );
    ledger.commit();
    assert_eq!(after(ledger.core.execute(look, Terms::default(), &lookup, ledger.now)), Seq(0));
}

#[test]
fn a_session_that_ended_is_refused() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    ledger.ask(me, MetaRequest::CloseSession).unwrap();
    ledger.refuses(me, MetaRequest::GetAttr { ino: Ino::ROOT }, FsError::StaleLease);
    ledger.commit();
    let mut next = ledger.restart();
    next.refuses(me, MetaRequest::GetAttr { ino: Ino::ROOT }, FsError::StaleLease);
    let keys = Keys::new(LEDGER);
    let txn = next.core.store.begin();
    assert!(txn.scan(&keys.sessions(), 9).unwrap().is_empty());
    assert!(txn.scan(&keys.slots(me), 9).unwrap().is_empty());
}

#[test]
fn an_extent_of_a_session_that_ended_cannot_be_committed() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    let ino = ledger.make(me, Ino::ROOT, "file", Regular);
    let id = ledger.extents(me);
    ledger.ask(me, MetaRequest::CloseSession).unwrap();
    let key = Keys::new(LEDGER).range(ExtentId(id));
    let range: IdRange = ledger.core.store.begin().get(&key).unwrap().unwrap();
    assert_eq!(range.open, RangeState::Closed);
    let other = ledger.session();
    assert_eq!(ledger.write(other, ino, &[piece(0, 10, id, 0, 10)]), Err(FsError::Invalid));
    ledger.commit();
    let mut next = ledger.restart();
    let session = next.session();
    assert_eq!(next.write(session, ino, &[piece(0, 10, id, 0, 10)]), Err(FsError::Invalid));
}

#[test]
fn no_id_is_issued_twice_whatever_is_removed_or_restarted() {
    let mut ledger = Ledger::new();
    let (mut inos, mut ids, mut sessions) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for _ in 0..5 {
        let me = ledger.session();
        assert!(sessions.insert(me));
        for round in 0..3 {
            let ino = ledger.make(me, Ino::ROOT, "file", Regular);
            assert!(inos.insert(ino), "inode {ino} again");
            let first = ledger.extents(me);
            assert!(
                ids.insert(first)
                    && ids.iter().all(|id| id.abs_diff(first) == 0 || id.abs_diff(first) >= 1 << 16)
            );
            if round < 2 {
                ledger.attr(me, unlink("file"));
            }
        }
        ledger.attr(me, unlink("file"));
        ledger.commit();
        ledger = ledger.restart();
    }
}

#[test]
fn a_ledger_of_a_newer_format_is_refused() {
    let ledger = Ledger::new();
    let keys = Keys::new(LEDGER);
    let mut store = Store::new(Arc::new(ledger.state.clone()));
    store.apply(Seq(1), SessionId(0), [(keys.value("format"), Some(crate::values::Value::encode(&2u64)))]);
    let mut core = Core::new(LEDGER, store, (Epoch(1), Seq(1)));
    assert_eq!(core.start(ledger.now, beginning(1), EarlierSessions::End), Err(FsError::Unsupported));
}

#[test]
fn a_long_session_has_a_bounded_number_of_open_ranges() {
    let mut ledger = Ledger::new();
    let (me, other) = (ledger.session(), ledger.session());
    let others = ledger.extents(other);
    let ids: Vec<u64> = (0..OPEN_RANGES_MAX + 6).map(|_| ledger.extents(me)).collect();
    let ino = ledger.make(me, Ino::ROOT, "file", Regular);
    let ranges = ledger.ask(me, MetaRequest::ExtentRanges).unwrap();
    let closed: Vec<_> = ids[..6].iter().map(|first| (ExtentId(*first), EXTENT_RANGE_IDS)).collect();
    assert_eq!(ranges, MetaReply::Ranges { closed, open: OPEN_RANGES_MAX as u64 + 1 });
    for (id, expected) in [(ids[5], Err(FsError::Invalid)), (ids[6], Ok(())), (others, Err(FsError::Invalid))]
    {
        let written = ledger.write(me, ino, &[piece(0, 10, id, 0, 10)]).map(drop);
        assert_eq!(written, expected, "{id}");
    }
}
