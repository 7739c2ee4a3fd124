//! The services by which nodes build a cluster, at another node.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Peer;
use super::peer::CallError;
use crate::BoxFuture;
use crate::cluster::{
    CHECK_MAX, ClusterReply, ClusterRequest, ClusterService, Declined, HostReply, HostRequest, HostService,
    JoinReply, JoinRequest, RECORDS_WAIT_MAX, RESTORE_MAX, TRY_LOG_MAX, UPLOAD_MAX,
};
use crate::encoding::Operations;
use crate::message::{CLUSTER, HOST, JOIN, Payload};

/// How much longer than the wait for news a call waits for its answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How much longer an owner waits for the answer to an order: to restore shards, while it deletes nothing, or to make a blob.
const ORDER_WAY: Duration = Duration::from_secs(2);
/// How long an operator's request may take, and the formatting of a drive.
const WORK: Duration = Duration::from_secs(150);

async fn ask<T: Serialize + Payload, R: DeserializeOwned + Payload>(
    peer: &Peer,
    operations: &Operations,
    request: &T,
    limit: Duration,
) -> Result<R, Declined> {
    let answer: Result<Result<R, Declined>, CallError> = peer.ask_process(operations, request, limit).await;
    answer.unwrap_or_else(|error| Err(Declined(format!("the node that was asked: {error}"))))
}

/// Asks the node at a peer, which knows nothing of this process, to let it join.
///
/// # Errors
/// If it declines, or does not answer in time.
pub async fn join(peer: &Peer, request: &JoinRequest) -> Result<JoinReply, Declined> {
    ask(peer, &JOIN, request, RECORDS_WAIT_MAX).await
}

/// The owner of the control ledger at a peer.
pub struct RemoteCluster {
    peer: Arc<Peer>,
}

impl RemoteCluster {
    /// That of a peer.
    pub fn new(peer: &Arc<Peer>) -> Self {
        Self { peer: peer.clone() }
    }
}

impl ClusterService for RemoteCluster {
    fn ask(&self, request: ClusterRequest) -> BoxFuture<'_, Result<ClusterReply, Declined>> {
        Box::pin(async move {
            let limit = match &request {
                ClusterRequest::Records { .. } => RECORDS_WAIT_MAX + PATIENCE,
                ClusterRequest::Manage { .. } => WORK,
                ClusterRequest::Renew { .. }
                | ClusterRequest::IsOwner
                | ClusterRequest::Owns { .. }
                | ClusterRequest::Probe { .. } => PATIENCE,
            };
            ask(&self.peer, &CLUSTER, &request, limit).await
        })
    }
}

/// The drives of a peer.
pub struct RemoteHost {
    peer: Arc<Peer>,
}

impl RemoteHost {
    /// Those of a peer.
    pub fn new(peer: &Arc<Peer>) -> Self {
        Self { peer: peer.clone() }
    }
}

impl HostService for RemoteHost {
    fn ask(&self, request: HostRequest) -> BoxFuture<'_, Result<HostReply, Declined>> {
        Box::pin(async move {
            let limit = match &request {
                HostRequest::Drives | HostRequest::Engine | HostRequest::Stored | HostRequest::Condition => {
                    PATIENCE
                }
                HostRequest::StartEngine(_) | HostRequest::EndEngine { .. } => 2 * PATIENCE,
                HostRequest::TryLog { .. } => TRY_LOG_MAX + PATIENCE,
                HostRequest::Check { .. } => CHECK_MAX + PATIENCE,
                HostRequest::Restore(_) => RESTORE_MAX + ORDER_WAY,
                HostRequest::Upload(_) => UPLOAD_MAX + ORDER_WAY,
                HostRequest::Format { .. }
                | HostRequest::Reopen { .. }
                | HostRequest::Close { .. }
                | HostRequest::Locate { .. } => WORK,
            };
            ask(&self.peer, &HOST, &request, limit).await
        })
    }
}
