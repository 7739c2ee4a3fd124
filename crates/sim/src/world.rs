//! The state that survives a crash: the clock, the disks, and the promises made to the outside world.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::env::sim::{DiskEvent, SimFiles, SimRandom};
use base::env::{Clock, Env, Random};
use base::{ExtentId, Ino, ShardIndex};
use meta::log::MemLog;
use tokio::time::Instant;
use wire::drive::ShardKey;
use wire::meta::RequestId;

use crate::cluster::Cluster;
use crate::locks::Locks;
use crate::reads::Reads;
use crate::scenario::Scenario;
use crate::store::Bucket;
use crate::trace::{Trace, sum};

/// How long an owner counts as alive on an engine that several hosts reach.
const OWNER_LEASE: Duration = Duration::from_secs(3);

/// Simulated time: goes on from where the last boot ended.
#[derive(Default)]
pub(crate) struct WorldClock {
    base_ns: AtomicU64,
    started: Mutex<Option<Instant>>,
}

impl WorldClock {
    /// Begins a boot, `pause_ns` after the last one ended. To be called on the boot's runtime.
    pub(crate) fn start(&self, pause_ns: u64) {
        self.base_ns.fetch_add(pause_ns, Ordering::Relaxed);
        *self.started.lock().expect("no holder of this lock panics") = Some(Instant::now());
    }

    /// Ends a boot; time stands still.
    pub(crate) fn stop(&self) {
        let now = self.boot_ns();
        self.base_ns.store(now, Ordering::Relaxed);
        *self.started.lock().expect("no holder of this lock panics") = None;
    }
}

impl Clock for WorldClock {
    fn boot_ns(&self) -> u64 {
        let started = *self.started.lock().expect("no holder of this lock panics");
        let elapsed = started.map_or(0, |started| started.elapsed().as_nanos() as u64);
        self.base_ns.load(Ordering::Relaxed) + elapsed
    }

    fn wall_ns(&self) -> i64 {
        1_700_000_000_000_000_000 + self.boot_ns() as i64
    }
}

/// A machine of its own, which may have a clock of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Machine {
    /// One of the ledger's hosts.
    Host(usize),
    /// The machine of a client.
    Client(u32),
}

/// Two clocks differ by twice this at most: 2 %, which all terms allow for.
const DRIFT_PPM_MAX: u64 = 10_000;

/// The clock of a machine: it runs a little faster or slower than the world's, and it began at another time.
struct Drift {
    world: Arc<WorldClock>,
    ahead_ns: u64,
    rate_ppm: u64,
}

impl Clock for Drift {
    fn boot_ns(&self) -> u64 {
        self.ahead_ns + (u128::from(self.world.boot_ns()) * u128::from(self.rate_ppm) / 1_000_000) as u64
    }

    fn wall_ns(&self) -> i64 {
        self.world.wall_ns()
    }
}

/// A seeded random sequence.
pub(crate) struct Dice(SimRandom);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(SimRandom::new(seed))
    }

    pub(crate) fn below(&self, limit: u64) -> u64 {
        self.0.next_u64() % limit.max(1)
    }

    /// True once in `times`, on average.
    pub(crate) fn once_in(&self, times: u64) -> bool {
        self.below(times) == 0
    }

    pub(crate) fn of<'a, T>(&self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }
}

/// Promises and handed-out ids so far. Crashes do not reset them.
#[derive(Default)]
pub(crate) struct Promises {
    /// The last batch that the log acknowledged.
    pub(crate) acked_seq: u64,
    /// The highest epoch that sealed the log.
    pub(crate) sealed_epoch: u64,
    /// First extent ids of ranges, with their lengths.
    pub(crate) ranges: BTreeMap<u64, u64>,
    /// The first id in the answer to each request that got some, and whether that came early.
    pub(crate) handed_out: HashMap<RequestId, (u64, bool)>,
    /// Inodes whose creation was acknowledged.
    pub(crate) inos: BTreeSet<u64>,
    /// Sessions whose creation was acknowledged.
    pub(crate) sessions: BTreeSet<u64>,
    /// Block checksums of every shard that was ever sent to a drive.
    pub(crate) shards: BTreeMap<ShardKey, Vec<u32>>,
    /// Those that were sent to the drive that is set aside, and may have moved from there.
    pub(crate) victims_shards: BTreeSet<(ExtentId, ShardIndex)>,
    /// Drives whose content was damaged on purpose, or that missed writes.
    pub(crate) hurt_drives: BTreeSet<u32>,
    /// The reads that sessions have reported to the owner.
    pub(crate) reads: Reads,
    /// The object store is being left.
    pub(crate) detaching: bool,
    /// When an owner last heard each client, by the boot clock.
    pub(crate) heard_ns: BTreeMap<u32, u64>,
    /// When owners took the ledger over.
    pub(crate) turns_ns: Vec<u64>,
    /// Since when changes that were answered early are lost.
    pub(crate) names_lost_ns: Option<u64>,
    /// Until when each client is cut off from the owner, by the boot clock.
    pub(crate) cut_until_ns: BTreeMap<u32, u64>,
    /// Clients whose machines have died in this boot.
    pub(crate) dead_clients: BTreeSet<u32>,
    /// Inodes to which processes of each client wrote in this boot.
    pub(crate) written: BTreeMap<u32, BTreeSet<u64>>,
    /// A damaged drive could not be opened.
    pub(crate) drive_lost: bool,
    /// Inodes whose leases were revoked: dirty data under them is lost, and the next fsync reports it.
    pub(crate) revoked: BTreeSet<u64>,
    /// Descriptions of violated invariants.
    violations: Vec<String>,
}

impl Promises {
    /// Records a violated invariant.
    pub(crate) fn violate(&mut self, what: String) {
        if self.violations.len() < 10 {
            self.violations.push(what);
        }
    }
}

/// The state that survives a crash; see the module.
pub(crate) struct World {
    pub(crate) scenario: Scenario,
    pub(crate) clock: Arc<WorldClock>,
    pub(crate) files: Arc<SimFiles>,
    pub(crate) trace: Arc<Trace>,
    /// Locks that processes hold.
    pub(crate) locks: Locks,
    promises: Mutex<Promises>,
    cluster: Mutex<Cluster>,
    /// The content of the object store.
    pub(crate) bucket: Bucket,
    /// The ledger's log, if it is on an engine of its own.
    pub(crate) log: MemLog,
    random: Arc<SimRandom>,
}

impl World {
    pub(crate) fn new(scenario: Scenario, keep_lines: bool) -> Arc<Self> {
        let seed = scenario.seed;
        let clock = Arc::new(WorldClock::default());
        let files = Arc::new(SimFiles::new(seed ^ 0xd15c));
        let trace = Arc::new(Trace::new(clock.clone(), keep_lines));
        trace.cut_power_of(&files);
        let watched = trace.clone();
        files.set_watch(Box::new(move |file, event| note_disk_event(&watched, file, event)));
        let random = Arc::new(SimRandom::new(seed ^ 0x7a5d));
        let (promises, cluster) = (Mutex::default(), Mutex::new(Cluster::new()));
        let bucket = Bucket::default();
        let log = MemLog::shared(OWNER_LEASE);
        let locks = Locks::default();
        Arc::new(Self { scenario, clock, files, trace, locks, promises, cluster, bucket, log, random })
    }

    /// The environment of the code under test, with the clock of the world.
    pub(crate) fn env(&self) -> Env {
        Env { clock: self.clock.clone(), random: self.random.clone(), files: self.files.clone() }
    }

    /// The environment of a machine.
    pub(crate) fn env_of(&self, machine: Machine) -> Env {
        if !self.scenario.drifts {
            return self.env();
        }
        let part = match machine {
            Machine::Host(host) => 0xd41f_0000 + host as u64,
            Machine::Client(client) => 0xd41f_1000 + u64::from(client),
        };
        let dice = self.dice(part);
        let clock = Drift {
            world: self.clock.clone(),
            ahead_ns: dice.below(1_000_000_000_000),
            rate_ppm: 1_000_000 - DRIFT_PPM_MAX + dice.below(2 * DRIFT_PPM_MAX + 1),
        };
        Env { clock: Arc::new(clock), ..self.env() }
    }

    pub(crate) fn promises(&self) -> MutexGuard<'_, Promises> {
        self.promises.lock().expect("no holder of this lock panics")
    }

    /// The present drives, groups and profile.
    pub(crate) fn cluster(&self) -> MutexGuard<'_, Cluster> {
        self.cluster.lock().expect("no holder of this lock panics")
    }

    /// Whether faults of drives explain failed I/O in this run.
    pub(crate) fn is_faulty(&self) -> bool {
        self.scenario.drives_die || self.scenario.syncs_fail || self.promises().drive_lost
    }

    /// Notes a revoked lease. Without a fault every recall is answered in time.
    pub(crate) fn note_revoked(&self, ino: Ino) {
        let Scenario { fills, cuts, client_dies, .. } = self.scenario;
        let excused = self.is_faulty() || fills || cuts || client_dies || self.trace.is_cut();
        let mut promises = self.promises();
        promises.revoked.insert(ino.0);
        if !excused {
            promises.violate(format!("I12: a lease on inode {ino} was revoked"));
        }
    }

    /// Separate dice for a part of the run.
    pub(crate) fn dice(&self, part: u64) -> Dice {
        Dice::new(self.scenario.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ part)
    }

    /// The machine of a client dies. What its processes wrote and did not sync may be lost.
    pub(crate) fn kill_client(&self, client: u32) {
        self.trace.event(format_args!("net {client} dies"));
        let mut promises = self.promises();
        promises.dead_clients.insert(client);
        let written = promises.written.remove(&client).unwrap_or_default();
        promises.revoked.extend(written);
    }

    /// The violated invariants.
    pub(crate) fn violations(&self) -> Vec<String> {
        self.promises().violations.clone()
    }
}

fn note_disk_event(trace: &Trace, file: u64, event: DiskEvent<'_>) {
    match event {
        DiskEvent::Write { offset, bytes } => {
            // Zeros ahead of the log are long and all the same: the first 64 KiB are enough.
            let sum = sum(&bytes[..bytes.len().min(1 << 16)]);
            trace.event(format_args!("disk write file={file} off={offset} len={} sum={sum:x}", bytes.len()));
        }
        DiskEvent::Sync => trace.event(format_args!("disk sync file={file}")),
        DiskEvent::SetLen(len) => trace.event(format_args!("disk setlen file={file} len={len}")),
        DiskEvent::Name(path) => trace.event(format_args!("disk name {}", path.display())),
        DiskEvent::SyncDir(path) => trace.event(format_args!("disk syncdir {}", path.display())),
    }
}
