use super::*;
use proptest::prelude::*;

const INO: Ino = Ino(9);

fn session(number: u64) -> SessionId {
    SessionId(number)
}

fn clear(table: &mut LeaseTable, who: u64, intent: Intent, events: &mut Events) -> bool {
    table.clear(INO, session(who), intent, 0, events)
}

#[test]
fn a_reader_makes_the_exclusive_holder_flush_and_both_may_read() {
    let mut table = LeaseTable::default();
    let mut events = Events::new();
    let exclusive = table.grant(INO, session(1), LeaseKind::Exclusive).unwrap();
    assert!(!clear(&mut table, 2, Intent::Read, &mut events));
    let keep = Some(LeaseKind::Read);
    assert_eq!(events, [(session(1), OwnerEvent::Recall { lease: exclusive, keep })]);
    assert!(table.may_write(INO, session(1), exclusive.id), "the flush under the recall is accepted");
    table.release(session(1), exclusive, keep, 0);
    assert!(!table.may_write(INO, session(1), exclusive.id));
    assert!(clear(&mut table, 2, Intent::Read, &mut events));
    assert!(table.grant(INO, session(2), LeaseKind::Read).is_some());
    assert!(table.grant(INO, session(1), LeaseKind::Read).is_some());
}

#[test]
fn a_recall_is_sent_once_and_again_only_when_stricter() {
    let mut table = LeaseTable::default();
    let mut events = Events::new();
    table.grant(INO, session(1), LeaseKind::Exclusive).unwrap();
    for (intent, sent) in [(Intent::Read, 1), (Intent::Read, 1), (Intent::Change, 2), (Intent::Change, 2)] {
        assert!(!clear(&mut table, 2, intent, &mut events));
        assert_eq!(events.len(), sent);
    }
}

#[test]
fn a_recalled_lease_is_not_upgraded() {
    let mut table = LeaseTable::default();
    let mut events = Events::new();
    table.grant(INO, session(1), LeaseKind::Read).unwrap();
    table.grant(INO, session(2), LeaseKind::Read).unwrap();
    assert!(!clear(&mut table, 2, Intent::Change, &mut events));
    assert!(table.grant(INO, session(1), LeaseKind::Exclusive).is_none());
}

#[test]
fn an_unanswered_recall_ends_in_revocation_of_that_inode_only() {
    let mut table = LeaseTable::default();
    let mut events = Events::new();
    let lost = table.grant(INO, session(1), LeaseKind::Exclusive).unwrap();
    let kept = table.grant(Ino(10), session(1), LeaseKind::Exclusive).unwrap();
    assert!(!clear(&mut table, 2, Intent::Change, &mut events));
    assert!(table.expire(RECALL_IDLE_NS - 1, &mut events).is_empty());
    assert_eq!(table.expire(RECALL_IDLE_NS, &mut events), [INO]);
    assert_eq!(events.last(), Some(&(session(1), OwnerEvent::Revoked { lease: lost })));
    assert!(!table.may_write(INO, session(1), lost.id));
    assert!(table.may_write(Ino(10), session(1), kept.id));
    assert!(clear(&mut table, 2, Intent::Change, &mut events));
}

#[test]
fn a_holder_that_still_writes_has_time_to_flush_but_not_for_ever() {
    let mut table = LeaseTable::default();
    let mut events = Events::new();
    let lease = table.grant(INO, session(1), LeaseKind::Exclusive).unwrap();
    assert!(!clear(&mut table, 2, Intent::Change, &mut events));
    let mut now_ns = 0;
    while now_ns + RECALL_IDLE_NS < RECALL_LONGEST_NS {
        now_ns += RECALL_IDLE_NS - 1;
        assert!(table.expire(now_ns, &mut events).is_empty());
        table.note_progress(INO, session(2), now_ns);
        table.note_progress(INO, session(1), now_ns);
        assert!(!clear(&mut table, 2, Intent::Change, &mut events));
    }
    assert!(table.expire(RECALL_LONGEST_NS - 1, &mut events).is_empty());
    assert_eq!(table.expire(RECALL_LONGEST_NS, &mut events), [INO]);
    assert!(!table.may_write(INO, session(1), lease.id));
}

#[test]
fn the_time_of_a_recall_begins_again_when_its_event_is_sent_again_or_answered_in_part() {
    let mut table = LeaseTable::default();
    let mut events = Events::new();
    let lease = table.grant(INO, session(1), LeaseKind::Exclusive).unwrap();
    assert!(!clear(&mut table, 2, Intent::Read, &mut events));
    assert!(!clear(&mut table, 2, Intent::Change, &mut events));
    // The answer to the first of the two.
    let mut now_ns = RECALL_IDLE_NS - 1;
    table.release(session(1), lease, Some(LeaseKind::Read), now_ns);
    now_ns += RECALL_IDLE_NS - 1;
    assert!(table.expire(now_ns, &mut events).is_empty());
    assert!(table.restore(session(1), lease, now_ns, &mut events));
    now_ns += RECALL_IDLE_NS;
    assert!(table.expire(now_ns - 1, &mut events).is_empty());
    assert_eq!(table.expire(now_ns, &mut events), [INO]);
}

#[test]
fn what_others_commit_is_no_progress() {
    let mut table = LeaseTable::default();
    let mut events = Events::new();
    table.grant(INO, session(1), LeaseKind::Exclusive).unwrap();
    assert!(!clear(&mut table, 2, Intent::Change, &mut events));
    table.note_progress(INO, session(2), RECALL_IDLE_NS - 1);
    assert_eq!(table.expire(RECALL_IDLE_NS, &mut events), [INO]);
}

#[test]
fn a_release_of_an_older_grant_changes_nothing() {
    let mut table = LeaseTable::default();
    let old = table.grant(INO, session(1), LeaseKind::Exclusive).unwrap();
    table.release(session(1), old, None, 0);
    let new = table.grant(INO, session(1), LeaseKind::Exclusive).unwrap();
    table.release(session(1), old, None, 0);
    assert!(table.may_write(INO, session(1), new.id));
}

#[test]
fn a_release_that_crossed_with_a_newer_answer_changes_nothing() {
    let mut table = LeaseTable::default();
    let first = table.grant(INO, session(1), LeaseKind::Exclusive).unwrap();
    let again = table.grant(INO, session(1), LeaseKind::Attr).unwrap();
    assert_eq!(first.id, again.id);
    table.release(session(1), first, None, 0);
    assert!(table.may_write(INO, session(1), again.id));
    table.release(session(1), again, None, 0);
    assert!(!table.may_write(INO, session(1), again.id));
}

#[test]
fn an_operation_waits_on_only_while_every_conflicting_lease_is_being_recalled() {
    let mut table = LeaseTable::default();
    let mut events = Events::new();
    let waits = |table: &LeaseTable, intent| table.awaits(INO, session(1), intent);
    let exclusive = table.grant(INO, session(2), LeaseKind::Exclusive).unwrap();
    assert!(!waits(&table, Intent::Read), "it is not recalled yet");
    assert!(!clear(&mut table, 1, Intent::Read, &mut events));
    assert!(waits(&table, Intent::Read));
    assert!(!waits(&table, Intent::Change), "the recall leaves a lease to read");
    table.release(session(2), exclusive, Some(LeaseKind::Read), 0);
    assert!(!waits(&table, Intent::Read));
    assert!(!clear(&mut table, 1, Intent::Change, &mut events));
    assert!(waits(&table, Intent::Change));
    table.grant(INO, session(3), LeaseKind::Read).unwrap();
    assert!(!waits(&table, Intent::Change), "another session has a lease now");
}

#[test]
fn a_silent_session_is_asked_once_and_not_for_each_of_its_leases() {
    let mut table = LeaseTable::default();
    let mut events = Events::new();
    for ino in 0..10 {
        table.note_heard(session(1), 0);
        table.grant(Ino(ino), session(1), LeaseKind::Exclusive).unwrap();
    }
    assert!(!table.clear(Ino(0), session(2), Intent::Read, RECALL_IDLE_NS - 1, &mut events));
    assert!(matches!(events.pop(), Some((_, OwnerEvent::Recall { .. }))));
    for ino in 0..10 {
        assert!(table.clear(Ino(ino), session(2), Intent::Read, RECALL_IDLE_NS, &mut events), "{ino}");
        let revoked = events.pop();
        assert!(matches!(revoked, Some((_, OwnerEvent::Revoked { lease })) if lease.ino == Ino(ino)));
    }
    assert_eq!(table.take_revoked(), (0..10).map(Ino).collect::<Vec<_>>());
    assert!(table.recalls.is_empty());
}

#[test]
fn a_session_that_sends_anything_is_asked_and_keeps_what_nobody_wants() {
    let mut table = LeaseTable::default();
    let mut events = Events::new();
    table.note_heard(session(1), 0);
    let lease = table.grant(INO, session(1), LeaseKind::Exclusive).unwrap();
    table.expire(10 * RECALL_IDLE_NS, &mut events);
    assert!(table.may_write(INO, session(1), lease.id), "silent, but in no session's way");
    table.note_heard(session(1), 10 * RECALL_IDLE_NS);
    let now_ns = 11 * RECALL_IDLE_NS - 1;
    assert!(!table.clear(INO, session(2), Intent::Change, now_ns, &mut events));
    assert!(table.may_write(INO, session(1), lease.id));
}

#[test]
fn leases_of_an_ended_session_count_no_more_and_go_step_by_step() {
    let (mut table, mut events) = (LeaseTable::default(), Events::new());
    let count = 3 * SWEEP_LEASES as u64;
    for ino in 0..count {
        table.grant(Ino(ino), session(1), LeaseKind::Exclusive).unwrap();
    }
    assert!(!table.clear(Ino(5), session(2), Intent::Read, 0, &mut events));
    table.drop_session(session(1));
    assert!(!table.awaits(Ino(5), session(2), Intent::Read) && !table.is_written(Ino(6), session(2)));
    events.clear();
    assert!(table.clear(Ino(5), session(2), Intent::Read, 0, &mut events));
    assert!(table.grant(Ino(7), session(2), LeaseKind::Exclusive).is_some());
    assert!(events.is_empty());
    let mut left = table.inodes.len();
    while !table.ended.is_empty() {
        table.expire(0, &mut events);
        assert!(left - table.inodes.len() <= SWEEP_LEASES);
        left = table.inodes.len();
    }
    assert_eq!((left, table.recalls.len()), (1, 0), "that of the other session");
}

#[derive(Debug, Clone)]
enum Step {
    Want(u64, LeaseKind),
    Answer(u64),
    DropSession(u64),
    Expire,
}

fn step() -> impl Strategy<Value = Step> {
    let kind = prop_oneof![
        Just(LeaseKind::Attr),
        Just(LeaseKind::Read),
        Just(LeaseKind::Shared),
        Just(LeaseKind::Exclusive)
    ];
    prop_oneof![
        6 => (1..5u64, kind).prop_map(|(who, kind)| Step::Want(who, kind)),
        6 => (1..5u64).prop_map(Step::Answer),
        1 => (1..5u64).prop_map(Step::DropSession),
        1 => Just(Step::Expire),
    ]
}

proptest! {
    /// An exclusive lease never coexists with another valid lease, and every recall can be answered.
    #[test]
    fn exclusive_excludes(steps in proptest::collection::vec(step(), 0..200)) {
        let mut table = LeaseTable::default();
        let mut recalls: Vec<(u64, LeaseGrant, Option<LeaseKind>)> = Vec::new();
        let mut now = 0;
        // The session of each client. Ids of sessions are never used again.
        let mut ids = [0, 1, 2, 3, 4];
        for step in steps {
            now += 1_000_000_000;
            let mut events = Events::new();
            let session = |who: u64| session(ids[who as usize]);
            match step {
                Step::Want(who, kind) => {
                    let intent = if kind >= LeaseKind::Shared { Intent::Change } else { Intent::Read };
                    if table.clear(INO, session(who), intent, now, &mut events) {
                        table.grant(INO, session(who), kind);
                    }
                }
                Step::Answer(who) => {
                    recalls.retain(|(holder, lease, keep)| {
                        if *holder == session(who).0 { table.release(session(who), *lease, *keep, now); }
                        *holder != session(who).0
                    });
                }
                Step::DropSession(who) => {
                    table.drop_session(session(who));
                    ids[who as usize] += 10;
                }
                Step::Expire => { table.expire(now, &mut events); }
            }
            for (who, event) in events {
                if let OwnerEvent::Recall { lease, keep, .. } = event {
                    recalls.push((who.0, lease, keep));
                }
            }
            let all = table.inodes.get(&INO).cloned().unwrap_or_default();
            let holders: Vec<Holder> = table.holders(INO).copied().collect();
            let exclusive = holders.iter().filter(|holder| holder.kind == LeaseKind::Exclusive).count();
            prop_assert!(exclusive == 0 || holders.len() == 1, "{holders:?}");
            let queued = all.iter().filter_map(|holder| Some((holder.recall?.queued_ns, INO, holder.id)));
            prop_assert_eq!(&table.recalls, &queued.collect::<BTreeSet<_>>());
            prop_assert_eq!(table.sessions.len(), holders.len());
        }
    }
}
