//! Grants that were given back or revoked, and inodes that were changed from here. A late answer must not restore the
//! state that it carries.
//!
//! The owner reports a recall at once, but answers a request only when it is durable: the recall of a grant can arrive
//! before the answer that carries the grant. Answers also overtake each other: the answer to a change of an inode can
//! arrive before the answer to an earlier request.

use std::collections::HashMap;

use base::{Ino, LeaseId};
use wire::meta::LeaseGrant;

/// Longer than any answer takes: the owner stops when its log accepts nothing for 30 seconds.
const KEPT_NS: u64 = 60_000_000_000;

/// The newest grant given up and the newest change, by inode.
#[derive(Debug, Default)]
pub(crate) struct GivenUp {
    recent: HashMap<Ino, (LeaseId, u64)>,
    older: HashMap<Ino, (LeaseId, u64)>,
    recent_changes: HashMap<Ino, u64>,
    older_changes: HashMap<Ino, u64>,
    since_ns: u64,
}

impl GivenUp {
    /// Makes the grant void, and with it every earlier answer that carried it.
    pub(crate) fn note(&mut self, lease: LeaseGrant, now_ns: u64) {
        self.age(now_ns);
        let newest = self.recent.entry(lease.ino).or_default();
        *newest = (*newest).max((lease.id, lease.seq));
    }

    fn age(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.since_ns) > KEPT_NS {
            self.older = std::mem::take(&mut self.recent);
            self.older_changes = std::mem::take(&mut self.recent_changes);
            self.since_ns = now_ns;
        }
    }

    /// Notes that the answer to change number `change` has come: answers to earlier requests count no more.
    pub(crate) fn note_change(&mut self, ino: Ino, change: u64, now_ns: u64) {
        self.age(now_ns);
        self.recent_changes.insert(ino, change);
    }

    /// Whether the inode was changed from here since `asked`, the number of the last change at that time.
    pub(crate) fn is_changed_since(&self, ino: Ino, asked: u64) -> bool {
        let later = |change: &u64| *change > asked;
        [&self.recent_changes, &self.older_changes]
            .into_iter()
            .any(|table| table.get(&ino).is_some_and(later))
    }

    /// Whether the grant was given up.
    pub(crate) fn covers(&self, lease: LeaseGrant) -> bool {
        let covered = |noted: &(LeaseId, u64)| (lease.id, lease.seq) <= *noted;
        [&self.recent, &self.older].into_iter().any(|table| table.get(&lease.ino).is_some_and(covered))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::meta::LeaseKind;

    #[test]
    fn a_given_up_grant_is_void_until_no_answer_can_carry_it() {
        let grant = |id, seq| LeaseGrant { ino: Ino(1), id: LeaseId(id), kind: LeaseKind::Attr, seq };
        let mut given_up = GivenUp::default();
        given_up.note(grant(5, 2), 0);
        for (id, seq, void) in [(4, 9, true), (5, 1, true), (5, 2, true), (5, 3, false), (6, 1, false)] {
            assert_eq!(given_up.covers(grant(id, seq)), void, "{id} {seq}");
        }
        given_up.note(LeaseGrant { ino: Ino(2), ..grant(7, 1) }, KEPT_NS + 1);
        assert!(given_up.covers(grant(5, 2)));
        given_up.note(LeaseGrant { ino: Ino(2), ..grant(8, 1) }, 2 * KEPT_NS + 2);
        assert!(!given_up.covers(grant(5, 2)), "it does not grow for ever");
    }

    #[test]
    fn an_answer_from_before_a_change_is_old_until_none_can_be_on_its_way() {
        let mut given_up = GivenUp::default();
        given_up.note_change(Ino(1), 7, 0);
        let old = |given_up: &GivenUp, asked| given_up.is_changed_since(Ino(1), asked);
        assert!(old(&given_up, 6) && !old(&given_up, 7) && !given_up.is_changed_since(Ino(2), 0));
        given_up.note_change(Ino(2), 8, KEPT_NS + 1);
        assert!(old(&given_up, 6));
        given_up.note_change(Ino(2), 9, 2 * KEPT_NS + 2);
        assert!(!old(&given_up, 6), "it does not grow for ever");
    }
}
