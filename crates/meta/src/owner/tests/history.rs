//! A ledger that is older than the drives know, and repeated searches of id ranges.

use super::*;

fn ranges(ledger: &mut Ledger, session: SessionId) -> Vec<(u64, u64)> {
    match ledger.ask(session, MetaRequest::ExtentRanges) {
        Ok(MetaReply::Ranges { closed, .. }) => {
            closed.into_iter().map(|(first, count)| (first.0, count)).collect()
        }
        other => panic!("{other:?}"),
    }
}

/// A ledger in which an ended session has made a file and taken ids.
fn used() -> Ledger {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    ledger.make(me, Ino::ROOT, "a", FileKind::Regular);
    ledger.extents(me);
    ledger.ask(me, MetaRequest::CloseSession).unwrap();
    ledger.commit();
    ledger
}

fn go_on(ledger: &Ledger, beginning: Beginning) -> Ledger {
    let mut next = ledger.restart();
    // The same state, but another beginning.
    let tail = Seq(ledger.log.len() as u64);
    let state = MemState::default();
    for (seq, batch) in (1..).zip(&ledger.log) {
        let mut changes = batch.changes.iter().map(|(key, value)| (key.as_slice(), value.as_deref()));
        state.apply(&mut changes, Applied { seq: Seq(seq), epoch: Epoch(1) }).unwrap();
    }
    next.core = Core::new(LEDGER, Store::new(Arc::new(state.clone())), (Epoch(1), tail));
    next.state = state;
    next.log.clone_from(&ledger.log);
    next.core.start(next.now, beginning, EarlierSessions::End).unwrap();
    next.commit();
    next
}

#[test]
fn an_older_ledger_gives_no_id_that_the_newer_one_may_have_given() {
    let older = used();
    let mut newer = older.restart();
    let me = newer.session();
    let (ino, first) = (newer.make(me, Ino::ROOT, "b", FileKind::Regular), newer.extents(me));
    let highest = ExtentId(first + 500);
    let beginning = Beginning { lineage: Lineage(9), highest_extent: Some(highest), is_older: true };
    let mut again = go_on(&older, beginning);
    let me = again.session();
    assert!(again.make(me, Ino::ROOT, "b", FileKind::Regular) > ino);
    assert!(again.extents(me) > highest.0);
}

#[test]
fn no_extent_id_is_given_below_one_that_a_drive_holds() {
    let highest = ExtentId(1 << 50);
    let beginning = Beginning { lineage: Lineage(9), highest_extent: Some(highest), is_older: false };
    let mut ledger = go_on(&used(), beginning);
    let me = ledger.session();
    assert_eq!(ledger.extents(me), highest.0 + 1);
}

#[test]
fn nothing_is_an_orphan_of_an_older_ledger_until_somebody_says_so() {
    let older = used();
    let beginning = Beginning { lineage: Lineage(9), highest_extent: None, is_older: true };
    let mut ledger = go_on(&older, beginning).restart();
    assert!(ledger.core.is_in_doubt(), "a restart changes nothing");
    let me = ledger.session();
    assert_eq!(ranges(&mut ledger, me), []);
    ledger.ask(me, MetaRequest::Doubt { in_doubt: false }).unwrap();
    assert!(!ledger.core.is_in_doubt());
    assert_eq!(ranges(&mut ledger, me).len(), 1, "the range of the session that ended");
    ledger.ask(me, MetaRequest::Doubt { in_doubt: true }).unwrap();
    assert_eq!(ranges(&mut ledger, me), []);
}

#[test]
fn ranges_are_looked_at_again_where_none_is_known() {
    let mut ledger = used();
    let gone = ledger.session();
    ledger.extents(gone);
    ledger.ask(gone, MetaRequest::CloseSession).unwrap();
    let me = ledger.session();
    let open = ledger.extents(me);
    let closed = ranges(&mut ledger, me);
    let [(first, count), _] = closed[..] else { panic!("{closed:?}") };
    ledger.ask(me, MetaRequest::RangeVerified { first: ExtentId(first) }).unwrap();
    let recheck = |ranges: &[(u64, u64)]| MetaRequest::RecheckRanges {
        ranges: ranges.iter().map(|(first, count)| (ExtentId(*first), *count)).collect(),
    };
    ledger.ask(me, recheck(&[(first + 10, 20)])).unwrap();
    assert_eq!(ranges(&mut ledger, me)[0], (first + 10, 20));
    ledger.ask(me, recheck(&[(0, u64::MAX)])).unwrap();
    let again = ranges(&mut ledger, me);
    assert_eq!(again.first(), Some(&(0, first + 10)));
    assert!(
        again.is_sorted() && again.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0),
        "{again:?}"
    );
    assert!(again.iter().all(|(from, len)| from + len <= open), "what is open stays open: {again:?}");
    assert!(again.iter().map(|(_, len)| len).sum::<u64>() >= 2 * count);
}
