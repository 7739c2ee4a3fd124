//! Stores the shards that commits went ahead without, once the drives that should hold them take them.
//!
//! What is owed is in the ledger: each entry was written by the commit that went ahead, so a drive that was away
//! for a while gets exactly what it missed. Repairing twice is harmless, because a shard never has two contents.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::env::Env;
use base::{DriveId, FsError};
use client::{Client, OwedEntry, RepairOutcome};
use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Pause when there was nothing to do.
const IDLE: Duration = Duration::from_millis(500);
/// Shards restored at a time: each holds k shards, usually of 1 MiB, in memory.
const PARALLEL: usize = 4;
/// A rate is measured over at least so long.
const RATE_NS: u64 = 1_000_000_000;

/// What a repairer has done since it was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RepairStat {
    /// Owed shards that were stored.
    pub repaired_shards: u64,
    /// Their bytes.
    pub repaired_bytes: u64,
    /// Bytes per second while it is at work; 0 when it has nothing to do.
    pub bytes_per_s: u64,
    /// Owed shards that cannot be reconstructed, as of the last pass.
    pub unreadable_shards: u64,
}

struct Rate {
    since_ns: u64,
    bytes: u64,
    bytes_per_s: u64,
}

struct Progress {
    env: Env,
    shards: AtomicU64,
    bytes: AtomicU64,
    unreadable: AtomicU64,
    rate: Mutex<Rate>,
}

impl Progress {
    fn new(env: Env) -> Self {
        let rate = Mutex::new(Rate { since_ns: env.clock.boot_ns(), bytes: 0, bytes_per_s: 0 });
        Self { env, shards: AtomicU64::new(0), bytes: AtomicU64::new(0), unreadable: AtomicU64::new(0), rate }
    }

    fn stored(&self, bytes: u64) {
        self.shards.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let mut rate = self.rate.lock().expect("no holder of this lock panics");
        rate.bytes += bytes;
        let now = self.env.clock.boot_ns();
        let elapsed = now.saturating_sub(rate.since_ns);
        if elapsed >= RATE_NS {
            let bytes_per_s = u128::from(rate.bytes) * 1_000_000_000 / u128::from(elapsed);
            *rate = Rate { since_ns: now, bytes: 0, bytes_per_s: bytes_per_s as u64 };
        }
    }

    fn idle(&self) {
        let since_ns = self.env.clock.boot_ns();
        *self.rate.lock().expect("no holder of this lock panics") =
            Rate { since_ns, bytes: 0, bytes_per_s: 0 };
    }
}

/// Pays owed shards, in the background.
pub struct Repairer {
    progress: Arc<Progress>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Repairer {
    /// Starts.
    pub fn start(env: Env, client: Client, runtime: &Handle) -> Self {
        let progress = Arc::new(Progress::new(env));
        let (stop, stopped) = watch::channel(false);
        let task = runtime.spawn(run(client, progress.clone(), stopped));
        Self { progress, stop, task }
    }

    /// Ends after the step under way.
    pub async fn stop(self) {
        // A task that has ended already needs no telling.
        let _ = self.stop.send(true);
        let _ = self.task.await;
    }

    /// What it has done.
    pub fn stat(&self) -> RepairStat {
        let progress = &self.progress;
        RepairStat {
            repaired_shards: progress.shards.load(Ordering::Relaxed),
            repaired_bytes: progress.bytes.load(Ordering::Relaxed),
            bytes_per_s: progress.rate.lock().expect("no holder of this lock panics").bytes_per_s,
            unreadable_shards: progress.unreadable.load(Ordering::Relaxed),
        }
    }
}

async fn run(client: Client, progress: Arc<Progress>, mut stopped: watch::Receiver<bool>) {
    while !*stopped.borrow() {
        if let Err(error) = pass(&client, &progress, &stopped).await {
            tracing::warn!(%error, "repair pauses");
        }
        progress.idle();
        let _ = tokio::time::timeout(IDLE, stopped.changed()).await;
    }
}

/// One pass over everything that is owed to drives that take it.
async fn pass(
    client: &Client,
    progress: &Progress,
    stopped: &watch::Receiver<bool>,
) -> Result<(), FsError> {
    let (mut cursor, mut unreadable) = (None, 0);
    let mut silent = HashSet::new();
    loop {
        let page = client.owed_page(cursor).await?;
        for some in page.payable.chunks(PARALLEL) {
            if *stopped.borrow() {
                return Ok(());
            }
            unreadable += repair(client, progress, some, &mut silent).await?;
        }
        cursor = page.next;
        if cursor.is_none() {
            progress.unreadable.store(unreadable, Ordering::Relaxed);
            return Ok(());
        }
    }
}

/// Repairs a few shards. A drive that did not take one is left alone for the rest of the pass. Returns how many
/// cannot be reconstructed.
async fn repair(
    client: &Client,
    progress: &Progress,
    owed: &[OwedEntry],
    silent: &mut HashSet<DriveId>,
) -> Result<u64, FsError> {
    let owed: Vec<OwedEntry> = owed.iter().filter(|entry| !silent.contains(&entry.drive)).copied().collect();
    let outcomes = join_all(owed.iter().map(|entry| client.repair_shard(entry))).await;
    let (mut stored, mut unreadable) = (Vec::new(), 0);
    for (entry, outcome) in owed.into_iter().zip(outcomes) {
        match outcome {
            RepairOutcome::Stored { bytes } => {
                progress.stored(bytes);
                stored.push(entry);
            }
            RepairOutcome::NotNow => {
                silent.insert(entry.drive);
            }
            // Whoever deletes the extent also deletes the entry.
            RepairOutcome::Gone => {}
            RepairOutcome::Unreadable => unreadable += 1,
        }
    }
    client.tell_repaired(&stored).await?;
    Ok(unreadable)
}
