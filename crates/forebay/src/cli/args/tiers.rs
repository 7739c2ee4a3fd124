//! Commands about tiering.

use std::path::PathBuf;

use clap::{Args, Subcommand};

pub(super) fn duration(text: &str) -> Result<u64, String> {
    base::units::parse_duration(text).map_err(|error| error.to_string())
}

/// A filesystem and the store that it is to use.
#[derive(Debug, Args)]
#[command(
    after_help = "What is already there moves, too. Times are such as 30s, 2h, 1d5h or 1w. When drives are filling up, what the
store has leaves them earlier.

Example:
  forebay fs attach /srv/forebay main cold --retention 1w --tiering-cue 4h"
)]
pub(crate) struct AttachArgs {
    /// The node's directory.
    pub(crate) dir: PathBuf,
    /// The filesystem.
    pub(crate) name: String,
    /// The store: see `forebay store list`.
    pub(crate) store: String,
    /// How long written content stays on drives, in place of the time of the filesystem's group. Default: unchanged, or
    /// the time of the group.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) retention: Option<u64>,
    /// How long after a write its content is copied to the store, in place of the time of the filesystem's group: at
    /// least 10s, at most a third of the retention. Default: unchanged, or the time of the group, or a third of the
    /// retention if that is less.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) tiering_cue: Option<u64>,
    /// Remove the filesystem's own times: those of its group apply again.
    #[arg(long, conflicts_with_all = ["retention", "tiering_cue"])]
    pub(crate) group_times: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TierCommand {
    /// Show filesystems that have an object store: where their content lies, what is under way, and what holds it up.
    #[command(after_help = "Example:\n  forebay tier status /srv/forebay")]
    Status {
        /// The node's directory.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show how much of files is on drives only, in both places, and in the store only.
    #[command(after_help = "Example:\n  forebay tier location /srv/forebay/mnt/some/file")]
    Location {
        /// Files on mounted filesystems, and directories for all files below.
        #[arg(required = true, value_name = "PATH")]
        paths: Vec<PathBuf>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show requests to object stores: those under way, and those that ended lately.
    Ops {
        /// The node's directory.
        dir: PathBuf,
        /// Of this store only.
        store: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Forecast the space on drives and in the store for another retention, from the present age of the content.
    #[command(after_help = "Example:\n  forebay tier forecast /srv/forebay --retention 7d")]
    Forecast {
        /// The node's directory.
        dir: PathBuf,
        /// The retention to compare with the present one.
        #[arg(long, value_name = "TIME", value_parser = duration)]
        retention: Option<u64>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Bring files back to the drives. They age anew: after the retention they leave again.
    #[command(
        after_help = "Example:\n  forebay tier fetch /srv/forebay/mnt/some/file /srv/forebay/mnt/project"
    )]
    Fetch {
        /// Files on mounted filesystems, and directories for all files below.
        #[arg(required = true, value_name = "PATH")]
        paths: Vec<PathBuf>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Release from the drives, now, the content of files that the store has. Content that is not uploaded yet stays.
    #[command(after_help = "Example:\n  forebay tier release /srv/forebay/mnt/some/file")]
    Release {
        /// Files on mounted filesystems, and directories for all files below.
        #[arg(required = true, value_name = "PATH")]
        paths: Vec<PathBuf>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::super::{Command, FsCommand, parse};
    use super::*;

    #[test]
    fn times_are_read_and_what_is_wrong_with_them_is_said() {
        let attach = parse("forebay fs attach /dir main cold --retention 1d5h --tiering-cue 30s").unwrap();
        let Command::Fs(FsCommand::Attach(args)) = attach else { panic!("{attach:?} is something else") };
        assert_eq!((args.name.as_str(), args.store.as_str()), ("main", "cold"));
        assert_eq!((args.retention, args.tiering_cue), (Some(104_400), Some(30)));
        let error = parse("forebay fs attach /dir main cold --retention 1y").unwrap_err();
        assert!(error.contains("numbers with s, m, h, d or w"), "{error}");
    }

    #[test]
    fn files_are_named_and_at_least_one() {
        let fetch = parse("forebay tier fetch /mnt/a /mnt/b --json").unwrap();
        let Command::Tier(TierCommand::Fetch { paths, json: true }) = fetch else {
            panic!("{fetch:?} is something else")
        };
        assert_eq!(paths.len(), 2);
        assert!(parse("forebay tier fetch").is_err());
    }
}
