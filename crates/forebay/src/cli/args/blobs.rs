//! Commands about blobs.

use std::path::PathBuf;

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum BlobCommand {
    /// Show the contents of a blob and verify it.
    #[command(after_help = "Exit status 1 if something is damaged.

Example:
  aws s3 cp s3://archive/B_1/2f6c.../d/I_21/3 blob && forebay blob dump blob")]
    Dump {
        /// The blob, fetched from a store; - for standard input.
        file: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Write the bytes of one range to standard output.
    #[command(after_help = "Example:\n  forebay blob cat blob 0 > part")]
    Cat {
        /// The blob, fetched from a store; - for standard input.
        file: PathBuf,
        /// The range's number, as `dump` counts.
        range: usize,
    },
}
