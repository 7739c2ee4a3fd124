//! Permission checks: mode bits and access control lists, as in POSIX.

use base::FsError;
use wire::meta::FileKind;
use wire::object::Caller;

use super::Op;
use super::acl::{self, Acl};
use super::guard::{check_adding, check_removal, check_unguarded};
use crate::values::Inode;

pub(super) const READ: u32 = 4;
pub(super) const WRITE: u32 = 2;
/// On a directory: reach its entries.
pub(super) const EXECUTE: u32 = 1;
const STICKY: u32 = 0o1000;

impl Op<'_> {
    pub(super) fn may(&self, inode: &Inode, caller: &Caller, want: u32) -> Result<bool, FsError> {
        let attr = &inode.attr;
        if caller.uid == 0 {
            return Ok(true);
        }
        if caller.uid == attr.uid {
            return Ok(attr.mode >> 6 & want == want);
        }
        let member = |group: Option<u32>| {
            let group = group.unwrap_or(attr.gid);
            caller.gid == group || caller.groups.contains(&group)
        };
        let bytes = self.txn.get_bytes(&self.keys.xattr(attr.ino, acl::ACCESS))?;
        if let Some(list) = bytes.as_deref().and_then(Acl::parse) {
            return Ok(list.allows(caller.uid, member, want));
        }
        let shift = if member(None) { 3 } else { 0 };
        Ok(attr.mode >> shift & want == want)
    }

    /// Checks that the caller has all rights in `want` on the inode. On a directory, writing means adding names; on any
    /// other inode, changing attributes.
    pub(super) fn demand(&self, inode: &Inode, caller: &Caller, want: u32) -> Result<(), FsError> {
        match inode.attr.kind {
            _ if want & WRITE == 0 => {}
            FileKind::Directory => check_adding(&inode.attr)?,
            _ => check_unguarded(&inode.attr)?,
        }
        if self.may(inode, caller, want)? { Ok(()) } else { Err(FsError::Denied) }
    }

    /// Checks that the caller may remove `victim` from `dir`.
    pub(super) fn demand_removal(&self, dir: &Inode, victim: &Inode, caller: &Caller) -> Result<(), FsError> {
        check_removal(&dir.attr, &victim.attr)?;
        self.demand(dir, caller, WRITE | EXECUTE)?;
        let owns = [0, dir.attr.uid, victim.attr.uid].contains(&caller.uid);
        if dir.attr.mode & STICKY == 0 || owns { Ok(()) } else { Err(FsError::Denied) }
    }
}
