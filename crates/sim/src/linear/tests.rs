use super::*;
use crate::history::Kind;
use crate::runs::Runs;
use base::{FsError, Ino};

const FILE: Ino = Ino(7);

fn begin(id: OpId, client: u32, op: Op) -> Moment {
    Moment::Begin { id, client, op }
}

fn end(id: OpId, ret: Ret) -> Moment {
    Moment::End { id, ret }
}

/// A history in which each operation is named by the index of its beginning.
struct Script(Vec<Moment>);

impl Script {
    /// A history that begins with an empty, open file.
    fn new() -> Self {
        let mut script = Self(Vec::new());
        let make = Op::Make { parent: Ino::ROOT, name: "f", kind: Kind::File };
        script.does(0, make, Ret::Found { ino: FILE, kind: Kind::File });
        script
    }

    fn begin(&mut self, client: u32, op: Op) -> OpId {
        self.0.push(begin(self.0.len(), client, op));
        self.0.len() - 1
    }

    fn end(&mut self, id: OpId, ret: Ret) {
        self.0.push(end(id, ret));
    }

    fn does(&mut self, client: u32, op: Op, ret: Ret) {
        let id = self.begin(client, op);
        self.end(id, ret);
    }

    fn is_explained(&self) -> bool {
        check(&self.0, &BTreeSet::new(), false).is_ok()
    }

    /// As above, if changes of names return before they are durable.
    fn is_explained_early(&self) -> bool {
        check(&self.0, &BTreeSet::new(), true).is_ok()
    }

    fn makes(&mut self, client: u32, name: &'static str, ino: u64) {
        let make = Op::Make { parent: Ino::ROOT, name, kind: Kind::File };
        self.does(client, make, Ret::Found { ino: Ino(ino), kind: Kind::File });
    }

    fn finds(&mut self, client: u32, name: &'static str, ino: Option<u64>) {
        let found =
            ino.map_or(Ret::Failed(FsError::NotFound), |ino| Ret::Found { ino: Ino(ino), kind: Kind::File });
        self.does(client, Op::Lookup { parent: Ino::ROOT, name }, found);
    }
}

fn write(byte: u8) -> Op {
    Op::Write { ino: FILE, off: 0, len: 4, byte }
}

fn read() -> Op {
    Op::Read { ino: FILE, off: 0, len: 10 }
}

fn data(byte: u8) -> Ret {
    Ret::Data(Runs::fill(4, byte))
}

#[test]
fn a_read_sees_the_last_write() {
    for (seen, explained) in [(1, false), (2, true)] {
        let mut script = Script::new();
        script.does(0, write(1), Ret::Done);
        script.does(1, write(2), Ret::Done);
        script.does(2, read(), data(seen));
        assert_eq!(script.is_explained(), explained, "{seen}");
    }
}

#[test]
fn concurrent_writes_have_one_order_for_all() {
    for (first, second, explained) in [(1, 1, true), (2, 2, true), (1, 2, true), (2, 1, true)] {
        let mut script = Script::new();
        let ids = [script.begin(0, write(1)), script.begin(1, write(2))];
        script.does(2, read(), data(first));
        script.does(2, read(), data(second));
        ids.into_iter().for_each(|id| script.end(id, Ret::Done));
        assert_eq!(script.is_explained(), explained, "{first} {second}");
    }
    let mut script = Script::new();
    let ids = [script.begin(0, write(1)), script.begin(1, write(2))];
    for byte in [1, 2, 1] {
        script.does(2, read(), data(byte));
    }
    ids.into_iter().for_each(|id| script.end(id, Ret::Done));
    assert!(!script.is_explained());
}

#[test]
fn after_a_crash_a_file_is_no_older_than_what_was_synced() {
    for (seen, explained) in [(1, false), (2, true), (3, true), (4, true), (5, false)] {
        let mut script = Script::new();
        script.does(0, write(1), Ret::Done);
        script.does(0, write(2), Ret::Done);
        script.does(0, Op::Fsync { ino: FILE }, Ret::Done);
        script.does(0, write(3), Ret::Done);
        script.begin(0, write(4));
        script.0.push(Moment::Crash);
        script.does(0, read(), data(seen));
        script.does(1, read(), data(seen));
        assert_eq!(script.is_explained(), explained, "{seen}");
    }
}

#[test]
fn what_another_client_saw_is_durable() {
    for (seen, explained) in [(1, false), (2, true)] {
        let mut script = Script::new();
        script.does(0, write(1), Ret::Done);
        script.does(0, write(2), Ret::Done);
        script.does(1, read(), data(2));
        script.0.push(Moment::Crash);
        script.does(0, read(), data(seen));
        assert_eq!(script.is_explained(), explained, "{seen}");
    }
}

#[test]
fn acknowledged_names_survive_and_others_may() {
    let unlink = Op::Unlink { parent: Ino::ROOT, name: "f" };
    let lookup = Op::Lookup { parent: Ino::ROOT, name: "f" };
    let missing = Ret::Failed(FsError::NotFound);
    for (answered, found, explained) in
        [(true, true, false), (true, false, true), (false, true, true), (false, false, true)]
    {
        let mut script = Script::new();
        let id = script.begin(0, unlink.clone());
        if answered {
            script.end(id, Ret::Done);
        }
        script.0.push(Moment::Crash);
        let ret = if found { Ret::Found { ino: FILE, kind: Kind::File } } else { missing.clone() };
        script.does(0, lookup.clone(), ret);
        assert_eq!(script.is_explained(), explained, "{answered} {found}");
    }
}

#[test]
fn a_doubtful_answer_leaves_both_open_and_a_file_without_name_lives_while_it_is_open() {
    let mut script = Script::new();
    script.does(0, Op::Unlink { parent: Ino::ROOT, name: "f" }, Ret::Failed(FsError::Unknown));
    script.does(1, Op::Lookup { parent: Ino::ROOT, name: "f" }, Ret::Failed(FsError::NotFound));
    script.does(0, write(1), Ret::Done);
    script.does(0, read(), data(1));
    assert!(script.is_explained());
    script.does(0, read(), Ret::Data(Runs::default()));
    assert!(!script.is_explained());
    let mut script = Script::new();
    script.does(1, Op::Open { ino: FILE, cut: Cut::Empty }, Ret::Done);
    script.does(1, Op::GetAttr { ino: FILE }, Ret::Attr { kind: Kind::File, nlink: Some(2), size: Some(0) });
    assert!(!script.is_explained());
}

#[test]
fn an_answer_may_be_explained_by_what_another_process_is_still_doing() {
    let mut script = Script::new();
    let make = |kind| Op::Make { parent: Ino::ROOT, name: "g", kind };
    let id = script.begin(0, make(Kind::File));
    script.does(1, make(Kind::Directory), Ret::Failed(FsError::Exists));
    assert!(script.is_explained());
    script.end(id, Ret::Failed(FsError::Exists));
    assert!(!script.is_explained());
}

#[test]
fn what_a_crash_leaves_of_early_changes_is_a_beginning_of_them() {
    for (a, b, explained) in
        [(true, true, true), (true, false, true), (false, false, true), (false, true, false)]
    {
        let mut script = Script::new();
        script.makes(0, "a", 8);
        script.makes(0, "b", 9);
        script.0.push(Moment::Crash);
        script.finds(1, "a", a.then_some(8));
        script.finds(1, "b", b.then_some(9));
        assert_eq!(script.is_explained_early(), explained, "{a} {b}");
        assert_eq!(script.is_explained(), a && b, "{a} {b}");
    }
}

#[test]
fn early_changes_before_a_sync_are_durable() {
    for (a, b, explained) in [(true, false, true), (false, false, false), (true, true, true)] {
        let mut script = Script::new();
        script.makes(0, "a", 8);
        script.does(0, Op::Fsync { ino: FILE }, Ret::Done);
        script.makes(0, "b", 9);
        script.0.push(Moment::Crash);
        script.finds(1, "a", a.then_some(8));
        script.finds(1, "b", b.then_some(9));
        assert_eq!(script.is_explained_early(), explained, "{a} {b}");
    }
    // Of another client, a sync says nothing.
    let mut script = Script::new();
    script.makes(0, "a", 8);
    script.does(1, Op::Fsync { ino: FILE }, Ret::Done);
    script.0.push(Moment::Crash);
    script.finds(1, "a", None);
    assert!(script.is_explained_early());
}

#[test]
fn early_changes_that_another_client_saw_are_durable() {
    for (name, explained) in [("a", false), ("other", true)] {
        let mut script = Script::new();
        script.makes(0, "a", 8);
        script.finds(1, name, (name == "a").then_some(8));
        script.0.push(Moment::Crash);
        script.finds(1, "a", None);
        assert_eq!(script.is_explained_early(), explained, "{name}");
    }
}

#[test]
fn a_file_whose_removal_is_lost_has_its_synced_content() {
    for (seen, explained) in [(1, false), (2, true), (3, true), (4, false)] {
        let mut script = Script::new();
        script.does(0, write(1), Ret::Done);
        script.does(0, write(2), Ret::Done);
        script.does(0, Op::Fsync { ino: FILE }, Ret::Done);
        script.does(0, write(3), Ret::Done);
        script.does(0, Op::Close { ino: FILE }, Ret::Done);
        script.does(0, Op::Unlink { parent: Ino::ROOT, name: "f" }, Ret::Done);
        script.0.push(Moment::Crash);
        script.finds(1, "f", Some(FILE.0));
        script.does(1, read(), data(seen));
        assert_eq!(script.is_explained_early(), explained, "{seen}");
    }
}
