//! The drive against a reference model, over a simulated disk that crashes, fails and rots.
//!
//! Checked: after every crash acknowledged puts are there and equal, and unacknowledged ones are there whole or not at
//! all; deleted shards stay deleted; the newest ledger position that came with an acknowledged put is kept; rotten
//! bytes are never returned as good; the space always adds up.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::common::*;
use base::LedgerId;
use base::env::sim::Sim;
use base::units::MIB;
use drive::{Drive, OpenOptions, Trim};
use proptest::prelude::*;
use wire::drive::{DriveService, GetShardError, PutShard, PutShardError, ShardKey};
use wire::position::Position;

const CAPACITY: u64 = 17 * MIB;
const PATH: &str = "drive";

#[derive(Debug, Clone)]
enum Step {
    /// Puts issued together: (extent, blocks).
    Puts(Vec<(u64, u32)>),
    Deletes(Vec<u64>),
    /// A put and a delete of another shard, issued together.
    Mixed(u64, u32, u64),
    Crash,
    /// The power fails after this number of device operations of the following steps.
    CutPowerAfter(u64),
    Close,
    FailSyncAfter(u64),
    FailWriteAfter(u64),
    /// No request for a while: time to clean and to give space back.
    Idle,
    /// Damages the newest index checkpoint if there is an older one, then crashes.
    DamageIndex,
    /// A request that only reports a ledger position.
    KeepPosition,
}

fn extent() -> impl Strategy<Value = u64> {
    1u64..40
}

fn blocks() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 1u32..5, 2 => 5u32..40, 1 => 40u32..90]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => prop::collection::vec((extent(), blocks()), 1..8).prop_map(Step::Puts),
        5 => prop::collection::vec(extent(), 1..6).prop_map(Step::Deletes),
        2 => (extent(), blocks(), extent()).prop_map(|(put, blocks, delete)| Step::Mixed(put, blocks, delete)),
        2 => Just(Step::Crash),
        2 => (0u64..30).prop_map(Step::CutPowerAfter),
        1 => Just(Step::Close),
        1 => (0u64..12).prop_map(Step::FailSyncAfter),
        1 => (0u64..12).prop_map(Step::FailWriteAfter),
        1 => Just(Step::DamageIndex),
        2 => Just(Step::KeepPosition),
        2 => Just(Step::Idle),
    ]
}

/// The answers that the drive may give for a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    Present(u32),
    Absent,
    /// A put or delete was not acknowledged: both answers are right, until one has been seen.
    Either(u32),
}

struct Run {
    sim: Sim,
    drive: Option<Arc<Drive>>,
    model: BTreeMap<ShardKey, Known>,
    options: OpenOptions,
    deletes: u64,
    /// The newest position reported to the drive, and the newest that it must have kept.
    told: u64,
    kept: u64,
}

impl Run {
    fn new(seed: u64, checkpoint_every_bytes: u64) -> Self {
        let sim = Sim::new(seed);
        format(&sim.env(), Path::new(PATH), CAPACITY);
        let (trim, trim_run_bytes) = (Trim::Always, 8192);
        let options =
            OpenOptions { checkpoint_every_bytes, trim, trim_run_bytes, ..OpenOptions::new(CLUSTER) };
        let mut run =
            Self { sim, drive: None, model: BTreeMap::new(), options, deletes: 0, told: 0, kept: 0 };
        run.reopen();
        run
    }

    fn drive(&self) -> &Drive {
        self.drive.as_ref().expect("the drive is open between steps")
    }

    fn reopen(&mut self) {
        self.drive = None;
        let drive = open_with(&self.sim.env(), Path::new(PATH), &self.options).unwrap();
        // Only an index was damaged, no block: recovery must not read space that was given back.
        assert_eq!(drive.recovery().damaged_records, 0);
        self.drive = Some(drive);
        self.check();
    }

    /// After a failure the drive answers nothing but `Failed`, until power comes back.
    fn crash_if_failed(&mut self) {
        if self.drive().stat().failure.is_some() {
            let drive = self.drive();
            assert!(matches!(block_on(drive.put(put(key(1), 1))), Err(PutShardError::Failed { .. })));
            assert!(block_on(drive.delete(vec![key(1)].into())).is_err());
            assert!(block_on(drive.list(None, 1)).is_err());
            assert!(matches!(get(drive, key(1), 0, 1), Err(GetShardError::Failed { .. })));
            self.crash();
        }
    }

    fn crash(&mut self) {
        self.sim.files.crash();
        // A crash in the middle of the recovery changes nothing about its result.
        for operations in [0, 1, 2, 4, 7] {
            self.drive = None;
            self.sim.files.cut_power_after(operations);
            let _ = open_with(&self.sim.env(), Path::new(PATH), &self.options).map(drop);
            self.sim.files.crash();
        }
        self.reopen();
    }

    /// Returns whether there was a checkpoint to damage.
    fn damage_index(&mut self) -> bool {
        self.drive = None;
        self.sim.files.crash();
        let dump = drive::dump(&self.sim.env(), Path::new(PATH)).unwrap();
        let slots = dump.superblocks.iter().filter_map(|slot| slot.superblock.as_ref());
        let newest = slots.max_by_key(|superblock| superblock.sequence).unwrap();
        let damages = newest.previous.generation > 0;
        if damages {
            let run = MIB + u64::from(newest.checkpoint.segments[0]) * newest.segment_bytes + 4096;
            self.sim.files.flip_bit(Path::new(PATH), run + 40, 3);
        }
        self.crash();
        damages
    }

    fn idle(&mut self) {
        self.idle_steps(12);
    }

    fn idle_steps(&mut self, steps: u32) {
        for _ in 0..steps {
            self.sim.clock.advance_ns(300_000_000);
            // A request must look at the clock: on a real drive the drive's thread does.
            let _ = block_on(self.drive().scrub(None, 1));
        }
    }

    fn next_position(&mut self) -> Position {
        self.told += 1;
        position(1, 1, self.told)
    }

    fn keep_position(&mut self) {
        let next = self.next_position();
        if block_on(self.drive().keep_positions(vec![next], false)).is_ok() {
            self.kept = self.told;
        }
    }

    fn check_position(&self, drive: &Drive) {
        let Ok(known) = block_on(drive.known_ledgers()) else { return };
        let kept = known.iter().find(|known| known.ledger == LedgerId(1)).and_then(|known| known.position);
        let kept = kept.map_or(0, |position| position.seq.0);
        assert!((self.kept..=self.told).contains(&kept), "{kept} told={} kept={}", self.told, self.kept);
    }

    fn known(&self, key: ShardKey) -> Known {
        self.model.get(&key).copied().unwrap_or(Known::Absent)
    }

    fn puts(&mut self, shards: &[(u64, u32)]) {
        let request = |(extent, blocks): &(u64, u32)| PutShard {
            position: Some(self.next_position()),
            ..put(key(*extent), *blocks)
        };
        let requests: Vec<_> = shards.iter().map(request).collect();
        let drive = self.drive.clone().unwrap();
        let results = join_all(requests.iter().map(|request| drive.put(request.clone())).collect());
        for (((extent, blocks), request), result) in shards.iter().zip(&requests).zip(results) {
            let key = key(*extent);
            let before = self.known(key);
            if result.is_ok() && before == Known::Absent {
                let position = request.position.map_or(0, |position| position.seq.0);
                self.kept = self.kept.max(position);
            }
            let after = match (result, before) {
                (Ok(()), Known::Present(have)) => {
                    assert_eq!(have, *blocks);
                    before
                }
                (Ok(()), _) => Known::Present(*blocks),
                (Err(PutShardError::Conflict { .. }), _) => {
                    assert_ne!(before, Known::Absent, "a conflict needs another shard");
                    before
                }
                (Err(PutShardError::Failed { .. }), Known::Absent) => Known::Either(*blocks),
                (Err(PutShardError::Failed { .. }), _) => before,
                (Err(PutShardError::NoSpace { .. }), _) => before,
                (Err(error), _) => panic!("{error}"),
            };
            self.model.insert(key, after);
        }
    }

    fn deletes(&mut self, extents: &[u64]) {
        let keys: Vec<_> = extents.iter().map(|extent| key(*extent)).collect();
        let result = block_on(self.drive().delete(keys.clone().into()));
        self.deletes += 1;
        for key in keys {
            self.note_delete(key, result.is_ok());
        }
    }

    fn note_delete(&mut self, key: ShardKey, acknowledged: bool) {
        let after = match (self.known(key), acknowledged) {
            (_, true) | (Known::Absent, _) => Known::Absent,
            (Known::Present(blocks) | Known::Either(blocks), false) => Known::Either(blocks),
        };
        self.model.insert(key, after);
    }

    fn mixed(&mut self, put_extent: u64, blocks: u32, delete_extent: u64) {
        if put_extent == delete_extent {
            return self.deletes(&[delete_extent]);
        }
        let drive = self.drive.clone().unwrap();
        let request = put(key(put_extent), blocks);
        let before = self.known(key(put_extent));
        let put = async { drive.put(request).await.map(|()| true).map_err(|error| error.to_string()) };
        let delete = async {
            drive
                .delete(vec![key(delete_extent)].into())
                .await
                .map(|()| false)
                .map_err(|error| error.to_string())
        };
        let results = join_all(vec![Box::pin(put), Box::pin(delete)]);
        if results[0].is_ok() && before == Known::Absent {
            self.model.insert(key(put_extent), Known::Present(blocks));
        } else if results[0].is_err() && before == Known::Absent {
            self.model.insert(key(put_extent), Known::Either(blocks));
        }
        self.note_delete(key(delete_extent), results[1].is_ok());
    }

    /// Compares everything. After that, shards in doubt are known and must stay so. Idle work may meet a fault that an
    /// earlier step planned: then the drive has failed, and there is nothing to compare yet.
    fn check(&mut self) {
        let drive = self.drive.clone().unwrap();
        check_stat(&drive);
        self.check_position(&drive);
        let Ok(listed) = block_on(drive.list(None, 10_000)) else {
            return assert!(drive.stat().failure.is_some());
        };
        assert!(listed.is_sorted_by_key(|entry| entry.key));
        let listed: BTreeMap<_, _> =
            listed.into_iter().map(|entry| (entry.key, entry.len_bytes / 4096)).collect();
        for (key, known) in &mut self.model {
            let there = listed.get(key).copied();
            match *known {
                Known::Present(blocks) => assert_eq!(there, Some(blocks), "{key:?}"),
                Known::Absent => assert_eq!(there, None, "{key:?}"),
                Known::Either(blocks) => {
                    assert!(there.is_none_or(|there| there == blocks), "{key:?}");
                    *known = there.map_or(Known::Absent, Known::Present);
                }
            }
        }
        for (key, blocks) in &listed {
            assert!(self.model.contains_key(key), "{key:?} was never put");
            match get(&drive, *key, 0, *blocks) {
                Ok(got) => assert_eq!(got.bytes, content(*key, *blocks), "{key:?}"),
                Err(GetShardError::Failed { .. }) => return assert!(drive.stat().failure.is_some()),
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Puts(shards) => self.puts(shards),
            Step::Deletes(extents) => self.deletes(extents),
            Step::Mixed(put, blocks, delete) => self.mixed(*put, *blocks, *delete),
            Step::Crash => self.crash(),
            Step::CutPowerAfter(operations) => self.sim.files.cut_power_after(*operations),
            Step::Close => {
                let _ = block_on(self.drive().close());
                if self.drive().stat().failure.is_none() {
                    self.drive = None;
                    match open_with(&self.sim.env(), Path::new(PATH), &self.options) {
                        Ok(drive) => self.drive = Some(drive),
                        // An earlier step planned a fault.
                        Err(_) => self.crash(),
                    }
                    self.check();
                }
            }
            Step::FailSyncAfter(count) => self.sim.files.fail_sync_after(*count),
            Step::FailWriteAfter(count) => self.sim.files.fail_write_after(*count),
            Step::Idle => self.idle(),
            Step::DamageIndex => {
                self.damage_index();
            }
            Step::KeepPosition => self.keep_position(),
        }
        self.crash_if_failed();
        check_stat(self.drive());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, max_shrink_iters: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn acknowledged_shards_survive_everything(
        seed in any::<u64>(),
        // From "in nearly every step" to "only when the drive is nearly full".
        checkpoint_every in prop_oneof![Just(16u64 << 10), Just(1 << 20), Just(256 << 20)],
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut run = Run::new(seed, checkpoint_every);
        for step in &steps {
            run.step(step);
        }
        run.sim.files.clear_faults();
        run.crash();
    }
}

/// Fills and empties a drive many times over, so that segments are reused and cleaned, with crashes.
#[test]
fn shards_survive_reuse_cleaning_and_crashes() {
    for seed in 0..6 {
        let mut run = Run::new(seed, 2 << 20);
        let mut random = seed;
        let mut next = move |limit: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % limit
        };
        let (mut damaged, mut trimmed_bytes) = (0, 0);
        for round in 0..1200 {
            let extent = 1 + next(220);
            if round % 100 == 99 {
                trimmed_bytes += run.drive().stat().trimmed_bytes;
                damaged += u32::from(run.damage_index());
            }
            match next(10) {
                0..=5 => run.puts(&[(extent, 1 + next(60) as u32)]),
                6..=8 => run.deletes(&[extent, 1 + next(220)]),
                _ if round % 3 == 0 => run.idle(),
                _ if round % 5 == 0 => run.sim.files.cut_power_after(next(60)),
                _ => {}
            }
            run.crash_if_failed();
            check_stat(run.drive());
        }
        run.crash();
        assert!(damaged > 3, "an older checkpoint was used {damaged} times");
        assert!(trimmed_bytes > 10 * MIB, "{trimmed_bytes} bytes were given back");
    }
}

/// Space that was given back must not be needed by the older checkpoint either, however short the idle time was.
#[test]
fn a_recovery_from_the_older_checkpoint_misses_nothing_that_was_given_back() {
    let mut trimmed_bytes = 0;
    for steps in 0..40 {
        let mut run = Run::new(u64::from(steps), 256 << 20);
        run.crash();
        let shards: Vec<(u64, u32)> = (1..60).map(|extent| (extent, 20)).collect();
        shards.chunks(4).for_each(|some| run.puts(some));
        run.deletes(&(1..60).step_by(12).collect::<Vec<_>>());
        run.idle_steps(steps);
        trimmed_bytes = run.drive().stat().trimmed_bytes;
        run.damage_index();
    }
    // All free segments, and runs in those that stay.
    assert!(trimmed_bytes > 10 * MIB && !trimmed_bytes.is_multiple_of(MIB), "{trimmed_bytes}");
}

/// The older checkpoint lists a segment as full that died and was reused since. A recovery from that checkpoint must
/// see this, also after a crash between the fall back and the next checkpoint.
#[test]
fn a_segment_that_was_used_again_is_found_from_the_checkpoint_before() {
    let mut used = 0;
    for seed in 0..24 {
        let mut run = Run::new(seed, 1 << 20);
        let mut random = seed;
        let mut next = move |limit: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % limit
        };
        for extent in 1..160 {
            run.puts(&[(extent, 1 + next(80) as u32)]);
            run.deletes(&[1 + next(extent), extent.saturating_sub(9).max(1)]);
            match next(24) {
                // Segments that are dead when a drive is closed are free when it is opened.
                0 => run.step(&Step::Close),
                1 => used += u32::from(run.damage_index()),
                _ => {}
            }
        }
    }
    assert!(used > 12, "an older checkpoint was used {used} times");
}
