//! Routes for nodes and tokens.

use axum::extract::{Path, State};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use wire::cluster::CheckParts;

use super::{Node, answer};
use crate::nodes::{CreateToken, DrainNode, SetMaintenance};

pub(super) fn router() -> Router<Node> {
    Router::new()
        .route("/v1/nodes", get(async |State(node): State<Node>| answer(node.nodes().await)))
        .route(
            "/v1/nodes/{id}",
            delete(async |State(node): State<Node>, Path(id): Path<u32>| answer(node.remove_node(id).await)),
        )
        .route(
            "/v1/nodes/{id}/stop-check",
            get(async |State(node): State<Node>, Path(id): Path<u32>| answer(node.stop_check(id).await)),
        )
        .route(
            "/v1/nodes/{id}/check",
            post(async |State(node): State<Node>, Path(id): Path<u32>, Json(what): Json<CheckParts>| {
                answer(node.check(id, what).await)
            }),
        )
        .route(
            "/v1/nodes/{id}/drain",
            post(async |State(node): State<Node>, Path(id): Path<u32>, Json(request): Json<DrainNode>| {
                answer(node.drain_node(id, request).await)
            }),
        )
        .route(
            "/v1/nodes/{id}/maintenance",
            post(
                async |State(node): State<Node>, Path(id): Path<u32>, Json(request): Json<SetMaintenance>| {
                    answer(node.set_maintenance(id, request).await)
                },
            ),
        )
        .route(
            "/v1/tokens",
            get(async |State(node): State<Node>| answer(node.tokens().await)).post(
                async |State(node): State<Node>, Json(request): Json<CreateToken>| {
                    answer(node.create_token(request).await)
                },
            ),
        )
        .route(
            "/v1/tokens/{id}",
            delete(async |State(node): State<Node>, Path(id): Path<u32>| answer(node.remove_token(id).await)),
        )
        .route("/v1/upgrade", get(async |State(node): State<Node>| answer(node.upgrade().await)))
        .route(
            "/v1/upgrade/finalize",
            post(async |State(node): State<Node>| answer(node.finalize_upgrade().await)),
        )
        .route("/v1/clients", get(async |State(node): State<Node>| answer(node.clients().await)))
        .route(
            "/v1/clients/{id}",
            delete(async |State(node): State<Node>, Path(id): Path<u32>| {
                answer(node.remove_client(id).await)
            }),
        )
}
