//! S3 requests as anybody may send them: each input is what comes on one connection to a gate over a filesystem in
//! memory. Whoever asks may do everything with the bucket `b` but end that, so that what is not signed gets as far as the
//! operations.
//!
//! The first byte of an input says how it is sent: as it is, or as a request whose body is framed and summed rightly and
//! that an administrator signed, so that the fuzzer need not find out lengths, checksums and signatures.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use base::Ino;
use base::env::Env;
use bytes::Bytes;
use client::{FileKind, MakeNode};
use ring::{digest, hmac};
use s3::{
    AccountKey, AccountSet, AccountUser, Accounts, Audit, AuditRecord, Gate, GateOptions, Limits, NodeKey,
    Secret, User,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Runtime;

use super::world::{World, new_file};

/// Inputs after which everything is built anew, so that what they stored does not add up.
const INPUTS_MAX: u32 = 500;
/// No connection takes so long: all of a request is there at once.
const DEADLINE: Duration = Duration::from_secs(4);
/// A server that has said nothing for so long waits for more.
const QUIET: Duration = Duration::from_millis(4);
const POLICY: &[u8] = br#"{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":"s3:*","Resource":["arn:aws:s3:::b","arn:aws:s3:::b/*"]},{"Effect":"Deny","Principal":"*","Action":["s3:*BucketPolicy","s3:DeleteBucket"],"Resource":"arn:aws:s3:::b"}]}"#;

const FRAMED: u8 = 1;
const SUMMED: u8 = 2;
const CHUNKED: u8 = 4;
const SIGNED: u8 = 8;

const ACCESS_KEY: &str = "AKIAFUZZ";
const SECRET: &str = "secret";

/// Forgets.
struct NoAudit;

impl Audit for NoAudit {
    fn try_reserve(&self) -> bool {
        true
    }

    fn reserve(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {})
    }

    fn record(&self, _record: AuditRecord) {}
}

struct Stage {
    runtime: Option<Runtime>,
    world: Arc<World>,
    gate: Arc<Gate>,
    inputs: u32,
}

impl Stage {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let world = Arc::new(World::new("r2", 0));
        let gate = runtime.block_on(async {
            let client = world.client().await;
            let directory = MakeNode { kind: FileKind::Directory, mode: 0o777, ..new_file("b") };
            let bucket = client.make(MakeNode { open: client::OpenIntent::None, ..directory }).await.unwrap();
            assert_ne!(bucket.ino, Ino::ROOT);
            client.set_bucket_setting(bucket.ino, "policy", Some(Bytes::from_static(POLICY))).await.unwrap();
            // Signatures are checked by the time that it is.
            let env = Env::real();
            let key = NodeKey::new(&[7; NodeKey::BYTES], Env::real().random);
            let accounts = Accounts::new(env.clone(), key);
            accounts.replace(administrator());
            Gate::new(GateOptions {
                env,
                runtime: tokio::runtime::Handle::current(),
                client,
                accounts: Arc::new(accounts),
                audit: Arc::new(NoAudit),
                domains: vec!["s3.example".into()],
                ahead_bytes: 64 << 20,
                requests_max: 64,
                bodies_bytes: 16 << 20,
            })
        });
        Self { runtime: Some(runtime), world, gate, inputs: 0 }
    }

    /// The time, as signatures have it.
    fn date() -> String {
        let now_s = Env::real().clock.wall_ns().div_euclid(1_000_000_000);
        s3::format_instant(now_s).replace(['-', ':'], "")
    }

    /// What the server answers to all that is sent.
    fn answers(&mut self, sent: &[u8]) -> Vec<u8> {
        self.inputs += 1;
        let (server, client) = tokio::io::duplex(1 << 20);
        let talk = async {
            let (mut from_server, mut to_server) = tokio::io::split(client);
            to_server.write_all(sent).await.unwrap();
            let mut answers = Vec::new();
            let mut buffer = [0; 4096];
            while let Ok(Ok(len @ 1..)) = tokio::time::timeout(QUIET, from_server.read(&mut buffer)).await {
                answers.extend_from_slice(&buffer[..len]);
            }
            let _ = to_server.shutdown().await;
            let _ = from_server.read_to_end(&mut answers).await;
            answers
        };
        let limits = Limits { body_bytes_per_s_min: 0, ..Limits::default() };
        let serve = s3::serve_stream(self.gate.clone(), server, limits);
        let both = async { tokio::join!(serve, talk).1 };
        let runtime = self.runtime.as_ref().expect("it lives as long as the stage");
        runtime.block_on(async { tokio::time::timeout(DEADLINE, both).await }).expect("a connection hangs")
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.runtime.take().expect("it lives as long as the stage").shutdown_background();
        self.world.owner.stop();
    }
}

/// One user who may do everything, and the key that [`sign`] signs with.
fn administrator() -> AccountSet {
    let (uid, gid, groups) = (0, 0, Vec::new());
    let user = Arc::new(User { id: 1, name: "admin".into(), uid, gid, groups, admin: true, policy: None });
    let access_key: Arc<str> = ACCESS_KEY.into();
    let key = AccountKey {
        access_key: access_key.clone(),
        secret: Some(Secret::new(SECRET)),
        user: 1,
        disabled: false,
        created_ns: 0,
        expires_s: None,
    };
    AccountSet {
        users: HashMap::from([(1, AccountUser { user, disabled: false })]),
        keys: HashMap::from([(access_key, key)]),
        roles: HashMap::new(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sha256(bytes: &[u8]) -> String {
    hex(digest::digest(&digest::SHA256, bytes).as_ref())
}

/// The header that signs a request (version 4) with these lines, sent at `date`. Of a target that is not written as
/// it has to be signed, the signature is wrong.
fn sign(lines: &str, payload: &str, date: &str) -> String {
    let mut lines = lines.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let with_value = |pair: &str| if pair.contains('=') { pair.to_owned() } else { format!("{pair}=") };
    let mut query: Vec<String> = query.split('&').filter(|pair| !pair.is_empty()).map(with_value).collect();
    query.sort();
    let mut headers: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        let name = name.to_ascii_lowercase();
        if name == "host" || name.starts_with("x-amz-") {
            headers.entry(name).or_default().push(value.trim());
        }
    }
    let names = headers.keys().map(String::as_str).collect::<Vec<_>>().join(";");
    let headers: String =
        headers.iter().map(|(name, values)| format!("{name}:{}\n", values.join(","))).collect();
    let canonical = format!("{method}\n{path}\n{}\n{headers}\n{names}\n{payload}", query.join("&"));
    let scope = format!("{}/us-east-1/s3/aws4_request", &date[..8]);
    let text = format!("AWS4-HMAC-SHA256\n{date}\n{scope}\n{}", sha256(canonical.as_bytes()));
    let mac = |key: &[u8], text: &str| hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes());
    let key = mac(format!("AWS4{SECRET}").as_bytes(), &date[..8]);
    let parts = ["us-east-1", "s3", "aws4_request", &text];
    let signature = parts.iter().fold(key, |key, part| mac(key.as_ref(), part));
    let signature = hex(signature.as_ref());
    format!(
        "authorization: AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{scope}, SignedHeaders={names}, Signature={signature}\r\n"
    )
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| (crc >> 1) ^ (0xedb8_8320 & 0_u32.wrapping_sub(crc & 1));
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

/// The input as it is sent at `date`.
fn request(data: &[u8], date: &str) -> Vec<u8> {
    let Some((how, rest)) = data.split_first() else { return Vec::new() };
    if how & FRAMED == 0 {
        return rest.to_vec();
    }
    let end = rest.windows(2).position(|pair| pair == b"\n\n");
    let (head, body) = end.map_or((rest, &[][..]), |at| (&rest[..at], &rest[at + 2..]));
    let mut lines: Vec<u8> = Vec::new();
    for line in head.split(|byte| *byte == b'\n') {
        lines.extend_from_slice(line);
        lines.extend_from_slice(b"\r\n");
    }
    lines.extend_from_slice(b"host: localhost\r\nconnection: close\r\n");
    let sum = s3::to_base64(&crc32(body).to_be_bytes());
    let mut body = body.to_vec();
    let mut payload = sha256(&body);
    if how & CHUNKED != 0 {
        payload = "STREAMING-UNSIGNED-PAYLOAD-TRAILER".to_owned();
        let head = format!(
            "content-encoding: aws-chunked\r\nx-amz-trailer: x-amz-checksum-crc32\r\nx-amz-decoded-content-length: {}\r\n",
            body.len()
        );
        lines.extend_from_slice(head.as_bytes());
        let framed = [format!("{:x}\r\n", body.len()).as_bytes(), &body, b"\r\n0\r\n"].concat();
        body = [&framed[..], format!("x-amz-checksum-crc32:{sum}\r\n\r\n").as_bytes()].concat();
    } else if how & SUMMED != 0 {
        lines.extend_from_slice(format!("x-amz-checksum-crc32: {sum}\r\n").as_bytes());
    }
    if how & (CHUNKED | SIGNED) != 0 {
        lines.extend_from_slice(format!("x-amz-content-sha256: {payload}\r\n").as_bytes());
    }
    if how & SIGNED != 0 {
        lines.extend_from_slice(format!("x-amz-date: {date}\r\n").as_bytes());
        let signature = sign(&String::from_utf8_lossy(&lines), &payload, date);
        lines.extend_from_slice(signature.as_bytes());
    }
    lines.extend_from_slice(format!("content-length: {}\r\n\r\n", body.len()).as_bytes());
    lines.extend_from_slice(&body);
    lines
}

/// Whatever comes is answered within the deadline, never as an error of ours.
pub fn http(data: &[u8]) {
    thread_local!(static STAGE: RefCell<Option<Stage>> = const { RefCell::new(None) });
    STAGE.with_borrow_mut(|stage| {
        if stage.as_ref().is_some_and(|stage| stage.inputs >= INPUTS_MAX) {
            *stage = None;
        }
        let stage = stage.get_or_insert_with(Stage::new);
        let sent = request(data, &Stage::date());
        let answers = stage.answers(&sent);
        let answers = String::from_utf8_lossy(&answers);
        assert!(!answers.contains("HTTP/1.1 500"), "{}\n{answers}", String::from_utf8_lossy(&sent));
    });
}

/// First inputs.
pub fn seeds() -> Vec<Vec<u8>> {
    let framed = |how: u8, text: &str| [&[FRAMED | how][..], text.as_bytes()].concat();
    let mut seeds: Vec<Vec<u8>> = DOCUMENTS.iter().map(|text| framed(SUMMED, text)).collect();
    seeds.extend(PLAIN.iter().map(|text| framed(0, text)));
    seeds.extend(DOCUMENTS.iter().map(|text| framed(SIGNED, text)));
    seeds.extend(PLAIN.iter().map(|text| framed(SIGNED, text)));
    seeds.extend([0, SIGNED].map(|signed| framed(CHUNKED | signed, "PUT /b/chunked HTTP/1.1\n\nsome bytes")));
    seeds.extend(RAW.iter().map(|text| [&[0][..], text.replace('\n', "\r\n").as_bytes()].concat()));
    seeds
}

const PLAIN: &[&str] = &[
    "GET / HTTP/1.1",
    "GET /b?list-type=2&prefix=a%2F&delimiter=%2F&max-keys=3&start-after=a&encoding-type=url HTTP/1.1",
    "GET /b?versions HTTP/1.1",
    "GET /b?uploads&prefix=x HTTP/1.1",
    "GET /b/a/b HTTP/1.1\nrange: bytes=0-3,5-\nif-none-match: \"x\"",
    "HEAD /b/a/b?partNumber=1 HTTP/1.1\nif-modified-since: Mon, 23 Nov 2026 01:02:03 GMT",
    "PUT /b/a/b HTTP/1.1\nx-amz-meta-name: value\ncontent-type: text/plain\nx-amz-tagging: k=v\n\nbytes of it",
    "PUT /b/copy HTTP/1.1\nx-amz-copy-source: /b/a/b\nx-amz-metadata-directive: REPLACE",
    "DELETE /b/a/b HTTP/1.1",
    "POST /b/big?uploads HTTP/1.1",
    "GET /b/a/b?attributes HTTP/1.1\nx-amz-object-attributes: ETag,Checksum,ObjectSize",
    "OPTIONS /b/a HTTP/1.1\norigin: https://a.example\naccess-control-request-method: PUT",
    "GET /b/a/b?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=A%2F20261123%2Fx%2Fs3%2Faws4_request&X-Amz-Date=20261123T010203Z&X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature=00 HTTP/1.1",
    "GET /b HTTP/1.1\nauthorization: AWS4-HMAC-SHA256 Credential=A/20261123/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=00\nx-amz-date: 20261123T010203Z",
    "POST /b HTTP/1.1\ncontent-type: multipart/form-data; boundary=xx\n\n--xx\r\nContent-Disposition: form-data; name=\"key\"\r\n\r\n${filename}\r\n--xx\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\nbytes\r\n--xx--\r\n",
    "POST / HTTP/1.1\ncontent-type: application/x-www-form-urlencoded\n\nAction=AssumeRole&Version=2011-06-15&RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fr&RoleSessionName=s",
];

const DOCUMENTS: &[&str] = &[
    "POST /b?delete HTTP/1.1\n\n<Delete><Object><Key>a/b</Key></Object><Object><Key>c&#x20;</Key></Object><Quiet>true</Quiet></Delete>",
    "POST /b/big?uploadId=1 HTTP/1.1\n\n<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>\"x\"</ETag></Part></CompleteMultipartUpload>",
    "PUT /b/a/b?tagging HTTP/1.1\n\n<Tagging><TagSet><Tag><Key>k</Key><Value>v</Value></Tag></TagSet></Tagging>",
    "PUT /b?cors HTTP/1.1\n\n<CORSConfiguration><CORSRule><AllowedMethod>GET</AllowedMethod><AllowedOrigin>https://*.example</AllowedOrigin><MaxAgeSeconds>5</MaxAgeSeconds></CORSRule></CORSConfiguration>",
    "PUT /b/a/b?acl HTTP/1.1\n\n<AccessControlPolicy><Owner><ID>x</ID></Owner><AccessControlList><Grant><Grantee xmlns:xsi=\"http://www.w3.org/2001/XMLSchema-instance\" xsi:type=\"CanonicalUser\"><ID>x</ID></Grantee><Permission>READ</Permission></Grant></AccessControlList></AccessControlPolicy>",
    "PUT /c HTTP/1.1\n\n<CreateBucketConfiguration><LocationConstraint>eu</LocationConstraint></CreateBucketConfiguration>",
    "PUT /b?versioning HTTP/1.1\n\n<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>",
];

const RAW: &[&str] = &[
    "PUT /b/raw HTTP/1.1\nhost: localhost\ntransfer-encoding: chunked\n\n5\nhello\n0\n\nGET /b/raw HTTP/1.1\nhost: b.s3.example\n\n",
    "PUT /b/wait HTTP/1.1\nhost: localhost\nexpect: 100-continue\ncontent-length: 3\n\nabc",
    "GET http://localhost/b HTTP/1.0\n\n",
];
