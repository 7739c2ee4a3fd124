//! How long the owner's grants hold for certain. The owner takes leases of a session that is silent for
//! [`SESSION_TERM`] without asking, so a client that gets no answers must stop using them before.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::env::Clock;
use wire::meta::SESSION_TERM;

/// An answer to a program leaves this long after the term was looked at, at most.
const MARGIN_NS: u64 = 100_000_000;

/// See the module.
pub(crate) struct Term {
    clock: Arc<dyn Clock>,
    until_ns: AtomicU64,
    taken: Mutex<Taken>,
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

    /// The owner's clock runs up to 2 % faster.
    fn extend(&self, sent_ns: u64) {
        let term_ns = SESSION_TERM.as_nanos() as u64;
        self.until_ns.fetch_max(sent_ns + term_ns - term_ns / 50 - MARGIN_NS, Ordering::AcqRel);
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
        assert_eq!(term.left(), Duration::from_millis(14_500));
        term.heard(1, 0, sent_ns - 1);
        assert_eq!(term.left(), Duration::from_millis(14_500), "answers overtake each other");
        sim.clock.advance_ns(14_500_000_000);
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
}
