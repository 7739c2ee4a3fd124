//! Tools for people, on a drive that is not open: look at it, check it, measure the device.

pub(crate) mod bench;
pub(crate) mod dump;
pub(crate) mod fsck;
pub(crate) mod inventory;

use std::io;
use std::path::PathBuf;

use crate::error::{FormatDriveError, OpenDriveError};

/// Why a tool could not work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// There is nothing of ours on the device.
    #[error("not a forebay drive: path={path:?}")]
    NotDrive {
        /// Which.
        path: PathBuf,
    },
    /// A server has the drive open. Stop it first.
    #[error("drive is in use: path={path:?}")]
    InUse {
        /// Which.
        path: PathBuf,
    },
    /// The device could not be read.
    #[error("cannot read device: path={path:?}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Its index cannot be read.
    #[error("drive is damaged: path={path:?} reason={reason}")]
    Damaged {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The bench could not make its drive.
    #[error("cannot make a drive to measure")]
    Format(#[from] FormatDriveError),
    /// The bench could not open its drive.
    #[error("cannot open the drive to measure")]
    Open(#[from] OpenDriveError),
    /// An operation that was measured failed.
    #[error("measurement failed: reason={reason}")]
    Measure {
        /// What the drive said.
        reason: String,
    },
}
