//! Moves extents between drives and an object store as they age, and keeps the space on both sides bounded.
//!
//! Extents are uploaded some time after they were written (the cue), oldest first, in blobs as full as possible and by
//! directory. After a longer time (the retention) they leave the drives, and earlier when these fill up. When the blobs
//! hold many bytes that no file has, the blobs with the most of them are emptied into new ones and deleted. Every step
//! may be cut off anywhere.

mod backoff;
mod gives_way;
mod queue;
mod uploaders;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::env::Env;
use base::units::BLOCK_BYTES;
use base::{Epoch, ExtentId, FsError, NodeId};
use client::{Client, MapEntry, UploadError};
use futures_util::{StreamExt, stream};
use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinSet};
use wire::meta::Content;
use wire::store::{MovePace, StoreError};
use wire::tier::{BlobStat, DueExtent, TierMode, TierStat};

use crate::others::{BlobLoad, OtherNodes};
use crate::pace::{Pace, Permit};
use crate::task::{Stopped, Task};
use backoff::{Backoff, PAUSE_MAX, PAUSE_MIN};
pub use gives_way::{GivesWay, Steady};
use queue::Queue;
use uploaders::Uploaders;

/// Pause when there is nothing to do.
const IDLE: Duration = Duration::from_millis(500);
/// How long due extents wait for more, so that blobs are full.
const GATHER_S: u64 = 10;
/// Drives fuller than this release extents that blobs have, regardless of age ...
const RELEASE_PER_MILLE: u64 = 900;
/// ... down to this.
const RELEASE_TO_PER_MILLE: u64 = 850;
/// With drives fuller than this, every extent is due at once.
const HURRY_PER_MILLE: u64 = 950;
/// Uploads do not give way to users if drives are fuller than this ...
const CROWDED_PER_MILLE: u64 = 800;
/// ... or if the oldest extent has waited this long beyond the cue.
const LATE_S: u64 = 300;
/// Overhead in the store beyond the content of files: emptying blobs begins at the first value and ends at the second.
const OVERHEAD_BEGIN_PER_MILLE: u64 = 130;
const OVERHEAD_END_PER_MILLE: u64 = 70;
/// A blob with a smaller dead part is left as it is, in thousandths.
const DEAD_PER_MILLE: u64 = 50;
/// Blobs emptied in one step.
const EMPTIED_MAX: usize = 64;
/// Extents with a smaller live part keep a blob from being emptied well: 7/8.
const THIN: (u64, u64) = (7, 8);
/// States remembered in which thin extents were brought back.
const RETURNED: usize = 16;
/// Deletions under way.
const DELETIONS: usize = 8;
/// Deleted blobs that are reported to the ledger together.
const DELETED_AT_ONCE: usize = 64;

/// How a filesystem tiers.
#[derive(Debug, Clone, Copy)]
pub struct TierOptions {
    /// How long uploaded extents also stay on drives, in seconds.
    pub retention_s: u64,
    /// How long after it was written content is uploaded, in seconds.
    pub cue_s: u64,
    /// Largest blob.
    pub blob_bytes: u32,
    /// Blobs that a node makes at a time: each is in memory until it is stored.
    pub uploads: usize,
    /// Blobs that all nodes together make at a time.
    pub uploads_all: usize,
    /// The place of the store.
    pub place: u64,
    /// Whether all content comes back and the store is left.
    pub detaching: bool,
}

/// The progress of tiering since its start, and its last findings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TieringStat {
    /// The sums of the ledger.
    pub tier: TierStat,
    /// Bytes of extents that were uploaded.
    pub uploaded_bytes: u64,
    /// The nodes that uploaded them.
    pub uploaded_by: BTreeMap<NodeId, u64>,
    /// Bytes of extents that left the drives.
    pub released_bytes: u64,
    /// The part of `released_bytes` that left before its retention ended, because drives were filling up.
    pub released_early_bytes: u64,
    /// Blobs deleted from the store.
    pub deleted_blobs: u64,
    /// Bytes that came back because the store is being left.
    pub returned_bytes: u64,
    /// Bytes of extents that were stored again so that their blobs could be deleted.
    pub rewritten_bytes: u64,
    /// Why part of the work is held up; `None` if nothing is.
    pub problem: Option<String>,
    /// Whether the store is left: it has no content of this filesystem any more.
    pub detached: bool,
}

/// Tiers one filesystem, in the background.
pub struct Tiering {
    stat: Arc<Mutex<TieringStat>>,
    task: Task,
}

impl Tiering {
    /// Starts tiering, with uploads by all nodes if there are others.
    pub fn start(
        env: Env,
        client: Client,
        others: Option<Arc<dyn OtherNodes>>,
        pace: Arc<Pace>,
        options: TierOptions,
        runtime: &Handle,
    ) -> Self {
        let stat: Arc<Mutex<TieringStat>> = Arc::default();
        let work_stat = Arc::clone(&stat);
        let work = |stopped| {
            let work = Work {
                env,
                client,
                pace,
                options,
                stat: work_stat,
                stopped,
                has_told_place: false,
                uploads: JoinSet::new(),
                under_way: HashSet::new(),
                uploaders: Uploaders::new(others, options.uploads, options.uploads_all),
                deletions: JoinSet::new(),
                delete_pause: Backoff::default(),
                reclaim_pause: Backoff::default(),
                unreadable: None,
                reclaiming: false,
                futile_sums: None,
                returned_sums: VecDeque::new(),
            };
            work.run()
        };
        Self { stat, task: Task::start(runtime, work) }
    }

    /// Stops after the steps under way.
    pub async fn stop(self) {
        self.task.stop().await;
    }

    /// Progress so far.
    pub fn stat(&self) -> TieringStat {
        lock(&self.stat).clone()
    }
}

fn lock(stat: &Mutex<TieringStat>) -> MutexGuard<'_, TieringStat> {
    stat.lock().expect("no holder of this lock panics")
}

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error(transparent)]
    Upload(#[from] UploadError),
    #[error("{0}")]
    Owner(#[from] FsError),
    #[error("a blob cannot be deleted: {0}")]
    Delete(StoreError),
    #[error("the drives have no room for what is in the store: free some, or add drives")]
    NoRoom,
    #[error("{0} bytes cannot be read from the store now")]
    Unreadable(u64),
}

impl Trouble {
    /// The message, with advice if the store is the cause.
    fn explained(&self) -> String {
        match self {
            Self::Upload(UploadError::Store(error)) | Self::Delete(error) => {
                format!("{self} ({})", error.advice())
            }
            _ => self.to_string(),
        }
    }
}

/// Why a blob was not made.
enum NotMade {
    /// This node failed.
    Here(UploadError),
    /// Another node failed, for this reason.
    Elsewhere(String),
}

/// A blob that was to be made: where, its extents, and the bytes of them that it has.
type Upload = (NodeId, Vec<ExtentId>, Result<u64, NotMade>);

struct Work {
    env: Env,
    client: Client,
    pace: Arc<Pace>,
    options: TierOptions,
    stat: Arc<Mutex<TieringStat>>,
    stopped: Stopped,
    uploads: JoinSet<Upload>,
    /// The owner knows the place of the store.
    has_told_place: bool,
    /// Extents of these uploads.
    under_way: HashSet<ExtentId>,
    /// The nodes that make blobs.
    uploaders: Uploaders,
    /// At most one task, which deletes several blobs at a time.
    deletions: JoinSet<Result<(), Trouble>>,
    /// Pauses of deletions and of reclamation after failures.
    delete_pause: Backoff,
    reclaim_pause: Backoff,
    /// The error of an upload whose extents could not be read. Other uploads may go on.
    unreadable: Option<UploadError>,
    /// Blobs are being emptied until the overhead is low again.
    reclaiming: bool,
    /// Blobs, their bytes and their live bytes when emptying blobs last gained nothing.
    futile_sums: Option<(u64, u64, u64)>,
    /// The same sums when thin extents were brought back lately. Later steps may lead to the same sums again.
    returned_sums: VecDeque<(u64, u64, u64)>,
}

impl Work {
    async fn run(mut self) {
        let mut pause = PAUSE_MIN;
        while !self.stopped.now() {
            match self.step().await {
                Ok(busy) => {
                    pause = PAUSE_MIN;
                    lock(&self.stat).problem = self.trouble();
                    if !busy {
                        self.rest(IDLE).await;
                    }
                }
                Err(trouble) => {
                    let text = trouble.explained();
                    tracing::warn!(trouble = text, "tiering pauses");
                    lock(&self.stat).problem = Some(text);
                    self.rest(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
        while self.uploads.join_next().await.is_some() {}
        while self.deletions.join_next().await.is_some() {}
    }

    /// Why part of the work is held up, although the rest goes on.
    fn trouble(&self) -> Option<String> {
        let pauses = || [&self.delete_pause, &self.reclaim_pause].into_iter().find_map(Backoff::reason);
        self.uploaders.reason().or_else(pauses)
    }

    /// Rests while uploads go on.
    async fn rest(&mut self, pause: Duration) {
        let mut stopped = self.stopped.clone();
        let rest = stopped.or_after(pause);
        tokio::pin!(rest);
        loop {
            tokio::select! {
                biased;
                () = &mut rest => return,
                Some(done) = self.uploads.join_next() => self.uploaded(done),
            }
        }
    }

    fn now_s(&self) -> u64 {
        u64::try_from(self.env.clock.wall_ns() / 1_000_000_000).unwrap_or(0)
    }

    /// Does a part of all work that is due. Returns whether there is more to do at once.
    async fn step(&mut self) -> Result<bool, Trouble> {
        if !self.has_told_place {
            self.client.tier_place(self.options.place).await?;
            self.has_told_place = true;
        }
        let tier = self.client.tier_stat().await?;
        lock(&self.stat).tier = tier;
        if self.options.detaching {
            return self.leave(tier).await;
        }
        if tier.mode != TierMode::On {
            self.client.tier_attach().await?;
        }
        let mut busy = tier.queueing && self.client.tier_queue_step().await?;
        let fill = self.client.fill_per_mille();
        self.release(fill).await?;
        busy |= self.upload(fill).await?;
        busy |= self.delete_dead().await?;
        busy |= self.reclaim_unless_paused(tier).await;
        Ok(busy)
    }

    // --- to the store ------------------------------------------------------------------------------------------------

    async fn upload(&mut self, fill: u64) -> Result<bool, Trouble> {
        // Writers wait for room for less time than the cue may be, and drives may be full of dead space.
        let hurry = fill >= HURRY_PER_MILLE || self.client.makes_room();
        while let Some(done) = self.uploads.try_join_next() {
            self.uploaded(done);
        }
        if let Some(error) = self.unreadable.take() {
            return Err(error.into());
        }
        let now = self.now_s();
        let before_s = if hurry { now } else { now.saturating_sub(self.options.cue_s) };
        let mut queue = Queue::new(before_s, self.options.blob_bytes);
        loop {
            let free = self.uploaders.free(self.env.clock.boot_ns());
            if free.is_empty() {
                break;
            }
            let (load, full) = queue.next_load(&self.client, &self.under_way).await?;
            let Some(oldest) = load.first() else {
                self.uploaders.clear();
                return Ok(false);
            };
            if !full && !hurry && oldest.written_s + GATHER_S > before_s {
                return Ok(false);
            }
            let is_urgent = fill >= CROWDED_PER_MILLE || hurry || oldest.written_s + LATE_S < before_s;
            if !is_urgent && !self.uploads.is_empty() && self.client.is_in_use() {
                // Only one at a time, and slowly: the rest of tiering does not wait for it.
                return Ok(false);
            }
            let bytes = load.iter().map(|due| u64::from(due.extent.extent_len)).sum();
            // The store has a limit of its own, so only strain counts here.
            let strained = self.client.strained() && !hurry;
            if self.pace.permit_if_strained(bytes, strained).await == Permit::NotYet {
                return Ok(true);
            }
            match self.uploaders.choose(&self.client, &free, &load) {
                Some(node) => self.begin_upload(node, load, is_urgent),
                None => break,
            }
        }
        // The most uploads are under way: waits for one.
        match self.uploads.join_next().await {
            Some(done) => self.uploaded(done),
            None => return Ok(false),
        }
        Ok(true)
    }

    fn begin_upload(&mut self, node: NodeId, load: Vec<DueExtent>, is_urgent: bool) {
        let ids: Vec<ExtentId> = load.iter().map(|due| due.extent.id).collect();
        self.under_way.extend(&ids);
        self.uploaders.began(node);
        let (client, blob_bytes) = (self.client.clone(), self.options.blob_bytes);
        if let Some(others) = self.uploaders.others_for(node) {
            let gives_way = !is_urgent && client.is_in_use();
            let bytes_per_s = if gives_way { self.pace.bytes_per_s_in_use() } else { 0 };
            let load = BlobLoad { map: client.map_epoch(), extents: load, blob_bytes, bytes_per_s };
            let uploading = client.uploading_elsewhere();
            let made = async move {
                let made = others.upload(node, load).await;
                made.inspect(|bytes| uploading.stored(*bytes)).map_err(NotMade::Elsewhere)
            };
            self.uploads.spawn(async move { (node, ids, made.await) });
        } else {
            let pace = (!is_urgent).then(|| self.gives_way());
            let made = async move { client.upload(load, blob_bytes, pace).await.map_err(NotMade::Here) };
            self.uploads.spawn(async move { (node, ids, made.await) });
        }
    }

    /// A pace without rests while a writer waits for room, tiering is being stopped, or drives fill up.
    fn gives_way(&self) -> Arc<dyn MovePace> {
        let stopped = self.stopped.clone();
        let is_urgent = move |client: &Client| {
            stopped.now() || client.makes_room() || client.fill_per_mille() >= CROWDED_PER_MILLE
        };
        Arc::new(GivesWay::new(self.client.clone(), self.pace.clone(), is_urgent))
    }

    fn uploaded(&mut self, done: Result<Upload, JoinError>) {
        // A task that panicked has ended the process already.
        let Ok((node, ids, result)) = done else { return };
        for id in ids {
            self.under_way.remove(&id);
        }
        let failure = match result {
            Ok(bytes) => {
                let mut stat = lock(&self.stat);
                stat.uploaded_bytes += bytes;
                *stat.uploaded_by.entry(node).or_default() += bytes;
                None
            }
            Err(NotMade::Here(error @ UploadError::Unreadable(_))) => {
                self.unreadable = Some(error);
                None
            }
            Err(NotMade::Here(error)) => {
                let text = format!("uploads pause: {}", Trouble::from(error).explained());
                tracing::warn!(trouble = text, "a blob was not stored");
                Some(text)
            }
            Err(NotMade::Elsewhere(reason)) => {
                tracing::info!(%node, reason, "a node made no blob");
                Some(format!("uploads pause: node {node} made no blob: {reason}"))
            }
        };
        self.uploaders.ended(node, failure, self.env.clock.boot_ns());
        if let Some(reason) = self.uploaders.reason() {
            lock(&self.stat).problem = Some(reason);
        }
    }

    // --- from the drives ---------------------------------------------------------------------------------------------

    async fn release(&mut self, fill: u64) -> Result<(), Trouble> {
        let before_s = self.now_s().saturating_sub(self.options.retention_s);
        let released = self.client.release_by(before_s, u64::MAX).await?;
        lock(&self.stat).released_bytes += released.bytes;
        if fill < RELEASE_PER_MILLE {
            return Ok(());
        }
        let excess = self.client.excess_bytes(RELEASE_TO_PER_MILLE);
        let early = self.client.release_by(u64::MAX - 1, excess).await?;
        if early.extents > 0 {
            let bytes = early.bytes;
            tracing::warn!(
                bytes,
                fill,
                "drives are filling up: content leaves them before its retention is over"
            );
            let mut stat = lock(&self.stat);
            stat.released_bytes += bytes;
            stat.released_early_bytes += bytes;
        }
        Ok(())
    }

    // --- in the store ------------------------------------------------------------------------------------------------

    /// Deletes blobs that nothing refers to, in the background: a store may be slow at that, and uploads do not wait
    /// for it. Returns whether blobs were deleted since the last call.
    async fn delete_dead(&mut self) -> Result<bool, Trouble> {
        let now_ns = self.env.clock.boot_ns();
        let deleted = match self.deletions.try_join_next() {
            // A task that panicked has ended the process already.
            None | Some(Err(_)) => false,
            Some(Ok(Ok(()))) => {
                self.delete_pause.clear();
                true
            }
            Some(Ok(Err(trouble))) => {
                let text = trouble.explained();
                tracing::warn!(trouble = text, "blobs are not deleted now");
                self.delete_pause.failed(text, now_ns);
                false
            }
        };
        if !self.deletions.is_empty() || self.delete_pause.tries_max(1, now_ns) == 0 {
            return Ok(deleted);
        }
        let dead = self.client.dead_blobs().await?;
        if dead.is_empty() {
            self.delete_pause.clear();
        } else {
            let (client, stopped, stat) = (self.client.clone(), self.stopped.clone(), self.stat.clone());
            self.deletions.spawn(async move { delete(&client, dead, &stopped, &stat).await });
        }
        Ok(deleted)
    }

    /// Reclaims, unless it is paused after a failure. A failure does not stop uploads: full drives keep blobs from
    /// being emptied, and uploads make room on them.
    async fn reclaim_unless_paused(&mut self, tier: TierStat) -> bool {
        if self.reclaim_pause.tries_max(1, self.env.clock.boot_ns()) == 0 {
            return false;
        }
        match self.reclaim(tier).await {
            Ok(busy) => {
                self.reclaim_pause.clear();
                busy
            }
            Err(trouble) => {
                let text = format!("blobs are not emptied now: {}", trouble.explained());
                tracing::warn!(trouble = text, "reclamation pauses");
                self.reclaim_pause.failed(text, self.env.clock.boot_ns());
                false
            }
        }
    }

    async fn reclaim(&mut self, tier: TierStat) -> Result<bool, Trouble> {
        let overhead = tier.overhead_per_mille();
        self.reclaiming = if self.reclaiming {
            overhead >= OVERHEAD_END_PER_MILLE
        } else {
            overhead > OVERHEAD_BEGIN_PER_MILLE
        };
        let sums = (tier.blobs, tier.stored_bytes, tier.live_bytes);
        let nothing_to_do = !self.reclaiming || tier.blobs == 0 || self.futile_sums == Some(sums);
        // The content of emptied blobs has to be stored first, and without deletions that only makes the bucket larger.
        let holds = self.uploaders.reason_here().is_some() || self.delete_pause.reason().is_some();
        if nothing_to_do || holds {
            return Ok(false);
        }
        let candidates = self.most_dead().await?;
        let live: u64 = candidates.iter().map(|blob| blob.live_bytes).sum();
        if candidates.is_empty() {
            self.reclaiming = false;
            return Ok(false);
        }
        if self.pace.permit(2 * live, self.client.strained()).await == Permit::NotYet {
            return Ok(true);
        }
        // An extent with few live bytes takes as much space in a new blob, so its live bytes are brought back and
        // uploaded again. Small pieces are aligned, so extents that were brought back may be thin again.
        if !self.returned_sums.contains(&sums) {
            self.returned_sums.truncate(RETURNED - 1);
            self.returned_sums.push_front(sums);
            if self.bring_back(is_thin).await? > 0 {
                return Ok(true);
            }
        }
        let serials = self.worth_emptying(&candidates).await?;
        if serials.is_empty() {
            (self.reclaiming, self.futile_sums) = (false, Some(sums));
            return Ok(false);
        }
        let stored = self.client.empty_blobs(&serials, self.options.blob_bytes).await?;
        lock(&self.stat).rewritten_bytes += stored;
        if stored == 0 {
            self.reclaiming = false;
        }
        Ok(stored > 0)
    }

    /// Those of these blobs whose content takes less space in new blobs; all of them, if only all together take less.
    /// Padding around small content and at the end of a block is dead in new blobs, too.
    async fn worth_emptying(&self, candidates: &[BlobStat]) -> Result<Vec<u64>, Trouble> {
        let blob_bytes = self.options.blob_bytes;
        let mut worth = Vec::new();
        for blob in candidates {
            let refilled = self.client.refilled_bytes(&[blob.serial], blob_bytes).await?;
            if saves(blob.bytes.into(), refilled) {
                worth.push(blob.serial);
            }
        }
        if worth.is_empty() && candidates.len() > 1 {
            let serials: Vec<u64> = candidates.iter().map(|blob| blob.serial).collect();
            let bytes = candidates.iter().map(|blob| u64::from(blob.bytes)).sum();
            if saves(bytes, self.client.refilled_bytes(&serials, blob_bytes).await?) {
                return Ok(serials);
            }
        }
        Ok(worth)
    }

    /// Blobs with a large enough dead part, the largest first.
    async fn most_dead(&self) -> Result<Vec<BlobStat>, Trouble> {
        let (mut dead, mut after) = (Vec::new(), None);
        loop {
            let blobs = self.client.blobs(after).await?;
            let Some(last) = blobs.last() else { break };
            after = Some(last.serial);
            dead.extend(blobs.into_iter().filter(|blob| dead_per_mille(blob) > DEAD_PER_MILLE));
            dead.sort_by_key(|blob| std::cmp::Reverse(dead_per_mille(blob)));
            dead.truncate(EMPTIED_MAX);
        }
        Ok(dead)
    }

    // --- back --------------------------------------------------------------------------------------------------------

    async fn leave(&mut self, tier: TierStat) -> Result<bool, Trouble> {
        if tier.mode == TierMode::Off {
            lock(&self.stat).detached = true;
            return Ok(false);
        }
        if tier.mode == TierMode::On {
            self.client.tier_leave().await?;
        }
        let returned = self.bring_back(|_| true).await?;
        lock(&self.stat).returned_bytes += returned;
        let more = self.client.tier_leave_step().await?;
        let deleted = self.delete_dead().await?;
        Ok(more || deleted || returned > 0)
    }

    /// Brings pieces that only blobs have back to drives. Returns the number of bytes that came.
    async fn bring_back(&mut self, wanted: impl Fn(&MapEntry) -> bool) -> Result<u64, Trouble> {
        let full = u64::from(self.client.pack_target().extent_bytes);
        let (mut after, mut load, mut bytes, mut sum) = (None, Vec::new(), 0, (0, 0));
        loop {
            let (entries, next) = self.client.scan_map(after).await?;
            let away = entries.into_iter().filter(|entry| matches!(entry.piece.content, Content::Tiered(..)));
            for entry in away.filter(|entry| wanted(entry)) {
                for part in cut(&entry, full) {
                    if bytes + part.piece.len > full {
                        self.return_load(std::mem::take(&mut load), std::mem::take(&mut bytes), &mut sum)
                            .await?;
                    }
                    bytes += part.piece.len.next_multiple_of(client::PACK_ALIGN);
                    load.push(part);
                }
            }
            after = next;
            if after.is_none() || self.stopped.now() {
                break;
            }
        }
        self.return_load(load, bytes, &mut sum).await?;
        match sum {
            (0, left) if left > 0 => Err(Trouble::Unreadable(left)),
            (returned, _) => Ok(returned),
        }
    }

    async fn return_load(
        &self,
        load: Vec<MapEntry>,
        bytes: u64,
        sum: &mut (u64, u64),
    ) -> Result<(), Trouble> {
        if load.is_empty() {
            return Ok(());
        }
        if !self.client.has_spare_room(bytes) {
            return Err(Trouble::NoRoom);
        }
        while self.pace.permit(bytes, self.client.strained()).await == Permit::NotYet {
            if self.stopped.now() {
                return Ok(());
            }
        }
        for some in load.chunks(wire::meta::PACK_MOVES_MAX) {
            let outcome = self.client.pack(some.to_vec()).await?;
            sum.0 += outcome.moved_bytes;
            sum.1 += outcome.left_bytes;
        }
        Ok(())
    }
}

/// Deletes blobs, and tells the ledger. It begins no further deletion when it is stopped or one failed.
async fn delete(
    client: &Client,
    blobs: Vec<(u64, Epoch)>,
    stopped: &Stopped,
    stat: &Mutex<TieringStat>,
) -> Result<(), Trouble> {
    let refused = AtomicBool::new(false);
    let deletions = blobs.into_iter().take_while(|_| !stopped.now() && !refused.load(Ordering::Relaxed));
    let deletions = deletions.map(async |blob| (blob.0, client.delete_blob(blob).await));
    let mut deletions = stream::iter(deletions).buffer_unordered(DELETIONS);
    let (mut serials, mut failed) = (Vec::new(), None);
    while let Some((serial, result)) = deletions.next().await {
        match result {
            Ok(()) => serials.push(serial),
            Err(error) => {
                refused.store(true, Ordering::Relaxed);
                failed = Some(error);
            }
        }
        if serials.len() >= DELETED_AT_ONCE {
            forget(client, &mut serials, stat).await?;
        }
    }
    forget(client, &mut serials, stat).await?;
    failed.map_or(Ok(()), |error| Err(Trouble::Delete(error)))
}

async fn forget(client: &Client, serials: &mut Vec<u64>, stat: &Mutex<TieringStat>) -> Result<(), Trouble> {
    let deleted = serials.len() as u64;
    if deleted > 0 {
        client.blobs_deleted(std::mem::take(serials)).await?;
        lock(stat).deleted_blobs += deleted;
    }
    Ok(())
}

/// Whether storing blobs again is worth it.
fn saves(bytes: u64, refilled_bytes: u64) -> bool {
    bytes.saturating_sub(refilled_bytes) * 1000 > bytes * DEAD_PER_MILLE
}

fn dead_per_mille(blob: &BlobStat) -> u64 {
    let bytes = u64::from(blob.bytes).max(1);
    bytes.saturating_sub(blob.live_bytes) * 1000 / bytes
}

fn is_thin(entry: &MapEntry) -> bool {
    let extent_len = entry.piece.content.extent().map_or(0, |extent| u64::from(extent.extent_len));
    // Content within a block takes a block in any blob.
    entry.live_bytes.is_some_and(|live| extent_len > BLOCK_BYTES && live * THIN.1 < extent_len * THIN.0)
}

/// Cuts a piece into parts that fit into an extent.
fn cut(entry: &MapEntry, full: u64) -> Vec<MapEntry> {
    let (from, end) = (entry.piece.off, entry.piece.end());
    let part = |at: u64| entry.piece.clip(at, at + full).map(|piece| MapEntry { piece, ..entry.clone() });
    (from..end).step_by(full as usize).filter_map(part).collect()
}

#[cfg(test)]
mod tests {
    use base::{MapId, PgId};
    use wire::meta::{ExtentRef, MapPiece};

    use super::*;

    fn thin(extent_len: u32, live: u64) -> bool {
        let extent = ExtentRef { id: ExtentId(1), pg: PgId(0), k: 1, n: 1, extent_len, extent_off: 0 };
        let piece = MapPiece { off: 0, len: live, content: Content::Extent(extent) };
        is_thin(&MapEntry { map: MapId(1), piece, live_bytes: Some(live), in_store: false })
    }

    #[test]
    fn an_extent_within_a_block_is_not_thin() {
        // Two pieces of 49 bytes, the second at a multiple of 64.
        assert!(!thin(94, 49));
        assert!(!thin(4096, 1));
        assert!(thin(8192, 49) && thin(1 << 20, 900_000));
        assert!(!thin(1 << 20, 1_000_000));
    }
}
