//! The interface of an object store (put whole objects, get ranges, delete), its address, limits and health.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use base::Ino;
use base::checksum::crc32c;
use bytes::Bytes;
use layout::BLOB_BYTES_MAX;
use serde::{Deserialize, Serialize};

use crate::BoxFuture;

/// The code of an error that is about the bucket, not about an object in it.
pub const NO_BUCKET: &str = "NoSuchBucket";

/// Why a request to a store failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The object or its bucket does not exist. The text is the store's.
    #[error("no such object or bucket: {0}")]
    NotFound(String),
    /// The store refuses the caller or does not know it: a person must act.
    #[error("refused: {0}")]
    Denied(String),
    /// The bucket is full: no put succeeds until objects are deleted or its quota is raised.
    #[error("the store is full: {0}")]
    Full(String),
    /// The store asks for fewer requests.
    #[error("the store is busy: {0}")]
    Busy(String),
    /// The answer was late or incomplete, or the store failed. A retry may help.
    #[error("no answer: {0}")]
    Unavailable(String),
    /// The object ends before the requested range: it is not the object that was stored.
    #[error("the object is too short: {0}")]
    TooShort(String),
    /// The answer makes no sense.
    #[error("unexpected answer: {0}")]
    Unexpected(String),
}

impl StoreError {
    /// Whether a retry a little later may help.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Busy(_) | Self::Unavailable(_))
    }

    /// Whether the object is missing, rather than the bucket.
    pub fn is_about_object(&self) -> bool {
        matches!(self, Self::NotFound(text) if !text.contains(NO_BUCKET))
    }

    /// The first thing an administrator should check.
    pub fn advice(&self) -> &'static str {
        match self {
            Self::NotFound(_) => "check the name of the bucket: case counts, and it must exist",
            Self::Denied(text) => advice_on_denial(text),
            Self::Full(_) => "make room in the bucket, or raise its quota",
            Self::Busy(_) => {
                "the request is repeated automatically; see whether other clients keep the store busy"
            }
            Self::Unavailable(text) if text.contains("ertificate") || text.contains("InvalidCert") => {
                "check that the certificate names the host and is vouched for (--ca), or use HTTPS_UNVERIFIED"
            }
            Self::Unavailable(_) => "check the name of the host, that it resolves, the port and the protocol",
            Self::TooShort(_) => "an object in the bucket was changed: restore it from a copy",
            Self::Unexpected(_) => "check that an S3 store answers there",
        }
    }

    /// The error and the advice.
    pub fn explained(&self) -> String {
        format!("{self} ({})", self.advice())
    }
}

/// Advice by the error code in the text. An unknown code is taken for a missing right.
fn advice_on_denial(text: &str) -> &'static str {
    const BY_CODE: [(&[&str], &str); 5] = [
        (
            &["RequestTimeTooSkewed", "RequestExpired"],
            "the clocks of this node and of the store differ too much: set them",
        ),
        (
            &["InvalidAccessKeyId", "KeyDisabled", "InvalidClientTokenId"],
            "the store does not know the access key: check it, or give another one (forebay store update)",
        ),
        (
            &["ExpiredToken", "TokenRefreshRequired", "InvalidToken", "InvalidSecurity"],
            "the key is not good any more: give another one (forebay store update)",
        ),
        (
            &["SignatureDoesNotMatch"],
            "check the secret key, the region and the kind of signature (--auth-method)",
        ),
        (&["AuthorizationHeaderMalformed"], "check the region (--region)"),
    ];
    let named = BY_CODE.iter().find(|(codes, _)| codes.iter().any(|code| text.contains(code)));
    named.map_or("the key needs the right to put, get and delete objects in the bucket", |(_, advice)| advice)
}

/// Limits the rate of transfers to and from a store. Transfers call it repeatedly.
pub trait MovePace: Send + Sync {
    /// How long to pause after `bytes` more.
    fn rest_after(&self, bytes: u64) -> Duration;
}

/// Bytes sent without a pause: timers are too coarse for a pause after every few bytes.
const STEP_BYTES: u64 = 256 << 10;

/// Keeps a transfer to its pace, even if it consists of small parts.
pub struct Steps {
    pace: Option<Arc<dyn MovePace>>,
    bytes: u64,
}

impl Steps {
    /// `None`: no pauses.
    pub fn new(pace: Option<Arc<dyn MovePace>>) -> Self {
        Self { pace, bytes: 0 }
    }

    /// Most bytes to send at once.
    pub fn bytes_max(&self) -> u64 {
        if self.pace.is_some() { STEP_BYTES } else { u64::MAX }
    }

    /// Counts `bytes` as sent. Returns how long to pause now, if at all.
    pub fn went(&mut self, bytes: u64) -> Option<Duration> {
        self.bytes += bytes;
        if self.bytes < STEP_BYTES {
            return None;
        }
        let rest = self.pace.as_ref()?.rest_after(std::mem::take(&mut self.bytes));
        Some(rest).filter(|rest| !rest.is_zero())
    }
}

/// Bytes of an object on their way to a store.
#[derive(Clone, Default)]
pub struct Outgoing {
    /// Its parts, in order.
    pub parts: Vec<Bytes>,
    /// The rate to keep to; `None`: no limit.
    pub pace: Option<Arc<dyn MovePace>>,
}

impl From<Vec<Bytes>> for Outgoing {
    fn from(parts: Vec<Bytes>) -> Self {
        Self { parts, pace: None }
    }
}

/// A bucket of an object store. All keys are below its prefix, if it has one.
pub trait ObjectStore: Send + Sync {
    /// Stores an object as a whole. After `Ok` it is as durable as the store promises.
    fn put(&self, key: String, object: Outgoing) -> BoxFuture<'_, Result<(), StoreError>>;
    /// Reads exactly `range` of an object, which must not be empty; without a range, the whole object.
    fn get(&self, key: String, range: Option<Range<u64>>) -> BoxFuture<'_, Result<Bytes, StoreError>>;
    /// Removes an object; succeeds if it does not exist.
    fn delete(&self, key: String) -> BoxFuture<'_, Result<(), StoreError>>;
    /// Tells apart the places where objects may be: it is the same number for the same place.
    fn place(&self) -> u64 {
        0
    }
    /// What brings back what is read here; `None`: the reader does so itself.
    fn brings_back(&self) -> Option<&dyn BringsBack> {
        None
    }
}

/// Brings what was read from blobs back to drives, for a client that may not do so itself.
pub trait BringsBack: Send + Sync {
    /// Bytes of a file were read from blobs. Does not wait, and may do nothing.
    fn was_read(&self, ino: Ino, off: u64, len: u64);
}

/// How the connection is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum StoreProtocol {
    /// Unencrypted.
    Http,
    /// TLS; the certificate is verified.
    Https,
    /// TLS; the certificate is not verified.
    HttpsUnverified,
}

impl StoreProtocol {
    /// The standard port.
    pub fn default_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https | Self::HttpsUnverified => 443,
        }
    }
}

/// How requests are signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreAuth {
    /// AWS signature version 4.
    #[serde(rename = "AWSSignature4")]
    V4,
    /// AWS signature version 2.
    #[serde(rename = "AWSSignature2")]
    V2,
}

/// The text is none of the choices.
#[derive(Debug, thiserror::Error)]
#[error("not one of {choices}")]
pub struct ParseChoiceError {
    choices: &'static str,
}

macro_rules! text {
    ($type:ident: $($variant:ident = $text:literal),* ; $choices:literal) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $text),* })
            }
        }

        impl FromStr for $type {
            type Err = ParseChoiceError;

            fn from_str(text: &str) -> Result<Self, ParseChoiceError> {
                match text {
                    $(text if text.eq_ignore_ascii_case($text) => Ok(Self::$variant),)*
                    _ => Err(ParseChoiceError { choices: $choices }),
                }
            }
        }
    };
}

text!(StoreProtocol: Http = "HTTP", Https = "HTTPS", HttpsUnverified = "HTTPS_UNVERIFIED"; "HTTP, HTTPS, HTTPS_UNVERIFIED");
text!(StoreAuth: V4 = "AWSSignature4", V2 = "AWSSignature2"; "AWSSignature4, AWSSignature2");

/// Limits on the requests to a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreLimits {
    /// Largest blob in bytes, header included.
    pub blob_bytes: u32,
    /// Most uploads under way.
    pub uploads_max: u16,
    /// Most downloads under way.
    pub downloads_max: u16,
    /// Most deletions under way.
    pub removals_max: u16,
    /// Most megabits per second of bodies, both directions together; `None`: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_mbps: Option<u32>,
    /// Most requests of each kind under way on all nodes together; `None`: only the limits per node apply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster_max: Option<u16>,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self {
            blob_bytes: BLOB_BYTES_MAX,
            uploads_max: 64,
            downloads_max: 64,
            removals_max: 64,
            bandwidth_mbps: None,
            cluster_max: None,
        }
    }
}

impl StoreLimits {
    /// The limits of one of `nodes` nodes: at least one request of each kind.
    pub fn of_node(self, nodes: u16) -> Self {
        let share = self.cluster_max.map_or(u16::MAX, |most| (most / nodes.max(1)).max(1));
        Self {
            uploads_max: self.uploads_max.min(share),
            downloads_max: self.downloads_max.min(share),
            removals_max: self.removals_max.min(share),
            ..self
        }
    }
}

/// The progress of a request to a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpState {
    /// It waits until the limits on requests and bandwidth allow it.
    Waiting,
    /// It is under way.
    Running,
    /// It succeeded.
    Done,
    /// All attempts failed.
    Failed,
}

/// A request to a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreOp {
    /// Numbers the requests of this process to this store.
    pub id: u64,
    /// `PUT`, `GET` or `DELETE`.
    pub verb: String,
    /// The object, without the prefix of the store.
    pub key: String,
    /// Bytes sent or expected.
    pub bytes: u64,
    /// When the caller made it, seconds since 1970.
    pub began_s: i64,
    /// How long it took, or has taken so far, with waiting.
    pub took_ms: u64,
    /// Attempts so far.
    pub attempts: u32,
    /// Its progress.
    pub state: OpState,
    /// The last error, in the store's words.
    pub problem: Option<String>,
}

/// Whether a store answers a node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SeenBy {
    /// The node's number.
    pub node: u32,
    /// Whether it answers: not after several failed requests in a row; `None`: there was no request yet.
    pub up: Option<bool>,
    /// Since when, seconds since 1970.
    pub since_s: i64,
    /// The error of the store or of the connection, if it does not answer.
    pub problem: Option<String>,
}

/// Whether a store answers: it is down only if no node reaches it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StoreHealth {
    /// Whether it answers at least one node; `None`: no node has made a request yet.
    pub up: Option<bool>,
    /// Since when, seconds since 1970.
    pub since_s: i64,
    /// The errors of the nodes that it does not answer.
    pub problem: Option<String>,
    /// The view of each node.
    pub nodes: Vec<SeenBy>,
}

impl StoreHealth {
    /// Combines the views of nodes.
    pub fn of(nodes: Vec<SeenBy>) -> Self {
        let since = |up: bool| nodes.iter().filter(move |seen| seen.up == Some(up)).map(|seen| seen.since_s);
        // Up since the first node reached it, down since the last node lost it.
        let (up, since_s) = match (since(true).min(), since(false).max()) {
            (Some(since_s), _) => (Some(true), since_s),
            (None, Some(since_s)) => (Some(false), since_s),
            (None, None) => (None, 0),
        };
        let told = nodes.iter().filter_map(|seen| seen.problem.as_ref().map(|problem| (seen.node, problem)));
        let problem = match (up, nodes.len()) {
            (Some(true), 2..) => {
                let alone = told.map(|(node, problem)| format!("node {node} does not reach it: {problem}"));
                Some(alone.collect::<Vec<_>>().join("; ")).filter(|text| !text.is_empty())
            }
            _ => told.map(|(_, problem)| problem.clone()).next(),
        };
        Self { up, since_s, problem, nodes }
    }
}

/// How to reach a store, without the secret key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreAddress {
    /// How the connection is made.
    pub protocol: StoreProtocol,
    /// Its name or address.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Its bucket. Case counts.
    pub bucket: String,
    /// All keys begin with this and a slash; empty: no prefix.
    pub prefix: String,
    /// Part of signatures of version 4.
    pub region: String,
    /// How requests are signed.
    pub auth: StoreAuth,
    /// Id of the key that signs requests.
    pub access_key: String,
    /// Certificates (PEM) to trust for it, beside those of the system.
    pub ca: Option<String>,
    /// Limits on its requests.
    pub limits: StoreLimits,
}

impl StoreAddress {
    /// The number of the place where its objects are, not 0.
    pub fn place(&self) -> u64 {
        let Self { host, port, bucket, prefix, .. } = self;
        let text = format!("{host}\n{port}\n{bucket}\n{prefix}");
        let sum = |part: &str| u64::from(crc32c([part, &text].concat().as_bytes()));
        // Sums of two texts, because one may be the same by chance.
        (sum("1") << 32 | sum("2")).max(1)
    }
}

/// One step of a store's test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreCheck {
    /// `PUT`, `GET` or `DELETE`.
    pub verb: String,
    /// The object, without the prefix of the store.
    pub key: String,
    /// The error, in the store's words; `None`: it worked.
    pub problem: Option<String>,
    /// What to check if it failed.
    pub advice: Option<String>,
}

/// A measurement of a store's speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpeedPlan {
    /// Bytes of each object.
    pub object_bytes: u32,
    /// Requests under way.
    pub parallel: u16,
    /// Time for puts, and then again for reads. Requests under way at its end are finished and counted.
    pub seconds: u16,
}

/// The measured speed of a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreSpeed {
    /// The measurement.
    pub plan: SpeedPlan,
    /// Median time of a small request, with one request at a time.
    pub round_trip_us: u64,
    /// Bytes per second put.
    pub put_bytes_per_s: u64,
    /// Bytes per second read.
    pub get_bytes_per_s: u64,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[track_caller]
    fn check_denied(code: &str, expected: &str) {
        let explained = StoreError::Denied(format!("status 403, {code}: why")).explained();
        assert!(explained.starts_with("refused: status 403") && explained.contains(expected), "{explained}");
    }

    #[test]
    fn refusals_say_what_to_do() {
        check_denied("InvalidAccessKeyId", "does not know the access key");
        check_denied("SignatureDoesNotMatch", "secret key");
        check_denied("ExpiredToken", "not good any more");
        check_denied("RequestTimeTooSkewed", "clocks");
        check_denied("AuthorizationHeaderMalformed", "--region");
        check_denied("AccessDenied", "right to put, get and delete");
    }

    #[test]
    fn a_store_is_down_when_no_node_reaches_it() {
        let seen = |node, up: Option<bool>, since_s| {
            let problem = (up == Some(false)).then(|| format!("why {node}"));
            SeenBy { node, up, since_s, problem }
        };
        let sum = |nodes: &[SeenBy]| {
            let health = StoreHealth::of(nodes.to_vec());
            assert_eq!(health.nodes, nodes);
            (health.up, health.since_s, health.problem)
        };
        let (up, down, new) = (Some(true), Some(false), None);
        assert_eq!(sum(&[]), (None, 0, None));
        assert_eq!(sum(&[seen(0, new, 0)]), (None, 0, None));
        assert_eq!(sum(&[seen(0, up, 5)]), (up, 5, None));
        assert_eq!(sum(&[seen(0, down, 5)]), (down, 5, Some("why 0".to_owned())));
        let alone = "node 1 does not reach it: why 1".to_owned();
        assert_eq!(sum(&[seen(0, up, 5), seen(1, down, 9), seen(2, up, 3)]), (up, 3, Some(alone)));
        assert_eq!(sum(&[seen(0, down, 5), seen(1, down, 9)]), (down, 9, Some("why 0".to_owned())));
        assert_eq!(sum(&[seen(0, down, 5), seen(1, new, 0)]).0, down);
    }

    #[test]
    fn small_parts_are_counted_together() {
        struct Pace;
        impl MovePace for Pace {
            fn rest_after(&self, bytes: u64) -> Duration {
                Duration::from_nanos(bytes)
            }
        }
        let mut steps = Steps::new(Some(Arc::new(Pace)));
        let rests: Vec<Duration> = (0..128).filter_map(|_| steps.went(4096)).collect();
        assert_eq!(rests, [Duration::from_nanos(STEP_BYTES); 2]);
        assert_eq!(steps.went(1 << 20), Some(Duration::from_nanos(1 << 20)));
        assert_eq!(Steps::new(None).went(1 << 30), None);
    }

    #[test]
    fn nodes_share_the_limit_of_the_cluster() {
        let limits = |cluster_max| StoreLimits { downloads_max: 7, cluster_max, ..StoreLimits::default() };
        let of = |cluster_max, nodes| {
            let StoreLimits { uploads_max, downloads_max, removals_max, .. } =
                limits(cluster_max).of_node(nodes);
            (uploads_max, downloads_max, removals_max)
        };
        assert_eq!(of(None, 100), (64, 7, 64));
        assert_eq!(of(Some(40), 4), (10, 7, 10));
        assert_eq!(of(Some(3), 8), (1, 1, 1));
        assert_eq!(of(Some(1000), 1), (64, 7, 64));
    }

    #[test]
    fn names_of_protocols_and_signatures_parse_back() {
        for protocol in [StoreProtocol::Http, StoreProtocol::Https, StoreProtocol::HttpsUnverified] {
            assert_eq!(protocol.to_string().parse::<StoreProtocol>().unwrap(), protocol);
        }
        assert_eq!("awssignature2".parse::<StoreAuth>().unwrap(), StoreAuth::V2);
        assert!("FTP".parse::<StoreProtocol>().is_err());
    }
}
