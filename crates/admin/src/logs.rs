//! The logs of the ledgers: where they are, and requests to move them.

use serde::{Deserialize, Serialize};
use wire::BoxFuture;

use crate::api::AdminError;

/// Where the logs of the ledgers are, and the nodes that follow them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogInfo {
    /// `files`, of the node that owns the ledgers, or the address of an engine: `etcd://HOST:PORT,…` or
    /// `postgres://HOST:PORT,…/DATABASE`.
    pub at: String,
    /// The node that owns the ledgers.
    pub owner: u32,
    /// The members of the engine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<EngineMemberInfo>,
    /// How often a move of the logs was begun, while they are files.
    #[serde(default)]
    pub tries: u32,
    /// The logs are about to move: the process that answers ends.
    #[serde(default)]
    pub moves: bool,
    /// Why the last attempt to move the logs failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// All ledgers, that of the cluster first.
    pub ledgers: Vec<LedgerLog>,
}

/// A member of the engine that has the logs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineMemberInfo {
    /// Where the owner of the ledgers reaches it.
    pub address: String,
    /// Whether it answers there and is connected to the others.
    pub answers: bool,
}

/// A ledger with the nodes that follow it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerLog {
    /// `cluster`, or the name of the filesystem.
    pub ledger: String,
    /// The last entry of its log.
    pub last_seq: u64,
    /// The nodes that may take it over and were heard of in the last minute.
    pub standbys: Vec<StandbyInfo>,
}

/// A node that follows a ledger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyInfo {
    /// Its number.
    pub node: u32,
    /// The last entry that it has; 0 while it copies all.
    pub stored_seq: u64,
    /// Seconds since the owner heard of it.
    pub age_s: u64,
}

/// Which node is to own the ledgers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveLedgers {
    /// Its number.
    pub node: u32,
}

/// Where logs are to move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogMove {
    /// The address of an engine.
    pub to: String,
    /// Mounts in the node's own process may end, and are made anew in processes of their own.
    pub remount: bool,
}

/// The logs of a node's ledgers.
pub trait LogControl: Send + Sync {
    /// Begins to move the logs to an engine. The node's process begins anew for that.
    fn move_log(&self, request: LogMove) -> BoxFuture<'_, Result<(), AdminError>>;
    /// Gives all ledgers to another node, which takes them within seconds.
    fn move_ledgers(&self, request: MoveLedgers) -> BoxFuture<'_, Result<(), AdminError>>;
}
