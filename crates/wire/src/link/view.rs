//! The filesystems of another process.

use std::sync::Arc;
use std::time::Duration;

use base::FsError;

use super::Peer;
use super::owner::as_fs_error;
use crate::BoxFuture;
use crate::message::VIEW;
use crate::view::{NEWS_WAIT_MAX, ViewReply, ViewRequest, ViewService};

/// How much longer than the wait for news a call waits for its answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a peer tells of its filesystems.
pub struct RemoteViews {
    peer: Arc<Peer>,
}

impl RemoteViews {
    /// Those of a peer.
    pub fn new(peer: &Arc<Peer>) -> Self {
        Self { peer: peer.clone() }
    }
}

impl ViewService for RemoteViews {
    fn ask(&self, request: ViewRequest) -> BoxFuture<'_, Result<ViewReply, FsError>> {
        Box::pin(async move {
            let asked = self.peer.ask_process(&VIEW, &request, NEWS_WAIT_MAX + PATIENCE);
            asked.await.map_err(as_fs_error)?
        })
    }
}
