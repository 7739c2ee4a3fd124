//! Lists the shards of a drive without opening it for service.

use std::path::Path;

use base::DriveUuid;
use base::env::Env;
use wire::drive::ShardEntry;

use super::{OpenedDevice, ToolError};
use crate::recovery::recover;

/// The shards of the drive `uuid` at `path`, in order of keys. Reads the index as an open would, and changes nothing.
///
/// # Errors
/// `NotDrive` if the device is not that drive, `InUse`, `Damaged` or `Io`.
pub fn inventory(env: &Env, path: &Path, uuid: DriveUuid) -> Result<Vec<ShardEntry>, ToolError> {
    let OpenedDevice { file, superblock, geometry, .. } = OpenedDevice::lock(env, path)?;
    if superblock.uuid != uuid {
        return Err(ToolError::NotDrive { path: path.to_owned() });
    }
    let recovered = recover(&*file, geometry, &superblock);
    let recovered = recovered.map_err(|reason| ToolError::Damaged { path: path.to_owned(), reason })?;
    Ok(recovered.index.list(None, usize::MAX))
}
