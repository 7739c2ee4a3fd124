//! Interprets the answers of a store.

use std::error::Error;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use hyper::StatusCode;
use reqwest::Response;
use wire::store::{NO_BUCKET, StoreError};

/// The most bytes that are read of an error document.
const ERROR_BYTES_MAX: usize = 16 << 10;
/// The longest object that is read whole.
const WHOLE_BYTES_MAX: u64 = 64 << 20;
/// The error code for a missing right of the key, as opposed to a wrong key.
const NO_RIGHT: &str = "AccessDenied";
/// Parts of error codes that mean a lack of room: each store has its own.
const NO_ROOM: [&str; 3] = ["Quota", "StorageFull", "InsufficientStorage"];

/// The error for a request without an answer, with the innermost cause, which people know.
pub(super) fn of_connection(error: &reqwest::Error) -> StoreError {
    let mut texts = vec![error.to_string()];
    let mut source = error.source();
    while let Some(cause) = source {
        texts.push(cause.to_string());
        source = cause.source();
    }
    // The outermost text repeats the whole URL, the innermost is the reason.
    let reason = texts.pop().unwrap_or_default();
    match error.is_connect() {
        true => StoreError::Unavailable(format!("cannot connect: {reason}")),
        false => StoreError::Unavailable(reason),
    }
}

/// The body of an answer, if it is the requested one.
pub(super) async fn body(answer: Response, range: Option<&Range<u64>>) -> Result<Bytes, StoreError> {
    let status = answer.status();
    if !status.is_success() {
        let text = read(answer, ERROR_BYTES_MAX).await.unwrap_or_default();
        return Err(of_status(status, &String::from_utf8_lossy(&text)));
    }
    let Some(range) = range else {
        return read(answer, WHOLE_BYTES_MAX as usize).await;
    };
    if status != StatusCode::PARTIAL_CONTENT {
        let text = format!("a range was asked for, and status {status} came back");
        return Err(StoreError::Unexpected(text));
    }
    let wanted = range.end - range.start;
    let part = answer.headers().get(reqwest::header::CONTENT_RANGE);
    let total = part.and_then(|part| part.to_str().ok()).and_then(total_bytes);
    let bytes = read(answer, wanted.min(WHOLE_BYTES_MAX) as usize).await?;
    if let Some(total) = total.filter(|total| *total < range.end && bytes.len() as u64 != wanted) {
        return Err(StoreError::TooShort(format!("it has {total} bytes, {} were asked for", range.end)));
    }
    if bytes.len() as u64 != wanted {
        return Err(StoreError::Unavailable(format!("{} of {wanted} bytes came back", bytes.len())));
    }
    Ok(bytes)
}

/// The length of the whole object, from an answer with a part of it: `bytes 0-99/1234`.
fn total_bytes(range: &str) -> Option<u64> {
    range.rsplit_once('/')?.1.parse().ok()
}

/// Reads a body of at most `most` bytes.
async fn read(mut answer: Response, most: usize) -> Result<Bytes, StoreError> {
    let expected = answer.content_length();
    let mut bytes = BytesMut::with_capacity(expected.unwrap_or(0).min(most as u64) as usize);
    while let Some(part) = answer.chunk().await.map_err(|error| of_connection(&error))? {
        if bytes.len() + part.len() > most {
            return Err(StoreError::Unexpected(format!("more than {most} bytes came back")));
        }
        bytes.extend_from_slice(&part);
    }
    Ok(bytes.freeze())
}

/// The error for a status, with the store's own code and message.
fn of_status(status: StatusCode, document: &str) -> StoreError {
    let code = element(document, "Code").unwrap_or_default();
    let message = element(document, "Message").unwrap_or_default();
    let number = status.as_u16();
    let text = match (code.is_empty(), message.is_empty()) {
        (true, _) => format!("status {number}"),
        (false, true) => format!("status {number}, {code}"),
        (false, false) => format!("status {number}, {code}: {message}"),
    };
    match (number, code) {
        (_, "SlowDown" | "RequestTimeout" | "ServiceUnavailable") | (429, _) => StoreError::Busy(text),
        (507, _) => StoreError::Full(text),
        (_, code) if NO_ROOM.iter().any(|part| code.contains(part)) => StoreError::Full(text),
        (404, _) => StoreError::NotFound(text),
        (416, _) => StoreError::TooShort(text),
        (400..=499, _) => StoreError::Denied(text),
        (500..=599, _) => StoreError::Unavailable(text),
        _ => StoreError::Unexpected(text),
    }
}

/// The text of the first element with this name.
fn element<'a>(document: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = document.split_once(&format!("<{name}>"))?;
    rest.split_once("</").map(|(text, _)| text.trim())
}

/// Whether an error text is about a missing bucket.
pub(super) fn is_about_bucket(text: &str) -> bool {
    text.contains(NO_BUCKET)
}

/// Whether an error text is about a missing right of the key.
pub(super) fn is_about_rights(text: &str) -> bool {
    text.contains(NO_RIGHT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(status: u16, code: &str, expected: fn(String) -> StoreError) {
        let document = format!("<?xml?><Error><Code>{code}</Code><Message>why</Message></Error>");
        let status = StatusCode::from_u16(status).expect("a status");
        let text = format!("status {}, {code}: why", status.as_u16());
        assert_eq!(of_status(status, &document), expected(text));
    }

    #[test]
    fn the_status_decides_unless_the_code_says_more() {
        check(404, "NoSuchKey", StoreError::NotFound);
        check(416, "InvalidRange", StoreError::TooShort);
        check(403, "SignatureDoesNotMatch", StoreError::Denied);
        check(503, "SlowDown", StoreError::Busy);
        check(400, "RequestTimeout", StoreError::Busy);
        check(429, "TooManyRequests", StoreError::Busy);
        check(507, "InsufficientStorage", StoreError::Full);
        check(403, "QuotaExceeded", StoreError::Full);
        check(507, "XMinioStorageFull", StoreError::Full);
        check(400, "XMinioAdminBucketQuotaExceeded", StoreError::Full);
        check(400, "ExpiredToken", StoreError::Denied);
        check(403, "RequestTimeTooSkewed", StoreError::Denied);
        check(500, "InternalError", StoreError::Unavailable);
        check(302, "Moved", StoreError::Unexpected);
    }

    #[test]
    fn a_part_tells_the_length_of_the_object() {
        assert_eq!(total_bytes("bytes 0-99/1234"), Some(1234));
        assert_eq!(total_bytes("bytes 0-99/*"), None);
        assert_eq!(total_bytes("bytes"), None);
    }

    #[test]
    fn error_documents_of_any_kind_give_a_text() {
        let error = |document: &str| of_status(StatusCode::FORBIDDEN, document);
        assert_eq!(error("<html>no</html>"), StoreError::Denied("status 403".to_owned()));
        assert_eq!(error("<Code>X</Code>"), StoreError::Denied("status 403, X".to_owned()));
        assert_eq!(error("<Code>"), StoreError::Denied("status 403".to_owned()));
    }
}
