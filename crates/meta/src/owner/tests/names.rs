//! Names, links, renames, attributes.

use std::collections::BTreeSet;

use wire::meta::{LINKS_MAX, RenameMode, SYMLINK_BYTES_MAX, SetAttr, XattrMode};

use super::audit::audit;
use super::*;
use crate::values::Value;

use FileKind::{Directory, Regular, Symlink};

/// /file, /dir, /dir/sub, /dir/inner, /empty, /link
fn tree() -> (Ledger, SessionId) {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    ledger.make(me, Ino::ROOT, "file", Regular);
    let dir = ledger.make(me, Ino::ROOT, "dir", Directory);
    ledger.make(me, dir, "sub", Directory);
    ledger.make(me, dir, "inner", Regular);
    ledger.make(me, Ino::ROOT, "empty", Directory);
    ledger.make(me, Ino::ROOT, "link", Symlink);
    (ledger, me)
}

/// The inode that a path of the tree leads to.
fn at(ledger: &mut Ledger, me: SessionId, path: &str) -> Ino {
    path.split('/')
        .filter(|part| !part.is_empty())
        .fold(Ino::ROOT, |parent, part| ledger.attr(me, MetaRequest::Lookup { parent, name: name(part) }).ino)
}

fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap()
}

#[test]
fn names_have_limits() {
    let (mut ledger, me) = tree();
    for bad in ["", ".", "..", "a/b", "a\0b"] {
        ledger.refuses(me, MetaRequest::Make(node(Ino::ROOT, bad, Regular)), FsError::Invalid);
    }
    let long = "x".repeat(256);
    ledger.refuses(me, MetaRequest::Make(node(Ino::ROOT, &long, Regular)), FsError::NameTooLong);
    let lookup = MetaRequest::Lookup { parent: Ino::ROOT, name: name(&long) };
    ledger.refuses(me, lookup, FsError::NameTooLong);
    let longest = "x".repeat(255);
    let ino = ledger.make(me, Ino::ROOT, &longest, Regular);
    assert_eq!(at(&mut ledger, me, &longest), ino);
    let target = Bytes::from(vec![b't'; SYMLINK_BYTES_MAX + 1]);
    let symlink = MakeNode { target, ..node(Ino::ROOT, "s", Symlink) };
    ledger.refuses(me, MetaRequest::Make(symlink), FsError::NameTooLong);
}

#[test]
fn making_and_removing_say_what_is_in_the_way() {
    let (mut ledger, me) = tree();
    let (file, dir) = (at(&mut ledger, me, "file"), at(&mut ledger, me, "dir"));
    let root = Ino::ROOT;
    let make = |parent, text| MetaRequest::Make(node(parent, text, Regular));
    let unlink = |parent, text| MetaRequest::Unlink { parent, name: name(text) };
    let rmdir = |parent, text| MetaRequest::Rmdir { parent, name: name(text) };
    let link = |ino, text| MetaRequest::Link { ino, parent: root, name: name(text) };
    for (request, error) in [
        (make(root, "file"), FsError::Exists),
        (make(root, "dir"), FsError::Exists),
        (make(file, "x"), FsError::NotDirectory),
        (make(Ino(999), "x"), FsError::NotFound),
        (MetaRequest::Make(node(root, "file", Directory)), FsError::Exists),
        (unlink(root, "nothing"), FsError::NotFound),
        (unlink(root, "dir"), FsError::IsDirectory),
        (unlink(file, "x"), FsError::NotDirectory),
        (rmdir(root, "file"), FsError::NotDirectory),
        (rmdir(root, "dir"), FsError::NotEmpty),
        (rmdir(root, "nothing"), FsError::NotFound),
        (link(dir, "x"), FsError::NotPermitted),
        (link(file, "empty"), FsError::Exists),
        (link(Ino(999), "x"), FsError::Stale),
        (link(file, "a/b"), FsError::Invalid),
        (MetaRequest::ReadLink { ino: file }, FsError::Invalid),
        (MetaRequest::GetAttr { ino: Ino(999) }, FsError::Stale),
        (MetaRequest::Open { ino: dir, intent: OpenIntent::Write }, FsError::IsDirectory),
        (MetaRequest::ReadDir { ino: file, after: None, limit: 10 }, FsError::NotDirectory),
    ] {
        ledger.refuses(me, request, error);
    }
    audit(&ledger.dump(), &BTreeSet::new());
}

#[test]
fn a_link_too_many_is_refused() {
    let (mut ledger, me) = tree();
    let ino = at(&mut ledger, me, "file");
    let key = Keys::new(LEDGER).inode(ino);
    let mut inode: Inode = ledger.core.store.begin().get(&key).unwrap().unwrap();
    inode.attr.nlink = LINKS_MAX;
    ledger.core.store.apply(Seq(1), SessionId(0), [(key, Some(inode.encode()))]);
    ledger.refuses(me, MetaRequest::Link { ino, parent: Ino::ROOT, name: name("x") }, FsError::TooManyLinks);
}

#[track_caller]
fn rename(from: &str, to: &str, mode: RenameMode, expected: Result<(), FsError>) {
    let (mut ledger, me) = tree();
    let file = at(&mut ledger, me, "file");
    ledger.attr(me, MetaRequest::Link { ino: file, parent: Ino::ROOT, name: name("same") });
    let (from, to) = (split(from), split(to));
    let (parent, new_parent) = (at(&mut ledger, me, from.0), at(&mut ledger, me, to.0));
    let moved = ledger.ask(me, MetaRequest::Lookup { parent, name: name(from.1) });
    let request = MetaRequest::Rename {
        parent,
        name: name(from.1),
        new_parent,
        new_name: name(to.1),
        mode,
        whiteout: None,
    };
    match expected {
        Err(error) => ledger.refuses(me, request, error),
        Ok(()) => {
            ledger.ask(me, request).unwrap();
            let now = ledger.attr(me, MetaRequest::Lookup { parent: new_parent, name: name(to.1) });
            assert!(matches!(moved, Ok(MetaReply::Entry { attr, .. }) if attr.ino == now.ino));
        }
    }
    audit(&ledger.dump(), &BTreeSet::new());
}

#[test]
fn rename_moves_replaces_and_refuses_as_posix_says() {
    use RenameMode::Replace;
    rename("/file", "/new", Replace, Ok(()));
    rename("/file", "/dir/inner", Replace, Ok(()));
    rename("/file", "/link", Replace, Ok(()));
    rename("/dir", "/empty", Replace, Ok(()));
    rename("/dir/sub", "/empty", Replace, Ok(()));
    rename("/dir/sub", "/moved", Replace, Ok(()));
    rename("/file", "/file", Replace, Ok(()));
    rename("/file", "/same", Replace, Ok(()));
    rename("/nothing", "/x", Replace, Err(FsError::NotFound));
    rename("/file", "/empty", Replace, Err(FsError::IsDirectory));
    rename("/empty", "/file", Replace, Err(FsError::NotDirectory));
    rename("/empty", "/dir", Replace, Err(FsError::NotEmpty));
    rename("/dir", "/dir/sub/x", Replace, Err(FsError::Invalid));
    rename("/dir", "/dir/x", Replace, Err(FsError::Invalid));
    rename("/dir/sub", "/dir", Replace, Err(FsError::NotEmpty));
    rename("/file", "/..", Replace, Err(FsError::Invalid));
}

#[test]
fn rename_without_replacing_and_exchanging_keep_both() {
    use RenameMode::{Exchange, NoReplace};
    rename("/file", "/new", NoReplace, Ok(()));
    rename("/file", "/link", NoReplace, Err(FsError::Exists));
    rename("/file", "/same", NoReplace, Err(FsError::Exists));
    rename("/file", "/dir", Exchange, Ok(()));
    rename("/file", "/link", Exchange, Ok(()));
    rename("/dir", "/file", Exchange, Ok(()));
    rename("/dir/sub", "/file", Exchange, Ok(()));
    rename("/empty", "/dir/sub", Exchange, Ok(()));
    rename("/file", "/nothing", Exchange, Err(FsError::NotFound));
    rename("/dir", "/dir/sub", Exchange, Err(FsError::Invalid));
    rename("/dir/sub", "/dir", Exchange, Err(FsError::Invalid));
}

#[test]
fn a_removed_directory_that_is_open_takes_no_new_names() {
    let (mut ledger, me) = tree();
    let (file, empty) = (at(&mut ledger, me, "file"), at(&mut ledger, me, "empty"));
    let dir = at(&mut ledger, me, "dir");
    ledger.ask(me, MetaRequest::Open { ino: empty, intent: OpenIntent::Read }).unwrap();
    ledger.attr(me, MetaRequest::Rmdir { parent: Ino::ROOT, name: name("empty") });
    assert_eq!(ledger.stat(me, empty).nlink, 0);
    let into = |parent: Ino, from: &str| MetaRequest::Rename {
        parent,
        name: name(from),
        new_parent: empty,
        new_name: name("x"),
        mode: RenameMode::Replace,
        whiteout: None,
    };
    ledger.refuses(me, MetaRequest::Make(node(empty, "x", Regular)), FsError::NotFound);
    ledger.refuses(me, MetaRequest::Make(node(empty, "x", Directory)), FsError::NotFound);
    ledger.refuses(me, MetaRequest::Link { ino: file, parent: empty, name: name("x") }, FsError::NotFound);
    ledger.refuses(me, into(Ino::ROOT, "file"), FsError::NotFound);
    ledger.refuses(me, into(dir, "sub"), FsError::NotFound);
    ledger.ask(me, MetaRequest::Close { inos: vec![empty] }).unwrap();
    audit(&ledger.dump(), &BTreeSet::new());
}

#[test]
fn a_set_gid_directory_hands_its_group_down() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    let dir = ledger.make(me, Ino::ROOT, "dir", Directory);
    let set = SetAttr { mode: Some(0o2775), gid: Some(77), ..SetAttr::default() };
    ledger.attr(me, MetaRequest::SetAttr { ino: dir, set });
    let file = ledger.make(me, dir, "file", Regular);
    let sub = ledger.make(me, dir, "sub", Directory);
    let (file, sub) = (ledger.stat(me, file), ledger.stat(me, sub));
    assert_eq!((file.gid, file.mode & 0o2000), (77, 0));
    assert_eq!((sub.gid, sub.mode & 0o2000), (77, 0o2000));
}

/// user::rwx, user:1000:rwx, group::r-x, mask::rwx, other::---
const DEFAULT_ACL: &[u8] = b"\x02\0\0\0\
    \x01\0\x07\0\xff\xff\xff\xff\x02\0\x07\0\xe8\x03\0\0\x04\0\x05\0\xff\xff\xff\xff\
    \x10\0\x07\0\xff\xff\xff\xff\x20\0\0\0\xff\xff\xff\xff";

#[test]
fn a_default_acl_is_inherited_and_replaces_the_umask() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    let dir = ledger.make(me, Ino::ROOT, "dir", Directory);
    let default = name("system.posix_acl_default");
    let access = name("system.posix_acl_access");
    let set = |ino, key: &Bytes, value: &'static [u8]| MetaRequest::SetXattr {
        ino,
        name: key.clone(),
        value: Bytes::from_static(value),
        mode: XattrMode::Set,
    };
    ledger.attr(me, set(dir, &default, DEFAULT_ACL));
    ledger.refuses(me, set(dir, &default, b"nonsense"), FsError::Invalid);
    ledger.refuses(me, set(dir, &access, b"nonsense"), FsError::Invalid);
    let file = MakeNode { umask: 0o777, mode: 0o664, ..node(dir, "file", Regular) };
    let file = ledger.attr(me, MetaRequest::Make(file));
    assert_eq!(file.mode, 0o660, "the mask bounds the group bits, the umask is not used");
    let sub = ledger.make(me, dir, "sub", Directory);
    let get = |ino, key: &Bytes| MetaRequest::GetXattr { ino, name: key.clone() };
    assert_eq!(ledger.ask(me, get(sub, &default)), Ok(MetaReply::Bytes(Bytes::from_static(DEFAULT_ACL))));
    ledger.refuses(me, get(file.ino, &default), FsError::NoAttribute);
    ledger.refuses(me, set(file.ino, &default, DEFAULT_ACL), FsError::Invalid);
    let Ok(MetaReply::Bytes(list)) = ledger.ask(me, get(file.ino, &access)) else { panic!("no access list") };
    assert_eq!(list[4 + 3 * 8 + 2], 6, "the mask became the group bits asked for");
    ledger.attr(
        me,
        MetaRequest::SetAttr { ino: file.ino, set: SetAttr { mode: Some(0o604), ..SetAttr::default() } },
    );
    let Ok(MetaReply::Bytes(list)) = ledger.ask(me, get(file.ino, &access)) else { panic!("no access list") };
    assert_eq!((list[4 + 3 * 8 + 2], list[4 + 4 * 8 + 2]), (0, 4), "chmod changes mask and other");
}

#[test]
fn extended_attributes_have_modes_and_limits() {
    let (mut ledger, me) = tree();
    let ino = at(&mut ledger, me, "file");
    let set = |key: &str, len: usize, mode| MetaRequest::SetXattr {
        ino,
        name: name(key),
        value: Bytes::from(vec![1; len]),
        mode,
    };
    ledger.refuses(me, set("", 1, XattrMode::Set), FsError::Invalid);
    ledger.refuses(me, set("a\0", 1, XattrMode::Set), FsError::Invalid);
    ledger.refuses(me, set(&"x".repeat(256), 1, XattrMode::Set), FsError::Range);
    ledger.refuses(me, set("big", (64 << 10) + 1, XattrMode::Set), FsError::ValueTooLarge);
    ledger.refuses(me, set("a", 1, XattrMode::Replace), FsError::NoAttribute);
    ledger.refuses(me, MetaRequest::RemoveXattr { ino, name: name("a") }, FsError::NoAttribute);
    ledger.refuses(me, MetaRequest::GetXattr { ino, name: name("a") }, FsError::NoAttribute);
    for key in ["a", "b", "c"] {
        ledger.attr(me, set(key, 64 << 10, XattrMode::Create));
    }
    ledger.refuses(me, set("a", 1, XattrMode::Create), FsError::Exists);
    ledger.refuses(me, set("d", 64 << 10, XattrMode::Set), FsError::NoSpace);
    ledger.attr(me, set("d", (64 << 10) - 4, XattrMode::Set));
    ledger.refuses(me, set("e", 0, XattrMode::Set), FsError::NoSpace);
    ledger.attr(me, set("a", 64 << 10, XattrMode::Replace));
    let names = ["a", "b", "c", "d"].map(name).to_vec();
    assert_eq!(ledger.ask(me, MetaRequest::ListXattr { ino }), Ok(MetaReply::Names(names)));
    ledger.attr(me, MetaRequest::RemoveXattr { ino, name: name("a") });
    ledger.attr(me, MetaRequest::Unlink { parent: Ino::ROOT, name: name("file") });
    audit(&ledger.dump(), &BTreeSet::new());
}

#[test]
fn a_listing_in_pages_shows_every_name_once() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    let names = ["a", "a-b", "a0", "b", "b-", "b.txt", "c"];
    for (index, text) in names.iter().enumerate() {
        let kind = if index % 3 == 0 { Directory } else { Regular };
        ledger.make(me, Ino::ROOT, text, kind);
    }
    for limit in 1..9 {
        let mut listed: Vec<(Bytes, FileKind)> = Vec::new();
        loop {
            let last = listed.last().cloned();
            let after = last.map(|(name, kind)| wire::meta::DirPosition { name, kind });
            let reply = ledger.ask(me, MetaRequest::ReadDir { ino: Ino::ROOT, after, limit });
            let Ok(MetaReply::Dir { entries, end, .. }) = reply else { panic!("{reply:?}") };
            listed.extend(entries.into_iter().map(|entry| (entry.name, entry.attr.kind)));
            if end {
                break;
            }
        }
        let mut found: Vec<Bytes> = listed.into_iter().map(|(name, _)| name).collect();
        assert_eq!(found.len(), names.len(), "limit={limit}");
        found.sort();
        assert_eq!(found, names.map(name));
    }
}
