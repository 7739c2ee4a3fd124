//! Which drives hold a stripe together: explicit placement groups, planned evenly.
//!
//! Groups are listed, not hashed: balance is exact, only planned data moves, and the number of groups bounds the number
//! of combinations of drives that can lose data together. A plan has three steps, each exact:
//! 1. quotas: the number of groups of each domain, and of each drive in it, by weight;
//! 2. membership: the domains of each group, by remaining quota, avoiding pairs that met often;
//! 3. positions: an edge colouring, so that every drive appears equally often in every position.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use base::{DriveId, Epoch, PgId};
use serde::{Deserialize, Serialize};

use crate::Profile;

/// Groups of each drive: enough for even rebuilds, few enough to bound the combinations that can fail together.
const GROUPS_PER_DRIVE: u64 = 100;
const GROUPS_MAX: u64 = 1 << 24;
/// With more domains than this, two of them rarely meet twice, and the table of pairs would be large.
const PAIRED_DOMAINS_MAX: usize = 4096;

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

/// A drive available to the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveSlot {
    /// The drive.
    pub drive: DriveId,
    /// Its failure domain, at the level that placement uses.
    pub domain: u64,
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
    /// The drives, in distinct failure domains.
    pub members: Vec<DriveId>,
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
    /// A new group.
    pub fn new(id: PgId, members: Vec<DriveId>) -> Self {
        Self { id, epoch: Epoch(1), members, rebuilding: Vec::new() }
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
    /// Each shard of a stripe needs a domain of its own.
    #[error(
        "too few failure domains: needed={needed} present={present} (n of profile {profile}, domains with weight)"
    )]
    TooFewDomains {
        /// The profile's width.
        needed: u32,
        /// Different domains with any weight.
        present: u32,
        /// The profile.
        profile: Profile,
    },
    /// A drive is listed twice.
    #[error("drive listed twice: drive={drive}")]
    DuplicateDrive {
        /// The drive.
        drive: DriveId,
    },
}

mod replace;

pub use replace::replace_members;

/// The number of groups for `drives` drives: each drive is in about 100 groups. At least 1.
pub fn suggested_pg_count(drives: u32, n: u8) -> u32 {
    let count = (u64::from(drives) * GROUPS_PER_DRIVE).div_ceil(u64::from(n.max(1)));
    count.clamp(1, GROUPS_MAX) as u32
}

/// Plans `count` groups of n drives each, numbered from 0, at epoch 1.
///
/// The members of a group are in distinct domains. A drive appears in proportion to its weight, off by less than two
/// appearances; but no domain can be in a group twice, so the share of a domain above 1/n of the weight goes to
/// the others. Its appearances are spread over the positions evenly, off by less than one. The same arguments give
/// the same plan; `seed` chooses among equally good ones.
///
/// # Errors
/// If domains with weight are fewer than n, or a drive is listed twice.
pub fn plan_placement_groups(
    drives: &[DriveSlot],
    profile: Profile,
    count: u32,
    seed: u64,
) -> Result<Vec<PlacementGroup>, PlacementError> {
    let domains = domains_of(drives)?;
    let (needed, present) = (u32::from(profile.n()), domains.len() as u32);
    if present < needed {
        return Err(PlacementError::TooFewDomains { needed, present, profile });
    }
    let mut dice = Dice(seed);
    let domain_sets =
        choose_domains(&domain_quotas(&domains, profile.n(), count), profile.n(), count, &mut dice);
    let sets = choose_drives(&domains, &domain_sets, &mut dice);
    let groups = order_members(&sets, profile.n().into());
    Ok((0..).zip(groups).map(|(id, members)| PlacementGroup::new(PgId(id), members)).collect())
}

/// Drives with weight, by domain.
fn domains_of(drives: &[DriveSlot]) -> Result<Vec<Vec<DriveSlot>>, PlacementError> {
    let mut sorted = drives.to_vec();
    sorted.sort_by_key(|slot| slot.drive);
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0].drive == pair[1].drive) {
        return Err(PlacementError::DuplicateDrive { drive: pair[0].drive });
    }
    let mut domains: BTreeMap<u64, Vec<DriveSlot>> = BTreeMap::new();
    for slot in sorted.into_iter().filter(|slot| slot.weight_bytes > 0) {
        domains.entry(slot.domain).or_default().push(slot);
    }
    Ok(domains.into_values().collect())
}

/// How many of the `count` groups each domain is in: by weight, at most `count`, in total `n * count`.
fn domain_quotas(domains: &[Vec<DriveSlot>], n: u8, count: u32) -> Vec<u32> {
    let weights: Vec<u128> =
        domains.iter().map(|drives| drives.iter().map(|slot| u128::from(slot.weight_bytes)).sum()).collect();
    let mut quotas = vec![None; domains.len()];
    // A domain that would exceed `count` gets `count`; the rest is shared again, at most once per domain.
    loop {
        let (open, closed): (Vec<usize>, Vec<usize>) =
            (0..domains.len()).partition(|at| quotas[*at].is_none());
        let total = (u64::from(n) - closed.len() as u64) * u64::from(count);
        let open_weight: u128 = open.iter().map(|at| weights[*at]).sum();
        let exceeds = |at: &usize| weights[*at] * u128::from(total) > open_weight * u128::from(count);
        let exceeding: Vec<usize> = open.iter().copied().filter(exceeds).collect();
        if exceeding.is_empty() {
            let shares = apportion(total, &open.iter().map(|at| weights[*at]).collect::<Vec<_>>());
            for (at, share) in open.into_iter().zip(shares) {
                quotas[at] = Some(share);
            }
            return quotas.into_iter().flatten().collect();
        }
        exceeding.into_iter().for_each(|at| quotas[at] = Some(count));
    }
}

/// Whole shares of `total` in proportion to the weights, each rounded down or up, by largest remainder.
fn apportion(total: u64, weights: &[u128]) -> Vec<u32> {
    let sum: u128 = weights.iter().sum::<u128>().max(1);
    let exact: Vec<u128> = weights.iter().map(|weight| u128::from(total) * weight).collect();
    let mut shares: Vec<u32> = exact.iter().map(|exact| (exact / sum) as u32).collect();
    let given: u64 = shares.iter().map(|share| u64::from(*share)).sum();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse(exact[*at] % sum));
    for at in order.into_iter().take((total - given) as usize) {
        shares[at] += 1;
    }
    shares
}

/// The domains of each group, each domain in exactly its quota of groups.
///
/// A domain that must be in all remaining groups goes first; that keeps every quota reachable, since the quotas sum
/// up to n per remaining group. Otherwise the choice is free: most quota left, then fewest meetings.
fn choose_domains(quotas: &[u32], n: u8, count: u32, dice: &mut Dice) -> Vec<Vec<usize>> {
    let mut left = quotas.to_vec();
    let mut meetings = Meetings::new(quotas.len());
    (0..count)
        .map(|group| {
            let groups_left = count - group;
            let mut chosen: Vec<usize> = (0..left.len()).filter(|at| left[*at] == groups_left).collect();
            assert!(chosen.len() <= usize::from(n), "quotas sum up to n per group");
            let mut met = vec![0u64; left.len()];
            chosen.iter().for_each(|at| meetings.add_to(&mut met, *at));
            while chosen.len() < usize::from(n) {
                let free = (0..left.len()).filter(|at| left[*at] > 0 && !chosen.contains(at));
                // A meeting weighs as much as one appearance too many among n partners.
                let best = free.min_by_key(|at| {
                    let behind = u64::from(count - left[*at].min(count)) * (u64::from(n) - 1).max(1);
                    (behind + met[*at], dice.roll())
                });
                let best = best.expect("as many domains have quota left as a group needs");
                meetings.add_to(&mut met, best);
                chosen.push(best);
            }
            chosen.iter().for_each(|at| left[*at] -= 1);
            meetings.record(&chosen);
            chosen
        })
        .collect()
}

/// How often two domains were in one group.
struct Meetings {
    domains: usize,
    counts: Vec<u32>,
}

impl Meetings {
    fn new(domains: usize) -> Self {
        let domains = if domains <= PAIRED_DOMAINS_MAX { domains } else { 0 };
        Self { domains, counts: vec![0; domains * domains] }
    }

    /// Adds the meetings of `domain` with every other domain to `met`.
    fn add_to(&self, met: &mut [u64], domain: usize) {
        let row = self.counts.chunks_exact(self.domains.max(1)).nth(domain).unwrap_or_default();
        met.iter_mut().zip(row).for_each(|(met, count)| *met += u64::from(*count));
    }

    fn record(&mut self, chosen: &[usize]) {
        if self.domains > 0 {
            for (a, b) in chosen.iter().flat_map(|a| chosen.iter().map(move |b| (a, b))) {
                self.counts[a * self.domains + b] += 1;
            }
        }
    }
}

/// One drive of each chosen domain, each drive in exactly its share of the domain's groups.
fn choose_drives(
    domains: &[Vec<DriveSlot>],
    domain_sets: &[Vec<usize>],
    dice: &mut Dice,
) -> Vec<Vec<DriveId>> {
    let mut uses = vec![0u64; domains.len()];
    domain_sets.iter().flatten().for_each(|domain| uses[*domain] += 1);
    let mut turns: Vec<Vec<DriveId>> = domains
        .iter()
        .zip(uses)
        .map(|(drives, uses)| {
            let weights: Vec<u128> = drives.iter().map(|slot| u128::from(slot.weight_bytes)).collect();
            let shares = apportion(uses, &weights);
            let mut turns: Vec<DriveId> = drives
                .iter()
                .zip(shares)
                .flat_map(|(slot, share)| std::iter::repeat_n(slot.drive, share as usize))
                .collect();
            dice.shuffle(&mut turns);
            turns
        })
        .collect();
    let mut next = |domain: &usize| turns[*domain].pop().expect("a turn per use");
    domain_sets.iter().map(|set| set.iter().map(&mut next).collect()).collect()
}

/// Orders the members of each group so that every drive appears equally often in each position.
///
/// Groups and drives form a bipartite graph with an edge per membership; positions are colours. With every drive
/// split into nodes of at most n edges, n colours suffice (König), and a node of n edges has each colour once.
fn order_members(sets: &[Vec<DriveId>], n: usize) -> Vec<Vec<DriveId>> {
    let mut appearances: BTreeMap<DriveId, usize> = BTreeMap::new();
    let mut node_of: BTreeMap<(DriveId, usize), usize> = BTreeMap::new();
    let mut colouring = Colouring { n, group_edges: vec![None; sets.len() * n], drive_edges: Vec::new() };
    for (group, set) in sets.iter().enumerate() {
        for drive in set {
            let seen = appearances.entry(*drive).or_default();
            let next = node_of.len();
            let node = *node_of.entry((*drive, *seen / n)).or_insert(next);
            *seen += 1;
            colouring.drive_edges.resize(node_of.len() * n, None);
            colouring.add_edge(group, node);
        }
    }
    let mut drive_of = vec![DriveId(0); node_of.len()];
    node_of.into_iter().for_each(|((drive, _), node)| drive_of[node] = drive);
    let member = |edge: &Option<usize>| drive_of[edge.expect("every group has n members")];
    colouring.group_edges.chunks_exact(n).map(|edges| edges.iter().map(member).collect()).collect()
}

/// A partial edge colouring: the neighbour of each node for each colour.
struct Colouring {
    n: usize,
    group_edges: Vec<Option<usize>>,
    drive_edges: Vec<Option<usize>>,
}

impl Colouring {
    /// Colours one more edge. If its ends have no free colour in common, swaps two colours along a path.
    fn add_edge(&mut self, group: usize, drive: usize) {
        let free =
            |edges: &[Option<usize>]| edges.iter().position(Option::is_none).expect("fewer than n edges");
        let at_group = free(&self.group_edges[group * self.n..][..self.n]);
        let at_drive = free(&self.drive_edges[drive * self.n..][..self.n]);
        // The path from the drive by the group's free colour never ends at the group: the graph is bipartite.
        self.swap_path(drive, at_group, at_drive);
        self.group_edges[group * self.n + at_group] = Some(drive);
        self.drive_edges[drive * self.n + at_group] = Some(group);
    }

    /// Frees colour `taken` at the drive, where `free` is free, by swapping both along the path that starts there.
    fn swap_path(&mut self, drive: usize, taken: usize, free: usize) {
        let n = self.n;
        let mut edges = Vec::new();
        let mut end = drive;
        while let Some(group) = self.drive_edges[end * n + taken] {
            edges.push((group, end, taken));
            let Some(next) = self.group_edges[group * n + free] else { break };
            edges.push((group, next, free));
            end = next;
        }
        for (group, drive, colour) in &edges {
            self.group_edges[group * n + colour] = None;
            self.drive_edges[drive * n + colour] = None;
        }
        for (group, drive, colour) in edges {
            let swapped = if colour == taken { free } else { taken };
            self.group_edges[group * n + swapped] = Some(drive);
            self.drive_edges[drive * n + swapped] = Some(group);
        }
    }
}

/// SplitMix64: repeatable choices from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, (self.roll() % (last as u64 + 1)) as usize);
        }
    }
}

#[cfg(test)]
mod tests;
