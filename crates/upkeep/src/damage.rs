//! Finds the files that cannot be read, notes them in the ledger, and checks them again until they can be read.
//!
//! Reads, repair and the scrub only suspect an extent. It is examined here: every note is proven. One piece of an
//! extent may be unreadable while another is not, so notes are of pieces, and all pieces of the extent are searched
//! for. The owner removes the note of a removed piece; checking the notes in turn finds the pieces that can be read
//! again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::env::Env;
use base::{ExtentId, FsError, Ino, MapId};
use client::{Client, PiecePosition, Suspect, Verdict};
use tokio::runtime::Handle;
use wire::damage::{DamageSums, LOST_PIECES_MAX, LossCause, LostPiece};
use wire::meta::{Content, MapPiece};

use crate::pace::{Pace, Permit};
use crate::task::{Stopped, Task};

const IDLE: Duration = Duration::from_millis(500);
/// Poll interval of [`DamageKeeper::known`].
const POLL: Duration = Duration::from_millis(10);
/// How often the number of repaired shards is written to the ledger. A crash may lose the increase since then.
const COUNT_EVERY_NS: u64 = 2_000_000_000;
/// How often some of the notes are checked again, and how many.
const AGAIN_EVERY_NS: u64 = 10_000_000_000;
const AGAIN: usize = 16;
/// How often names are looked up again.
const NAMES_EVERY_NS: u64 = 30_000_000_000;
/// The most files whose paths are looked up.
const NAMED_MAX: usize = 100;
/// An extent that could not be decided is examined again after this time ...
const RETRY_NS: u64 = 10_000_000_000;
/// ... and one whose damage no file has, after this time.
const REST_NS: u64 = 600_000_000_000;
/// Extents that are remembered for either reason.
const REMEMBERED_MAX: usize = 65_536;

/// A file with unreadable pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostFile {
    /// Its inode; 0 stands for parts of an upload, or of an unknown file.
    pub ino: Ino,
    /// A path; `None` if it has no name, or if too many files are unreadable.
    pub path: Option<String>,
    /// Its pieces that cannot be read.
    pub pieces: u64,
    /// Their bytes.
    pub bytes: u64,
    /// When the first of them was found, in seconds since 1970.
    pub found_s: u64,
}

/// The known damage of a filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DamageStat {
    /// Files with unreadable pieces, the first found first.
    pub files: Vec<LostFile>,
    /// Sums over the notes.
    pub sums: DamageSums,
    /// Whether the ledger has answered since the start.
    pub is_known: bool,
}

/// Examines damage of one filesystem in the background.
pub struct DamageKeeper {
    stat: Arc<Mutex<DamageStat>>,
    task: Task,
}

impl DamageKeeper {
    /// Starts with the notes in the ledger.
    pub fn start(env: Env, client: Client, pace: Arc<Pace>, runtime: &Handle) -> Self {
        let stat = Arc::new(Mutex::default());
        let work_stat = stat.clone();
        let work = |stopped| {
            let (paths, waiting, rests, refused, losses) = Default::default();
            let (counted_ns, checked_ns, named_ns, repaired, next) = (0, 0, 0, 0, 0);
            let mut work = Work {
                env,
                client,
                pace,
                stopped,
                stat: work_stat,
                paths,
                waiting,
                rests,
                refused,
                losses,
                counted_ns,
                checked_ns,
                named_ns,
                repaired,
                next,
            };
            async move { work.run().await }
        };
        Self { stat, task: Task::start(runtime, work) }
    }

    /// Stops after the step under way, and writes the count of repaired shards to the ledger.
    pub async fn stop(self) {
        self.task.stop().await;
    }

    /// Waits until the notes in the ledger are known, for `patience` at most.
    pub async fn known(&self, patience: Duration) {
        let known = async {
            while !self.stat().is_known {
                tokio::time::sleep(POLL).await;
            }
        };
        // A ledger that does not answer is reported elsewhere.
        let _ = tokio::time::timeout(patience, known).await;
    }

    /// The known damage.
    pub fn stat(&self) -> DamageStat {
        self.stat.lock().expect("no holder of this lock panics").clone()
    }
}

struct Work {
    env: Env,
    client: Client,
    pace: Arc<Pace>,
    stopped: Stopped,
    stat: Arc<Mutex<DamageStat>>,
    paths: BTreeMap<Ino, String>,
    /// Extents that could not be examined yet.
    waiting: BTreeMap<ExtentId, Suspect>,
    /// Extents that are not examined before the given time.
    rests: BTreeMap<ExtentId, u64>,
    /// Pieces for whose note there was no room: they count once.
    refused: BTreeSet<PiecePosition>,
    /// The notes, as of the last refresh.
    losses: Vec<LostPiece>,
    counted_ns: u64,
    checked_ns: u64,
    named_ns: u64,
    /// Repaired shards that are not in the ledger yet.
    repaired: u64,
    /// The index of the next note to check again.
    next: usize,
}

/// Pieces to search for.
#[derive(Default)]
struct Wanted {
    extents: BTreeSet<ExtentId>,
    /// Blobs that are missing: their content need not be examined.
    blobs: BTreeMap<u64, LossCause>,
}

impl Wanted {
    fn has(&self, piece: &MapPiece) -> bool {
        let in_blob = self.cause(piece).is_some();
        in_blob || piece.content.extent().is_some_and(|extent| self.extents.contains(&extent.id))
    }

    fn cause(&self, piece: &MapPiece) -> Option<LossCause> {
        match &piece.content {
            Content::Tiered(_, place) => self.blobs.get(&place.serial).copied(),
            _ => None,
        }
    }

    fn add(&mut self, id: ExtentId, cause: LossCause) {
        self.extents.insert(id);
        if let LossCause::BlobMissing { serial } = cause {
            self.blobs.insert(serial, cause);
        }
    }
}

impl Work {
    async fn run(&mut self) {
        let mut known = false;
        while !self.stopped.now() {
            let result = if known { self.pass().await } else { self.refresh().await };
            match result {
                Ok(()) => known = true,
                Err(error) => tracing::warn!(%error, "damage cannot be examined, trying again"),
            }
            self.stopped.or_after(IDLE).await;
        }
        self.counted_ns = 0;
        if let Err(error) = self.keep_count().await {
            tracing::warn!(%error, "the number of repaired shards is not written down");
        }
    }

    async fn pass(&mut self) -> Result<(), FsError> {
        self.keep_count().await?;
        let mut changed = self.examine_suspects().await?;
        let now = self.env.clock.boot_ns();
        if !self.losses.is_empty() && now.saturating_sub(self.checked_ns) >= AGAIN_EVERY_NS {
            changed |= self.check_again().await?;
            self.checked_ns = self.env.clock.boot_ns();
        }
        let names_due = now.saturating_sub(self.named_ns) >= NAMES_EVERY_NS;
        let noted = self.stat().sums.pieces > 0;
        if changed || noted && (names_due || self.has_changed().await?) {
            self.refresh().await
        } else {
            Ok(())
        }
    }

    fn stat(&self) -> DamageStat {
        self.stat.lock().expect("no holder of this lock panics").clone()
    }

    /// Whether notes were removed with their pieces.
    async fn has_changed(&self) -> Result<bool, FsError> {
        Ok(self.client.damage_sums().await? != self.stat().sums)
    }

    async fn keep_count(&mut self) -> Result<(), FsError> {
        self.repaired += self.client.take_repaired();
        let now = self.env.clock.boot_ns();
        if self.repaired == 0 || now.saturating_sub(self.counted_ns) < COUNT_EVERY_NS {
            return Ok(());
        }
        self.client.note_repaired(self.repaired).await?;
        (self.repaired, self.counted_ns) = (0, now);
        self.refresh().await
    }

    /// Examines extents that could not be read. Returns whether a piece was noted.
    async fn examine_suspects(&mut self) -> Result<bool, FsError> {
        let now = self.env.clock.boot_ns();
        let due: Vec<ExtentId> = self
            .waiting
            .keys()
            .copied()
            .filter(|id| self.rests.get(id).is_none_or(|until| *until <= now))
            .collect();
        let mut suspects: Vec<Suspect> = due.iter().filter_map(|id| self.waiting.remove(id)).collect();
        suspects.extend(self.client.take_suspects());
        if suspects.is_empty() {
            return Ok(false);
        }
        let known: BTreeSet<ExtentId> = self.losses.iter().filter_map(extent_of).collect();
        let (mut changed, mut wanted) = (false, Wanted::default());
        for suspect in suspects {
            let Some(extent) = suspect.content.extent().copied() else { continue };
            // A reader may be waiting: the piece of the failed read is examined before all others.
            changed |= self.examine_read(&suspect, &mut wanted).await?;
            let rests = self.rests.get(&extent.id).is_some_and(|until| *until > now);
            if known.contains(&extent.id)
                || wanted.extents.contains(&extent.id)
                || rests
                || self.stopped.now()
            {
                continue;
            }
            let whole = MapPiece { off: 0, len: extent.extent_len.into(), content: suspect.content.clone() };
            let verdict = match self.client.can_prove(&whole) {
                true => self.examine(&whole).await,
                false => Verdict::Unknown,
            };
            match verdict {
                Verdict::Readable => {}
                Verdict::Lost(cause) => wanted.add(extent.id, cause),
                Verdict::Unknown => self.wait(extent.id, suspect, now),
            }
        }
        if changed {
            self.refresh().await?;
        }
        if !wanted.extents.is_empty() {
            changed |= self.search_maps(&wanted).await?;
        }
        Ok(changed)
    }

    /// Remembers an extent that cannot be decided now, for another try later.
    fn wait(&mut self, id: ExtentId, suspect: Suspect, now_ns: u64) {
        if self.waiting.len() < REMEMBERED_MAX {
            self.waiting.insert(id, suspect);
            self.rest(id, now_ns + RETRY_NS);
        }
    }

    fn rest(&mut self, id: ExtentId, until_ns: u64) {
        if self.rests.len() >= REMEMBERED_MAX {
            let now = self.env.clock.boot_ns();
            self.rests.retain(|_, until| *until > now);
        }
        if self.rests.len() < REMEMBERED_MAX {
            self.rests.insert(id, until_ns);
        }
    }

    /// Examines the piece of a failed read.
    async fn examine_read(&mut self, suspect: &Suspect, wanted: &mut Wanted) -> Result<bool, FsError> {
        let Some((ino, off)) = suspect.at else { return Ok(false) };
        let found = match self.client.piece_at(ino, off).await {
            // The file is gone.
            Err(FsError::Stale) => None,
            found => found?,
        };
        let Some((position, piece)) = found else { return Ok(false) };
        if self.losses.iter().any(|loss| loss.position == position) || !self.client.can_prove(&piece) {
            return Ok(false);
        }
        let verdict = match wanted.cause(&piece) {
            Some(cause) => Verdict::Lost(cause),
            None => self.client.examine(&piece).await,
        };
        let Verdict::Lost(cause) = verdict else { return Ok(false) };
        if let Some(extent) = piece.content.extent() {
            wanted.add(extent.id, cause);
        }
        self.note(position, piece, ino, cause).await
    }

    /// Examines a piece at the pace of background work.
    async fn examine(&mut self, piece: &MapPiece) -> Verdict {
        while self.pace.permit(piece.len, self.client.strained()).await == Permit::NotYet {
            if self.stopped.now() || self.pace.is_paused() {
                return Verdict::Unknown;
            }
        }
        self.client.examine(piece).await
    }

    async fn note(
        &mut self,
        position: PiecePosition,
        piece: MapPiece,
        ino: Ino,
        cause: LossCause,
    ) -> Result<bool, FsError> {
        if self.refused.contains(&position) {
            return Ok(false);
        }
        let (map, off) = (position.map, position.off);
        let noted = self.client.note_loss(position, piece, ino, cause).await?;
        if noted {
            tracing::error!(%ino, %map, off, ?cause, "a piece of a file cannot be read");
        } else if self.refused.len() < REMEMBERED_MAX {
            self.refused.insert(position);
        }
        Ok(noted)
    }

    /// Finds all pieces of these extents and blobs, and notes those that cannot be read.
    async fn search_maps(&mut self, wanted: &Wanted) -> Result<bool, FsError> {
        let (mut after, mut found) = (None, Vec::new());
        loop {
            let (entries, next) = self.client.scan_map(after).await?;
            let entries = entries.into_iter().filter(|entry| wanted.has(&entry.piece));
            found.extend(entries.map(|entry| (entry.position(), entry.piece)));
            after = next;
            if self.stopped.now() {
                return Ok(false);
            }
            if after.is_none() {
                break;
            }
        }
        let files = self.files_of(found.iter().map(|(position, _)| position.map).collect()).await?;
        let (mut changed, mut noted) = (false, BTreeSet::new());
        for (position, piece) in found {
            let Some(id) = piece.content.extent().map(|extent| extent.id) else { continue };
            let verdict = match wanted.cause(&piece) {
                Some(cause) => Verdict::Lost(cause),
                None => self.examine(&piece).await,
            };
            if let Verdict::Lost(cause) = verdict {
                let ino = files.get(&position.map).copied().unwrap_or(Ino(0));
                changed |= self.note(position, piece, ino, cause).await?;
                noted.insert(id);
            }
            if self.stopped.now() {
                return Ok(changed);
            }
        }
        // No file has the damaged bytes.
        let until = self.env.clock.boot_ns() + REST_NS;
        wanted.extents.iter().filter(|id| !noted.contains(id)).for_each(|id| self.rest(*id, until));
        Ok(changed)
    }

    async fn files_of(&self, maps: BTreeSet<MapId>) -> Result<BTreeMap<MapId, Ino>, FsError> {
        let (mut files, mut after) = (BTreeMap::new(), Some(Ino(0)));
        let maps: Vec<MapId> = maps.into_iter().collect();
        while let Some(from) = after.filter(|_| !maps.is_empty()) {
            let (some, next) = self.client.files_of(maps.clone(), from).await?;
            files.extend(some);
            after = next;
        }
        Ok(files)
    }

    /// Checks some of the notes again. Returns whether any is settled or has another cause now.
    async fn check_again(&mut self) -> Result<bool, FsError> {
        let (mut settled, mut changed) = (Vec::new(), false);
        for _ in 0..AGAIN.min(self.losses.len()) {
            let loss = self.losses[self.next % self.losses.len()].clone();
            self.next = (self.next + 1) % self.losses.len();
            let Some(piece) = loss.piece else {
                settled.push(loss.position);
                continue;
            };
            match self.examine(&piece).await {
                Verdict::Readable => settled.push(loss.position),
                Verdict::Lost(cause) if cause != loss.cause => {
                    changed |= self.note(loss.position, piece, loss.ino, cause).await?;
                }
                Verdict::Lost(_) | Verdict::Unknown => {}
            }
        }
        if !settled.is_empty() {
            tracing::info!(
                pieces = settled.len(),
                "pieces that could not be read can be read again, or are gone"
            );
            self.client.settle_losses(settled).await?;
            changed = true;
        }
        Ok(changed)
    }

    /// Publishes the present notes.
    async fn refresh(&mut self) -> Result<(), FsError> {
        let (losses, sums) = self.client.losses().await?;
        self.losses = losses;
        if sums.pieces < LOST_PIECES_MAX {
            self.refused.clear();
        }
        let mut files: Vec<LostFile> = files_of(&self.losses).into_values().collect();
        files.sort_by_key(|file| (file.found_s, file.ino));
        for file in files.iter_mut().take(NAMED_MAX).filter(|file| file.ino != Ino(0)) {
            file.path = self.path_of(file.ino).await?;
        }
        let named: BTreeSet<Ino> = files.iter().map(|file| file.ino).collect();
        self.paths.retain(|ino, _| named.contains(ino));
        self.named_ns = self.env.clock.boot_ns();
        *self.stat.lock().expect("no holder of this lock panics") =
            DamageStat { files, sums, is_known: true };
        Ok(())
    }

    async fn path_of(&mut self, ino: Ino) -> Result<Option<String>, FsError> {
        if let Some(path) = self.paths.get(&ino)
            && self.client.leads_to(path.as_bytes(), ino).await
        {
            return Ok(Some(path.clone()));
        }
        let path = self.client.path_of(ino).await?.map(|path| String::from_utf8_lossy(&path).into_owned());
        if let Some(path) = &path {
            self.paths.insert(ino, path.clone());
        }
        Ok(path)
    }
}

fn extent_of(loss: &LostPiece) -> Option<ExtentId> {
    loss.piece.as_ref()?.content.extent().map(|extent| extent.id)
}

fn files_of(losses: &[LostPiece]) -> BTreeMap<Ino, LostFile> {
    let mut files = BTreeMap::new();
    for loss in losses {
        let new = || LostFile { ino: loss.ino, path: None, pieces: 0, bytes: 0, found_s: loss.found_s };
        let file: &mut LostFile = files.entry(loss.ino).or_insert_with(new);
        file.pieces += 1;
        file.bytes += loss.piece.as_ref().map_or(0, |piece| piece.len);
        file.found_s = file.found_s.min(loss.found_s);
    }
    files
}
