//! Times: the time of a change is fixed once, and every later answer reports it.

use crate::common::{World, create, find, run};
use base::Ino;
use client::{Client, OpenIntent, SetAttr};

/// Lets time pass, as between two calls of a program.
fn later(world: &World) {
    world.sim.clock.advance_ns(5_000_000);
}

async fn ctime(client: &Client, ino: Ino) -> i64 {
    client.getattr(ino).await.unwrap().ctime_ns
}

#[test]
fn a_write_changes_the_time_once_and_making_it_durable_does_not() {
    run("4+2", |world| async move {
        let client = world.client().await;
        // Inline bytes, and several extents that are committed one after another.
        for (name, len) in [("small", 100), ("large", 9 << 20)] {
            let ino = create(&client, name).await;
            later(&world);
            client.write(ino, 0, &crate::common::pattern(1, len)).await.unwrap();
            let written = client.getattr(ino).await.unwrap();
            assert_eq!(written.ctime_ns, written.mtime_ns);
            later(&world);
            client.fsync(ino).await.unwrap();
            assert_eq!(ctime(&client, ino).await, written.ctime_ns, "{name}");
            later(&world);
            client.close_file(ino);
            let attr = find(&world.client().await, name).await.unwrap();
            assert_eq!((attr.ctime_ns, attr.mtime_ns), (written.ctime_ns, written.mtime_ns), "{name}");
        }
    });
}

#[test]
fn attributes_changed_under_the_lease_keep_the_time_of_the_change() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let ino = create(&client, "file").await;
        client.open_file(ino, OpenIntent::Write).await.unwrap();
        // With content that is committed in the same step, and alone.
        for bytes in [b"some".as_slice(), b""] {
            if !bytes.is_empty() {
                client.write(ino, 0, bytes).await.unwrap();
            }
            later(&world);
            let set = SetAttr { mode: Some(0o600), mtime_ns: Some(5), ..SetAttr::default() };
            let changed = client.setattr(ino, set).await.unwrap();
            later(&world);
            client.fsync(ino).await.unwrap();
            assert_eq!(ctime(&client, ino).await, changed.ctime_ns);
            let seen = find(&world.client().await, "file").await.unwrap();
            assert_eq!((seen.ctime_ns, seen.mtime_ns), (changed.ctime_ns, 5));
        }
    });
}

#[test]
fn a_change_by_the_owner_after_a_write_is_the_later_one() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let ino = create(&client, "file").await;
        client.write(ino, 0, b"some").await.unwrap();
        later(&world);
        let linked = client.link(ino, Ino::ROOT, b"other").await.unwrap();
        later(&world);
        client.fsync(ino).await.unwrap();
        assert_eq!(ctime(&client, ino).await, linked.ctime_ns);
    });
}

#[test]
fn a_read_moves_the_access_time_only_and_no_further_one_does() {
    run("4+2", |world| async move {
        let (client, wire) = world.wired_client().await;
        let ino = create(&client, "file").await;
        client.write(ino, 0, b"some").await.unwrap();
        client.fsync(ino).await.unwrap();
        let before = client.getattr(ino).await.unwrap();
        later(&world);
        client.read(ino, 0, 4).await.unwrap();
        let read = client.getattr(ino).await.unwrap();
        assert!(read.atime_ns > before.atime_ns);
        assert_eq!((read.ctime_ns, read.mtime_ns), (before.ctime_ns, before.mtime_ns));
        client.fsync(ino).await.unwrap();
        assert_eq!(client.getattr(ino).await.unwrap().ctime_ns, before.ctime_ns);
        let other = world.client().await;
        let seen = find(&other, "file").await.unwrap();
        assert_eq!((seen.atime_ns, seen.ctime_ns), (read.atime_ns, before.ctime_ns));
        // Access times within a day of the last change stay as they are.
        later(&world);
        client.read(ino, 0, 4).await.unwrap();
        wire.take_asked();
        client.fsync(ino).await.unwrap();
        assert_eq!(wire.take_asked(), []);
        // Setting a time changes the file.
        later(&world);
        let set = SetAttr { atime_ns: Some(7), ..SetAttr::default() };
        let set = client.setattr(ino, set).await.unwrap();
        assert!(set.atime_ns == 7 && set.ctime_ns > before.ctime_ns);
    });
}
