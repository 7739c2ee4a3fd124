//! Everything that callers of an owner share under its lock: the state machine, its requests, and answers that wait.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use base::{FsError, Ino, Seq, SessionId};
use tokio::sync::{mpsc, oneshot};
use wire::BoxFuture;
use wire::message::{AnswerTime, Caller};
use wire::meta::{EventSink, MetaReply, MetaRequest, RequestId, Resumed};

use super::awake::AwakeClock;
use super::pressure::Pressure;
use super::{Conflict, Core, Wait};
use crate::log::AppendError;
use crate::state::Applied;
use crate::store::ChangeTable;

/// The most time for which changes wait for an append if all their answers are out, and the most bytes of them.
const UNAWAITED_NS_MAX: u64 = 5_000_000;
const UNAWAITED_BYTES_MAX: usize = 256 << 10;

pub(super) type ReplySender = oneshot::Sender<Result<MetaReply, FsError>>;

pub(super) struct Call {
    pub(super) id: RequestId,
    /// Checked by the owner; `None`: it trusts the session.
    pub(super) caller: Option<Caller>,
    pub(super) answer: AnswerTime,
    /// It may be answered with `Retry`.
    pub(super) refusable: bool,
    pub(super) request: MetaRequest,
    pub(super) reply: ReplySender,
}

impl Call {
    /// Whether it repeats what an earlier owner answered early: it comes before the claim of its session.
    pub(super) fn is_again(&self) -> bool {
        matches!(self.answer, AnswerTime::Again(_))
    }
}

/// A running append. There is only one at a time: `Desk::appending` is set while it exists.
pub(super) struct Appending {
    /// The last entry of its batch.
    pub(super) seq: Seq,
    pub(super) work: BoxFuture<'static, Result<(), AppendError>>,
}

/// The result of the running append; pends for ever if there is none.
pub(super) async fn appended(appending: &mut Option<Appending>) -> Result<(), AppendError> {
    match appending {
        Some(appending) => (&mut appending.work).await,
        None => std::future::pending().await,
    }
}

pub(super) struct StoreJob {
    pub(super) table: Arc<ChangeTable>,
    pub(super) applied: Applied,
}

pub(super) enum Answer {
    Reply(ReplySender, Result<MetaReply, FsError>),
    Connected(oneshot::Sender<Result<SessionId, FsError>>, SessionId),
    Resumed(oneshot::Sender<Result<Resumed, FsError>>, Resumed),
}

/// An answer that waits until a batch is durable.
pub(super) struct Pending {
    pub(super) after: Seq,
    pub(super) answer: Answer,
}

impl Pending {
    // The receiver is gone if the caller gave up; its request was executed all the same.
    pub(super) fn send(self) {
        match self.answer {
            Answer::Reply(reply, result) => drop(reply.send(result)),
            Answer::Connected(reply, session) => drop(reply.send(Ok(session))),
            Answer::Resumed(reply, resumed) => drop(reply.send(Ok(resumed))),
        }
    }

    pub(super) fn fail(self, error: FsError) {
        match self.answer {
            Answer::Reply(reply, _) => drop(reply.send(Err(error))),
            Answer::Connected(reply, _) => drop(reply.send(Err(error))),
            Answer::Resumed(reply, _) => drop(reply.send(Err(error))),
        }
    }
}

/// The state machine and its requests. Locked for the duration of one request, never during I/O on the log.
pub(super) struct Desk {
    pub(super) core: Core,
    pub(super) awake: AwakeClock,
    pub(super) unstored_bytes_max: usize,
    /// Whether a batch is being appended.
    pub(super) appending: bool,
    /// Since when changes of which nobody awaits the end wait for an append.
    pub(super) unawaited_since_ns: Option<u64>,
    /// The append that a caller began and the background thread must finish.
    pub(super) handed_over: Option<Appending>,
    pub(super) pending: Vec<Pending>,
    /// Requests that wait for a release on an inode, and perhaps on others afterwards.
    pub(super) waiting: BTreeMap<Ino, VecDeque<(Call, Wait)>>,
    /// Requests that wait for the log or the local store to catch up, in order of arrival.
    pub(super) backlog: VecDeque<Call>,
    /// Where the events of each session go, and their number so far.
    pub(super) sinks: HashMap<SessionId, (Arc<dyn EventSink>, u64)>,
    /// The store thread's jobs; the thread ends when this is dropped.
    pub(super) stores: Option<mpsc::Sender<StoreJob>>,
    /// The last batch that is being written to the local store.
    pub(super) storing: Option<Seq>,
    /// Frozen changes that wait until their last batch is durable.
    pub(super) to_store: Option<(Arc<ChangeTable>, Seq)>,
    pub(super) store_due: bool,
    /// The local store has no room. Every tick tries again.
    pub(super) store_full: bool,
    /// Whether the log uses up its reserve.
    pub(super) log_tight: bool,
    /// Whether the log has no room at all.
    pub(super) log_stuck: bool,
    pub(super) stopping: bool,
    /// The last handle of the owner was dropped.
    pub(super) abandoned: bool,
}

impl Desk {
    pub(super) fn new(core: Core, stores: mpsc::Sender<StoreJob>, unstored_bytes_max: usize) -> Self {
        Self {
            core,
            awake: AwakeClock::default(),
            unstored_bytes_max,
            appending: false,
            unawaited_since_ns: None,
            handed_over: None,
            pending: Vec::new(),
            waiting: BTreeMap::new(),
            backlog: VecDeque::new(),
            sinks: HashMap::new(),
            stores: Some(stores),
            storing: None,
            to_store: None,
            store_due: false,
            store_full: false,
            log_tight: false,
            log_stuck: false,
            stopping: false,
            abandoned: false,
        }
    }

    /// Sends an answer once its batch is durable.
    pub(super) fn answer_when_durable(&mut self, after: Seq, answer: Answer) {
        let pending = Pending { after, answer };
        if after <= self.core.committed_seq() {
            pending.send()
        } else if self.log_stuck {
            pending.fail(FsError::Unknown)
        } else {
            self.pending.push(pending)
        }
    }

    /// When the executed changes are to be appended: at once if an answer waits for them.
    pub(super) fn append_due_ns(&mut self, now_ns: u64) -> Option<u64> {
        let bytes = self.core.pending_bytes();
        if bytes == 0 {
            return None;
        }
        let is_awaited = !self.pending.is_empty() || !self.backlog.is_empty() || self.stopping;
        if is_awaited || bytes >= UNAWAITED_BYTES_MAX {
            return Some(now_ns);
        }
        Some(*self.unawaited_since_ns.get_or_insert(now_ns) + UNAWAITED_NS_MAX)
    }

    /// Takes the answers that need not wait any longer, in the order in which they were made.
    pub(super) fn take_ready(&mut self) -> Vec<Pending> {
        let committed = self.core.committed_seq();
        self.pending.extract_if(.., |pending| pending.after <= committed).collect()
    }

    /// Refuses the requests whose sessions cannot forget a name before they have an answer, and another request waits for that name.
    pub(super) fn refuse_in_the_way_of(&mut self, wait: &Wait) {
        let of_names = wait.iter().filter(|(_, conflict)| matches!(conflict, Conflict::Name(_)));
        let dirs: Vec<Ino> = of_names.map(|(dir, _)| *dir).collect();
        let core = &self.core;
        let is_in_the_way = |(call, _): &(Call, Wait)| {
            let mut locked = call.request.changed_dirs();
            locked.retain(|dir| dirs.contains(dir));
            call.refusable && core.must_forget(call.id.session, &locked)
        };
        for calls in self.waiting.values_mut() {
            let (refused, kept): (VecDeque<_>, VecDeque<_>) =
                std::mem::take(calls).into_iter().partition(is_in_the_way);
            *calls = kept;
            refused.into_iter().for_each(|(call, _)| drop(call.reply.send(Err(FsError::Retry))));
        }
        self.waiting.retain(|_, calls| !calls.is_empty());
    }

    /// Ends the wait of all clients: this owner answers no more, and they ask the next one. What was executed may be in the log, and
    /// what was not looked at yet may be the repetition of such a request.
    pub(super) fn fail_all(&mut self) {
        let error = FsError::Disconnected;
        self.pending.drain(..).for_each(|pending| pending.fail(error));
        self.backlog.drain(..).for_each(|call| drop(call.reply.send(Err(error))));
        let waiting = std::mem::take(&mut self.waiting).into_values().flatten();
        waiting.for_each(|(call, _)| drop(call.reply.send(Err(error))));
    }

    /// Sends the events since the last call.
    pub(super) fn deliver_events(&mut self) {
        for (session, event) in self.core.take_events() {
            if let Some((sink, count)) = self.sinks.get_mut(&session) {
                *count += 1;
                sink.event(event);
            }
        }
        for session in self.core.take_ended() {
            self.sinks.remove(&session);
        }
    }

    /// Adds the number of the session's events to an answer that reports it.
    pub(super) fn count_events(&self, session: SessionId, reply: &mut Result<MetaReply, FsError>) {
        if let Ok(MetaReply::Beat { events, .. }) = reply {
            *events = self.sinks.get(&session).map_or(0, |(_, count)| *count);
        }
    }

    pub(super) fn pressure(&self) -> Pressure {
        let unstored = self.core.unstored_bytes();
        if self.log_stuck || (self.store_full && unstored >= self.unstored_bytes_max) {
            Pressure::Exhausted
        } else if self.log_tight || (self.store_full && unstored >= self.unstored_bytes_max / 2) {
            Pressure::Reserve
        } else {
            Pressure::None
        }
    }
}
