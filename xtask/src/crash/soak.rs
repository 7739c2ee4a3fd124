//! `cargo xtask soak`: mixed load for a long time on a node that never crashes, and a report of drifts.
//!
//! The workers of the crash test work in windows of some seconds. After each window the whole mount is compared with
//! their accounts. At the end, rate, latency, memory, threads and open files of the first and the last third of the
//! windows are compared.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::worker::{self, Worker};
use super::{check, mapper};
use crate::arguments::Arguments;
use crate::bench::latency::Latencies;
use crate::node::{Drives, Node, NodeOptions};

pub(crate) const USAGE: &str =
    "soak --dir DIR [--forebay BINARY] [--minutes 60] [--window-s 10] [--profile 4+2]
      [--drives 6] [--drive-mib 1024] [--workers 4] [--seed N]";

const OPTIONS: &[&str] =
    &["dir", "forebay", "minutes", "window-s", "profile", "drives", "drive-mib", "workers", "seed"];

/// A change by more than this factor is called a drift.
const DRIFT: f64 = 1.25;
/// Memory of the node: the smallest allowed.
const MEMORY_MIB: u64 = 512;
/// Windows at the start that do not count: caches are not full, and there are few files.
const WARM_UP: usize = 2;

/// The figures of one window.
#[derive(Debug, Clone, Copy)]
struct Window {
    rate: f64,
    p99_us: f64,
    memory_mib: f64,
    threads: f64,
    open_files: f64,
}

/// Name, value of a window, whether growth is good.
type Column = (&'static str, fn(&Window) -> f64, bool);

const COLUMNS: &[Column] = &[
    ("operations/s", |window| window.rate, true),
    ("latency 99 % us", |window| window.p99_us, false),
    ("memory MiB", |window| window.memory_mib, false),
    ("threads", |window| window.threads, false),
    ("open files", |window| window.open_files, false),
];

/// Runs the subcommand. Returns whether everything was as promised and nothing drifted.
pub(crate) fn run(words: &[&str]) -> Result<bool> {
    let arguments = Arguments::parse(words, OPTIONS, &[]).with_context(|| format!("usage: {USAGE}"))?;
    let directory = PathBuf::from(arguments.text("dir").context("--dir is missing")?);
    let seed = arguments.value("seed", 1)?;
    let root = directory.join("mnt");
    std::fs::create_dir_all(&root)?;
    let options = NodeOptions {
        binary: arguments.text("forebay").unwrap_or("target/release/forebay").into(),
        profile: arguments.text("profile").unwrap_or("4+2").to_owned(),
        drives: Drives::Files {
            count: arguments.value("drives", 6)?,
            size: format!("{}MiB", arguments.value("drive-mib", 1024)?),
        },
        memory_mib: Some(MEMORY_MIB),
        mount_options: "strict".to_owned(),
    };
    let node = Node::create(&options, &directory.join("node"), &root)?;
    worker::prepare(&root)?;
    let mappers = directory.join("mapper");
    mapper::build(&mappers)?;
    let mut workers: Vec<Worker> = (0..arguments.value("workers", 4)?)
        .map(|index| Worker::new(index, (&root, true), &mappers, seed))
        .collect();
    let end = Instant::now() + Duration::from_secs(60 * arguments.value("minutes", 60_u64)?);
    let length = Duration::from_secs(arguments.value("window-s", 10)?);
    let mut windows = Vec::new();
    while Instant::now() < end {
        let window = measure(&node, &mut workers, length)?;
        println!(
            "window {}: {:.0} operations/s, 99 % {:.0} us, {:.0} MiB, {} threads, {} open files",
            windows.len() + 1,
            window.rate,
            window.p99_us,
            window.memory_mib,
            window.threads,
            window.open_files
        );
        windows.push(window);
        let problems = check(&root, &mut workers)?;
        for problem in &problems {
            println!("FAIL seed={seed} window={}: {problem}", windows.len());
        }
        if !problems.is_empty() {
            return Ok(false);
        }
    }
    node.stop()?;
    Ok(report(windows.get(WARM_UP..).unwrap_or_default()))
}

/// One window of load.
fn measure(node: &Node, workers: &mut [Worker], length: Duration) -> Result<Window> {
    let (stop, crashing) = (AtomicBool::new(false), AtomicBool::new(false));
    let start = Instant::now();
    let results: Vec<Result<(), String>> = std::thread::scope(|scope| {
        let spawn = |worker| scope.spawn(|| Worker::work(worker, &stop, &crashing));
        let handles: Vec<_> = workers.iter_mut().map(spawn).collect();
        while start.elapsed() < length && !handles.iter().any(|handle| handle.is_finished()) {
            std::thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
        handles.into_iter().map(|handle| handle.join().expect("a panic ends the process")).collect()
    });
    let elapsed = start.elapsed();
    let problems: Vec<String> = results.into_iter().filter_map(Result::err).collect();
    ensure!(problems.is_empty(), "{}", problems.join("\n"));
    let mut latencies = Latencies::default();
    for worker in workers {
        latencies.merge(&std::mem::take(&mut worker.latencies));
    }
    let process = PathBuf::from(format!("/proc/{}", node.pid()?.as_raw_pid()));
    let status = std::fs::read_to_string(process.join("status")).context("read the status of the process")?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<f64>().ok()
    };
    let peak_mib = field("VmHWM:").context("VmHWM")? / 1024.0;
    ensure!(
        peak_mib <= MEMORY_MIB as f64,
        "memory is above the budget: peak={peak_mib:.0} MiB budget={MEMORY_MIB} MiB"
    );
    Ok(Window {
        rate: latencies.operations() as f64 / elapsed.as_secs_f64(),
        p99_us: latencies.percentile(0.99).as_secs_f64() * 1e6,
        memory_mib: field("VmRSS:").context("VmRSS")? / 1024.0,
        threads: field("Threads:").context("Threads")?,
        open_files: std::fs::read_dir(process.join("fd"))?.count() as f64,
    })
}

/// Compares the first third with the last one. Returns whether nothing drifted.
fn report(windows: &[Window]) -> bool {
    let third = windows.len() / 3;
    if third == 0 {
        println!("too short to tell a drift: windows={}", windows.len());
        return true;
    }
    let mean = |windows: &[Window], value: fn(&Window) -> f64| {
        windows.iter().map(value).sum::<f64>() / windows.len() as f64
    };
    let mut is_steady = true;
    for (name, value, growth_is_good) in COLUMNS {
        let (first, last) =
            (mean(&windows[..third], *value), mean(&windows[windows.len() - third..], *value));
        let worse = if *growth_is_good { first / last } else { last / first };
        let is_drift = worse > DRIFT;
        is_steady &= !is_drift;
        println!(
            "{} {name}: {first:.1} at first, {last:.1} in the end",
            if is_drift { "DRIFT" } else { "ok   " }
        );
    }
    is_steady
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_drift(change: fn(&mut Window, f64), expected: bool) {
        let steady = Window { rate: 100.0, p99_us: 10.0, memory_mib: 50.0, threads: 9.0, open_files: 20.0 };
        let windows: Vec<Window> = (0..30)
            .map(|index| {
                let mut window = steady;
                change(&mut window, f64::from(index) / 30.0);
                window
            })
            .collect();
        assert_eq!(report(&windows), expected);
    }

    #[test]
    fn drifts_are_reported() {
        check_drift(|_, _| {}, true);
        check_drift(|window, part| window.rate *= 1.0 + part, true);
        check_drift(|window, part| window.rate *= 1.0 - part / 2.0, false);
        check_drift(|window, part| window.memory_mib *= 1.0 + part, false);
        check_drift(|window, part| window.p99_us *= 1.0 + part, false);
        check_drift(|window, part| window.open_files += 20.0 * part, false);
    }
}
