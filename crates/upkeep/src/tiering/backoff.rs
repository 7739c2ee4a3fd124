//! Pauses after failures: work that fails pauses, longer each time, until it succeeds. Other work does not wait for
//! that: a full store needs deletions, and full drives need uploads.

use std::time::Duration;

/// Pauses after a failure: they double from the shortest to the longest.
pub(super) const PAUSE_MIN: Duration = Duration::from_secs(1);
pub(super) const PAUSE_MAX: Duration = Duration::from_secs(30);

/// The last failure of one kind of work. Times are of the clock of deadlines.
#[derive(Debug, Default)]
pub(super) struct Backoff(Option<Failure>);

#[derive(Debug)]
struct Failure {
    reason: String,
    pause: Duration,
    until_ns: u64,
}

impl Backoff {
    /// Notes a failure at `now_ns`. Failures during one pause count once.
    pub(super) fn failed(&mut self, reason: String, now_ns: u64) {
        let (pause, until_ns) = match &self.0 {
            Some(known) if now_ns < known.until_ns => (known.pause, known.until_ns),
            known => {
                let pause = known.as_ref().map_or(PAUSE_MIN, |known| (known.pause * 2).min(PAUSE_MAX));
                (pause, now_ns + pause.as_nanos() as u64)
            }
        };
        self.0 = Some(Failure { reason, pause, until_ns });
    }

    /// Notes a success, or that no work is left.
    pub(super) fn clear(&mut self) {
        self.0 = None;
    }

    /// How many attempts of at most `most` may be under way at `now_ns`. After a pause, one finds out whether the work
    /// succeeds again.
    pub(super) fn tries_max(&self, most: usize, now_ns: u64) -> usize {
        match &self.0 {
            None => most.max(1),
            Some(known) => usize::from(now_ns >= known.until_ns),
        }
    }

    /// Why the work pauses.
    pub(super) fn reason(&self) -> Option<String> {
        self.0.as_ref().map(|known| known.reason.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn pauses_grow_until_an_attempt_succeeds() {
        let mut held = Backoff::default();
        assert_eq!((held.tries_max(4, 0), held.reason()), (4, None));
        let (mut now, mut pauses) = (5 * S, Vec::new());
        for _ in 0..7 {
            held.failed("full".to_owned(), now);
            let began = now;
            while held.tries_max(4, now) == 0 {
                now += S;
            }
            pauses.push((now - began) / S);
            assert_eq!((held.tries_max(4, now), held.reason().as_deref()), (1, Some("full")));
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 30, 30]);
        held.clear();
        assert_eq!((held.tries_max(4, now), held.reason()), (4, None));
        held.failed("full".to_owned(), now);
        assert_eq!(held.tries_max(4, now + S), 1);
    }

    #[test]
    fn failures_during_one_pause_count_once() {
        let mut held = Backoff::default();
        for at in 0..4 {
            held.failed(format!("failure {at}"), at);
        }
        assert_eq!((held.tries_max(4, S), held.reason().as_deref()), (1, Some("failure 3")));
    }
}
