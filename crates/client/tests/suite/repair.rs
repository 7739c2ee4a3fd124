//! Drives that come back, are replaced, are too few, or do not answer: which shards are stored, and how many are moved.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{Fault, World, create, pattern, read_all, run, run_with_spares};
use base::{DriveId, Epoch, Ino, PgId};
use client::{Client, OwedEntry, RepairOutcome};
use layout::{DriveState, PlacementGroup};
use tokio::time::Instant;

/// Files of every form of storage: inline, copies, one and several coded extents.
const SIZES: [usize; 5] = [100, 9000, 200_000, 3 << 20, (9 << 20) + 5];

type Files = Vec<(Ino, Vec<u8>)>;

async fn write_files(client: &Client, tag: u64) -> Files {
    let mut files = Vec::new();
    for (number, len) in SIZES.into_iter().enumerate() {
        let ino = create(client, &format!("{tag}-{number}")).await;
        let bytes = pattern(tag + number as u64, len);
        client.write(ino, 0, &bytes).await.unwrap();
        client.fsync(ino).await.unwrap();
        files.push((ino, bytes));
    }
    files
}

async fn check_files(client: &Client, files: &Files) {
    for (ino, bytes) in files {
        assert!(read_all(client, *ino).await.unwrap() == *bytes, "len={}", bytes.len());
    }
}

fn fail(world: &World, drives: &[usize], fault: Fault) {
    world.drives.iter().for_each(|drive| drive.set(Fault::None));
    drives.iter().for_each(|drive| world.drives[*drive].set(fault));
}

/// Removes a file.
async fn remove(client: &Client, ino: Ino, name: &str) {
    client.unlink(Ino::ROOT, name.as_bytes()).await.unwrap();
    client.close_file(ino);
    client.forget(ino, 1);
}

/// Deletes free extents until the first drive has `shards` shards.
async fn reclaim_down_to(world: &World, client: &Client, shards: usize) {
    while world.drives[0].shards() > shards {
        while client.purge_step().await.unwrap() {}
        client.reclaim_step(None).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Checks that any two drives may be lost.
async fn check_redundant(world: &World, client: &Client, files: &Files, drives: &[usize]) {
    for (at, one) in drives.iter().enumerate() {
        for two in &drives[..at] {
            fail(world, &[*one, *two], Fault::Failed);
            check_files(client, files).await;
        }
    }
    fail(world, &[], Fault::None);
}

/// Pays all owed shards that can be paid. Returns the stored shards and their bytes.
async fn repair(client: &Client) -> (Vec<OwedEntry>, u64) {
    let (mut all, mut bytes, mut cursor) = (Vec::new(), 0, None);
    loop {
        let page = client.owed_page(cursor).await.unwrap();
        let mut stored = Vec::new();
        for entry in page.payable {
            if let RepairOutcome::Stored { bytes: stored_bytes } = client.repair_shard(&entry).await {
                bytes += stored_bytes;
                stored.push(entry);
            }
        }
        client.tell_repaired(&stored).await.unwrap();
        all.extend(stored);
        cursor = page.next;
        if cursor.is_none() {
            return (all, bytes);
        }
    }
}

#[test]
fn a_returned_drive_gets_exactly_the_shards_that_it_missed() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let before = write_files(&client, 0).await;
        fail(&world, &[1], Fault::Failed);
        let had = world.drives[1].used_bytes();
        let during = write_files(&client, 50).await;
        let owed = client.owed(usize::MAX).await.unwrap();
        assert!(owed.iter().all(|entry| entry.drive == DriveId(1)) && owed.len() == 6, "{owed:?}");
        assert_eq!(repair(&client).await, (Vec::new(), 0), "the drive is away");
        fail(&world, &[], Fault::None);
        let (stored, bytes) = repair(&client).await;
        let key = |entry: &OwedEntry| (entry.drive, entry.id);
        assert_eq!(stored.iter().map(key).collect::<HashSet<_>>(), owed.iter().map(key).collect());
        assert_eq!(world.drives[1].used_bytes() - had, bytes, "nothing else was moved");
        assert_eq!(client.owed(usize::MAX).await.unwrap(), []);
        for files in [&before, &during] {
            check_redundant(&world, &client, files, &[0, 1, 2, 3, 4, 5]).await;
        }
    });
}

#[test]
fn repairing_twice_and_a_late_shard_do_no_harm() {
    run("4+2", |world| async move {
        let client = world.client().await;
        fail(&world, &[4], Fault::Failed);
        let files = write_files(&client, 0).await;
        fail(&world, &[], Fault::None);
        let page = client.owed_page(None).await.unwrap();
        for entry in &page.payable {
            for _ in 0..2 {
                assert!(matches!(client.repair_shard(entry).await, RepairOutcome::Stored { .. }));
            }
        }
        let (shards, bytes) = (world.drives[4].shards(), world.drives[4].used_bytes());
        repair(&client).await;
        assert_eq!((world.drives[4].shards(), world.drives[4].used_bytes()), (shards, bytes));
        check_redundant(&world, &client, &files, &[0, 3, 4, 5]).await;
    });
}

/// A shard that drive 4 lacks, of a removed file.
async fn owed_of_a_removed_file(world: &World, client: &Client) -> OwedEntry {
    fail(world, &[4], Fault::Failed);
    let ino = create(client, "file").await;
    client.write(ino, 0, &pattern(1, 3 << 20)).await.unwrap();
    client.fsync(ino).await.unwrap();
    fail(world, &[], Fault::None);
    let entry = client.owed_page(None).await.unwrap().payable[0];
    client.unlink(Ino::ROOT, b"file").await.unwrap();
    client.close_file(ino);
    client.forget(ino, 1);
    entry
}

#[test]
fn a_shard_that_is_restored_while_its_extent_is_deleted_is_not_left_behind() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let entry = owed_of_a_removed_file(&world, &client).await;
        world.drives[4].set(Fault::Storing);
        let reclaim = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            while world.drives[0].shards() > 0 {
                while client.purge_step().await.unwrap() {}
                client.reclaim_step(None).await.unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let stored = async {
            tokio::time::sleep(Duration::from_millis(600)).await;
            world.drives[4].set(Fault::None);
        };
        let (outcome, (), ()) = tokio::join!(client.repair_shard(&entry), reclaim, stored);
        assert!(matches!(outcome, RepairOutcome::Stored { .. }), "{outcome:?}");
        assert_eq!(world.drives[4].shards(), 0);
    });
}

#[test]
fn a_shard_stored_for_an_extent_freed_in_the_meantime_is_deleted_again() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let entry = owed_of_a_removed_file(&world, &client).await;
        // Apart from the owner's note, the state is that after a deletion between the two steps.
        let stale = world.drives[0].entries()[0];
        while world.drives[0].shards() > 0 {
            while client.purge_step().await.unwrap() {}
            client.reclaim_step(None).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(client.repair_shard(&entry).await, RepairOutcome::Gone);
        world.drives[4].plant(stale, entry.shard);
        client.tell_repaired(&[entry]).await.unwrap();
        assert_eq!(world.drives[4].shards(), 0);
    });
}

#[test]
fn with_too_few_drives_new_extents_are_narrower_and_as_safe() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let wide = write_files(&client, 0).await;
        for (drives, profile, number) in [(4u32, "2+2", 1), (3, "1+2", 2)] {
            let gone: Vec<usize> = (drives as usize..6).collect();
            fail(&world, &gone, Fault::Failed);
            world.change(|topology| {
                let group = PlacementGroup::new(PgId(number), (0..drives).map(DriveId).collect());
                topology.map.groups.push(group);
                topology.groups = vec![PgId(number)];
                topology.profile = profile.parse().unwrap();
            });
            let files = write_files(&client, u64::from(number) * 20).await;
            assert_eq!(client.owed(usize::MAX).await.unwrap(), [], "narrow extents owe nothing");
            for (ino, _) in &files[3..] {
                for piece in client.map(*ino, 0, 1000).await.unwrap() {
                    let wire::meta::Content::Extent(extent) = piece.content else { panic!("{piece:?}") };
                    assert_eq!((u32::from(extent.n), u32::from(extent.k)), (drives, drives - 2));
                    assert!(extent.extent_len <= u32::from(extent.k) << 20);
                }
            }
            fail(&world, &[], Fault::None);
            for lost in [[0, 1], [1, 2]] {
                fail(&world, &lost, Fault::Failed);
                check_files(&client, &files).await;
                check_files(&client, &wide).await;
            }
            fail(&world, &[], Fault::None);
        }
        world.change(|topology| {
            topology.groups = vec![PgId(0)];
            topology.profile = "4+2".parse().unwrap();
        });
        let files = write_files(&client, 90).await;
        check_redundant(&world, &client, &files, &[0, 2, 5]).await;
    });
}

/// Gives position 2 of the only group to drive 6.
fn replace(world: &World, state: DriveState) {
    world.move_position(2, DriveId(6), state);
}

/// Restores all shards that are missing on new members. Returns their bytes.
async fn rebuild(client: &Client) -> u64 {
    client.advance_groups(&client.rebuild_groups()).await.unwrap();
    let groups: HashSet<PgId> = client.rebuild_groups().iter().map(|group| group.pg).collect();
    let (mut bytes, mut after) = (0, None);
    loop {
        let page = client.missing_page(&groups, after).await.unwrap();
        assert_eq!(page.short, []);
        for missing in &page.missing {
            match client.repair_shard(missing).await {
                RepairOutcome::Stored { bytes: stored } => bytes += stored,
                outcome => panic!("{outcome:?}"),
            }
        }
        after = page.next;
        if after.is_none() {
            return bytes;
        }
    }
}

fn replaced_drive(state: DriveState) {
    run_with_spares("4+2", 1, |world| async move {
        let client = world.client().await;
        let before = write_files(&client, 0).await;
        if state == DriveState::Out {
            world.drives[2].set(Fault::Failed);
        }
        let owed_before = write_files(&client, 20).await;
        replace(&world, state);
        check_files(&client, &before).await;
        let during = write_files(&client, 40).await;
        assert_eq!(client.rebuild_groups().len(), 1);
        let exposed = client.rebuild_groups()[0].exposed;
        assert_eq!(exposed, if state == DriveState::Out { 1 } else { 0 });
        let new = world.drives[6].used_bytes();
        assert!(new > 0, "new data goes to the new member at once");
        let had = world.drives[2].used_bytes();
        let bytes = rebuild(&client).await;
        repair(&client).await;
        if state == DriveState::Leaving {
            assert_eq!(bytes, had, "the bytes of the leaving drive are moved");
        }
        assert_eq!(world.drives[6].used_bytes(), new + bytes);
        assert_eq!(rebuild(&client).await, 0, "nothing is left to do");
        assert_eq!(client.owed(usize::MAX).await.unwrap(), []);
        world.change(|topology| {
            topology.map.drives[2].state = DriveState::Out;
            topology.map.groups[0].rebuilding.clear();
        });
        for files in [&before, &owed_before, &during] {
            check_redundant(&world, &client, files, &[0, 1, 3, 4, 5, 6]).await;
        }
    });
}

#[test]
fn a_dead_drive_is_rebuilt_onto_another_with_the_shards_owed_to_it() {
    replaced_drive(DriveState::Out);
}

#[test]
fn a_leaving_drive_is_read_until_its_shards_are_moved() {
    replaced_drive(DriveState::Leaving);
}

#[test]
fn a_drive_that_comes_back_as_an_older_copy_gets_missing_shards_and_loses_deleted_ones() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let before = write_files(&client, 0).await;
        let shards = world.drives[0].shards();
        let stale = write_files(&client, 20).await;
        let copy = world.drives[2].entries();
        for (number, (ino, _)) in stale.iter().enumerate() {
            remove(&client, *ino, &format!("20-{number}")).await;
        }
        reclaim_down_to(&world, &client, shards).await;
        let after = write_files(&client, 40).await;
        let lacking = world.drives[2].used_bytes();
        world.drives[2].keep_only(&copy);
        assert!(world.drives[2].used_bytes() < lacking);
        world.change(|topology| {
            topology.map.groups[0] = topology.map.groups[0].returned_with_gap(DriveId(2)).unwrap();
        });
        assert_eq!(client.rebuild_groups()[0].exposed, 1, "it counts as gone until it is compared");
        check_files(&client, &after).await;
        assert!(rebuild(&client).await > 0);
        assert_eq!(rebuild(&client).await, 0, "nothing is left to do");
        world.change(|topology| topology.map.groups[0].rebuilding.clear());
        for files in [&before, &after] {
            check_redundant(&world, &client, files, &[0, 1, 2, 3, 4, 5]).await;
        }
    });
}

#[test]
fn shards_carry_their_file_and_drives_learn_the_position_of_the_ledger() {
    run_with_spares("4+2", 1, |world| async move {
        let client = world.client().await;
        let files = write_files(&client, 0).await;
        let inos: HashSet<Ino> = files.iter().map(|(ino, _)| *ino).collect();
        let known = |drive: usize| {
            let notes = world.drives[drive].notes();
            assert!(!notes.is_empty() && notes.iter().all(|note| inos.contains(&note.ino)), "{notes:?}");
            notes.iter().map(|note| note.off).max()
        };
        assert_eq!(known(2), Some(8 << 20), "the last extent of the longest file");
        assert!(world.drives[2].position() > 0);
        world.drives[2].set(Fault::Failed);
        replace(&world, DriveState::Out);
        rebuild(&client).await;
        assert_eq!(known(6), Some(8 << 20), "a restored shard has the note of the lost one");
        let (told, shards) = (world.drives[6].position(), world.drives[0].shards());
        remove(&client, files[3].0, "0-3").await;
        reclaim_down_to(&world, &client, shards - 1).await;
        assert!(world.drives[6].position() > told, "deletes carry it, too");
    });
}

#[test]
fn a_leaving_drive_serves_where_too_few_others_are_left() {
    run_with_spares("4+2", 1, |world| async move {
        let client = world.client().await;
        let files = write_files(&client, 0).await;
        replace(&world, DriveState::Leaving);
        for drive in [0, 1] {
            world.drives[drive].set(Fault::Failed);
        }
        check_files(&client, &files).await;
        rebuild(&client).await;
        world.drives[2].set(Fault::Failed);
        check_files(&client, &files).await;
    });
}

#[test]
fn a_drive_that_hangs_holds_up_no_request() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let files = write_files(&client, 0).await;
        world.drives[1].set(Fault::Hanging);
        let begun = Instant::now();
        check_files(&client, &files).await;
        assert!(begun.elapsed() < Duration::from_secs(5), "reads took {:?}", begun.elapsed());
        let begun = Instant::now();
        let more = write_files(&client, 20).await;
        let more2 = write_files(&client, 40).await;
        assert!(begun.elapsed() < Duration::from_secs(9), "writes took {:?}", begun.elapsed());
        assert_eq!(client.slow_drives(), [DriveId(1)]);
        let begun = Instant::now();
        let spared = write_files(&client, 60).await;
        assert!(begun.elapsed() < Duration::from_secs(3), "spared, yet writes took {:?}", begun.elapsed());
        world.drives[1].set(Fault::None);
        repair(&client).await;
        assert_eq!(client.owed(usize::MAX).await.unwrap(), []);
        for files in [&files, &more, &more2, &spared] {
            check_redundant(&world, &client, files, &[0, 1, 5]).await;
        }
    });
}

#[test]
fn more_hanging_drives_than_the_profile_survives_are_an_error_within_a_bounded_time() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let files = write_files(&client, 0).await;
        (0..3).for_each(|drive| world.drives[drive].set(Fault::Hanging));
        let begun = Instant::now();
        assert_eq!(read_all(&client, files[3].0).await, Err(base::FsError::Io));
        assert!(begun.elapsed() < Duration::from_secs(18), "{:?}", begun.elapsed());
        fail(&world, &[], Fault::None);
        check_files(&client, &files).await;
    });
}

#[test]
fn a_damaged_or_vanished_shard_that_a_read_meets_is_restored() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let files = write_files(&client, 0).await;
        let rotten = world.drives[1].rot();
        assert!(rotten > 0 && world.drives[1].rotten() == rotten);
        world.drives[0].forget_all();
        // Late drives are not waited for, so one read need not meet all damage. Not all clients read the same copies.
        while world.drives[1].rotten() > 0 || world.drives[0].shards() < rotten {
            let reader = world.client().await;
            check_files(&reader, &files).await;
            for (entry, _) in reader.take_damaged() {
                assert!(entry.drive.0 <= 1, "{entry:?} is well");
                assert!(matches!(reader.repair_shard(&entry).await, RepairOutcome::Stored { .. }));
            }
        }
        check_redundant(&world, &client, &files, &[2, 3, 4, 5]).await;
    });
}

/// One client of a filesystem (the mount, say) rebuilds while another (the S3 endpoint) writes.
#[test]
fn writes_that_an_older_map_placed_are_written_again_by_the_newer_one() {
    run_with_spares("1+0", 1, |world| async move {
        let (upkeep, gate) = (world.client().await, world.client().await);
        world.drives[0].set(Fault::Slow);
        let writing = tokio::spawn(async move { write_files(&gate, 0).await });
        // A put takes 20 ms.
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert_eq!(world.drives[0].shards(), 0, "it is on its way");
        world.move_position(0, DriveId(1), DriveState::Leaving);
        // The sweep sees nothing to do: what is on its way to the old drive must not be committed after this.
        assert_eq!(rebuild(&upkeep).await, 0);
        let files = writing.await.unwrap();
        world.drives[0].forget_all();
        check_files(&world.client().await, &files).await;
    });
}

/// Flips a bit in one block of every shard of a drive, another block on each drive.
fn rot_blocks(world: &World, drives: std::ops::Range<usize>, block_of: impl Fn(usize) -> usize) {
    drives.for_each(|drive| world.drives[drive].rot_block(block_of(drive)));
}

async fn damage_adds_up(world: Arc<World>, damaged: usize) {
    let writer = world.client().await;
    let ino = create(&writer, "file").await;
    let bytes = pattern(1, 1 << 20);
    writer.write(ino, 0, &bytes).await.unwrap();
    writer.fsync(ino).await.unwrap();
    // More shards than may be lost are damaged, but each block of the stripe in only one of them.
    rot_blocks(&world, 0..damaged, |drive| 3 * drive + 1);
    let reader = world.client().await;
    assert!(read_all(&reader, ino).await.unwrap() == bytes, "every block is in enough shards");
    for (owed, _) in reader.take_damaged() {
        assert!(matches!(reader.repair_shard(&owed).await, RepairOutcome::Stored { .. }), "{owed:?}");
    }
    let rotten: usize = world.drives.iter().map(|drive| drive.rotten()).sum();
    assert_eq!(rotten, 0, "all of them are repaired");
}

#[test]
fn damage_in_different_blocks_of_different_copies_is_read_around_and_repaired() {
    run("r3", |world| damage_adds_up(world, 3));
}

#[test]
fn damage_in_different_blocks_of_different_shards_is_read_around_and_repaired() {
    run("4+2", |world| damage_adds_up(world, 4));
    run("4+2", |world| damage_adds_up(world, 6));
}

/// Another node restores shards only with the map by which it was chosen, or a later one.
#[test]
fn a_client_waits_for_a_map() {
    run("r2", |world| async move {
        let client = world.client().await;
        let now = client.map_epoch();
        client.has_map(now).await;
        let waiting = client.clone();
        let waiting = tokio::spawn(async move { waiting.has_map(Epoch(now.0 + 1)).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiting.is_finished());
        // Each change has the next epoch.
        world.change(|_| {});
        tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap();
        assert_eq!(client.map_epoch(), Epoch(now.0 + 1));
    });
}
