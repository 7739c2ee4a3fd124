//! Why a drive cannot be formatted or opened. Each variant asks for something else from the operator.

use std::io;
use std::path::PathBuf;

use base::{ClusterId, DriveUuid};

/// Why a device was not formatted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatDriveError {
    /// Another process uses it. Stop that one first.
    #[error("device is in use: path={path:?}")]
    InUse {
        /// Which.
        path: PathBuf,
    },
    /// It is a Forebay drive already. Format it only if its data may be lost.
    #[error("device is a drive of a cluster already: path={path:?} cluster={cluster} uuid={uuid}")]
    IsDrive {
        /// Which.
        path: PathBuf,
        /// Whose it is.
        cluster: ClusterId,
        /// Which drive it is.
        uuid: DriveUuid,
    },
    /// Somebody else's data is on it. Format it only if that may be lost.
    #[error("device is not empty: path={path:?} offset={offset}")]
    NotEmpty {
        /// Which.
        path: PathBuf,
        /// Where the first content was seen.
        offset: u64,
    },
    /// It is too small, or the segment size is not a power of two from 1 MiB to 256 MiB.
    #[error(
        "no room for a drive: path={path:?} capacity_bytes={capacity_bytes} segment_bytes={segment_bytes}"
    )]
    Size {
        /// Which.
        path: PathBuf,
        /// What was asked for, or is there.
        capacity_bytes: u64,
        /// Size of a segment.
        segment_bytes: u64,
    },
    /// The system refused.
    #[error("cannot format device: path={path:?}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Why a drive was not opened. Nothing was changed on it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenDriveError {
    /// Another process uses it.
    #[error("drive is in use: path={path:?}")]
    InUse {
        /// Which.
        path: PathBuf,
    },
    /// It was never formatted by Forebay.
    #[error("not a forebay drive: path={path:?}")]
    NotDrive {
        /// Which.
        path: PathBuf,
    },
    /// It is a drive, but both superblocks are damaged. Rebuild its data on another one.
    #[error("both superblocks are damaged: path={path:?}")]
    SuperblocksDamaged {
        /// Which.
        path: PathBuf,
    },
    /// It belongs to another cluster.
    #[error("drive of another cluster: path={path:?} cluster={cluster} expected={expected}")]
    OtherCluster {
        /// Which.
        path: PathBuf,
        /// Whose it is.
        cluster: ClusterId,
        /// Whose it should be.
        expected: ClusterId,
    },
    /// It was written by a newer Forebay. Use that one.
    #[error("format is too new: path={path:?} version={version} known={known}")]
    TooNew {
        /// Which.
        path: PathBuf,
        /// Its version.
        version: u32,
        /// The newest that this program knows.
        known: u32,
    },
    /// It was written by an older Forebay, before the first release. Copy its data with that one.
    #[error(
        "format is too old: path={path:?} version={version} known={known}; copy its data with the program that wrote it"
    )]
    TooOld {
        /// Which.
        path: PathBuf,
        /// Its version.
        version: u32,
        /// The only one that this program knows.
        known: u32,
    },
    /// It uses features that this program does not know. Use a newer Forebay.
    #[error("unknown features: path={path:?} bits={bits:#x}")]
    UnknownFeatures {
        /// Which.
        path: PathBuf,
        /// The unknown bits.
        bits: u64,
    },
    /// The device has become smaller than the drive on it: restore its size, or replace it.
    #[error(
        "device is smaller than the drive: path={path:?} len_bytes={len_bytes} capacity_bytes={capacity_bytes}"
    )]
    Shrunk {
        /// Which.
        path: PathBuf,
        /// What it has.
        len_bytes: u64,
        /// What it had.
        capacity_bytes: u64,
    },
    /// The index checkpoint cannot be read. Rebuild the drive's data on another one.
    #[error("index checkpoint is damaged: path={path:?} reason={reason}")]
    IndexDamaged {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The system refused, or a write failed.
    #[error("cannot open drive: path={path:?}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}
