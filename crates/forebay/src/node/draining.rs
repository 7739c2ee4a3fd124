//! A node whose drives are emptied, so that it can be removed.

use std::collections::BTreeSet;

use admin::{AdminError, DrainNode, NodeDrain};
use base::units::format_size;
use base::{DriveId, NodeId};
use control::{Cluster, DriveRecord, Plan};
use layout::{DriveState, PlacementGroup};

use super::balancing::part_of;
use super::management::failed;
use super::{Node, State};

/// The most, in percent, that moves may take of the free space of others, and that may be in use of a drive afterwards.
pub(super) const ROOM_PERCENT: u64 = 90;

impl Node {
    pub(super) async fn drain_node_now(
        &self,
        id: u32,
        DrainNode { dry_run, abort }: DrainNode,
    ) -> Result<NodeDrain, AdminError> {
        let node = NodeId(id);
        if dry_run && abort {
            return Err(AdminError::invalid("either dry_run or abort"));
        }
        let _one_at_a_time = self.drives_lock.lock().await;
        self.tell().await;
        if abort {
            return self.abort_drain(node).await;
        }
        let (drain, seen) = {
            let state = self.state.lock().await;
            (self.plan_drain(&state, node)?, state.seen())
        };
        if dry_run {
            return Ok(drain);
        }
        let decide = |plan: &mut Plan| match plan.drain(node, &seen) {
            0 => Ok(()),
            bound => Err(no_other_drive(node, bound).into()),
        };
        self.plan(decide).await.map_err(failed)?;
        tracing::warn!(%node, drives = drain.drives.len(), "a node is being emptied");
        for drive in &drain.drives {
            self.note_problem(DriveId(*drive), "being emptied").await;
        }
        self.tell().await;
        Ok(drain)
    }

    /// Uses the drives of a node again that are being emptied.
    async fn abort_drain(&self, node: NodeId) -> Result<NodeDrain, AdminError> {
        let (name, seen) = {
            let state = self.state.lock().await;
            let record = state.cluster.nodes.get(&node).ok_or_else(|| no_node(node))?;
            (record.name.clone(), state.seen())
        };
        let drives = self.plan(|plan| Ok(plan.cancel_drain(node, &seen))).await.map_err(failed)?;
        if drives.is_empty() {
            return Err(AdminError::conflict(format!(
                "node {node} is not being emptied, or its drives do not answer now: what it had may be at others already (see `forebay \
                 drive list`)"
            )));
        }
        tracing::warn!(%node, drives = drives.len(), "a node is not emptied after all");
        for drive in &drives {
            self.note_problem(*drive, "").await;
        }
        self.tell().await;
        let drives = drives.iter().map(|drive| drive.0).collect();
        Ok(NodeDrain { node: node.0, name, drives, owner: node == self.here(), ..NodeDrain::default() })
    }

    /// What would move where, if that can be done.
    fn plan_drain(&self, state: &State, node: NodeId) -> Result<NodeDrain, AdminError> {
        let record = state.cluster.nodes.get(&node).ok_or_else(|| no_node(node))?;
        let here: Vec<_> = state.drives.values().filter(|entry| entry.record.node == node).collect();
        let used: Vec<_> = here.iter().filter(|entry| !entry.record.is_given_up()).collect();
        if used.is_empty() {
            let leaving = here.iter().any(|entry| entry.record.state == DriveState::Leaving);
            return Err(AdminError::conflict(match leaving {
                true => format!("node {node} is being emptied already (see `forebay drive list`)"),
                false => format!("node {node} has no drives in use: `forebay node remove` takes it out"),
            }));
        }
        if let Some(silent) = used.iter().find(|entry| !entry.is_readable()) {
            return Err(AdminError::conflict(format!(
                "drive {} of node {node} does not answer, so that it cannot be emptied: wait for it, or rebuild what it had \
                 (forebay drive remove)",
                silent.record.id
            )));
        }
        let bound = state.cluster.bound_to(node, &state.seen());
        if bound > 0 {
            return Err(no_other_drive(node, bound));
        }
        let live = used.iter().filter_map(|entry| Some(entry.stat_if_readable()?.live_bytes));
        let move_bytes: u64 = live.sum();
        let mut after = Plan::new(state.cluster.clone());
        after.drain(node, &state.seen());
        check_limited(state, after.next(), node)?;
        // A filesystem may be for some nodes only.
        let moves = moves(after.next(), node, after.next().groups.values());
        let takers: BTreeSet<DriveId> = moves.into_iter().map(|(_, to)| to).collect();
        let others: Vec<_> = state
            .drives
            .values()
            .filter(|entry| {
                let DriveRecord { id, state, .. } = entry.record;
                takers.contains(&id) && state == DriveState::Up && entry.is_readable()
            })
            .collect();
        let spare_millionths = after.next().spared().map_or(0, |spare| spare.millionths());
        let free = others.iter().filter_map(|entry| {
            let stat = entry.stat_if_readable()?;
            let kept = u128::from(stat.capacity_bytes) * u128::from(spare_millionths) / 1_000_000;
            Some(stat.free_bytes.saturating_sub(kept as u64))
        });
        let free_bytes: u64 = free.sum();
        // Each node restores what its own drives get.
        let nodes = others.iter().map(|entry| entry.record.node).collect::<BTreeSet<_>>().len() as u64;
        // What stays in no group is deleted with the drives.
        if !takers.is_empty() && move_bytes > free_bytes / 100 * ROOM_PERCENT {
            return Err(AdminError::conflict(format!(
                "node {node} has {} to move, and the drives of others have {} for it: add drives first (forebay drive add)",
                format_size(move_bytes),
                format_size(free_bytes)
            )));
        }
        Ok(NodeDrain {
            node: node.0,
            name: record.name.clone(),
            drives: used.iter().map(|entry| entry.record.id.0).collect(),
            move_bytes,
            free_bytes,
            eta_s: move_bytes.div_ceil(self.pace.bytes_per_s() * nodes.max(1)),
            owner: node == self.here(),
        })
    }
}

pub(super) fn no_node(node: NodeId) -> AdminError {
    AdminError::not_found(format!("no such node: id={node} (see `forebay node list`)"))
}

/// The positions of these groups that a node has, once it is being emptied: its drive, and the one that takes over.
fn moves<'a>(
    cluster: &Cluster,
    node: NodeId,
    groups: impl Iterator<Item = &'a PlacementGroup>,
) -> Vec<(DriveId, DriveId)> {
    let is_of_node = |id: DriveId| cluster.drives.get(&id).is_some_and(|drive| drive.node == node);
    let moved = groups.flat_map(|group| {
        let from_node = group.rebuilding.iter().filter(move |rebuilding| is_of_node(rebuilding.from));
        from_node.filter_map(|it| Some((it.from, *group.members.get(usize::from(it.position))?)))
    });
    moved.collect()
}

/// Refuses to move a filesystem that is for some nodes to drives there that have too little room. Each position counts as an equal part
/// of what its drive holds.
fn check_limited(state: &State, after: &Cluster, node: NodeId) -> Result<(), AdminError> {
    let counts = state.cluster.group_counts();
    for record in after.filesystems.values().filter(|record| !record.nodes.is_empty()) {
        let groups = record.all_sets().flat_map(|(_, groups)| groups);
        let moves = moves(after, node, groups.filter_map(|pg| after.groups.get(pg)));
        let bytes: u64 = moves.iter().map(|(from, _)| part_of(state, *from, &counts)).sum();
        let takers: BTreeSet<DriveId> = moves.into_iter().map(|(_, to)| to).collect();
        let free = takers.iter().filter_map(|id| Some(state.drives.get(id)?.stat_if_readable()?.free_bytes));
        let free_bytes: u64 = free.sum();
        if bytes > free_bytes / 100 * ROOM_PERCENT {
            return Err(AdminError::conflict(format!(
                "node {node} has about {} of filesystem {} to move, and the drives at the other nodes of that filesystem have {} for it: add \
                 drives there (forebay drive add), or let it use more nodes (forebay fs set --nodes)",
                format_size(bytes),
                record.name,
                format_size(free_bytes)
            )));
        }
    }
    Ok(())
}

fn no_other_drive(node: NodeId, bound: usize) -> AdminError {
    AdminError::conflict(format!(
        "node {node} cannot be emptied: {bound} placement groups have no other drive to go to; add drives at other nodes (forebay drive \
         add), choose a profile that needs fewer (forebay fs set --profile), or let a filesystem use more nodes (forebay fs set --nodes)"
    ))
}
