//! A filesystem in one process: an owner in memory, drives in memory with faults, and clients.
#![allow(dead_code, reason = "the fuzz targets use a part")]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::env::sim::Sim;
use base::{ClusterId, DriveId, DriveUuid, Epoch, FsError, Ino, LedgerId, PgId, SessionId};
use bytes::Bytes;
use client::{Attr, Client, ClientOptions, FileKind, MakeNode, OpenIntent, Peers, Reach, TierLink, Topology};
use layout::{ClusterMap, DriveState, MapDrive, Place, PlacementGroup, Rebuilding};
use meta::log::{LedgerLog, MemLog};
use meta::owner::{EarlierSessions, Owner, OwnerOptions};
use meta::state::MemState;
use tokio::sync::{Semaphore, watch};
use wire::BoxFuture;
use wire::drive::{
    DeleteShards, DriveFailed, DriveHealth, DriveService, DriveStat, GetShard, GetShardError, IoPath,
    PutShard, PutShardError, ScrubStep, ShardBlocks, ShardEntry, ShardKey, ShardNote,
};
use wire::message::Envelope;
use wire::meta::{Claim, EventSink, MetaReply, MetaRequest, MetaService, OwnerEvent, Resumed};
use wire::position::{KnownLedger, Position};
use wire::store::{ObjectStore, Outgoing, StoreError};

pub const LEDGER: LedgerId = LedgerId(1);
/// Longer than any test that does not hang.
const DEADLINE: Duration = Duration::from_secs(60);

/// Faults of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// It has failed and reports it.
    Failed,
    /// Every request fails, but it reports to be healthy.
    Erring,
    /// Its machine is not reached.
    Away,
    /// Blocks come back with a byte changed.
    Corrupt,
    /// It has none of its shards.
    Missing,
    /// It never answers.
    Hanging,
    /// Writes take this long; other requests are answered.
    Storing,
    /// Writes take 20 ms.
    Slow,
}

/// A drive in memory.
pub struct MemDrive {
    id: DriveId,
    shards: Mutex<HashMap<ShardKey, PutShard>>,
    fault: Mutex<Fault>,
    pub capacity_bytes: AtomicU64,
    /// Dead space, until a client asks for room.
    pub garbage_bytes: AtomicU64,
    pub puts: AtomicU64,
    pub gets: AtomicU64,
    position: AtomicU64,
}

impl MemDrive {
    fn new(id: u32) -> Self {
        Self {
            id: DriveId(id),
            shards: Mutex::default(),
            fault: Mutex::new(Fault::None),
            capacity_bytes: AtomicU64::new(1 << 30),
            garbage_bytes: AtomicU64::new(0),
            puts: AtomicU64::new(0),
            gets: AtomicU64::new(0),
            position: AtomicU64::new(0),
        }
    }

    pub fn set(&self, fault: Fault) {
        *self.fault.lock().unwrap() = fault;
    }

    fn fault(&self) -> Fault {
        *self.fault.lock().unwrap()
    }

    pub fn used_bytes(&self) -> u64 {
        self.shards.lock().unwrap().values().map(|shard| shard.bytes.len() as u64).sum()
    }

    /// Flips a bit in every shard. Returns how many there are.
    pub fn rot(&self) -> usize {
        let mut shards = self.shards.lock().unwrap();
        for put in shards.values_mut() {
            let mut bytes = put.bytes.to_vec();
            bytes[5000 % put.bytes.len()] ^= 4;
            put.bytes = bytes.into();
        }
        shards.len()
    }

    /// Flips a bit in this block of every shard that has it.
    pub fn rot_block(&self, block: usize) {
        for put in self.shards.lock().unwrap().values_mut() {
            let mut bytes = put.bytes.to_vec();
            if let Some(byte) = bytes.get_mut(block * 4096 + 9) {
                *byte ^= 4;
            }
            put.bytes = bytes.into();
        }
    }

    /// Loses all other shards.
    pub fn keep_only(&self, entries: &[ShardEntry]) {
        let kept: HashSet<ShardKey> = entries.iter().map(|entry| entry.key).collect();
        self.shards.lock().unwrap().retain(|key, _| kept.contains(key));
    }

    pub fn forget_all(&self) {
        self.shards.lock().unwrap().clear();
    }

    pub fn rotten(&self) -> usize {
        self.shards.lock().unwrap().values().filter(|put| is_rotten(put)).count()
    }

    pub fn shards(&self) -> usize {
        self.shards.lock().unwrap().len()
    }

    /// The shards on it, as in an inventory.
    pub fn entries(&self) -> Vec<ShardEntry> {
        self.shards.lock().unwrap().values().map(entry_of).collect()
    }

    /// Stores a shard as if it had arrived late.
    pub fn plant(&self, entry: ShardEntry, shard: base::ShardIndex) {
        let key = ShardKey { shard, ..entry.key };
        let bytes = Bytes::from(vec![0; entry.len_bytes as usize]);
        let checksums = base::checksum::block_checksums(key.extent, shard, 0, &bytes);
        let class = wire::drive::ShardClass::Bulk;
        let purpose = wire::drive::PutPurpose::Repair;
        let (note, position) = Default::default();
        let shape = entry.shape;
        let put =
            PutShard { key, shape, note, position, class, purpose, pg_epoch: Epoch(1), bytes, checksums };
        self.shards.lock().unwrap().insert(key, put);
    }

    fn note_position(&self, position: Option<Position>) {
        let seq = position.map_or(0, |position| position.seq.0);
        self.position.fetch_max(seq, Ordering::Relaxed);
    }

    /// The newest position of a ledger that it knows.
    pub fn position(&self) -> u64 {
        self.position.load(Ordering::Relaxed)
    }

    /// The note beside its shards.
    pub fn notes(&self) -> Vec<ShardNote> {
        self.shards.lock().unwrap().values().map(|put| put.note).collect()
    }

    /// Returns when the drive may answer.
    async fn answering(&self) {
        tokio::task::yield_now().await;
        while self.fault() == Fault::Hanging {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn errs(&self) -> bool {
        matches!(self.fault(), Fault::Failed | Fault::Erring | Fault::Away)
    }

    fn put_now(&self, request: PutShard) -> Result<(), PutShardError> {
        let drive = self.id;
        self.puts.fetch_add(1, Ordering::Relaxed);
        if self.errs() {
            return Err(PutShardError::Failed { drive });
        }
        let sums = base::checksum::block_checksums(request.key.extent, request.key.shard, 0, &request.bytes);
        assert_eq!(sums, request.checksums, "the client computes the sums of the bytes that it sends");
        let room = self.capacity_bytes.load(Ordering::Relaxed) - self.garbage_bytes.load(Ordering::Relaxed);
        if self.used_bytes() + request.bytes.len() as u64 > room {
            return Err(PutShardError::NoSpace { drive });
        }
        self.note_position(request.position);
        let key = request.key;
        let before = self.shards.lock().unwrap().insert(key, request.clone());
        assert!(
            before.is_none_or(|before| before.bytes == request.bytes || is_rotten(&before)),
            "a shard is written once: {key:?}"
        );
        Ok(())
    }

    fn get_now(&self, request: GetShard) -> Result<ShardBlocks, GetShardError> {
        let (drive, key) = (self.id, request.key);
        self.gets.fetch_add(1, Ordering::Relaxed);
        if self.errs() {
            return Err(GetShardError::Failed { drive });
        }
        let shards = self.shards.lock().unwrap();
        let found = shards.get(&key).filter(|_| self.fault() != Fault::Missing);
        let shard = found.ok_or(GetShardError::NotFound { drive, key })?;
        let blocks = request.first_block as usize..(request.first_block + request.blocks) as usize;
        let sums = shard.checksums.get(blocks.clone()).ok_or(GetShardError::OutOfRange { drive, key })?;
        let mut bytes = shard.bytes[blocks.start * 4096..blocks.end * 4096].to_vec();
        if self.fault() == Fault::Corrupt {
            bytes[77] ^= 1;
        }
        let note = (request.purpose == wire::drive::GetPurpose::Move).then_some(shard.note);
        Ok(ShardBlocks { bytes: bytes.into(), checksums: sums.to_vec(), note })
    }
}

fn is_rotten(put: &PutShard) -> bool {
    base::checksum::block_checksums(put.key.extent, put.key.shard, 0, &put.bytes) != put.checksums
}

fn entry_of(put: &PutShard) -> ShardEntry {
    ShardEntry { key: put.key, shape: put.shape, len_bytes: put.bytes.len() as u32 }
}

impl DriveService for MemDrive {
    fn put(&self, request: PutShard) -> BoxFuture<'_, Result<(), PutShardError>> {
        Box::pin(async move {
            self.answering().await;
            if self.fault() == Fault::Slow {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            while self.fault() == Fault::Storing {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            self.put_now(request)
        })
    }

    fn get(&self, request: GetShard) -> BoxFuture<'_, Result<ShardBlocks, GetShardError>> {
        Box::pin(async move {
            self.answering().await;
            self.get_now(request)
        })
    }

    fn delete(&self, request: DeleteShards) -> BoxFuture<'_, Result<(), DriveFailed>> {
        Box::pin(async move {
            self.answering().await;
            if self.errs() {
                return Err(DriveFailed { drive: self.id });
            }
            let mut shards = self.shards.lock().unwrap();
            request.keys.iter().for_each(|key| drop(shards.remove(key)));
            self.note_position(request.position);
            Ok(())
        })
    }

    fn keep_positions(
        &self,
        _positions: Vec<Position>,
        _replace: bool,
    ) -> BoxFuture<'_, Result<(), DriveFailed>> {
        Box::pin(async { unreachable!("no client tells positions by themselves") })
    }

    fn known_ledgers(&self) -> BoxFuture<'_, Result<Vec<KnownLedger>, DriveFailed>> {
        Box::pin(async { unreachable!("no client asks drives for their ledgers") })
    }

    fn list(
        &self,
        after: Option<ShardKey>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<ShardEntry>, DriveFailed>> {
        Box::pin(async move {
            if self.errs() {
                return Err(DriveFailed { drive: self.id });
            }
            let mut entries: Vec<ShardEntry> = self.shards.lock().unwrap().values().map(entry_of).collect();
            entries.retain(|entry| after.is_none_or(|after| entry.key > after));
            entries.sort_by_key(|entry| entry.key);
            entries.truncate(limit);
            Ok(entries)
        })
    }

    fn scrub(
        &self,
        _after: Option<ShardKey>,
        _budget_bytes: u64,
    ) -> BoxFuture<'_, Result<ScrubStep, DriveFailed>> {
        Box::pin(async { unreachable!("no client scrubs drives") })
    }

    fn make_room(&self) -> BoxFuture<'_, Result<(), DriveFailed>> {
        Box::pin(async {
            self.answering().await;
            self.garbage_bytes.store(0, Ordering::Relaxed);
            Ok(())
        })
    }

    fn health(&self) -> DriveHealth {
        match self.fault() {
            Fault::Failed => DriveHealth::Failed,
            Fault::Away => DriveHealth::Unreachable,
            _ => DriveHealth::Up,
        }
    }

    fn stat(&self) -> DriveStat {
        let (capacity_bytes, live_bytes) = (self.capacity_bytes.load(Ordering::Relaxed), self.used_bytes());
        let garbage_bytes = self.garbage_bytes.load(Ordering::Relaxed);
        DriveStat {
            uuid: DriveUuid([self.id.0 as u8; 16]),
            mark: wire::drive::DriveMark::default(),
            health: self.health(),
            failure: None,
            io_path: IoPath::Simulated,
            capacity_bytes,
            live_bytes,
            garbage_bytes,
            trimmed_bytes: 0,
            write_limit_bytes_per_s: None,
            host_full: false,
            full: false,
            reserved_bytes: 0,
            free_bytes: capacity_bytes.saturating_sub(live_bytes + garbage_bytes),
            shards: self.shards.lock().unwrap().len() as u64,
            bad_shards: 0,
            age_ms: 0,
            cleanable_bytes: garbage_bytes,
            foreground: wire::drive::Foreground::default(),
        }
    }
}

/// Replies to hold back until a permit is given.
type Hold = Box<dyn Fn(&MetaRequest) -> bool + Send + Sync>;

/// The cluster in the names of blobs.
pub const TIER_CLUSTER: ClusterId = ClusterId([7; 16]);

/// The owner as one client sees it: counted, and with faults on the way.
pub struct Wire {
    owner: Arc<Owner>,
    asked: Mutex<Vec<MetaRequest>>,
    hold: Mutex<Option<Hold>>,
    refuse: Mutex<Option<Hold>>,
    lose: Mutex<Option<Hold>>,
    pub held: Semaphore,
    pub holding: Semaphore,
    /// Recalls get lost on the way.
    deaf: bool,
    /// Nothing reaches the client, and nothing from it the owner.
    cut: Arc<AtomicBool>,
}

/// The way of events to a client.
struct WireSink {
    deaf: bool,
    cut: Arc<AtomicBool>,
    client: Arc<dyn EventSink>,
}

impl EventSink for WireSink {
    fn event(&self, event: OwnerEvent) {
        let is_lost = self.deaf && matches!(event, OwnerEvent::Recall { .. });
        if !is_lost && !self.cut.load(Ordering::SeqCst) {
            self.client.event(event);
        }
    }
}

impl Wire {
    /// Holds back the replies to requests that `which` picks, until `held` gets permits. `holding` gets a permit for
    /// each.
    pub fn hold(&self, which: impl Fn(&MetaRequest) -> bool + Send + Sync + 'static) {
        *self.hold.lock().unwrap() = Some(Box::new(which));
    }

    /// Requests that `which` picks fail and do not reach the owner.
    pub fn refuse(&self, which: impl Fn(&MetaRequest) -> bool + Send + Sync + 'static) {
        *self.refuse.lock().unwrap() = Some(Box::new(which));
    }

    /// Answers to requests that `which` picks are lost.
    pub fn lose(&self, which: impl Fn(&MetaRequest) -> bool + Send + Sync + 'static) {
        *self.lose.lock().unwrap() = Some(Box::new(which));
    }

    /// From now on the client reaches nobody.
    pub fn cut(&self) {
        self.cut.store(true, Ordering::SeqCst);
    }

    /// The requests since the last call, without heartbeats.
    pub fn take_asked(&self) -> Vec<MetaRequest> {
        let mut asked = std::mem::take(&mut *self.asked.lock().unwrap());
        asked.retain(|request| !matches!(request, MetaRequest::Heartbeat { .. }));
        asked
    }
}

impl MetaService for Wire {
    fn position(&self) -> Option<Position> {
        self.owner.position()
    }

    fn connect(&self, events: Arc<dyn EventSink>) -> BoxFuture<'_, Result<SessionId, FsError>> {
        let sink = WireSink { deaf: self.deaf, cut: self.cut.clone(), client: events };
        self.owner.connect(Arc::new(sink))
    }

    fn resume(
        &self,
        session: SessionId,
        claim: Claim,
        events: Arc<dyn EventSink>,
    ) -> BoxFuture<'_, Result<Resumed, FsError>> {
        self.owner.resume(session, claim, events)
    }

    fn call(&self, envelope: Envelope, request: MetaRequest) -> BoxFuture<'_, Result<MetaReply, FsError>> {
        self.asked.lock().unwrap().push(request.clone());
        let hold = self.hold.lock().unwrap().as_ref().is_some_and(|which| which(&request));
        let refuse = self.refuse.lock().unwrap().as_ref().is_some_and(|which| which(&request));
        let lose = self.lose.lock().unwrap().as_ref().is_some_and(|which| which(&request));
        Box::pin(async move {
            if self.cut.load(Ordering::SeqCst) {
                return std::future::pending().await;
            }
            if refuse {
                return Err(FsError::Unavailable);
            }
            let reply = self.owner.call(envelope, request).await;
            if lose {
                return Err(FsError::Unknown);
            }
            if hold {
                self.holding.add_permits(1);
                self.held.acquire().await.unwrap().forget();
            }
            reply
        })
    }
}

fn open_owner(
    sim: &Sim,
    log: Arc<dyn LedgerLog>,
    state: &MemState,
    earlier_sessions: EarlierSessions,
) -> Owner {
    Owner::open(OwnerOptions {
        ledger: LEDGER,
        log,
        state: Arc::new(state.clone()),
        env: sim.env(),
        evidence: meta::history::Evidence::default(),
        vacant: None,
        earlier_sessions,
        unstored_bytes_max: 256 << 20,
        standby_grace: Duration::ZERO,
    })
    .unwrap()
}

/// Everything below the clients.
pub struct World {
    pub sim: Sim,
    pub owner: Arc<Owner>,
    pub drives: Vec<Arc<MemDrive>>,
    profile: layout::Profile,
    topology: watch::Receiver<Arc<Topology>>,
    publish: watch::Sender<Arc<Topology>>,
    peers: Peers,
    pub log: MemLog,
    state: MemState,
}

impl World {
    /// One group on the first drives, and `spares` more drives.
    pub fn new(profile: &str, spares: u32) -> Self {
        let sim = Sim::new(1);
        let profile: layout::Profile = profile.parse().unwrap();
        let (log, state) = (MemLog::new(), MemState::default());
        let owner = open_owner(&sim, Arc::new(log.clone()), &state, EarlierSessions::End);
        let ids = 0..u32::from(profile.n()) + spares;
        let drives: Vec<Arc<MemDrive>> = ids.clone().map(|id| Arc::new(MemDrive::new(id))).collect();
        let map_drives = ids.clone().map(|id| MapDrive {
            id: DriveId(id),
            uuid: DriveUuid([id as u8; 16]),
            place: Place { node: id, ..Place::default() },
            state: DriveState::Up,
        });
        let group = PlacementGroup::new(PgId(0), ids.take(profile.n().into()).map(DriveId).collect());
        let map = ClusterMap { epoch: Epoch(1), drives: map_drives.collect(), groups: vec![group] };
        let services =
            drives.iter().map(|drive| (drive.id, drive.clone() as Arc<dyn DriveService>)).collect();
        let (publish, topology) = watch::channel(Arc::new(Topology {
            map,
            drives: services,
            groups: vec![PgId(0)],
            profile,
            ..Topology::default()
        }));
        let (owner, peers) = (Arc::new(owner), Peers::default());
        Self { sim, owner, drives, profile, topology, publish, peers, log, state }
    }

    /// The next owner: the one before, `earlier`, ends.
    pub fn take_over(&self, earlier: &Owner) -> Arc<Owner> {
        earlier.stop();
        self.open_next(Arc::new(self.log.clone()))
    }

    /// The next owner, which fences the one before. Its log is `log`, a way to that of this world.
    pub fn open_next(&self, log: Arc<dyn LedgerLog>) -> Arc<Owner> {
        Arc::new(open_owner(&self.sim, log, &self.state, EarlierSessions::Resume))
    }

    /// Drives and groups, as clients see them.
    pub fn topology(&self) -> Arc<Topology> {
        self.topology.borrow().clone()
    }

    /// Gives a position of the only group to another drive.
    pub fn move_position(&self, position: u8, to: DriveId, state: DriveState) {
        self.change(|topology| {
            let group = &mut topology.map.groups[0];
            let from = std::mem::replace(&mut group.members[usize::from(position)], to);
            group.epoch = Epoch(group.epoch.0 + 1);
            group.rebuilding = vec![Rebuilding { position, from }];
            topology.map.drives[from.0 as usize].state = state;
        });
    }

    /// Publishes a changed cluster map, as the control ledger would.
    pub fn change(&self, change: impl FnOnce(&mut Topology)) {
        let mut topology = Topology::clone(&self.topology.borrow());
        change(&mut topology);
        topology.map.epoch = Epoch(topology.map.epoch.0 + 1);
        self.publish.send_replace(Arc::new(topology));
    }

    fn wire(&self, deaf: bool) -> Arc<Wire> {
        Arc::new(Wire {
            owner: self.owner.clone(),
            asked: Mutex::default(),
            hold: Mutex::new(None),
            refuse: Mutex::default(),
            lose: Mutex::default(),
            held: Semaphore::new(0),
            holding: Semaphore::new(0),
            deaf,
            cut: Arc::default(),
        })
    }

    pub async fn client(&self) -> Client {
        self.wired_client().await.0
    }

    /// A client and its way to the owner.
    pub async fn wired_client(&self) -> (Client, Arc<Wire>) {
        let wire = self.wire(false);
        (self.client_over(wire.clone()).await, wire)
    }

    /// A client that gets no recalls.
    pub async fn deaf_client(&self) -> Client {
        self.deaf_wired_client().await.0
    }

    /// As [`World::deaf_client`], with its way to the owner.
    pub async fn deaf_wired_client(&self) -> (Client, Arc<Wire>) {
        let wire = self.wire(true);
        (self.client_over(wire.clone()).await, wire)
    }

    /// A client of a filesystem that is attached to a store.
    pub async fn tiered_client(&self, store: &Arc<MemStore>) -> Client {
        self.tiered_wired_client(store).await.0
    }

    /// As [`World::tiered_client`], with its way to the owner.
    pub async fn tiered_wired_client(&self, store: &Arc<MemStore>) -> (Client, Arc<Wire>) {
        self.client_at(store.clone()).await
    }

    /// A client of a filesystem that is attached to some store, with its way to the owner.
    pub async fn client_at(&self, store: Arc<dyn ObjectStore>) -> (Client, Arc<Wire>) {
        let (_, store) = watch::channel(Some(store));
        let tier = TierLink {
            cluster: TIER_CLUSTER,
            filesystem: 1,
            fetched_bytes_max: 40 << 20,
            returning_bytes_max: 64 << 20,
            store,
        };
        let wire = self.wire(false);
        (self.client_with(client::only_owner(wire.clone()), tier).await, wire)
    }

    /// A client whose owner is the value of `owner`.
    pub async fn client_of(&self, owner: watch::Receiver<Arc<dyn MetaService>>) -> Client {
        self.client_with(owner, TierLink::none()).await
    }

    async fn client_over(&self, meta: Arc<Wire>) -> Client {
        self.client_with(client::only_owner(meta), TierLink::none()).await
    }

    /// A client that waits for drives whose machines are not reached.
    pub async fn patient_client(&self) -> Client {
        let options = self.options(client::only_owner(self.wire(false)), TierLink::none());
        let reach = Reach::here().waiting_for_drives();
        Client::open(ClientOptions { reach, ..options }).await.unwrap()
    }

    /// A client on another machine, which reaches owner and drives in its own way.
    pub async fn client_elsewhere(
        &self,
        owner: watch::Receiver<Arc<dyn MetaService>>,
        topology: watch::Receiver<Arc<Topology>>,
        reach: Reach,
    ) -> Client {
        let options = self.options(owner, TierLink::none());
        Client::open(ClientOptions { topology, peers: Peers::default(), reach, ..options }).await.unwrap()
    }

    async fn client_with(&self, owner: watch::Receiver<Arc<dyn MetaService>>, tier: TierLink) -> Client {
        Client::open(self.options(owner, tier)).await.unwrap()
    }

    fn options(&self, owner: watch::Receiver<Arc<dyn MetaService>>, tier: TierLink) -> ClientOptions {
        ClientOptions {
            env: self.sim.env(),
            runtime: tokio::runtime::Handle::current(),
            ledger: LEDGER,
            owner,
            topology: self.topology.clone(),
            profile: self.profile,
            dirty_bytes_max: 64 << 20,
            map_bytes_max: 64 << 20,
            tier,
            peers: self.peers.clone(),
            reach: Reach::here(),
        }
    }
}

/// Runs a test on a world of its own. A test that hangs fails.
pub fn run<F: Future<Output = ()>>(profile: &str, test: impl FnOnce(Arc<World>) -> F) {
    run_with_spares(profile, 0, test);
}

/// As [`run`], with drives that are in no placement group.
pub fn run_with_spares<F: Future<Output = ()>>(
    profile: &str,
    spares: u32,
    test: impl FnOnce(Arc<World>) -> F,
) {
    let world = Arc::new(World::new(profile, spares));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let ended = runtime.block_on(async { tokio::time::timeout(DEADLINE, test(world.clone())).await });
    runtime.shutdown_background();
    world.owner.stop();
    ended.expect("the test hangs");
}

/// Waits until `done` returns `true`.
pub async fn until(mut done: impl FnMut() -> bool) {
    while !done() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub fn new_file(name: &str) -> MakeNode {
    MakeNode {
        parent: Ino::ROOT,
        name: Bytes::copy_from_slice(name.as_bytes()),
        kind: FileKind::Regular,
        mode: 0o644,
        umask: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: Bytes::new(),
        open: OpenIntent::Write,
    }
}

/// Creates a file and opens it for writing.
pub async fn create(client: &Client, name: &str) -> Ino {
    client.make(new_file(name)).await.unwrap().ino
}

pub async fn find(client: &Client, name: &str) -> Result<Attr, FsError> {
    client.lookup(Ino::ROOT, name.as_bytes()).await
}

/// Bytes that differ by place and by `tag`.
pub fn pattern(tag: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| ((at * 31 + at / 251 + tag * 97) % 255 + 1) as u8).collect()
}

/// The content of the file, read in parts of `part` bytes.
pub async fn read_in_parts(client: &Client, ino: Ino, part: usize) -> Result<Vec<u8>, FsError> {
    let mut all = Vec::new();
    loop {
        let bytes = client.read(ino, all.len() as u64, part).await?;
        if bytes.is_empty() {
            return Ok(all);
        }
        all.extend_from_slice(&bytes);
    }
}

pub async fn read_all(client: &Client, ino: Ino) -> Result<Vec<u8>, FsError> {
    read_in_parts(client, ino, 1 << 20).await
}

/// An object store in memory with faults on request.
#[derive(Default)]
pub struct MemStore {
    pub objects: Mutex<BTreeMap<String, Bytes>>,
    pub down: AtomicBool,
    /// The time for an answer to a GET.
    pub get_ms: AtomicU64,
    /// GETs, failed ones included.
    pub asked: AtomicU64,
    /// One bit of every answer is flipped.
    pub lies: AtomicBool,
    /// The number of further answers with a blob's first byte that have a flipped bit in the header.
    pub spoils_headers: AtomicU64,
    pub gets: Mutex<Vec<(String, u64)>>,
}

impl MemStore {
    fn up(&self) -> Result<(), StoreError> {
        if self.down.load(Ordering::SeqCst) {
            return Err(StoreError::Unavailable("down".to_owned()));
        }
        Ok(())
    }

    fn spoils(&self) -> bool {
        let less = |left: u64| left.checked_sub(1);
        self.spoils_headers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok()
    }

    /// Bytes that were requested.
    pub fn got_bytes(&self) -> u64 {
        self.gets.lock().unwrap().iter().map(|(_, bytes)| bytes).sum()
    }

    pub fn keys(&self) -> Vec<String> {
        self.objects.lock().unwrap().keys().cloned().collect()
    }
}

impl ObjectStore for MemStore {
    fn put(&self, key: String, object: Outgoing) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.up()?;
            let before = self.objects.lock().unwrap().insert(key, object.parts.concat().into());
            assert!(before.is_none(), "a blob was stored twice");
            Ok(())
        })
    }

    fn get(&self, key: String, range: Option<Range<u64>>) -> BoxFuture<'_, Result<Bytes, StoreError>> {
        Box::pin(async move {
            self.asked.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(self.get_ms.load(Ordering::SeqCst))).await;
            self.up()?;
            let whole = self.objects.lock().unwrap().get(&key).cloned();
            let whole = whole.ok_or_else(|| StoreError::NotFound(key.clone()))?;
            let range = range.unwrap_or(0..whole.len() as u64);
            let bytes = whole.slice(range.start as usize..range.end as usize);
            self.gets.lock().unwrap().push((key, bytes.len() as u64));
            if range.start == 0 && self.spoils() {
                let mut wrong = bytes.to_vec();
                wrong[20] ^= 1;
                return Ok(wrong.into());
            }
            if !self.lies.load(Ordering::SeqCst) {
                return Ok(bytes);
            }
            let mut wrong = bytes.to_vec();
            let middle = wrong.len() / 2;
            wrong[middle] ^= 1;
            Ok(wrong.into())
        })
    }

    fn delete(&self, key: String) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.up()?;
            self.objects.lock().unwrap().remove(&key);
            Ok(())
        })
    }
}
