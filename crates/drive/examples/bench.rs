//! Measures a device: `cargo run --release -p drive --example bench -- PATH [threads]`. Leaves a drive at PATH.

use base::env::Env;
use base::units::GIB;
use drive::{BenchOptions, Existing, Preallocate, PreferIo, bench};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("which path?")?;
    let io = if arguments.next().is_some() { PreferIo::ThreadPool } else { PreferIo::Auto };
    let options = BenchOptions {
        capacity_bytes: 4 * GIB,
        existing: Existing::Overwrite,
        preallocate: Preallocate::WriteZeros,
        io,
        operations: 2000,
    };
    let report = bench(&Env::real(), path.as_ref(), &options)?;
    println!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}
