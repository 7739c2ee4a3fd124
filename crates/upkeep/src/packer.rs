//! Gathers small pieces into full extents. It also rewrites extents that are mostly dead or differ in shape from new
//! ones: narrow ones when the drives are back, all of them when the filesystem gets another profile.
//!
//! The packer sweeps over all maps in order, so that pieces of one directory or file that were written at the same time
//! are packed together. Small pieces and inline content must have been seen unchanged for a while, because most young
//! content is overwritten or removed soon. Only fragments are rewritten, never the large extents around them, so a file
//! with scattered changes costs no more than its changes. If nothing has changed since the last sweep and much space is
//! still wasted, nearly full extents are rewritten as well.
//!
//! Redundancy goes first: nothing is packed while repair can restore shards.

mod assess;
mod shared;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::env::Env;
use base::{FsError, PgId};
use client::{Client, MapEntry, PackTarget, PiecePosition};
use tokio::runtime::Handle;
use wire::meta::Content;

use crate::pace::{Pace, Permit};
use crate::task::{Stopped, Task};
use assess::{Density, Load, Verdict, assess, fingerprint, share_bytes};
use shared::Shared;

/// Young pieces remembered from one sweep to the next.
const YOUNG_MAX: usize = 262_144;
/// The pause after a sweep is this many times as long as the scan of all maps ...
const REST: u32 = 8;
/// ... but at most this long.
const REST_MAX: Duration = Duration::from_secs(120);
/// While the filesystem is in use, the rest after every step is this many times as long as the step ...
const REST_IN_USE: u32 = 3;
/// ... but ends soon after the last request.
const REST_SLICE: Duration = Duration::from_millis(20);
/// Waste is tolerated up to this part of the space that all extents take.
const WASTE: u64 = 12;
/// Pause between two checks of whether repair is done.
const REPAIR_POLL: Duration = Duration::from_millis(500);

/// When a packer acts.
#[derive(Debug, Clone, Copy)]
pub struct PackOptions {
    /// How long a small piece must have been seen unchanged.
    pub age: Duration,
    /// Shortest pause between two sweeps.
    pub pause: Duration,
    /// The least bytes for an extent that is not full; `None`: a quarter of a full one, if that is not kept as copies.
    pub least_bytes: Option<u64>,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self { age: Duration::from_secs(30), pause: Duration::from_secs(15), least_bytes: None }
    }
}

/// Why a packer does not move pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackWait {
    /// All background work is paused.
    Paused,
    /// Shards have to be repaired or rebuilt first.
    Repair,
    /// The drives have no room for larger extents.
    Room,
}

/// The progress of a packer since its start, and the result of its last scan of all maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PackStat {
    /// Bytes that lie in new extents.
    pub packed_bytes: u64,
    /// The number of new extents.
    pub extents: u64,
    /// Bytes of small pieces and of mostly dead extents. They move once they are old and many enough.
    pub left_bytes: u64,
    /// Bytes in extents that differ in shape from new ones.
    pub convert_bytes: u64,
    /// Bytes per second in the sweep under way or the last one.
    pub bytes_per_s: u64,
    /// Completed scans of all maps.
    pub sweeps: u64,
    /// Bytes of content in extents.
    pub stored_bytes: u64,
    /// Bytes of content in the metadata.
    pub inline_bytes: u64,
    /// Bytes that the extents take on drives, without frame headers.
    pub allocated_bytes: u64,
    /// Bytes that full extents of live content alone would take.
    pub ideal_bytes: u64,
    /// Why no piece moves.
    pub waits: Option<PackWait>,
}

impl PackStat {
    /// The time for the remaining bytes at the present rate, in seconds.
    pub fn eta_s(&self) -> Option<u64> {
        (self.left_bytes + self.convert_bytes).checked_div(self.bytes_per_s)
    }

    /// Whether more space is wasted than [`WASTE`] allows.
    fn is_wasteful(&self) -> bool {
        self.allocated_bytes.saturating_sub(self.ideal_bytes) * WASTE > self.allocated_bytes
    }

    /// Takes over the result of a scan of all maps.
    fn survey(&mut self, found: &PackStat) {
        self.left_bytes = found.left_bytes;
        self.convert_bytes = found.convert_bytes;
        self.stored_bytes = found.stored_bytes;
        self.inline_bytes = found.inline_bytes;
        self.allocated_bytes = found.allocated_bytes;
        self.ideal_bytes = found.ideal_bytes;
        self.sweeps += 1;
    }

    /// Counts a piece.
    fn count(&mut self, entry: &MapEntry, verdict: Verdict, target: &PackTarget) {
        let len = entry.piece.len;
        match &entry.piece.content {
            Content::Inline(_) => self.inline_bytes += len,
            Content::Extent(_) => self.stored_bytes += len,
            Content::Tiered(..) => {}
        }
        self.allocated_bytes += share_bytes(entry);
        let (k, n) = (u64::from(target.profile.k()), u64::from(target.profile.n()));
        self.ideal_bytes = (self.stored_bytes * n).div_ceil(k);
        match verdict {
            Verdict::Stay => {}
            Verdict::WhenOld | Verdict::Move => self.left_bytes += len,
            Verdict::MoveAlone | Verdict::MoveShared => self.convert_bytes += len,
        }
    }
}

/// The placement groups with extents of a filesystem, as a scan of all maps found them.
#[derive(Debug, Clone)]
pub struct UsedGroups {
    /// The boot time at which the scan began: later extents may be missing.
    pub began_ns: u64,
    /// The groups.
    pub groups: Arc<BTreeSet<PgId>>,
}

/// Packs one filesystem in the background.
pub struct Packer {
    stat: Arc<Mutex<PackStat>>,
    used: Arc<Mutex<Option<UsedGroups>>>,
    task: Task,
}

impl Packer {
    /// Starts packing.
    pub fn start(env: Env, client: Client, pace: Arc<Pace>, options: PackOptions, runtime: &Handle) -> Self {
        let stat: Arc<Mutex<PackStat>> = Arc::default();
        let work_stat = Arc::clone(&stat);
        let used: Arc<Mutex<Option<UsedGroups>>> = Arc::default();
        let work_used = Arc::clone(&used);
        let (scan_time, young, swept) = Default::default();
        let work = |stopped| {
            let (stat, used) = (work_stat, work_used);
            Work { env, client, pace, options, stat, used, stopped, scan_time, young, swept }.run()
        };
        Self { stat, used, task: Task::start(runtime, work) }
    }

    /// The placement groups with extents, after the first scan of all maps.
    pub fn used_groups(&self) -> Option<UsedGroups> {
        self.used.lock().expect("no holder of this lock panics").clone()
    }

    /// Stops after the step under way.
    pub async fn stop(self) {
        self.task.stop().await;
    }

    /// Progress so far.
    pub fn stat(&self) -> PackStat {
        *lock(&self.stat)
    }
}

fn lock(stat: &Mutex<PackStat>) -> MutexGuard<'_, PackStat> {
    stat.lock().expect("no holder of this lock panics")
}

struct Work {
    env: Env,
    client: Client,
    pace: Arc<Pace>,
    options: PackOptions,
    stat: Arc<Mutex<PackStat>>,
    used: Arc<Mutex<Option<UsedGroups>>>,
    stopped: Stopped,
    /// Time spent scanning maps since the last pause.
    scan_time: Duration,
    /// Small pieces, with their fingerprint and the time at which it was first seen.
    young: HashMap<PiecePosition, (u64, u64)>,
    /// The ledger version and target of the last sweep, and whether it left nothing for later.
    swept: Option<(u64, PackTarget, bool)>,
}

/// The state of one sweep.
struct Sweep {
    target: PackTarget,
    density: Density,
    began_ns: u64,
    moved_bytes: u64,
    /// Whether a piece should have moved and did not.
    held_back: bool,
    /// Fragments, and pieces that fill a good part of an extent.
    loads: [Load; 2],
    shared: Shared,
    young: HashMap<PiecePosition, (u64, u64)>,
}

/// The layout of a load in its new extent.
#[derive(Clone, Copy)]
enum Kind {
    /// One after another.
    Apart,
    /// As in the one extent that all pieces share.
    Shared,
}

impl Work {
    async fn run(mut self) {
        while !self.stopped.now() {
            let target = self.client.pack_target();
            if let Err(error) = self.sweep().await {
                tracing::warn!(%error, "packing pauses");
            }
            let mut rest = (std::mem::take(&mut self.scan_time) * REST).min(REST_MAX);
            if self.client.pack_target() != target {
                // The profile has changed while the sweep waited for the owner, so it counted and moved the wrong pieces.
                rest = Duration::ZERO;
            }
            self.stopped.or_after(self.options.pause.max(rest)).await;
        }
    }

    fn is_old(&self, since_ns: u64) -> bool {
        self.since(since_ns) >= self.options.age
    }

    fn since(&self, began_ns: u64) -> Duration {
        Duration::from_nanos(self.env.clock.boot_ns().saturating_sub(began_ns))
    }

    /// Rests after a step while the filesystem is in use, unless a writer waits for the room that packing gives.
    async fn step_back(&mut self, worked: Duration) {
        tokio::task::yield_now().await;
        let mut rest = worked * REST_IN_USE;
        while !rest.is_zero() && self.client.is_in_use() && !self.client.makes_room() && !self.stopped.now() {
            let slice = rest.min(REST_SLICE);
            self.stopped.or_after(slice).await;
            rest -= slice;
        }
    }

    fn set_waits(&self, why: Option<PackWait>) {
        lock(&self.stat).waits = why;
    }

    /// Scans all pieces, then moves those that should move.
    async fn sweep(&mut self) -> Result<(), FsError> {
        let looked_ns = self.env.clock.boot_ns();
        let (version, target) = (self.client.ledger_version(), self.client.pack_target());
        let unchanged = matches!(self.swept, Some((v, t, _)) if (v, t) == (version, target));
        if unchanged && matches!(self.swept, Some((_, _, true))) {
            if let Some(used) = &mut *self.used.lock().expect("no holder of this lock panics") {
                // Nothing was committed since.
                used.began_ns = looked_ns;
            }
            return Ok(());
        }
        let found = self.survey(&target).await?;
        let Some(found) = found else { return Ok(()) };
        lock(&self.stat).survey(&found);
        let density = if unchanged && found.is_wasteful() { Density::FULL } else { Density::HALF };
        let done = density == Density::FULL || !found.is_wasteful();
        if found.left_bytes + found.convert_bytes == 0 && density == Density::HALF {
            (self.swept, self.young) = (Some((version, target, done)), HashMap::new());
            return Ok(());
        }
        let (loads, shared, young) = Default::default();
        let began_ns = self.env.clock.boot_ns();
        let mut sweep =
            Sweep { target, density, began_ns, moved_bytes: 0, held_back: false, loads, shared, young };
        self.set_waits(None);
        if !self.move_pieces(&mut sweep).await? {
            return Ok(());
        }
        // Pieces that are old enough and stayed would stay again, until something changes.
        let ripens = sweep.young.values().any(|(_, since)| !self.is_old(*since));
        let ended = !ripens && !sweep.held_back && sweep.moved_bytes == 0;
        self.swept = Some((version, target, done && ended));
        self.young = sweep.young;
        Ok(())
    }

    /// Counts all pieces; `None` if it was stopped.
    async fn survey(&mut self, target: &PackTarget) -> Result<Option<PackStat>, FsError> {
        let (mut found, mut after) = (PackStat::default(), None);
        let (mut groups, survey_ns) = (BTreeSet::new(), self.env.clock.boot_ns());
        loop {
            let began_ns = self.env.clock.boot_ns();
            let (entries, next) = self.client.scan_map(after).await?;
            for entry in &entries {
                if let Content::Extent(extent) = &entry.piece.content {
                    groups.insert(extent.pg);
                }
                found.count(entry, assess(entry, target, Density::HALF), target);
            }
            let worked = self.since(began_ns);
            self.scan_time += worked;
            after = next;
            if after.is_none() {
                let used = UsedGroups { began_ns: survey_ns, groups: Arc::new(groups) };
                *self.used.lock().expect("no holder of this lock panics") = Some(used);
                return Ok(Some(found));
            }
            if self.stopped.now() {
                return Ok(None);
            }
            self.step_back(worked).await;
        }
    }

    /// Moves pieces. Returns whether it came to the end.
    async fn move_pieces(&mut self, sweep: &mut Sweep) -> Result<bool, FsError> {
        let mut after = None;
        loop {
            let began_ns = self.env.clock.boot_ns();
            let (entries, next) = self.client.scan_map(after).await?;
            let worked = self.since(began_ns);
            for entry in entries {
                for (part, verdict) in self.wanted(entry, sweep) {
                    let long = part.piece.len * 4 > u64::from(sweep.target.extent_bytes);
                    let kind = usize::from(long);
                    if !sweep.loads[kind].takes(&part, &sweep.target) {
                        let load = std::mem::take(&mut sweep.loads[kind]);
                        self.ship(load, sweep, Kind::Apart).await?;
                    }
                    sweep.loads[kind].put(part, verdict);
                }
                if self.stopped.now() {
                    return Ok(false);
                }
            }
            after = next;
            if after.is_none() {
                break;
            }
            self.step_back(worked).await;
        }
        for load in std::mem::take(&mut sweep.loads) {
            if load.pays(&sweep.target, self.options.least_bytes) {
                self.ship(load, sweep, Kind::Apart).await?;
            }
        }
        for load in std::mem::take(&mut sweep.shared).loads(&sweep.target) {
            self.ship(load, sweep, Kind::Shared).await?;
        }
        Ok(!self.stopped.now())
    }

    /// The parts of a piece that move now. Pieces that are too young are remembered.
    fn wanted(&self, entry: MapEntry, sweep: &mut Sweep) -> Vec<(MapEntry, Verdict)> {
        let mut verdict = assess(&entry, &sweep.target, sweep.density);
        if verdict == Verdict::WhenOld {
            let now = self.env.clock.boot_ns();
            let print = fingerprint(&entry);
            let known = self.young.get(&entry.position()).filter(|(known, _)| *known == print);
            let since = known.map_or(now, |(_, since)| *since);
            if sweep.young.len() < YOUNG_MAX {
                sweep.young.insert(entry.position(), (print, since));
            }
            if known.is_some() && self.is_old(since) {
                verdict = Verdict::Move;
            }
        }
        if verdict == Verdict::MoveShared {
            sweep.held_back |= !sweep.shared.put(entry);
            return Vec::new();
        }
        if matches!(verdict, Verdict::Stay | Verdict::WhenOld) {
            return Vec::new();
        }
        // A piece of an extent of another profile may be longer than a new extent.
        let step = u64::from(sweep.target.extent_bytes);
        let (from, end) = (entry.piece.off, entry.piece.end());
        let cuts = (from..end).step_by(step as usize);
        let part = |at: u64| entry.piece.clip(at, at + step).map(|piece| MapEntry { piece, ..entry.clone() });
        cuts.filter_map(part).map(|part| (part, verdict)).collect()
    }

    /// Waits until a load may move. Returns `false` if the packer is stopped or the drives are full.
    async fn may_ship(&mut self, load: &Load, target: &PackTarget) -> Result<bool, FsError> {
        while !self.stopped.now() {
            if self.client.repair_is_due().await? {
                self.set_waits(Some(PackWait::Repair));
                self.stopped.or_after(REPAIR_POLL).await;
                continue;
            }
            if !load.saves(target) && !self.client.has_spare_room(load.bytes) {
                self.set_waits(Some(PackWait::Room));
                return Ok(false);
            }
            if self.pace.permit(load.bytes, self.client.strained()).await == Permit::Given {
                self.set_waits(None);
                return Ok(true);
            }
            self.set_waits(self.pace.is_paused().then_some(PackWait::Paused));
        }
        Ok(false)
    }

    /// Packs a load once that is possible.
    async fn ship(&mut self, load: Load, sweep: &mut Sweep, kind: Kind) -> Result<(), FsError> {
        if load.entries.is_empty() {
            return Ok(());
        }
        if !self.may_ship(&load, &sweep.target).await? {
            sweep.held_back = true;
            return Ok(());
        }
        let (mut moved_alone, mut moved) = (0, 0);
        for entry in &load.entries {
            let alone = matches!(
                assess(entry, &sweep.target, sweep.density),
                Verdict::MoveAlone | Verdict::MoveShared
            );
            *(if alone { &mut moved_alone } else { &mut moved }) += entry.piece.len;
        }
        let began_ns = self.env.clock.boot_ns();
        let outcome = match kind {
            Kind::Apart => self.client.pack(load.entries).await?,
            Kind::Shared => self.client.pack_shared(load.entries).await?,
        };
        self.step_back(self.since(began_ns)).await;
        sweep.moved_bytes += outcome.moved_bytes;
        let elapsed_ns = self.env.clock.boot_ns().saturating_sub(sweep.began_ns).max(1);
        let mut stat = lock(&self.stat);
        stat.packed_bytes += outcome.moved_bytes;
        stat.extents += u64::from(outcome.moved_bytes > 0);
        stat.left_bytes = stat.left_bytes.saturating_sub(moved);
        stat.convert_bytes = stat.convert_bytes.saturating_sub(moved_alone);
        stat.bytes_per_s = (u128::from(sweep.moved_bytes) * 1_000_000_000 / u128::from(elapsed_ns)) as u64;
        Ok(())
    }
}
