//! Restores shards on the drives of this node, as the owner of a ledger orders. What one reconstructs at the drive that gets it
//! does not pass through the owner's machine.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use base::env::Env;
use base::{LedgerId, NodeId};
use client::{Client, RepairOutcome};
use futures_util::future::join_all;
use tokio::sync::{Mutex, Semaphore, watch};
use wire::cluster::{RESTORE_MAX, RESTORE_SHARDS_MAX, RestoreOrder};

use crate::node::MemoryPlan;
use crate::remote::{Memory, RemoteFilesystem, Routes, Wanted};

/// Orders that are executed at a time, as many as one owner gives. Each holds k shards, usually of 1 MiB, for each that it names.
const PARALLEL: usize = 2;
/// How long reads wait for drives and owners that are not reached: others may have what they have.
const PATIENCE: Duration = Duration::from_secs(5);
/// A filesystem is closed after so much time without an order.
const IDLE_NS: u64 = 60_000_000_000;
/// How long the end of its session may take.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);
/// What it may hold in memory: it writes no files.
const DIRTY_BYTES: u64 = 1 << 20;

/// The filesystems whose shards are restored here.
pub(super) struct Restorer {
    env: Env,
    memory: Memory,
    open: Mutex<BTreeMap<LedgerId, Open>>,
    places: Semaphore,
}

struct Open {
    filesystem: RemoteFilesystem,
    used_ns: u64,
}

impl Restorer {
    pub(super) fn new(env: &Env, memory: &MemoryPlan) -> Self {
        let memory = Memory { dirty: DIRTY_BYTES, ..Memory::from(memory) };
        let places = Semaphore::new(PARALLEL);
        Self { env: env.clone(), memory, open: Mutex::default(), places }
    }

    /// Executes an order, or gives it up in time: the one that ordered it waits no longer.
    pub(super) async fn restore(
        &self,
        order: RestoreOrder,
        routes: impl FnOnce() -> Arc<Routes>,
        owner: watch::Receiver<Option<NodeId>>,
    ) -> Result<Vec<RepairOutcome>> {
        if order.shards.len() > RESTORE_SHARDS_MAX {
            bail!("{} shards in an order; at most {RESTORE_SHARDS_MAX}", order.shards.len());
        }
        let restored = async {
            let _place = self.places.acquire().await?;
            let client = self.client(&order, routes, owner).await?;
            client.has_map(order.map).await;
            let restored = order.shards.iter().map(|shard| client.repair_shard(shard));
            let outcomes = join_all(restored).await;
            // Reads note what they do not find.
            order.shards.iter().for_each(|shard| client.forget_damaged(shard));
            Ok(outcomes)
        };
        match tokio::time::timeout(RESTORE_MAX, restored).await {
            Ok(restored) => restored,
            Err(_) => bail!("the shards were not restored within {RESTORE_MAX:?}"),
        }
    }

    async fn client(
        &self,
        order: &RestoreOrder,
        routes: impl FnOnce() -> Arc<Routes>,
        owner: watch::Receiver<Option<NodeId>>,
    ) -> Result<Client> {
        let mut open = self.open.lock().await;
        let now = self.env.clock.boot_ns();
        if let Some(known) = open.get_mut(&order.ledger) {
            known.used_ns = now;
            return Ok(known.filesystem.client.clone());
        }
        let wanted =
            Wanted { owner, name: order.filesystem.clone(), memory: self.memory, patience: Some(PATIENCE) };
        let filesystem = RemoteFilesystem::open(&self.env, &routes(), wanted).await?;
        let client = filesystem.client.clone();
        if client.ledger() != order.ledger {
            filesystem.close(CLOSE_PATIENCE).await;
            bail!("filesystem {} has another ledger than {}", order.filesystem, order.ledger);
        }
        open.insert(order.ledger, Open { filesystem, used_ns: now });
        Ok(client)
    }

    /// Closes filesystems without orders.
    pub(super) async fn end_idle(&self) {
        // It is being opened.
        let Ok(mut open) = self.open.try_lock() else { return };
        let now = self.env.clock.boot_ns();
        let idle: Vec<Open> =
            open.extract_if(.., |_, open| open.used_ns + IDLE_NS < now).map(|(_, idle)| idle).collect();
        drop(open);
        close(idle).await;
    }

    /// Closes all.
    pub(super) async fn stop(&self) {
        // Nothing begins any more.
        self.places.close();
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
