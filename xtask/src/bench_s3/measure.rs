//! The results of one kind of request, and its costs for client and server.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::Pid;

use crate::bench::latency::Latencies;
use crate::bench::meter::process_ticks;

/// The kernel counts CPU time for user space in hundredths of a second on every architecture we support.
const TICK: Duration = Duration::from_millis(10);

/// The work that was done.
#[derive(Debug, Clone, Default)]
pub(super) struct Tally {
    pub(super) operations: u64,
    pub(super) bytes: u64,
    pub(super) latencies: Latencies,
}

impl Tally {
    pub(super) fn merge(&mut self, other: &Self) {
        self.operations += other.operations;
        self.bytes += other.bytes;
        self.latencies.merge(&other.latencies);
    }
}

/// The result of one kind of request.
#[derive(Debug, Clone)]
pub(super) struct Figure {
    pub(super) name: String,
    pub(super) tally: Tally,
    pub(super) time: Duration,
    pub(super) server_cpu: Duration,
    pub(super) client_cpu: Duration,
}

impl Figure {
    /// Operations per second; for listings, keys per second.
    pub(super) fn rate(&self) -> f64 {
        self.tally.operations as f64 / self.time.as_secs_f64()
    }

    pub(super) fn megabytes(&self) -> f64 {
        self.tally.bytes as f64 / 1e6 / self.time.as_secs_f64()
    }

    fn per_operation_us(&self, cpu: Duration) -> f64 {
        cpu.as_secs_f64() * 1e6 / self.tally.operations.max(1) as f64
    }

    pub(super) fn server_us(&self) -> f64 {
        self.per_operation_us(self.server_cpu)
    }

    pub(super) fn client_us(&self) -> f64 {
        self.per_operation_us(self.client_cpu)
    }
}

/// All figures of one subject.
pub(super) struct Column {
    pub(super) subject: String,
    only: Option<String>,
    pub(super) figures: Vec<Figure>,
    /// Peak memory of the server.
    pub(super) peak_bytes: Option<u64>,
}

/// CPU time of client and server at one moment.
pub(super) struct Before {
    at: Instant,
    server_ticks: u64,
    client_ticks: u64,
}

impl Before {
    pub(super) fn now(server: Option<Pid>) -> Result<Self> {
        let server_ticks = server.map_or(Ok(0), process_ticks)?;
        let client_ticks = process_ticks(rustix::process::getpid())?;
        Ok(Self { at: Instant::now(), server_ticks, client_ticks })
    }
}

impl Column {
    /// With `only`, measures only figures whose name contains it.
    pub(super) fn new(subject: &str, only: Option<&str>) -> Self {
        let only = only.map(str::to_owned);
        Self { subject: subject.to_owned(), only, figures: Vec::new(), peak_bytes: None }
    }

    /// Whether the figure with this name is measured.
    pub(super) fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }

    /// Records the work since `before`.
    pub(super) fn keep(
        &mut self,
        name: String,
        tally: Tally,
        before: &Before,
        server: Option<Pid>,
    ) -> Result<()> {
        let after = Before::now(server)?;
        let cpu = |before: u64, after: u64| TICK * u32::try_from(after - before).unwrap_or(u32::MAX);
        let figure = Figure {
            name,
            tally,
            time: after.at - before.at,
            server_cpu: cpu(before.server_ticks, after.server_ticks),
            client_cpu: cpu(before.client_ticks, after.client_ticks),
        };
        eprintln!(
            "  {:<28} {:>9.0}/s {:>8.0} us of server, {:.0} us of client",
            figure.name,
            figure.rate(),
            figure.server_us(),
            figure.client_us()
        );
        self.figures.push(figure);
        Ok(())
    }

    pub(super) fn find(&self, name: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.name == name)
    }
}

/// Peak memory of a process so far.
pub(super) fn peak_bytes(pid: Pid) -> Result<u64> {
    let path = format!("/proc/{}/status", pid.as_raw_pid());
    let status = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("VmHWM")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().context("VmHWM is a number")?;
    Ok(kib << 10)
}
