//! How long users wait for the drive: what the pace of background work is measured by.
//!
//! Times are counted in classes, each a quarter wider than the one before, over whole seconds: the one that runs and the one
//! before it. Counting takes no lock. A count that falls between two seconds may be lost.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use wire::drive::Foreground;

use crate::drive::Drive;

/// Four classes for each power of two of microseconds, up to more than an hour.
const CLASSES: usize = 4 * 32;
const SECOND_NS: u64 = 1_000_000_000;

/// The requests of users in the last seconds.
pub(crate) struct Waits {
    seconds: [Second; 2],
}

struct Second {
    number: AtomicU64,
    counts: [AtomicU32; CLASSES],
}

impl Second {
    fn new() -> Self {
        Self { number: AtomicU64::new(u64::MAX), counts: [const { AtomicU32::new(0) }; CLASSES] }
    }
}

/// The class of a time. The first eight have one microsecond each.
fn class(us: u32) -> usize {
    if us < 8 {
        return us as usize;
    }
    let power = us.ilog2();
    4 * (power as usize - 1) + (us >> (power - 2)) as usize % 4
}

/// The longest time of a class, in microseconds.
fn longest(class: usize) -> u32 {
    if class < 8 {
        return class as u32;
    }
    let (power, quarter) = (class as u32 / 4 + 1, class as u64 % 4);
    (((quarter + 5) << (power - 2)) - 1).min(u64::from(u32::MAX)) as u32
}

impl Waits {
    pub(crate) fn new() -> Self {
        Self { seconds: [Second::new(), Second::new()] }
    }

    /// A request was answered after so long.
    pub(crate) fn note(&self, took: Duration, now_ns: u64) {
        let number = now_ns / SECOND_NS;
        let second = &self.seconds[(number % 2) as usize];
        if second.number.swap(number, Ordering::Relaxed) != number {
            second.counts.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        }
        let us = u32::try_from(took.as_micros()).unwrap_or(u32::MAX);
        second.counts[class(us)].fetch_add(1, Ordering::Relaxed);
    }

    /// Those of this second and the last one.
    pub(crate) fn now(&self, now_ns: u64) -> Foreground {
        let number = now_ns / SECOND_NS;
        let is_recent = |second: &&Second| number.wrapping_sub(second.number.load(Ordering::Relaxed)) < 2;
        let mut counts = [0; CLASSES];
        for second in self.seconds.iter().filter(is_recent) {
            let both = counts.iter_mut().zip(&second.counts);
            both.for_each(|(sum, count)| *sum += count.load(Ordering::Relaxed));
        }
        let requests: u32 = counts.iter().sum();
        let mut slower = requests / 100;
        let slowest = (0..CLASSES).rev().find(|class| {
            let count = counts[*class];
            let is_it = count > slower;
            slower = slower.saturating_sub(count);
            is_it
        });
        Foreground { requests, p99_us: slowest.map_or(0, longest) }
    }
}

impl Drive {
    /// Does the work of a request. Counts how long that takes, if a user waits for it.
    pub(crate) async fn counted<T, E>(
        &self,
        is_of_user: bool,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let begun_ns = self.clock.boot_ns();
        let done = work.await;
        if is_of_user && done.is_ok() {
            let now_ns = self.clock.boot_ns();
            self.shared.waits.note(Duration::from_nanos(now_ns.saturating_sub(begun_ns)), now_ns);
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_at_most_a_quarter_wide() {
        let mut last = 0;
        for us in (0..5000).chain((5000..u32::MAX - 100_000).step_by(99_991)).chain([u32::MAX]) {
            let class = class(us);
            assert!(class >= last && class < CLASSES, "{us}");
            last = class;
            assert!(
                longest(class) >= us && u64::from(longest(class)) <= u64::from(us) * 5 / 4,
                "{us} {}",
                longest(class)
            );
        }
    }

    #[test]
    fn the_slowest_hundredth_does_not_count_and_old_seconds_are_forgotten() {
        let waits = Waits::new();
        assert_eq!(waits.now(5 * SECOND_NS), Foreground::default());
        for index in 0..1000 {
            let ms = if index < 10 { 500 } else { 2 };
            waits.note(Duration::from_millis(ms), 5 * SECOND_NS + index);
        }
        let found = waits.now(5 * SECOND_NS);
        assert_eq!(found.requests, 1000);
        assert!((2000..=2500).contains(&found.p99_us), "{found:?}");
        waits.note(Duration::from_millis(500), 6 * SECOND_NS);
        assert!(waits.now(6 * SECOND_NS).p99_us >= 500_000, "eleven of 1001");
        assert_eq!(waits.now(7 * SECOND_NS).requests, 1);
        assert_eq!(waits.now(8 * SECOND_NS), Foreground::default());
        waits.note(Duration::from_micros(3), 9 * SECOND_NS);
        assert_eq!(waits.now(9 * SECOND_NS), Foreground { requests: 1, p99_us: 3 });
    }
}
