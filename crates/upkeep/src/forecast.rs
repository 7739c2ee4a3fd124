//! Estimates the space for another retention from the present ages of content.

use wire::tier::{AgedExtent, Forecast};

const DAY_S: u64 = 86_400;
/// The rate of writing is taken from content of this age, or from all content if it is younger.
const WINDOW_S: u64 = 7 * DAY_S;

/// Sums over extents, added one by one.
#[derive(Debug, Clone, Copy)]
pub struct Ages {
    now_s: u64,
    retention_s: u64,
    cue_s: u64,
    /// The longest age, and the bytes of exactly this age: they were there when the store was attached.
    oldest_s: u64,
    oldest_bytes: u64,
    bytes: u64,
    raw_bytes: u64,
    young_bytes: u64,
    young_raw_bytes: u64,
    uploaded_bytes: u64,
    window_bytes: u64,
}

impl Ages {
    /// Sums over no extents.
    pub fn new(now_s: u64, retention_s: u64, cue_s: u64) -> Self {
        Self {
            now_s,
            retention_s,
            cue_s,
            oldest_s: 0,
            oldest_bytes: 0,
            bytes: 0,
            raw_bytes: 0,
            young_bytes: 0,
            young_raw_bytes: 0,
            uploaded_bytes: 0,
            window_bytes: 0,
        }
    }

    /// Adds an extent.
    pub fn add(&mut self, extent: &AgedExtent) {
        let age_s = self.now_s.saturating_sub(extent.written_s);
        let (bytes, raw_bytes) = (u64::from(extent.bytes), u64::from(extent.raw_bytes));
        if age_s > self.oldest_s {
            (self.oldest_s, self.oldest_bytes) = (age_s, 0);
        }
        if age_s == self.oldest_s {
            self.oldest_bytes += bytes;
        }
        (self.bytes, self.raw_bytes) = (self.bytes + bytes, self.raw_bytes + raw_bytes);
        if age_s < self.retention_s {
            self.young_bytes += bytes;
            self.young_raw_bytes += raw_bytes;
        }
        if age_s >= self.cue_s {
            self.uploaded_bytes += bytes;
        }
        if age_s < WINDOW_S {
            self.window_bytes += bytes;
        }
    }

    /// The forecast, with blobs of `blob_bytes`.
    pub fn forecast(&self, blob_bytes: u32) -> Forecast {
        let window_s = self.oldest_s.clamp(1, WINDOW_S);
        let there = if self.oldest_s < WINDOW_S { self.oldest_bytes } else { 0 };
        let scale = |bytes: u64, by: u64, of: u64| {
            u64::try_from(u128::from(bytes) * u128::from(by) / u128::from(of.max(1))).unwrap_or(u64::MAX)
        };
        let written_bytes_per_day = scale(self.window_bytes - there, DAY_S, window_s);
        // Beyond the known time, the same rate of writing is assumed.
        let unknown_s = self.retention_s.saturating_sub(self.oldest_s);
        let drive_bytes = self.young_bytes + scale(written_bytes_per_day, unknown_s, DAY_S);
        let raw = |bytes| scale(bytes, self.raw_bytes, self.bytes);
        Forecast {
            drive_bytes,
            drive_raw_bytes: self.young_raw_bytes + raw(drive_bytes - self.young_bytes),
            store_bytes: self.uploaded_bytes,
            written_bytes_per_day,
            puts_per_day: written_bytes_per_day.div_ceil(u64::from(blob_bytes).max(1)),
            known_s: self.oldest_s,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u32 = 1 << 20;

    fn extent(written_s: u64) -> AgedExtent {
        AgedExtent { written_s, bytes: MIB, raw_bytes: 3 * MIB / 2 }
    }

    /// An extent each hour for `days` days, and a hundred that were there before.
    fn ages(retention_s: u64, days: u64) -> Ages {
        let now_s = 100 * DAY_S;
        let mut ages = Ages::new(now_s, retention_s, 3600);
        let began_s = now_s - days * DAY_S;
        (0..100).for_each(|_| ages.add(&extent(began_s)));
        (began_s + 1800..now_s).step_by(3600).for_each(|written_s| ages.add(&extent(written_s)));
        ages
    }

    #[test]
    fn a_shorter_retention_keeps_younger_content() {
        let found = ages(2 * DAY_S, 10).forecast(64 * MIB);
        let mib = |count: u64| count * u64::from(MIB);
        assert_eq!((found.drive_bytes, found.drive_raw_bytes), (mib(48), mib(72)));
        // The last extent is younger than the cue.
        assert_eq!(found.store_bytes, mib(100 + 240 - 1));
        assert_eq!((found.written_bytes_per_day, found.puts_per_day), (mib(24), 1));
        assert_eq!(found.known_s, 10 * DAY_S);
    }

    #[test]
    fn a_retention_longer_than_the_known_time_is_estimated_from_the_rate() {
        let found = ages(20 * DAY_S, 4).forecast(MIB);
        let mib = |count: u64| count * u64::from(MIB);
        // The extents from the beginning, and 24 a day for the rest of the time.
        assert_eq!(found.drive_bytes, mib(100 + 4 * 24 + 16 * 24));
        assert_eq!(found.drive_raw_bytes, found.drive_bytes * 3 / 2);
        assert_eq!((found.written_bytes_per_day, found.puts_per_day), (mib(24), 24));
    }

    #[test]
    fn no_extents_give_a_forecast_of_zero() {
        let found = Ages::new(5, DAY_S, 3600).forecast(MIB);
        assert_eq!((found.drive_bytes, found.store_bytes, found.puts_per_day), (0, 0, 0));
    }
}
