//! Values about objects: beside the inode, and for uploads and their parts.

use base::MapId;
use base::codec::{DecodeError, Reader, Writer};
use bytes::Bytes;
use wire::object::{
    Caller, Checksum, ChecksumAlgorithm, ChecksumKind, ChecksumType, ObjectHeaders, ObjectMeta, ObjectPart,
};

use super::{Value, expect_format, start};

/// The part of an object's metadata that is in the inode: everything that listings show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectTag {
    /// Empty if the ETag is derived from inode and version.
    pub etag: String,
    /// The content version to which ETag, checksum and parts belong.
    pub data_ver: u64,
    /// Type of the stored checksum.
    pub checksum: Option<ChecksumType>,
    /// Length of the body of a directory object.
    pub body_len: u32,
}

impl ObjectTag {
    pub(super) fn write(&self, w: &mut Writer) {
        w.blob(self.etag.as_bytes()).u64(self.data_ver);
        let (algorithm, kind) = type_codes(self.checksum);
        w.u8(algorithm).u8(kind).u32(self.body_len);
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            etag: text(r, "etag")?,
            data_ver: r.u64("object data_ver")?,
            checksum: checksum_type(r)?,
            body_len: r.u32("body_len")?,
        })
    }
}

fn text(r: &mut Reader<'_>, what: &'static str) -> Result<String, DecodeError> {
    let bytes = r.blob(what)?;
    std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| DecodeError { field: what })
}

fn type_codes(of: Option<ChecksumType>) -> (u8, u8) {
    let Some(of) = of else { return (0, 0) };
    let algorithm = match of.algorithm {
        ChecksumAlgorithm::Crc32 => 1,
        ChecksumAlgorithm::Crc32c => 2,
        ChecksumAlgorithm::Crc64Nvme => 3,
        ChecksumAlgorithm::Sha1 => 4,
        ChecksumAlgorithm::Sha256 => 5,
    };
    (algorithm, u8::from(of.kind == ChecksumKind::Composite))
}

fn checksum_type(r: &mut Reader<'_>) -> Result<Option<ChecksumType>, DecodeError> {
    let (algorithm, kind) = (r.u8("checksum algorithm")?, r.u8("checksum kind")?);
    let algorithm = match algorithm {
        0 if kind == 0 => return Ok(None),
        1 => ChecksumAlgorithm::Crc32,
        2 => ChecksumAlgorithm::Crc32c,
        3 => ChecksumAlgorithm::Crc64Nvme,
        4 => ChecksumAlgorithm::Sha1,
        5 => ChecksumAlgorithm::Sha256,
        _ => return Err(DecodeError { field: "checksum algorithm" }),
    };
    let kind = match kind {
        0 => ChecksumKind::FullObject,
        1 => ChecksumKind::Composite,
        _ => return Err(DecodeError { field: "checksum kind" }),
    };
    Ok(Some(ChecksumType { algorithm, kind }))
}

fn write_checksum(w: &mut Writer, checksum: Option<&Checksum>) {
    let (algorithm, kind) = type_codes(checksum.map(|checksum| checksum.of));
    w.u8(algorithm).u8(kind);
    if let Some(checksum) = checksum {
        w.blob(&checksum.value);
    }
}

fn read_checksum(r: &mut Reader<'_>) -> Result<Option<Checksum>, DecodeError> {
    let Some(of) = checksum_type(r)? else { return Ok(None) };
    Ok(Some(Checksum { of, value: Bytes::copy_from_slice(r.blob("checksum")?) }))
}

/// `X s3.meta`: headers, user metadata and checksum.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObjectRecord {
    /// System headers.
    pub headers: ObjectHeaders,
    /// User metadata.
    pub user: Vec<(String, String)>,
    /// Checksum of the content.
    pub checksum: Option<Checksum>,
}

impl ObjectRecord {
    /// Whether all fields are empty, so that it is not stored.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The headers with their codes.
fn header_fields(headers: &ObjectHeaders) -> [(u8, &Option<String>); 7] {
    [
        (1, &headers.content_type),
        (2, &headers.cache_control),
        (3, &headers.content_disposition),
        (4, &headers.content_encoding),
        (5, &headers.content_language),
        (6, &headers.expires),
        (7, &headers.website_redirect),
    ]
}

fn header_field(headers: &mut ObjectHeaders, code: u8) -> Option<&mut Option<String>> {
    Some(match code {
        1 => &mut headers.content_type,
        2 => &mut headers.cache_control,
        3 => &mut headers.content_disposition,
        4 => &mut headers.content_encoding,
        5 => &mut headers.content_language,
        6 => &mut headers.expires,
        7 => &mut headers.website_redirect,
        _ => return None,
    })
}

fn write_pairs(w: &mut Writer, pairs: &[(String, String)]) {
    w.u32(u32::try_from(pairs.len()).expect("metadata is bounded far below 2^32 names"));
    for (name, value) in pairs {
        w.blob(name.as_bytes()).blob(value.as_bytes());
    }
}

fn read_pairs(r: &mut Reader<'_>) -> Result<Vec<(String, String)>, DecodeError> {
    let count = r.u32("pairs")?;
    (0..count).map(|_| Ok((text(r, "name")?, text(r, "value")?))).collect()
}

impl Value for ObjectRecord {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        let fields = header_fields(&self.headers);
        let present = fields.iter().filter(|(_, value)| value.is_some()).count();
        w.u8(present as u8);
        for (code, value) in fields {
            if let Some(value) = value {
                w.u8(code).blob(value.as_bytes());
            }
        }
        write_pairs(&mut w, &self.user);
        write_checksum(&mut w, self.checksum.as_ref());
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "object format")?;
        let mut headers = ObjectHeaders::default();
        for _ in 0..r.u8("headers")? {
            let code = r.u8("header")?;
            let field = header_field(&mut headers, code).ok_or(DecodeError { field: "header" })?;
            *field = Some(text(r, "header value")?);
        }
        Ok(Self { headers, user: read_pairs(r)?, checksum: read_checksum(r)? })
    }
}

/// `X s3.tags`: the tags of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectTags(pub Vec<(String, String)>);

impl Value for ObjectTags {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        write_pairs(&mut w, &self.0);
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "tags format")?;
        Ok(Self(read_pairs(r)?))
    }
}

/// `X s3.parts`: the parts of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectParts(pub Vec<ObjectPart>);

impl Value for ObjectParts {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        w.u16(u16::try_from(self.0.len()).expect("an object has at most 10,000 parts"));
        for part in &self.0 {
            w.u16(part.number).u64(part.len).blob(part.checksum.as_deref().unwrap_or_default());
        }
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "parts format")?;
        let count = r.u16("parts")?;
        let part = |r: &mut Reader<'_>| {
            let (number, len) = (r.u16("part number")?, r.u64("part length")?);
            let checksum = Bytes::copy_from_slice(r.blob("part checksum")?);
            Ok(ObjectPart { number, len, checksum: Some(checksum).filter(|bytes| !bytes.is_empty()) })
        };
        let parts = (0..count).map(|_| part(r)).collect::<Result<_, DecodeError>>()?;
        Ok(Self(parts))
    }
}

/// Table A: an upload that is not complete. The object's key is in the table's key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upload {
    /// Time of its beginning, in nanoseconds since 1970.
    pub started_ns: i64,
    /// The caller that began it.
    pub caller: Caller,
    /// Metadata of the future object. Of its checksum only the type is known.
    pub record: ObjectRecord,
    /// Tags of the future object.
    pub tags: Vec<(String, String)>,
}

impl Upload {
    /// The metadata for the caller that completes the upload.
    pub fn meta(&self) -> ObjectMeta {
        let ObjectRecord { headers, user, checksum } = self.record.clone();
        ObjectMeta { etag: None, headers, user, checksum, tags: self.tags.clone(), parts: Vec::new() }
    }
}

impl Value for Upload {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        w.i64(self.started_ns).u32(self.caller.uid).u32(self.caller.gid);
        w.u32(u32::try_from(self.caller.groups.len()).expect("a user has far fewer groups"));
        for group in &self.caller.groups {
            w.u32(*group);
        }
        w.blob(&self.record.encode());
        write_pairs(&mut w, &self.tags);
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "upload format")?;
        let started_ns = r.i64("started")?;
        let (uid, gid) = (r.u32("uid")?, r.u32("gid")?);
        let groups = (0..r.u32("groups")?).map(|_| r.u32("group")).collect::<Result<_, _>>()?;
        let record = ObjectRecord::decode(r.blob("record")?)?;
        Ok(Self { started_ns, caller: Caller { uid, gid, groups }, record, tags: read_pairs(r)? })
    }
}

/// Table G: a part of an upload. Its bytes are in its own map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The map.
    pub map: MapId,
    /// Length in bytes.
    pub len: u64,
    /// Stored bytes.
    pub stored_bytes: u64,
    /// Time of its upload, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// The ETag, without quotes.
    pub etag: String,
    /// The checksum, if the client sent one.
    pub checksum: Option<Checksum>,
}

impl Value for Part {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        w.u64(self.map.0).u64(self.len).u64(self.stored_bytes).i64(self.mtime_ns);
        w.blob(self.etag.as_bytes());
        write_checksum(&mut w, self.checksum.as_ref());
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "part format")?;
        Ok(Self {
            map: MapId(r.u64("map")?),
            len: r.u64("len")?,
            stored_bytes: r.u64("stored_bytes")?,
            mtime_ns: r.i64("mtime")?,
            etag: text(r, "etag")?,
            checksum: read_checksum(r)?,
        })
    }
}
