//! The lease table of an owner: which session may cache which inode. A state machine without clock or messages of its
//! own.
//!
//! Rules: an exclusive lease excludes every other. A recall names the grant it recalls; only a release of that
//! grant, or its revocation, completes it. A grant that is being recalled is never upgraded.
//!
//! No operation walks all leases: recalls are queued by deadline, and each session has an index of its inodes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use base::{Epoch, Ino, LeaseId, SessionId};
use wire::meta::{LeaseGrant, LeaseKind, OwnerEvent, RECALL_IDLE, RECALL_LONGEST};

/// [`RECALL_IDLE`] in nanoseconds.
pub const RECALL_IDLE_NS: u64 = RECALL_IDLE.as_nanos() as u64;
/// [`RECALL_LONGEST`] in nanoseconds.
pub const RECALL_LONGEST_NS: u64 = RECALL_LONGEST.as_nanos() as u64;

/// The number of a lease begins with the epoch of the owner that granted it.
const EPOCH_SHIFT: u32 = 40;

/// The purpose of an operation on an inode on which other sessions may have leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// Read attributes or content: exclusive holders must flush.
    Read,
    /// Change attributes or content: no other session may go on caching.
    Change,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Recall {
    keep: Option<LeaseKind>,
    since_ns: u64,
    /// When the holder last committed under the lease, or when the recall was sent.
    progress_ns: u64,
    /// Its place in the queue. Progress does not move it: it is queued again when its turn comes.
    queued_ns: u64,
}

impl Recall {
    fn new(keep: Option<LeaseKind>, now_ns: u64) -> Self {
        Self { keep, since_ns: now_ns, progress_ns: now_ns, queued_ns: now_ns + RECALL_IDLE_NS }
    }

    fn deadline_ns(&self) -> u64 {
        (self.progress_ns + RECALL_IDLE_NS).min(self.since_ns + RECALL_LONGEST_NS)
    }
}

#[derive(Debug, Clone, Copy)]
struct Holder {
    session: SessionId,
    id: LeaseId,
    kind: LeaseKind,
    seq: u64,
    recall: Option<Recall>,
}

impl Holder {
    fn grant(&self, ino: Ino) -> LeaseGrant {
        LeaseGrant { ino, id: self.id, kind: self.kind, seq: self.seq }
    }

    /// Whether another session cannot have a lease of this kind at the same time.
    fn excludes(&self, kind: LeaseKind) -> bool {
        let exclusive = kind >= LeaseKind::Shared || self.kind >= LeaseKind::Shared;
        exclusive && (kind, self.kind) != (LeaseKind::Shared, LeaseKind::Shared)
    }

    /// Whether the lease stands in the way of an operation of another session. If so: the kind it may keep.
    fn conflict(&self, intent: Intent) -> Option<Option<LeaseKind>> {
        match (intent, self.kind) {
            (_, LeaseKind::Shared) => None,
            (Intent::Read, LeaseKind::Exclusive) => Some(Some(LeaseKind::Read)),
            (Intent::Read, LeaseKind::Attr | LeaseKind::Read) => None,
            (Intent::Change, _) => Some(None),
        }
    }
}

/// Most leases of ended sessions that one look at the deadlines removes: a millisecond's work.
const SWEEP_LEASES: usize = 1024;

/// All leases of a ledger.
#[derive(Debug, Default)]
pub struct LeaseTable {
    inodes: HashMap<Ino, Vec<Holder>>,
    /// The inodes on which each session has leases.
    sessions: HashMap<SessionId, HashSet<Ino>>,
    /// Sessions that have ended, and the inodes on which their leases were not removed yet. Such leases do not count.
    ended: BTreeMap<SessionId, Vec<Ino>>,
    /// Recalls without an answer, by the time of their next check.
    recalls: BTreeSet<(u64, Ino, LeaseId)>,
    /// When each session was last heard of.
    heard: HashMap<SessionId, u64>,
    /// Inodes that lost leases of silent sessions.
    revoked: Vec<Ino>,
    last_id: u64,
}

/// Events for sessions.
pub type Events = Vec<(SessionId, OwnerEvent)>;

impl LeaseTable {
    /// No leases. Ids of leases are unique over all owners of a ledger.
    pub fn new(epoch: Epoch) -> Self {
        Self { last_id: epoch.0 << EPOCH_SHIFT, ..Self::default() }
    }

    /// Notes that a session is alive.
    pub fn note_heard(&mut self, session: SessionId, now_ns: u64) {
        self.heard.insert(session, now_ns);
    }

    /// Whether a session was not heard of for so long that a recall would have ended: it is not asked again for each of its
    /// leases, so that it delays others only once.
    pub fn is_silent(&self, session: SessionId, now_ns: u64) -> bool {
        self.is_silent_for(session, RECALL_IDLE_NS, now_ns)
    }

    /// Whether a session has no lease.
    pub fn holds_none(&self, session: SessionId) -> bool {
        self.sessions.get(&session).is_none_or(HashSet::is_empty)
    }

    /// Whether a session was not heard of for so long.
    pub fn is_silent_for(&self, session: SessionId, time_ns: u64, now_ns: u64) -> bool {
        self.heard.get(&session).is_some_and(|heard_ns| now_ns >= heard_ns + time_ns)
    }

    /// Inodes that lost leases of silent sessions since the last call.
    pub fn take_revoked(&mut self) -> Vec<Ino> {
        std::mem::take(&mut self.revoked)
    }

    /// Revokes the leases of silent sessions that conflict with an operation.
    fn revoke_silent(
        &mut self,
        ino: Ino,
        session: SessionId,
        intent: Intent,
        now_ns: u64,
        events: &mut Events,
    ) {
        let mut holders = self.conflicting(ino, session, intent);
        holders.retain(|holder| self.is_silent(*holder, now_ns));
        self.revoke_all(ino, &holders, events);
    }

    /// Revokes the leases of others that conflict with an operation.
    pub fn revoke_conflicting(&mut self, ino: Ino, session: SessionId, intent: Intent, events: &mut Events) {
        let holders = self.conflicting(ino, session, intent);
        self.revoke_all(ino, &holders, events);
    }

    fn conflicting(&self, ino: Ino, session: SessionId, intent: Intent) -> Vec<SessionId> {
        let others = self.inodes.get(&ino).into_iter().flatten().filter(|holder| holder.session != session);
        others.filter(|holder| holder.conflict(intent).is_some()).map(|holder| holder.session).collect()
    }

    fn revoke_all(&mut self, ino: Ino, holders: &[SessionId], events: &mut Events) {
        for session in holders {
            let Some(holder) = self.remove(ino, *session) else { continue };
            events.push((*session, OwnerEvent::Revoked { lease: holder.grant(ino) }));
            self.revoked.push(ino);
        }
    }

    /// Whether `session` may go ahead now. If not, recalls were added to `events`, and the request must wait until a
    /// lease is released. Leases of silent sessions are revoked at once.
    pub fn clear(
        &mut self,
        ino: Ino,
        session: SessionId,
        intent: Intent,
        now_ns: u64,
        events: &mut Events,
    ) -> bool {
        self.remove_ended(ino);
        self.revoke_silent(ino, session, intent, now_ns, events);
        let Some(holders) = self.inodes.get_mut(&ino) else { return true };
        let mut clear = true;
        for holder in holders.iter_mut().filter(|holder| holder.session != session) {
            let Some(keep) = holder.conflict(intent) else { continue };
            clear = false;
            let stricter = holder.recall.is_none_or(|recall| recall.keep.is_some() && keep.is_none());
            if stricter {
                let recall = Recall { keep, ..holder.recall.unwrap_or(Recall::new(keep, now_ns)) };
                self.recalls.insert((recall.queued_ns, ino, holder.id));
                holder.recall = Some(recall);
                let lease = holder.grant(ino);
                events.push((holder.session, OwnerEvent::Recall { lease, keep }));
            }
        }
        clear
    }

    /// Whether `session` has only to wait on: leases conflict, and all of them are being recalled. If one is not, as it was
    /// granted since, [`LeaseTable::clear`] must recall it.
    pub fn awaits(&self, ino: Ino, session: SessionId, intent: Intent) -> bool {
        let others = self.holders(ino).filter(|holder| holder.session != session);
        let mut is_recalled = others.filter_map(|holder| {
            let keep = holder.conflict(intent)?;
            Some(holder.recall.is_some_and(|recall| recall.keep.is_none() || keep.is_some()))
        });
        is_recalled.next().is_some_and(|first| first && is_recalled.all(|recalled| recalled))
    }

    /// Grants `session` a lease of at least `kind`. `None` if other sessions hold conflicting leases or the session's
    /// own lease is being recalled. Call [`LeaseTable::clear`] first to remove conflicts.
    pub fn grant(&mut self, ino: Ino, session: SessionId, kind: LeaseKind) -> Option<LeaseGrant> {
        self.remove_ended(ino);
        // Most inodes have one holder.
        let holders = self.inodes.entry(ino).or_insert_with(|| Vec::with_capacity(1));
        if holders.iter().any(|holder| holder.session != session && holder.excludes(kind)) {
            return None;
        }
        if let Some(own) = holders.iter_mut().find(|holder| holder.session == session) {
            if own.recall.is_some() {
                return None;
            }
            own.kind = own.kind.max(kind);
            own.seq += 1;
            return Some(own.grant(ino));
        }
        self.last_id += 1;
        let holder = Holder { session, id: LeaseId(self.last_id), kind, seq: 1, recall: None };
        holders.push(holder);
        self.sessions.entry(session).or_default().insert(ino);
        Some(holder.grant(ino))
    }

    /// Grants a lease from an earlier owner again, under its id. Returns whether nothing is in its way. If it was granted and
    /// is being recalled, the event is sent again, as the first one may be lost, and its time begins again.
    pub fn restore(
        &mut self,
        session: SessionId,
        lease: LeaseGrant,
        now_ns: u64,
        events: &mut Events,
    ) -> bool {
        self.remove_ended(lease.ino);
        let holders = self.inodes.entry(lease.ino).or_insert_with(|| Vec::with_capacity(1));
        if let Some(own) = holders.iter_mut().find(|holder| holder.session == session) {
            let grant = own.grant(lease.ino);
            if let Some(recall) = &mut own.recall {
                (recall.since_ns, recall.progress_ns) = (now_ns, now_ns);
                events.push((session, OwnerEvent::Recall { lease: grant, keep: recall.keep }));
            }
            return own.id == lease.id;
        }
        if holders.iter().any(|holder| holder.excludes(lease.kind)) {
            return false;
        }
        let LeaseGrant { ino, id, kind, seq } = lease;
        holders.push(Holder { session, id, kind, seq, recall: None });
        self.sessions.entry(session).or_default().insert(ino);
        true
    }

    /// Handles a release by `session`. A release of another grant than the current one changes nothing. If the session keeps
    /// more than a later recall allows, the time of that one begins again: the session may learn of it only now.
    pub fn release(&mut self, session: SessionId, lease: LeaseGrant, keep: Option<LeaseKind>, now_ns: u64) {
        let Some(holders) = self.inodes.get_mut(&lease.ino) else { return };
        let named = |held: &Holder| held.session == session && held.id == lease.id && held.seq == lease.seq;
        let Some(at) = holders.iter().position(named) else { return };
        let holder = &mut holders[at];
        match keep {
            Some(kind) if kind < holder.kind => {
                holder.kind = kind;
                let answered = |recall: &mut Recall| recall.keep.is_some_and(|allowed| kind <= allowed);
                if let Some(recall) = holder.recall.take_if(answered) {
                    self.recalls.remove(&(recall.queued_ns, lease.ino, lease.id));
                } else if let Some(recall) = &mut holder.recall {
                    recall.progress_ns = now_ns;
                }
            }
            Some(_) => {}
            None => drop(self.remove(lease.ino, session)),
        }
    }

    /// Removes the lease of a session on an inode.
    fn remove(&mut self, ino: Ino, session: SessionId) -> Option<Holder> {
        let holders = self.inodes.get_mut(&ino)?;
        let at = holders.iter().position(|held| held.session == session)?;
        let holder = holders.swap_remove(at);
        if holders.is_empty() {
            self.inodes.remove(&ino);
        }
        if let Some(recall) = &holder.recall {
            self.recalls.remove(&(recall.queued_ns, ino, holder.id));
        }
        if let Some(inodes) = self.sessions.get_mut(&session) {
            inodes.remove(&ino);
            if inodes.is_empty() {
                self.sessions.remove(&session);
            }
        }
        Some(holder)
    }

    /// Whether a commit under this lease is accepted.
    pub fn may_write(&self, ino: Ino, session: SessionId, id: LeaseId) -> bool {
        self.inodes.get(&ino).is_some_and(|holders| {
            holders
                .iter()
                .any(|held| held.session == session && held.id == id && held.kind >= LeaseKind::Shared)
        })
    }

    /// Whether the session has a lease for writing.
    pub fn holds_writing(&self, ino: Ino, session: SessionId) -> bool {
        let holders = self.inodes.get(&ino).into_iter().flatten();
        holders.into_iter().any(|held| held.session == session && held.kind >= LeaseKind::Shared)
    }

    /// Notes that the session has committed under the lease: it is slow, but not gone.
    pub fn note_progress(&mut self, ino: Ino, session: SessionId, now_ns: u64) {
        let holders = self.inodes.get_mut(&ino).into_iter().flatten();
        for recall in holders.filter(|held| held.session == session).filter_map(|held| held.recall.as_mut()) {
            recall.progress_ns = now_ns;
        }
    }

    /// Whether a session other than this one may have changes that the owner does not have yet.
    pub fn is_written(&self, ino: Ino, session: SessionId) -> bool {
        self.holders(ino).any(|held| held.session != session && held.kind == LeaseKind::Exclusive)
    }

    /// The leases on an inode that count.
    fn holders(&self, ino: Ino) -> impl Iterator<Item = &Holder> {
        let all = self.inodes.get(&ino).into_iter().flatten();
        all.filter(|holder| !self.ended.contains_key(&holder.session))
    }

    /// Drops every lease of a session that has ended. Nobody waits until all are removed: there may be very many.
    pub fn drop_session(&mut self, session: SessionId) {
        self.heard.remove(&session);
        if let Some(inodes) = self.sessions.remove(&session) {
            self.ended.insert(session, inodes.into_iter().collect());
        }
    }

    /// Removes leases of ended sessions on an inode.
    fn remove_ended(&mut self, ino: Ino) {
        if self.ended.is_empty() {
            return;
        }
        let holders = self.inodes.get(&ino).into_iter().flatten().map(|holder| holder.session);
        let ended: Vec<SessionId> = holders.filter(|session| self.ended.contains_key(session)).collect();
        for session in ended {
            self.remove(ino, session);
        }
    }

    /// Removes some leases of ended sessions.
    fn sweep_ended(&mut self) {
        for _ in 0..SWEEP_LEASES {
            let Some(mut first) = self.ended.first_entry() else { return };
            let session = *first.key();
            match first.get_mut().pop() {
                Some(ino) => drop(self.remove(ino, session)),
                None => drop(first.remove()),
            }
        }
    }

    /// Drops every lease on an inode that no longer exists.
    pub fn drop_inode(&mut self, ino: Ino) {
        let holders = self.inodes.get(&ino).into_iter().flatten();
        let sessions: Vec<SessionId> = holders.map(|holder| holder.session).collect();
        for session in sessions {
            self.remove(ino, session);
        }
    }

    /// Revokes recalled leases whose time is over. Returns their inodes.
    pub fn expire(&mut self, now_ns: u64, events: &mut Events) -> Vec<Ino> {
        self.sweep_ended();
        let mut touched = Vec::new();
        while let Some((queued_ns, ino, id)) = self.recalls.first().copied()
            && queued_ns <= now_ns
        {
            self.recalls.pop_first();
            let mut holders = self.inodes.get_mut(&ino).into_iter().flatten();
            let Some(holder) = holders.find(|holder| holder.id == id) else { continue };
            let Some(recall) = &mut holder.recall else { continue };
            recall.queued_ns = recall.deadline_ns();
            if recall.queued_ns > now_ns {
                self.recalls.insert((recall.queued_ns, ino, id));
                continue;
            }
            let session = holder.session;
            events.push((session, OwnerEvent::Revoked { lease: holder.grant(ino) }));
            self.remove(ino, session);
            touched.push(ino);
        }
        touched.sort_unstable();
        touched.dedup();
        touched
    }
}

#[cfg(test)]
mod tests;
