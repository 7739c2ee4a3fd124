//! The work that is measured, the same for every subject.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rustix::fs::OFlags;

use super::meter::{Done, Meter};
use super::{Scale, Subject};
use crate::random::Random;

const MIB: usize = 1 << 20;
const BLOCK_BYTES: usize = 4096;
const SEED: u64 = 1;
/// Threads of the storms that are not made by one.
const CROWD: u64 = 4;

/// Does everything on one subject, in an order in which each part finds what it needs.
pub(crate) fn run_all(subject: &Subject, scale: &Scale, archive: &Path, meter: &mut Meter) -> Result<()> {
    sequential(subject, scale, meter)?;
    random_reads(subject, scale, meter)?;
    random_writes(subject, scale, meter)?;
    for threads in [1, CROWD] {
        storm(subject, scale, threads, meter)?;
    }
    tree(subject, archive, meter)
}

fn sequential(subject: &Subject, scale: &Scale, meter: &mut Meter) -> Result<()> {
    let path = subject.root().join("large");
    let done = Done { operations: scale.file_bytes / MIB as u64, bytes: scale.file_bytes };
    let mut buffer = vec![0; MIB];
    // Data that no filesystem could leave out.
    let mut random = Random::new(SEED);
    for word in buffer.chunks_exact_mut(8) {
        word.copy_from_slice(&random.next().to_le_bytes());
    }
    meter.measure(subject, "write 1 MiB, fsync at end", || {
        let mut file = File::create(&path)?;
        for _ in 0..done.operations {
            file.write_all(&buffer)?;
        }
        file.sync_all()?;
        Ok(done)
    })?;
    subject.make_cold()?;
    for name in ["read 1 MiB, cold", "read 1 MiB, again"] {
        meter.measure(subject, name, || {
            let mut file = File::open(&path)?;
            for _ in 0..done.operations {
                file.read_exact(&mut buffer)?;
            }
            Ok(done)
        })?;
    }
    Ok(())
}

fn random_reads(subject: &Subject, scale: &Scale, meter: &mut Meter) -> Result<()> {
    let path = subject.root().join("large");
    for (name, threads) in [("read 4 KiB random direct, QD1", 1), ("read 4 KiB random direct, QD32", 32)] {
        subject.make_cold()?;
        meter.measure(subject, name, || {
            let deadline = Instant::now() + scale.time;
            crowd(threads, |thread| {
                // Past the page cache, or most reads would soon not reach what is measured.
                let flags = OFlags::DIRECT.bits() as i32;
                let file = OpenOptions::new().read(true).custom_flags(flags).open(&path)?;
                let mut random = Random::new(SEED + thread);
                let mut memory = [0; 2 * BLOCK_BYTES];
                let aligned = memory.as_ptr().align_offset(BLOCK_BYTES);
                let buffer = &mut memory[aligned..aligned + BLOCK_BYTES];
                let mut operations = 0;
                while Instant::now() < deadline {
                    let block = random.below(scale.file_bytes / BLOCK_BYTES as u64);
                    file.read_exact_at(buffer, block * BLOCK_BYTES as u64)?;
                    operations += 1;
                }
                Ok(operations)
            })
        })?;
    }
    Ok(())
}

fn random_writes(subject: &Subject, scale: &Scale, meter: &mut Meter) -> Result<()> {
    let path = subject.root().join("large");
    let buffer = [7; BLOCK_BYTES];
    let block =
        |random: &mut Random| random.below(scale.file_bytes / BLOCK_BYTES as u64) * BLOCK_BYTES as u64;
    meter.measure(subject, "write 4 KiB random, fsync at end", || {
        let deadline = Instant::now() + scale.time;
        let file = OpenOptions::new().write(true).open(&path)?;
        let mut random = Random::new(SEED);
        let mut operations = 0;
        while Instant::now() < deadline {
            file.write_all_at(&buffer, block(&mut random))?;
            operations += 1;
        }
        file.sync_all()?;
        Ok(Done { operations, bytes: 0 })
    })?;
    for (name, threads) in [("write 4 KiB + fsync, 1 file", 1), ("write 4 KiB + fsync, 4 files", CROWD)] {
        meter.measure(subject, name, || {
            let deadline = Instant::now() + scale.time;
            crowd(threads, |thread| {
                let mut file = File::create(subject.root().join(format!("log-{thread}")))?;
                let mut operations = 0;
                while Instant::now() < deadline {
                    file.write_all(&buffer)?;
                    file.sync_all()?;
                    operations += 1;
                }
                Ok(operations)
            })
        })?;
    }
    Ok(())
}

/// Each thread works in a directory of its own.
fn storm(subject: &Subject, scale: &Scale, threads: u64, meter: &mut Meter) -> Result<()> {
    let directory = |thread: u64| subject.root().join(format!("storm-{threads}-{thread}"));
    let name = |thread: u64, prefix: &str, index: u64| directory(thread).join(format!("{prefix}{index:06}"));
    for thread in 0..threads {
        std::fs::create_dir(directory(thread))?;
    }
    let mut each = |verb: &str, work: &(dyn Fn(u64, u64) -> Result<()> + Sync)| {
        meter.measure(
            subject,
            &format!("{verb}, {threads} thread{}", if threads > 1 { "s" } else { "" }),
            || {
                crowd(threads, |thread| {
                    for index in 0..scale.names {
                        work(thread, index)?;
                    }
                    Ok(scale.names)
                })
            },
        )
    };
    each("create", &|thread, index| {
        File::create_new(name(thread, "f", index))?;
        Ok(())
    })?;
    subject.make_cold()?;
    each("stat, cold", &|thread, index| {
        name(thread, "f", index).symlink_metadata()?;
        Ok(())
    })?;
    subject.make_cold()?;
    each("list and stat, cold, per name", &|thread, index| {
        // One listing for all names, so that the figure is per name.
        if index == 0 {
            let entries = std::fs::read_dir(directory(thread))?.map(|entry| Ok(entry?.metadata()?.len()));
            let count = entries.collect::<Result<Vec<u64>>>()?.len() as u64;
            ensure!(count == scale.names, "listed {count} of {} names", scale.names);
        }
        Ok(())
    })?;
    each("rename", &|thread, index| {
        Ok(std::fs::rename(name(thread, "f", index), name(thread, "g", index))?)
    })?;
    each("unlink", &|thread, index| Ok(std::fs::remove_file(name(thread, "g", index))?))
}

fn tree(subject: &Subject, archive: &Path, meter: &mut Meter) -> Result<()> {
    let directory = subject.root().join("tree");
    std::fs::create_dir(&directory)?;
    let files = AtomicU64::new(0);
    meter.measure(subject, "untar a tree, per file", || {
        let output = Command::new("tar")
            .args(["--extract", "--verbose", "--file"])
            .arg(archive)
            .arg("--directory")
            .arg(&directory)
            .stdin(Stdio::null())
            .output()?;
        ensure!(output.status.success(), "tar: {}", String::from_utf8_lossy(&output.stderr));
        files.store(output.stdout.iter().filter(|byte| **byte == b'\n').count() as u64, Ordering::Relaxed);
        Ok(Done { operations: files.load(Ordering::Relaxed), bytes: 0 })
    })?;
    subject.make_cold()?;
    let done = Done { operations: files.load(Ordering::Relaxed), bytes: 0 };
    meter.measure(subject, "read a tree, cold, per file", || {
        // Into a pipe: tar does not read what it would write to /dev/null.
        let script = r#"tar --create --file=- --directory="$0" . | cat >/dev/null"#;
        run(Command::new("sh").args(["-c", script]).arg(&directory))?;
        Ok(done)
    })?;
    meter.measure(subject, "rm -r a tree, per file", || {
        run(Command::new("rm").arg("-r").arg(&directory))?;
        Ok(done)
    })
}

/// Packs a part of a real tree into an archive in `directory`.
pub(crate) fn pack_tree(directory: &Path, files: usize) -> Result<PathBuf> {
    let archive = directory.join("tree.tar");
    let script = r#"cd /usr/share && find . \( -type f -size -4M -o -type l \) -print0 | LC_ALL=C sort -z |
        head -z -n "$1" | tar --create --null --no-recursion --files-from=- --file="$0""#;
    run(Command::new("sh").args(["-c", script]).arg(&archive).arg(files.to_string()))?;
    Ok(archive)
}

/// Runs the work on so many threads; it returns its operations.
fn crowd(threads: u64, work: impl Fn(u64) -> Result<u64> + Sync) -> Result<Done> {
    let results: Vec<Result<u64>> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn({
                    let work = &work;
                    move || work(thread)
                })
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().expect("a panic ends the process")).collect()
    });
    let operations = results.into_iter().sum::<Result<u64>>()?;
    Ok(Done { operations, bytes: 0 })
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
