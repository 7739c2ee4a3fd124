//! Locks of programs: those that this client holds at the owner, and requests that wait.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::{FsError, Ino};
use tokio::sync::{Notify, oneshot};
use wire::lock::{self, FileLock};
use wire::meta::{MetaReply, MetaRequest};

use crate::Client;

/// Pause before an owner that could not be told of an unlock is told again.
const UNLOCK_PAUSE: Duration = Duration::from_secs(1);
/// How long a lock waits until the owner knows of an unlock of the same range.
const UNLOCK_PATIENCE: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Default)]
pub(crate) struct Locks {
    state: Mutex<State>,
    /// An entry of `unlocking` has ended.
    unlocked: Notify,
}

#[derive(Default)]
struct State {
    last_ticket: u64,
    /// What the next owner is told.
    held: HashMap<Ino, Vec<FileLock>>,
    waiting: BTreeMap<u64, (FileLock, oneshot::Sender<()>)>,
    /// Given up here, and still held at the owner as far as this client knows.
    unlocking: BTreeMap<u64, FileLock>,
}

impl Locks {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All locks that are held, in order of files.
    pub(crate) fn held(&self) -> Vec<FileLock> {
        let mut held: Vec<FileLock> = self.state().held.values().flatten().copied().collect();
        held.sort_by_key(|lock| (lock.ino, lock.owner, lock.start));
        held
    }

    pub(crate) fn note_granted(&self, ticket: u64) {
        let mut state = self.state();
        if let Some((lock, granted)) = state.waiting.remove(&ticket) {
            state.hold(lock);
            // The receiver is gone if the caller gave up: then the lock is given back.
            let _ = granted.send(());
        }
    }

    /// The session has ended, and its locks with it.
    pub(crate) fn lose_all(&self) {
        for (ino, locks) in self.state().held.drain() {
            tracing::error!(%ino, count = locks.len(), "locks were lost with the session");
        }
    }

    pub(crate) fn note_lost(&self, lock: &FileLock) {
        self.state().give_up(lock);
    }

    fn has(&self, lock: &FileLock) -> bool {
        let state = self.state();
        let mut held = state.held.get(&lock.ino).into_iter().flatten();
        held.any(|held| {
            let contains = held.start <= lock.start && lock.last <= held.last;
            contains && held.has_holder_of(lock) && held.exclusive >= lock.exclusive
        })
    }

    /// Waits until the owner knows of all that the holder of `lock` has given up in its range. A lock that is asked for
    /// earlier could fall to the unlock when this is sent again.
    async fn until_unlocked(&self, lock: &FileLock) {
        loop {
            let ended = self.unlocked.notified();
            let overlaps = |earlier: &FileLock| earlier.has_holder_of(lock) && earlier.overlaps(lock);
            if !self.state().unlocking.values().any(overlaps) {
                return;
            }
            ended.await;
        }
    }
}

impl State {
    fn next_ticket(&mut self) -> u64 {
        self.last_ticket += 1;
        self.last_ticket
    }

    fn hold(&mut self, lock: FileLock) {
        lock::hold(self.held.entry(lock.ino).or_default(), lock);
    }

    fn give_up(&mut self, range: &FileLock) {
        if let Some(held) = self.held.get_mut(&range.ino) {
            lock::give_up(held, range);
            if held.is_empty() {
                self.held.remove(&range.ino);
            }
        }
    }
}

/// A request under way. If its caller stops waiting, it is taken back.
struct Request<'a> {
    client: &'a Client,
    lock: FileLock,
    ticket: u64,
    is_over: bool,
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let locks = &self.client.inner.locks;
        locks.state().waiting.remove(&self.ticket);
        drop(self.client.give_up_lock(self.lock, Some(self.ticket)));
    }
}

impl Client {
    /// Takes a lock, in place of what its holder has in the range. `wait`: as long as others have conflicting ones. A caller
    /// that drops the future gives up.
    ///
    /// # Errors
    /// `WouldBlock` if others have conflicting locks and the caller does not want to wait; `Deadlock` if the wait would
    /// never end.
    pub async fn lock(&self, lock: FileLock, wait: bool) -> Result<(), FsError> {
        let unlocked = self.inner.locks.until_unlocked(&lock);
        tokio::time::timeout(UNLOCK_PATIENCE, unlocked).await.map_err(|_| FsError::Unavailable)?;
        let ticket = self.inner.locks.state().next_ticket();
        let mut request = Request { client: self, lock, ticket, is_over: false };
        let result = self.ask_for_lock(lock, ticket, wait).await;
        // Without an answer the owner may have granted it: then it is given up.
        request.is_over = result != Err(FsError::Unknown);
        if result.is_err() {
            self.inner.locks.state().waiting.remove(&ticket);
        }
        result
    }

    async fn ask_for_lock(&self, lock: FileLock, ticket: u64, wait: bool) -> Result<(), FsError> {
        let bonds = &self.inner.session.bonds;
        let mut believed = false;
        loop {
            let number = bonds.with(|bond| bond.number);
            let (granted, grant) = oneshot::channel();
            self.inner.locks.state().waiting.insert(ticket, (lock, granted));
            let reply = self.call(MetaRequest::Lock { lock, ticket: wait.then_some(ticket) }).await;
            match reply {
                Ok(MetaReply::Done) => {
                    self.inner.locks.note_granted(ticket);
                    // The next owner may have been told of all locks before this one was noted.
                    if bonds.with(|bond| bond.number) == number && self.has_for_certain(&lock).await? {
                        return Ok(());
                    }
                    believed = true;
                }
                Ok(MetaReply::Queued) => {
                    let left = bonds.wait_for(|bond| bond.number != number && bond.owner.is_some());
                    tokio::select! {
                        biased;
                        // As above: the next owner may not have been told.
                        Ok(()) = grant => {
                            if bonds.with(|bond| bond.number) == number && self.has_for_certain(&lock).await? {
                                return Ok(());
                            }
                            believed = true;
                        }
                        // The next owner does not know that anybody waits.
                        _ = left => {}
                    }
                }
                Ok(_) => return Err(FsError::Io),
                Err(error) => {
                    if believed {
                        self.inner.locks.note_lost(&lock);
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Gives up what the holder has in the range of `lock`: when this returns, not when the future is polled, so that a lock
    /// that is asked for later does not fall to it. After an error the client goes on telling the owner, and the holder's
    /// next lock in the range waits for that.
    pub fn unlock(&self, lock: FileLock) -> impl Future<Output = Result<(), FsError>> + Send + 'static {
        let given_up = self.give_up_lock(lock, None);
        async { given_up.await.unwrap_or(Err(FsError::Unknown)) }
    }

    /// Gives up a range, and the request of this ticket. The owner is told until it answers: otherwise the lock would last
    /// as long as the session. The receiver gets the result of the first attempt.
    fn give_up_lock(&self, lock: FileLock, ticket: Option<u64>) -> oneshot::Receiver<Result<(), FsError>> {
        let number = {
            let mut state = self.inner.locks.state();
            if ticket.is_none() {
                state.give_up(&lock);
            }
            let number = state.next_ticket();
            state.unlocking.insert(number, lock);
            number
        };
        let (told, first) = oneshot::channel();
        let client = self.clone();
        self.inner.runtime.spawn(async move {
            let mut told = Some(told);
            loop {
                let reply = client.call(MetaRequest::Unlock { lock, ticket }).await;
                // A request that still waited leaves what its holder had before.
                if ticket.is_some() && reply == Ok(MetaReply::Done) {
                    client.inner.locks.state().give_up(&lock);
                }
                let result = reply.map(drop);
                if let Some(told) = told.take() {
                    let _ = told.send(result);
                }
                let Err(error) = result else { break };
                tracing::warn!(ino = %lock.ino, %error, "owner was not told of an unlock");
                // With the session, its locks have ended.
                if error == FsError::StaleLease || client.inner.closing.load(Ordering::Relaxed) {
                    break;
                }
                tokio::time::sleep(UNLOCK_PAUSE).await;
            }
            client.inner.locks.state().unlocking.remove(&number);
            client.inner.locks.unlocked.notify_waiters();
        });
        first
    }

    /// Whether this client has a lock that was granted. An owner that heard nothing of the client for its term may have given it to
    /// others since.
    async fn has_for_certain(&self, lock: &FileLock) -> Result<bool, FsError> {
        self.inner.session.be_certain().await?;
        Ok(self.inner.locks.has(lock))
    }

    /// Whether this client still has the lock. `false` once the owner may have given it to others.
    pub fn is_locked(&self, lock: &FileLock) -> bool {
        !self.inner.session.term.is_over() && self.inner.locks.has(lock)
    }

    /// Gives up all locks, in the background: their holders are gone.
    pub fn give_up_locks(&self) {
        let held = self.inner.locks.held();
        held.into_iter().for_each(|lock| drop(self.give_up_lock(lock, None)));
    }

    /// Whether this client has a lock of the same holder in the range.
    pub fn holds_lock(&self, lock: &FileLock) -> bool {
        let state = self.inner.locks.state();
        let mut held = state.held.get(&lock.ino).into_iter().flatten();
        held.any(|held| held.has_holder_of(lock) && held.overlaps(lock))
    }

    /// A lock of another holder that conflicts with this one.
    pub async fn test_lock(&self, lock: FileLock) -> Result<Option<FileLock>, FsError> {
        match self.call(MetaRequest::TestLock { lock }).await? {
            MetaReply::Locked(found) => Ok(found),
            _ => Err(FsError::Io),
        }
    }
}
