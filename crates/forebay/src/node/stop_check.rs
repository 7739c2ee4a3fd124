//! What would stop if a node were stopped now.

use std::collections::BTreeSet;
use std::time::Duration;

use admin::{AdminError, EngineMemberInfo, NodeInfo, SetMaintenance, StopCheck};
use base::{DriveId, LedgerId, NodeId, PgId};
use control::{CONTROL_LEDGER, Cluster, MAINTENANCE_S_MAX, Owed, Plan, Seen};
use futures_util::future::join_all;
use layout::{FailureDomain, PlacementGroup};
use meta::owner::StandbyStat;

use super::engine_members::client_address;
use super::management::failed;
use super::members::groups_held;
use super::moving::node_of_replica;
use super::network::addresses_of;
use super::{Node, State};

/// How long the drives may take to list what they hold.
const LIST_PATIENCE: Duration = Duration::from_secs(60);

impl Node {
    pub(super) async fn stop_check_now(&self, id: u32) -> Result<StopCheck, AdminError> {
        let node = NodeId(id);
        let owed = self.owed().await.map_err(failed)?;
        let members = self.engine_members().await;
        let used = self.used_groups().await;
        let state = self.state.lock().await;
        let Some(record) = state.cluster.nodes.get(&node) else {
            return Err(AdminError::not_found(format!("no such node: id={id} (see `forebay node list`)")));
        };
        let mut check = StopCheck { node: id, name: record.name.clone(), ..StopCheck::default() };
        content(&mut check, &state.cluster, &state.seen(), (&owed, &used));
        self.metadata(&mut check, &state, &members);
        Ok(check)
    }

    /// The groups in which something is stored, of filesystems that had another profile before; groups of which that is not known
    /// count.
    async fn used_groups(&self) -> BTreeSet<(LedgerId, PgId)> {
        let (services, mut used) = {
            let state = self.state.lock().await;
            let former: BTreeSet<(LedgerId, PgId)> = former_groups(&state.cluster).collect();
            let seen = state.seen();
            let is_unknown = |pg: &PgId| {
                let group = state.cluster.groups.get(pg);
                group.is_none_or(|group| holders(group).any(|drive| !seen.up.contains(&drive)))
            };
            let unknown = former.iter().filter(|(_, pg)| is_unknown(pg)).copied().collect();
            if former == unknown {
                return unknown;
            }
            let drives = state.drives.values();
            (drives.map(|drive| drive.service.clone()).collect::<Vec<_>>(), unknown)
        };
        let listed = join_all(services.into_iter().map(groups_held));
        match tokio::time::timeout(LIST_PATIENCE, listed).await {
            Ok(listed) if listed.iter().all(Result::is_ok) => {
                used.extend(listed.into_iter().flatten().flatten())
            }
            _ => used.extend(former_groups(&self.state.lock().await.cluster)),
        }
        used
    }

    /// Begins or ends the maintenance of a node.
    pub(super) async fn set_maintenance_now(
        &self,
        id: u32,
        SetMaintenance { for_s, force }: SetMaintenance,
    ) -> Result<NodeInfo, AdminError> {
        if for_s.is_some_and(|for_s| !(1..=MAINTENANCE_S_MAX).contains(&for_s)) {
            let days = MAINTENANCE_S_MAX / 86_400;
            return Err(AdminError::invalid(format!("a maintenance takes between a second and {days} days")));
        }
        let check = self.stop_check_now(id).await?;
        if for_s.is_some()
            && !force
            && let Some(stops) = check.stops.first()
        {
            return Err(AdminError::conflict(format!(
                "node {id} must not be stopped now: {stops} (forebay node stop-check); --force does it all the same"
            )));
        }
        let now_s = self.env.clock.wall_ns() / 1_000_000_000;
        let until_s = for_s.map(|for_s| now_s.saturating_add_unsigned(for_s));
        let set = |plan: &mut Plan| {
            plan.set_maintenance(NodeId(id), until_s);
            Ok(())
        };
        self.plan(set).await.map_err(failed)?;
        self.take_over().await.map_err(failed)?;
        let info = self.node_infos().await.into_iter().find(|info| info.id == id);
        if for_s.is_some() && NodeId(id) == self.here() && check.stops.is_empty() {
            tracing::warn!("this node is to be away: another one takes the metadata over");
            self.leaves.send_replace(true);
        }
        info.ok_or_else(|| AdminError::not_found(format!("no such node: id={id}")))
    }

    /// Whether the metadata goes on.
    fn metadata(&self, check: &mut StopCheck, state: &State, members: &[EngineMemberInfo]) {
        let node = NodeId(check.node);
        let Some(engine) = state.meta_dirs.engine() else {
            if node == self.here() {
                check.stops.push(
                    "it alone has the metadata: everything waits while it is away (forebay log move)"
                        .to_owned(),
                );
            }
            return;
        };
        if engine.address().is_own() {
            let nodes = addresses_of(&state.cluster);
            let here = nodes.iter().find(|it| it.node == node).and_then(client_address);
            check.stops.extend(majority(members, here.as_deref()));
        } else {
            let name = engine.address().name();
            check.notes.push(format!(
                "the {name} with the metadata is yours: if a server of it runs there, see that it can be spared"
            ));
        }
        let filesystems = state.filesystems.values().map(|entry| {
            (
                format!("the metadata of filesystem {}", entry.record.name),
                entry.record.ledger,
                entry.owner.standbys(),
            )
        });
        let control = ("the metadata of the cluster".to_owned(), CONTROL_LEDGER, self.control.standbys());
        let ledgers: Vec<(String, LedgerId, Vec<StandbyStat>)> =
            std::iter::once(control).chain(filesystems).collect();
        // The owner, if another node is stopped, and the standbys, as far as they have everything.
        let others = |standbys: &[StandbyStat]| {
            let standbys =
                standbys.iter().filter(|standby| standby.stored.0 > 0).map(|it| node_of_replica(it.replica));
            standbys.chain([self.here()]).filter(|other| *other != node).collect::<BTreeSet<_>>().len()
        };
        for (what, _, standbys) in &ledgers {
            match others(standbys) {
                0 => check.stops.push(format!("{what} is on no other node yet (forebay log show)")),
                1 => check.notes.push(format!("{what} would be on one node only")),
                _ => {}
            }
        }
        if node == self.here() {
            check.notes.push("another node takes the metadata over: programs wait for a moment".to_owned());
        }
    }
}

/// The drives that may have shards of a group.
fn holders(group: &PlacementGroup) -> impl Iterator<Item = DriveId> {
    group.members.iter().copied().chain(group.rebuilding.iter().map(|rebuilding| rebuilding.from))
}

/// The groups of former profiles, with their ledgers.
fn former_groups(cluster: &Cluster) -> impl Iterator<Item = (LedgerId, PgId)> {
    let sets =
        cluster.filesystems.values().flat_map(|record| record.sets.iter().map(|set| (record.ledger, set)));
    sets.flat_map(|(ledger, set)| set.groups.iter().map(move |pg| (ledger, *pg)))
}

/// Whether content can be read and written without the drives of the node. Of former profiles, only `used` groups count.
fn content(
    check: &mut StopCheck,
    cluster: &Cluster,
    seen: &Seen,
    (owed, used): (&Owed, &BTreeSet<(LedgerId, PgId)>),
) {
    let node = NodeId(check.node);
    let drives = cluster.drives.values().filter(|drive| drive.node == node);
    let left = drives.fold(seen.clone(), |seen, drive| seen.without(drive.id));
    if left.up == seen.up {
        // It is away already, or has no drives.
        return;
    }
    let nothing = BTreeSet::new();
    for record in cluster.filesystems.values() {
        let mut record = record.clone();
        let ledger = record.ledger;
        record.sets.iter_mut().for_each(|set| set.groups.retain(|pg| used.contains(&(ledger, *pg))));
        let record = &record;
        let (name, owed) = (&record.name, owed.get(&record.id).unwrap_or(&nothing));
        let reads = cluster.reads_survive(record, &left, owed, FailureDomain::Node);
        let writes = cluster.writes_survive(record, &left, FailureDomain::Node);
        let was = cluster.reads_survive(record, seen, owed, FailureDomain::Node);
        if reads < 0 {
            let now = if was < 0 { " (some of it cannot be read now either)" } else { "" };
            check.stops.push(format!("some content of filesystem {name} could not be read{now}"));
        }
        if writes.is_none() {
            check.stops.push(format!("filesystem {name} could not be written"));
        }
        if reads == 0 && writes.is_some() {
            check.notes.push(format!("filesystem {name} would survive the loss of no further node"));
        }
    }
}

/// Whether an engine loses its majority without the member at an address.
fn majority(members: &[EngineMemberInfo], address: Option<&str>) -> Option<String> {
    let left: Vec<&EngineMemberInfo> =
        members.iter().filter(|member| member.answers && Some(member.address.as_str()) != address).collect();
    let needed = members.len() / 2 + 1;
    (left.len() < needed).then(|| {
        format!(
            "the etcd with the metadata would have {} of {} members, and needs {needed}: all changes wait then",
            left.len(),
            members.len()
        )
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[track_caller]
    fn check(answers: [bool; 3], stopped: Option<&str>, stops: bool) {
        let member = |(at, answers): (usize, bool)| EngineMemberInfo { address: format!("m{at}"), answers };
        let members: Vec<EngineMemberInfo> = answers.into_iter().enumerate().map(member).collect();
        assert_eq!(majority(&members, stopped).is_some(), stops, "{members:?}");
    }

    #[test]
    fn an_engine_needs_its_majority() {
        check([true; 3], Some("m0"), false);
        check([true; 3], None, false);
        check([true, false, true], Some("m0"), true);
        check([true, false, true], Some("m1"), false);
        check([true, false, true], None, false);
        check([false, false, true], None, true);
    }
}
