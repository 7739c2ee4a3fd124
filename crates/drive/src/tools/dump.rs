//! Dumps everything on a device, in the order of its place.

use std::path::Path;
use std::sync::Arc;

use base::env::{Env, File};
use wire::drive::{ShardKey, ShardNote, ShardShape};
use wire::position::Position;

use super::{OpenedDevice, ToolError};
use crate::format::frame::{FrameHeader, RecordOp};
use crate::format::segment::{SegmentClass, SegmentHeader};
use crate::format::superblock::Superblock;
use crate::format::{Geometry, SUPERBLOCK_OFFSETS};
use crate::scan::{FoundFrame, ScanFrom, read_blocks, scan_segment, segment_header, verify_payloads};

/// One of the two superblocks.
#[derive(Debug, Clone, serde::Serialize)]
pub struct SuperblockDump {
    /// Offset on the device.
    pub offset: u64,
    /// Its fields, unless it is damaged.
    pub superblock: Option<Superblock>,
}

/// One record of a frame.
#[derive(Debug, Clone, serde::Serialize)]
pub struct RecordDump {
    /// The statement about the shard.
    pub op: RecordOp,
    /// Key of the shard.
    pub key: ShardKey,
    /// The encoding of its extent; zeros for a tombstone.
    pub shape: ShardShape,
    /// The note of its writer.
    pub note: ShardNote,
    /// Length of the shard.
    pub len_bytes: u64,
    /// Offset of its payload on the device.
    pub offset: Option<u64>,
    /// Whether the payload matches its checksums.
    pub intact: bool,
}

/// One frame.
#[derive(Debug, Clone, serde::Serialize)]
pub struct FrameDump {
    /// Offset on the device.
    pub offset: u64,
    /// Its fixed fields.
    pub header: FrameHeader,
    /// Its records.
    pub records: Vec<RecordDump>,
    /// Ledger positions that the frame carries.
    pub positions: Vec<Position>,
}

/// One segment that was used at some time. Its frames may be superseded: only the index knows.
#[derive(Debug, Clone, serde::Serialize)]
pub struct SegmentDump {
    /// Offset on the device.
    pub offset: u64,
    /// Its header.
    pub header: SegmentHeader,
    /// Frames of its present generation, in order.
    pub frames: Vec<FrameDump>,
    /// Frames whose headers are damaged.
    pub lost_frames: u32,
}

/// A device to inspect. It is not changed. If it is in use, the view may be inconsistent.
pub struct Dump {
    file: Arc<dyn File>,
    geometry: Geometry,
    superblock: Superblock,
    /// Both superblocks.
    pub superblocks: Vec<SuperblockDump>,
}

/// Opens a device for [`Dump`].
///
/// # Errors
/// `NotDrive` if no superblock is readable, `Io` if the device cannot be opened.
pub fn dump(env: &Env, path: &Path) -> Result<Dump, ToolError> {
    let OpenedDevice { file, superblocks: found, superblock, geometry } = OpenedDevice::look(env, path)?;
    let dump_slot = |(offset, superblock)| SuperblockDump { offset, superblock };
    let superblocks = SUPERBLOCK_OFFSETS.into_iter().zip(found.slots).map(dump_slot).collect();
    Ok(Dump { file, geometry, superblock, superblocks })
}

impl Dump {
    /// The segments that were ever used, in order of place. Each is read when the iterator reaches it.
    pub fn segments(&self) -> impl Iterator<Item = SegmentDump> + '_ {
        (0..self.geometry.segments).filter_map(|id| self.segment(id))
    }

    /// One segment; `None` if it was never used.
    pub fn segment(&self, id: u32) -> Option<SegmentDump> {
        let offset = self.geometry.offset(id, 0);
        let block = read_blocks(&*self.file, offset, 1).ok()?;
        let header = segment_header(&block, self.superblock.uuid, id)?;
        if header.class == SegmentClass::Index {
            return Some(SegmentDump { offset, header, frames: Vec::new(), lost_frames: 0 });
        }
        let from = ScanFrom { segment: id, generation: header.generation, block: 1, last_seq: 0 };
        let scan = scan_segment(&*self.file, self.geometry, from);
        let frames = scan.frames.iter().map(|frame| self.frame(frame)).collect();
        Some(SegmentDump { offset, header, frames, lost_frames: scan.gaps })
    }

    fn frame(&self, frame: &FoundFrame) -> FrameDump {
        let header = frame.header;
        let intact = verify_payloads(&*self.file, self.geometry, frame);
        let record = |(record, intact): (&crate::format::frame::Record, bool)| RecordDump {
            op: record.op,
            key: record.key,
            shape: record.shape,
            note: record.note,
            len_bytes: u64::from(record.blocks) * crate::format::BLOCK as u64,
            offset: (record.op == RecordOp::Put)
                .then(|| self.geometry.offset(header.segment, header.start_block + record.payload_block)),
            intact,
        };
        FrameDump {
            offset: self.geometry.offset(header.segment, header.start_block),
            header,
            records: frame.records.iter().zip(intact).map(record).collect(),
            positions: frame.positions.clone(),
        }
    }
}
