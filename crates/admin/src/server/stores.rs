//! Routes for object stores.

use axum::extract::{Path, State};
use axum::routing::{get, post, put};
use axum::{Json, Router};

use super::{Node, answer};
use crate::stores::{BenchStore, SetStore};

pub(super) fn router() -> Router<Node> {
    Router::new()
        .route("/v1/stores", get(async |State(node): State<Node>| answer(node.stores().await)))
        .route(
            "/v1/stores/{name}",
            put(
                async |State(node): State<Node>, Path(name): Path<String>, Json(settings): Json<SetStore>| {
                    answer(node.add_store(name, settings).await)
                },
            )
            .patch(
                async |State(node): State<Node>, Path(name): Path<String>, Json(settings): Json<SetStore>| {
                    answer(node.update_store(name, settings).await)
                },
            )
            .delete(async |State(node): State<Node>, Path(name): Path<String>| {
                answer(node.remove_store(name).await)
            }),
        )
        .route(
            "/v1/stores/{name}/validate",
            post(async |State(node): State<Node>, Path(name): Path<String>| {
                answer(node.validate_store(name).await)
            }),
        )
        .route(
            "/v1/stores/{name}/bench",
            post(
                async |State(node): State<Node>,
                       Path(name): Path<String>,
                       Json(request): Json<BenchStore>| {
                    answer(node.bench_store(name, request).await)
                },
            ),
        )
        .route(
            "/v1/stores/{name}/try",
            post(
                async |State(node): State<Node>, Path(name): Path<String>, Json(settings): Json<SetStore>| {
                    answer(node.try_store(name, settings).await)
                },
            ),
        )
}
