//! How fast drives answer this client: when to ask another drive, and which drives are slow.
//!
//! Bounds come from all drives together, so that a slow drive does not raise the bound by which it is judged. They
//! adapt: when all drives are busy, all bounds rise and no request is sent twice.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use base::DriveId;

/// A read asks other drives after this time at the earliest.
const READ_FLOOR_NS: u64 = 20_000_000;
/// A write goes on without the slowest drives after this time at the earliest.
const WRITE_FLOOR_NS: u64 = 500_000_000;
/// The highest bound: a drive that hangs must not hold requests up for longer.
const BOUND_MAX_NS: u64 = 5_000_000_000;
/// A drive is slow if it takes this many times as long as its peers ...
const SLOW_FACTOR: u64 = 5;
/// ... and at least this long, ...
const SLOW_FLOOR_NS: u64 = 5_000_000;
/// ... for this long.
const SLOW_AFTER_NS: u64 = 30_000_000_000;
/// A drive is slow at once after this many requests in a row that others had to answer.
const UNANSWERED_MAX: u32 = 8;
/// How often a slow drive gets a request, to see whether it is still slow.
const PROBE_EVERY_NS: u64 = 1_000_000_000;
/// Samples between two updates of the bounds.
const SAMPLES_PER_LOOK: u64 = 32;
/// A drive that was slow and was asked nothing for this long is not slow any more: it may only have been out of reach.
const SLOW_KNOWN_NS: u64 = 10_000_000_000;
/// A new sample has the weight 1 / 2^`SMOOTHING`.
const SMOOTHING: u32 = 4;
/// The same for a slow drive, so that the few requests it gets soon show that it has recovered.
const SMOOTHING_SLOW: u32 = 2;

/// A drive without requests for this long does not count as strained.
const STRAIN_NS: u64 = 1_000_000_000;

/// Kinds of requests to a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Read,
    Write,
}

/// Mean and mean deviation, smoothed.
#[derive(Debug, Clone, Copy, Default)]
struct Smoothed {
    mean_ns: u64,
    deviation_ns: u64,
    samples: u64,
}

impl Smoothed {
    fn take(&mut self, ns: u64, smoothing: u32) {
        self.samples += 1;
        if self.samples == 1 {
            (self.mean_ns, self.deviation_ns) = (ns, ns / 2);
            return;
        }
        let blend = |old: u64, new: u64| old - (old >> smoothing) + (new >> smoothing);
        self.deviation_ns = blend(self.deviation_ns, self.mean_ns.abs_diff(ns));
        self.mean_ns = blend(self.mean_ns, ns);
    }

    fn high_ns(&self, deviations: u64) -> u64 {
        self.mean_ns + deviations * self.deviation_ns
    }
}

#[derive(Debug, Default)]
struct DriveLatency {
    read: Smoothed,
    write: Smoothed,
    unanswered: u32,
    slow_since_ns: Option<u64>,
    slow: bool,
    probed_ns: u64,
    sampled_ns: u64,
}

impl DriveLatency {
    /// Whether it is slow, by what is known now. One request that it does not answer in time makes it slow again.
    fn is_slow(&mut self, drive: DriveId, now_ns: u64) -> bool {
        if self.slow && now_ns.saturating_sub(self.sampled_ns) >= SLOW_KNOWN_NS {
            tracing::info!(%drive, "drive was slow and was asked nothing since: it is tried again");
            *self = Self { unanswered: UNANSWERED_MAX - 1, ..Self::default() };
        }
        self.slow
    }
}

/// The drives of one client.
pub(crate) struct Latencies {
    drives: Mutex<HashMap<DriveId, DriveLatency>>,
    /// Reads under way.
    reads: Mutex<HashMap<DriveId, u32>>,
    samples: AtomicU64,
    read_bound_ns: AtomicU64,
    write_bound_ns: AtomicU64,
    recent: Mutex<Recent>,
}

/// Latency of all requests.
#[derive(Debug, Clone, Copy, Default)]
struct Recent {
    /// The present mean.
    smoothed: Smoothed,
    /// The lowest mean for a while.
    lowest_ns: u64,
    /// When the last request was answered.
    at_ns: u64,
}

/// A read that a drive has not answered.
pub(crate) struct ReadUnderWay<'a> {
    latencies: &'a Latencies,
    drive: DriveId,
}

impl Drop for ReadUnderWay<'_> {
    fn drop(&mut self) {
        if let Entry::Occupied(mut reads) = self.latencies.reads().entry(self.drive) {
            *reads.get_mut() -= 1;
            if *reads.get() == 0 {
                reads.remove();
            }
        }
    }
}

impl Latencies {
    pub(crate) fn new() -> Self {
        Self {
            drives: Mutex::default(),
            reads: Mutex::default(),
            samples: AtomicU64::new(0),
            read_bound_ns: AtomicU64::new(READ_FLOOR_NS),
            write_bound_ns: AtomicU64::new(WRITE_FLOOR_NS),
            recent: Mutex::default(),
        }
    }

    fn reads(&self) -> MutexGuard<'_, HashMap<DriveId, u32>> {
        self.reads.lock().expect("no holder of this lock panics")
    }

    /// Counts a read until it is dropped.
    pub(crate) fn reads_from(&self, drive: DriveId) -> ReadUnderWay<'_> {
        *self.reads().entry(drive).or_default() += 1;
        ReadUnderWay { latencies: self, drive }
    }

    /// The reads that a drive has not answered.
    pub(crate) fn reads_under_way(&self, drive: DriveId) -> u32 {
        self.reads().get(&drive).copied().unwrap_or(0)
    }

    /// After this time without an answer a read asks other drives.
    pub(crate) fn read_patience(&self) -> Duration {
        Duration::from_nanos(self.read_bound_ns.load(Ordering::Relaxed))
    }

    /// After this time a write that enough drives have stored goes on without the others.
    pub(crate) fn write_patience(&self) -> Duration {
        Duration::from_nanos(self.write_bound_ns.load(Ordering::Relaxed))
    }

    /// Notes that a drive answered after `ns`, with success or an error.
    pub(crate) fn answered(&self, drive: DriveId, asked: RequestKind, ns: u64, now_ns: u64) {
        self.sample(drive, asked, ns, now_ns, 0);
        let mut recent = self.recent.lock().expect("no holder of this lock panics");
        recent.smoothed.take(ns, SMOOTHING);
        recent.at_ns = now_ns;
        let (mean, lowest) = (recent.smoothed.mean_ns.max(1), recent.lowest_ns);
        // The lowest mean is forgotten slowly, so that a drive that became slower for good does not hold back repair.
        recent.lowest_ns = if lowest == 0 { mean } else { mean.min(lowest + (lowest >> 12) + 1) };
    }

    /// Notes that a drive did not answer within `ns`, and others did its work.
    pub(crate) fn gave_up(&self, drive: DriveId, asked: RequestKind, ns: u64, now_ns: u64) {
        self.sample(drive, asked, ns, now_ns, 1);
    }

    fn sample(&self, drive: DriveId, asked: RequestKind, ns: u64, now_ns: u64, unanswered: u32) {
        let mut drives = self.drives.lock().expect("no holder of this lock panics");
        let latency = drives.entry(drive).or_default();
        let smoothing = if latency.slow { SMOOTHING_SLOW } else { SMOOTHING };
        match asked {
            RequestKind::Read => latency.read.take(ns, smoothing),
            RequestKind::Write => latency.write.take(ns, smoothing),
        }
        latency.sampled_ns = now_ns;
        latency.unanswered = if unanswered == 0 { 0 } else { latency.unanswered + unanswered };
        let sample = self.samples.fetch_add(1, Ordering::Relaxed);
        if sample.is_multiple_of(SAMPLES_PER_LOOK) || unanswered > 0 || drives[&drive].slow {
            self.look(&mut drives, now_ns);
        }
    }

    /// Updates the bounds and decides which drives are slow.
    fn look(&self, drives: &mut HashMap<DriveId, DriveLatency>, now_ns: u64) {
        let middle = |of: &dyn Fn(&DriveLatency) -> Smoothed, value: &dyn Fn(Smoothed) -> u64| {
            let seen = drives.values().map(of).filter(|smoothed| smoothed.samples > 0);
            let mut values: Vec<u64> = seen.map(value).collect();
            values.sort_unstable();
            // Of an even number the lower one, so that of two drives the slow one is not the measure.
            values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0)
        };
        let read = middle(&|drive| drive.read, &|smoothed| smoothed.high_ns(3));
        let write = middle(&|drive| drive.write, &|smoothed| smoothed.high_ns(4));
        let (read_mean, write_mean) =
            (middle(&|drive| drive.read, &|s| s.mean_ns), middle(&|drive| drive.write, &|s| s.mean_ns));
        self.read_bound_ns.store(read.clamp(READ_FLOOR_NS, BOUND_MAX_NS), Ordering::Relaxed);
        self.write_bound_ns.store((3 * write).clamp(WRITE_FLOOR_NS, BOUND_MAX_NS), Ordering::Relaxed);
        for (id, drive) in drives.iter_mut() {
            let beyond = |mean: u64, peers: u64| mean > SLOW_FLOOR_NS.max(SLOW_FACTOR * peers);
            let behind = beyond(drive.read.mean_ns, read_mean) || beyond(drive.write.mean_ns, write_mean);
            drive.slow_since_ns = if behind { drive.slow_since_ns.or(Some(now_ns)) } else { None };
            let for_long =
                drive.slow_since_ns.is_some_and(|since| now_ns.saturating_sub(since) >= SLOW_AFTER_NS);
            // A slow drive recovers only when it is behind its peers no longer.
            let slow = for_long || drive.unanswered >= UNANSWERED_MAX || drive.slow && behind;
            if slow != drive.slow {
                tracing::warn!(drive = %id, slow, read_ms = drive.read.mean_ns / 1_000_000,
                    write_ms = drive.write.mean_ns / 1_000_000, "drive is slow or no longer so");
                drive.slow = slow;
            }
        }
    }

    /// Whether a drive is slow: it is spared where others can do its work.
    pub(crate) fn is_slow(&self, drive: DriveId, now_ns: u64) -> bool {
        let mut drives = self.drives.lock().expect("no holder of this lock panics");
        drives.get_mut(&drive).is_some_and(|latency| latency.is_slow(drive, now_ns))
    }

    /// Whether to spare a drive now. A slow drive still gets one request per second.
    pub(crate) fn spares(&self, drive: DriveId, now_ns: u64) -> bool {
        let mut drives = self.drives.lock().expect("no holder of this lock panics");
        let Some(latency) = drives.get_mut(&drive) else { return false };
        if !latency.is_slow(drive, now_ns) {
            return false;
        }
        let probe = now_ns.saturating_sub(latency.probed_ns) >= PROBE_EVERY_NS;
        if probe {
            latency.probed_ns = now_ns;
        }
        !probe
    }

    /// The drives that are slow.
    pub(crate) fn slow(&self, now_ns: u64) -> Vec<DriveId> {
        let mut drives = self.drives.lock().expect("no holder of this lock panics");
        drives.iter_mut().filter_map(|(id, drive)| drive.is_slow(*id, now_ns).then_some(*id)).collect()
    }

    /// Whether requests take more than twice as long as in the best recent times. `false` without recent requests.
    pub(crate) fn strained(&self, now_ns: u64) -> bool {
        let recent = self.recent.lock().expect("no holder of this lock panics");
        let mean_ns = recent.smoothed.mean_ns;
        let is_asked = now_ns.saturating_sub(recent.at_ns) < STRAIN_NS;
        is_asked && mean_ns > 2 * recent.lowest_ns && mean_ns > SLOW_FLOOR_NS / 5
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn feed(latencies: &Latencies, drives: &[(u32, u64)], from_s: u64, to_s: u64) {
        for at in from_s * 10..to_s * 10 {
            for (drive, ms) in drives {
                latencies.answered(DriveId(*drive), RequestKind::Read, ms * MS, at * 100 * MS);
                latencies.answered(DriveId(*drive), RequestKind::Write, ms * MS, at * 100 * MS);
            }
        }
    }

    #[test]
    fn a_drive_five_times_slower_than_its_peers_is_slow_after_30_s_and_not_before() {
        let latencies = Latencies::new();
        let drives = [(0, 2), (1, 2), (2, 3), (3, 2), (4, 40), (5, 2)];
        feed(&latencies, &drives, 0, 29);
        assert_eq!(latencies.slow(29_000 * MS), []);
        feed(&latencies, &drives, 29, 33);
        assert_eq!(latencies.slow(33_000 * MS), [DriveId(4)]);
        feed(&latencies, &[(0, 2), (1, 2), (2, 3), (3, 2), (4, 2), (5, 2)], 33, 50);
        assert_eq!(latencies.slow(50_000 * MS), [], "it recovered");
    }

    #[test]
    fn equally_slow_drives_are_not_slow_and_raise_the_bounds() {
        let latencies = Latencies::new();
        assert_eq!(latencies.read_patience(), Duration::from_millis(20));
        assert_eq!(latencies.write_patience(), Duration::from_millis(500));
        feed(&latencies, &[(0, 300), (1, 310), (2, 290)], 0, 60);
        assert_eq!(latencies.slow(60_000 * MS), []);
        assert!(latencies.read_patience() >= Duration::from_millis(290));
        assert!(latencies.write_patience() >= Duration::from_millis(870));
        feed(&latencies, &[(0, 300_000), (1, 300_000), (2, 300_000)], 60, 90);
        assert!(latencies.write_patience() <= Duration::from_secs(5), "the bound has a limit");
    }

    #[test]
    fn a_drive_that_does_not_answer_is_slow_at_once_and_probed_once_a_second() {
        let latencies = Latencies::new();
        feed(&latencies, &[(0, 1), (1, 1), (2, 1)], 0, 5);
        for _ in 0..UNANSWERED_MAX {
            latencies.gave_up(DriveId(1), RequestKind::Write, 500 * MS, 5000 * MS);
        }
        assert_eq!(latencies.slow(5000 * MS), [DriveId(1)]);
        assert!(!latencies.spares(DriveId(1), 6000 * MS), "asked to see whether it is well");
        assert!(latencies.spares(DriveId(1), 6500 * MS));
        assert!(!latencies.spares(DriveId(1), 7000 * MS));
        assert!(!latencies.spares(DriveId(0), 7000 * MS));
        feed(&latencies, &[(0, 1), (1, 1), (2, 1)], 8, 30);
        assert_eq!(latencies.slow(30_000 * MS), []);
    }

    #[test]
    fn a_slow_drive_that_nothing_is_asked_of_is_not_called_slow_for_ever() {
        let latencies = Latencies::new();
        feed(&latencies, &[(0, 1), (1, 1), (2, 1)], 0, 5);
        // Its machine is cut off for a moment.
        for _ in 0..UNANSWERED_MAX {
            latencies.gave_up(DriveId(1), RequestKind::Write, 500 * MS, 5000 * MS);
        }
        assert_eq!(latencies.slow(14_999 * MS), [DriveId(1)]);
        assert!(!latencies.is_slow(DriveId(1), 15_000 * MS) && !latencies.spares(DriveId(1), 15_000 * MS));
        assert_eq!(latencies.slow(15_000 * MS), []);
        // One that still does not answer is noticed at once ...
        latencies.gave_up(DriveId(1), RequestKind::Write, 500 * MS, 16_000 * MS);
        assert_eq!(latencies.slow(16_000 * MS), [DriveId(1)]);
        // ... and one that does is as good as any.
        assert_eq!(latencies.slow(30_000 * MS), []);
        feed(&latencies, &[(0, 1), (1, 1), (2, 1)], 30, 31);
        latencies.gave_up(DriveId(1), RequestKind::Write, 500 * MS, 31_000 * MS);
        assert_eq!(latencies.slow(31_000 * MS), []);
    }

    #[test]
    fn drives_are_strained_at_twice_their_usual_latency() {
        let latencies = Latencies::new();
        feed(&latencies, &[(0, 2), (1, 2)], 0, 10);
        assert!(!latencies.strained(10_000 * MS));
        feed(&latencies, &[(0, 9), (1, 9)], 10, 13);
        assert!(latencies.strained(13_000 * MS));
        assert!(!latencies.strained(14_000 * MS), "no request for a second");
        feed(&latencies, &[(0, 2), (1, 2)], 13, 20);
        assert!(!latencies.strained(20_000 * MS));
    }
}
