//! Cached names and attributes: every session that may cache one is told of a change before it happens.

use super::*;
use crate::owner::watch::KEPT_NS;
use wire::meta::{RenameMode, SetAttr};
use wire::object::{Caller, Conditions, ObjectBody, ObjectMeta, ObjectName, ObjectRequest};

use FileKind::{Directory, Regular};

fn lookup(parent: Ino, text: &str) -> MetaRequest {
    MetaRequest::Lookup { parent, name: name(text) }
}

fn unlink(parent: Ino, text: &str) -> MetaRequest {
    MetaRequest::Unlink { parent, name: name(text) }
}

fn key(bucket: Ino, text: &str) -> ObjectName {
    let parts = text.trim_end_matches('/').split('/').map(name).collect();
    ObjectName { bucket, parts, directory: text.ends_with('/') }
}

fn delete(bucket: Ino, keys: &[&str]) -> MetaRequest {
    let keys = keys.iter().map(|text| (key(bucket, text), Conditions::default())).collect();
    MetaRequest::Object(Box::new(ObjectRequest::Delete { keys, caller: Caller::root() }))
}

fn put(bucket: Ino, text: &str) -> MetaRequest {
    let body = ObjectBody::Pieces { pieces: Vec::new(), size: 0 };
    let (meta, conditions) = (ObjectMeta::default(), Conditions::default());
    let (name, caller) = (key(bucket, text), Caller::root());
    MetaRequest::Object(Box::new(ObjectRequest::Put { name, body, meta, conditions, caller }))
}

impl Ledger {
    /// Whether the session may cache the answer, which says what a name is or that it is missing.
    #[track_caller]
    fn keeps(&mut self, session: SessionId, request: MetaRequest) -> bool {
        match self.ask(session, request.clone()) {
            Ok(MetaReply::Entry { keep, .. } | MetaReply::Missing { keep } | MetaReply::Dir { keep, .. }) => {
                keep
            }
            other => panic!("{request:?}: {other:?}"),
        }
    }

    /// Executes a request of `actor`. Returns the names that `other` had to forget first, in order.
    #[track_caller]
    fn told(&mut self, actor: SessionId, request: &MetaRequest, other: SessionId) -> Vec<(Ino, String)> {
        self.core.take_events();
        let id = self.next_id(actor);
        let mut told = Vec::new();
        for _ in 0..10 {
            match self.core.execute(id, Terms::default(), request, self.now) {
                Executed::Reply { reply, .. } => {
                    reply.unwrap();
                    return told;
                }
                Executed::Wait(_) => {}
            }
            for (session, event) in self.core.take_events() {
                assert_eq!(session, other);
                if let OwnerEvent::Forget { dir, name, .. } = &event {
                    told.push((*dir, String::from_utf8_lossy(name).into_owned()));
                }
                self.answer_event(session, event);
            }
        }
        panic!("waits for ever: {request:?}");
    }

    /// Lets `actor` begin a request that has to wait. Returns the events that were sent.
    #[track_caller]
    fn waits(&mut self, id: RequestId, request: &MetaRequest) -> Vec<(SessionId, OwnerEvent)> {
        let executed = self.core.execute(id, Terms::default(), request, self.now);
        assert!(matches!(executed, Executed::Wait(_)), "{executed:?}");
        self.core.take_events()
    }
}

/// Two sessions, a bucket with `a/x`, `b/y` and `z`, and the inodes of bucket, `a` and `b`.
fn world() -> (Ledger, SessionId, SessionId, [Ino; 3]) {
    let mut ledger = Ledger::new();
    let (mount, gate, maker) = (ledger.session(), ledger.session(), ledger.session());
    let bucket = ledger.make(maker, Ino::ROOT, "bucket", Directory);
    for text in ["a/x", "b/y", "z"] {
        ledger.ask(maker, put(bucket, text)).unwrap();
    }
    let dirs = ["a", "b"].map(|dir| ledger.attr(maker, lookup(bucket, dir)).ino);
    ledger.ask(maker, MetaRequest::CloseSession).unwrap();
    (ledger, mount, gate, [bucket, dirs[0], dirs[1]])
}

fn pairs(names: &[(Ino, &str)]) -> Vec<(Ino, String)> {
    names.iter().map(|(dir, name)| (*dir, (*name).to_owned())).collect()
}

#[test]
fn every_name_of_a_batch_is_told_in_one_round() {
    let (mut ledger, mount, gate, [bucket, a, b]) = world();
    for (dir, text) in [(bucket, "a"), (bucket, "b"), (a, "x"), (b, "y")] {
        assert!(ledger.keeps(mount, lookup(dir, text)));
    }
    ledger.core.take_events();
    let (request, id) = (delete(bucket, &["a/x", "b/y"]), ledger.next_id(gate));
    let events = ledger.waits(id, &request);
    let mut forgotten = Vec::new();
    for (session, event) in events {
        assert_eq!(session, mount);
        if let OwnerEvent::Forget { dir, name, .. } = &event {
            forgotten.push((*dir, String::from_utf8_lossy(name).into_owned()));
        }
        ledger.answer_event(session, event);
    }
    assert_eq!(forgotten, pairs(&[(a, "x"), (bucket, "a"), (b, "y"), (bucket, "b")]));
    assert!(matches!(
        ledger.core.execute(id, Terms::default(), &request, ledger.now),
        Executed::Reply { reply: Ok(_), .. }
    ));
}

#[test]
fn names_are_told_though_the_leases_were_given_up_for_something_else() {
    let (mut ledger, mount, gate, [bucket, a, _]) = world();
    for (dir, text) in [(bucket, "a"), (a, "x"), (a, "missing")] {
        assert!(ledger.keeps(mount, lookup(dir, text)));
    }
    // Changes of attributes of the file and of another name in its directory take both leases.
    let x = ledger.attr(gate, lookup(a, "x")).ino;
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    assert_eq!(ledger.told(gate, &MetaRequest::SetAttr { ino: x, set }, mount), []);
    assert_eq!(ledger.told(gate, &put(bucket, "a/other"), mount), [], "it never asked for that name");
    assert_eq!(ledger.told(gate, &unlink(a, "x"), mount), pairs(&[(a, "x")]));
    assert_eq!(ledger.told(gate, &put(bucket, "a/missing"), mount), pairs(&[(a, "missing")]));
}

#[test]
fn two_changes_of_one_directory_are_both_told() {
    let (mut ledger, mount, gate, [bucket, a, _]) = world();
    ledger.ask(gate, put(bucket, "a/w")).unwrap();
    for text in ["w", "x"] {
        assert!(ledger.keeps(mount, lookup(a, text)));
    }
    ledger.core.take_events();
    let first = ledger.next_id(gate);
    let events = ledger.waits(first, &unlink(a, "w"));
    let second = RequestId { slot: 2, ..first };
    let more = ledger.waits(second, &unlink(a, "x"));
    let told = |events: &[(SessionId, OwnerEvent)], text: &str| {
        events.iter().any(|(_, event)| matches!(event, OwnerEvent::Forget { name, .. } if name == text))
    };
    assert!(told(&events, "w") && told(&more, "x"), "{events:?} {more:?}");
}

#[test]
fn what_is_said_of_a_name_that_is_about_to_change_is_not_kept() {
    let (mut ledger, mount, gate, [_, a, _]) = world();
    assert!(ledger.keeps(mount, lookup(a, "x")));
    ledger.core.take_events();
    let (request, id) = (unlink(a, "x"), ledger.next_id(gate));
    let events = ledger.waits(id, &request);
    let listing = || MetaRequest::ReadDir { ino: a, after: None, limit: 10 };
    assert!(!ledger.keeps(mount, lookup(a, "x")) && !ledger.keeps(mount, listing()));
    assert!(ledger.keeps(mount, lookup(a, "other")), "another name is not concerned");
    for (session, event) in events {
        ledger.answer_event(session, event);
    }
    ledger.core.execute(id, Terms::default(), &request, ledger.now);
    ledger.answer_recalls();
    assert!(matches!(
        ledger.core.execute(id, Terms::default(), &request, ledger.now),
        Executed::Reply { reply: Ok(_), .. }
    ));
    assert!(ledger.keeps(mount, lookup(a, "x")) && ledger.keeps(mount, listing()));
}

#[test]
fn every_operation_tells_the_names_that_it_changes() {
    let rename = |from: (Ino, &str), to: (Ino, &str), mode| MetaRequest::Rename {
        parent: from.0,
        name: name(from.1),
        new_parent: to.0,
        new_name: name(to.1),
        mode,
        whiteout: None,
    };
    type Case<'a> = (MetaRequest, Vec<(Ino, &'a str)>);
    let cases = |bucket: Ino, a: Ino, b: Ino, empty: Ino, x: Ino| -> Vec<Case<'static>> {
        vec![
            (MetaRequest::Make(node(a, "new", Regular)), vec![(a, "new")]),
            (MetaRequest::Link { ino: x, parent: b, name: name("l") }, vec![(b, "l")]),
            (unlink(a, "x"), vec![(a, "x")]),
            (MetaRequest::Rmdir { parent: bucket, name: name("empty") }, vec![(bucket, "empty")]),
            (rename((a, "x"), (b, "n"), RenameMode::Replace), vec![(a, "x"), (b, "n")]),
            (rename((a, "x"), (b, "y"), RenameMode::Replace), vec![(a, "x"), (b, "y")]),
            (rename((a, "x"), (b, "y"), RenameMode::Exchange), vec![(a, "x"), (b, "y")]),
            (put(bucket, "z"), vec![(bucket, "z")]),
            (put(bucket, "c/d/e"), vec![(bucket, "c")]),
            (put(bucket, "c/d/"), vec![(bucket, "c")]),
            (put(bucket, "a/d/"), vec![(a, "d")]),
            (put(bucket, "empty"), vec![(bucket, "empty")]),
            (delete(bucket, &["a/x"]), vec![(a, "x"), (bucket, "a")]),
            (delete(empty, &["x"]), vec![]),
        ]
    };
    for at in 0..cases(Ino(0), Ino(0), Ino(0), Ino(0), Ino(0)).len() {
        let (mut ledger, mount, gate, [bucket, a, b]) = world();
        let empty = ledger.make(gate, bucket, "empty", Directory);
        for dir in [bucket, a, b] {
            assert!(ledger.keeps(mount, MetaRequest::ReadDir { ino: dir, after: None, limit: 100 }));
        }
        let x = ledger.attr(mount, lookup(a, "x")).ino;
        let (request, expected) = cases(bucket, a, b, empty, x).swap_remove(at);
        assert_eq!(ledger.told(gate, &request, mount), pairs(&expected), "{request:?}");
    }
}

#[test]
fn who_makes_links_or_moves_a_name_is_told_of_it_afterwards() {
    let (mut ledger, mount, gate, [bucket, a, b]) = world();
    assert!(ledger.keeps(mount, MetaRequest::Make(node(a, "made", Regular))));
    let x = ledger.attr(gate, lookup(a, "x")).ino;
    ledger.now.boot_ns += KEPT_NS;
    ledger.core.expire_recalls(ledger.now);
    assert!(ledger.keeps(mount, MetaRequest::Link { ino: x, parent: b, name: name("linked") }));
    let moved = (name("z"), name("moved"));
    ledger
        .ask(
            mount,
            MetaRequest::Rename {
                parent: bucket,
                name: moved.0,
                new_parent: a,
                new_name: moved.1,
                mode: RenameMode::Replace,
                whiteout: None,
            },
        )
        .unwrap();
    for (dir, text) in [(b, "linked"), (a, "moved")] {
        assert_eq!(ledger.told(gate, &unlink(dir, text), mount), pairs(&[(dir, text)]));
        assert_eq!(ledger.told(gate, &put(dir, text), mount), [], "it has forgotten that it is there");
    }
}

#[test]
fn a_name_moved_onto_one_that_is_being_told_is_told_again() {
    let (mut ledger, mount, gate, [_, a, _]) = world();
    assert!(ledger.keeps(mount, lookup(a, "x")) && ledger.keeps(mount, lookup(a, "y")));
    ledger.core.take_events();
    let (request, id) = (MetaRequest::Make(node(a, "y", Regular)), ledger.next_id(gate));
    let before = ledger.waits(id, &request);
    let (parent, from, to) = (a, name("x"), name("y"));
    let moving = MetaRequest::Rename {
        parent,
        name: from,
        new_parent: a,
        new_name: to,
        mode: RenameMode::Replace,
        whiteout: None,
    };
    let own = ledger.next_id(mount);
    assert!(matches!(
        ledger.core.execute(own, Terms::default(), &moving, ledger.now),
        Executed::Reply { reply: Ok(_), .. }
    ));
    let again = ledger.core.take_events();
    assert!(matches!(&again[..], [(_, OwnerEvent::Forget { name, .. })] if name == "y"), "{again:?}");
    for (session, event) in before {
        ledger.answer_event(session, event);
    }
    // The name exists now; a request that removes it waits until the newer answer is forgotten.
    let (request, id) = (unlink(a, "y"), ledger.next_id(gate));
    let more = ledger.waits(id, &request);
    assert!(!more.iter().any(|(_, event)| matches!(event, OwnerEvent::Forget { .. })), "{more:?}");
    for (session, event) in more {
        ledger.answer_event(session, event);
    }
    ledger.waits(id, &request);
    for (session, event) in again {
        ledger.answer_event(session, event);
    }
    assert!(matches!(
        ledger.core.execute(id, Terms::default(), &request, ledger.now),
        Executed::Reply { reply: Ok(_), .. }
    ));
}

#[test]
fn a_session_that_never_answers_holds_up_a_name_for_as_long_as_it_may_have_it() {
    let (mut ledger, mount, gate, [_, a, _]) = world();
    assert!(ledger.keeps(mount, lookup(a, "new")));
    ledger.core.take_events();
    let (request, id) = (MetaRequest::Make(node(a, "new", Regular)), ledger.next_id(gate));
    ledger.waits(id, &request);
    ledger.now.boot_ns += KEPT_NS - 1;
    assert_eq!(ledger.core.expire_recalls(ledger.now), []);
    ledger.now.boot_ns += 1;
    assert_eq!(ledger.core.expire_recalls(ledger.now), [a]);
    assert!(matches!(
        ledger.core.execute(id, Terms::default(), &request, ledger.now),
        Executed::Reply { reply: Ok(_), .. }
    ));
}

#[test]
fn a_session_that_ends_holds_up_nothing() {
    let (mut ledger, mount, gate, [_, a, _]) = world();
    assert!(ledger.keeps(mount, lookup(a, "x")));
    ledger.core.take_events();
    let (request, id) = (unlink(a, "x"), ledger.next_id(gate));
    ledger.waits(id, &request);
    ledger.ask(mount, MetaRequest::CloseSession).unwrap();
    assert!(matches!(
        ledger.core.execute(id, Terms::default(), &request, ledger.now),
        Executed::Reply { reply: Ok(_), .. }
    ));
}

#[test]
fn a_deletion_tells_of_a_directory_only_if_that_may_go() {
    let (mut ledger, mount, gate, [bucket, a, _]) = world();
    for text in ["a/v", "a/w"] {
        ledger.ask(gate, put(bucket, text)).unwrap();
    }
    assert!(ledger.keeps(mount, lookup(bucket, "a")) && ledger.keeps(mount, lookup(a, "x")));
    for text in ["v", "w"] {
        assert!(ledger.keeps(mount, lookup(a, text)));
    }
    assert_eq!(ledger.told(gate, &delete(bucket, &["a/v"]), mount), pairs(&[(a, "v")]));
    let rest = pairs(&[(a, "w"), (bucket, "a"), (a, "x")]);
    assert_eq!(ledger.told(gate, &delete(bucket, &["a/w", "a/x"]), mount), rest);
}

#[test]
fn creates_of_many_clients_in_one_directory_send_nothing_to_the_others() {
    let mut ledger = Ledger::new();
    let clients: Vec<SessionId> = (0..64).map(|_| ledger.session()).collect();
    let shared = ledger.make(clients[0], Ino::ROOT, "shared", Directory);
    for client in &clients {
        assert!(ledger.keeps(*client, lookup(Ino::ROOT, "shared")));
    }
    ledger.core.take_events();
    let mut events = 0;
    for number in 0..640 {
        let (client, text) = (clients[number % 64], format!("{number}"));
        assert!(ledger.keeps(client, lookup(shared, &text)));
        ledger.make(client, shared, &text, Regular);
        events += ledger
            .core
            .take_events()
            .iter()
            .filter(|(_, event)| matches!(event, OwnerEvent::Forget { .. }))
            .count();
    }
    assert_eq!(events, 0);
}
