//! The rule of a group: how many of its members may be in one failure domain.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use super::{DriveSlot, FailureDomain, PlacementError};
use crate::Profile;

/// At most `per_domain` members of a group are in one domain of `level`. The default: the drives differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Spread {
    /// The level that is spread over.
    pub level: FailureDomain,
    /// The most members in one domain; 0 is taken as 1. At the level of drives always 1.
    pub per_domain: u8,
}

impl Default for Spread {
    fn default() -> Self {
        Self { level: FailureDomain::Drive, per_domain: 1 }
    }
}

/// What can be placed where a profile cannot. [`fmt::Display`] gives the text for an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fitting {
    /// The parity shards that are kept.
    pub parity: u8,
    /// The level that was asked for.
    pub level: FailureDomain,
    /// The widest profile with the same parity at that level.
    pub narrower: Option<Profile>,
    /// The highest level below at which the profile itself fits.
    pub lower: Option<(Profile, FailureDomain)>,
}

impl fmt::Display for Fitting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = self.level;
        match (self.narrower, self.lower) {
            (Some(narrower), Some((profile, lower))) => {
                write!(f, "what fits: {narrower} at level {level}, {profile} at level {lower}")
            }
            (Some(narrower), None) => write!(f, "what fits: {narrower} at level {level}"),
            (None, Some((profile, lower))) => write!(f, "what fits: {profile} at level {lower}"),
            (None, None) => write!(f, "no profile with parity={} fits", self.parity),
        }
    }
}

impl Spread {
    /// The strictest rule at this level that the drives with weight allow.
    ///
    /// One shard in a domain if the domains suffice. Otherwise as few as possible, but not more than the parity
    /// shards: then a domain may be lost and data is still read.
    ///
    /// # Errors
    /// If not even that fits, or a drive is listed twice.
    pub fn choose(
        drives: &[DriveSlot],
        profile: Profile,
        level: FailureDomain,
    ) -> Result<Self, PlacementError> {
        refuse_duplicates(drives)?;
        let sizes = domain_sizes(drives, level);
        let loosest = loosest(profile, level);
        (1..=loosest)
            .find(|per_domain| places(&sizes, *per_domain) >= u32::from(profile.n()))
            .map(|per_domain| Self { level, per_domain })
            .ok_or_else(|| Self { level, per_domain: loosest }.refusal(drives, profile))
    }

    /// The rule where none was asked for: the highest level at which each shard gets a domain of its own. If there is
    /// none above drives, the highest level at which a domain may be lost. Otherwise the drives differ.
    ///
    /// Levels with a single domain are passed over.
    ///
    /// # Errors
    /// If the profile has more shards than there are drives with weight, or a drive is listed twice.
    pub fn automatic(drives: &[DriveSlot], profile: Profile) -> Result<Self, PlacementError> {
        let levels = [FailureDomain::Zone, FailureDomain::Rack, FailureDomain::Node];
        let several = levels.into_iter().filter(|level| domain_sizes(drives, *level).len() >= 2);
        let fitting: Vec<Self> =
            several.filter_map(|level| Self::choose(drives, profile, level).ok()).collect();
        match fitting.iter().find(|spread| spread.per_domain == 1).or(fitting.first()) {
            Some(spread) => Ok(*spread),
            None => Self::choose(drives, profile, FailureDomain::Drive),
        }
    }

    /// The profile of new extents while only these drives are up: as [`Profile::narrowed`], with as many shards as
    /// find a place under the rule. `None` if not even one data shard fits beside the parity.
    pub fn narrowed(self, profile: Profile, up: &[DriveSlot]) -> Option<Profile> {
        profile.narrowed(self.places(up))
    }

    /// How many shards of a stripe find places on these drives.
    pub(crate) fn places(self, drives: &[DriveSlot]) -> u32 {
        places(&domain_sizes(drives, self.level), self.most())
    }

    /// The most members in one domain.
    pub(crate) fn most(self) -> u8 {
        if self.level == FailureDomain::Drive { 1 } else { self.per_domain.max(1) }
    }

    /// Refuses drives on which a stripe of the profile finds no places under this rule, and drives listed twice.
    pub(super) fn require(self, drives: &[DriveSlot], profile: Profile) -> Result<(), PlacementError> {
        refuse_duplicates(drives)?;
        if self.places(drives) >= u32::from(profile.n()) {
            Ok(())
        } else {
            Err(self.refusal(drives, profile))
        }
    }

    fn refusal(self, drives: &[DriveSlot], profile: Profile) -> PlacementError {
        let sizes = domain_sizes(drives, self.level);
        let below = [FailureDomain::Rack, FailureDomain::Node, FailureDomain::Drive].into_iter();
        let fits = |level: &FailureDomain| {
            places(&domain_sizes(drives, *level), loosest(profile, *level)) >= u32::from(profile.n())
        };
        let lower = below.filter(|level| *level < self.level).find(fits);
        let fitting = Fitting {
            parity: profile.m(),
            level: self.level,
            narrower: profile.narrowed(places(&sizes, loosest(profile, self.level))),
            lower: lower.map(|level| (profile, level)),
        };
        PlacementError::TooFewDomains {
            needed: profile.n().into(),
            present: sizes.len() as u32,
            level: self.level,
            places: places(&sizes, self.most()),
            per_domain: self.most(),
            profile,
            fitting,
        }
    }
}

/// The most shards in one domain with which data survives its loss. At least 1: without parity nothing survives.
fn loosest(profile: Profile, level: FailureDomain) -> u8 {
    if level == FailureDomain::Drive { 1 } else { profile.m().max(1) }
}

fn places(sizes: &[u32], per_domain: u8) -> u32 {
    sizes.iter().map(|size| u32::from(per_domain).min(*size)).sum()
}

/// Drives with weight in each domain that has any.
fn domain_sizes(drives: &[DriveSlot], level: FailureDomain) -> Vec<u32> {
    let mut sizes: BTreeMap<u64, u32> = BTreeMap::new();
    for slot in drives.iter().filter(|slot| slot.weight_bytes > 0) {
        *sizes.entry(slot.place.domain(level, slot.drive)).or_default() += 1;
    }
    sizes.into_values().collect()
}

fn refuse_duplicates(drives: &[DriveSlot]) -> Result<(), PlacementError> {
    let mut seen = BTreeSet::new();
    match drives.iter().find(|slot| !seen.insert(slot.drive)) {
        Some(slot) => Err(PlacementError::DuplicateDrive { drive: slot.drive }),
        None => Ok(()),
    }
}
