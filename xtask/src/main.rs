//! Tools of this repository: `cargo xtask tidy`, and tests and measurements of whole nodes.

mod arguments;
mod bench;
mod bench_s3;
mod bench_tier;
mod crash;
mod disks;
mod node;
mod nullfs;
mod random;
mod s3;
mod tidy;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};

fn main() -> Result<ExitCode> {
    base::env::abort_on_panic();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["tidy"] => tidy(),
        ["crash", ref rest @ ..] => Ok(exit_code(crash::run(rest)?)),
        ["soak", ref rest @ ..] => Ok(exit_code(crash::soak::run(rest)?)),
        ["bench", ref rest @ ..] => bench::run(rest).map(|()| ExitCode::SUCCESS),
        ["bench-s3", ref rest @ ..] => bench_s3::run(rest).map(|()| ExitCode::SUCCESS),
        ["bench-tier", ref rest @ ..] => bench_tier::run(rest).map(|()| ExitCode::SUCCESS),
        ["disks", ref rest @ ..] => disks::run(rest).map(|()| ExitCode::SUCCESS),
        ["nullfs", mount, ref transport @ ..] => {
            nullfs::run(Path::new(mount), transport).map(|()| ExitCode::SUCCESS)
        }
        _ => {
            eprintln!(
                "usage: cargo xtask COMMAND\n\n\
                 tidy\n      check the rules of STYLE.md that a machine can check\n\
                 {}\n      kill a node or cut its power under load, and check its promises\n\n\
                 {}\n      load a node for a long time and report drifts\n\n\
                 {}\n      serve disks that lose unflushed writes in a power cut, and fail on command\n\n\
                 {}\n      measure it beside ext4 and an empty FUSE filesystem\n\n\
                 {}\n      measure its S3 endpoint beside MinIO and plain files\n\n\
                 {}\n      measure tiering beside the limit of its store\n\n\
                 {}\n      serve a filesystem in memory, to measure the cost of FUSE",
                crash::USAGE,
                crash::soak::USAGE,
                disks::USAGE,
                bench::USAGE,
                bench_s3::USAGE,
                bench_tier::USAGE,
                nullfs::USAGE,
            );
            Ok(ExitCode::from(2))
        }
    }
}

fn tidy() -> Result<ExitCode> {
    // Read at run time: the build may come from the cache of another checkout.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").context("run it by `cargo xtask tidy`")?;
    let root = Path::new(&package).parent().context("xtask lies in the repository")?;
    let findings = tidy::check(root)?;
    for finding in &findings {
        println!("{finding}");
    }
    Ok(exit_code(findings.is_empty()))
}

fn exit_code(is_well: bool) -> ExitCode {
    if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
