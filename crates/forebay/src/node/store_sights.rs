//! Whether object stores answer the other nodes, as these tell it: a store is down only if it answers none.

use std::sync::Weak;
use std::time::Duration;

use tokio::sync::watch;

use super::Node;
use super::filesystems::FilesystemEntry;

/// Pause between questions to the other nodes.
const ASK_EVERY: Duration = Duration::from_secs(3);

/// Asks the other nodes until this one stops.
pub(super) async fn run(node: Weak<Node>, mut stopped: watch::Receiver<bool>) {
    loop {
        let _ = tokio::time::timeout(ASK_EVERY, stopped.wait_for(|stop| *stop)).await;
        let Some(node) = node.upgrade().filter(|_| !*stopped.borrow()) else { return };
        node.hear_of_stores().await;
    }
}

impl Node {
    async fn hear_of_stores(&self) {
        let is_used = |entry: &FilesystemEntry| entry.record.tier.is_some();
        let has_others = !self.others.network.reached().is_empty();
        if !self.state.lock().await.filesystems.values().any(is_used) {
            return;
        }
        let mut told = if has_others { self.conditions().await } else { Default::default() };
        told.remove(&self.here());
        for entry in self.state.lock().await.filesystems.values_mut() {
            let Some(tier) = entry.record.tier else { continue };
            let seen = told.values().flat_map(|told| &told.condition.stores);
            let seen = seen.filter(|(store, _)| *store == tier.store).map(|(_, seen)| seen.clone());
            let seen = seen.collect();
            entry.tier.note_seen(seen);
        }
    }
}
