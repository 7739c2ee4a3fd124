//! Clients whose ledger gets another owner while they work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{Fault, World, create, find, pattern, read_all, run};
use crate::locks::range;
use base::{FsError, Ino};
use client::OpenIntent;
use tokio::sync::watch;
use wire::meta::MetaService;

#[test]
fn clients_go_on_under_the_next_owner_and_nothing_is_lost() {
    run("2+1", |world: Arc<World>| async move {
        let mut owner = world.owner.clone();
        let (publish, seat) = watch::channel(owner.clone() as Arc<dyn MetaService>);
        let (one, two) = (world.client_of(seat.clone()).await, world.client_of(seat).await);
        let unnamed = create(&one, "unnamed").await;
        one.write(unnamed, 0, &pattern(1, 70_000)).await.unwrap();
        two.unlink(Ino::ROOT, b"unnamed").await.unwrap();
        let busy = Arc::new(AtomicBool::new(true));
        let work = {
            let (one, busy) = (one.clone(), busy.clone());
            tokio::spawn(async move {
                let mut round = 0;
                while busy.load(Ordering::Relaxed) {
                    let ino = create(&one, &format!("file {round}")).await;
                    one.write(ino, 0, &pattern(round, 20_000)).await.unwrap();
                    if round % 3 == 0 {
                        one.fsync(ino).await.unwrap();
                    }
                    one.close_file(ino);
                    round += 1;
                }
                round
            })
        };
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            // Written, and durable nowhere yet.
            one.write(unnamed, 100_000, &pattern(2, 5000)).await.unwrap();
            let (world, earlier) = (world.clone(), owner.clone());
            owner = tokio::task::spawn_blocking(move || world.take_over(&earlier)).await.unwrap();
            publish.send_replace(owner.clone());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        busy.store(false, Ordering::Relaxed);
        let rounds = work.await.unwrap();
        assert!(rounds > 10, "{rounds}");
        for round in 0..rounds {
            let ino = find(&two, &format!("file {round}")).await.unwrap().ino;
            assert!(read_all(&two, ino).await.unwrap() == pattern(round, 20_000), "round {round}");
        }
        one.fsync(unnamed).await.unwrap();
        let bytes = read_all(&one, unnamed).await.unwrap();
        assert!(bytes[..70_000] == pattern(1, 70_000) && bytes[100_000..] == pattern(2, 5000));
        owner.stop();
    });
}

#[test]
fn what_waits_at_an_owner_that_stops_goes_on_at_the_next() {
    run("2+1", |world: Arc<World>| async move {
        let (publish, seat) = watch::channel(world.owner.clone() as Arc<dyn MetaService>);
        let (one, two) = (world.client_of(seat.clone()).await, world.client_of(seat).await);
        let (file, locked) = (create(&one, "file").await, create(&one, "locked").await);
        let lock = move |owner| range(locked, owner, true, 0, 9);
        one.lock(lock(1), false).await.unwrap();
        // It is not written out, so that its lease stays.
        world.drives.iter().for_each(|drive| drive.set(Fault::Storing));
        one.write(file, 0, &pattern(1, 70_000)).await.unwrap();
        let (reader, locker) = (two.clone(), two.clone());
        let reading = tokio::spawn(async move { read_all(&reader, file).await });
        let locking = tokio::spawn(async move { locker.lock(lock(2), true).await });
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(!reading.is_finished() && !locking.is_finished());
        let (next, earlier) = (world.clone(), world.owner.clone());
        let owner = tokio::task::spawn_blocking(move || next.take_over(&earlier)).await.unwrap();
        world.drives.iter().for_each(|drive| drive.set(Fault::None));
        publish.send_replace(owner.clone());
        one.unlock(lock(1)).await.unwrap();
        assert!(reading.await.unwrap().unwrap() == pattern(1, 70_000));
        locking.await.unwrap().unwrap();
        owner.stop();
    });
}

#[test]
fn a_client_whose_session_has_ended_says_what_it_lost_and_goes_on() {
    run("2+1", |world: Arc<World>| async move {
        let (publish, seat) = watch::channel(world.owner.clone() as Arc<dyn MetaService>);
        let one = world.client_of(seat).await;
        let other = tokio::task::spawn_blocking(|| World::new("2+1", 0)).await.unwrap();
        let (kept, lost) = (create(&one, "kept").await, create(&one, "lost").await);
        one.write(kept, 0, b"durable").await.unwrap();
        one.fsync(kept).await.unwrap();
        one.write(lost, 0, b"not yet").await.unwrap();
        // The next owner knows nothing of the session: the ledger was started anew. The client may not have noticed yet
        // that there is another owner, so the earlier one must not answer.
        let earlier = world.owner.clone();
        tokio::task::spawn_blocking(move || earlier.stop()).await.unwrap();
        publish.send_replace(other.owner.clone());
        assert_eq!(one.fsync(lost).await, Err(FsError::Io));
        assert_eq!(one.fsync(lost).await, Ok(()), "it is said once");
        let ino = create(&one, "new").await;
        one.open_file(ino, OpenIntent::Write).await.unwrap();
        tokio::task::spawn_blocking(move || other.owner.stop()).await.unwrap();
    });
}

#[test]
fn requests_fail_if_no_owner_will_follow() {
    run("2+1", |world: Arc<World>| async move {
        let one = world.client().await;
        let ino = create(&one, "file").await;
        let owner = world.owner.clone();
        tokio::task::spawn_blocking(move || owner.stop()).await.unwrap();
        assert_eq!(one.unlink(Ino::ROOT, b"file").await, Err(FsError::Unknown));
        one.write(ino, 0, b"text").await.unwrap();
        assert!(one.fsync(ino).await.is_err());
    });
}
