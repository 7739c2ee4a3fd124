//! Drives and placement groups as the control ledger publishes them.

use base::{DriveId, DriveUuid, Epoch, PgId};
use serde::{Deserialize, Serialize};

use crate::{Place, PlacementGroup};

/// All drives and placement groups of a cluster at one epoch. Every change has a higher epoch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterMap {
    /// The map's version.
    pub epoch: Epoch,
    /// Every drive that was not forgotten, in the order of their numbers.
    pub drives: Vec<MapDrive>,
    /// Every placement group, in the order of their numbers.
    pub groups: Vec<PlacementGroup>,
}

/// A drive in the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapDrive {
    /// Its number, as placement groups refer to it.
    pub id: DriveId,
    /// The id written on it.
    pub uuid: DriveUuid,
    /// What holds it.
    #[serde(default)]
    pub place: Place,
    /// Its allowed uses.
    pub state: DriveState,
}

/// The allowed uses of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriveState {
    /// Reads and writes.
    Up,
    /// Reads only: its shards are moved to other drives.
    Leaving,
    /// None for now: it does not answer or its service ended. It is still a member of its groups.
    Failed,
    /// None, for good: its groups are rebuilt on other drives.
    Out,
}

impl ClusterMap {
    /// The placement group with this number.
    pub fn group(&self, id: PgId) -> Option<&PlacementGroup> {
        find(&self.groups, id.0, |group| group.id.0)
    }

    /// The drive with this number.
    pub fn drive(&self, id: DriveId) -> Option<&MapDrive> {
        find(&self.drives, id.0, |drive| drive.id.0)
    }
}

/// Finds an item by number. Numbers are in order, and dense unless an item was removed or numbers were left out, so the index is tried
/// first.
fn find<T>(items: &[T], number: u32, number_of: impl Fn(&T) -> u32) -> Option<&T> {
    items
        .get(number as usize)
        .filter(|item| number_of(item) == number)
        .or_else(|| items.get(items.binary_search_by_key(&number, number_of).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(groups: &[u32]) -> ClusterMap {
        let groups =
            groups.iter().map(|id| PlacementGroup::new(PgId(*id), vec![DriveId(id + 100)])).collect();
        ClusterMap { epoch: Epoch(3), drives: Vec::new(), groups }
    }

    #[test]
    fn groups_are_found_by_number_wherever_they_are() {
        for map in [map(&[0, 1, 2, 3]), map(&[1, 3]), map(&[3]), map(&[0, 3, 5, 65_537])] {
            assert_eq!(map.group(PgId(3)).unwrap().members, [DriveId(103)]);
            assert_eq!(map.group(PgId(4)), None);
        }
    }

    #[test]
    fn a_map_survives_serialization() {
        let mut map = map(&[0]);
        map.drives.push(MapDrive {
            id: DriveId(0),
            uuid: DriveUuid([7; 16]),
            place: Place { node: 4, ..Place::default() },
            state: DriveState::Failed,
        });
        let text = serde_json::to_string(&map).unwrap();
        assert!(text.contains(r#""state":"failed""#), "{text}");
        let back: ClusterMap = serde_json::from_str(&text).unwrap();
        assert_eq!(back, map);
        assert_eq!(back.drive(DriveId(0)).unwrap().place.node, 4);
        assert_eq!(back.drive(DriveId(1)), None);
        let older = text.replace(r#""place":{"zone":0,"rack":0,"node":4},"#, "");
        let back: ClusterMap = serde_json::from_str(&older).unwrap();
        assert_eq!(back.drive(DriveId(0)).unwrap().place, Place::default());
    }
}
