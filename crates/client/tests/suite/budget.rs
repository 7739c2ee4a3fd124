//! The number of messages of common operations. More messages than this are a regression.

use std::sync::atomic::Ordering;

use crate::common::{World, create, find, new_file, pattern, read_all, run};
use base::Ino;
use client::{Attr, Client, MakeNode, OpenIntent, RenameMode, SetAttr};
use wire::meta::MetaRequest;

/// Puts and gets since the last call.
fn drive_messages(world: &World) -> (u64, u64) {
    let sum =
        |count: fn(&crate::common::MemDrive) -> u64| world.drives.iter().map(|drive| count(drive)).sum();
    (sum(|drive| drive.puts.swap(0, Ordering::Relaxed)), sum(|drive| drive.gets.swap(0, Ordering::Relaxed)))
}

async fn close(client: Client) {
    client.close().await.unwrap();
}

#[test]
fn an_open_is_one_message_and_a_stat_under_a_lease_none() {
    run("4+2", |world| async move {
        let maker = world.client().await;
        let ino = create(&maker, "file").await;
        maker.write(ino, 0, &pattern(1, 100)).await.unwrap();
        close(maker).await;
        let (client, wire) = world.wired_client().await;
        find(&client, "file").await.unwrap();
        assert_eq!(wire.take_asked().len(), 1);
        client.open_file(ino, OpenIntent::Write).await.unwrap();
        assert_eq!(wire.take_asked().len(), 1);
        for _ in 0..10 {
            client.getattr(ino).await.unwrap();
            client.open_file(ino, OpenIntent::Read).await.unwrap();
            client.write(ino, 0, b"text").await.unwrap();
        }
        assert_eq!(wire.take_asked(), []);
        client.fsync(ino).await.unwrap();
        let asked = wire.take_asked();
        assert!(matches!(asked.as_slice(), [MetaRequest::Commit { .. }]), "{asked:?}");
        assert_eq!(drive_messages(&world), (0, 0), "a few bytes travel in the commit");
    });
}

#[test]
fn an_extent_costs_one_put_per_shard_and_one_commit_and_a_get_per_data_shard() {
    run("4+2", |world| async move {
        let (client, wire) = world.wired_client().await;
        let ino = create(&client, "file").await;
        // The first write of a session also asks for extent ids.
        client.write(ino, 0, &pattern(1, 300_000)).await.unwrap();
        client.fsync(ino).await.unwrap();
        let ino = create(&client, "extent").await;
        drive_messages(&world);
        wire.take_asked();
        client.write(ino, 0, &pattern(2, 4 << 20)).await.unwrap();
        client.fsync(ino).await.unwrap();
        let asked = wire.take_asked();
        assert!(matches!(asked.as_slice(), [MetaRequest::Commit { .. }]), "{asked:?}");
        assert_eq!(drive_messages(&world), (6, 0));
        assert!(crate::common::read_in_parts(&client, ino, 4 << 20).await.unwrap() == pattern(2, 4 << 20));
        assert_eq!(wire.take_asked(), [], "its writer knows its map");
        assert_eq!(drive_messages(&world), (0, 4));
        client.read(ino, 5000, 100).await.unwrap();
        assert_eq!(drive_messages(&world), (0, 1));
        close(client).await;
        let (reader, wire) = world.wired_client().await;
        find(&reader, "extent").await.unwrap();
        wire.take_asked();
        read_all(&reader, ino).await.unwrap();
        let asked = wire.take_asked();
        assert!(matches!(asked.as_slice(), [MetaRequest::GetMap { .. }]), "{asked:?}");
    });
}

#[test]
fn attributes_set_after_the_content_of_an_unpacked_file_cost_no_messages() {
    run("4+2", |world| async move {
        let (client, wire) = world.wired_client().await;
        let made = client.make(MakeNode { open: OpenIntent::Write, ..new_file("file") }).await.unwrap();
        let ino = made.ino;
        wire.take_asked();
        client.write(ino, 0, &pattern(1, 3000)).await.unwrap();
        for set in [
            SetAttr { mtime_ns: Some(5), atime_ns: Some(6), ..SetAttr::default() },
            SetAttr { uid: Some(7), gid: Some(8), ..SetAttr::default() },
            SetAttr { mode: Some(0o640), ..SetAttr::default() },
        ] {
            client.setattr(ino, set).await.unwrap();
        }
        let is_set = |attr: Attr| {
            assert_eq!((attr.mtime_ns, attr.atime_ns, attr.uid, attr.gid, attr.mode), (5, 6, 7, 8, 0o640));
            assert_eq!(attr.size, 3000);
        };
        is_set(client.getattr(ino).await.unwrap());
        assert_eq!(wire.take_asked(), []);
        client.fsync(ino).await.unwrap();
        let asked = wire.take_asked();
        assert!(matches!(asked.as_slice(), [MetaRequest::Commit { .. }]), "{asked:?}");
        is_set(client.getattr(ino).await.unwrap());
        is_set(find(&world.client().await, "file").await.unwrap());
        // Without new data, they go alone; a later write moves the time again.
        let set = SetAttr { mtime_ns: Some(50), ..SetAttr::default() };
        client.write(ino, 0, b"x").await.unwrap();
        client.setattr(ino, set.clone()).await.unwrap();
        client.write(ino, 0, b"y").await.unwrap();
        assert_ne!(client.getattr(ino).await.unwrap().mtime_ns, 50);
        client.setattr(ino, set).await.unwrap();
        assert_eq!(find(&world.client().await, "file").await.unwrap().mtime_ns, 50);
    });
}

#[test]
fn a_time_set_on_a_large_file_outlives_the_commits_of_its_parts() {
    run("4+2", |world| async move {
        let (client, wire) = world.wired_client().await;
        let ino = create(&client, "file").await;
        wire.take_asked();
        // A full window, which is written in the background, and a tail, which is not.
        client.write(ino, 0, &pattern(1, 4 << 20)).await.unwrap();
        client.write(ino, 4 << 20, &pattern(2, 3000)).await.unwrap();
        client.setattr(ino, SetAttr { mtime_ns: Some(5), ..SetAttr::default() }).await.unwrap();
        while !wire.take_asked().iter().any(|request| matches!(request, MetaRequest::Commit { .. })) {
            tokio::task::yield_now().await;
        }
        client.fsync(ino).await.unwrap();
        assert_eq!(client.getattr(ino).await.unwrap().mtime_ns, 5);
        assert_eq!(find(&world.client().await, "file").await.unwrap().mtime_ns, 5);
    });
}

#[test]
fn written_data_is_durable_before_its_new_name() {
    run("4+2", |world| async move {
        let (client, wire) = world.wired_client().await;
        let ino = create(&client, "new").await;
        create(&client, "old").await;
        client.write(ino, 0, b"content").await.unwrap();
        wire.take_asked();
        let (from, to) = ((Ino::ROOT, b"new".as_slice()), (Ino::ROOT, b"old".as_slice()));
        client.rename(from, to, RenameMode::Replace).await.unwrap();
        let asked = wire.take_asked();
        let order = |request: &MetaRequest| match request {
            MetaRequest::Commit { .. } => "commit",
            MetaRequest::Rename { .. } => "rename",
            _ => "",
        };
        let order: Vec<_> = asked.iter().map(order).filter(|name| !name.is_empty()).collect();
        assert_eq!(order, ["commit", "rename"], "{asked:?}");
    });
}
