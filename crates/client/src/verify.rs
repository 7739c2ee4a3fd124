//! Compares the shards that drives list with those that the ledger expects. Whether their bytes are good, the scrub says.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Bound;
use std::time::Duration;

use base::{DriveId, ExtentId, PgId, ShardIndex};
use futures_util::future::join_all;
use wire::drive::ShardKey;
use wire::meta::ExtentRef;

use crate::Client;
use crate::damage::Flaw;
use crate::topology::Topology;

/// Shards asked for at a time from a drive.
const PAGE: usize = 1024;
/// So many ids that are not looked for are listed rather than asked around.
const GAP: u64 = 64;
/// A drive may have several shards of an extent.
const SLACK: usize = 8;
/// How long a drive may take to list them.
const PATIENCE: Duration = Duration::from_secs(10);

/// Shards that the ledger expects, and which of them were not found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ShardCount {
    /// All of them.
    pub expected: u64,
    /// A commit went ahead without them.
    pub owed: u64,
    /// It is not known whether they are there: a drive does not answer, or they are on their way to another one.
    pub unknown: u64,
    /// The drive that should have them does not.
    pub missing: u64,
}

impl ShardCount {
    /// The sum of both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            expected: self.expected + other.expected,
            owed: self.owed + other.owed,
            unknown: self.unknown + other.unknown,
            missing: self.missing + other.missing,
        }
    }
}

/// What drives list of some extents.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Verified {
    /// By placement group. Nothing counts as owed yet.
    pub groups: BTreeMap<PgId, ShardCount>,
    /// The shards that count as missing.
    pub missing: Vec<(ExtentRef, ShardIndex)>,
}

fn shards_of(extent: &ExtentRef) -> impl Iterator<Item = ShardIndex> + use<> {
    (0..extent.n).map(ShardIndex)
}

impl Client {
    /// Looks for all shards of extents that are on drives. Of one that is deleted or moved in the meantime, some may count as missing.
    pub async fn verify(&self, extents: &[ExtentRef]) -> Verified {
        let topology = self.inner.extents.topology();
        let key =
            |extent: &ExtentRef, shard| ShardKey { ledger: self.inner.ledger, extent: extent.id, shard };
        let mut wanted: BTreeMap<DriveId, BTreeSet<ShardKey>> = BTreeMap::new();
        for extent in extents {
            for shard in shards_of(extent) {
                for drive in topology.holders(extent.pg, shard) {
                    wanted.entry(drive).or_default().insert(key(extent, shard));
                }
            }
        }
        let lists =
            wanted.iter().map(async |(drive, keys)| Some((*drive, held_of(&topology, *drive, keys).await?)));
        let held: HashMap<DriveId, HashSet<ShardKey>> = join_all(lists).await.into_iter().flatten().collect();
        let mut verified = Verified::default();
        for extent in extents {
            let count = verified.groups.entry(extent.pg).or_default();
            for shard in shards_of(extent) {
                count.expected += 1;
                let key = key(extent, shard);
                let mut holders = topology.holders(extent.pg, shard);
                if holders.any(|drive| held.get(&drive).is_some_and(|held| held.contains(&key))) {
                    continue;
                }
                let group = topology.map.group(extent.pg);
                let member = group.and_then(|group| group.members.get(usize::from(shard.0)));
                let moves = group.is_some_and(|group| group.is_rebuilding(shard.0));
                if !moves && member.is_some_and(|member| held.contains_key(member)) {
                    count.missing += 1;
                    verified.missing.push((ExtentRef { extent_off: 0, ..*extent }, shard));
                } else {
                    count.unknown += 1;
                }
            }
        }
        verified
    }

    /// Has a shard restored that its drive does not have.
    pub fn report_missing(&self, extent: &ExtentRef, shard: ShardIndex) {
        self.inner.peers.0.damage.note(extent, shard, Flaw::Missing);
    }
}

/// How many entries to ask for so that those of a key and of the keys near to it come, and few others.
fn near(keys: &BTreeSet<ShardKey>, key: ShardKey) -> usize {
    let mut last = key.extent.0;
    for next in keys.range(key..).map(|key| key.extent.0) {
        if next - last > GAP || next - key.extent.0 > PAGE as u64 {
            break;
        }
        last = next;
    }
    ((last - key.extent.0) as usize + SLACK).min(PAGE)
}

/// Which of these shards a drive lists; `None`: it does not answer.
async fn held_of(
    topology: &Topology,
    drive: DriveId,
    keys: &BTreeSet<ShardKey>,
) -> Option<HashSet<ShardKey>> {
    let service = topology.readable(drive)?;
    let mut held = HashSet::new();
    let (mut next, mut listed) = (keys.first().copied(), None);
    while let Some(key) = next {
        let before =
            ShardKey { extent: ExtentId(key.extent.0.saturating_sub(1)), shard: ShardIndex(u8::MAX), ..key };
        // Each page begins after the last one, however many shards of one extent there are.
        let before = listed.map_or(before, |listed| before.max(listed));
        let limit = near(keys, key);
        let listing = service.list(Some(before), limit);
        let page = tokio::time::timeout(PATIENCE, listing).await.ok()?.ok()?;
        held.extend(page.iter().map(|entry| entry.key).filter(|key| keys.contains(key)));
        // What comes before the last one of a page and is not in it is not there.
        let Some(last) = page.last().filter(|_| page.len() == limit) else { break };
        let last = last.key;
        listed = Some(last);
        next = keys.range((Bound::Excluded(last), Bound::Unbounded)).next().copied();
    }
    Some(held)
}
