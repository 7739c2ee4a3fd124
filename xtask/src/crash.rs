//! `cargo xtask crash`: kills a node under load, again and again, and checks that nothing acknowledged was lost.
//!
//! Workers change files on the mount and keep account of what the filesystem promised. The process is killed at a random
//! moment and started again. Then every name, size, mode, link and byte must be one that the account allows; that state
//! is where the next round begins. Bytes say which write they come from, so wrong ones are never taken for right ones.
#![allow(clippy::disallowed_methods, reason = "a test of real processes needs real time, threads and files")]

mod content;
mod file;
mod model;
mod verify;
mod worker;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::arguments::Arguments;
use crate::node::{Node, NodeOptions};
use crate::random::Random;
use verify::Claim;
use worker::Worker;

pub(crate) const USAGE: &str =
    "crash --dir DIR [--forebay BINARY] [--profile 4+2] [--drives 6] [--drive-size 1G]
      [--rounds 20] [--workers 4] [--seed N] [--round-ms 1000] [--plain]";

const OPTIONS: &[&str] =
    &["dir", "forebay", "profile", "drives", "drive-size", "rounds", "workers", "seed", "round-ms"];

/// How long a system call on a dead mount may take to return.
const PATIENCE: Duration = Duration::from_secs(60);

/// How a round ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// SIGKILL at a random moment.
    Kill,
    /// An orderly stop, after which even bytes that were not fsynced must be there.
    Stop,
}

/// What is tested: a node, or a plain directory in which nothing crashes.
enum Subject {
    Node(Node),
    Plain,
}

/// Runs the subcommand. Returns whether everything was as promised.
pub(crate) fn run(arguments: &[&str]) -> Result<bool> {
    let arguments =
        Arguments::parse(arguments, OPTIONS, &["plain"]).with_context(|| format!("usage: {USAGE}"))?;
    let directory = PathBuf::from(arguments.text("dir").context("--dir is missing")?);
    let seed = arguments.value("seed", u64::from(std::process::id()))?;
    let options = NodeOptions {
        binary: arguments.text("forebay").unwrap_or("target/release/forebay").into(),
        profile: arguments.text("profile").unwrap_or("4+2").to_owned(),
        drives: arguments.value("drives", 6)?,
        drive_size: arguments.text("drive-size").unwrap_or("1G").to_owned(),
    };
    let (subject, root) = if arguments.is_set("plain") {
        (Subject::Plain, directory.join("mnt"))
    } else {
        let node = Node::create(&options, &directory.join("node"))?;
        let root = node.mount().to_path_buf();
        (Subject::Node(node), root)
    };
    std::fs::create_dir_all(&root)?;
    worker::prepare(&root).context("make the shared directory")?;
    let workers = (0..arguments.value("workers", 4)?).map(|index| Worker::new(index, &root, seed)).collect();
    let mut checker = Checker {
        subject,
        root,
        workers,
        random: Random::new(seed),
        round_ms_max: arguments.value("round-ms", 1000)?,
    };
    let profile = if arguments.is_set("plain") { "plain" } else { &options.profile };
    println!("seed={seed} profile={profile}");
    for round in 1..=arguments.value("rounds", 20_u64)? {
        let end = if round % 5 == 0 { End::Stop } else { End::Kill };
        let problems =
            checker.round(end).with_context(|| format!("seed={seed} round={round} end={end:?}"))?;
        for problem in &problems {
            println!("FAIL seed={seed} profile={profile} round={round} end={end:?}: {problem}");
        }
        if !problems.is_empty() {
            return Ok(false);
        }
        println!("round {round}: {end:?}, {}", checker.summary());
    }
    Ok(true)
}

struct Checker {
    subject: Subject,
    root: PathBuf,
    workers: Vec<Worker>,
    random: Random,
    round_ms_max: u64,
}

impl Checker {
    /// Returns what is wrong, one line each.
    fn round(&mut self, end: End) -> Result<Vec<String>> {
        let problems = self.work_until(end)?;
        if !problems.is_empty() {
            return Ok(problems);
        }
        let started = Instant::now();
        if let Subject::Node(node) = &self.subject {
            node.start().context("start after the end of a round")?;
        }
        let restart = started.elapsed();
        let problems = check(&self.root, &mut self.workers)?;
        ensure!(restart < PATIENCE, "start took too long: {restart:?}");
        Ok(problems)
    }

    /// Lets the workers work for a random time and ends the node.
    fn work_until(&mut self, end: End) -> Result<Vec<String>> {
        let (stop, crashing) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (sender, receiver) = mpsc::channel();
        let count = self.workers.len();
        for mut worker in self.workers.drain(..) {
            let (sender, stop, crashing) = (sender.clone(), Arc::clone(&stop), Arc::clone(&crashing));
            std::thread::spawn(move || {
                let result = worker.work(&stop, &crashing);
                // A worker that fails ends the round for all.
                if result.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
                let _ = sender.send((worker, result));
            });
        }
        let time = Duration::from_millis(self.random.below(self.round_ms_max.max(1)) + 20);
        let deadline = Instant::now() + time;
        while Instant::now() < deadline && !stop.load(Ordering::Relaxed) {
            std::thread::sleep(
                deadline.saturating_duration_since(Instant::now()).min(Duration::from_millis(20)),
            );
        }
        match (&self.subject, end) {
            (Subject::Node(node), End::Kill) if !stop.load(Ordering::Relaxed) => {
                crashing.store(true, Ordering::Relaxed);
                node.kill()?;
            }
            _ => stop.store(true, Ordering::Relaxed),
        }
        let mut problems = Vec::new();
        for _ in 0..count {
            let Ok((worker, result)) = receiver.recv_timeout(PATIENCE) else {
                bail!("a system call hangs: workers={} of {count}", self.workers.len());
            };
            problems.extend(result.err());
            self.workers.push(worker);
        }
        self.workers.sort_by_key(|worker| worker.prefixes());
        if let (Subject::Node(node), End::Stop, true) = (&self.subject, end, problems.is_empty()) {
            node.stop()?;
        }
        if end == End::Stop || matches!(self.subject, Subject::Plain) {
            self.workers.iter_mut().for_each(|worker| worker.model.sync_all());
        }
        Ok(problems)
    }

    fn summary(&self) -> String {
        let operations: u64 = self.workers.iter().map(|worker| worker.operations).sum();
        let names: usize = self.workers.iter().map(|worker| worker.model.entries.len()).sum();
        let bytes: u64 = self.workers.iter().map(|worker| worker.model.size_total()).sum();
        format!("{operations} operations so far, {names} names, {} MiB", bytes >> 20)
    }
}

/// Compares the mount with the accounts, and brings the accounts to what was found.
fn check(root: &Path, workers: &mut [Worker]) -> Result<Vec<String>> {
    let claims: Vec<Claim<'_>> = workers
        .iter()
        .map(|worker| Claim {
            model: &worker.model,
            in_flight: worker.in_flight.as_ref(),
            prefixes: worker.prefixes(),
        })
        .collect();
    let verdict = verify::verify(root, &claims, &[worker::SHARED])?;
    let mut problems = verdict.problems;
    for (worker, found) in workers.iter_mut().zip(verdict.workers) {
        match found {
            Ok(model) => {
                worker.model = model;
                worker.remember_round();
            }
            Err(found) => problems.extend(found.iter().map(|problem| worker.explain(problem))),
        }
    }
    Ok(problems)
}
