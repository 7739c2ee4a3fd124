//! Rights of callers that the owner does not trust to have checked them: users of machines that only mount.
//!
//! The rules are those of a local filesystem, but for what only a client knows. Whether an open file may be read or written was
//! decided when it was opened: a session that has opened a file may read it, and one that holds a lease for writing may
//! write. Inodes are named by numbers, so the rights on the directories above them are checked by the client only, as in NFS.

use base::{FsError, Ino};
use wire::message::Caller;
use wire::meta::{Attr, FileKind, LeaseKind, MakeNode, MetaRequest, OpenIntent, SetAttr};

use super::access::{EXECUTE, READ, WRITE};
use super::{Op, acl};
use crate::values::Inode;

const SET_UID: u32 = 0o4000;
const SET_GID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o010;

fn is_in(caller: &Caller, gid: u32) -> bool {
    caller.gid == gid || caller.groups.contains(&gid)
}

fn owns(caller: &Caller, attr: &Attr) -> bool {
    caller.uid == 0 || caller.uid == attr.uid
}

fn allow(allowed: bool) -> Result<(), FsError> {
    if allowed { Ok(()) } else { Err(FsError::NotPermitted) }
}

/// Requests that need no right. All others without a rule are refused: gates check requests about objects, and nodes do the
/// upkeep, so both are trusted.
fn is_free(request: &MetaRequest) -> bool {
    use MetaRequest as R;
    matches!(
        request,
        R::CloseSession
            | R::Heartbeat { .. }
            | R::GetAttr { .. }
            | R::ReadLink { .. }
            | R::Close { .. }
            | R::ListXattr { .. }
            | R::AllocExtents
            | R::StatFs
            | R::Release { .. }
            | R::ReleaseAll { .. }
            | R::Forgot { .. }
            | R::Unlock { .. }
            | R::TestLock { .. }
    )
}

impl Op<'_> {
    /// Checks that the caller may do this. What is missing, or wrong in other ways, is found when the request is executed.
    pub(super) fn check_rights(&mut self, caller: &Caller, request: &MetaRequest) -> Result<(), FsError> {
        use MetaRequest as R;
        match request {
            R::Lookup { parent, .. } => self.check(*parent, caller, EXECUTE),
            R::ReadDir { ino, .. } => self.check(*ino, caller, READ),
            R::Make(make) | R::MakeUnnamed(make) => self.check_make(caller, make),
            R::Open { ino, intent } => match intent {
                OpenIntent::None => Ok(()),
                OpenIntent::Read => self.check(*ino, caller, READ),
                OpenIntent::Write => self.check(*ino, caller, WRITE),
                OpenIntent::Truncate => self.demand_write(*ino, caller),
            },
            R::Acquire { ino, kind: LeaseKind::Read } | R::NoteRead { ino, .. } | R::GetMap { ino, .. } => {
                self.demand_read(*ino, caller)
            }
            R::Acquire { kind: LeaseKind::Attr, .. } => Ok(()),
            R::Acquire { ino, .. } => match self.found(*ino)? {
                // The owner of a file may change its attributes under the lease, and give itself the right to write.
                Some(inode) if owns(caller, &inode.attr) => Ok(()),
                _ => self.check(*ino, caller, WRITE),
            },
            R::SetAttr { ino, set } => {
                if set.size.is_some() {
                    self.demand_write(*ino, caller)?;
                }
                self.check_set(*ino, caller, set)
            }
            R::Commit { ino, set, pieces, .. } => {
                // The lease, which the owner checks when it executes this, is the right to write.
                if !pieces.is_empty() {
                    self.clear_set_id(*ino, caller)?;
                }
                self.check_set(*ino, caller, set)
            }
            R::Lock { lock, .. } => self.demand_read(lock.ino, caller),
            R::Punch { ino, .. } => self.demand_write(*ino, caller),
            R::CloneRange { from, to, .. } => {
                self.demand_read(*from, caller)?;
                self.demand_write(*to, caller)
            }
            R::Unlink { parent, name } | R::Rmdir { parent, name } => {
                self.check_removal(*parent, name, caller)
            }
            R::Rename { parent, name, new_parent, new_name, .. } => {
                self.check_removal(*parent, name, caller)?;
                self.check_removal(*new_parent, new_name, caller)?;
                let moved = self.find(*parent, name)?;
                match moved.filter(|moved| moved.kind == FileKind::Directory && parent != new_parent) {
                    // Its entry `..` changes.
                    Some(moved) => self.check(moved.ino, caller, WRITE),
                    None => Ok(()),
                }
            }
            R::Link { parent, .. } => self.check(*parent, caller, WRITE | EXECUTE),
            R::SetXattr { ino, name, .. } | R::RemoveXattr { ino, name } => {
                self.check_attribute(*ino, name, caller, WRITE)
            }
            R::GetXattr { ino, name } => self.check_attribute(*ino, name, caller, READ),
            R::SetGuard { .. } => allow(caller.uid == 0),
            _ => allow(is_free(request)),
        }
    }

    fn found(&self, ino: Ino) -> Result<Option<Inode>, FsError> {
        self.txn.get(&self.keys.inode(ino))
    }

    fn check(&self, ino: Ino, caller: &Caller, want: u32) -> Result<(), FsError> {
        match self.found(ino)? {
            Some(inode) => self.demand(&inode, caller, want),
            None => Ok(()),
        }
    }

    fn demand_read(&self, ino: Ino, caller: &Caller) -> Result<(), FsError> {
        let is_open = self.volatile.opens.get(&ino).is_some_and(|open| open.contains(&self.session));
        if is_open { Ok(()) } else { self.check(ino, caller, READ) }
    }

    /// Checks that the caller may change content, and takes the set-id bits away, as every change of content does.
    fn demand_write(&mut self, ino: Ino, caller: &Caller) -> Result<(), FsError> {
        if !self.volatile.leases.holds_writing(ino, self.session) {
            self.check(ino, caller, WRITE)?;
        }
        self.clear_set_id(ino, caller)
    }

    fn clear_set_id(&mut self, ino: Ino, caller: &Caller) -> Result<(), FsError> {
        let Some(mut inode) = self.found(ino)? else { return Ok(()) };
        let mut lost = SET_UID;
        if inode.attr.mode & GROUP_EXECUTE != 0 {
            lost |= SET_GID;
        }
        if caller.uid != 0 && inode.attr.kind == FileKind::Regular && inode.attr.mode & lost != 0 {
            inode.attr.mode &= !lost;
            inode.attr.attr_ver += 1;
            self.put_inode(&inode);
        }
        Ok(())
    }

    fn check_make(&self, caller: &Caller, make: &MakeNode) -> Result<(), FsError> {
        self.check(make.parent, caller, WRITE | EXECUTE)?;
        if caller.uid == 0 {
            return Ok(());
        }
        let is_device = matches!(make.kind, FileKind::CharDevice | FileKind::BlockDevice);
        let inherits = self.found(make.parent)?.is_some_and(|parent| parent.attr.mode & SET_GID != 0);
        let is_member = inherits || is_in(caller, make.gid);
        let gives_group = make.mode & SET_GID != 0 && make.kind != FileKind::Directory;
        allow(!is_device && make.uid == caller.uid && is_member && (!gives_group || is_in(caller, make.gid)))
    }

    fn check_set(&self, ino: Ino, caller: &Caller, set: &SetAttr) -> Result<(), FsError> {
        let Some(inode) = self.found(ino)? else { return Ok(()) };
        let attr = &inode.attr;
        if caller.uid == 0 {
            return Ok(());
        }
        let gid = set.gid.unwrap_or(attr.gid);
        let is_owner = owns(caller, attr);
        allow(set.uid.is_none_or(|uid| uid == attr.uid && is_owner))?;
        allow(set.gid.is_none_or(|gid| is_owner && (gid == attr.gid || is_in(caller, gid))))?;
        if let Some(mode) = set.mode {
            // A writer takes the set-id bits away.
            let takes = mode | SET_UID | SET_GID == attr.mode | SET_UID | SET_GID && mode & !attr.mode == 0;
            let gives_group = mode & !attr.mode & SET_GID != 0 && attr.kind != FileKind::Directory;
            let may_take = takes && self.may(&inode, caller, WRITE)?;
            allow((is_owner && (!gives_group || is_in(caller, gid))) || may_take)?;
        }
        let sets_times = set.atime_ns.is_some() || set.mtime_ns.is_some() || set.ctime_ns.is_some();
        if sets_times && !is_owner && !self.volatile.leases.holds_writing(ino, self.session) {
            return self.demand(&inode, caller, WRITE);
        }
        Ok(())
    }

    /// Checks that the caller may remove a name, or make it if it does not exist.
    fn check_removal(&self, parent: Ino, name: &[u8], caller: &Caller) -> Result<(), FsError> {
        let Some(dir) = self.found(parent)? else { return Ok(()) };
        let victim = match self.find(parent, name)? {
            Some(victim) => self.found(victim.ino)?,
            None => None,
        };
        match victim {
            Some(victim) => self.demand_removal(&dir, &victim, caller),
            None => self.demand(&dir, caller, WRITE | EXECUTE),
        }
    }

    fn check_attribute(&self, ino: Ino, name: &[u8], caller: &Caller, want: u32) -> Result<(), FsError> {
        let Some(inode) = self.found(ino)? else { return Ok(()) };
        if name.starts_with(b"user.") {
            return self.demand(&inode, caller, want);
        }
        if want == READ && !name.starts_with(b"trusted.") {
            return Ok(());
        }
        let is_list = name == acl::ACCESS || name == acl::DEFAULT;
        allow(caller.uid == 0 || (is_list && owns(caller, &inode.attr)))
    }
}
