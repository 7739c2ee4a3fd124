//! First inputs for the fuzzers. They come from the golden files and from encoders, so they are of the format of today.

use base::{ClusterId, Epoch, ExtentId, Ino, LedgerId, MapId, PgId};
use bytes::Bytes;
use layout::{BlobId, BlobRange, PackedPiece};
use meta::batch::Batch;
use meta::values::{Dentry, ExtentPlace, ExtentUse, Piece, PieceContent, Usage, Value};
use wire::meta::{Content, ExtentRef, FileKind, MetaRequest};

/// Packed blocks: number and bytes; see `crates/drive/tests/suite/golden.rs`.
const DRIVE: &[u8] = include_bytes!("../../crates/drive/tests/golden/drive-v2.bin");

/// A first input.
pub struct Seed {
    pub target: &'static str,
    pub name: String,
    pub bytes: Vec<u8>,
}

/// First inputs for all targets.
pub fn seeds() -> Vec<Seed> {
    let mut seeds = Vec::new();
    let mut put = |target: &'static str, name: &str, bytes: &[u8]| {
        seeds.push(Seed { target, name: name.to_owned(), bytes: bytes.to_vec() });
    };
    for (index, packed) in DRIVE.chunks_exact(4100).enumerate() {
        let block = &packed[4..];
        let target = match &block[..4] {
            b"FBFR" => "frame",
            b"FBIX" => "checkpoint",
            b"FBSE" => "segment",
            b"FORE" => "superblock",
            _ => continue,
        };
        put(target, &format!("golden-{index}"), block);
    }
    for (index, bytes) in values().into_iter().enumerate() {
        put("values", &format!("value-{index}"), &bytes);
    }
    let batch = Batch { changes: vec![(b"key".to_vec(), Some(b"value".to_vec())), (b"gone".to_vec(), None)] };
    put("batch", "two", &batch.encode());
    // Two parts of one length.
    let long = Batch { changes: vec![(vec![b'k'; 118], None)] };
    put("batch", "parts", &long.entries(0).concat());
    put("log", "frame", &meta::fuzzing::sample_frame(&batch.encode()));
    let acl = [2_u32, 0x6_0001, 0, 0x4_0004, 0, 0x4_0020, 0].map(u32::to_le_bytes).concat();
    put("acl", "three", &acl);
    for (index, text) in JSON.iter().enumerate() {
        for target in ["control", "node", "admin"] {
            put(target, &format!("json-{index}"), text.as_bytes());
        }
    }
    for (index, text) in TEXTS.iter().enumerate() {
        put("texts", &format!("text-{index}"), text.as_bytes());
    }
    for (index, text) in POLICIES.iter().enumerate() {
        put("policy", &format!("policy-{index}"), text.as_bytes());
    }
    put("blob", "one", &blob());
    let piece = |number| PackedPiece { map: MapId(number), off: 0, extent_off: 0, len: 1 };
    put("packed", "two", &layout::encode_packed_table(&[piece(1), piece(2)]));
    for (index, bytes) in super::http::seeds().into_iter().enumerate() {
        put("http", &format!("request-{index}"), &bytes);
    }
    let request = MetaRequest::GetAttr { ino: Ino(1) };
    put("messages", "request", &[&[0], wire::encoding::encode(&request).as_slice()].concat());
    let packed =
        wire::message::pack_request(&wire::message::OWNER, &wire::message::Envelope::default(), &request);
    let frame =
        wire::frame::Frame { kind: wire::frame::FrameKind::Call, service: 1, call: 1, message: packed };
    put("messages", "frame", &[&[7], frame.head().as_ref()].concat());
    put("messages", "empty", &[0; 32]);
    (1..54).for_each(|opcode| put("fuse", &format!("request-{opcode}"), &kernel_request(opcode)));
    seeds
}

/// A request of the kernel, with a body that is long enough for any kind.
fn kernel_request(opcode: u32) -> Vec<u8> {
    let mut bytes = [0_u32, opcode].map(u32::to_ne_bytes).concat();
    bytes.resize(40 + 88, 0);
    bytes.extend(b"name\0other\0");
    bytes
}

/// The front of a blob with two ranges.
fn blob() -> Vec<u8> {
    let mut builder = layout::BlobBuilder::new(layout::BLOB_BYTES_MIN);
    for number in 1..3 {
        let (map, extent) = (MapId(number), ExtentId(number));
        let range =
            BlobRange { ino: Ino(number), map, off: 0, len: 0, block: 0, extent, layer: 1, crc32c: 0 };
        builder.push(range, vec![Bytes::from(vec![1; 5000])]);
    }
    let id = BlobId { ledger: LedgerId(1), serial: 7, term: Epoch(2) };
    builder.finish(ClusterId([7; 16]), id, 1).parts[..2].concat()
}

/// A byte that chooses the table, as `targets` reads it, and a value.
fn values() -> Vec<Vec<u8>> {
    let tagged = |table: u8, bytes: Vec<u8>| [vec![table], bytes].concat();
    let extent = ExtentRef { id: ExtentId(3), pg: PgId(4), k: 4, n: 6, extent_len: 8192, extent_off: 4096 };
    let piece = |content| Piece { len: 3, birth_layer: 1, content }.encode();
    let mut inode = hex_inode();
    inode.insert(0, 0);
    vec![
        inode,
        tagged(1, Dentry { ino: Ino(5), kind: FileKind::Directory, cookie: 9 }.encode()),
        tagged(2, piece(PieceContent::Data(Content::Inline(Bytes::from_static(b"abc"))))),
        tagged(
            2,
            Piece { len: 4096, birth_layer: 1, content: PieceContent::Data(Content::Extent(extent)) }
                .encode(),
        ),
        tagged(2, piece(PieceContent::Map { map: MapId(1 << 63 | 7), off: 4096 })),
        tagged(3, ExtentUse { refs: 2, live_bytes: 8192 }.encode()),
        tagged(5, ExtentPlace { pg: PgId(1), n: 6, k: 4, shard: 0, extent_len: 9 }.encode()),
        tagged(8, Usage::default().encode()),
        tagged(9, 7_u64.encode()),
    ]
}

/// The golden inode of `docs/formats/ledger.md`.
fn hex_inode() -> Vec<u8> {
    let mut bytes = vec![1, 1, 0, 0];
    bytes.resize(130, 0);
    bytes[4] = 2;
    bytes[24] = 1;
    bytes.extend([0; 4]);
    bytes
}

const JSON: &[&str] = &[
    r#"{"id":"00112233-4455-6677-8899-aabbccddeeff","map_epoch":1,"next_drive":6,"next_group":9,"next_filesystem":2}"#,
    r#"{"id":0,"uuid":"00112233-4455-6677-8899-aabbccddeeff","path":"/x","domain":0,"capacity_bytes":1073741824,"state":"up"}"#,
    r#"{"id":1,"name":"main","ledger":1,"profile":"4+2","groups":[0,1],"provisioned_bytes":null,"mount":"/mnt"}"#,
    r#"{"id":1,"name":"main","ledger":1,"profile":"4+2","groups":[0],"provisioned_bytes":null,"mount":null,"tier":{"store":1,"retention_s":86400,"cue_s":3600,"detaching":false}}"#,
    r#"{"id":1,"epoch":1,"members":[0,1,2,3,4,5]}"#,
    r#"{"pid":1,"mount":null,"addresses":{"admin":"/run/admin.sock"},"filesystem":"main","cluster":"00112233-4455-6677-8899-aabbccddeeff","version":"0.1.0"}"#,
    r#"{"id":7,"name":"ann","uid":1000,"gid":1000,"groups":[4],"admin":false,"disabled":false,"policy":"{}","created_ns":5}"#,
    r#"{"access_key":"AKIAANN","user":7,"sealed_secret":"c2VhbGVk","disabled":false,"created_ns":5,"expires_s":9}"#,
    r#"{"target":{"bucket":"b"},"policy":"{}"}"#,
    r#"{"path":null,"size":null,"size_bytes":1073741824,"name":"a","profile":"r3"}"#,
];

const POLICIES: &[&str] = &[
    r#"{"Version":"2012-10-17","Statement":[{"Sid":"a","Effect":"Allow","Principal":{"AWS":["ann","arn:aws:iam::1:user/bob"]},"Action":["s3:Get*","s3:List?ucket"],"Resource":["arn:aws:s3:::b","arn:aws:s3:::b/${aws:username}/*"]}]}"#,
    r#"{"Version":"2012-10-17","Statement":{"Effect":"Allow","Action":"s3:*","Resource":"*","Condition":{"StringEquals":{"s3:ExistingObjectTag/a":"1","s3:RequestObjectTag/a":"1","s3:x-amz-acl":"private"},"ForAnyValue:StringLike":{"s3:RequestObjectTagKeys":["a*"]},"StringLike":{"aws:Referer":"http://*"}}}}"#,
    r#"{"Version":"2012-10-17","Statement":{"Effect":"Deny","NotAction":"s3:*","NotResource":"arn:aws:s3:::b/x","Condition":{"IpAddress":{"aws:SourceIp":["10.0.0.0/8","::1"]},"StringLikeIfExists":{"s3:prefix":"home/${aws:username}/*"},"Bool":{"aws:SecureTransport":"true"}}}}"#,
    r#"{"Version":"2008-10-17","Id":"x","Statement":[{"Effect":"Allow","NotPrincipal":"*","Action":"*","Resource":"*","Condition":{"NumericLessThan":{"s3:max-keys":5},"DateGreaterThan":{"aws:CurrentTime":"2026-11-22T04:05:06Z"},"Null":{"s3:delimiter":true}}}]}"#,
];

const TEXTS: &[&str] = &[
    "4+2",
    "12/7/9",
    "r3",
    "1+0",
    "20/10/15",
    "drive",
    "rack",
    "10GiB",
    "1.5 TB",
    "4096",
    "ro,noatime,direct",
    "00112233-4455-6677-8899-aabbccddeeff",
    "a/b//c",
    "photos/2026/",
];
