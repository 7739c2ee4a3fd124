//! The watch table of an owner: which session may cache which names. A state machine without clock or messages of its
//! own.
//!
//! A session watches the directories of the names that it received, existing or missing. Rules: a name changes only
//! after every other session that watches its directory was told. While a session is being told of a name, it may not
//! cache answers about that name. So it has none cached when it confirms, or when it does not confirm for [`KEPT_NS`].

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use base::{Ino, SessionId};
use bytes::Bytes;
use wire::meta::{ANSWER_AGE_MAX, NAME_TERM, OwnerEvent};

use super::lease::Events;

/// After this time no session caches a name any more. Clocks of clients may run slower than the owner's clock.
pub const KEPT_NS: u64 = (NAME_TERM.as_nanos() + ANSWER_AGE_MAX.as_nanos() + SLACK.as_nanos()) as u64;
const SLACK: Duration = Duration::from_secs(1);
/// Most names of a directory that are remembered as told. With more, all are dropped, and sessions are told again.
const TOLD_MAX: usize = 4096;

/// A name that the session has not confirmed yet.
#[derive(Debug, Clone, Copy)]
struct Telling {
    number: u64,
    since_ns: u64,
}

/// The names of a directory that one session may cache: all except those in `told`.
#[derive(Debug)]
struct Watch {
    session: SessionId,
    /// Time of the last answer that may be cached.
    since_ns: u64,
    pending: BTreeMap<Bytes, Telling>,
    told: HashSet<Bytes>,
}

impl Watch {
    fn is_over(&self, now_ns: u64) -> bool {
        self.pending.is_empty() && now_ns >= self.since_ns + KEPT_NS
    }

    fn note_told(&mut self, name: Bytes) {
        if self.told.len() >= TOLD_MAX {
            self.told.clear();
        }
        self.told.insert(name);
    }
}

/// All watches of a ledger.
#[derive(Debug, Default)]
pub struct WatchTable {
    dirs: HashMap<Ino, Vec<Watch>>,
    last_number: u64,
}

impl WatchTable {
    fn watch(&mut self, dir: Ino, session: SessionId) -> &mut Watch {
        let watches = self.dirs.entry(dir).or_default();
        let at = watches.iter().position(|watch| watch.session == session).unwrap_or_else(|| {
            let (pending, told) = (BTreeMap::new(), HashSet::new());
            watches.push(Watch { session, since_ns: 0, pending, told });
            watches.len() - 1
        });
        &mut watches[at]
    }

    /// Notes that `session` receives the meaning of a name, or that it is missing. Returns whether it may cache that.
    pub fn watch_name(&mut self, dir: Ino, session: SessionId, name: &Bytes, now_ns: u64) -> bool {
        let watch = self.watch(dir, session);
        watch.since_ns = now_ns;
        if watch.pending.contains_key(name) {
            return false;
        }
        watch.told.remove(name);
        true
    }

    /// As [`WatchTable::watch_name`], for many names of a directory.
    pub fn watch_all(&mut self, dir: Ino, session: SessionId, now_ns: u64) -> bool {
        let watch = self.watch(dir, session);
        watch.since_ns = now_ns;
        watch.told.clear();
        watch.pending.is_empty()
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
        self.watch(dir, session).pending.insert(name.clone(), Telling { number, since_ns: now_ns });
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
        let Some(watches) = self.dirs.get_mut(&dir) else { return true };
        let mut clear = true;
        for watch in watches.iter_mut().filter(|watch| watch.session != session && !watch.is_over(now_ns)) {
            if watch.told.contains(name) {
                continue;
            }
            clear = false;
            watch.pending.entry(name.clone()).or_insert_with(|| {
                self.last_number += 1;
                let number = self.last_number;
                events.push((watch.session, OwnerEvent::Forget { dir, name: name.clone(), number }));
                Telling { number, since_ns: now_ns }
            });
        }
        clear
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

    /// Drops the watches of a session that has ended.
    pub fn drop_session(&mut self, session: SessionId) {
        self.dirs.retain(|_, watches| {
            watches.retain(|watch| watch.session != session);
            !watches.is_empty()
        });
    }

    /// Drops the watches of a directory that no longer exists.
    pub fn drop_inode(&mut self, dir: Ino) {
        self.dirs.remove(&dir);
    }

    /// Expires watches, and names without a confirmation. Returns the directories of these names.
    pub fn expire(&mut self, now_ns: u64) -> Vec<Ino> {
        let mut touched = Vec::new();
        self.dirs.retain(|dir, watches| {
            for watch in watches.iter_mut() {
                let late = |telling: &Telling| now_ns >= telling.since_ns + KEPT_NS;
                let gone: Vec<Bytes> =
                    watch.pending.extract_if(.., |_, telling| late(telling)).map(|(name, _)| name).collect();
                if !gone.is_empty() {
                    touched.push(*dir);
                }
                gone.into_iter().for_each(|name| watch.note_told(name));
            }
            watches.retain(|watch| !watch.is_over(now_ns));
            !watches.is_empty()
        });
        // The table has no order, and the effects must not depend on its iteration order.
        touched.sort_unstable();
        touched.dedup();
        touched
    }
}

#[cfg(test)]
mod tests;
