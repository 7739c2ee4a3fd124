//! The execution of a request, and when its answer may leave.

use base::{FsError, Seq, SessionId};
use wire::message::{AnswerTime, Caller, FirstTime};
use wire::meta::{MetaReply, MetaRequest, RequestId, SLOTS_MAX};
use wire::object::ObjectReply;

use super::repeats::is_refusal;
use super::{Core, Now, Stop, Wait};
use crate::values::{Slot, Value};

/// On which terms a request is executed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Terms<'a> {
    /// The user whose rights are checked; `None`: the session is trusted.
    pub caller: Option<&'a Caller>,
    /// When the answer leaves.
    pub answer: AnswerTime,
}

/// The outcome of a request.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "it is taken apart at once")]
pub enum Executed {
    /// A reply, to be sent once batch `after` is durable.
    Reply {
        /// The reply.
        reply: Result<MetaReply, FsError>,
        /// The batch; 0 for none.
        after: Seq,
        /// Whether it may be sent at once, and how.
        early: Option<Early>,
    },
    /// Execute the request again once [`Core::awaits`] says that nothing of this is left to wait for.
    Wait(Wait),
}

/// How a reply is sent before batch `after` is durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Early {
    /// The number of changes that were answered early to the session.
    pub count: u64,
    /// Of a change.
    pub first: Option<FirstTime>,
}

impl Early {
    /// The reply to send.
    pub fn reply(self, reply: Result<MetaReply, FsError>, after: Seq) -> MetaReply {
        let Self { count, first } = self;
        MetaReply::Early { reply: Box::new(reply), after, count, first }
    }
}

impl Executed {
    pub(super) fn reply(reply: Result<MetaReply, FsError>, after: Seq) -> Self {
        Self::Reply { reply, after, early: None }
    }
}

impl Core {
    /// The answer to a request of no session, or in no slot.
    fn refused(&self, id: RequestId, request: &MetaRequest) -> Option<Executed> {
        if self.volatile.sessions.contains_key(&id.session) {
            return (id.slot >= SLOTS_MAX).then(|| Executed::reply(Err(FsError::Invalid), Seq(0)));
        }
        if !matches!(request, MetaRequest::CloseSession) {
            return Some(Executed::reply(Err(FsError::StaleLease), Seq(0)));
        }
        // The request was repeated because its first answer was lost: the session has already ended, as requested.
        let after = if self.pending.is_empty() { self.last_batch() } else { self.next_seq };
        Some(Executed::reply(Ok(MetaReply::Done), after))
    }

    pub(super) fn execute_once(
        &mut self,
        id: RequestId,
        terms: Terms<'_>,
        request: &MetaRequest,
        now: Now,
    ) -> Executed {
        if let Some(refused) = self.refused(id, request) {
            return refused;
        }
        if let Err(error) = self.wake(id.session, request, now) {
            return Executed::reply(Err(error), Seq(0));
        }
        let slot_key = self.keys.slot(id.session, id.slot);
        let mut op = self.begin(id, now);
        if let Err(error) = op.must_be_awake() {
            return Executed::reply(Err(error), Seq(0));
        }
        // Only a repetition waits for the request that was in the slot before.
        match op.txn.aside(|| op.repeated(id, &slot_key)) {
            Ok(None) => {}
            Ok(Some(mut reply)) => {
                // Its answer leaves when the request is durable.
                let _ = op.txn.get_bytes(&slot_key);
                // The session claims what an early answer brought.
                if !matches!(terms.answer, AnswerTime::Again(_)) {
                    op.restore_effects(id, request, &mut reply);
                }
                let (_, seen) = op.txn.finish();
                return Executed::reply(Ok(reply), seen.newest);
            }
            Err(error) => return Executed::reply(Err(error), Seq(0)),
        }
        let is_early = terms.answer != AnswerTime::Durable && request.may_be_early();
        if let AnswerTime::Again(first) = terms.answer {
            if !is_early || !op.volatile.absent.contains(&id.session) {
                return Executed::reply(Err(FsError::StaleLease), Seq(0));
            }
            op.now.wall_ns = first.wall_ns;
            op.again = Some(first);
        }
        let checked = terms.caller.map_or(Ok(()), |caller| op.check_rights(caller, request));
        let reply = match checked.map_err(Stop::Fail).and_then(|()| op.run(request)) {
            Ok(reply) => Ok(reply),
            Err(Stop::Fail(error)) => Err(error),
            Err(Stop::Refuse(error)) => Ok(MetaReply::Object(Box::new(ObjectReply::Refused(error)))),
            Err(Stop::Wait(wait)) => return Executed::Wait(wait),
        };
        let first = FirstTime { ino: op.made, wall_ns: op.now.wall_ns };
        let (mut writes, seen) = op.txn.finish();
        let is_early = is_early && seen.unknown <= self.committed;
        if is_refusal(&reply) || writes.is_empty() {
            let after = if seen.newest > self.committed { seen.newest } else { Seq(0) };
            let is_early = is_early && after > Seq(0);
            let count = *self.volatile.early.get(&id.session).unwrap_or(&0);
            return Executed::Reply { reply, after, early: is_early.then_some(Early { count, first: None }) };
        }
        if let (Ok(reply), false) = (&reply, matches!(request, MetaRequest::CloseSession)) {
            writes.insert(slot_key, Some(Slot::new(id.seq, reply).encode()));
        }
        self.take(writes, if is_early { id.session } else { SessionId(0) });
        let early = is_early.then(|| {
            let count = self.volatile.early.entry(id.session).or_insert(0);
            *count += 1;
            Early { count: *count, first: Some(first) }
        });
        Executed::Reply { reply, after: self.next_seq, early }
    }
}
