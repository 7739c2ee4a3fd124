//! Multipart uploads: a part is a map in a table; completing an upload joins these maps into one.
//!
//! A part is no inode: its bytes were written to a staged file, which ends when it becomes a part. The map of the
//! object refers to the maps of its parts, so no byte and no piece moves, however many there are.

use std::collections::BTreeMap;

use base::{FsError, Ino, MapId};
use bytes::Bytes;
use wire::meta::{FILE_BYTES_MAX, FileKind, MetaReply};
use wire::object::{
    Caller, Checksum, CompletePart, ObjectBody, ObjectError, ObjectMeta, ObjectName, ObjectReply,
    ObjectRequest, PARTS_MAX, PartInfo, PartPage, UploadEntry, UploadPage, UploadQuery, UploadRef,
};

use super::super::access::{EXECUTE, WRITE};
use super::super::{Op, Outcome, Stop};
use super::list::{behind, group_of};
use super::put::Source;
use super::{ObjectOutcome, check_name, record};
use crate::keys::Keys;
use crate::values::{COMPOSED_MAP, Inode, MapSegment, ObjectRecord, Part, Piece, Upload, Value};

const PAGE_MAX: u32 = 1000;

/// The parts of an upload that is completed.
struct Chosen {
    /// Parts of the object, in order.
    parts: Vec<(u16, Part)>,
    /// Parts that the request does not name.
    others: Vec<Part>,
}

/// A part that was uploaded.
pub(super) struct NewPart<'a> {
    pub(super) number: u16,
    pub(super) etag: &'a str,
    pub(super) checksum: Option<&'a Checksum>,
}

impl Op<'_> {
    /// Checks that the caller may work on an upload: it needs the right to write in the key's directory.
    fn demand_upload(&self, name: &ObjectName, caller: &Caller) -> Result<(), Stop> {
        match self.walk(name, caller) {
            Ok(walk) => Ok(self.demand(&walk.dir, caller, WRITE | EXECUTE)?),
            // An upload that cannot be completed any more can still be aborted.
            Err(Stop::Refuse(ObjectError::ParentIsFile)) => Ok(()),
            Err(stop) => Err(stop),
        }
    }

    fn upload_key(&self, upload: &UploadRef) -> Vec<u8> {
        self.keys.upload(upload.name.bucket, &upload.name.key(), upload.id)
    }

    fn upload(&self, upload: &UploadRef, caller: &Caller) -> Result<Upload, Stop> {
        check_name(&upload.name)?;
        let found = self.txn.get(&self.upload_key(upload))?.ok_or(ObjectError::NoSuchUpload)?;
        self.demand_upload(&upload.name, caller)?;
        Ok(found)
    }

    pub(super) fn create_upload(
        &mut self,
        name: &ObjectName,
        meta: &ObjectMeta,
        caller: &Caller,
    ) -> ObjectOutcome {
        record::check_meta(meta)?;
        if name.directory {
            return Err(FsError::Invalid.into());
        }
        let walk = self.walk(name, caller)?;
        self.demand(&walk.dir, caller, WRITE | EXECUTE)?;
        let id = self.advance("next_upload", 1)?;
        let upload = Upload {
            started_ns: self.now.wall_ns,
            caller: caller.clone(),
            record: ObjectRecord {
                headers: meta.headers.clone(),
                user: meta.user.clone(),
                checksum: meta.checksum.clone(),
            },
            tags: meta.tags.clone(),
        };
        self.txn.put(self.keys.upload(name.bucket, &name.key(), id), &upload);
        Ok(ObjectReply::Upload(id))
    }

    pub(super) fn put_part(
        &mut self,
        upload: &UploadRef,
        new: NewPart<'_>,
        body: &ObjectBody,
        caller: &Caller,
    ) -> ObjectOutcome {
        self.upload(upload, caller)?;
        if new.number == 0 || new.number > PARTS_MAX || new.etag.len() > record::ETAG_BYTES_MAX {
            return Err(ObjectError::InvalidPart(new.number).into());
        }
        let inode = match body {
            ObjectBody::Staged(ino) => self.staged(*ino)?,
            ObjectBody::Pieces { pieces, size } => {
                // A temporary holder of the content: it never becomes an inode.
                let mut inode = self.new_inode(Ino(0), FileKind::Regular, 0);
                inode.segments = self.segments(None)?;
                inode.parent = upload.name.bucket;
                self.fill(&mut inode, pieces, *size)?;
                inode
            }
        };
        let key = self.keys.part(upload.id, new.number);
        if let Some(old) = self.txn.get::<Part>(&key)? {
            self.drop_part(&old)?;
        }
        let part = Part {
            map: inode.map().ok_or(FsError::Io)?,
            len: inode.attr.size,
            stored_bytes: inode.attr.stored_bytes,
            mtime_ns: self.now.wall_ns,
            etag: new.etag.to_owned(),
            checksum: new.checksum.cloned(),
        };
        self.txn.put(key, &part);
        if let ObjectBody::Staged(ino) = body {
            self.account(0, -1)?;
            self.txn.delete(self.keys.inode(*ino));
            self.txn.delete(self.keys.orphan(*ino));
            self.volatile.opens.remove(ino);
            self.volatile.leases.drop_inode(*ino);
            self.volatile.gone.push(*ino);
        }
        Ok(ObjectReply::Done)
    }

    /// Removes the bytes of a part that was replaced or is not used.
    fn drop_part(&mut self, part: &Part) -> Result<(), FsError> {
        self.txn.put_bytes(self.keys.purge(part.map), 0u64.encode());
        self.account(-(part.stored_bytes as i64), 0)
    }

    pub(super) fn list_parts(
        &mut self,
        upload: &UploadRef,
        after: u16,
        limit: u32,
        caller: &Caller,
    ) -> ObjectOutcome {
        let found = self.upload(upload, caller)?;
        let limit = limit.min(PAGE_MAX) as usize;
        let mut range = self.keys.parts(upload.id);
        range.0 = self.keys.part(upload.id, after);
        range.0.push(0);
        let mut parts = Vec::new();
        for (key, bytes) in self.txn.scan(&range, limit + 1)? {
            let Part { len, mtime_ns, etag, checksum, .. } = self.txn.decode(&key, &bytes)?;
            parts.push(PartInfo { number: Keys::number_of_part(&key), len, etag, checksum, mtime_ns });
        }
        let more = parts.len() > limit;
        parts.truncate(limit);
        let page =
            PartPage { meta: found.meta(), caller: found.caller, started_ns: found.started_ns, parts, more };
        Ok(ObjectReply::Parts(page))
    }

    pub(super) fn list_uploads(&mut self, query: &UploadQuery, caller: &Caller) -> ObjectOutcome {
        let bucket = self.living_directory(query.bucket)?;
        self.demand(&bucket, caller, super::super::access::READ | EXECUTE)?;
        let limit = query.limit.min(PAGE_MAX) as usize;
        let mut from = self.keys.uploads(query.bucket, &query.prefix).0;
        match &query.after {
            Some((key, Some(id))) => {
                let mut after = self.keys.upload(query.bucket, key, *id);
                after.push(0);
                from = from.max(after);
            }
            Some((key, None)) => {
                from = from.max(self.keys.uploads(query.bucket, &[key, &[1][..]].concat()).0)
            }
            None => {}
        }
        let end = self.keys.uploads(query.bucket, b"").1;
        if let Some(past) = &query.past {
            from =
                from.max(behind(past).map_or(end.clone(), |past| self.keys.uploads(query.bucket, &past).0));
        }
        let mut page = UploadPage { entries: Vec::new(), more: false };
        if limit == 0 {
            return Ok(ObjectReply::Uploads(page));
        }
        'pages: loop {
            let found = self.txn.scan(&(from.clone(), end.clone()), 64)?;
            let Some((last, _)) = found.last() else { break };
            from = [last.as_slice(), &[0]].concat();
            for (stored, bytes) in found {
                let (key, id) = Keys::upload_of_key(&stored);
                if !key.starts_with(&query.prefix) {
                    break 'pages;
                }
                if page.entries.len() == limit {
                    page.more = true;
                    break 'pages;
                }
                let group = group_of(key, &query.prefix, &query.delimiter);
                if let Some(closed) = self.closed_directory(&bucket, group.unwrap_or(key), caller)? {
                    let Some(next) = behind(closed) else { break 'pages };
                    from = self.keys.uploads(query.bucket, &next).0;
                    continue 'pages;
                }
                if let Some(group) = group {
                    page.entries.push(UploadEntry::Prefix(Bytes::copy_from_slice(group)));
                    let Some(next) = behind(group) else { break 'pages };
                    from = self.keys.uploads(query.bucket, &next).0;
                    continue 'pages;
                }
                let upload: Upload = self.txn.decode(&stored, &bytes)?;
                page.entries.push(UploadEntry::Upload {
                    key: Bytes::copy_from_slice(key),
                    id,
                    started_ns: upload.started_ns,
                    uid: upload.caller.uid,
                    checksum: upload.record.checksum.map(|checksum| checksum.of),
                });
            }
        }
        Ok(ObjectReply::Uploads(page))
    }

    /// The first directory on the path to a key, with its slash, that the caller may not list.
    fn closed_directory<'a>(
        &self,
        bucket: &Inode,
        key: &'a [u8],
        caller: &Caller,
    ) -> Result<Option<&'a [u8]>, FsError> {
        let (mut dir, mut begin) = (bucket.attr.ino, 0);
        let parents = key.strip_suffix(b"/").unwrap_or(key);
        while let Some(len) = parents[begin..].iter().position(|byte| *byte == b'/') {
            let Some(inode) = self.find_directory(dir, &key[begin..begin + len])? else { return Ok(None) };
            begin += len + 1;
            if !self.may(&inode, caller, super::super::access::READ | EXECUTE)? {
                return Ok(Some(&key[..begin]));
            }
            dir = inode.attr.ino;
        }
        Ok(None)
    }

    /// The named parts, checked, in order; and the other parts.
    fn chosen_parts(&self, upload: u64, named: &[CompletePart], part_bytes_min: u64) -> Result<Chosen, Stop> {
        let mut there = BTreeMap::new();
        for (key, bytes) in self.txn.scan(&self.keys.parts(upload), usize::MAX)? {
            there.insert(Keys::number_of_part(&key), self.txn.decode::<Part>(&key, &bytes)?);
        }
        if !named.windows(2).all(|pair| pair[0].number < pair[1].number) {
            return Err(ObjectError::InvalidPartOrder.into());
        }
        let mut chosen = Vec::with_capacity(named.len());
        for (at, name) in named.iter().enumerate() {
            let invalid = ObjectError::InvalidPart(name.number);
            let part = there.remove(&name.number).ok_or(invalid)?;
            let checksum = part.checksum.as_ref().map(|checksum| &checksum.value);
            if part.etag != name.etag || (name.checksum.is_some() && name.checksum.as_ref() != checksum) {
                return Err(invalid.into());
            }
            if part.len < part_bytes_min && at + 1 < named.len() {
                return Err(ObjectError::PartTooSmall(name.number).into());
            }
            chosen.push((name.number, part));
        }
        Ok(Chosen { parts: chosen, others: there.into_values().collect() })
    }

    pub(super) fn complete_upload(&mut self, request: &ObjectRequest) -> ObjectOutcome {
        let ObjectRequest::CompleteUpload {
            upload,
            parts,
            part_bytes_min,
            etag,
            checksum,
            conditions,
            caller,
        } = request
        else {
            return Err(FsError::Invalid.into());
        };
        let found = self.upload(upload, caller)?;
        if parts.is_empty() {
            return Err(ObjectError::InvalidPart(0).into());
        }
        let Chosen { parts: chosen, others } = self.chosen_parts(upload.id, parts, *part_bytes_min)?;
        for part in &others {
            self.drop_part(part)?;
        }
        self.forget_upload(upload.name.bucket, &upload.name.key(), upload.id)?;
        let mut meta = found.meta();
        meta.etag.clone_from(etag);
        meta.checksum.clone_from(checksum);
        meta.parts = chosen.iter().map(|(number, part)| record::kept_part(*number, part)).collect();
        record::check_meta(&meta)?;
        let source = self.join(&chosen)?;
        self.publish(&upload.name, source, &meta, conditions, caller)
    }

    /// Joins the parts into one map.
    fn join(&mut self, parts: &[(u16, Part)]) -> Result<Source<'static>, FsError> {
        let mut size: u64 = 0;
        let mut stored_bytes = 0;
        let map = match parts {
            [(_, part)] => part.map,
            _ => MapId(self.advance("next_map", 1)? | COMPOSED_MAP),
        };
        for (_, part) in parts {
            if parts.len() > 1 && part.len > 0 {
                self.txn.put(self.keys.piece(map, size), &Piece::of_map(part.map, 0, part.len));
            }
            size =
                size.checked_add(part.len).filter(|size| *size <= FILE_BYTES_MAX).ok_or(FsError::TooLarge)?;
            stored_bytes += part.stored_bytes;
        }
        let segment = MapSegment { file_off: 0, len: FILE_BYTES_MAX, map, map_off: 0 };
        Ok(Source::Map { segment, size, stored_bytes })
    }

    /// Removes an upload and its parts from the tables.
    fn forget_upload(&mut self, bucket: Ino, key: &[u8], id: u64) -> Result<(), FsError> {
        for (key, _) in self.txn.scan(&self.keys.parts(id), usize::MAX)? {
            self.txn.delete(key);
        }
        self.txn.delete(self.keys.upload(bucket, key, id));
        Ok(())
    }

    fn drop_upload(&mut self, bucket: Ino, key: &[u8], id: u64) -> Result<(), FsError> {
        for (key, bytes) in self.txn.scan(&self.keys.parts(id), usize::MAX)? {
            self.drop_part(&self.txn.decode(&key, &bytes)?)?;
        }
        self.forget_upload(bucket, key, id)
    }

    pub(super) fn abort_upload(&mut self, upload: &UploadRef, caller: &Caller) -> ObjectOutcome {
        self.upload(upload, caller)?;
        self.drop_upload(upload.name.bucket, &upload.name.key(), upload.id)?;
        Ok(ObjectReply::Done)
    }

    /// Drops one upload to a deleted bucket, if there is any.
    pub(in super::super) fn purge_bucket(&mut self) -> Outcome {
        let Some((gone, _)) = self.txn.scan(&self.keys.gone_buckets(), 1)?.pop() else {
            return Ok(MetaReply::Purged { more: false });
        };
        let bucket = Keys::bucket_of_gone(&gone);
        match self.txn.scan(&self.keys.uploads(bucket, b""), 1)?.pop() {
            Some((key, _)) => {
                let (name, id) = Keys::upload_of_key(&key);
                self.drop_upload(bucket, name, id)?;
            }
            None => self.txn.delete(gone),
        }
        Ok(MetaReply::Purged { more: true })
    }
}
