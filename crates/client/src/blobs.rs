//! Reads of extents that only an object store has: ranges of blobs, verified by the sums in the front of the blob.
//!
//! A long range is read in aligned windows, a short extent as a whole. Both are kept for a moment, so that a sequential
//! reader and the task that brings the extent back behind it fetch every byte once. A short range of a long extent is
//! read exactly, in whole blocks. Concurrent readers of the same range share one fetch. The front of a blob and its
//! first window are fetched in parallel: one round trip.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::units::BLOCK_BYTES;
use base::{Epoch, Ino, LedgerId};
use bytes::Bytes;
use futures_util::future::{join, join_all};
use layout::{BLOB_HEADER_BYTES, BlobHeader, BlobId, BlobIndex};
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use wire::store::{ObjectStore, Outgoing, StoreError};
use wire::tier::BlobPlace;

use crate::TierLink;
use crate::extents::ReadExtentError;
use crate::reserved::Reserved;

const BLOCK: u64 = BLOCK_BYTES;
/// Length and alignment of a window.
const WINDOW: u64 = 1 << 20;
/// A read of at least this many bytes is done in windows. An extent of at most this length is read as a whole.
pub(crate) const LONG: u64 = 128 << 10;
/// Windows that are kept with little memory and with much.
const WINDOWS_MIN: u64 = 4;
const WINDOWS_MAX: u64 = 32;
/// Fronts that are kept for each window. The front of a blob has about 100 KiB at most.
const FRONTS_PER_WINDOW: u64 = 2;
/// Memory for a window and its fronts.
const WINDOW_COST: u64 = 5 * WINDOW / 4;
/// The first read of a front: nearly always all of it.
const FRONT_GUESS: u64 = 128 << 10;
/// How often damaged bytes are fetched before they count as damaged.
const ATTEMPTS: u32 = 2;
/// The part of the windows for pieces that are being brought back. More would evict the windows of readers.
const COMING_BACK: (u64, u64) = (3, 4);

/// The least memory for files that are being brought back on request ...
const RETURNING_MIN: u64 = 4 << 20;
/// ... and the most that one load fetches. A load is at most a quarter of that memory, so that others can be written.
const LOAD_MAX: u64 = 8 << 20;

/// While the filesystem is in use: bytes of requested files that are fetched at a time, and the size of one load.
const GENTLY_BYTES: u64 = 4 << 20;
const GENTLE_LOAD_BYTES: u64 = 1 << 20;

/// How much of a blob is fetched for a few bytes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Whole windows for a long range, the whole extent if it is short, otherwise only the blocks of the range.
    Usual,
    /// Whole windows, because neighbouring bytes will be read, too.
    Windows,
}

/// A range of a blob that is fetched at once.
struct Cut {
    range: Range<u64>,
    /// Whether it is kept for a moment.
    is_kept: bool,
}

/// The ranges of a blob that are fetched for `wanted`, which lies in `extent`.
fn cuts(
    place: &BlobPlace,
    extent: Range<u64>,
    wanted: Range<u64>,
    reach: Reach,
) -> impl Iterator<Item = Cut> {
    let windows = reach == Reach::Windows || wanted.end - wanted.start >= LONG;
    let is_whole = !windows && extent.end - extent.start <= LONG;
    let range = if is_whole { extent } else { wanted };
    // Data blocks also begin at multiples of a block in the blob.
    let step = if windows { WINDOW } else { BLOCK };
    let first = range.start / step * step;
    let end = range.end.next_multiple_of(step).min(place.blob_bytes.into());
    let len = if windows { WINDOW } else { end - first };
    let is_kept = windows || is_whole;
    (first..end)
        .step_by(len.max(1) as usize)
        .map(move |from| Cut { range: from..(from + len).min(end), is_kept })
}

/// After a piece could not be brought back behind a reader, none is for this long: full drives stay full for a while.
const PAUSE_NS: u64 = 2_000_000_000;

/// The result of a fetch.
type Cell<V> = Arc<OnceCell<Result<V, ReadExtentError>>>;

/// The newest values of a kind. Concurrent callers share one fetch.
struct Kept<K, V> {
    cells: Mutex<VecDeque<(K, Cell<V>)>>,
    most: usize,
}

impl<K: PartialEq, V: Clone> Kept<K, V> {
    fn new(most: usize) -> Self {
        Self { cells: Mutex::default(), most }
    }

    /// Returns the value, fetching it if necessary. All callers that wait for a failing fetch get its error: if each
    /// tried again in turn, the last would wait for all of them.
    async fn get(
        &self,
        key: K,
        fetch: impl Future<Output = Result<V, ReadExtentError>>,
    ) -> Result<V, ReadExtentError> {
        let cell = self.cell(key);
        let result = cell.get_or_init(|| fetch).await.clone();
        if result.is_err() {
            let mut cells = self.cells.lock().expect("no holder of this lock panics");
            cells.retain(|(_, kept)| !Arc::ptr_eq(kept, &cell));
        }
        result
    }

    fn cell(&self, key: K) -> Cell<V> {
        let mut cells = self.cells.lock().expect("no holder of this lock panics");
        if let Some((_, cell)) = cells.iter().find(|(known, _)| *known == key) {
            return cell.clone();
        }
        if cells.len() >= self.most {
            cells.pop_front();
        }
        let cell = Arc::new(OnceCell::new());
        cells.push_back((key, cell.clone()));
        cell
    }

    fn forget(&self) {
        self.cells.lock().expect("no holder of this lock panics").clear();
    }
}

/// The front of a blob: its layout and sums.
struct Front {
    data_off: u64,
    blob_bytes: u64,
    index: BlobIndex,
}

/// Blobs of one ledger.
pub(crate) struct Blobs {
    ledger: LedgerId,
    pub(crate) link: TierLink,
    fronts: Kept<u64, Arc<Front>>,
    windows: Kept<(u64, u64, u64), Bytes>,
    fetched_bytes: AtomicU64,
    /// A permit for each window that pieces being brought back may use.
    coming_back: Arc<Semaphore>,
    coming_back_most: u32,
    /// A permit for each KiB of requested files that is being brought back.
    returning: Semaphore,
    returning_bytes: u64,
    /// A permit for each short extent that is fetched while the filesystem is in use.
    gently: Semaphore,
    /// Held during the pause after such a fetch, so that parallel fetches share one pace.
    resting: tokio::sync::Mutex<()>,
    /// Until then no piece is brought back behind readers.
    paused_until_ns: AtomicU64,
    /// Pieces that are being brought back, by file and offset.
    pub(crate) pieces: Mutex<HashSet<(Ino, u64)>>,
    pub(crate) reserved: Reserved,
}

impl Blobs {
    pub(crate) fn new(ledger: LedgerId, link: TierLink) -> Self {
        let windows: u64 = (link.fetched_bytes_max / WINDOW_COST).clamp(WINDOWS_MIN, WINDOWS_MAX);
        let coming_back = windows * COMING_BACK.0 / COMING_BACK.1;
        let returning_bytes = link.returning_bytes_max.max(RETURNING_MIN);
        Self {
            ledger,
            link,
            fronts: Kept::new((FRONTS_PER_WINDOW * windows) as usize),
            windows: Kept::new(windows as usize),
            fetched_bytes: AtomicU64::new(0),
            coming_back: Arc::new(Semaphore::new(coming_back as usize)),
            coming_back_most: coming_back as u32,
            returning: Semaphore::new((returning_bytes >> 10) as usize),
            returning_bytes,
            gently: Semaphore::new((GENTLY_BYTES / LONG) as usize),
            resting: tokio::sync::Mutex::default(),
            paused_until_ns: AtomicU64::new(0),
            pieces: Mutex::default(),
            reserved: Reserved::default(),
        }
    }

    /// Bytes of blobs that came from the store.
    pub(crate) fn fetched_bytes(&self) -> u64 {
        self.fetched_bytes.load(Ordering::Relaxed)
    }

    /// Whether bringing back behind readers is paused.
    pub(crate) fn is_paused(&self, now_ns: u64) -> bool {
        now_ns < self.paused_until_ns.load(Ordering::Relaxed)
    }

    /// Pauses bringing back behind readers after a piece failed.
    pub(crate) fn pause(&self, now_ns: u64) {
        self.paused_until_ns.store(now_ns + PAUSE_NS, Ordering::Relaxed);
    }

    /// Stores a blob. Returns the place where it is.
    pub(crate) async fn put(&self, id: BlobId, blob: Outgoing) -> Result<u64, StoreError> {
        let store = self.store().ok_or_else(|| StoreError::Unavailable("no store is attached".to_owned()))?;
        store.put(id.key(self.link.cluster), blob).await?;
        Ok(store.place())
    }

    /// Bytes of a blob as the store has them, not verified.
    pub(crate) async fn unverified(
        &self,
        (serial, term): (u64, Epoch),
        range: Range<u64>,
    ) -> Result<Bytes, StoreError> {
        let store = self.store().ok_or_else(|| StoreError::Unavailable("no store is attached".to_owned()))?;
        store.get(self.id(serial, term).key(self.link.cluster), Some(range)).await
    }

    /// Waits until a piece of this length can be brought back without evicting others.
    pub(crate) async fn turn(&self, len: u64) -> OwnedSemaphorePermit {
        let windows = (len.div_ceil(WINDOW) as u32 + 1).min(self.coming_back_most);
        let permits = Arc::clone(&self.coming_back).acquire_many_owned(windows).await;
        permits.expect("it is never closed")
    }

    /// The size of a load of requested files, in bytes.
    pub(crate) fn load_bytes(&self) -> u64 {
        LOAD_MAX.min(self.returning_bytes / 4)
    }

    /// As [`Blobs::load_bytes`], while the filesystem is in use.
    pub(crate) fn gentle_load_bytes(&self) -> u64 {
        GENTLE_LOAD_BYTES.min(self.load_bytes())
    }

    /// Pauses; concurrent callers pause one after the other.
    pub(crate) async fn pause_in_turn(&self, rest: Duration) {
        let _turn = self.resting.lock().await;
        tokio::time::sleep(rest).await;
    }

    /// Waits for memory for a load of `len` bytes.
    pub(crate) async fn load_turn(&self, len: u64) -> SemaphorePermit<'_> {
        let kib = len.min(self.returning_bytes).div_ceil(1 << 10) as u32;
        self.returning.acquire_many(kib).await.expect("it is never closed")
    }

    /// Waits until `len` bytes can be fetched without much disturbance to users of the filesystem.
    pub(crate) async fn gentle_turn(&self, len: u64) -> SemaphorePermit<'_> {
        let permits = len.clamp(1, GENTLY_BYTES).div_ceil(LONG) as u32;
        self.gently.acquire_many(permits).await.expect("it is never closed")
    }

    pub(crate) fn store(&self) -> Option<Arc<dyn ObjectStore>> {
        self.link.store.borrow().clone()
    }

    /// The name of a blob.
    pub(crate) fn id(&self, serial: u64, term: Epoch) -> BlobId {
        BlobId { ledger: self.ledger, serial, term }
    }

    /// Reads `out.len()` bytes of an extent of `extent_len`, from `off` on.
    pub(crate) async fn read_into(
        &self,
        place: BlobPlace,
        extent_len: u32,
        off: u32,
        out: &mut [u8],
        reach: Reach,
    ) -> Result<(), ReadExtentError> {
        let extent = u64::from(place.off)..u64::from(place.off) + u64::from(extent_len);
        let from = extent.start + u64::from(off);
        let end = from + out.len() as u64;
        let mut rest = out;
        let mut parts = Vec::new();
        for cut in cuts(&place, extent, from..end, reach) {
            let wanted = from.max(cut.range.start)..end.min(cut.range.end);
            let (part, later) = rest.split_at_mut((wanted.end - wanted.start) as usize);
            rest = later;
            parts.push(async move {
                let bytes = self.cut_bytes(&place, cut, wanted).await?;
                part.copy_from_slice(&bytes);
                Ok(())
            });
        }
        join_all(parts).await.into_iter().collect()
    }

    /// Reads a range that is not kept.
    pub(crate) async fn read(&self, place: &BlobPlace, range: Range<u64>) -> Result<Bytes, ReadExtentError> {
        let end = range.end.next_multiple_of(BLOCK).min(place.blob_bytes.into());
        let bytes = self.verified(place, range.start / BLOCK * BLOCK..end).await?;
        let (from, len) = ((range.start % BLOCK) as usize, (range.end - range.start) as usize);
        if bytes.len() < from + len {
            Err(ReadExtentError::Damaged)
        } else {
            Ok(bytes.slice(from..from + len))
        }
    }

    /// Bytes `wanted` of the range `cut`.
    async fn cut_bytes(
        &self,
        place: &BlobPlace,
        cut: Cut,
        wanted: Range<u64>,
    ) -> Result<Bytes, ReadExtentError> {
        let Cut { range, is_kept } = cut;
        let bytes = if is_kept {
            let key = (place.serial, range.start, range.end);
            match self.windows.get(key, self.verified(place, range.clone())).await {
                // The damage may be elsewhere in the window.
                Err(ReadExtentError::Damaged) if wanted != range => return self.read(place, wanted).await,
                bytes => bytes?,
            }
        } else {
            self.verified(place, range.clone()).await?
        };
        let at = |off: u64| (off - range.start) as usize;
        if at(wanted.end) > bytes.len() {
            return Err(ReadExtentError::Damaged);
        }
        Ok(bytes.slice(at(wanted.start)..at(wanted.end)))
    }

    /// Reads a range of a blob and verifies it with the sums of the blob. Damaged bytes are fetched once more.
    async fn verified(&self, place: &BlobPlace, cut: Range<u64>) -> Result<Bytes, ReadExtentError> {
        for attempt in 0..ATTEMPTS {
            let (front, bytes) = join(self.front(place), self.get(place, cut.clone())).await;
            let (front, bytes) = (front?, bytes?);
            // A window may begin in the front.
            let skip = front.data_off.saturating_sub(cut.start).min(bytes.len() as u64);
            let first = (cut.start + skip).saturating_sub(front.data_off) / BLOCK;
            if cut.end <= front.blob_bytes && front.index.blocks_match(first as u32, &bytes[skip as usize..])
            {
                return Ok(bytes);
            }
            tracing::error!(blob = %self.key(place), from = cut.start, end = cut.end, attempt, "bytes of a blob do not match their sums");
        }
        Err(ReadExtentError::Damaged)
    }

    async fn front(&self, place: &BlobPlace) -> Result<Arc<Front>, ReadExtentError> {
        let fetch = async {
            for _ in 0..ATTEMPTS {
                if let Some(front) = self.get_front(place).await? {
                    return Ok(Arc::new(front));
                }
            }
            // Nothing in it can be verified.
            Err(ReadExtentError::Damaged)
        };
        self.fronts.get(place.serial, fetch).await
    }

    /// Fetches the front of a blob; `None` if it is damaged.
    async fn get_front(&self, place: &BlobPlace) -> Result<Option<Front>, ReadExtentError> {
        let blob_bytes = u64::from(place.blob_bytes);
        let guess = self.get(place, 0..FRONT_GUESS.min(blob_bytes)).await?;
        let damaged = |what: &dyn std::fmt::Display| {
            tracing::error!(blob = %self.key(place), %what, "the front of a blob is damaged");
        };
        let Some(head) = guess.get(..BLOB_HEADER_BYTES) else {
            damaged(&"it is too short");
            return Ok(None);
        };
        let header = match BlobHeader::decode(head) {
            Ok(header) => header,
            Err(error) => {
                damaged(&error);
                return Ok(None);
            }
        };
        if header.id != self.id(place.serial, place.term) || header.blob_bytes() as u64 != blob_bytes {
            damaged(&"it is of another blob");
            return Ok(None);
        }
        let data_off = header.data_off() as u64;
        let rest = match data_off.saturating_sub(guess.len() as u64) {
            0 => Bytes::new(),
            _ => self.get(place, guess.len() as u64..data_off).await?,
        };
        let index = [&guess[BLOB_HEADER_BYTES..guess.len().min(data_off as usize)], &rest].concat();
        match BlobIndex::decode(&header, &index) {
            Ok(index) => Ok(Some(Front { data_off, blob_bytes, index })),
            Err(error) => {
                damaged(&error);
                Ok(None)
            }
        }
    }

    async fn get(&self, place: &BlobPlace, range: Range<u64>) -> Result<Bytes, ReadExtentError> {
        let Some(store) = self.store() else {
            tracing::error!(blob = %self.key(place), "no store is attached that could have this blob");
            return Err(ReadExtentError::StoreFailed);
        };
        match store.get(self.key(place), Some(range)).await {
            Ok(bytes) => {
                self.fetched_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                Ok(bytes)
            }
            // The map that named it may be old: a blob is deleted when no extent lies in it any more.
            Err(error) if error.is_about_object() => {
                tracing::warn!(blob = %self.key(place), %error, "the store does not have this blob");
                self.fronts.forget();
                Err(ReadExtentError::Doubtful)
            }
            Err(StoreError::TooShort(error)) => {
                tracing::error!(blob = %self.key(place), error, "a blob is shorter than it was when stored");
                Err(ReadExtentError::Damaged)
            }
            Err(error) => {
                tracing::error!(blob = %self.key(place), %error, "a blob cannot be read");
                Err(ReadExtentError::StoreFailed)
            }
        }
    }

    fn key(&self, place: &BlobPlace) -> String {
        self.id(place.serial, place.term).key(self.link.cluster)
    }
}
