//! Calls for backups of the metadata.

use hyper::Method;

use super::{AdminClient, CallError};
use crate::backups::{BackupsInfo, SetBackups};

impl AdminClient {
    /// When backups of the metadata are made, and those that there are.
    pub async fn backups(&self) -> Result<Option<BackupsInfo>, CallError> {
        self.call(Method::GET, "/v1/meta/schedule", None::<&()>).await
    }

    /// Changes when they are made, and where they go.
    pub async fn set_backups(&self, request: &SetBackups) -> Result<Option<BackupsInfo>, CallError> {
        self.call(Method::POST, "/v1/meta/schedule", Some(request)).await
    }
}
