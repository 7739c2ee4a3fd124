//! Signatures of version 4, in headers.

use std::fmt::Write;
use std::time::SystemTime;

use ring::{digest, hmac};
use time::OffsetDateTime;

use super::Ask;

/// SHA-256 of no bytes.
pub(super) const SHA256_OF_NOTHING: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
const REGION: &str = "us-east-1";

/// An access key and its secret.
#[derive(Debug)]
pub(crate) struct Keys {
    access_key: String,
    secret: String,
}

/// The headers that a signature adds to a request.
pub(super) struct Signed {
    pub(super) date: String,
    pub(super) authorization: String,
}

/// Lowercase hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The value of `x-amz-content-sha256` for these bytes.
pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    hex(digest::digest(&digest::SHA256, bytes).as_ref())
}

fn mac(key: &[u8], text: &str) -> hmac::Tag {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes())
}

impl Keys {
    pub(crate) fn new(access_key: &str, secret: &str) -> Self {
        Self { access_key: access_key.to_owned(), secret: secret.to_owned() }
    }

    pub(super) fn sign(&self, ask: &Ask<'_>, host: &str) -> Signed {
        self.sign_at(ask, host, OffsetDateTime::from(SystemTime::now()))
    }

    fn sign_at(&self, ask: &Ask<'_>, host: &str, now: OffsetDateTime) -> Signed {
        let day = format!("{:04}{:02}{:02}", now.year(), u8::from(now.month()), now.day());
        let date = format!("{day}T{:02}{:02}{:02}Z", now.hour(), now.minute(), now.second());
        let mut headers =
            vec![("host", host), ("x-amz-content-sha256", ask.sha256), ("x-amz-date", date.as_str())];
        headers.extend(ask.headers);
        headers.sort_unstable();
        let names = headers.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(";");
        let mut canonical = format!("{}\n{}\n{}\n", ask.method, ask.path, ask.query);
        for (name, value) in headers {
            let _ = writeln!(canonical, "{name}:{value}");
        }
        let _ = write!(canonical, "\n{names}\n{}", ask.sha256);
        let scope = format!("{day}/{REGION}/s3/aws4_request");
        let text = format!("AWS4-HMAC-SHA256\n{date}\n{scope}\n{}", sha256_hex(canonical.as_bytes()));
        let mut key = mac(format!("AWS4{}", self.secret).as_bytes(), &day);
        for part in [REGION, "s3", "aws4_request", &text] {
            key = mac(key.as_ref(), part);
        }
        let authorization = format!(
            "AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={names}, Signature={}",
            self.access_key,
            hex(key.as_ref())
        );
        Signed { date, authorization }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first example of "Authenticating Requests: Using the Authorization Header" in the S3 reference.
    #[test]
    fn the_example_of_the_reference_has_its_signature() {
        let keys = Keys::new("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY");
        let headers = [("range", "bytes=0-9")];
        let ask = Ask { headers: &headers, ..Ask::new(hyper::Method::GET, "/test.txt") };
        let now = OffsetDateTime::from_unix_timestamp(1_369_353_600).unwrap();
        let signed = keys.sign_at(&ask, "examplebucket.s3.amazonaws.com", now);
        assert_eq!(signed.date, "20130524T000000Z");
        let signature = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41";
        assert!(signed.authorization.ends_with(signature), "{}", signed.authorization);
    }
}
