//! The watch table of an owner: which session may cache which names. A state machine without clock or messages of its
//! own.
//!
//! A session watches the names that it received, existing or missing; after a listing or very many names, all names of the
//! directory. Rules: a name changes only after every other session that may have it was told. While a session is being
//! told of a name, it may not cache answers about that name. So it has none cached when it confirms, or [`KEPT_NS`] after
//! it last received the name. A session that never asks again and never confirms delays others for that time at most.
//!
//! No operation walks all watches: they are queued by the time of their next check, and each session has an index of its
//! directories.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use base::{Ino, SessionId};
use bytes::Bytes;
use wire::meta::{ANSWER_AGE_MAX, NAME_TERM, OwnerEvent};

use super::lease::Events;

/// After this time no session caches a name any more. Clocks of clients may run slower than the owner's clock.
pub const KEPT_NS: u64 = (NAME_TERM.as_nanos() + ANSWER_AGE_MAX.as_nanos() + SLACK.as_nanos()) as u64;
const SLACK: Duration = Duration::from_secs(1);
/// A directory whose names several sessions change within this time is shared: see [`WatchTable::is_shared`].
const SHARED_NS: u64 = 60_000_000_000;
/// Directories that are remembered as changed before the old ones among them are looked for.
const CHANGED_DIRS: usize = 1024;
/// Most names of a directory that are remembered for a session: those that it watches, or those that it was told of. With
/// more of the first, it watches all names; with more of the second, it is told of names again.
const NAMES_MAX: usize = 4096;

/// A name that the session has not confirmed yet.
#[derive(Debug, Clone, Copy)]
struct Telling {
    number: u64,
    /// From then on the session does not cache the name any more, confirmed or not.
    deadline_ns: u64,
}

/// The names of a directory that a session may cache.
#[derive(Debug)]
enum Names {
    /// These, each with the time at which the session last received it.
    Only(HashMap<Bytes, u64>),
    /// All except those that it was told of.
    AllBut(HashSet<Bytes>),
}

/// The names of a directory that one session may cache, and those it is being told of.
#[derive(Debug)]
struct Watch {
    session: SessionId,
    /// Time of the last answer that may be cached.
    since_ns: u64,
    names: Names,
    pending: BTreeMap<Bytes, Telling>,
    /// Its place in the queue: no later than the first time at which there is something to do.
    queued_ns: u64,
}

impl Watch {
    /// Until when the session may cache a name.
    fn cached_until_ns(&self, name: &Bytes) -> Option<u64> {
        let since_ns = match &self.names {
            Names::Only(names) => *names.get(name)?,
            Names::AllBut(told) if told.contains(name) => return None,
            Names::AllBut(_) => self.since_ns,
        };
        Some(since_ns + KEPT_NS)
    }

    fn note_asked(&mut self, name: &Bytes, now_ns: u64) {
        match &mut self.names {
            Names::Only(names) => {
                names.insert(name.clone(), now_ns);
                if names.len() <= NAMES_MAX {
                    return;
                }
                names.retain(|_, since_ns| *since_ns + KEPT_NS > now_ns);
                // If most of them stay, the next names would soon walk them again.
                if names.len() > NAMES_MAX / 2 {
                    self.names = Names::AllBut(HashSet::new());
                }
            }
            Names::AllBut(told) => {
                told.remove(name);
            }
        }
    }

    fn note_told(&mut self, name: Bytes) {
        match &mut self.names {
            Names::Only(names) => {
                names.remove(&name);
            }
            Names::AllBut(told) => {
                if told.len() >= NAMES_MAX {
                    told.clear();
                }
                told.insert(name);
            }
        }
    }

    /// The time at which the first event without a confirmation, or the watch as a whole, is over.
    fn due_ns(&self) -> u64 {
        let pending = self.pending.values().map(|telling| telling.deadline_ns).min();
        pending.unwrap_or(self.since_ns + KEPT_NS)
    }
}

/// All watches of a ledger.
#[derive(Debug, Default)]
pub struct WatchTable {
    dirs: HashMap<Ino, Vec<Watch>>,
    /// The directories of which each session watches names.
    sessions: HashMap<SessionId, HashSet<Ino>>,
    queue: BTreeSet<(u64, Ino, SessionId)>,
    last_number: u64,
    changed: HashMap<Ino, Changed>,
    /// How many entries `changed` has before the old ones among them are looked for.
    prune_at: usize,
}

/// Who last changed names of a directory, and until when it counts as changed by several sessions.
#[derive(Debug)]
struct Changed {
    session: SessionId,
    at_ns: u64,
    shared_until_ns: u64,
}

impl WatchTable {
    fn watch(&mut self, dir: Ino, session: SessionId, now_ns: u64) -> &mut Watch {
        let watches = self.dirs.entry(dir).or_default();
        let at = watches.iter().position(|watch| watch.session == session).unwrap_or_else(|| {
            let queued_ns = now_ns + KEPT_NS;
            self.queue.insert((queued_ns, dir, session));
            self.sessions.entry(session).or_default().insert(dir);
            let (names, pending) = (Names::Only(HashMap::new()), BTreeMap::new());
            watches.push(Watch { session, since_ns: now_ns, names, pending, queued_ns });
            watches.len() - 1
        });
        &mut watches[at]
    }

    /// Notes that `session` receives the meaning of a name, or that it is missing. Returns whether it may cache that.
    pub fn watch_name(&mut self, dir: Ino, session: SessionId, name: &Bytes, now_ns: u64) -> bool {
        let watch = self.watch(dir, session, now_ns);
        if watch.pending.contains_key(name) {
            return false;
        }
        watch.since_ns = now_ns;
        watch.note_asked(name, now_ns);
        true
    }

    /// As [`WatchTable::watch_name`], for many names of a directory.
    pub fn watch_all(&mut self, dir: Ino, session: SessionId, now_ns: u64) -> bool {
        let watch = self.watch(dir, session, now_ns);
        watch.since_ns = now_ns;
        watch.names = Names::AllBut(HashSet::new());
        watch.pending.is_empty()
    }

    /// Notes that `session` changes names of a directory. Returns whether another one did so lately.
    fn note_change(&mut self, dir: Ino, session: SessionId, now_ns: u64) -> bool {
        let changed =
            self.changed.entry(dir).or_insert(Changed { session, at_ns: now_ns, shared_until_ns: 0 });
        let several = now_ns < changed.shared_until_ns
            || changed.session != session && now_ns < changed.at_ns + SHARED_NS;
        if changed.session != session && now_ns < changed.shared_until_ns {
            changed.shared_until_ns = now_ns + SHARED_NS;
        }
        (changed.session, changed.at_ns) = (session, now_ns);
        if self.changed.len() > self.prune_at.max(CHANGED_DIRS) {
            self.changed.retain(|_, changed| now_ns < changed.at_ns + SHARED_NS);
            self.prune_at = 2 * self.changed.len();
        }
        several
    }

    /// Whether several sessions change names of a directory that others cache. Then none may cache them: a kernel drops a name only when no
    /// change of that directory is under way there, so two sessions that change names which the other has would wait for one another.
    pub fn is_shared(&self, dir: Ino, now_ns: u64) -> bool {
        self.changed.get(&dir).is_some_and(|changed| now_ns < changed.shared_until_ns)
    }

    /// Whether `session` may cache a name.
    pub fn is_cached(&self, dir: Ino, session: SessionId, name: &Bytes, now_ns: u64) -> bool {
        let mut watches = self.dirs.get(&dir).into_iter().flatten();
        let watch = watches.find(|watch| watch.session == session);
        watch.and_then(|watch| watch.cached_until_ns(name)).is_some_and(|until_ns| now_ns < until_ns)
    }

    /// As [`WatchTable::watch_name`], for a name that `session` moved a cached inode to; it caches the name in any
    /// case. A running event about this name may refer to the time before, so the session is told again.
    pub fn watch_moved(
        &mut self,
        dir: Ino,
        session: SessionId,
        name: &Bytes,
        now_ns: u64,
        events: &mut Events,
    ) {
        if self.watch_name(dir, session, name, now_ns) {
            return;
        }
        self.last_number += 1;
        let number = self.last_number;
        let telling = Telling { number, deadline_ns: now_ns + KEPT_NS };
        let watch = self.watch(dir, session, now_ns);
        watch.since_ns = now_ns;
        watch.pending.insert(name.clone(), telling);
        events.push((session, OwnerEvent::Forget { dir, name: name.clone(), number }));
    }

    /// Whether `session` may change a name now. If not, `events` has the messages to the sessions that may cache it,
    /// and the request must wait until they have confirmed.
    pub fn clear(
        &mut self,
        dir: Ino,
        name: &Bytes,
        session: SessionId,
        now_ns: u64,
        events: &mut Events,
    ) -> bool {
        let several = self.note_change(dir, session, now_ns);
        let Some(watches) = self.dirs.get_mut(&dir) else { return true };
        let mut clear = true;
        for watch in watches.iter_mut().filter(|watch| watch.session != session) {
            if let Some(telling) = watch.pending.get(name) {
                clear &= telling.deadline_ns <= now_ns;
                continue;
            }
            let Some(deadline_ns) = watch.cached_until_ns(name).filter(|until_ns| *until_ns > now_ns) else {
                continue;
            };
            clear = false;
            self.last_number += 1;
            let number = self.last_number;
            events.push((watch.session, OwnerEvent::Forget { dir, name: name.clone(), number }));
            watch.pending.insert(name.clone(), Telling { number, deadline_ns });
            if deadline_ns < watch.queued_ns {
                self.queue.remove(&(watch.queued_ns, dir, watch.session));
                self.queue.insert((deadline_ns, dir, watch.session));
                watch.queued_ns = deadline_ns;
            }
        }
        if !clear
            && several
            && let Some(changed) = self.changed.get_mut(&dir)
        {
            changed.shared_until_ns = now_ns + SHARED_NS;
        }
        clear
    }

    /// Whether `session` has only to wait on: others may cache the name, and all of them are being told. If one is not, as
    /// it received the name since, [`WatchTable::clear`] must tell it.
    pub fn awaits(&self, dir: Ino, name: &Bytes, session: SessionId, now_ns: u64) -> bool {
        let others = self.dirs.get(&dir).into_iter().flatten().filter(|watch| watch.session != session);
        let mut is_told = others.filter_map(|watch| match watch.pending.get(name) {
            Some(telling) => (telling.deadline_ns > now_ns).then_some(true),
            None => watch.cached_until_ns(name).filter(|until_ns| *until_ns > now_ns).map(|_| false),
        });
        is_told.next().is_some_and(|first| first && is_told.all(|told| told))
    }

    /// Whether `session` is being told of a name in a directory.
    pub fn is_told(&self, dir: Ino, session: SessionId) -> bool {
        let mut watches = self.dirs.get(&dir).into_iter().flatten();
        watches.any(|watch| watch.session == session && !watch.pending.is_empty())
    }

    /// Notes that `session` has forgotten a name. A confirmation of another event than the newest changes nothing.
    pub fn forgot(&mut self, dir: Ino, session: SessionId, name: &Bytes, number: u64) {
        let Some(watches) = self.dirs.get_mut(&dir) else { return };
        let Some(watch) = watches.iter_mut().find(|watch| watch.session == session) else { return };
        if watch.pending.get(name).is_some_and(|telling| telling.number == number) {
            watch.pending.remove(name);
            watch.note_told(name.clone());
        }
    }

    /// Whether a session caches no name.
    pub fn holds_none(&self, session: SessionId) -> bool {
        self.sessions.get(&session).is_none_or(HashSet::is_empty)
    }

    /// Drops the watches of a session that has ended.
    pub fn drop_session(&mut self, session: SessionId) {
        for dir in self.sessions.remove(&session).unwrap_or_default() {
            self.remove(dir, session);
        }
    }

    /// Drops the watches of a directory that no longer exists.
    pub fn drop_inode(&mut self, dir: Ino) {
        let watches = self.dirs.get(&dir).into_iter().flatten();
        let sessions: Vec<SessionId> = watches.map(|watch| watch.session).collect();
        for session in sessions {
            self.remove(dir, session);
        }
    }

    fn remove(&mut self, dir: Ino, session: SessionId) {
        let Some(watches) = self.dirs.get_mut(&dir) else { return };
        let Some(at) = watches.iter().position(|watch| watch.session == session) else { return };
        let watch = watches.swap_remove(at);
        if watches.is_empty() {
            self.dirs.remove(&dir);
        }
        self.queue.remove(&(watch.queued_ns, dir, session));
        if let Some(dirs) = self.sessions.get_mut(&session) {
            dirs.remove(&dir);
            if dirs.is_empty() {
                self.sessions.remove(&session);
            }
        }
    }

    /// Expires watches, and names without a confirmation. Returns the directories of these names.
    pub fn expire(&mut self, now_ns: u64) -> Vec<Ino> {
        let mut touched = Vec::new();
        while let Some((queued_ns, dir, session)) = self.queue.first().copied()
            && queued_ns <= now_ns
        {
            let mut watches = self.dirs.get_mut(&dir).into_iter().flatten();
            let watch = watches.find(|watch| watch.session == session).expect("each entry has its watch");
            let late = |_: &Bytes, telling: &mut Telling| telling.deadline_ns <= now_ns;
            let gone: Vec<Bytes> = watch.pending.extract_if(.., late).map(|(name, _)| name).collect();
            if !gone.is_empty() {
                touched.push(dir);
            }
            gone.into_iter().for_each(|name| watch.note_told(name));
            let due_ns = watch.due_ns();
            if due_ns > now_ns {
                watch.queued_ns = due_ns;
                self.queue.pop_first();
                self.queue.insert((due_ns, dir, session));
            } else {
                self.remove(dir, session);
            }
        }
        touched.sort_unstable();
        touched.dedup();
        touched
    }
}

#[cfg(test)]
mod tests;
