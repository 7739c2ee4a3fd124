//! The logs of the ledgers move from files of this node to an engine that several nodes reach, or from there to another place.
//!
//! From files, the node stops in order, writes down in the engine where each log ends, and then, in one file, that it is a node of a cluster with
//! an engine. That file decides: before it is there, the next start goes on with the files, and another try of the move replaces what
//! this one has left in the engine.

mod from_engine;

use std::path::{Path, PathBuf};
use std::time::Duration;

use admin::{
    AdminError, EngineMemberInfo, LedgerLog, LogControl, LogInfo, LogMove, MoveLedgers, StandbyInfo,
};
use anyhow::{Context, Result, bail};
use base::env::Env;
use base::{Epoch, LedgerId, NodeId, Seq};
use client::Client;
use control::{CONTROL_LEDGER, Cluster, LogMoveRecord};
use futures_util::future::join_all;
use meta::owner::StandbyStat;
use meta::state::State as _;
use serde::{Deserialize, Serialize};
use wire::BoxFuture;

use super::ledgers::{LedgerFiles, MetaDirs};
use super::local_mounts::{LocalMounts, MountPlace};
use super::management::failed;
use super::network::addresses_of;
use super::settings::Settings;
use super::{Mounts, Node, NodeDir, State};
use crate::engine::{Engine, EngineAddress};
use crate::identity::{IdentityFiles, Membership, OWNER};

/// How long the node may take to stop.
const STOP_PATIENCE: Duration = Duration::from_secs(25);
/// How long mounts in the node's process may write out before.
const SYNC_PATIENCE: Duration = Duration::from_secs(60);
/// How long the engine may take.
const ENGINE_PATIENCE: Duration = Duration::from_secs(30);

/// The engine that Forebay runs itself, as `log move` takes it.
pub(crate) const OWN_ENGINE: &str = "etcd";
/// Files of the first node, likewise.
pub(crate) const FILES: &str = "files";

/// `log-move.json`: the last move that began here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MoveRecord {
    /// The engine.
    to: String,
    /// A random number, which the engine has too: by it another try knows what an earlier one has left there.
    number: u64,
    /// Counts the tries.
    #[serde(default)]
    tries: u32,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

fn path(dir: &NodeDir) -> PathBuf {
    dir.root().join("log-move.json")
}

impl MoveRecord {
    fn load(env: &Env, dir: &NodeDir) -> Result<Option<Self>> {
        let path = path(dir);
        if !env.files.exists(&path) {
            return Ok(None);
        }
        let bytes = env.files.read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&bytes)
            .map(Some)
            .with_context(|| format!("not understood: {}", path.display()))
    }

    fn save(&self, env: &Env, dir: &NodeDir) -> Result<()> {
        let bytes = serde_json::to_vec_pretty(self).context("encoding the record of a move")?;
        let path = path(dir);
        env.files.write_atomic(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// The number of a node as a replica of a ledger.
pub(crate) fn replica_of_node(node: NodeId) -> u64 {
    u64::from(node.0) + 1
}

pub(super) fn node_of_replica(replica: u64) -> NodeId {
    NodeId(replica.saturating_sub(1) as u32)
}

/// A ledger whose log moves.
struct Moving {
    ledger: LedgerId,
    files: LedgerFiles,
}

impl Moving {
    /// The epoch of its last owner and the end of its log, which the local store has reached: the log itself stays here.
    async fn end(&self) -> Result<(Epoch, Seq)> {
        let Self { ledger, files } = self;
        let fence = files.log.fence().await.with_context(|| format!("reading the log of ledger {ledger}"))?;
        let stored =
            files.state.applied().with_context(|| format!("reading the store of ledger {ledger}"))?;
        if stored.seq != fence.tail {
            bail!("the store of ledger {ledger} ends at {}, and its log at {}", stored.seq, fence.tail);
        }
        Ok((fence.epoch, fence.tail))
    }
}

fn ledger_log(name: &str, last: Seq, standbys: Vec<StandbyStat>) -> LedgerLog {
    let standby = |stat: StandbyStat| StandbyInfo {
        node: node_of_replica(stat.replica).0,
        stored_seq: stat.stored.0,
        age_s: stat.age.as_secs(),
    };
    let standbys = standbys.into_iter().map(standby).collect();
    LedgerLog { ledger: name.to_owned(), last_seq: last.0, standbys }
}

impl LogControl for Node {
    fn move_log(&self, request: LogMove) -> BoxFuture<'_, Result<(), AdminError>> {
        Box::pin(self.begin_move(request))
    }

    fn move_ledgers(&self, request: MoveLedgers) -> BoxFuture<'_, Result<(), AdminError>> {
        Box::pin(self.move_ledgers_now(request))
    }
}

impl Node {
    /// Where the logs are, and the nodes that follow them.
    pub(super) fn log_info(&self, state: &State, members: Vec<EngineMemberInfo>) -> LogInfo {
        let engine = state.meta_dirs.engine().map(|engine| engine.address().to_string());
        let begun = state.cluster.record.log_move.as_ref();
        let waits = begun.is_some_and(LogMoveRecord::waits_for_first_node);
        let (tries, problem) = match (&engine, &state.cluster.record.log_move) {
            (Some(_), Some(begun)) => (begun.tries, begun.problem.clone()),
            (Some(_), None) => (0, None),
            (None, _) => match MoveRecord::load(&self.env, &self.dir) {
                Ok(Some(record)) => (record.tries, record.problem),
                _ => (0, None),
            },
        };
        let control = ledger_log("cluster", self.control.seq().unwrap_or_default(), self.control.standbys());
        let filesystems = state.filesystems.values().map(|entry| {
            let last = Seq(entry.owner.stat().committed_seq);
            ledger_log(&entry.record.name, last, entry.owner.standbys())
        });
        LogInfo {
            at: engine.unwrap_or_else(|| FILES.to_owned()),
            owner: self.here().0,
            members,
            tries,
            moves: *self.moves.borrow() || waits,
            problem,
            ledgers: std::iter::once(control).chain(filesystems).collect(),
        }
    }

    /// Checks what can be checked while the node serves, and lets its process do the rest: it stops for that, and begins anew.
    async fn begin_move(&self, LogMove { to, remount }: LogMove) -> Result<(), AdminError> {
        let conflict = |text: String| Err(AdminError::conflict(text));
        let Ok(_alone) = self.move_lock.try_lock() else {
            return conflict("another move of the logs is under way".to_owned());
        };
        if *self.moves.borrow() {
            return conflict("the logs move already".to_owned());
        }
        if self.seat.is_some() {
            return self.begin_move_of_engine(&to).await;
        }
        if to == FILES {
            return conflict(format!("the logs are in files already, of node {}", self.here()));
        }
        let given: Option<EngineAddress> = match to.as_str() {
            OWN_ENGINE => None,
            given => Some(given.parse().map_err(|error| AdminError::invalid(format!("{error:#}")))?),
        };
        let dir = self.dir.root().display();
        if self.others.settings.listen.is_none() {
            return conflict(format!(
                "other machines cannot reach this node, so none could take over: start it with an address of this machine \
                 (forebay stop {dir}; forebay start {dir} --address ADDRESS)"
            ));
        }
        let recoveries = self.state.lock().await.cluster.record.recoveries;
        let known = MoveRecord::load(&self.env, &self.dir).map_err(failed)?;
        let number = known.as_ref().map_or_else(|| self.env.random.next_u64(), |record| record.number);
        if let Some(given) = given.clone()
            && let Err(error) = self.check_engine(&given.of_cluster(self.cluster, recoveries), number).await
        {
            return conflict(format!("{error:#}"));
        }
        let (in_process, written): (Vec<String>, Vec<Client>) = {
            let state = self.state.lock().await;
            if let Err(error) = self.all_ledgers(&state) {
                return conflict(format!("{error:#}"));
            }
            let here = state.filesystems.values().filter(|entry| entry.mount_process().is_none());
            let mounted = here.filter_map(|entry| Some((entry.mount_path()?, entry)));
            mounted.map(|(path, entry)| (path.display().to_string(), entry.client.clone())).unzip()
        };
        if !in_process.is_empty() && !remount {
            return conflict(format!(
                "mounts in the node's own process end with it, and programs that have files open there fail: {}; give --remount \
                 to have them made anew, each in a process of its own, or mount there with -o process=own before",
                in_process.join(", ")
            ));
        }
        let address = match given {
            Some(given) => given.of_cluster(self.cluster, recoveries),
            None => self.make_engine(recoveries).await?,
        };
        // What is left to write then fits into the time of a stop.
        for client in written {
            let synced = tokio::time::timeout(SYNC_PATIENCE, client.sync()).await;
            if !matches!(synced, Ok(Ok(()))) {
                return conflict(
                    "what is written at this node does not become durable: see `forebay status`".to_owned(),
                );
            }
        }
        let tries = known.map_or(0, |record| record.tries) + 1;
        let record = MoveRecord { to: address.to_string(), number, tries, problem: None };
        record.save(&self.env, &self.dir).map_err(failed)?;
        tracing::warn!(to = %address, "the logs of the ledgers move");
        self.moves.send_replace(true);
        Ok(())
    }

    /// Fails if the engine has no majority, something else is there, or another node could not use it.
    async fn check_engine(&self, address: &EngineAddress, number: u64) -> Result<()> {
        let engine = Engine::connect(&self.env, &self.dir, address).await?;
        if !engine.is_free(number).await? {
            bail!("{}", taken(address));
        }
        self.check_engine_elsewhere(&engine, number).await
    }

    /// The other nodes that may own the ledgers later.
    async fn other_candidates(&self) -> Vec<NodeId> {
        let State { cluster, .. } = &*self.state.lock().await;
        let others = cluster.nodes.keys().filter(|node| **node != self.here());
        others.filter(|node| cluster.may_own(**node)).copied().collect()
    }

    /// Fails if another node that may own the ledgers later answers, and could not use these servers.
    async fn check_engine_elsewhere(&self, engine: &Engine, number: u64) -> Result<()> {
        let (address, system) = (engine.address(), engine.system());
        let nodes = self.other_candidates().await.into_iter().filter(|node| self.is_reached(*node));
        let tries = nodes.map(|node| {
            let (address, system) = (&address, &system);
            async move {
                let tried = self.try_log_at(node, address.to_string(), number).await;
                let found = tried.with_context(|| {
                    format!(
                        "node {node} could not take over with the logs at {address}: it has to reach these servers, and to have the files \
                         that the address names"
                    )
                })?;
                if found != *system {
                    bail!("{address} leads node {node} to other servers: {found}, and not {system}");
                }
                Ok(())
            }
        });
        join_all(tries).await.into_iter().collect()
    }

    /// Waits until the logs are to move.
    pub(crate) async fn asked_to_move(&self) {
        // The sender lives as long as the node.
        let _ = self.moves.subscribe().wait_for(|moves| *moves).await;
    }

    /// Stops the node and moves the logs. Its process must begin anew then, also after an error: nothing has moved in that case.
    pub(crate) async fn move_logs(&self) {
        let moved = self.move_logs_now().await;
        let Err(error) = moved else { return tracing::warn!("the logs have moved") };
        let problem = format!("{error:#}");
        tracing::error!(problem, "the logs stay where they are");
        let noted = MoveRecord::load(&self.env, &self.dir).and_then(|record| {
            let record = record.context("there is no record of a move")?;
            MoveRecord { problem: Some(problem), ..record }.save(&self.env, &self.dir)
        });
        if let Err(error) = noted {
            tracing::error!(error = %format!("{error:#}"), "that is not noted");
        }
    }

    async fn move_logs_now(&self) -> Result<()> {
        let record = MoveRecord::load(&self.env, &self.dir)?.context("there is no record of a move")?;
        let (all, nodes, recoveries, meta_dirs) = {
            let state = self.state.lock().await;
            let recoveries = state.cluster.record.recoveries;
            (self.all_ledgers(&state)?, addresses_of(&state.cluster), recoveries, state.meta_dirs.clone())
        };
        let stopped = tokio::time::timeout(STOP_PATIENCE, self.stop(Mounts::Keep)).await;
        stopped.context("stopping took too long")?.context("stopping")?;
        // An order may have been under way. From now on the control ledger takes nothing more.
        for record in Cluster::of(&self.control.view()?)?.filesystems.values() {
            if !all.iter().any(|moving| moving.ledger == record.ledger) {
                bail!("filesystem {} was made in the meantime", record.name);
            }
        }
        let copied = tokio::time::timeout(ENGINE_PATIENCE, self.write_ends(&record, &all)).await;
        copied.context("the engine took too long")??;
        // They may have followed other logs before.
        all.iter().try_for_each(|moving| meta_dirs.go_on(moving.ledger, record.number))?;
        // This file decides.
        let settings = &self.others.settings;
        IdentityFiles::new(&self.env, &self.dir).keep_membership(&Membership {
            cluster: self.cluster,
            node: OWNER,
            listen: settings.listen.context("this node has no address")?,
            addresses: settings.advertised(),
            nodes,
            log: Some(record.to),
            recoveries,
            left: Vec::new(),
            leaves_engine: None,
            witness: false,
        })
    }

    /// All ledgers, the control ledger last: with it, the engine is complete.
    fn all_ledgers(&self, state: &State) -> Result<Vec<Moving>> {
        let filesystems = state.cluster.filesystems.values().map(|record| {
            let entry = state.filesystems.get(&record.name).with_context(|| {
                format!(
                    "filesystem {} is not open: see `forebay status`, or start the node again",
                    record.name
                )
            })?;
            Ok(Moving { ledger: record.ledger, files: entry.files.clone() })
        });
        let control = Moving { ledger: CONTROL_LEDGER, files: self.control_files.clone() };
        filesystems.chain([Ok(control)]).collect()
    }

    /// Writes down in the engine where each log ends.
    async fn write_ends(&self, record: &MoveRecord, all: &[Moving]) -> Result<()> {
        let address = record.to.parse()?;
        let engine = Engine::connect(&self.env, &self.dir, &address).await?;
        let control = all.iter().find(|moving| moving.ledger == CONTROL_LEDGER);
        let (epoch, _) = control.context("the control ledger has no log")?.end().await?;
        if !engine.claim(record.number, epoch).await? {
            bail!(taken(&address));
        }
        for moving in all {
            if !engine.begin(record.number, moving.ledger, moving.end().await?).await? {
                bail!(taken(&address));
            }
        }
        // A claim that was sent twice may have been executed late, and have removed some of this; now that the control ledger has
        // begun, none can.
        for moving in all {
            let (end, fence) = (moving.end().await?, engine.log(moving.ledger).await?.fence().await?);
            if (fence.epoch, fence.tail) != end {
                bail!("the engine does not have the end of the log of ledger {}: try again", moving.ledger);
            }
        }
        Ok(())
    }
}

/// Why logs cannot move to an engine in which there is something.
fn taken(address: &EngineAddress) -> String {
    format!(
        "there are logs already, of another cluster or of an earlier try: prefix={}; choose another one (?prefix=NAME), or \
         remove them if nothing uses them ({})",
        address.prefix(),
        address.how_to_clear()
    )
}

/// Whether the logs have moved, and this node has not owned the ledgers since: then it alone has what is before them.
pub(crate) fn is_unfinished(env: &Env, dir: &NodeDir) -> bool {
    env.files.exists(&path(dir))
}

/// Removes the logs in files after they have moved, and the record of that: the engine has had an owner since.
pub(super) fn forget_files(env: &Env, dir: &NodeDir, meta_dirs: &MetaDirs) -> Result<()> {
    let path = path(dir);
    if !env.files.exists(&path) {
        return Ok(());
    }
    let remove = |path: &Path| {
        env.files.remove_file(path).with_context(|| format!("cannot remove {}", path.display()))
    };
    for meta_dir in meta_dirs.paths() {
        // A directory that is not there now keeps files that nothing reads.
        for ledger in env.files.list(meta_dir).unwrap_or_default() {
            let log = ledger.join("log");
            env.files.list(&log).unwrap_or_default().iter().try_for_each(|file| remove(file))?;
        }
    }
    remove(&path)
}

/// Makes this machine, which was one of several that may own the ledgers, the first node of a cluster with their logs in its files.
pub(crate) fn be_first_node(env: &Env, dir: &NodeDir, known: &Membership) -> Result<()> {
    let mut settings = Settings::load(env, dir)?;
    let elsewhere = if known.addresses == [known.listen.to_string()] { &[] } else { &*known.addresses };
    settings.listen_at(Some(known.listen), elsewhere)?;
    settings.save(env, dir)?;
    let mounts = LocalMounts::load(env, dir, Vec::new())?;
    for (id, place) in mounts.all() {
        // They go on in processes of their own.
        let others = place.options.split(',').filter(|it| !it.is_empty() && !it.starts_with("process="));
        let options: Vec<&str> = others.chain(["process=own"]).collect();
        mounts.set(id, MountPlace { options: options.join(","), ..place })?;
    }
    // This decides.
    IdentityFiles::new(env, dir).forget_membership()
}
