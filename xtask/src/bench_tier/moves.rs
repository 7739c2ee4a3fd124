//! Content on its way to the store and back.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::rig::{Limit, Protocol, Rig, SETTLED, Ticks};
use super::{MIB, Scale, Source};
use crate::random::Random;

/// Files of one kind that went one way.
#[derive(Debug)]
pub(super) struct Move {
    pub(super) name: String,
    pub(super) is_out: bool,
    pub(super) aim: f64,
    pub(super) bytes: u64,
    pub(super) time: Duration,
    /// CPU time of node and store.
    pub(super) node_cpu: Duration,
    pub(super) store_cpu: Duration,
    /// What the store did just before, in MB/s.
    pub(super) limit_mb_s: f64,
}

impl Move {
    pub(super) fn mb_s(&self) -> f64 {
        self.bytes as f64 / 1e6 / self.time.as_secs_f64()
    }

    pub(super) fn part(&self) -> f64 {
        self.mb_s() / self.limit_mb_s
    }
}

/// `HTTP, blobs of 64 MiB, files of 1 MB`.
pub(super) fn name(protocol: Protocol, blob_mib: u64, source: &Source) -> String {
    format!("{}, blobs of {blob_mib} MiB, files of {}", protocol.name(), source.name)
}

/// Writes files, and measures how they go to the store and come back. They are removed afterwards.
pub(super) fn measure(
    rig: &Rig,
    blob_mib: u64,
    source: &Source,
    scale: &Scale,
    moves: &mut Vec<Move>,
) -> Result<()> {
    let name = name(rig.protocol, blob_mib, source);
    let directory = rig.mount().join("moved");
    let paths = write_files(&directory, source)?;
    let written = Instant::now();
    // Both ways, with some time for what is around.
    let measuring = Duration::from_secs(2 * scale.limit_s + 1);
    std::thread::sleep(SETTLED.saturating_sub(written.elapsed() + measuring));
    let limit = rig.limit(scale.limit_s)?;
    eprintln!("{name}: the store puts {:.0} MB/s, gets {:.0} MB/s", limit.put_mb_s, limit.get_mb_s);
    std::thread::sleep(SETTLED.saturating_sub(written.elapsed()));
    let bytes = source.file_bytes * source.files;
    let mut keep = |is_out: bool, time: Duration, (before, after): (Ticks, Ticks), limit: Limit| {
        let ticks = |ticks: u64| Duration::from_millis(10 * ticks);
        let moved = Move {
            name: name.clone(),
            is_out,
            aim: source.aim,
            bytes,
            time,
            node_cpu: ticks(after.node - before.node),
            store_cpu: ticks(after.store - before.store),
            limit_mb_s: if is_out { limit.put_mb_s } else { limit.get_mb_s },
        };
        let way = if is_out { "out" } else { "in" };
        eprintln!("  {way}: {:.0} MB/s, {:.0} % of it", moved.mb_s(), 100.0 * moved.part());
        moves.push(moved);
    };

    let before = rig.ticks()?;
    let time = upload(rig)?;
    keep(true, time, (before, rig.ticks()?), limit);
    rig.tier("release", &paths)?;
    rig.make_cold()?;
    let (before, began) = (rig.ticks()?, Instant::now());
    rig.tier("fetch", &paths)?;
    keep(false, began.elapsed(), (before, rig.ticks()?), limit);

    std::fs::remove_dir_all(&directory)?;
    rig.wait_until("removal of blobs", |rig| Ok(rig.status(["blobs"])? == [0]))
}

fn write_files(directory: &Path, source: &Source) -> Result<Vec<PathBuf>> {
    std::fs::create_dir(directory)?;
    let mut random = Random::new(source.file_bytes);
    let data: Vec<u8> = (0..MIB / 8).flat_map(|_| random.next().to_le_bytes()).collect();
    let mut paths = Vec::new();
    for number in 0..source.files {
        let path = directory.join(number.to_string());
        let mut file = File::create(&path)?;
        let mut left = source.file_bytes;
        while left > 0 {
            let len = left.min(data.len() as u64);
            file.write_all(&data[..len as usize])?;
            left -= len;
        }
        paths.push(path);
    }
    let root = File::open(directory)?;
    rustix::fs::syncfs(&root).context("sync the files")?;
    Ok(paths)
}

/// Lets what is settled go to the store. Returns how long that took: until the last bytes were counted.
fn upload(rig: &Rig) -> Result<Duration> {
    let began = Instant::now();
    rig.attach("10s")?;
    let (mut last, mut ended) = (0, began);
    loop {
        let [uploaded, queued] = rig.status(["uploaded_bytes", "queued_bytes"])?;
        if uploaded != last {
            (last, ended) = (uploaded, Instant::now());
        }
        if queued == 0 {
            break;
        }
        ensure!(ended.elapsed() < Duration::from_secs(60), "uploads do not go on: {queued} bytes to go");
        std::thread::sleep(Duration::from_millis(20));
    }
    rig.attach("1h")?;
    Ok(ended - began)
}
