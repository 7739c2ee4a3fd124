//! A drive in a file whose filesystem is full for a while: writes stop, reads go on, no acknowledged shard suffers, and
//! the drive recovers by itself.

use std::path::Path;

use crate::common::*;
use base::env::sim::Sim;
use base::units::MIB;
use drive::Drive;
use wire::drive::{DriveHealth, DriveService, GetShardError, PutShardError, ShardKey};

const PATH: &str = "drive";
const CAPACITY: u64 = 65 * MIB;
/// Longer than the pause after a write that found no room.
const PAUSE_NS: u64 = 2_000_000_000;

/// The shards that a drive must have and must not have.
#[derive(Default)]
struct Account {
    stored: Vec<ShardKey>,
    refused: Vec<ShardKey>,
    next: u64,
}

impl Account {
    fn put(&mut self, drive: &Drive, count: u64, blocks: u32) {
        for _ in 0..count {
            self.next += 1;
            match block_on(drive.put(put(key(self.next), blocks))) {
                Ok(()) => self.stored.push(key(self.next)),
                Err(PutShardError::NoSpace { .. }) => self.refused.push(key(self.next)),
                Err(error) => panic!("{error}"),
            }
        }
        check_stat(drive);
    }

    fn check(&self, drive: &Drive, blocks: u32) {
        for key in &self.stored {
            assert_eq!(get(drive, *key, 0, blocks).unwrap().bytes, content(*key, blocks), "{key:?}");
        }
        assert_eq!(drive.stat().health, DriveHealth::Up);
        assert_eq!(drive.stat().bad_shards, 0, "what was never stored is not damaged");
    }
}

/// The host becomes full in the middle of the load, at an offset that depends on the seed.
fn check(seed: u64, blocks: u32, crash: bool) {
    let sim = Sim::new(seed);
    let path = Path::new(PATH);
    format(&sim.env(), path, CAPACITY);
    let mut drive = open(&sim.env(), path).unwrap();
    let mut account = Account::default();
    account.put(&drive, 30, blocks);
    for round in 0..4 {
        sim.files.fill_host_of(path, MIB + (seed + round) % 3 * 4096);
        account.put(&drive, 5, blocks);
        assert!(drive.stat().host_full);
        assert_eq!(drive.stat().room_bytes(), 0);
        assert!(
            block_on(drive.delete(vec![account.stored[0]].into())).is_err(),
            "deletes are not acknowledged either"
        );
        account.check(&drive, blocks);
        sim.clock.advance_ns(PAUSE_NS);
        account.put(&drive, 2, blocks);
        if crash {
            drop(drive);
            sim.files.crash();
            drive = open(&sim.env(), path).unwrap();
            account.check(&drive, blocks);
            account.put(&drive, 1, blocks);
        }
        sim.files.free_host_of(path);
        sim.clock.advance_ns(PAUSE_NS);
        let refused = account.refused.len();
        // The first request discovers that there is room.
        account.put(&drive, 1, blocks);
        account.put(&drive, 20, blocks);
        assert!(account.refused.len() <= refused + 1, "it ends by itself");
        assert!(!drive.stat().host_full);
        account.check(&drive, blocks);
    }
    drop(drive);
    sim.files.crash();
    let drive = open(&sim.env(), path).unwrap();
    account.check(&drive, blocks);
    for key in &account.refused {
        match get(&drive, *key, 0, blocks) {
            Err(GetShardError::NotFound { .. }) => {}
            // Whole on the device when it crashed: an orphan, whose put was never acknowledged.
            Ok(found) if crash => assert_eq!(found.bytes, content(*key, blocks)),
            found => panic!("{key:?}: {:?}", found.map(|found| found.bytes.len())),
        }
    }
    block_on(drive.close()).unwrap();
    drop(drive);
    account.check(&open(&sim.env(), path).unwrap(), blocks);
}

#[test]
fn a_full_host_stops_writes_and_nothing_else() {
    for seed in 1..20 {
        check(seed, 3, false);
        check(seed, 60, false);
    }
}

#[test]
fn a_crash_while_the_host_is_full_loses_nothing() {
    for seed in 1..20 {
        check(seed, 3, true);
        check(seed, 60, true);
    }
}

#[test]
fn a_drive_closes_while_the_host_is_full() {
    let sim = Sim::new(1);
    let path = Path::new(PATH);
    format(&sim.env(), path, CAPACITY);
    let drive = open(&sim.env(), path).unwrap();
    let mut account = Account::default();
    account.put(&drive, 10, 3);
    sim.files.fill_host_of(path, MIB);
    account.put(&drive, 3, 3);
    sim.clock.advance_ns(PAUSE_NS);
    block_on(drive.close()).unwrap();
    drop(drive);
    sim.files.free_host_of(path);
    account.check(&open(&sim.env(), path).unwrap(), 3);
}
