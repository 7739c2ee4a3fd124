//! `cargo xtask bench-s3`: the S3 endpoint beside MinIO and plain files, on one disk in one run.
//!
//! This process makes the load. Its CPU time and that of the server are counted separately.
#![allow(clippy::disallowed_methods, reason = "a measurement needs real time, threads and files")]

mod aims;
mod files;
mod load;
mod measure;
pub(crate) mod server;
mod table;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::arguments::Arguments;
use measure::Column;
use server::Server;

pub(crate) const USAGE: &str = "bench-s3 --dir DIR [--forebay BINARY] [--minio BINARY] [--subjects forebay,minio,files] [--only WORD] [--quick] [--json]";

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The amount of work.
#[derive(Debug, Clone)]
struct Scale {
    sizes: &'static [u64],
    workers: &'static [u64],
    /// Duration of each figure, unless its work ends earlier.
    time: Duration,
    /// Most bytes of all objects of one size.
    bytes_max: u64,
    /// Keys of a listing.
    keys: u64,
}

const FULL: Scale = Scale {
    sizes: &[KIB, 4 * KIB, 64 * KIB, MIB, 8 * MIB],
    workers: &[1, 16, 64, 512],
    time: Duration::from_secs(2),
    bytes_max: 1 << 30,
    keys: 100_000,
};
const QUICK: Scale = Scale {
    sizes: &[4 * KIB, MIB],
    workers: &[1, 16, 64, 512],
    time: Duration::from_secs(1),
    bytes_max: 256 << 20,
    keys: 10_000,
};

/// Runs the subcommand.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    let options = ["dir", "forebay", "minio", "subjects", "only"];
    let arguments = Arguments::parse(arguments, &options, &["quick", "json"])
        .with_context(|| format!("usage: {USAGE}"))?;
    let directory = PathBuf::from(arguments.text("dir").context("--dir is missing")?);
    let scale = if arguments.is_set("quick") { QUICK } else { FULL };
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or_default();
    eprintln!("load of the machine before the start: {load}; other work distorts what follows");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let mut columns = Vec::new();
    for subject in arguments.text("subjects").unwrap_or("forebay,minio,files").split(',') {
        eprintln!("measuring {subject}");
        let home = directory.join(subject);
        let mut column = Column::new(subject, arguments.text("only"));
        let measured = match subject {
            "forebay" => {
                let binary = arguments.text("forebay").unwrap_or("target/release/forebay");
                let server = Server::forebay(binary.as_ref(), &home)?;
                runtime.block_on(load::run_all(&server, &scale, &mut column))
            }
            "minio" => {
                let server = Server::minio(arguments.text("minio").unwrap_or("minio"), &home)?;
                runtime.block_on(load::run_all(&server, &scale, &mut column))
            }
            "files" => files::run_all(&home, &scale, &mut column),
            other => bail!("no such subject: {other}"),
        };
        if let Err(error) = measured {
            // The other columns are still of use.
            eprintln!("FAIL {subject}: {error:#}");
        }
        std::fs::remove_dir_all(&home)?;
        columns.push(column);
    }
    if arguments.is_set("json") {
        println!("{}", table::json(&columns));
    } else {
        print!("{}\n{}", table::text(&columns), aims::text(&columns));
    }
    Ok(())
}

/// `4 KiB`.
fn size_text(bytes: u64) -> String {
    if bytes >= MIB { format!("{} MiB", bytes / MIB) } else { format!("{} KiB", bytes / KIB) }
}

/// `GET 4 KiB, 16 workers`.
fn figure_name(verb: &str, bytes: u64, workers: u64) -> String {
    let plural = if workers == 1 { "" } else { "s" };
    format!("{verb} {}, {workers} worker{plural}", size_text(bytes))
}
