//! The records of drives, placement groups and filesystems.

use std::collections::BTreeSet;

use base::program::{FIRST_LEVEL, FORMAT_LEVEL};
use base::{ClusterId, DriveId, DriveUuid, LedgerId, NodeId, PgId};
use layout::{DriveState, FailureDomain, Profile};
use serde::{Deserialize, Serialize};
use wire::drive::{DriveMark, ShardKey};

use crate::{LogMoveRecord, SpareRecord, TierRecord};

/// The cluster's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterRecord {
    /// The cluster's id; it never changes.
    pub id: ClusterId,
    /// Counts changes of drives and placement groups.
    pub map_epoch: u64,
    /// The next drive's number.
    pub next_drive: u32,
    /// The next placement group's number.
    pub next_group: u32,
    /// The next filesystem's number.
    pub next_filesystem: u32,
    /// The next node's number.
    #[serde(default)]
    pub next_node: u32,
    /// The next token's number.
    #[serde(default)]
    pub next_token: u32,
    /// The next client's number.
    #[serde(default)]
    pub next_client: u32,
    /// Certificates of its authorities (PEM); empty until the first start of a version that has them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub authorities: String,
    /// The engine that has the logs of the ledgers, as the node gave it that put them there; empty: files of the first node.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub log: String,
    /// How often the logs were begun elsewhere, because they were lost or moved. The first move, from files of the first node, does not
    /// count.
    #[serde(default)]
    pub recoveries: u32,
    /// How many of these were moves since the last loss.
    #[serde(default)]
    pub moves: u32,
    /// The move of the logs that was begun last, and has not succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_move: Option<LogMoveRecord>,
    /// The node that is to own the ledgers next, because an operator wants that. Whichever takes them removes this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_owner: Option<NodeId>,
    /// The failure domains whose space stays free.
    #[serde(default)]
    pub spare: SpareRecord,
    /// Limits of background work.
    #[serde(default)]
    pub upkeep: UpkeepRecord,
    /// The format level that all nodes write.
    #[serde(default = "first_level")]
    pub format_level: u32,
}

fn first_level() -> u32 {
    FIRST_LEVEL
}

impl ClusterRecord {
    /// A cluster that has nothing.
    pub fn new(id: ClusterId) -> Self {
        Self {
            id,
            map_epoch: 1,
            next_drive: 0,
            next_group: 0,
            next_filesystem: 1,
            next_node: 0,
            next_token: 0,
            next_client: 0,
            authorities: String::new(),
            log: String::new(),
            moves: 0,
            log_move: None,
            next_owner: None,
            spare: SpareRecord::default(),
            recoveries: 0,
            upkeep: UpkeepRecord::default(),
            format_level: FORMAT_LEVEL,
        }
    }
}

/// Limits of background work, as far as an operator has set them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpkeepRecord {
    /// Bytes per second; `None` if never set.
    pub rate_bytes_per_s: Option<u64>,
    /// Whether background work is paused.
    pub paused: bool,
    /// Microseconds that 99 of 100 requests of users should not exceed at any drive; 0: no limit; `None` if never set.
    #[serde(default)]
    pub keep_p99_below_us: Option<u64>,
}

/// The longest maintenance of a node.
pub const MAINTENANCE_S_MAX: u64 = 7 * 86_400;

/// A node: a server whose drives are lost together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Its number, never used again.
    pub id: NodeId,
    /// Its name, unique in the cluster.
    pub name: String,
    /// The room or site where it is; empty if it was not said.
    #[serde(default)]
    pub zone: String,
    /// Its rack in that zone; empty if it was not said.
    #[serde(default)]
    pub rack: String,
    /// Where others reach it: `host:port`. None: nowhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// SHA-256 of its public key, in hex; empty until it has one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub key: String,
    /// The random number of its last start; 0: not known. Its directory has it too, unless that is a copy from before.
    #[serde(default)]
    pub start: u64,
    /// When its certificate was made (seconds since 1970).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certified_s: Option<i64>,
    /// It is away on purpose until then (seconds since 1970): nobody takes over what its drives held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenance_until_s: Option<i64>,
    /// The drives that are emptied, because the whole node is.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub draining: BTreeSet<DriveId>,
    /// It runs a member of an engine and nothing else.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub witness: bool,
}

impl NodeRecord {
    /// Seconds of maintenance that are left; `None`: there is none.
    pub fn maintenance_left_s(&self, now_s: i64) -> Option<u64> {
        let left = u64::try_from(self.maintenance_until_s? - now_s).ok()?;
        // A clock that was set back does not make it longer than it can be.
        (left > 0).then_some(left.min(MAINTENANCE_S_MAX))
    }

    /// A node of which nothing is known but its name.
    pub fn new(id: NodeId, name: impl Into<String>) -> Self {
        Self {
            id,
            name: name.into(),
            zone: String::new(),
            rack: String::new(),
            addresses: Vec::new(),
            key: String::new(),
            start: 0,
            certified_s: None,
            maintenance_until_s: None,
            draining: BTreeSet::new(),
            witness: false,
        }
    }
}

/// A drive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveRecord {
    /// Its number.
    pub id: DriveId,
    /// UUID on the drive itself.
    pub uuid: DriveUuid,
    /// The node that it is in.
    #[serde(default)]
    pub node: NodeId,
    /// Size in bytes.
    pub capacity_bytes: u64,
    /// Whether the drive may be used.
    pub state: DriveState,
    /// Progress of its scrub.
    #[serde(default)]
    pub scrub: ScrubRecord,
    /// Lower bound of the drive's own mark: a drive whose mark is lower is an older copy of itself.
    #[serde(default)]
    pub mark: DriveMark,
    /// It may know newer metadata than there is, because the end of the logs was lost: that is forgotten when it is used next.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub may_know_lost: bool,
}

impl DriveRecord {
    /// A new drive.
    pub fn new(id: DriveId, uuid: DriveUuid, node: NodeId, capacity_bytes: u64) -> Self {
        Self {
            id,
            uuid,
            node,
            capacity_bytes,
            state: DriveState::Up,
            scrub: ScrubRecord::default(),
            mark: DriveMark::default(),
            may_know_lost: false,
        }
    }
}

/// Progress of the scrub of a drive. Times are nanoseconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubRecord {
    /// Start of the running pass.
    pub started_ns: Option<i64>,
    /// The last shard that the running pass has verified.
    pub after: Option<ShardKey>,
    /// All shards that existed by this time have been verified since.
    pub verified_ns: Option<i64>,
}

/// Placement groups that were planned for one profile.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupSet {
    /// The profile.
    pub profile: Profile,
    /// The groups.
    pub groups: Vec<PgId>,
}

/// A filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemRecord {
    /// Its number.
    pub id: u32,
    /// Its name, unique in the cluster.
    pub name: String,
    /// Its ledger.
    pub ledger: LedgerId,
    /// The profile of new data.
    pub profile: Profile,
    /// The failure domains over which shards are spread; `None`: the highest level that suits drives and profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<FailureDomain>,
    /// The placement groups of new data.
    pub groups: Vec<PgId>,
    /// Other groups that may hold its data: narrower groups, from times when drives were missing, and groups of former
    /// profiles. They are reused when they fit.
    #[serde(default)]
    pub sets: Vec<GroupSet>,
    /// Most bytes of content, on drives and in object stores together; `None`: no limit but the drives.
    pub provisioned_bytes: Option<u64>,
    /// Most of these bytes that may be on drives; `None`: no limit but the drives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssd_bytes: Option<u64>,
    /// Whether new data goes near to where it is written, as far as possible.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub writes_near: bool,
    /// The nodes whose drives its data is for; empty: all nodes. A node that was removed stays in the list, so that it never means all.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub nodes: BTreeSet<NodeId>,
    /// Whether stored data is being moved until every drive has its share.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub balancing: bool,
    /// The groups of which balancing moved positions last. Those that are not rebuilt yet go back if it is aborted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moved: Vec<PgId>,
    /// The object store to which its data moves, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<TierRecord>,
    /// The number of its filesystem group; `None` for the group `default`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filesystem_group: Option<u32>,
    /// The end of its log was lost: the next owner of its ledger must move all numbers ahead.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_lost_end: bool,
}

impl FilesystemRecord {
    /// A filesystem without a name, without placement groups, and without limits.
    pub fn new(id: u32, profile: Profile) -> Self {
        Self {
            id,
            name: String::new(),
            ledger: LedgerId(id),
            profile,
            level: None,
            groups: Vec::new(),
            sets: Vec::new(),
            provisioned_bytes: None,
            ssd_bytes: None,
            writes_near: false,
            nodes: BTreeSet::new(),
            balancing: false,
            moved: Vec::new(),
            tier: None,
            filesystem_group: None,
            has_lost_end: false,
        }
    }

    /// All its groups by profile, those of the current profile first.
    pub fn all_sets(&self) -> impl Iterator<Item = (Profile, &[PgId])> {
        let others = self.sets.iter().map(|set| (set.profile, set.groups.as_slice()));
        std::iter::once((self.profile, self.groups.as_slice())).chain(others)
    }

    /// Adds groups of a profile.
    pub fn add_groups(&mut self, profile: Profile, groups: impl IntoIterator<Item = PgId>) {
        if profile == self.profile {
            self.groups.extend(groups);
            return;
        }
        match self.sets.iter_mut().find(|set| set.profile == profile) {
            Some(set) => set.groups.extend(groups),
            None => self.sets.push(GroupSet { profile, groups: groups.into_iter().collect() }),
        }
    }

    /// Changes the profile of new data. Groups that were planned for it earlier are reused; the groups of the old
    /// profile stay.
    pub fn set_profile(&mut self, profile: Profile) {
        if profile == self.profile {
            return;
        }
        let at = self.sets.iter().position(|set| set.profile == profile);
        let groups = at.map(|at| self.sets.remove(at).groups).unwrap_or_default();
        let former = GroupSet { profile: self.profile, groups: std::mem::replace(&mut self.groups, groups) };
        self.sets.push(former);
        self.profile = profile;
    }
}
