//! Two owners on one log that both reach: only one of them answers at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base::env::sim::Sim;
use base::env::{Clock, Env};
use base::{Epoch, FsError, Ino, LedgerId, Seq, SessionId};
use bytes::Bytes;
use meta::history::Evidence;
use meta::log::{AppendError, Fence, LedgerLog, LogCaps, LogEntry, LogError, MemLog, Sealed, Tail};
use meta::owner::{EarlierSessions, Owner, OwnerError, OwnerOptions, Standby, vacant};
use meta::state::{MemState, State};
use tokio::time::Instant;
use wire::BoxFuture;
use wire::meta::{
    Claim, EventSink, FileKind, MakeNode, MetaReply, MetaRequest, MetaService, OpenIntent, OwnerEvent,
    RequestId,
};

const LEASE: Duration = Duration::from_secs(3);

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

fn env() -> Env {
    Env { clock: Arc::new(PausedClock(Instant::now())), ..Sim::new(1).env() }
}

/// A log as one host sees it.
#[derive(Clone)]
struct Reached {
    log: MemLog,
    cut: Arc<AtomicBool>,
}

impl Reached {
    fn new(log: &MemLog) -> Self {
        Self { log: log.clone(), cut: Arc::default() }
    }

    fn check(&self) -> std::io::Result<()> {
        if self.cut.load(Ordering::Relaxed) { Err(std::io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

impl LedgerLog for Reached {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        Box::pin(async move {
            self.check()?;
            self.log.seal(epoch, nonce).await
        })
    }

    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        Box::pin(async move {
            self.check()?;
            self.log.fence().await
        })
    }

    fn renew(&self, owner: Sealed) -> BoxFuture<'_, Result<(), LogError>> {
        Box::pin(async move {
            self.check()?;
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
            self.check().map_err(AppendError::Unknown)?;
            self.log.append(epoch, first, batches).await
        })
    }

    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
        self.log.read(from, limit_bytes)
    }

    /// The other host may need all of it.
    fn trim(&self, _up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
        Box::pin(async { Ok(()) })
    }

    fn first(&self) -> Seq {
        self.log.first()
    }

    fn caps(&self) -> LogCaps {
        self.log.caps()
    }
}

struct Deaf;

impl EventSink for Deaf {
    fn event(&self, _event: OwnerEvent) {}
}

async fn open(log: &Reached, env: &Env, earlier_sessions: EarlierSessions) -> Owner {
    let options = OwnerOptions {
        ledger: LedgerId(1),
        log: Arc::new(log.clone()),
        state: Arc::new(MemState::default()),
        env: env.clone(),
        evidence: Evidence::default(),
        earlier_sessions,
        unstored_bytes_max: 256 << 20,
    };
    Owner::open_here(options).await.unwrap()
}

fn make(name: &str) -> MetaRequest {
    MetaRequest::Make(MakeNode {
        parent: Ino::ROOT,
        name: Bytes::copy_from_slice(name.as_bytes()),
        kind: FileKind::Regular,
        mode: 0o644,
        umask: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: Bytes::new(),
        open: OpenIntent::None,
    })
}

async fn ask(
    owner: &Owner,
    session: SessionId,
    seq: u64,
    request: MetaRequest,
) -> Result<MetaReply, FsError> {
    owner.call(RequestId { session, slot: 0, seq }.into(), request).await
}

fn on_paused_time<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
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
        let taken = tokio::time::timeout(Duration::from_secs(60), vacant(&second, &*env.clock)).await;
        assert!(taken.is_err());
        first.cut.store(true, Ordering::Relaxed);
        let read = MetaRequest::GetAttr { ino: Ino::ROOT };
        assert!(ask(&one, session, 2, read.clone()).await.is_ok(), "its lease has not ended");
        let began = Instant::now();
        vacant(&second, &*env.clock).await;
        assert!(began.elapsed() >= LEASE * 9 / 10 && began.elapsed() < LEASE * 2, "{:?}", began.elapsed());
        assert_eq!(ask(&one, session, 3, read.clone()).await, Err(FsError::Disconnected));
        assert_eq!(one.connect(Arc::new(Deaf)).await, Err(FsError::Disconnected));
        // Nobody took it, so it goes on.
        first.cut.store(false, Ordering::Relaxed);
        tokio::time::sleep(LEASE).await;
        assert!(ask(&one, session, 4, read.clone()).await.is_ok());
        let two = open(&second, &env, EarlierSessions::Resume).await;
        tokio::time::sleep(LEASE).await;
        assert_eq!(ask(&one, session, 5, read).await, Err(FsError::Disconnected));
        assert!(one.stat().halted && !two.stat().halted);
        assert!(one.problem().unwrap().contains("another owner"));
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
        let mut standby = Standby::new(LedgerId(1), Arc::new(second.clone()), state.clone()).unwrap();
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
        drop(one);
        standby.follow(&*env.clock).await.unwrap();
        // A standby that was away for too long cannot go on, and says so.
        log.trim(Seq(2)).await.unwrap();
        let mut late = Standby::new(LedgerId(1), Arc::new(second), Arc::new(MemState::default())).unwrap();
        let error = late.follow(&*env.clock).await.unwrap_err();
        assert!(matches!(error, OwnerError::Behind { applied: Seq(0), first: Seq(3), .. }), "{error}");
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
