//! Replaces drives that leave. As few positions move as possible; their new drives are chosen by the rule of the group,
//! then for evenness, then by weight.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use base::{DriveId, Epoch};

use super::fair::{Bounds, Fair};
use super::{DriveSlot, FailureDomain, Place, PlacementGroup, Rebuilding, Spread};

/// Replaces each member that is in `gone` by a drive of `spare` that is not in the group and in whose domain, by the
/// group's rule, is room. A member stays if there is no such drive. Returns only the groups that change.
///
/// `places` has the place of every drive, gone ones included; spare drives have their own. Only positions of gone drives
/// move. Of the drives with room, those in a zone, rack and node with fewer members of the group than their share come
/// first, then those with the fewest positions for their weight, so that a lost drive is rebuilt onto all others. The
/// same arguments give the same result.
pub fn replace_members(
    groups: &[PlacementGroup],
    gone: &BTreeSet<DriveId>,
    spare: &[DriveSlot],
    places: &HashMap<DriveId, Place>,
) -> Vec<PlacementGroup> {
    let mut hosts = Hosts::new(groups, spare);
    let mut fair: BTreeMap<(Spread, usize), Vec<Bounds>> = BTreeMap::new();
    let mut changed = Vec::new();
    for group in groups.iter().filter(|group| group.members.iter().any(|member| gone.contains(member))) {
        let bounds = fair.entry((group.spread, group.members.len())).or_insert_with_key(|(spread, n)| {
            let fair = Fair::new(spare, *spread, *n);
            hosts.hosts.iter().map(|host| fair.bounds(host.place)).collect()
        });
        let mut next = group.clone();
        // Once is enough: a drive that moves away makes room only where no spare drive was left for it to stay.
        for position in 0..next.members.len() {
            let leaving = next.members[position];
            let found =
                if gone.contains(&leaving) { hosts.take(&next, position, places, bounds) } else { None };
            if let Some(drive) = found {
                next.members[position] = drive;
                next.rebuilding.push(Rebuilding { position: position as u8, from: leaving });
            }
        }
        if next.members != group.members {
            next.epoch = Epoch(group.epoch.0 + 1);
            changed.push(next);
        }
    }
    changed
}

/// Gives the drives `back` the positions again that others are taking over from them, where the rules of the groups allow it. What was
/// written since then is on those others, which stay sources. Returns the changed groups.
pub fn return_members(
    groups: &[PlacementGroup],
    back: &BTreeSet<DriveId>,
    places: &HashMap<DriveId, Place>,
) -> Vec<PlacementGroup> {
    let mut changed = Vec::new();
    for group in groups {
        let mut next = group.clone();
        for position in 0..next.members.len() {
            let mut sources = next.sources(position as u8);
            let Some(from) = sources.find(|from| back.contains(from)) else { continue };
            drop(sources);
            let others = others_of(&next, position, places);
            let fits = places.get(&from).is_some_and(|place| has_room(next.spread, &others, *place));
            if !fits || next.members.contains(&from) {
                continue;
            }
            let until_now = std::mem::replace(&mut next.members[position], from);
            let position = position as u8;
            next.rebuilding.retain(|one| *one != Rebuilding { position, from });
            next.rebuilding.push(Rebuilding { position, from: until_now });
        }
        if next.members != group.members {
            next.epoch = Epoch(group.epoch.0 + 1);
            changed.push(next);
        }
    }
    changed
}

/// The members at other positions that have a place.
fn others_of(
    group: &PlacementGroup,
    position: usize,
    places: &HashMap<DriveId, Place>,
) -> Vec<(DriveId, Place)> {
    let others = group.members.iter().enumerate().filter(|(other, _)| *other != position);
    others.filter_map(|(_, member)| places.get(member).map(|place| (*member, *place))).collect()
}

/// Whether a rule allows one more member at a place.
fn has_room(rule: Spread, others: &[(DriveId, Place)], place: Place) -> bool {
    let Spread { level, .. } = rule;
    level == FailureDomain::Drive || {
        let domain = place.domain(level, DriveId(0));
        let inside = others.iter().filter(|(drive, place)| place.domain(level, *drive) == domain);
        inside.count() < rule.most().into()
    }
}

/// Spare drives by place, and in each place by load.
struct Hosts {
    hosts: Vec<Host>,
}

struct Host {
    place: Place,
    drives: BTreeSet<Load>,
}

impl Hosts {
    fn new(groups: &[PlacementGroup], spare: &[DriveSlot]) -> Self {
        let mut loads: BTreeMap<DriveId, Load> = BTreeMap::new();
        for slot in spare.iter().filter(|slot| slot.weight_bytes > 0) {
            loads.insert(slot.drive, Load { positions: 1, weight: slot.weight_bytes, drive: slot.drive });
        }
        for member in groups.iter().flat_map(|group| &group.members) {
            if let Some(load) = loads.get_mut(member) {
                load.positions += 1;
            }
        }
        let mut hosts: BTreeMap<Place, BTreeSet<Load>> = BTreeMap::new();
        for slot in spare {
            if let Some(load) = loads.remove(&slot.drive) {
                hosts.entry(slot.place).or_default().insert(load);
            }
        }
        Self { hosts: hosts.into_iter().map(|(place, drives)| Host { place, drives }).collect() }
    }

    /// The best drive for a position of the group. It counts as used from now on.
    fn take(
        &mut self,
        group: &PlacementGroup,
        position: usize,
        places: &HashMap<DriveId, Place>,
        bounds: &[Bounds],
    ) -> Option<DriveId> {
        let others = others_of(group, position, places);
        let candidates = self.hosts.iter().enumerate();
        let candidates = candidates.filter(|(_, host)| has_room(group.spread, &others, host.place));
        let best = candidates.filter_map(|(at, host)| {
            let load = host.drives.iter().find(|load| !group.members.contains(&load.drive))?;
            Some((bounds[at].unevenness(others.iter().map(|(_, place)| *place)), *load, at))
        });
        let (_, load, at) = best.min()?;
        let drives = &mut self.hosts[at].drives;
        drives.remove(&load);
        drives.insert(Load { positions: load.positions + 1, ..load });
        Some(load.drive)
    }
}

/// The positions of a drive, with one more, for its weight.
#[derive(Debug, Clone, Copy)]
struct Load {
    positions: u64,
    weight: u64,
    drive: DriveId,
}

impl Ord for Load {
    fn cmp(&self, other: &Self) -> Ordering {
        // Positions per weight, compared without a division.
        let one = u128::from(self.positions) * u128::from(other.weight);
        one.cmp(&(u128::from(other.positions) * u128::from(self.weight))).then(self.drive.cmp(&other.drive))
    }
}

impl PartialOrd for Load {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Load {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Load {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Profile, plan_placement_groups, suggested_pg_count};
    use proptest::prelude::*;

    fn place(node: u32) -> Place {
        Place { node, ..Place::default() }
    }

    fn slots(drives: u32) -> Vec<DriveSlot> {
        let slot = |id| DriveSlot { drive: DriveId(id), place: place(id), weight_bytes: 1000 };
        (0..drives).map(slot).collect()
    }

    fn places(drives: u32) -> HashMap<DriveId, Place> {
        (0..drives).map(|id| (DriveId(id), place(id))).collect()
    }

    proptest! {
        #[test]
        fn only_lost_positions_move_to_other_domains_and_evenly(
            drives in 7u32..20, lost in 1u32..4, seed in any::<u64>(),
        ) {
            let profile: Profile = "4+2".parse().unwrap();
            let all = slots(drives);
            let groups =
                plan_placement_groups(&all, profile, Spread::default(), suggested_pg_count(drives, 6), seed).unwrap();
            let gone: BTreeSet<DriveId> = (0..lost).map(DriveId).collect();
            let spare: Vec<DriveSlot> =
                all.iter().filter(|slot| !gone.contains(&slot.drive)).copied().collect();
            let changed = replace_members(&groups, &gone, &spare, &places(drives));
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
        assert_eq!(replace_members(&groups, &gone, &spare, &places(6)), []);
        let spare = slots(7).into_iter().filter(|slot| slot.drive != DriveId(2)).collect::<Vec<_>>();
        let changed = replace_members(&groups, &gone, &spare, &places(7));
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
        let moved = &replace_members(&[returned], &gone, &spare, &places(7))[0];
        assert_eq!(moved.sources(2).next(), Some(DriveId(2)));
        assert_eq!(moved.returned().next(), None);
    }
}
