//! Measures a device through the whole engine, including the syncs that users wait for.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::checksum::block_checksums;
use base::env::Env;
use base::units::{MIB, align_down};
use base::{ClusterId, DriveId, DriveUuid, Epoch, ExtentId, LedgerId, PgId, ShardIndex};
use bytes::Bytes;
use tokio::runtime::Runtime;
use wire::drive::{
    DriveService, GetPurpose, GetShard, IoPath, PutPurpose, PutShard, PutShardError, ShardClass, ShardKey,
    ShardNote, ShardShape,
};

use super::ToolError;
use crate::drive::{Drive, OpenOptions, PreferIo, ReadCache};
use crate::format::BLOCK;
use crate::prepare::{Existing, FormatOptions, Preallocate};

/// Options of a measurement.
#[derive(Debug, Clone)]
pub struct BenchOptions {
    /// Size of the temporary drive.
    pub capacity_bytes: u64,
    /// The treatment of a path that has content.
    pub existing: Existing,
    /// The allocation of the file's space; it makes a large difference to puts.
    pub preallocate: Preallocate,
    /// How to access the device.
    pub io: PreferIo,
    /// Operations of 4 KiB per phase; sequential phases write half the capacity.
    pub operations: u64,
}

/// The result of one phase.
#[derive(Debug, Clone, serde::Serialize)]
pub struct BenchFigure {
    /// Name of the phase.
    pub name: String,
    /// Number of operations.
    pub operations: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Duration of the phase.
    pub seconds: f64,
    /// Operations per second.
    pub per_second: f64,
    /// MiB per second.
    pub mib_per_second: f64,
    /// Median latency of an operation.
    pub p50_us: f64,
    /// 99th percentile of the latency.
    pub p99_us: f64,
}

/// The results of all phases.
#[derive(Debug, Clone, serde::Serialize)]
pub struct BenchReport {
    /// How the device was accessed.
    pub io_path: IoPath,
    /// In the order of measurement.
    pub figures: Vec<BenchFigure>,
}

/// Formats `path`, measures, and leaves the drive there for the caller to remove.
///
/// # Errors
/// If the drive cannot be made or an operation fails.
pub fn bench(env: &Env, path: &Path, options: &BenchOptions) -> Result<BenchReport, ToolError> {
    let cluster = ClusterId([0xbe; 16]);
    let format = FormatOptions {
        cluster,
        uuid: DriveUuid([0xbe; 16]),
        capacity_bytes: Some(options.capacity_bytes),
        segment_bytes: None,
        existing: options.existing,
        preallocate: options.preallocate,
    };
    Drive::format(env, path, &format)?;
    let open = |read_cache| {
        let open = OpenOptions { io: options.io, read_cache, ..OpenOptions::new(cluster) };
        Drive::open(env, DriveId(0), path, &open)
    };
    let measure = |source: std::io::Error| ToolError::Measure { reason: source.to_string() };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_time()
        .build()
        .map_err(measure)?;
    let mut bench = Bench { env, runtime, figures: Vec::new() };
    let drive = open(ReadCache::Bypass)?;
    let io_path = drive.stat().io_path;
    let large = (options.capacity_bytes / 2 / MIB).max(1);
    bench.puts(&drive, "put 1 MiB, 8 at a time", 0, large, 256, 8)?;
    bench.puts(&drive, "put 4 KiB, 1 at a time", 1 << 32, options.operations, 1, 1)?;
    bench.puts(&drive, "put 4 KiB, 32 at a time", 2 << 32, options.operations * 4, 1, 32)?;
    bench.gets(&drive, "get 4 KiB past the cache, 1 at a time", large, options.operations, 1)?;
    bench.gets(&drive, "get 4 KiB past the cache, 32 at a time", large, options.operations * 4, 32)?;
    bench.close(drive)?;
    let drive = open(ReadCache::PageCache)?;
    let warm = large.min(64);
    bench.warm(&drive, warm)?;
    bench.gets(&drive, "get 4 KiB from the cache, 1 at a time", warm, options.operations * 4, 1)?;
    bench.gets(&drive, "get 4 KiB from the cache, 32 at a time", warm, options.operations * 4, 32)?;
    bench.close(drive)?;
    Ok(BenchReport { io_path, figures: bench.figures })
}

struct Bench<'a> {
    env: &'a Env,
    runtime: Runtime,
    figures: Vec<BenchFigure>,
}

fn key(extent: u64) -> ShardKey {
    ShardKey { ledger: LedgerId(1), extent: ExtentId(extent), shard: ShardIndex(0) }
}

fn request(extent: u64, payload: &Bytes) -> PutShard {
    let key = key(extent);
    PutShard {
        key,
        shape: ShardShape { pg: PgId(1), k: 1, m: 0, extent_len: payload.len() as u32 },
        class: if payload.len() > BLOCK { ShardClass::Bulk } else { ShardClass::Small },
        purpose: PutPurpose::Write,
        note: ShardNote::default(),
        position: None,
        pg_epoch: Epoch(1),
        bytes: payload.clone(),
        checksums: block_checksums(key.extent, key.shard, 0, payload),
    }
}

impl Bench<'_> {
    fn puts(
        &mut self,
        drive: &Arc<Drive>,
        name: &str,
        first: u64,
        count: u64,
        blocks: usize,
        depth: u64,
    ) -> Result<(), ToolError> {
        let mut payload = vec![0; blocks * BLOCK];
        self.env.random.fill(&mut payload);
        let payload = Bytes::from(payload);
        let drive = drive.clone();
        self.run(name, count, depth, (blocks * BLOCK) as u64, move |index| {
            let (drive, payload) = (drive.clone(), payload.clone());
            async move {
                loop {
                    match drive.put(request(first + index, &payload)).await {
                        Err(PutShardError::Busy { retry_after_ms, .. }) => {
                            tokio::time::sleep(Duration::from_millis(u64::from(retry_after_ms))).await;
                        }
                        other => return other.map_err(|error| error.to_string()),
                    }
                }
            }
        })
    }

    fn gets(
        &mut self,
        drive: &Arc<Drive>,
        name: &str,
        shards: u64,
        count: u64,
        depth: u64,
    ) -> Result<(), ToolError> {
        let drive = drive.clone();
        self.run(name, count, depth, BLOCK as u64, move |index| {
            let drive = drive.clone();
            // Any mixing of the bits will do: the point is that neighbours in time are not neighbours in place.
            let mixed = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16;
            let get = GetShard {
                key: key(mixed % shards),
                first_block: (mixed / shards % 256) as u32,
                blocks: 1,
                purpose: GetPurpose::Read,
            };
            async move { drive.get(get).await.map(drop).map_err(|error| error.to_string()) }
        })
    }

    fn run<F>(
        &mut self,
        name: &str,
        count: u64,
        depth: u64,
        bytes_each: u64,
        operation: impl Fn(u64) -> F + Clone + Send + 'static,
    ) -> Result<(), ToolError>
    where
        F: Future<Output = Result<(), String>> + Send,
    {
        let count = align_down(count.max(depth), depth.next_power_of_two());
        let next = Arc::new(AtomicU64::new(0));
        let start = self.env.clock.boot_ns();
        let worker = || {
            let (next, clock, operation) = (next.clone(), self.env.clock.clone(), operation.clone());
            self.runtime.spawn(async move {
                let mut latencies = Vec::new();
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count {
                        return Ok(latencies);
                    }
                    let start = clock.boot_ns();
                    operation(index).await?;
                    latencies.push(clock.boot_ns() - start);
                }
            })
        };
        let workers: Vec<_> = (0..depth).map(|_| worker()).collect();
        let mut latencies: Vec<u64> = Vec::new();
        for worker in workers {
            let ended = self.runtime.block_on(worker).map_err(|error| error.to_string());
            latencies.extend(ended.and_then(|ended| ended).map_err(|reason| ToolError::Measure { reason })?);
        }
        let seconds = (self.env.clock.boot_ns() - start).max(1) as f64 / 1e9;
        latencies.sort_unstable();
        let percentile = |part: f64| latencies[((latencies.len() - 1) as f64 * part) as usize] as f64 / 1e3;
        self.figures.push(BenchFigure {
            name: name.to_owned(),
            operations: count,
            bytes: count * bytes_each,
            seconds,
            per_second: count as f64 / seconds,
            mib_per_second: (count * bytes_each) as f64 / MIB as f64 / seconds,
            p50_us: percentile(0.5),
            p99_us: percentile(0.99),
        });
        Ok(())
    }

    fn warm(&self, drive: &Drive, shards: u64) -> Result<(), ToolError> {
        for extent in 0..shards {
            let get = GetShard { key: key(extent), first_block: 0, blocks: 256, purpose: GetPurpose::Read };
            let got = self.runtime.block_on(drive.get(get));
            got.map_err(|error| ToolError::Measure { reason: error.to_string() })?;
        }
        Ok(())
    }

    fn close(&self, drive: Arc<Drive>) -> Result<(), ToolError> {
        self.runtime.block_on(drive.close()).map_err(|error| ToolError::Measure { reason: error.to_string() })
    }
}
