//! The node's drives: creating, opening, adding and failing them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use admin::{DriveInfo, ScrubInfo, SpaceInfo};
use anyhow::{Context, Result, bail};
use base::env::{Caching, Env, OpenMode};
use base::units::{GIB, MIB, format_size};
use base::{ClusterId, DriveId, DriveUuid, NodeId};
use control::{DriveRecord, ScrubRecord};
use drive::{Drive, Existing, FormatOptions, OpenOptions, Preallocate, PreferIo};
use layout::DriveState;
use wire::drive::{DriveHealth, DriveMark, DriveService, DriveStat, IoPath};

use super::NodeDir;
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
/// The node of every drive, while there is only one.
const FIRST_NODE: NodeId = NodeId(0);
/// The smallest useful drive.
const BYTES_MIN: u64 = 64 * MIB;

/// A drive in the control ledger, with its service if it answers.
#[derive(Clone)]
pub(super) struct DriveEntry {
    pub(super) record: DriveRecord,
    pub(super) service: Option<Arc<Drive>>,
    /// Why the drive has no service.
    pub(super) problem: Option<String>,
}

/// Settings for opening drives.
#[derive(Debug, Clone, Copy)]
pub(super) struct DriveSettings {
    pub(super) io: IoChoice,
    pub(super) trim: TrimChoice,
    pub(super) memory: DriveMemory,
}

/// The place of a new drive.
#[derive(Debug, Clone)]
pub(super) struct NewDrive {
    pub(super) path: PathBuf,
    /// Size of a file that is created; a device or an existing file has its own size.
    pub(super) size_bytes: Option<u64>,
    pub(super) existing: Existing,
    pub(super) trim: TrimChoice,
}

impl DriveEntry {
    /// Opens a drive. A drive that cannot be opened stays in the list with the reason.
    pub(super) fn open(env: &Env, cluster: ClusterId, record: DriveRecord, settings: DriveSettings) -> Self {
        if matches!(record.state, DriveState::Failed | DriveState::Out) {
            return Self { record, service: None, problem: None };
        }
        let mut options = OpenOptions::new(cluster);
        options.mark = record.mark;
        options.io = match settings.io {
            IoChoice::Auto => PreferIo::Auto,
            IoChoice::Threads => PreferIo::ThreadPool,
        };
        options.trim = settings.trim.into();
        options.sums_cache_bytes = settings.memory.sums_cache_bytes;
        options.queue_bytes = settings.memory.queue_bytes;
        options.batch_bytes = settings.memory.batch_bytes;
        match Drive::open(env, record.id, Path::new(&record.path), &options) {
            Ok(drive) if drive.stat().uuid == record.uuid => {
                Self { record, service: Some(drive), problem: None }
            }
            Ok(drive) => {
                let problem = format!("another drive is at {}: uuid={}", record.path, drive.stat().uuid);
                Self { record, service: None, problem: Some(problem) }
            }
            Err(error) => {
                // With its causes: an operator can act on the error of the system.
                let error = format!("{:#}", anyhow::Error::new(error));
                tracing::error!(drive = %record.id, error, "drive cannot be opened");
                Self { record, service: None, problem: Some(error) }
            }
        }
    }

    pub(super) async fn close(self) -> Result<()> {
        let Some(service) = self.service else { return Ok(()) };
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
    pub(super) fn is_missing(&self) -> bool {
        self.state() == "missing"
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
            path: self.record.path.clone(),
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

/// Formats new drives. If one fails, the files made so far are removed.
pub(super) fn format_drives(
    env: &Env,
    cluster: ClusterId,
    first_id: u32,
    new_drives: &[NewDrive],
) -> Result<Vec<DriveRecord>> {
    let mut records = Vec::new();
    for (id, new_drive) in (first_id..).zip(new_drives) {
        match format_drive(env, cluster, DriveId(id), new_drive) {
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

fn format_drive(env: &Env, cluster: ClusterId, id: DriveId, new_drive: &NewDrive) -> Result<DriveRecord> {
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
    Ok(DriveRecord {
        id,
        uuid,
        path: path.to_string_lossy().into_owned(),
        node: FIRST_NODE,
        capacity_bytes: size,
        state: DriveState::Up,
        scrub: ScrubRecord::default(),
        mark: DriveMark::default(),
    })
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
