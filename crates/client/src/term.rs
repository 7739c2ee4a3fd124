//! How long the owner's grants hold for certain. The owner takes leases of a session that is silent for
//! [`SESSION_TERM`] without asking, so a client that gets no answers must stop using them before.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::env::Clock;
use wire::meta::{LeaseKind, RECALL_IDLE, RECALL_LONGEST, SESSION_TERM};

/// An answer to a program leaves this long after the term was looked at, at most.
const MARGIN_NS: u64 = 100_000_000;

/// See the module.
pub(crate) struct Term {
    clock: Arc<dyn Clock>,
    until_ns: AtomicU64,
    taken: Mutex<Taken>,
}

/// The owner recalls a lease. It takes a lease that is not given back, although the term goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Notice {
    bond: u64,
    /// The kind of lease that may be kept.
    pub(crate) keep: Option<LeaseKind>,
    /// Until then, the owner has not taken the lease.
    until_ns: u64,
    /// No commit prolongs it beyond this time.
    last_ns: u64,
}

impl Notice {
    /// With a later notice for the same lease.
    pub(crate) fn and(self, later: Self) -> Self {
        if self.bond != later.bond {
            return later;
        }
        Self { keep: self.keep.min(later.keep), until_ns: self.until_ns.min(later.until_ns), ..self }
    }

    /// The owner has accepted a commit under the lease that was sent at `sent_ns`.
    pub(crate) fn prolong(&mut self, sent_ns: u64) {
        self.until_ns = self.until_ns.max(end_of(sent_ns, RECALL_IDLE)).min(self.last_ns);
    }
}

/// When a time ends for certain that the owner counts from a moment after `from_ns`. Its clock runs up to 2 % faster.
fn end_of(from_ns: u64, time: Duration) -> u64 {
    let time_ns = time.as_nanos() as u64;
    from_ns + time_ns - time_ns / 50 - MARGIN_NS
}

/// The events of the present owner that the client has taken note of.
#[derive(Default)]
struct Taken {
    bond: u64,
    events: u64,
    /// Answers to heartbeats that came before all earlier events: the number of these, and when the heartbeat was sent.
    waiting: Vec<(u64, u64)>,
}

impl Term {
    /// A term that is over.
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { clock, until_ns: AtomicU64::new(0), taken: Mutex::default() })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().expect("no holder of this lock panics")
    }

    /// The time to note when a request is sent.
    pub(crate) fn now_ns(&self) -> u64 {
        self.clock.boot_ns()
    }

    /// An owner has bound the session, on a request that was sent at `sent_ns`. Events of this bond are counted from now.
    pub(crate) fn bound(&self, bond: u64, sent_ns: u64) {
        let mut taken = self.taken();
        if taken.bond < bond {
            *taken = Taken { bond, ..Taken::default() };
        }
        self.extend(sent_ns);
    }

    /// The owner has answered a heartbeat that was sent at `sent_ns`. It had sent `events` events before.
    pub(crate) fn heard(&self, bond: u64, events: u64, sent_ns: u64) {
        let mut taken = self.taken();
        if taken.bond != bond {
            return;
        }
        if taken.events >= events {
            self.extend(sent_ns);
        } else {
            taken.waiting.push((events, sent_ns));
        }
    }

    /// The client has taken note of an event.
    pub(crate) fn took(&self, bond: u64) {
        let mut taken = self.taken();
        if taken.bond < bond {
            *taken = Taken { bond, ..Taken::default() };
        }
        if taken.bond == bond {
            taken.events += 1;
            let events = taken.events;
            taken
                .waiting
                .extract_if(.., |(needs, _)| *needs <= events)
                .for_each(|(_, sent_ns)| self.extend(sent_ns));
        }
    }

    fn extend(&self, sent_ns: u64) {
        self.until_ns.fetch_max(end_of(sent_ns, SESSION_TERM), Ordering::AcqRel);
    }

    /// The owner recalls a lease. Call this before [`Term::took`] notes the event: the term as it is then ends before the
    /// owner may take the lease.
    pub(crate) fn notice(&self, bond: u64, keep: Option<LeaseKind>) -> Notice {
        let until_ns = self.until_ns.load(Ordering::Acquire);
        let sent_ns = until_ns.saturating_sub(end_of(0, SESSION_TERM));
        Notice { bond, keep, until_ns, last_ns: end_of(sent_ns, RECALL_LONGEST) }
    }

    /// Whether the owner may have taken the lease. The next owner knows nothing of the recall.
    pub(crate) fn is_past(&self, notice: Notice) -> bool {
        self.now_ns() >= notice.until_ns && self.taken().bond <= notice.bond
    }

    /// Whether the owner may have taken leases unnoticed.
    pub(crate) fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// How much of it is left.
    pub(crate) fn left(&self) -> Duration {
        Duration::from_nanos(self.until_ns.load(Ordering::Acquire).saturating_sub(self.now_ns()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::env::sim::Sim;

    #[test]
    fn it_begins_when_the_request_is_sent_and_ends_before_that_of_the_owner() {
        let sim = Sim::new(1);
        let term = Term::new(sim.env().clock);
        assert!(term.is_over());
        sim.clock.advance_ns(1000);
        let sent_ns = term.now_ns();
        sim.clock.advance_ns(5_000_000_000);
        term.bound(1, sent_ns);
        assert_eq!(term.left(), Duration::from_millis(9_600));
        term.heard(1, 0, sent_ns - 1);
        assert_eq!(term.left(), Duration::from_millis(9_600), "answers overtake each other");
        sim.clock.advance_ns(9_600_000_000);
        assert!(term.is_over());
    }

    #[test]
    fn it_begins_again_once_all_earlier_events_were_taken() {
        let sim = Sim::new(1);
        let term = Term::new(sim.env().clock);
        term.bound(2, term.now_ns());
        sim.clock.advance_ns(SESSION_TERM.as_nanos() as u64);
        term.heard(2, 2, term.now_ns());
        term.heard(1, 0, term.now_ns());
        term.took(1);
        term.took(2);
        assert!(term.is_over());
        term.took(2);
        assert!(!term.is_over());
        sim.clock.advance_ns(SESSION_TERM.as_nanos() as u64);
        term.heard(2, 2, term.now_ns());
        assert!(!term.is_over());
        // Another owner counts anew.
        sim.clock.advance_ns(SESSION_TERM.as_nanos() as u64);
        term.took(4);
        term.bound(4, term.now_ns() - SESSION_TERM.as_nanos() as u64);
        assert!(term.is_over());
        term.heard(4, 1, term.now_ns());
        assert!(!term.is_over());
    }

    #[test]
    fn a_lease_that_is_recalled_holds_until_the_term_of_then_and_commits_prolong_it() {
        let sim = Sim::new(1);
        let term = Term::new(sim.env().clock);
        let second = |seconds: u64| seconds * 1_000_000_000;
        sim.clock.advance_ns(second(100));
        term.bound(1, term.now_ns());
        let mut notice = term.notice(1, Some(LeaseKind::Read));
        sim.clock.advance_ns(second(10));
        term.heard(1, 0, term.now_ns());
        assert_eq!(notice.and(term.notice(1, None)), Notice { keep: None, ..notice });
        sim.clock.advance_ns(second(5) - 400_000_001);
        assert!(!term.is_past(notice));
        sim.clock.advance_ns(1);
        assert!(term.is_past(notice) && !term.is_over());
        notice.prolong(second(115));
        notice.prolong(second(114));
        assert!(!term.is_past(notice));
        sim.clock.advance_ns(second(15));
        assert!(term.is_past(notice));
        // The owner takes it a minute after the recall, however much is committed.
        notice.prolong(second(150));
        assert!(!term.is_past(notice));
        sim.clock.advance_ns(second(30));
        assert!(term.is_past(notice), "at {}", term.now_ns());
        term.bound(3, term.now_ns());
        assert!(!term.is_past(notice), "the next owner does not know of it");
    }
}
