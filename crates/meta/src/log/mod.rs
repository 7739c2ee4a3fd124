//! The ordered, fenced, durable log of a ledger.
//!
//! Engines stay simple: they never decode a batch, read no state and detect no conflicts. The suite in `conformance`
//! checks the rules for every engine.

#[cfg(test)]
mod conformance;
mod entry;
mod etcd;
mod file;
mod frame;
#[cfg(any(fuzzing, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod mem;
mod members;
mod mirror;
mod postgres;
mod remote;
mod seals;
mod settle;
#[cfg(test)]
mod testing;

use std::time::Duration;

use base::{Epoch, Seq};
use wire::BoxFuture;

pub use etcd::{Etcd, EtcdLog, EtcdMember, EtcdOptions, EtcdTls};
pub use file::{FileLog, LogSizes};
pub use mem::MemLog;
pub use mirror::{CopyIo, CopyState, CopyStatus, MirrorOptions, MirroredLog, StaleCopies};
pub use postgres::{Postgres, PostgresLog, PostgresOptions};
pub use remote::LogEngine;
pub(crate) use settle::append_settled;

/// One entry of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEntry {
    /// Its position; consecutive.
    pub seq: Seq,
    /// Epoch of the owner that appended it; never decreases.
    pub epoch: Epoch,
    /// An encoded batch, or a part of one.
    pub batch: Vec<u8>,
}

/// The end of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tail {
    /// The last entry, or 0 if there never was one.
    pub seq: Seq,
}

/// The last seal of a log, and the end of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fence {
    /// Epoch of the last seal; 0 if there was none.
    pub epoch: Epoch,
    /// The number that its owner chose at random: two nodes may try to seal with the same epoch. [`NOBODY`] if the ledger was
    /// given back or never taken, or if it is not known: an engine without a lease forgets it.
    pub nonce: u64,
    /// The last entry, or 0 if there never was one.
    pub tail: Seq,
    /// Counts the owner's signs of life.
    pub alive: u64,
}

impl Fence {
    /// What tells whether the owner has shown itself since.
    #[must_use]
    pub fn vacancy(&self) -> Vacancy {
        Vacancy { epoch: self.epoch, alive: self.alive }
    }
}

/// What the log of a ledger without an owner shows. A new log shows the default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Vacancy {
    /// Epoch of the last seal.
    pub epoch: Epoch,
    /// The last owner's signs of life.
    pub alive: u64,
}

/// The number in the seal of an owner that gave the ledger back. No owner chooses it.
pub const NOBODY: u64 = 0;

/// An owner as its log knows it: what it sealed the log with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sealed {
    /// Its epoch.
    pub epoch: Epoch,
    /// Its random number; not [`NOBODY`].
    pub nonce: u64,
}

/// The limits of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogCaps {
    /// Largest entry in bytes. A larger batch takes several entries.
    pub entry_bytes_max: usize,
    /// Most batches in one append.
    pub batches_per_append: usize,
    /// How long an owner counts as alive after a sign of life; another node may then take the ledger. `None`: no other node
    /// can reach the log.
    pub lease: Option<Duration>,
}

/// Why batches were not appended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AppendError {
    /// Another owner has sealed the log: stop owning it.
    #[error("log is fenced: epoch={0}")]
    Fenced(Epoch),
    /// The batches may or may not be in the log: the fence of the log tells.
    #[error("outcome of append is unknown")]
    Unknown(#[source] std::io::Error),
    /// The log has no room; nothing was appended.
    #[error("log is full")]
    Full(#[source] std::io::Error),
    /// An entry is larger than [`LogCaps::entry_bytes_max`]; nothing was appended.
    #[error("entry is larger than the log takes")]
    TooLarge,
    /// The outcome is unknown, and only a restart can settle it.
    #[error("outcome of append is unknown until a restart")]
    Lost(#[source] Box<AppendError>),
    /// The log has lost acknowledged batches. An operator must act.
    #[error("log went backwards: acknowledged={acknowledged} tail={tail}")]
    RolledBack {
        /// The last batch that the log acknowledged.
        acknowledged: Seq,
        /// Its last batch now.
        tail: Seq,
    },
}

/// Why the log could not be sealed, read or trimmed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// The epoch is not above the current one: another owner has the ledger.
    #[error("log is sealed with a higher epoch: current={0}")]
    Fenced(Epoch),
    /// Acknowledged entries are damaged or missing. An operator must act.
    #[error("log is damaged: {0}")]
    Damaged(String),
    /// The log was written by a newer version.
    #[error("log has a newer format: {0}")]
    NewerFormat(String),
    /// A copy of the log that may be newer is missing.
    #[error(
        "metadata may be stale: {0}; bring that directory back, or, if it is lost for good, start with \
         --force-stale-metadata: what was acknowledged only there is lost then"
    )]
    Stale(String),
    /// The storage of the log failed.
    #[error("log cannot be reached")]
    Io(#[from] std::io::Error),
}

impl LogError {
    /// The end of a log of files is unknown after a failed write.
    fn broken() -> Self {
        Self::Damaged("its end is unknown after a failed write, until it is opened again".to_owned())
    }
}

/// Whether a log can grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// The log can grow, as far as is known.
    Enough,
    /// The disk is full and appends use up the reserve, which is for requests that free space.
    Reserve,
}

/// Ordered, fenced, durable log of one ledger.
pub trait LedgerLog: Send + Sync {
    /// Fences every owner with a lower epoch. Succeeds only if `epoch` is above the current one. After an `Io` error the
    /// outcome is unknown, and the fence tells: `nonce` shows whose seal it is.
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>>;

    /// The last seal and the end of the log.
    ///
    /// # Errors
    /// `Io` if the engine cannot be reached now, `Damaged` if the end is unknown until the log is opened again.
    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>>;

    /// A sign of life of the owner.
    ///
    /// # Errors
    /// `Fenced` if another owner has sealed the log.
    fn renew(&self, owner: Sealed) -> BoxFuture<'_, Result<(), LogError>> {
        let _ = owner;
        Box::pin(async { Ok(()) })
    }

    /// Appends consecutive entries, the first at `first`; all are durable when it returns.
    fn append(
        &self,
        epoch: Epoch,
        first: Seq,
        batches: Vec<Vec<u8>>,
    ) -> BoxFuture<'_, Result<(), AppendError>>;

    /// Entries from `from` on, about `limit_bytes` at most; at least one if there is any.
    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>>;

    /// Drops entries up to and including `up_to`, as far as the engine's units allow.
    fn trim(&self, up_to: Seq) -> BoxFuture<'_, Result<(), LogError>>;

    /// Its limits.
    fn caps(&self) -> LogCaps;

    /// The oldest entry that the log still holds, or would hold.
    fn first(&self) -> Seq {
        Seq(1)
    }

    /// Whether the log could grow at the last attempt. Does not wait.
    fn room(&self) -> Room {
        Room::Enough
    }

    /// Tries to grow again, if the last attempt failed. May wait for the disk.
    fn refill(&self) {}
}
