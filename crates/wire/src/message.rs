//! The messages of the internal services: owners, their events, and drives. docs/formats/wire.md has their bytes.
//!
//! A message is an operation's code, an [`Envelope`], the fields of the request, and a payload beside it: bytes of shards are
//! never copied into a message.

use base::program::Program;
use base::{Ino, LedgerId, SessionId};
use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::claim::{Claim, Resumed};
use crate::drive::{
    DeleteShards, DriveFailed, DriveService, DriveStat, GetShard, GetShardError, PutShard, PutShardError,
    ScrubStep, ShardBlocks, ShardEntry, ShardKey,
};
use crate::encoding::{self, BadRequest, Malformed, Operations};
use crate::meta::{OwnerEvent, RequestId};
use crate::position::{KnownLedger, Position};
use crate::rights::Grant;

/// The user that makes a request. Permission bits and ACLs are checked for it; user 0 may do everything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// User, and owner of new files.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
}

impl Caller {
    /// The user that may do everything.
    pub fn root() -> Self {
        Self { uid: 0, gid: 0, groups: Vec::new() }
    }

    /// The user that owns nothing.
    pub fn nobody() -> Self {
        Self { uid: 65534, gid: 65534, groups: Vec::new() }
    }
}

/// Accompanies each request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope {
    /// Recognises a repetition. Zeros in requests of which a repetition does no harm.
    pub request: RequestId,
    /// The time left for an answer when the request was sent; 0: no limit.
    pub deadline_ms: u32,
    /// Ties the log lines of one operation together; 0: it is not traced.
    pub trace: u64,
    /// The user whose rights the service checks. `None`: the sender has checked them, and the service trusts it.
    pub caller: Option<Caller>,
    /// When an owner answers.
    pub answer: AnswerTime,
    /// A client that is no node may write these extents.
    #[serde(default)]
    pub grant: Option<Grant>,
    /// The owner may refuse a change of names with [`FsError::Retry`](base::FsError::Retry): the sender has locked its directories, and
    /// lets them go then.
    #[serde(default)]
    pub refusable: bool,
}

/// When an owner answers a request that changes names or attributes. The method is that of early replies in CephFS: the
/// client keeps what was answered early until it is durable, and the next owner executes it again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum AnswerTime {
    /// When the change is durable.
    #[default]
    Durable,
    /// At once, if it depends on nothing but durable state and changes that were answered early to the same session. It is
    /// [`MetaReply::Early`](crate::meta::MetaReply::Early), or as ever if all is durable.
    Early,
    /// As `Early`, for a request that an earlier owner answered so: it is executed as it was then. Such requests come before the
    /// session's claim, in the order of the first answers.
    Again(FirstTime),
}

/// What an early answer depended on that is not in its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstTime {
    /// The number of a new inode.
    pub ino: Ino,
    /// The wall clock of the owner.
    pub wall_ns: i64,
}

impl From<RequestId> for Envelope {
    fn from(request: RequestId) -> Self {
        Self { request, ..Self::default() }
    }
}

/// What both sides of a connection tell each other first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GreetRequest {
    /// Answer: `Welcome`.
    Hello {
        /// Tell the state of all drives each second on this connection.
        wants_facts: bool,
        /// The program that asks.
        #[serde(default)]
        program: Program,
    },
}

/// The answer to a greeting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// A random number of the process.
    pub incarnation: u64,
    /// Its ledgers, with a number that changes whenever the process opens the ledger anew.
    pub ledgers: Vec<(LedgerId, u64)>,
}

/// Binds sessions to an owner. Its events for a session come in a *stream*, on the same connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionRequest {
    /// Registers a client. The stream's number is random. Answer: `SessionId`.
    Connect {
        /// The number of the stream.
        stream: u64,
    },
    /// Binds a session of an earlier owner. Answer: [`Resumed`].
    Resume {
        /// The number of the stream.
        stream: u64,
        /// The session.
        session: SessionId,
        /// Its state.
        claim: Claim,
        /// The proof that it is the client's; nodes need none.
        #[serde(default, skip_serializing_if = "Bytes::is_empty")]
        proof: Bytes,
    },
    /// After a connection broke: the stream goes on, on this connection, with the event after `seen`. Answer: whether the
    /// stream is known.
    Attach {
        /// The number of the stream.
        stream: u64,
        /// The last event that arrived.
        seen: u64,
    },
}

/// A request to a drive. [`crate::drive::DriveService`] says what each does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the variants are named after the methods of the service")]
pub enum DriveRequest {
    Put(PutShard),
    Get(GetShard),
    Delete(DeleteShards),
    KeepPositions { positions: Vec<Position>, replace: bool },
    KnownLedgers,
    List { after: Option<ShardKey>, limit: u32 },
    Scrub { after: Option<ShardKey>, budget_bytes: u64 },
    MakeRoom,
    Stat,
}

/// The answer of a drive, in the order of the requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the variants are named by the requests they answer")]
pub enum DriveReply {
    Put(Result<(), PutShardError>),
    Get(Result<ShardBlocks, GetShardError>),
    Delete(Result<(), DriveFailed>),
    KeepPositions(Result<(), DriveFailed>),
    KnownLedgers(Result<Vec<KnownLedger>, DriveFailed>),
    List(Result<Vec<ShardEntry>, DriveFailed>),
    Scrub(Result<ScrubStep, DriveFailed>),
    MakeRoom(Result<(), DriveFailed>),
    Stat(DriveStat),
}

impl DriveRequest {
    /// Lets a drive execute it.
    pub async fn execute(self, drive: &dyn DriveService) -> DriveReply {
        match self {
            Self::Put(put) => DriveReply::Put(drive.put(put).await),
            Self::Get(get) => DriveReply::Get(drive.get(get).await),
            Self::Delete(delete) => DriveReply::Delete(drive.delete(delete).await),
            Self::KeepPositions { positions, replace } => {
                DriveReply::KeepPositions(drive.keep_positions(positions, replace).await)
            }
            Self::KnownLedgers => DriveReply::KnownLedgers(drive.known_ledgers().await),
            Self::List { after, limit } => DriveReply::List(drive.list(after, limit as usize).await),
            Self::Scrub { after, budget_bytes } => DriveReply::Scrub(drive.scrub(after, budget_bytes).await),
            Self::MakeRoom => DriveReply::MakeRoom(drive.make_room().await),
            Self::Stat => DriveReply::Stat(drive.stat()),
        }
    }
}

/// An event of a stream. Events are numbered from 1, come in order, and are sent again until they are acknowledged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamEvent {
    /// Counts the events of the stream.
    pub number: u64,
    /// The event.
    pub event: OwnerEvent,
}

/// Why a service did not execute a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum Refusal {
    /// It does not know the operation: it is an older program.
    #[error("the operation is not known there")]
    Unsupported,
    /// The message is malformed.
    #[error("the message is malformed")]
    Malformed,
    /// It does not have this ledger or drive.
    #[error("the ledger or drive is not there")]
    Elsewhere,
    /// The deadline has passed.
    #[error("the deadline has passed")]
    Late,
    /// The answer is longer than a message may be.
    #[error("the answer is too long")]
    TooLong,
    /// The sender has no right to ask that.
    #[error("the certificate of the sender does not allow that")]
    Forbidden,
}

/// Accompanies each answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerHead {
    /// The newest durable position of the ledger that was asked.
    pub position: Option<Position>,
    /// To a client that is no node: the proof of the session or of the extents that it was given.
    #[serde(default, skip_serializing_if = "Bytes::is_empty")]
    pub proof: Bytes,
}

/// Operations on connections.
pub const GREET: Operations = Operations(&[("Hello", 0x0001)]);
/// Operations on sessions.
pub const SESSION: Operations = Operations(&[("Connect", 0x0101), ("Resume", 0x0102), ("Attach", 0x0103)]);
/// Operations of owners.
pub const OWNER: Operations = Operations(&[
    ("CloseSession", 0x0110),
    ("Heartbeat", 0x0111),
    ("Lookup", 0x0112),
    ("GetAttr", 0x0113),
    ("ReadDir", 0x0114),
    ("ReadLink", 0x0115),
    ("Make", 0x0116),
    ("Open", 0x0117),
    ("Close", 0x0118),
    ("SetAttr", 0x0119),
    ("SetGuard", 0x011a),
    ("NoteRead", 0x011b),
    ("Unlink", 0x011c),
    ("Rmdir", 0x011d),
    ("Rename", 0x011e),
    ("Link", 0x011f),
    ("SetXattr", 0x0120),
    ("GetXattr", 0x0121),
    ("ListXattr", 0x0122),
    ("RemoveXattr", 0x0123),
    ("GetMap", 0x0124),
    ("Commit", 0x0125),
    ("Punch", 0x0126),
    ("CloneRange", 0x0127),
    ("AllocExtents", 0x0128),
    ("StatFs", 0x0129),
    ("Acquire", 0x012a),
    ("Release", 0x012b),
    ("ReleaseAll", 0x012c),
    ("Forgot", 0x012d),
    ("NextFree", 0x012e),
    ("Freed", 0x012f),
    ("Owed", 0x0130),
    ("Repaired", 0x0131),
    ("PurgeStep", 0x0132),
    ("ScanMap", 0x0133),
    ("Repack", 0x0134),
    ("ExtentRanges", 0x0135),
    ("RecheckRanges", 0x0136),
    ("Doubt", 0x0137),
    ("ConfirmOrphans", 0x0138),
    ("RangeVerified", 0x0139),
    ("Object", 0x013a),
    ("Rehydrate", 0x013b),
    ("Tier", 0x013c),
    ("Damage", 0x013d),
    ("Lock", 0x013e),
    ("Unlock", 0x013f),
    ("TestLock", 0x0140),
    ("AdvanceGroups", 0x0141),
    ("MakeUnnamed", 0x0142),
]);
/// What standbys ask the owner of their ledger.
pub const REPLICA: Operations = Operations(&[("Stored", 0x0180), ("Copy", 0x0181)]);
/// What clients ask of the filesystems of a process.
pub const VIEW: Operations =
    Operations(&[("Filesystem", 0x0190), ("Owner", 0x0191), ("Blob", 0x0192), ("Reads", 0x0193)]);
/// What a process asks that is not in the cluster yet.
pub const JOIN: Operations = Operations(&[("Join", 0x01a0), ("JoinClient", 0x01a1), ("RenewClient", 0x01a2)]);
/// What nodes ask the owner of the control ledger.
pub const CLUSTER: Operations = Operations(&[
    ("Records", 0x01b0),
    ("Manage", 0x01b1),
    ("Renew", 0x01b2),
    ("IsOwner", 0x01b3),
    ("Owns", 0x01b4),
    ("Probe", 0x01b5),
]);
/// What the owner of the control ledger asks nodes about their drives, and to run.
pub const HOST: Operations = Operations(&[
    ("Format", 0x01c0),
    ("Reopen", 0x01c1),
    ("Close", 0x01c2),
    ("Drives", 0x01c3),
    ("StartEngine", 0x01c4),
    ("EndEngine", 0x01c5),
    ("Engine", 0x01c6),
    ("Stored", 0x01c7),
    ("TryLog", 0x01cd),
    ("Locate", 0x01c8),
    ("Condition", 0x01c9),
    ("Check", 0x01ca),
    ("Restore", 0x01cb),
    ("Upload", 0x01cc),
]);
/// Operations of drives.
pub const DRIVE: Operations = Operations(&[
    ("Put", 0x0201),
    ("Get", 0x0202),
    ("Delete", 0x0203),
    ("KeepPositions", 0x0204),
    ("KnownLedgers", 0x0205),
    ("List", 0x0206),
    ("Scrub", 0x0207),
    ("MakeRoom", 0x0208),
    ("Stat", 0x0209),
]);

/// A message that can have a payload beside it.
pub trait Payload {
    /// The bytes beside it.
    fn payload(&self) -> Bytes {
        Bytes::new()
    }

    /// Puts the bytes that came beside it into it.
    fn set_payload(&mut self, _payload: Bytes) {}
}

impl Payload for GreetRequest {}
impl Payload for Welcome {}
impl Payload for SessionRequest {}
impl Payload for SessionId {}
impl Payload for Resumed {}
impl Payload for crate::meta::MetaRequest {}
impl Payload for crate::meta::MetaReply {}
impl Payload for crate::replica::ReplicaRequest {}
impl Payload for crate::replica::ReplicaReply {}
impl Payload for crate::view::ViewRequest {}
impl Payload for bool {}

impl<T: Payload, E> Payload for Result<T, E> {
    fn payload(&self) -> Bytes {
        self.as_ref().map(Payload::payload).unwrap_or_default()
    }

    fn set_payload(&mut self, payload: Bytes) {
        if let Ok(value) = self {
            value.set_payload(payload);
        }
    }
}

impl Payload for crate::view::ViewReply {
    fn payload(&self) -> Bytes {
        match self {
            Self::Blob(Ok(part)) => part.bytes.clone(),
            _ => Bytes::new(),
        }
    }

    fn set_payload(&mut self, payload: Bytes) {
        if let Self::Blob(Ok(part)) = self {
            part.bytes = payload;
        }
    }
}

impl Payload for DriveRequest {
    fn payload(&self) -> Bytes {
        match self {
            Self::Put(put) => put.bytes.clone(),
            _ => Bytes::new(),
        }
    }

    fn set_payload(&mut self, payload: Bytes) {
        if let Self::Put(put) = self {
            put.bytes = payload;
        }
    }
}

impl Payload for DriveReply {
    fn payload(&self) -> Bytes {
        match self {
            Self::Get(Ok(blocks)) => blocks.bytes.clone(),
            _ => Bytes::new(),
        }
    }

    fn set_payload(&mut self, payload: Bytes) {
        if let Self::Get(Ok(blocks)) = self {
            blocks.bytes = payload;
        }
    }
}

/// A message as bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// The operation's code.
    pub code: u16,
    /// Everything but the payload.
    pub body: Bytes,
    /// The payload.
    pub payload: Bytes,
}

/// Encodes a request.
pub fn pack_request<T: Serialize + Payload>(
    operations: &Operations,
    envelope: &Envelope,
    request: &T,
) -> Packed {
    let mut body = encoding::encode(envelope);
    let (code, fields) = operations.encode(request);
    body.extend_from_slice(&fields);
    Packed { code, body: body.into(), payload: request.payload() }
}

/// Decodes the envelope of a request. The rest has the fields.
///
/// # Errors
/// If the bytes do not follow the encoding.
pub fn open_envelope(body: &[u8]) -> Result<(Envelope, &[u8]), Malformed> {
    encoding::decode_front(body)
}

/// Decodes the fields of a request.
///
/// # Errors
/// If the operation is unknown, or the bytes do not follow the encoding.
pub fn unpack_request<T: DeserializeOwned + Payload>(
    operations: &Operations,
    code: u16,
    fields: &[u8],
    payload: Bytes,
) -> Result<T, BadRequest> {
    let mut request: T = operations.decode(code, fields)?;
    request.set_payload(payload);
    Ok(request)
}

/// Encodes an answer to an operation.
pub fn pack_answer<T: Serialize + Payload>(
    code: u16,
    head: AnswerHead,
    answer: &Result<T, Refusal>,
) -> Packed {
    let body = encoding::encode(&(head, answer)).into();
    Packed { code, body, payload: answer.payload() }
}

/// Decodes an answer.
///
/// # Errors
/// If the bytes do not follow the encoding.
pub fn unpack_answer<T: DeserializeOwned + Payload>(
    body: &[u8],
    payload: Bytes,
) -> Result<(AnswerHead, Result<T, Refusal>), Malformed> {
    let (head, mut answer): (AnswerHead, Result<T, Refusal>) = encoding::decode(body)?;
    answer.set_payload(payload);
    Ok((head, answer))
}

#[cfg(test)]
mod tests;
