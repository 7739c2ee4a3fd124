//! The members of an engine that Forebay runs: one on each of the first nodes. When one of these nodes is removed, is elsewhere, or
//! has lost the data of its member, the owner of the ledgers has the member replaced: the old one is taken out, the new one copies
//! what the others have, and gets a vote then. One step at a time, each decided from what is there, so that another owner goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use admin::{AdminError, EngineMemberInfo, LogInfo};
use anyhow::{Context, Result};
use base::NodeId;
use control::{Cluster, Plan, SEATS};
use futures_util::future::join_all;
use meta::log::EtcdMember;
use tokio::sync::watch;
use wire::cluster::{EngineCondition, EngineMember, EngineSeat, NodeAddresses};

use super::Node;
use super::network::addresses_of;
use crate::engine::{Engine, EngineAddress, Supervised, bracketed, new_authority};

/// The ports of a member: so far above that of its node.
const CLIENT_PORT: u16 = 1;
const PEER_PORT: u16 = 2;
/// How long a new engine may take until it works, and the pause between two attempts to reach it.
const ENGINE_PATIENCE: Duration = Duration::from_secs(30);
const ENGINE_LOOK: Duration = Duration::from_millis(300);
/// Pause between two looks at the members, and after a step of a replacement.
const LOOK: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_secs(1);

/// The member of the engine on a node.
pub(crate) fn member_of(node: &NodeAddresses) -> Result<EngineMember> {
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

/// The nodes that run a member, with their addresses.
fn seats_of(cluster: &Cluster) -> Vec<NodeAddresses> {
    let seats = cluster.seats();
    addresses_of(cluster).into_iter().filter(|node| seats.contains(&node.node)).collect()
}

/// The members on these nodes.
fn members_on(nodes: &[NodeAddresses]) -> Result<BTreeMap<NodeId, EngineMember>> {
    nodes.iter().map(|node| Ok((node.node, member_of(node)?))).collect()
}

/// The witnesses whose seats other nodes have now, with their addresses. They may still have a member.
fn spare_of(cluster: &Cluster) -> Vec<NodeAddresses> {
    let seats = cluster.seats();
    let is_spare = |node: NodeId| {
        !seats.contains(&node) && cluster.nodes.get(&node).is_some_and(|record| record.witness)
    };
    addresses_of(cluster).into_iter().filter(|node| is_spare(node.node)).collect()
}

/// The address of the member on a node, as clients of the engine know it.
pub(crate) fn client_address(node: &NodeAddresses) -> Option<String> {
    let member = member_of(node).ok()?;
    Some(format!("https://{}:{}", bracketed(&member.host), member.client_port))
}

/// Where the others reach it.
fn peer_url(member: &EngineMember) -> String {
    format!("https://{}:{}", bracketed(&member.host), member.peer_port)
}

/// What is wrong with an engine, as far as its members that are known by address say so.
fn engine_problem(log: &LogInfo) -> Option<String> {
    let (members, is_own) = (&log.members, log.at.contains("run=own"));
    let away: Vec<&str> =
        members.iter().filter(|member| !member.answers).map(|member| member.address.as_str()).collect();
    if away.is_empty() {
        return None;
    }
    let (count, all, names) = (away.len(), members.len(), away.join(", "));
    let name = log.at.parse::<EngineAddress>().map_or("engine", |address| address.name());
    // Of an etcd of the operator, there may be members that have no address here.
    let what = if is_own { "members of" } else { "addresses of" };
    let spare = (all.saturating_sub(1) / 2).checked_sub(count);
    let then = match spare {
        _ if !is_own => String::new(),
        Some(spare) => format!("; without {} more, everything waits", spare + 1),
        None => "; that is no majority: everything waits".to_owned(),
    };
    Some(format!("{count} of {all} {what} the {name} with the metadata do not answer: {names}{then}"))
}

/// A step on the way to one member on each of these nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// All is as it should be, or waits for a node that does not answer.
    Rest,
    /// A member is not wanted, or has lost its data.
    Remove(u64),
    /// A node has no member.
    Add(NodeId),
    /// A member was taken in and does not run yet.
    Start(NodeId, u64),
    /// A member may have everything by now.
    Promote(u64),
}

/// The next step. `wanted` are the nodes with the addresses of their members. Nodes that do not answer have no condition. Members
/// at `spare` addresses vote until each wanted node has a member with a vote.
fn next_step(
    (wanted, spare): (&BTreeMap<NodeId, String>, &BTreeSet<String>),
    members: &[EtcdMember],
    conditions: &BTreeMap<NodeId, EngineCondition>,
) -> Step {
    let node_of =
        |member: &EtcdMember| wanted.iter().find(|(_, url)| **url == member.peer_url).map(|it| *it.0);
    // One at a time.
    if let Some(learner) = members.iter().find(|member| member.is_learner) {
        let condition = node_of(learner).map(|node| (node, conditions.get(&node).copied()));
        return match condition {
            None => Step::Remove(learner.id),
            Some((_, None)) => Step::Rest,
            Some((node, Some(_))) if learner.name.is_empty() => Step::Start(node, learner.id),
            Some((_, Some(EngineCondition::Present))) => Step::Promote(learner.id),
            Some(_) => Step::Remove(learner.id),
        };
    }
    let has_member = |url: &String| members.iter().any(|member| member.peer_url == *url);
    let is_needed =
        |member: &EtcdMember| spare.contains(&member.peer_url) && !wanted.values().all(has_member);
    let is_lost = |member: &EtcdMember| match node_of(member) {
        None => !is_needed(member),
        Some(node) => conditions.get(&node).is_some_and(|condition| *condition != EngineCondition::Present),
    };
    // The last one has everything.
    if let Some(lost) = members.iter().find(|member| is_lost(member)).filter(|_| members.len() > 1) {
        return Step::Remove(lost.id);
    }
    let without = wanted.iter().find(|(node, url)| conditions.contains_key(node) && !has_member(url));
    without.map_or(Step::Rest, |(node, _)| Step::Add(*node))
}

/// Looks after the members until the node stops.
pub(super) async fn run(node: Weak<Node>, mut stopped: watch::Receiver<bool>) {
    let mut pause = LOOK;
    loop {
        let _ = tokio::time::timeout(pause, stopped.wait_for(|stop| *stop)).await;
        let Some(node) = node.upgrade().filter(|_| !*stopped.borrow()) else { return };
        let followed = node.follow_members().await;
        pause = if matches!(followed, Ok(Step::Rest)) { LOOK } else { STEP };
        let problem = followed.err().map(|error| format!("a member of etcd cannot be replaced: {error:#}"));
        let mut known = node.engine_problem.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(problem) = problem.as_ref().filter(|_| *known != problem) {
            tracing::warn!(problem, "trying again");
        }
        *known = problem;
    }
}

impl Node {
    /// The members of the engine that has the logs, and whether they answer.
    pub(super) async fn engine_members(&self) -> Vec<EngineMemberInfo> {
        let engine = self.state.lock().await.meta_dirs.engine().cloned();
        match engine {
            Some(engine) => engine.members().await,
            None => Vec::new(),
        }
    }

    /// What is wrong with the engine.
    pub(super) fn engine_problems(&self, log: &LogInfo) -> impl Iterator<Item = String> + use<> {
        let replacing = self.engine_problem.lock().unwrap_or_else(PoisonError::into_inner).clone();
        engine_problem(log).into_iter().chain(replacing)
    }

    /// Makes one step towards a member on each of the first nodes.
    async fn follow_members(&self) -> Result<Step> {
        let (engine, nodes, spare) = {
            let state = self.state.lock().await;
            (state.meta_dirs.engine().cloned(), seats_of(&state.cluster), spare_of(&state.cluster))
        };
        let Some(engine) = engine.filter(|engine| engine.address().is_own()) else { return Ok(Step::Rest) };
        let (wanted, spare) = (members_on(&nodes)?, members_on(&spare)?);
        let urls: BTreeMap<NodeId, String> =
            wanted.iter().map(|(node, member)| (*node, peer_url(member))).collect();
        let spare_urls = spare.values().map(peer_url).collect();
        let asks = wanted.keys().map(|node| async move { Some((*node, self.engine_at(*node).await.ok()?)) });
        let conditions = join_all(asks).await.into_iter().flatten().collect();
        let members = engine.list().await?;
        let step = next_step((&urls, &spare_urls), &members, &conditions);
        let known: Vec<&EngineMember> = wanted.values().chain(spare.values()).collect();
        match step {
            Step::Rest => self.note_members(&engine, &known, &members).await?,
            Step::Remove(id) => {
                tracing::warn!(member = format!("{id:x}"), "a member of etcd is taken out");
                engine.remove(id).await?;
            }
            Step::Add(node) => {
                let id = engine.add(&urls[&node]).await?;
                tracing::warn!(%node, member = format!("{id:x}"), "a node gets a member of etcd");
            }
            Step::Start(node, id) => {
                self.start_member((node, id), &wanted[&node].name, &known, &members).await?;
            }
            Step::Promote(id) => {
                engine.promote(id).await?;
                tracing::warn!(member = format!("{id:x}"), "the new member of etcd has a vote");
            }
        }
        Ok(step)
    }

    /// Lets a node run the member that the others have taken in.
    async fn start_member(
        &self,
        (node, id): (NodeId, u64),
        name: &str,
        known: &[&EngineMember],
        members: &[EtcdMember],
    ) -> Result<()> {
        let is_member =
            |known: &EngineMember| members.iter().any(|member| member.peer_url == peer_url(known));
        let (authority, authority_key) = Supervised::new(&self.env, &self.dir).authority()?;
        let seat = EngineSeat {
            number: id,
            name: name.to_owned(),
            members: known.iter().filter(|known| is_member(known)).map(|known| (*known).clone()).collect(),
            authority,
            authority_key,
            joins: true,
        };
        self.start_engine_at(node, seat).await.with_context(|| format!("node {node} cannot run it"))
    }

    /// Notes where the members are, for all nodes.
    async fn note_members(
        &self,
        engine: &Engine,
        known: &[&EngineMember],
        members: &[EtcdMember],
    ) -> Result<()> {
        let votes = |known: &EngineMember| {
            members.iter().any(|member| !member.is_learner && member.peer_url == peer_url(known))
        };
        let voters: Vec<EngineMember> =
            known.iter().filter(|known| votes(known)).map(|known| (*known).clone()).collect();
        let recoveries = self.state.lock().await.cluster.record.recoveries;
        let address = EngineAddress::own(&voters, self.cluster, recoveries)?;
        if voters.is_empty() || address == engine.address() {
            return Ok(());
        }
        tracing::warn!(%address, "the members of etcd are others now");
        engine.follow(&self.env, &self.dir, &address)?;
        let text = address.to_string();
        self.plan(|plan: &mut Plan| {
            plan.set_cluster(|cluster| cluster.log.clone_from(&text));
            Ok(())
        })
        .await
    }

    /// Lets the first nodes run an engine, and waits until it works. If it does not, nothing of it is left at nodes that answer.
    pub(super) async fn make_engine(&self, recoveries: u32) -> Result<EngineAddress, AdminError> {
        let nodes: Vec<NodeAddresses> = {
            let state = self.state.lock().await;
            seats_of(&state.cluster)
        };
        let conflict = |text: String| Err(AdminError::conflict(text));
        if nodes.len() < SEATS || nodes.iter().all(|node| node.node != self.here()) {
            return conflict(format!(
                "an engine needs {SEATS} nodes, so that it goes on without one of them, and there are {}: let more join \
                 (forebay token create, with --role witness for a machine that stores nothing), or give an etcd of yours \
                 (etcd://HOST:PORT,…)",
                nodes.len()
            ));
        }
        if let Some(away) = nodes.iter().find(|node| !self.is_reached(node.node)) {
            return conflict(format!("node {} does not answer: start it, or remove it before", away.node));
        }
        let number = self.env.random.next_u64();
        let made = self.make_members(&nodes, number, recoveries).await;
        if made.is_err() {
            let ends = nodes.iter().map(|node| self.end_engine_at(node.node, number));
            for problem in join_all(ends).await.into_iter().filter_map(Result::err) {
                tracing::warn!(problem = format!("{problem:#}"), "a member of etcd may be left over");
            }
        }
        made.map_err(|error| AdminError::conflict(format!("no engine could be made: {error:#}")))
    }

    async fn make_members(
        &self,
        nodes: &[NodeAddresses],
        number: u64,
        recoveries: u32,
    ) -> Result<EngineAddress> {
        let members = nodes.iter().map(member_of).collect::<Result<Vec<_>>>()?;
        let (authority, authority_key) = new_authority(self.cluster, self.env.clock.wall_ns())?;
        let seat = &|index: usize| EngineSeat {
            number,
            name: members[index].name.clone(),
            members: members.clone(),
            authority: authority.clone(),
            authority_key: authority_key.clone(),
            joins: false,
        };
        let begin = |(index, node): (usize, &NodeAddresses)| {
            let node = node.node;
            async move {
                let started = self.start_engine_at(node, seat(index)).await;
                started.with_context(|| format!("node {node} cannot run a member of etcd"))
            }
        };
        // First here: where it cannot run here, nothing happens elsewhere.
        let (here, others): (Vec<_>, Vec<_>) =
            nodes.iter().enumerate().partition(|(_, node)| node.node == self.here());
        for part in [here, others] {
            for started in join_all(part.into_iter().map(begin)).await {
                started?;
            }
        }
        let address = EngineAddress::own(&members, self.cluster, recoveries)?;
        let works = async {
            while let Err(error) = Engine::connect(&self.env, &self.dir, &address).await {
                tracing::debug!(error = %format!("{error:#}"), "the new engine does not work yet");
                tokio::time::sleep(ENGINE_LOOK).await;
            }
        };
        let works = tokio::time::timeout(ENGINE_PATIENCE, works).await;
        works.context("the members of etcd do not find each other; see DIR/log/etcd.log on their nodes")?;
        Ok(address)
    }
}

/// Begins to look after the members.
pub(super) fn begin(node: &Arc<Node>) {
    node.runtime.spawn(run(Arc::downgrade(node), node.stop_serving.subscribe()));
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use EngineCondition::{Absent, Lost, Present};

    #[test]
    fn a_member_is_above_its_node() {
        let member = |address: &str| {
            let (node, addresses) = (NodeId(2), vec![address.to_owned()]);
            member_of(&NodeAddresses { node, addresses })
                .map(|it| (it.name, it.host, it.client_port, it.peer_port))
        };
        let is = |host: &str, client, peer| ("node-2".to_owned(), host.to_owned(), client, peer);
        assert_eq!(member("10.0.0.1:7740").unwrap(), is("10.0.0.1", 7741, 7742));
        assert_eq!(member("[fd00::1]:80").unwrap(), is("fd00::1", 81, 82));
        assert!(member("a:65534").is_err() && member("a").is_err());
    }

    #[track_caller]
    fn check_problem(at: &str, answers: &[bool], expected: Option<&str>) {
        let numbered = answers.iter().enumerate();
        let members = numbered
            .map(|(at, answers)| EngineMemberInfo { address: format!("m{at}"), answers: *answers })
            .collect();
        let problem = engine_problem(&LogInfo { at: at.to_owned(), members, ..LogInfo::default() });
        match (problem, expected) {
            (None, None) => {}
            (Some(problem), Some(expected)) => assert!(problem.ends_with(expected), "{problem}"),
            (problem, expected) => panic!("{problem:?} instead of {expected:?}"),
        }
    }

    #[test]
    fn a_member_that_is_away_is_a_problem_and_says_how_many_more_may_be() {
        let own = "etcd://a:1?run=own";
        check_problem(own, &[true; 3], None);
        check_problem(own, &[], None);
        check_problem(own, &[true, false, true], Some("m1; without 1 more, everything waits"));
        check_problem(own, &[true, false, true, true, true], Some("m1; without 2 more, everything waits"));
        check_problem(own, &[true, false, false], Some("m1, m2; that is no majority: everything waits"));
        // One address may stand for all members.
        check_problem(
            "etcd://a:1",
            &[false],
            Some("addresses of the etcd with the metadata do not answer: m0"),
        );
    }

    fn member(id: u64, node: u32, is_learner: bool, has_begun: bool) -> EtcdMember {
        let name = if has_begun { format!("node-{node}") } else { String::new() };
        EtcdMember { id, name, peer_url: format!("u{node}"), is_learner }
    }

    /// The next step for nodes that say this of their members, `None` if they do not answer.
    #[track_caller]
    fn check(nodes: &[(u32, Option<EngineCondition>)], members: &[EtcdMember], expected: Step) {
        let wanted = nodes.iter().map(|(node, _)| (NodeId(*node), format!("u{node}"))).collect();
        let conditions = nodes.iter().filter_map(|(node, it)| Some((NodeId(*node), (*it)?))).collect();
        assert_eq!(
            next_step((&wanted, &spare(&[])), members, &conditions),
            expected,
            "{nodes:?} {members:?}"
        );
    }

    fn spare(nodes: &[u32]) -> BTreeSet<String> {
        nodes.iter().map(|node| format!("u{node}")).collect()
    }

    #[test]
    fn a_witness_votes_until_the_node_in_its_seat_does() {
        let voter = |node: u32| member(u64::from(node) + 10, node, false, true);
        let wanted: BTreeMap<NodeId, String> =
            [0, 1, 3].into_iter().map(|node| (NodeId(node), format!("u{node}"))).collect();
        let step = |conditions: &[(u32, EngineCondition)], members: &[EtcdMember]| {
            let conditions = conditions.iter().map(|(node, it)| (NodeId(*node), *it)).collect();
            next_step((&wanted, &spare(&[2])), members, &conditions)
        };
        let (all, old) = ([(0, Present), (1, Present), (3, Absent)], [voter(0), voter(1), voter(2)]);
        assert_eq!(step(&all, &old), Step::Add(NodeId(3)));
        let there = [(0, Present), (1, Present), (3, Present)];
        let learner = [voter(0), voter(1), voter(2), member(20, 3, true, true)];
        assert_eq!(step(&there, &learner), Step::Promote(20));
        assert_eq!(step(&there, &[voter(0), voter(1), voter(2), voter(3)]), Step::Remove(12));
        // It joined and is away.
        assert_eq!(step(&[(0, Present), (1, Present)], &old), Step::Rest);
    }

    #[test]
    fn members_follow_the_nodes_step_by_step() {
        let voter = |node: u32| member(u64::from(node) + 10, node, false, true);
        let all = [voter(0), voter(1), voter(2)];
        let here = Some(Present);
        check(&[(0, here), (1, here), (2, here)], &all, Step::Rest);
        // A node that does not answer keeps its member.
        check(&[(0, here), (1, None), (2, here)], &all, Step::Rest);
        // It was removed, and the next node gets one.
        let next = [(0, here), (2, here), (3, Some(Absent))];
        check(&next, &all, Step::Remove(11));
        check(&next, &[voter(0), voter(2)], Step::Add(NodeId(3)));
        let taken_in = |is_learner, has_begun| [voter(0), voter(2), member(20, 3, is_learner, has_begun)];
        check(&next, &taken_in(true, false), Step::Start(NodeId(3), 20));
        check(&[(0, here), (2, here), (3, None)], &taken_in(true, false), Step::Rest);
        let there = [(0, here), (2, here), (3, here)];
        check(&there, &taken_in(true, true), Step::Promote(20));
        check(&there, &taken_in(false, true), Step::Rest);
        // Its data is gone, before or after it has a vote.
        for is_learner in [true, false] {
            check(&[(0, here), (2, here), (3, Some(Lost))], &taken_in(is_learner, true), Step::Remove(20));
        }
        // It was taken in, and then its node was removed.
        check(&[(0, here), (2, here)], &taken_in(true, false), Step::Remove(20));
        // It is elsewhere now.
        check(&[(0, here), (1, here), (5, here)], &all, Step::Remove(12));
        // Too few nodes: nothing to add. The last member stays.
        check(&[(0, here)], &[voter(0)], Step::Rest);
        check(&[(0, Some(Lost))], &[voter(0)], Step::Rest);
        // A node that does not answer gets no member.
        check(&[(0, here), (1, None)], &[voter(0)], Step::Rest);
    }
}
