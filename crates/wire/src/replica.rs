//! What a standby asks the owner of its ledger: to keep the log for it, and for a copy of the store. Others may read a copy, too.

use std::time::Duration;

use base::{Epoch, FsError, Seq};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::BoxFuture;

/// The longest that an owner keeps the log for a standby that says nothing.
pub const STANDBY_WAIT_MAX: Duration = Duration::from_secs(60);

/// The number of a replica that is none: somebody reads a copy of the store, for a backup. The owner keeps no log for readers, several may
/// read at a time, and a copy has at least all that was durable when it was asked for.
pub const READER: u64 = 0;

/// A request of a standby. A repetition does no harm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReplicaRequest {
    /// The standby's store has all entries up to here, durably. The owner trims the log no further than a majority of the
    /// replicas has come: itself, and the standbys that it heard of a moment ago. Answer: `Noted`.
    Stored {
        /// A number that no other replica of the ledger has; not [`READER`].
        replica: u64,
        /// The last entry in the store.
        seq: Seq,
        /// For how long the owner keeps the log for the standby if it hears no more of it. At most [`STANDBY_WAIT_MAX`].
        wait_ms: u32,
    },
    /// The next part of a copy of the owner's store. From the first part on the owner keeps the log for the standby, as after
    /// `Stored`. Answer: `Copied`.
    Copy {
        /// As in `Stored`, or [`READER`].
        replica: u64,
        /// As in `Stored`.
        wait_ms: u32,
        /// The copy. 0 begins one, and ends an earlier one of the same replica, or those that readers have read to the end.
        copy: u64,
        /// The last key that the standby has; empty in the first request.
        after: Bytes,
    },
}

/// The answer to a standby.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReplicaReply {
    /// The owner has noted it.
    Noted,
    /// A part of a copy.
    Copied(CopyPart),
}

/// A part of a copy of a store, as it was at one position of the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyPart {
    /// The copy.
    pub copy: u64,
    /// The last entry of the log in it.
    pub seq: Seq,
    /// Epoch of the owner that appended that entry.
    pub epoch: Epoch,
    /// Keys with their values, in the order of the keys.
    pub pairs: Vec<(Bytes, Bytes)>,
    /// CRC-32C of all keys and values so far, each with its length (u32 LE) before it.
    pub sum: u32,
    /// Whether more keys follow.
    pub more: bool,
}

/// The owner of a ledger, as its standbys see it.
pub trait ReplicaService: Send + Sync {
    /// Executes a request.
    ///
    /// # Errors
    /// `Disconnected` if this is not the owner any more; `NotFound` for a copy that it does not have (any more), `WouldBlock` while too many
    /// are under way, or while its store lacks what a reader is to get; `Io` if its store cannot be read.
    fn ask(&self, request: ReplicaRequest) -> BoxFuture<'_, Result<ReplicaReply, FsError>>;
}
