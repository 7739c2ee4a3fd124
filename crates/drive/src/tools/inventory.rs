//! What shards a drive holds, without opening it for service.

use std::path::Path;

use base::DriveUuid;
use base::env::Env;
use wire::drive::ShardEntry;

use super::{Found, ToolError};
use crate::recovery::recover;

/// The shards of the drive `uuid` at `path`, in order. Reads the index as opening would, and changes nothing.
///
/// # Errors
/// `NotDrive` if something else is there, `InUse`, `Damaged` or `Io`.
pub fn inventory(env: &Env, path: &Path, uuid: DriveUuid) -> Result<Vec<ShardEntry>, ToolError> {
    let Found { file, superblock, geometry, .. } = Found::lock(env, path)?;
    if superblock.uuid != uuid {
        return Err(ToolError::NotDrive { path: path.to_owned() });
    }
    let recovered = recover(&*file, geometry, &superblock);
    let recovered = recovered.map_err(|reason| ToolError::Damaged { path: path.to_owned(), reason })?;
    Ok(recovered.index.list(None, usize::MAX))
}
