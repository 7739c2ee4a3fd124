//! Plans new groups. Three steps, each exact:
//! 1. shares: the number of groups of each drive, by weight and the rule;
//! 2. membership: zones, then racks in each zone, nodes in each rack, and drives. Each has its share of the groups, and
//!    as even a part of every group as its share allows. Pairs that met often are avoided;
//! 3. positions: every drive appears equally often in every position.
//!
//! A drive has at most `count` appearances and a domain at most `count * per_domain`. Each part of the second step gives
//! a domain of share s in each group s / count members, rounded down or up, so the rule is kept without a search.

use std::collections::BinaryHeap;
use std::ops::Range;

use base::{DriveId, PgId};

use super::dice::Dice;
use super::order::order_members;
use super::shares::{Shares, in_tree_order, runs};
use super::{DriveSlot, FailureDomain, PlacementError, PlacementGroup, Spread};
use crate::Profile;

/// Groups of each drive: enough for even rebuilds, few enough to bound the combinations that can fail together.
const GROUPS_PER_DRIVE: u64 = 100;
const GROUPS_MAX: u64 = 1 << 24;
/// With more parts than this, two of them rarely meet twice, and looking at all for every member takes long.
const PAIRED_PARTS_MAX: usize = 1024;

/// The number of groups for `drives` drives: each drive is in about 100 groups. At least 1.
pub fn suggested_pg_count(drives: u32, n: u8) -> u32 {
    let count = (u64::from(drives) * GROUPS_PER_DRIVE).div_ceil(u64::from(n.max(1)));
    count.clamp(1, GROUPS_MAX) as u32
}

/// Plans `count` groups of n drives each, numbered from 0, at epoch 1, under the rule `spread`.
///
/// A drive appears in proportion to its weight, off by less than one appearance; but no drive can be in a group twice
/// and no domain more often than the rule says, so what exceeds that goes to the others. The members of a group are
/// spread over zones, racks and nodes as evenly as these shares allow: each has its share of the members of each group,
/// rounded down or up. The appearances of a drive are spread over the positions evenly, off by less than one. The same
/// arguments give the same plan; `seed` chooses among equally good ones.
///
/// # Errors
/// If the drives with weight are too few for the rule, or a drive is listed twice.
pub fn plan_placement_groups(
    drives: &[DriveSlot],
    profile: Profile,
    spread: Spread,
    count: u32,
    seed: u64,
) -> Result<Vec<PlacementGroup>, PlacementError> {
    spread.require(drives, profile)?;
    if count == 0 {
        return Ok(Vec::new());
    }
    let slots = in_tree_order(drives);
    let n = profile.n();
    let quotas = Shares::new(&slots, spread, u64::from(n) * u64::from(count), count).rounded();
    let sets = vec![Vec::with_capacity(n.into()); count as usize];
    let mut deal = Deal { slots, quotas, count, dice: Dice(seed), sets };
    deal.descend(0..deal.slots.len(), (0..count).map(|group| Taker { group, members: n }).collect());
    let groups = order_members(&deal.sets, n.into());
    let group = |(id, members)| PlacementGroup::new(PgId(id), members).with_spread(spread);
    Ok((0..).zip(groups).map(group).collect())
}

/// Gives the drives of domains to groups, from the top down.
struct Deal {
    slots: Vec<DriveSlot>,
    /// The number of groups of each drive.
    quotas: Vec<u32>,
    count: u32,
    dice: Dice,
    /// The drives of each group.
    sets: Vec<Vec<DriveId>>,
}

/// A group and how many drives it takes from a domain.
#[derive(Debug, Clone, Copy)]
struct Taker {
    group: u32,
    members: u8,
}

impl Deal {
    /// Gives the takers their members from the drives of `range`, whose quotas sum up to the takers' members.
    fn descend(&mut self, range: Range<usize>, mut takers: Vec<Taker>) {
        if takers.is_empty() {
            return;
        }
        if range.len() == 1 {
            let drive = self.slots[range.start].drive;
            takers.iter().for_each(|taker| self.sets[taker.group as usize].push(drive));
            return;
        }
        let levels =
            [FailureDomain::Zone, FailureDomain::Rack, FailureDomain::Node, FailureDomain::Drive].into_iter();
        let mut parts = levels.map(|level| runs(&self.slots, range.clone(), level));
        let parts =
            parts.find(|parts| parts.len() > 1).expect("two drives differ at least at the last level");
        // Neighbours in one domain shall not be neighbours in the next.
        self.dice.shuffle(&mut takers);
        for (part, takers) in parts.iter().zip(self.share_out(&parts, &takers)) {
            self.descend(part.clone(), takers);
        }
    }

    /// The takers of each part.
    ///
    /// Each taker gets from each part its quota divided by `count`, rounded down, and of some parts one more. Those parts
    /// are chosen so that each reaches its quota: a part that all remaining takers need goes first. As the takers' open
    /// members differ by at most one, there is always room for these parts.
    fn share_out(&mut self, parts: &[Range<usize>], takers: &[Taker]) -> Vec<Vec<Taker>> {
        let quotas: Vec<u64> = parts
            .iter()
            .map(|part| self.quotas[part.clone()].iter().map(|quota| u64::from(*quota)).sum())
            .collect();
        let count = u64::from(self.count);
        let base: Vec<u8> = quotas.iter().map(|quota| (quota / count) as u8).collect();
        let base_sum: u8 = base.iter().sum();
        let left = quotas.iter().map(|quota| (quota % count) as u32).collect();
        let open: Vec<u8> = takers.iter().map(|taker| taker.members - base_sum).collect();
        let rows = open.iter().filter(|open| **open > 0).count() as u32;
        let mut choice = Choice::new(left, rows, open.iter().copied().max().unwrap_or(0));
        let mut members = base.clone();
        let mut takers_of = vec![Vec::new(); parts.len()];
        for (taker, open) in takers.iter().zip(open) {
            let chosen = choice.choose(open.into(), &mut self.dice);
            chosen.iter().for_each(|part| members[*part] += 1);
            let used = |members: u8| members > 0;
            if base_sum == 0 {
                // Most parts have nothing for this taker.
                for part in chosen.iter().copied() {
                    takers_of[part].push(Taker { group: taker.group, members: members[part] });
                }
            } else {
                for part in (0..parts.len()).filter(|part| used(members[*part])) {
                    takers_of[part].push(Taker { group: taker.group, members: members[part] });
                }
            }
            chosen.iter().for_each(|part| members[*part] -= 1);
        }
        takers_of
    }
}

/// Chooses parts for one taker after the other, each part in exactly its quota of choices.
struct Choice {
    left: Vec<u32>,
    rows: u32,
    rows_left: u32,
    /// What an appearance too many weighs, in meetings.
    partners: u64,
    meetings: Option<Meetings>,
    /// Parts by quota left, if there are too many to look at all.
    heap: BinaryHeap<(u32, u64, usize)>,
}

impl Choice {
    /// `rows` takers with at most `most` parts each.
    fn new(left: Vec<u32>, rows: u32, most: u8) -> Self {
        let is_small = left.len() <= PAIRED_PARTS_MAX;
        let heap = if is_small {
            BinaryHeap::new()
        } else {
            (0..left.len())
                .filter(|part| left[*part] > 0)
                .map(|part| (left[part], part as u64, part))
                .collect()
        };
        let meetings = is_small.then(|| Meetings::new(left.len()));
        let partners = u64::from(most).saturating_sub(1).max(1);
        Self { left, rows, rows_left: rows, partners, meetings, heap }
    }

    /// Different parts for the next taker.
    fn choose(&mut self, parts: usize, dice: &mut Dice) -> Vec<usize> {
        if parts == 0 {
            return Vec::new();
        }
        let chosen = if self.meetings.is_some() {
            self.choose_rare(parts, dice)
        } else {
            self.choose_fullest(parts, dice)
        };
        chosen.iter().for_each(|part| self.left[*part] -= 1);
        self.rows_left -= 1;
        chosen
    }

    /// Parts that all remaining takers need, then those with most quota left, then with fewest meetings.
    fn choose_rare(&mut self, parts: usize, dice: &mut Dice) -> Vec<usize> {
        let Some(meetings) = &mut self.meetings else { return Vec::new() };
        let mut chosen: Vec<usize> =
            (0..self.left.len()).filter(|part| self.left[*part] == self.rows_left).collect();
        assert!(chosen.len() <= parts, "quotas sum up to the members of each taker");
        let mut met = vec![0u64; self.left.len()];
        let mut free: Vec<bool> = self.left.iter().map(|left| *left > 0).collect();
        for part in &chosen {
            meetings.add_to(&mut met, *part);
            free[*part] = false;
        }
        while chosen.len() < parts {
            let (mut best, mut best_cost, mut ties) = (None, u64::MAX, 0);
            for part in (0..free.len()).filter(|part| free[*part]) {
                // A meeting weighs as much as one appearance too many among the partners.
                let cost = u64::from(self.rows - self.left[part]) * self.partners + met[part];
                ties = if cost == best_cost { ties + 1 } else { 1 };
                if cost < best_cost || (cost == best_cost && dice.roll().is_multiple_of(ties)) {
                    (best, best_cost) = (Some(part), cost);
                }
            }
            let best = best.expect("as many parts have quota left as a taker needs");
            meetings.add_to(&mut met, best);
            free[best] = false;
            chosen.push(best);
        }
        meetings.record(&chosen);
        chosen
    }

    /// Parts with most quota left, those that all remaining takers need among them.
    fn choose_fullest(&mut self, parts: usize, dice: &mut Dice) -> Vec<usize> {
        let mut top = || self.heap.pop().expect("as many parts have quota left as a taker needs");
        let chosen: Vec<(u32, u64, usize)> = (0..parts).map(|_| top()).collect();
        for (left, _, part) in chosen.iter().filter(|(left, ..)| *left > 1) {
            self.heap.push((left - 1, dice.roll(), *part));
        }
        chosen.into_iter().map(|(_, _, part)| part).collect()
    }
}

/// How often two parts were chosen together.
struct Meetings {
    parts: usize,
    counts: Vec<u32>,
}

impl Meetings {
    fn new(parts: usize) -> Self {
        Self { parts, counts: vec![0; parts * parts] }
    }

    /// Adds the meetings of `part` with every other part to `met`.
    fn add_to(&self, met: &mut [u64], part: usize) {
        let row = &self.counts[part * self.parts..][..self.parts];
        met.iter_mut().zip(row).for_each(|(met, count)| *met += u64::from(*count));
    }

    fn record(&mut self, chosen: &[usize]) {
        for (a, b) in chosen.iter().flat_map(|a| chosen.iter().map(move |b| (a, b))) {
            self.counts[a * self.parts + b] += 1;
        }
    }
}
