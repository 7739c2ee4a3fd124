//! An owner whose disk is full: writers get an error, reads and deletions go on, and the owner recovers by itself.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base::env::sim::Sim;
use base::{Epoch, FsError, Ino, LedgerId, Seq, SessionId};
use bytes::Bytes;
use meta::history::Evidence;
use meta::keys::KeyRange;
use meta::log::{
    AppendError, CopyIo, Fence, FileLog, LedgerLog, LogCaps, LogEntry, LogError, MemLog, MirrorOptions,
    MirroredLog, Room, Tail,
};
use meta::owner::{EarlierSessions, Owner, OwnerOptions};
use meta::state::{Applied, MemState, Pair, RedbState, State, StateError, Visit};
use tokio::runtime::Runtime;
use wire::BoxFuture;
use wire::meta::{EventSink, MetaReply, MetaRequest, MetaService, OwnerEvent, RequestId, XattrMode};

use crate::owner::make;

const LEDGER: LedgerId = LedgerId(1);

struct Deaf;

impl EventSink for Deaf {
    fn event(&self, _event: OwnerEvent) {}
}

/// One session that sends one request after another.
struct Requester<'a> {
    owner: &'a Owner,
    runtime: &'a Runtime,
    session: SessionId,
    seq: u64,
}

impl<'a> Requester<'a> {
    fn new(owner: &'a Owner, runtime: &'a Runtime) -> Self {
        let session = runtime.block_on(owner.connect(Arc::new(Deaf))).unwrap();
        Self { owner, runtime, session, seq: 0 }
    }

    /// Sends a request, which must be answered in bounded time.
    fn ask(&mut self, request: MetaRequest) -> Result<MetaReply, FsError> {
        self.seq += 1;
        self.ask_in((0, self.seq), request)
    }

    fn ask_in(&self, (slot, seq): (u32, u64), request: MetaRequest) -> Result<MetaReply, FsError> {
        let id = RequestId { session: self.session, slot, seq };
        let work = async {
            tokio::time::timeout(Duration::from_secs(60), self.owner.call(id.into(), request)).await
        };
        self.runtime.block_on(work).expect("a request hangs")
    }

    fn make(&mut self, name: &str) -> Result<MetaReply, FsError> {
        self.ask(make(name))
    }

    fn lookup(&mut self, name: &str) -> Result<MetaReply, FsError> {
        let name = Bytes::copy_from_slice(name.as_bytes());
        match self.ask(MetaRequest::Lookup { parent: Ino::ROOT, name })? {
            MetaReply::Missing { .. } => Err(FsError::NotFound),
            found => Ok(found),
        }
    }

    fn unlink(&mut self, name: &str) -> Result<MetaReply, FsError> {
        self.ask(MetaRequest::Unlink { parent: Ino::ROOT, name: Bytes::copy_from_slice(name.as_bytes()) })
    }

    fn set_large(&mut self, ino: Ino, name: u64) -> Result<MetaReply, FsError> {
        let (name, value) = (Bytes::from(format!("user.{name}")), Bytes::from(vec![name as u8; 60 << 10]));
        self.ask(MetaRequest::SetXattr { ino, name, value, mode: XattrMode::Set })
    }

    /// Repeats the request until it succeeds: the owner checks for room with every tick.
    fn make_until_it_works(&mut self, name: &str) {
        let clock = base::env::Env::real().clock;
        let begun = clock.boot_ns();
        loop {
            match self.make(name) {
                Ok(_) => return,
                Err(error) => assert_eq!(error, FsError::NoSpace),
            }
            assert!(clock.boot_ns() - begun < 30_000_000_000, "it does not recover");
        }
    }
}

fn ino_of(reply: MetaReply) -> Ino {
    match reply {
        MetaReply::Entry { attr, .. } => attr.ino,
        other => panic!("{other:?}"),
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn open(sim: &Sim, log: Arc<dyn LedgerLog>, state: Arc<dyn State>) -> Owner {
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
    .unwrap()
}

fn store(sim: &Sim) -> Arc<RedbState> {
    Arc::new(RedbState::open(&sim.env(), Path::new("/node/ledger/state.redb"), 1 << 20).unwrap())
}

fn check_full_disk(log: impl Fn(&Sim) -> Arc<dyn LedgerLog>) {
    let runtime = runtime();
    let sim = Sim::new(1);
    sim.env().files.create_dir_all(Path::new("/node/ledger")).unwrap();
    let owner = open(&sim, log(&sim), store(&sim));
    let mut asker = Requester::new(&owner, &runtime);
    let big = ino_of(asker.make("big").unwrap());
    sim.files.limit_space(1);
    let mut made = Vec::new();
    let mut refused = false;
    for number in 0..400 {
        let name = format!("file {number}");
        match asker.make(&name).and_then(|_| asker.set_large(big, number % 3)) {
            Ok(_) => made.push(name),
            Err(error) => {
                assert_eq!(error, FsError::NoSpace);
                refused = true;
                break;
            }
        }
    }
    assert!(refused && !made.is_empty(), "{}", made.len());
    assert!(owner.stat().no_space && !owner.stat().halted);
    assert!(owner.problem().is_some());
    // Reading and deleting go on, for a large number of files.
    asker.lookup(&made[0]).unwrap();
    let half = made.len() / 2;
    for name in &made[..half] {
        asker.unlink(name).unwrap();
    }
    assert_eq!(asker.make("no").err(), Some(FsError::NoSpace));
    sim.files.clear_faults();
    asker.make_until_it_works("again");
    assert!(!owner.stat().no_space && owner.problem().is_none());
    owner.stop();
    drop(owner);
    sim.files.crash();
    let owner = open(&sim, log(&sim), store(&sim));
    let mut asker = Requester::new(&owner, &runtime);
    made[half..].iter().for_each(|name| drop(asker.lookup(name).unwrap()));
    made[..half].iter().for_each(|name| assert_eq!(asker.lookup(name).err(), Some(FsError::NotFound)));
    asker.lookup("again").unwrap();
    owner.stop();
}

#[test]
fn a_full_disk_stops_writers_only_and_only_for_as_long_as_it_is_full() {
    check_full_disk(|sim| Arc::new(FileLog::open(&sim.env(), Path::new("/node/ledger/log")).unwrap()));
}

#[test]
fn so_it_is_with_copies_of_the_log() {
    check_full_disk(|sim| {
        let dirs = ["/node/ledger/log", "/other/ledger/log"].map(std::path::PathBuf::from);
        sim.env().files.create_dir_all(Path::new("/other/ledger")).unwrap();
        let options = MirrorOptions { io: CopyIo::Threads, ..MirrorOptions::default() };
        Arc::new(MirroredLog::open(&sim.env(), &dirs, options).unwrap())
    });
}

/// A store that has no room while a flag is set.
#[derive(Clone)]
struct FullStore {
    store: MemState,
    full: Arc<AtomicBool>,
}

impl State for FullStore {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StateError> {
        self.store.get(key)
    }
    fn scan(&self, range: &KeyRange, visit: &mut Visit<'_>) -> Result<(), StateError> {
        self.store.scan(range, visit)
    }
    fn last(&self, range: &KeyRange) -> Result<Option<Pair>, StateError> {
        self.store.last(range)
    }
    fn apply(
        &self,
        changes: &mut dyn Iterator<Item = (&[u8], Option<&[u8]>)>,
        applied: Applied,
    ) -> Result<(), StateError> {
        if self.full.load(Ordering::SeqCst) {
            return Err(StateError::NoSpace("simulated".to_owned()));
        }
        self.store.apply(changes, applied)
    }
    fn applied(&self) -> Result<Applied, StateError> {
        self.store.applied()
    }
    fn snapshot(&self) -> Result<Arc<dyn State>, StateError> {
        self.store.snapshot()
    }
}

#[test]
fn a_store_without_room_stops_writers_before_memory_does() {
    let runtime = runtime();
    let sim = Sim::new(1);
    let state = FullStore { store: MemState::default(), full: Arc::new(AtomicBool::new(true)) };
    let owner = open(&sim, Arc::new(MemLog::new()), Arc::new(state.clone()));
    let mut asker = Requester::new(&owner, &runtime);
    let ino = ino_of(asker.make("a").unwrap());
    let mut taken = 0;
    let error = loop {
        match asker.set_large(ino, taken % 3) {
            Ok(_) => taken += 1,
            Err(error) => break error,
        }
        assert!(taken < 10_000, "memory is not bounded");
    };
    assert_eq!(error, FsError::NoSpace);
    asker.lookup("a").unwrap();
    asker.unlink("a").unwrap();
    state.full.store(false, Ordering::SeqCst);
    asker.make_until_it_works("b");
    let committed = owner.stat().committed_seq;
    owner.stop();
    assert!(state.store.applied().unwrap().seq.0 >= committed);
}

#[test]
fn an_owner_stops_although_its_store_has_no_room() {
    let runtime = runtime();
    let sim = Sim::new(1);
    let log = MemLog::new();
    let state = FullStore { store: MemState::default(), full: Arc::new(AtomicBool::new(true)) };
    let owner = open(&sim, Arc::new(log.clone()), Arc::new(state.clone()));
    let mut asker = Requester::new(&owner, &runtime);
    asker.make("a").unwrap();
    owner.stop();
    state.full.store(false, Ordering::SeqCst);
    let owner = open(&sim, Arc::new(log), Arc::new(state));
    Requester::new(&owner, &runtime).lookup("a").unwrap();
    owner.stop();
}

/// A log that has no room while a flag is set.
#[derive(Clone)]
struct FullLog {
    log: MemLog,
    full: Arc<AtomicBool>,
}

impl LedgerLog for FullLog {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        self.log.seal(epoch, nonce)
    }
    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        self.log.fence()
    }
    fn append(
        &self,
        epoch: Epoch,
        first: Seq,
        batches: Vec<Vec<u8>>,
    ) -> BoxFuture<'_, Result<(), AppendError>> {
        if self.full.load(Ordering::SeqCst) {
            return Box::pin(async { Err(AppendError::Full(std::io::ErrorKind::StorageFull.into())) });
        }
        self.log.append(epoch, first, batches)
    }
    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
        self.log.read(from, limit_bytes)
    }
    fn trim(&self, up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
        self.log.trim(up_to)
    }
    fn caps(&self) -> LogCaps {
        self.log.caps()
    }
    fn room(&self) -> Room {
        if self.full.load(Ordering::SeqCst) { Room::Reserve } else { Room::Enough }
    }
}

#[test]
fn when_even_the_reserve_is_used_up_nobody_waits_for_ever_and_it_recovers() {
    let runtime = runtime();
    let sim = Sim::new(1);
    let log = FullLog { log: MemLog::new(), full: Arc::default() };
    let owner = open(&sim, Arc::new(log.clone()), Arc::new(MemState::default()));
    let mut asker = Requester::new(&owner, &runtime);
    asker.make("a").unwrap();
    let made = asker.ask_in((1, 1), make("d")).unwrap();
    log.full.store(true, Ordering::SeqCst);
    // The request was executed before the shortage was known: its outcome is open until the log takes it.
    assert_eq!(asker.unlink("a").err(), Some(FsError::Unknown));
    assert_eq!(asker.make("b").err(), Some(FsError::NoSpace));
    assert_eq!(asker.unlink("b").err(), Some(FsError::NoSpace));
    assert_eq!(asker.lookup("a").err(), Some(FsError::Unknown), "nothing undecided is shown");
    // Sessions do not fall silent for it, and what was executed before is not refused when it comes again.
    asker.ask(MetaRequest::Heartbeat { in_use_ver: u64::MAX }).unwrap();
    assert_eq!(asker.ask_in((1, 1), make("d")), Ok(made));
    assert_eq!(asker.ask_in((1, 2), make("e")), Err(FsError::NoSpace));
    log.full.store(false, Ordering::SeqCst);
    asker.make_until_it_works("b");
    assert_eq!(asker.lookup("a").err(), Some(FsError::NotFound));
    assert!(!owner.stat().halted && !owner.stat().no_space);
    log.full.store(true, Ordering::SeqCst);
    assert_eq!(asker.unlink("b").err(), Some(FsError::Unknown));
    owner.stop();
}
