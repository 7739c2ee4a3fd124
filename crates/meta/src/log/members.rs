//! The complete copies of a mirrored log: `docs/formats/log.md` draws the membership record.
//!
//! Every copy keeps the record. To leave a copy out, a record without it is written to all other copies, before
//! anything is acknowledged without it. So the record with the highest generation is right. If a copy is away, this can
//! only be judged when all copies that the present record names are there.

use std::path::Path;

use base::checksum::crc32c;
use base::codec::{DecodeError, Reader, Writer};
use base::env::{Caching, Env, OpenMode};

const FILE: &str = "members";
const MAGIC: u32 = u32::from_le_bytes(*b"FBMB");
const FORMAT: u8 = 1;
/// Each of the two slots of the file. They are written in turn, in place, so that a full disk does not matter.
const SLOT_BYTES: usize = 4096;
/// Paths in the record are for people only.
const PATH_BYTES_MAX: usize = 512;
/// Most remembered histories that an operator gave up.
const ABANDONED_MAX: usize = 32;

/// A complete copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Member {
    /// Its id, which does not depend on where it is mounted.
    pub(super) id: u64,
    /// Its last path, for messages.
    pub(super) path: String,
}

/// The membership record, as one copy keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Members {
    /// Id of the history that the copies share. Going on without a copy that may be newer begins a new history.
    pub(super) set: [u8; 16],
    /// Histories that this one replaced.
    pub(super) abandoned: Vec<[u8; 16]>,
    /// Counts changes of the record within a history.
    pub(super) generation: u64,
    /// The copy that keeps this record.
    pub(super) own: u64,
    /// The complete copies.
    pub(super) in_sync: Vec<Member>,
}

impl Members {
    fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u32(MAGIC).u8(FORMAT).bytes(&self.set).u64(self.generation).u64(self.own);
        w.u8(u8::try_from(self.in_sync.len()).expect("a log has few copies"));
        for member in &self.in_sync {
            let path = member.path.as_bytes();
            w.u64(member.id).blob(&path[..path.len().min(PATH_BYTES_MAX)]);
        }
        let abandoned = &self.abandoned[self.abandoned.len().saturating_sub(ABANDONED_MAX)..];
        w.u8(abandoned.len() as u8);
        for set in abandoned {
            w.bytes(set);
        }
        let mut bytes = w.finish();
        let sum = crc32c(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        assert!(bytes.len() <= SLOT_BYTES, "few copies with short paths fit");
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        if r.u32("magic")? != MAGIC || r.u8("format")? != FORMAT {
            return Err(DecodeError { field: "format" });
        }
        let set = |r: &mut Reader<'_>| -> Result<[u8; 16], DecodeError> {
            Ok(r.bytes(16, "set")?.try_into().expect("length was just checked"))
        };
        let own_set = set(&mut r)?;
        let (generation, own) = (r.u64("generation")?, r.u64("own")?);
        let mut in_sync = Vec::new();
        for _ in 0..r.u8("members")? {
            let (id, path) = (r.u64("member")?, r.blob("path")?);
            in_sync.push(Member { id, path: String::from_utf8_lossy(path).into_owned() });
        }
        let mut abandoned = Vec::new();
        for _ in 0..r.u8("abandoned")? {
            abandoned.push(set(&mut r)?);
        }
        let len = bytes.len() - r.rest().len();
        if crc32c(&bytes[..len]) != r.u32("checksum")? {
            return Err(DecodeError { field: "checksum" });
        }
        Ok(Self { set: own_set, abandoned, generation, own, in_sync })
    }

    /// The newest record in the directory of a copy. `None` if there never was one.
    ///
    /// # Errors
    /// If there is a record and it cannot be read.
    pub(super) fn read(env: &Env, dir: &Path) -> Result<Option<Self>, String> {
        let path = dir.join(FILE);
        if !env.files.exists(&path) {
            return Ok(None);
        }
        let bytes = env.files.read(&path).map_err(|error| format!("membership record: {error}"))?;
        let slots = bytes.chunks(SLOT_BYTES).filter_map(|slot| Self::decode(slot).ok());
        let newest = slots.max_by_key(|members| members.generation);
        newest.map(Some).ok_or_else(|| "membership record is damaged".to_owned())
    }

    /// Replaces the whole file, also a damaged one.
    pub(super) fn create(&self, env: &Env, dir: &Path) -> Result<(), std::io::Error> {
        let mut bytes = vec![0; 2 * SLOT_BYTES];
        let record = self.encode();
        let at = self.slot();
        bytes[at..at + record.len()].copy_from_slice(&record);
        env.files.write_atomic(&dir.join(FILE), &bytes)
    }

    /// Makes this the newest record; the previous record stays until the next update.
    pub(super) fn update(&self, env: &Env, dir: &Path) -> Result<(), std::io::Error> {
        let file = env.files.open(&dir.join(FILE), OpenMode::Existing, Caching::Buffered)?;
        let mut slot = self.encode();
        slot.resize(SLOT_BYTES, 0);
        file.write_at(&slot, self.slot() as u64)?;
        file.sync_data()
    }

    fn slot(&self) -> usize {
        (self.generation % 2) as usize * SLOT_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::env::sim::Sim;
    use proptest::prelude::*;

    fn sample(generation: u64) -> Members {
        Members {
            set: [7; 16],
            abandoned: vec![[8; 16]],
            generation,
            own: 2,
            in_sync: vec![Member { id: 2, path: "/a".to_owned() }, Member { id: 3, path: "/b".to_owned() }],
        }
    }

    #[test]
    fn a_record_keeps_its_bytes() {
        let bytes = sample(5).encode();
        let golden = "46424d42 01 07070707070707070707070707070707 0500000000000000 0200000000000000 02 \
                      0200000000000000 02000000 2f61 0300000000000000 02000000 2f62 01 \
                      08080808080808080808080808080808";
        let hex: String = bytes[..bytes.len() - 4].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, golden.replace(' ', ""));
        assert_eq!(Members::decode(&bytes), Ok(sample(5)));
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Members::decode(&flipped).is_err(), "bit {bit} is not covered");
        }
    }

    #[test]
    fn a_torn_update_leaves_the_record_before() {
        let dir = Path::new("/copy");
        for seed in 0..200 {
            let sim = Sim::new(seed);
            sim.env().files.create_dir_all(dir).unwrap();
            sample(1).create(&sim.env(), dir).unwrap();
            sample(2).update(&sim.env(), dir).unwrap();
            sim.files.cut_power_after(seed % 3);
            let written = sample(3).update(&sim.env(), dir).is_ok();
            sim.files.crash();
            let found = Members::read(&sim.env(), dir).unwrap().unwrap();
            assert!(found == sample(3) || (!written && found == sample(2)), "seed={seed}: {found:?}");
        }
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Members::decode(&bytes);
            if bytes.len() > 5 {
                bytes[..5].copy_from_slice(b"FBMB\x01");
                let _ = Members::decode(&bytes);
            }
        }
    }
}
