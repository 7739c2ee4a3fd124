//! Full drives: puts stop in time, deletes and cleaning go on, and room comes back.

use std::collections::HashSet;
use std::path::Path;

use crate::common::*;
use base::env::sim::Sim;
use base::units::MIB;
use drive::{Drive, OpenOptions, Trim};
use wire::drive::{DriveService, PutPurpose, PutShard, PutShardError};

const PATH: &str = "drive";

fn fill(drive: &Drive, first: u64, blocks: u32) -> u64 {
    fill_for(drive, first, blocks, PutPurpose::Write)
}

fn fill_for(drive: &Drive, first: u64, blocks: u32, purpose: PutPurpose) -> u64 {
    for extent in first.. {
        let request = PutShard { purpose, ..put(key(extent), blocks) };
        match block_on(drive.put(request)) {
            Ok(()) => {}
            Err(PutShardError::NoSpace { .. }) => return extent,
            Err(error) => panic!("{error}"),
        }
        check_stat(drive);
    }
    unreachable!("every drive fills up")
}

fn check_full(capacity: u64, blocks: u32, least_percent: u64) {
    let sim = Sim::new(7);
    let path = Path::new(PATH);
    format(&sim.env(), path, capacity);
    let mut drive = open(&sim.env(), path).unwrap();
    let end = fill(&drive, 1, blocks);
    let stored = (end - 1) * u64::from(blocks) * 4096;
    assert!(stored * 100 / capacity >= least_percent, "{} % stored", stored * 100 / capacity);
    let stat = drive.stat();
    assert!(stat.full && stat.reclaimable_bytes() == 0, "{stat:?}");
    // Every delete by itself, spread over all segments, on a full drive, with crashes in between.
    for extent in (1..end).step_by(3) {
        block_on(drive.delete(vec![key(extent)].into())).unwrap();
        check_stat(&drive);
        if extent % 50 == 1 {
            drop(drive);
            sim.files.crash();
            drive = open(&sim.env(), path).unwrap();
        }
    }
    let refilled = fill(&drive, end, blocks) - end;
    assert!(refilled * 3 >= (end - 1) * 4 / 5, "{refilled} of {} came back", (end - 1) / 3);
    for extent in (2..end).step_by(3) {
        assert_eq!(get(&drive, key(extent), 0, blocks).unwrap().bytes, content(key(extent), blocks));
    }
    let listed = block_on(drive.list(None, 100_000)).unwrap();
    block_on(drive.delete(listed.iter().map(|entry| entry.key).collect::<Vec<_>>().into())).unwrap();
    assert_eq!(drive.stat().live_bytes, 0);
    assert!(!drive.stat().full, "{:?}", drive.stat());
    assert!(fill(&drive, 1_000_000, blocks) - 1_000_000 >= (end - 1) * 9 / 10, "all room comes back");
}

#[test]
fn small_shards_fill_a_drive_and_room_comes_back() {
    check_full(33 * MIB, 1, 35);
}

#[test]
fn middle_shards_fill_a_drive_and_room_comes_back() {
    check_full(33 * MIB, 15, 65);
}

#[test]
fn large_shards_fill_a_drive_and_room_comes_back() {
    check_full(65 * MIB, 60, 75);
}

#[test]
fn promised_room_can_be_written() {
    const LARGE: u32 = 60;
    let sim = Sim::new(7);
    let path = Path::new(PATH);
    format(&sim.env(), path, 65 * MIB);
    let drive = open(&sim.env(), path).unwrap();
    let end = fill(&drive, 1, LARGE);
    fill(&drive, end, 1);
    assert_eq!(drive.stat().reclaimable_bytes(), 0, "{:?}", drive.stat());
    for (round, step) in [2, 5, 9].into_iter().enumerate() {
        for extent in (1..end).step_by(step) {
            block_on(drive.delete(vec![key(extent)].into())).unwrap();
        }
        let promised = drive.stat().reclaimable_bytes();
        let first = (round as u64 + 1) * 1_000_000;
        let written = (fill(&drive, first, LARGE) - first) * u64::from(LARGE) * 4096;
        println!("step {step}: promised {promised}, written {written}");
        // The ends of the open segments, and what is dead but too little for a shard.
        assert!(written > 0 && written + 2 * MIB >= promised, "{:?}", drive.stat());
    }
}

#[test]
fn repairs_go_on_where_new_data_stops_and_deletes_where_repairs_stop() {
    let sim = Sim::new(7);
    format(&sim.env(), Path::new(PATH), 201 * MIB);
    let drive = open(&sim.env(), Path::new(PATH)).unwrap();
    let full = fill(&drive, 1, 60);
    let at_stop = drive.stat();
    assert!(at_stop.free_bytes < MIB, "{at_stop:?}");
    assert!(at_stop.reserved_bytes >= 201 * MIB / 20, "{at_stop:?}");
    let repaired = fill_for(&drive, 10_000, 60, PutPurpose::Repair);
    let repaired_bytes = (repaired - 10_000) * 245_760;
    assert!(repaired_bytes > 2 * MIB, "repairs stored {repaired_bytes} more");
    assert!(drive.stat().reserved_bytes < at_stop.reserved_bytes - repaired_bytes / 2);
    assert_eq!(drive.stat().free_bytes, 0, "what is left is nothing that new data may use");
    assert!(matches!(block_on(drive.put(put(key(5000), 1))), Err(PutShardError::NoSpace { .. })));
    for extent in (1..full).step_by(2) {
        block_on(drive.delete(vec![key(extent)].into())).unwrap();
        check_stat(&drive);
    }
    assert!(fill(&drive, 20_000, 60) - 20_000 > full / 3, "room comes back for new data too");
}

/// Writers check for room before they send a put.
#[test]
fn thin_garbage_of_a_full_drive_becomes_room_for_whoever_asks_first() {
    let sim = Sim::new(7);
    format(&sim.env(), Path::new(PATH), 65 * MIB);
    let drive = open(&sim.env(), Path::new(PATH)).unwrap();
    let end = fill(&drive, 1, 15);
    for extent in (1..end).step_by(10) {
        block_on(drive.delete(vec![key(extent)].into())).unwrap();
    }
    assert_eq!(drive.stat().free_bytes, 0, "no segment gives back enough to be cleaned for nobody");
    block_on(drive.make_room()).unwrap();
    let stat = drive.stat();
    assert!(stat.free_bytes >= 2 * MIB, "{stat:?}");
    check_stat(&drive);
    // Cleaning gives nothing more back: no request waits for it.
    let full = fill(&drive, 10_000, 15);
    assert!(full > 10_000 + end / 20, "{full}");
    block_on(drive.make_room()).unwrap();
    assert!(drive.stat().free_bytes < MIB, "{:?}", drive.stat());
}

#[test]
fn churn_on_a_half_full_drive_never_runs_out() {
    let sim = Sim::new(8);
    format(&sim.env(), Path::new(PATH), 33 * MIB);
    let drive = open(&sim.env(), Path::new(PATH)).unwrap();
    for extent in 1..12_000u64 {
        block_on(drive.put(put(key(extent), 10))).unwrap();
        if extent > 300 {
            // Old and young ones die, so that segments are partly dead.
            let victim = if extent % 3 == 0 { extent - 300 } else { extent - 300 + extent % 7 };
            block_on(drive.delete(vec![key(victim), key(extent - 300)].into())).unwrap();
        }
    }
    check_stat(&drive);
}

#[test]
fn idle_time_is_used_for_cleaning_and_users_are_not() {
    let sim = Sim::new(8);
    format(&sim.env(), Path::new(PATH), 65 * MIB);
    let drive = open(&sim.env(), Path::new(PATH)).unwrap();
    for extent in 1..400 {
        block_on(drive.put(put(key(extent), 20))).unwrap();
    }
    for extent in (1..400).filter(|extent| extent % 4 != 0) {
        block_on(drive.delete(vec![key(extent)].into())).unwrap();
    }
    let before = drive.stat();
    assert!(before.garbage_bytes > 20 * MIB, "{before:?}");
    // Requests that follow each other closely leave no time.
    for _ in 0..50 {
        sim.clock.advance_ns(100_000_000);
        block_on(drive.delete(vec![key(9999)].into())).unwrap();
    }
    assert_eq!(drive.stat().garbage_bytes, before.garbage_bytes);
    for _ in 0..50 {
        sim.clock.advance_ns(500_000_000);
        // A request must look at the clock: on a real drive the drive's thread does.
        block_on(drive.scrub(None, 1)).unwrap();
        check_stat(&drive);
    }
    let after = drive.stat();
    assert!(after.garbage_bytes < before.garbage_bytes / 4, "{after:?}");
    assert!(after.free_bytes > before.free_bytes + 15 * MIB, "{after:?}");
    for extent in (4..400).step_by(4) {
        assert_eq!(get(&drive, key(extent), 0, 20).unwrap().bytes, content(key(extent), 20));
    }
}

fn be_idle(sim: &Sim, drive: &Drive) {
    for _ in 0..200 {
        sim.clock.advance_ns(500_000_000);
        block_on(drive.scrub(None, 1)).unwrap();
        check_stat(drive);
    }
}

/// The distinct blocks on the device.
fn blocks_on_disk(sim: &Sim) -> HashSet<Vec<u8>> {
    let image = sim.env().files.read(Path::new(PATH)).unwrap();
    image.chunks_exact(4096).map(<[u8]>::to_vec).collect()
}

/// Deletes every `dead_every`th of 300 shards, too few in each segment to be worth cleaning. Returns how many of them
/// are still on the device after idle time.
fn dead_on_disk(trim: Trim, dead_every: u64) -> usize {
    let (sim, path) = (Sim::new(8), Path::new(PATH));
    format(&sim.env(), path, 65 * MIB);
    let options = OpenOptions { trim, trim_run_bytes: 80 << 10, ..OpenOptions::new(CLUSTER) };
    let mut drive = open_with(&sim.env(), path, &options).unwrap();
    for extent in 1..300 {
        block_on(drive.put(put(key(extent), 20))).unwrap();
    }
    let dead: Vec<_> = (1..300).filter(|extent| extent % dead_every == 0).map(key).collect();
    block_on(drive.delete(dead.clone().into())).unwrap();
    let garbage_bytes = drive.stat().garbage_bytes;
    be_idle(&sim, &drive);
    assert!(drive.stat().garbage_bytes > garbage_bytes / 2, "the segments stay: {:?}", drive.stat());
    let trimmed_bytes = drive.stat().trimmed_bytes;
    be_idle(&sim, &drive);
    assert_eq!(drive.stat().trimmed_bytes, trimmed_bytes, "nothing is given back twice");
    drop(drive);
    let blocks = blocks_on_disk(&sim);
    sim.files.crash();
    assert!(drive::fsck(&sim.env(), path).unwrap().clean);
    drive = open_with(&sim.env(), path, &options).unwrap();
    assert_eq!(drive.recovery().damaged_records, 0);
    for extent in (1..300).filter(|extent| extent % dead_every != 0) {
        assert_eq!(get(&drive, key(extent), 0, 20).unwrap().bytes, content(key(extent), 20));
    }
    dead.iter().filter(|key| blocks.contains(&content(**key, 20)[4096..8192])).count()
}

#[test]
fn long_dead_runs_in_segments_that_stay_are_given_back() {
    assert_eq!(dead_on_disk(Trim::Never, 12), 24);
    assert_eq!(dead_on_disk(Trim::Devices, 12), 24, "this is a file");
    // The dead shards in the open segment stay.
    let left = dead_on_disk(Trim::Always, 12);
    assert!(left <= 2, "{left} dead shards are still there");
}

#[test]
fn free_segments_are_given_back_once() {
    let (sim, path) = (Sim::new(8), Path::new(PATH));
    format(&sim.env(), path, 65 * MIB);
    let options = OpenOptions { trim: Trim::Always, ..OpenOptions::new(CLUSTER) };
    let drive = open_with(&sim.env(), path, &options).unwrap();
    block_on(drive.put(put(key(1), 20))).unwrap();
    be_idle(&sim, &drive);
    // All blocks except those of the shard and the index.
    let all = drive.stat().trimmed_bytes;
    assert!((60 * MIB..64 * MIB).contains(&all), "{all}");
    be_idle(&sim, &drive);
    assert_eq!(drive.stat().trimmed_bytes, all);
    assert!(fill(&drive, 2, 20) > 500, "and all of them are used");
}

#[test]
fn lists_are_paged_in_key_order() {
    let sim = Sim::new(9);
    format(&sim.env(), Path::new(PATH), 33 * MIB);
    let drive = open(&sim.env(), Path::new(PATH)).unwrap();
    for extent in [5, 3, 900, 70_000, 1] {
        block_on(drive.put(put(key(extent), 1))).unwrap();
    }
    let (mut after, mut seen) = (None, Vec::new());
    while let Some(entry) = block_on(drive.list(after, 1)).unwrap().pop() {
        after = Some(entry.key);
        seen.push(entry.key.extent.0);
        assert_eq!((entry.len_bytes, entry.shape.k), (4096, 4));
    }
    assert_eq!(seen, [1, 3, 5, 900, 70_000]);
}
