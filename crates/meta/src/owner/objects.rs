//! Objects: requests that name a whole key below a bucket and do everything in one step.
//!
//! Every file below a bucket is an object, by whichever protocol it was made; a directory is one if it was put as one.
//! Data that only objects have is in attributes named `s3.*` of the inode; data that listings show is in the inode
//! itself. Directories that keys imply are made and removed with these keys. Leases block these requests exactly as
//! they block requests about names.

mod buckets;
mod conditions;
mod list;
mod put;
mod record;
mod remove;
mod uploads;

use base::FsError;
use bytes::Bytes;
use wire::meta::{Content, FileKind, LeaseKind, MapPiece};
use wire::object::{
    Caller, Conditions, KEY_BYTES_MAX, ObjectError, ObjectInfo, ObjectName, ObjectReply, ObjectRequest,
    SMALL_BYTES_MAX,
};

use super::access::{EXECUTE, READ};
use super::{Intent, Op, Stop};
use crate::values::Inode;
use uploads::NewPart;

type ObjectOutcome = Result<ObjectReply, Stop>;

/// Most pieces of a file that a reader gets without opening it.
const SMALL_PIECES_MAX: usize = 8;

/// Whether a reader opens an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opening {
    Never,
    Always,
    /// Do not open a small object; its map comes with the reply.
    UnlessSmall,
}

/// The existing and missing directories of a key.
struct Walk {
    /// The last existing directory.
    dir: Inode,
    /// Names of the missing directories.
    missing: Vec<Bytes>,
}

fn check_name(name: &ObjectName) -> Result<(), FsError> {
    let len: usize = name.parts.iter().map(|part| part.len() + 1).sum();
    if name.parts.is_empty() {
        return Err(FsError::Invalid);
    }
    if len > KEY_BYTES_MAX + 1 {
        return Err(FsError::NameTooLong);
    }
    name.parts.iter().try_for_each(|part| super::names::check_name(part))
}

impl Op<'_> {
    pub(super) fn object(&mut self, request: &ObjectRequest) -> ObjectOutcome {
        use ObjectRequest as R;
        match request {
            R::Stage => self.stage(),
            R::Put { name, body, meta, conditions, caller } => {
                self.put_object(name, body, meta, conditions, caller)
            }
            R::PutCopy { source, source_ver, name, staged, meta, tags, conditions, caller } => {
                let meta = self.copied_meta(source, *source_ver, meta.as_ref(), tags.as_ref(), caller)?;
                let body = wire::object::ObjectBody::Staged(*staged);
                self.put_object(name, &body, &meta, conditions, caller)
            }
            R::Get { name, conditions, caller } => self.get_object(name, conditions, caller, Opening::Always),
            R::Read { name, conditions, caller } => {
                self.get_object(name, conditions, caller, Opening::UnlessSmall)
            }
            R::Head { name, conditions, caller } => self.get_object(name, conditions, caller, Opening::Never),
            R::Delete { keys, caller } => self.delete_objects(keys, caller),
            R::List { query, caller } => self.list_objects(query, caller),
            R::SetTags { name, tags, caller } => self.set_object_tags(name, tags, caller),
            R::CreateUpload { name, meta, caller } => self.create_upload(name, meta, caller),
            R::PutPart { upload, number, body, etag, checksum, caller } => {
                let part = NewPart { number: *number, etag, checksum: checksum.as_ref() };
                self.put_part(upload, part, body, caller)
            }
            R::ListParts { upload, after, limit, caller } => self.list_parts(upload, *after, *limit, caller),
            R::ListUploads { query, caller } => self.list_uploads(query, caller),
            R::CompleteUpload { .. } => self.complete_upload(request),
            R::AbortUpload { upload, caller } => self.abort_upload(upload, caller),
            R::BucketSettings { bucket } => self.bucket_settings(*bucket),
            R::SetBucketSetting { bucket, name, value } => {
                self.set_bucket_setting(*bucket, name, value.as_ref())
            }
            R::MakeBucket { name, settings, caller } => self.make_bucket(name, settings, caller),
            R::RemoveBucket { name } => self.remove_bucket(name),
        }
    }

    /// Walks the directories of a key as far as they exist. The caller needs search permission on all of them.
    ///
    /// # Errors
    /// `ParentIsFile` if one of them is not a directory.
    fn walk(&self, name: &ObjectName, caller: &Caller) -> Result<Walk, Stop> {
        check_name(name)?;
        let mut dir = self.living_directory(name.bucket)?;
        let (_, parents) = name.parts.split_last().ok_or(FsError::Invalid)?;
        for (at, part) in parents.iter().enumerate() {
            self.demand(&dir, caller, EXECUTE)?;
            match self.find(dir.attr.ino, part)? {
                None => return Ok(Walk { dir, missing: parents[at..].to_vec() }),
                Some(dentry) if dentry.kind == FileKind::Directory => dir = self.directory(dentry.ino)?,
                Some(_) => return Err(ObjectError::ParentIsFile.into()),
            }
        }
        self.demand(&dir, caller, EXECUTE)?;
        Ok(Walk { dir, missing: Vec::new() })
    }

    /// The object with this key.
    fn find_object(&self, name: &ObjectName, caller: &Caller) -> Result<Option<Inode>, Stop> {
        let walk = match self.walk(name, caller) {
            Ok(walk) => walk,
            Err(Stop::Refuse(ObjectError::ParentIsFile)) => return Ok(None),
            Err(stop) => return Err(stop),
        };
        if !walk.missing.is_empty() {
            return Ok(None);
        }
        Ok(self.object_in(&walk.dir, name)?)
    }

    /// The object that the last part of a key names in its directory.
    fn object_in(&self, dir: &Inode, name: &ObjectName) -> Result<Option<Inode>, FsError> {
        let last = name.parts.last().ok_or(FsError::Invalid)?;
        let kind = if name.directory { FileKind::Directory } else { FileKind::Regular };
        let Some(dentry) = self.find(dir.attr.ino, last)?.filter(|dentry| dentry.kind == kind) else {
            return Ok(None);
        };
        let inode = self.inode(dentry.ino)?;
        Ok(Some(inode).filter(|inode| !name.directory || inode.object.is_some()))
    }

    fn get_object(
        &mut self,
        name: &ObjectName,
        conditions: &Conditions,
        caller: &Caller,
        opening: Opening,
    ) -> ObjectOutcome {
        let inode = self.find_object(name, caller)?.ok_or(ObjectError::NoSuchKey)?;
        let ino = inode.attr.ino;
        self.demand(&inode, caller, READ)?;
        self.clear(ino, Intent::Read)?;
        self.check_reading(&inode, conditions)?;
        let mut info = self.object_info(&inode)?;
        if opening == Opening::UnlessSmall {
            info.pieces = self.small_map(&inode)?;
        }
        let opens = opening != Opening::Never && !name.directory && info.pieces.is_none();
        let mut lease = None;
        if opens {
            lease = self.grant(ino, LeaseKind::Read);
            let opens = self.volatile.opens.entry(ino).or_default();
            if !opens.contains(&self.session) {
                opens.push(self.session);
            }
        }
        Ok(ObjectReply::Info { info: Box::new(info), lease, changed: Vec::new() })
    }

    /// The map of a small file, if it is short and none of its bytes is in a blob only.
    fn small_map(&self, inode: &Inode) -> Result<Option<Vec<MapPiece>>, FsError> {
        let (kind, size) = (inode.attr.kind, inode.attr.size);
        let Some(map) = inode.map().filter(|_| kind == FileKind::Regular && size <= SMALL_BYTES_MAX) else {
            return Ok(None);
        };
        let pieces = self.pieces(map, 0, size, SMALL_PIECES_MAX + 1)?;
        let is_here = |piece: &MapPiece| !matches!(piece.content, Content::Tiered(..));
        let fits = pieces.len() <= SMALL_PIECES_MAX && pieces.iter().all(is_here);
        Ok(fits.then(|| pieces.iter().filter_map(|piece| piece.clip(0, size)).collect()))
    }

    /// The reply to a change of an object. It omits the object's metadata, which the caller has sent: replies are
    /// stored for repetitions, so they must be short.
    fn changed_info(&self, inode: &Inode, changed: Vec<wire::meta::Attr>) -> ObjectReply {
        let info = ObjectInfo {
            attr: inode.attr,
            size: record::size_of(inode),
            etag: record::etag_of(inode),
            meta: wire::object::ObjectMeta::default(),
            directory: inode.attr.kind == FileKind::Directory,
            body: Bytes::new(),
            pieces: None,
        };
        ObjectReply::Info { info: Box::new(info), lease: None, changed }
    }
}
