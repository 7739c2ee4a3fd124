//! The time in which an owner is the only one for certain.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use base::env::Env;

/// An answer leaves this long after its execution at the latest, or is one that the log took.
const MARGIN_NS: u64 = 100_000_000;

/// The pause before an owner tries again to give a sign of life that the log did not take. Others wait for it for a moment only once the log
/// answers again.
pub(crate) const RENEW_PAUSE: Duration = Duration::from_millis(100);

/// The time in which an owner is the only one for certain. After that it answers nothing until the log takes a sign of
/// life.
pub(crate) struct Tenure {
    pub(crate) term: Option<Duration>,
    until_ns: AtomicU64,
    has_ended: AtomicBool,
}

impl Tenure {
    /// The owner began to seal the log at `asked_ns`.
    pub(crate) fn new(term: Option<Duration>, asked_ns: u64) -> Self {
        let tenure = Self { term, until_ns: AtomicU64::new(0), has_ended: AtomicBool::new(false) };
        tenure.renewed(asked_ns);
        tenure
    }

    /// The log took a sign of life that was sent at `asked_ns`. The clocks of two nodes differ by 2 % at most.
    pub(crate) fn renewed(&self, asked_ns: u64) {
        let until_ns = self.term.map_or(u64::MAX, |term| {
            let term_ns = term.as_nanos() as u64;
            asked_ns + (term_ns - term_ns / 50).saturating_sub(MARGIN_NS)
        });
        self.until_ns.fetch_max(until_ns, Ordering::AcqRel);
    }

    /// It ends now and for good, if other nodes can take the ledger.
    pub(crate) fn end(&self) {
        self.has_ended.store(true, Ordering::Release);
    }

    /// Whether this is the only owner now.
    pub(crate) fn holds(&self, env: &Env) -> bool {
        let has_ended = || self.has_ended.load(Ordering::Acquire);
        self.term.is_none() || (!has_ended() && env.clock.boot_ns() < self.until_ns.load(Ordering::Acquire))
    }
}
