//! The drives and placement groups that a client uses now.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use base::{DriveId, NodeId, PgId, ShardIndex};
use futures_util::future::join_all;
use layout::{ClusterMap, DriveState, MapDrive, Place, PlacementGroup, Profile};
use wire::drive::{DriveHealth, DriveService, DriveStat};

use crate::near::Near;

/// A group that is near is taken while it has this part of the room of another.
const NEAR_ROOM_PART: u64 = 4;

/// The cluster map and the services of its drives. Replaced as a whole on every change.
#[derive(Clone)]
pub struct Topology {
    /// Drives and placement groups.
    pub map: ClusterMap,
    /// The services of the drives. A drive that is missing here does not answer.
    pub drives: HashMap<DriveId, Arc<dyn DriveService>>,
    /// The placement groups that new extents of this filesystem go to.
    pub groups: Vec<PgId>,
    /// How new extents are protected: as the filesystem's profile says, or narrower while domains are missing.
    pub profile: Profile,
    /// Groups whose extents are narrower than the filesystem's profile.
    pub narrow: Vec<PgId>,
    /// How much the filesystem may hold.
    pub limits: Limits,
    /// What is near to the client.
    pub near: Near,
    /// The nodes whose drives the filesystem's data is for; empty: all nodes.
    pub nodes: BTreeSet<NodeId>,
}

/// What a new extent is near to, where placement is local.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beside {
    /// The client that writes it.
    Here,
    /// A drive.
    Drive(DriveId),
    /// Nothing: all groups are the same to it.
    Nothing,
}

/// Limits of a filesystem: in bytes of content, where `None` is the capacity of the drives, and what of that stays free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// In all, on every tier.
    pub provisioned_bytes: Option<u64>,
    /// On drives.
    pub ssd_bytes: Option<u64>,
    /// The part of each drive, in millionths, that stays free so that others can take over what is lost.
    pub spare_millionths: u32,
}

impl Limits {
    /// What stays free of a drive.
    fn spare_bytes(&self, stat: &DriveStat) -> u64 {
        let bytes = u128::from(stat.capacity_bytes.saturating_sub(stat.reserved_bytes));
        (bytes * u128::from(self.spare_millionths)).div_ceil(1_000_000) as u64
    }
}

impl Default for Topology {
    fn default() -> Self {
        let (map, drives, groups, narrow) = Default::default();
        let (limits, near, nodes) = Default::default();
        Self { map, drives, groups, profile: Profile::SINGLE, narrow, limits, near, nodes }
    }
}

impl Topology {
    /// The same for a client at `here`, which is `None` on no node of the cluster. `writes_near`: new extents go where it is, as far as
    /// possible.
    pub fn seen_from(self, here: Option<Place>, writes_near: bool) -> Self {
        let groups = writes_near.then_some((&self.groups[..], self.profile.k()));
        let near = Near::new(here, &self.map, groups);
        Self { near, ..self }
    }

    /// The drive's service, if new shards may be written to it.
    pub(crate) fn usable(&self, id: DriveId) -> Option<&Arc<dyn DriveService>> {
        self.serving(id, |state| state == DriveState::Up)
    }

    /// The number of drives of a group whose machines are not reached, sources of a rebuild included.
    pub(crate) fn unreachable(&self, group: &PlacementGroup) -> usize {
        let sources = group.rebuilding.iter().map(|rebuilding| rebuilding.from);
        let drives: BTreeSet<DriveId> = group.members.iter().copied().chain(sources).collect();
        let drives = drives.iter().filter_map(|id| self.drives.get(id));
        drives.filter(|drive| drive.health() == DriveHealth::Unreachable).count()
    }

    /// The drive's service, if shards may be read from it and deleted.
    pub(crate) fn readable(&self, id: DriveId) -> Option<&Arc<dyn DriveService>> {
        self.serving(id, |state| matches!(state, DriveState::Up | DriveState::Leaving))
    }

    fn serving(&self, id: DriveId, may: impl Fn(DriveState) -> bool) -> Option<&Arc<dyn DriveService>> {
        let allowed = self.map.drive(id).is_some_and(|drive| may(drive.state));
        self.drives.get(&id).filter(|drive| allowed && drive.health() == DriveHealth::Up)
    }

    /// Whether the drive is gone for good: nothing waits for it.
    pub(crate) fn is_out(&self, id: DriveId) -> bool {
        self.map.drive(id).is_none_or(|drive| drive.state == DriveState::Out)
    }

    /// The drives that may hold this shard of a group's extents: its member, then those that had its position.
    pub(crate) fn holders(&self, pg: PgId, shard: ShardIndex) -> impl Iterator<Item = DriveId> + '_ {
        let group = self.map.group(pg);
        let member = group.and_then(|group| group.members.get(usize::from(shard.0))).copied();
        member.into_iter().chain(group.into_iter().flat_map(move |group| group.sources(shard.0)))
    }

    /// Positions that moved, with the drives that had them and stay in use, or may after all.
    pub(crate) fn left(&self, group: &PlacementGroup) -> impl Iterator<Item = (u8, DriveId)> {
        let stays = |id: DriveId| self.map.drive(id).is_some_and(|drive| drive.state != DriveState::Out);
        let moved = group.rebuilding.iter().map(|rebuilding| (rebuilding.position, rebuilding.from));
        let member = |position: u8| group.members.get(usize::from(position)).copied();
        moved.filter(move |(position, from)| member(*position) != Some(*from) && stays(*from))
    }

    /// How many of the group's first `n` members can take a shard, and the room of the fullest of them. A slow member
    /// does not count.
    fn fitness(&self, group: &PlacementGroup, n: usize, is_slow: &dyn Fn(DriveId) -> bool) -> (usize, u64) {
        let members = group.members.iter().take(n).filter(|id| !is_slow(**id));
        let rooms: Vec<u64> =
            members.filter_map(|id| self.usable(*id)).map(|drive| drive.stat().room_bytes()).collect();
        (rooms.len(), rooms.iter().min().copied().unwrap_or(0))
    }

    /// A group for a new extent of this shape: a near one if it is about as good as others. Data that moves stays near to the drive
    /// `beside` which it was.
    pub(crate) fn choose(
        &self,
        random: u64,
        shape: Profile,
        beside: Beside,
        is_slow: &dyn Fn(DriveId) -> bool,
    ) -> Option<&PlacementGroup> {
        let n = usize::from(shape.n());
        let near = match beside {
            Beside::Here => self.near.groups(shape.k()),
            Beside::Drive(drive) => self.near.groups_beside(&self.map, drive, shape.k()),
            Beside::Nothing => &[],
        };
        let (any, any_up) = self.better_of_two(&self.groups, random, n, is_slow)?;
        match self.better_of_two(near, random, n, is_slow) {
            Some((near, up)) if up >= any_up && self.has_part_of_room(near, any, n) => Some(near),
            _ => Some(any),
        }
    }

    /// Whether a group that is near has enough room beside another one. What stays free is no room: the rest of the cluster counts on it
    /// when it rebuilds.
    fn has_part_of_room(&self, near: &PlacementGroup, other: &PlacementGroup, n: usize) -> bool {
        let room = |group: &PlacementGroup| {
            let members = group.members.iter().take(n).filter_map(|id| self.usable(*id));
            let stats = members.map(|drive| drive.stat());
            let rooms = stats.map(|stat| stat.room_bytes().saturating_sub(self.limits.spare_bytes(&stat)));
            rooms.min().unwrap_or(0)
        };
        let room_near = room(near);
        room_near > 0 && room_near >= room(other) / NEAR_ROOM_PART
    }

    /// The better of two random groups: more members up, then more room. With the number of those members.
    fn better_of_two(
        &self,
        groups: &[PgId],
        random: u64,
        n: usize,
        is_slow: &dyn Fn(DriveId) -> bool,
    ) -> Option<(&PlacementGroup, usize)> {
        let count = groups.len() as u64;
        if count == 0 {
            return None;
        }
        let pick = |number: u64| self.map.group(groups[(number % count) as usize]);
        let (one, other) = (pick(random & 0xffff_ffff)?, pick(random >> 32)?);
        let (fit_one, fit_other) = (self.fitness(one, n, is_slow), self.fitness(other, n, is_slow));
        // A small difference in room would always send everything to the same drive.
        let better = fit_other.0 > fit_one.0 || fit_other.0 == fit_one.0 && fit_other.1 > fit_one.1;
        Some(if better { (other, fit_other.0) } else { (one, fit_one.0) })
    }

    /// Whether the filesystem's data is for a drive.
    fn is_for(&self, drive: DriveId) -> bool {
        let of_node = |drive: &MapDrive| self.nodes.contains(&NodeId(drive.place.node));
        self.nodes.is_empty() || self.map.drive(drive).is_some_and(of_node)
    }

    /// The services of all drives to which new data of the filesystem may go.
    fn writable(&self) -> impl Iterator<Item = &Arc<dyn DriveService>> {
        let for_it = self.map.drives.iter().filter(|drive| self.is_for(drive.id));
        for_it.filter_map(|drive| self.usable(drive.id))
    }

    /// Whether enough drives are up for writes to be acknowledged.
    pub(crate) fn can_write(&self) -> bool {
        self.writable().count() >= usize::from(self.profile.w())
    }

    /// Whether a drive refused a write for lack of room that is not back yet.
    pub(crate) fn is_refusing(&self) -> bool {
        self.writable()
            .any(|service| matches!(service.stat(), DriveStat { full, host_full, .. } if full || host_full))
    }

    /// Room of each drive that may be written to, without what stays free.
    fn rooms(&self, room: impl Fn(&DriveStat) -> u64) -> Vec<u64> {
        let stats = self.writable().map(|service| service.stat());
        stats.map(|stat| room(&stat).saturating_sub(self.limits.spare_bytes(&stat))).collect()
    }

    /// Bytes of file data that still fit, spread over all drives. No limit with too few drives for writes, because they
    /// fail for another reason.
    pub(crate) fn room_bytes(&self) -> u64 {
        let profile = self.profile;
        let rooms = self.rooms(DriveStat::room_bytes);
        if rooms.len() < usize::from(profile.w()) {
            return u64::MAX;
        }
        // Stripes go ahead without the shards of drives that are gone.
        let width = rooms.len().min(usize::from(profile.n()));
        spread(rooms, width, profile.k())
    }

    /// As [`Topology::room_bytes`], once everything deleted has been reclaimed: the value for `df`.
    pub(crate) fn reclaimable_bytes(&self) -> u64 {
        let profile = self.profile;
        let rooms = self.rooms(DriveStat::reclaimable_bytes);
        let width = rooms.len().min(usize::from(profile.n()));
        if rooms.len() < usize::from(profile.w()) { 0 } else { spread(rooms, width, profile.k()) }
    }

    /// Bytes of its drives that are not free, for any reason.
    pub(crate) fn used_bytes(&self) -> u64 {
        let its = self.drives.iter().filter(|(id, _)| self.is_for(**id));
        its.map(|(_, drive)| drive.stat()).map(|stat| stat.capacity_bytes - stat.free_bytes).sum()
    }

    /// Makes the drives turn dead space into room. Returns once each has enough or no more to give.
    pub(crate) async fn make_room(&self) {
        // A drive that fails has no more to give.
        join_all(self.writable().map(|service| service.make_room())).await;
    }

    /// Bytes of file data that the drives hold when they are empty and all up, without what stays free.
    pub(crate) fn capacity_bytes(&self, profile: Profile) -> u64 {
        let capacity = |stat: DriveStat| {
            (stat.capacity_bytes - stat.reserved_bytes).saturating_sub(self.limits.spare_bytes(&stat))
        };
        let staying =
            |id: &DriveId| !matches!(self.map.drive(*id), Some(drive) if drive.state == DriveState::Leaving);
        let staying =
            self.drives.iter().filter(|(id, _)| self.is_for(**id) && staying(id) && !self.is_out(**id));
        let rooms: Vec<u64> = staying.map(|(_, service)| capacity(service.stat())).collect();
        // Right after a start with drives missing, no narrower profile is planned yet.
        let width = rooms.len().min(usize::from(profile.n()));
        spread(rooms, width, profile.k())
    }
}

/// How much data fits on drives with this room, with `k` data shards in stripes over `width` different drives. Room of
/// a drive beyond what the others can match is of no use.
fn spread(mut rooms: Vec<u64>, width: usize, k: u8) -> u64 {
    if rooms.len() < width || width == 0 {
        return 0;
    }
    rooms.sort_unstable();
    let mut total: u64 = rooms.iter().sum();
    let mut stripes_left = width as u64;
    for room in rooms.iter().rev().take(width - 1) {
        if *room <= total / stripes_left {
            break;
        }
        total -= room;
        stripes_left -= 1;
    }
    total / stripes_left * u64::from(k)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(rooms: &[u64], profile: &str, expected: u64) {
        let profile: Profile = profile.parse().unwrap();
        assert_eq!(spread(rooms.to_vec(), usize::from(profile.n()), profile.k()), expected);
    }

    #[test]
    fn equal_drives_hold_k_parts_of_n() {
        check(&[100; 6], "4+2", 400);
        check(&[100; 12], "4+2", 800);
        check(&[100], "1+0", 100);
    }

    #[test]
    fn a_drive_larger_than_all_others_counts_only_as_far_as_they_match_it() {
        check(&[100, 100, 1000], "r2", 200);
        check(&[100, 1000], "r2", 100);
        check(&[100, 200, 300], "r2", 300);
    }

    #[test]
    fn too_few_drives_hold_nothing() {
        check(&[100; 5], "4+2", 0);
    }
}
