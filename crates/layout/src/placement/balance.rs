//! Plans groups again after drives came or went, weights changed, or a stricter rule became possible. As few positions
//! move as possible.
//!
//! Memberships are a flow: each group sends one unit per position through domains, which take as many as the rule says,
//! to drives, which take one of each group and their share in all. Three steps:
//! 1. positions that cannot stay, by the rule or because their drive takes no data, move to drives below their share;
//! 2. drives above their share give positions to drives below it: directly, or over a cheapest chain of other drives. If
//!    there is no chain, no other plan is more even;
//! 3. moves that turn out to be needless are taken back.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use base::{DriveId, Epoch};

use super::fair::{Bounds, Fair};
use super::shares::{Shares, in_tree_order, runs};
use super::{DriveSlot, Place, PlacementGroup, Rebuilding, Spread};

mod cycles;
mod search;
mod underfull;

use cycles::Exchanges;
use search::{Found, Search};
use underfull::Underfull;

/// A drive of a position that has none now.
const NONE: u32 = u32::MAX;
/// With more drives a position nearly always finds a direct move, and looking at all pairs takes long.
const DRIVES_MAX: u32 = 1500;
/// Steps that are tried to save moves: a second or two.
const WORK_MAX: u64 = 1_000_000_000;

/// Moves positions of the groups of one profile until all are valid under `rule` and every drive has its share of them.
/// Returns only the groups that change, each with `rule`, with moved positions as rebuilding from their old drives.
///
/// `drives` has every drive with its place; those that take no data have weight 0, and members that are not listed leave
/// too. The share of a drive is the one of [`super::plan_placement_groups`], rounded down or up to what it has. Groups that
/// are being rebuilt stay as they are, but count. A position stays if no drive can take it, and a group keeps its rule if
/// it does not satisfy the new one. The same arguments give the same result.
pub fn balance_groups(groups: &[PlacementGroup], drives: &[DriveSlot], rule: Spread) -> Vec<PlacementGroup> {
    let mut balance = Balance::new(groups, drives, rule);
    balance.settle_homeless();
    balance.level_out();
    balance.save_moves();
    groups.iter().enumerate().filter_map(|(at, group)| balance.changed(at, group)).collect()
}

/// A position of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Seat {
    group: u32,
    position: u8,
}

/// Drives, groups and who has what. Drives and domains are numbers from 0.
struct Balance {
    rule: Spread,
    drives: Vec<Drive>,
    /// The drives of each group, or `NONE`.
    members: Vec<Vec<u32>>,
    /// The same before anything moved.
    before: Vec<Vec<u32>>,
    underfull: Underfull,
    /// The drives with weight of each domain.
    runs: Vec<Range<u32>>,
    /// Positions of drives above their share at first: each of them must move.
    least_moves: u64,
    /// Steps that may be tried to save moves.
    work_left: u64,
}

struct Drive {
    id: DriveId,
    place: Place,
    domain: u32,
    /// Whether it takes data, and how much: `None` if it takes none.
    weight: Option<u64>,
    bounds: Option<Bounds>,
    quota: u32,
    /// Its share rounded down and up.
    quota_range: (u32, u32),
    count: u32,
    /// Its positions that may move.
    seats: Vec<Seat>,
}

impl Balance {
    fn new(groups: &[PlacementGroup], slots: &[DriveSlot], rule: Spread) -> Self {
        let mut drives = all_drives(groups, slots, rule);
        let number: BTreeMap<DriveId, u32> = (0..).zip(&drives).map(|(at, drive)| (drive.id, at)).collect();
        let before: Vec<Vec<u32>> =
            groups.iter().map(|group| group.members.iter().map(|member| number[member]).collect()).collect();
        for (group, members) in (0u32..).zip(&before) {
            let may_move = groups[group as usize].rebuilding.is_empty();
            for (position, member) in (0u8..).zip(members) {
                let drive = &mut drives[*member as usize];
                drive.count += 1;
                if may_move {
                    drive.seats.push(Seat { group, position });
                }
            }
        }
        let total: u64 = before.iter().map(|members| members.len() as u64).sum();
        // Drives with weight come first, in tree order.
        let weighted = in_tree_order(slots);
        let has: Vec<u32> = drives[..weighted.len()].iter().map(|drive| drive.count).collect();
        let shares = Shares::new(&weighted, rule, total, groups.len() as u32);
        let width = before.iter().map(Vec::len).max().unwrap_or(0);
        let fair = Fair::new(&weighted, rule, width);
        for ((drive, quota), range) in drives.iter_mut().zip(shares.near(&has)).zip(shares.ranges()) {
            (drive.quota, drive.quota_range) = (quota, range);
            drive.bounds = Some(fair.bounds(drive.place));
        }
        let runs = runs(&weighted, 0..weighted.len(), rule.level);
        let runs = runs.into_iter().map(|run| run.start as u32..run.end as u32).collect();
        let domains = drives.iter().map(|drive| drive.domain as usize + 1).max().unwrap_or(0);
        let least_moves = drives.iter().map(|drive| u64::from(drive.count.saturating_sub(drive.quota))).sum();
        let mut underfull = Underfull::new(domains);
        for (number, drive) in (0..).zip(&drives) {
            underfull.set(drive.domain, number, 0, drive.quota.saturating_sub(drive.count));
        }
        Self {
            rule,
            drives,
            members: before.clone(),
            before,
            underfull,
            runs,
            least_moves,
            work_left: WORK_MAX,
        }
    }

    fn drive(&self, number: u32) -> &Drive {
        &self.drives[number as usize]
    }

    /// The drive of a position, or `NONE`.
    fn at(&self, seat: Seat) -> u32 {
        self.members[seat.group as usize][usize::from(seat.position)]
    }

    /// The other drives of a position's group.
    fn others(&self, seat: Seat) -> impl Iterator<Item = u32> + '_ {
        let members = self.members[seat.group as usize].iter().enumerate();
        let others = members.filter(move |(position, _)| *position != usize::from(seat.position));
        others.map(|(_, member)| *member).filter(|member| *member != NONE)
    }

    /// Whether the rule lets the position move into a domain.
    fn has_room(&self, seat: Seat, domain: u32) -> bool {
        let inside = self.others(seat).filter(|other| self.drive(*other).domain == domain).count();
        inside < usize::from(self.rule.most())
    }

    fn is_member(&self, seat: Seat, drive: u32) -> bool {
        self.members[seat.group as usize].contains(&drive)
    }

    /// Moves a position to a drive, or to `NONE`.
    fn relocate(&mut self, seat: Seat, to: u32) {
        let from = std::mem::replace(&mut self.members[seat.group as usize][usize::from(seat.position)], to);
        for (number, change) in [(from, -1), (to, 1)].into_iter().filter(|(number, _)| *number != NONE) {
            let drive = &mut self.drives[number as usize];
            let lacked = drive.quota.saturating_sub(drive.count);
            drive.count = drive.count.strict_add_signed(change);
            if change > 0 {
                drive.seats.push(seat);
            } else {
                let at =
                    drive.seats.iter().position(|other| *other == seat).expect("the drive has the position");
                drive.seats.swap_remove(at);
            }
            let lacks = drive.quota.saturating_sub(drive.count);
            self.underfull.set(drive.domain, number, lacked, lacks);
        }
    }

    /// How a drive that takes data suits the group of a position.
    fn unevenness(&self, seat: Seat, drive: u32) -> super::fair::Unevenness {
        let bounds = self.drive(drive).bounds.as_ref().expect("a drive that takes data has bounds");
        bounds.unevenness(self.others(seat).map(|other| self.drive(other).place))
    }

    /// A drive below its share that may take the position: of several that lack much, the one that makes the group most
    /// even.
    fn underfull_for(&self, seat: Seat) -> Option<u32> {
        /// More are as good and cost time.
        const CANDIDATES_MAX: usize = 8;
        let domains = self.underfull.domains().filter(|domain| self.has_room(seat, *domain));
        let free = domains
            .filter_map(|domain| self.underfull.drives(domain).find(|drive| !self.is_member(seat, *drive)));
        free.take(CANDIDATES_MAX).min_by_key(|drive| self.unevenness(seat, *drive))
    }

    /// How many positions a drive has above its share.
    fn above_share(&self, number: u32) -> i64 {
        let drive = self.drive(number);
        i64::from(drive.count) - i64::from(drive.quota)
    }

    /// The drive that had the position at first.
    fn drive_before(&self, seat: Seat) -> u32 {
        self.before[seat.group as usize][usize::from(seat.position)]
    }

    /// Whether the drive of a position is new in the group. At which position it was before does not matter.
    fn has_moved(&self, seat: Seat) -> bool {
        !self.before[seat.group as usize].contains(&self.at(seat))
    }

    /// Drives that the group of a position had, to which the position may move.
    fn homes(&self, seat: Seat) -> impl Iterator<Item = u32> + '_ {
        let before = self.before[seat.group as usize].iter().copied();
        before.filter(move |number| {
            let drive = self.drive(*number);
            drive.weight.is_some() && !self.is_member(seat, *number) && self.has_room(seat, drive.domain)
        })
    }

    /// All positions of a group.
    fn seats_of(&self, group: u32) -> impl Iterator<Item = Seat> + Clone + use<> {
        (0..self.members[group as usize].len() as u8).map(move |position| Seat { group, position })
    }

    /// Whether the rule does not let a position stay where it is.
    fn must_leave(&self, seat: Seat) -> bool {
        let member = self.at(seat);
        if member == NONE {
            return false;
        }
        self.others(seat).any(|other| other == member) || !self.has_room(seat, self.drive(member).domain)
    }

    /// First step: takes positions that cannot stay from their drives, then finds a new drive for each.
    fn settle_homeless(&mut self) {
        let homeless = self.evict();
        // Those that cannot go anywhere return.
        let mut stranded = Vec::new();
        for seat in homeless {
            if !self.settle(seat) {
                stranded.push(seat);
            }
        }
        stranded.into_iter().for_each(|seat| self.relocate(seat, self.drive_before(seat)));
    }

    /// Takes as few positions from their drives as the rule demands.
    fn evict(&mut self) -> Vec<Seat> {
        let free: BTreeSet<Seat> = self.drives.iter().flat_map(|drive| drive.seats.iter().copied()).collect();
        let mut homeless: Vec<Seat> =
            free.iter().filter(|seat| self.drive(self.at(**seat)).weight.is_none()).copied().collect();
        homeless.iter().for_each(|seat| self.relocate(*seat, NONE));
        let groups: BTreeSet<u32> = free.iter().map(|seat| seat.group).collect();
        for group in groups {
            // Of the members that are too many in a domain, the one leaves whose drive has most above its share.
            let worst = |balance: &Self| {
                let leaving = balance.seats_of(group).filter(|seat| balance.must_leave(*seat));
                leaving.max_by_key(|seat| balance.above_share(balance.at(*seat)))
            };
            while let Some(seat) = worst(self) {
                self.relocate(seat, NONE);
                homeless.push(seat);
            }
        }
        homeless
    }

    /// Finds a drive for a position that has none: one below its share, directly or over a chain, or any that may.
    fn settle(&mut self, seat: Seat) -> bool {
        if let Some(drive) = self.underfull_for(seat) {
            self.relocate(seat, drive);
            return true;
        }
        if !self.underfull.is_empty() {
            let mut search = Search::new(self, &[]);
            if let Found::Chain(chain) = search.find(self, &[seat], i32::MAX) {
                return self.follow(&chain);
            }
        }
        let takes = |number: &u32| {
            let drive = self.drive(*number);
            drive.weight.is_some() && !self.is_member(seat, *number) && self.has_room(seat, drive.domain)
        };
        let above =
            |number: &u32| i64::from(self.drive(*number).count) - i64::from(self.drive(*number).quota);
        let least = (0..self.drives.len() as u32).filter(takes).min_by_key(above);
        least.inspect(|drive| self.relocate(seat, *drive)).is_some()
    }

    /// Second step: drives above their share give positions away.
    fn level_out(&mut self) {
        for number in 0..self.drives.len() as u32 {
            self.give_directly(number);
        }
        // Cheapest chains first: what they cost never falls by using others. Where a chain of some cost is not found now
        // there will never be one; and chains that are used later do not touch drives from which none leads on at all.
        let mut dead = vec![false; self.drives.len()];
        for cost_max in 1..self.drives.len() as i32 {
            let overfull: Vec<u32> =
                (0..self.drives.len() as u32).filter(|drive| self.is_overfull(*drive)).collect();
            if overfull.iter().all(|drive| dead[*drive as usize]) || self.underfull.is_empty() {
                return;
            }
            for number in overfull {
                while self.is_overfull(number) && !dead[number as usize] {
                    let seats = self.seats_by_preference(number);
                    let mut search = Search::new(self, &dead);
                    match search.find(self, &seats, cost_max) {
                        Found::Chain(chain) => {
                            assert!(self.follow(&chain), "steps of a shortest chain are valid")
                        }
                        Found::OnlyDearer => break,
                        Found::Nothing => {
                            dead[number as usize] = true;
                            search.visited().for_each(|drive| dead[drive as usize] = true);
                        }
                    }
                }
            }
        }
    }

    /// Moves along a chain, or not at all if its steps are not valid together.
    fn follow(&mut self, chain: &[(Seat, u32)]) -> bool {
        let mut done = Vec::new();
        for (seat, to) in chain {
            if self.is_member(*seat, *to) || !self.has_room(*seat, self.drive(*to).domain) {
                done.into_iter().rev().for_each(|(seat, from)| self.relocate(seat, from));
                return false;
            }
            done.push((*seat, self.at(*seat)));
            self.relocate(*seat, *to);
        }
        true
    }

    /// Third step: takes back moves that turn out to be needless, as long as a cycle of moves saves one.
    fn save_moves(&mut self) {
        let groups = 0..self.members.len() as u32;
        let moved =
            groups.flat_map(|group| self.seats_of(group)).filter(|seat| self.has_moved(*seat)).count();
        let is_small = self.runs.last().is_some_and(|run| run.end <= DRIVES_MAX);
        while is_small && moved as u64 > self.least_moves && self.work_left > 0 {
            let mut exchanges = Exchanges::new(self);
            let (cycles, work) = (exchanges.cycles(), exchanges.work());
            self.work_left = self.work_left.saturating_sub(work);
            // They have no drives in common.
            if cycles.iter().filter(|cycle| self.follow(cycle)).count() == 0 {
                return;
            }
        }
    }

    fn is_overfull(&self, number: u32) -> bool {
        let drive = self.drive(number);
        drive.weight.is_some() && drive.count > drive.quota
    }

    fn give_directly(&mut self, number: u32) {
        if !self.is_overfull(number) {
            return;
        }
        for seat in self.seats_by_preference(number) {
            if !self.is_overfull(number) || self.underfull.is_empty() {
                return;
            }
            if let Some(drive) = self.underfull_for(seat) {
                self.relocate(seat, drive);
            }
        }
    }

    /// The positions of a drive: those that moved already, then those whose groups have too many members around here.
    fn seats_by_preference(&self, number: u32) -> Vec<Seat> {
        let mut seats = self.drive(number).seats.clone();
        seats.sort_by_cached_key(|seat| {
            (!self.has_moved(*seat), std::cmp::Reverse(self.unevenness(*seat, number)), *seat)
        });
        seats
    }

    /// The group with what changed, if anything did.
    fn changed(&self, at: usize, group: &PlacementGroup) -> Option<PlacementGroup> {
        if !group.rebuilding.is_empty() {
            return None;
        }
        let mut next = group.clone();
        // Drives that stay keep their positions.
        let (before, now) = (&self.before[at], &self.members[at]);
        let mut new = now.iter().filter(|drive| !before.contains(drive));
        for (position, old) in before.iter().enumerate().filter(|(_, old)| !now.contains(old)) {
            let number = new.next().expect("as many drives come as go");
            next.members[position] = self.drive(*number).id;
            next.rebuilding.push(Rebuilding { position: position as u8, from: self.drive(*old).id });
        }
        if !self.seats_of(at as u32).any(|seat| self.must_leave(seat)) {
            next.spread = self.rule;
        }
        let has_changed = next != *group;
        next.epoch = Epoch(group.epoch.0 + 1);
        has_changed.then_some(next)
    }
}

/// All drives, those with weight first and in tree order. Their domains are numbered in that order.
fn all_drives(groups: &[PlacementGroup], slots: &[DriveSlot], rule: Spread) -> Vec<Drive> {
    let new = |id, place, weight| {
        let seats = Vec::new();
        Drive { id, place, domain: 0, weight, bounds: None, quota: 0, quota_range: (0, 0), count: 0, seats }
    };
    let mut drives: Vec<Drive> = Vec::new();
    let mut known: BTreeSet<DriveId> = BTreeSet::new();
    let mut numbers: BTreeMap<u64, u32> = BTreeMap::new();
    let weightless = slots.iter().filter(|slot| slot.weight_bytes == 0).copied();
    for slot in in_tree_order(slots).into_iter().chain(weightless) {
        if known.insert(slot.drive) {
            let weight = (slot.weight_bytes > 0).then_some(slot.weight_bytes);
            let next = numbers.len() as u32;
            let domain = *numbers.entry(slot.place.domain(rule.level, slot.drive)).or_insert(next);
            drives.push(Drive { domain, ..new(slot.drive, slot.place, weight) });
        }
    }
    let mut domains = numbers.len() as u32;
    for member in groups.iter().flat_map(|group| &group.members) {
        if known.insert(*member) {
            // It is nowhere, so it is in nobody's way.
            let place = Place { zone: u32::MAX, rack: u32::MAX, node: u32::MAX };
            drives.push(Drive { domain: domains, ..new(*member, place, None) });
            domains += 1;
        }
    }
    drives
}
