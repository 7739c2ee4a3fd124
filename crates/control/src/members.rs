//! Drives that come, go and return, and the positions in placement groups that follow.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use base::{DriveId, NodeId, PgId};
use layout::{DriveState, PlacementError, PlacementGroup, Rebuilding, replace_members, return_members};

use crate::protection::{Owed, Seen};
use crate::{Cluster, DriveRecord, FilesystemRecord, NodeRecord, Plan};

/// What ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Finished {
    /// Groups whose members have all their shards now.
    pub groups: usize,
    /// Drives that no group needs any more.
    pub empty: Vec<DriveId>,
}

impl Cluster {
    /// The groups after others have taken over the positions of drives that go. Positions for which there is no other drive stay.
    fn replaced(&self, gone: &BTreeSet<DriveId>, seen: &Seen) -> Vec<PlacementGroup> {
        let spare: BTreeSet<DriveId> = seen.up.difference(gone).copied().collect();
        let places = self.places();
        // Filesystems for the same nodes share what is left.
        let limited = self.filesystems.values().filter(|record| !record.nodes.is_empty());
        let mut of_group: HashMap<PgId, &FilesystemRecord> = HashMap::new();
        for record in limited {
            // A group without data may lie anywhere: those of former profiles may not fit at the nodes of the filesystem.
            let with_data = self.groups_for(record).filter(|group| !seen.unused.contains(&group.id));
            of_group.extend(with_data.map(|group| (group.id, record)));
        }
        let everywhere = BTreeSet::new();
        let mut shares: BTreeMap<&BTreeSet<NodeId>, Vec<PlacementGroup>> = BTreeMap::new();
        for group in self.groups.values() {
            let nodes = of_group.get(&group.id).map_or(&everywhere, |record| &record.nodes);
            shares.entry(nodes).or_default().push(group.clone());
        }
        let replaced = shares.into_iter().flat_map(|(nodes, groups)| {
            let at = |id: &&DriveId| {
                nodes.is_empty() || self.drives.get(id).is_some_and(|drive| nodes.contains(&drive.node))
            };
            let spare = self.slots(&spare.iter().filter(at).copied().collect());
            replace_members(&groups, gone, &spare, &places)
        });
        replaced.collect()
    }

    /// Whether others could take over a position of this drive, or have taken over all of them. A filesystem that is bound to it waits.
    fn can_do_without(&self, id: DriveId, seen: &Seen) -> bool {
        let is_member = self.groups.values().any(|group| group.members.contains(&id));
        match self.replaceable(id, seen) {
            0 => !is_member && self.groups_with(id) > 0,
            _ => self.bound_to_drive(id, seen).is_none(),
        }
    }

    /// A filesystem that is for some nodes, and has data on this drive of which no drive at these nodes could take over anything: once
    /// the drive is given up, it could not be used again when it is back.
    pub fn bound_to_drive(&self, id: DriveId, seen: &Seen) -> Option<&FilesystemRecord> {
        let mut limited = self.filesystems.values().filter(|record| !record.nodes.is_empty()).peekable();
        limited.peek()?;
        let replaced = self.replaced(&BTreeSet::from([id]), seen);
        let replaced: BTreeSet<PgId> = replaced.iter().map(|group| group.id).collect();
        limited.find(|record| {
            let has_data =
                |group: &&PlacementGroup| group.members.contains(&id) && !seen.unused.contains(&group.id);
            let mut its = self.groups_for(record).filter(has_data).peekable();
            its.peek().is_some() && !its.any(|group| replaced.contains(&group.id))
        })
    }

    /// Number of groups in which another drive could take over the position of this one.
    pub fn replaceable(&self, id: DriveId, seen: &Seen) -> u32 {
        self.replaced(&BTreeSet::from([id]), seen).len() as u32
    }

    /// Number of groups with positions for which there is no other drive, if a node is emptied.
    pub fn bound_to(&self, node: NodeId, seen: &Seen) -> usize {
        Plan::new(self.clone()).drain(node, seen)
    }

    /// Number of groups that need a drive.
    pub fn groups_with(&self, id: DriveId) -> u32 {
        self.group_counts().get(&id).copied().unwrap_or(0)
    }
}

impl Plan {
    /// Changes the allowed uses of a drive.
    pub fn set_drive_state(&mut self, id: DriveId, state: DriveState) {
        if let Some(drive) = self.next().drives.get(&id).filter(|drive| drive.state != state) {
            let drive = drive.clone();
            let bytes = drive.capacity_bytes;
            if (drive.state, state) == (DriveState::Leaving, DriveState::Up) {
                // It is not emptied after all.
                self.note_capacity(|whole_bytes| whole_bytes + bytes);
            }
            self.set_drive(DriveRecord { state, ..drive });
            if state == DriveState::Leaving {
                self.note_capacity(|whole_bytes| whole_bytes.saturating_sub(bytes));
            }
        }
    }

    /// A drive is in another machine now. It keeps its positions and what it holds.
    pub fn move_drive(&mut self, id: DriveId, node: NodeId) {
        if let Some(drive) = self.next().drives.get(&id).cloned() {
            self.set_drive(DriveRecord { node, ..drive });
        }
    }

    /// Adds a drive. New groups over all drives that are up use it for new data; stored data is not moved.
    pub fn add_drive(&mut self, drive: DriveRecord, seen: &Seen, seed: u64) -> Result<(), PlacementError> {
        let up: BTreeSet<DriveId> = seen.up.iter().copied().chain([drive.id]).collect();
        let node = drive.node;
        self.set_drive(drive);
        let records = self.next().filesystems.values().filter(|record| record.may_use(node));
        for mut record in records.cloned().collect::<Vec<_>>() {
            let up = self.next().usable_by(&record, &up);
            let slots = self.next().slots_for(&record, &up);
            let rule = self.next().rule_or_last(&record);
            if rule.narrowed(record.profile, &slots) != Some(record.profile) {
                continue;
            }
            let groups = self.plan_groups(&up, (record.profile, rule), seed)?;
            record.add_groups(record.profile, groups);
            self.set_filesystem(record);
        }
        Ok(())
    }

    /// Empties a drive if it can be read, or does without it. Others take over its positions.
    pub fn give_up(&mut self, id: DriveId, seen: &Seen) {
        let state = if seen.readable.contains(&id) { DriveState::Leaving } else { DriveState::Out };
        self.set_drive_state(id, state);
        self.reassign(seen);
    }

    /// Empties all drives of a node that are in use. Others take over their positions. Returns the number of groups with positions for
    /// which there is no other drive: these stay.
    pub fn drain(&mut self, node: NodeId, seen: &Seen) -> usize {
        let of_node = self.next().drives.values().filter(|drive| drive.node == node);
        let used: BTreeSet<DriveId> =
            of_node.filter(|drive| !drive.is_given_up()).map(|drive| drive.id).collect();
        used.iter().for_each(|id| self.set_drive_state(*id, DriveState::Leaving));
        if let Some(record) = self.next().nodes.get(&node).cloned() {
            self.set_node(NodeRecord { draining: used.clone(), ..record });
        }
        self.reassign(seen);
        let is_bound = |group: &&PlacementGroup| group.members.iter().any(|member| used.contains(member));
        self.next().groups.values().filter(is_bound).count()
    }

    /// Uses the drives of a node again that are being emptied because the node is. What others are taking over from them comes back; groups
    /// that have moved stay where they are. Returns the drives, without those that cannot be read.
    pub fn cancel_drain(&mut self, node: NodeId, seen: &Seen) -> Vec<DriveId> {
        let Some(record) = self.next().nodes.get(&node).cloned() else { return Vec::new() };
        let drives = record.draining.iter().filter_map(|id| self.next().drives.get(id));
        let leaving = drives.filter(|drive| drive.node == node && drive.state == DriveState::Leaving);
        let back: BTreeSet<DriveId> =
            leaving.map(|drive| drive.id).filter(|id| seen.readable.contains(id)).collect();
        if back.is_empty() {
            return Vec::new();
        }
        // The others may be asked for once they answer.
        let draining = record.draining.difference(&back).copied().collect();
        self.set_node(NodeRecord { draining, ..record });
        back.iter().for_each(|id| self.set_drive_state(*id, DriveState::Up));
        let groups: Vec<PlacementGroup> = self.next().groups.values().cloned().collect();
        self.turn_back(&groups, &back);
        back.into_iter().collect()
    }

    /// Gives drives back what others are taking over from them, in these groups. Returns the number of groups that change.
    pub(crate) fn turn_back(&mut self, groups: &[PlacementGroup], back: &BTreeSet<DriveId>) -> usize {
        let changed = return_members(groups, back, &self.next().places());
        let count = changed.len();
        changed.into_iter().for_each(|group| self.set_group(group));
        count
    }

    /// Gives the positions of drives that were given up to drives that are up. Returns the number of groups that change.
    pub fn reassign(&mut self, seen: &Seen) -> usize {
        let given_up = self.next().drives.values().filter(|drive| drive.is_given_up());
        let gone: BTreeSet<DriveId> = given_up.map(|drive| drive.id).collect();
        let counts = self.next().group_counts();
        if !gone.iter().any(|id| counts.contains_key(id)) {
            return 0;
        }
        let changed = self.next().replaced(&gone, seen);
        let count = changed.len();
        changed.into_iter().for_each(|group| self.set_group(group));
        count
    }

    /// Gives up drives that were away for too long, if others can take over positions of theirs, or have. A drive without which
    /// data cannot be read is waited for, and one that can be read again stays. If too much is away, all stay.
    pub fn retire(&mut self, overdue: &[DriveId], seen: &Seen, owed: &Owed) -> Vec<DriveId> {
        let mut retired = Vec::new();
        if self.next().wide_absence(seen).is_some() {
            return retired;
        }
        for id in overdue {
            let now = self.next();
            let is_back = seen.readable.contains(id);
            if !is_back && now.can_do_without(*id, seen) && now.needs(*id, seen, owed).is_none() {
                self.set_drive_state(*id, DriveState::Out);
                retired.push(*id);
            }
        }
        retired
    }

    /// Puts a new drive into all positions of another one.
    pub fn replace(&mut self, id: DriveId, new: DriveRecord, seen: &Seen) {
        let new_id = new.id;
        let state = if seen.readable.contains(&id) { DriveState::Leaving } else { DriveState::Out };
        self.set_drive_state(id, state);
        self.set_drive(new);
        let groups: Vec<PlacementGroup> =
            self.next().groups.values().filter(|group| group.members.contains(&id)).cloned().collect();
        for mut group in groups {
            group.epoch.0 += 1;
            for (position, member) in (0u8..).zip(&mut group.members).filter(|(_, member)| **member == id) {
                *member = new_id;
                group.rebuilding.push(Rebuilding { position, from: id });
            }
            self.set_group(group);
        }
    }

    /// A drive came back as an older copy of itself: its groups are compared with it, and what it lacks is restored.
    pub fn returned_with_gap(&mut self, id: DriveId) {
        let returned = self.next().groups.values().filter_map(|group| group.returned_with_gap(id));
        let returned: Vec<PlacementGroup> = returned.collect();
        returned.into_iter().for_each(|group| self.set_group(group));
    }

    /// The end of the ledgers was lost: what drives and filesystems saw of it counts for nothing.
    pub fn lose_end(&mut self) {
        for id in self.next().nodes.keys().copied().collect::<Vec<_>>() {
            self.forget_start(id);
        }
        for drive in self.next().drives.values().cloned().collect::<Vec<_>>() {
            self.set_drive(DriveRecord { may_know_lost: true, ..drive });
        }
        for filesystem in self.next().filesystems.values().cloned().collect::<Vec<_>>() {
            self.set_filesystem(FilesystemRecord { has_lost_end: true, ..filesystem });
        }
    }

    /// Ends the rebuild of groups whose members have all their shards, and retires drives that are empty.
    pub fn finish(&mut self, is_rebuilt: impl Fn(&PlacementGroup) -> bool) -> Finished {
        let rebuilding = self.next().groups.values().filter(|group| !group.rebuilding.is_empty());
        let done: Vec<PlacementGroup> = rebuilding.filter(|group| is_rebuilt(group)).cloned().collect();
        let groups = done.len();
        for group in done {
            self.set_group(PlacementGroup { rebuilding: Vec::new(), ..group });
        }
        let needed = self.next().group_counts();
        let leaving = self.next().drives.values().filter(|drive| drive.state == DriveState::Leaving);
        let empty: Vec<DriveId> =
            leaving.map(|drive| drive.id).filter(|id| !needed.contains_key(id)).collect();
        empty.iter().for_each(|id| self.set_drive_state(*id, DriveState::Out));
        Finished { groups, empty }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use base::env::Env;
    use base::{DriveUuid, Epoch};
    use layout::{FailureDomain, Spread};
    use wire::drive::DriveMark;

    use super::*;
    use crate::{Control, ScrubRecord};

    pub(crate) fn drive(id: u32, node: u32) -> DriveRecord {
        DriveRecord {
            id: DriveId(id),
            uuid: DriveUuid([id as u8; 16]),
            node: NodeId(node),
            capacity_bytes: 1000,
            state: DriveState::Up,
            scrub: ScrubRecord::default(),
            mark: DriveMark::default(),
            may_know_lost: false,
        }
    }

    /// A cluster with one filesystem over nodes with these numbers of drives.
    pub(crate) fn cluster(nodes: &[u32], profile: &str) -> Cluster {
        let mut plan = Plan::new(Cluster::new(Control::new_cluster(&Env::real())));
        for (number, drives) in (0..).zip(nodes) {
            let (zone, rack) = (String::new(), String::new());
            let id = plan.next_node();
            plan.set_node(NodeRecord { zone, rack, ..NodeRecord::new(id, format!("node-{number}")) });
            for _ in 0..*drives {
                let next = plan.next_drive();
                plan.set_drive(drive(next.0, id.0));
            }
        }
        let record = FilesystemRecord::new(plan.next_filesystem(), profile.parse().unwrap());
        let up = plan.next().drives.keys().copied().collect();
        plan.add_filesystem(record, &up, 1).unwrap();
        plan.into_next()
    }

    /// All drives work, except these.
    pub(crate) fn seen_without(cluster: &Cluster, gone: &[u32]) -> Seen {
        let up: BTreeSet<DriveId> =
            cluster.drives.keys().copied().filter(|id| !gone.contains(&id.0)).collect();
        Seen { readable: up.clone(), up, ..Seen::default() }
    }

    fn members(cluster: &Cluster) -> BTreeSet<DriveId> {
        cluster.groups.values().flat_map(|group| group.members.iter().copied()).collect()
    }

    /// All groups are rebuilt, at the epochs that they have.
    pub(crate) fn finished(cluster: &Cluster) -> (Finished, Cluster) {
        let mut plan = Plan::new(cluster.clone());
        let finished = plan.finish(|_| true);
        (finished, plan.into_next())
    }

    #[test]
    fn a_drive_that_can_be_read_is_emptied_and_then_it_is_out() {
        let before = cluster(&[7], "4+2");
        let seen = seen_without(&before, &[]);
        let mut plan = Plan::new(before.clone());
        plan.give_up(DriveId(3), &seen);
        let now = plan.into_next();
        assert_eq!(now.record.map_epoch, before.record.map_epoch + 1, "one plan is one map");
        assert_eq!(now.drives[&DriveId(3)].state, DriveState::Leaving);
        assert!(!members(&now).contains(&DriveId(3)));
        assert_eq!(now.groups_with(DriveId(3)), before.groups_with(DriveId(3)), "it is read from");
        let mut early = Plan::new(now.clone());
        assert_eq!(early.finish(|_| false), Finished::default());
        assert!(early.is_empty());
        let (done, after) = finished(&now);
        assert_eq!((done.groups as u32, done.empty), (before.groups_with(DriveId(3)), vec![DriveId(3)]));
        assert_eq!(after.drives[&DriveId(3)].state, DriveState::Out);
        assert!(after.groups.values().all(|group| group.rebuilding.is_empty()));
    }

    #[test]
    fn a_node_is_emptied_if_others_can_take_all_its_positions() {
        let before = cluster(&[2, 2, 2, 2], "4+2");
        let seen = seen_without(&before, &[]);
        let node = before.drives[&DriveId(2)].node;
        assert_eq!(before.bound_to(node, &seen), 0);
        let mut plan = Plan::new(before.clone());
        assert_eq!(plan.drain(node, &seen), 0);
        let now = plan.into_next();
        assert_eq!(now.record.map_epoch, before.record.map_epoch + 1, "one plan is one map");
        let leaving = now.drives.values().filter(|drive| drive.state == DriveState::Leaving);
        assert_eq!(leaving.map(|drive| drive.node).collect::<Vec<_>>(), [node, node]);
        assert!(now.groups.values().all(|group| {
            let of_node = |member: &DriveId| now.drives[member].node;
            let mut counts: BTreeMap<NodeId, usize> = BTreeMap::new();
            group.members.iter().for_each(|member| *counts.entry(of_node(member)).or_default() += 1);
            !counts.contains_key(&node) && counts.values().all(|count| *count <= 2)
        }));
        let (done, after) = finished(&now);
        assert_eq!(done.empty.len(), 2);
        assert_eq!(after.drives.values().filter(|drive| drive.state == DriveState::Out).count(), 2);
        // Of three nodes, none can go.
        let three = cluster(&[2, 2, 2], "4+2");
        let seen = seen_without(&three, &[]);
        let node = three.drives[&DriveId(0)].node;
        assert_eq!(three.bound_to(node, &seen), three.groups.len());
    }

    #[test]
    fn a_drain_that_is_cancelled_gives_back_what_has_not_gone() {
        let before = cluster(&[2, 2, 2, 2], "4+2");
        let (node, seen) = (before.drives[&DriveId(0)].node, seen_without(&before, &[]));
        let mut plan = Plan::new(before.clone());
        assert_eq!(plan.drain(node, &seen), 0);
        let draining = plan.into_next();
        // Some groups have all their shards at the others already.
        let mut plan = Plan::new(draining.clone());
        let done = plan.finish(|group| group.id.0 % 3 == 0).groups;
        assert!(done > 0);
        // One that is silent goes, and one that was given up by itself.
        let mut other = plan.next().clone();
        let silent = seen_without(&other, &[1]);
        let mut without_silent = Plan::new(other.clone());
        assert_eq!(without_silent.cancel_drain(node, &silent), [DriveId(0)]);
        assert_eq!(without_silent.cancel_drain(node, &seen), [DriveId(1)], "it answers again");
        other.nodes.get_mut(&node).unwrap().draining.remove(&DriveId(0));
        assert_eq!(Plan::new(other).cancel_drain(node, &seen), [DriveId(1)]);
        assert_eq!(plan.cancel_drain(node, &seen), [DriveId(0), DriveId(1)]);
        let after = plan.into_next();
        assert!(after.drives.values().all(|drive| drive.state == DriveState::Up));
        for (id, group) in &after.groups {
            let (old, moved) = (&before.groups[id], &draining.groups[id]);
            if id.0 % 3 == 0 {
                assert_eq!((&group.members, group.rebuilding.len()), (&moved.members, 0));
                continue;
            }
            assert_eq!(group.members, old.members);
            for (position, (now, then)) in (0..).zip(group.members.iter().zip(&moved.members)) {
                let sources: Vec<DriveId> = group.sources(position).collect();
                let expected: &[DriveId] = if now == then { &[] } else { &[*then] };
                assert_eq!(sources, expected, "what was written since is at the other one");
            }
            assert!(group.epoch >= moved.epoch);
        }
        // It is rebuilt like any other change.
        assert!(finished(&after).1.groups.values().all(|group| group.rebuilding.is_empty()));
        assert_eq!(Plan::new(after).cancel_drain(node, &seen), []);
    }

    #[test]
    fn positions_without_another_drive_stay_until_there_is_one() {
        let before = cluster(&[6], "4+2");
        let mut plan = Plan::new(before.clone());
        let seen = seen_without(&before, &[2]);
        assert_eq!(plan.retire(&[DriveId(2)], &seen, &Owed::new()), [], "nobody can take over");
        plan.give_up(DriveId(2), &seen);
        assert_eq!(plan.next().drives[&DriveId(2)].state, DriveState::Out);
        assert_eq!(members(plan.next()), members(&before));
        let new = plan.next_drive();
        plan.add_drive(drive(new.0, 0), &seen, 2).unwrap();
        let with_new = Seen { up: seen.up.iter().copied().chain([new]).collect(), ..seen };
        let moved = plan.reassign(&with_new);
        assert_eq!(moved as u32, before.groups_with(DriveId(2)));
        assert!(!members(plan.next()).contains(&DriveId(2)));
        assert_eq!(plan.reassign(&with_new), 0, "there is nothing left to do");
    }

    #[test]
    fn a_drive_is_not_given_up_while_data_needs_it() {
        let before = cluster(&[8], "4+2");
        let seen = seen_without(&before, &[0, 1, 2]);
        let retire = |overdue: &[u32], owed: &Owed| {
            let overdue: Vec<DriveId> = overdue.iter().copied().map(DriveId).collect();
            Plan::new(before.clone()).retire(&overdue, &seen_without(&before, &[0, 1]), owed)
        };
        assert_eq!(retire(&[0], &Owed::new()), [DriveId(0)]);
        assert_eq!(retire(&[0, 2], &Owed::new()), [DriveId(0)], "drive 2 is back");
        let owed = Owed::from([(1, BTreeSet::from([DriveId(5)]))]);
        assert_eq!(retire(&[0], &owed), [], "a third drive lacks shards of some groups");
        assert!(before.needs(DriveId(0), &seen, &Owed::new()).is_some());
        assert!(before.needs(DriveId(7), &seen_without(&before, &[0]), &Owed::new()).is_none());
        assert!(
            before.needs(DriveId(7), &seen_without(&before, &[0, 1]), &Owed::new()).is_some(),
            "it works, and has to"
        );
        let unused = before.groups.keys().copied().collect();
        let empty = Seen { unused, ..seen_without(&before, &[0, 1]) };
        assert!(before.needs(DriveId(7), &empty, &Owed::new()).is_none(), "nothing is stored");
    }

    #[test]
    fn a_replaced_drive_is_a_source_and_the_new_one_gets_all_its_positions() {
        let before = cluster(&[6], "4+2");
        let mut plan = Plan::new(before.clone());
        plan.replace(DriveId(1), drive(9, 0), &seen_without(&before, &[]));
        let now = plan.into_next();
        for (id, group) in &now.groups {
            let old = &before.groups[id];
            let position = old.members.iter().position(|member| *member == DriveId(1)).unwrap();
            assert_eq!(group.members[position], DriveId(9));
            assert_eq!(group.sources(position as u8).collect::<Vec<_>>(), [DriveId(1)]);
            assert_eq!(group.epoch, Epoch(old.epoch.0 + 1));
        }
        let record = &now.filesystems[&1];
        let survive = |gone: &[u32], level| {
            now.reads_survive(record, &seen_without(&now, gone), &BTreeSet::new(), level)
        };
        assert_eq!(survive(&[], FailureDomain::Drive), 2, "the old one is still read");
        assert_eq!(survive(&[9], FailureDomain::Drive), 1, "it has what was written since");
        assert_eq!(survive(&[1], FailureDomain::Drive), 1, "it has what was not moved yet");
        assert_eq!(survive(&[0, 1, 2], FailureDomain::Drive), -1);
    }

    #[test]
    fn a_drive_whose_positions_are_moving_is_waited_for_while_only_it_has_the_data() {
        let mut plan = Plan::new(cluster(&[2], "1+0"));
        let group = plan.next().groups.values().find(|group| group.members == [DriveId(0)]).unwrap().clone();
        let rebuilding = vec![Rebuilding { position: 0, from: DriveId(0) }];
        plan.set_group(PlacementGroup { members: vec![DriveId(1)], rebuilding, ..group });
        let now = plan.into_next();
        assert!(now.needs(DriveId(0), &seen_without(&now, &[0]), &Owed::new()).is_some());
        assert!(now.needs(DriveId(1), &seen_without(&now, &[1]), &Owed::new()).is_some());
    }

    #[test]
    fn four_and_two_over_three_nodes_survives_one_of_them() {
        let now = cluster(&[2, 2, 2], "4+2");
        assert!(
            now.groups
                .values()
                .all(|group| { group.spread == Spread { level: FailureDomain::Node, per_domain: 2 } })
        );
        let record = &now.filesystems[&1];
        let survive = |gone: &[u32], level| {
            let seen = seen_without(&now, gone);
            let reads = now.reads_survive(record, &seen, &BTreeSet::new(), level);
            (reads, now.writes_survive(record, &seen, level))
        };
        assert_eq!(survive(&[], FailureDomain::Node), (1, Some(1)));
        assert_eq!(survive(&[], FailureDomain::Drive), (2, Some(3)));
        assert_eq!(survive(&[0, 1], FailureDomain::Node), (0, Some(0)));
        assert_eq!(survive(&[0, 2, 4], FailureDomain::Node), (-1, Some(0)));
        let up = seen_without(&now, &[0, 1]).up;
        assert_eq!(now.write_profile(record, &up).unwrap().to_string(), "2+2");
        assert_eq!(now.replaceable(DriveId(0), &seen_without(&now, &[0])), 0, "no node has room for a third");
    }

    #[test]
    fn a_copy_that_returned_is_compared_with_the_others() {
        let before = cluster(&[6], "4+2");
        let mut plan = Plan::new(before.clone());
        plan.returned_with_gap(DriveId(4));
        assert_eq!(plan.next().behind(), BTreeSet::from([DriveId(4)]));
        let epoch = plan.next().record.map_epoch;
        plan.returned_with_gap(DriveId(4));
        assert_eq!(plan.next().record.map_epoch, epoch);
        let (done, after) = finished(&plan.into_next());
        assert_eq!((done.groups, done.empty.len()), (before.groups.len(), 0));
        assert!(after.behind().is_empty());
    }
}
