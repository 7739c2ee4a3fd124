//! The logs of the ledgers move from files of this node to an engine that several nodes reach.
//!
//! The node stops in order, writes down in the engine where each log ends, and then, in one file, that it is a node of a cluster with
//! an engine. That file decides: before it is there, the next start goes on with the files, and another try of the move replaces what
//! this one has left in the engine.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use admin::{AdminError, EngineMemberInfo, LedgerLog, LogControl, LogInfo, LogMove, StandbyInfo};
use anyhow::{Context, Result, bail};
use base::env::Env;
use base::{Epoch, LedgerId, NodeId, Seq};
use control::{CONTROL_LEDGER, Cluster};
use futures_util::future::join_all;
use meta::owner::StandbyStat;
use meta::state::State as _;
use serde::{Deserialize, Serialize};
use wire::BoxFuture;
use wire::cluster::{EngineMember, EngineSeat, NodeAddresses};

use super::ledgers::{LedgerFiles, MetaDirs};
use super::management::failed;
use super::network::addresses_of;
use super::{Mounts, Node, NodeDir, State};
use crate::engine::{Engine, EngineAddress, Supervised, new_authority};
use crate::identity::{IdentityFiles, Membership, OWNER};

/// How long the node may take to stop.
const STOP_PATIENCE: Duration = Duration::from_secs(25);
/// How long the engine may take.
const ENGINE_PATIENCE: Duration = Duration::from_secs(30);

/// The engine that Forebay runs itself, as `log move` takes it.
pub(crate) const OWN_ENGINE: &str = "etcd";
/// The number of its members.
const ENGINE_MEMBERS: usize = 3;
/// The ports of a member: so far above that of its node.
const CLIENT_PORT: u16 = 1;
const PEER_PORT: u16 = 2;
/// Pause between two attempts to reach it.
const ENGINE_LOOK: Duration = Duration::from_millis(300);

/// `log-move.json`: the last move that began here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MoveRecord {
    /// The engine.
    to: String,
    /// A random number, which the engine has too: by it another try of the same move knows its own.
    number: u64,
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

fn node_of_replica(replica: u64) -> NodeId {
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

/// What is wrong with an engine.
pub(super) fn engine_problem(members: &[EngineMemberInfo]) -> Option<String> {
    let away: Vec<&str> =
        members.iter().filter(|member| !member.answers).map(|member| member.address.as_str()).collect();
    let spare = (members.len().saturating_sub(1) / 2).saturating_sub(away.len());
    (!away.is_empty()).then(|| {
        format!(
            "{} of {} members of the etcd with the metadata do not answer: {}; without {} more, everything waits",
            away.len(),
            members.len(),
            away.join(", "),
            spare + 1
        )
    })
}

/// The member of the engine on a node.
fn engine_member(node: &NodeAddresses) -> Result<EngineMember> {
    let address = node.addresses.first();
    let address = address.with_context(|| format!("node {} has no address", node.node))?;
    let (host, port) = address.rsplit_once(':').context("an address has no port")?;
    let port: u16 = port.parse()?;
    let above = |by: u16| port.checked_add(by).with_context(|| format!("there is no port above {address}"));
    Ok(EngineMember {
        name: format!("node-{}", node.node),
        host: host.trim_matches(['[', ']']).to_owned(),
        client_port: above(CLIENT_PORT)?,
        peer_port: above(PEER_PORT)?,
    })
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
}

impl Node {
    /// Where the logs are, and the nodes that follow them.
    pub(super) fn log_info(&self, state: &State, members: Vec<EngineMemberInfo>) -> LogInfo {
        let engine = state.meta_dirs.engine().map(|engine| engine.address().to_string());
        let problem = match &engine {
            Some(_) => None,
            None => MoveRecord::load(&self.env, &self.dir).ok().flatten().and_then(|record| record.problem),
        };
        let control = ledger_log("cluster", self.control.seq().unwrap_or_default(), self.control.standbys());
        let filesystems = state.filesystems.values().map(|entry| {
            let last = Seq(entry.owner.stat().committed_seq);
            ledger_log(&entry.record.name, last, entry.owner.standbys())
        });
        LogInfo {
            at: engine.unwrap_or_else(|| "files".to_owned()),
            owner: self.here().0,
            members,
            problem,
            ledgers: std::iter::once(control).chain(filesystems).collect(),
        }
    }

    /// The members of the engine that has the logs, and whether they answer.
    pub(super) async fn engine_members(&self) -> Vec<EngineMemberInfo> {
        let engine = self.state.lock().await.meta_dirs.engine().cloned();
        match engine {
            Some(engine) => engine.members().await,
            None => Vec::new(),
        }
    }

    /// Checks what can be checked while the node serves, and lets its process do the rest: it stops for that, and begins anew.
    pub(super) async fn begin_move(&self, LogMove { to, remount }: LogMove) -> Result<(), AdminError> {
        let conflict = |text: String| Err(AdminError::conflict(text));
        if self.seat.is_some() {
            let at = self.state.lock().await.meta_dirs.engine().map(|engine| engine.address().to_string());
            return conflict(format!("the logs are in an engine already: {}", at.unwrap_or_default()));
        }
        let given: Option<EngineAddress> = match to.as_str() {
            OWN_ENGINE => None,
            given => Some(given.parse().map_err(|error| AdminError::invalid(format!("{error:#}")))?),
        };
        let dir = self.dir.root().display();
        let Some(listen) = self.others.settings.listen else {
            return conflict(format!(
                "other machines cannot reach this node, so none could take over: start it with an address of this machine \
                 (forebay stop {dir}; forebay start {dir} --address ADDRESS)"
            ));
        };
        if let Some(given) = given.clone()
            && let Err(error) = Engine::connect(&self.env, &self.dir, &given.of_cluster(self.cluster)).await
        {
            return conflict(format!("{error:#}"));
        }
        let in_process: Vec<String> = {
            let state = self.state.lock().await;
            if let Err(error) = self.all_ledgers(&state) {
                return conflict(format!("{error:#}"));
            }
            let here = state.filesystems.values().filter(|entry| entry.mount_process().is_none());
            here.filter_map(|entry| entry.mount_path()).map(|path| path.display().to_string()).collect()
        };
        if !in_process.is_empty() && !remount {
            return conflict(format!(
                "mounts in the node's own process end with it, and programs that have files open there fail: {}; give --remount \
                 to have them made anew, each in a process of its own, or mount there with -o process=own before",
                in_process.join(", ")
            ));
        }
        let address = match given {
            Some(given) => given.of_cluster(self.cluster),
            None => self.make_engine(listen.ip()).await?,
        };
        let record = MoveRecord::load(&self.env, &self.dir).map_err(failed)?;
        let known = record.filter(|record| record.to == address.to_string());
        let number = known.map_or_else(|| self.env.random.next_u64(), |record| record.number);
        let record = MoveRecord { to: address.to_string(), number, problem: None };
        record.save(&self.env, &self.dir).map_err(failed)?;
        tracing::warn!(to = %address, "the logs of the ledgers move");
        self.moves.send_replace(true);
        Ok(())
    }

    /// Lets the first nodes run an engine, and waits until it works. If it does not, another try begins it anew.
    async fn make_engine(&self, listen: IpAddr) -> Result<EngineAddress, AdminError> {
        let nodes: Vec<NodeAddresses> = {
            let state = self.state.lock().await;
            addresses_of(&state.cluster).into_iter().take(ENGINE_MEMBERS).collect()
        };
        if nodes.len() < ENGINE_MEMBERS || nodes[0].node != self.here() {
            return Err(AdminError::conflict(format!(
                "an engine needs {ENGINE_MEMBERS} nodes, so that it goes on without one of them, and there are {}: let more join                  (forebay token create), or give an etcd of yours (etcd://HOST:PORT,…)",
                nodes.len()
            )));
        }
        let made = async {
            let members = nodes.iter().map(engine_member).collect::<Result<Vec<_>>>()?;
            let (authority, authority_key) = new_authority(self.cluster, self.env.clock.wall_ns())?;
            let number = self.env.random.next_u64();
            let seat = &|index: usize| EngineSeat {
                number,
                name: members[index].name.clone(),
                members: members.clone(),
                authority: authority.clone(),
                authority_key: authority_key.clone(),
            };
            let (own, here) = (Supervised::new(&self.env, &self.dir), seat(0));
            tokio::task::spawn_blocking(move || own.begin(listen, &here)).await??;
            let others = nodes.iter().enumerate().skip(1).map(|(index, node)| async move {
                let started = self.start_engine_at(node.node, seat(index)).await;
                started.with_context(|| format!("node {} cannot run a member of etcd", node.node))
            });
            for started in join_all(others).await {
                started?;
            }
            let address = EngineAddress::own(&members, self.cluster)?;
            let works = async {
                while let Err(error) = Engine::connect(&self.env, &self.dir, &address).await {
                    tracing::debug!(error = %format!("{error:#}"), "the new engine does not work yet");
                    tokio::time::sleep(ENGINE_LOOK).await;
                }
            };
            let works = tokio::time::timeout(ENGINE_PATIENCE, works).await;
            works
                .context("the members of etcd do not find each other; see DIR/log/etcd.log on their nodes")?;
            anyhow::Ok(address)
        };
        made.await.map_err(|error| AdminError::conflict(format!("no engine could be made: {error:#}")))
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
        let (all, nodes) = {
            let state = self.state.lock().await;
            (self.all_ledgers(&state)?, addresses_of(&state.cluster))
        };
        let stopped = tokio::time::timeout(STOP_PATIENCE, self.stop(Mounts::Keep)).await;
        stopped.context("stopping took too long")?.context("stopping")?;
        // An order may have been under way.
        for record in Cluster::of(&self.control.view()?)?.filesystems.values() {
            if !all.iter().any(|moving| moving.ledger == record.ledger) {
                bail!("filesystem {} was made in the meantime", record.name);
            }
        }
        let copied = tokio::time::timeout(ENGINE_PATIENCE, self.write_ends(&record, &all)).await;
        copied.context("the engine took too long")??;
        // This file decides.
        let settings = &self.others.settings;
        IdentityFiles::new(&self.env, &self.dir).keep_membership(&Membership {
            cluster: self.cluster,
            node: OWNER,
            listen: settings.listen.context("this node has no address")?,
            addresses: settings.advertised(),
            nodes,
            log: Some(record.to),
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
        let taken = || {
            format!(
                "another cluster has its logs there: prefix={}; choose another one (?prefix=NAME)",
                address.prefix()
            )
        };
        if !engine.claim(record.number).await? {
            bail!(taken());
        }
        for moving in all {
            let end = moving.end().await?;
            if !engine.begin(record.number, moving.ledger, end).await? {
                bail!(taken());
            }
        }
        Ok(())
    }
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_above_its_node() {
        let member = |address: &str| {
            let (node, addresses) = (NodeId(2), vec![address.to_owned()]);
            engine_member(&NodeAddresses { node, addresses })
                .map(|it| (it.name, it.host, it.client_port, it.peer_port))
        };
        let is = |host: &str, client, peer| ("node-2".to_owned(), host.to_owned(), client, peer);
        assert_eq!(member("10.0.0.1:7740").unwrap(), is("10.0.0.1", 7741, 7742));
        assert_eq!(member("[fd00::1]:80").unwrap(), is("fd00::1", 81, 82));
        assert!(member("a:65534").is_err() && member("a").is_err());
    }

    #[test]
    fn a_member_that_is_away_is_a_problem_and_says_how_many_more_may_be() {
        let members = |answers: &[bool]| -> Vec<EngineMemberInfo> {
            let numbered = answers.iter().enumerate();
            numbered
                .map(|(at, answers)| EngineMemberInfo { address: format!("m{at}"), answers: *answers })
                .collect()
        };
        assert_eq!(engine_problem(&members(&[true; 3])), None);
        assert_eq!(engine_problem(&[]), None);
        let one = engine_problem(&members(&[true, false, true])).unwrap();
        assert!(one.starts_with("1 of 3 ") && one.contains("m1; without 1 more, everything waits"), "{one}");
        let of_five = engine_problem(&members(&[true, false, true, true, true])).unwrap();
        assert!(of_five.contains("without 2 more"), "{of_five}");
    }
}
