//! Address, key and limits of a store.

use layout::{BLOB_BYTES_MAX, BLOB_BYTES_MIN};
use wire::store::{StoreAddress, StoreLimits, StoreProtocol};

/// The most requests of one kind under way.
const REQUESTS_MAX: u16 = 1024;
const KEY_BYTES_MAX: usize = 1024;
/// The most bytes of our own part of a key.
const OWN_KEY_BYTES: usize = 160;

/// Address, key and limits of a store. No `Debug`: it holds a secret.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreSettings {
    /// Its address and the limits of its use.
    pub address: StoreAddress,
    /// The secret of the key that signs requests.
    pub secret_key: String,
}

/// Why settings are refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreSettingsError {
    /// A value is not allowed.
    #[error("{field} {rule}: value={value}")]
    Value {
        /// The name of the setting.
        field: &'static str,
        /// The rule for its values.
        rule: &'static str,
        /// The refused value.
        value: String,
    },
    /// The certificates cannot be used.
    #[error("the certificates of --ca cannot be used: {0}")]
    Certificates(String),
    /// The HTTP client could not be made.
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
    /// Checks the values.
    pub fn check(&self) -> Result<(), StoreSettingsError> {
        let StoreAddress { host, port, bucket, prefix, region, access_key, limits, .. } = &self.address;
        let host_rule = "must be a name or an address, without protocol, port or path";
        let is_address = host.parse::<std::net::IpAddr>().is_ok();
        let is_name = !host.is_empty()
            && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
        require(is_address || is_name, "hostname", host_rule, host)?;
        require(*port != 0, "port", "must be between 1 and 65535", port)?;
        let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        let is_bucket = !bucket.is_empty() && plain(bucket) && !bucket.contains('/');
        require(is_bucket, "bucket", "must be the name of a bucket, as BUCKET or BUCKET/PREFIX", bucket)?;
        let is_prefix = prefix.len() <= KEY_BYTES_MAX - OWN_KEY_BYTES
            && plain(prefix)
            && prefix.split('/').all(|part| prefix.is_empty() || !matches!(part, "" | "." | ".."));
        let prefix_rule =
            "must be printable, with no empty part and no dots for one, and of at most 864 bytes";
        require(is_prefix, "prefix", prefix_rule, prefix)?;
        require(!region.is_empty() && plain(region), "region", "must not be empty", region)?;
        let is_key = !access_key.is_empty() && plain(access_key);
        require(is_key, "access-key-id", "must be printable and not empty", access_key)?;
        let is_secret = !self.secret_key.is_empty() && plain(&self.secret_key);
        require(is_secret, "secret-key", "must be printable and not empty", "(not shown)")?;
        check_limits(limits)
    }

    /// The address of an object, in path style.
    pub(super) fn uri(&self, key: &str) -> String {
        let StoreAddress { protocol, host, port, .. } = &self.address;
        let scheme = if *protocol == StoreProtocol::Http { "http" } else { "https" };
        let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        let authority = if *port == protocol.default_port() { host } else { format!("{host}:{port}") };
        format!("{scheme}://{authority}{}", self.path(key))
    }

    /// The path of an object, percent-encoded as signatures require.
    fn path(&self, key: &str) -> String {
        let StoreAddress { bucket, prefix, .. } = &self.address;
        let slash = if prefix.is_empty() { "" } else { "/" };
        let whole = format!("{bucket}/{prefix}{slash}{key}");
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
    let most = limits.cluster_max.unwrap_or(1);
    require(most > 0, "max-cluster", "must be at least 1", most)?;
    let rate = limits.bandwidth_mbps.unwrap_or(1);
    require(rate > 0, "bandwidth", "must be at least 1 (Mbit/s)", rate)?;
    for (field, count) in counts {
        require((1..=REQUESTS_MAX).contains(&count), field, "must be between 1 and 1024", count)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
pub(super) mod tests {
    use super::*;
    use wire::store::StoreAuth;

    pub(crate) fn settings() -> StoreSettings {
        let address = StoreAddress {
            protocol: StoreProtocol::Http,
            host: "127.0.0.1".to_owned(),
            port: 9000,
            bucket: "Bucket".to_owned(),
            prefix: String::new(),
            region: "us-east-1".to_owned(),
            auth: StoreAuth::V4,
            access_key: "AKIA".to_owned(),
            ca: None,
            limits: StoreLimits::default(),
        };
        StoreSettings { address, secret_key: "secret".to_owned() }
    }

    #[test]
    fn objects_are_below_bucket_and_prefix() {
        let with = |prefix: &str| {
            let mut settings = settings();
            settings.address.prefix = prefix.to_owned();
            settings
        };
        assert_eq!(with("").uri("B_1/x"), "http://127.0.0.1:9000/Bucket/B_1/x");
        assert_eq!(with("a b/c").uri("k"), "http://127.0.0.1:9000/Bucket/a%20b/c/k");
        let mut tls = settings();
        let address = &mut tls.address;
        (address.protocol, address.host, address.port) =
            (StoreProtocol::HttpsUnverified, "::1".to_owned(), 443);
        assert_eq!(tls.uri("k"), "https://[::1]/Bucket/k");
    }

    #[test]
    fn refused_settings_are_named() {
        settings().check().unwrap();
        type Change = fn(&mut StoreAddress);
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
            change(&mut changed.address);
            let text = changed.check().unwrap_err().to_string();
            assert!(text.starts_with(field), "{text}");
        }
        let mut secret = settings();
        secret.secret_key = "two words".to_owned();
        assert!(!secret.check().unwrap_err().to_string().contains("words"));
    }
}
