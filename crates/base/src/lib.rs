//! Ids, units, checksums, error kinds and [`env`], the only access to clock, randomness, threads and files.
//!
//! Nothing here knows about drives, ledgers or protocols. Every other crate may use this one.

pub mod checksum;
pub mod codec;
pub mod env;
mod error;
mod ids;
pub mod program;
pub mod units;
pub mod watch;

pub use error::FsError;
pub use ids::{
    ClusterId, DriveId, DriveUuid, Epoch, ExtentId, Ino, LeaseId, LedgerId, Lineage, MapId, NodeId, PgId,
    Seq, SessionId, ShardIndex,
};
