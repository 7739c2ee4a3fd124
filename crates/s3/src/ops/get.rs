//! Reading objects.

use std::ops::Range as Bytes;
use std::sync::Arc;

use client::object::{
    Checksum as StoredChecksum, Conditions, ObjectError, ObjectInfo, ObjectName, ObjectPart as StoredPart,
};
use hyper::header::{self, HeaderMap, HeaderValue};
use s3s::dto::*;
use s3s::{S3Error, S3ErrorCode, S3Request, S3Response, S3Result, s3_error};

use super::checksum::{checksum_fields, set_checksum};
use super::{Authorized, check_version, http_date, read_conditions, strong, timestamp, wants_range};
use crate::error::{custom, object_error};
use crate::gate::Services;
use crate::read::Source;

pub(crate) const DEFAULT_TYPE: &str = "binary/octet-stream";
const TAGGING_COUNT: header::HeaderName = header::HeaderName::from_static("x-amz-tagging-count");
const PARTS_PAGE: i32 = 1000;
/// Attempts to begin a read whose file is truncated at that moment.
const ATTEMPTS: u32 = 4;

/// The bytes of an object that a response has.
struct Selection {
    bytes: Bytes<u64>,
    content_range: Option<String>,
    parts_count: Option<i32>,
    /// The checksum of these bytes, if there is one, and the number of parts that it covers.
    checksum: Option<(StoredChecksum, usize)>,
}

/// The error for a range outside the object; tells the object's size.
pub(crate) fn unsatisfiable(info: &ObjectInfo) -> S3Error {
    let mut error = s3_error!(InvalidRange, "The requested range is not satisfiable");
    let mut headers = HeaderMap::new();
    let value = format!("bytes */{}", info.size);
    headers.insert(header::CONTENT_RANGE, HeaderValue::from_str(&value).expect("digits are valid"));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/xml"));
    error.set_headers(headers);
    error
}

/// The bytes of a part. Parts count from 1 without gaps, as on AWS, and not by the numbers of their upload: a client
/// that reads part after part knows only their count.
fn part_bytes(parts: &[StoredPart], part: i32) -> Option<Bytes<u64>> {
    let index = usize::try_from(part).ok()?.checked_sub(1)?;
    let len = parts.get(index)?.len;
    let start: u64 = parts.iter().take(index).map(|part| part.len).sum();
    Some(start..start + len)
}

/// The checksum of a part; parts count as in [`part_bytes`].
fn part_checksum(info: &ObjectInfo, part: i32) -> Option<(StoredChecksum, usize)> {
    let stored = info.meta.parts.get(usize::try_from(part).ok()?.checked_sub(1)?)?;
    let of = info.meta.checksum.as_ref()?.of;
    Some((StoredChecksum { of, value: stored.checksum.clone()? }, 0))
}

fn select(info: &ObjectInfo, range: Option<&Range>, part: Option<i32>) -> S3Result<Selection> {
    let size = info.size;
    let of_all = info.meta.checksum.clone().map(|checksum| (checksum, info.meta.parts.len()));
    let ranged = |bytes: Bytes<u64>, parts_count, checksum| {
        let content_range = format!("bytes {}-{}/{size}", bytes.start, bytes.end - 1);
        Selection { bytes, content_range: Some(content_range), parts_count, checksum }
    };
    match (range, part) {
        (Some(_), Some(_)) => {
            Err(s3_error!(InvalidRequest, "Cannot specify both Range header and partNumber query parameter"))
        }
        (Some(range), None) => {
            let bytes = range.check(size).map_err(|_| unsatisfiable(info))?;
            // The last bytes of an empty object: no bytes.
            if bytes.is_empty() {
                return Err(unsatisfiable(info));
            }
            let checksum = of_all.filter(|_| bytes == (0..size));
            Ok(ranged(bytes, None, checksum))
        }
        (None, Some(part)) => {
            let count = info.meta.parts.len() as i32;
            match part_bytes(&info.meta.parts, part) {
                // An object that was put in one piece has one part and no count of parts. Clients take its size from
                // the range, as of other parts.
                None if count == 0 && part == 1 && size > 0 => Ok(ranged(0..size, None, of_all)),
                None if count == 0 && part == 1 => {
                    Ok(Selection { bytes: 0..0, content_range: None, parts_count: None, checksum: of_all })
                }
                None => Err(custom(
                    "InvalidPartNumber",
                    hyper::StatusCode::RANGE_NOT_SATISFIABLE,
                    "The requested partnumber is not satisfiable",
                )),
                Some(bytes) if bytes.is_empty() => Ok(Selection {
                    bytes: 0..0,
                    content_range: None,
                    parts_count: Some(count),
                    checksum: part_checksum(info, part),
                }),
                Some(bytes) => Ok(ranged(bytes, Some(count), part_checksum(info, part))),
            }
        }
        (None, None) => {
            Ok(Selection { bytes: 0..size, content_range: None, parts_count: None, checksum: of_all })
        }
    }
}

/// Puts the fields that GET and HEAD share into an output.
macro_rules! describe {
    ($output:ident, $info:expr, $mode:expr, $checksum:expr) => {{
        let info: &ObjectInfo = $info;
        let headers = &info.meta.headers;
        $output.accept_ranges = Some("bytes".to_owned());
        $output.e_tag = Some(strong(info.etag.as_str()));
        $output.last_modified = Some(timestamp(info.attr.mtime_ns));
        $output.content_type =
            Some(headers.content_type.clone().unwrap_or_else(|| DEFAULT_TYPE.to_owned()).into());
        $output.cache_control = headers.cache_control.clone();
        $output.content_disposition = headers.content_disposition.clone();
        $output.content_encoding = headers.content_encoding.clone();
        $output.content_language = headers.content_language.clone();
        $output.expires = headers
            .expires
            .as_deref()
            .and_then(|text| Timestamp::parse(TimestampFormat::HttpDate, text).ok());
        $output.website_redirect_location = headers.website_redirect.clone();
        if !info.meta.user.is_empty() {
            $output.metadata = Some(info.meta.user.iter().cloned().collect());
        }
        let wanted = $mode.is_some_and(|mode: ChecksumMode| mode.as_str() == ChecksumMode::ENABLED);
        if wanted && let Some((checksum, parts)) = &$checksum {
            $output.checksum_type = set_checksum!($output, checksum, *parts);
        }
    }};
}

/// The error of a read; the answer 304 has the headers of the object.
pub(crate) async fn read_error(
    core: &Services,
    name: ObjectName,
    asked: &Authorized,
    error: ObjectError,
) -> S3Error {
    let mut answer = object_error(error);
    if error == ObjectError::NotModified
        && let Ok(info) = core.client.head_object(name, Conditions::default(), asked.caller()).await
    {
        let mut headers = HeaderMap::new();
        if let Ok(etag) = HeaderValue::from_str(&format!("\"{}\"", info.etag)) {
            headers.insert(header::ETAG, etag);
        }
        let date =
            http_date(&timestamp(info.attr.mtime_ns)).and_then(|date| HeaderValue::from_str(&date).ok());
        if let Some(date) = date {
            headers.insert(header::LAST_MODIFIED, date);
        }
        answer.set_headers(headers);
    }
    answer
}

/// Finds an object to read. A large one is opened; a small one only if it is read `in_parts`.
pub(crate) async fn open(
    core: &Services,
    asked: &Authorized,
    key: &str,
    conditions: Conditions,
    in_parts: bool,
) -> S3Result<Source> {
    let name = asked.name(key)?;
    let info = match in_parts {
        true => core.client.get_object(name.clone(), conditions, asked.caller()).await,
        false => core.client.read_object(name.clone(), conditions, asked.caller()).await,
    };
    match info {
        Ok(info) => Ok(Source::new(&core.client, info)),
        Err(error) => Err(read_error(core, name, asked, error).await),
    }
}

/// Without a signature, a client could make the server send any header with a file that is public.
fn check_overrides(asked: &Authorized, input: &GetObjectInput) -> S3Result<()> {
    let overrides = input.response_cache_control.is_some()
        || input.response_content_disposition.is_some()
        || input.response_content_encoding.is_some()
        || input.response_content_language.is_some()
        || input.response_content_type.is_some()
        || input.response_expires.is_some();
    match overrides && asked.is_anonymous() {
        true => Err(s3_error!(
            InvalidRequest,
            "Request specific response headers cannot be used for anonymous GET requests."
        )),
        false => Ok(()),
    }
}

pub(crate) async fn get_object(
    core: &Arc<Services>,
    request: S3Request<GetObjectInput>,
) -> S3Result<S3Response<GetObjectOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let input = request.input;
    check_version(input.version_id.as_deref())?;
    check_overrides(&asked, &input)?;
    let conditions = read_conditions(
        input.if_match.as_ref(),
        input.if_none_match.as_ref(),
        input.if_modified_since.as_ref(),
        input.if_unmodified_since.as_ref(),
    );
    for attempt in 1.. {
        // After a stale read the object is opened: that way always ends.
        let source = open(core, &asked, &input.key, conditions.clone(), attempt > 1).await?;
        let info = source.info();
        let range = input.range.as_ref().filter(|_| wants_range(&request.headers, info));
        let selection = select(info, range, input.part_number)?;
        let body = match source.body(core, selection.bytes.clone()).await {
            Ok(body) => body,
            Err(base::FsError::Stale) if attempt < ATTEMPTS => continue,
            Err(error) => return Err(object_error(error.into())),
        };
        let mut output = GetObjectOutput {
            body: Some(body.into()),
            content_length: Some((selection.bytes.end - selection.bytes.start) as i64),
            content_range: selection.content_range,
            parts_count: selection.parts_count,
            tag_count: Some(info.meta.tags.len() as i32).filter(|count| *count > 0),
            ..GetObjectOutput::default()
        };
        describe!(output, info, input.checksum_mode, selection.checksum);
        return Ok(S3Response::new(output));
    }
    Err(s3_error!(InternalError))
}

pub(crate) async fn head_object(
    core: &Arc<Services>,
    request: S3Request<HeadObjectInput>,
) -> S3Result<S3Response<HeadObjectOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let input = request.input;
    check_version(input.version_id.as_deref())?;
    let conditions = read_conditions(
        input.if_match.as_ref(),
        input.if_none_match.as_ref(),
        input.if_modified_since.as_ref(),
        input.if_unmodified_since.as_ref(),
    );
    let name = asked.name(&input.key)?;
    let info = match core.client.head_object(name.clone(), conditions, asked.caller()).await {
        Ok(info) => info,
        Err(error) => return Err(read_error(core, name, &asked, error).await),
    };
    let range = input.range.as_ref().filter(|_| wants_range(&request.headers, &info));
    let selection = select(&info, range, input.part_number)?;
    let tags = info.meta.tags.len();
    let mut output = HeadObjectOutput {
        content_length: Some((selection.bytes.end - selection.bytes.start) as i64),
        content_range: selection.content_range,
        parts_count: selection.parts_count,
        ..HeadObjectOutput::default()
    };
    describe!(output, &info, input.checksum_mode, selection.checksum);
    let mut response = S3Response::new(output);
    if tags > 0 {
        // The library has this header for GET only.
        response.headers.insert(TAGGING_COUNT, HeaderValue::from(tags));
    }
    Ok(response)
}

pub(crate) async fn get_object_attributes(
    core: &Arc<Services>,
    request: S3Request<GetObjectAttributesInput>,
) -> S3Result<S3Response<GetObjectAttributesOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let input = request.input;
    check_version(input.version_id.as_deref())?;
    core.may_with_tags(&asked.context, "s3:GetObject", asked.bucket()?, &input.key, None).await?;
    let name = asked.name(&input.key)?;
    let info =
        core.client.head_object(name, Conditions::default(), asked.caller()).await.map_err(object_error)?;
    // A client sends all names in one header, or one header for each.
    let named = input.object_attributes.iter().flat_map(|names| names.as_str().split(',').map(str::trim));
    let named: Vec<&str> = named.collect();
    let wants = |what: &str| named.contains(&what);
    let mut output = GetObjectAttributesOutput {
        last_modified: Some(timestamp(info.attr.mtime_ns)),
        ..GetObjectAttributesOutput::default()
    };
    if wants(ObjectAttributes::ETAG) {
        output.e_tag = Some(strong(info.etag.as_str()));
    }
    if wants(ObjectAttributes::OBJECT_SIZE) {
        output.object_size = Some(info.size as i64);
    }
    if wants(ObjectAttributes::STORAGE_CLASS) {
        output.storage_class = Some(StorageClass::from_static(StorageClass::STANDARD));
    }
    if wants(ObjectAttributes::CHECKSUM) {
        // Only this answer leaves the number of parts away: `ObjectParts` has it.
        output.checksum = info.meta.checksum.as_ref().map(|checksum| checksum_fields(checksum, 0));
    }
    if wants(ObjectAttributes::OBJECT_PARTS) && !info.meta.parts.is_empty() {
        output.object_parts = Some(parts(&info, input.part_number_marker, input.max_parts)?);
    }
    Ok(S3Response::new(output))
}

fn parts(info: &ObjectInfo, after: Option<i32>, most: Option<i32>) -> S3Result<GetObjectAttributesParts> {
    let most = most.unwrap_or(PARTS_PAGE);
    let limit = usize::try_from(most)
        .map_err(|_| S3Error::with_message(S3ErrorCode::InvalidArgument, "max-parts must not be negative"))?;
    let after = after.unwrap_or(0);
    let of = info.meta.checksum.as_ref().map(|checksum| checksum.of);
    let mut rest = info.meta.parts.iter().filter(|part| i32::from(part.number) > after).peekable();
    let mut page = Vec::new();
    while page.len() < limit.min(PARTS_PAGE as usize)
        && let Some(part) = rest.next()
    {
        let mut out = ObjectPart {
            part_number: Some(part.number.into()),
            size: Some(part.len as i64),
            ..ObjectPart::default()
        };
        if let (Some(value), Some(of)) = (&part.checksum, of) {
            set_checksum!(out, &StoredChecksum { of, value: value.clone() }, 0);
        }
        page.push(out);
    }
    Ok(GetObjectAttributesParts {
        is_truncated: Some(rest.peek().is_some()),
        max_parts: Some(most),
        next_part_number_marker: page.last().and_then(|part| part.part_number),
        part_number_marker: Some(after),
        total_parts_count: Some(info.meta.parts.len() as i32),
        parts: Some(page),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(numbers: [u16; 2], part: i32, expected: Option<Bytes<u64>>) {
        let part_of = |(number, len)| StoredPart { number, len, checksum: None };
        let parts = numbers.into_iter().zip([5, 3]).map(part_of).collect::<Vec<_>>();
        assert_eq!(part_bytes(&parts, part), expected, "{numbers:?} {part}");
    }

    #[test]
    fn parts_are_counted_from_one() {
        for numbers in [[1, 2], [2, 3], [7, 9]] {
            check(numbers, 1, Some(0..5));
            check(numbers, 2, Some(5..8));
            check(numbers, 3, None);
            check(numbers, 7, None);
            check(numbers, 0, None);
            check(numbers, -1, None);
        }
    }
}
