//! A token bucket: bytes that may move, earned at a variable rate.

use std::sync::Mutex;
use std::time::Duration;

/// Bytes that may move (negative after a large step), and the time of the last update.
pub(crate) struct Bucket(Mutex<(i64, u64)>);

impl Bucket {
    /// An empty bucket.
    pub(crate) fn new(now_ns: u64) -> Self {
        Self(Mutex::new((0, now_ns)))
    }

    /// Takes `bytes` unless more was taken than was earned at `rate` bytes per second; otherwise returns how long to
    /// wait. After a rest at most `burst` bytes are available.
    pub(crate) fn take(&self, bytes: u64, rate: u64, burst: u64, now_ns: u64) -> Result<(), Duration> {
        let mut guard = self.0.lock().expect("no holder of this lock panics");
        let (tokens, reckoned_ns) = &mut *guard;
        let earned = u128::from(now_ns.saturating_sub(*reckoned_ns)) * u128::from(rate) / 1_000_000_000;
        let burst = i64::try_from(burst).unwrap_or(i64::MAX);
        *tokens = tokens.saturating_add(i64::try_from(earned).unwrap_or(i64::MAX)).min(burst);
        *reckoned_ns = now_ns;
        if *tokens < 0 {
            let wait_ns = u128::from(tokens.unsigned_abs()) * 1_000_000_000 / u128::from(rate.max(1));
            return Err(Duration::from_nanos(u64::try_from(wait_ns).unwrap_or(u64::MAX)));
        }
        *tokens = tokens.saturating_sub_unsigned(bytes);
        Ok(())
    }
}
