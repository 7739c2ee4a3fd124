//! Requests to the owner of a ledger about objects: files and directories below a bucket, named by whole keys.
//!
//! A request is one atomic batch: it checks the caller's rights and conditions, and changes names, implicit parents and
//! metadata, all at the same moment.

use base::{FsError, Ino};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

pub use crate::message::Caller;

use crate::meta::{Attr, CommitPiece, LeaseGrant, MapPiece};

/// Longest key, in bytes.
pub const KEY_BYTES_MAX: usize = 1024;
/// Most parts of a multipart upload.
pub const PARTS_MAX: u16 = 10_000;
/// Most entries in one page of a listing.
pub const LIST_ENTRIES_MAX: u32 = 10_000;
/// Largest body of a directory object, in bytes.
pub const DIRECTORY_BODY_BYTES_MAX: usize = 64 << 10;
/// Most bytes of all metadata of an object.
pub const OBJECT_META_BYTES_MAX: usize = 64 << 10;
/// Most keys that one request deletes.
pub const DELETE_KEYS_MAX: usize = 1000;
/// Objects up to this size may be read without an open.
pub const SMALL_BYTES_MAX: u64 = 256 << 10;

/// The name of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectName {
    /// The bucket: a directory.
    pub bucket: Ino,
    /// The components of the key, at least one.
    pub parts: Vec<Bytes>,
    /// Whether the key ends in `/`: a directory object.
    pub directory: bool,
}

impl ObjectName {
    /// The key below the bucket.
    pub fn key(&self) -> Vec<u8> {
        let mut key = self.parts.join(&b'/');
        if self.directory {
            key.push(b'/');
        }
        key
    }
}

/// The ETags of a condition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EtagMatch {
    /// `*`: any object.
    Any,
    /// One of these, without quotes.
    List(Vec<String>),
}

/// Conditions of a request, RFC 9110 section 13. The default is none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conditions {
    /// The object exists and its ETag is one of these.
    pub if_match: Option<EtagMatch>,
    /// The object does not exist or has none of these ETags.
    pub if_none_match: Option<EtagMatch>,
    /// The object changed after this; ignored with `if_none_match`. Nanoseconds since 1970, compared in whole seconds.
    pub if_modified_since_ns: Option<i64>,
    /// The object did not change after this; ignored with `if_match`.
    pub if_unmodified_since_ns: Option<i64>,
    /// The content's last change is exactly this second.
    pub if_modified_at_ns: Option<i64>,
    /// The object has this many bytes.
    pub if_size: Option<u64>,
}

impl Conditions {
    /// Whether there are no conditions.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A checksum's algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the algorithms")]
pub enum ChecksumAlgorithm {
    Crc32,
    Crc32c,
    Crc64Nvme,
    Sha1,
    Sha256,
}

/// The bytes that a checksum covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ChecksumKind {
    /// All bytes.
    FullObject,
    /// The checksums of the parts.
    Composite,
}

/// Algorithm and coverage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ChecksumType {
    /// Algorithm.
    pub algorithm: ChecksumAlgorithm,
    /// Coverage.
    pub kind: ChecksumKind,
}

/// A checksum that was verified when the bytes arrived.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checksum {
    /// Algorithm and coverage.
    pub of: ChecksumType,
    /// Its bytes, big-endian.
    pub value: Bytes,
}

/// A part of an object from a multipart upload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectPart {
    /// Its number in the upload.
    pub number: u16,
    /// Bytes.
    pub len: u64,
    /// The bytes of its checksum, by the object's algorithm.
    pub checksum: Option<Bytes>,
}

/// System headers that are stored with an object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named after the HTTP headers")]
pub struct ObjectHeaders {
    pub content_type: Option<String>,
    pub cache_control: Option<String>,
    pub content_disposition: Option<String>,
    pub content_encoding: Option<String>,
    pub content_language: Option<String>,
    pub expires: Option<String>,
    pub website_redirect: Option<String>,
}

/// The metadata of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectMeta {
    /// ETag without quotes. `None`: derived from inode and version.
    pub etag: Option<String>,
    /// System headers.
    pub headers: ObjectHeaders,
    /// User metadata: names without `x-amz-meta-`, in order.
    pub user: Vec<(String, String)>,
    /// Checksum of the whole object.
    pub checksum: Option<Checksum>,
    /// Tags, in order.
    pub tags: Vec<(String, String)>,
    /// Parts of a multipart object, in order.
    pub parts: Vec<ObjectPart>,
}

/// An object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectInfo {
    /// Attributes of the file or directory.
    pub attr: Attr,
    /// Bytes of the object or, if it is a directory object, of its body.
    pub size: u64,
    /// ETag as served, without quotes. See [`etag`].
    pub etag: String,
    /// Its metadata, with `etag` as stored. Checksum and parts are left out if the content changed since they were
    /// stored.
    pub meta: ObjectMeta,
    /// Whether it is a directory object.
    pub directory: bool,
    /// The bytes of a directory object.
    pub body: Bytes,
    /// The map of a small file that was read without an open.
    pub pieces: Option<Vec<MapPiece>>,
}

/// The ETag of an inode: the stored one if its version is still the version of the content, else one that no client
/// mistakes for an MD5. `stored` is an ETag and the content's version that it describes.
pub fn etag(attr: &Attr, stored: Option<(&str, u64)>) -> String {
    match stored {
        Some((etag, data_ver)) if data_ver == attr.data_ver => etag.to_owned(),
        _ => format!("{:x}-{:x}", attr.ino.0, attr.data_ver),
    }
}

/// The bytes of a new object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectBody {
    /// A staged inode of the session, with the content committed to it so far.
    Staged(Ino),
    /// Pieces, durable on drives or inline.
    Pieces {
        /// The pieces, in order.
        pieces: Vec<CommitPiece>,
        /// Size in bytes.
        size: u64,
    },
}

/// The result of a deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deleted {
    /// Whether the object existed.
    pub existed: bool,
}

/// Where a listing continues.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ListFrom {
    /// At the beginning.
    Start,
    /// After this key.
    After(Bytes),
    /// After every key that begins with this.
    Past(Bytes),
}

/// Selects the keys of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListQuery {
    /// The bucket.
    pub bucket: Ino,
    /// Only keys that begin with this.
    pub prefix: Bytes,
    /// Keys that contain this after the prefix are grouped by their beginning up to and with it. Empty: no groups.
    pub delimiter: Bytes,
    /// Where to continue.
    pub from: ListFrom,
    /// Most entries (keys and groups), up to [`LIST_ENTRIES_MAX`]. A page may have fewer although more follow.
    pub limit: u32,
}

/// A key in a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedObject {
    /// The whole key.
    pub key: Bytes,
    /// Inode.
    pub ino: Ino,
    /// Owner.
    pub uid: u32,
    /// Bytes.
    pub size: u64,
    /// Last change of content.
    pub mtime_ns: i64,
    /// ETag as served, without quotes.
    pub etag: String,
    /// Type of its stored checksum.
    pub checksum: Option<ChecksumType>,
}

/// An entry of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ListEntry {
    /// A key.
    Object(ListedObject),
    /// The common beginning of a group of keys, with the delimiter.
    Prefix(Bytes),
}

/// A page of a listing, in byte order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectPage {
    /// Keys and groups.
    pub entries: Vec<ListEntry>,
    /// Where to continue, if there may be more.
    pub next: Option<ListFrom>,
}

/// A multipart upload.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct UploadRef {
    /// The object that it will become.
    pub name: ObjectName,
    /// Unique in the filesystem, never reused.
    pub id: u64,
}

/// A part that was uploaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartInfo {
    /// 1 to [`PARTS_MAX`].
    pub number: u16,
    /// Bytes.
    pub len: u64,
    /// ETag without quotes.
    pub etag: String,
    /// Its checksum, if the client gave one.
    pub checksum: Option<Checksum>,
    /// When it was uploaded, nanoseconds since 1970.
    pub mtime_ns: i64,
}

/// Parts of an upload, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartPage {
    /// The metadata that the object will have.
    pub meta: ObjectMeta,
    /// The user that began the upload.
    pub caller: Caller,
    /// When the upload began, nanoseconds since 1970.
    pub started_ns: i64,
    /// The parts.
    pub parts: Vec<PartInfo>,
    /// Whether more follow.
    pub more: bool,
}

/// A part as a client names it to complete an upload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompletePart {
    /// Its number.
    pub number: u16,
    /// Its ETag, without quotes.
    pub etag: String,
    /// Its checksum's bytes, if named.
    pub checksum: Option<Bytes>,
}

/// Selects uploads of a listing, which is ordered by key and id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadQuery {
    /// The bucket.
    pub bucket: Ino,
    /// Only keys that begin with this.
    pub prefix: Bytes,
    /// Groups keys as in [`ListQuery`].
    pub delimiter: Bytes,
    /// Continue after every upload of this key; with an id, after that upload.
    pub after: Option<(Bytes, Option<u64>)>,
    /// Also continue after all keys that begin with this.
    pub past: Option<Bytes>,
    /// Most entries.
    pub limit: u32,
}

/// An entry of a list of uploads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum UploadEntry {
    /// An upload.
    Upload {
        /// The whole key.
        key: Bytes,
        /// Its id.
        id: u64,
        /// When it began, nanoseconds since 1970.
        started_ns: i64,
        /// The user that began it.
        uid: u32,
        /// Type of its parts' checksums.
        checksum: Option<ChecksumType>,
    },
    /// The common beginning of a group of keys, with the delimiter.
    Prefix(Bytes),
}

/// A page of uploads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadPage {
    /// Uploads and groups.
    pub entries: Vec<UploadEntry>,
    /// Whether more follow.
    pub more: bool,
}

/// A request about objects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are the arguments of the S3 calls they are named after")]
pub enum ObjectRequest {
    /// Makes and opens an inode without a name, with an exclusive lease. The session's close of its last handle removes
    /// it. Answer: `Staged`.
    Stage,
    /// Answer: `Info`.
    Put { name: ObjectName, body: ObjectBody, meta: ObjectMeta, conditions: Conditions, caller: Caller },
    /// Publishes a staged copy of an object if the source has not changed since it was copied. Without `meta`, the copy
    /// gets the source's metadata. Answer: `Info`.
    PutCopy {
        source: ObjectName,
        source_ver: (Ino, u64),
        name: ObjectName,
        staged: Ino,
        meta: Option<ObjectMeta>,
        tags: Option<Vec<(String, String)>>,
        conditions: Conditions,
        caller: Caller,
    },
    /// Opens the object for reading, unless it is a directory object. Answer: `Info`.
    Get { name: ObjectName, conditions: Conditions, caller: Caller },
    /// As `Get`, but a file of at most [`SMALL_BYTES_MAX`] in few pieces, all on drives or inline, is not opened: the
    /// answer has its map.
    Read { name: ObjectName, conditions: Conditions, caller: Caller },
    /// Answer: `Info`.
    Head { name: ObjectName, conditions: Conditions, caller: Caller },
    /// Answer: `Deleted`, one result per key in order.
    Delete { keys: Vec<(ObjectName, Conditions)>, caller: Caller },
    /// Answer: `Listed`.
    List { query: ListQuery, caller: Caller },
    /// Answer: `Info`.
    SetTags { name: ObjectName, tags: Vec<(String, String)>, caller: Caller },
    /// Answer: `Upload`.
    CreateUpload { name: ObjectName, meta: ObjectMeta, caller: Caller },
    /// Answer: `Done`.
    PutPart {
        upload: UploadRef,
        number: u16,
        body: ObjectBody,
        etag: String,
        checksum: Option<Checksum>,
        caller: Caller,
    },
    /// Answer: `Parts`.
    ListParts { upload: UploadRef, after: u16, limit: u32, caller: Caller },
    /// Answer: `Uploads`.
    ListUploads { query: UploadQuery, caller: Caller },
    /// Answer: `Info`.
    CompleteUpload {
        upload: UploadRef,
        parts: Vec<CompletePart>,
        part_bytes_min: u64,
        etag: Option<String>,
        checksum: Option<Checksum>,
        conditions: Conditions,
        caller: Caller,
    },
    /// Answer: `Done`.
    AbortUpload { upload: UploadRef, caller: Caller },
    /// Answer: `Settings`, in order of names.
    BucketSettings { bucket: Ino },
    /// Answer: `Done`.
    SetBucketSetting { bucket: Ino, name: String, value: Option<Bytes> },
    /// Makes a top-level directory that belongs to the caller, with settings. Answer: `Done`.
    MakeBucket { name: Bytes, settings: Vec<(String, Bytes)>, caller: Caller },
    /// Removes a top-level directory that has nothing but empty directories in it. Answer: `Deleted`.
    RemoveBucket { name: Bytes },
}

/// The answer to a request about objects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the variants are named by the requests they answer")]
#[allow(clippy::large_enum_variant, reason = "answers are moved once; a box would cost more")]
pub enum ObjectReply {
    Done,
    Staged {
        attr: Attr,
        lease: Option<LeaseGrant>,
    },
    Info {
        info: Box<ObjectInfo>,
        lease: Option<LeaseGrant>,
        changed: Vec<Attr>,
    },
    Deleted {
        results: Vec<Result<Deleted, ObjectError>>,
        changed: Vec<Attr>,
    },
    Listed(ObjectPage),
    Upload(u64),
    Parts(PartPage),
    Uploads(UploadPage),
    Settings(Vec<(String, Bytes)>),
    /// Nothing was changed.
    Refused(ObjectError),
}

impl ObjectReply {
    /// All attributes in the answer.
    pub fn attrs(&self) -> Vec<Attr> {
        match self {
            Self::Staged { attr, .. } => vec![*attr],
            Self::Info { info, changed, .. } => changed.iter().copied().chain([info.attr]).collect(),
            Self::Deleted { changed, .. } => changed.clone(),
            _ => Vec::new(),
        }
    }
}

/// Why a request about objects was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectError {
    /// An error that is not specific to objects. `NotFound`: no such bucket; `Denied`: permission bits or ACL.
    #[error(transparent)]
    Fs(#[from] FsError),
    /// The object does not exist.
    #[error("no such key")]
    NoSuchKey,
    /// A condition does not hold.
    #[error("precondition failed")]
    PreconditionFailed,
    /// The reader already has the object.
    #[error("not modified")]
    NotModified,
    /// A parent in the key is a file.
    #[error("object parent is file")]
    ParentIsFile,
    /// The key names a directory with entries.
    #[error("existing object is directory")]
    ExistingIsDirectory,
    /// The upload does not exist.
    #[error("no such upload")]
    NoSuchUpload,
    /// A part was not uploaded, or was replaced by another one.
    #[error("invalid part: number={0}")]
    InvalidPart(u16),
    /// Parts are not in ascending order.
    #[error("invalid part order")]
    InvalidPartOrder,
    /// A part other than the last is too small.
    #[error("part is too small: number={0}")]
    PartTooSmall(u16),
    /// The metadata is too large.
    #[error("metadata too large")]
    MetadataTooLarge,
    /// The source changed during the copy: try again.
    #[error("source changed")]
    SourceChanged,
}
