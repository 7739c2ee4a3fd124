//! Inodes: attributes, extended attributes, opens, sessions.

use base::{FsError, Ino, SessionId};
use bytes::Bytes;
use wire::meta::{
    FILE_BYTES_MAX, FileKind, LeaseKind, MetaReply, NAME_BYTES_MAX, OpenIntent, SetAttr, XATTR_BYTES_MAX,
    XATTRS_TOTAL_BYTES_MAX, XattrMode,
};

use super::acl::{self, Acl};
use super::guard::{check_adding, check_set, check_unguarded};
use super::{Intent, Op, Outcome, Stop};
use crate::keys::Keys;
use crate::values::{Inode, Orphan, SessionRecord};

/// Attributes with these names belong to objects and buckets; requests for attributes do not show them.
fn is_reserved(name: &[u8]) -> bool {
    name.starts_with(b"s3.")
}

impl Op<'_> {
    pub(super) fn getattr(&mut self, ino: Ino) -> Outcome {
        self.clear(ino, Intent::Read)?;
        let attr = self.inode(ino)?.attr;
        Ok(self.entry(attr))
    }

    pub(super) fn readlink(&mut self, ino: Ino) -> Outcome {
        let inode = self.inode(ino)?;
        if inode.attr.kind != FileKind::Symlink {
            return Err(FsError::Invalid.into());
        }
        Ok(MetaReply::Bytes(inode.target))
    }

    pub(super) fn open(&mut self, ino: Ino, intent: OpenIntent) -> Outcome {
        let mut inode = self.inode(ino)?;
        let (need, kind) = match intent {
            OpenIntent::None | OpenIntent::Read => (Intent::Read, LeaseKind::Read),
            OpenIntent::Write | OpenIntent::Truncate => (Intent::Change, LeaseKind::Exclusive),
        };
        if inode.attr.kind == FileKind::Directory && kind == LeaseKind::Exclusive {
            return Err(FsError::IsDirectory.into());
        }
        match intent {
            OpenIntent::Truncate => check_unguarded(&inode.attr)?,
            OpenIntent::Write => check_adding(&inode.attr)?,
            OpenIntent::None | OpenIntent::Read => {}
        }
        self.clear(ino, need)?;
        if intent == OpenIntent::Truncate {
            self.truncate(&mut inode, 0)?;
            self.touch_content(&mut inode.attr);
            self.put_inode(&inode);
        }
        // `None` if the session's own lease is being recalled. Its release may come only after a flush of the data
        // under it, and the flusher may be waiting for this answer.
        let lease = self.grant(ino, kind);
        if !self.is_open(ino) {
            self.note_open(ino);
            if inode.attr.nlink == 0 {
                // An inode without a name stays alive through the sessions in this record.
                let key = self.keys.orphan(ino);
                let mut orphan =
                    self.txn.get(&key)?.unwrap_or(Orphan { sessions: Vec::new(), may_be_named: false });
                orphan.sessions.push(self.session);
                self.txn.update(key, &orphan);
            }
        }
        Ok(MetaReply::Entry { attr: inode.attr, lease, keep: false })
    }

    pub(super) fn close(&mut self, inos: &[Ino]) -> Outcome {
        for ino in inos {
            self.forget_open(*ino, self.session)?;
        }
        Ok(MetaReply::Done)
    }

    pub(super) fn forget_open(&mut self, ino: Ino, session: SessionId) -> Result<(), Stop> {
        if let Some(sessions) = self.volatile.opens.get_mut(&ino) {
            sessions.retain(|open| *open != session);
            if sessions.is_empty() {
                self.volatile.opens.remove(&ino);
            }
        }
        let key = self.keys.orphan(ino);
        let Some(mut orphan) = self.txn.get::<Orphan>(&key)? else { return Ok(()) };
        orphan.sessions.retain(|open| *open != session);
        if orphan.sessions.is_empty() {
            let inode = self.inode(ino)?;
            self.destroy(&inode)?;
        } else {
            self.txn.update(key, &orphan);
        }
        Ok(())
    }

    pub(super) fn setattr(&mut self, ino: Ino, set: &SetAttr) -> Outcome {
        let mut inode = self.inode(ino)?;
        check_set(&inode.attr, set)?;
        self.clear(ino, Intent::Change)?;
        if let Some(size) = set.size {
            match inode.attr.kind {
                FileKind::Regular => {}
                FileKind::Directory => return Err(FsError::IsDirectory.into()),
                _ => return Err(FsError::Invalid.into()),
            }
            if size > FILE_BYTES_MAX {
                return Err(FsError::TooLarge.into());
            }
            self.truncate(&mut inode, size)?;
            inode.attr.mtime_ns = self.now.wall_ns;
            inode.attr.data_ver += 1;
        }
        self.set(&mut inode, set)?;
        if set.mode.is_some() || set.uid.is_some() || set.gid.is_some() {
            inode.flags &= !Inode::IMPLICIT;
        }
        match set.ctime_ns {
            Some(changed_ns) if set.size.is_none() => self.touch_at(&mut inode.attr, changed_ns),
            _ => self.touch(&mut inode.attr),
        }
        self.put_inode(&inode);
        Ok(MetaReply::Attr(inode.attr))
    }

    pub(super) fn note_read(&mut self, ino: Ino, atime_ns: i64) -> Outcome {
        let mut inode = self.inode(ino)?;
        self.clear(ino, Intent::Change)?;
        inode.attr.atime_ns = inode.attr.atime_ns.max(atime_ns);
        inode.attr.attr_ver += 1;
        self.put_inode(&inode);
        Ok(MetaReply::Attr(inode.attr))
    }

    /// Changes attributes other than the size.
    pub(super) fn set(&mut self, inode: &mut Inode, set: &SetAttr) -> Result<(), FsError> {
        if let Some(mode) = set.mode {
            inode.attr.mode = mode & 0o7777;
            self.chmod_acl(inode.attr.ino, mode)?;
        }
        inode.attr.uid = set.uid.unwrap_or(inode.attr.uid);
        inode.attr.gid = set.gid.unwrap_or(inode.attr.gid);
        inode.attr.atime_ns = set.atime_ns.unwrap_or(inode.attr.atime_ns);
        inode.attr.mtime_ns = set.mtime_ns.unwrap_or(inode.attr.mtime_ns);
        Ok(())
    }

    fn chmod_acl(&mut self, ino: Ino, mode: u32) -> Result<(), FsError> {
        let key = self.keys.xattr(ino, acl::ACCESS);
        if let Some(access) = self.txn.get_bytes(&key)?.as_deref().and_then(Acl::parse) {
            self.txn.put_bytes(key, access.with_mode(mode).encode());
        }
        Ok(())
    }

    pub(super) fn setxattr(&mut self, ino: Ino, name: &Bytes, value: &Bytes, mode: XattrMode) -> Outcome {
        if name.is_empty() || name.contains(&0) {
            return Err(FsError::Invalid.into());
        }
        if name.len() > NAME_BYTES_MAX {
            return Err(FsError::Range.into());
        }
        if value.len() > XATTR_BYTES_MAX {
            return Err(FsError::ValueTooLarge.into());
        }
        if is_reserved(name) {
            return Err(FsError::Unsupported.into());
        }
        let mut inode = self.inode(ino)?;
        check_unguarded(&inode.attr)?;
        self.clear(ino, Intent::Change)?;
        let key = self.keys.xattr(ino, name);
        match (mode, self.txn.get_bytes(&key)?.is_some()) {
            (XattrMode::Create, true) => return Err(FsError::Exists.into()),
            (XattrMode::Replace, false) => return Err(FsError::NoAttribute.into()),
            _ => {}
        }
        let all = self.txn.scan(&self.keys.xattrs(ino), usize::MAX)?;
        let others =
            all.iter().filter(|(other, _)| *other != key && !is_reserved(Keys::name_of_xattr(other)));
        let total: usize = others.map(|(other, value)| Keys::name_of_xattr(other).len() + value.len()).sum();
        if total + name.len() + value.len() > XATTRS_TOTAL_BYTES_MAX {
            return Err(FsError::NoSpace.into());
        }
        if name.as_ref() == acl::ACCESS {
            self.set_access_acl(&mut inode, key, value)?;
        } else {
            if name.as_ref() == acl::DEFAULT
                && (inode.attr.kind != FileKind::Directory || Acl::parse(value).is_none())
            {
                return Err(FsError::Invalid.into());
            }
            self.txn.put_bytes(key, value.to_vec());
        }
        inode.flags &= !Inode::IMPLICIT;
        self.touch(&mut inode.attr);
        self.put_inode(&inode);
        Ok(MetaReply::Attr(inode.attr))
    }

    /// Sets the access list and the mode bits that follow from it. A list that is equivalent to mode bits is not
    /// stored.
    fn set_access_acl(&mut self, inode: &mut Inode, key: Vec<u8>, value: &[u8]) -> Result<(), FsError> {
        let access = Acl::parse(value).ok_or(FsError::Invalid)?;
        inode.attr.mode = inode.attr.mode & !0o777 | access.mode();
        if access.is_minimal() {
            self.txn.delete(key);
        } else {
            self.txn.put_bytes(key, access.encode());
        }
        Ok(())
    }

    pub(super) fn getxattr(&mut self, ino: Ino, name: &Bytes) -> Outcome {
        self.inode(ino)?;
        if is_reserved(name) {
            return Err(FsError::NoAttribute.into());
        }
        let value = self.txn.get_bytes(&self.keys.xattr(ino, name))?.ok_or(FsError::NoAttribute)?;
        Ok(MetaReply::Bytes(value.into()))
    }

    pub(super) fn listxattr(&mut self, ino: Ino) -> Outcome {
        self.inode(ino)?;
        let all = self.txn.scan(&self.keys.xattrs(ino), usize::MAX)?;
        let names = all.iter().map(|(key, _)| Keys::name_of_xattr(key)).filter(|name| !is_reserved(name));
        Ok(MetaReply::Names(names.map(Bytes::copy_from_slice).collect()))
    }

    pub(super) fn removexattr(&mut self, ino: Ino, name: &Bytes) -> Outcome {
        let mut inode = self.inode(ino)?;
        check_unguarded(&inode.attr)?;
        self.clear(ino, Intent::Change)?;
        let key = self.keys.xattr(ino, name);
        if is_reserved(name) || self.txn.get_bytes(&key)?.is_none() {
            return Err(FsError::NoAttribute.into());
        }
        self.txn.delete(key);
        self.touch(&mut inode.attr);
        self.put_inode(&inode);
        Ok(MetaReply::Attr(inode.attr))
    }

    pub(super) fn open_session(&mut self, is_elsewhere: bool) -> Result<SessionId, Stop> {
        let session = SessionId(self.advance("next_session", 1)?);
        let began_ns = self.now.wall_ns as u64;
        let record = SessionRecord { began_ns, is_silent: false, is_elsewhere };
        self.txn.put(self.keys.session(session), &record);
        self.volatile.sessions.insert(session, self.committed.0);
        tracing::debug!(%session, is_elsewhere, "a session begins");
        Ok(session)
    }

    /// Notes that a session was silent for its term, or that it is heard again.
    pub(super) fn mark_silent(&mut self, session: SessionId, is_silent: bool) -> Result<(), Stop> {
        let key = self.keys.session(session);
        if let Some(record) = self.txn.get::<SessionRecord>(&key)? {
            self.txn.update(key, &SessionRecord { is_silent, ..record });
        }
        if is_silent {
            self.volatile.silent.insert(session, self.now.awake_ns);
        } else {
            self.volatile.silent.remove(&session);
            self.volatile.woken.insert(session, self.seq);
        }
        Ok(())
    }

    /// Notes that a session holds nothing, if it may outlive this owner: the next owner does not wait for it.
    pub(super) fn mark_idle(&mut self, session: SessionId) -> Result<(), Stop> {
        self.volatile.idle.insert(session);
        let record = self.txn.get::<SessionRecord>(&self.keys.session(session))?;
        match record.is_some_and(|record| self.volatile.earlier.resume(&record)) {
            true => self.mark_silent(session, true),
            false => Ok(()),
        }
    }

    /// Ends a session: drops its leases, opens and id ranges, and removes inodes that only this session kept alive.
    pub(super) fn end_session(&mut self, session: SessionId) -> Result<(), Stop> {
        tracing::debug!(%session, "a session ends");
        self.close_ranges(session)?;
        self.abandon_blobs(session, &[])?;
        for (key, bytes) in self.txn.scan(&self.keys.orphans(), usize::MAX)? {
            let orphan: Orphan = self.txn.decode(&key, &bytes)?;
            if orphan.sessions.contains(&session) {
                self.forget_open(Keys::ino_of_orphan(&key), session)?;
            }
        }
        for (key, _) in self.txn.scan(&self.keys.slots(session), usize::MAX)? {
            self.txn.delete(key);
        }
        self.txn.delete(self.keys.session(session));
        self.volatile.leases.drop_session(session);
        self.volatile.watches.drop_session(session);
        let super::Volatile { locks, events, .. } = &mut *self.volatile;
        locks.end_session(session, events);
        self.volatile.sessions.remove(&session);
        self.volatile.repeats.forget(session);
        self.volatile.early.remove(&session);
        self.volatile.inherited.retain(|(inherited, _), _| *inherited != session);
        self.volatile.ended.push(session);
        self.volatile.absent.remove(&session);
        self.volatile.silent.remove(&session);
        self.volatile.idle.remove(&session);
        self.volatile.active.remove(&session);
        self.volatile.woken.remove(&session);
        self.volatile.unclaimed.remove(&session);
        for sessions in self.volatile.opens.values_mut() {
            sessions.retain(|open| *open != session);
        }
        self.volatile.opens.retain(|_, sessions| !sessions.is_empty());
        Ok(())
    }
}
