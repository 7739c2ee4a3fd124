//! The time in which an owner is the only one for certain.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::env::Env;

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
