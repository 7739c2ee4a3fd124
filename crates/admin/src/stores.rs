//! Object stores: requests to a node, and their answers.

use serde::{Deserialize, Serialize};
use wire::BoxFuture;
use wire::store::{StoreAuth, StoreCheck, StoreLimits, StoreProtocol, StoreSpeed};

use crate::api::AdminError;

/// An object store, without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreInfo {
    /// Name of the store.
    pub name: String,
    /// Number of the store; never reused.
    pub id: u32,
    /// Protocol of the connection.
    pub protocol: StoreProtocol,
    /// Host name or address of the store.
    pub hostname: String,
    /// Port of the store.
    pub port: u16,
    /// Bucket, followed by a slash and the prefix if there is one.
    pub bucket: String,
    /// Region in signatures of version 4.
    pub region: String,
    /// How requests are signed.
    pub auth_method: StoreAuth,
    /// Id of the access key.
    pub access_key_id: String,
    /// Whether the store has CA certificates of its own.
    pub has_ca: bool,
    /// Limits of requests to the store.
    pub limits: StoreLimits,
    /// Creation time, seconds since 1970.
    pub created_s: i64,
    /// Why the store cannot be used.
    pub problem: Option<String>,
}

/// Whether a store is checked before its settings are kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verify {
    /// The store is checked, and refused if the check fails.
    #[default]
    First,
    /// The store is not checked.
    Skip,
}

/// Settings of a store; `None` keeps the present value, or takes the default in a new store. No `Debug`: it may hold a
/// secret.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SetStore {
    /// Protocol of the connection. Default: HTTPS.
    pub protocol: Option<StoreProtocol>,
    /// Host name or address of the store.
    pub hostname: Option<String>,
    /// Port of the store. Default: 80 or 443.
    pub port: Option<u16>,
    /// Bucket, followed by a slash and a prefix if wanted.
    pub bucket: Option<String>,
    /// Region in signatures of version 4. Default: us-east-1.
    pub region: Option<String>,
    /// How requests are signed. Default: version 4.
    pub auth_method: Option<StoreAuth>,
    /// Id of the access key.
    pub access_key_id: Option<String>,
    /// Secret of the access key.
    pub secret_key: Option<String>,
    /// CA certificates (PEM) for the store, besides those of the system; empty for none.
    pub ca: Option<String>,
    /// Largest blob in bytes. Default: 64 MiB.
    pub blob_bytes: Option<u32>,
    /// Most uploads under way. Default: 64.
    pub uploads_max: Option<u16>,
    /// Most downloads under way. Default: 64.
    pub downloads_max: Option<u16>,
    /// Most removals under way. Default: 64.
    pub removals_max: Option<u16>,
    /// Bandwidth in millions of bits per second, both ways together; 0: unlimited. Default: 0.
    pub bandwidth_mbps: Option<u32>,
    /// Most requests of each kind that all nodes together have under way; 0: only the limits of each node. Default: 0.
    pub cluster_max: Option<u16>,
    /// Whether the store is checked first.
    pub verify: Verify,
}

/// Result of checking a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreValidationInfo {
    /// Whether every step worked.
    pub passed: bool,
    /// Steps in order, up to the first that failed.
    pub checks: Vec<StoreCheck>,
}

/// A speed test of a store; the defaults are what tiering uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BenchStore {
    /// Bytes of each object. Default: size of a blob.
    pub object_bytes: Option<u32>,
    /// Requests under way. Default: the number of blobs that tiering makes at a time.
    pub parallel: Option<u16>,
    /// Seconds of puts, and then of gets. Default: 5.
    pub seconds: Option<u16>,
}

/// Object stores of a node.
pub trait StoreControl: Send + Sync {
    /// All stores by number.
    fn stores(&self) -> BoxFuture<'_, Result<Vec<StoreInfo>, AdminError>>;
    /// Adds a store.
    fn add_store(&self, name: String, settings: SetStore) -> BoxFuture<'_, Result<StoreInfo, AdminError>>;
    /// Changes settings of a store; the others stay.
    fn update_store(&self, name: String, settings: SetStore) -> BoxFuture<'_, Result<StoreInfo, AdminError>>;
    /// Removes a store that no filesystem uses. Objects in the bucket stay.
    fn remove_store(&self, name: String) -> BoxFuture<'_, Result<StoreInfo, AdminError>>;
    /// Checks a store: puts, reads and removes objects.
    fn validate_store(&self, name: String) -> BoxFuture<'_, Result<StoreValidationInfo, AdminError>>;
    /// Measures the speed of a store: puts, gets and removes objects.
    fn bench_store(&self, name: String, request: BenchStore)
    -> BoxFuture<'_, Result<StoreSpeed, AdminError>>;
    /// Checks settings without keeping them. If the store exists, they are changes to its settings.
    fn try_store(
        &self,
        name: String,
        settings: SetStore,
    ) -> BoxFuture<'_, Result<StoreValidationInfo, AdminError>>;
}
