//! The lock table of an owner: locks that programs hold on files. A state machine without clock or messages of its own.
//!
//! Locks are in memory only: sessions claim theirs from the next owner. Waiting requests are granted in the order of their
//! arrival: one that conflicts with an earlier one waits behind it, so nobody starves. A request for a range that would close a
//! circle of waits fails. Circles over several ledgers are not found.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use base::{FsError, Ino, SessionId};
use wire::lock::{self, FileLock, LockSpace};
use wire::meta::{MetaReply, OwnerEvent};

use super::lease::Events;
use super::{Op, Outcome, Volatile};

/// Most locks, held and awaited, of one file.
pub const FILE_LOCKS_MAX: usize = 4096;
/// Most files in which one session has locks.
pub const LOCKED_FILES_MAX: usize = 1 << 16;

/// Holders are told apart by session and number.
type Holder = (SessionId, u64);

/// A request that waits. The session chose the ticket.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    session: SessionId,
    ticket: u64,
    lock: FileLock,
}

impl Waiting {
    fn holder(&self) -> Holder {
        (self.session, self.lock.owner)
    }
}

#[derive(Debug, Default)]
struct FileLocks {
    held: BTreeMap<SessionId, Vec<FileLock>>,
    waiting: VecDeque<Waiting>,
}

/// The outcome of a request for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Locking {
    /// It is held.
    Granted,
    /// It waits: an event will tell that it is held.
    Queued,
}

/// All locks of a ledger.
#[derive(Debug, Default)]
pub struct LockTable {
    files: BTreeMap<Ino, FileLocks>,
    /// Files in which requests wait.
    awaited: BTreeSet<Ino>,
    /// Files in which each session has locks or waits.
    sessions: HashMap<SessionId, HashSet<Ino>>,
}

impl LockTable {
    /// Takes a lock, which replaces what the holder has in the range. With a ticket, the request waits if it must.
    ///
    /// # Errors
    /// `WouldBlock` if it conflicts and has no ticket, `Deadlock` if it would never be granted, `Range` if the session has
    /// or the file has too many locks, `Invalid` if the range is empty.
    pub fn lock(
        &mut self,
        session: SessionId,
        lock: FileLock,
        ticket: Option<u64>,
        events: &mut Events,
    ) -> Result<Locking, FsError> {
        if lock.start > lock.last {
            return Err(FsError::Invalid);
        }
        // A repetition asks again: its place in the queue is kept.
        let file = self.files.entry(lock.ino).or_default();
        if ticket.is_some()
            && file.waiting.iter().any(|other| (other.session, Some(other.ticket)) == (session, ticket))
        {
            return Ok(Locking::Queued);
        }
        let holder = (session, lock.owner);
        let is_blocked = file.blockers(holder, &lock, file.waiting.len(), ticket.is_some()).next().is_some();
        let is_full = file.held().count() + file.waiting.len() >= FILE_LOCKS_MAX;
        let result = match (is_blocked, ticket) {
            (true, None) => Err(FsError::WouldBlock),
            (true, Some(_)) if lock.space == LockSpace::Range && self.closes_circle(holder, &lock) => {
                Err(FsError::Deadlock)
            }
            _ if is_full || self.has_many_files(session) => Err(FsError::Range),
            (false, _) => {
                self.file(session, lock.ino).hold(session, lock);
                // It may be weaker than what the holder had.
                self.grant(lock.ino, events);
                Ok(Locking::Granted)
            }
            (true, Some(ticket)) => {
                self.file(session, lock.ino).waiting.push_back(Waiting { session, ticket, lock });
                Ok(Locking::Queued)
            }
        };
        self.tidy(session, lock.ino);
        result
    }

    fn file(&mut self, session: SessionId, ino: Ino) -> &mut FileLocks {
        self.sessions.entry(session).or_default().insert(ino);
        self.files.entry(ino).or_default()
    }

    fn has_many_files(&self, session: SessionId) -> bool {
        self.sessions.get(&session).is_some_and(|files| files.len() >= LOCKED_FILES_MAX)
    }

    /// Whether a session has no lock and waits for none.
    pub fn holds_none(&self, session: SessionId) -> bool {
        self.sessions.get(&session).is_none_or(HashSet::is_empty)
    }

    /// Gives up what the holder has in the range of `lock`. Requests that waited for it are granted.
    pub fn unlock(&mut self, session: SessionId, lock: FileLock, events: &mut Events) {
        let Some(file) = self.files.get_mut(&lock.ino) else { return };
        file.give_up(session, &lock);
        self.grant(lock.ino, events);
        self.tidy(session, lock.ino);
    }

    /// A request does not wait any more. If it was granted in the meantime, the lock is given up. Returns whether it still
    /// waited: then its holder keeps what it had before.
    pub fn cancel(&mut self, session: SessionId, lock: FileLock, ticket: u64, events: &mut Events) -> bool {
        let Some(file) = self.files.get_mut(&lock.ino) else { return false };
        let before = file.waiting.len();
        file.waiting.retain(|other| (other.session, other.ticket) != (session, ticket));
        let waited = file.waiting.len() < before;
        if !waited {
            file.give_up(session, &lock);
        }
        self.grant(lock.ino, events);
        self.tidy(session, lock.ino);
        waited
    }

    /// A lock of another holder with which this one conflicts.
    pub fn test(&self, session: SessionId, lock: &FileLock) -> Option<FileLock> {
        let file = self.files.get(&lock.ino)?;
        let conflict =
            file.held().find(|(holder, other)| *holder != (session, lock.owner) && other.conflicts(lock));
        conflict.map(|(_, other)| *other)
    }

    /// Restores a lock that an earlier owner granted. Returns `false` if another session has got a conflicting one since.
    pub fn restore(&mut self, session: SessionId, lock: FileLock, events: &mut Events) -> bool {
        self.lock(session, lock, None, events) == Ok(Locking::Granted)
    }

    /// Takes the locks away from sessions for which `is_gone`, if they conflict with a wanted one.
    pub fn revoke(
        &mut self,
        wanted: (SessionId, &FileLock),
        is_gone: impl Fn(SessionId) -> bool,
        events: &mut Events,
    ) {
        let (session, lock) = wanted;
        let Some(file) = self.files.get_mut(&lock.ino) else { return };
        let mut lost = Vec::new();
        for (holder, held) in
            file.held.iter_mut().filter(|(holder, _)| **holder != session && is_gone(**holder))
        {
            lost.extend(held.extract_if(.., |held| held.conflicts(lock)).map(|lock| (*holder, lock)));
        }
        file.held.retain(|_, held| !held.is_empty());
        for (holder, lock) in lost {
            events.push((holder, OwnerEvent::LockLost { lock }));
            self.tidy(holder, lock.ino);
        }
        self.grant(lock.ino, events);
    }

    /// Takes away the locks of sessions for which `is_gone`, where others wait for them.
    pub fn expire(&mut self, is_gone: impl Fn(SessionId) -> bool, events: &mut Events) {
        let waits = self.awaited.iter().filter_map(|ino| self.files.get(ino)).flat_map(|file| &file.waiting);
        for Waiting { session, lock, .. } in waits.copied().collect::<Vec<_>>() {
            self.revoke((session, &lock), &is_gone, events);
        }
    }

    /// Gives up all locks and waits of a session.
    pub fn end_session(&mut self, session: SessionId, events: &mut Events) {
        let mut inos: Vec<Ino> = self.sessions.remove(&session).into_iter().flatten().collect();
        inos.sort_unstable();
        for ino in inos {
            let Some(file) = self.files.get_mut(&ino) else { continue };
            file.held.remove(&session);
            file.waiting.retain(|waiting| waiting.session != session);
            self.grant(ino, events);
        }
    }

    /// Grants waiting requests of a file that nothing blocks any more, in order.
    fn grant(&mut self, ino: Ino, events: &mut Events) {
        let Some(file) = self.files.get_mut(&ino) else { return };
        let mut at = 0;
        while let Some(waiting) = file.waiting.get(at).copied() {
            if file.blockers(waiting.holder(), &waiting.lock, at, true).next().is_some() {
                at += 1;
                continue;
            }
            file.waiting.remove(at);
            if file.weakens(waiting.session, &waiting.lock) {
                // Requests ahead may have waited for what the holder had.
                at = 0;
            }
            file.hold(waiting.session, waiting.lock);
            events.push((waiting.session, OwnerEvent::LockGranted { ticket: waiting.ticket }));
        }
        self.note_awaited(ino);
    }

    /// Whether a holder would wait for itself if it waited for this lock.
    fn closes_circle(&self, holder: Holder, lock: &FileLock) -> bool {
        let mut seen: HashSet<Holder> = HashSet::new();
        let mut open: Vec<Holder> = self.blockers_of(holder, lock, usize::MAX);
        while let Some(other) = open.pop() {
            if other == holder {
                return true;
            }
            if !seen.insert(other) {
                continue;
            }
            for file in self.awaited.iter().filter_map(|ino| self.files.get(ino)) {
                let waits = file.waiting.iter().enumerate().filter(|(_, waiting)| waiting.holder() == other);
                for (at, waiting) in waits.filter(|(_, waiting)| waiting.lock.space == LockSpace::Range) {
                    open.extend(self.blockers_of(other, &waiting.lock, at));
                }
            }
        }
        false
    }

    fn blockers_of(&self, holder: Holder, lock: &FileLock, before: usize) -> Vec<Holder> {
        self.files
            .get(&lock.ino)
            .map_or_else(Vec::new, |file| file.blockers(holder, lock, before, true).collect())
    }

    /// Forgets what a session does not have in a file any more.
    fn tidy(&mut self, session: SessionId, ino: Ino) {
        let has_some = self.files.get(&ino).is_some_and(|file| {
            file.held.contains_key(&session) || file.waiting.iter().any(|waiting| waiting.session == session)
        });
        if !has_some && let Some(files) = self.sessions.get_mut(&session) {
            files.remove(&ino);
            if files.is_empty() {
                self.sessions.remove(&session);
            }
        }
        self.note_awaited(ino);
    }

    /// Notes whether requests wait for a file. A file without locks is forgotten.
    fn note_awaited(&mut self, ino: Ino) {
        let file = self.files.get(&ino);
        if file.is_some_and(|file| !file.waiting.is_empty()) {
            self.awaited.insert(ino);
        } else {
            self.awaited.remove(&ino);
        }
        if file.is_some_and(|file| file.held.is_empty() && file.waiting.is_empty()) {
            self.files.remove(&ino);
        }
    }
}

impl FileLocks {
    /// The holders for which a request waits: those of conflicting locks, and with `queues` those of conflicting requests
    /// among the first `before` in the queue.
    fn blockers(
        &self,
        holder: Holder,
        lock: &FileLock,
        before: usize,
        queues: bool,
    ) -> impl Iterator<Item = Holder> {
        let held = self.held();
        let earlier = self.waiting.iter().take(if queues { before } else { 0 });
        let waiting = earlier.map(|waiting| (waiting.holder(), &waiting.lock));
        held.chain(waiting)
            .filter(move |(other, held)| *other != holder && held.conflicts(lock))
            .map(|(other, _)| other)
    }

    fn held(&self) -> impl Iterator<Item = (Holder, &FileLock)> {
        self.held.iter().flat_map(|(session, held)| held.iter().map(|lock| ((*session, lock.owner), lock)))
    }

    /// Whether the lock is weaker than one that it would replace.
    fn weakens(&self, session: SessionId, lock: &FileLock) -> bool {
        let mut held = self.held.get(&session).into_iter().flatten();
        !lock.exclusive && held.any(|held| held.exclusive && held.has_holder_of(lock) && held.overlaps(lock))
    }

    fn hold(&mut self, session: SessionId, lock: FileLock) {
        lock::hold(self.held.entry(session).or_default(), lock);
    }

    fn give_up(&mut self, session: SessionId, range: &FileLock) {
        if let Some(held) = self.held.get_mut(&session) {
            lock::give_up(held, range);
            if held.is_empty() {
                self.held.remove(&session);
            }
        }
    }
}

impl Op<'_> {
    pub(super) fn lock(&mut self, lock: FileLock, ticket: Option<u64>) -> Outcome {
        self.inode(lock.ino)?;
        let Volatile { leases, locks, events, .. } = &mut *self.volatile;
        let now_ns = self.now.awake_ns;
        locks.revoke((self.session, &lock), |holder| leases.is_silent(holder, now_ns), events);
        match locks.lock(self.session, lock, ticket, events)? {
            Locking::Granted => Ok(MetaReply::Done),
            Locking::Queued => Ok(MetaReply::Queued),
        }
    }

    pub(super) fn unlock(&mut self, lock: FileLock, ticket: Option<u64>) -> MetaReply {
        let Volatile { locks, events, .. } = &mut *self.volatile;
        match ticket {
            Some(ticket) if locks.cancel(self.session, lock, ticket, events) => return MetaReply::Queued,
            Some(_) => {}
            None => locks.unlock(self.session, lock, events),
        }
        MetaReply::Done
    }

    pub(super) fn test_lock(&self, lock: &FileLock) -> MetaReply {
        MetaReply::Locked(self.volatile.locks.test(self.session, lock))
    }
}

#[cfg(test)]
mod tests;
