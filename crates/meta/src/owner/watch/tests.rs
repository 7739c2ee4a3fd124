use super::*;
use proptest::prelude::*;

const DIR: Ino = Ino(9);

fn session(number: u64) -> SessionId {
    SessionId(number)
}

fn name(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn forget(who: u64, text: &str, number: u64) -> (SessionId, OwnerEvent) {
    (session(who), OwnerEvent::Forget { dir: DIR, name: name(text), number })
}

#[test]
fn a_name_is_told_once_and_again_when_it_was_asked_for_again() {
    let (mut table, mut events) = (WatchTable::default(), Events::new());
    assert!(table.clear(DIR, &name("a"), session(1), 0, &mut events), "nobody watches");
    assert!(table.watch_name(DIR, session(2), &name("a"), 0));
    for _ in 0..2 {
        assert!(!table.clear(DIR, &name("a"), session(1), 0, &mut events));
        assert_eq!(events, [forget(2, "a", 1)]);
    }
    assert!(table.clear(DIR, &name("a"), session(2), 0, &mut events), "its own cache knows");
    table.forgot(DIR, session(2), &name("a"), 1);
    assert!(table.clear(DIR, &name("a"), session(1), 0, &mut events));
    assert!(table.watch_name(DIR, session(2), &name("a"), 0));
    assert!(!table.clear(DIR, &name("a"), session(1), 0, &mut events));
    assert_eq!(events.last(), Some(&forget(2, "a", 2)));
}

#[test]
fn an_answer_to_an_older_event_changes_nothing() {
    let (mut table, mut events) = (WatchTable::default(), Events::new());
    table.watch_name(DIR, session(2), &name("a"), 0);
    table.clear(DIR, &name("a"), session(1), 0, &mut events);
    table.watch_moved(DIR, session(2), &name("a"), 0, &mut events);
    assert_eq!(events, [forget(2, "a", 1), forget(2, "a", 2)]);
    for (number, clear) in [(1, false), (2, true), (1, true)] {
        table.forgot(DIR, session(2), &name("a"), number);
        assert_eq!(table.clear(DIR, &name("a"), session(1), 0, &mut events), clear, "{number}");
    }
    assert_eq!(events.len(), 2);
}

#[test]
fn a_listing_may_bring_back_every_name() {
    let (mut table, mut events) = (WatchTable::default(), Events::new());
    table.watch_all(DIR, session(2), 0);
    assert!(!table.clear(DIR, &name("a"), session(1), 0, &mut events));
    assert!(!table.watch_all(DIR, session(2), 0), "one of them is about to change");
    table.forgot(DIR, session(2), &name("a"), 1);
    assert!(table.clear(DIR, &name("a"), session(1), 0, &mut events));
    assert!(table.watch_all(DIR, session(2), 0));
    assert!(!table.clear(DIR, &name("a"), session(1), 0, &mut events));
}

#[test]
fn a_session_is_told_only_of_names_that_it_asked_for() {
    let (mut table, mut events) = (WatchTable::default(), Events::new());
    table.watch_name(DIR, session(2), &name("a"), 0);
    assert!(table.clear(DIR, &name("b"), session(1), 0, &mut events));
    assert_eq!(events, []);
    for number in 0..=NAMES_MAX {
        table.watch_name(DIR, session(2), &name(&number.to_string()), 0);
    }
    assert!(!table.clear(DIR, &name("b"), session(1), 0, &mut events), "too many to remember");
}

#[test]
fn names_that_a_session_no_longer_caches_make_room() {
    let (mut table, mut events) = (WatchTable::default(), Events::new());
    for number in 0..NAMES_MAX as u64 {
        table.watch_name(DIR, session(2), &name(&number.to_string()), number);
    }
    let now_ns = KEPT_NS + NAMES_MAX as u64 * 3 / 4;
    table.watch_name(DIR, session(2), &name("new"), now_ns);
    assert!(table.clear(DIR, &name("b"), session(1), now_ns, &mut events));
    assert!(!table.clear(DIR, &name("new"), session(1), now_ns, &mut events));
}

#[test]
fn watches_run_out_and_so_do_names_without_a_confirmation() {
    let (mut table, mut events) = (WatchTable::default(), Events::new());
    table.watch_name(DIR, session(2), &name("a"), 0);
    table.watch_name(Ino(10), session(2), &name("a"), 0);
    assert!(!table.clear(DIR, &name("a"), session(1), 5, &mut events));
    assert!(table.awaits(DIR, &name("a"), session(1), KEPT_NS - 1));
    assert!(!table.awaits(DIR, &name("a"), session(1), KEPT_NS));
    assert!(table.clear(Ino(10), &name("a"), session(1), KEPT_NS, &mut events));
    table.watch_name(DIR, session(2), &name("b"), 6);
    assert!(table.expire(KEPT_NS - 1).is_empty());
    assert_eq!(table.expire(KEPT_NS), [DIR], "it last received the name at 0");
    assert!(table.clear(DIR, &name("a"), session(1), KEPT_NS, &mut events));
    assert!(!table.clear(DIR, &name("b"), session(1), KEPT_NS + 5, &mut events), "it was asked for later");
    assert_eq!(table.expire(KEPT_NS + 6), [DIR]);
    assert!(table.dirs.is_empty() && table.queue.is_empty() && table.sessions.is_empty());
}

#[test]
fn a_change_waits_on_only_while_every_session_with_the_name_is_being_told() {
    let (mut table, mut events) = (WatchTable::default(), Events::new());
    table.watch_name(DIR, session(2), &name("a"), 0);
    assert!(!table.awaits(DIR, &name("a"), session(1), 0), "it is not told yet");
    table.clear(DIR, &name("a"), session(1), 0, &mut events);
    assert!(table.awaits(DIR, &name("a"), session(1), 0));
    table.watch_name(DIR, session(3), &name("a"), 0);
    assert!(!table.awaits(DIR, &name("a"), session(1), 0), "another session has it now");
    table.clear(DIR, &name("a"), session(1), 0, &mut events);
    table.forgot(DIR, session(2), &name("a"), 1);
    assert!(table.awaits(DIR, &name("a"), session(1), 0));
    table.forgot(DIR, session(3), &name("a"), 2);
    assert!(!table.awaits(DIR, &name("a"), session(1), 0));
}

#[test]
fn a_silent_session_delays_all_changes_of_a_directory_for_one_term_together() {
    let (mut table, mut events) = (WatchTable::default(), Events::new());
    table.watch_all(DIR, session(2), 0);
    for number in 0..10 {
        let now_ns = KEPT_NS * number / 10;
        assert!(!table.clear(DIR, &name(&number.to_string()), session(1), now_ns, &mut events));
    }
    assert_eq!(table.expire(KEPT_NS), [DIR]);
    for number in 0..20 {
        assert!(table.clear(DIR, &name(&number.to_string()), session(1), KEPT_NS, &mut events));
    }
}

#[test]
fn the_number_of_remembered_names_is_bounded() {
    let (mut table, mut events) = (WatchTable::default(), Events::new());
    table.watch_all(DIR, session(2), 0);
    for number in 0..3 * NAMES_MAX {
        let name = name(&number.to_string());
        assert!(!table.clear(DIR, &name, session(1), 0, &mut events));
        table.forgot(DIR, session(2), &name, number as u64 + 1);
        assert!(table.clear(DIR, &name, session(1), 0, &mut events), "{number}");
        let Names::AllBut(told) = &table.dirs[&DIR][0].names else { panic!("it listed the directory") };
        assert!(told.len() <= NAMES_MAX);
    }
}

#[derive(Debug, Clone)]
enum Step {
    Ask(u64, usize),
    List(u64),
    Move(u64, usize),
    Change(u64, usize),
    Answer(u64),
    DropSession(u64),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let (who, which) = (1..4u64, 0..3usize);
    prop_oneof![
        6 => (who.clone(), which.clone()).prop_map(|(who, which)| Step::Ask(who, which)),
        1 => who.clone().prop_map(Step::List),
        2 => (who.clone(), which.clone()).prop_map(|(who, which)| Step::Move(who, which)),
        8 => (who.clone(), which).prop_map(|(who, which)| Step::Change(who, which)),
        6 => who.clone().prop_map(Step::Answer),
        1 => who.prop_map(Step::DropSession),
        2 => (1..KEPT_NS).prop_map(Step::Wait),
    ]
}

proptest! {
    /// No session caches a name that another session changes, in any order of events, and every name can be changed in
    /// the end.
    #[test]
    fn nobody_has_a_name_that_changes(steps in proptest::collection::vec(step(), 0..200)) {
        let names = ["a", "b", "c"].map(name);
        let mut table = WatchTable::default();
        let mut events = Events::new();
        // Each session's cached names with their expiry, and the events on their way to it.
        let mut caches: HashMap<(u64, usize), u64> = HashMap::new();
        let mut inboxes: BTreeMap<u64, Vec<(Bytes, u64)>> = BTreeMap::new();
        let mut now = 0;
        let term_ns = NAME_TERM.as_nanos() as u64;
        for step in steps {
            match step {
                Step::Ask(who, which) => {
                    if table.watch_name(DIR, session(who), &names[which], now) {
                        caches.insert((who, which), now + term_ns);
                    }
                }
                Step::List(who) => {
                    if table.watch_all(DIR, session(who), now) {
                        caches.extend((0..3).map(|which| ((who, which), now + term_ns)));
                    }
                }
                Step::Move(who, which) => {
                    if table.clear(DIR, &names[which], session(who), now, &mut events) {
                        table.watch_moved(DIR, session(who), &names[which], now, &mut events);
                        caches.insert((who, which), now + term_ns);
                    }
                }
                Step::Change(who, which) => {
                    if table.clear(DIR, &names[which], session(who), now, &mut events) {
                        let stale = (1..4).filter(|other| *other != who)
                            .find(|other| caches.get(&(*other, which)).is_some_and(|until| *until > now));
                        prop_assert!(stale.is_none(), "{stale:?} has {which}");
                    }
                }
                Step::Answer(who) => {
                    for (name, number) in inboxes.remove(&who).unwrap_or_default() {
                        let which = names.iter().position(|other| *other == name).unwrap();
                        caches.remove(&(who, which));
                        table.forgot(DIR, session(who), &name, number);
                    }
                }
                Step::DropSession(who) => {
                    table.drop_session(session(who));
                    inboxes.remove(&who);
                    caches.retain(|(holder, _), _| *holder != who);
                }
                Step::Wait(ns) => {
                    now += ns;
                    table.expire(now);
                }
            }
            let watches = table.dirs.get(&DIR).map_or(&[][..], Vec::as_slice);
            let queued: BTreeSet<_> = watches.iter().map(|watch| (watch.queued_ns, DIR, watch.session)).collect();
            prop_assert_eq!(&table.queue, &queued);
            prop_assert!(watches.iter().all(|watch| watch.queued_ns <= watch.due_ns()));
            prop_assert_eq!(table.sessions.len(), watches.len());
            for (who, event) in events.drain(..) {
                let OwnerEvent::Forget { name, number, .. } = event else { panic!("{event:?}") };
                inboxes.entry(who.0).or_default().push((name, number));
            }
        }
        table.clear(DIR, &names[0], session(1), now, &mut events);
        table.expire(now + KEPT_NS);
        prop_assert!(table.clear(DIR, &names[0], session(1), now + KEPT_NS, &mut events));
    }
}

#[test]
fn a_directory_is_shared_while_several_sessions_change_names_that_others_cache() {
    let (mut table, mut events) = (WatchTable::default(), Events::new());
    let changes = [(1, 0, false), (2, 1, false), (2, 2, false)];
    for (who, now_ns, shared) in changes {
        table.clear(DIR, &name("a"), session(who), now_ns, &mut events);
        assert_eq!(table.is_shared(DIR, now_ns), shared, "nobody caches it: {now_ns}");
    }
    table.watch_name(DIR, session(3), &name("a"), 3);
    table.clear(DIR, &name("a"), session(1), 4, &mut events);
    assert!(
        table.is_shared(DIR, 4)
            && table.is_shared(DIR, SHARED_NS + 3)
            && !table.is_shared(DIR, SHARED_NS + 4)
    );
    table.clear(DIR, &name("b"), session(2), SHARED_NS, &mut events);
    assert!(table.is_shared(DIR, 2 * SHARED_NS - 1), "changes of others go on");
    assert!(!table.is_shared(Ino(10), 4));
}

#[test]
fn old_changes_are_not_remembered() {
    let (mut table, mut events) = (WatchTable::default(), Events::new());
    for number in 0..4 * CHANGED_DIRS as u64 {
        table.clear(Ino(number), &name("a"), session(1), number * SHARED_NS, &mut events);
    }
    assert!(table.changed.len() <= CHANGED_DIRS + 1);
}
