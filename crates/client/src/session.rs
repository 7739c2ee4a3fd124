//! The client's registration with the owner: request ids, extent ids, running reads, heartbeats.
//!
//! When another owner takes over, requests without an answer wait until the session is bound to it, and go there under
//! their old ids. So each is executed once, whichever owner did it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::env::Clock;
use base::{ExtentId, FsError, SessionId};
use tokio::sync::{Mutex as AsyncMutex, Semaphore};
use wire::message::{Caller, Envelope};
use wire::meta::{EventSink, MetaReply, MetaRequest, MetaService, RequestId};

use crate::bond::{Bond, Bonds};
use crate::term::Term;

/// Requests under way at once that may wait for other clients.
const SLOTS: usize = 64;
/// Requests under way at once that never wait for other clients: see [`is_prompt`].
const PROMPT_SLOTS: usize = 32;

/// How long a request waits for an owner.
const OWNER_PATIENCE: Duration = Duration::from_secs(60);
/// Pause while events come that the owner sent before its answer.
pub(crate) const EVENTS_PAUSE: Duration = Duration::from_millis(10);
/// A caller has noted an answer this long after it came.
const NOTED_WITHIN: Duration = Duration::from_secs(1);
/// Pause before an owner that cannot answer is asked again.
const OWNER_PAUSE: Duration = Duration::from_millis(200);

/// Slots that requests take one after another. The one that is free for longest is taken: the owner keeps the last answer of
/// each, and the next owner learns from these answers what the client may not have noted yet.
struct Lane {
    permits: Semaphore,
    slots: Mutex<VecDeque<(u32, u64)>>,
}

impl Lane {
    fn new(slots: std::ops::Range<usize>) -> Self {
        let permits = Semaphore::new(slots.len());
        Self { permits, slots: Mutex::new(slots.map(|slot| (slot as u32, 0)).collect()) }
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
}

/// Gives a slot back when the request is over or given up.
struct SlotGuard<'a> {
    session: &'a Session,
    lane: &'a Lane,
    slot: u32,
    seq: u64,
}

impl Drop for SlotGuard<'_> {
    fn drop(&mut self) {
        let now_ns = self.session.term.now_ns();
        self.session.last().insert(self.slot, (self.seq, Some(now_ns)));
        let mut slots = self.lane.slots.lock().expect("no holder of this lock panics");
        slots.push_back((self.slot, self.seq));
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

impl Session {
    /// Registers with an owner. `events` gets the events of this bond.
    pub(crate) async fn open(
        owner: Arc<dyn MetaService>,
        events: Arc<dyn EventSink>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, FsError> {
        let term = Term::new(clock);
        let sent_ns = term.now_ns();
        let session = owner.connect(events).await?;
        term.bound(Bonds::FIRST, sent_ns);
        Ok(Self {
            bonds: Bonds::new(session, owner),
            term,
            requests: Lane::new(0..SLOTS),
            prompt: Lane::new(SLOTS..SLOTS + PROMPT_SLOTS),
            ids: AsyncMutex::new((session, 0..0)),
            version: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
            drive_bytes: AtomicU64::new(0),
            reads: Mutex::new(BTreeMap::new()),
            last: Mutex::new(BTreeMap::new()),
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
    pub(crate) async fn call(
        &self,
        caller: Option<&Caller>,
        request: MetaRequest,
    ) -> Result<MetaReply, FsError> {
        let lane = if is_prompt(&request) { &self.prompt } else { &self.requests };
        self.send(lane, caller, || request.clone()).await
    }

    async fn send(
        &self,
        lane: &Lane,
        caller: Option<&Caller>,
        request: impl Fn() -> MetaRequest,
    ) -> Result<MetaReply, FsError> {
        let _permit = lane.permits.acquire().await.map_err(|_| FsError::Unavailable)?;
        let slot = lane.slots.lock().expect("no holder of this lock panics").pop_front();
        let (slot, seq) = slot.expect("there are as many slots as permits");
        let guard = SlotGuard { session: self, lane, slot, seq: seq + 1 };
        self.last().insert(slot, (guard.seq, None));
        let (mut asked, mut tries) = (None, 0);
        let began = tokio::time::Instant::now();
        loop {
            let bound = self.bonds.wait_for(|bond| bond.owner.is_some());
            let Ok(Bond { number, session, owner: Some(owner), is_last }) =
                tokio::time::timeout(OWNER_PATIENCE, bound).await
            else {
                return Err(if asked.is_some() { FsError::Unknown } else { FsError::Unavailable });
            };
            // The session that sent the request has ended: nobody knows whether it was executed.
            if asked.replace(session).is_some_and(|asked| asked != session) {
                return Err(FsError::Unknown);
            }
            tries += 1;
            let id = RequestId { session, slot, seq: guard.seq };
            let is_left = |now: &Bond| now.number != number;
            let answer = tokio::select! {
                biased;
                answer = owner.call(Envelope { caller: caller.cloned(), ..id.into() }, request()) => answer,
                _ = self.bonds.wait_for(is_left) => continue,
            };
            // What an owner granted is void once it is left.
            if answer != Err(FsError::Disconnected) && !self.bonds.with(is_left) {
                let is_refused_again = tries > 1 && answer == Err(FsError::Unavailable);
                // An owner that refuses a repetition may not know what became of the first one.
                return if is_refused_again { Err(FsError::Unknown) } else { answer };
            }
            if is_last || began.elapsed() > OWNER_PATIENCE {
                return Err(FsError::Unknown);
            }
            // It may also be the owner again, once it reaches its log.
            let left = self.bonds.wait_for(|now| is_left(now) || now.is_last);
            let _ = tokio::time::timeout(OWNER_PAUSE, left).await;
        }
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

    /// An extent id that was never used.
    pub(crate) async fn next_extent(&self) -> Result<ExtentId, FsError> {
        let mut held = self.ids.lock().await;
        let session = self.bonds.with(|bond| bond.session);
        if held.0 != session || held.1.is_empty() {
            let MetaReply::Range { first, count } = self.call(None, MetaRequest::AllocExtents).await? else {
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
        let reply = self.send(&self.prompt, None, beat).await?;
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
