//! Stored data that moves until every drive has its share, a few placement groups at a time.

use std::collections::{BTreeMap, BTreeSet};

use base::{DriveId, Epoch, NodeId};
use layout::{DriveState, PlacementError, PlacementGroup, Profile, balance_groups};

use crate::protection::Seen;
use crate::{Cluster, DriveRecord, FilesystemRecord, Plan};

/// How far a filesystem is balanced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Balancing {
    /// Data of some groups moves now.
    Moves {
        /// The number of these groups.
        groups: usize,
        /// The number of groups whose turn comes later.
        left: usize,
    },
    /// A drive is away, or groups are being rebuilt.
    Waits,
    /// Every drive has its share.
    Done,
}

/// What balancing waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BalanceWait {
    /// A drive that is away.
    Drive(DriveId),
    /// This number of groups that are being rebuilt.
    Groups(usize),
    /// More drives.
    MoreDrives(PlacementError),
}

/// What balancing would do, from now to its end.
#[derive(Debug)]
pub struct BalanceForecast {
    /// The groups that would change. The positions to which data moves are those that are rebuilt.
    pub groups: Vec<PlacementGroup>,
    /// The cluster at the end, if nothing else happens.
    pub after: Cluster,
    /// The condition of its drives then: all that are not given up are there.
    pub seen_after: Seen,
    /// What it has to wait for before anything moves.
    pub waits: Option<BalanceWait>,
}

impl Cluster {
    /// What balancing a filesystem has to wait for now.
    fn balance_waits(&self, record: &FilesystemRecord, seen: &Seen) -> Option<BalanceWait> {
        let members: BTreeSet<DriveId> =
            self.groups_for(record).flat_map(|group| group.members.iter().copied()).collect();
        let concerns = |drive: &DriveRecord| record.may_use(drive.node) || members.contains(&drive.id);
        let is_away =
            |drive: &&DriveRecord| !drive.is_given_up() && concerns(drive) && !seen.up.contains(&drive.id);
        if let Some(away) = self.drives.values().find(is_away) {
            return Some(BalanceWait::Drive(away.id));
        }
        match self.groups_for(record).filter(|group| !group.rebuilding.is_empty()).count() {
            0 => self.rule(record).err().map(BalanceWait::MoreDrives),
            rebuilding => Some(BalanceWait::Groups(rebuilding)),
        }
    }

    /// Positions of a group at nodes that are not for the filesystem.
    fn outside(&self, record: &FilesystemRecord, group: &PlacementGroup) -> usize {
        let drives = group.members.iter().filter_map(|id| self.drives.get(id));
        drives.filter(|drive| !record.may_use(drive.node)).count()
    }

    /// Number of groups of a filesystem that have data, or get some, at nodes that are not for it: what is moving away counts.
    pub fn groups_elsewhere(&self, record: &FilesystemRecord) -> usize {
        let is_left = |id: &DriveId| self.drives.get(id).is_some_and(|drive| !record.may_use(drive.node));
        let leaves = |group: &&PlacementGroup| {
            let mut sources = group.rebuilding.iter().map(|rebuilding| rebuilding.from);
            self.outside(record, group) > 0 || sources.any(|from| is_left(&from))
        };
        self.groups_for(record).filter(leaves).count()
    }

    /// The groups of a filesystem that change until each drive has its share, as if all drives that are not given up were there.
    /// Groups that are being rebuilt stay.
    fn balanced(&self, record: &FilesystemRecord) -> Result<Vec<PlacementGroup>, PlacementError> {
        // Groups that were planned later have less data, so each plan is balanced by itself.
        let mut plans: BTreeMap<(Profile, Epoch), Vec<PlacementGroup>> = BTreeMap::new();
        for (profile, groups) in record.all_sets() {
            for group in self.groups_of(groups) {
                plans.entry((profile, group.planned)).or_default().push(group.clone());
            }
        }
        let (rule, slots) = (self.rule(record)?, self.slots_for(record, &self.staying()));
        Ok(plans.values().flat_map(|groups| balance_groups(groups, &slots, rule)).collect())
    }

    /// What balancing a filesystem would do.
    pub fn balance_forecast(&self, record: &FilesystemRecord, seen: &Seen) -> BalanceForecast {
        let groups = self.balanced(record).unwrap_or_default();
        let mut plan = Plan::new(self.clone());
        groups.iter().cloned().for_each(|group| plan.set_group(group));
        plan.finish(|_| true);
        let mut seen_after = seen.clone();
        let staying = self.staying();
        seen_after.up.extend(&staying);
        seen_after.readable.extend(&staying);
        let waits = self.balance_waits(record, seen);
        BalanceForecast { groups, after: plan.into_next(), seen_after, waits }
    }
}

impl Plan {
    /// Sets the nodes whose drives a filesystem's data is for; none: all nodes. New data goes there at once, if drives that are up suffice;
    /// stored data follows by balancing.
    ///
    /// # Errors
    /// If the drives there are too few for the profile.
    pub fn set_nodes(
        &mut self,
        record: FilesystemRecord,
        nodes: BTreeSet<NodeId>,
        seen: &Seen,
        seed: u64,
    ) -> Result<(), PlacementError> {
        let mut record = FilesystemRecord { nodes, balancing: true, ..record };
        let (now, profile) = (self.next(), record.profile);
        let rule = now.rule(&record)?;
        let up = now.usable_by(&record, &seen.up);
        let has_some = now.groups_of(&record.groups).any(|group| now.outside(&record, group) == 0);
        // While drives are away, groups may have to be narrower: then they are planned with the next choice.
        if !has_some && rule.narrowed(profile, &now.slots_for(&record, &up)) == Some(profile) {
            let groups = self.plan_groups(&up, (profile, rule), seed)?;
            record.add_groups(profile, groups);
        }
        self.set_filesystem(record);
        Ok(())
    }

    /// Moves positions of a filesystem's groups, until each drive has its share of them, and the groups follow the strictest rule
    /// that the drives allow: at most `groups_max` groups with this plan. Stored data moves with them. The record notes which groups
    /// these are, and at the end that the filesystem is not being balanced any more.
    pub fn balance(&mut self, record: FilesystemRecord, seen: &Seen, groups_max: usize) -> Balancing {
        if self.next().balance_waits(&record, seen).is_some() {
            return Balancing::Waits;
        }
        let Ok(mut changed) = self.next().balanced(&record) else { return Balancing::Waits };
        if changed.is_empty() {
            if record.balancing || !record.moved.is_empty() {
                self.set_filesystem(FilesystemRecord { balancing: false, moved: Vec::new(), ..record });
            }
            return Balancing::Done;
        }
        let left = changed.len().saturating_sub(groups_max);
        changed.truncate(groups_max);
        let moved: Vec<_> = changed.iter().map(|group| group.id).collect();
        let groups = moved.len();
        changed.into_iter().for_each(|group| self.set_group(group));
        self.set_filesystem(FilesystemRecord { moved, ..record });
        Balancing::Moves { groups, left }
    }

    /// Ends the balancing of a filesystem. Positions that are moving go back to the drives that had them, where these are up and whole
    /// and the rules of the groups allow it; what was written since is read from the others until it is moved, too. The rest moves to the
    /// end. Groups of which `is_rebuilt` says that their data has moved stay. Returns the number of groups that go back.
    pub fn abort_balance(
        &mut self,
        record: FilesystemRecord,
        seen: &Seen,
        is_rebuilt: impl Fn(&PlacementGroup) -> bool,
    ) -> usize {
        let now = self.next();
        let groups = now.groups_of(&record.moved).filter(|group| !is_rebuilt(group)).cloned();
        let moving: Vec<PlacementGroup> = groups.collect();
        // A drive that came back as an older copy may lack any of its shards.
        let behind = now.behind();
        let is_whole = |id: &DriveId| {
            let is_used = now.drives.get(id).is_some_and(|drive| drive.state == DriveState::Up);
            is_used && seen.up.contains(id) && seen.readable.contains(id) && !behind.contains(id)
        };
        let sources = moving.iter().flat_map(|group| &group.rebuilding).map(|rebuilding| rebuilding.from);
        let back: BTreeSet<DriveId> = sources.filter(is_whole).collect();
        self.set_filesystem(FilesystemRecord { balancing: false, moved: Vec::new(), ..record });
        self.turn_back(&moving, &back)
    }
}

#[cfg(test)]
mod tests {
    use base::PgId;
    use layout::FailureDomain;

    use super::*;
    use crate::NodeRecord;
    use crate::members::tests::{cluster, drive, finished, seen_without};

    /// Positions of each drive in these groups.
    fn positions(cluster: &Cluster, groups: &[PgId]) -> Vec<usize> {
        let members: Vec<DriveId> =
            cluster.groups_of(groups).flat_map(|group| group.members.clone()).collect();
        let count = |id| members.iter().filter(|member| **member == id).count();
        cluster.drives.keys().map(|id| count(*id)).collect()
    }

    /// A balanced cluster of eight drives, to which two were added, and the groups that it had before.
    fn grown() -> (Cluster, Vec<PgId>) {
        let now = cluster(&[8], "r3");
        let mut plan = Plan::new(now.clone());
        // The new groups have no data: the old ones are balanced by themselves.
        let old = now.filesystems[&1].groups.clone();
        for _ in 0..2 {
            let id = plan.next_drive();
            let seen = seen_without(plan.next(), &[]);
            plan.add_drive(drive(id.0, 0), &seen, 3).unwrap();
        }
        (plan.into_next(), old)
    }

    /// Its filesystem, while that is being balanced.
    fn balancing(cluster: &Cluster) -> FilesystemRecord {
        FilesystemRecord { balancing: true, ..cluster.filesystems[&1].clone() }
    }

    /// The cluster after the first step of balancing.
    fn stepped(now: &Cluster, groups_max: usize) -> Cluster {
        let mut plan = Plan::new(now.clone());
        let step = plan.balance(balancing(now), &seen_without(now, &[]), groups_max);
        assert!(matches!(step, Balancing::Moves { .. }));
        plan.into_next()
    }

    #[test]
    fn balancing_takes_steps_until_new_drives_have_their_share() {
        let (mut now, old) = grown();
        assert_eq!(positions(&now, &old)[8..], [0, 0]);
        let all = now.filesystems[&1].groups.clone();
        assert!(all.len() > old.len() && positions(&now, &all)[8] > 0);
        let mut steps = 0;
        loop {
            let record = balancing(&now);
            let balance = |now: &Cluster, gone: &[u32]| {
                let mut plan = Plan::new(now.clone());
                let balancing = plan.balance(record.clone(), &seen_without(now, gone), 10);
                (balancing, plan)
            };
            let (balancing, plan) = balance(&now, &[]);
            assert_eq!(balance(&now, &[3]).0, Balancing::Waits);
            let Balancing::Moves { groups, left } = balancing else {
                assert_eq!(balancing, Balancing::Done);
                assert!(!plan.is_empty() && !plan.next().filesystems[&1].balancing);
                assert_eq!(plan.next().filesystems[&1].moved, []);
                break;
            };
            assert!(groups == 10 || left == 0);
            let forecast = now.balance_forecast(&record, &seen_without(&now, &[]));
            assert_eq!(forecast.groups.len(), groups + left);
            assert_eq!(plan.next().filesystems[&1].moved.len(), groups);
            assert_eq!(balance(plan.next(), &[]).0, Balancing::Waits, "the moves go on");
            steps += 1;
            now = finished(&plan.into_next()).1;
        }
        let shares = positions(&now, &old);
        assert!(steps > 3 && shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1, "{shares:?}");
    }

    #[test]
    fn balancing_over_more_nodes_makes_the_rule_stricter() {
        let before = cluster(&[2, 2, 2], "4+2");
        let mut plan = Plan::new(before);
        for _ in 0..3 {
            let (node, id) = (plan.next_node(), plan.next_drive());
            let (name, zone, rack) = (format!("node-{node}"), String::new(), String::new());
            plan.set_node(NodeRecord { zone, rack, ..NodeRecord::new(node, name) });
            plan.set_drive(drive(id.0, node.0));
        }
        let seen = seen_without(plan.next(), &[]);
        let record = plan.next().filesystems[&1].clone();
        let groups = record.groups.len();
        let forecast = plan.next().balance_forecast(&record, &seen);
        assert_eq!(plan.balance(record.clone(), &seen, usize::MAX), Balancing::Moves { groups, left: 0 });
        let now = finished(&plan.into_next()).1;
        assert!(now.groups.values().all(|group| group.spread.per_domain == 1));
        let survive =
            |now: &Cluster, seen| now.reads_survive(&record, seen, &BTreeSet::new(), FailureDomain::Node);
        assert_eq!((survive(&now, &seen), survive(&forecast.after, &forecast.seen_after)), (2, 2));
    }

    #[test]
    fn a_forecast_is_about_the_end_also_while_balancing_waits() {
        let (now, old) = grown();
        let forecast =
            |now: &Cluster, gone: &[u32]| now.balance_forecast(&balancing(now), &seen_without(now, gone));
        let whole = forecast(&now, &[]);
        assert_eq!(whole.waits, None);
        let shares = positions(&whole.after, &old);
        assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1, "{shares:?}");
        let of_old = whole.groups.iter().filter(|group| old.contains(&group.id));
        let moved: usize = of_old.map(|group| group.rebuilding.len()).sum();
        assert_eq!(shares[8] + shares[9], moved, "only what new drives get");
        let without = forecast(&now, &[3]);
        assert_eq!(without.waits, Some(BalanceWait::Drive(DriveId(3))));
        assert_eq!(without.groups, whole.groups, "nothing leaves a drive that is awaited");
        assert!(without.seen_after.up.contains(&DriveId(3)));
        let stepped = stepped(&now, 4);
        let later = forecast(&stepped, &[]);
        assert_eq!(later.waits, Some(BalanceWait::Groups(4)));
        assert_eq!(later.groups.len(), whole.groups.len() - 4);
        assert!(forecast(&whole.after, &[]).groups.is_empty());
    }

    #[test]
    fn too_few_drives_for_the_profile_are_said() {
        let before = cluster(&[3], "r3");
        let mut plan = Plan::new(before.clone());
        plan.give_up(DriveId(1), &seen_without(&before, &[]));
        let (now, seen) = (plan.into_next(), seen_without(&before, &[1]));
        let forecast = now.balance_forecast(&balancing(&now), &seen);
        assert!(matches!(forecast.waits, Some(BalanceWait::MoreDrives(_))), "{:?}", forecast.waits);
        assert_eq!(Plan::new(now.clone()).balance(balancing(&now), &seen, 9), Balancing::Waits);
    }

    /// Aborts the balancing. Each moved group of which `expected` says so must have gone back, and no other.
    #[track_caller]
    fn check_abort(
        (before, moving): (&Cluster, &Cluster),
        (seen, rebuilt): (&Seen, &[PgId]),
        expected: impl Fn(DriveId, PgId) -> bool,
    ) -> Cluster {
        let record = moving.filesystems[&1].clone();
        let mut plan = Plan::new(moving.clone());
        let count = plan.abort_balance(record.clone(), seen, |group| rebuilt.contains(&group.id));
        let after = plan.into_next();
        assert_eq!(after.filesystems[&1], FilesystemRecord { balancing: false, moved: Vec::new(), ..record });
        let mut back = 0;
        for (id, group) in &after.groups {
            let (old, moved) = (&before.groups[id], &moving.groups[id]);
            let mut changed = false;
            for (position, (now, then)) in (0u8..).zip(group.members.iter().zip(&moved.members)) {
                let source = old.members[usize::from(position)];
                if source != *then && expected(source, *id) {
                    changed = true;
                    assert_eq!(*now, source);
                    let sources: Vec<DriveId> = group.sources(position).collect();
                    assert_eq!(sources, [*then], "what was written since is at the other one");
                } else {
                    assert_eq!(now, then);
                    let sources = |group: &PlacementGroup| group.sources(position).collect::<Vec<_>>();
                    assert_eq!(sources(group), sources(moved));
                }
            }
            assert_eq!(group.epoch.0, moved.epoch.0 + u64::from(changed));
            back += usize::from(changed);
        }
        assert_eq!(count, back);
        after
    }

    #[test]
    fn an_abort_gives_back_what_is_moving_and_loses_nothing() {
        let (before, _) = grown();
        let moving = stepped(&before, 10);
        let seen = seen_without(&moving, &[]);
        let after = check_abort((&before, &moving), (&seen, &[]), |_, _| true);
        let record = after.filesystems[&1].clone();
        let survive = |gone: &[u32]| {
            let seen = seen_without(&after, gone);
            after.reads_survive(&record, &seen, &BTreeSet::new(), FailureDomain::Drive)
        };
        assert_eq!((survive(&[]), survive(&[8]), survive(&[0])), (2, 1, 1));
        // It is begun again at once: what goes back is no move of it.
        let mut again = Plan::new(after.clone());
        assert_eq!(again.balance(balancing(&after), &seen, 10), Balancing::Waits);
        assert_eq!(again.abort_balance(balancing(&after), &seen, |_| false), 0);
        let ended = finished(&after).1;
        assert!(ended.groups.iter().all(|(id, group)| group.members == before.groups[id].members));
        assert!(matches!(
            Plan::new(ended.clone()).balance(balancing(&ended), &seen, 1),
            Balancing::Moves { groups: 1, .. }
        ));
    }

    #[test]
    fn an_abort_leaves_groups_that_have_moved() {
        let (before, _) = grown();
        let moving = stepped(&before, 10);
        let (seen, moved) = (seen_without(&moving, &[]), moving.filesystems[&1].moved.clone());
        let (ended, rebuilt) = (moved[..3].to_vec(), moved[3..5].to_vec());
        let mut plan = Plan::new(moving.clone());
        assert_eq!(plan.finish(|group| ended.contains(&group.id)).groups, 3);
        let stays = |pg| ended.contains(&pg) || rebuilt.contains(&pg);
        check_abort((&before, &plan.into_next()), (&seen, &rebuilt), |_, pg| !stays(pg));
    }

    #[test]
    fn an_abort_gives_nothing_to_drives_that_are_not_whole() {
        let (before, _) = grown();
        let moving = stepped(&before, 30);
        let moved = moving.filesystems[&1].moved.clone();
        let sources: BTreeSet<DriveId> = moving
            .groups_of(&moved)
            .flat_map(|group| group.rebuilding.iter().map(|rebuilding| rebuilding.from))
            .collect();
        let victim = *sources.first().unwrap();
        let seen = seen_without(&moving, &[]);
        // It is away, it fails, it came back as an older copy.
        let away = seen_without(&moving, &[victim.0]);
        check_abort((&before, &moving), (&away, &[]), |source, _| source != victim);
        let mut plan = Plan::new(moving.clone());
        plan.set_drive_state(victim, DriveState::Failed);
        check_abort((&before, plan.next()), (&seen, &[]), |source, _| source != victim);
        let mut plan = Plan::new(moving.clone());
        plan.returned_with_gap(victim);
        let behind = plan.into_next();
        assert_eq!(behind.behind(), BTreeSet::from([victim]));
        check_abort((&before, &behind), (&seen, &[]), |source, _| source != victim);
        // It leaves: others have its positions already, and keep them.
        let mut plan = Plan::new(moving.clone());
        plan.give_up(victim, &seen);
        let leaving = plan.into_next();
        let record = leaving.filesystems[&1].clone();
        let mut plan = Plan::new(leaving);
        assert!(plan.abort_balance(record, &seen, |_| false) > 0);
        assert!(plan.next().groups.values().all(|group| !group.members.contains(&victim)));
    }

    /// The nodes with members of these groups.
    fn nodes_of(cluster: &Cluster, groups: &[PgId]) -> BTreeSet<u32> {
        let members = cluster.groups_of(groups).flat_map(|group| group.members.iter());
        members.map(|id| cluster.drives[id].node.0).collect()
    }

    fn numbered(nodes: &[u32]) -> BTreeSet<NodeId> {
        nodes.iter().copied().map(NodeId).collect()
    }

    /// The cluster after its filesystem was set to nodes, and everything has moved.
    fn limited(now: &Cluster, nodes: &[u32]) -> Cluster {
        let seen = seen_without(now, &[]);
        let mut plan = Plan::new(now.clone());
        plan.set_nodes(now.filesystems[&1].clone(), numbered(nodes), &seen, 5).unwrap();
        let mut now = plan.into_next();
        for _ in 0..100 {
            let mut plan = Plan::new(now.clone());
            let record = plan.next().filesystems[&1].clone();
            match plan.balance(record, &seen, 20) {
                Balancing::Moves { .. } => now = finished(&plan.into_next()).1,
                Balancing::Done => return plan.into_next(),
                Balancing::Waits => panic!("nothing to wait for"),
            }
        }
        panic!("it does not end")
    }

    #[test]
    fn a_filesystem_for_some_nodes_moves_there_and_new_data_goes_there_at_once() {
        let before = cluster(&[2, 2, 2, 2, 2], "r3");
        let first = before.nodes.keys().next().unwrap().0;
        let wanted = [first, first + 1, first + 3];
        let seen = seen_without(&before, &[]);
        let mut plan = Plan::new(before.clone());
        plan.set_nodes(before.filesystems[&1].clone(), numbered(&wanted), &seen, 5).unwrap();
        let now = plan.next().clone();
        assert!(now.groups_elsewhere(&now.filesystems[&1]) > 0, "stored data follows later");
        let set = plan.write_set(now.filesystems[&1].clone(), &seen, crate::Patience::Left, 7).unwrap();
        assert_eq!(nodes_of(plan.next(), &set.groups), wanted.into());
        let after = limited(&before, &wanted);
        let record = &after.filesystems[&1];
        assert_eq!((after.groups_elsewhere(record), record.balancing), (0, false));
        assert_eq!(nodes_of(&after, &record.groups), wanted.into());
        // Every drive there has its share, and a node may be lost.
        let shares: Vec<usize> = positions(&after, &before.filesystems[&1].groups);
        let used: Vec<usize> = shares.into_iter().filter(|count| *count > 0).collect();
        assert!(used.len() == 6 && used.iter().max().unwrap() - used.iter().min().unwrap() <= 1, "{used:?}");
        assert_eq!(after.reads_survive(record, &seen, &BTreeSet::new(), FailureDomain::Node), 2);
        // And back: it is everywhere again.
        let again = limited(&after, &[]);
        assert_eq!(nodes_of(&again, &again.filesystems[&1].groups).len(), 5);
    }

    #[test]
    fn two_kinds_of_machines_as_zones_have_one_copy_each() {
        let mut now = cluster(&[1, 1, 1, 1, 4, 4], "r2");
        let kinds = ["compute", "compute", "compute", "compute", "storage", "storage"];
        for (node, zone) in now.nodes.values_mut().zip(kinds) {
            node.zone = zone.to_owned();
        }
        let zones = |members: &[DriveId], now: &Cluster| -> Vec<String> {
            let mut zones: Vec<String> =
                members.iter().map(|id| now.nodes[&now.drives[id].node].zone.clone()).collect();
            zones.sort();
            zones
        };
        let now = limited(&now, &[]);
        assert!(now.groups.values().all(|group| zones(&group.members, &now) == ["compute", "storage"]));
        // What one of them loses goes to others of its kind.
        let mut plan = Plan::new(now.clone());
        plan.give_up(DriveId(0), &seen_without(&now, &[0]));
        let after = finished(&plan.into_next()).1;
        assert!(after.groups.values().all(|group| zones(&group.members, &after) == ["compute", "storage"]));
        assert!(after.groups.values().all(|group| !group.members.contains(&DriveId(0))));
    }

    #[test]
    fn too_few_nodes_are_refused() {
        let now = cluster(&[1, 1, 1, 1], "r3");
        let first = now.nodes.keys().next().unwrap().0;
        let mut plan = Plan::new(now.clone());
        let nodes = numbered(&[first, first + 1]);
        assert!(plan.set_nodes(now.filesystems[&1].clone(), nodes, &seen_without(&now, &[]), 1).is_err());
        assert!(plan.is_empty());
    }

    #[test]
    fn what_is_lost_at_nodes_of_a_filesystem_stays_at_its_nodes() {
        let before = cluster(&[2, 2, 2, 2], "r2");
        let first = before.nodes.keys().next().unwrap().0;
        let now = limited(&before, &[first, first + 1, first + 2]);
        let mut plan = Plan::new(now.clone());
        plan.give_up(DriveId(0), &seen_without(&now, &[0]));
        let after = finished(&plan.into_next()).1;
        let record = &after.filesystems[&1];
        assert!(!after.groups.values().any(|group| group.members.contains(&DriveId(0))));
        assert_eq!(after.groups_elsewhere(record), 0);
        // Nobody takes over what the only node of two could: the drive is waited for, though another filesystem could do without it.
        let mut two = Plan::new(limited(&before, &[first, first + 1]));
        let everywhere = FilesystemRecord::new(2, "r2".parse().unwrap());
        let all = two.next().drives.keys().copied().collect();
        two.add_filesystem(everywhere, &all, 9).unwrap();
        let gone = seen_without(two.next(), &[0, 1]);
        assert_eq!(two.retire(&[DriveId(0)], &gone, &crate::Owed::new()), []);
        let mut free = Plan::new(two.next().clone());
        let unlimited = FilesystemRecord { nodes: BTreeSet::new(), ..free.next().filesystems[&1].clone() };
        free.set_filesystem(unlimited);
        assert_eq!(free.retire(&[DriveId(0)], &gone, &crate::Owed::new()), [DriveId(0)]);
        // A drive elsewhere is none of its business, added or lost.
        let groups = record.groups.len();
        let mut plan = Plan::new(after.clone());
        let added = plan.next_drive();
        plan.add_drive(drive(added.0, first + 3), &seen_without(&after, &[0]), 3).unwrap();
        assert_eq!(plan.next().filesystems[&1].groups.len(), groups);
        let away = seen_without(plan.next(), &[0, 6, 7]);
        assert!(matches!(
            plan.balance(balancing(&after), &away, 9),
            Balancing::Moves { .. } | Balancing::Done
        ));
        // Its last two nodes cannot be emptied both.
        let two = limited(&before, &[first, first + 1]);
        let seen = seen_without(&two, &[]);
        assert!(two.bound_to(NodeId(first), &seen) > 0);
        assert_eq!(two.bound_to(NodeId(first + 3), &seen), 0);
        assert_eq!(before.bound_to(NodeId(first), &seen), 0, "without the limit it could");
    }

    #[test]
    fn spare_space_of_a_filesystem_is_at_its_nodes() {
        let mut now = cluster(&[1, 1, 1, 4], "r2");
        let first = now.nodes.keys().next().unwrap().0;
        now.record.spare.domains = 1;
        let spare = |now: &Cluster| now.spare(&now.filesystems[&1]);
        assert_eq!(spare(&now).unwrap().unwrap().left_bytes, 4000);
        let two = limited(&now, &[first, first + 1]);
        assert!(spare(&two).is_err(), "nothing that was lost finds another place");
        let three = limited(&now, &[first, first + 1, first + 2]);
        let spare = spare(&three).unwrap().unwrap();
        assert_eq!((spare.all_bytes, spare.left_bytes, spare.used_bytes), (3000, 1000, 0));
    }
}
