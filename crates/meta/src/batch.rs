//! A batch: the key-value changes of one group commit, as bytes in the log.
//!
//! Changes are physical, so that replicas of different versions apply the same batch to the same effect.

use base::codec::{DecodeError, Reader, Writer};

const FORMAT: u8 = 1;
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

    /// Approximate length of [`Batch::encode`] in bytes.
    pub fn size(&self) -> usize {
        self.changes.iter().map(|(key, value)| 9 + key.len() + value.as_ref().map_or(0, Vec::len)).sum()
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

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Batch::decode(&bytes);
        }
    }
}
