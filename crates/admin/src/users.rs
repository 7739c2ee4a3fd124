//! Users, access keys and policies: requests to a node, and their answers.

use serde::{Deserialize, Serialize};
use wire::BoxFuture;

use crate::api::AdminError;

/// A user of the S3 endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserInfo {
    /// Name of the user.
    pub name: String,
    /// Number of the user; never reused.
    pub id: u32,
    /// User number on the filesystem.
    pub uid: u32,
    /// Primary group: the group of files that the user creates.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Whether the user is an administrator: everything is allowed.
    pub admin: bool,
    /// Whether all keys of the user are refused.
    pub disabled: bool,
    /// Whether the user has a policy.
    pub has_policy: bool,
    /// Number of access keys.
    pub keys: usize,
    /// Creation time, seconds since 1970.
    pub created_s: i64,
}

/// A new user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddUser {
    /// Name of the user.
    pub name: String,
    /// User number on the filesystem; with 0, only policies decide.
    pub uid: u32,
    /// Primary group: the group of files that the user creates.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Whether the user is an administrator: everything is allowed.
    pub admin: bool,
    /// Policy of the user, as JSON text.
    pub policy: Option<String>,
}

/// Whether a user or key is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// The user or key is accepted.
    Enabled,
    /// The user or key is refused.
    Disabled,
}

/// An access key, without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyInfo {
    /// Its id.
    pub access_key: String,
    /// Name of the key's user.
    pub user: String,
    /// `active`, `disabled` (it or its user), `expired`, or `unreadable` (sealed with another `node.key`).
    pub state: String,
    /// Creation time, seconds since 1970.
    pub created_s: i64,
    /// Expiration, seconds since 1970.
    pub expires_s: Option<i64>,
}

/// A new access key. No `Debug`: it may hold a secret.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddKey {
    /// Name of the key's user.
    pub user: String,
    /// Expiration, seconds from now.
    pub expires_in_s: Option<u64>,
    /// Id of the key; `None`: a new one.
    pub access_key: Option<String>,
    /// Secret of the key; `None`: a new one.
    pub secret_key: Option<String>,
}

/// An access key that was added. The secret is shown only once. No `Debug` for that reason.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewKey {
    /// Its id.
    pub access_key: String,
    /// Its secret.
    pub secret_key: String,
    /// Name of the key's user.
    pub user: String,
    /// Expiration, seconds since 1970.
    pub expires_s: Option<i64>,
}

/// The owner of a policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyTarget {
    /// A user: the policy allows its requests.
    User(String),
    /// A role: the policy limits short-lived keys that assume it.
    Role(String),
    /// A bucket: the policy decides about requests of all users to it.
    Bucket(String),
}

/// A policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyInfo {
    /// Owner of the policy.
    pub target: PolicyTarget,
    /// JSON text, unchanged.
    pub policy: String,
}

/// State of the audit log.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditInfo {
    /// Records written since the start of the node.
    pub written: u64,
    /// Records in the queue.
    pub queued: u64,
    /// Records lost since the start of the node.
    pub lost: u64,
    /// Why writes fail now.
    pub problem: Option<String>,
}

/// Users of a node.
pub trait UserControl: Send + Sync {
    /// All users by number.
    fn users(&self) -> BoxFuture<'_, Result<Vec<UserInfo>, AdminError>>;
    /// Adds a user.
    fn add_user(&self, request: AddUser) -> BoxFuture<'_, Result<UserInfo, AdminError>>;
    /// Removes a user and its keys.
    fn remove_user(&self, name: String) -> BoxFuture<'_, Result<UserInfo, AdminError>>;
    /// Enables or disables a user's keys.
    fn set_user(&self, name: String, standing: Standing) -> BoxFuture<'_, Result<UserInfo, AdminError>>;
    /// All access keys by id.
    fn keys(&self) -> BoxFuture<'_, Result<Vec<KeyInfo>, AdminError>>;
    /// Adds an access key.
    fn add_key(&self, request: AddKey) -> BoxFuture<'_, Result<NewKey, AdminError>>;
    /// Removes an access key.
    fn remove_key(&self, access_key: String) -> BoxFuture<'_, Result<KeyInfo, AdminError>>;
    /// Enables or disables an access key.
    fn set_key(&self, access_key: String, standing: Standing) -> BoxFuture<'_, Result<KeyInfo, AdminError>>;
    /// The policies of all users and roles.
    fn policies(&self) -> BoxFuture<'_, Result<Vec<PolicyInfo>, AdminError>>;
    /// The policy of a user, a role or a bucket.
    fn policy(&self, target: PolicyTarget) -> BoxFuture<'_, Result<PolicyInfo, AdminError>>;
    /// Sets or replaces a policy.
    fn set_policy(&self, policy: PolicyInfo) -> BoxFuture<'_, Result<PolicyInfo, AdminError>>;
    /// Removes a policy; a role is removed with it.
    fn remove_policy(&self, target: PolicyTarget) -> BoxFuture<'_, Result<PolicyInfo, AdminError>>;
}
