//! Admission of puts: a drive accepts as many puts as it can finish in about a tenth of a second, and refuses the rest.
//!
//! A refused writer is told at once when to retry, instead of waiting in an unbounded queue. New data and repairs are
//! counted apart, so that neither keeps the other out. While cleaning is behind, new data also needs credits, which
//! accrue at a limited number of bytes per second.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::units::MIB;
use wire::drive::PutPurpose;

/// Time that the queued puts may take.
const WAIT_NS: u64 = 100_000_000;
/// Bytes that may wait in any case, however slow the drive: one large shard, or a group commit of small ones.
const ALWAYS_BYTES: u64 = 2 * MIB;
const ALWAYS_PUTS: u64 = 64;
/// Most puts that may wait, however fast the drive; their bytes are bounded by its memory.
const QUEUE_PUTS: u64 = 4096;
/// Most credits that are kept for later, in bytes; at least a large shard.
const CREDITS_KEPT_MIN: u64 = MIB;
/// Longest retry delay that a refused writer is given.
const RETRY_MS_MAX: u64 = 500;

/// Puts of one purpose that wait or are being written.
#[derive(Debug, Default)]
struct Queue {
    bytes: AtomicU64,
    puts: AtomicU64,
}

/// Counts of the puts that wait for a drive, and the limits on them.
#[derive(Debug)]
pub(crate) struct Admission {
    batch_bytes: u64,
    batch_puts: u64,
    queue_bytes: u64,
    writes: Queue,
    repairs: Queue,
    /// Recent duration of a group commit.
    batch_ns: AtomicU64,
    /// When the running group commit began; 0 if none is running.
    began_ns: AtomicU64,
    /// Bytes of new data per second; 0 if there is no limit.
    limit: AtomicU64,
    credits: Mutex<Credits>,
}

/// Bytes of new data that may be written now, while there is a limit.
#[derive(Debug, Default)]
struct Credits {
    bytes: u64,
    filled_ns: u64,
}

/// A place in a queue, given back when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    admission: Arc<Admission>,
    purpose: PutPurpose,
    bytes: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        let queue = self.admission.queue(self.purpose);
        queue.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        queue.puts.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Admission {
    /// A drive whose group commits hold at most `batch_bytes` and `batch_puts`. `queue_bytes` may wait for it.
    pub(crate) fn new(batch_bytes: u64, batch_puts: u64, queue_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            batch_bytes,
            batch_puts,
            queue_bytes,
            writes: Queue::default(),
            repairs: Queue::default(),
            batch_ns: AtomicU64::new(0),
            began_ns: AtomicU64::new(0),
            limit: AtomicU64::new(0),
            credits: Mutex::default(),
        })
    }

    fn queue(&self, purpose: PutPurpose) -> &Queue {
        match purpose {
            PutPurpose::Write => &self.writes,
            PutPurpose::Repair => &self.repairs,
        }
    }

    /// Takes a place for a put, or returns the number of milliseconds after which to retry.
    pub(crate) fn enter(
        self: &Arc<Self>,
        purpose: PutPurpose,
        bytes: u64,
        now_ns: u64,
    ) -> Result<Place, u32> {
        let queue = self.queue(purpose);
        if purpose == PutPurpose::Write {
            self.take_credits(bytes, now_ns)?;
        }
        // The place is taken before the check, so that concurrent writers do not all see the same room.
        let place = Place { admission: self.clone(), purpose, bytes };
        let bytes = queue.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let puts = queue.puts.fetch_add(1, Ordering::Relaxed) + 1;
        if bytes <= ALWAYS_BYTES && puts <= ALWAYS_PUTS {
            return Ok(place);
        }
        let wait_ns = self.wait_ns(purpose, bytes, puts, now_ns);
        if wait_ns <= WAIT_NS && bytes <= self.queue_bytes && puts <= QUEUE_PUTS {
            return Ok(place);
        }
        let retry_ms = wait_ns.saturating_sub(WAIT_NS / 2) / 1_000_000;
        Err(retry_ms.clamp(1, RETRY_MS_MAX) as u32)
    }

    /// How long the last of `puts` puts with `bytes` in all would wait.
    fn wait_ns(&self, purpose: PutPurpose, bytes: u64, puts: u64, now_ns: u64) -> u64 {
        let batches = (bytes / self.batch_bytes).max(puts / self.batch_puts) + 1;
        let began_ns = self.began_ns.load(Ordering::Relaxed);
        let running_ns = if began_ns == 0 { 0 } else { now_ns.saturating_sub(began_ns) };
        // If the running group commit takes longer than the recent ones, its duration counts.
        let batch_ns = self.batch_ns.load(Ordering::Relaxed).max(running_ns);
        let turns = match purpose {
            PutPurpose::Write => 1,
            // While new data waits, a repair gets only a part of each group commit.
            PutPurpose::Repair if self.writes.puts.load(Ordering::Relaxed) > 0 => REPAIR_PART,
            PutPurpose::Repair => 1,
        };
        batches.saturating_mul(batch_ns).saturating_mul(turns)
    }

    /// Takes the credits of new data, or returns the number of milliseconds after which there may be some.
    fn take_credits(&self, bytes: u64, now_ns: u64) -> Result<(), u32> {
        let limit = self.limit.load(Ordering::Relaxed);
        if limit == 0 {
            return Ok(());
        }
        let mut credits = self.credits.lock().expect("no holder of this lock panics");
        let since_ns = now_ns.saturating_sub(credits.filled_ns);
        let earned = u128::from(limit) * u128::from(since_ns) / 1_000_000_000;
        // Time in which no whole credit was earned still counts later; else frequent callers would never earn one.
        if earned > 0 {
            let kept_max = (limit / 4).max(CREDITS_KEPT_MIN);
            credits.bytes = (u128::from(credits.bytes) + earned).min(u128::from(kept_max)) as u64;
            credits.filled_ns = now_ns;
        }
        // A large shard may need more credits than are ever kept: it enters with the credits of a usual shard, and
        // takes all.
        if credits.bytes >= bytes.min(CREDITS_KEPT_MIN) {
            credits.bytes = credits.bytes.saturating_sub(bytes);
            return Ok(());
        }
        let missing = bytes.min(CREDITS_KEPT_MIN) - credits.bytes;
        Err((missing * 1000 / limit).clamp(1, RETRY_MS_MAX) as u32)
    }

    /// Sets the limit on new data in bytes per second; `None` for no limit. Returns whether the limit changed.
    pub(crate) fn limit(&self, bytes_per_s: Option<u64>) -> bool {
        let limit = bytes_per_s.unwrap_or(0);
        self.limit.swap(limit, Ordering::Relaxed) != limit
    }

    /// The limit on new data in bytes per second, if there is one.
    pub(crate) fn write_limit_bytes_per_s(&self) -> Option<u64> {
        Some(self.limit.load(Ordering::Relaxed)).filter(|limit| *limit > 0)
    }

    /// A group commit begins.
    pub(crate) fn batch_began(&self, now_ns: u64) {
        self.began_ns.store(now_ns.max(1), Ordering::Relaxed);
    }

    /// The group commit is durable.
    pub(crate) fn batch_ended(&self, now_ns: u64) {
        let took_ns = now_ns.saturating_sub(self.began_ns.swap(0, Ordering::Relaxed));
        let before_ns = self.batch_ns.load(Ordering::Relaxed);
        self.batch_ns.store((before_ns * 7 + took_ns) / 8, Ordering::Relaxed);
    }
}

/// While new data waits, repairs get one part in this many of a group commit.
pub(crate) const REPAIR_PART: u64 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// The number of puts of `bytes` that a drive accepts whose batches take `batch_ms`, and the retry delay after
    /// that.
    fn places(batch_ms: u64, bytes: u64) -> (usize, u32) {
        let admission = Admission::new(8 * MIB, 1024, 64 * MIB);
        for round in 0..100 {
            admission.batch_began(round * batch_ms * MS + 1);
            admission.batch_ended((round + 1) * batch_ms * MS + 1);
        }
        let mut places = Vec::new();
        loop {
            match admission.enter(PutPurpose::Write, bytes, 0) {
                Ok(place) => places.push(place),
                Err(retry_ms) => return (places.len(), retry_ms),
            }
        }
    }

    #[test]
    fn a_drive_takes_what_it_does_in_a_tenth_of_a_second() {
        let (fast, _) = places(1, MIB);
        assert_eq!(fast, 64, "bounded by memory");
        let (middle, retry_ms) = places(20, MIB);
        assert!((30..=41).contains(&middle), "{middle} MiB at 400 MiB/s");
        assert!((40..=100).contains(&retry_ms), "{retry_ms}");
        let (slow, retry_ms) = places(1000, MIB);
        assert_eq!((slow, retry_ms), (2, 500), "but always something");
        let (slow, _) = places(1000, 4096);
        assert_eq!(slow, 64);
    }

    #[test]
    fn a_drive_that_stands_still_refuses_and_takes_again_when_it_moves() {
        let admission = Admission::new(8 * MIB, 1024, 64 * MIB);
        admission.batch_began(1);
        let enter = |now_ms: u64| admission.enter(PutPurpose::Write, 2 * MIB, now_ms * MS);
        let _first = enter(0).unwrap();
        let second = enter(50).unwrap();
        assert_eq!(enter(150).unwrap_err(), 99);
        assert_eq!(enter(5000).unwrap_err(), 500);
        admission.batch_ended(200 * MS);
        drop(second);
        assert!(enter(5001).is_ok());
    }

    #[test]
    fn with_a_limit_so_many_bytes_come_per_second_and_repairs_are_free() {
        let admission = Admission::new(8 * MIB, 1024, 64 * MIB);
        assert!(admission.limit(Some(10 * MIB)) && !admission.limit(Some(10 * MIB)));
        assert_eq!(admission.write_limit_bytes_per_s(), Some(10 * MIB));
        let (mut came, mut now_ns) = (0, 7_000 * MS);
        while now_ns < 17_000 * MS {
            match admission.enter(PutPurpose::Write, 64 << 10, now_ns) {
                Ok(_) => came += 64 << 10,
                Err(retry_ms) => now_ns += u64::from(retry_ms) * MS,
            }
        }
        assert!((98 * MIB..=104 * MIB).contains(&came), "{} MiB in 10 s", came / MIB);
        assert!(admission.enter(PutPurpose::Repair, MIB, now_ns).is_ok());
        // A shard larger than the kept credits is admitted too.
        assert!((0..2000).any(|ms| admission.enter(PutPurpose::Write, 16 * MIB, now_ns + ms * MS).is_ok()));
        assert!(admission.limit(None));
        assert!(admission.enter(PutPurpose::Write, MIB, now_ns).is_ok());
    }

    #[test]
    fn neither_new_data_nor_repairs_keep_the_other_out() {
        let admission = Admission::new(8 * MIB, 1024, 64 * MIB);
        for purpose in [PutPurpose::Write, PutPurpose::Repair] {
            let mut places = Vec::new();
            while let Ok(place) = admission.enter(purpose, MIB, 0) {
                places.push(place);
            }
            let other = if purpose == PutPurpose::Write { PutPurpose::Repair } else { PutPurpose::Write };
            assert!(admission.enter(other, MIB, 0).is_ok());
        }
    }
}
