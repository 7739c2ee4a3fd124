//! What operators ask at this node: mounts are its own, all else is passed on to the owner of the control ledger.

use base::program::VERSION;
use std::path::PathBuf;
use std::sync::Arc;

use admin::{AdminError, Answer, Answered, MountRequest, NodeCheck, NodeStatus, percent_encode};
use bytes::Bytes;
use control::FilesystemRecord;
use serde::Serialize;
use serde_json::{Value, json};
use wire::BoxFuture;
use wire::cluster::{CheckParts, ClusterReply, ClusterRequest};

use super::{Member, lock};
use crate::identity::hostname;

/// How long the owner of the control ledger may take to answer `status`.
const STATUS_PATIENCE: std::time::Duration = std::time::Duration::from_secs(8);

/// Answers operators.
pub(super) struct Manager {
    member: Arc<Member>,
}

fn answered<T: Serialize>(result: Result<T, AdminError>) -> Answered {
    match result {
        Ok(value) => (200, serde_json::to_vec(&value).unwrap_or_default().into()),
        Err(error) => error.answer(),
    }
}

/// The name of the filesystem in a path such as `/v1/filesystems/main/mount`, as it stands there.
fn filesystem_in<'a>(path: &'a str, what: &str) -> Option<&'a str> {
    let name = path.strip_prefix("/v1/filesystems/")?.strip_suffix(what)?.strip_suffix('/')?;
    (!name.contains('/')).then_some(name)
}

impl Manager {
    pub(super) fn new(member: Arc<Member>) -> Self {
        Self { member }
    }

    /// Lets the owner of the control ledger answer.
    async fn pass_on(&self, method: String, path: String, body: Bytes) -> Answered {
        let request = ClusterRequest::Manage {
            node: self.member.network.here(),
            id: self.member.env.random.next_u64(),
            method,
            path,
            body,
        };
        let asked = async { self.member.ask_owner(request).await };
        match asked.await {
            Ok(ClusterReply::Managed { status, body }) => (status, body),
            Ok(_) => AdminError::failed("the owner gave another answer").answer(),
            Err(error) => AdminError::failed(format!(
                "the node that owns the metadata of the cluster does not answer: {error:#}; see `forebay status` there"
            ))
            .answer(),
        }
    }

    /// The filesystem that a path names.
    fn filesystem(&self, name: &str) -> Result<FilesystemRecord, AdminError> {
        let cluster = self.member.cluster.borrow().clone();
        let cluster = cluster.ok_or_else(|| AdminError::failed("this node does not know the cluster yet"))?;
        let is_named = |record: &&FilesystemRecord| percent_encode(record.name.as_bytes()) == name;
        let found = cluster.filesystems.values().find(is_named).cloned();
        found.ok_or_else(|| {
            AdminError::not_found(format!("no such filesystem: name={name} (see `forebay fs list`)"))
        })
    }

    async fn mount(&self, filesystem: &FilesystemRecord, body: &Bytes) -> Result<(), AdminError> {
        let request: MountRequest =
            serde_json::from_slice(body).map_err(|error| AdminError::invalid(error.to_string()))?;
        if super::lock(&self.member.membership).witness {
            return Err(AdminError::conflict(
                "this node is a witness, which mounts nothing: join another machine as a node or a client (forebay token create)",
            ));
        }
        let (path, nodes) = (request.path.map(PathBuf::from), self.member.nodes());
        let named = (filesystem.id, filesystem.name.as_str());
        let owner = self.member.owner.now().map(|owner| owner.node);
        self.member.mounts.mount(named, path, request.options, (owner, &nodes)).await
    }

    /// Looks at this machine, whether there is an owner or not.
    async fn check(&self, body: &Bytes) -> Answered {
        let what: CheckParts = match serde_json::from_slice(body) {
            Ok(what) => what,
            Err(error) => return AdminError::invalid(error.to_string()).answer(),
        };
        let here = self.member.network.here();
        let cluster = self.member.cluster.borrow().clone();
        let record = cluster.as_ref().and_then(|cluster| cluster.nodes.get(&here));
        let name = record.map_or_else(hostname, |record| record.name.clone());
        answered(Ok(NodeCheck { node: here.0, name, findings: self.member.check(what).await }))
    }

    /// Mounts or unmounts, and shows the filesystem then.
    async fn change_mount(&self, method: &str, name: &str, body: &Bytes) -> Answered {
        let filesystem = match self.filesystem(name) {
            Ok(filesystem) => filesystem,
            Err(error) => return error.answer(),
        };
        let done = match method {
            "POST" => self.mount(&filesystem, body).await,
            _ => self.member.mounts.unmount(filesystem.id, &filesystem.name).await,
        };
        match done {
            Ok(()) => self.shown(&filesystem.name).await,
            Err(error) => error.answer(),
        }
    }

    /// The picture that the owner has of a filesystem, with the mount of this node.
    async fn shown(&self, name: &str) -> Answered {
        let (status, body) = self.status().await;
        let Ok(Value::Object(picture)) = serde_json::from_slice(&body) else { return (status, body) };
        let all = picture.get("filesystems").and_then(Value::as_array);
        match all.and_then(|all| all.iter().find(|filesystem| filesystem["name"] == name)) {
            Some(found) => answered(Ok(found)),
            None => {
                AdminError::failed("it is done; the node that owns the metadata does not tell more").answer()
            }
        }
    }

    async fn status(&self) -> Answered {
        let asked = self.pass_on("GET".to_owned(), "/v1/status".to_owned(), Bytes::new());
        let (status, body) = match tokio::time::timeout(STATUS_PATIENCE, asked).await {
            Ok(answer) => answer,
            Err(_) => (504, Bytes::new()),
        };
        let parsed = serde_json::from_slice::<NodeStatus>(&body).ok().filter(|_| status == 200);
        let mut picture = match parsed {
            Some(picture) => picture,
            None => self.alone().await,
        };
        picture.pid = std::process::id();
        picture.dir = self.member.dir.root().display().to_string();
        picture.version = VERSION.to_owned();
        picture.uptime_s = self.member.uptime_s();
        picture.s3 = self.member.gate.url();
        let detours = self.member.network.fabric.detours();
        picture.problems.extend(detours.into_iter().map(|(node, via)| {
            format!("node {node} is reached from here through node {via} only: look at the network to it")
        }));
        for filesystem in &mut picture.filesystems {
            let path = self.member.mounts.path_of(&filesystem.name);
            filesystem.mount = path.map(|path| path.display().to_string());
            (filesystem.transport, filesystem.mount_process) = (None, None);
        }
        answered(Ok(picture))
    }

    /// What this node knows by itself.
    async fn alone(&self) -> NodeStatus {
        let open = self.member.host.services().await.len();
        let engine = lock(&self.member.engine).clone();
        let why = match (self.member.role(), engine) {
            (Some(role), Some(engine)) if !role.holds() => {
                format!("it is this one, and the engine with the logs does not answer it ({engine})")
            }
            _ => lock(&self.member.problem).clone().unwrap_or_else(|| "it takes too long".to_owned()),
        };
        NodeStatus {
            alone: true,
            state: "degraded".to_owned(),
            problems: vec![format!(
                "the node that owns the metadata of the cluster does not answer: {why}; {open} drives of this node are open, \
                 and mounts wait"
            )],
            cluster: lock(&self.member.membership).cluster.to_string(),
            ..NodeStatus::default()
        }
    }

    async fn answer_here(&self, method: String, path: String, body: Bytes) -> Answered {
        let plain = path.split('?').next().unwrap_or(&path).to_owned();
        match (method.as_str(), plain.as_str()) {
            ("GET", "/v1/status") => return self.status().await,
            ("POST", "/v1/drives") => {
                let mut request = serde_json::from_slice::<Value>(&body).unwrap_or_default();
                if let Some(request) = request.as_object_mut()
                    && request.get("node").is_none_or(Value::is_null)
                {
                    request.insert("node".to_owned(), json!(self.member.network.here().0));
                }
                return self.pass_on(method, path, request.to_string().into()).await;
            }
            _ => {}
        }
        if plain == format!("/v1/nodes/{}/check", self.member.network.here()) {
            return self.check(&body).await;
        }
        if let Some(name) = filesystem_in(&plain, "mount") {
            return self.change_mount(&method, name, &body).await;
        }
        if let Some(name) = filesystem_in(&plain, "sync")
            && let Ok(FilesystemRecord { name, .. }) = self.filesystem(name)
            && let Err(error) = self.member.mounts.sync(&name).await
        {
            return AdminError::conflict(format!("not all of filesystem {name} is durable: {error:#}"))
                .answer();
        }
        self.pass_on(method, path, body).await
    }
}

impl Answer for Manager {
    fn answer(&self, method: String, path: String, body: Bytes) -> BoxFuture<'_, Answered> {
        Box::pin(self.answer_here(method, path, body))
    }
}
