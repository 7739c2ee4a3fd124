//! Objects: files and directories below a bucket, named by whole keys.
//!
//! Every call is one batch of the owner, so its checks and its changes are of one moment. Leases of other clients are
//! recalled and their names forgotten, as for any change. Caches above *this* client (those of a kernel) are not told:
//! a process that mounts a filesystem and serves its objects needs a client for each.

use std::sync::atomic::Ordering;

use base::{FsError, Ino};
use bytes::Bytes;
use wire::meta::{CommitPiece, INLINE_BYTES_MAX, LeaseGrant, MetaReply, MetaRequest, OpenIntent};
use wire::trace;

use wire::object::{
    self, Caller, Checksum, CompletePart, Conditions, Deleted, ListQuery, ObjectBody, ObjectError,
    ObjectInfo, ObjectMeta, ObjectName, ObjectPage, ObjectReply, ObjectRequest, PartPage, UploadPage,
    UploadQuery, UploadRef,
};

use crate::Client;
use crate::names::Asked;
use crate::ranges::CLONE_BYTES;
use crate::rebuild::NewerMap;

/// How often opening an object is tried again if the object was replaced in between.
const OPEN_ATTEMPTS: u32 = 16;
/// How often a copy is tried again if the source changed in between.
const COPY_ATTEMPTS: u32 = 16;

/// How a new object is stored.
#[derive(Debug, Clone)]
pub struct PutOptions {
    /// Metadata that is stored with it.
    pub meta: ObjectMeta,
    /// Conditions on the existing object.
    pub conditions: Conditions,
    /// The user that makes the request.
    pub caller: Caller,
}

/// Source, destination and options of a copy.
#[derive(Debug, Clone)]
pub struct CopyObject {
    /// The source.
    pub from: ObjectName,
    /// Conditions on the source.
    pub from_conditions: Conditions,
    /// The new object.
    pub to: ObjectName,
    /// Conditions on the object that the copy replaces.
    pub conditions: Conditions,
    /// Headers and user metadata of the copy; `None`: those of the source. All other metadata is that of the source.
    pub meta: Option<ObjectMeta>,
    /// Tags of the copy; `None`: the source's.
    pub tags: Option<Vec<(String, String)>>,
    /// The user that makes the request.
    pub caller: Caller,
}

/// The parts that an upload is completed from.
#[derive(Debug, Clone)]
pub struct CompleteUpload {
    /// The upload.
    pub upload: UploadRef,
    /// In ascending order.
    pub parts: Vec<CompletePart>,
    /// Smallest part that need not be the last, in bytes.
    pub part_bytes_min: u64,
    /// ETag of the object.
    pub etag: Option<String>,
    /// Checksum of the object.
    pub checksum: Option<Checksum>,
    /// Conditions on the existing object.
    pub conditions: Conditions,
    /// The user that makes the request.
    pub caller: Caller,
}

/// A part that is uploaded.
#[derive(Debug, Clone)]
pub struct PutPart {
    /// The upload.
    pub upload: UploadRef,
    /// 1 to 10,000. A part with the same number is replaced.
    pub number: u16,
    /// Without quotes.
    pub etag: String,
    /// If the caller gave one.
    pub checksum: Option<Checksum>,
    /// The user that makes the request.
    pub caller: Caller,
}

fn unexpected<T>(reply: &ObjectReply) -> Result<T, ObjectError> {
    tracing::error!(?reply, "owner answered with a reply of the wrong kind");
    Err(ObjectError::Fs(FsError::Io))
}

/// The body of a directory object as inline pieces, which are stored with the directory.
fn inline_body(body: &Bytes) -> ObjectBody {
    let cuts = (0..body.len()).step_by(INLINE_BYTES_MAX);
    let pieces =
        cuts.map(|at| CommitPiece::inline(at as u64, body.slice(at..body.len().min(at + INLINE_BYTES_MAX))));
    ObjectBody::Pieces { pieces: pieces.collect(), size: body.len() as u64 }
}

impl Client {
    async fn object(&self, request: ObjectRequest) -> Result<ObjectReply, ObjectError> {
        match self.call(MetaRequest::Object(Box::new(request))).await? {
            MetaReply::Object(reply) => match *reply {
                ObjectReply::Refused(error) => Err(error),
                reply => Ok(reply),
            },
            _ => Err(ObjectError::Fs(FsError::Io)),
        }
    }

    /// Makes a file without a name, to which the bytes of an object are written with [`Client::write`]. The file is
    /// removed when it is discarded or the session ends, unless it becomes an object or a part.
    pub async fn stage(&self) -> Result<Ino, ObjectError> {
        let asked = self.asking();
        match self.object(ObjectRequest::Stage).await? {
            ObjectReply::Staged { attr, lease } => {
                let node = self.inner.nodes.get(attr.ino);
                self.note(attr, lease, 0, asked);
                let mut state = node.lock();
                state.opened();
                state.map.learn_empty();
                Ok(attr.ino)
            }
            other => unexpected(&other),
        }
    }

    /// Drops a staged file, or the handle on one that became an object or a part. Bytes that are not durable yet are
    /// dropped.
    pub fn discard(&self, staged: Ino) {
        self.close_file(staged);
    }

    /// Makes a staged file durable and gives it a name, replacing any object of that name. On success it also ends the
    /// handle on the file.
    pub async fn put_object(
        &self,
        name: ObjectName,
        staged: Ino,
        put: PutOptions,
    ) -> Result<ObjectInfo, ObjectError> {
        self.fsync(staged).await?;
        let PutOptions { meta, conditions, caller } = put;
        let body = ObjectBody::Staged(staged);
        let info = self.info(ObjectRequest::Put { name, body, meta, conditions, caller }).await?;
        self.close_file(staged);
        Ok(info)
    }

    /// Stores an object from memory. Few bytes take one batch and nothing else; for more bytes, their extents are
    /// written first. The work is finished even if the caller stops waiting.
    pub async fn put_object_bytes(
        &self,
        name: ObjectName,
        body: Bytes,
        put: PutOptions,
    ) -> Result<ObjectInfo, ObjectError> {
        let PutOptions { meta, conditions, caller } = put;
        if name.directory {
            let body = inline_body(&body);
            return self.info(ObjectRequest::Put { name, body, meta, conditions, caller }).await;
        }
        let request = move |body| ObjectRequest::Put {
            name: name.clone(),
            body,
            meta: meta.clone(),
            conditions: conditions.clone(),
            caller: caller.clone(),
        };
        let asked = self.asking();
        match self.with_body(body, request).await? {
            ObjectReply::Info { info, changed, .. } => Ok(self.learn_info(*info, changed, asked)),
            other => unexpected(&other),
        }
    }

    /// Sends a request with the bytes of a new object or part.
    async fn with_body(
        &self,
        body: Bytes,
        request: impl Fn(ObjectBody) -> ObjectRequest + Send + Sync + 'static,
    ) -> Result<ObjectReply, ObjectError> {
        if body.len() <= INLINE_BYTES_MAX {
            return self.write_and_ask(body, request).await;
        }
        // Extents that no request names stay until the session ends, so a caller that stops waiting must not leave any.
        let client = self.clone();
        let work = async move { client.write_and_ask(body, request).await };
        let work = self.inner.runtime.spawn(trace::within(trace::current(), work));
        work.await.unwrap_or(Err(ObjectError::Fs(FsError::Unknown)))
    }

    async fn write_and_ask(
        &self,
        body: Bytes,
        request: impl Fn(ObjectBody) -> ObjectRequest + Send + Sync,
    ) -> Result<ObjectReply, ObjectError> {
        let size = body.len() as u64;
        let mut maps = NewerMap::new(self);
        loop {
            let pieces = self.write_body(&body).await?;
            let reply = self.object(request(ObjectBody::Pieces { pieces: pieces.clone(), size })).await;
            let unknown = matches!(reply, Err(ObjectError::Fs(FsError::Unknown | FsError::Io)));
            if reply.is_err() && !unknown {
                self.discard_uncommitted(&pieces).await;
            }
            let is_stale = reply == Err(ObjectError::Fs(FsError::StaleMap));
            if !is_stale || !maps.step().await {
                return reply;
            }
        }
    }

    async fn info(&self, request: ObjectRequest) -> Result<ObjectInfo, ObjectError> {
        let asked = self.asking();
        match self.object(request).await? {
            ObjectReply::Info { info, changed, .. } => Ok(self.learn_info(*info, changed, asked)),
            other => unexpected(&other),
        }
    }

    fn learn_info(&self, info: ObjectInfo, changed: Vec<wire::meta::Attr>, asked: Asked) -> ObjectInfo {
        changed.into_iter().for_each(|attr| self.learn_if_known(attr, asked));
        self.learn_if_known(info.attr, asked);
        info
    }

    /// Opens an object for reading with [`Client::read`]. Its present content stays readable until
    /// [`Client::close_file`] is called with `info.attr.ino`, even if it is replaced or deleted. A directory object is
    /// not opened; its bytes are in the answer.
    pub async fn get_object(
        &self,
        name: ObjectName,
        conditions: Conditions,
        caller: Caller,
    ) -> Result<ObjectInfo, ObjectError> {
        self.open_object(ObjectRequest::Get { name, conditions, caller }).await
    }

    /// As [`Client::get_object`], but small files are not opened either: if `info.pieces` is set,
    /// [`Client::read_small`] reads them.
    pub async fn read_object(
        &self,
        name: ObjectName,
        conditions: Conditions,
        caller: Caller,
    ) -> Result<ObjectInfo, ObjectError> {
        self.open_object(ObjectRequest::Read { name, conditions, caller }).await
    }

    async fn open_object(&self, request: ObjectRequest) -> Result<ObjectInfo, ObjectError> {
        for _ in 0..OPEN_ATTEMPTS {
            let (asked, round) = (self.asking(), self.inner.close_rounds.load(Ordering::SeqCst));
            let makes_before = self.inner.makes.begun();
            let reply = self.object(request.clone()).await?;
            let ObjectReply::Info { info, lease, .. } = reply else { return unexpected(&reply) };
            let is_open = !info.directory && info.pieces.is_none();
            if !is_open || self.opened(&info, lease, (asked, round, makes_before)).await? {
                return Ok(*info);
            }
        }
        Err(ObjectError::Fs(FsError::Unavailable))
    }

    /// Notes that the owner opened a file for this session. Returns whether it is open for sure.
    async fn opened(
        &self,
        info: &ObjectInfo,
        lease: Option<LeaseGrant>,
        (asked, round, makes_before): (Asked, u64, u64),
    ) -> Result<bool, FsError> {
        let ino = info.attr.ino;
        let sure = {
            let node = self.inner.nodes.get(ino);
            let mut state = node.lock();
            // A close of an earlier handle may have crossed with this open and undone it.
            let sure = round.is_multiple_of(2) && round == self.inner.close_rounds.load(Ordering::SeqCst);
            if sure {
                state.opened();
                state.makes_before = makes_before;
            }
            sure
        };
        if sure {
            self.note(info.attr, lease, 0, asked);
            return Ok(true);
        }
        match self.open_file(ino, OpenIntent::Read).await {
            Ok(attr) if attr.data_ver == info.attr.data_ver => Ok(true),
            Ok(_) => {
                self.close_file(ino);
                Ok(false)
            }
            Err(FsError::Stale) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Attributes and metadata of an object.
    pub async fn head_object(
        &self,
        name: ObjectName,
        conditions: Conditions,
        caller: Caller,
    ) -> Result<ObjectInfo, ObjectError> {
        self.info(ObjectRequest::Head { name, conditions, caller }).await
    }

    /// Deletes an object, and the parents above it that existed only because of it.
    pub async fn delete_object(
        &self,
        name: ObjectName,
        conditions: Conditions,
        caller: Caller,
    ) -> Result<Deleted, ObjectError> {
        let mut results = self.delete_objects(vec![(name, conditions)], caller).await?;
        results.pop().unwrap_or(Err(ObjectError::Fs(FsError::Io)))
    }

    /// Deletes at most 1,000 objects in one batch. Returns one result for each, in order.
    pub async fn delete_objects(
        &self,
        keys: Vec<(ObjectName, Conditions)>,
        caller: Caller,
    ) -> Result<Vec<Result<Deleted, ObjectError>>, ObjectError> {
        let asked = self.asking();
        match self.object(ObjectRequest::Delete { keys, caller }).await? {
            ObjectReply::Deleted { results, changed } => {
                changed.into_iter().for_each(|attr| self.learn_if_known(attr, asked));
                Ok(results)
            }
            other => unexpected(&other),
        }
    }

    /// Lists a page of keys in byte order.
    pub async fn list_objects(&self, query: ListQuery, caller: Caller) -> Result<ObjectPage, ObjectError> {
        match self.object(ObjectRequest::List { query, caller }).await? {
            ObjectReply::Listed(page) => Ok(page),
            other => unexpected(&other),
        }
    }

    /// Replaces the tags of an object.
    pub async fn set_object_tags(
        &self,
        name: ObjectName,
        tags: Vec<(String, String)>,
        caller: Caller,
    ) -> Result<ObjectInfo, ObjectError> {
        self.info(ObjectRequest::SetTags { name, tags, caller }).await
    }

    /// Copies an object without moving its bytes.
    pub async fn copy_object(&self, copy: CopyObject) -> Result<ObjectInfo, ObjectError> {
        for _ in 0..COPY_ATTEMPTS {
            let (from, conditions) = (copy.from.clone(), copy.from_conditions.clone());
            let source = self.get_object(from, conditions, copy.caller.clone()).await?;
            if source.directory || copy.to.directory {
                return self.copy_small(source, copy).await;
            }
            let copied = self.copy_opened(&source, &copy).await;
            self.close_file(source.attr.ino);
            if !matches!(copied, Err(ObjectError::SourceChanged)) {
                return copied;
            }
        }
        Err(ObjectError::SourceChanged)
    }

    async fn copy_opened(&self, source: &ObjectInfo, copy: &CopyObject) -> Result<ObjectInfo, ObjectError> {
        let staged = self.stage().await?;
        let copied = self.copy_into(source, staged, copy).await;
        self.close_file(staged);
        copied
    }

    async fn copy_into(
        &self,
        source: &ObjectInfo,
        staged: Ino,
        copy: &CopyObject,
    ) -> Result<ObjectInfo, ObjectError> {
        let (mut off, mut step) = (0, u64::MAX);
        while off < source.size {
            match self.copy_range((source.attr.ino, off), (staged, off), step.min(source.size - off)).await {
                Ok(0) => return Err(ObjectError::SourceChanged),
                Ok(copied) => off += copied,
                // Too many pieces for one request.
                Err(FsError::TooLarge) if step > 1 => step = step.min(source.size - off).min(CLONE_BYTES) / 2,
                Err(error) => return Err(error.into()),
            }
        }
        // ETag and checksum describe the bytes, so the copy has those of the source.
        let meta = copy.meta.clone().map(|new| ObjectMeta {
            headers: new.headers,
            user: new.user,
            etag: source.meta.etag.as_ref().map(|_| source.etag.clone()),
            ..source.meta.clone()
        });
        let request = ObjectRequest::PutCopy {
            source: copy.from.clone(),
            source_ver: (source.attr.ino, source.attr.data_ver),
            name: copy.to.clone(),
            staged,
            meta,
            tags: copy.tags.clone(),
            conditions: copy.conditions.clone(),
            caller: copy.caller.clone(),
        };
        self.info(request).await
    }

    /// Copies from or to a directory object, which has few bytes.
    async fn copy_small(&self, source: ObjectInfo, copy: CopyObject) -> Result<ObjectInfo, ObjectError> {
        let body = if source.directory {
            source.body
        } else {
            let len = source.size.min(object::DIRECTORY_BODY_BYTES_MAX as u64 + 1);
            let read = self.read(source.attr.ino, 0, len as usize).await;
            self.close_file(source.attr.ino);
            read?
        };
        let mut meta = source.meta;
        if let Some(new) = copy.meta {
            (meta.headers, meta.user) = (new.headers, new.user);
        }
        meta.tags = copy.tags.unwrap_or(meta.tags);
        let put = PutOptions { meta, conditions: copy.conditions, caller: copy.caller };
        self.put_object_bytes(copy.to, body, put).await
    }

    /// Begins a multipart upload. `meta` is the metadata of the object; its parts have checksums by the algorithm of
    /// `meta.checksum`.
    pub async fn create_upload(
        &self,
        name: ObjectName,
        meta: ObjectMeta,
        caller: Caller,
    ) -> Result<UploadRef, ObjectError> {
        let request = ObjectRequest::CreateUpload { name: name.clone(), meta, caller };
        match self.object(request).await? {
            ObjectReply::Upload(id) => Ok(UploadRef { name, id }),
            other => unexpected(&other),
        }
    }

    async fn done(&self, request: ObjectRequest) -> Result<(), ObjectError> {
        match self.object(request).await? {
            ObjectReply::Done => Ok(()),
            other => unexpected(&other),
        }
    }

    /// Makes a staged file durable and a part of an upload. On success it also ends the handle on the file. For a
    /// copied part, [`Client::copy_range`] fills the staged file.
    pub async fn put_part(&self, part: PutPart, staged: Ino) -> Result<(), ObjectError> {
        self.fsync(staged).await?;
        let PutPart { upload, number, etag, checksum, caller } = part;
        let body = ObjectBody::Staged(staged);
        self.done(ObjectRequest::PutPart { upload, number, body, etag, checksum, caller }).await?;
        self.close_file(staged);
        Ok(())
    }

    /// As [`Client::put_part`], for bytes in memory.
    pub async fn put_part_bytes(&self, part: PutPart, body: Bytes) -> Result<(), ObjectError> {
        let PutPart { upload, number, etag, checksum, caller } = part;
        let request = move |body| ObjectRequest::PutPart {
            upload: upload.clone(),
            number,
            body,
            etag: etag.clone(),
            checksum: checksum.clone(),
            caller: caller.clone(),
        };
        match self.with_body(body, request).await? {
            ObjectReply::Done => Ok(()),
            other => unexpected(&other),
        }
    }

    /// Lists the parts of an upload after number `after`.
    pub async fn list_parts(
        &self,
        upload: UploadRef,
        after: u16,
        limit: u32,
        caller: Caller,
    ) -> Result<PartPage, ObjectError> {
        match self.object(ObjectRequest::ListParts { upload, after, limit, caller }).await? {
            ObjectReply::Parts(page) => Ok(page),
            other => unexpected(&other),
        }
    }

    /// Lists uploads of a bucket, by key and id.
    pub async fn list_uploads(&self, query: UploadQuery, caller: Caller) -> Result<UploadPage, ObjectError> {
        match self.object(ObjectRequest::ListUploads { query, caller }).await? {
            ObjectReply::Uploads(page) => Ok(page),
            other => unexpected(&other),
        }
    }

    /// Makes an object of parts without moving their bytes. Parts that are not named are dropped.
    pub async fn complete_upload(&self, complete: CompleteUpload) -> Result<ObjectInfo, ObjectError> {
        let CompleteUpload { upload, parts, part_bytes_min, etag, checksum, conditions, caller } = complete;
        let request = ObjectRequest::CompleteUpload {
            upload,
            parts,
            part_bytes_min,
            etag,
            checksum,
            conditions,
            caller,
        };
        self.info(request).await
    }

    /// Drops an upload and its parts.
    pub async fn abort_upload(&self, upload: UploadRef, caller: Caller) -> Result<(), ObjectError> {
        self.done(ObjectRequest::AbortUpload { upload, caller }).await
    }

    /// Makes a bucket, a top-level directory that belongs to the caller, in one step with its settings.
    ///
    /// # Errors
    /// `Exists` if the name is taken.
    pub async fn make_bucket(
        &self,
        name: &[u8],
        settings: Vec<(String, Bytes)>,
        caller: Caller,
    ) -> Result<(), ObjectError> {
        let name = Bytes::copy_from_slice(name);
        self.done(ObjectRequest::MakeBucket { name, settings, caller }).await?;
        self.changed(Ino::ROOT);
        Ok(())
    }

    /// Removes a bucket without objects, and the empty directories that are left in it.
    ///
    /// # Errors
    /// `NotEmpty` if it holds a file of any kind, a directory object, or more than 4,096 directories.
    pub async fn remove_bucket(&self, name: &[u8]) -> Result<(), ObjectError> {
        let asked = self.asking();
        match self.object(ObjectRequest::RemoveBucket { name: Bytes::copy_from_slice(name) }).await? {
            ObjectReply::Deleted { changed, .. } => {
                changed.into_iter().for_each(|attr| self.learn_if_known(attr, asked));
                Ok(())
            }
            other => unexpected(&other),
        }
    }

    /// Settings of a bucket, ordered by name. Their meaning is up to the caller that sets them.
    pub async fn bucket_settings(&self, bucket: Ino) -> Result<Vec<(String, Bytes)>, ObjectError> {
        match self.object(ObjectRequest::BucketSettings { bucket }).await? {
            ObjectReply::Settings(settings) => Ok(settings),
            other => unexpected(&other),
        }
    }

    /// Sets or removes a setting of a bucket: a name of at most 200 bytes, a value of at most 64 KiB.
    pub async fn set_bucket_setting(
        &self,
        bucket: Ino,
        name: &str,
        value: Option<Bytes>,
    ) -> Result<(), ObjectError> {
        self.done(ObjectRequest::SetBucketSetting { bucket, name: name.to_owned(), value }).await
    }
}
