//! Steps of every request before and after its operation: request id, audit record, origin rules, limits.

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use base::env::Env;
use bytes::Bytes;
use client::object::Caller;
use client::{Client, trace};
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode, Uri};
use s3s::config::{S3Config, StaticConfigProvider};
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{Body, S3Error, S3Result, StdError, s3_error};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use crate::access::{Access, Hosts, Names, Secrets, parameter};
use crate::accounts::Accounts;
use crate::answer;
use crate::api::Api;
use crate::bucket::{Bucket, Buckets};
use crate::cors;
use crate::error::{body_error, custom};
use crate::hash::DocumentCheck;
use crate::identity::{Audit, AuditEntry, Identities, Identity};
use crate::minio::MinioQuestion;
use crate::multirange::RangeRoute;
use crate::read::StreamBudget;
use crate::route::{Routes, TokenRoute};
use crate::screen::{self, Signed};
use crate::server::{
    Answering, BodyRules, Chunked, ChunkedError, Coding, Finisher, FormHead, Framing, Limits, RequestBody,
    Unread,
};

/// Largest document in a request: a list of 10,000 parts with checksums takes 2.5 MiB.
const XML_BYTES_MAX: usize = 4 << 20;
/// Largest file in a form; it is held in memory.
pub(crate) const FORM_FILE_BYTES_MAX: u64 = 64 << 20;
/// Memory for forms that are being read, in KiB: a form's signature can only be checked when all of it is in memory.
const FORMS_KIB: u32 = 256 << 10;
/// How long a form waits for that memory.
const FORM_WAIT: Duration = Duration::from_secs(10);
/// How long a request waits for a request slot.
const REQUEST_WAIT: Duration = Duration::from_secs(10);
/// Forms slower than this are cancelled, so that a few slow forms do not delay the others.
const FORM_BYTES_PER_S_MIN: u64 = 64 << 10;
/// Largest sum of a form's fields without the file.
const FORM_FIELDS_BYTES_MAX: usize = 64 << 10;

/// How long after its signature a form may be used, even if its policy allows longer; for requests see
/// [`screen::Signed::check_date`].
const FORM_AGE_S_MAX: u32 = 7 * 24 * 3600;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-amz-request-id");
const CONTENT_SHA256: HeaderName = HeaderName::from_static("x-amz-content-sha256");
const DECODED_LENGTH: HeaderName = HeaderName::from_static("x-amz-decoded-content-length");

/// The answer to a probe whose signature is right; no other request gets it.
pub(crate) const PROBED: StatusCode = StatusCode::IM_A_TEAPOT;

/// Parts and limits of a gate.
pub struct GateOptions {
    /// Clock and randomness.
    pub env: Env,
    /// The runtime that requests run on.
    pub runtime: Handle,
    /// A client on the filesystem whose top-level directories are the buckets. No other protocol may use this client.
    pub client: Client,
    /// Users, keys and policies; also makes short-lived keys.
    pub accounts: Arc<Accounts>,
    /// Takes the audit record of every request.
    pub audit: Arc<dyn Audit>,
    /// Domains whose subdomains are buckets: `bucket.name`. `localhost` always is one.
    pub domains: Vec<String>,
    /// Bytes read ahead of what clients have taken, for all responses together.
    pub ahead_bytes: u64,
    /// Requests under way at once, from their start until clients took nearly all of the answers. Further requests
    /// wait, and get `SlowDown` after a time. At most 7/16 bring a body and 7/16 read objects, so that slow requests of
    /// one kind do not block the other, and requests that free space always run.
    pub requests_max: usize,
    /// Bytes of request bodies in memory, all requests together; further bodies are written to staged files.
    pub bodies_bytes: u64,
}

/// Marks an answer to a request whose body was not read to its end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LeftUnread;

/// Where a request came from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin {
    pub(crate) ip: IpAddr,
    pub(crate) is_secure: bool,
}

/// Services that all operations share.
pub(crate) struct Services {
    pub(crate) env: Env,
    pub(crate) client: Client,
    pub(crate) identities: Arc<dyn Identities>,
    pub(crate) buckets: Arc<Buckets>,
    pub(crate) streams: Arc<StreamBudget>,
    /// Memory for request bodies, in KiB.
    pub(crate) bodies: Arc<Semaphore>,
    pub(crate) finisher: Finisher,
    pub(crate) audit: Arc<dyn Audit>,
}

/// Context of a request; the protocol library passes it on to the operation.
pub(crate) struct RequestContext {
    pub(crate) origin: Origin,
    /// Set once the request is authorized.
    pub(crate) requester: OnceLock<Requester>,
    /// For the audit record.
    pub(crate) facts: Mutex<RequestFacts>,
    /// State of the body.
    pub(crate) unread: Arc<Unread>,
    /// The request id in the response.
    pub(crate) request_id: String,
    /// Only the signature is verified.
    pub(crate) is_probe: bool,
}

impl RequestContext {
    fn new(origin: Origin, request_id: String) -> Self {
        let (requester, facts, unread) = (OnceLock::new(), Mutex::default(), Arc::default());
        Self { origin, requester, facts, unread, request_id, is_probe: false }
    }

    /// Completes a response that the protocol library made.
    fn complete(&self, response: Response<Body>) -> Response<Body> {
        let response = match self.unread.failure() {
            Some(error) if response.status() == StatusCode::INTERNAL_SERVER_ERROR => refuse(error),
            _ => response,
        };
        answer::complete(response, self.operation(), &self.request_id)
    }

    /// The name of the operation; empty while it is unknown.
    pub(crate) fn operation(&self) -> &'static str {
        self.facts.lock().expect("no holder of this lock panics").operation
    }
}

/// The sender of a request, and the bucket.
pub(crate) struct Requester {
    pub(crate) identity: Option<Identity>,
    pub(crate) bucket: Option<Arc<Bucket>>,
    /// For policies.
    pub(crate) referer: Option<HeaderValue>,
    pub(crate) user_agent: Option<HeaderValue>,
}

impl Requester {
    /// The sender as the filesystem knows it. Without a signature: the anonymous user.
    pub(crate) fn caller(&self) -> Caller {
        const NOBODY: u32 = 65534;
        match &self.identity {
            Some(identity) => {
                let user = &identity.user;
                Caller { uid: user.uid, gid: user.gid, groups: user.groups.clone() }
            }
            None => Caller { uid: NOBODY, gid: NOBODY, groups: Vec::new() },
        }
    }
}

/// Facts from authorization for the audit record.
#[derive(Default)]
pub(crate) struct RequestFacts {
    pub(crate) operation: &'static str,
    pub(crate) user: Option<Arc<str>>,
    pub(crate) access_key: Option<Arc<str>>,
    pub(crate) bucket: Option<String>,
    pub(crate) key: Option<String>,
}

/// Serves S3 requests.
pub struct Gate {
    core: Arc<Services>,
    service: S3Service,
    names: Arc<Names>,
    forms: Semaphore,
    requests: Arc<Semaphore>,
    /// Slots for requests that bring a body, and for requests that read.
    writes: Arc<Semaphore>,
    reads: Arc<Semaphore>,
    /// Request ids: random start, then counted up.
    ids: AtomicU64,
}

impl Gate {
    /// Makes the gate.
    pub fn new(options: GateOptions) -> Arc<Self> {
        let GateOptions {
            env,
            runtime,
            client,
            accounts,
            audit,
            domains,
            ahead_bytes,
            requests_max,
            bodies_bytes,
        } = options;
        let buckets = Buckets::new(client.clone());
        client.set_invalidate(Some(buckets.clone()));
        let core = Arc::new(Services {
            buckets,
            client,
            identities: accounts.clone(),
            streams: Arc::new(StreamBudget::new(ahead_bytes)),
            bodies: Arc::new(Semaphore::new((bodies_bytes >> 10) as usize)),
            finisher: Finisher::new(runtime),
            audit,
            env,
        });
        let names = Arc::new(Names::new(domains));
        let mut config = S3Config::default();
        config.xml_max_body_size = XML_BYTES_MAX;
        config.post_object_max_file_size = FORM_FILE_BYTES_MAX;
        // The library has one limit for requests and forms; within it, a form may be used until its policy expires.
        config.presigned_url_max_skew_time_secs = FORM_AGE_S_MAX;
        config.form_max_field_size = FORM_FIELDS_BYTES_MAX;
        config.form_max_fields_size = FORM_FIELDS_BYTES_MAX;
        let mut builder = S3ServiceBuilder::new(Api { core: core.clone() });
        builder.set_config(Arc::new(StaticConfigProvider::new(Arc::new(config))));
        builder.set_auth(Secrets { identities: core.identities.clone() });
        builder.set_access(Access { core: core.clone() });
        builder.set_host(Hosts { names: names.clone() });
        builder.set_validation(Hosts { names: names.clone() });
        let ranges = RangeRoute { core: core.clone(), names: names.clone() };
        builder.set_route(Routes { ranges, tokens: TokenRoute { core: core.clone(), accounts } });
        let ids = AtomicU64::new(core.env.random.next_u64());
        Arc::new(Self {
            core,
            service: builder.build(),
            names,
            forms: Semaphore::new(FORMS_KIB as usize),
            requests: Arc::new(Semaphore::new(requests_max)),
            writes: Arc::new(Semaphore::new((requests_max * 7 / 16).max(1))),
            reads: Arc::new(Semaphore::new((requests_max * 7 / 16).max(1))),
            ids,
        })
    }

    pub(crate) fn finisher(&self) -> &Finisher {
        &self.core.finisher
    }

    /// Waits for requests whose clients have gone.
    pub(crate) async fn finish(&self) {
        self.core.finisher.finish().await;
    }

    /// Waits for a request slot, for [`REQUEST_WAIT`] at most.
    pub(crate) async fn slot(&self, request: &Request<Incoming>) -> Option<RequestSlot> {
        let slot = async {
            let kind = if !request.body().is_end_stream() {
                Some(&self.writes)
            } else if request.method() == Method::GET {
                Some(&self.reads)
            } else {
                None
            };
            let kind = match kind {
                Some(kind) => Some(kind.clone().acquire_owned().await.ok()?),
                None => None,
            };
            Some(RequestSlot { _one: self.requests.clone().acquire_owned().await.ok()?, _kind: kind })
        };
        tokio::time::timeout(REQUEST_WAIT, slot).await.ok()?
    }

    pub(crate) fn new_request_id(&self) -> String {
        trace::text(self.ids.fetch_add(1, Ordering::Relaxed))
    }

    /// Answers a request. Its id goes with all that it causes.
    pub(crate) async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        origin: Origin,
        limits: Arc<Limits>,
        slot: Option<RequestSlot>,
    ) -> Response<Answer> {
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        trace::within(id, self.answer_as(id, request, origin, limits, slot)).await
    }

    async fn answer_as(
        self: Arc<Self>,
        trace: u64,
        request: Request<Incoming>,
        origin: Origin,
        limits: Arc<Limits>,
        mut slot: Option<RequestSlot>,
    ) -> Response<Answer> {
        let mut entry = AuditEntry::begin(self.core.audit.clone()).await;
        entry.record.began_ns = self.core.env.clock.wall_ns();
        let begun_ns = self.core.env.clock.boot_ns();
        self.core.client.note_use();
        let id = trace::text(trace);
        entry.record.source_ip = Some(origin.ip);
        let context = Arc::new(RequestContext::new(origin, id.clone()));
        let cross = cors::Cross::of(request.method(), request.headers());
        let bucket = cross.as_ref().and_then(|_| self.names.bucket(request.uri(), request.headers()));
        let mut response = if request.method() == Method::OPTIONS {
            context.complete(self.preflight(cross.as_ref(), bucket.as_deref()).await)
        } else if let Some(question) = self.minio_question(&request).await {
            context.facts.lock().expect("no holder of this lock panics").operation = question.operation();
            context.complete(question.answer(&self.core).await)
        } else {
            self.serve(request, &context, &limits, &mut slot).await
        };
        if let (Some(cross), Some(bucket)) = (&cross, bucket.as_deref()) {
            self.allow_origin(cross, bucket, response.headers_mut()).await;
        }
        let headers = response.headers_mut();
        headers.insert(header::SERVER, HeaderValue::from_static("Forebay"));
        headers.insert(REQUEST_ID, HeaderValue::from_str(&id).expect("hexadecimal digits are valid"));
        if response.status() == StatusCode::NO_CONTENT {
            response.headers_mut().remove(header::CONTENT_LENGTH);
        }
        note(&mut entry, &context, &response);
        entry.record.request_id = id;
        entry.record.bytes_in = context.unread.bytes();
        let clock = self.core.env.clock.clone();
        response.map(|body| Answer {
            body,
            trace,
            entry,
            clock,
            begun_ns,
            slot: slot.map(Arc::new),
            answering: None,
        })
    }

    /// The question about health, or for MinIO, in a request; `None` if the request is for S3. Buckets and keys with these names stay
    /// reachable by signed requests.
    async fn minio_question(&self, request: &Request<Incoming>) -> Option<MinioQuestion> {
        let (bucket, key) = self.names.split(request.uri(), request.headers())?;
        let question = MinioQuestion::of(request.method(), &bucket, &key)?;
        let is_for_us = match question {
            MinioQuestion::Admin => self.core.buckets.get(&bucket).await.is_err(),
            _ => matches!(Signed::of(request.uri(), request.headers()), Ok(Signed::Not)),
        };
        is_for_us.then_some(question)
    }

    async fn serve(
        &self,
        request: Request<Incoming>,
        context: &Arc<RequestContext>,
        limits: &Limits,
        slot: &mut Option<RequestSlot>,
    ) -> Response<Body> {
        let (unread, has_turn) = (&context.unread, slot.is_some());
        let (mut parts, incoming) = request.into_parts();
        let waits = parts.headers.contains_key(header::EXPECT);
        let is_form = parts.method == Method::POST && is_form(&parts.headers);
        let is_head = parts.method == Method::HEAD;
        if let Err(error) = screen::move_signed_parameters(&parts.uri, &mut parts.headers) {
            return context.complete(refuse(error));
        }
        screen::take_date(&parts.uri, &mut parts.headers);
        self.take_path_as_signed(&mut parts, context.origin).await;
        parts.extensions.insert(context.clone());
        let is_empty = incoming.is_end_stream();
        let version = parts.version;
        let _form = if is_form {
            // A form takes a slot among forms while it comes, which may take long.
            *slot = None;
            let Some(permit) = self.room_for_form(&parts.headers).await else {
                return refuse(s3_error!(SlowDown, "Too many forms at once: try again."));
            };
            Some(permit)
        } else {
            None
        };
        let coding = match has_turn {
            true if !self.core.identities.is_current() => {
                Err(s3_error!(ServiceUnavailable, "Users and keys are not known at the moment: try again."))
            }
            true => screen::check_region(&parts.uri, &parts.headers)
                .and_then(|()| self.coding(&mut parts, unread, is_form, is_empty)),
            false => Err(s3_error!(SlowDown, "Too many requests at once: try again.")),
        };
        let response = match coding {
            Ok(_) if is_empty => self.call(Request::from_parts(parts, Body::empty())).await,
            Ok(coding) => {
                let body = RequestBody::new(incoming, coding, body_rules(limits, is_form), unread.clone());
                self.call(Request::from_parts(parts, Body::http_body(body))).await
            }
            Err(error) => {
                // The body is read below.
                unread.leave(incoming);
                refuse(error)
            }
        };
        let response = if is_form { forbid_form(response) } else { response };
        let mut response = context.complete(response);
        if is_head {
            mark_partial(&mut response);
        }
        // A client that waits for `100 Continue` has not sent a body yet, unless it gave up waiting.
        let refused = response.status().as_u16() >= 400;
        if refused {
            *slot = None;
        }
        if refused && (!waits || !has_turn) && !unread.drain().await {
            response.extensions_mut().insert(LeftUnread);
        }
        // If such a client gets a final answer instead of `100 Continue`, botocore misreads the next answer on the
        // connection.
        if waits && (refused || is_empty) && version == hyper::Version::HTTP_11 {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    async fn call(&self, request: Request<Body>) -> Response<Body> {
        self.service.call(request).await.unwrap_or_else(|error| {
            tracing::error!(error = ?StdError::from(error), "S3 answer could not be put together");
            refuse(s3_error!(InternalError))
        })
    }

    /// A client of version 2 may sign `/bucket/` and send `/bucket`: then the path that it signed is used.
    async fn take_path_as_signed(&self, parts: &mut Parts, origin: Origin) {
        let is_two = || matches!(Signed::of(&parts.uri, &parts.headers), Ok(Signed::Two | Signed::UrlTwo));
        let names = || self.names.split(&parts.uri, &parts.headers);
        if parts.uri.path().ends_with('/') || !is_two() || names().is_none_or(|(_, key)| !key.is_empty()) {
            return;
        }
        let query = parts.uri.query().map_or(String::new(), |query| format!("?{query}"));
        let Ok(uri) = format!("{}/{query}", parts.uri.path()).parse::<Uri>() else { return };
        let mut probe = Request::new(Body::empty());
        *probe.method_mut() = parts.method.clone();
        *probe.uri_mut() = uri.clone();
        *probe.headers_mut() = parts.headers.clone();
        let context = RequestContext { is_probe: true, ..RequestContext::new(origin, String::new()) };
        probe.extensions_mut().insert(Arc::new(context));
        if self.call(probe).await.status() == PROBED {
            parts.uri = uri;
        }
    }

    /// How the body is decoded.
    fn coding(&self, parts: &mut Parts, unread: &Unread, is_form: bool, is_empty: bool) -> S3Result<Coding> {
        let has_key = || {
            let names = self.names.split(&parts.uri, &parts.headers);
            names.is_some_and(|(_, key)| !key.is_empty())
        };
        let is_document = screen::brings_document(&parts.method, &parts.uri, has_key);
        if is_form {
            let content_type = parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
            return Ok(content_type.and_then(FormHead::new).map_or(Coding::Plain, Coding::Form));
        }
        if let Some(framing) = framing(parts) {
            if is_document {
                return Err(s3_error!(InvalidRequest, "A document must not come in frames of aws-chunked."));
            }
            if is_empty {
                return Err(body_error(&ChunkedError::BrokenOff));
            }
            if framing == Framing::Removed {
                announce_decoded(&mut parts.headers, unread)?;
            }
            return Ok(Coding::Chunked(Chunked::new(framing)));
        }
        if is_empty {
            return Ok(Coding::Plain);
        }
        if !is_document {
            return Ok(Coding::Plain);
        }
        match content_length(&parts.headers) {
            Some(length) if length > XML_BYTES_MAX as u64 => Err(s3_error!(
                MaxMessageLengthExceeded,
                "The document in the request is too long: bytes={length} most={XML_BYTES_MAX}."
            )),
            Some(length) => {
                let query = parts.uri.query().unwrap_or_default();
                let completes = parts.method == Method::POST && parameter(query, "uploadId").is_some();
                let check = if completes { DocumentCheck::beside_object } else { DocumentCheck::of };
                Ok(Coding::Document(Box::new(check(&parts.headers, length)?)))
            }
            None => Err(s3_error!(
                MissingContentLength,
                "A document in a request needs the Content-Length header."
            )),
        }
    }

    /// Waits until memory has room for a form of the length in `Content-Length`.
    async fn room_for_form(&self, headers: &HeaderMap) -> Option<SemaphorePermit<'_>> {
        let bytes = content_length(headers).unwrap_or(FORM_FILE_BYTES_MAX).min(FORM_FILE_BYTES_MAX);
        let room = self.forms.acquire_many((bytes >> 10) as u32 + 1);
        tokio::time::timeout(FORM_WAIT, room).await.ok()?.ok()
    }

    async fn preflight(&self, cross: Option<&cors::Cross>, bucket: Option<&str>) -> Response<Body> {
        let Some(cross) = cross else {
            return refuse(custom(
                "BadRequest",
                StatusCode::BAD_REQUEST,
                "Insufficient information. The headers Origin and Access-Control-Request-Method are needed.",
            ));
        };
        let rules = match bucket {
            Some(bucket) => self.core.buckets.get(bucket).await.ok().and_then(|bucket| bucket.cors.clone()),
            None => None,
        };
        let Some(rules) = rules else {
            return refuse(custom(
                "AccessForbidden",
                StatusCode::FORBIDDEN,
                "CORSResponse: CORS is not enabled for this bucket.",
            ));
        };
        match rules.matching(cross).is_some() {
            true => Response::new(Body::empty()),
            // The exact text of AWS: programs search for it.
            false => refuse(custom(
                "AccessForbidden",
                StatusCode::FORBIDDEN,
                "CORSResponse: This CORS request is not allowed. This is usually because the evalution of Origin, \
                 request method / Access-Control-Request-Method or Access-Control-Request-Headers are not whitelisted \
                 by the resource's CORS spec.",
            )),
        }
    }

    async fn allow_origin(&self, cross: &cors::Cross, bucket: &str, headers: &mut HeaderMap) {
        if let Ok(bucket) = self.core.buckets.get(bucket).await
            && let Some(rules) = &bucket.cors
            && let Some(rule) = rules.matching(cross)
        {
            rule.answer(cross, headers);
        }
    }
}

/// An error as a response.
pub(crate) fn refuse(error: S3Error) -> Response<Body> {
    error.to_http_response().unwrap_or_else(|_| {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        response
    })
}

/// The protocol library answers 400 to a form that its policy forbids, as to an unreadable policy; S3 answers 403.
fn forbid_form(response: Response<Body>) -> Response<Body> {
    let is_refusal = |text: &String| {
        text.contains("<Code>InvalidPolicyDocument</Code>")
            && (text.contains("<Message>Policy condition ") || text.contains(" does not match "))
    };
    let text = response.body().bytes().and_then(|body| String::from_utf8(body.to_vec()).ok());
    let Some(text) = text.filter(is_refusal) else { return response };
    let text = text.replacen("InvalidPolicyDocument", "AccessDenied", 1);
    let text = text.replacen("<Message>", "<Message>Invalid according to Policy: ", 1);
    let mut response = answer::with_body(response, text.into_bytes());
    *response.status_mut() = StatusCode::FORBIDDEN;
    response
}

fn body_rules(limits: &Limits, is_form: bool) -> BodyRules {
    let bytes_per_s_min = if is_form { FORM_BYTES_PER_S_MIN } else { limits.body_bytes_per_s_min };
    BodyRules { idle_timeout: limits.idle_timeout, bytes_per_s_min }
}

/// The protocol library answers every HEAD with 200; a range gets 206 as in the answer to GET.
fn mark_partial(response: &mut Response<Body>) {
    if response.status() == StatusCode::OK && response.headers().contains_key(header::CONTENT_RANGE) {
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn is_form(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    // Letter case does not matter, as in the protocol library.
    value.is_some_and(|value| value.trim_start().to_ascii_lowercase().starts_with("multipart/form-data"))
}

/// How the frames of a body in `aws-chunked` are handled. An unsigned request is in frames only if `Content-Encoding`
/// and the decoded length say so; other requests with that encoding copied it from a store that did not remove it.
fn framing(parts: &Parts) -> Option<Framing> {
    let text = |name: &HeaderName| parts.headers.get(name).and_then(|value| value.to_str().ok());
    let digest = text(&CONTENT_SHA256).filter(|value| value.starts_with("STREAMING-"));
    let is_chunked = |coding: &str| coding.trim().eq_ignore_ascii_case("aws-chunked");
    let says_so = || text(&header::CONTENT_ENCODING).is_some_and(|value| value.split(',').any(is_chunked));
    if digest.is_none() && !(parts.headers.contains_key(DECODED_LENGTH) && says_so()) {
        return None;
    }
    match (digest, Signed::of(&parts.uri, &parts.headers)) {
        (Some("STREAMING-UNSIGNED-PAYLOAD-TRAILER"), Ok(Signed::Four(_))) => Some(Framing::Unsigned),
        (Some(_), Ok(Signed::Four(_))) => Some(Framing::Signed),
        _ => Some(Framing::Removed),
    }
}

/// Notes the length of a body without frames, which becomes `Content-Length` if that is missing. The header that has it
/// may be signed and stays.
fn announce_decoded(headers: &mut HeaderMap, unread: &Unread) -> S3Result<()> {
    let length = headers.get(DECODED_LENGTH).cloned();
    let bytes = length.as_ref().and_then(|length| length.to_str().ok()?.parse().ok());
    let (Some(length), Some(bytes)) = (length, bytes) else {
        return Err(s3_error!(
            MissingContentLength,
            "A body in aws-chunked needs the x-amz-decoded-content-length header."
        ));
    };
    unread.announce(bytes);
    headers.entry(header::CONTENT_LENGTH).or_insert(length);
    Ok(())
}

/// Copies facts of a request and its response into the audit record.
fn note(entry: &mut AuditEntry, context: &RequestContext, response: &Response<Body>) {
    let facts = std::mem::take(&mut *context.facts.lock().expect("no holder of this lock panics"));
    let record = &mut entry.record;
    record.operation = facts.operation;
    record.user = facts.user;
    record.access_key = facts.access_key;
    record.bucket = facts.bucket;
    record.key = facts.key;
    record.status = response.status().as_u16();
    if record.status >= 400 {
        record.error = response.body().bytes().and_then(|body| error_code(&body));
    }
}

/// The code in an error's document.
fn error_code(body: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(body).ok()?;
    let (_, rest) = text.split_once("<Code>")?;
    rest.split_once("</Code>").map(|(code, _)| code.to_owned())
}

/// The body of a response. Its end closes the audit record.
pub(crate) struct Answer {
    body: Body,
    trace: u64,
    entry: AuditEntry,
    clock: Arc<dyn base::env::Clock>,
    begun_ns: u64,
    slot: Option<Arc<RequestSlot>>,
    answering: Option<Answering>,
}

impl Answer {
    /// Keeps the guard until the answer has ended.
    pub(crate) fn keep(&mut self, answering: Answering) {
        self.answering = Some(answering);
    }
}

/// Pieces up to this size wait for the client in memory that every connection may use.
const SMALL_BYTES_MAX: usize = 16 << 10;

/// A piece of an answer that keeps the request's slot until the client has taken it: the last pieces of an answer wait
/// in the connection when the answer itself has ended.
struct HeldBytes {
    bytes: Bytes,
    _slot: Arc<RequestSlot>,
}

impl AsRef<[u8]> for HeldBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

fn hold(bytes: Bytes, slot: Option<&Arc<RequestSlot>>) -> Bytes {
    match slot {
        Some(slot) if bytes.len() > SMALL_BYTES_MAX => {
            Bytes::from_owner(HeldBytes { bytes, _slot: slot.clone() })
        }
        _ => bytes,
    }
}

/// A slot among the requests under way; freed on drop.
pub(crate) struct RequestSlot {
    _one: OwnedSemaphorePermit,
    _kind: Option<OwnedSemaphorePermit>,
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = StdError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StdError>>> {
        let trace = self.trace;
        let polled = trace::step(trace, || Pin::new(&mut self.body).poll_frame(context));
        let frame = std::task::ready!(polled);
        match &frame {
            Some(Ok(frame)) => {
                self.entry.record.bytes_out += frame.data_ref().map_or(0, Bytes::len) as u64;
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "S3 response broke off");
                self.entry.record.error = Some("InternalError".to_owned());
            }
            None => {}
        }
        let slot = self.slot.as_ref();
        let frame = frame.map(|frame| frame.map(|frame| frame.map_data(|bytes| hold(bytes, slot))));
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.entry.record.duration_ns = self.clock.boot_ns().saturating_sub(self.begun_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_place_is_kept_until_the_last_large_piece_of_an_answer_was_taken() {
        let places = Arc::new(Semaphore::new(1));
        for (len, is_kept) in [(SMALL_BYTES_MAX, false), (SMALL_BYTES_MAX + 1, true)] {
            let one = places.clone().try_acquire_owned().unwrap();
            let slot = Arc::new(RequestSlot { _one: one, _kind: None });
            let piece = hold(Bytes::from(vec![7; len]), Some(&slot));
            drop(slot);
            let rest = piece.slice(1..);
            drop(piece);
            assert_eq!(places.available_permits() == 0, is_kept, "len={len}");
            assert_eq!(rest.len(), len - 1);
            drop(rest);
            assert_eq!(places.available_permits(), 1);
        }
    }
}
