//! Other nodes that restore shards and make blobs: here, other clients. Orders and answers are lost at times.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use base::{Epoch, NodeId};
use client::{Client, OwedEntry, RepairOutcome};
use futures_util::future::join_all;
use upkeep::{BlobLoad, OtherNodes, Steady};
use wire::BoxFuture;
use wire::cluster::RESTORE_MAX;

use crate::net::delay;
use crate::world::{Dice, World};

/// How much longer than the work an answer is waited for.
const WAY: Duration = Duration::from_secs(2);
/// The time after which a node counts as away that makes a blob.
const AWAY: Duration = Duration::from_secs(15);

/// The clients, of which the first plans.
pub(crate) struct Helpers {
    world: Arc<World>,
    clients: Vec<Client>,
    dice: Dice,
}

impl Helpers {
    /// Those of a scenario, if it has some.
    pub(crate) fn of(world: &Arc<World>, boot: u64, clients: &[Client]) -> Option<Arc<dyn OtherNodes>> {
        let dice = world.dice(0x4e_1be5 + (boot << 32));
        let helpers = || Self { world: world.clone(), clients: clients.to_vec(), dice };
        world.scenario.helps.then(|| Arc::new(helpers()) as Arc<dyn OtherNodes>)
    }

    /// The client at a node; `None`: it is that of the planner.
    fn client(&self, node: NodeId) -> Option<u32> {
        Some(node.0 % self.clients.len() as u32).filter(|name| *name != 0)
    }

    /// Sends an order, has it executed, and brings the answer. Each may be lost on its way.
    async fn order<T>(&self, name: u32, work: impl Future<Output = T>) -> T {
        tokio::time::sleep(delay(&self.dice)).await;
        // Where the network is measured, it loses nothing.
        let loses = self.world.scenario.link_bytes_per_s.is_none();
        if loses && self.dice.once_in(20) || self.world.promises().dead_clients.contains(&name) {
            return std::future::pending().await;
        }
        let done = work.await;
        if loses && self.dice.once_in(20) {
            return std::future::pending().await;
        }
        tokio::time::sleep(delay(&self.dice)).await;
        done
    }

    async fn restore_at(&self, name: u32, map: Epoch, shards: &[OwedEntry]) -> Vec<RepairOutcome> {
        let client = &self.clients[name as usize];
        client.has_map(map).await;
        let outcomes = join_all(shards.iter().map(|shard| client.repair_shard(shard))).await;
        shards.iter().for_each(|shard| client.forget_damaged(shard));
        self.world.trace.event(format_args!("client {name} restores {shards:?} {outcomes:?}"));
        outcomes
    }

    async fn upload_at(&self, name: u32, load: BlobLoad) -> Result<u64, String> {
        let client = &self.clients[name as usize];
        client.has_map(load.map).await;
        let pace = Steady::at(load.bytes_per_s);
        let made = client.upload(load.extents, load.blob_bytes, pace).await;
        self.world.trace.event(format_args!("client {name} made a blob: {made:?}"));
        made.map_err(|error| error.to_string())
    }
}

impl OtherNodes for Helpers {
    fn here(&self) -> NodeId {
        NodeId(0)
    }

    fn reached(&self) -> Vec<NodeId> {
        (1..self.clients.len() as u32).map(NodeId).collect()
    }

    fn blind(&self) -> BTreeSet<NodeId> {
        BTreeSet::new()
    }

    fn restore(
        &self,
        node: NodeId,
        map: Epoch,
        shards: Vec<OwedEntry>,
    ) -> BoxFuture<'_, Option<Vec<RepairOutcome>>> {
        Box::pin(async move {
            let name = self.client(node)?;
            let restored = async {
                // The work ends in time, its answer may not come.
                let work = tokio::time::timeout(RESTORE_MAX, self.restore_at(name, map, &shards));
                self.order(name, work).await.ok()
            };
            tokio::time::timeout(RESTORE_MAX + WAY, restored).await.ok().flatten()
        })
    }

    fn upload(&self, node: NodeId, load: BlobLoad) -> BoxFuture<'_, Result<u64, String>> {
        Box::pin(async move {
            let name = self.client(node).ok_or("it is the same")?;
            let made = tokio::time::timeout(AWAY, self.order(name, self.upload_at(name, load))).await;
            made.unwrap_or_else(|_| Err("it does not answer".to_owned()))
        })
    }
}
