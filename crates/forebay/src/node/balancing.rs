//! A filesystem whose stored data moves until every drive has its share: what that moves, its beginning and its end.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use admin::{AdminError, BalanceFilesystem, DriveShare, FilesystemBalance, SetNodes, Survives};
use anyhow::{Context, Result};
use base::units::format_size;
use base::{DriveId, LedgerId, NodeId, PgId};
use control::{BalanceForecast, BalanceWait, Cluster, FilesystemRecord, Plan, Seen};
use futures_util::future::join_all;
use layout::{FailureDomain, PlacementError, PlacementGroup, Rebuilding};
use wire::drive::{DriveHealth, ShardKey};

use super::draining::{ROOM_PERCENT, no_node};
use super::drives::{DriveEntry, OpenDrive};
use super::management::failed;
use super::monitor::{BALANCED_AT_ONCE, TICK};
use super::tiers::entry_of;
use super::{Node, State};

/// How long the drives may take to list what they hold.
const LIST_PATIENCE: Duration = Duration::from_secs(20);
/// Shards of an inventory per request.
const LIST_PAGE: usize = 16_384;
/// A drive with more shards is not asked for each of them.
const LISTED_MAX: u64 = 1 << 20;

/// Bytes that a drive holds of each group.
type Held = BTreeMap<DriveId, HashMap<PgId, u64>>;

/// A position whose data moves.
#[derive(Debug, PartialEq, Eq)]
struct Move {
    group: PgId,
    from: DriveId,
    to: DriveId,
    bytes: u64,
}

impl Node {
    pub(super) async fn balance_now(
        &self,
        name: String,
        BalanceFilesystem { dry_run, abort }: BalanceFilesystem,
    ) -> Result<FilesystemBalance, AdminError> {
        if dry_run && abort {
            return Err(AdminError::invalid("either dry_run or abort"));
        }
        let record = entry_of(&mut *self.state.lock().await, &name)?.record.clone();
        if abort {
            return self.abort_balance(record).await;
        }
        let mut forecast = self.forecast_balance(&record).await?;
        if dry_run || forecast.is_over() {
            return Ok(forecast.said);
        }
        let begin = |record| FilesystemRecord { balancing: true, ..record };
        self.plan_filesystem(record.id, begin).await.map_err(failed)?;
        tracing::info!(
            filesystem = name,
            groups = forecast.said.groups,
            bytes = forecast.said.move_bytes,
            "stored data moves until every drive has its share"
        );
        forecast.said.balancing = true;
        Ok(forecast.said)
    }

    /// Ends it. What is moving goes back.
    async fn abort_balance(&self, record: FilesystemRecord) -> Result<FilesystemBalance, AdminError> {
        let (seen, rebuilt) = {
            let mut state = self.state.lock().await;
            let rebuilt = entry_of(&mut state, &record.name)?.rebuilt();
            (state.seen(), rebuilt)
        };
        let is_rebuilt = |group: &PlacementGroup| rebuilt.get(&group.id) == Some(&group.epoch);
        let decide = |plan: &mut Plan| {
            let now = plan.next().filesystems.get(&record.id).cloned().context("the filesystem is gone")?;
            Ok(now.balancing.then(|| plan.abort_balance(now, &seen, is_rebuilt)))
        };
        let Some(groups) = self.plan(decide).await.map_err(failed)? else {
            return Err(AdminError::conflict(format!(
                "filesystem {} is not being balanced (see `forebay status`)",
                record.name
            )));
        };
        if let Some(entry) = self.state.lock().await.filesystems.get_mut(&record.name) {
            entry.balance_left = None;
        }
        tracing::warn!(filesystem = record.name, groups, "a filesystem is not balanced after all");
        Ok(FilesystemBalance {
            filesystem: record.name,
            groups: groups as u64,
            ..FilesystemBalance::default()
        })
    }

    /// Changes the nodes whose drives a filesystem's data is for, or says what would move.
    pub(super) async fn set_nodes_now(
        &self,
        name: &str,
        SetNodes { nodes, dry_run }: SetNodes,
    ) -> Result<FilesystemBalance, AdminError> {
        let nodes = self.checked_nodes(&nodes).await?;
        let (record, cluster, seen) = {
            let mut state = self.state.lock().await;
            (entry_of(&mut state, name)?.record.clone(), state.cluster.clone(), state.seen())
        };
        let wanted = FilesystemRecord { nodes: nodes.clone(), ..record };
        let seed = self.env.random.next_u64();
        let check = Plan::new(cluster.clone()).set_nodes(wanted.clone(), nodes.clone(), &seen, seed);
        check.map_err(|error| too_few(&wanted, &error))?;
        if let Err(no_use) = cluster.spare(&wanted) {
            return Err(AdminError::conflict(format!(
                "{no_use}; or keep no space free (forebay cluster spares DIR 0)"
            )));
        }
        let mut forecast = self.forecast_balance(&wanted).await?.said;
        refuse_without_room(&forecast)?;
        if dry_run {
            return Ok(forecast);
        }
        let decide = |plan: &mut Plan| {
            let now = plan.next().filesystems.get(&wanted.id).cloned().context("the filesystem is gone")?;
            Ok(plan.set_nodes(now, nodes.clone(), &seen, seed)?)
        };
        self.plan(decide).await.map_err(failed)?;
        let list: Vec<u32> = nodes.iter().map(|node| node.0).collect();
        tracing::info!(filesystem = name, nodes = ?list, bytes = forecast.move_bytes, "a filesystem is for other nodes; its data moves");
        forecast.balancing = true;
        Ok(forecast)
    }

    /// The nodes of a filesystem, if each of them has drives.
    pub(super) async fn checked_nodes(
        &self,
        numbers: &BTreeSet<u32>,
    ) -> Result<BTreeSet<NodeId>, AdminError> {
        let state = self.state.lock().await;
        for number in numbers {
            let node = NodeId(*number);
            if !state.cluster.nodes.contains_key(&node) {
                return Err(no_node(node));
            }
            let mut drives = state.cluster.drives.values();
            if !drives.any(|drive| drive.node == node && !drive.is_given_up()) {
                return Err(AdminError::invalid(format!(
                    "node {number} has no drives in use, so that no data can go there (see `forebay drive list`)"
                )));
            }
        }
        Ok(numbers.iter().copied().map(NodeId).collect())
    }

    async fn forecast_balance(&self, record: &FilesystemRecord) -> Result<Forecast, AdminError> {
        let owed = self.owed().await.map_err(failed)?;
        // With many drives this takes a moment, in which the state stays free for others.
        let (cluster, seen) = {
            let state = self.state.lock().await;
            (state.cluster.clone(), state.seen())
        };
        let forecast = cluster.balance_forecast(record, &seen);
        let drives = sources(&*self.state.lock().await, &forecast);
        let held = held(record.ledger, drives).await;
        let mut state = self.state.lock().await;
        let counts = cluster.group_counts();
        let moves = moves(&forecast.groups, &held, |id| part_of(&state, id, &counts));
        let under_way_bytes = match record.balancing {
            true => entry_of(&mut state, &record.name)?.repairer.stat().rebuild_left_bytes,
            false => 0,
        };
        let nothing = BTreeSet::new();
        let owed = owed.get(&record.id).unwrap_or(&nothing);
        let survives = |cluster: &Cluster, seen: &Seen| {
            let losses = |level| cluster.reads_survive(record, seen, owed, level);
            Survives { drives: losses(FailureDomain::Drive), nodes: losses(FailureDomain::Node) }
        };
        let groups: BTreeSet<PgId> = moves.iter().map(|one| one.group).collect();
        let moving = match record.balancing {
            true => rebuilding(&cluster, record),
            false => 0,
        };
        let move_bytes = moves.iter().map(|one| one.bytes).sum::<u64>() + under_way_bytes;
        let said = FilesystemBalance {
            filesystem: record.name.clone(),
            balancing: record.balancing,
            groups: (groups.len() + moving) as u64,
            move_bytes,
            eta_s: self.seconds_for(&state, &moves, under_way_bytes) + waits_s(groups.len()),
            waits: self.balance_waits(&forecast),
            survives: survives(&cluster, &seen),
            survives_after: survives(&forecast.after, &forecast.seen_after),
            drives: shares(&state, &moves),
        };
        Ok(Forecast { said, changes: forecast.groups.len() })
    }

    /// Seconds until the last node has what its drives get. What is under way is divided among all nodes.
    fn seconds_for(&self, state: &State, moves: &[Move], under_way_bytes: u64) -> u64 {
        let mut at: BTreeMap<NodeId, u64> = BTreeMap::new();
        for drive in state.drives.values().filter(|entry| entry.is_up()) {
            at.entry(drive.record.node).or_default();
        }
        let under_way_bytes = under_way_bytes / (at.len() as u64).max(1);
        for one in moves {
            if let Some(drive) = state.drives.get(&one.to) {
                *at.entry(drive.record.node).or_default() += one.bytes;
            }
        }
        let most = at.into_values().max().unwrap_or(0) + under_way_bytes;
        most.div_ceil(self.pace.held_to_bytes_per_s().unwrap_or_else(|| self.pace.bytes_per_s()).max(1))
    }

    /// What it waits for, for people.
    fn balance_waits(&self, forecast: &BalanceForecast) -> Option<String> {
        if self.pace.is_paused() {
            return Some("background work is paused (forebay upkeep --resume)".to_owned());
        }
        Some(match forecast.waits.as_ref()? {
            BalanceWait::Drive(id) => format!("drive {id} is away (see `forebay drive list`)"),
            BalanceWait::Groups(groups) => format!("{groups} placement groups are being rebuilt"),
            BalanceWait::MoreDrives(error) => format!("{error}"),
        })
    }
}

/// Refuses moves after which a drive that gets something would be nearly full.
fn refuse_without_room(forecast: &FilesystemBalance) -> Result<(), AdminError> {
    // Where drives are nearly full already, moves may go on that make none fuller than the fullest.
    let fullest = forecast.drives.iter().map(|drive| drive.percent().0).max().unwrap_or(0).max(ROOM_PERCENT);
    let is_too_full =
        |drive: &&DriveShare| drive.used_after_bytes > drive.used_bytes && drive.percent().1 > fullest;
    match forecast.drives.iter().find(is_too_full) {
        Some(drive) => Err(AdminError::conflict(format!(
            "drive {} of node {} would have {} of {} in use: name more nodes, or add drives first (forebay drive add)",
            drive.id,
            drive.node,
            format_size(drive.used_after_bytes),
            format_size(drive.capacity_bytes)
        ))),
        None => Ok(()),
    }
}

/// What a filesystem cannot have at the nodes that it would be for.
pub(super) fn too_few(record: &FilesystemRecord, error: &PlacementError) -> AdminError {
    AdminError::conflict(format!(
        "the drives of these nodes are too few for filesystem {} ({}): {error}; name more nodes, or choose a profile that needs fewer drives \
         (forebay fs set --profile)",
        record.name, record.profile
    ))
}

/// A forecast, and whether there is something to do.
struct Forecast {
    said: FilesystemBalance,
    /// Groups that change, also those that only follow a stricter rule then.
    changes: usize,
}

impl Forecast {
    /// Whether every drive has its share.
    fn is_over(&self) -> bool {
        self.changes == 0 && self.said.waits.is_none() && !self.said.balancing
    }
}

/// Seconds until the monitor has looked often enough to let these groups move, a few at a time.
fn waits_s(groups: usize) -> u64 {
    groups.div_ceil(BALANCED_AT_ONCE) as u64 * TICK.as_secs()
}

/// Groups of a filesystem that are being rebuilt.
fn rebuilding(cluster: &Cluster, record: &FilesystemRecord) -> usize {
    let groups = record.all_sets().flat_map(|(_, groups)| groups);
    let groups = groups.filter_map(|pg| cluster.groups.get(pg));
    groups.filter(|group| !group.rebuilding.is_empty()).count()
}

/// The drives from which data moves, if they can list what they hold in a short time.
fn sources(state: &State, forecast: &BalanceForecast) -> Vec<(DriveId, OpenDrive)> {
    let positions = forecast.groups.iter().flat_map(|group| &group.rebuilding);
    let sources: BTreeSet<DriveId> = positions.map(|rebuilding| rebuilding.from).collect();
    let open = sources.into_iter().filter_map(|id| Some((id, state.drives.get(&id)?.service.clone()?)));
    open.filter(|(_, drive)| drive.health() == DriveHealth::Up && drive.stat().shards <= LISTED_MAX).collect()
}

/// What drives hold of each group of a ledger. Those that do not say it in time are left out.
async fn held(ledger: LedgerId, drives: Vec<(DriveId, OpenDrive)>) -> Held {
    let listed = drives.into_iter().map(async |(id, drive)| {
        let listed = tokio::time::timeout(LIST_PATIENCE, held_by(&drive, ledger)).await;
        Some((id, listed.ok()?.ok()?))
    });
    join_all(listed).await.into_iter().flatten().collect()
}

async fn held_by(drive: &OpenDrive, ledger: LedgerId) -> Result<HashMap<PgId, u64>> {
    let mut held = HashMap::new();
    let mut after = Some(ShardKey::first_of(ledger));
    loop {
        let page = drive.list(after, LIST_PAGE).await?;
        let is_over = page.len() < LIST_PAGE;
        for entry in &page {
            if entry.key.ledger != ledger {
                return Ok(held);
            }
            *held.entry(entry.shape.pg).or_default() += u64::from(entry.len_bytes);
        }
        after = page.last().map(|last| last.key);
        if is_over {
            return Ok(held);
        }
    }
}

/// An equal part of what a drive holds, for each group that needs it.
pub(super) fn part_of(state: &State, id: DriveId, counts: &BTreeMap<DriveId, u32>) -> u64 {
    let stat = state.drives.get(&id).and_then(DriveEntry::stat_if_readable);
    let groups = counts.get(&id).copied().unwrap_or(0).max(1);
    stat.map_or(0, |stat| stat.live_bytes) / u64::from(groups)
}

/// The positions whose data moves. Of a drive that has not said what it holds, each position is `part_of` it.
fn moves(groups: &[PlacementGroup], held: &Held, part_of: impl Fn(DriveId) -> u64) -> Vec<Move> {
    let of_group = |group: &PlacementGroup| {
        let moved = |moved: &Rebuilding| {
            let bytes = match held.get(&moved.from) {
                Some(groups) => groups.get(&group.id).copied().unwrap_or(0),
                None => part_of(moved.from),
            };
            let to = group.members[usize::from(moved.position)];
            Move { group: group.id, from: moved.from, to, bytes }
        };
        group.rebuilding.iter().map(moved).collect::<Vec<_>>()
    };
    groups.iter().flat_map(of_group).collect()
}

/// What each drive in use holds, now and after these moves.
fn shares(state: &State, moves: &[Move]) -> Vec<DriveShare> {
    let used = |entry: &DriveEntry| entry.stat_if_readable().map_or(0, |stat| stat.live_bytes);
    let drives = || state.drives.values().filter(|entry| !entry.record.is_given_up());
    let mut after: BTreeMap<DriveId, u64> = drives().map(|entry| (entry.record.id, used(entry))).collect();
    for one in moves {
        after.entry(one.to).and_modify(|bytes| *bytes += one.bytes);
    }
    for one in moves {
        after.entry(one.from).and_modify(|bytes| *bytes = bytes.saturating_sub(one.bytes));
    }
    let share = |entry: &DriveEntry| DriveShare {
        id: entry.record.id.0,
        node: entry.record.node.0,
        capacity_bytes: entry.record.capacity_bytes,
        used_bytes: used(entry),
        used_after_bytes: after[&entry.record.id],
    };
    drives().map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_drives_have_not_said_is_estimated() {
        let mut group = PlacementGroup::new(PgId(7), vec![DriveId(4), DriveId(1), DriveId(5)]);
        group.rebuilding =
            vec![Rebuilding { position: 0, from: DriveId(0) }, Rebuilding { position: 2, from: DriveId(2) }];
        let empty = PlacementGroup { id: PgId(8), ..group.clone() };
        let held = Held::from([(DriveId(0), HashMap::from([(PgId(7), 500)]))]);
        let found = moves(&[group, empty], &held, |id| u64::from(id.0) * 10);
        let one =
            |group, from, to, bytes| Move { group: PgId(group), from: DriveId(from), to: DriveId(to), bytes };
        assert_eq!(found, [one(7, 0, 4, 500), one(7, 2, 5, 20), one(8, 0, 4, 0), one(8, 2, 5, 20)]);
    }

    #[test]
    fn many_groups_take_several_looks() {
        assert_eq!([0, 1, 16, 17, 123].map(waits_s), [0, 1, 1, 2, 8]);
    }
}
