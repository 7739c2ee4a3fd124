//! Steps of tiering: upload extents, release them from the drives, empty and delete blobs. `fetch` brings them back.
//!
//! Every step ends with one request to the owner that applies only to unchanged extents, so a step may be cut off
//! anywhere: a blob that nothing refers to is found again by its number.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use base::{Epoch, ExtentId, FsError, Ino};
use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt, stream};
use layout::{BLOB_HEADER_BYTES, BlobBuilder, BlobHeader, BlobPlan, BlobRange};
use wire::drive::GetPurpose;
use wire::meta::{Content, MetaReply, MetaRequest};
use wire::store::{MovePace, ObjectStore, Outgoing, Steps, StoreError};
use wire::tier::{
    AgedExtent, BlobStat, DueExtent, FilePart, InBlob, Origin, Stage, StageStat, TierReply, TierRequest,
    TierStat, Uploaded,
};

use crate::Client;
use crate::blobs::Reach;
use crate::extents::ReadExtentError;

/// Extents read at a time.
const READS: usize = 8;
/// Extents asked for at a time.
const PAGE: u32 = 1024;
/// How often a blob is looked for before it counts as missing in a store: a single answer may be damaged.
const LOOKS: u32 = 4;
const LOOK_PAUSE: Duration = Duration::from_millis(200);

/// Why a blob was not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UploadError {
    /// The owner failed.
    #[error("the owner did not answer: {0}")]
    Owner(#[from] FsError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// None of the extents can be read now.
    #[error("{0} extents that are due cannot be read: see `forebay status` for what drives lack")]
    Unreadable(usize),
}

/// Where the bytes of a file lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FileTiers {
    /// On drives, and in no blob.
    pub drives_bytes: u64,
    /// On drives and in blobs.
    pub both_bytes: u64,
    /// In blobs only.
    pub away_bytes: u64,
}

/// Parts of a file, and where to continue.
#[derive(Debug, Clone, Default)]
pub struct PartsPage {
    /// In order.
    pub parts: Vec<FilePart>,
    /// The offset of the next page, if there may be more.
    pub next: Option<u64>,
}

impl PartsPage {
    /// Adds the bytes of the parts, by place.
    pub fn add_to(&self, sum: &mut FileTiers) {
        for part in &self.parts {
            match part.stage {
                None | Some(Stage::Queued) => sum.drives_bytes += part.bytes,
                Some(Stage::Both) => sum.both_bytes += part.bytes,
                Some(Stage::Tiered) => sum.away_bytes += part.bytes,
            }
        }
    }
}

/// An extent that is to be uploaded, and where its bytes are.
enum Source {
    Drives(DueExtent),
    Blob(InBlob),
}

impl Source {
    fn id(&self) -> ExtentId {
        match self {
            Self::Drives(due) => due.extent.id,
            Self::Blob(inside) => inside.extent.id,
        }
    }

    /// The whole extent, at its present place.
    fn content(&self) -> Content {
        match self {
            Self::Blob(inside) if inside.stage == Stage::Tiered => {
                Content::Tiered(inside.extent, inside.place)
            }
            Self::Blob(InBlob { extent, .. }) | Self::Drives(DueExtent { extent, .. }) => {
                Content::Extent(*extent)
            }
        }
    }

    fn extent_len(&self) -> u32 {
        match self {
            Self::Drives(due) => due.extent.extent_len,
            Self::Blob(inside) => inside.extent.extent_len,
        }
    }

    fn origin(&self) -> Origin {
        match self {
            Self::Drives(due) => due.origin,
            Self::Blob(inside) => inside.origin,
        }
    }

    fn from(&self) -> Option<u64> {
        match self {
            Self::Drives(_) => None,
            Self::Blob(inside) => Some(inside.place.serial),
        }
    }
}

impl Client {
    pub(crate) async fn tier(&self, request: TierRequest) -> Result<TierReply, FsError> {
        match self.call(MetaRequest::Tier(request)).await? {
            MetaReply::Tier(reply) => Ok(reply),
            _ => Err(FsError::Io),
        }
    }

    /// Queues new extents for upload from now on, and all others step by step. It also stops bringing everything back
    /// from a store; in that case it must be the same store.
    pub async fn tier_attach(&self) -> Result<(), FsError> {
        self.tier(TierRequest::Attach).await.map(drop)
    }

    /// Blobs count only if they are stored at this place, see [`ObjectStore::place`].
    pub async fn tier_place(&self, place: u64) -> Result<(), FsError> {
        self.tier(TierRequest::Place { place }).await.map(drop)
    }

    /// Stops uploading extents and releasing them from the drives.
    pub async fn tier_leave(&self) -> Result<(), FsError> {
        self.tier(TierRequest::Leave).await.map(drop)
    }

    /// Queues older extents. Returns whether there are more.
    pub async fn tier_queue_step(&self) -> Result<bool, FsError> {
        Ok(self.tier(TierRequest::QueueStep).await? == TierReply::More(true))
    }

    /// Forgets extents in blobs that are on drives too, after [`Client::tier_leave`]. Returns whether there are more.
    pub async fn tier_leave_step(&self) -> Result<bool, FsError> {
        Ok(self.tier(TierRequest::LeaveStep).await? == TierReply::More(true))
    }

    /// The sums of tiering.
    pub async fn tier_stat(&self) -> Result<TierStat, FsError> {
        match self.tier(TierRequest::Stat).await? {
            TierReply::Stat(stat) => Ok(stat),
            _ => Err(FsError::Io),
        }
    }

    /// Bytes that came from the store since the client was opened.
    pub fn fetched_bytes(&self) -> u64 {
        self.inner.blobs.fetched_bytes()
    }

    /// Bytes of extents that went to the store since the client was opened.
    pub fn uploaded_bytes(&self) -> u64 {
        self.inner.peers.0.uploaded_bytes.load(Ordering::Relaxed)
    }

    /// Extents in a stage that were written by `before_s`, oldest first, after the one given.
    pub async fn tier_due(
        &self,
        stage: Stage,
        before_s: u64,
        after: Option<(u64, ExtentId)>,
    ) -> Result<Vec<DueExtent>, FsError> {
        match self.tier(TierRequest::Due { stage, before_s, after, limit: PAGE }).await? {
            TierReply::Due(due) => Ok(due),
            _ => Err(FsError::Io),
        }
    }

    /// The ages of extents that tier, and where to continue.
    pub async fn tier_ages(
        &self,
        after: Option<ExtentId>,
    ) -> Result<(Vec<AgedExtent>, Option<ExtentId>), FsError> {
        match self.tier(TierRequest::Ages { after, limit: PAGE }).await? {
            TierReply::Ages { ages, next } => Ok((ages, next)),
            _ => Err(FsError::Io),
        }
    }

    /// The number of these extents, from the first, that fit into one blob of at most `blob_bytes`.
    pub fn fitting(due: &[DueExtent], blob_bytes: u32) -> usize {
        let mut plan = BlobPlan::new(blob_bytes);
        due.iter().take_while(|due| plan.add(due.extent.extent_len)).count()
    }

    /// Stores extents in one new blob, without those that are gone or cannot be read. Returns the bytes of extents in
    /// it. Reading and sending each keep to `pace`.
    pub async fn upload(
        &self,
        due: Vec<DueExtent>,
        blob_bytes: u32,
        pace: Option<Arc<dyn MovePace>>,
    ) -> Result<u64, UploadError> {
        self.make_blob(due.into_iter().map(Source::Drives).collect(), blob_bytes, pace).await
    }

    async fn make_blob(
        &self,
        sources: Vec<Source>,
        blob_bytes: u32,
        pace: Option<Arc<dyn MovePace>>,
    ) -> Result<u64, UploadError> {
        let away = &self.inner.blobs;
        if away.store().is_none() {
            return Err(StoreError::Unavailable("no store is attached".to_owned()).into());
        }
        let uploading = self.inner.peers.begin_upload();
        let (builder, extents) = self.fill_blob(sources, blob_bytes, pace.clone()).await?;
        if extents.is_empty() {
            return Ok(0);
        }
        let number = self.reserve_blob().await?;
        let serial = number.serial;
        let id = away.id(serial, number.term);
        let blob = builder.finish(away.link.cluster, id, away.link.filesystem);
        let (data_off, bytes) = (blob.header.data_off() as u32, blob.header.blob_bytes() as u32);
        let at = away.put(id, Outgoing { parts: blob.parts, pace }).await?;
        let place = |block: u32| data_off + block * base::units::BLOCK_BYTES as u32;
        let extents = extents.iter().map(|(source, block)| Uploaded {
            id: source.id(),
            off: place(*block),
            from: source.from(),
        });
        let commit = TierRequest::Commit { serial, bytes, extents: extents.collect(), place: at };
        match self.tier(commit).await? {
            TierReply::Committed { bytes } => {
                number.committed();
                uploading.stored(bytes);
                Ok(bytes)
            }
            _ => Err(FsError::Io.into()),
        }
    }

    /// Reads as many extents as fit into a blob. Returns the block at which each begins.
    async fn fill_blob(
        &self,
        sources: Vec<Source>,
        blob_bytes: u32,
        pace: Option<Arc<dyn MovePace>>,
    ) -> Result<(BlobBuilder, Vec<(Source, u32)>), UploadError> {
        let mut plan = BlobPlan::new(blob_bytes);
        sources.iter().for_each(|source| {
            let _ = plan.add(source.extent_len());
        });
        // Only one blob at a time is filled from drives, so that the store gets the first while the second is read.
        let from_drives = sources.iter().all(|source| matches!(source, Source::Drives(_)));
        let reads = stream::iter(sources).map(|source| async move {
            let parts = self.source_parts(&source).await;
            (source, parts)
        });
        let mut turn = if from_drives { Some(self.inner.peers.0.reading_blob.lock().await) } else { None };
        let mut reads = reads.buffered(READS);
        let (mut builder, mut extents, mut unreadable) = (BlobBuilder::new(plan.limit()), Vec::new(), 0);
        let mut steps = Steps::new(pace);
        while let Some((source, parts)) = reads.next().await {
            let id = source.id();
            let parts = match parts {
                Ok(parts) if source.extent_len() <= builder.room() => parts,
                Ok(_) => continue,
                Err(error) => {
                    tracing::debug!(%id, ?error, "extent is not uploaded now");
                    if error != ReadExtentError::Gone {
                        unreadable += 1;
                        self.suspect(&source.content(), None);
                    }
                    continue;
                }
            };
            let rest = steps.went(source.extent_len().into());
            let (range, block) = (range_of(&source), builder.next_block());
            extents.push((source, block));
            builder.push(range, parts);
            if let Some(rest) = rest {
                turn = None;
                tokio::time::sleep(rest).await;
            }
        }
        drop((reads, turn));
        if extents.is_empty() && unreadable > 0 {
            return Err(UploadError::Unreadable(unreadable));
        }
        Ok((builder, extents))
    }

    /// The bytes of an extent, in consecutive parts; all but the last are whole blocks.
    async fn source_parts(&self, source: &Source) -> Result<Vec<Bytes>, ReadExtentError> {
        let (extent, blob) = match source {
            Source::Drives(due) => (due.extent, None),
            Source::Blob(inside) if inside.stage == Stage::Tiered => (inside.extent, Some(inside.place)),
            Source::Blob(inside) => (inside.extent, None),
        };
        let _reading = self.inner.session.reading();
        let Some(place) = blob else {
            return self.inner.extents.read_parts(&extent, 0, extent.extent_len, GetPurpose::Move).await;
        };
        let mut out = BytesMut::zeroed(extent.extent_len as usize);
        self.inner.blobs.read_into(place, extent.extent_len, 0, &mut out, Reach::Usual).await?;
        Ok(vec![out.freeze()])
    }

    /// Releases extents from the drives that are in blobs, too, oldest first, up to those written by `before_s` and
    /// until `bytes` are on their way back. Returns the extents and bytes released.
    pub async fn release_by(&self, before_s: u64, bytes: u64) -> Result<StageStat, FsError> {
        let mut sum = StageStat::default();
        while sum.bytes < bytes {
            let due = self.tier_due(Stage::Both, before_s, None).await?;
            let mut left = bytes - sum.bytes;
            let ids: Vec<ExtentId> = due
                .iter()
                .take_while(|due| {
                    let more = left > 0;
                    left = left.saturating_sub(due.extent.extent_len.into());
                    more
                })
                .map(|due| due.extent.id)
                .collect();
            let released = self.release_extents(ids).await?;
            sum.extents += released.extents;
            sum.bytes += released.bytes;
            if released.extents == 0 {
                break;
            }
        }
        Ok(sum)
    }

    /// Releases these extents from the drives, as far as blobs have them.
    pub async fn release_extents(&self, ids: Vec<ExtentId>) -> Result<StageStat, FsError> {
        if ids.is_empty() {
            return Ok(StageStat::default());
        }
        match self.tier(TierRequest::Release { ids }).await? {
            TierReply::Released(released) => Ok(released),
            _ => Err(FsError::Io),
        }
    }

    /// Blobs in use, after the given one.
    pub async fn blobs(&self, after: Option<u64>) -> Result<Vec<BlobStat>, FsError> {
        match self.tier(TierRequest::Blobs { after, limit: PAGE }).await? {
            TierReply::Blobs(blobs) => Ok(blobs),
            _ => Err(FsError::Io),
        }
    }

    /// Stores the live content of some blobs in new ones, so that the old ones can be deleted. Returns the bytes
    /// stored.
    pub async fn empty_blobs(&self, serials: &[u64], blob_bytes: u32) -> Result<u64, UploadError> {
        let (mut stored, mut sources, mut plan) = (0, Vec::new(), BlobPlan::new(blob_bytes));
        for serial in serials {
            let mut after = None;
            loop {
                let request = TierRequest::Inside { serial: *serial, after, limit: PAGE };
                let TierReply::Inside(inside) = self.tier(request).await? else {
                    return Err(FsError::Io.into());
                };
                after = inside.last().map(|last| last.extent.id);
                for one in inside {
                    if !plan.add(one.extent.extent_len) {
                        stored += self.make_blob(std::mem::take(&mut sources), blob_bytes, None).await?;
                        plan = BlobPlan::new(blob_bytes);
                        plan.add(one.extent.extent_len);
                    }
                    sources.push(Source::Blob(one));
                }
                if after.is_none() {
                    break;
                }
            }
        }
        if !sources.is_empty() {
            stored += self.make_blob(sources, blob_bytes, None).await?;
        }
        Ok(stored)
    }

    /// Bytes of the blobs that [`Client::empty_blobs`] would make: storing the content of some blobs again may not be
    /// worthwhile.
    pub async fn refilled_bytes(&self, serials: &[u64], blob_bytes: u32) -> Result<u64, FsError> {
        let (mut bytes, mut plan) = (0, BlobPlan::new(blob_bytes));
        for serial in serials {
            let mut after = None;
            loop {
                let request = TierRequest::Inside { serial: *serial, after, limit: PAGE };
                let TierReply::Inside(inside) = self.tier(request).await? else { return Err(FsError::Io) };
                after = inside.last().map(|last| last.extent.id);
                for one in inside {
                    if !plan.add(one.extent.extent_len) {
                        bytes += plan.bytes() as u64;
                        plan = BlobPlan::new(blob_bytes);
                        plan.add(one.extent.extent_len);
                    }
                }
                if after.is_none() {
                    break;
                }
            }
        }
        Ok(bytes + plan.bytes() as u64)
    }

    /// Blobs that nothing refers to and no reader uses.
    pub async fn dead_blobs(&self) -> Result<Vec<(u64, Epoch)>, FsError> {
        self.return_numbers().await;
        match self.tier(TierRequest::Dead { limit: PAGE }).await? {
            TierReply::Dead(dead) => Ok(dead),
            _ => Err(FsError::Io),
        }
    }

    /// Deletes a blob from the store.
    pub async fn delete_blob(&self, (serial, term): (u64, Epoch)) -> Result<(), StoreError> {
        let away = &self.inner.blobs;
        let store = away.store().ok_or_else(|| StoreError::Unavailable("no store is attached".to_owned()))?;
        store.delete(away.id(serial, term).key(away.link.cluster)).await
    }

    /// Looks for the first and the last of the blobs in use in `store`, which need not be the attached one. Returns the
    /// key of a blob that it does not have, and the error.
    pub async fn missing_blob(
        &self,
        store: &dyn ObjectStore,
    ) -> Result<Option<(String, StoreError)>, FsError> {
        let (mut first, mut last) = (None, None);
        loop {
            let page = self.blobs(last.map(|blob: BlobStat| blob.serial)).await?;
            let Some(newest) = page.last() else { break };
            first = first.or(page.first().copied());
            last = Some(*newest);
        }
        for blob in first.into_iter().chain(last) {
            if let Err(error) = self.find_blob(store, &blob).await {
                let id = self.inner.blobs.id(blob.serial, blob.term);
                return Ok(Some((id.key(self.inner.blobs.link.cluster), error)));
            }
        }
        Ok(None)
    }

    async fn find_blob(&self, store: &dyn ObjectStore, blob: &BlobStat) -> Result<(), StoreError> {
        let cluster = self.inner.blobs.link.cluster;
        let id = self.inner.blobs.id(blob.serial, blob.term);
        let mut looks = 1;
        loop {
            let front = store.get(id.key(cluster), Some(0..BLOB_HEADER_BYTES as u64)).await;
            let found = front.and_then(|front| match BlobHeader::decode(&front) {
                Ok(header) if header.id == id && header.cluster == cluster => Ok(()),
                _ => Err(StoreError::Unexpected("it is not this blob".to_owned())),
            });
            match found {
                // Passing errors were already tried again.
                Err(error) if looks < LOOKS && !error.is_passing() => looks += 1,
                found => return found,
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    }

    /// Notes that blobs are deleted.
    pub async fn blobs_deleted(&self, serials: Vec<u64>) -> Result<(), FsError> {
        self.tier(TierRequest::Deleted { serials }).await.map(drop)
    }

    /// Parts of a file from `off` on, and where they lie.
    pub async fn file_parts(&self, ino: Ino, off: u64) -> Result<PartsPage, FsError> {
        match self.tier(TierRequest::Parts { ino, off, limit: PAGE }).await? {
            TierReply::Parts { parts, next } => Ok(PartsPage { parts, next }),
            _ => Err(FsError::Io),
        }
    }
}

/// A range that is a whole extent. Its files are known to the ledger and may change.
fn range_of(source: &Source) -> BlobRange {
    let Origin { ino, map, off } = source.origin();
    BlobRange { ino, map, off, len: 0, block: 0, extent: source.id(), layer: 0, crc32c: 0 }
}
