//! Formatting: writes the two superblocks of an empty drive. The rest of the device may have any content.

use std::io;
use std::path::Path;

use base::env::{Caching, Env, File, OpenMode};
use base::units::{MIB, align_down, align_up};
use base::{ClusterId, DriveUuid};

use crate::buffer::AlignedBuf;
use crate::error::FormatDriveError;
use crate::format::superblock::{CheckpointPointer, Features, Superblock};
use crate::format::{BLOCK, FORMAT_VERSION, Geometry, SUPERBLOCK_OFFSETS};
use crate::scan::Superblocks;

/// Bytes at both ends of a device that are checked for content: partition tables and the superblocks of common
/// filesystems are there.
const PROBE_BYTES: u64 = MIB;

/// The treatment of a device that has content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Refuse to format.
    Keep,
    /// Format it: the content is lost.
    Overwrite,
}

/// The allocation of a file's space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preallocate {
    /// Space is allocated as the file is written, and the filesystem may turn out to be full then.
    Nothing,
    /// Space is reserved. Quick, but the filesystem commits its journal at each first write of a range, which about
    /// halves the speed of puts until every segment was written once.
    Reserve,
    /// The whole file is filled with zeros, which takes as long as writing it. Puts have their full speed at once.
    WriteZeros,
}

/// Options for formatting a device.
#[derive(Debug, Clone)]
pub struct FormatOptions {
    /// The cluster that it will belong to.
    pub cluster: ClusterId,
    /// The UUID of the drive.
    pub uuid: DriveUuid,
    /// Size in bytes. A file is created or extended to it; `None` takes the present size.
    pub capacity_bytes: Option<u64>,
    /// Size of a segment, a power of two from 1 MiB to 256 MiB; `None` chooses by capacity.
    pub segment_bytes: Option<u64>,
    /// The treatment of a device that has content.
    pub existing: Existing,
    /// The allocation of a file's space; ignored for a device.
    pub preallocate: Preallocate,
}

/// Writes the superblocks of an empty drive.
pub(crate) fn format(env: &Env, path: &Path, options: &FormatOptions) -> Result<(), FormatDriveError> {
    let io = |source| FormatDriveError::Io { path: path.to_owned(), source };
    let file = env.files.open(path, OpenMode::Create, Caching::Direct).map_err(io)?;
    file.try_lock().map_err(|source| match source.kind() {
        io::ErrorKind::WouldBlock => FormatDriveError::InUse { path: path.to_owned() },
        _ => io(source),
    })?;
    let len_bytes = file.len().map_err(io)?;
    if options.existing == Existing::Keep {
        refuse_content(path, &*file, len_bytes)?;
    }
    let capacity_bytes = options.capacity_bytes.unwrap_or(len_bytes);
    let segment_bytes =
        options.segment_bytes.unwrap_or_else(|| Geometry::default_segment_bytes(capacity_bytes));
    let geometry = Geometry::new(capacity_bytes, segment_bytes).ok_or_else(|| FormatDriveError::Size {
        path: path.to_owned(),
        capacity_bytes,
        segment_bytes,
    })?;
    if len_bytes < capacity_bytes {
        match options.preallocate {
            Preallocate::Nothing => file.set_len(capacity_bytes),
            Preallocate::Reserve => file.allocate(capacity_bytes),
            Preallocate::WriteZeros => {
                file.allocate(capacity_bytes).and_then(|()| write_zeros(&*file, len_bytes, capacity_bytes))
            }
        }
        .map_err(io)?;
    }
    write_superblocks(&*file, geometry, options).map_err(io)?;
    if let Some(parent) = path.parent() {
        env.files.sync_dir(parent).map_err(io)?;
    }
    Ok(())
}

fn write_zeros(file: &dyn File, from: u64, end: u64) -> io::Result<()> {
    let zeros = AlignedBuf::zeroed(MIB as usize);
    let mut offset = align_down(from, BLOCK as u64);
    while offset < end {
        let len = (align_up(end, BLOCK as u64) - offset).min(MIB);
        file.write_at(&zeros[..len as usize], offset)?;
        offset += len;
    }
    Ok(())
}

fn write_superblocks(file: &dyn File, geometry: Geometry, options: &FormatOptions) -> io::Result<()> {
    // An old drive's superblock must not survive beside a new one: clear both before writing.
    for offset in SUPERBLOCK_OFFSETS {
        file.write_at(&AlignedBuf::blocks(1), offset)?;
    }
    file.sync_data()?;
    let mut superblock = Superblock {
        version: FORMAT_VERSION,
        features: Features::default(),
        cluster: options.cluster,
        uuid: options.uuid,
        capacity_bytes: geometry.capacity_bytes,
        segment_bytes: geometry.segment_bytes,
        sequence: 0,
        incarnation: 0,
        gap_incarnation: 0,
        closed: true,
        checkpoint: CheckpointPointer::default(),
        previous: CheckpointPointer::default(),
    };
    for _ in 0..2 {
        superblock.sequence += 1;
        let slot = SUPERBLOCK_OFFSETS[(superblock.sequence % 2) as usize];
        file.write_at(&superblock.encode(), slot)?;
    }
    file.sync_data()
}

fn refuse_content(path: &Path, file: &dyn File, len_bytes: u64) -> Result<(), FormatDriveError> {
    let io = |source| FormatDriveError::Io { path: path.to_owned(), source };
    if len_bytes >= Geometry::SMALLEST_BYTES
        && let Some(found) = Superblocks::read(file).newest()
    {
        return Err(FormatDriveError::IsDrive {
            path: path.to_owned(),
            cluster: found.cluster,
            uuid: found.uuid,
        });
    }
    let tail = len_bytes.saturating_sub(PROBE_BYTES).next_multiple_of(BLOCK as u64);
    for (start, end) in [(0, PROBE_BYTES.min(len_bytes)), (tail, len_bytes)] {
        let mut offset = start;
        while offset < end {
            let len = (end - offset).min(BLOCK as u64) as usize;
            let mut block = AlignedBuf::blocks(1);
            file.read_at(&mut block[..len], offset).map_err(io)?;
            if block.iter().any(|byte| *byte != 0) {
                return Err(FormatDriveError::NotEmpty { path: path.to_owned(), offset });
            }
            offset += BLOCK as u64;
        }
    }
    Ok(())
}
