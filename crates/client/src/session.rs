//! The client's registration with the owner: request ids, extent ids, running reads, heartbeats.
//!
//! When another owner takes over, requests without an answer wait until the session is bound to it, and go there under
//! their old ids. So each is executed once, whichever owner did it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::env::Clock;
use base::{ExtentId, FsError, Seq, SessionId};
use tokio::sync::{Mutex as AsyncMutex, Semaphore};
use wire::message::{AnswerTime, Caller, Envelope};
use wire::meta::{EventSink, MetaReply, MetaRequest, MetaService, RequestId, SLOTS_MAX};

use crate::bond::{Bond, Bonds};
use crate::early::{Arrival, Change, EarlyAnswers, KEPT_MAX};
use crate::term::Term;

/// Requests under way at once that never wait for other clients: see [`is_prompt`].
const PROMPT_SLOTS: u32 = 32;
/// Other requests under way at once.
const SLOTS: u32 = 64;
// Requests that began while there was room for another kept change may all be kept.
const _: () = assert!(PROMPT_SLOTS + 2 * SLOTS + KEPT_MAX as u32 <= SLOTS_MAX);

/// Pause while events come that the owner sent before its answer.
pub(crate) const EVENTS_PAUSE: Duration = Duration::from_millis(10);
/// A caller has noted an answer this long after it came.
const NOTED_WITHIN: Duration = Duration::from_secs(1);
/// Answers that an early one depends on arrive at the same time, unless one was lost.
const ARRIVES_WITHIN: Duration = Duration::from_millis(20);
/// Pause before an owner that cannot answer is asked again.
const OWNER_PAUSE: Duration = Duration::from_millis(200);

/// Slots that requests take one after another. The one that is free for longest is taken: the owner keeps the last answer of
/// each, and the next owner learns from these answers what the client may not have noted yet.
struct Lane {
    /// One for each request under way.
    permits: Semaphore,
    slots: Mutex<Slots>,
}

struct Slots {
    /// With the number of the last request in each.
    free: VecDeque<(u32, u64)>,
    /// The first number that was never taken.
    next: u32,
}

impl Lane {
    fn new(slots: std::ops::Range<u32>) -> Self {
        let permits = Semaphore::new(slots.len());
        let next = slots.end;
        Self { permits, slots: Mutex::new(Slots { free: slots.map(|slot| (slot, 0)).collect(), next }) }
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().expect("no holder of this lock panics")
    }

    /// A slot for the next request, and its number there. There are more slots than permits while changes are kept.
    fn take(&self) -> (u32, u64) {
        let mut slots = self.slots();
        let (slot, seq) = slots.free.pop_front().unwrap_or_else(|| {
            slots.next += 1;
            (slots.next - 1, 0)
        });
        (slot, seq + 1)
    }

    fn put_back(&self, slot: u32, seq: u64) {
        self.slots().free.push_back((slot, seq));
    }
}

/// Whether the owner executes the request without waiting for another client: answers to its events, and all that writing back
/// under a lease needs. While all other slots wait for a client, that one may wait for such a request of this client.
fn is_prompt(request: &MetaRequest) -> bool {
    use MetaRequest as R;
    matches!(
        request,
        R::Release { .. } | R::ReleaseAll { .. } | R::Forgot { .. } | R::Commit { .. } | R::AllocExtents
    )
}

pub(crate) struct Session {
    /// The owner.
    pub(crate) bonds: Arc<Bonds>,
    /// How long its grants hold.
    pub(crate) term: Arc<Term>,
    /// How long a request waits for an owner.
    owner_patience: Duration,
    requests: Lane,
    /// Slots of their own, because requests may wait for other clients, and those for these.
    prompt: Lane,
    /// Extent ids that were not used yet, and the session that they belong to.
    ids: AsyncMutex<(SessionId, std::ops::Range<u64>)>,
    /// The newest ledger version that a heartbeat reported.
    version: AtomicU64,
    /// Bytes of content, and those of them on drives, as of the last heartbeat.
    used_bytes: AtomicU64,
    drive_bytes: AtomicU64,
    /// Ledger versions at which running reads started, with the number of reads.
    reads: Mutex<BTreeMap<u64, u64>>,
    /// The last request of each slot, and when its answer came.
    last: Mutex<BTreeMap<u32, (u64, Option<u64>)>>,
    /// Changes of names may be answered before they are durable.
    is_early: AtomicBool,
    /// Those that were, in slots of `requests`.
    early: EarlyAnswers,
    /// Held by the task that waits until they are durable.
    settling: AsyncMutex<()>,
    /// How often some were lost, and how often that was told.
    lost: AtomicU64,
    lost_told: AtomicU64,
}

/// Gives a slot back when the request is over or given up, unless the change in it is kept.
struct SlotGuard<'a> {
    session: &'a Session,
    lane: &'a Lane,
    slot: u32,
    seq: u64,
    is_kept: bool,
}

impl SlotGuard<'_> {
    fn note_answer(&self) {
        let now_ns = self.session.term.now_ns();
        self.session.last().insert(self.slot, (self.seq, Some(now_ns)));
    }

    /// The slot stays taken.
    fn keep(mut self) {
        self.note_answer();
        self.is_kept = true;
    }
}

impl Drop for SlotGuard<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.note_answer();
            self.lane.put_back(self.slot, self.seq);
        }
    }
}

/// Gives back the slot of a change if its caller does not wait for its use any more, and the owner is left.
struct Waiting<'a> {
    session: &'a Session,
    change: Option<(u32, u64)>,
    bond: u64,
    count: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some((slot, seq)) = self.change
            && self.session.early.abandon(self.bond, self.count)
        {
            self.session.requests.put_back(slot, seq);
        }
    }
}

/// Keeps the extents of maps that are known now from being deleted while a read uses them.
pub(crate) struct ReadGuard<'a> {
    session: &'a Session,
    version: u64,
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        let mut reads = self.session.reads.lock().expect("no holder of this lock panics");
        if let Some(count) = reads.get_mut(&self.version) {
            *count -= 1;
            if *count == 0 {
                reads.remove(&self.version);
            }
        }
    }
}

/// For whom a request is made, and how.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Asker<'a> {
    /// The user whose rights the owner checks.
    pub(crate) caller: Option<&'a Caller>,
    /// See [`crate::Client::refusable`].
    pub(crate) refusable: bool,
}

impl Session {
    /// Registers with an owner. `events` gets the events of this bond.
    pub(crate) async fn open(
        owner: Arc<dyn MetaService>,
        events: Arc<dyn EventSink>,
        clock: Arc<dyn Clock>,
        owner_patience: Duration,
    ) -> Result<Self, FsError> {
        let term = Term::new(clock);
        let sent_ns = term.now_ns();
        let session = owner.connect(events).await?;
        term.bound(Bonds::FIRST, sent_ns);
        Ok(Self {
            bonds: Bonds::new(session, owner),
            term,
            owner_patience,
            requests: Lane::new(PROMPT_SLOTS..PROMPT_SLOTS + SLOTS),
            prompt: Lane::new(0..PROMPT_SLOTS),
            ids: AsyncMutex::new((session, 0..0)),
            version: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
            drive_bytes: AtomicU64::new(0),
            reads: Mutex::new(BTreeMap::new()),
            last: Mutex::new(BTreeMap::new()),
            is_early: AtomicBool::new(false),
            early: EarlyAnswers::new(Bonds::FIRST),
            settling: AsyncMutex::new(()),
            lost: AtomicU64::new(0),
            lost_told: AtomicU64::new(0),
        })
    }

    /// Waits until the leases that the client holds are certain.
    pub(crate) async fn be_certain(&self) -> Result<(), FsError> {
        while self.term.is_over() {
            self.heartbeat().await?;
            if self.term.is_over() {
                // Events that the owner sent before are on their way.
                tokio::time::sleep(EVENTS_PAUSE).await;
            }
        }
        Ok(())
    }

    /// Sends a request on behalf of a user, or of the client itself. A bounded number is under way; further callers wait.
    ///
    /// # Errors
    /// `Unavailable` if no owner was asked, and `Unknown` if one was, without an answer. Others are the owner's.
    pub(crate) async fn call(&self, asker: Asker<'_>, request: MetaRequest) -> Result<MetaReply, FsError> {
        let lane = if is_prompt(&request) { &self.prompt } else { &self.requests };
        let may_be_early = self.is_early.load(Ordering::Relaxed) && request.may_be_early();
        self.send(lane, (asker, may_be_early), || request.clone()).await
    }

    async fn send(
        &self,
        lane: &Lane,
        (asker, may_be_early): (Asker<'_>, bool),
        request: impl Fn() -> MetaRequest,
    ) -> Result<MetaReply, FsError> {
        let _permit = lane.permits.acquire().await.map_err(|_| FsError::Unavailable)?;
        let (slot, seq) = lane.take();
        let slot_guard = || SlotGuard { session: self, lane, slot, seq, is_kept: false };
        let mut guard = Some(slot_guard());
        self.last().insert(slot, (seq, None));
        let mut was_left = false;
        loop {
            let is_early = may_be_early && self.early.has_room();
            let time = if is_early { AnswerTime::Early } else { AnswerTime::Durable };
            let mut early = None;
            let keep = |bond: u64, answer: &mut Result<MetaReply, FsError>| {
                let Ok(MetaReply::Early { reply, after, count, first }) = answer else { return };
                let (after, count) = (*after, *count);
                if let Some(first) = *first {
                    guard.take().into_iter().for_each(SlotGuard::keep);
                    let (caller, request) = (asker.caller.cloned(), request());
                    let mut inos = request.inos();
                    inos.push(first.ino);
                    inos.extend(reply.iter().flat_map(MetaReply::attrs).map(|attr| attr.ino));
                    let change =
                        Change { slot, seq, caller, request, after, count, first, inos, is_abandoned: false };
                    self.early.keep(change);
                }
                early = Some((bond, count, after));
                *answer = std::mem::replace(&mut **reply, Ok(MetaReply::Done));
            };
            let answer = self.ask((slot, seq), (asker, time), &request, keep).await;
            let Some((bond, count, after)) = early else {
                // It may have been executed by the owner that was left.
                let is_refused_again = was_left && answer == Err(FsError::Unavailable);
                return if is_refused_again { Err(FsError::Unknown) } else { answer };
            };
            let waiting =
                Waiting { session: self, change: guard.is_none().then_some((slot, seq)), bond, count };
            let arrival = self.arrival(bond, count, after).await?;
            // The slot belongs to what is kept, or is taken back below.
            std::mem::forget(waiting);
            if arrival == Arrival::Complete {
                return answer;
            }
            guard.get_or_insert_with(slot_guard);
            was_left = true;
        }
    }

    /// Waits until all answers are here that an early one depends on. If one does not come, all must be durable.
    async fn arrival(&self, bond: u64, count: u64, after: Seq) -> Result<Arrival, FsError> {
        let began = tokio::time::Instant::now();
        loop {
            let arrival = tokio::time::timeout(ARRIVES_WITHIN, self.early.arrival(bond, count)).await;
            if let Ok(arrival) = arrival {
                return Ok(arrival);
            }
            // The answer tells what is durable.
            let asked = Box::pin(self.heartbeat()).await;
            let owner = self.bonds.with(|present| present.owner.clone().filter(|_| present.number == bond));
            let position = owner.and_then(|owner| owner.position());
            if position.is_some_and(|position| position.seq >= after) {
                self.early.complete(bond, count);
            } else if began.elapsed() > self.owner_patience {
                asked?;
                return Err(FsError::Unknown);
            }
        }
    }

    /// Asks one owner after the other until there is an answer. `take` gets it, with the number of
    /// the bond, before its owner can be left.
    async fn ask(
        &self,
        (slot, seq): (u32, u64),
        (Asker { caller, refusable }, time): (Asker<'_>, AnswerTime),
        request: &impl Fn() -> MetaRequest,
        mut take: impl FnMut(u64, &mut Result<MetaReply, FsError>),
    ) -> Result<MetaReply, FsError> {
        let (mut asked, mut tries) = (None, 0);
        let began = tokio::time::Instant::now();
        loop {
            let bound = self.bonds.wait_for(|bond| bond.owner.is_some());
            let Ok(Bond { number, session, owner: Some(owner), is_last }) =
                tokio::time::timeout(self.owner_patience, bound).await
            else {
                return Err(if asked.is_some() { FsError::Unknown } else { FsError::Unavailable });
            };
            // The session that sent the request has ended: nobody knows whether it was executed.
            if asked.replace(session).is_some_and(|asked| asked != session) {
                return Err(FsError::Unknown);
            }
            tries += 1;
            let id = RequestId { session, slot, seq };
            let is_left = |now: &Bond| now.number != number;
            let envelope = Envelope { caller: caller.cloned(), answer: time, refusable, ..id.into() };
            let mut answer = tokio::select! {
                biased;
                answer = owner.call(envelope, request()) => answer,
                _ = self.bonds.wait_for(is_left) => continue,
            };
            // What an owner granted is void once it is left.
            let in_time = |now: &Bond| {
                let in_time = answer != Err(FsError::Disconnected) && !is_left(now);
                if in_time {
                    take(number, &mut answer);
                }
                in_time
            };
            if self.bonds.with(in_time) {
                let is_refused_again = tries > 1 && answer == Err(FsError::Unavailable);
                // An owner that refuses a repetition may not know what became of the first one.
                return if is_refused_again { Err(FsError::Unknown) } else { answer };
            }
            if is_last || began.elapsed() > self.owner_patience {
                return Err(FsError::Unknown);
            }
            // It may also be the owner again, once it reaches its log.
            let left = self.bonds.wait_for(|now| is_left(now) || now.is_last);
            let _ = tokio::time::timeout(OWNER_PAUSE, left).await;
        }
    }

    /// Sets whether changes of names and attributes are answered before they are durable.
    pub(crate) fn set_early(&self, is_early: bool) {
        self.is_early.store(is_early, Ordering::Relaxed);
    }

    /// Whether the client keeps many changes: then it calls [`Session::settle`].
    pub(crate) fn is_due(&self) -> bool {
        self.early.is_due() && self.settling.try_lock().is_ok()
    }

    /// Waits until the changes that were answered so far are durable.
    ///
    /// # Errors
    /// Those of requests. The changes stay, and the next call tries again.
    pub(crate) async fn settle(&self) -> Result<(), FsError> {
        let lost = self.lost.load(Ordering::Acquire);
        let number = self.bonds.with(|bond| bond.number);
        let Some(Change { count: up_to, .. }) = self.early.newest(u64::MAX) else { return Ok(()) };
        let _settling = self.settling.lock().await;
        let began = tokio::time::Instant::now();
        while let Some(owner) = self.bonds.with(|bond| bond.owner.clone().filter(|_| bond.number == number)) {
            self.release_durable();
            let Some(newest) = self.early.newest(up_to) else { return Ok(()) };
            let Change { slot, seq, caller, request, count, .. } = newest;
            let session = self.bonds.with(|bond| bond.session);
            let id = RequestId { session, slot, seq };
            let is_left = |now: &Bond| now.number != number;
            // The answer to a repetition comes when the request is durable, and with it all before it.
            let answer = tokio::select! {
                biased;
                answer = owner.call(Envelope { caller, ..id.into() }, request) => answer,
                _ = self.bonds.wait_for(is_left) => break,
            };
            match answer {
                Ok(_) => self.bonds.with(|bond| {
                    if !is_left(bond) {
                        self.release(|change| change.count <= count);
                        self.early.complete(number, count);
                    }
                }),
                // The slot may be in use again.
                Err(_) if self.bonds.with(is_left) => break,
                Err(FsError::Disconnected) if began.elapsed() < self.owner_patience => {
                    let left = self.bonds.wait_for(|now| is_left(now) || now.is_last);
                    let left = tokio::time::timeout(OWNER_PAUSE, left).await;
                    if left.is_ok_and(|now| !is_left(&now)) {
                        return Err(FsError::Unknown);
                    }
                }
                Err(FsError::Disconnected) => return Err(FsError::Unknown),
                Err(error) => return Err(error),
            }
        }
        // Before the client is bound to the next owner, that one has made them durable.
        let bound = self.bonds.wait_for(|bond| bond.owner.is_some());
        tokio::time::timeout(self.owner_patience, bound).await.map_err(|_| FsError::Unknown)?;
        if self.lost.load(Ordering::Acquire) == lost { Ok(()) } else { Err(FsError::Io) }
    }

    /// Changes that the owner answered early are lost.
    pub(crate) fn note_lost(&self) {
        self.lost.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether changes were lost since the last call.
    pub(crate) fn take_lost(&self) -> bool {
        let lost = self.lost.load(Ordering::Acquire);
        self.lost_told.swap(lost, Ordering::AcqRel) != lost
    }

    /// Releases changes that are durable by now, unless a task waits for that.
    pub(crate) fn release_settled(&self) {
        // A slot must not be used again while its request is repeated.
        if let Ok(_settling) = self.settling.try_lock() {
            self.release_durable();
        }
    }

    /// Releases changes of which the owner has told that they are durable, for a caller that holds `settling`.
    fn release_durable(&self) {
        self.bonds.with(|bond| {
            let position = bond.owner.as_ref().and_then(|owner| owner.position());
            if let Some(position) = position {
                let released = self.release(|change| change.after <= position.seq);
                let last = released.iter().map(|change| change.count).max();
                self.early.complete(bond.number, last.unwrap_or(0));
            }
        });
    }

    /// Gives back the slots of changes that need not be kept any longer, and returns them.
    pub(crate) fn release(&self, is_durable: impl Fn(&Change) -> bool) -> Vec<Change> {
        let released = self.early.take(is_durable);
        for Change { slot, seq, .. } in &released {
            self.requests.put_back(*slot, *seq);
        }
        released
    }

    /// Changes that the owner may have lost, which was left, in the order in which it executed them.
    pub(crate) fn leave_early(&self) -> Vec<Change> {
        let (changes, free) = self.early.leave();
        free.into_iter().for_each(|(slot, seq)| self.requests.put_back(slot, seq));
        changes
    }

    /// Notes the bond to the next owner, and how many early answers that owner has given already.
    pub(crate) fn bind_early(&self, bond: u64, count: u64) {
        self.early.bind(bond, count);
    }

    fn last(&self) -> MutexGuard<'_, BTreeMap<u32, (u64, Option<u64>)>> {
        self.last.lock().expect("no holder of this lock panics")
    }

    /// Slots and numbers of requests whose answers have not come, or came so lately that their callers may not have noted
    /// them yet.
    pub(crate) fn unanswered(&self) -> Vec<(u32, u64)> {
        let since_ns = self.term.now_ns().saturating_sub(NOTED_WITHIN.as_nanos() as u64);
        let is_late = |answered: Option<u64>| answered.is_none_or(|at_ns| at_ns >= since_ns);
        let last = self.last();
        last.iter().filter(|(_, (_, at))| is_late(*at)).map(|(slot, (seq, _))| (*slot, *seq)).collect()
    }

    /// Another owner has executed the request in a slot again, and all that its answer says is noted.
    pub(crate) fn note_repeated(&self, slot: u32, seq: u64) {
        self.last().insert(slot, (seq, Some(0)));
    }

    /// An extent id that was never used.
    pub(crate) async fn next_extent(&self) -> Result<ExtentId, FsError> {
        let mut held = self.ids.lock().await;
        let session = self.bonds.with(|bond| bond.session);
        if held.0 != session || held.1.is_empty() {
            let MetaReply::Range { first, count } =
                self.call(Asker::default(), MetaRequest::AllocExtents).await?
            else {
                return Err(FsError::Io);
            };
            *held = (session, first.0..first.0 + count);
        }
        held.1.next().map(ExtentId).ok_or(FsError::Io)
    }

    /// Bytes of content, and those of them on drives, as of the last heartbeat.
    pub(crate) fn used(&self) -> (u64, u64) {
        (self.used_bytes.load(Ordering::Relaxed), self.drive_bytes.load(Ordering::Relaxed))
    }

    /// The newest ledger version that a heartbeat reported.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Begins a read of extents.
    pub(crate) fn reading(&self) -> ReadGuard<'_> {
        let version = self.version.load(Ordering::Acquire);
        *self.reads.lock().expect("no holder of this lock panics").entry(version).or_insert(0) += 1;
        ReadGuard { session: self, version }
    }

    /// The oldest ledger version that running reads use.
    pub(crate) fn in_use_ver(&self) -> u64 {
        let reads = self.reads.lock().expect("no holder of this lock panics");
        // A read that starts later and finds an extent gone asks for the map again, so it needs no extent kept.
        reads.first_key_value().map_or(u64::MAX, |(oldest, _)| *oldest)
    }

    /// Tells the owner that the session is alive, and the oldest ledger version that its reads use.
    pub(crate) async fn heartbeat(&self) -> Result<(), FsError> {
        // What is told to the next owner is what the client reads then.
        let sent = Mutex::new((0, 0));
        let beat = || {
            let now = (self.bonds.with(|bond| bond.number), self.term.now_ns());
            *sent.lock().expect("no holder of this lock panics") = now;
            MetaRequest::Heartbeat { in_use_ver: self.in_use_ver() }
        };
        let reply = self.send(&self.prompt, (Asker::default(), false), beat).await?;
        let MetaReply::Beat { version, used_bytes, drive_bytes, events } = reply else {
            return Err(FsError::Io);
        };
        let (bond, sent_ns) = *sent.lock().expect("no holder of this lock panics");
        self.term.heard(bond, events, sent_ns);
        self.version.store(version, Ordering::Release);
        self.used_bytes.store(used_bytes, Ordering::Relaxed);
        self.drive_bytes.store(drive_bytes, Ordering::Relaxed);
        Ok(())
    }
}
