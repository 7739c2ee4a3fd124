//! Tools for operators, on a drive that is not open: inspect it, check it, measure the device.

pub(crate) mod bench;
pub(crate) mod dump;
pub(crate) mod fsck;
pub(crate) mod inventory;
pub(crate) mod reads;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::env::{Caching, Env, File, OpenMode};

use crate::error::{FormatDriveError, OpenDriveError};
use crate::format::superblock::Superblock;
use crate::format::{FORMAT_VERSION, Geometry};
use crate::scan::Superblocks;

/// Why a tool failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// The device holds no Forebay drive.
    #[error("not a forebay drive: path={path:?}")]
    NotDrive {
        /// Path of the device.
        path: PathBuf,
    },
    /// A server has the drive open. Stop it first.
    #[error("drive is in use: path={path:?}")]
    InUse {
        /// Path of the device.
        path: PathBuf,
    },
    /// The device could not be read.
    #[error("cannot read device: path={path:?}")]
    Io {
        /// Path of the device.
        path: PathBuf,
        /// Error of the system.
        #[source]
        source: io::Error,
    },
    /// The drive's index cannot be read.
    #[error("drive is damaged: path={path:?} reason={reason}")]
    Damaged {
        /// Path of the device.
        path: PathBuf,
        /// The damage, as text.
        reason: String,
    },
    /// The bench could not make its drive.
    #[error("cannot make a drive to measure")]
    Format(#[from] FormatDriveError),
    /// The bench could not open its drive.
    #[error("cannot open the drive to measure")]
    Open(#[from] OpenDriveError),
    /// A measured operation failed.
    #[error("measurement failed: reason={reason}")]
    Measure {
        /// The error of the drive, as text.
        reason: String,
    },
}

/// A device with a drive on it.
struct OpenedDevice {
    file: Arc<dyn File>,
    superblocks: Superblocks,
    /// The newest of the superblocks.
    superblock: Superblock,
    geometry: Geometry,
}

impl OpenedDevice {
    /// Opens a device for reading; another process may be using it.
    fn look(env: &Env, path: &Path) -> Result<Self, ToolError> {
        let io = |source| ToolError::Io { path: path.to_owned(), source };
        let file = env.files.open(path, OpenMode::Existing, Caching::Direct).map_err(io)?;
        Self::read(file, path)
    }

    /// Opens a device and locks it against other processes. Refuses other format versions.
    fn lock(env: &Env, path: &Path) -> Result<Self, ToolError> {
        let io = |source| ToolError::Io { path: path.to_owned(), source };
        let file = env.files.open(path, OpenMode::Existing, Caching::Direct).map_err(io)?;
        crate::device::lock(&*file).map_err(|source| match source.kind() {
            io::ErrorKind::WouldBlock => ToolError::InUse { path: path.to_owned() },
            _ => io(source),
        })?;
        let found = Self::read(file, path)?;
        let known = found.superblock.version == FORMAT_VERSION;
        if known { Ok(found) } else { Err(ToolError::NotDrive { path: path.to_owned() }) }
    }

    fn read(file: Arc<dyn File>, path: &Path) -> Result<Self, ToolError> {
        let not_drive = || ToolError::NotDrive { path: path.to_owned() };
        let superblocks = Superblocks::read(&*file);
        let superblock = superblocks.newest().cloned().ok_or_else(not_drive)?;
        let geometry = superblock.geometry().ok_or_else(not_drive)?;
        Ok(Self { file, superblocks, superblock, geometry })
    }
}
