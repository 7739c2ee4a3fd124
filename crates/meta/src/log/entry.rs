//! An entry of a log in an engine that several nodes reach: what `docs/formats/log.md` draws.

use base::checksum::crc32c;
use base::codec::{DecodeError, Reader, Writer};
use base::{Epoch, Seq};

use super::{LogEntry, LogError};

pub(super) const FORMAT: u8 = 1;
/// Bytes of an entry before its batch.
pub(super) const HEADER_BYTES: usize = 13;
/// Largest batch. With its key and the conditions it stays well below etcd's usual limit of 1.5 MiB for a request; all these
/// engines have the same limit, so that logs can move between them.
pub(crate) const ENTRY_BYTES_MAX: usize = (1 << 20) - HEADER_BYTES;
/// Largest append of several entries. Each counts with `OVERHEAD_BYTES` more.
const APPEND_BYTES_MAX: usize = 1280 << 10;
const OVERHEAD_BYTES: usize = HEADER_BYTES + 256;
/// etcd takes 128 operations in a transaction by default.
const BATCHES_MAX: usize = 100;

/// What these batches count, or nothing if they are more than one append takes.
pub(super) fn append_bytes(batches: &[Vec<u8>]) -> Option<usize> {
    let bytes: usize = batches.iter().map(|batch| batch.len() + OVERHEAD_BYTES).sum();
    let is_large = batches.iter().any(|batch| batch.len() > ENTRY_BYTES_MAX);
    (!is_large && batches.len() <= BATCHES_MAX && bytes <= APPEND_BYTES_MAX).then_some(bytes)
}

pub(super) fn encode_entry(seq: Seq, epoch: Epoch, batch: &[u8]) -> Vec<u8> {
    let mut w = Writer::new();
    w.u8(FORMAT).u64(epoch.0).u32(checksum(seq, epoch, batch)).bytes(batch);
    w.finish()
}

pub(super) fn decode_entry(seq: Seq, value: &[u8]) -> Result<LogEntry, LogError> {
    let (epoch, sum, batch) = decode("entry", value, |r| {
        let (epoch, sum) = (Epoch(r.u64("epoch")?), r.u32("checksum")?);
        let batch = r.rest().to_vec();
        r.bytes(batch.len(), "batch")?;
        Ok((epoch, sum, batch))
    })?;
    if sum != checksum(seq, epoch, &batch) {
        return Err(LogError::Damaged(format!("entry {seq} has a wrong checksum")));
    }
    Ok(LogEntry { seq, epoch, batch })
}

/// Bound to the place, so that the intact value of another entry does not pass.
fn checksum(seq: Seq, epoch: Epoch, batch: &[u8]) -> u32 {
    let mut w = Writer::new();
    w.u64(seq.0).u8(FORMAT).u64(epoch.0);
    crc32c(&w.finish()) ^ crc32c(batch).rotate_left(1)
}

/// Decodes a value that begins with its format.
pub(super) fn decode<T>(
    name: &str,
    value: &[u8],
    fields: impl FnOnce(&mut Reader<'_>) -> Result<T, DecodeError>,
) -> Result<T, LogError> {
    let mut r = Reader::new(value);
    let damaged = |error| LogError::Damaged(format!("value of {name} in the log: {error}"));
    match r.u8("format").map_err(damaged)? {
        FORMAT => {}
        newer => return Err(LogError::NewerFormat(format!("{name} in the log has format {newer}"))),
    }
    let decoded = fields(&mut r).map_err(damaged)?;
    r.finish("end").map_err(damaged)?;
    Ok(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_is_the_format() {
        let entry = encode_entry(Seq(9), Epoch(3), b"batch");
        assert_eq!(entry[..9], [1, 3, 0, 0, 0, 0, 0, 0, 0]);
        // Computed with another implementation of CRC-32C.
        assert_eq!(entry[9..13], GOLDEN_SUM.to_le_bytes());
        assert_eq!(entry[HEADER_BYTES..], b"batch"[..]);
        let decoded = decode_entry(Seq(9), &entry).unwrap();
        assert_eq!(decoded, LogEntry { seq: Seq(9), epoch: Epoch(3), batch: b"batch".to_vec() });
    }

    const GOLDEN_SUM: u32 = 0x0021_c7d3;

    #[test]
    fn a_damaged_or_moved_entry_is_noticed() {
        let entry = encode_entry(Seq(9), Epoch(3), b"batch");
        assert!(matches!(decode_entry(Seq(10), &entry), Err(LogError::Damaged(_))));
        for bit in 8..entry.len() * 8 {
            let mut damaged = entry.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(decode_entry(Seq(9), &damaged), Err(LogError::Damaged(_))), "bit {bit}");
        }
        for len in 0..entry.len() {
            assert!(matches!(decode_entry(Seq(9), &entry[..len]), Err(LogError::Damaged(_))), "{len} bytes");
        }
        assert!(matches!(decode_entry(Seq(9), &[&[2], &entry[1..]].concat()), Err(LogError::NewerFormat(_))));
    }

    #[test]
    fn an_append_has_limits() {
        let check = |count: usize, bytes: usize, fits: bool| {
            assert_eq!(append_bytes(&vec![vec![0; bytes]; count]).is_some(), fits, "{count} of {bytes}");
        };
        check(1, ENTRY_BYTES_MAX, true);
        check(1, ENTRY_BYTES_MAX + 1, false);
        check(2, ENTRY_BYTES_MAX, false);
        check(100, 0, true);
        check(101, 0, false);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes: Vec<u8>) {
            if let Ok(entry) = decode_entry(Seq(9), &bytes) {
                proptest::prop_assert_eq!(&encode_entry(Seq(9), entry.epoch, &entry.batch)[..], &bytes[..]);
            }
        }
    }
}
