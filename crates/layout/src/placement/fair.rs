//! How many members of a group a zone, rack or node should have: its share by weight, rounded down or up.

use std::collections::HashMap;

use super::shares::{Shares, in_tree_order};
use super::{DriveSlot, Place, Spread};

/// The groups for which shares are computed, which is the precision of a share.
const PRECISION: u32 = 1 << 16;

/// The part of a member by which a share may be missed. A lost drive changes shares of whole members by that little, and
/// nobody should have one more for it.
const SLACK: u32 = PRECISION / 4;

/// The fewest and most members that each zone, rack and node should have in a group.
pub(super) struct Fair {
    bounds: [HashMap<u32, u64>; 3],
}

/// The bounds of the zone, rack and node of one place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    place: Place,
    bounds: [(u32, u32); 3],
}

/// How a further member at a place suits a group. Less is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Unevenness {
    /// Members above what its zone, rack and node should have.
    excess: u32,
    /// Those of its zone, rack and node that do not lack a member.
    filled: u32,
}

impl Fair {
    /// For groups of n members on these drives.
    pub(super) fn new(drives: &[DriveSlot], spread: Spread, n: usize) -> Self {
        let slots = in_tree_order(drives);
        let shares = Shares::new(&slots, spread, n as u64 * u64::from(PRECISION), PRECISION).rounded();
        let mut bounds = [HashMap::new(), HashMap::new(), HashMap::new()];
        for (slot, share) in slots.iter().zip(shares) {
            for (number, sums) in levels(slot.place).into_iter().zip(&mut bounds) {
                *sums.entry(number).or_default() += u64::from(share);
            }
        }
        Self { bounds }
    }

    /// The bounds for a place.
    pub(super) fn bounds(&self, place: Place) -> Bounds {
        let [zone, rack, node] = levels(place);
        let bound = |level: usize, number: u32| {
            let share = self.bounds[level].get(&number).copied().unwrap_or(0);
            let (precision, slack) = (u64::from(PRECISION), u64::from(SLACK));
            let (least, most) =
                ((share + slack) / precision, share.saturating_sub(slack).div_ceil(precision));
            (least as u32, most.max(1) as u32)
        };
        Bounds { place, bounds: [bound(0, zone), bound(1, rack), bound(2, node)] }
    }
}

impl Bounds {
    /// How a member here suits a group with these other members.
    pub(super) fn unevenness(&self, others: impl Iterator<Item = Place>) -> Unevenness {
        let mine = levels(self.place);
        let mut have = [0u32; 3];
        for other in others {
            for (have, (mine, other)) in have.iter_mut().zip(mine.into_iter().zip(levels(other))) {
                *have += u32::from(mine == other);
            }
        }
        let mut unevenness = Unevenness { excess: 0, filled: 0 };
        for (have, (least, most)) in have.into_iter().zip(self.bounds) {
            unevenness.excess += (have + 1).saturating_sub(most);
            unevenness.filled += u32::from(have >= least);
        }
        unevenness
    }
}

fn levels(place: Place) -> [u32; 3] {
    [place.zone, place.rack, place.node]
}
