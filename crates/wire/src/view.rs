//! What a client in another process must know to use a filesystem: its ledger, its drives and groups, and its object store.

use base::{ClusterId, DriveId, Epoch, FsError, LedgerId, NodeId, PgId};
use bytes::Bytes;
use layout::{ClusterMap, Profile};
use serde::{Deserialize, Serialize};

use crate::BoxFuture;
use crate::cluster::NodeAddresses;

/// The longest that a question waits for news.
pub const NEWS_WAIT_MAX: std::time::Duration = std::time::Duration::from_secs(30);

/// A question. A repetition does no harm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ViewRequest {
    /// A filesystem as it is now, once that is news. Answer: `Filesystem`, or `Same` if nothing changed in the time.
    Filesystem {
        /// Its name.
        name: String,
        /// The number of the view that the client has; 0: none.
        known: u64,
        /// How long to wait for news; at most [`NEWS_WAIT_MAX`].
        wait_ms: u32,
    },
    /// The node that owns the ledgers, once it is not the one of `known`. Answer: `Owner`, or `Same` if nothing changed in the time.
    Owner {
        /// The epoch of the owner that the client knows; 0: none.
        known: Epoch,
        /// How long to wait for news; at most [`NEWS_WAIT_MAX`].
        wait_ms: u32,
    },
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ViewReply {
    /// The client has the newest view.
    Same,
    /// The newest view.
    Filesystem(Box<FilesystemView>),
    /// The node that owns the ledgers, and its epoch, which grows with each owner.
    Owner(NodeId, Epoch),
}

/// A filesystem, and what its clients use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemView {
    /// Changes with the view. Never 0.
    pub number: u64,
    /// The cluster: part of the names of blobs.
    pub cluster: ClusterId,
    /// The number of the filesystem.
    pub id: u32,
    /// Its ledger.
    pub ledger: LedgerId,
    /// Its profile.
    pub profile: Profile,
    /// Drives and placement groups.
    pub map: ClusterMap,
    /// The drives that answer here.
    pub drives: Vec<DriveId>,
    /// The groups of new extents.
    pub groups: Vec<PgId>,
    /// How new extents are protected.
    pub write_profile: Profile,
    /// Groups whose extents are narrower than the profile.
    pub narrow: Vec<PgId>,
    /// The most bytes of content, on all tiers; `None`: no limit but the drives'.
    pub provisioned_bytes: Option<u64>,
    /// The most bytes on drives.
    pub ssd_bytes: Option<u64>,
    /// How to reach the object store: the record of the store as JSON; empty: there is none.
    pub store: Bytes,
    /// The node that owns the ledger.
    pub owner: NodeId,
    /// The nodes, with their addresses.
    pub nodes: Vec<NodeAddresses>,
    /// Drives that may come back: their machines are not reached.
    pub away: Vec<DriveId>,
}

/// Tells clients of filesystems.
pub trait ViewService: Send + Sync {
    /// Answers a question.
    ///
    /// # Errors
    /// `NotFound` if there is no filesystem of that name.
    fn ask(&self, request: ViewRequest) -> BoxFuture<'_, Result<ViewReply, FsError>>;
}
