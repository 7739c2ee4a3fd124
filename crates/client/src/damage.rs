//! Damage: it is remembered until upkeep has examined it, and the owner is told of losses.
//!
//! A failed read is only a suspicion, because drives and stores may be away. [`Client::examine`] decides by proof:
//! every drive that may have a shard has answered, or the store has answered more than once.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use base::units::BLOCK_BYTES;
use base::{DriveId, ExtentId, FsError, Ino, MapId, ShardIndex};
use bytes::{Bytes, BytesMut};
use wire::damage::{DamageReply, DamageRequest, DamageSums, LossCause, LostPiece, NamePosition, NameSearch};
use wire::drive::GetPurpose;
use wire::meta::{Content, ExtentRef, MapPiece, MetaReply, MetaRequest, OwedEntry, PiecePosition};
use wire::tier::BlobPlace;

use crate::Client;
use crate::extents::ReadExtentError;

/// Damaged shards that are remembered. Reads and the scrub find further ones again.
const SHARDS_MAX: usize = 4096;
/// Extents under suspicion that are remembered.
const SUSPECTS_MAX: usize = 16_384;
/// How often a blob is looked for before it counts as missing: a single answer may be wrong.
const LOOKS: u32 = 4;
const LOOK_PAUSE: Duration = Duration::from_millis(200);
/// A piece that has not been read by then cannot be decided.
const PATIENCE: Duration = Duration::from_secs(30);
const PAGE: u32 = 1024;

/// The flaw of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    /// Its bytes do not match their checksums.
    Damaged,
    /// Its drive does not have it: it may be owed, or the extent deleted.
    Missing,
}

/// An extent of a failed read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suspect {
    /// The whole extent, on drives or in a blob.
    pub content: Content,
    /// The file and the offset of the read, if known.
    pub at: Option<(Ino, u64)>,
}

/// The result of an examination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Every byte was read and verified.
    Readable,
    /// It cannot be read, and no drive or store that is away could help.
    Lost(LossCause),
    /// It cannot be decided now.
    Unknown,
}

/// Damage that clients of a filesystem have met and that is not examined yet.
#[derive(Debug, Default)]
pub(crate) struct DamageBook(Mutex<Found>);

#[derive(Debug, Default)]
struct Found {
    shards: BTreeMap<(ExtentId, ShardIndex), (ExtentRef, Flaw)>,
    suspects: BTreeMap<ExtentId, Suspect>,
    repaired: u64,
}

impl DamageBook {
    fn lock(&self) -> MutexGuard<'_, Found> {
        self.0.lock().expect("no holder of this lock panics")
    }

    pub(crate) fn note(&self, extent: &ExtentRef, shard: ShardIndex, flaw: Flaw) {
        let mut found = self.lock();
        if found.shards.len() < SHARDS_MAX {
            let (_, known) = found.shards.entry((extent.id, shard)).or_insert((*extent, flaw));
            if flaw == Flaw::Damaged {
                *known = flaw;
            }
        }
    }

    pub(crate) fn suspect(&self, content: &Content, at: Option<(Ino, u64)>) {
        let Some(extent) = content.extent() else { return };
        let mut found = self.lock();
        if found.suspects.len() < SUSPECTS_MAX || found.suspects.contains_key(&extent.id) {
            let whole = ExtentRef { extent_off: 0, ..*extent };
            let content = match content {
                Content::Tiered(_, place) => Content::Tiered(whole, *place),
                _ => Content::Extent(whole),
            };
            let suspect = found.suspects.entry(extent.id).or_insert(Suspect { content, at });
            suspect.at = at.or(suspect.at);
        }
    }
}

impl Client {
    /// Shards that reads of any client of the filesystem found damaged or missing since the last call, without those
    /// whose drives accept no shards now.
    pub fn take_damaged(&self) -> Vec<(OwedEntry, Flaw)> {
        let topology = self.inner.extents.topology();
        let met = std::mem::take(&mut self.inner.peers.0.damage.lock().shards);
        let entry = |((id, shard), (extent, flaw)): (_, (ExtentRef, Flaw))| {
            let drive = topology.holders(extent.pg, shard).next()?;
            let ExtentRef { pg, k, n, extent_len, .. } = extent;
            let entry = OwedEntry { drive, id, pg, shard, k, n, extent_len };
            topology.usable(drive).map(|_| (entry, flaw))
        };
        met.into_iter().filter_map(entry).collect()
    }

    /// Forgets a shard that was found damaged or missing: it is stored again. The repair of one shard of an extent also
    /// meets the others that are damaged.
    pub fn forget_damaged(&self, entry: &OwedEntry) {
        self.inner.peers.0.damage.lock().shards.remove(&(entry.id, entry.shard));
    }

    /// Whether no more damaged shards can be remembered.
    pub fn is_full_of_damage(&self) -> bool {
        self.inner.peers.0.damage.lock().shards.len() >= SHARDS_MAX
    }

    /// Adds to the number of restored shards.
    pub fn count_repaired(&self, shards: u64) {
        self.inner.peers.0.damage.lock().repaired += shards;
    }

    /// The number of shards restored since the last call.
    pub fn take_repaired(&self) -> u64 {
        std::mem::take(&mut self.inner.peers.0.damage.lock().repaired)
    }

    /// Notes that a shard of this extent could not be restored.
    pub fn suspect_shard(&self, entry: &OwedEntry) {
        let OwedEntry { id, pg, k, n, extent_len, .. } = *entry;
        self.suspect(&Content::Extent(ExtentRef { id, pg, k, n, extent_len, extent_off: 0 }), None);
    }

    pub(crate) fn suspect(&self, content: &Content, at: Option<(Ino, u64)>) {
        self.inner.peers.0.damage.suspect(content, at);
    }

    /// Notes that these pieces of a file could not be read.
    pub(crate) fn suspect_pieces(&self, ino: Ino, pieces: &[MapPiece]) {
        for piece in pieces {
            self.suspect(&piece.content, Some((ino, piece.off)));
        }
    }

    /// Extents that any client of the filesystem could not read since the last call.
    pub fn take_suspects(&self) -> Vec<Suspect> {
        let suspects = std::mem::take(&mut self.inner.peers.0.damage.lock().suspects);
        suspects.into_values().collect()
    }

    /// Whether every drive that may hold part of this piece is there. Otherwise reading it proves no loss.
    pub fn can_prove(&self, piece: &MapPiece) -> bool {
        let Content::Extent(extent) = &piece.content else { return true };
        let topology = self.inner.extents.topology();
        let is_there = |drive| topology.readable(drive).is_some();
        (0..extent.n).all(|shard| topology.holders(extent.pg, ShardIndex(shard)).all(is_there))
    }

    /// Reads a piece, or finds out why it cannot be read.
    pub async fn examine(&self, piece: &MapPiece) -> Verdict {
        match &piece.content {
            Content::Inline(_) => Verdict::Readable,
            Content::Extent(extent) => {
                let mut out = BytesMut::zeroed(piece.len as usize);
                let read =
                    self.inner.extents.read_into(extent, extent.extent_off, &mut out, GetPurpose::Move);
                match tokio::time::timeout(PATIENCE, read).await {
                    Ok(Ok(())) => Verdict::Readable,
                    Ok(Err(_)) => self.inner.extents.probe(extent).await,
                    // With a silent drive and damage on others, every block takes long.
                    Err(_) => Verdict::Unknown,
                }
            }
            Content::Tiered(extent, place) => self.examine_blob(extent, place, piece.len).await,
        }
    }

    async fn examine_blob(&self, extent: &ExtentRef, place: &BlobPlace, len: u64) -> Verdict {
        let serial = place.serial;
        let start = u64::from(place.off) + u64::from(extent.extent_off);
        let mut looks = 1;
        loop {
            match self.inner.blobs.read(place, start..start + len).await {
                Ok(_) => return Verdict::Readable,
                Err(ReadExtentError::Damaged) if looks > 1 => {
                    return Verdict::Lost(LossCause::BlobDamaged { serial });
                }
                Err(ReadExtentError::Doubtful) if looks == LOOKS => {
                    return Verdict::Lost(LossCause::BlobMissing { serial });
                }
                Err(ReadExtentError::Doubtful | ReadExtentError::Damaged) => looks += 1,
                Err(_) => return Verdict::Unknown,
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    }

    /// The first piece of a file that is lost with its blob, among the pieces of a step of [`Client::fetch_files`] from
    /// `off` on.
    pub async fn first_loss(&self, ino: Ino, off: u64) -> Option<(u64, LossCause)> {
        let (pieces, _) = self.away_pieces(ino, off).await.ok()?;
        for piece in pieces {
            match self.examine(&piece).await {
                Verdict::Readable => {}
                Verdict::Lost(cause) => {
                    self.suspect(&piece.content, Some((ino, piece.off)));
                    return Some((piece.off, cause));
                }
                Verdict::Unknown => return None,
            }
        }
        None
    }

    async fn damage(&self, request: DamageRequest) -> Result<DamageReply, FsError> {
        match self.call(MetaRequest::Damage(request)).await? {
            MetaReply::Damage(reply) => Ok(reply),
            _ => Err(FsError::Io),
        }
    }

    /// The map and piece that hold the byte at `off` of a file.
    pub async fn piece_at(&self, ino: Ino, off: u64) -> Result<Option<(PiecePosition, MapPiece)>, FsError> {
        match self.damage(DamageRequest::PieceAt { ino, off }).await? {
            DamageReply::Piece(found) => Ok(found),
            _ => Err(FsError::Io),
        }
    }

    /// Files after the given one that have content in these maps, and where to continue.
    pub async fn files_of(
        &self,
        maps: Vec<MapId>,
        after: Ino,
    ) -> Result<(Vec<(MapId, Ino)>, Option<Ino>), FsError> {
        match self.damage(DamageRequest::FilesOf { maps, after }).await? {
            DamageReply::Files { files, next } => Ok((files, next)),
            _ => Err(FsError::Io),
        }
    }

    /// Notes durably that a piece cannot be read. Returns `false` if the piece is gone or there is no room for the
    /// note.
    pub async fn note_loss(
        &self,
        position: PiecePosition,
        piece: MapPiece,
        ino: Ino,
        cause: LossCause,
    ) -> Result<bool, FsError> {
        match self.damage(DamageRequest::Note { position, piece, ino, cause }).await? {
            DamageReply::Noted(noted) => Ok(noted),
            _ => Err(FsError::Io),
        }
    }

    /// Removes the notes of pieces that can be read again or are gone.
    pub async fn settle_losses(&self, positions: Vec<PiecePosition>) -> Result<(), FsError> {
        self.damage(DamageRequest::Settle { positions }).await.map(drop)
    }

    /// Adds to the durable number of damaged shards that were restored.
    pub async fn note_repaired(&self, shards: u64) -> Result<(), FsError> {
        self.damage(DamageRequest::Repaired { shards }).await.map(drop)
    }

    /// Notes that all drives were scrubbed since that time.
    pub async fn looked_at_all(&self, since_s: u64) -> Result<(), FsError> {
        self.damage(DamageRequest::LookedAtAll { since_s }).await.map(drop)
    }

    /// The noted pieces, and sums over them.
    pub async fn losses(&self) -> Result<(Vec<LostPiece>, DamageSums), FsError> {
        let mut all: Vec<LostPiece> = Vec::new();
        loop {
            let after = all.last().map(|last| last.position);
            let request = DamageRequest::List { after, limit: PAGE };
            let DamageReply::Lost { pieces, sums } = self.damage(request).await? else {
                return Err(FsError::Io);
            };
            let more = pieces.len() == PAGE as usize;
            all.extend(pieces);
            if !more {
                return Ok((all, sums));
            }
        }
    }

    /// Sums over the noted pieces.
    pub async fn damage_sums(&self) -> Result<DamageSums, FsError> {
        match self.damage(DamageRequest::List { after: None, limit: 1 }).await? {
            DamageReply::Lost { sums, .. } => Ok(sums),
            _ => Err(FsError::Io),
        }
    }

    /// A path of an inode by its present names; `None` if it has none.
    pub async fn path_of(&self, ino: Ino) -> Result<Option<Vec<u8>>, FsError> {
        let (mut at, mut names) = (ino, Vec::new());
        while at != Ino::ROOT {
            let Some((dir, name)) = self.name_of(at).await? else { return Ok(None) };
            names.push(name);
            at = dir;
        }
        let mut path = Vec::new();
        for name in names.iter().rev() {
            path.push(b'/');
            path.extend_from_slice(name);
        }
        Ok(Some(path))
    }

    /// The name of the lost blob, if the loss is one of a blob.
    pub async fn lost_blob(&self, cause: LossCause) -> Result<Option<String>, FsError> {
        let serial = match cause {
            LossCause::BlobMissing { serial } | LossCause::BlobDamaged { serial } => serial,
            LossCause::Shards { .. } => return Ok(None),
        };
        let blobs = self.blobs(serial.checked_sub(1)).await?;
        let blob = blobs.first().filter(|blob| blob.serial == serial);
        let cluster = self.inner.blobs.link.cluster;
        Ok(blob.map(|blob| self.inner.blobs.id(blob.serial, blob.term).key(cluster)))
    }

    /// Whether this path leads to the inode.
    pub async fn leads_to(&self, path: &[u8], ino: Ino) -> bool {
        let mut at = Ino::ROOT;
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            let Ok(attr) = self.lookup(at, name).await else { return false };
            self.forget(attr.ino, 1);
            at = attr.ino;
        }
        at == ino
    }

    async fn name_of(&self, ino: Ino) -> Result<Option<(Ino, Bytes)>, FsError> {
        let parent: fn(Option<NamePosition>) -> NameSearch = |after| NameSearch::Parent { after };
        for search in [parent, |after| NameSearch::All { after }] {
            let mut after = None;
            loop {
                let request = DamageRequest::NameOf { ino, search: search(after) };
                match self.damage(request).await? {
                    DamageReply::Name { found: Some(found), .. } => return Ok(Some(found)),
                    DamageReply::Name { next: None, .. } => break,
                    DamageReply::Name { next, .. } => after = next,
                    _ => return Err(FsError::Io),
                }
            }
        }
        Ok(None)
    }
}

impl crate::extents::ExtentIo {
    /// Asks every drive for its shard of an extent that could not be read.
    pub(crate) async fn probe(&self, extent: &ExtentRef) -> Verdict {
        let (mut damaged, mut missing) = (0u32, 0u32);
        for shard in (0..extent.n).map(ShardIndex) {
            let bit = 1 << shard.0;
            match self.probe_shard(extent, shard).await {
                Probe::Whole => {}
                Probe::Damaged => damaged |= bit,
                Probe::Missing => missing |= bit,
                Probe::Silent => return Verdict::Unknown,
            }
        }
        let whole = u32::from(extent.n) - (damaged | missing).count_ones();
        if whole >= u32::from(extent.k) {
            return Verdict::Unknown;
        }
        Verdict::Lost(LossCause::Shards { damaged, missing })
    }

    async fn probe_shard(&self, extent: &ExtentRef, shard: ShardIndex) -> Probe {
        let len_bytes = layout::shard_len(extent.extent_len, extent.k);
        let blocks = len_bytes / BLOCK_BYTES as u32;
        let read = layout::ShardRead { shard, first_block: 0, blocks, skip_bytes: 0, len_bytes };
        let topology = self.topology();
        let mut found = Probe::Missing;
        let holders: Vec<DriveId> = topology.holders(extent.pg, shard).collect();
        if holders.is_empty() {
            return Probe::Silent;
        }
        for drive in holders {
            let probe = match topology.readable(drive) {
                Some(service) => self.probe_drive(drive, &**service, extent, read).await,
                None => Probe::Silent,
            };
            match probe {
                Probe::Whole => return probe,
                // A drive that is away may have it.
                Probe::Silent => found = Probe::Silent,
                Probe::Damaged if found != Probe::Silent => found = Probe::Damaged,
                Probe::Damaged | Probe::Missing => {}
            }
        }
        found
    }
}

/// The state of a shard on a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Probe {
    Whole,
    Damaged,
    Missing,
    /// The drive does not answer.
    Silent,
}
