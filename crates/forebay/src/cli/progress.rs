//! Progress of long operations.

use std::collections::VecDeque;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use super::env;
use super::output::bytes;

/// Shorter operations show no progress.
const SHOW_AFTER_NS: u64 = 2_000_000_000;
const SECOND_NS: u64 = 1_000_000_000;
/// A rate is that of so long.
const RATE_OVER_NS: u64 = 2 * SECOND_NS;
const TICK: Duration = Duration::from_millis(500);

/// One line on a terminal with the progress. Removed on drop.
pub(super) struct Progress {
    begun_ns: u64,
    shown: bool,
}

impl Progress {
    pub(super) fn new() -> Self {
        Self { begun_ns: env().clock.boot_ns(), shown: false }
    }

    fn elapsed_ns(&self) -> u64 {
        env().clock.boot_ns() - self.begun_ns
    }

    pub(super) fn show(&mut self, text: &str) {
        if self.elapsed_ns() > SHOW_AFTER_NS && std::io::stderr().is_terminal() {
            self.shown = true;
            // Progress goes on without a terminal.
            let _ = write!(std::io::stderr(), "\r{text}\x1b[K");
        }
    }

    /// Shows the bytes that are left, the speed and the remaining time.
    pub(super) fn show_bytes(&mut self, what: &str, left: u64, of: u64) {
        let rate = rate(of.saturating_sub(left), self.elapsed_ns());
        self.show(&format!("{what}: {}", left_text(left, rate)));
    }

    /// Clears the line, and prints a line that stays.
    pub(super) fn say(&mut self, text: &str) {
        let clear = if std::mem::take(&mut self.shown) { "\r\x1b[K" } else { "" };
        let _ = writeln!(std::io::stderr(), "{clear}{text}");
    }
}

/// How much was done so far, and the rate of the last two seconds.
pub(super) struct Meter {
    progress: Progress,
    what: &'static str,
    /// Where it was at these times: one for each tick of the last two seconds.
    marks: VecDeque<(u64, u64)>,
}

impl Meter {
    pub(super) fn new(what: &'static str) -> Self {
        Self { progress: Progress::new(), what, marks: VecDeque::new() }
    }

    /// Shows the bytes done so far, the total if it is known, and the rate.
    pub(super) fn show(&mut self, done: u64, of: Option<u64>) {
        let now_ns = self.progress.elapsed_ns();
        let bytes_per_s = self.rate(now_ns, done);
        let left = of.map(|of| format!(" of {}", bytes(of))).unwrap_or_default();
        self.progress.show(&format!("{}: {}{left}, {}/s", self.what, bytes(done), bytes(bytes_per_s)));
    }

    /// Notes how much was done by this time. Returns the rate.
    fn rate(&mut self, now_ns: u64, done: u64) -> u64 {
        // What was begun anew counts from there.
        self.marks.retain(|(_, before)| *before <= done);
        if self.marks.back().is_none_or(|(at_ns, _)| now_ns - at_ns >= TICK.as_nanos() as u64) {
            self.marks.push_back((now_ns, done));
        }
        while self.marks.len() > 1 && now_ns - self.marks[1].0 >= RATE_OVER_NS {
            self.marks.pop_front();
        }
        let (since_ns, before) = self.marks.front().copied().unwrap_or((now_ns, done));
        rate(done - before, now_ns - since_ns)
    }
}

/// Waits for an operation without known progress, and shows the elapsed time.
pub(super) async fn while_shown<T>(what: &str, work: impl Future<Output = T>) -> T {
    let mut progress = Progress::new();
    tokio::pin!(work);
    loop {
        match tokio::time::timeout(TICK, &mut work).await {
            Ok(done) => return done,
            Err(_) => progress.show(&format!("{what}: {} s", progress.elapsed_ns() / SECOND_NS)),
        }
    }
}

fn rate(done: u64, elapsed_ns: u64) -> u64 {
    (u128::from(done) * u128::from(SECOND_NS) / u128::from(elapsed_ns.max(1))) as u64
}

fn left_text(left: u64, bytes_per_s: u64) -> String {
    let eta = (bytes_per_s > 0).then(|| base::units::format_duration(left.div_ceil(bytes_per_s)));
    let eta = eta.map_or(String::new(), |eta| format!(", {eta} left"));
    format!("{} to go, {}/s{eta}", bytes(left), bytes(bytes_per_s))
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_takes_as_long_as_it_did_so_far() {
        assert_eq!(rate(10 << 20, 2 * SECOND_NS), 5 << 20);
        assert_eq!(left_text(60 << 20, 1 << 20), "60.00 MiB to go, 1.00 MiB/s, 1m left");
        assert_eq!(left_text(60 << 20, 0), "60.00 MiB to go, 0 B/s");
    }

    #[test]
    fn a_rate_is_that_of_the_last_two_seconds() {
        let mut meter = Meter::new("reading");
        let mut check = |at_s: u64, done: u64, expected: u64| {
            assert_eq!(meter.rate(at_s * SECOND_NS, done), expected, "after {at_s} s");
        };
        check(0, 0, 0);
        check(1, 100, 100);
        check(2, 200, 100);
        check(3, 600, 250);
        check(4, 600, 200);
        check(5, 600, 0);
        check(6, 50, 0);
        check(7, 150, 100);
    }
}
