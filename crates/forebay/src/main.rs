//! The `forebay` program: configuration, roles and the command line.

mod backup;
mod checks;
mod cli;
mod engine;
mod guest;
mod identity;
mod log;
mod member;
mod mount;
mod node;
mod remote;
mod stores;
mod watchdog;

use std::io::Write;

use clap::Parser;

fn main() -> std::process::ExitCode {
    base::env::abort_on_panic();
    match cli::run(cli::Cli::parse()) {
        Ok(status) => status,
        Err(error) => {
            // A process that began anew has nobody who reads it.
            let _ = writeln!(std::io::stderr(), "forebay: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}
