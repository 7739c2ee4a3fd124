//! Copies inside the filesystem: extents are shared, no bytes are moved.

use std::sync::Arc;

use client::object::{
    Checksum as StoredChecksum, ChecksumAlgorithm as StoredAlgorithm, Conditions, ObjectInfo, ObjectName,
    UploadRef,
};
use client::{CopyObject, PutPart};
use s3s::crypto::{Checksum as _, Md5};
use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result, s3_error};

use super::checksum::set_checksum;
use super::multipart::{begun, part_number, upload};
use super::put::{check_object, object_meta};
use super::{Authorized, check_version, object_name, read_conditions, strong, timestamp};
use crate::error::object_error;
use crate::gate::Services;
use crate::hash::{self, Claims, Digests};
use crate::identity::PolicyFacts;
use crate::read::Source;

const COPY_BYTES_MAX: u64 = 5 << 30;
/// Attempts to copy a part whose source changes during the copy.
const COPY_ATTEMPTS: u32 = 16;
/// Bytes read at a time when a checksum of a copied part must be computed.
const PIECE_BYTES: u64 = 1 << 20;

/// The source of a copy.
struct From {
    bucket: Arc<crate::bucket::Bucket>,
    key: String,
    name: ObjectName,
}

async fn source(
    core: &Services,
    asked: &Authorized,
    source: &CopySource,
    expected_owner: Option<&str>,
) -> S3Result<From> {
    let CopySource::Bucket { bucket, key, version_id } = source else {
        return Err(s3_error!(NotImplemented, "Access points are not implemented."));
    };
    check_version(version_id.as_deref())?;
    let bucket = core.buckets.get(bucket).await?;
    core.may_with_tags(&asked.context, "s3:GetObject", &bucket, key, None).await?;
    if let Some(owner) = expected_owner {
        core.check_owner(&bucket, owner).await?;
    }
    let name = object_name(bucket.ino, key)?;
    Ok(From { bucket, key: key.to_string(), name })
}

/// The error of a source condition that does not hold: 412, also where a read would answer 304.
fn source_error(error: client::object::ObjectError) -> s3s::S3Error {
    use client::object::ObjectError;
    match error {
        ObjectError::NotModified => object_error(ObjectError::PreconditionFailed),
        error => object_error(error),
    }
}

pub(crate) async fn copy_object(
    core: &Arc<Services>,
    request: S3Request<CopyObjectInput>,
) -> S3Result<S3Response<CopyObjectOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let mut input = request.input;
    check_object!(input);
    let from =
        source(core, &asked, &input.copy_source, input.expected_source_bucket_owner.as_deref()).await?;
    let to = asked.name(&input.key)?;
    let from_conditions = read_conditions(
        input.copy_source_if_match.as_ref(),
        input.copy_source_if_none_match.as_ref(),
        input.copy_source_if_modified_since.as_ref(),
        input.copy_source_if_unmodified_since.as_ref(),
    );
    let replaces = is_replace("metadata", input.metadata_directive.as_ref().map(MetadataDirective::as_str))?;
    let replaces_tags =
        is_replace("tagging", input.tagging_directive.as_ref().map(TaggingDirective::as_str))?;
    let given = object_meta!(input);
    if replaces_tags {
        let facts = PolicyFacts { request_tags: Some(&given.tags), ..PolicyFacts::default() };
        let (bucket, key) = (asked.bucket()?, Some(&*input.key));
        core.may_with(&asked.context, "s3:PutObjectTagging", bucket, key, facts)?;
    }
    let conditions = destination_conditions(&request.headers)?;
    let is_same = from.bucket.ino == asked.bucket()?.ino && from.key == input.key;
    // There is one storage class, and a copy keeps its checksum; a client that names either wants a new object.
    let is_renewed = input.storage_class.is_some() || input.checksum_algorithm.is_some();
    if is_same && !replaces && !replaces_tags && !is_renewed {
        return Err(changes_nothing());
    }
    super::refuse_unsupported(&[(
        "x-amz-website-redirect-location without x-amz-metadata-directive: REPLACE",
        given.headers.website_redirect.is_some() && !replaces,
    )])?;
    let head = core.client.head_object(from.name.clone(), from_conditions.clone(), asked.caller()).await;
    let head = head.map_err(|error| core.conceal(&asked.context, &from.bucket, source_error(error)))?;
    if head.size > COPY_BYTES_MAX {
        return Err(s3_error!(
            InvalidRequest,
            "The specified copy source is larger than the maximum allowable size for a copy source: 5368709120"
        ));
    }
    let tags = if replaces_tags {
        Some(given.tags.clone())
    } else {
        copied_tags(core, &asked, &from, &input.key, &head)?
    };
    let meta = replaces.then_some(given);
    let (source, caller) = (from.name, asked.caller());
    let copy = CopyObject { from: source, from_conditions, to, conditions, meta, tags, caller };
    // The source existed a moment ago, so a missing object is mostly the destination that the copy was to replace.
    let info = core.client.copy_object(copy).await.map_err(|error| {
        let error = core.conceal(&asked.context, &from.bucket, source_error(error));
        asked.bucket().map_or_else(|none| none, |bucket| core.conceal(&asked.context, bucket, error))
    })?;
    let result = describe_copy(info);
    Ok(S3Response::new(CopyObjectOutput { copy_object_result: Some(result), ..CopyObjectOutput::default() }))
}

/// Whether a directive is to replace what the source has, and not to copy it.
fn is_replace(of: &str, directive: Option<&str>) -> S3Result<bool> {
    match directive {
        None | Some("COPY") => Ok(false),
        Some("REPLACE") => Ok(true),
        Some(other) => {
            Err(s3_error!(InvalidArgument, "Unknown {of} directive: {other} is neither COPY nor REPLACE."))
        }
    }
}

fn changes_nothing() -> s3s::S3Error {
    s3_error!(
        InvalidRequest,
        "This copy request is illegal because it is trying to copy an object to itself without changing the \
         object's metadata, storage class, website redirect location or encryption attributes."
    )
}

/// The source's tags for its copy; `None` takes the tags that the source has at the time of the copy. A sender who may
/// not read and set tags may copy an object without tags only.
fn copied_tags(
    core: &Services,
    asked: &Authorized,
    from: &From,
    to: &str,
    head: &ObjectInfo,
) -> S3Result<Option<Vec<(String, String)>>> {
    let tags = Some(&*head.meta.tags);
    let (context, bucket) = (&asked.context, asked.bucket()?);
    let read = PolicyFacts { existing_tags: tags, ..PolicyFacts::default() };
    let set = PolicyFacts { request_tags: tags, ..PolicyFacts::default() };
    let may = core
        .may_with(context, "s3:GetObjectTagging", &from.bucket, Some(&from.key), read)
        .and_then(|()| core.may_with(context, "s3:PutObjectTagging", bucket, Some(to), set));
    match may {
        Ok(()) => Ok(None),
        Err(_) if head.meta.tags.is_empty() => Ok(Some(Vec::new())),
        Err(error) => Err(error),
    }
}

/// The result of a copy for the answer.
fn describe_copy(info: ObjectInfo) -> CopyObjectResult {
    let mut result = CopyObjectResult {
        e_tag: Some(strong(info.etag)),
        last_modified: Some(timestamp(info.attr.mtime_ns)),
        ..CopyObjectResult::default()
    };
    if let Some(checksum) = &info.meta.checksum {
        result.checksum_type = set_checksum!(result, checksum, info.meta.parts.len());
    }
    result
}

/// `If-Match` and `If-None-Match` for the destination; the protocol library does not read them in a copy.
fn destination_conditions(headers: &hyper::HeaderMap) -> S3Result<Conditions> {
    let read = |name: hyper::header::HeaderName| -> S3Result<Option<ETagCondition>> {
        let Some(value) = headers.get(&name) else { return Ok(None) };
        let condition = ETagCondition::parse_http_header(value.as_bytes());
        condition.map(Some).map_err(|_| s3_error!(InvalidArgument, "Invalid header: {name}"))
    };
    let if_match = read(hyper::header::IF_MATCH)?;
    let if_none_match = read(hyper::header::IF_NONE_MATCH)?;
    Ok(super::write_conditions(if_match.as_ref(), if_none_match.as_ref()))
}

/// Parses `bytes=a-b`; other forms are refused.
fn copied_range(range: Option<&str>, size: u64) -> S3Result<std::ops::Range<u64>> {
    let Some(range) = range else { return Ok(0..size) };
    let bad = || {
        s3_error!(
            InvalidArgument,
            "The x-amz-copy-source-range value must be of the form bytes=first-last where first and last are the zero-based offsets of the first and last bytes to copy"
        )
    };
    let Ok(Range::Int { first, last: Some(last) }) = Range::parse(range) else { return Err(bad()) };
    if last >= size {
        return Err(s3_error!(
            InvalidRange,
            "Range specified is not valid for source object of size: {size}"
        ));
    }
    Ok(first..last + 1)
}

pub(crate) async fn upload_part_copy(
    core: &Arc<Services>,
    request: S3Request<UploadPartCopyInput>,
) -> S3Result<S3Response<UploadPartCopyOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let input = request.input;
    let upload = upload(&asked, &input.key, &input.upload_id)?;
    let number = part_number(input.part_number)?;
    let from =
        source(core, &asked, &input.copy_source, input.expected_source_bucket_owner.as_deref()).await?;
    let conditions = read_conditions(
        input.copy_source_if_match.as_ref(),
        input.copy_source_if_none_match.as_ref(),
        input.copy_source_if_modified_since.as_ref(),
        input.copy_source_if_unmodified_since.as_ref(),
    );
    let begun = begun(core, &upload, asked.caller()).await?;
    let algorithm = begun.meta.checksum.map(|checksum| checksum.of.algorithm);
    let part = Part { upload, number, algorithm, range: input.copy_source_range.as_deref() };
    let mut copied = None;
    for _ in 0..COPY_ATTEMPTS {
        let info = core.client.get_object(from.name.clone(), conditions.clone(), asked.caller()).await;
        let conceal = |error| core.conceal(&asked.context, &from.bucket, source_error(error));
        let source = Source::new(&core.client, info.map_err(conceal)?);
        copied = copy_part(core, &asked, &source, &part).await?;
        if copied.is_some() {
            break;
        }
    }
    let Some((etag, checksum)) = copied else {
        return Err(object_error(client::object::ObjectError::SourceChanged));
    };
    let mut result = CopyPartResult {
        e_tag: Some(strong(etag)),
        last_modified: Some(timestamp(core.env.clock.wall_ns())),
        ..CopyPartResult::default()
    };
    if let Some(checksum) = &checksum {
        set_checksum!(result, checksum, 0);
    }
    Ok(S3Response::new(UploadPartCopyOutput {
        copy_part_result: Some(result),
        ..UploadPartCopyOutput::default()
    }))
}

/// A part of an upload that is copied from an object.
struct Part<'a> {
    upload: UploadRef,
    number: u16,
    algorithm: Option<StoredAlgorithm>,
    range: Option<&'a str>,
}

/// Copies a part and returns its ETag and checksum; `None` if the source changed during the copy.
async fn copy_part(
    core: &Services,
    asked: &Authorized,
    source: &Source,
    part: &Part<'_>,
) -> S3Result<Option<(String, Option<StoredChecksum>)>> {
    let info = source.info();
    let range = copied_range(part.range, info.size)?;
    if range.end - range.start > COPY_BYTES_MAX {
        return Err(s3_error!(
            InvalidRequest,
            "The copied range is longer than the maximum allowable size: 5368709120"
        ));
    }
    let staged = core.client.stage().await.map_err(object_error)?;
    let copied = async {
        let is_shared = share(core, source, range.clone(), staged).await?;
        let now = core.client.getattr(info.attr.ino).await.map_err(|error| object_error(error.into()))?;
        if !is_shared || (!info.directory && now.data_ver != info.attr.data_ver) {
            return Ok(None);
        }
        let (etag, checksum) = describe(core, source, range, part.algorithm, staged).await?;
        let put = PutPart {
            upload: part.upload.clone(),
            number: part.number,
            etag: etag.clone(),
            checksum: checksum.clone(),
            caller: asked.caller(),
        };
        core.client.put_part(put, staged).await.map_err(object_error)?;
        Ok(Some((etag, checksum)))
    };
    let copied = copied.await;
    if !matches!(copied, Ok(Some(_))) {
        core.client.discard(staged);
    }
    copied
}

/// Makes the staged file share a range of the source. Returns `false` if the source has become too short.
async fn share(
    core: &Services,
    source: &Source,
    range: std::ops::Range<u64>,
    staged: base::Ino,
) -> S3Result<bool> {
    let info = source.info();
    if info.directory {
        let bytes = &info.body[range.start as usize..range.end as usize];
        let written = core.client.write(staged, 0, bytes).await;
        return written.map(|()| true).map_err(|error| object_error(error.into()));
    }
    let mut done = 0;
    let len = range.end - range.start;
    while done < len {
        let copied =
            core.client.copy_range((info.attr.ino, range.start + done), (staged, done), len - done).await;
        match copied.map_err(|error| object_error(error.into()))? {
            0 => return Ok(false),
            more => done += more,
        }
    }
    Ok(true)
}

/// ETag and checksum of a copied part. Bytes are read only for a checksum. Without one, the ETag of a range is no MD5,
/// and has a dash to show that.
async fn describe(
    core: &Services,
    source: &Source,
    range: std::ops::Range<u64>,
    algorithm: Option<StoredAlgorithm>,
    staged: base::Ino,
) -> S3Result<(String, Option<StoredChecksum>)> {
    let info = source.info();
    let whole = range == (0..info.size);
    if algorithm.is_none() {
        if whole && hash::unhex(&info.etag).is_some() {
            return Ok((info.etag.clone(), None));
        }
        let mut md5 = Md5::new();
        md5.update(format!("{} {} {}", info.etag, range.start, range.end).as_bytes());
        return Ok((format!("{}-0", hash::hex(md5.finalize().as_ref())), None));
    }
    let mut digests = Digests::new(Claims::of(&hyper::HeaderMap::new(), algorithm)?);
    let (mut at, len) = (0, range.end - range.start);
    while at < len {
        let end = (at + PIECE_BYTES).min(len);
        let read = core.client.read(staged, at, (end - at) as usize).await;
        let bytes = read.map_err(|error| object_error(error.into()))?;
        if bytes.len() as u64 != end - at {
            return Err(object_error(client::object::ObjectError::SourceChanged));
        }
        digests.update(&bytes);
        at = end;
    }
    let digested = digests.finish(|_| None)?;
    Ok((digested.etag(), digested.checksum))
}
