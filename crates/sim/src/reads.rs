//! An outside view of reads: what sessions have reported to the owner, and which reads of drives are running.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base::{ExtentId, SessionId};
use wire::meta::{FreeExtent, MetaReply, MetaRequest, SESSION_TERM};

use crate::world::World;

/// The term of sessions by the fastest clock of an owner.
const SHORTEST_TERM: Duration = SESSION_TERM.checked_sub(SESSION_TERM.checked_div(100).unwrap()).unwrap();

/// The heartbeats of each session: when they were sent and answered, and which maps its reads used. A heartbeat without
/// an answer may or may not have reached the owner.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    now: u64,
    told: BTreeMap<SessionId, Vec<Heartbeat>>,
    /// The newest ledger version in an answer.
    version: u64,
    running: BTreeMap<u64, Running>,
    /// When the owner last heard of each session, by the clock of the simulation.
    heard_ns: BTreeMap<SessionId, u64>,
}

#[derive(Debug, Clone, Copy)]
struct Heartbeat {
    in_use_ver: u64,
    sent_at: u64,
    answered_at: Option<u64>,
}

/// A running read of an extent for a user.
#[derive(Debug, Clone, Copy)]
struct Running {
    extent: ExtentId,
    began_at: u64,
    /// The newest ledger version that any session knew at the beginning.
    version: u64,
}

/// A read of a drive, which ends when this is dropped.
pub(crate) struct RunningRead {
    world: Arc<World>,
    number: u64,
}

impl RunningRead {
    pub(crate) fn begin(world: &Arc<World>, extent: ExtentId) -> Self {
        let number = world.promises().reads.begin(extent);
        Self { world: world.clone(), number }
    }
}

impl Drop for RunningRead {
    fn drop(&mut self) {
        self.world.promises().reads.running.remove(&self.number);
    }
}

impl Reads {
    fn begin(&mut self, extent: ExtentId) -> u64 {
        self.now += 1;
        self.running.insert(self.now, Running { extent, began_at: self.now, version: self.version });
        self.now
    }

    /// Notes that a client sends a request. Returns the logical time.
    pub(crate) fn sent(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Notes that a request, sent at `sent_at`, goes to the owner. Returns the logical time.
    pub(crate) fn asked(
        &mut self,
        session: SessionId,
        request: &MetaRequest,
        sent_at: u64,
        now_ns: u64,
    ) -> u64 {
        self.now += 1;
        self.heard_ns.insert(session, now_ns);
        match request {
            MetaRequest::Heartbeat { in_use_ver } => self.tells(session, *in_use_ver, sent_at, now_ns),
            MetaRequest::CloseSession => drop(self.told.remove(&session)),
            _ => {}
        }
        self.now
    }

    /// Notes that a session tells the owner which maps its reads use.
    pub(crate) fn tells(&mut self, session: SessionId, in_use_ver: u64, sent_at: u64, now_ns: u64) {
        self.heard_ns.insert(session, now_ns);
        let told = Heartbeat { in_use_ver, sent_at, answered_at: None };
        self.told.entry(session).or_default().push(told);
    }

    /// Notes that the owner has answered a request, sent at `sent_at`.
    pub(crate) fn answered(&mut self, session: SessionId, sent_at: u64, reply: Option<&MetaReply>) {
        self.now += 1;
        let Some(MetaReply::Beat { version, .. }) = reply else { return };
        self.version = self.version.max(*version);
        self.told_for_certain(session, sent_at);
    }

    /// Notes that the owner knows what was sent at `sent_at`.
    pub(crate) fn told_for_certain(&mut self, session: SessionId, sent_at: u64) {
        self.now += 1;
        let Some(told) = self.told.get_mut(&session) else { return };
        if let Some(one) = told.iter_mut().find(|told| told.sent_at == sent_at) {
            one.answered_at = Some(self.now);
        }
        // Only the newest answers and the running heartbeats still count.
        let surplus = told.len().saturating_sub(64);
        told.drain(..surplus);
    }

    /// I5: the reason why an extent, which the owner handed out for deletion at `asked_at`, must not be deleted, if
    /// there is one.
    pub(crate) fn forbid(&self, free: &FreeExtent, asked_at: u64, now_ns: u64) -> Option<String> {
        if let Some(session) = self.reader(free.free_ver, asked_at, now_ns) {
            return Some(format!("session {session} has said that it reads"));
        }
        let mut running = self.running.values().filter(|read| read.extent == free.id);
        running.any(|read| self.must_be_known(read, free.free_ver, asked_at)).then(|| "it is read".to_owned())
    }

    /// A session that must have reported before `asked_at` that it reads extents dropped in ledger version `free_ver`. The
    /// reads of a session of which the owner heard nothing for the term of sessions do not count any more.
    fn reader(&self, free_ver: u64, asked_at: u64, now_ns: u64) -> Option<SessionId> {
        let reads = |told: &Vec<Heartbeat>| since(told, asked_at, 1)?.map(|told| told.in_use_ver).max();
        let counts = |id: &SessionId| now_ns < self.heard_ns[id] + SHORTEST_TERM.as_nanos() as u64;
        let mut sessions = self.told.iter().filter(|(id, _)| counts(id));
        sessions.find(|(_, told)| reads(told).is_some_and(|in_use| free_ver >= in_use)).map(|(id, _)| *id)
    }

    /// Whether the owner must know of a read of an extent dropped in `free_ver`, whichever session reads: every session
    /// has reported its reads since this one began. One heartbeat is not enough. Its content is fixed before it is
    /// sent, so the read may have begun in between. The next heartbeat is composed after that.
    fn must_be_known(&self, read: &Running, free_ver: u64, asked_at: u64) -> bool {
        let tells = |told: &Vec<Heartbeat>| {
            since(told, asked_at, 2).is_some_and(|mut since| since.all(|told| told.sent_at > read.began_at))
        };
        free_ver >= read.version && self.told.values().all(tells)
    }
}

/// The heartbeats that may be the last, or one of the last `count`, to count at `asked_at`. Concurrent heartbeats may
/// arrive in any order.
fn since(told: &[Heartbeat], asked_at: u64, count: usize) -> Option<impl Iterator<Item = &Heartbeat>> {
    let mut answers: Vec<u64> =
        told.iter().filter_map(|told| told.answered_at).filter(|at| *at < asked_at).collect();
    answers.sort_unstable();
    let first = *answers.iter().rev().nth(count - 1)?;
    Some(told.iter().filter(move |told| told.answered_at.is_none_or(|at| at >= first)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEAT: MetaReply = MetaReply::Beat { version: 7, used_bytes: 0, drive_bytes: 0, events: 0 };

    /// Sends a heartbeat. Returns the time of sending.
    fn beat(reads: &mut Reads, in_use_ver: u64) -> u64 {
        let sent_at = reads.sent();
        reads.asked(SessionId(1), &MetaRequest::Heartbeat { in_use_ver }, sent_at, 0);
        sent_at
    }

    fn answer(reads: &mut Reads, sent_at: u64) {
        reads.answered(SessionId(1), sent_at, Some(&BEAT));
    }

    fn ask(reads: &mut Reads) -> u64 {
        let sent_at = reads.sent();
        reads.asked(SessionId(2), &MetaRequest::PurgeStep, sent_at, 0)
    }

    #[test]
    fn only_what_was_told_for_certain_counts() {
        let mut reads = Reads::default();
        let first = beat(&mut reads, 7);
        let asked_at = ask(&mut reads);
        assert_eq!(reads.reader(7, asked_at, 0), None, "the owner may not know yet");
        answer(&mut reads, first);
        let asked_at = ask(&mut reads);
        assert_eq!(reads.reader(6, asked_at, 0), None);
        assert_eq!(reads.reader(7, asked_at, 0), Some(SessionId(1)));
        assert_eq!(
            reads.reader(7, asked_at, SESSION_TERM.as_nanos() as u64),
            None,
            "it was silent for too long"
        );
        let second = beat(&mut reads, u64::MAX);
        assert_eq!(reads.reader(7, asked_at, 0), None, "it may have come first");
        answer(&mut reads, second);
        let third = beat(&mut reads, 9);
        answer(&mut reads, third);
        let asked_at = ask(&mut reads);
        assert_eq!(reads.reader(9, asked_at, 0), Some(SessionId(1)));
        reads.asked(SessionId(1), &MetaRequest::CloseSession, 0, 0);
        assert_eq!(reads.reader(9, asked_at, 0), None);
    }

    #[test]
    fn a_read_must_be_known_once_its_session_has_told_of_it() {
        let mut reads = Reads::default();
        let tell = |reads: &mut Reads| {
            let sent_at = beat(reads, u64::MAX);
            answer(reads, sent_at);
        };
        let forbidden = |reads: &mut Reads, id, free_ver| {
            let asked_at = ask(reads);
            let free = FreeExtent { free_ver, id: ExtentId(id), pg: base::PgId(0), n: 6 };
            reads.forbid(&free, asked_at, 0).is_some()
        };
        tell(&mut reads);
        let read = reads.begin(ExtentId(3));
        tell(&mut reads);
        assert!(!forbidden(&mut reads, 3, 7), "it may have begun after that was written");
        tell(&mut reads);
        assert!(forbidden(&mut reads, 3, 7));
        assert!(!forbidden(&mut reads, 4, 7), "nobody reads that one");
        assert!(!forbidden(&mut reads, 3, 6), "its map may be that old");
        reads.running.remove(&read);
        assert!(!forbidden(&mut reads, 3, 7));
    }
}
