//! Memory limits of the parts of a node, which together stay within one budget.
//!
//! The shares cover the worst case: each byte of dirty data is copied for encoding and for the drives before it is
//! durable, and changes that wait for the store are in memory twice while they are written.
//! `docs/operate/running.md` has the table.

use std::path::Path;

use anyhow::{Result, bail};
use base::env::Env;
use base::units::{GIB, MIB, format_size};

/// The smallest budget with which all tests pass.
pub(crate) const MEMORY_BYTES_MIN: u64 = 512 * MIB;
/// Cap of the default, which is a quarter of the machine's memory.
const DEFAULT_BYTES_MAX: u64 = 4 * GIB;
const DEFAULT_PART: u64 = 4;

/// Approximate memory of an idle S3 connection, and the additional memory of a request.
const CONNECTION_BYTES: u64 = 24 << 10;
const REQUEST_BYTES: u64 = 128 << 10;

/// Shares of the budget. Memory outside of these does not grow with load; the documentation describes what grows with
/// content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryPlan {
    /// The whole budget.
    pub(crate) budget_bytes: u64,
    /// Page cache of one local store.
    pub(crate) store_cache_bytes: usize,
    /// Changes of a ledger that wait for the local store.
    pub(crate) unstored_bytes: usize,
    /// Data written on a mount that is not durable yet.
    pub(crate) dirty_bytes: u64,
    /// Data written through S3 that is not durable yet.
    pub(crate) s3_dirty_bytes: u64,
    /// Bodies received through S3, until they are durable or their digests are computed.
    pub(crate) s3_bodies_bytes: u64,
    /// A client's cache of the extent maps of closed files.
    pub(crate) map_bytes: u64,
    /// Read-ahead of S3, all responses together.
    pub(crate) s3_ahead_bytes: u64,
    /// Most S3 connections at once, and most requests under way.
    pub(crate) s3_connections: usize,
    pub(crate) s3_requests: usize,
    /// Blobs that a filesystem makes for its object store.
    pub(crate) blobs_bytes: u64,
    /// A client's cache of bytes fetched from an object store.
    pub(crate) fetched_bytes: u64,
    /// Content that a request brings back from the store to drives.
    pub(crate) returning_bytes: u64,
    /// Memory of each drive.
    pub(crate) drive: DriveMemory,
    /// Free buffers that drives keep for reuse.
    pub(crate) spare_bytes: usize,
}

/// Memory of one drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DriveMemory {
    /// Block checksums.
    pub(crate) sums_cache_bytes: u64,
    /// Puts in the queue.
    pub(crate) queue_bytes: u64,
    /// One group commit.
    pub(crate) batch_bytes: u64,
}

impl MemoryPlan {
    /// Divides a budget among drives, filesystems, and the local stores of each filesystem.
    pub(crate) fn new(budget_bytes: u64, drives: usize, filesystems: usize, stores: usize) -> Self {
        let part = |of: u64| budget_bytes / of;
        let (drives, filesystems) = (drives.max(1) as u64, filesystems.max(1) as u64);
        let stores = filesystems * stores.max(1) as u64;
        Self {
            budget_bytes,
            store_cache_bytes: (part(8) / stores).clamp(4 * MIB, GIB) as usize,
            unstored_bytes: (part(32) / filesystems).clamp(4 * MIB, 256 * MIB) as usize,
            dirty_bytes: (part(12) / filesystems).clamp(16 * MIB, 256 * MIB),
            s3_dirty_bytes: part(24).min(128 * MIB),
            s3_bodies_bytes: part(64).min(64 * MIB),
            map_bytes: (part(32) / (filesystems + 1)).clamp(4 * MIB, 256 * MIB),
            s3_ahead_bytes: part(20).min(96 * MIB),
            blobs_bytes: (part(16) / filesystems).clamp(4 * MIB, 512 * MIB),
            returning_bytes: (part(64) / filesystems).clamp(4 * MIB, 128 * MIB),
            fetched_bytes: (part(64) / (filesystems + 1)).clamp(4 * MIB, 40 * MIB),
            s3_connections: (part(40) / CONNECTION_BYTES).min(4096) as usize,
            s3_requests: (part(24) / REQUEST_BYTES).min(2048) as usize,
            drive: DriveMemory {
                sums_cache_bytes: (part(32) / drives).clamp(MIB, 32 * MIB),
                queue_bytes: (part(12) / drives).clamp(4 * MIB, 64 * MIB),
                batch_bytes: (part(32) / drives).clamp(MIB, 8 * MIB),
            },
            spare_bytes: part(32).min(64 * MIB) as usize,
        }
    }
}

/// The budget: the requested size, checked against the machine, or the default.
pub(crate) fn budget(env: &Env, asked_bytes: Option<u64>) -> Result<u64> {
    choose_budget(machine_bytes(env), asked_bytes)
}

fn choose_budget(machine_bytes: u64, asked_bytes: Option<u64>) -> Result<u64> {
    let machine = format_size(machine_bytes);
    match asked_bytes {
        Some(asked) if asked < MEMORY_BYTES_MIN => bail!(
            "memory is too little: memory={} least={}",
            format_size(asked),
            format_size(MEMORY_BYTES_MIN)
        ),
        Some(asked) if asked > machine_bytes => {
            bail!(
                "this machine has less memory, or may use less: memory={} machine={machine}",
                format_size(asked)
            )
        }
        Some(asked) => Ok(asked),
        None => Ok((machine_bytes / DEFAULT_PART).clamp(MEMORY_BYTES_MIN, DEFAULT_BYTES_MAX)),
    }
}

/// The machine's memory, or the limit of the control group if that is lower.
fn machine_bytes(env: &Env) -> u64 {
    let memory = rustix::system::sysinfo();
    let total = memory.totalram as u64 * u64::from(memory.mem_unit);
    cgroup_limit(|path| read_text(env, path)).map_or(total, |limit| limit.min(total))
}

/// Reads a file of /proc or /sys; these have no size that tells how much to read.
fn read_text(env: &Env, path: &Path) -> Option<String> {
    let file = env.files.exists(path).then(|| super::start::read_proc(path))?;
    file.ok()
}

/// The lowest limit of the process's control groups, of either version.
fn cgroup_limit(read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let groups = read(Path::new("/proc/self/cgroup"))?;
    let mut lowest: Option<u64> = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, fields.next()?);
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|one| one == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        // A container may see its own group as the root: then the path does not exist, and the root's limit is the
        // group's.
        for part in Path::new(group.trim_start_matches('/')).ancestors() {
            let limit = read(&Path::new(root).join(part).join(file));
            let limit = limit.and_then(|text| text.trim().parse().ok());
            lowest = lowest.into_iter().chain(limit).min();
        }
    }
    lowest
}

/// Memory of the process now, without memory that it shares with other processes.
pub(super) fn resident_bytes() -> u64 {
    let text = super::start::read_proc(Path::new("/proc/self/status")).unwrap_or_default();
    let kib =
        text.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse().ok());
    kib.map_or(0, |kib: u64| kib << 10)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[track_caller]
    fn check(machine_gib: u64, asked: Option<u64>, expected: Result<u64, &str>) {
        match (choose_budget(machine_gib * GIB, asked), expected) {
            (Ok(budget), Ok(expected)) => assert_eq!(budget, expected),
            (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
            (got, _) => panic!("{got:?} is not {expected:?}"),
        }
    }

    #[test]
    fn the_budget_is_what_was_asked_for_or_suits_the_machine() {
        check(24, None, Ok(4 * GIB));
        check(8, None, Ok(2 * GIB));
        check(1, None, Ok(512 * MIB));
        check(24, Some(512 * MIB), Ok(512 * MIB));
        check(24, Some(511 * MIB), Err("too little: memory=511.00 MiB least=512.00 MiB"));
        check(24, Some(25 * GIB), Err("this machine has less memory"));
    }

    #[test]
    fn the_parts_fit_into_the_budget() {
        for (budget_mib, drives, filesystems, stores) in
            [(512, 1, 1, 1), (512, 6, 1, 2), (1024, 12, 1, 2), (4096, 6, 4, 2), (65_536, 24, 2, 2)]
        {
            let plan = MemoryPlan::new(budget_mib * MIB, drives, filesystems, stores);
            let (drives, filesystems, stores) = (drives as u64, filesystems as u64, stores as u64);
            let sum = plan.store_cache_bytes as u64 * stores * filesystems
                + 2 * plan.unstored_bytes as u64 * filesystems
                + plan.dirty_bytes * filesystems
                + plan.s3_dirty_bytes
                + plan.s3_bodies_bytes
                + plan.map_bytes * (filesystems + 1)
                + plan.s3_ahead_bytes
                + plan.blobs_bytes * filesystems
                + plan.fetched_bytes * (filesystems + 1)
                + plan.returning_bytes * filesystems
                + plan.s3_connections as u64 * CONNECTION_BYTES
                + plan.s3_requests as u64 * REQUEST_BYTES
                + (plan.drive.sums_cache_bytes + plan.drive.queue_bytes + plan.drive.batch_bytes) * drives
                + plan.spare_bytes as u64;
            assert!(sum <= budget_mib * MIB * 3 / 4, "{} of {budget_mib} MiB: {plan:?}", sum / MIB);
        }
    }

    #[test]
    fn the_lowest_limit_of_the_control_groups_counts() {
        let limit = |files: &[(&str, &str)]| {
            cgroup_limit(|path| {
                let found = files.iter().find(|(name, _)| Path::new(name) == path);
                found.map(|(_, text)| (*text).to_owned())
            })
        };
        let own = ("/proc/self/cgroup", "0::/a/b\n");
        assert_eq!(limit(&[]), None);
        assert_eq!(limit(&[own, ("/sys/fs/cgroup/a/b/memory.max", "max\n")]), None);
        assert_eq!(
            limit(&[
                own,
                ("/sys/fs/cgroup/a/b/memory.max", "3000\n"),
                ("/sys/fs/cgroup/a/memory.max", "2000\n")
            ]),
            Some(2000)
        );
        assert_eq!(limit(&[own, ("/sys/fs/cgroup/memory.max", "700\n")]), Some(700), "as in a container");
        let first = ("/proc/self/cgroup", "4:cpu:/\n3:memory,rdma:/x\n");
        assert_eq!(limit(&[first, ("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "900\n")]), Some(900));
    }
}
