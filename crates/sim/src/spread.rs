//! How long a rebuild takes, if the network of each machine is the limit: with one machine that restores all shards, and with all of
//! them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::{DriveId, FsError, Ino};
use bytes::Bytes;
use client::{FileKind, MakeNode, OpenIntent, Topology};
use tokio::sync::watch;
use tokio::time::Instant;
use wire::BoxFuture;
use wire::drive::{
    DeleteShards, DriveFailed, DriveHealth, DriveService, DriveStat, GetShard, GetShardError, PutShard,
    PutShardError, ScrubStep, ShardBlocks, ShardEntry, ShardKey,
};
use wire::position::{KnownLedger, Position};

use crate::node::{self, Node};
use crate::scenario::Scenario;
use crate::world::World;

const MIB: u64 = 1 << 20;
/// Drives in each machine.
const DRIVES: u32 = 3;
/// What each drive holds, about.
const HELD_BYTES: u64 = 32 * MIB;
/// Each file is one extent.
const FILE_BYTES: u64 = 320 << 10;
/// Bytes that a machine sends without a turn for others.
const PART: usize = 64 << 10;
/// Longer than any rebuild.
const REBUILD_MAX: Duration = Duration::from_secs(3600);
/// How often the state is looked at.
const LOOK: Duration = Duration::from_millis(1);

/// The network between machines. Each machine sends at most `bytes_per_s`, and receives at most as many. Bytes within a machine take no
/// time.
pub(crate) struct Links {
    bytes_per_s: u64,
    /// Until when each machine sends (`true`) or receives.
    busy: Mutex<BTreeMap<(u32, bool), Instant>>,
}

impl Links {
    pub(crate) fn new(bytes_per_s: u64) -> Arc<Self> {
        Arc::new(Self { bytes_per_s, busy: Mutex::default() })
    }

    /// Carries bytes between machines, in parts: messages share the network.
    async fn carry(&self, from: u32, to: u32, bytes: usize) {
        if from == to {
            return;
        }
        let mut arrived = Instant::now();
        for part in (0..bytes).step_by(PART).map(|at| PART.min(bytes - at)) {
            let sent = self.occupy((from, true), part);
            tokio::time::sleep_until(sent).await;
            arrived = self.occupy((to, false), part);
        }
        tokio::time::sleep_until(arrived).await;
    }

    /// Takes one end of the way for some bytes. Returns when they have passed.
    fn occupy(&self, end: (u32, bool), bytes: usize) -> Instant {
        let time = Duration::from_nanos(bytes as u64 * 1_000_000_000 / self.bytes_per_s);
        let mut busy = self.busy.lock().expect("no holder of this lock panics");
        let free = busy.get(&end).copied().unwrap_or_else(Instant::now).max(Instant::now());
        busy.insert(end, free + time);
        free + time
    }

    /// The drives as one machine reaches them, each change of them included.
    pub(crate) fn of(
        self: &Arc<Self>,
        here: u32,
        mut all: watch::Receiver<Arc<Topology>>,
    ) -> watch::Receiver<Arc<Topology>> {
        let links = self.clone();
        let seen = move |all: &Topology| {
            let reached = all.drives.iter().map(|(id, drive)| {
                let at = all.map.drive(*id).map_or(here, |drive| drive.place.node);
                let far = Far { drive: drive.clone(), here, at, links: links.clone() };
                (*id, Arc::new(far) as Arc<dyn DriveService>)
            });
            Arc::new(Topology { drives: reached.collect(), ..all.clone() })
        };
        let (tell, told) = watch::channel(seen(&all.borrow_and_update().clone()));
        tokio::spawn(async move {
            while all.changed().await.is_ok() {
                let next = all.borrow_and_update().clone();
                tell.send_replace(seen(&next));
            }
        });
        told
    }
}

/// A drive behind the network.
struct Far {
    drive: Arc<dyn DriveService>,
    here: u32,
    at: u32,
    links: Arc<Links>,
}

impl DriveService for Far {
    fn put(&self, request: PutShard) -> BoxFuture<'_, Result<(), PutShardError>> {
        Box::pin(async move {
            self.links.carry(self.here, self.at, request.bytes.len()).await;
            self.drive.put(request).await
        })
    }

    fn get(&self, request: GetShard) -> BoxFuture<'_, Result<ShardBlocks, GetShardError>> {
        Box::pin(async move {
            let blocks = self.drive.get(request).await?;
            self.links.carry(self.at, self.here, blocks.bytes.len()).await;
            Ok(blocks)
        })
    }

    fn delete(&self, request: DeleteShards) -> BoxFuture<'_, Result<(), DriveFailed>> {
        self.drive.delete(request)
    }

    fn keep_positions(
        &self,
        positions: Vec<Position>,
        replace: bool,
    ) -> BoxFuture<'_, Result<(), DriveFailed>> {
        self.drive.keep_positions(positions, replace)
    }

    fn known_ledgers(&self) -> BoxFuture<'_, Result<Vec<KnownLedger>, DriveFailed>> {
        self.drive.known_ledgers()
    }

    fn list(
        &self,
        after: Option<ShardKey>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<ShardEntry>, DriveFailed>> {
        self.drive.list(after, limit)
    }

    fn scrub(&self, after: Option<ShardKey>, budget: u64) -> BoxFuture<'_, Result<ScrubStep, DriveFailed>> {
        self.drive.scrub(after, budget)
    }

    fn make_room(&self) -> BoxFuture<'_, Result<(), DriveFailed>> {
        self.drive.make_room()
    }

    fn health(&self) -> DriveHealth {
        self.drive.health()
    }

    fn stat(&self) -> DriveStat {
        self.drive.stat()
    }
}

/// A rebuild of a lost machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Rebuild {
    /// Bytes restored.
    pub bytes: u64,
    /// Simulated time.
    pub took: Duration,
    /// The time that was left when 25, 50 and 75 % were done: as it was forecast, and as it was.
    pub left: Vec<(Duration, Duration)>,
}

impl Rebuild {
    /// Bytes per second.
    pub fn rate(&self) -> f64 {
        self.bytes as f64 / self.took.as_secs_f64()
    }
}

/// Fills the drives of `machines` with content of profile r2, loses one, and rebuilds what it had: by all machines, or by one for all.
///
/// # Errors
/// What went wrong, as text. Must not be called on a runtime.
pub fn rebuild(machines: u32, by_all: bool, bytes_per_s: u64) -> Result<Rebuild, String> {
    let scenario = Scenario::quiet(machines, DRIVES, by_all, bytes_per_s);
    let world = World::new(scenario, false);
    node::format(&world)?;
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_time().start_paused(true).build().map_err(|error| error.to_string())?;
    runtime.block_on(async {
        world.clock.start(1);
        let node = Node::start(&world, 0).await?;
        fill(&node, u64::from(machines * DRIVES) * HELD_BYTES / 2)
            .await
            .map_err(|error| error.to_string())?;
        // The planner is at the first.
        let lost: Vec<DriveId> = ((machines - 1) * DRIVES..machines * DRIVES).map(DriveId).collect();
        node.give_up(&world, &lost).await;
        let asked = Instant::now();
        let wait_until = async |what: &dyn Fn() -> bool| {
            while !what() && asked.elapsed() < REBUILD_MAX {
                tokio::time::sleep(LOOK).await;
            }
            Instant::now()
        };
        // The planner looks every now and then.
        let began = wait_until(&|| node.repair_stat().rebuild_left_bytes > 0).await;
        let all = node.repair_stat().rebuild_left_bytes;
        let mut forecasts = Vec::new();
        for percent in [25, 50, 75] {
            let at = wait_until(&|| node.repair_stat().rebuilt_bytes * 100 >= all * percent).await;
            let stat = node.repair_stat();
            forecasts.push((stat.time_for(stat.rebuild_left_bytes), at));
        }
        let ended = wait_until(&|| node.is_rebuilt(&world)).await;
        if !node.is_rebuilt(&world) {
            return Err(format!("the rebuild does not end: {:?}", node.repair_stat()));
        }
        let took = ended - began;
        let left =
            forecasts.into_iter().map(|(forecast, at)| (forecast.unwrap_or_default(), ended - at)).collect();
        Ok(Rebuild { bytes: node.repair_stat().rebuilt_bytes, took, left })
    })
}

async fn fill(node: &Node, bytes: u64) -> Result<(), FsError> {
    let client = &node.clients[0];
    for number in 0..bytes / FILE_BYTES {
        let make = MakeNode {
            parent: Ino::ROOT,
            name: format!("file-{number}").into(),
            kind: FileKind::Regular,
            mode: 0o644,
            umask: 0,
            uid: 0,
            gid: 0,
            rdev: 0,
            target: Bytes::new(),
            open: OpenIntent::None,
        };
        let ino = client.make(make).await?.ino;
        let content = vec![number as u8; FILE_BYTES as usize];
        client.write(ino, 0, &content).await?;
        client.fsync(ino).await?;
    }
    Ok(())
}
