//! Drives and placement groups, in place of the control ledger: they survive crashes. While clients work, a drive is
//! set aside for a while or given up, or the filesystem gets another profile.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use base::{DriveId, DriveUuid, Epoch, PgId};
use client::{Limits, Topology};
use layout::{ClusterMap, DriveSlot, DriveState, MapDrive, PlacementGroup, Profile, replace_members};
use wire::drive::{DriveMark, DriveService};

use crate::node::{Drives, Node};
use crate::scenario::Scenario;
use crate::store;
use crate::world::{Dice, World};

/// The simulated cluster; see the module.
pub(crate) struct Cluster {
    pub(crate) map: ClusterMap,
    /// The profile for new data.
    pub(crate) profile: Profile,
    /// The groups of every profile that was ever used for writing.
    sets: Vec<(Profile, Vec<PgId>)>,
    /// The mark of each drive; a drive with a lower mark is an older copy.
    pub(crate) marks: HashMap<u32, DriveMark>,
}

impl Cluster {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let drive = |number: u32| MapDrive {
            id: DriveId(number),
            uuid: DriveUuid([number as u8; 16]),
            domain: u64::from(number),
            state: DriveState::Up,
        };
        let drives = (0..scenario.drives).map(drive).collect();
        let map = ClusterMap { epoch: Epoch(1), drives, groups: Vec::new() };
        Self { map, profile: scenario.profile, sets: Vec::new(), marks: HashMap::new() }
    }

    fn up(&self) -> Vec<DriveId> {
        self.map.drives.iter().filter(|drive| drive.state == DriveState::Up).map(|drive| drive.id).collect()
    }

    /// Profile and groups of new extents: as wide as the drives that are up allow.
    fn write_set(&mut self) -> (Profile, Vec<PgId>) {
        let up = self.up();
        let profile = self.profile.narrowed(up.len() as u32).expect("enough drives are left");
        let is_up = |pg: &PgId| {
            self.map.group(*pg).is_some_and(|group| group.members.iter().all(|member| up.contains(member)))
        };
        let of_profile = self.sets.iter().filter(|(other, _)| *other == profile);
        let whole: Vec<PgId> =
            of_profile.flat_map(|(_, groups)| groups).copied().filter(|pg| is_up(pg)).collect();
        if whole.is_empty() { (profile, self.plan(profile, &up)) } else { (profile, whole) }
    }

    /// Plans groups over these drives: every rotation of the drives, cut to the profile's width.
    fn plan(&mut self, profile: Profile, up: &[DriveId]) -> Vec<PgId> {
        let n = usize::from(profile.n());
        let count = if up.len() > n { up.len() } else { 1 };
        let first = self.map.groups.len() as u32;
        for number in 0..count {
            let members = (0..n).map(|at| up[(number + at) % up.len()]).collect();
            self.map.groups.push(PlacementGroup::new(PgId(first + number as u32), members));
        }
        let groups: Vec<PgId> = (first..).take(count).map(PgId).collect();
        self.sets.push((profile, groups.clone()));
        groups
    }

    /// I9: the groups with two members in one failure domain.
    pub(crate) fn crowded(&self) -> Vec<String> {
        let domain = |id: &DriveId| self.map.drive(*id).map(|drive| drive.domain);
        let is_crowded = |group: &&PlacementGroup| {
            let domains: BTreeSet<_> = group.members.iter().map(domain).collect();
            domains.len() < group.members.len() || domains.contains(&None)
        };
        let say = |group: &PlacementGroup| {
            format!(
                "I9: at map {} two members of group {} share a domain: {:?}",
                self.map.epoch, group.id, group.members
            )
        };
        self.map.groups.iter().filter(is_crowded).map(say).collect()
    }

    /// The topology that clients get.
    pub(crate) fn topology(&mut self, drives: &Drives) -> Topology {
        let (profile, groups) = self.write_set();
        let narrow = self.sets.iter().filter(|(profile, _)| profile.k() < self.profile.k());
        let service = |(number, drive): (&u32, &std::sync::Arc<_>)| {
            (DriveId(*number), std::sync::Arc::clone(drive) as std::sync::Arc<dyn DriveService>)
        };
        Topology {
            narrow: narrow.flat_map(|(_, groups)| groups).copied().collect(),
            map: self.map.clone(),
            drives: drives.iter().map(service).collect(),
            groups,
            profile,
            limits: Limits::default(),
        }
    }

    pub(crate) fn state(&self, id: DriveId) -> DriveState {
        self.map.drive(id).map_or(DriveState::Out, |drive| drive.state)
    }

    /// Whether writes go on, perhaps narrower, with one drive less.
    fn can_spare_one(&self) -> bool {
        self.profile.narrowed(self.up().len() as u32 - 1).is_some()
    }

    /// Whether the other drives have room for every position of a drive.
    fn can_lose_one(&self) -> bool {
        self.sets.iter().all(|(profile, _)| usize::from(profile.n()) < self.up().len())
    }

    fn set_state(&mut self, id: DriveId, state: DriveState) {
        self.map.epoch.0 += 1;
        self.map.drives[id.0 as usize].state = state;
    }

    /// Assigns the positions of a drive to other drives.
    fn give_up(&mut self, id: DriveId, state: DriveState) {
        self.set_state(id, state);
        let slot = |drive: &DriveId| DriveSlot { drive: *drive, domain: drive.0.into(), weight_bytes: 1 };
        let spare: Vec<DriveSlot> = self.up().iter().map(slot).collect();
        let domains: HashMap<DriveId, u64> =
            self.map.drives.iter().map(|drive| (drive.id, drive.domain)).collect();
        for changed in replace_members(&self.map.groups, &BTreeSet::from([id]), &spare, &domains) {
            let at = changed.id.0 as usize;
            self.map.groups[at] = changed;
        }
    }

    /// Handles the return of a drive as an older copy of itself.
    pub(crate) fn returned_with_gap(&mut self, id: DriveId) {
        self.map.epoch.0 += 1;
        for group in &mut self.map.groups {
            if let Some(next) = group.returned_with_gap(id) {
                *group = next;
            }
        }
    }

    /// Whether a drive returned as an older copy and is not yet compared with the others.
    pub(crate) fn is_behind(&self, id: DriveId) -> bool {
        self.map.groups.iter().flat_map(PlacementGroup::returned).any(|returned| returned == id)
    }

    /// Ends the rebuild of groups whose new members are complete, and retires empty drives. Returns whether there were
    /// any.
    pub(crate) fn finish(&mut self, rebuilt: &HashMap<PgId, Epoch>) -> bool {
        let mut any = false;
        for group in &mut self.map.groups {
            if !group.rebuilding.is_empty() && rebuilt.get(&group.id) == Some(&group.epoch) {
                group.rebuilding.clear();
                any = true;
            }
        }
        let needs = |id: DriveId| {
            self.map.groups.iter().any(|group| {
                group.members.contains(&id) || group.rebuilding.iter().any(|rebuilding| rebuilding.from == id)
            })
        };
        let leaving = self.map.drives.iter().filter(|drive| drive.state == DriveState::Leaving);
        let empty: Vec<DriveId> = leaving.map(|drive| drive.id).filter(|id| !needs(*id)).collect();
        empty.iter().for_each(|id| self.set_state(*id, DriveState::Out));
        self.map.epoch.0 += u64::from(any);
        any || !empty.is_empty()
    }

    /// Whether no group is being rebuilt.
    pub(crate) fn is_whole(&self) -> bool {
        self.map.groups.iter().all(|group| group.rebuilding.is_empty())
    }

    /// Returns drives that were set aside to service. Returns whether there were any.
    pub(crate) fn take_back(&mut self) -> bool {
        let failed = self.map.drives.iter().filter(|drive| drive.state == DriveState::Failed);
        let failed: Vec<DriveId> = failed.map(|drive| drive.id).collect();
        failed.iter().for_each(|id| self.set_state(*id, DriveState::Up));
        !failed.is_empty()
    }

    /// Whether an extent of this shape has the shape of new extents.
    pub(crate) fn fits(&self, (k, n): (u8, u8), is_copies: bool) -> bool {
        let profile = self.profile;
        if is_copies { n == profile.m() + 1 } else { (k, n) == (profile.k(), profile.n()) }
    }
}

/// A change of the cluster.
#[derive(Clone, Copy)]
enum Change {
    SetAside,
    GiveUp,
    Convert,
    MoveFile,
    Detach,
}

/// Changes drives, profile and tiers from time to time, until the future is dropped.
pub(crate) async fn change(world: &World, node: &Node, boot: u64) {
    let dice = world.dice(0xc1_0000 + (boot << 32));
    let scenario = &world.scenario;
    let all = [
        (scenario.narrows, Change::SetAside),
        (scenario.loses, Change::GiveUp),
        (scenario.converts, Change::Convert),
        (scenario.tiers, Change::MoveFile),
        (scenario.detaches && boot + 1 == scenario.boots, Change::Detach),
    ];
    let enabled: Vec<Change> =
        all.iter().filter(|(enabled, _)| *enabled).map(|(_, change)| *change).collect();
    loop {
        tokio::time::sleep(Duration::from_millis(20 + dice.below(2500))).await;
        if !enabled.is_empty() {
            change_once(world, node, &dice, *dice.of(&enabled)).await;
        }
    }
}

async fn change_once(world: &World, node: &Node, dice: &Dice, change: Change) {
    let victim = DriveId(world.scenario.victim());
    let is_up = world.cluster().state(victim) == DriveState::Up;
    match change {
        Change::SetAside if is_up && world.cluster().can_spare_one() => {
            world.trace.event(format_args!("drive {victim} is set aside"));
            world.cluster().set_state(victim, DriveState::Failed);
            node.publish(world);
            tokio::time::sleep(Duration::from_millis(dice.below(20_000))).await;
            if world.cluster().take_back() {
                world.trace.event(format_args!("drive {victim} is used again"));
                node.publish(world);
            }
        }
        Change::GiveUp if is_up && world.cluster().can_lose_one() => {
            let next = *dice.of(&[DriveState::Out, DriveState::Leaving]);
            world.trace.event(format_args!("drive {victim} is given up: {next:?}"));
            world.cluster().give_up(victim, next);
            node.publish(world);
        }
        Change::Convert => {
            let left = world.cluster().up().len() as u8;
            let all = ["r2", "r3", "2+1", "4+2"].map(|text| text.parse::<Profile>());
            let fit: Vec<Profile> = all.into_iter().flatten().filter(|next| next.n() <= left).collect();
            let next = *dice.of(&fit);
            world.trace.event(format_args!("the profile is {next} from now on"));
            world.cluster().profile = next;
            node.publish(world);
        }
        Change::MoveFile => store::move_file(&node.clients[0], dice).await,
        Change::Detach => node.detach(world).await,
        Change::SetAside | Change::GiveUp => {}
    }
}
