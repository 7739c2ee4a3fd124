//! Measures the speed of a store with the requests of tiering: it limits what tiering can do.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base::ClusterId;
use bytes::Bytes;
use futures_util::future::{join_all, try_join_all};
use wire::BoxFuture;
use wire::store::{ObjectStore, SpeedPlan, StoreError, StoreSpeed};

use super::S3Store;
use super::validate::key;

/// The most objects. After that they are overwritten, which costs a store less than new ones.
const OBJECTS_MAX: usize = 64;
/// Requests for a few bytes; their median counts.
const ROUND_TRIPS: usize = 31;
/// The bytes of each such request.
const FEW_BYTES: u64 = 160;
const SECOND_NS: u128 = 1_000_000_000;

impl S3Store {
    /// Puts objects of random bytes, gets them, and removes them even after an error.
    pub async fn speed(
        &self,
        cluster: ClusterId,
        node: u32,
        plan: SpeedPlan,
    ) -> Result<StoreSpeed, StoreError> {
        let keys: Vec<String> =
            (0..OBJECTS_MAX).map(|number| key(cluster, node, &format!("speed-{number}"))).collect();
        let puts = AtomicUsize::new(0);
        let measured = self.put_and_get(&keys, &puts, plan).await;
        let removals = keys.into_iter().take(puts.into_inner()).map(|key| self.delete(key));
        let removed: Result<Vec<()>, StoreError> = join_all(removals).await.into_iter().collect();
        let speed = measured?;
        removed.map(|_| speed)
    }

    async fn put_and_get(
        &self,
        keys: &[String],
        puts: &AtomicUsize,
        plan: SpeedPlan,
    ) -> Result<StoreSpeed, StoreError> {
        let mut bytes = vec![0; plan.object_bytes as usize];
        self.env.random.fill(&mut bytes);
        let bytes = Bytes::from(bytes);
        let whole = 0..u64::from(plan.object_bytes);
        let put = |key| self.put(key, vec![bytes.clone()].into());
        let put_bytes_per_s = self.rate(keys, puts, plan, &put).await?;
        let keys = &keys[..keys.len().min(puts.load(Ordering::Relaxed))];
        let get = |key| -> BoxFuture<'_, Result<(), StoreError>> {
            let got = self.get(key, Some(whole.clone()));
            Box::pin(async { got.await.map(drop) })
        };
        let get_bytes_per_s = self.rate(keys, &AtomicUsize::new(0), plan, &get).await?;
        let mut round_trips_us = Vec::new();
        for key in keys.iter().cycle().take(ROUND_TRIPS) {
            let began_ns = self.env.clock.boot_ns();
            self.get(key.clone(), Some(0..FEW_BYTES.min(whole.end))).await?;
            round_trips_us.push((self.env.clock.boot_ns() - began_ns) / 1000);
        }
        round_trips_us.sort_unstable();
        let round_trip_us = round_trips_us.get(ROUND_TRIPS / 2).copied().unwrap_or_default();
        Ok(StoreSpeed { plan, round_trip_us, put_bytes_per_s, get_bytes_per_s })
    }

    /// Runs `once` on all objects in turn until the time is over, at least once. Counts the runs in `turns`. Returns
    /// bytes per second.
    async fn rate<'a>(
        &self,
        keys: &[String],
        turns: &AtomicUsize,
        plan: SpeedPlan,
        once: &(dyn Fn(String) -> BoxFuture<'a, Result<(), StoreError>> + Sync),
    ) -> Result<u64, StoreError> {
        let began_ns = self.env.clock.boot_ns();
        let elapsed_ns = || u128::from(self.env.clock.boot_ns() - began_ns);
        let time = Duration::from_secs(plan.seconds.into()).as_nanos();
        let workers = (0..plan.parallel).map(|_| async {
            while turns.load(Ordering::Relaxed) == 0 || elapsed_ns() < time {
                let turn = turns.fetch_add(1, Ordering::Relaxed);
                once(keys[turn % keys.len()].clone()).await?;
            }
            Ok(())
        });
        try_join_all(workers).await?;
        let done = turns.load(Ordering::Relaxed);
        let rate = done as u128 * u128::from(plan.object_bytes) * SECOND_NS / elapsed_ns().max(1);
        Ok(u64::try_from(rate).unwrap_or(u64::MAX))
    }
}
