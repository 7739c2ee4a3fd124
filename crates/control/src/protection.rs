//! Which losses the stored data survives, and which new data.

use std::collections::{BTreeMap, BTreeSet};

use base::{DriveId, PgId};
use layout::{
    FailureDomain, PlacementGroup, Profile, acknowledgements_survive, losses_survived, writes_survive,
};

use crate::{Cluster, FilesystemRecord};

/// The condition of the drives now. It is not recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// Drives that can be written to.
    pub up: BTreeSet<DriveId>,
    /// Drives that can be read.
    pub readable: BTreeSet<DriveId>,
    /// Drives that come and go. No new data goes there where others suffice.
    pub unsteady: BTreeSet<DriveId>,
    /// Groups of former profiles in which nothing is stored.
    pub unused: BTreeSet<PgId>,
}

/// Drives that are owed shards, by filesystem.
pub type Owed = BTreeMap<u32, BTreeSet<DriveId>>;

impl Seen {
    /// The condition with one drive less.
    #[must_use]
    pub fn without(&self, id: DriveId) -> Self {
        let mut left = self.clone();
        left.up.remove(&id);
        left.readable.remove(&id);
        left
    }

    /// The drives that together have all shards of a position, if they can be read: its member, and during a rebuild also the one
    /// that had the position. The first has the new shards, the other has those that are not moved yet.
    fn holders(
        &self,
        group: &PlacementGroup,
        position: u8,
        owed: &BTreeSet<DriveId>,
    ) -> Option<(DriveId, DriveId)> {
        let member = *group.members.get(usize::from(position))?;
        let readable = |drive: &DriveId| self.readable.contains(drive);
        let other = match group.is_rebuilding(position) {
            true => group.sources(position).find(readable)?,
            false => member,
        };
        Some((member, other)).filter(|_| readable(&member) && !owed.contains(&member))
    }

    /// Positions of the group whose shards cannot be read, or not all of them.
    fn exposure(&self, group: &PlacementGroup, owed: &BTreeSet<DriveId>) -> u8 {
        let positions = 0..group.members.len() as u8;
        positions.filter(|position| self.holders(group, *position, owed).is_none()).count() as u8
    }
}

/// Whether a drive has shards of a group: as a member, or because not all were moved off it.
pub(crate) fn uses(group: &PlacementGroup, id: DriveId) -> bool {
    group.members.contains(&id) || group.rebuilding.iter().any(|rebuilding| rebuilding.from == id)
}

impl Cluster {
    /// Whether the node of a drive is away on purpose.
    pub fn is_in_maintenance(&self, id: DriveId, now_s: i64) -> bool {
        let node = self.drives.get(&id).and_then(|drive| self.nodes.get(&drive.node));
        node.is_some_and(|node| node.maintenance_left_s(now_s).is_some())
    }

    /// A filesystem that loses data without this drive, because too few other drives hold it, whether this one can be read now or
    /// not.
    pub fn needs(&self, id: DriveId, seen: &Seen, owed: &Owed) -> Option<&FilesystemRecord> {
        let (nothing, seen) = (BTreeSet::new(), seen.without(id));
        self.filesystems.values().find(|record| {
            let owed = owed.get(&record.id).unwrap_or(&nothing);
            record.all_sets().any(|(profile, groups)| {
                let is_used = |group: &&PlacementGroup| uses(group, id) && !seen.unused.contains(&group.id);
                let mut concerned = self.groups_of(groups).filter(is_used);
                concerned.any(|group| seen.exposure(group, owed) > profile.m())
            })
        })
    }

    /// Most positions of one group of these that cannot be read, or not completely.
    pub fn worst<'a>(
        &'a self,
        groups: impl IntoIterator<Item = &'a PgId>,
        seen: &Seen,
        owed: &BTreeSet<DriveId>,
    ) -> u8 {
        let groups = groups.into_iter().filter_map(|pg| self.groups.get(pg));
        groups.map(|group| seen.exposure(group, owed)).max().unwrap_or(0)
    }

    /// How many more domains of a level may be lost, whichever they are, so that all data of the filesystem can still be read. -1
    /// if some cannot be read now.
    pub fn reads_survive(
        &self,
        record: &FilesystemRecord,
        seen: &Seen,
        owed: &BTreeSet<DriveId>,
        level: FailureDomain,
    ) -> i32 {
        // During a rebuild a position has shards on two drives: each group counts with the ones and with the others.
        let readable = |group: &PlacementGroup| {
            let positions = 0..group.members.len() as u8;
            let holders = positions.filter_map(|position| seen.holders(group, position, owed));
            let (members, others) = holders.unzip();
            [PlacementGroup::new(group.id, members), PlacementGroup::new(group.id, others)]
        };
        let sets = record.all_sets().flat_map(|(profile, groups)| {
            self.groups_of(groups).flat_map(readable).map(move |group| (group, profile))
        });
        let groups: Vec<(PlacementGroup, Profile)> = sets.collect();
        let groups = groups.iter().map(|(group, profile)| (group, *profile));
        losses_survived(groups, |_, _| true, &self.places(), level)
    }

    /// How many more domains of a level may be lost, whichever they are, so that new data can still be stored, with narrower
    /// extents if necessary. `None` if it cannot be stored now.
    pub fn writes_survive(
        &self,
        record: &FilesystemRecord,
        seen: &Seen,
        level: FailureDomain,
    ) -> Option<u32> {
        let rule = self.rule_or_last(record);
        let planned = writes_survive(rule, record.profile, &self.slots_for(record, &seen.up), level);
        let sets = record.all_sets();
        let groups =
            sets.flat_map(|(profile, groups)| self.groups_of(groups).map(move |group| (group, profile)));
        let answers =
            |group: &PlacementGroup, position: u8| seen.up.contains(&group.members[usize::from(position)]);
        let present = acknowledgements_survive(groups, answers, &self.places(), level);
        u32::try_from(planned.max(present)).ok()
    }
}
