//! Chores of this repository: `cargo xtask tidy`.

mod tidy;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};

fn main() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["tidy"] => {
            let root =
                Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies in the repository")?;
            let findings = tidy::check(root)?;
            for finding in &findings {
                println!("{finding}");
            }
            Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        _ => {
            eprintln!(
                "usage: cargo xtask tidy\n\ntidy  check the rules of STYLE.md that a machine can check"
            );
            Ok(ExitCode::from(2))
        }
    }
}
