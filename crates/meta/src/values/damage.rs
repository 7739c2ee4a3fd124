//! Values of the tables about unreadable pieces.

use base::codec::{DecodeError, Reader, Writer};
use base::{ExtentId, Ino};
use wire::damage::{DamageSums, LossCause};

use super::{Value, expect_format, start};

const SHARDS: u8 = 1;
const BLOB_MISSING: u8 = 2;
const BLOB_DAMAGED: u8 = 3;

/// Table H: why a piece cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostRecord {
    /// The extent of the piece. If another extent is there now, the piece is another one.
    pub extent: ExtentId,
    /// The file; 0 if unknown.
    pub ino: Ino,
    /// When the loss was found, in seconds since 1970.
    pub found_s: u64,
    /// The cause of the loss.
    pub cause: LossCause,
}

fn put_cause(w: &mut Writer, cause: LossCause) {
    match cause {
        LossCause::Shards { damaged, missing } => w.u8(SHARDS).u32(damaged).u32(missing),
        LossCause::BlobMissing { serial } => w.u8(BLOB_MISSING).u64(serial),
        LossCause::BlobDamaged { serial } => w.u8(BLOB_DAMAGED).u64(serial),
    };
}

impl Value for LostRecord {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        w.u64(self.extent.0).u64(self.ino.0).u64(self.found_s);
        put_cause(&mut w, self.cause);
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "lost piece format")?;
        let extent = ExtentId(r.u64("extent")?);
        let (ino, found_s) = (Ino(r.u64("ino")?), r.u64("found")?);
        let cause = match r.u8("cause")? {
            SHARDS => LossCause::Shards { damaged: r.u32("damaged")?, missing: r.u32("missing")? },
            BLOB_MISSING => LossCause::BlobMissing { serial: r.u64("blob")? },
            BLOB_DAMAGED => LossCause::BlobDamaged { serial: r.u64("blob")? },
            _ => return Err(DecodeError { field: "cause" }),
        };
        Ok(Self { extent, ino, found_s, cause })
    }
}

/// `V damage`: sums over table H.
impl Value for DamageSums {
    fn encode(&self) -> Vec<u8> {
        let mut w = start();
        w.u64(self.pieces).u64(self.repaired).u64(self.unrepairable).u64(self.unnoted).u64(self.unnoted_s);
        w.finish()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        expect_format(r, "damage sums format")?;
        Ok(Self {
            pieces: r.u64("pieces")?,
            repaired: r.u64("repaired")?,
            unrepairable: r.u64("unrepairable")?,
            unnoted: r.u64("unnoted")?,
            unnoted_s: r.u64("unnoted time")?,
        })
    }
}
