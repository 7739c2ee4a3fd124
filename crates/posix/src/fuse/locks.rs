//! Locks of programs, fcntl(2) and flock(2), which the owner of the ledger keeps for all machines.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;

use base::{FsError, Ino};
use client::{FileLock, LockSpace};
use fuse::abi::RELEASE_FLOCK_UNLOCK;
use fuse::{Lock, Reply};

use super::Fuse;
use super::attr::errno;
use super::files::is_reader;
use super::serve::reply_done;

/// The last byte of a file, as the kernel says it.
const LAST: u64 = i64::MAX as u64;

/// Processes that took range locks through handles that can only read. The kernel does not say when a descriptor of these
/// is closed, but only when the last one is: then the locks end.
#[derive(Debug, Default)]
pub(super) struct ReaderLocks(Mutex<HashMap<u64, HashSet<u64>>>);

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

/// All that a holder has on a file.
fn all_of(ino: Ino, owner: u64, space: LockSpace) -> FileLock {
    FileLock { ino, owner, space, exclusive: false, start: 0, last: u64::MAX, pid: 0 }
}

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
        if !flock && is_reader(handle) {
            let mut readers = self.reader_locks.0.lock().expect("no holder of this lock panics");
            readers.entry(handle).or_default().insert(owner);
        }
        if !wait {
            return self.run(reply, |client, reply| async move {
                reply_done(reply, client.lock(wanted, false).await);
            });
        }
        let signal = reply.park_until_signal();
        self.run(reply, |client, reply| async move {
            let locked = tokio::select! {
                biased;
                locked = client.lock(wanted, true) => locked,
                () = signal.notified() => Err(FsError::Interrupted),
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

    /// What a process gives up when it closes a descriptor of the file; `None` if it has nothing.
    pub(super) fn range_unlock(&self, ino: Ino, owner: u64) -> Option<FileLock> {
        let all = all_of(ino, owner, LockSpace::Range);
        self.client.holds_lock(&all).then_some(all)
    }

    /// What ends with the last descriptor of a handle.
    pub(super) fn locks_of_handle(&self, ino: Ino, handle: u64, flags: u32, owner: u64) -> Vec<FileLock> {
        let mut locks = Vec::new();
        if flags & RELEASE_FLOCK_UNLOCK != 0 {
            locks.push(all_of(ino, owner, LockSpace::Whole));
        }
        if is_reader(handle) {
            let owners = self.reader_locks.0.lock().expect("no holder of this lock panics").remove(&handle);
            locks.extend(owners.into_iter().flatten().map(|owner| all_of(ino, owner, LockSpace::Range)));
        }
        locks.retain(|lock| self.client.holds_lock(lock));
        locks
    }
}
