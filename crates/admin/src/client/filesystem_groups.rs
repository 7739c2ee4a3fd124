//! Calls about filesystem groups.

use hyper::Method;

use super::{AdminClient, CallError, percent_encode};
use crate::api::FilesystemInfo;
use crate::filesystem_groups::{FilesystemGroupInfo, MoveFilesystem, SetFilesystemGroup};

fn path(name: &str) -> String {
    format!("/v1/filesystem-groups/{}", percent_encode(name.as_bytes()))
}

impl AdminClient {
    /// All filesystem groups by number.
    pub async fn filesystem_groups(&self) -> Result<Vec<FilesystemGroupInfo>, CallError> {
        self.call(Method::GET, "/v1/filesystem-groups", None::<&()>).await
    }

    /// Adds a filesystem group.
    pub async fn add_filesystem_group(
        &self,
        name: &str,
        settings: &SetFilesystemGroup,
    ) -> Result<FilesystemGroupInfo, CallError> {
        self.call(Method::PUT, &path(name), Some(settings)).await
    }

    /// Changes times of a filesystem group. Restarts tiering of all filesystems that have its times.
    pub async fn update_filesystem_group(
        &self,
        name: &str,
        settings: &SetFilesystemGroup,
    ) -> Result<FilesystemGroupInfo, CallError> {
        self.call(Method::PATCH, &path(name), Some(settings)).await
    }

    /// Removes a filesystem group that no filesystem belongs to.
    pub async fn remove_filesystem_group(&self, name: &str) -> Result<FilesystemGroupInfo, CallError> {
        self.call(Method::DELETE, &path(name), None::<&()>).await
    }

    /// Moves a filesystem to another group.
    pub async fn move_filesystem(
        &self,
        name: &str,
        request: &MoveFilesystem,
    ) -> Result<FilesystemInfo, CallError> {
        let path = format!("/v1/filesystems/{}/group", percent_encode(name.as_bytes()));
        self.call(Method::POST, &path, Some(request)).await
    }
}
