//! Claims: what a client tells the next owner of a ledger.

use base::Ino;
use serde::{Deserialize, Serialize};

use crate::lock::FileLock;
use crate::meta::{Attr, LeaseGrant};

/// A lease from an earlier owner, and the client's knowledge of the inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldLease {
    /// The grant, in its newest state.
    pub lease: LeaseGrant,
    /// The inode's attributes as the client last learned them.
    pub data_ver: u64,
    /// See `data_ver`.
    pub attr_ver: u64,
}

/// A client's state that an owner has in memory only: a client tells it to the next owner.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// As in [`MetaRequest::Heartbeat`](crate::meta::MetaRequest::Heartbeat).
    pub in_use_ver: u64,
    /// Leases, at most [`CLAIMS_MAX`] in one message.
    pub leases: Vec<HeldLease>,
    /// Inodes that are open, at most [`CLAIMS_MAX`].
    pub opens: Vec<Ino>,
    /// Directories of which caches above may keep names.
    pub dirs: Vec<Ino>,
    /// Another message with the rest follows.
    pub more: bool,
    /// Locks that are held, at most [`CLAIMS_MAX`]. Requests that wait are sent again.
    #[serde(default)]
    pub locks: Vec<FileLock>,
    /// Slots and numbers of requests whose answers the client does not have, or may not have noted yet.
    #[serde(default)]
    pub unanswered: Vec<(u32, u64)>,
    /// This is the first message of a claim: events are counted from here.
    pub begins: bool,
}

/// The most items of each kind in a [`Claim`].
pub const CLAIMS_MAX: usize = 4096;

/// The answer to a [`Claim`]. All other claimed leases are void: the inode was changed or is leased to others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resumed {
    /// Leases that hold on under their old ids.
    pub leases: Vec<LeaseGrant>,
    /// Attributes that the client did not know.
    pub changed: Vec<Attr>,
    /// Locks that another session has got since.
    #[serde(default)]
    pub lost_locks: Vec<FileLock>,
}
