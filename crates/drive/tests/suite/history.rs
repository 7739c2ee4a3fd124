//! The history of ledgers on a drive, and how to tell an older copy of a drive from the drive itself.

use std::path::Path;
use std::sync::Arc;

use crate::common::*;
use base::env::sim::Sim;
use base::env::{Env, Files};
use base::units::MIB;
use base::{DriveUuid, ExtentId, Ino, LedgerId};
use drive::{Drive, OpenDriveError, OpenOptions};
use wire::drive::{DriveMark, DriveService, GetPurpose, GetShard, PutShard, ShardKey, ShardNote};
use wire::position::{KnownLedger, Position};

const PATH: &str = "drive";

fn path() -> &'static Path {
    Path::new(PATH)
}

fn new_drive(capacity: u64) -> (Sim, Arc<Drive>) {
    let sim = Sim::new(3);
    format(&sim.env(), path(), capacity);
    let drive = open(&sim.env(), path()).unwrap();
    (sim, drive)
}

fn kept(drive: &Drive) -> Vec<Option<Position>> {
    block_on(drive.known_ledgers()).unwrap().into_iter().map(|known| known.position).collect()
}

#[test]
fn the_newest_position_of_each_ledger_is_kept() {
    let (sim, drive) = new_drive(17 * MIB);
    let keep = |drive: &Drive, positions: &[Position], replace| {
        block_on(drive.keep_positions(positions.to_vec(), replace)).unwrap();
    };
    keep(&drive, &[position(1, 7, 5), position(2, 8, 9)], false);
    keep(&drive, &[position(1, 7, 4)], false);
    assert_eq!(kept(&drive), [Some(position(1, 7, 5)), Some(position(2, 8, 9))]);
    keep(&drive, &[position(1, 9, 3)], true);
    let expected = [Some(position(1, 9, 3)), Some(position(2, 8, 9))];
    assert_eq!(kept(&drive), expected);
    drop(drive);
    sim.files.crash();
    let drive = open(&sim.env(), path()).unwrap();
    assert_eq!(kept(&drive), expected, "after a crash");
    block_on(drive.close()).unwrap();
    drop(drive);
    assert_eq!(kept(&open(&sim.env(), path()).unwrap()), expected, "after a close");
}

#[test]
fn many_ledgers_have_positions_and_a_full_drive_keeps_them() {
    let (sim, drive) = new_drive(17 * MIB);
    for extent in 1.. {
        if block_on(drive.put(put(key(extent), 60))).is_err() {
            break;
        }
    }
    let positions: Vec<Position> = (1..3000).map(|ledger| position(ledger, 1, 2)).collect();
    block_on(drive.keep_positions(positions.clone(), false)).unwrap();
    drop(drive);
    sim.files.crash();
    let drive = open(&sim.env(), path()).unwrap();
    assert_eq!(kept(&drive), positions.into_iter().map(Some).collect::<Vec<_>>());
}

#[test]
fn another_drive_than_the_expected_one_stays_as_it_is() {
    let (sim, drive) = new_drive(17 * MIB);
    let uuid = drive.stat().uuid;
    block_on(drive.close()).unwrap();
    drop(drive);
    let before = sim.env().files.read(path()).unwrap();
    let open_as = |uuid: DriveUuid| {
        // The mark of the expected drive would make an older copy of this one.
        let mark = DriveMark { incarnation: 90, seq: 7 };
        open_with(&sim.env(), path(), &OpenOptions { uuid: Some(uuid), mark, ..OpenOptions::new(CLUSTER) })
    };
    let refused = open_as(DriveUuid([1; 16])).err().unwrap();
    assert!(matches!(refused, OpenDriveError::OtherDrive { uuid: found, .. } if found == uuid), "{refused}");
    assert!(sim.env().files.read(path()).unwrap() == before, "nothing is written");
    open_as(uuid).unwrap();
}

#[test]
fn a_drive_knows_the_highest_extent_of_each_ledger() {
    let (_sim, drive) = new_drive(17 * MIB);
    for (ledger, extent) in [(1, 5), (1, 900), (4, 2)] {
        let key = ShardKey { ledger: LedgerId(ledger), extent: ExtentId(extent), ..key(0) };
        block_on(drive.put(put(key, 1))).unwrap();
    }
    block_on(drive.keep_positions(vec![position(2, 1, 1)], false)).unwrap();
    let known = |ledger, position, extent: Option<u64>| KnownLedger {
        ledger: LedgerId(ledger),
        position,
        highest_extent: extent.map(ExtentId),
    };
    let expected =
        [known(1, None, Some(900)), known(2, Some(position(2, 1, 1)), None), known(4, None, Some(2))];
    assert_eq!(block_on(drive.known_ledgers()).unwrap(), expected);
}

#[test]
fn notes_stay_with_their_shards_when_these_are_moved() {
    let (_sim, drive) = new_drive(17 * MIB);
    let note = |extent: u64| ShardNote { ino: Ino(extent + 1), off: extent << 20, key_version: 3 };
    // Writes enough for every segment to be cleaned several times.
    for extent in 1..2000u64 {
        block_on(drive.put(PutShard { note: note(extent), ..put(key(extent), 10) })).unwrap();
        if extent > 100 && extent % 10 != 0 {
            block_on(drive.delete(vec![key(extent - 100)].into())).unwrap();
        }
        if extent > 300 && extent % 10 == 0 {
            block_on(drive.delete(vec![key(extent - 290)].into())).unwrap();
        }
    }
    let listed = block_on(drive.list(None, 10_000)).unwrap();
    assert!(listed.len() > 100);
    for entry in listed {
        let get = GetShard { key: entry.key, first_block: 3, blocks: 2, purpose: GetPurpose::Move };
        let blocks = block_on(drive.get(get)).unwrap();
        assert_eq!(blocks.note, Some(note(entry.key.extent.0)), "{:?}", entry.key);
        let read = block_on(drive.get(GetShard { purpose: GetPurpose::Read, ..get })).unwrap();
        assert_eq!((read.note, &read.bytes), (None, &blocks.bytes));
    }
}

fn open_at(env: &Env, mark: DriveMark) -> Arc<Drive> {
    open_with(env, path(), &OpenOptions { mark, ..OpenOptions::new(CLUSTER) }).unwrap()
}

#[test]
fn an_older_copy_of_a_drive_has_a_gap_until_that_is_noted() {
    let (sim, drive) = new_drive(17 * MIB);
    block_on(drive.put(put(key(1), 1))).unwrap();
    block_on(drive.close()).unwrap();
    drop(drive);
    let copy = sim.files.read(path()).unwrap();
    let drive = open_at(&sim.env(), DriveMark::default());
    block_on(drive.put(put(key(2), 1))).unwrap();
    let newest = drive.stat().mark;
    drop(drive);
    sim.files.crash();
    let original = sim.files.read(path()).unwrap();

    let drive = open_at(&sim.env(), newest);
    assert!(!drive.recovery().has_gap, "the drive itself is not behind");
    drop(drive);

    sim.files.put_image(path(), &copy);
    let drive = open_at(&sim.env(), newest);
    assert!(drive.recovery().has_gap);
    assert!(drive.stat().mark > newest, "its numbers are above all that were used");
    let noted = drive.stat().mark;
    drop(drive);
    sim.files.crash();
    let drive = open_at(&sim.env(), newest);
    assert!(drive.recovery().has_gap, "nobody has noted it yet");
    let noted_again = drive.stat().mark;
    drop(drive);
    let drive = open_at(&sim.env(), noted_again);
    assert!(!drive.recovery().has_gap, "it is noted");
    block_on(drive.close()).unwrap();
    drop(drive);

    sim.files.put_image(path(), &original);
    assert!(open_at(&sim.env(), noted).recovery().has_gap, "what the copy got is not on the original");
}

#[test]
fn a_lost_write_of_the_same_incarnation_is_a_gap() {
    let (sim, drive) = new_drive(17 * MIB);
    block_on(drive.put(put(key(1), 1))).unwrap();
    let DriveMark { incarnation, seq } = drive.stat().mark;
    drop(drive);
    sim.files.crash();
    let drive = open_at(&sim.env(), DriveMark { incarnation, seq: seq + 1 });
    assert!(drive.recovery().has_gap);
}
