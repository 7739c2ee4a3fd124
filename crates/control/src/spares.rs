//! Space that stays free, so that the others can take over what lost failure domains held.
//!
//! Clients leave the capacity of the largest domains free, spread over all drives, and a part of the rest, because shards are not spread
//! evenly and the fullest drive must still take its share. What is lost counts as spare space that is used: until the cluster is as large as
//! before, less stays free by what was lost, and clients do not notice the loss. What is taken out in order does not.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use layout::{DriveSlot, FailureDomain, Profile, Spread};
use serde::{Deserialize, Serialize};

use crate::{Cluster, FilesystemRecord, Plan};

/// Parts of the drives are given in millionths.
const MILLION: u128 = 1_000_000;
/// Divisor of the space that is not spared: this part of it stays free too.
const UNEVEN: u64 = 16;

/// The failure domains whose space stays free.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpareRecord {
    /// Their number; 0: none.
    #[serde(default)]
    pub domains: u32,
    /// Their level; `None`: that over which a filesystem spreads its shards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<FailureDomain>,
    /// Capacity of the drives before a loss: the largest since the number was set, less what was taken out in order.
    #[serde(default)]
    pub whole_bytes: u64,
}

/// What stays free for a filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spare {
    /// Capacity of the drives in use.
    pub all_bytes: u64,
    /// Of these, so much stays free.
    pub kept_bytes: u64,
    /// So much of that is for further losses; the rest is for what is not even.
    pub left_bytes: u64,
    /// So much less than was asked for, because it was lost.
    pub used_bytes: u64,
    /// The level of the domains.
    pub level: FailureDomain,
}

/// The drives that would be left are too few for new places of what was lost, so that free space is of no use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "filesystem {filesystem} ({profile}): without {domains} of its {present} failure domains of level {level} nothing that was lost finds \
     another place, so spare space is of no use; add some, or choose a profile that needs fewer drives, or a lower level"
)]
pub struct NoUse {
    /// The filesystem.
    pub filesystem: String,
    /// Its profile.
    pub profile: Profile,
    /// The domains that may be lost.
    pub domains: u32,
    /// Those that there are.
    pub present: usize,
    /// Their level.
    pub level: FailureDomain,
}

impl Spare {
    /// The part of each drive that stays free, in millionths.
    pub fn millionths(&self) -> u32 {
        let part = (u128::from(self.kept_bytes) * MILLION).div_ceil(u128::from(self.all_bytes.max(1)));
        part.min(MILLION) as u32
    }
}

impl Cluster {
    /// Capacity of the drives that are in use.
    fn capacity_bytes(&self) -> u64 {
        self.drives.values().filter(|drive| !drive.is_given_up()).map(|drive| drive.capacity_bytes).sum()
    }

    /// What stays free for a filesystem; `None`: nothing does.
    ///
    /// # Errors
    /// If that is of no use to it. Nothing stays free then.
    pub fn spare(&self, record: &FilesystemRecord) -> Result<Option<Spare>, NoUse> {
        let asked = self.record.spare;
        if asked.domains == 0 {
            return Ok(None);
        }
        let rule = self.rule_or_last(record);
        let level = asked.level.unwrap_or(rule.level);
        let slots = self.slots_for(record, &self.staying());
        let all_bytes = slots.iter().map(|slot| slot.weight_bytes).sum();
        // What was lost at other nodes than those of the filesystem uses nothing of its space.
        let given_up = self.drives.values().filter(|drive| drive.is_given_up() && record.may_use(drive.node));
        let gone_bytes: u64 = given_up.map(|drive| drive.capacity_bytes).sum();
        let gone_bytes = if record.nodes.is_empty() { u64::MAX } else { gone_bytes };
        let used_bytes = asked.whole_bytes.saturating_sub(self.capacity_bytes()).min(gone_bytes);
        let domains = Domains::of(&slots, level, rule);
        let largest: u64 = domains.largest(asked.domains).sum();
        let left_bytes = largest.saturating_sub(used_bytes);
        if domains.places_without(domains.that_fit(asked.domains, left_bytes))
            < usize::from(record.profile.n())
        {
            return Err(NoUse {
                filesystem: record.name.clone(),
                profile: record.profile,
                domains: asked.domains,
                present: domains.0.len(),
                level,
            });
        }
        let kept_bytes = left_bytes + (all_bytes - left_bytes) / UNEVEN;
        Ok(Some(Spare { all_bytes, kept_bytes, left_bytes, used_bytes: used_bytes.min(largest), level }))
    }

    /// What stays free for the filesystem for which that is the largest part; `None`: nothing does.
    pub fn spared(&self) -> Option<Spare> {
        let spares = self.filesystems.values().filter_map(|record| self.spare(record).ok().flatten());
        spares.max_by_key(Spare::millionths)
    }
}

/// A failure domain that may be lost.
#[derive(Debug, Clone, Default)]
struct Domain {
    bytes: u64,
    /// Drives in each domain of the level over which shards are spread.
    drives: BTreeMap<u64, usize>,
}

/// All of a level, and how many shards of a stripe find places in one domain of the level over which they are spread.
struct Domains(Vec<Domain>, usize);

impl Domains {
    fn of(slots: &[DriveSlot], level: FailureDomain, rule: Spread) -> Self {
        let mut domains: BTreeMap<u64, Domain> = BTreeMap::new();
        for slot in slots {
            let domain = domains.entry(slot.place.domain(level, slot.drive)).or_default();
            domain.bytes += slot.weight_bytes;
            *domain.drives.entry(slot.place.domain(rule.level, slot.drive)).or_default() += 1;
        }
        let mut domains: Vec<Domain> = domains.into_values().collect();
        domains.sort_by_key(|domain| Reverse(domain.bytes));
        let most = if rule.level == FailureDomain::Drive { 1 } else { rule.per_domain.max(1) };
        Self(domains, most.into())
    }

    fn largest(&self, count: u32) -> impl Iterator<Item = u64> {
        self.0.iter().map(|domain| domain.bytes).take(count as usize)
    }

    /// How many of the largest have this capacity together: that many losses can still be taken over.
    fn that_fit(&self, count: u32, bytes: u64) -> usize {
        let sums = self.largest(count).scan(0, |sum: &mut u64, bytes| {
            *sum += bytes;
            Some(*sum)
        });
        sums.take_while(|sum| *sum <= bytes).count()
    }

    /// How many shards of a stripe find places after this number of losses, each of them the one that costs most places.
    fn places_without(&self, losses: usize) -> usize {
        let mut left: BTreeMap<u64, usize> = BTreeMap::new();
        for (around, drives) in self.0.iter().flat_map(|domain| &domain.drives) {
            *left.entry(*around).or_default() += drives;
        }
        let mut domains: Vec<&Domain> = self.0.iter().collect();
        for _ in 0..losses {
            let cost = |domain: &Domain| {
                let of = |(around, drives): (&u64, &usize)| {
                    left[around].min(self.1) - (left[around] - drives).min(self.1)
                };
                // Of equal ones, that which brings the next ones nearest to a cost.
                let nearest = domain.drives.keys().map(|around| Reverse(left[around])).max();
                (domain.drives.iter().map(of).sum::<usize>(), nearest)
            };
            let worst = domains.iter().enumerate().max_by_key(|(_, domain)| cost(domain)).map(|(at, _)| at);
            let Some(worst) = worst else { break };
            for (around, drives) in &domains.swap_remove(worst).drives {
                left.entry(*around).and_modify(|left| *left -= drives);
            }
        }
        left.values().map(|drives| drives.min(&self.1)).sum()
    }
}

impl Plan {
    /// Sets the number of failure domains whose space stays free. What was lost before does not count any more.
    ///
    /// # Errors
    /// If that is of no use to a filesystem.
    pub fn set_spares(&mut self, domains: u32, level: Option<FailureDomain>) -> Result<(), NoUse> {
        let whole_bytes = self.next().capacity_bytes();
        self.set_cluster(|cluster| cluster.spare = SpareRecord { domains, level, whole_bytes });
        self.next().filesystems.values().try_for_each(|record| self.next().spare(record).map(drop))
    }

    /// Notes how large the cluster is, after drives have changed. What is taken out in order changes what counts as whole.
    pub(crate) fn note_capacity(&mut self, change: impl FnOnce(u64) -> u64) {
        let SpareRecord { domains, whole_bytes, .. } = self.next().record.spare;
        let next = change(whole_bytes).max(self.next().capacity_bytes());
        if domains > 0 && next != whole_bytes {
            self.set_cluster(|cluster| cluster.spare.whole_bytes = next);
        }
    }
}

#[cfg(test)]
mod tests {
    use base::DriveId;
    use layout::DriveState;

    use super::*;
    use crate::members::tests::{cluster, drive, seen_without};

    fn with_spares(cluster: Cluster, domains: u32, level: Option<FailureDomain>) -> Result<Cluster, NoUse> {
        let mut plan = Plan::new(cluster);
        plan.set_spares(domains, level)?;
        Ok(plan.into_next())
    }

    /// What of a cluster with one filesystem is left for further losses, and what of it is used.
    fn kept(cluster: &Cluster) -> (u64, u64) {
        let spare = cluster.spare(&cluster.filesystems[&1]).unwrap().unwrap();
        assert_eq!(spare.kept_bytes, spare.left_bytes + (spare.all_bytes - spare.left_bytes) / UNEVEN);
        (spare.left_bytes, spare.used_bytes)
    }

    #[test]
    fn the_largest_domains_are_spared() {
        // Each drive has a thousand bytes.
        let spared = |nodes: &[u32], profile, domains, level| {
            with_spares(cluster(nodes, profile), domains, level).map(|cluster| kept(&cluster).0)
        };
        assert_eq!(spared(&[1, 2, 3], "r2", 1, None), Ok(3000));
        assert_eq!(spared(&[1, 2, 3, 4], "r2", 2, None), Ok(7000));
        assert_eq!(spared(&[8], "4+2", 2, None), Ok(2000), "of one node, drives are");
        assert_eq!(spared(&[4, 4, 4], "4+2", 1, Some(FailureDomain::Drive)), Ok(1000));
        assert_eq!(cluster(&[8], "4+2").spare(&cluster(&[8], "4+2").filesystems[&1]), Ok(None));
    }

    #[test]
    fn space_that_is_of_no_use_is_refused() {
        let refused = |nodes: &[u32], profile, domains, level| {
            with_spares(cluster(nodes, profile), domains, level).err().map(|error| error.to_string())
        };
        let text = refused(&[2; 6], "4+2", 1, None).unwrap();
        assert!(text.contains("without 1 of its 6 failure domains of level node"), "{text}");
        assert_eq!(refused(&[2; 7], "4+2", 1, None), None);
        assert!(refused(&[2; 7], "4+2", 2, None).is_some());
        // Two shards at each of three nodes: two more drives may be lost if each node has two to spare, or only one of them.
        assert_eq!(refused(&[4, 4, 4], "4+2", 2, Some(FailureDomain::Drive)), None);
        assert!(refused(&[3, 4, 4], "4+2", 2, Some(FailureDomain::Drive)).is_some());
        assert_eq!(refused(&[3, 4, 4], "4+2", 1, Some(FailureDomain::Drive)), None);
        assert!(refused(&[4, 4, 4], "4+2", 1, None).is_some());
        assert!(refused(&[6], "4+2", 1, None).is_some());
    }

    #[test]
    fn a_loss_uses_what_was_spared_until_the_cluster_is_as_large_again() {
        let mut plan = Plan::new(with_spares(cluster(&[2, 2, 2, 2], "r2"), 1, None).unwrap());
        let seen = seen_without(plan.next(), &[0, 1]);
        for id in [0, 1] {
            plan.give_up(DriveId(id), &seen);
        }
        assert_eq!(plan.next().drives[&DriveId(0)].state, DriveState::Out);
        assert_eq!(kept(plan.next()), (0, 2000));
        plan.set_drive(drive(8, 1));
        assert_eq!(kept(plan.next()), (2000, 1000), "node 1 is the largest now");
        plan.set_drive(drive(9, 4));
        plan.set_drive(drive(10, 4));
        assert_eq!(kept(plan.next()), (3000, 0), "it is larger than before");
        assert_eq!(plan.next().record.spare.whole_bytes, 9000);
    }

    #[test]
    fn a_smaller_cluster_may_be_taken_for_whole() {
        let mut plan = Plan::new(with_spares(cluster(&[2, 2, 2, 2], "r2"), 1, None).unwrap());
        let seen = seen_without(plan.next(), &[0]);
        plan.give_up(DriveId(0), &seen);
        assert_eq!(kept(plan.next()), (1000, 1000));
        plan.set_spares(1, None).unwrap();
        assert_eq!(kept(plan.next()), (2000, 0));
    }

    #[test]
    fn what_is_taken_out_in_order_uses_nothing() {
        let mut plan = Plan::new(with_spares(cluster(&[2, 2, 2, 2], "r2"), 1, None).unwrap());
        let seen = seen_without(plan.next(), &[]);
        let node = plan.next().drives[&DriveId(0)].node;
        plan.drain(node, &seen);
        assert_eq!(kept(plan.next()), (2000, 0), "as soon as it begins");
        plan.cancel_drain(node, &seen);
        assert_eq!((kept(plan.next()), plan.next().record.spare.whole_bytes), ((2000, 0), 8000));
        // A loss before is not forgotten by that.
        let mut lossy = Plan::new(plan.next().clone());
        let without = seen_without(lossy.next(), &[7]);
        lossy.give_up(DriveId(7), &without);
        assert_eq!(kept(lossy.next()), (1000, 1000));
        lossy.drain(node, &without);
        assert_eq!(kept(lossy.next()), (1000, 1000));
        lossy.cancel_drain(node, &without);
        assert_eq!((kept(lossy.next()), lossy.next().record.spare.whole_bytes), ((1000, 1000), 8000));
        plan.replace(DriveId(2), drive(8, 1), &seen);
        plan.finish(|_| true);
        assert_eq!((kept(plan.next()), plan.next().record.spare.whole_bytes), ((2000, 0), 8000));
    }

    #[test]
    fn the_part_of_each_drive_is_rounded_up() {
        let spare = |kept_bytes, all_bytes| Spare {
            all_bytes,
            kept_bytes,
            left_bytes: 0,
            used_bytes: 0,
            level: FailureDomain::Node,
        };
        assert_eq!(spare(1, 3).millionths(), 333_334);
        assert_eq!(spare(0, 3).millionths(), 0);
        assert_eq!(spare(u64::MAX, u64::MAX).millionths(), 1_000_000);
        assert_eq!(spare(0, 0).millionths(), 0);
    }
}
