//! Where new data of a filesystem goes.

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

/// Another placement for a filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetPlacement {
    /// Where new data goes from now on.
    pub placement: Placement,
}
