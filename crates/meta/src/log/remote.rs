//! What engines that several nodes reach have in common.
//!
//! Their requests are carried out by the runtime that opened the client: who polls them may have no timer.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use base::{Epoch, LedgerId, Seq};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};
use wire::BoxFuture;

use super::{LedgerLog, LogError};

/// See [`super::LogCaps::lease`].
pub(super) const LEASE: Duration = Duration::from_secs(3);
/// A seal is repeated when another change of the owner comes in between, this often at most.
pub(super) const SEAL_TRIES: u32 = 10;

/// Requests of a few bytes.
pub(super) const SHORT: Patience =
    Patience { attempt: Duration::from_secs(1), total: Duration::from_secs(5) };
/// Reads of entries.
pub(super) const LONG: Patience = Patience { attempt: Duration::from_secs(2), total: Duration::from_secs(5) };
/// Signs of life: a late one is of no use.
pub(super) const RENEWAL: Patience =
    Patience { attempt: Duration::from_millis(900), total: Duration::from_millis(2500) };
/// An append goes to the engine once. It ends before the owner's lease does.
pub(super) const APPEND: Duration = Duration::from_secs(2);
/// The pause before a request is repeated.
const PAUSE: Duration = Duration::from_millis(50);

/// An engine with the logs of several ledgers, under one prefix.
pub trait LogEngine: Send + Sync {
    /// The log of a ledger. It may be new.
    ///
    /// # Errors
    /// `Io` if the engine does not answer, `Damaged` or `NewerFormat` if what it has cannot be used.
    fn open(&self, ledger: LedgerId) -> BoxFuture<'_, Result<Arc<dyn LedgerLog>, LogError>>;

    /// Claims the place under the prefix for the move of logs with this number. Returns whether it has it: nothing was there, or only
    /// what an earlier try of the same move has left, which is removed. `first` is the ledger that owners seal first, and the epoch with
    /// which its log will begin: what a later owner has begun, with a higher one, stays.
    ///
    /// # Errors
    /// If the engine does not answer. The caller may try again.
    fn claim(&self, number: u64, first: (LedgerId, Epoch)) -> BoxFuture<'_, Result<bool, LogError>>;

    /// Whether [`LogEngine::claim`] would have the place now. Changes nothing.
    ///
    /// # Errors
    /// If the engine does not answer, or could not take a change now.
    fn is_free(&self, number: u64) -> BoxFuture<'_, Result<bool, LogError>>;

    /// Which servers these are: the same text at every node that reaches them, and another one for others.
    fn system(&self) -> String;

    /// The number of the move that brought the logs here; 0: they began here.
    ///
    /// # Errors
    /// If the engine does not answer.
    fn number(&self) -> BoxFuture<'_, Result<u64, LogError>>;

    /// Begins the log of a ledger behind the entry `end`, for nobody: its next owner has the epoch after this one. Only within the
    /// move that has claimed the place; returns whether it still has it.
    ///
    /// # Errors
    /// If the engine does not answer. The caller may try again.
    fn begin(
        &self,
        number: u64,
        ledger: LedgerId,
        end: (Epoch, Seq),
    ) -> BoxFuture<'_, Result<bool, LogError>>;

    /// The address of each server, and whether it answers within `limit` and can do its part.
    fn members(&self, limit: Duration) -> BoxFuture<'_, Vec<(String, bool)>>;
}

/// How long a request may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// Of one attempt.
    pub(super) attempt: Duration,
    pub(super) total: Duration,
}

impl Patience {
    /// Carries out a request that may be executed more than once, again after each error that another attempt may not meet.
    /// An attempt gets the time that it may take.
    pub(super) async fn repeat<T, E, W>(
        self,
        is_transient: impl Fn(&E) -> bool,
        mut attempt: impl FnMut(Duration) -> W,
    ) -> Result<T, E>
    where
        E: std::error::Error,
        W: Future<Output = Result<T, E>>,
    {
        let end = Instant::now() + self.total;
        loop {
            let limit = self.attempt.min(end.saturating_duration_since(Instant::now()));
            match attempt(limit).await {
                Err(error) if is_transient(&error) && Instant::now() + PAUSE < end => {
                    tracing::debug!(%error, "the engine does not answer, trying again");
                    sleep(PAUSE).await;
                }
                answer => return answer,
            }
        }
    }
}

/// The runtime that carries out requests.
pub(super) struct Runner(Handle);

impl Runner {
    /// The caller's.
    pub(super) fn current() -> Self {
        Self(Handle::current())
    }

    /// Carries `work` out. It ends when the caller goes away.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> io::Result<T> {
        let task = self.0.spawn(work);
        let _ends_with_caller = AbortOnDrop(task.abort_handle());
        task.await.map_err(io::Error::other)
    }
}

/// Ends a task.
pub(super) struct AbortOnDrop(pub(super) AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A setting is wrong.
pub(super) fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}
