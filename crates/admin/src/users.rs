//! Users, access keys and policies: what can be asked of a node, and the answers.

use serde::{Deserialize, Serialize};
use wire::BoxFuture;

use crate::api::AdminError;

/// A user of the S3 endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserInfo {
    /// Its name.
    pub name: String,
    /// Its number, never used again.
    pub id: u32,
    /// User number on the filesystem.
    pub uid: u32,
    /// Group of what it creates.
    pub gid: u32,
    /// Its other groups.
    pub groups: Vec<u32>,
    /// Whether it may do everything.
    pub admin: bool,
    /// Whether its keys do not count.
    pub disabled: bool,
    /// Whether it has a policy.
    pub has_policy: bool,
    /// How many access keys it has.
    pub keys: usize,
    /// When it was added, seconds since 1970.
    pub created_s: i64,
}

/// A new user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddUser {
    /// Its name.
    pub name: String,
    /// User number on the filesystem; 0 leaves the decision to policies.
    pub uid: u32,
    /// Group of what it creates.
    pub gid: u32,
    /// Its other groups.
    pub groups: Vec<u32>,
    /// Whether it may do everything.
    pub admin: bool,
    /// What it may do, as JSON text.
    pub policy: Option<String>,
}

/// Whether a user or key counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// It does.
    Enabled,
    /// It does not.
    Disabled,
}

/// An access key, without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyInfo {
    /// Its id.
    pub access_key: String,
    /// Whose it is.
    pub user: String,
    /// `active`, `disabled` (it or its user), `expired`, or `unreadable` (sealed with another `node.key`).
    pub state: String,
    /// When it was added, seconds since 1970.
    pub created_s: i64,
    /// When it ends, seconds since 1970.
    pub expires_s: Option<i64>,
}

/// A new access key. No `Debug`: it may hold a secret.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddKey {
    /// Whose it is.
    pub user: String,
    /// When it ends, seconds from now.
    pub expires_in_s: Option<u64>,
    /// Its id; `None`: a new one.
    pub access_key: Option<String>,
    /// Its secret; `None`: a new one.
    pub secret_key: Option<String>,
}

/// An access key that was added. The secret is never told again. No `Debug` for that reason.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewKey {
    /// Its id.
    pub access_key: String,
    /// Its secret.
    pub secret_key: String,
    /// Whose it is.
    pub user: String,
    /// When it ends, seconds since 1970.
    pub expires_s: Option<i64>,
}

/// What a policy belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyTarget {
    /// A user: what it may do.
    User(String),
    /// A role: what short-lived keys that take it are limited to.
    Role(String),
    /// A bucket: who may do what with it.
    Bucket(String),
}

/// A policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyInfo {
    /// What it belongs to.
    pub target: PolicyTarget,
    /// JSON text, as it was given.
    pub policy: String,
}

/// The audit log.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditInfo {
    /// Requests written down since the start of the node.
    pub written: u64,
    /// Requests that wait for that.
    pub queued: u64,
    /// Requests that could not be written down.
    pub lost: u64,
    /// Why nothing can be written now.
    pub problem: Option<String>,
}

/// Users of a node.
pub trait UserControl: Send + Sync {
    /// All users by number.
    fn users(&self) -> BoxFuture<'_, Result<Vec<UserInfo>, AdminError>>;
    /// Adds one.
    fn add_user(&self, request: AddUser) -> BoxFuture<'_, Result<UserInfo, AdminError>>;
    /// Removes one with its keys.
    fn remove_user(&self, name: String) -> BoxFuture<'_, Result<UserInfo, AdminError>>;
    /// Decides whether its keys count.
    fn set_user(&self, name: String, standing: Standing) -> BoxFuture<'_, Result<UserInfo, AdminError>>;
    /// All access keys by id.
    fn keys(&self) -> BoxFuture<'_, Result<Vec<KeyInfo>, AdminError>>;
    /// Adds one.
    fn add_key(&self, request: AddKey) -> BoxFuture<'_, Result<NewKey, AdminError>>;
    /// Removes one.
    fn remove_key(&self, access_key: String) -> BoxFuture<'_, Result<KeyInfo, AdminError>>;
    /// Decides whether it counts.
    fn set_key(&self, access_key: String, standing: Standing) -> BoxFuture<'_, Result<KeyInfo, AdminError>>;
    /// The policies of all users and roles.
    fn policies(&self) -> BoxFuture<'_, Result<Vec<PolicyInfo>, AdminError>>;
    /// One of a user, a role or a bucket.
    fn policy(&self, target: PolicyTarget) -> BoxFuture<'_, Result<PolicyInfo, AdminError>>;
    /// Sets or replaces one.
    fn set_policy(&self, policy: PolicyInfo) -> BoxFuture<'_, Result<PolicyInfo, AdminError>>;
    /// Removes one; a role goes with it.
    fn remove_policy(&self, target: PolicyTarget) -> BoxFuture<'_, Result<PolicyInfo, AdminError>>;
}
