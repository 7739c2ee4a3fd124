//! Nodes and the tokens with which they join: requests to a node, and their answers.

use serde::{Deserialize, Serialize};
use wire::BoxFuture;
use wire::cluster::{CheckParts, Finding};
use wire::rights::Squash;

use crate::api::AdminError;

/// A node of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Its number.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// Its zone; empty: not said.
    pub zone: String,
    /// Its rack; empty: not said.
    pub rack: String,
    /// Where others reach it.
    pub addresses: Vec<String>,
    /// `up`, or `unreachable`: it does not answer the node that owns the control ledger.
    pub state: String,
    /// Its drives that are not out.
    pub drives: u32,
    /// Their size together.
    pub capacity_bytes: u64,
    /// Whether it owns the control ledger.
    pub owner: bool,
    /// Whether it is a witness: it runs a member of an engine and nothing else.
    #[serde(default)]
    pub witness: bool,
    /// Version of its program, as it told now; as the following, `None` if it does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Seconds since its process began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uptime_s: Option<u64>,
    /// Microseconds that its answer took on the way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<u64>,
    /// Milliseconds by which its clock is ahead of that of the node that owns the control ledger, to within half of the latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_ahead_ms: Option<i64>,
    /// URL of its S3 endpoint, if it serves one now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub s3: Option<String>,
    /// Days for which its certificate is still valid; it renews itself long before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_days: Option<i64>,
    /// Seconds that its maintenance still lasts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenance_s: Option<u64>,
}

/// A node is going to be away on purpose, or is not any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetMaintenance {
    /// Its length in seconds; `None` ends the maintenance.
    pub for_s: Option<u64>,
    /// Also if something stops with the node.
    #[serde(default)]
    pub force: bool,
}

/// What would stop if a node were stopped now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopCheck {
    /// Its number.
    pub node: u32,
    /// Its name.
    pub name: String,
    /// What would stop, one sentence each. Nothing: the node may be stopped.
    pub stops: Vec<String>,
    /// What else would change.
    pub notes: Vec<String>,
}

/// What a node found when it looked at its machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeCheck {
    /// Its number.
    pub node: u32,
    /// Its name.
    pub name: String,
    /// What it found.
    pub findings: Vec<Finding>,
}

/// A node whose drives are to be emptied, or not any more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DrainNode {
    /// Only say what would move.
    #[serde(default)]
    pub dry_run: bool,
    /// Stop emptying it: what has not moved stays. Nodes of earlier versions do not know it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub abort: bool,
}

/// What moves when a node is emptied.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeDrain {
    /// Its number.
    pub node: u32,
    /// Its name.
    pub name: String,
    /// Its drives that are emptied, or are not any more.
    pub drives: Vec<u32>,
    /// What they hold, in bytes on drives.
    pub move_bytes: u64,
    /// What is free on drives of other nodes.
    pub free_bytes: u64,
    /// Seconds that it takes at the full rate of background work.
    pub eta_s: u64,
    /// Whether it owns the control ledger.
    pub owner: bool,
}

/// What a new token allows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateToken {
    /// Seconds for which it is valid.
    pub expires_in_s: u64,
    /// How many nodes or clients may join with it.
    pub uses: u32,
    /// It is for clients that are no nodes, which may do this; `None`: for nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<TokenRights>,
    /// It is for witnesses: nodes that run a member of an engine and nothing else.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub witness: bool,
}

/// What clients may do that join with a token.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenRights {
    /// The only filesystem that they may use; `None`: all.
    #[serde(default)]
    pub filesystem: Option<String>,
    /// They may change nothing.
    #[serde(default)]
    pub read_only: bool,
    /// Which of their users count as nobody.
    #[serde(default)]
    pub squash: Squash,
}

/// A client that is no node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientInfo {
    /// Its number.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// The only filesystem that it may use; `None`: all.
    pub filesystem: Option<String>,
    /// It may change nothing.
    pub read_only: bool,
    /// Which of its users count as nobody.
    pub squash: Squash,
    /// Version of its program, as it told the owner of the control ledger last; `None`: it was not connected since that owns it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// A program of a node or client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramInfo {
    /// Number of the node or client.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// Its version, as it told now, or a client last; `None`: it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The newest format level that it knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format_level: Option<u32>,
}

/// How far an upgrade has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpgradeInfo {
    /// The format level that all nodes write.
    pub format_level: u32,
    /// The newest level that a node knows.
    pub newest_level: u32,
    /// The level to which `finalize` raises it now; `None`: there is nothing to raise, or nodes are behind.
    pub finalize_to: Option<u32>,
    /// All nodes by number.
    pub nodes: Vec<ProgramInfo>,
    /// All clients that are no nodes, by number. They may be older: they write no formats.
    pub clients: Vec<ProgramInfo>,
    /// The nodes that know less than `newest_level`, or do not answer.
    pub behind: Vec<u32>,
}

/// A new token.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewToken {
    /// What is known of it later.
    #[serde(flatten)]
    pub info: TokenInfo,
    /// Its text, shown only once.
    pub token: String,
}

/// A token. Its secret is not known any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenInfo {
    /// Its number.
    pub id: u32,
    /// `node`, `client` or `witness`.
    pub role: String,
    /// `valid`, `used` or `expired`.
    pub state: String,
    /// Seconds for which it is still valid.
    pub expires_in_s: u64,
    /// How many nodes may still join with it.
    pub uses_left: u32,
}

/// Nodes of a cluster.
pub trait NodesControl: Send + Sync {
    /// All nodes by number.
    fn nodes(&self) -> BoxFuture<'_, Result<Vec<NodeInfo>, AdminError>>;
    /// What would stop if a node were stopped now.
    fn stop_check(&self, id: u32) -> BoxFuture<'_, Result<StopCheck, AdminError>>;
    /// Lets a node look at its machine.
    fn check(&self, id: u32, what: CheckParts) -> BoxFuture<'_, Result<NodeCheck, AdminError>>;
    /// Moves everything off the drives of a node.
    fn drain_node(&self, id: u32, request: DrainNode) -> BoxFuture<'_, Result<NodeDrain, AdminError>>;
    /// Notes that a node is going to be away on purpose, if nothing stops with it, or that it is not any more. A node that owns
    /// the metadata gives it to another one.
    fn set_maintenance(
        &self,
        id: u32,
        request: SetMaintenance,
    ) -> BoxFuture<'_, Result<NodeInfo, AdminError>>;
    /// Takes a node without drives out of the cluster.
    fn remove_node(&self, id: u32) -> BoxFuture<'_, Result<NodeInfo, AdminError>>;
    /// How far an upgrade of the nodes has come.
    fn upgrade(&self) -> BoxFuture<'_, Result<UpgradeInfo, AdminError>>;
    /// Lets all nodes write the newest formats that they know. There is no way back.
    fn finalize_upgrade(&self) -> BoxFuture<'_, Result<UpgradeInfo, AdminError>>;
    /// Makes a token.
    fn create_token(&self, request: CreateToken) -> BoxFuture<'_, Result<NewToken, AdminError>>;
    /// All tokens by number.
    fn tokens(&self) -> BoxFuture<'_, Result<Vec<TokenInfo>, AdminError>>;
    /// Removes a token: no node can join with it any more.
    fn remove_token(&self, id: u32) -> BoxFuture<'_, Result<TokenInfo, AdminError>>;
    /// All clients that are no nodes, by number.
    fn clients(&self) -> BoxFuture<'_, Result<Vec<ClientInfo>, AdminError>>;
    /// Removes a client: its connections end, and its certificate is of no use any more.
    fn remove_client(&self, id: u32) -> BoxFuture<'_, Result<ClientInfo, AdminError>>;
}
