//! Blobs that are made, refused, emptied and deleted.

use super::*;

/// A number that may be reserved goes back, also if the request for it or for its return was given up.
#[test]
fn numbers_of_blobs_go_back_after_requests_that_were_cut_off() {
    run("r2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, wire) = world.tiered_wired_client(&store).await;
        client.tier_attach().await.unwrap();
        let ino = create(&client, "file").await;
        client.write(ino, 0, &pattern(9, 50_000)).await.unwrap();
        client.fsync(ino).await.unwrap();
        let due = client.tier_due(Stage::Queued, u64::MAX - 1, None).await.unwrap();
        let is_return =
            |request: &MetaRequest| matches!(request, MetaRequest::Tier(TierRequest::Abandon { .. }));
        let returns = || wire.take_asked().iter().filter(|request| is_return(request)).count();
        wire.hold(|request| matches!(request, MetaRequest::Tier(TierRequest::Reserve)));
        let upload = tokio::spawn({
            let client = client.clone();
            async move { client.upload(due, BLOB, None).await }
        });
        wire.holding.acquire().await.unwrap().forget();
        upload.abort();
        assert!(upload.await.unwrap_err().is_cancelled());
        wire.hold(is_return);
        returns();
        let returning = tokio::spawn({
            let client = client.clone();
            async move { client.return_numbers().await }
        });
        wire.holding.acquire().await.unwrap().forget();
        returning.abort();
        assert!(returning.await.unwrap_err().is_cancelled());
        assert_eq!(returns(), 1, "the reservation was cut off");
        wire.hold(|_| false);
        client.return_numbers().await;
        assert_eq!(returns(), 1, "the return was cut off");
        client.return_numbers().await;
        assert_eq!(returns(), 0, "nothing is unused");
    });
}

/// A client may hear late that the store has moved.
#[test]
fn a_blob_at_a_place_where_the_store_is_no_more_is_refused() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let client = world.tiered_client(&store).await;
        client.tier_attach().await.unwrap();
        let files = write_files(&client).await;
        // The store is at place 0.
        client.tier_place(7).await.unwrap();
        let mut due = client.tier_due(Stage::Queued, u64::MAX - 1, None).await.unwrap();
        due.truncate(Client::fitting(&due, BLOB));
        let queued = client.tier_stat().await.unwrap().queued;
        let refused = client.upload(due, BLOB, None).await;
        assert!(matches!(refused, Err(UploadError::Owner(FsError::Invalid))), "{refused:?}");
        assert_eq!(client.tier_stat().await.unwrap().queued, queued);
        client.tier_place(0).await.unwrap();
        delete_dead(&client).await;
        assert!(store.keys().is_empty(), "the refused blob stays: {:?}", store.keys());
        send_away(&world, &client).await;
        for (ino, bytes) in &files {
            assert!(read_all(&client, *ino).await.unwrap() == *bytes);
        }
    });
}

#[test]
fn a_blob_of_which_nobody_knows_whether_it_is_in_use_is_used_or_deleted() {
    run("r2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, wire) = world.tiered_wired_client(&store).await;
        client.tier_attach().await.unwrap();
        let ino = create(&client, "file").await;
        let is_commit =
            |request: &MetaRequest| matches!(request, MetaRequest::Tier(TierRequest::Commit { .. }));
        for was_executed in [false, true] {
            client.write(ino, 0, &pattern(9, 50_000)).await.unwrap();
            client.fsync(ino).await.unwrap();
            let due = client.tier_due(Stage::Queued, u64::MAX - 1, None).await.unwrap();
            if was_executed {
                wire.lose(is_commit)
            } else {
                wire.refuse(is_commit)
            }
            client.upload(due, BLOB, None).await.unwrap_err();
            wire.refuse(|_| false);
            wire.lose(|_| false);
            assert_eq!(store.keys().len(), 1);
            let blobs = if was_executed { 1 } else { 0 };
            while store.keys().len() > blobs {
                delete_dead(&client).await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            assert_eq!(client.tier_stat().await.unwrap().blobs, blobs as u64);
        }
        client.dead_blobs().await.unwrap();
        assert!(read_all(&client, ino).await.unwrap() == pattern(9, 50_000));
    });
}

#[test]
fn dead_blobs_are_deleted_and_mostly_dead_ones_are_emptied() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let client = world.tiered_client(&store).await;
        client.tier_attach().await.unwrap();
        let files = write_files(&client).await;
        send_away(&world, &client).await;
        let before = client.tier_stat().await.unwrap();
        let (gone, kept) = files.split_at(3);
        for (number, (ino, _)) in gone.iter().enumerate() {
            client.close_file(*ino);
            client.unlink(Ino::ROOT, format!("file {number}").as_bytes()).await.unwrap();
        }
        loop {
            while client.purge_step().await.unwrap() {}
            if client.tier_stat().await.unwrap().live_bytes < before.live_bytes - 300_000 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let blobs: Vec<u64> = client.blobs(None).await.unwrap().iter().map(|blob| blob.serial).collect();
        assert!(client.empty_blobs(&blobs, BLOB).await.unwrap() > 0);
        let stat = client.tier_stat().await.unwrap();
        assert!(stat.overhead_per_mille() < 20, "{stat:?}");
        while !client.dead_blobs().await.unwrap().is_empty() || store.keys().len() as u64 > stat.blobs {
            delete_dead(&client).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let cold = world.tiered_client(&store).await;
        for (ino, bytes) in kept {
            assert!(read_all(&cold, *ino).await.unwrap() == *bytes);
        }
    });
}

#[test]
fn a_blob_that_would_not_shrink_is_told_from_two_that_would_become_one() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let client = world.tiered_client(&store).await;
        client.tier_attach().await.unwrap();
        for name in ["one", "two"] {
            let ino = create(&client, name).await;
            client.write(ino, 0, &pattern(1, 9000)).await.unwrap();
            client.fsync(ino).await.unwrap();
            upload_all(&client).await;
        }
        let blobs = client.blobs(None).await.unwrap();
        assert_eq!(blobs.len(), 2);
        let bytes: u64 = blobs.iter().map(|blob| u64::from(blob.bytes)).sum();
        for blob in &blobs {
            assert!(blob.live_bytes * 2 < u64::from(blob.bytes), "little is alive of a small blob");
            let refilled = client.refilled_bytes(&[blob.serial], BLOB).await.unwrap();
            assert_eq!(refilled, u64::from(blob.bytes));
        }
        let serials: Vec<u64> = blobs.iter().map(|blob| blob.serial).collect();
        let refilled = client.refilled_bytes(&serials, BLOB).await.unwrap();
        client.empty_blobs(&serials, BLOB).await.unwrap();
        let blobs = client.blobs(None).await.unwrap();
        let stored: Vec<u64> = blobs.iter().map(|blob| blob.bytes.into()).collect();
        assert_eq!(stored, [refilled]);
        assert!(refilled < bytes * 7 / 8);
    });
}

#[test]
fn due_extents_name_the_directory_that_they_were_written_in() {
    run("4+2", |world| async move {
        let client = world.tiered_client(&Arc::default()).await;
        client.tier_attach().await.unwrap();
        while client.tier_queue_step().await.unwrap() {}
        let mut directories = Vec::new();
        for name in ["one", "two"] {
            let make = MakeNode { kind: FileKind::Directory, open: OpenIntent::None, ..new_file(name) };
            directories.push(client.make(make).await.unwrap().ino);
        }
        let (one, two) = (directories[0], directories[1]);
        let file = client.make(MakeNode { parent: one, ..new_file("file") }).await.unwrap().ino;
        let told = async || {
            let due = client.tier_due(Stage::Queued, u64::MAX - 1, None).await.unwrap();
            due.iter().map(|due| due.directory).collect::<Vec<_>>()
        };
        let write = async |off: u64| {
            client.write(file, off, &pattern(off, 100_000)).await.unwrap();
            client.fsync(file).await.unwrap();
        };
        write(0).await;
        assert_eq!(told().await, [one]);
        client.rename((one, b"file"), (two, b"other"), RenameMode::Replace).await.unwrap();
        write(100_000).await;
        // Earlier extents stay with their neighbours of that time.
        assert_eq!(told().await, [one, two]);
    });
}
