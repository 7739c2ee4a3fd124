//! A ledger of records: few, changed one step at a time, and read from its store.
//!
//! It has the same log, the same kind of batches and the same recovery as the ledger of a filesystem. A change is durable when its
//! call returns. A change without an answer is never forgotten: it comes before any other, or the next owner decides on it.
//! Where several nodes reach the log, one of them is the owner, and [`Records::keep`] must run for it.

mod ownership;

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use base::env::Env;
use base::{Epoch, LedgerId, Lineage, Seq};
use tokio::sync::{Mutex, watch};
use tokio::time::Instant;

use crate::batch::Batch;
use crate::history::History;
use crate::keys::{KeyRange, Keys};
use crate::log::{AppendError, LedgerLog, MemLog, NOBODY, Sealed, Vacancy, append_settled};
use crate::owner::{OwnerError, recover};
use crate::state::{Applied, Pair, State, StateError, every_key};
use crate::values::Value;
use ownership::Ownership;

/// Keys with their new values; `None` removes.
pub type Changes = Vec<(Vec<u8>, Option<Vec<u8>>)>;

/// How long a log of several servers may give no answer before a change fails: longer than they need to elect a leader.
const PATIENCE: Duration = Duration::from_secs(6);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(200);
/// Most bytes of changes that are kept for readers elsewhere.
const RECENT_BYTES_MAX: usize = 8 << 20;

/// Why records could not be read or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordsError {
    /// The ledger is only looked at.
    #[error("it is only looked at")]
    IsView,
    /// Another owner has the ledger, or this one gave it back. Nothing changes here any more. Of changes that were not answered
    /// before, the next owner decides.
    #[error("another node owns the ledger")]
    NotOwner,
    /// The log did not take the change, or did not say so. Then the change may come into force later, before any other.
    #[error(transparent)]
    Log(AppendError),
    /// The change is in the log, but not in force: its store cannot be written. It comes into force before any other change.
    #[error("its store cannot be written, make room on its disk or restart the node: {0}")]
    Store(StateError),
    /// The store could not be read.
    #[error(transparent)]
    Read(StateError),
}

/// The components of a ledger of records.
pub struct RecordsOptions {
    /// The ledger.
    pub ledger: LedgerId,
    /// Its log.
    pub log: Arc<dyn LedgerLog>,
    /// Its local store.
    pub state: Arc<dyn State>,
    /// Clock and random numbers.
    pub env: Env,
    /// As in [`OwnerOptions`](crate::owner::OwnerOptions).
    pub vacant: Option<Vacancy>,
}

/// An open ledger of records.
pub struct Records {
    keys: Keys,
    log: Arc<dyn LedgerLog>,
    state: Arc<dyn State>,
    sealed: Sealed,
    /// `None`: the ledger is only looked at.
    ownership: Option<Ownership>,
    end: Mutex<End>,
    history: std::sync::Mutex<History>,
    recent: std::sync::Mutex<Recent>,
    newest: watch::Sender<Seq>,
}

/// The last changes, for readers elsewhere.
#[derive(Default)]
struct Recent {
    /// The change before the first one.
    before: Seq,
    changes: VecDeque<(Seq, Arc<Changes>)>,
    bytes: usize,
}

fn bytes_of(changes: &Changes) -> usize {
    changes.iter().map(|(key, value)| key.len() + value.as_ref().map_or(0, Vec::len)).sum()
}

impl Recent {
    fn add(&mut self, seq: Seq, changes: Changes) {
        self.bytes += bytes_of(&changes);
        self.changes.push_back((seq, Arc::new(changes)));
        while self.bytes > RECENT_BYTES_MAX
            && let Some((seq, changes)) = self.changes.pop_front()
        {
            self.bytes -= bytes_of(&changes);
            self.before = seq;
        }
    }
}

/// The end of the ledger.
struct End {
    /// The last batch that is known to be in the log.
    seq: Seq,
    /// A change that has begun and is not in force. It comes before any other, or a restart decides on it.
    late: Option<Late>,
    /// Since when the log gives no answer, and when it was asked last.
    silent: Option<(Instant, Instant)>,
}

/// How far a change came.
enum Late {
    /// It may be in the log as the next batch.
    Unknown(Batch),
    /// It is the last batch of the log; the store had no room for it.
    Unstored(Batch),
}

impl Records {
    /// Fences earlier owners and brings the store up to the end of the log.
    ///
    /// # Errors
    /// `Fenced` of the log, if another node was faster. Others as for an owner.
    pub async fn open(options: RecordsOptions) -> Result<Self, OwnerError> {
        let RecordsOptions { ledger, log, state, env, vacant } = options;
        let asked_ns = env.clock.boot_ns();
        let (sealed, tail) = recover((ledger, &log, &state), env.random.next_u64(), vacant).await?;
        let history = History::read(&*state, ledger, tail);
        let history = history.map_err(|source| OwnerError::Store { ledger, source })?;
        Ok(Self {
            keys: Keys::new(ledger),
            ownership: Some(Ownership::new(env, &*log, state.clone(), asked_ns)),
            log,
            state,
            sealed,
            end: Mutex::new(End { seq: tail, late: None, silent: None }),
            history: std::sync::Mutex::new(history),
            recent: std::sync::Mutex::new(Recent { before: tail, ..Recent::default() }),
            newest: watch::Sender::new(tail),
        })
    }

    /// A ledger that is only read: changes are refused.
    pub fn view(ledger: LedgerId, state: Arc<dyn State>) -> Self {
        Self {
            keys: Keys::new(ledger),
            log: Arc::new(MemLog::new()),
            state,
            sealed: Sealed { epoch: Epoch(u64::MAX), nonce: NOBODY },
            ownership: None,
            end: Mutex::new(End { seq: Seq(0), late: None, silent: None }),
            history: std::sync::Mutex::default(),
            recent: std::sync::Mutex::default(),
            newest: watch::Sender::new(Seq(0)),
        }
    }

    /// The ledger's history up to its newest batch.
    pub fn history(&self) -> History {
        self.history.lock().expect("no holder of this lock panics").clone()
    }

    /// As [`Records::commit`]. The batch becomes the first of a stretch of the ledger's history.
    pub async fn begin<E: From<RecordsError>>(
        &self,
        lineage: Lineage,
        decide: impl FnOnce(&dyn State, Seq) -> Result<Changes, E>,
    ) -> Result<(), E> {
        let mut end = self.end.lock().await;
        self.check_owner()?;
        self.finish_late(&mut end).await?;
        let first = Seq(end.seq.0 + 1);
        let mut changes = decide(&*self.state, first)?;
        changes.push((self.keys.lineage(first), Some(lineage.0.encode())));
        self.put(&mut end, changes).await?;
        let mut history = self.history.lock().expect("no holder of this lock panics");
        *history = history.clone().with(first, lineage, first);
        Ok(())
    }

    /// Makes changes durable, all or none. `decide` names them: it sees all earlier changes, and no other comes in between. It
    /// gets the store, and the number of the batch that the changes become.
    ///
    /// It is tried also when this is not the only owner for certain: the log takes nothing of an earlier owner.
    ///
    /// # Errors
    /// Those of `decide`, and then nothing has changed. After others the change may come into force later, before any other.
    pub async fn commit<E: From<RecordsError>>(
        &self,
        decide: impl FnOnce(&dyn State, Seq) -> Result<Changes, E>,
    ) -> Result<(), E> {
        self.change(decide, || ()).await
    }

    /// As [`Records::commit`]; `decided` comes between the decision and the log.
    async fn change<E: From<RecordsError>>(
        &self,
        decide: impl FnOnce(&dyn State, Seq) -> Result<Changes, E>,
        decided: impl FnOnce(),
    ) -> Result<(), E> {
        let mut end = self.end.lock().await;
        self.check_owner()?;
        self.finish_late(&mut end).await?;
        let changes = decide(&*self.state, Seq(end.seq.0 + 1))?;
        decided();
        Ok(self.put(&mut end, changes).await?)
    }

    /// Puts an earlier change into force that the log did not answer, or for which the store had no room.
    pub async fn catch_up(&self) -> Result<(), RecordsError> {
        let mut end = self.end.lock().await;
        self.check_owner()?;
        self.finish_late(&mut end).await
    }

    async fn put(&self, end: &mut End, changes: Changes) -> Result<(), RecordsError> {
        // Also if this future is dropped.
        end.late = Some(Late::Unknown(Batch { changes }));
        let appended = self.append(end).await;
        // Nothing was appended. In all other cases the log may have it.
        if matches!(appended, Err(AppendError::Full(_) | AppendError::TooLarge)) {
            end.late = None;
        }
        appended.map_err(of_log)?;
        self.store(end).map_err(RecordsError::Store)
    }

    async fn finish_late(&self, end: &mut End) -> Result<(), RecordsError> {
        if end.late.is_none() {
            return Ok(());
        }
        // After any error the change stays the next one, because an earlier attempt may have succeeded.
        self.append(end).await.map_err(of_log)?;
        self.store(end).map_err(RecordsError::Store)
    }

    /// Appends the late change as the next batch, unless it is in the log. An engine of several servers gives no answer while these
    /// elect a leader, so it is asked for some time.
    async fn append(&self, end: &mut End) -> Result<(), AppendError> {
        loop {
            let appended = self.append_once(end).await;
            if !matches!(appended, Err(AppendError::Unknown(_))) {
                end.silent = None;
                return appended;
            }
            // Not for each of those that wait for their turn.
            let now = Instant::now();
            let before = end.silent.filter(|(_, asked)| asked.elapsed() < PATIENCE);
            let (since, _) = *end.silent.insert((before.map_or(now, |(since, _)| since), now));
            let goes_on = self.log.caps().lease.is_some() && self.check_owner().is_ok();
            if !goes_on || since.elapsed() >= PATIENCE {
                return appended;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn append_once(&self, end: &mut End) -> Result<(), AppendError> {
        let Some(Late::Unknown(batch)) = &end.late else { return Ok(()) };
        let next = Seq(end.seq.0 + 1);
        let appended = append_settled(&*self.log, self.sealed, next, &batch.encode()).await;
        appended.inspect_err(|error| self.note_failure(error))?;
        end.seq = next;
        self.history.lock().expect("no holder of this lock panics").goes_on(next);
        if let Some(Late::Unknown(batch)) = end.late.take() {
            end.late = Some(Late::Unstored(batch));
        }
        Ok(())
    }

    /// Stores the late change, which is the last batch of the log.
    fn store(&self, end: &mut End) -> Result<(), StateError> {
        let Some(Late::Unstored(batch)) = &end.late else { return Ok(()) };
        let mut pairs = batch.changes.iter().map(|(key, value)| (key.as_slice(), value.as_deref()));
        self.state.apply(&mut pairs, Applied { seq: end.seq, epoch: self.sealed.epoch })?;
        if let Some(Late::Unstored(batch)) = end.late.take() {
            self.recent().add(end.seq, batch.changes);
        }
        self.newest.send_replace(end.seq);
        Ok(())
    }

    fn recent(&self) -> MutexGuard<'_, Recent> {
        self.recent.lock().expect("no holder of this lock panics")
    }

    /// The epoch with which this owner sealed the log.
    pub fn epoch(&self) -> Epoch {
        self.sealed.epoch
    }

    /// The last change that is in force, as it becomes newer.
    pub fn newest(&self) -> watch::Receiver<Seq> {
        self.newest.subscribe()
    }

    /// The changes after `known`; `None`: not all of them are known any more.
    pub fn changes_since(&self, known: Seq) -> Option<Vec<(Seq, Arc<Changes>)>> {
        let recent = self.recent();
        let last = recent.changes.back().map_or(recent.before, |(seq, _)| *seq);
        if known < recent.before || known > last {
            return None;
        }
        Some(recent.changes.iter().filter(|(seq, _)| *seq > known).cloned().collect())
    }

    /// The last change that is in force.
    pub fn seq(&self) -> Result<Seq, RecordsError> {
        Ok(self.state.applied().map_err(RecordsError::Read)?.seq)
    }

    /// All records as they are now. Later changes do not show.
    pub fn snapshot(&self) -> Result<RecordsSnapshot, RecordsError> {
        let state = match self.ownership {
            None => self.state.clone(),
            Some(_) => self.state.snapshot().map_err(RecordsError::Read)?,
        };
        Ok(RecordsSnapshot { state })
    }
}

fn of_log(error: AppendError) -> RecordsError {
    match error {
        AppendError::Fenced(_) => RecordsError::NotOwner,
        error => RecordsError::Log(error),
    }
}

/// The records of a ledger at one moment.
pub struct RecordsSnapshot {
    state: Arc<dyn State>,
}

impl RecordsSnapshot {
    /// The content of a store that does not change any more.
    pub fn of(state: Arc<dyn State>) -> Self {
        Self { state }
    }

    /// The last change in it.
    pub fn seq(&self) -> Result<Seq, RecordsError> {
        Ok(self.state.applied().map_err(RecordsError::Read)?.seq)
    }

    /// Keys with their values after this key, in order, about as many bytes; and whether more follow.
    pub fn part(&self, after: &[u8], bytes: usize) -> Result<(Vec<Pair>, bool), RecordsError> {
        let (_, end) = every_key();
        let mut first = after.to_vec();
        first.push(0);
        let from = if after.is_empty() { Vec::new() } else { first };
        let (mut pairs, mut size, mut more) = (Vec::new(), 0, false);
        let visited = self.state.scan(&(from, end), &mut |key, value| {
            if size >= bytes {
                more = true;
                return ControlFlow::Break(());
            }
            size += key.len() + value.len();
            pairs.push((key.to_vec(), value.to_vec()));
            ControlFlow::Continue(())
        });
        visited.map_err(RecordsError::Read)?;
        Ok((pairs, more))
    }

    /// A record.
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, RecordsError> {
        self.state.get(key).map_err(RecordsError::Read)
    }

    /// The records of a range, in the order of their keys.
    pub fn all(&self, range: &KeyRange) -> Result<Vec<Vec<u8>>, RecordsError> {
        let mut records = Vec::new();
        let visited = self.state.scan(range, &mut |_, bytes| {
            records.push(bytes.to_vec());
            ControlFlow::Continue(())
        });
        visited.map_err(RecordsError::Read)?;
        Ok(records)
    }
}
