//! What is near to a client: the copies that it reads, and the groups that it writes to where placement is local.

use std::collections::HashMap;

use base::{DriveId, PgId};
use layout::{ClusterMap, FailureDomain, Place};

/// From the nearest on.
const LEVELS: [FailureDomain; 3] = [FailureDomain::Node, FailureDomain::Rack, FailureDomain::Zone];

/// A client's place, and the groups of new extents that are near to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Near {
    here: Option<Place>,
    /// For extents of the filesystem's shape.
    coded: Groups,
    /// For copies.
    copies: Groups,
}

/// Groups for extents of one shape.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Groups {
    /// Those that are near to the client.
    here: Vec<PgId>,
    /// Of each node, those with the most data shards there.
    by_node: HashMap<u32, Vec<PgId>>,
}

impl Near {
    /// What is near to a process at `here`; `None`: it is on no node of the cluster. `groups`: those of new extents with `k` data shards,
    /// if these are to be near.
    pub(crate) fn new(here: Option<Place>, map: &ClusterMap, groups: Option<(&[PgId], u8)>) -> Self {
        let of_shape = |(groups, k)| Groups::new(here, map, groups, k);
        let coded = groups.map(of_shape).unwrap_or_default();
        let copies = match groups {
            Some((groups, k)) if k > 1 => of_shape((groups, 1)),
            _ => coded.clone(),
        };
        Self { here, coded, copies }
    }

    fn of_shape(&self, k: u8) -> &Groups {
        if k == 1 { &self.copies } else { &self.coded }
    }

    /// The groups near to the client for new extents with `k` data shards. Empty if no group is near.
    pub(crate) fn groups(&self, k: u8) -> &[PgId] {
        &self.of_shape(k).here
    }

    /// The groups for such extents with the most data shards on the node of a drive: for data that moves.
    pub(crate) fn groups_beside(&self, map: &ClusterMap, drive: DriveId, k: u8) -> &[PgId] {
        let node = map.drive(drive).map(|drive| drive.place.node);
        node.and_then(|node| self.of_shape(k).by_node.get(&node)).map_or(&[], Vec::as_slice)
    }

    /// How far a drive is: on this node, in this rack, in this zone, elsewhere.
    pub(crate) fn distance(&self, map: &ClusterMap, drive: DriveId) -> usize {
        let (Some(here), Some(there)) = (self.here, map.drive(drive)) else { return LEVELS.len() };
        let is_same = |level: &FailureDomain| here.domain(*level, drive) == there.place.domain(*level, drive);
        LEVELS.iter().position(is_same).unwrap_or(LEVELS.len())
    }
}

impl Groups {
    fn new(here: Option<Place>, map: &ClusterMap, groups: &[PgId], k: u8) -> Self {
        let by_node = with_most(map, groups, k, FailureDomain::Node);
        let near = here.and_then(|here| match by_node.get(&here.node) {
            Some(near) => Some(near.clone()),
            None => LEVELS[1..].iter().find_map(|level| {
                let domain = here.domain(*level, DriveId::default()) as u32;
                with_most(map, groups, k, *level).remove(&domain)
            }),
        });
        Self { here: near.unwrap_or_default(), by_node }
    }
}

/// Of each domain of a level, the groups with the most data shards in it.
fn with_most(map: &ClusterMap, groups: &[PgId], k: u8, level: FailureDomain) -> HashMap<u32, Vec<PgId>> {
    let mut most: HashMap<u32, (usize, Vec<PgId>)> = HashMap::new();
    for pg in groups {
        let members = map.group(*pg).into_iter().flat_map(|group| group.members.iter().take(k.into()));
        let mut domains: Vec<u32> =
            members.filter_map(|id| Some(map.drive(*id)?.place.domain(level, *id) as u32)).collect();
        domains.sort_unstable();
        for same in domains.chunk_by(|one, other| one == other) {
            let (count, found) = most.entry(same[0]).or_default();
            if same.len() > *count {
                (*count, *found) = (same.len(), Vec::new());
            }
            if same.len() == *count {
                found.push(*pg);
            }
        }
    }
    most.into_iter().map(|(domain, (_, found))| (domain, found)).collect()
}

#[cfg(test)]
mod tests {
    use base::{DriveUuid, Epoch};
    use layout::{DriveState, MapDrive, PlacementGroup};

    use super::*;

    /// Two drives in each node, two nodes in each rack, two racks in each zone.
    fn place(node: u32) -> Place {
        Place { zone: node / 4, rack: node / 2, node }
    }

    fn map(groups: &[&[u32]]) -> ClusterMap {
        let drive = |id: u32| MapDrive {
            id: DriveId(id),
            uuid: DriveUuid([0; 16]),
            place: place(id / 2),
            state: DriveState::Up,
        };
        let group = |(id, members): (usize, &&[u32])| {
            PlacementGroup::new(PgId(id as u32), members.iter().copied().map(DriveId).collect())
        };
        ClusterMap {
            epoch: Epoch(1),
            drives: (0..16).map(drive).collect(),
            groups: groups.iter().enumerate().map(group).collect(),
        }
    }

    #[track_caller]
    fn check(node: u32, groups: &[&[u32]], k: u8, expected: &[u32]) {
        let map = map(groups);
        let all: Vec<PgId> = map.groups.iter().map(|group| group.id).collect();
        let near = Near::new(Some(place(node)), &map, Some((&all, k)));
        let expected: Vec<PgId> = expected.iter().copied().map(PgId).collect();
        assert_eq!(near.groups(k), expected);
    }

    #[test]
    fn the_first_copy_is_on_this_node_or_at_least_in_its_rack_or_zone() {
        check(0, &[&[0, 4], &[4, 0], &[1, 6], &[2, 8]], 1, &[0, 2]);
        check(1, &[&[0, 4], &[4, 0], &[1, 6], &[12, 8]], 1, &[0, 2]);
        check(3, &[&[0, 9], &[8, 0], &[1, 12], &[12, 8]], 1, &[0, 2]);
        check(7, &[&[0, 9], &[1, 6]], 1, &[]);
    }

    #[test]
    fn groups_with_more_data_shards_here_are_nearer_and_parity_does_not_count() {
        check(0, &[&[0, 1, 4, 5, 8, 9], &[0, 4, 5, 8, 1, 9], &[4, 5, 8, 9, 0, 1]], 4, &[0]);
        check(2, &[&[0, 1, 4, 5, 8, 9], &[4, 0, 5, 8, 1, 9], &[4, 0, 1, 9, 5, 8]], 4, &[0, 1]);
    }

    #[test]
    fn copies_are_near_by_their_first_member_under_every_profile() {
        let map = map(&[&[0, 1, 4, 5, 8, 9], &[4, 0, 1, 5, 8, 9], &[8, 0, 4, 5, 1, 9]]);
        let groups = [PgId(0), PgId(1), PgId(2)];
        let near = Near::new(Some(place(4)), &map, Some((&groups, 4)));
        assert_eq!((near.groups(1), near.groups(4)), (&groups[2..], &groups[2..]));
        let near = Near::new(Some(place(0)), &map, Some((&groups, 4)));
        assert_eq!((near.groups(1), near.groups(4)), (&groups[..1], &groups[..2]));
    }

    #[test]
    fn nothing_is_near_to_a_process_on_no_node_or_where_placement_is_not_local() {
        let map = map(&[&[0, 4]]);
        assert_eq!(Near::new(None, &map, Some((&[PgId(0)], 1))).groups(1), []);
        let near = Near::new(Some(place(0)), &map, None);
        assert_eq!(near.groups(1), []);
        let far: Vec<usize> = [1, 2, 6, 8, 99].iter().map(|id| near.distance(&map, DriveId(*id))).collect();
        assert_eq!(far, [0, 1, 2, 3, 3]);
    }
}
