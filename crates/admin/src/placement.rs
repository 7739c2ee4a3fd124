//! Where new data of a filesystem goes.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// Where new data of a filesystem goes, within the rules of its profile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Evenly to all drives.
    #[default]
    Spread,
    /// The first copy, or as many data shards as possible, to the node that writes; or else to its rack or zone.
    Local,
}

impl Placement {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The nodes whose drives a filesystem's data is for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetNodes {
    /// Their numbers; none: all nodes. New data goes there at once, stored data follows in the background.
    pub nodes: BTreeSet<u32>,
    /// Only say what would move.
    #[serde(default)]
    pub dry_run: bool,
}

/// Whether nothing is at nodes that are not for the filesystem.
pub(crate) fn none_elsewhere(groups: &u64) -> bool {
    *groups == 0
}

/// Another placement for a filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetPlacement {
    /// Where new data goes from now on.
    pub placement: Placement,
}
