//! The REST server.

mod backups;
mod filesystem_groups;
mod logs;
mod metrics;
mod nodes;
mod stores;
mod tiers;
mod users;

use std::path::Path as FsPath;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::extract::{Path, Query, Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use base::env::spawn_thread;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde::{Deserialize, Serialize};
use tokio::net::UnixListener;
use tokio::runtime::Handle;
use tokio::sync::watch;
use wire::BoxFuture;

use crate::api::{
    AddDrive, AdminError, CreateFilesystem, FailDrive, MetaDir, MountRequest, NodeControl, RemoveDrive,
    ReplaceDrive, SetLimits, SetProfile, SetSpares, SetUpkeep,
};
use crate::balancing::BalanceFilesystem;
use crate::placement::{SetNodes, SetPlacement};
use crate::verification::VerifyFilesystem;

pub use metrics::serve_metrics;

/// How long `status` waits for other parts of the node; then it answers with the last known state.
const STATUS_DEADLINE: Duration = Duration::from_secs(10);
/// How long other requests may take; callers give up earlier.
const DEADLINE: Duration = Duration::from_secs(150);

/// The socket could not be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {path}")]
pub struct ServeError {
    path: String,
    #[source]
    source: std::io::Error,
}

type Node = Arc<dyn NodeControl>;

fn answer<T: Serialize>(result: Result<T, AdminError>) -> Response {
    match result {
        Ok(value) => Json(value).into_response(),
        Err(error) => (error.status(), Json(error)).into_response(),
    }
}

impl AdminError {
    /// The answer that says it.
    pub fn answer(&self) -> Answered {
        (self.status().as_u16(), serde_json::to_vec(self).unwrap_or_default().into())
    }

    fn status(&self) -> StatusCode {
        match self.code.as_str() {
            "not_found" => StatusCode::NOT_FOUND,
            "conflict" => StatusCode::CONFLICT,
            "invalid" => StatusCode::BAD_REQUEST,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

#[derive(Deserialize)]
struct WhyQuery {
    path: String,
}

fn drive_router() -> Router<Node> {
    Router::new()
        .route(
            "/v1/drives",
            post(async |State(node): State<Node>, Json(request): Json<AddDrive>| {
                answer(node.add_drive(request).await)
            }),
        )
        .route(
            "/v1/drives/{id}/fail",
            post(async |State(node): State<Node>, Path(id): Path<u32>, Json(request): Json<FailDrive>| {
                answer(node.fail_drive(id, request).await)
            }),
        )
        .route("/v1/scrub", post(async |State(node): State<Node>| answer(node.scrub_drive(None).await)))
        .route(
            "/v1/drives/{id}/scrub",
            post(async |State(node): State<Node>, Path(id): Path<u32>| {
                answer(node.scrub_drive(Some(id)).await)
            }),
        )
        .route(
            "/v1/drives/{id}/return",
            post(async |State(node): State<Node>, Path(id): Path<u32>| answer(node.return_drive(id).await)),
        )
        .route(
            "/v1/drives/{id}/remove",
            post(async |State(node): State<Node>, Path(id): Path<u32>, Json(request): Json<RemoveDrive>| {
                answer(node.remove_drive(id, request).await)
            }),
        )
        .route(
            "/v1/drives/{id}/replace",
            post(async |State(node): State<Node>, Path(id): Path<u32>, Json(request): Json<ReplaceDrive>| {
                answer(node.replace_drive(id, request).await)
            }),
        )
}

fn filesystem_router() -> Router<Node> {
    Router::new()
        .route(
            "/v1/filesystems",
            post(async |State(node): State<Node>, Json(request): Json<CreateFilesystem>| {
                answer(node.create_filesystem(request).await)
            }),
        )
        .route(
            "/v1/filesystems/{name}/profile",
            post(
                async |State(node): State<Node>,
                       Path(name): Path<String>,
                       Json(request): Json<SetProfile>| {
                    answer(node.set_profile(name, request).await)
                },
            ),
        )
        .route(
            "/v1/filesystems/{name}/limits",
            post(
                async |State(node): State<Node>, Path(name): Path<String>, Json(request): Json<SetLimits>| {
                    answer(node.set_limits(name, request).await)
                },
            ),
        )
        .route(
            "/v1/filesystems/{name}/mount",
            post(
                async |State(node): State<Node>,
                       Path(name): Path<String>,
                       Json(request): Json<MountRequest>| {
                    answer(node.mount(name, request).await)
                },
            )
            .delete(async |State(node): State<Node>, Path(name): Path<String>| {
                answer(node.unmount(name).await)
            }),
        )
        .route(
            "/v1/filesystems/{name}/sync",
            post(async |State(node): State<Node>, Path(name): Path<String>| answer(node.sync(name).await)),
        )
        .route(
            "/v1/filesystems/{name}/why",
            get(async |State(node): State<Node>, Path(name): Path<String>, Query(query): Query<WhyQuery>| {
                answer(node.why(name, query.path).await)
            }),
        )
}

/// Where the data of a filesystem is, and whether it is there.
fn placement_router() -> Router<Node> {
    Router::new()
        .route(
            "/v1/filesystems/{name}/balance",
            post(
                async |State(node): State<Node>,
                       Path(name): Path<String>,
                       Json(request): Json<BalanceFilesystem>| {
                    answer(node.balance(name, request).await)
                },
            ),
        )
        .route(
            "/v1/filesystems/{name}/placement",
            post(
                async |State(node): State<Node>,
                       Path(name): Path<String>,
                       Json(request): Json<SetPlacement>| {
                    answer(node.set_placement(name, request).await)
                },
            ),
        )
        .route(
            "/v1/filesystems/{name}/verify",
            post(
                async |State(node): State<Node>,
                       Path(name): Path<String>,
                       Json(request): Json<VerifyFilesystem>| {
                    answer(node.verify(name, request).await)
                },
            ),
        )
        .route(
            "/v1/filesystems/{name}/nodes",
            post(
                async |State(node): State<Node>, Path(name): Path<String>, Json(request): Json<SetNodes>| {
                    answer(node.set_nodes(name, request).await)
                },
            ),
        )
}

fn router(node: Node, runtime: Handle) -> Router {
    let status = get(status).with_state((node.clone(), runtime.clone()));
    Router::new()
        .route("/v1/events", get(async |State(node): State<Node>| answer(node.events().await)))
        .merge(drive_router())
        .merge(filesystem_router())
        .merge(placement_router())
        .merge(filesystem_groups::router())
        .merge(backups::router())
        .merge(logs::router())
        .merge(nodes::router())
        .merge(stores::router())
        .merge(tiers::router())
        .merge(users::router())
        .route(
            "/v1/upkeep",
            post(async |State(node): State<Node>, Json(request): Json<SetUpkeep>| {
                answer(node.set_upkeep(request).await)
            }),
        )
        .route(
            "/v1/spares",
            post(async |State(node): State<Node>, Json(request): Json<SetSpares>| {
                answer(node.set_spares(request).await)
            }),
        )
        .route(
            "/v1/fsck",
            get(async |State(node): State<Node>| answer(node.fsck().await))
                .post(async |State(node): State<Node>| answer(node.start_fsck().await)),
        )
        .route("/v1/meta/settle", post(async |State(node): State<Node>| answer(node.settle_metadata().await)))
        .route(
            "/v1/meta/dirs",
            post(async |State(node): State<Node>, Json(request): Json<MetaDir>| {
                answer(node.add_meta_dir(request).await)
            })
            .delete(async |State(node): State<Node>, Json(request): Json<MetaDir>| {
                answer(node.remove_meta_dir(request).await)
            }),
        )
        .layer(middleware::from_fn_with_state(runtime, run_there))
        .route("/v1/status", status)
        .with_state(node)
}

/// The management interface, for requests that did not come over a socket.
pub struct Api(TowerToHyperService<Router>);

/// The answer to a request: status of HTTP, and JSON.
pub type Answered = (u16, Bytes);

impl Api {
    /// That of a node, which runs requests on `runtime`.
    pub fn new(node: Arc<dyn NodeControl>, runtime: Handle) -> Self {
        Self(TowerToHyperService::new(router(node, runtime)))
    }

    /// Answers a request: `method` of HTTP, path with query, JSON.
    pub async fn answer(&self, method: &str, path: &str, body: Bytes) -> Answered {
        let request =
            hyper::Request::builder().method(method).uri(path).header("content-type", "application/json");
        let Ok(request) = request.body(Full::new(body)) else {
            return AdminError::invalid("this is no request").answer();
        };
        match self.0.call(request).await {
            Ok(response) => {
                let status = response.status().as_u16();
                let body = response.into_body().collect().await.map(|body| body.to_bytes());
                (status, body.unwrap_or_default())
            }
            Err(never) => match never {},
        }
    }
}

/// Answers requests to the management interface otherwise than by a node in this process.
pub trait Answer: Send + Sync + 'static {
    /// Answers a request: `method` of HTTP, path with query, JSON.
    fn answer(&self, method: String, path: String, body: Bytes) -> BoxFuture<'_, Answered>;
}

impl Answer for Api {
    fn answer(&self, method: String, path: String, body: Bytes) -> BoxFuture<'_, Answered> {
        Box::pin(async move { Api::answer(self, &method, &path, body).await })
    }
}

/// As [`serve`], for requests that are answered otherwise.
pub fn serve_answers(
    answers: Arc<dyn Answer>,
    socket: &FsPath,
    runtime: Handle,
    stopped: watch::Receiver<bool>,
) -> Result<JoinHandle<()>, ServeError> {
    let app = Router::new()
        .fallback(async |State(answers): State<Arc<dyn Answer>>, request: Request| {
            let (head, body) = request.into_parts();
            let Ok(body) = body.collect().await else { return StatusCode::BAD_REQUEST.into_response() };
            let path = head.uri.path_and_query().map_or_else(String::new, |path| path.as_str().to_owned());
            let (status, body) = answers.answer(head.method.to_string(), path, body.to_bytes()).await;
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            (status, [("content-type", "application/json")], body).into_response()
        })
        .layer(middleware::from_fn_with_state(runtime, run_there))
        .with_state(answers);
    listen(app, socket, stopped)
}

/// Serves on a Unix socket until `stopped` is true. The permissions of the socket's directory decide which users may
/// connect.
///
/// A thread of its own serves the connections, `runtime` runs the requests: if the runtime hangs, `status` still
/// answers.
pub fn serve(
    node: Arc<dyn NodeControl>,
    socket: &FsPath,
    runtime: Handle,
    stopped: watch::Receiver<bool>,
) -> Result<JoinHandle<()>, ServeError> {
    listen(router(node, runtime), socket, stopped)
}

fn listen(
    app: Router,
    socket: &FsPath,
    mut stopped: watch::Receiver<bool>,
) -> Result<JoinHandle<()>, ServeError> {
    let failed = |source| ServeError { path: socket.display().to_string(), source };
    let own = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let listener = {
        let _inside = own.enter();
        UnixListener::bind(socket).map_err(failed)?
    };
    Ok(spawn_thread("admin", move || {
        own.block_on(async move {
            let shutdown = async move {
                // The sender is dropped only with the node.
                let _ = stopped.wait_for(|stop| *stop).await;
            };
            if let Err(error) = axum::serve(listener, app).with_graceful_shutdown(shutdown).await {
                tracing::error!(%error, "management socket failed");
            }
        });
    }))
}

/// Runs the request on the node's own runtime. The work goes on if the caller leaves or gives up.
async fn run_there(State(runtime): State<Handle>, request: Request, next: Next) -> Response {
    let work = runtime.spawn(next.run(request));
    match tokio::time::timeout(DEADLINE, work).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => answer::<()>(Err(AdminError::failed(error))),
        Err(_) => answer::<()>(Err(AdminError::failed(
            "no answer in time, the work may still go on: see `forebay status` for what does not move",
        ))),
    }
}

async fn status(State((node, runtime)): State<(Node, Handle)>) -> Response {
    let asked = node.clone();
    let work = runtime.spawn(async move { asked.status().await });
    match tokio::time::timeout(STATUS_DEADLINE, work).await {
        Ok(Ok(status)) => answer(status),
        Ok(Err(error)) => answer::<()>(Err(AdminError::failed(error))),
        Err(_) => answer(Ok(node.status_without_waiting())),
    }
}
