//! Routes for the logs of the ledgers.

use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};

use super::{Node, answer};
use crate::logs::{LogMove, MoveLedgers};

pub(super) fn router() -> Router<Node> {
    Router::new()
        .route(
            "/v1/log/move",
            post(async |State(node): State<Node>, Json(request): Json<LogMove>| {
                answer(node.move_log(request).await)
            }),
        )
        .route(
            "/v1/ledgers/owner",
            post(async |State(node): State<Node>, Json(request): Json<MoveLedgers>| {
                answer(node.move_ledgers(request).await)
            }),
        )
}
