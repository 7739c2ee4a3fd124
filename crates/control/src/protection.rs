//! Which losses the stored data survives, and which new data.

use std::collections::{BTreeMap, BTreeSet};

use base::{DriveId, PgId};
use layout::{PlacementGroup, Profile};

use crate::{Cluster, FilesystemRecord};

/// The condition of the drives now. It is not recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// Drives that can be written to.
    pub up: BTreeSet<DriveId>,
    /// Drives that can be read.
    pub readable: BTreeSet<DriveId>,
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

    /// Positions of the group whose shards cannot be read, or not all of them.
    fn exposure(&self, group: &PlacementGroup, owed: &BTreeSet<DriveId>) -> u8 {
        let has_all = |position: u8, member: DriveId| {
            let whole = if group.is_rebuilding(position) {
                group.sources(position).any(|source| self.readable.contains(&source))
            } else {
                self.readable.contains(&member)
            };
            whole && !owed.contains(&member)
        };
        let exposed = (0u8..).zip(&group.members).filter(|(position, member)| !has_all(*position, **member));
        exposed.count() as u8
    }
}

impl Cluster {
    /// A filesystem that loses data without this drive, because too few other drives hold it.
    pub fn needs(&self, id: DriveId, seen: &Seen, owed: &Owed) -> Option<&FilesystemRecord> {
        let nothing = BTreeSet::new();
        self.filesystems.values().find(|record| {
            let owed = owed.get(&record.id).unwrap_or(&nothing);
            record.all_sets().any(|(profile, groups)| {
                let mut concerned = self.groups_of(groups).filter(|group| group.members.contains(&id));
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

    /// Number of further drive losses that the filesystem's data survives, by its worst group; negative if some data cannot
    /// be read.
    pub fn reads_survive(&self, record: &FilesystemRecord, seen: &Seen, owed: &BTreeSet<DriveId>) -> i32 {
        let of_set = |(profile, groups): (Profile, &[PgId])| {
            i32::from(profile.m()) - i32::from(self.worst(groups, seen, owed))
        };
        record.all_sets().map(of_set).min().unwrap_or(0)
    }

    /// Number of further drive losses after which new data can still be stored, with narrower extents if necessary. `None` if it
    /// cannot be stored now.
    pub fn writes_survive(&self, record: &FilesystemRecord, seen: &Seen) -> Option<u32> {
        let up = seen.up.iter().filter_map(|id| self.drives.get(id));
        let up = up.map(|drive| drive.domain).collect::<BTreeSet<_>>().len() as u32;
        let narrow = up.checked_sub(u32::from(record.profile.m()) + 1);
        record.profile.explain(up).writes_survive.map(u32::from).max(narrow)
    }
}
