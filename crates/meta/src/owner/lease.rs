//! The lease table of an owner: which session may cache which inode. A state machine without clock or messages of its
//! own.
//!
//! Rules: an exclusive lease excludes every other. A recall names the grant it recalls; only a release of that
//! grant, or its revocation, completes it. A grant that is being recalled is never upgraded.

use std::collections::HashMap;

use base::{Ino, LeaseId, SessionId};
use wire::meta::{LeaseGrant, LeaseKind, OwnerEvent};

/// A recall without an answer ends in revocation when the holder has not committed anything for this long. In that time
/// the holder gives up a drive that does not answer and writes the bytes elsewhere, ...
pub const RECALL_IDLE_NS: u64 = 20_000_000_000;
/// ... or after this long in any case, however much the holder still commits.
pub const RECALL_TIMEOUT_NS: u64 = 60_000_000_000;

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
}

impl Recall {
    fn is_late(&self, now_ns: u64) -> bool {
        now_ns >= self.progress_ns + RECALL_IDLE_NS || now_ns >= self.since_ns + RECALL_TIMEOUT_NS
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
}

/// All leases of a ledger.
#[derive(Debug, Default)]
pub struct LeaseTable {
    inodes: HashMap<Ino, Vec<Holder>>,
    last_id: u64,
}

/// Events for sessions.
pub type Events = Vec<(SessionId, OwnerEvent)>;

impl LeaseTable {
    /// Whether `session` may go ahead now. If not, recalls were added to `events`, and the request must wait until a
    /// lease is released.
    pub fn clear(
        &mut self,
        ino: Ino,
        session: SessionId,
        intent: Intent,
        now_ns: u64,
        events: &mut Events,
    ) -> bool {
        let Some(holders) = self.inodes.get_mut(&ino) else { return true };
        let mut clear = true;
        for holder in holders.iter_mut().filter(|holder| holder.session != session) {
            let keep = match (intent, holder.kind) {
                (_, LeaseKind::Shared) => continue,
                (Intent::Read, LeaseKind::Exclusive) => Some(LeaseKind::Read),
                (Intent::Read, LeaseKind::Attr | LeaseKind::Read) => continue,
                (Intent::Change, _) => None,
            };
            clear = false;
            let stricter = holder.recall.is_none_or(|recall| recall.keep.is_some() && keep.is_none());
            if stricter {
                let before = holder.recall.unwrap_or(Recall { keep, since_ns: now_ns, progress_ns: now_ns });
                holder.recall = Some(Recall { keep, ..before });
                let lease = holder.grant(ino);
                events.push((holder.session, OwnerEvent::Recall { lease, keep }));
            }
        }
        clear
    }

    /// Grants `session` a lease of at least `kind`. `None` if other sessions hold conflicting leases or the session's
    /// own lease is being recalled. Call [`LeaseTable::clear`] first to remove conflicts.
    pub fn grant(&mut self, ino: Ino, session: SessionId, kind: LeaseKind) -> Option<LeaseGrant> {
        let holders = self.inodes.entry(ino).or_default();
        let conflict = holders.iter().any(|holder| {
            let pair = (kind, holder.kind);
            let shared = matches!(pair, (LeaseKind::Shared, LeaseKind::Shared));
            let exclusive = kind >= LeaseKind::Shared || holder.kind >= LeaseKind::Shared;
            holder.session != session && exclusive && !shared
        });
        if conflict {
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
        Some(holder.grant(ino))
    }

    /// Handles a release by `session`. A release of another grant than the current one changes nothing.
    pub fn release(&mut self, session: SessionId, lease: LeaseGrant, keep: Option<LeaseKind>) {
        let Some(holders) = self.inodes.get_mut(&lease.ino) else { return };
        let named = |held: &Holder| held.session == session && held.id == lease.id && held.seq == lease.seq;
        let Some(at) = holders.iter().position(named) else { return };
        let holder = &mut holders[at];
        match keep {
            Some(kind) if kind < holder.kind => {
                holder.kind = kind;
                if holder.recall.is_some_and(|recall| recall.keep.is_some_and(|allowed| kind <= allowed)) {
                    holder.recall = None;
                }
            }
            Some(_) => {}
            None => {
                holders.swap_remove(at);
                if holders.is_empty() {
                    self.inodes.remove(&lease.ino);
                }
            }
        }
    }

    /// Whether a commit under this lease is accepted.
    pub fn may_write(&self, ino: Ino, session: SessionId, id: LeaseId) -> bool {
        self.inodes.get(&ino).is_some_and(|holders| {
            holders
                .iter()
                .any(|held| held.session == session && held.id == id && held.kind >= LeaseKind::Shared)
        })
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
        self.inodes.get(&ino).is_some_and(|holders| {
            holders.iter().any(|held| held.session != session && held.kind == LeaseKind::Exclusive)
        })
    }

    /// Drops every lease of a session that has ended.
    pub fn drop_session(&mut self, session: SessionId) {
        self.inodes.retain(|_, holders| {
            holders.retain(|holder| holder.session != session);
            !holders.is_empty()
        });
    }

    /// Drops every lease on an inode that no longer exists.
    pub fn drop_inode(&mut self, ino: Ino) {
        self.inodes.remove(&ino);
    }

    /// Revokes recalled leases whose time is over. Returns their inodes.
    pub fn expire(&mut self, now_ns: u64, events: &mut Events) -> Vec<Ino> {
        let (mut touched, mut revoked) = (Vec::new(), Vec::new());
        for (ino, holders) in &mut self.inodes {
            let before = holders.len();
            holders.retain(|holder| {
                let late = holder.recall.is_some_and(|recall| recall.is_late(now_ns));
                if late {
                    revoked.push((holder.session, holder.grant(*ino)));
                }
                !late
            });
            if holders.len() != before {
                touched.push(*ino);
            }
        }
        self.inodes.retain(|_, holders| !holders.is_empty());
        // The table has no order, and the effects must not depend on its iteration order.
        touched.sort_unstable();
        revoked.sort_by_key(|(_, lease)| lease.ino);
        events.extend(revoked.into_iter().map(|(session, lease)| (session, OwnerEvent::Revoked { lease })));
        touched
    }
}

#[cfg(test)]
mod tests;
