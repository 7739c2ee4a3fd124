//! Locks that processes believe to hold: no two of them conflict.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::{FsError, Ino};
use client::{Client, FileLock, LockSpace};

use crate::world::World;

/// How long a process waits for a lock before it gives up.
const PATIENCE_MS: u64 = 20_000;
/// How long it keeps one.
const HOLD_MS: u64 = 6000;
/// Within this time every lock of the others has ended, with their sessions if need be.
const FREE_WITHIN: Duration = Duration::from_secs(150);

/// The locks that are held.
#[derive(Default)]
pub(crate) struct Locks(Mutex<Held>);

#[derive(Default)]
struct Held {
    last_holder: u64,
    locks: BTreeMap<u64, (Client, FileLock)>,
}

/// Ends the entry of a lock, also if its process is dropped.
struct Entry<'a> {
    locks: &'a Locks,
    holder: u64,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.locks.held().locks.remove(&self.holder);
    }
}

impl Locks {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.lock().expect("no holder of this lock panics")
    }

    fn next_holder(&self) -> u64 {
        let mut held = self.held();
        held.last_holder += 1;
        held.last_holder
    }

    /// Notes a lock that was granted. Returns a lock of another process that conflicts with it, if both are certain.
    fn note(&self, client: &Client, lock: FileLock) -> (Entry<'_>, Option<FileLock>) {
        let mut held = self.held();
        let conflicts =
            |(other, theirs): &(Client, FileLock)| theirs.conflicts(&lock) && other.is_locked(theirs);
        let found = held.locks.values().find(|entry| conflicts(entry)).map(|(_, theirs)| *theirs);
        held.locks.insert(lock.owner, (client.clone(), lock));
        (Entry { locks: self, holder: lock.owner }, found.filter(|_| client.is_locked(&lock)))
    }
}

/// Takes a lock on a part of a file, keeps it for some time, and gives it up. Some processes do not wait for it, others lose
/// patience. An error is one of the client's requests.
pub(crate) async fn hold_one(world: &Arc<World>, client: &Client, ino: Ino) -> Result<(), FsError> {
    let dice = world.dice(0xa_0000 + world.locks.next_holder());
    let owner = dice.below(u64::MAX);
    let space = *dice.of(&[LockSpace::Range, LockSpace::Range, LockSpace::Whole]);
    let (start, last) = match space {
        LockSpace::Range => (dice.below(4), 4 + dice.below(4)),
        LockSpace::Whole => (0, u64::MAX),
    };
    let lock = FileLock { ino, owner, space, exclusive: !dice.once_in(3), start, last, pid: 1 };
    let patience = Duration::from_millis(dice.below(PATIENCE_MS));
    let waits = !dice.once_in(4);
    match tokio::time::timeout(patience, client.lock(lock, waits)).await {
        Ok(Ok(())) => {}
        Ok(Err(FsError::WouldBlock)) if !waits => return Ok(()),
        Ok(Err(error)) => return Err(error),
        Err(_) => return Ok(()),
    }
    let (entry, conflict) = world.locks.note(client, lock);
    world.trace.event(format_args!("lock ino={ino} {start}..={last} exclusive={}", lock.exclusive));
    if let Some(other) = conflict {
        world.promises().violate(format!("locks: two processes hold {lock:?} and {other:?}"));
    }
    tokio::time::sleep(Duration::from_millis(dice.below(HOLD_MS))).await;
    drop(entry);
    client.unlock(lock).await
}

/// Takes a lock on the whole file, which no process keeps from it any more.
pub(crate) async fn check_free(world: &Arc<World>, client: &Client, ino: Ino) {
    for space in [LockSpace::Range, LockSpace::Whole] {
        let owner = u64::MAX;
        let lock = FileLock { ino, owner, space, exclusive: true, start: 0, last: u64::MAX, pid: 1 };
        let taken = tokio::time::timeout(FREE_WITHIN, client.lock(lock, true)).await;
        if taken.is_err() && !world.trace.is_cut() {
            let kept = client.test_lock(lock).await;
            world.promises().violate(format!("locks: a lock on inode {ino} was never given up: {kept:?}"));
        }
        let _ = client.unlock(lock).await;
    }
}
