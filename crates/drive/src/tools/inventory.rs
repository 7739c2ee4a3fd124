//! What shards a drive holds, without opening it for service.

use std::io;
use std::path::Path;

use base::DriveUuid;
use base::env::{Caching, Env, OpenMode};
use wire::drive::ShardEntry;

use super::ToolError;
use crate::format::FORMAT_VERSION;
use crate::recovery::recover;
use crate::scan::Superblocks;

/// The shards of the drive `uuid` at `path`, in order. Reads the index as opening would, and changes nothing.
///
/// # Errors
/// `NotDrive` if something else is there, `InUse`, `Damaged` or `Io`.
pub fn inventory(env: &Env, path: &Path, uuid: DriveUuid) -> Result<Vec<ShardEntry>, ToolError> {
    let io = |source| ToolError::Io { path: path.to_owned(), source };
    let file = env.files.open(path, OpenMode::Existing, Caching::Direct).map_err(io)?;
    file.try_lock().map_err(|source| match source.kind() {
        io::ErrorKind::WouldBlock => ToolError::InUse { path: path.to_owned() },
        _ => io(source),
    })?;
    let superblocks = Superblocks::read(&*file);
    let superblock = superblocks.newest().filter(|superblock| superblock.version <= FORMAT_VERSION);
    let not_drive = || ToolError::NotDrive { path: path.to_owned() };
    let superblock = superblock.filter(|superblock| superblock.uuid == uuid).ok_or_else(not_drive)?;
    let geometry = superblock.geometry().ok_or_else(not_drive)?;
    let recovered = recover(&*file, geometry, superblock);
    let recovered = recovered.map_err(|reason| ToolError::Damaged { path: path.to_owned(), reason })?;
    Ok(recovered.index.list(None, usize::MAX))
}
