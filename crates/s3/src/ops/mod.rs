//! The S3 operations, and helpers that they share.

pub(crate) mod acl;
pub(crate) mod buckets;
pub(crate) mod canned;
pub(crate) mod checksum;
pub(crate) mod copy;
pub(crate) mod delete;
pub(crate) mod get;
pub(crate) mod listing;
pub(crate) mod multipart;
pub(crate) mod probes;
pub(crate) mod put;
pub(crate) mod settings;
pub(crate) mod tags;

use std::sync::Arc;

use base::Ino;
use bytes::Bytes;
use client::object::{Caller, Conditions, EtagMatch, ObjectInfo, ObjectName};
use hyper::header::{self, HeaderMap};
use hyper::http::Extensions;
use s3s::dto::{ETag, ETagCondition, Timestamp, TimestampFormat};
use s3s::{S3Result, s3_error};

use crate::access::context;
use crate::bucket::Bucket;
use crate::error::key_error;
use crate::gate::RequestContext;
use crate::identity::Identity;
use crate::key::ObjectKey;

/// The sender of a request and its bucket, after authorization.
pub(crate) struct Authorized {
    pub(crate) context: Arc<RequestContext>,
}

impl Authorized {
    pub(crate) fn of(extensions: &Extensions) -> S3Result<Self> {
        let context = context(extensions)?;
        match context.requester.get() {
            Some(_) => Ok(Self { context }),
            None => Err(s3_error!(AccessDenied)),
        }
    }

    pub(crate) fn caller(&self) -> Caller {
        self.context.requester.get().expect("checked when this was made").caller()
    }

    /// The sender; `None` without a signature.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.context.requester.get()?.identity.as_ref()
    }

    /// Name of the sender.
    pub(crate) fn user(&self) -> String {
        self.identity().map(|identity| identity.user.name.to_string()).unwrap_or_default()
    }

    /// Whether the request has no signature.
    pub(crate) fn is_anonymous(&self) -> bool {
        self.identity().is_none()
    }

    pub(crate) fn bucket(&self) -> S3Result<&Arc<Bucket>> {
        let requester = self.context.requester.get().expect("checked when this was made");
        requester.bucket.as_ref().ok_or_else(|| s3_error!(NoSuchBucket))
    }

    /// An object in the bucket.
    pub(crate) fn name(&self, key: &str) -> S3Result<ObjectName> {
        object_name(self.bucket()?.ino, key)
    }
}

/// The object of a key.
pub(crate) fn object_name(bucket: Ino, key: &str) -> S3Result<ObjectName> {
    let parsed = ObjectKey::parse(key).map_err(key_error)?;
    let whole = Bytes::copy_from_slice(key.as_bytes());
    let part = |part: &str| whole.slice_ref(&whole[offset(key, part)..offset(key, part) + part.len()]);
    let mut parts: Vec<Bytes> = parsed.parents().map(part).collect();
    parts.push(part(parsed.name()));
    Ok(ObjectName { bucket, parts, directory: parsed.is_directory() })
}

/// Offset of a part of a text.
fn offset(whole: &str, part: &str) -> usize {
    part.as_ptr() as usize - whole.as_ptr() as usize
}

fn etags(condition: Option<&ETagCondition>) -> Option<EtagMatch> {
    Some(match condition? {
        ETagCondition::Any => EtagMatch::Any,
        ETagCondition::ETag(etag) => EtagMatch::List(listed(etag.value())),
    })
}

/// The ETags of a list. The protocol library parses `"a", "b"` as the single ETag `a", "b`; no ETag has quotes in it.
fn listed(value: &str) -> Vec<String> {
    let parts: Vec<&str> = value.split('"').collect();
    let is_comma = |between: &str| matches!(between.trim().strip_suffix("W/").unwrap_or(between).trim(), ",");
    match parts.iter().skip(1).step_by(2).all(|between| is_comma(between)) {
        true => parts.into_iter().step_by(2).map(str::to_owned).collect(),
        false => vec![value.to_owned()],
    }
}

/// Whether the ranges of a request apply to the object as it is: `If-Range` names the version that the client has a
/// part of.
pub(crate) fn wants_range(headers: &HeaderMap, info: &ObjectInfo) -> bool {
    let Some(value) = headers.get(header::IF_RANGE) else { return true };
    let text = value.to_str().unwrap_or_default();
    match Timestamp::parse(TimestampFormat::HttpDate, text) {
        Ok(at) => at == timestamp(info.attr.mtime_ns),
        // A weak ETag never matches.
        Err(_) => text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text) == info.etag,
    }
}

/// Conditions of a reader.
pub(crate) fn read_conditions(
    if_match: Option<&ETagCondition>,
    if_none_match: Option<&ETagCondition>,
    if_modified_since: Option<&Timestamp>,
    if_unmodified_since: Option<&Timestamp>,
) -> Conditions {
    Conditions {
        if_match: etags(if_match),
        if_none_match: etags(if_none_match),
        if_modified_since_ns: if_modified_since.map(nanoseconds),
        if_unmodified_since_ns: if_unmodified_since.map(nanoseconds),
        ..Conditions::default()
    }
}

/// Conditions of a writer.
pub(crate) fn write_conditions(
    if_match: Option<&ETagCondition>,
    if_none_match: Option<&ETagCondition>,
) -> Conditions {
    Conditions { if_match: etags(if_match), if_none_match: etags(if_none_match), ..Conditions::default() }
}

/// Nanoseconds since 1970.
pub(crate) fn nanoseconds(timestamp: &Timestamp) -> i64 {
    let time = time::OffsetDateTime::from(timestamp.clone());
    i64::try_from(time.unix_timestamp_nanos()).unwrap_or(i64::MAX)
}

/// A time in whole seconds, as in HTTP.
pub(crate) fn timestamp(ns: i64) -> Timestamp {
    let time = time::OffsetDateTime::from_unix_timestamp(ns.div_euclid(1_000_000_000));
    Timestamp::from(time.unwrap_or(time::OffsetDateTime::UNIX_EPOCH))
}

/// A date as HTTP writes it.
pub(crate) fn http_date(timestamp: &Timestamp) -> Option<String> {
    let mut text = Vec::new();
    timestamp.format(TimestampFormat::HttpDate, &mut text).ok()?;
    String::from_utf8(text).ok()
}

pub(crate) fn strong(etag: impl Into<String>) -> ETag {
    ETag::Strong(etag.into())
}

/// Refuses every version but `null`: objects have no versions.
pub(crate) fn check_version(version: Option<&str>) -> S3Result<()> {
    match version {
        None | Some("null") => Ok(()),
        Some(_) => Err(s3_error!(
            NoSuchVersion,
            "The specified version does not exist: versioning is not implemented."
        )),
    }
}

/// Refuses headers that ask for a feature that is not supported.
pub(crate) fn refuse_unsupported(asked: &[(&str, bool)]) -> S3Result<()> {
    match asked.iter().find(|(_, is_asked)| *is_asked) {
        Some((what, _)) => Err(s3_error!(NotImplemented, "{what} is not implemented.")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_listed(header: &str, expected: &[&str]) {
        let condition = ETagCondition::parse_http_header(header.as_bytes()).unwrap();
        let expected = expected.iter().map(|etag| (*etag).to_owned()).collect();
        assert_eq!(etags(Some(&condition)), Some(EtagMatch::List(expected)), "{header}");
    }

    #[test]
    fn conditions_take_lists_of_etags() {
        check_listed("\"a\"", &["a"]);
        check_listed("a", &["a"]);
        check_listed("\"a\", \"b-2\",\"c\"", &["a", "b-2", "c"]);
        check_listed("W/\"a\", W/\"b\"", &["a", "b"]);
        check_listed("\"a\" \"b\"", &["a\" \"b"]);
    }

    #[test]
    fn keys_become_names() {
        let name = object_name(Ino(7), "a/größe/c/").unwrap();
        assert_eq!(name.parts, ["a", "größe", "c"]);
        assert!(name.directory);
        assert_eq!(name.key(), "a/größe/c/".as_bytes());
        assert!(object_name(Ino(7), "a//b").is_err());
    }
}
