//! Sessions that outlive their owner: the next owner waits for them, and they tell it the state that was in memory only.

use std::collections::{HashMap, HashSet};

use base::{ExtentId, FsError, Ino, SessionId};
use wire::meta::{
    Attr, CLAIMS_MAX, Claim, HeldLease, LeaseGrant, LeaseKind, MetaReply, MetaRequest, OpenIntent, RequestId,
    Resumed,
};
use wire::object::ObjectReply;

use super::lease::RECALL_IDLE_NS;
use super::{Op, OpenRange, Stop};
use crate::keys::Keys;
use crate::values::{IdRange, Orphan, RangeState, SessionRecord, Slot};

/// For how long inodes without a name are kept for a silent session that has not told which ones it has open.
const UNCLAIMED_KEPT_NS: u64 = 300_000_000_000;

impl Op<'_> {
    /// Takes over sessions of an earlier owner. Until a session claims its state, it counts as
    /// using the oldest map, and files without a name stay open to it. A silent one is not waited for.
    pub(super) fn await_sessions(&mut self, sessions: &[(SessionId, SessionRecord)]) -> Result<(), Stop> {
        for (session, record) in sessions {
            self.volatile.sessions.insert(*session, 0);
            if record.is_silent {
                self.volatile.leases.note_heard(*session, self.now.awake_ns.saturating_sub(RECALL_IDLE_NS));
                self.volatile.silent.insert(*session, self.now.awake_ns);
            } else {
                self.volatile.leases.note_heard(*session, self.now.heard_ns);
                self.volatile.absent.insert(*session);
            }
            self.volatile.unclaimed.insert(*session, HashSet::new());
            for (key, bytes) in self.txn.scan(&self.keys.slots(*session), usize::MAX)? {
                let slot: Slot = self.txn.decode(&key, &bytes)?;
                self.volatile.inherited.insert((*session, Keys::slot_of_key(&key)), (slot.seq, false));
            }
        }
        if !self.volatile.absent.is_empty() {
            tracing::info!(sessions = ?self.volatile.absent, "sessions of the earlier owner are waited for");
        }
        for (key, bytes) in self.txn.scan(&self.keys.ranges(), usize::MAX)? {
            let IdRange { session, count, open } = self.txn.decode(&key, &bytes)?;
            if open == RangeState::Open {
                let first: ExtentId = Keys::first_of_range(&key);
                self.volatile.ranges.push(OpenRange { first, count, session });
            }
        }
        for (key, bytes) in self.txn.scan(&self.keys.orphans(), usize::MAX)? {
            let orphan: Orphan = self.txn.decode(&key, &bytes)?;
            let ino = Keys::ino_of_orphan(&key);
            orphan.sessions.into_iter().for_each(|session| self.count_open(ino, session));
        }
        Ok(())
    }

    fn restore_lease(&mut self, lease: LeaseGrant) -> bool {
        let super::Volatile { leases, events, .. } = &mut *self.volatile;
        leases.restore(self.session, lease, self.now.awake_ns, events)
    }

    /// An inode loses its last name. Sessions that have not claimed their state may have it open. It is not kept for those that
    /// have been silent for long: clients that died would keep all that is deleted.
    pub(super) fn keep_for_unclaimed(&mut self, ino: Ino) {
        let super::Volatile { unclaimed, silent, .. } = &*self.volatile;
        let now_ns = self.now.awake_ns;
        let may_come =
            |id: &&SessionId| silent.get(id).is_none_or(|since| now_ns < since + UNCLAIMED_KEPT_NS);
        let sessions: Vec<SessionId> = unclaimed.keys().filter(may_come).copied().collect();
        sessions.into_iter().for_each(|session| self.count_open(ino, session));
    }

    /// The session has claimed all that it has open: it does not keep other inodes without a name. Those in answers that it
    /// may not have yet stay.
    fn forget_unclaimed(&mut self, claimed: &HashSet<Ino>, unanswered: &[(u32, u64)]) -> Result<(), Stop> {
        let mut answered = HashSet::new();
        for (number, seq) in unanswered {
            let slot = self.txn.get::<Slot>(&self.keys.slot(self.session, *number))?;
            if let Some(slot) = slot.filter(|slot| slot.seq == *seq) {
                answered.extend(slot.reply()?.attrs().into_iter().map(|attr| attr.ino));
            }
        }
        for (key, bytes) in self.txn.scan(&self.keys.orphans(), usize::MAX)? {
            let orphan: Orphan = self.txn.decode(&key, &bytes)?;
            let ino = Keys::ino_of_orphan(&key);
            let is_known = claimed.contains(&ino) || answered.contains(&ino);
            if orphan.sessions.contains(&self.session) && !is_known {
                self.forget_open(ino, self.session)?;
            }
        }
        Ok(())
    }

    fn count_open(&mut self, ino: Ino, session: SessionId) {
        let sessions = self.volatile.opens.entry(ino).or_default();
        if !sessions.contains(&session) {
            sessions.push(session);
        }
    }

    /// Restores what the session claims. A lease holds on if the inode is as the session knows it, or as the session's own
    /// changes left it whose answers it did not get.
    pub(super) fn resume(&mut self, claim: &Claim) -> Result<Resumed, Stop> {
        if !self.volatile.sessions.contains_key(&self.session) {
            return Err(FsError::StaleLease.into());
        }
        let most =
            [claim.leases.len(), claim.opens.len(), claim.dirs.len(), claim.locks.len()].into_iter().max();
        if most.is_some_and(|most| most > CLAIMS_MAX) {
            return Err(FsError::Invalid.into());
        }
        let own = self.own_changes()?;
        let mut resumed = Resumed::default();
        for held in &claim.leases {
            let ino = held.lease.ino;
            let Some(inode) = self.txn.get::<crate::values::Inode>(&self.keys.inode(ino))? else { continue };
            if holds_on(held, &inode.attr, own.get(&ino)) && self.restore_lease(held.lease) {
                resumed.leases.push(held.lease);
                // The answers to the session's own requests still come.
                let known = [held.attr_ver, own.get(&ino).map_or(held.attr_ver, |own| own.attr_ver)];
                resumed.changed.extend((!known.contains(&inode.attr.attr_ver)).then_some(inode.attr));
            }
        }
        for lock in &claim.locks {
            let super::Volatile { locks, events, .. } = &mut *self.volatile;
            if !locks.restore(self.session, *lock, events) {
                resumed.lost_locks.push(*lock);
            }
        }
        for ino in &claim.opens {
            if self.txn.get_bytes(&self.keys.inode(*ino))?.is_some() {
                self.count_open(*ino, self.session);
            }
        }
        for dir in &claim.dirs {
            self.volatile.watches.watch_all(*dir, self.session, self.now.boot_ns);
        }
        if let Some(claimed) = self.volatile.unclaimed.get_mut(&self.session) {
            claimed.extend(&claim.opens);
        }
        if !claim.more {
            self.volatile.sessions.insert(self.session, claim.in_use_ver);
            self.volatile.absent.remove(&self.session);
            if let Some(claimed) = self.volatile.unclaimed.remove(&self.session) {
                self.forget_unclaimed(&claimed, &claim.unanswered)?;
            }
        }
        Ok(resumed)
    }

    /// Repeats the effects in memory of a request that an earlier owner executed: what it opened is open here, and a lease in
    /// its answer holds on if the inode was not changed since.
    pub(super) fn restore_effects(&mut self, id: RequestId, request: &MetaRequest, reply: &mut MetaReply) {
        let Some(inherited) = self.volatile.inherited.get_mut(&(id.session, id.slot)) else { return };
        if inherited.0 != id.seq {
            return;
        }
        let came_before = std::mem::replace(&mut inherited.1, true);
        let (attr, lease, opens) = match (request, reply) {
            (MetaRequest::Make(make), MetaReply::Entry { attr, lease, keep }) => {
                *keep = self.watch_name(make.parent, &make.name);
                (*attr, lease, make.open != OpenIntent::None)
            }
            (
                MetaRequest::Open { .. } | MetaRequest::MakeUnnamed(_),
                MetaReply::Entry { attr, lease, keep },
            ) => {
                *keep = false;
                (*attr, lease, true)
            }
            (_, MetaReply::Entry { attr, lease, keep }) => {
                *keep = false;
                (*attr, lease, false)
            }
            (_, MetaReply::Object(reply)) => match &mut **reply {
                ObjectReply::Staged { attr, lease } => (*attr, lease, true),
                ObjectReply::Info { info, lease, .. } => (info.attr, lease, false),
                _ => return,
            },
            _ => return,
        };
        let now = self.txn.get::<crate::values::Inode>(&self.keys.inode(attr.ino)).ok().flatten();
        let is_unchanged = now.as_ref().is_some_and(|inode| inode.attr.attr_ver == attr.attr_ver);
        if opens && now.is_some() && !came_before {
            self.count_open(attr.ino, self.session);
        }
        *lease = lease.filter(|lease| is_unchanged && self.restore_lease(*lease));
    }

    /// The newest attributes in the answers that are kept for the session.
    fn own_changes(&self) -> Result<HashMap<Ino, Attr>, FsError> {
        let mut own: HashMap<Ino, Attr> = HashMap::new();
        for (key, bytes) in self.txn.scan(&self.keys.slots(self.session), usize::MAX)? {
            let slot: Slot = self.txn.decode(&key, &bytes)?;
            for attr in slot.reply()?.attrs() {
                let newest = own.entry(attr.ino).or_insert(attr);
                if newest.attr_ver < attr.attr_ver {
                    *newest = attr;
                }
            }
        }
        Ok(own)
    }
}

fn holds_on(held: &HeldLease, now: &Attr, own: Option<&Attr>) -> bool {
    if held.lease.kind >= LeaseKind::Shared {
        // Attributes may have been changed by others after a revocation: then only they are learned anew.
        now.data_ver == held.data_ver || own.is_some_and(|own| own.data_ver == now.data_ver)
    } else {
        now.attr_ver == held.attr_ver || own.is_some_and(|own| own.attr_ver == now.attr_ver)
    }
}
