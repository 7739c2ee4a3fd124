//! Replaces drives that leave. As few positions move as possible; their new drives are chosen by weight.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use base::{DriveId, Epoch};

use super::{DriveSlot, PlacementGroup, Rebuilding};

/// Replaces each member that is in `gone` by a drive of `spare`, in a domain without other members of the group. A
/// member stays if there is no such drive. Returns only the groups that change.
///
/// `domains` has the domain of every drive, gone ones included. Each choice takes the drive with the fewest positions
/// for its weight, so that a lost drive is rebuilt onto all others. The same arguments give the same result.
pub fn replace_members(
    groups: &[PlacementGroup],
    gone: &BTreeSet<DriveId>,
    spare: &[DriveSlot],
    domains: &HashMap<DriveId, u64>,
) -> Vec<PlacementGroup> {
    let mut positions: BTreeMap<DriveId, u64> = spare.iter().map(|slot| (slot.drive, 0)).collect();
    for member in groups.iter().flat_map(|group| &group.members) {
        if let Some(count) = positions.get_mut(member) {
            *count += 1;
        }
    }
    let mut changed = Vec::new();
    for group in groups {
        let mut next = group.clone();
        for position in 0..next.members.len() {
            let leaving = next.members[position];
            if !gone.contains(&leaving) {
                continue;
            }
            let others = next.members.iter().enumerate().filter(|(other, _)| *other != position);
            let taken: BTreeSet<Option<&u64>> = others.map(|(_, member)| domains.get(member)).collect();
            let free =
                spare.iter().filter(|slot| slot.weight_bytes > 0 && !taken.contains(&Some(&slot.domain)));
            // Positions per weight, compared without a division.
            let load =
                |slot: &DriveSlot| (u128::from(positions[&slot.drive]) + 1, u128::from(slot.weight_bytes));
            let best = free.min_by(|one, other| {
                let ((one_count, one_weight), (other_count, other_weight)) = (load(one), load(other));
                (one_count * other_weight).cmp(&(other_count * one_weight)).then(one.drive.cmp(&other.drive))
            });
            let Some(best) = best else { continue };
            *positions.entry(best.drive).or_default() += 1;
            next.members[position] = best.drive;
            next.rebuilding.push(Rebuilding { position: position as u8, from: leaving });
        }
        if next.members != group.members {
            next.epoch = Epoch(group.epoch.0 + 1);
            changed.push(next);
        }
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Profile, plan_placement_groups, suggested_pg_count};
    use proptest::prelude::*;

    fn slots(drives: u32) -> Vec<DriveSlot> {
        let slot = |id| DriveSlot { drive: DriveId(id), domain: u64::from(id), weight_bytes: 1000 };
        (0..drives).map(slot).collect()
    }

    fn domains(drives: u32) -> HashMap<DriveId, u64> {
        (0..drives).map(|id| (DriveId(id), u64::from(id))).collect()
    }

    proptest! {
        #[test]
        fn only_lost_positions_move_to_other_domains_and_evenly(
            drives in 7u32..20, lost in 1u32..4, seed in any::<u64>(),
        ) {
            let profile: Profile = "4+2".parse().unwrap();
            let all = slots(drives);
            let groups =
                plan_placement_groups(&all, profile, suggested_pg_count(drives, 6), seed).unwrap();
            let gone: BTreeSet<DriveId> = (0..lost).map(DriveId).collect();
            let spare: Vec<DriveSlot> =
                all.iter().filter(|slot| !gone.contains(&slot.drive)).copied().collect();
            let changed = replace_members(&groups, &gone, &spare, &domains(drives));
            let enough = drives - lost >= 6;
            for group in &groups {
                let after = changed.iter().find(|other| other.id == group.id);
                let lost_here = group.members.iter().filter(|member| gone.contains(member)).count();
                prop_assert!(lost_here == 0 || !enough || after.is_some());
                let Some(after) = after else { continue };
                prop_assert_eq!(after.epoch, Epoch(2));
                let distinct: BTreeSet<&DriveId> = after.members.iter().collect();
                prop_assert_eq!(distinct.len(), 6);
                let moved = group.members.iter().zip(&after.members).filter(|(old, new)| old != new).count();
                prop_assert_eq!(moved, after.rebuilding.len());
                for rebuilding in &after.rebuilding {
                    let position = usize::from(rebuilding.position);
                    prop_assert_eq!(group.members[position], rebuilding.from);
                    prop_assert!(gone.contains(&rebuilding.from));
                    prop_assert!(!gone.contains(&after.members[position]));
                }
                prop_assert!(!enough || after.members.iter().all(|member| !gone.contains(member)));
            }
            // With more lost drives the choice is uneven, because of the groups that a drive is in already.
            if lost == 1 && drives >= 12 {
                let mut got: BTreeMap<DriveId, usize> = BTreeMap::new();
                for group in &changed {
                    for rebuilding in &group.rebuilding {
                        *got.entry(group.members[usize::from(rebuilding.position)]).or_default() += 1;
                    }
                }
                let most = got.values().max().copied().unwrap_or(0);
                let fair = changed.len().div_ceil(spare.len());
                prop_assert!(most <= fair + 3, "{most} of {} on one drive", changed.len());
            }
        }
    }

    #[test]
    fn a_group_stays_the_same_without_a_spare_domain() {
        let groups = vec![PlacementGroup::new(base::PgId(0), (0..6).map(DriveId).collect())];
        let gone = BTreeSet::from([DriveId(2)]);
        let spare: Vec<DriveSlot> = slots(6).into_iter().filter(|slot| slot.drive != DriveId(2)).collect();
        assert_eq!(replace_members(&groups, &gone, &spare, &domains(6)), []);
        let spare = slots(7).into_iter().filter(|slot| slot.drive != DriveId(2)).collect::<Vec<_>>();
        let changed = replace_members(&groups, &gone, &spare, &domains(7));
        assert_eq!(changed[0].members, [0, 1, 6, 3, 4, 5].map(DriveId));
        assert_eq!(changed[0].sources(2).collect::<Vec<_>>(), [DriveId(2)]);
        assert_eq!(changed[0].sources(1).next(), None);
    }

    #[test]
    fn a_member_that_returns_with_a_gap_is_rebuilt_onto_itself() {
        let group = PlacementGroup::new(base::PgId(0), (0..6).map(DriveId).collect());
        assert_eq!(group.returned_with_gap(DriveId(9)), None);
        let returned = group.returned_with_gap(DriveId(2)).unwrap();
        assert_eq!((returned.epoch.0, &returned.members), (group.epoch.0 + 1, &group.members));
        assert!(returned.is_rebuilding(2) && !returned.is_rebuilding(1));
        assert_eq!(returned.sources(2).next(), None, "it is no source of its own shards");
        assert_eq!(returned.returned().collect::<Vec<_>>(), [DriveId(2)]);
        assert_eq!(returned.returned_with_gap(DriveId(2)), None, "that is known");
        // Another drive takes over the position: the drive with the gap still has some of its shards.
        let gone = BTreeSet::from([DriveId(2)]);
        let spare = slots(7).into_iter().filter(|slot| slot.drive != DriveId(2)).collect::<Vec<_>>();
        let moved = &replace_members(&[returned], &gone, &spare, &domains(7))[0];
        assert_eq!(moved.sources(2).next(), Some(DriveId(2)));
        assert_eq!(moved.returned().next(), None);
    }
}
