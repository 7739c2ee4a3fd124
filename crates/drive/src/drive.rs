//! [`Drive`]: an open drive, its thread, and the interface that the rest of the program uses.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use base::checksum::blocks_match;
use base::env::{Caching, Clock, Env, File, OpenMode, spawn_thread};
use base::units::{BLOCK_BYTES, MIB};
use base::{ClusterId, DriveId, DriveUuid};
use tokio::sync::{mpsc, oneshot};
use wire::BoxFuture;
use wire::drive::{
    DeleteShards, DriveFailed, DriveHealth, DriveMark, DriveService, DriveStat, GetPurpose, GetShard,
    GetShardError, IoPath, PutPurpose, PutShard, PutShardError, ScrubStep, ShardBlocks, ShardEntry, ShardKey,
};
use wire::position::{KnownLedger, Position};

use crate::admission::Admission;
use crate::device::delayed::DelayedDevice;
use crate::device::inline::InlineDevice;
use crate::device::pool::PoolDevice;
use crate::device::uring::UringDevice;
use crate::device::{self, Device, DeviceFiles, Wake};
use crate::engine::{DeleteRequest, Engine, Limits, PutOutcome, PutRequest, ReadClass, Request, run_inline};
use crate::error::{FormatDriveError, OpenDriveError};
use crate::format::frame::PAYLOAD_BLOCKS_MAX;
use crate::format::superblock::{KNOWN_FEATURES, Superblock};
use crate::format::{FORMAT_VERSION, SUPERBLOCK_OFFSETS};
use crate::index::Entry;
use crate::prepare::{self, FormatOptions};
use crate::recovery::{Recovered, RecoveryReport, recover};
use crate::scan::Superblocks;
use crate::shared::Shared;

/// Requests of one kind that the queue holds; further callers wait for a place.
const QUEUE_LEN: usize = 1024;
/// Reads that the device works on at a time.
const READS_MAX: usize = 256;
/// Reads of a scrub that the device works on at a time.
const BACKGROUND_READS_MAX: usize = 8;
/// Keys that one delete request carries: a batch of tombstones stays small.
const DELETE_KEYS: usize = 1024;
/// Most shards in one page of a list.
const LIST_MAX: usize = 65_536;
/// How often a put or get is retried because the shard moved or changed during the operation.
const RETRIES: usize = 16;

/// How to access the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PreferIo {
    /// io_uring if the system allows it, else a pool of threads.
    #[default]
    Auto,
    /// A pool of threads.
    ThreadPool,
}

/// Where hot shards are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReadCache {
    /// In the system's page cache.
    #[default]
    PageCache,
    /// Nowhere: every read goes to the device. For tests and measurements.
    Bypass,
}

/// Whether unused space is given back to the filesystem or device below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Trim {
    /// Give space back on devices. A file keeps its space, so that no write fails because others have filled the disk.
    #[default]
    Devices,
    /// Give space back on devices and in files.
    Always,
    /// Never give space back.
    Never,
}

/// How a drive is opened.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// The cluster that it must belong to.
    pub cluster: ClusterId,
    /// The drive that it must be; `None`: any.
    pub uuid: Option<DriveUuid>,
    /// The mark that the control ledger noted last. A drive whose own mark is lower is an older copy.
    pub mark: DriveMark,
    /// How to access the device.
    pub io: PreferIo,
    /// Where hot shards are kept.
    pub read_cache: ReadCache,
    /// Memory for block checksums. Default 32 MiB.
    pub sums_cache_bytes: u64,
    /// Bytes appended between index checkpoints, at least. Default 256 MiB.
    pub checkpoint_every_bytes: u64,
    /// Payload of one group commit. Default 8 MiB, at most 16 MiB.
    pub batch_bytes: u64,
    /// Bytes of puts that may wait, for new data and repairs each. Default 64 MiB.
    pub queue_bytes: u64,
    /// Whether unused space is given back.
    pub trim: Trim,
    /// Shortest dead run inside a segment that is given back, in bytes. Default 1 MiB.
    pub trim_run_bytes: u64,
}

impl OpenOptions {
    /// The default options for a drive of `cluster`.
    pub fn new(cluster: ClusterId) -> Self {
        Self {
            cluster,
            uuid: None,
            mark: DriveMark::default(),
            io: PreferIo::Auto,
            read_cache: ReadCache::PageCache,
            sums_cache_bytes: 32 * MIB,
            checkpoint_every_bytes: 256 * MIB,
            batch_bytes: 8 * MIB,
            queue_bytes: 64 * MIB,
            trim: Trim::Devices,
            trim_run_bytes: MIB,
        }
    }

    fn limits(&self, file: &dyn File) -> Limits {
        // A batch may exceed its bytes by one shard, and a frame must stay within its limit.
        let batch_max = u64::from(PAYLOAD_BLOCKS_MAX) * BLOCK_BYTES / 2;
        let trims = match self.trim {
            Trim::Devices => file.is_device(),
            Trim::Always => true,
            Trim::Never => false,
        };
        Limits {
            batch_bytes: self.batch_bytes.min(batch_max),
            batch_records: 1024,
            checkpoint_every_bytes: self.checkpoint_every_bytes,
            trim_run_bytes: trims.then_some(self.trim_run_bytes),
        }
    }
}

/// Wakes the drive's thread, if it waits.
struct Bell {
    sleeping: AtomicBool,
    wake: Arc<dyn Wake>,
}

impl Bell {
    fn ring(&self) {
        // Pairs with the fence in `serve`: either we see it sleeping or it sees our request.
        fence(Ordering::SeqCst);
        if self.sleeping.swap(false, Ordering::SeqCst) {
            self.wake.wake();
        }
    }
}

/// The callers' handle of the drive's thread.
struct Thread {
    outbox: Outbox,
    bell: Arc<Bell>,
    stop: Arc<AtomicBool>,
    handle: Mutex<Option<JoinHandle<()>>>,
}

/// An engine without a thread: the caller that waits for an answer drives it. Keeps simulation deterministic.
struct Inline {
    engine: Mutex<(Engine, InlineDevice)>,
}

/// An engine on a task of the runtime that opened the drive: for simulated devices with latency.
struct Task {
    outbox: Outbox,
    handle: tokio::task::JoinHandle<()>,
}

enum Runner {
    Thread(Thread),
    Inline(Box<Inline>),
    Task(Task),
}

/// An open drive. Dropping it stops it like a crash; after [`Drive::close`] the next open needs no replay.
pub struct Drive {
    pub(crate) shared: Arc<Shared>,
    pub(crate) files: DeviceFiles,
    runner: Runner,
    pub(crate) clock: Arc<dyn Clock>,
    io_path: IoPath,
    report: RecoveryReport,
}

impl Drive {
    /// Writes an empty drive onto a file or block device.
    ///
    /// # Errors
    /// If the device is in use, holds something, or is too small. See [`FormatDriveError`].
    pub fn format(env: &Env, path: &Path, options: &FormatOptions) -> Result<(), FormatDriveError> {
        prepare::format(env, path, options)
    }

    /// Opens a drive: recovers its index and starts its thread. Blocks while it recovers.
    ///
    /// # Errors
    /// If the device is not a drive of this cluster that this program can use. See [`OpenDriveError`].
    pub fn open(
        env: &Env,
        drive: DriveId,
        path: &Path,
        options: &OpenOptions,
    ) -> Result<Arc<Self>, OpenDriveError> {
        let io = |source| OpenDriveError::Io { path: path.to_owned(), source };
        let direct = env.files.open(path, OpenMode::Existing, Caching::Direct).map_err(io)?;
        device::lock(&*direct).map_err(|source| match source.kind() {
            io::ErrorKind::WouldBlock => OpenDriveError::InUse { path: path.to_owned() },
            _ => io(source),
        })?;
        let mut superblock = usable_superblock(path, &*direct, options.cluster)?;
        // Before anything is written: the mark is that of the expected drive.
        if let Some(expected) = options.uuid.filter(|expected| *expected != superblock.uuid) {
            return Err(OpenDriveError::OtherDrive {
                path: path.to_owned(),
                uuid: superblock.uuid,
                expected,
            });
        }
        let geometry = superblock.geometry().expect("decoding a superblock checks its geometry");
        let mut recovered = recover(&*direct, geometry, &superblock)
            .map_err(|reason| OpenDriveError::IndexDamaged { path: path.to_owned(), reason })?;
        let cached = match options.read_cache {
            ReadCache::Bypass => None,
            ReadCache::PageCache => {
                Some(env.files.open(path, OpenMode::Existing, Caching::Buffered).map_err(io)?)
            }
        };
        let files = DeviceFiles { direct, cached };
        let report = &mut recovered.report;
        report.has_gap = report.found < options.mark || superblock.gap_incarnation > options.mark.incarnation;
        if report.has_gap {
            tracing::error!(%drive, found = ?report.found, noted = ?options.mark, "an older copy of the drive is here");
            superblock.incarnation = superblock.incarnation.max(options.mark.incarnation);
            superblock.gap_incarnation = superblock.incarnation + 1;
        }
        claim(&*files.direct, &mut superblock, &recovered).map_err(io)?;
        let Recovered { index, next_seq, report, .. } = recovered;
        let limits = options.limits(&*files.direct);
        let admission = Admission::new(limits.batch_bytes, limits.batch_records as u64, options.queue_bytes);
        let cache_bytes = options.sums_cache_bytes;
        let mark = DriveMark { incarnation: superblock.incarnation, seq: next_seq - 1 };
        let shared = Arc::new(Shared::new(drive, superblock.uuid, mark, index, cache_bytes, admission));
        let mut engine = Engine::new(shared.clone(), superblock, next_seq, limits, env.clock.clone());
        if !report.was_closed {
            // The decisions of the replay become durable before anything is appended, so that the next recovery decides
            // the same. Two checkpoints hold them, so that one may be damaged.
            let mut device = InlineDevice::new(files.clone());
            engine.cover_replay();
            run_inline(&mut engine, &mut device);
            if let Some(reason) = shared.failure() {
                return Err(io(io::Error::other(reason)));
            }
        }
        tracing::info!(%drive, uuid = %shared.uuid, ?report, "drive opened");
        let (runner, io_path) = Runner::start(engine, &files, options.io);
        let clock = env.clock.clone();
        Ok(Arc::new(Self { shared, files, runner, clock, io_path, report }))
    }

    /// The report of the recovery at open.
    pub fn recovery(&self) -> RecoveryReport {
        self.report
    }

    /// Reads since the drive was opened that found a damaged shard; every such read counts.
    pub fn corrupt_reads(&self) -> u64 {
        self.shared.corrupt_reads()
    }

    /// Finishes accepted requests, writes an index checkpoint and stops. Later calls fail, and the device is free for others.
    ///
    /// # Errors
    /// If the drive has failed or is closed already.
    pub async fn close(&self) -> Result<(), DriveFailed> {
        let (reply, answer) = oneshot::channel();
        self.send(Request::Close(reply)).await?;
        let closed = self.wait(answer).await;
        if let Runner::Thread(thread) = &self.runner {
            thread.bell.ring();
            thread.join();
        }
        match closed {
            Some(Ok(())) => {
                self.shared.note_closed();
                if let Err(error) = self.files.direct.unlock() {
                    tracing::warn!(drive = %self.shared.drive, %error, "the device of a closed drive stays locked");
                }
                Ok(())
            }
            _ => Err(self.failed()),
        }
    }

    pub(crate) fn failed(&self) -> DriveFailed {
        DriveFailed { drive: self.shared.drive }
    }

    /// Hands a request to the engine.
    pub(crate) async fn send(&self, request: Request) -> Result<(), DriveFailed> {
        match &self.runner {
            Runner::Thread(thread) => {
                thread.outbox.send(request).await.map_err(|_| self.failed())?;
                thread.bell.ring();
            }
            Runner::Task(task) => {
                task.outbox.send(request).await.map_err(|_| self.failed())?;
            }
            Runner::Inline(inline) => {
                let mut guard =
                    inline.engine.lock().expect("a panic ends the process, so no lock is poisoned");
                let (engine, device) = &mut *guard;
                if engine.has_ended() {
                    return Err(self.failed());
                }
                engine.accept(request, device);
            }
        }
        Ok(())
    }

    /// Waits for an answer; `None` if the engine ended without one.
    pub(crate) async fn wait<T>(&self, answer: oneshot::Receiver<T>) -> Option<T> {
        if let Runner::Inline(inline) = &self.runner {
            // Other tasks may queue their requests first, so that simulation has group commits too.
            tokio::task::yield_now().await;
            let mut guard = inline.engine.lock().expect("a panic ends the process, so no lock is poisoned");
            let (engine, device) = &mut *guard;
            run_inline(engine, device);
        }
        answer.await.ok()
    }

    async fn store(&self, request: PutShard) -> Result<(), PutShardError> {
        let drive = self.shared.drive;
        self.check_put(&request)?;
        let mut replaces = None;
        for _ in 0..RETRIES {
            match self.store_once(&request, replaces).await? {
                PutOutcome::Stored => return Ok(()),
                PutOutcome::NoSpace => return Err(PutShardError::NoSpace { drive }),
                PutOutcome::Failed => return Err(PutShardError::Failed { drive }),
                PutOutcome::Void => return Err(PutShardError::Void { drive }),
                PutOutcome::Exists => {}
            }
            match self.compare(&request).await? {
                Comparison::Same => return Ok(()),
                Comparison::Gone => replaces = None,
                Comparison::Damaged(entry) => replaces = Some(entry),
            }
        }
        Err(PutShardError::Failed { drive })
    }

    async fn store_once(
        &self,
        request: &PutShard,
        replaces: Option<Entry>,
    ) -> Result<PutOutcome, PutShardError> {
        let drive = self.shared.drive;
        let bytes = request.bytes.len() as u64;
        let entered = self.shared.admission.enter(request.purpose, bytes, self.clock.boot_ns());
        let place = entered.map_err(|retry_after_ms| PutShardError::Busy { drive, retry_after_ms })?;
        let (reply, answer) = oneshot::channel();
        let put = PutRequest { put: request.clone(), replaces, reply, place: Some(place) };
        if self.send(Request::Put(Box::new(put))).await.is_err() {
            return Ok(PutOutcome::Failed);
        }
        Ok(self.wait(answer).await.unwrap_or(PutOutcome::Failed))
    }

    fn check_put(&self, request: &PutShard) -> Result<(), PutShardError> {
        let drive = self.shared.drive;
        let invalid = |reason: &str| Err(PutShardError::Invalid { drive, reason: reason.to_owned() });
        let len = request.bytes.len() as u64;
        if len == 0 || !len.is_multiple_of(BLOCK_BYTES) {
            return invalid("the length is not a multiple of 4096");
        }
        if len > self.shared.geometry.shard_bytes_max() {
            return invalid("the shard is larger than this drive takes");
        }
        let key = request.key;
        if !blocks_match(key.extent, key.shard, 0, &request.bytes, &request.checksums) {
            return invalid("the checksums do not match the bytes");
        }
        if self.shared.has_failed() { Err(PutShardError::Failed { drive }) } else { Ok(()) }
    }

    /// Compares a put with the stored shard of the same key.
    async fn compare(&self, request: &PutShard) -> Result<Comparison, PutShardError> {
        let drive = self.shared.drive;
        let key = request.key;
        let (entry, bad) = {
            let index = self.shared.index();
            (index.get(&key), index.is_bad(&key))
        };
        let Some(entry) = entry else { return Ok(Comparison::Gone) };
        if bad {
            return Ok(Comparison::Damaged(entry));
        }
        // Compare with the device: bytes that only the page cache still has are not stored.
        let stored = GetShard { key, first_block: 0, blocks: entry.blocks, purpose: GetPurpose::Move };
        match self.read_device(stored).await {
            Ok(stored) if stored.checksums == request.checksums => Ok(Comparison::Same),
            Ok(_) => Err(PutShardError::Conflict { drive, key }),
            Err(GetShardError::Corrupt { .. }) => Ok(Comparison::Damaged(entry)),
            Err(GetShardError::Failed { .. }) => Err(PutShardError::Failed { drive }),
            Err(_) => Ok(Comparison::Gone),
        }
    }

    async fn forget(&self, request: DeleteShards) -> Result<(), DriveFailed> {
        let DeleteShards { keys, position, is_void } = request;
        let mut answers = Vec::new();
        for keys in keys.chunks(DELETE_KEYS) {
            let (reply, answer) = oneshot::channel();
            let delete = DeleteShards { keys: keys.to_vec(), position, is_void };
            self.send(Request::Delete(DeleteRequest { delete, reply })).await?;
            answers.push(answer);
        }
        for answer in answers {
            match self.wait(answer).await {
                Some(Ok(())) => {}
                _ => return Err(self.failed()),
            }
        }
        if self.shared.has_failed() { Err(self.failed()) } else { Ok(()) }
    }
}

/// What a put found under its key.
enum Comparison {
    Same,
    /// The shard was deleted during the comparison.
    Gone,
    /// The shard is unreadable: the put may replace it.
    Damaged(Entry),
}

impl DriveService for Drive {
    fn put(&self, request: PutShard) -> BoxFuture<'_, Result<(), PutShardError>> {
        Box::pin(self.counted(request.purpose == PutPurpose::Write, self.store(request)))
    }

    fn get(&self, request: GetShard) -> BoxFuture<'_, Result<ShardBlocks, GetShardError>> {
        Box::pin(self.counted(request.purpose == GetPurpose::Read, self.read(request)))
    }

    fn delete(&self, request: DeleteShards) -> BoxFuture<'_, Result<(), DriveFailed>> {
        Box::pin(self.forget(request))
    }

    fn keep_positions(
        &self,
        positions: Vec<Position>,
        replace: bool,
    ) -> BoxFuture<'_, Result<(), DriveFailed>> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            self.send(Request::Keep { positions, replace, reply }).await?;
            match self.wait(answer).await {
                Some(Ok(())) => Ok(()),
                _ => Err(self.failed()),
            }
        })
    }

    fn known_ledgers(&self) -> BoxFuture<'_, Result<Vec<KnownLedger>, DriveFailed>> {
        Box::pin(async move {
            if self.shared.has_failed() {
                return Err(self.failed());
            }
            Ok(self.shared.index().known_ledgers())
        })
    }

    fn list(
        &self,
        after: Option<ShardKey>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<ShardEntry>, DriveFailed>> {
        Box::pin(async move {
            if self.shared.has_failed() {
                return Err(self.failed());
            }
            Ok(self.shared.index().list(after, limit.min(LIST_MAX)))
        })
    }

    fn scrub(
        &self,
        after: Option<ShardKey>,
        budget_bytes: u64,
    ) -> BoxFuture<'_, Result<ScrubStep, DriveFailed>> {
        Box::pin(self.scrub_step(after, budget_bytes))
    }

    fn make_room(&self) -> BoxFuture<'_, Result<(), DriveFailed>> {
        Box::pin(async {
            let (reply, answer) = oneshot::channel();
            self.send(Request::MakeRoom(reply)).await?;
            self.wait(answer).await.ok_or_else(|| self.failed())
        })
    }

    fn health(&self) -> DriveHealth {
        self.shared.health()
    }

    fn stat(&self) -> DriveStat {
        let health = self.health();
        let summary = self.shared.summary();
        DriveStat {
            uuid: self.shared.uuid,
            mark: self.shared.mark(),
            health,
            failure: if health == DriveHealth::Failed { self.shared.failure() } else { None },
            io_path: self.io_path,
            capacity_bytes: self.shared.geometry.capacity_bytes,
            live_bytes: summary.usage.live_bytes,
            garbage_bytes: summary.usage.garbage_bytes,
            reserved_bytes: summary.usage.reserved_bytes,
            free_bytes: summary.usage.free_bytes,
            host_full: self.shared.is_host_full(),
            full: self.shared.is_full(&summary.usage),
            trimmed_bytes: self.shared.trimmed_bytes(),
            write_limit_bytes_per_s: self.shared.admission.write_limit_bytes_per_s(),
            shards: summary.shards,
            bad_shards: summary.bad_shards,
            age_ms: 0,
            cleanable_bytes: summary.usage.cleanable_bytes,
            foreground: self.shared.waits.now(self.clock.boot_ns()),
        }
    }
}

/// Reads and checks the superblocks.
fn usable_superblock(path: &Path, file: &dyn File, cluster: ClusterId) -> Result<Superblock, OpenDriveError> {
    let path = path.to_owned();
    let superblocks = Superblocks::read(file);
    let Some(superblock) = superblocks.newest().cloned() else {
        return Err(match (superblocks.error, superblocks.magic_seen) {
            (Some(source), _) => OpenDriveError::Io { path, source },
            (None, true) => OpenDriveError::SuperblocksDamaged { path },
            (None, false) => OpenDriveError::NotDrive { path },
        });
    };
    if superblock.cluster != cluster {
        return Err(OpenDriveError::OtherCluster { path, cluster: superblock.cluster, expected: cluster });
    }
    match superblock.version.cmp(&FORMAT_VERSION) {
        std::cmp::Ordering::Equal => {}
        std::cmp::Ordering::Greater => {
            return Err(OpenDriveError::TooNew { path, version: superblock.version, known: FORMAT_VERSION });
        }
        std::cmp::Ordering::Less => {
            return Err(OpenDriveError::TooOld { path, version: superblock.version, known: FORMAT_VERSION });
        }
    }
    let features = superblock.features;
    let bits = features.incompat & !KNOWN_FEATURES.incompat | features.read_only & !KNOWN_FEATURES.read_only;
    if bits != 0 {
        return Err(OpenDriveError::UnknownFeatures { path, bits });
    }
    let len_bytes = file.len().map_err(|source| OpenDriveError::Io { path: path.clone(), source })?;
    if len_bytes < superblock.capacity_bytes {
        return Err(OpenDriveError::Shrunk { path, len_bytes, capacity_bytes: superblock.capacity_bytes });
    }
    Ok(superblock)
}

/// Marks the drive as open, in both superblocks one after the other. The sync also makes durable the writes that an
/// earlier process left in caches.
///
/// If the recovery used the older checkpoint, the superblocks name both until there is a new one. Another recovery from
/// the older one must know that it is the older one: segments that it lists as full may have been reused since.
fn claim(file: &dyn File, superblock: &mut Superblock, recovered: &Recovered) -> io::Result<()> {
    let newest = superblock.checkpoint.generation;
    let pointers = (recovered.checkpoint.clone(), recovered.previous.clone());
    if !recovered.report.fell_back {
        (superblock.checkpoint, superblock.previous) = pointers.clone();
    }
    superblock.incarnation += 1;
    superblock.closed = false;
    for _ in 0..2 {
        superblock.sequence += 1;
        let slot = SUPERBLOCK_OFFSETS[(superblock.sequence % 2) as usize];
        file.write_at(&superblock.encode(), slot)?;
        file.sync_data()?;
    }
    (superblock.checkpoint, superblock.previous) = pointers;
    // No run of the next checkpoint may be mistaken for a run of the damaged one.
    superblock.checkpoint.generation = newest;
    Ok(())
}

impl Runner {
    fn start(engine: Engine, files: &DeviceFiles, prefer: PreferIo) -> (Self, IoPath) {
        if files.direct.latency().is_some() {
            return (Self::Task(Task::start(engine, files)), IoPath::Simulated);
        }
        if files.direct.raw_fd().is_none() {
            let engine = Mutex::new((engine, InlineDevice::new(files.clone())));
            return (Self::Inline(Box::new(Inline { engine })), IoPath::Simulated);
        }
        let (outbox, inbox) = queues();
        let stop = inbox.stop.clone();
        let (started, start) = std::sync::mpsc::sync_channel(1);
        let files = files.clone();
        let handle = spawn_thread("drive", move || {
            let (mut device, wake) = open_device(&files, prefer);
            let bell = Arc::new(Bell { sleeping: AtomicBool::new(false), wake });
            // `open` waits for this message, so the receiver exists.
            let _ = started.send((bell.clone(), device.io_path()));
            serve(engine, device.as_mut(), inbox, &bell);
        });
        let (bell, io_path) = start.recv().expect("a thread that panics ends the process");
        let handle = Mutex::new(Some(handle));
        (Self::Thread(Thread { outbox, bell, stop, handle }), io_path)
    }
}

/// A ring belongs to the thread that makes it, so this runs on the drive's thread.
fn open_device(files: &DeviceFiles, prefer: PreferIo) -> (Box<dyn Device>, Arc<dyn Wake>) {
    if prefer == PreferIo::Auto {
        match UringDevice::new(files) {
            Ok(device) => {
                let waker = device.waker();
                return (Box::new(device), waker);
            }
            Err(error) => tracing::info!(%error, "io_uring is not available, using threads"),
        }
    }
    let device = PoolDevice::new(files);
    let waker = device.waker();
    (Box::new(device), waker)
}

/// The queues by which requests reach the engine, one per class.
struct Outbox {
    changes: mpsc::Sender<Request>,
    reads: mpsc::Sender<Request>,
    background: mpsc::Sender<Request>,
}

impl Outbox {
    async fn send(&self, request: Request) -> Result<(), mpsc::error::SendError<Request>> {
        let queue = match &request {
            Request::Read(read) if read.class == ReadClass::Background => &self.background,
            Request::Read(_) => &self.reads,
            _ => &self.changes,
        };
        queue.send(request).await
    }
}

fn queues() -> (Outbox, Inbox) {
    let (changes, changes_in) = mpsc::channel(QUEUE_LEN);
    let (reads, reads_in) = mpsc::channel(QUEUE_LEN);
    let (background, background_in) = mpsc::channel(QUEUE_LEN);
    let inbox =
        Inbox { changes: changes_in, reads: reads_in, background: background_in, stop: Arc::default() };
    (Outbox { changes, reads, background }, inbox)
}

struct Inbox {
    changes: mpsc::Receiver<Request>,
    reads: mpsc::Receiver<Request>,
    background: mpsc::Receiver<Request>,
    stop: Arc<AtomicBool>,
}

impl Inbox {
    /// Moves waiting requests into the engine as far as its bounds allow.
    fn deliver(&mut self, engine: &mut Engine, device: &mut dyn Device) {
        while engine.reads_in_flight() < READS_MAX
            && let Ok(request) = self.reads.try_recv()
        {
            engine.accept(request, device);
        }
        while engine.background_reads() < BACKGROUND_READS_MAX
            && let Ok(request) = self.background.try_recv()
        {
            engine.accept(request, device);
        }
        while engine.backlog() < QUEUE_LEN
            && let Ok(request) = self.changes.try_recv()
        {
            engine.accept(request, device);
        }
    }

    /// Whether [`Inbox::deliver`] would deliver a request.
    fn has_mail(&self, engine: &Engine) -> bool {
        (engine.reads_in_flight() < READS_MAX && !self.reads.is_empty())
            || (engine.background_reads() < BACKGROUND_READS_MAX && !self.background.is_empty())
            || (engine.backlog() < QUEUE_LEN && !self.changes.is_empty())
            || self.stop.load(Ordering::SeqCst)
    }
}

/// The drive's thread.
fn serve(mut engine: Engine, device: &mut dyn Device, mut inbox: Inbox, bell: &Bell) {
    let mut done = Vec::new();
    loop {
        if inbox.stop.load(Ordering::SeqCst) {
            engine.abandon();
            return;
        }
        inbox.deliver(&mut engine, device);
        engine.pump(device);
        if engine.has_ended() {
            return;
        }
        bell.sleeping.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if engine.wants_pump() || inbox.has_mail(&engine) {
            device.poll(&mut done);
        } else {
            device.wait(&mut done, engine.idle_wait());
        }
        bell.sleeping.store(false, Ordering::SeqCst);
        for one in done.drain(..) {
            engine.complete(one, device);
        }
    }
}

impl Task {
    fn start(engine: Engine, files: &DeviceFiles) -> Self {
        let (outbox, inbox) = queues();
        let handle = tokio::spawn(serve_task(engine, DelayedDevice::new(files.clone()), inbox));
        Self { outbox, handle }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.handle.abort();
    }
}

/// Does the work of [`serve`] on a task.
async fn serve_task(mut engine: Engine, mut device: DelayedDevice, mut inbox: Inbox) {
    let mut done = Vec::new();
    loop {
        inbox.deliver(&mut engine, &mut device);
        engine.pump(&mut device);
        if engine.has_ended() {
            return;
        }
        if engine.wants_pump() || inbox.has_mail(&engine) {
            device.poll(&mut done);
            tokio::task::yield_now().await;
        } else {
            let (room_to_read, room) = (engine.reads_in_flight() < READS_MAX, engine.backlog() < QUEUE_LEN);
            let room_to_scrub = engine.background_reads() < BACKGROUND_READS_MAX;
            let idle_wait = engine.idle_wait();
            tokio::select! {
                biased;
                one = device.next() => done.push(one),
                Some(request) = inbox.reads.recv(), if room_to_read => engine.accept(request, &mut device),
                Some(request) = inbox.background.recv(), if room_to_scrub => engine.accept(request, &mut device),
                Some(request) = inbox.changes.recv(), if room => engine.accept(request, &mut device),
                () = tokio::time::sleep(idle_wait.unwrap_or_default()), if idle_wait.is_some() => {}
            }
        }
        for one in done.drain(..) {
            engine.complete(one, &mut device);
        }
    }
}

impl Thread {
    fn join(&self) {
        let handle = self.handle.lock().expect("a panic ends the process, so no lock is poisoned").take();
        if let Some(handle) = handle {
            // A thread that panicked has ended the process already.
            let _ = handle.join();
        }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.bell.ring();
        self.join();
    }
}
