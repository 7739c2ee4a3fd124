//! An owner and its standbys: how far the log may be trimmed, and copies of the store, which others read, too.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::env::Env;
use base::{FsError, Seq};
use bytes::Bytes;
use wire::replica::{CopyPart, READER, ReplicaReply, ReplicaRequest, STANDBY_WAIT_MAX};

use super::copying::CopySum;
use super::server::with_causes;
use crate::state::{Applied, State, StateError, every_key};

/// About the bytes of one part of a copy.
const PART_BYTES: usize = 1 << 20;
/// Most copies at a time. Each keeps old pages of the store.
const COPIES_MAX: usize = 4;
/// Most of them that are not for standbys.
const READERS_MAX: usize = 2;
/// A copy of which no part is fetched for so long ends.
const COPY_IDLE_NS: u64 = 60_000_000_000;
/// How long a reader's copy waits for the store, and the pause between two looks.
const READY_PATIENCE: Duration = Duration::from_secs(5);
const READY_LOOK: Duration = Duration::from_millis(50);

/// A standby that said something this recently follows: what it lacks stays in the log ...
const FOLLOWS_NS: u64 = 10_000_000_000;
/// ... unless it is this many entries behind. A standby steps about once a second.
const LAG_MAX: u64 = 10_000;

/// See the module.
pub(crate) struct Replicas {
    env: Env,
    state: Arc<dyn State>,
    /// Until then nothing is trimmed, because standbys of an earlier owner may still come.
    grace_until_ns: u64,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    standbys: BTreeMap<u64, Standing>,
    copies: BTreeMap<u64, Copying>,
}

/// A standby as the owner knows it.
struct Standing {
    /// The last entry in its store.
    stored: Seq,
    /// When it last said something.
    heard_ns: u64,
    /// The log is kept for it until then.
    until_ns: u64,
    /// It copies the store, so it needs the whole log behind its copy.
    copies: bool,
}

/// A standby, as its owner last heard of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StandbyStat {
    /// Its number.
    pub replica: u64,
    /// The last entry in its store; 0 while it copies the owner's.
    pub stored: Seq,
    /// The time since.
    pub age: Duration,
}

/// A copy on its way.
struct Copying {
    replica: u64,
    content: Arc<dyn State>,
    applied: Applied,
    used_ns: u64,
    /// What was sent so far, up to a key; and the last part, in case that its answer was lost.
    sent: (Bytes, CopySum),
    last: Option<(Bytes, CopyPart)>,
}

impl Replicas {
    /// An owner that waits for standbys of earlier owners for some time.
    pub(crate) fn new(env: Env, state: Arc<dyn State>, grace: Duration) -> Self {
        let grace_until_ns = env.clock.boot_ns() + grace.as_nanos() as u64;
        Self { env, state, grace_until_ns, inner: Mutex::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no holder of this lock panics")
    }

    /// The last entry that may leave the log, when the owner's store has all up to `own`: a majority of the replicas has it, each
    /// standby that follows, and each that copies the store. Standbys that said nothing for as long as they wished do not count.
    pub(crate) fn trim_to(&self, own: Seq) -> Seq {
        let now_ns = self.env.clock.boot_ns();
        if now_ns < self.grace_until_ns {
            return Seq(0);
        }
        let mut inner = self.inner();
        inner.standbys.retain(|_, standing| now_ns < standing.until_ns);
        inner.copies.retain(|_, copy| now_ns < copy.used_ns + COPY_IDLE_NS);
        let mut stored: Vec<Seq> = inner.standbys.values().map(|standing| standing.stored).collect();
        stored.push(own);
        stored.sort_unstable();
        // The first of a majority, counted from the newest.
        let majority = stored.len() / 2 + 1;
        let needs = |standing: &&Standing| {
            let follows = now_ns.saturating_sub(standing.heard_ns) < FOLLOWS_NS
                && own.0.saturating_sub(standing.stored.0) <= LAG_MAX;
            standing.copies || follows
        };
        let needed = inner.standbys.values().filter(needs).map(|standing| standing.stored).min();
        needed.unwrap_or(own).min(stored[stored.len() - majority])
    }

    /// Executes a request of a standby.
    pub(crate) fn ask(&self, request: ReplicaRequest) -> Result<ReplicaReply, FsError> {
        match request {
            ReplicaRequest::Stored { replica, seq, wait_ms } => {
                self.heard(&mut self.inner(), replica, (seq, false), wait_ms);
                Ok(ReplicaReply::Noted)
            }
            ReplicaRequest::Copy { replica, wait_ms, copy, after } => {
                self.copy((replica, wait_ms), copy, &after).map(ReplicaReply::Copied)
            }
        }
    }

    /// Waits until the store has all that was durable when a reader's copy was asked for: up to `durable`. The store may be some
    /// time behind the log. Others get what the store has, and the log.
    ///
    /// # Errors
    /// `WouldBlock` if that takes too long, `Io` if the store cannot be read.
    pub(crate) async fn ready(&self, request: &ReplicaRequest, durable: Seq) -> Result<(), FsError> {
        if !matches!(request, ReplicaRequest::Copy { replica: READER, copy: 0, .. }) {
            return Ok(());
        }
        let stored = async {
            while self.state.applied().map_err(failed)?.seq < durable {
                tokio::time::sleep(READY_LOOK).await;
            }
            Ok(())
        };
        tokio::time::timeout(READY_PATIENCE, stored).await.unwrap_or(Err(FsError::WouldBlock))
    }

    fn heard(&self, inner: &mut Inner, replica: u64, (stored, copies): (Seq, bool), wait_ms: u32) {
        let wait = Duration::from_millis(wait_ms.into()).min(STANDBY_WAIT_MAX);
        let heard_ns = self.env.clock.boot_ns();
        let until_ns = heard_ns + wait.as_nanos() as u64;
        inner.standbys.insert(replica, Standing { stored, heard_ns, until_ns, copies });
    }

    /// The standbys that said something as recently as they promised.
    pub(crate) fn standbys(&self) -> Vec<StandbyStat> {
        let inner = self.inner();
        // Read under the lock: nothing in it is younger.
        let now_ns = self.env.clock.boot_ns();
        let heard = inner.standbys.iter().filter(|(_, standing)| now_ns < standing.until_ns);
        let stat = |(replica, standing): (&u64, &Standing)| StandbyStat {
            replica: *replica,
            stored: if standing.copies { Seq(0) } else { standing.stored },
            age: Duration::from_nanos(now_ns.saturating_sub(standing.heard_ns)),
        };
        heard.map(stat).collect()
    }

    fn copy(&self, (replica, wait_ms): (u64, u32), copy: u64, after: &Bytes) -> Result<CopyPart, FsError> {
        let mut inner = self.inner();
        let number = match copy {
            0 => self.begin_copy(&mut inner, replica, wait_ms)?,
            copy => copy,
        };
        let found = inner.copies.get_mut(&number).filter(|copy| copy.replica == replica);
        let Some(copying) = found else { return Err(FsError::NotFound) };
        copying.used_ns = self.env.clock.boot_ns();
        let stored = copying.applied.seq;
        let part = copying.part(number, after).map_err(failed)?;
        if replica != READER {
            self.heard(&mut inner, replica, (stored, true), wait_ms);
        }
        part.ok_or(FsError::NotFound)
    }

    /// Begins a copy of the store as it is now. Returns its number.
    fn begin_copy(&self, inner: &mut Inner, replica: u64, wait_ms: u32) -> Result<u64, FsError> {
        let now_ns = self.env.clock.boot_ns();
        inner.copies.retain(|_, copy| {
            let is_done = if replica == READER { copy.is_read() } else { copy.replica == replica };
            !is_done && now_ns < copy.used_ns + COPY_IDLE_NS
        });
        let readers = inner.copies.values().filter(|copy| copy.replica == READER).count();
        if inner.copies.len() >= COPIES_MAX || (replica == READER && readers >= READERS_MAX) {
            return Err(FsError::WouldBlock);
        }
        if replica != READER {
            // The log is kept from here on, before it is known how far the content goes.
            let stored = self.state.applied().map_err(failed)?.seq;
            self.heard(inner, replica, (stored, true), wait_ms);
        }
        let content = self.state.snapshot().map_err(failed)?;
        let applied = content.applied().map_err(failed)?;
        let (number, sent) = (self.env.random.next_u64().max(1), (Bytes::new(), CopySum::default()));
        let new = Copying { replica, content, applied, used_ns: now_ns, sent, last: None };
        inner.copies.insert(number, new);
        Ok(number)
    }
}

/// What others hear of an error of the store.
fn failed(error: StateError) -> FsError {
    tracing::warn!(error = %with_causes(&error), "a copy of the local store fails");
    FsError::Io
}

impl Copying {
    /// Whether it is a reader's, who was sent all of it.
    fn is_read(&self) -> bool {
        self.replica == READER && self.last.as_ref().is_some_and(|(_, part)| !part.more)
    }

    /// The part behind the key `after`: the next one, or the last one again. `None` if it is neither.
    fn part(&mut self, copy: u64, after: &Bytes) -> Result<Option<CopyPart>, StateError> {
        if let Some((last_after, part)) = &self.last
            && last_after == after
        {
            return Ok(Some(part.clone()));
        }
        if *after != self.sent.0 {
            return Ok(None);
        }
        let from = if after.is_empty() { Vec::new() } else { [after, &[0][..]].concat() };
        let (mut pairs, mut bytes, mut more) = (Vec::new(), 0, false);
        self.content.scan(&(from, every_key().1), &mut |key, value| {
            if bytes >= PART_BYTES {
                more = true;
                return ControlFlow::Break(());
            }
            bytes += key.len() + value.len();
            pairs.push((Bytes::copy_from_slice(key), Bytes::copy_from_slice(value)));
            ControlFlow::Continue(())
        })?;
        self.sent.1.add(&pairs);
        if let Some((last, _)) = pairs.last() {
            self.sent.0 = last.clone();
        }
        let Applied { seq, epoch } = self.applied;
        let part = CopyPart { copy, seq, epoch, pairs, sum: self.sent.1.finish(), more };
        self.last = Some((after.clone(), part.clone()));
        Ok(Some(part))
    }
}

#[cfg(test)]
mod tests {
    use base::env::sim::Sim;

    use super::*;
    use crate::state::MemState;

    fn stored(replicas: &Replicas, replica: u64, seq: u64) {
        replicas.ask(ReplicaRequest::Stored { replica, seq: Seq(seq), wait_ms: 60_000 }).unwrap();
    }

    fn second(sim: &Sim, seconds: u64) {
        sim.clock.advance_ns(seconds * 1_000_000_000);
    }

    #[test]
    fn the_log_keeps_what_a_majority_of_the_replicas_lacks() {
        let sim = Sim::new(1);
        let replicas = Replicas::new(sim.env(), Arc::new(MemState::default()), Duration::from_secs(5));
        assert_eq!(replicas.trim_to(Seq(9)), Seq(0), "standbys of the earlier owner may still come");
        second(&sim, 5);
        assert_eq!(replicas.trim_to(Seq(9)), Seq(9), "there is no standby");
        stored(&replicas, 1, 4);
        assert_eq!(replicas.trim_to(Seq(9)), Seq(4));
        stored(&replicas, 2, 6);
        assert_eq!(replicas.trim_to(Seq(9)), Seq(4), "both follow");
        second(&sim, 9);
        stored(&replicas, 2, 6);
        second(&sim, 1);
        assert_eq!(replicas.trim_to(Seq(9)), Seq(6), "two of three have it, and the other one is silent");
        second(&sim, 49);
        stored(&replicas, 2, 6);
        stored(&replicas, 1, 7);
        second(&sim, 60);
        stored(&replicas, 1, 7);
        assert_eq!(replicas.trim_to(Seq(9)), Seq(7), "the other one was silent for as long as it wished");
        second(&sim, 60);
        assert_eq!(replicas.trim_to(Seq(9)), Seq(9));
    }

    /// Two standbys that step at different moments: the log waits for the later one, which would need a copy otherwise.
    #[test]
    fn the_log_waits_for_the_later_of_two_that_follow_but_not_for_one_that_cannot() {
        let sim = Sim::new(1);
        let replicas = Replicas::new(sim.env(), Arc::new(MemState::default()), Duration::ZERO);
        stored(&replicas, 1, 100);
        stored(&replicas, 2, 90);
        assert_eq!(replicas.trim_to(Seq(120)), Seq(90));
        stored(&replicas, 1, 20_000);
        assert_eq!(replicas.trim_to(Seq(10_090)), Seq(90));
        assert_eq!(replicas.trim_to(Seq(10_091)), Seq(10_091));
    }

    #[test]
    fn the_log_is_kept_for_a_copy_also_if_others_are_further() {
        let sim = Sim::new(1);
        let state = Arc::new(MemState::default());
        state.apply(&mut std::iter::empty(), Applied { seq: Seq(3), ..Applied::default() }).unwrap();
        let replicas = Replicas::new(sim.env(), state, Duration::ZERO);
        stored(&replicas, 1, 8);
        let begin = ReplicaRequest::Copy { replica: 2, wait_ms: 60_000, copy: 0, after: Bytes::new() };
        replicas.ask(begin).unwrap();
        stored(&replicas, 1, 9);
        assert_eq!(replicas.trim_to(Seq(9)), Seq(3));
        stored(&replicas, 2, 5);
        assert_eq!(replicas.trim_to(Seq(9)), Seq(5), "it follows now");
        stored(&replicas, 2, 9);
        assert_eq!(replicas.trim_to(Seq(9)), Seq(9));
    }

    /// The owner of a ledger whose store has an entry up to 3, and keys enough for two parts.
    fn with_content(sim: &Sim) -> (Replicas, Arc<MemState>) {
        let state = Arc::new(MemState::default());
        let value = vec![7; PART_BYTES];
        let content = [&b"a"[..], b"b", b"c"].map(|key| (key, Some(&value[..])));
        let applied = Applied { seq: Seq(3), ..Applied::default() };
        state.apply(&mut content.into_iter(), applied).unwrap();
        (Replicas::new(sim.env(), state.clone(), Duration::ZERO), state)
    }

    fn ask(replicas: &Replicas, replica: u64, copy: u64, after: &Bytes) -> Result<CopyPart, FsError> {
        let request = ReplicaRequest::Copy { replica, wait_ms: 60_000, copy, after: after.clone() };
        match replicas.ask(request)? {
            ReplicaReply::Copied(part) => Ok(part),
            ReplicaReply::Noted => panic!("a copy was asked for"),
        }
    }

    fn read_on(replicas: &Replicas, mut part: CopyPart) {
        while part.more {
            let after = part.pairs.last().unwrap().0.clone();
            part = ask(replicas, READER, part.copy, &after).unwrap();
        }
    }

    #[test]
    fn readers_read_beside_each_other_and_are_no_standbys() {
        let sim = Sim::new(1);
        let (replicas, _) = with_content(&sim);
        let begin = |replica| ask(&replicas, replica, 0, &Bytes::new());
        let (one, two) = (begin(READER).unwrap(), begin(READER).unwrap());
        assert_ne!(one.copy, two.copy);
        assert_eq!(begin(READER), Err(FsError::WouldBlock), "each copy keeps old pages");
        begin(5).unwrap();
        assert_eq!(replicas.standbys().len(), 1, "only the standby counts");
        stored(&replicas, 5, 8);
        assert_eq!(replicas.trim_to(Seq(9)), Seq(8), "the log is not kept for readers");
        read_on(&replicas, one);
        begin(READER).unwrap();
        read_on(&replicas, two);
        second(&sim, 60);
        begin(READER).unwrap();
        begin(READER).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_waits_for_all_that_was_durable_when_it_asked() {
        let sim = Sim::new(1);
        let (replicas, state) = with_content(&sim);
        let copy = |replica, copy| ReplicaRequest::Copy { replica, wait_ms: 0, copy, after: Bytes::new() };
        let begun = tokio::time::Instant::now();
        replicas.ready(&copy(READER, 0), Seq(3)).await.unwrap();
        replicas.ready(&copy(READER, 8), Seq(4)).await.unwrap();
        replicas.ready(&copy(5, 0), Seq(4)).await.unwrap();
        assert_eq!(begun.elapsed(), Duration::ZERO, "nothing is missing, or it is no beginning of a reader");
        let storing = async {
            tokio::time::sleep(Duration::from_millis(900)).await;
            state.apply(&mut std::iter::empty(), Applied { seq: Seq(4), ..Applied::default() }).unwrap();
        };
        let (begin, wanted) = (copy(READER, 0), Seq(4));
        let (ready, ()) = tokio::join!(replicas.ready(&begin, wanted), storing);
        ready.unwrap();
        let waited = begun.elapsed();
        assert!((Duration::from_millis(900)..Duration::from_secs(1)).contains(&waited), "{waited:?}");
        assert_eq!(ask(&replicas, READER, 0, &Bytes::new()).unwrap().seq, Seq(4));
        let begun = tokio::time::Instant::now();
        assert_eq!(replicas.ready(&begin, Seq(5)).await, Err(FsError::WouldBlock));
        assert!(begun.elapsed() >= READY_PATIENCE);
    }
}
