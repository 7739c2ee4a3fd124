//! The body of a request: deadlines, a length limit, a byte count, and draining of unread bytes.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::HeaderMap;
use s3s::S3Error;
use tokio::time::{Instant, Sleep};

use super::chunked::{Chunked, ChunkedError};
use super::form::{FormFields, FormHead, FormStart};
use crate::error::body_error;
use crate::hash::DocumentCheck;

/// Unread bytes of a refused request that are still read, so that the client reads the answer and does not see a closed
/// connection.
const DRAIN_BYTES_MAX: u64 = 8 << 20;
const DRAIN_TIME_MAX: Duration = Duration::from_secs(5);
/// A client that pauses for longer than this while its body is drained gets its answer: it may have announced more than
/// it has.
const DRAIN_PAUSE_MAX: Duration = Duration::from_millis(500);

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum BodyError {
    /// The client was below the required speed.
    #[error("request body came too slowly")]
    TooSlow,
    /// The connection broke.
    #[error("request body broke off")]
    Broken(#[source] hyper::Error),
    /// The framing of `aws-chunked` is wrong.
    #[error(transparent)]
    Chunked(#[from] ChunkedError),
    /// The body is a document that does not match its digests.
    #[error("document does not match its digest")]
    Document,
}

/// Required speed of a body.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyRules {
    pub(crate) idle_timeout: Duration,
    pub(crate) bytes_per_s_min: u64,
}

/// State of a body that other parts see: bytes received, and the unread rest once its reader has gone.
#[derive(Default)]
pub(crate) struct Unread {
    bytes: AtomicU64,
    rest: Mutex<Option<Incoming>>,
    failure: Mutex<Option<S3Error>>,
    form: OnceLock<FormFields>,
    trailers: OnceLock<HeaderMap>,
    decoded: OnceLock<u64>,
}

impl Unread {
    /// Bytes received.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Why the body ended early. The protocol library reports an internal error in its place when it reads documents.
    pub(crate) fn failure(&self) -> Option<S3Error> {
        self.failure.lock().expect("no holder of this lock panics").take()
    }

    /// Fields of a form, once its head was read.
    pub(crate) fn form(&self) -> Option<&FormFields> {
        self.form.get()
    }

    /// Notes the body's length without frames, which are removed here.
    pub(crate) fn announce(&self, bytes: u64) {
        // A request has one body.
        let _ = self.decoded.set(bytes);
    }

    /// Length of the body without frames, if they are removed here.
    pub(crate) fn decoded_bytes(&self) -> Option<u64> {
        self.decoded.get().copied()
    }

    /// A trailer of a body that was read to its end, if the framing was removed here.
    pub(crate) fn trailer(&self, name: &str) -> Option<&str> {
        self.trailers.get()?.get(name)?.to_str().ok()
    }

    /// Keeps a body that has no reader, for [`Self::drain`].
    pub(crate) fn leave(&self, body: Incoming) {
        *self.rest.lock().expect("no holder of this lock panics") = Some(body);
    }

    fn fail(&self, error: S3Error) {
        *self.failure.lock().expect("no holder of this lock panics") = Some(error);
    }

    /// Reads and drops the rest of the body, within limits. Returns whether the body has ended. A body whose rest
    /// exceeds the limits is not read at all, so that its client need not wait for the answer.
    pub(crate) async fn drain(&self) -> bool {
        let rest = self.rest.lock().expect("no holder of this lock panics").take();
        let Some(mut rest) = rest else { return true };
        if rest.size_hint().lower() > DRAIN_BYTES_MAX {
            return false;
        }
        let drain = async {
            let mut left = DRAIN_BYTES_MAX;
            loop {
                let next = std::future::poll_fn(|cx| Pin::new(&mut rest).poll_frame(cx));
                let Ok(next) = tokio::time::timeout(DRAIN_PAUSE_MAX, next).await else { return false };
                let Some(Ok(frame)) = next else { return true };
                let len = frame.data_ref().map_or(0, Bytes::len) as u64;
                let Some(now) = left.checked_sub(len) else { return false };
                left = now;
            }
        };
        tokio::time::timeout(DRAIN_TIME_MAX, drain).await.unwrap_or(false)
    }
}

/// How the bytes of a body are handled.
pub(crate) enum Coding {
    /// Passed on as they are.
    Plain,
    /// In frames of `aws-chunked`.
    Chunked(Chunked),
    /// A document, compared with its digests.
    Document(Box<DocumentCheck>),
    /// The head of a form.
    Form(FormHead),
}

/// The body.
pub(crate) struct RequestBody {
    inner: Option<Incoming>,
    coding: Coding,
    seen: Arc<Unread>,
    rules: BodyRules,
    began: Instant,
    /// Set while the body waits for bytes.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl RequestBody {
    pub(crate) fn new(inner: Incoming, coding: Coding, rules: BodyRules, seen: Arc<Unread>) -> Self {
        Self { inner: Some(inner), coding, seen, rules, began: Instant::now(), waiting: None }
    }

    /// Deadline for the next bytes: the idle timeout, or sooner if the whole body is below the required speed.
    fn deadline(&self) -> Instant {
        let idle = Instant::now() + self.rules.idle_timeout;
        let earned = Duration::from_secs(self.seen.bytes() / self.rules.bytes_per_s_min.max(1));
        idle.min(self.began + self.rules.idle_timeout + earned)
    }

    fn poll_inner(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, BodyError>>> {
        loop {
            let Some(inner) = self.inner.as_mut() else { return Poll::Ready(None) };
            match Pin::new(inner).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => {
                    self.waiting = None;
                    // S3 has no meaning for HTTP trailers.
                    let Ok(bytes) = frame.into_data() else { continue };
                    self.seen.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                    return Poll::Ready(Some(Ok(bytes)));
                }
                Poll::Ready(Some(Err(error))) => {
                    self.inner = None;
                    return Poll::Ready(Some(Err(BodyError::Broken(error))));
                }
                Poll::Ready(None) => {
                    self.inner = None;
                    return Poll::Ready(None);
                }
                Poll::Pending => {
                    let deadline = self.deadline();
                    let waiting =
                        self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
                    std::task::ready!(waiting.as_mut().poll(context));
                    self.inner = None;
                    return Poll::Ready(Some(Err(BodyError::TooSlow)));
                }
            }
        }
    }
}

impl RequestBody {
    /// Keeps the fields of a form and returns the bytes of its head; later bytes pass unchanged.
    fn begin_form(&mut self, start: FormStart) -> Bytes {
        // A form has one beginning.
        let _ = self.seen.form.set(start.fields);
        self.coding = Coding::Plain;
        start.bytes
    }

    /// At the end of the body: returns what a short form held back.
    fn finish(&mut self) -> Option<Result<Frame<Bytes>, BodyError>> {
        match &mut self.coding {
            Coding::Form(head) => {
                let start = head.finish();
                let bytes = self.begin_form(start);
                (!bytes.is_empty()).then(|| Ok(Frame::data(bytes)))
            }
            Coding::Chunked(chunked) => match chunked.finish() {
                Ok(trailers) => {
                    // A body ends once; a poll after the end finds the trailers set.
                    let _ = self.seen.trailers.set(trailers);
                    None
                }
                Err(error) => {
                    self.seen.fail(body_error(&error));
                    Some(Err(error.into()))
                }
            },
            Coding::Plain | Coding::Document(_) => None,
        }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        loop {
            if let Coding::Chunked(chunked) = &mut this.coding
                && let Some(bytes) = chunked.next()
            {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            let bytes = match std::task::ready!(this.poll_inner(context)) {
                Some(Ok(bytes)) => bytes,
                Some(Err(error)) => {
                    this.seen.fail(body_error(&error));
                    return Poll::Ready(Some(Err(error)));
                }
                None => return Poll::Ready(this.finish()),
            };
            match &mut this.coding {
                Coding::Form(head) => {
                    if let Some(start) = head.take(&bytes) {
                        return Poll::Ready(Some(Ok(Frame::data(this.begin_form(start)))));
                    }
                }
                Coding::Plain => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                Coding::Document(check) => {
                    let checked = check.update(&bytes).map_err(|error| {
                        this.seen.fail(error);
                        BodyError::Document
                    });
                    return Poll::Ready(Some(checked.map(|()| Frame::data(bytes))));
                }
                Coding::Chunked(chunked) => {
                    if let Err(error) = chunked.take(bytes) {
                        this.seen.fail(body_error(&error));
                        return Poll::Ready(Some(Err(error.into())));
                    }
                }
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.inner, &self.coding) {
            (_, Coding::Form(_)) | (Some(_), Coding::Chunked(_)) => SizeHint::default(),
            (Some(inner), _) => inner.size_hint(),
            (None, _) => SizeHint::with_exact(0),
        }
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        *self.seen.rest.lock().expect("no holder of this lock panics") = self.inner.take();
    }
}
