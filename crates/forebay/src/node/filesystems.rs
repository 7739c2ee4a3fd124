//! The node's filesystems: ledger, owner, client, mount and upkeep of each.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use admin::{FilesystemInfo, LedgerInfo};
use anyhow::{Context, Result};
use base::env::Env;
use base::units::{GIB, MIB};
use base::{DriveId, PgId};
use client::{Client, ClientOptions, FsStat, Topology};
use layout::{ClusterMap, DriveSlot, PlacementGroup, Profile, plan_placement_groups, suggested_pg_count};
use meta::control::{DriveRecord, FilesystemRecord};
use meta::owner::{Owner, OwnerOptions, OwnerStat};
use posix::fuse::{Mount, MountFlags, MountOptions, UnmountMode};
use tokio::runtime::Handle;
use tokio::sync::watch;
use upkeep::Reclaimer;
use wire::drive::DriveService;

use super::NodeDir;
use super::drives::DriveEntry;
use super::ledgers::{LedgerFiles, MetaDirs};

/// Owed shards counted for `status`; more are as bad.
const OWED_COUNTED_MAX: usize = 100_000;
/// Page cache of a filesystem's local store.
const STORE_CACHE_BYTES: usize = 256 << 20;
/// What is written and not durable, at most, on a machine with memory and on a small one.
const DIRTY_BYTES: u64 = 256 * MIB;
const DIRTY_BYTES_SMALL: u64 = 64 * MIB;
const SMALL_MEMORY_BYTES: u64 = 8 * GIB;
/// How long writing out may take when the node stops.
const CLOSE_DEADLINE: Duration = Duration::from_secs(8);

/// A filesystem that is being served.
pub(super) struct FilesystemEntry {
    pub(super) record: FilesystemRecord,
    pub(super) files: LedgerFiles,
    owner: Arc<Owner>,
    pub(super) client: Client,
    topology: watch::Sender<Arc<Topology>>,
    reclaimer: Reclaimer,
    mount: Option<Mount>,
}

/// What clients see of the drives.
pub(super) fn topology(
    map: &ClusterMap,
    drives: &BTreeMap<DriveId, DriveEntry>,
    groups: &[PgId],
) -> Arc<Topology> {
    let services = drives.iter().filter_map(|(id, entry)| {
        let service = entry.service.clone()?;
        Some((*id, service as Arc<dyn DriveService>))
    });
    Arc::new(Topology { map: map.clone(), drives: services.collect(), groups: groups.to_vec() })
}

/// Placement groups over these drives, numbered from `first`.
pub(super) fn plan_groups(
    env: &Env,
    drives: &[&DriveRecord],
    profile: Profile,
    first: u32,
) -> Result<Vec<PlacementGroup>> {
    let slots: Vec<DriveSlot> = drives
        .iter()
        .map(|drive| DriveSlot { drive: drive.id, domain: drive.domain, weight_bytes: drive.capacity_bytes })
        .collect();
    let count = suggested_pg_count(slots.len() as u32, profile.n());
    let mut groups = plan_placement_groups(&slots, profile, count, env.random.next_u64())?;
    for (id, group) in (first..).zip(&mut groups) {
        group.id = PgId(id);
    }
    Ok(groups)
}

impl FilesystemEntry {
    /// Opens the ledger and starts a client and upkeep on it.
    pub(super) async fn open(
        env: &Env,
        meta_dirs: &MetaDirs,
        runtime: &Handle,
        record: FilesystemRecord,
        map: &ClusterMap,
        drives: &BTreeMap<DriveId, DriveEntry>,
    ) -> Result<Self> {
        let (ledger, owner_env, meta_dirs) = (record.ledger, env.clone(), meta_dirs.clone());
        let open = move || -> Result<_> {
            let files = meta_dirs.open(ledger, STORE_CACHE_BYTES)?;
            let (log, state) = (files.log.clone(), files.state.clone());
            let owner = Owner::open(OwnerOptions { ledger, log, state, env: owner_env })?;
            Ok((files, Arc::new(owner)))
        };
        let (files, owner) = tokio::task::spawn_blocking(open).await??;
        let (sender, receiver) = watch::channel(topology(map, drives, &record.groups));
        let options = ClientOptions {
            env: env.clone(),
            runtime: runtime.clone(),
            ledger: record.ledger,
            meta: owner.clone(),
            topology: receiver,
            profile: record.profile,
            provisioned_bytes: record.provisioned_bytes,
            dirty_bytes_max: dirty_bytes_max(),
        };
        let client = Client::open(options).await.context("registering with the owner of the ledger")?;
        let reclaimer = Reclaimer::start(client.clone(), runtime);
        Ok(Self { record, files, owner, client, topology: sender, reclaimer, mount: None })
    }

    /// Tells the client about changed drives or groups.
    pub(super) fn update(&mut self, map: &ClusterMap, drives: &BTreeMap<DriveId, DriveEntry>) {
        self.topology.send_replace(topology(map, drives, &self.record.groups));
    }

    pub(super) fn mount_path(&self) -> Option<PathBuf> {
        self.mount.as_ref().filter(|mount| mount.is_alive()).map(|mount| mount.path().to_owned())
    }

    pub(super) async fn mount(
        &mut self,
        dir: &NodeDir,
        runtime: &Handle,
        path: &Path,
        flags: MountFlags,
    ) -> Result<()> {
        self.unmount_dead();
        let options = MountOptions {
            path: path.to_owned(),
            source: format!("{}#{}", dir.root().display(), self.record.name),
            threads: std::thread::available_parallelism().map_or(4, |cores| cores.get().clamp(4, 16)),
            flags,
        };
        let (client, runtime) = (self.client.clone(), runtime.clone());
        let mount = tokio::task::spawn_blocking(move || Mount::new(client, runtime, &options)).await??;
        self.mount = Some(mount);
        Ok(())
    }

    /// Forgets a mount that somebody removed by hand.
    pub(super) fn unmount_dead(&mut self) {
        if self.mount.as_ref().is_some_and(|mount| !mount.is_alive()) {
            self.mount = None;
        }
    }

    pub(super) async fn unmount(&mut self, mode: UnmountMode) -> Result<()> {
        let Some(mut mount) = self.mount.take() else { return Ok(()) };
        let work = move || (mount.unmount(mode), mount);
        let (result, mount) = tokio::task::spawn_blocking(work).await?;
        if result.is_err() {
            self.mount = Some(mount);
        }
        result?;
        self.client.sync().await.context("writing out after unmounting")?;
        Ok(())
    }

    /// Unmounts, writes everything out and ends the ledger's threads.
    pub(super) async fn stop(mut self) -> Result<()> {
        let unmounted = self.unmount(UnmountMode::Detach).await;
        self.reclaimer.stop().await;
        let closed = tokio::time::timeout(CLOSE_DEADLINE, self.client.close()).await;
        let closed =
            closed.context("writing out took too long").and_then(|result| result.context("writing out"));
        let owner = self.owner.clone();
        tokio::task::spawn_blocking(move || owner.stop()).await?;
        unmounted.and(closed)
    }

    pub(super) async fn info(&self, drives: &BTreeMap<DriveId, DriveEntry>) -> Result<FilesystemInfo> {
        let ledger = self.owner.stat();
        // A halted ledger answers nothing, and that is what must be shown then.
        let unknown = FsStat { total_bytes: 0, free_bytes: 0, used_bytes: 0, inodes: 0 };
        let stat = if ledger.halted { unknown } else { self.client.statfs().await? };
        let owed = if ledger.halted { HashSet::new() } else { self.client.owed(OWED_COUNTED_MAX).await? };
        let owed_drives: BTreeSet<DriveId> = owed.iter().map(|(drive, _)| *drive).collect();
        let reclaim = self.reclaimer.stat();
        Ok(FilesystemInfo {
            name: self.record.name.clone(),
            profile: self.record.profile.to_string(),
            protection: protection(self.record.profile, drives, &owed_drives),
            mount: self.mount_path().map(|path| path.display().to_string()),
            total_bytes: stat.total_bytes,
            free_bytes: stat.free_bytes,
            used_bytes: stat.used_bytes,
            inodes: stat.inodes,
            ledger: LedgerInfo {
                id: self.record.ledger.0,
                epoch: ledger.epoch,
                committed_seq: ledger.committed_seq,
                stored_seq: ledger.stored_seq,
                state: ledger_state(&ledger).to_owned(),
                reason: self.owner.problem(),
                copies: self.files.info(),
            },
            owed_shards: owed.len() as u64,
            owed_drives: owed_drives.iter().map(|drive| drive.0).collect(),
            reclaimed_extents: reclaim.deleted_extents,
            waiting_extents: reclaim.waiting_extents,
        })
    }
}

/// What is survived now: of reads, by the data that is stored; of writes, by the drives that are up. On one node a
/// drive is a failure domain. A drive that is owed shards counts as lost, because to some extents it is.
fn protection(profile: Profile, drives: &BTreeMap<DriveId, DriveEntry>, owed: &BTreeSet<DriveId>) -> String {
    let up = drives.values().filter(|entry| entry.is_up()).count() as u32;
    let lost = drives.iter().filter(|(id, entry)| !entry.is_up() || owed.contains(id)).count();
    let reads = u8::try_from(lost).ok().and_then(|lost| profile.m().checked_sub(lost));
    let losses = |count: Option<u8>| {
        count.map_or("not possible".to_owned(), |count| format!("survive {count} drives"))
    };
    let reads = reads.map_or("fail for some data".to_owned(), |count| format!("survive {count} drives"));
    format!("reads {reads}, writes {}, 0 nodes", losses(profile.explain(up).writes_survive))
}

fn ledger_state(stat: &OwnerStat) -> &'static str {
    match stat {
        OwnerStat { halted: true, .. } => "halted",
        OwnerStat { no_space: true, .. } => "no_space",
        _ => "serving",
    }
}

fn dirty_bytes_max() -> u64 {
    let memory = rustix::system::sysinfo();
    let total = memory.totalram as u64 * u64::from(memory.mem_unit);
    if total < SMALL_MEMORY_BYTES { DIRTY_BYTES_SMALL } else { DIRTY_BYTES }
}
