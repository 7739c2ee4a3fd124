//! Keys and values in etcd: what `docs/formats/log.md` draws.

use base::codec::Writer;
use base::{Epoch, LedgerId, Seq};
use bytes::Bytes;

use super::super::entry::{FORMAT, decode};
use super::super::{LogError, Sealed};

/// The keys of a ledger.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    base: String,
}

impl Keys {
    pub(super) fn new(prefix: &str, ledger: LedgerId) -> Self {
        Self { base: format!("{}/ledger/{ledger}/", prefix.trim_end_matches('/')) }
    }

    /// What only a seal writes: the owner.
    pub(super) fn owner(&self) -> Bytes {
        self.key("owner")
    }

    /// The number of the last entry.
    pub(super) fn tail(&self) -> Bytes {
        self.key("tail")
    }

    /// What each sign of life writes.
    pub(super) fn alive(&self) -> Bytes {
        self.key("alive")
    }

    pub(super) fn entry(&self, seq: Seq) -> Bytes {
        self.key(&format!("log/{:016x}", seq.0))
    }

    /// The first key behind all entries.
    pub(super) fn entries_end(&self) -> Bytes {
        self.key("log0")
    }

    /// The number of the entry with this key.
    pub(super) fn seq_of(&self, key: &[u8]) -> Result<Seq, LogError> {
        let unknown = || LogError::Damaged(format!("etcd has an unknown key: {}", key.escape_ascii()));
        let name = key.strip_prefix(self.base.as_bytes()).and_then(|name| name.strip_prefix(b"log/"));
        let name = name.and_then(|name| std::str::from_utf8(name).ok()).ok_or_else(unknown)?;
        let seq = Seq(u64::from_str_radix(name, 16).map_err(|_| unknown())?);
        if self.entry(seq) == key { Ok(seq) } else { Err(unknown()) }
    }

    fn key(&self, name: &str) -> Bytes {
        Bytes::from(format!("{}{name}", self.base))
    }
}

/// What is not of one ledger.
pub(super) struct Common {
    base: String,
}

impl Common {
    pub(super) fn new(prefix: &str) -> Self {
        Self { base: prefix.trim_end_matches('/').to_owned() }
    }

    /// The number of the move that began the logs here.
    pub(super) fn moved(&self) -> Bytes {
        Bytes::from(format!("{}/moved", self.base))
    }

    /// All keys: from the first one on, before the second one.
    pub(super) fn all(&self) -> (Bytes, Bytes) {
        self.below("")
    }

    /// All keys of ledgers.
    pub(super) fn ledgers(&self) -> (Bytes, Bytes) {
        self.below("/ledger")
    }

    fn below(&self, name: &str) -> (Bytes, Bytes) {
        (Bytes::from(format!("{}{name}/", self.base)), Bytes::from(format!("{}{name}0", self.base)))
    }
}

/// The value of `moved`.
pub(super) fn encode_moved(number: u64) -> Bytes {
    let mut w = Writer::new();
    w.u8(FORMAT).u64(number);
    w.finish().into()
}

pub(super) fn decode_moved(value: &[u8]) -> Result<u64, LogError> {
    decode("moved", value, |r| r.u64("number"))
}

/// The value of `owner`.
pub(super) fn encode_owner(owner: Sealed) -> Bytes {
    let mut w = Writer::new();
    w.u8(FORMAT).u64(owner.epoch.0).u64(owner.nonce);
    w.finish().into()
}

pub(super) fn decode_owner(value: &[u8]) -> Result<Sealed, LogError> {
    decode("owner", value, |r| Ok(Sealed { epoch: Epoch(r.u64("epoch")?), nonce: r.u64("nonce")? }))
}

/// The value of `tail`.
pub(super) fn encode_tail(tail: Seq) -> Bytes {
    let mut w = Writer::new();
    w.u8(FORMAT).u64(tail.0);
    w.finish().into()
}

pub(super) fn decode_tail(value: &[u8]) -> Result<Seq, LogError> {
    decode("tail", value, |r| Ok(Seq(r.u64("tail")?)))
}

/// The value of `alive`, for people: etcd itself counts the changes of a key.
pub(super) fn encode_alive(nonce: u64) -> Bytes {
    let mut w = Writer::new();
    w.u8(FORMAT).u64(nonce);
    w.finish().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Keys {
        Keys::new("forebay/7/", LedgerId(12))
    }

    #[test]
    fn keys_sort_by_the_number_of_the_entry_and_have_it() {
        assert_eq!(keys().owner(), "forebay/7/ledger/12/owner");
        assert_eq!(keys().tail(), "forebay/7/ledger/12/tail");
        assert_eq!(keys().alive(), "forebay/7/ledger/12/alive");
        assert_eq!(keys().entry(Seq(0x1f)), "forebay/7/ledger/12/log/000000000000001f");
        let seqs = [0, 1, 9, 10, 255, 1 << 40, u64::MAX];
        let entries: Vec<Bytes> = seqs.iter().map(|seq| keys().entry(Seq(*seq))).collect();
        assert!(entries.is_sorted() && *entries.last().unwrap() < keys().entries_end());
        for (seq, key) in seqs.iter().zip(&entries) {
            assert_eq!(keys().seq_of(key).unwrap(), Seq(*seq));
        }
        for key in ["log/1", "log/000000000000001F", "log/+00000000000001f", "tail", "log/000000000000001f0"]
        {
            let key = format!("forebay/7/ledger/12/{key}");
            assert!(matches!(keys().seq_of(key.as_bytes()), Err(LogError::Damaged(_))), "{key}");
        }
    }

    #[test]
    fn the_values_are_the_format() {
        let owner = Sealed { epoch: Epoch(3), nonce: 0x0102_0304_0506_0708 };
        assert_eq!(encode_owner(owner), [1, 3, 0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1][..]);
        assert_eq!(encode_tail(Seq(258)), [1, 2, 1, 0, 0, 0, 0, 0, 0][..]);
        assert_eq!(encode_alive(5), [1, 5, 0, 0, 0, 0, 0, 0, 0][..]);
        assert_eq!(decode_owner(&encode_owner(owner)).unwrap(), owner);
        assert_eq!(decode_tail(&encode_tail(Seq(258))).unwrap(), Seq(258));
    }

    #[test]
    fn newer_and_cut_values_are_refused() {
        for value in [encode_owner(Sealed { epoch: Epoch(1), nonce: 1 }), encode_tail(Seq(1))] {
            let is_owner = value.len() > 9;
            let decode = |value: &[u8]| {
                if is_owner { decode_owner(value).map(|_| ()) } else { decode_tail(value).map(|_| ()) }
            };
            assert!(decode(&value).is_ok());
            assert!(matches!(decode(&[&[2], &value[1..]].concat()), Err(LogError::NewerFormat(_))));
            assert!(matches!(decode(&[&value[..], &[0]].concat()), Err(LogError::Damaged(_))));
            for len in 0..value.len() {
                assert!(matches!(decode(&value[..len]), Err(LogError::Damaged(_))));
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes: Vec<u8>) {
            let _ = (decode_owner(&bytes), decode_tail(&bytes), keys().seq_of(&bytes));
        }
    }
}
