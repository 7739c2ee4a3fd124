//! Multipart uploads. Completing one moves no bytes.

use std::sync::Arc;

use bytes::Bytes;
use client::object::{
    Caller, Checksum as StoredChecksum, ChecksumKind, ChecksumType as StoredType, CompletePart, Conditions,
    ObjectError, PARTS_MAX, PartInfo, PartPage, UploadEntry, UploadQuery, UploadRef,
};
use client::{CompleteUpload, PutPart};
use s3s::crypto::{Checksum as _, Md5};
use s3s::dto::*;
use s3s::{S3Error, S3Request, S3Response, S3Result, s3_error};

use super::acl::owner;
use super::checksum::{checksum_fields, checksum_kind, checksums_of, set_checksum};
use super::listing::{Encoding, echoed};
use super::put::{Incoming, ReceivedBody, check_object, discard, object_meta, receive};
use super::{Authorized, strong, timestamp, write_conditions};
use crate::error::object_error;
use crate::gate::Services;
use crate::hash::{self, Claims};
use crate::identity::PolicyFacts;

/// Smallest part that is not the last.
const PART_BYTES_MIN: u64 = 5 << 20;
const PAGE_MAX: i32 = 1000;

fn no_such_upload() -> S3Error {
    object_error(ObjectError::NoSuchUpload)
}

fn write_id(id: u64) -> String {
    format!("{id:016x}")
}

fn parse_id(id: &str) -> S3Result<u64> {
    if id.len() != 16 {
        return Err(no_such_upload());
    }
    u64::from_str_radix(id, 16).map_err(|_| no_such_upload())
}

/// The upload that a request names.
pub(crate) fn upload(asked: &Authorized, key: &str, id: &str) -> S3Result<UploadRef> {
    Ok(UploadRef { name: asked.name(key)?, id: parse_id(id)? })
}

pub(crate) fn part_number(number: i32) -> S3Result<u16> {
    u16::try_from(number).ok().filter(|number| (1..=PARTS_MAX).contains(number)).ok_or_else(|| {
        s3_error!(InvalidArgument, "Part number must be an integer between 1 and 10000, inclusive")
    })
}

/// Type of the checksum of an upload's object.
fn checksum_type(input: &CreateMultipartUploadInput) -> S3Result<Option<StoredType>> {
    use client::object::ChecksumAlgorithm as Algorithm;
    let Some(name) = input.checksum_algorithm.as_ref() else {
        return match input.checksum_type {
            Some(_) => Err(s3_error!(
                InvalidRequest,
                "The x-amz-checksum-type header can only be used with the x-amz-checksum-algorithm header."
            )),
            None => Ok(None),
        };
    };
    let algorithm = hash::algorithm(name.as_str())?;
    let asked = input.checksum_type.as_ref().map(ChecksumType::as_str);
    let kind = match (algorithm, asked) {
        (Algorithm::Sha1 | Algorithm::Sha256, Some(ChecksumType::FULL_OBJECT))
        | (Algorithm::Crc64Nvme, Some(ChecksumType::COMPOSITE)) => {
            return Err(s3_error!(
                InvalidRequest,
                "The checksum type cannot be used with the {} checksum algorithm.",
                name.as_str()
            ));
        }
        (_, Some(ChecksumType::FULL_OBJECT)) | (Algorithm::Crc64Nvme, None) => ChecksumKind::FullObject,
        (_, Some(ChecksumType::COMPOSITE) | None) => ChecksumKind::Composite,
        (_, Some(_)) => {
            return Err(s3_error!(InvalidRequest, "Value for x-amz-checksum-type header is invalid."));
        }
    };
    Ok(Some(StoredType { algorithm, kind }))
}

pub(crate) async fn create_multipart_upload(
    core: &Arc<Services>,
    request: S3Request<CreateMultipartUploadInput>,
) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let mut input = request.input;
    check_object!(input);
    let name = asked.name(&input.key)?;
    let is_tagged = input.tagging.is_some();
    let mut meta = object_meta!(input);
    if is_tagged {
        let facts = PolicyFacts { request_tags: Some(&meta.tags), ..PolicyFacts::default() };
        let (bucket, key) = (asked.bucket()?, Some(&*input.key));
        core.may_with(&asked.context, "s3:PutObjectTagging", bucket, key, facts)?;
    }
    let of = checksum_type(&input)?;
    meta.checksum = of.map(|of| StoredChecksum { of, value: Bytes::new() });
    let upload = core.client.create_upload(name, meta, asked.caller()).await.map_err(object_error)?;
    Ok(S3Response::new(CreateMultipartUploadOutput {
        bucket: Some(input.bucket),
        key: Some(input.key),
        upload_id: Some(write_id(upload.id)),
        checksum_algorithm: of.map(|of| ChecksumAlgorithm::from_static(hash::name(of.algorithm))),
        checksum_type: of.map(|of| checksum_kind(of.kind)),
        ..CreateMultipartUploadOutput::default()
    }))
}

/// Settings with which an upload was begun.
pub(crate) async fn begun(core: &Services, upload: &UploadRef, caller: Caller) -> S3Result<PartPage> {
    core.client.list_parts(upload.clone(), PARTS_MAX, 1, caller).await.map_err(object_error)
}

pub(crate) async fn upload_part(
    core: &Arc<Services>,
    request: S3Request<UploadPartInput>,
) -> S3Result<S3Response<UploadPartOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let mut input = request.input;
    let upload = upload(&asked, &input.key, &input.upload_id)?;
    let number = part_number(input.part_number)?;
    let of = begun(core, &upload, asked.caller()).await?.meta.checksum.map(|checksum| checksum.of);
    let claims = Claims::of(&request.headers, of.map(|of| of.algorithm))?;
    if let (Some(of), Some(sent)) = (of, claims.algorithm())
        && of.algorithm != sent
    {
        return Err(s3_error!(
            InvalidRequest,
            "Checksum Type mismatch occurred, expected checksum Type: {}, actual checksum Type: {}",
            hash::name(of.algorithm),
            hash::name(sent)
        ));
    }
    let incoming = Incoming {
        stream: input.body.take(),
        content_length: input.content_length,
        trailers: request.trailing_headers.as_ref(),
        unread: &asked.context.unread,
    };
    let received = receive(core, incoming, claims).await?;
    let etag = received.digested.etag();
    let checksum = received.digested.checksum;
    let mut output = UploadPartOutput { e_tag: Some(strong(&*etag)), ..UploadPartOutput::default() };
    if let Some(checksum) = &checksum {
        set_checksum!(output, checksum, 0);
    }
    // Without an algorithm in the upload, the checksum of a part is verified and not stored.
    let kept = checksum.filter(|_| of.is_some());
    let part = PutPart { upload, number, etag, checksum: kept, caller: asked.caller() };
    let stored = match received.body {
        ReceivedBody::Whole(bytes, _memory) => core.client.put_part_bytes(part, bytes).await,
        ReceivedBody::Staged(ino) => core.client.put_part(part, ino).await.inspect_err(|_| {
            discard(core, &ReceivedBody::Staged(ino));
        }),
    };
    stored.map_err(object_error)?;
    Ok(S3Response::new(output))
}

/// All parts of an upload.
async fn all_parts(core: &Services, upload: &UploadRef, caller: &Caller) -> S3Result<Vec<PartInfo>> {
    let mut parts = Vec::new();
    let mut after = 0;
    loop {
        let page = core.client.list_parts(upload.clone(), after, PAGE_MAX as u32, caller.clone()).await;
        let page = page.map_err(object_error)?;
        let more = page.more;
        parts.extend(page.parts);
        match parts.last() {
            Some(last) if more => after = last.number,
            _ => return Ok(parts),
        }
    }
}

/// The ETag of an object made of parts: the MD5 of their MD5s, and the number of parts.
fn combined_etag(parts: &[CompletePart]) -> String {
    let mut md5 = Md5::new();
    for part in parts {
        match hash::unhex(&part.etag) {
            Some(bytes) => md5.update(&bytes),
            // The ETag of a copied part is no MD5.
            None => md5.update(part.etag.as_bytes()),
        }
    }
    format!("{}-{}", hash::hex(md5.finalize().as_ref()), parts.len())
}

/// The checksum that the list names for a part; at most one.
fn named_checksum(part: &CompletedPart) -> S3Result<Option<Bytes>> {
    match checksums_of!(part).into_iter().flatten().next() {
        Some(text) => {
            let value = hash::unbase64(text.as_bytes());
            Ok(Some(
                value.ok_or_else(|| s3_error!(InvalidPart, "The checksum of a part is malformed."))?.into(),
            ))
        }
        None => Ok(None),
    }
}

fn named_parts(list: Option<CompletedMultipartUpload>) -> S3Result<Vec<CompletePart>> {
    let list = list.and_then(|list| list.parts).unwrap_or_default();
    if list.is_empty() || list.len() > usize::from(PARTS_MAX) {
        return Err(s3_error!(MalformedXML, "The list of parts must have 1 to 10000 entries."));
    }
    let named = list.into_iter().map(|part| {
        let checksum = named_checksum(&part)?;
        let number = part_number(part.part_number.unwrap_or(0)).map_err(|_| s3_error!(InvalidPart))?;
        let etag = part.e_tag.ok_or_else(|| s3_error!(MalformedXML, "A part has no ETag."))?;
        Ok(CompletePart { number, etag: etag.into_value(), checksum })
    });
    let parts: Vec<CompletePart> = named.collect::<S3Result<_>>()?;
    if !parts.is_sorted_by(|a, b| a.number < b.number) {
        return Err(object_error(ObjectError::InvalidPartOrder));
    }
    Ok(parts)
}

/// The checksum of an object made of parts.
fn combined_checksum(
    of: StoredType,
    named: &[CompletePart],
    stored: &[PartInfo],
) -> S3Result<StoredChecksum> {
    let mut sums = Vec::with_capacity(named.len());
    for part in named {
        let found = stored.binary_search_by_key(&part.number, |stored| stored.number).map(|at| &stored[at]);
        let bad = || object_error(ObjectError::InvalidPart(part.number));
        let found = found.map_err(|_| bad())?;
        let value = found.checksum.as_ref().ok_or_else(bad)?.value.to_vec();
        sums.push((value, found.len));
    }
    let value = match of.kind {
        ChecksumKind::Composite => hash::composite(of.algorithm, &sums),
        ChecksumKind::FullObject => hash::combine(of.algorithm, &sums)
            .ok_or_else(|| s3_error!(InvalidRequest, "Checksums of parts cannot be combined."))?,
    };
    Ok(StoredChecksum { of, value: value.into() })
}

/// Compares with the checksum that the client sent for the whole object.
fn check_claim(
    input: &CompleteMultipartUploadInput,
    checksum: &StoredChecksum,
    parts: usize,
) -> S3Result<()> {
    let ours = checksum_fields(checksum, parts);
    if let (Some(claim), Some(ours)) = (&input.checksum_type, &ours.checksum_type)
        && claim.as_str() != ours.as_str()
    {
        return Err(s3_error!(
            InvalidRequest,
            "The upload was created with the checksum type {}, and is completed with {}.",
            ours.as_str(),
            claim.as_str()
        ));
    }
    // A composite checksum may come without its number of parts, which the list has anyway.
    let bare = checksum_fields(checksum, 0);
    let mut claims = checksums_of!(input).into_iter().zip(checksums_of!(ours)).zip(checksums_of!(bare));
    match claims.any(|((claim, ours), bare)| claim.is_some() && claim != ours && claim != bare) {
        true => {
            Err(s3_error!(BadDigest, "The checksum you specified did not match the calculated checksum."))
        }
        false => Ok(()),
    }
}

pub(crate) async fn complete_multipart_upload(
    core: &Arc<Services>,
    request: S3Request<CompleteMultipartUploadInput>,
) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let mut input = request.input;
    let upload = upload(&asked, &input.key, &input.upload_id)?;
    let parts = named_parts(input.multipart_upload.take())?;
    let etag = combined_etag(&parts);
    let caller = asked.caller();
    let conditions = write_conditions(input.if_match.as_ref(), input.if_none_match.as_ref());
    let done = finish(core, &input, upload.clone(), parts, &etag, conditions, &caller).await;
    let checksum = match done {
        Ok(checksum) => checksum,
        // The answer to the first attempt may have been lost.
        Err(error) if error.code().as_str() == "NoSuchUpload" => {
            let info = core.client.head_object(upload.name, Conditions::default(), caller).await;
            match info {
                Ok(info) if info.etag == etag => info.meta.checksum,
                _ => return Err(error),
            }
        }
        Err(error) => return Err(error),
    };
    let count = etag.rsplit_once('-').and_then(|(_, count)| count.parse().ok()).unwrap_or(0);
    let mut output = CompleteMultipartUploadOutput {
        location: Some(format!("/{}/{}", input.bucket, Encoding::Url.write_text(&input.key))),
        bucket: Some(input.bucket),
        key: Some(input.key),
        e_tag: Some(strong(etag)),
        ..CompleteMultipartUploadOutput::default()
    };
    if let Some(checksum) = &checksum {
        output.checksum_type = set_checksum!(output, checksum, count);
    }
    Ok(S3Response::new(output))
}

async fn finish(
    core: &Services,
    input: &CompleteMultipartUploadInput,
    upload: UploadRef,
    parts: Vec<CompletePart>,
    etag: &str,
    conditions: Conditions,
    caller: &Caller,
) -> S3Result<Option<StoredChecksum>> {
    let of = begun(core, &upload, caller.clone()).await?.meta.checksum.map(|checksum| checksum.of);
    let checksum = if of.is_some() || input.mpu_object_size.is_some() {
        let stored = all_parts(core, &upload, caller).await?;
        let named = |part: &&PartInfo| parts.binary_search_by_key(&part.number, |named| named.number).is_ok();
        let size: u64 = stored.iter().filter(named).map(|part| part.len).sum();
        if input.mpu_object_size.is_some_and(|claimed| claimed != size as i64) {
            return Err(s3_error!(
                InvalidRequest,
                "The provided 'x-amz-mp-object-size' header does not match what was computed: bytes={size}."
            ));
        }
        of.map(|of| combined_checksum(of, &parts, &stored)).transpose()?
    } else {
        None
    };
    if let Some(checksum) = &checksum {
        check_claim(input, checksum, parts.len())?;
    }
    let complete = CompleteUpload {
        upload,
        parts,
        part_bytes_min: PART_BYTES_MIN,
        etag: Some(etag.to_owned()),
        checksum: checksum.clone(),
        conditions,
        caller: caller.clone(),
    };
    core.client.complete_upload(complete).await.map_err(object_error)?;
    Ok(checksum)
}

pub(crate) async fn abort_multipart_upload(
    core: &Arc<Services>,
    request: S3Request<AbortMultipartUploadInput>,
) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let upload = upload(&asked, &request.input.key, &request.input.upload_id)?;
    core.client.abort_upload(upload, asked.caller()).await.map_err(object_error)?;
    Ok(S3Response::with_status(AbortMultipartUploadOutput::default(), hyper::StatusCode::NO_CONTENT))
}

fn describe_part(part: PartInfo) -> Part {
    let mut described = Part {
        e_tag: Some(strong(part.etag)),
        last_modified: Some(timestamp(part.mtime_ns)),
        part_number: Some(part.number.into()),
        size: Some(part.len as i64),
        ..Part::default()
    };
    if let Some(checksum) = &part.checksum {
        set_checksum!(described, checksum, 0);
    }
    described
}

fn page_limit(most: Option<i32>) -> S3Result<i32> {
    let most = most.unwrap_or(PAGE_MAX);
    if most < 0 {
        return Err(s3_error!(InvalidArgument, "Argument must be an integer between 0 and 2147483647"));
    }
    Ok(most.min(PAGE_MAX))
}

pub(crate) async fn list_parts(
    core: &Arc<Services>,
    request: S3Request<ListPartsInput>,
) -> S3Result<S3Response<ListPartsOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let input = request.input;
    let upload = upload(&asked, &input.key, &input.upload_id)?;
    let most = page_limit(input.max_parts)?;
    let after = input.part_number_marker.unwrap_or(0);
    let after_number = u16::try_from(after.clamp(0, i32::from(PARTS_MAX))).unwrap_or(PARTS_MAX);
    let limit = most.max(1) as u32;
    let mut page =
        core.client.list_parts(upload, after_number, limit, asked.caller()).await.map_err(object_error)?;
    if most == 0 {
        page.parts.clear();
        page.more = false;
    }
    let of = page.meta.checksum.map(|checksum| checksum.of);
    let next = page.parts.last().map(|part| i32::from(part.number)).filter(|_| page.more);
    let user = owner(page.caller.uid);
    Ok(S3Response::new(ListPartsOutput {
        bucket: Some(input.bucket),
        key: Some(input.key),
        upload_id: Some(input.upload_id),
        initiator: Some(Initiator { display_name: None, id: user.id.clone() }),
        owner: Some(user),
        storage_class: Some(StorageClass::from_static(StorageClass::STANDARD)),
        part_number_marker: Some(after),
        next_part_number_marker: next,
        max_parts: Some(most),
        is_truncated: Some(page.more),
        parts: Some(page.parts.into_iter().map(describe_part).collect()),
        checksum_algorithm: of.map(|of| ChecksumAlgorithm::from_static(hash::name(of.algorithm))),
        checksum_type: of.map(|of| checksum_kind(of.kind)),
        ..ListPartsOutput::default()
    }))
}

/// Where a list of uploads continues.
fn upload_query(input: &ListMultipartUploadsInput, bucket: base::Ino, limit: u32) -> S3Result<UploadQuery> {
    let prefix = input.prefix.as_deref().unwrap_or_default();
    let delimiter = input.delimiter.as_deref().unwrap_or_default();
    let marker = input.key_marker.as_deref().filter(|marker| !marker.is_empty());
    // The id is ignored if there is no key.
    let id = input.upload_id_marker.as_deref().filter(|id| !id.is_empty() && marker.is_some());
    let id = id.map(parse_id).transpose()?;
    let past = marker.and_then(|marker| match super::listing::after(marker, prefix, delimiter) {
        client::object::ListFrom::Past(past) => Some(past),
        _ => None,
    });
    Ok(UploadQuery {
        bucket,
        prefix: Bytes::copy_from_slice(prefix.as_bytes()),
        delimiter: Bytes::copy_from_slice(delimiter.as_bytes()),
        after: marker.map(|marker| (Bytes::copy_from_slice(marker.as_bytes()), id)),
        past,
        limit,
    })
}

pub(crate) async fn list_multipart_uploads(
    core: &Arc<Services>,
    request: S3Request<ListMultipartUploadsInput>,
) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let input = request.input;
    let encoding = Encoding::of(input.encoding_type.as_ref())?;
    let most = page_limit(input.max_uploads)?;
    let query = upload_query(&input, asked.bucket()?.ino, most.max(1) as u32)?;
    let mut page = core.client.list_uploads(query, asked.caller()).await.map_err(object_error)?;
    if most == 0 {
        page.entries.clear();
        page.more = false;
    }
    let (mut uploads, mut prefixes, mut next) = (Vec::new(), Vec::new(), None);
    for entry in page.entries {
        match entry {
            UploadEntry::Upload { key, id, started_ns, uid, checksum } => {
                // A key that XML cannot hold exists all the same: the next page begins after it.
                let text = encoding.write(&key).or_else(|| String::from_utf8(key.to_vec()).ok());
                next = Some((text.clone(), Some(write_id(id))));
                let user = owner(uid);
                uploads.push(MultipartUpload {
                    checksum_algorithm: checksum
                        .map(|of| ChecksumAlgorithm::from_static(hash::name(of.algorithm))),
                    checksum_type: checksum.map(|of| checksum_kind(of.kind)),
                    initiated: Some(timestamp(started_ns)),
                    initiator: Some(Initiator { display_name: None, id: user.id.clone() }),
                    owner: Some(user),
                    key: text,
                    storage_class: Some(StorageClass::from_static(StorageClass::STANDARD)),
                    upload_id: Some(write_id(id)),
                });
            }
            UploadEntry::Prefix(prefix) => {
                let prefix = encoding.write(&prefix).or_else(|| String::from_utf8(prefix.to_vec()).ok());
                next = Some((prefix.clone(), None));
                prefixes.push(CommonPrefix { prefix });
            }
        }
    }
    let (next_key, next_id) = next.filter(|_| page.more).unwrap_or_default();
    Ok(S3Response::new(ListMultipartUploadsOutput {
        bucket: Some(input.bucket),
        key_marker: Some(encoding.write_text(input.key_marker.as_deref().unwrap_or_default())),
        upload_id_marker: Some(input.upload_id_marker.unwrap_or_default()),
        next_key_marker: next_key,
        next_upload_id_marker: next_id,
        max_uploads: Some(most),
        is_truncated: Some(page.more),
        uploads: Some(uploads),
        common_prefixes: Some(prefixes),
        delimiter: echoed(input.delimiter, encoding),
        prefix: Some(encoding.write_text(input.prefix.as_deref().unwrap_or_default())),
        encoding_type: input.encoding_type,
        request_charged: None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use client::object::ChecksumAlgorithm as Algorithm;

    #[track_caller]
    fn check(kind: ChecksumKind, claim: &str, is_right: bool) {
        let of = StoredType { algorithm: Algorithm::Crc32c, kind };
        let checksum = StoredChecksum { of, value: Bytes::from_static(&[0; 4]) };
        let input = CompleteMultipartUploadInput {
            checksum_crc32c: Some(claim.to_owned()),
            ..CompleteMultipartUploadInput::default()
        };
        let found = check_claim(&input, &checksum, 2);
        let code = found.as_ref().err().map(|error| error.code().as_str());
        assert_eq!(code, (!is_right).then_some("BadDigest"), "{kind:?} {claim}");
    }

    #[test]
    fn a_composite_checksum_may_come_without_the_number_of_parts() {
        check(ChecksumKind::Composite, "AAAAAA==-2", true);
        check(ChecksumKind::Composite, "AAAAAA==", true);
        check(ChecksumKind::FullObject, "AAAAAA==", true);
        for wrong in ["AAAAAA==-3", "AAAAAQ==", "AAAAAQ==-2", "AAAAAA==-", ""] {
            check(ChecksumKind::Composite, wrong, false);
        }
        check(ChecksumKind::FullObject, "AAAAAA==-2", false);
    }
}
