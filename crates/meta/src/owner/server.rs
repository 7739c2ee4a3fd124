//! [`Core`] behind a lock: requests in, batches to the log, replies out once they are durable, or early.
//!
//! A request is executed on the thread that brings it; a reply that needs no batch is sent at once. If no append is
//! running, the request's changes are appended: on the same thread if it may block, else on the ledger's *owner*
//! thread. Requests executed during an append share the next one, so the log's own speed sets the size of a group
//! commit. The *store* thread writes committed changes to the local store about once a second and trims the log.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use base::env::{Env, after_blocking, blocking_allowed, spawn_thread};
use base::watch::{self, Guard, Lock};
use base::{FsError, Ino, Lineage, Seq, SessionId};
use tokio::sync::{Notify, mpsc, oneshot};
use wire::BoxFuture;
use wire::message::Envelope;
use wire::meta::{Claim, EventSink, MetaReply, MetaRequest, MetaService, Resumed};
use wire::position::Position;
use wire::replica::{ReplicaReply, ReplicaRequest, ReplicaService};

use super::awake::AwakeClock;
use super::desk::{Answer, Appending, Call, Desk, Pending, StoreJob, appended};
use super::lease::RECALL_IDLE_NS;
use super::options::{OwnerOptions, OwnerStat};
use super::pressure::Pressure;
use super::recovery::{OwnerError, give_back, recover};
use super::replicas::{Replicas, StandbyStat};
use super::tenure::{RENEW_PAUSE, Tenure};
use super::writing::{append, store_changes};
use super::{Core, Executed, Now, Terms};
use crate::history::{History, Stretch};
use crate::log::{AppendError, LedgerLog, LogError, Room, Sealed};
use crate::state::{Applied, StateError};
use crate::store::Store;

/// The local store is written without waiting for the tick when this part of the allowed unstored bytes waits.
const STORE_PART: usize = 8;
const TICK: Duration = Duration::from_millis(500);
/// The most time between two ticks that counts for answers of clients.
const PAUSE_COUNTED_NS: u64 = RECALL_IDLE_NS / 2;

/// A running owner. Dropping it without [`Owner::stop`] is like a crash.
pub struct Owner {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Owner {
    /// Fences earlier owners, replays the log into the local store and starts serving.
    pub fn open(options: OwnerOptions) -> Result<Self, OwnerError> {
        let runtime = runtime();
        let ledger = options.ledger;
        let asked_ns = options.env.clock.boot_ns();
        let position = runtime.block_on(Self::take(&options))?;
        let (owner, background, store) = Self::assemble(options, position, asked_ns)?;
        let name = |what: &str| format!("{what}-{ledger}");
        let store = spawn_thread(&name("store"), move || self::runtime().block_on(store));
        let background = spawn_thread(&name("owner"), move || runtime.block_on(background));
        owner.threads.lock().expect("no holder of this lock panics").extend([background, store]);
        Ok(owner)
    }

    /// As [`Owner::open`], but on tasks of the present runtime, which end with it. So one thread can run a whole
    /// simulated node.
    pub async fn open_here(options: OwnerOptions) -> Result<Self, OwnerError> {
        let asked_ns = options.env.clock.boot_ns();
        let position = Self::take(&options).await?;
        let (owner, background, store) = Self::assemble(options, position, asked_ns)?;
        tokio::spawn(background);
        tokio::spawn(store);
        Ok(owner)
    }

    async fn take(options: &OwnerOptions) -> Result<(Sealed, Seq), OwnerError> {
        let OwnerOptions { ledger, log, state, env, vacant, .. } = options;
        recover((*ledger, log, state), env.random.next_u64(), *vacant).await
    }

    /// Makes an owner and the futures that must run for it: its own work and the local store's. It began to seal the log
    /// at `asked_ns`.
    #[allow(clippy::type_complexity, reason = "two futures and what they serve")]
    fn assemble(
        options: OwnerOptions,
        (sealed, tail): (Sealed, Seq),
        asked_ns: u64,
    ) -> Result<(Self, BoxFuture<'static, ()>, BoxFuture<'static, ()>), OwnerError> {
        let OwnerOptions {
            ledger,
            log,
            state,
            env,
            evidence,
            earlier_sessions,
            unstored_bytes_max,
            standby_grace,
            ..
        } = options;
        let history = History::read(&*state, ledger, tail);
        let history = history.map_err(|source| OwnerError::Store { ledger, source })?;
        let beginning = evidence.decide(&history, Lineage(env.random.next_u64()))?;
        let mut core = Core::new(ledger, Store::new(state), (sealed.epoch, tail));
        let damaged = |error: FsError| OwnerError::Damaged { ledger, what: error.to_string() };
        core.start(AwakeClock::default().time(&env, PAUSE_COUNTED_NS), beginning, earlier_sessions)
            .map_err(damaged)?;
        let (stores, store_jobs) = mpsc::channel(1);
        let (events, happened) = mpsc::unbounded_channel();
        let replicas = Arc::new(Replicas::new(env.clone(), core.bottom(), standby_grace));
        let storing = store_changes(core.bottom(), log.clone(), replicas.clone(), store_jobs, events.clone());
        let store = Box::pin(storing);
        let shared = Arc::new(Shared {
            env,
            sealed,
            tenure: Tenure::new(log.caps().lease, asked_ns),
            stretch: Stretch::after(history, beginning.lineage),
            log,
            replicas,
            in_doubt: AtomicBool::new(core.is_in_doubt()),
            desk: Lock::new(
                &format!("the owner of ledger {ledger}"),
                Desk::new(core, stores, unstored_bytes_max),
            ),
            work: Notify::new(),
            committed: AtomicU64::new(tail.0),
            stored: AtomicU64::new(tail.0),
            requests: AtomicU64::new(0),
            executions: AtomicU64::new(0),
            halted: AtomicBool::new(false),
            no_space: AtomicBool::new(false),
            no_space_count: AtomicU64::new(0),
            problem: Mutex::new(None),
            events,
        });
        let (running, renewing) = (shared.clone().run_background(happened), shared.clone().keep_lease());
        let background = Box::pin(async {
            tokio::select! {
                biased;
                () = running => {}
                () = renewing => {}
            }
        });
        Ok((Self { shared, threads: Mutex::default() }, background, store))
    }

    /// Finishes accepted requests, writes everything to the local store and ends the threads. Tasks end later, by
    /// themselves.
    pub fn stop(&self) {
        self.shared.desk().stopping = true;
        self.shared.work.notify_one();
        let threads = std::mem::take(&mut *self.threads.lock().expect("no holder of this lock panics"));
        for thread in threads {
            let _ = thread.join();
        }
    }

    /// Gives the ledger back, after [`Owner::stop`]: a standby may take it at once. Does nothing where no other node reaches
    /// the log. If it fails, standbys wait until the lease has ended.
    pub async fn resign(&self) {
        self.shared.tenure.end();
        give_back(&*self.shared.log, self.shared.sealed).await;
    }

    /// The history of the ledger up to its newest durable batch.
    pub fn history(&self) -> History {
        self.shared.stretch.history(self.shared.committed_seq())
    }

    /// Status of the owner.
    pub fn stat(&self) -> OwnerStat {
        OwnerStat {
            epoch: self.shared.sealed.epoch.0,
            committed_seq: self.shared.committed.load(Ordering::Relaxed),
            stored_seq: self.shared.stored.load(Ordering::Relaxed),
            requests: self.shared.requests.load(Ordering::Relaxed),
            executions: self.shared.executions.load(Ordering::Relaxed),
            halted: self.shared.halted(),
            no_space: self.shared.no_space.load(Ordering::Relaxed),
            no_space_count: self.shared.no_space_count.load(Ordering::Relaxed),
            in_doubt: self.shared.in_doubt.load(Ordering::Relaxed),
        }
    }

    /// Nodes that follow the ledger and were heard of lately.
    pub fn standbys(&self) -> Vec<StandbyStat> {
        self.shared.replicas.standbys()
    }

    /// Why the owner is halted or has no space, as text.
    pub fn problem(&self) -> Option<String> {
        self.shared.problem.lock().expect("no holder of this lock panics").clone()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // After a proper stop there is nothing left to end here.
        self.shared.desk().abandoned = true;
        self.shared.work.notify_one();
    }
}

impl MetaService for Owner {
    fn position(&self) -> Option<Position> {
        self.shared.stretch.position(self.shared.committed_seq())
    }

    fn connect(&self, events: Arc<dyn EventSink>) -> BoxFuture<'_, Result<SessionId, FsError>> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            self.shared.connect(events, reply);
            answer.await.map_err(|_| FsError::Disconnected)?
        })
    }

    fn resume(
        &self,
        session: SessionId,
        claim: Claim,
        events: Arc<dyn EventSink>,
    ) -> BoxFuture<'_, Result<Resumed, FsError>> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            self.shared.resume(session, &claim, events, reply)?;
            answer.await.map_err(|_| FsError::Disconnected)?
        })
    }

    fn call(&self, envelope: Envelope, request: MetaRequest) -> BoxFuture<'_, Result<MetaReply, FsError>> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let Envelope { request: id, caller, answer: time, refusable, .. } = envelope;
            self.shared.submit(Call { id, caller, answer: time, refusable, request, reply });
            answer.await.map_err(|_| FsError::Disconnected)?
        })
    }
}

impl ReplicaService for Owner {
    fn ask(&self, request: ReplicaRequest) -> BoxFuture<'_, Result<ReplicaReply, FsError>> {
        Box::pin(async move {
            let Shared { replicas, tenure, env, .. } = &*self.shared;
            replicas.ready(&request, self.shared.committed_seq()).await?;
            let is_owner = !self.shared.halted() && tenure.holds(env);
            if is_owner { replicas.ask(request) } else { Err(FsError::Disconnected) }
        })
    }
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().build().expect("the system has descriptors left for a runtime")
}

/// An error and its causes as text.
pub(super) fn with_causes(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", with_causes(source)),
        None => error.to_string(),
    }
}

/// State that all callers of the owner share.
struct Shared {
    env: Env,
    sealed: Sealed,
    tenure: Tenure,
    stretch: Stretch,
    log: Arc<dyn LedgerLog>,
    replicas: Arc<Replicas>,
    desk: Lock<Desk>,
    /// Wakes the background thread: for a batch to append, or the end.
    work: Notify,
    committed: AtomicU64,
    stored: AtomicU64,
    requests: AtomicU64,
    executions: AtomicU64,
    halted: AtomicBool,
    no_space: AtomicBool,
    no_space_count: AtomicU64,
    in_doubt: AtomicBool,
    /// Why the owner is halted or has no space.
    problem: Mutex<Option<String>>,
    events: mpsc::UnboundedSender<Event>,
}

/// A message to the background thread.
pub(super) enum Event {
    /// The local store has written a job's changes, or failed to.
    Stored(StoreJob, Result<(), StateError>),
    /// The log has been full or out of reach for a long time.
    LogStuck { full: bool },
}

const OTHER_OWNER: &str = "another owner has the ledger";

impl Shared {
    fn committed_seq(&self) -> Seq {
        Seq(self.committed.load(Ordering::Acquire))
    }

    /// Locks the desk. The holder must not wait for a disk: all callers wait for the holder.
    #[track_caller]
    fn desk(&self) -> Guard<'_, Desk> {
        self.desk.lock()
    }

    fn halted(&self) -> bool {
        self.halted.load(Ordering::Relaxed)
    }

    fn now(&self, desk: &Desk) -> Now {
        desk.awake.time(&self.env, PAUSE_COUNTED_NS)
    }

    /// Executes a request on the caller's thread. If that thread may block, it also appends the batch. If an append is
    /// running, the next batch carries this request.
    fn submit(self: &Arc<Self>, call: Call) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let mut desk = self.desk();
        if self.halted() || desk.stopping || !self.tenure.holds(&self.env) {
            let _ = call.reply.send(Err(FsError::Disconnected));
            return;
        }
        let now = self.now(&desk);
        let is_beat = matches!(call.request, MetaRequest::Heartbeat { .. });
        let noted = match is_beat {
            true => desk.core.note_beat(call.id.session, now),
            false => desk.core.note_request(call.id.session, now),
        };
        if let Err(error) = noted {
            let _ = call.reply.send(Err(error));
            return;
        }
        if call.is_again() && !self.is_roomy(&desk) {
            // Nothing else is executed before the session's claim: its client asks again.
            let _ = call.reply.send(Err(FsError::Unavailable));
            return self.after_requests(desk);
        }
        if is_beat
            || call.is_again()
            || (desk.backlog.is_empty() && self.is_serving(&desk) && self.is_roomy(&desk))
        {
            self.execute(&mut desk, call);
        } else {
            desk.backlog.push_back(call);
        }
        self.after_requests(desk);
    }

    fn connect(
        self: &Arc<Self>,
        events: Arc<dyn EventSink>,
        reply: oneshot::Sender<Result<SessionId, FsError>>,
    ) {
        let mut desk = self.desk();
        if self.halted() || desk.stopping {
            let _ = reply.send(Err(FsError::Disconnected));
            return;
        }
        let now = self.now(&desk);
        match desk.core.connect(events.is_elsewhere(), now) {
            Ok((session, after)) => {
                desk.sinks.insert(session, (events, 0));
                desk.pending.push(Pending { after, answer: Answer::Connected(reply, session) });
            }
            Err(error) => drop(reply.send(Err(error))),
        }
        self.after_requests(desk);
    }

    fn resume(
        self: &Arc<Self>,
        session: SessionId,
        claim: &Claim,
        events: Arc<dyn EventSink>,
        reply: oneshot::Sender<Result<Resumed, FsError>>,
    ) -> Result<(), FsError> {
        let mut desk = self.desk();
        if self.halted() || desk.stopping || !self.tenure.holds(&self.env) {
            return Err(FsError::Disconnected);
        }
        let now = self.now(&desk);
        let (resumed, after) = desk.core.resume(session, claim, now)?;
        // The client counts the events since the first message of its claim.
        let before = desk.sinks.get(&session).filter(|_| !claim.begins).map_or(0, |(_, count)| *count);
        desk.sinks.insert(session, (events, before));
        let pending = Pending { after, answer: Answer::Resumed(reply, resumed) };
        if after <= desk.core.committed_seq() {
            pending.send()
        } else {
            desk.pending.push(pending)
        }
        self.drain_backlog(&mut desk);
        self.after_requests(desk);
        Ok(())
    }

    /// Whether requests may be executed: this is the owner for certain, and no client has yet to claim its leases.
    fn is_serving(&self, desk: &Desk) -> bool {
        self.tenure.holds(&self.env) && !desk.core.is_recovering()
    }

    /// Whether another request may be executed: the next batch must not outgrow the log's limit with it, and the
    /// changes in memory must stay bounded.
    fn is_roomy(&self, desk: &Desk) -> bool {
        let bounded = desk.core.pending_bytes() < self.log.caps().entry_bytes_max / 4
            && desk.core.unstored_bytes() < desk.unstored_bytes_max;
        // A request that would wait for a full disk is refused, not delayed.
        bounded || desk.pressure() == Pressure::Exhausted
    }

    fn execute(&self, desk: &mut Desk, call: Call) {
        let is_done = call.is_again() || desk.core.was_executed(call.id);
        if desk.pressure().refuses(&call.request) && !is_done {
            let _ = call.reply.send(Err(FsError::NoSpace));
            return;
        }
        self.executions.fetch_add(1, Ordering::Relaxed);
        let now = self.now(desk);
        let terms = Terms { caller: call.caller.as_ref(), answer: call.answer };
        match desk.core.execute(call.id, terms, &call.request, now) {
            // Others wait for a name that this session does not forget before it has an answer: they might wait for one another.
            Executed::Wait(_)
                if call.refusable && desk.core.must_forget(call.id.session, &call.request.changed_dirs()) =>
            {
                let _ = call.reply.send(Err(FsError::Retry));
                let released = desk.core.take_gone();
                self.retry(desk, released);
            }
            Executed::Wait(wait) => {
                if !call.refusable {
                    desk.refuse_in_the_way_of(&wait);
                }
                let (ino, _) = wait.first().expect("there is a reason to wait");
                desk.waiting.entry(*ino).or_default().push_back((call, wait));
                let released = desk.core.take_gone();
                self.retry(desk, released);
            }
            Executed::Reply { mut reply, after, early } => {
                desk.count_events(call.id.session, &mut reply);
                let mut released = match &call.request {
                    MetaRequest::Release { lease, .. } => vec![lease.ino],
                    MetaRequest::ReleaseAll { leases } => leases.iter().map(|lease| lease.ino).collect(),
                    MetaRequest::Forgot { dir, .. } => vec![*dir],
                    MetaRequest::CloseSession => desk.waiting.keys().copied().collect(),
                    _ => Vec::new(),
                };
                match early.filter(|_| !desk.log_stuck && self.tenure.holds(&self.env)) {
                    Some(early) => drop(call.reply.send(Ok(early.reply(reply, after)))),
                    None => desk.answer_when_durable(after, Answer::Reply(call.reply, reply)),
                }
                released.extend(desk.core.take_gone());
                self.retry(desk, released);
            }
        }
    }

    /// Executes the requests that waited for releases on these inodes, in the order of arrival, each once nothing is
    /// left that it waits for.
    fn retry(&self, desk: &mut Desk, released: Vec<Ino>) {
        for ino in released {
            for (call, wait) in desk.waiting.remove(&ino).unwrap_or_default() {
                match desk.core.awaits(call.id.session, &wait, self.now(desk)) {
                    Some(ino) => desk.waiting.entry(ino).or_default().push_back((call, wait)),
                    None => self.execute(desk, call),
                }
            }
        }
    }

    /// Sends recalls to sessions, and starts an append of the executed changes if none is running.
    fn after_requests(self: &Arc<Self>, mut desk: Guard<'_, Desk>) {
        desk.deliver_events();
        if desk.appending {
            return;
        }
        let (now_ns, is_news) = (self.env.clock.boot_ns(), desk.unawaited_since_ns.is_none());
        let Some(due_ns) = desk.append_due_ns(now_ns) else { return };
        if due_ns > now_ns {
            // The background thread appends when it is time.
            if is_news {
                self.work.notify_one();
            }
            return;
        }
        if !blocking_allowed() {
            self.work.notify_one();
            return;
        }
        let appending = self.begin_append(&mut desk);
        drop(desk);
        self.append_here(appending);
    }

    /// Appends on this thread, which may block.
    fn append_here(self: &Arc<Self>, appending: Option<Appending>) {
        let Some(mut appending) = appending else { return };
        match appending.work.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => self.end_append(appending.seq, result),
            Poll::Pending => {
                // The log completes later, or has no room: the background thread waits for it.
                self.desk().handed_over = Some(appending);
                self.work.notify_one();
            }
        }
    }

    /// Starts the append of the next batch: on this thread after it has answered its own request, if it may block.
    fn append_next(self: &Arc<Self>) {
        let shared = self.clone();
        let next = move || {
            let appending = shared.begin_append(&mut shared.desk());
            shared.append_here(appending);
        };
        if after_blocking(next).is_err() {
            self.work.notify_one();
        }
    }

    /// Takes the executed changes as the next batch, unless an append is running.
    fn begin_append(&self, desk: &mut Desk) -> Option<Appending> {
        if let Some(appending) = desk.handed_over.take() {
            return Some(appending);
        }
        if desk.appending || self.halted() {
            return None;
        }
        let batch = desk.core.take_batch(self.log.caps().entry_bytes_max)?;
        desk.appending = true;
        desk.unawaited_since_ns = None;
        if desk.store_due || desk.core.unstored_bytes() > desk.unstored_bytes_max / STORE_PART {
            self.freeze(desk);
        }
        let seq = batch.last();
        let work = Box::pin(append(self.log.clone(), self.sealed, batch, self.events.clone()));
        Some(Appending { seq, work })
    }

    fn end_append(self: &Arc<Self>, seq: Seq, result: Result<(), AppendError>) {
        let mut desk = self.desk();
        desk.appending = false;
        if let Err(error) = result {
            let what = match &error {
                AppendError::Fenced(_) => OTHER_OWNER,
                AppendError::RolledBack { .. } => "restore the newer log",
                _ => "the log failed",
            };
            return self.halt(&mut desk, &format!("{what}: {}", with_causes(&error)));
        }
        desk.log_stuck = false;
        self.look_at_room(&mut desk);
        desk.core.committed(seq);
        self.committed.store(seq.0, Ordering::Release);
        self.in_doubt.store(desk.core.is_in_doubt(), Ordering::Relaxed);
        self.drain_backlog(&mut desk);
        desk.deliver_events();
        self.start_storing(&mut desk);
        let ready = desk.take_ready();
        let now_ns = self.env.clock.boot_ns();
        let (due_ns, stopping) = (desk.append_due_ns(now_ns), desk.stopping);
        drop(desk);
        ready.into_iter().for_each(Pending::send);
        match due_ns {
            Some(due_ns) if due_ns <= now_ns => self.append_next(),
            Some(_) => self.work.notify_one(),
            None => {}
        }
        if stopping {
            self.work.notify_one();
        }
    }

    fn drain_backlog(&self, desk: &mut Desk) {
        while self.is_serving(desk) && self.is_roomy(desk) && !self.halted() {
            let Some(call) = desk.backlog.pop_front() else { return };
            self.execute(desk, call);
        }
    }

    /// Appends batches that no caller's thread appends, expires recalls and feeds the local store.
    async fn run_background(self: Arc<Self>, mut events: mpsc::UnboundedReceiver<Event>) {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut appending: Option<Appending> = None;
        loop {
            let mut due = None;
            if appending.is_none() {
                let mut desk = self.desk();
                let now_ns = self.env.clock.boot_ns();
                match desk.append_due_ns(now_ns).filter(|due_ns| *due_ns > now_ns) {
                    Some(due_ns) if desk.handed_over.is_none() => {
                        due = Some(Duration::from_nanos(due_ns - now_ns));
                    }
                    _ => appending = self.begin_append(&mut desk),
                }
            }
            tokio::select! {
                biased;
                result = appended(&mut appending) => {
                    let seq = appending.take().expect("it has just ended").seq;
                    self.end_append(seq, result);
                }
                Some(event) = events.recv() => match event {
                    Event::Stored(job, result) => self.stored(job, result),
                    Event::LogStuck { full } => self.log_is_stuck(full, appending.is_some()),
                },
                () = self.work.notified(), if appending.is_none() => {}
                () = tokio::time::sleep(due.unwrap_or_default()), if due.is_some() => {}
                _ = tick.tick() => self.tick(),
            }
            if self.is_finished(appending.is_some()) {
                self.desk().stores = None;
                return;
            }
        }
    }

    /// After a stop was requested: whether all accepted changes are in the local store.
    fn is_finished(&self, appending: bool) -> bool {
        let mut desk = self.desk();
        // The log does not answer: the next owner finds what it took.
        let is_over = self.halted() || !self.tenure.holds(&self.env);
        if desk.abandoned || (desk.stopping && is_over) {
            desk.fail_all();
            return true;
        }
        let full =
            desk.log_stuck || (desk.store_full && desk.storing.is_none() && desk.core.pending_bytes() == 0);
        if desk.stopping && full && (desk.log_stuck || !(appending || desk.appending)) {
            // The log has all changes that a client takes for durable; the next start continues from there.
            desk.fail_all();
            return true;
        }
        if !desk.stopping || appending || desk.appending || desk.core.pending_bytes() > 0 {
            return false;
        }
        self.freeze(&mut desk);
        if desk.storing.is_some() || desk.to_store.is_some() {
            return false;
        }
        desk.fail_all();
        true
    }

    /// Takes the changes of all batches so far, to be stored once the last of these batches is durable. Does nothing
    /// while an executed change is in no batch yet.
    fn freeze(&self, desk: &mut Desk) {
        if desk.to_store.is_some() || desk.storing.is_some() || desk.core.pending_bytes() > 0 {
            return;
        }
        desk.store_due = false;
        if let Some(table) = desk.core.freeze() {
            desk.to_store = Some((table, desk.core.last_batch()));
        }
        self.start_storing(desk);
    }

    fn start_storing(&self, desk: &mut Desk) {
        if !desk.store_full {
            self.store_now(desk);
        }
    }

    fn store_now(&self, desk: &mut Desk) {
        if desk.storing.is_some()
            || desk.to_store.as_ref().is_none_or(|(_, seq)| *seq > desk.core.committed_seq())
        {
            return;
        }
        let Some((table, seq)) = desk.to_store.take() else { return };
        let job = StoreJob { table, applied: Applied { seq, epoch: self.sealed.epoch } };
        let sent = desk.stores.as_ref().is_some_and(|stores| stores.try_send(job).is_ok());
        if !sent {
            return self.halt(desk, "the store thread has ended");
        }
        desk.storing = Some(seq);
    }

    fn stored(self: &Arc<Self>, job: StoreJob, result: Result<(), StateError>) {
        let mut desk = self.desk();
        match result {
            Ok(()) => desk.store_full = false,
            Err(error @ StateError::NoSpace(_)) => {
                tracing::warn!(%error, "local store has no room, waiting for some");
                desk.store_full = true;
                desk.storing = None;
                desk.to_store = Some((job.table, job.applied.seq));
                self.look_at_room(&mut desk);
                self.drain_backlog(&mut desk);
                return self.after_requests(desk);
            }
            Err(error) => return self.halt(&mut desk, &error.to_string()),
        }
        if let Some(seq) = desk.storing.take() {
            self.stored.store(seq.0, Ordering::Relaxed);
        }
        desk.core.thaw();
        self.drain_backlog(&mut desk);
        self.after_requests(desk);
    }

    /// Refuses all requests from now on. A restart reads from the log what was durable.
    fn halt(&self, desk: &mut Desk, why: &str) {
        tracing::error!(why, "ledger stops; restart the node to recover");
        self.set_problem(Some(why.to_owned()));
        self.halted.store(true, Ordering::Relaxed);
        desk.storing = None;
        desk.fail_all();
        self.work.notify_one();
    }

    /// Gives signs of life to the log, if other nodes can take the ledger.
    async fn keep_lease(self: Arc<Self>) {
        let Some(term) = self.tenure.term else { return std::future::pending().await };
        loop {
            let asked_ns = self.env.clock.boot_ns();
            let pause = match tokio::time::timeout(term, self.log.renew(self.sealed)).await {
                Ok(Ok(())) => {
                    self.tenure.renewed(asked_ns);
                    let mut desk = self.desk();
                    self.drain_backlog(&mut desk);
                    self.after_requests(desk);
                    term / 3
                }
                Ok(Err(LogError::Fenced(_))) => {
                    self.halt(&mut self.desk(), OTHER_OWNER);
                    return std::future::pending().await;
                }
                // The log does not answer: nothing is executed once the lease is over.
                Ok(Err(_)) | Err(_) => RENEW_PAUSE,
            };
            tokio::time::sleep(pause).await;
        }
    }

    fn tick(self: &Arc<Self>) {
        if self.log.room() == Room::Reserve && !self.desk().appending {
            let _watched = watch::call("find room for a ledger's log");
            self.log.refill();
        }
        let mut desk = self.desk();
        if self.halted() {
            return;
        }
        let boot_ns = self.env.clock.boot_ns();
        let (committed, is_appending) = (self.committed_seq().0, desk.appending);
        desk.awake.tick(boot_ns, committed, is_appending, PAUSE_COUNTED_NS);
        let now = self.now(&desk);
        if let Err(error) = desk.core.expire_sessions(now) {
            tracing::error!(%error, "sessions that are gone do not end");
        }
        let released = desk.core.expire_recalls(now);
        self.retry(&mut desk, released);
        if !self.tenure.holds(&self.env) {
            let backlog = desk.backlog.drain(..).map(|call| call.reply);
            backlog.for_each(|reply| drop(reply.send(Err(FsError::Disconnected))));
            desk.pending.drain(..).for_each(|pending| pending.fail(FsError::Disconnected));
        }
        self.drain_backlog(&mut desk);
        desk.store_due = true;
        if desk.store_full {
            self.store_now(&mut desk);
        }
        self.look_at_room(&mut desk);
        self.freeze(&mut desk);
        self.after_requests(desk);
    }

    /// Fails the requests that wait for the log. The log is retried until it takes the batch.
    fn log_is_stuck(self: &Arc<Self>, full: bool, appending: bool) {
        let mut desk = self.desk();
        if !full && self.tenure.term.is_some() {
            // Clients ask again: this owner, or the one that reaches the log.
            return desk.pending.drain(..).for_each(|pending| pending.fail(FsError::Disconnected));
        }
        desk.log_stuck = appending;
        desk.pending.drain(..).for_each(|pending| pending.fail(FsError::Unknown));
        self.look_at_room(&mut desk);
        self.drain_backlog(&mut desk);
        self.after_requests(desk);
    }

    fn look_at_room(&self, desk: &mut Desk) {
        desk.log_tight = self.log.room() == Room::Reserve;
        let pressed = desk.pressure() > Pressure::None;
        if self.no_space.swap(pressed, Ordering::Relaxed) != pressed {
            self.no_space_count.fetch_add(u64::from(pressed), Ordering::Relaxed);
            let problem = "a disk with its metadata is full, so creating and writing fail with ENOSPC; free some space \
                           on that disk, or delete files here; it goes on by itself when there is room";
            self.set_problem(pressed.then(|| problem.to_owned()));
        }
    }

    fn set_problem(&self, problem: Option<String>) {
        *self.problem.lock().expect("no holder of this lock panics") = problem;
    }
}
