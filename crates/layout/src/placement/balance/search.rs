//! Shortest chains of moves.
//!
//! Each step moves a position from one drive to the next, and is valid by itself in the plan as it is. On a shortest
//! chain all steps are valid together: two steps in one group that disturb each other would have a shortcut.

use std::collections::VecDeque;

use super::{Balance, Seat};

/// A breadth-first search from the positions of a drive to a drive below its share.
pub(super) struct Search {
    /// Drives not reached yet, by domain.
    unreached: Vec<Vec<u32>>,
    /// Domains with such drives.
    domains: Vec<u32>,
    /// The position over which a drive was reached.
    reached_by: Vec<Option<Seat>>,
    order: Vec<u32>,
}

impl Search {
    /// A search that leaves out `dead` drives; no drives if it is empty.
    pub(super) fn new(balance: &Balance, dead: &[bool]) -> Self {
        let mut unreached = vec![Vec::new(); balance.domains];
        for (number, drive) in (0u32..).zip(&balance.drives) {
            if drive.weight.is_some() && !dead.get(number as usize).copied().unwrap_or(false) {
                unreached[drive.domain as usize].push(number);
            }
        }
        let domains = (0..balance.domains as u32).filter(|domain| !unreached[*domain as usize].is_empty());
        let domains = domains.collect();
        Self { unreached, domains, reached_by: vec![None; balance.drives.len()], order: Vec::new() }
    }

    /// Drives that were reached.
    pub(super) fn visited(&self) -> impl Iterator<Item = u32> + '_ {
        self.order.iter().copied()
    }

    /// A shortest chain from one of these positions: positions and the drives that take them.
    pub(super) fn find(&mut self, balance: &Balance, starts: &[Seat]) -> Option<Vec<(Seat, u32)>> {
        let direct = starts.iter().find_map(|seat| balance.underfull_for(*seat).map(|drive| (*seat, drive)));
        if let Some(step) = direct {
            return Some(vec![step]);
        }
        let mut waiting: VecDeque<Vec<Seat>> = VecDeque::from([starts.to_vec()]);
        while let Some(seats) = waiting.pop_front() {
            for seat in seats {
                for drive in self.reach(balance, seat) {
                    // Positions that moved already first: moving them again costs nothing.
                    let mut next = balance.drive(drive).seats.clone();
                    let before =
                        |seat: &Seat| balance.before[seat.group as usize][usize::from(seat.position)];
                    next.sort_by_key(|seat| (before(seat) == drive, *seat));
                    let last = next.iter().find_map(|seat| Some((*seat, balance.underfull_for(*seat)?)));
                    if let Some(last) = last {
                        return Some(self.chain(balance, starts, last));
                    }
                    waiting.push_back(next);
                }
            }
        }
        None
    }

    /// Drives that a position may move to and that were not reached before.
    fn reach(&mut self, balance: &Balance, seat: Seat) -> Vec<u32> {
        let mut reached = Vec::new();
        let mut at = 0;
        while let Some(domain) = self.domains.get(at).copied() {
            let unreached = &mut self.unreached[domain as usize];
            if balance.has_room(seat, domain) {
                unreached.retain(|drive| {
                    let stays = balance.is_member(seat, *drive);
                    if !stays {
                        reached.push(*drive);
                    }
                    stays
                });
            }
            if unreached.is_empty() {
                self.domains.swap_remove(at);
            } else {
                at += 1;
            }
        }
        reached.iter().for_each(|drive| self.reached_by[*drive as usize] = Some(seat));
        self.order.extend(&reached);
        reached
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
