//! Damaged, foreign and failing devices: damaged bytes are never returned as good, and every refusal names the reason.

use std::path::Path;

use crate::common::*;
use base::checksum::crc32c;
use base::env::sim::Sim;
use base::env::{Env, Files};
use base::units::MIB;
use drive::{Drive, Existing, FormatDriveError, OpenDriveError, dump, fsck};
use proptest::prelude::*;
use wire::drive::{DriveService, GetShardError, PutShardError, ShardKey};

const CAPACITY: u64 = 17 * MIB;
const PATH: &str = "drive";

fn path() -> &'static Path {
    Path::new(PATH)
}

/// How the drive was left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    Closed,
    Crashed,
}

/// A drive with shards 1..=count of 1 to 7 blocks, one frame each.
fn filled(sim: &Sim, count: u64, left: Left) -> Vec<(ShardKey, u32)> {
    format(&sim.env(), path(), CAPACITY);
    let drive = open(&sim.env(), path()).unwrap();
    let shards: Vec<_> = (1..=count).map(|extent| (key(extent), 1 + (extent % 7) as u32)).collect();
    for (key, blocks) in &shards {
        block_on(drive.put(put(*key, *blocks))).unwrap();
    }
    match left {
        Left::Closed => block_on(drive.close()).unwrap(),
        Left::Crashed => {
            drop(drive);
            sim.files.crash();
        }
    }
    shards
}

/// Every answer is right or an error. Returns the number of readable shards.
fn check_answers(drive: &Drive, shards: &[(ShardKey, u32)]) -> usize {
    check_stat(drive);
    let mut good = 0;
    for (key, blocks) in shards {
        match get(drive, *key, 0, *blocks) {
            Ok(got) => {
                assert_eq!(got.bytes, content(*key, *blocks), "{key:?}");
                good += 1;
            }
            Err(GetShardError::Corrupt { .. } | GetShardError::NotFound { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    good
}

/// Offset of a shard's payload on the device.
fn payload_offset(env: &Env, key: ShardKey) -> u64 {
    let dump = dump(env, path()).unwrap();
    let frames = dump.segments().flat_map(|segment| segment.frames).collect::<Vec<_>>();
    let records = frames.iter().flat_map(|frame| &frame.records);
    records.filter(|record| record.key == key).filter_map(|record| record.offset).next_back().unwrap()
}

/// Offset of the frame with a shard.
fn frame_offset(env: &Env, key: ShardKey) -> u64 {
    let dump = dump(env, path()).unwrap();
    let frames = dump.segments().flat_map(|segment| segment.frames).collect::<Vec<_>>();
    frames.iter().find(|frame| frame.records.iter().any(|record| record.key == key)).unwrap().offset
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn flipped_bits_are_never_returned_as_good(
        seed in any::<u64>(),
        left in prop_oneof![Just(Left::Closed), Just(Left::Crashed)],
        // The first three MiB hold the superblocks and the segments in use.
        flips in prop::collection::vec((0u64..3 * MIB, 0u8..8), 1..200),
    ) {
        let sim = Sim::new(seed);
        let crashed = matches!(left, Left::Crashed);
        let shards = filled(&sim, 60, left);
        for (byte, bit) in flips {
            sim.files.flip_bit(path(), byte, bit);
        }
        let found = fsck(&sim.env(), path());
        if let Ok(drive) = open(&sim.env(), path()) {
            let good = check_answers(&drive, &shards);
            let report = found.unwrap();
            prop_assert_eq!(report.shards - report.damaged_shards, good as u64);
            // Damage to the newest frame of a drive that was not closed looks like a write that was cut off.
            let newest = *shards.last().unwrap();
            let torn = crashed && check_answers(&drive, &[newest]) == 0 && good + 1 == shards.len();
            prop_assert!(!report.clean || good == shards.len() || torn);
        }
        for segment in dump(&sim.env(), path()).into_iter().flat_map(|dump| dump.segments().collect::<Vec<_>>()) {
            prop_assert!(serde_json::to_string(&segment).is_ok());
        }
    }

    #[test]
    fn misplaced_and_random_blocks_never_panic_nor_pass(
        seed in any::<u64>(),
        left in prop_oneof![Just(Left::Closed), Just(Left::Crashed)],
        changes in prop::collection::vec((0usize..700, 0usize..700, any::<u8>(), any::<bool>()), 1..40),
    ) {
        let sim = Sim::new(seed);
        let shards = filled(&sim, 60, left);
        let mut image = sim.files.read(path()).unwrap();
        for (to, from, byte, copy) in changes {
            if copy {
                image.copy_within(from * 4096..(from + 1) * 4096, to * 4096);
            } else {
                image[to * 4096..(to + 1) * 4096].fill(byte);
            }
        }
        sim.files.put_image(path(), &image);
        let _ = fsck(&sim.env(), path());
        if let Ok(drive) = open(&sim.env(), path()) {
            check_answers(&drive, &shards);
        }
    }
}

#[test]
fn damage_behind_a_checkpoint_costs_that_shard_only() {
    let sim = Sim::new(1);
    let shards = filled(&sim, 30, Left::Closed);
    let offset = payload_offset(&sim.env(), key(5));
    sim.files.flip_bit(path(), offset + 3, 2);
    let report = fsck(&sim.env(), path()).unwrap();
    assert_eq!((report.damaged.clone(), report.shards, report.clean), (vec![key(5)], 30, false));
    let drive = open(&sim.env(), path()).unwrap();
    assert_eq!(check_answers(&drive, &shards), 29);
    assert!(matches!(get(&drive, key(5), 0, 1), Err(GetShardError::Corrupt { .. })));
    assert_eq!(drive.corrupt_reads(), 2);
    // Writing the shard again heals it.
    block_on(drive.put(put(key(5), shards[4].1))).unwrap();
    assert_eq!(check_answers(&drive, &shards), 30);
    block_on(drive.close()).unwrap();
    drop(drive);
    assert!(fsck(&sim.env(), path()).unwrap().clean);
}

/// Scrubs the whole drive in steps of `budget_bytes`.
fn scrub(drive: &Drive, budget_bytes: u64) -> (u64, Vec<ShardKey>) {
    let (mut after, mut verified_bytes, mut bad) = (None, 0, Vec::new());
    loop {
        let step = block_on(drive.scrub(after, budget_bytes)).unwrap();
        assert!(step.next > after || step.next.is_none());
        verified_bytes += step.verified_bytes;
        bad.extend(step.bad);
        after = step.next;
        if after.is_none() {
            return (verified_bytes, bad);
        }
    }
}

#[test]
fn a_scrub_finds_what_is_damaged_and_a_put_heals_it() {
    for budget_bytes in [1, 10_000, u64::MAX] {
        let sim = Sim::new(1);
        let shards = filled(&sim, 30, Left::Closed);
        let (flipped, broken) = (payload_offset(&sim.env(), key(5)), payload_offset(&sim.env(), key(9)));
        let drive = open(&sim.env(), path()).unwrap();
        let all_bytes: u64 = shards.iter().map(|(_, blocks)| u64::from(*blocks) * 4096).sum();
        assert_eq!(scrub(&drive, budget_bytes), (all_bytes, Vec::new()));
        sim.files.flip_bit(path(), flipped + 3, 2);
        sim.files.break_range(path(), broken..broken + 1);
        let lost = [shards[4].1, shards[8].1].iter().map(|blocks| u64::from(*blocks) * 4096).sum::<u64>();
        assert_eq!(scrub(&drive, budget_bytes), (all_bytes - lost, vec![key(5), key(9)]));
        assert_eq!(drive.stat().bad_shards, 2);
        for index in [4, 8] {
            let (key, blocks) = shards[index];
            block_on(drive.put(put(key, blocks))).unwrap();
        }
        assert_eq!(drive.stat().bad_shards, 0);
        assert_eq!(scrub(&drive, budget_bytes), (all_bytes, Vec::new()));
        check_stat(&drive);
    }
}

#[test]
fn a_shard_that_a_read_found_damaged_is_rewritten_by_the_next_put() {
    let sim = Sim::new(1);
    let shards = filled(&sim, 30, Left::Closed);
    let offset = payload_offset(&sim.env(), key(5));
    let drive = open(&sim.env(), path()).unwrap();
    sim.files.flip_bit(path(), offset, 0);
    assert!(get(&drive, key(5), 0, 1).is_err());
    assert_eq!(drive.stat().bad_shards, 1);
    // The shard now reads well again, as it may from a cache. The earlier finding still counts.
    sim.files.flip_bit(path(), offset, 0);
    let before = sim.files.operations().0;
    block_on(drive.put(put(key(5), shards[4].1))).unwrap();
    assert!(sim.files.operations().0 > before, "it is written again");
    assert_eq!(drive.stat().bad_shards, 0);
    let other = put_of(key(5), wire::drive::ShardClass::Small, vec![5; 4096]);
    assert!(matches!(block_on(drive.put(other)), Err(PutShardError::Conflict { .. })));
}

#[test]
fn a_read_error_costs_that_shard_only() {
    let sim = Sim::new(1);
    let shards = filled(&sim, 30, Left::Closed);
    let offset = payload_offset(&sim.env(), key(5));
    sim.files.break_range(path(), offset..offset + 1);
    let drive = open(&sim.env(), path()).unwrap();
    assert_eq!(check_answers(&drive, &shards), 29);
    assert_eq!(drive.corrupt_reads(), 1);
    assert!(drive.stat().failure.is_none(), "a bad sector is not a failed drive");
}

#[test]
fn damage_in_the_replayed_part_costs_the_damaged_records_only() {
    for (at_payload, lost_frames, damaged) in [(true, 0, 1), (false, 1, 0)] {
        let sim = Sim::new(1);
        let shards = filled(&sim, 30, Left::Crashed);
        let env = sim.env();
        let offset = if at_payload { payload_offset(&env, key(5)) } else { frame_offset(&env, key(5)) + 100 };
        sim.files.flip_bit(path(), offset, 0);
        let drive = open(&env, path()).unwrap();
        let report = drive.recovery();
        assert_eq!((report.lost_frames, report.damaged_records), (lost_frames, damaged), "{report:?}");
        assert_eq!(check_answers(&drive, &shards), 29);
        drop(drive);
        let drive = open(&env, path()).unwrap();
        assert_eq!(check_answers(&drive, &shards), 29);
    }
}

#[test]
fn one_superblock_is_enough_and_the_other_is_restored() {
    for offset in [0, 64 << 10] {
        let sim = Sim::new(1);
        let shards = filled(&sim, 10, Left::Closed);
        sim.files.flip_bit(path(), offset + 20, 0);
        assert_eq!(fsck(&sim.env(), path()).unwrap().superblocks, 1);
        let drive = open(&sim.env(), path()).unwrap();
        assert_eq!(check_answers(&drive, &shards), 10);
        block_on(drive.close()).unwrap();
        drop(drive);
        assert!(fsck(&sim.env(), path()).unwrap().clean);
    }
}

#[test]
fn either_superblock_is_enough_wherever_a_checkpoint_was_cut_off() {
    let mut both = 0;
    for operations in 0..40 {
        let sim = Sim::new(operations);
        let mut shards = filled(&sim, 10, Left::Closed);
        let drive = open(&sim.env(), path()).unwrap();
        block_on(drive.put(put(key(11), 3))).unwrap();
        shards.push((key(11), 3));
        sim.files.cut_power_after(operations);
        let _ = block_on(drive.close());
        drop(drive);
        sim.files.crash();
        let image = sim.files.read(path()).unwrap();
        for slot in [0, 64 << 10] {
            sim.files.put_image(path(), &image);
            sim.files.flip_bit(path(), slot + 20, 0);
            // The other superblock may be torn.
            let Ok(drive) = open(&sim.env(), path()) else { continue };
            both += 1;
            assert_eq!(check_answers(&drive, &shards), 11, "{operations} {slot}");
        }
    }
    assert!(both > 75, "{both} of 80");
}

#[test]
fn a_damaged_checkpoint_is_replaced_by_the_one_before() {
    for left in [Left::Closed, Left::Crashed] {
        let sim = Sim::new(1);
        let mut shards = filled(&sim, 60, Left::Closed);
        // Two more checkpoints, with shards that are put and deleted in between.
        for extent in [61, 62] {
            let drive = open(&sim.env(), path()).unwrap();
            block_on(drive.put(put(key(extent), 2))).unwrap();
            block_on(drive.delete(vec![key(extent - 60)].into())).unwrap();
            block_on(drive.close()).unwrap();
            shards.push((key(extent), 2));
        }
        let drive = open(&sim.env(), path()).unwrap();
        block_on(drive.put(put(key(63), 2))).unwrap();
        shards.push((key(63), 2));
        if left == Left::Closed {
            block_on(drive.close()).unwrap();
        }
        drop(drive);
        sim.files.crash();
        flip_newest_checkpoint(&sim);
        let report = fsck(&sim.env(), path()).unwrap();
        assert!(report.recovery.fell_back && !report.clean, "{report:?}");
        let drive = open(&sim.env(), path()).unwrap();
        assert!(drive.recovery().fell_back);
        assert_eq!(check_answers(&drive, &shards), 61);
        assert!(get(&drive, key(1), 0, 1).is_err() && get(&drive, key(2), 0, 1).is_err());
        drop(drive);
        sim.files.crash();
        // The open wrote two new checkpoints: the next damage is survived too.
        flip_newest_checkpoint(&sim);
        let drive = open(&sim.env(), path()).unwrap();
        assert!(drive.recovery().fell_back);
        assert_eq!(check_answers(&drive, &shards), 61);
        block_on(drive.close()).unwrap();
        drop(drive);
        assert!(fsck(&sim.env(), path()).unwrap().clean);
    }
}

/// Damages the first run of the checkpoint that the newest superblock points to.
fn flip_newest_checkpoint(sim: &Sim) {
    let dump = dump(&sim.env(), path()).unwrap();
    let slots = dump.superblocks.iter().filter_map(|slot| slot.superblock.as_ref());
    let newest = slots.max_by_key(|superblock| superblock.sequence).unwrap();
    let at = MIB + u64::from(newest.checkpoint.segments[0]) * newest.segment_bytes + 4096;
    sim.files.flip_bit(path(), at + 40, 0);
}

#[test]
fn the_cleaner_does_not_make_damage_look_good() {
    let sim = Sim::new(3);
    format(&sim.env(), path(), CAPACITY);
    let drive = open(&sim.env(), path()).unwrap();
    for extent in 1..=8 {
        block_on(drive.put(put(key(extent), 3))).unwrap();
    }
    sim.files.flip_bit(path(), payload_offset(&sim.env(), key(5)), 1);
    // Short-lived shards beside some that stay use up every segment several times, so the first segment must be
    // cleaned.
    for round in 0..3000 {
        if (100..180).contains(&round) {
            block_on(drive.put(put(key(5000 + round), 12))).unwrap();
        }
        block_on(drive.put(put(key(1000 + round), 12))).unwrap();
        block_on(drive.delete(vec![key(1000 + round)].into())).unwrap();
    }
    let moved = payload_offset(&sim.env(), key(4));
    assert!(moved > 2 * MIB, "the first segment was cleaned");
    let check = |drive: &Drive| {
        for extent in 1..=8 {
            let got = get(drive, key(extent), 0, 3);
            assert_eq!(got.is_ok(), extent != 5);
        }
        assert!(matches!(get(drive, key(5), 0, 3), Err(GetShardError::Corrupt { .. })));
    };
    check(&drive);
    drop(drive);
    sim.files.crash();
    let drive = open(&sim.env(), path()).unwrap();
    check(&drive);
    block_on(drive.put(put(key(5), 3))).unwrap();
    assert_eq!(get(&drive, key(5), 0, 3).unwrap().bytes, content(key(5), 3));
}

/// Changes bytes of both superblocks and corrects their checksums.
fn patch_superblocks(sim: &Sim, at: usize, bytes: &[u8]) {
    let mut image = sim.files.read(path()).unwrap();
    for offset in [0, 64 << 10] {
        let block = &mut image[offset..offset + 4096];
        block[at..at + bytes.len()].copy_from_slice(bytes);
        block[8..12].fill(0);
        let crc = crc32c(block);
        block[8..12].copy_from_slice(&crc.to_le_bytes());
    }
    sim.files.put_image(path(), &image);
}

#[track_caller]
fn check_refused(break_it: impl Fn(&Sim), expected: fn(&OpenDriveError) -> bool) {
    let sim = Sim::new(1);
    filled(&sim, 3, Left::Closed);
    break_it(&sim);
    let before = sim.files.read(path()).unwrap();
    let error = open(&sim.env(), path()).err().expect("it is refused");
    assert!(expected(&error), "{error:?}");
    assert!(before == sim.files.read(path()).unwrap(), "nothing was changed");
}

#[test]
fn drives_that_cannot_be_used_are_refused_each_with_its_reason() {
    check_refused(
        |sim| patch_superblocks(sim, 12, &[3]),
        |error| matches!(error, OpenDriveError::TooNew { version: 3, .. }),
    );
    check_refused(
        |sim| patch_superblocks(sim, 12, &[1]),
        |error| matches!(error, OpenDriveError::TooOld { version: 1, .. }),
    );
    check_refused(
        |sim| patch_superblocks(sim, 32, &[4]),
        |error| matches!(error, OpenDriveError::UnknownFeatures { bits: 4, .. }),
    );
    check_refused(
        |sim| patch_superblocks(sim, 24, &[4]),
        |error| matches!(error, OpenDriveError::UnknownFeatures { bits: 4, .. }),
    );
    check_refused(
        |sim| patch_superblocks(sim, 40, &[1]),
        |error| matches!(error, OpenDriveError::OtherCluster { .. }),
    );
    let cut = |sim: &Sim| {
        let image = sim.files.read(path()).unwrap();
        sim.files.put_image(path(), &image[..16 << 20]);
    };
    check_refused(cut, |error| matches!(error, OpenDriveError::Shrunk { len_bytes: 16_777_216, .. }));
    let flip_both = |sim: &Sim| [0, 64 << 10].iter().for_each(|at| sim.files.flip_bit(path(), at + 50, 0));
    check_refused(flip_both, |error| matches!(error, OpenDriveError::SuperblocksDamaged { .. }));
    check_refused(
        |sim| sim.files.put_image(path(), &[0; 4096]),
        |error| matches!(error, OpenDriveError::NotDrive { .. }),
    );
    // The first run of the checkpoint: segment 1 was the first free one at close.
    check_refused(
        |sim| sim.files.flip_bit(path(), 2 * MIB + 4096 + 40, 0),
        |error| matches!(error, OpenDriveError::IndexDamaged { .. }),
    );
}

#[test]
fn an_unreadable_device_is_not_called_a_foreign_one() {
    let sim = Sim::new(1);
    filled(&sim, 3, Left::Closed);
    sim.files.break_range(path(), 0..100_000);
    assert!(matches!(open(&sim.env(), path()), Err(OpenDriveError::Io { .. })));
}

#[test]
fn unknown_compatible_features_are_no_reason_to_refuse() {
    let sim = Sim::new(1);
    let shards = filled(&sim, 3, Left::Closed);
    patch_superblocks(&sim, 16, &[1]);
    assert_eq!(check_answers(&open(&sim.env(), path()).unwrap(), &shards), 3);
}

#[test]
fn foreign_content_is_not_formatted_over() {
    let sim = Sim::new(1);
    let env = sim.env();
    for (at, refused) in [(0, true), (70_000, true), (CAPACITY as usize - 10, true), (5 << 20, false)] {
        let mut image = vec![0; CAPACITY as usize];
        image[at] = 1;
        sim.files.put_image(path(), &image);
        let result = Drive::format(&env, path(), &format_options(CAPACITY));
        assert_eq!(matches!(result, Err(FormatDriveError::NotEmpty { .. })), refused, "{at}");
        assert_eq!(result.is_err(), refused);
    }
    let again = Drive::format(&env, path(), &format_options(CAPACITY));
    assert!(matches!(again, Err(FormatDriveError::IsDrive { uuid: UUID, cluster: CLUSTER, .. })));
    block_on(open(&env, path()).unwrap().put(put(key(1), 1))).unwrap();
    let overwrite = drive::FormatOptions { existing: Existing::Overwrite, ..format_options(CAPACITY) };
    Drive::format(&env, path(), &overwrite).unwrap();
    let drive = open(&env, path()).unwrap();
    assert_eq!(drive.stat().shards, 0, "nothing of the old drive comes back");
    let tiny = Drive::format(&env, Path::new("tiny"), &format_options(8 * MIB));
    assert!(matches!(tiny, Err(FormatDriveError::Size { .. })));
}

#[test]
fn after_a_crash_frames_go_to_new_segments_and_after_a_close_to_the_old_ones() {
    for (left, same) in [(Left::Crashed, false), (Left::Closed, true)] {
        let sim = Sim::new(1);
        filled(&sim, 10, left);
        let env = sim.env();
        let drive = open(&env, path()).unwrap();
        block_on(drive.put(put(key(100), 1))).unwrap();
        let segment = |key| payload_offset(&env, key) / MIB;
        assert_eq!(segment(key(100)) == segment(key(10)), same, "{left:?}");
    }
}
