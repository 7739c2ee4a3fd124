//! Metrics at a port, for Prometheus.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::de::DeserializeOwned;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Semaphore, watch};
use tokio::time::Instant;

use super::Answer;
use crate::api::NodeStatus;
use crate::metrics::{METRICS_TYPE, metrics};
use crate::nodes::NodeInfo;

/// How long the same answer is given: several may ask at once.
const FRESH: Duration = Duration::from_secs(1);
/// Connections at a time, and the time of each.
const CONNECTIONS_MAX: usize = 16;
const CONNECTION_TIME: Duration = Duration::from_secs(30);
/// How long a connection may take to send its request.
const REQUEST_TIME: Duration = Duration::from_secs(5);
/// Pause after a connection could not be taken in.
const PAUSE: Duration = Duration::from_millis(200);

/// What was last told.
type Told = Arc<Mutex<Option<(Instant, Bytes)>>>;

async fn ask<T: DeserializeOwned>(answers: &dyn Answer, path: &str) -> Option<T> {
    let (status, body) = answers.answer("GET".to_owned(), path.to_owned(), Bytes::new()).await;
    (status == 200).then(|| serde_json::from_slice(&body).ok()).flatten()
}

async fn told(answers: &dyn Answer, told: &Told) -> Response {
    let mut told = told.lock().await;
    let known = told.as_ref().filter(|(at, _)| at.elapsed() < FRESH).map(|(_, text)| text.clone());
    let text = match known {
        Some(text) => text,
        None => {
            let Some(status) = ask::<NodeStatus>(answers, "/v1/status").await else {
                return (StatusCode::SERVICE_UNAVAILABLE, "the node does not tell its state\n")
                    .into_response();
            };
            let nodes: Option<Vec<NodeInfo>> =
                if status.alone { None } else { ask(answers, "/v1/nodes").await };
            let text = Bytes::from(metrics(&status, &nodes.unwrap_or_default()));
            *told = Some((Instant::now(), text.clone()));
            text
        }
    };
    ([(CONTENT_TYPE, METRICS_TYPE)], text).into_response()
}

/// `GET /metrics`, made from what else is answered.
fn router(answers: Arc<dyn Answer>) -> Router {
    let known = Told::default();
    Router::new().route("/metrics", get(async move || told(&*answers, &known).await))
}

/// Serves `GET /metrics`, and nothing else, at a port until `stopped` is true. Needs no certificate, and tells nothing secret.
pub async fn serve_metrics(
    answers: Arc<dyn Answer>,
    listener: TcpListener,
    mut stopped: watch::Receiver<bool>,
) {
    let service = TowerToHyperService::new(router(answers));
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.wait_for(|stop| *stop) => return,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        // One that finds no place is closed.
        let Ok(place) = places.clone().try_acquire_owned() else { continue };
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(REQUEST_TIME).keep_alive(false);
        let serving = http.serve_connection(TokioIo::new(stream), service.clone());
        tokio::spawn(async move {
            let _place = place;
            // An error is that of the caller.
            let _ = tokio::time::timeout(CONNECTION_TIME, serving).await;
        });
    }
}
