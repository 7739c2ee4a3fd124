//! Routes for tiering.

use axum::extract::{Path, Query, State};
use axum::routing::{get, post};
use axum::{Json, Router};

use super::{Node, answer};
use crate::tiers::{AttachStore, FetchStep, ForecastRequest, TierFile};

pub(super) fn router() -> Router<Node> {
    Router::new()
        .route("/v1/tiers", get(async |State(node): State<Node>| answer(node.tiers().await)))
        .route("/v1/tiers/ops", get(async |State(node): State<Node>| answer(node.tier_ops().await)))
        .route(
            "/v1/tiers/forecast",
            get(async |State(node): State<Node>, Query(request): Query<ForecastRequest>| {
                answer(node.tier_forecast(request).await)
            }),
        )
        .route(
            "/v1/filesystems/{name}/tier",
            post(
                async |State(node): State<Node>,
                       Path(name): Path<String>,
                       Json(request): Json<AttachStore>| {
                    answer(node.attach_store(name, request).await)
                },
            )
            .delete(async |State(node): State<Node>, Path(name): Path<String>| {
                answer(node.detach_store(name).await)
            }),
        )
        .route(
            "/v1/filesystems/{name}/tier/location",
            get(async |State(node): State<Node>, Path(name): Path<String>, Query(file): Query<TierFile>| {
                answer(node.tier_location(name, file.path).await)
            }),
        )
        .route(
            "/v1/filesystems/{name}/tier/fetch",
            post(async |State(node): State<Node>, Path(name): Path<String>, Json(step): Json<FetchStep>| {
                answer(node.tier_fetch(name, step).await)
            }),
        )
        .route(
            "/v1/filesystems/{name}/tier/release",
            post(async |State(node): State<Node>, Path(name): Path<String>, Json(file): Json<TierFile>| {
                answer(node.tier_release(name, file).await)
            }),
        )
}
