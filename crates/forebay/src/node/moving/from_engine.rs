//! The logs of the ledgers move from an engine: to another one, or to files of the first node.
//!
//! The owner ends all ledgers in order, and begins their logs behind their ends at the new place. Its last change in the old log of the
//! control ledger says where they are. That change decides: nobody adds anything to the old logs afterwards, because an owner reads it
//! before it does anything else. Each node that reads it, there or from the next owner, begins anew with the new place.

use std::time::Duration;

use admin::AdminError;
use anyhow::{Context, Result, bail};
use base::{Epoch, LedgerId, Seq};
use control::{CONTROL_LEDGER, Cluster, ClusterRecord, Plan};
use meta::log::NOBODY;
use wire::cluster::StoredLedger;

use super::{ENGINE_PATIENCE, FILES, OWN_ENGINE, STOP_PATIENCE, taken};
use crate::engine::{Engine, EngineAddress};
use crate::identity::OWNER;
use crate::node::management::failed;
use crate::node::{Mounts, Node};

/// How long another node may take to copy what it lacks.
const COPY_PATIENCE: Duration = Duration::from_secs(10);
const COPY_LOOK: Duration = Duration::from_millis(200);
/// How long a node may take to say what it has.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);

/// Where the logs go.
enum Destination {
    Engine(EngineAddress),
    /// Of the first node.
    Files,
}

impl Destination {
    /// As it stands in the record of the cluster.
    fn of_record(text: &str) -> Result<Self> {
        if text.is_empty() { Ok(Self::Files) } else { Ok(Self::Engine(text.parse()?)) }
    }

    fn to_record(&self) -> String {
        match self {
            Self::Engine(address) => address.to_string(),
            Self::Files => String::new(),
        }
    }
}

/// The end of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct End {
    ledger: LedgerId,
    epoch: Epoch,
    seq: Seq,
}

impl Node {
    /// As `begin_move`, of logs that are in an engine.
    pub(super) async fn begin_move_of_engine(&self, to: &str) -> Result<(), AdminError> {
        let (record, known) = {
            let state = self.state.lock().await;
            (state.cluster.record.clone(), state.meta_dirs.engine().map(Engine::address))
        };
        let known = known.ok_or_else(|| AdminError::conflict("the logs are not in an engine"))?;
        let as_conflict = |error: anyhow::Error| AdminError::conflict(format!("{error:#}"));
        self.check_programs().await.map_err(as_conflict)?;
        self.copied(&[]).await.map_err(as_conflict)?;
        let destination = self.destination(to, &record, &known).await?;
        let text = destination.to_record();
        self.change(|plan| plan.begin_log_move(&text)).await.map_err(failed)?;
        tracing::warn!(from = %known, to = text, "the logs of the ledgers move");
        let begins = if to == FILES && self.here() != OWNER { &self.leaves } else { &self.moves };
        begins.send_replace(true);
        Ok(())
    }

    /// Fails if a node may have an earlier program, which does not know that the logs can leave an engine, and would go on with the old ones.
    /// Each node of a later program has told the number of its start.
    async fn check_programs(&self) -> Result<()> {
        let state = self.state.lock().await;
        match state.cluster.nodes.values().find(|node| node.start == 0) {
            Some(node) => bail!(
                "node {} has not told the number of its start: it may have an earlier program, which does not know such a move. Start it \
                 again with this version",
                node.id
            ),
            None => Ok(()),
        }
    }

    /// Checks the place, and makes what is to be there.
    async fn destination(
        &self,
        to: &str,
        record: &ClusterRecord,
        known: &EngineAddress,
    ) -> Result<Destination, AdminError> {
        let conflict = |text: String| Err(AdminError::conflict(text));
        let next = record.recoveries + 1;
        if to == FILES {
            if !self.is_reached(OWNER) {
                return conflict(format!(
                    "files can only be those of node {OWNER}, which does not answer: start it"
                ));
            }
            if self.here() == OWNER {
                let there = self.state.lock().await.meta_dirs.check_all_there();
                there.map_err(|error| AdminError::conflict(format!("{error:#}")))?;
            }
            return Ok(Destination::Files);
        }
        if to == OWN_ENGINE {
            if known.is_own() {
                return conflict(format!("the logs are in an etcd of Forebay already: {known}"));
            }
            return Ok(Destination::Engine(self.make_engine(next).await?));
        }
        let given: EngineAddress = to.parse().map_err(|error| AdminError::invalid(format!("{error:#}")))?;
        if given == *known || given == known.clone().anywhere() {
            return conflict(format!("the logs are there already: {known}"));
        }
        let address = given.of_cluster(self.cluster, next);
        match self.check_engine(&address, record.move_number()).await {
            Ok(()) => Ok(Destination::Engine(address)),
            Err(error) => conflict(format!("{error:#}")),
        }
    }

    /// Moves the logs. Returns the record of the cluster that says so. The process must begin anew then, also after an error.
    pub(crate) async fn move_on(&self) -> Result<ClusterRecord> {
        let moved = self.move_on_now().await;
        if let Err(error) = &moved {
            let problem = format!("{error:#}");
            let noted: Result<()> = self
                .control
                .plan(|plan: &mut Plan| {
                    plan.fail_log_move(&problem);
                    Ok(())
                })
                .await;
            if let Err(error) = noted {
                tracing::warn!(error = %format!("{error:#}"), "that the move failed is not noted");
            }
            self.give_back().await;
        }
        moved
    }

    async fn move_on_now(&self) -> Result<ClusterRecord> {
        let stopped = async {
            let all = self.all_ledgers(&*self.state.lock().await)?;
            self.stop_but_control(Mounts::Keep).await.context("stopping")?;
            anyhow::Ok(all)
        };
        let stopped = tokio::time::timeout(STOP_PATIENCE, stopped).await;
        let all = stopped.context("stopping took too long")??;
        let cluster = Cluster::of(&self.control.view()?)?;
        let begun = cluster.record.log_move.clone().context("there is no record of a move")?;
        let mut ends = Vec::new();
        for moving in all.iter().filter(|moving| moving.ledger != CONTROL_LEDGER) {
            let (epoch, seq) = moving.end().await?;
            if moving.files.log.fence().await?.nonce != NOBODY {
                // What was sent to it last may still come.
                bail!("the log of ledger {} was not given back", moving.ledger);
            }
            ends.push(End { ledger: moving.ledger, epoch, seq });
        }
        // An order may have been under way.
        for record in cluster.filesystems.values() {
            if !ends.iter().any(|end| end.ledger == record.ledger) {
                bail!("filesystem {} was made in the meantime", record.name);
            }
        }
        self.copied(&ends).await?;
        // With the change that decides.
        let last = Seq(self.control.seq()?.0 + 1);
        ends.push(End { ledger: CONTROL_LEDGER, epoch: self.control.epoch(), seq: last });
        let destination = Destination::of_record(&begun.to)?;
        if !self.control.holds() {
            // Another owner may have begun the logs at the new place.
            bail!("this node may not own the metadata any more");
        }
        let begun =
            tokio::time::timeout(ENGINE_PATIENCE, self.begin_at(&destination, &cluster.record, &ends));
        begun.await.context("the new place took too long")??;
        let view = self.control.view()?;
        let mut plan = Plan::new(Cluster::of(&view)?);
        plan.move_logs(&destination.to_record());
        self.control.commit_last(plan.change(&view), last).await?;
        Ok(plan.into_next().record)
    }

    /// Begins all logs at the new place.
    async fn begin_at(&self, destination: &Destination, record: &ClusterRecord, ends: &[End]) -> Result<()> {
        let next = record.recoveries + 1;
        let behind = |end: &End| (end.epoch.recovered(next), end.seq);
        let address = match destination {
            Destination::Engine(address) => address,
            Destination::Files => {
                let (mut dirs, ends) = (self.state.lock().await.meta_dirs.clone(), ends.to_vec());
                let begin = move || {
                    ends.iter().try_for_each(|end| {
                        dirs.begin_files(end.ledger, (end.epoch.recovered(next), end.seq))
                    })?;
                    dirs.set_created()
                };
                return tokio::task::spawn_blocking(begin).await?;
            }
        };
        let (engine, number) = (Engine::connect(&self.env, &self.dir, address).await?, record.move_number());
        if !engine.claim(number, self.control.epoch().recovered(next)).await? {
            bail!(taken(address));
        }
        for end in ends {
            if !engine.begin(number, end.ledger, behind(end)).await? {
                bail!(taken(address));
            }
        }
        // See `write_ends`.
        for end in ends {
            let fence = engine.log(end.ledger).await?.fence().await?;
            if (fence.epoch, fence.tail) != behind(end) {
                bail!("the engine does not have the end of the log of ledger {}: try again", end.ledger);
            }
        }
        Ok(())
    }

    /// Waits until another node has all ledgers up to these ends, if another one may own them: it must not be this one alone.
    async fn copied(&self, ends: &[End]) -> Result<()> {
        let nodes = self.other_candidates().await;
        if nodes.is_empty() {
            return Ok(());
        }
        let copied = async {
            loop {
                for node in &nodes {
                    let stored = tokio::time::timeout(ANSWER_PATIENCE, self.stored_at(*node)).await;
                    if let Ok(Ok(stored)) = stored
                        && has_all(&stored, ends)
                    {
                        return;
                    }
                }
                tokio::time::sleep(COPY_LOOK).await;
            }
        };
        tokio::time::timeout(COPY_PATIENCE, copied).await.with_context(|| {
            let nodes: Vec<String> = nodes.iter().map(ToString::to_string).collect();
            format!(
                "this node alone has all of the metadata: start one of the nodes {}, and wait until it has all (forebay log show)",
                nodes.join(", ")
            )
        })
    }
}

fn has_all(stored: &[StoredLedger], ends: &[End]) -> bool {
    let has = |end: &End| stored.iter().any(|stored| stored.ledger == end.ledger && stored.seq >= end.seq);
    stored.iter().all(|stored| stored.seq > Seq(0)) && !stored.is_empty() && ends.iter().all(has)
}
