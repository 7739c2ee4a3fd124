//! The node's drives: creating, opening, adding and failing them.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use admin::{DriveInfo, ScrubInfo, SpaceInfo};
use anyhow::{Context, Result, bail};
use base::env::{Caching, Env, OpenMode};
use base::units::{GIB, MIB, format_size};
use base::{ClusterId, DriveId, DriveUuid, NodeId};
use control::DriveRecord;
use drive::{Drive, Existing, FormatOptions, OpenOptions, Preallocate, PreferIo};
use layout::DriveState;
use wire::cluster::HostedDrive;
use wire::drive::{AwayDrive, DriveHealth, DriveService, DriveStat, IoPath};

use super::NodeDir;
use super::local_drives::{LocalDrives, NO_PATH};
use super::memory::DriveMemory;
use super::settings::TrimChoice;
use super::start::IoChoice;

/// Default size of a drive file if there is room.
const DEFAULT_BYTES: u64 = 10 * GIB;
/// Divisor of the free space: by default all drive files and the new metadata together take this part of it.
const FREE_PART: u64 = 10;
/// Upper bound of a new node's metadata, taken from that part.
const METADATA_BYTES: u64 = 64 * MIB;
/// A start says what it does with less free space than this.
const PLENTY_BYTES: u64 = 20_000_000_000;
/// Attempts to open a drive that another process is still closing, and the pause between them.
const RETURN_ATTEMPTS: u32 = 100;
const RETURN_PAUSE: Duration = Duration::from_millis(50);
/// The smallest useful drive.
const BYTES_MIN: u64 = 64 * MIB;

/// A drive that is in use: in this machine, or at another node.
#[derive(Clone)]
pub(crate) struct OpenDrive {
    service: Arc<dyn DriveService>,
    here: Option<Arc<Drive>>,
    /// It was an older copy of itself when it was opened, and this is how far it said it was.
    pub(super) older: Option<String>,
    /// How often it had been opened then.
    incarnation: u32,
}

impl OpenDrive {
    fn here(drive: Arc<Drive>) -> Self {
        let recovery = drive.recovery();
        let older = recovery.has_gap.then(|| format!("{:?}", recovery.found));
        Self { incarnation: drive.stat().mark.incarnation, service: drive.clone(), here: Some(drive), older }
    }

    /// A drive of a host, which says whether it is an older copy of itself.
    pub(super) fn there(drive: Arc<dyn DriveService>, older: Option<String>) -> Self {
        Self { incarnation: drive.stat().mark.incarnation, service: drive, here: None, older }
    }

    /// Its service.
    pub(crate) fn service(&self) -> Arc<dyn DriveService> {
        self.service.clone()
    }

    /// Its service, if it is in this machine.
    pub(crate) fn local(&self) -> Option<Arc<dyn DriveService>> {
        self.here.clone().map(|drive| drive as Arc<dyn DriveService>)
    }

    /// Whether this is the drive that its machine has open.
    pub(super) fn is_the(&self, open: &Arc<dyn DriveService>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.service), Arc::as_ptr(open))
    }

    /// Whether it was opened anew since: it may be an older copy of itself now.
    pub(super) fn is_another(&self) -> bool {
        self.service.stat().mark.incarnation != self.incarnation
    }
}

impl Deref for OpenDrive {
    type Target = dyn DriveService;

    fn deref(&self) -> &Self::Target {
        &*self.service
    }
}

/// A drive in the control ledger, with its service if it answers.
#[derive(Clone)]
pub(crate) struct DriveEntry {
    pub(super) record: DriveRecord,
    /// Where it is in its machine; `None` if that is not known.
    pub(super) path: Option<PathBuf>,
    pub(super) service: Option<OpenDrive>,
    /// Why the drive has no service.
    pub(super) problem: Option<String>,
    /// The boot time before which no other attempt is made to use it.
    pub(super) retry_ns: u64,
}

/// Settings for opening drives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DriveSettings {
    pub(crate) io: IoChoice,
    pub(crate) trim: TrimChoice,
    pub(crate) memory: DriveMemory,
}

/// The place of a new drive.
#[derive(Debug, Clone)]
pub(crate) struct NewDrive {
    pub(super) path: PathBuf,
    /// Size of a file that is created; a device or an existing file has its own size.
    pub(super) size_bytes: Option<u64>,
    pub(super) existing: Existing,
    pub(crate) trim: TrimChoice,
}

impl DriveEntry {
    /// A drive that is not open.
    pub(crate) fn closed(record: DriveRecord, path: Option<PathBuf>) -> Self {
        Self { record, path, service: None, problem: None, retry_ns: 0 }
    }

    pub(crate) fn record(&self) -> &DriveRecord {
        &self.record
    }

    pub(crate) fn set_record(&mut self, record: DriveRecord) {
        self.record = record;
    }

    /// Notes that the drive is elsewhere in this machine, unless it is open.
    pub(crate) fn set_path(&mut self, path: PathBuf) {
        if self.service.is_none() {
            (self.path, self.problem) = (Some(path), None);
        }
    }

    pub(crate) fn path(&self) -> Option<&PathBuf> {
        self.path.as_ref()
    }

    pub(crate) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// Its service, if it is open and in this machine.
    pub(crate) fn local(&self) -> Option<Arc<dyn DriveService>> {
        self.service.as_ref()?.local()
    }

    /// Its service. If it may come back from its host, one that is not reached. `own` is the node whose drives this process opens
    /// itself.
    pub(super) fn service_or_away(&self, own: Option<NodeId>) -> Option<Arc<dyn DriveService>> {
        let may_return = matches!(self.record.state, DriveState::Up | DriveState::Leaving);
        match &self.service {
            Some(open) => Some(open.service()),
            None if Some(self.record.node) != own && may_return => Some(Arc::new(AwayDrive(self.record.id))),
            None => None,
        }
    }

    pub(crate) fn take_service(&mut self) -> Option<OpenDrive> {
        self.service.take()
    }

    /// What the owner of the control ledger is told of it.
    pub(crate) fn hosted(&self, drive: DriveId) -> HostedDrive {
        HostedDrive {
            drive,
            path: self.path_text(),
            problem: self.problem.clone(),
            older: self.service.as_ref().and_then(|open| open.older.clone()),
        }
    }

    /// Opens a drive of this machine. A drive that cannot be opened stays in the list with the reason.
    pub(crate) fn open(
        env: &Env,
        cluster: ClusterId,
        record: DriveRecord,
        path: Option<PathBuf>,
        settings: DriveSettings,
    ) -> Self {
        let closed = Self::closed(record, path);
        let record = &closed.record;
        if matches!(record.state, DriveState::Failed | DriveState::Out) {
            return closed;
        }
        let Some(path) = &closed.path else {
            return Self { problem: Some(NO_PATH.to_owned()), ..closed };
        };
        let mut options = OpenOptions::new(cluster);
        options.uuid = Some(record.uuid);
        options.mark = record.mark;
        options.io = match settings.io {
            IoChoice::Auto => PreferIo::Auto,
            IoChoice::Threads => PreferIo::ThreadPool,
        };
        options.trim = settings.trim.into();
        options.sums_cache_bytes = settings.memory.sums_cache_bytes;
        options.queue_bytes = settings.memory.queue_bytes;
        options.batch_bytes = settings.memory.batch_bytes;
        match Drive::open(env, record.id, path, &options) {
            Ok(drive) => Self { service: Some(OpenDrive::here(drive)), ..closed },
            Err(error) => {
                // With its causes: an operator can act on the error of the system.
                let error = format!("{:#}", anyhow::Error::new(error));
                tracing::error!(drive = %record.id, error, "drive cannot be opened");
                Self { problem: Some(error), ..closed }
            }
        }
    }

    pub(crate) async fn close(self) -> Result<()> {
        let Some(service) = self.service.and_then(|open| open.here) else { return Ok(()) };
        if service.health() == DriveHealth::Failed {
            return Ok(());
        }
        service
            .close()
            .await
            .context("drive failed while closing; its data is recovered from the log of frames")
    }

    pub(super) fn state(&self) -> &'static str {
        let health = self.service.as_ref().map(|service| service.health());
        match (self.record.state, health) {
            (DriveState::Out, _) => "out",
            (DriveState::Failed, _) | (_, Some(DriveHealth::Failed)) => "failed",
            (_, None | Some(DriveHealth::Unreachable)) => "missing",
            (DriveState::Up, Some(DriveHealth::Up)) => "up",
            (DriveState::Leaving, Some(DriveHealth::Up)) => "leaving",
        }
    }

    /// How often the drive had been opened when it was taken into use; 0 if it is not in use.
    pub(super) fn incarnation(&self) -> u32 {
        self.service.as_ref().map_or(0, |open| open.incarnation)
    }

    pub(super) fn is_up(&self) -> bool {
        self.state() == "up"
    }

    /// Whether shards on the drive can be read.
    pub(super) fn is_readable(&self) -> bool {
        matches!(self.state(), "up" | "leaving")
    }

    /// State of the drive, if its shards can be read.
    pub(super) fn stat_if_readable(&self) -> Option<DriveStat> {
        self.service.as_ref().filter(|_| self.is_readable()).map(|service| service.stat())
    }

    /// Whether the drive is only absent and has not failed: opening it again is enough.
    pub(crate) fn is_missing(&self) -> bool {
        self.state() == "missing"
    }

    /// Where it is, for people.
    pub(super) fn path_text(&self) -> String {
        self.path.as_ref().map_or_else(|| "-".to_owned(), |path| path.display().to_string())
    }

    pub(super) fn info(&self) -> DriveInfo {
        let stat = self.service.as_ref().map(|service| service.stat());
        let space = stat.as_ref().map_or(SpaceInfo::default(), |stat| SpaceInfo {
            capacity_bytes: stat.capacity_bytes,
            live_bytes: stat.live_bytes,
            owed_bytes: 0,
            garbage_bytes: stat.garbage_bytes,
            reserved_bytes: stat.reserved_bytes,
            free_bytes: stat.free_bytes,
        });
        let io_path = stat.as_ref().map(|stat| match stat.io_path {
            IoPath::IoUring => "io_uring",
            IoPath::ThreadPool => "thread_pool",
            IoPath::Simulated => "simulated",
        });
        DriveInfo {
            id: self.record.id.0,
            uuid: self.record.uuid.to_string(),
            path: self.path_text(),
            node: self.record.node.0,
            state: self.state().to_owned(),
            reason: self.problem.clone().or_else(|| stat.as_ref().and_then(why_not_well)),
            full: stat.as_ref().is_some_and(|stat| stat.full),
            io_path: io_path.map(str::to_owned),
            space,
            shards: stat.as_ref().map_or(0, |stat| stat.shards),
            trimmed_bytes: stat.as_ref().map_or(0, |stat| stat.trimmed_bytes),
            write_limit_bytes_per_s: stat.as_ref().and_then(|stat| stat.write_limit_bytes_per_s),
            groups: 0,
            scrub: ScrubInfo::default(),
            damaged_shards: stat.as_ref().map_or(0, |stat| stat.bad_shards),
        }
    }
}

/// The problem of a drive that is present.
fn why_not_well(stat: &DriveStat) -> Option<String> {
    let host_full = "the filesystem that holds it is full, so nothing is written: free some space there, it goes on by \
                     itself";
    stat.failure.clone().or_else(|| stat.host_full.then(|| host_full.to_owned()))
}

/// The drives of a new cluster.
pub(super) struct DrivePlan {
    pub(super) drives: Vec<NewDrive>,
    /// Why the drive files are smaller or fewer than usual.
    pub(super) note: Option<String>,
}

/// The drives of a new cluster: the given paths, or files in the node's directory. Of `count` files without a size only as
/// many are made as the disk has room for, but at least `count_min`.
pub(super) fn plan_drives(
    env: &Env,
    dir: &NodeDir,
    paths: &[PathBuf],
    (count, count_min): (u32, u32),
    size_bytes: Option<u64>,
    trim: TrimChoice,
) -> Result<DrivePlan> {
    let in_dir = paths.is_empty();
    let files = match in_dir {
        true => count,
        false => paths.iter().filter(|path| !env.files.exists(path)).count() as u32,
    };
    let (made, default, note) = match size_bytes {
        Some(size) => (files, size, None),
        None if files == 0 => (0, 0, None),
        None => default_files(env, dir, files, if in_dir { count_min } else { files })?,
    };
    let drives = if in_dir {
        let path = |index| dir.drives().join(format!("{index}.img"));
        // There is no cluster yet, so files of an earlier, interrupted attempt may be overwritten.
        let existing = Existing::Overwrite;
        let drive = |index| NewDrive { path: path(index), size_bytes: Some(default), existing, trim };
        (0..made).map(drive).collect()
    } else {
        let drive = |path: &PathBuf| {
            let size_bytes = (!env.files.exists(path)).then_some(default);
            NewDrive { path: path.clone(), size_bytes, existing: Existing::Keep, trim }
        };
        paths.iter().map(drive).collect()
    };
    Ok(DrivePlan { drives, note })
}

/// Number and size of drive files by default, and what to tell about them.
fn default_files(env: &Env, dir: &NodeDir, count: u32, count_min: u32) -> Result<(u32, u64, Option<String>)> {
    let free = env.files.free_bytes(dir.root()).context("looking at the free space")?;
    let Some((made, each)) = files_in(free, count, count_min) else {
        bail!(
            "not enough space for {count_min} drives of at least {}: free={} dir={}; free some, take fewer drives, or give \
             --drive-size",
            format_size(BYTES_MIN),
            format_size(free),
            dir.root().display()
        );
    };
    let note = (free < PLENTY_BYTES).then(|| {
        let (free, each) = (format_size(free), format_size(each));
        match made == count {
            true => format!("only {free} are free, so each drive file has {each}"),
            false => {
                format!("only {free} are free, so there are {made} drive files of {each} instead of {count}")
            }
        }
    });
    Ok((made, each, note))
}

/// Number and size of drive files so that all and the metadata take a tenth of the free space: the disk has other uses.
/// Files of the smallest size may take up to half of it; if they would take more, there are fewer.
fn files_in(free: u64, count: u32, count_min: u32) -> Option<(u32, u64)> {
    let fit = u32::try_from(free / 2 / BYTES_MIN).unwrap_or(u32::MAX);
    let made = count.min(fit);
    if made < count_min {
        return None;
    }
    let part = (free / FREE_PART).saturating_sub(METADATA_BYTES);
    Some((made, (part / u64::from(made)).clamp(BYTES_MIN, DEFAULT_BYTES) / MIB * MIB))
}

/// Everything that is needed to make a drive in this machine.
#[derive(Clone)]
pub(crate) struct DriveMaker {
    pub(crate) env: Env,
    pub(crate) dir: NodeDir,
    pub(crate) cluster: ClusterId,
    pub(crate) node: NodeId,
    pub(crate) settings: DriveSettings,
    pub(crate) paths: Arc<LocalDrives>,
}

impl DriveMaker {
    /// Formats a drive under a number that no other has, notes its path, and opens it. Without a path it is a file in the node's
    /// directory.
    pub(crate) async fn make(
        &self,
        id: DriveId,
        path: Option<PathBuf>,
        size_bytes: Option<u64>,
    ) -> Result<DriveEntry> {
        let maker = self.clone();
        let make = move || {
            let Self { env, dir, cluster, node, settings, paths } = maker;
            let path = path.unwrap_or_else(|| dir.drives().join(format!("{id}.img")));
            let size_bytes = size_bytes.filter(|_| !env.files.exists(&path));
            let new = NewDrive { path, size_bytes, existing: Existing::Keep, trim: settings.trim };
            let (record, path) = format_drives(&env, (cluster, node), id.0, &[new])?.remove(0);
            paths.set([(record.uuid, path.clone())])?;
            Ok(DriveEntry::open(&env, cluster, record, Some(path), settings))
        };
        tokio::task::spawn_blocking(make).await?
    }

    /// The drive of the cluster that is at a path, and the whole path.
    pub(crate) async fn drive_at(&self, path: PathBuf) -> Result<Option<(DriveUuid, PathBuf)>> {
        let (env, cluster) = (self.env.clone(), self.cluster);
        let look = move || {
            let path = std::path::absolute(path)?;
            Ok(uuid_at(&env, cluster, &path).map(|uuid| (uuid, path)))
        };
        tokio::task::spawn_blocking(look).await?
    }

    /// Opens a drive again. Requests under way on the old service keep the device open until they end.
    pub(crate) async fn open_again(&self, record: DriveRecord, path: Option<PathBuf>) -> Result<DriveEntry> {
        let mut attempt = 0;
        loop {
            let (env, cluster, record) = (self.env.clone(), self.cluster, record.clone());
            let (path, settings) = (path.clone(), self.settings);
            let open = move || DriveEntry::open(&env, cluster, record, path, settings);
            let opened = tokio::task::spawn_blocking(open).await?;
            attempt += 1;
            let in_use = opened.problem.as_deref().is_some_and(|problem| problem.contains("in use"));
            if !in_use || attempt == RETURN_ATTEMPTS {
                return Ok(opened);
            }
            tokio::time::sleep(RETURN_PAUSE).await;
        }
    }
}

/// The drive of a cluster at a path.
pub(super) fn uuid_at(env: &Env, cluster: ClusterId, path: &Path) -> Option<DriveUuid> {
    let superblocks = drive::dump(env, path).ok()?.superblocks;
    let mut superblocks = superblocks.into_iter().filter_map(|found| found.superblock);
    superblocks.find(|superblock| superblock.cluster == cluster).map(|superblock| superblock.uuid)
}

/// Formats new drives, and returns their records and paths. If one fails, the files made so far are removed.
pub(crate) fn format_drives(
    env: &Env,
    (cluster, node): (ClusterId, NodeId),
    first_id: u32,
    new_drives: &[NewDrive],
) -> Result<Vec<(DriveRecord, PathBuf)>> {
    let mut records = Vec::new();
    for (id, new_drive) in (first_id..).zip(new_drives) {
        match format_drive(env, (cluster, node), DriveId(id), new_drive) {
            Ok(record) => records.push(record),
            Err(error) => {
                let made = new_drives.iter().take(records.len() + 1).filter(|made| made.size_bytes.is_some());
                for path in made.map(|made| &made.path).filter(|path| env.files.exists(path)) {
                    if let Err(error) = env.files.remove_file(path) {
                        tracing::warn!(%error, path = %path.display(), "file of a drive is left behind");
                    }
                }
                return Err(error);
            }
        }
    }
    Ok(records)
}

fn format_drive(
    env: &Env,
    (cluster, node): (ClusterId, NodeId),
    id: DriveId,
    new_drive: &NewDrive,
) -> Result<(DriveRecord, PathBuf)> {
    let path = std::path::absolute(&new_drive.path).context("resolving the path of a drive")?;
    if path.starts_with("/dev") && !env.files.exists(&path) {
        bail!("no such device: path={}", path.display());
    }
    let size = match new_drive.size_bytes {
        Some(size) => size,
        None => {
            let device = env.files.open(&path, OpenMode::Existing, Caching::Buffered);
            device
                .and_then(|device| device.len())
                .with_context(|| format!("cannot open {}", path.display()))?
        }
    };
    // The segments of a smaller drive are too small for a shard of usual length.
    if size < BYTES_MIN {
        bail!(
            "drive is too small: path={} size={} least={}",
            path.display(),
            format_size(size),
            format_size(BYTES_MIN)
        );
    }
    if let Some(parent) = path.parent() {
        env.files.create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    }
    let mut uuid = [0; 16];
    env.random.fill(&mut uuid);
    let uuid = DriveUuid(uuid);
    let options = FormatOptions {
        cluster,
        uuid,
        capacity_bytes: new_drive.size_bytes,
        segment_bytes: None,
        existing: new_drive.existing,
        // A file that gives space back allocates it on use.
        preallocate: if new_drive.trim == TrimChoice::Always {
            Preallocate::Nothing
        } else {
            Preallocate::Reserve
        },
    };
    Drive::format(env, &path, &options).map_err(anyhow::Error::new)?;
    Ok((DriveRecord::new(id, uuid, node, size), path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(free: u64, (count, count_min): (u32, u32), expected: Option<(u32, u64)>) {
        let files = files_in(free, count, count_min);
        assert_eq!(files.map(|(made, each)| (made, each / MIB)), expected);
    }

    #[test]
    fn little_free_space_gives_smaller_files_then_fewer() {
        check(200 * GIB, (1, 1), Some((1, 10 * 1024)));
        check(20 * GIB, (1, 1), Some((1, 1984)));
        check(20 * GIB, (6, 6), Some((6, 330)));
        check(6 * GIB, (6, 2), Some((6, 91)));
        check(768 * MIB, (6, 2), Some((6, 64)));
        check(767 * MIB, (6, 2), Some((5, 64)));
        check(767 * MIB, (6, 6), None);
        check(256 * MIB, (6, 2), Some((2, 64)));
        check(255 * MIB, (6, 2), None);
        check(128 * MIB, (1, 1), Some((1, 64)));
        check(127 * MIB, (1, 1), None);
    }
}
