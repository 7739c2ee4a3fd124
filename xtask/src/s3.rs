//! A small S3 client for measurements and crash tests: one connection, signed requests (version 4), nothing retried.
#![allow(clippy::disallowed_methods, reason = "real requests are signed with the real time")]

mod sign;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

pub(crate) use sign::{Keys, sha256_hex};

/// The endpoint and the keys of requests.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) address: SocketAddr,
    host: String,
    keys: Keys,
}

impl Target {
    pub(crate) fn new(address: SocketAddr, keys: Keys) -> Arc<Self> {
        Arc::new(Self { address, host: address.to_string(), keys })
    }

    /// The endpoint of a node, with the keys that its first start wrote into its directory.
    pub(crate) fn of_node(directory: &Path) -> Result<Arc<Self>> {
        let read = |name: &str| {
            std::fs::read_to_string(directory.join(name)).with_context(|| format!("read {name} of the node"))
        };
        let node: serde_json::Value = serde_json::from_str(&read("node.json")?).context("parse node.json")?;
        let endpoint = node["s3"].as_str().context("node.json names no endpoint")?;
        let address = endpoint.strip_prefix("http://").context("the endpoint is not HTTP")?.parse()?;
        let credentials = read("admin-credentials")?;
        let value = |wanted: &str| {
            let mut pairs = credentials.lines().filter_map(|line| line.split_once('='));
            let pair = pairs.find(|(name, _)| name.trim() == wanted);
            pair.map(|(_, value)| value.trim().to_owned()).with_context(|| format!("no {wanted}"))
        };
        Ok(Self::new(address, Keys::new(&value("aws_access_key_id")?, &value("aws_secret_access_key")?)))
    }
}

/// A request.
#[derive(Debug, Clone)]
pub(crate) struct Ask<'a> {
    pub(crate) method: Method,
    /// `/bucket/key`, of characters that need no encoding.
    pub(crate) path: &'a str,
    /// The query, encoded, in the order of names.
    pub(crate) query: &'a str,
    /// Names in lower case and in order.
    pub(crate) headers: &'a [(&'static str, &'a str)],
    pub(crate) body: Bytes,
    /// SHA-256 of the body, in hexadecimal digits.
    pub(crate) sha256: &'a str,
}

impl<'a> Ask<'a> {
    /// A request without a body.
    pub(crate) fn new(method: Method, path: &'a str) -> Self {
        Self { method, path, query: "", headers: &[], body: Bytes::new(), sha256: sign::SHA256_OF_NOTHING }
    }
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Bytes,
}

impl Answer {
    /// Fails unless the status is a success.
    pub(crate) fn ok(self) -> Result<Self> {
        ensure!(self.status < 300, "status={}: {}", self.status, String::from_utf8_lossy(&self.body));
        Ok(self)
    }
}

/// A persistent connection.
pub(crate) struct Connection {
    target: Arc<Target>,
    sender: SendRequest<Full<Bytes>>,
    driver: JoinHandle<()>,
}

impl Connection {
    pub(crate) async fn open(target: &Arc<Target>) -> Result<Self> {
        let stream = TcpStream::connect(target.address).await.context("connect to S3")?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        // The next request notices an error of the connection.
        let driver = tokio::spawn(async move { drop(connection.await) });
        Ok(Self { target: target.clone(), sender, driver })
    }

    /// Sends a request and returns the head of the answer; the body is not read yet.
    pub(crate) async fn begin(&mut self, ask: &Ask<'_>) -> Result<Response<Incoming>> {
        let signed = self.target.keys.sign(ask, &self.target.host);
        let uri =
            if ask.query.is_empty() { ask.path.to_owned() } else { format!("{}?{}", ask.path, ask.query) };
        let mut request = Request::builder()
            .method(ask.method.clone())
            .uri(uri)
            .header("host", &self.target.host)
            .header("x-amz-content-sha256", ask.sha256)
            .header("x-amz-date", &signed.date)
            .header("authorization", &signed.authorization);
        for (name, value) in ask.headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(ask.body.clone()))?;
        self.sender.ready().await?;
        Ok(self.sender.send_request(request).await?)
    }

    /// Sends a request and reads the whole answer.
    pub(crate) async fn send(&mut self, ask: &Ask<'_>) -> Result<Answer> {
        let (head, body) = self.begin(ask).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Answer { status: head.status.as_u16(), body })
    }

    /// Sends a request, drops the bytes of the answer and returns their number. A failure status is an error.
    pub(crate) async fn count(&mut self, ask: &Ask<'_>) -> Result<u64> {
        let mut response = self.begin(ask).await?;
        let mut bytes = 0;
        if !response.status().is_success() {
            let status = response.status();
            let body = response.into_body().collect().await?.to_bytes();
            bail!("{} {}: {status}: {}", ask.method, ask.path, String::from_utf8_lossy(&body));
        }
        while let Some(frame) = response.body_mut().frame().await {
            bytes += frame?.data_ref().map_or(0, Bytes::len) as u64;
        }
        Ok(bytes)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// The text of the first element with this name, at any depth.
pub(crate) fn element<'a>(document: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = document.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>")).map(|(text, _)| text)
}
