//! Threads around [`Core`]: requests in, batches to the log, replies out once they are durable.
//!
//! Two threads per ledger. The *owner* executes what has arrived and appends it as one batch; what arrives during
//! an append shares the next one: group commit sized by the log's own speed. An engine that answers later than it
//! is asked leaves the owner free to execute meanwhile. The *store* thread writes committed changes to the local
//! store about once a second and trims the log.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use base::env::{Env, spawn_thread};
use base::{Epoch, FsError, Ino, LedgerId, Seq, SessionId};
use tokio::sync::{mpsc, oneshot};
use wire::BoxFuture;
use wire::meta::{EventSink, MetaReply, MetaRequest, MetaService, RequestId};

use super::pressure::Pressure;
use super::{Core, Executed, Now};
use crate::batch::Batch;
use crate::log::{AppendError, LedgerLog, LogError, Room};
use crate::state::{Applied, State, StateError};
use crate::store::{ChangeTable, Store};

/// Requests waiting for the owner at most; more senders wait.
const QUEUE_MAX: usize = 1024;
/// Requests executed between two looks at the log.
const EXECUTE_MAX: usize = 256;
/// Changes in memory above which nothing new is executed until the local store has caught up.
const UNSTORED_BYTES_MAX: usize = 256 << 20;
/// Changes in memory above which they are written to the local store without waiting for the tick.
const STORE_BYTES: usize = 32 << 20;
const TICK: Duration = Duration::from_millis(500);
/// How often a full log is tried before those who wait are told.
const FULL_RETRIES: u32 = 50;
const FULL_PAUSE: Duration = Duration::from_millis(100);

/// Why a ledger could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OwnerError {
    /// The log cannot be used.
    #[error("cannot open ledger {ledger}")]
    Log {
        /// Which ledger.
        ledger: LedgerId,
        #[source]
        /// Why.
        source: LogError,
    },
    /// The local store cannot be used.
    #[error("cannot open the store of ledger {ledger}")]
    Store {
        /// Which ledger.
        ledger: LedgerId,
        #[source]
        /// Why.
        source: StateError,
    },
    /// The log ends before a batch that this node has seen: it was rolled back or replaced.
    #[error("metadata of ledger {ledger} went backwards from {seen} to {tail}: restore the newer log")]
    RolledBack {
        /// Which ledger.
        ledger: LedgerId,
        /// The newest batch that the local store has.
        seen: Seq,
        /// The last batch in the log.
        tail: Seq,
    },
    /// A batch in the log cannot be decoded, or the state is of a newer version.
    #[error("ledger {ledger} is damaged or newer than this version: {what}")]
    Damaged {
        /// Which ledger.
        ledger: LedgerId,
        /// What.
        what: String,
    },
}

/// What an owner is made of.
pub struct OwnerOptions {
    /// Which ledger.
    pub ledger: LedgerId,
    /// Its log.
    pub log: Arc<dyn LedgerLog>,
    /// Its local store.
    pub state: Arc<dyn State>,
    /// Clock.
    pub env: Env,
}

/// What an owner is doing, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct OwnerStat {
    /// Its epoch.
    pub epoch: u64,
    /// The newest durable batch.
    pub committed_seq: u64,
    /// The newest batch in the local store.
    pub stored_seq: u64,
    /// Requests executed since the start.
    pub requests: u64,
    /// Whether the log failed; then every request is refused until a restart.
    pub halted: bool,
    /// Whether the disk is full; then only what makes room is done until it has room again.
    pub no_space: bool,
}

#[derive(Debug, Default)]
struct Shared {
    epoch: AtomicU64,
    committed: AtomicU64,
    stored: AtomicU64,
    requests: AtomicU64,
    halted: AtomicBool,
    no_space: AtomicBool,
    /// Why it is halted or has no space.
    problem: std::sync::Mutex<Option<String>>,
}

impl Shared {
    fn set_problem(&self, problem: Option<String>) {
        *self.problem.lock().expect("no holder of this lock panics") = problem;
    }
}

type Reply = oneshot::Sender<Result<MetaReply, FsError>>;

struct Call {
    id: RequestId,
    request: MetaRequest,
    reply: Reply,
}

enum Inbound {
    Call(Call),
    Connect { events: Arc<dyn EventSink>, reply: oneshot::Sender<Result<SessionId, FsError>> },
}

enum Control {
    Stored {
        job: StoreJob,
        result: Result<(), StateError>,
    },
    /// The log has been full for long.
    LogStuck,
    Stop,
}

/// An append under way; its requests are answered when it ends.
struct Appending {
    seq: Seq,
    replies: Vec<Pending>,
    work: BoxFuture<'static, Result<(), AppendError>>,
}

struct StoreJob {
    table: Arc<ChangeTable>,
    applied: Applied,
}

enum Answer {
    Reply(Reply, Result<MetaReply, FsError>),
    Connected(oneshot::Sender<Result<SessionId, FsError>>, SessionId),
}

struct Pending {
    after: Seq,
    answer: Answer,
}

impl Pending {
    // A receiver that is gone has given up waiting; its request happened all the same.
    fn send(self) {
        match self.answer {
            Answer::Reply(reply, result) => drop(reply.send(result)),
            Answer::Connected(reply, session) => drop(reply.send(Ok(session))),
        }
    }

    fn fail(self, error: FsError) {
        match self.answer {
            Answer::Reply(reply, _) => drop(reply.send(Err(error))),
            Answer::Connected(reply, _) => drop(reply.send(Err(error))),
        }
    }
}

/// A running owner. Dropping it without [`Owner::stop`] is like a crash.
pub struct Owner {
    inbox: mpsc::Sender<Inbound>,
    control: mpsc::UnboundedSender<Control>,
    threads: std::sync::Mutex<Vec<JoinHandle<()>>>,
    shared: Arc<Shared>,
}

impl Owner {
    /// Fences earlier owners, replays the log into the local store and starts serving.
    pub fn open(options: OwnerOptions) -> Result<Self, OwnerError> {
        let OwnerOptions { ledger, log, state, env } = options;
        let runtime = runtime();
        let (epoch, tail) = runtime.block_on(recover(ledger, &log, &state))?;
        let mut core = Core::new(ledger, Store::new(state), tail);
        let damaged = |error: FsError| OwnerError::Damaged { ledger, what: error.to_string() };
        core.start(now(&env)).map_err(damaged)?;
        let shared = Arc::new(Shared::default());
        shared.epoch.store(epoch.0, Ordering::Relaxed);
        shared.committed.store(tail.0, Ordering::Relaxed);
        shared.stored.store(tail.0, Ordering::Relaxed);
        let (inbox, calls) = mpsc::channel(QUEUE_MAX);
        let (control, controls) = mpsc::unbounded_channel();
        let (stores, store_jobs) = mpsc::channel(1);
        let name = |what: &str| format!("{what}-{ledger}");
        let mut threads = Vec::new();
        let (to_owner, bottom, log_to_trim) = (control.clone(), core.bottom(), log.clone());
        threads.push(spawn_thread(&name("store"), move || {
            store_thread(bottom, log_to_trim, store_jobs, to_owner)
        }));
        let task = Task {
            core,
            env,
            epoch,
            shared: shared.clone(),
            log,
            stores,
            appending: None,
            storing: false,
            to_store: None,
            storing_up_to: Seq(0),
            store_due: false,
            pending: Vec::new(),
            waiting: HashMap::new(),
            sinks: HashMap::new(),
            stopping: false,
            log_tight: false,
            log_stuck: false,
            store_full: false,
            to_self: control.clone(),
        };
        threads.push(spawn_thread(&name("owner"), move || runtime.block_on(task.run(calls, controls))));
        Ok(Self { inbox, control, threads: std::sync::Mutex::new(threads), shared })
    }

    /// Finishes what was accepted, writes everything to the local store and ends the threads.
    pub fn stop(&self) {
        // If the owner is gone already, its threads are too.
        let _ = self.control.send(Control::Stop);
        let threads = std::mem::take(&mut *self.threads.lock().expect("no holder of this lock panics"));
        for thread in threads {
            let _ = thread.join();
        }
    }

    /// What it is doing.
    pub fn stat(&self) -> OwnerStat {
        OwnerStat {
            epoch: self.shared.epoch.load(Ordering::Relaxed),
            committed_seq: self.shared.committed.load(Ordering::Relaxed),
            stored_seq: self.shared.stored.load(Ordering::Relaxed),
            requests: self.shared.requests.load(Ordering::Relaxed),
            halted: self.shared.halted.load(Ordering::Relaxed),
            no_space: self.shared.no_space.load(Ordering::Relaxed),
        }
    }

    /// Why it is halted or has no space.
    pub fn problem(&self) -> Option<String> {
        self.shared.problem.lock().expect("no holder of this lock panics").clone()
    }
}

impl MetaService for Owner {
    fn connect(&self, events: Arc<dyn EventSink>) -> BoxFuture<'_, Result<SessionId, FsError>> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let sent = self.inbox.send(Inbound::Connect { events, reply }).await;
            sent.map_err(|_| FsError::Unavailable)?;
            answer.await.map_err(|_| FsError::Unavailable)?
        })
    }

    fn call(&self, id: RequestId, request: MetaRequest) -> BoxFuture<'_, Result<MetaReply, FsError>> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let sent = self.inbox.send(Inbound::Call(Call { id, request, reply })).await;
            sent.map_err(|_| FsError::Unavailable)?;
            answer.await.map_err(|_| FsError::Unavailable)?
        })
    }
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().build().expect("the system has descriptors left for a runtime")
}

fn now(env: &Env) -> Now {
    Now { wall_ns: env.clock.wall_ns(), boot_ns: env.clock.boot_ns() }
}

/// Seals the log and brings the local store up to its end.
pub(crate) async fn recover(
    ledger: LedgerId,
    log: &Arc<dyn LedgerLog>,
    state: &Arc<dyn State>,
) -> Result<(Epoch, Seq), OwnerError> {
    const PAGE_BYTES: usize = 32 << 20;
    let log_error = |source| OwnerError::Log { ledger, source };
    let store_error = |source| OwnerError::Store { ledger, source };
    let epoch = Epoch(log.epoch().await.map_err(log_error)?.0 + 1);
    let tail = log.seal(epoch).await.map_err(log_error)?.seq;
    let mut applied = state.applied().map_err(store_error)?.seq;
    let seen = state.newest().map_err(store_error)?.seq;
    if tail < seen {
        return Err(OwnerError::RolledBack { ledger, seen, tail });
    }
    while applied < tail {
        let entries = log.read(Seq(applied.0 + 1), PAGE_BYTES).await.map_err(log_error)?;
        let damaged =
            |what: &str| OwnerError::Damaged { ledger, what: format!("batch {}: {what}", applied.0 + 1) };
        let last = entries.last().ok_or_else(|| damaged("missing from the log"))?;
        let position = Applied { seq: last.seq, epoch: last.epoch };
        let mut changes = std::collections::BTreeMap::new();
        for (seq, entry) in (applied.0 + 1..).zip(&entries) {
            if entry.seq.0 != seq {
                return Err(damaged("missing from the log"));
            }
            let batch = Batch::decode(&entry.batch).map_err(|error| damaged(&error.to_string()))?;
            changes.extend(batch.changes);
        }
        let mut pairs = changes.iter().map(|(key, value)| (key.as_slice(), value.as_deref()));
        state.apply(&mut pairs, position).map_err(store_error)?;
        applied = position.seq;
    }
    Ok((epoch, tail))
}

/// Appends, waiting for room for as long as the log has none.
async fn append(
    log: Arc<dyn LedgerLog>,
    epoch: Epoch,
    seq: Seq,
    bytes: Vec<u8>,
    to_owner: mpsc::UnboundedSender<Control>,
) -> Result<(), AppendError> {
    let mut tries: u32 = 0;
    loop {
        let result = log.append(epoch, seq, vec![bytes.clone()]).await;
        let Err(AppendError::Full(error)) = &result else { return result };
        tries += 1;
        if tries.is_multiple_of(FULL_RETRIES) {
            tracing::warn!(%error, "ledger log is full, waiting for room");
            // An owner that is gone drops this future as well.
            let _ = to_owner.send(Control::LogStuck);
        }
        tokio::time::sleep(FULL_PAUSE).await;
    }
}

/// An error with its causes, for people.
fn with_causes(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", with_causes(source)),
        None => error.to_string(),
    }
}

/// The result of the append under way; for ever pending if there is none.
async fn appended(appending: &mut Option<Appending>) -> Result<(), AppendError> {
    match appending {
        Some(appending) => (&mut appending.work).await,
        None => std::future::pending().await,
    }
}

fn store_thread(
    state: Arc<dyn State>,
    log: Arc<dyn LedgerLog>,
    mut jobs: mpsc::Receiver<StoreJob>,
    to_owner: mpsc::UnboundedSender<Control>,
) {
    let runtime = runtime();
    runtime.block_on(async {
        while let Some(job) = jobs.recv().await {
            let result = state.apply(&mut job.table.iter(), job.applied);
            if result.is_ok()
                && let Err(error) = log.trim(job.applied.seq).await
            {
                tracing::warn!(%error, "ledger log could not be trimmed");
            }
            if to_owner.send(Control::Stored { job, result }).is_err() {
                return;
            }
        }
    });
}

/// The owner thread's state.
struct Task {
    core: Core,
    env: Env,
    epoch: Epoch,
    shared: Arc<Shared>,
    log: Arc<dyn LedgerLog>,
    stores: mpsc::Sender<StoreJob>,
    appending: Option<Appending>,
    storing: bool,
    /// Frozen changes that wait until the last batch in them is durable.
    to_store: Option<(Arc<ChangeTable>, Seq)>,
    /// The batch up to which the local store is being written.
    storing_up_to: Seq,
    store_due: bool,
    pending: Vec<Pending>,
    waiting: HashMap<Ino, VecDeque<Call>>,
    sinks: HashMap<SessionId, Arc<dyn EventSink>>,
    stopping: bool,
    /// The log uses up its reserve.
    log_tight: bool,
    /// The log takes nothing at all.
    log_stuck: bool,
    /// The local store has no room. It is tried again with every tick.
    store_full: bool,
    to_self: mpsc::UnboundedSender<Control>,
}

impl Task {
    async fn run(
        mut self,
        mut calls: mpsc::Receiver<Inbound>,
        mut controls: mpsc::UnboundedReceiver<Control>,
    ) {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        self.send_batch();
        loop {
            let bounded = self.core.unstored_bytes() < UNSTORED_BYTES_MAX || self.store_full;
            let roomy = bounded && !self.stopping && !self.batch_is_full();
            tokio::select! {
                biased;
                result = appended(&mut self.appending) => self.end_append(result),
                Some(control) = controls.recv() => self.control(control),
                Some(inbound) = calls.recv(), if roomy => {
                    self.inbound(inbound);
                    for _ in 1..EXECUTE_MAX {
                        if self.batch_is_full() {
                            break;
                        }
                        let Ok(inbound) = calls.try_recv() else { break };
                        self.inbound(inbound);
                    }
                }
                _ = tick.tick() => self.tick(),
            }
            self.deliver_events();
            self.send_batch();
            if self.store_due && self.core.pending_bytes() == 0 {
                self.store_due = false;
                self.freeze();
            }
            if self.stopping && self.finished() {
                break;
            }
        }
    }

    /// The next batch must not outgrow what the log takes, whatever one more request adds to it.
    fn batch_is_full(&self) -> bool {
        self.core.pending_bytes() >= self.log.caps().batch_bytes_max / 4
    }

    fn finished(&mut self) -> bool {
        if self.halted() {
            return true;
        }
        if self.log_stuck || (self.store_full && !self.storing && self.appending.is_none()) {
            // The log has what was acknowledged; the next start goes on from there.
            return true;
        }
        if self.appending.is_some() || self.storing || self.to_store.is_some() {
            return false;
        }
        self.freeze();
        self.to_store.is_none()
    }

    fn halted(&self) -> bool {
        self.shared.halted.load(Ordering::Relaxed)
    }

    fn inbound(&mut self, inbound: Inbound) {
        self.shared.requests.fetch_add(1, Ordering::Relaxed);
        match inbound {
            Inbound::Call(call) if self.halted() => drop(call.reply.send(Err(FsError::Unavailable))),
            Inbound::Connect { reply, .. } if self.halted() => drop(reply.send(Err(FsError::Unavailable))),
            Inbound::Call(call) if self.pressure().refuses(&call.request) => {
                drop(call.reply.send(Err(FsError::NoSpace)));
            }
            Inbound::Call(call) => self.execute(call),
            Inbound::Connect { events, reply } => match self.core.connect(now(&self.env)) {
                Ok((session, after)) => {
                    self.sinks.insert(session, events);
                    self.pending.push(Pending { after, answer: Answer::Connected(reply, session) });
                }
                Err(error) => drop(reply.send(Err(error))),
            },
        }
    }

    fn execute(&mut self, call: Call) {
        match self.core.execute(call.id, &call.request, now(&self.env)) {
            Executed::Wait(ino) => self.waiting.entry(ino).or_default().push_back(call),
            Executed::Reply { reply, after } => {
                let released = match &call.request {
                    MetaRequest::Release { lease, .. } => Some(vec![lease.ino]),
                    MetaRequest::ReleaseAll { leases } => {
                        Some(leases.iter().map(|lease| lease.ino).collect())
                    }
                    MetaRequest::CloseSession => Some(self.waiting.keys().copied().collect()),
                    _ => None,
                };
                let pending = Pending { after, answer: Answer::Reply(call.reply, reply) };
                if after <= self.core.committed_seq() {
                    pending.send()
                } else if self.log_stuck {
                    pending.fail(FsError::Unavailable)
                } else {
                    self.pending.push(pending)
                }
                self.retry(released.unwrap_or_default());
            }
        }
    }

    /// Executes what waited for leases on these inodes, in the order of arrival.
    fn retry(&mut self, released: Vec<Ino>) {
        for ino in released {
            for call in self.waiting.remove(&ino).unwrap_or_default() {
                self.execute(call);
            }
        }
    }

    fn deliver_events(&mut self) {
        for (session, event) in self.core.take_events() {
            if let Some(sink) = self.sinks.get(&session) {
                sink.event(event);
            }
        }
    }

    /// Begins to append what was executed, unless an append is under way.
    fn send_batch(&mut self) {
        if self.appending.is_some() || self.halted() {
            return;
        }
        let Some((seq, batch)) = self.core.take_batch() else { return };
        let (replies, pending) = std::mem::take(&mut self.pending).into_iter().partition(|p| p.after == seq);
        self.pending = pending;
        let work = Box::pin(append(self.log.clone(), self.epoch, seq, batch.encode(), self.to_self.clone()));
        self.appending = Some(Appending { seq, replies, work });
        self.store_due |= self.core.unstored_bytes() > STORE_BYTES;
    }

    fn end_append(&mut self, result: Result<(), AppendError>) {
        let Some(Appending { seq, replies, .. }) = self.appending.take() else { return };
        if let Err(error) = result {
            replies.into_iter().for_each(|reply| reply.fail(FsError::Unavailable));
            return self.halt(&format!("the log failed: {}", with_causes(&error)));
        }
        self.log_stuck = false;
        self.core.committed(seq);
        self.shared.committed.store(seq.0, Ordering::Relaxed);
        replies.into_iter().for_each(Pending::send);
        let (ready, pending) = std::mem::take(&mut self.pending).into_iter().partition(|p| p.after <= seq);
        self.pending = pending;
        Vec::into_iter(ready).for_each(Pending::send);
        self.look_at_room();
        if !self.store_full {
            self.start_storing();
        }
    }

    /// Takes the changes of all batches so far, to be stored once the last of them is durable. Only called
    /// when no executed change is outside a batch.
    fn freeze(&mut self) {
        if self.to_store.is_some() || self.core.pending_bytes() > 0 {
            return;
        }
        if let Some(table) = self.core.freeze() {
            self.to_store = Some((table, self.core.last_batch()));
        }
        self.start_storing();
    }

    fn start_storing(&mut self) {
        if self.storing || self.to_store.as_ref().is_none_or(|(_, seq)| *seq > self.core.committed_seq()) {
            return;
        }
        let Some((table, seq)) = self.to_store.take() else { return };
        let job = StoreJob { table, applied: Applied { seq, epoch: self.epoch } };
        if self.stores.try_send(job).is_err() {
            self.halt("the store thread has ended");
            return;
        }
        self.storing = true;
        self.storing_up_to = seq;
    }

    fn control(&mut self, control: Control) {
        match control {
            Control::Stop => self.stopping = true,
            Control::Stored { result: Ok(()), .. } => {
                self.storing = false;
                self.store_full = false;
                self.shared.stored.store(self.storing_up_to.0, Ordering::Relaxed);
                self.core.thaw();
            }
            Control::Stored { job, result: Err(error @ StateError::NoSpace(_)) } => {
                tracing::warn!(%error, "local store has no room, waiting for some");
                self.storing = false;
                self.store_full = true;
                self.to_store = Some((job.table, job.applied.seq));
            }
            Control::Stored { result: Err(error), .. } => self.halt(&error.to_string()),
            Control::LogStuck => {
                self.log_stuck = self.appending.is_some();
                let waiting = self.appending.iter_mut().flat_map(|appending| appending.replies.drain(..));
                waiting.chain(self.pending.drain(..)).for_each(|pending| pending.fail(FsError::Unavailable));
            }
        }
    }

    /// Refuses everything from now on. A restart finds out from the log what was durable.
    fn halt(&mut self, why: &str) {
        tracing::error!(why, "ledger stops; restart the node to recover");
        self.shared.set_problem(Some(why.to_owned()));
        self.shared.halted.store(true, Ordering::Relaxed);
        self.storing = false;
        for pending in std::mem::take(&mut self.pending) {
            pending.fail(FsError::Unavailable);
        }
        for call in std::mem::take(&mut self.waiting).into_values().flatten() {
            let _ = call.reply.send(Err(FsError::Unavailable));
        }
    }

    fn tick(&mut self) {
        let released = self.core.expire_recalls(now(&self.env));
        self.retry(released);
        self.store_due = !self.halted();
        if self.halted() {
            return;
        }
        if self.store_full && !self.storing {
            self.start_storing();
        }
        if self.appending.is_none() {
            self.look_at_room();
        }
    }

    fn look_at_room(&mut self) {
        self.log_tight = self.log.room() == Room::Reserve;
        let pressed = self.pressure() > Pressure::None;
        if self.shared.no_space.swap(pressed, Ordering::Relaxed) != pressed {
            let problem = "the disk with its metadata is full; it goes on by itself when there is room";
            self.shared.set_problem(pressed.then(|| problem.to_owned()));
        }
    }

    fn pressure(&self) -> Pressure {
        let unstored = self.core.unstored_bytes();
        if self.log_stuck || (self.store_full && unstored >= UNSTORED_BYTES_MAX) {
            Pressure::Exhausted
        } else if self.log_tight || (self.store_full && unstored >= UNSTORED_BYTES_MAX / 2) {
            Pressure::Reserve
        } else {
            Pressure::None
        }
    }
}
