//! Guards: append-only and immutable hold for every request, also for those of S3; and whiteouts.

use std::collections::BTreeSet;

use wire::meta::{RenameMode, SetAttr, Whiteout, XattrMode};
use wire::object::{Caller, Conditions, ObjectError, ObjectRequest};

use super::audit::audit;
use super::objects::{key, put};
use super::*;

use FileKind::{CharDevice, Directory, Regular, Symlink};

const APPEND: Guard = Guard { append_only: true, immutable: false };
const IMMUTABLE: Guard = Guard { append_only: false, immutable: true };

/// A directory with a file of four bytes, another file and an empty directory in it.
struct Guarded {
    ledger: Ledger,
    me: SessionId,
    dir: Ino,
    file: Ino,
}

fn guarded(on: &str, guard: Guard) -> Guarded {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    let dir = ledger.make(me, Ino::ROOT, "dir", Directory);
    let file = ledger.make(me, dir, "file", Regular);
    ledger.make(me, dir, "other", Regular);
    ledger.make(me, dir, "empty", Directory);
    ledger.make(me, Ino::ROOT, "outside", Regular);
    ledger.write(me, file, &[inline(0, "text")]).unwrap();
    let ino = if on == "dir" { dir } else { file };
    ledger.attr(me, MetaRequest::SetGuard { ino, guard });
    assert_eq!(ledger.stat(me, ino).guard, guard);
    Guarded { ledger, me, dir, file }
}

fn rename(from: (Ino, &str), to: (Ino, &str), mode: RenameMode) -> MetaRequest {
    let (parent, new_parent) = (from.0, to.0);
    MetaRequest::Rename { parent, name: name(from.1), new_parent, new_name: name(to.1), mode, whiteout: None }
}

impl Guarded {
    fn set(&self, set: SetAttr) -> MetaRequest {
        MetaRequest::SetAttr { ino: self.file, set }
    }

    /// Requests that change the file itself, except its content.
    fn changes_of_file(&self) -> Vec<MetaRequest> {
        let (ino, dir) = (self.file, self.dir);
        let value = name("v");
        vec![
            self.set(SetAttr { mode: Some(0o600), ..SetAttr::default() }),
            self.set(SetAttr { uid: Some(5), ..SetAttr::default() }),
            self.set(SetAttr { mtime_ns: Some(5), ..SetAttr::default() }),
            self.set(SetAttr { size: Some(1), ..SetAttr::default() }),
            MetaRequest::SetXattr { ino, name: name("user.a"), value, mode: XattrMode::Set },
            MetaRequest::RemoveXattr { ino, name: name("user.a") },
            MetaRequest::Open { ino, intent: OpenIntent::Truncate },
            MetaRequest::Punch { ino, off: 0, len: 2 },
            MetaRequest::CloneRange { from: ino, from_off: 0, to: ino, to_off: 10, len: 2 },
            MetaRequest::Link { ino, parent: dir, name: name("second") },
            MetaRequest::Unlink { parent: dir, name: name("file") },
            rename((dir, "file"), (dir, "moved"), RenameMode::Replace),
            rename((dir, "other"), (dir, "file"), RenameMode::Replace),
            rename((dir, "other"), (dir, "file"), RenameMode::Exchange),
        ]
    }

    fn changes_of_object(&self) -> Vec<ObjectRequest> {
        let (name, caller) = (key(self.dir, "file"), Caller::root());
        vec![
            put(name.clone(), "new"),
            ObjectRequest::SetTags { name, tags: vec![("a".to_owned(), "b".to_owned())], caller },
        ]
    }

    #[track_caller]
    fn refuses(&mut self, requests: Vec<MetaRequest>) {
        for request in requests {
            self.ledger.refuses(self.me, request, FsError::NotPermitted);
        }
    }

    #[track_caller]
    fn refuses_objects(&mut self, requests: Vec<ObjectRequest>) {
        for request in requests {
            let answer = self.ledger.object(self.me, request.clone());
            assert_eq!(answer, Err(ObjectError::Fs(FsError::NotPermitted)), "{request:?}");
        }
        let keys = vec![(key(self.dir, "file"), Conditions::default())];
        let answer = self.ledger.object(self.me, ObjectRequest::Delete { keys, caller: Caller::root() });
        let refused = |reply: &ObjectReply| match reply {
            ObjectReply::Deleted { results, .. } => {
                results.as_slice() == [Err(ObjectError::Fs(FsError::NotPermitted))]
            }
            _ => false,
        };
        assert!(answer.as_ref().is_ok_and(refused), "{answer:?}");
    }

    /// Checks that the request succeeds without the guard.
    #[track_caller]
    fn allows_without(&mut self, ino: Ino, request: MetaRequest) {
        self.ledger.attr(self.me, MetaRequest::SetGuard { ino, guard: Guard::default() });
        self.ledger.ask(self.me, request).unwrap();
        self.ledger.store();
        audit(&self.ledger.dump(), &BTreeSet::new());
    }
}

#[test]
fn an_immutable_file_does_not_change() {
    let mut g = guarded("file", IMMUTABLE);
    g.refuses(g.changes_of_file());
    g.refuses(vec![
        g.set(SetAttr { size: Some(10), ..SetAttr::default() }),
        MetaRequest::Open { ino: g.file, intent: OpenIntent::Write },
    ]);
    g.refuses_objects(g.changes_of_object());
    assert_eq!(g.ledger.write(g.me, g.file, &[inline(4, "more")]), Err(FsError::NotPermitted));
    assert_eq!(g.ledger.map(g.me, g.file), [inline(0, "text")]);
    let atime_ns = g.ledger.now.wall_ns;
    g.ledger.attr(g.me, MetaRequest::NoteRead { ino: g.file, atime_ns });
    g.allows_without(g.file, MetaRequest::Unlink { parent: g.dir, name: name("file") });
}

#[test]
fn an_append_only_file_only_grows() {
    let mut g = guarded("file", APPEND);
    g.refuses(g.changes_of_file());
    g.refuses_objects(g.changes_of_object());
    assert_eq!(g.ledger.write(g.me, g.file, &[inline(3, "x")]), Err(FsError::NotPermitted));
    g.ledger.ask(g.me, MetaRequest::Open { ino: g.file, intent: OpenIntent::Write }).unwrap();
    g.ledger.write(g.me, g.file, &[inline(4, "more")]).unwrap();
    assert_eq!(g.ledger.map(g.me, g.file), [inline(0, "text"), inline(4, "more")]);
    g.ledger.ask(g.me, g.set(SetAttr { size: Some(20), ..SetAttr::default() })).unwrap();
    g.allows_without(g.file, g.set(SetAttr { size: Some(1), ..SetAttr::default() }));
}

#[test]
fn an_immutable_directory_keeps_its_names_and_gets_no_new_ones() {
    let mut g = guarded("dir", IMMUTABLE);
    let dir = g.dir;
    g.refuses(vec![
        MetaRequest::Make(node(dir, "new", Regular)),
        MetaRequest::Make(node(dir, "new", Symlink)),
        MetaRequest::Link { ino: g.file, parent: dir, name: name("second") },
        MetaRequest::Unlink { parent: dir, name: name("file") },
        MetaRequest::Rmdir { parent: dir, name: name("empty") },
        MetaRequest::Rmdir { parent: Ino::ROOT, name: name("dir") },
        rename((dir, "file"), (dir, "moved"), RenameMode::Replace),
        rename((dir, "file"), (Ino::ROOT, "moved"), RenameMode::Replace),
        rename((Ino::ROOT, "outside"), (dir, "new"), RenameMode::Replace),
        rename((Ino::ROOT, "dir"), (Ino::ROOT, "moved"), RenameMode::Replace),
        MetaRequest::SetAttr { ino: dir, set: SetAttr { mode: Some(0o700), ..SetAttr::default() } },
    ]);
    g.refuses_objects(vec![put(key(dir, "new"), "text"), put(key(dir, "new/below"), "text")]);
    // The content of a file in a guarded directory is not protected.
    g.ledger.write(g.me, g.file, &[inline(0, "more")]).unwrap();
    g.allows_without(dir, MetaRequest::Make(node(dir, "new", Regular)));
}

#[test]
fn an_append_only_directory_takes_new_names_and_keeps_them() {
    let mut g = guarded("dir", APPEND);
    let dir = g.dir;
    g.ledger.make(g.me, dir, "new", Regular);
    g.ledger.ask(g.me, rename((Ino::ROOT, "outside"), (dir, "came"), RenameMode::NoReplace)).unwrap();
    g.ledger.object(g.me, put(key(dir, "object"), "text")).unwrap();
    g.ledger.object(g.me, put(key(dir, "below/object"), "text")).unwrap();
    g.refuses(vec![
        MetaRequest::Unlink { parent: dir, name: name("new") },
        MetaRequest::Rmdir { parent: dir, name: name("empty") },
        rename((dir, "file"), (Ino::ROOT, "moved"), RenameMode::Replace),
        rename((dir, "file"), (dir, "new"), RenameMode::Replace),
    ]);
    g.refuses_objects(vec![put(key(dir, "object"), "again")]);
    // Directories that keys imply are names too.
    let keys = vec![(key(dir, "below/object"), Conditions::default())];
    g.ledger.object(g.me, ObjectRequest::Delete { keys, caller: Caller::root() }).unwrap();
    g.ledger.ask(g.me, MetaRequest::Lookup { parent: dir, name: name("below") }).unwrap();
    assert!(matches!(
        g.ledger.ask(g.me, MetaRequest::Lookup { parent: dir, name: name("below") }),
        Ok(MetaReply::Entry { .. })
    ));
}

#[test]
fn only_files_and_directories_are_guarded() {
    let mut g = guarded("file", Guard::default());
    let ino = g.ledger.make(g.me, g.dir, "link", Symlink);
    g.ledger.refuses(g.me, MetaRequest::SetGuard { ino, guard: APPEND }, FsError::Unsupported);
}

#[test]
fn a_rename_may_leave_a_whiteout_behind() {
    for (from, to) in [("file", "other"), ("file", "new"), ("empty", "new")] {
        let mut g = guarded("file", Guard::default());
        let dir = g.dir;
        let request = MetaRequest::Rename {
            parent: dir,
            name: name(from),
            new_parent: dir,
            new_name: name(to),
            mode: RenameMode::Replace,
            whiteout: Some(Whiteout { uid: 5, gid: 6 }),
        };
        g.ledger.ask(g.me, request).unwrap();
        let left = g.ledger.attr(g.me, MetaRequest::Lookup { parent: dir, name: name(from) });
        assert_eq!((left.kind, left.mode, left.rdev, left.nlink), (CharDevice, 0, 0, 1));
        assert_eq!((left.uid, left.gid), (5, 6));
        g.ledger.attr(g.me, MetaRequest::Lookup { parent: dir, name: name(to) });
        g.ledger.store();
        audit(&g.ledger.dump(), &BTreeSet::new());
        g.allows_without(g.file, MetaRequest::Unlink { parent: dir, name: name(from) });
    }
}
