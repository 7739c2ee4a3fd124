//! Real files, with io_uring and with threads.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::*;
use base::LedgerId;
use base::env::{Caching, Env, OpenMode, spawn_thread};
use base::units::MIB;
use drive::{Drive, FormatDriveError, OpenDriveError, OpenOptions, PreferIo, ReadCache, fsck, inventory};
use wire::drive::{DriveHealth, DriveService, GetShardError, IoPath, PutShardError, ShardKey};

fn options(io: PreferIo, read_cache: ReadCache) -> OpenOptions {
    OpenOptions { io, read_cache, ..OpenOptions::new(CLUSTER) }
}

/// Puts, gets, deletes, closes and reopens on a path that was formatted.
fn round_trip(env: &Env, path: &Path, options: &OpenOptions) -> IoPath {
    let drive = open_with(env, path, options).unwrap();
    let shards: Vec<_> = (1..60).map(|extent| (key(extent), 1 + (extent as u32 * 7) % 90)).collect();
    let puts = shards.iter().map(|(key, blocks)| drive.put(put(*key, *blocks))).collect();
    assert!(join_all(puts).iter().all(Result::is_ok));
    block_on(drive.delete(shards[..10].iter().map(|(key, _)| *key).collect::<Vec<_>>().into())).unwrap();
    check_all(&drive, &shards);
    block_on(drive.close()).unwrap();
    assert!(block_on(drive.put(put(key(999), 1))).is_err(), "a closed drive takes nothing");
    drop(drive);
    let drive = open_with(env, path, options).unwrap();
    assert!(drive.recovery().was_closed);
    check_all(&drive, &shards);
    let io_path = drive.stat().io_path;
    // Without close: the next open replays.
    block_on(drive.put(put(key(1000), 3))).unwrap();
    drop(drive);
    let drive = open_with(env, path, options).unwrap();
    assert!(!drive.recovery().was_closed);
    assert!(drive.recovery().frames >= 1, "the put, and what was cleaned beside it");
    check_all(&drive, &shards);
    assert_eq!(get(&drive, key(1000), 0, 3).unwrap().bytes, content(key(1000), 3));
    io_path
}

fn check_all(drive: &Drive, shards: &[(wire::drive::ShardKey, u32)]) {
    check_stat(drive);
    for (index, (key, blocks)) in shards.iter().enumerate() {
        let got = get(drive, *key, 0, *blocks);
        if index < 10 {
            assert!(matches!(got, Err(GetShardError::NotFound { .. })));
            continue;
        }
        let got = got.unwrap();
        assert_eq!(got.bytes, content(*key, *blocks));
        let middle = get(drive, *key, blocks / 2, 1).unwrap();
        assert_eq!(middle.bytes, got.bytes.slice(*blocks as usize / 2 * 4096..)[..4096]);
        assert_eq!(middle.checksums, got.checksums[*blocks as usize / 2..][..1]);
        assert!(matches!(get(drive, *key, *blocks, 1), Err(GetShardError::OutOfRange { .. })));
    }
    let listed = block_on(drive.list(None, 1000)).unwrap();
    assert!(listed.is_sorted_by_key(|entry| entry.key));
    assert!(listed.len() >= shards.len() - 10);
}

fn file_round_trip(io: PreferIo, read_cache: ReadCache) -> IoPath {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("drive");
    let env = Env::real();
    format(&env, &path, 32 * MIB);
    round_trip(&env, &path, &options(io, read_cache))
}

#[test]
fn a_file_works_with_threads() {
    assert_eq!(file_round_trip(PreferIo::ThreadPool, ReadCache::PageCache), IoPath::ThreadPool);
    assert_eq!(file_round_trip(PreferIo::ThreadPool, ReadCache::Bypass), IoPath::ThreadPool);
}

#[test]
fn a_file_works_with_io_uring() {
    // Some systems, such as some containers, refuse io_uring: the operator must say so.
    let refused = std::env::var_os("FOREBAY_TEST_WITHOUT_IO_URING").is_some();
    let expected = if refused { IoPath::ThreadPool } else { IoPath::IoUring };
    for cache in [ReadCache::PageCache, ReadCache::Bypass] {
        assert_eq!(file_round_trip(PreferIo::Auto, cache), expected);
    }
}

#[test]
fn a_drive_is_opened_once_and_by_its_cluster_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("drive");
    let env = Env::real();
    format(&env, &path, 32 * MIB);
    let drive = open(&env, &path).unwrap();
    assert!(matches!(open(&env, &path), Err(OpenDriveError::InUse { .. })));
    let again = Drive::format(&env, &path, &format_options(32 * MIB));
    assert!(matches!(again, Err(FormatDriveError::InUse { .. })));
    drop(drive);
    let other = OpenOptions::new(base::ClusterId([1; 16]));
    assert!(matches!(open_with(&env, &path, &other), Err(OpenDriveError::OtherCluster { .. })));
    open(&env, &path).unwrap();
}

#[test]
fn a_closed_drive_is_free_although_it_is_still_referred_to() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("drive");
    let env = Env::real();
    format(&env, &path, 32 * MIB);
    let closed = open(&env, &path).unwrap();
    block_on(closed.put(put(key(1), 2))).unwrap();
    block_on(closed.close()).unwrap();
    assert_eq!(closed.health(), DriveHealth::Unreachable);
    let drive = open(&env, &path).unwrap();
    assert_eq!(get(&drive, key(1), 0, 2).unwrap().bytes, content(key(1), 2));
    assert!(get(&closed, key(1), 0, 2).is_err() && block_on(closed.put(put(key(2), 1))).is_err());
    // The lock is not given up a second time.
    assert!(block_on(closed.close()).is_err());
    drop(closed);
    assert!(matches!(open(&env, &path), Err(OpenDriveError::InUse { .. })));
}

#[test]
fn wrong_puts_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("drive");
    let env = Env::real();
    format(&env, &path, 32 * MIB);
    let drive = open(&env, &path).unwrap();
    let good = put(key(1), 2);
    block_on(drive.put(good.clone())).unwrap();
    block_on(drive.put(good.clone())).unwrap();
    assert_eq!(drive.stat().shards, 1);
    let other = put_of(key(1), wire::drive::ShardClass::Small, vec![5; 8192]);
    assert!(matches!(block_on(drive.put(other)), Err(PutShardError::Conflict { .. })));
    let mut bad = put(key(2), 2);
    bad.checksums[1] ^= 1;
    assert!(matches!(block_on(drive.put(bad)), Err(PutShardError::Invalid { .. })));
    let mut short = put(key(2), 2);
    short.bytes.truncate(5000);
    assert!(matches!(block_on(drive.put(short)), Err(PutShardError::Invalid { .. })));
    assert!(matches!(block_on(drive.put(put(key(3), 1024))), Err(PutShardError::Invalid { .. })));
}

/// Writers fill, delete and so reuse every segment many times, while readers ask for shards that may be gone. Two
/// ledgers use the same extent numbers, so block checksums alone would accept the other ledger's bytes.
fn check_races(io: PreferIo, read_cache: ReadCache) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("drive");
    let env = Env::real();
    format(&env, &path, 17 * MIB);
    let options = OpenOptions { checkpoint_every_bytes: 2 * MIB, ..options(io, read_cache) };
    let drive = open_with(&env, &path, &options).unwrap();
    let progress = Arc::new([const { AtomicU64::new(0) }; 2]);
    let key_of = |ledger: u64, extent: u64| ShardKey { ledger: LedgerId(ledger as u32), ..key(extent) };
    let mut threads = Vec::new();
    for writer in 0..2u64 {
        let (drive, progress) = (drive.clone(), progress.clone());
        threads.push(spawn_thread("writer", move || {
            for extent in 0..1200u64 {
                block_on(drive.put(put(key_of(writer, extent), 1 + (extent % 9) as u32))).unwrap();
                progress[writer as usize].store(extent, Ordering::SeqCst);
                if extent >= 150 {
                    block_on(drive.delete(vec![key_of(writer, extent - 150)].into())).unwrap();
                }
            }
            progress[writer as usize].store(u64::MAX, Ordering::SeqCst);
        }));
    }
    for reader in 0..2u64 {
        let (drive, progress) = (drive.clone(), progress.clone());
        threads.push(spawn_thread("reader", move || {
            let mut random = reader;
            loop {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = progress[reader as usize].load(Ordering::SeqCst);
                if at == u64::MAX {
                    return;
                }
                // Around the point of deletion, where segments die.
                let extent = at.saturating_sub(140 + (random >> 33) % 14);
                let key = key_of(reader, extent);
                match get(&drive, key, 0, 1 + (extent % 9) as u32) {
                    Ok(got) => assert_eq!(got.bytes, content(key, 1 + (extent % 9) as u32)),
                    Err(GetShardError::NotFound { .. }) => assert!(at >= extent),
                    Err(error) => panic!("{error}"),
                }
            }
        }));
    }
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(drive.stat().shards, 300);
    assert_eq!(drive.corrupt_reads(), 0);
    check_stat(&drive);
    block_on(drive.close()).unwrap();
    drop(drive);
    assert!(fsck(&env, &path).unwrap().clean);
}

#[test]
fn reads_never_see_the_bytes_that_replaced_a_shard() {
    check_races(PreferIo::Auto, ReadCache::PageCache);
    check_races(PreferIo::Auto, ReadCache::Bypass);
    check_races(PreferIo::ThreadPool, ReadCache::PageCache);
}

/// Puts race with the close: acknowledged shards are there afterwards, without a replay.
#[test]
fn puts_beside_a_close_are_stored_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("drive");
    let env = Env::real();
    format(&env, &path, 33 * MIB);
    for round in 0..10u64 {
        let options =
            OpenOptions { checkpoint_every_bytes: 64 << 10, ..options(PreferIo::Auto, ReadCache::PageCache) };
        let drive = open_with(&env, &path, &options).unwrap();
        let writers: Vec<_> = (0..3u64)
            .map(|writer| {
                let drive = drive.clone();
                let first = round * 10_000 + writer * 1000;
                spawn_thread("writer", move || {
                    let stored = |extent: &u64| block_on(drive.put(put(key(*extent), 1))).is_ok();
                    (first..first + 1000).take_while(stored).collect::<Vec<_>>()
                })
            })
            .collect();
        while drive.stat().shards < (round + 1) * 20 {
            std::thread::yield_now();
        }
        block_on(drive.close()).unwrap();
        let stored: Vec<u64> = writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect();
        drop(drive);
        let drive = open_with(&env, &path, &options).unwrap();
        assert!(drive.recovery().was_closed);
        for extent in stored {
            assert_eq!(get(&drive, key(extent), 0, 1).unwrap().bytes, content(key(extent), 1));
        }
        block_on(drive.close()).unwrap();
    }
}

/// The kernel may finish the requests of a killed process some time after the process is gone.
#[test]
fn a_device_that_somebody_lets_go_of_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (env, path) = (Env::real(), dir.path().join("drive"));
    format(&env, &path, 64 * MIB);
    for opens in [true, false] {
        let other = env.files.open(&path, OpenMode::Existing, Caching::Buffered).unwrap();
        other.try_lock().unwrap();
        let letting_go = spawn_thread("other", move || {
            std::thread::park_timeout(Duration::from_millis(300));
            drop(other);
        });
        if opens {
            drop(open(&env, &path).unwrap());
        } else {
            inventory(&env, &path, UUID).unwrap();
        }
        letting_go.join().unwrap();
    }
}
