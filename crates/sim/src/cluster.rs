//! The cluster's records, as crate `control` keeps them: they survive crashes. While clients work, a drive is set aside for a while
//! or given up, or the filesystem gets another profile.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base::env::{Env, Random};
use base::{DriveId, DriveUuid, Epoch, NodeId, PgId, Seq};
use client::{Limits, Topology};
use control::{
    Balancing, ClusterRecord, Control, ControlError, DriveRecord, FilesystemRecord, NodeRecord, Patience,
    Plan, ScrubRecord, Seen, WriteSet,
};
use layout::{ClusterMap, DriveState, PlacementError, PlacementGroup, Profile, Spread};
use meta::log::{AppendError, Fence, LedgerLog, LogCaps, LogEntry, LogError, MemLog, Tail};
use meta::state::MemState;
use wire::BoxFuture;
use wire::drive::{DriveMark, DriveService};

use crate::net::delay;
use crate::node::{CLUSTER, Drives, Node};
use crate::scenario::Scenario;
use crate::store;
use crate::world::{Dice, World};

/// The filesystem's number.
const FILESYSTEM: u32 = 1;
/// Pause after a change of the cluster that got no answer.
const PAUSE: Duration = Duration::from_millis(200);

/// What the world knows of the cluster: the records after the last change.
pub(crate) struct Cluster {
    now: control::Cluster,
    /// The control ledger's log. Its store is rebuilt from it in every boot.
    log: MemLog,
    /// Map epoch of the last acknowledged change.
    acked: u64,
}

fn nothing() -> control::Cluster {
    control::Cluster::new(ClusterRecord { next_filesystem: FILESYSTEM, ..ClusterRecord::new(CLUSTER) })
}

impl Cluster {
    pub(crate) fn new() -> Self {
        Self { now: nothing(), log: MemLog::new(), acked: 0 }
    }

    pub(crate) fn map(&self) -> ClusterMap {
        self.now.map()
    }

    fn filesystem(&self) -> &FilesystemRecord {
        self.now.filesystems.get(&FILESYSTEM).expect("the first boot made it")
    }

    /// The profile for new data.
    pub(crate) fn profile(&self) -> Profile {
        self.filesystem().profile
    }

    /// A lower bound of a drive's mark; a drive with a lower mark is an older copy.
    pub(crate) fn mark(&self, id: DriveId) -> DriveMark {
        self.now.drives.get(&id).map(|drive| drive.mark).unwrap_or_default()
    }

    pub(crate) fn state(&self, id: DriveId) -> DriveState {
        self.now.drives.get(&id).map_or(DriveState::Out, |drive| drive.state)
    }

    /// The node with a drive.
    pub(crate) fn node_of(&self, id: DriveId) -> NodeId {
        self.now.drives.get(&id).map_or(NodeId(u32::MAX), |drive| drive.node)
    }

    /// The condition of the drives, by their records.
    pub(crate) fn seen(&self) -> Seen {
        let those = |readable: &[DriveState]| -> BTreeSet<DriveId> {
            let drives = self.now.drives.values().filter(|drive| readable.contains(&drive.state));
            drives.map(|drive| drive.id).collect()
        };
        Seen {
            up: those(&[DriveState::Up]),
            readable: those(&[DriveState::Up, DriveState::Leaving]),
            ..Seen::default()
        }
    }

    /// I9: the groups with more members in one failure domain than their rule allows.
    fn crowded(&self) -> Vec<String> {
        let places = self.now.places();
        let is_crowded = |group: &&PlacementGroup| {
            let Spread { level, per_domain } = group.spread;
            let domain = |id: &DriveId| places.get(id).map(|place| place.domain(level, *id));
            let domains: Vec<_> = group.members.iter().map(domain).collect();
            let count = |domain| domains.iter().filter(|other| **other == domain).count();
            let drives: BTreeSet<&DriveId> = group.members.iter().collect();
            drives.len() < group.members.len()
                || domains.iter().any(|domain| domain.is_none() || count(*domain) > per_domain.into())
        };
        let say = |group: &PlacementGroup| {
            format!(
                "I9: at map {} group {} breaks its rule {:?}: {:?}",
                self.now.record.map_epoch, group.id, group.spread, group.members
            )
        };
        self.now.groups.values().filter(is_crowded).map(say).collect()
    }

    /// The topology that clients get.
    pub(crate) fn topology(&self, drives: &Drives, set: WriteSet) -> Topology {
        let record = self.filesystem();
        let narrow = record.all_sets().filter(|(profile, _)| profile.k() < record.profile.k());
        let service =
            |(number, drive): (&u32, &Arc<_>)| (DriveId(*number), Arc::clone(drive) as Arc<dyn DriveService>);
        Topology {
            narrow: narrow.flat_map(|(_, groups)| groups).copied().collect(),
            map: self.map(),
            drives: drives.iter().map(service).collect(),
            groups: set.groups,
            profile: set.profile,
            limits: Limits::default(),
            near: Default::default(),
            nodes: record.nodes.clone(),
        }
    }

    fn has(&self, id: DriveId) -> bool {
        self.now.drives.contains_key(&id)
    }

    /// The drive that comes later, in a node of its own.
    fn newcomer(&self, scenario: &Scenario) -> DriveRecord {
        drive_record(scenario.drives, NodeId(scenario.drives))
    }

    /// Whether the filesystem may use the drive that comes later.
    fn may_use_newcomer(&self, scenario: &Scenario) -> bool {
        self.filesystem().may_use(NodeId(scenario.drives))
    }

    /// Whether data of the filesystem may be on a drive.
    pub(crate) fn may_use(&self, id: DriveId) -> bool {
        self.filesystem().may_use(self.node_of(id))
    }

    /// The drives to which new data of the filesystem may go.
    fn usable_up(&self) -> BTreeSet<DriveId> {
        self.now.usable_by(self.filesystem(), &self.seen().up)
    }

    /// The nodes for which the filesystem may be next: all but one, or all if some are left out now.
    fn other_nodes(&self, dice: &Dice) -> BTreeSet<NodeId> {
        if !self.filesystem().nodes.is_empty() {
            return BTreeSet::new();
        }
        let staying = self.now.drives.values().filter(|drive| !drive.is_given_up());
        let mut nodes: BTreeSet<NodeId> = staying.map(|drive| drive.node).collect();
        let all: Vec<NodeId> = nodes.iter().copied().collect();
        nodes.remove(dice.of(&all));
        nodes
    }

    /// Whether writes go on, perhaps narrower, without a drive.
    fn can_spare(&self, id: DriveId) -> bool {
        self.now.write_profile(self.filesystem(), &self.seen().without(id).up).is_some()
    }

    /// Whether the other drives have room for every position of a drive.
    fn can_lose(&self, id: DriveId) -> bool {
        self.now.replaceable(id, &self.seen()) == self.now.groups_with(id)
    }

    /// Whether a drive returned as an older copy and is not yet compared with the others.
    pub(crate) fn is_behind(&self, id: DriveId) -> bool {
        self.now.behind().contains(&id)
    }

    /// The groups that are being rebuilt.
    pub(crate) fn rebuilding(&self) -> Vec<&PlacementGroup> {
        self.now.groups.values().filter(|group| !group.rebuilding.is_empty()).collect()
    }

    /// Whether an extent of this shape has the shape of new extents.
    pub(crate) fn fits(&self, (k, n): (u8, u8), is_copies: bool) -> bool {
        let profile = self.profile();
        if is_copies { n == profile.m() + 1 } else { (k, n) == (profile.k(), profile.n()) }
    }
}

/// The log of the control ledger: it has latency, and loses requests and answers.
struct ControlLog {
    world: Arc<World>,
    inner: MemLog,
    dice: Dice,
    losses: Dice,
}

impl ControlLog {
    fn loses(&self) -> bool {
        self.world.scenario.log_loses && self.losses.once_in(8)
    }
}

impl LedgerLog for ControlLog {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        self.inner.seal(epoch, nonce)
    }

    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        self.inner.fence()
    }

    fn append(
        &self,
        epoch: Epoch,
        first: Seq,
        batches: Vec<Vec<u8>>,
    ) -> BoxFuture<'_, Result<(), AppendError>> {
        Box::pin(async move {
            let unanswered = || AppendError::Unknown(std::io::ErrorKind::TimedOut.into());
            tokio::time::sleep(delay(&self.dice)).await;
            if self.loses() {
                return Err(unanswered());
            }
            self.world.trace.event(format_args!("control append epoch={epoch} seq={first}"));
            self.inner.append(epoch, first, batches).await?;
            tokio::time::sleep(delay(&self.dice)).await;
            if self.loses() { Err(unanswered()) } else { Ok(()) }
        })
    }

    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
        self.inner.read(from, limit_bytes)
    }

    fn trim(&self, up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
        self.inner.trim(up_to)
    }

    fn caps(&self) -> LogCaps {
        self.inner.caps()
    }
}

/// The control ledger of a boot.
pub(crate) struct ControlNode {
    control: Control,
    dice: Dice,
    /// Writes wait for drives that are away for a moment.
    is_patient: AtomicBool,
}

/// The same number always.
struct Numbered(u64);

impl Random for Numbered {
    fn fill(&self, bytes: &mut [u8]) {
        let number = self.0.to_le_bytes();
        bytes.iter_mut().zip(number.iter().cycle()).for_each(|(byte, part)| *byte = *part);
    }
}

impl ControlNode {
    /// Opens the ledger. The first one makes the cluster.
    ///
    /// # Errors
    /// Why it cannot be opened, or what it has lost.
    pub(crate) async fn open(world: &Arc<World>, boot: u64) -> Result<Self, String> {
        let (inner, acked) = {
            let cluster = world.cluster();
            (cluster.log.clone(), cluster.acked)
        };
        let dice = |part: u64| world.dice(part + (boot << 32));
        let log = ControlLog { world: world.clone(), inner, dice: dice(0xc0_1060), losses: dice(0xc0_1057) };
        let state = Arc::new(MemState::default());
        // Numbers of its own: what the node draws stays the same for a seed.
        let env = Env { random: Arc::new(Numbered(boot + 1)), ..world.env() };
        let control =
            Control::open(&env, Arc::new(log), state, None).await.map_err(|error| error.to_string())?;
        let node = Self { control, dice: dice(0xc0_d1ce), is_patient: AtomicBool::new(false) };
        let found = node.control.view().and_then(|view| control::Cluster::of(&view));
        match found {
            Ok(found) if found.record.map_epoch < acked => {
                let found = found.record.map_epoch;
                return Err(format!("I2: the control ledger has map {found} and acknowledged {acked}"));
            }
            Ok(found) => world.cluster().now = found,
            Err(ControlError::NoCluster) if acked == 0 => node.create(world).await,
            Err(error) => return Err(error.to_string()),
        }
        Ok(node)
    }

    async fn create(&self, world: &World) {
        let Scenario { drives, node_drives, profile, .. } = world.scenario;
        let seed = self.dice.below(u64::MAX);
        loop {
            let Ok(view) = self.control.view() else { return };
            let mut plan = Plan::new(nothing());
            for number in 0..drives {
                let node = NodeId(number / node_drives);
                let name = format!("node-{node}");
                plan.set_node(NodeRecord::new(node, name));
                plan.set_drive(drive_record(number, node));
            }
            plan.set_cluster(|cluster| cluster.next_drive = drives);
            let record = FilesystemRecord {
                name: "main".to_owned(),
                ..FilesystemRecord::new(plan.next_filesystem(), profile)
            };
            let up = (0..drives).map(DriveId).collect();
            plan.add_filesystem(record, &up, seed).expect("there are as many drives as the profile needs");
            let committed = self.control.commit(plan.change(&view)).await;
            if committed.is_ok() || matches!(committed, Err(ControlError::Conflict)) {
                world.cluster().now = plan.into_next();
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Decides a plan and carries it out, again and again until the ledger answers.
    pub(crate) async fn plan<T>(&self, world: &World, mut decide: impl FnMut(&mut Plan) -> T) -> T {
        loop {
            let planned = self.control.plan(|plan| Ok::<_, ControlError>(decide(plan))).await;
            match planned {
                Ok(decided) => {
                    let now = self.control.view().and_then(|view| control::Cluster::of(&view));
                    let now = now.expect("the store is memory");
                    let mut cluster = world.cluster();
                    cluster.acked = now.record.map_epoch;
                    cluster.now = now;
                    return decided;
                }
                Err(error) => {
                    world.trace.event(format_args!("control: {error}"));
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    async fn set_state(&self, world: &World, id: DriveId, state: DriveState) {
        self.plan(world, |plan| plan.set_drive_state(id, state)).await;
    }

    /// Profile and groups of new extents.
    pub(crate) async fn write_set(&self, world: &World) -> WriteSet {
        let seed = self.dice.below(u64::MAX);
        let seen = world.cluster().seen();
        let patience = if self.is_patient.load(Ordering::Relaxed) { Patience::Left } else { Patience::Over };
        let decide = |plan: &mut Plan| -> Result<WriteSet, PlacementError> {
            let record = plan.next().filesystems.get(&FILESYSTEM).expect("the first boot made it").clone();
            plan.write_set(record, &seen, patience, seed)
        };
        let set = self.plan(world, decide).await.expect("enough drives are left");
        let crowded = world.cluster().crowded();
        crowded.into_iter().for_each(|what| world.promises().violate(what));
        set
    }

    /// Notes the marks of the drives, and that a drive returned as an older copy of itself.
    pub(crate) async fn note_marks(&self, world: &World, drives: &Drives, behind: Option<DriveId>) {
        let marks: Vec<(DriveId, DriveMark)> =
            drives.iter().map(|(number, drive)| (DriveId(*number), drive.stat().mark)).collect();
        let mut is_noted = false;
        self.plan(world, |plan| {
            // Without an answer, it may be noted already.
            if let Some(behind) = behind.filter(|_| !is_noted) {
                plan.returned_with_gap(behind);
                is_noted = true;
            }
            for (id, mark) in &marks {
                let record = plan.next().drives.get(id).filter(|record| record.mark != *mark).cloned();
                record.into_iter().for_each(|record| plan.set_drive(DriveRecord { mark: *mark, ..record }));
            }
        })
        .await;
    }

    /// Returns drives that were set aside to service. Returns whether there were any.
    pub(crate) async fn take_back(&self, world: &World) -> bool {
        let set_aside = |plan: &Plan| -> Vec<DriveId> {
            let failed = plan.next().drives.values().filter(|drive| drive.state == DriveState::Failed);
            failed.map(|drive| drive.id).collect()
        };
        let mut any = false;
        self.plan(world, |plan| {
            for id in set_aside(plan) {
                any = true;
                plan.set_drive_state(id, DriveState::Up);
            }
        })
        .await;
        any
    }

    /// Ends the rebuild of groups whose new members are complete, and retires empty drives. Returns whether there were
    /// any.
    pub(crate) async fn finish(&self, world: &World, rebuilt: &HashMap<PgId, Epoch>) -> bool {
        let is_rebuilt = |group: &PlacementGroup| rebuilt.get(&group.id) == Some(&group.epoch);
        let finished = self.plan(world, |plan| plan.finish(is_rebuilt)).await;
        finished.groups > 0 || !finished.empty.is_empty()
    }
}

fn drive_record(number: u32, node: NodeId) -> DriveRecord {
    DriveRecord {
        id: DriveId(number),
        uuid: DriveUuid([number as u8; 16]),
        node,
        capacity_bytes: 1,
        state: DriveState::Up,
        scrub: ScrubRecord::default(),
        mark: DriveMark::default(),
        may_know_lost: false,
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
    Grow,
    Replace,
    Balance,
    Limit,
    KeepAfterAll,
}

/// Changes drives, profile and tiers from time to time, until the future is dropped.
pub(crate) async fn change(world: &World, node: &Node, boot: u64) {
    let dice = world.dice(0xc1_0000 + (boot << 32));
    let scenario = &world.scenario;
    let all = [
        (scenario.narrows, Change::SetAside),
        (scenario.loses, Change::GiveUp),
        (scenario.loses, Change::KeepAfterAll),
        (scenario.converts, Change::Convert),
        (scenario.tiers, Change::MoveFile),
        (scenario.detaches && boot + 1 == scenario.boots, Change::Detach),
        (scenario.grows, Change::Grow),
        (scenario.grows && scenario.loses, Change::Replace),
        (scenario.grows || scenario.loses, Change::Balance),
        (scenario.limits, Change::Limit),
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
        Change::SetAside if is_up && world.cluster().can_spare(victim) => {
            world.trace.event(format_args!("drive {victim} is set aside"));
            let control = &node.control;
            control.is_patient.store(dice.once_in(3), Ordering::Relaxed);
            control.set_state(world, victim, DriveState::Failed).await;
            node.publish(world).await;
            tokio::time::sleep(Duration::from_millis(dice.below(20_000))).await;
            control.is_patient.store(false, Ordering::Relaxed);
            if control.take_back(world).await {
                world.trace.event(format_args!("drive {victim} is used again"));
                node.publish(world).await;
            }
        }
        Change::GiveUp if is_up && world.cluster().can_lose(victim) => {
            let mut seen = world.cluster().seen();
            seen.up.remove(&victim);
            if dice.once_in(2) {
                seen.readable.remove(&victim);
            }
            let readable = seen.readable.contains(&victim);
            world.trace.event(format_args!("drive {victim} is given up, readable={readable}"));
            if readable && world.scenario.node_drives == 1 {
                return drain(world, node, dice, &seen).await;
            }
            node.control.plan(world, |plan| plan.give_up(victim, &seen)).await;
            node.publish(world).await;
        }
        Change::Convert => {
            let up = world.cluster().usable_up();
            let left = up.len() as u8;
            let all = ["r2", "r3", "2+1", "4+2"].map(|text| text.parse::<Profile>());
            let fit: Vec<Profile> = all.into_iter().flatten().filter(|next| next.n() <= left).collect();
            let next = *dice.of(&fit);
            world.trace.event(format_args!("the profile is {next} from now on"));
            let seed = dice.below(u64::MAX);
            let decide = |plan: &mut Plan| -> Result<(), PlacementError> {
                let record =
                    plan.next().filesystems.get(&FILESYSTEM).expect("the first boot made it").clone();
                plan.set_profile(record, next, &up, seed)
            };
            node.control.plan(world, decide).await.expect("enough drives are left");
            node.publish(world).await;
        }
        Change::MoveFile => store::move_file(&node.clients[0], dice).await,
        Change::Detach => node.detach(world).await,
        Change::Grow | Change::Replace | Change::Balance | Change::Limit => {
            place_anew(world, node, dice, change).await;
        }
        Change::KeepAfterAll => {
            cancel_drain(world, node).await;
        }
        Change::SetAside | Change::GiveUp => {}
    }
}

/// The victim's node is emptied, of which it is the only drive. In half of the cases that is ended soon, and what is moving goes back.
async fn drain(world: &World, node: &Node, dice: &Dice, seen: &Seen) {
    let place = world.cluster().node_of(DriveId(world.scenario.victim()));
    node.control.plan(world, |plan| plan.drain(place, seen)).await;
    node.publish(world).await;
    if dice.once_in(2) {
        tokio::time::sleep(Duration::from_millis(dice.below(400))).await;
        cancel_drain(world, node).await;
    }
}

/// The drives of the victim's node are in use again, if they were being emptied.
async fn cancel_drain(world: &World, node: &Node) {
    let place = world.cluster().node_of(DriveId(world.scenario.victim()));
    let seen = world.cluster().seen();
    let back = node.control.plan(world, |plan| plan.cancel_drain(place, &seen)).await;
    if !back.is_empty() {
        world.trace.event(format_args!("drives {back:?} are not emptied after all"));
        node.publish(world).await;
    }
}

/// Another drive comes, or data moves to its share.
async fn place_anew(world: &World, node: &Node, dice: &Dice, change: Change) {
    let (victim, newcomer) = (DriveId(world.scenario.victim()), world.scenario.drives);
    let is_up = world.cluster().state(victim) == DriveState::Up;
    let is_new = !world.cluster().has(DriveId(newcomer));
    match change {
        Change::Grow if is_new => {
            world.trace.event(format_args!("drive {newcomer} is added"));
            let (seen, seed) = (world.cluster().seen(), dice.below(u64::MAX));
            let decide =
                |plan: &mut Plan| plan.add_drive(world.cluster().newcomer(&world.scenario), &seen, seed);
            node.control.plan(world, decide).await.expect("there are more drives than before");
            node.publish(world).await;
            if dice.once_in(2) {
                balance(world, node, dice).await;
            }
        }
        Change::Replace if is_new && is_up && world.cluster().may_use_newcomer(&world.scenario) => {
            world.trace.event(format_args!("drive {newcomer} replaces drive {victim}"));
            let mut seen = world.cluster().seen();
            if dice.once_in(2) {
                seen.readable.remove(&victim);
            }
            let new = world.cluster().newcomer(&world.scenario);
            node.control.plan(world, |plan| plan.replace(victim, new.clone(), &seen)).await;
            node.publish(world).await;
        }
        Change::Balance => balance(world, node, dice).await,
        Change::Limit => limit(world, node, dice).await,
        _ => {}
    }
}

/// The filesystem is for all nodes but one from now on, if the others suffice, or for all again.
async fn limit(world: &World, node: &Node, dice: &Dice) {
    let nodes = world.cluster().other_nodes(dice);
    let seen = world.cluster().seen();
    let seed = dice.below(u64::MAX);
    let decide = |plan: &mut Plan| {
        let record = plan.next().filesystems.get(&FILESYSTEM).expect("the first boot made it").clone();
        plan.set_nodes(record, nodes.clone(), &seen, seed)
    };
    if node.control.plan(world, decide).await.is_ok() {
        world.trace.event(format_args!("the filesystem is for nodes {nodes:?}"));
        node.publish(world).await;
        balance(world, node, dice).await;
    }
}

/// Goes on to move data to the nodes that are for the filesystem. Returns whether something is left to do.
pub(crate) async fn move_home(world: &World, node: &Node) -> bool {
    let seen = world.cluster().seen();
    let decide = |plan: &mut Plan| {
        let record = plan.next().filesystems.get(&FILESYSTEM).expect("the first boot made it").clone();
        plan.balance(FilesystemRecord { balancing: true, ..record }, &seen, usize::MAX)
    };
    if world.cluster().filesystem().nodes.is_empty()
        || node.control.plan(world, decide).await == Balancing::Done
    {
        return false;
    }
    node.publish(world).await;
    true
}

/// What is left at nodes that are not for the filesystem.
pub(crate) fn left_elsewhere(world: &World) -> Option<String> {
    let cluster = world.cluster();
    // Groups of former profiles may not fit there. They have no data by then.
    let record = FilesystemRecord { sets: Vec::new(), ..cluster.filesystem().clone() };
    let groups = cluster.now.groups_elsewhere(&record);
    (groups > 0).then(|| {
        format!("{groups} groups have data at nodes that are not for the filesystem: {:?}", record.nodes)
    })
}

/// Data moves to its share. In half of the cases that is aborted soon, and what is moving goes back.
async fn balance(world: &World, node: &Node, dice: &Dice) {
    let seen = world.cluster().seen();
    let groups_max = 1 + dice.below(40) as usize;
    let record = |plan: &Plan| {
        let record = plan.next().filesystems.get(&FILESYSTEM).expect("the first boot made it").clone();
        FilesystemRecord { balancing: true, ..record }
    };
    let decide = |plan: &mut Plan| plan.balance(record(plan), &seen, groups_max);
    let Balancing::Moves { groups, .. } = node.control.plan(world, decide).await else { return };
    world.trace.event(format_args!("positions of {groups} groups move"));
    node.publish(world).await;
    if dice.once_in(2) {
        return;
    }
    tokio::time::sleep(Duration::from_millis(dice.below(400))).await;
    let (seen, rebuilt) = (world.cluster().seen(), node.rebuilt());
    let is_rebuilt = |group: &PlacementGroup| rebuilt.get(&group.id) == Some(&group.epoch);
    let decide = |plan: &mut Plan| plan.abort_balance(record(plan), &seen, is_rebuilt);
    let back = node.control.plan(world, decide).await;
    if back > 0 {
        world.trace.event(format_args!("positions of {back} groups go back"));
        node.publish(world).await;
    }
}
