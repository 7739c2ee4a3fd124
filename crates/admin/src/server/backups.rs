//! Routes for backups of the metadata.

use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};

use super::{Node, answer};
use crate::backups::SetBackups;

pub(super) fn router() -> Router<Node> {
    Router::new().route(
        "/v1/meta/schedule",
        get(async |State(node): State<Node>| answer(node.backups().await)).post(
            async |State(node): State<Node>, Json(request): Json<SetBackups>| {
                answer(node.set_backups(request).await)
            },
        ),
    )
}
