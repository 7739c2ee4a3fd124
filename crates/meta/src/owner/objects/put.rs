//! New objects: staged inodes, and swapping a name over to them.

use base::{FsError, Ino};
use bytes::Bytes;
use wire::meta::{Attr, CommitPiece, Content, FILE_BYTES_MAX, FileKind, LeaseKind};
use wire::object::{
    Caller, Conditions, DIRECTORY_BODY_BYTES_MAX, ObjectBody, ObjectError, ObjectMeta, ObjectName,
    ObjectReply,
};

use super::super::access::{EXECUTE, WRITE};
use super::super::data::check_apart;
use super::super::guard::check_unguarded;
use super::super::{Intent, Op, Stop, Touched};
use super::{ObjectOutcome, Walk, record};
use crate::values::{Dentry, Inode, MapSegment, Orphan};

const FILE_MODE: u32 = 0o666;
const DIRECTORY_MODE: u32 = 0o777;
const UMASK: u32 = 0o022;

/// The source of a new object's bytes.
pub(super) enum Source<'a> {
    Body(&'a ObjectBody),
    /// A map with this many bytes, and the number of stored bytes among them.
    Map {
        segment: MapSegment,
        size: u64,
        stored_bytes: u64,
    },
}

impl Op<'_> {
    pub(super) fn stage(&mut self) -> ObjectOutcome {
        let ino = self.next_ino()?;
        let mut inode = self.new_inode(ino, FileKind::Regular, 0o600);
        inode.attr.nlink = 0;
        inode.segments = self.first_segments(ino)?;
        self.put_inode(&inode);
        self.txn.put(self.keys.orphan(ino), &Orphan { sessions: vec![self.session], may_be_named: false });
        self.account(0, 1)?;
        self.note_open(ino);
        let lease = self.grant(ino, LeaseKind::Exclusive);
        Ok(ObjectReply::Staged { attr: inode.attr, lease })
    }

    pub(super) fn put_object(
        &mut self,
        name: &ObjectName,
        body: &ObjectBody,
        meta: &ObjectMeta,
        conditions: &Conditions,
        caller: &Caller,
    ) -> ObjectOutcome {
        record::check_meta(meta)?;
        if name.directory {
            return self.put_directory(name, body, meta, conditions, caller);
        }
        self.publish(name, Source::Body(body), meta, conditions, caller)
    }

    /// The directories of a key, its last part, and the present entry with that name.
    fn look_up(&self, name: &ObjectName, caller: &Caller) -> Result<(Walk, Bytes, Option<Dentry>), Stop> {
        let walk = self.walk(name, caller)?;
        let last = name.parts.last().ok_or(FsError::Invalid)?.clone();
        let there = if walk.missing.is_empty() { self.find(walk.dir.attr.ino, &last)? } else { None };
        Ok((walk, last, there))
    }

    /// Gives a new object its name, in place of the present entry.
    pub(super) fn publish(
        &mut self,
        name: &ObjectName,
        source: Source<'_>,
        meta: &ObjectMeta,
        conditions: &Conditions,
        caller: &Caller,
    ) -> ObjectOutcome {
        let (walk, last, there) = self.look_up(name, caller)?;
        let old = there.map(|dentry| self.inode(dentry.ino)).transpose()?;
        if old.as_ref().is_some_and(|old| {
            old.attr.kind == FileKind::Directory && (old.attr.size > 0 || old.object.is_some())
        }) {
            return Err(ObjectError::ExistingIsDirectory.into());
        }
        let object = old.as_ref().filter(|old| old.attr.kind == FileKind::Regular);
        self.check_changing(object, conditions)?;
        match &old {
            Some(old) => self.demand_removal(&walk.dir, old, caller)?,
            None => self.demand(&walk.dir, caller, WRITE | EXECUTE)?,
        }
        let first = walk.missing.first().unwrap_or(&last).clone();
        let at = walk.dir.attr.ino;
        let mut touched = vec![Touched::Inode(at), Touched::Name(at, first)];
        touched.extend(old.as_ref().map(|old| Touched::Inode(old.attr.ino)));
        self.clear_all(&touched)?;
        let mut inode = self.new_object(source, at, caller)?;
        let mut changed = Vec::new();
        let mut dir = self.make_parents(walk, caller, &mut changed)?;
        if let Some(old) = &old {
            self.remove_name(&mut dir, &last, old.attr.kind);
            changed.push(self.drop_link(old.attr.ino)?);
        }
        inode.parent = dir.attr.ino;
        self.inherit(&dir, UMASK, &mut inode)?;
        self.save_meta(&mut inode, meta, b"")?;
        self.put_inode(&inode);
        self.add_name(&mut dir, &last, inode.attr.ino, FileKind::Regular);
        self.put_inode(&dir);
        changed.push(dir.attr);
        Ok(self.changed_info(&inode, changed))
    }

    /// Makes the missing directories of a key. Returns the last one, whose inode the caller stores.
    fn make_parents(
        &mut self,
        walk: Walk,
        caller: &Caller,
        changed: &mut Vec<Attr>,
    ) -> Result<Inode, FsError> {
        let Walk { mut dir, missing } = walk;
        for name in missing {
            let made = self.make_directory(&dir, caller, Inode::IMPLICIT)?;
            self.add_name(&mut dir, &name, made.attr.ino, FileKind::Directory);
            self.put_inode(&dir);
            changed.push(dir.attr);
            dir = made;
        }
        Ok(dir)
    }

    /// Makes a directory without a name. The caller stores its inode.
    fn make_directory(&mut self, parent: &Inode, caller: &Caller, flags: u16) -> Result<Inode, FsError> {
        let ino = self.next_ino()?;
        let mut inode = self.new_inode(ino, FileKind::Directory, DIRECTORY_MODE);
        (inode.attr.uid, inode.attr.gid) = (caller.uid, caller.gid);
        inode.attr.nlink = 2;
        inode.parent = parent.attr.ino;
        inode.flags = flags;
        self.inherit(parent, UMASK, &mut inode)?;
        self.account(0, 1)?;
        Ok(inode)
    }

    /// Makes the inode of a new object with its content. The caller stores it. `dir` is the last existing directory of
    /// its key.
    fn new_object(&mut self, source: Source<'_>, dir: Ino, caller: &Caller) -> Result<Inode, Stop> {
        let mut inode = match source {
            Source::Body(ObjectBody::Staged(ino)) => {
                let mut inode = self.staged(*ino)?;
                self.txn.delete(self.keys.orphan(*ino));
                inode.attr.nlink = 1;
                (inode.attr.mtime_ns, inode.attr.btime_ns) = (self.now.wall_ns, self.now.wall_ns);
                self.touch(&mut inode.attr);
                inode
            }
            Source::Body(ObjectBody::Pieces { pieces, size }) => {
                let ino = self.next_ino()?;
                let mut inode = self.new_inode(ino, FileKind::Regular, FILE_MODE);
                inode.segments = self.first_segments(ino)?;
                inode.parent = dir;
                self.account(0, 1)?;
                self.fill(&mut inode, pieces, *size)?;
                inode
            }
            Source::Map { segment, size, stored_bytes } => {
                let ino = self.next_ino()?;
                let mut inode = self.new_inode(ino, FileKind::Regular, FILE_MODE);
                inode.segments = vec![segment];
                (inode.attr.size, inode.attr.stored_bytes) = (size, stored_bytes);
                self.account(0, 1)?;
                inode
            }
        };
        inode.attr.mode = FILE_MODE;
        (inode.attr.uid, inode.attr.gid) = (caller.uid, caller.gid);
        Ok(inode)
    }

    /// A staged inode of this session.
    pub(super) fn staged(&self, ino: Ino) -> Result<Inode, FsError> {
        let inode = self.inode(ino)?;
        let mine = |orphan: &Orphan| orphan.sessions == [self.session];
        let orphan = self.txn.get::<Orphan>(&self.keys.orphan(ino))?;
        let is_file = inode.attr.kind == FileKind::Regular && inode.attr.nlink == 0;
        if is_file && orphan.as_ref().is_some_and(mine) { Ok(inode) } else { Err(FsError::Invalid) }
    }

    /// Stores content in a new inode.
    pub(super) fn fill(
        &mut self,
        inode: &mut Inode,
        pieces: &[CommitPiece],
        size: u64,
    ) -> Result<(), FsError> {
        let end = pieces.iter().map(|commit| commit.piece.end()).max().unwrap_or(0);
        if size > FILE_BYTES_MAX || end > size {
            return Err(FsError::Invalid);
        }
        check_apart(pieces)?;
        for commit in pieces {
            self.check_piece(&commit.piece)?;
            self.replace(inode, &commit.piece)?;
            self.note_placed(commit)?;
        }
        inode.attr.size = size;
        Ok(())
    }

    /// Puts a key that ends in `/`: the directory itself is the object.
    fn put_directory(
        &mut self,
        name: &ObjectName,
        body: &ObjectBody,
        meta: &ObjectMeta,
        conditions: &Conditions,
        caller: &Caller,
    ) -> ObjectOutcome {
        let body = self.directory_body(body)?;
        let (walk, last, there) = self.look_up(name, caller)?;
        let old = match there {
            Some(dentry) if dentry.kind != FileKind::Directory => {
                return Err(ObjectError::ParentIsFile.into());
            }
            Some(dentry) => Some(self.inode(dentry.ino)?),
            None => None,
        };
        self.check_changing(old.as_ref().filter(|old| old.object.is_some()), conditions)?;
        let mut changed = Vec::new();
        let mut inode = match old {
            Some(mut old) => {
                self.demand(&old, caller, WRITE)?;
                check_unguarded(&old.attr)?;
                self.clear(old.attr.ino, Intent::Change)?;
                old.flags &= !Inode::IMPLICIT;
                self.touch_content(&mut old.attr);
                old
            }
            None => {
                self.demand(&walk.dir, caller, WRITE | EXECUTE)?;
                let first = walk.missing.first().unwrap_or(&last).clone();
                let at = walk.dir.attr.ino;
                self.clear_all(&[Touched::Inode(at), Touched::Name(at, first)])?;
                let mut dir = self.make_parents(walk, caller, &mut changed)?;
                let made = self.make_directory(&dir, caller, 0)?;
                self.add_name(&mut dir, &last, made.attr.ino, FileKind::Directory);
                self.put_inode(&dir);
                changed.push(dir.attr);
                made
            }
        };
        self.save_meta(&mut inode, meta, &body)?;
        self.put_inode(&inode);
        changed.push(inode.attr);
        Ok(self.changed_info(&inode, changed))
    }

    /// The bytes of a directory object, which are few and come inline.
    fn directory_body(&self, body: &ObjectBody) -> Result<Vec<u8>, FsError> {
        let (pieces, size) = match body {
            ObjectBody::Staged(ino) if self.staged(*ino)?.attr.size == 0 => return Ok(Vec::new()),
            ObjectBody::Staged(_) => return Err(FsError::TooLarge),
            ObjectBody::Pieces { pieces, size } => (pieces, *size),
        };
        if size > DIRECTORY_BODY_BYTES_MAX as u64 {
            return Err(FsError::TooLarge);
        }
        let mut whole = Vec::with_capacity(size as usize);
        for commit in pieces {
            match &commit.piece.content {
                Content::Inline(bytes) if commit.piece.off == whole.len() as u64 => {
                    whole.extend_from_slice(bytes);
                }
                _ => return Err(FsError::TooLarge),
            }
        }
        if whole.len() as u64 == size { Ok(whole) } else { Err(FsError::Invalid) }
    }
}
