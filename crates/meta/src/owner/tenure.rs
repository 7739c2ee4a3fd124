//! The time in which an owner is the only one for certain, and the wait of another node until a ledger has no living owner.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::env::{Clock, Env};

use crate::log::{Fence, LedgerLog};

/// The pause between two looks at the log.
const LOOK_EVERY: Duration = Duration::from_millis(250);

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

/// Waits until the owner of the ledger has given no sign of life for the lease of the log. Only time in which the log
/// answers counts, by this node's own clock. Then [`Owner::open`](super::Owner::open) may take the ledger: the owner's own
/// lease has ended before.
pub async fn vacant(log: &dyn LedgerLog, clock: &dyn Clock) {
    let lease_ns = log.caps().lease.unwrap_or_default().as_nanos() as u64;
    let (mut seen, mut silent_ns, mut looked_ns) = (None::<Fence>, 0, None::<u64>);
    loop {
        let now_ns = clock.boot_ns();
        match log.fence().await {
            Ok(fence) if seen == Some(fence) => {
                // A suspended machine saw nothing in the meantime.
                let since_ns = looked_ns.map_or(0, |looked_ns| now_ns.saturating_sub(looked_ns));
                silent_ns += since_ns.min(2 * LOOK_EVERY.as_nanos() as u64);
                looked_ns = Some(now_ns);
            }
            Ok(fence) => (seen, silent_ns, looked_ns) = (Some(fence), 0, Some(now_ns)),
            Err(_) => looked_ns = None,
        }
        if silent_ns >= lease_ns && seen.is_some() {
            return;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
