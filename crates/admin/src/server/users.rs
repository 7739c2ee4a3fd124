//! Routes for users, access keys and policies.

use axum::extract::{Path, State};
use axum::routing::{delete, get, put};
use axum::{Json, Router};

use super::{Node, answer};
use crate::api::AdminError;
use crate::users::{AddKey, AddUser, PolicyInfo, PolicyTarget, Standing};

fn target(kind: &str, name: String) -> Result<PolicyTarget, AdminError> {
    match kind {
        "users" => Ok(PolicyTarget::User(name)),
        "roles" => Ok(PolicyTarget::Role(name)),
        "buckets" => Ok(PolicyTarget::Bucket(name)),
        _ => Err(AdminError::not_found(format!("policies are of users, roles and buckets: kind={kind}"))),
    }
}

pub(super) fn router() -> Router<Node> {
    Router::new()
        .route(
            "/v1/users",
            get(async |State(node): State<Node>| answer(node.users().await)).post(
                async |State(node): State<Node>, Json(request): Json<AddUser>| {
                    answer(node.add_user(request).await)
                },
            ),
        )
        .route(
            "/v1/users/{name}",
            delete(async |State(node): State<Node>, Path(name): Path<String>| {
                answer(node.remove_user(name).await)
            }),
        )
        .route(
            "/v1/users/{name}/standing",
            put(async |State(node): State<Node>, Path(name): Path<String>, Json(to): Json<Standing>| {
                answer(node.set_user(name, to).await)
            }),
        )
        .route(
            "/v1/keys",
            get(async |State(node): State<Node>| answer(node.keys().await)).post(
                async |State(node): State<Node>, Json(request): Json<AddKey>| {
                    answer(node.add_key(request).await)
                },
            ),
        )
        .route(
            "/v1/keys/{key}",
            delete(async |State(node): State<Node>, Path(key): Path<String>| {
                answer(node.remove_key(key).await)
            }),
        )
        .route(
            "/v1/keys/{key}/standing",
            put(async |State(node): State<Node>, Path(key): Path<String>, Json(to): Json<Standing>| {
                answer(node.set_key(key, to).await)
            }),
        )
        .merge(policy_router())
}

fn policy_router() -> Router<Node> {
    Router::new()
        .route(
            "/v1/policies",
            get(async |State(node): State<Node>| answer(node.policies().await)).post(
                async |State(node): State<Node>, Json(policy): Json<PolicyInfo>| {
                    answer(node.set_policy(policy).await)
                },
            ),
        )
        .route(
            "/v1/policies/{kind}/{name}",
            get(async |State(node): State<Node>, Path((kind, name)): Path<(String, String)>| {
                answer(match target(&kind, name) {
                    Ok(target) => node.policy(target).await,
                    Err(error) => Err(error),
                })
            })
            .delete(
                async |State(node): State<Node>, Path((kind, name)): Path<(String, String)>| {
                    answer(match target(&kind, name) {
                        Ok(target) => node.remove_policy(target).await,
                        Err(error) => Err(error),
                    })
                },
            ),
        )
}
