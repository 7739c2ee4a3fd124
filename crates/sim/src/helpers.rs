//! Other nodes that restore shards: here, other clients. Orders and answers are lost at times.

use std::sync::Arc;
use std::time::Duration;

use base::{Epoch, NodeId};
use client::{Client, OwedEntry, RepairOutcome};
use futures_util::future::join_all;
use upkeep::OtherNodes;
use wire::BoxFuture;
use wire::cluster::RESTORE_MAX;

use crate::net::delay;
use crate::world::{Dice, World};

/// How much longer than the work an answer is waited for.
const WAY: Duration = Duration::from_secs(2);

/// The clients, of which the first plans.
pub(crate) struct Helpers {
    world: Arc<World>,
    clients: Vec<Client>,
    dice: Dice,
}

impl Helpers {
    pub(crate) fn new(world: &Arc<World>, boot: u64, clients: &[Client]) -> Arc<Self> {
        let dice = world.dice(0x4e_1be5 + (boot << 32));
        Arc::new(Self { world: world.clone(), clients: clients.to_vec(), dice })
    }

    async fn execute(&self, name: u32, map: Epoch, shards: &[OwedEntry]) -> Vec<RepairOutcome> {
        let client = &self.clients[name as usize];
        tokio::time::sleep(delay(&self.dice)).await;
        // Where the network is measured, it loses nothing.
        let loses = self.world.scenario.link_bytes_per_s.is_none();
        if loses && self.dice.once_in(20) || self.world.promises().dead_clients.contains(&name) {
            // The order is lost.
            return std::future::pending().await;
        }
        client.has_map(map).await;
        let outcomes = join_all(shards.iter().map(|shard| client.repair_shard(shard))).await;
        shards.iter().for_each(|shard| client.forget_damaged(shard));
        self.world.trace.event(format_args!("client {name} restores {shards:?} {outcomes:?}"));
        if loses && self.dice.once_in(20) {
            // The answer is lost.
            return std::future::pending().await;
        }
        tokio::time::sleep(delay(&self.dice)).await;
        outcomes
    }
}

impl OtherNodes for Helpers {
    fn here(&self) -> NodeId {
        NodeId(0)
    }

    fn restore(
        &self,
        node: NodeId,
        map: Epoch,
        shards: Vec<OwedEntry>,
    ) -> BoxFuture<'_, Option<Vec<RepairOutcome>>> {
        Box::pin(async move {
            let name = node.0 % self.clients.len() as u32;
            if name == 0 {
                return None;
            }
            let restored = async {
                // The work ends in time, its answer may not come.
                tokio::time::timeout(RESTORE_MAX, self.execute(name, map, &shards)).await.ok()
            };
            tokio::time::timeout(RESTORE_MAX + WAY, restored).await.ok().flatten()
        })
    }
}
