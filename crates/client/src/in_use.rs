//! Whether users ask for something right now.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Client;

/// How long after a request a filesystem counts as in use.
const IN_USE_NS: u64 = 50_000_000;

/// When users last asked a filesystem for something: one for all its clients on a machine, whatever the protocol.
#[derive(Debug, Clone, Default)]
pub struct LastUse(Arc<AtomicU64>);

impl LastUse {
    fn note(&self, now_ns: u64) {
        self.0.store(now_ns, Ordering::Relaxed);
    }

    fn is_recent(&self, now_ns: u64) -> bool {
        let last_ns = self.0.load(Ordering::Relaxed);
        last_ns > 0 && now_ns.saturating_sub(last_ns) < IN_USE_NS
    }
}

impl Client {
    /// A user asks for something, through whatever protocol.
    pub fn note_use(&self) {
        self.inner.last_use.note(self.inner.env.clock.boot_ns());
    }

    /// Whether a user asked for something a moment ago, also through another client: then upkeep steps back.
    pub fn is_in_use(&self) -> bool {
        self.inner.last_use.is_recent(self.inner.env.clock.boot_ns())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filesystem_is_in_use_for_a_moment_after_each_request_to_any_of_its_clients() {
        let gate = LastUse::default();
        let upkeep = gate.clone();
        assert!(!upkeep.is_recent(1), "nobody has asked yet");
        gate.note(1_000_000_000);
        assert!(upkeep.is_recent(1_000_000_000 + IN_USE_NS - 1));
        assert!(!upkeep.is_recent(1_000_000_000 + IN_USE_NS));
    }
}
