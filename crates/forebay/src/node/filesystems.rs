//! The node's filesystems: ledger, owner, client, mount and background work of each.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use admin::{FilesystemInfo, LedgerInfo, OrphanInfo, PackInfo, RepairInfo};
use anyhow::{Context, Result};
use base::env::Env;
use base::{ClusterId, DriveId, LedgerId, NodeId, PgId};
use bytes::Bytes;
use client::{Client, ClientOptions, FsStat, Limits, Near, OwedEntry, Peers, Reach, Topology, only_owner};
use control::{Cluster, FilesystemRecord, WriteSet};
use layout::{ClusterMap, FailureDomain, Place, shard_len};
use meta::history::Older;
use meta::log::Vacancy;
use meta::owner::{EarlierSessions, Owner, OwnerOptions, OwnerStat};
use posix::fuse::UnmountMode;
use tokio::runtime::Handle;
use tokio::sync::watch;
use upkeep::{
    DamageKeeper, OrphanCollector, OrphanOptions, Pace, PackOptions, PackWait, Packer, Reclaimer, Repairer,
    UsedGroups, Verifier,
};
use wire::cluster::NodeAddresses;
use wire::drive::DriveStat;
use wire::meta::MetaService;
use wire::position::Position;
use wire::replica::STANDBY_WAIT_MAX;
use wire::tier::TierStat;
use wire::view::FilesystemView;

use super::damage::damage_info;
use super::drives::DriveEntry;
use super::helpers::Helpers;
use super::history::Knowledge;
use super::ledgers::{LedgerFiles, MetaDirs};
use super::limits::{limits_of, placement_of};
use super::memory::MemoryPlan;
use super::mounted::{Broken, Mounted};
use super::plans::seen;
use super::tiers::TierEntry;
use super::verification::verify_options;
use super::{Mounts, Network, NodeDir};
use crate::mount::MountProcess;

/// Limit of counting owed shards for `status`.
const OWED_COUNTED_MAX: usize = 100_000;
/// An extent that was placed earlier than this before a scan of the maps is in it, or never will be.
const LATE_WRITES_NS: u64 = 60_000_000_000;
/// How long a start waits for the paths of unreadable files.
const DAMAGE_PATIENCE: Duration = Duration::from_secs(2);
/// How long a request through S3 waits for drives whose machines are not reached.
const S3_DRIVE_PATIENCE: Duration = Duration::from_secs(20);
/// Deadline for writing out when the node stops.
const CLOSE_DEADLINE: Duration = Duration::from_secs(8);

/// An orphan search waits at least this long after a range is closed, so that no write to a drive is still under way:
/// twice the deadline of such a write.
const SETTLE_MIN: Duration = Duration::from_secs(20);

/// Divisor of the waits of packing, of the search for orphans and after a takeover; above 1 in tests only.
pub(super) fn haste() -> u32 {
    let haste = std::env::var("FOREBAY_HASTE").ok().and_then(|text| text.parse().ok());
    haste.filter(|haste| *haste > 0).unwrap_or(1)
}

/// A filesystem that is served.
pub(super) struct FilesystemEntry {
    pub(super) record: FilesystemRecord,
    pub(super) files: LedgerFiles,
    pub(super) owner: Arc<Owner>,
    pub(super) client: Client,
    place: OwnerPlace,
    topology: watch::Sender<Arc<Topology>>,
    /// Profile and groups of new extents now.
    pub(super) write_set: WriteSet,
    /// The boot time until which new extents could get groups that are not those of the profile.
    pub(super) others_written_ns: u64,
    reclaimer: Reclaimer,
    pub(super) repairer: Repairer,
    pub(super) damage: DamageKeeper,
    packer: Packer,
    orphans: OrphanCollector,
    pub(super) verifier: Verifier,
    /// Groups of which data moves later, if the filesystem is being balanced and that is known.
    pub(super) balance_left: Option<usize>,
    /// The object store.
    pub(super) tier: TierEntry,
    peers: Peers,
    pub(super) mount: Option<Mounted>,
    /// Somebody unmounts it now.
    pub(super) is_unmounting: bool,
    /// The mount, if its process has ended.
    pub(super) broken: Option<Broken>,
    /// What clients in other processes must know.
    pub(super) view: watch::Sender<Arc<FilesystemView>>,
}

/// The way to the owner of a filesystem's ledger.
pub(super) struct Asker {
    client: Client,
    owner: Arc<Owner>,
    has_tier: bool,
}

/// What the owner of a filesystem's ledger said.
pub(super) struct Told {
    pub(super) stat: FsStat,
    /// Shards that are owed, up to a limit.
    pub(super) owed: Vec<OwedEntry>,
    /// Sums of tiering, if there is a store.
    pub(super) tier: Option<TierStat>,
}

impl Asker {
    /// Asks for everything that `status` shows. A halted ledger does not answer: zeros are shown with that state.
    pub(super) async fn ask(&self) -> Result<Told> {
        if self.owner.stat().halted {
            let stat = FsStat { total_bytes: 0, free_bytes: 0, used_bytes: 0, drive_bytes: 0, inodes: 0 };
            return Ok(Told { stat, owed: Vec::new(), tier: self.has_tier.then(TierStat::default) });
        }
        let stat = self.client.statfs().await?;
        let owed = self.owed().await?;
        let tier = if self.has_tier { Some(self.client.tier_stat().await?) } else { None };
        Ok(Told { stat, owed, tier })
    }

    /// Asks for the shards that are owed, up to a limit.
    pub(super) async fn owed(&self) -> Result<Vec<OwedEntry>> {
        Ok(self.client.owed(OWED_COUNTED_MAX).await?)
    }
}

/// Parts of the node that all filesystems share.
pub(super) struct FilesystemParts<'a> {
    pub(super) env: &'a Env,
    pub(super) dir: &'a NodeDir,
    pub(super) cluster: ClusterId,
    pub(super) meta_dirs: &'a MetaDirs,
    pub(super) runtime: &'a Handle,
    pub(super) pace: &'a Arc<Pace>,
    pub(super) map: &'a ClusterMap,
    pub(super) drives: &'a BTreeMap<DriveId, DriveEntry>,
    pub(super) knowledge: &'a Knowledge,
    pub(super) memory: &'a MemoryPlan,
    /// The number of nodes in the cluster.
    pub(super) nodes: usize,
    /// The ways to the others.
    pub(super) network: &'a Arc<Network>,
    pub(super) place: OwnerPlace,
}

/// When small pieces are packed, and orphans are looked for.
fn background_options() -> (PackOptions, OrphanOptions) {
    let (packing, collecting, haste) = (PackOptions::default(), OrphanOptions::default(), haste());
    let packing = PackOptions { age: packing.age / haste, pause: packing.pause / haste, ..packing };
    let settle = (collecting.settle / haste).max(SETTLE_MIN);
    (packing, OrphanOptions { settle, pause: collecting.pause / haste })
}

/// What a filesystem's clients are told of the cluster.
#[derive(Clone, Default)]
pub(super) struct ClusterFacts {
    pub(super) nodes: Vec<NodeAddresses>,
    pub(super) places: Vec<Place>,
    /// The part of each drive that stays free.
    pub(super) spare_millionths: u32,
}

/// Where the owner of the ledgers runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct OwnerPlace {
    /// The node.
    pub(super) here: NodeId,
    /// Whether this process opens the drives of its machine and mounts there; if not, the machine does that by itself, and another
    /// node may be the next owner.
    pub(super) is_all: bool,
}

impl OwnerPlace {
    /// The node whose drives this process opens.
    pub(super) fn own(self) -> Option<NodeId> {
        self.is_all.then_some(self.here)
    }
}

/// The drives as clients see them.
fn topology(
    map: &ClusterMap,
    drives: &BTreeMap<DriveId, DriveEntry>,
    place: OwnerPlace,
    record: &FilesystemRecord,
    (write_set, facts): (&WriteSet, &ClusterFacts),
) -> Arc<Topology> {
    let services = drives.iter().filter_map(|(id, entry)| Some((*id, entry.service_or_away(place.own())?)));
    let narrow = record.all_sets().filter(|(profile, _)| profile.k() < record.profile.k());
    let here = facts.places.iter().find(|at| at.node == place.here.0).copied();
    let topology = Topology {
        map: map.clone(),
        drives: services.collect(),
        groups: write_set.groups.clone(),
        profile: write_set.profile,
        narrow: narrow.flat_map(|(_, groups)| groups.to_vec()).collect(),
        limits: Limits { spare_millionths: facts.spare_millionths, ..limits_of(record) },
        near: Near::default(),
        nodes: record.nodes.clone(),
    };
    Arc::new(topology.seen_from(here, record.writes_near))
}

/// Puts drives and groups into a view.
fn fill(view: &mut FilesystemView, record: &FilesystemRecord, topology: &Topology) {
    let Topology { map, drives, groups, profile, narrow, limits, near: _, nodes } = topology;
    view.writes_near = record.writes_near;
    view.for_nodes.clone_from(nodes);
    view.profile = record.profile;
    view.map = map.clone();
    let (away, there): (Vec<DriveId>, Vec<DriveId>) =
        drives.keys().copied().partition(|id| drives[id].stat() == DriveStat::unknown());
    (view.drives, view.away) = (there, away);
    view.drives.sort_unstable();
    view.away.sort_unstable();
    view.groups.clone_from(groups);
    view.write_profile = *profile;
    view.narrow.clone_from(narrow);
    let Limits { provisioned_bytes, ssd_bytes, spare_millionths } = *limits;
    (view.provisioned_bytes, view.ssd_bytes, view.spare_millionths) =
        (provisioned_bytes, ssd_bytes, spare_millionths);
}

/// A view with a number that clients of an earlier process do not have.
fn first_view(
    FilesystemParts { env, cluster, place, .. }: &FilesystemParts<'_>,
    record: &FilesystemRecord,
    topology: &Topology,
) -> FilesystemView {
    let mut view = FilesystemView {
        number: env.random.next_u64().max(1),
        cluster: *cluster,
        id: record.id,
        ledger: record.ledger,
        profile: record.profile,
        map: ClusterMap::default(),
        drives: Vec::new(),
        groups: Vec::new(),
        write_profile: record.profile,
        narrow: Vec::new(),
        provisioned_bytes: None,
        ssd_bytes: None,
        store: Bytes::new(),
        owner: place.here,
        nodes: Vec::new(),
        away: Vec::new(),
        has_store: false,
        spare_millionths: 0,
        writes_near: false,
        for_nodes: BTreeSet::new(),
        places: Vec::new(),
    };
    fill(&mut view, record, topology);
    view
}

/// Opens a ledger. Sessions of an earlier run end, except those of clients in other processes, if there may be some.
async fn open_owner(
    parts: &FilesystemParts<'_>,
    ledger: LedgerId,
    (has_others, vacant): (bool, Option<Vacancy>),
) -> Result<(LedgerFiles, Arc<Owner>)> {
    let FilesystemParts { env, meta_dirs, knowledge, memory, .. } = *parts;
    let (owner_env, meta_dirs, evidence) = (env.clone(), meta_dirs.clone(), knowledge.of(ledger));
    let (cache_bytes, unstored_bytes_max) = (memory.store_cache_bytes, memory.unstored_bytes);
    // Clients may have seen what was lost: they begin anew.
    let resumes = has_others && evidence.older != Older::Certain;
    let earlier_sessions = if resumes { EarlierSessions::ResumeElsewhere } else { EarlierSessions::End };
    // A log of files has no standbys.
    let standby_grace = if meta_dirs.engine().is_some() { STANDBY_WAIT_MAX } else { Duration::ZERO };
    let open = move || -> Result<_> {
        let files = meta_dirs.open(ledger, cache_bytes)?;
        let options = OwnerOptions {
            ledger,
            log: files.log.clone(),
            state: files.state.clone(),
            env: owner_env,
            evidence,
            earlier_sessions,
            unstored_bytes_max,
            standby_grace,
            vacant,
        };
        let owner = Owner::open(options)?;
        Ok((files, Arc::new(owner)))
    };
    tokio::task::spawn_blocking(open).await?
}

impl FilesystemEntry {
    /// Opens the ledger and starts a client and background work on it. Where others may own the ledger, it was seen
    /// `vacant`.
    pub(super) async fn open(
        parts: &FilesystemParts<'_>,
        record: FilesystemRecord,
        vacant: Option<Vacancy>,
    ) -> Result<Self> {
        let FilesystemParts { env, dir, cluster, runtime, pace, map, drives, memory, place, .. } = *parts;
        let process = MountProcess::find(env, dir, record.id).filter(|_| place.is_all);
        let has_others = process.is_some() || parts.nodes > 1 || !place.is_all;
        let (files, owner) = open_owner(parts, record.ledger, (has_others, vacant)).await?;
        // A drive that is missing now may come back soon: narrower groups are planned later, if at all.
        let write_set = WriteSet { profile: record.profile, groups: record.groups.clone() };
        // What stays free is published before clients come.
        let (sender, receiver) =
            watch::channel(topology(map, drives, place, &record, (&write_set, &ClusterFacts::default())));
        let view = first_view(parts, &record, &sender.borrow());
        let tier = TierEntry::new(env, (cluster, place.here), record.id, memory);
        let peers = Peers::default();
        let options = ClientOptions {
            env: env.clone(),
            runtime: runtime.clone(),
            ledger: record.ledger,
            owner: only_owner(owner.clone()),
            topology: receiver,
            profile: record.profile,
            dirty_bytes_max: memory.dirty_bytes,
            map_bytes_max: memory.map_bytes,
            tier: tier.link(),
            peers: peers.clone(),
            reach: Reach::here().waiting_for_drives(),
        };
        let client = Client::open(options).await.context("registering with the owner of the ledger")?;
        let reclaimer = Reclaimer::start(client.clone(), runtime);
        let others = Helpers::of(parts.network, &record, tier.blind());
        let repairer = Repairer::start(env.clone(), client.clone(), Some(others), pace.clone(), runtime);
        let damage = DamageKeeper::start(env.clone(), client.clone(), pace.clone(), runtime);
        // The first `status` has the known damage. While the owner waits for sessions in other processes, it cannot tell.
        if !has_others {
            damage.known(DAMAGE_PATIENCE).await;
        }
        let (env, pace) = (env.clone(), pace.clone());
        let (packing, collecting) = background_options();
        let packer = Packer::start(env.clone(), client.clone(), pace.clone(), packing, runtime);
        let orphans = OrphanCollector::start(env.clone(), client.clone(), pace.clone(), collecting, runtime);
        let verifier = Verifier::start(env, client.clone(), pace, verify_options(), runtime);
        Ok(Self {
            record,
            files,
            owner,
            client,
            place,
            topology: sender,
            write_set,
            others_written_ns: parts.env.clock.boot_ns(),
            reclaimer,
            repairer,
            damage,
            packer,
            orphans,
            verifier,
            balance_left: None,
            tier,
            peers,
            mount: process.map(|process| Mounted::Elsewhere(Arc::new(process))),
            is_unmounting: false,
            broken: None,
            view: watch::Sender::new(Arc::new(view)),
        })
    }

    /// Opens another client on the filesystem, with its own caches, for another protocol.
    pub(super) async fn open_client(
        &self,
        env: &Env,
        runtime: &Handle,
        memory: &MemoryPlan,
    ) -> Result<Client> {
        let options = ClientOptions {
            env: env.clone(),
            runtime: runtime.clone(),
            ledger: self.record.ledger,
            owner: only_owner(self.owner.clone()),
            topology: self.topology.subscribe(),
            profile: self.record.profile,
            dirty_bytes_max: memory.s3_dirty_bytes,
            map_bytes_max: memory.map_bytes,
            tier: self.tier.link(),
            peers: self.peers.clone(),
            reach: Reach::here().waiting_for_drives_at_most(S3_DRIVE_PATIENCE),
        };
        Client::open(options).await.context("registering with the owner of the ledger")
    }

    /// Publishes changed drives or groups to the clients.
    pub(super) fn update(
        &mut self,
        map: &ClusterMap,
        drives: &BTreeMap<DriveId, DriveEntry>,
        facts: &ClusterFacts,
    ) {
        let topology = topology(map, drives, self.place, &self.record, (&self.write_set, facts));
        self.change_view(|view| {
            fill(view, &self.record, &topology);
            view.nodes.clone_from(&facts.nodes);
            view.places.clone_from(&facts.places);
        });
        self.topology.send_replace(topology);
    }

    /// Publishes the object store to clients in other processes.
    pub(super) fn show_store(&self) {
        self.change_view(|view| {
            view.store = self.tier.access().into();
            view.has_store = !view.store.is_empty();
        });
    }

    fn change_view(&self, change: impl FnOnce(&mut FilesystemView)) {
        self.view.send_if_modified(|view| {
            let mut next = FilesystemView::clone(view);
            change(&mut next);
            let is_news = next != **view;
            if is_news {
                next.number = next.number.wrapping_add(1).max(1);
                *view = Arc::new(next);
            }
            is_news
        });
    }

    /// Unmounts, writes everything out and ends the ledger's threads.
    pub(super) async fn stop(mut self, mounts: Mounts) -> Result<()> {
        let stays = self.mount_process().is_some_and(|process| match mounts {
            Mounts::Unmount => false,
            Mounts::KeepEarlier => process.is_earlier(),
            Mounts::Keep => true,
        });
        if stays {
            self.mount = None;
        }
        let unmounted = self.unmount(UnmountMode::Detach).await;
        self.tier.stop().await;
        self.packer.stop().await;
        self.orphans.stop().await;
        self.verifier.stop().await;
        self.reclaimer.stop().await;
        self.repairer.stop().await;
        self.damage.stop().await;
        let closed = tokio::time::timeout(CLOSE_DEADLINE, self.client.close()).await;
        let closed =
            closed.context("writing out took too long").and_then(|result| result.context("writing out"));
        let owner = self.owner.clone();
        tokio::task::spawn_blocking(move || owner.stop()).await?;
        self.owner.resign().await;
        unmounted.and(closed)
    }

    /// What is needed to ask the owner of the ledger, which may take long, without the node.
    pub(super) fn asker(&self) -> Asker {
        Asker { client: self.client.clone(), owner: self.owner.clone(), has_tier: self.record.tier.is_some() }
    }

    pub(super) fn info(
        &self,
        env: &Env,
        cluster: &Cluster,
        drives: &BTreeMap<DriveId, DriveEntry>,
        Told { stat, owed, tier }: &Told,
    ) -> FilesystemInfo {
        let ledger = self.owner.stat();
        let owed_bytes = owed.iter().map(|entry| u64::from(shard_len(entry.extent_len, entry.k))).sum();
        let owed_drives: BTreeSet<DriveId> = self.holders(cluster, owed);
        let (reclaim, damage) = (self.reclaimer.stat(), damage_info(self.damage.stat()));
        let repair = self.repair_info(cluster, owed, drives);
        FilesystemInfo {
            name: self.record.name.clone(),
            group: self.tier.filesystem_group.name.clone(),
            profile: self.record.profile.to_string(),
            write_profile: self.write_set.profile.to_string(),
            narrow_bytes: self.repairer.stat().narrow_bytes,
            protection: protection(
                (&self.record, &self.in_use()),
                cluster,
                drives,
                &owed_drives,
                damage.is_lost(),
            ),
            balancing: self.record.balancing,
            balance_left_groups: self.balance_left_groups(repair.rebuilding_groups),
            mount: self.mount_path().map(|path| path.display().to_string()),
            transport: self.mount_transport().map(str::to_owned),
            mount_process: self.mount_process().map(|process| process.pid()),
            total_bytes: stat.total_bytes,
            free_bytes: stat.free_bytes,
            used_bytes: stat.used_bytes,
            placement: placement_of(self.record.writes_near),
            nodes: self.record.nodes.iter().map(|node| node.0).collect(),
            groups_elsewhere: self.groups_elsewhere(cluster),
            size_bytes: self.record.provisioned_bytes,
            ssd_bytes: self.record.ssd_bytes,
            ssd_used_bytes: stat.drive_bytes,
            shortage: self.shortage(),
            inodes: stat.inodes,
            ledger: LedgerInfo {
                id: self.record.ledger.0,
                epoch: ledger.epoch,
                committed_seq: ledger.committed_seq,
                stored_seq: ledger.stored_seq,
                state: ledger_state(&ledger).to_owned(),
                reason: self.owner.problem(),
                in_doubt: ledger.in_doubt,
                copies: self.files.info(env),
            },
            owed_shards: owed.len() as u64,
            owed_bytes,
            repair,
            owed_drives: owed_drives.iter().map(|drive| drive.0).collect(),
            reclaimed_extents: reclaim.deleted_extents,
            waiting_extents: reclaim.waiting_extents,
            pack: self.pack_info(),
            orphans: self.orphan_info(env),
            verified: self.verified(env),
            damage,
            tier: tier.as_ref().and_then(|tier| self.tier_info(tier)),
        }
    }

    /// Groups of former profiles that have no extents and get none.
    pub(super) fn unused(&self) -> Vec<PgId> {
        let used = self.packer.used_groups();
        let used = used.filter(|used| used.began_ns > self.others_written_ns + LATE_WRITES_NS);
        let Some(UsedGroups { groups, .. }) = used else { return Vec::new() };
        let former = self.record.sets.iter().flat_map(|set| &set.groups);
        former.filter(|group| !groups.contains(group)).copied().collect()
    }

    /// Groups with data at nodes that are not for the filesystem. Until it is known which groups of former profiles have data, these do
    /// not count.
    fn groups_elsewhere(&self, cluster: &Cluster) -> u64 {
        let mut record = self.in_use();
        if self.packer.used_groups().is_none() {
            record.sets.clear();
        }
        cluster.groups_elsewhere(&record) as u64
    }

    /// Its record, with only those groups that have extents or may get some.
    fn in_use(&self) -> FilesystemRecord {
        let (mut record, unused) = (self.record.clone(), BTreeSet::from_iter(self.unused()));
        for set in &mut record.sets {
            set.groups.retain(|group| !unused.contains(group));
        }
        record
    }

    fn pack_info(&self) -> PackInfo {
        let stat = self.packer.stat();
        let state = match stat.waits {
            Some(PackWait::Paused) => "paused",
            Some(PackWait::Repair) => "repair_first",
            Some(PackWait::Room) => "no_room",
            None if stat.left_bytes + stat.convert_bytes > 0 => "packing",
            None => "idle",
        };
        PackInfo {
            sweeps: stat.sweeps,
            state: state.to_owned(),
            packed_bytes: stat.packed_bytes,
            extents: stat.extents,
            left_bytes: stat.left_bytes,
            convert_bytes: stat.convert_bytes,
            bytes_per_s: stat.bytes_per_s,
            eta_s: stat.eta_s(),
            stored_bytes: stat.stored_bytes,
            inline_bytes: stat.inline_bytes,
            allocated_bytes: stat.allocated_bytes,
            waste_bytes: stat.allocated_bytes.saturating_sub(stat.ideal_bytes),
        }
    }

    fn orphan_info(&self, env: &Env) -> OrphanInfo {
        let stat = self.orphans.stat();
        let age_s = |at_ns: u64| env.clock.boot_ns().saturating_sub(at_ns) / 1_000_000_000;
        OrphanInfo {
            open_ranges: stat.open_ranges,
            closed_ranges: stat.closed_ranges,
            verified_ranges: stat.verified_ranges,
            deleted_extents: stat.deleted_extents,
            searched_s: stat.swept_ns.map(age_s),
        }
    }

    /// The drive for an owed shard: the present holder of its position.
    fn holder(&self, cluster: &Cluster, entry: &OwedEntry) -> DriveId {
        let member =
            cluster.groups.get(&entry.pg).and_then(|group| group.members.get(usize::from(entry.shard.0)));
        member.copied().unwrap_or(entry.drive)
    }

    fn repair_info(
        &self,
        cluster: &Cluster,
        owed: &[OwedEntry],
        drives: &BTreeMap<DriveId, DriveEntry>,
    ) -> RepairInfo {
        let stat = self.repairer.stat();
        let is_up = |drive: &DriveId| drives.get(drive).is_some_and(DriveEntry::is_up);
        let payable = owed.iter().filter(|entry| is_up(&self.holder(cluster, entry)));
        let payable_bytes: u64 = payable.map(|entry| u64::from(shard_len(entry.extent_len, entry.k))).sum();
        let left = payable_bytes + stat.rebuild_left_bytes;
        let groups: BTreeSet<PgId> = self.record.all_sets().flat_map(|(_, groups)| groups.to_vec()).collect();
        let rebuilding = cluster.groups.values().filter(|group| !group.rebuilding.is_empty());
        RepairInfo {
            repaired_shards: stat.repaired_shards,
            repaired_bytes: stat.repaired_bytes,
            rebuilding_groups: rebuilding.filter(|group| groups.contains(&group.id)).count() as u64,
            rebuilt_shards: stat.rebuilt_shards,
            rebuilt_bytes: stat.rebuilt_bytes,
            rebuild_left_bytes: stat.rebuild_left_bytes,
            healed_shards: stat.healed_shards,
            bytes_per_s: stat.bytes_per_s,
            helpers: stat.helpers,
            helped_shards: stat.helped_shards,
            eta_s: stat.time_for(left).map(|time| time.as_millis().div_ceil(1000) as u64),
            lost_extents: stat.lost_extents,
        }
    }

    /// Groups of which data has still to move until every drive has its share.
    fn balance_left_groups(&self, rebuilding: u64) -> Option<u64> {
        let later = self.balance_left.filter(|_| self.record.balancing)?;
        Some(later as u64 + rebuilding)
    }

    /// Bytes owed to each drive.
    pub(super) fn owed_bytes(&self, cluster: &Cluster, owed: &[OwedEntry]) -> BTreeMap<DriveId, u64> {
        let mut bytes = BTreeMap::new();
        for entry in owed {
            *bytes.entry(self.holder(cluster, entry)).or_insert(0) +=
                u64::from(shard_len(entry.extent_len, entry.k));
        }
        bytes
    }

    /// The newest durable position of the filesystem's ledger.
    pub(super) fn position(&self) -> Option<Position> {
        self.owner.position()
    }

    /// The drives that are owed these shards.
    pub(super) fn holders(&self, cluster: &Cluster, owed: &[OwedEntry]) -> BTreeSet<DriveId> {
        owed.iter().map(|entry| self.holder(cluster, entry)).collect()
    }

    /// Groups whose new members have all their shards of this filesystem.
    pub(super) fn rebuilt(&self) -> HashMap<PgId, base::Epoch> {
        self.repairer.rebuilt()
    }
}

/// Protection now: of reads, by the stored data; of writes, by the drives that are up, with narrower extents if
/// necessary.
fn protection(
    (record, in_use): (&FilesystemRecord, &FilesystemRecord),
    cluster: &Cluster,
    drives: &BTreeMap<DriveId, DriveEntry>,
    owed: &BTreeSet<DriveId>,
    is_lost: bool,
) -> String {
    let seen = seen(drives);
    // Damaged shards count as missing; together they may be more than any single extent lacks.
    let damaged = |(_, entry): &(&DriveId, &DriveEntry)| {
        entry.stat_if_readable().is_some_and(|stat| stat.bad_shards > 0)
    };
    let lacking: BTreeSet<DriveId> =
        drives.iter().filter(damaged).map(|(id, _)| *id).chain(owed.iter().copied()).collect();
    let reads = |level| {
        let whole = cluster.reads_survive(in_use, &seen, owed, level);
        cluster.reads_survive(in_use, &seen, &lacking, level).max(whole.min(0))
    };
    let drives = match reads(FailureDomain::Drive) {
        losses @ 0.. if !is_lost => format!("survive {losses} drives"),
        _ => "fail for some data".to_owned(),
    };
    let writes = match cluster.writes_survive(record, &seen, FailureDomain::Drive) {
        Some(losses) => format!("survive {losses} drives"),
        None => "not possible".to_owned(),
    };
    let both = |level| {
        let writes = cluster.writes_survive(record, &seen, level).unwrap_or(0);
        reads(level).max(0).min(writes as i32)
    };
    format!("reads {drives}, writes {writes}, {} nodes", both(FailureDomain::Node))
}

fn ledger_state(stat: &OwnerStat) -> &'static str {
    match stat {
        OwnerStat { halted: true, .. } => "halted",
        OwnerStat { no_space: true, .. } => "no_space",
        _ => "serving",
    }
}
