//! `fsck`: checks the filesystems of a running node, or of a stopped node in its directory.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use admin::{AdminError, FsckFilesystem, FsckFinding, FsckInfo};
use anyhow::{Context, Result, bail};
use base::env::{Caching, Env, OpenMode};
use base::{DriveId, DriveUuid, LedgerId};
use control::{CONTROL_LEDGER, Cluster, Control, DriveRecord};
use layout::{ClusterMap, DriveState};
use meta::fsck::{Fsck, FsckProgress, FsckReport, Inventory};
use meta::log::StaleCopies;
use meta::owner::Owner;
use meta::state::{MirroredState, Overlaid, State};
use tokio::runtime::Handle;
use wire::drive::{DriveService, ShardEntry, ShardKey};

use super::ledgers::MetaDirs;
use super::local_drives::{LocalDrives, NO_PATH};
use super::{Node, NodeDir};

/// Page cache of a store that is only read.
const CACHE_BYTES: usize = 64 << 20;
/// Limit of shards in memory, over all drives. Inventories of further drives are read again for each use.
const SHARDS_KEPT_MAX: usize = 4 << 20;
const LIST_SHARDS: usize = 16_384;
/// Polls until the local store must have everything that was committed.
const STORED_POLLS: u32 = 600;
const STORED_POLL: std::time::Duration = std::time::Duration::from_millis(50);

/// A check of a running node.
#[derive(Default)]
pub(super) struct FsckJob {
    running: bool,
    progress: Arc<FsckProgress>,
    result: Option<Result<Vec<FsckFilesystem>, String>>,
}

fn answer(name: &str, report: FsckReport) -> FsckFilesystem {
    let counts = [
        ("inodes", report.inodes),
        ("names", report.names),
        ("pieces", report.pieces),
        ("extents", report.extents),
        ("free_extents", report.free_extents),
        ("away_extents", report.away_extents),
        ("blobs", report.blobs),
        ("shards", report.shards),
        ("owed_shards", report.owed_shards),
        ("stale_owed", report.stale_owed),
        ("rebuilding_shards", report.rebuilding_shards),
        ("unreachable_shards", report.unreachable_shards),
        ("unreferenced_shards", report.unreferenced_shards),
        ("unreferenced_bytes", report.unreferenced_bytes),
    ];
    let finding = |finding: meta::fsck::Finding| FsckFinding {
        code: finding.code,
        what: finding.what,
        advice: finding.advice,
    };
    FsckFilesystem {
        name: name.to_owned(),
        findings_count: report.findings_count,
        findings: report.findings.into_iter().map(finding).collect(),
        counts: counts.into_iter().map(|(name, count)| (name.to_owned(), count)).collect(),
    }
}

/// Drives of a running node.
struct Running {
    runtime: Handle,
    drives: BTreeMap<DriveId, Arc<dyn DriveService>>,
}

impl Inventory for Running {
    fn drives(&self) -> Vec<DriveId> {
        self.drives.keys().copied().collect()
    }

    fn visit(
        &self,
        drive: DriveId,
        ledger: LedgerId,
        range: (u64, u64),
        visit: &mut dyn FnMut(ShardEntry),
    ) -> Result<(), String> {
        let service = &self.drives[&drive];
        let first = |ledger: LedgerId, extent| ShardKey {
            ledger,
            extent: base::ExtentId(extent),
            shard: base::ShardIndex(0),
        };
        // Extent 0 is never given out, so this is below every shard of the range.
        let mut after = match range.0.checked_sub(1) {
            Some(before) => Some(ShardKey { shard: base::ShardIndex(u8::MAX), ..first(ledger, before) }),
            None => Some(first(ledger, 0)),
        };
        loop {
            let page = self.runtime.block_on(service.list(after, LIST_SHARDS));
            let page = page.map_err(|error| error.to_string())?;
            let Some(last) = page.last() else { return Ok(()) };
            after = Some(last.key);
            for entry in page {
                if entry.key.ledger != ledger || entry.key.extent.0 >= range.1 {
                    return Ok(());
                }
                visit(entry);
            }
        }
    }
}

/// Drives of a stopped node.
struct Stopped<'a> {
    env: &'a Env,
    drives: Vec<StoppedDrive>,
    unreadable: Vec<UnreadableDrive>,
}

/// A drive that can be read.
struct StoppedDrive {
    id: DriveId,
    uuid: DriveUuid,
    path: PathBuf,
    /// Its shards, if those fit in memory.
    shards: Option<Vec<ShardEntry>>,
}

/// A drive whose shards count as missing.
pub(crate) struct UnreadableDrive {
    pub(crate) id: DriveId,
    /// Why the drive cannot be read.
    pub(crate) reason: String,
}

/// Result of a check of a stopped node.
pub(crate) struct StoppedCheck {
    pub(crate) filesystems: Vec<FsckFilesystem>,
    pub(crate) unreadable: Vec<UnreadableDrive>,
}

impl<'a> Stopped<'a> {
    fn look(env: &'a Env, records: impl Iterator<Item = DriveRecord>, paths: &LocalDrives) -> Self {
        let (mut drives, mut unreadable, mut kept) = (Vec::new(), Vec::new(), 0);
        // A leaving drive is read until it is empty.
        let serves = |record: &DriveRecord| matches!(record.state, DriveState::Up | DriveState::Leaving);
        for DriveRecord { id, uuid, .. } in records.filter(serves) {
            let Some(path) = paths.path_of(uuid) else {
                unreadable.push(UnreadableDrive { id, reason: NO_PATH.to_owned() });
                continue;
            };
            match drive::inventory(env, &path, uuid) {
                Ok(shards) => {
                    kept += shards.len();
                    let shards = (kept <= SHARDS_KEPT_MAX).then_some(shards);
                    drives.push(StoppedDrive { id, uuid, path, shards });
                }
                Err(error) => {
                    let reason = format!("{:#}", anyhow::Error::new(error));
                    unreadable.push(UnreadableDrive { id, reason });
                }
            }
        }
        Self { env, drives, unreadable }
    }
}

impl Inventory for Stopped<'_> {
    fn drives(&self) -> Vec<DriveId> {
        self.drives.iter().map(|drive| drive.id).collect()
    }

    fn visit(
        &self,
        drive: DriveId,
        ledger: LedgerId,
        (from, to): (u64, u64),
        visit: &mut dyn FnMut(ShardEntry),
    ) -> Result<(), String> {
        let found = self.drives.iter().find(|found| found.id == drive);
        let StoppedDrive { uuid, path, shards, .. } = found.ok_or_else(|| "no such drive".to_owned())?;
        let read;
        let shards = match shards {
            Some(shards) => shards,
            None => {
                read = drive::inventory(self.env, path, *uuid).map_err(|error| error.to_string())?;
                &read
            }
        };
        let wanted =
            |entry: &&ShardEntry| entry.key.ledger == ledger && (from..to).contains(&entry.key.extent.0);
        shards.iter().filter(wanted).copied().for_each(visit);
        Ok(())
    }
}

/// Checks a stopped node. Completes copies of the metadata as a start would; changes nothing else.
pub(crate) fn fsck_stopped(env: &Env, dir: &NodeDir, progress: &FsckProgress) -> Result<StoppedCheck> {
    let old = NodeDir::ledger_in(&dir.meta(), CONTROL_LEDGER);
    if !env.files.exists(&dir.meta_dirs()) && !env.files.exists(&old) {
        bail!("there is no node in {}", dir.root().display());
    }
    let lock = env.files.open(&dir.lock(), OpenMode::Create, Caching::Buffered);
    let lock = lock.with_context(|| format!("cannot open {}", dir.lock().display()))?;
    lock.try_lock().with_context(|| format!("a node runs in {}", dir.root().display()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    let meta_dirs = MetaDirs::load(env, dir, &[], StaleCopies::Refuse)?;
    let open = |ledger| -> Result<Arc<Overlaid>> {
        let files = meta_dirs.open(ledger, CACHE_BYTES)?;
        Ok(Arc::new(runtime.block_on(Overlaid::replay(&*files.log, files.state))?))
    };
    let view = Control::view_only(open(CONTROL_LEDGER)?).view()?;
    let (cluster, paths) = (Cluster::of(&view)?, LocalDrives::load(env, dir, view.former_paths()?)?);
    let map = cluster.map();
    let inventory = Stopped::look(env, cluster.drives.into_values(), &paths);
    let mut filesystems = Vec::new();
    for filesystem in cluster.filesystems.into_values() {
        let name = &filesystem.name;
        let state = open(filesystem.ledger).with_context(|| format!("opening filesystem {name}"))?;
        let fsck =
            Fsck { ledger: filesystem.ledger, state: &*state, map: &map, inventory: &inventory, progress };
        filesystems.push(answer(name, fsck.run().with_context(|| format!("checking filesystem {name}"))?));
    }
    Ok(StoppedCheck { filesystems, unreadable: inventory.unreadable })
}

/// Sources for the check of a filesystem that is served.
struct Served {
    name: String,
    ledger: LedgerId,
    state: Arc<MirroredState>,
    owner: Arc<Owner>,
}

impl Served {
    /// The store, once it has everything that is committed now.
    fn newer(&self, runtime: &Handle) -> Result<Arc<dyn State>, String> {
        let committed = self.owner.stat().committed_seq;
        for _ in 0..STORED_POLLS {
            if self.owner.stat().stored_seq >= committed {
                return self.state.snapshot().map_err(|error| error.to_string());
            }
            runtime.block_on(tokio::time::sleep(STORED_POLL));
        }
        Err(format!("the local store does not get batch {committed}"))
    }
}

fn check_served(
    served: &[Served],
    map: &ClusterMap,
    inventory: &Running,
    progress: &FsckProgress,
) -> Result<Vec<FsckFilesystem>> {
    let mut answers = Vec::new();
    for served in served {
        let name = &served.name;
        let state = served.newer(&inventory.runtime).map_err(|error| anyhow::anyhow!("{name}: {error}"))?;
        let fsck = Fsck { ledger: served.ledger, state: &*state, map, inventory, progress };
        let report = fsck.run_again(|| served.newer(&inventory.runtime));
        answers.push(answer(name, report.with_context(|| format!("checking filesystem {name}"))?));
    }
    Ok(answers)
}

impl Node {
    /// Starts a check, unless one runs.
    pub(super) async fn start_fsck_now(self: Arc<Self>) -> Result<FsckInfo> {
        // After a start or a takeover they come within a moment, and until then their content would count as lost.
        self.wait_for_drives().await?;
        let state = self.state.lock().await;
        let progress = {
            let mut job = lock(&self.fsck);
            if job.running {
                return Ok(info(&job));
            }
            *job = FsckJob { running: true, ..FsckJob::default() };
            job.progress.clone()
        };
        let served: Vec<Served> = state
            .filesystems
            .values()
            .map(|entry| Served {
                name: entry.record.name.clone(),
                ledger: entry.record.ledger,
                state: entry.files.state.clone(),
                owner: entry.owner.clone(),
            })
            .collect();
        let drives = state
            .drives
            .iter()
            .filter(|(_, entry)| entry.is_up())
            .filter_map(|(id, entry)| Some((*id, entry.service.as_ref()?.service())));
        let inventory = Running { runtime: self.runtime.clone(), drives: drives.collect() };
        let map = state.map.clone();
        drop(state);
        let node = self.clone();
        tokio::task::spawn_blocking(move || {
            let result = check_served(&served, &map, &inventory, &progress);
            let mut job = lock(&node.fsck);
            job.running = false;
            job.result = Some(result.map_err(|error| format!("{error:#}")));
        });
        Ok(info(&lock(&self.fsck)))
    }

    /// Progress of the check, or its findings.
    pub(super) fn fsck_now(&self) -> Result<FsckInfo, AdminError> {
        let job = lock(&self.fsck);
        if !job.running && job.result.is_none() {
            return Err(AdminError::not_found("no check was started"));
        }
        Ok(info(&job))
    }
}

fn lock(job: &Mutex<FsckJob>) -> std::sync::MutexGuard<'_, FsckJob> {
    job.lock().expect("no holder of this lock panics")
}

fn info(job: &FsckJob) -> FsckInfo {
    let (phase, items) = job.progress.now();
    let (error, filesystems) = match &job.result {
        Some(Err(error)) => (Some(error.clone()), Vec::new()),
        Some(Ok(filesystems)) => (None, filesystems.clone()),
        None => (None, Vec::new()),
    };
    FsckInfo { running: job.running, phase: phase.to_owned(), items, error, filesystems }
}
