//! Stored data that moves until every drive has its share, a few placement groups at a time.

use std::collections::{BTreeMap, BTreeSet};

use base::{DriveId, Epoch};
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
        let is_away = |drive: &&DriveRecord| !drive.is_given_up() && !seen.up.contains(&drive.id);
        if let Some(away) = self.drives.values().find(is_away) {
            return Some(BalanceWait::Drive(away.id));
        }
        let groups = record.all_sets().flat_map(|(_, groups)| self.groups_of(groups));
        match groups.filter(|group| !group.rebuilding.is_empty()).count() {
            0 => self.rule(record).err().map(BalanceWait::MoreDrives),
            rebuilding => Some(BalanceWait::Groups(rebuilding)),
        }
    }

    /// The drives that are not given up.
    fn staying(&self) -> BTreeSet<DriveId> {
        self.drives.values().filter(|drive| !drive.is_given_up()).map(|drive| drive.id).collect()
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
        let (rule, slots) = (self.rule(record)?, self.slots(&self.staying()));
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
}
