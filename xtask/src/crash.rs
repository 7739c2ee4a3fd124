//! `cargo xtask crash`: repeatedly kills a node under load or cuts the power of its disks, and checks that nothing
//! acknowledged was lost.
//!
//! Workers change files on the mount and keep account of the filesystem's promises. At a random moment the process is
//! killed, or the disks lose power first; then it is started again. The account must allow every name, size, mode, link
//! and byte that is found; the next round begins with that state. Bytes name the write that they come from, so wrong
//! bytes are never mistaken for right ones.
#![allow(clippy::disallowed_methods, reason = "a test of real processes needs real time, threads and files")]

mod content;
mod file;
mod mapper;
mod model;
mod round;
pub(crate) mod soak;
mod storage;
mod verify;
mod worker;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::arguments::Arguments;
use crate::node::{Drives, Node, NodeOptions};
use crate::random::Random;
use round::{End, Fault, Round};
use storage::{Layout, Storage};
use verify::Claim;
use worker::Worker;

pub(crate) const USAGE: &str =
    "crash --dir DIR [--forebay BINARY] [--layout host|ext4|xfs|devices] [--profile 4+2] [--drives 6] [--drive-mib 512]
      [--rounds 20] [--faults 0] [--may-lose-drive] [--workers 4] [--seed N] [--round-ms 1000] [--early] [--plain]
With --early, the mount is not strict: a crash leaves a beginning of the operations on names since the last fsync.";

const OPTIONS: &[&str] = &[
    "dir",
    "forebay",
    "layout",
    "profile",
    "drives",
    "drive-mib",
    "rounds",
    "faults",
    "workers",
    "seed",
    "round-ms",
];

/// How long a system call on a dead mount may take to return.
const PATIENCE: Duration = Duration::from_secs(45);

/// The subject of the test: a node, or a plain directory that never crashes.
enum Subject {
    // Fields are dropped in this order: the node must be gone before its disks.
    Node(Box<Node>, Option<Storage>),
    Plain,
}

impl Subject {
    fn node(&self) -> Option<&Node> {
        match self {
            Self::Node(node, _) => Some(node),
            Self::Plain => None,
        }
    }

    fn storage(&self) -> Option<&Storage> {
        match self {
            Self::Node(_, storage) => storage.as_ref(),
            Self::Plain => None,
        }
    }
}

/// The options of one run, with their defaults: enough to repeat it.
struct Setup {
    directory: PathBuf,
    layout: Layout,
    profile: String,
    seed: u64,
    rounds: u64,
    faults: u64,
    /// Writes go on without one of the drives.
    may_lose_drive: bool,
    is_plain: bool,
    /// The command line of the run, with the seed.
    command: String,
}

/// Runs the subcommand. Returns whether everything was as promised.
pub(crate) fn run(words: &[&str]) -> Result<bool> {
    let arguments = Arguments::parse(words, OPTIONS, &["plain", "may-lose-drive", "early"])
        .with_context(|| format!("usage: {USAGE}"))?;
    let seed = arguments.value("seed", u64::from(std::process::id()))?;
    let given = if arguments.text("seed").is_some() { String::new() } else { format!(" --seed {seed}") };
    let setup = Setup {
        directory: PathBuf::from(arguments.text("dir").context("--dir is missing")?),
        layout: arguments.value("layout", Layout::Host)?,
        profile: arguments.text("profile").unwrap_or("4+2").to_owned(),
        seed,
        rounds: arguments.value("rounds", 20)?,
        faults: arguments.value("faults", 0)?,
        may_lose_drive: arguments.is_set("may-lose-drive"),
        is_plain: arguments.is_set("plain"),
        command: format!("cargo xtask crash {}{given}", words.join(" ")),
    };
    let (subject, root) = make_subject(&setup, &arguments)?;
    let has_fsck = subject.node().is_some_and(Node::has_fsck);
    worker::prepare(&root).context("make the shared directory")?;
    let is_strict = !arguments.is_set("early");
    let mappers = setup.directory.join("mapper");
    mapper::build(&mappers)?;
    let workers = (0..arguments.value("workers", 4)?)
        .map(|index| Worker::new(index, (&root, is_strict), &mappers, seed))
        .collect();
    let random = Random::new(seed);
    let round_ms_max = arguments.value("round-ms", 1000)?;
    let mut checker = Checker { subject, root, workers, random, round_ms_max, has_fsck };
    println!("seed={seed} layout={:?} profile={} fsck={has_fsck}", setup.layout, setup.profile);
    checker.run(&setup)
}

/// The node or directory to test, and the directory for the workers.
fn make_subject(setup: &Setup, arguments: &Arguments) -> Result<(Subject, PathBuf)> {
    let root = setup.directory.join("mnt");
    std::fs::create_dir_all(&root)?;
    if setup.is_plain {
        return Ok((Subject::Plain, root));
    }
    let (count, mib) = (arguments.value("drives", 6)?, arguments.value("drive-mib", 512)?);
    let storage = match setup.layout {
        Layout::Host => None,
        layout => Some(Storage::create(&setup.directory, layout, count, mib)?),
    };
    let devices = storage.as_ref().map_or(&[][..], Storage::drives);
    let options = NodeOptions {
        binary: arguments.text("forebay").unwrap_or("target/release/forebay").into(),
        profile: setup.profile.clone(),
        drives: match devices {
            [] => Drives::Files { count, size: format!("{mib}MiB") },
            devices => Drives::Devices(devices.to_vec()),
        },
        memory_mib: None,
        mount_options: if arguments.is_set("early") { String::new() } else { "strict".to_owned() },
    };
    let below = storage.as_ref().map_or(setup.directory.as_path(), Storage::path);
    // The log must stay readable when the disks are gone.
    let (home, log) = (below.join("node"), setup.directory.join("log"));
    std::fs::create_dir_all(&home)?;
    std::fs::create_dir_all(&log)?;
    std::os::unix::fs::symlink(&log, home.join("log"))?;
    let node = Node::create(&options, &home, &root)?;
    Ok((Subject::Node(Box::new(node), storage), root))
}

/// A worker that has stopped, and its result.
type Returned = (Worker, Result<(), String>);

struct Checker {
    subject: Subject,
    root: PathBuf,
    workers: Vec<Worker>,
    random: Random,
    round_ms_max: u64,
    has_fsck: bool,
}

impl Checker {
    fn run(&mut self, setup: &Setup) -> Result<bool> {
        for number in 1..=setup.rounds + setup.faults {
            let round = if number > setup.rounds {
                Round::with_fault(number - setup.rounds, setup.may_lose_drive, &mut self.random)
            } else {
                Round::new(number, setup.layout, &mut self.random)
            };
            let problems = self.round(round).with_context(|| {
                format!("seed={} round={number} {round:?}\nrepeat: {}", setup.seed, setup.command)
            })?;
            for problem in &problems {
                println!("FAIL seed={} round={number} {round:?}: {problem}", setup.seed);
            }
            if !problems.is_empty() {
                println!("repeat: {}", setup.command);
                return Ok(false);
            }
            println!("round {number}: {round:?}, {}", self.summary());
        }
        Ok(true)
    }

    /// Does one round. Returns its problems, one line each.
    fn round(&mut self, round: Round) -> Result<Vec<String>> {
        let problems = self.work_until(round)?;
        if !problems.is_empty() {
            return Ok(problems);
        }
        if let Subject::Node(node, storage) = &self.subject {
            if let Some(storage) = storage {
                round.recover(storage)?;
            }
            if self.has_fsck {
                node.fsck().context("fsck after the end of a round")?;
            }
            let started = Instant::now();
            node.start().context("start after the end of a round")?;
            let restart = started.elapsed();
            ensure!(restart < PATIENCE, "start took too long: {restart:?}");
        }
        check(&self.root, &mut self.workers)
    }

    /// Lets the workers work for a random time and ends the node.
    fn work_until(&mut self, round: Round) -> Result<Vec<String>> {
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
        self.pause(&stop);
        if let (Some(fault), Some(storage)) = (round.fault, self.subject.storage())
            && !stop.load(Ordering::Relaxed)
        {
            crashing.store(fault.may_fail_operations(), Ordering::Relaxed);
            fault.inject(storage)?;
            self.pause(&stop);
        }
        let mut problems = Vec::new();
        if round.fault.is_some_and(Fault::may_fail_operations) {
            // Every request must be answered, by an error if something is broken.
            stop.store(true, Ordering::Relaxed);
            problems = self.gather(&receiver, count)?;
            stop.store(false, Ordering::Relaxed);
        }
        match (&self.subject, round.end) {
            (Subject::Node(node, storage), End::Kill | End::Cut { .. }) if !stop.load(Ordering::Relaxed) => {
                crashing.store(true, Ordering::Relaxed);
                if let (Some(storage), End::Cut { seed, kill_after }) = (storage, round.end) {
                    storage.cut(seed)?;
                    std::thread::sleep(kill_after);
                }
                node.kill()?;
            }
            _ => stop.store(true, Ordering::Relaxed),
        }
        problems.extend(self.gather(&receiver, count)?);
        if let (Some(node), End::Stop, true) = (self.subject.node(), round.end, problems.is_empty()) {
            node.stop()?;
        }
        if round.end == End::Stop || self.subject.node().is_none() {
            self.workers.iter_mut().for_each(|worker| worker.model.sync_all());
        }
        Ok(problems)
    }

    /// Collects the workers that still work. Returns the problems that they found.
    fn gather(&mut self, receiver: &Receiver<Returned>, count: usize) -> Result<Vec<String>> {
        let mut problems = Vec::new();
        while self.workers.len() < count {
            let Ok((worker, result)) = receiver.recv_timeout(PATIENCE) else {
                let evidence = self.root.with_file_name("hang.txt");
                std::fs::write(&evidence, self.subject.node().map(Node::evidence).unwrap_or_default())?;
                bail!(
                    "a system call hangs: workers={} of {count} evidence={}",
                    count - self.workers.len(),
                    evidence.display()
                );
            };
            problems.extend(result.err());
            self.workers.push(worker);
        }
        self.workers.sort_by_key(|worker| worker.prefixes());
        Ok(problems)
    }

    /// Waits for a random time, or until a worker has failed.
    fn pause(&mut self, stop: &AtomicBool) {
        let time = Duration::from_millis(self.random.below(self.round_ms_max.max(1)) + 20);
        let deadline = Instant::now() + time;
        while Instant::now() < deadline && !stop.load(Ordering::Relaxed) {
            std::thread::sleep(
                deadline.saturating_duration_since(Instant::now()).min(Duration::from_millis(20)),
            );
        }
    }

    fn summary(&self) -> String {
        let operations: u64 = self.workers.iter().map(|worker| worker.operations).sum();
        let names: usize = self.workers.iter().map(|worker| worker.model.entries.len()).sum();
        let bytes: u64 = self.workers.iter().map(|worker| worker.model.size_total()).sum();
        format!("{operations} operations so far, {names} names, {} MiB", bytes >> 20)
    }
}

/// Compares the mount with the accounts, and replaces the accounts by the state that was found.
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
