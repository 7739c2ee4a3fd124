//! Names: lookup, create, link, unlink, rename, list.

use base::{FsError, Ino};
use bytes::Bytes;
use wire::meta::{
    Attr, DirEntry, DirPosition, FileKind, LINKS_MAX, LeaseKind, MakeNode, MetaReply, NAME_BYTES_MAX,
    OpenIntent, RenameMode, SYMLINK_BYTES_MAX, Whiteout,
};

use super::acl::{self, Acl};
use super::guard::{check_adding, check_removal, check_unguarded};
use super::{Intent, Op, Outcome, Stop, Touched, Volatile};
use crate::keys::Keys;
use crate::values::{Dentry, Inode, Orphan, Value};

/// Most entries in one page of a listing.
const PAGE_ENTRIES_MAX: u32 = 4096;
const SET_GID: u32 = 0o2000;

/// A directory and a name in it.
pub(super) type Place<'a> = (Ino, &'a Bytes);

pub(super) fn check_name(name: &[u8]) -> Result<(), FsError> {
    if name.len() > NAME_BYTES_MAX {
        return Err(FsError::NameTooLong);
    }
    let special = name.is_empty() || name == b"." || name == b"..";
    if special || name.contains(&b'/') || name.contains(&0) { Err(FsError::Invalid) } else { Ok(()) }
}

/// Keeps a directory that was emptied by name: a caller that removes its last entry by name, not by key, sees the
/// directory.
fn keep_emptied(dir: &mut Inode) {
    if dir.attr.size == 0 {
        dir.flags &= !Inode::IMPLICIT;
    }
}

impl Op<'_> {
    pub(super) fn find(&self, dir: Ino, name: &[u8]) -> Result<Option<Dentry>, FsError> {
        for kind in [FileKind::Regular, FileKind::Directory] {
            if let Some(dentry) = self.txn.get(&self.keys.dentry(dir, name, kind))? {
                return Ok(Some(dentry));
            }
        }
        Ok(None)
    }

    pub(super) fn must_find(&self, dir: Ino, name: &[u8]) -> Result<Dentry, FsError> {
        self.find(dir, name)?.ok_or(FsError::NotFound)
    }

    pub(super) fn lookup(&mut self, parent: Ino, name: &Bytes) -> Outcome {
        let (ino, is_name) = match name.as_ref() {
            b"." => (parent, false),
            b".." => (self.directory(parent)?.parent, false),
            _ => {
                if name.len() > NAME_BYTES_MAX {
                    return Err(FsError::NameTooLong.into());
                }
                self.directory(parent)?;
                match self.find(parent, name)? {
                    Some(dentry) => (dentry.ino, true),
                    None => return Ok(MetaReply::Missing { keep: self.watch_name(parent, name) }),
                }
            }
        };
        self.clear(ino, Intent::Read)?;
        let attr = self.inode(ino)?.attr;
        let keep = is_name && self.watch_name(parent, name);
        Ok(MetaReply::Entry { attr, lease: self.grant(ino, LeaseKind::Attr), keep })
    }

    pub(super) fn readdir(&mut self, ino: Ino, after: Option<&DirPosition>, limit: u32) -> Outcome {
        let parent = self.directory(ino)?.parent;
        let mut range = self.keys.dentries(ino);
        if let Some(position) = after {
            range.0 = self.keys.dentry(ino, &position.name, position.kind);
            range.0.push(0);
        }
        let limit = limit.clamp(1, PAGE_ENTRIES_MAX) as usize;
        let found = self.txn.scan(&range, limit)?;
        let end = found.len() < limit;
        let mut entries = Vec::with_capacity(found.len());
        for (key, value) in found {
            let dentry: Dentry = self.txn.decode(&key, &value)?;
            let attr = self.inode(dentry.ino)?.attr;
            let name = Bytes::copy_from_slice(Keys::name_of_dentry(&key));
            let lease = self.grant(dentry.ino, LeaseKind::Attr);
            entries.push(DirEntry { name, cookie: dentry.cookie, attr, lease });
        }
        let (watches, now_ns) = (&mut self.volatile.watches, self.now.boot_ns);
        let keep = !watches.is_shared(ino, now_ns) && watches.watch_all(ino, self.session, now_ns);
        Ok(MetaReply::Dir { entries, parent, end, keep })
    }

    pub(super) fn make(&mut self, make: &MakeNode) -> Outcome {
        let inode = self.make_inode(make)?;
        let ino = inode.attr.ino;
        let kind = match make.open {
            OpenIntent::None => LeaseKind::Attr,
            OpenIntent::Read => LeaseKind::Read,
            OpenIntent::Write | OpenIntent::Truncate => LeaseKind::Exclusive,
        };
        if make.open != OpenIntent::None {
            self.note_open(ino);
        }
        let lease = self.grant(ino, kind);
        Ok(MetaReply::Entry { attr: inode.attr, lease, keep: self.watch_name(make.parent, &make.name) })
    }

    /// Makes a file without a name, open by the session. It lasts until it is closed, unless it gets a name.
    pub(super) fn make_unnamed(&mut self, make: &MakeNode) -> Outcome {
        if make.kind != FileKind::Regular || !make.name.is_empty() || !make.target.is_empty() {
            return Err(FsError::Invalid.into());
        }
        let dir = self.living_directory(make.parent)?;
        check_adding(&dir.attr)?;
        let ino = self.next_ino()?;
        let mut inode = self.new_inode(ino, FileKind::Regular, make.mode & 0o7777);
        (inode.attr.uid, inode.attr.gid, inode.attr.nlink) = (make.uid, make.gid, 0);
        inode.parent = make.parent;
        inode.segments = self.first_segments(ino)?;
        self.inherit(&dir, make.umask, &mut inode)?;
        self.put_inode(&inode);
        let orphan = Orphan { sessions: vec![self.session], may_be_named: true };
        self.txn.put(self.keys.orphan(ino), &orphan);
        self.account(0, 1)?;
        self.note_open(ino);
        let lease = self.grant(ino, LeaseKind::Exclusive);
        Ok(MetaReply::Entry { attr: inode.attr, lease, keep: false })
    }

    /// Makes an inode and its name. No session has opened it, holds a lease on it or watches the name yet.
    pub(super) fn make_inode(&mut self, make: &MakeNode) -> Result<Inode, Stop> {
        check_name(&make.name)?;
        if make.target.len() > SYMLINK_BYTES_MAX {
            return Err(FsError::NameTooLong.into());
        }
        let mut parent = self.living_directory(make.parent)?;
        if self.find(make.parent, &make.name)?.is_some() {
            return Err(FsError::Exists.into());
        }
        check_adding(&parent.attr)?;
        self.clear_all(&[Touched::Inode(make.parent), Touched::Name(make.parent, make.name.clone())])?;
        let ino = self.next_ino()?;
        let mut inode = self.new_inode(ino, make.kind, make.mode & 0o7777);
        inode.attr.uid = make.uid;
        inode.attr.gid = make.gid;
        inode.attr.rdev = make.rdev;
        inode.target = make.target.clone();
        inode.parent = make.parent;
        match make.kind {
            FileKind::Directory => inode.attr.nlink = 2,
            FileKind::Symlink => inode.attr.size = make.target.len() as u64,
            FileKind::Regular => inode.segments = self.first_segments(ino)?,
            FileKind::Fifo | FileKind::Socket | FileKind::CharDevice | FileKind::BlockDevice => {}
        }
        self.inherit(&parent, make.umask, &mut inode)?;
        self.put_inode(&inode);
        self.add_name(&mut parent, &make.name, ino, make.kind);
        self.put_inode(&parent);
        self.account(0, 1)?;
        Ok(inode)
    }

    /// The properties that a new inode inherits from its directory: the group of a set-gid directory, and a default
    /// ACL, which replaces the umask and is inherited further.
    pub(super) fn inherit(&mut self, dir: &Inode, umask: u32, inode: &mut Inode) -> Result<(), FsError> {
        let kind = inode.attr.kind;
        if dir.attr.mode & SET_GID != 0 {
            inode.attr.gid = dir.attr.gid;
            if kind == FileKind::Directory {
                inode.attr.mode |= SET_GID;
            }
        }
        if kind == FileKind::Symlink {
            return Ok(());
        }
        let bytes = self.txn.get_bytes(&self.keys.xattr(dir.attr.ino, acl::DEFAULT))?;
        let Some(default) = bytes.as_deref().and_then(Acl::parse) else {
            inode.attr.mode &= !(umask & 0o777);
            return Ok(());
        };
        if kind == FileKind::Directory {
            self.txn.put_bytes(self.keys.xattr(inode.attr.ino, acl::DEFAULT), default.encode());
        }
        let (access, mode) = default.inherit(inode.attr.mode);
        inode.attr.mode = mode;
        if !access.is_minimal() {
            self.txn.put_bytes(self.keys.xattr(inode.attr.ino, acl::ACCESS), access.encode());
        }
        Ok(())
    }

    /// Adds an entry to a directory. The caller stores the directory's inode afterwards.
    pub(super) fn add_name(&mut self, dir: &mut Inode, name: &[u8], ino: Ino, kind: FileKind) {
        let dentry = Dentry { ino, kind, cookie: dir.next_cookie };
        dir.next_cookie += 1;
        self.txn.put(self.keys.dentry(dir.attr.ino, name, kind), &dentry);
        dir.attr.size += 1;
        if kind == FileKind::Directory {
            dir.attr.nlink += 1;
        }
        self.touch_content(&mut dir.attr);
    }

    pub(super) fn remove_name(&mut self, dir: &mut Inode, name: &[u8], kind: FileKind) {
        self.txn.delete(self.keys.dentry(dir.attr.ino, name, kind));
        dir.attr.size -= 1;
        if kind == FileKind::Directory {
            dir.attr.nlink -= 1;
        }
        self.touch_content(&mut dir.attr);
    }

    pub(super) fn touch_content(&self, attr: &mut Attr) {
        attr.mtime_ns = self.now.wall_ns;
        attr.data_ver += 1;
        self.touch(attr);
    }

    pub(super) fn touch(&self, attr: &mut Attr) {
        attr.ctime_ns = self.now.wall_ns;
        attr.attr_ver += 1;
    }

    /// As [`Op::touch`], for an earlier change by the holder of the exclusive lease: the holder's time is used, unless
    /// the owner changed the inode since.
    pub(super) fn touch_at(&self, attr: &mut Attr, changed_ns: i64) {
        attr.ctime_ns = attr.ctime_ns.max(changed_ns);
        attr.attr_ver += 1;
    }

    pub(super) fn link(&mut self, ino: Ino, parent: Ino, name: &Bytes) -> Outcome {
        check_name(name)?;
        let mut dir = self.living_directory(parent)?;
        let mut inode = self.inode(ino)?;
        if inode.attr.kind == FileKind::Directory {
            return Err(FsError::NotPermitted.into());
        }
        let gets_name = inode.attr.nlink == 0;
        if gets_name
            && !self.txn.get::<Orphan>(&self.keys.orphan(ino))?.is_some_and(|orphan| orphan.may_be_named)
        {
            return Err(FsError::NotFound.into());
        }
        if inode.attr.nlink >= LINKS_MAX {
            return Err(FsError::TooManyLinks.into());
        }
        if self.find(parent, name)?.is_some() {
            return Err(FsError::Exists.into());
        }
        check_adding(&dir.attr)?;
        check_unguarded(&inode.attr)?;
        self.clear_all(&[Touched::Inode(parent), Touched::Name(parent, name.clone()), Touched::Inode(ino)])?;
        inode.attr.nlink += 1;
        if gets_name {
            self.txn.delete(self.keys.orphan(ino));
            inode.parent = parent;
        }
        self.touch(&mut inode.attr);
        self.put_inode(&inode);
        self.add_name(&mut dir, name, ino, inode.attr.kind);
        self.put_inode(&dir);
        Ok(MetaReply::Entry { attr: inode.attr, lease: None, keep: self.watch_name(parent, name) })
    }

    pub(super) fn unlink(&mut self, parent: Ino, name: &Bytes) -> Outcome {
        let mut dir = self.directory(parent)?;
        let dentry = self.must_find(parent, name)?;
        if dentry.kind == FileKind::Directory {
            return Err(FsError::IsDirectory.into());
        }
        check_removal(&dir.attr, &self.inode(dentry.ino)?.attr)?;
        self.clear_removal((parent, name), dentry)?;
        self.remove_name(&mut dir, name, dentry.kind);
        keep_emptied(&mut dir);
        self.put_inode(&dir);
        self.drop_link(dentry.ino).map(MetaReply::Attr)
    }

    pub(super) fn rmdir(&mut self, parent: Ino, name: &Bytes) -> Outcome {
        let mut dir = self.directory(parent)?;
        let dentry = self.must_find(parent, name)?;
        if dentry.kind != FileKind::Directory {
            return Err(FsError::NotDirectory.into());
        }
        check_removal(&dir.attr, &self.inode(dentry.ino)?.attr)?;
        self.clear_removal((parent, name), dentry)?;
        self.check_empty(dentry.ino)?;
        self.remove_name(&mut dir, name, dentry.kind);
        keep_emptied(&mut dir);
        self.put_inode(&dir);
        self.drop_link(dentry.ino).map(MetaReply::Attr)
    }

    /// Clears leases and cached names for the removal of a name of an inode.
    fn clear_removal(&mut self, (dir, name): Place<'_>, dentry: Dentry) -> Result<(), Stop> {
        self.clear_all(&[Touched::Inode(dir), Touched::Name(dir, name.clone()), Touched::Inode(dentry.ino)])
    }

    fn check_empty(&self, dir: Ino) -> Result<(), FsError> {
        if self.directory(dir)?.attr.size == 0 { Ok(()) } else { Err(FsError::NotEmpty) }
    }

    /// Removes one link from an inode. Without links the inode is removed, unless it is open: then it stays until it is
    /// closed.
    pub(super) fn drop_link(&mut self, ino: Ino) -> Result<Attr, Stop> {
        let mut inode = self.inode(ino)?;
        let gone = inode.attr.kind == FileKind::Directory;
        inode.attr.nlink = if gone { 0 } else { inode.attr.nlink - 1 };
        self.touch(&mut inode.attr);
        if inode.attr.nlink > 0 {
            self.put_inode(&inode);
            return Ok(inode.attr);
        }
        if !gone {
            self.keep_for_unclaimed(ino);
        }
        match self.volatile.opens.get(&ino) {
            Some(sessions) if !sessions.is_empty() => {
                let orphan = Orphan { sessions: sessions.clone(), may_be_named: false };
                self.txn.put(self.keys.orphan(ino), &orphan);
                self.put_inode(&inode);
            }
            _ => self.destroy(&inode)?,
        }
        Ok(inode.attr)
    }

    pub(super) fn rename(
        &mut self,
        from: Place<'_>,
        to: Place<'_>,
        mode: RenameMode,
        whiteout: Option<Whiteout>,
    ) -> Outcome {
        check_name(from.1)?;
        check_name(to.1)?;
        let (old_dir, new_dir) = (self.living_directory(from.0)?, self.living_directory(to.0)?);
        let source = self.must_find(from.0, from.1)?;
        let target = self.find(to.0, to.1)?;
        match (mode, target) {
            (RenameMode::NoReplace, Some(_)) => return Err(FsError::Exists.into()),
            (RenameMode::Exchange, None) => return Err(FsError::NotFound.into()),
            _ => {}
        }
        if target.is_some_and(|target| target.ino == source.ino) {
            let moved = self.inode(source.ino)?.attr;
            self.watch_moved(from, to);
            return Ok(MetaReply::Renamed { moved, other: None });
        }
        self.check_no_loop(source, to.0)?;
        if let (RenameMode::Exchange, Some(target)) = (mode, target) {
            self.check_no_loop(target, from.0)?;
        }
        check_removal(&old_dir.attr, &self.inode(source.ino)?.attr)?;
        match target {
            Some(target) => check_removal(&new_dir.attr, &self.inode(target.ino)?.attr)?,
            None => check_adding(&new_dir.attr)?,
        }
        let mut touched = Vec::new();
        for (place, dentry) in [(from, Some(source)), (to, target)] {
            touched.extend([Touched::Inode(place.0), Touched::Name(place.0, place.1.clone())]);
            touched.extend(dentry.map(|dentry| Touched::Inode(dentry.ino)));
        }
        self.clear_all(&touched)?;
        match (mode, target) {
            (RenameMode::Exchange, Some(target)) => self.exchange(from, source, to, target),
            (_, target) => self.move_name((from, source), (to, target), whiteout),
        }
    }

    /// Notes that the kernel above the caller caches a moved inode under its new name, for as long as under the old
    /// one.
    fn watch_moved(&mut self, from: Place<'_>, (dir, name): Place<'_>) {
        let (now_ns, Volatile { watches, events, .. }) = (self.now.boot_ns, &mut *self.volatile);
        if !watches.is_shared(dir, now_ns) || watches.is_cached(from.0, self.session, from.1, now_ns) {
            watches.watch_moved(dir, self.session, name, now_ns, events);
        }
    }

    fn check_no_loop(&self, moved: Dentry, into: Ino) -> Result<(), FsError> {
        if moved.kind != FileKind::Directory {
            return Ok(());
        }
        let mut at = into;
        while at != Ino::ROOT {
            if at == moved.ino {
                return Err(FsError::Invalid);
            }
            at = self.directory(at)?.parent;
        }
        Ok(())
    }

    fn move_name(
        &mut self,
        (from, source): (Place<'_>, Dentry),
        (to, target): (Place<'_>, Option<Dentry>),
        whiteout: Option<Whiteout>,
    ) -> Outcome {
        if let Some(target) = target {
            match (source.kind == FileKind::Directory, target.kind == FileKind::Directory) {
                (true, false) => return Err(FsError::NotDirectory.into()),
                (false, true) => return Err(FsError::IsDirectory.into()),
                (true, true) => self.check_empty(target.ino)?,
                (false, false) => {}
            }
        }
        let mut old_dir = self.directory(from.0)?;
        self.remove_name(&mut old_dir, from.1, source.kind);
        if from.0 != to.0 {
            keep_emptied(&mut old_dir);
        }
        if let Some(whiteout) = whiteout {
            self.leave_whiteout(&mut old_dir, from.1, whiteout)?;
        }
        self.put_inode(&old_dir);
        let mut new_dir = self.directory(to.0)?;
        let mut other = None;
        if let Some(target) = target {
            self.remove_name(&mut new_dir, to.1, target.kind);
            other = Some(self.drop_link(target.ino)?);
        }
        self.add_name(&mut new_dir, to.1, source.ino, source.kind);
        self.put_inode(&new_dir);
        let moved = self.settle(source, to.0)?;
        self.watch_moved(from, to);
        Ok(MetaReply::Renamed { moved, other })
    }

    /// Puts a whiteout in place of a name that was just removed. The caller stores the directory's inode.
    fn leave_whiteout(&mut self, dir: &mut Inode, name: &Bytes, whiteout: Whiteout) -> Result<(), FsError> {
        let ino = self.next_ino()?;
        let mut inode = self.new_inode(ino, FileKind::CharDevice, 0);
        (inode.attr.uid, inode.attr.gid) = (whiteout.uid, whiteout.gid);
        inode.parent = dir.attr.ino;
        self.put_inode(&inode);
        self.add_name(dir, name, ino, FileKind::CharDevice);
        self.account(0, 1)
    }

    fn exchange(&mut self, from: Place<'_>, source: Dentry, to: Place<'_>, target: Dentry) -> Outcome {
        for (place, old, new) in [(from, source, target), (to, target, source)] {
            let mut dir = self.directory(place.0)?;
            self.remove_name(&mut dir, place.1, old.kind);
            self.add_name(&mut dir, place.1, new.ino, new.kind);
            self.put_inode(&dir);
        }
        let moved = self.settle(source, to.0)?;
        let other = Some(self.settle(target, from.0)?);
        self.watch_moved(to, from);
        self.watch_moved(from, to);
        Ok(MetaReply::Renamed { moved, other })
    }

    /// Notes in a moved inode its time of change and its new directory.
    fn settle(&mut self, moved: Dentry, dir: Ino) -> Result<Attr, FsError> {
        let mut inode = self.inode(moved.ino)?;
        inode.parent = dir;
        if inode.attr.kind == FileKind::Directory {
            inode.flags &= !Inode::IMPLICIT;
        }
        self.touch(&mut inode.attr);
        self.put_inode(&inode);
        Ok(inode.attr)
    }

    /// Removes an inode for good; upkeep purges the pieces of its map later.
    pub(super) fn destroy(&mut self, inode: &Inode) -> Result<(), FsError> {
        let ino = inode.attr.ino;
        for (key, _) in self.txn.scan(&self.keys.xattrs(ino), usize::MAX)? {
            self.txn.delete(key);
        }
        if let Some(map) = inode.map()
            && (inode.attr.stored_bytes > 0 || inode.attr.size > 0)
        {
            self.txn.put_bytes(self.keys.purge(map), 0u64.encode());
        }
        if inode.attr.kind == FileKind::Directory
            && !self.txn.scan(&self.keys.uploads(ino, b""), 1)?.is_empty()
        {
            self.txn.put(self.keys.gone_bucket(ino), &0u64);
        }
        self.txn.delete(self.keys.inode(ino));
        self.txn.delete(self.keys.orphan(ino));
        self.volatile.opens.remove(&ino);
        self.volatile.leases.drop_inode(ino);
        self.volatile.watches.drop_inode(ino);
        self.volatile.gone.push(ino);
        self.account(-(inode.attr.stored_bytes as i64), -1)
    }
}
