//! Removal of objects, and of directories that existed only because of them.

use base::FsError;
use wire::meta::{Attr, FileKind};
use wire::object::{Caller, Conditions, DELETE_KEYS_MAX, Deleted, ObjectError, ObjectName, ObjectReply};

use super::super::access::WRITE;
use super::super::{Intent, Op, Stop, Touched};
use super::ObjectOutcome;
use crate::values::Inode;

impl Op<'_> {
    pub(super) fn delete_objects(
        &mut self,
        keys: &[(ObjectName, Conditions)],
        caller: &Caller,
    ) -> ObjectOutcome {
        if keys.len() > DELETE_KEYS_MAX {
            return Err(FsError::Invalid.into());
        }
        let mut touched = Vec::new();
        for (name, _) in keys {
            self.touched_by_removal(name, caller, keys.len(), &mut touched)?;
        }
        self.clear_all(&touched)?;
        let (mut results, mut changed) = (Vec::with_capacity(keys.len()), Vec::new());
        for (name, conditions) in keys {
            // A refusal comes before any change for this key.
            results.push(match self.delete_object(name, conditions, caller, &mut changed) {
                Ok(deleted) => Ok(deleted),
                Err(Stop::Refuse(error)) => Err(error),
                Err(Stop::Fail(error)) if error != FsError::Io => Err(ObjectError::Fs(error)),
                Err(stop) => return Err(stop),
            });
        }
        Ok(ObjectReply::Deleted { results, changed })
    }

    fn delete_object(
        &mut self,
        name: &ObjectName,
        conditions: &Conditions,
        caller: &Caller,
        changed: &mut Vec<Attr>,
    ) -> Result<Deleted, Stop> {
        let missing = Deleted { existed: false };
        let walk = match self.walk(name, caller) {
            Ok(walk) if walk.missing.is_empty() => walk,
            Ok(_) | Err(Stop::Refuse(ObjectError::ParentIsFile)) => {
                self.check_changing(None, conditions)?;
                return Ok(missing);
            }
            Err(stop) => return Err(stop),
        };
        let object = self.object_in(&walk.dir, name)?;
        self.check_changing(object.as_ref(), conditions)?;
        let existed = object.is_some();
        let victim = match object {
            Some(inode) => inode,
            None => match self.empty_directory(&walk.dir, name)? {
                Some(inode) => inode,
                None => return Ok(missing),
            },
        };
        if name.directory && victim.attr.size > 0 {
            self.demand(&victim, caller, WRITE)?;
            self.unmark(victim, changed)?;
            return Ok(Deleted { existed });
        }
        self.demand_removal(&walk.dir, &victim, caller)?;
        self.remove_upward(walk.dir, name, victim, changed)?;
        Ok(Deleted { existed })
    }

    /// An empty directory that is no object. A request that deletes it by its key removes it.
    fn empty_directory(&self, dir: &Inode, name: &ObjectName) -> Result<Option<Inode>, FsError> {
        let last = name.parts.last().ok_or(FsError::Invalid)?;
        let Some(dentry) = self.find(dir.attr.ino, last)? else { return Ok(None) };
        if !name.directory || dentry.kind != FileKind::Directory {
            return Ok(None);
        }
        let inode = self.inode(dentry.ino)?;
        Ok(Some(inode).filter(|inode| inode.attr.size == 0))
    }

    /// Makes a directory object with entries an implicit directory: it stays as their parent.
    fn unmark(&mut self, mut inode: Inode, changed: &mut Vec<Attr>) -> Result<(), Stop> {
        self.clear(inode.attr.ino, Intent::Change)?;
        self.drop_meta(&mut inode)?;
        inode.flags |= Inode::IMPLICIT;
        self.touch(&mut inode.attr);
        self.put_inode(&inode);
        changed.push(inode.attr);
        Ok(())
    }

    /// Removes `victim` from `dir`. Then removes upward every implicit directory below the bucket that became empty.
    fn remove_upward(
        &mut self,
        mut dir: Inode,
        name: &ObjectName,
        mut victim: Inode,
        changed: &mut Vec<Attr>,
    ) -> Result<(), Stop> {
        for part in name.parts.iter().rev() {
            let at = dir.attr.ino;
            let touched =
                [Touched::Inode(at), Touched::Name(at, part.clone()), Touched::Inode(victim.attr.ino)];
            self.clear_all(&touched)?;
            self.remove_name(&mut dir, part, victim.attr.kind);
            self.put_inode(&dir);
            changed.push(dir.attr);
            changed.push(self.drop_link(victim.attr.ino)?);
            if !dir.is_implicit() || dir.attr.size > 0 || at == name.bucket {
                break;
            }
            let parent = self.directory(dir.parent)?;
            if parent.attr.guard.is_set() {
                break;
            }
            victim = std::mem::replace(&mut dir, parent);
        }
        Ok(())
    }

    /// The items that the deletion of a key may change; it is one of `count` in a batch. All of them are cleared before
    /// the first deletion begins, so that none has to wait after another has begun: an operation's changes of leases
    /// and opens cannot be undone.
    fn touched_by_removal(
        &self,
        name: &ObjectName,
        caller: &Caller,
        count: usize,
        touched: &mut Vec<Touched>,
    ) -> Result<(), FsError> {
        let Ok(walk) = self.walk(name, caller) else { return Ok(()) };
        if !walk.missing.is_empty() {
            return Ok(());
        }
        let mut dir = walk.dir;
        for part in name.parts.iter().rev() {
            let at = dir.attr.ino;
            let Some(dentry) = self.find(at, part)? else { return Ok(()) };
            touched.extend([Touched::Inode(at), Touched::Name(at, part.clone()), Touched::Inode(dentry.ino)]);
            // Each key removes at most one name from a directory.
            if !dir.is_implicit() || at == name.bucket || dir.attr.size > count as u64 {
                break;
            }
            dir = self.directory(dir.parent)?;
        }
        Ok(())
    }
}
