//! How fast a store is with the requests that tiering makes: the limit of what tiering can do.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base::ClusterId;
use bytes::Bytes;
use futures_util::future::{join_all, try_join_all};
use wire::BoxFuture;
use wire::store::{ObjectStore, SpeedPlan, StoreError, StoreSpeed};

use super::S3Store;
use super::validate::key;

/// Objects there are at a time. They are written again and again.
const OBJECTS: usize = 16;
/// Requests for a few bytes, of which the median is taken.
const ROUND_TRIPS: usize = 31;
/// What each of them asks for.
const FEW_BYTES: u64 = 160;
const SECOND_NS: u128 = 1_000_000_000;

impl S3Store {
    /// Puts objects of random bytes, gets them, and removes them whatever happens.
    pub async fn speed(
        &self,
        cluster: ClusterId,
        node: u32,
        plan: SpeedPlan,
    ) -> Result<StoreSpeed, StoreError> {
        let objects = OBJECTS.max(plan.parallel.into());
        let keys: Vec<String> =
            (0..objects).map(|number| key(cluster, node, &format!("speed-{number}"))).collect();
        let measured = self.put_and_get(&keys, plan).await;
        let removals = keys.into_iter().map(|key| self.delete(key));
        let removed: Result<Vec<()>, StoreError> = join_all(removals).await.into_iter().collect();
        let speed = measured?;
        removed.map(|_| speed)
    }

    async fn put_and_get(&self, keys: &[String], plan: SpeedPlan) -> Result<StoreSpeed, StoreError> {
        let mut bytes = vec![0; plan.object_bytes as usize];
        self.env.random.fill(&mut bytes);
        let bytes = Bytes::from(bytes);
        let whole = 0..u64::from(plan.object_bytes);
        let put = |key| self.put(key, vec![bytes.clone()].into());
        let put_bytes_per_s = self.rate(keys, plan, &put).await?;
        let get = |key| -> BoxFuture<'_, Result<(), StoreError>> {
            let got = self.get(key, Some(whole.clone()));
            Box::pin(async { got.await.map(drop) })
        };
        let get_bytes_per_s = self.rate(keys, plan, &get).await?;
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

    /// Does the same with all objects in turn, until the time is over and each had its turn. Returns bytes per second.
    async fn rate<'a>(
        &self,
        keys: &[String],
        plan: SpeedPlan,
        once: &(dyn Fn(String) -> BoxFuture<'a, Result<(), StoreError>> + Sync),
    ) -> Result<u64, StoreError> {
        let began_ns = self.env.clock.boot_ns();
        let elapsed_ns = || u128::from(self.env.clock.boot_ns() - began_ns);
        let (time, turns) = (Duration::from_secs(plan.seconds.into()).as_nanos(), AtomicUsize::new(0));
        let workers = (0..plan.parallel).map(|_| async {
            loop {
                let turn = turns.fetch_add(1, Ordering::Relaxed);
                if turn >= keys.len() && elapsed_ns() >= time {
                    return Ok(());
                }
                once(keys[turn % keys.len()].clone()).await?;
            }
        });
        try_join_all(workers).await?;
        // Each worker took a last turn and did nothing with it.
        let done = turns.into_inner() - usize::from(plan.parallel);
        let rate = done as u128 * u128::from(plan.object_bytes) * SECOND_NS / elapsed_ns().max(1);
        Ok(u64::try_from(rate).unwrap_or(u64::MAX))
    }
}
