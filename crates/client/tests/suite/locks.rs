//! Locks of programs on several clients.

use std::sync::Arc;
use std::time::Duration;

use base::{FsError, Ino};
use client::{FileLock, LockSpace};
use tokio::sync::watch;
use wire::meta::{MetaRequest, MetaService};

use crate::common::{World, create, run, until};

pub fn range(ino: Ino, owner: u64, exclusive: bool, start: u64, last: u64) -> FileLock {
    FileLock { ino, owner, space: LockSpace::Range, exclusive, start, last, pid: 77 }
}

#[test]
fn a_lock_waits_for_that_of_another_client() {
    run("r2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let ino = create(&one, "file").await;
        let (first, second) = (range(ino, 1, true, 0, 9), range(ino, 1, true, 5, 5));
        one.lock(first, false).await.unwrap();
        assert_eq!(two.lock(second, false).await, Err(FsError::WouldBlock));
        assert_eq!(two.test_lock(second).await, Ok(Some(first)));
        let waiting = {
            let two = two.clone();
            tokio::spawn(async move { two.lock(second, true).await })
        };
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiting.is_finished());
        one.unlock(range(ino, 1, true, 3, 6)).await.unwrap();
        assert_eq!(waiting.await.unwrap(), Ok(()));
        assert_eq!(one.lock(first, false).await, Err(FsError::WouldBlock));
        two.close().await.unwrap();
        assert_eq!(one.lock(first, false).await, Ok(()), "locks end with their session");
    });
}

#[test]
fn a_caller_that_gives_up_to_wait_keeps_the_lock_that_it_had() {
    run("r2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let ino = create(&one, "file").await;
        let (shared, exclusive) = (range(ino, 1, false, 0, 9), range(ino, 1, true, 0, 9));
        one.lock(shared, false).await.unwrap();
        two.lock(range(ino, 2, false, 0, 9), false).await.unwrap();
        let gives_up = tokio::time::timeout(Duration::from_millis(30), one.lock(exclusive, true)).await;
        assert!(gives_up.is_err());
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(one.is_locked(&shared));
        assert_eq!(two.lock(range(ino, 2, true, 0, 9), false).await, Err(FsError::WouldBlock));
    });
}

#[test]
fn a_caller_that_gives_up_leaves_no_lock() {
    run("r2", |world| async move {
        let ((one, wire), two) = (world.wired_client().await, world.client().await);
        let ino = create(&one, "file").await;
        let lock = range(ino, 1, true, 0, 9);
        two.lock(lock, false).await.unwrap();
        let gives_up = tokio::time::timeout(Duration::from_millis(30), one.lock(lock, true)).await;
        assert!(gives_up.is_err());
        let mut asked = Vec::new();
        until(|| {
            asked.extend(wire.take_asked());
            asked.iter().any(|request| matches!(request, MetaRequest::Unlock { .. }))
        })
        .await;
        two.unlock(lock).await.unwrap();
        assert_eq!(two.test_lock(lock).await, Ok(None));
    });
}

#[test]
fn an_owner_that_was_not_told_of_an_unlock_is_told_again() {
    run("r2", |world| async move {
        let ((one, wire), two) = (world.wired_client().await, world.client().await);
        let ino = create(&one, "file").await;
        let lock = range(ino, 1, true, 0, 9);
        one.lock(lock, false).await.unwrap();
        wire.refuse(|request| matches!(request, MetaRequest::Unlock { .. }));
        assert_eq!(one.unlock(lock).await, Err(FsError::Unavailable));
        // The same holder takes it again. What is told again must not take that from it.
        let again = {
            let one = one.clone();
            tokio::spawn(async move { one.lock(lock, false).await })
        };
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!again.is_finished());
        one.lock(range(ino, 1, true, 10, 19), false).await.unwrap();
        wire.refuse(|_| false);
        assert_eq!(again.await.unwrap(), Ok(()));
        assert_eq!(two.lock(lock, false).await, Err(FsError::WouldBlock));
        wire.refuse(|request| matches!(request, MetaRequest::Unlock { .. }));
        assert!(one.unlock(lock).await.is_err());
        wire.refuse(|_| false);
        two.lock(lock, true).await.unwrap();
    });
}

#[test]
fn an_unlock_comes_before_a_lock_that_is_asked_for_later() {
    run("r2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let ino = create(&one, "file").await;
        let lock = range(ino, 1, true, 0, 9);
        one.lock(lock, false).await.unwrap();
        let unlocked = one.unlock(lock);
        one.lock(lock, false).await.unwrap();
        unlocked.await.unwrap();
        assert_eq!(two.lock(lock, false).await, Err(FsError::WouldBlock));
    });
}

#[test]
fn circles_between_clients_are_refused() {
    run("r2", |world| async move {
        let (one, two) = (world.client().await, world.client().await);
        let (a, b) = (create(&one, "a").await, create(&one, "b").await);
        one.lock(range(a, 1, true, 0, 0), false).await.unwrap();
        two.lock(range(b, 1, true, 0, 0), false).await.unwrap();
        // The request that closes the circle is refused. Then its client gives up what the other one waits for.
        let cross = async |client: &client::Client, wanted, held| {
            let result = client.lock(range(wanted, 1, true, 0, 0), true).await;
            if result.is_err() {
                client.unlock(range(held, 1, true, 0, 0)).await.unwrap();
            }
            result
        };
        let mut results = <[_; 2]>::from(tokio::join!(cross(&one, b, a), cross(&two, a, b)));
        results.sort_by_key(Result::is_err);
        assert_eq!(results, [Ok(()), Err(FsError::Deadlock)]);
    });
}

#[test]
fn locks_and_waits_outlive_their_owner() {
    run("2+1", |world: Arc<World>| async move {
        let mut owner = world.owner.clone();
        let (publish, seat) = watch::channel(owner.clone() as Arc<dyn MetaService>);
        let (one, two) = (world.client_of(seat.clone()).await, world.client_of(seat).await);
        let ino = create(&one, "file").await;
        for number in 0..20 {
            one.lock(range(ino, number, true, number * 10, number * 10 + 4), false).await.unwrap();
        }
        let waiting: Vec<_> = (0..20)
            .map(|number| {
                let two = two.clone();
                let wanted = range(ino, 1, false, number * 10 + 2, number * 10 + 6);
                tokio::spawn(async move { two.lock(wanted, true).await })
            })
            .collect();
        for _ in 0..2 {
            let (world, earlier) = (world.clone(), owner.clone());
            owner = tokio::task::spawn_blocking(move || world.take_over(&earlier)).await.unwrap();
            publish.send_replace(owner.clone());
            assert_eq!(two.lock(range(ino, 2, true, 0, 500), false).await, Err(FsError::WouldBlock));
        }
        assert!(waiting.iter().all(|wait| !wait.is_finished()));
        for number in 0..20 {
            one.unlock(range(ino, number, true, 0, u64::MAX)).await.unwrap();
        }
        for wait in waiting {
            assert_eq!(wait.await.unwrap(), Ok(()));
        }
        assert_eq!(one.lock(range(ino, 1, true, 2, 2), false).await, Err(FsError::WouldBlock));
        tokio::task::spawn_blocking(move || owner.stop()).await.unwrap();
    });
}
