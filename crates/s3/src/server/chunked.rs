//! Keeps the frames of `aws-chunked` small.
//!
//! What decodes and verifies them holds a whole frame in memory. A client may send a body of any size as one frame:
//! without signatures such a frame is cut into smaller ones here, a signed one must be small as it comes.

use std::collections::VecDeque;

use bytes::{Buf, Bytes, BytesMut};

/// Longest frame that is passed on.
const FRAME_BYTES_MAX: u64 = 256 << 10;
/// Longest signed frame: common clients use 64 KiB to 1 MiB.
const SIGNED_BYTES_MAX: u64 = 16 << 20;
/// Longest line before a frame: size, extension, signature.
const LINE_BYTES_MAX: usize = 256;

/// What is wrong with the framing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ChunkedError {
    /// It is no framing.
    #[error("aws-chunked framing is malformed")]
    Malformed,
    /// A signed frame is too long to be held in memory.
    #[error("signed frame of aws-chunked is too long: bytes={0} most=16777216")]
    TooLong(u64),
}

/// Whether frames are signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signing {
    Frames,
    None,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// In the line before a frame.
    Line,
    /// In a frame, with so many bytes to come.
    Data(u64),
    /// In the line end after a frame: bytes of it to come.
    End(u8),
    /// After the last frame: trailers, passed on as they are.
    Trailers,
}

/// The frames on their way.
pub(crate) struct Chunked {
    signing: Signing,
    state: State,
    line: BytesMut,
    out: VecDeque<Bytes>,
}

impl Chunked {
    pub(crate) fn new(signing: Signing) -> Self {
        Self { signing, state: State::Line, line: BytesMut::new(), out: VecDeque::new() }
    }

    /// The next bytes to pass on.
    pub(crate) fn next(&mut self) -> Option<Bytes> {
        self.out.pop_front()
    }

    /// Takes bytes as they came.
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
                    if left == 1 && self.signing == Signing::Frames {
                        self.out.push_back(Bytes::from_static(b"\r\n"));
                    }
                }
                State::Trailers => self.out.push_back(std::mem::take(&mut bytes)),
            }
        }
        Ok(())
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
            self.out.push_back(line);
            self.state = State::Trailers;
            return Ok(());
        }
        if self.signing == Signing::Frames {
            if len > SIGNED_BYTES_MAX {
                return Err(ChunkedError::TooLong(len));
            }
            self.out.push_back(line);
        }
        self.state = State::Data(len);
        Ok(())
    }

    /// Passes bytes of a frame on: unsigned, in frames of their own.
    fn pass(&mut self, mut bytes: Bytes) {
        if self.signing == Signing::Frames {
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

    /// What comes out when `text` comes in pieces of `step` bytes.
    fn run(signing: Signing, text: &[u8], step: usize) -> Result<Vec<u8>, ChunkedError> {
        let mut chunked = Chunked::new(signing);
        let mut out = Vec::new();
        for piece in text.chunks(step) {
            chunked.take(Bytes::copy_from_slice(piece))?;
            while let Some(bytes) = chunked.next() {
                out.extend_from_slice(&bytes);
            }
        }
        Ok(out)
    }

    /// The bytes in frames, and how long the longest is.
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
            let (got, longest, trailers) = decode(&run(Signing::None, &text, step).unwrap());
            prop_assert!(got == data);
            prop_assert!(longest as u64 <= FRAME_BYTES_MAX);
            prop_assert_eq!(trailers, b"x-amz-checksum-crc32:AAAAAA==\r\n\r\n".to_vec());
        }
    }

    #[test]
    fn signed_frames_pass_unchanged() {
        let text = b"5;chunk-signature=ab\r\nhello\r\n0;chunk-signature=cd\r\n\r\n";
        for step in 1..text.len() {
            assert_eq!(run(Signing::Frames, text, step).unwrap(), text);
        }
    }

    #[track_caller]
    fn check_refused(signing: Signing, text: &[u8], expected: &str) {
        let error = run(signing, text, 7).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }

    #[test]
    fn what_is_no_framing_is_refused() {
        check_refused(Signing::None, b"hello\r\n", "malformed");
        check_refused(Signing::None, b"+5\r\nhello\r\n", "malformed");
        check_refused(Signing::None, b"5\r\nhello!!", "malformed");
        check_refused(Signing::None, &[b'0'; 400], "malformed");
        check_refused(Signing::None, b"fffffffffffffffff\r\n", "malformed");
        check_refused(Signing::Frames, b"ffffffff;chunk-signature=ab\r\n", "too long");
    }
}
