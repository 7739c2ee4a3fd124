//! What is promised about losses, against all possible losses of small clusters; what is refused, against all possible
//! assignments.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use base::DriveId;
use layout::{
    DriveSlot, FailureDomain, Place, PlacementError, PlacementGroup, Profile, Spread,
    acknowledgements_survive, losses_survived, plan_placement_groups, writes_survive,
};

use crate::Dice;

const PROFILES: [&str; 9] = ["1+0", "r2", "r3", "2+1", "2+2", "4+2", "5+2", "6+3", "12/7/9"];
const LEVELS: [FailureDomain; 4] =
    [FailureDomain::Drive, FailureDomain::Node, FailureDomain::Rack, FailureDomain::Zone];
/// More domains have too many subsets.
const DOMAINS_MAX: usize = 10;

/// `nodes` nodes of one to three drives each, in one to three racks and one or two zones.
fn cluster(nodes: u32, dice: &mut Dice) -> Vec<DriveSlot> {
    let (racks, zones) = (dice.between(1, 3), dice.between(1, 2));
    let mut drives = Vec::new();
    for node in 0..nodes {
        let rack = dice.between(0, racks - 1);
        for _ in 0..dice.between(1, 3) {
            let place = Place { zone: rack % zones, rack, node };
            let weight_bytes = if dice.once_in(8) { 0 } else { u64::from(dice.between(1, 3)) << 40 };
            drives.push(DriveSlot { drive: DriveId(drives.len() as u32), place, weight_bytes });
        }
    }
    drives
}

/// The most shards of one stripe that drives with weight can hold, by trying every number of shards in every domain.
fn most_shards(drives: &[DriveSlot], spread: Spread) -> u32 {
    let mut domains: BTreeMap<u64, BTreeSet<DriveId>> = BTreeMap::new();
    for slot in drives.iter().filter(|slot| slot.weight_bytes > 0) {
        domains.entry(slot.place.domain(spread.level, slot.drive)).or_default().insert(slot.drive);
    }
    let mut sums = BTreeSet::from([0]);
    for members in domains.values() {
        let with = |shards: u32| sums.iter().map(|sum| sum + shards).collect::<Vec<u32>>();
        let allowed = (0..=u32::from(spread.per_domain)).filter(|shards| *shards as usize <= members.len());
        sums = allowed.flat_map(with).collect();
    }
    sums.into_iter().max().unwrap_or(0)
}

/// Whether each domain has at most as many members as the rule says, and the drives differ.
fn is_valid(group: &PlacementGroup, spread: Spread, places: &HashMap<DriveId, Place>) -> bool {
    let mut members: BTreeMap<u64, u32> = BTreeMap::new();
    for drive in &group.members {
        *members.entry(places[drive].domain(spread.level, *drive)).or_default() += 1;
    }
    let different: BTreeSet<&DriveId> = group.members.iter().collect();
    different.len() == group.members.len()
        && members.values().all(|count| *count <= u32::from(spread.per_domain))
}

/// The most domains after whose loss `holds` is true, whichever they are; -1 if it is not true now. `None` if there are
/// too many to try.
fn worst_case(domains: &BTreeSet<u64>, holds: impl Fn(&BTreeSet<u64>) -> bool) -> Option<i32> {
    if domains.len() > DOMAINS_MAX {
        return None;
    }
    let mut fewest_fatal = domains.len() as i32 + 1;
    for subset in 0u32..1 << domains.len() {
        let lost = domains.iter().enumerate().filter(|(at, _)| subset & (1 << at) != 0);
        let lost: BTreeSet<u64> = lost.map(|(_, domain)| *domain).collect();
        if !holds(&lost) {
            fewest_fatal = fewest_fatal.min(lost.len() as i32);
        }
    }
    Some(fewest_fatal - 1)
}

fn spread(level: FailureDomain, per_domain: u8) -> Spread {
    Spread { level, per_domain }
}

/// The rule that `choose` gives is the strictest; a refusal is right and names what fits.
fn check_choice(drives: &[DriveSlot], profile: Profile, level: FailureDomain) -> Option<Spread> {
    let loosest = if level == FailureDomain::Drive { 1 } else { profile.m().max(1) };
    let fits = |profile: Profile, level, per_domain| {
        most_shards(drives, spread(level, per_domain)) >= u32::from(profile.n())
    };
    match Spread::choose(drives, profile, level) {
        Ok(chosen) => {
            assert_eq!(chosen.level, level);
            assert!(chosen.per_domain <= loosest && fits(profile, level, chosen.per_domain));
            assert!(chosen.per_domain == 1 || !fits(profile, level, chosen.per_domain - 1));
            Some(chosen)
        }
        Err(error) => {
            assert!((1..=loosest).all(|per_domain| !fits(profile, level, per_domain)), "{error}");
            let PlacementError::TooFewDomains { needed, places, fitting, .. } = error else {
                panic!("{error}")
            };
            assert_eq!((needed, places), (profile.n().into(), most_shards(drives, spread(level, loosest))));
            let wider =
                |k: u8| Profile::new((k + profile.m()).into(), k.into(), k.into()).expect("k of more");
            let widest = (1..=profile.k()).rev().find(|k| fits(wider(*k), level, loosest));
            assert_eq!(fitting.narrower.map(Profile::k), widest);
            assert!(fitting.narrower.is_none_or(|narrower| narrower.m() == profile.m()));
            let below = LEVELS.into_iter().rev().filter(|other| *other < level);
            let lower = below.clone().find(|level| Spread::choose(drives, profile, *level).is_ok());
            assert_eq!(fitting.lower.map(|(_, level)| level), lower);
            None
        }
    }
}

/// Promises about reads of groups of which some positions are not whole.
fn check_reads(groups: &[PlacementGroup], profile: Profile, places: &HashMap<DriveId, Place>, holes: u64) {
    let is_whole = |group: &PlacementGroup, position: u8| {
        let mut dice = Dice(holes ^ (u64::from(group.id.0) << 8) ^ u64::from(position));
        holes == 0 || !dice.once_in(12)
    };
    for level in LEVELS {
        let left = |group: &PlacementGroup, lost: &BTreeSet<u64>| {
            let members = (0u8..).zip(&group.members).filter(|(position, drive)| {
                is_whole(group, *position) && !lost.contains(&places[*drive].domain(level, **drive))
            });
            members.count()
        };
        let domains = places.iter().map(|(drive, place)| place.domain(level, *drive)).collect();
        let all_readable =
            |lost: &BTreeSet<u64>| groups.iter().all(|group| left(group, lost) >= profile.k().into());
        if let Some(expected) = worst_case(&domains, all_readable) {
            let pairs = groups.iter().map(|group| (group, profile));
            assert_eq!(losses_survived(pairs, is_whole, places, level), expected, "{level}");
        }
        let some_acknowledge =
            |lost: &BTreeSet<u64>| groups.iter().any(|group| left(group, lost) >= profile.w().into());
        if let Some(expected) = worst_case(&domains, some_acknowledge) {
            let pairs = groups.iter().map(|group| (group, profile));
            let promised = acknowledgements_survive(pairs, is_whole, places, level);
            assert!(promised <= expected, "{level}: {promised} of {expected}");
            let pair = groups.iter().take(1).map(|group| (group, profile));
            let alone = |lost: &BTreeSet<u64>| left(&groups[0], lost) >= profile.w().into();
            assert_eq!(
                Some(acknowledgements_survive(pair, is_whole, places, level)),
                worst_case(&domains, alone)
            );
        }
    }
}

/// Promises about new extents.
fn check_writes(drives: &[DriveSlot], profile: Profile, spread: Spread) {
    for level in LEVELS {
        let domains = drives.iter().map(|slot| slot.place.domain(level, slot.drive)).collect();
        let writable = |lost: &BTreeSet<u64>| {
            let up = drives.iter().filter(|slot| !lost.contains(&slot.place.domain(level, slot.drive)));
            let up: Vec<DriveSlot> = up.copied().collect();
            let most = most_shards(&up, spread);
            let narrowed = spread.narrowed(profile, &up);
            // Even one data shard and the parity do not fit, or exactly as many as fit are written.
            match narrowed {
                Some(narrow) => {
                    assert_eq!(
                        (narrow.m(), narrow.w() - narrow.k()),
                        (profile.m(), profile.w() - profile.k())
                    );
                    assert_eq!(u32::from(narrow.n()), most.min(profile.n().into()));
                }
                None => assert!(most < u32::from(profile.m()) + 1),
            }
            narrowed.is_some()
        };
        if let Some(expected) = worst_case(&domains, writable) {
            assert_eq!(writes_survive(spread, profile, drives, level), expected, "{level} {spread:?}");
        }
    }
}

/// Everything about one profile at one level of one cluster.
fn check(drives: &[DriveSlot], profile: Profile, level: FailureDomain, seed: u64) {
    let places: HashMap<DriveId, Place> = drives.iter().map(|slot| (slot.drive, slot.place)).collect();
    let chosen = check_choice(drives, profile, level);
    for rule in chosen.into_iter().chain((1..=3).map(|per_domain| spread(level, per_domain))) {
        if level == FailureDomain::Drive && rule.per_domain > 1 {
            continue;
        }
        check_writes(drives, profile, rule);
        let planned = plan_placement_groups(drives, profile, rule, 12, seed);
        let fits = most_shards(drives, rule) >= u32::from(profile.n());
        assert_eq!(planned.is_ok(), fits, "{rule:?} {planned:?}");
        let Ok(groups) = planned else { continue };
        assert!(
            groups.iter().all(|group| group.spread == rule && is_valid(group, rule, &places)),
            "{groups:?}"
        );
        check_reads(&groups, profile, &places, 0);
        check_reads(&groups, profile, &places, seed | 1);
        // With at most c shards in a domain, m / c domains may be lost.
        let survived =
            losses_survived(groups.iter().map(|group| (group, profile)), |_, _| true, &places, level);
        assert!(survived >= i32::from(profile.m() / rule.per_domain));
    }
}

#[test]
fn promises_hold_for_every_loss_and_refusals_for_every_assignment() {
    for seed in 0..8 * 7 {
        let mut dice = Dice(seed);
        let drives = cluster(seed as u32 % 7 + 1, &mut dice);
        for profile in PROFILES {
            for level in LEVELS {
                let run = || check(&drives, profile.parse().unwrap(), level, seed);
                if let Err(panic) = std::panic::catch_unwind(run) {
                    eprintln!("seed={seed} profile={profile} level={level} drives={drives:?}");
                    std::panic::resume_unwind(panic);
                }
            }
        }
    }
}

#[test]
fn the_automatic_rule_is_the_highest_that_holds() {
    let nodes = |sizes: &[u32], racks: u32| -> Vec<DriveSlot> {
        let drives = sizes.iter().zip(0u32..).flat_map(|(size, node)| (0..*size).map(move |_| node));
        let slot = |(number, node): (u32, u32)| {
            let place = Place { zone: 0, rack: node % racks, node };
            DriveSlot { drive: DriveId(number), place, weight_bytes: 1 }
        };
        (0..).zip(drives).map(slot).collect()
    };
    let automatic = |drives: &[DriveSlot], profile: &str| {
        Spread::automatic(drives, profile.parse().unwrap()).map(|spread| (spread.level, spread.per_domain))
    };
    use FailureDomain::{Drive, Node, Rack};
    assert_eq!(automatic(&nodes(&[1; 6], 1), "4+2"), Ok((Node, 1)));
    assert_eq!(automatic(&nodes(&[1; 6], 6), "4+2"), Ok((Rack, 1)));
    assert_eq!(automatic(&nodes(&[2; 6], 3), "4+2"), Ok((Node, 1)), "one per node before two per rack");
    assert_eq!(automatic(&nodes(&[2; 5], 3), "4+2"), Ok((Rack, 2)));
    assert_eq!(automatic(&nodes(&[4; 3], 1), "4+2"), Ok((Node, 2)));
    assert_eq!(automatic(&nodes(&[4; 2], 1), "4+2"), Ok((Drive, 1)));
    assert_eq!(automatic(&nodes(&[8], 1), "4+2"), Ok((Drive, 1)));
    assert_eq!(automatic(&nodes(&[1; 2], 1), "r2"), Ok((Node, 1)));
    assert_eq!(automatic(&nodes(&[1], 1), "1+0"), Ok((Drive, 1)), "a single node is no choice");
    assert!(automatic(&nodes(&[1; 5], 1), "4+2").is_err());
}

#[test]
fn a_refusal_tells_an_operator_what_fits() {
    let drives: Vec<DriveSlot> = (0..8)
        .map(|number| {
            let place = Place { zone: 0, rack: 0, node: number / 4 };
            DriveSlot { drive: DriveId(number), place, weight_bytes: 1 }
        })
        .collect();
    let profile: Profile = "4+2".parse().unwrap();
    let text = Spread::choose(&drives, profile, FailureDomain::Node).unwrap_err().to_string();
    for part in [
        "too few failure domains: needed=6 present=2 level=node places=4",
        "with at most 2 in a node",
        "what fits: 2+2 at level node, 4+2 at level drive",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let text = Spread::choose(&drives[..2], profile, FailureDomain::Drive).unwrap_err().to_string();
    assert!(text.ends_with("no profile with parity=2 fits"), "{text}");
}
