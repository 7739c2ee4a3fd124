//! Measures content that moves to the store and back.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::rig::{Protocol, Rig, SETTLED, Ticks};
use super::{MIB, Scale, Source};
use crate::random::Random;

/// Files of one kind that moved in one direction.
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
    /// The limit of the store: the mean of the measurements before and after, in MB/s.
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

/// Writes files, measures their way to the store and back, and removes them.
pub(super) fn measure(
    rig: &Rig,
    blob_mib: u64,
    source: &Source,
    scale: &Scale,
    moves: &mut Vec<Move>,
) -> Result<()> {
    let name = name(rig.protocol, blob_mib, source);
    let directory = rig.mount().join("moved");
    write_files(&directory, source)?;
    let written = Instant::now();
    // Both directions, and some time for the rest.
    let measuring = Duration::from_secs(2 * scale.limit_s + 1);
    std::thread::sleep(SETTLED.saturating_sub(written.elapsed() + measuring));
    let first = rig.limit(scale.limit_s)?;
    std::thread::sleep(SETTLED.saturating_sub(written.elapsed()));
    let bytes = source.file_bytes * source.files;
    let moved = |is_out: bool, time: Duration, before: Ticks, after: Ticks, limits: [f64; 2]| {
        let ticks = |ticks: u64| Duration::from_millis(10 * ticks);
        let moved = Move {
            name: name.clone(),
            is_out,
            aim: source.aim,
            bytes,
            time,
            node_cpu: ticks(after.node - before.node),
            store_cpu: ticks(after.store - before.store),
            limit_mb_s: f64::midpoint(limits[0], limits[1]),
        };
        let (way, [before, after]) = (if is_out { "out" } else { "in" }, limits);
        let (mb_s, part) = (moved.mb_s(), 100.0 * moved.part());
        eprintln!(
            "{name} {way}: {mb_s:.0} MB/s, the store {before:.0} before and {after:.0} after: {part:.0} %"
        );
        moved
    };

    let before = rig.ticks()?;
    let time = upload(rig)?;
    let after = rig.ticks()?;
    let second = rig.limit(scale.limit_s)?;
    moves.push(moved(true, time, before, after, [first.put_mb_s, second.put_mb_s]));
    let whole = std::slice::from_ref(&directory);
    rig.tier("release", whole)?;
    // The caches of the store stay: they were warm when its limit was measured, too.
    rig.restart()?;
    let (before, began) = (rig.ticks()?, Instant::now());
    rig.tier("fetch", whole)?;
    let (time, after) = (began.elapsed(), rig.ticks()?);
    let third = rig.limit(scale.limit_s)?;
    moves.push(moved(false, time, before, after, [second.get_mb_s, third.get_mb_s]));

    std::fs::remove_dir_all(&directory)?;
    rig.wait_until("removal of blobs", |rig| Ok(rig.status(["blobs"])? == [0]))
}

fn write_files(directory: &Path, source: &Source) -> Result<()> {
    std::fs::create_dir(directory)?;
    let mut random = Random::new(source.file_bytes);
    let data: Vec<u8> = (0..MIB / 8).flat_map(|_| random.next().to_le_bytes()).collect();
    for number in 0..source.files {
        let mut file = File::create(directory.join(number.to_string()))?;
        let mut left = source.file_bytes;
        while left > 0 {
            let len = left.min(data.len() as u64);
            file.write_all(&data[..len as usize])?;
            left -= len;
        }
    }
    let root = File::open(directory)?;
    rustix::fs::syncfs(&root).context("sync the files")
}

/// Uploads settled content. Returns the time until the last bytes were counted.
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
