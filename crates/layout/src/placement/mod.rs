//! Which drives hold a stripe together: explicit placement groups, planned evenly.
//!
//! Groups are listed, not hashed: balance is exact, only planned data moves, and the number of groups bounds the number
//! of combinations of drives that can lose data together.
//!
//! Every drive has a [`Place`]: zone, rack and node. Every group has one rule, its [`Spread`]. Every choice of
//! members has the same three parts: the rule, the drives' exact shares by weight under it, and how evenly these shares
//! divide over zones, racks and nodes.

use std::fmt;
use std::str::FromStr;

use base::{DriveId, Epoch, PgId};
use serde::{Deserialize, Serialize};

use crate::Profile;

mod balance;
mod dice;
mod fair;
mod losses;
mod order;
mod plan;
mod replace;
mod shares;
mod spread;

pub use balance::balance_groups;
pub use losses::{acknowledgements_survive, losses_survived, writes_survive};
pub use plan::{plan_placement_groups, suggested_pg_count};
pub use replace::{replace_members, return_members};
pub use spread::{Fitting, Spread};

/// A level of parts that fail together. On a single node the domain is the drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FailureDomain {
    /// One device.
    Drive,
    /// One server.
    Node,
    /// Nodes that share power or a switch.
    Rack,
    /// A room or site.
    Zone,
}

/// The text is none of the levels.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown failure domain: text={0:?} (drive, node, rack or zone)")]
pub struct ParseFailureDomainError(String);

impl fmt::Display for FailureDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            FailureDomain::Drive => "drive",
            FailureDomain::Node => "node",
            FailureDomain::Rack => "rack",
            FailureDomain::Zone => "zone",
        })
    }
}

impl FromStr for FailureDomain {
    type Err = ParseFailureDomainError;

    fn from_str(text: &str) -> Result<Self, ParseFailureDomainError> {
        let levels = [FailureDomain::Drive, FailureDomain::Node, FailureDomain::Rack, FailureDomain::Zone];
        levels
            .into_iter()
            .find(|level| level.to_string() == text)
            .ok_or_else(|| ParseFailureDomainError(text.to_owned()))
    }
}

/// Numbers of the zone, rack and node that hold a drive. Each is unique in the cluster at its level.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Place {
    /// The room or site.
    pub zone: u32,
    /// The rack in it.
    pub rack: u32,
    /// The server in it.
    pub node: u32,
}

impl Place {
    /// The domain that holds the drive `drive` of this place; at the level of drives, the drive's own number.
    pub fn domain(self, level: FailureDomain, drive: DriveId) -> u64 {
        u64::from(match level {
            FailureDomain::Drive => drive.0,
            FailureDomain::Node => self.node,
            FailureDomain::Rack => self.rack,
            FailureDomain::Zone => self.zone,
        })
    }
}

/// A drive available to the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveSlot {
    /// The drive.
    pub drive: DriveId,
    /// What holds it.
    pub place: Place,
    /// Its share of the data, usually its capacity; 0 for none.
    pub weight_bytes: u64,
}

/// All stripes that share one ordered set of drives: shard i of each is on `members[i]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementGroup {
    /// Its number.
    pub id: PgId,
    /// Grows with every change of the members.
    pub epoch: Epoch,
    /// The drives, all different.
    pub members: Vec<DriveId>,
    /// The rule that says how many of them may fail together.
    #[serde(default)]
    pub spread: Spread,
    /// The map for which it was planned. Groups of one plan have about the same data, unless placement is local.
    #[serde(default)]
    pub planned: Epoch,
    /// Positions whose members do not have all their shards yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rebuilding: Vec<Rebuilding>,
}

/// A position of a group that is not rebuilt yet: it moved to another drive, or its drive returned without some of its
/// shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebuilding {
    /// The position.
    pub position: u8,
    /// The previous drive, which may still be readable; or the member itself, which has some of its shards.
    pub from: DriveId,
}

impl PlacementGroup {
    /// A new group, of which only the drives must differ.
    pub fn new(id: PgId, members: Vec<DriveId>) -> Self {
        Self {
            id,
            epoch: Epoch(1),
            members,
            spread: Spread::default(),
            planned: Epoch(0),
            rebuilding: Vec::new(),
        }
    }

    /// The group under another rule.
    #[must_use]
    pub fn with_spread(self, spread: Spread) -> Self {
        Self { spread, ..self }
    }

    /// Whether the member of a position may lack shards.
    pub fn is_rebuilding(&self, position: u8) -> bool {
        self.rebuilding.iter().any(|rebuilding| rebuilding.position == position)
    }

    /// Previous drives of a position that may still have its shards, the latest first. Without the current member.
    pub fn sources(&self, position: u8) -> impl Iterator<Item = DriveId> + '_ {
        let member = self.members.get(usize::from(position)).copied();
        let moved = self.rebuilding.iter().rev().filter(move |rebuilding| rebuilding.position == position);
        moved.map(|rebuilding| rebuilding.from).filter(move |from| Some(*from) != member)
    }

    /// Members that returned without some of their shards and are not rebuilt yet.
    pub fn returned(&self) -> impl Iterator<Item = DriveId> + '_ {
        let is_member = |rebuilding: &&Rebuilding| {
            self.members.get(usize::from(rebuilding.position)) == Some(&rebuilding.from)
        };
        self.rebuilding.iter().filter(is_member).map(|rebuilding| rebuilding.from)
    }

    /// The group after a member returned without some of its shards. `None` if the drive is not a member, or the group
    /// already says so.
    #[must_use]
    pub fn returned_with_gap(&self, drive: DriveId) -> Option<Self> {
        let positions = (0u8..).zip(&self.members).filter(|(_, member)| **member == drive);
        let new: Vec<Rebuilding> = positions
            .map(|(position, from)| Rebuilding { position, from: *from })
            .filter(|rebuilding| !self.rebuilding.contains(rebuilding))
            .collect();
        if new.is_empty() {
            return None;
        }
        let mut next = self.clone();
        next.epoch.0 += 1;
        next.rebuilding.extend(new);
        Some(next)
    }
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// The shards of a stripe find no places under the rule.
    #[error(
        "too few failure domains: needed={needed} present={present} level={level} places={places} (shards of profile \
         {profile}, {level}s with weight, shards that fit with at most {per_domain} in a {level}); {fitting}"
    )]
    TooFewDomains {
        /// The profile's width.
        needed: u32,
        /// Domains of the level with any weight.
        present: u32,
        /// The level of the rule.
        level: FailureDomain,
        /// Shards that find a place with at most `per_domain` in a domain.
        places: u32,
        /// The most shards in one domain that were considered.
        per_domain: u8,
        /// The profile.
        profile: Profile,
        /// What fits here.
        fitting: Fitting,
    },
    /// A drive is listed twice.
    #[error("drive listed twice: drive={drive}")]
    DuplicateDrive {
        /// The drive.
        drive: DriveId,
    },
}

#[cfg(test)]
mod tests;
