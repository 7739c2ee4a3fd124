//! Authorization: the sender of a request, its permissions, and its bucket.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use async_trait::async_trait;
use client::object::{Caller, Conditions, ObjectError};
use hyper::Uri;
use hyper::header::{self, HeaderMap, HeaderValue};
use s3s::access::{S3Access, S3AccessContext};
use s3s::auth::{S3Auth, SecretKey};
use s3s::host::{S3Host, VirtualHost};
use s3s::validation::NameValidation;
use s3s::{S3Error, S3Result, s3_error};

use crate::bucket::Bucket;
use crate::error::{custom, object_error};
use crate::gate::{PROBED, RequestContext, Requester, Services};
use crate::identity::{Identities, Identity, IdentityError, PolicyFacts, PolicyRequest, Verdict};
use crate::ops::object_name;
use crate::ops::tags::{Tags, parse_header};
use crate::screen::{self, Signed};

const NAME_BYTES_MAX: usize = 255;

/// Operations by name, each with the action that names it in policies.
const ACTIONS: &[(&str, &str)] = &[
    ("AbortMultipartUpload", "s3:AbortMultipartUpload"),
    ("CompleteMultipartUpload", "s3:PutObject"),
    ("CopyObject", "s3:PutObject"),
    ("CreateBucket", "s3:CreateBucket"),
    ("CreateMultipartUpload", "s3:PutObject"),
    ("DeleteBucket", "s3:DeleteBucket"),
    ("DeleteBucketCors", "s3:PutBucketCORS"),
    ("DeleteBucketPolicy", "s3:DeleteBucketPolicy"),
    ("DeleteBucketTagging", "s3:PutBucketTagging"),
    ("DeleteObject", "s3:DeleteObject"),
    ("DeleteObjectTagging", "s3:DeleteObjectTagging"),
    ("DeleteObjects", ""),
    ("GetBucketAccelerateConfiguration", "s3:GetAccelerateConfiguration"),
    ("GetBucketAcl", "s3:GetBucketAcl"),
    ("GetBucketCors", "s3:GetBucketCORS"),
    ("GetBucketEncryption", "s3:GetEncryptionConfiguration"),
    ("GetBucketLifecycleConfiguration", "s3:GetLifecycleConfiguration"),
    ("GetBucketLocation", "s3:GetBucketLocation"),
    ("GetBucketLogging", "s3:GetBucketLogging"),
    ("GetBucketNotificationConfiguration", "s3:GetBucketNotification"),
    ("GetBucketOwnershipControls", "s3:GetBucketOwnershipControls"),
    ("GetBucketPolicy", "s3:GetBucketPolicy"),
    ("GetBucketPolicyStatus", "s3:GetBucketPolicyStatus"),
    ("GetBucketReplication", "s3:GetReplicationConfiguration"),
    ("GetBucketRequestPayment", "s3:GetBucketRequestPayment"),
    ("GetBucketTagging", "s3:GetBucketTagging"),
    ("GetBucketVersioning", "s3:GetBucketVersioning"),
    ("GetBucketWebsite", "s3:GetBucketWebsite"),
    ("GetObject", "s3:GetObject"),
    ("GetObjectAcl", "s3:GetObjectAcl"),
    ("GetObjectAttributes", "s3:GetObjectAttributes"),
    ("GetObjectLockConfiguration", "s3:GetBucketObjectLockConfiguration"),
    ("GetObjectTagging", "s3:GetObjectTagging"),
    ("GetPublicAccessBlock", "s3:GetBucketPublicAccessBlock"),
    ("HeadBucket", "s3:ListBucket"),
    ("HeadObject", "s3:GetObject"),
    ("ListBuckets", "s3:ListAllMyBuckets"),
    ("ListMultipartUploads", "s3:ListBucketMultipartUploads"),
    ("ListObjectVersions", "s3:ListBucketVersions"),
    ("ListObjects", "s3:ListBucket"),
    ("ListObjectsV2", "s3:ListBucket"),
    ("ListParts", "s3:ListMultipartUploadParts"),
    ("PostObject", ""),
    ("PutBucketAcl", "s3:PutBucketAcl"),
    ("PutBucketCors", "s3:PutBucketCORS"),
    ("PutBucketPolicy", "s3:PutBucketPolicy"),
    ("PutBucketTagging", "s3:PutBucketTagging"),
    ("PutObject", "s3:PutObject"),
    ("PutObjectAcl", "s3:PutObjectAcl"),
    ("PutObjectTagging", ""),
    ("UploadPart", "s3:PutObject"),
    ("UploadPartCopy", "s3:PutObject"),
];

/// Actions whose policies may look at the tags of the existing object.
const TAGGED_ACTIONS: &[&str] = &[
    "s3:DeleteObjectTagging",
    "s3:GetObject",
    "s3:GetObjectAcl",
    "s3:GetObjectAttributes",
    "s3:GetObjectTagging",
    "s3:PutObjectAcl",
    "s3:PutObjectTagging",
];

/// Gives the protocol library the secrets to verify signatures with.
pub(crate) struct Secrets {
    pub(crate) identities: Arc<dyn Identities>,
}

#[async_trait]
impl S3Auth for Secrets {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        match self.identities.secret(access_key) {
            Some(secret) => Ok(SecretKey::from(secret.expose())),
            None => Err(s3_error!(
                InvalidAccessKeyId,
                "The AWS Access Key Id you provided does not exist in our records."
            )),
        }
    }
}

/// Authorizes requests with a valid signature, and requests without one.
pub(crate) struct Access {
    pub(crate) core: Arc<Services>,
}

#[async_trait]
impl S3Access for Access {
    async fn check(&self, cx: &mut S3AccessContext<'_>) -> S3Result<()> {
        let context = context(cx.extensions_mut())?;
        let name = cx.s3_op().name();
        let known = ACTIONS.binary_search_by_key(&name, |(operation, _)| operation);
        let (operation, action) = known.map_or(("Other", "s3:Other"), |at| ACTIONS[at]);
        let path = cx.s3_path();
        let (bucket, key) = match path.as_object() {
            Some((bucket, key)) => (Some(bucket), Some(key)),
            None => (path.as_bucket(), None),
        };
        let question = Question { operation, action, bucket, key, uri: cx.uri(), headers: cx.headers() };
        let access_key = cx.credentials().map(|credentials| credentials.access_key.clone());
        self.core.authorize(&context, &question, access_key.as_deref(), name).await
    }
}

/// The context that was attached to a request.
pub(crate) fn context(extensions: &hyper::http::Extensions) -> S3Result<Arc<RequestContext>> {
    extensions.get::<Arc<RequestContext>>().cloned().ok_or_else(|| s3_error!(InternalError))
}

/// What authorization must decide.
pub(crate) struct Question<'a> {
    pub(crate) operation: &'static str,
    /// Empty: the operation checks each key later.
    pub(crate) action: &'a str,
    pub(crate) bucket: Option<&'a str>,
    pub(crate) key: Option<&'a str>,
    pub(crate) uri: &'a Uri,
    pub(crate) headers: &'a HeaderMap,
}

impl Services {
    /// Finds the sender and checks its permission.
    pub(crate) async fn authorize(
        &self,
        context: &RequestContext,
        question: &Question<'_>,
        access_key: Option<&str>,
        name: &str,
    ) -> S3Result<()> {
        if context.is_probe {
            return Err(custom("Probed", PROBED, ""));
        }
        {
            let mut told = context.facts.lock().expect("no holder of this lock panics");
            told.operation = question.operation;
            told.access_key = access_key.map(Arc::from);
            told.bucket = question.bucket.map(str::to_owned);
            told.key = question.key.map(str::to_owned);
        }
        if let Some(form) = context.unread.form().filter(|_| question.operation == "PostObject") {
            screen::check_form(form)?;
        }
        let identity = match access_key {
            Some(access_key) => Some(self.identify(context, access_key, question.uri, question.headers)?),
            None => None,
        };
        let found = match question.bucket {
            Some(bucket) if question.operation != "CreateBucket" => Some(self.buckets.get(bucket).await),
            _ => None,
        };
        // Without a signature, a client must not learn which buckets exist.
        let bucket = match found {
            Some(Err(_)) if identity.is_none() => return Err(unsigned()),
            Some(Err(error)) if question.operation == "Other" => return Err(error),
            Some(Ok(bucket)) => Some(bucket),
            Some(Err(error)) => {
                self.may(context, identity.as_ref(), None, question).await?;
                return Err(error);
            }
            None => None,
        };
        if question.operation == "Other" {
            return match identity {
                Some(_) => Err(s3_error!(NotImplemented, "{name} is not implemented.")),
                None => Err(unsigned()),
            };
        }
        screen::check_parameters(question.operation, question.uri)?;
        screen::check_encryption(question.operation, question.headers)?;
        if !question.action.is_empty() {
            self.may(context, identity.as_ref(), bucket.as_deref(), question).await?;
        } else if identity.is_none() && bucket.as_ref().is_none_or(|bucket| bucket.policy.is_none()) {
            return Err(unsigned());
        }
        let expected = question.headers.get("x-amz-expected-bucket-owner");
        if let (Some(bucket), Some(owner)) = (&bucket, expected) {
            self.check_owner(bucket, owner.to_str().unwrap_or_default()).await?;
        }
        let copied = |name| question.headers.get(name).cloned();
        let (referer, user_agent) = (copied(header::REFERER), copied(header::USER_AGENT));
        let _ = context.requester.set(Requester { identity, bucket, referer, user_agent });
        Ok(())
    }

    /// Refuses a bucket whose owner is not the one that the client expects (`x-amz-expected-bucket-owner`).
    pub(crate) async fn check_owner(&self, bucket: &Bucket, expected: &str) -> S3Result<()> {
        let attr = self.client.getattr(bucket.ino).await.map_err(|error| object_error(error.into()))?;
        match expected == attr.uid.to_string() {
            true => Ok(()),
            false => {
                Err(s3_error!(AccessDenied, "Access Denied: the bucket has another owner, {}.", attr.uid))
            }
        }
    }

    /// Finds the owner of an access key.
    pub(crate) fn identify(
        &self,
        context: &RequestContext,
        access_key: &str,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> S3Result<Identity> {
        let signed = Signed::of(uri, headers)?;
        signed.check_date(uri, headers, self.env.clock.wall_ns() / 1_000_000_000)?;
        signed.check_headers(uri, headers)?;
        let token = session_token(uri, headers);
        let token = token.as_deref().or_else(|| context.unread.form()?.token.as_deref());
        let identity = self.identities.identify(access_key, token).map_err(identity_error)?;
        let mut told = context.facts.lock().expect("no holder of this lock panics");
        told.access_key = Some(identity.access_key.clone());
        told.user = Some(identity.user.name.clone());
        Ok(identity)
    }

    /// Tags of an object, if it exists and an effective policy looks at them. An error of the read fails the request: a
    /// policy might deny it.
    async fn existing_tags(
        &self,
        identity: Option<&Identity>,
        bucket: Option<&Bucket>,
        action: &str,
        key: Option<&str>,
    ) -> S3Result<Option<Tags>> {
        let (Some(bucket), Some(key)) = (bucket, key) else { return Ok(None) };
        if !TAGGED_ACTIONS.contains(&action) || !look_at_existing_tags(identity, bucket) {
            return Ok(None);
        }
        let name = object_name(bucket.ino, key)?;
        match self.client.head_object(name, Conditions::default(), Caller::root()).await {
            Ok(info) => Ok(Some(info.meta.tags)),
            Err(ObjectError::NoSuchKey | ObjectError::ParentIsFile) => Ok(None),
            Err(error) => Err(object_error(error)),
        }
    }

    async fn may(
        &self,
        context: &RequestContext,
        identity: Option<&Identity>,
        bucket: Option<&Bucket>,
        question: &Question<'_>,
    ) -> S3Result<()> {
        let query = Listing::of(question);
        let text = |name: &str| question.headers.get(name).and_then(|value| value.to_str().ok());
        let existing = self.existing_tags(identity, bucket, question.action, question.key).await?;
        let given = text("x-amz-tagging").and_then(|text| parse_header(text).ok());
        let verdict = self.identities.may(&PolicyRequest {
            identity,
            action: question.action,
            bucket: question.bucket.unwrap_or_default(),
            key: question.key,
            owns_bucket: bucket.is_some_and(|bucket| bucket.belongs_to(identity)),
            bucket_policy: bucket.and_then(|bucket| bucket.policy.as_deref()),
            source_ip: Some(context.origin.ip),
            is_secure: context.origin.is_secure,
            now_s: self.env.clock.wall_ns() / 1_000_000_000,
            prefix: query.prefix.as_deref(),
            delimiter: query.delimiter.as_deref(),
            max_keys: query.max_keys,
            more: PolicyFacts {
                headers: Some(question.headers),
                referer: text("referer"),
                user_agent: text("user-agent"),
                existing_tags: existing.as_deref(),
                request_tags: given.as_deref(),
            },
        });
        decide(verdict, identity, question.action)
    }

    /// Whether the sender may do an action on another key or bucket as well.
    pub(crate) fn may_also(
        &self,
        context: &RequestContext,
        action: &str,
        bucket: &Bucket,
        key: Option<&str>,
    ) -> S3Result<()> {
        self.may_with(context, action, bucket, key, PolicyFacts::default())
    }

    /// Whether the sender may do an action on an object whose tags policies may look at.
    pub(crate) async fn may_with_tags(
        &self,
        context: &RequestContext,
        action: &str,
        bucket: &Bucket,
        key: &str,
        given: Option<&[(String, String)]>,
    ) -> S3Result<()> {
        let identity = context.requester.get().and_then(|requester| requester.identity.as_ref());
        let existing = self.existing_tags(identity, Some(bucket), action, Some(key)).await?;
        let facts =
            PolicyFacts { existing_tags: existing.as_deref(), request_tags: given, ..PolicyFacts::default() };
        self.may_with(context, action, bucket, Some(key), facts)
    }

    /// Like [`Self::may_also`], with further facts for policies.
    pub(crate) fn may_with(
        &self,
        context: &RequestContext,
        action: &str,
        bucket: &Bucket,
        key: Option<&str>,
        facts: PolicyFacts<'_>,
    ) -> S3Result<()> {
        let requester = context.requester.get();
        let identity = requester.and_then(|requester| requester.identity.as_ref());
        let text = |header: fn(&Requester) -> &Option<HeaderValue>| {
            header(requester?).as_ref().and_then(|value| value.to_str().ok())
        };
        let verdict = self.identities.may(&PolicyRequest {
            identity,
            action,
            bucket: &bucket.name,
            key,
            owns_bucket: bucket.belongs_to(identity),
            bucket_policy: bucket.policy.as_deref(),
            source_ip: Some(context.origin.ip),
            is_secure: context.origin.is_secure,
            now_s: self.env.clock.wall_ns() / 1_000_000_000,
            prefix: None,
            delimiter: None,
            max_keys: None,
            more: PolicyFacts {
                referer: text(|requester| &requester.referer),
                user_agent: text(|requester| &requester.user_agent),
                ..facts
            },
        });
        decide(verdict, identity, action)
    }
}

impl Services {
    /// The error for an object that does not exist: a sender who may not list the bucket must not learn that.
    pub(crate) fn conceal(&self, context: &RequestContext, bucket: &Bucket, error: S3Error) -> S3Error {
        if error.code().as_str() != "NoSuchKey" {
            return error;
        }
        match self.may_also(context, "s3:ListBucket", bucket, None) {
            Ok(()) => error,
            Err(refused) => refused,
        }
    }
}

/// Whether an effective policy looks at the tags of existing objects.
fn look_at_existing_tags(identity: Option<&Identity>, bucket: &Bucket) -> bool {
    let own = identity.into_iter().flat_map(|who| who.user.policy.iter().chain(&who.limits));
    own.chain(&bucket.policy).any(|policy| policy.looks_at_existing_tags())
}

fn decide(verdict: Verdict, identity: Option<&Identity>, action: &str) -> S3Result<()> {
    match verdict {
        Verdict::Allowed => Ok(()),
        Verdict::Denied => Err(s3_error!(AccessDenied, "Access Denied: a policy denies {action}.")),
        Verdict::NotAllowed if identity.is_none() => Err(unsigned()),
        Verdict::NotAllowed => Err(s3_error!(AccessDenied, "Access Denied: no policy allows {action}.")),
    }
}

fn unsigned() -> S3Error {
    s3_error!(AccessDenied, "Access Denied: requests must be signed.")
}

fn identity_error(error: IdentityError) -> S3Error {
    match error {
        IdentityError::UnknownKey => {
            s3_error!(InvalidAccessKeyId, "The AWS Access Key Id you provided does not exist in our records.")
        }
        IdentityError::Expired => s3_error!(ExpiredToken, "The provided token has expired."),
        IdentityError::InvalidToken => {
            s3_error!(InvalidToken, "The provided token is malformed or otherwise invalid.")
        }
    }
}

/// Parameters of listings that policies may look at.
#[derive(Default)]
struct Listing {
    prefix: Option<String>,
    delimiter: Option<String>,
    max_keys: Option<u32>,
}

impl Listing {
    fn of(question: &Question<'_>) -> Self {
        if !matches!(question.action, "s3:ListBucket" | "s3:ListBucketVersions") {
            return Self::default();
        }
        let query = question.uri.query().unwrap_or_default();
        Self {
            prefix: parameter(query, "prefix"),
            delimiter: parameter(query, "delimiter"),
            max_keys: parameter(query, "max-keys").and_then(|value| value.parse().ok()),
        }
    }
}

/// A decoded parameter of a query.
pub(crate) fn parameter(query: &str, wanted: &str) -> Option<String> {
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let is_wanted = |name: &str| urlencoding::decode(name).is_ok_and(|name| name == wanted);
    let (_, value) = pairs.find(|(name, _)| is_wanted(name))?;
    decoded(value)
}

/// The value of a parameter of a query.
pub(crate) fn decoded(value: &str) -> Option<String> {
    let value = value.replace('+', " ");
    urlencoding::decode(&value).ok().map(Cow::into_owned)
}

fn session_token(uri: &Uri, headers: &HeaderMap) -> Option<String> {
    let header = headers.get("x-amz-security-token").and_then(|value| value.to_str().ok());
    let query = || parameter(uri.query()?, "X-Amz-Security-Token");
    header.map(str::to_owned).or_else(query)
}

/// Domains whose subdomains are buckets.
pub(crate) struct Names {
    domains: Vec<String>,
}

impl Names {
    pub(crate) fn new(mut domains: Vec<String>) -> Self {
        domains.push("localhost".to_owned());
        Self { domains }
    }

    /// The bucket in a host name.
    fn host_bucket<'a>(&self, host: &'a str) -> Option<&'a str> {
        let host = match host.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
            _ => host,
        };
        let below = |domain: &String| {
            let at = host.len().checked_sub(domain.len() + 1)?;
            let (bucket, rest) = (host.get(..at)?, host.get(at + 1..)?);
            (host.as_bytes()[at] == b'.' && rest.eq_ignore_ascii_case(domain) && !bucket.is_empty())
                .then_some(bucket)
        };
        self.domains.iter().find_map(below)
    }

    /// Bucket and key of a request; both may be missing.
    pub(crate) fn split(&self, uri: &Uri, headers: &HeaderMap) -> Option<(String, String)> {
        let path = urlencoding::decode(uri.path()).ok()?;
        let path = path.strip_prefix('/')?;
        let host = headers.get(header::HOST).and_then(|value| value.to_str().ok());
        let host = host.or_else(|| uri.authority().map(|authority| authority.as_str()));
        if let Some(bucket) = host.filter(|host| !is_address(host)).and_then(|host| self.host_bucket(host)) {
            return Some((bucket.to_owned(), path.to_owned()));
        }
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        Some((bucket.to_owned(), key.to_owned()))
    }

    /// The bucket of a request.
    pub(crate) fn bucket(&self, uri: &Uri, headers: &HeaderMap) -> Option<String> {
        self.split(uri, headers).map(|(bucket, _)| bucket).filter(|bucket| !bucket.is_empty())
    }
}

fn is_address(host: &str) -> bool {
    host.parse::<std::net::SocketAddr>().is_ok() || host.parse::<IpAddr>().is_ok()
}

/// Host names and bucket names for the protocol library.
pub(crate) struct Hosts {
    pub(crate) names: Arc<Names>,
}

impl S3Host for Hosts {
    fn parse_host_header<'a>(&'a self, host: &'a str) -> S3Result<VirtualHost<'a>> {
        let virtual_host = VirtualHost::new(host);
        Ok(match self.names.host_bucket(host) {
            Some(bucket) => virtual_host.with_bucket(bucket),
            None => virtual_host,
        })
    }
}

impl NameValidation for Hosts {
    /// Any directory is a bucket; names of new buckets are checked when they are created.
    fn validate_bucket_name(&self, name: &str) -> bool {
        !name.is_empty()
            && name.len() <= NAME_BYTES_MAX
            && name != "."
            && name != ".."
            && !name.contains(['/', '\0'])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_are_in_order() {
        assert!(ACTIONS.is_sorted_by_key(|(operation, _)| operation));
    }

    #[test]
    fn names_of_parameters_are_decoded() {
        assert_eq!(parameter("list-type=2&pref%69x=hidden%2F+a", "prefix").as_deref(), Some("hidden/ a"));
        assert_eq!(parameter("prefixes=1", "prefix"), None);
    }

    #[track_caller]
    fn check(host: &str, uri: &str, expected: (&str, &str)) {
        let names = Names::new(vec!["s3.example.com".to_owned()]);
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, host.parse().unwrap());
        let (bucket, key) = names.split(&uri.parse().unwrap(), &headers).unwrap();
        assert_eq!((bucket.as_str(), key.as_str()), expected);
    }

    #[test]
    fn buckets_are_in_paths_or_host_names() {
        check("127.0.0.1:9000", "/b/a/c%20d", ("b", "a/c d"));
        check("localhost:9000", "/b/k", ("b", "k"));
        check("b.localhost:9000", "/k/l", ("b", "k/l"));
        check("My.bucket.S3.Example.com", "/k", ("My.bucket", "k"));
        check("s3.example.com", "/b", ("b", ""));
        check("other.example.com", "/b/k", ("b", "k"));
        check("127.0.0.1:9000", "/", ("", ""));
    }
}
