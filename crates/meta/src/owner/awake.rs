//! The clock for answers of clients: it stands still while the owner itself does.
//!
//! A client must not lose a lease because the owner's log did not answer, or because the machine was suspended: in that
//! time the client could not commit, and the owner could not hear it.

use base::env::Env;

use super::lease::RECALL_IDLE_NS;

/// The time of an operation.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// Wall clock, for timestamps.
    pub wall_ns: i64,
    /// Boot clock, for deadlines.
    pub boot_ns: u64,
    /// Time in which the owner could hear clients and answer them, for deadlines of their answers. See [`AwakeClock`].
    pub awake_ns: u64,
    /// The latest time that `awake_ns` can have at the next tick. A sign of life counts from here: a client must not be held
    /// for silent earlier than it expects.
    pub heard_ns: u64,
}

/// Counts the time between ticks in which the owner made progress.
#[derive(Debug)]
pub(super) struct AwakeClock {
    awake_ns: u64,
    ticked_ns: Option<u64>,
    committed: u64,
}

impl Default for AwakeClock {
    /// A clock that shows the term of sessions: one that was heard of at 0 is silent.
    fn default() -> Self {
        Self { awake_ns: RECALL_IDLE_NS, ticked_ns: None, committed: 0 }
    }
}

impl AwakeClock {
    /// The time now. Of a pause between two ticks, so much counts at most.
    pub(super) fn time(&self, env: &Env, pause_max_ns: u64) -> Now {
        let boot_ns = env.clock.boot_ns();
        let heard_ns = self.latest_ns(boot_ns, pause_max_ns);
        Now { wall_ns: env.clock.wall_ns(), boot_ns, awake_ns: self.now_ns(), heard_ns }
    }

    /// The owner ticks: `boot_ns` is the boot clock, `committed` the last durable batch, `is_appending` whether another is
    /// on its way to the log. Of a longer time between ticks, only `longest_ns` counts: the rest is a suspended machine.
    pub(super) fn tick(&mut self, boot_ns: u64, committed: u64, is_appending: bool, longest_ns: u64) {
        let since_ns = self.ticked_ns.replace(boot_ns).unwrap_or(boot_ns);
        let before = std::mem::replace(&mut self.committed, committed);
        let is_stalled = is_appending && committed == before;
        if !is_stalled {
            self.awake_ns += boot_ns.saturating_sub(since_ns).min(longest_ns);
        }
    }

    /// Nanoseconds so far, as of the last tick.
    pub(super) fn now_ns(&self) -> u64 {
        self.awake_ns
    }

    /// The clock at the next tick is not before this, unless the owner stands still.
    pub(super) fn latest_ns(&self, boot_ns: u64, longest_ns: u64) -> u64 {
        let since_ns = self.ticked_ns.map_or(0, |ticked_ns| boot_ns.saturating_sub(ticked_ns));
        self.awake_ns + since_ns.min(longest_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_stands_still_while_the_machine_or_the_log_does() {
        let mut clock = AwakeClock { awake_ns: 0, ..AwakeClock::default() };
        let mut check = |boot_ns, committed, is_appending, expected| {
            clock.tick(boot_ns, committed, is_appending, 10);
            assert_eq!(clock.now_ns(), expected, "at {boot_ns}");
        };
        check(1000, 0, false, 0);
        check(1005, 0, false, 5);
        check(1010, 1, true, 10);
        check(1015, 1, true, 10);
        check(1020, 1, true, 10);
        check(1025, 2, true, 15);
        check(1030, 2, false, 20);
        check(1035, 5, false, 25);
        check(1040, 5, true, 25);
        check(1045, 6, false, 30);
        check(9000, 6, false, 40);
        check(9005, 6, false, 45);
        assert_eq!(clock.latest_ns(9005, 10), 45);
        assert_eq!(clock.latest_ns(9009, 10), 49);
        assert_eq!(clock.latest_ns(9999, 10), 55);
    }
}
