//! How many failure domains may be lost before data or writes are.

use std::collections::{BTreeMap, HashMap};

use base::DriveId;

use super::{DriveSlot, FailureDomain, Place, PlacementGroup, Spread};
use crate::Profile;

/// How many more domains of `level` may be lost, whichever they are, so that every extent of every group can still be
/// read. -1 if a group cannot be read already; `i32::MAX` without groups.
///
/// `is_whole` says whether the member of a group at a position answers and has all its shards. A drive that is not in
/// `places` is a domain of its own.
pub fn losses_survived<'a>(
    groups: impl IntoIterator<Item = (&'a PlacementGroup, Profile)>,
    is_whole: impl Fn(&PlacementGroup, u8) -> bool,
    places: &HashMap<DriveId, Place>,
    level: FailureDomain,
) -> i32 {
    let survived = |(group, profile): (&PlacementGroup, Profile)| {
        losses_above(group, profile.k(), &is_whole, places, level)
    };
    groups.into_iter().map(survived).min().unwrap_or(i32::MAX)
}

/// How many more domains of `level` may be lost, whichever they are, so that some group acknowledges extents of its own
/// profile: w of its members answer. -1 if no group does so now.
///
/// For groups as they are, without new ones. [`writes_survive`] is about new ones; the greater of both holds.
pub fn acknowledgements_survive<'a>(
    groups: impl IntoIterator<Item = (&'a PlacementGroup, Profile)>,
    answers: impl Fn(&PlacementGroup, u8) -> bool,
    places: &HashMap<DriveId, Place>,
    level: FailureDomain,
) -> i32 {
    let survived = |(group, profile): (&PlacementGroup, Profile)| {
        losses_above(group, profile.w(), &answers, places, level)
    };
    groups.into_iter().map(survived).max().unwrap_or(-1)
}

/// How many more domains of `level` may be lost, whichever they are, so that groups for new extents can be planned under
/// the rule, narrower if needed: see [`Spread::narrowed`]. -1 if there are too few drives already.
pub fn writes_survive(spread: Spread, profile: Profile, up: &[DriveSlot], level: FailureDomain) -> i32 {
    let places = spread.places(up);
    // With this many places less, not even one data shard fits beside the parity.
    let Some(needless) = places.checked_sub(profile.m().into()).filter(|needless| *needless > 0) else {
        return -1;
    };
    let lost = if level < spread.level {
        fewest_inside(spread, up, level, needless as usize)
    } else {
        // A domain of this level holds whole domains of the rule, and each of these takes its places with it. So the
        // places of domains add up, and no choice of as many domains takes more places than the largest ones.
        let mut inside: BTreeMap<u64, Vec<DriveSlot>> = BTreeMap::new();
        for slot in up {
            inside.entry(slot.place.domain(level, slot.drive)).or_default().push(*slot);
        }
        let mut places: Vec<u32> = inside.values().map(|drives| spread.places(drives)).collect();
        places.sort_unstable_by(|one, other| other.cmp(one));
        let mut taken = 0;
        let enough = |places: &u32| {
            taken += places;
            taken >= needless
        };
        places.iter().position(enough).map_or(places.len(), |at| at + 1)
    };
    lost as i32 - 1
}

/// The fewest domains of `level`, below the level of the rule, that take `needless` places with them.
///
/// A domain of the rule has more drives than places, so losing a part of it may take nothing: the places do not add up.
/// Within a domain of the rule the largest parts are the worst. Over these domains, `fewest[taken]` is the fewest parts
/// that take at least `taken` places, found for one domain after the other.
fn fewest_inside(spread: Spread, up: &[DriveSlot], level: FailureDomain, needless: usize) -> usize {
    let mut domains: BTreeMap<u64, BTreeMap<u64, usize>> = BTreeMap::new();
    for slot in up.iter().filter(|slot| slot.weight_bytes > 0) {
        let domain = domains.entry(slot.place.domain(spread.level, slot.drive)).or_default();
        *domain.entry(slot.place.domain(level, slot.drive)).or_default() += 1;
    }
    let mut fewest = vec![usize::MAX; needless + 1];
    fewest[0] = 0;
    for parts in domains.into_values() {
        let mut sizes: Vec<usize> = parts.into_values().collect();
        sizes.sort_unstable_by(|one, other| other.cmp(one));
        let drives: usize = sizes.iter().sum();
        let places = drives.min(spread.most().into());
        let mut options: Vec<(usize, usize)> = Vec::new();
        let mut drives_left = drives;
        for (lost, size) in (1..).zip(sizes) {
            drives_left -= size;
            let taken = places - drives_left.min(places);
            if taken > options.last().map_or(0, |(_, taken)| *taken) {
                options.push((lost, taken));
            }
        }
        for taken in (0..=needless).rev().filter(|_| !options.is_empty()) {
            let with =
                |(lost, more): &(usize, usize)| fewest[taken.saturating_sub(*more)].saturating_add(*lost);
            let best = options.iter().map(with).min().unwrap_or(usize::MAX);
            fewest[taken] = fewest[taken].min(best);
        }
    }
    fewest[needless]
}

/// How many more domains may be lost so that at least `least` members of the group are left.
fn losses_above(
    group: &PlacementGroup,
    least: u8,
    counts: impl Fn(&PlacementGroup, u8) -> bool,
    places: &HashMap<DriveId, Place>,
    level: FailureDomain,
) -> i32 {
    let mut members: BTreeMap<Result<u64, DriveId>, usize> = BTreeMap::new();
    for (position, drive) in (0u8..).zip(&group.members) {
        if counts(group, position) {
            let domain = places.get(drive).map(|place| place.domain(level, *drive)).ok_or(*drive);
            *members.entry(domain).or_default() += 1;
        }
    }
    let mut left: usize = members.values().sum();
    let least = usize::from(least);
    if left < least {
        return -1;
    }
    // The domains with the most members are the worst to lose: no choice of as many takes more.
    let mut sizes: Vec<usize> = members.into_values().collect();
    sizes.sort_unstable_by(|one, other| other.cmp(one));
    let mut survived = 0;
    for size in sizes {
        left -= size;
        if left < least {
            break;
        }
        survived += 1;
    }
    survived
}
