//! Rights of callers that the owner does not trust.

use wire::guard::Guard;
use wire::message::Caller;
use wire::meta::{RenameMode, SetAttr, XattrMode};
use wire::object::ObjectRequest;
use wire::tier::TierRequest;

use super::*;

/// Groups: 100 of everybody, 50 of Ann and Ben.
fn ann() -> Caller {
    Caller { uid: 1000, gid: 100, groups: vec![50] }
}

fn ben() -> Caller {
    Caller { uid: 1001, gid: 100, groups: vec![50] }
}

fn eve() -> Caller {
    Caller { uid: 1002, gid: 100, groups: vec![] }
}

const OK: Result<(), FsError> = Ok(());
const DENIED: Result<(), FsError> = Err(FsError::Denied);
const REFUSED: Result<(), FsError> = Err(FsError::NotPermitted);

struct House {
    ledger: Ledger,
    me: SessionId,
}

impl House {
    fn new() -> Self {
        let mut ledger = Ledger::new();
        let me = ledger.session();
        Self { ledger, me }
    }

    fn make(&mut self, parent: Ino, text: &str, kind: FileKind, (uid, gid, mode): (u32, u32, u32)) -> Ino {
        let make = MakeNode { uid, gid, mode, ..node(parent, text, kind) };
        let ino = self.ledger.attr(self.me, MetaRequest::Make(make)).ino;
        // A new file inherits the group of a set-gid directory; here the given one is wanted.
        let set = SetAttr { gid: Some(gid), mode: Some(mode), ..SetAttr::default() };
        self.ledger.attr(self.me, MetaRequest::SetAttr { ino, set });
        ino
    }

    fn dir(&mut self, text: &str, owner: (u32, u32, u32)) -> Ino {
        self.make(Ino::ROOT, text, FileKind::Directory, owner)
    }

    fn file(&mut self, parent: Ino, text: &str, owner: (u32, u32, u32)) -> Ino {
        self.make(parent, text, FileKind::Regular, owner)
    }

    /// Asks in a session without leases and open files.
    fn ask(&mut self, caller: &Caller, request: MetaRequest) -> Result<(), FsError> {
        let session = self.ledger.session();
        self.ask_in(session, caller, request)
    }

    fn ask_in(&mut self, session: SessionId, caller: &Caller, request: MetaRequest) -> Result<(), FsError> {
        let id = self.ledger.next_id(session);
        for _ in 0..10 {
            match self.ledger.core.execute(
                id,
                Terms { caller: Some(caller), ..Terms::default() },
                &request,
                self.ledger.now,
            ) {
                Executed::Reply { reply, .. } => return reply.map(drop),
                Executed::Wait(_) => self.ledger.answer_recalls(),
            }
        }
        panic!("waits for ever: {request:?}");
    }

    fn mode(&mut self, ino: Ino) -> u32 {
        self.ledger.stat(self.me, ino).mode
    }
}

fn open(ino: Ino, intent: OpenIntent) -> MetaRequest {
    MetaRequest::Open { ino, intent }
}

fn set(ino: Ino, set: SetAttr) -> MetaRequest {
    MetaRequest::SetAttr { ino, set }
}

fn unlink(parent: Ino, text: &str) -> MetaRequest {
    MetaRequest::Unlink { parent, name: name(text) }
}

fn rename((parent, from): (Ino, &str), (new_parent, to): (Ino, &str)) -> MetaRequest {
    let mode = RenameMode::Replace;
    MetaRequest::Rename { parent, name: name(from), new_parent, new_name: name(to), mode, whiteout: None }
}

#[test]
fn reading_and_writing_go_by_mode_bits_and_lists() {
    let mut house = House::new();
    let home = house.dir("home", (1000, 100, 0o750));
    let private = house.dir("private", (1000, 100, 0o700));
    let file = house.file(home, "file", (1000, 50, 0o640));
    let cases: Vec<(Caller, MetaRequest, Result<(), FsError>)> = vec![
        (ann(), open(file, OpenIntent::Write), OK),
        (ben(), open(file, OpenIntent::Read), OK),
        (ben(), open(file, OpenIntent::Write), DENIED),
        (ben(), open(file, OpenIntent::Truncate), DENIED),
        (eve(), open(file, OpenIntent::Read), DENIED),
        (Caller::root(), open(file, OpenIntent::Truncate), OK),
        (ben(), MetaRequest::Acquire { ino: file, kind: LeaseKind::Read }, OK),
        (ben(), MetaRequest::Acquire { ino: file, kind: LeaseKind::Exclusive }, DENIED),
        (ann(), MetaRequest::Acquire { ino: file, kind: LeaseKind::Exclusive }, OK),
        (eve(), MetaRequest::Acquire { ino: file, kind: LeaseKind::Attr }, OK),
        (eve(), MetaRequest::Acquire { ino: file, kind: LeaseKind::Read }, DENIED),
        (eve(), MetaRequest::GetMap { ino: file, off: 0, limit: 1 }, DENIED),
        (eve(), MetaRequest::NoteRead { ino: file, atime_ns: 5 }, DENIED),
        (ben(), MetaRequest::Punch { ino: file, off: 0, len: 1 }, DENIED),
        (eve(), MetaRequest::Lookup { parent: home, name: name("file") }, OK),
        (eve(), MetaRequest::Lookup { parent: private, name: name("x") }, DENIED),
        (eve(), MetaRequest::ReadDir { ino: private, after: None, limit: 9 }, DENIED),
        (ann(), MetaRequest::ReadDir { ino: private, after: None, limit: 9 }, OK),
        (eve(), MetaRequest::GetAttr { ino: file }, OK),
        (eve(), set(file, SetAttr { size: Some(0), ..SetAttr::default() }), DENIED),
    ];
    for (caller, request, expected) in cases {
        assert_eq!(house.ask(&caller, request.clone()), expected, "{caller:?} {request:?}");
    }
    // A session that has opened a file goes on with it when it would not be let in any more.
    let session = house.ledger.session();
    assert_eq!(house.ask_in(session, &ben(), open(file, OpenIntent::Read)), OK);
    house.ask(&ann(), set(file, SetAttr { mode: Some(0o600), ..SetAttr::default() })).unwrap();
    assert_eq!(house.ask_in(session, &ben(), MetaRequest::GetMap { ino: file, off: 0, limit: 1 }), OK);
    assert_eq!(house.ask_in(session, &ben(), open(file, OpenIntent::Read)), DENIED);
}

#[test]
fn names_are_made_and_removed_by_those_who_may_write_the_directory() {
    let mut house = House::new();
    let home = house.dir("home", (1000, 100, 0o755));
    let tmp = house.dir("tmp", (0, 0, 0o1777));
    let team = house.dir("team", (0, 50, 0o2775));
    let [_, anns, bens] = [
        house.file(home, "file", (1000, 100, 0o644)),
        house.file(tmp, "anns", (1000, 100, 0o666)),
        house.file(tmp, "bens", (1001, 100, 0o666)),
    ];
    house.make(tmp, "dir", FileKind::Directory, (1000, 100, 0o555));
    let make = |caller: &Caller, parent, text, gid, mode| {
        let uid = caller.uid;
        MetaRequest::Make(MakeNode { uid, gid, mode, ..node(parent, text, FileKind::Regular) })
    };
    let device = MakeNode { uid: 1000, gid: 100, ..node(home, "device", FileKind::BlockDevice) };
    let cases: Vec<(Caller, MetaRequest, Result<(), FsError>)> = vec![
        (ann(), make(&ann(), home, "1", 100, 0o644), OK),
        (ben(), make(&ben(), home, "2", 100, 0o644), DENIED),
        (eve(), make(&eve(), tmp, "3", 100, 0o644), OK),
        // Nobody makes files for others, or for groups of others.
        (eve(), make(&ann(), tmp, "4", 100, 0o644), REFUSED),
        (eve(), make(&eve(), tmp, "5", 50, 0o644), REFUSED),
        (ann(), make(&ann(), tmp, "6", 50, 0o2755), OK),
        (eve(), make(&eve(), team, "7", 100, 0o644), DENIED),
        (ann(), make(&ann(), team, "8", 77, 0o644), OK),
        (ann(), MetaRequest::Make(device.clone()), REFUSED),
        (Caller::root(), MetaRequest::Make(device), OK),
        (ben(), unlink(home, "file"), DENIED),
        (ben(), unlink(home, "missing"), DENIED),
        (ann(), unlink(home, "missing"), Err(FsError::NotFound)),
        (ben(), unlink(tmp, "anns"), DENIED),
        (ben(), rename((tmp, "anns"), (tmp, "other")), DENIED),
        (ben(), rename((tmp, "bens"), (tmp, "anns")), DENIED),
        (ben(), MetaRequest::Link { ino: bens, parent: home, name: name("link") }, DENIED),
        (ben(), MetaRequest::Link { ino: bens, parent: tmp, name: name("link") }, OK),
        // The directory is Ann's, but its entry `..` would change.
        (ann(), rename((tmp, "dir"), (home, "dir")), DENIED),
        (ann(), rename((tmp, "dir"), (tmp, "dir 2")), OK),
        (ann(), rename((tmp, "anns"), (home, "anns")), OK),
        (ann(), unlink(home, "file"), OK),
        (ben(), MetaRequest::Rmdir { parent: Ino::ROOT, name: name("home") }, DENIED),
    ];
    for (caller, request, expected) in cases {
        assert_eq!(house.ask(&caller, request.clone()), expected, "{caller:?} {request:?}");
    }
    assert_eq!(house.ledger.stat(house.me, anns).nlink, 1);
}

#[test]
fn attributes_are_changed_by_owners() {
    let mut house = House::new();
    let file = house.file(Ino::ROOT, "file", (1000, 100, 0o666));
    let none = SetAttr::default;
    let xattr = |text: &str| MetaRequest::SetXattr {
        ino: file,
        name: name(text),
        value: name("1"),
        mode: XattrMode::Set,
    };
    let guard = MetaRequest::SetGuard { ino: file, guard: Guard::default() };
    let cases: Vec<(Caller, MetaRequest, Result<(), FsError>)> = vec![
        (ben(), set(file, SetAttr { mode: Some(0o777), ..none() }), REFUSED),
        (ann(), set(file, SetAttr { uid: Some(1001), ..none() }), REFUSED),
        (ann(), set(file, SetAttr { uid: Some(1000), ..none() }), OK),
        (ben(), set(file, SetAttr { uid: Some(1000), ..none() }), REFUSED),
        (ann(), set(file, SetAttr { gid: Some(77), ..none() }), REFUSED),
        (ann(), set(file, SetAttr { gid: Some(50), ..none() }), OK),
        (ben(), set(file, SetAttr { gid: Some(100), ..none() }), REFUSED),
        (ann(), set(file, SetAttr { mode: Some(0o2666), ..none() }), OK),
        (ann(), set(file, SetAttr { gid: Some(100), mode: Some(0o666), ..none() }), OK),
        // A user with the right to write may set the time of the change.
        (ben(), set(file, SetAttr { mtime_ns: Some(5), ..none() }), OK),
        (ben(), xattr("user.a"), OK),
        (ben(), xattr("trusted.a"), REFUSED),
        (ben(), xattr("security.a"), REFUSED),
        (ben(), MetaRequest::GetXattr { ino: file, name: name("user.a") }, OK),
        (ben(), MetaRequest::GetXattr { ino: file, name: name("trusted.a") }, REFUSED),
        (ben(), MetaRequest::RemoveXattr { ino: file, name: name("system.posix_acl_access") }, REFUSED),
        (ann(), guard.clone(), REFUSED),
        (Caller::root(), guard, OK),
    ];
    for (caller, request, expected) in cases {
        assert_eq!(house.ask(&caller, request.clone()), expected, "{caller:?} {request:?}");
    }
    let other = house.file(Ino::ROOT, "other", (0, 0, 0o644));
    assert_eq!(house.ask(&ann(), set(other, SetAttr { mtime_ns: Some(5), ..none() })), DENIED);
    let list = MetaRequest::SetXattr {
        ino: other,
        name: name("system.posix_acl_access"),
        value: name("?"),
        mode: XattrMode::Set,
    };
    assert_eq!(house.ask(&ann(), list), REFUSED);
}

#[test]
fn a_change_of_content_takes_the_set_id_bits_away() {
    let mut house = House::new();
    let all = 0o6777;
    let file = house.file(Ino::ROOT, "file", (0, 0, all));
    let size = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    assert_eq!(house.ask(&Caller::root(), set(file, size(10))), OK);
    assert_eq!(house.mode(file), all, "root keeps them");
    assert_eq!(house.ask(&ann(), set(file, size(20))), OK);
    assert_eq!(house.mode(file), 0o777);
    let second = house.file(Ino::ROOT, "second", (0, 0, all));
    let session = house.ledger.session();
    house.ask_in(session, &ann(), open(second, OpenIntent::Write)).unwrap();
    let lease = house.ledger.write_lease(session, second);
    let commit = |set| MetaRequest::Commit {
        ino: second,
        lease,
        pieces: vec![CommitPiece { piece: inline(0, "text"), owed: vec![], placed: Epoch(0) }],
        size: 4,
        mtime_ns: 1,
        set,
    };
    let cheats = SetAttr { mode: Some(all), ..SetAttr::default() };
    assert_eq!(house.ask_in(session, &ann(), commit(cheats)), REFUSED, "a writer is no owner");
    assert_eq!(house.ask_in(session, &ann(), commit(SetAttr::default())), OK);
    assert_eq!(house.mode(second), 0o777);
    // A client may take them away itself.
    let third = house.file(Ino::ROOT, "third", (0, 0, all));
    let takes = SetAttr { mode: Some(0o777), ..SetAttr::default() };
    assert_eq!(house.ask(&ann(), set(third, takes)), OK);
    let gives = SetAttr { mode: Some(0o4777), ..SetAttr::default() };
    assert_eq!(house.ask(&ann(), set(third, gives)), REFUSED);
}

#[test]
fn upkeep_and_requests_about_objects_are_for_those_whom_the_owner_trusts() {
    let mut house = House::new();
    let delete = ObjectRequest::Delete { keys: vec![], caller: Caller::root() };
    let requests = [
        MetaRequest::Object(Box::new(delete)),
        MetaRequest::NextFree { after: None, limit: 1 },
        MetaRequest::Freed { extents: vec![], drives: vec![] },
        MetaRequest::Repaired { shards: vec![] },
        MetaRequest::PurgeStep,
        MetaRequest::ScanMap { after: None, limit: 1 },
        MetaRequest::Doubt { in_doubt: true },
        MetaRequest::AdvanceGroups { groups: vec![] },
        MetaRequest::Tier(TierRequest::Stat),
    ];
    for request in requests {
        assert_eq!(house.ask(&Caller::root(), request.clone()), REFUSED, "{request:?}");
    }
    for request in [MetaRequest::Heartbeat { in_use_ver: 1 }, MetaRequest::AllocExtents, MetaRequest::StatFs]
    {
        assert_eq!(house.ask(&eve(), request.clone()), OK, "{request:?}");
    }
}
