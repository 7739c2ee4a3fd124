//! What a client in another process must know to use a filesystem: its ledger, its drives and groups, and its object store.

use std::collections::BTreeSet;

use base::{ClusterId, DriveId, Epoch, FsError, Ino, LedgerId, NodeId, PgId};
use bytes::Bytes;
use layout::{ClusterMap, Place, Profile};
use serde::{Deserialize, Serialize};

use crate::BoxFuture;
use crate::cluster::NodeAddresses;
use crate::store::StoreError;

/// The longest that a question waits for news.
pub const NEWS_WAIT_MAX: std::time::Duration = std::time::Duration::from_secs(30);

/// The most bytes of a blob in one answer.
pub const BLOB_PART_MAX: u32 = 1 << 20;

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
    /// Bytes of a blob of a filesystem, for a client that has no keys of the object store. Answer: `Blob`.
    Blob {
        /// The name of the filesystem.
        filesystem: String,
        /// The number of the blob.
        serial: u64,
        /// The epoch of the owner that wrote it.
        term: Epoch,
        /// The first byte.
        off: u64,
        /// Their number; not 0, and at most [`BLOB_PART_MAX`].
        len: u32,
    },
    /// A client has read bytes of a file that only the object store has: they may come back to drives. Answer: `Same`.
    Reads {
        /// The name of the filesystem.
        filesystem: String,
        /// The file.
        ino: Ino,
        /// The first byte.
        off: u64,
        /// Their number.
        len: u64,
    },
}

impl ViewRequest {
    /// The filesystem that it is about; `None`: it is about none.
    pub fn filesystem(&self) -> Option<&str> {
        match self {
            Self::Filesystem { name, .. } => Some(name),
            Self::Blob { filesystem, .. } | Self::Reads { filesystem, .. } => Some(filesystem),
            Self::Owner { .. } => None,
        }
    }
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
    /// Bytes of a blob, or why the object store did not give them.
    Blob(Result<BlobPart, StoreError>),
}

/// Bytes of a blob.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobPart {
    /// They travel beside the message.
    #[serde(skip)]
    pub bytes: Bytes,
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
    /// Whether there is an object store. A client without its keys asks for blobs instead.
    #[serde(default)]
    pub has_store: bool,
    /// The part of each drive, in millionths, that stays free so that others can take over what is lost.
    #[serde(default)]
    pub spare_millionths: u32,
    /// Whether new data goes near to where it is written, as far as possible.
    #[serde(default)]
    pub writes_near: bool,
    /// The place of each node.
    #[serde(default)]
    pub places: Vec<Place>,
    /// The nodes whose drives its data is for; empty: all nodes.
    #[serde(default)]
    pub for_nodes: BTreeSet<NodeId>,
}

/// Tells clients of filesystems.
pub trait ViewService: Send + Sync {
    /// Answers a question.
    ///
    /// # Errors
    /// `NotFound` if there is no filesystem of that name.
    fn ask(&self, request: ViewRequest) -> BoxFuture<'_, Result<ViewReply, FsError>>;
}
