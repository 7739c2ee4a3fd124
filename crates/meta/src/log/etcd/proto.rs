//! The messages of etcd's API that the engine uses, by the numbers of their fields in `etcdserverpb/rpc.proto`.
//!
//! Written by hand: there are few, they never change, and generated ones would need a compiler for them at build time.

use bytes::Bytes;
use prost::{Message, Oneof};

/// Which cluster and which moment an answer is from.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Header {
    #[prost(uint64, tag = "1")]
    pub(super) cluster_id: u64,
    /// The member that answers.
    #[prost(uint64, tag = "2")]
    pub(super) member_id: u64,
    #[prost(int64, tag = "3")]
    pub(super) revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
    /// The revision of the last change.
    #[prost(int64, tag = "3")]
    pub(super) mod_revision: i64,
    /// The number of changes since the key exists.
    #[prost(int64, tag = "4")]
    pub(super) version: i64,
    #[prost(bytes = "bytes", tag = "5")]
    pub(super) value: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeRequest {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
    /// The first key that is not wanted; empty for a single key.
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) range_end: Bytes,
    #[prost(int64, tag = "3")]
    pub(super) limit: i64,
    /// 0 for the newest.
    #[prost(int64, tag = "4")]
    pub(super) revision: i64,
    #[prost(bool, tag = "8")]
    pub(super) keys_only: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeResponse {
    #[prost(message, repeated, tag = "2")]
    pub(super) kvs: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PutRequest {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) value: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DeleteRangeRequest {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) range_end: Bytes,
}

/// An answer of which nothing is needed.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Ignored {}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Operation {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    DeleteRange(DeleteRangeRequest),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RequestOp {
    #[prost(oneof = "Operation", tags = "1, 2, 3")]
    pub(super) operation: Option<Operation>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Outcome {
    #[prost(message, tag = "1")]
    Range(RangeResponse),
    #[prost(message, tag = "2")]
    Put(Ignored),
    #[prost(message, tag = "3")]
    DeleteRange(Ignored),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ResponseOp {
    #[prost(oneof = "Outcome", tags = "1, 2, 3")]
    pub(super) outcome: Option<Outcome>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Expected {
    #[prost(int64, tag = "6")]
    ModRevision(i64),
    #[prost(bytes = "bytes", tag = "7")]
    Value(Bytes),
}

/// A condition of a transaction. Its kind of comparison, `result`, is 0: equal.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Compare {
    /// What is compared: 2 for the revision of the last change, 3 for the value.
    #[prost(int32, tag = "2")]
    pub(super) target: i32,
    #[prost(bytes = "bytes", tag = "3")]
    pub(super) key: Bytes,
    #[prost(oneof = "Expected", tags = "6, 7")]
    pub(super) expected: Option<Expected>,
    /// If not empty, all keys from `key` on and before this one are compared.
    #[prost(bytes = "bytes", tag = "64")]
    pub(super) range_end: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub(super) compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(super) success: Vec<RequestOp>,
    #[prost(message, repeated, tag = "3")]
    pub(super) failure: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(bool, tag = "2")]
    pub(super) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(super) responses: Vec<ResponseOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CompactionRequest {
    #[prost(int64, tag = "1")]
    pub(super) revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CompactionResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StatusRequest {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StatusResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(string, tag = "2")]
    pub(super) version: String,
    /// The member that leads.
    #[prost(uint64, tag = "4")]
    pub(super) leader: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct MemberOfCluster {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    /// Empty until it has begun.
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(string, repeated, tag = "3")]
    pub(super) peer_urls: Vec<String>,
    #[prost(bool, tag = "5")]
    pub(super) is_learner: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct MemberListRequest {}

/// The answer to all requests about members.
#[derive(Clone, PartialEq, Message)]
pub(super) struct MembersResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(message, repeated, tag = "2")]
    pub(super) members: Vec<MemberOfCluster>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct MemberAddRequest {
    #[prost(string, repeated, tag = "1")]
    pub(super) peer_urls: Vec<String>,
    #[prost(bool, tag = "2")]
    pub(super) is_learner: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct MemberAddResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(message, optional, tag = "2")]
    pub(super) member: Option<MemberOfCluster>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct MemberRemoveRequest {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct MemberPromoteRequest {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
}

/// A request, and where it goes.
pub(super) trait Call: Message + Clone + 'static {
    type Answer: Message + Default + 'static;
    const PATH: &'static str;

    fn header(answer: &Self::Answer) -> Option<&Header>;
}

impl Call for TxnRequest {
    type Answer = TxnResponse;
    const PATH: &'static str = "/etcdserverpb.KV/Txn";

    fn header(answer: &TxnResponse) -> Option<&Header> {
        answer.header.as_ref()
    }
}

impl Call for CompactionRequest {
    type Answer = CompactionResponse;
    const PATH: &'static str = "/etcdserverpb.KV/Compact";

    fn header(answer: &CompactionResponse) -> Option<&Header> {
        answer.header.as_ref()
    }
}

impl Call for StatusRequest {
    type Answer = StatusResponse;
    const PATH: &'static str = "/etcdserverpb.Maintenance/Status";

    fn header(answer: &StatusResponse) -> Option<&Header> {
        answer.header.as_ref()
    }
}

impl Call for MemberListRequest {
    type Answer = MembersResponse;
    const PATH: &'static str = "/etcdserverpb.Cluster/MemberList";

    fn header(answer: &MembersResponse) -> Option<&Header> {
        answer.header.as_ref()
    }
}

impl Call for MemberAddRequest {
    type Answer = MemberAddResponse;
    const PATH: &'static str = "/etcdserverpb.Cluster/MemberAdd";

    fn header(answer: &MemberAddResponse) -> Option<&Header> {
        answer.header.as_ref()
    }
}

impl Call for MemberRemoveRequest {
    type Answer = MembersResponse;
    const PATH: &'static str = "/etcdserverpb.Cluster/MemberRemove";

    fn header(answer: &MembersResponse) -> Option<&Header> {
        answer.header.as_ref()
    }
}

impl Call for MemberPromoteRequest {
    type Answer = MembersResponse;
    const PATH: &'static str = "/etcdserverpb.Cluster/MemberPromote";

    fn header(answer: &MembersResponse) -> Option<&Header> {
        answer.header.as_ref()
    }
}

impl Compare {
    /// Whether the key has exactly this value. False if it does not exist.
    pub(super) fn value(key: Bytes, value: Bytes) -> Self {
        Self { target: 3, key, expected: Some(Expected::Value(value)), range_end: Bytes::new() }
    }

    /// Whether the key was last changed at this revision; 0 if it does not exist.
    pub(super) fn mod_revision(key: Bytes, revision: i64) -> Self {
        Self { target: 2, key, expected: Some(Expected::ModRevision(revision)), range_end: Bytes::new() }
    }

    /// Whether there are no keys from `key` on and before `range_end`.
    pub(super) fn none(key: Bytes, range_end: Bytes) -> Self {
        Self { range_end, ..Self::mod_revision(key, 0) }
    }
}

impl RequestOp {
    pub(super) fn get(key: Bytes) -> Self {
        Self::range(RangeRequest { key, ..RangeRequest::default() })
    }

    pub(super) fn range(range: RangeRequest) -> Self {
        Self { operation: Some(Operation::Range(range)) }
    }

    pub(super) fn put(key: Bytes, value: Bytes) -> Self {
        Self { operation: Some(Operation::Put(PutRequest { key, value })) }
    }

    /// Deletes the keys from `key` on and before `range_end`.
    pub(super) fn delete(key: Bytes, range_end: Bytes) -> Self {
        Self { operation: Some(Operation::DeleteRange(DeleteRangeRequest { key, range_end })) }
    }
}

impl TxnResponse {
    /// What the ranges of the transaction found, in their order.
    pub(super) fn into_ranges(self) -> impl Iterator<Item = Vec<KeyValue>> {
        self.responses.into_iter().filter_map(|response| match response.outcome {
            Some(Outcome::Range(range)) => Some(range.kvs),
            _ => None,
        })
    }

    pub(super) fn revision(&self) -> i64 {
        self.header.as_ref().map_or(0, |header| header.revision)
    }
}
