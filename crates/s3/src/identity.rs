//! Users, access keys and policies as the S3 protocol needs them, and the audit record of each request.
//!
//! The node implements [`Identities`] and [`Audit`]; the protocol front only calls them. Each request takes these steps
//! in order: [`AuditEntry::begin`], [`Identities::secret`] to verify the signature, [`Identities::identify`] to find
//! the owner of the key, [`Identities::may`] before the operation runs. The audit entry is written when it is dropped,
//! after errors and cancellation too.

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

/// A user as a request sees it.
#[derive(Debug, Clone)]
pub struct User {
    /// Number of the user. A removed user's number is never used again; a name may be.
    pub id: u32,
    /// Name of the user.
    pub name: Arc<str>,
    /// User number on the filesystem; 0 passes all permission checks there.
    pub uid: u32,
    /// Primary group: objects that the user creates belong to it.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// An administrator may do everything that no bucket policy and no session policy denies.
    pub admin: bool,
    /// The user's own policy. Bucket policies may grant more.
    pub policy: Option<Arc<Policy>>,
}

/// The sender of a request.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The user.
    pub user: Arc<User>,
    /// The access key that was used.
    pub access_key: Arc<str>,
    /// Policies that limit short-lived keys: each of them must allow a request, too.
    pub limits: Vec<Arc<Policy>>,
    /// Whether the key came from the token service.
    pub is_session: bool,
}

/// Why an access key does not identify a user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// There is no such key, or it or its user is disabled. S3: `InvalidAccessKeyId`.
    #[error("access key is unknown or disabled")]
    UnknownKey,
    /// The key has expired. S3: `ExpiredToken`.
    #[error("access key has expired")]
    Expired,
    /// The session token is missing, damaged, or belongs to another key. S3: `InvalidToken`.
    #[error("session token does not belong to the access key")]
    InvalidToken,
}

/// The facts of a request that policies look at.
#[derive(Debug, Clone, Copy)]
pub struct PolicyRequest<'a> {
    /// The sender; `None` for a request without a signature.
    pub identity: Option<&'a Identity>,
    /// For example `s3:GetObject`.
    pub action: &'a str,
    /// Empty for requests without a bucket, such as the list of all buckets.
    pub bucket: &'a str,
    /// The object's key; `None` for requests about the bucket itself.
    pub key: Option<&'a str>,
    /// Whether the sender owns the bucket.
    pub owns_bucket: bool,
    /// The policy of the bucket.
    pub bucket_policy: Option<&'a Policy>,
    /// Address of the client.
    pub source_ip: Option<IpAddr>,
    /// Whether the request came through TLS.
    pub is_secure: bool,
    /// Seconds since 1970.
    pub now_s: i64,
    /// `prefix` parameter of a listing.
    pub prefix: Option<&'a str>,
    /// `delimiter` parameter of a listing.
    pub delimiter: Option<&'a str>,
    /// `max-keys` parameter of a listing.
    pub max_keys: Option<u32>,
    /// Further facts of the request.
    pub more: PolicyFacts<'a>,
}

/// Further facts that policies may look at.
#[derive(Debug, Clone, Copy, Default)]
pub struct PolicyFacts<'a> {
    /// Headers of the request; `None` in a check about a second object, such as the source of a copy.
    pub headers: Option<&'a HeaderMap>,
    /// `Referer` header.
    pub referer: Option<&'a str>,
    /// `User-Agent` header.
    pub user_agent: Option<&'a str>,
    /// Tags of the existing object; `None` if there is no object, or no policy looks at its tags.
    pub existing_tags: Option<&'a [(String, String)]>,
    /// Tags that the request sets on an object.
    pub request_tags: Option<&'a [(String, String)]>,
}

/// What the policies say about a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// No policy denies the request, and a policy allows it or the sender is an administrator or the bucket's owner.
    Allowed,
    /// A policy denies it explicitly.
    Denied,
    /// No policy allows it.
    NotAllowed,
}

impl Verdict {
    /// Whether the request may run.
    pub fn is_allowed(self) -> bool {
        self == Self::Allowed
    }
}

/// Users, their keys and policies. On the path of every request: nothing here blocks.
pub trait Identities: Send + Sync {
    /// Whether the users, keys and policies are known as they are now.
    fn is_current(&self) -> bool;

    /// The secret that signs requests with this access key; `None` if the key is unknown, or if the key or its user is
    /// disabled. A verified signature only proves that the sender has the secret: [`Identities::identify`] must follow.
    fn secret(&self, access_key: &str) -> Option<Secret>;

    /// Finds the owner of the key. `session_token` is `x-amz-security-token`, as header, query parameter or form field.
    fn identify(&self, access_key: &str, session_token: Option<&str>) -> Result<Identity, IdentityError>;

    /// Whether the request may run. The owner of the ledger checks permissions of the filesystem later.
    fn may(&self, request: &PolicyRequest<'_>) -> Verdict;
}

/// One request in the audit log.
#[derive(Debug, Clone, Default)]
pub struct AuditRecord {
    /// Start of the request, nanoseconds since 1970.
    pub began_ns: i64,
    /// Duration of the request.
    pub duration_ns: u64,
    /// The request id in the response.
    pub request_id: String,
    /// Name of the user; empty if the request was not identified.
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
    /// Address of the client.
    pub source_ip: Option<IpAddr>,
}

/// Takes audit records. Bounded: room is reserved before a request is served.
pub trait Audit: Send + Sync {
    /// Reserves room for one record, unless the queue is full.
    fn try_reserve(&self) -> bool;

    /// Reserves room for one record and waits for it, for a limited time; the implementation says what follows a
    /// timeout.
    fn reserve(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// Takes a record for which room was reserved. Never blocks.
    fn record(&self, record: AuditRecord);
}

/// A record that is written when it is dropped, also when the request is cancelled.
pub struct AuditEntry {
    audit: Arc<dyn Audit>,
    /// The facts known so far.
    pub record: AuditRecord,
}

impl AuditEntry {
    /// Begins the record of a request; waits while the log is behind.
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
