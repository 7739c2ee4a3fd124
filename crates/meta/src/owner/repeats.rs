//! Requests that come again. The ledger keeps the answers of those that changed it. Here are refusals, and the answers of requests
//! about locks, which change the owner's memory only.

use std::collections::HashMap;

use base::{FsError, SessionId};
use wire::meta::{MetaReply, MetaRequest, RequestId};
use wire::object::ObjectReply;

use super::{Core, Executed, Now, Terms};
use crate::values::Slot;

type Reply = Result<MetaReply, FsError>;

/// Whether a request changed nothing because it was refused.
pub(super) fn is_refusal(reply: &Reply) -> bool {
    match reply {
        Ok(MetaReply::Object(reply)) => matches!(**reply, ObjectReply::Refused(_)),
        reply => reply.is_err(),
    }
}

/// The last request in each slot of a session, and its answer if the ledger does not have it. A request that comes again, perhaps
/// long after its answer, must not be executed then: what was refused would happen, and a lock that was given up would be back.
#[derive(Debug, Default)]
pub(super) struct Repeats(HashMap<SessionId, HashMap<u32, (u64, Option<Reply>)>>);

impl Repeats {
    /// The answer to a request that was executed before, or that is older than another one in its slot.
    pub(super) fn answer(&self, id: RequestId) -> Option<Reply> {
        let (last, kept) = self.0.get(&id.session)?.get(&id.slot)?;
        match id.seq.cmp(last) {
            std::cmp::Ordering::Less => Some(Err(FsError::Invalid)),
            std::cmp::Ordering::Equal => kept.clone(),
            std::cmp::Ordering::Greater => None,
        }
    }

    /// Notes an answer.
    pub(super) fn note(&mut self, id: RequestId, request: &MetaRequest, reply: &Reply) {
        let is_lock = matches!(request, MetaRequest::Lock { .. } | MetaRequest::Unlock { .. });
        let kept = (is_refusal(reply) || is_lock).then(|| reply.clone());
        self.0.entry(id.session).or_default().insert(id.slot, (id.seq, kept));
    }

    /// The session has ended.
    pub(super) fn forget(&mut self, session: SessionId) {
        self.0.remove(&session);
    }
}

impl Core {
    /// Whether the answer to this request is known: it has come before.
    pub fn was_executed(&self, id: RequestId) -> bool {
        let slot = || self.store.begin().get::<Slot>(&self.keys.slot(id.session, id.slot));
        self.volatile.repeats.answer(id).is_some()
            || slot().is_ok_and(|slot| slot.is_some_and(|slot| slot.seq == id.seq))
    }

    /// Executes a request. A request that comes again gets its first answer when that is durable, also if it was a refusal: what
    /// was refused must not happen later.
    pub fn execute(&mut self, id: RequestId, terms: Terms<'_>, request: &MetaRequest, now: Now) -> Executed {
        if let Some(reply) = self.volatile.repeats.answer(id) {
            let after = if self.pending.is_empty() { self.last_batch() } else { self.next_seq };
            return Executed::reply(reply, after);
        }
        let executed = self.execute_once(id, terms, request, now);
        if let Executed::Reply { reply, .. } = &executed
            && self.volatile.sessions.contains_key(&id.session)
        {
            self.volatile.repeats.note(id, request, reply);
        }
        executed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_repeated_and_older_requests_refused() {
        let mut repeats = Repeats::default();
        let id = |slot, seq| RequestId { session: SessionId(1), slot, seq };
        let other = MetaRequest::StatFs;
        repeats.note(id(0, 5), &other, &Err(FsError::Exists));
        assert_eq!(repeats.answer(id(0, 5)), Some(Err(FsError::Exists)));
        assert_eq!(repeats.answer(id(0, 4)), Some(Err(FsError::Invalid)));
        assert_eq!(repeats.answer(id(0, 6)), None);
        assert_eq!(repeats.answer(id(1, 5)), None);
        repeats.note(id(0, 6), &other, &Ok(MetaReply::Done));
        assert_eq!(repeats.answer(id(0, 6)), None, "the ledger has this answer");
        assert_eq!(repeats.answer(id(0, 5)), Some(Err(FsError::Invalid)));
        repeats.forget(SessionId(1));
        assert_eq!(repeats.answer(id(0, 5)), None);
    }
}
