//! Changes of names and attributes that the owner has answered before they were durable.
//!
//! Each keeps its slot until it is durable. If the owner is lost before, the next one executes it again, in the order of the
//! first answers and before the session's claim. The method is that of "unsafe" replies in CephFS.
//!
//! The owner counts these answers. One is used only when all that it counts have come: else the client would not know what it
//! depends on, and could not tell the next owner.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};

use base::{Ino, Seq};
use tokio::sync::Notify;
use wire::message::{Caller, FirstTime};
use wire::meta::MetaRequest;

/// The most that are kept, but for those that were asked for when there was room. Other answers wait until they are durable.
pub(crate) const KEPT_MAX: usize = 256;
/// From this number on, the client asks the owner to make them durable.
const SETTLED_AT: usize = 64;

/// A change that is executed and perhaps not durable.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) slot: u32,
    pub(crate) seq: u64,
    pub(crate) caller: Option<Caller>,
    pub(crate) request: MetaRequest,
    /// The batch that carries it.
    pub(crate) after: Seq,
    /// Its place among the early answers of its owner.
    pub(crate) count: u64,
    pub(crate) first: FirstTime,
    /// What it changed.
    pub(crate) inos: Vec<Ino>,
    /// Its caller does not wait any more.
    pub(crate) is_abandoned: bool,
}

/// Whether an answer may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// All that it depends on is here.
    Complete,
    /// Something that it depends on is still missing.
    Missing,
    /// The owner was left before that came.
    Left,
}

/// The changes of one session under its present owner.
#[derive(Debug, Default)]
pub(crate) struct EarlyAnswers {
    kept: Mutex<Kept>,
    arrived: Notify,
}

#[derive(Debug, Default)]
struct Kept {
    /// The number of the bond to the owner.
    bond: u64,
    changes: Vec<Change>,
    /// The answers up to this one have come, or are durable.
    complete: u64,
    /// Later ones that have come.
    ahead: BTreeSet<u64>,
    /// The same number when an owner was left, by bond.
    left: Vec<(u64, u64)>,
}

/// The number of no bond: there is no owner.
const NO_BOND: u64 = u64::MAX;

impl Kept {
    fn advance(&mut self) {
        while self.ahead.remove(&(self.complete + 1)) {
            self.complete += 1;
        }
    }

    fn arrival(&self, bond: u64, count: u64) -> Arrival {
        if self.bond == bond {
            return if count <= self.complete { Arrival::Complete } else { Arrival::Missing };
        }
        let left = self.left.iter().find(|(left, _)| *left == bond);
        if left.is_some_and(|(_, complete)| count <= *complete) { Arrival::Complete } else { Arrival::Left }
    }
}

impl EarlyAnswers {
    /// None yet, under the first owner.
    pub(crate) fn new(bond: u64) -> Self {
        let none = Self::default();
        none.bind(bond, 0);
        none
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().expect("no holder of this lock panics")
    }

    /// Whether another change may be answered early.
    pub(crate) fn has_room(&self) -> bool {
        self.kept().changes.len() < KEPT_MAX
    }

    /// Whether it is time to make them durable.
    pub(crate) fn is_due(&self) -> bool {
        self.kept().changes.len() >= SETTLED_AT
    }

    /// Keeps a change. While it does, the caller holds the bond to the owner.
    pub(crate) fn keep(&self, change: Change) {
        let mut kept = self.kept();
        kept.ahead.insert(change.count);
        kept.advance();
        kept.changes.push(change);
        drop(kept);
        self.arrived.notify_waiters();
    }

    /// Answers up to a place are durable.
    pub(crate) fn complete(&self, bond: u64, count: u64) {
        let mut kept = self.kept();
        if kept.bond == bond && kept.complete < count {
            kept.complete = count;
            kept.ahead.retain(|ahead| *ahead > count);
            kept.advance();
            drop(kept);
            self.arrived.notify_waiters();
        }
    }

    /// Waits until an answer may be used, or not any more.
    pub(crate) async fn arrival(&self, bond: u64, count: u64) -> Arrival {
        loop {
            let arrived = self.arrived.notified();
            tokio::pin!(arrived);
            // From here on no arrival is missed.
            arrived.as_mut().enable();
            let arrival = self.kept().arrival(bond, count);
            if arrival != Arrival::Missing {
                return arrival;
            }
            arrived.await;
        }
    }

    /// The caller of a change gives up while it waits for [`EarlyAnswers::arrival`]. Returns whether the change is forgotten: then
    /// its slot is free.
    pub(crate) fn abandon(&self, bond: u64, count: u64) -> bool {
        let mut kept = self.kept();
        if kept.arrival(bond, count) == Arrival::Left {
            return true;
        }
        let change = kept.changes.iter_mut().find(|change| change.count == count);
        change.into_iter().for_each(|change| change.is_abandoned = true);
        false
    }

    /// The owner was left: returns the changes that it may have lost, in the order in which it executed them. Those whose answers are
    /// not used are forgotten: their callers send them again. Also returns slots of those whose callers have given up.
    pub(crate) fn leave(&self) -> (Vec<Change>, Vec<(u32, u64)>) {
        let mut kept = self.kept();
        let mut free = Vec::new();
        let (bond, complete) = (kept.bond, kept.complete);
        // Finding the next owner may take several attempts.
        if bond != NO_BOND {
            kept.left.push((bond, complete));
            for change in kept.changes.extract_if(.., |change| change.count > complete) {
                free.extend(change.is_abandoned.then_some((change.slot, change.seq)));
            }
            kept.changes.sort_unstable_by_key(|change| change.count);
            kept.bond = NO_BOND;
        }
        let changes = kept.changes.clone();
        drop(kept);
        self.arrived.notify_waiters();
        (changes, free)
    }

    /// The session is bound to the next owner, which has answered this many early.
    pub(crate) fn bind(&self, bond: u64, complete: u64) {
        let mut kept = self.kept();
        (kept.bond, kept.complete) = (bond, complete);
        kept.ahead.clear();
    }

    /// The newest of those up to a place.
    pub(crate) fn newest(&self, up_to: u64) -> Option<Change> {
        let kept = self.kept();
        kept.changes.iter().filter(|change| change.count <= up_to).max_by_key(|change| change.count).cloned()
    }

    /// Takes those that are durable.
    pub(crate) fn take(&self, is_durable: impl Fn(&Change) -> bool) -> Vec<Change> {
        self.kept().changes.extract_if(.., |change| is_durable(change)).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use tokio::runtime::Builder;
    use tokio::time::{Duration, timeout};

    const BOND: u64 = 1;

    fn change(count: u64) -> Change {
        Change {
            slot: count as u32,
            seq: 1,
            caller: None,
            request: MetaRequest::StatFs,
            after: Seq(count),
            count,
            first: FirstTime { ino: Ino(0), wall_ns: 0 },
            inos: Vec::new(),
            is_abandoned: false,
        }
    }

    fn arrival(early: &EarlyAnswers, count: u64) -> Arrival {
        early.kept().arrival(BOND, count)
    }

    fn counts(changes: &[Change]) -> Vec<u64> {
        changes.iter().map(|change| change.count).collect()
    }

    #[test]
    fn an_answer_is_used_when_all_before_it_have_come() {
        let early = EarlyAnswers::new(BOND);
        early.keep(change(2));
        early.keep(change(4));
        assert_eq!([1, 2, 4].map(|count| arrival(&early, count)), [Arrival::Missing; 3]);
        early.keep(change(1));
        assert_eq!([2, 4].map(|count| arrival(&early, count)), [Arrival::Complete, Arrival::Missing]);
        // The third was lost, and is durable.
        early.complete(BOND, 3);
        assert_eq!([4, 5].map(|count| arrival(&early, count)), [Arrival::Complete, Arrival::Missing]);
        early.complete(BOND + 1, 9);
        assert_eq!(arrival(&early, 5), Arrival::Missing, "that is of another owner");
    }

    #[test]
    fn the_next_owner_gets_what_was_used_in_order() {
        let early = EarlyAnswers::new(BOND);
        [2, 1, 5, 4].into_iter().for_each(|count| early.keep(change(count)));
        assert!(!early.abandon(BOND, 5));
        for _ in 0..2 {
            let (changes, free) = early.leave();
            assert_eq!(counts(&changes), [1, 2]);
            assert!(free.is_empty() || free == [(5, 1)], "{free:?}");
        }
        let states = [2, 4, 5].map(|count| arrival(&early, count));
        assert_eq!(states, [Arrival::Complete, Arrival::Left, Arrival::Left]);
        assert!(early.abandon(BOND, 4), "its slot is free");
        early.take(|_| true);
        early.bind(BOND + 2, 2);
        early.keep(change(3));
        assert_eq!(early.kept().arrival(BOND + 2, 3), Arrival::Complete);
        assert_eq!(counts(&early.leave().0), [3]);
    }

    #[test]
    fn waiters_hear_of_arrivals_and_of_the_loss_of_the_owner() {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let early = EarlyAnswers::new(BOND);
            early.keep(change(2));
            assert!(timeout(Duration::from_millis(50), early.arrival(BOND, 2)).await.is_err());
            let (arrival, ()) = tokio::join!(early.arrival(BOND, 2), async { early.keep(change(1)) });
            assert_eq!(arrival, Arrival::Complete);
            let (arrival, _) = tokio::join!(early.arrival(BOND, 9), async { early.leave() });
            assert_eq!(arrival, Arrival::Left);
        });
    }
}
