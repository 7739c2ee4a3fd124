//! Measures pieces of work: time, latencies, CPU of the processes behind the mount and of the machine, load of the disk.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::Pid;

use super::Subject;
use super::latency::Latencies;

/// The amount and time of a piece of work.
#[derive(Debug, Clone)]
pub(crate) struct Done {
    pub(crate) operations: u64,
    /// 0 if the figure is operations per second.
    pub(crate) bytes: u64,
    /// Threads that did it.
    pub(crate) jobs: u64,
    /// Latency of each operation, if that makes sense.
    pub(crate) latencies: Option<Latencies>,
    /// How long the jobs worked, without the fsync at the end.
    pub(crate) busy: Duration,
}

impl Done {
    /// Work of one job that is measured as a whole.
    pub(crate) fn whole(operations: u64, bytes: u64) -> Self {
        Self { operations, bytes, jobs: 1, latencies: None, busy: Duration::ZERO }
    }
}

/// The result of one piece of work.
#[derive(Debug, Clone)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) done: Done,
    pub(crate) time: Duration,
    /// CPU time of the processes behind the mount, without that of the kernel for the caller.
    pub(crate) cpu: Duration,
    /// CPU time of the whole machine: callers, kernel, the process and other processes.
    pub(crate) cpu_total: Duration,
    /// Load of all cores together.
    pub(crate) cpu_busy_percent: f64,
    pub(crate) disk_busy_percent: f64,
    /// Part of the time in which the disk was flushing its cache.
    pub(crate) flush_busy_percent: f64,
}

/// A resource that is busier than this is saturated.
const SATURATED_PERCENT: f64 = 85.0;
/// If the jobs under way differ from their number by more than this part, the figure is wrong.
const LITTLE_TOLERANCE: f64 = 0.15;

impl Figure {
    /// Operations or MB per second.
    pub(crate) fn rate(&self) -> f64 {
        let amount =
            if self.done.bytes > 0 { self.done.bytes as f64 / 1e6 } else { self.done.operations as f64 };
        amount / self.time.as_secs_f64()
    }

    pub(crate) fn unit(&self) -> &'static str {
        if self.done.bytes > 0 { "MB/s" } else { "/s" }
    }

    /// Microseconds of CPU per operation.
    pub(crate) fn cpu_us(&self) -> f64 {
        self.per_operation_us(self.cpu)
    }

    pub(crate) fn cpu_total_us(&self) -> f64 {
        self.per_operation_us(self.cpu_total)
    }

    fn per_operation_us(&self, time: Duration) -> f64 {
        time.as_secs_f64() * 1e6 / self.done.operations.max(1) as f64
    }

    /// The saturated resource. `latency` means none: the jobs waited for answers.
    pub(crate) fn saturated(&self) -> &'static str {
        let full = |percent: f64| percent >= SATURATED_PERCENT;
        match (full(self.cpu_busy_percent), full(self.flush_busy_percent), full(self.disk_busy_percent)) {
            (true, false, true) => "cpu+disk",
            (true, true, _) => "cpu+fsync",
            (true, false, false) => "cpu",
            (false, true, _) => "fsync rate",
            (false, false, true) => "disk",
            (false, false, false) => "latency",
        }
    }

    /// Operations under way on average; `None` if latencies were not measured.
    pub(crate) fn under_way(&self) -> Option<f64> {
        Some(self.done.latencies.as_ref()?.under_way(self.done.busy))
    }

    /// Whether rate, latency and number of jobs agree; `None` if latencies were not measured.
    pub(crate) fn obeys_littles_law(&self) -> Option<bool> {
        self.under_way().map(|under_way| (under_way / self.done.jobs as f64 - 1.0).abs() <= LITTLE_TOLERANCE)
    }
}

/// Counters of the machine and of one process at one moment.
struct Counters {
    at: Instant,
    process_ticks: u64,
    machine_ticks: u64,
    idle_ticks: u64,
    disk: DiskCounters,
}

#[derive(Clone, Copy, Default)]
struct DiskCounters {
    busy_ms: u64,
    flush_ms: u64,
}

/// Collects the figures of one subject.
pub(crate) struct Meter {
    device: (u32, u32),
    only: Option<String>,
    figures: Vec<Figure>,
}

/// The kernel counts CPU time for user space in hundredths of a second on every architecture we support.
const TICKS_PER_SECOND: u64 = 100;

impl Meter {
    /// Watches the disk of `directory`. With `only`, measures only work whose name contains it.
    pub(crate) fn new(directory: &Path, only: Option<&str>) -> Result<Self> {
        let device = rustix::fs::stat(directory)?.st_dev;
        let device = (rustix::fs::major(device), rustix::fs::minor(device));
        Ok(Self { device, only: only.map(str::to_owned), figures: Vec::new() })
    }

    pub(crate) fn figures(self) -> Vec<Figure> {
        self.figures
    }

    /// Whether work with this name is measured.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }

    /// Does the work, and keeps its figure if it is wanted.
    pub(crate) fn measure(
        &mut self,
        subject: &Subject,
        name: &str,
        work: impl FnOnce() -> Result<Done>,
    ) -> Result<()> {
        if !self.wants(name) {
            return work().map(drop);
        }
        let before = self.counters(subject)?;
        let done = work().with_context(|| name.to_owned())?;
        let after = self.counters(subject)?;
        let time = after.at - before.at;
        let machine = (after.machine_ticks - before.machine_ticks).max(1);
        let idle = after.idle_ticks.saturating_sub(before.idle_ticks);
        let cpu_ticks = after.process_ticks.saturating_sub(before.process_ticks);
        let of_time = |before: u64, after: u64| {
            (after.saturating_sub(before) as f64 / 10.0 / time.as_secs_f64()).min(100.0)
        };
        self.figures.push(Figure {
            name: name.to_owned(),
            done,
            time,
            cpu: Duration::from_millis(cpu_ticks * 1000 / TICKS_PER_SECOND),
            cpu_total: Duration::from_millis(machine.saturating_sub(idle) * 1000 / TICKS_PER_SECOND),
            cpu_busy_percent: 100.0 * (1.0 - idle as f64 / machine as f64),
            disk_busy_percent: of_time(before.disk.busy_ms, after.disk.busy_ms),
            flush_busy_percent: of_time(before.disk.flush_ms, after.disk.flush_ms),
        });
        Ok(())
    }

    fn counters(&self, subject: &Subject) -> Result<Counters> {
        let process_ticks = subject.pids().into_iter().map(process_ticks).sum::<Result<u64>>()?;
        let (machine_ticks, idle_ticks) = machine_ticks()?;
        let disk = self.disk_counters()?;
        Ok(Counters { at: Instant::now(), process_ticks, machine_ticks, idle_ticks, disk })
    }

    /// Fields of the disk's line in /proc/diskstats; zeros if the filesystem is on no disk.
    fn disk_counters(&self) -> Result<DiskCounters> {
        let text = std::fs::read_to_string("/proc/diskstats").context("read /proc/diskstats")?;
        let is_ours = |fields: &[&str]| {
            fields.first().and_then(|major| major.parse().ok()) == Some(self.device.0)
                && fields.get(1).and_then(|minor| minor.parse().ok()) == Some(self.device.1)
        };
        let fields = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let Some(ours) = fields.into_iter().find(|fields| is_ours(fields)) else {
            return Ok(DiskCounters::default());
        };
        let field = |index: usize| ours.get(index).and_then(|text| text.parse().ok()).unwrap_or(0);
        Ok(DiskCounters { busy_ms: field(12), flush_ms: field(19) })
    }
}

/// User and system time of a process with all its threads.
pub(crate) fn process_ticks(pid: Pid) -> Result<u64> {
    let path = format!("/proc/{}/stat", pid.as_raw_pid());
    let stat = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    // Fields are counted from the third, after the name in parentheses.
    let (_, rest) = stat.rsplit_once(") ").context("name in /proc/PID/stat")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let field = |index: usize| fields.get(index).and_then(|text| text.parse::<u64>().ok());
    Ok(field(11).context("utime")? + field(12).context("stime")?)
}

/// The ticks of all cores together, and the idle ones among them.
fn machine_ticks() -> Result<(u64, u64)> {
    let stat = std::fs::read_to_string("/proc/stat").context("read /proc/stat")?;
    let line = stat.lines().next().context("first line of /proc/stat")?;
    let ticks: Vec<u64> = line.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
    // User time contains guest time, so only the first eight fields are added.
    Ok((ticks.iter().take(8).sum(), ticks.get(3).unwrap_or(&0) + ticks.get(4).unwrap_or(&0)))
}
