//! Latencies of single operations, and a check of them against the rate.

use std::time::{Duration, Instant};

/// Eight buckets for every power of two of nanoseconds.
const BUCKETS_PER_DOUBLING: u32 = 8;
const BUCKETS: usize = 64 * BUCKETS_PER_DOUBLING as usize;

/// Latencies of many operations.
#[derive(Debug, Clone)]
pub(crate) struct Latencies {
    counts: Vec<u64>,
    total: Duration,
    operations: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], total: Duration::ZERO, operations: 0 }
    }
}

impl Latencies {
    /// Does one operation and records its time.
    pub(crate) fn time<T>(&mut self, operation: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = operation();
        self.note(start.elapsed());
        result
    }

    pub(crate) fn note(&mut self, latency: Duration) {
        let ns = (latency.as_nanos() as u64).max(1);
        let doubling = ns.ilog2();
        // The three bits behind the highest one.
        let part = if doubling >= 3 { (ns >> (doubling - 3)) & 7 } else { 0 };
        self.counts[(doubling * BUCKETS_PER_DOUBLING) as usize + part as usize] += 1;
        self.total += latency;
        self.operations += 1;
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.total += other.total;
        self.operations += other.operations;
    }

    pub(crate) fn operations(&self) -> u64 {
        self.operations
    }

    pub(crate) fn mean(&self) -> Duration {
        self.total.checked_div(u32::try_from(self.operations).unwrap_or(u32::MAX)).unwrap_or_default()
    }

    /// The latency that this part of the operations does not exceed, accurate to 12 %.
    pub(crate) fn percentile(&self, part: f64) -> Duration {
        let rank = (self.operations as f64 * part).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in (0_u32..).zip(&self.counts) {
            seen += count;
            if seen >= rank.max(1) {
                let (doubling, part) =
                    (bucket / BUCKETS_PER_DOUBLING, u64::from(bucket % BUCKETS_PER_DOUBLING));
                return Duration::from_nanos(
                    (1_u64 << doubling) + ((part + 1) << doubling.saturating_sub(3)),
                );
            }
        }
        Duration::ZERO
    }

    /// Operations under way on average, from rate and latency (Little's law). If it is far from the number of workers,
    /// the measurement is wrong: workers waited elsewhere, or did not work all the time.
    pub(crate) fn under_way(&self, elapsed: Duration) -> f64 {
        self.total.as_secs_f64() / elapsed.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_and_means_are_those_of_the_operations() {
        let mut latencies = Latencies::default();
        (0..99).for_each(|_| latencies.note(Duration::from_micros(100)));
        latencies.note(Duration::from_millis(10));
        let about = |duration: Duration, us: f64| (duration.as_secs_f64() * 1e6 / us - 1.0).abs() < 0.13;
        assert!(about(latencies.percentile(0.5), 100.0), "{:?}", latencies.percentile(0.5));
        assert!(about(latencies.percentile(0.99), 100.0));
        assert!(about(latencies.percentile(1.0), 10_000.0));
        assert!(about(latencies.mean(), 199.0));
        assert!((latencies.under_way(Duration::from_millis(20)) - 0.995).abs() < 0.001);
        let mut both = Latencies::default();
        both.merge(&latencies);
        assert_eq!(both.operations(), 100);
    }
}
