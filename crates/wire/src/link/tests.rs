mod fabric;
mod hostile;
mod listener;
mod tls;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use base::env::Env;
use base::{
    DriveId, DriveUuid, Epoch, ExtentId, FsError, Ino, LeaseId, LedgerId, PgId, SessionId, ShardIndex,
};
use bytes::Bytes;
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc};

use super::peer::CallError;
use super::*;
use crate::claim::{Claim, Resumed};
use crate::drive::*;
use crate::frame::{Frame, FrameKind, read_frame, write_frame};
use crate::message::{
    self, AnswerTime, CLUSTER, DriveReply, DriveRequest, Envelope, HOST, JOIN, OWNER, REPLICA, Refusal,
    SESSION, VIEW,
};
use crate::meta::{
    EventSink, LeaseGrant, LeaseKind, MetaReply, MetaRequest, MetaService, OwnerEvent, RequestId,
};
use crate::position::{KnownLedger, Position};
use crate::replica::{CopyPart, ReplicaReply, ReplicaRequest, ReplicaService};
use crate::rights::{ProofKey, Rights, Squash};
use crate::view::{ViewReply, ViewRequest, ViewService};

const LEDGER: LedgerId = LedgerId(3);
const DRIVE: DriveId = DriveId(5);

/// An owner that answers heartbeats with their own number, and sends an event for each `GetAttr`.
#[derive(Default)]
struct TestOwner {
    sink: Mutex<Option<Arc<dyn EventSink>>>,
    seen: Mutex<Vec<RequestId>>,
    early: AtomicBool,
    /// Requests `StatFs` wait for this.
    gate: Notify,
    cancelled: AtomicBool,
}

/// The copy of the store holds what was asked for.
impl ReplicaService for TestOwner {
    fn ask(&self, request: ReplicaRequest) -> BoxFuture<'_, Result<ReplicaReply, FsError>> {
        Box::pin(async move {
            let ReplicaRequest::Copy { copy, after, .. } = request else { return Ok(ReplicaReply::Noted) };
            let part = CopyPart {
                copy,
                seq: base::Seq(4),
                epoch: Epoch(1),
                // The number of the copy says how long it is, for this test.
                pairs: vec![(after, Bytes::from(vec![7; (copy as usize) << 20]))],
                sum: 5,
                more: false,
            };
            Ok(ReplicaReply::Copied(part))
        })
    }
}

/// Nothing is new.
impl ViewService for TestOwner {
    fn ask(&self, request: ViewRequest) -> BoxFuture<'_, Result<ViewReply, FsError>> {
        let is_known = match request {
            ViewRequest::Filesystem { name, .. } => name == "main",
            ViewRequest::Blob { filesystem, .. } | ViewRequest::Reads { filesystem, .. } => {
                filesystem == "main"
            }
            ViewRequest::Owner { .. } => true,
        };
        Box::pin(async move { if is_known { Ok(ViewReply::Same) } else { Err(FsError::NotFound) } })
    }
}

struct NoteDrop<'a>(&'a AtomicBool);

impl Drop for NoteDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl MetaService for TestOwner {
    fn connect(&self, events: Arc<dyn EventSink>) -> BoxFuture<'_, Result<SessionId, FsError>> {
        *self.sink.lock().unwrap() = Some(events);
        Box::pin(async { Ok(SessionId(7)) })
    }

    fn resume(
        &self,
        session: SessionId,
        claim: Claim,
        events: Arc<dyn EventSink>,
    ) -> BoxFuture<'_, Result<Resumed, FsError>> {
        assert_eq!((session, claim.in_use_ver), (SessionId(7), 9));
        *self.sink.lock().unwrap() = Some(events);
        let result = if claim.more { Ok(Resumed::default()) } else { Err(FsError::StaleLease) };
        Box::pin(async { result })
    }

    fn position(&self) -> Option<Position> {
        Some(Position { ledger: LEDGER, lineage: base::Lineage(1), seq: base::Seq(4) })
    }

    fn call(&self, envelope: Envelope, request: MetaRequest) -> BoxFuture<'_, Result<MetaReply, FsError>> {
        self.seen.lock().unwrap().push(envelope.request);
        self.early.store(envelope.answer != AnswerTime::Durable, Ordering::SeqCst);
        if let MetaRequest::GetAttr { ino } = request {
            let lease = LeaseGrant { ino, id: LeaseId(1), kind: LeaseKind::Read, seq: 1 };
            self.sink.lock().unwrap().as_ref().unwrap().event(OwnerEvent::Revoked { lease });
        }
        Box::pin(async move {
            match request {
                MetaRequest::Heartbeat { in_use_ver: version } => {
                    Ok(MetaReply::Beat { version, used_bytes: 0, drive_bytes: 0, events: 0 })
                }
                MetaRequest::StatFs => {
                    let _note = NoteDrop(&self.cancelled);
                    self.gate.notified().await;
                    Ok(MetaReply::StatFs { used_bytes: 1, inodes: 2 })
                }
                MetaRequest::AllocExtents => Ok(MetaReply::Range { first: ExtentId(100), count: 10 }),
                _ => Ok(MetaReply::Done),
            }
        })
    }
}

/// A drive in memory.
#[derive(Default)]
struct TestDrive {
    shards: Mutex<BTreeMap<ShardKey, PutShard>>,
}

impl DriveService for TestDrive {
    fn put(&self, request: PutShard) -> BoxFuture<'_, Result<(), PutShardError>> {
        self.shards.lock().unwrap().insert(request.key, request);
        Box::pin(async { Ok(()) })
    }

    fn get(&self, request: GetShard) -> BoxFuture<'_, Result<ShardBlocks, GetShardError>> {
        let shards = self.shards.lock().unwrap();
        let found = shards.get(&request.key).map(|put| {
            let range =
                request.first_block as usize * 4096..(request.first_block + request.blocks) as usize * 4096;
            ShardBlocks { bytes: put.bytes.slice(range), checksums: put.checksums.clone(), note: None }
        });
        Box::pin(async move { found.ok_or(GetShardError::NotFound { drive: DRIVE, key: request.key }) })
    }

    fn delete(&self, request: DeleteShards) -> BoxFuture<'_, Result<(), DriveFailed>> {
        request.keys.iter().for_each(|key| drop(self.shards.lock().unwrap().remove(key)));
        Box::pin(async { Ok(()) })
    }

    fn keep_positions(&self, _: Vec<Position>, _: bool) -> BoxFuture<'_, Result<(), DriveFailed>> {
        Box::pin(async { Ok(()) })
    }

    fn known_ledgers(&self) -> BoxFuture<'_, Result<Vec<KnownLedger>, DriveFailed>> {
        Box::pin(async { Ok(vec![KnownLedger { ledger: LEDGER, position: None, highest_extent: None }]) })
    }

    fn list(&self, _: Option<ShardKey>, limit: usize) -> BoxFuture<'_, Result<Vec<ShardEntry>, DriveFailed>> {
        assert_eq!(limit, 3);
        Box::pin(async { Err(DriveFailed { drive: DRIVE }) })
    }

    fn scrub(&self, _: Option<ShardKey>, _: u64) -> BoxFuture<'_, Result<ScrubStep, DriveFailed>> {
        Box::pin(async { Ok(ScrubStep { next: None, verified_bytes: 5, bad: vec![] }) })
    }

    fn make_room(&self) -> BoxFuture<'_, Result<(), DriveFailed>> {
        Box::pin(async { Ok(()) })
    }

    fn health(&self) -> DriveHealth {
        DriveHealth::Up
    }

    fn stat(&self) -> DriveStat {
        DriveStat {
            uuid: DriveUuid([9; 16]),
            mark: DriveMark::default(),
            health: self.health(),
            failure: None,
            io_path: IoPath::Simulated,
            capacity_bytes: 100,
            live_bytes: self.shards.lock().unwrap().len() as u64,
            garbage_bytes: 0,
            reserved_bytes: 0,
            free_bytes: 0,
            host_full: false,
            full: false,
            trimmed_bytes: 0,
            write_limit_bytes_per_s: None,
            shards: 0,
            bad_shards: 0,
            age_ms: 0,
            cleanable_bytes: 0,
            foreground: Foreground::default(),
        }
    }
}

/// Two processes: one with an owner and a drive, one that uses them.
struct Pair {
    env: Env,
    owner: Arc<TestOwner>,
    server: Arc<Mutex<Arc<Server>>>,
    /// Ends the present connections.
    break_all: Arc<Notify>,
    /// No new connection is accepted.
    closed: Arc<AtomicBool>,
    dials: Arc<AtomicU32>,
    /// How far the next connections are trusted.
    trust: Arc<Mutex<Trust>>,
    peer: Arc<Peer>,
}

fn services(owner: &Arc<TestOwner>, opened: u64) -> Services {
    Services {
        owners: BTreeMap::from([(LEDGER, (opened, owner.clone() as Arc<dyn MetaService>))]),
        replicas: BTreeMap::from([(LEDGER, owner.clone() as Arc<dyn ReplicaService>)]),
        views: Some(owner.clone() as Arc<dyn ViewService>),
        drives: BTreeMap::from([(DRIVE, Arc::new(TestDrive::default()) as Arc<dyn DriveService>)]),
        proofs: Some(ProofKey::of(b"secret of the cluster")),
        ..Services::default()
    }
}

impl Pair {
    fn new() -> Self {
        Self::trusting(Trust::Full)
    }

    fn trusting(trust: Trust) -> Self {
        Self::connected(trust, |stream| Ok(Connection::over(stream)))
    }

    /// Over connections that are made for one machine.
    fn local() -> Self {
        Self::connected(Trust::Full, |stream| Connection::local(stream.into_std()?))
    }

    fn connected(trust: Trust, connection: fn(UnixStream) -> io::Result<Connection>) -> Self {
        let env = Env::real();
        let owner = Arc::new(TestOwner::default());
        let server = Arc::new(Mutex::new(Server::new(&env, services(&owner, 1))));
        let (break_all, closed, dials) =
            (Arc::new(Notify::new()), Arc::<AtomicBool>::default(), Arc::<AtomicU32>::default());
        let trust = Arc::new(Mutex::new(trust));
        let dial: Dial = {
            let (server, break_all, closed, dials) =
                (server.clone(), break_all.clone(), closed.clone(), dials.clone());
            let trust = trust.clone();
            Arc::new(move || {
                let (server, break_all) = (server.lock().unwrap().clone(), break_all.clone());
                let trust = trust.lock().unwrap().clone();
                let is_closed = closed.load(Ordering::SeqCst);
                dials.fetch_add(1, Ordering::SeqCst);
                Box::pin(async move {
                    if is_closed {
                        return Err(io::ErrorKind::ConnectionRefused.into());
                    }
                    let (here, there) = UnixStream::pair()?;
                    let there = connection(there)?;
                    tokio::spawn(async move {
                        tokio::select! {
                            _ = server.serve(there, trust) => {}
                            () = break_all.notified() => {}
                        }
                    });
                    connection(here)
                })
            })
        };
        let runtime = tokio::runtime::Handle::current();
        let peer = Peer::new(PeerOptions {
            env: env.clone(),
            runtime,
            dial,
            data_connections: 2,
            proofs: Arc::default(),
        });
        Self { env, owner, server, break_all, closed, dials, trust, peer }
    }
}

struct Sent(mpsc::UnboundedSender<OwnerEvent>);

impl EventSink for Sent {
    fn event(&self, event: OwnerEvent) {
        let _ = self.0.send(event);
    }
}

fn run<T>(work: impl Future<Output = T>) -> T {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).enable_all().build().unwrap();
    let limited = async { tokio::time::timeout(Duration::from_secs(60), work).await.expect("nothing hangs") };
    runtime.block_on(limited)
}

fn id(seq: u64) -> Envelope {
    RequestId { session: SessionId(7), slot: 0, seq }.into()
}

fn beat(version: u64) -> MetaRequest {
    MetaRequest::Heartbeat { in_use_ver: version }
}

fn put(extent: u64, blocks: usize) -> PutShard {
    PutShard {
        key: ShardKey { ledger: LEDGER, extent: ExtentId(extent), shard: ShardIndex(0) },
        shape: ShardShape { pg: PgId(1), k: 1, m: 0, extent_len: 4096 },
        note: ShardNote::default(),
        position: None,
        class: ShardClass::Bulk,
        purpose: PutPurpose::Write,
        pg_epoch: Epoch(1),
        bytes: Bytes::from(vec![extent as u8; blocks * 4096]),
        checksums: vec![5; blocks],
    }
}

#[test]
fn a_standby_gets_a_copy_of_the_store_and_a_client_that_is_not_trusted_does_not() {
    let ask_for = |copy, trust, ledger| {
        let request = ReplicaRequest::Copy { replica: 1, wait_ms: 0, copy, after: Bytes::from_static(b"k") };
        run(async move {
            let pair = Pair::trusting(trust);
            RemoteReplica::new(&pair.peer, ledger).ask(request).await
        })
    };
    let ask = |trust, ledger| ask_for(1, trust, ledger);
    let Ok(ReplicaReply::Copied(part)) = ask(Trust::Full, LEDGER) else { panic!("it is copied") };
    assert_eq!((part.copy, part.pairs[0].0.as_ref()), (1, b"k".as_slice()));
    assert_eq!(part.pairs[0].1.len(), 1 << 20);
    assert_eq!(ask(client_of(LEDGER), LEDGER), Err(FsError::NotPermitted));
    assert_eq!(ask(Trust::Full, LedgerId(4)), Err(FsError::Disconnected));
    assert_eq!(ask_for(9, Trust::Full, LEDGER), Err(FsError::Io), "the answer is too long for a message");
}

#[test]
fn only_a_trusted_client_gets_a_view_of_a_filesystem() {
    type Request = fn(String) -> ViewRequest;
    let requests: [Request; 3] = [
        |name| ViewRequest::Filesystem { name, known: 0, wait_ms: 0 },
        |filesystem| ViewRequest::Blob { filesystem, serial: 1, term: Epoch(1), off: 0, len: 1 },
        |filesystem| ViewRequest::Reads { filesystem, ino: Ino(1), off: 0, len: 1 },
    ];
    for request in requests {
        let ask = |trust, name: &str| {
            let request = request(name.to_owned());
            run(async move { RemoteViews::new(&Pair::trusting(trust).peer).ask(request).await })
        };
        assert_eq!(ask(Trust::Full, "main"), Ok(ViewReply::Same));
        assert_eq!(ask(Trust::Full, "other"), Err(FsError::NotFound));
        assert_eq!(ask(client_of(LEDGER), "main"), Ok(ViewReply::Same));
        assert_eq!(ask(client_of(LEDGER), "other"), Err(FsError::NotPermitted));
    }
}

#[test]
fn when_the_other_side_is_there_again_its_drives_are_known() {
    run(async {
        let pair = Pair::new();
        let mut contact = pair.peer.contact();
        for losses in 0..3 {
            contact.wait_for(|now| now.is_there && now.losses == losses).await.unwrap();
            let (told_ns, _) = pair.peer.fact(DRIVE).expect("it was told with the greeting");
            let before_ns = pair.env.clock.boot_ns();
            assert!(told_ns <= before_ns);
            pair.closed.store(true, Ordering::SeqCst);
            pair.break_all.notify_waiters();
            contact.wait_for(|now| !now.is_there).await.unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
            pair.closed.store(false, Ordering::SeqCst);
            contact.wait_for(|now| now.is_there).await.unwrap();
            let (told_ns, _) = pair.peer.fact(DRIVE).expect("it is known");
            assert!(told_ns > before_ns, "it was told again before the contact was there");
        }
    });
}

#[test]
fn a_client_that_is_not_trusted_gets_no_early_answers() {
    for (trust, is_early) in [(Trust::Full, true), (client_of(LEDGER), false)] {
        run(async {
            let pair = Pair::trusting(trust);
            let owner = RemoteOwner::new(&pair.peer, LEDGER);
            let envelope = Envelope { answer: AnswerTime::Early, ..id(1) };
            owner.connect(Arc::new(Sent(mpsc::unbounded_channel().0))).await.unwrap();
            assert_eq!(owner.call(envelope, MetaRequest::PurgeStep).await, Ok(MetaReply::Done));
            assert_eq!(pair.owner.early.load(Ordering::SeqCst), is_early);
        });
    }
}

#[test]
fn a_local_connection_carries_messages_of_all_sizes_in_order() {
    run(async {
        let pair = Pair::local();
        let drive = RemoteDrive::new(&pair.peer, DRIVE).await;
        let owner = RemoteOwner::new(&pair.peer, LEDGER);
        // More than the buffers of the sockets hold, so that both sides wait for room.
        let puts = (0..40).map(|extent| drive.put(put(extent, 256)));
        let beats = (0..400).map(|seq| owner.call(id(seq), beat(seq)));
        let (put_answers, beat_answers) =
            tokio::join!(futures_util::future::join_all(puts), futures_util::future::join_all(beats));
        assert!(put_answers.iter().all(Result::is_ok));
        for (version, answer) in (0..).zip(beat_answers) {
            assert_eq!(answer, Ok(MetaReply::Beat { version, used_bytes: 0, drive_bytes: 0, events: 0 }));
        }
        let seen: Vec<u64> = pair.owner.seen.lock().unwrap().iter().map(|id| id.seq).collect();
        assert!(seen.is_sorted());
        let gets = (0..40).map(|extent| {
            let key = put(extent, 1).key;
            drive.get(GetShard { key, first_block: 0, blocks: 256, purpose: GetPurpose::Read })
        });
        for (extent, got) in (0..).zip(futures_util::future::join_all(gets).await) {
            assert!(got.unwrap().bytes.iter().all(|byte| *byte == extent as u8));
        }
        pair.break_all.notify_waiters();
        assert_eq!(owner.call(id(999), beat(5)).await.map(drop), Ok(()), "on the next connection");
    });
}

#[test]
fn requests_are_executed_in_order_and_answered() {
    run(async {
        let pair = Pair::new();
        assert_eq!(pair.peer.ledgers().await, [(LEDGER, 1)]);
        let owner = RemoteOwner::new(&pair.peer, LEDGER);
        let (events, _inbox) = mpsc::unbounded_channel();
        assert_eq!(owner.connect(Arc::new(Sent(events))).await, Ok(SessionId(7)));
        let calls: Vec<_> = (0..500).map(|seq| owner.call(id(seq), beat(seq))).collect();
        let answers = futures_util::future::join_all(calls).await;
        for (version, answer) in (0..).zip(answers) {
            assert_eq!(answer, Ok(MetaReply::Beat { version, used_bytes: 0, drive_bytes: 0, events: 0 }));
        }
        let seen: Vec<u64> = pair.owner.seen.lock().unwrap().iter().map(|id| id.seq).collect();
        assert!(seen.is_sorted());
        assert_eq!(owner.position(), pair.owner.position());
        let other = RemoteOwner::new(&pair.peer, LedgerId(99));
        assert_eq!(other.call(id(0), beat(0)).await, Err(FsError::Disconnected), "it is not there");
    });
}

#[test]
fn drives_store_and_return_shards_and_tell_their_state() {
    run(async {
        let pair = Pair::new();
        let drive = RemoteDrive::new(&pair.peer, DRIVE).await;
        assert_eq!((drive.health(), drive.stat().capacity_bytes), (DriveHealth::Up, 100));
        for extent in 0..20 {
            drive.put(put(extent, 256)).await.unwrap();
        }
        let get = |extent| GetShard {
            key: put(extent, 1).key,
            first_block: 7,
            blocks: 200,
            purpose: GetPurpose::Read,
        };
        let gets: Vec<_> = (0..20).map(|extent| drive.get(get(extent))).collect();
        for (extent, blocks) in (0..).zip(futures_util::future::join_all(gets).await) {
            assert_eq!(blocks.unwrap().bytes, vec![extent; 200 * 4096]);
        }
        assert!(matches!(drive.get(get(99)).await, Err(GetShardError::NotFound { .. })));
        drive.delete(vec![put(3, 1).key].into()).await.unwrap();
        assert!(matches!(drive.get(get(3)).await, Err(GetShardError::NotFound { .. })));
        assert_eq!(drive.known_ledgers().await.unwrap()[0].ledger, LEDGER);
        assert_eq!(drive.list(None, 3).await, Err(DriveFailed { drive: DRIVE }));
        assert_eq!(drive.scrub(None, 1).await.unwrap().verified_bytes, 5);
        drive.make_room().await.unwrap();
        tokio::time::sleep(PING + PING / 2).await;
        assert_eq!(drive.stat().live_bytes, 19, "the state is told again");
        assert!(drive.stat().age_ms < 3000);
    });
}

#[test]
fn calls_and_events_outlive_their_connection() {
    run(async {
        let pair = Pair::new();
        let owner = RemoteOwner::new(&pair.peer, LEDGER);
        let (events, mut inbox) = mpsc::unbounded_channel();
        owner.connect(Arc::new(Sent(events))).await.unwrap();
        for round in 0..10 {
            let waiting = {
                let owner = owner.clone();
                tokio::spawn(async move { owner.call(id(1_000_000 + round), MetaRequest::StatFs).await })
            };
            let calls: Vec<_> = (0..50)
                .map(|n| owner.call(id(round * 50 + n), MetaRequest::GetAttr { ino: Ino(round * 50 + n) }))
                .collect();
            let all = futures_util::future::join_all(calls);
            let breaker = async {
                tokio::task::yield_now().await;
                pair.break_all.notify_waiters();
            };
            let (answers, ()) = tokio::join!(all, breaker);
            assert!(answers.iter().all(|answer| *answer == Ok(MetaReply::Done)));
            // The call that waits is sent again on each new connection.
            while !waiting.is_finished() {
                pair.owner.gate.notify_waiters();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert_eq!(waiting.await.unwrap(), Ok(MetaReply::StatFs { used_bytes: 1, inodes: 2 }));
        }
        assert!(pair.dials.load(Ordering::SeqCst) > 10);
        // The test owner executes repetitions again, so some events come twice; none is missing, and their order stands.
        let mut inos = Vec::new();
        while let Ok(OwnerEvent::Revoked { lease }) = inbox.try_recv() {
            inos.push(lease.ino.0);
        }
        let distinct: std::collections::BTreeSet<u64> = inos.iter().copied().collect();
        assert!(distinct.iter().copied().eq(0..500), "{inos:?}");
    });
}

#[test]
fn a_call_that_nobody_waits_for_is_cancelled() {
    run(async {
        let pair = Pair::new();
        let owner = RemoteOwner::new(&pair.peer, LEDGER);
        let waiting =
            tokio::time::timeout(Duration::from_millis(100), owner.call(id(1), MetaRequest::StatFs)).await;
        assert!(waiting.is_err());
        while !pair.owner.cancelled.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let mut late = id(2);
        late.deadline_ms = 50;
        assert_eq!(
            owner.call(late, MetaRequest::StatFs).await,
            Err(FsError::Disconnected),
            "the deadline has passed"
        );
    });
}

#[test]
fn a_peer_out_of_reach_makes_its_drives_unreachable_and_not_failed() {
    run(async {
        let pair = Pair::new();
        let drive = RemoteDrive::new(&pair.peer, DRIVE).await;
        pair.closed.store(true, Ordering::SeqCst);
        pair.break_all.notify_waiters();
        while drive.health() == DriveHealth::Up {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(drive.health(), DriveHealth::Unreachable);
        assert!(drive.stat().age_ms >= 5000);
        pair.closed.store(false, Ordering::SeqCst);
        while drive.health() != DriveHealth::Up {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        drive.put(put(1, 1)).await.unwrap();
    });
}

#[test]
fn a_drive_of_a_process_that_is_about_to_end_counts_as_away_and_not_as_failed() {
    run(async {
        let pair = Pair::new();
        let drive = RemoteDrive::new(&pair.peer, DRIVE).await;
        drive.put(put(1, 1)).await.unwrap();
        let before = pair.peer.contact().borrow().losses;
        pair.server.lock().unwrap().set_services(Services::default());
        let getting = tokio::spawn(async move { drive.put(put(2, 1)).await });
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!getting.is_finished(), "its connection is still there");
        pair.closed.store(true, Ordering::SeqCst);
        pair.break_all.notify_waiters();
        assert!(getting.await.unwrap().is_err());
        assert!(pair.peer.contact().borrow().losses > before);
        // A process that goes on without the drive says so soon.
        let pair = Pair::new();
        let drive = RemoteDrive::new(&pair.peer, DRIVE).await;
        pair.server.lock().unwrap().set_services(Services::default());
        assert!(drive.put(put(3, 1)).await.is_err());
        assert!(pair.peer.contact().borrow().is_there);
        // One that has begun and is about to open the drive is asked again.
        let putting = tokio::spawn(async move { drive.put(put(4, 1)).await });
        tokio::time::sleep(Duration::from_millis(300)).await;
        pair.server.lock().unwrap().set_services(services(&pair.owner, 1));
        putting.await.unwrap().unwrap();
    });
}

#[test]
fn a_ledger_that_is_opened_anew_ends_its_remote_owners() {
    run(async {
        let pair = Pair::new();
        let owner = RemoteOwner::new(&pair.peer, LEDGER);
        let (events, _inbox) = mpsc::unbounded_channel();
        owner.connect(Arc::new(Sent(events))).await.unwrap();
        let waiting = owner.call(id(1), MetaRequest::StatFs);
        let change = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            *pair.server.lock().unwrap() = Server::new(&pair.env, services(&pair.owner, 2));
            pair.break_all.notify_waiters();
        };
        let (answer, ()) = tokio::join!(waiting, change);
        assert_eq!(answer, Err(FsError::Disconnected));
        assert!(owner.is_lost());
        assert_eq!(owner.call(id(2), beat(1)).await, Err(FsError::Disconnected));
        let next = RemoteOwner::new(&pair.peer, LEDGER);
        let claim = Claim { in_use_ver: 9, ..Claim::default() };
        let (events, _inbox) = mpsc::unbounded_channel();
        let resumed = next.resume(SessionId(7), claim, Arc::new(Sent(events))).await;
        assert_eq!(resumed, Err(FsError::StaleLease), "the owner's answer comes through");
    });
}

#[test]
fn a_claim_of_several_messages_goes_on_with_the_same_stream() {
    run(async {
        let pair = Pair::new();
        let owner = RemoteOwner::new(&pair.peer, LEDGER);
        let (events, mut inbox) = mpsc::unbounded_channel();
        let claim = Claim { in_use_ver: 9, more: true, ..Claim::default() };
        for round in 0..3 {
            owner.resume(SessionId(7), claim.clone(), Arc::new(Sent(events.clone()))).await.unwrap();
            for n in 0..100 {
                let ino = Ino(round * 100 + n);
                assert_eq!(owner.call(id(ino.0), MetaRequest::GetAttr { ino }).await, Ok(MetaReply::Done));
            }
        }
        assert_eq!(pair.dials.load(Ordering::SeqCst), 3, "no connection broke");
        let mut inos = Vec::new();
        while let Ok(OwnerEvent::Revoked { lease }) = inbox.try_recv() {
            inos.push(lease.ino.0);
        }
        assert!(inos.iter().copied().eq(0..300), "{inos:?}");
    });
}

fn rights_of(ledger: LedgerId) -> Rights {
    let (ledgers, filesystems) = ([ledger].into(), ["main".to_owned()].into());
    Rights { client: 7, ledgers, filesystems, read_only: false, squash: Squash::Root }
}

/// A client with one filesystem.
fn client_of(ledger: LedgerId) -> Trust {
    Trust::Client(Arc::new(rights_of(ledger)))
}

/// The refusals of all operations, by name.
async fn refusals(trust: Trust) -> BTreeMap<&'static str, Option<Refusal>> {
    let env = Env::real();
    let server = Server::new(&env, services(&Arc::default(), 1));
    let (here, there) = tokio::io::duplex(1 << 20);
    tokio::spawn(server.serve(Connection::over(there), trust));
    let (from, mut to) = tokio::io::split(here);
    let mut from = tokio::io::BufReader::new(from);
    let all = [SESSION, OWNER, REPLICA, VIEW, JOIN, CLUSTER, HOST, message::DRIVE];
    let mut found = BTreeMap::new();
    for (name, code) in all.iter().flat_map(|operations| operations.0) {
        let body = crate::encoding::encode(&Envelope { deadline_ms: 5000, ..Envelope::default() }).into();
        let message = message::Packed { code: *code, body, payload: bytes::Bytes::new() };
        let service = if message::DRIVE.name(*code).is_some() { DRIVE.0 } else { LEDGER.0 };
        let call = Frame { kind: FrameKind::Call, service, call: u64::from(*code), message };
        write_frame(&mut to, &call).await.unwrap();
        let answer = loop {
            let frame = read_frame(&mut from).await.unwrap().unwrap();
            if (frame.kind, frame.call) == (FrameKind::Answer, u64::from(*code)) {
                break frame.message;
            }
        };
        // Any answer that cannot be read as this one is no refusal.
        let answer = message::unpack_answer::<bool>(&answer.body, bytes::Bytes::new());
        found.insert(*name, answer.ok().and_then(|(_, answer)| answer.err()));
    }
    found
}

#[test]
fn a_stranger_may_ask_to_join_and_nothing_else_and_users_may_not_ask_for_nodes() {
    run(async {
        for (name, refusal) in refusals(Trust::Stranger).await {
            // There is no service that takes it in; the fields of the others are not even read.
            let may_ask = JOIN.0.iter().any(|(join, _)| *join == name);
            let expected = if may_ask { Refusal::Malformed } else { Refusal::Forbidden };
            assert_eq!(refusal, Some(expected), "{name}");
        }
        let of_users = refusals(client_of(LEDGER)).await;
        for (name, _) in CLUSTER.0.iter().chain(HOST.0) {
            assert_eq!(of_users[name], Some(Refusal::Forbidden), "{name}");
        }
        assert_eq!(of_users["Drives"], Some(Refusal::Forbidden));
        assert!(refusals(Trust::Full).await.values().all(|refusal| *refusal != Some(Refusal::Forbidden)));
    });
}
