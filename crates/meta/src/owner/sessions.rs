//! The life of sessions: they begin, claim their state from the next owner, fall silent, are heard again, and end.

use std::collections::HashSet;

use base::{FsError, Seq, SessionId};
use wire::meta::{Claim, MetaRequest, RequestId, Resumed};

use super::{Core, Now, SESSION_KEPT_NS, Stop, Volatile};

/// A session without requests for so long may be idle.
const IDLE_NS: u64 = 5_000_000_000;

impl Core {
    /// Registers a session, of a client in this process or elsewhere. Durable once the batch that it went into is.
    pub fn connect(&mut self, is_elsewhere: bool, now: Now) -> Result<(SessionId, Seq), FsError> {
        let mut session = SessionId(0);
        self.internal(now, |op| {
            session = op.open_session(is_elsewhere)?;
            Ok(())
        })?;
        self.note_request(session, now)?;
        Ok((session, self.next_seq))
    }

    /// Notes that a session has sent a request, also if that cannot be executed yet.
    pub fn note_request(&mut self, session: SessionId, now: Now) -> Result<(), FsError> {
        if self.volatile.sessions.contains_key(&session) {
            self.volatile.idle.remove(&session);
            self.volatile.active.insert(session, (now.awake_ns, self.committed));
        }
        self.note_beat(session, now)
    }

    /// A request of a session is executed, perhaps long after it was sent: the session does not rest.
    pub(super) fn wake(
        &mut self,
        session: SessionId,
        request: &MetaRequest,
        now: Now,
    ) -> Result<(), FsError> {
        let Volatile { idle, silent, .. } = &mut self.volatile;
        let is_beat = matches!(request, MetaRequest::Heartbeat { .. });
        match !is_beat && idle.remove(&session) && silent.contains_key(&session) {
            true => self.internal(now, |op| op.mark_silent(session, false)),
            false => Ok(()),
        }
    }

    /// Notes that a session has sent a heartbeat. One that holds nothing goes on holding nothing.
    pub fn note_beat(&mut self, session: SessionId, now: Now) -> Result<(), FsError> {
        let Volatile { sessions, silent, idle, .. } = &self.volatile;
        if !sessions.contains_key(&session) {
            return Ok(());
        }
        if silent.contains_key(&session) && !idle.contains(&session) {
            self.internal(now, |op| op.mark_silent(session, false))?;
        }
        self.volatile.leases.note_heard(session, now.heard_ns);
        Ok(())
    }

    /// Binds a session of an earlier owner, and restores the part of its state that no other session contradicts. The answer
    /// may leave once a batch is durable.
    pub(crate) fn resume(
        &mut self,
        session: SessionId,
        claim: &Claim,
        now: Now,
    ) -> Result<(Resumed, Seq), FsError> {
        self.note_request(session, now)?;
        let mut op = self.begin(RequestId { session, slot: 0, seq: 0 }, now);
        let resumed = match op.resume(claim) {
            Ok(resumed) => resumed,
            Err(Stop::Fail(error)) => return Err(error),
            Err(Stop::Wait(_) | Stop::Refuse(_)) => return Err(FsError::Io),
        };
        op.must_be_heard()?;
        let (writes, seen) = op.txn.finish();
        if !writes.is_empty() {
            self.take(writes, SessionId(0));
        }
        Ok((resumed, seen.newest))
    }

    /// Whether sessions of an earlier owner have not claimed their state yet: then only claims and heartbeats are executed.
    pub(crate) fn is_recovering(&self) -> bool {
        !self.volatile.absent.is_empty()
    }

    /// No longer waits for sessions that were not heard of for too long, and notes that in the ledger: the next owner does not
    /// wait for them either. Sessions of which nothing was heard for a day end.
    pub(crate) fn expire_sessions(&mut self, now: Now) -> Result<(), FsError> {
        let Volatile { absent, leases, sessions, .. } = &mut self.volatile;
        for session in absent.extract_if(.., |session| leases.is_silent(*session, now.awake_ns)) {
            tracing::warn!(%session, "a session of the earlier owner was not heard of: others do not wait for it any more");
        }
        let old = |session: &&SessionId| leases.is_silent_for(**session, SESSION_KEPT_NS, now.awake_ns);
        let mut ended: Vec<SessionId> = sessions.keys().filter(old).copied().collect();
        ended.sort_unstable();
        ended.into_iter().try_for_each(|session| self.internal(now, |op| op.end_session(session)))?;
        let Volatile { silent, leases, sessions, .. } = &self.volatile;
        let newly = |id: &&SessionId| leases.is_silent(**id, now.awake_ns) && !silent.contains_key(*id);
        let mut marked: Vec<SessionId> = sessions.keys().filter(newly).copied().collect();
        marked.sort_unstable();
        marked.into_iter().try_for_each(|session| self.internal(now, |op| op.mark_silent(session, true)))?;
        let idle = self.newly_idle(now);
        idle.into_iter().try_for_each(|session| self.internal(now, |op| op.mark_idle(session)))
    }

    /// Sessions that hold nothing since some time: no lease, no open file, no lock, no name in a cache, no running read.
    fn newly_idle(&self, now: Now) -> Vec<SessionId> {
        let Volatile { sessions, silent, idle, active, unclaimed, leases, watches, locks, opens, .. } =
            &self.volatile;
        let is_resting = |id: &SessionId, in_use_ver: u64| {
            active.get(id).is_some_and(|(at_ns, seq)| now.awake_ns >= at_ns + IDLE_NS && in_use_ver >= seq.0)
        };
        let holds_none =
            |id: &SessionId| leases.holds_none(*id) && watches.holds_none(*id) && locks.holds_none(*id);
        let is_known =
            |id: &SessionId| silent.contains_key(id) || idle.contains(id) || unclaimed.contains_key(id);
        let resting = sessions.iter().filter(|(id, in_use_ver)| is_resting(id, **in_use_ver));
        let resting = resting.filter(|(id, _)| !is_known(id) && holds_none(id));
        let mut found: Vec<SessionId> = resting.map(|(id, _)| *id).collect();
        if !found.is_empty() {
            let open: HashSet<SessionId> = opens.values().flatten().copied().collect();
            found.retain(|id| !open.contains(id));
        }
        found.sort_unstable();
        found
    }
}
