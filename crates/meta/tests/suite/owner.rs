//! The owner with its threads, on simulated files and failing logs: acknowledged changes stay.
//!
//! Threads make the order of events differ between runs of one seed; the assertions hold for every order.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use base::env::Random;
use base::env::sim::{Sim, SimRandom};
use base::{DriveId, Epoch, FsError, Ino, LedgerId, Seq, SessionId};
use bytes::Bytes;
use futures_util::future::join_all;
use meta::history::{Evidence, Older, Witness};
use meta::log::{AppendError, Fence, FileLog, LedgerLog, LogCaps, LogEntry, LogError, MemLog, Tail};
use meta::owner::{EarlierSessions, Owner, OwnerError, OwnerOptions};
use meta::state::{Applied, MemState, RedbState, State};
use tokio::runtime::Runtime;
use wire::BoxFuture;
use wire::meta::{
    EventSink, FileKind, LeaseKind, MakeNode, MetaReply, MetaRequest, MetaService, OpenIntent, OwnerEvent,
    RequestId, SLOTS_MAX, SetAttr, XattrMode,
};
use wire::position::{KnownLedger, Position};

const LEDGER: LedgerId = LedgerId(1);

struct Deaf;

impl EventSink for Deaf {
    fn event(&self, _event: OwnerEvent) {}
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn open(sim: &Sim, log: Arc<dyn LedgerLog>, state: Arc<dyn State>) -> Result<Owner, OwnerError> {
    Owner::open(OwnerOptions {
        ledger: LEDGER,
        log,
        state,
        env: sim.env(),
        evidence: Evidence::default(),
        vacant: None,
        earlier_sessions: EarlierSessions::End,
        unstored_bytes_max: 256 << 20,
        standby_grace: Duration::ZERO,
    })
}

/// An owner whose log and store are on the simulated disk.
fn open_on_disk(sim: &Sim) -> Result<Owner, OwnerError> {
    let dir = PathBuf::from("/node/ledger");
    let log_error = |source| OwnerError::Log { ledger: LEDGER, source };
    let log = Arc::new(FileLog::open(&sim.env(), &dir.join("log")).map_err(log_error)?);
    let state = RedbState::open(&sim.env(), &dir.join("state.redb"), 1 << 20);
    let state = state.map_err(|source| OwnerError::Store { ledger: LEDGER, source })?;
    open(sim, log, Arc::new(state))
}

/// A request that makes a file in the root directory.
pub fn make(name: &str) -> MetaRequest {
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

fn lookup(name: &str) -> MetaRequest {
    MetaRequest::Lookup { parent: Ino::ROOT, name: Bytes::copy_from_slice(name.as_bytes()) }
}

async fn ask(
    owner: &Owner,
    session: SessionId,
    slot: u32,
    request: MetaRequest,
) -> Result<MetaReply, FsError> {
    owner.call(RequestId { session, slot, seq: 1 }.into(), request).await
}

async fn connect(owner: &Owner) -> Result<SessionId, FsError> {
    owner.connect(Arc::new(Deaf)).await
}

fn exists(owner: &Owner, session: SessionId, name: &str) -> bool {
    let found = runtime().block_on(ask(owner, session, SLOTS_MAX - 1, lookup(name)));
    match found {
        Ok(MetaReply::Entry { .. }) => true,
        Ok(MetaReply::Missing { .. }) => false,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_that_waits_for_leases_is_executed_again_once_when_the_last_is_released() {
    let (sim, runtime) = (Sim::new(1), runtime());
    let owner = open(&sim, Arc::new(MemLog::new()), Arc::new(MemState::default())).unwrap();
    runtime.block_on(async {
        let writer = connect(&owner).await.unwrap();
        let made = ask(&owner, writer, 0, make("file")).await.unwrap();
        let MetaReply::Entry { attr, .. } = made else { panic!("{made:?}") };
        let mut leases = Vec::new();
        for _ in 0..40 {
            let reader = connect(&owner).await.unwrap();
            let acquire = MetaRequest::Acquire { ino: attr.ino, kind: LeaseKind::Read };
            let acquired = ask(&owner, reader, 0, acquire).await.unwrap();
            let MetaReply::Lease(lease) = acquired else { panic!("{acquired:?}") };
            leases.push((reader, lease));
        }
        let before = owner.stat();
        let change =
            MetaRequest::SetAttr { ino: attr.ino, set: SetAttr { mode: Some(0o600), ..SetAttr::default() } };
        let changed = ask(&owner, writer, 1, change);
        let released = async {
            for (reader, lease) in leases {
                ask(&owner, reader, 1, MetaRequest::Release { lease, keep: None }).await.unwrap();
            }
        };
        let (changed, ()) = tokio::join!(changed, released);
        assert!(matches!(changed, Ok(MetaReply::Attr(attr)) if attr.mode & 0o777 == 0o600), "{changed:?}");
        let after = owner.stat();
        assert_eq!((after.requests - before.requests, after.executions - before.executions), (41, 42));
    });
}

#[test]
fn what_was_acknowledged_is_there_after_any_crash() {
    let runtime = runtime();
    for seed in 0..12 {
        let sim = Sim::new(seed);
        let random = SimRandom::new(seed);
        let mut acknowledged: Vec<String> = Vec::new();
        for round in 0..5 {
            let owner =
                open_on_disk(&sim).unwrap_or_else(|error| panic!("seed={seed} round={round}: {error}"));
            let session = runtime.block_on(connect(&owner)).unwrap();
            for name in &acknowledged {
                assert!(exists(&owner, session, name), "seed={seed} round={round}: {name} is lost");
            }
            match random.next_u64() % 3 {
                0 => sim.files.cut_power_after(random.next_u64() % 40),
                1 => sim.files.fail_sync_after(random.next_u64() % 10),
                _ => {}
            }
            let names: Vec<String> = (0..60).map(|number| format!("{seed}-{round}-{number}")).collect();
            for (part, names) in names.chunks(12).enumerate() {
                let asked = names.iter().zip(part as u32 * 12..);
                let asked = asked.map(|(name, slot)| ask(&owner, session, slot, make(name)));
                let replies = runtime.block_on(join_all(asked));
                for (name, reply) in names.iter().zip(replies) {
                    match reply {
                        Ok(_) => acknowledged.push(name.clone()),
                        Err(error) => assert!(
                            matches!(error, FsError::Unknown | FsError::Disconnected),
                            "seed={seed}: {error}"
                        ),
                    }
                }
            }
            if random.next_u64().is_multiple_of(4) {
                owner.stop();
            }
            sim.files.crash();
        }
    }
}

#[test]
fn a_log_older_than_the_store_is_refused() {
    let runtime = runtime();
    let sim = Sim::new(1);
    let (old, log, state) = (MemLog::new(), MemLog::new(), MemState::default());
    let owner = open(&sim, Arc::new(log.clone()), Arc::new(state.clone())).unwrap();
    let session = runtime.block_on(connect(&owner)).unwrap();
    runtime.block_on(ask(&owner, session, 0, make("a"))).unwrap();
    owner.stop();
    let seen = state.applied().unwrap().seq;
    assert!(seen.0 >= 2);
    // A log that ends one batch earlier; its content does not matter.
    runtime.block_on(old.seal(Epoch(1), 0)).unwrap();
    let batches = vec![Vec::new(); seen.0 as usize - 1];
    runtime.block_on(old.append(Epoch(1), Seq(1), batches)).unwrap();
    match open(&sim, Arc::new(old), Arc::new(state.clone())).err() {
        Some(OwnerError::RolledBack { seen: found, tail, .. }) => {
            assert_eq!((found, tail), (seen, Seq(seen.0 - 1)));
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        open(&sim, Arc::new(MemLog::new()), Arc::new(state)).err(),
        Some(OwnerError::RolledBack { .. })
    ));
}

/// A log that records the largest batch, fails on request, and ignores trims.
#[derive(Clone)]
struct Watched {
    log: MemLog,
    entry_bytes_max: usize,
    largest: Arc<AtomicUsize>,
    /// Appends refused as full before one is taken.
    full: Arc<AtomicU64>,
    broken: Arc<AtomicU64>,
    /// Appends, their answers and looks at the fence that are lost: each, one after the other, by a bit.
    lost: Arc<AtomicU64>,
}

impl Watched {
    fn new() -> Self {
        let zero = || Arc::new(AtomicU64::new(0));
        Self {
            log: MemLog::new(),
            entry_bytes_max: 64 << 20,
            largest: Arc::default(),
            full: zero(),
            broken: zero(),
            lost: zero(),
        }
    }

    /// Whether the next message is lost.
    fn loses(&self) -> bool {
        self.lost.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bits| Some(bits >> 1)).unwrap() & 1 == 1
    }
}

fn unanswered() -> std::io::Error {
    std::io::ErrorKind::TimedOut.into()
}

impl LedgerLog for Watched {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        self.log.seal(epoch, nonce)
    }

    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        if self.broken.load(Ordering::Relaxed) > 0 {
            return Box::pin(async { Err(LogError::Damaged("the end is unknown".to_owned())) });
        }
        if self.loses() {
            return Box::pin(async { Err(LogError::Io(unanswered())) });
        }
        self.log.fence()
    }

    fn append(
        &self,
        epoch: Epoch,
        first: Seq,
        batches: Vec<Vec<u8>>,
    ) -> BoxFuture<'_, Result<(), AppendError>> {
        for batch in &batches {
            self.largest.fetch_max(batch.len(), Ordering::Relaxed);
        }
        let full = self.full.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if full.is_ok() {
            return Box::pin(async { Err(AppendError::Full(std::io::ErrorKind::StorageFull.into())) });
        }
        if self.broken.load(Ordering::Relaxed) > 0 {
            return Box::pin(async { Err(AppendError::Unknown(std::io::ErrorKind::Other.into())) });
        }
        if self.loses() {
            return Box::pin(async { Err(AppendError::Unknown(unanswered())) });
        }
        let (log, loses) = (self.log.clone(), self.loses());
        // Slow enough for requests to pile up.
        Box::pin(async move {
            tokio::task::yield_now().await;
            log.append(epoch, first, batches).await?;
            if loses { Err(AppendError::Unknown(unanswered())) } else { Ok(()) }
        })
    }

    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
        self.log.read(from, limit_bytes)
    }

    fn trim(&self, _up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
        Box::pin(async { Ok(()) })
    }

    fn caps(&self) -> LogCaps {
        LogCaps { entry_bytes_max: self.entry_bytes_max, ..self.log.caps() }
    }
}

#[test]
fn a_store_that_is_behind_by_any_number_of_batches_catches_up() {
    let runtime = runtime();
    let sim = Sim::new(1);
    let log = Watched::new();
    let owner = open(&sim, Arc::new(log.clone()), Arc::new(MemState::default())).unwrap();
    let session = runtime.block_on(connect(&owner)).unwrap();
    for name in 0..10 {
        runtime.block_on(ask(&owner, session, name, make(&name.to_string()))).unwrap();
    }
    owner.stop();
    let entries = runtime.block_on(log.read(Seq(1), usize::MAX)).unwrap();
    assert!(entries.len() > 10);
    for ahead in 0..=entries.len() {
        let state = MemState::default();
        for entry in &entries[..ahead] {
            let batch = meta::batch::Batch::decode(&entry.batch).unwrap();
            let mut changes = batch.changes.iter().map(|(key, value)| (key.as_slice(), value.as_deref()));
            state.apply(&mut changes, Applied { seq: entry.seq, epoch: entry.epoch }).unwrap();
        }
        let owner = open(&sim, Arc::new(log.clone()), Arc::new(state)).unwrap();
        let session = runtime.block_on(connect(&owner)).unwrap();
        assert!((0..10).all(|name| exists(&owner, session, &name.to_string())), "ahead={ahead}");
        owner.stop();
    }
}

#[test]
fn a_store_older_than_what_is_left_of_the_log_is_refused() {
    let runtime = runtime();
    let sim = Sim::new(1);
    let log = MemLog::new();
    let owner = open(&sim, Arc::new(log.clone()), Arc::new(MemState::default())).unwrap();
    let session = runtime.block_on(connect(&owner)).unwrap();
    runtime.block_on(ask(&owner, session, 0, make("a"))).unwrap();
    owner.stop();
    runtime.block_on(log.trim(Seq(2))).unwrap();
    assert!(open(&sim, Arc::new(log), Arc::new(MemState::default())).is_err());
}

#[test]
fn batches_stay_below_what_the_log_takes() {
    let runtime = runtime();
    let sim = Sim::new(1);
    let log = Watched { entry_bytes_max: 1 << 20, ..Watched::new() };
    let owner = open(&sim, Arc::new(log.clone()), Arc::new(MemState::default())).unwrap();
    let sessions = [(); 3].map(|()| runtime.block_on(connect(&owner)).unwrap());
    let replies = runtime.block_on(join_all((0..300).map(|number| {
        let (owner, session, slot) = (&owner, sessions[number / 100], (number % 100) as u32);
        async move {
            // Each request makes its own inode, so that every value is in a batch.
            let ino = match ask(owner, session, slot, make(&number.to_string())).await? {
                MetaReply::Entry { attr, .. } => attr.ino,
                _ => return Err(FsError::Io),
            };
            let id = RequestId { session, slot, seq: 2 };
            owner.call(id.into(), set_xattr(ino, number as u8)).await
        }
    })));
    assert!(replies.iter().all(Result::is_ok), "{:?}", replies.iter().find(|reply| reply.is_err()));
    owner.stop();
    let largest = log.largest.load(Ordering::Relaxed);
    assert!((64 << 10..=1 << 20).contains(&largest), "{largest}");
}

fn set_xattr(ino: Ino, value: u8) -> MetaRequest {
    let (name, value) = (Bytes::from_static(b"user.x"), Bytes::from(vec![value; 60 << 10]));
    MetaRequest::SetXattr { ino, name, value, mode: XattrMode::Set }
}

#[test]
fn an_operation_that_is_larger_than_an_entry_of_the_log_takes_several() {
    let runtime = runtime();
    for lost in [0, 0b010, 0b10_1001, 0b1101_0110_1010] {
        let sim = Sim::new(1);
        let log = Watched { entry_bytes_max: 16 << 10, ..Watched::new() };
        let owner = open(&sim, Arc::new(log.clone()), Arc::new(MemState::default())).unwrap();
        let session = runtime.block_on(connect(&owner)).unwrap();
        log.lost.store(lost, Ordering::Relaxed);
        for value in 1..4 {
            let request = set_xattr(Ino::ROOT, value);
            assert!(runtime.block_on(ask(&owner, session, value.into(), request)).is_ok(), "{lost:b}");
        }
        assert!(!owner.stat().halted, "{lost:b}");
        assert!(log.largest.load(Ordering::Relaxed) <= 16 << 10);
        owner.stop();
        // Another owner seals the log, writes a part of a batch, and dies.
        let entries = runtime.block_on(log.log.read(Seq(1), usize::MAX)).unwrap();
        let last = entries.last().unwrap();
        assert!(last.seq.0 > 12, "parts have numbers of their own: {}", last.seq);
        let (epoch, next) = (Epoch(last.epoch.0 + 1), Seq(last.seq.0 + 1));
        runtime.block_on(log.log.seal(epoch, 1)).unwrap();
        let changes = entries.iter().map(|entry| (entry.batch.clone(), None)).collect();
        let part = meta::batch::Batch { changes }.entries(16 << 10).remove(0);
        runtime.block_on(log.log.append(epoch, next, vec![part])).unwrap();
        // The next ones learn all that was acknowledged, and no more, from the log alone.
        for round in 0..2 {
            let owner = open(&sim, Arc::new(log.clone()), Arc::new(MemState::default())).unwrap();
            let session = runtime.block_on(connect(&owner)).unwrap();
            let request = MetaRequest::GetXattr { ino: Ino::ROOT, name: Bytes::from_static(b"user.x") };
            let reply = runtime.block_on(ask(&owner, session, 0, request)).unwrap();
            assert_eq!(reply, MetaReply::Bytes(Bytes::from(vec![3 + round; 60 << 10])), "{lost:b}");
            runtime.block_on(ask(&owner, session, 1, set_xattr(Ino::ROOT, 4 + round))).unwrap();
            owner.stop();
        }
    }
}

#[test]
fn requests_wait_while_the_log_is_full() {
    let runtime = runtime();
    let sim = Sim::new(1);
    let log = Watched::new();
    let owner = open(&sim, Arc::new(log.clone()), Arc::new(MemState::default())).unwrap();
    let session = runtime.block_on(connect(&owner)).unwrap();
    log.full.store(3, Ordering::Relaxed);
    runtime.block_on(ask(&owner, session, 0, make("a"))).unwrap();
    assert_eq!(log.full.load(Ordering::Relaxed), 0);
    assert!(!owner.stat().halted);
    owner.stop();
}

#[test]
fn after_the_log_has_failed_every_request_is_refused_and_none_hangs() {
    let runtime = runtime();
    let sim = Sim::new(1);
    let log = Watched::new();
    let state = MemState::default();
    let owner = open(&sim, Arc::new(log.clone()), Arc::new(state.clone())).unwrap();
    let session = runtime.block_on(connect(&owner)).unwrap();
    runtime.block_on(ask(&owner, session, 0, make("a"))).unwrap();
    log.broken.store(1, Ordering::Relaxed);
    let asked = (1..50).map(|slot| ask(&owner, session, slot, make(&format!("lost {slot}"))));
    for reply in runtime.block_on(join_all(asked)) {
        assert_eq!(reply, Err(FsError::Disconnected));
    }
    assert_eq!(runtime.block_on(ask(&owner, session, 99, lookup("a"))), Err(FsError::Disconnected));
    assert_eq!(runtime.block_on(connect(&owner)), Err(FsError::Disconnected));
    assert!(owner.stat().halted);
    owner.stop();
    log.broken.store(0, Ordering::Relaxed);
    let owner = open(&sim, Arc::new(log), Arc::new(state)).unwrap();
    let session = runtime.block_on(connect(&owner)).unwrap();
    assert!(exists(&owner, session, "a"));
    assert!(!exists(&owner, session, "lost 1"));
    owner.stop();
}

#[test]
fn lost_appends_and_lost_answers_are_settled_and_every_batch_is_in_the_log_once() {
    let runtime = runtime();
    // The bits are for: append, its answer, fence, and again.
    for lost in [0b001, 0b010, 0b101, 0b110, 0b1001_0001, 0b0110_1011_0101] {
        let (sim, log) = (Sim::new(1), Watched::new());
        let owner = open(&sim, Arc::new(log.clone()), Arc::new(MemState::default())).unwrap();
        let session = runtime.block_on(connect(&owner)).unwrap();
        log.lost.store(lost, Ordering::Relaxed);
        for (slot, name) in (0..).zip(["a", "b", "c"]) {
            assert!(runtime.block_on(ask(&owner, session, slot, make(name))).is_ok(), "{lost:b} {name}");
        }
        assert!(!owner.stat().halted, "{lost:b}");
        let entries = runtime.block_on(log.log.read(Seq(1), usize::MAX)).unwrap();
        assert_eq!(entries.len() as u64, owner.stat().committed_seq, "{lost:b}");
        owner.stop();
        // A new owner learns all of it from the log alone.
        let owner = open(&sim, Arc::new(log), Arc::new(MemState::default())).unwrap();
        let session = runtime.block_on(connect(&owner)).unwrap();
        assert!(["a", "b", "c"].iter().all(|name| exists(&owner, session, name)), "{lost:b}");
        owner.stop();
    }
}

#[test]
fn an_owner_steps_down_when_another_has_sealed_the_log_even_if_it_cannot_tell_at_once() {
    let runtime = runtime();
    for lost in [0, 0b001, 0b101] {
        let (sim, log) = (Sim::new(1), Watched::new());
        let first = open(&sim, Arc::new(log.clone()), Arc::new(MemState::default())).unwrap();
        let session = runtime.block_on(connect(&first)).unwrap();
        let second = open(&sim, Arc::new(log.clone()), Arc::new(MemState::default())).unwrap();
        log.lost.store(lost, Ordering::Relaxed);
        let refused = runtime.block_on(ask(&first, session, 0, make("late")));
        assert_eq!(refused, Err(FsError::Disconnected), "{lost:b}");
        let problem = first.problem().unwrap();
        assert!(first.stat().halted && problem.contains("another owner has the ledger"), "{problem}");
        let session = runtime.block_on(connect(&second)).unwrap();
        assert!(!exists(&second, session, "late"), "{lost:b}");
        assert!(runtime.block_on(ask(&second, session, 0, make("new"))).is_ok());
        first.stop();
        second.stop();
    }
}

#[test]
fn a_log_that_lost_acknowledged_batches_stops_the_ledger() {
    let (runtime, sim, log) = (runtime(), Sim::new(1), Watched::new());
    let owner = open(&sim, Arc::new(log.clone()), Arc::new(MemState::default())).unwrap();
    let session = runtime.block_on(connect(&owner)).unwrap();
    assert!(runtime.block_on(ask(&owner, session, 0, make("a"))).is_ok());
    log.log.roll_back(1);
    let refused = runtime.block_on(ask(&owner, session, 1, make("b")));
    assert_eq!(refused, Err(FsError::Disconnected));
    let problem = owner.problem().unwrap();
    assert!(problem.contains("went backwards"), "{problem}");
    owner.stop();
}

#[test]
fn a_stopped_owner_has_everything_in_its_store_and_the_next_has_a_higher_epoch() {
    let runtime = runtime();
    let sim = Sim::new(1);
    let mut epoch = 0;
    for round in 0..3 {
        let owner = open_on_disk(&sim).unwrap();
        assert!(owner.stat().epoch > epoch);
        epoch = owner.stat().epoch;
        let session = runtime.block_on(connect(&owner)).unwrap();
        assert!((0..round).all(|name| exists(&owner, session, &format!("{name}"))));
        runtime.block_on(ask(&owner, session, 0, make(&format!("{round}")))).unwrap();
        let committed = owner.stat().committed_seq;
        owner.stop();
        drop(owner);
        let state = RedbState::open(&sim.env(), Path::new("/node/ledger/state.redb"), 1 << 20).unwrap();
        assert!(state.applied().unwrap().seq.0 >= committed);
    }
}

#[test]
fn who_waits_for_a_file_that_goes_is_answered() {
    let sim = Sim::new(1);
    let owner = open(&sim, Arc::new(MemLog::default()), Arc::new(MemState::default())).unwrap();
    let answer = runtime().block_on(async {
        let (one, two) = (connect(&owner).await.unwrap(), connect(&owner).await.unwrap());
        let MetaRequest::Make(file) = make("file") else { unreachable!("it makes a file") };
        let opened = MetaRequest::Make(MakeNode { open: OpenIntent::Write, ..file });
        let made = ask(&owner, one, 1, opened).await.unwrap();
        let MetaReply::Entry { attr, .. } = made else { panic!("{made:?}") };
        // The lookup waits for the exclusive lease of the session that made the file, which never releases it.
        let ends = async {
            let unlink = MetaRequest::Unlink { parent: Ino::ROOT, name: Bytes::from_static(b"file") };
            ask(&owner, one, 2, unlink).await.unwrap();
            ask(&owner, one, 3, MetaRequest::Close { inos: vec![attr.ino] }).await.unwrap();
        };
        tokio::join!(ask(&owner, two, 1, lookup("file")), ends).0
    });
    assert!(matches!(answer, Ok(MetaReply::Missing { .. })), "{answer:?}");
    owner.stop();
}

#[test]
fn a_session_may_be_closed_twice() {
    let sim = Sim::new(1);
    let owner = open(&sim, Arc::new(MemLog::default()), Arc::new(MemState::default())).unwrap();
    runtime().block_on(async {
        let session = connect(&owner).await.unwrap();
        for _ in 0..2 {
            assert_eq!(ask(&owner, session, 1, MetaRequest::CloseSession).await, Ok(MetaReply::Done));
        }
        assert_eq!(ask(&owner, session, 2, lookup("file")).await, Err(FsError::StaleLease));
    });
    owner.stop();
}

#[test]
fn a_store_opens_whatever_moment_its_creation_was_cut_off_at() {
    for seed in 0..40 {
        let sim = Sim::new(seed);
        sim.files.cut_power_after(seed);
        let open = || RedbState::open(&sim.env(), Path::new("/node/state.redb"), 1 << 20);
        drop(open());
        sim.files.crash();
        assert!(open().is_ok(), "seed={seed}");
    }
}

#[test]
fn who_holds_a_lease_that_is_recalled_may_open_the_file_again() {
    let sim = Sim::new(1);
    let owner = open(&sim, Arc::new(MemLog::default()), Arc::new(MemState::default())).unwrap();
    let opened = runtime().block_on(async {
        let (one, two) = (connect(&owner).await.unwrap(), connect(&owner).await.unwrap());
        let MetaRequest::Make(file) = make("file") else { unreachable!("it makes a file") };
        let made = ask(&owner, one, 1, MetaRequest::Make(MakeNode { open: OpenIntent::Write, ..file }))
            .await
            .unwrap();
        let MetaReply::Entry { attr, lease: Some(lease), .. } = made else { panic!("{made:?}") };
        // The lookup causes a recall of the lease. Its holder releases it only when its open is answered.
        let ends = async {
            let opened =
                ask(&owner, one, 2, MetaRequest::Open { ino: attr.ino, intent: OpenIntent::Truncate }).await;
            ask(&owner, one, 3, MetaRequest::Release { lease, keep: None }).await.unwrap();
            opened
        };
        let (found, opened) = tokio::join!(ask(&owner, two, 1, lookup("file")), ends);
        found.unwrap();
        opened
    });
    assert!(matches!(opened, Ok(MetaReply::Entry { lease: None, .. })), "{opened:?}");
    owner.stop();
}

fn knows(position: Position) -> Evidence {
    let known = KnownLedger { ledger: LEDGER, position: Some(position), highest_extent: None };
    Evidence { witnesses: vec![Witness { drive: DriveId(4), known }], ..Evidence::default() }
}

/// A log with the store that belongs to it.
type Kept = (Arc<MemLog>, MemState);

fn open_knowing((log, state): &Kept, evidence: Evidence) -> Result<Owner, OwnerError> {
    Owner::open(OwnerOptions {
        ledger: LEDGER,
        log: log.clone(),
        state: Arc::new(state.clone()),
        env: Sim::new(evidence.witnesses.len() as u64).env(),
        evidence,
        vacant: None,
        earlier_sessions: EarlierSessions::End,
        unstored_bytes_max: 256 << 20,
        standby_grace: Duration::ZERO,
    })
}

#[test]
fn a_ledger_that_drives_know_better_is_not_served() {
    let runtime = runtime();
    let log = Kept::default();
    let owner = open_knowing(&log, Evidence::default()).unwrap();
    assert_eq!(owner.position(), None, "nothing is durable yet");
    let session = runtime.block_on(connect(&owner)).unwrap();
    let begun = owner.position().unwrap();
    runtime.block_on(ask(&owner, session, 0, make("a"))).unwrap();
    let position = owner.position().unwrap();
    assert!(position.seq > begun.seq && position.lineage == begun.lineage);
    owner.stop();
    let owner = open_knowing(&log, knows(position)).unwrap();
    runtime.block_on(connect(&owner)).unwrap();
    let next = owner.position().unwrap();
    assert!(next.lineage != position.lineage && next.seq > position.seq);
    assert!(owner.history().check(&knows(position).witnesses[0]).is_ok());
    owner.stop();

    let older = Kept::default();
    let refused = open_knowing(&older, knows(next)).map(drop).unwrap_err();
    assert!(matches!(refused, OwnerError::Older(_)), "{refused}");
    let owner = open_knowing(&older, Evidence { older: Older::Accept, ..knows(next) }).unwrap();
    assert!(owner.stat().in_doubt);
    owner.stop();
}
