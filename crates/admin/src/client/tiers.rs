//! Calls about tiering.

use hyper::Method;

use super::{AdminClient, CallError, percent_encode};
use crate::tiers::{
    AttachStore, FetchFileInfo, FetchStep, ForecastInfo, ReleaseInfo, TierFile, TierInfo, TierLocationInfo,
    TierOpsInfo,
};

fn path(name: &str, step: &str) -> String {
    format!("/v1/filesystems/{}/tier{step}", percent_encode(name.as_bytes()))
}

impl AdminClient {
    /// Filesystems that have a store.
    pub async fn tiers(&self) -> Result<Vec<TierInfo>, CallError> {
        self.call(Method::GET, "/v1/tiers", None::<&()>).await
    }

    /// Requests to the stores of filesystems.
    pub async fn tier_ops(&self) -> Result<Vec<TierOpsInfo>, CallError> {
        self.call(Method::GET, "/v1/tiers/ops", None::<&()>).await
    }

    /// Forecast of the space that a retention takes.
    pub async fn tier_forecast(&self, retention_s: Option<u64>) -> Result<Vec<ForecastInfo>, CallError> {
        let query = retention_s.map_or_else(String::new, |retention_s| format!("?retention_s={retention_s}"));
        self.call(Method::GET, &format!("/v1/tiers/forecast{query}"), None::<&()>).await
    }

    /// Starts tiering of a filesystem to a store; if the filesystem has this store, changes its times.
    pub async fn attach_store(&self, name: &str, request: &AttachStore) -> Result<TierInfo, CallError> {
        self.call(Method::POST, &path(name, ""), Some(request)).await
    }

    /// Brings all content back to drives, then detaches the store.
    pub async fn detach_store(&self, name: &str) -> Result<TierInfo, CallError> {
        self.call(Method::DELETE, &path(name, ""), None::<&()>).await
    }

    /// The place of a file's bytes.
    pub async fn tier_location(&self, name: &str, file: &str) -> Result<TierLocationInfo, CallError> {
        let query = format!("/location?path={}", percent_encode(file.as_bytes()));
        self.call(Method::GET, &path(name, &query), None::<&()>).await
    }

    /// Brings parts of files back to drives. The store decides how long that takes.
    pub async fn tier_fetch(&self, name: &str, step: &FetchStep) -> Result<Vec<FetchFileInfo>, CallError> {
        self.call_unbounded(Method::POST, &path(name, "/fetch"), Some(step)).await
    }

    /// Releases from drives the bytes of a file that the store has.
    pub async fn tier_release(&self, name: &str, file: &TierFile) -> Result<ReleaseInfo, CallError> {
        self.call_unbounded(Method::POST, &path(name, "/release"), Some(file)).await
    }
}
