//! Drives, placement groups and filesystems at one moment, and a plan: what they should be next.

use std::collections::{BTreeMap, BTreeSet};

use base::{DriveId, Epoch, PgId};
use layout::{
    ClusterMap, DriveSlot, DriveState, MapDrive, PlacementGroup, plan_placement_groups, suggested_pg_count,
};
use layout::{PlacementError, Profile};

use crate::{
    ClusterRecord, Control, ControlChange, ControlError, ControlView, DriveRecord, FilesystemRecord,
};

/// Groups per position when each group has all drives.
const ORDERS: u32 = 8;
/// Attempts to decide anew after another change came first.
const ATTEMPTS: u32 = 5;

/// What the cluster should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    /// Its record.
    pub record: ClusterRecord,
    /// Every drive that was not forgotten.
    pub drives: BTreeMap<DriveId, DriveRecord>,
    /// Every placement group.
    pub groups: BTreeMap<PgId, PlacementGroup>,
    /// Every filesystem, by number.
    pub filesystems: BTreeMap<u32, FilesystemRecord>,
}

impl Cluster {
    /// The cluster as a view has it.
    pub fn of(view: &ControlView) -> Result<Self, ControlError> {
        let drives = view.drives()?.into_iter().map(|drive| (drive.id, drive));
        let groups = view.groups()?.into_iter().map(|group| (group.id, group));
        let filesystems = view.filesystems()?.into_iter().map(|record| (record.id, record));
        Ok(Self {
            record: view.cluster()?,
            drives: drives.collect(),
            groups: groups.collect(),
            filesystems: filesystems.collect(),
        })
    }

    /// A cluster that has nothing.
    pub fn new(record: ClusterRecord) -> Self {
        Self { record, drives: BTreeMap::new(), groups: BTreeMap::new(), filesystems: BTreeMap::new() }
    }

    /// The map for clients: drives and placement groups.
    pub fn map(&self) -> ClusterMap {
        ClusterMap {
            epoch: Epoch(self.record.map_epoch),
            drives: self.drives.values().map(DriveRecord::in_map).collect(),
            groups: self.groups.values().cloned().collect(),
        }
    }

    /// Number of groups that need each drive: as a member, or for shards that were not moved off it yet.
    pub fn group_counts(&self) -> BTreeMap<DriveId, u32> {
        let mut counts = BTreeMap::new();
        for group in self.groups.values() {
            let sources = group.rebuilding.iter().map(|rebuilding| rebuilding.from);
            let needed: BTreeSet<DriveId> = group.members.iter().copied().chain(sources).collect();
            for drive in needed {
                *counts.entry(drive).or_default() += 1;
            }
        }
        counts
    }

    /// Drives that came back as older copies and have not been compared with the others yet.
    pub fn behind(&self) -> BTreeSet<DriveId> {
        self.groups.values().flat_map(PlacementGroup::returned).collect()
    }

    /// Weight and domain of these drives.
    pub(crate) fn slots(&self, drives: &BTreeSet<DriveId>) -> Vec<DriveSlot> {
        let known = drives.iter().filter_map(|id| self.drives.get(id));
        known.map(DriveRecord::slot).collect()
    }

    /// The groups of a list that there are.
    pub(crate) fn groups_of<'a>(&'a self, groups: &'a [PgId]) -> impl Iterator<Item = &'a PlacementGroup> {
        groups.iter().filter_map(|pg| self.groups.get(pg))
    }
}

/// The cluster as it should be next, and the records that differ.
pub struct Plan {
    next: Cluster,
    drives: BTreeSet<DriveId>,
    groups: BTreeSet<PgId>,
    filesystems: BTreeSet<u32>,
    cluster_changed: bool,
    map_changed: bool,
}

impl Plan {
    /// A plan that changes nothing.
    pub fn new(now: Cluster) -> Self {
        Self {
            next: now,
            drives: BTreeSet::new(),
            groups: BTreeSet::new(),
            filesystems: BTreeSet::new(),
            cluster_changed: false,
            map_changed: false,
        }
    }

    /// The cluster as it will be.
    pub fn next(&self) -> &Cluster {
        &self.next
    }

    /// The cluster as it is, once the plan is committed.
    pub fn into_next(self) -> Cluster {
        self.next
    }

    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        let Self { drives, groups, filesystems, .. } = self;
        !self.cluster_changed && drives.is_empty() && groups.is_empty() && filesystems.is_empty()
    }

    /// The changes of records. `view` is the one from which the plan was made.
    pub fn change(&self, view: &ControlView) -> ControlChange {
        let mut change = view.change();
        if self.cluster_changed {
            change.cluster(&self.next.record);
        }
        for drive in self.drives.iter().filter_map(|id| self.next.drives.get(id)) {
            change.drive(drive);
        }
        for group in self.groups.iter().filter_map(|id| self.next.groups.get(id)) {
            change.group(group);
        }
        for record in self.filesystems.iter().filter_map(|id| self.next.filesystems.get(id)) {
            change.filesystem(record);
        }
        change
    }

    /// Adds or changes a drive.
    pub fn set_drive(&mut self, drive: DriveRecord) {
        if self.next.drives.get(&drive.id).map(DriveRecord::in_map) != Some(drive.in_map()) {
            self.touch_map();
        }
        self.drives.insert(drive.id);
        self.next.drives.insert(drive.id, drive);
    }

    /// Adds or changes a placement group.
    pub fn set_group(&mut self, group: PlacementGroup) {
        self.touch_map();
        self.groups.insert(group.id);
        self.next.groups.insert(group.id, group);
    }

    /// Adds or changes a filesystem.
    pub fn set_filesystem(&mut self, record: FilesystemRecord) {
        self.filesystems.insert(record.id);
        self.next.filesystems.insert(record.id, record);
    }

    /// Changes the cluster's record.
    pub fn set_cluster(&mut self, change: impl FnOnce(&mut ClusterRecord)) {
        self.cluster_changed = true;
        change(&mut self.next.record);
    }

    /// Every plan that changes the map raises its epoch by one.
    fn touch_map(&mut self) {
        if !self.map_changed {
            self.map_changed = true;
            self.set_cluster(|cluster| cluster.map_epoch += 1);
        }
    }

    /// The number for a new drive.
    pub fn next_drive(&mut self) -> DriveId {
        let id = DriveId(self.next.record.next_drive);
        self.set_cluster(|cluster| cluster.next_drive += 1);
        id
    }

    /// Plans groups over these drives. Returns their numbers.
    pub(crate) fn plan_groups(
        &mut self,
        drives: &BTreeSet<DriveId>,
        profile: Profile,
        seed: u64,
    ) -> Result<Vec<PgId>, PlacementError> {
        let slots = self.next.slots(drives);
        let suggested = suggested_pg_count(slots.len() as u32, profile.n());
        // Groups of all drives differ in their order only, so a few of each order suffice.
        let count = if slots.len() == usize::from(profile.n()) {
            suggested.min(ORDERS * slots.len() as u32)
        } else {
            suggested
        };
        let groups = plan_placement_groups(&slots, profile, count, seed)?;
        let first = self.next.record.next_group;
        self.set_cluster(|cluster| cluster.next_group += groups.len() as u32);
        let ids: Vec<PgId> = (first..).take(groups.len()).map(PgId).collect();
        for (id, group) in ids.iter().zip(groups) {
            self.set_group(PlacementGroup { id: *id, ..group });
        }
        Ok(ids)
    }
}

impl Control {
    /// Decides a plan from the newest records and commits it, if it changes anything. Returns what was decided, and the cluster if
    /// it has changed. If another change comes first, it is decided anew.
    ///
    /// # Errors
    /// Those of `decide` and of [`Control::commit`].
    pub async fn plan<T, E: From<ControlError>>(
        &self,
        mut decide: impl FnMut(&mut Plan) -> Result<T, E>,
    ) -> Result<(T, Option<Cluster>), E> {
        self.catch_up().await?;
        let mut attempt = 1;
        loop {
            let view = self.view()?;
            let mut plan = Plan::new(Cluster::of(&view)?);
            let decided = decide(&mut plan)?;
            if plan.is_empty() {
                return Ok((decided, None));
            }
            match self.commit(plan.change(&view)).await {
                Ok(()) => return Ok((decided, Some(plan.into_next()))),
                Err(ControlError::Conflict) if attempt < ATTEMPTS => attempt += 1,
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl DriveRecord {
    /// The drive as clients see it.
    fn in_map(&self) -> MapDrive {
        MapDrive { id: self.id, uuid: self.uuid, domain: self.domain, state: self.state }
    }

    /// Weight and domain for placing shards.
    pub fn slot(&self) -> DriveSlot {
        DriveSlot { drive: self.id, domain: self.domain, weight_bytes: self.capacity_bytes }
    }

    /// Whether others take over the drive's positions.
    pub fn is_given_up(&self) -> bool {
        matches!(self.state, DriveState::Out | DriveState::Leaving)
    }
}
