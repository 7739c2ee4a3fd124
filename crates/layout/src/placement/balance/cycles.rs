//! Cycles of moves that save one.
//!
//! On a cycle every drive gives and takes one position. A move of a position that stayed costs 1, to a drive that its
//! group had at first it saves 1. A drive may also give or take one alone, as far as its share may be rounded down or up.

use super::{Balance, Seat};

/// For each pair of drives the cheapest move between them.
pub(super) struct Exchanges<'a> {
    balance: &'a Balance,
    drives: usize,
    /// Cost and position by giving and taking drive. The last drive stands for rounding.
    moves: Vec<Option<(i32, Option<Seat>)>>,
    work: u64,
}

impl<'a> Exchanges<'a> {
    pub(super) fn new(balance: &'a Balance) -> Self {
        let weighted = balance.runs.last().map_or(0, |run| run.end);
        let drives = weighted as usize + 1;
        let mut exchanges = Self { balance, drives, moves: vec![None; drives * drives], work: 0 };
        for from in 0..weighted {
            // Those that moved first: for them any move is cheap.
            let (moved, stayed): (Vec<Seat>, Vec<Seat>) =
                balance.drive(from).seats.iter().partition(|seat| balance.has_moved(**seat));
            let mut unknown = weighted - 1;
            moved.into_iter().for_each(|seat| exchanges.add_moves(from, seat, 1, &mut unknown));
            stayed.into_iter().for_each(|seat| exchanges.add_moves(from, seat, 0, &mut unknown));
            let drive = balance.drive(from);
            let (least, most) = drive.quota_range;
            let rounding = drives - 1;
            if drive.count < most {
                exchanges.moves[from as usize * drives + rounding] = Some((0, None));
            }
            if drive.count > least {
                exchanges.moves[rounding * drives + from as usize] = Some((0, None));
            }
        }
        exchanges
    }

    /// How much was looked at.
    pub(super) fn work(&self) -> u64 {
        self.work + (self.drives * self.drives) as u64
    }

    /// Adds the moves of a position from a drive that costs this much less than one of its group's first drives.
    ///
    /// `unknown` counts drives to which no move is known: only these are looked at, beside drives that the group had.
    fn add_moves(&mut self, from: u32, seat: Seat, saved: i32, unknown: &mut u32) {
        let balance = self.balance;
        let row = from as usize * self.drives;
        for home in balance.homes(seat) {
            let best = &mut self.moves[row + home as usize];
            *unknown -= u32::from(best.is_none());
            if best.is_none_or(|(other, _)| -saved < other) {
                *best = Some((-saved, Some(seat)));
            }
        }
        if *unknown == 0 {
            return;
        }
        for run in balance.runs.iter().filter(|run| balance.has_room(seat, balance.drive(run.start).domain)) {
            self.work += u64::from(run.end - run.start);
            for to in run.clone() {
                let best = &mut self.moves[row + to as usize];
                if best.is_none() && !balance.is_member(seat, to) {
                    *best = Some((1 - saved, Some(seat)));
                    *unknown -= 1;
                }
            }
        }
    }

    /// Cycles with a cost below 0, those of few moves first (Bellman and Ford).
    pub(super) fn cycles(&mut self) -> Vec<Vec<(Seat, u32)>> {
        let mut cost = vec![0i32; self.drives];
        let mut by = vec![None; self.drives];
        let mut cheaper: Vec<usize> = (0..self.drives).collect();
        for _ in 0..self.drives {
            let before = cost.clone();
            let mut is_cheaper = vec![false; self.drives];
            self.work += (cheaper.len() * self.drives) as u64;
            for from in cheaper {
                for (to, step) in self.moves[from * self.drives..][..self.drives].iter().enumerate() {
                    let Some((step, _)) = step else { continue };
                    if before[from] + step < cost[to] {
                        (cost[to], by[to], is_cheaper[to]) = (before[from] + step, Some(from), true);
                    }
                }
            }
            cheaper = (0..self.drives).filter(|number| is_cheaper[*number]).collect();
            let cycles = if cheaper.is_empty() { Vec::new() } else { self.cycles_of(&by) };
            if cheaper.is_empty() || !cycles.is_empty() {
                return cycles;
            }
        }
        Vec::new()
    }

    /// The cycles among the drives over which drives were reached.
    fn cycles_of(&self, by: &[Option<usize>]) -> Vec<Vec<(Seat, u32)>> {
        let mut seen = vec![usize::MAX; by.len()];
        let mut cycles = Vec::new();
        for start in 0..by.len() {
            let mut number = start;
            while let (usize::MAX, Some(from)) = (seen[number], by[number]) {
                seen[number] = start;
                number = from;
            }
            if seen[number] != start {
                continue;
            }
            let (end, mut cycle) = (number, Vec::new());
            while let Some(from) = by[number] {
                if let Some((_, Some(seat))) = self.moves[from * self.drives + number] {
                    cycle.push((seat, number as u32));
                }
                number = from;
                if number == end {
                    break;
                }
            }
            cycles.push(cycle);
        }
        cycles
    }
}
