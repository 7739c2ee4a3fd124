//! Guards: the flags of chattr(1), which apply to every caller, with any rights and by any protocol.
//!
//! Setting a guard first takes the leases of all other sessions, so pending changes were flushed before. Requests that
//! move content without changing it, such as packing and tiering, are not refused.

use base::{FsError, Ino};
use wire::guard::Guard;
use wire::meta::{Attr, FileKind, MetaReply, SetAttr};

use super::{Intent, Op, Outcome};
use crate::values::Inode;

impl Op<'_> {
    pub(super) fn set_guard(&mut self, ino: Ino, guard: Guard) -> Outcome {
        let mut inode = self.inode(ino)?;
        if !matches!(inode.attr.kind, FileKind::Regular | FileKind::Directory) {
            return Err(FsError::Unsupported.into());
        }
        self.clear(ino, Intent::Change)?;
        inode.attr.guard = guard;
        inode.flags &= !Inode::IMPLICIT;
        self.touch(&mut inode.attr);
        self.put_inode(&inode);
        Ok(MetaReply::Attr(inode.attr))
    }
}

fn refuse_if(guarded: bool) -> Result<(), FsError> {
    if guarded { Err(FsError::NotPermitted) } else { Ok(()) }
}

/// Refuses changes of attributes, links and existing content of a guarded inode.
pub(super) fn check_unguarded(attr: &Attr) -> Result<(), FsError> {
    refuse_if(attr.guard.is_set())
}

/// Refuses adding names to an immutable directory, and content to an immutable file.
pub(super) fn check_adding(attr: &Attr) -> Result<(), FsError> {
    refuse_if(attr.guard.immutable)
}

/// Refuses removing a name if its directory or its inode is guarded.
pub(super) fn check_removal(dir: &Attr, victim: &Attr) -> Result<(), FsError> {
    refuse_if(dir.guard.is_set() || victim.guard.is_set())
}

/// Refuses setting attributes of a guarded inode. An append-only file may grow.
pub(super) fn check_set(attr: &Attr, set: &SetAttr) -> Result<(), FsError> {
    let grows = set.size.is_some_and(|size| size >= attr.size);
    let nothing_else = SetAttr { size: None, ..set.clone() }.is_empty();
    refuse_if(attr.guard.is_set() && !(grows && nothing_else && !attr.guard.immutable))
}
