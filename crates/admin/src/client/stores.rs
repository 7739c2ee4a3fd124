//! Calls about object stores.

use hyper::Method;
use wire::store::StoreSpeed;

use super::{AdminClient, CallError, percent_encode};
use crate::stores::{BenchStore, SetStore, StoreInfo, StoreValidationInfo};

fn path(name: &str, step: &str) -> String {
    format!("/v1/stores/{}{step}", percent_encode(name.as_bytes()))
}

impl AdminClient {
    /// All stores by number.
    pub async fn stores(&self) -> Result<Vec<StoreInfo>, CallError> {
        self.call(Method::GET, "/v1/stores", None::<&()>).await
    }

    /// Adds a store.
    pub async fn add_store(&self, name: &str, settings: &SetStore) -> Result<StoreInfo, CallError> {
        self.call(Method::PUT, &path(name, ""), Some(settings)).await
    }

    /// Changes settings of a store.
    pub async fn update_store(&self, name: &str, settings: &SetStore) -> Result<StoreInfo, CallError> {
        self.call(Method::PATCH, &path(name, ""), Some(settings)).await
    }

    /// Removes a store that no filesystem uses.
    pub async fn remove_store(&self, name: &str) -> Result<StoreInfo, CallError> {
        self.call(Method::DELETE, &path(name, ""), None::<&()>).await
    }

    /// Checks a store.
    pub async fn validate_store(&self, name: &str) -> Result<StoreValidationInfo, CallError> {
        self.call(Method::POST, &path(name, "/validate"), None::<&()>).await
    }

    /// Measures the speed of a store.
    pub async fn bench_store(&self, name: &str, request: &BenchStore) -> Result<StoreSpeed, CallError> {
        self.call(Method::POST, &path(name, "/bench"), Some(request)).await
    }

    /// Checks settings without keeping them.
    pub async fn try_store(&self, name: &str, settings: &SetStore) -> Result<StoreValidationInfo, CallError> {
        self.call(Method::POST, &path(name, "/try"), Some(settings)).await
    }
}
