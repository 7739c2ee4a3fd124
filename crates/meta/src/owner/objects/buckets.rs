//! Buckets: top-level directories that are made with their settings and removed with the empty directories in them.

use base::{FsError, Ino};
use bytes::Bytes;
use wire::meta::{FileKind, MakeNode, OpenIntent};
use wire::object::{Caller, Deleted, ObjectReply};

use super::super::guard::{check_removal, check_unguarded};
use super::super::{Intent, Op, Stop, Touched};
use super::{ObjectOutcome, record};
use crate::keys::Keys;
use crate::values::Dentry;

/// Longest name of a bucket's setting, in bytes.
const SETTING_NAME_BYTES_MAX: usize = 200;
/// Permissions of a new bucket's directory.
const BUCKET_MODE: u32 = 0o755;
/// Most empty directories that are removed with a bucket; a bucket with more counts as not empty.
const EMPTY_DIRECTORIES_MAX: usize = 4096;

/// A directory, as an entry of its parent.
struct Entry {
    parent: Ino,
    name: Bytes,
    dentry: Dentry,
}

fn check_setting(name: &str, value: Option<&Bytes>) -> Result<(), FsError> {
    let is_bad_name = name.is_empty() || name.len() > SETTING_NAME_BYTES_MAX || name.contains('\0');
    match is_bad_name || value.is_some_and(|value| value.len() > wire::meta::XATTR_BYTES_MAX) {
        true => Err(FsError::Invalid),
        false => Ok(()),
    }
}

impl Op<'_> {
    pub(super) fn bucket_settings(&self, bucket: Ino) -> ObjectOutcome {
        self.living_directory(bucket)?;
        let mut settings = Vec::new();
        for (key, value) in self.txn.scan(&self.keys.xattrs(bucket), usize::MAX)? {
            let name = Keys::name_of_xattr(&key).strip_prefix(record::SETTING);
            if let Some(name) = name {
                settings.push((String::from_utf8_lossy(name).into_owned(), Bytes::from(value)));
            }
        }
        Ok(ObjectReply::Settings(settings))
    }

    pub(super) fn set_bucket_setting(
        &mut self,
        bucket: Ino,
        name: &str,
        value: Option<&Bytes>,
    ) -> ObjectOutcome {
        let mut dir = self.living_directory(bucket)?;
        check_setting(name, value)?;
        check_unguarded(&dir.attr)?;
        self.clear(bucket, Intent::Change)?;
        let key = self.keys.xattr(bucket, &[record::SETTING, name.as_bytes()].concat());
        match value {
            Some(value) => self.txn.put_bytes(key, value.to_vec()),
            None => self.txn.delete(key),
        }
        self.touch(&mut dir.attr);
        self.put_inode(&dir);
        Ok(ObjectReply::Done)
    }

    /// Makes a bucket with its settings in one step, so that it is never visible without them.
    pub(super) fn make_bucket(
        &mut self,
        name: &Bytes,
        settings: &[(String, Bytes)],
        caller: &Caller,
    ) -> ObjectOutcome {
        settings.iter().try_for_each(|(name, value)| check_setting(name, Some(value)))?;
        let inode = self.make_inode(&MakeNode {
            parent: Ino::ROOT,
            name: name.clone(),
            kind: FileKind::Directory,
            mode: BUCKET_MODE,
            umask: 0,
            uid: caller.uid,
            gid: caller.gid,
            rdev: 0,
            target: Bytes::new(),
            open: OpenIntent::None,
        })?;
        for (name, value) in settings {
            let key = self.keys.xattr(inode.attr.ino, &[record::SETTING, name.as_bytes()].concat());
            self.txn.put_bytes(key, value.to_vec());
        }
        Ok(ObjectReply::Done)
    }

    /// Removes a bucket without objects, in one step with its remaining empty directories.
    ///
    /// # Errors
    /// `NotEmpty` if there is a file of any kind, a directory object, or more than [`EMPTY_DIRECTORIES_MAX`]
    /// directories.
    pub(super) fn remove_bucket(&mut self, name: &Bytes) -> ObjectOutcome {
        let dentry = self.must_find(Ino::ROOT, name)?;
        if dentry.kind != FileKind::Directory {
            return Err(FsError::NotDirectory.into());
        }
        let entries = self.empty_directories(Entry { parent: Ino::ROOT, name: name.clone(), dentry })?;
        let mut touched = vec![Touched::Inode(Ino::ROOT)];
        for entry in &entries {
            check_removal(&self.inode(entry.parent)?.attr, &self.inode(entry.dentry.ino)?.attr)?;
            touched.push(Touched::Name(entry.parent, entry.name.clone()));
            touched.push(Touched::Inode(entry.dentry.ino));
        }
        self.clear_all(&touched)?;
        let mut changed = Vec::new();
        // Reverse order: each directory comes behind its parent.
        for entry in entries.iter().rev() {
            let mut parent = self.directory(entry.parent)?;
            self.remove_name(&mut parent, &entry.name, FileKind::Directory);
            self.put_inode(&parent);
            changed.push(self.drop_link(entry.dentry.ino)?);
            if entry.parent == Ino::ROOT {
                changed.push(parent.attr);
            }
        }
        Ok(ObjectReply::Deleted { results: vec![Ok(Deleted { existed: true })], changed })
    }

    /// A directory and all directories below it; fails if there is any other inode.
    fn empty_directories(&self, top: Entry) -> Result<Vec<Entry>, Stop> {
        let mut found = vec![top];
        let mut at = 0;
        while at < found.len() {
            let dir = found[at].dentry.ino;
            let room = EMPTY_DIRECTORIES_MAX + 1 - found.len();
            for (key, value) in self.txn.scan(&self.keys.dentries(dir), room + 1)? {
                let dentry: Dentry = self.txn.decode(&key, &value)?;
                let is_plain = dentry.kind == FileKind::Directory && self.inode(dentry.ino)?.object.is_none();
                if !is_plain || found.len() > EMPTY_DIRECTORIES_MAX {
                    return Err(FsError::NotEmpty.into());
                }
                let name = Bytes::copy_from_slice(Keys::name_of_dentry(&key));
                found.push(Entry { parent: dir, name, dentry });
            }
            at += 1;
        }
        Ok(found)
    }
}
