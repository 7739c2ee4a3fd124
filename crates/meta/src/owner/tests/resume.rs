//! The next owner: sessions that outlive an owner claim their state.

use wire::message::AnswerTime;
use wire::meta::{Claim, EXTENT_RANGE_IDS, HeldLease, Resumed};

use super::*;

use FileKind::Regular;

impl Ledger {
    /// The owner that follows. It has all durable batches and waits for the sessions.
    pub(super) fn take_over(&mut self) -> Self {
        self.take_over_with(EarlierSessions::Resume)
    }

    fn take_over_with(&mut self, sessions: EarlierSessions) -> Self {
        self.commit();
        let mut next = Self::replay(&[]);
        let state = MemState::default();
        for (seq, batch) in (1..).zip(&self.log) {
            let mut changes = batch.changes.iter().map(|(key, value)| (key.as_slice(), value.as_deref()));
            state.apply(&mut changes, Applied { seq: Seq(seq), epoch: Epoch(1) }).unwrap();
        }
        let store = Store::new(Arc::new(state.clone()));
        next.core = Core::new(LEDGER, store, (Epoch(2), Seq(self.log.len() as u64)));
        next.state = state;
        next.log.clone_from(&self.log);
        next.requests.clone_from(&self.requests);
        next.core.start(next.now, beginning(99), sessions).unwrap();
        next.commit();
        next
    }

    pub(super) fn resume(&mut self, session: SessionId, claim: &Claim) -> Resumed {
        self.core.resume(session, claim, self.now).unwrap().0
    }

    fn open_to_write(&mut self, session: SessionId, ino: Ino) -> HeldLease {
        match self.ask(session, MetaRequest::Open { ino, intent: OpenIntent::Write }) {
            Ok(MetaReply::Entry { attr, lease: Some(lease), .. }) => held(lease, &attr),
            other => panic!("{other:?}"),
        }
    }

    fn commit_under(&mut self, id: RequestId, lease: LeaseGrant, text: &str) -> Result<MetaReply, FsError> {
        let pieces = vec![CommitPiece { piece: inline(0, text), owed: Vec::new(), placed: Epoch(0) }];
        let (ino, lease, size) = (lease.ino, lease.id, text.len() as u64);
        let set = wire::meta::SetAttr::default();
        self.ask_as(id, &MetaRequest::Commit { ino, lease, pieces, size, mtime_ns: 7, set })
    }
}

fn held(lease: LeaseGrant, attr: &Attr) -> HeldLease {
    HeldLease { lease, data_ver: attr.data_ver, attr_ver: attr.attr_ver }
}

fn claim(leases: &[HeldLease]) -> Claim {
    let opens = leases.iter().map(|held| held.lease.ino).collect();
    Claim { in_use_ver: u64::MAX, leases: leases.to_vec(), opens, ..Claim::default() }
}

#[test]
fn a_lease_holds_on_under_its_id_and_writes_go_on() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    let ino = ledger.make(me, Ino::ROOT, "file", Regular);
    let lease = ledger.open_to_write(me, ino);
    let mut next = ledger.take_over();
    assert!(next.core.is_recovering());
    let resumed = next.resume(me, &claim(&[lease]));
    assert_eq!((resumed.leases, resumed.changed), (vec![lease.lease], vec![]));
    assert!(!next.core.is_recovering());
    let id = next.next_id(me);
    next.commit_under(id, lease.lease, "text").unwrap();
    let other = next.session();
    assert!(next.write_lease(other, ino) > lease.lease.id, "ids of leases are not used again");
    assert_eq!(next.core.resume(SessionId(99), &claim(&[]), next.now), Err(FsError::StaleLease));
}

#[test]
fn a_lease_on_content_that_others_changed_is_void() {
    let mut ledger = Ledger::new();
    let (me, other) = (ledger.session(), ledger.session());
    let ino = ledger.make(me, Ino::ROOT, "file", Regular);
    let mine = ledger.open_to_write(me, ino);
    // Revoked, and written by another session.
    ledger.write(other, ino, &[inline(0, "theirs")]).unwrap();
    let attr = ledger.stat(other, ino);
    let mut next = ledger.take_over();
    assert_eq!(next.resume(me, &claim(&[mine])).leases, []);
    assert!(next.core.is_recovering(), "the other session is not there yet");
    let id = next.next_id(me);
    assert_eq!(next.commit_under(id, mine.lease, "mine"), Err(FsError::StaleLease));
    let lease = LeaseGrant { ino, id: LeaseId(mine.lease.id.0 + 1), kind: LeaseKind::Read, seq: 1 };
    assert_eq!(next.resume(other, &claim(&[held(lease, &attr)])).leases, [lease]);
    // Attributes alone do not make a lease on content void.
    let mut ledger = Ledger::new();
    let (me, other) = (ledger.session(), ledger.session());
    let ino = ledger.make(me, Ino::ROOT, "file", Regular);
    let mine = ledger.open_to_write(me, ino);
    let set = wire::meta::SetAttr { mode: Some(0o600), ..wire::meta::SetAttr::default() };
    let attr = ledger.attr(other, MetaRequest::SetAttr { ino, set });
    let mut next = ledger.take_over();
    let resumed = next.resume(me, &claim(&[mine]));
    assert_eq!((resumed.leases, resumed.changed), (vec![mine.lease], vec![attr]));
}

#[test]
fn an_own_change_whose_answer_was_lost_costs_no_lease_and_is_not_made_again() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    let ino = ledger.make(me, Ino::ROOT, "file", Regular);
    let mine = ledger.open_to_write(me, ino);
    let id = ledger.next_id(me);
    let first = ledger.commit_under(id, mine.lease, "text").unwrap();
    let mut next = ledger.take_over();
    let resumed = next.resume(me, &claim(&[mine]));
    assert_eq!((resumed.leases, resumed.changed), (vec![mine.lease], vec![]));
    let before = next.dump();
    assert_eq!(next.commit_under(id, mine.lease, "text").unwrap(), first);
    assert_eq!(next.dump(), before);
}

#[test]
fn only_one_of_two_sessions_gets_a_lease_that_excludes_the_other() {
    let mut ledger = Ledger::new();
    let (me, other) = (ledger.session(), ledger.session());
    let ino = ledger.make(me, Ino::ROOT, "file", Regular);
    let mine = ledger.open_to_write(me, ino);
    let theirs = ledger.open_to_write(other, ino);
    let mut next = ledger.take_over();
    assert_eq!(next.resume(other, &claim(&[theirs])).leases, [theirs.lease]);
    assert_eq!(next.resume(me, &claim(&[mine])).leases, []);
    // A claim may come twice. A recall since the first may not have reached the session.
    let id = next.next_id(me);
    assert!(matches!(
        next.core.execute(id, Terms::default(), &MetaRequest::GetAttr { ino }, next.now),
        Executed::Wait(_)
    ));
    next.core.take_events();
    assert_eq!(next.resume(other, &claim(&[theirs])).leases, [theirs.lease]);
    let events = next.core.take_events();
    assert!(matches!(events[..], [(session, OwnerEvent::Recall { .. })] if session == other), "{events:?}");
}

#[test]
fn a_creation_whose_answer_was_lost_is_open_and_leased() {
    let mut ledger = Ledger::new();
    let (me, other) = (ledger.session(), ledger.session());
    let make = MetaRequest::Make(MakeNode { open: OpenIntent::Write, ..node(Ino::ROOT, "new", Regular) });
    let id = RequestId { session: me, slot: 7, seq: 1 };
    let first = ledger.ask_as(id, &make).unwrap();
    let mut next = ledger.take_over();
    next.resume(me, &claim(&[]));
    next.resume(other, &claim(&[]));
    let Ok(MetaReply::Entry { attr, lease: Some(lease), .. }) = next.ask_as(id, &make) else { panic!() };
    assert_eq!(first.attrs(), [attr]);
    next.ask(other, MetaRequest::Unlink { parent: Ino::ROOT, name: name("new") }).unwrap();
    assert_eq!(next.stat(me, attr.ino).nlink, 0, "it is open");
    // A repetition opens nothing again.
    next.ask(me, MetaRequest::Close { inos: vec![attr.ino] }).unwrap();
    next.ask_as(id, &make).unwrap();
    next.refuses(other, MetaRequest::GetAttr { ino: attr.ino }, FsError::Stale);
    assert_eq!(lease.kind, LeaseKind::Exclusive);
}

#[test]
fn a_lease_in_a_lost_answer_is_void_if_the_inode_was_changed() {
    let mut ledger = Ledger::new();
    let (me, other) = (ledger.session(), ledger.session());
    let make = MetaRequest::Make(MakeNode { open: OpenIntent::Write, ..node(Ino::ROOT, "new", Regular) });
    let id = RequestId { session: me, slot: 7, seq: 1 };
    let ino = ledger.ask_as(id, &make).unwrap().attrs()[0].ino;
    ledger.write(other, ino, &[inline(0, "theirs")]).unwrap();
    let mut next = ledger.take_over();
    next.resume(me, &claim(&[]));
    next.resume(other, &claim(&[]));
    let answer = next.ask_as(id, &make).unwrap();
    assert!(matches!(answer, MetaReply::Entry { lease: None, .. }), "{answer:?}");
}

#[test]
fn files_without_a_name_and_ids_stay_with_their_session() {
    let mut ledger = Ledger::new();
    let (me, other) = (ledger.session(), ledger.session());
    let ino = ledger.make(me, Ino::ROOT, "file", Regular);
    let first = ledger.extents(me);
    ledger.ask(me, MetaRequest::Open { ino, intent: OpenIntent::Read }).unwrap();
    ledger.ask(other, MetaRequest::Unlink { parent: Ino::ROOT, name: name("file") }).unwrap();
    let mut next = ledger.take_over();
    next.resume(me, &Claim { in_use_ver: u64::MAX, opens: vec![ino], ..Claim::default() });
    next.write(me, ino, &[piece(0, 10, first + EXTENT_RANGE_IDS - 1, 0, 10)]).unwrap();
    next.ask(me, MetaRequest::Close { inos: vec![ino] }).unwrap();
    next.refuses(me, MetaRequest::GetAttr { ino }, FsError::Stale);
}

#[test]
fn a_file_that_loses_its_name_is_kept_for_sessions_that_may_have_it_open() {
    let mut ledger = Ledger::new();
    let (me, late, gone) = (ledger.session(), ledger.session(), ledger.session());
    let inos = ["open", "closed"].map(|name| ledger.make(me, Ino::ROOT, name, Regular));
    for ino in inos {
        ledger.ask(late, MetaRequest::Open { ino, intent: OpenIntent::Read }).unwrap();
    }
    let mut next = ledger.take_over();
    next.resume(me, &claim(&[]));
    next.pass(lease::RECALL_IDLE_NS);
    next.core.note_beat(me, next.now).unwrap();
    next.core.expire_sessions(next.now).unwrap();
    assert!(!next.core.is_recovering());
    for name in ["open", "closed"] {
        next.ask(me, MetaRequest::Unlink { parent: Ino::ROOT, name: self::name(name) }).unwrap();
    }
    next.resume(late, &Claim { in_use_ver: u64::MAX, opens: vec![inos[0]], ..Claim::default() });
    assert_eq!(next.stat(late, inos[1]).nlink, 0, "another session may have it open");
    // Nothing more is kept for one that stays away.
    let other = next.make(me, Ino::ROOT, "other", Regular);
    next.pass(300_000_000_000);
    next.core.note_beat(me, next.now).unwrap();
    next.ask(me, MetaRequest::Unlink { parent: Ino::ROOT, name: name("other") }).unwrap();
    next.refuses(me, MetaRequest::GetAttr { ino: other }, FsError::Stale);
    next.resume(gone, &claim(&[]));
    assert_eq!(next.stat(late, inos[0]).nlink, 0);
    next.refuses(late, MetaRequest::GetAttr { ino: inos[1] }, FsError::Stale);
}

#[test]
fn a_session_that_was_silent_for_its_term_makes_no_later_owner_wait() {
    let mut ledger = Ledger::new();
    let (me, silent, back) = (ledger.session(), ledger.session(), ledger.session());
    let ino = ledger.make(me, Ino::ROOT, "file", Regular);
    let lease = ledger.open_to_write(silent, ino);
    ledger.pass(lease::RECALL_IDLE_NS);
    ledger.core.note_beat(me, ledger.now).unwrap();
    ledger.core.expire_sessions(ledger.now).unwrap();
    // One of them comes back. It gets no answer before the ledger says so.
    ledger.commit();
    let id = ledger.next_id(back);
    ledger.core.note_beat(back, ledger.now).unwrap();
    match ledger.core.execute(id, Terms::default(), &MetaRequest::Heartbeat { in_use_ver: 1 }, ledger.now) {
        Executed::Reply { reply: Ok(_), after, .. } => assert!(after > ledger.core.committed_seq()),
        _ => panic!("a heartbeat is answered"),
    }
    let mut next = ledger.take_over();
    next.resume(me, &claim(&[]));
    assert!(next.core.is_recovering(), "it waits for the session that came back");
    next.resume(back, &claim(&[]));
    assert!(!next.core.is_recovering(), "it does not wait for the silent one");
    // That one still has what nobody else wanted.
    let (resumed, after) = next.core.resume(silent, &claim(&[lease]), next.now).unwrap();
    assert_eq!(resumed.leases, [lease.lease]);
    assert!(after > next.core.committed_seq(), "its term begins when the mark is gone");
    let mut third = next.take_over();
    third.resume(me, &claim(&[]));
    third.resume(back, &claim(&[]));
    assert!(third.core.is_recovering());
}

#[test]
fn nothing_is_freed_until_each_session_has_told_its_reads_or_was_silent_for_too_long() {
    let freed = |tell: &dyn Fn(&mut Ledger, SessionId)| {
        let mut ledger = Ledger::new();
        let (me, reader) = (ledger.session(), ledger.session());
        let ino = ledger.make(me, Ino::ROOT, "file", Regular);
        let id = ledger.extents(me);
        ledger.write(me, ino, &[piece(0, 10, id, 0, 10)]).unwrap();
        ledger.ask(me, MetaRequest::Unlink { parent: Ino::ROOT, name: name("file") }).unwrap();
        ledger.purge(me);
        let mut next = ledger.take_over();
        next.resume(me, &claim(&[]));
        tell(&mut next, reader);
        next.beat(me);
        next.free(me).len()
    };
    assert_eq!(freed(&|_, _| {}), 0, "it may read");
    assert_eq!(freed(&|next, reader| drop(next.resume(reader, &claim(&[])))), 1);
    let reads = Claim { in_use_ver: 1, ..Claim::default() };
    assert_eq!(freed(&|next, reader| drop(next.resume(reader, &reads))), 0, "it reads");
    let more = Claim { in_use_ver: u64::MAX, more: true, ..Claim::default() };
    assert_eq!(freed(&|next, reader| drop(next.resume(reader, &more))), 0, "it has not told all");
    let is_silent = |next: &mut Ledger, _| {
        next.pass(lease::RECALL_IDLE_NS);
        assert!(next.core.is_recovering());
        next.core.expire_sessions(next.now).unwrap();
        assert!(!next.core.is_recovering());
    };
    assert_eq!(freed(&is_silent), 1);
}

#[test]
fn names_that_caches_may_have_change_only_after_their_holders_were_told() {
    let mut ledger = Ledger::new();
    let (me, other) = (ledger.session(), ledger.session());
    ledger.make(me, Ino::ROOT, "file", Regular);
    let mut next = ledger.take_over();
    next.resume(me, &Claim { dirs: vec![Ino::ROOT], ..claim(&[]) });
    next.resume(other, &claim(&[]));
    let id = next.next_id(other);
    let unlink = MetaRequest::Unlink { parent: Ino::ROOT, name: name("file") };
    assert!(matches!(next.core.execute(id, Terms::default(), &unlink, next.now), Executed::Wait(_)));
    let events = next.core.take_events();
    assert!(matches!(events[..], [(session, OwnerEvent::Forget { .. })] if session == me), "{events:?}");
}

/// A session that has what `hold` gets for it, after a rest with nothing but heartbeats.
fn after_a_rest(hold: impl FnOnce(&mut Ledger, SessionId)) -> (Ledger, SessionId) {
    let mut ledger = Ledger::new();
    let session = ledger.session();
    ledger.core.volatile.earlier = EarlierSessions::Resume;
    hold(&mut ledger, session);
    ledger.commit();
    for _ in 0..2 {
        ledger.pass(10_000_000_000);
        ledger.now.boot_ns += 10_000_000_000;
        ledger.core.expire_recalls(ledger.now);
        beat(&mut ledger, session);
        ledger.core.expire_sessions(ledger.now).unwrap();
    }
    ledger.commit();
    (ledger, session)
}

fn beat(ledger: &mut Ledger, session: SessionId) {
    ledger.core.note_beat(session, ledger.now).unwrap();
    let (id, in_use_ver) = (ledger.next_id(session), ledger.core.committed_seq().0);
    ledger.core.execute(id, Terms::default(), &MetaRequest::Heartbeat { in_use_ver }, ledger.now);
}

#[track_caller]
fn check_waited_for(expected: bool, hold: impl FnOnce(&mut Ledger, SessionId)) {
    let (mut ledger, session) = after_a_rest(hold);
    let mut next = ledger.take_over();
    assert_eq!(next.core.is_recovering(), expected);
    next.resume(session, &claim(&[]));
    assert!(next.ask(session, MetaRequest::GetAttr { ino: Ino::ROOT }).is_ok(), "it goes on");
}

#[test]
fn a_session_that_holds_nothing_makes_no_later_owner_wait() {
    let made = |ledger: &mut Ledger, session| ledger.make(session, Ino::ROOT, "file", Regular);
    let given_back = |ledger: &mut Ledger, session| {
        let ino = ledger.make(session, Ino::ROOT, "file", Regular);
        ledger.ask(session, MetaRequest::Close { inos: vec![ino] }).unwrap();
        let lease = ledger.open_to_write(session, ino).lease;
        ledger.ask(session, MetaRequest::Release { lease, keep: None }).unwrap();
        ledger.ask(session, MetaRequest::Close { inos: vec![ino] }).unwrap();
        ino
    };
    check_waited_for(false, |_, _| {});
    check_waited_for(true, |ledger, session| {
        made(ledger, session);
    });
    check_waited_for(true, |ledger, session| {
        let ino = given_back(ledger, session);
        ledger.open_to_write(session, ino);
    });
    check_waited_for(false, |ledger, session| {
        given_back(ledger, session);
    });
}

#[test]
fn what_a_session_gets_after_a_rest_counts_once_the_next_owner_waits_for_it() {
    let (mut ledger, session) = after_a_rest(|_, _| {});
    let id = ledger.next_id(session);
    ledger.core.note_request(session, ledger.now).unwrap();
    match ledger.core.execute(id, Terms::default(), &MetaRequest::GetAttr { ino: Ino::ROOT }, ledger.now) {
        Executed::Reply { reply: Ok(_), after, .. } => assert!(after > ledger.core.committed_seq()),
        _ => panic!("it is answered"),
    }
    let early = Terms { answer: AnswerTime::Early, ..Terms::default() };
    let make = MetaRequest::Make(node(Ino::ROOT, "file", Regular));
    let id = ledger.next_id(session);
    match ledger.core.execute(id, early, &make, ledger.now) {
        Executed::Reply { early, .. } => assert!(early.is_none(), "the next owner would not repeat it"),
        _ => panic!("it is answered"),
    }
    let next = ledger.take_over();
    assert!(next.core.is_recovering());
    // A request that waited for others while its session got the mark.
    let (mut ledger, session) = after_a_rest(|_, _| {});
    let id = ledger.next_id(session);
    match ledger.core.execute(id, Terms::default(), &MetaRequest::GetAttr { ino: Ino::ROOT }, ledger.now) {
        Executed::Reply { reply: Ok(_), after, .. } => assert!(after > ledger.core.committed_seq()),
        _ => panic!("it is answered"),
    }
    let next = ledger.take_over();
    assert!(next.core.is_recovering());
    // One that has not claimed what it has is not idle, also if it asks.
    let mut next = ledger.take_over();
    next.core.note_request(session, next.now).unwrap();
    next.commit();
    next.pass(10_000_000_000);
    beat(&mut next, session);
    next.core.expire_sessions(next.now).unwrap();
    assert!(next.take_over().core.is_recovering());
}

#[test]
fn a_session_ends_a_day_after_it_was_last_heard_of() {
    let mut ledger = Ledger::new();
    let (me, other) = (ledger.session(), ledger.session());
    let ino = ledger.make(me, Ino::ROOT, "file", Regular);
    ledger.ask(me, MetaRequest::Open { ino, intent: OpenIntent::Read }).unwrap();
    ledger.ask(other, MetaRequest::Unlink { parent: Ino::ROOT, name: name("file") }).unwrap();
    let pass = |ledger: &mut Ledger, time_ns| {
        ledger.pass(time_ns);
        ledger.core.note_beat(other, ledger.now).unwrap();
        ledger.core.expire_sessions(ledger.now).unwrap();
    };
    pass(&mut ledger, SESSION_KEPT_NS - 1);
    assert_eq!(ledger.stat(other, ino).nlink, 0, "the file is kept for the session");
    pass(&mut ledger, 1);
    ledger.refuses(other, MetaRequest::GetAttr { ino }, FsError::Stale);
}

#[test]
fn after_the_end_of_the_owners_process_clients_in_other_processes_go_on() {
    let mut ledger = Ledger::new();
    let inside = ledger.session();
    let outside = ledger.core.connect(true, ledger.now).unwrap().0;
    let theirs = ledger.make(inside, Ino::ROOT, "theirs", Regular);
    let mine = ledger.make(outside, Ino::ROOT, "mine", Regular);
    let held = ledger.open_to_write(outside, mine);
    ledger.open_to_write(inside, theirs);
    for name in ["theirs", "mine"] {
        ledger.ask(outside, MetaRequest::Unlink { parent: Ino::ROOT, name: name.as_bytes().into() }).unwrap();
    }
    for _ in 0..2 {
        let mut next = ledger.take_over_with(EarlierSessions::ResumeElsewhere);
        assert!(next.core.is_recovering(), "it waits for the client outside");
        assert_eq!(next.resume(outside, &claim(&[held])).leases, [held.lease]);
        assert!(!next.core.is_recovering(), "the one inside is gone");
        assert!(next.ask(outside, MetaRequest::GetAttr { ino: mine }).is_ok(), "it is open there");
        assert!(next.ask(outside, MetaRequest::GetAttr { ino: theirs }).is_err());
        assert_eq!(next.ask(inside, MetaRequest::GetAttr { ino: mine }), Err(FsError::StaleLease));
        ledger = next;
    }
}
