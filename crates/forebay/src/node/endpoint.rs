//! The S3 endpoint of a node: top-level directories of the first filesystem are the buckets.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::env::Env;
use client::Client;
use rustix::process::{Resource, getrlimit};
use s3::{Accounts, AuditLog, Gate, GateOptions, Limits, ListenError, Server, TlsFiles};
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

use super::{FIRST_FILESYSTEM, MemoryPlan, Node, NodeDir, State};

/// The first port that a new node tries.
const FIRST_PORT: u16 = 9000;
/// How long a start waits for its last address: the previous process may not have ended yet.
const ADDRESS_PATIENCE: Duration = Duration::from_secs(3);
const ADDRESS_POLL: Duration = Duration::from_millis(100);

/// S3 options of `start`. Options that are not given keep their values.
#[derive(Debug, Clone, Default)]
pub(crate) struct S3Options {
    pub(crate) off: bool,
    pub(crate) listen: Option<SocketAddr>,
    pub(crate) domains: Vec<String>,
    /// Paths of certificate and key.
    pub(crate) tls: Option<(PathBuf, PathBuf)>,
}

/// `DIR/s3/settings.json`; drawn in `docs/formats/node.md`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    /// The endpoint is off.
    #[serde(default)]
    off: bool,
    /// The last address.
    listen: Option<SocketAddr>,
    /// Whether only this address will do, because an operator chose it.
    asked: bool,
    domains: Vec<String>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
}

/// A running endpoint.
pub(crate) struct Endpoint {
    server: Server,
    client: Client,
}

/// Listens on the first free port, and keeps that port for later starts. Binding decides who gets a port, so several
/// nodes that start at once get different ones.
async fn first_free<S, F>(settings: &mut Settings, start: impl Fn(SocketAddr) -> F) -> Result<S>
where
    F: Future<Output = Started<S>>,
{
    settings.asked = true;
    for port in FIRST_PORT..u16::MAX {
        match start(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await {
            Err(error) if error.is_in_use() => {}
            started => return Ok(started?),
        }
    }
    bail!("no port of 127.0.0.1 from {FIRST_PORT} on is free for S3: give an address with --s3 ADDRESS:PORT")
}

/// Listens on the last address.
async fn again<S, F>(address: SocketAddr, start: impl Fn(SocketAddr) -> F) -> Result<S>
where
    F: Future<Output = Started<S>>,
{
    let patience = tokio::time::sleep(ADDRESS_PATIENCE);
    tokio::pin!(patience);
    loop {
        match start(address).await {
            Err(error) if error.is_in_use() && !patience.is_elapsed() => {
                tokio::select! {
                    () = &mut patience => {}
                    () = tokio::time::sleep(ADDRESS_POLL) => {}
                }
            }
            started => {
                return started.with_context(|| {
                    format!(
                        "S3 of this node is served at {address}; end what listens there (`ss -ltnp` shows it), or start \
                         with --s3 ADDRESS:PORT for another address, or with --no-s3"
                    )
                });
            }
        }
    }
}

type Started<S> = Result<S, ListenError>;

/// What an endpoint needs of its node.
pub(crate) struct EndpointParts {
    pub(crate) env: Env,
    pub(crate) dir: NodeDir,
    pub(crate) runtime: Handle,
    pub(crate) memory: MemoryPlan,
    pub(crate) accounts: Arc<Accounts>,
    pub(crate) audit: Arc<AuditLog>,
}

impl EndpointParts {
    /// Starts the endpoint, unless it is off. `open` gives the client of its filesystem; `None`: there is no such filesystem.
    pub(crate) async fn start(
        &self,
        options: &S3Options,
        open: impl Future<Output = Result<Option<Client>>>,
    ) -> Result<Option<Endpoint>> {
        let dir = self.dir.s3();
        self.env.files.create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        rustix::fs::chmod(&dir, rustix::fs::Mode::RWXU)
            .with_context(|| format!("cannot protect {}", dir.display()))?;
        let mut settings = self.settings(options)?;
        if settings.off {
            self.keep(&settings)?;
            return Ok(None);
        }
        let tls = self.tls(&settings)?;
        let Some(client) = open.await? else { return Ok(None) };
        let gate = self.gate(&client, &settings);
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let connections_max =
            self.memory.s3_connections.min(usize::try_from(files / 2).unwrap_or(usize::MAX));
        let limits = Limits { connections_max, ..Limits::default() };
        let start = |address| {
            let (runtime, gate) = (self.runtime.clone(), gate.clone());
            let (tls, limits) = (tls.clone(), limits.clone());
            async move { Server::start(&runtime, address, gate, tls, limits).await }
        };
        let server = match settings.listen {
            None => first_free(&mut settings, start).await,
            Some(address) if settings.asked => again(address, start).await,
            Some(address) => match start(address).await {
                Err(_) => start(SocketAddr::new(address.ip(), 0)).await.map_err(Into::into),
                Ok(server) => Ok(server),
            },
        };
        let server = match server {
            Ok(server) => server,
            Err(error) => {
                client.close().await?;
                return Err(error);
            }
        };
        settings.listen = Some(server.address());
        self.keep(&settings)?;
        Ok(Some(Endpoint { server, client }))
    }

    fn gate(&self, client: &Client, settings: &Settings) -> Arc<Gate> {
        Gate::new(GateOptions {
            env: self.env.clone(),
            runtime: self.runtime.clone(),
            client: client.clone(),
            accounts: self.accounts.clone(),
            audit: self.audit.clone(),
            domains: settings.domains.clone(),
            ahead_bytes: self.memory.s3_ahead_bytes,
            requests_max: self.memory.s3_requests,
            bodies_bytes: self.memory.s3_bodies_bytes,
        })
    }

    /// The last settings, changed by the options of this start.
    fn settings(&self, options: &S3Options) -> Result<Settings> {
        let path = self.dir.s3().join("settings.json");
        let mut settings = if self.env.files.exists(&path) {
            let bytes =
                self.env.files.read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            serde_json::from_slice(&bytes).with_context(|| format!("not understood: {}", path.display()))?
        } else {
            Settings::default()
        };
        settings.off |= options.off;
        if let Some(listen) = options.listen {
            settings.off = false;
            settings.listen = Some(listen);
            settings.asked = listen.port() != 0;
        }
        if !options.domains.is_empty() {
            settings.domains = options.domains.clone();
        }
        if let Some((certificate, key)) = &options.tls {
            settings.certificate = Some(std::path::absolute(certificate)?);
            settings.key = Some(std::path::absolute(key)?);
        }
        Ok(settings)
    }

    fn keep(&self, settings: &Settings) -> Result<()> {
        let path = self.dir.s3().join("settings.json");
        let bytes = serde_json::to_vec_pretty(settings).context("encoding the settings of S3")?;
        self.env.files.write_atomic(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))
    }

    fn tls(&self, settings: &Settings) -> Result<Arc<s3::TlsConfig>> {
        let dir = self.dir.s3();
        let files = TlsFiles {
            certificate: settings.certificate.clone().unwrap_or_else(|| dir.join("cert.pem")),
            key: settings.key.clone().unwrap_or_else(|| dir.join("key.pem")),
        };
        if settings.certificate.is_none() {
            let mut names: Vec<String> =
                ["localhost", "*.localhost", "127.0.0.1", "::1"].map(String::from).into();
            for domain in &settings.domains {
                names.extend([domain.clone(), format!("*.{domain}")]);
            }
            files.make_missing(&self.env, names)?;
        }
        Ok(files.load(&self.env)?)
    }
}

impl Endpoint {
    /// Its URL.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.server.address())
    }

    /// Ends all requests. Returns the client, which may have something to write out.
    pub(crate) async fn stop(self) -> Client {
        let Self { server, client } = self;
        server.stop().await;
        // The client and the gate refer to each other.
        client.set_invalidate(None);
        client
    }
}

impl Node {
    /// Starts the endpoint.
    pub(super) async fn start_s3(&self, options: &S3Options) -> Result<()> {
        let parts = EndpointParts {
            env: self.env.clone(),
            dir: self.dir.clone(),
            runtime: self.runtime.clone(),
            memory: self.memory,
            accounts: self.accounts.clone(),
            audit: self.audit.clone(),
        };
        let open = async {
            let state: &State = &*self.state.lock().await;
            let Some(entry) = state.filesystems.get(FIRST_FILESYSTEM) else { return Ok(None) };
            entry.open_client(&self.env, &self.runtime, &self.memory).await.map(Some)
        };
        let endpoint = parts.start(options, open).await?;
        *self.s3.lock().expect("no holder of this lock panics") = endpoint;
        Ok(())
    }

    /// The filesystem behind the endpoint, and the bytes that its requests fetched from the object store.
    pub(super) fn s3_fetched(&self) -> (&'static str, u64) {
        let endpoint = self.s3.lock().expect("no holder of this lock panics");
        (FIRST_FILESYSTEM, endpoint.as_ref().map_or(0, |endpoint| endpoint.client.fetched_bytes()))
    }

    /// URL of the endpoint.
    pub(super) fn s3_url(&self) -> Option<String> {
        self.s3.lock().expect("no holder of this lock panics").as_ref().map(Endpoint::url)
    }

    /// Ends all requests and makes their writes durable.
    pub(super) async fn stop_s3(&self) -> Result<()> {
        let endpoint = self.s3.lock().expect("no holder of this lock panics").take();
        match endpoint {
            Some(endpoint) => endpoint.stop().await.close().await.context("writing out what came through S3"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    /// Ports of several nodes that start one after another.
    #[test]
    fn a_new_node_takes_the_next_free_port_and_keeps_it() {
        let text = r#"{"listen":"127.0.0.1:4000","asked":false,"domains":[],"certificate":null,"key":null}"#;
        let settings: Settings = serde_json::from_str(text).unwrap();
        assert!(!settings.off, "settings of an earlier version");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let taken = FIRST_PORT + 2;
            let start = |address: SocketAddr| async move {
                let in_use = std::io::Error::from(std::io::ErrorKind::AddrInUse);
                if address.port() < taken { Err(ListenError::new(address, in_use)) } else { Ok(address) }
            };
            let mut settings = Settings::default();
            let address = first_free(&mut settings, start).await.unwrap();
            assert_eq!((address.port(), settings.asked), (taken, true));
            let denied = |address: SocketAddr| async move {
                Started::<()>::Err(ListenError::new(address, std::io::ErrorKind::PermissionDenied.into()))
            };
            assert!(first_free(&mut settings, denied).await.is_err(), "other ports would not do either");
        });
    }
}
