//! Who asks, whether they may, and the account of what they did: what the protocol needs of users, keys and policies.
//!
//! The node implements [`Identities`] and [`Audit`]; the protocol front only calls them. A request is served in this
//! order: [`AuditEntry::begin`], [`Identities::secret`] to verify the signature, [`Identities::identify`] to learn whose
//! it is, [`Identities::may`] before the operation runs. The entry is written when it is dropped, whatever happened.

use std::fmt;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use hyper::header::HeaderMap;

use crate::policy::Policy;

/// A secret access key. Never printed.
#[derive(Clone)]
pub struct Secret(Arc<str>);

impl Secret {
    /// Wraps a secret.
    pub fn new(secret: impl Into<Arc<str>>) -> Self {
        Self(secret.into())
    }

    /// The secret itself: for signing and sealing, not for logs.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Secret(..)")
    }
}

/// A user, as far as requests go.
#[derive(Debug, Clone)]
pub struct User {
    /// Never used again, unlike the name.
    pub id: u32,
    /// What people call it.
    pub name: Arc<str>,
    /// User number on the filesystem; 0 passes all permission checks there.
    pub uid: u32,
    /// Group of what it creates.
    pub gid: u32,
    /// Its other groups.
    pub groups: Vec<u32>,
    /// May do everything that no bucket policy and no session policy denies.
    pub admin: bool,
    /// What it may do, besides what bucket policies grant.
    pub policy: Option<Arc<Policy>>,
}

/// Who sent a request.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The user.
    pub user: Arc<User>,
    /// The access key that was used.
    pub access_key: Arc<str>,
    /// What short-lived keys are limited to: each of these must allow a request, too.
    pub limits: Vec<Arc<Policy>>,
    /// Whether the key came from the token service.
    pub is_session: bool,
}

/// Why an access key does not identify anybody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// There is no such key, or it or its user is disabled. S3: `InvalidAccessKeyId`.
    #[error("access key is unknown or disabled")]
    UnknownKey,
    /// Its time is over. S3: `ExpiredToken`.
    #[error("access key has expired")]
    Expired,
    /// The session token is missing, damaged, or belongs to another key. S3: `InvalidToken`.
    #[error("session token does not belong to the access key")]
    InvalidToken,
}

/// What policies look at.
#[derive(Debug, Clone, Copy)]
pub struct PolicyRequest<'a> {
    /// Who asks; `None` for a request without a signature.
    pub identity: Option<&'a Identity>,
    /// For example `s3:GetObject`.
    pub action: &'a str,
    /// Empty for requests about no bucket, such as the list of all.
    pub bucket: &'a str,
    /// The object's key; `None` for requests about the bucket itself.
    pub key: Option<&'a str>,
    /// Whether the bucket belongs to who asks.
    pub owns_bucket: bool,
    /// The policy of the bucket.
    pub bucket_policy: Option<&'a Policy>,
    /// Where the request came from.
    pub source_ip: Option<IpAddr>,
    /// Whether it came through TLS.
    pub is_secure: bool,
    /// Seconds since 1970.
    pub now_s: i64,
    /// Of listings.
    pub prefix: Option<&'a str>,
    /// Of listings.
    pub delimiter: Option<&'a str>,
    /// Of listings.
    pub max_keys: Option<u32>,
    /// What else is known of it.
    pub more: PolicyFacts<'a>,
}

/// What policies may look at besides.
#[derive(Debug, Clone, Copy, Default)]
pub struct PolicyFacts<'a> {
    /// The headers, of the request itself and not of what it asks for besides.
    pub headers: Option<&'a HeaderMap>,
    /// Where the client was sent from.
    pub referer: Option<&'a str>,
    /// The client's program.
    pub user_agent: Option<&'a str>,
    /// Tags of the object that is there; `None` if there is none, or no policy looks at them.
    pub existing_tags: Option<&'a [(String, String)]>,
    /// Tags that the request gives to an object.
    pub request_tags: Option<&'a [(String, String)]>,
}

/// Whether a request may be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Some policy allows it, or an administrator or the bucket's owner asks, and none denies it.
    Allowed,
    /// A policy denies it explicitly.
    Denied,
    /// No policy allows it.
    NotAllowed,
}

impl Verdict {
    /// Whether it may be done.
    pub fn is_allowed(self) -> bool {
        self == Self::Allowed
    }
}

/// Users, their keys and policies. On the path of every request: nothing here blocks.
pub trait Identities: Send + Sync {
    /// What requests with this access key are signed with; `None` if the key is unknown, or it or its user disabled.
    /// A signature that verifies says that the sender has the secret, and nothing else: [`Identities::identify`] follows.
    fn secret(&self, access_key: &str) -> Option<Secret>;

    /// Whose key it is. `session_token` is `x-amz-security-token`, as header, query parameter or form field.
    fn identify(&self, access_key: &str, session_token: Option<&str>) -> Result<Identity, IdentityError>;

    /// Whether the request may be done. Permissions of the filesystem are checked later, by the owner.
    fn may(&self, request: &PolicyRequest<'_>) -> Verdict;
}

/// One request, for the audit log.
#[derive(Debug, Clone, Default)]
pub struct AuditRecord {
    /// When it began, nanoseconds since 1970.
    pub began_ns: i64,
    /// How long it took.
    pub duration_ns: u64,
    /// As the response names it.
    pub request_id: String,
    /// Who asked; empty if nobody was identified.
    pub user: Option<Arc<str>>,
    /// The access key that was given, valid or not.
    pub access_key: Option<Arc<str>>,
    /// The operation, for example `GetObject`.
    pub operation: &'static str,
    /// The bucket.
    pub bucket: Option<String>,
    /// The object's key.
    pub key: Option<String>,
    /// HTTP status; 0 if the connection broke before there was one.
    pub status: u16,
    /// The S3 error code of a failure.
    pub error: Option<String>,
    /// Bytes of the request's body.
    pub bytes_in: u64,
    /// Bytes of the response's body.
    pub bytes_out: u64,
    /// Where it came from.
    pub source_ip: Option<IpAddr>,
}

/// Takes the account of requests. Bounded: room is reserved before a request is served.
pub trait Audit: Send + Sync {
    /// Reserves room for one record, unless the queue is full.
    fn try_reserve(&self) -> bool;

    /// Reserves room for one record, waiting for it for a limited time; see the implementation for what happens then.
    fn reserve(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// Takes a record that room was reserved for. Never blocks.
    fn record(&self, record: AuditRecord);
}

/// A record that is written when it is dropped, also when the request is cancelled.
pub struct AuditEntry {
    audit: Arc<dyn Audit>,
    /// What is known by now.
    pub record: AuditRecord,
}

impl AuditEntry {
    /// Begins the account of a request; waits while the log is behind.
    pub async fn begin(audit: Arc<dyn Audit>) -> Self {
        if !audit.try_reserve() {
            audit.reserve().await;
        }
        Self { audit, record: AuditRecord::default() }
    }
}

impl Drop for AuditEntry {
    fn drop(&mut self) {
        self.audit.record(std::mem::take(&mut self.record));
    }
}
