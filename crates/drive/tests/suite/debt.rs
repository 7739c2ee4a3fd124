//! Reclaim debt on a drive with a slow disk, under simulated time: if a client overwrites faster than the drive cleans,
//! the rate settles at the rate of cleaning. The limit ends when there is room again.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use base::checksum::block_checksums;
use base::env::sim::Sim;
use base::env::{Clock, Env};
use base::units::{GIB, MIB};
use drive::{Drive, FormatOptions};
use tokio::time::{Instant, sleep};
use wire::drive::{DriveService, PutShard, PutShardError, ShardClass};

const PATH: &str = "drive";
/// Live extents, 1 MiB each: two thirds of the drive.
const LIVE: u64 = 2700;

/// The clock of the runtime, which advances when all tasks are idle.
struct RuntimeClock(Instant);

impl Clock for RuntimeClock {
    fn boot_ns(&self) -> u64 {
        self.0.elapsed().as_nanos() as u64 + 1
    }

    fn wall_ns(&self) -> i64 {
        self.boot_ns() as i64
    }
}

/// Overwrites: puts a new extent and deletes an old one, in turn.
struct Load {
    drive: Arc<Drive>,
    zeros: PutShard,
    next: u64,
    live: Vec<u64>,
    random: u64,
}

impl Load {
    fn new(drive: Arc<Drive>) -> Self {
        let zeros = put_of(key(0), ShardClass::Bulk, vec![0; MIB as usize]);
        Self { drive, zeros, next: 0, live: Vec::new(), random: 7 }
    }

    /// Writes one extent, and retries until it is admitted.
    async fn write(&mut self) {
        let key = key(self.next);
        let checksums = block_checksums(key.extent, key.shard, 0, &self.zeros.bytes);
        let request = PutShard { key, checksums, ..self.zeros.clone() };
        loop {
            match self.drive.put(request.clone()).await {
                Ok(()) => break,
                Err(PutShardError::Busy { retry_after_ms, .. }) => {
                    sleep(Duration::from_millis(u64::from(retry_after_ms))).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
        self.live.push(self.next);
        self.next += 1;
    }

    async fn delete(&mut self) {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let victim = self.live.swap_remove((self.random >> 33) as usize % self.live.len());
        self.drive.delete(vec![key(victim)].into()).await.unwrap();
    }

    /// Overwrites for `seconds`, at most `per_s` MiB per second. Returns the number of MiB written.
    async fn overwrite(&mut self, seconds: u64, per_s: u64, mut each: impl FnMut(Option<u64>)) -> u64 {
        let (began, before) = (Instant::now(), self.next);
        while began.elapsed() < Duration::from_secs(seconds) {
            let due = began + Duration::from_millis((self.next - before) * 1000 / per_s);
            tokio::time::sleep_until(due).await;
            self.delete().await;
            self.write().await;
            check_stat(&self.drive);
            each(self.limit());
        }
        self.next - before
    }

    fn limit(&self) -> Option<u64> {
        self.drive.stat().write_limit_bytes_per_s
    }
}

async fn debt_comes_and_goes() {
    let sim = Sim::new(5);
    let env = Env { clock: Arc::new(RuntimeClock(Instant::now())), ..sim.env() };
    let options = FormatOptions { segment_bytes: Some(16 * MIB), ..format_options(4 * GIB) };
    Drive::format(&env, Path::new(PATH), &options).unwrap();
    sim.files.set_latency(Duration::from_millis(60), Duration::from_millis(60));
    let mut load = Load::new(open(&env, Path::new(PATH)).unwrap());
    for _ in 0..LIVE {
        load.write().await;
    }
    assert_eq!(load.limit(), None, "filling a drive makes no debt");
    let mut limited = None;
    let begun = Instant::now();
    load.overwrite(3000, 3, |limit| {
        limited = limited.or(limit.map(|_| begun.elapsed().as_secs()));
    })
    .await;
    assert!(limited.is_some(), "{:?}", load.drive.stat());
    let written = load.overwrite(1000, 3, |_| {}).await;
    assert!(written >= 1000, "{written} MiB in 1000 s: it goes on, at the speed of cleaning");
    while load.live.len() as u64 > LIVE / 3 {
        load.delete().await;
    }
    load.overwrite(600, 1, |_| {}).await;
    assert_eq!(load.limit(), None, "{:?}", load.drive.stat());
}

#[test]
fn overwriting_faster_than_cleaning_is_slowed_down_until_there_is_room() {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().start_paused(true).build().unwrap().block_on(debt_comes_and_goes());
}
