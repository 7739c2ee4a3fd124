//! Checks that the protocol library lacks: parameters that name another operation, headers that the signature does not
//! cover, old signatures.

use std::borrow::Cow;

use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, StatusCode, Uri};
use s3s::dto::{Timestamp, TimestampFormat};
use s3s::region::Region;
use s3s::{S3Result, s3_error};

use crate::access::{decoded, parameter};
use crate::answer::BUCKET_REGION;
use crate::error::custom;
use crate::hash;
use crate::ops::buckets::REGION;
use crate::server::FormFields;

/// Query parameters that select another operation. If one fits no operation, the library ignores it and runs the plain
/// operation: a PUT of a retention would replace the object.
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

/// Parameters that every operation may have: those of signatures, those that stand for headers, and `x-id`, in which
/// programs name the operation.
const ANYWHERE: &[&str] = &["x-id", "AWSAccessKeyId", "Signature", "Expires", "content-type", "content-md5"];

const AMZ_DATE: HeaderName = HeaderName::from_static("x-amz-date");

/// Headers that a signature covers in another way than by name.
const SIGNED_OTHERWISE: &[&str] = &["x-amz-content-sha256", "x-amz-date"];

/// Largest difference between the client's clock and this one.
const SKEW_S: i64 = 15 * 60;
/// Longest validity of a URL signed by version 4.
const URL_AGE_S_MAX: u32 = 7 * 24 * 3600;

/// Parameters of an operation. For operations that change something the list is complete; for others it has
/// subresources only.
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
        "GetBucketAccelerateConfiguration" => &["accelerate"],
        "GetBucketEncryption" => &["encryption"],
        "GetBucketLifecycleConfiguration" => &["lifecycle"],
        "GetBucketLogging" => &["logging"],
        "GetBucketNotificationConfiguration" => &["notification"],
        "GetBucketOwnershipControls" => &["ownershipControls"],
        "GetBucketPolicyStatus" => &["policyStatus"],
        "GetBucketReplication" => &["replication"],
        "GetBucketRequestPayment" => &["requestPayment"],
        "GetBucketWebsite" => &["website"],
        "GetObjectLockConfiguration" => &["object-lock"],
        "GetPublicAccessBlock" => &["publicAccessBlock"],
        "ListObjectVersions" => &["versions"],
        "GetObjectAttributes" => &["attributes"],
        "DeleteObject" => &["versionId"],
        "DeleteObjects" => &["delete"],
        _ => &[],
    }
}

/// Whether an operation only reads; then unknown parameters are ignored, as on AWS.
fn reads(operation: &str) -> bool {
    ["Get", "Head", "List"].iter().any(|verb| operation.starts_with(verb))
}

/// Names and values of a query's parameters; the names are decoded.
fn pairs(query: &str) -> impl Iterator<Item = (Cow<'_, str>, &str)> {
    query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (urlencoding::decode(name).unwrap_or(Cow::Borrowed(name)), value)
    })
}

/// Whether every operation may have the parameter: it belongs to the signature, stands for a header or names the
/// operation.
fn fits_anywhere(name: &str) -> bool {
    let is_amz = name.get(..6).is_some_and(|start| start.eq_ignore_ascii_case("x-amz-"));
    is_amz || ANYWHERE.iter().any(|known| known.eq_ignore_ascii_case(name))
}

/// Whether a query has no parameter that selects an operation.
pub(crate) fn is_plain(query: &str) -> bool {
    pairs(query).all(|(name, _)| fits_anywhere(&name))
}

/// Refuses parameters that the operation does not have.
pub(crate) fn check_parameters(operation: &str, uri: &Uri) -> S3Result<()> {
    let own = own_parameters(operation);
    for (name, _) in pairs(uri.query().unwrap_or_default()) {
        if fits_anywhere(&name) || own.contains(&name.as_ref()) {
            continue;
        }
        // The library would run a list of version 1.
        if operation == "ListObjects" && name == "list-type" {
            return Err(s3_error!(InvalidArgument, "Invalid List Type specified in Request: there is 2."));
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

/// Prefixes of headers that ask for encryption, of an object or of the source of a copy.
const ENCRYPTION: [&str; 2] = ["x-amz-server-side-encryption", "x-amz-copy-source-server-side-encryption"];

/// Whether a header, or the field of a form, is about encryption.
pub(crate) fn is_about_encryption(name: &str) -> bool {
    ENCRYPTION
        .iter()
        .any(|start| name.get(..start.len()).is_some_and(|head| head.eq_ignore_ascii_case(start)))
}

/// Refuses every header about encryption: a client that sends one would take the stored object for encrypted.
pub(crate) fn check_encryption(operation: &str, headers: &HeaderMap) -> S3Result<()> {
    match headers.keys().map(HeaderName::as_str).find(|name| is_about_encryption(name)) {
        None => Ok(()),
        Some(name) if reads(operation) => Err(s3_error!(
            InvalidRequest,
            "The encryption parameters are not applicable to this object: it is not encrypted. Header: {name}."
        )),
        Some(name) => Err(s3_error!(NotImplemented, "Server-side encryption is not implemented: {name}.")),
    }
}

/// Refuses a form that has a policy without a signature, and a form whose policy has an expiration that is not ISO
/// 8601; the protocol library accepts other formats.
pub(crate) fn check_form(form: &FormFields) -> S3Result<()> {
    let Some(policy) = &form.policy else { return Ok(()) };
    if !form.is_signed {
        return Err(s3_error!(
            InvalidArgument,
            "Bucket POST must contain a field named 'X-Amz-Signature', or 'Signature'. If it is specified, please check the order of the fields."
        ));
    }
    let policy = hash::unbase64(policy.trim().as_bytes()).unwrap_or_default();
    let policy: serde_json::Value = serde_json::from_slice(&policy).unwrap_or_default();
    match policy["expiration"].as_str() {
        Some(text) if !is_iso_8601(text) => Err(s3_error!(
            InvalidPolicyDocument,
            "Invalid Policy: Invalid 'expiration' value: '{text}' is not like 2026-12-01T12:00:00.000Z."
        )),
        // The library reports other faults.
        _ => Ok(()),
    }
}

/// Whether a time has the format `2026-12-01T12:00:00.000Z`.
fn is_iso_8601(text: &str) -> bool {
    let Some((at, rest)) = text.split_at_checked(19) else { return false };
    let is_time = at.bytes().zip(*b"0000-00-00T00:00:00").all(|(byte, like)| match like {
        b'0' => byte.is_ascii_digit(),
        _ => byte == like,
    });
    let fraction = rest
        .strip_suffix('Z')
        .map(|rest| rest.strip_prefix('.').unwrap_or(if rest.is_empty() { "0" } else { "" }));
    is_time
        && fraction
            .is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Sets `x-amz-date` from the header `Date`. A request signed by version 4 may have `Date` alone; the protocol library
/// needs `x-amz-date`. The signature still matches, because both are the same time.
pub(crate) fn take_date(uri: &Uri, headers: &mut HeaderMap) {
    if headers.contains_key(AMZ_DATE) || !matches!(Signed::of(uri, headers), Ok(Signed::Four(_))) {
        return;
    }
    let text = headers.get(header::DATE).and_then(|value| value.to_str().ok());
    let at_s = text.and_then(|text| amz_date_s(text).or_else(|| mail_date_s(text)));
    let at = at_s.and_then(|at_s| time::OffsetDateTime::from_unix_timestamp(at_s).ok());
    if let Some(at) = at.filter(|at| (0..10_000).contains(&at.year())) {
        let text = format!(
            "{:04}{:02}{:02}T{:02}{:02}{:02}Z",
            at.year(),
            u8::from(at.month()),
            at.day(),
            at.hour(),
            at.minute(),
            at.second()
        );
        headers.insert(AMZ_DATE, HeaderValue::from_str(&text).expect("digits are valid"));
    }
}

/// Refuses a region that the protocol library cannot take, such as `US`, which s3cmd signs with unless it is told another.
/// The answer names the right one, in a header and in its document; clients then sign the request again.
pub(crate) fn check_region(uri: &Uri, headers: &HeaderMap) -> S3Result<()> {
    let in_url = parameter(uri.query().unwrap_or_default(), "X-Amz-Credential");
    let credential = match &in_url {
        Some(credential) => Some(credential.as_str()),
        None => header_credential(headers),
    };
    let region = credential.and_then(|credential| credential.split('/').nth(2)).unwrap_or_default();
    if region.is_empty() || Region::new(region.into()).is_ok() {
        return Ok(());
    }
    let (code, what) = match in_url {
        Some(_) => ("AuthorizationQueryParametersError", "Error parsing the X-Amz-Credential parameter"),
        None => ("AuthorizationHeaderMalformed", "The authorization header is malformed"),
    };
    let message = format!("{what}; the region '{region}' is wrong; expecting '{REGION}'");
    let mut error = custom(code, StatusCode::BAD_REQUEST, message);
    let mut named = HeaderMap::new();
    named.insert(BUCKET_REGION, HeaderValue::from_static(REGION));
    named.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/xml"));
    error.set_headers(named);
    Err(error)
}

/// The credential in an `Authorization` header of version 4.
fn header_credential(headers: &HeaderMap) -> Option<&str> {
    let text = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let mut fields = text.strip_prefix("AWS4-HMAC-SHA256 ")?.split(',');
    fields.find_map(|field| field.trim().strip_prefix("Credential="))
}

/// Where and how a request is signed. A form is signed in its fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Signed {
    Not,
    /// In headers, by version 2.
    Two,
    /// In headers, by version 4; holds the names of the signed headers.
    Four(String),
    /// In the URL, by version 2.
    UrlTwo,
    /// In the URL, by version 4.
    UrlFour(String),
}

impl Signed {
    /// Refuses ambiguous requests: the protocol library does not check the algorithm's name, which is not signed, and
    /// looks at the URL first.
    pub(crate) fn of(uri: &Uri, headers: &HeaderMap) -> S3Result<Self> {
        let query = uri.query().unwrap_or_default();
        let mut header = headers.get_all(header::AUTHORIZATION).iter();
        let found = (
            parameter(query, "X-Amz-Signature").is_some(),
            parameter(query, "Signature").is_some(),
            header.next().map(HeaderValue::to_str),
        );
        match found {
            (false, false, None) => Ok(Self::Not),
            (true, false, None) => {
                Ok(Self::UrlFour(parameter(query, "X-Amz-SignedHeaders").unwrap_or_default()))
            }
            (false, true, None) => Ok(Self::UrlTwo),
            (false, false, Some(Ok(text))) if header.next().is_none() => {
                if text.starts_with("AWS ") {
                    return Ok(Self::Two);
                }
                let Some(rest) = text.strip_prefix("AWS4-HMAC-SHA256 ") else {
                    return Err(s3_error!(
                        InvalidArgument,
                        "Unsupported Authorization Type: AWS4-HMAC-SHA256 and AWS are supported."
                    ));
                };
                let fields = rest.split(',').filter_map(|field| field.trim().split_once('='));
                let signed: Vec<_> = fields.filter(|(name, _)| *name == "SignedHeaders").collect();
                match signed.as_slice() {
                    [(_, signed)] => Ok(Self::Four((*signed).to_owned())),
                    _ => Err(s3_error!(
                        AuthorizationHeaderMalformed,
                        "The authorization header names signed headers once."
                    )),
                }
            }
            _ => Err(s3_error!(
                InvalidArgument,
                "Only one way of signing is allowed: X-Amz-Signature or Signature in the query, or one Authorization header."
            )),
        }
    }

    /// Refuses `x-amz-` headers that a signature of version 4 does not cover: an attacker who sees a signed request
    /// could add some, and turn a put into a copy.
    pub(crate) fn check_headers(&self, uri: &Uri, headers: &HeaderMap) -> S3Result<()> {
        let (signed, query) = match self {
            Self::Four(signed) => (signed, ""),
            // A parameter that stands for a header is signed.
            Self::UrlFour(signed) => (signed, uri.query().unwrap_or_default()),
            _ => return Ok(()),
        };
        let stands = |name: &Cow<'_, str>| !OF_SIGNATURE.iter().any(|own| own.eq_ignore_ascii_case(name));
        let parameters: Vec<_> = pairs(query).map(|(name, _)| name).filter(stands).collect();
        let names = || signed.split(';').chain(parameters.iter().map(AsRef::as_ref));
        let is_signed = |name: &str| names().any(|signed| signed.eq_ignore_ascii_case(name));
        let mut names = headers.keys().map(HeaderName::as_str).filter(|name| name.starts_with("x-amz-"));
        match names.find(|name| !SIGNED_OTHERWISE.contains(name) && !is_signed(name)) {
            Some(name) => Err(s3_error!(
                AccessDenied,
                "There were headers present in the request which were not signed: {name}."
            )),
            None => Ok(()),
        }
    }

    /// Refuses a signature in headers that is too old, and any signature from the future. URLs and forms have an
    /// expiration of their own.
    pub(crate) fn check_date(&self, uri: &Uri, headers: &HeaderMap, now_s: i64) -> S3Result<()> {
        self.check_age(uri)?;
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let (at_s, oldest_s) = match self {
            Self::Four(_) => (text("x-amz-date").and_then(amz_date_s), now_s - SKEW_S),
            Self::Two => {
                let date = text("x-amz-date").or_else(|| text("date")).unwrap_or_default();
                (mail_date_s(date), now_s - SKEW_S)
            }
            Self::UrlFour(_) => {
                let date = parameter(uri.query().unwrap_or_default(), "X-Amz-Date");
                (date.as_deref().and_then(amz_date_s), i64::MIN)
            }
            Self::UrlTwo | Self::Not => return Ok(()),
        };
        match at_s.is_some_and(|at_s| (oldest_s..=now_s + SKEW_S).contains(&at_s)) {
            true => Ok(()),
            false => Err(s3_error!(
                RequestTimeTooSkewed,
                "The difference between the request time and the current time is too large."
            )),
        }
    }

    /// Refuses a URL whose validity exceeds [`URL_AGE_S_MAX`].
    fn check_age(&self, uri: &Uri) -> S3Result<()> {
        let Self::UrlFour(_) = self else { return Ok(()) };
        let age = parameter(uri.query().unwrap_or_default(), "X-Amz-Expires");
        match age.and_then(|text| text.parse::<u32>().ok()).is_some_and(|age_s| age_s <= URL_AGE_S_MAX) {
            true => Ok(()),
            false => Err(custom(
                "AuthorizationQueryParametersError",
                StatusCode::BAD_REQUEST,
                "X-Amz-Expires is a number of seconds and at most 604800, a week.",
            )),
        }
    }
}

/// Seconds since 1970 of `Tue, 24 Nov 2026 14:01:57 GMT`; mail (RFC 2822) writes `+0000` in place of `GMT`.
fn mail_date_s(text: &str) -> Option<i64> {
    let at = time::OffsetDateTime::parse(text, &time::format_description::well_known::Rfc2822);
    let http = || Timestamp::parse(TimestampFormat::HttpDate, text).ok().map(time::OffsetDateTime::from);
    at.ok().or_else(http).map(|at| at.unix_timestamp())
}

/// Seconds since 1970 of `20130524T000000Z`.
fn amz_date_s(text: &str) -> Option<i64> {
    let is_digits = |text: &&str| text.bytes().all(|byte| byte.is_ascii_digit());
    let digits = |range| text.get(range).filter(is_digits)?.parse::<u16>().ok();
    let byte = |range: std::ops::Range<usize>| u8::try_from(digits(range)?).ok();
    let month = time::Month::try_from(byte(4..6)?).ok()?;
    let date = time::Date::from_calendar_date(digits(0..4)?.into(), month, byte(6..8)?).ok()?;
    let time = time::Time::from_hms(byte(9..11)?, byte(11..13)?, byte(13..15)?).ok()?;
    (text.len() == 16).then(|| time::PrimitiveDateTime::new(date, time).assume_utc().unix_timestamp())
}

/// Parameters of a signature of version 4 in a URL; they never stand for headers.
const OF_SIGNATURE: [&str; 7] = [
    "x-amz-algorithm",
    "x-amz-credential",
    "x-amz-date",
    "x-amz-expires",
    "x-amz-security-token",
    "x-amz-signature",
    "x-amz-signedheaders",
];

/// Makes headers of the parameters of a signed URL that stand for headers, because the protocol library ignores them.
/// Version 4: all parameters that headers could carry; they replace headers of these names, which are not signed.
/// Version 2: the token, which is signed as a header.
pub(crate) fn move_signed_parameters(uri: &Uri, headers: &mut HeaderMap) -> S3Result<()> {
    let query = uri.query().unwrap_or_default();
    if parameter(query, "X-Amz-Signature").is_none() {
        move_token(query, headers);
        return Ok(());
    }
    for (name, value) in pairs(query) {
        let name = name.to_ascii_lowercase();
        if !name.starts_with("x-amz-") || OF_SIGNATURE.contains(&name.as_str()) {
            continue;
        }
        let moved =
            HeaderName::try_from(&name).ok().zip(decoded(value).and_then(|value| value.try_into().ok()));
        let Some((name, value)) = moved else {
            return Err(s3_error!(
                InvalidArgument,
                "The parameter {name} stands for a header that cannot be one."
            ));
        };
        headers.insert(name, value);
    }
    Ok(())
}

fn move_token(query: &str, headers: &mut HeaderMap) {
    const TOKEN: &str = "x-amz-security-token";
    if query.contains("Signature=")
        && parameter(query, "AWSAccessKeyId").is_some()
        && let Some(token) = parameter(query, TOKEN)
        && let Ok(token) = token.parse()
    {
        headers.entry(TOKEN).or_insert(token);
    }
}

/// Whether the body of a request is a document and not an object's bytes. `has_key` tells whether the request names a
/// key.
pub(crate) fn brings_document(method: &Method, uri: &Uri, has_key: impl FnOnce() -> bool) -> bool {
    let names = uri.query().unwrap_or_default().split('&');
    let name = |pair: &str| pair.split_once('=').map_or(pair, |(name, _)| name).to_owned();
    match *method {
        Method::POST => true,
        // `uploadId` is the only subresource of a PUT that brings bytes of an object.
        Method::PUT => {
            let mut names = names.map(name);
            names.any(|name| name != "uploadId" && SUBRESOURCES.contains(&name.as_str())) || !has_key()
        }
        _ => false,
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
        check("ListObjects", "list-type=3", false);
        check("ListObjects", "list-type", false);
        check("ListObjects", "prefix=list-type", true);
        check("PutObject", "", true);
    }

    #[test]
    fn no_header_about_encryption_is_ignored() {
        #[track_caller]
        fn check(operation: &str, name: &'static str, code: Option<&str>) {
            let headers =
                HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_static("x"))]);
            let found = check_encryption(operation, &headers);
            assert_eq!(found.as_ref().err().map(|error| error.code().as_str()), code, "{operation} {name}");
        }
        for rest in
            ["", "-customer-algorithm", "-customer-key", "-customer-key-md5", "-aws-kms-key-id", "-context"]
        {
            let name = format!("x-amz-server-side-encryption{rest}").leak();
            check("PutObject", name, Some("NotImplemented"));
            check("GetObject", name, Some("InvalidRequest"));
            check("HeadObject", name, Some("InvalidRequest"));
        }
        check(
            "CreateMultipartUpload",
            "x-amz-server-side-encryption-bucket-key-enabled",
            Some("NotImplemented"),
        );
        check("CopyObject", "x-amz-copy-source-server-side-encryption-customer-key", Some("NotImplemented"));
        check("PutObject", "x-amz-storage-class", None);
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
        let check = |uri: &Uri, headers: &HeaderMap| {
            Signed::of(uri, headers).and_then(|signed| signed.check_headers(uri, headers)).is_ok()
        };
        assert!(check(&uri, &headers));
        headers.insert("x-amz-copy-source", "secret/key".parse().unwrap());
        assert!(!check(&uri, &headers));
        headers.remove(header::AUTHORIZATION);
        assert!(check(&uri, &headers), "nothing is signed");
        let presigned =
            |signed: &str| format!("/b/k?X-Amz-Signature=0&X-Amz-SignedHeaders={signed}").parse().unwrap();
        headers.remove("x-amz-meta-a");
        assert!(!check(&presigned("host"), &headers));
        assert!(check(&presigned("host%3Bx-amz-copy-source"), &headers));
        assert!(check(&presigned("host&X-Amz-Copy%2DSource=secret%2Fkey"), &headers));
        headers.insert("x-amz-security-token", "other".parse().unwrap());
        assert!(!check(&presigned("host&X-Amz-Copy-Source=k&X-Amz-Security-Token=own"), &headers));
    }

    #[test]
    fn parameters_of_a_signed_url_stand_for_headers() {
        let mut headers = HeaderMap::new();
        headers.insert("x-amz-acl", "public-read".parse().unwrap());
        let query =
            "X-Amz-Signature=0&X-Amz-Date=1&x-amz-meta-a=b%20c&x-id=PutObject&X-Amz-Acl=private&versionId=1";
        let uri: Uri = format!("/b/k?{query}").parse().unwrap();
        move_signed_parameters(&uri, &mut headers).unwrap();
        let mut found: Vec<_> =
            headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        found.sort_unstable();
        assert_eq!(found, [("x-amz-acl", &b"private"[..]), ("x-amz-meta-a", b"b c")]);
        let uri: Uri = "/b/k?X-Amz-Signature=0&x-amz-meta-a=%0D%0A".parse().unwrap();
        assert!(move_signed_parameters(&uri, &mut headers).is_err());
        let (uri, mut headers): (Uri, _) = ("/b/k?x-amz-meta-a=b".parse().unwrap(), HeaderMap::new());
        move_signed_parameters(&uri, &mut headers).unwrap();
        assert!(headers.is_empty(), "it is not signed");
    }

    #[test]
    fn a_request_is_signed_in_one_known_way() {
        #[track_caller]
        fn check(query: &str, authorizations: &[&str], expected: Option<Signed>) {
            let uri: Uri = format!("/b/k?{query}").parse().unwrap();
            let mut headers = HeaderMap::new();
            for authorization in authorizations {
                headers.append(header::AUTHORIZATION, authorization.parse().unwrap());
            }
            assert_eq!(Signed::of(&uri, &headers).ok(), expected, "{query} {authorizations:?}");
        }
        let four = "AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders=host;x-amz-date, Signature=0";
        check("", &[], Some(Signed::Not));
        check("", &[four], Some(Signed::Four("host;x-amz-date".to_owned())));
        check("", &[&four.replace(", ", ",")], Some(Signed::Four("host;x-amz-date".to_owned())));
        check("", &["AWS id:signature"], Some(Signed::Two));
        check("Signature=0", &[], Some(Signed::UrlTwo));
        let presigned = "X-Amz-Signature=0&X-Amz-SignedHeaders=host";
        check(presigned, &[], Some(Signed::UrlFour("host".to_owned())));
        check("X-Amz%2DSignature=0&X-Amz-SignedHeaders=host", &[], Some(Signed::UrlFour("host".to_owned())));
        for other in ["aws4-hmac-sha256", "AWS3", "foo", "AWS4-HMAC-SHA512"] {
            check("", &[&four.replace("AWS4-HMAC-SHA256", other)], None);
        }
        check("", &["AWS4-HMAC-SHA256 Credential=a/b, Signature=0"], None);
        check("", &[&format!("{four}, SignedHeaders=host")], None);
        for second in ["", "Bearer x", "Basic abc", "rubbish", "AWS id:signature", four] {
            check(presigned, &[second], None);
            check("Signature=0", &[second], None);
            check("", &[four, second], None);
        }
        check("X-Amz-Signature=0&Signature=0", &[], None);
    }

    #[test]
    fn dates_of_signatures_are_near() {
        let none = HeaderMap::new();
        let mut signed = HeaderMap::new();
        let four = "AWS4-HMAC-SHA256 Credential=a, SignedHeaders=host, Signature=0";
        signed.insert("authorization", four.parse().unwrap());
        signed.insert("x-amz-date", "20130524T000000Z".parse().unwrap());
        let at_s = 1_369_353_600;
        let plain: Uri = "/b/k".parse().unwrap();
        let url = "/b/k?X-Amz-Signature=0&X-Amz-Date=20130524T000000Z&X-Amz-Expires=";
        let lasting = |age: &str| format!("{url}{age}").parse::<Uri>().unwrap();
        let presigned = lasting("604800");
        let check = |uri: &Uri, headers: &HeaderMap, now_s| {
            Signed::of(uri, headers).and_then(|signed| signed.check_date(uri, headers, now_s)).is_ok()
        };
        assert!(check(&plain, &none, 0));
        assert!(check(&plain, &signed, at_s + 900) && check(&plain, &signed, at_s - 900));
        assert!(!check(&plain, &signed, at_s + 901) && !check(&plain, &signed, at_s - 901));
        assert!(check(&presigned, &none, at_s + 100_000) && !check(&presigned, &none, at_s - 901));
        for bad in ["604801", "-1", "", "x"] {
            assert!(!check(&lasting(bad), &none, at_s), "{bad}");
        }
        for bad in ["20130524T000000", "20131324T000000Z", "today", "2013+524T000000Z1"] {
            signed.insert("x-amz-date", bad.parse().unwrap());
            assert!(!check(&plain, &signed, at_s), "{bad}");
        }
    }

    #[test]
    fn a_date_alone_is_enough() {
        #[track_caller]
        fn check(authorization: &str, date: &str, expected: Option<&str>) {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, authorization.parse().unwrap());
            headers.insert(header::DATE, date.parse().unwrap());
            take_date(&"/b/k".parse().unwrap(), &mut headers);
            let made = headers.get("x-amz-date").map(|value| value.to_str().unwrap());
            assert_eq!(made, expected, "{authorization} {date}");
        }
        let four = "AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders=date;host, Signature=0";
        check(four, "Fri, 24 May 2013 00:00:00 GMT", Some("20130524T000000Z"));
        check(four, "20130524T000000Z", Some("20130524T000000Z"));
        check(four, "yesterday", None);
        check("AWS a:b", "Fri, 24 May 2013 00:00:00 GMT", None);
    }

    #[test]
    fn forms_are_signed_and_end_at_a_time_that_is_written_clearly() {
        #[track_caller]
        fn check(expiration: &str, is_signed: bool, code: Option<&str>) {
            let policy = format!(r#"{{"expiration":"{expiration}","conditions":[]}}"#);
            let policy = Some(hash::base64(policy.as_bytes()));
            let found = check_form(&FormFields { policy, is_signed, ..FormFields::default() });
            let found = found.as_ref().err().map(|error| error.code().as_str());
            assert_eq!(found, code, "{expiration} {is_signed}");
        }
        for fine in ["2026-12-01T12:00:00Z", "2026-12-01T12:00:00.000Z", "2026-12-01T12:00:00.123456Z"] {
            check(fine, true, None);
            check(fine, false, Some("InvalidArgument"));
        }
        for bad in [
            "2026-12-01 12:00:00+00:00",
            "2026-12-01 12:00:00Z",
            "2026-12-01t12:00:00z",
            "2026-12-01T12:00:00",
            "2026-12-01T12:00:00+00:00",
            "2026-12-01T12:00:00.Z",
            "2026-12-01",
            "",
        ] {
            check(bad, true, Some("InvalidPolicyDocument"));
        }
        assert!(check_form(&FormFields::default()).is_ok());
    }

    #[test]
    fn a_region_that_cannot_be_verified_is_answered_with_the_right_one() {
        #[track_caller]
        fn check(uri: &str, authorization: &str, code: Option<&str>) {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, authorization.parse().unwrap());
            let found = check_region(&uri.parse().unwrap(), &headers);
            assert_eq!(
                found.as_ref().err().map(|error| error.code().as_str()),
                code,
                "{uri} {authorization}"
            );
            if let Err(error) = found {
                assert_eq!(error.headers().unwrap()[BUCKET_REGION], "us-east-1");
                assert!(error.message().unwrap().ends_with("expecting 'us-east-1'"), "{error:?}");
            }
        }
        let four = |region: &str| {
            format!(
                "AWS4-HMAC-SHA256 SignedHeaders=host, Credential=a/20130524/{region}/s3/aws4_request,Signature=0"
            )
        };
        for fine in ["us-east-1", "eu-west-3", "garage", ""] {
            check("/b", &four(fine), None);
        }
        for bad in ["US", "EU", "us_east"] {
            check("/b", &four(bad), Some("AuthorizationHeaderMalformed"));
        }
        check("/b", "AWS a/20130524/US/s3/aws4_request:0", None);
        let url = "/b?X-Amz-Credential=a%2F20130524%2FUS%2Fs3%2Faws4_request";
        check(url, "", Some("AuthorizationQueryParametersError"));
        check(&url.replace("US", "us"), "", None);
    }

    #[test]
    fn documents_are_known_by_method_and_parameters() {
        let check = |method: Method, uri: &str, has_key, expected| {
            assert_eq!(
                brings_document(&method, &uri.parse().unwrap(), || has_key),
                expected,
                "{method} {uri}"
            );
        };
        check(Method::POST, "/b?delete", false, true);
        check(Method::POST, "/b/k?uploadId=1", true, true);
        check(Method::PUT, "/b", false, true);
        check(Method::PUT, "/b/k", true, false);
        check(Method::PUT, "/b/k?tagging", true, true);
        check(Method::PUT, "/b/k?partNumber=1&uploadId=x", true, false);
        check(Method::GET, "/b?policy", false, false);
    }

    #[test]
    fn an_old_signature_of_version_2_is_refused() {
        let uri: Uri = "/b/k".parse().unwrap();
        let check_date = |headers: &HeaderMap, now_s| Signed::Two.check_date(&uri, headers, now_s);
        let mut headers = HeaderMap::new();
        assert!(check_date(&headers, 0).is_err());
        headers.insert("date", "Thu, 01 Nov 2001 00:00:00 GMT".parse().unwrap());
        let at_s = 1_004_572_800;
        assert!(check_date(&headers, at_s + 899).is_ok());
        assert!(check_date(&headers, at_s + 901).is_err());
        headers.insert("x-amz-date", "Thu, 01 Nov 2001 00:30:00 +0000".parse().unwrap());
        assert!(check_date(&headers, at_s + 1800).is_ok(), "as s3cmd writes it, and before the other date");
        assert!(check_date(&headers, at_s).is_err());
        headers.insert("x-amz-date", "yesterday".parse().unwrap());
        assert!(check_date(&headers, at_s).is_err());
    }
}
