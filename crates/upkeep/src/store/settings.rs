//! How a store is reached.

use layout::{BLOB_BYTES_MAX, BLOB_BYTES_MIN};
use wire::store::{StoreAuth, StoreLimits, StoreProtocol};

/// Requests of one kind that may be under way at most.
const REQUESTS_MAX: u16 = 1024;
const KEY_BYTES_MAX: usize = 1024;
/// What our own part of a key takes at most.
const OWN_KEY_BYTES: usize = 160;

/// How a store is reached. No `Debug`: it holds a secret.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreSettings {
    /// How the connection is made.
    pub protocol: StoreProtocol,
    /// Its name or address.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Its bucket. Case counts.
    pub bucket: String,
    /// What all keys begin with, followed by a slash; empty for nothing.
    pub prefix: String,
    /// Part of signatures of version 4.
    pub region: String,
    /// How requests are signed.
    pub auth: StoreAuth,
    /// Id of the key that they are signed with.
    pub access_key: String,
    /// Its secret.
    pub secret_key: String,
    /// Certificates (PEM) that vouch for it, beside those of the system.
    pub ca: Option<String>,
    /// How much is asked of it at a time.
    pub limits: StoreLimits,
}

/// Why settings make no sense.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreSettingsError {
    /// A value is not one that there can be.
    #[error("{field} {rule}: value={value}")]
    Value {
        /// Which.
        field: &'static str,
        /// What it must be.
        rule: &'static str,
        /// What it is.
        value: String,
    },
    /// The certificates cannot be used.
    #[error("the certificates of --ca cannot be used: {0}")]
    Certificates(String),
    /// There is no HTTP client.
    #[error("cannot make an HTTP client: {0}")]
    Client(String),
}

fn require(
    holds: bool,
    field: &'static str,
    rule: &'static str,
    value: impl ToString,
) -> Result<(), StoreSettingsError> {
    if holds { Ok(()) } else { Err(StoreSettingsError::Value { field, rule, value: value.to_string() }) }
}

impl StoreSettings {
    pub(super) fn check(&self) -> Result<(), StoreSettingsError> {
        let host_rule = "must be a name or an address, without protocol, port or path";
        let is_address = self.host.parse::<std::net::IpAddr>().is_ok();
        let is_name = !self.host.is_empty()
            && self.host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
        require(is_address || is_name, "hostname", host_rule, &self.host)?;
        require(self.port != 0, "port", "must be between 1 and 65535", self.port)?;
        let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        let is_bucket = !self.bucket.is_empty() && plain(&self.bucket) && !self.bucket.contains('/');
        require(
            is_bucket,
            "bucket",
            "must be the name of a bucket, as BUCKET or BUCKET/PREFIX",
            &self.bucket,
        )?;
        let is_prefix = self.prefix.len() <= KEY_BYTES_MAX - OWN_KEY_BYTES
            && plain(&self.prefix)
            && self.prefix.split('/').all(|part| self.prefix.is_empty() || !matches!(part, "" | "." | ".."));
        let prefix_rule =
            "must be printable, with no empty part and no dots for one, and of at most 864 bytes";
        require(is_prefix, "prefix", prefix_rule, &self.prefix)?;
        require(!self.region.is_empty() && plain(&self.region), "region", "must not be empty", &self.region)?;
        let is_key = !self.access_key.is_empty() && plain(&self.access_key);
        require(is_key, "access-key-id", "must be printable and not empty", &self.access_key)?;
        let is_secret = !self.secret_key.is_empty() && plain(&self.secret_key);
        require(is_secret, "secret-key", "must be printable and not empty", "(not shown)")?;
        check_limits(&self.limits)
    }

    /// Where an object is, in path style.
    pub(super) fn uri(&self, key: &str) -> String {
        let scheme = if self.protocol == StoreProtocol::Http { "http" } else { "https" };
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        let authority =
            if self.port == self.protocol.default_port() { host } else { format!("{host}:{}", self.port) };
        format!("{scheme}://{authority}{}", self.path(key))
    }

    /// The path of an object, percent-encoded as signatures want it.
    pub(super) fn path(&self, key: &str) -> String {
        let slash = if self.prefix.is_empty() { "" } else { "/" };
        let whole = format!("{}/{}{slash}{key}", self.bucket, self.prefix);
        let encoded: Vec<_> = whole.split('/').map(|part| urlencoding::encode(part)).collect();
        format!("/{}", encoded.join("/"))
    }
}

fn check_limits(limits: &StoreLimits) -> Result<(), StoreSettingsError> {
    let blob = BLOB_BYTES_MIN..=BLOB_BYTES_MAX;
    require(blob.contains(&limits.blob_bytes), "blob-size", "must be 4MiB to 64MiB", limits.blob_bytes)?;
    let counts = [
        ("max-up", limits.uploads_max),
        ("max-down", limits.downloads_max),
        ("max-remove", limits.removals_max),
    ];
    for (field, count) in counts {
        require((1..=REQUESTS_MAX).contains(&count), field, "must be between 1 and 1024", count)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
pub(super) mod tests {
    use super::*;

    pub(crate) fn settings() -> StoreSettings {
        StoreSettings {
            protocol: StoreProtocol::Http,
            host: "127.0.0.1".to_owned(),
            port: 9000,
            bucket: "Bucket".to_owned(),
            prefix: String::new(),
            region: "us-east-1".to_owned(),
            auth: StoreAuth::V4,
            access_key: "AKIA".to_owned(),
            secret_key: "secret".to_owned(),
            ca: None,
            limits: StoreLimits::default(),
        }
    }

    #[test]
    fn objects_are_below_bucket_and_prefix() {
        let with = |prefix: &str| StoreSettings { prefix: prefix.to_owned(), ..settings() };
        assert_eq!(with("").uri("B_1/x"), "http://127.0.0.1:9000/Bucket/B_1/x");
        assert_eq!(with("a b/c").uri("k"), "http://127.0.0.1:9000/Bucket/a%20b/c/k");
        let tls = StoreSettings {
            protocol: StoreProtocol::HttpsUnverified,
            host: "::1".to_owned(),
            port: 443,
            ..settings()
        };
        assert_eq!(tls.uri("k"), "https://[::1]/Bucket/k");
    }

    #[test]
    fn settings_that_make_no_sense_are_refused_by_name() {
        settings().check().unwrap();
        type Change = fn(&mut StoreSettings);
        let wrong: [(&str, Change); 10] = [
            ("hostname", |s| s.host = "http://host".to_owned()),
            ("hostname", |s| s.host = "host:80".to_owned()),
            ("hostname", |s| s.host.clear()),
            ("port", |s| s.port = 0),
            ("bucket", |s| s.bucket = "a/b".to_owned()),
            ("prefix", |s| s.prefix = "a//b".to_owned()),
            ("prefix", |s| s.prefix = "../b".to_owned()),
            ("region", |s| s.region.clear()),
            ("blob-size", |s| s.limits.blob_bytes = 1 << 20),
            ("max-up", |s| s.limits.uploads_max = 0),
        ];
        for (field, change) in wrong {
            let mut changed = settings();
            change(&mut changed);
            let text = changed.check().unwrap_err().to_string();
            assert!(text.starts_with(field), "{text}");
        }
        let mut secret = settings();
        secret.secret_key = "two words".to_owned();
        assert!(!secret.check().unwrap_err().to_string().contains("words"));
    }
}
