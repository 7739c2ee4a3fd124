//! Locks of programs, fcntl(2) and flock(2), which the owner of the ledger keeps for all machines.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Mutex;

use base::{FsError, Ino};
use client::{FileLock, LockSpace};
use fuse::abi::RELEASE_FLOCK_UNLOCK;
use fuse::{Lock, Reply};

use super::Fuse;
use super::attr::errno;
use super::serve::reply_done;

/// The last byte of a file, as the kernel says it.
const LAST: u64 = i64::MAX as u64;

/// Holders of range locks: for each, the handle through which it asked last. A holder is a process, or an open file (F_OFD_SETLK).
/// The kernel says when a process closes a descriptor that can write. It says nothing about descriptors that can only read, nor
/// about locks of open files: those end when the handle is released. A release may come late, when the process has a lock
/// through another handle already.
#[derive(Debug, Default)]
pub(super) struct RangeHolders(Mutex<HashMap<Ino, HashMap<u64, u64>>>);

impl RangeHolders {
    fn note(&self, ino: Ino, owner: u64, handle: u64) {
        let mut inodes = self.0.lock().expect("no holder of this lock panics");
        inodes.entry(ino).or_default().insert(owner, handle);
    }

    /// The holders that match give up what they have: `unlock` is called for each, before another lock of theirs is noted.
    fn take<T>(
        &self,
        ino: Ino,
        matches: impl Fn(u64, u64) -> bool,
        mut unlock: impl FnMut(u64) -> Option<T>,
    ) -> Vec<T> {
        let mut inodes = self.0.lock().expect("no holder of this lock panics");
        let Some(holders) = inodes.get_mut(&ino) else { return Vec::new() };
        let taken = holders.extract_if(|owner, handle| matches(*owner, *handle));
        let unlocks = taken.filter_map(|(owner, _)| unlock(owner)).collect();
        if holders.is_empty() {
            inodes.remove(&ino);
        }
        unlocks
    }
}

fn space_of(flock: bool) -> LockSpace {
    if flock { LockSpace::Whole } else { LockSpace::Range }
}

fn file_lock(ino: Ino, owner: u64, lock: &Lock, flock: bool) -> FileLock {
    FileLock {
        ino,
        owner,
        space: space_of(flock),
        exclusive: lock.kind == libc::F_WRLCK,
        start: lock.start,
        last: if lock.last >= LAST { u64::MAX } else { lock.last },
        pid: lock.pid,
    }
}

/// The end of an unlock that has begun.
pub(super) type Unlock = Pin<Box<dyn Future<Output = Result<(), FsError>> + Send>>;

impl Fuse {
    pub(super) fn get_lock(&self, ino: Ino, owner: u64, lock: Lock, flock: bool, reply: Reply) {
        let wanted = file_lock(ino, owner, &lock, flock);
        self.run(reply, |client, reply| async move {
            match client.test_lock(wanted).await {
                Ok(None) => reply.lock(&Lock { kind: libc::F_UNLCK, ..lock }),
                Ok(Some(found)) => reply.lock(&Lock {
                    start: found.start,
                    last: found.last.min(LAST),
                    kind: if found.exclusive { libc::F_WRLCK } else { libc::F_RDLCK },
                    pid: found.pid,
                }),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    pub(super) fn set_lock(
        &self,
        ino: Ino,
        (handle, owner): (u64, u64),
        lock: Lock,
        flock: bool,
        wait: bool,
        reply: Reply,
    ) {
        let wanted = file_lock(ino, owner, &lock, flock);
        if lock.kind == libc::F_UNLCK {
            return self.run(reply, |client, reply| async move {
                reply_done(reply, client.unlock(wanted).await);
            });
        }
        if !flock {
            self.range_holders.note(ino, owner, handle);
        }
        let signal = wait.then(|| reply.park_until_signal());
        self.run(reply, |client, reply| async move {
            let locked = match signal {
                None => client.lock(wanted, false).await,
                Some(signal) => tokio::select! {
                    biased;
                    locked = client.lock(wanted, true) => locked,
                    () = signal.notified() => Err(FsError::Interrupted),
                },
            };
            if let Err(error) = locked {
                return reply.error(errno(error));
            }
            if !reply.granted() {
                // The program is gone, and the kernel does not know of the lock.
                let _ = client.unlock(wanted).await;
            }
        });
    }

    /// A process closes a descriptor of the file, and gives up its locks.
    pub(super) fn unlock_process(&self, ino: Ino, owner: u64) -> Option<Unlock> {
        self.range_holders.take(ino, |holder, _| holder == owner, |_| None::<()>);
        self.unlock_all(ino, owner, LockSpace::Range)
    }

    /// The last descriptor of a handle is closed: gives up the locks that end with it.
    pub(super) fn unlock_handle(&self, ino: Ino, handle: u64, flags: u32, owner: u64) -> Vec<Unlock> {
        let unlock = |holder| self.unlock_all(ino, holder, LockSpace::Range);
        let mut unlocks = self.range_holders.take(ino, |_, last| last == handle, unlock);
        if flags & RELEASE_FLOCK_UNLOCK != 0 {
            unlocks.extend(self.unlock_all(ino, owner, LockSpace::Whole));
        }
        unlocks
    }

    /// Gives up all that a holder has on a file. `None`: it has nothing.
    fn unlock_all(&self, ino: Ino, owner: u64, space: LockSpace) -> Option<Unlock> {
        let all = FileLock { ino, owner, space, exclusive: false, start: 0, last: u64::MAX, pid: 0 };
        self.client.holds_lock(&all).then(|| Box::pin(self.client.unlock(all)) as Unlock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_release_leaves_a_lock_that_was_taken_through_another_handle() {
        let holders = RangeHolders::default();
        let file = Ino(3);
        let end = |handle| holders.take(file, |_, last| last == handle, Some);
        holders.note(file, 1, 10);
        holders.note(file, 1, 20);
        holders.note(file, 2, 10);
        holders.note(Ino(4), 1, 10);
        assert_eq!(end(10), [2]);
        assert_eq!(holders.take(file, |holder, _| holder == 1, Some), [1]);
        assert!(holders.take(file, |_, _| true, Some).is_empty());
        assert_eq!(holders.take(Ino(4), |_, last| last == 10, Some), [1]);
        assert!(holders.0.lock().unwrap().is_empty());
    }
}
