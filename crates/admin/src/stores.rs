//! Object stores: what can be asked of a node, and the answers.

use serde::{Deserialize, Serialize};
use wire::BoxFuture;
use wire::store::{StoreAuth, StoreCheck, StoreLimits, StoreProtocol, StoreSpeed};

use crate::api::AdminError;

/// An object store, without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreInfo {
    /// Its name.
    pub name: String,
    /// Its number, never used again.
    pub id: u32,
    /// How the connection is made.
    pub protocol: StoreProtocol,
    /// Its name or address.
    pub hostname: String,
    /// Its port.
    pub port: u16,
    /// Its bucket, followed by a slash and the prefix if there is one.
    pub bucket: String,
    /// Part of signatures of version 4.
    pub region: String,
    /// How requests are signed.
    pub auth_method: StoreAuth,
    /// Id of the key that they are signed with.
    pub access_key_id: String,
    /// Whether it has certificates of its own that vouch for it.
    pub has_ca: bool,
    /// How much is asked of it at a time.
    pub limits: StoreLimits,
    /// When it was added, seconds since 1970.
    pub created_s: i64,
    /// Why it cannot be used.
    pub problem: Option<String>,
}

/// Whether a store is tried before its settings are kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verify {
    /// It is, and refused if it does not work.
    #[default]
    First,
    /// It is not.
    Skip,
}

/// Settings of a store; `None` keeps what is there, or takes the default in a new one. No `Debug`: it may hold a secret.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SetStore {
    /// How the connection is made. Default: HTTPS.
    pub protocol: Option<StoreProtocol>,
    /// Its name or address.
    pub hostname: Option<String>,
    /// Its port. Default: 80 or 443.
    pub port: Option<u16>,
    /// Its bucket, followed by a slash and a prefix if there is to be one.
    pub bucket: Option<String>,
    /// Part of signatures of version 4. Default: us-east-1.
    pub region: Option<String>,
    /// How requests are signed. Default: version 4.
    pub auth_method: Option<StoreAuth>,
    /// Id of the key that they are signed with.
    pub access_key_id: Option<String>,
    /// Its secret.
    pub secret_key: Option<String>,
    /// Certificates (PEM) that vouch for it, beside those of the system; empty for none.
    pub ca: Option<String>,
    /// Largest blob in bytes. Default: 64 MiB.
    pub blob_bytes: Option<u32>,
    /// Uploads under way at most. Default: 64.
    pub uploads_max: Option<u16>,
    /// Downloads under way at most. Default: 64.
    pub downloads_max: Option<u16>,
    /// Removals under way at most. Default: 64.
    pub removals_max: Option<u16>,
    /// Millions of bits per second, both ways together; 0 for as many as it takes. Default: 0.
    pub bandwidth_mbps: Option<u32>,
    /// Requests of each kind that all nodes together have under way at most; 0 for what each of them may. Default: 0.
    pub cluster_max: Option<u16>,
    /// Whether it is tried first.
    pub verify: Verify,
}

/// What trying a store found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreValidationInfo {
    /// Whether every step worked.
    pub passed: bool,
    /// Steps in order, up to the first that failed.
    pub checks: Vec<StoreCheck>,
}

/// What is done to see how fast a store is; what is not said is as tiering does it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BenchStore {
    /// Bytes of each object. Default: a blob.
    pub object_bytes: Option<u32>,
    /// Requests under way. Default: blobs made at a time.
    pub parallel: Option<u16>,
    /// How long objects are put, and then got. Default: 5.
    pub seconds: Option<u16>,
}

/// Object stores of a node.
pub trait StoreControl: Send + Sync {
    /// All stores by number.
    fn stores(&self) -> BoxFuture<'_, Result<Vec<StoreInfo>, AdminError>>;
    /// Adds one.
    fn add_store(&self, name: String, settings: SetStore) -> BoxFuture<'_, Result<StoreInfo, AdminError>>;
    /// Changes settings of one; the others stay.
    fn update_store(&self, name: String, settings: SetStore) -> BoxFuture<'_, Result<StoreInfo, AdminError>>;
    /// Removes one that nothing uses. What is in the bucket stays there.
    fn remove_store(&self, name: String) -> BoxFuture<'_, Result<StoreInfo, AdminError>>;
    /// Tries one: stores, reads and removes objects.
    fn validate_store(&self, name: String) -> BoxFuture<'_, Result<StoreValidationInfo, AdminError>>;
    /// Measures how fast one is: puts, gets and removes objects.
    fn bench_store(&self, name: String, request: BenchStore)
    -> BoxFuture<'_, Result<StoreSpeed, AdminError>>;
    /// Tries settings without keeping them. If there is a store of that name, they are changes to it.
    fn try_store(
        &self,
        name: String,
        settings: SetStore,
    ) -> BoxFuture<'_, Result<StoreValidationInfo, AdminError>>;
}
