//! Cheapest chains of moves.
//!
//! Each step moves a position from one drive to the next, and is valid by itself in the plan as it is. A step costs 1, or
//! nothing if the position has moved already. Of the cheapest chains a shortest one is taken. On it all steps are valid
//! together: two steps in one group that disturb each other would have a shortcut, which costs no more.

use std::collections::BTreeMap;

use super::{Balance, Seat};

/// A search by cost, then by length, from the positions of a drive to a drive below its share.
pub(super) struct Search {
    /// Drives not reached yet: for each domain, where they begin and how many they are.
    unreached: Vec<u32>,
    domains: Vec<(u32, u32)>,
    /// The position over which a drive was reached.
    reached_by: Vec<Option<Seat>>,
    order: Vec<u32>,
}

/// What a search found.
pub(super) enum Found {
    /// Positions and the drives that take them.
    Chain(Vec<(Seat, u32)>),
    /// No chain that is cheap enough.
    OnlyDearer,
    /// No chain: all drives that can be reached were visited.
    Nothing,
}

/// Cost and length of a chain.
type Length = (i32, u32);

impl Search {
    /// A search that leaves out `dead` drives; no drives if it is empty.
    pub(super) fn new(balance: &Balance, dead: &[bool]) -> Self {
        let is_dead = |number: u32| dead.get(number as usize).copied().unwrap_or(false);
        let mut unreached: Vec<u32> = (0..balance.runs.last().map_or(0, |run| run.end)).collect();
        let mut domains = Vec::with_capacity(balance.runs.len());
        for run in &balance.runs {
            let mut count = 0;
            for number in run.clone().filter(|number| !is_dead(*number)) {
                unreached[(run.start + count) as usize] = number;
                count += 1;
            }
            if count > 0 {
                domains.push((run.start, count));
            }
        }
        let reached_by = vec![None; balance.drives.len()];
        Self { unreached, domains, reached_by, order: Vec::new() }
    }

    /// Drives that were reached.
    pub(super) fn visited(&self) -> impl Iterator<Item = u32> + '_ {
        self.order.iter().copied()
    }

    /// A cheapest chain from one of these positions.
    pub(super) fn find(&mut self, balance: &Balance, starts: &[Seat], cost_max: i32) -> Found {
        let mut waiting: BTreeMap<Length, Vec<Seat>> = BTreeMap::new();
        add(&mut waiting, balance, starts, (0, 0));
        while let Some((length, seats)) = waiting.pop_first() {
            if length.0 > cost_max {
                return Found::OnlyDearer;
            }
            for seat in &seats {
                if let Some(drive) = balance.underfull_for(*seat) {
                    return Found::Chain(self.chain(balance, starts, (*seat, drive)));
                }
            }
            for seat in seats {
                for drive in self.reach(balance, seat) {
                    add(&mut waiting, balance, &balance.drive(drive).seats, length);
                }
            }
        }
        Found::Nothing
    }

    /// Drives that a position may move to and that were not reached before.
    fn reach(&mut self, balance: &Balance, seat: Seat) -> Vec<u32> {
        let before = self.order.len();
        let mut at = 0;
        while let Some((start, count)) = self.domains.get(at).copied() {
            let domain = balance.drive(self.unreached[start as usize]).domain;
            let mut left = 0;
            if balance.has_room(seat, domain) {
                for index in start..start + count {
                    let number = self.unreached[index as usize];
                    if balance.is_member(seat, number) {
                        self.unreached[(start + left) as usize] = number;
                        left += 1;
                    } else {
                        self.reached_by[number as usize] = Some(seat);
                        self.order.push(number);
                    }
                }
            } else {
                left = count;
            }
            self.domains[at].1 = left;
            if left == 0 {
                self.domains.swap_remove(at);
            } else {
                at += 1;
            }
        }
        self.order[before..].to_vec()
    }

    /// The chain that ends with a step.
    fn chain(&self, balance: &Balance, starts: &[Seat], last: (Seat, u32)) -> Vec<(Seat, u32)> {
        let mut chain = vec![last];
        let mut seat = last.0;
        while !starts.contains(&seat) {
            let drive = balance.at(seat);
            seat = self.reached_by[drive as usize].expect("the chain came over this drive");
            chain.push((seat, drive));
        }
        chain.reverse();
        chain
    }
}

/// Adds the positions of a drive that was reached by a chain of this length.
fn add(waiting: &mut BTreeMap<Length, Vec<Seat>>, balance: &Balance, seats: &[Seat], (cost, steps): Length) {
    for seat in seats {
        let step = i32::from(!balance.has_moved(*seat));
        waiting.entry((cost + step, steps + 1)).or_default().push(*seat);
    }
}
