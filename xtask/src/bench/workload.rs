//! The measured work, the same for every subject: large files here, names and trees in `names`.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};
use rustix::fs::OFlags;

use super::latency::Latencies;
use super::meter::{Done, Meter};
use super::names;
use super::{Scale, Subject};
use crate::random::Random;

const MIB: usize = 1 << 20;
const BLOCK_BYTES: usize = 4096;
const LARGE_BYTES: usize = 64 << 10;
const SEED: u64 = 1;
const DEPTH: u64 = 32;

/// Work that needs no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Large files.
    Data,
    /// Appends that are made durable.
    Fsync,
    /// Many empty files.
    Names,
    /// A real tree.
    Tree,
    /// Files that are made, and nothing else.
    Creates,
}

impl Part {
    pub(crate) const ALL: [Self; 4] = [Self::Data, Self::Fsync, Self::Names, Self::Tree];

    fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Fsync => "fsync",
            Self::Names => "names",
            Self::Tree => "tree",
            Self::Creates => "creates",
        }
    }

    /// The parts with these names, separated by commas, in the order in which they are done.
    pub(crate) fn list(names: &str) -> Result<Vec<Self>> {
        let all = || Self::ALL.into_iter().chain([Self::Creates]);
        for name in names.split(',') {
            let is_known = all().any(|part| part.name() == name);
            ensure!(is_known, "there is no part `{name}`: parts are data, fsync, names, tree, creates");
        }
        let is_named = |part: &Self| names.split(',').any(|name| name == part.name());
        Ok(all().filter(is_named).collect())
    }
}

/// Does these parts of the work on one subject.
pub(crate) fn run(
    parts: &[Part],
    subject: &Subject,
    scale: &Scale,
    archive: &Path,
    meter: &mut Meter,
) -> Result<()> {
    for part in parts {
        match part {
            Part::Data => data(subject, scale, meter)?,
            Part::Fsync => {
                for &jobs in &scale.jobs {
                    write_and_sync(subject, scale, jobs, meter)?;
                }
            }
            Part::Names => {
                for &jobs in &scale.jobs {
                    names::storm(subject, scale, jobs, meter)?;
                }
            }
            Part::Creates => {
                for &jobs in &scale.jobs {
                    names::creates(subject, scale, jobs, meter)?;
                }
            }
            Part::Tree => names::tree(subject, archive, meter)?,
        }
    }
    Ok(())
}

/// The order matters: later work uses the files of earlier work.
fn data(subject: &Subject, scale: &Scale, meter: &mut Meter) -> Result<()> {
    for jobs in [1, 4] {
        sequential(subject, scale, jobs, meter)?;
    }
    for size in [BLOCK_BYTES, LARGE_BYTES] {
        for depth in [1, DEPTH] {
            random(subject, scale, meter, &Access { size, depth, reads_percent: 100 })?;
        }
    }
    for size in [BLOCK_BYTES, LARGE_BYTES] {
        random(subject, scale, meter, &Access { size, depth: DEPTH, reads_percent: 80 })?;
        for depth in [1, DEPTH] {
            random(subject, scale, meter, &Access { size, depth, reads_percent: 0 })?;
        }
    }
    buffered_writes(subject, scale, meter)
}

fn jobs_text(jobs: u64) -> String {
    if jobs == 1 { "1 job".to_owned() } else { format!("{jobs} jobs") }
}

pub(crate) fn named(verb: &str, jobs: u64) -> String {
    format!("{verb}, {}", jobs_text(jobs))
}

/// A file per job, all together as large as the file of a single job. Later work uses that single file.
fn sequential(subject: &Subject, scale: &Scale, jobs: u64, meter: &mut Meter) -> Result<()> {
    let path = |job: u64| sequential_path(subject, jobs, job);
    let count = scale.file_bytes / MIB as u64 / jobs;
    // Random data: a filesystem cannot leave it out.
    let mut random = Random::new(SEED);
    let data: Vec<u8> = (0..MIB / 8).flat_map(|_| random.next().to_le_bytes()).collect();
    let with_bytes = |done: Done| Done { bytes: done.operations * MIB as u64, ..done };
    meter.measure(subject, &named("write 1 MiB", jobs), || {
        let done = crowd(jobs, |job, latencies| {
            let mut file = File::create(path(job))?;
            for _ in 0..count {
                latencies.time(|| file.write_all(&data))?;
            }
            Ok(file.sync_all()?)
        })?;
        // The fsync is part of the time, but not an operation.
        Ok(Done { latencies: None, ..with_bytes(done) })
    })?;
    subject.make_cold()?;
    for verb in ["read 1 MiB", "read 1 MiB again"] {
        meter.measure(subject, &named(verb, jobs), || {
            let done = crowd(jobs, |job, latencies| {
                let mut file = File::open(path(job))?;
                let mut buffer = vec![0; MIB];
                for _ in 0..count {
                    latencies.time(|| file.read_exact(&mut buffer))?;
                }
                Ok(())
            })?;
            Ok(with_bytes(done))
        })?;
    }
    // Later work uses the large file of one job.
    for job in (0..jobs).filter(|_| jobs > 1) {
        std::fs::remove_file(path(job))?;
    }
    Ok(())
}

fn sequential_path(subject: &Subject, jobs: u64, job: u64) -> PathBuf {
    subject.root().join(format!("large-{jobs}-{job}"))
}

/// Random access to one large file with `O_DIRECT`: the page cache would answer most reads.
struct Access {
    size: usize,
    depth: u64,
    reads_percent: u64,
}

impl Access {
    fn name(&self) -> String {
        let verb = match self.reads_percent {
            100 => "read",
            0 => "write",
            _ => "80/20 mix",
        };
        format!("{verb} {} KiB random, QD{}", self.size >> 10, self.depth)
    }
}

fn random(subject: &Subject, scale: &Scale, meter: &mut Meter, access: &Access) -> Result<()> {
    let name = access.name();
    if !meter.wants(&name) {
        return Ok(());
    }
    subject.make_cold()?;
    let path = sequential_path(subject, 1, 0);
    let positions = scale.file_bytes / access.size as u64;
    meter.measure(subject, &name, || {
        let deadline = Instant::now() + scale.time;
        let done = crowd(access.depth, |job, latencies| {
            let flags = OFlags::DIRECT.bits() as i32;
            let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path)?;
            let mut random = Random::new(SEED + job);
            let mut memory = vec![job as u8; access.size + BLOCK_BYTES];
            let aligned = memory.as_ptr().align_offset(BLOCK_BYTES);
            let buffer = &mut memory[aligned..aligned + access.size];
            while Instant::now() < deadline {
                let offset = random.below(positions) * access.size as u64;
                if random.percent(access.reads_percent) {
                    latencies.time(|| file.read_exact_at(buffer, offset))?;
                } else {
                    latencies.time(|| file.write_all_at(buffer, offset))?;
                }
            }
            Ok(())
        })?;
        if access.reads_percent < 100 {
            File::open(&path)?.sync_all()?;
        }
        Ok(done)
    })
}

fn buffered_writes(subject: &Subject, scale: &Scale, meter: &mut Meter) -> Result<()> {
    let path = sequential_path(subject, 1, 0);
    let buffer = [7; BLOCK_BYTES];
    meter.measure(subject, "write 4 KiB random buffered, 1 job", || {
        let deadline = Instant::now() + scale.time;
        let file = OpenOptions::new().write(true).open(&path)?;
        let mut random = Random::new(SEED);
        let mut operations = 0;
        while Instant::now() < deadline {
            let block = random.below(scale.file_bytes / BLOCK_BYTES as u64);
            file.write_all_at(&buffer, block * BLOCK_BYTES as u64)?;
            operations += 1;
        }
        file.sync_all()?;
        Ok(Done::whole(operations, 0))
    })
}

/// Appends to a file per job, each write made durable.
fn write_and_sync(subject: &Subject, scale: &Scale, jobs: u64, meter: &mut Meter) -> Result<()> {
    let buffer = [7; BLOCK_BYTES];
    meter.measure(subject, &named("write 4 KiB + fsync", jobs), || {
        let deadline = Instant::now() + scale.time;
        crowd(jobs, |job, latencies| {
            let mut file = File::create(subject.root().join(format!("log-{jobs}-{job}")))?;
            while Instant::now() < deadline {
                latencies.time(|| file.write_all(&buffer).and_then(|()| file.sync_all()))?;
            }
            Ok(())
        })
    })
}

/// Runs the work on `jobs` threads. Each operation is one latency.
pub(crate) fn crowd(jobs: u64, work: impl Fn(u64, &mut Latencies) -> Result<()> + Sync) -> Result<Done> {
    let start = Instant::now();
    let results: Vec<Result<Latencies>> = std::thread::scope(|scope| {
        let spawn = |job| {
            let work = &work;
            scope.spawn(move || {
                let mut latencies = Latencies::default();
                work(job, &mut latencies).map(|()| latencies)
            })
        };
        let handles: Vec<_> = (0..jobs).map(spawn).collect();
        handles.into_iter().map(|handle| handle.join().expect("a panic ends the process")).collect()
    });
    let busy = start.elapsed();
    let mut all = Latencies::default();
    for latencies in results {
        all.merge(&latencies?);
    }
    Ok(Done { operations: all.operations(), bytes: 0, jobs, latencies: Some(all), busy })
}
