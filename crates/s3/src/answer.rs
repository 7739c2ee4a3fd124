//! Corrections of documents that the protocol library answers with: XML that parsers read without changes, and errors
//! with a message and the request id.

use bytes::Bytes;
use hyper::header::{self, HeaderMap, HeaderName};
use hyper::{Response, StatusCode};
use s3s::Body;

/// Operations whose answer is the bytes of an object or a policy, not XML.
const OTHER_ANSWERS: [&str; 2] = ["GetBucketPolicy", "GetObject"];

/// The region to sign for. An error with it is about a signature for another one.
pub(crate) const BUCKET_REGION: HeaderName = HeaderName::from_static("x-amz-bucket-region");

/// Completes an answer. `operation` is empty if it is unknown.
pub(crate) fn complete(response: Response<Body>, operation: &str, request_id: &str) -> Response<Body> {
    let is_error = response.status().as_u16() >= 400;
    if !is_error && OTHER_ANSWERS.contains(&operation) {
        return response;
    }
    let Some(bytes) = response.body().bytes().filter(|bytes| bytes.starts_with(b"<")) else {
        return response;
    };
    let text = match (is_error, operation) {
        (true, _) => explain(&bytes, response.status(), response.headers(), request_id),
        (false, "GetObjectAttributes") => bare_etag(&bytes),
        (false, _) => None,
    };
    let escaped = escape(text.as_deref().unwrap_or(&bytes));
    match escaped.or(text) {
        Some(text) => with_body(response, text),
        None => response,
    }
}

/// The document with an ETag without quotes, as S3 has it in this one answer.
fn bare_etag(document: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(document).ok()?;
    let (before, rest) = text.split_once("<ETag>")?;
    let (etag, after) = rest.split_once("</ETag>")?;
    let etag = etag.replace("&quot;", "").replace('"', "");
    Some(format!("{before}<ETag>{etag}</ETag>{after}").into_bytes())
}

/// The response with another document in it.
pub(crate) fn with_body(response: Response<Body>, text: Vec<u8>) -> Response<Body> {
    let (mut parts, _) = response.into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, Body::from(Bytes::from(text)))
}

/// The document of an error, with a message and the request id if they are missing, and the region of the headers.
fn explain(document: &[u8], status: StatusCode, headers: &HeaderMap, request_id: &str) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(document).ok()?;
    let (before, after) = text.split_once("</Code>")?;
    let code = before.rsplit_once("<Code>")?.1;
    let message = match text.contains("<Message>") {
        true => String::new(),
        false => format!("<Message>{}</Message>", message(code, status)),
    };
    let id = match text.contains("<RequestId>") {
        true => String::new(),
        false => format!("<RequestId>{request_id}</RequestId>"),
    };
    let region = headers.get(BUCKET_REGION).and_then(|region| region.to_str().ok());
    let region = region.map(|region| format!("<Region>{region}</Region>")).unwrap_or_default();
    let (inner, end) = after.rsplit_once("</Error>")?;
    Some(format!("{before}</Code>{message}{inner}{region}{id}</Error>{end}").into_bytes())
}

/// Messages for errors that the protocol library gives a code only.
fn message(code: &str, status: StatusCode) -> &str {
    match code {
        "SignatureDoesNotMatch" => {
            "The signature that was sent is not the one calculated for this request: check the secret key, and that nothing changes the request on its way."
        }
        "MalformedXML" => "The document in the request is no well-formed XML, or not of this kind.",
        "InvalidURI" => "The path of the request is no bucket and key in UTF-8, percent-encoded.",
        "InvalidBucketName" => "The bucket's name is not valid.",
        "KeyTooLongError" => "The key is longer than 1,024 bytes.",
        "IncompleteBody" => "The body is not as long as the Content-Length header says.",
        "MissingContentLength" => "The request needs the Content-Length header.",
        "MaxMessageLengthExceeded" => "The document in the request is too long.",
        "EntityTooLarge" => "The object is larger than one request may bring.",
        "InternalError" => "An error inside the server: see its log.",
        "XAmzContentSHA256Mismatch" => "The body is not the one whose SHA-256 was signed.",
        _ => status.canonical_reason().unwrap_or("The request was refused."),
    }
}

/// Escapes characters that a parser would change or XML cannot hold; `None` if there are none.
fn escape(document: &[u8]) -> Option<Vec<u8>> {
    let is_odd = |byte: u8| byte == 0xef || (byte < b' ' && byte != b'\n' && byte != b'\t');
    // Without an early exit, so that the compiler vectorizes it.
    if !document.iter().fold(false, |found, byte| found | is_odd(*byte)) {
        return None;
    }
    let mut out = String::with_capacity(document.len() + 64);
    for char in std::str::from_utf8(document).ok()?.chars() {
        match char {
            '\n' | '\t' => out.push(char),
            '\0'..' ' | '\u{fffe}' | '\u{ffff}' => out.push_str(&format!("&#{};", u32::from(char))),
            _ => out.push(char),
        }
    }
    Some(out.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(response: Response<Body>) -> String {
        String::from_utf8(response.body().bytes().unwrap().to_vec()).unwrap()
    }

    #[track_caller]
    fn check(operation: &str, status: u16, document: &str, expected: &str) {
        let mut response = Response::new(Body::from(Bytes::copy_from_slice(document.as_bytes())));
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        assert_eq!(text(complete(response, operation, "ID")), expected);
    }

    #[test]
    fn characters_that_readers_change_are_references() {
        check("ListObjects", 200, "<Key>a\rb\nü\u{fffd}</Key>", "<Key>a&#13;b\nü\u{fffd}</Key>");
        check("CreateMultipartUpload", 200, "<Key>\u{1}\u{fffe}</Key>", "<Key>&#1;&#65534;</Key>");
        check("GetObject", 200, "<a>\r</a>", "<a>\r</a>");
    }

    #[test]
    fn attributes_have_an_etag_without_quotes() {
        let of = |etag: &str| format!("<R><ETag>{etag}</ETag><ObjectSize>1</ObjectSize></R>");
        check("GetObjectAttributes", 200, &of("&quot;ab-2&quot;"), &of("ab-2"));
        check("ListObjects", 200, &of("&quot;ab-2&quot;"), &of("&quot;ab-2&quot;"));
        check(
            "GetObjectAttributes",
            200,
            "<R><ObjectSize>1</ObjectSize></R>",
            "<R><ObjectSize>1</ObjectSize></R>",
        );
    }

    #[test]
    fn errors_say_why_and_of_which_request() {
        let written = "<Error><Code>NoSuchKey</Code><Message>m\r</Message></Error>";
        let expected =
            "<Error><Code>NoSuchKey</Code><Message>m&#13;</Message><RequestId>ID</RequestId></Error>";
        check("GetObject", 404, written, expected);
        let expected = "<Error><Code>Odd</Code><Message>Conflict</Message><RequestId>ID</RequestId></Error>";
        check("", 409, "<Error><Code>Odd</Code></Error>", expected);
        check("", 400, "<Other/>", "<Other/>");
    }

    #[test]
    fn an_error_names_the_region_of_its_headers() {
        let mut response = Response::new(Body::from(Bytes::from_static(b"<Error><Code>Odd</Code></Error>")));
        *response.status_mut() = StatusCode::BAD_REQUEST;
        response.headers_mut().insert(BUCKET_REGION, "us-east-1".parse().unwrap());
        let expected = "<Error><Code>Odd</Code><Message>Bad Request</Message><Region>us-east-1</Region><RequestId>ID</RequestId></Error>";
        assert_eq!(text(complete(response, "", "ID")), expected);
    }
}
