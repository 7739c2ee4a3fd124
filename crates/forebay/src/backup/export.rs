//! `meta export`: one file with copies of all ledgers. The owner of the ledgers gives them. It may be another node, and it may change
//! during the export.
//!
//! The control ledger is copied last: it knows every drive and placement group that the others refer to.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::env::Env;
use base::{FsError, LedgerId, NodeId};
use bytes::Bytes;
use control::{CONTROL_LEDGER, Cluster, Control};
use meta::owner::CopyCheck;
use meta::state::{Applied, MemState, State as _};
use serde::Serialize;
use tokio::sync::watch;
use tokio::time::Instant;
use wire::link::RemoteReplica;
use wire::replica::{CopyPart, READER, ReplicaReply, ReplicaRequest, ReplicaService};

use super::file::{BackupWriter, Heading, Totals};
use super::{LedgerInfo, Tell, ledger_info};
use crate::identity::{IdentityFiles, OWNER};
use crate::node::{NodeDir, is_locked};
use crate::remote::Routes;

/// How long nothing may come until the export is given up, and the pause before another attempt at a copy. Copies of others that have
/// ended without a word are kept for a minute.
const PATIENCE: Duration = Duration::from_secs(90);
const PAUSE: Duration = Duration::from_millis(300);

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Exported {
    /// The cluster.
    pub(crate) cluster: String,
    /// What each ledger has.
    pub(crate) ledgers: Vec<LedgerInfo>,
    /// Bytes of the file.
    pub(crate) file_bytes: u64,
}

/// Exports the metadata of the cluster of a node that runs. An earlier file is replaced only if that is asked for. All that was durable
/// when this began is in the file.
pub(crate) async fn export(
    env: &Env,
    dir: &NodeDir,
    path: &Path,
    force: bool,
    tell: &mut Tell<'_>,
) -> Result<Exported> {
    let path = std::path::absolute(path)?;
    if env.files.exists(&path) && !force {
        bail!("{} is there already: give another name, or --force to replace it", path.display());
    }
    let mut reading = Reading::begin(env, dir)?;
    let mut control = reading.control().await?;
    let made_s = env.clock.wall_ns() / 1_000_000_000;
    let mut writer = BackupWriter::begin(env, &path, Heading { cluster: control.record.id, made_s })?;
    let mut done: BTreeMap<LedgerId, (Applied, Totals)> = BTreeMap::new();
    loop {
        let ledgers = control.filesystems.values().map(|record| record.ledger);
        for ledger in ledgers.filter(|ledger| !done.contains_key(ledger)).collect::<Vec<_>>() {
            done.insert(ledger, reading.ledger(ledger, &mut writer, None, tell).await?);
        }
        let (before, mut state) = (writer.mark(), Arc::default());
        let copied = reading.ledger(CONTROL_LEDGER, &mut writer, Some(&mut state), tell).await?;
        control = cluster_of(state)?;
        // Somebody may have made a filesystem since the last look.
        if control.filesystems.values().all(|record| done.contains_key(&record.ledger)) {
            done.insert(CONTROL_LEDGER, copied);
            break;
        }
        writer.rewind(before);
    }
    let (_, file_bytes) = tokio::task::spawn_blocking(move || writer.finish()).await??;
    let ledgers = done.iter().map(|(ledger, (at, totals))| ledger_info(&control, *ledger, *at, *totals));
    Ok(Exported { cluster: control.record.id.to_string(), ledgers: ledgers.collect(), file_bytes })
}

pub(super) fn cluster_of(state: Arc<MemState>) -> Result<Cluster> {
    Ok(Cluster::of(&Control::view_only(state).view()?)?)
}

/// The way to the owner of the ledgers.
struct Reading {
    routes: Arc<Routes>,
    owner: watch::Receiver<Option<NodeId>>,
}

/// Why a copy is begun anew.
enum Again {
    /// The owner gives none just now, or is another one.
    Refused(FsError),
    /// It arrived damaged.
    Bad(meta::owner::BadPart),
}

impl std::fmt::Display for Again {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(error) => write!(f, "the owner of the metadata gives no copy of it: {error}"),
            Self::Bad(error) => error.fmt(f),
        }
    }
}

impl Reading {
    fn begin(env: &Env, dir: &NodeDir) -> Result<Self> {
        let shown = dir.root().display();
        if env.files.exists(&dir.client_json()) {
            bail!("{shown} is of a client: export at a node of the cluster");
        }
        if !is_locked(env, dir) {
            bail!("no node runs in {shown}: start it with `forebay start {shown}`");
        }
        let membership = IdentityFiles::new(env, dir).membership()?;
        let home = membership.as_ref().map_or(OWNER, |membership| membership.node);
        let routes = Routes::beside(env, dir, home)?;
        routes.set_nodes(&membership.map(|membership| membership.nodes).unwrap_or_default());
        let owner = routes.follow_owner(None);
        Ok(Self { routes, owner })
    }

    /// The cluster, as it is now.
    async fn control(&mut self) -> Result<Cluster> {
        let begun = Instant::now();
        loop {
            let state = Arc::new(MemState::default());
            match self.copy(CONTROL_LEDGER, &mut |part| keep(&state, part)).await? {
                Ok(_) => return cluster_of(state),
                Err(again) => wait(again, begun).await?,
            }
        }
    }

    /// Writes a ledger, and keeps its content if that is wanted. Returns its position and what it has. What is left of an attempt that
    /// failed is taken back.
    async fn ledger(
        &mut self,
        ledger: LedgerId,
        writer: &mut BackupWriter,
        mut kept: Option<&mut Arc<MemState>>,
        tell: &mut Tell<'_>,
    ) -> Result<(Applied, Totals)> {
        let (before, mut begun) = (writer.mark(), Instant::now());
        loop {
            let mut is_first = true;
            let mut take = |part: &CopyPart| -> Result<()> {
                if std::mem::take(&mut is_first) {
                    writer.begin_ledger(ledger, position(part))?;
                    kept.iter_mut().for_each(|kept| **kept = Arc::default());
                }
                kept.iter().try_for_each(|kept| keep(kept, part))?;
                writer.rows(part.pairs.clone())?;
                begun = Instant::now();
                tell(writer.mark().bytes(), None);
                Ok(())
            };
            match self.copy(ledger, &mut take).await? {
                Ok(at) => return Ok((at, writer.end_ledger()?)),
                Err(again) => wait(again, begun).await?,
            }
            writer.rewind(before);
        }
    }

    /// Copies a ledger once.
    async fn copy(
        &mut self,
        ledger: LedgerId,
        take: &mut (dyn FnMut(&CopyPart) -> Result<()> + Send),
    ) -> Result<Result<Applied, Again>> {
        let node = *self.owner.borrow_and_update();
        let Some(peer) = node.and_then(|node| self.routes.to(node)) else {
            return Ok(Err(Again::Refused(FsError::Disconnected)));
        };
        let (owner, mut check) = (RemoteReplica::new(&peer, ledger), CopyCheck::default());
        loop {
            let (copy, after) = check.next();
            let part = match ask(&owner, copy, after).await {
                Ok(part) => part,
                Err(error) => return Ok(Err(Again::Refused(error))),
            };
            if let Err(bad) = check.take(&part) {
                return Ok(Err(Again::Bad(bad)));
            }
            take(&part)?;
            if check.is_complete() {
                return Ok(Ok(position(&part)));
            }
        }
    }
}

async fn ask(owner: &RemoteReplica, copy: u64, after: Bytes) -> Result<CopyPart, FsError> {
    match owner.ask(ReplicaRequest::Copy { replica: READER, wait_ms: 0, copy, after }).await? {
        ReplicaReply::Copied(part) => Ok(part),
        ReplicaReply::Noted => Err(FsError::Io),
    }
}

fn position(part: &CopyPart) -> Applied {
    Applied { seq: part.seq, epoch: part.epoch }
}

/// Puts a part into a store in memory.
fn keep(state: &MemState, part: &CopyPart) -> Result<()> {
    let mut pairs = part.pairs.iter().map(|(key, value)| (&key[..], Some(&value[..])));
    state.apply(&mut pairs, position(part)).context("reading the metadata of the cluster")
}

/// Waits before another attempt, unless there were enough.
async fn wait(again: Again, since: Instant) -> Result<()> {
    if since.elapsed() > PATIENCE {
        bail!("{again}; is the cluster without an owner? See `forebay status`");
    }
    tracing::debug!(%again, "a copy is begun anew");
    tokio::time::sleep(PAUSE).await;
    Ok(())
}
