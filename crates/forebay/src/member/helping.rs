//! Executes what the owner of a ledger orders: restores shards on the drives of this node, and makes blobs of the object store. What
//! this node does so does not pass through the owner's machine.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use base::env::Env;
use base::units::MIB;
use base::{LedgerId, NodeId};
use client::{Client, RepairOutcome};
use futures_util::future::join_all;
use tokio::sync::{Mutex, Semaphore, watch};
use upkeep::Steady;
use wire::cluster::{RESTORE_MAX, RESTORE_SHARDS_MAX, RestoreOrder, UPLOAD_MAX, UploadOrder};
use wire::tier::TIER_EXTENTS_MAX;

use crate::node::MemoryPlan;
use crate::remote::{Memory, RemoteFilesystem, Routes, Wanted};

/// Orders to restore shards that are executed at a time, as many as one owner gives. Each holds k shards, usually of 1 MiB, for each
/// that it names.
const RESTORES: usize = 2;
/// How long reads wait for drives and owners that are not reached: others may have what they have.
const PATIENCE: Duration = Duration::from_secs(5);
/// A filesystem is closed after so much time without an order.
const IDLE_NS: u64 = 60_000_000_000;
/// How long the end of its session may take.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);
/// Pause between two looks whether uploads have ended.
const UPLOADS_LOOK: Duration = Duration::from_millis(10);
/// How long the return of numbers of blobs may take that were not made.
const RETURN_PATIENCE: Duration = Duration::from_secs(1);
/// What it may hold in memory: it writes no files.
const DIRTY_BYTES: u64 = MIB;

/// The filesystems for which orders are executed here.
pub(super) struct Helper {
    env: Env,
    memory: Memory,
    open: Mutex<BTreeMap<LedgerId, Open>>,
    restores: Semaphore,
    /// A permit for each MiB of blobs.
    blobs: Semaphore,
    blobs_mib: u32,
    stopping: watch::Sender<bool>,
}

struct Open {
    filesystem: RemoteFilesystem,
    used_ns: u64,
}

/// The filesystem that an order is about, and the ways to it.
struct Where {
    filesystem: String,
    ledger: LedgerId,
    routes: Arc<Routes>,
    owner: watch::Receiver<Option<NodeId>>,
}

impl Helper {
    pub(super) fn new(env: &Env, memory: &MemoryPlan) -> Self {
        let blobs_mib = u32::try_from(memory.blobs_bytes / MIB).unwrap_or(u32::MAX).max(1);
        Self {
            env: env.clone(),
            memory: Memory { dirty: DIRTY_BYTES, ..Memory::from(memory) },
            open: Mutex::default(),
            restores: Semaphore::new(RESTORES),
            blobs: Semaphore::new(blobs_mib as usize),
            blobs_mib,
            stopping: watch::Sender::new(false),
        }
    }

    /// Restores shards, or gives up in time: the one that ordered it waits no longer.
    pub(super) async fn restore(
        &self,
        order: RestoreOrder,
        routes: Arc<Routes>,
        owner: watch::Receiver<Option<NodeId>>,
    ) -> Result<Vec<RepairOutcome>> {
        let RestoreOrder { filesystem, ledger, map, shards } = order;
        if shards.len() > RESTORE_SHARDS_MAX {
            bail!("{} shards in an order; at most {RESTORE_SHARDS_MAX}", shards.len());
        }
        let restored = async {
            let _place = self.restores.acquire().await?;
            let client = self.client(Where { filesystem, ledger, routes, owner }).await?;
            client.has_map(map).await;
            let restored = shards.iter().map(|shard| client.repair_shard(shard));
            let outcomes = join_all(restored).await;
            // Reads note what they do not find.
            shards.iter().for_each(|shard| client.forget_damaged(shard));
            Ok(outcomes)
        };
        match tokio::time::timeout(RESTORE_MAX, restored).await {
            Ok(restored) => restored,
            Err(_) => bail!("the shards were not restored within {RESTORE_MAX:?}"),
        }
    }

    /// Puts extents into a blob, or gives up in time. Returns the bytes of extents in it.
    pub(super) async fn upload(
        &self,
        order: UploadOrder,
        routes: Arc<Routes>,
        owner: watch::Receiver<Option<NodeId>>,
    ) -> Result<u64> {
        let UploadOrder { filesystem, ledger, map, extents, blob_bytes, bytes_per_s } = order;
        if extents.len() > TIER_EXTENTS_MAX {
            bail!("{} extents in an order; at most {TIER_EXTENTS_MAX}", extents.len());
        }
        let longest = extents.iter().map(|due| due.extent.extent_len).max().unwrap_or_default();
        let mib = u64::from(blob_bytes.max(longest)).div_ceil(MIB);
        let made = async {
            // One that is larger than the memory for all is made alone.
            let _memory = self.blobs.acquire_many((mib as u32).min(self.blobs_mib)).await?;
            let client = self.client(Where { filesystem, ledger, routes, owner }).await?;
            client.has_map(map).await;
            Ok(client.upload(extents, blob_bytes, Steady::at(bytes_per_s)).await?)
        };
        let mut stopping = self.stopping.subscribe();
        tokio::select! {
            // A blob that is on its way when its session ends might come after its deletion.
            _ = stopping.wait_for(|stops| *stops) => bail!("this node stops"),
            made = tokio::time::timeout(UPLOAD_MAX, made) => match made {
                Ok(made) => made,
                Err(_) => bail!("the blob was not stored within {UPLOAD_MAX:?}"),
            },
        }
    }

    async fn client(&self, place: Where) -> Result<Client> {
        let mut open = self.open.lock().await;
        let now = self.env.clock.boot_ns();
        if let Some(known) = open.get_mut(&place.ledger) {
            known.used_ns = now;
            return Ok(known.filesystem.client.clone());
        }
        let Where { filesystem: name, ledger, routes, owner } = place;
        let wanted = Wanted { owner, name: name.clone(), memory: self.memory, patience: Some(PATIENCE) };
        let filesystem = RemoteFilesystem::open(&self.env, &routes, wanted).await?;
        let client = filesystem.client.clone();
        if client.ledger() != ledger {
            filesystem.close(CLOSE_PATIENCE).await;
            bail!("filesystem {name} has another ledger than {ledger}");
        }
        open.insert(ledger, Open { filesystem, used_ns: now });
        Ok(client)
    }

    /// Gives numbers of blobs back that were not made, and closes filesystems without orders.
    pub(super) async fn tidy(&self) {
        // One is being opened.
        let Ok(mut open) = self.open.try_lock() else { return };
        let now = self.env.clock.boot_ns();
        // What makes a blob is in use.
        let is_idle = |open: &Open| open.used_ns + IDLE_NS < now && !open.filesystem.client.is_uploading();
        let idle: Vec<Open> = open.extract_if(.., |_, open| is_idle(open)).map(|(_, idle)| idle).collect();
        let clients: Vec<Client> = open.values().map(|open| open.filesystem.client.clone()).collect();
        drop(open);
        let returned = join_all(clients.iter().map(Client::return_numbers));
        let _ = tokio::time::timeout(RETURN_PATIENCE, returned).await;
        close(idle).await;
    }

    async fn uploads_end(&self) {
        loop {
            let open = self.open.lock().await;
            if !open.values().any(|open| open.filesystem.client.is_uploading()) {
                return;
            }
            drop(open);
            tokio::time::sleep(UPLOADS_LOOK).await;
        }
    }

    /// Closes all.
    pub(super) async fn stop(&self) {
        // Nothing begins any more.
        self.restores.close();
        self.blobs.close();
        self.stopping.send_replace(true);
        let _ = tokio::time::timeout(CLOSE_PATIENCE, self.uploads_end()).await;
        // One may be being opened.
        if let Ok(mut open) = tokio::time::timeout(CLOSE_PATIENCE, self.open.lock()).await {
            let open = std::mem::take(&mut *open);
            close(open.into_values()).await;
        }
    }
}

async fn close(open: impl IntoIterator<Item = Open>) {
    join_all(open.into_iter().map(|open| open.filesystem.close(CLOSE_PATIENCE))).await;
}
