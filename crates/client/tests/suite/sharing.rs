//! Two clients of one filesystem: each sees the changes of the other, and nothing hangs or is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Fault, World, create, find, new_file, pattern, read_all, run, until};
use base::{FsError, Ino};
use client::{AllocateMode, Client, FileKind, MakeNode, NotTaken, OpenIntent, Place, RenameMode, SetAttr};
use wire::meta::MetaRequest;

#[test]
fn data_that_one_client_wrote_and_closed_is_read_by_the_other() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        for (number, len) in [0, 1, 5000, 9000, 300_000, 4 << 20, (9 << 20) + 17].into_iter().enumerate() {
            let name = format!("file {number}");
            let ino = create(&one, &name).await;
            let bytes = pattern(number as u64, len);
            one.write(ino, 0, &bytes).await.unwrap();
            one.close_file(ino);
            let attr = find(&two, &name).await.unwrap();
            assert_eq!((attr.ino, attr.size), (ino, len as u64));
            assert!(read_all(&two, ino).await.unwrap() == bytes, "len={len}");
            assert!(read_all(&one, ino).await.unwrap() == bytes, "len={len}");
        }
    });
}

#[test]
fn an_open_file_goes_back_and_forth_between_writers() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let ino = create(&one, "file").await;
        two.open_file(find(&two, "file").await.unwrap().ino, OpenIntent::Write).await.unwrap();
        let mut expected = Vec::new();
        for round in 0..50u64 {
            let writer = if round % 2 == 0 { &one } else { &two };
            let size = writer.getattr(ino).await.unwrap().size;
            assert_eq!(size, expected.len() as u64, "round {round}");
            let bytes = pattern(round, 1 + round as usize * 700);
            writer.write(ino, size, &bytes).await.unwrap();
            expected.extend(bytes);
        }
        one.fsync(ino).await.unwrap();
        two.fsync(ino).await.unwrap();
        assert!(read_all(&one, ino).await.unwrap() == expected);
        assert!(read_all(&two, ino).await.unwrap() == expected);
    });
}

/// Writes blocks `first`, `first + 2`, ... of 1000 bytes.
async fn write_every_other(client: Client, ino: Ino, first: u64) {
    for block in (first..200).step_by(2) {
        client.write(ino, block * 1000, &pattern(block, 1000)).await.unwrap();
        if block % 31 == 0 {
            client.fsync(ino).await.unwrap();
        }
    }
    client.fsync(ino).await.unwrap();
}

#[test]
fn concurrent_writers_of_one_file_lose_nothing() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let ino = create(&one, "file").await;
        let tasks = [(one.clone(), 0), (two.clone(), 1)]
            .map(|(client, first)| tokio::spawn(write_every_other(client, ino, first)));
        for task in tasks {
            task.await.unwrap();
        }
        let expected: Vec<u8> = (0..200).flat_map(|block| pattern(block, 1000)).collect();
        assert!(read_all(&two, ino).await.unwrap() == expected);
        assert!(read_all(&one, ino).await.unwrap() == expected);
    });
}

/// One client keeps overwriting blocks of a file in turn, while another reads it.
fn check_hammered(block: usize, blocks: u64, drives: Fault) {
    run("4+2", |world| async move {
        world.drives.iter().for_each(|drive| drive.set(drives));
        let (one, two) = (world.client().await, world.client().await);
        let ino = create(&one, "file").await;
        for number in 0..blocks {
            one.write(ino, number * block as u64, &pattern(0, block)).await.unwrap();
        }
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (writer, stopped, done) = (one.clone(), stop.clone(), rounds.clone());
        let runtime = tokio::runtime::Handle::current();
        let hammer = tokio::task::spawn_blocking(move || {
            let mut round = 0u64;
            while round == 0 || !stopped.load(Ordering::Relaxed) {
                round += 1;
                let (off, bytes) = (round % blocks * block as u64, vec![round as u8; block]);
                if writer.try_write(ino, Place::At(off), &bytes).is_err() {
                    runtime.block_on(writer.write(ino, off, &bytes)).unwrap();
                }
                done.store(round, Ordering::Relaxed);
            }
            round
        });
        for _ in 0..15 {
            let before = rounds.load(Ordering::Relaxed);
            until(|| rounds.load(Ordering::Relaxed) > before).await;
            let bytes = two.read(ino, 0, block).await.unwrap();
            assert_eq!(bytes.len(), block);
            one.fsync(ino).await.expect("a client that answers recalls loses nothing");
        }
        stop.store(true, Ordering::Relaxed);
        let last = hammer.await.unwrap();
        one.fsync(ino).await.unwrap();
        for reader in [&two, &one] {
            let found = reader.read(ino, last % blocks * block as u64, block).await.unwrap();
            assert!(found == vec![last as u8; block]);
        }
    });
}

#[test]
fn a_flush_for_a_reader_that_failed_is_tried_again() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let (ino, bytes) = (create(&one, "file").await, pattern(1, 3 << 20));
        one.write(ino, 0, &bytes).await.unwrap();
        world.drives.iter().for_each(|drive| drive.set(Fault::Erring));
        let mends = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            world.drives.iter().for_each(|drive| drive.set(Fault::None));
        };
        let began = tokio::time::Instant::now();
        let (attr, ()) = tokio::join!(two.getattr(ino), mends);
        assert_eq!(attr.unwrap().size, bytes.len() as u64);
        assert!(read_all(&two, ino).await.unwrap() == bytes);
        assert!(began.elapsed() < Duration::from_secs(12), "the lease was given back, not taken");
        // The writer may get one error, because the drives refused.
        let _ = one.fsync(ino).await;
        one.fsync(ino).await.unwrap();
    });
}

#[test]
fn a_writer_that_never_pauses_gives_way_to_a_reader_and_loses_nothing() {
    check_hammered(4096, 1, Fault::None);
}

#[test]
fn a_writer_of_whole_windows_gives_way_to_a_reader_and_loses_nothing() {
    check_hammered(1 << 20, 16, Fault::Slow);
}

#[test]
fn a_grant_that_was_recalled_before_its_answer_came_is_not_used() {
    run("4+2", |world| async move {
        let ((one, wire), two) = (world.wired_client().await, world.client().await);
        wire.hold(|request| matches!(request, MetaRequest::Make(_)));
        let maker = one.clone();
        let making = tokio::spawn(async move { maker.make(new_file("file")).await.unwrap().ino });
        wire.holding.acquire().await.unwrap().forget();
        // The other client finds the file and writes to it before the answer reaches its creator.
        let ino = find(&two, "file").await.unwrap().ino;
        two.write(ino, 0, b"second").await.unwrap();
        wire.held.add_permits(1);
        assert_eq!(making.await.unwrap(), ino);
        one.write(ino, 2, b"--").await.unwrap();
        one.fsync(ino).await.expect("the maker asks for the lease again");
        two.fsync(ino).await.unwrap();
        assert_eq!(read_all(&one, ino).await.unwrap(), b"se--nd");
        assert_eq!(read_all(&two, ino).await.unwrap(), b"se--nd");
    });
}

#[test]
fn a_grant_that_was_given_back_before_its_first_answer_came_is_not_used() {
    run("4+2", |world| async move {
        let (one, wire) = world.wired_client().await;
        wire.hold(|request| matches!(request, MetaRequest::Make(_)));
        let maker = one.clone();
        let making = tokio::spawn(async move { maker.make(new_file("file")).await.unwrap().ino });
        wire.holding.acquire().await.unwrap().forget();
        // Another process here finds the file and forgets it, so its lease is given back.
        let ino = find(&one, "file").await.unwrap().ino;
        one.forget(ino, 1);
        until(|| wire.take_asked().iter().any(|asked| matches!(asked, MetaRequest::ReleaseAll { .. }))).await;
        wire.held.add_permits(1);
        assert_eq!(making.await.unwrap(), ino);
        one.write(ino, 0, b"kept").await.unwrap();
        one.fsync(ino).await.expect("the lease is asked for again");
        assert_eq!(read_all(&one, ino).await.unwrap(), b"kept");
    });
}

#[test]
fn a_file_written_before_its_creator_had_the_answer_is_not_empty() {
    run("4+2", |world| async move {
        let (one, wire) = world.wired_client().await;
        wire.hold(|request| matches!(request, MetaRequest::Make(_)));
        let maker = one.clone();
        let making = tokio::spawn(async move { maker.make(new_file("file")).await.unwrap().ino });
        wire.holding.acquire().await.unwrap().forget();
        let ino = find(&one, "file").await.unwrap().ino;
        one.write(ino, 0, b"written").await.unwrap();
        one.fsync(ino).await.unwrap();
        wire.held.add_permits(1);
        assert_eq!(making.await.unwrap(), ino);
        assert_eq!(read_all(&one, ino).await.unwrap(), b"written");
    });
}

#[test]
fn a_file_stays_open_for_its_creator_if_another_process_closed_it_before_the_answer() {
    run("4+2", |world| async move {
        let (one, wire) = world.wired_client().await;
        let other = create(&one, "other").await;
        wire.hold(|request| matches!(request, MetaRequest::Make(_)));
        let maker = one.clone();
        let making = tokio::spawn(async move { maker.make(new_file("file")).await.unwrap().ino });
        wire.holding.acquire().await.unwrap().forget();
        let ino = find(&one, "file").await.unwrap().ino;
        one.open_file(ino, OpenIntent::Read).await.unwrap();
        one.close_file(ino);
        one.close_file(other);
        let told =
            |asked: &MetaRequest| matches!(asked, MetaRequest::Close { inos } if inos.contains(&other));
        until(|| wire.take_asked().iter().any(told)).await;
        wire.held.add_permits(1);
        assert_eq!(making.await.unwrap(), ino);
        one.unlink(Ino::ROOT, b"file").await.unwrap();
        one.write(ino, 0, b"nameless").await.unwrap();
        one.fsync(ino).await.expect("it is open");
        assert_eq!(read_all(&one, ino).await.unwrap(), b"nameless");
        one.close_file(ino);
        until(|| wire.take_asked().iter().any(|asked| matches!(asked, MetaRequest::Close { .. }))).await;
    });
}

#[test]
fn an_answer_from_before_a_change_is_old_even_if_the_file_was_forgotten_in_between() {
    run("4+2", |world| async move {
        let (one, wire) = world.wired_client().await;
        let ino = create(&one, "file").await;
        wire.hold(|request| matches!(request, MetaRequest::Lookup { .. }));
        let asker = one.clone();
        let asking = tokio::spawn(async move { find(&asker, "file").await.unwrap() });
        wire.holding.acquire().await.unwrap().forget();
        one.write(ino, 0, b"123456").await.unwrap();
        one.fsync(ino).await.unwrap();
        one.forget(ino, 1);
        one.close_file(ino);
        until(|| wire.take_asked().iter().any(|asked| matches!(asked, MetaRequest::Close { .. }))).await;
        until(|| one.cached_attr(ino).is_none()).await;
        wire.held.add_permits(1);
        assert_eq!(asking.await.unwrap().size, 0, "the state at the time of the request");
        assert_eq!(one.getattr(ino).await.unwrap().size, 6);
    });
}

#[test]
fn a_read_in_parts_does_not_mix_content_from_before_and_after_a_write() {
    run("4+2", |world| async move {
        let (one, wire) = world.wired_client().await;
        let two = world.client().await;
        let ino = create(&two, "file").await;
        // More pieces than one answer holds.
        for piece in 0..100 {
            two.write(ino, piece * 200, &[1; 100]).await.unwrap();
            two.fsync(ino).await.unwrap();
        }
        let beyond = 150 * 100;
        wire.hold(
            move |request| matches!(request, MetaRequest::GetMap { off, .. } if *off > 100 && *off < beyond),
        );
        let reader = one.clone();
        let reading = tokio::spawn(async move { reader.read(ino, 100, 20_000).await.unwrap() });
        wire.holding.acquire().await.unwrap().forget();
        one.write(ino, 200, &[2; 100]).await.unwrap();
        one.write(ino, 19_800, &[2; 100]).await.unwrap();
        wire.hold(|_| false);
        wire.held.add_permits(1);
        let bytes = reading.await.unwrap();
        assert_eq!((bytes[100], bytes[19_700]), (2, 2));
    });
}

#[test]
fn attributes_from_before_a_recall_are_not_taken_for_current() {
    run("4+2", |world| async move {
        let ((one, wire), two) = (world.wired_client().await, world.client().await);
        let ino = create(&two, "file").await;
        two.fsync(ino).await.unwrap();
        wire.hold(|request| matches!(request, MetaRequest::GetAttr { .. }));
        let asker = one.clone();
        let asking = tokio::spawn(async move { asker.getattr(ino).await.unwrap() });
        wire.holding.acquire().await.unwrap().forget();
        two.write(ino, 0, b"123456").await.unwrap();
        two.fsync(ino).await.unwrap();
        wire.hold(|_| false);
        wire.held.add_permits(1);
        assert_eq!(asking.await.unwrap().size, 0, "the state at the time of the request");
        assert_eq!(one.getattr(ino).await.unwrap().size, 6);
        // Nor when the next lease comes without attributes.
        one.write(ino, 6, b"7").await.unwrap();
        assert_eq!(one.getattr(ino).await.unwrap().size, 7);
        assert_eq!(read_all(&one, ino).await.unwrap(), b"1234567");
    });
}

#[test]
fn attributes_in_the_answer_to_a_rename_do_not_hide_a_later_change() {
    run("4+2", |world| async move {
        let (one, wire) = world.wired_client().await;
        let dir = MakeNode { kind: FileKind::Directory, open: OpenIntent::None, ..new_file("dir") };
        let dir = one.make(dir).await.unwrap().ino;
        one.make(MakeNode { parent: dir, ..new_file("file") }).await.unwrap();
        wire.hold(|request| matches!(request, MetaRequest::Rename { .. }));
        let mover = one.clone();
        let moving = tokio::spawn(async move {
            mover.rename((Ino::ROOT, b"dir"), (Ino::ROOT, b"moved"), RenameMode::Replace).await.unwrap()
        });
        wire.holding.acquire().await.unwrap().forget();
        one.unlink(dir, b"file").await.unwrap();
        wire.held.add_permits(1);
        moving.await.unwrap();
        assert_eq!(one.getattr(dir).await.unwrap().size, 0, "its file is gone");
    });
}

/// Writes to a file of a hundred ones while the owner has made a `change` of its map and not answered yet.
async fn write_beside<F: Future<Output = ()> + Send + 'static>(
    world: Arc<World>,
    is_change: impl Fn(&MetaRequest) -> bool + Send + Sync + 'static,
    change: impl FnOnce(Client, Ino) -> F,
    expected: Vec<u8>,
) {
    let (one, wire) = world.wired_client().await;
    let ino = create(&one, "file").await;
    one.write(ino, 0, &[1; 100]).await.unwrap();
    one.fsync(ino).await.unwrap();
    wire.hold(is_change);
    let changing = tokio::spawn(change(one.clone(), ino));
    wire.holding.acquire().await.unwrap().forget();
    assert_eq!(one.try_write(ino, Place::At(40), &[2; 5]), Err(NotTaken::WouldWait));
    let writer = one.clone();
    let writing = tokio::spawn(async move { writer.write(ino, 40, &[2; 5]).await.unwrap() });
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(!writing.is_finished(), "a crash that keeps the change must keep the earlier write, too");
    assert_eq!(read_all(&one, ino).await.unwrap(), [1; 100]);
    wire.held.add_permits(9);
    changing.await.unwrap();
    writing.await.unwrap();
    assert_eq!(read_all(&one, ino).await.unwrap(), expected);
    one.fsync(ino).await.unwrap();
    assert_eq!(read_all(&one, ino).await.unwrap(), expected);
}

#[test]
fn what_two_clients_append_follows_one_another() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let ino = create(&one, "file").await;
        two.lookup(Ino::ROOT, b"file").await.unwrap();
        let mut expected = Vec::new();
        for count in 0..20u8 {
            for (client, byte) in [(&one, count), (&two, 100 + count)] {
                let off = client.write_to(ino, Place::End, &[byte; 7]).await.unwrap();
                assert_eq!(off, expected.len() as u64);
                expected.extend([byte; 7]);
            }
        }
        assert_eq!(read_all(&one, ino).await.unwrap(), expected);
        assert_eq!(read_all(&two, ino).await.unwrap(), expected);
    });
}

#[test]
fn a_write_while_a_hole_is_punched_comes_after_the_hole() {
    run("4+2", |world| {
        let punch = |client: Client, ino| async move {
            client.allocate(ino, 10, 50, AllocateMode::Punch).await.unwrap();
        };
        let expected = [vec![1; 10], vec![0; 30], vec![2; 5], vec![0; 15], vec![1; 40]].concat();
        write_beside(world, |request| matches!(request, MetaRequest::Punch { .. }), punch, expected)
    });
}

#[test]
fn writes_while_many_holes_are_punched_never_hang() {
    run("r2", |world| async move {
        let one = world.client().await;
        let ino = create(&one, "file").await;
        one.write(ino, 0, &[1; 100]).await.unwrap();
        let puncher = one.clone();
        let punching = tokio::spawn(async move {
            for _ in 0..20_000 {
                puncher.allocate(ino, 10, 50, AllocateMode::Punch).await.unwrap();
            }
        });
        while !punching.is_finished() {
            one.write(ino, 40, &[2; 5]).await.unwrap();
        }
        punching.await.unwrap();
    });
}

#[test]
fn a_write_while_a_file_is_cut_comes_after_the_cut() {
    run("4+2", |world| {
        let cut = |client: Client, ino| async move {
            let size = SetAttr { size: Some(10), ..SetAttr::default() };
            client.setattr(ino, size).await.unwrap();
        };
        let expected = [vec![1; 10], vec![0; 30], vec![2; 5]].concat();
        write_beside(world, |request| matches!(request, MetaRequest::SetAttr { .. }), cut, expected)
    });
}

#[test]
fn a_write_while_a_range_is_copied_comes_after_the_copy() {
    run("4+2", |world| {
        let copy = |client: Client, ino| async move {
            assert_eq!(client.copy_range((ino, 0), (ino, 200), 10).await, Ok(10));
        };
        let copied = [vec![1; 40], vec![2; 5], vec![1; 55], vec![0; 100], vec![1; 10]].concat();
        write_beside(world, |request| matches!(request, MetaRequest::CloneRange { .. }), copy, copied)
    });
}

#[test]
fn truncation_here_and_writes_there_come_one_after_the_other() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let ino = create(&one, "file").await;
        let size = |size| SetAttr { size: Some(size), ..SetAttr::default() };
        one.write(ino, 0, &pattern(1, 100_000)).await.unwrap();
        assert_eq!(two.setattr(ino, size(50_000)).await.unwrap().size, 50_000);
        assert_eq!(one.getattr(ino).await.unwrap().size, 50_000);
        assert!(read_all(&one, ino).await.unwrap() == pattern(1, 50_000));
        one.write(ino, 60_000, b"after").await.unwrap();
        let mut expected = pattern(1, 50_000);
        expected.resize(60_000, 0);
        expected.extend(b"after");
        assert!(read_all(&two, ino).await.unwrap() == expected);
        assert_eq!(one.setattr(ino, size(0)).await.unwrap().size, 0);
        assert!(read_all(&two, ino).await.unwrap().is_empty());
        two.setattr(ino, size(10)).await.unwrap();
        assert_eq!(read_all(&one, ino).await.unwrap(), [0; 10]);
    });
}

#[test]
fn names_that_change_here_are_seen_there() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let root = Ino::ROOT;
        let ino = create(&one, "a").await;
        one.write(ino, 0, b"text").await.unwrap();
        assert_eq!(find(&two, "a").await.unwrap().ino, ino);
        one.rename((root, b"a"), (root, b"b"), RenameMode::Replace).await.unwrap();
        assert_eq!(find(&two, "a").await, Err(FsError::NotFound));
        assert_eq!(find(&two, "b").await.unwrap().ino, ino);
        assert_eq!(two.link(ino, root, b"c").await.unwrap().nlink, 2);
        assert_eq!(one.getattr(ino).await.unwrap().nlink, 2);
        assert_eq!(one.getattr(root).await.unwrap().size, two.getattr(root).await.unwrap().size);
        two.unlink(root, b"b").await.unwrap();
        two.unlink(root, b"c").await.unwrap();
        assert_eq!(find(&one, "c").await, Err(FsError::NotFound));
        assert_eq!(one.getattr(ino).await.unwrap().nlink, 0);
        assert_eq!(read_all(&one, ino).await.unwrap(), b"text", "open files outlive their names");
        one.write(ino, 4, b" more").await.unwrap();
        one.fsync(ino).await.unwrap();
        assert_eq!(read_all(&one, ino).await.unwrap(), b"text more");
        one.close_file(ino);
        // The close goes to the owner in the background.
        while world.client().await.getattr(ino).await != Err(FsError::Stale) {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn a_directory_that_another_client_removed_has_attributes_for_programs_that_have_it_open() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let make = MakeNode { kind: FileKind::Directory, open: OpenIntent::None, ..new_file("dir") };
        let dir = one.make(make).await.unwrap().ino;
        two.rmdir(Ino::ROOT, b"dir").await.unwrap();
        let attr = one.getattr(dir).await.unwrap();
        assert_eq!((attr.ino, attr.kind, attr.nlink, attr.mode), (dir, FileKind::Directory, 0, 0o644));
        one.forget(dir, 1);
        // A recall that has not ended may keep it for a moment.
        while one.getattr(dir).await != Err(FsError::Stale) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
}

#[test]
fn readers_that_both_change_the_file_do_not_wait_for_each_other() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let ino = create(&one, "file").await;
        one.write(ino, 0, &pattern(1, 100)).await.unwrap();
        for round in 0..100 {
            assert!(read_all(&one, ino).await.unwrap() == read_all(&two, ino).await.unwrap());
            let size = |size| SetAttr { size: Some(size), ..SetAttr::default() };
            let (first, second) =
                tokio::join!(one.setattr(ino, size(round)), two.setattr(ino, size(round + 1)));
            let sizes = [first.unwrap().size, second.unwrap().size];
            let last = two.getattr(ino).await.unwrap().size;
            assert!(sizes.contains(&last), "{sizes:?} {last}");
        }
    });
}

#[test]
fn a_client_that_does_not_answer_a_recall_loses_only_that_inode() {
    run("4+2", |world| async move {
        let (deaf, other) = (world.deaf_client().await, world.client().await);
        let (lost, kept) = (create(&deaf, "lost").await, create(&deaf, "kept").await);
        deaf.write(lost, 0, b"lost").await.unwrap();
        deaf.write(kept, 0, b"kept").await.unwrap();
        let reader = other.clone();
        let reading = tokio::spawn(async move { read_all(&reader, lost).await });
        while !reading.is_finished() {
            world.sim.clock.advance_ns(1_000_000_000);
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        assert_eq!(reading.await.unwrap(), Ok(vec![]), "data that was not durable is gone");
        assert!(deaf.fsync(lost).await.is_err(), "its writer gets the error");
        deaf.fsync(kept).await.expect("other files are as before");
        deaf.write(lost, 0, b"again").await.unwrap();
        deaf.fsync(lost).await.unwrap();
        deaf.close().await.unwrap();
        assert_eq!(read_all(&other, kept).await.unwrap(), b"kept");
        assert_eq!(read_all(&other, lost).await.unwrap(), b"again");
    });
}

/// Lets time pass in steps in which clients can send heartbeats.
async fn pass(world: &World, seconds: u64) {
    for _ in 0..seconds {
        world.sim.clock.advance_ns(1_000_000_000);
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

#[test]
fn a_lease_that_is_recalled_is_used_only_until_the_owner_may_take_it() {
    run("4+2", |world| async move {
        let ((one, wire), two) = (world.wired_client().await, world.client().await);
        let ino = create(&one, "file").await;
        one.write(ino, 0, b"one").await.unwrap();
        // The recall cannot be answered, but the session stays alive: its term goes on.
        wire.refuse(|request| matches!(request, MetaRequest::Commit { .. }));
        let writer = two.clone();
        let writing = tokio::spawn(async move {
            writer.write(ino, 0, b"two").await.unwrap();
            writer.fsync(ino).await.unwrap();
        });
        pass(&world, 13).await;
        assert_eq!(read_all(&one, ino).await.unwrap(), b"one");
        wire.cut();
        pass(&world, 3).await;
        writing.await.unwrap();
        let read = tokio::time::timeout(Duration::from_secs(1), one.read(ino, 0, 10)).await;
        assert!(read.is_err(), "{read:?}");
    });
}

#[test]
fn data_written_under_a_lost_lease_is_not_committed_under_the_next() {
    run("4+2", |world| async move {
        let (deaf, wire) = world.deaf_wired_client().await;
        let other = world.client().await;
        let ino = create(&deaf, "file").await;
        let (len, at) = (48 << 20, 44 << 20);
        world.drives.iter().for_each(|drive| drive.set(Fault::Storing));
        deaf.write(ino, 0, &pattern(1, len)).await.unwrap();
        // A flush of several commits, whose writer does not hear that the first one succeeded.
        wire.hold(|request| matches!(request, MetaRequest::Commit { pieces, .. } if pieces.len() >= 8));
        world.drives.iter().for_each(|drive| drive.set(Fault::None));
        let flusher = deaf.clone();
        let flushing = tokio::spawn(async move { flusher.fsync(ino).await });
        wire.holding.acquire().await.unwrap().forget();
        let writer = other.clone();
        let writing = tokio::spawn(async move {
            writer.write(ino, at as u64, &pattern(2, len - at)).await.unwrap();
            writer.fsync(ino).await.unwrap();
        });
        while !writing.is_finished() {
            world.sim.clock.advance_ns(1_000_000_000);
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        writing.await.unwrap();
        deaf.write(ino, 0, b"again").await.unwrap();
        wire.held.add_permits(100);
        assert!(flushing.await.unwrap().is_err(), "its writer gets the error");
        // Data written under the new lease is not lost with the older data.
        deaf.fsync(ino).await.unwrap();
        let found = read_all(&deaf, ino).await.unwrap();
        assert_eq!(found[..5], *b"again");
        assert!(found[at..] == pattern(2, len - at), "the durable data of the other client stays");
    });
}

#[test]
fn data_in_a_file_without_a_name_is_there_for_clients_that_have_it_open() {
    run("r3", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let ino = create(&one, "file").await;
        two.open_file(find(&two, "file").await.unwrap().ino, OpenIntent::Read).await.unwrap();
        one.unlink(Ino::ROOT, b"file").await.unwrap();
        let bytes = pattern(3, 40_000);
        one.write(ino, 0, &bytes).await.unwrap();
        one.close_file(ino);
        assert!(read_all(&two, ino).await.unwrap() == bytes);
    });
}

#[test]
fn a_file_whose_close_had_no_answer_is_opened_at_the_owner_again() {
    run("r3", |world| async move {
        let ((one, wire), two) = (world.wired_client().await, world.client().await);
        let ino = create(&one, "file").await;
        one.write(ino, 0, b"content").await.unwrap();
        one.fsync(ino).await.unwrap();
        wire.lose(|request| matches!(request, MetaRequest::Close { .. }));
        one.close_file(ino);
        until(|| wire.take_asked().iter().any(|request| matches!(request, MetaRequest::Close { .. }))).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        // The owner has closed it. It must not go while it is open.
        one.open_file(ino, OpenIntent::Read).await.unwrap();
        two.unlink(Ino::ROOT, b"file").await.unwrap();
        assert_eq!(one.read(ino, 0, 100).await.unwrap(), &b"content"[..]);
    });
}

#[test]
fn a_file_without_a_name_has_the_size_that_another_client_gave_it() {
    run("r3", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let ino = create(&one, "file").await;
        two.open_file(find(&two, "file").await.unwrap().ino, OpenIntent::Read).await.unwrap();
        one.unlink(Ino::ROOT, b"file").await.unwrap();
        assert_eq!(two.getattr(ino).await.unwrap().size, 0);
        one.setattr(ino, SetAttr { size: Some(12_345), ..SetAttr::default() }).await.unwrap();
        assert_eq!(two.getattr(ino).await.unwrap().size, 12_345);
    });
}

#[test]
fn a_file_removed_with_its_last_handle_does_not_fail_a_sync() {
    run("r3", |world| async move {
        let (one, wire) = world.wired_client().await;
        let ino = create(&one, "file").await;
        one.unlink(Ino::ROOT, b"file").await.unwrap();
        one.write(ino, 0, &pattern(1, 5000)).await.unwrap();
        wire.hold(|request| matches!(request, MetaRequest::GetAttr { .. }));
        one.close_file(ino);
        // The owner knows of the close, and the client does not know yet that the file is gone.
        wire.holding.acquire().await.unwrap().forget();
        one.sync().await.unwrap();
        wire.hold(|_| false);
        wire.held.add_permits(1);
    });
}

#[test]
fn an_idle_session_does_not_hold_back_deleted_space() {
    run("r2", |world| async move {
        let ((idle, wire), one) = (world.wired_client().await, world.client().await);
        // The owner has got one heartbeat of it and gets no more: the next one waits for an answer.
        wire.hold(|request| matches!(request, MetaRequest::Heartbeat { .. }));
        wire.holding.acquire().await.unwrap().forget();
        let ino = create(&one, "file").await;
        one.write(ino, 0, &pattern(1, 300_000)).await.unwrap();
        one.fsync(ino).await.unwrap();
        assert!(world.drives.iter().all(|drive| !drive.entries().is_empty()));
        one.close_file(ino);
        one.unlink(Ino::ROOT, b"file").await.unwrap();
        while world.drives.iter().any(|drive| !drive.entries().is_empty()) {
            one.purge_step().await.unwrap();
            one.reclaim_step(None).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        drop(idle);
    });
}

#[test]
fn holes_are_whole_blocks_and_the_end_is_one() {
    use client::SeekKind::{Data, Hole};
    run("4+2", |world| async move {
        let client = world.client().await;
        let ino = create(&client, "file").await;
        for (off, len) in [(5000, 100), (17_000, 100), (20_400, 200)] {
            client.write(ino, off, &pattern(off, len)).await.unwrap();
        }
        client.setattr(ino, SetAttr { size: Some(40_001), ..SetAttr::default() }).await.unwrap();
        client.write(ino, 40_000, b"x").await.unwrap();
        for (off, kind, found) in [
            (0, Hole, Ok(0)),
            (77, Hole, Ok(77)),
            (0, Data, Ok(4096)),
            (4096, Hole, Ok(8192)),
            (8191, Hole, Ok(8192)),
            (8191, Data, Ok(8191)),
            (5200, Data, Ok(5200)),
            (8192, Data, Ok(16_384)),
            (16_384, Hole, Ok(24_576)),
            (24_576, Data, Ok(36_864)),
            (36_864, Hole, Ok(40_001)),
            (40_000, Data, Ok(40_000)),
            (40_001, Hole, Err(FsError::NoAttribute)),
        ] {
            assert_eq!(client.seek(ino, off, kind).await, found, "off={off} {kind:?}");
        }
        client.setattr(ino, SetAttr { size: Some(30_000), ..SetAttr::default() }).await.unwrap();
        assert_eq!(client.seek(ino, 24_576, Data).await, Err(FsError::NoAttribute));
        assert_eq!(client.seek(ino, 24_577, Hole).await, Ok(24_577));
    });
}

#[test]
fn what_others_wait_for_is_written_while_all_requests_of_a_client_wait() {
    run("4+2", |world| async move {
        let ((one, wire), two) = (world.wired_client().await, world.client().await);
        let deaf = world.deaf_client().await;
        let taken = create(&deaf, "taken").await;
        deaf.write(taken, 0, b"not told").await.unwrap();
        let wanted = create(&one, "wanted").await;
        one.write(wanted, 0, &pattern(1, 20_000)).await.unwrap();
        let waiting: Vec<_> = (0..64)
            .map(|_| {
                let one = one.clone();
                tokio::spawn(async move { find(&one, "taken").await.map(drop) })
            })
            .collect();
        let mut asked = 0;
        until(|| {
            asked +=
                wire.take_asked().iter().filter(|asked| matches!(asked, MetaRequest::Lookup { .. })).count();
            asked == 64
        })
        .await;
        assert!(read_all(&two, wanted).await.unwrap() == pattern(1, 20_000));
        assert!(waiting.iter().all(|one| !one.is_finished()), "the deaf client still has its lease");
    });
}
