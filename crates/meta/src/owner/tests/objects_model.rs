//! Random requests of two sessions about objects and names, against a model of keys; with crashes.

use std::collections::{BTreeMap, BTreeSet};

use base::env::Random;
use base::env::sim::SimRandom;
use wire::meta::{RenameMode, SetAttr};
use wire::object::{
    Caller, CompletePart, Conditions, EtagMatch, ObjectBody, ObjectError, ObjectMeta, ObjectReply,
    ObjectRequest, UploadRef,
};

use super::audit::audit;
use super::model::{Cell, cells_of};
use super::objects::{body, key};
use super::*;

use FileKind::{Directory, Regular};

#[derive(Debug, Clone, PartialEq, Eq)]
struct File {
    cells: Vec<Cell>,
    /// The ETag of the last put, until the content changes.
    etag: Option<String>,
    tags: Vec<(String, String)>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Folder {
    implicit: bool,
    object: Option<String>,
}

#[derive(Debug, Clone)]
struct Pending {
    key: String,
    parts: BTreeMap<u16, (String, Vec<Cell>)>,
}

/// The inodes below a bucket, by path.
#[derive(Debug, Clone, Default)]
struct Model {
    files: BTreeMap<String, File>,
    folders: BTreeMap<String, Folder>,
    uploads: BTreeMap<u64, Pending>,
    issued: BTreeSet<u64>,
}

fn parent(path: &str) -> Option<&str> {
    path.rsplit_once('/').map(|(parent, _)| parent)
}

fn parents(path: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(parent(path), |path| parent(path))
}

impl Model {
    fn is_empty(&self, folder: &str) -> bool {
        let below = format!("{folder}/");
        let inside = |path: &String| path.starts_with(&below);
        !self.files.keys().any(inside) && !self.folders.keys().any(inside)
    }

    fn make_parents(&mut self, path: &str) {
        for parent in parents(path) {
            let implied = Folder { implicit: true, object: None };
            self.folders.entry(parent.to_owned()).or_insert(implied);
        }
    }

    /// Whether an object may have this key.
    fn room_for(&self, at: &str) -> Result<(), ObjectError> {
        if parents(at).any(|parent| self.files.contains_key(parent)) {
            return Err(ObjectError::ParentIsFile);
        }
        match self.folders.get(at) {
            Some(folder) if folder.object.is_some() || !self.is_empty(at) => {
                Err(ObjectError::ExistingIsDirectory)
            }
            _ => Ok(()),
        }
    }

    fn put(&mut self, at: &str, file: File, conditions: &Conditions) -> Result<(), ObjectError> {
        self.room_for(at)?;
        if conditions.if_none_match.is_some() && self.files.contains_key(at) {
            return Err(ObjectError::PreconditionFailed);
        }
        if let Some(EtagMatch::List(etags)) = &conditions.if_match {
            let there = self.files.get(at).ok_or(ObjectError::NoSuchKey)?;
            if !there.etag.as_ref().is_some_and(|etag| etags.contains(etag)) {
                return Err(ObjectError::PreconditionFailed);
            }
        }
        self.folders.remove(at);
        self.make_parents(at);
        self.files.insert(at.to_owned(), file);
        Ok(())
    }

    fn put_folder(&mut self, at: &str, etag: String) -> Result<(), ObjectError> {
        if self.files.contains_key(at) || parents(at).any(|parent| self.files.contains_key(parent)) {
            return Err(ObjectError::ParentIsFile);
        }
        self.make_parents(at);
        self.folders.insert(at.to_owned(), Folder { implicit: false, object: Some(etag) });
        Ok(())
    }

    fn prune(&mut self, path: &str) {
        for parent in parents(path) {
            if !self.folders[parent].implicit || !self.is_empty(parent) {
                return;
            }
            self.folders.remove(parent);
        }
    }

    fn delete(&mut self, at: &str, directory: bool) -> bool {
        if !directory {
            let existed = self.files.remove(at).is_some();
            if existed {
                self.prune(at);
            }
            return existed;
        }
        let empty = self.is_empty(at);
        let Some(folder) = self.folders.get_mut(at) else { return false };
        let existed = folder.object.take().is_some();
        if empty {
            self.folders.remove(at);
            self.prune(at);
        } else if existed {
            folder.implicit = true;
        }
        existed
    }

    /// A directory that was emptied by name stays, because the caller sees it.
    fn keep_emptied(&mut self, path: &str) {
        let Some(parent) = parent(path) else { return };
        if self.is_empty(parent) {
            self.folders.get_mut(parent).unwrap().implicit = false;
        }
    }

    fn rename(&mut self, from: &str, to: &str) {
        if let Some(file) = self.files.remove(from) {
            self.files.insert(to.to_owned(), file);
        } else {
            let below = format!("{from}/");
            let moved = |path: &str| format!("{to}{}", &path[from.len()..]);
            let files: Vec<String> =
                self.files.keys().filter(|path| path.starts_with(&below)).cloned().collect();
            for path in files {
                let file = self.files.remove(&path).unwrap();
                self.files.insert(moved(&path), file);
            }
            let folders: Vec<String> = self.folders.keys().cloned().collect();
            for path in folders.iter().filter(|path| *path == from || path.starts_with(&below)) {
                let folder = self.folders.remove(path).unwrap();
                self.folders.insert(moved(path), folder);
            }
            self.folders.get_mut(to).unwrap().implicit = false;
        }
        if parent(from) != parent(to) {
            self.keep_emptied(from);
        }
    }

    /// The expected listing: keys, and groups of keys and of non-empty directories.
    fn list(&self, prefix: &str, delimiter: &str, after: &str) -> Vec<String> {
        let objects = self.folders.iter().filter(|(_, folder)| folder.object.is_some());
        let mut keys: Vec<(String, bool)> = objects.map(|(path, _)| (format!("{path}/"), true)).collect();
        keys.extend(self.files.keys().map(|path| (path.clone(), true)));
        let filled = self.folders.keys().filter(|path| !self.is_empty(path));
        keys.extend(filled.map(|path| (format!("{path}/\0"), false)));
        keys.sort();
        let mut listed: Vec<String> = Vec::new();
        for (at, is_object) in keys.iter().filter(|(at, _)| at.starts_with(prefix) && at.as_str() > after) {
            let entry = match at[prefix.len()..].find(delimiter).filter(|_| !delimiter.is_empty()) {
                Some(found) => format!("{}*", &at[..prefix.len() + found + delimiter.len()]),
                None if *is_object => at.clone(),
                None => continue,
            };
            if listed.last() != Some(&entry) {
                listed.push(entry);
            }
        }
        listed
    }
}

struct Run {
    seed: u64,
    random: SimRandom,
    ledger: Ledger,
    bucket: Ino,
    model: Model,
    committed: Model,
    /// Sessions, each with its next extent id.
    sessions: Vec<(SessionId, u64)>,
    etags: u64,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut ledger = Ledger::new();
        let session = ledger.session();
        let bucket = ledger.make(session, Ino::ROOT, "bucket", Directory);
        ledger.ask(session, MetaRequest::CloseSession).unwrap();
        ledger.commit();
        let random = SimRandom::new(seed);
        let (model, committed) = (Model::default(), Model::default());
        let mut run = Self { seed, random, ledger, bucket, model, committed, sessions: Vec::new(), etags: 0 };
        run.connect();
        run.connect();
        run
    }

    fn below(&self, limit: u64) -> u64 {
        self.random.next_u64() % limit
    }

    fn path(&self) -> String {
        let part = || ["a", "b", "a-", "a0"][self.below(4) as usize];
        (0..1 + self.below(3)).map(|_| part()).collect::<Vec<_>>().join("/")
    }

    fn connect(&mut self) {
        let session = self.ledger.session();
        let first = self.ledger.extents(session);
        self.sessions.push((session, first));
        self.commit();
    }

    fn commit(&mut self) {
        self.ledger.commit();
        self.committed = self.model.clone();
    }

    fn crash(&mut self) {
        self.ledger = self.ledger.restart();
        self.model = self.committed.clone();
        self.sessions.clear();
        self.connect();
        self.connect();
    }

    fn session(&self) -> (usize, SessionId) {
        let at = self.below(2) as usize;
        (at, self.sessions[at].0)
    }

    fn etag(&mut self) -> String {
        self.etags += 1;
        format!("etag{}", self.etags)
    }

    /// Sends the request, sometimes twice.
    fn object(&mut self, session: SessionId, request: ObjectRequest) -> Result<ObjectReply, ObjectError> {
        let request = MetaRequest::Object(Box::new(request));
        let id = self.ledger.next_id(session);
        let reply = self.ledger.ask_as(id, &request);
        if self.below(4) == 0 {
            let refused =
                matches!(&reply, Ok(MetaReply::Object(it)) if matches!(**it, ObjectReply::Refused(_)));
            let before = self.ledger.dump();
            let again = self.ledger.ask_as(id, &request);
            assert!(refused || again == reply, "seed={} again: {request:?}", self.seed);
            assert_eq!(self.ledger.dump(), before, "seed={} again: {request:?}", self.seed);
        }
        match reply.unwrap() {
            MetaReply::Object(reply) => match *reply {
                ObjectReply::Refused(error) => Err(error),
                reply => Ok(reply),
            },
            other => panic!("{other:?}"),
        }
    }

    /// Pieces of new content.
    fn content(&mut self, at: usize) -> Vec<MapPiece> {
        let (mut pieces, mut off) = (Vec::new(), 0);
        for _ in 0..self.below(3) {
            let len = 1 + self.below(8);
            if self.below(2) == 0 {
                pieces.push(inline(off, &"inline bytes"[..len as usize]));
            } else {
                let id = self.sessions[at].1;
                self.sessions[at].1 += 1;
                pieces.push(piece(off, len, id, 0, 16));
            }
            off += len + self.below(2) * 3;
        }
        pieces
    }

    fn cells(pieces: &[MapPiece]) -> Vec<Cell> {
        cells_of(pieces, pieces.iter().map(MapPiece::end).max().unwrap_or(0))
    }

    fn issue(&mut self, pieces: &[MapPiece]) {
        for piece in pieces {
            if let Content::Extent(extent) = &piece.content {
                self.model.issued.insert(extent.id.0);
            }
        }
    }

    /// A body with these pieces, inline or in a staged inode. Staged pieces are written even if the request then fails.
    fn body(&mut self, session: SessionId, pieces: &[MapPiece]) -> (ObjectBody, bool) {
        if self.below(2) == 0 {
            return (body(pieces), false);
        }
        let Ok(ObjectReply::Staged { attr, .. }) = self.object(session, ObjectRequest::Stage) else {
            panic!()
        };
        self.ledger.write(session, attr.ino, pieces).unwrap();
        self.issue(pieces);
        (ObjectBody::Staged(attr.ino), true)
    }

    fn settle(&mut self, session: SessionId, body: ObjectBody, pieces: &[MapPiece], accepted: bool) {
        match body {
            ObjectBody::Staged(ino) if self.below(3) > 0 => {
                self.ledger.ask(session, MetaRequest::Close { inos: vec![ino] }).unwrap();
            }
            ObjectBody::Pieces { .. } if accepted => self.issue(pieces),
            _ => {}
        }
    }

    fn conditions(&self, at: &str) -> Conditions {
        let etag = self.model.files.get(at).and_then(|file| file.etag.clone());
        match self.below(6) {
            0 => Conditions { if_none_match: Some(EtagMatch::Any), ..Conditions::default() },
            1 => {
                let etags = vec![etag.unwrap_or_else(|| "no such".to_owned())];
                Conditions { if_match: Some(EtagMatch::List(etags)), ..Conditions::default() }
            }
            _ => Conditions::default(),
        }
    }

    fn put(&mut self) {
        let ((at, session), path, etag) = (self.session(), self.path(), self.etag());
        let meta = ObjectMeta { etag: Some(etag.clone()), ..ObjectMeta::default() };
        if self.below(6) == 0 {
            let request = ObjectRequest::Put {
                name: key(self.bucket, &format!("{path}/")),
                body: body(&[]),
                meta,
                conditions: Conditions::default(),
                caller: Caller::root(),
            };
            let found = self.object(session, request).map(|_| ());
            assert_eq!(found, self.model.put_folder(&path, etag), "seed={} put {path}/", self.seed);
            return;
        }
        let (pieces, conditions) = (self.content(at), self.conditions(&path));
        let (body, _) = self.body(session, &pieces);
        let request = ObjectRequest::Put {
            name: key(self.bucket, &path),
            body: body.clone(),
            meta,
            conditions: conditions.clone(),
            caller: Caller::root(),
        };
        let found = self.object(session, request).map(|_| ());
        let file = File { cells: Self::cells(&pieces), etag: Some(etag), tags: vec![] };
        assert_eq!(found, self.model.put(&path, file, &conditions), "seed={} put {path}", self.seed);
        self.settle(session, body, &pieces, found.is_ok());
    }

    fn delete(&mut self) {
        let (_, session) = self.session();
        let paths: Vec<(String, bool)> =
            (0..1 + self.below(3)).map(|_| (self.path(), self.below(4) == 0)).collect();
        let slash = |directory: bool| if directory { "/" } else { "" };
        let keys = paths.iter().map(|(path, directory)| {
            (key(self.bucket, &format!("{path}{}", slash(*directory))), Conditions::default())
        });
        let request = ObjectRequest::Delete { keys: keys.collect(), caller: Caller::root() };
        let Ok(ObjectReply::Deleted { results, .. }) = self.object(session, request) else { panic!() };
        for ((path, directory), result) in paths.iter().zip(results) {
            let expected = self.model.delete(path, *directory);
            let found = result.map(|deleted| deleted.existed);
            assert_eq!(found, Ok(expected), "seed={} delete {paths:?}", self.seed);
        }
    }

    fn tag(&mut self) {
        let ((_, session), path) = (self.session(), self.path());
        let tags = vec![("step".to_owned(), self.etag())];
        let name = key(self.bucket, &path);
        let request = ObjectRequest::SetTags { name, tags: tags.clone(), caller: Caller::root() };
        let found = self.object(session, request).map(|_| ());
        let expected = match self.model.files.get_mut(&path) {
            Some(file) => {
                file.tags = tags;
                Ok(())
            }
            None => Err(ObjectError::NoSuchKey),
        };
        assert_eq!(found, expected, "seed={} tag {path}", self.seed);
    }

    fn upload(&mut self) {
        let ((at, session), caller) = (self.session(), Caller::root());
        let some = self.below(self.model.uploads.len() as u64 + 2) as usize;
        let Some((id, pending)) = self.model.uploads.iter().nth(some).map(|(id, it)| (*id, it.clone()))
        else {
            let path = self.path();
            let (name, meta) = (key(self.bucket, &path), ObjectMeta::default());
            let blocked = parents(&path).any(|parent| self.model.files.contains_key(parent));
            match self.object(session, ObjectRequest::CreateUpload { name, meta, caller }) {
                Ok(ObjectReply::Upload(id)) => {
                    assert!(!blocked);
                    self.model.uploads.insert(id, Pending { key: path, parts: BTreeMap::new() });
                }
                other => assert!(blocked && other == Err(ObjectError::ParentIsFile), "{other:?}"),
            }
            return;
        };
        let upload = UploadRef { name: key(self.bucket, &pending.key), id };
        match self.below(6) {
            0 => {
                self.object(session, ObjectRequest::AbortUpload { upload, caller }).unwrap();
                self.model.uploads.remove(&id);
            }
            1 => self.complete(session, upload, &pending),
            _ => {
                let (pieces, etag, number) = (self.content(at), self.etag(), 1 + self.below(4) as u16);
                let (body, _) = self.body(session, &pieces);
                let request = ObjectRequest::PutPart {
                    upload,
                    number,
                    body: body.clone(),
                    etag: etag.clone(),
                    checksum: None,
                    caller,
                };
                self.object(session, request).unwrap();
                self.settle(session, body, &pieces, true);
                let part = (etag, Self::cells(&pieces));
                self.model.uploads.get_mut(&id).unwrap().parts.insert(number, part);
            }
        }
    }

    fn complete(&mut self, session: SessionId, upload: UploadRef, pending: &Pending) {
        let chosen: Vec<_> = pending.parts.iter().filter(|_| self.below(4) > 0).collect();
        let mut named: Vec<CompletePart> = chosen
            .iter()
            .map(|(number, (etag, _))| CompletePart { number: **number, etag: etag.clone(), checksum: None })
            .collect();
        let wrong = self.below(5) == 0;
        if wrong && let Some(part) = named.last_mut() {
            part.etag.push('x');
        }
        let (etag, conditions) = (self.etag(), self.conditions(&pending.key));
        let expected = match named.last() {
            None => Err(ObjectError::InvalidPart(0)),
            Some(last) if wrong => Err(ObjectError::InvalidPart(last.number)),
            Some(_) => {
                let cells = chosen.iter().flat_map(|(_, (_, cells))| cells.clone()).collect();
                let file = File { cells, etag: Some(etag.clone()), tags: vec![] };
                self.model.put(&pending.key, file, &conditions)
            }
        };
        let id = upload.id;
        let request = ObjectRequest::CompleteUpload {
            upload,
            parts: named,
            part_bytes_min: 0,
            etag: Some(etag),
            checksum: None,
            conditions,
            caller: Caller::root(),
        };
        let found = self.object(session, request).map(|_| ());
        assert_eq!(found, expected, "seed={} complete {}", self.seed, pending.key);
        if found.is_ok() {
            self.model.uploads.remove(&id);
        }
    }

    /// The inode at a path, if there is one.
    fn ino(&mut self, session: SessionId, path: &str) -> Option<Ino> {
        let mut at = self.bucket;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            match self.ledger.ask(session, MetaRequest::Lookup { parent: at, name: name(part) }) {
                Ok(MetaReply::Entry { attr, .. }) if attr.kind == Directory => at = attr.ino,
                Ok(MetaReply::Entry { attr, .. }) => at = attr.ino,
                _ => return None,
            }
        }
        Some(at)
    }

    /// The directory of a path, if it is one, and the last name.
    fn place(&mut self, session: SessionId, path: &str) -> Option<(Ino, Bytes)> {
        let dir = parent(path).unwrap_or("");
        if !dir.is_empty() && !self.model.folders.contains_key(dir) {
            return None;
        }
        let ino = self.ino(session, dir)?;
        Some((ino, name(path.rsplit('/').next().unwrap())))
    }

    fn posix(&mut self) {
        let ((at, session), path) = (self.session(), self.path());
        let Some((dir, last)) = self.place(session, &path) else { return };
        let there = self.model.files.contains_key(&path) || self.model.folders.contains_key(&path);
        match self.below(8) {
            0 if !there => {
                self.ledger.make(session, dir, std::str::from_utf8(&last).unwrap(), Directory);
                self.model.folders.insert(path, Folder::default());
            }
            1 | 2 if !there => {
                self.ledger.make(session, dir, std::str::from_utf8(&last).unwrap(), Regular);
                self.model.files.insert(path, File { cells: vec![], etag: None, tags: vec![] });
            }
            3 if self.model.files.contains_key(&path) => {
                self.ledger.ask(session, MetaRequest::Unlink { parent: dir, name: last }).unwrap();
                self.model.files.remove(&path);
                self.model.keep_emptied(&path);
            }
            4 if self.model.folders.contains_key(&path) => {
                let expected = if self.model.is_empty(&path) { Ok(()) } else { Err(FsError::NotEmpty) };
                let found = self.ledger.ask(session, MetaRequest::Rmdir { parent: dir, name: last });
                assert_eq!(found.map(|_| ()), expected, "seed={} rmdir {path}", self.seed);
                if expected.is_ok() {
                    self.model.folders.remove(&path);
                    self.model.keep_emptied(&path);
                }
            }
            5 if self.model.folders.contains_key(&path) => {
                let ino = self.ino(session, &path).unwrap();
                let set = SetAttr { mode: Some(0o750), ..SetAttr::default() };
                self.ledger.ask(session, MetaRequest::SetAttr { ino, set }).unwrap();
                self.model.folders.get_mut(&path).unwrap().implicit = false;
            }
            6 if there => self.rename(session, &path, (dir, last)),
            _ if self.model.files.contains_key(&path) => self.write(at, &path),
            _ => {}
        }
    }

    fn rename(&mut self, session: SessionId, from: &str, source: (Ino, Bytes)) {
        let to = self.path();
        let is_there = self.model.files.contains_key(&to) || self.model.folders.contains_key(&to);
        let Some(target) = self.place(session, &to).filter(|_| !is_there) else { return };
        if to.starts_with(&format!("{from}/")) {
            return;
        }
        let request = MetaRequest::Rename {
            parent: source.0,
            name: source.1,
            new_parent: target.0,
            new_name: target.1,
            mode: RenameMode::Replace,
            whiteout: None,
        };
        self.ledger.ask(session, request).unwrap();
        self.model.rename(from, &to);
    }

    /// Writes to a file, truncates it, or punches a hole.
    fn write(&mut self, at: usize, path: &str) {
        let session = self.sessions[at].0;
        let ino = self.ino(session, path).unwrap();
        let off = self.below(20);
        let mut cells = self.model.files[path].cells.clone();
        match self.below(4) {
            0 => {
                let set = SetAttr { size: Some(off), ..SetAttr::default() };
                self.ledger.ask(session, MetaRequest::SetAttr { ino, set }).unwrap();
                cells.resize(off as usize, Cell::Hole);
            }
            1 => {
                let len = 1 + self.below(10);
                self.ledger.ask(session, MetaRequest::Punch { ino, off, len }).unwrap();
                for at in off..(off + len).min(cells.len() as u64) {
                    cells[at as usize] = Cell::Hole;
                }
            }
            _ => {
                let mut pieces = self.content(at);
                pieces.iter_mut().for_each(|piece| piece.off += off);
                self.ledger.write(session, ino, &pieces).unwrap();
                self.issue(&pieces);
                for piece in &pieces {
                    let new = cells_of(&[MapPiece { off: 0, ..piece.clone() }], piece.len);
                    cells.resize(cells.len().max(piece.end() as usize), Cell::Hole);
                    cells[piece.off as usize..piece.end() as usize].copy_from_slice(&new);
                }
            }
        }
        let file = self.model.files.get_mut(path).unwrap();
        (file.cells, file.etag) = (cells, None);
    }

    fn reclaim(&mut self) {
        let session = self.sessions[0].0;
        self.ledger.purge(session);
        self.commit();
        for (session, _) in self.sessions.clone() {
            self.ledger.beat(session);
        }
        let reply = self.ledger.ask(session, MetaRequest::NextFree { after: None, limit: 1000 });
        let Ok(MetaReply::Free { extents, .. }) = reply else { panic!("{reply:?}") };
        for extent in &extents {
            assert!(self.model.issued.remove(&extent.id.0), "seed={} freed twice: {extent:?}", self.seed);
        }
        self.ledger.ask(session, MetaRequest::Freed { extents, drives: Vec::new() }).unwrap();
    }

    fn check(&mut self) {
        audit(&self.ledger.dump(), &self.model.issued);
        let (_, session) = self.session();
        for (path, file) in self.model.files.clone() {
            let (name, conditions) = (key(self.bucket, &path), Conditions::default());
            let request = ObjectRequest::Head { name, conditions, caller: Caller::root() };
            let Ok(ObjectReply::Info { info, .. }) = self.ledger.object(session, request) else {
                panic!("seed={} {path} is missing", self.seed)
            };
            let etag = file.etag.unwrap_or_else(|| wire::object::etag(&info.attr, None));
            assert_eq!((info.etag, info.meta.tags), (etag, file.tags), "seed={} {path}", self.seed);
            let map = self.ledger.map(session, info.attr.ino);
            assert_eq!(cells_of(&map, info.attr.size), file.cells, "seed={} {path}", self.seed);
        }
        for (path, folder) in self.model.folders.clone() {
            let ino = self.ino(session, &path).unwrap();
            let inode = self.ledger.core.store.begin().get::<Inode>(&self.ledger.core.keys.inode(ino));
            let inode = inode.unwrap().unwrap();
            let found = Folder { implicit: inode.is_implicit(), object: inode.object.map(|tag| tag.etag) };
            assert_eq!(found, folder, "seed={} {path}/", self.seed);
        }
        let prefix = ["", "a", "a/", "a-", "a/b", "b/a"][self.below(6) as usize];
        let delimiter = ["", "/", "-", "a/", "/a"][self.below(5) as usize];
        let after = if self.below(2) == 0 { String::new() } else { self.path() };
        let limit = 1 + self.below(6) as u32;
        let found = self.ledger.list(session, self.bucket, (prefix, delimiter), &after, limit);
        let expected = self.model.list(prefix, delimiter, &after);
        assert_eq!(found, expected, "seed={} {prefix:?} {delimiter:?} {after:?} {limit}", self.seed);
    }

    fn run(&mut self, steps: u64) {
        for step in 0..steps {
            match self.below(40) {
                0..10 => self.put(),
                10..15 => self.delete(),
                15..17 => self.tag(),
                17..25 => self.upload(),
                25..34 => self.posix(),
                34 => self.reclaim(),
                35 => self.crash(),
                36 => {
                    let (at, session) = self.session();
                    self.ledger.ask(session, MetaRequest::CloseSession).unwrap();
                    self.sessions.remove(at);
                    self.connect();
                }
                37 => {
                    self.commit();
                    self.ledger.store();
                }
                _ => self.commit(),
            }
            if step % 4 == 0 {
                self.check();
            }
        }
        // I6: without objects and sessions, no extent is left.
        let paths: Vec<String> = self.model.files.keys().cloned().collect();
        for (session, _) in std::mem::take(&mut self.sessions) {
            self.ledger.ask(session, MetaRequest::CloseSession).unwrap();
        }
        self.connect();
        self.connect();
        let session = self.sessions[0].0;
        for path in paths {
            let keys = vec![(key(self.bucket, &path), Conditions::default())];
            self.object(session, ObjectRequest::Delete { keys, caller: Caller::root() }).unwrap();
            self.model.delete(&path, false);
        }
        for (id, pending) in std::mem::take(&mut self.model.uploads) {
            let upload = UploadRef { name: key(self.bucket, &pending.key), id };
            self.object(session, ObjectRequest::AbortUpload { upload, caller: Caller::root() }).unwrap();
        }
        self.reclaim();
        assert!(self.model.issued.is_empty(), "seed={} something leaked", self.seed);
        self.check();
    }
}

#[test]
fn random_requests_do_what_the_rules_of_keys_say_and_survive_crashes() {
    for seed in 0..150 {
        Run::new(seed).run(300);
    }
}
