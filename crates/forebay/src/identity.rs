//! `DIR/identity`: by which key and certificate others in the cluster know this process; drawn in `docs/formats/node.md`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use base::env::Env;
use base::{ClusterId, Epoch, NodeId};
use control::{Authority, NewKey};
use serde::{Deserialize, Serialize};
use wire::cluster::NodeAddresses;
use wire::identity::{Fingerprint, Identity};

use crate::node::NodeDir;

/// The first node of a cluster. It owns all ledgers where their logs are files, which no other node reaches.
pub(crate) const OWNER: NodeId = NodeId(0);

/// What counts as its epoch then, until it tells its own. `recoveries` is how often the logs were begun elsewhere before.
pub(crate) fn only_epoch(recoveries: u32) -> Epoch {
    if recoveries == 0 { Epoch(1) } else { Epoch(1).recovered(recoveries) }
}

/// How often a certificate is renewed, which is valid for a year.
pub(crate) const RENEW_EVERY: Duration = Duration::from_secs(30 * 86_400);

/// The name of this machine.
pub(crate) fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The files of an identity.
pub(crate) struct IdentityFiles {
    env: Env,
    dir: PathBuf,
}

/// `starts.json`: by these numbers the cluster knows a directory from a copy of it. See `control::starts`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Starts {
    /// The last start that the cluster has noted; 0: none.
    pub(crate) last: u64,
    /// This one; the same once it is noted.
    pub(crate) this: u64,
}

/// The place of this node in its cluster, as far as it must be known before others are reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Membership {
    /// The cluster.
    pub(crate) cluster: ClusterId,
    /// The number of this node.
    pub(crate) node: NodeId,
    /// Where the node listens: `address:port`.
    pub(crate) listen: SocketAddr,
    /// Where others reach it: `host:port`.
    pub(crate) addresses: Vec<String>,
    /// The nodes, with their addresses, as they were last.
    pub(crate) nodes: Vec<NodeAddresses>,
    /// The engine that has the logs of the ledgers; `None`: files of the first node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) log: Option<String>,
    /// How often the logs were begun elsewhere, as far as this node knows. Owners from before count for nothing.
    #[serde(default)]
    pub(crate) recoveries: u32,
    /// The engines that the logs have left, the last ones. An address of one of them in the options of a start is out of date.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) left: Vec<String>,
    /// The number of the member of an engine on this node that the logs have left. It ends once an owner at the new place is heard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leaves_engine: Option<u64>,
    /// It is a witness: it runs a member of an engine and nothing else.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) witness: bool,
}

/// The largest number of engines in [`Membership::left`].
const LEFT_MAX: usize = 8;

impl Membership {
    /// The logs have left an engine.
    pub(crate) fn leave(&mut self, log: String) {
        self.left.retain(|left| *left != log);
        self.left.push(log);
        let extra = self.left.len().saturating_sub(LEFT_MAX);
        self.left.drain(..extra);
    }
}

impl IdentityFiles {
    pub(crate) fn new(env: &Env, dir: &NodeDir) -> Self {
        Self { env: env.clone(), dir: dir.identity() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn read(&self, name: &str) -> Result<Option<String>> {
        let path = self.path(name);
        if !self.env.files.exists(&path) {
            return Ok(None);
        }
        let bytes = self.env.files.read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        String::from_utf8(bytes).map(Some).with_context(|| format!("not understood: {}", path.display()))
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let files = &self.env.files;
        files.create_dir_all(&self.dir).with_context(|| format!("cannot create {}", self.dir.display()))?;
        rustix::fs::chmod(&self.dir, rustix::fs::Mode::RWXU)
            .with_context(|| format!("cannot protect {}", self.dir.display()))?;
        let path = self.path(name);
        files.write_atomic(&path, text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
    }

    /// The key of this process, which is made if there is none.
    pub(crate) fn key(&self) -> Result<NewKey> {
        match self.read("key.pem")? {
            Some(pem) => Ok(NewKey::of_pem(&pem)?),
            None => {
                let key = NewKey::make()?;
                self.write("key.pem", &key.key_pem)?;
                Ok(key)
            }
        }
    }

    /// Keeps the certificate for the key, and those of the authorities.
    pub(crate) fn keep(&self, certificate: &str, authorities: &str) -> Result<()> {
        self.write("authorities.pem", authorities)?;
        self.write("certificate.pem", certificate)
    }

    /// The identity, once there is a certificate.
    pub(crate) fn load(&self) -> Result<Option<Identity>> {
        let (key, certificate) = (self.read("key.pem")?, self.read("certificate.pem")?);
        let (Some(key), Some(certificate), Some(authorities)) =
            (key, certificate, self.read("authorities.pem")?)
        else {
            return Ok(None);
        };
        let identity = Identity::new(&certificate, &key, &authorities);
        identity.map(Some).with_context(|| format!("not understood: {}", self.dir.display()))
    }

    /// The authority that this process believes.
    pub(crate) fn believed(&self) -> Result<Fingerprint> {
        let authorities = self.authorities()?.context("there is no certificate")?;
        Ok(Fingerprint::of_pem(&authorities)?)
    }

    /// The certificates of the authorities, and so which cluster this process is of, if that is known.
    pub(crate) fn authorities(&self) -> Result<Option<String>> {
        self.read("authorities.pem")
    }

    /// The numbers of this node's starts. Those of one that was not noted stay, until it is.
    pub(crate) fn begin_start(&self) -> Result<Starts> {
        let path = self.path("starts.json");
        let known: Option<Starts> = match self.read("starts.json")? {
            Some(text) => Some(
                serde_json::from_str(&text).with_context(|| format!("not understood: {}", path.display()))?,
            ),
            None => None,
        };
        let Starts { last, this } = known.unwrap_or_default();
        if last != this {
            return Ok(Starts { last, this });
        }
        // 0 is none.
        let starts = Starts { last, this: self.env.random.next_u64() | 1 };
        self.keep_starts(starts)?;
        Ok(starts)
    }

    /// This start was noted.
    pub(crate) fn end_start(&self, Starts { this, .. }: Starts) -> Result<Starts> {
        let starts = Starts { last: this, this };
        self.keep_starts(starts)?;
        Ok(starts)
    }

    fn keep_starts(&self, starts: Starts) -> Result<()> {
        self.write("starts.json", &serde_json::to_string(&starts)?)
    }

    /// Keeps the key of the cluster's authority.
    pub(crate) fn keep_authority(&self, key_pem: &str) -> Result<()> {
        self.write("authority-key.pem", key_pem)
    }

    /// The cluster's authority, if its key is here.
    pub(crate) fn authority(&self, certificate: &str) -> Result<Option<Authority>> {
        let key = self.read("authority-key.pem")?;
        Ok(key.map(|key| Authority::of_pem(certificate, &key)).transpose()?)
    }

    /// The place of this node in a cluster that it joined.
    pub(crate) fn membership(&self) -> Result<Option<Membership>> {
        let text = self.read("membership.json")?;
        let parsed = text.map(|text| serde_json::from_str(&text)).transpose();
        parsed.with_context(|| format!("not understood: {}", self.path("membership.json").display()))
    }

    /// Makes this the first node of a cluster with its logs in files.
    pub(crate) fn forget_membership(&self) -> Result<()> {
        let path = self.path("membership.json");
        let removed = self.env.files.remove_file(&path).and_then(|()| self.env.files.sync_dir(&self.dir));
        removed.with_context(|| format!("cannot remove {}", path.display()))
    }

    pub(crate) fn keep_membership(&self, membership: &Membership) -> Result<()> {
        self.write("membership.json", &serde_json::to_string_pretty(membership)?)
    }
}
