//! Signatures of requests: AWS version 4, and version 2 for older stores.

use std::time::{Duration, SystemTime};

use aws_credential_types::Credentials;
use aws_sigv4::http_request::{
    PayloadChecksumKind, PercentEncodingMode, SignableBody, SignableRequest, SigningSettings,
    UriPathNormalizationMode, sign as sign_v4,
};
use aws_sigv4::sign::v4;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::Request;
use hyper::header::{AUTHORIZATION, DATE, HeaderName, HeaderValue};
use ring::hmac;
use wire::store::{StoreAuth, StoreError};

use super::settings::StoreSettings;

fn failed(error: impl std::fmt::Display) -> StoreError {
    StoreError::Unexpected(format!("the request cannot be signed: {error}"))
}

/// Signs a request. `wall_ns` is its time, in nanoseconds since 1970.
pub(super) fn sign<B>(
    settings: &StoreSettings,
    request: Request<B>,
    wall_ns: i64,
) -> Result<Request<B>, StoreError> {
    let now = SystemTime::UNIX_EPOCH + Duration::from_nanos(wall_ns.max(0).cast_unsigned());
    match settings.address.auth {
        StoreAuth::V4 => version_4(settings, request, now),
        StoreAuth::V2 => version_2(settings, request, now),
    }
}

fn version_4<B>(
    settings: &StoreSettings,
    mut request: Request<B>,
    now: SystemTime,
) -> Result<Request<B>, StoreError> {
    let identity =
        Credentials::new(&settings.address.access_key, &settings.secret_key, None, None, "forebay").into();
    let mut how = SigningSettings::default();
    // S3 differs from the rest of AWS in these.
    how.percent_encoding_mode = PercentEncodingMode::Single;
    how.uri_path_normalization_mode = UriPathNormalizationMode::Disabled;
    how.payload_checksum_kind = PayloadChecksumKind::XAmzSha256;
    let params = v4::SigningParams::builder()
        .identity(&identity)
        .region(&settings.address.region)
        .name("s3")
        .time(now)
        .settings(how)
        .build()
        .map_err(failed)?;
    let (method, uri) = (request.method().to_string(), request.uri().to_string());
    let headers: Vec<(String, String)> = request
        .headers()
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_str().unwrap_or_default().to_owned()))
        .collect();
    let headers = headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    // Blobs and their blocks have checksums of their own.
    let signable =
        SignableRequest::new(&method, &uri, headers, SignableBody::UnsignedPayload).map_err(failed)?;
    let (instructions, _) = sign_v4(signable, &params.into()).map_err(failed)?.into_parts();
    for (name, value) in instructions.headers() {
        let name = HeaderName::try_from(name).map_err(failed)?;
        request.headers_mut().insert(name, HeaderValue::try_from(value).map_err(failed)?);
    }
    Ok(request)
}

/// HMAC-SHA-1 of method, date and resource. Our requests have no sub-resources and no `x-amz-` headers.
fn version_2<B>(
    settings: &StoreSettings,
    mut request: Request<B>,
    now: SystemTime,
) -> Result<Request<B>, StoreError> {
    let date = httpdate::fmt_http_date(now);
    let text = format!("{}\n\n\n{date}\n{}", request.method(), request.uri().path());
    let signature = version_2_signature(&settings.secret_key, &text);
    let authorization = format!("AWS {}:{signature}", settings.address.access_key);
    request.headers_mut().insert(DATE, HeaderValue::try_from(date).map_err(failed)?);
    request.headers_mut().insert(AUTHORIZATION, HeaderValue::try_from(authorization).map_err(failed)?);
    Ok(request)
}

fn version_2_signature(secret_key: &str, text: &str) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, secret_key.as_bytes());
    STANDARD.encode(hmac::sign(&key, text.as_bytes()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::store::settings::tests::settings;

    /// The keys of the examples in Amazon's documentation.
    fn example(auth: StoreAuth) -> StoreSettings {
        let mut settings = settings();
        (settings.address.auth, settings.address.access_key) = (auth, "AKIAIOSFODNN7EXAMPLE".to_owned());
        settings.secret_key = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".to_owned();
        settings
    }

    fn get(uri: &str) -> Request<()> {
        Request::builder().uri(uri).body(()).unwrap()
    }

    #[test]
    fn version_2_gives_the_signature_of_the_documentation() {
        // "Object GET" of "Signing and authenticating REST requests". It writes the zone as a number; HTTP uses GMT.
        let resource = "/awsexamplebucket1/photos/puppy.jpg";
        let text = format!("GET\n\n\nTue, 27 Mar 2007 19:36:42 +0000\n{resource}");
        let settings = example(StoreAuth::V2);
        assert_eq!(version_2_signature(&settings.secret_key, &text), "qgk2+6Sv9/oM7G3qLEjTH1a1l1g=");
    }

    #[test]
    fn version_2_signs_method_date_and_path() {
        let settings = example(StoreAuth::V2);
        let signed =
            sign(&settings, get("http://127.0.0.1:9000/Bucket/a%20b"), 1_175_024_202_000_000_000).unwrap();
        assert_eq!(signed.headers()[DATE], "Tue, 27 Mar 2007 19:36:42 GMT");
        let text = "GET\n\n\nTue, 27 Mar 2007 19:36:42 GMT\n/Bucket/a%20b";
        let expected =
            format!("AWS AKIAIOSFODNN7EXAMPLE:{}", version_2_signature(&settings.secret_key, text));
        assert_eq!(signed.headers()[AUTHORIZATION], expected);
    }

    #[test]
    fn version_4_names_scope_and_signs_host_range_and_time() {
        let mut request = get("http://127.0.0.1:9000/Bucket/a%20b");
        request.headers_mut().insert("range", "bytes=0-9".parse().unwrap());
        let signed = sign(&example(StoreAuth::V4), request, 1_369_353_600_000_000_000).unwrap();
        let authorization = signed.headers()[AUTHORIZATION].to_str().unwrap();
        let scope = "Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request";
        assert!(authorization.contains(scope), "{authorization}");
        let headers = "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date";
        assert!(authorization.contains(headers), "{authorization}");
        assert_eq!(signed.headers()["x-amz-date"], "20130524T000000Z");
    }
}
