//! Chooses the placement groups for new extents of a filesystem, by the drives that are up.
//!
//! While enough drives for the profile are up, groups of them are used. With fewer drives, extents get narrower: they
//! have fewer data shards and keep their parity, so that protection stays and writes go on. A drive that is away for a
//! short time does not make extents narrower: shards are owed to it, unless too few drives are left to acknowledge a
//! write.

use std::collections::BTreeSet;

use base::{DriveId, PgId};
use layout::{PlacementError, Profile};

use crate::{Cluster, FilesystemRecord, Plan, Seen};

/// Divisor of the number of groups: with fewer than this part having all members up, data would be spread unevenly.
const EVEN_PART: usize = 4;

/// Profile and groups for new extents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteSet {
    /// The profile.
    pub profile: Profile,
    /// The groups.
    pub groups: Vec<PgId>,
}

/// The decision about the groups of a filesystem.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Choice {
    /// Existing groups fit.
    Use(WriteSet),
    /// No group fits: groups of this profile must be planned over the drives that are up.
    Plan(Profile),
}

/// Whether drives have been away long enough to do without them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// They may come back.
    Left,
    /// They have been.
    Over,
}

/// Chooses from the groups of a filesystem.
fn choose_groups(
    record: &FilesystemRecord,
    cluster: &Cluster,
    up: &BTreeSet<DriveId>,
    patience: Patience,
) -> Choice {
    let rule = cluster.rule_or_last(record);
    let up_in = |pg: &PgId| {
        let members = cluster.groups.get(pg).map(|group| group.members.as_slice()).unwrap_or_default();
        members.iter().filter(|member| up.contains(member)).count()
    };
    let with_up = |groups: &[PgId], least: u8| -> Vec<PgId> {
        groups.iter().filter(|pg| up_in(pg) >= usize::from(least)).copied().collect()
    };
    let full = record.profile;
    let acknowledging = with_up(&record.groups, full.w());
    let as_it_is = || {
        // Even degraded groups acknowledge writes while w of their drives are up.
        let sets = record.all_sets().map(|(profile, groups)| (profile, with_up(groups, profile.w())));
        let widest = sets.filter(|(_, groups)| !groups.is_empty()).max_by_key(|(profile, _)| profile.k());
        // If none does, all are equally bad.
        let (profile, groups) = widest.unwrap_or_else(|| (full, record.groups.clone()));
        Choice::Use(WriteSet { profile, groups })
    };
    let Some(profile) = cluster.write_profile(record, up) else { return as_it_is() };
    if profile != full && patience == Patience::Left && !acknowledging.is_empty() {
        return as_it_is();
    }
    let of_profile = record.all_sets().filter(|(other, _)| *other == profile);
    let mut whole: Vec<PgId> = of_profile.flat_map(|(_, groups)| with_up(groups, profile.n())).collect();
    let follows = |pg: &PgId| cluster.groups.get(pg).is_some_and(|group| group.spread == rule);
    if whole.iter().any(follows) {
        whole.retain(follows);
    }
    let even = whole.len() * EVEN_PART >= record.groups.len().min(usize::from(profile.n()) * EVEN_PART);
    if !whole.is_empty() && (even || patience == Patience::Left || profile != full) {
        return Choice::Use(WriteSet { profile, groups: whole });
    }
    if profile == full && patience == Patience::Left && !acknowledging.is_empty() {
        return as_it_is();
    }
    Choice::Plan(profile)
}

impl Cluster {
    /// The profile of new extents of a filesystem while only these drives are up. `None` if not even the narrowest one fits.
    pub fn write_profile(&self, record: &FilesystemRecord, up: &BTreeSet<DriveId>) -> Option<Profile> {
        self.rule_or_last(record).narrowed(record.profile, &self.slots_for(record, up))
    }
}

impl Plan {
    /// Profile and groups for new extents of a filesystem, while these drives are up: without those that come and go, if the others
    /// have room for the whole profile. Plans groups if none fits.
    ///
    /// # Errors
    /// If there are too few drives for the groups. There always are enough for those that are planned by themselves.
    pub fn write_set(
        &mut self,
        mut record: FilesystemRecord,
        seen: &Seen,
        patience: Patience,
        seed: u64,
    ) -> Result<WriteSet, PlacementError> {
        let steady: BTreeSet<DriveId> = seen.up.difference(&seen.unsteady).copied().collect();
        let up = match self.next().write_profile(&record, &steady) == Some(record.profile) {
            true => &steady,
            false => &seen.up,
        };
        // A drive at another node is as good as one that is away: groups with it are used only where there is nothing better.
        let up = &self.next().usable_by(&record, up);
        match choose_groups(&record, self.next(), up, patience) {
            Choice::Use(set) => Ok(set),
            Choice::Plan(profile) => {
                let rule = self.next().rule_or_last(&record);
                let groups = self.plan_groups(up, (profile, rule), seed)?;
                record.add_groups(profile, groups.iter().copied());
                self.set_filesystem(record);
                Ok(WriteSet { profile, groups })
            }
        }
    }

    /// Adds a filesystem, with groups over the drives that are up.
    pub fn add_filesystem(
        &mut self,
        record: FilesystemRecord,
        up: &BTreeSet<DriveId>,
        seed: u64,
    ) -> Result<(), PlacementError> {
        let rule = self.next().rule(&record)?;
        let up = self.next().usable_by(&record, up);
        let groups = self.plan_groups(&up, (record.profile, rule), seed)?;
        self.set_filesystem(FilesystemRecord { groups, ..record });
        Ok(())
    }

    /// Changes the profile of new extents. Groups over the drives that are up are planned, unless there are some from earlier.
    pub fn set_profile(
        &mut self,
        mut record: FilesystemRecord,
        profile: Profile,
        up: &BTreeSet<DriveId>,
        seed: u64,
    ) -> Result<(), PlacementError> {
        record.set_profile(profile);
        let rule = self.next().rule(&record)?;
        // While drives are away, groups may have to be narrower: then they are planned with the next choice.
        let up = self.next().usable_by(&record, up);
        if record.groups.is_empty()
            && rule.narrowed(profile, &self.next().slots_for(&record, &up)) == Some(profile)
        {
            record.groups = self.plan_groups(&up, (profile, rule), seed)?;
        }
        self.set_filesystem(record);
        Ok(())
    }

    /// The number for a new filesystem.
    pub fn next_filesystem(&mut self) -> u32 {
        let id = self.next().record.next_filesystem;
        self.set_cluster(|cluster| cluster.next_filesystem += 1);
        id
    }
}

#[cfg(test)]
mod tests {
    use base::env::Env;
    use base::{DriveUuid, NodeId};
    use layout::DriveState;
    use wire::drive::DriveMark;

    use super::*;
    use crate::{Control, DriveRecord, ScrubRecord};

    /// A cluster with one filesystem.
    struct World(Cluster);

    fn drive(id: u32) -> DriveRecord {
        DriveRecord {
            id: DriveId(id),
            uuid: DriveUuid([0; 16]),
            node: NodeId(0),
            capacity_bytes: 1,
            state: DriveState::Up,
            scrub: ScrubRecord::default(),
            mark: DriveMark::default(),
            may_know_lost: false,
        }
    }

    fn cluster(drives: u32, profile: &str) -> World {
        let mut plan = Plan::new(Cluster::new(Control::new_cluster(&Env::real())));
        (0..drives).for_each(|id| plan.set_drive(drive(id)));
        let record = FilesystemRecord {
            name: "main".to_owned(),
            ..FilesystemRecord::new(1, profile.parse().unwrap())
        };
        plan.add_filesystem(record, &(0..drives).map(DriveId).collect(), 1).unwrap();
        World(plan.into_next())
    }

    impl World {
        fn record(&self) -> &FilesystemRecord {
            &self.0.filesystems[&1]
        }

        fn members(&self, pg: &PgId) -> &[DriveId] {
            &self.0.groups[pg].members
        }

        /// Plans groups if necessary. Returns the final choice, and whether groups were planned.
        fn settle(&mut self, up: &[u32], patience: Patience) -> (WriteSet, bool) {
            self.settle_with(up, &[], patience)
        }

        /// As [`World::settle`], while some of them come and go.
        fn settle_with(&mut self, up: &[u32], unsteady: &[u32], patience: Patience) -> (WriteSet, bool) {
            let ids = |drives: &[u32]| drives.iter().copied().map(DriveId).collect::<BTreeSet<DriveId>>();
            let seen = Seen { up: ids(up), unsteady: ids(unsteady), ..Seen::default() };
            let mut plan = Plan::new(self.0.clone());
            let set = plan.write_set(self.record().clone(), &seen, patience, 1).unwrap();
            let planned = !plan.is_empty();
            self.0 = plan.into_next();
            let mut again = Plan::new(self.0.clone());
            let next = again.write_set(self.record().clone(), &seen, patience, 1).unwrap();
            assert!(again.is_empty(), "planned twice for the same drives");
            assert_eq!(next, set);
            (set, planned)
        }

        #[track_caller]
        fn check(&mut self, up: &[u32], patience: Patience, profile: &str, planned: bool) {
            let (set, did_plan) = self.settle(up, patience);
            assert_eq!((set.profile.to_string().as_str(), did_plan), (profile, planned));
            let can_write = set.groups.iter().all(|pg| {
                let members = self.members(pg);
                members.iter().filter(|member| up.contains(&member.0)).count() >= usize::from(set.profile.w())
            });
            assert!(can_write && !set.groups.is_empty());
        }
    }

    use Patience::{Left, Over};

    #[test]
    fn a_short_absence_leaves_shards_owed_and_a_long_one_makes_extents_narrower() {
        let mut c = cluster(6, "4+2");
        c.check(&[0, 1, 2, 3, 4, 5], Over, "4+2", false);
        c.check(&[0, 1, 2, 4, 5], Left, "4+2", false);
        c.check(&[0, 1, 2, 4, 5], Over, "3+2", true);
        c.check(&[0, 1, 2, 4, 5], Over, "3+2", false);
        c.check(&[0, 1, 2, 3, 4, 5], Left, "4+2", false);
        c.check(&[0, 1, 2, 4, 5], Over, "3+2", false);
        c.check(&[0, 1, 2, 3, 4], Over, "3+2", true);
        assert_eq!(c.record().sets.len(), 1, "both are in one set");
    }

    #[test]
    fn with_too_few_to_acknowledge_extents_get_narrower_at_once() {
        let mut c = cluster(6, "4+2");
        c.check(&[0, 1, 4, 5], Left, "2+2", true);
        c.check(&[0, 4, 5], Left, "r3", true);
        c.check(&[0, 1, 4, 5], Left, "2+2", false);
        let mut c = cluster(12, "12/7/9");
        c.check(&[0, 1, 2, 3, 4, 5, 6, 7, 8], Left, "12/7/9", false);
        c.check(&[0, 1, 2, 3, 4, 5, 6, 7, 8], Over, "9/4/6", true);
        c.check(&[0, 1, 2, 3, 4, 5, 6, 7], Left, "8/3/5", true);
        c.check(&[0, 1, 2, 3, 4, 5], Left, "6/1/3", true);
    }

    #[test]
    fn with_drives_to_spare_groups_that_are_whole_are_used_and_planned_where_few_are() {
        let mut c = cluster(12, "4+2");
        c.check(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], Left, "4+2", false);
        let (set, _) = c.settle(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], Left);
        assert!(set.groups.iter().all(|pg| !c.members(pg).contains(&DriveId(0))));
        c.check(&[0, 1, 2, 3, 4, 5], Over, "4+2", true);
        c.check(&[0, 1, 2, 3, 4, 5], Over, "4+2", false);
        c.check(&[0, 1, 2, 3, 4], Over, "3+2", true);
    }

    #[test]
    fn drives_that_come_and_go_are_spared_where_others_suffice() {
        let all: Vec<u32> = (0..12).collect();
        let mut c = cluster(12, "4+2");
        let (set, planned) = c.settle_with(&all, &[0, 1], Left);
        assert!(set.profile == c.record().profile && !planned, "{set:?}");
        let spared = |c: &World, set: &WriteSet, drive: u32| {
            set.groups.iter().all(|pg| !c.members(pg).contains(&DriveId(drive)))
        };
        assert!(spared(&c, &set, 0) && spared(&c, &set, 1));
        let (set, _) = c.settle(&all, Left);
        assert!(!spared(&c, &set, 0), "steady again");
        let mut c = cluster(6, "4+2");
        let (set, planned) = c.settle_with(&[0, 1, 2, 3, 4, 5], &[0], Over);
        assert_eq!(
            (set.profile.to_string().as_str(), planned),
            ("4+2", false),
            "nothing gets narrower for them"
        );
    }

    #[test]
    fn a_narrow_group_that_lost_a_drive_is_better_than_none() {
        let mut c = cluster(6, "4+2");
        c.check(&[2, 3, 5], Left, "r3", true);
        c.check(&[3, 5], Left, "r3", false);
        c.check(&[3, 5], Over, "r3", false);
    }

    #[test]
    fn without_a_domain_per_copy_nothing_changes() {
        let mut c = cluster(6, "4+2");
        let (set, planned) = c.settle(&[0, 1], Over);
        assert_eq!((set.profile.to_string().as_str(), planned), ("4+2", false));
    }

    #[test]
    fn every_set_of_drives_that_may_be_lost_leaves_a_way_to_write() {
        let mut c = cluster(6, "4+2");
        for lost in 0u32..64 {
            let up: Vec<u32> = (0..6).filter(|drive| lost & (1 << drive) == 0).collect();
            if up.len() >= 3 {
                for patience in [Left, Over] {
                    let (set, _) = c.settle(&up, patience);
                    let reach = |pg: &PgId| {
                        let members = c.members(pg);
                        members.iter().filter(|member| up.contains(&member.0)).count()
                    };
                    assert!(set.groups.iter().any(|pg| reach(pg) >= usize::from(set.profile.w())), "{up:?}");
                }
            }
        }
    }

    #[test]
    fn a_new_profile_has_its_own_groups_and_the_old_ones_are_found_again() {
        let mut c = cluster(6, "4+2");
        let before = c.record().groups.clone();
        c.0.filesystems.get_mut(&1).unwrap().set_profile("r3".parse().unwrap());
        c.check(&[0, 1, 2, 3, 4, 5], Left, "r3", true);
        c.0.filesystems.get_mut(&1).unwrap().set_profile("4+2".parse().unwrap());
        assert_eq!(c.record().groups, before);
        c.check(&[0, 1, 2, 3, 4, 5], Left, "4+2", false);
    }
}
