//! The frames of `aws-chunked`: limited in size, or removed.
//!
//! The decoder holds a whole frame in memory, and a client may send a body of any size as one frame. Unsigned frames
//! are cut into smaller ones here; a signed frame must be small. The protocol library decodes only bodies of requests
//! that are signed by version 4 in headers; for other requests the frames are removed here.

use std::collections::VecDeque;

use bytes::{Buf, Bytes, BytesMut};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};

/// Longest frame that is passed on.
const FRAME_BYTES_MAX: u64 = 256 << 10;
/// Longest signed frame: common clients use 64 KiB to 1 MiB.
const SIGNED_BYTES_MAX: u64 = 16 << 20;
/// Longest line before a frame: size, extension, signature.
const LINE_BYTES_MAX: usize = 256;
/// Longest trailers that are parsed here.
const TRAILERS_BYTES_MAX: usize = 4 << 10;

/// What is wrong with the framing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ChunkedError {
    /// The framing cannot be parsed.
    #[error("aws-chunked framing is malformed")]
    Malformed,
    /// A signed frame is too long to be held in memory.
    #[error("signed frame of aws-chunked is too long: bytes={0} most=16777216")]
    TooLong(u64),
    /// The last frame did not come.
    #[error("aws-chunked framing broke off")]
    BrokenOff,
}

/// How frames are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    /// Signed, and passed on unchanged.
    Signed,
    /// Unsigned, and cut into smaller frames.
    Unsigned,
    /// Removed: only their data is passed on.
    Removed,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// In the line before a frame.
    Line,
    /// In a frame, with this number of bytes to come.
    Data(u64),
    /// In the line end after a frame, with this number of bytes to come.
    End(u8),
    /// After the last frame: trailers, passed on as they are.
    Trailers,
}

/// The frames on their way.
pub(crate) struct Chunked {
    framing: Framing,
    state: State,
    line: BytesMut,
    trailers: BytesMut,
    out: VecDeque<Bytes>,
}

impl Chunked {
    pub(crate) fn new(framing: Framing) -> Self {
        let (line, trailers) = (BytesMut::new(), BytesMut::new());
        Self { framing, state: State::Line, line, trailers, out: VecDeque::new() }
    }

    /// The next bytes to pass on.
    pub(crate) fn next(&mut self) -> Option<Bytes> {
        self.out.pop_front()
    }

    /// Takes the next bytes of the body.
    pub(crate) fn take(&mut self, mut bytes: Bytes) -> Result<(), ChunkedError> {
        while !bytes.is_empty() {
            match self.state {
                State::Line => self.take_line(&mut bytes)?,
                State::Data(left) => {
                    let len = left.min(bytes.len() as u64);
                    self.pass(bytes.split_to(len as usize));
                    self.state = if left > len { State::Data(left - len) } else { State::End(2) };
                }
                State::End(left) => {
                    if bytes.get_u8() != if left == 2 { b'\r' } else { b'\n' } {
                        return Err(ChunkedError::Malformed);
                    }
                    self.state = if left == 2 { State::End(1) } else { State::Line };
                    if left == 1 && self.framing == Framing::Signed {
                        self.out.push_back(Bytes::from_static(b"\r\n"));
                    }
                }
                State::Trailers if self.framing == Framing::Removed => {
                    self.trailers.extend_from_slice(&std::mem::take(&mut bytes));
                    if self.trailers.len() > TRAILERS_BYTES_MAX {
                        return Err(ChunkedError::Malformed);
                    }
                }
                State::Trailers => self.out.push_back(std::mem::take(&mut bytes)),
            }
        }
        Ok(())
    }

    /// Ends the body. Returns its trailers if they are not passed on.
    pub(crate) fn finish(&mut self) -> Result<HeaderMap, ChunkedError> {
        if self.state != State::Trailers {
            return Err(ChunkedError::BrokenOff);
        }
        let text = std::str::from_utf8(&self.trailers).map_err(|_| ChunkedError::Malformed)?;
        let mut trailers = HeaderMap::new();
        for line in text.lines().filter(|line| !line.is_empty()) {
            let (name, value) = line.split_once(':').ok_or(ChunkedError::Malformed)?;
            let name = HeaderName::try_from(name.trim()).map_err(|_| ChunkedError::Malformed)?;
            let value = HeaderValue::try_from(value.trim()).map_err(|_| ChunkedError::Malformed)?;
            trailers.insert(name, value);
        }
        Ok(trailers)
    }

    fn take_line(&mut self, bytes: &mut Bytes) -> Result<(), ChunkedError> {
        while !bytes.is_empty() {
            let byte = bytes.get_u8();
            self.line.extend_from_slice(&[byte]);
            if byte == b'\n' {
                return self.end_line();
            }
            if self.line.len() > LINE_BYTES_MAX {
                return Err(ChunkedError::Malformed);
            }
        }
        Ok(())
    }

    fn end_line(&mut self) -> Result<(), ChunkedError> {
        let line = self.line.split().freeze();
        let text = line.strip_suffix(b"\r\n").ok_or(ChunkedError::Malformed)?;
        let digits = text.split(|byte| *byte == b';').next().unwrap_or_default();
        let digits = std::str::from_utf8(digits).map_err(|_| ChunkedError::Malformed)?;
        if digits.starts_with('+') {
            return Err(ChunkedError::Malformed);
        }
        let len = u64::from_str_radix(digits, 16).map_err(|_| ChunkedError::Malformed)?;
        if len == 0 {
            if self.framing != Framing::Removed {
                self.out.push_back(line);
            }
            self.state = State::Trailers;
            return Ok(());
        }
        if self.framing == Framing::Signed {
            if len > SIGNED_BYTES_MAX {
                return Err(ChunkedError::TooLong(len));
            }
            self.out.push_back(line);
        }
        self.state = State::Data(len);
        Ok(())
    }

    /// Passes data of a frame on: unsigned data in frames of its own.
    fn pass(&mut self, mut bytes: Bytes) {
        if self.framing != Framing::Unsigned {
            self.out.push_back(bytes);
            return;
        }
        while !bytes.is_empty() {
            let frame = bytes.split_to((bytes.len() as u64).min(FRAME_BYTES_MAX) as usize);
            self.out.push_back(format!("{:x}\r\n", frame.len()).into());
            self.out.push_back(frame);
            self.out.push_back(Bytes::from_static(b"\r\n"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Output of `framing` when `text` comes in pieces of `step` bytes.
    fn run(framing: Framing, text: &[u8], step: usize) -> Result<Vec<u8>, ChunkedError> {
        let mut chunked = Chunked::new(framing);
        let mut out = Vec::new();
        for piece in text.chunks(step) {
            chunked.take(Bytes::copy_from_slice(piece))?;
            while let Some(bytes) = chunked.next() {
                out.extend_from_slice(&bytes);
            }
        }
        Ok(out)
    }

    /// The data in frames, the length of the longest frame, and the trailers.
    fn decode(mut text: &[u8]) -> (Vec<u8>, usize, Vec<u8>) {
        let (mut data, mut longest) = (Vec::new(), 0);
        loop {
            let end = text.iter().position(|byte| *byte == b'\n').unwrap();
            let digits = std::str::from_utf8(&text[..end - 1]).unwrap();
            let len = usize::from_str_radix(digits.split(';').next().unwrap(), 16).unwrap();
            text = &text[end + 1..];
            if len == 0 {
                return (data, longest, text.to_vec());
            }
            data.extend_from_slice(&text[..len]);
            longest = longest.max(len);
            assert_eq!(&text[len..len + 2], b"\r\n");
            text = &text[len + 2..];
        }
    }

    proptest! {
        #[test]
        fn unsigned_frames_are_cut_and_keep_their_bytes(
            frames in prop::collection::vec(1usize..700_000, 0..4), step in 1usize..300_000,
        ) {
            let mut text = Vec::new();
            let mut data = Vec::new();
            for (at, len) in frames.into_iter().enumerate() {
                let frame: Vec<u8> = (0..len).map(|byte| (byte % 251) as u8 ^ at as u8).collect();
                text.extend_from_slice(format!("{len:x}\r\n").as_bytes());
                text.extend_from_slice(&frame);
                text.extend_from_slice(b"\r\n");
                data.extend_from_slice(&frame);
            }
            text.extend_from_slice(b"0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n");
            let step = step.max(text.len() / 5_000 + 1);
            let (got, longest, trailers) = decode(&run(Framing::Unsigned, &text, step).unwrap());
            prop_assert!(got == data);
            prop_assert!(longest as u64 <= FRAME_BYTES_MAX);
            prop_assert_eq!(trailers, b"x-amz-checksum-crc32:AAAAAA==\r\n\r\n".to_vec());
        }
    }

    #[test]
    fn signed_frames_pass_unchanged() {
        let text = b"5;chunk-signature=ab\r\nhello\r\n0;chunk-signature=cd\r\n\r\n";
        for step in 1..text.len() {
            assert_eq!(run(Framing::Signed, text, step).unwrap(), text);
        }
    }

    #[test]
    fn removed_frames_leave_bytes_and_trailers() {
        let text = b"5;chunk-signature=ab\r\nhello\r\n2\r\n!?\r\n0\r\nX-Amz-Checksum-Crc32: AAAAAA==\r\n\r\n";
        for step in 1..text.len() {
            let mut chunked = Chunked::new(Framing::Removed);
            let mut out = Vec::new();
            for piece in text.chunks(step) {
                chunked.take(Bytes::copy_from_slice(piece)).unwrap();
                out.extend(std::iter::from_fn(|| chunked.next()).flatten());
            }
            assert_eq!(out, b"hello!?");
            assert_eq!(chunked.finish().unwrap()["x-amz-checksum-crc32"], "AAAAAA==");
        }
    }

    #[test]
    fn the_last_frame_must_come() {
        for framing in [Framing::Signed, Framing::Unsigned, Framing::Removed] {
            let mut chunked = Chunked::new(framing);
            chunked.take(Bytes::from_static(b"5\r\nhello\r\n")).unwrap();
            assert!(chunked.finish().unwrap_err().to_string().contains("broke off"));
            chunked.take(Bytes::from_static(b"0\r\n")).unwrap();
            assert!(chunked.finish().unwrap().is_empty());
        }
    }

    #[track_caller]
    fn check_refused(framing: Framing, text: &[u8], expected: &str) {
        let error = run(framing, text, 7).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }

    #[test]
    fn what_is_no_framing_is_refused() {
        check_refused(Framing::Unsigned, b"hello\r\n", "malformed");
        check_refused(Framing::Unsigned, b"+5\r\nhello\r\n", "malformed");
        check_refused(Framing::Unsigned, b"5\r\nhello!!", "malformed");
        check_refused(Framing::Unsigned, &[b'0'; 400], "malformed");
        check_refused(Framing::Unsigned, b"fffffffffffffffff\r\n", "malformed");
        check_refused(Framing::Signed, b"ffffffff;chunk-signature=ab\r\n", "too long");
    }
}
