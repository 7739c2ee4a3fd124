//! An S3 store over HTTP: signed requests on kept connections, to all addresses of the host in turn.
//!
//! It uses only PutObject, GetObject and DeleteObject. Each request has a deadline. Requests that may succeed later are
//! repeated with growing, random pauses. The number of requests under way is limited for each kind.

mod answer;
mod connect;
mod settings;
mod sign;
mod speed;
#[cfg(test)]
mod tests;
mod traffic;
mod validate;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use base::env::Env;
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{CONTENT_LENGTH, RANGE, USER_AGENT};
use hyper::{Method, Request};
use tokio::sync::Semaphore;
use tokio::time::Sleep;
use wire::BoxFuture;
use wire::store::{ObjectStore, Outgoing, SeenBy, Steps, StoreError, StoreOp};

use traffic::Traffic;

pub use settings::{StoreSettings, StoreSettingsError};

/// The user agent of requests.
const AGENT: &str = concat!("Forebay/", env!("CARGO_PKG_VERSION"));
/// The time to make a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time for a request, on top of the time for its body at the slowest rate.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// The slowest rate: a slower transfer is given up.
const BYTES_PER_S_MIN: u64 = 256 << 10;
/// The object that checks of health ask for; it need not exist.
const ALIVE: &str = "alive";
/// The average pause between two checks of health, and the time for an answer.
const CHECK_EVERY_MS: u64 = 1000;
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// Pauses between attempts: they double from the shortest to the longest.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
const ATTEMPTS_MAX: usize = 5;
/// Gets are not tried again after this time, so that readers learn of a store that never answers after two attempts.
const GET_PATIENCE_NS: u64 = 20_000_000_000;
/// With a store that has been down for long, gets are tried once, with this time limit.
const GET_TIMEOUT_DOWN: Duration = Duration::from_secs(3);

/// A client of a store.
pub struct S3Store {
    env: Env,
    http: reqwest::Client,
    settings: StoreSettings,
    uploads: Semaphore,
    downloads: Semaphore,
    removals: Semaphore,
    traffic: Traffic,
}

/// The parts of a request that are the same in every attempt.
struct Ask {
    method: Method,
    key: String,
    range: Option<Range<u64>>,
    object: Outgoing,
}

impl Ask {
    fn new(method: Method, key: String) -> Self {
        Self { method, key, range: None, object: Outgoing::default() }
    }

    /// Bytes that are sent or expected.
    fn bytes(&self) -> u64 {
        let out: u64 = self.object.parts.iter().map(|part| part.len() as u64).sum();
        let expected = self.range.as_ref().map_or(0, |range| range.end - range.start);
        out + expected
    }
}

impl S3Store {
    /// A store with these settings. It sends no request yet.
    pub fn new(env: Env, settings: StoreSettings) -> Result<Arc<Self>, StoreSettingsError> {
        settings.check()?;
        let http = connect::client(&settings)?;
        let limits = settings.address.limits;
        Ok(Arc::new(Self {
            http,
            uploads: Semaphore::new(usize::from(limits.uploads_max)),
            downloads: Semaphore::new(usize::from(limits.downloads_max)),
            removals: Semaphore::new(usize::from(limits.removals_max)),
            traffic: Traffic::new(env.clone(), limits.bandwidth_mbps),
            env,
            settings,
        }))
    }

    /// Its address and secret.
    pub fn settings(&self) -> &StoreSettings {
        &self.settings
    }

    /// Sends a request, and repeats it as long as that may help. Returns the body of the answer.
    async fn ask(&self, ask: Ask) -> Result<Bytes, StoreError> {
        let under_way = match ask.method {
            Method::PUT => &self.uploads,
            Method::DELETE => &self.removals,
            _ => &self.downloads,
        };
        let op = self.traffic.begin(ask.method.as_str(), &ask.key, ask.bytes());
        let _permit = under_way.acquire().await.expect("it is never closed");
        let pauses = ExponentialBuilder::default()
            .with_min_delay(PAUSE_MIN)
            .with_max_delay(PAUSE_MAX)
            .with_max_times(ATTEMPTS_MAX - 1)
            .with_jitter();
        let waits = ask.method == Method::GET;
        let attempts = || async {
            self.traffic.pace(ask.bytes()).await;
            op.attempt();
            let result = match waits && self.traffic.is_long_down() {
                true => self.within(GET_TIMEOUT_DOWN, &ask).await,
                false => self.once(&ask).await,
            };
            op.answered(&result);
            if result.is_ok() {
                self.traffic.succeeded();
            }
            result
        };
        let begun_ns = self.env.clock.boot_ns();
        let is_worth_it = |error: &StoreError| {
            let is_late = || self.env.clock.boot_ns() - begun_ns > GET_PATIENCE_NS;
            error.is_passing() && !(waits && (self.traffic.is_long_down() || is_late()))
        };
        attempts.retry(pauses).when(is_worth_it).await
    }

    /// Requests under way, then those that ended recently, newest first.
    pub fn ops(&self) -> Vec<StoreOp> {
        self.traffic.ops()
    }

    /// Whether the store answers this node. Needs a task that runs [`S3Store::watch`].
    pub fn health(&self) -> SeenBy {
        self.traffic.health()
    }

    /// Checks about once a second whether a store answers, until nothing uses it any more.
    pub async fn watch(store: Weak<Self>) {
        while let Some(store) = store.upgrade() {
            store.traffic.checked(store.check_health().await);
            let random_ms = store.env.random.next_u64() % CHECK_EVERY_MS;
            drop(store);
            tokio::time::sleep(Duration::from_millis(CHECK_EVERY_MS / 2 + random_ms)).await;
        }
    }

    async fn check_health(&self) -> Result<(), StoreError> {
        let ask = Ask::new(Method::GET, ALIVE.to_owned());
        match self.within(CHECK_TIMEOUT, &ask).await {
            // There is no such object: that is an answer, unless it is about the bucket.
            Err(StoreError::NotFound(text)) if !answer::is_about_bucket(&text) => Ok(()),
            // Without the right to list, a store does not say that an object is missing.
            Err(StoreError::Denied(text)) if answer::is_about_rights(&text) => Ok(()),
            found => found.map(drop),
        }
    }

    /// Sends a request once.
    async fn once(&self, ask: &Ask) -> Result<Bytes, StoreError> {
        let slowest = Duration::from_secs(ask.bytes() / BYTES_PER_S_MIN);
        self.within(REQUEST_TIMEOUT + slowest, ask).await
    }

    async fn within(&self, timeout: Duration, ask: &Ask) -> Result<Bytes, StoreError> {
        let answer = tokio::time::timeout(timeout, self.exchange(ask)).await;
        answer.unwrap_or_else(|_| Err(StoreError::Unavailable("it took too long".to_owned())))
    }

    async fn exchange(&self, ask: &Ask) -> Result<Bytes, StoreError> {
        let uri = self.settings.uri(&ask.key);
        let mut request = Request::builder().method(ask.method.clone()).uri(uri).header(USER_AGENT, AGENT);
        if let Some(range) = &ask.range {
            request = request.header(RANGE, format!("bytes={}-{}", range.start, range.end - 1));
        }
        let body = Parts::new(&ask.object);
        if ask.method == Method::PUT {
            request = request.header(CONTENT_LENGTH, body.len());
        }
        let request = request.body(body).map_err(|error| StoreError::Unexpected(error.to_string()))?;
        let request = sign::sign(&self.settings, request, self.env.clock.wall_ns())?;
        let request = reqwest::Request::try_from(request.map(reqwest::Body::wrap));
        let request = request.map_err(|error| StoreError::Unexpected(error.to_string()))?;
        let answer = self.http.execute(request).await.map_err(|error| answer::of_connection(&error))?;
        answer::body(answer, ask.range.as_ref()).await
    }
}

impl ObjectStore for S3Store {
    fn place(&self) -> u64 {
        self.settings.address.place()
    }

    fn put(&self, key: String, object: Outgoing) -> BoxFuture<'_, Result<(), StoreError>> {
        let ask = Ask { object, ..Ask::new(Method::PUT, key) };
        Box::pin(async { self.ask(ask).await.map(drop) })
    }

    fn get(&self, key: String, range: Option<Range<u64>>) -> BoxFuture<'_, Result<Bytes, StoreError>> {
        let ask = Ask { range, ..Ask::new(Method::GET, key) };
        Box::pin(self.ask(ask))
    }

    fn delete(&self, key: String) -> BoxFuture<'_, Result<(), StoreError>> {
        let ask = Ask::new(Method::DELETE, key);
        Box::pin(async {
            match self.ask(ask).await {
                Ok(_) => Ok(()),
                // Some stores report this, others do not. A missing bucket has an error code of its own.
                Err(StoreError::NotFound(text)) if !answer::is_about_bucket(&text) => Ok(()),
                Err(error) => Err(error),
            }
        })
    }
}

/// A body in parts, which are never copied together.
struct Parts {
    parts: VecDeque<Bytes>,
    steps: Steps,
    /// The rest before the next part.
    rest: Option<Pin<Box<Sleep>>>,
}

impl Parts {
    fn new(object: &Outgoing) -> Self {
        let steps = Steps::new(object.pace.clone());
        Self { parts: object.parts.iter().cloned().collect(), steps, rest: None }
    }

    fn len(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }

    fn next(&mut self) -> Option<Bytes> {
        let mut part = self.parts.pop_front()?;
        let most = self.steps.bytes_max().min(part.len() as u64);
        let some = part.split_to(most as usize);
        if !part.is_empty() {
            self.parts.push_front(part);
        }
        self.rest = self.steps.went(most).map(|rest| Box::pin(tokio::time::sleep(rest)));
        Some(some)
    }
}

impl Body for Parts {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(rest) = &mut self.rest {
            ready!(rest.as_mut().poll(context));
            self.rest = None;
        }
        Poll::Ready(self.next().map(|part| Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.parts.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.len())
    }
}
