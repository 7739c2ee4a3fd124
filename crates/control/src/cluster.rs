//! Drives, placement groups and filesystems at one moment, and a plan: what they should be next.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use base::{DriveId, Epoch, NodeId, PgId};
use layout::{
    ClusterMap, DriveSlot, DriveState, MapDrive, Place, PlacementError, PlacementGroup, Profile, Spread,
    plan_placement_groups, suggested_pg_count,
};

use crate::{
    ClientRecord, ClusterRecord, Control, ControlChange, ControlError, ControlView, DriveRecord,
    FilesystemRecord, NodeRecord, TokenRecord,
};

/// Groups per position when each group has all drives.
const ORDERS: u32 = 8;
/// The nodes that may own ledgers, or run a member of an engine.
pub const SEATS: usize = 3;
/// Attempts to decide anew after another change came first.
const ATTEMPTS: u32 = 5;

/// What the cluster should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    /// Its record.
    pub record: ClusterRecord,
    /// Every node.
    pub nodes: BTreeMap<NodeId, NodeRecord>,
    /// Every token.
    pub tokens: BTreeMap<u32, TokenRecord>,
    /// Every client that is no node.
    pub clients: BTreeMap<u32, ClientRecord>,
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
        let nodes = view.nodes()?.into_iter().map(|node| (node.id, node));
        let tokens = view.tokens()?.into_iter().map(|token| (token.id, token));
        let clients = view.clients()?.into_iter().map(|client| (client.id, client));
        let drives = view.drives()?.into_iter().map(|drive| (drive.id, drive));
        let groups = view.groups()?.into_iter().map(|group| (group.id, group));
        let filesystems = view.filesystems()?.into_iter().map(|record| (record.id, record));
        Ok(Self {
            record: view.cluster()?,
            nodes: nodes.collect(),
            tokens: tokens.collect(),
            clients: clients.collect(),
            drives: drives.collect(),
            groups: groups.collect(),
            filesystems: filesystems.collect(),
        })
    }

    /// A cluster that has nothing.
    pub fn new(record: ClusterRecord) -> Self {
        Self {
            record,
            nodes: BTreeMap::new(),
            tokens: BTreeMap::new(),
            clients: BTreeMap::new(),
            drives: BTreeMap::new(),
            groups: BTreeMap::new(),
            filesystems: BTreeMap::new(),
        }
    }

    /// The map for clients: drives and placement groups.
    pub fn map(&self) -> ClusterMap {
        let places = self.places();
        ClusterMap {
            epoch: Epoch(self.record.map_epoch),
            drives: self.drives.values().map(|drive| drive.in_map(places[&drive.id])).collect(),
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

    /// The zone, rack and node of each drive.
    pub fn places(&self) -> HashMap<DriveId, Place> {
        let places = self.node_places();
        let place = |drive: &DriveRecord| {
            let elsewhere = Place { node: drive.node.0, ..Place::default() };
            places.get(&drive.node).copied().unwrap_or(elsewhere)
        };
        self.drives.values().map(|drive| (drive.id, place(drive))).collect()
    }

    /// The zone, rack and number of each node. Zones and racks are numbered anew whenever there is another one.
    pub fn node_places(&self) -> BTreeMap<NodeId, Place> {
        let zones: BTreeSet<&str> = self.nodes.values().map(|node| node.zone.as_str()).collect();
        let racks: BTreeSet<(&str, &str)> = self.nodes.values().map(NodeRecord::rack).collect();
        let number = |at: usize| at as u32;
        let zones: HashMap<&str, u32> =
            zones.into_iter().enumerate().map(|(at, zone)| (zone, number(at))).collect();
        let racks: HashMap<_, u32> =
            racks.into_iter().enumerate().map(|(at, rack)| (rack, number(at))).collect();
        let place = |node: &NodeRecord| {
            let (zone, rack) = (zones[node.zone.as_str()], racks[&node.rack()]);
            (node.id, Place { zone, rack, node: node.id.0 })
        };
        self.nodes.values().map(place).collect()
    }

    /// Weight and place of these drives.
    pub(crate) fn slots(&self, drives: &BTreeSet<DriveId>) -> Vec<DriveSlot> {
        let places = self.places();
        let known = drives.iter().filter_map(|id| self.drives.get(id));
        known.map(|drive| drive.slot(places[&drive.id])).collect()
    }

    /// Weight and place of those of these drives that a filesystem may use.
    pub(crate) fn slots_for(&self, record: &FilesystemRecord, drives: &BTreeSet<DriveId>) -> Vec<DriveSlot> {
        self.slots(&self.usable_by(record, drives))
    }

    /// Those of these drives that are at nodes of a filesystem.
    pub fn usable_by(&self, record: &FilesystemRecord, drives: &BTreeSet<DriveId>) -> BTreeSet<DriveId> {
        let known = drives.iter().filter_map(|id| self.drives.get(id));
        known.filter(|drive| record.may_use(drive.node)).map(|drive| drive.id).collect()
    }

    /// The nodes that run a member of an engine of Forebay's own: the first ones. Witnesses come after all others.
    pub fn seats(&self) -> Vec<NodeId> {
        let (witnesses, others): (Vec<&NodeRecord>, Vec<&NodeRecord>) =
            self.nodes.values().partition(|node| node.witness);
        others.into_iter().chain(witnesses).map(|node| node.id).take(SEATS).collect()
    }

    /// Whether a node may own ledgers.
    pub fn may_own(&self, node: NodeId) -> bool {
        let is_witness = self.nodes.get(&node).is_none_or(|node| node.witness);
        !is_witness && self.seats().contains(&node)
    }

    /// The drives that are not given up.
    pub(crate) fn staying(&self) -> BTreeSet<DriveId> {
        self.drives.values().filter(|drive| !drive.is_given_up()).map(|drive| drive.id).collect()
    }

    /// The rule by which the shards of a filesystem are spread.
    ///
    /// # Errors
    /// If the drives that are not given up are too few for it.
    pub(crate) fn rule(&self, record: &FilesystemRecord) -> Result<Spread, PlacementError> {
        let slots = self.slots_for(record, &self.staying());
        match record.level {
            Some(level) => Spread::choose(&slots, record.profile, level),
            None => Spread::automatic(&slots, record.profile),
        }
    }

    /// The rule while the drives may be too few: that of the groups that there are.
    pub(crate) fn rule_or_last(&self, record: &FilesystemRecord) -> Spread {
        let last = || self.groups_of(&record.groups).map(|group| group.spread).last();
        self.rule(record).ok().or_else(last).unwrap_or_default()
    }

    /// All groups of a filesystem, those of other profiles too.
    pub(crate) fn groups_for<'a>(
        &'a self,
        record: &'a FilesystemRecord,
    ) -> impl Iterator<Item = &'a PlacementGroup> {
        record.all_sets().flat_map(|(_, groups)| self.groups_of(groups))
    }

    /// The groups of a list that there are.
    pub(crate) fn groups_of<'a>(&'a self, groups: &'a [PgId]) -> impl Iterator<Item = &'a PlacementGroup> {
        groups.iter().filter_map(|pg| self.groups.get(pg))
    }
}

/// The cluster as it should be next, and the records that differ.
pub struct Plan {
    next: Cluster,
    nodes: BTreeSet<NodeId>,
    tokens: BTreeSet<u32>,
    clients: BTreeSet<u32>,
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
            nodes: BTreeSet::new(),
            tokens: BTreeSet::new(),
            clients: BTreeSet::new(),
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
        let Self { nodes, tokens, clients, drives, groups, filesystems, .. } = self;
        !self.cluster_changed
            && nodes.is_empty()
            && tokens.is_empty()
            && clients.is_empty()
            && drives.is_empty()
            && groups.is_empty()
            && filesystems.is_empty()
    }

    /// The changes of records. `view` is the one from which the plan was made.
    pub fn change(&self, view: &ControlView) -> ControlChange {
        let mut change = view.change();
        if self.cluster_changed {
            change.cluster(&self.next.record);
        }
        for id in &self.nodes {
            match self.next.nodes.get(id) {
                Some(node) => change.node(node),
                None => change.remove_node(*id),
            };
        }
        for id in &self.tokens {
            match self.next.tokens.get(id) {
                Some(token) => change.token(token),
                None => change.remove_token(*id),
            };
        }
        for id in &self.clients {
            match self.next.clients.get(id) {
                Some(client) => change.client(client),
                None => change.remove_client(*id),
            };
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

    /// Adds or changes a node. Nothing moves because its place is another.
    pub fn set_node(&mut self, node: NodeRecord) {
        self.touch_map();
        self.nodes.insert(node.id);
        self.next.nodes.insert(node.id, node);
    }

    /// Removes a node that has no drives in use. Returns whether it has none.
    pub fn remove_node(&mut self, id: NodeId) -> bool {
        let has_drives =
            self.next.drives.values().any(|drive| drive.node == id && drive.state != DriveState::Out);
        if !has_drives && self.next.nodes.remove(&id).is_some() {
            self.touch_map();
            self.nodes.insert(id);
        }
        !has_drives
    }

    /// Adds or changes a client.
    pub(crate) fn set_client(&mut self, client: ClientRecord) {
        self.clients.insert(client.id);
        self.next.clients.insert(client.id, client);
    }

    /// Removes a client. Returns whether there was one.
    pub fn remove_client(&mut self, id: u32) -> bool {
        let was_there = self.next.clients.remove(&id).is_some();
        if was_there {
            self.clients.insert(id);
        }
        was_there
    }

    /// Adds or changes a token.
    pub fn set_token(&mut self, token: TokenRecord) {
        self.tokens.insert(token.id);
        self.next.tokens.insert(token.id, token);
    }

    /// Removes a token. Returns whether there was one.
    pub fn remove_token(&mut self, id: u32) -> bool {
        let was_there = self.next.tokens.remove(&id).is_some();
        if was_there {
            self.tokens.insert(id);
        }
        was_there
    }

    /// The number for a new token.
    pub fn next_token(&mut self) -> u32 {
        let id = self.next.record.next_token;
        self.set_cluster(|cluster| cluster.next_token += 1);
        id
    }

    /// The number for a new node.
    pub fn next_node(&mut self) -> NodeId {
        let id = NodeId(self.next.record.next_node);
        self.set_cluster(|cluster| cluster.next_node += 1);
        id
    }

    /// Adds or changes a drive.
    pub fn set_drive(&mut self, drive: DriveRecord) {
        let in_map = |drive: &DriveRecord| (drive.uuid, drive.node, drive.state);
        if self.next.drives.get(&drive.id).map(in_map) != Some(in_map(&drive)) {
            self.touch_map();
        }
        self.drives.insert(drive.id);
        self.next.drives.insert(drive.id, drive);
        self.note_capacity(|whole_bytes| whole_bytes);
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
        (profile, rule): (Profile, Spread),
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
        let groups = plan_placement_groups(&slots, profile, rule, count, seed)?;
        let first = self.next.record.next_group;
        self.set_cluster(|cluster| cluster.next_group += groups.len() as u32);
        let ids: Vec<PgId> = (first..).take(groups.len()).map(PgId).collect();
        self.touch_map();
        let planned = Epoch(self.next.record.map_epoch);
        for (id, group) in ids.iter().zip(groups) {
            self.set_group(PlacementGroup { id: *id, planned, ..group });
        }
        Ok(ids)
    }
}

impl Control {
    /// Decides a plan from the newest records and commits it, if it changes anything. Returns what was decided. If another change
    /// comes first, it is decided anew. The caller takes the records over if [`Control::seq`] is new: also after an empty plan, because
    /// somebody who stopped waiting may have left that to others.
    ///
    /// # Errors
    /// Those of `decide` and of [`Control::commit`].
    pub async fn plan<T, E: From<ControlError>>(
        &self,
        mut decide: impl FnMut(&mut Plan) -> Result<T, E>,
    ) -> Result<T, E> {
        self.catch_up().await?;
        let mut attempt = 1;
        loop {
            let view = self.view()?;
            let mut plan = Plan::new(Cluster::of(&view)?);
            let decided = decide(&mut plan)?;
            if plan.is_empty() {
                return Ok(decided);
            }
            match self.commit(plan.change(&view)).await {
                Ok(()) => return Ok(decided),
                Err(ControlError::Conflict) if attempt < ATTEMPTS => attempt += 1,
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl DriveRecord {
    /// The drive as clients see it.
    fn in_map(&self, place: Place) -> MapDrive {
        MapDrive { id: self.id, uuid: self.uuid, place, state: self.state }
    }

    /// Weight and place for placing shards.
    fn slot(&self, place: Place) -> DriveSlot {
        DriveSlot { drive: self.id, place, weight_bytes: self.capacity_bytes }
    }

    /// Whether others take over the drive's positions.
    pub fn is_given_up(&self) -> bool {
        matches!(self.state, DriveState::Out | DriveState::Leaving)
    }
}

impl FilesystemRecord {
    /// Whether data of the filesystem may go to drives of a node.
    pub fn may_use(&self, node: NodeId) -> bool {
        self.nodes.is_empty() || self.nodes.contains(&node)
    }
}

impl NodeRecord {
    /// Its rack, with the zone: racks of two zones may have one name.
    pub(crate) fn rack(&self) -> (&str, &str) {
        (&self.zone, &self.rack)
    }
}
