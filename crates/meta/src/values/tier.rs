//! Values of the tables of tiering.

use base::codec::{DecodeError, Reader, Writer};
use base::{Epoch, ExtentId, Ino, MapId, SessionId};
use wire::meta::ExtentRef;
use wire::tier::{Origin, Stage, StageStat, TierMode, TierStat};

use super::{ExtentPlace, FORMAT, Value, expect_format, start};

/// Format of a residence or age that has the directory.
const FORMAT_DIRECTORY: u8 = 2;
/// Format of a residence or age that also has the origin.
const FORMAT_ORIGIN: u8 = 3;

fn put_origin(w: &mut Writer, origin: Origin) {
    w.u64(origin.ino.0).u64(origin.map.0).u64(origin.off);
}

fn origin_of(r: &mut Reader<'_>) -> Result<Origin, DecodeError> {
    Ok(Origin { ino: Ino(r.u64("ino")?), map: MapId(r.u64("map")?), off: r.u64("off")? })
}

fn stage_code(stage: Stage) -> u8 {
    match stage {
        Stage::Queued => 1,
        Stage::Both => 2,
        Stage::Tiered => 3,
    }
}

fn stage_of(code: u8) -> Result<Stage, DecodeError> {
    match code {
        1 => Ok(Stage::Queued),
        2 => Ok(Stage::Both),
        3 => Ok(Stage::Tiered),
        _ => Err(DecodeError { field: "stage" }),
    }
}

/// The first byte of a stage's keys in table T.
pub(crate) fn stage_in_key(stage: Stage) -> u8 {
    stage_code(stage)
}

/// Table L: the residence of a tiered extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Residence {
    /// Where the extent is: on drives, in a blob, or both.
    pub stage: Stage,
    /// When the extent was written, in seconds since 1970.
    pub written_s: u64,
    /// Present or former place of its shards; `shard` is 0.
    pub place: ExtentPlace,
    /// The directory of the file for which it was written, or that file if it had none; 0 if unknown.
    pub directory: Ino,
    /// That file, and the offset in it.
    pub origin: Origin,
    /// The blob's number, and the offset of the extent in it. `None` while the extent is queued.
    pub blob: Option<(u64, u32)>,
}

impl Residence {
    /// A reference to the whole extent.
    pub fn extent(&self, id: ExtentId) -> ExtentRef {
        let ExtentPlace { pg, n, k, extent_len, .. } = self.place;
        wire::tier::whole(id, pg, (k, n), extent_len)
    }

    /// The value of the extent in table T.
    pub(crate) fn aged(&self) -> Aged {
        Aged { place: self.place, directory: self.directory, origin: self.origin }
    }
}

/// Table T: the data about an extent that the next step of tiering needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Aged {
    pub(crate) place: ExtentPlace,
    pub(crate) directory: Ino,
    pub(crate) origin: Origin,
}

impl Value for Aged {
    fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u8(FORMAT_ORIGIN).u64(self.directory.0);
        put_origin(&mut w, self.origin);
        let mut bytes = w.finish();
        bytes.extend(self.place.encode());
        bytes
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let format = r.u8("age format")?;
        if format == FORMAT {
            let place = ExtentPlace::read_fields(r)?;
            return Ok(Self { place, directory: Ino(0), origin: Origin::default() });
        }
        if !matches!(format, FORMAT_DIRECTORY | FORMAT_ORIGIN) {
            return Err(DecodeError { field: "age format" });
        }
        let directory = Ino(r.u64("directory")?);
        let origin = if format == FORMAT_ORIGIN { origin_of(r)? } else { Origin::default() };
        Ok(Self { place: ExtentPlace::read(r)?, directory, origin })
    }
}

/// The part of an extent's reference that is the same for all pieces.
pub(crate) fn place_of(extent: &ExtentRef) -> ExtentPlace {
    let ExtentRef { pg, k, n, extent_len, .. } = *extent;
    ExtentPlace { pg, n, k, shard: 0, extent_len }
}

impl Value for Residence {
    fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u8(FORMAT_ORIGIN).u8(stage_code(self.stage)).u64(self.written_s);
        let (serial, off) = self.blob.unwrap_or((0, 0));
        w.u64(serial).u32(off).u64(self.directory.0);
        put_origin(&mut w, self.origin);
        let mut bytes = w.finish();
        bytes.extend(self.place.encode());
        bytes
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let format = r.u8("residence format")?;
        if !matches!(format, FORMAT | FORMAT_DIRECTORY | FORMAT_ORIGIN) {
            return Err(DecodeError { field: "residence format" });
        }
        let (stage, written_s) = (stage_of(r.u8("stage")?)?, r.u64("written_s")?);
        let (serial, off) = (r.u64("serial")?, r.u32("off")?);
        let blob = if serial == 0 { None } else { Some((serial, off)) };
        if blob.is_none() != (stage == Stage::Queued) || (serial == 0 && off != 0) {
            return Err(DecodeError { field: "serial" });
        }
        let directory = Ino(if format == FORMAT { 0 } else { r.u64("directory")? });
        let origin = if format == FORMAT_ORIGIN { origin_of(r)? } else { Origin::default() };
        Ok(Self { stage, written_s, place: ExtentPlace::read(r)?, directory, origin, blob })
    }
}

/// Table B: a blob that is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlobRecord {
    /// Epoch of the owner that assigned its number.
    pub term: Epoch,
    /// Length of the object in bytes.
    pub bytes: u32,
    /// Number of its extents in table Y.
    pub extents: u32,
    /// Sum of the live bytes of its extents; each counts at most its length.
    pub live_bytes: u64,
}

impl Value for BlobRecord {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        w.u64(self.term.0).u32(self.bytes).u32(self.extents).u64(self.live_bytes);
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "blob format")?;
        let (term, bytes) = (Epoch(r.u64("term")?), r.u32("bytes")?);
        Ok(Self { term, bytes, extents: r.u32("extents")?, live_bytes: r.u64("live_bytes")? })
    }
}

/// Table Z: a blob that is being stored or is to be deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LooseBlob {
    /// Epoch of the owner that assigned its number.
    pub term: Epoch,
    /// The session that stores it; 0 if it is to be deleted.
    pub session: SessionId,
    /// The ledger version in which the last reference was dropped.
    pub free_ver: u64,
}

impl Value for LooseBlob {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        w.u64(self.term.0).u64(self.session.0).u64(self.free_ver);
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "loose blob format")?;
        let (term, session) = (Epoch(r.u64("term")?), SessionId(r.u64("session")?));
        Ok(Self { term, session, free_ver: r.u64("free_ver")? })
    }
}

/// Table V, `tier`: whether the ledger tiers, and its sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierState {
    /// Start of tiering, in seconds since 1970: no extent counts as older.
    pub since_s: u64,
    /// The last piece that was queued; queueing goes on behind it.
    pub queue_from: Option<(u64, u64)>,
    /// The sums. Those that can be derived are not stored.
    pub stat: TierStat,
}

impl Value for TierState {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        let stat = &self.stat;
        let mode = match stat.mode {
            TierMode::Off => 0,
            TierMode::On => 1,
            TierMode::Leaving => 2,
        };
        let (map, off) = self.queue_from.unwrap_or_default();
        w.u8(mode).u8(u8::from(stat.queueing)).u64(self.since_s).u64(map).u64(off);
        for stage in [stat.queued, stat.both, stat.away] {
            w.u64(stage.extents).u64(stage.bytes);
        }
        w.u64(stat.blobs).u64(stat.stored_bytes).u64(stat.live_bytes);
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "tier format")?;
        let mode = match r.u8("mode")? {
            0 => TierMode::Off,
            1 => TierMode::On,
            2 => TierMode::Leaving,
            _ => return Err(DecodeError { field: "mode" }),
        };
        let queueing = match r.u8("queueing")? {
            0 => false,
            1 => true,
            _ => return Err(DecodeError { field: "queueing" }),
        };
        let since_s = r.u64("since_s")?;
        let from = (r.u64("map")?, r.u64("off")?);
        let queue_from = if from == (0, 0) { None } else { Some(from) };
        let (queued, both, away) = (stage_stat(r)?, stage_stat(r)?, stage_stat(r)?);
        let (blobs, stored_bytes) = (r.u64("blobs")?, r.u64("stored_bytes")?);
        let live_bytes = r.u64("live_bytes")?;
        let stat = TierStat { mode, queueing, queued, both, away, blobs, stored_bytes, live_bytes };
        Ok(Self { since_s, queue_from, stat })
    }
}

fn stage_stat(r: &mut Reader<'_>) -> Result<StageStat, DecodeError> {
    Ok(StageStat { extents: r.u64("extents")?, bytes: r.u64("bytes")? })
}
