//! Values of a ledger's state, byte by byte as `docs/formats/ledger.md` draws them.
//!
//! Every value begins with its format number, and may end in a tail that a newer version has written. Decoding refuses unknown
//! formats and never panics.

use base::codec::{DecodeError, Reader, Writer};
use base::{ExtentId, FsError, Ino, MapId, PgId, SessionId};
use bytes::Bytes;
use wire::guard::Guard;
use wire::meta::{Attr, Content, ExtentRef, FileKind, MapPiece, MetaReply};

mod damage;
mod objects;
mod tier;

pub use damage::LostRecord;
pub use objects::{ObjectParts, ObjectRecord, ObjectTag, ObjectTags, Part, Upload};
pub(crate) use tier::{Aged, place_of, stage_in_key};
pub use tier::{BlobRecord, LooseBlob, Residence, TierState};

/// The format number that this version writes.
const FORMAT: u8 = 1;
/// The format number of an inode with an object tag.
const FORMAT_OBJECT: u8 = 2;
/// The format number of a slot with a reply in the encoding of messages.
const FORMAT_MESSAGE: u8 = 2;

/// A value that can be stored.
pub trait Value: Sized {
    /// The bytes to store.
    fn encode(&self) -> Vec<u8>;
    /// Reads the fields that this version knows. What follows them is the tail.
    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError>;

    /// The value in stored bytes.
    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        Self::decode_with_tail(bytes).map(|(value, _)| value)
    }

    /// The value in stored bytes, and what a newer version has added to it.
    fn decode_with_tail(bytes: &[u8]) -> Result<(Self, &[u8]), DecodeError> {
        let mut r = Reader::new(bytes);
        let value = Self::read(&mut r)?;
        check_tail(r.clone())?;
        Ok((value, r.rest()))
    }
}

/// Tags from here on change the meaning of a value, so a version that does not know them refuses the value.
const TAG_ESSENTIAL: u8 = 128;

/// Checks the tail of a value: entries of tag u8, length u16 and bytes, in ascending order of their tags. This version knows
/// no tag.
fn check_tail(mut r: Reader<'_>) -> Result<(), DecodeError> {
    let mut last = 0;
    while !r.rest().is_empty() {
        let tag = r.u8("tag")?;
        if tag <= last || tag >= TAG_ESSENTIAL {
            return Err(DecodeError { field: "tag" });
        }
        let len = r.u16("tag length")?;
        r.bytes(usize::from(len), "tag bytes")?;
        last = tag;
    }
    Ok(())
}

fn start() -> Writer {
    let mut writer = Writer::new();
    writer.u8(FORMAT);
    writer
}

fn expect_format(r: &mut Reader<'_>, what: &'static str) -> Result<(), DecodeError> {
    if r.u8(what)? == FORMAT { Ok(()) } else { Err(DecodeError { field: what }) }
}

fn kind_code(kind: FileKind) -> u8 {
    match kind {
        FileKind::Regular => 1,
        FileKind::Directory => 2,
        FileKind::Symlink => 3,
        FileKind::Fifo => 4,
        FileKind::Socket => 5,
        FileKind::CharDevice => 6,
        FileKind::BlockDevice => 7,
    }
}

fn kind_of(code: u8) -> Result<FileKind, DecodeError> {
    Ok(match code {
        1 => FileKind::Regular,
        2 => FileKind::Directory,
        3 => FileKind::Symlink,
        4 => FileKind::Fifo,
        5 => FileKind::Socket,
        6 => FileKind::CharDevice,
        7 => FileKind::BlockDevice,
        _ => return Err(DecodeError { field: "kind" }),
    })
}

/// The part of a map that holds a range of a file. A regular file has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapSegment {
    /// First byte in the file.
    pub file_off: u64,
    /// Length in bytes.
    pub len: u64,
    /// The map.
    pub map: MapId,
    /// Start of the range in the map.
    pub map_off: u64,
}

/// Table I: an inode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inode {
    /// The attributes of `stat`.
    pub attr: Attr,
    /// Bit 0: see [`Inode::IMPLICIT`]. As stored, the guard is in bits 1 and 2.
    pub flags: u16,
    /// User, group and project quota; 0 is none.
    pub quotas: [u32; 3],
    /// Tier policy; 0 is the filesystem's.
    pub tier_policy: u32,
    /// For a directory, its parent. For any other inode, the directory in which it was made or to which it was last
    /// moved, which may be gone; 0 if it never had a name.
    pub parent: Ino,
    /// The next readdir cookie of a directory.
    pub next_cookie: u64,
    /// The maps of the content.
    pub segments: Vec<MapSegment>,
    /// The target of a symbolic link.
    pub target: Bytes,
    /// The tag of an object that was put as one. A directory with a tag is a directory object.
    pub object: Option<ObjectTag>,
}

impl Inode {
    /// Flag of a directory that exists only because keys below it do, and goes with the last of them. It is never
    /// empty.
    pub const IMPLICIT: u16 = 1;
    const APPEND_ONLY: u16 = 2;
    const IMMUTABLE: u16 = 4;

    fn stored_flags(&self) -> u16 {
        let Guard { append_only, immutable } = self.attr.guard;
        let bit = |is_set, bit| if is_set { bit } else { 0 };
        self.flags | bit(append_only, Self::APPEND_ONLY) | bit(immutable, Self::IMMUTABLE)
    }

    /// Whether this is a directory that goes with the last key below it.
    pub fn is_implicit(&self) -> bool {
        self.flags & Self::IMPLICIT != 0
    }

    /// Files with the same value lie together in an object store: the directory in which this inode was made or to
    /// which it was last moved, or the inode itself if it never had a name.
    pub fn packed_with(&self) -> Ino {
        if self.parent == Ino(0) { self.attr.ino } else { self.parent }
    }

    /// The map of the content, if there is any.
    pub fn map(&self) -> Option<MapId> {
        self.segments.first().map(|segment| segment.map)
    }
}

impl Value for Inode {
    fn encode(&self) -> Vec<u8> {
        let attr = &self.attr;
        let mut w = Writer::new();
        w.u8(if self.object.is_some() { FORMAT_OBJECT } else { FORMAT });
        w.u8(kind_code(attr.kind)).u16(self.stored_flags()).u64(attr.ino.0);
        w.u32(attr.mode).u32(attr.uid).u32(attr.gid).u32(attr.nlink).u32(attr.rdev);
        w.u64(attr.size).u64(attr.stored_bytes);
        w.i64(attr.atime_ns).i64(attr.mtime_ns).i64(attr.ctime_ns).i64(attr.btime_ns);
        w.u64(attr.data_ver).u64(attr.attr_ver);
        w.u32(self.quotas[0]).u32(self.quotas[1]).u32(self.quotas[2]).u32(self.tier_policy);
        w.u64(self.parent.0).u64(self.next_cookie);
        w.u16(u16::try_from(self.segments.len()).expect("an inode has at most 10,000 segments"));
        for segment in &self.segments {
            w.u64(segment.file_off).u64(segment.len).u64(segment.map.0).u64(segment.map_off);
        }
        w.blob(&self.target);
        if let Some(object) = &self.object {
            object.write(&mut w);
        }
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let format = r.u8("inode format")?;
        if !matches!(format, FORMAT | FORMAT_OBJECT) {
            return Err(DecodeError { field: "inode format" });
        }
        let kind = kind_of(r.u8("kind")?)?;
        let stored = r.u16("flags")?;
        let flags = stored & !(Self::APPEND_ONLY | Self::IMMUTABLE);
        let attr = Attr {
            ino: Ino(r.u64("ino")?),
            kind,
            mode: r.u32("mode")?,
            uid: r.u32("uid")?,
            gid: r.u32("gid")?,
            nlink: r.u32("nlink")?,
            rdev: r.u32("rdev")?,
            size: r.u64("size")?,
            stored_bytes: r.u64("stored_bytes")?,
            atime_ns: r.i64("atime")?,
            mtime_ns: r.i64("mtime")?,
            ctime_ns: r.i64("ctime")?,
            btime_ns: r.i64("btime")?,
            data_ver: r.u64("data_ver")?,
            attr_ver: r.u64("attr_ver")?,
            guard: Guard {
                append_only: stored & Self::APPEND_ONLY != 0,
                immutable: stored & Self::IMMUTABLE != 0,
            },
        };
        let quotas = [r.u32("quota")?, r.u32("quota")?, r.u32("quota")?];
        let tier_policy = r.u32("tier_policy")?;
        let parent = Ino(r.u64("parent")?);
        let next_cookie = r.u64("next_cookie")?;
        let count = r.u16("segments")?;
        let segments = (0..count)
            .map(|_| {
                Ok(MapSegment {
                    file_off: r.u64("segment")?,
                    len: r.u64("segment")?,
                    map: MapId(r.u64("segment")?),
                    map_off: r.u64("segment")?,
                })
            })
            .collect::<Result<_, DecodeError>>()?;
        let target = Bytes::copy_from_slice(r.blob("target")?);
        let object = if format == FORMAT_OBJECT { Some(ObjectTag::read(r)?) } else { None };
        Ok(Self { attr, flags, quotas, tier_policy, parent, next_cookie, segments, target, object })
    }
}

/// Table D: a directory entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dentry {
    /// The inode of the name.
    pub ino: Ino,
    /// The kind of that inode.
    pub kind: FileKind,
    /// Its readdir cookie.
    pub cookie: u64,
}

impl Value for Dentry {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        w.u8(kind_code(self.kind)).u64(self.ino.0).u64(self.cookie);
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "dentry format")?;
        let kind = kind_of(r.u8("kind")?)?;
        Ok(Self { ino: Ino(r.u64("ino")?), kind, cookie: r.u64("cookie")? })
    }
}

/// Table M: a piece of a map. Its offset is in the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Length in bytes.
    pub len: u64,
    /// The layer it was written in.
    pub birth_layer: u32,
    /// Its content.
    pub content: PieceContent,
}

/// The content of a piece of a map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PieceContent {
    /// Bytes, inline or of an extent.
    Data(Content),
    /// A range of another map; no other piece refers to it. Only in composed maps.
    Map {
        /// The other map.
        map: MapId,
        /// Start of the range in that map.
        off: u64,
    },
}

/// Maps whose number has this bit are composed: their pieces may be ranges of other maps.
pub const COMPOSED_MAP: u64 = 1 << 63;

const PIECE_INLINE: u8 = 1;
const PIECE_EXTENT: u8 = 2;
const PIECE_MAP: u8 = 3;

impl Piece {
    /// The piece at offset `off` of its map, if it has bytes of its own.
    pub fn at(self, off: u64) -> Option<MapPiece> {
        match self.content {
            PieceContent::Data(content) => Some(MapPiece { off, len: self.len, content }),
            PieceContent::Map { .. } => None,
        }
    }

    /// The stored form of a piece.
    pub fn of(piece: &MapPiece) -> Self {
        let content = PieceContent::Data(piece.stored().content);
        Self { len: piece.len, birth_layer: crate::keys::LIVE_LAYER, content }
    }

    /// The stored form of a range of another map.
    pub fn of_map(map: MapId, off: u64, len: u64) -> Self {
        Self { len, birth_layer: crate::keys::LIVE_LAYER, content: PieceContent::Map { map, off } }
    }
}

impl Value for Piece {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        match &self.content {
            PieceContent::Data(Content::Inline(bytes)) => {
                w.u8(PIECE_INLINE).u64(self.len).u32(self.birth_layer).blob(bytes);
            }
            PieceContent::Map { map, off } => {
                w.u8(PIECE_MAP).u64(self.len).u32(self.birth_layer).u64(map.0).u64(*off);
            }
            PieceContent::Data(Content::Extent(extent) | Content::Tiered(extent, _)) => {
                w.u8(PIECE_EXTENT).u64(self.len).u32(self.birth_layer);
                w.u64(extent.id.0).u32(extent.pg.0).u8(extent.k).u8(extent.n);
                w.u32(extent.extent_len).u32(extent.extent_off);
            }
        }
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "piece format")?;
        let kind = r.u8("piece kind")?;
        let len = r.u64("len")?;
        let birth_layer = r.u32("birth_layer")?;
        let content = match kind {
            PIECE_INLINE => {
                let bytes = r.blob("inline")?;
                if bytes.len() as u64 != len {
                    return Err(DecodeError { field: "inline length" });
                }
                PieceContent::Data(Content::Inline(Bytes::copy_from_slice(bytes)))
            }
            PIECE_EXTENT => {
                let extent = ExtentRef {
                    id: ExtentId(r.u64("extent")?),
                    pg: PgId(r.u32("pg")?),
                    k: r.u8("k")?,
                    n: r.u8("n")?,
                    extent_len: r.u32("extent_len")?,
                    extent_off: r.u32("extent_off")?,
                };
                let end = u64::from(extent.extent_off).checked_add(len);
                let inside = end.is_some_and(|end| end <= u64::from(extent.extent_len));
                if !inside || extent.k == 0 || extent.n < extent.k || extent.n > layout::SHARDS_MAX {
                    return Err(DecodeError { field: "extent shape" });
                }
                PieceContent::Data(Content::Extent(extent))
            }
            PIECE_MAP => {
                let (map, off) = (MapId(r.u64("map")?), r.u64("map offset")?);
                if map.0 & COMPOSED_MAP != 0 || off.checked_add(len).is_none() {
                    return Err(DecodeError { field: "map range" });
                }
                PieceContent::Map { map, off }
            }
            _ => return Err(DecodeError { field: "piece kind" }),
        };
        Ok(Self { len, birth_layer, content })
    }
}

/// Table E: the use of an extent, unless exactly one piece refers to it as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExtentUse {
    /// Number of pieces that refer to it.
    pub refs: u32,
    /// Sum of their lengths.
    pub live_bytes: u64,
}

impl Value for ExtentUse {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        w.u32(self.refs).u64(self.live_bytes);
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "extent format")?;
        Ok(Self { refs: r.u32("refs")?, live_bytes: r.u64("live_bytes")? })
    }
}

/// Table R: a range of extent ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdRange {
    /// The session that may commit ids of the range.
    pub session: SessionId,
    /// Number of ids.
    pub count: u64,
    /// Whether commits with its ids are still accepted.
    pub open: RangeState,
}

/// Whether a range of extent ids may still be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeState {
    /// The range's session may commit ids of it.
    Open,
    /// No commit may name its ids any more; extents without a reference are garbage.
    Closed,
}

impl Value for IdRange {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        w.u64(self.session.0).u64(self.count).u8(u8::from(self.open == RangeState::Open));
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "range format")?;
        let session = SessionId(r.u64("session")?);
        let count = r.u64("count")?;
        let open = match r.u8("open")? {
            0 => RangeState::Closed,
            1 => RangeState::Open,
            _ => return Err(DecodeError { field: "open" }),
        };
        Ok(Self { session, count, open })
    }
}

/// Tables F and W: where the shards of an extent lie. In F `shard` is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExtentPlace {
    /// The placement group.
    pub pg: PgId,
    /// Number of all shards.
    pub n: u8,
    /// Number of data shards.
    pub k: u8,
    /// In W, index of the owed shard.
    pub shard: u8,
    /// Length of the extent in bytes; 0 in F.
    pub extent_len: u32,
}

impl Value for ExtentPlace {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        w.u32(self.pg.0).u8(self.n).u8(self.k).u8(self.shard).u32(self.extent_len);
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "place format")?;
        Self::read_fields(r)
    }
}

impl ExtentPlace {
    /// What follows the format number.
    fn read_fields(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            pg: PgId(r.u32("pg")?),
            n: r.u8("n")?,
            k: r.u8("k")?,
            shard: r.u8("shard")?,
            extent_len: r.u32("extent_len")?,
        })
    }
}

/// Table U: the last request in a session's slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// The last request executed in this slot.
    pub seq: u64,
    /// Its reply in the encoding of messages. `None`: an earlier version wrote it in another encoding.
    pub reply: Option<Vec<u8>>,
}

impl Slot {
    /// The last request, and its reply.
    pub fn new(seq: u64, reply: &MetaReply) -> Self {
        Self { seq, reply: Some(wire::encoding::encode(reply)) }
    }

    /// The reply.
    ///
    /// # Errors
    /// `Unknown` if an earlier version wrote it. `Io` if it is damaged.
    pub fn reply(&self) -> Result<MetaReply, FsError> {
        let bytes = self.reply.as_ref().ok_or(FsError::Unknown)?;
        wire::encoding::decode(bytes).map_err(|error| {
            tracing::error!(%error, "reply that is kept for a session is damaged");
            FsError::Io
        })
    }
}

impl Value for Slot {
    fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u8(if self.reply.is_some() { FORMAT_MESSAGE } else { FORMAT });
        w.u64(self.seq).blob(self.reply.as_deref().unwrap_or_default());
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let format = r.u8("slot format")?;
        if !matches!(format, FORMAT | FORMAT_MESSAGE) {
            return Err(DecodeError { field: "slot format" });
        }
        let (seq, reply) = (r.u64("seq")?, r.blob("reply")?);
        Ok(Self { seq, reply: (format == FORMAT_MESSAGE).then(|| reply.to_vec()) })
    }
}

/// The format number of a session that was silent for its term. A version that does not know it must not be the owner: it would
/// prolong the term, and leave the mark.
const FORMAT_SILENT: u8 = 2;
/// The format numbers of a session whose client is in another process than the owner. A version that does not know them would end it.
const FORMAT_ELSEWHERE: u8 = 3;
const FORMAT_ELSEWHERE_SILENT: u8 = 4;

/// Table C: a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionRecord {
    /// When it began, nanoseconds since 1970.
    pub began_ns: u64,
    /// An owner heard nothing of it for its term: the next owner does not wait for it. Its client gets no answer before the mark is
    /// gone, so it uses nothing that it was granted.
    pub is_silent: bool,
    /// Its client is in another process than the owner, and may outlive it.
    pub is_elsewhere: bool,
}

impl Value for SessionRecord {
    fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        let format = match (self.is_elsewhere, self.is_silent) {
            (false, false) => FORMAT,
            (false, true) => FORMAT_SILENT,
            (true, false) => FORMAT_ELSEWHERE,
            (true, true) => FORMAT_ELSEWHERE_SILENT,
        };
        w.u8(format).u64(self.began_ns);
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let format = r.u8("session format")?;
        let (is_elsewhere, is_silent) = match format {
            FORMAT => (false, false),
            FORMAT_SILENT => (false, true),
            FORMAT_ELSEWHERE => (true, false),
            FORMAT_ELSEWHERE_SILENT => (true, true),
            _ => return Err(DecodeError { field: "session format" }),
        };
        Ok(Self { began_ns: r.u64("session")?, is_silent, is_elsewhere })
    }
}

/// The format number of an orphan that may get a name. A version that does not know it could not keep the mark.
const FORMAT_NAMEABLE: u8 = 2;

/// Table O: the sessions that have an inode without a name open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Orphan {
    /// Never empty.
    pub sessions: Vec<SessionId>,
    /// It never had a name, and may get one (O_TMPFILE).
    pub may_be_named: bool,
}

impl Value for Orphan {
    fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u8(if self.may_be_named { FORMAT_NAMEABLE } else { FORMAT });
        w.u32(u32::try_from(self.sessions.len()).expect("sessions are bounded far below 2^32"));
        for session in &self.sessions {
            w.u64(session.0);
        }
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let format = r.u8("orphan format")?;
        if !matches!(format, FORMAT | FORMAT_NAMEABLE) {
            return Err(DecodeError { field: "orphan format" });
        }
        let count = r.u32("count")?;
        let sessions = (0..count).map(|_| r.u64("session").map(SessionId)).collect::<Result<_, _>>()?;
        Ok(Self { sessions, may_be_named: format == FORMAT_NAMEABLE })
    }
}

/// Table V, `usage`: sums over all inodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes of content, before redundancy.
    pub stored_bytes: u64,
    /// Number of inodes.
    pub inodes: u64,
}

impl Value for Usage {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        w.u64(self.stored_bytes).u64(self.inodes);
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "usage format")?;
        Ok(Self { stored_bytes: r.u64("stored_bytes")?, inodes: r.u64("inodes")? })
    }
}

impl Value for u64 {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        w.u64(*self);
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "number format")?;
        let value = r.u64("number")?;
        Ok(value)
    }
}

#[cfg(test)]
mod tests;
