//! Empties the maps of removed files and deletes extents that nothing refers to.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::FsError;
use client::Client;
use tokio::runtime::Handle;

use crate::task::{Stopped, Task};

/// Pause when there is nothing to do.
const IDLE: Duration = Duration::from_millis(500);
/// Purge steps between two passes of deletion, so that space returns while a big removal is under way.
const PURGE_STEPS: u32 = 64;

/// The progress of a reclaimer since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ReclaimStat {
    /// Extents deleted from all drives.
    pub deleted_extents: u64,
    /// Extents whose deletion waits for a drive that does not answer, as of the last pass.
    pub waiting_extents: u64,
}

#[derive(Debug, Default)]
struct Counters {
    deleted: AtomicU64,
    waiting: AtomicU64,
}

/// Returns the space of removed files, in the background.
pub struct Reclaimer {
    counters: Arc<Counters>,
    task: Task,
}

impl Reclaimer {
    /// Starts reclaiming.
    pub fn start(client: Client, runtime: &Handle) -> Self {
        let counters = Arc::new(Counters::default());
        let task = Task::start(runtime, |stopped| run(client, counters.clone(), stopped));
        Self { counters, task }
    }

    /// Stops after the step under way.
    pub async fn stop(self) {
        self.task.stop().await;
    }

    /// Progress so far.
    pub fn stat(&self) -> ReclaimStat {
        ReclaimStat {
            deleted_extents: self.counters.deleted.load(Ordering::Relaxed),
            waiting_extents: self.counters.waiting.load(Ordering::Relaxed),
        }
    }
}

async fn run(client: Client, counters: Arc<Counters>, mut stopped: Stopped) {
    while !stopped.now() {
        let busy = match pass(&client, &counters, &stopped).await {
            Ok(busy) => busy,
            Err(error) => {
                tracing::warn!(%error, "reclamation pauses");
                false
            }
        };
        if !busy {
            stopped.or_after(IDLE).await;
        }
    }
}

/// One pass over all free extents. Returns whether there is more to do at once.
async fn pass(client: &Client, counters: &Counters, stopped: &Stopped) -> Result<bool, FsError> {
    let mut more = true;
    for _ in 0..PURGE_STEPS {
        more = client.purge_step().await?;
        if !more || stopped.now() {
            break;
        }
    }
    let (mut cursor, mut waiting) = (None, 0);
    loop {
        let step = client.reclaim_step(cursor).await?;
        counters.deleted.fetch_add(step.deleted, Ordering::Relaxed);
        waiting += step.waiting;
        cursor = step.next;
        if cursor.is_none() || stopped.now() {
            break;
        }
    }
    counters.waiting.store(waiting, Ordering::Relaxed);
    Ok(more)
}
