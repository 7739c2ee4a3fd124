//! The machine itself: kernel, clock, processor, memory, limits, and the disk with the node's directory.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base::env::{Caching, Env, OpenMode};
use base::units::{GIB, format_size};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, getrlimit};
use wire::cluster::Finding;

use super::{median, problem, shown, unknown, warning, well};
use crate::node::{NodeDir, read_proc};

/// With less memory, a node has not more than the least budget.
const MEMORY_BYTES: u64 = 2 * GIB;
/// Open files of a node with many connections.
const OPEN_FILES: u64 = 16_384;
/// Free bytes below which the disk of the metadata counts as nearly full.
const FREE_BYTES: u64 = 4 * GIB;
/// Syncs that are measured, and so long at most.
const SYNCS: usize = 41;
const SYNCS_NS: u64 = 2_000_000_000;
/// A disk that takes longer for a sync makes changes of metadata slow.
const SYNC_SLOW: Duration = Duration::from_millis(5);

pub(super) fn look(env: &Env, dir: &NodeDir) -> Vec<Finding> {
    let processor = text("/proc/cpuinfo");
    let memory = text("/proc/meminfo");
    let governor = text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
    let all = [
        Some(kernel()),
        Some(fuse()),
        Some(io_uring()),
        Some(clock()),
        Some(instructions(&processor)),
        frequency(governor.trim()),
        Some(memory_of(&memory)),
        Some(open_files(getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX))),
        Some(room(env, dir.root())),
        Some(syncs(env, dir.root())),
    ];
    all.into_iter().flatten().collect()
}

/// A file of the kernel; empty if it is not there.
fn text(path: &str) -> String {
    read_proc(Path::new(path)).unwrap_or_default()
}

fn kernel() -> Finding {
    let name = rustix::system::uname();
    well("kernel", format!("Linux {}", name.release().to_string_lossy()))
}

fn fuse() -> Finding {
    match rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(_) => well("fuse", "/dev/fuse can be opened"),
        Err(error) => problem(
            "fuse",
            format!("/dev/fuse cannot be opened: {error}"),
            "nothing can be mounted here; S3 and drives work",
            "load the kernel module (modprobe fuse), or give the container the device",
        ),
    }
}

fn io_uring() -> Finding {
    match drive::io_uring_works() {
        Ok(()) => well("io_uring", "io_uring is allowed"),
        Err(error) => warning(
            "io_uring",
            format!("io_uring is not allowed: {error}"),
            "drives are read and written by a pool of threads, with more CPU time for small requests",
            "see sysctl kernel.io_uring_disabled, and the seccomp profile of the container",
        ),
    }
}

fn clock() -> Finding {
    // SAFETY: all bytes zero is a valid `timex`, and with `modes` 0 the call changes nothing but that.
    let state = unsafe {
        let mut timex: libc::timex = std::mem::zeroed();
        libc::adjtimex(&mut timex)
    };
    match state {
        libc::TIME_ERROR => warning(
            "clock",
            "nothing keeps the clock right",
            "S3 requests fail when it is off by 15 minutes, tokens and certificates expire early or late, times of files of \
             several machines do not compare",
            "run a client of NTP (systemd-timesyncd, chrony)",
        ),
        -1 => unknown("clock", "the kernel does not tell whether something keeps the clock right"),
        _ => well("clock", "the clock is kept right"),
    }
}

/// Instructions that make encryption and erasure coding fast.
fn instructions(cpuinfo: &str) -> Finding {
    let cores = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags")).unwrap_or_default();
    let flags: BTreeSet<&str> = flags.split([' ', '\t', ':']).collect();
    if cpuinfo.contains("Features") || flags.len() < 2 {
        return unknown("cpu", "the kernel tells no x86 instructions");
    }
    let has = |name| flags.contains(name);
    let found = format!("{cores} cores");
    if !has("aes") {
        let advice = "let the virtual machine have the processor of its host (cpu mode host-passthrough)";
        let cost = "TLS between nodes and to object stores takes several times the CPU time";
        return warning("cpu", format!("{found}, without AES instructions"), cost, advice);
    }
    if !has("avx2") {
        let advice = "let the virtual machine have the processor of its host (cpu mode host-passthrough)";
        let cost = "erasure coding takes some ten times the CPU time";
        return warning("cpu", format!("{found}, without AVX2"), cost, advice);
    }
    well("cpu", format!("{found}, with AES and AVX2"))
}

fn frequency(governor: &str) -> Option<Finding> {
    match governor {
        "" | "performance" | "schedutil" => None,
        other => Some(warning(
            "governor",
            format!("the frequency of the processor is governed by {other}"),
            "short requests run at a low frequency, and take longer",
            "cpupower frequency-set -g performance",
        )),
    }
}

fn memory_of(meminfo: &str) -> Finding {
    let bytes = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().ok()? << 10)
    };
    let Some(total) = bytes("MemTotal") else {
        return unknown("memory", "the kernel tells no size of memory");
    };
    let swapped = bytes("SwapTotal").unwrap_or(0).saturating_sub(bytes("SwapFree").unwrap_or(0));
    let found = format!("{} of memory", format_size(total));
    if total < MEMORY_BYTES {
        let cost = "caches are small, and few S3 requests run at a time";
        return warning("memory", found, cost, "give the machine 2 GiB or more");
    }
    if swapped > GIB {
        let found = format!("{found}, and {} are swapped out", format_size(swapped));
        let cost =
            "a node whose memory is swapped out may miss its deadlines, so that others take it for dead";
        return warning(
            "memory",
            found,
            cost,
            "find what needs so much memory (ps -e -o rss,comm --sort -rss | head)",
        );
    }
    well("memory", found)
}

fn open_files(limit: u64) -> Finding {
    let found = format!("a process may open {limit} files");
    if limit >= OPEN_FILES {
        return well(
            "open-files",
            if limit == u64::MAX { "any number of open files".to_owned() } else { found },
        );
    }
    let cost = "S3 and other nodes are refused connections when many are open";
    warning("open-files", found, cost, "raise the limit: LimitNOFILE=65536 in the unit, or ulimit -Hn 65536")
}

/// The directory of the node, or the nearest above it that exists.
fn existing(env: &Env, dir: &Path) -> PathBuf {
    let absolute = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
    let found = absolute.ancestors().find(|dir| env.files.exists(dir));
    found.map(Path::to_owned).unwrap_or_else(|| "/".into())
}

fn room(env: &Env, dir: &Path) -> Finding {
    let dir = existing(env, dir);
    match env.files.free_bytes(&dir) {
        Err(error) => unknown("room", format!("the free space of {} is not known: {error}", dir.display())),
        Ok(free) if free < FREE_BYTES => warning(
            "room",
            format!("the disk of {} has {} left", dir.display(), format_size(free)),
            "when it is full, nothing in the metadata changes",
            "free some space, or put the node's directory on another disk",
        ),
        Ok(free) => well("room", format!("the disk of {} has {} left", dir.display(), format_size(free))),
    }
}

/// How fast the disk of the node's directory syncs.
fn syncs(env: &Env, dir: &Path) -> Finding {
    let dir = existing(env, dir);
    let measured = measure_syncs(env, &dir);
    let found = |time| format!("a sync on the disk of {} takes {}", dir.display(), shown(time));
    match measured {
        Ok(Some(time)) if time > SYNC_SLOW => warning(
            "sync",
            found(time),
            "where files have the metadata's log, creating, renaming, removing and the first fsync of a file wait for it; so do \
             the members of an etcd that Forebay runs",
            "put the node's directory on an SSD with protection against power loss",
        ),
        Ok(Some(time)) => well("sync", found(time)),
        Ok(None) => unknown("sync", "no sync was measured"),
        Err(error) => problem(
            "sync",
            format!("{} cannot be written: {error}", dir.display()),
            "a node cannot run there",
            "look at the mount and its rights",
        ),
    }
}

fn measure_syncs(env: &Env, dir: &Path) -> std::io::Result<Option<Duration>> {
    let path = dir.join(format!(".forebay-check-{:016x}", env.random.next_u64()));
    let file = env.files.open(&path, OpenMode::CreateNew, Caching::Buffered)?;
    let measured = (|| {
        let begun_ns = env.clock.boot_ns();
        let mut times = Vec::new();
        for index in 0..SYNCS {
            let before_ns = env.clock.boot_ns();
            if before_ns - begun_ns > SYNCS_NS {
                break;
            }
            file.write_at(&[7; 4096], index as u64 * 4096)?;
            file.sync_data()?;
            times.push(Duration::from_nanos(env.clock.boot_ns() - before_ns));
        }
        Ok(median(times))
    })();
    env.files.remove_file(&path)?;
    measured
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use wire::cluster::Grade;

    use super::*;

    fn grade(finding: &Finding) -> Grade {
        let says_what_to_do = !finding.cost.is_empty() && !finding.advice.is_empty();
        assert_eq!(says_what_to_do, finding.grade >= Grade::Warning, "{finding:?}");
        finding.grade
    }

    #[test]
    fn a_processor_without_fast_instructions_is_named() {
        let cpu =
            |flags: &str| instructions(&format!("processor\t: 0\nflags\t\t: {flags}\nprocessor\t: 1\n"));
        assert_eq!(grade(&cpu("fpu aes avx2")), Grade::Ok);
        assert!(cpu("fpu aes avx2").found.starts_with("2 cores"));
        assert_eq!(grade(&cpu("fpu avx2")), Grade::Warning);
        assert_eq!(grade(&cpu("fpu aes")), Grade::Warning);
        assert_eq!(grade(&instructions("processor : 0\nFeatures : aes\n")), Grade::Unknown);
        assert_eq!(grade(&instructions("")), Grade::Unknown);
    }

    #[test]
    fn little_or_swapped_memory_is_named() {
        let memory = |total_kb: u64, swapped_kb: u64| {
            let free_kb = (8 << 20) - swapped_kb;
            memory_of(&format!("MemTotal:  {total_kb} kB\nSwapTotal: 8388608 kB\nSwapFree: {free_kb} kB\n"))
        };
        assert_eq!(grade(&memory(4 << 20, 0)), Grade::Ok);
        assert_eq!(grade(&memory(1 << 20, 0)), Grade::Warning);
        assert_eq!(grade(&memory(4 << 20, 2 << 20)), Grade::Warning);
        assert_eq!(grade(&memory_of("")), Grade::Unknown);
    }

    #[test]
    fn the_kernel_tells_what_there_is() {
        let root = tempfile::tempdir().unwrap();
        let found = look(&Env::real(), &NodeDir::new(root.path()));
        let of = |code: &str| found.iter().find(|finding| finding.code == code).unwrap();
        assert_ne!(of("memory").grade, Grade::Unknown, "{found:?}");
        assert!(!cfg!(target_arch = "x86_64") || of("cpu").grade != Grade::Unknown, "{found:?}");
        assert!(found.iter().all(|finding| grade(finding) < Grade::Problem), "{found:?}");
    }

    #[test]
    fn limits_and_governors_are_named() {
        assert_eq!(grade(&open_files(1024)), Grade::Warning);
        assert_eq!(grade(&open_files(u64::MAX)), Grade::Ok);
        assert_eq!(frequency("performance"), None);
        assert_eq!(frequency(""), None);
        assert_eq!(frequency("powersave").map(|it| grade(&it)), Some(Grade::Warning));
    }

    #[test]
    fn a_directory_that_is_not_there_yet_is_measured_above_it_and_nothing_is_left() {
        let root = tempfile::tempdir().unwrap();
        let env = Env::real();
        let found = syncs(&env, &root.path().join("a/b"));
        assert!(grade(&found) <= Grade::Warning, "{found:?}");
        assert!(found.found.contains(root.path().to_str().unwrap()), "{found:?}");
        assert_eq!(env.files.list(root.path()).unwrap().len(), 0);
        assert_eq!(grade(&syncs(&env, Path::new("/proc/forebay"))), Grade::Problem);
    }
}
