//! Work on names: storms of small operations, and a real tree.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::meter::{Done, Meter};
use super::workload::{crowd, named};
use super::{Scale, Subject};

/// Each job works in a directory of its own.
pub(crate) fn storm(subject: &Subject, scale: &Scale, jobs: u64, meter: &mut Meter) -> Result<()> {
    let directory = |job: u64| subject.root().join(format!("storm-{jobs}-{job}"));
    let name = |job: u64, prefix: &str, index: u64| directory(job).join(format!("{prefix}{index:06}"));
    for job in 0..jobs {
        std::fs::create_dir(directory(job))?;
    }
    let count = (scale.names / jobs.min(4)).max(1);
    let mut each = |verb: &str, work: &(dyn Fn(u64, u64) -> Result<()> + Sync)| {
        meter.measure(subject, &named(verb, jobs), || {
            crowd(jobs, |job, latencies| (0..count).try_for_each(|index| latencies.time(|| work(job, index))))
        })
    };
    let stat = |job: u64, index: u64| -> Result<()> {
        // As most programs do, and unlike the standard library, without the time of creation.
        rustix::fs::lstat(name(job, "f", index))?;
        Ok(())
    };
    each("create + close", &|job, index| {
        File::create_new(name(job, "f", index))?;
        Ok(())
    })?;
    subject.make_cold()?;
    each("stat uncached", &stat)?;
    each("stat cached", &stat)?;
    subject.make_cold()?;
    meter.measure(subject, &named("list and stat, per name", jobs), || {
        let done = crowd(jobs, |job, latencies| {
            let entries = std::fs::read_dir(directory(job))?
                .map(|entry| latencies.time(|| Ok(rustix::fs::lstat(entry?.path())?.st_size)));
            let found = entries.collect::<Result<Vec<i64>>>()?.len() as u64;
            ensure!(found == count, "listed {found} of {count} names");
            Ok(())
        })?;
        // Names arrive in groups: the time between them is not a latency.
        Ok(Done { latencies: None, ..done })
    })?;
    let mut each = |verb: &str, work: &(dyn Fn(u64, u64) -> Result<()> + Sync)| {
        meter.measure(subject, &named(verb, jobs), || {
            crowd(jobs, |job, latencies| (0..count).try_for_each(|index| latencies.time(|| work(job, index))))
        })
    };
    each("rename", &|job, index| Ok(std::fs::rename(name(job, "f", index), name(job, "g", index))?))?;
    each("unlink", &|job, index| Ok(std::fs::remove_file(name(job, "g", index))?))
}

/// Makes files and nothing else, until they are durable. Each job has a directory of its own.
pub(crate) fn creates(subject: &Subject, scale: &Scale, jobs: u64, meter: &mut Meter) -> Result<()> {
    let directory = |job: u64| subject.root().join(format!("creates-{jobs}-{job}"));
    for job in 0..jobs {
        std::fs::create_dir(directory(job))?;
    }
    let count = (scale.names / jobs).max(1);
    meter.measure(subject, &named("create + close", jobs), || {
        let done = crowd(jobs, |job, latencies| {
            (0..count).try_for_each(|index| -> Result<()> {
                latencies.time(|| File::create_new(directory(job).join(format!("f{index:06}"))))?;
                Ok(())
            })
        })?;
        for job in 0..jobs {
            File::open(directory(job))?.sync_all()?;
        }
        Ok(done)
    })
}

pub(crate) fn tree(subject: &Subject, archive: &Path, meter: &mut Meter) -> Result<()> {
    let directory = subject.root().join("tree");
    std::fs::create_dir(&directory)?;
    let mut files = 0;
    meter.measure(subject, "tar x, per file", || {
        let output = Command::new("tar")
            .args(["--extract", "--verbose", "--file"])
            .arg(archive)
            .arg("--directory")
            .arg(&directory)
            .stdin(Stdio::null())
            .output()?;
        ensure!(output.status.success(), "tar: {}", String::from_utf8_lossy(&output.stderr));
        files = output.stdout.iter().filter(|byte| **byte == b'\n').count() as u64;
        Ok(Done::whole(files, 0))
    })?;
    subject.make_cold()?;
    meter.measure(subject, "read a tree, cold, per file", || {
        // Into a pipe: tar does not read file content if its output is /dev/null.
        let script = r#"tar --create --file=- --directory="$0" . | cat >/dev/null"#;
        run(Command::new("sh").args(["-c", script]).arg(&directory))?;
        Ok(Done::whole(files, 0))
    })?;
    meter.measure(subject, "rm -r, per file", || {
        run(Command::new("rm").arg("-r").arg(&directory))?;
        Ok(Done::whole(files, 0))
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

fn run(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
