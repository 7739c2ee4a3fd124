//! The owner's waits: appends to its log, and writes of committed changes to its local store.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use base::Seq;
use base::watch;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::desk::StoreJob;
use super::replicas::Replicas;
use super::server::{Event, with_causes};
use crate::batch::TakenBatch;
use crate::log::{AppendError, LedgerLog, Room, Sealed, append_settled};
use crate::state::State;

/// Attempts at a log that is full or cannot be reached, after which waiting requests fail, and the pause between attempts.
const STUCK_TRIES: u32 = 50;
const STUCK_PAUSE: Duration = Duration::from_millis(100);

/// How long a log takes no batch until waiting requests fail. Where several nodes reach the log, an attempt lasts as long as
/// their clients are ready to wait, so time counts; elsewhere attempts do.
struct Stuck {
    lease: Option<Duration>,
    tries: u32,
    since: Instant,
}

impl Stuck {
    fn new(log: &dyn LedgerLog) -> Self {
        Self { lease: log.caps().lease, tries: 0, since: Instant::now() }
    }

    /// Another attempt failed. Returns whether waiting requests fail now.
    fn failed(&mut self) -> bool {
        self.tries += 1;
        let Some(lease) = self.lease else { return self.tries.is_multiple_of(STUCK_TRIES) };
        let is_long = self.since.elapsed() >= lease;
        if is_long {
            self.since = Instant::now();
        }
        is_long
    }
}

/// Appends the entries of a batch, each when the one before is durable.
pub(super) async fn append(
    log: Arc<dyn LedgerLog>,
    owner: Sealed,
    batch: TakenBatch,
    events: mpsc::UnboundedSender<Event>,
) -> Result<(), AppendError> {
    for (seq, entry) in (batch.first.0..).zip(&batch.entries) {
        append_one(&*log, owner, Seq(seq), entry, &events).await?;
    }
    Ok(())
}

/// Appends an entry. Waits while the log has no room or cannot be reached, and settles unknown outcomes.
async fn append_one(
    log: &dyn LedgerLog,
    owner: Sealed,
    seq: Seq,
    entry: &[u8],
    events: &mpsc::UnboundedSender<Event>,
) -> Result<(), AppendError> {
    let mut stuck = Stuck::new(log);
    loop {
        let result = {
            let _watched = watch::call("append to a ledger's log");
            append_settled(log, owner, seq, entry).await
        };
        let Err(error @ (AppendError::Full(_) | AppendError::Unknown(_))) = &result else { return result };
        if stuck.tries == 0 {
            // A caller's thread has no timer: the background thread must do the waiting.
            let mut handed_over = false;
            std::future::poll_fn(|context| {
                context.waker().wake_by_ref();
                if std::mem::replace(&mut handed_over, true) { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        }
        if stuck.failed() {
            tracing::warn!(error = %with_causes(error), "ledger log takes no batch, trying again");
            // If the owner is gone, this future is dropped as well.
            let _ = events.send(Event::LogStuck { full: matches!(error, AppendError::Full(_)) });
        }
        tokio::time::sleep(STUCK_PAUSE).await;
    }
}

/// The last entry that may leave the log. If the log has no room, standbys that lack it take a copy.
pub(crate) fn trim_to(log: &dyn LedgerLog, replicas: &Replicas, stored: Seq) -> Seq {
    match log.room() {
        Room::Enough => replicas.trim_to(stored),
        Room::Reserve => stored,
    }
}

/// Writes committed changes to the local store, and trims the log.
pub(super) async fn store_changes(
    state: Arc<dyn State>,
    log: Arc<dyn LedgerLog>,
    replicas: Arc<Replicas>,
    mut jobs: mpsc::Receiver<StoreJob>,
    events: mpsc::UnboundedSender<Event>,
) {
    while let Some(job) = jobs.recv().await {
        let result = {
            let _watched = watch::call("write to a ledger's local store");
            state.apply(&mut job.table.iter(), job.applied)
        };
        if result.is_ok()
            && let Err(error) = log.trim(trim_to(&*log, &replicas, job.applied.seq)).await
        {
            tracing::warn!(%error, "ledger log could not be trimmed");
        }
        if events.send(Event::Stored(job, result)).is_err() {
            return;
        }
    }
}
