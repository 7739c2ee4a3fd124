//! Extents in an object store: extents that were uploaded and released from the drives are read as before, come back,
//! and leave nothing behind.

mod uploads;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{
    Fault, MemStore, TIER_CLUSTER, World, create, new_file, pattern, read_all, read_in_parts, run, until,
};
use base::{FsError, Ino};
use bytes::Bytes;
use client::{Client, Fetched, FileKind, FileTiers, MakeNode, OpenIntent, RenameMode, SeekKind, UploadError};
use layout::BlobId;
use wire::BoxFuture;
use wire::meta::MetaRequest;
use wire::store::{BringsBack, MovePace, ObjectStore, Outgoing, StoreError};
use wire::tier::{Stage, TierMode, TierRequest};

const BLOB: u32 = 4 << 20;
/// Copies, an extent, and several.
const SIZES: [usize; 5] = [9000, 100_000, 300_000, 3 << 20, (9 << 20) + 777];

async fn write_files(client: &Client) -> Vec<(Ino, Vec<u8>)> {
    let mut files = Vec::new();
    for (number, len) in SIZES.into_iter().enumerate() {
        let ino = create(client, &format!("file {number}")).await;
        let bytes = pattern(number as u64, len);
        client.write(ino, 0, &bytes).await.unwrap();
        client.fsync(ino).await.unwrap();
        files.push((ino, bytes));
    }
    files
}

async fn upload_all(client: &Client) {
    loop {
        let mut due = client.tier_due(Stage::Queued, u64::MAX - 1, None).await.unwrap();
        due.truncate(Client::fitting(&due, BLOB));
        if due.is_empty() {
            return;
        }
        assert!(client.upload(due, BLOB, None).await.unwrap() > 0);
    }
}

/// A client of a filesystem whose files were there before a store was attached, and are now only in the store.
async fn all_away(world: &World, store: &Arc<MemStore>) -> (Client, Vec<(Ino, Vec<u8>)>) {
    let client = world.tiered_client(store).await;
    let files = write_files(&client).await;
    client.tier_attach().await.unwrap();
    while client.tier_queue_step().await.unwrap() {}
    send_away(world, &client).await;
    (client, files)
}

/// Moves everything to the store and off the drives.
async fn send_away(world: &World, client: &Client) {
    upload_all(client).await;
    client.release_by(u64::MAX - 1, u64::MAX).await.unwrap();
    let stat = client.tier_stat().await.unwrap();
    assert_eq!((stat.queued.extents, stat.both.extents), (0, 0));
    assert!(stat.away.extents > 0);
    while world.drives.iter().any(|drive| !drive.entries().is_empty()) {
        client.reclaim_step(None).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn tiers(client: &Client, ino: Ino) -> FileTiers {
    let (mut sum, mut off) = (FileTiers::default(), Some(0));
    while let Some(at) = off {
        let page = client.file_parts(ino, at).await.unwrap();
        page.add_to(&mut sum);
        off = page.next;
    }
    sum
}

async fn delete_dead(client: &Client) {
    for blob in client.dead_blobs().await.unwrap() {
        client.delete_blob(blob).await.unwrap();
        client.blobs_deleted(vec![blob.0]).await.unwrap();
    }
}

#[test]
fn content_that_left_the_drives_is_read_as_before_and_comes_back() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, early) = all_away(&world, &store).await;
        for (ino, bytes) in &early {
            let found = tiers(&client, *ino).await;
            assert_eq!(found, FileTiers { away_bytes: bytes.len() as u64, ..FileTiers::default() });
        }
        let cold = world.tiered_client(&store).await;
        for (ino, bytes) in &early {
            assert!(read_in_parts(&cold, *ino, 128 << 10).await.unwrap() == *bytes, "len={}", bytes.len());
        }
        // Every byte came once, and so did the fronts of the blobs.
        let whole: u64 = early.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let fronts = 2 * 128 * 1024 * store.keys().len() as u64;
        assert!(store.got_bytes() < whole * 21 / 20 + fronts + 8192, "{} of {whole}", store.got_bytes());
        // Waits for all of them: bytes still on their way would be counted below.
        for (ino, _) in &early {
            while tiers(&cold, *ino).await.away_bytes > 0 {
                read_all(&cold, *ino).await.unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        // On drives again, and still in the blob: no upload is needed.
        assert_eq!(tiers(&cold, early[4].0).await.both_bytes, early[4].1.len() as u64);
        let gets = store.gets.lock().unwrap().len();
        let third = world.client().await;
        assert!(read_all(&third, early[4].0).await.unwrap() == early[4].1);
        assert_eq!(store.gets.lock().unwrap().len(), gets);
    });
}

/// The store of a client without keys: another client reads for it, and brings back what it tells.
struct ThroughAnother {
    other: Client,
    told: tokio::sync::mpsc::UnboundedSender<(Ino, u64, u64)>,
}

impl ObjectStore for ThroughAnother {
    fn put(&self, _key: String, _object: Outgoing) -> BoxFuture<'_, Result<(), StoreError>> {
        unreachable!("it only reads")
    }

    fn get(&self, key: String, range: Option<Range<u64>>) -> BoxFuture<'_, Result<Bytes, StoreError>> {
        let BlobId { serial, term, .. } = BlobId::of_key(&key, TIER_CLUSTER).unwrap();
        Box::pin(async move { self.other.read_blob(serial, term, range.unwrap()).await })
    }

    fn delete(&self, _key: String) -> BoxFuture<'_, Result<(), StoreError>> {
        unreachable!("it only reads")
    }

    fn brings_back(&self) -> Option<&dyn BringsBack> {
        Some(self)
    }
}

impl BringsBack for ThroughAnother {
    fn was_read(&self, ino: Ino, off: u64, len: u64) {
        let _ = self.told.send((ino, off, len));
    }
}

#[test]
fn a_client_without_keys_reads_through_another_that_brings_back() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, files) = all_away(&world, &store).await;
        let (told, mut reads) = tokio::sync::mpsc::unbounded_channel();
        let (other, wire) = world.client_at(Arc::new(ThroughAnother { other: client.clone(), told })).await;
        for (ino, bytes) in &files {
            assert!(read_in_parts(&other, *ino, 128 << 10).await.unwrap() == *bytes, "len={}", bytes.len());
        }
        // Nothing comes back by the reader itself.
        assert!(wire.take_asked().iter().all(|request| !matches!(request, MetaRequest::Rehydrate(_))));
        let whole: u64 = files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        assert_eq!(client.tier_stat().await.unwrap().away.bytes, whole);
        while let Ok((ino, off, len)) = reads.try_recv() {
            client.bring_back_for(ino, off, len).await.unwrap();
        }
        for (ino, _) in &files {
            while tiers(&client, *ino).await.away_bytes > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        for (ino, bytes) in &files {
            assert!(read_all(&other, *ino).await.unwrap() == *bytes);
        }
    });
}

#[test]
fn short_files_that_are_read_come_back_with_the_same_bytes() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let client = world.tiered_client(&store).await;
        client.tier_attach().await.unwrap();
        let mut files = Vec::new();
        for number in 0..20 {
            let ino = create(&client, &format!("short {number}")).await;
            client.write(ino, 0, &pattern(number, 60_000)).await.unwrap();
            client.fsync(ino).await.unwrap();
            files.push(ino);
        }
        send_away(&world, &client).await;
        let cold = world.tiered_client(&store).await;
        for (number, ino) in files.iter().enumerate() {
            assert!(read_all(&cold, *ino).await.unwrap() == pattern(number as u64, 60_000));
            while tiers(&cold, *ino).await.away_bytes > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        // The whole blocks of each, once, and the front of the blob.
        let (blocks, fronts) = (20 * 15 * 4096, 128 * 1024 * store.keys().len() as u64);
        assert!(store.got_bytes() <= blocks + fronts, "{} of {blocks}", store.got_bytes());
    });
}

#[test]
fn a_file_is_fetched_with_few_requests_and_no_more_than_it_has() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, files) = all_away(&world, &store).await;
        let (ino, bytes) = &files[4];
        let requests = || store.gets.lock().unwrap().len();
        let (gets, got) = (requests(), store.got_bytes());
        let fetched = fetch_whole(&client, *ino).await;
        assert_eq!(fetched, bytes.len() as u64);
        assert_eq!(tiers(&client, *ino).await.away_bytes, 0);
        let (gets, got) = (requests() - gets, store.got_bytes() - got);
        // Blobs of 4 MiB hold it: each is read once for its front, and about once for its part of the file.
        assert!(gets <= 12, "{gets} requests");
        let fronts = 128 * 1024 * store.keys().len() as u64;
        assert!(got <= fetched * 21 / 20 + fronts, "{got} of {fetched}");
        assert!(read_all(&client, *ino).await.unwrap() == *bytes);
    });
}

#[test]
fn short_files_are_fetched_together_and_a_missing_one_holds_up_no_other() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let client = world.tiered_client(&store).await;
        client.tier_attach().await.unwrap();
        let mut files = Vec::new();
        for number in 0..30 {
            let ino = create(&client, &format!("short {number}")).await;
            client.write(ino, 0, &pattern(number, 60_000)).await.unwrap();
            client.fsync(ino).await.unwrap();
            files.push(ino);
        }
        let in_store = async || {
            let (entries, _) = client.scan_map(None).await.unwrap();
            entries.iter().filter(|entry| entry.in_store).count()
        };
        assert_eq!(in_store().await, 0);
        send_away(&world, &client).await;
        assert_eq!(store.keys().len(), 1, "one blob has them");
        let gets = store.gets.lock().unwrap().len();
        let mut wanted: Vec<(Ino, u64)> = files.iter().map(|ino| (*ino, 0)).collect();
        wanted.insert(7, (Ino(1 << 40), 0));
        let mut fetched = client.fetch_files(&wanted, None).await;
        assert_eq!(fetched.remove(7), Err(FsError::Stale));
        assert!(fetched.iter().all(|file| *file == Ok(Fetched { bytes: 60_000, next: None })), "{fetched:?}");
        // They need no packing: then they would have to be uploaded again.
        assert_eq!(in_store().await, files.len());
        // The front of the blob, and all files at once.
        let gets = store.gets.lock().unwrap().len() - gets;
        assert!(gets <= 2, "{gets} requests");
        for (number, ino) in files.iter().enumerate() {
            assert_eq!(tiers(&client, *ino).await.both_bytes, 60_000);
            assert!(read_all(&client, *ino).await.unwrap() == pattern(number as u64, 60_000));
        }
    });
}

#[test]
fn clones_of_tiered_content_take_no_space_on_drives() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, files) = all_away(&world, &store).await;
        let (ino, bytes) = &files[4];
        for number in 0..3 {
            let clone = create(&client, &format!("clone {number}")).await;
            client.copy_range((*ino, 0), (clone, 0), bytes.len() as u64).await.unwrap();
        }
        let stat = client.statfs().await.unwrap();
        assert!(stat.used_bytes >= 4 * bytes.len() as u64);
        // The next heartbeat reports it.
        while client.statfs().await.unwrap().drive_bytes > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
}

/// Fetches a file to its end. Returns the bytes that came.
async fn fetch_whole(client: &Client, ino: Ino) -> u64 {
    let (mut fetched, mut next) = (0, Some(0));
    while let Some(off) = next {
        let step = client.fetch_files(&[(ino, off)], None).await[0].unwrap();
        (fetched, next) = (fetched + step.bytes, step.next);
    }
    fetched
}

#[test]
fn the_rest_of_an_overwritten_file_is_fetched_once() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, files) = all_away(&world, &store).await;
        let (ino, bytes) = &files[3];
        let mut expected = bytes.clone();
        for off in (0..bytes.len()).step_by(32 << 10) {
            client.write(*ino, off as u64, &[7; 4096]).await.unwrap();
            expected[off..off + 4096].fill(7);
        }
        client.fsync(*ino).await.unwrap();
        let got = store.got_bytes();
        let fetched = fetch_whole(&client, *ino).await;
        assert_eq!(fetched, bytes.len() as u64 / 8 * 7);
        let (got, fronts) = (store.got_bytes() - got, 128 * 1024 * store.keys().len() as u64);
        assert!(got <= bytes.len() as u64 * 21 / 20 + fronts, "{got} of {fetched}");
        assert_eq!(tiers(&client, *ino).await.away_bytes, 0);
        assert!(read_all(&client, *ino).await.unwrap() == expected);
    });
}

#[test]
fn a_change_during_a_fetch_does_not_keep_the_rest_away() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, files) = all_away(&world, &store).await;
        let (ino, bytes) = &files[3];
        store.get_ms.store(300, Ordering::SeqCst);
        let asked = store.asked.load(Ordering::SeqCst);
        let (fetching, file) = (client.clone(), *ino);
        let step = tokio::spawn(async move { fetching.fetch_files(&[(file, 0)], None).await[0] });
        until(|| store.asked.load(Ordering::SeqCst) > asked).await;
        client.write(*ino, 1 << 20, &[7; 4096]).await.unwrap();
        client.fsync(*ino).await.unwrap();
        let step = step.await.unwrap().unwrap();
        assert!(step.next.is_some_and(|next| next <= 1 << 20), "{step:?}");
        fetch_whole(&client, *ino).await;
        let found = tiers(&client, *ino).await;
        assert_eq!((found.away_bytes, found.both_bytes), (0, bytes.len() as u64 - 4096));
    });
}

#[test]
fn all_readers_that_wait_for_a_failing_store_fail() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (ino, _) = all_away(&world, &store).await.1.pop().unwrap();
        let cold = world.tiered_client(&store).await;
        store.get_ms.store(200, Ordering::SeqCst);
        store.down.store(true, Ordering::SeqCst);
        let asked = store.asked.load(Ordering::SeqCst);
        let reads = (0..20).map(|_| cold.read(ino, 0, 4096));
        for read in futures_util::future::join_all(reads).await {
            assert_eq!(read, Err(FsError::Io));
        }
        // One request for the front, and one per reader for the bytes.
        let asked = store.asked.load(Ordering::SeqCst) - asked;
        assert!(asked <= 21, "{asked} requests");
        store.down.store(false, Ordering::SeqCst);
        assert_eq!(cold.read(ino, 0, 4096).await.unwrap().len(), 4096);
    });
}

/// Counts the fetched bytes.
#[derive(Default)]
struct Counts {
    bytes: AtomicU64,
}

impl MovePace for Counts {
    fn rest_after(&self, bytes: u64) -> Duration {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Duration::from_millis(1)
    }
}

#[test]
fn fetches_keep_to_a_pace_while_the_filesystem_is_in_use() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, files) = all_away(&world, &store).await;
        let (ino, bytes) = &files[4];
        let pace = Counts::default();
        // The clock stands still.
        world.sim.clock.advance_ns(1_000_000_000);
        client.note_use();
        let (mut fetched, mut next) = (0, Some(0));
        while let Some(off) = next {
            let step = client.fetch_files(&[(*ino, off)], Some(&pace)).await[0].unwrap();
            (fetched, next) = (fetched + step.bytes, step.next);
        }
        assert_eq!(fetched, bytes.len() as u64);
        let paced = pace.bytes.into_inner();
        assert!(paced >= fetched, "{paced} of {fetched} bytes");
        let (ino, _) = &files[3];
        let pace = Counts::default();
        // The filesystem is idle for a while.
        world.sim.clock.advance_ns(1_000_000_000);
        let step = client.fetch_files(&[(*ino, 0)], Some(&pace)).await[0].unwrap();
        assert!(step.bytes > 0);
        assert_eq!(pace.bytes.into_inner(), 0);
    });
}

#[test]
fn a_short_read_of_a_long_file_fetches_little() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (ino, bytes) = all_away(&world, &store).await.1.pop().unwrap();
        let cold = world.tiered_client(&store).await;
        let off = bytes.len() - 160;
        assert_eq!(cold.read(ino, off as u64, 160).await.unwrap(), bytes[off..]);
        let first: Vec<u64> = store.gets.lock().unwrap().iter().take(2).map(|(_, bytes)| *bytes).collect();
        assert!(first.iter().sum::<u64>() <= (128 << 10) + 8192, "{first:?}");
    });
}

#[test]
fn blobs_are_looked_for_in_another_store_before_it_is_used() {
    run("4+2", |world| async move {
        let (store, other) = (Arc::new(MemStore::default()), MemStore::default());
        let client = world.tiered_client(&store).await;
        assert_eq!(client.missing_blob(&other).await, Ok(None));
        let (client, _) = all_away(&world, &store).await;
        assert_eq!(client.missing_blob(&*store).await, Ok(None));
        let (key, error) = client.missing_blob(&other).await.unwrap().unwrap();
        assert!(store.keys().contains(&key) && matches!(error, StoreError::NotFound(_)), "{key}: {error}");
        let objects = store.objects.lock().unwrap().clone();
        *other.objects.lock().unwrap() = objects.clone();
        assert_eq!(client.missing_blob(&other).await, Ok(None));
        // Damage on the way does not make it another blob.
        other.spoils_headers.store(3, Ordering::SeqCst);
        assert_eq!(client.missing_blob(&other).await, Ok(None));
        assert_eq!(other.spoils_headers.load(Ordering::SeqCst), 0);
        let strange = objects.values().next().unwrap().slice(4096..);
        other.objects.lock().unwrap().values_mut().for_each(|bytes| *bytes = strange.clone());
        let (_, error) = client.missing_blob(&other).await.unwrap().unwrap();
        assert!(matches!(error, StoreError::Unexpected(_)), "{error}");
    });
}

#[test]
fn the_newest_of_very_many_blobs_is_looked_for() {
    run("r2", |world| async move {
        let (store, other) = (Arc::new(MemStore::default()), MemStore::default());
        let client = world.tiered_client(&store).await;
        client.tier_attach().await.unwrap();
        let ino = create(&client, "file").await;
        // More than a page of blobs, with one extent each.
        for number in 0..1100_u64 {
            client.write(ino, number * 32768, &pattern(number, 20_000)).await.unwrap();
            client.fsync(ino).await.unwrap();
        }
        let mut uploads = Vec::new();
        let mut after = None;
        loop {
            let due = client.tier_due(Stage::Queued, u64::MAX - 1, after).await.unwrap();
            let Some(last) = due.last() else { break };
            after = Some((last.written_s, last.extent.id));
            uploads.extend(due);
        }
        for due in uploads {
            client.upload(vec![due], 8 << 20, None).await.unwrap();
        }
        let keys = store.keys();
        assert!(keys.len() > 1024, "{}", keys.len());
        let objects = store.objects.lock().unwrap().clone();
        *other.objects.lock().unwrap() = objects;
        assert_eq!(client.missing_blob(&other).await, Ok(None));
        let newest = client.blobs(None).await.unwrap().last().unwrap().serial;
        let newest = client.blobs(Some(newest)).await.unwrap().last().unwrap().serial;
        let lost = |key: &String| {
            let bytes = other.objects.lock().unwrap()[key].clone();
            layout::BlobHeader::decode(&bytes[..layout::BLOB_HEADER_BYTES]).unwrap().id.serial == newest
        };
        let lost = keys.into_iter().find(lost).unwrap();
        other.objects.lock().unwrap().remove(&lost);
        let (key, error) = client.missing_blob(&other).await.unwrap().unwrap();
        assert!(key == lost && matches!(error, StoreError::NotFound(_)), "{key}: {error}");
    });
}

#[test]
fn all_clients_see_a_writer_that_waits_for_room() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let client = world.tiered_client(&store).await;
        client.tier_attach().await.unwrap();
        world.drives.iter().for_each(|drive| drive.capacity_bytes.store(6 << 20, Ordering::Relaxed));
        // Through any client of the filesystem.
        let writer = world.tiered_client(&store).await;
        let writes = tokio::spawn(async move {
            for number in 0..12 {
                let ino = create(&writer, &format!("{number}")).await;
                writer.write(ino, 0, &pattern(number, 4 << 20)).await.unwrap();
                writer.fsync(ino).await.unwrap();
            }
        });
        assert!(!client.makes_room());
        let mut waited = 0;
        while !writes.is_finished() {
            // Without a waiting writer, the extents are not due yet.
            if client.makes_room() {
                waited += 1;
                upload_all(&client).await;
            }
            while client.reclaim_step(None).await.unwrap().deleted > 0 {}
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        writes.await.unwrap();
        assert!(waited > 0 && !client.makes_room());
    });
}

#[test]
fn a_store_that_is_down_or_lies_costs_an_error_and_nothing_else() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, files) = all_away(&world, &store).await;
        for fault in [&store.down, &store.lies] {
            fault.store(true, Ordering::SeqCst);
            let cold = world.tiered_client(&store).await;
            for (ino, _) in &files {
                assert_eq!(read_all(&cold, *ino).await, Err(FsError::Io));
            }
            let other = create(&cold, "other").await;
            cold.write(other, 0, b"other").await.unwrap();
            cold.fsync(other).await.unwrap();
            assert_eq!(read_all(&cold, other).await.unwrap(), b"other");
            cold.unlink(Ino::ROOT, b"other").await.unwrap();
            fault.store(false, Ordering::SeqCst);
            for (ino, bytes) in &files {
                assert!(read_all(&cold, *ino).await.unwrap() == *bytes, "after the fault");
            }
            // For the next fault, everything leaves the drives again.
            tokio::time::sleep(Duration::from_millis(300)).await;
            send_away(&world, &cold).await;
        }
        store.down.store(true, Ordering::SeqCst);
        let ino = create(&client, "new").await;
        client.write(ino, 0, &pattern(9, 50_000)).await.unwrap();
        client.fsync(ino).await.unwrap();
        let due = client.tier_due(Stage::Queued, u64::MAX - 1, None).await.unwrap();
        assert_eq!(due.len(), 1);
        client.upload(due, BLOB, None).await.unwrap_err();
        store.down.store(false, Ordering::SeqCst);
        upload_all(&client).await;
        assert_eq!(tiers(&client, ino).await.both_bytes, 50_000);
    });
}

#[test]
fn extents_deleted_while_a_reader_waits_for_the_store_leave_the_drives() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, files) = all_away(&world, &store).await;
        let (ino, bytes) = &files[2];
        let other = create(&client, "other").await;
        client.write(other, 0, &pattern(9, 3 << 20)).await.unwrap();
        client.fsync(other).await.unwrap();
        store.get_ms.store(10_000, Ordering::SeqCst);
        let gone = async {
            // A heartbeat reports the read.
            tokio::time::sleep(Duration::from_millis(700)).await;
            client.close_file(other);
            client.unlink(Ino::ROOT, b"other").await.unwrap();
            while world.drives.iter().any(|drive| !drive.entries().is_empty()) {
                client.purge_step().await.unwrap();
                client.reclaim_step(None).await.unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::select! {
            read = read_all(&client, *ino) => panic!("{} bytes came first", read.unwrap().len()),
            () = gone => {}
        }
        store.get_ms.store(0, Ordering::SeqCst);
        assert!(read_all(&client, *ino).await.unwrap() == *bytes);
    });
}

#[test]
fn a_damaged_front_is_fetched_once_more() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (_client, files) = all_away(&world, &store).await;
        let cold = world.tiered_client(&store).await;
        for (ino, bytes) in &files {
            store.spoils_headers.store(1, Ordering::SeqCst);
            assert!(read_all(&cold, *ino).await.unwrap() == *bytes, "len={}", bytes.len());
        }
    });
}

#[test]
fn a_store_is_left_when_everything_is_back() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let client = world.tiered_client(&store).await;
        client.tier_attach().await.unwrap();
        let files = write_files(&client).await;
        send_away(&world, &client).await;
        // It knows the old places, and does not learn that the content comes back.
        let old = world.tiered_client(&store).await;
        for (ino, bytes) in &files {
            old.open_file(*ino, OpenIntent::Read).await.unwrap();
            assert_eq!(old.seek(*ino, 0, SeekKind::Data).await.unwrap(), 0, "len={}", bytes.len());
        }
        client.tier_leave().await.unwrap();
        for (ino, _) in &files {
            fetch_whole(&client, *ino).await;
        }
        while client.tier_stat().await.unwrap().mode != TierMode::Off {
            client.tier_leave_step().await.unwrap();
            delete_dead(&client).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(store.keys().is_empty());
        let plain = world.client().await;
        for (ino, bytes) in &files {
            assert!(read_all(&plain, *ino).await.unwrap() == *bytes);
        }
        store.down.store(true, Ordering::SeqCst);
        for (ino, bytes) in &files {
            assert!(read_all(&old, *ino).await.unwrap() == *bytes, "through an old map");
        }
        client.tier_attach().await.unwrap();
    });
}

#[test]
fn a_store_that_was_being_left_is_used_again() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, files) = all_away(&world, &store).await;
        client.tier_leave().await.unwrap();
        let (came, stays) = files.split_at(3);
        for (ino, _) in came {
            fetch_whole(&client, *ino).await;
        }
        while client.tier_leave_step().await.unwrap() {}
        client.tier_attach().await.unwrap();
        // Extents that came back stay on drives, and the others stay away.
        for (ino, bytes) in came {
            assert_eq!(tiers(&client, *ino).await.drives_bytes, bytes.len() as u64);
        }
        for (ino, bytes) in stays {
            assert_eq!(tiers(&client, *ino).await.away_bytes, bytes.len() as u64);
        }
        while client.tier_queue_step().await.unwrap() {}
        let queued: usize = came.iter().map(|(_, bytes)| bytes.len()).sum();
        assert_eq!(client.tier_stat().await.unwrap().queued.bytes, queued as u64);
        send_away(&world, &client).await;
        delete_dead(&client).await;
        let cold = world.tiered_client(&store).await;
        for (ino, bytes) in &files {
            assert!(read_all(&cold, *ino).await.unwrap() == *bytes, "len={}", bytes.len());
        }
    });
}

/// Fetches files of `len` bytes that are adjacent in a blob. One block of file 3 is damaged for good.
async fn fetch_beside_damage(world: Arc<World>, len: usize) {
    let store = Arc::new(MemStore::default());
    let client = world.tiered_client(&store).await;
    client.tier_attach().await.unwrap();
    let mut files = Vec::new();
    for number in 0..6 {
        let ino = create(&client, &format!("file {number}")).await;
        client.write(ino, 0, &pattern(number, len)).await.unwrap();
        client.fsync(ino).await.unwrap();
        files.push((ino, 0));
    }
    send_away(&world, &client).await;
    assert_eq!(store.keys().len(), 1, "one blob has them");
    let block = pattern(3, len)[4096..8192].to_vec();
    for blob in store.objects.lock().unwrap().values_mut() {
        let mut wrong = blob.to_vec();
        let at = wrong.chunks(4096).position(|found| found == block).unwrap() * 4096;
        wrong[at] ^= 1;
        *blob = wrong.into();
    }
    let cold = world.tiered_client(&store).await;
    for (number, fetched) in cold.fetch_files(&files, None).await.into_iter().enumerate() {
        let expected =
            if number == 3 { Err(FsError::Io) } else { Ok(Fetched { bytes: len as u64, next: None }) };
        assert_eq!(fetched, expected, "file {number} of {len} bytes");
    }
    for (number, (ino, _)) in files.iter().enumerate() {
        let read = read_all(&cold, *ino).await;
        if number == 3 {
            assert_eq!(read, Err(FsError::Io));
        } else {
            assert!(read.unwrap() == pattern(number as u64, len), "file {number} of {len} bytes");
        }
    }
}

#[test]
fn files_beside_damaged_bytes_come_back() {
    for len in [12_000, 40_000, 150_000, 300_000] {
        run("4+2", move |world| fetch_beside_damage(world, len));
    }
}

#[test]
fn a_read_of_a_window_survives_damage_elsewhere_in_it() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, files) = all_away(&world, &store).await;
        let (ino, bytes) = &files[3];
        let block = &bytes[8192..12_288];
        for blob in store.objects.lock().unwrap().values_mut() {
            let Some(at) = blob.chunks(4096).position(|found| found == block) else { continue };
            let mut wrong = blob.to_vec();
            wrong[at * 4096] ^= 1;
            *blob = wrong.into();
        }
        assert_eq!(client.read(*ino, 0, 256 << 10).await, Err(FsError::Io));
        let read = client.read(*ino, 256 << 10, 256 << 10).await.unwrap();
        assert!(read[..] == bytes[256 << 10..512 << 10]);
    });
}

#[test]
fn the_rest_of_a_file_comes_back_if_the_store_lacks_a_part() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, mut files) = all_away(&world, &store).await;
        let (ino, bytes) = files.pop().unwrap();
        let first = client.file_parts(ino, 0).await.unwrap().parts[0].bytes;
        let missing = store.keys().into_iter().find(|key| {
            let objects = store.objects.lock().unwrap();
            objects[key].chunks(4096).any(|block| block == &bytes[..4096])
        });
        store.objects.lock().unwrap().remove(&missing.unwrap()).unwrap();
        world.drives.iter().for_each(|drive| drive.set(Fault::Hanging));
        let answer = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            world.drives.iter().for_each(|drive| drive.set(Fault::None));
        };
        let wanted = [(ino, 0)];
        let (fetched, ()) = tokio::join!(client.fetch_files(&wanted, None), answer);
        assert_eq!(fetched, [Err(FsError::Io)]);
        let found = tiers(&client, ino).await;
        assert!(found.away_bytes >= first && found.both_bytes > 0, "{found:?}");
    });
}
