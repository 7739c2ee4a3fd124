//! Calls about users, access keys and policies.

use hyper::Method;

use super::{AdminClient, CallError, percent_encode};
use crate::users::{AddKey, AddUser, KeyInfo, NewKey, PolicyInfo, PolicyTarget, Standing, UserInfo};

fn policy_path(target: &PolicyTarget) -> String {
    let (kind, name) = match target {
        PolicyTarget::User(name) => ("users", name),
        PolicyTarget::Role(name) => ("roles", name),
        PolicyTarget::Bucket(name) => ("buckets", name),
    };
    format!("/v1/policies/{kind}/{}", percent_encode(name.as_bytes()))
}

impl AdminClient {
    /// All users by number.
    pub async fn users(&self) -> Result<Vec<UserInfo>, CallError> {
        self.call(Method::GET, "/v1/users", None::<&()>).await
    }

    /// Adds a user.
    pub async fn add_user(&self, request: &AddUser) -> Result<UserInfo, CallError> {
        self.call(Method::POST, "/v1/users", Some(request)).await
    }

    /// Removes a user with its keys.
    pub async fn remove_user(&self, name: &str) -> Result<UserInfo, CallError> {
        let path = format!("/v1/users/{}", percent_encode(name.as_bytes()));
        self.call(Method::DELETE, &path, None::<&()>).await
    }

    /// Enables or disables a user's keys.
    pub async fn set_user(&self, name: &str, standing: Standing) -> Result<UserInfo, CallError> {
        let path = format!("/v1/users/{}/standing", percent_encode(name.as_bytes()));
        self.call(Method::PUT, &path, Some(&standing)).await
    }

    /// All access keys by id.
    pub async fn keys(&self) -> Result<Vec<KeyInfo>, CallError> {
        self.call(Method::GET, "/v1/keys", None::<&()>).await
    }

    /// Adds an access key.
    pub async fn add_key(&self, request: &AddKey) -> Result<NewKey, CallError> {
        self.call(Method::POST, "/v1/keys", Some(request)).await
    }

    /// Removes an access key.
    pub async fn remove_key(&self, access_key: &str) -> Result<KeyInfo, CallError> {
        let path = format!("/v1/keys/{}", percent_encode(access_key.as_bytes()));
        self.call(Method::DELETE, &path, None::<&()>).await
    }

    /// Enables or disables an access key.
    pub async fn set_key(&self, access_key: &str, standing: Standing) -> Result<KeyInfo, CallError> {
        let path = format!("/v1/keys/{}/standing", percent_encode(access_key.as_bytes()));
        self.call(Method::PUT, &path, Some(&standing)).await
    }

    /// The policies of all users and roles.
    pub async fn policies(&self) -> Result<Vec<PolicyInfo>, CallError> {
        self.call(Method::GET, "/v1/policies", None::<&()>).await
    }

    /// One policy.
    pub async fn policy(&self, target: &PolicyTarget) -> Result<PolicyInfo, CallError> {
        self.call(Method::GET, &policy_path(target), None::<&()>).await
    }

    /// Sets or replaces a policy.
    pub async fn set_policy(&self, policy: &PolicyInfo) -> Result<PolicyInfo, CallError> {
        self.call(Method::POST, "/v1/policies", Some(policy)).await
    }

    /// Removes a policy; a role goes with it.
    pub async fn remove_policy(&self, target: &PolicyTarget) -> Result<PolicyInfo, CallError> {
        self.call(Method::DELETE, &policy_path(target), None::<&()>).await
    }
}
