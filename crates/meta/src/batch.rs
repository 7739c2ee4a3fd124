//! A batch: the key-value changes of one group commit, as bytes in the log.
//!
//! Changes are physical, so that replicas of different versions apply the same batch to the same effect.
//!
//! A batch that is larger than an entry of the log may be is cut into parts, one for each of several consecutive entries. It
//! takes effect with its last part: the log is the only judge of that, as for a batch of one entry. After a crash or a takeover
//! in between, the first parts stay in the log without an effect.

use base::codec::{DecodeError, Reader, Writer};
use base::{Epoch, Seq};

use crate::log::LogEntry;

const FORMAT: u8 = 1;
/// First byte of an entry that holds one part of a batch.
const PART: u8 = 2;
/// Bytes of a part before its content: [`PART`], its number from 0, the number of parts, both u32.
const PART_HEADER_BYTES: usize = 9;
/// Least content of a part, for logs with tiny entries.
const PART_BYTES_MIN: usize = 64;
const PUT: u8 = 1;
const DELETE: u8 = 2;

/// Changes of one batch. A later change of a key overrides the earlier ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// Key and new value; `None` deletes.
    pub changes: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

impl Batch {
    /// Encodes the batch for the log.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u8(FORMAT).u32(u32::try_from(self.changes.len()).expect("a batch is far below 2^32 changes"));
        for (key, value) in &self.changes {
            match value {
                Some(value) => w.u8(PUT).blob(key).blob(value),
                None => w.u8(DELETE).blob(key),
            };
        }
        w.finish()
    }

    /// Decodes a batch from the log.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        if r.u8("batch format")? != FORMAT {
            return Err(DecodeError { field: "batch format" });
        }
        let count = r.u32("changes")?;
        let mut changes = Vec::new();
        for _ in 0..count {
            let change = match r.u8("change")? {
                PUT => (r.blob("key")?.to_vec(), Some(r.blob("value")?.to_vec())),
                DELETE => (r.blob("key")?.to_vec(), None),
                _ => return Err(DecodeError { field: "change" }),
            };
            changes.push(change);
        }
        r.finish("batch end")?;
        Ok(Self { changes })
    }

    /// Encodes the batch as one or more entries of at most `entry_bytes_max` bytes.
    pub fn entries(&self, entry_bytes_max: usize) -> Vec<Vec<u8>> {
        let whole = self.encode();
        if whole.len() <= entry_bytes_max {
            return vec![whole];
        }
        let part_bytes = entry_bytes_max.saturating_sub(PART_HEADER_BYTES).max(PART_BYTES_MIN);
        let count = u32::try_from(whole.len().div_ceil(part_bytes)).expect("a batch is far below 2^32 parts");
        let part = |(number, content): (u32, &[u8])| {
            let mut w = Writer::new();
            w.u8(PART).u32(number).u32(count);
            [w.finish().as_slice(), content].concat()
        };
        (0..).zip(whole.chunks(part_bytes)).map(part).collect()
    }

    /// Approximate length of [`Batch::encode`] in bytes.
    pub fn size(&self) -> usize {
        self.changes.iter().map(|(key, value)| 9 + key.len() + value.as_ref().map_or(0, Vec::len)).sum()
    }
}

/// A batch on its way to the log. Its operations have the number of its first entry.
#[derive(Debug)]
pub struct TakenBatch {
    /// Position of the first entry.
    pub first: Seq,
    /// The entries.
    pub entries: Vec<Vec<u8>>,
}

impl TakenBatch {
    /// Position of the last entry: the batch is durable with it.
    pub fn last(&self) -> Seq {
        Seq(self.first.0 + self.entries.len() as u64 - 1)
    }
}

/// Puts the batches of a log together from its entries, which come in order.
#[derive(Debug, Default)]
pub struct Assembler {
    /// The parts so far of a batch, the last of them, and the number of all.
    begun: Option<(Vec<u8>, u32, u32)>,
    /// Position of the last entry.
    last: Option<(Seq, Epoch)>,
}

impl Assembler {
    /// Takes the next entry. Returns the batch that ends with it, if one does. Parts of a batch that never ended are dropped.
    ///
    /// # Errors
    /// If the entry is malformed, or does not follow the one before.
    pub fn push(&mut self, entry: &LogEntry) -> Result<Option<Batch>, DecodeError> {
        let before = self.last.replace((entry.seq, entry.epoch));
        if before.is_some_and(|(seq, _)| seq.0 + 1 != entry.seq.0) {
            return Err(DecodeError { field: "number of the entry" });
        }
        let begun = self.begun.take();
        if entry.batch.first() != Some(&PART) {
            return Batch::decode(&entry.batch).map(Some);
        }
        let mut r = Reader::new(&entry.batch[1..]);
        let (number, count) = (r.u32("number of the part")?, r.u32("number of parts")?);
        let content = &entry.batch[PART_HEADER_BYTES..];
        let whole = match begun {
            _ if number == 0 => content.to_vec(),
            Some((mut whole, last, all)) if before.is_some_and(|(_, epoch)| epoch == entry.epoch) => {
                if (last + 1, all) != (number, count) {
                    return Err(DecodeError { field: "order of parts" });
                }
                whole.extend_from_slice(content);
                whole
            }
            _ => return Err(DecodeError { field: "first part" }),
        };
        if number.checked_add(1) == Some(count) {
            return Batch::decode(&whole).map(Some);
        }
        self.begun = Some((whole, number, count));
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_batch_keeps_its_bytes() {
        let batch = Batch { changes: vec![(b"k".to_vec(), Some(b"v".to_vec())), (b"d".to_vec(), None)] };
        let bytes = batch.encode();
        assert_eq!(bytes, b"\x01\x02\0\0\0\x01\x01\0\0\0k\x01\0\0\0v\x02\x01\0\0\0d");
        assert_eq!(Batch::decode(&bytes).unwrap(), batch);
        for cut in 0..bytes.len() {
            assert!(Batch::decode(&bytes[..cut]).is_err());
        }
    }

    fn entry(seq: u64, epoch: u64, batch: &[u8]) -> LogEntry {
        LogEntry { seq: Seq(seq), epoch: Epoch(epoch), batch: batch.to_vec() }
    }

    /// The batches of a log, given as epochs and entries.
    fn assembled(log: &[(u64, &[u8])]) -> Result<Vec<Batch>, DecodeError> {
        let mut assembler = Assembler::default();
        let pushed = (1..).zip(log).map(|(seq, (epoch, batch))| assembler.push(&entry(seq, *epoch, batch)));
        pushed.filter_map(Result::transpose).collect()
    }

    fn large() -> Batch {
        Batch { changes: (0..50).map(|key| (vec![key; 20], (key % 3 > 0).then(|| vec![key; 30]))).collect() }
    }

    #[test]
    fn a_large_batch_takes_several_entries() {
        let (large, small) = (large(), Batch { changes: vec![(b"d".to_vec(), None)] });
        let parts = large.entries(500);
        assert!(parts.len() > 3 && parts.iter().all(|part| part.len() <= 500));
        assert_eq!(parts[1][..PART_HEADER_BYTES], [2, 1, 0, 0, 0, parts.len() as u8, 0, 0, 0]);
        let small_entry = small.entries(500).remove(0);
        let mut log: Vec<(u64, &[u8])> = vec![(1, &small_entry)];
        log.extend(parts.iter().map(|part| (1, part.as_slice())));
        log.push((1, &small_entry));
        assert_eq!(assembled(&log).unwrap(), [small.clone(), large.clone(), small.clone()]);
        assert_eq!(large.entries(large.encode().len()).len(), 1);
    }

    #[test]
    fn parts_of_a_batch_that_never_ended_have_no_effect() {
        let (large, small) = (large(), Batch { changes: vec![(b"d".to_vec(), None)] });
        let (parts, small_entry) = (large.entries(500), small.encode());
        for there in 1..parts.len() {
            let begun = || parts[..there].iter().map(|part| (1, part.as_slice()));
            assert_eq!(assembled(&begun().collect::<Vec<_>>()).unwrap(), []);
            let next = || parts.iter().map(|part| (2, part.as_slice()));
            assert_eq!(
                assembled(&begun().chain(next()).collect::<Vec<_>>()).unwrap(),
                std::slice::from_ref(&large)
            );
            let next = [(2, small_entry.as_slice())];
            assert_eq!(
                assembled(&begun().chain(next).collect::<Vec<_>>()).unwrap(),
                std::slice::from_ref(&small)
            );
        }
    }

    #[test]
    fn parts_that_do_not_follow_each_other_are_refused() {
        let parts = large().entries(500);
        let part = |number: usize| (1, parts[number].as_slice());
        assert!(assembled(&[part(1)]).is_err());
        assert!(assembled(&[part(0), part(2)]).is_err());
        assert!(assembled(&[part(0), (2, parts[1].as_slice())]).is_err());
        assert!(assembled(&[part(0), part(1), part(1)]).is_err());
        assert!(assembled(&[(1, &parts[0][..5])]).is_err());
        let mut assembler = Assembler::default();
        assembler.push(&entry(4, 1, &parts[0])).unwrap();
        assert!(assembler.push(&entry(6, 1, &parts[1])).is_err());
    }

    proptest! {
        #[test]
        fn random_entries_never_panic(log in proptest::collection::vec(proptest::collection::vec(0_u8..4, 0..30), 0..6)) {
            let _ = assembled(&log.iter().map(|batch| (1, batch.as_slice())).collect::<Vec<_>>());
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Batch::decode(&bytes);
        }
    }
}
