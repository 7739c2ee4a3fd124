//! Streams an object's bytes to the client, with bounded read-ahead for one request and for all together.

use std::collections::VecDeque;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use base::{FsError, Ino};
use bytes::Bytes;
use client::Client;
use client::object::{ObjectInfo, SMALL_BYTES_MAX};
use futures_util::Stream;
use s3s::dto::StreamingBlob;
use s3s::stream::{ByteStream, RemainingLength};
use s3s::{Body, StdError};

use crate::gate::Services;

/// Limits of the bytes that are read ahead for one client.
const WINDOW_BYTES_MIN: u64 = 128 << 10;
const WINDOW_BYTES_MAX: u64 = 4 << 20;
/// Bytes of one read.
const PIECE_BYTES: u64 = 1 << 20;

/// Shares the read-ahead memory between responses.
pub(crate) struct StreamBudget {
    streams: AtomicU64,
    /// Bytes read ahead for all responses together.
    ahead_bytes: u64,
}

impl StreamBudget {
    pub(crate) fn new(ahead_bytes: u64) -> Self {
        Self { streams: AtomicU64::new(0), ahead_bytes }
    }

    fn window(&self) -> u64 {
        let streams = self.streams.load(Ordering::Relaxed).max(1);
        (self.ahead_bytes / streams).clamp(WINDOW_BYTES_MIN, WINDOW_BYTES_MAX)
    }
}

/// An object could not be read to its end: mostly because it changed in place.
#[derive(Debug, thiserror::Error)]
#[error("cannot read object to its end: {0}")]
struct ReadError(FsError);

/// A handle on an object; closed on drop.
pub(crate) struct OpenObject {
    client: Client,
    ino: Ino,
    data_ver: u64,
}

impl OpenObject {
    fn new(client: &Client, info: &ObjectInfo) -> Self {
        Self { client: client.clone(), ino: info.attr.ino, data_ver: info.attr.data_ver }
    }

    /// Refuses a short read, and bytes of a newer version than the ETag and headers of the answer: a retry gets the new
    /// version.
    async fn check(&self, read: usize, len: usize) -> Result<(), FsError> {
        let now = self.client.getattr(self.ino).await?;
        if read == len && now.data_ver == self.data_ver { Ok(()) } else { Err(FsError::Stale) }
    }

    async fn read(&self, off: u64, len: usize) -> Result<Bytes, FsError> {
        let bytes = self.client.read(self.ino, off, len).await?;
        self.check(bytes.len(), len).await?;
        Ok(bytes)
    }

    /// Reads bytes in the pieces that the drives return.
    async fn read_parts(&self, off: u64, len: usize) -> Result<Vec<Bytes>, FsError> {
        let parts = self.client.read_parts(self.ino, off, len, client::ReadAccess::Noted).await?;
        self.check(parts.iter().map(Bytes::len).sum(), len).await?;
        Ok(parts)
    }
}

impl Drop for OpenObject {
    fn drop(&mut self) {
        self.client.close_file(self.ino);
    }
}

/// An object that [`Client::get_object`] or [`Client::read_object`] returned.
pub(crate) struct Source {
    info: ObjectInfo,
    open: Option<Arc<OpenObject>>,
}

impl Source {
    pub(crate) fn new(client: &Client, info: ObjectInfo) -> Self {
        let is_open = !info.directory && info.pieces.is_none();
        let open = is_open.then(|| Arc::new(OpenObject::new(client, &info)));
        Self { info, open }
    }

    pub(crate) fn info(&self) -> &ObjectInfo {
        &self.info
    }

    /// The bytes of a range: from memory in one piece up to [`SMALL_BYTES_MAX`], otherwise as a stream.
    pub(crate) async fn body(&self, core: &Services, range: Range<u64>) -> Result<Body, FsError> {
        if range.is_empty() {
            return Ok(Body::empty());
        }
        if self.info.pieces.is_some() {
            return core.client.read_small(&self.info, range).await.map(Body::from);
        }
        let Some(open) = &self.open else {
            return Ok(Body::from(self.info.body.slice(range.start as usize..range.end as usize)));
        };
        if range.end - range.start <= SMALL_BYTES_MAX {
            return open.read(range.start, (range.end - range.start) as usize).await.map(Body::from);
        }
        Ok(StreamingBlob::new(self.stream(core, vec![range])).into())
    }

    /// The bytes of several ranges of an object that [`Client::get_object`] returned, one after another.
    pub(crate) fn stream(&self, core: &Services, ranges: Vec<Range<u64>>) -> ObjectStream {
        core.streams.streams.fetch_add(1, Ordering::Relaxed);
        let left = ranges.iter().map(|range| range.end - range.start).sum();
        ObjectStream {
            open: self.open.clone(),
            body: self.info.body.clone(),
            budget: core.streams.clone(),
            ranges: ranges.into(),
            left,
            reads: Mutex::default(),
        }
    }
}

type Read = Pin<Box<dyn Future<Output = Result<Vec<Bytes>, FsError>> + Send>>;

enum Piece {
    Running(Read, u64),
    /// The pieces of a finished read that the consumer has not taken yet.
    Done(VecDeque<Bytes>),
}

/// Bytes of an object in order. Several reads run at once; each is polled when the consumer polls the stream.
pub(crate) struct ObjectStream {
    open: Option<Arc<OpenObject>>,
    body: Bytes,
    budget: Arc<StreamBudget>,
    ranges: VecDeque<Range<u64>>,
    left: u64,
    reads: Mutex<VecDeque<Piece>>,
}

impl Drop for ObjectStream {
    fn drop(&mut self) {
        self.budget.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ObjectStream {
    /// Starts reads until the window is full.
    fn fill(&mut self) {
        let window = self.budget.window();
        let piece = PIECE_BYTES.min(window / 2).max(64 << 10);
        let reads = self.reads.get_mut().expect("no holder of this lock panics");
        let mut ahead: u64 = reads
            .iter()
            .map(|read| match read {
                Piece::Running(_, len) => *len,
                Piece::Done(parts) => parts.iter().map(|part| part.len() as u64).sum(),
            })
            .sum();
        while ahead < window
            && let Some(range) = self.ranges.front_mut()
        {
            // Pieces are aligned, so that each lies in few extents.
            let end = ((range.start / piece + 1) * piece).min(range.end);
            let (off, len) = (range.start, end - range.start);
            range.start = end;
            if range.is_empty() {
                self.ranges.pop_front();
            }
            ahead += len;
            match &self.open {
                None => {
                    let part = self.body.slice(off as usize..end as usize);
                    reads.push_back(Piece::Done(VecDeque::from([part])));
                }
                Some(open) => {
                    let open = open.clone();
                    let read = async move { open.read_parts(off, len as usize).await };
                    reads.push_back(Piece::Running(Box::pin(read), len));
                }
            }
        }
    }
}

impl Stream for ObjectStream {
    type Item = Result<Bytes, StdError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        this.fill();
        let reads = this.reads.get_mut().expect("no holder of this lock panics");
        let mut failed = None;
        for piece in reads.iter_mut() {
            if let Piece::Running(read, _) = piece
                && let Poll::Ready(result) = read.as_mut().poll(context)
            {
                match result {
                    Ok(parts) => *piece = Piece::Done(parts.into()),
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
        }
        if let Some(error) = failed {
            this.ranges.clear();
            reads.clear();
            return Poll::Ready(Some(Err(Box::new(ReadError(error)))));
        }
        let part = match reads.front_mut() {
            None => return Poll::Ready(None),
            Some(Piece::Running(..)) => return Poll::Pending,
            Some(Piece::Done(parts)) => parts.pop_front().unwrap_or_default(),
        };
        if matches!(reads.front(), Some(Piece::Done(parts)) if parts.is_empty()) {
            reads.pop_front();
        }
        this.left -= part.len() as u64;
        Poll::Ready(Some(Ok(part)))
    }
}

impl ByteStream for ObjectStream {
    fn remaining_length(&self) -> RemainingLength {
        RemainingLength::new_exact(self.left as usize)
    }
}
