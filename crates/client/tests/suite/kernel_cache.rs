//! Caches above a client, such as that of a kernel: what they may keep, and how they are invalidated before a change.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::common::{create, new_file, run, until};
use base::{FsError, Ino};
use client::object::{Caller, Conditions, ObjectMeta, ObjectName};
use client::{Client, FileKind, Invalidate, MakeNode, OpenIntent, PutOptions, RenameMode, SetAttr};
use tokio::sync::watch;
use wire::meta::{ANSWER_AGE_MAX, MetaRequest, MetaService, NAME_TERM};

/// The notices that a cache above got.
#[derive(Default)]
struct Notices {
    inodes: Mutex<Vec<Ino>>,
    entries: Mutex<Vec<(Ino, String)>>,
}

impl Notices {
    fn above(client: &Client) -> Arc<Self> {
        let notices = Arc::new(Self::default());
        client.set_invalidate(Some(notices.clone()));
        notices
    }

    fn take_entries(&self) -> Vec<(Ino, String)> {
        let mut entries = std::mem::take(&mut *self.entries.lock().unwrap());
        entries.sort_unstable();
        entries
    }
}

impl Invalidate for Notices {
    fn inode(&self, ino: Ino) {
        self.inodes.lock().unwrap().push(ino);
    }

    fn entry(&self, parent: Ino, name: &[u8]) {
        self.entries.lock().unwrap().push((parent, String::from_utf8_lossy(name).into_owned()));
    }
}

async fn directory(client: &Client, name: &str) -> Ino {
    let dir = MakeNode { kind: FileKind::Directory, open: OpenIntent::None, ..new_file(name) };
    client.make(dir).await.unwrap().ino
}

/// Asks for a name. Returns how long the answer may be kept.
async fn ask(client: &Client, name: &str) -> Duration {
    let (_, term) = client.find(Ino::ROOT, name.as_bytes()).await.unwrap();
    client.name_term(&term)
}

#[test]
fn every_name_is_invalidated_before_its_change_is_acknowledged() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        for name in ["a", "b", "c"] {
            create(&two, name).await;
        }
        let notices = Notices::above(&one);
        for name in ["a", "b", "c", "missing"] {
            assert_eq!(ask(&one, name).await, NAME_TERM, "{name}");
        }
        let a = one.lookup(Ino::ROOT, b"a").await.unwrap().ino;
        // All leases on the directory and on the file are given up for another client.
        two.setattr(a, SetAttr { mode: Some(0o600), ..SetAttr::default() }).await.unwrap();
        create(&two, "other").await;
        assert_eq!(notices.take_entries(), [], "it never asked for that name");
        let (here, there) = (two.clone(), two.clone());
        let both = [
            tokio::spawn(async move { here.unlink(Ino::ROOT, b"a").await.unwrap() }),
            tokio::spawn(async move { there.unlink(Ino::ROOT, b"b").await.unwrap() }),
        ];
        for removed in both {
            removed.await.unwrap();
        }
        assert_eq!(notices.take_entries(), [(Ino::ROOT, "a".to_owned()), (Ino::ROOT, "b".to_owned())]);
        two.rename((Ino::ROOT, b"c"), (Ino::ROOT, b"missing"), RenameMode::Replace).await.unwrap();
        assert_eq!(notices.take_entries(), [(Ino::ROOT, "c".to_owned()), (Ino::ROOT, "missing".to_owned())]);
        assert!(notices.inodes.lock().unwrap().contains(&a));
    });
}

/// A kernel moves a name that it keeps: nobody asked for it in its new directory.
#[test]
fn a_name_that_moved_is_invalidated_under_the_next_owner_too() {
    run("4+2", |world| async move {
        let (publish, seat) = watch::channel(world.owner.clone() as Arc<dyn MetaService>);
        let (one, two) = (world.client_of(seat.clone()).await, world.client_of(seat).await);
        let dir = directory(&one, "dir").await;
        create(&one, "file").await;
        let notices = Notices::above(&one);
        assert_eq!(ask(&one, "file").await, NAME_TERM);
        one.rename((Ino::ROOT, b"file"), (dir, b"moved"), RenameMode::Replace).await.unwrap();
        let (next, earlier) = (world.clone(), world.owner.clone());
        let owner = tokio::task::spawn_blocking(move || next.take_over(&earlier)).await.unwrap();
        publish.send_replace(owner.clone());
        two.unlink(dir, b"moved").await.unwrap();
        assert_eq!(notices.take_entries(), [(dir, "moved".to_owned())]);
        owner.stop();
    });
}

/// A directory of a kernel, locked while a name in it changes: a name is forgotten with the lock only.
#[derive(Default)]
struct LockedDir {
    held: Mutex<bool>,
    free: Condvar,
}

impl LockedDir {
    fn above(client: &Client) -> Arc<Self> {
        let dir = Arc::new(Self::default());
        client.set_invalidate(Some(dir.clone()));
        dir
    }

    fn set(&self, held: bool) {
        *self.held.lock().unwrap() = held;
        self.free.notify_all();
    }

    /// As a kernel renames: with the lock, and once more if the answer is [`FsError::Retry`]. Returns whether it was.
    async fn rename(&self, client: &Client, from: &str, to: &str) -> bool {
        let (from, to) = ((Ino::ROOT, from.as_bytes()), (Ino::ROOT, to.as_bytes()));
        for refusable in [true, false] {
            self.set(true);
            let renamed = client.refusable(refusable).rename(from, to, RenameMode::Replace).await;
            self.set(false);
            match renamed {
                // The one that waits for the lock comes first.
                Err(FsError::Retry) if refusable => tokio::time::sleep(Duration::from_millis(20)).await,
                renamed => {
                    renamed.unwrap();
                    return !refusable;
                }
            }
        }
        unreachable!("the second try is not refused")
    }
}

impl Invalidate for LockedDir {
    fn inode(&self, _: Ino) {}

    fn entry(&self, _: Ino, _: &[u8]) {
        let mut held = self.held.lock().unwrap();
        while *held {
            held = self.free.wait(held).unwrap();
        }
    }
}

/// The clock stands still: nothing expires.
#[test]
fn kernels_that_change_names_of_one_directory_do_not_wait_for_each_other() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let (here, there) = (LockedDir::above(&one), LockedDir::above(&two));
        for name in ["a", "b"] {
            create(&one, name).await;
            for client in [&one, &two] {
                ask(client, name).await;
            }
        }
        there.set(true);
        let first = {
            let (here, one) = (here.clone(), one.clone());
            tokio::spawn(async move { here.rename(&one, "a", "c").await })
        };
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!first.is_finished(), "it waits until the other kernel has forgotten the name");
        let renamed = tokio::time::timeout(Duration::from_secs(5), there.rename(&two, "b", "d")).await;
        assert_eq!(renamed, Ok(true), "refused at first");
        assert!(!first.await.unwrap());
        for name in ["c", "d"] {
            one.lookup(Ino::ROOT, name.as_bytes()).await.unwrap();
        }
    });
}

/// The one that waits is refused, although it came first: the other needs a name that only its kernel has.
#[test]
fn a_change_that_waits_gives_way_to_one_that_is_not_refused() {
    run("4+2", |world| async move {
        let (one, two, three) = (world.client().await, world.client().await, world.client().await);
        let (here, there) = (LockedDir::above(&one), LockedDir::above(&three));
        for name in ["a", "b"] {
            create(&two, name).await;
            ask(&one, name).await;
        }
        ask(&three, "a").await;
        there.set(true);
        let first = {
            let (here, one) = (here.clone(), one.clone());
            tokio::spawn(async move { here.rename(&one, "a", "c").await })
        };
        tokio::time::sleep(Duration::from_millis(100)).await;
        let renamed = two.rename((Ino::ROOT, b"b"), (Ino::ROOT, b"d"), RenameMode::Replace);
        tokio::time::timeout(Duration::from_secs(5), renamed).await.expect("the kernel forgets b").unwrap();
        assert!(!first.is_finished(), "it still waits for the third kernel");
        there.set(false);
        assert!(first.await.unwrap(), "refused at first");
    });
}

#[test]
fn a_batch_of_objects_invalidates_their_names_and_those_of_implied_directories() {
    run("4+2", |world| async move {
        let (names, objects) = (world.client().await, world.client().await);
        let bucket = directory(&names, "bucket").await;
        let key = |text: &str| ObjectName {
            bucket,
            parts: text.split('/').map(|part| bytes::Bytes::copy_from_slice(part.as_bytes())).collect(),
            directory: false,
        };
        let keys: Vec<String> = (0..500).map(|at| format!("{}/{at}", at % 3)).collect();
        for at in &keys {
            let options = PutOptions {
                meta: ObjectMeta::default(),
                conditions: Conditions::default(),
                caller: Caller::root(),
            };
            objects.put_object_bytes(key(at), bytes::Bytes::new(), options).await.unwrap();
        }
        let notices = Notices::above(&names);
        let mut expected = Vec::new();
        for dir in ["0", "1", "2"] {
            let ino = names.lookup(bucket, dir.as_bytes()).await.unwrap().ino;
            expected.push((bucket, dir.to_owned()));
            let page = names.readdir(ino, None, 1000).await.unwrap();
            assert_eq!(names.name_term(&page.term), NAME_TERM);
            for entry in &page.entries {
                names.pin_entry(&page.term, entry);
                expected.push((ino, String::from_utf8_lossy(&entry.name).into_owned()));
            }
        }
        expected.sort_unstable();
        let batch = keys.iter().map(|at| (key(at), Conditions::default())).collect();
        let results = objects.delete_objects(batch, Caller::root()).await.unwrap();
        assert!(results.iter().all(|result| result.as_ref().is_ok_and(|deleted| deleted.existed)));
        assert!(notices.take_entries() == expected);
    });
}

#[test]
fn an_answer_that_a_change_overtakes_is_not_kept() {
    run("4+2", |world| async move {
        let ((one, wire), two) = (world.wired_client().await, world.client().await);
        let ino = create(&two, "file").await;
        let notices = Notices::above(&one);
        wire.hold(|request| matches!(request, MetaRequest::Lookup { .. }));
        let asker = one.clone();
        let asking = tokio::spawn(async move { asker.find(Ino::ROOT, b"file").await.unwrap() });
        wire.holding.acquire().await.unwrap().forget();
        two.unlink(Ino::ROOT, b"file").await.unwrap();
        assert_eq!(notices.take_entries(), [(Ino::ROOT, "file".to_owned())]);
        wire.held.add_permits(1);
        let (attr, term) = asking.await.unwrap();
        assert_eq!(attr.unwrap().ino, ino, "the state at the time of the request");
        assert_eq!((one.name_term(&term), one.attr_term(ino)), (Duration::ZERO, Duration::ZERO));
        wire.hold(|_| false);
        assert_eq!(ask(&one, "file").await, NAME_TERM);
    });
}

#[test]
fn a_page_of_names_is_not_kept_once_one_of_them_was_forgotten() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        create(&two, "file").await;
        let page = one.readdir(Ino::ROOT, None, 10).await.unwrap();
        assert_eq!(one.name_term(&page.term), NAME_TERM);
        two.unlink(Ino::ROOT, b"file").await.unwrap();
        assert_eq!(one.name_term(&page.term), Duration::ZERO);
    });
}

#[test]
fn a_late_answer_is_not_kept() {
    run("4+2", |world| async move {
        let one = world.client().await;
        let (_, term) = one.find(Ino::ROOT, b"missing").await.unwrap();
        world.sim.clock.advance_ns(ANSWER_AGE_MAX.as_nanos() as u64);
        assert_eq!(one.name_term(&term), NAME_TERM);
        world.sim.clock.advance_ns(1);
        assert_eq!(one.name_term(&term), Duration::ZERO);
    });
}

#[test]
fn caches_above_are_invalidated_when_the_owner_takes_a_lease() {
    run("4+2", |world| async move {
        // It does not hear that the lease is recalled.
        let (one, two) = (world.deaf_client().await, world.client().await);
        let ino = create(&two, "file").await;
        one.lookup(Ino::ROOT, b"file").await.unwrap();
        let notices = Notices::above(&one);
        let changing = tokio::spawn(async move {
            two.setattr(ino, SetAttr { mode: Some(0o600), ..SetAttr::default() }).await.unwrap();
            two.fsync(ino).await.unwrap();
        });
        while !changing.is_finished() {
            world.sim.clock.advance_ns(1_000_000_000);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        changing.await.unwrap();
        until(|| *notices.inodes.lock().unwrap() == [ino]).await;
    });
}

/// Records how long attributes may be kept while they are being invalidated.
struct Asking {
    client: Client,
    terms: Mutex<Vec<Duration>>,
}

impl Invalidate for Asking {
    fn inode(&self, ino: Ino) {
        self.terms.lock().unwrap().push(self.client.attr_term(ino));
    }

    fn entry(&self, _: Ino, _: &[u8]) {}
}

#[test]
fn attributes_are_not_kept_while_their_lease_is_given_up() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let ino = create(&two, "file").await;
        one.lookup(Ino::ROOT, b"file").await.unwrap();
        assert_eq!(one.attr_term(ino), NAME_TERM);
        let asking = Arc::new(Asking { client: one.clone(), terms: Mutex::default() });
        one.set_invalidate(Some(asking.clone()));
        two.setattr(ino, SetAttr { mode: Some(0o600), ..SetAttr::default() }).await.unwrap();
        two.fsync(ino).await.unwrap();
        assert_eq!(one.getattr(ino).await.unwrap().mode, 0o600);
        assert_eq!(*asking.terms.lock().unwrap(), [Duration::ZERO]);
        assert_eq!(one.attr_term(ino), NAME_TERM, "under a new lease");
        one.set_invalidate(None);
    });
}

/// A kernel with locked pages: it forgets an inode only when they are unlocked, and everything else at once.
#[derive(Default)]
struct Locking {
    is_asked: AtomicBool,
    is_unlocked: Mutex<bool>,
    unlocked: Condvar,
    around: Mutex<Vec<Range<u64>>>,
}

impl Invalidate for Locking {
    fn inode(&self, _: Ino) {
        self.is_asked.store(true, Ordering::Release);
        drop(self.unlocked.wait_while(self.is_unlocked.lock().unwrap(), |unlocked| !*unlocked));
    }

    fn inode_around(&self, _: Ino, range: Range<u64>) {
        self.around.lock().unwrap().push(range);
    }

    fn entry(&self, _: Ino, _: &[u8]) {}
}

/// Unlocks the pages also where the test fails: threads that wait for that would keep it from ending.
struct Unlocks(Arc<Locking>);

impl Drop for Unlocks {
    fn drop(&mut self) {
        *self.0.is_unlocked.lock().unwrap() = true;
        self.0.unlocked.notify_all();
    }
}

#[test]
fn a_recall_does_not_wait_for_pages_of_a_write_that_waits_for_a_lease() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let ino = create(&two, "file").await;
        two.write(ino, 0, &[1; 10]).await.unwrap();
        two.fsync(ino).await.unwrap();
        one.lookup(Ino::ROOT, b"file").await.unwrap();
        assert_eq!(one.read(ino, 0, 10).await.unwrap(), [1; 10][..]);
        let locking = Arc::new(Locking::default());
        let unlocks = Unlocks(locking.clone());
        one.set_invalidate(Some(locking.clone()));
        let other = two.clone();
        let recalling = tokio::spawn(async move { other.write(ino, 0, &[2; 2]).await });
        until(|| locking.is_asked.load(Ordering::Acquire)).await;
        let writer = one.clone();
        // The kernel has the pages locked until it has the answer.
        let writing = tokio::spawn(async move {
            writer.write(ino, 4, &[3; 2]).await.unwrap();
            let left = writer.leaves_pages(ino);
            drop(unlocks);
            left
        });
        assert!(writing.await.unwrap(), "the kernel is told nothing of the file until they are gone");
        recalling.await.unwrap().unwrap();
        let around = locking.around.lock().unwrap().first().cloned().expect("the rest was dropped");
        assert!(around.contains(&4) && around.contains(&5), "{around:?}");
        one.wait_for_pages(ino).await;
        assert!(!one.leaves_pages(ino));
        assert_eq!(one.read(ino, 0, 10).await.unwrap(), [2, 2, 1, 1, 3, 3, 1, 1, 1, 1][..]);
        one.set_invalidate(None);
    });
}

/// A kernel in which a program reads right after the pages were dropped, before the client goes on.
struct ReadsOn {
    client: Client,
    runtime: tokio::runtime::Handle,
    pages: Mutex<Option<bytes::Bytes>>,
}

impl Invalidate for ReadsOn {
    fn inode(&self, ino: Ino) {
        *self.pages.lock().unwrap() = None;
        let read =
            async { tokio::time::timeout(Duration::from_millis(100), self.client.read(ino, 0, 10)).await };
        // A read that waits has its pages locked, and gets the content of later.
        if let Ok(Ok(content)) = self.runtime.block_on(read) {
            *self.pages.lock().unwrap() = Some(content);
        }
    }

    fn entry(&self, _: Ino, _: &[u8]) {}
}

#[test]
fn no_page_stays_that_was_read_while_a_lease_was_given_up() {
    run("4+2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let ino = create(&two, "file").await;
        two.write(ino, 0, &[1; 4]).await.unwrap();
        two.fsync(ino).await.unwrap();
        one.lookup(Ino::ROOT, b"file").await.unwrap();
        assert_eq!(one.read(ino, 0, 10).await.unwrap(), [1; 4][..]);
        let runtime = tokio::runtime::Handle::current();
        let kernel = Arc::new(ReadsOn { client: one.clone(), runtime, pages: Mutex::default() });
        one.set_invalidate(Some(kernel.clone()));
        two.write(ino, 4, &[2; 4]).await.unwrap();
        two.fsync(ino).await.unwrap();
        let pages = kernel.pages.lock().unwrap().clone();
        assert!(pages.as_ref().is_none_or(|pages| pages.len() == 8), "{pages:?}");
        one.set_invalidate(None);
    });
}
