//! The S3 endpoint of a node: the first filesystem's top-level directories as buckets.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use anyhow::{Context, Result};
use client::Client;
use rustix::process::{Resource, getrlimit};
use s3::{Gate, GateOptions, Limits, Server, TlsFiles};
use serde::{Deserialize, Serialize};

use super::{Node, State};

/// The filesystem that is served.
const FILESYSTEM: &str = "main";

/// What `start` was asked for. What is not given stays as it was.
#[derive(Debug, Clone, Default)]
pub(crate) struct S3Options {
    pub(crate) off: bool,
    pub(crate) listen: Option<SocketAddr>,
    pub(crate) domains: Vec<String>,
    /// Certificate and key.
    pub(crate) tls: Option<(PathBuf, PathBuf)>,
}

/// `DIR/s3/settings.json`; drawn in `docs/formats/node.md`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    /// Where it listened last.
    listen: Option<SocketAddr>,
    /// Whether somebody asked for that address: then no other will do.
    asked: bool,
    domains: Vec<String>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
}

/// The endpoint that runs.
pub(super) struct Endpoint {
    server: Server,
    client: Client,
}

impl Node {
    /// Starts to serve S3.
    pub(super) async fn start_s3(&self, options: &S3Options) -> Result<()> {
        if options.off {
            return Ok(());
        }
        let dir = self.dir.s3();
        self.env.files.create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        rustix::fs::chmod(&dir, rustix::fs::Mode::RWXU)
            .with_context(|| format!("cannot protect {}", dir.display()))?;
        let mut settings = self.s3_settings(options)?;
        let tls = self.s3_tls(&settings)?;
        let client = {
            let state: &State = &*self.state.lock().await;
            let Some(entry) = state.filesystems.get(FILESYSTEM) else { return Ok(()) };
            entry.open_client(&self.env, &self.runtime, &self.memory).await?
        };
        let gate = Gate::new(GateOptions {
            env: self.env.clone(),
            runtime: self.runtime.clone(),
            client: client.clone(),
            accounts: self.accounts.clone(),
            audit: self.audit.clone(),
            domains: settings.domains.clone(),
            ahead_bytes: self.memory.s3_ahead_bytes,
            requests_max: self.memory.s3_requests,
            bodies_bytes: self.memory.s3_bodies_bytes,
        });
        let wanted = settings.listen.unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let connections_max =
            self.memory.s3_connections.min(usize::try_from(files / 2).unwrap_or(usize::MAX));
        let limits = Limits { connections_max, ..Limits::default() };
        let start =
            |address| Server::start(&self.runtime, address, gate.clone(), tls.clone(), limits.clone());
        let server = match start(wanted).await {
            // The port was any free one, and is not free any more.
            Err(_) if !settings.asked => start(SocketAddr::new(wanted.ip(), 0)).await,
            started => started,
        };
        let server = match server {
            Ok(server) => server,
            Err(error) => {
                client.close().await?;
                return Err(error.into());
            }
        };
        settings.listen = Some(server.address());
        self.write_s3_settings(&settings)?;
        *self.s3.lock().expect("no holder of this lock panics") = Some(Endpoint { server, client });
        Ok(())
    }

    /// What was set last, changed by what is asked for now.
    fn s3_settings(&self, options: &S3Options) -> Result<Settings> {
        let path = self.dir.s3().join("settings.json");
        let mut settings = if self.env.files.exists(&path) {
            let bytes =
                self.env.files.read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            serde_json::from_slice(&bytes).with_context(|| format!("not understood: {}", path.display()))?
        } else {
            Settings::default()
        };
        if let Some(listen) = options.listen {
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

    fn write_s3_settings(&self, settings: &Settings) -> Result<()> {
        let path = self.dir.s3().join("settings.json");
        let bytes = serde_json::to_vec_pretty(settings).context("encoding the settings of S3")?;
        self.env.files.write_atomic(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))
    }

    fn s3_tls(&self, settings: &Settings) -> Result<std::sync::Arc<s3::TlsConfig>> {
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

    /// The filesystem that is served, and bytes that came from its object store for that.
    pub(super) fn s3_fetched(&self) -> (&'static str, u64) {
        let endpoint = self.s3.lock().expect("no holder of this lock panics");
        (FILESYSTEM, endpoint.as_ref().map_or(0, |endpoint| endpoint.client.fetched_bytes()))
    }

    /// Where S3 is served.
    pub(super) fn s3_url(&self) -> Option<String> {
        let endpoint = self.s3.lock().expect("no holder of this lock panics");
        endpoint.as_ref().map(|endpoint| format!("http://{}", endpoint.server.address()))
    }

    /// Ends requests and makes what they wrote durable.
    pub(super) async fn stop_s3(&self) -> Result<()> {
        let endpoint = self.s3.lock().expect("no holder of this lock panics").take();
        let Some(Endpoint { server, client }) = endpoint else { return Ok(()) };
        server.stop().await;
        // It refers to the client, and the client to it.
        client.set_invalidate(None);
        client.close().await.context("writing out what came through S3")
    }
}
