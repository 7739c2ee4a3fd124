//! Objects: rules of keys and directories, conditions, permissions, repetition, uploads, listings.

use std::collections::BTreeSet;

use wire::object::{
    Caller, CompletePart, Conditions, EtagMatch, ListEntry, ListFrom, ListQuery, ObjectBody, ObjectError,
    ObjectInfo, ObjectMeta, ObjectName, ObjectReply, ObjectRequest, UploadEntry, UploadQuery, UploadRef,
};

use super::audit::audit;
use super::*;

pub(super) fn key(bucket: Ino, key: &str) -> ObjectName {
    let path = key.strip_suffix('/').unwrap_or(key);
    ObjectName { bucket, parts: path.split('/').map(name).collect(), directory: key.ends_with('/') }
}

pub(super) fn body(pieces: &[MapPiece]) -> ObjectBody {
    let size = pieces.iter().map(MapPiece::end).max().unwrap_or(0);
    let pieces = pieces
        .iter()
        .map(|piece| CommitPiece { piece: piece.clone(), owed: Vec::new(), placed: Epoch(0) })
        .collect();
    ObjectBody::Pieces { pieces, size }
}

pub(super) fn put(name: ObjectName, text: &str) -> ObjectRequest {
    let pieces = if text.is_empty() { vec![] } else { vec![inline(0, text)] };
    ObjectRequest::Put {
        name,
        body: body(&pieces),
        meta: ObjectMeta { etag: Some(format!("etag of {text}")), ..ObjectMeta::default() },
        conditions: Conditions::default(),
        caller: Caller::root(),
    }
}

fn user(uid: u32) -> Caller {
    Caller { uid, gid: uid, groups: vec![] }
}

impl Ledger {
    #[track_caller]
    pub(super) fn object(
        &mut self,
        session: SessionId,
        request: ObjectRequest,
    ) -> Result<ObjectReply, ObjectError> {
        let reply = self.ask(session, MetaRequest::Object(Box::new(request)));
        match reply.map_err(ObjectError::Fs)? {
            MetaReply::Object(reply) => match *reply {
                ObjectReply::Refused(error) => Err(error),
                reply => Ok(reply),
            },
            other => panic!("{other:?}"),
        }
    }

    fn bucket(&mut self) -> (SessionId, Ino) {
        let session = self.session();
        (session, self.make(session, Ino::ROOT, "bucket", FileKind::Directory))
    }

    fn put(&mut self, session: SessionId, bucket: Ino, at: &str) -> ObjectInfo {
        match self.object(session, put(key(bucket, at), "text")) {
            Ok(ObjectReply::Info { info, .. }) => *info,
            other => panic!("{at}: {other:?}"),
        }
    }

    fn head(&mut self, session: SessionId, bucket: Ino, at: &str) -> Result<ObjectInfo, ObjectError> {
        let (name, conditions) = (key(bucket, at), Conditions::default());
        match self.object(session, ObjectRequest::Head { name, conditions, caller: Caller::root() })? {
            ObjectReply::Info { info, .. } => Ok(*info),
            other => panic!("{other:?}"),
        }
    }

    fn delete(&mut self, session: SessionId, bucket: Ino, at: &str) -> Result<bool, ObjectError> {
        let keys = vec![(key(bucket, at), Conditions::default())];
        match self.object(session, ObjectRequest::Delete { keys, caller: Caller::root() })? {
            ObjectReply::Deleted { mut results, .. } => results.pop().unwrap().map(|it| it.existed),
            other => panic!("{other:?}"),
        }
    }

    /// All pages: keys as they are, groups with `*` appended.
    pub(super) fn list(
        &mut self,
        session: SessionId,
        bucket: Ino,
        (prefix, delimiter): (&str, &str),
        after: &str,
        limit: u32,
    ) -> Vec<String> {
        let from = if after.is_empty() { ListFrom::Start } else { ListFrom::After(name(after)) };
        let (prefix, delimiter) = (name(prefix), name(delimiter));
        let mut query = ListQuery { bucket, prefix, delimiter, from, limit };
        let mut all = Vec::new();
        loop {
            let request = ObjectRequest::List { query: query.clone(), caller: Caller::root() };
            let Ok(ObjectReply::Listed(page)) = self.object(session, request) else { panic!("no page") };
            assert!(page.entries.len() <= limit as usize);
            all.extend(page.entries.iter().map(|entry| match entry {
                ListEntry::Object(object) => String::from_utf8(object.key.to_vec()).unwrap(),
                ListEntry::Prefix(group) => format!("{}*", String::from_utf8(group.to_vec()).unwrap()),
            }));
            match page.next {
                Some(next) => query.from = next,
                None => return all,
            }
        }
    }

    fn names(&mut self, session: SessionId, ino: Ino) -> Vec<String> {
        let reply = self.ask(session, MetaRequest::ReadDir { ino, after: None, limit: 100 });
        let Ok(MetaReply::Dir { entries, .. }) = reply else { panic!("{reply:?}") };
        entries.iter().map(|entry| String::from_utf8(entry.name.to_vec()).unwrap()).collect()
    }

    fn check_all(&self, issued: &[u64]) {
        audit(&self.dump(), &issued.iter().copied().collect());
    }
}

#[test]
fn parents_come_and_go_with_the_keys_below_them() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    ledger.put(session, bucket, "a/b/c");
    ledger.put(session, bucket, "a/x");
    assert_eq!(ledger.names(session, bucket), ["a"]);
    assert_eq!(ledger.delete(session, bucket, "a/b/c"), Ok(true));
    assert_eq!(ledger.list(session, bucket, ("", ""), "", 10), ["a/x"]);
    assert_eq!(ledger.delete(session, bucket, "a/x"), Ok(true));
    assert!(ledger.names(session, bucket).is_empty());
    assert_eq!(ledger.delete(session, bucket, "a/x"), Ok(false), "deleting what is not there succeeds");
    ledger.check_all(&[]);
}

#[test]
fn directories_that_somebody_made_or_changed_stay() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    ledger.make(session, bucket, "made", FileKind::Directory);
    ledger.put(session, bucket, "made/x");
    ledger.put(session, bucket, "changed/x");
    let changed = ledger.attr(session, MetaRequest::Lookup { parent: bucket, name: name("changed") }).ino;
    let set = wire::meta::SetAttr { mode: Some(0o700), ..Default::default() };
    ledger.ask(session, MetaRequest::SetAttr { ino: changed, set }).unwrap();
    ledger.put(session, bucket, "emptied/x");
    let emptied = ledger.attr(session, MetaRequest::Lookup { parent: bucket, name: name("emptied") }).ino;
    ledger.put(session, bucket, "object/");
    ledger.put(session, bucket, "object/x");
    for at in ["made/x", "changed/x", "object/x"] {
        assert_eq!(ledger.delete(session, bucket, at), Ok(true));
    }
    ledger.ask(session, MetaRequest::Unlink { parent: emptied, name: name("x") }).unwrap();
    assert_eq!(ledger.names(session, bucket), ["changed", "emptied", "made", "object"]);
    assert_eq!(ledger.list(session, bucket, ("", ""), "", 10), ["object/"]);
    assert_eq!(ledger.list(session, bucket, ("", "/"), "", 10), ["object/*"]);
    ledger.check_all(&[]);
}

#[test]
fn a_name_is_a_file_or_a_directory() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    ledger.put(session, bucket, "a");
    let refused = ledger.object(session, put(key(bucket, "a/b"), "x"));
    assert_eq!(refused, Err(ObjectError::ParentIsFile));
    assert_eq!(ledger.object(session, put(key(bucket, "a/"), "")), Err(ObjectError::ParentIsFile));
    ledger.put(session, bucket, "d/x");
    assert_eq!(ledger.object(session, put(key(bucket, "d"), "x")), Err(ObjectError::ExistingIsDirectory));
    assert_eq!(ledger.head(session, bucket, "d"), Err(ObjectError::NoSuchKey));
    assert_eq!(ledger.head(session, bucket, "d/"), Err(ObjectError::NoSuchKey), "a plain directory");
    assert_eq!(ledger.head(session, bucket, "a/b"), Err(ObjectError::NoSuchKey));
    assert_eq!(ledger.delete(session, bucket, "a/b"), Ok(false));
    ledger.make(session, bucket, "empty", FileKind::Directory);
    ledger.put(session, bucket, "empty");
    assert_eq!(ledger.head(session, bucket, "empty").unwrap().size, 4);
    ledger.check_all(&[]);
}

#[test]
fn a_directory_object_carries_its_bytes_and_outlives_its_children() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    ledger.object(session, put(key(bucket, "d/"), "body")).unwrap();
    ledger.put(session, bucket, "d/x");
    let info = ledger.head(session, bucket, "d/").unwrap();
    assert_eq!((info.size, &info.body[..], info.etag.as_str()), (4, &b"body"[..], "etag of body"));
    assert!(info.directory);
    assert_eq!(ledger.delete(session, bucket, "d/"), Ok(true));
    assert_eq!(ledger.head(session, bucket, "d/"), Err(ObjectError::NoSuchKey));
    assert_eq!(ledger.list(session, bucket, ("", ""), "", 10), ["d/x"]);
    ledger.delete(session, bucket, "d/x").unwrap();
    assert!(ledger.names(session, bucket).is_empty(), "it was only implied by then");
    ledger.check_all(&[]);
}

#[test]
fn the_etag_is_served_until_the_content_changes() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    let ino = ledger.put(session, bucket, "a").attr.ino;
    assert_eq!(ledger.head(session, bucket, "a").unwrap().etag, "etag of text");
    let set = wire::meta::SetAttr { mode: Some(0o600), mtime_ns: Some(5), ..Default::default() };
    ledger.ask(session, MetaRequest::SetAttr { ino, set }).unwrap();
    assert_eq!(ledger.head(session, bucket, "a").unwrap().etag, "etag of text");
    ledger.write(session, ino, &[inline(1, "EX")]).unwrap();
    let info = ledger.head(session, bucket, "a").unwrap();
    assert_eq!(info.etag, format!("{:x}-{:x}", ino.0, info.attr.data_ver));
    assert_eq!(info.meta.etag, None);
    let file = ledger.make(session, bucket, "plain", FileKind::Regular);
    assert!(ledger.head(session, bucket, "plain").unwrap().etag.starts_with(&format!("{:x}-", file.0)));
}

#[test]
fn conditions_are_checked_where_the_change_is_made() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    let mut try_put = |if_match: Option<EtagMatch>, if_none_match: Option<EtagMatch>| {
        let conditions = Conditions { if_match, if_none_match, ..Conditions::default() };
        let ObjectRequest::Put { name, body, meta, caller, .. } = put(key(bucket, "a"), "text") else {
            unreachable!()
        };
        let request = ObjectRequest::Put { name, body, meta, conditions, caller };
        ledger.object(session, request).map(|_| ())
    };
    let is = |etag: &str| Some(EtagMatch::List(vec!["other".into(), etag.into()]));
    assert_eq!(try_put(is("etag of text"), None), Err(ObjectError::NoSuchKey));
    assert_eq!(try_put(None, Some(EtagMatch::Any)), Ok(()));
    assert_eq!(try_put(None, Some(EtagMatch::Any)), Err(ObjectError::PreconditionFailed));
    assert_eq!(try_put(is("etag of text"), None), Ok(()));
    assert_eq!(try_put(is("wrong"), None), Err(ObjectError::PreconditionFailed));
    let mut head = |conditions| {
        let request = ObjectRequest::Head { name: key(bucket, "a"), conditions, caller: Caller::root() };
        ledger.object(session, request).map(|_| ())
    };
    let none_match = Conditions { if_none_match: is("etag of text"), ..Conditions::default() };
    assert_eq!(head(none_match), Err(ObjectError::NotModified));
    let since = |ns| Conditions { if_modified_since_ns: Some(ns), ..Conditions::default() };
    assert_eq!(head(since(5_000_000_000)), Err(ObjectError::NotModified));
    assert_eq!(head(since(-5_000_000_000)), Ok(()));
    let size = Conditions { if_size: Some(5), ..Conditions::default() };
    assert_eq!(head(size), Err(ObjectError::PreconditionFailed));
}

#[test]
fn permissions_are_those_of_files() {
    let mut ledger = Ledger::new();
    let session = ledger.session();
    let made = MakeNode { uid: 5, mode: 0o755, ..node(Ino::ROOT, "bucket", FileKind::Directory) };
    let bucket = ledger.attr(session, MetaRequest::Make(made)).ino;
    let as_user = |request: ObjectRequest, uid| match request {
        ObjectRequest::Put { name, body, meta, conditions, .. } => {
            ObjectRequest::Put { name, body, meta, conditions, caller: user(uid) }
        }
        other => other,
    };
    let denied = Err(ObjectError::Fs(FsError::Denied));
    assert_eq!(ledger.object(session, as_user(put(key(bucket, "a/b"), "x"), 6)), denied);
    ledger.object(session, as_user(put(key(bucket, "a/b"), "x"), 5)).unwrap();
    let get = |uid| ObjectRequest::Get {
        name: key(bucket, "a/b"),
        conditions: Conditions::default(),
        caller: user(uid),
    };
    assert!(ledger.object(session, get(6)).is_ok(), "others may read");
    let ino = ledger.head(session, bucket, "a/b").unwrap().attr.ino;
    let set = wire::meta::SetAttr { mode: Some(0o600), ..Default::default() };
    ledger.ask(session, MetaRequest::SetAttr { ino, set }).unwrap();
    assert_eq!(ledger.object(session, get(6)), denied);
    assert!(ledger.object(session, get(5)).is_ok());
    let keys = vec![(key(bucket, "a/b"), Conditions::default())];
    let Ok(ObjectReply::Deleted { results, .. }) =
        ledger.object(session, ObjectRequest::Delete { keys, caller: user(6) })
    else {
        panic!()
    };
    assert_eq!(results, [Err(ObjectError::Fs(FsError::Denied))]);
}

#[test]
fn uploads_are_listed_as_far_as_their_directories_may_be_read() {
    let mut ledger = Ledger::new();
    let session = ledger.session();
    let made = MakeNode { mode: 0o755, ..node(Ino::ROOT, "bucket", FileKind::Directory) };
    let bucket = ledger.attr(session, MetaRequest::Make(made)).ino;
    for at in ["open/there", "shut/there"] {
        ledger.put(session, bucket, at);
    }
    let shut = match ledger.ask(session, MetaRequest::Lookup { parent: bucket, name: name("shut") }) {
        Ok(MetaReply::Entry { attr, .. }) => attr.ino,
        other => panic!("{other:?}"),
    };
    let set = wire::meta::SetAttr { mode: Some(0o700), ..Default::default() };
    ledger.ask(session, MetaRequest::SetAttr { ino: shut, set }).unwrap();
    for at in ["a", "new/x", "open/x", "shut/x", "shut/y/x", "z"] {
        let (name, meta, caller) = (key(bucket, at), ObjectMeta::default(), Caller::root());
        ledger.object(session, ObjectRequest::CreateUpload { name, meta, caller }).unwrap();
    }
    let mut list = |delimiter: &str, caller: Caller| {
        let (prefix, delimiter) = (name(""), name(delimiter));
        let query = UploadQuery { bucket, prefix, delimiter, after: None, past: None, limit: 10 };
        let reply = ledger.object(session, ObjectRequest::ListUploads { query, caller });
        let Ok(ObjectReply::Uploads(page)) = reply else { panic!("{reply:?}") };
        let keys = page.entries.into_iter().map(|entry| match entry {
            UploadEntry::Upload { key, .. } | UploadEntry::Prefix(key) => key,
        });
        keys.map(|key| String::from_utf8(key.to_vec()).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(list("", Caller::root()), ["a", "new/x", "open/x", "shut/x", "shut/y/x", "z"]);
    assert_eq!(list("", user(6)), ["a", "new/x", "open/x", "z"]);
    // The listing of the parent directory shows that the directory exists.
    assert_eq!(list("/", user(6)), ["a", "new/", "open/", "shut/", "z"]);
}

#[test]
fn a_bucket_is_made_with_its_settings_and_belongs_to_who_asks() {
    let mut ledger = Ledger::new();
    let session = ledger.session();
    let make = |settings: &[(&str, &str)]| ObjectRequest::MakeBucket {
        name: name("new"),
        settings: settings.iter().map(|(at, value)| ((*at).to_owned(), name(value))).collect(),
        caller: user(7),
    };
    assert_eq!(ledger.object(session, make(&[("", "x")])), Err(FsError::Invalid.into()));
    assert_eq!(ledger.object(session, make(&[("owner", "3"), ("policy", "{}")])), Ok(ObjectReply::Done));
    let attr = ledger.attr(session, MetaRequest::Lookup { parent: Ino::ROOT, name: name("new") });
    assert_eq!((attr.uid, attr.gid, attr.mode & 0o7777, attr.kind), (7, 7, 0o755, FileKind::Directory));
    let settings = ledger.object(session, ObjectRequest::BucketSettings { bucket: attr.ino });
    let expected = vec![("owner".to_owned(), name("3")), ("policy".to_owned(), name("{}"))];
    assert_eq!(settings, Ok(ObjectReply::Settings(expected)));
    assert_eq!(ledger.object(session, make(&[])), Err(FsError::Exists.into()));
    audit(&ledger.dump(), &BTreeSet::new());
}

#[test]
fn a_bucket_goes_with_empty_directories_and_not_with_anything_else() {
    let remove = || ObjectRequest::RemoveBucket { name: name("bucket") };
    for kind in [None, Some(FileKind::Regular), Some(FileKind::Symlink), Some(FileKind::Fifo)] {
        let mut ledger = Ledger::new();
        let (session, bucket) = ledger.bucket();
        let a = ledger.make(session, bucket, "a", FileKind::Directory);
        ledger.make(session, bucket, "b", FileKind::Directory);
        let deep = ledger.make(session, a, "c", FileKind::Directory);
        if let Some(kind) = kind {
            ledger.make(session, deep, "there", kind);
            assert_eq!(ledger.object(session, remove()), Err(FsError::NotEmpty.into()), "{kind:?}");
            audit(&ledger.dump(), &BTreeSet::new());
            continue;
        }
        ledger.put(session, bucket, "b/");
        assert_eq!(ledger.object(session, remove()), Err(FsError::NotEmpty.into()), "a directory object");
        ledger.delete(session, bucket, "b/").unwrap();
        let other = ledger.session();
        ledger.attr(other, MetaRequest::Lookup { parent: a, name: name("c") });
        ledger.ask(session, MetaRequest::Make(node(Ino::ROOT, "kept", FileKind::Directory))).unwrap();
        let reply = ledger.object(other, remove());
        assert!(matches!(reply, Ok(ObjectReply::Deleted { .. })), "{reply:?}");
        for gone in [bucket, a, deep] {
            ledger.refuses(session, MetaRequest::GetAttr { ino: gone }, FsError::Stale);
        }
        assert_eq!(ledger.object(session, remove()), Err(FsError::NotFound.into()));
        audit(&ledger.dump(), &BTreeSet::new());
    }
}

#[test]
fn what_is_stored_with_objects_is_no_attribute() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    let request = ObjectRequest::SetBucketSetting { bucket, name: "cors".into(), value: Some(name("x")) };
    ledger.object(session, request).unwrap();
    let settings = ledger.object(session, ObjectRequest::BucketSettings { bucket });
    assert_eq!(settings, Ok(ObjectReply::Settings(vec![("cors".into(), name("x"))])));
    assert_eq!(ledger.ask(session, MetaRequest::ListXattr { ino: bucket }), Ok(MetaReply::Names(vec![])));
    let at = name("s3.bucket.cors");
    let get = MetaRequest::GetXattr { ino: bucket, name: at.clone() };
    assert_eq!(ledger.ask(session, get), Err(FsError::NoAttribute));
    let value = name("y");
    let mode = wire::meta::XattrMode::Set;
    ledger.refuses(
        session,
        MetaRequest::SetXattr { ino: bucket, name: at.clone(), value, mode },
        FsError::Unsupported,
    );
    ledger.refuses(session, MetaRequest::RemoveXattr { ino: bucket, name: at }, FsError::NoAttribute);
}

#[test]
fn a_staged_inode_goes_with_its_session_and_nothing_of_it_stays() {
    for crash in [false, true] {
        let mut ledger = Ledger::new();
        let (idle, bucket) = ledger.bucket();
        let session = ledger.session();
        let first = ledger.extents(session);
        let Ok(ObjectReply::Staged { attr, .. }) = ledger.object(session, ObjectRequest::Stage) else {
            panic!()
        };
        ledger.write(session, attr.ino, &[piece(0, 8, first, 0, 8)]).unwrap();
        ledger.commit();
        if crash {
            ledger = ledger.restart();
        } else {
            ledger.ask(session, MetaRequest::CloseSession).unwrap();
            ledger.ask(idle, MetaRequest::CloseSession).unwrap();
        }
        let session = ledger.session();
        assert_eq!(ledger.ask(session, MetaRequest::GetAttr { ino: attr.ino }), Err(FsError::Stale));
        ledger.purge(session);
        ledger.commit();
        ledger.beat(session);
        assert_eq!(ledger.free(session), [first]);
        assert!(ledger.names(session, bucket).is_empty());
        ledger.check_all(&[first]);
    }
}

#[test]
fn another_sessions_staged_inode_cannot_be_published() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    let other = ledger.session();
    let Ok(ObjectReply::Staged { attr, .. }) = ledger.object(other, ObjectRequest::Stage) else { panic!() };
    let plain = ledger.make(session, bucket, "plain", FileKind::Regular);
    for ino in [attr.ino, plain] {
        let ObjectRequest::Put { name, meta, conditions, caller, .. } = put(key(bucket, "a"), "") else {
            unreachable!()
        };
        let request = ObjectRequest::Put { name, body: ObjectBody::Staged(ino), meta, conditions, caller };
        ledger.refuses(session, MetaRequest::Object(Box::new(request)), FsError::Invalid);
    }
}

#[test]
fn an_opened_object_can_be_read_after_it_was_replaced() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    let reader = ledger.session();
    let old = ledger.put(session, bucket, "a").attr.ino;
    let get = ObjectRequest::Get {
        name: key(bucket, "a"),
        conditions: Conditions::default(),
        caller: Caller::root(),
    };
    ledger.object(reader, get).unwrap();
    let new = ledger.put(session, bucket, "a").attr.ino;
    assert_ne!(old, new);
    assert_eq!(ledger.map(reader, old), [inline(0, "text")]);
    ledger.ask(reader, MetaRequest::Close { inos: vec![old] }).unwrap();
    assert_eq!(ledger.ask(reader, MetaRequest::GetAttr { ino: old }), Err(FsError::Stale));
    ledger.purge(session);
    ledger.check_all(&[]);
}

fn upload(ledger: &mut Ledger, session: SessionId, bucket: Ino, at: &str) -> UploadRef {
    let request = ObjectRequest::CreateUpload {
        name: key(bucket, at),
        meta: ObjectMeta::default(),
        caller: Caller::root(),
    };
    match ledger.object(session, request) {
        Ok(ObjectReply::Upload(id)) => UploadRef { name: key(bucket, at), id },
        other => panic!("{other:?}"),
    }
}

fn put_part(upload: &UploadRef, number: u16, body: ObjectBody) -> ObjectRequest {
    let etag = format!("part {number}");
    ObjectRequest::PutPart {
        upload: upload.clone(),
        number,
        body,
        etag,
        checksum: None,
        caller: Caller::root(),
    }
}

pub(super) fn complete(upload: &UploadRef, numbers: &[u16]) -> ObjectRequest {
    let part =
        |number: &u16| CompletePart { number: *number, etag: format!("part {number}"), checksum: None };
    ObjectRequest::CompleteUpload {
        upload: upload.clone(),
        parts: numbers.iter().map(part).collect(),
        part_bytes_min: 0,
        etag: Some("whole-2".into()),
        checksum: None,
        conditions: Conditions::default(),
        caller: Caller::root(),
    }
}

#[test]
fn an_upload_becomes_an_object_and_a_file_without_moving_a_piece() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    let first = ledger.extents(session);
    let one = upload(&mut ledger, session, bucket, "dir/big");
    let long = piece(0, 20, first, 0, 20);
    ledger.object(session, put_part(&one, 2, body(&[inline(0, "old part")]))).unwrap();
    ledger.object(session, put_part(&one, 2, body(std::slice::from_ref(&long)))).unwrap();
    ledger.object(session, put_part(&one, 1, body(&[inline(0, "first")]))).unwrap();
    ledger.object(session, put_part(&one, 9, body(&[inline(0, "unwanted")]))).unwrap();
    assert!(ledger.names(session, bucket).is_empty(), "parts are invisible");
    let mut ledger = {
        ledger.commit();
        ledger.restart()
    };
    let session = ledger.session();
    let wrong = ledger.object(session, complete(&one, &[1, 3]));
    assert_eq!(wrong, Err(ObjectError::InvalidPart(3)));
    assert_eq!(ledger.object(session, complete(&one, &[2, 1])), Err(ObjectError::InvalidPartOrder));
    ledger.object(session, complete(&one, &[1, 2])).unwrap();
    assert_eq!(ledger.object(session, complete(&one, &[1, 2])), Err(ObjectError::NoSuchUpload));
    let info = ledger.head(session, bucket, "dir/big").unwrap();
    assert_eq!((info.size, info.etag.as_str(), info.meta.parts.len()), (25, "whole-2", 2));
    let ino = info.attr.ino;
    let moved = MapPiece { off: 5, ..long };
    assert_eq!(ledger.map(session, ino), [inline(0, "first"), moved]);
    ledger.purge(session);
    ledger.check_all(&[first]);
    ledger.write(session, ino, &[inline(3, "XXXX")]).unwrap();
    let after = ledger.map(session, ino);
    assert_eq!(after, [inline(0, "fir"), inline(3, "XXXX"), piece(7, 18, first, 2, 20)]);
    assert!(ledger.head(session, bucket, "dir/big").unwrap().meta.parts.is_empty());
    let set = wire::meta::SetAttr { size: Some(10), ..Default::default() };
    ledger.ask(session, MetaRequest::SetAttr { ino, set }).unwrap();
    assert_eq!(ledger.map(session, ino)[2], piece(7, 3, first, 2, 20));
    ledger.check_all(&[first]);
    ledger.delete(session, bucket, "dir/big").unwrap();
    ledger.purge(session);
    ledger.check_all(&[first]);
    ledger.commit();
    ledger.beat(session);
    assert_eq!(ledger.free(session), [first]);
}

#[test]
fn ten_thousand_parts_are_completed_in_one_batch() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    let one = upload(&mut ledger, session, bucket, "big");
    let numbers: Vec<u16> = (1..=wire::object::PARTS_MAX).collect();
    for number in &numbers {
        ledger.object(session, put_part(&one, *number, body(&[inline(0, "part")]))).unwrap();
    }
    ledger.commit();
    let batches = ledger.log.len();
    ledger.object(session, complete(&one, &numbers)).unwrap();
    ledger.commit();
    assert_eq!(ledger.log.len(), batches + 1);
    let info = ledger.head(session, bucket, "big").unwrap();
    assert_eq!((info.size, info.meta.parts.len()), (40_000, 10_000));
    assert_eq!(ledger.map(session, info.attr.ino).len(), 10_000);
    ledger.check_all(&[]);
    ledger.delete(session, bucket, "big").unwrap();
    ledger.purge(session);
    ledger.check_all(&[]);
}

#[test]
fn uploads_that_are_dropped_or_whose_bucket_goes_leave_nothing() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    let first = ledger.extents(session);
    let dropped = upload(&mut ledger, session, bucket, "a");
    ledger.object(session, put_part(&dropped, 1, body(&[piece(0, 9, first, 0, 9)]))).unwrap();
    let abort = ObjectRequest::AbortUpload { upload: dropped.clone(), caller: Caller::root() };
    assert_eq!(ledger.object(session, abort.clone()), Ok(ObjectReply::Done));
    assert_eq!(ledger.object(session, abort), Err(ObjectError::NoSuchUpload));
    for number in 0..3 {
        let left = upload(&mut ledger, session, bucket, "b");
        let content = [piece(0, 9, first + 1 + number, 0, 9)];
        ledger.object(session, put_part(&left, 1, body(&content))).unwrap();
    }
    ledger.ask(session, MetaRequest::Rmdir { parent: Ino::ROOT, name: name("bucket") }).unwrap();
    ledger.purge(session);
    let issued = [first, first + 1, first + 2, first + 3];
    ledger.check_all(&issued);
    ledger.commit();
    ledger.beat(session);
    assert_eq!(ledger.free(session), issued);
    assert!(!ledger.dump().keys().any(|key| matches!(key[4], b'A' | b'G' | b'K' | b'M' | b'P')));
}

#[test]
fn every_request_repeated_gives_its_first_answer_and_has_no_second_effect() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    let one = upload(&mut ledger, session, bucket, "up");
    let two = upload(&mut ledger, session, bucket, "up");
    let create = ObjectRequest::CreateUpload {
        name: key(bucket, "c"),
        meta: ObjectMeta::default(),
        caller: Caller::root(),
    };
    let tags = vec![("a".into(), "b".into())];
    let conditions = Conditions::default();
    let (caller, at) = (Caller::root(), key(bucket, "x/y"));
    let requests = [
        put(at.clone(), "text"),
        put(key(bucket, "d/"), "text"),
        create,
        put_part(&one, 1, body(&[inline(0, "part")])),
        put_part(&one, 2, body(&[inline(0, "part")])),
        complete(&one, &[1, 2]),
        ObjectRequest::SetTags { name: at.clone(), tags, caller: caller.clone() },
        ObjectRequest::AbortUpload { upload: two, caller: caller.clone() },
        ObjectRequest::Stage,
        ObjectRequest::SetBucketSetting { bucket, name: "a".into(), value: Some(name("b")) },
        ObjectRequest::Delete { keys: vec![(at, conditions)], caller: caller.clone() },
        ObjectRequest::MakeBucket { name: name("new"), settings: vec![("a".into(), name("b"))], caller },
        ObjectRequest::RemoveBucket { name: name("new") },
    ];
    for request in requests {
        let id = ledger.next_id(session);
        let request = MetaRequest::Object(Box::new(request));
        let reply = ledger.ask_as(id, &request);
        let refused =
            matches!(&reply, Ok(MetaReply::Object(reply)) if matches!(**reply, ObjectReply::Refused(_)));
        assert!(reply.is_ok() && !refused, "{request:?}: {reply:?}");
        let before = ledger.dump();
        assert_eq!(ledger.ask_as(id, &request), reply, "{request:?}");
        assert_eq!(ledger.dump(), before, "{request:?}");
    }
}

#[test]
fn leases_on_the_old_object_and_the_directory_are_recalled_and_its_name_is_forgotten() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    let other = ledger.session();
    ledger.put(session, bucket, "a/x");
    let dir = ledger.attr(other, MetaRequest::Lookup { parent: bucket, name: name("a") }).ino;
    let old = ledger.attr(other, MetaRequest::Lookup { parent: dir, name: name("x") }).ino;
    ledger.core.take_events();
    let request = MetaRequest::Object(Box::new(put(key(bucket, "a/x"), "new")));
    let id = ledger.next_id(session);
    let (mut recalled, mut forgotten) = (Vec::new(), Vec::new());
    while let Executed::Wait(_) = ledger.core.execute(id, Terms::default(), &request, ledger.now) {
        for (holder, event) in ledger.core.take_events() {
            assert_eq!(holder, other);
            match &event {
                OwnerEvent::Recall { lease, keep: None } => recalled.push(lease.ino),
                OwnerEvent::Forget { dir, name, .. } => forgotten.push((*dir, name.clone())),
                event => panic!("{event:?}"),
            }
            ledger.answer_event(holder, event);
        }
    }
    assert_eq!((recalled, forgotten), (vec![dir, old], vec![(dir, name("x"))]));
    // The writing session must commit its changes before the file is listed or read.
    let new = ledger.head(session, bucket, "a/x").unwrap().attr.ino;
    ledger.write_lease(other, new);
    let query = ListQuery { bucket, prefix: name(""), delimiter: name(""), from: ListFrom::Start, limit: 10 };
    let list = ObjectRequest::List { query, caller: Caller::root() };
    let id = ledger.next_id(session);
    let executed =
        ledger.core.execute(id, Terms::default(), &MetaRequest::Object(Box::new(list)), ledger.now);
    assert!(matches!(executed, Executed::Wait(wait) if wait[0].0 == new));
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(128))]

    /// I18: the pages of every listing equal the sorted list of all keys.
    #[test]
    fn listings_are_in_byte_order_and_complete(
        keys in proptest::collection::btree_set("[a-b0.-]{1,2}(/[a-b0.-]{1,2}){0,3}/?", 0..40),
        prefix in "[a-b0.-]{0,2}(/[a-b0.-]{0,2}){0,1}",
        delimiter in proptest::sample::select(vec!["", "/", "-", "b", "/a", "a/", "0/", "ab"]),
        after in "[a-b0.-]{0,2}(/[a-b0.-]{0,2}){0,2}",
        limit in 1..8u32,
    ) {
        let mut ledger = Ledger::new();
        let (session, bucket) = ledger.bucket();
        let mut there = std::collections::BTreeSet::new();
        for at in keys {
            if at.split('/').any(|part| part == "." || part == "..") {
                continue;
            }
            if ledger.object(session, put(key(bucket, &at), "x")).is_ok() {
                there.insert(at);
            }
        }
        let mut expected: Vec<String> = Vec::new();
        for at in there.iter().filter(|at| at.starts_with(&prefix) && **at > after) {
            let entry = match at[prefix.len()..].find(delimiter).filter(|_| !delimiter.is_empty()) {
                Some(found) => format!("{}*", &at[..prefix.len() + found + delimiter.len()]),
                None => at.clone(),
            };
            if expected.last() != Some(&entry) {
                expected.push(entry);
            }
        }
        let found = ledger.list(session, bucket, (&prefix, delimiter), &after, limit);
        proptest::prop_assert_eq!(found, expected, "keys={:?}", there);
    }
}

#[test]
fn keys_around_a_slash_are_in_byte_order() {
    let mut ledger = Ledger::new();
    let (session, bucket) = ledger.bucket();
    for at in ["a0", "a/x", "a-b", "a.c", "a/", "b"] {
        ledger.put(session, bucket, at);
    }
    assert_eq!(ledger.list(session, bucket, ("", ""), "", 2), ["a-b", "a.c", "a/", "a/x", "a0", "b"]);
    assert_eq!(ledger.list(session, bucket, ("", "/"), "", 2), ["a-b", "a.c", "a/*", "a0", "b"]);
    assert_eq!(ledger.list(session, bucket, ("a/", "/"), "", 2), ["a/", "a/x"]);
}

/// Prints how many keys per second are listed. The bound is far away: the test only fails if the work per key grows
/// with the number of keys.
#[test]
fn a_hundred_thousand_keys_are_listed_quickly() {
    for deep in [false, true] {
        let mut ledger = Ledger::new();
        let (session, bucket) = ledger.bucket();
        for at in 0..100_000 {
            let at =
                if deep { format!("{:02}/{:02}/{at:06}", at % 50, at / 50 % 50) } else { format!("{at:06}") };
            ledger.put(session, bucket, &at);
            if at.ends_with("000") {
                ledger.store();
            }
        }
        ledger.store();
        let clock = base::env::Env::real().clock;
        let start = clock.boot_ns();
        assert_eq!(ledger.list(session, bucket, ("", ""), "", 1000).len(), 100_000);
        let seconds = (clock.boot_ns() - start) as f64 / 1e9;
        println!("deep={deep} keys_per_s={:.0}", 100_000.0 / seconds);
        assert!(seconds < 20.0);
    }
}
