//! Digests of a body in transit: MD5 for the ETag, and the one checksum that the client chose.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use client::object::{Checksum, ChecksumAlgorithm, ChecksumKind, ChecksumType};
use hyper::StatusCode;
use hyper::header::HeaderMap;
use s3s::crypto::{Checksum as _, Crc32, Crc32c, Crc64Nvme, Md5, Sha1, Sha256};
use s3s::{S3Result, s3_error};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;

use crate::error::custom;

/// Digests of larger bodies are computed in a task of their own.
const BESIDE_BYTES: u64 = 128 << 10;
/// Parts of a body, of up to 128 KiB each, that wait for that task. Its memory also covers the part that is being
/// digested and the part that waits for the queue.
const BESIDE_PARTS: usize = 2;
const BESIDE_KIB: u32 = 512;

const ALGORITHMS: [ChecksumAlgorithm; 5] = [
    ChecksumAlgorithm::Crc32,
    ChecksumAlgorithm::Crc32c,
    ChecksumAlgorithm::Crc64Nvme,
    ChecksumAlgorithm::Sha1,
    ChecksumAlgorithm::Sha256,
];

/// The algorithm's name in `x-amz-checksum-algorithm`.
pub(crate) fn name(algorithm: ChecksumAlgorithm) -> &'static str {
    match algorithm {
        ChecksumAlgorithm::Crc32 => "CRC32",
        ChecksumAlgorithm::Crc32c => "CRC32C",
        ChecksumAlgorithm::Crc64Nvme => "CRC64NVME",
        ChecksumAlgorithm::Sha1 => "SHA1",
        ChecksumAlgorithm::Sha256 => "SHA256",
    }
}

/// Finds an algorithm by its name.
pub(crate) fn algorithm(wanted: &str) -> S3Result<ChecksumAlgorithm> {
    let found = ALGORITHMS.into_iter().find(|algorithm| name(*algorithm).eq_ignore_ascii_case(wanted));
    found.ok_or_else(|| {
        s3_error!(InvalidRequest, "Checksum algorithm provided is unsupported: {wanted} is none of CRC32, CRC32C, CRC64NVME, SHA1, SHA256.")
    })
}

/// The header or trailer that carries a checksum.
pub(crate) fn header(algorithm: ChecksumAlgorithm) -> &'static str {
    match algorithm {
        ChecksumAlgorithm::Crc32 => "x-amz-checksum-crc32",
        ChecksumAlgorithm::Crc32c => "x-amz-checksum-crc32c",
        ChecksumAlgorithm::Crc64Nvme => "x-amz-checksum-crc64nvme",
        ChecksumAlgorithm::Sha1 => "x-amz-checksum-sha1",
        ChecksumAlgorithm::Sha256 => "x-amz-checksum-sha256",
    }
}

enum Sum {
    Crc32(Crc32),
    Crc32c(Crc32c),
    Crc64Nvme(Crc64Nvme),
    Sha1(Sha1),
    Sha256(Sha256),
}

impl Sum {
    fn new(algorithm: ChecksumAlgorithm) -> Self {
        match algorithm {
            ChecksumAlgorithm::Crc32 => Self::Crc32(Crc32::new()),
            ChecksumAlgorithm::Crc32c => Self::Crc32c(Crc32c::new()),
            ChecksumAlgorithm::Crc64Nvme => Self::Crc64Nvme(Crc64Nvme::new()),
            ChecksumAlgorithm::Sha1 => Self::Sha1(Sha1::new()),
            ChecksumAlgorithm::Sha256 => Self::Sha256(Sha256::new()),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Crc32(sum) => sum.update(bytes),
            Self::Crc32c(sum) => sum.update(bytes),
            Self::Crc64Nvme(sum) => sum.update(bytes),
            Self::Sha1(sum) => sum.update(bytes),
            Self::Sha256(sum) => sum.update(bytes),
        }
    }

    fn finish(self) -> Vec<u8> {
        match self {
            Self::Crc32(sum) => sum.finalize().to_vec(),
            Self::Crc32c(sum) => sum.finalize().to_vec(),
            Self::Crc64Nvme(sum) => sum.finalize().to_vec(),
            Self::Sha1(sum) => sum.finalize().to_vec(),
            Self::Sha256(sum) => sum.finalize().to_vec(),
        }
    }
}

/// Digests that the client sent for its body.
#[derive(Default)]
pub(crate) struct Claims {
    md5: Option<Vec<u8>>,
    algorithm: Option<ChecksumAlgorithm>,
    /// From a header; `None` if a trailer brings it.
    value: Option<Vec<u8>>,
    in_trailer: bool,
}

impl Claims {
    /// Reads the digests from a request. `chosen` is the algorithm that the upload of a part was begun with.
    pub(crate) fn of(headers: &HeaderMap, chosen: Option<ChecksumAlgorithm>) -> S3Result<Self> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let md5 = Self::md5_of(headers)?;
        let mut given =
            ALGORITHMS.into_iter().filter_map(|algorithm| Some((algorithm, text(header(algorithm))?)));
        let mut trailers = named_trailers(text("x-amz-trailer").unwrap_or_default())?;
        let in_trailer = trailers.pop();
        if !trailers.is_empty() {
            return Err(several());
        }
        for name in headers.keys() {
            check_name(name.as_str())?;
        }
        let named = text("x-amz-sdk-checksum-algorithm").or_else(|| text("x-amz-checksum-algorithm"));
        let (algorithm, value) = match (given.next(), in_trailer) {
            (Some(_), Some(_)) => return Err(several()),
            (Some((algorithm, value)), None) => {
                let value = unbase64(value.as_bytes()).ok_or_else(|| {
                    s3_error!(InvalidRequest, "Value for {} header is invalid.", header(algorithm))
                })?;
                (Some(algorithm), Some(value))
            }
            (None, Some(algorithm)) => (Some(algorithm), None),
            (None, None) => (named.map(self::algorithm).transpose()?.or(chosen), None),
        };
        if given.next().is_some() {
            return Err(several());
        }
        Ok(Self { md5, algorithm, value, in_trailer: in_trailer.is_some() })
    }

    fn md5_of(headers: &HeaderMap) -> S3Result<Option<Vec<u8>>> {
        let Some(value) = headers.get("content-md5") else { return Ok(None) };
        match unbase64(value.as_bytes()).filter(|md5| md5.len() == 16) {
            Some(md5) => Ok(Some(md5)),
            None => Err(s3_error!(InvalidDigest, "The Content-MD5 you specified was invalid.")),
        }
    }

    /// The algorithm that is computed.
    pub(crate) fn algorithm(&self) -> Option<ChecksumAlgorithm> {
        self.algorithm
    }
}

/// Headers about checksums that have no checksum in them.
const ABOUT: [&str; 3] = ["x-amz-checksum-algorithm", "x-amz-checksum-mode", "x-amz-checksum-type"];

/// Refuses an unknown checksum: it would never be compared.
fn check_name(name: &str) -> S3Result<Option<ChecksumAlgorithm>> {
    let known = ALGORITHMS.into_iter().find(|algorithm| name == header(*algorithm));
    if known.is_none() && name.starts_with("x-amz-checksum-") && !ABOUT.contains(&name) {
        return Err(s3_error!(InvalidRequest, "The checksum {name} is not supported."));
    }
    Ok(known)
}

/// The checksums that `x-amz-trailer` announces.
fn named_trailers(text: &str) -> S3Result<Vec<ChecksumAlgorithm>> {
    let names = text.split(',').map(|name| name.trim().to_ascii_lowercase());
    names.filter_map(|name| check_name(&name).transpose()).collect()
}

fn several() -> s3s::S3Error {
    s3_error!(
        InvalidRequest,
        "Expecting a single x-amz-checksum- header. Multiple checksum types are not allowed."
    )
}

/// Digests that are being computed.
pub(crate) struct Digests {
    claims: Claims,
    md5: Md5,
    sum: Option<(ChecksumAlgorithm, Sum)>,
}

/// The digests of a whole body.
pub(crate) struct Digested {
    pub(crate) md5: [u8; 16],
    pub(crate) checksum: Option<Checksum>,
}

impl Digested {
    /// The ETag of an object that was put in one piece.
    pub(crate) fn etag(&self) -> String {
        hex(&self.md5)
    }
}

impl Digests {
    pub(crate) fn new(claims: Claims) -> Self {
        let sum = claims.algorithm.map(|algorithm| (algorithm, Sum::new(algorithm)));
        Self { claims, md5: Md5::new(), sum }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.md5.update(bytes);
        if let Some((_, sum)) = &mut self.sum {
            sum.update(bytes);
        }
    }

    /// Compares with the client's digests; `trailer` returns a trailer of the body.
    pub(crate) fn finish(self, trailer: impl FnOnce(&str) -> Option<String>) -> S3Result<Digested> {
        let md5: [u8; 16] = self.md5.finalize().as_ref().try_into().expect("an MD5 has 16 bytes");
        if self.claims.md5.is_some_and(|claimed| claimed != md5) {
            return Err(s3_error!(
                BadDigest,
                "The Content-MD5 you specified did not match what we received."
            ));
        }
        let Some((algorithm, sum)) = self.sum else { return Ok(Digested { md5, checksum: None }) };
        let value = sum.finish();
        let mut claimed = self.claims.value;
        if self.claims.in_trailer {
            let text = trailer(header(algorithm)).ok_or_else(|| {
                custom(
                    "MalformedTrailerError",
                    StatusCode::BAD_REQUEST,
                    "The request named a trailing checksum and did not send it.",
                )
            })?;
            let value = unbase64(text.trim().as_bytes()).ok_or_else(|| {
                s3_error!(InvalidRequest, "Value for {} trailing header is invalid.", header(algorithm))
            })?;
            claimed = Some(value);
        }
        if claimed.is_some_and(|claimed| claimed != value) {
            return Err(s3_error!(
                BadDigest,
                "The {} you specified did not match the calculated checksum.",
                name(algorithm)
            ));
        }
        let of = ChecksumType { algorithm, kind: ChecksumKind::FullObject };
        Ok(Digested { md5, checksum: Some(Checksum { of, value: value.into() }) })
    }
}

/// Digests of a body while it is received. Those of a large body are computed in a task of their own, on another core
/// if one is idle: MD5 alone takes as long as writing to the drives.
pub(crate) enum Passing {
    Here(Box<Digests>),
    Beside { bodies: mpsc::Sender<Bytes>, digests: JoinHandle<Digests>, _memory: OwnedSemaphorePermit },
}

impl Passing {
    /// For a body of `len` bytes. One permit of `memory` is 1 KiB.
    pub(crate) fn new(mut digests: Digests, len: u64, memory: &Arc<Semaphore>) -> Self {
        let wanted =
            if len > BESIDE_BYTES { memory.clone().try_acquire_many_owned(BESIDE_KIB).ok() } else { None };
        let Some(permit) = wanted else { return Self::Here(Box::new(digests)) };
        let (bodies, mut coming) = mpsc::channel::<Bytes>(BESIDE_PARTS);
        let work = async move {
            while let Some(bytes) = coming.recv().await {
                digests.update(&bytes);
            }
            digests
        };
        Self::Beside { bodies, digests: tokio::spawn(work), _memory: permit }
    }

    pub(crate) async fn update(&mut self, bytes: &Bytes) {
        match self {
            Self::Here(digests) => digests.update(bytes),
            // The task ends early only if it panics, which ends the process.
            Self::Beside { bodies, .. } => drop(bodies.send(bytes.clone()).await),
        }
    }

    /// Waits for the digests of all bytes.
    pub(crate) async fn end(self) -> S3Result<Digests> {
        match self {
            Self::Here(digests) => Ok(*digests),
            Self::Beside { bodies, digests, _memory } => {
                drop(bodies);
                digests.await.map_err(|_| s3_error!(InternalError))
            }
        }
    }
}

/// Digests of a document in a request. They are compared with the client's once the whole document has come.
pub(crate) struct DocumentCheck {
    digests: Digests,
    sha256: Option<(Sha256, String)>,
    left: u64,
    /// The last bytes that came.
    tail: Vec<u8>,
}

/// The protocol library drops CDATA sections from texts: a key would become another one.
const LITERAL: &[u8] = b"<![CDATA[";

impl DocumentCheck {
    /// For a document of `len` bytes.
    pub(crate) fn of(headers: &HeaderMap, len: u64) -> S3Result<Self> {
        Ok(Self::new(headers, len, Claims::of(headers, None)?))
    }

    /// For a request whose checksum headers are those of an object, not of the document.
    pub(crate) fn beside_object(headers: &HeaderMap, len: u64) -> S3Result<Self> {
        let md5 = Claims::md5_of(headers)?;
        Ok(Self::new(headers, len, Claims { md5, ..Claims::default() }))
    }

    fn new(headers: &HeaderMap, len: u64, claims: Claims) -> Self {
        let text = headers.get("x-amz-content-sha256").and_then(|value| value.to_str().ok());
        let is_digest = |text: &&str| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let sha256 = text.filter(is_digest).map(|text| (Sha256::new(), text.to_ascii_lowercase()));
        Self { digests: Digests::new(claims), sha256, left: len, tail: Vec::new() }
    }

    /// Refuses CDATA sections, also if a section's start is split between two pieces.
    fn check_text(&mut self, bytes: &[u8]) -> S3Result<()> {
        self.tail.extend_from_slice(bytes);
        if self.tail.windows(LITERAL.len()).any(|part| part == LITERAL) {
            return Err(s3_error!(
                MalformedXML,
                "CDATA sections are not supported: use references such as &amp; instead."
            ));
        }
        self.tail.drain(..self.tail.len().saturating_sub(LITERAL.len()));
        Ok(())
    }

    /// Takes the next bytes; the last ones bring the result.
    pub(crate) fn update(&mut self, bytes: &[u8]) -> S3Result<()> {
        self.check_text(bytes)?;
        self.digests.update(bytes);
        if let Some((sum, _)) = &mut self.sha256 {
            sum.update(bytes);
        }
        self.left = self.left.saturating_sub(bytes.len() as u64);
        if self.left > 0 {
            return Ok(());
        }
        if let Some((sum, claimed)) = self.sha256.take()
            && hex(&sum.finalize()) != claimed
        {
            return Err(sha256_mismatch());
        }
        let digests = std::mem::replace(&mut self.digests, Digests::new(Claims::default()));
        digests.finish(|_| None).map(drop)
    }
}

/// The error for a body that does not match the signed SHA-256.
pub(crate) fn sha256_mismatch() -> s3s::S3Error {
    custom(
        "XAmzContentSHA256Mismatch",
        StatusCode::BAD_REQUEST,
        "The provided 'x-amz-content-sha256' header does not match what was computed.",
    )
}

/// Lowercase hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// Parses an MD5 in hexadecimal digits.
pub(crate) fn unhex(text: &str) -> Option<[u8; 16]> {
    if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    u128::from_str_radix(text, 16).ok().map(u128::to_be_bytes)
}

/// Standard base64, with padding.
pub(crate) fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Decodes standard base64.
pub(crate) fn unbase64(text: &[u8]) -> Option<Vec<u8>> {
    STANDARD.decode(text).ok()
}

/// The checksum of several parts together, from their checksums and lengths; `None` if it is no CRC.
pub(crate) fn combine(algorithm: ChecksumAlgorithm, parts: &[(Vec<u8>, u64)]) -> Option<Vec<u8>> {
    let (kind, width) = match algorithm {
        ChecksumAlgorithm::Crc32 => (crc_fast::CrcAlgorithm::Crc32IsoHdlc, 4),
        ChecksumAlgorithm::Crc32c => (crc_fast::CrcAlgorithm::Crc32Iscsi, 4),
        ChecksumAlgorithm::Crc64Nvme => (crc_fast::CrcAlgorithm::Crc64Nvme, 8),
        ChecksumAlgorithm::Sha1 | ChecksumAlgorithm::Sha256 => return None,
    };
    let number = |bytes: &[u8]| bytes.iter().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
    let mut parts = parts.iter();
    let first = number(&parts.next()?.0);
    let all =
        parts.fold(first, |all, (value, len)| crc_fast::checksum_combine(kind, all, number(value), *len));
    Some(all.to_be_bytes()[8 - width..].to_vec())
}

/// The checksum of the parts' checksums.
pub(crate) fn composite(algorithm: ChecksumAlgorithm, parts: &[(Vec<u8>, u64)]) -> Vec<u8> {
    let mut sum = Sum::new(algorithm);
    parts.iter().for_each(|(value, _)| sum.update(value));
    sum.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn digest(algorithm: ChecksumAlgorithm, bytes: &[u8]) -> Vec<u8> {
        let mut sum = Sum::new(algorithm);
        sum.update(bytes);
        sum.finish()
    }

    #[tokio::test]
    async fn digests_that_are_made_beside_are_the_same() {
        let body = Bytes::from_iter((0..1 << 20).map(|at: u32| (at % 251) as u8));
        for len in [0, 1, BESIDE_BYTES as usize, BESIDE_BYTES as usize + 1, body.len()] {
            let body = body.slice(..len);
            let claims = || Claims { algorithm: Some(ChecksumAlgorithm::Crc32c), ..Claims::default() };
            let mut plain = Digests::new(claims());
            plain.update(&body);
            let plain = plain.finish(|_| None).unwrap();
            let memory = Arc::new(Semaphore::new(BESIDE_KIB as usize));
            let mut passing = Passing::new(Digests::new(claims()), len as u64, &memory);
            let is_beside = |passing: &Passing| matches!(passing, Passing::Beside { .. });
            assert_eq!(is_beside(&passing), len as u64 > BESIDE_BYTES);
            // Memory for one body.
            let other = Passing::new(Digests::new(claims()), 1 << 20, &memory);
            assert_eq!(is_beside(&other), !is_beside(&passing));
            drop(other);
            for at in (0..len).step_by(10_000) {
                passing.update(&body.slice(at..len.min(at + 10_000))).await;
            }
            let digested = passing.end().await.unwrap().finish(|_| None).unwrap();
            assert_eq!((digested.etag(), digested.checksum), (plain.etag(), plain.checksum), "len={len}");
        }
    }

    #[track_caller]
    fn check(headers: &[(&'static str, &str)], body: &[u8], expected: Result<&str, &str>) {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        let result = Claims::of(&map, None).and_then(|claims| {
            let mut digests = Digests::new(claims);
            body.chunks(3).for_each(|bytes| digests.update(bytes));
            digests.finish(|_| None)
        });
        match (result, expected) {
            (Ok(digested), Ok(etag)) => assert_eq!(digested.etag(), etag),
            (Err(error), Err(code)) => assert_eq!(error.code().as_str(), code),
            (result, _) => panic!("{:?}", result.map(|digested| digested.etag())),
        }
    }

    const ETAG: &str = "5d41402abc4b2a76b9719d911017c592";

    #[test]
    fn claims_are_compared() {
        check(&[], b"hello", Ok(ETAG));
        check(&[("content-md5", "XUFAKrxLKna5cZ2REBfFkg==")], b"hello", Ok(ETAG));
        check(&[("content-md5", "XUFAKrxLKna5cZ2REBfFkg==")], b"hellx", Err("BadDigest"));
        check(&[("content-md5", "XUFA")], b"hello", Err("InvalidDigest"));
        check(&[("x-amz-checksum-crc32", "NhCmhg==")], b"hello", Ok(ETAG));
        check(&[("x-amz-checksum-crc32", "NhCmhw==")], b"hello", Err("BadDigest"));
        check(&[("x-amz-checksum-crc32", "%")], b"hello", Err("InvalidRequest"));
        check(&[("x-amz-checksum-crc32c", "mnG7TA==")], b"hello", Ok(ETAG));
        check(&[("x-amz-checksum-sha1", "qvTGHdzF6KLavt4PO0gs2a6pQ00=")], b"hello", Ok(ETAG));
        check(
            &[("x-amz-checksum-crc32", "NhCmhg=="), ("x-amz-checksum-crc32c", "mnG7TA==")],
            b"hello",
            Err("InvalidRequest"),
        );
        check(&[("x-amz-sdk-checksum-algorithm", "CRC99")], b"hello", Err("InvalidRequest"));
        check(&[("x-amz-trailer", "x-amz-checksum-crc32")], b"hello", Err("MalformedTrailerError"));
    }

    #[track_caller]
    fn check_document(name: &'static str, value: &str, expected: Result<(), &str>) {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        let mut check = DocumentCheck::of(&headers, 5).unwrap();
        check.update(b"he").unwrap();
        let verdict = check.update(b"llo");
        assert_eq!(verdict.as_ref().map_err(|error| error.code().as_str()).copied(), expected, "{name}");
    }

    #[test]
    fn documents_are_compared_with_what_was_signed() {
        let sha256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
        check_document("x-amz-content-sha256", sha256, Ok(()));
        check_document("x-amz-content-sha256", &sha256.replace('2', "3"), Err("XAmzContentSHA256Mismatch"));
        check_document("x-amz-content-sha256", "UNSIGNED-PAYLOAD", Ok(()));
        check_document("content-md5", "XUFAKrxLKna5cZ2REBfFkg==", Ok(()));
        check_document("content-md5", "XUFAKrxLKna5cZ2REBfFkQ==", Err("BadDigest"));
        check_document("x-amz-checksum-crc32", "NhCmhw==", Err("BadDigest"));
    }

    proptest! {
        #[test]
        fn checksums_of_parts_combine(parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..6)) {
            for algorithm in ALGORITHMS {
                let sums: Vec<_> = parts.iter().map(|part| (digest(algorithm, part), part.len() as u64)).collect();
                if let Some(all) = combine(algorithm, &sums) {
                    prop_assert_eq!(all, digest(algorithm, &parts.concat()));
                }
            }
        }
    }
}
