//! The speed of plain files on the disk and in the page cache: the limit for any server on them.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::Result;

use super::measure::{Before, Column, Tally};
use super::{Scale, figure_name};
use crate::random::Random;

/// Enough threads to keep a disk busy; more only wait for cores.
const THREADS: u64 = 64;

/// Writes files with fsync and reads them: every size, with one thread per worker.
pub(super) fn run_all(directory: &Path, scale: &Scale, column: &mut Column) -> Result<()> {
    std::fs::create_dir(directory)?;
    for size in scale.sizes.iter().copied() {
        let mut random = Random::new(size);
        let bytes: Vec<u8> = (0..size.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).collect();
        let keys = (scale.bytes_max / size).clamp(1, 2000);
        let path = |key: u64| -> PathBuf { directory.join(format!("{size}-{key}")) };
        for workers in scale.workers.iter().copied().filter(|workers| *workers <= THREADS) {
            let put = |key: u64| {
                let mut file = File::create(path(key))?;
                file.write_all(&bytes)?;
                file.sync_all()
            };
            measure(column, scale, figure_name("PUT", size, workers), workers, (keys, size), put)?;
        }
        for key in 0..keys {
            std::fs::write(path(key), &bytes)?;
        }
        for workers in scale.workers.iter().copied().filter(|workers| *workers <= THREADS) {
            let get = |key: u64| {
                let mut buffer = vec![0; size as usize];
                File::open(path(key))?.read_exact(&mut buffer)
            };
            measure(column, scale, figure_name("GET", size, workers), workers, (keys, size), get)?;
        }
        (0..keys).try_for_each(|key| std::fs::remove_file(path(key)))?;
    }
    Ok(())
}

/// Does something with one file after another until the time is over.
fn measure(
    column: &mut Column,
    scale: &Scale,
    name: String,
    workers: u64,
    (keys, size): (u64, u64),
    operation: impl Fn(u64) -> std::io::Result<()> + Sync,
) -> Result<()> {
    if !column.wants(&name) {
        return Ok(());
    }
    let before = Before::now(None)?;
    let next = AtomicU64::new(0);
    let work = || -> std::io::Result<Tally> {
        let mut tally = Tally::default();
        let end = Instant::now() + scale.time;
        while Instant::now() < end {
            let key = next.fetch_add(1, Ordering::Relaxed) % keys;
            tally.latencies.time(|| operation(key))?;
            tally.operations += 1;
            tally.bytes += size;
        }
        Ok(tally)
    };
    let mut all = Tally::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| {
            all.merge(&thread.join().expect("a worker does not panic")?);
            Ok::<_, std::io::Error>(())
        })
    })?;
    column.keep(name, all, &before, None)
}
