//! Writing objects: the bytes are made durable before the object gets its name.

use std::sync::Arc;

use base::Ino;
use bytes::{Bytes, BytesMut};
use client::PutOptions;
use client::object::{Checksum as StoredChecksum, ObjectHeaders, ObjectInfo, ObjectMeta, ObjectName};
use futures_util::StreamExt;
use hyper::Uri;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use s3s::dto::*;
use s3s::stream::ByteStream;
use s3s::{S3Request, S3Response, S3Result, TrailingHeaders, s3_error};
use tokio::sync::OwnedSemaphorePermit;

use super::checksum::set_checksum;
use super::listing::Encoding;
use super::{Authorized, acl, refuse_unsupported, strong, tags, write_conditions};
use crate::error::{body_error, object_error};
use crate::gate::{Origin, Services};
use crate::hash::{self, Claims, Digested, Digests, Passing};
use crate::identity::PolicyFacts;
use crate::server::{FormFields, Unread};

/// Largest object that is put in one piece, and largest part.
const PUT_BYTES_MAX: u64 = 5 << 30;
/// Bodies up to this size stay in memory and are stored with one request ...
const SMALL_BYTES_MAX: u64 = 64 << 10;
/// ... and bodies up to this size too, if there is memory for them.
const WHOLE_BYTES_MAX: u64 = 2 << 20;
/// Largest user metadata, names and values together.
const METADATA_BYTES_MAX: usize = 2048;

/// A body that was received and matches its digests.
pub(crate) struct Received {
    pub(crate) body: ReceivedBody,
    pub(crate) digested: Digested,
}

pub(crate) enum ReceivedBody {
    /// In memory, with its share of [`Services::bodies`]; a small body needs no share.
    Whole(Bytes, Option<OwnedSemaphorePermit>),
    Staged(Ino),
}

/// Facts of a body that are known before it comes.
pub(crate) struct Incoming<'a> {
    pub(crate) stream: Option<StreamingBlob>,
    pub(crate) content_length: Option<i64>,
    pub(crate) trailers: Option<&'a TrailingHeaders>,
    pub(crate) unread: &'a Unread,
}

impl Incoming<'_> {
    /// A trailer of the received body.
    fn trailer(&self, name: &str) -> Option<String> {
        let decoded = self.trailers.and_then(|trailers| {
            trailers.read(|headers| headers.get(name)?.to_str().ok().map(str::to_owned))?
        });
        decoded.or_else(|| self.unread.trailer(name).map(str::to_owned))
    }
}

/// Receives a body: a small one into memory, a large one into a staged file.
pub(crate) async fn receive(
    core: &Services,
    mut incoming: Incoming<'_>,
    claims: Claims,
) -> S3Result<Received> {
    // The length in the header of a form is that of the whole form.
    let exact = incoming.stream.as_ref().and_then(|stream| stream.remaining_length().exact());
    let length = match (incoming.unread.decoded_bytes(), exact, incoming.content_length) {
        (Some(decoded), ..) => Some(decoded),
        (None, Some(exact), None) => Some(exact as u64),
        (None, _, Some(length)) => u64::try_from(length).ok(),
        (None, None, None) => None,
    };
    let length = match (length, &incoming.stream) {
        (Some(length), _) => length,
        (None, None) => 0,
        (None, Some(_)) => {
            return Err(s3_error!(MissingContentLength, "You must provide the Content-Length HTTP header."));
        }
    };
    if length > PUT_BYTES_MAX {
        return Err(s3_error!(
            EntityTooLarge,
            "Your proposed upload exceeds the maximum allowed object size: one request takes 5 GiB, a multipart upload more."
        ));
    }
    let memory = if length <= WHOLE_BYTES_MAX {
        core.bodies.clone().try_acquire_many_owned((length >> 10) as u32 + 1).ok()
    } else {
        None
    };
    let mut digests = Passing::new(Digests::new(claims), length, &core.bodies);
    let stream = incoming.stream.take();
    let body = if length <= SMALL_BYTES_MAX || memory.is_some() {
        ReceivedBody::Whole(collect(stream, length, &mut digests).await?, memory)
    } else {
        ReceivedBody::Staged(store(core, stream, length, &mut digests).await?)
    };
    match digests.end().await.and_then(|digests| digests.finish(|name| incoming.trailer(name))) {
        Ok(digested) => Ok(Received { body, digested }),
        Err(error) => {
            discard(core, &body);
            Err(error)
        }
    }
}

/// Drops a received body that is not used.
pub(crate) fn discard(core: &Services, body: &ReceivedBody) {
    if let ReceivedBody::Staged(ino) = body {
        core.client.discard(*ino);
    }
}

fn incomplete(length: u64, came: u64) -> s3s::S3Error {
    s3_error!(
        IncompleteBody,
        "You did not provide the number of bytes specified by the Content-Length HTTP header: bytes={came} of={length}."
    )
}

async fn collect(stream: Option<StreamingBlob>, length: u64, digests: &mut Passing) -> S3Result<Bytes> {
    let mut whole = Bytes::new();
    let mut joined = BytesMut::new();
    if let Some(mut stream) = stream {
        while let Some(bytes) = stream.next().await {
            let bytes = bytes.map_err(|error| body_error(&*error))?;
            digests.update(&bytes).await;
            let came = whole.len().max(joined.len()) + bytes.len();
            if came as u64 > length {
                return Err(incomplete(length, came as u64));
            }
            if whole.is_empty() && joined.is_empty() {
                whole = bytes;
            } else {
                if joined.is_empty() {
                    joined.reserve(length as usize);
                    joined.extend_from_slice(&std::mem::take(&mut whole));
                }
                joined.extend_from_slice(&bytes);
            }
        }
    }
    let body = if joined.is_empty() { whole } else { joined.freeze() };
    if body.len() as u64 != length {
        return Err(incomplete(length, body.len() as u64));
    }
    Ok(body)
}

async fn store(
    core: &Services,
    stream: Option<StreamingBlob>,
    length: u64,
    digests: &mut Passing,
) -> S3Result<Ino> {
    let staged = core.client.stage().await.map_err(object_error)?;
    let result = fill(core, staged, stream, length, digests).await;
    if result.is_err() {
        core.client.discard(staged);
    }
    result.map(|()| staged)
}

async fn fill(
    core: &Services,
    staged: Ino,
    stream: Option<StreamingBlob>,
    length: u64,
    digests: &mut Passing,
) -> S3Result<()> {
    let mut off = 0;
    if let Some(mut stream) = stream {
        while let Some(bytes) = stream.next().await {
            let bytes = bytes.map_err(|error| body_error(&*error))?;
            if off + bytes.len() as u64 > length {
                return Err(incomplete(length, off + bytes.len() as u64));
            }
            core.client.write(staged, off, &bytes).await.map_err(|error| object_error(error.into()))?;
            digests.update(&bytes).await;
            off += bytes.len() as u64;
        }
    }
    if off == length { Ok(()) } else { Err(incomplete(length, off)) }
}

/// Gives a received body its name. The staged file is used up or removed afterwards.
async fn publish(
    core: &Services,
    name: ObjectName,
    body: ReceivedBody,
    put: PutOptions,
) -> S3Result<ObjectInfo> {
    match body {
        ReceivedBody::Whole(bytes, _memory) => {
            core.client.put_object_bytes(name, bytes, put).await.map_err(object_error)
        }
        ReceivedBody::Staged(ino) => core.client.put_object(name, ino, put).await.map_err(|error| {
            core.client.discard(ino);
            object_error(error)
        }),
    }
}

/// Removes `aws-chunked`, which describes the transfer and not the object.
fn content_encoding(encoding: Option<String>) -> Option<String> {
    let encoding = encoding?;
    let kept: Vec<&str> = encoding
        .split(',')
        .map(str::trim)
        .filter(|coding| !coding.eq_ignore_ascii_case("aws-chunked"))
        .collect();
    (!kept.is_empty() && !kept[0].is_empty()).then(|| kept.join(","))
}

/// User metadata in the order in which it is stored.
pub(crate) fn user_metadata(metadata: Option<Metadata>) -> S3Result<Vec<(String, String)>> {
    let mut user: Vec<(String, String)> = metadata.unwrap_or_default().into_iter().collect();
    user.sort_unstable();
    let bytes: usize = user.iter().map(|(name, value)| name.len() + value.len()).sum();
    if bytes > METADATA_BYTES_MAX {
        return Err(s3_error!(
            MetadataTooLarge,
            "Your metadata headers exceed the maximum allowed metadata size: bytes={bytes} most=2048."
        ));
    }
    Ok(user)
}

/// Headers and metadata of a new object, from any input type that has them.
macro_rules! object_meta {
    ($input:ident) => {{
        let tags = match $input.tagging.as_deref() {
            Some(text) => $crate::ops::tags::parse_header(text)?,
            None => Vec::new(),
        };
        $crate::ops::put::meta(
            client::object::ObjectHeaders {
                content_type: $input.content_type.take(),
                cache_control: $input.cache_control.take(),
                content_disposition: $input.content_disposition.take(),
                content_encoding: $input.content_encoding.take(),
                content_language: $input.content_language.take(),
                expires: $input.expires.as_ref().and_then($crate::ops::http_date),
                website_redirect: $input.website_redirect_location.take(),
            },
            $input.metadata.take(),
            tags,
        )?
    }};
}
pub(crate) use object_meta;

pub(crate) fn meta(
    mut headers: ObjectHeaders,
    metadata: Option<Metadata>,
    tags: Vec<(String, String)>,
) -> S3Result<ObjectMeta> {
    headers.content_encoding = content_encoding(headers.content_encoding);
    // An empty header counts as none.
    headers.content_type = headers.content_type.filter(|value| !value.is_empty());
    let user = user_metadata(metadata)?;
    check_headers(&headers, &user)?;
    Ok(ObjectMeta { headers, user, tags, ..ObjectMeta::default() })
}

/// Refuses headers that an answer could not carry. Those of requests can always be carried; fields of a form may hold
/// anything. Values of user metadata are encoded where necessary.
fn check_headers(headers: &ObjectHeaders, user: &[(String, String)]) -> S3Result<()> {
    let values = [
        ("Content-Type", &headers.content_type),
        ("Cache-Control", &headers.cache_control),
        ("Content-Disposition", &headers.content_disposition),
        ("Content-Encoding", &headers.content_encoding),
        ("Content-Language", &headers.content_language),
        ("x-amz-website-redirect-location", &headers.website_redirect),
    ];
    let is_bad = |value: &str| HeaderValue::from_bytes(value.as_bytes()).is_err();
    if let Some((name, _)) = values.iter().find(|(_, value)| value.as_deref().is_some_and(is_bad)) {
        return Err(s3_error!(InvalidArgument, "A header cannot hold the value of {name}."));
    }
    let is_name = |name: &str| HeaderName::try_from(format!("x-amz-meta-{name}")).is_ok();
    match user.iter().find(|(name, _)| !is_name(name)) {
        Some((name, _)) => Err(s3_error!(
            InvalidArgument,
            "x-amz-meta-{} cannot be the name of a header.",
            name.escape_debug()
        )),
        None => Ok(()),
    }
}

/// Refuses features that objects do not have here.
macro_rules! check_object {
    ($input:ident) => {{
        $crate::ops::refuse_unsupported(&[
            ("Object lock", $input.object_lock_mode.is_some()),
            ("Object lock", $input.object_lock_legal_hold_status.is_some()),
            ("Object lock", $input.object_lock_retain_until_date.is_some()),
            // Headers were checked before; a form may have fields that only the library parsed.
            ("Server-side encryption", $input.server_side_encryption.is_some()),
            ("Server-side encryption", $input.ssekms_key_id.is_some()),
            ("Server-side encryption", $input.ssekms_encryption_context.is_some()),
            ("Server-side encryption", $input.bucket_key_enabled.is_some()),
            ("SSE-C", $input.sse_customer_algorithm.is_some()),
            ("SSE-C", $input.sse_customer_key.is_some()),
            ("SSE-C", $input.sse_customer_key_md5.is_some()),
        ])?;
        $crate::ops::put::check_storage_class($input.storage_class.as_ref())?;
        $crate::ops::acl::check_object_acl_header($input.acl.as_ref())?;
        $crate::ops::acl::check_grants!($input);
    }};
}
pub(crate) use check_object;

pub(crate) fn check_storage_class(class: Option<&StorageClass>) -> S3Result<()> {
    match class.map(StorageClass::as_str) {
        None | Some(StorageClass::STANDARD) => Ok(()),
        Some(_) => Err(s3_error!(
            InvalidStorageClass,
            "The storage class you specified is not valid: there is only STANDARD."
        )),
    }
}

pub(crate) async fn put_object(
    core: &Arc<Services>,
    request: S3Request<PutObjectInput>,
) -> S3Result<S3Response<PutObjectOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let mut input = request.input;
    check_object!(input);
    refuse_unsupported(&[("Appending", input.write_offset_bytes.is_some())])?;
    // The key and the length of a form are in its fields, which are parsed after authorization.
    let is_form = request.method == hyper::Method::POST;
    let form = asked.context.unread.form().filter(|_| is_form);
    acl::check_canned(form.and_then(|form| form.acl.as_deref()))?;
    let is_to_be_encrypted = form.is_some_and(|form| form.encryption);
    refuse_unsupported(&[("Server-side encryption", is_to_be_encrypted)])?;
    let name = asked.name(&input.key)?;
    let document = form.and_then(|form| form.tagging.as_deref());
    let is_tagged = input.tagging.is_some() || document.is_some();
    let mut meta = object_meta!(input);
    if let Some(document) = document {
        meta.tags = tags::parse_document(document)?;
    }
    let told = form.map(policy_headers);
    let facts =
        PolicyFacts { headers: told.as_ref(), request_tags: Some(&meta.tags), ..PolicyFacts::default() };
    let (bucket, key) = (asked.bucket()?, Some(&*input.key));
    if is_form {
        core.may_with(&asked.context, "s3:PutObject", bucket, key, facts)?;
    }
    if is_tagged {
        core.may_with(&asked.context, "s3:PutObjectTagging", bucket, key, facts)?;
    }
    let conditions = write_conditions(input.if_match.as_ref(), input.if_none_match.as_ref());
    let claims = match is_form {
        true => Claims::of(&digest_headers(&input)?, None)?,
        false => Claims::of(&request.headers, None)?,
    };
    let incoming = Incoming {
        stream: input.body.take(),
        content_length: input.content_length.filter(|_| !is_form),
        trailers: request.trailing_headers.as_ref(),
        unread: &asked.context.unread,
    };
    let received = receive(core, incoming, claims).await?;
    let etag = received.digested.etag();
    let checksum = received.digested.checksum.clone();
    meta.etag = Some(etag);
    meta.checksum = received.digested.checksum;
    let put = PutOptions { meta, conditions, caller: asked.caller() };
    let info = publish(core, name, received.body, put).await?;
    // The answer to a form is a text, where the protocol library adds no quotes.
    let etag = if is_form { format!("\"{}\"", info.etag) } else { info.etag };
    let mut output = PutObjectOutput { e_tag: Some(strong(etag)), ..PutObjectOutput::default() };
    if let Some(checksum) = &checksum {
        output.checksum_type = set_checksum!(output, checksum, 0);
    }
    let mut response = S3Response::new(output);
    if let Some(form) = form {
        let place = location(asked.context.origin, &request.uri, &request.headers, &input.key);
        response.headers =
            form_headers(&response.output, checksum.as_ref(), place.filter(|_| !form.redirects));
    }
    Ok(response)
}

/// Headers of the answer to a form; the protocol library sets none.
fn form_headers(
    output: &PutObjectOutput,
    checksum: Option<&StoredChecksum>,
    place: Option<HeaderValue>,
) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Some(place) = place {
        headers.insert(header::LOCATION, place);
    }
    if let Some(etag) = output.e_tag.as_ref().and_then(|etag| etag.value().parse().ok()) {
        headers.insert(header::ETAG, etag);
    }
    if let Some(checksum) = checksum {
        let value = HeaderValue::from_str(&hash::base64(&checksum.value)).expect("base64 is valid");
        headers.insert(hash::header(checksum.of.algorithm), value);
    }
    headers
}

/// The address of an object that a form was posted for, from the address of its bucket.
fn location(origin: Origin, bucket: &Uri, headers: &HeaderMap, key: &str) -> Option<HeaderValue> {
    let host = headers.get(header::HOST)?.to_str().ok()?;
    let scheme = if origin.is_secure { "https" } else { "http" };
    let (path, key) = (bucket.path().trim_end_matches('/'), Encoding::Url.write_text(key));
    HeaderValue::from_str(&format!("{scheme}://{host}{path}/{key}")).ok()
}

/// Fields of a form that policies look at, as headers.
fn policy_headers(form: &FormFields) -> HeaderMap {
    let acl = form.acl.as_deref().and_then(|acl| HeaderValue::from_str(acl).ok());
    acl.into_iter().map(|acl| (HeaderName::from_static("x-amz-acl"), acl)).collect()
}

/// Digests in the fields of a form, as headers.
fn digest_headers(input: &PutObjectInput) -> S3Result<HeaderMap> {
    let algorithm = input.checksum_algorithm.as_ref().map(|algorithm| algorithm.as_str().to_owned());
    let fields = [
        ("content-md5", &input.content_md5),
        ("x-amz-sdk-checksum-algorithm", &algorithm),
        ("x-amz-checksum-crc32", &input.checksum_crc32),
        ("x-amz-checksum-crc32c", &input.checksum_crc32c),
        ("x-amz-checksum-crc64nvme", &input.checksum_crc64nvme),
        ("x-amz-checksum-sha1", &input.checksum_sha1),
        ("x-amz-checksum-sha256", &input.checksum_sha256),
    ];
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        if let Some(value) = value {
            let value = HeaderValue::from_str(value);
            headers.insert(
                name,
                value.map_err(|_| s3_error!(InvalidDigest, "The {name} you specified was invalid."))?,
            );
        }
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aws_chunked_is_no_encoding_of_the_object() {
        let kept = |text: &str| content_encoding(Some(text.to_owned()));
        assert_eq!(kept("aws-chunked"), None);
        assert_eq!(kept("aws-chunked, gzip"), Some("gzip".to_owned()));
        assert_eq!(kept("gzip,AWS-chunked"), Some("gzip".to_owned()));
        assert_eq!(kept(""), None);
    }

    #[track_caller]
    fn check_meta(content_type: &str, name: &str, value: &str, is_fine: bool) {
        let headers =
            ObjectHeaders { content_type: Some(content_type.to_owned()), ..ObjectHeaders::default() };
        let user = Metadata::from([(name.to_owned(), value.to_owned())]);
        let found = meta(headers, Some(user), Vec::new());
        let code = found.as_ref().err().map(|error| error.code().as_str());
        assert_eq!(code, (!is_fine).then_some("InvalidArgument"), "{content_type:?} {name:?} {value:?}");
    }

    #[test]
    fn there_is_one_storage_class() {
        let check = |class: &str| check_storage_class(Some(&class.to_owned().into())).is_ok();
        assert!(check("STANDARD") && check_storage_class(None).is_ok());
        for class in ["REDUCED_REDUNDANCY", "STANDARD_IA", "GLACIER", "standard", ""] {
            assert!(!check(class), "{class}");
        }
    }

    #[test]
    fn what_no_header_can_hold_is_refused() {
        check_meta("text/plain", "a_b.c", "1", true);
        check_meta("ü/b", "a", "ü\r\n", true);
        check_meta("a\r\nX-Evil: 1", "a", "1", false);
        check_meta("a\0", "a", "1", false);
        for name in ["ü", "a b", "a:b", "a\r\nb"] {
            check_meta("text/plain", name, "1", false);
        }
    }
}
