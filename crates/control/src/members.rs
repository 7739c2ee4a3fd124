//! Drives that come, go and return, and the positions in placement groups that follow.

use std::collections::{BTreeSet, HashMap};

use base::DriveId;
use layout::{DriveState, PlacementError, PlacementGroup, Rebuilding, replace_members};

use crate::protection::{Owed, Seen};
use crate::{Cluster, DriveRecord, Plan};

/// What ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Finished {
    /// Groups whose members have all their shards now.
    pub groups: usize,
    /// Drives that no group needs any more.
    pub empty: Vec<DriveId>,
}

impl Cluster {
    /// The groups after others have taken over the positions of drives that go. Positions for which there is no other drive stay.
    fn replaced(&self, gone: &BTreeSet<DriveId>, seen: &Seen) -> Vec<PlacementGroup> {
        let spare = self.slots(&seen.up.difference(gone).copied().collect());
        let domains: HashMap<DriveId, u64> =
            self.drives.iter().map(|(id, drive)| (*id, drive.domain)).collect();
        let groups: Vec<PlacementGroup> = self.groups.values().cloned().collect();
        replace_members(&groups, gone, &spare, &domains)
    }

    /// Number of groups in which another drive could take over the position of this one.
    pub fn replaceable(&self, id: DriveId, seen: &Seen) -> u32 {
        self.replaced(&BTreeSet::from([id]), seen).len() as u32
    }

    /// Number of groups that need a drive.
    pub fn groups_with(&self, id: DriveId) -> u32 {
        self.group_counts().get(&id).copied().unwrap_or(0)
    }
}

impl Plan {
    /// Changes the allowed uses of a drive.
    pub fn set_drive_state(&mut self, id: DriveId, state: DriveState) {
        if let Some(drive) = self.next().drives.get(&id).filter(|drive| drive.state != state) {
            self.set_drive(DriveRecord { state, ..drive.clone() });
        }
    }

    /// Adds a drive. New groups over all drives that are up use it for new data; stored data is not moved.
    pub fn add_drive(&mut self, drive: DriveRecord, seen: &Seen, seed: u64) -> Result<(), PlacementError> {
        let up: BTreeSet<DriveId> = seen.up.iter().copied().chain([drive.id]).collect();
        self.set_drive(drive);
        let records: Vec<_> = self.next().filesystems.values().cloned().collect();
        for mut record in records.into_iter().filter(|record| usize::from(record.profile.n()) <= up.len()) {
            let groups = self.plan_groups(&up, record.profile, seed)?;
            record.add_groups(record.profile, groups);
            self.set_filesystem(record);
        }
        Ok(())
    }

    /// Empties a drive if it can be read, or does without it. Others take over its positions.
    pub fn give_up(&mut self, id: DriveId, seen: &Seen) {
        let state = if seen.readable.contains(&id) { DriveState::Leaving } else { DriveState::Out };
        self.set_drive_state(id, state);
        self.reassign(seen);
    }

    /// Gives the positions of drives that were given up to drives that are up. Returns the number of groups that change.
    pub fn reassign(&mut self, seen: &Seen) -> usize {
        let given_up = self.next().drives.values().filter(|drive| drive.is_given_up());
        let gone: BTreeSet<DriveId> = given_up.map(|drive| drive.id).collect();
        let counts = self.next().group_counts();
        if !gone.iter().any(|id| counts.contains_key(id)) {
            return 0;
        }
        let changed = self.next().replaced(&gone, seen);
        let count = changed.len();
        changed.into_iter().for_each(|group| self.set_group(group));
        count
    }

    /// Gives up drives that were away for too long, if others can take over positions of theirs. A drive without which data
    /// cannot be read is waited for.
    pub fn retire(&mut self, overdue: &[DriveId], seen: &Seen, owed: &Owed) -> Vec<DriveId> {
        let mut retired = Vec::new();
        for id in overdue {
            let now = self.next();
            if now.replaceable(*id, seen) > 0 && now.needs(*id, seen, owed).is_none() {
                self.set_drive_state(*id, DriveState::Out);
                retired.push(*id);
            }
        }
        retired
    }

    /// Puts a new drive into all positions of another one.
    pub fn replace(&mut self, id: DriveId, new: DriveRecord, seen: &Seen) {
        let new_id = new.id;
        let state = if seen.readable.contains(&id) { DriveState::Leaving } else { DriveState::Out };
        self.set_drive_state(id, state);
        self.set_drive(new);
        let groups: Vec<PlacementGroup> =
            self.next().groups.values().filter(|group| group.members.contains(&id)).cloned().collect();
        for mut group in groups {
            group.epoch.0 += 1;
            for (position, member) in (0u8..).zip(&mut group.members).filter(|(_, member)| **member == id) {
                *member = new_id;
                group.rebuilding.push(Rebuilding { position, from: id });
            }
            self.set_group(group);
        }
    }

    /// A drive came back as an older copy of itself: its groups are compared with it, and what it lacks is restored.
    pub fn returned_with_gap(&mut self, id: DriveId) {
        let returned = self.next().groups.values().filter_map(|group| group.returned_with_gap(id));
        let returned: Vec<PlacementGroup> = returned.collect();
        returned.into_iter().for_each(|group| self.set_group(group));
    }

    /// Ends the rebuild of groups whose members have all their shards, and retires drives that are empty.
    pub fn finish(&mut self, is_rebuilt: impl Fn(&PlacementGroup) -> bool) -> Finished {
        let rebuilding = self.next().groups.values().filter(|group| !group.rebuilding.is_empty());
        let done: Vec<PlacementGroup> = rebuilding.filter(|group| is_rebuilt(group)).cloned().collect();
        let groups = done.len();
        for group in done {
            self.set_group(PlacementGroup { rebuilding: Vec::new(), ..group });
        }
        let needed = self.next().group_counts();
        let leaving = self.next().drives.values().filter(|drive| drive.state == DriveState::Leaving);
        let empty: Vec<DriveId> =
            leaving.map(|drive| drive.id).filter(|id| !needed.contains_key(id)).collect();
        empty.iter().for_each(|id| self.set_drive_state(*id, DriveState::Out));
        Finished { groups, empty }
    }
}
