//! How much of the data each drive holds: by weight, as far as the rule allows, exactly.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use super::{DriveSlot, FailureDomain, Spread};

/// Drives with weight in the order of zones, racks and nodes, so that every domain is a run of them.
///
/// If a node is said to be in two racks, or a rack in two zones, the drive with the lowest number decides.
pub(super) fn in_tree_order(drives: &[DriveSlot]) -> Vec<DriveSlot> {
    let mut slots: Vec<DriveSlot> = drives.iter().filter(|slot| slot.weight_bytes > 0).copied().collect();
    slots.sort_by_key(|slot| slot.drive);
    let (mut rack_of, mut zone_of) = (BTreeMap::new(), BTreeMap::new());
    for slot in &mut slots {
        let place = &mut slot.place;
        place.rack = *rack_of.entry(place.node).or_insert(place.rack);
        place.zone = *zone_of.entry(place.rack).or_insert(place.zone);
    }
    slots.sort_by_key(|slot| (slot.place, slot.drive));
    slots
}

/// The runs of drives in one domain of a level, within `range`. The drives are in tree order.
pub(super) fn runs(slots: &[DriveSlot], range: Range<usize>, level: FailureDomain) -> Vec<Range<usize>> {
    let domain = |at: usize| slots[at].place.domain(level, slots[at].drive);
    let mut runs: Vec<Range<usize>> = Vec::new();
    for at in range {
        match runs.last_mut() {
            Some(run) if domain(run.start) == domain(at) => run.end = at + 1,
            _ => runs.push(at..at + 1),
        }
    }
    runs
}

/// The exact share of each drive: a fraction of the members of all groups.
///
/// In proportion to the weights; but a drive is in each group at most once, a domain at most as often as the rule says,
/// and what a drive or a domain cannot take goes to the others. All shares sum up to `total`, unless the drives cannot
/// take that number.
pub(super) struct Shares {
    runs: Vec<Range<usize>>,
    /// Numerator and denominator: 1 for whole shares, else the same for all drives of a run, and of all runs that are
    /// not full.
    exact: Vec<(u128, u128)>,
    /// Whether fractions are summed up within each run: it takes as much as it can, a whole number.
    full: Vec<bool>,
    /// The most that each run takes.
    caps: Vec<u64>,
}

impl Shares {
    /// Shares of `total` members in `count` groups. The drives are in tree order.
    pub(super) fn new(slots: &[DriveSlot], spread: Spread, total: u64, count: u32) -> Self {
        let runs = runs(slots, 0..slots.len(), spread.level);
        let weights: Vec<u128> = slots.iter().map(|slot| u128::from(slot.weight_bytes)).collect();
        let (drive_cap, total) = (u128::from(count), u128::from(total));
        let cap = |run: &Range<usize>| run.len().min(spread.most().into()) as u128 * drive_cap;
        let mut open_drives = vec![true; slots.len()];
        let mut full = vec![false; runs.len()];
        // What exceeds its limit gets the limit, and the rest is shared again. The shares of the others only grow.
        let (rest, open_weight) = loop {
            let (mut fixed, mut open_weight) = (0, 0);
            for (run, full) in runs.iter().zip(&full) {
                let (closed, weight) = closed_and_weight(run, &open_drives, &weights);
                fixed += if *full { cap(run) } else { closed * drive_cap };
                open_weight += if *full { 0 } else { weight };
            }
            let rest = total.saturating_sub(fixed);
            let mut changed = false;
            for (run, full) in runs.iter().zip(&mut full).filter(|(_, full)| !**full) {
                let (closed, weight) = closed_and_weight(run, &open_drives, &weights);
                let exceeds = weight * rest + closed * drive_cap * open_weight > cap(run) * open_weight;
                (*full, changed) = (exceeds, changed || exceeds);
                for at in run.clone().filter(|_| !exceeds) {
                    let exceeds = open_drives[at] && weights[at] * rest > open_weight * drive_cap;
                    (open_drives[at], changed) = (open_drives[at] && !exceeds, changed || exceeds);
                }
            }
            if !changed {
                break (rest, open_weight);
            }
        };
        let mut exact = Vec::with_capacity(slots.len());
        for (run, full) in runs.iter().zip(&full) {
            if *full {
                let within = Self::new(&slots[run.clone()], Spread::default(), cap(run) as u64, count);
                exact.extend(within.exact);
            } else {
                let share =
                    |at| if open_drives[at] { (weights[at] * rest, open_weight) } else { (drive_cap, 1) };
                exact.extend(run.clone().map(share));
            }
        }
        // Whole shares have the denominator 1, the others of a run a common one.
        for share in exact.iter_mut().filter(|(share, of)| share % of == 0) {
            *share = (share.0 / share.1, 1);
        }
        let caps = runs.iter().map(|run| cap(run) as u64).collect();
        Self { runs, exact, full, caps }
    }

    /// Whole shares, so that the share of every zone, rack, node and drive is rounded down or up.
    pub(super) fn rounded(&self) -> Vec<u32> {
        let mut shares = vec![0; self.exact.len()];
        let mut sum_of_all = 0;
        for (run, full) in self.runs.iter().zip(&self.full) {
            let mut sum_of_run = 0;
            let sum = if *full { &mut sum_of_run } else { &mut sum_of_all };
            for at in run.clone() {
                let (share, of) = self.exact[at];
                // A whole share leaves the sum of the fractions as it is.
                if of == 1 {
                    shares[at] = share as u32;
                } else {
                    shares[at] = ((*sum + share) / of - *sum / of) as u32;
                    *sum += share;
                }
            }
        }
        shares
    }

    /// Each share rounded down and up.
    pub(super) fn ranges(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.exact.iter().map(|(share, of)| ((share / of) as u32, share.div_ceil(*of) as u32))
    }

    /// Whole shares, each rounded down or up, as near as possible to what the drives have. No domain exceeds the rule.
    pub(super) fn near(&self, has: &[u32]) -> Vec<u32> {
        let mut shares: Vec<u32> = self.exact.iter().map(|(share, of)| (share / of) as u32).collect();
        let fraction = |at: usize| {
            let (share, of) = self.exact[at];
            // In units of 2^-32, for shares of different denominators.
            ((share % of) as f64 / of as f64 * 4_294_967_296.0) as u64
        };
        let mut room = self.caps.clone();
        let mut run_of = vec![0; shares.len()];
        let mut left = self.rounded().iter().map(|share| u64::from(*share)).sum::<u64>();
        for (number, run) in self.runs.iter().enumerate() {
            run.clone().for_each(|at| run_of[at] = number);
            let down: u64 = run.clone().map(|at| u64::from(shares[at])).sum();
            room[number] -= down;
            left -= down;
        }
        let mut order: Vec<usize> = (0..shares.len()).filter(|at| self.exact[*at].1 > 1).collect();
        order.sort_by_key(|at| (has[*at] <= shares[*at], Reverse(fraction(*at)), *at));
        for at in order {
            let room = &mut room[run_of[at]];
            if left > 0 && *room > 0 {
                (left, *room) = (left - 1, *room - 1);
                shares[at] += 1;
            }
        }
        shares
    }
}

/// Drives of a run that take no more, and the weight of the others.
fn closed_and_weight(run: &Range<usize>, open: &[bool], weights: &[u128]) -> (u128, u128) {
    run.clone().fold(
        (0, 0),
        |(closed, weight), at| {
            if open[at] { (closed, weight + weights[at]) } else { (closed + 1, weight) }
        },
    )
}
