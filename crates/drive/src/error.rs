//! Reasons why a drive cannot be formatted or opened. Each variant requires a different action by the operator.

use std::io;
use std::path::PathBuf;

use base::{ClusterId, DriveUuid};

/// Why a device was not formatted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatDriveError {
    /// Another process uses the device. Stop that process first.
    #[error("device is in use: path={path:?}")]
    InUse {
        /// Path of the device.
        path: PathBuf,
    },
    /// The device is a Forebay drive already. Format it only if its data may be lost.
    #[error("device is a drive of a cluster already: path={path:?} cluster={cluster} uuid={uuid}")]
    IsDrive {
        /// Path of the device.
        path: PathBuf,
        /// The cluster that the drive belongs to.
        cluster: ClusterId,
        /// The drive's UUID.
        uuid: DriveUuid,
    },
    /// The device holds other data. Format it only if that data may be lost.
    #[error("device is not empty: path={path:?} offset={offset}")]
    NotEmpty {
        /// Path of the device.
        path: PathBuf,
        /// Offset of the first content found, in bytes.
        offset: u64,
    },
    /// The device is too small, or the segment size is not a power of two from 1 MiB to 256 MiB.
    #[error(
        "no room for a drive: path={path:?} capacity_bytes={capacity_bytes} segment_bytes={segment_bytes}"
    )]
    Size {
        /// Path of the device.
        path: PathBuf,
        /// Requested or actual size of the device.
        capacity_bytes: u64,
        /// Size of a segment.
        segment_bytes: u64,
    },
    /// A system call failed.
    #[error("cannot format device: path={path:?}")]
    Io {
        /// Path of the device.
        path: PathBuf,
        /// Error of the system.
        #[source]
        source: io::Error,
    },
}

/// Why a drive was not opened. The device is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenDriveError {
    /// Another process uses the drive.
    #[error("drive is in use: path={path:?}")]
    InUse {
        /// Path of the device.
        path: PathBuf,
    },
    /// The device was never formatted by Forebay.
    #[error("not a forebay drive: path={path:?}")]
    NotDrive {
        /// Path of the device.
        path: PathBuf,
    },
    /// The device is a drive, but both superblocks are damaged. Rebuild its data on another drive.
    #[error("both superblocks are damaged: path={path:?}")]
    SuperblocksDamaged {
        /// Path of the device.
        path: PathBuf,
    },
    /// The drive belongs to another cluster.
    #[error("drive of another cluster: path={path:?} cluster={cluster} expected={expected}")]
    OtherCluster {
        /// Path of the device.
        path: PathBuf,
        /// The cluster that the drive belongs to.
        cluster: ClusterId,
        /// The cluster that it should belong to.
        expected: ClusterId,
    },
    /// It is another drive of the cluster.
    #[error("another drive is there: path={path:?} uuid={uuid} expected={expected}")]
    OtherDrive {
        /// Path of the device.
        path: PathBuf,
        /// The drive that is there.
        uuid: DriveUuid,
        /// The drive that should be there.
        expected: DriveUuid,
    },
    /// The drive was written by a newer Forebay. Use that version.
    #[error("format is too new: path={path:?} version={version} known={known}")]
    TooNew {
        /// Path of the device.
        path: PathBuf,
        /// Format version of the drive.
        version: u32,
        /// Newest format version that this program knows.
        known: u32,
    },
    /// The drive was written by a Forebay before the first release. Copy its data with that version.
    #[error(
        "format is too old: path={path:?} version={version} known={known}; copy its data with the program that wrote it"
    )]
    TooOld {
        /// Path of the device.
        path: PathBuf,
        /// Format version of the drive.
        version: u32,
        /// The only format version that this program knows.
        known: u32,
    },
    /// The drive uses features that this program does not know. Use a newer Forebay.
    #[error("unknown features: path={path:?} bits={bits:#x}")]
    UnknownFeatures {
        /// Path of the device.
        path: PathBuf,
        /// The unknown feature bits.
        bits: u64,
    },
    /// The device has become smaller than the drive on it: restore its size, or replace the drive.
    #[error(
        "device is smaller than the drive: path={path:?} len_bytes={len_bytes} capacity_bytes={capacity_bytes}"
    )]
    Shrunk {
        /// Path of the device.
        path: PathBuf,
        /// Present size of the device.
        len_bytes: u64,
        /// Size of the drive, as formatted.
        capacity_bytes: u64,
    },
    /// The index checkpoint cannot be read. Rebuild the drive's data on another drive.
    #[error("index checkpoint is damaged: path={path:?} reason={reason}")]
    IndexDamaged {
        /// Path of the device.
        path: PathBuf,
        /// The damage, as text.
        reason: String,
    },
    /// A system call failed, or a write.
    #[error("cannot open drive: path={path:?}")]
    Io {
        /// Path of the device.
        path: PathBuf,
        /// Error of the system.
        #[source]
        source: io::Error,
    },
}
