//! Guards: what chattr(1) protects from everybody, whatever their rights, and whatever protocol they use.
//!
//! Changes that are about to be committed were flushed before a guard is set: setting it takes the leases of all others
//! first. What moves content without changing it, as packing and tiering do, is not held up.

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

/// Attributes, links and content that is there: nothing of that changes on a guarded inode.
pub(super) fn check_unguarded(attr: &Attr) -> Result<(), FsError> {
    refuse_if(attr.guard.is_set())
}

/// Names may be added to a directory, and content to a file.
pub(super) fn check_adding(attr: &Attr) -> Result<(), FsError> {
    refuse_if(attr.guard.immutable)
}

/// A name may go from a directory, and from what it stands for.
pub(super) fn check_removal(dir: &Attr, victim: &Attr) -> Result<(), FsError> {
    refuse_if(dir.guard.is_set() || victim.guard.is_set())
}

/// Attributes may be set. A file that is only added to may grow.
pub(super) fn check_set(attr: &Attr, set: &SetAttr) -> Result<(), FsError> {
    let grows = set.size.is_some_and(|size| size >= attr.size);
    let nothing_else = SetAttr { size: None, ..set.clone() }.is_empty();
    refuse_if(attr.guard.is_set() && !(grows && nothing_else && !attr.guard.immutable))
}
