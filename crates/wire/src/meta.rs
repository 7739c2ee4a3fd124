//! What the owner of a ledger is asked: names, attributes, maps of files, and leases on them.
//!
//! Every request that changes something is one batch in the ledger's log and is durable when the reply
//! arrives. A request carries `(session, slot, seq)`; sent again, it has no second effect.

use std::sync::Arc;
use std::time::Duration;

use base::{DriveId, ExtentId, FsError, Ino, LeaseId, MapId, PgId, SessionId, ShardIndex};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::BoxFuture;
use crate::damage::{DamageReply, DamageRequest};
use crate::guard::Guard;
use crate::object::{ObjectReply, ObjectRequest};
use crate::position::Position;
use crate::tier::{BlobPlace, TierReply, TierRequest};

pub use crate::moves::{MapEntry, PACK_MOVES_MAX, PackMove, PiecePosition, REHYDRATED_MAX, Rehydrated};

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
/// How long a cache above a client may keep what an answer said of a name, or attributes, unless it is told earlier.
pub const NAME_TERM: Duration = Duration::from_secs(10);
/// An answer that is older than this when it arrives lets no cache keep the names in it.
pub const ANSWER_AGE_MAX: Duration = Duration::from_secs(2);
/// Extent ids handed to a session at a time.
pub const EXTENT_RANGE_IDS: u64 = 1 << 16;

/// What an inode is.
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

/// Everything `stat` tells, and the versions that caches are checked against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attr {
    /// Stable for the life of the file, never reused.
    pub ino: Ino,
    /// What it is.
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
    /// What it is protected from.
    pub guard: Guard,
}

/// A directory entry with the attributes of what it names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirEntry {
    /// The name, 1 to 255 bytes.
    pub name: Bytes,
    /// Position for `telldir`: unique in the directory, never reused.
    pub cookie: u64,
    /// What it names.
    pub attr: Attr,
    /// The lease on that, unless somebody holds it exclusively.
    pub lease: Option<LeaseGrant>,
}

/// An extent as a map refers to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentRef {
    /// Which.
    pub id: ExtentId,
    /// Where its shards lie.
    pub pg: PgId,
    /// Data shards.
    pub k: u8,
    /// All shards.
    pub n: u8,
    /// Bytes of the whole extent.
    pub extent_len: u32,
    /// Where the piece begins inside the extent.
    pub extent_off: u32,
}

/// The content of a piece of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// The bytes themselves.
    Inline(Bytes),
    /// Bytes of an extent on drives.
    Extent(ExtentRef),
    /// Bytes of an extent that only a blob has. Maps do not say so: the owner adds it to its answers.
    Tiered(ExtentRef, BlobPlace),
}

impl Content {
    /// The extent, wherever it lies.
    pub fn extent(&self) -> Option<&ExtentRef> {
        match self {
            Self::Inline(_) => None,
            Self::Extent(extent) | Self::Tiered(extent, _) => Some(extent),
        }
    }
}

/// A piece of a file's map. Gaps between pieces are holes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapPiece {
    /// File offset in bytes.
    pub off: u64,
    /// Length in bytes, at least 1.
    pub len: u64,
    /// What is there.
    pub content: Content,
}

impl MapPiece {
    /// The first byte after the piece.
    pub fn end(&self) -> u64 {
        self.off + self.len
    }

    /// The part of this piece inside `[from, to)`, if any.
    pub fn clip(&self, from: u64, to: u64) -> Option<MapPiece> {
        let (off, end) = (self.off.max(from), self.end().min(to));
        if off >= end {
            return None;
        }
        let skip = off - self.off;
        let content = match &self.content {
            Content::Inline(bytes) => Content::Inline(bytes.slice(skip as usize..(end - self.off) as usize)),
            Content::Extent(extent) => {
                Content::Extent(ExtentRef { extent_off: extent.extent_off + skip as u32, ..*extent })
            }
            Content::Tiered(extent, place) => {
                Content::Tiered(ExtentRef { extent_off: extent.extent_off + skip as u32, ..*extent }, *place)
            }
        };
        Some(MapPiece { off, len: end - off, content })
    }

    /// The piece as maps have it: they do not say where an extent lies.
    pub fn stored(&self) -> MapPiece {
        match &self.content {
            Content::Tiered(extent, _) => MapPiece { content: Content::Extent(*extent), ..*self },
            _ => self.clone(),
        }
    }
}

/// New content for a range of a file, durable on drives or inline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitPiece {
    /// Where and what.
    pub piece: MapPiece,
    /// Shards that were not stored; the commit records them so that repair pays them.
    pub owed: Vec<OwedShard>,
}

/// A shard that a commit went ahead without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwedShard {
    /// Which of the extent's shards.
    pub shard: ShardIndex,
    /// The drive that should hold it.
    pub drive: DriveId,
}

/// A shard that is owed, as the ledger keeps it: all that repair needs to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct OwedEntry {
    /// The drive that should have got it.
    pub drive: DriveId,
    /// The extent.
    pub id: ExtentId,
    /// Where its shards lie.
    pub pg: PgId,
    /// Which of them is owed.
    pub shard: ShardIndex,
    /// Data shards.
    pub k: u8,
    /// All shards.
    pub n: u8,
    /// Bytes of the whole extent.
    pub extent_len: u32,
}

/// What a client may cache and do on an inode. Each kind includes the ones before it, except `Shared`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LeaseKind {
    /// Attributes.
    Attr,
    /// Attributes, content and map.
    Read,
    /// Writers share it: nothing is cached, every write is committed at once.
    Shared,
    /// Nobody else has any: dirty data, size and mtime are the holder's.
    Exclusive,
}

/// A lease that the owner gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseGrant {
    /// On what.
    pub ino: Ino,
    /// Names this grant in commits and releases.
    pub id: LeaseId,
    /// What it allows.
    pub kind: LeaseKind,
    /// Grows with every answer that carried the grant. A release of an older one is ignored: it crossed with
    /// a newer answer.
    pub seq: u64,
}

/// What the owner tells a session on its own account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OwnerEvent {
    /// Give the lease back, down to `keep`, after flushing what it covers. Answer with
    /// [`MetaRequest::Release`].
    Recall {
        /// The grant.
        lease: LeaseGrant,
        /// What may be kept.
        keep: Option<LeaseKind>,
    },
    /// The name is about to come, go or mean something else: make caches above forget it, also that it is missing.
    /// Answer with [`MetaRequest::Forgot`].
    Forget {
        /// The directory.
        dir: Ino,
        /// The name in it.
        name: Bytes,
        /// Names this event in the answer.
        number: u64,
    },
    /// The lease was taken away: what was cached or dirty under it is void.
    Revoked {
        /// The grant.
        lease: LeaseGrant,
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
    /// When the change was made, by the holder of the exclusive lease. Without it the owner makes the change, now.
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

/// Whether and how an inode is opened in the same step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpenIntent {
    /// It is not.
    None,
    /// For reading.
    Read,
    /// For writing.
    Write,
    /// For writing, cut to nothing first.
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

/// The character device 0/0 that hides a name of a lower layer of an overlay.
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

/// Makes a retry recognisable: a slot holds one request at a time, numbered by `seq`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RequestId {
    /// Who asks.
    pub session: SessionId,
    /// Which of its slots.
    pub slot: u32,
    /// Grows by one with each new request in the slot.
    pub seq: u64,
}

/// A request to the owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are the arguments of the POSIX calls they are named after")]
pub enum MetaRequest {
    /// Ends a session: leases, opens and id ranges of it are gone.
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
    /// The last handles of this session on these inodes are gone.
    Close {
        inos: Vec<Ino>,
    },
    /// Answer: `Attr`. Cutting a file of very many pieces may stop early: the size in the answer says where.
    SetAttr {
        ino: Ino,
        set: SetAttr,
    },
    /// Protects an inode, or does so no more. Answer: `Attr`.
    SetGuard {
        ino: Ino,
        guard: Guard,
    },
    /// A read moved the access time. That is no change: `ctime` stays. Answer: `Attr`.
    NoteRead {
        ino: Ino,
        atime_ns: i64,
    },
    /// Answer: `Attr` of what lost its name.
    Unlink {
        parent: Ino,
        name: Bytes,
    },
    /// Answer: `Attr` of what is gone.
    Rmdir {
        parent: Ino,
        name: Bytes,
    },
    /// Answer: `Renamed`. Under the old name may stay a whiteout, made in the same step.
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
    /// Puts new content in place, which was written at `mtime_ns`. The size grows to at least `size`; then the
    /// attributes in `set` change, which must not be the size. Answer: `Attr`.
    Commit {
        ino: Ino,
        lease: LeaseId,
        pieces: Vec<CommitPiece>,
        size: u64,
        mtime_ns: i64,
        set: SetAttr,
    },
    /// Turns `[off, off + len)` into a hole; the size stays. Answer: `Punched`, which may stop early.
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
    /// Gives leases back altogether that nobody asked for.
    ReleaseAll {
        leases: Vec<LeaseGrant>,
    },
    /// Caches above the client do not have these names in `dir` any more, each with the number of the event that asked.
    Forgot {
        dir: Ino,
        names: Vec<(Bytes, u64)>,
    },
    /// Extents that nothing refers to and no reader uses, beyond the one given. Answer: `Free`.
    NextFree {
        after: Option<(u64, ExtentId)>,
        limit: u32,
    },
    /// Their shards are gone from all drives, and with them what these drives are owed.
    Freed {
        extents: Vec<FreeExtent>,
        drives: Vec<DriveId>,
    },
    /// Shards that commits went ahead without and that nobody has repaired, beyond the one given. Answer: `Owed`.
    Owed {
        after: Option<(DriveId, ExtentId)>,
        limit: u32,
    },
    /// These shards are stored, durably, and no longer owed. Answer: `NotOwed`, those that were not owed any more
    /// when this arrived: their extents are gone, so what was stored of them is garbage.
    Repaired {
        shards: Vec<(DriveId, ExtentId)>,
    },
    /// Does a bounded part of the clean-up of unlinked files. Answer: `Purged`.
    PurgeStep,
    /// Pieces of all maps beyond the one given, in order, at most `limit`. Answer: `Scan`.
    ScanMap {
        after: Option<PiecePosition>,
        limit: u32,
    },
    /// Lets pieces refer to a new extent that holds the same bytes, each only if it still is what `moves` says.
    /// The extent must be new: nothing ever referred to it. Answer: `Repacked`.
    Repack {
        extent: ExtentRef,
        owed: Vec<OwedShard>,
        moves: Vec<PackMove>,
    },
    /// Ranges of extent ids that are not forgotten. Answer: `Ranges`.
    ExtentRanges,
    /// Has these ranges of ids looked at again for orphans, as far as no session may take ids from them: each the first id
    /// and how many.
    RecheckRanges {
        ranges: Vec<(ExtentId, u64)>,
    },
    /// Whether drives may hold what only a newer ledger refers to. While that is so, no range counts as closed.
    Doubt {
        in_doubt: bool,
    },
    /// Which of these extents nothing refers to, given that a whole scan of all maps, begun after their ranges
    /// were closed, did not see them. Answer: `Orphans`.
    ConfirmOrphans {
        ids: Vec<ExtentId>,
    },
    /// No drive holds a shard of a closed range that nothing refers to: the range is forgotten.
    RangeVerified {
        first: ExtentId,
    },
    /// Answer: `Object`.
    Object(Box<ObjectRequest>),
    /// Lets pieces of files, each if it still is what was read, refer to new extents that hold the same bytes, which were
    /// fetched from blobs; at most [`REHYDRATED_MAX`]. Answer: `Rehydrated`.
    Rehydrate(Vec<Rehydrated>),
    /// Answer: `Tier`.
    Tier(TierRequest),
    /// Answer: `Damage`.
    Damage(DamageRequest),
}

/// Where a directory listing goes on: after this name.
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
    /// Which.
    pub id: ExtentId,
    /// Where.
    pub pg: PgId,
    /// All shards.
    pub n: u8,
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the variants are named by the requests they answer")]
pub enum MetaReply {
    Done,
    /// What a name or inode is, and the lease that came with it. `keep`: caches above may keep the name.
    Entry {
        attr: Attr,
        lease: Option<LeaseGrant>,
        keep: bool,
    },
    /// There is no such name. `keep`: caches above may keep that.
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
    /// What was moved, and what was replaced or exchanged with it.
    Renamed {
        moved: Attr,
        other: Option<Attr>,
    },
    /// `end`: there are no pieces after these.
    Map {
        pieces: Vec<MapPiece>,
        end: bool,
    },
    /// Everything below `next_off` is done; ask again from there if that is not the end of the range.
    Punched {
        attr: Attr,
        next_off: u64,
    },
    /// `version`: the newest batch that is durable. `used_bytes`: content of the filesystem. `drive_bytes`: what of it is
    /// on drives, whole extents where it tiers.
    Beat {
        version: u64,
        used_bytes: u64,
        drive_bytes: u64,
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
    /// `withheld`: there are more, which become free once they are durable and running reads have ended.
    Free {
        extents: Vec<FreeExtent>,
        withheld: bool,
    },
    Owed(Vec<OwedEntry>),
    NotOwed(Vec<(DriveId, ExtentId)>),
    Purged {
        more: bool,
    },
    /// `next`: where to go on, if there may be more.
    Scan {
        entries: Vec<MapEntry>,
        next: Option<PiecePosition>,
    },
    /// Bytes of the moves that were done; if none, the extent is garbage.
    Repacked {
        moved_bytes: u64,
    },
    /// For each piece whether it refers to its new extent now; if not, that is garbage.
    Rehydrated {
        moved: Vec<bool>,
    },
    Ranges {
        /// The first id and the length of those that no commit may use any more and that nobody has verified yet.
        closed: Vec<(ExtentId, u64)>,
        /// How many commits may use.
        open: u64,
    },
    Orphans(Vec<ExtentId>),
    Object(Box<ObjectReply>),
    Tier(TierReply),
    Damage(DamageReply),
}

/// The owner of one ledger as its clients see it.
pub trait MetaService: Send + Sync {
    /// Registers a client, durably. Its events go to `events` until the session is closed.
    fn connect(&self, events: Arc<dyn EventSink>) -> BoxFuture<'_, Result<SessionId, FsError>>;

    /// The newest position of the ledger that an answer told this client, durable; from memory.
    fn position(&self) -> Option<Position>;

    /// Executes one request. Every future resolves.
    fn call(&self, id: RequestId, request: MetaRequest) -> BoxFuture<'_, Result<MetaReply, FsError>>;
}

/// Where the owner's events for a session arrive. Must not block.
pub trait EventSink: Send + Sync {
    /// Takes one event.
    fn event(&self, event: OwnerEvent);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clipped_piece_keeps_pointing_at_the_same_bytes() {
        let extent =
            ExtentRef { id: ExtentId(1), pg: PgId(2), k: 4, n: 6, extent_len: 1000, extent_off: 100 };
        let piece = MapPiece { off: 5000, len: 500, content: Content::Extent(extent) };
        let clipped = piece.clip(5100, 9999).unwrap();
        assert_eq!((clipped.off, clipped.len), (5100, 400));
        assert_eq!(clipped.content, Content::Extent(ExtentRef { extent_off: 200, ..extent }));
        assert_eq!(piece.clip(5500, 6000), None);
        let inline = MapPiece { off: 10, len: 4, content: Content::Inline(Bytes::from_static(b"abcd")) };
        assert_eq!(inline.clip(11, 13).unwrap().content, Content::Inline(Bytes::from_static(b"bc")));
    }
}
