//! Common uses of files, on drives and in the store; and the effect of moving content on other reads and writes.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::fs::OFlags;

use super::rig::{Rig, SETTLED};
use super::{MIB, Results, Scale};
use crate::bench::latency::Latencies;
use crate::bench::workload::crowd;
use crate::random::Random;

const BLOCK: usize = 4096;
/// Jobs that read and write while content moves.
const JOBS: u64 = 2;
/// Size of the content that they use.
const WORKED_ON_BYTES: u64 = 128 * MIB;
const READS_PERCENT: u64 = 80;
const TAIL: usize = 160;

/// A use of a file, with median times.
#[derive(Debug)]
pub(super) struct Use {
    pub(super) name: String,
    pub(super) on_drives: Duration,
    pub(super) in_store: Duration,
    /// The slowest answer of the store that the use waited for.
    pub(super) answer: Duration,
    /// Whether it reads the end of a file. Its aim is that answer plus 5 ms.
    pub(super) is_tail: bool,
}

/// Latencies of small reads and writes.
#[derive(Debug)]
pub(super) struct Foreground {
    pub(super) name: &'static str,
    pub(super) latencies: Latencies,
    pub(super) operations_per_s: f64,
    /// The speed of the moving content at the same time.
    pub(super) moved_mb_s: f64,
}

/// Name, file, repetitions, whether it reads the end, action.
type Job<'a> = (String, PathBuf, usize, bool, &'a dyn Fn(&Path) -> Result<()>);

fn fill(path: &Path, bytes: u64) -> Result<()> {
    let mut random = Random::new(bytes);
    let data: Vec<u8> = (0..MIB / 8).flat_map(|_| random.next().to_le_bytes()).collect();
    let mut file = File::create(path)?;
    for _ in 0..bytes / MIB {
        file.write_all(&data)?;
    }
    file.write_all(&data[..(bytes % MIB) as usize])?;
    Ok(file.sync_all()?)
}

/// Installs a program of about 6 MiB: this one is larger.
fn program(path: &Path) -> Result<()> {
    let python = std::fs::canonicalize("/usr/bin/python3").context("a program of some MiB")?;
    std::fs::copy(python, path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?;
    Ok(File::open(path)?.sync_all()?)
}

fn tail(path: &Path) -> Result<()> {
    let file = File::open(path)?;
    let end = file.metadata()?.len();
    Ok(file.read_exact_at(&mut [0; TAIL], end - TAIL as u64)?)
}

fn cat(path: &Path) -> Result<()> {
    let (mut file, mut buffer) = (File::open(path)?, vec![0; MIB as usize]);
    while file.read(&mut buffer)? > 0 {}
    Ok(())
}

fn execute(path: &Path) -> Result<()> {
    let status = Command::new(path).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    ensure!(status.success(), "{}: {status}", path.display());
    Ok(())
}

fn md5(path: &Path) -> Result<()> {
    let status = Command::new("md5sum").arg(path).stdout(Stdio::null()).status()?;
    ensure!(status.success(), "md5sum {}: {status}", path.display());
    Ok(())
}

fn middle(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Does all uses with files on drives, and then with the same files in the store.
pub(super) fn measure(rig: &Rig, scale: &Scale, results: &mut Results) -> Result<()> {
    let directory = rig.mount().join("used");
    std::fs::create_dir(&directory)?;
    let path = |name: &str| directory.join(name);
    fill(&path("small"), 128 << 10)?;
    fill(&path("big"), scale.big_bytes)?;
    program(&path("program"))?;
    let (size, reads) = (scale.big_bytes >> 20, scale.reads);
    let jobs: [Job<'_>; 5] = [
        (format!("md5sum of {size} MiB"), path("big"), 2, false, &md5),
        (format!("cat of {size} MiB"), path("big"), 2, false, &cat),
        ("last 160 bytes of 128 KiB".to_owned(), path("small"), reads, true, &tail),
        (format!("last 160 bytes of {size} MiB"), path("big"), reads, true, &tail),
        ("start of a program of 6 MiB".to_owned(), path("program"), reads, false, &execute),
    ];
    std::thread::sleep(SETTLED);
    rig.upload_all(0)?;
    for (name, path, times, is_tail, work) in jobs {
        let (mut medians, mut answers) = ([Duration::ZERO; 2], Vec::new());
        for (median, away) in medians.iter_mut().zip([false, true]) {
            let mut took = Vec::new();
            for _ in 0..times {
                if away {
                    rig.tier("release", std::slice::from_ref(&path))?;
                }
                rig.make_cold()?;
                // Warms up: the first access to a node that has just started is not measured.
                std::fs::metadata(&path)?;
                let began = Instant::now();
                work(&path)?;
                took.push(began.elapsed());
                if away {
                    answers.push(rig.slowest_answer()?);
                }
            }
            *median = middle(took);
            rig.tier("fetch", std::slice::from_ref(&path))?;
        }
        let ([on_drives, in_store], answer) = (medians, middle(answers));
        eprintln!(
            "use: {name}: {on_drives:.1?} on drives, {in_store:.1?} in the store, which took {answer:.1?}"
        );
        results.uses.push(Use { name, on_drives, in_store, answer, is_tail });
    }
    results.round_trip_ms = rig.limit(1)?.round_trip_ms;
    std::fs::remove_dir_all(&directory)?;
    rig.wait_until("removal of blobs", |rig| Ok(rig.status(["blobs"])? == [0]))
}

/// Small reads and writes: alone, while content goes to the store, and while it comes back.
pub(super) fn foreground(rig: &Rig, scale: &Scale) -> Result<Vec<Foreground>> {
    let directory = rig.mount().join("foreground");
    std::fs::create_dir(&directory)?;
    let worked_on = directory.join("worked-on");
    fill(&worked_on, WORKED_ON_BYTES)?;
    let moved = directory.join("moved");
    fill(&moved, 4 * scale.big_bytes)?;
    std::thread::sleep(SETTLED);
    let at_least = Instant::now() + Duration::from_secs(scale.foreground_s);
    let alone = work("alone", &worked_on, &|| Instant::now() < at_least)?;
    // Jobs write all the time, so some content is always left to upload.
    let bytes = 4 * scale.big_bytes;
    let upload = || rig.upload_all(2 * WORKED_ON_BYTES);
    let out = beside("while content goes to the store", &worked_on, bytes, upload)?;
    let moved = [moved];
    rig.tier("release", &moved)?;
    let back = beside("while content comes back", &worked_on, bytes, || rig.tier("fetch", &moved))?;
    std::fs::remove_dir_all(&directory)?;
    Ok(vec![alone, out, back])
}

fn beside(
    name: &'static str,
    path: &Path,
    bytes: u64,
    other: impl FnOnce() -> Result<()> + Send,
) -> Result<Foreground> {
    let (over, began) = (AtomicBool::new(false), Instant::now());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let result = other();
            over.store(true, Ordering::Release);
            result
        });
        let measured = work(name, path, &|| !over.load(Ordering::Acquire));
        other.join().expect("a panic ends the process")?;
        let moved_mb_s = bytes as f64 / 1e6 / began.elapsed().as_secs_f64();
        Ok(Foreground { moved_mb_s, ..measured? })
    })
}

fn work(name: &'static str, path: &Path, goes_on: &(dyn Fn() -> bool + Sync)) -> Result<Foreground> {
    let done = crowd(JOBS, |job, latencies| {
        let flags = OFlags::DIRECT.bits() as i32;
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
        let mut random = Random::new(job);
        let mut memory = vec![job as u8; 2 * BLOCK];
        let aligned = memory.as_ptr().align_offset(BLOCK);
        let buffer = &mut memory[aligned..aligned + BLOCK];
        while goes_on() {
            let offset = random.below(WORKED_ON_BYTES / BLOCK as u64) * BLOCK as u64;
            if random.percent(READS_PERCENT) {
                latencies.time(|| file.read_exact_at(buffer, offset))?;
            } else {
                latencies.time(|| file.write_all_at(buffer, offset))?;
            }
        }
        Ok(())
    })?;
    let operations_per_s = done.operations as f64 / done.busy.as_secs_f64();
    let latencies = done.latencies.context("latencies are measured")?;
    eprintln!("foreground {name}: {operations_per_s:.0}/s, 99 % within {:.2?}", latencies.percentile(0.99));
    Ok(Foreground { name, latencies, operations_per_s, moved_mb_s: 0.0 })
}
