//! Ledgers of records, and ledgers of filesystems, that several nodes reach: who has one, and for how long.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use base::env::Env;
use base::{Epoch, FsError, Ino, LedgerId, Lineage, Seq};
use bytes::Bytes;
use meta::batch::Batch;
use meta::log::{AppendError, LedgerLog, LogError, MemLog, NOBODY, Vacancy};
use meta::owner::{EarlierSessions, Owner, OwnerError, OwnerOptions, Standby, StandbyOptions};
use meta::records::{Records, RecordsError, RecordsOptions};
use meta::state::{MemState, State};
use tokio::time::Instant;
use wire::meta::{EventSink, MetaRequest, MetaService};
use wire::replica::{ReplicaRequest, ReplicaService, STANDBY_WAIT_MAX};

use crate::owner::make;
use crate::takeover::{Deaf, LEASE, Reached, WAIT, ask, env, on_paused_time, options_of};

const LEDGER: LedgerId = LedgerId(0);

async fn take(
    log: &Reached,
    state: &Arc<MemState>,
    env: &Env,
    vacant: Option<Vacancy>,
) -> Result<Arc<Records>, OwnerError> {
    let (log, state, env) = (Arc::new(log.clone()), state.clone(), env.clone());
    Ok(Arc::new(Records::open(RecordsOptions { ledger: LEDGER, log, state, env, vacant }).await?))
}

/// Opens the ledger with an empty store.
async fn open(log: &Reached, env: &Env) -> Arc<Records> {
    take(log, &Arc::default(), env, None).await.unwrap()
}

async fn put(records: &Records, key: &str) -> Result<(), RecordsError> {
    records.commit(|_, _| Ok(vec![(key.as_bytes().to_vec(), Some(b"x".to_vec()))])).await
}

fn standby(
    log: &Reached,
    state: &Arc<MemState>,
    owner: Arc<dyn ReplicaService>,
    ledger: LedgerId,
) -> Standby {
    let (log, state) = (Arc::new(log.clone()), state.clone());
    Standby::new(StandbyOptions { ledger, log, state, owner, replica: 2, wait: WAIT }).unwrap()
}

/// The keys that entries of the log change.
async fn keys_in(log: &MemLog) -> Vec<String> {
    let entries = log.read(log.first(), usize::MAX).await.unwrap();
    let changes = entries.iter().flat_map(|entry| Batch::decode(&entry.batch).unwrap().changes);
    changes.map(|(key, _)| String::from_utf8_lossy(&key).into_owned()).collect()
}

/// Runs the owner's own work beside this one, which must end first.
async fn while_kept<T>(records: &Records, work: impl Future<Output = T>) -> T {
    tokio::select! {
        biased;
        () = records.keep() => panic!("it is the owner"),
        done = work => done,
    }
}

#[track_caller]
fn check_fenced<T>(taken: Result<T, OwnerError>, last: u64) {
    match taken {
        Err(OwnerError::Log { source: LogError::Fenced(epoch), .. }) => assert_eq!(epoch, Epoch(last)),
        Err(error) => panic!("{error:?}"),
        Ok(_) => panic!("another node has it"),
    }
}

#[test]
fn a_change_waits_for_an_engine_that_elects_a_leader_and_not_much_longer() {
    on_paused_time(|| async {
        let (log, env) = (Reached::new(&MemLog::shared(LEASE)), env());
        let records = open(&log, &env).await;
        let silent = async |time: Duration, key: &str| {
            log.loses_appends.store(true, Ordering::Relaxed);
            let ends = async {
                tokio::time::sleep(time).await;
                log.loses_appends.store(false, Ordering::Relaxed);
                std::future::pending::<()>().await;
            };
            let began = Instant::now();
            tokio::select! {
                put = put(&records, key) => (put, began.elapsed()),
                () = ends => unreachable!(),
            }
        };
        let (put_in_time, took) = silent(Duration::from_secs(4), "a").await;
        put_in_time.unwrap();
        assert!(took < Duration::from_secs(5), "{took:?}");
        let (too_late, took) = silent(Duration::from_secs(60), "b").await;
        assert!(matches!(too_late, Err(RecordsError::Log(AppendError::Unknown(_)))), "{too_late:?}");
        assert!(took < Duration::from_secs(7), "{took:?}");
        // The next one does not wait as long again.
        let (too_late, took) = silent(Duration::from_secs(60), "c").await;
        assert!(too_late.is_err() && took < Duration::from_secs(1), "{took:?}");
        // What was not answered comes first.
        log.loses_appends.store(false, Ordering::Relaxed);
        put(&records, "d").await.unwrap();
        assert_eq!(keys_in(&log.log).await, ["a", "b", "d"]);
    });
}

#[test]
fn an_owner_of_records_whose_ledger_was_taken_changes_nothing_and_is_told() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let one = open(&Reached::new(&log), &env).await;
        put(&one, "a").await.unwrap();
        assert!(one.holds());
        let two = open(&Reached::new(&log), &env).await;
        put(&two, "b").await.unwrap();
        for key in ["c", "d"] {
            assert!(matches!(put(&one, key).await, Err(RecordsError::NotOwner)), "{key}");
            assert!(!one.holds(), "it knows");
        }
        assert!(matches!(one.catch_up().await, Err(RecordsError::NotOwner)));
        one.keep().await;
        let asked = ReplicaRequest::Stored { replica: 2, seq: Seq(1), wait_ms: 1 };
        assert_eq!(one.ask(asked.clone()).await, Err(FsError::Disconnected));
        two.ask(asked).await.unwrap();
        assert!(two.holds());
        put(&two, "e").await.unwrap();
        assert_eq!(keys_in(&log).await, ["a", "b", "e"]);
        // One that does not change anything is told as well.
        let three = open(&Reached::new(&log), &env).await;
        two.keep().await;
        assert!(!two.holds() && three.holds());
        let begun = two.begin(Lineage(1), |_, _| panic!("another node decides") as Result<_, RecordsError>);
        assert!(matches!(begun.await, Err(RecordsError::NotOwner)));
        let decided = two.commit(|_, _| panic!("another node decides") as Result<_, RecordsError>);
        assert!(matches!(decided.await, Err(RecordsError::NotOwner)));
        // An earlier owner does not give back what is another's.
        two.resign().await;
        assert_eq!(log.fence().await.unwrap().epoch, three.epoch());
    });
}

#[test]
fn of_standbys_that_saw_the_same_vacancy_one_gets_the_ledger() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let host = Reached::new(&log);
        let one = open(&host, &env).await;
        put(&one, "a").await.unwrap();
        let states = [Arc::new(MemState::default()), Arc::new(MemState::default())];
        let [mut two, mut three] =
            [0, 1].map(|index: usize| standby(&host, &states[index], one.clone(), LEDGER));
        let (seen, again) = tokio::join!(two.follow(&*env.clock), three.follow(&*env.clock));
        let (seen, again) = (seen.unwrap(), again.unwrap());
        assert_eq!((seen.epoch, again), (one.epoch(), seen));
        let taken = take(&host, &states[0], &env, Some(seen)).await.unwrap();
        put(&taken, "b").await.unwrap();
        check_fenced(take(&host, &states[1], &env, Some(again)).await, 2);
        assert!(taken.holds());
        put(&taken, "c").await.unwrap();
        // The ledger of a filesystem is not taken from it either.
        let options = OwnerOptions { ledger: LEDGER, vacant: Some(again), ..options_of(&host, &env) };
        check_fenced(Owner::open_here(options).await, 2);
        // The other one waits for the next vacancy, and has all changes then.
        let began = Instant::now();
        let seen = three.follow(&*env.clock).await.unwrap();
        assert_eq!(seen.epoch, Epoch(2));
        assert!(began.elapsed() >= LEASE, "{:?}", began.elapsed());
        let next = take(&host, &states[1], &env, Some(seen)).await.unwrap();
        for key in ["a", "b", "c"] {
            assert!(next.snapshot().unwrap().get(key.as_bytes()).unwrap().is_some(), "{key}");
        }
        check_fenced(take(&host, &Arc::default(), &env, Some(Vacancy { epoch: Epoch(7), ..seen })).await, 3);
    });
}

#[test]
fn an_owner_that_comes_back_before_its_ledger_is_taken_keeps_it() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let host = Reached::new(&log);
        let one = open(&host, &env).await;
        put(&one, "a").await.unwrap();
        // It sleeps for longer than its lease.
        let (_, seen) = vacant_after(&host, &env, one.clone()).await;
        assert!(!one.holds());
        while_kept(&one, tokio::time::sleep(Duration::from_millis(10))).await;
        assert!(one.holds());
        check_fenced(take(&host, &Arc::default(), &env, Some(seen)).await, 1);
        assert!(one.holds());
        put(&one, "b").await.unwrap();
        let (waited, seen) = vacant_after(&host, &env, one.clone()).await;
        assert!(waited >= LEASE && seen.epoch == Epoch(1), "{waited:?} {seen:?}");
        let two = take(&host, &Arc::default(), &env, Some(seen)).await.unwrap();
        assert!(two.holds() && !one.holds());
    });
}

/// How long a standby waits until the ledger is vacant, and what it saw.
async fn vacant_after(log: &Reached, env: &Env, owner: Arc<dyn ReplicaService>) -> (Duration, Vacancy) {
    let began = Instant::now();
    let mut standby = standby(log, &Arc::default(), owner, LEDGER);
    let seen = standby.follow(&*env.clock).await.unwrap();
    (began.elapsed(), seen)
}

#[test]
fn a_ledger_that_was_given_back_is_vacant_at_once_and_that_of_a_dead_owner_after_its_lease() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let host = Reached::new(&log);
        let one = open(&host, &env).await;
        put(&one, "a").await.unwrap();
        let (waited, seen) = vacant_after(&host, &env, one.clone()).await;
        assert!(waited >= LEASE && seen.epoch == Epoch(1), "{waited:?} {seen:?}");
        one.resign().await;
        assert!(!one.holds());
        one.keep().await;
        assert!(matches!(put(&one, "b").await, Err(RecordsError::NotOwner)));
        let (waited, seen) = vacant_after(&host, &env, one.clone()).await;
        assert!(waited < Duration::from_millis(1) && seen.epoch == Epoch(2), "{waited:?} {seen:?}");
        let fence = log.fence().await.unwrap();
        assert_eq!((fence.epoch, fence.nonce), (Epoch(2), NOBODY));
        let two = take(&host, &Arc::default(), &env, Some(seen)).await.unwrap();
        put(&two, "c").await.unwrap();
        assert_eq!(keys_in(&log).await, ["a", "c"]);
        // An owner that does not reach the log resigns all the same, and standbys wait.
        host.cut.store(true, Ordering::Relaxed);
        two.resign().await;
        assert!(!two.holds());
        host.cut.store(false, Ordering::Relaxed);
        let (waited, seen) = vacant_after(&host, &env, two.clone()).await;
        assert!(waited >= LEASE && seen.epoch == Epoch(3), "{waited:?} {seen:?}");
    });
}

#[test]
fn a_ledger_that_nobody_ever_took_is_vacant_at_once() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let host = Reached::new(&log);
        let nobody = Arc::new(Records::view(LEDGER, Arc::new(MemState::default())));
        assert!(!nobody.holds());
        let (waited, seen) = vacant_after(&host, &env, nobody).await;
        assert!(waited < Duration::from_millis(1) && seen.epoch == Epoch(0), "{waited:?} {seen:?}");
        let first = take(&host, &Arc::default(), &env, Some(seen)).await.unwrap();
        assert_eq!(first.epoch(), Epoch(1));
        check_fenced(take(&host, &Arc::default(), &env, Some(seen)).await, 1);
    });
}

#[test]
fn an_owner_that_stops_in_order_gives_its_ledger_back() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let host = Reached::new(&log);
        let one = crate::takeover::open(&host, &env, EarlierSessions::End).await;
        let session = one.connect(Arc::new(Deaf)).await.unwrap();
        ask(&one, session, 1, make("a")).await.unwrap();
        one.stop();
        tokio::time::sleep(Duration::from_millis(10)).await;
        one.resign().await;
        let read = MetaRequest::GetAttr { ino: Ino::ROOT };
        assert_eq!(ask(&one, session, 2, read).await, Err(FsError::Disconnected));
        let asked = ReplicaRequest::Copy { replica: 3, wait_ms: 1, copy: 0, after: Bytes::new() };
        assert_eq!(one.ask(asked).await, Err(FsError::Disconnected));
        let began = Instant::now();
        let mut next = standby(&host, &Arc::default(), one.clone(), LedgerId(1));
        let seen = next.follow(&*env.clock).await.unwrap();
        assert!(began.elapsed() < Duration::from_millis(1), "{:?}", began.elapsed());
        let options = OwnerOptions { vacant: Some(seen), ..options_of(&host, &env) };
        let two = Owner::open_here(options).await.unwrap();
        assert_eq!(two.stat().epoch, 3);
        let session = two.connect(Arc::new(Deaf)).await.unwrap();
        let lookup = MetaRequest::Lookup { parent: Ino::ROOT, name: "a".into() };
        ask(&two, session, 1, lookup).await.unwrap();
    });
}

#[test]
fn where_no_other_node_reaches_the_log_an_owner_holds_until_it_resigns() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::new(), env());
        let host = Reached::new(&log);
        let one = open(&host, &env).await;
        put(&one, "a").await.unwrap();
        host.cut.store(true, Ordering::Relaxed);
        while_kept(&one, tokio::time::sleep(10 * LEASE)).await;
        assert!(one.holds());
        host.cut.store(false, Ordering::Relaxed);
        one.resign().await;
        // The end of its log may be noted elsewhere now: nothing comes behind it.
        let tail = log.fence().await.unwrap().tail;
        assert!(!one.holds());
        assert!(put(&one, "b").await.is_err());
        assert_eq!(log.fence().await.unwrap().tail, tail);
    });
}

#[test]
fn a_standby_of_records_follows_and_takes_a_copy_after_a_trim_and_then_the_ledger() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let (first, second) = (Reached { trims: true, ..Reached::new(&log) }, Reached::new(&log));
        let one = open(&first, &env).await;
        let state = Arc::new(MemState::default());
        let mut follower = standby(&second, &state, one.clone(), LEDGER);
        let put_many = async |from: u64, to: u64| {
            for number in from..to {
                put(&one, &format!("k{number:04}")).await.unwrap();
            }
        };
        let looked = || tokio::time::sleep(Duration::from_secs(11));
        let work = async {
            put_many(0, 300).await;
            looked().await;
            assert_eq!(state.applied().unwrap().seq, Seq(300), "it follows");
            assert_eq!(log.first(), Seq(1), "standbys of an earlier owner may come");
            // This standby does not get further, and waits.
            tokio::time::sleep(STANDBY_WAIT_MAX).await;
            assert_eq!(log.first(), Seq(301), "both have it");
            put_many(300, 400).await;
            looked().await;
            assert_eq!(log.first(), Seq(301), "few changes are not trimmed each for itself");
            second.cut.store(true, Ordering::Relaxed);
            put_many(400, 700).await;
            looked().await;
            assert_eq!(log.first(), Seq(301), "the standby may come back");
            tokio::time::sleep(WAIT).await;
            assert_eq!(log.first(), Seq(701), "it is not waited for any longer");
            second.cut.store(false, Ordering::Relaxed);
            looked().await;
            assert_eq!(state.applied().unwrap().seq, Seq(700), "it took a copy");
            put_many(700, 710).await;
        };
        tokio::select! {
            followed = follower.follow(&*env.clock) => panic!("the owner lives: {followed:?}"),
            () = while_kept(&one, work) => {}
        }
        let seen = follower.follow(&*env.clock).await.unwrap();
        let two = take(&second, &state, &env, Some(seen)).await.unwrap();
        put(&two, "last").await.unwrap();
        let (pairs, _) = two.snapshot().unwrap().part(b"", usize::MAX).unwrap();
        assert_eq!(pairs.len(), 711);
        assert!(!one.holds());
    });
}

#[test]
fn a_trim_that_hangs_delays_neither_changes_nor_signs_of_life() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let one = open(&Reached { hangs_at_trim: true, ..Reached::new(&log) }, &env).await;
        let work = async {
            for number in 0..300 {
                put(&one, &format!("k{number}")).await.unwrap();
            }
            tokio::time::sleep(2 * STANDBY_WAIT_MAX).await;
            assert!(one.holds());
            put(&one, "last").await.unwrap();
        };
        while_kept(&one, work).await;
    });
}

#[test]
fn an_owner_of_records_is_sure_of_it_for_less_than_the_lease_and_again_when_the_log_answers() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let host = Reached::new(&log);
        let one = open(&host, &env).await;
        let work = async {
            tokio::time::sleep(10 * LEASE).await;
            assert!(one.holds(), "it gives signs of life");
            host.cut.store(true, Ordering::Relaxed);
            let began = Instant::now();
            while one.holds() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            assert!(began.elapsed() < LEASE * 98 / 100, "{:?}", began.elapsed());
            assert!(matches!(put(&one, "a").await, Err(RecordsError::Log(_))));
            let asked = ReplicaRequest::Stored { replica: 2, seq: Seq(1), wait_ms: 1 };
            assert_eq!(one.ask(asked).await, Err(FsError::Disconnected));
            tokio::time::sleep(2 * LEASE).await;
            host.cut.store(false, Ordering::Relaxed);
            // Nobody took it: the log takes changes, also before a sign of life.
            assert!(!one.holds());
            put(&one, "b").await.unwrap();
            tokio::time::sleep(LEASE).await;
            assert!(one.holds());
        };
        while_kept(&one, work).await;
        assert_eq!(keys_in(&log).await, ["a", "b"]);
        // Without its work it is not sure for longer either.
        tokio::time::sleep(LEASE).await;
        assert!(!one.holds());
    });
}

#[test]
fn records_whose_log_went_backwards_are_not_kept() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let one = open(&Reached::new(&log), &env).await;
        for key in ["a", "b", "c"] {
            put(&one, key).await.unwrap();
        }
        log.roll_back(2);
        let mut kept = pin!(one.keep());
        poll_fn(|context| {
            assert!(kept.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
        assert!(put(&one, "d").await.is_err());
        kept.await;
        assert!(!one.holds());
        assert!(put(&one, "e").await.unwrap_err().to_string().contains("backwards"));
    });
}

#[test]
fn a_change_whose_outcome_only_later_becomes_known_comes_before_any_other() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let host = Reached::new(&log);
        let one = open(&host, &env).await;
        host.hides_appends.store(true, Ordering::Relaxed);
        assert!(matches!(put(&one, "a").await, Err(RecordsError::Log(AppendError::Lost(_)))));
        host.hides_appends.store(false, Ordering::Relaxed);
        put(&one, "b").await.unwrap();
        assert_eq!(keys_in(&log).await, ["a", "b"]);
        for key in ["a", "b"] {
            assert!(one.snapshot().unwrap().get(key.as_bytes()).unwrap().is_some(), "{key}");
        }
    });
}

#[test]
fn an_owner_that_comes_back_while_a_standby_prepares_keeps_the_ledger() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let one = open(&Reached::new(&log), &env).await;
        put(&one, "a").await.unwrap();
        let host = Reached { read_takes: Duration::from_secs(2), ..Reached::new(&log) };
        host.loses_reads.store(true, Ordering::Relaxed);
        let mut standby = standby(&host, &Arc::default(), one.clone(), LEDGER);
        let work = async {
            // The next look at which it reads is the one that finds the ledger vacant.
            tokio::time::sleep(LEASE - Duration::from_millis(500)).await;
            host.loses_reads.store(false, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_secs(1)).await;
            while_kept(&one, tokio::time::sleep(Duration::from_secs(60))).await;
        };
        tokio::select! {
            followed = standby.follow(&*env.clock) => panic!("the owner is back: {followed:?}"),
            () = work => {}
        }
        assert_eq!(standby.follow(&*env.clock).await.unwrap().epoch, one.epoch());
    });
}

#[test]
fn clients_of_an_owner_whose_log_takes_nothing_are_told_within_seconds() {
    on_paused_time(|| async {
        let (log, env) = (MemLog::shared(LEASE), env());
        let check = async |host: Reached, switch: &AtomicBool, name: &str| {
            let one = crate::takeover::open(&host, &env, EarlierSessions::End).await;
            let session = one.connect(Arc::new(Deaf)).await.unwrap();
            switch.store(true, Ordering::Relaxed);
            let began = Instant::now();
            assert_eq!(ask(&one, session, 1, make(name)).await, Err(FsError::Disconnected));
            assert!(began.elapsed() < 2 * LEASE, "{:?}", began.elapsed());
            switch.store(false, Ordering::Relaxed);
            tokio::time::sleep(4 * LEASE).await;
            // It was executed once.
            ask(&one, session, 1, make(name)).await.unwrap();
            assert!(ask(&one, session, 2, make(name)).await.is_err());
        };
        let cut = Reached { patience: Duration::from_secs(5), ..Reached::new(&log) };
        check(cut.clone(), &cut.cut, "a").await;
        let losing = Reached { patience: Duration::from_secs(1), ..Reached::new(&log) };
        check(losing.clone(), &losing.loses_appends, "b").await;
    });
}

#[test]
fn an_owner_that_does_not_reach_the_log_can_be_stopped() {
    let log = MemLog::shared(Duration::from_millis(300));
    let host = Reached::new(&log);
    let one = Owner::open(options_of(&host, &Env::real())).unwrap();
    host.cut.store(true, Ordering::Relaxed);
    let sink: Arc<dyn EventSink> = Arc::new(Deaf);
    let connecting = one.connect(sink);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let _ = tokio::time::timeout(Duration::ZERO, connecting).await;
    });
    one.stop();
}
