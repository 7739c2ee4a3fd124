//! What sessions have told the owner of their reads, as seen from outside.

use std::collections::BTreeMap;

use base::SessionId;
use wire::meta::MetaRequest;

/// The heartbeats of each session: when they were answered, and which maps its reads used. One that is not answered
/// may count already or not.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    now: u64,
    told: BTreeMap<SessionId, Vec<Told>>,
}

#[derive(Debug, Clone, Copy)]
struct Told {
    in_use_ver: u64,
    answered_at: Option<u64>,
}

impl Reads {
    /// A request goes to the owner. Returns when that was.
    pub(crate) fn asked(&mut self, session: SessionId, request: &MetaRequest) -> u64 {
        self.now += 1;
        match request {
            MetaRequest::Heartbeat { in_use_ver } => {
                let told = Told { in_use_ver: *in_use_ver, answered_at: None };
                self.told.entry(session).or_default().push(told);
            }
            MetaRequest::CloseSession => drop(self.told.remove(&session)),
            _ => {}
        }
        self.now
    }

    /// The owner has answered.
    pub(crate) fn answered(&mut self, session: SessionId, request: &MetaRequest) {
        self.now += 1;
        let MetaRequest::Heartbeat { in_use_ver } = request else { return };
        let Some(told) = self.told.get_mut(&session) else { return };
        if let Some(one) =
            told.iter_mut().find(|told| told.in_use_ver == *in_use_ver && told.answered_at.is_none())
        {
            one.answered_at = Some(self.now);
        }
        // Only the newest answers and what is under way can still count.
        let surplus = told.len().saturating_sub(64);
        told.drain(..surplus);
    }

    /// A session that cannot have told anything else, since before `asked_at`, than that it reads what was dropped in
    /// ledger version `free_ver`.
    pub(crate) fn reader(&self, free_ver: u64, asked_at: u64) -> Option<SessionId> {
        let reads = |told: &Vec<Told>| {
            let before = |told: &&Told| told.answered_at.is_some_and(|answered| answered < asked_at);
            let last = told.iter().filter(before).max_by_key(|told| told.answered_at)?;
            // Heartbeats beside each other may arrive in any order.
            let since =
                told.iter().filter(|told| told.answered_at.is_none_or(|at| Some(at) >= last.answered_at));
            since.map(|told| told.in_use_ver).max()
        };
        let mut sessions = self.told.iter();
        sessions.find(|(_, told)| reads(told).is_some_and(|in_use| free_ver >= in_use)).map(|(id, _)| *id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beat(reads: &mut Reads, in_use_ver: u64) {
        reads.asked(SessionId(1), &MetaRequest::Heartbeat { in_use_ver });
    }

    fn answer(reads: &mut Reads, in_use_ver: u64) {
        reads.answered(SessionId(1), &MetaRequest::Heartbeat { in_use_ver });
    }

    #[test]
    fn only_what_was_told_for_certain_counts() {
        let mut reads = Reads::default();
        beat(&mut reads, 7);
        let asked_at = reads.asked(SessionId(2), &MetaRequest::PurgeStep);
        assert_eq!(reads.reader(7, asked_at), None, "the owner may not know yet");
        answer(&mut reads, 7);
        let asked_at = reads.asked(SessionId(2), &MetaRequest::PurgeStep);
        assert_eq!(reads.reader(6, asked_at), None);
        assert_eq!(reads.reader(7, asked_at), Some(SessionId(1)));
        beat(&mut reads, u64::MAX);
        assert_eq!(reads.reader(7, asked_at), None, "it may have come first");
        answer(&mut reads, u64::MAX);
        beat(&mut reads, 9);
        answer(&mut reads, 9);
        let asked_at = reads.asked(SessionId(2), &MetaRequest::PurgeStep);
        assert_eq!(reads.reader(9, asked_at), Some(SessionId(1)));
        reads.asked(SessionId(1), &MetaRequest::CloseSession);
        assert_eq!(reads.reader(9, asked_at), None);
    }
}
