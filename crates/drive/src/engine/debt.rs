//! Reclaim debt: while deleted bytes grow faster than cleaning gives them back, new data is taken more slowly.
//!
//! Without a limit a drive looks fast until the last free segment is gone, and then every write waits for cleaning.
//! With it, the rate of new data sinks to the rate of cleaning some time before that.
//!
//! A drive is behind if it cleans because room is short, and garbage grows and room shrinks all the same. Cleaning must
//! be at work and not suffice: a drive that has room cleans late on purpose.

use std::collections::VecDeque;

use base::units::MIB;

/// Time between two samples.
const SAMPLE_NS: u64 = 5_000_000_000;
/// Samples in a row, a minute in all, after which a limit is set or lifted.
const SAMPLES: usize = 12;
/// After such a gap between two samples the older ones are dropped.
const FORGET_NS: u64 = 60_000_000_000;
/// A drive keeps up if it loses less room than this part of the bytes written.
const LOST_PART: u64 = 8;
/// Lowest limit, in bytes per second.
const LIMIT_MIN: u64 = MIB;

/// A sample of the drive's space. The totals count since the drive was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct SpaceSample {
    /// Dead bytes in segments that are not free.
    pub(super) garbage_bytes: u64,
    /// Bytes in free segments and in the tails of open ones.
    pub(super) room_bytes: u64,
    /// Bytes of new data written, in total.
    pub(super) written_bytes: u64,
    /// Bytes of segments that were freed, in total, less the bytes that cleaning wrote for that.
    pub(super) reclaimed_bytes: u64,
    /// Jobs by which the cleaner moved shards because room was short, in total.
    pub(super) needed_moves: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Debt {
    /// The samples of the last minute, oldest first.
    looks: VecDeque<(u64, SpaceSample)>,
    /// Consecutive samples since which cleaning was needed.
    needed: usize,
    /// Consecutive samples since which less was written than the limit allows.
    unused: usize,
    limit: Option<Limit>,
}

#[derive(Debug, Clone, Copy)]
struct Limit {
    bytes_per_s: u64,
    /// Free room when the limit was set.
    room_bytes: u64,
}

impl Debt {
    /// Whether it is time for a sample.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        self.looks.back().is_none_or(|(at_ns, _)| now_ns.saturating_sub(*at_ns) >= SAMPLE_NS)
    }

    /// Takes a sample. Returns the limit on new data in bytes per second; `None` for no limit.
    pub(super) fn look(&mut self, now_ns: u64, look: SpaceSample) -> Option<u64> {
        let last = self.looks.back().copied();
        let Some((then_ns, then)) = last.filter(|(at_ns, _)| now_ns.saturating_sub(*at_ns) < FORGET_NS)
        else {
            *self = Self { looks: VecDeque::from([(now_ns, look)]), ..Self::default() };
            return None;
        };
        self.needed = if look.needed_moves > then.needed_moves { self.needed + 1 } else { 0 };
        self.looks.push_back((now_ns, look));
        if self.looks.len() > SAMPLES + 1 {
            self.looks.pop_front();
        }
        let written =
            per_s(look.written_bytes.saturating_sub(then.written_bytes), now_ns.saturating_sub(then_ns));
        self.limit = match self.limit {
            None => self.limit_when_behind(now_ns, &look),
            Some(limit) => self.adapted(limit, written, now_ns, &look),
        };
        self.limit.map(|limit| limit.bytes_per_s)
    }

    /// The initial limit, if the drive was behind for a minute.
    fn limit_when_behind(&mut self, now_ns: u64, look: &SpaceSample) -> Option<Limit> {
        self.unused = 0;
        let (then_ns, then) = *self.looks.front()?;
        let written_bytes = look.written_bytes.saturating_sub(then.written_bytes);
        let lost_bytes = then.room_bytes.saturating_sub(look.room_bytes);
        let behind = self.needed >= SAMPLES
            && look.garbage_bytes > then.garbage_bytes
            && lost_bytes > written_bytes / LOST_PART;
        let bytes_per_s = (per_s(written_bytes, now_ns.saturating_sub(then_ns)) / 4 * 3).max(LIMIT_MIN);
        behind.then_some(Limit { bytes_per_s, room_bytes: look.room_bytes })
    }

    /// The limit follows the rate of cleaning: lower while less than half of the initial room is left, higher while
    /// there is more. So room settles, and the limit ends when less is written or cleaning is fast enough.
    fn adapted(&mut self, limit: Limit, written: u64, now_ns: u64, look: &SpaceSample) -> Option<Limit> {
        self.unused = if written < limit.bytes_per_s / 4 * 3 { self.unused + 1 } else { 0 };
        if self.unused >= SAMPLES {
            return None;
        }
        let (then_ns, then) = *self.looks.front()?;
        let reclaimed_bytes = look.reclaimed_bytes.saturating_sub(then.reclaimed_bytes);
        let room_eighths = u128::from(look.room_bytes) * 8 / u128::from(limit.room_bytes.max(1));
        let eighths = (4 + room_eighths.min(8) as u64).clamp(6, 10);
        let bytes_per_s =
            (per_s(reclaimed_bytes, now_ns.saturating_sub(then_ns)) / 8 * eighths).max(LIMIT_MIN);
        Some(Limit { bytes_per_s, ..limit })
    }
}

fn per_s(bytes: u64, took_ns: u64) -> u64 {
    (u128::from(bytes) * 1_000_000_000 / u128::from(took_ns.max(1))) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A drive that cleans a limited number of bytes per second once room is short.
    struct Plant {
        debt: Debt,
        now_ns: u64,
        look: SpaceSample,
        cleans_per_s: u64,
    }

    const CAPACITY: u64 = 100_000 * MIB;
    const SHORT: u64 = 20_000 * MIB;

    impl Plant {
        fn new(cleans_per_s: u64) -> Self {
            let look = SpaceSample { room_bytes: CAPACITY / 2, ..SpaceSample::default() };
            Self { debt: Debt::default(), now_ns: 0, look, cleans_per_s }
        }

        /// One second of overwriting at a rate: each byte written makes one byte of garbage. Returns the limit
        /// afterwards.
        fn second(&mut self, wanted: u64) -> Option<u64> {
            let limit = self.debt.limit.map_or(u64::MAX, |limit| limit.bytes_per_s);
            let written = wanted.min(limit).min(self.look.room_bytes);
            self.look.written_bytes += written;
            self.look.garbage_bytes += written;
            self.look.room_bytes -= written;
            if self.look.room_bytes < SHORT {
                let cleaned = self.cleans_per_s.min(self.look.garbage_bytes);
                self.look.needed_moves += u64::from(cleaned > 0);
                self.look.reclaimed_bytes += cleaned;
                self.look.garbage_bytes -= cleaned;
                self.look.room_bytes += cleaned;
            }
            self.now_ns += 1_000_000_000;
            if self.debt.is_due(self.now_ns) {
                return self.debt.look(self.now_ns, self.look);
            }
            self.debt.limit.map(|limit| limit.bytes_per_s)
        }
    }

    #[test]
    fn writing_faster_than_cleaning_settles_at_the_speed_of_cleaning_before_room_is_gone() {
        let mut plant = Plant::new(60 * MIB);
        let mut lowest = u64::MAX;
        for second in 0..20_000 {
            plant.second(150 * MIB);
            lowest = lowest.min(plant.look.room_bytes);
            assert!(plant.look.room_bytes > SHORT / 4, "second {second}: {:?}", plant.look);
        }
        let before = plant.look.written_bytes;
        for _ in 0..1000 {
            plant.second(150 * MIB);
        }
        let per_s = (plant.look.written_bytes - before) / 1000;
        assert!((50 * MIB..=75 * MIB).contains(&per_s), "{} MiB/s with 60 cleaned", per_s / MIB);
    }

    #[test]
    fn without_limits_the_same_load_takes_all_room() {
        let mut plant = Plant::new(60 * MIB);
        for _ in 0..2000 {
            plant.second(150 * MIB);
            plant.debt = Debt::default();
        }
        assert!(plant.look.room_bytes < 100 * MIB, "{:?}", plant.look);
    }

    #[test]
    fn it_begins_after_a_minute_and_ends_with_its_reason() {
        let mut plant = Plant::new(60 * MIB);
        let began = (0..).find(|_| plant.second(150 * MIB).is_some());
        let short_after = (CAPACITY / 2 - SHORT) / (150 * MIB);
        let began = began.expect("it begins some time");
        assert!((short_after + 50..short_after + 75).contains(&began), "{began} {short_after}");
        // Less is written than is cleaned.
        let ended = (0..1000u64).find(|_| plant.second(20 * MIB).is_none());
        assert!(ended.is_some_and(|ended| ended <= 80), "{ended:?}");
    }

    #[test]
    fn filling_a_drive_and_cleaning_that_keeps_up_are_no_debt() {
        let mut fast = Plant::new(200 * MIB);
        assert!((0..5000).all(|_| fast.second(150 * MIB).is_none()));
        let mut debt = Debt::default();
        let fill = |second: u64| SpaceSample {
            room_bytes: CAPACITY - second * MIB,
            written_bytes: second * MIB,
            needed_moves: second,
            ..SpaceSample::default()
        };
        assert!((0..5000).all(|second| debt.look(second * SAMPLE_NS, fill(second)).is_none()));
    }

    #[test]
    fn after_a_long_pause_it_begins_anew() {
        let mut plant = Plant::new(60 * MIB);
        while plant.second(150 * MIB).is_none() {}
        let now_ns = plant.now_ns + FORGET_NS;
        assert_eq!(plant.debt.look(now_ns, plant.look), None);
    }
}
