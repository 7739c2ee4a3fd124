//! `cargo xtask bench-tier`: the speed of content between drives and an object store, beside the limit of the store.
//!
//! The limit is measured in the same run by the same client (`forebay store bench`): it puts and reads blobs of random
//! bytes, with as many requests at a time as tiering has. Node, store and load share one machine and one disk.
#![allow(clippy::disallowed_methods, reason = "a measurement needs real time, threads and files")]

mod moves;
mod rig;
mod table;
mod uses;

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::arguments::Arguments;
use rig::{Protocol, Rig};

pub(crate) const USAGE: &str =
    "bench-tier --dir DIR [--forebay BINARY] [--minio BINARY] [--only WORD] [--quick] [--json]";

const MIB: u64 = 1 << 20;

/// Files to move.
#[derive(Debug, Clone, Copy)]
struct Source {
    name: &'static str,
    file_bytes: u64,
    files: u64,
    /// The part of the store's limit to reach.
    aim: f64,
}

/// The amount of work.
#[derive(Debug, Clone, Copy)]
struct Scale {
    sources: &'static [Source],
    blobs_mib: &'static [u64],
    /// Seconds for the measurement of the store's limit, each way.
    limit_s: u64,
    /// Size of a big file.
    big_bytes: u64,
    /// How often a short read is repeated.
    reads: usize,
    /// Seconds of reads and writes while content moves.
    foreground_s: u64,
}

const FULL: Scale = Scale {
    sources: &[
        Source { name: "100 MB", file_bytes: 100_000_000, files: 16, aim: 0.9 },
        Source { name: "1 MB", file_bytes: 1_000_000, files: 1000, aim: 0.9 },
        Source { name: "128 KB", file_bytes: 128_000, files: 8000, aim: 0.6 },
    ],
    blobs_mib: &[64, 32, 16, 8],
    limit_s: 4,
    big_bytes: 1 << 30,
    reads: 11,
    foreground_s: 6,
};
const QUICK: Scale = Scale {
    sources: &[
        Source { name: "100 MB", file_bytes: 100_000_000, files: 6, aim: 0.9 },
        Source { name: "1 MB", file_bytes: 1_000_000, files: 500, aim: 0.9 },
        Source { name: "128 KB", file_bytes: 128_000, files: 2500, aim: 0.6 },
    ],
    blobs_mib: &[64],
    limit_s: 2,
    big_bytes: 256 << 20,
    reads: 5,
    foreground_s: 3,
};

/// All results.
#[derive(Debug, Default)]
struct Results {
    moves: Vec<moves::Move>,
    uses: Vec<uses::Use>,
    round_trip_ms: f64,
    foreground: Vec<uses::Foreground>,
}

/// Runs the subcommand.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    let arguments = Arguments::parse(arguments, &["dir", "forebay", "minio", "only"], &["quick", "json"])
        .with_context(|| format!("usage: {USAGE}"))?;
    let directory = PathBuf::from(arguments.text("dir").context("--dir is missing")?);
    let forebay = PathBuf::from(arguments.text("forebay").unwrap_or("target/release/forebay"));
    let minio = arguments.text("minio").unwrap_or("minio");
    let scale = if arguments.is_set("quick") { QUICK } else { FULL };
    let wants = |name: &str| arguments.text("only").is_none_or(|only| name.contains(only));
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or_default();
    eprintln!("load of the machine before the start: {load}; other work distorts what follows");
    let mut results = Results::default();
    for protocol in [Protocol::Http, Protocol::Https] {
        let home = directory.join(protocol.name());
        let rig = Rig::new(&home, &forebay, minio, protocol)?;
        // Over TLS, only the case that is compared with plain HTTP.
        let blobs_mib = if protocol == Protocol::Http { scale.blobs_mib } else { &scale.blobs_mib[..1] };
        for blob_mib in blobs_mib {
            rig.set_blob_size(*blob_mib)?;
            for source in scale.sources {
                if wants(&moves::name(protocol, *blob_mib, source)) {
                    moves::measure(&rig, *blob_mib, source, &scale, &mut results.moves)?;
                }
            }
        }
        if protocol == Protocol::Http {
            rig.set_blob_size(scale.blobs_mib[0])?;
            if wants("use") {
                uses::measure(&rig, &scale, &mut results)?;
            }
            if wants("foreground") {
                results.foreground = uses::foreground(&rig, &scale)?;
            }
        }
        drop(rig);
        std::fs::remove_dir_all(&home)?;
    }
    if arguments.is_set("json") {
        println!("{}", table::json(&results));
    } else {
        print!("{}", table::text(&results));
    }
    Ok(())
}
