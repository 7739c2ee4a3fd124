//! Client of the REST interface of a node on this machine.

mod backups;
mod filesystem_groups;
mod logs;
mod nodes;
mod stores;
mod tiers;
mod users;

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use wire::event::Event;

use crate::api::{
    AddDrive, AdminError, CreateFilesystem, DriveInfo, FailDrive, FilesystemInfo, FsckInfo, MetaDir,
    MountRequest, NodeStatus, RemoveDrive, ReplaceDrive, SetLimits, SetProfile, SetSpares, SetUpkeep,
    SpareInfo, UpkeepInfo, WhyInfo,
};
use crate::balancing::{BalanceFilesystem, FilesystemBalance};
use crate::placement::{SetNodes, SetPlacement};
use crate::verification::{FilesystemVerification, VerifyFilesystem};

/// Longest wait for an answer.
const DEADLINE: Duration = Duration::from_secs(120);

/// Longest wait for `status`. A node answers sooner, even while other requests hang.
const STATUS_DEADLINE: Duration = Duration::from_secs(20);

/// Why a call gave no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// No node listens there.
    #[error("node does not run: socket={socket}")]
    NotRunning {
        /// Path of the socket of a running node.
        socket: String,
    },
    /// The node refused.
    #[error(transparent)]
    Refused(#[from] AdminError),
    /// The connection broke, or the answer cannot be parsed.
    #[error("node gave no answer: {0}")]
    Broken(String),
}

fn broken(error: impl std::fmt::Display) -> CallError {
    CallError::Broken(error.to_string())
}

fn to_json(body: Option<&impl Serialize>) -> Result<Vec<u8>, CallError> {
    body.map(serde_json::to_vec).transpose().map(Option::unwrap_or_default).map_err(broken)
}

/// A node's management interface.
#[derive(Debug, Clone)]
pub struct AdminClient {
    socket: PathBuf,
}

impl AdminClient {
    /// The node that listens on `socket`.
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned() }
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, CallError> {
        self.call_within(DEADLINE, method, path, body).await
    }

    async fn call_within<T: DeserializeOwned>(
        &self,
        deadline: Duration,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, CallError> {
        let work = self.send(method, path, to_json(body)?);
        let late = |_| {
            broken(format!(
                "nothing came within {} s: its process is being ended, or waits for a disk in the kernel",
                deadline.as_secs()
            ))
        };
        let answer = tokio::time::timeout(deadline, work).await.map_err(late)??;
        serde_json::from_slice(&answer).map_err(broken)
    }

    async fn call_unbounded<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, CallError> {
        let answer = self.send(method, path, to_json(body)?).await?;
        serde_json::from_slice(&answer).map_err(broken)
    }

    /// Sends a request. Returns the answer if it is not a refusal.
    async fn send(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Bytes, CallError> {
        let not_running = |_| CallError::NotRunning { socket: self.socket.display().to_string() };
        let stream = UnixStream::connect(&self.socket).await.map_err(not_running)?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        let driver = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(broken)?;
        let response = sender.send_request(request).await.map_err(broken)?;
        let status = response.status();
        let body = response.into_body().collect().await.map_err(broken)?.to_bytes();
        driver.abort();
        if status.is_success() {
            return Ok(body);
        }
        match serde_json::from_slice::<AdminError>(&body) {
            Ok(error) => Err(CallError::Refused(error)),
            Err(_) => Err(broken(String::from_utf8_lossy(&body))),
        }
    }

    /// State of the whole node.
    pub async fn status(&self) -> Result<NodeStatus, CallError> {
        self.call_within(STATUS_DEADLINE, Method::GET, "/v1/status", None::<&()>).await
    }

    /// The last events, oldest first.
    pub async fn events(&self) -> Result<Vec<Event>, CallError> {
        self.call(Method::GET, "/v1/events", None::<&()>).await
    }

    /// Adds a drive.
    pub async fn add_drive(&self, request: &AddDrive) -> Result<DriveInfo, CallError> {
        self.call(Method::POST, "/v1/drives", Some(request)).await
    }

    /// Takes a drive out of service permanently.
    pub async fn fail_drive(&self, id: u32, request: FailDrive) -> Result<DriveInfo, CallError> {
        self.call(Method::POST, &format!("/v1/drives/{id}/fail"), Some(&request)).await
    }

    /// Uses a drive again that failed or was taken out of service.
    pub async fn return_drive(&self, id: u32) -> Result<DriveInfo, CallError> {
        self.call(Method::POST, &format!("/v1/drives/{id}/return"), None::<&()>).await
    }

    /// Moves all shards off a drive, or rebuilds them from other drives.
    pub async fn remove_drive(&self, id: u32, request: &RemoveDrive) -> Result<DriveInfo, CallError> {
        self.call(Method::POST, &format!("/v1/drives/{id}/remove"), Some(request)).await
    }

    /// Replaces a drive by a new one.
    pub async fn replace_drive(&self, id: u32, request: &ReplaceDrive) -> Result<DriveInfo, CallError> {
        self.call(Method::POST, &format!("/v1/drives/{id}/replace"), Some(request)).await
    }

    /// Verifies all shards on a drive now; `None`: on all drives.
    pub async fn scrub_drive(&self, id: Option<u32>) -> Result<Vec<DriveInfo>, CallError> {
        let path = id.map_or("/v1/scrub".to_owned(), |id| format!("/v1/drives/{id}/scrub"));
        self.call(Method::POST, &path, None::<&()>).await
    }

    /// Changes the limits of background work.
    pub async fn set_upkeep(&self, request: &SetUpkeep) -> Result<UpkeepInfo, CallError> {
        self.call(Method::POST, "/v1/upkeep", Some(request)).await
    }

    /// Changes how much of the drives stays free for a loss.
    pub async fn set_spares(&self, request: &SetSpares) -> Result<Option<SpareInfo>, CallError> {
        self.call(Method::POST, "/v1/spares", Some(request)).await
    }

    /// Changes the profile. New data gets it at once, stored data is converted in the background.
    pub async fn set_profile(&self, name: &str, request: &SetProfile) -> Result<FilesystemInfo, CallError> {
        let path = format!("/v1/filesystems/{}/profile", percent_encode(name.as_bytes()));
        self.call(Method::POST, &path, Some(request)).await
    }

    /// Moves stored data until every drive has its share, says what that would move, or ends it.
    pub async fn balance(
        &self,
        name: &str,
        request: BalanceFilesystem,
    ) -> Result<FilesystemBalance, CallError> {
        let path = format!("/v1/filesystems/{}/balance", percent_encode(name.as_bytes()));
        self.call(Method::POST, &path, Some(&request)).await
    }

    /// Says whether the drives have all shards of a filesystem.
    pub async fn verify(
        &self,
        name: &str,
        request: VerifyFilesystem,
    ) -> Result<FilesystemVerification, CallError> {
        let path = format!("/v1/filesystems/{}/verify", percent_encode(name.as_bytes()));
        self.call(Method::POST, &path, Some(&request)).await
    }

    /// Changes where new data goes.
    pub async fn set_placement(
        &self,
        name: &str,
        request: &SetPlacement,
    ) -> Result<FilesystemInfo, CallError> {
        let path = format!("/v1/filesystems/{}/placement", percent_encode(name.as_bytes()));
        self.call(Method::POST, &path, Some(request)).await
    }

    /// Changes the nodes whose drives a filesystem's data is for, or says what would move.
    pub async fn set_nodes(&self, name: &str, request: &SetNodes) -> Result<FilesystemBalance, CallError> {
        let path = format!("/v1/filesystems/{}/nodes", percent_encode(name.as_bytes()));
        self.call(Method::POST, &path, Some(request)).await
    }

    /// Changes the limits of a filesystem's content.
    pub async fn set_limits(&self, name: &str, request: &SetLimits) -> Result<FilesystemInfo, CallError> {
        let path = format!("/v1/filesystems/{}/limits", percent_encode(name.as_bytes()));
        self.call(Method::POST, &path, Some(request)).await
    }

    /// Adds a directory with a copy of all metadata.
    pub async fn add_meta_dir(&self, request: &MetaDir) -> Result<NodeStatus, CallError> {
        self.call(Method::POST, "/v1/meta/dirs", Some(request)).await
    }

    /// Stops using the copy of the metadata in a directory.
    pub async fn remove_meta_dir(&self, request: &MetaDir) -> Result<NodeStatus, CallError> {
        self.call(Method::DELETE, "/v1/meta/dirs", Some(request)).await
    }

    /// Gives up metadata that is newer than the node's: orphans are searched for again.
    pub async fn settle_metadata(&self) -> Result<NodeStatus, CallError> {
        self.call(Method::POST, "/v1/meta/settle", None::<&()>).await
    }

    /// Begins a check of all filesystems, unless one runs.
    pub async fn start_fsck(&self) -> Result<FsckInfo, CallError> {
        self.call(Method::POST, "/v1/fsck", None::<&()>).await
    }

    /// Progress of the check, or its findings.
    pub async fn fsck(&self) -> Result<FsckInfo, CallError> {
        self.call(Method::GET, "/v1/fsck", None::<&()>).await
    }

    /// Creates a filesystem.
    pub async fn create_filesystem(&self, request: &CreateFilesystem) -> Result<FilesystemInfo, CallError> {
        self.call(Method::POST, "/v1/filesystems", Some(request)).await
    }

    /// Mounts a filesystem.
    pub async fn mount(&self, name: &str, request: &MountRequest) -> Result<FilesystemInfo, CallError> {
        let path = format!("/v1/filesystems/{}/mount", percent_encode(name.as_bytes()));
        self.call(Method::POST, &path, Some(request)).await
    }

    /// Unmounts a filesystem.
    pub async fn unmount(&self, name: &str) -> Result<FilesystemInfo, CallError> {
        let path = format!("/v1/filesystems/{}/mount", percent_encode(name.as_bytes()));
        self.call(Method::DELETE, &path, None::<&()>).await
    }

    /// Makes all that was written to a filesystem durable.
    pub async fn sync(&self, name: &str) -> Result<(), CallError> {
        let path = format!("/v1/filesystems/{}/sync", percent_encode(name.as_bytes()));
        self.call(Method::POST, &path, None::<&()>).await
    }

    /// The place of a path's bytes.
    pub async fn why(&self, name: &str, path: &str) -> Result<WhyInfo, CallError> {
        let (name, path) = (percent_encode(name.as_bytes()), percent_encode(path.as_bytes()));
        self.call(Method::GET, &format!("/v1/filesystems/{name}/why?path={path}"), None::<&()>).await
    }
}

/// Bytes as they stand in the path of a request.
pub fn percent_encode(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for byte in bytes {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                out.push(char::from(*byte))
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}
