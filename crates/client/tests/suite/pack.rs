//! Packing and the search for orphans, while clients read and write.

use std::time::Duration;

use crate::common::{Fault, World, create, pattern, read_all, run};
use base::{ExtentId, Ino, ShardIndex};
use client::{Client, ClosedRange, Inventory, MapEntry, PackOutcome, SetAttr};
use wire::meta::Content;

/// Small files of every kind: inline, and copies.
const SIZES: [usize; 6] = [1500, 4096, 7000, 9000, 30_000, 200_000];

async fn write_files(client: &Client, count: usize) -> Vec<(Ino, Vec<u8>)> {
    let mut files = Vec::new();
    for number in 0..count {
        let ino = create(client, &format!("file {number}")).await;
        let bytes = pattern(number as u64, SIZES[number % SIZES.len()] + number);
        client.write(ino, 0, &bytes).await.unwrap();
        client.fsync(ino).await.unwrap();
        files.push((ino, bytes));
    }
    files
}

async fn check_files(client: &Client, files: &[(Ino, Vec<u8>)]) {
    for (ino, bytes) in files {
        assert!(read_all(client, *ino).await.unwrap() == *bytes, "ino={ino} len={}", bytes.len());
    }
}

async fn scan(client: &Client) -> Vec<MapEntry> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let (entries, next) = client.scan_map(after).await.unwrap();
        all.extend(entries);
        after = next;
        if after.is_none() {
            return all;
        }
    }
}

/// Packs everything into extents of about 1 MiB.
async fn pack_all(client: &Client) -> PackOutcome {
    let mut total = PackOutcome::default();
    let (mut load, mut bytes) = (Vec::new(), 0);
    for entry in scan(client).await {
        bytes += entry.piece.len;
        load.push(entry);
        if bytes > 1 << 20 {
            let outcome = client.pack(std::mem::take(&mut load)).await.unwrap();
            bytes = 0;
            total.moved_bytes += outcome.moved_bytes;
            total.left_bytes += outcome.left_bytes;
        }
    }
    let outcome = client.pack(load).await.unwrap();
    total.moved_bytes += outcome.moved_bytes;
    total.left_bytes += outcome.left_bytes;
    total
}

/// Deletes free extents from the drives that answer, until `drives` have no copies left.
async fn reclaim_copies(world: &World, client: &Client, drives: std::ops::Range<usize>) {
    let copies = || {
        world.drives[drives.clone()]
            .iter()
            .any(|drive| drive.entries().iter().any(|entry| entry.shape.k == 1))
    };
    while copies() {
        client.reclaim_step(None).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[test]
fn packed_files_are_read_by_all_clients_also_through_old_maps() {
    run("4+2", |world| async move {
        let (one, packer) = (world.client().await, world.client().await);
        let files = write_files(&one, 40).await;
        check_files(&one, &files).await;
        check_files(&packer, &files).await;
        let before = scan(&packer).await;
        assert!(before.iter().any(|entry| matches!(entry.piece.content, Content::Inline(_))));
        let bytes: u64 = files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        assert_eq!(pack_all(&packer).await, PackOutcome { moved_bytes: bytes, left_bytes: 0 });
        for entry in scan(&packer).await {
            let Content::Extent(extent) = entry.piece.content else {
                panic!("inline content is left: {entry:?}")
            };
            assert_eq!((extent.k, extent.n), (4, 6));
        }
        // The old extents stay until no read uses them, so both kinds of map work.
        check_files(&one, &files).await;
        reclaim_copies(&world, &packer, 0..6).await;
        check_files(&one, &files).await;
        check_files(&world.client().await, &files).await;
    });
}

#[test]
fn a_reader_asks_for_a_new_map_when_the_only_drive_reports_late_that_an_extent_is_gone() {
    run("1+0", |world| async move {
        let (one, packer) = (world.client().await, world.client().await);
        let files = write_files(&one, 12).await;
        check_files(&one, &files).await;
        let drive = &world.drives[0];
        let old: Vec<ExtentId> = drive.entries().iter().map(|entry| entry.key.extent).collect();
        pack_all(&packer).await;
        while drive.entries().iter().any(|entry| old.contains(&entry.key.extent)) {
            packer.reclaim_step(None).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        drive.set(Fault::Hanging);
        let hanging = async {
            tokio::time::sleep(Duration::from_millis(1500)).await;
            drive.set(Fault::None);
        };
        tokio::join!(check_files(&one, &files), hanging);
    });
}

#[test]
fn a_reader_asks_for_a_new_map_while_a_drive_is_silent() {
    run("4+2", |world| async move {
        let (one, packer) = (world.client().await, world.client().await);
        let files = write_files(&one, 12).await;
        check_files(&one, &files).await;
        pack_all(&packer).await;
        // Two of three copies are deleted, and the state of the third is unknown.
        world.drives[2].set(Fault::Failed);
        reclaim_copies(&world, &packer, 0..2).await;
        assert!(world.drives[2].entries().iter().any(|entry| entry.shape.k == 1));
        check_files(&one, &files).await;
        world.drives[2].set(Fault::None);
        reclaim_copies(&world, &packer, 0..6).await;
        check_files(&one, &files).await;
    });
}

#[test]
fn packed_content_is_cloned_overwritten_and_cut_as_any_other() {
    run("4+2", |world| async move {
        let (one, packer) = (world.client().await, world.client().await);
        let mut files = write_files(&one, 12).await;
        check_files(&one, &files).await;
        pack_all(&packer).await;
        reclaim_copies(&world, &packer, 0..6).await;
        let mut copies = Vec::new();
        for (number, (ino, bytes)) in files.iter_mut().enumerate() {
            // Through maps that name deleted extents.
            let copy = create(&one, &format!("copy {number}")).await;
            one.copy_range((*ino, 0), (copy, 0), bytes.len() as u64).await.unwrap();
            copies.push((copy, bytes.clone()));
            one.write(*ino, 700, &[7; 500]).await.unwrap();
            bytes[700..1200].fill(7);
            one.fsync(*ino).await.unwrap();
            one.setattr(*ino, SetAttr { size: Some(1400), ..SetAttr::default() }).await.unwrap();
            bytes.truncate(1400);
        }
        check_files(&one, &files).await;
        check_files(&one, &copies).await;
        // Again, with cut and shared pieces: of two clones only the packed one moves.
        pack_all(&packer).await;
        while packer.reclaim_step(None).await.unwrap().deleted > 0 {}
        check_files(&one, &files).await;
        check_files(&one, &copies).await;
        check_files(&world.client().await, &copies).await;
    });
}

#[test]
fn a_reader_with_an_old_map_waits_for_no_drive_that_is_away() {
    run("r2", |world| async move {
        let (packer, reader) = (world.client().await, world.patient_client().await);
        let files = write_files(&reader, 12).await;
        check_files(&reader, &files).await;
        let before: Vec<_> =
            world.drives.iter().flat_map(|drive| drive.entries()).map(|entry| entry.key).collect();
        pack_all(&packer).await;
        let is_old_left = || {
            let mut left = world.drives.iter().flat_map(|drive| drive.entries());
            left.any(|entry| before.contains(&entry.key))
        };
        // Only after the heartbeats of all clients said that no read uses them.
        while is_old_left() {
            packer.reclaim_step(None).await.unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        world.drives[0].set(Fault::Away);
        check_files(&reader, &files).await;
        // What is there on no drive that is reached is waited for.
        world.drives[1].set(Fault::Missing);
        let client = world.patient_client().await;
        let (ino, bytes) = files.last().unwrap();
        let read = tokio::time::timeout(Duration::from_secs(2), read_all(&client, *ino)).await;
        assert!(read.is_err(), "{:?}", read.map(|read| read.is_ok()));
        world.drives[0].set(Fault::None);
        assert!(read_all(&client, *ino).await.unwrap() == *bytes);
    });
}

#[test]
fn a_piece_that_changed_since_it_was_read_stays_as_it_is() {
    run("4+2", |world| async move {
        let (one, packer) = (world.client().await, world.client().await);
        let mut files = write_files(&one, 12).await;
        let old = scan(&packer).await;
        for (ino, bytes) in files.iter_mut().step_by(2) {
            one.write(*ino, 10, &[9; 100]).await.unwrap();
            bytes[10..110].fill(9);
            one.fsync(*ino).await.unwrap();
        }
        let wanted: u64 = old.iter().map(|entry| entry.piece.len).sum();
        let outcome = packer.pack(old.clone()).await.unwrap();
        let same: usize = files.iter().skip(1).step_by(2).map(|(_, bytes)| bytes.len()).sum();
        assert_eq!(outcome, PackOutcome { moved_bytes: same as u64, left_bytes: wanted - same as u64 });
        check_files(&packer, &files).await;
        // No piece is left to move: the new extent is deleted at once.
        let shards: usize = world.drives.iter().map(|drive| drive.shards()).sum();
        assert_eq!(packer.pack(old).await.unwrap().moved_bytes, 0);
        assert_eq!(world.drives.iter().map(|drive| drive.shards()).sum::<usize>(), shards);
        check_files(&one, &files).await;
    });
}

/// Runs one whole search. Returns how many extents were deleted, and whether every drive was asked.
async fn search(client: &Client, ranges: &[ClosedRange]) -> (u64, bool) {
    let inventory = orphans(client, ranges).await;
    let (deleted, everywhere) = client.delete_orphans(&inventory).await.unwrap();
    (deleted, everywhere && inventory.silent.is_empty())
}

/// Extents that drives hold and no map refers to.
async fn orphans(client: &Client, ranges: &[ClosedRange]) -> Inventory {
    let mut inventory = client.inventory(ranges).await;
    for entry in scan(client).await {
        if let Content::Extent(extent) = entry.piece.content {
            inventory.referred(extent.id);
        }
    }
    inventory
}

#[test]
fn shards_without_a_reference_are_deleted_once_their_range_is_closed() {
    run("4+2", |world| async move {
        let (gone, client) = (world.client().await, world.client().await);
        let files = write_files(&gone, 12).await;
        assert_eq!(client.extent_ranges().await.unwrap().closed, []);
        // Shards of an extent that was never committed: its writer ends first.
        let mut orphan = world.drives[0].entries()[0];
        orphan.key.extent = ExtentId(orphan.key.extent.0 + 1000);
        for (shard, drive) in (0u8..4).zip(&world.drives) {
            drive.plant(orphan, ShardIndex(shard));
        }
        gone.close().await.unwrap();
        let closed = client.extent_ranges().await.unwrap().closed;
        assert_eq!(closed.len(), 1);
        let held = |number: usize| {
            world.drives[number].entries().iter().any(|entry| entry.key.extent == orphan.key.extent)
        };
        let listed = orphans(&client, &closed).await;
        world.drives[3].set(Fault::Failed);
        let deleted = client.delete_orphans(&listed).await.unwrap();
        assert_eq!(deleted, (1, false), "one drive went away after it was asked");
        assert_eq!(search(&client, &closed).await, (0, false), "one drive was not asked");
        assert_eq!([0, 1, 2, 3].map(held), [false, false, false, true]);
        world.drives[3].set(Fault::None);
        assert_eq!(search(&client, &closed).await, (1, true));
        assert!(!held(3));
        assert_eq!(search(&client, &closed).await, (0, true));
        check_files(&client, &files).await;
        client.range_verified(closed[0]).await.unwrap();
        assert_eq!(client.extent_ranges().await.unwrap().closed, []);
    });
}

#[test]
fn clones_share_the_new_extent_as_they_shared_the_old_one() {
    run("4+2", |world| async move {
        let (one, packer) = (world.client().await, world.client().await);
        let bytes = pattern(1, 1 << 20);
        let source = create(&one, "source").await;
        one.write(source, 0, &bytes).await.unwrap();
        one.fsync(source).await.unwrap();
        let mut files = vec![(source, bytes.clone())];
        // The whole file, and a part at another place.
        for (name, from, to, len) in [("all", 0, 0, bytes.len()), ("part", 300_000, 8192, 500_000)] {
            let clone = create(&one, name).await;
            one.copy_range((source, from as u64), (clone, to as u64), len as u64).await.unwrap();
            one.fsync(clone).await.unwrap();
            let content = [&vec![0; to], &bytes[from..from + len]].concat();
            files.push((clone, content));
        }
        let extents = |entries: &[MapEntry]| {
            let id = |entry: &MapEntry| entry.piece.content.extent().map(|extent| extent.id);
            entries.iter().filter_map(id).collect::<std::collections::BTreeSet<_>>()
        };
        let entries = scan(&packer).await;
        let old = extents(&entries);
        assert_eq!((old.len(), entries.len()), (1, 3), "{entries:?}");
        let moved = packer.pack_shared(entries).await.unwrap();
        assert_eq!(moved, PackOutcome { moved_bytes: (2 << 20) + 500_000, left_bytes: 0 });
        let entries = scan(&packer).await;
        let new = extents(&entries);
        assert_eq!((new.len(), entries.len()), (1, 3), "{entries:?}");
        assert!(new.is_disjoint(&old));
        check_files(&one, &files).await;
        check_files(&world.client().await, &files).await;
        // Pieces that are to overlap must do so already.
        let mixed = [files[0].0, files[1].0];
        one.write(mixed[0], 0, &pattern(2, 300_000)).await.unwrap();
        one.fsync(mixed[0]).await.unwrap();
        let outcome = packer.pack_shared(scan(&packer).await).await.unwrap();
        assert_eq!(outcome.moved_bytes, 0, "pieces of two extents");
    });
}
