//! Chooses the placement groups for new extents of a filesystem, by the drives that are up.
//!
//! While enough drives for the profile are up, groups of them are used. With fewer drives, extents get narrower: they
//! have fewer data shards and keep their parity, so that protection stays and writes go on. A drive that is away for a
//! short time does not make extents narrower: shards are owed to it, unless too few drives are left to acknowledge a
//! write.

use std::collections::BTreeSet;

use base::{DriveId, PgId};
use layout::{ClusterMap, Profile};
use meta::control::FilesystemRecord;

/// Divisor of the number of groups: with fewer than this part having all members up, data would be spread unevenly.
const EVEN_PART: usize = 4;

/// Profile and groups for new extents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WriteSet {
    pub(super) profile: Profile,
    pub(super) groups: Vec<PgId>,
}

/// The decision about the groups of a filesystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Choice {
    /// Existing groups fit.
    Use(WriteSet),
    /// No group fits: groups of this profile must be planned over the drives that are up.
    Plan(Profile),
}

/// Whether drives have been away long enough to do without them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    Left,
    Over,
}

/// Chooses from the groups of a filesystem.
pub(super) fn choose_groups(
    record: &FilesystemRecord,
    map: &ClusterMap,
    up: &BTreeSet<DriveId>,
    patience: Patience,
) -> Choice {
    let domains: BTreeSet<u64> =
        up.iter().filter_map(|drive| map.drive(*drive)).map(|drive| drive.domain).collect();
    let up_in = |pg: &PgId| {
        let members = map.group(*pg).map(|group| group.members.as_slice()).unwrap_or_default();
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
    let Some(profile) = full.narrowed(domains.len() as u32) else { return as_it_is() };
    if profile != full && patience == Patience::Left && !acknowledging.is_empty() {
        return as_it_is();
    }
    let of_profile = record.all_sets().filter(|(other, _)| *other == profile);
    let whole: Vec<PgId> = of_profile.flat_map(|(_, groups)| with_up(groups, profile.n())).collect();
    let even = whole.len() * EVEN_PART >= record.groups.len().min(usize::from(profile.n()) * EVEN_PART);
    if !whole.is_empty() && (even || patience == Patience::Left || profile != full) {
        return Choice::Use(WriteSet { profile, groups: whole });
    }
    if profile == full && patience == Patience::Left && !acknowledging.is_empty() {
        return as_it_is();
    }
    Choice::Plan(profile)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::{DriveUuid, Epoch, LedgerId};
    use layout::{DriveSlot, DriveState, MapDrive, PlacementGroup, plan_placement_groups};

    struct Cluster {
        record: FilesystemRecord,
        map: ClusterMap,
    }

    fn cluster(drives: u32, profile: &str) -> Cluster {
        let profile: Profile = profile.parse().unwrap();
        let record = FilesystemRecord {
            id: 1,
            name: "main".to_owned(),
            ledger: LedgerId(1),
            profile,
            groups: Vec::new(),
            sets: Vec::new(),
            provisioned_bytes: None,
            ssd_bytes: None,
            mount: None,
            mount_options: String::new(),
            tier: None,
            filesystem_group: None,
        };
        let drive = |id| MapDrive {
            id: DriveId(id),
            uuid: DriveUuid([0; 16]),
            domain: u64::from(id),
            state: DriveState::Up,
        };
        let drives: Vec<MapDrive> = (0..drives).map(drive).collect();
        let map = ClusterMap { epoch: Epoch(1), drives, groups: Vec::new() };
        let mut cluster = Cluster { record, map };
        let all = cluster.map.drives.iter().map(|drive| drive.id).collect();
        cluster.plan(profile, &all);
        cluster
    }

    impl Cluster {
        fn plan(&mut self, profile: Profile, up: &BTreeSet<DriveId>) {
            let slots: Vec<DriveSlot> = up
                .iter()
                .map(|drive| DriveSlot { drive: *drive, domain: drive.0.into(), weight_bytes: 1 })
                .collect();
            let first = self.map.groups.len() as u32;
            let groups = plan_placement_groups(&slots, profile, 30, 1).unwrap();
            let ids: Vec<PgId> = (first..first + 30).map(PgId).collect();
            for (id, group) in ids.iter().zip(groups) {
                self.map.groups.push(PlacementGroup { id: *id, ..group });
            }
            self.record.add_groups(profile, ids);
        }

        /// Plans groups if necessary. Returns the final choice, and whether groups were planned.
        fn settle(&mut self, up: &[u32], patience: Patience) -> (WriteSet, bool) {
            let up: BTreeSet<DriveId> = up.iter().copied().map(DriveId).collect();
            let mut planned = false;
            for _ in 0..2 {
                match choose_groups(&self.record, &self.map, &up, patience) {
                    Choice::Use(set) => return (set, planned),
                    Choice::Plan(profile) => {
                        self.plan(profile, &up);
                        planned = true;
                    }
                }
            }
            panic!("planned twice for the same drives");
        }

        #[track_caller]
        fn check(&mut self, up: &[u32], patience: Patience, profile: &str, planned: bool) {
            let (set, did_plan) = self.settle(up, patience);
            assert_eq!((set.profile.to_string().as_str(), did_plan), (profile, planned));
            let can_write = set.groups.iter().all(|pg| {
                let members = &self.map.group(*pg).unwrap().members;
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
        assert_eq!(c.record.sets.len(), 1, "both are in one set");
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
        assert!(set.groups.iter().all(|pg| !c.map.group(*pg).unwrap().members.contains(&DriveId(0))));
        c.check(&[0, 1, 2, 3, 4, 5], Over, "4+2", true);
        c.check(&[0, 1, 2, 3, 4, 5], Over, "4+2", false);
        c.check(&[0, 1, 2, 3, 4], Over, "3+2", true);
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
                        let members = &c.map.group(*pg).unwrap().members;
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
        let before = c.record.groups.clone();
        c.record.set_profile("r3".parse().unwrap());
        c.check(&[0, 1, 2, 3, 4, 5], Left, "r3", true);
        c.record.set_profile("4+2".parse().unwrap());
        assert_eq!(c.record.groups, before);
        c.check(&[0, 1, 2, 3, 4, 5], Left, "4+2", false);
    }
}
