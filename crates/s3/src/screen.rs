//! What the protocol library lets pass and must not: parameters that name another operation, headers that nobody
//! signed, old signatures.

use std::borrow::Cow;

use hyper::Uri;
use hyper::header::{self, HeaderMap};
use s3s::dto::{Timestamp, TimestampFormat};
use s3s::{S3Result, s3_error};

use crate::access::parameter;

/// Query parameters that make another operation of a request. Where they fit no operation, the library takes the one
/// without them: a PUT of a retention would replace the object.
const SUBRESOURCES: &[&str] = &[
    "abac",
    "accelerate",
    "acl",
    "analytics",
    "append",
    "attributes",
    "cors",
    "delete",
    "encryption",
    "intelligent-tiering",
    "inventory",
    "legal-hold",
    "lifecycle",
    "location",
    "logging",
    "metadataConfiguration",
    "metadataInventoryTable",
    "metadataJournalTable",
    "metadataTable",
    "metrics",
    "notification",
    "object-lock",
    "ownershipControls",
    "policy",
    "policyStatus",
    "publicAccessBlock",
    "renameObject",
    "replication",
    "requestPayment",
    "restore",
    "retention",
    "select",
    "session",
    "tagging",
    "torrent",
    "uploadId",
    "uploads",
    "versioning",
    "versions",
    "website",
];

/// Parameters of signatures, some of which have headers for parameters, and of programs that name the operation.
const ANYWHERE: &[&str] = &["x-id", "AWSAccessKeyId", "Signature", "Expires", "content-type", "content-md5"];

/// Headers of a signature that are part of what is signed in another way.
const SIGNED_OTHERWISE: &[&str] = &["x-amz-content-sha256", "x-amz-date"];

/// How far the clock of a client may be off.
const SKEW_S: i64 = 15 * 60;

/// The parameters that belong to an operation, of those that change something: all. Of the others: subresources.
fn own_parameters(operation: &str) -> &'static [&'static str] {
    match operation {
        "AbortMultipartUpload" | "CompleteMultipartUpload" | "ListParts" => &["uploadId"],
        "CreateMultipartUpload" | "ListMultipartUploads" => &["uploads"],
        "UploadPart" | "UploadPartCopy" => &["partNumber", "uploadId"],
        "DeleteBucketCors" | "GetBucketCors" | "PutBucketCors" => &["cors"],
        "DeleteBucketPolicy" | "GetBucketPolicy" | "PutBucketPolicy" => &["policy"],
        "DeleteBucketTagging" | "GetBucketTagging" | "PutBucketTagging" => &["tagging"],
        "DeleteObjectTagging" | "GetObjectTagging" | "PutObjectTagging" => &["tagging", "versionId"],
        "GetBucketAcl" | "PutBucketAcl" => &["acl"],
        "GetObjectAcl" | "PutObjectAcl" => &["acl", "versionId"],
        "GetBucketLocation" => &["location"],
        "GetBucketVersioning" => &["versioning"],
        "GetObjectAttributes" => &["attributes"],
        "DeleteObject" => &["versionId"],
        "DeleteObjects" => &["delete"],
        _ => &[],
    }
}

/// Whether an operation only reads; then it ignores parameters that nobody knows, as AWS does.
fn reads(operation: &str) -> bool {
    ["Get", "Head", "List"].iter().any(|verb| operation.starts_with(verb))
}

/// Refuses parameters that the operation does not have.
pub(crate) fn check_parameters(operation: &str, uri: &Uri) -> S3Result<()> {
    let own = own_parameters(operation);
    for pair in uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let name = pair.split_once('=').map_or(pair, |(name, _)| name);
        let name = urlencoding::decode(name).unwrap_or(Cow::Borrowed(name));
        let is_amz = name.get(..6).is_some_and(|start| start.eq_ignore_ascii_case("x-amz-"));
        let fits_anywhere = ANYWHERE.iter().any(|known| known.eq_ignore_ascii_case(&name));
        if is_amz || fits_anywhere || own.contains(&name.as_ref()) {
            continue;
        }
        if !reads(operation) || SUBRESOURCES.contains(&name.as_ref()) {
            return Err(s3_error!(
                NotImplemented,
                "{operation} with the parameter {name} is not implemented."
            ));
        }
    }
    Ok(())
}

/// Refuses `x-amz-` headers that a signature of version 4 does not cover: whoever sees a signed request could add
/// some, and make a copy of a put.
pub(crate) fn check_signed_headers(uri: &Uri, headers: &HeaderMap) -> S3Result<()> {
    let authorization = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let signed = match authorization {
        Some(text) if text.starts_with("AWS4-") => text
            .split(['=', ',', ' '])
            .skip_while(|part| *part != "SignedHeaders")
            .nth(1)
            .unwrap_or_default()
            .to_owned(),
        Some(_) => return Ok(()),
        None => match parameter(uri.query().unwrap_or_default(), "X-Amz-SignedHeaders") {
            Some(signed) => signed,
            None => return Ok(()),
        },
    };
    let is_signed = |name: &str| signed.split(';').any(|signed| signed.eq_ignore_ascii_case(name));
    let mut names = headers.keys().map(|name| name.as_str()).filter(|name| name.starts_with("x-amz-"));
    match names.find(|name| !SIGNED_OTHERWISE.contains(name) && !is_signed(name)) {
        Some(name) => Err(s3_error!(
            AccessDenied,
            "There were headers present in the request which were not signed: {name}."
        )),
        None => Ok(()),
    }
}

/// Refuses a signature of version 2 that was made long ago: one in a header has no end of its own.
pub(crate) fn check_date(headers: &HeaderMap, now_s: i64) -> S3Result<()> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    if !text("authorization").is_some_and(|value| value.starts_with("AWS ")) {
        return Ok(());
    }
    let date = text("x-amz-date").or_else(|| text("date")).unwrap_or_default();
    let at = Timestamp::parse(TimestampFormat::HttpDate, date).ok();
    let at_s = at.map(|at| time::OffsetDateTime::from(at).unix_timestamp());
    match at_s.is_some_and(|at_s| (at_s - now_s).abs() <= SKEW_S) {
        true => Ok(()),
        false => Err(s3_error!(
            RequestTimeTooSkewed,
            "The difference between the request time and the current time is too large."
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(operation: &str, query: &str, fits: bool) {
        let uri = format!("/b/k?{query}").parse().unwrap();
        assert_eq!(check_parameters(operation, &uri).is_ok(), fits, "{operation} {query}");
    }

    #[test]
    fn parameters_of_other_operations_are_refused() {
        for name in ["restore", "retention", "policy", "uploadId=x", "partNumber=1", "foo", "enc%72yption"] {
            check("PutObject", name, false);
            check("DeleteBucket", name, false);
        }
        check("PutObject", "x-id=PutObject&X-Amz-Signature=1&x-amz-security-token=t&Expires=1", true);
        check("UploadPart", "partNumber=1&uploadId=x", true);
        check("DeleteObject", "versionId=null", true);
        check("GetObject", "versionId=null&response-content-type=a&cache-buster=1", true);
        check("ListObjectsV2", "list-type=2&prefix=a&abac", false);
        check("GetObject", "torrent", false);
        check("PutObject", "", true);
    }

    #[test]
    fn a_signature_must_cover_headers() {
        let uri: Uri = "/b/k".parse().unwrap();
        let mut headers = HeaderMap::new();
        let authorization =
            "AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders=host;x-amz-date;x-amz-meta-a, Signature=0";
        headers.insert(header::AUTHORIZATION, authorization.parse().unwrap());
        headers.insert("x-amz-date", "now".parse().unwrap());
        headers.insert("x-amz-content-sha256", "0".parse().unwrap());
        headers.insert("x-amz-meta-a", "1".parse().unwrap());
        assert!(check_signed_headers(&uri, &headers).is_ok());
        headers.insert("x-amz-copy-source", "secret/key".parse().unwrap());
        assert!(check_signed_headers(&uri, &headers).is_err());
        headers.remove(header::AUTHORIZATION);
        assert!(check_signed_headers(&uri, &headers).is_ok(), "nothing is signed");
        let presigned = |signed: &str| format!("/b/k?X-Amz-SignedHeaders={signed}").parse().unwrap();
        headers.remove("x-amz-meta-a");
        assert!(check_signed_headers(&presigned("host"), &headers).is_err());
        assert!(check_signed_headers(&presigned("host%3Bx-amz-copy-source"), &headers).is_ok());
    }

    #[test]
    fn an_old_signature_of_version_2_is_refused() {
        let mut headers = HeaderMap::new();
        headers.insert("authorization", "AWS a:b".parse().unwrap());
        assert!(check_date(&headers, 0).is_err());
        headers.insert("date", "Thu, 01 Nov 2001 00:00:00 GMT".parse().unwrap());
        let at_s = 1_004_572_800;
        assert!(check_date(&headers, at_s + 899).is_ok());
        assert!(check_date(&headers, at_s + 901).is_err());
        headers.insert("date", "yesterday".parse().unwrap());
        assert!(check_date(&headers, at_s).is_err());
    }
}
