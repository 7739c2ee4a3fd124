//! Objects and files of the same names, through two clients.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{Fault, World, new_file, pattern, read_all, run, run_with_spares};
use base::{DriveId, FsError, Ino};
use bytes::Bytes;
use client::object::{
    Caller, CompletePart, Conditions, EtagMatch, ListEntry, ListFrom, ListQuery, ObjectError, ObjectMeta,
    ObjectName, UploadRef,
};
use client::{Client, CompleteUpload, CopyObject, OpenIntent, PutOptions, PutPart, SetAttr};
use futures_util::future::join_all;
use layout::DriveState;

fn name(bucket: Ino, key: &str) -> ObjectName {
    let parts = key.trim_end_matches('/').split('/').map(|part| Bytes::copy_from_slice(part.as_bytes()));
    ObjectName { bucket, parts: parts.collect(), directory: key.ends_with('/') }
}

fn options(etag: &str) -> PutOptions {
    let meta = ObjectMeta { etag: Some(etag.to_owned()), ..ObjectMeta::default() };
    PutOptions { meta, conditions: Conditions::default(), caller: Caller::root() }
}

async fn get(client: &Client, at: ObjectName) -> Result<(Vec<u8>, String), ObjectError> {
    let info = client.get_object(at, Conditions::default(), Caller::root()).await?;
    let ino = info.attr.ino;
    let bytes = client.read(ino, 0, info.size as usize).await?;
    client.close_file(ino);
    Ok((bytes.to_vec(), info.etag))
}

async fn keys(client: &Client, bucket: Ino) -> Vec<String> {
    let (prefix, delimiter) = (Bytes::new(), Bytes::new());
    let query = ListQuery { bucket, prefix, delimiter, from: ListFrom::Start, limit: 1000 };
    let page = client.list_objects(query, Caller::root()).await.unwrap();
    let key = |entry: &ListEntry| match entry {
        ListEntry::Object(object) => format!("{}={}", String::from_utf8_lossy(&object.key), object.size),
        ListEntry::Prefix(group) => format!("{}*", String::from_utf8_lossy(group)),
    };
    page.entries.iter().map(key).collect()
}

/// Reclaims space, as the node's upkeep does.
async fn reclaim(client: &Client) {
    while client.purge_step().await.unwrap() {}
    client.reclaim_step(None).await.unwrap();
}

/// Two clients and a bucket: objects go through the first, names through the second.
async fn world(world: &World) -> (Client, Client, Ino) {
    let (objects, names) = (world.client().await, world.client().await);
    let mut make = new_file("bucket");
    (make.kind, make.mode, make.open) = (client::FileKind::Directory, 0o755, OpenIntent::None);
    let bucket = names.make(make).await.unwrap().ino;
    (objects, names, bucket)
}

#[test]
fn an_object_is_a_file_and_a_file_is_an_object() {
    run("4+2", |w| async move {
        let (objects, names, bucket) = world(&w).await;
        for len in [0, 1, 8 << 10, (8 << 10) + 1, 300_000, (9 << 20) + 17] {
            let body = pattern(len as u64, len);
            let key = format!("d/{len}");
            let at = name(bucket, &key);
            objects.put_object_bytes(at.clone(), body.clone().into(), options("tag")).await.unwrap();
            let dir = names.lookup(bucket, b"d").await.unwrap().ino;
            let file = names.lookup(dir, len.to_string().as_bytes()).await.unwrap();
            assert_eq!(file.size, len as u64);
            assert!(read_all(&names, file.ino).await.unwrap() == body, "len={len}");
            let staged = objects.stage().await.unwrap();
            objects.write(staged, 0, &body).await.unwrap();
            objects.put_object(at.clone(), staged, options("other")).await.unwrap();
            assert!(get(&objects, at.clone()).await.unwrap() == (body, "other".to_owned()), "len={len}");
            // Data that is written through a name and closed is read by the next reader of the key.
            let file = names.lookup(dir, len.to_string().as_bytes()).await.unwrap();
            names.open_file(file.ino, OpenIntent::Write).await.unwrap();
            names.write(file.ino, 0, b"written").await.unwrap();
            names.close_file(file.ino);
            let listed = keys(&objects, bucket).await;
            assert!(listed.contains(&format!("{key}={}", len.max(7))), "{listed:?}");
            let (bytes, etag) = get(&objects, at.clone()).await.unwrap();
            assert!(bytes.starts_with(b"written") && etag.contains('-'), "len={len} etag={etag}");
            objects.delete_object(at, Conditions::default(), Caller::root()).await.unwrap();
            assert_eq!(names.lookup(dir, len.to_string().as_bytes()).await, Err(FsError::NotFound));
            assert_eq!(names.lookup(bucket, b"d").await, Err(FsError::NotFound), "the parent went too");
        }
        assert!(keys(&objects, bucket).await.is_empty());
    });
}

/// Reads an object as GET does. Returns its ETag, too.
async fn read(objects: &Client, at: &ObjectName) -> Result<(Bytes, String), ObjectError> {
    let info = objects.read_object(at.clone(), Conditions::default(), Caller::root()).await?;
    if info.pieces.is_some() {
        return Ok((objects.read_small(&info, 0..info.size).await?, info.etag));
    }
    let bytes = objects.read(info.attr.ino, 0, info.size as usize).await;
    objects.close_file(info.attr.ino);
    Ok((bytes?, info.etag))
}

#[test]
fn a_small_object_comes_with_its_map_and_its_last_content() {
    run("4+2", |w| async move {
        let (_, names, bucket) = world(&w).await;
        let (objects, wire) = w.wired_client().await;
        let at = name(bucket, "a");
        for len in [0, 1, 8 << 10, (8 << 10) + 1, 256 << 10, (256 << 10) + 1] {
            let body = pattern(len as u64, len);
            objects.put_object_bytes(at.clone(), body.clone().into(), options("tag")).await.unwrap();
            wire.take_asked();
            assert!(read(&objects, &at).await.unwrap().0 == body, "len={len}");
            if len <= 256 << 10 {
                assert_eq!(wire.take_asked().len(), 1, "len={len}");
            }
            if len == 0 {
                continue;
            }
            // Another client has written bytes and not committed them; they may be a piece of their own.
            let file = names.lookup(bucket, b"a").await.unwrap();
            names.open_file(file.ino, OpenIntent::Write).await.unwrap();
            names.write(file.ino, 0, b"!").await.unwrap();
            let (bytes, etag) = read(&objects, &at).await.unwrap();
            assert!(etag.contains('-'), "{etag}");
            assert!(bytes == [b"!", &body[1..]].concat(), "len={len}");
            names.close_file(file.ino);
        }
    });
}

#[test]
fn a_small_object_in_many_pieces_or_with_holes_is_read_as_it_is() {
    run("4+2", |w| async move {
        let (objects, names, bucket) = world(&w).await;
        for pieces in [1, 8, 9, 30] {
            let file_name = format!("of {pieces}");
            let mut make = new_file(&file_name);
            make.parent = bucket;
            let file = names.make(make).await.unwrap();
            let at = name(bucket, &file_name);
            let mut content = vec![0; pieces * 6000 + 500];
            for at in 0..pieces {
                let bytes = pattern(at as u64, 3000);
                names.write(file.ino, (at * 6000 + 1000) as u64, &bytes).await.unwrap();
                content[at * 6000 + 1000..at * 6000 + 4000].copy_from_slice(&bytes);
            }
            let set = SetAttr { size: Some(content.len() as u64), ..SetAttr::default() };
            names.setattr(file.ino, set).await.unwrap();
            assert!(read(&objects, &at).await.unwrap().0 == content, "pieces={pieces}");
            let info = objects.read_object(at.clone(), Conditions::default(), Caller::root()).await.unwrap();
            match &info.pieces {
                Some(_) => {
                    let part = objects.read_small(&info, 1500..5000).await.unwrap();
                    assert!(part == content[1500..5000], "pieces={pieces}");
                }
                None => objects.close_file(info.attr.ino),
            }
            assert_eq!(info.pieces.is_some(), pieces <= 8, "pieces={pieces}");
            names.close_file(file.ino);
        }
    });
}

#[test]
fn a_small_object_that_was_replaced_and_reclaimed_is_stale() {
    run("4+2", |w| async move {
        let (objects, _, bucket) = world(&w).await;
        let at = name(bucket, "a");
        let old = pattern(1, 100_000);
        objects.put_object_bytes(at.clone(), old.into(), options("old")).await.unwrap();
        let info = objects.read_object(at.clone(), Conditions::default(), Caller::root()).await.unwrap();
        objects.put_object_bytes(at.clone(), pattern(2, 100_000).into(), options("new")).await.unwrap();
        for _ in 0..3 {
            reclaim(&objects).await;
        }
        assert_eq!(objects.read_small(&info, 0..info.size).await, Err(FsError::Stale));
        assert_eq!(read(&objects, &at).await.unwrap().1, "new");
    });
}

#[test]
fn a_reader_gets_one_object_whole_while_it_is_replaced() {
    run("4+2", |w| async move {
        let (objects, _, bucket) = world(&w).await;
        let at = name(bucket, "a");
        let old = pattern(1, 5 << 20);
        objects.put_object_bytes(at.clone(), old.clone().into(), options("old")).await.unwrap();
        let info = objects.get_object(at.clone(), Conditions::default(), Caller::root()).await.unwrap();
        objects.put_object_bytes(at.clone(), pattern(2, 3 << 20).into(), options("new")).await.unwrap();
        for _ in 0..3 {
            reclaim(&objects).await;
        }
        assert!(objects.read(info.attr.ino, 0, old.len()).await.unwrap() == old);
        objects.close_file(info.attr.ino);
        assert_eq!(get(&objects, at).await.unwrap().1, "new");
    });
}

#[test]
fn parts_become_one_object_and_a_copy_shares_its_bytes() {
    run("4+2", |w| async move {
        let (objects, names, bucket) = world(&w).await;
        let at = name(bucket, "big");
        let upload = objects.create_upload(at.clone(), ObjectMeta::default(), Caller::root()).await.unwrap();
        let mut whole = Vec::new();
        for number in 1..=4u16 {
            let bytes = pattern(u64::from(number), 1_500_000 + usize::from(number));
            whole.extend_from_slice(&bytes);
            let part = part_of(&upload, number);
            if number % 2 == 0 {
                let staged = objects.stage().await.unwrap();
                objects.write(staged, 0, &bytes).await.unwrap();
                objects.put_part(part, staged).await.unwrap();
            } else {
                objects.put_part_bytes(part, bytes.into()).await.unwrap();
            }
        }
        assert!(keys(&names, bucket).await.is_empty(), "parts are invisible");
        let puts = w.drives.iter().map(|drive| drive.shards()).sum::<usize>();
        objects.complete_upload(complete(upload, 4)).await.unwrap();
        assert!(get(&objects, at.clone()).await.unwrap() == (whole.clone(), "whole-4".to_owned()));
        let copy = CopyObject {
            from: at.clone(),
            from_conditions: Conditions::default(),
            to: name(bucket, "dir/copy"),
            conditions: Conditions { if_none_match: Some(EtagMatch::Any), ..Conditions::default() },
            meta: None,
            tags: Some(vec![("a".into(), "b".into())]),
            caller: Caller::root(),
        };
        objects.copy_object(copy.clone()).await.unwrap();
        assert_eq!(objects.copy_object(copy).await, Err(ObjectError::PreconditionFailed));
        objects.delete_object(at, Conditions::default(), Caller::root()).await.unwrap();
        assert!(get(&objects, name(bucket, "dir/copy")).await.unwrap().0 == whole);
        assert_eq!(w.drives.iter().map(|drive| drive.shards()).sum::<usize>(), puts, "no byte moved");
        let head = objects.head_object(name(bucket, "dir/copy"), Conditions::default(), Caller::root());
        assert_eq!(head.await.unwrap().meta.tags, [("a".to_owned(), "b".to_owned())]);
    });
}

fn part_of(upload: &UploadRef, number: u16) -> PutPart {
    let etag = number.to_string();
    PutPart { upload: upload.clone(), number, etag, checksum: None, caller: Caller::root() }
}

fn complete(upload: UploadRef, count: u16) -> CompleteUpload {
    let part = |number: u16| CompletePart { number, etag: number.to_string(), checksum: None };
    CompleteUpload {
        upload,
        parts: (1..=count).map(part).collect(),
        part_bytes_min: 1 << 20,
        etag: Some(format!("whole-{count}")),
        checksum: None,
        conditions: Conditions::default(),
        caller: Caller::root(),
    }
}

#[test]
fn all_writers_find_out_together_that_the_drives_are_full() {
    run("4+2", |w| async move {
        let (objects, _, bucket) = world(&w).await;
        w.drives.iter().for_each(|drive| drive.capacity_bytes.store(6 << 20, Ordering::Relaxed));
        let put = async |key: String| {
            let body = Bytes::from(pattern(1, 1 << 20));
            objects.put_object_bytes(name(bucket, &key), body, options("tag")).await
        };
        let mut stored = 0;
        while put(format!("fill{stored}")).await.is_ok() {
            stored += 1;
        }
        assert!(stored > 10, "{stored}");
        // A writer checks for at least a second; one after another, they would take more than a minute.
        let all = join_all((0..60).map(|number| put(format!("more{number}"))));
        for result in
            tokio::time::timeout(Duration::from_secs(20), all).await.expect("they wait side by side")
        {
            assert_eq!(result.map(|_| ()), Err(ObjectError::Fs(FsError::NoSpace)));
        }
        assert_eq!(keys(&objects, bucket).await.len(), stored);
    });
}

#[test]
fn refused_or_discarded_objects_leave_nothing_on_drives() {
    run("4+2", |w| async move {
        let (objects, _, bucket) = world(&w).await;
        let at = name(bucket, "a");
        objects.put_object_bytes(at.clone(), Bytes::from_static(b"small"), options("x")).await.unwrap();
        let mut put = options("y");
        put.conditions.if_none_match = Some(EtagMatch::Any);
        let body: Bytes = pattern(3, 2 << 20).into();
        let refused = objects.put_object_bytes(at.clone(), body.clone(), put.clone()).await;
        assert_eq!(refused, Err(ObjectError::PreconditionFailed));
        let staged = objects.stage().await.unwrap();
        objects.write(staged, 0, &body).await.unwrap();
        assert_eq!(objects.put_object(at, staged, put).await, Err(ObjectError::PreconditionFailed));
        objects.discard(staged);
        while w.drives.iter().any(|drive| drive.shards() > 0) {
            reclaim(&objects).await;
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn what_was_not_committed_leaves_nothing_on_drives_and_what_may_be_stays() {
    run("r2", |w| async move {
        let (_, names, bucket) = world(&w).await;
        let (objects, wire) = w.wired_client().await;
        let body: Bytes = pattern(3, 2 << 20).into();
        let is_put =
            |request: &wire::meta::MetaRequest| matches!(request, wire::meta::MetaRequest::Object(_));
        wire.refuse(is_put);
        let put = objects.put_object_bytes(name(bucket, "a"), body.clone(), options("x")).await;
        assert_eq!(put, Err(ObjectError::Fs(FsError::Unavailable)));
        assert!(w.drives.iter().all(|drive| drive.shards() == 0), "it is known not to have happened");
        wire.refuse(|_| false);
        wire.lose(is_put);
        let put = objects.put_object_bytes(name(bucket, "a"), body.clone(), options("x")).await;
        assert_eq!(put, Err(ObjectError::Fs(FsError::Unknown)));
        assert_eq!(get(&names, name(bucket, "a")).await.unwrap().0, body);
    });
}

#[test]
fn an_object_that_an_older_map_placed_is_written_again_by_the_newer_one() {
    run_with_spares("1+0", 1, |world_| async move {
        let (client, objects, bucket) = world(&world_).await;
        world_.drives[0].set(Fault::Slow);
        let (at, body) = (name(bucket, "object"), pattern(1, 300_000));
        let put = {
            let (objects, at, body) = (objects.clone(), at.clone(), body.clone());
            tokio::spawn(async move { objects.put_object_bytes(at, body.into(), options("tag")).await })
        };
        // A put takes 20 ms.
        tokio::time::sleep(Duration::from_millis(10)).await;
        world_.move_position(0, DriveId(1), DriveState::Leaving);
        client.advance_groups(&client.rebuild_groups()).await.unwrap();
        put.await.unwrap().unwrap();
        world_.drives[0].forget_all();
        assert!(get(&objects, at).await.unwrap().0 == body);
    });
}

#[test]
fn a_directory_object_keeps_its_bytes_and_settings_of_a_bucket_are_kept() {
    run("4+2", |w| async move {
        let (objects, names, bucket) = world(&w).await;
        let body: Bytes = pattern(5, 20_000).into();
        objects.put_object_bytes(name(bucket, "d/"), body.clone(), options("d")).await.unwrap();
        let info =
            objects.get_object(name(bucket, "d/"), Conditions::default(), Caller::root()).await.unwrap();
        assert!(info.directory && info.body == body && info.size == 20_000);
        assert_eq!(names.lookup(bucket, b"d").await.unwrap().kind, client::FileKind::Directory);
        objects.set_bucket_setting(bucket, "cors", Some(Bytes::from_static(b"x"))).await.unwrap();
        let settings = objects.bucket_settings(bucket).await.unwrap();
        assert_eq!(settings, [("cors".to_owned(), Bytes::from_static(b"x"))]);
        objects.set_bucket_setting(bucket, "cors", None).await.unwrap();
        assert!(objects.bucket_settings(bucket).await.unwrap().is_empty());
        assert!(names.listxattr(bucket).await.unwrap().is_empty());
    });
}
