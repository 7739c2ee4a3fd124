//! What the nodes of a cluster ask each other: to join it, for the records of the control ledger, for what operators want, and about
//! drives.

use std::time::Duration;

use base::{DriveId, DriveUuid, Epoch, LedgerId, NodeId, Seq};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::BoxFuture;
use crate::message::Payload;
use crate::meta::OwedEntry;
use crate::store::SeenBy;
use crate::tier::DueExtent;

/// The longest that a question for records waits for news.
pub const RECORDS_WAIT_MAX: Duration = Duration::from_secs(20);

/// Why a node did not do what it was asked, for people: what happened, to what, and what to do next.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{0}")]
pub struct Declined(pub String);

/// What a process asks that has no certificate. Needs a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JoinRequest {
    /// To become a node. A repetition with the same key does no harm. Answer: `Joined`.
    Join(NewNode),
    /// To become a client, which is no node. A repetition with the same key does no harm. Answer: `JoinedClient`.
    JoinClient(NewClient),
    /// A client asks for another certificate for the key that it joined with; its own may have expired. Answer: `JoinedClient`.
    RenewClient {
        /// Its number.
        client: u32,
        /// A request for a certificate (PKCS #10, DER): proves that the client has the key.
        request: Bytes,
    },
}

/// A client that wants to join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewClient {
    /// The number of the token.
    pub token: u32,
    /// Its secret.
    pub secret: Bytes,
    /// Name of the client, unique among clients.
    pub name: String,
    /// A request for a certificate (PKCS #10, DER): proves that the client has the key.
    pub request: Bytes,
}

/// A node that wants to join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewNode {
    /// The number of the token.
    pub token: u32,
    /// Its secret.
    pub secret: Bytes,
    /// Name of the node, unique in the cluster.
    pub name: String,
    /// A request for a certificate (PKCS #10, DER): proves that the node has the key.
    pub request: Bytes,
    /// Where others reach the node: `host:port`.
    pub addresses: Vec<String>,
    /// The room or site where it is; empty: not said.
    pub zone: String,
    /// Its rack; empty: not said.
    pub rack: String,
    /// The newest format level of its program; 0: it says nothing.
    #[serde(default)]
    pub format_level: u32,
}

/// The answer to a stranger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JoinReply {
    /// It is a node of the cluster.
    Joined(Joined),
    /// It is a client of the cluster.
    JoinedClient {
        /// Its number.
        client: u32,
        /// Its certificate (PEM).
        certificate: String,
        /// Certificates of the cluster's authorities (PEM).
        authorities: String,
        /// The nodes, with their addresses.
        nodes: Vec<NodeAddresses>,
        /// It may change nothing.
        read_only: bool,
    },
}

/// What a new node gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    /// Its number.
    pub node: NodeId,
    /// Its certificate (PEM).
    pub certificate: String,
    /// Certificates of the cluster's authorities (PEM).
    pub authorities: String,
    /// The key that seals the secrets of users and object stores.
    pub cluster_key: Bytes,
    /// The nodes, with their addresses.
    pub nodes: Vec<NodeAddresses>,
    /// The engine that has the logs of the ledgers, as `start --log` takes it; empty: files at their owner.
    #[serde(default)]
    pub log: String,
    /// The key of the cluster's authority (PEM), if the node may come to own the ledgers; else empty.
    #[serde(default)]
    pub authority_key: String,
    /// It is a witness: it runs a member of an engine and nothing else, and gets no keys.
    #[serde(default)]
    pub witness: bool,
}

/// Where others reach a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeAddresses {
    /// The node.
    pub node: NodeId,
    /// `host:port`.
    pub addresses: Vec<String>,
}

/// What a node asks the owner of the control ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClusterRequest {
    /// The records that changed after `known`, once there are some. If the owner does not know which ones these are, it sends all,
    /// in parts. Answer: `Records`.
    Records {
        /// The last change that the node has; 0: none.
        known: Seq,
        /// The epoch of the owner that told it.
        epoch: Epoch,
        /// Within a copy of all records, the last key that arrived. The next part begins after it.
        after: Bytes,
        /// How long to wait for news; at most [`RECORDS_WAIT_MAX`].
        wait_ms: u32,
    },
    /// A request to the management interface. Answer: `Managed`.
    Manage {
        /// The node at which an operator made it.
        node: NodeId,
        /// A random number. A repetition is not executed, and gets the answer of the first time.
        id: u64,
        /// `GET`, `POST`, `DELETE`.
        method: String,
        /// Path and query.
        path: String,
        /// JSON; the payload of the message.
        #[serde(skip)]
        body: Bytes,
    },
    /// Another certificate for the same key; and where others reach the node now. Answer: `Renewed`, or `IsCopy`.
    Renew {
        /// The node.
        node: NodeId,
        /// A request for a certificate (PKCS #10, DER): proves that the node has the key.
        request: Bytes,
        /// `host:port`.
        addresses: Vec<String>,
        /// The random number of the last start of the node that was renewed, as its directory has it; 0: none was. A directory that was
        /// copied does not know later ones.
        #[serde(default)]
        last_start: u64,
        /// That of this start; 0 at nodes of earlier versions.
        #[serde(default)]
        this_start: u64,
    },
    /// Whether the node that is asked owns the control ledger. Every node answers that. Answer: `Owner`.
    IsOwner,
    /// A node says that it owns the control ledger from now on, to every other. Answer: `Owner`.
    Owns {
        /// The node.
        node: NodeId,
        /// Its epoch. A node that knows a later owner takes no notice.
        epoch: Epoch,
    },
    /// Measures the way to the node, which every node answers. Answer: `Probed`.
    Probe {
        /// Bytes that it takes and forgets; the payload of the message. Large ones go by a connection for data.
        #[serde(skip)]
        body: Bytes,
    },
}

/// The answer of the owner of the control ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClusterReply {
    /// Records.
    Records(RecordsNews),
    /// The answer to an operator.
    Managed {
        /// Status of HTTP.
        status: u16,
        /// JSON; the payload of the message.
        #[serde(skip)]
        body: Bytes,
    },
    /// A certificate.
    Renewed {
        /// The certificate (PEM).
        certificate: String,
        /// Certificates of the cluster's authorities (PEM).
        authorities: String,
        /// As in [`Joined`]: the logs may have moved since.
        #[serde(default)]
        log: String,
        /// As in [`Joined`].
        #[serde(default)]
        authority_key: String,
    },
    /// The epoch with which this node owns the control ledger; `None`: it does not.
    Owner(Option<Epoch>),
    /// A probe came.
    Probed {
        /// The wall clock of the node, in nanoseconds since 1970.
        wall_ns: i64,
    },
    /// The node was started from another copy of its directory.
    IsCopy {
        /// Where that one is reached: `host:port`.
        addresses: Vec<String>,
        /// It answers there now. Otherwise it was started after this copy was made.
        answers: bool,
    },
}

/// Records that changed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordsNews {
    /// The last change in them. Parts of one copy have the same; if not, the copy begins anew.
    pub seq: Seq,
    /// The epoch of the owner that tells it. After another owner, changes are told anew: the ledger may have gone back.
    pub epoch: Epoch,
    /// Whether they are (a part of) all records, and not only the changed ones.
    pub is_copy: bool,
    /// Keys with their values, in the order of changes; an empty value: the record is gone.
    pub records: Vec<(Bytes, Bytes)>,
    /// Whether more parts follow.
    pub more: bool,
}

/// What the owner of the control ledger asks a node about its drives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostRequest {
    /// Formats a drive and opens it. Answer: `Formatted`.
    Format {
        /// The number of the drive, which no other drive ever had.
        drive: DriveId,
        /// Device or file; `None`: a file in the node's directory.
        path: Option<String>,
        /// Size of a new file; `None`: as the node's other drives.
        size_bytes: Option<u64>,
    },
    /// Opens a drive again whose service has failed. Answer: `Done`.
    Reopen {
        /// The drive.
        drive: DriveId,
    },
    /// Closes a drive that is not to be used (any more). Answer: `Done`.
    Close {
        /// The drive.
        drive: DriveId,
    },
    /// The condition of its drives. Answer: `Drives`.
    Drives,
    /// Runs a member of the engine that is to have the logs of the ledgers, or has them. Answer: `Done`.
    StartEngine(EngineSeat),
    /// Ends the member of an attempt that has failed, and removes its files. Answer: `Done`.
    EndEngine {
        /// The number of the attempt.
        number: u64,
    },
    /// The condition of its member of the engine. Answer: `Engine`.
    Engine,
    /// The last entry in each of its local stores. The engine is not asked. Answer: `Stored`.
    Stored,
    /// Looks whether it could use the logs of the ledgers at another place. Takes [`TRY_LOG_MAX`] at most. Answer: `TriedLog`.
    TryLog {
        /// The engine and the place there.
        log: String,
        /// The number of the move.
        number: u64,
    },
    /// Notes where a drive of the cluster is, if one is there. Answer: `Located`.
    Locate {
        /// Device or file.
        path: String,
    },
    /// How it is. Answer: `Condition`.
    Condition,
    /// Looks at its machine, and measures. Takes [`CHECK_MAX`] at most. Answer: `Checked`.
    Check {
        /// What it measures beside that.
        what: CheckParts,
    },
    /// Restores shards on its drives. Takes [`RESTORE_MAX`] at most. Answer: `Restored`.
    Restore(RestoreOrder),
    /// Puts extents into a new blob of the object store. Takes [`UPLOAD_MAX`] at most. Answer: `Uploaded`.
    Upload(UploadOrder),
}

/// The longest that a node works on an order to restore shards.
pub const RESTORE_MAX: Duration = Duration::from_secs(20);
/// The most shards in one order.
pub const RESTORE_SHARDS_MAX: usize = 16;

/// Shards that a node is to reconstruct from others and to store on its drives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreOrder {
    /// The filesystem, by its name.
    pub filesystem: String,
    /// Its ledger.
    pub ledger: LedgerId,
    /// The cluster map by which the node was chosen. One with an earlier map might take another drive.
    pub map: Epoch,
    /// Which ones; at most [`RESTORE_SHARDS_MAX`].
    pub shards: Vec<OwedEntry>,
}

/// The longest that a node looks at a place for logs.
pub const TRY_LOG_MAX: Duration = Duration::from_secs(10);

/// The longest that a node works on an order to make a blob.
pub const UPLOAD_MAX: Duration = Duration::from_secs(300);

/// Extents that a node is to put into one blob of the object store of their filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadOrder {
    /// The filesystem, by its name.
    pub filesystem: String,
    /// Its ledger.
    pub ledger: LedgerId,
    /// A cluster map that has the groups of the extents.
    pub map: Epoch,
    /// Which ones; at most [`TIER_EXTENTS_MAX`](crate::tier::TIER_EXTENTS_MAX).
    pub extents: Vec<DueExtent>,
    /// Largest blob.
    pub blob_bytes: u32,
    /// Bytes per second at which it gives way to users; 0: there are none, or it is urgent.
    pub bytes_per_s: u64,
}

/// The result for a shard that was to be restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RepairOutcome {
    /// It is stored.
    Stored {
        /// Length of the shard.
        bytes: u64,
    },
    /// Its extent was deleted in the meantime.
    Gone,
    /// The drive does not accept it now.
    NotNow,
    /// Fewer than k shards of the extent can be read: data is lost unless a drive comes back.
    Unreadable,
}

/// How a node is, as it tells it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeCondition {
    /// Version of its program.
    pub version: String,
    /// Seconds since its process began.
    pub uptime_s: u64,
    /// Its wall clock, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// URL of its S3 endpoint, if it serves one now.
    pub s3: Option<String>,
    /// The newest format level of its program; 0: it says nothing.
    #[serde(default)]
    pub format_level: u32,
    /// Whether the object stores in use answer it, by number.
    #[serde(default)]
    pub stores: Vec<(u32, SeenBy)>,
}

/// The longest that the check of a node may take.
pub const CHECK_MAX: Duration = Duration::from_secs(60);

/// What the check of a node measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckParts {
    /// Reads from its drives: one after another, then all at once.
    pub drives: bool,
    /// The ways to the other nodes.
    pub network: bool,
}

/// How a node is in one respect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// How grave it is.
    pub grade: Grade,
    /// Short name for programs, such as `clock`.
    pub code: String,
    /// What was found, for people.
    pub found: String,
    /// What that costs; empty if it is well.
    #[serde(default)]
    pub cost: String,
    /// What to do; empty if it is well.
    #[serde(default)]
    pub advice: String,
}

/// How grave a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// It is well.
    Ok,
    /// It could not be looked at.
    Unknown,
    /// It works, and costs something.
    Warning,
    /// Something does not work.
    Problem,
}

/// A member of an engine that a node is to run.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineSeat {
    /// The number of the attempt to make the engine. What another one has left goes, if no cluster relies on it.
    pub number: u64,
    /// The name of the member.
    pub name: String,
    /// All members.
    pub members: Vec<EngineMember>,
    /// The certificate of the engine's authority (PEM).
    pub authority: String,
    /// Its key (PEM).
    pub authority_key: String,
    /// The others run already, and have taken it in.
    #[serde(default)]
    pub joins: bool,
}

impl std::fmt::Debug for EngineSeat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineSeat")
            .field("number", &self.number)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Where others find a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineMember {
    /// Its name.
    pub name: String,
    /// Name or address of its node.
    pub host: String,
    /// The port for clients.
    pub client_port: u16,
    /// The port for other members.
    pub peer_port: u16,
}

/// The answer about drives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostReply {
    /// A new drive is open.
    Formatted {
        /// Its UUID.
        uuid: DriveUuid,
        /// Its size.
        capacity_bytes: u64,
    },
    /// It was done.
    Done,
    /// The drives of the node.
    Drives(Vec<HostedDrive>),
    /// Its member of the engine.
    Engine(EngineCondition),
    /// The last entry in each of its local stores.
    Stored(Vec<StoredLedger>),
    /// The drive of the cluster that is at a path.
    Located(Option<DriveUuid>),
    /// What was found.
    Checked(Vec<Finding>),
    /// How it is.
    Condition(NodeCondition),
    /// What became of each shard, in the order in which they were named.
    Restored(Vec<RepairOutcome>),
    /// A blob was stored, unless none of the extents is there any more.
    Uploaded {
        /// Bytes of extents in it.
        bytes: u64,
    },
    /// It could use that place.
    TriedLog {
        /// Which servers it finds there.
        system: String,
    },
}

/// A ledger as a node has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredLedger {
    /// The ledger.
    pub ledger: LedgerId,
    /// The last entry in the store.
    pub seq: Seq,
    /// The epoch of the owner that appended it.
    pub epoch: Epoch,
}

/// The condition of a member of the engine, as its node sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineCondition {
    /// There is none.
    Absent,
    /// It has its data, and is started whenever it does not run.
    Present,
    /// Its data is gone.
    Lost,
}

/// A drive, as its node sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostedDrive {
    /// The drive.
    pub drive: DriveId,
    /// Device or file.
    pub path: String,
    /// Why it is not open.
    pub problem: Option<String>,
    /// It is an older copy of itself, and what it found instead of what was noted last.
    pub older: Option<String>,
}

impl Payload for JoinRequest {}
impl Payload for JoinReply {}
impl Payload for HostRequest {}
impl Payload for HostReply {}

impl Payload for ClusterRequest {
    fn payload(&self) -> Bytes {
        match self {
            Self::Manage { body, .. } => body.clone(),
            Self::Probe { body } => body.clone(),
            Self::Records { .. } | Self::Renew { .. } | Self::IsOwner | Self::Owns { .. } => Bytes::new(),
        }
    }

    fn set_payload(&mut self, payload: Bytes) {
        if let Self::Manage { body, .. } | Self::Probe { body } = self {
            *body = payload;
        }
    }
}

impl Payload for ClusterReply {
    fn payload(&self) -> Bytes {
        match self {
            Self::Managed { body, .. } => body.clone(),
            Self::Records(_)
            | Self::Renewed { .. }
            | Self::Owner(_)
            | Self::Probed { .. }
            | Self::IsCopy { .. } => Bytes::new(),
        }
    }

    fn set_payload(&mut self, payload: Bytes) {
        if let Self::Managed { body, .. } = self {
            *body = payload;
        }
    }
}

/// Takes in processes that have a token.
pub trait JoinService: Send + Sync {
    /// Answers a stranger.
    ///
    /// # Errors
    /// If the token is not valid, or does not allow that.
    fn join(&self, request: JoinRequest) -> BoxFuture<'_, Result<JoinReply, Declined>>;
}

/// The control ledger, as other nodes reach it.
pub trait ClusterService: Send + Sync {
    /// Answers a node.
    ///
    /// # Errors
    /// If the ledger cannot be read.
    fn ask(&self, request: ClusterRequest) -> BoxFuture<'_, Result<ClusterReply, Declined>>;
}

/// A node with drives, as the owner of the control ledger reaches it.
pub trait HostService: Send + Sync {
    /// Executes a request.
    ///
    /// # Errors
    /// If it cannot be executed.
    fn ask(&self, request: HostRequest) -> BoxFuture<'_, Result<HostReply, Declined>>;
}
