//! Requests to the owner of a ledger: names, attributes, maps of files, and leases on them.
//!
//! Every request that changes something is one batch in the ledger's log and is durable when the reply
//! arrives. A request carries `(session, slot, seq)`: a repetition has no second effect.

use std::sync::Arc;
use std::time::Duration;

use base::{DriveId, Epoch, ExtentId, FsError, Ino, LeaseId, PgId, Seq, SessionId};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::BoxFuture;
use crate::damage::{DamageReply, DamageRequest};
use crate::guard::Guard;
use crate::lock::FileLock;
use crate::message::{Envelope, FirstTime};
use crate::object::{ObjectReply, ObjectRequest};
use crate::position::Position;
use crate::tier::{TierReply, TierRequest};

pub use crate::claim::{CLAIMS_MAX, Claim, HeldLease, Resumed};
pub use crate::moves::{MapEntry, PACK_MOVES_MAX, PackMove, PiecePosition, REHYDRATED_MAX, Rehydrated};
pub use crate::piece::{CommitPiece, Content, ExtentRef, MapPiece, OwedEntry, OwedShard};

/// Longest name of a directory entry, in bytes.
pub const NAME_BYTES_MAX: usize = 255;
/// Largest file, in bytes.
pub const FILE_BYTES_MAX: u64 = 1 << 60;
/// Longest target of a symbolic link, in bytes.
pub const SYMLINK_BYTES_MAX: usize = 4095;
/// Largest value of one extended attribute, in bytes.
pub const XATTR_BYTES_MAX: usize = 64 << 10;
/// Largest sum of names and values of extended attributes on an inode, in bytes.
pub const XATTRS_TOTAL_BYTES_MAX: usize = 256 << 10;
/// Most links to one inode.
pub const LINKS_MAX: u32 = i32::MAX as u32;
/// Most bytes of file content that travel inside a commit.
pub const INLINE_BYTES_MAX: usize = 8 << 10;
/// How long a cache above a client may keep the name or attributes of an answer, unless it is told to forget earlier.
pub const NAME_TERM: Duration = Duration::from_secs(10);
/// Caches do not keep the names of an answer that is older than this on arrival.
pub const ANSWER_AGE_MAX: Duration = Duration::from_secs(2);
/// A session of which the owner hears nothing for so long loses leases without being asked. An owner that takes over waits so long
/// for sessions that do not come. Longer than a cache above a client keeps an answer, and than a drive is waited for that does not
/// answer ([`RECALL_IDLE`]).
pub const SESSION_TERM: Duration = Duration::from_secs(15);
/// The owner takes a lease that it recalls once the holder has not committed anything under it for this long, which is enough
/// to give up a drive that does not answer and to write the bytes elsewhere ...
pub const RECALL_IDLE: Duration = SESSION_TERM;
/// ... or after this long in any case.
pub const RECALL_LONGEST: Duration = Duration::from_secs(60);
/// Extent ids handed to a session at a time.
pub const EXTENT_RANGE_IDS: u64 = 1 << 16;

/// The type of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// Bytes.
    Regular,
    /// Names.
    Directory,
    /// A path to somewhere else.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket's name.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

/// Everything that `stat` returns, and the versions that caches are checked against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attr {
    /// Stable for the life of the file, never reused.
    pub ino: Ino,
    /// Its type.
    pub kind: FileKind,
    /// Permission, set-id and sticky bits: 0o7777.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Names that refer to it; of a directory, 2 + its subdirectories.
    pub nlink: u32,
    /// Device number of a device inode.
    pub rdev: u32,
    /// Bytes; of a directory, its number of entries.
    pub size: u64,
    /// Bytes of content that are stored (holes take none), before redundancy.
    pub stored_bytes: u64,
    /// Last read, nanoseconds since 1970.
    pub atime_ns: i64,
    /// Last change of content.
    pub mtime_ns: i64,
    /// Last change of content or attributes.
    pub ctime_ns: i64,
    /// Creation.
    pub btime_ns: i64,
    /// Counts changes of content.
    pub data_ver: u64,
    /// Counts changes of attributes.
    pub attr_ver: u64,
    /// Its protection.
    pub guard: Guard,
}

/// A directory entry with the attributes of its inode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirEntry {
    /// The name, 1 to 255 bytes.
    pub name: Bytes,
    /// Position for `telldir`: unique in the directory, never reused.
    pub cookie: u64,
    /// Its inode.
    pub attr: Attr,
    /// The lease on the inode, unless another session holds an exclusive one.
    pub lease: Option<LeaseGrant>,
}

/// What a client may cache and do on an inode. Each kind includes the ones before it, except `Shared`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LeaseKind {
    /// Attributes.
    Attr,
    /// Attributes, content and map.
    Read,
    /// Several writers: nothing is cached, every write is committed at once.
    Shared,
    /// No other session has a lease: dirty data, size and mtime are the holder's.
    Exclusive,
}

/// A lease granted by the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseGrant {
    /// The inode.
    pub ino: Ino,
    /// Names this grant in commits and releases.
    pub id: LeaseId,
    /// Its kind.
    pub kind: LeaseKind,
    /// Grows with every answer that carried the grant. A release of an older one is ignored: it crossed with
    /// a newer answer.
    pub seq: u64,
}

/// An event that the owner sends to a session unasked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OwnerEvent {
    /// Give back the lease, down to `keep`, after a flush of the data under it. Answer with
    /// [`MetaRequest::Release`].
    Recall {
        /// The grant.
        lease: LeaseGrant,
        /// The kind that the session may keep.
        keep: Option<LeaseKind>,
    },
    /// The name is about to appear, disappear or change its inode: make caches above forget it, or that it is missing.
    /// Answer with [`MetaRequest::Forgot`].
    Forget {
        /// The directory.
        dir: Ino,
        /// The name in it.
        name: Bytes,
        /// Names this event in the answer.
        number: u64,
    },
    /// The lease was taken away: cached and dirty data under it is void.
    Revoked {
        /// The grant.
        lease: LeaseGrant,
    },
    /// The request for a lock that has this ticket was granted.
    LockGranted {
        /// Chosen by the session.
        ticket: u64,
    },
    /// A lock was taken away, because the session was silent and another one wanted it.
    LockLost {
        /// The lock.
        lock: FileLock,
    },
}

/// Changes to attributes; `None` leaves one as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetAttr {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Cut or extend.
    pub size: Option<u64>,
    /// Last read.
    pub atime_ns: Option<i64>,
    /// Last change of content.
    pub mtime_ns: Option<i64>,
    /// When the holder of the exclusive lease made the change. `None`: the owner makes it, now.
    pub ctime_ns: Option<i64>,
}

impl SetAttr {
    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Both changes, this one after `older`.
    pub fn over(&self, older: &Self) -> Self {
        Self {
            mode: self.mode.or(older.mode),
            uid: self.uid.or(older.uid),
            gid: self.gid.or(older.gid),
            size: self.size.or(older.size),
            atime_ns: self.atime_ns.or(older.atime_ns),
            mtime_ns: self.mtime_ns.or(older.mtime_ns),
            ctime_ns: self.ctime_ns.or(older.ctime_ns),
        }
    }
}

/// What to create.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MakeNode {
    /// In which directory.
    pub parent: Ino,
    /// Under which name.
    pub name: Bytes,
    /// What.
    pub kind: FileKind,
    /// Permission bits asked for.
    pub mode: u32,
    /// Bits to clear unless the directory has a default ACL.
    pub umask: u32,
    /// Owner.
    pub uid: u32,
    /// Group, unless the directory is set-gid.
    pub gid: u32,
    /// Device number.
    pub rdev: u32,
    /// Target of a symbolic link, else empty.
    pub target: Bytes,
    /// Whether the caller opens it at once, with an exclusive lease.
    pub open: OpenIntent,
}

/// Whether and how a request also opens the inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpenIntent {
    /// Not opened.
    None,
    /// For reading.
    Read,
    /// For writing.
    Write,
    /// For writing, truncated to size 0 first.
    Truncate,
}

/// What `rename` does if the destination exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RenameMode {
    /// Replace it.
    Replace,
    /// Fail.
    NoReplace,
    /// Swap both.
    Exchange,
}

/// The character device 0/0 with which an overlay hides a name of a lower layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Whiteout {
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

/// Whether an extended attribute may or must exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum XattrMode {
    /// Create or replace.
    Set,
    /// Must not exist.
    Create,
    /// Must exist.
    Replace,
}

/// Slots of a session: the owner keeps the last answer in each.
pub const SLOTS_MAX: u32 = 512;

/// Makes a retry recognisable: a slot holds one request at a time, numbered by `seq`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct RequestId {
    /// The session that asks.
    pub session: SessionId,
    /// One of its slots, below [`SLOTS_MAX`].
    pub slot: u32,
    /// Grows by one with each new request in the slot.
    pub seq: u64,
}

/// A request to the owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are the arguments of the POSIX calls they are named after")]
pub enum MetaRequest {
    /// Ends a session with its leases, opens and id ranges.
    CloseSession,
    /// Says that the session lives and that none of its reads uses a map older than `in_use_ver`.
    /// Answer: `Beat`.
    Heartbeat {
        in_use_ver: u64,
    },
    /// Answer: `Entry` or `Missing`.
    Lookup {
        parent: Ino,
        name: Bytes,
    },
    /// Answer: `Attr`.
    GetAttr {
        ino: Ino,
    },
    /// Entries in byte order of names, directories sorted as if their name ended in `/`. Answer: `Dir`.
    ReadDir {
        ino: Ino,
        after: Option<DirPosition>,
        limit: u32,
    },
    /// Answer: `Bytes`.
    ReadLink {
        ino: Ino,
    },
    /// Answer: `Entry`.
    Make(MakeNode),
    /// Registers an open and grants a lease. Answer: `Entry`.
    Open {
        ino: Ino,
        intent: OpenIntent,
    },
    /// The session closed its last handles on these inodes.
    Close {
        inos: Vec<Ino>,
    },
    /// Answer: `Attr`. Truncating a file of very many pieces may stop early: the answer has the size reached.
    SetAttr {
        ino: Ino,
        set: SetAttr,
    },
    /// Sets or clears the protection of an inode. Answer: `Attr`.
    SetGuard {
        ino: Ino,
        guard: Guard,
    },
    /// A read moved the access time. `ctime` stays. Answer: `Attr`.
    NoteRead {
        ino: Ino,
        atime_ns: i64,
    },
    /// Answer: `Attr` of the inode that lost its name.
    Unlink {
        parent: Ino,
        name: Bytes,
    },
    /// Answer: `Attr` of the removed directory.
    Rmdir {
        parent: Ino,
        name: Bytes,
    },
    /// May leave a whiteout under the old name, in the same step. Answer: `Renamed`.
    Rename {
        parent: Ino,
        name: Bytes,
        new_parent: Ino,
        new_name: Bytes,
        mode: RenameMode,
        whiteout: Option<Whiteout>,
    },
    /// Answer: `Entry`.
    Link {
        ino: Ino,
        parent: Ino,
        name: Bytes,
    },
    SetXattr {
        ino: Ino,
        name: Bytes,
        value: Bytes,
        mode: XattrMode,
    },
    /// Answer: `Bytes`.
    GetXattr {
        ino: Ino,
        name: Bytes,
    },
    /// Answer: `Names`.
    ListXattr {
        ino: Ino,
    },
    RemoveXattr {
        ino: Ino,
        name: Bytes,
    },
    /// Pieces that intersect `[off, ..)`, in order, at most `limit`. Answer: `Map`.
    GetMap {
        ino: Ino,
        off: u64,
        limit: u32,
    },
    /// Installs new content, written at `mtime_ns`. The size grows to at least `size`; then the attributes in `set`
    /// change, which must not include the size. Answer: `Attr`.
    Commit {
        ino: Ino,
        lease: LeaseId,
        pieces: Vec<CommitPiece>,
        size: u64,
        mtime_ns: i64,
        set: SetAttr,
    },
    /// Turns `[off, off + len)` into a hole; the size stays. May stop early. Answer: `Punched`.
    Punch {
        ino: Ino,
        off: u64,
        len: u64,
    },
    /// Makes a range of `to` share the bytes of a range of `from`. Answer: `Attr` of `to`.
    CloneRange {
        from: Ino,
        from_off: u64,
        to: Ino,
        to_off: u64,
        len: u64,
    },
    /// Answer: `Range`.
    AllocExtents,
    /// Answer: `StatFs`.
    StatFs,
    /// Answer: `Lease`.
    Acquire {
        ino: Ino,
        kind: LeaseKind,
    },
    /// Gives a lease back, down to `keep`.
    Release {
        lease: LeaseGrant,
        keep: Option<LeaseKind>,
    },
    /// Gives back leases that the owner did not recall.
    ReleaseAll {
        leases: Vec<LeaseGrant>,
    },
    /// Caches above the client have forgotten these names in `dir`. Each has the number of its `Forget` event.
    Forgot {
        dir: Ino,
        names: Vec<(Bytes, u64)>,
    },
    /// Extents after `after` that nothing refers to and no reader uses. Answer: `Free`.
    NextFree {
        after: Option<(u64, ExtentId)>,
        limit: u32,
    },
    /// The shards of these extents are gone from all drives. Removes what `drives` are owed of them, too.
    Freed {
        extents: Vec<FreeExtent>,
        drives: Vec<DriveId>,
    },
    /// Owed shards after `after`. Answer: `Owed`.
    Owed {
        after: Option<(DriveId, ExtentId)>,
        limit: u32,
    },
    /// These shards are stored durably and no longer owed. Answer: `NotOwed`, the shards that were not owed any more
    /// on arrival: their extents are gone, so the stored shards are garbage.
    Repaired {
        shards: Vec<(DriveId, ExtentId)>,
    },
    /// Does a bounded part of the clean-up of unlinked files. Answer: `Purged`.
    PurgeStep,
    /// Pieces of all maps after `after`, in order, at most `limit`. Answer: `Scan`.
    ScanMap {
        after: Option<PiecePosition>,
        limit: u32,
    },
    /// Lets pieces refer to a new extent that holds the same bytes, each only if it is still as `moves` says.
    /// The extent must be new: nothing ever referred to it. Answer: `Repacked`.
    Repack {
        extent: ExtentRef,
        owed: Vec<OwedShard>,
        moves: Vec<PackMove>,
        /// The epoch of the placement group by which the extent was written.
        #[serde(default)]
        placed: Epoch,
    },
    /// Ranges of extent ids that are not forgotten. Answer: `Ranges`.
    ExtentRanges,
    /// Searches these ranges of ids (first id, count) for orphans again, except those of which a session may take ids.
    RecheckRanges {
        ranges: Vec<(ExtentId, u64)>,
    },
    /// Whether drives may hold shards that only a newer ledger refers to. While they may, no range counts as closed.
    Doubt {
        in_doubt: bool,
    },
    /// Which of these extents have no reference, or need no shards on drives because a blob has them. A whole scan of all maps,
    /// begun after their ranges were closed, must not have seen them as extents on drives. Answer: `Orphans`.
    ConfirmOrphans {
        ids: Vec<ExtentId>,
    },
    /// No drive holds an unreferenced shard of this closed range: the range is forgotten.
    RangeVerified {
        first: ExtentId,
    },
    /// Answer: `Object`.
    Object(Box<ObjectRequest>),
    /// Lets pieces of files refer to new extents with the same bytes, fetched from blobs. A piece that changed since it
    /// was read is skipped. At most [`REHYDRATED_MAX`]. Answer: `Rehydrated`.
    Rehydrate(Vec<Rehydrated>),
    /// Answer: `Tier`.
    Tier(TierRequest),
    /// Answer: `Damage`.
    Damage(DamageRequest),
    /// Takes a lock, in place of what its holder has in the range. With a ticket, the session's own number for the request,
    /// it may wait: the event `LockGranted` follows. Answer: `Done`, or `Queued`.
    Lock {
        lock: FileLock,
        ticket: Option<u64>,
    },
    /// Gives up a range. With a ticket: the request does not wait any more; if it was granted, the lock is given up.
    /// Answer: `Done`, or `Queued` if it still waited; then the holder keeps what it had before.
    Unlock {
        lock: FileLock,
        ticket: Option<u64>,
    },
    /// Searches a lock of another holder that conflicts with this one. Answer: `Locked`.
    TestLock {
        lock: FileLock,
    },
    /// These placement groups have new members. From the answer on, extents that an older epoch of their group placed are
    /// committed no more (`StaleMap`): an inventory of drives that begins now has all shards of committed extents.
    AdvanceGroups {
        groups: Vec<(PgId, Epoch)>,
    },
    /// A file without a name, open by the session, which [`MetaRequest::Link`] can name. Answer: `Entry`.
    MakeUnnamed(MakeNode),
}

/// A directory listing continues after this name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirPosition {
    /// The last name seen.
    pub name: Bytes,
    /// Whether that was a directory, for the sort order.
    pub kind: FileKind,
}

/// An extent waiting for its shards to be deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreeExtent {
    /// The ledger version that dropped the last reference.
    pub free_ver: u64,
    /// Its id.
    pub id: ExtentId,
    /// Where its shards lie.
    pub pg: PgId,
    /// All shards.
    pub n: u8,
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the variants are named by the requests they answer")]
pub enum MetaReply {
    Done,
    /// The attributes of a name or inode, and the lease granted with them. `keep`: caches above may keep the name.
    Entry {
        attr: Attr,
        lease: Option<LeaseGrant>,
        keep: bool,
    },
    /// The name does not exist. `keep`: caches above may keep this answer.
    Missing {
        keep: bool,
    },
    Attr(Attr),
    /// `keep`: caches above may keep the names.
    Dir {
        entries: Vec<DirEntry>,
        parent: Ino,
        end: bool,
        keep: bool,
    },
    Bytes(Bytes),
    Names(Vec<Bytes>),
    /// The moved inode, and the one that it replaced or was exchanged with.
    Renamed {
        moved: Attr,
        other: Option<Attr>,
    },
    /// `end`: there are no pieces after these.
    Map {
        pieces: Vec<MapPiece>,
        end: bool,
    },
    /// Everything below `next_off` is done; repeat from there if it is not the end of the range.
    Punched {
        attr: Attr,
        next_off: u64,
    },
    /// `version`: the newest durable batch. `used_bytes`: content of the filesystem. `drive_bytes`: the part of it on
    /// drives, in whole extents if it tiers. `events`: the number of events sent to the session since it was bound; the
    /// client's leases are certain once it has taken them all.
    Beat {
        version: u64,
        used_bytes: u64,
        drive_bytes: u64,
        events: u64,
    },
    Range {
        first: ExtentId,
        count: u64,
    },
    StatFs {
        used_bytes: u64,
        inodes: u64,
    },
    Lease(LeaseGrant),
    /// `withheld`: there are more; they become free once they are durable and running reads have ended.
    Free {
        extents: Vec<FreeExtent>,
        withheld: bool,
    },
    Owed(Vec<OwedEntry>),
    NotOwed(Vec<(DriveId, ExtentId)>),
    Purged {
        more: bool,
    },
    /// `next`: where to continue, if there may be more.
    Scan {
        entries: Vec<MapEntry>,
        next: Option<PiecePosition>,
    },
    /// Bytes that were moved; if none, the extent is garbage.
    Repacked {
        moved_bytes: u64,
    },
    /// For each piece, whether it refers to its new extent now; if not, the new extent is garbage.
    Rehydrated {
        moved: Vec<bool>,
    },
    Ranges {
        /// First id and length of each range that no commit may use any more and that is not verified yet.
        closed: Vec<(ExtentId, u64)>,
        /// Number of ranges that commits may use.
        open: u64,
    },
    Orphans(Vec<ExtentId>),
    Object(Box<ObjectReply>),
    Tier(TierReply),
    Damage(DamageReply),
    Queued,
    Locked(Option<FileLock>),
    /// An answer that depends on the batch `after`, which is not durable. See [`AnswerTime`](crate::message::AnswerTime).
    Early {
        reply: Box<Result<MetaReply, FsError>>,
        after: Seq,
        /// The number of changes of this session that its owner has answered early until now. The client must have those
        /// answers before it uses this one.
        count: u64,
        /// Of a change, which counts itself.
        first: Option<FirstTime>,
    },
}

impl MetaRequest {
    /// Whether the answer may come before the change is durable, and so before that of others on which it depends: changes of
    /// names and attributes, and what reads them. Each such change writes all inodes that it reads, so that those of two
    /// sessions never depend on each other.
    pub fn may_be_early(&self) -> bool {
        use MetaRequest as R;
        matches!(
            self,
            R::Lookup { .. }
                | R::GetAttr { .. }
                | R::ReadDir { .. }
                | R::ReadLink { .. }
                | R::Make(_)
                | R::Open { .. }
                | R::SetAttr { .. }
                | R::NoteRead { .. }
                | R::Unlink { .. }
                | R::Rmdir { .. }
                | R::Rename { .. }
                | R::Link { .. }
                | R::SetXattr { .. }
                | R::GetXattr { .. }
                | R::ListXattr { .. }
                | R::RemoveXattr { .. }
                | R::GetMap { .. }
                | R::Acquire { .. }
        )
    }

    /// The directories of which it changes names.
    pub fn changed_dirs(&self) -> Vec<Ino> {
        use MetaRequest as R;
        match self {
            R::Make(make) => vec![make.parent],
            R::Unlink { parent, .. } | R::Rmdir { parent, .. } | R::Link { parent, .. } => vec![*parent],
            R::Rename { parent, new_parent, .. } => vec![*parent, *new_parent],
            _ => Vec::new(),
        }
    }

    /// The inodes and directories that a change of names or attributes names.
    pub fn inos(&self) -> Vec<Ino> {
        use MetaRequest as R;
        match self {
            R::Open { ino, .. }
            | R::SetAttr { ino, .. }
            | R::NoteRead { ino, .. }
            | R::SetXattr { ino, .. }
            | R::RemoveXattr { ino, .. } => vec![*ino],
            R::Link { ino, parent, .. } => vec![*ino, *parent],
            _ => self.changed_dirs(),
        }
    }
}

impl MetaReply {
    /// The answer, whether it came early or not.
    pub fn plain(self) -> Result<Self, FsError> {
        match self {
            Self::Early { reply, .. } => *reply,
            reply => Ok(reply),
        }
    }

    /// All attributes in the answer.
    pub fn attrs(&self) -> Vec<Attr> {
        match self {
            Self::Entry { attr, .. } | Self::Attr(attr) | Self::Punched { attr, .. } => vec![*attr],
            Self::Renamed { moved, other } => std::iter::once(*moved).chain(*other).collect(),
            Self::Object(reply) => reply.attrs(),
            _ => Vec::new(),
        }
    }
}

/// The owner of one ledger, as clients see it.
pub trait MetaService: Send + Sync {
    /// Registers a client, durably. Its events go to `events` until the session is closed.
    fn connect(&self, events: Arc<dyn EventSink>) -> BoxFuture<'_, Result<SessionId, FsError>>;

    /// Binds a session that an earlier owner registered to this owner. The same claim may be made again. After it, requests
    /// that the earlier owner did not answer are sent again under their ids.
    ///
    /// # Errors
    /// `StaleLease` if the session has ended.
    fn resume(
        &self,
        session: SessionId,
        claim: Claim,
        events: Arc<dyn EventSink>,
    ) -> BoxFuture<'_, Result<Resumed, FsError>>;

    /// The newest durable position of the ledger that this client got in an answer; from memory.
    fn position(&self) -> Option<Position>;

    /// Executes one request. Every future resolves.
    ///
    /// # Errors
    /// `Disconnected` if this is not the ledger's owner any more: its successor gets the same request under the same id.
    fn call(&self, envelope: Envelope, request: MetaRequest) -> BoxFuture<'_, Result<MetaReply, FsError>>;
}

/// Where the owner's events for a session arrive. Must not block.
pub trait EventSink: Send + Sync {
    /// Takes one event.
    fn event(&self, event: OwnerEvent);

    /// Whether the client is in another process than the owner, and may outlive it.
    fn is_elsewhere(&self) -> bool {
        false
    }
}
