//! What is asked of an object store (whole objects in, ranges out, removal), and how one is reached.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use layout::BLOB_BYTES_MAX;
use serde::{Deserialize, Serialize};

use crate::BoxFuture;

/// The code of an error that is about the bucket, not about an object in it.
pub const NO_BUCKET: &str = "NoSuchBucket";

/// Why a store did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no such object. The text is the store's.
    #[error("no such object or bucket: {0}")]
    NotFound(String),
    /// The store knows the caller and refuses, or does not know it: a person must act.
    #[error("refused: {0}")]
    Denied(String),
    /// The bucket has no room: nothing can be stored until somebody makes some.
    #[error("the store is full: {0}")]
    Full(String),
    /// The store wants to be asked less often.
    #[error("the store is busy: {0}")]
    Busy(String),
    /// Nothing came back in time, or not all of it; or the store failed. Asking again may help.
    #[error("no answer: {0}")]
    Unavailable(String),
    /// The object ends before the range that was asked for: it is not what was stored.
    #[error("the object is too short: {0}")]
    TooShort(String),
    /// The store gave an answer that makes no sense.
    #[error("unexpected answer: {0}")]
    Unexpected(String),
}

impl StoreError {
    /// Whether asking again, a little later, may help.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Busy(_) | Self::Unavailable(_))
    }

    /// Whether the store says that it has no such object; not if it says that it has no such bucket.
    pub fn is_about_object(&self) -> bool {
        matches!(self, Self::NotFound(text) if !text.contains(NO_BUCKET))
    }

    /// What people look at first, by what they are told.
    pub fn advice(&self) -> &'static str {
        match self {
            Self::NotFound(_) => "check the name of the bucket: case counts, and it must exist",
            Self::Denied(text) => advice_on_denial(text),
            Self::Full(_) => "make room in the bucket, or raise its quota",
            Self::Busy(_) => "the store is asked again by itself; see whether others keep it busy",
            Self::Unavailable(text) if text.contains("ertificate") || text.contains("InvalidCert") => {
                "check that the certificate names the host and is vouched for (--ca), or use HTTPS_UNVERIFIED"
            }
            Self::Unavailable(_) => "check the name of the host, that it resolves, the port and the protocol",
            Self::TooShort(_) => "somebody has changed what is in the bucket: restore the object from a copy",
            Self::Unexpected(_) => "check that an S3 store answers there",
        }
    }

    /// What went wrong and what to do about it.
    pub fn explained(&self) -> String {
        format!("{self} ({})", self.advice())
    }
}

/// By the codes that stores give. What says nothing of the key, its secret or the time is about rights.
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

/// How fast bytes may go to a store, or come from it: it is asked again and again meanwhile.
pub trait MovePace: Send + Sync {
    /// How long to rest after `bytes` more.
    fn rest_after(&self, bytes: u64) -> Duration;
}

/// Bytes that go without a rest: timers are too coarse to rest after each few.
const STEP_BYTES: u64 = 256 << 10;

/// Keeps to a pace, in however small parts the bytes go.
pub struct Steps {
    pace: Option<Arc<dyn MovePace>>,
    bytes: u64,
}

impl Steps {
    /// `None`: there are no rests.
    pub fn new(pace: Option<Arc<dyn MovePace>>) -> Self {
        Self { pace, bytes: 0 }
    }

    /// What may go at once at most.
    pub fn bytes_max(&self) -> u64 {
        if self.pace.is_some() { STEP_BYTES } else { u64::MAX }
    }

    /// So many bytes went. Says how long to rest now, if at all.
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
    /// In parts that follow each other.
    pub parts: Vec<Bytes>,
    /// How fast they may go; `None`: as fast as they can.
    pub pace: Option<Arc<dyn MovePace>>,
}

impl From<Vec<Bytes>> for Outgoing {
    fn from(parts: Vec<Bytes>) -> Self {
        Self { parts, pace: None }
    }
}

/// An object store with a bucket, and a prefix if it has one, that all keys are below.
pub trait ObjectStore: Send + Sync {
    /// Stores an object: afterwards it is there as a whole and durable as far as the store promises.
    fn put(&self, key: String, object: Outgoing) -> BoxFuture<'_, Result<(), StoreError>>;
    /// Bytes of an object: exactly the range, which is not empty; without one, all of it.
    fn get(&self, key: String, range: Option<Range<u64>>) -> BoxFuture<'_, Result<Bytes, StoreError>>;
    /// Removes an object; succeeds if it does not exist.
    fn delete(&self, key: String) -> BoxFuture<'_, Result<(), StoreError>>;
}

/// How the connection is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum StoreProtocol {
    /// Nothing is encrypted.
    Http,
    /// TLS, and the certificate must be vouched for.
    Https,
    /// TLS with whoever answers.
    HttpsUnverified,
}

impl StoreProtocol {
    /// The port that it has unless another one is named.
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

/// How much is asked of a store at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreLimits {
    /// Largest blob in bytes, header included.
    pub blob_bytes: u32,
    /// Uploads under way at most.
    pub uploads_max: u16,
    /// Downloads under way at most.
    pub downloads_max: u16,
    /// Removals under way at most.
    pub removals_max: u16,
    /// Bytes per second of bodies, both ways together, in millions of bits; `None`: as fast as it goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_mbps: Option<u32>,
    /// Requests of each kind that all nodes together have under way at most; `None`: what each of them may have.
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
    /// What each of so many nodes keeps to: at least one request of each kind.
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

/// How far a request to a store is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpState {
    /// It waits for its turn: so many of its kind, or so much bandwidth, are taken.
    Waiting,
    /// It is under way.
    Running,
    /// It was answered as it should be.
    Done,
    /// It was not, after all attempts.
    Failed,
}

/// A request to a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreOp {
    /// Counts requests of the process to this store.
    pub id: u64,
    /// `PUT`, `GET` or `DELETE`.
    pub verb: String,
    /// The object, without the prefix of the store.
    pub key: String,
    /// Bytes that go out or are expected.
    pub bytes: u64,
    /// When it was asked for, seconds since 1970.
    pub began_s: i64,
    /// How long it took, or takes so far, waiting included.
    pub took_ms: u64,
    /// Attempts so far.
    pub attempts: u32,
    /// How far it is.
    pub state: OpState,
    /// What went wrong last, in the store's words.
    pub problem: Option<String>,
}

/// Whether a store answers a node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SeenBy {
    /// The node's number.
    pub node: u32,
    /// It did when it was asked last; `None`: it was not asked yet.
    pub up: Option<bool>,
    /// Since when, seconds since 1970.
    pub since_s: i64,
    /// What it, or the way to it, says if not.
    pub problem: Option<String>,
}

/// Whether a store answers: it is down only if no node reaches it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StoreHealth {
    /// It answered a node when that asked last; `None`: nobody has asked yet.
    pub up: Option<bool>,
    /// Since when, seconds since 1970.
    pub since_s: i64,
    /// What it, or the way to it, says to those that it does not answer.
    pub problem: Option<String>,
    /// As each node sees it.
    pub nodes: Vec<SeenBy>,
}

impl StoreHealth {
    /// What nodes see, taken together.
    pub fn of(nodes: Vec<SeenBy>) -> Self {
        let since = |up: bool| nodes.iter().filter(move |seen| seen.up == Some(up)).map(|seen| seen.since_s);
        // Up since the first of them reaches it, down since the last of them did.
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

/// How a store is reached, but for the secret.
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
    /// What all keys begin with, followed by a slash; empty for nothing.
    pub prefix: String,
    /// Part of signatures of version 4.
    pub region: String,
    /// How requests are signed.
    pub auth: StoreAuth,
    /// Id of the key that they are signed with.
    pub access_key: String,
    /// Certificates (PEM) that vouch for it, beside those of the system.
    pub ca: Option<String>,
    /// How much is asked of it at a time.
    pub limits: StoreLimits,
}

/// One step of trying a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreCheck {
    /// `PUT`, `GET` or `DELETE`.
    pub verb: String,
    /// The object, without the prefix of the store.
    pub key: String,
    /// What went wrong, in the store's words; `None`: it worked.
    pub problem: Option<String>,
    /// What to look at then.
    pub advice: Option<String>,
}

/// What is done to see how fast a store is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpeedPlan {
    /// Bytes of each object.
    pub object_bytes: u32,
    /// Requests under way.
    pub parallel: u16,
    /// How long objects are put, and then got. What is under way by then is finished and counted.
    pub seconds: u16,
}

/// How fast a store is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreSpeed {
    /// What was done.
    pub plan: SpeedPlan,
    /// Median time of a request for a few bytes, one after another.
    pub round_trip_us: u64,
    /// Bytes per second in.
    pub put_bytes_per_s: u64,
    /// Bytes per second out.
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
    fn small_parts_rest_together() {
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
    fn nodes_share_what_the_cluster_may_have_under_way() {
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
    fn names_of_protocols_and_signatures_come_back() {
        for protocol in [StoreProtocol::Http, StoreProtocol::Https, StoreProtocol::HttpsUnverified] {
            assert_eq!(protocol.to_string().parse::<StoreProtocol>().unwrap(), protocol);
        }
        assert_eq!("awssignature2".parse::<StoreAuth>().unwrap(), StoreAuth::V2);
        assert!("FTP".parse::<StoreProtocol>().is_err());
    }
}
