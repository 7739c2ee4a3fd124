//! Frames: how messages lie in a stream of bytes.

use std::io;

use base::checksum::Crc32c;
use base::codec::{DecodeError, Reader};
use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::message::Packed;

/// The version of frames.
pub const VERSION: u8 = 1;
/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 28;
/// Most bytes of a message without its payload: a page of a directory, of a map, or of claims is below 2 MiB.
pub const BODY_BYTES_MAX: u32 = 8 << 20;
/// Most bytes of a payload: the largest shard.
pub const PAYLOAD_BYTES_MAX: u32 = 16 << 20;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameKind {
    /// A request.
    Call,
    /// The answer to the call of the same number.
    Answer,
    /// An event, unasked.
    Event,
    /// Nobody waits for the answer to the call of this number any more.
    Cancel,
    /// The other side is asked for a sign of life.
    Ping,
    /// A sign of life.
    Pong,
}

const KINDS: [FrameKind; 6] = [
    FrameKind::Call,
    FrameKind::Answer,
    FrameKind::Event,
    FrameKind::Cancel,
    FrameKind::Ping,
    FrameKind::Pong,
];

/// A frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Its kind.
    pub kind: FrameKind,
    /// The ledger or drive that it is for.
    pub service: u32,
    /// The number of the call on this connection; of an event, its stream.
    pub call: u64,
    /// Its message.
    pub message: Packed,
}

impl Frame {
    /// A frame without a message.
    pub fn empty(kind: FrameKind, call: u64) -> Self {
        let message = Packed { code: 0, body: Bytes::new(), payload: Bytes::new() };
        Self { kind, service: 0, call, message }
    }

    /// Header and body as they lie in the stream. The payload follows.
    pub fn head(&self) -> Bytes {
        let body = &self.message.body;
        let mut out = BytesMut::with_capacity(HEADER_BYTES + body.len());
        let kind = KINDS.iter().position(|kind| *kind == self.kind).expect("all kinds are there");
        out.extend_from_slice(&[VERSION, kind as u8 + 1]);
        out.extend_from_slice(&self.message.code.to_le_bytes());
        out.extend_from_slice(&self.service.to_le_bytes());
        out.extend_from_slice(&self.call.to_le_bytes());
        out.extend_from_slice(&(body.len() as u32).to_le_bytes());
        out.extend_from_slice(&(self.message.payload.len() as u32).to_le_bytes());
        out.extend_from_slice(&checksum(&out, body).to_le_bytes());
        out.extend_from_slice(body);
        out.freeze()
    }
}

/// Covers header and body. Payloads are blocks with checksums of their own, which are in the body.
fn checksum(header: &[u8], body: &[u8]) -> u32 {
    let mut crc = Crc32c::default();
    crc.update(header);
    crc.update(body);
    crc.finish()
}

struct Header {
    kind: FrameKind,
    code: u16,
    service: u32,
    call: u64,
    body_len: u32,
    payload_len: u32,
    checksum: u32,
}

fn parse(bytes: &[u8]) -> Result<Header, DecodeError> {
    let mut reader = Reader::new(bytes);
    if reader.u8("version")? != VERSION {
        return Err(DecodeError { field: "version" });
    }
    let kind = usize::from(reader.u8("kind")?).checked_sub(1).and_then(|kind| KINDS.get(kind));
    let header = Header {
        kind: *kind.ok_or(DecodeError { field: "kind" })?,
        code: reader.u16("operation")?,
        service: reader.u32("service")?,
        call: reader.u64("call")?,
        body_len: reader.u32("length of the body")?,
        payload_len: reader.u32("length of the payload")?,
        checksum: reader.u32("checksum")?,
    };
    if header.body_len > BODY_BYTES_MAX {
        return Err(DecodeError { field: "length of the body" });
    }
    if header.payload_len > PAYLOAD_BYTES_MAX {
        return Err(DecodeError { field: "length of the payload" });
    }
    Ok(header)
}

/// Reads a frame; `None` at the end of the stream.
///
/// # Errors
/// If the stream fails, ends inside a frame, or holds anything but frames.
pub async fn read_frame(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Frame>> {
    read_frame_within(from, BODY_BYTES_MAX + PAYLOAD_BYTES_MAX).await
}

/// As [`read_frame`], for a sender whose messages have at most `bytes_max` bytes.
///
/// # Errors
/// As [`read_frame`], and if a message is larger.
pub async fn read_frame_within(
    from: &mut (impl AsyncRead + Unpin),
    bytes_max: u32,
) -> io::Result<Option<Frame>> {
    let mut bytes = [0u8; HEADER_BYTES];
    if from.read(&mut bytes[..1]).await? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut bytes[1..]).await?;
    let header = parse(&bytes).map_err(io::Error::other)?;
    if header.body_len + header.payload_len > bytes_max {
        return Err(io::Error::other("a message is longer than this sender may send"));
    }
    let body = read_bytes(from, header.body_len).await?;
    if checksum(&bytes[..HEADER_BYTES - 4], &body) != header.checksum {
        return Err(io::Error::other(DecodeError { field: "checksum" }));
    }
    let payload = read_bytes(from, header.payload_len).await?;
    let message = Packed { code: header.code, body, payload };
    Ok(Some(Frame { kind: header.kind, service: header.service, call: header.call, message }))
}

/// The bytes lie in memory of their own, so that parts of them can be kept without a copy.
async fn read_bytes(from: &mut (impl AsyncRead + Unpin), len: u32) -> io::Result<Bytes> {
    let mut bytes = BytesMut::zeroed(len as usize);
    from.read_exact(&mut bytes).await?;
    Ok(bytes.freeze())
}

/// Writes a frame. The payload leaves from the memory in which it is.
///
/// # Errors
/// If the stream fails.
pub async fn write_frame(to: &mut (impl AsyncWrite + Unpin), frame: &Frame) -> io::Result<()> {
    let mut bytes = frame.head().chain(frame.message.payload.clone());
    to.write_all_buf(&mut bytes).await?;
    to.flush().await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame() -> Frame {
        let message = Packed {
            code: 0x0201,
            body: Bytes::from_static(b"body"),
            payload: Bytes::from_static(b"payload"),
        };
        Frame { kind: FrameKind::Call, service: 7, call: 0x0102_0304, message }
    }

    fn block_on<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
    }

    async fn bytes_of(frame: &Frame) -> Vec<u8> {
        let mut out = Vec::new();
        write_frame(&mut out, frame).await.unwrap();
        out
    }

    #[test]
    fn the_bytes_are_those_of_the_document() {
        block_on(async {
            let bytes = bytes_of(&frame()).await;
            assert_eq!(bytes[..8], [1, 1, 1, 2, 7, 0, 0, 0]);
            assert_eq!(bytes[8..24], [4, 3, 2, 1, 0, 0, 0, 0, 4, 0, 0, 0, 7, 0, 0, 0]);
            let sum = base::checksum::crc32c(&[&bytes[..24], b"body"].concat());
            assert_eq!(bytes[24..28], sum.to_le_bytes());
            assert_eq!(&bytes[28..], b"bodypayload");
        });
    }

    #[test]
    fn frames_come_back_and_damage_is_refused() {
        block_on(async {
            let bytes = bytes_of(&frame()).await;
            let twice = [bytes.clone(), bytes.clone()].concat();
            let mut stream = twice.as_slice();
            for _ in 0..2 {
                assert_eq!(read_frame(&mut stream).await.unwrap(), Some(frame()));
            }
            assert_eq!(read_frame(&mut stream).await.unwrap(), None);
            for end in 1..bytes.len() {
                assert!(read_frame(&mut &bytes[..end]).await.is_err(), "{end} bytes");
            }
            for at in 0..HEADER_BYTES + 4 {
                let mut damaged = [bytes.clone(), vec![0; 1 << 20]].concat();
                damaged[at] ^= 4;
                assert!(read_frame(&mut damaged.as_slice()).await.is_err(), "byte {at}");
            }
        });
    }

    #[test]
    fn lengths_have_limits() {
        for (at, len) in [(16, BODY_BYTES_MAX + 1), (20, PAYLOAD_BYTES_MAX + 1)] {
            let mut bytes = block_on(bytes_of(&frame()));
            bytes[at..at + 4].copy_from_slice(&len.to_le_bytes());
            assert!(parse(&bytes[..HEADER_BYTES]).is_err());
        }
    }
}
