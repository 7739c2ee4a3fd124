//! Other nodes that restore shards on their drives, as the owner of a ledger orders.

use std::sync::Arc;

use base::{Epoch, LedgerId, NodeId};
use client::{OwedEntry, RepairOutcome};
use control::FilesystemRecord;
use upkeep::OtherNodes;
use wire::BoxFuture;
use wire::cluster::{HostReply, HostRequest, HostService, RestoreOrder};
use wire::link::RemoteHost;

use super::Network;

/// For one filesystem.
pub(super) struct Restorers {
    network: Arc<Network>,
    filesystem: String,
    ledger: LedgerId,
}

impl Restorers {
    pub(super) fn of(network: &Arc<Network>, record: &FilesystemRecord) -> Arc<dyn OtherNodes> {
        let FilesystemRecord { name, ledger, .. } = record;
        Arc::new(Self { network: network.clone(), filesystem: name.clone(), ledger: *ledger })
    }
}

impl OtherNodes for Restorers {
    fn here(&self) -> NodeId {
        self.network.here()
    }

    fn restore(
        &self,
        node: NodeId,
        map: Epoch,
        shards: Vec<OwedEntry>,
    ) -> BoxFuture<'_, Option<Vec<RepairOutcome>>> {
        Box::pin(async move {
            let peer = self.network.fabric.peer(node)?;
            if !peer.contact().borrow().is_there {
                return None;
            }
            let order =
                RestoreOrder { filesystem: self.filesystem.clone(), ledger: self.ledger, map, shards };
            match RemoteHost::new(&peer).ask(HostRequest::Restore(order)).await {
                Ok(HostReply::Restored(outcomes)) => Some(outcomes),
                Ok(_) => None,
                Err(error) => {
                    tracing::info!(%node, %error, "a node does not restore shards: this one does");
                    None
                }
            }
        })
    }
}
