//! Other nodes that restore shards and make blobs, as the owner of a ledger orders.

use std::collections::BTreeSet;
use std::sync::Arc;

use base::{Epoch, LedgerId, NodeId};
use client::{OwedEntry, RepairOutcome};
use control::FilesystemRecord;
use tokio::sync::watch;
use upkeep::{BlobLoad, OtherNodes};
use wire::BoxFuture;
use wire::cluster::{HostReply, HostRequest, HostService, RestoreOrder, UploadOrder};
use wire::link::RemoteHost;

use super::{Network, SILENCE_PATIENCE};

/// For one filesystem.
pub(super) struct Helpers {
    network: Arc<Network>,
    filesystem: String,
    ledger: LedgerId,
    blind: watch::Receiver<BTreeSet<NodeId>>,
}

impl Helpers {
    /// `blind`: the nodes that the object store does not answer.
    pub(super) fn of(
        network: &Arc<Network>,
        record: &FilesystemRecord,
        blind: watch::Receiver<BTreeSet<NodeId>>,
    ) -> Arc<dyn OtherNodes> {
        let FilesystemRecord { name, ledger, .. } = record;
        Arc::new(Self { network: network.clone(), filesystem: name.clone(), ledger: *ledger, blind })
    }
}

impl OtherNodes for Helpers {
    fn here(&self) -> NodeId {
        self.network.here()
    }

    fn reached(&self) -> Vec<NodeId> {
        self.network.reached()
    }

    /// Witnesses make no blobs either.
    fn blind(&self) -> BTreeSet<NodeId> {
        self.blind.borrow().union(&self.network.witnesses()).copied().collect()
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

    fn upload(&self, node: NodeId, load: BlobLoad) -> BoxFuture<'_, Result<u64, String>> {
        Box::pin(async move {
            let peer = self.network.fabric.peer(node).ok_or("it is not in the cluster any more")?;
            let BlobLoad { map, extents, blob_bytes, bytes_per_s } = load;
            let (filesystem, ledger) = (self.filesystem.clone(), self.ledger);
            let order = UploadOrder { filesystem, ledger, map, extents, blob_bytes, bytes_per_s };
            let host = RemoteHost::new(&peer);
            let answer = tokio::select! {
                answer = host.ask(HostRequest::Upload(order)) => answer,
                () = peer.is_away(SILENCE_PATIENCE) => return Err("it is not reached".to_owned()),
            };
            match answer {
                Ok(HostReply::Uploaded { bytes }) => Ok(bytes),
                Ok(_) => Err("it gave another answer".to_owned()),
                Err(error) => Err(error.to_string()),
            }
        })
    }
}
