//! The time in which an owner is the only one for certain, and the wait of another node until a ledger has no living owner.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::env::{Clock, Env};
use base::{LedgerId, Seq};

use super::recovery::{Follower, OwnerError};
use crate::log::{Fence, LedgerLog, LogError};
use crate::state::State;

/// The pause between two looks at the log.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// A standby applies new entries at every fourth look, because each time is a write to its disk.
const LOOKS_PER_STEP: u32 = 4;

/// An answer leaves this long after its execution at the latest, or is one that the log took.
const MARGIN_NS: u64 = 100_000_000;

/// The time in which an owner is the only one for certain. After that it answers nothing until the log takes a sign of
/// life.
pub(super) struct Tenure {
    pub(super) term: Option<Duration>,
    until_ns: AtomicU64,
}

impl Tenure {
    /// The owner began to seal the log at `asked_ns`.
    pub(super) fn new(term: Option<Duration>, asked_ns: u64) -> Self {
        let tenure = Self { term, until_ns: AtomicU64::new(0) };
        tenure.renewed(asked_ns);
        tenure
    }

    /// The log took a sign of life that was sent at `asked_ns`. The clocks of two nodes differ by 2 % at most.
    pub(super) fn renewed(&self, asked_ns: u64) {
        let until_ns = self.term.map_or(u64::MAX, |term| {
            let term_ns = term.as_nanos() as u64;
            asked_ns + (term_ns - term_ns / 50).saturating_sub(MARGIN_NS)
        });
        self.until_ns.fetch_max(until_ns, Ordering::AcqRel);
    }

    /// Whether this is the only owner now.
    pub(super) fn holds(&self, env: &Env) -> bool {
        self.term.is_none() || env.clock.boot_ns() < self.until_ns.load(Ordering::Acquire)
    }
}

/// A watch over the owner of a ledger on another node. Only time in which the log answers counts, by this node's own clock.
#[derive(Default)]
struct Vigil {
    seen: Option<Fence>,
    silent_ns: u64,
    looked_ns: Option<u64>,
}

impl Vigil {
    /// Looks at the log. Returns its end, if it answers, and whether the owner has given no sign of life for the log's
    /// lease: then its own lease has ended before.
    async fn look(&mut self, log: &dyn LedgerLog, clock: &dyn Clock) -> (Option<Seq>, bool) {
        let lease_ns = log.caps().lease.unwrap_or_default().as_nanos() as u64;
        let now_ns = clock.boot_ns();
        let Ok(fence) = log.fence().await else {
            self.looked_ns = None;
            return (None, false);
        };
        if self.seen == Some(fence) {
            // A suspended machine saw nothing in the meantime.
            let since_ns = self.looked_ns.map_or(0, |looked_ns| now_ns.saturating_sub(looked_ns));
            self.silent_ns += since_ns.min(2 * LOOK_EVERY.as_nanos() as u64);
        } else {
            (self.seen, self.silent_ns) = (Some(fence), 0);
        }
        self.looked_ns = Some(now_ns);
        (Some(fence.tail), self.silent_ns >= lease_ns)
    }
}

/// Waits until the owner of the ledger has given no sign of life for the lease of the log. Then
/// [`Owner::open`](super::Owner::open) may take the ledger.
pub async fn vacant(log: &dyn LedgerLog, clock: &dyn Clock) {
    let mut vigil = Vigil::default();
    while !vigil.look(log, clock).await.1 {
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// A node that follows a ledger which another node owns, so that it can take it over quickly.
pub struct Standby {
    log: Arc<dyn LedgerLog>,
    follower: Follower,
    vigil: Vigil,
}

impl Standby {
    /// A standby with a local store of its own, which may be older than the log's end.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn new(ledger: LedgerId, log: Arc<dyn LedgerLog>, state: Arc<dyn State>) -> Result<Self, OwnerError> {
        Ok(Self { log: log.clone(), follower: Follower::new(ledger, log, state)?, vigil: Vigil::default() })
    }

    /// Applies new entries of the log to the store about once a second, until the owner has given no sign of life for the
    /// lease of the log. Then [`Owner::open`](super::Owner::open) may take the ledger, with little left to apply. While the
    /// log does not answer, it waits.
    ///
    /// # Errors
    /// `Behind` if the log was trimmed beyond the end of the store: only a newer store helps. `RolledBack` and others as
    /// for an owner.
    pub async fn follow(&mut self, clock: &dyn Clock) -> Result<(), OwnerError> {
        for look in 0_u32.. {
            let (tail, is_vacant) = self.vigil.look(&*self.log, clock).await;
            if let Some(tail) = tail
                && (is_vacant || look.is_multiple_of(LOOKS_PER_STEP))
            {
                match self.follower.catch_up(tail).await {
                    Err(OwnerError::Log { source: LogError::Io(error), .. }) => {
                        tracing::debug!(%error, "ledger log does not answer");
                    }
                    result => result?,
                }
            }
            if is_vacant {
                break;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }
}
