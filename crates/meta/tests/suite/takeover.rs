//! Two owners on one log that both reach: only one of them answers at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use base::env::sim::Sim;
use base::env::{Clock, Env};
use base::{Epoch, FsError, Ino, LedgerId, Seq, SessionId};
use bytes::Bytes;
use meta::history::Evidence;
use meta::keys::KeyRange;
use meta::log::{AppendError, Fence, LedgerLog, LogCaps, LogEntry, LogError, MemLog, Sealed, Tail};
use meta::owner::{EarlierSessions, Owner, OwnerOptions, Standby, StandbyOptions};
use meta::state::{Applied, MemState, Pair, State, StateError, Visit, every_key};
use tokio::time::Instant;
use wire::BoxFuture;
use wire::meta::{Claim, EventSink, MetaReply, MetaRequest, MetaService, OwnerEvent, RequestId};
use wire::replica::{CopyPart, READER, ReplicaReply, ReplicaRequest, ReplicaService};

use crate::owner::make;

pub(crate) const LEASE: Duration = Duration::from_secs(3);

/// The clock of a paused runtime.
struct PausedClock(Instant);

impl Clock for PausedClock {
    fn boot_ns(&self) -> u64 {
        1 + self.0.elapsed().as_nanos() as u64
    }

    fn wall_ns(&self) -> i64 {
        self.boot_ns() as i64
    }
}

pub(crate) fn env() -> Env {
    Env { clock: Arc::new(PausedClock(Instant::now())), ..Sim::new(1).env() }
}

/// A log as one host sees it.
#[derive(Clone)]
pub(crate) struct Reached {
    pub(crate) log: MemLog,
    pub(crate) cut: Arc<AtomicBool>,
    /// If not, a host with an empty store can take the ledger at any time.
    pub(crate) trims: bool,
    /// Appends are lost.
    pub(crate) loses_appends: Arc<AtomicBool>,
    /// Answers to appends are lost, and the fence cannot be read.
    pub(crate) hides_appends: Arc<AtomicBool>,
    /// Entries cannot be read.
    pub(crate) loses_reads: Arc<AtomicBool>,
    /// How long a read of entries takes.
    pub(crate) read_takes: Duration,
    /// How long a call of this side waits for the end of a cut.
    pub(crate) patience: Duration,
    /// Trims never end.
    pub(crate) hangs_at_trim: bool,
    /// The log is trimmed up to here just before it is read.
    pub(crate) trim_at_read: Arc<AtomicU64>,
}

impl Reached {
    pub(crate) fn new(log: &MemLog) -> Self {
        Self {
            log: log.clone(),
            cut: Arc::default(),
            trims: false,
            loses_appends: Arc::default(),
            hides_appends: Arc::default(),
            loses_reads: Arc::default(),
            read_takes: Duration::ZERO,
            patience: Duration::ZERO,
            hangs_at_trim: false,
            trim_at_read: Arc::default(),
        }
    }

    async fn check(&self) -> std::io::Result<()> {
        let began = Instant::now();
        while self.cut.load(Ordering::Relaxed) {
            if began.elapsed() >= self.patience {
                return Err(std::io::ErrorKind::TimedOut.into());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }
}

impl LedgerLog for Reached {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        Box::pin(async move {
            self.check().await?;
            self.log.seal(epoch, nonce).await
        })
    }

    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        Box::pin(async move {
            self.check().await?;
            if self.hides_appends.load(Ordering::Relaxed) {
                return Err(LogError::Damaged("for a test".to_owned()));
            }
            self.log.fence().await
        })
    }

    fn renew(&self, owner: Sealed) -> BoxFuture<'_, Result<(), LogError>> {
        Box::pin(async move {
            self.check().await?;
            self.log.renew(owner).await
        })
    }

    fn append(
        &self,
        epoch: Epoch,
        first: Seq,
        batches: Vec<Vec<u8>>,
    ) -> BoxFuture<'_, Result<(), AppendError>> {
        Box::pin(async move {
            self.check().await.map_err(AppendError::Unknown)?;
            if self.loses_appends.load(Ordering::Relaxed) {
                tokio::time::sleep(self.patience).await;
                return Err(AppendError::Unknown(std::io::ErrorKind::TimedOut.into()));
            }
            let appended = self.log.append(epoch, first, batches).await;
            if self.hides_appends.load(Ordering::Relaxed) {
                return Err(AppendError::Unknown(std::io::ErrorKind::TimedOut.into()));
            }
            appended
        })
    }

    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
        Box::pin(async move {
            if self.loses_reads.load(Ordering::Relaxed) {
                return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
            }
            if !self.read_takes.is_zero() {
                tokio::time::sleep(self.read_takes).await;
            }
            self.log.trim(Seq(self.trim_at_read.swap(0, Ordering::Relaxed))).await?;
            self.log.read(from, limit_bytes).await
        })
    }

    fn trim(&self, up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
        Box::pin(async move {
            if self.hangs_at_trim {
                std::future::pending::<()>().await;
            }
            if self.trims { self.log.trim(up_to).await } else { Ok(()) }
        })
    }

    fn first(&self) -> Seq {
        self.log.first()
    }

    fn caps(&self) -> LogCaps {
        self.log.caps()
    }
}

pub(crate) struct Deaf;

impl EventSink for Deaf {
    fn event(&self, _event: OwnerEvent) {}
}

pub(crate) fn options_of(log: &Reached, env: &Env) -> OwnerOptions {
    OwnerOptions {
        ledger: LedgerId(1),
        log: Arc::new(log.clone()),
        state: Arc::new(MemState::default()),
        env: env.clone(),
        evidence: Evidence::default(),
        vacant: None,
        earlier_sessions: EarlierSessions::End,
        unstored_bytes_max: 256 << 20,
        standby_grace: Duration::ZERO,
    }
}

pub(crate) async fn open(log: &Reached, env: &Env, earlier_sessions: EarlierSessions) -> Arc<Owner> {
    let options = OwnerOptions { earlier_sessions, ..options_of(log, env) };
    Arc::new(Owner::open_here(options).await.unwrap())
}

pub(crate) async fn ask(
    owner: &Owner,
    session: SessionId,
    seq: u64,
    request: MetaRequest,
) -> Result<MetaReply, FsError> {
    owner.call(RequestId { session, slot: 0, seq }.into(), request).await
}

/// For how long the log is kept for a standby.
pub(crate) const WAIT: Duration = Duration::from_secs(20);

fn standby(log: &Reached, state: &Arc<MemState>, owner: &Arc<Owner>, replica: u64) -> Standby {
    let (log, state) = (Arc::new(log.clone()), state.clone());
    let options =
        StandbyOptions { ledger: LedgerId(1), log, state, owner: owner.clone(), replica, wait: WAIT };
    Standby::new(options).unwrap()
}

pub(crate) fn on_paused_time<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().start_paused(true).build().unwrap().block_on(async {
        tokio::time::timeout(Duration::from_secs(600), test()).await.expect("it hangs");
    });
}

#[test]
fn an_owner_that_is_cut_off_answers_nothing_before_another_node_may_take_the_ledger() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let (first, second) = (Reached::new(&log), Reached::new(&log));
        let one = open(&first, &env, EarlierSessions::End).await;
        let session = one.connect(Arc::new(Deaf)).await.unwrap();
        ask(&one, session, 1, make("a")).await.unwrap();
        // As long as it gives signs of life the ledger is not vacant.
        let rival = || standby(&second, &Arc::new(MemState::default()), &one, 2);
        let taken = tokio::time::timeout(Duration::from_secs(60), rival().follow(&*env.clock)).await;
        assert!(taken.is_err());
        let read = MetaRequest::GetAttr { ino: Ino::ROOT };
        // The session rested: the log must have its first request.
        assert!(ask(&one, session, 2, read.clone()).await.is_ok());
        first.cut.store(true, Ordering::Relaxed);
        assert!(ask(&one, session, 3, read.clone()).await.is_ok(), "its lease has not ended");
        let began = Instant::now();
        rival().follow(&*env.clock).await.unwrap();
        assert!(began.elapsed() >= LEASE * 9 / 10 && began.elapsed() < LEASE * 2, "{:?}", began.elapsed());
        assert_eq!(ask(&one, session, 4, read.clone()).await, Err(FsError::Disconnected));
        assert_eq!(one.connect(Arc::new(Deaf)).await, Err(FsError::Disconnected));
        // Nobody took it, so it goes on.
        first.cut.store(false, Ordering::Relaxed);
        tokio::time::sleep(LEASE).await;
        assert!(ask(&one, session, 5, read.clone()).await.is_ok());
        let two = open(&second, &env, EarlierSessions::Resume).await;
        tokio::time::sleep(LEASE).await;
        assert_eq!(ask(&one, session, 6, read).await, Err(FsError::Disconnected));
        assert!(one.stat().halted && !two.stat().halted);
        assert!(one.problem().unwrap().contains("another owner"));
    });
}

/// The engine falls silent together with the owner, because both were on one machine: that time counts. After it, an owner that lives has a
/// moment to show itself.
#[test]
fn a_silence_of_the_log_counts_as_silence_of_its_owner_who_may_break_it_first() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        // As those of an engine: a look lasts through an outage, a sign of life gives up.
        let first = Reached { patience: Duration::from_millis(2500), ..Reached::new(&log) };
        let second = Reached { patience: Duration::from_secs(5), ..Reached::new(&log) };
        let one = open(&first, &env, EarlierSessions::End).await;
        let rival = || standby(&second, &Arc::new(MemState::default()), &one, 2);
        let silence = |cut: bool, pause: Duration| {
            [&first, &second].iter().for_each(|way| way.cut.store(cut, Ordering::Relaxed));
            tokio::time::sleep(pause)
        };
        let work = async {
            for outage_ms in [600, 1300, 2000, 2600, 3300, 4900, 5100, 7000] {
                silence(true, Duration::from_millis(outage_ms)).await;
                silence(false, Duration::from_millis(1250)).await;
            }
            silence(false, LEASE).await;
        };
        let mut patient = rival();
        tokio::select! {
            followed = patient.follow(&*env.clock) => panic!("the owner lives: {followed:?}"),
            () = work => {}
        }
        // It dies, and for others the log is away for most of the lease. They have seen its last sign of life before.
        first.cut.store(true, Ordering::Relaxed);
        let began = Instant::now();
        let seen = tokio::time::timeout(Duration::from_millis(700), patient.follow(&*env.clock)).await;
        assert!(seen.is_err());
        second.cut.store(true, Ordering::Relaxed);
        let back = async {
            tokio::time::sleep(LEASE * 2 / 3 - began.elapsed()).await;
            second.cut.store(false, Ordering::Relaxed);
            std::future::pending::<()>().await
        };
        tokio::select! {
            followed = patient.follow(&*env.clock) => drop(followed.unwrap()),
            () = back => {}
        }
        // Two seconds of silence and one and a half of looks, not two and three.
        assert!(
            began.elapsed() >= LEASE * 9 / 10 && began.elapsed() < LEASE * 4 / 3,
            "{:?}",
            began.elapsed()
        );
    });
}

#[test]
fn a_standby_follows_the_log_and_is_told_when_it_may_take_the_ledger() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let (first, second) = (Reached::new(&log), Reached::new(&log));
        let one = open(&first, &env, EarlierSessions::End).await;
        let session = one.connect(Arc::new(Deaf)).await.unwrap();
        let state = Arc::new(MemState::default());
        let mut standby = standby(&second, &state, &one, 2);
        let work = async {
            for (seq, name) in (1..).zip(["a", "b", "c"]) {
                ask(&one, session, seq, make(name)).await.unwrap();
                tokio::time::sleep(Duration::from_secs(2)).await;
                assert_eq!(state.applied().unwrap().seq.0, one.stat().committed_seq, "{name}");
                // While the log does not answer, it waits.
                second.cut.store(name == "b", Ordering::Relaxed);
                tokio::time::sleep(2 * LEASE).await;
                second.cut.store(false, Ordering::Relaxed);
            }
        };
        tokio::select! {
            followed = standby.follow(&*env.clock) => panic!("the owner lives: {followed:?}"),
            () = work => {}
        }
        one.stop();
        standby.follow(&*env.clock).await.unwrap();
    });
}

#[test]
fn the_log_is_kept_for_standbys_that_follow_and_others_take_a_copy_of_the_store() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let (first, second) = (Reached { trims: true, ..Reached::new(&log) }, Reached::new(&log));
        let one = open(&first, &env, EarlierSessions::End).await;
        let session = one.connect(Arc::new(Deaf)).await.unwrap();
        let (state, copied) = (Arc::new(MemState::default()), Arc::new(MemState::default()));
        let mut follower = standby(&second, &state, &one, 2);
        let pause = || tokio::time::sleep(Duration::from_secs(3));
        let work = async {
            pause().await;
            // This standby does not get further.
            second.cut.store(true, Ordering::Relaxed);
            let kept = state.applied().unwrap().seq;
            for seq in 1..=4 {
                ask(&one, session, seq, make(&format!("f{seq}"))).await.unwrap();
                pause().await;
            }
            assert_eq!(log.first(), Seq(kept.0 + 1), "what it lacks is kept");
            tokio::time::sleep(WAIT).await;
            ask(&one, session, 5, make("e")).await.unwrap();
            pause().await;
            assert!(log.first() > Seq(kept.0 + 1), "it is not waited for any longer");
            second.cut.store(false, Ordering::Relaxed);
            pause().await;
        };
        tokio::select! {
            followed = follower.follow(&*env.clock) => panic!("the owner lives: {followed:?}"),
            () = work => {}
        }
        assert_eq!(state.applied().unwrap().seq.0, one.stat().committed_seq, "it took a copy");
        // A new standby replaces other content by a copy. The owner trims the log before the copy is complete.
        copied.apply(&mut [(&b"other"[..], Some(&b"x"[..]))].into_iter(), Applied::default()).unwrap();
        let mut late = standby(&second, &copied, &one, 3);
        let work = async {
            for seq in 6..=9 {
                pause().await;
                ask(&one, session, seq, make(&format!("g{seq}"))).await.unwrap();
            }
            pause().await;
        };
        tokio::select! {
            followed = late.follow(&*env.clock) => panic!("the owner lives: {followed:?}"),
            followed = follower.follow(&*env.clock) => panic!("the owner lives: {followed:?}"),
            () = work => {}
        }
        let content = |state: &MemState| {
            let mut pairs = Vec::new();
            let visit = &mut |key: &[u8], value: &[u8]| {
                pairs.push((key.to_vec(), value.to_vec()));
                std::ops::ControlFlow::Continue(())
            };
            state.scan(&every_key(), visit).unwrap();
            pairs
        };
        one.stop();
        let (late, follower) = tokio::join!(late.follow(&*env.clock), follower.follow(&*env.clock));
        late.and(follower).unwrap();
        assert_eq!(content(&state), content(&copied));
        // Without an owner there is no copy: such a standby does not take the ledger.
        log.trim(Seq(one.stat().committed_seq)).await.unwrap();
        let mut empty = standby(&second, &Arc::new(MemState::default()), &one, 4);
        let followed = tokio::time::timeout(Duration::from_secs(60), empty.follow(&*env.clock)).await;
        assert!(followed.is_err());
    });
}

#[test]
fn a_log_that_is_trimmed_while_a_standby_reads_it_makes_the_standby_copy_the_store() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let (first, second) = (Reached::new(&log), Reached::new(&log));
        let one = open(&first, &env, EarlierSessions::End).await;
        let session = one.connect(Arc::new(Deaf)).await.unwrap();
        for seq in 1..=4 {
            ask(&one, session, seq, make(&format!("f{seq}"))).await.unwrap();
        }
        tokio::time::sleep(Duration::from_secs(3)).await;
        second.trim_at_read.store(3, Ordering::Relaxed);
        let state = Arc::new(MemState::default());
        let mut follower = standby(&second, &state, &one, 2);
        let followed = tokio::time::timeout(Duration::from_secs(3), follower.follow(&*env.clock)).await;
        assert!(followed.is_err(), "{followed:?}");
        assert_eq!(log.first(), Seq(4));
        assert_eq!(state.applied().unwrap().seq.0, one.stat().committed_seq);
    });
}

/// A store that has no room once.
#[derive(Clone)]
struct FullOnce {
    state: MemState,
    full: Arc<AtomicBool>,
}

impl State for FullOnce {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StateError> {
        self.state.get(key)
    }

    fn scan(&self, range: &KeyRange, visit: &mut Visit<'_>) -> Result<(), StateError> {
        self.state.scan(range, visit)
    }

    fn last(&self, range: &KeyRange) -> Result<Option<Pair>, StateError> {
        self.state.last(range)
    }

    fn apply(
        &self,
        changes: &mut dyn Iterator<Item = (&[u8], Option<&[u8]>)>,
        applied: Applied,
    ) -> Result<(), StateError> {
        if self.full.swap(false, Ordering::Relaxed) {
            return Err(StateError::NoSpace("for a test".to_owned()));
        }
        self.state.apply(changes, applied)
    }

    fn applied(&self) -> Result<Applied, StateError> {
        self.state.applied()
    }

    fn snapshot(&self) -> Result<Arc<dyn State>, StateError> {
        self.state.snapshot()
    }
}

#[test]
fn a_standby_whose_store_was_full_goes_on_where_the_store_ends() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let one = open(&Reached::new(&log), &env, EarlierSessions::End).await;
        let session = one.connect(Arc::new(Deaf)).await.unwrap();
        ask(&one, session, 1, make("a")).await.unwrap();
        let state = FullOnce { state: MemState::default(), full: Arc::new(AtomicBool::new(true)) };
        let options = StandbyOptions {
            ledger: LedgerId(1),
            log: Arc::new(log.clone()),
            state: Arc::new(state.clone()),
            owner: one.clone(),
            replica: 2,
            wait: WAIT,
        };
        let mut standby = Standby::new(options).unwrap();
        standby.follow(&*env.clock).await.unwrap_err();
        ask(&one, session, 2, make("b")).await.unwrap();
        one.stop();
        standby.follow(&*env.clock).await.unwrap();
        let three = OwnerOptions { state: Arc::new(state.state), ..options_of(&Reached::new(&log), &env) };
        let three = Owner::open_here(three).await.unwrap();
        let session = three.connect(Arc::new(Deaf)).await.unwrap();
        for (seq, name) in [(1, "a"), (2, "b")] {
            let lookup = MetaRequest::Lookup { parent: Ino::ROOT, name: name.into() };
            let found = ask(&three, session, seq, lookup).await.unwrap();
            assert!(matches!(found, MetaReply::Entry { .. }), "{name}: {found:?}");
        }
    });
}

#[test]
fn a_copy_goes_on_with_the_state_at_its_beginning_and_parts_may_be_asked_for_again() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let one = open(&Reached::new(&log), &env, EarlierSessions::End).await;
        let session = one.connect(Arc::new(Deaf)).await.unwrap();
        let value = |ino| MetaRequest::SetXattr {
            ino,
            name: "user.a".into(),
            value: vec![7; 60_000].into(),
            mode: wire::meta::XattrMode::Set,
        };
        for number in 1..60 {
            let made = ask(&one, session, 2 * number, make(&format!("f{number}"))).await.unwrap();
            let MetaReply::Entry { attr, .. } = made else { panic!("an entry is made") };
            ask(&one, session, 2 * number + 1, value(attr.ino)).await.unwrap();
        }
        tokio::time::sleep(Duration::from_secs(3)).await;
        let part = |copy, after: Bytes| {
            let request = ReplicaRequest::Copy { replica: 5, wait_ms: 1000, copy, after };
            async {
                match one.ask(request).await {
                    Ok(ReplicaReply::Copied(part)) => Ok(part),
                    Ok(ReplicaReply::Noted) => panic!("a copy was asked for"),
                    Err(error) => Err(error),
                }
            }
        };
        let last = |part: &CopyPart| part.pairs.last().unwrap().0.clone();
        let begun = part(0, Bytes::new()).await.unwrap();
        assert!(begun.more && begun.copy != 0);
        let next = part(begun.copy, last(&begun)).await.unwrap();
        assert!(last(&begun) < next.pairs[0].0, "it goes on behind the first part");
        ask(&one, session, 200, make("late")).await.unwrap();
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(part(begun.copy, last(&begun)).await.unwrap(), next);
        assert_eq!(part(begun.copy, Bytes::new()).await, Err(FsError::NotFound));
        let mut end = next;
        while end.more {
            end = part(begun.copy, last(&end)).await.unwrap();
            assert_eq!((end.seq, end.copy), (begun.seq, begun.copy));
        }
        assert!(begun.seq.0 < one.stat().stored_seq);
        assert!(part(0, Bytes::new()).await.unwrap().seq.0 == one.stat().stored_seq);
        assert_eq!(part(begun.copy, last(&begun)).await, Err(FsError::NotFound), "another has begun");
    });
}

#[test]
fn a_reader_gets_all_that_was_durable_when_it_asked() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let one = open(&Reached::new(&log), &env, EarlierSessions::End).await;
        let session = one.connect(Arc::new(Deaf)).await.unwrap();
        for number in 1..4 {
            ask(&one, session, number, make(&format!("f{number}"))).await.unwrap();
            let durable = one.stat().committed_seq;
            assert!(one.stat().stored_seq < durable, "the store is behind");
            let read = ReplicaRequest::Copy { replica: READER, wait_ms: 0, copy: 0, after: Bytes::new() };
            let Ok(ReplicaReply::Copied(part)) = one.ask(read).await else { panic!("it gets a copy") };
            assert!(part.seq.0 >= durable, "{} {durable}", part.seq);
        }
        assert_eq!(one.standbys(), []);
    });
}

#[test]
fn requests_wait_until_all_sessions_have_claimed_their_state_or_are_silent() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let host = Reached::new(&log);
        let one = open(&host, &env, EarlierSessions::End).await;
        let here = one.connect(Arc::new(Deaf)).await.unwrap();
        let _gone = one.connect(Arc::new(Deaf)).await.unwrap();
        let first = ask(&one, here, 1, make("a")).await.unwrap();
        drop(one);
        let two = open(&host, &env, EarlierSessions::Resume).await;
        let claim = Claim { in_use_ver: u64::MAX, ..Claim::default() };
        two.resume(here, claim, Arc::new(Deaf)).await.unwrap();
        let began = Instant::now();
        let beat = MetaRequest::Heartbeat { in_use_ver: u64::MAX };
        let alive = async {
            for seq in 1.. {
                let id = RequestId { session: here, slot: 1, seq };
                two.call(id.into(), beat.clone()).await.unwrap();
                assert!(seq > 2 || began.elapsed() < Duration::from_secs(2), "heartbeats do not wait");
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
        };
        // The same request under the same id gets its first answer.
        tokio::select! {
            () = alive => {}
            again = ask(&two, here, 1, make("a")) => assert_eq!(again.unwrap().attrs(), first.attrs()),
        }
        let waited = began.elapsed();
        assert!((Duration::from_secs(15)..Duration::from_secs(30)).contains(&waited), "{waited:?}");
    });
}
