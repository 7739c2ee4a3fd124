//! A drive as its clients see it: behind a network, slow at times, dead at times. Checks that it returns what was
//! stored.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use base::DriveId;
use drive::Drive;
use wire::BoxFuture;
use wire::drive::{
    DeleteShards, DriveFailed, DriveHealth, DriveService, DriveStat, GetPurpose, GetShard, GetShardError,
    PutShard, PutShardError, ScrubStep, ShardBlocks, ShardEntry, ShardKey,
};
use wire::message::{DRIVE, DriveReply, DriveRequest};
use wire::position::{KnownLedger, Position};

use crate::net::{answered, arrived, delay};
use crate::reads::RunningRead;
use crate::world::{Dice, World};

/// Longest delay of a slow read.
const DAWDLE_MS: u64 = 4000;

/// A drive behind the simulated network; see the module.
#[derive(Clone)]
pub(crate) struct SimDrive {
    world: Arc<World>,
    id: DriveId,
    inner: Arc<Drive>,
    dice: Arc<Dice>,
    /// Random delays of reads.
    reads: Arc<Dice>,
    dead: Arc<AtomicBool>,
    slow_ms: Arc<AtomicU64>,
}

impl SimDrive {
    pub(crate) fn new(world: &Arc<World>, boot: u64, id: DriveId, inner: Arc<Drive>) -> Self {
        let dice = world.dice(0xd_0000 + (boot << 32) + u64::from(id.0));
        let reads = world.dice(0xda_0000 + (boot << 32) + u64::from(id.0));
        Self {
            world: world.clone(),
            id,
            inner,
            dice: Arc::new(dice),
            reads: Arc::new(reads),
            dead: Arc::default(),
            slow_ms: Arc::default(),
        }
    }

    /// Makes the drive unreachable, or reachable again.
    pub(crate) fn set_dead(&self, dead: bool) {
        self.world.trace.event(format_args!("drive {} dead={dead}", self.id));
        self.dead.store(dead, Ordering::Relaxed);
    }

    /// Adds this delay to every request.
    pub(crate) fn set_slow(&self, slow_ms: u64) {
        self.world.trace.event(format_args!("drive {} slow={slow_ms}ms", self.id));
        self.slow_ms.store(slow_ms, Ordering::Relaxed);
    }

    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    async fn travel(&self) {
        let slow = Duration::from_millis(self.slow_ms.load(Ordering::Relaxed));
        tokio::time::sleep(delay(&self.dice) + slow).await;
    }

    /// Delays some reads. In that time their extent is dropped, sessions report it, and reclamation runs.
    async fn dawdle(&self) {
        if self.world.scenario.dawdles && self.reads.once_in(3) {
            tokio::time::sleep(Duration::from_millis(self.reads.below(DAWDLE_MS))).await;
        }
    }

    /// Carries a request to the drive and the answer back, as bytes. The drive may die in between.
    async fn ask(&self, request: DriveRequest) -> Result<DriveReply, DriveFailed> {
        self.travel().await;
        if self.is_dead() {
            return Err(DriveFailed { drive: self.id });
        }
        let answer = arrived(&DRIVE, &request).execute(&*self.inner).await;
        self.travel().await;
        if self.is_dead() { Err(DriveFailed { drive: self.id }) } else { Ok(answered(answer)) }
    }

    /// I7: a shard is written once, with the same bytes in every attempt.
    fn note_put(&self, request: &PutShard) {
        let mut promises = self.world.promises();
        if self.id.0 == self.world.scenario.victim() {
            promises.victims_shards.insert((request.key.extent, request.key.shard));
        }
        let known = promises.shards.entry(request.key).or_insert_with(|| request.checksums.clone());
        if *known != request.checksums {
            promises.violate(format!("I7: shard {:?} is written with other bytes", request.key));
        }
    }

    /// I7: a read returns the bytes that were written.
    fn check_get(&self, request: &GetShard, blocks: &ShardBlocks) {
        let mut promises = self.world.promises();
        let range = request.first_block as usize..(request.first_block + request.blocks) as usize;
        let expected = promises.shards.get(&request.key).and_then(|sums| sums.get(range));
        if expected != Some(blocks.checksums.as_slice()) {
            let drive = self.id;
            promises.violate(format!("I7: drive {drive} returned other blocks for {request:?}"));
        }
    }
}

macro_rules! answer {
    ($drive:expr, $request:expr, $kind:ident) => {
        match $drive.ask($request).await? {
            DriveReply::$kind(result) => result,
            other => unreachable!("the answer is of the kind of the request: {other:?}"),
        }
    };
}

impl DriveService for SimDrive {
    fn put(&self, request: PutShard) -> BoxFuture<'_, Result<(), PutShardError>> {
        Box::pin(async move {
            let (drive, key) = (self.id, request.key);
            self.note_put(&request);
            self.world.trace.event(format_args!("drive {drive} put {key:?} {}", request.bytes.len()));
            let result = match self.ask(DriveRequest::Put(request)).await {
                Ok(DriveReply::Put(result)) => result,
                _ => Err(PutShardError::Failed { drive }),
            };
            self.world.trace.event(format_args!("drive {drive} put {key:?} {result:?}"));
            result
        })
    }

    fn get(&self, request: GetShard) -> BoxFuture<'_, Result<ShardBlocks, GetShardError>> {
        Box::pin(async move {
            let drive = self.id;
            let for_user = request.purpose == GetPurpose::Read;
            let _running = for_user.then(|| RunningRead::begin(&self.world, request.key.extent));
            if for_user {
                self.dawdle().await;
            }
            let result = match self.ask(DriveRequest::Get(request)).await {
                Ok(DriveReply::Get(result)) => result,
                _ => Err(GetShardError::Failed { drive }),
            };
            let shown = result.as_ref().map(|blocks| blocks.checksums.len());
            self.world.trace.event(format_args!("drive {drive} get {request:?} {shown:?}"));
            if let Ok(blocks) = &result {
                self.check_get(&request, blocks);
            }
            result
        })
    }

    fn delete(&self, request: DeleteShards) -> BoxFuture<'_, Result<(), DriveFailed>> {
        Box::pin(async move {
            let drive = self.id;
            self.world.trace.event(format_args!("drive {drive} delete {:?}", request.keys));
            // The request arrives, even if its sender waits no longer.
            let this = self.clone();
            let sent = tokio::spawn(async move { answer!(this, DriveRequest::Delete(request), Delete) });
            let result = sent.await.unwrap_or(Err(DriveFailed { drive }));
            self.world.trace.event(format_args!("drive {drive} delete {result:?}"));
            result
        })
    }

    fn keep_positions(
        &self,
        positions: Vec<Position>,
        replace: bool,
    ) -> BoxFuture<'_, Result<(), DriveFailed>> {
        Box::pin(
            async move { answer!(self, DriveRequest::KeepPositions { positions, replace }, KeepPositions) },
        )
    }

    fn known_ledgers(&self) -> BoxFuture<'_, Result<Vec<KnownLedger>, DriveFailed>> {
        Box::pin(async move { answer!(self, DriveRequest::KnownLedgers, KnownLedgers) })
    }

    fn list(
        &self,
        after: Option<ShardKey>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<ShardEntry>, DriveFailed>> {
        let limit = limit as u32;
        Box::pin(async move { answer!(self, DriveRequest::List { after, limit }, List) })
    }

    fn scrub(
        &self,
        after: Option<ShardKey>,
        budget_bytes: u64,
    ) -> BoxFuture<'_, Result<ScrubStep, DriveFailed>> {
        Box::pin(async move { answer!(self, DriveRequest::Scrub { after, budget_bytes }, Scrub) })
    }

    fn make_room(&self) -> BoxFuture<'_, Result<(), DriveFailed>> {
        Box::pin(async move { answer!(self, DriveRequest::MakeRoom, MakeRoom) })
    }

    fn health(&self) -> DriveHealth {
        if self.is_dead() { DriveHealth::Failed } else { self.inner.health() }
    }

    fn stat(&self) -> DriveStat {
        let stat = self.inner.stat();
        if self.is_dead() { DriveStat { health: DriveHealth::Failed, ..stat } } else { stat }
    }
}
