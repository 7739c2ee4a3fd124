//! Routes for filesystem groups.

use axum::extract::{Path, State};
use axum::routing::{get, post, put};
use axum::{Json, Router};

use super::{Node, answer};
use crate::filesystem_groups::{MoveFilesystem, SetFilesystemGroup};

pub(super) fn router() -> Router<Node> {
    Router::new()
        .route(
            "/v1/filesystem-groups",
            get(async |State(node): State<Node>| answer(node.filesystem_groups().await)),
        )
        .route(
            "/v1/filesystem-groups/{name}",
            put(
                async |State(node): State<Node>,
                       Path(name): Path<String>,
                       Json(settings): Json<SetFilesystemGroup>| {
                    answer(node.add_filesystem_group(name, settings).await)
                },
            )
            .patch(
                async |State(node): State<Node>,
                       Path(name): Path<String>,
                       Json(settings): Json<SetFilesystemGroup>| {
                    answer(node.update_filesystem_group(name, settings).await)
                },
            )
            .delete(async |State(node): State<Node>, Path(name): Path<String>| {
                answer(node.remove_filesystem_group(name).await)
            }),
        )
        .route(
            "/v1/filesystems/{name}/group",
            post(
                async |State(node): State<Node>,
                       Path(name): Path<String>,
                       Json(request): Json<MoveFilesystem>| {
                    answer(node.move_filesystem(name, request).await)
                },
            ),
        )
}
