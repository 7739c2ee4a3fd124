use super::*;
use proptest::prelude::*;
use std::collections::{BTreeSet, HashMap};

const NODES: Spread = Spread { level: FailureDomain::Node, per_domain: 1 };

fn node(node: u32) -> Place {
    Place { node, ..Place::default() }
}

/// `domains` domains of `drives` equal drives each.
fn equal_drives(domains: u32, drives: u32) -> Vec<DriveSlot> {
    (0..domains * drives)
        .map(|id| DriveSlot { drive: DriveId(id), place: node(id / drives), weight_bytes: 1 << 40 })
        .collect()
}

fn plan(drives: &[DriveSlot], profile: &str, count: u32, seed: u64) -> Vec<PlacementGroup> {
    plan_placement_groups(drives, profile.parse().unwrap(), NODES, count, seed).unwrap()
}

/// How often each drive appears in each position.
fn appearances(groups: &[PlacementGroup], n: usize) -> HashMap<DriveId, Vec<u32>> {
    let mut counts: HashMap<DriveId, Vec<u32>> = HashMap::new();
    for group in groups {
        for (position, drive) in group.members.iter().enumerate() {
            counts.entry(*drive).or_insert_with(|| vec![0; n])[position] += 1;
        }
    }
    counts
}

/// Checks every plan's invariants: shape, distinct domains, even positions.
fn check_plan(drives: &[DriveSlot], groups: &[PlacementGroup], n: usize, count: u32) {
    let domain_of: HashMap<DriveId, u32> = drives.iter().map(|slot| (slot.drive, slot.place.node)).collect();
    assert_eq!(groups.len(), count as usize);
    for (index, group) in groups.iter().enumerate() {
        assert_eq!((group.id, group.epoch), (PgId(index as u32), Epoch(1)));
        let domains: BTreeSet<u32> = group.members.iter().map(|drive| domain_of[drive]).collect();
        assert_eq!((group.members.len(), domains.len()), (n, n), "{group:?}");
    }
    for (drive, positions) in appearances(groups, n) {
        let (least, most) = (positions.iter().min().unwrap(), positions.iter().max().unwrap());
        assert!(most - least <= 1, "drive {drive} by position: {positions:?}");
    }
}

#[test]
fn equal_drives_appear_equally_often_in_every_position() {
    for (domains, per_domain, profile) in
        [(6, 1, "4+2"), (6, 4, "4+2"), (10, 3, "8+2"), (3, 1, "r3"), (13, 2, "9+3")]
    {
        let drives = equal_drives(domains, per_domain);
        let n = profile.parse::<Profile>().unwrap().n();
        let count = suggested_pg_count(drives.len() as u32, n);
        let groups = plan(&drives, profile, count, 1);
        check_plan(&drives, &groups, n.into(), count);
        let totals: Vec<u32> =
            appearances(&groups, n.into()).values().map(|counts| counts.iter().sum()).collect();
        assert_eq!(totals.len(), drives.len());
        let exact = f64::from(count) * f64::from(n) / drives.len() as f64;
        assert!(totals.iter().all(|total| (f64::from(*total) - exact).abs() < 2.0), "{exact} {totals:?}");
    }
}

#[test]
fn every_pair_of_domains_meets_about_equally_often() {
    let groups = plan(&equal_drives(12, 1), "4+2", 200, 9);
    let mut pairs: HashMap<(DriveId, DriveId), u32> = HashMap::new();
    for group in &groups {
        for (a, b) in group.members.iter().flat_map(|a| group.members.iter().map(move |b| (*a, *b))) {
            if a < b {
                *pairs.entry((a, b)).or_default() += 1;
            }
        }
    }
    // 200 groups x 15 pairs over 66 pairs of drives.
    let mean = 200.0 * 15.0 / 66.0;
    assert_eq!(pairs.len(), 66);
    assert!(pairs.values().all(|count| (f64::from(*count) - mean).abs() < 0.1 * mean), "{mean} {pairs:?}");
}

#[test]
fn a_drive_meets_every_drive_of_the_other_domains() {
    let groups = plan(&equal_drives(3, 4), "r3", 400, 9);
    let pairs: HashMap<(DriveId, DriveId), u32> = groups.iter().fold(HashMap::new(), |mut pairs, group| {
        for (a, b) in group.members.iter().flat_map(|a| group.members.iter().map(move |b| (*a, *b))) {
            *pairs.entry((a, b)).or_default() += u32::from(a < b);
        }
        pairs
    });
    let met: Vec<u32> = pairs.into_values().filter(|count| *count > 0).collect();
    // 400 groups x 3 pairs over 3 x 16 pairs of drives: 25 each, by chance.
    assert_eq!(met.len(), 48);
    assert!(met.iter().all(|count| (10..=45).contains(count)), "{met:?}");
}

#[test]
fn a_domain_too_large_for_its_share_is_in_every_group() {
    let mut drives = equal_drives(4, 1);
    drives[0].weight_bytes <<= 3;
    let groups = plan(&drives, "r3", 90, 5);
    check_plan(&drives, &groups, 3, 90);
    let totals: Vec<u32> = {
        let counts = appearances(&groups, 3);
        (0..4).map(|drive| counts[&DriveId(drive)].iter().sum()).collect()
    };
    assert_eq!(totals, [90, 60, 60, 60]);
}

#[test]
fn too_few_domains_are_refused_with_both_numbers() {
    let profile: Profile = "4+2".parse().unwrap();
    let error = plan_placement_groups(&equal_drives(5, 8), profile, NODES, 10, 0).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("needed=6 present=5 level=node places=5") && text.contains("4+2"), "{text}");

    let mut drives = equal_drives(6, 1);
    drives[2].weight_bytes = 0;
    assert!(
        plan_placement_groups(&drives, profile, NODES, 10, 0).is_err(),
        "a domain without weight takes no data"
    );
}

#[test]
fn a_drive_listed_twice_is_refused() {
    let mut drives = equal_drives(3, 1);
    drives[2].drive = DriveId(0);
    let error = plan_placement_groups(&drives, "r2".parse().unwrap(), NODES, 10, 0).unwrap_err();
    assert_eq!(error, PlacementError::DuplicateDrive { drive: DriveId(0) });
}

#[test]
fn one_drive_is_enough_for_one_copy() {
    let groups = plan(&equal_drives(1, 1), "1+0", 4, 0);
    assert!(groups.iter().all(|group| group.members == [DriveId(0)]));
}

#[test]
fn only_the_seed_decides() {
    let drives = equal_drives(8, 2);
    let mut reversed = drives.clone();
    reversed.reverse();
    assert_eq!(plan(&drives, "4+2", 50, 3), plan(&reversed, "4+2", 50, 3));
    assert_ne!(plan(&drives, "4+2", 50, 3), plan(&drives, "4+2", 50, 4));
}

#[test]
fn a_large_cluster_is_planned_in_reasonable_time() {
    let drives = equal_drives(120, 10);
    let count = suggested_pg_count(1200, 12);
    assert_eq!(count, 10_000);
    check_plan(&drives, &plan(&drives, "9+3", count, 2), 12, count);
}

#[test]
fn counts_are_suggested_by_drives_and_width() {
    assert_eq!(suggested_pg_count(1, 1), 100);
    assert_eq!(suggested_pg_count(10_000, 12), 83_334);
    assert_eq!(suggested_pg_count(0, 6), 1);
    assert_eq!(suggested_pg_count(u32::MAX, 1), 1 << 24);
}

#[test]
fn failure_domains_are_ordered_and_named() {
    assert!(FailureDomain::Drive < FailureDomain::Node && FailureDomain::Rack < FailureDomain::Zone);
    assert_eq!("rack".parse(), Ok(FailureDomain::Rack));
    assert!("shelf".parse::<FailureDomain>().unwrap_err().to_string().contains("drive, node, rack or zone"));
    assert_eq!(serde_json::to_string(&FailureDomain::Node).unwrap(), r#""node""#);
}

#[test]
fn a_place_is_a_domain_at_each_level() {
    let place = Place { zone: 1, rack: 2, node: 3 };
    let levels = [FailureDomain::Zone, FailureDomain::Rack, FailureDomain::Node, FailureDomain::Drive];
    assert_eq!(levels.map(|level| place.domain(level, DriveId(4))), [1, 2, 3, 4]);
}

#[test]
fn a_group_says_its_rule_and_older_ones_have_that_of_drives() {
    let group = PlacementGroup::new(PgId(0), vec![DriveId(1)]);
    let older = r#"{"id":0,"epoch":1,"members":[1]}"#;
    assert_eq!(serde_json::from_str::<PlacementGroup>(older).unwrap(), group);
    let group = group.with_spread(Spread { level: FailureDomain::Rack, per_domain: 2 });
    let text = serde_json::to_string(&group).unwrap();
    assert!(text.contains(r#""spread":{"level":"rack","per_domain":2}"#), "{text}");
    assert_eq!(serde_json::from_str::<PlacementGroup>(&text).unwrap(), group);
}

/// `racks` racks of two nodes of two drives each.
fn racked_drives(racks: u32) -> Vec<DriveSlot> {
    let place = |id: u32| Place { zone: 0, rack: id / 4, node: id / 2 };
    (0..racks * 4)
        .map(|id| DriveSlot { drive: DriveId(id), place: place(id), weight_bytes: 1 << 40 })
        .collect()
}

#[test]
fn members_in_one_domain_are_apart_within_it() {
    let (profile, drives) = ("4+2".parse().unwrap(), racked_drives(3));
    let rule = Spread::choose(&drives, profile, FailureDomain::Rack).unwrap();
    assert_eq!(rule.per_domain, 2);
    for group in plan_placement_groups(&drives, profile, rule, 60, 1).unwrap() {
        let nodes: BTreeSet<u32> = group.members.iter().map(|drive| drive.0 / 2).collect();
        assert_eq!(nodes.len(), 6, "two in a rack are on both of its nodes: {group:?}");
    }
}

#[test]
fn a_lost_member_is_replaced_where_the_group_lacks_one() {
    let drives = racked_drives(3);
    let places: HashMap<DriveId, Place> = drives.iter().map(|slot| (slot.drive, slot.place)).collect();
    // Two members in each rack. The node of the lost drive has another one; that in the other racks carry less load.
    let group = PlacementGroup::new(PgId(0), [0, 2, 4, 6, 8, 10].map(DriveId).to_vec());
    let busy = |id| PlacementGroup::new(PgId(id), vec![DriveId(1), DriveId(3)]);
    let groups = [group, busy(1), busy(2), busy(3)];
    let spare: Vec<DriveSlot> = drives.into_iter().filter(|slot| slot.drive != DriveId(0)).collect();
    let changed = replace_members(&groups[..], &BTreeSet::from([DriveId(0)]), &spare, &places);
    assert_eq!(changed.len(), 1);
    assert_eq!(
        changed[0].members[0],
        DriveId(1),
        "the rack and node that lack a member, in spite of the load"
    );
}

#[test]
fn a_lost_member_is_replaced_by_the_rule_of_its_group() {
    let drives = racked_drives(2);
    let places: HashMap<DriveId, Place> = drives.iter().map(|slot| (slot.drive, slot.place)).collect();
    // The rack of the lost drive is not left, the other one has no room. Under another rule it has.
    let spare: Vec<DriveSlot> = drives.iter().filter(|slot| slot.drive.0 > 4).copied().collect();
    let replaced = |level, per_domain| {
        let group = PlacementGroup::new(PgId(0), [0, 4].map(DriveId).to_vec());
        let groups = [group.with_spread(Spread { level, per_domain })];
        let changed = replace_members(&groups, &BTreeSet::from([DriveId(0)]), &spare, &places);
        changed.first().map(|group| group.members[0])
    };
    assert_eq!(replaced(FailureDomain::Rack, 1), None);
    assert_eq!(replaced(FailureDomain::Rack, 2), Some(DriveId(6)));
    assert_eq!(replaced(FailureDomain::Node, 1), Some(DriveId(6)));
    assert_eq!(replaced(FailureDomain::Zone, 1), None);
}

#[test]
fn a_stricter_rule_moves_only_what_violates_it() {
    let drives = racked_drives(2);
    let groups: Vec<PlacementGroup> = [[0, 2], [0, 4], [1, 6], [1, 3], [4, 6], [5, 7], [2, 5], [3, 7]]
        .iter()
        .zip(0..)
        .map(|(members, id)| PlacementGroup::new(PgId(id), members.map(DriveId).to_vec()))
        .collect();
    let rule = Spread { level: FailureDomain::Rack, per_domain: 1 };
    let changed = balance_groups(&groups, &drives, rule);
    assert_eq!(changed.len(), 8, "all have the new rule");
    let moved: Vec<u32> =
        changed.iter().filter(|group| !group.rebuilding.is_empty()).map(|group| group.id.0).collect();
    assert_eq!(moved, [0, 3, 4, 5]);
    for group in &changed {
        assert_eq!((group.spread, group.epoch, group.rebuilding.len() <= 1), (rule, Epoch(2), true));
        assert_ne!(group.members[0].0 / 4, group.members[1].0 / 4);
    }
    assert!(appearances(&changed, 2).values().all(|counts| counts.iter().sum::<u32>() == 2));
    assert_eq!(balance_groups(&changed, &drives, rule), [], "groups that are rebuilt stay");
}

#[test]
fn groups_that_are_rebuilt_stay_but_count() {
    let drives = equal_drives(4, 1);
    let mut groups: Vec<PlacementGroup> =
        (0..4).map(|id| PlacementGroup::new(PgId(id), vec![DriveId(0), DriveId(1)])).collect();
    groups[0].rebuilding.push(Rebuilding { position: 0, from: DriveId(3) });
    let changed = balance_groups(&groups, &drives, NODES);
    assert!(changed.iter().all(|group| group.id != PgId(0)));
    for group in changed {
        let at = group.id.0 as usize;
        groups[at] = group;
    }
    assert!(appearances(&groups, 2).values().all(|counts| counts.iter().sum::<u32>() == 2), "{groups:?}");
}

#[test]
fn a_group_that_cannot_follow_a_rule_keeps_its_own() {
    let drives = racked_drives(1);
    let groups = [PlacementGroup::new(PgId(0), vec![DriveId(0), DriveId(1)])];
    let racks = Spread { level: FailureDomain::Rack, per_domain: 1 };
    assert_eq!(balance_groups(&groups, &drives, racks), []);
    let drained: Vec<DriveSlot> = drives.iter().map(|slot| DriveSlot { weight_bytes: 0, ..*slot }).collect();
    assert_eq!(balance_groups(&groups, &drained, Spread::default()), [], "nothing takes data");
    assert_eq!(balance_groups(&groups, &[], Spread::default()), []);
    assert_eq!(balance_groups(&[], &drives, racks), []);
}

proptest! {
    #[test]
    fn narrowing_by_drives_is_that_of_the_profile(
        n in 1u32..=20, k in 1u32..=20, nodes in prop::collection::vec(0u32..4, 0..30),
    ) {
        let Ok(profile) = Profile::new(n.max(k), k, k) else { return Ok(()) };
        let slot = |(id, at): (u32, &u32)| DriveSlot { drive: DriveId(id), place: node(*at), weight_bytes: 1 };
        let up: Vec<DriveSlot> = (0..).zip(&nodes).map(slot).collect();
        prop_assert_eq!(Spread::default().narrowed(profile, &up), profile.narrowed(up.len() as u32));
        let different: BTreeSet<&u32> = nodes.iter().collect();
        prop_assert_eq!(NODES.narrowed(profile, &up), profile.narrowed(different.len() as u32));
    }

    /// Weights differ by at most a factor of four, so no domain exceeds its share; every drive then gets what its
    /// weight says.
    #[test]
    fn weighted_drives_appear_in_proportion(
        weights in prop::collection::vec((1u64..=4, 1usize..=3), 8..20),
        count in 1u32..200,
        seed in any::<u64>(),
    ) {
        let mut drives = Vec::new();
        for (domain, (weight, members)) in weights.iter().enumerate() {
            // Two consecutive domains share a weight class, so that none has more than a third of the total.
            drives.extend((0..*members).map(|at| DriveSlot {
                drive: DriveId((domain * 10 + at) as u32),
                place: node(domain as u32),
                weight_bytes: (weight << 40) / *members as u64,
            }));
        }
        let total: u64 = drives.iter().map(|slot| slot.weight_bytes).sum();
        let heaviest = weights.iter().map(|(weight, _)| weight << 40).max().unwrap();
        prop_assume!(heaviest * 3 <= total);
        let groups = plan(&drives, "r3", count, seed);
        check_plan(&drives, &groups, 3, count);
        let counts = appearances(&groups, 3);
        for slot in &drives {
            let exact = 3.0 * f64::from(count) * slot.weight_bytes as f64 / total as f64;
            let found: u32 = counts.get(&slot.drive).map_or(0, |positions| positions.iter().sum());
            prop_assert!((f64::from(found) - exact).abs() < 2.0, "{:?} {} {}", slot, found, exact);
        }
    }

    #[test]
    fn any_weights_give_a_valid_plan(
        weights in prop::collection::vec(0u64..=u64::MAX, 1..24),
        n in 1u32..=20,
        count in 0u32..60,
        seed in any::<u64>(),
    ) {
        let drives: Vec<DriveSlot> = (0u32..)
            .zip(&weights)
            .map(|(at, weight)| DriveSlot { drive: DriveId(at), place: node(at), weight_bytes: *weight })
            .collect();
        let present = weights.iter().filter(|weight| **weight > 0).count();
        let profile = Profile::new(n, 1, n).unwrap();
        match plan_placement_groups(&drives, profile, NODES, count, seed) {
            Ok(groups) => check_plan(&drives, &groups, n as usize, count),
            Err(_) => prop_assert!(present < n as usize),
        }
    }
}
