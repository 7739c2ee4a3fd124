//! GET of several ranges, as `multipart/byteranges`; AWS sends the whole object instead.
//!
//! The protocol library supports single ranges only and refuses all other `Range` headers, so such requests leave it
//! after it has verified their signature. A header that is not a range of bytes is ignored (RFC 9110, section 14.2).

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use async_trait::async_trait;
use bytes::Bytes;
use client::object::ObjectInfo;
use futures_util::Stream;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::Extensions;
use hyper::{Method, StatusCode, Uri};
use s3s::dto::{ETagCondition, StreamingBlob, Timestamp, TimestampFormat};
use s3s::route::S3Route;
use s3s::stream::{ByteStream, RemainingLength};
use s3s::{Body, S3Request, S3Response, S3Result, StdError, s3_error};

use crate::access::{Names, Question, context};
use crate::error::object_error;
use crate::gate::Services;
use crate::ops::get::{DEFAULT_TYPE, open, unsatisfiable};
use crate::ops::{Authorized, http_date, read_conditions, timestamp, wants_range};
use crate::read::{ObjectStream, Source};
use crate::screen;

/// Most ranges in one request.
const RANGES_MAX: usize = 256;

/// Serves GETs whose `Range` header is not a single range.
pub(crate) struct RangeRoute {
    pub(crate) core: Arc<Services>,
    pub(crate) names: Arc<Names>,
}

/// Meaning of a `Range` header.
#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    /// The header is ignored: the whole object is sent.
    Everything,
    /// These ranges, cut at the end of the object.
    Ranges(Vec<Range<u64>>),
    /// None of the ranges lies in the object.
    Nothing,
}

/// The number at the beginning of a text, `u64::MAX` if it is larger, and the rest of the text.
fn number(text: &str) -> (Option<u64>, &str) {
    let end = text.bytes().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    let value = digits
        .bytes()
        .fold(0u64, |sum, digit| sum.saturating_mul(10).saturating_add(u64::from(digit - b'0')));
    (Some(value).filter(|_| end > 0), rest)
}

/// One range of an object of `size` bytes; empty if it lies outside the object. `None` if the text is no range. The
/// protocol library's own parser does not accept numbers that do not fit.
fn parse_one(text: &str, size: u64) -> Option<Range<u64>> {
    let (first, rest) = number(text);
    let (last, rest) = number(rest.strip_prefix('-')?);
    if !rest.is_empty() {
        return None;
    }
    match (first, last) {
        (None, None) => None,
        (None, Some(len)) => Some(size - len.min(size)..size),
        (Some(first), Some(last)) if first > last => None,
        (Some(first), last) => {
            let end = last.map_or(size, |last| last.saturating_add(1).min(size));
            Some(first.min(end)..end)
        }
    }
}

/// Ranges of an object of `size` bytes, in the order asked for.
fn parse(text: &str, size: u64) -> Wanted {
    let Some(list) = text.strip_prefix("bytes=") else { return Wanted::Everything };
    let mut ranges = Vec::new();
    for one in list.split(',').map(str::trim).filter(|one| !one.is_empty()) {
        let Some(range) = parse_one(one, size) else { return Wanted::Everything };
        if !range.is_empty() {
            ranges.push(range);
        }
    }
    // Overlapping ranges could make an answer many times the object's size.
    let bytes = ranges.iter().fold(0u64, |bytes, range| bytes.saturating_add(range.end - range.start));
    if list.split(',').count() > RANGES_MAX || bytes > size {
        return Wanted::Everything;
    }
    if ranges.is_empty() { Wanted::Nothing } else { Wanted::Ranges(ranges) }
}

/// Whether the protocol library can serve the range.
fn is_single(value: &HeaderValue) -> bool {
    value.to_str().is_ok_and(|text| s3s::dto::Range::parse(text).is_ok())
}

#[async_trait]
impl S3Route for RangeRoute {
    fn is_match(&self, method: &Method, uri: &Uri, headers: &HeaderMap, _: &mut Extensions) -> bool {
        // Requests for something other than the object's bytes have a query.
        let is_plain = uri.query().is_none_or(screen::is_plain);
        let has_key = || self.names.split(uri, headers).is_some_and(|(_, key)| !key.is_empty());
        let is_other = || headers.get(header::RANGE).is_some_and(|value| !is_single(value));
        method == Method::GET && is_plain && is_other() && has_key()
    }

    async fn check_access(&self, request: &mut S3Request<Body>) -> S3Result<()> {
        let context = context(&request.extensions)?;
        let (bucket, key) = self.split(&request.uri, &request.headers)?;
        let question = Question {
            operation: "GetObject",
            action: "s3:GetObject",
            bucket: Some(&bucket),
            key: Some(&key),
            uri: &request.uri,
            headers: &request.headers,
        };
        let access_key = request.credentials.as_ref().map(|credentials| credentials.access_key.as_str());
        self.core.authorize(&context, &question, access_key, "GetObject").await
    }

    async fn call(&self, request: S3Request<Body>) -> S3Result<S3Response<Body>> {
        let asked = Authorized::of(&request.extensions)?;
        let (_, key) = self.split(&request.uri, &request.headers)?;
        let text = request.headers.get(header::RANGE).and_then(|value| value.to_str().ok());
        let source = open(&self.core, &asked, &key, conditions(&request.headers)?, true).await;
        let bucket = asked.bucket()?;
        let source = source.map_err(|error| self.core.conceal(&asked.context, bucket, error))?;
        let info = source.info();
        let text = text.filter(|_| wants_range(&request.headers, info));
        match parse(text.unwrap_or_default(), info.size) {
            Wanted::Everything => {
                let body = source.body(&self.core, 0..info.size).await;
                let body = body.map_err(|error| object_error(error.into()))?;
                Ok(respond(info, StatusCode::OK, content_type(info), info.size, body))
            }
            Wanted::Nothing => Err(unsatisfiable(info)),
            Wanted::Ranges(ranges) => match ranges.as_slice() {
                [range] => self.send_one(&source, range.clone()).await,
                _ => Ok(self.send(&source, ranges)),
            },
        }
    }
}

fn content_type(info: &ObjectInfo) -> &str {
    info.meta.headers.content_type.as_deref().unwrap_or(DEFAULT_TYPE)
}

/// Parses conditions as the protocol library does.
fn conditions(headers: &HeaderMap) -> S3Result<client::object::Conditions> {
    let invalid = |name: &HeaderName| s3_error!(InvalidArgument, "Invalid header: {name}");
    let etag = |name: HeaderName| {
        let value = headers.get(&name)?;
        Some(ETagCondition::parse_http_header(value.as_bytes()).map_err(|_| invalid(&name)))
    };
    let time = |name: HeaderName| {
        let text = headers.get(&name)?.to_str().unwrap_or_default();
        Some(Timestamp::parse(TimestampFormat::HttpDate, text).map_err(|_| invalid(&name)))
    };
    Ok(read_conditions(
        etag(header::IF_MATCH).transpose()?.as_ref(),
        etag(header::IF_NONE_MATCH).transpose()?.as_ref(),
        time(header::IF_MODIFIED_SINCE).transpose()?.as_ref(),
        time(header::IF_UNMODIFIED_SINCE).transpose()?.as_ref(),
    ))
}

fn respond(
    info: &ObjectInfo,
    status: StatusCode,
    content_type: &str,
    length: u64,
    body: Body,
) -> S3Response<Body> {
    let mut headers = HeaderMap::new();
    let mut set = |name: HeaderName, text: &str| {
        if let Ok(value) = HeaderValue::from_str(text) {
            headers.insert(name, value);
        }
    };
    set(header::CONTENT_TYPE, content_type);
    set(header::CONTENT_LENGTH, &length.to_string());
    set(header::ETAG, &format!("\"{}\"", info.etag));
    set(header::ACCEPT_RANGES, "bytes");
    if let Some(date) = http_date(&timestamp(info.attr.mtime_ns)) {
        set(header::LAST_MODIFIED, &date);
    }
    let kept = &info.meta.headers;
    for (name, value) in [
        (header::CONTENT_ENCODING, &kept.content_encoding),
        (header::CONTENT_DISPOSITION, &kept.content_disposition),
        (header::CONTENT_LANGUAGE, &kept.content_language),
        (header::CACHE_CONTROL, &kept.cache_control),
        (header::EXPIRES, &kept.expires),
    ] {
        if let Some(text) = value {
            set(name, text);
        }
    }
    for (name, value) in &info.meta.user {
        if let Ok(name) = HeaderName::try_from(format!("x-amz-meta-{name}")) {
            set(name, value);
        }
    }
    let mut response = S3Response::with_headers(body, headers);
    response.status = Some(status);
    response
}

impl RangeRoute {
    fn split(&self, uri: &Uri, headers: &HeaderMap) -> S3Result<(String, String)> {
        self.names.split(uri, headers).ok_or_else(|| s3_error!(InvalidURI))
    }

    /// Sends a single range without parts.
    async fn send_one(&self, source: &Source, range: Range<u64>) -> S3Result<S3Response<Body>> {
        let info = source.info();
        let told = format!("bytes {}-{}/{}", range.start, range.end - 1, info.size);
        let body = source.body(&self.core, range.clone()).await;
        let body = body.map_err(|error| object_error(error.into()))?;
        let length = range.end - range.start;
        let mut response = respond(info, StatusCode::PARTIAL_CONTENT, content_type(info), length, body);
        let told = HeaderValue::from_str(&told).expect("digits are valid");
        response.headers.insert(header::CONTENT_RANGE, told);
        Ok(response)
    }

    fn send(&self, source: &Source, ranges: Vec<Range<u64>>) -> S3Response<Body> {
        let info = source.info();
        let boundary =
            format!("{:016x}{:016x}", self.core.env.random.next_u64(), self.core.env.random.next_u64());
        let head = |at: usize, range: &Range<u64>| {
            let start = if at == 0 { "" } else { "\r\n" };
            let (kind, last) = (content_type(info), range.end - 1);
            Bytes::from(format!(
                "{start}--{boundary}\r\nContent-Type: {kind}\r\nContent-Range: bytes {}-{last}/{}\r\n\r\n",
                range.start, info.size
            ))
        };
        let heads: Vec<(Bytes, u64)> =
            ranges.iter().enumerate().map(|(at, range)| (head(at, range), range.end - range.start)).collect();
        let tail = Bytes::from(format!("\r\n--{boundary}--\r\n"));
        let length = heads.iter().map(|(head, len)| head.len() as u64 + len).sum::<u64>() + tail.len() as u64;
        let parts = Parts {
            heads: heads.into_iter().collect(),
            tail: Some(tail),
            left: 0,
            held: Bytes::new(),
            bytes: source.stream(&self.core, ranges),
            length,
        };
        let kind = format!("multipart/byteranges; boundary={boundary}");
        let body = Body::from(StreamingBlob::new(parts));
        respond(info, StatusCode::PARTIAL_CONTENT, &kind, length, body)
    }
}

/// The stream of ranges, with a head before each.
struct Parts {
    heads: std::collections::VecDeque<(Bytes, u64)>,
    tail: Option<Bytes>,
    /// Bytes of the current range that are to come.
    left: u64,
    /// Bytes of the object beyond the current range.
    held: Bytes,
    bytes: ObjectStream,
    length: u64,
}

impl Stream for Parts {
    type Item = Result<Bytes, StdError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.left == 0 {
            let next = match this.heads.pop_front() {
                Some((head, len)) => {
                    this.left = len;
                    Some(head)
                }
                None => this.tail.take(),
            };
            return Poll::Ready(next.map(Ok));
        }
        if this.held.is_empty() {
            match std::task::ready!(Pin::new(&mut this.bytes).poll_next(context)) {
                Some(Ok(bytes)) => this.held = bytes,
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(Some(Err("object ended early".into()))),
            }
        }
        let len = this.left.min(this.held.len() as u64);
        this.left -= len;
        Poll::Ready(Some(Ok(this.held.split_to(len as usize))))
    }
}

impl ByteStream for Parts {
    fn remaining_length(&self) -> RemainingLength {
        RemainingLength::new_exact(self.length as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Wanted) {
        assert_eq!(parse(text, 100), expected);
    }

    fn ranges<const N: usize>(bounds: [(u64, u64); N]) -> Wanted {
        Wanted::Ranges(bounds.into_iter().map(|(from, to)| from..to).collect())
    }

    #[test]
    fn ranges_are_cut_to_the_object() {
        check("bytes=0-9,90-200", ranges([(0, 10), (90, 100)]));
        check("bytes=-5, 7-7", ranges([(95, 100), (7, 8)]));
        check("bytes=50-", ranges([(50, 100)]));
        check("bytes=0-1,200-300", ranges([(0, 2)]));
        check("bytes=100-,200-300", Wanted::Nothing);
    }

    #[test]
    fn numbers_that_do_not_fit_are_beyond_the_object() {
        let huge = "9".repeat(30);
        check(&format!("bytes={huge}-"), Wanted::Nothing);
        check(&format!("bytes={huge}-{huge}1"), Wanted::Nothing);
        check("bytes=18446744073709551615-", Wanted::Nothing);
        check(&format!("bytes=5-{huge}"), ranges([(5, 100)]));
        check(&format!("bytes=-{huge}"), ranges([(0, 100)]));
        check(&format!("bytes=0-1,{huge}-"), ranges([(0, 2)]));
        check("bytes=-0", Wanted::Nothing);
        check("bytes=-", Wanted::Everything);
        check("bytes=1-2x", Wanted::Everything);
    }

    #[test]
    fn an_answer_is_no_longer_than_the_object() {
        check("bytes=0-49,50-99", ranges([(0, 50), (50, 100)]));
        check("bytes=0-49,50-99,0-0", Wanted::Everything);
        check("bytes=0-,0-,0-", Wanted::Everything);
    }

    #[test]
    fn what_is_no_range_is_ignored() {
        check("bytes=9-5", Wanted::Everything);
        check("bytes=a-b,1-2", Wanted::Everything);
        check("lines=1-2", Wanted::Everything);
        check(&format!("bytes={}", "0-0,".repeat(300)), Wanted::Everything);
    }
}
