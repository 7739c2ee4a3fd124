//! Entry points for fuzzers to the frames of a log file.

use base::{Epoch, Seq};

use super::frame::{Frame, FrameKind, HEADER_BYTES, checksum};

/// Decodes one frame, after its checksum is corrected. An accepted frame must encode to the same bytes.
pub fn frame(bytes: &[u8]) {
    let _ = Frame::parse(bytes);
    let mut bytes = bytes.to_vec();
    let Some(len) = bytes.get(24..28).map(|len| u32::from_le_bytes(len.try_into().expect("four bytes")))
    else {
        return;
    };
    let Some(batch) = bytes.get(HEADER_BYTES..).and_then(|rest| rest.get(..len as usize)) else { return };
    let sum = checksum(&bytes[..HEADER_BYTES - 4], batch);
    bytes[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
    if let Ok(frame) = Frame::parse(&bytes) {
        let mut again = Vec::new();
        frame.append_to(&mut again);
        assert_eq!(again, bytes[..frame.len_bytes()]);
    }
}

/// A valid frame as a first input.
pub fn sample_frame(batch: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    Frame { kind: FrameKind::Entry, index: 0, epoch: Epoch(1), seq: Seq(1), batch }.append_to(&mut bytes);
    bytes
}
