//! Decoders with a way to give them any bytes, for the fuzzers and for the test that does the same without them.
//!
//! No input may panic, hang or take memory out of proportion. What a decoder accepts must be the same after it was
//! encoded and decoded again.

use std::fmt::Debug;
use std::str::FromStr;

use meta::values::{
    BlobRecord, Dentry, ExtentPlace, ExtentUse, IdRange, Inode, LooseBlob, Orphan, Piece, Residence, Slot,
    TierState, Usage, Value,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

#[path = "../../crates/forebay/src/node/node_file.rs"]
#[allow(dead_code, reason = "only its shape matters here")]
mod node_file;
#[path = "../../crates/client/tests/suite/common.rs"]
mod world;

mod http;
mod seeds;

pub use seeds::seeds;

const BLOCK_BYTES: usize = base::units::BLOCK_BYTES as usize;

/// Takes any bytes.
pub type Target = fn(&[u8]);

/// Name and decoder. `tests/fuzz.sh` and `crates/sim/tests/suite/decoders.rs` run all of them.
pub const TARGETS: &[(&str, Target)] = &[
    ("superblock", |data| drive::fuzzing::superblock(&whole_blocks(data, 1))),
    ("segment", |data| drive::fuzzing::segment(&whole_blocks(data, 1))),
    ("frame", |data| drive::fuzzing::frame(&whole_blocks(data, 4))),
    ("checkpoint", |data| drive::fuzzing::run(&whole_blocks(data, 4))),
    ("log", meta::fuzzing::frame),
    ("batch", batch),
    ("values", values),
    ("acl", meta::fuzzing::acl),
    ("control", control),
    ("node", json::<node_file::NodeFile>),
    ("admin", admin),
    ("messages", messages),
    ("texts", texts),
    ("policy", policy),
    ("blob", layout::fuzz_blob),
    ("packed", layout::fuzz_packed_table),
    ("http", http::http),
    ("fuse", fuse::fuzz_request),
];

/// Structures of a drive are whole blocks, at most so many here: the fuzzer need not find that out.
fn whole_blocks(data: &[u8], blocks_max: usize) -> Vec<u8> {
    let mut bytes = data[..data.len().min(blocks_max * BLOCK_BYTES)].to_vec();
    bytes.resize(bytes.len().max(1).next_multiple_of(BLOCK_BYTES), 0);
    bytes
}

fn batch(data: &[u8]) {
    if let Ok(batch) = meta::batch::Batch::decode(data) {
        assert_eq!(batch.encode(), data);
    }
    // A log of two entries: they may be parts of one batch.
    let (first, second) = data.split_at(data.len() / 2);
    let mut assembler = meta::batch::Assembler::default();
    for (seq, entry) in (1..).zip([first, second]) {
        let entry = meta::log::LogEntry { seq: base::Seq(seq), epoch: base::Epoch(1), batch: entry.to_vec() };
        let _ = assembler.push(&entry);
    }
}

fn value<V: Value>(data: &[u8]) {
    if let Ok(value) = V::decode(data) {
        let again = value.encode();
        assert_eq!(V::decode(&again).unwrap().encode(), again);
    }
}

fn values(data: &[u8]) {
    let Some((table, data)) = data.split_first() else { return };
    match table % 14 {
        0 => value::<Inode>(data),
        1 => value::<Dentry>(data),
        2 => value::<Piece>(data),
        3 => value::<ExtentUse>(data),
        4 => value::<IdRange>(data),
        5 => value::<ExtentPlace>(data),
        6 => value::<Slot>(data),
        7 => value::<Orphan>(data),
        8 => value::<Usage>(data),
        9 => value::<Residence>(data),
        10 => value::<BlobRecord>(data),
        11 => value::<LooseBlob>(data),
        12 => value::<TierState>(data),
        _ => value::<u64>(data),
    }
}

fn json<T: DeserializeOwned + Serialize>(data: &[u8]) {
    if let Ok(record) = serde_json::from_slice::<T>(data) {
        let again = serde_json::to_vec(&record).unwrap();
        let back: T = serde_json::from_slice(&again).unwrap();
        assert_eq!(serde_json::to_vec(&back).unwrap(), again);
    }
}

fn control(data: &[u8]) {
    json::<control::ClusterRecord>(data);
    json::<control::DriveRecord>(data);
    json::<control::FilesystemRecord>(data);
    json::<layout::PlacementGroup>(data);
    json::<control::UserRecord>(data);
    json::<control::AccessKeyRecord>(data);
    json::<control::RoleRecord>(data);
    json::<control::StoreRecord>(data);
}

fn admin(data: &[u8]) {
    json::<admin::AddDrive>(data);
    json::<admin::CreateFilesystem>(data);
    json::<admin::MountRequest>(data);
    json::<admin::AddUser>(data);
    json::<admin::AddKey>(data);
    json::<admin::PolicyInfo>(data);
}

fn message<T: DeserializeOwned + Serialize + PartialEq + Debug>(data: &[u8]) {
    if let Ok(message) = wire::encoding::decode::<T>(data) {
        let again = wire::encoding::encode(&message);
        assert_eq!(wire::encoding::decode::<T>(&again).unwrap(), message);
    }
}

fn messages(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    match kind % 8 {
        0 => message::<wire::meta::MetaRequest>(rest),
        1 => message::<wire::meta::MetaReply>(rest),
        2 => message::<wire::message::DriveRequest>(rest),
        3 => message::<wire::message::DriveReply>(rest),
        4 => message::<wire::message::SessionRequest>(rest),
        5 => message::<wire::message::StreamEvent>(rest),
        6 => message::<wire::message::Envelope>(rest),
        _ => frames(rest),
    }
}

/// Frames of a connection, and the requests in them.
fn frames(mut data: &[u8]) {
    loop {
        let frame = {
            let mut reading = std::pin::pin!(wire::frame::read_frame(&mut data));
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            match reading.as_mut().poll(&mut context) {
                std::task::Poll::Ready(Ok(Some(frame))) => frame,
                _ => return,
            }
        };
        let message = frame.message;
        let Ok((_, fields)) = wire::message::open_envelope(&message.body) else { continue };
        let (owner, drive) = (wire::message::OWNER, wire::message::DRIVE);
        let payload = message.payload;
        let _ = owner.decode::<wire::meta::MetaRequest>(message.code, fields);
        let _ = wire::message::unpack_request::<wire::message::DriveRequest>(
            &drive,
            message.code,
            fields,
            payload,
        );
    }
}

fn text<T: FromStr + ToString + PartialEq + Debug>(text: &str)
where
    T::Err: Debug,
{
    if let Ok(value) = text.parse::<T>() {
        assert_eq!(value.to_string().parse::<T>().unwrap(), value);
    }
}

/// What people type.
fn texts(data: &[u8]) {
    let Ok(input) = std::str::from_utf8(data) else { return };
    text::<layout::Profile>(input);
    text::<layout::FailureDomain>(input);
    text::<base::ClusterId>(input);
    let _ = base::units::parse_size(input);
    let _ = input.parse::<posix::fuse::MountFlags>();
    let _ = s3::ObjectKey::parse(input);
}

/// Policies of users and buckets, and what they say about a request. A denial of everything must win.
fn policy(data: &[u8]) {
    use s3::policy::{Policy, PolicyOf, decide};
    let tags = [("a".to_owned(), "1".to_owned())];
    let request = s3::PolicyRequest {
        identity: None,
        action: "s3:ListBucket",
        bucket: "b",
        key: Some("home/ann/ß"),
        owns_bucket: false,
        bucket_policy: None,
        source_ip: Some(std::net::Ipv4Addr::LOCALHOST.into()),
        is_secure: true,
        now_s: 1_795_320_306,
        prefix: Some("home/"),
        delimiter: None,
        max_keys: Some(1000),
        more: s3::PolicyFacts {
            referer: Some("http://example.com/"),
            existing_tags: Some(&tags),
            request_tags: Some(&tags),
            ..s3::PolicyFacts::default()
        },
    };
    let user = |policy, limits| {
        let policy = Some(std::sync::Arc::new(policy));
        let (name, groups) = ("ann".into(), Vec::new());
        let user = s3::User { id: 7, name, uid: 0, gid: 0, groups, admin: true, policy };
        s3::Identity { user: user.into(), access_key: "AKIA".into(), limits, is_session: false }
    };
    if let Ok(policy) = Policy::parse(data, PolicyOf::Bucket("b")) {
        let _ = decide(&s3::PolicyRequest { bucket_policy: Some(&policy), ..request });
        let denied = user(Policy::deny_everything(), Vec::new());
        let verdict =
            decide(&s3::PolicyRequest { bucket_policy: Some(&policy), identity: Some(&denied), ..request });
        assert_eq!(verdict, s3::Verdict::Denied);
    }
    if let Ok(policy) = Policy::parse(data, PolicyOf::User) {
        let limited = user(policy, vec![Policy::deny_everything().into()]);
        assert_eq!(decide(&s3::PolicyRequest { identity: Some(&limited), ..request }), s3::Verdict::Denied);
    }
}
