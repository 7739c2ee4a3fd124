//! Drives that fail, lie, lose shards or are full.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{Fault, World, create, pattern, read_all, run};
use base::{FsError, Ino};
use client::Client;
use wire::meta::{EventSink, MetaRequest, MetaService, OwnerEvent, RequestId};

/// Files of every form of storage: inline, copies, one and several coded extents.
const SIZES: [usize; 5] = [100, 9000, 200_000, 3 << 20, (9 << 20) + 5];

async fn write_files(client: &Client, tag: u64) -> Vec<(Ino, Vec<u8>)> {
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

async fn check_files(client: &Client, files: &[(Ino, Vec<u8>)]) {
    for (ino, bytes) in files {
        assert!(read_all(client, *ino).await.unwrap() == *bytes, "len={}", bytes.len());
        let (off, len) = (bytes.len() / 3, bytes.len() / 5);
        assert!(client.read(*ino, off as u64, len).await.unwrap() == bytes[off..off + len]);
    }
}

fn repair(world: &World) {
    world.drives.iter().for_each(|drive| drive.set(Fault::None));
}

#[test]
fn any_two_bad_drives_of_4_plus_2_change_nothing_for_readers() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let files = write_files(&client, 0).await;
        for fault in [Fault::Failed, Fault::Erring, Fault::Corrupt, Fault::Missing] {
            for one in 0..6 {
                for two in 0..=one {
                    world.drives[one].set(fault);
                    world.drives[two].set(fault);
                    check_files(&client, &files[1..4]).await;
                    repair(&world);
                }
            }
        }
        world.drives[0].set(Fault::Corrupt);
        world.drives[3].set(Fault::Failed);
        check_files(&client, &files).await;
    });
}

#[test]
fn three_bad_drives_of_4_plus_2_are_an_error_and_never_wrong_bytes() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let files = write_files(&client, 0).await;
        for fault in [Fault::Failed, Fault::Erring, Fault::Corrupt, Fault::Missing] {
            (0..3).for_each(|drive| world.drives[drive].set(fault));
            for (ino, bytes) in &files[1..4] {
                assert_eq!(read_all(&client, *ino).await, Err(FsError::Io), "{fault:?} len={}", bytes.len());
            }
            repair(&world);
        }
        check_files(&client, &files).await;
    });
}

#[test]
fn writes_go_on_while_enough_drives_accept_them_and_their_data_is_safe() {
    run("4+2", |world| async move {
        let client = world.client().await;
        for fault in [Fault::Failed, Fault::Erring] {
            world.drives[1].set(fault);
            let files = write_files(&client, 10 + fault as u64).await;
            check_files(&client, &files).await;
            // One shard is owed; one more drive may fail.
            world.drives[5].set(Fault::Failed);
            check_files(&client, &files).await;
            world.drives[5].set(Fault::None);
            let ino = create(&client, &format!("{fault:?}")).await;
            world.drives[2].set(fault);
            client.write(ino, 0, &pattern(1, 1 << 20)).await.unwrap();
            assert_eq!(client.fsync(ino).await, Err(FsError::Io), "fewer than w");
            repair(&world);
            client.fsync(ino).await.expect("nothing was dropped");
            assert!(read_all(&client, ino).await.unwrap() == pattern(1, 1 << 20));
        }
    });
}

#[test]
fn a_write_waits_through_all_steps_in_which_the_planner_finds_other_groups() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let ino = create(&client, "file").await;
        client.write(ino, 0, &pattern(1, 1 << 20)).await.unwrap();
        (4..6).for_each(|drive| world.drives[drive].set(Fault::Failed));
        let planned = async {
            // The failures are noted one after another, and only then there are other groups.
            for _ in 0..8 {
                tokio::time::sleep(Duration::from_millis(60)).await;
                world.change(|_| {});
            }
            repair(&world);
            world.change(|_| {});
        };
        let (synced, ()) = tokio::join!(client.fsync(ino), planned);
        synced.expect("each step may be the one that helps");
        assert!(read_all(&client, ino).await.unwrap() == pattern(1, 1 << 20));
    });
}

#[test]
fn a_single_drive_that_fails_is_an_error_and_no_hang() {
    run("1+0", |world| async move {
        let client = world.client().await;
        let ino = create(&client, "file").await;
        client.write(ino, 0, &pattern(1, 2 << 20)).await.unwrap();
        client.fsync(ino).await.unwrap();
        for fault in [Fault::Failed, Fault::Erring, Fault::Corrupt, Fault::Missing] {
            world.drives[0].set(fault);
            assert_eq!(client.read(ino, 0, 4096).await, Err(FsError::Io), "{fault:?}");
        }
        world.drives[0].set(Fault::Erring);
        client.write(ino, 0, &pattern(2, 2 << 20)).await.unwrap();
        assert_eq!(client.fsync(ino).await, Err(FsError::Io));
        assert!(client.write(ino, 0, b"more").await.is_err(), "writers do not fill memory for ever");
        repair(&world);
        client.fsync(ino).await.unwrap();
        assert!(read_all(&client, ino).await.unwrap() == pattern(2, 2 << 20));
    });
}

/// Deletes free extents, as upkeep does.
async fn reclaim(client: &Client) -> u64 {
    while client.purge_step().await.unwrap() {}
    let mut deleted = 0;
    let mut next = None;
    loop {
        let step = client.reclaim_step(next).await.unwrap();
        deleted += step.deleted;
        next = step.next;
        if next.is_none() {
            return deleted;
        }
    }
}

#[test]
fn data_that_did_not_fit_leaves_nothing_on_drives() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let ino = create(&client, "file").await;
        // Much of it waits for drives that turn out to be smaller than they reported.
        world.drives.iter().for_each(|drive| drive.set(Fault::Storing));
        client.write(ino, 0, &pattern(1, 40 << 20)).await.unwrap();
        world.drives.iter().for_each(|drive| {
            drive.capacity_bytes.store(3 << 20, Ordering::Relaxed);
            drive.set(Fault::None);
        });
        assert_eq!(client.fsync(ino).await, Err(FsError::NoSpace));
        client.unlink(Ino::ROOT, b"file").await.unwrap();
        client.close_file(ino);
        client.forget(ino, 1);
        let left = || world.drives.iter().map(|drive| drive.shards()).sum::<usize>();
        // Committed data goes with the file; no search is needed for the rest.
        for _ in 0..200 {
            reclaim(&client).await;
            if left() == 0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(left(), 0);
    });
}

#[test]
fn full_drives_refuse_further_data_and_deleting_makes_room() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let limit = 6 << 20;
        world.drives.iter().for_each(|drive| drive.capacity_bytes.store(limit, Ordering::Relaxed));
        let mut kept = Vec::new();
        let refused = loop {
            let ino = create(&client, &format!("{}", kept.len())).await;
            let bytes = pattern(kept.len() as u64, 3 << 20);
            let written = client.write(ino, 0, &bytes).await;
            if let Err(error) = written.and(client.fsync(ino).await) {
                assert_eq!(error, FsError::NoSpace);
                break ino;
            }
            kept.push((ino, bytes));
        };
        assert!((5..9).contains(&kept.len()), "{}", kept.len());
        check_files(&client, &kept).await;
        client.setattr(refused, client::SetAttr { size: Some(0), ..Default::default() }).await.unwrap();
        assert_eq!(client.getattr(refused).await.unwrap().stored_bytes, 0, "nothing of it was committed");
        let (gone, _) = kept.remove(0);
        client.unlink(Ino::ROOT, b"0").await.unwrap();
        client.close_file(gone);
        client.forget(gone, 1);
        let mut freed = 0;
        // The close, and the heartbeat that reports that no read uses it, follow by themselves.
        while freed == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            freed = reclaim(&client).await;
        }
        let before = kept.len();
        loop {
            let ino = create(&client, &format!("new {before}")).await;
            let bytes = pattern(99, 2 << 20);
            // The figures of room are refreshed now and then.
            if client.write(ino, 0, &bytes).await.is_ok() {
                client.fsync(ino).await.unwrap();
                kept.push((ino, bytes));
                break;
            }
            client.unlink(Ino::ROOT, format!("new {before}").as_bytes()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        check_files(&client, &kept).await;
    });
}

#[test]
fn a_closed_file_that_cannot_be_written_holds_up_no_other() {
    run("4+2", |world| async move {
        let (client, other) = (world.client().await, world.client().await);
        let removed = create(&client, "removed").await;
        client.write(removed, 0, &pattern(1, 3 << 20)).await.unwrap();
        client.fsync(removed).await.unwrap();
        client.unlink(Ino::ROOT, b"removed").await.unwrap();
        let stuck = create(&client, "stuck").await;
        client.write(stuck, 0, &pattern(2, 100_000)).await.unwrap();
        world.drives.iter().for_each(|drive| drive.set(Fault::Hanging));
        client.close_file(stuck);
        tokio::time::sleep(Duration::from_millis(100)).await;
        client.close_file(removed);
        // A drive that does not answer is given up after ten seconds.
        let gone = async {
            // A request that was sent before keeps its answer.
            while world.client().await.getattr(removed).await != Err(FsError::Stale) {
                tokio::time::sleep(Duration::from_millis(200)).await;
                while other.purge_step().await.unwrap() {}
            }
        };
        tokio::time::timeout(Duration::from_secs(5), gone)
            .await
            .expect("the owner was told that it is closed");
        repair(&world);
        client.fsync(stuck).await.unwrap();
        assert!(read_all(&other, stuck).await.unwrap() == pattern(2, 100_000));
    });
}

#[test]
fn shards_of_a_failed_drive_are_deleted_when_it_is_back() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let ino = create(&client, "file").await;
        client.write(ino, 0, &pattern(1, 3 << 20)).await.unwrap();
        client.fsync(ino).await.unwrap();
        world.drives[2].set(Fault::Failed);
        client.unlink(Ino::ROOT, b"file").await.unwrap();
        client.close_file(ino);
        let used = |drive: usize| world.drives[drive].used_bytes();
        while used(0) > 0 {
            assert_eq!(reclaim(&client).await, 0, "one drive has not deleted its shard");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(used(2) > 0);
        repair(&world);
        assert_eq!(reclaim(&client).await, 1);
        assert_eq!(used(2), 0);
        assert_eq!(reclaim(&client).await, 0);
    });
}

/// After a deletion, data that could not be written makes further writers wait for room instead of failing them.
#[test]
fn a_writer_without_room_has_the_drives_turn_dead_space_into_room() {
    run("4+2", |world| async move {
        let client = world.client().await;
        world.drives.iter().for_each(|drive| {
            drive.capacity_bytes.store(6 << 20, Ordering::Relaxed);
            drive.garbage_bytes.store(6 << 20, Ordering::Relaxed);
        });
        let ino = create(&client, "a").await;
        // The figures of room are refreshed now and then.
        tokio::time::sleep(Duration::from_secs(2)).await;
        client.write(ino, 0, &pattern(1, 3 << 20)).await.unwrap();
        client.fsync(ino).await.unwrap();
        assert!(world.drives.iter().all(|drive| drive.garbage_bytes.load(Ordering::Relaxed) == 0));
    });
}

#[test]
fn a_write_after_deleting_waits_for_the_room_although_another_has_failed() {
    run("4+2", |world| async move {
        let client = world.client().await;
        world.drives.iter().for_each(|drive| drive.capacity_bytes.store(6 << 20, Ordering::Relaxed));
        let mut kept = Vec::new();
        loop {
            let ino = create(&client, &format!("{}", kept.len())).await;
            let written = client.write(ino, 0, &pattern(1, 3 << 20)).await;
            if written.and(client.fsync(ino).await).is_err() {
                // Still open, and dirty.
                break;
            }
            kept.push(ino);
        }
        for (number, ino) in kept.iter().enumerate() {
            client.unlink(Ino::ROOT, format!("{number}").as_bytes()).await.unwrap();
            client.close_file(*ino);
            client.forget(*ino, 1);
        }
        while reclaim(&client).await == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let ino = create(&client, "new").await;
        client.write(ino, 0, &pattern(2, 2 << 20)).await.unwrap();
        client.fsync(ino).await.unwrap();
    });
}

#[test]
fn a_writer_waits_for_space_that_a_read_of_another_client_still_holds() {
    run("4+2", |world| async move {
        struct Deaf;
        impl EventSink for Deaf {
            fn event(&self, _: OwnerEvent) {}
        }
        let client = world.client().await;
        world.drives.iter().for_each(|drive| drive.capacity_bytes.store(6 << 20, Ordering::Relaxed));
        let session = world.owner.connect(Arc::new(Deaf)).await.unwrap();
        let reads = |seq, in_use_ver| {
            let id = RequestId { session, slot: 0, seq };
            world.owner.call(id.into(), MetaRequest::Heartbeat { in_use_ver })
        };
        reads(1, 0).await.unwrap();
        let mut names = Vec::new();
        loop {
            let name = format!("{}", names.len());
            let ino = create(&client, &name).await;
            let written = client.write(ino, 0, &pattern(1, 3 << 20)).await;
            let full = written.and(client.fsync(ino).await).is_err();
            client.setattr(ino, client::SetAttr { size: Some(0), ..Default::default() }).await.unwrap();
            client.close_file(ino);
            if full {
                break;
            }
            names.push(name);
        }
        assert!(!names.is_empty());
        let ino = create(&client, "new").await;
        let (written, ()) = tokio::join!(
            async {
                client.write(ino, 0, &pattern(2, 2 << 20)).await?;
                client.fsync(ino).await
            },
            async {
                // Longer than the wait when no space is on its way back.
                tokio::time::sleep(Duration::from_secs(3)).await;
                reads(2, u64::MAX).await.unwrap();
            }
        );
        assert_eq!(written, Ok(()));
    });
}
