//! Measures pieces of work: time, CPU of the process behind the mount, what else was busy.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::Pid;

use super::Subject;

/// What a piece of work did.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Done {
    pub(crate) operations: u64,
    /// 0 if the figure is operations per second.
    pub(crate) bytes: u64,
}

/// The result of one piece of work.
#[derive(Debug, Clone)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) done: Done,
    pub(crate) time: Duration,
    /// CPU time of the process behind the mount; not that of the kernel on behalf of the caller.
    pub(crate) cpu: Duration,
    /// Of all cores together.
    pub(crate) cpu_busy_percent: f64,
    pub(crate) disk_busy_percent: f64,
}

/// Busy from here on is called saturated.
const SATURATED_PERCENT: f64 = 85.0;

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
        self.cpu.as_secs_f64() * 1e6 / self.done.operations.max(1) as f64
    }

    pub(crate) fn saturated(&self) -> &'static str {
        match (self.cpu_busy_percent >= SATURATED_PERCENT, self.disk_busy_percent >= SATURATED_PERCENT) {
            (true, true) => "cpu+disk",
            (true, false) => "cpu",
            (false, true) => "disk",
            (false, false) => "wait",
        }
    }
}

/// Counters of the machine and of one process at one moment.
struct Counters {
    at: Instant,
    process_ticks: u64,
    machine_ticks: u64,
    idle_ticks: u64,
    disk_busy_ms: u64,
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
    /// `directory` is on the disk that is watched. `only` leaves out work whose name does not contain it.
    pub(crate) fn new(directory: &Path, only: Option<&str>) -> Result<Self> {
        let device = rustix::fs::stat(directory)?.st_dev;
        let device = (rustix::fs::major(device), rustix::fs::minor(device));
        Ok(Self { device, only: only.map(str::to_owned), figures: Vec::new() })
    }

    pub(crate) fn figures(self) -> Vec<Figure> {
        self.figures
    }

    /// Does the work, if it is wanted, and keeps its figure.
    pub(crate) fn measure(
        &mut self,
        subject: &Subject,
        name: &str,
        work: impl FnOnce() -> Result<Done>,
    ) -> Result<()> {
        if self.only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
            return work().map(drop);
        }
        let before = self.counters(subject)?;
        let done = work().with_context(|| name.to_owned())?;
        let after = self.counters(subject)?;
        let time = after.at - before.at;
        let machine = (after.machine_ticks - before.machine_ticks).max(1) as f64;
        let idle = after.idle_ticks.saturating_sub(before.idle_ticks) as f64;
        let cpu_ticks = after.process_ticks.saturating_sub(before.process_ticks);
        let disk_ms = after.disk_busy_ms.saturating_sub(before.disk_busy_ms) as f64;
        self.figures.push(Figure {
            name: name.to_owned(),
            done,
            time,
            cpu: Duration::from_millis(cpu_ticks * 1000 / TICKS_PER_SECOND),
            cpu_busy_percent: 100.0 * (1.0 - idle / machine),
            disk_busy_percent: (disk_ms / 10.0 / time.as_secs_f64()).min(100.0),
        });
        Ok(())
    }

    fn counters(&self, subject: &Subject) -> Result<Counters> {
        let process_ticks = subject.pid().map_or(Ok(0), process_ticks)?;
        let (machine_ticks, idle_ticks) = machine_ticks()?;
        let disk_busy_ms = self.disk_busy_ms()?;
        Ok(Counters { at: Instant::now(), process_ticks, machine_ticks, idle_ticks, disk_busy_ms })
    }

    /// Field 13 of the disk's line in /proc/diskstats; 0 if the filesystem is on no disk.
    fn disk_busy_ms(&self) -> Result<u64> {
        let text = std::fs::read_to_string("/proc/diskstats").context("read /proc/diskstats")?;
        let is_ours = |fields: &[&str]| {
            fields.first().and_then(|major| major.parse().ok()) == Some(self.device.0)
                && fields.get(1).and_then(|minor| minor.parse().ok()) == Some(self.device.1)
        };
        let fields = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let ours = fields.filter(|fields| is_ours(fields)).find_map(|fields| fields.get(12)?.parse().ok());
        Ok(ours.unwrap_or(0))
    }
}

/// User and system time of a process with all its threads.
fn process_ticks(pid: Pid) -> Result<u64> {
    let path = format!("/proc/{}/stat", pid.as_raw_pid());
    let stat = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    // Fields are counted from the third, after the name in parentheses.
    let (_, rest) = stat.rsplit_once(") ").context("name in /proc/PID/stat")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let field = |index: usize| fields.get(index).and_then(|text| text.parse::<u64>().ok());
    Ok(field(11).context("utime")? + field(12).context("stime")?)
}

/// All ticks of all cores, and the idle ones among them.
fn machine_ticks() -> Result<(u64, u64)> {
    let stat = std::fs::read_to_string("/proc/stat").context("read /proc/stat")?;
    let line = stat.lines().next().context("first line of /proc/stat")?;
    let ticks: Vec<u64> = line.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
    // Guest time is contained in user time: only the first eight are summed up.
    Ok((ticks.iter().take(8).sum(), ticks.get(3).unwrap_or(&0) + ticks.get(4).unwrap_or(&0)))
}
