//! Commands about blobs.

use std::path::PathBuf;
use std::str::FromStr;

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
    /// Write the bytes of one range, or of one piece of it, to standard output.
    #[command(
        after_help = "Example:\n  forebay blob cat blob 0 > part\n  forebay blob cat blob 3.17 > small-file"
    )]
    Cat {
        /// The blob, fetched from a store; - for standard input.
        file: PathBuf,
        /// The range's number as `dump` counts, or RANGE.PIECE.
        range: RangeName,
    },
}

/// A range of a blob, or one piece of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RangeName {
    pub(crate) range: usize,
    pub(crate) piece: Option<usize>,
}

impl FromStr for RangeName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (range, piece) = text.split_once('.').map_or((text, None), |(range, piece)| (range, Some(piece)));
        let number = |text: &str| text.parse().map_err(|_| "not a number, or two with a dot".to_owned());
        Ok(Self { range: number(range)?, piece: piece.map(number).transpose()? })
    }
}
