//! Gathers small pieces into full extents, and rewrites extents that are mostly dead or of another shape than new
//! ones.
//!
//! The packer sweeps over all maps in order, so that what lies together in a directory or file and was written at
//! the same time is packed together. Small pieces and inline content must have been seen unchanged for a while:
//! most of what is young is overwritten or removed soon. Only fragments are rewritten, never the large extents
//! around them, so a file that is changed here and there does not cost more than its changes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::checksum::crc32c;
use base::env::Env;
use base::{ExtentId, FsError};
use client::{Client, MapEntry, PACK_ALIGN, PackTarget, PiecePosition};
use tokio::runtime::Handle;
use wire::meta::{Content, PACK_MOVES_MAX};

use crate::pace::{Leave, Pace};
use crate::task::{Stopped, Task};

/// Inline content shorter than this costs less in the metadata than elsewhere.
const INLINE_BYTES_MIN: u64 = 1024;
/// Young pieces remembered from one sweep to the next.
const YOUNG_MAX: usize = 262_144;
/// A sweep may take this part of the time: the pause after it is so many times longer.
const REST: u32 = 8;
/// An extent of which less than one part in so many is alive is rewritten.
const SPARSE: u64 = 2;

/// When a packer acts.
#[derive(Debug, Clone, Copy)]
pub struct PackOptions {
    /// How long a small piece must have been seen unchanged.
    pub age: Duration,
    /// Shortest pause between two sweeps.
    pub pause: Duration,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self { age: Duration::from_secs(30), pause: Duration::from_secs(15) }
    }
}

/// What a packer has done since it was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PackStat {
    /// Bytes that lie in new extents.
    pub packed_bytes: u64,
    /// New extents.
    pub extents: u64,
    /// Bytes that should move, as far as the last sweep has come.
    pub left_bytes: u64,
    /// Bytes per second in the sweep under way or the last one.
    pub bytes_per_s: u64,
    /// Sweeps that came to the end.
    pub sweeps: u64,
}

impl PackStat {
    /// How long the rest takes at the present rate.
    pub fn eta_s(&self) -> Option<u64> {
        self.left_bytes.checked_div(self.bytes_per_s)
    }
}

/// Packs one filesystem, in the background.
pub struct Packer {
    stat: Arc<Mutex<PackStat>>,
    task: Task,
}

impl Packer {
    /// Starts.
    pub fn start(env: Env, client: Client, pace: Arc<Pace>, options: PackOptions, runtime: &Handle) -> Self {
        let stat = Arc::default();
        let told = Arc::clone(&stat);
        let (young, swept) = Default::default();
        let work = |stopped| Work { env, client, pace, options, stat: told, stopped, young, swept }.run();
        Self { stat, task: Task::start(runtime, work) }
    }

    /// Ends after the step under way.
    pub async fn stop(self) {
        self.task.stop().await;
    }

    /// What it has done.
    pub fn stat(&self) -> PackStat {
        *lock(&self.stat)
    }
}

fn lock(stat: &Mutex<PackStat>) -> MutexGuard<'_, PackStat> {
    stat.lock().expect("no holder of this lock panics")
}

/// Whether a piece moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// It lies well.
    Stay,
    /// Once it has been seen unchanged for a while, with enough others.
    WhenOld,
    /// With enough others.
    Move,
    /// However few there are: it is not protected as it should be.
    MoveAlone,
}

fn judge(entry: &MapEntry, target: &PackTarget) -> Verdict {
    let extent = match &entry.piece.content {
        Content::Inline(_) if entry.piece.len < INLINE_BYTES_MIN => return Verdict::Stay,
        Content::Inline(_) => return Verdict::WhenOld,
        Content::Extent(extent) => extent,
    };
    let extent_len = u64::from(extent.extent_len);
    let live_bytes = entry.live_bytes.unwrap_or(extent_len);
    if live_bytes > extent_len {
        // Shared by clones: each would get a copy of its own.
        return Verdict::Stay;
    }
    let small = extent.k == 1 && extent.extent_len <= target.copies_bytes;
    let profile = target.profile;
    let right =
        if small { extent.n == profile.m() + 1 } else { (extent.k, extent.n) == (profile.k(), profile.n()) };
    match () {
        () if !right && !target.narrowed => Verdict::MoveAlone,
        () if small => Verdict::WhenOld,
        () if live_bytes * SPARSE < extent_len => Verdict::Move,
        () => Verdict::Stay,
    }
}

/// Tells whether a piece is the one that was seen before.
fn fingerprint(entry: &MapEntry) -> u64 {
    match &entry.piece.content {
        Content::Inline(bytes) => u64::from(crc32c(bytes)) << 32 | entry.piece.len,
        Content::Extent(extent) => {
            let ExtentId(id) = extent.id;
            id ^ u64::from(extent.extent_off).rotate_left(40)
        }
    }
}

/// Pieces that go into the next extent.
#[derive(Default)]
struct Load {
    entries: Vec<MapEntry>,
    bytes: u64,
    /// One of them moves however few there are.
    urgent: bool,
}

impl Load {
    fn takes(&self, entry: &MapEntry, target: &PackTarget) -> bool {
        let bytes = self.bytes + entry.piece.len.next_multiple_of(PACK_ALIGN);
        self.entries.len() < PACK_MOVES_MAX && bytes <= u64::from(target.extent_bytes)
    }

    fn put(&mut self, entry: MapEntry, verdict: Verdict) {
        self.bytes += entry.piece.len.next_multiple_of(PACK_ALIGN);
        self.urgent |= verdict == Verdict::MoveAlone;
        self.entries.push(entry);
    }

    /// Whether it is worth an extent that is not full.
    fn pays(&self, target: &PackTarget) -> bool {
        let quarter = u64::from(target.extent_bytes) / 4;
        self.urgent || self.bytes > quarter.max(u64::from(target.copies_bytes))
    }
}

struct Work {
    env: Env,
    client: Client,
    pace: Arc<Pace>,
    options: PackOptions,
    stat: Arc<Mutex<PackStat>>,
    stopped: Stopped,
    /// Small pieces, with what they looked like and when that was seen first.
    young: HashMap<PiecePosition, (u64, u64)>,
    /// The ledger's version and the target at the last sweep, if that left nothing for later.
    swept: Option<(u64, PackTarget)>,
}

impl Work {
    async fn run(mut self) {
        while !self.stopped.now() {
            let began_ns = self.env.clock.boot_ns();
            if let Err(error) = self.sweep().await {
                tracing::warn!(%error, "packing pauses");
            }
            let took = Duration::from_nanos(self.env.clock.boot_ns().saturating_sub(began_ns));
            let pause = self.options.pause.max(took * REST);
            self.stopped.or_after(pause).await;
        }
    }

    fn is_old(&self, since_ns: u64) -> bool {
        let age_ns = self.env.clock.boot_ns().saturating_sub(since_ns);
        u128::from(age_ns) >= self.options.age.as_nanos()
    }

    /// One look at every piece there is.
    async fn sweep(&mut self) -> Result<(), FsError> {
        let now = (self.client.ledger_version(), self.client.pack_target());
        if self.swept == Some(now) || self.pace.is_paused() {
            return Ok(());
        }
        let target = now.1;
        let began_ns = self.env.clock.boot_ns();
        let (mut load, mut after, mut moved) = (Load::default(), None, 0);
        let mut young = HashMap::new();
        lock(&self.stat).left_bytes = 0;
        loop {
            let (entries, next) = self.client.scan_map(after).await?;
            for entry in entries {
                for part in self.wanted(entry, &target, &mut young) {
                    lock(&self.stat).left_bytes += part.0.piece.len;
                    if !load.takes(&part.0, &target) {
                        moved += self.ship(std::mem::take(&mut load), began_ns, moved).await?;
                    }
                    load.put(part.0, part.1);
                }
                if self.stopped.now() {
                    return Ok(());
                }
            }
            after = next;
            if after.is_none() {
                break;
            }
            tokio::task::yield_now().await;
        }
        if load.pays(&target) {
            moved += self.ship(load, began_ns, moved).await?;
        }
        // What is old enough and was left would be left again, until something changes.
        let ripens = young.values().any(|(_, since)| !self.is_old(*since));
        self.swept = (!ripens && moved == 0).then_some(now);
        self.young = young;
        lock(&self.stat).sweeps += 1;
        Ok(())
    }

    /// The parts of a piece that move now; what is too young is remembered.
    fn wanted(
        &self,
        entry: MapEntry,
        target: &PackTarget,
        young: &mut HashMap<PiecePosition, (u64, u64)>,
    ) -> Vec<(MapEntry, Verdict)> {
        let mut verdict = judge(&entry, target);
        if verdict == Verdict::WhenOld {
            let now = self.env.clock.boot_ns();
            let print = fingerprint(&entry);
            let known = self.young.get(&entry.position()).filter(|(known, _)| *known == print);
            let since = known.map_or(now, |(_, since)| *since);
            if young.len() < YOUNG_MAX {
                young.insert(entry.position(), (print, since));
            }
            if known.is_some() && self.is_old(since) {
                verdict = Verdict::Move;
            }
        }
        if matches!(verdict, Verdict::Stay | Verdict::WhenOld) {
            return Vec::new();
        }
        // A piece of an extent of another profile may be longer than an extent is now.
        let step = u64::from(target.extent_bytes);
        let (from, end) = (entry.piece.off, entry.piece.end());
        let cuts = (from..end).step_by(step as usize);
        let part = |at: u64| entry.piece.clip(at, at + step).map(|piece| MapEntry { piece, ..entry.clone() });
        cuts.filter_map(part).map(|part| (part, verdict)).collect()
    }

    /// Packs a load when the pace allows it. Returns the bytes moved.
    async fn ship(&mut self, load: Load, began_ns: u64, moved_before: u64) -> Result<u64, FsError> {
        if load.entries.is_empty() {
            return Ok(0);
        }
        while self.pace.leave(load.bytes, self.client.strained()).await == Leave::NotYet {
            if self.stopped.now() {
                return Ok(0);
            }
        }
        let positions: Vec<PiecePosition> = load.entries.iter().map(MapEntry::position).collect();
        let outcome = self.client.pack(load.entries).await?;
        for position in positions {
            self.young.remove(&position);
        }
        let elapsed_ns = self.env.clock.boot_ns().saturating_sub(began_ns).max(1);
        let mut stat = lock(&self.stat);
        stat.packed_bytes += outcome.moved_bytes;
        stat.extents += u64::from(outcome.moved_bytes > 0);
        stat.left_bytes = stat.left_bytes.saturating_sub(load.bytes);
        let moved = moved_before + outcome.moved_bytes;
        stat.bytes_per_s = (u128::from(moved) * 1_000_000_000 / u128::from(elapsed_ns)) as u64;
        Ok(outcome.moved_bytes)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use base::{MapId, PgId};
    use bytes::Bytes;
    use layout::extent_bytes_max;
    use wire::meta::{ExtentRef, MapPiece};

    fn target(profile: &str) -> PackTarget {
        let profile = profile.parse().unwrap();
        let extent_bytes = extent_bytes_max(profile);
        PackTarget { profile, narrowed: false, extent_bytes, copies_bytes: 256 << 10 }
    }

    /// A piece of an extent of `k` of `n` shards and `extent_len` bytes, of which `live` are alive.
    fn extent(k: u8, n: u8, extent_len: u32, live: Option<u64>) -> MapEntry {
        let extent = ExtentRef { id: ExtentId(7), pg: PgId(0), k, n, extent_len, extent_off: 0 };
        let len = live.unwrap_or(extent_len.into()).min(extent_len.into());
        let piece = MapPiece { off: 0, len, content: Content::Extent(extent) };
        MapEntry { map: MapId(1), piece, live_bytes: live }
    }

    fn inline(len: usize) -> MapEntry {
        let content = Content::Inline(Bytes::from(vec![1; len]));
        MapEntry { map: MapId(1), piece: MapPiece { off: 0, len: len as u64, content }, live_bytes: None }
    }

    #[test]
    fn fragments_move_and_full_extents_stay() {
        let mib = 1 << 20;
        let cases = [
            (inline(100), Verdict::Stay),
            (inline(4096), Verdict::WhenOld),
            (extent(1, 3, 9000, None), Verdict::WhenOld),
            (extent(4, 6, 4 * mib, None), Verdict::Stay),
            (extent(4, 6, 4 * mib, Some(3 << 20)), Verdict::Stay),
            (extent(4, 6, 4 * mib, Some(1 << 20)), Verdict::Move),
            // Two clones of a whole extent, and of half of one.
            (extent(4, 6, 4 * mib, Some(8 << 20)), Verdict::Stay),
            (extent(1, 3, 9000, Some(18_000)), Verdict::Stay),
            // Narrow, of another profile, with fewer copies.
            (extent(2, 4, 2 * mib, None), Verdict::MoveAlone),
            (extent(1, 2, mib, None), Verdict::MoveAlone),
            (extent(1, 1, 9000, None), Verdict::MoveAlone),
        ];
        for (entry, expected) in cases {
            assert_eq!(judge(&entry, &target("4+2")), expected, "{entry:?}");
        }
    }

    #[test]
    fn while_drives_are_missing_nothing_is_made_narrow() {
        let narrowed = PackTarget { narrowed: true, ..target("2+2") };
        assert_eq!(judge(&extent(4, 6, 4 << 20, None), &narrowed), Verdict::Stay);
        assert_eq!(judge(&extent(1, 3, 9000, None), &narrowed), Verdict::WhenOld);
    }

    #[test]
    fn a_load_fits_an_extent_and_little_is_not_worth_one() {
        let target = target("4+2");
        let mut load = Load::default();
        while load.takes(&extent(1, 3, 1_000_000, None), &target) {
            assert_eq!(load.pays(&target), load.bytes > 1 << 20);
            load.put(extent(1, 3, 1_000_000, None), Verdict::Move);
        }
        assert_eq!(load.entries.len(), 4);
        let mut whole = Load::default();
        assert!(whole.takes(&extent(4, 5, 4 << 20, None), &target));
        whole.put(extent(1, 1, 5, None), Verdict::MoveAlone);
        assert!(whole.pays(&target), "what is not protected moves however little it is");
        let mut many = Load::default();
        (0..PACK_MOVES_MAX).for_each(|_| many.put(inline(1024), Verdict::Move));
        assert!(!many.takes(&inline(1024), &target));
    }
}
