//! The waist: POSIX and object operations on one filesystem; bytes to extents on drives and back.
//!
//! Every protocol goes through [`Client`]. It caches attributes, maps and dirty data under leases of the ledger's
//! owner, writes behind, and verifies every byte it reads. Metadata operations are durable when they return; data is
//! durable after [`Client::fsync`], and soon after the last close.

mod background;
mod blobs;
mod bond;
mod damage;
mod dirty;
mod early;
mod extents;
mod fetch;
mod file;
mod flush;
mod given_up;
mod kernel_cache;
mod latency;
mod locks;
mod makes;
mod map_cache;
mod names;
mod near;
mod node;
mod objects;
mod orphans;
mod pack;
mod peers;
mod ranges;
mod reach;
mod read;
mod read_extent;
mod rebuild;
mod reclaim;
mod repair;
mod reserved;
mod room;
mod session;
mod shortage;
mod takeover;
mod term;
mod tier;
mod topology;
mod verify;

use std::ops::Range;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64};

use base::env::Env;
use base::{ClusterId, FsError, Ino, LedgerId, SessionId};
use bytes::Bytes;
use layout::{Profile, extent_bytes_max};
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use wire::meta::{EventSink, LeaseGrant, MetaReply, MetaRequest, MetaService, OwnerEvent};

use wire::store::ObjectStore;

use blobs::Blobs;
use bond::Bonds;
use extents::ExtentIo;
use flush::InlineBudget;
use given_up::GivenUp;
use kernel_cache::Forgotten;
use locks::Locks;
use makes::Makes;
use node::NodeTable;
use room::Room;
use session::{Asker, Session};

pub use damage::{Flaw, Suspect, Verdict};
pub use fetch::Fetched;
pub use file::{NotTaken, Place};
pub use kernel_cache::NameTerm;
pub use names::DirPage;
pub use near::Near;
pub use objects::{CompleteUpload, CopyObject, PutOptions, PutPart};
pub use orphans::{ClosedRange, ExtentRanges, Inventory};
pub use pack::{PACK_ALIGN, PackOutcome, PackTarget};
pub use peers::{Peers, Uploading};
pub use ranges::{AllocateMode, SeekKind};
pub use reach::Reach;
pub use read::ReadAccess;
pub use rebuild::{LeftPage, MissingPage, RebuildGroup};
pub use reclaim::{FreeCursor, ReclaimStep};
pub use repair::{OwedCursor, OwedPage};
pub use shortage::{Scarce, Shortage};
pub use tier::{FileTiers, PartsPage, UploadError};
pub use topology::{Limits, Topology};
pub use verify::{ShardCount, Verified};
pub use wire::cluster::RepairOutcome;
pub use wire::guard::Guard;
pub use wire::lock::{FileLock, LockSpace};
pub use wire::message::Caller;
pub use wire::meta::{
    Attr, DirEntry, DirPosition, FileKind, MakeNode, OpenIntent, OwedEntry, RenameMode, SYMLINK_BYTES_MAX,
    SetAttr, Whiteout, XattrMode,
};
pub use wire::meta::{MapEntry, PiecePosition};
pub use wire::{object, trace};

/// Everything that a client needs.
pub struct ClientOptions {
    /// Clock and randomness.
    pub env: Env,
    /// The runtime for its tasks.
    pub runtime: Handle,
    /// The ledger of the filesystem.
    pub ledger: LedgerId,
    /// Its owner. The value changes when another owner takes over.
    pub owner: watch::Receiver<Arc<dyn MetaService>>,
    /// Drives and placement groups.
    pub topology: watch::Receiver<Arc<Topology>>,
    /// The filesystem's profile. File data is gathered up to the size of its extents; the topology decides how each
    /// extent is protected.
    pub profile: Profile,
    /// The most bytes that are written but not durable. Further writers wait.
    pub dirty_bytes_max: u64,
    /// Memory for maps of closed files.
    pub map_bytes_max: u64,
    /// The object store that extents may lie in.
    pub tier: TierLink,
    /// Shared by the clients of this filesystem.
    pub peers: Peers,
    /// Where owner and drives are.
    pub reach: Reach,
}

/// For [`ClientOptions::owner`]: an owner that nobody follows.
pub fn only_owner(owner: Arc<dyn MetaService>) -> watch::Receiver<Arc<dyn MetaService>> {
    watch::channel(owner).1
}

/// How a client reaches the object store that extents of its filesystem lie in.
#[derive(Clone)]
pub struct TierLink {
    /// Part of the names of blobs.
    pub cluster: ClusterId,
    /// The number of the filesystem, for programs that read blobs without metadata.
    pub filesystem: u32,
    /// Memory for recently fetched bytes.
    pub fetched_bytes_max: u64,
    /// Memory for files that are on their way back to drives on request.
    pub returning_bytes_max: u64,
    /// The store, if there is one.
    pub store: watch::Receiver<Option<Arc<dyn ObjectStore>>>,
}

impl TierLink {
    /// For a filesystem that has no store and will not get one.
    pub fn none() -> Self {
        let (_, store) = watch::channel(None);
        Self {
            cluster: ClusterId([0; 16]),
            filesystem: 0,
            fetched_bytes_max: 0,
            returning_bytes_max: 0,
            store,
        }
    }
}

/// Invalidates caches above the client. Called from a thread of its own, never from a request.
pub trait Invalidate: Send + Sync {
    /// Attributes and content of an inode changed elsewhere.
    fn inode(&self, ino: Ino);
    /// As [`Invalidate::inode`], without the pages of this range.
    fn inode_around(&self, ino: Ino, _range: Range<u64>) {
        self.inode(ino);
    }
    /// A name is about to change elsewhere. Lookups of it until then are answered with the note that it may not be
    /// kept.
    fn entry(&self, parent: Ino, name: &[u8]);
}

/// Which reads are noted in the access time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AccessTimes {
    /// The first after a change, and one a day (relatime).
    #[default]
    Relative,
    /// None (noatime).
    Never,
}

/// The numbers of `statfs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FsStat {
    /// Provisioned size.
    pub total_bytes: u64,
    /// Bytes that can still be written.
    pub free_bytes: u64,
    /// Bytes of content stored, before redundancy.
    pub used_bytes: u64,
    /// The part of `used_bytes` that is on drives, as of the last heartbeat; whole extents if the filesystem tiers.
    pub drive_bytes: u64,
    /// Inodes in use.
    pub inodes: u64,
}

/// A client of one filesystem. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
    /// The user whose rights the owner checks; `None`: the caller of these methods has checked them.
    caller: Option<Arc<Caller>>,
    /// See [`Client::refusable`].
    refusable: bool,
}

struct Inner {
    env: Env,
    runtime: Handle,
    session: Session,
    extents: ExtentIo,
    blobs: Blobs,
    nodes: NodeTable,
    ledger: LedgerId,
    profile: Profile,
    window: u64,
    dirty_bytes_max: u64,
    map_bytes_max: u64,
    dirty_bytes: AtomicU64,
    /// Wakes writers that wait for dirty bytes to drain.
    drained: Notify,
    /// The last flush anywhere failed: writers get the error instead of waiting.
    stalled: Mutex<Option<FsError>>,
    room: Room,
    /// Held exclusively by deletions: a shard that rebuild restores is either stored before them or not restored at
    /// all.
    deleting: tokio::sync::RwLock<()>,
    inline: Mutex<InlineBudget>,
    to_release: Mutex<Vec<LeaseGrant>>,
    /// Files whose last handle was closed since the closer last ran.
    closed: Mutex<Vec<Ino>>,
    /// Files of earlier batches that took long and have been written since.
    flushed: Mutex<Vec<Ino>>,
    closed_some: Notify,
    /// Counts the beginnings and ends of telling the owner of closed files: odd while it is being told.
    close_rounds: AtomicU64,
    given_up: Mutex<GivenUp>,
    forgotten: Forgotten,
    makes: Makes,
    locks: Locks,
    /// Counts answers to changes of names.
    changes: AtomicU64,
    invalidate: Mutex<Option<Arc<dyn Invalidate>>>,
    notes_reads: AtomicBool,
    peers: Peers,
    closing: AtomicBool,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

/// Events, each with the number of the bond to the owner that sent it.
type Events = mpsc::UnboundedSender<(u64, OwnerEvent)>;

/// Carries the owner's events to the task that handles them.
struct EventQueue {
    bond: u64,
    events: Events,
}

impl EventSink for EventQueue {
    fn event(&self, event: OwnerEvent) {
        // A client that is gone has no leases to recall.
        let _ = self.events.send((self.bond, event));
    }
}

impl Client {
    /// The ledger of the filesystem.
    pub fn ledger(&self) -> LedgerId {
        self.inner.ledger
    }

    /// Registers with the owner and starts the background tasks.
    pub async fn open(options: ClientOptions) -> Result<Self, FsError> {
        let (events, inbox) = mpsc::unbounded_channel();
        let mut owner = options.owner;
        let first = owner.borrow_and_update().clone();
        let queue = EventQueue { bond: Bonds::FIRST, events: events.clone() };
        let session =
            Session::open(first, Arc::new(queue), options.env.clock.clone(), options.reach.owner_patience)
                .await?;
        session.heartbeat().await?;
        let inner = Inner {
            extents: ExtentIo::new(
                options.env.clone(),
                options.ledger,
                session.bonds.clone(),
                options.topology,
                options.peers.clone(),
                options.reach,
            ),
            blobs: Blobs::new(options.ledger, options.tier),
            inline: Mutex::new(InlineBudget::new(options.env.clock.boot_ns())),
            env: options.env,
            runtime: options.runtime.clone(),
            nodes: NodeTable::new(session.term.clone()),
            session,
            ledger: options.ledger,
            profile: options.profile,
            window: u64::from(extent_bytes_max(options.profile)),
            dirty_bytes_max: options.dirty_bytes_max,
            map_bytes_max: options.map_bytes_max,
            dirty_bytes: AtomicU64::new(0),
            drained: Notify::new(),
            stalled: Mutex::new(None),
            room: Room::default(),
            deleting: tokio::sync::RwLock::new(()),
            to_release: Mutex::new(Vec::new()),
            closed: Mutex::new(Vec::new()),
            flushed: Mutex::default(),
            closed_some: Notify::new(),
            close_rounds: AtomicU64::new(0),
            given_up: Mutex::default(),
            forgotten: Forgotten::default(),
            makes: Makes::default(),
            locks: Locks::default(),
            changes: AtomicU64::new(0),
            invalidate: Mutex::new(None),
            notes_reads: AtomicBool::new(true),
            peers: options.peers,
            closing: AtomicBool::new(false),
            tasks: Mutex::new(Vec::new()),
        };
        let client = Self { inner: Arc::new(inner), caller: None, refusable: false };
        client.refresh_room();
        let tasks = vec![
            options.runtime.spawn(background::events(client.clone(), inbox)),
            options.runtime.spawn(background::ticker(client.clone())),
            options.runtime.spawn(background::closer(client.clone())),
            options.runtime.spawn(takeover::follow(client.clone(), owner, events)),
        ];
        *client.inner.tasks.lock().expect("no holder of this lock panics") = tasks;
        Ok(client)
    }

    /// Sends a request to the owner.
    async fn call(&self, request: MetaRequest) -> Result<MetaReply, FsError> {
        // What is known here goes into the answer, so it must hold.
        self.inner.session.be_certain().await?;
        let asker = Asker { caller: self.caller.as_deref(), refusable: self.refusable };
        let reply = self.inner.session.call(asker, request).await;
        if self.inner.session.is_due() {
            let client = self.clone();
            // If it fails, the changes are kept, and the next request tries again.
            self.inner.runtime.spawn(async move { client.inner.session.settle().await });
        }
        reply
    }

    /// Sends an answer to an event of the owner.
    async fn answer(&self, request: MetaRequest) -> Result<MetaReply, FsError> {
        self.inner.session.call(Asker::default(), request).await
    }

    /// The same client on behalf of a user: the owner checks the user's rights to each request. For machines whose own checks
    /// the owner does not trust.
    pub fn for_caller(&self, caller: Caller) -> Self {
        Self { caller: Some(Arc::new(caller)), ..self.clone() }
    }

    /// The same client for changes of names whose directories are locked above it until the answer is here, as a kernel does. Forgetting a
    /// name needs that lock, so two clients could wait for one another: one of them then gets [`FsError::Retry`], and nothing has happened.
    pub fn refusable(&self, refusable: bool) -> Self {
        Self { refusable, ..self.clone() }
    }

    /// Sets the receiver of invalidations.
    pub fn set_invalidate(&self, invalidate: Option<Arc<dyn Invalidate>>) {
        *self.inner.invalidate.lock().expect("no holder of this lock panics") = invalidate;
    }

    /// Sets whether changes of names and attributes return before they are durable: within milliseconds they are. What a crash of
    /// this machine and the owner leaves of them is a beginning of their order, with all that was synced.
    pub fn set_early(&self, is_early: bool) {
        self.inner.session.set_early(is_early);
    }

    /// Makes all changes of names and attributes durable.
    pub async fn sync_names(&self) -> Result<(), FsError> {
        self.inner.session.settle().await
    }

    /// Sets which reads are noted in access times.
    pub fn set_access_times(&self, times: AccessTimes) {
        self.inner.notes_reads.store(times == AccessTimes::Relative, std::sync::atomic::Ordering::Relaxed);
    }

    /// The time for timestamps, in nanoseconds since 1970.
    pub fn wall_ns(&self) -> i64 {
        self.inner.env.clock.wall_ns()
    }

    /// The session with the owner, now.
    pub fn session(&self) -> SessionId {
        self.inner.session.bonds.with(|bond| bond.session)
    }

    /// The protection of new data.
    pub fn profile(&self) -> Profile {
        self.inner.profile
    }

    /// Makes everything durable. Goes on after an error and returns the first one.
    pub async fn sync(&self) -> Result<(), FsError> {
        let mut result = Ok(());
        for node in self.inner.nodes.select(|state| state.is_behind() || state.atime_ns.is_some()) {
            let flushed = self.flush(&node).await;
            result = result.and(flushed);
        }
        result = result.and(self.sync_names().await);
        if self.inner.session.take_lost() { result.and(Err(FsError::Io)) } else { result }
    }

    /// Makes everything durable and ends the session.
    pub async fn close(&self) -> Result<(), FsError> {
        self.inner.closing.store(true, std::sync::atomic::Ordering::Relaxed);
        let result = self.sync().await;
        let tasks = std::mem::take(&mut *self.inner.tasks.lock().expect("no holder of this lock panics"));
        for task in tasks {
            task.abort();
        }
        self.call(MetaRequest::CloseSession).await?;
        result
    }

    /// Asks the owner for the figures that [`Client::statfs`] takes from the last heartbeat.
    pub async fn refresh_use(&self) -> Result<(), FsError> {
        self.inner.session.heartbeat().await
    }

    /// Sizes and counts.
    pub async fn statfs(&self) -> Result<FsStat, FsError> {
        let MetaReply::StatFs { used_bytes, inodes } = self.call(MetaRequest::StatFs).await? else {
            return Err(FsError::Io);
        };
        let topology = self.inner.extents.topology();
        let Limits { provisioned_bytes, ssd_bytes, .. } = topology.limits;
        let room = self.free_bytes();
        let holds = || {
            let capacity = topology.capacity_bytes(self.inner.profile).min(ssd_bytes.unwrap_or(u64::MAX));
            // Content that only a store has takes no space of the drives.
            if self.inner.blobs.store().is_some() { capacity.max(used_bytes + room) } else { capacity }
        };
        let total_bytes = provisioned_bytes.unwrap_or_else(holds);
        // A size beyond that of the drives still fits if content moves to a store.
        let beyond = provisioned_bytes.is_some() && self.inner.blobs.store().is_some();
        let free_bytes = total_bytes.saturating_sub(used_bytes).min(if beyond { u64::MAX } else { room });
        let (_, drive_bytes) = self.inner.session.used();
        Ok(FsStat { total_bytes, free_bytes, used_bytes, drive_bytes, inodes })
    }

    /// Pieces of the map of an inode, for people.
    pub async fn map(&self, ino: Ino, off: u64, limit: u32) -> Result<Vec<wire::meta::MapPiece>, FsError> {
        match self.call(MetaRequest::GetMap { ino, off, limit }).await? {
            MetaReply::Map { pieces, .. } => Ok(pieces),
            _ => Err(FsError::Io),
        }
    }
}

/// A name or value of the protocol above, as bytes.
fn owned(bytes: &[u8]) -> Bytes {
    Bytes::copy_from_slice(bytes)
}
