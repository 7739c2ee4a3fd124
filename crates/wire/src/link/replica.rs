//! An owner in another process, as a standby sees it.

use std::sync::Arc;
use std::time::Duration;

use base::{FsError, LedgerId};

use super::Peer;
use super::owner::as_fs_error;
use crate::BoxFuture;
use crate::message::{Envelope, REPLICA};
use crate::replica::{ReplicaReply, ReplicaRequest, ReplicaService};

/// How long a call waits for its answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The owner of a ledger at a peer.
pub struct RemoteReplica {
    peer: Arc<Peer>,
    ledger: LedgerId,
}

impl RemoteReplica {
    /// The owner of this ledger at a peer.
    pub fn new(peer: &Arc<Peer>, ledger: LedgerId) -> Self {
        Self { peer: peer.clone(), ledger }
    }
}

impl ReplicaService for RemoteReplica {
    fn ask(&self, request: ReplicaRequest) -> BoxFuture<'_, Result<ReplicaReply, FsError>> {
        Box::pin(async move {
            let envelope = Envelope { deadline_ms: PATIENCE.as_millis() as u32, ..Envelope::default() };
            let asked = self.peer.ask_owner(&REPLICA, self.ledger, &envelope, &request);
            let (_, reply): (_, Result<ReplicaReply, FsError>) = asked.await.map_err(as_fs_error)?;
            reply
        })
    }
}
