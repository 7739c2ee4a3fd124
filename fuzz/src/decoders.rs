//! Every decoder under libFuzzer. `FUZZ_TARGET` names the one to run; see docs/develop/testing.md. With `FUZZ_SEEDS=DIR`
//! it writes first inputs for all of them and ends.
#![no_main]
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a fuzzer fails by panicking")]

use std::path::Path;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;

#[path = "targets.rs"]
mod targets;

use targets::{TARGETS, Target};

fn write_seeds() {
    let Some(directory) = std::env::var_os("FUZZ_SEEDS") else { return };
    for seed in targets::seeds() {
        let directory = Path::new(&directory).join(seed.target);
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join(seed.name), seed.bytes).unwrap();
    }
    std::process::exit(0);
}

fuzz_target!(init: write_seeds(), |data: &[u8]| {
    static TARGET: OnceLock<Target> = OnceLock::new();
    TARGET.get_or_init(|| {
        let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
        let found = TARGETS.iter().find(|(target, _)| *target == name);
        found.expect("FUZZ_TARGET names one of TARGETS").1
    })(data);
});
