//! How much is away at once, and whether the cluster may do without it by itself.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use base::NodeId;

use crate::{Cluster, DriveRecord, Seen};

/// The cluster gives up at most this part of its drives by itself.
const PART: usize = 4;

/// So much is away that it has rather one cause with a remedy, such as a network or a fuse, than is lost: a person has to decide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WideAbsence {
    /// All drives of a rack with several nodes.
    Rack {
        /// Its name; empty for the nodes without one.
        rack: String,
    },
    /// More than a quarter of all drives, which are not those of one node.
    Drives {
        /// Drives that are away.
        away: usize,
        /// All drives in use.
        all: usize,
    },
}

impl fmt::Display for WideAbsence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rack { rack } if rack.is_empty() => f.write_str("all nodes without a rack are away"),
            Self::Rack { rack } => write!(f, "all of rack {rack} is away"),
            Self::Drives { away, all } => write!(f, "{away} of {all} drives are away at once"),
        }
    }
}

/// Drives in use, and those of them that are away.
#[derive(Debug, Default)]
struct Count {
    all: usize,
    away: usize,
    nodes: BTreeSet<NodeId>,
}

impl Count {
    fn add(&mut self, drive: &DriveRecord, seen: &Seen) {
        self.all += 1;
        self.away += usize::from(!seen.readable.contains(&drive.id));
        self.nodes.insert(drive.node);
    }

    fn is_away(&self) -> bool {
        self.away == self.all
    }
}

impl Cluster {
    /// Whether too much is away for the cluster to give it up by itself. One drive, and the drives of one node of several, never are
    /// too much. Drives that were given up do not count.
    pub fn wide_absence(&self, seen: &Seen) -> Option<WideAbsence> {
        let (mut whole, mut of_away) = (Count::default(), Count::default());
        let mut racks: BTreeMap<(&str, &str), Count> = BTreeMap::new();
        for drive in self.drives.values().filter(|drive| !drive.is_given_up()) {
            whole.add(drive, seen);
            if !seen.readable.contains(&drive.id) {
                of_away.add(drive, seen);
            }
            let rack = self.nodes.get(&drive.node).map(|node| node.rack()).unwrap_or_default();
            racks.entry(rack).or_default().add(drive, seen);
        }
        let is_one_node = of_away.nodes.len() == 1 && whole.nodes.len() > 1;
        if of_away.away <= 1 || is_one_node {
            return None;
        }
        let several = racks.len() > 1;
        let mut gone = racks.iter().filter(|(_, count)| several && count.nodes.len() > 1 && count.is_away());
        if let Some(((_, rack), _)) = gone.next() {
            return Some(WideAbsence::Rack { rack: (*rack).to_owned() });
        }
        let is_too_much = of_away.away * PART > whole.all;
        is_too_much.then_some(WideAbsence::Drives { away: of_away.away, all: whole.all })
    }
}

#[cfg(test)]
mod tests {
    use base::DriveId;

    use super::*;
    use crate::members::tests::{cluster, seen_without};

    /// What is too much, with these drives away.
    fn absence(cluster: &Cluster, away: &[u32]) -> Option<String> {
        cluster.wide_absence(&seen_without(cluster, away)).map(|absence| absence.to_string())
    }

    #[test]
    fn one_drive_one_node_and_a_quarter_of_the_drives_are_given_up_without_a_person() {
        let one_node = cluster(&[3], "r2");
        assert_eq!(absence(&one_node, &[]), None);
        assert_eq!(absence(&one_node, &[0]), None, "one drive");
        assert_eq!(absence(&one_node, &[0, 1]).unwrap(), "2 of 3 drives are away at once");
        assert!(absence(&one_node, &[0, 1, 2]).is_some(), "the only node");
        let nodes = cluster(&[2, 2, 2, 2], "r2");
        assert_eq!(absence(&nodes, &[2, 3]), None, "one node");
        assert_eq!(absence(&nodes, &[1, 2]), None, "a quarter");
        assert_eq!(absence(&nodes, &[1, 2, 3]).unwrap(), "3 of 8 drives are away at once");
        let three = cluster(&[4, 1, 1], "r2");
        assert_eq!(absence(&three, &[0, 1, 2, 3]), None, "one node, whatever it has");
    }

    #[test]
    fn what_was_given_up_does_not_count() {
        let mut nodes = cluster(&[2, 2, 2, 2], "r2");
        for id in [0, 1] {
            nodes.drives.get_mut(&DriveId(id)).unwrap().state = layout::DriveState::Out;
        }
        assert_eq!(absence(&nodes, &[0, 1, 2, 3]), None);
        assert_eq!(absence(&nodes, &[0, 1, 3, 4]).unwrap(), "2 of 6 drives are away at once");
    }

    #[test]
    fn a_whole_rack_is_too_much_unless_it_is_one_node() {
        let mut racks = cluster(&[1; 12], "r2");
        for drive in racks.drives.values() {
            let node = racks.nodes.get_mut(&drive.node).unwrap();
            node.rack = ["a", "a", "b"].get(drive.id.0 as usize).unwrap_or(&"c").to_string();
        }
        assert_eq!(absence(&racks, &[0, 1]).unwrap(), "all of rack a is away");
        assert_eq!(absence(&racks, &[2]), None, "one node");
        assert_eq!(absence(&racks, &[0, 2]), None, "a part of one, and one node");
        assert_eq!(absence(&racks, &[0, 2, 3, 4]).unwrap(), "4 of 12 drives are away at once");
        racks.nodes.values_mut().for_each(|node| node.rack.clear());
        assert_eq!(absence(&racks, &[0, 1]), None, "nobody named racks");
    }
}
