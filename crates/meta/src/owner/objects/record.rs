//! Metadata of an object: in its inode, and in attributes that requests for attributes do not show.

use base::{FsError, Ino};
use bytes::Bytes;
use wire::meta::FileKind;
use wire::object::{
    Caller, OBJECT_META_BYTES_MAX, ObjectError, ObjectHeaders, ObjectInfo, ObjectMeta, ObjectName,
    ObjectPart, PARTS_MAX, etag,
};

use super::super::access::{READ, WRITE};
use super::super::{Intent, Op, Stop};
use super::ObjectOutcome;
use crate::keys::Keys;
use crate::values::{Inode, ObjectParts, ObjectRecord, ObjectTag, ObjectTags};

pub(super) const META: &[u8] = b"s3.meta";
pub(super) const TAGS: &[u8] = b"s3.tags";
pub(super) const PARTS: &[u8] = b"s3.parts";
pub(super) const BODY: &[u8] = b"s3.body";
/// Prefix of a bucket's setting; the setting's name follows.
pub(super) const SETTING: &[u8] = b"s3.bucket.";

/// Longest ETag, in bytes.
pub(super) const ETAG_BYTES_MAX: usize = 255;

/// Whether ETag, checksum and parts belong to the present content. The content of a directory object is not its
/// entries.
pub(super) fn is_current(inode: &Inode) -> bool {
    let same = |tag: &ObjectTag| tag.data_ver == inode.attr.data_ver;
    inode.attr.kind == FileKind::Directory || inode.object.as_ref().is_some_and(same)
}

/// The ETag to serve.
pub(super) fn etag_of(inode: &Inode) -> String {
    let stored = inode.object.as_ref().filter(|tag| !tag.etag.is_empty());
    let mut attr = inode.attr;
    if let (FileKind::Directory, Some(tag)) = (attr.kind, &inode.object) {
        attr.data_ver = tag.data_ver;
    }
    etag(&attr, stored.map(|tag| (tag.etag.as_str(), tag.data_ver)))
}

/// Size of the object in bytes.
pub(super) fn size_of(inode: &Inode) -> u64 {
    match (inode.attr.kind, &inode.object) {
        (FileKind::Directory, Some(tag)) => u64::from(tag.body_len),
        (FileKind::Directory, None) => 0,
        _ => inode.attr.size,
    }
}

fn header_bytes(headers: &ObjectHeaders) -> usize {
    let ObjectHeaders {
        content_type,
        cache_control,
        content_disposition,
        content_encoding,
        content_language,
        expires,
        website_redirect,
    } = headers;
    let all = [
        content_type,
        cache_control,
        content_disposition,
        content_encoding,
        content_language,
        expires,
        website_redirect,
    ];
    all.into_iter().flatten().map(String::len).sum()
}

fn pair_bytes(pairs: &[(String, String)]) -> usize {
    pairs.iter().map(|(name, value)| name.len() + value.len()).sum()
}

/// Refuses metadata that is too large.
pub(super) fn check_meta(meta: &ObjectMeta) -> Result<(), ObjectError> {
    let etag = meta.etag.as_ref().map_or(0, String::len);
    let checksum = meta.checksum.as_ref().map_or(0, |checksum| checksum.value.len());
    let total =
        etag + checksum + header_bytes(&meta.headers) + pair_bytes(&meta.user) + pair_bytes(&meta.tags);
    if total > OBJECT_META_BYTES_MAX || etag > ETAG_BYTES_MAX || meta.parts.len() > usize::from(PARTS_MAX) {
        return Err(ObjectError::MetadataTooLarge);
    }
    Ok(())
}

impl Op<'_> {
    fn put_or_delete(&mut self, ino: Ino, name: &[u8], value: Option<Vec<u8>>) -> Result<(), FsError> {
        let key = self.keys.xattr(ino, name);
        match value {
            Some(value) => self.txn.put_bytes(key, value),
            None if self.txn.get_bytes(&key)?.is_some() => self.txn.delete(key),
            None => {}
        }
        Ok(())
    }

    /// Stores metadata with an inode, in place of its present metadata. The caller stores the inode afterwards.
    pub(super) fn save_meta(
        &mut self,
        inode: &mut Inode,
        meta: &ObjectMeta,
        body: &[u8],
    ) -> Result<(), FsError> {
        use crate::values::Value;
        let ino = inode.attr.ino;
        let record = ObjectRecord {
            headers: meta.headers.clone(),
            user: meta.user.clone(),
            checksum: meta.checksum.clone(),
        };
        let tags = Some(&meta.tags).filter(|tags| !tags.is_empty());
        let parts = Some(&meta.parts).filter(|parts| !parts.is_empty());
        self.put_or_delete(ino, META, Some(&record).filter(|it| !it.is_empty()).map(Value::encode))?;
        self.put_or_delete(ino, TAGS, tags.map(|tags| ObjectTags(tags.clone()).encode()))?;
        self.put_or_delete(ino, PARTS, parts.map(|parts| ObjectParts(parts.clone()).encode()))?;
        self.put_or_delete(ino, BODY, Some(body.to_vec()).filter(|body| !body.is_empty()))?;
        let tag = ObjectTag {
            etag: meta.etag.clone().unwrap_or_default(),
            data_ver: inode.attr.data_ver,
            checksum: meta.checksum.as_ref().map(|checksum| checksum.of),
            body_len: body.len() as u32,
        };
        inode.object = Some(tag);
        Ok(())
    }

    /// Removes the metadata of a directory, which is then no object any more.
    pub(super) fn drop_meta(&mut self, inode: &mut Inode) -> Result<(), FsError> {
        for name in [META, TAGS, PARTS, BODY] {
            self.put_or_delete(inode.attr.ino, name, None)?;
        }
        inode.object = None;
        Ok(())
    }

    /// The metadata of an object, without values that do not belong to its present content.
    pub(super) fn load_meta(&self, inode: &Inode) -> Result<ObjectMeta, FsError> {
        let ino = inode.attr.ino;
        let (mut record, mut tags, mut parts) = (ObjectRecord::default(), Vec::new(), Vec::new());
        let Some(tag) = &inode.object else { return Ok(ObjectMeta::default()) };
        let range = (self.keys.xattr(ino, b"s3."), self.keys.xattr(ino, b"s3/"));
        for (key, bytes) in self.txn.scan(&range, usize::MAX)? {
            match Keys::name_of_xattr(&key) {
                META => record = self.txn.decode(&key, &bytes)?,
                TAGS => tags = self.txn.decode::<ObjectTags>(&key, &bytes)?.0,
                PARTS => parts = self.txn.decode::<ObjectParts>(&key, &bytes)?.0,
                _ => {}
            }
        }
        let ObjectRecord { headers, user, checksum } = record;
        let current = is_current(inode);
        Ok(ObjectMeta {
            etag: Some(tag.etag.clone()).filter(|etag| current && !etag.is_empty()),
            headers,
            user,
            checksum: checksum.filter(|_| current),
            tags,
            parts: if current { parts } else { Vec::new() },
        })
    }

    pub(super) fn object_info(&self, inode: &Inode) -> Result<ObjectInfo, FsError> {
        let directory = inode.attr.kind == FileKind::Directory;
        let body = match directory {
            true => self.txn.get_bytes(&self.keys.xattr(inode.attr.ino, BODY))?.unwrap_or_default(),
            false => Vec::new(),
        };
        Ok(ObjectInfo {
            attr: inode.attr,
            size: size_of(inode),
            etag: etag_of(inode),
            meta: self.load_meta(inode)?,
            directory,
            body: Bytes::from(body),
            pieces: None,
        })
    }

    /// The metadata of a copy.
    pub(super) fn copied_meta(
        &mut self,
        source: &ObjectName,
        (ino, data_ver): (Ino, u64),
        meta: Option<&ObjectMeta>,
        tags: Option<&Vec<(String, String)>>,
        caller: &Caller,
    ) -> Result<ObjectMeta, Stop> {
        let found = self.find_object(source, caller)?.ok_or(ObjectError::SourceChanged)?;
        self.demand(&found, caller, READ)?;
        if (found.attr.ino, found.attr.data_ver) != (ino, data_ver) {
            return Err(ObjectError::SourceChanged.into());
        }
        let mut copied = self.load_meta(&found)?;
        if let Some(meta) = meta {
            (copied.headers, copied.user) = (meta.headers.clone(), meta.user.clone());
            if meta.checksum.is_some() {
                copied.checksum = meta.checksum.clone();
            }
            if meta.etag.is_some() {
                copied.etag = meta.etag.clone();
            }
        }
        if let Some(tags) = tags {
            copied.tags = tags.clone();
        }
        Ok(copied)
    }

    pub(super) fn set_object_tags(
        &mut self,
        name: &ObjectName,
        tags: &[(String, String)],
        caller: &Caller,
    ) -> ObjectOutcome {
        let mut inode = self.find_object(name, caller)?.ok_or(ObjectError::NoSuchKey)?;
        self.demand(&inode, caller, WRITE)?;
        self.clear(inode.attr.ino, Intent::Change)?;
        let mut meta = self.load_meta(&inode)?;
        meta.tags = tags.to_vec();
        check_meta(&meta)?;
        let body = self.txn.get_bytes(&self.keys.xattr(inode.attr.ino, BODY))?.unwrap_or_default();
        // The ETag of a directory object stays valid until the object is put again.
        let data_ver = inode.object.as_ref().map(|tag| tag.data_ver);
        self.save_meta(&mut inode, &meta, &body)?;
        if let (FileKind::Directory, Some(tag), Some(data_ver)) =
            (inode.attr.kind, &mut inode.object, data_ver)
        {
            tag.data_ver = data_ver;
        }
        self.touch(&mut inode.attr);
        self.put_inode(&inode);
        let changed = vec![inode.attr];
        Ok(self.changed_info(&inode, changed))
    }
}

/// The form in which an object stores one of its parts.
pub(super) fn kept_part(number: u16, part: &crate::values::Part) -> ObjectPart {
    ObjectPart { number, len: part.len, checksum: part.checksum.as_ref().map(|it| it.value.clone()) }
}
