//! Commands about filesystem groups.

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};

use super::tiers::duration;

/// A filesystem group.
#[derive(Debug, Args)]
pub(crate) struct OneFsGroupArgs {
    /// The node's directory.
    pub(crate) dir: PathBuf,
    /// Its name.
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) name: String,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum FsGroupCommand {
    /// Create a filesystem group.
    #[command(after_help = "Times are such as 30s, 2h, 1d5h or 1w. 10s <= cue <= retention / 3.

Example:
  forebay fs group create /srv/forebay archive --retention 1w --tiering-cue 4h")]
    Create {
        /// The node's directory.
        dir: PathBuf,
        /// Its name: letters, digits and . _ @ + = -
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// How long written content stays on drives. Default: 1d.
        #[arg(long, value_name = "TIME", value_parser = duration)]
        retention: Option<u64>,
        /// How long after it was written anything is copied to the store. Default: 1h, or a third of the retention if that
        /// is less.
        #[arg(long, value_name = "TIME", value_parser = duration)]
        tiering_cue: Option<u64>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// List filesystem groups.
    #[command(after_help = "Example:\n  forebay fs group list /srv/forebay")]
    List {
        /// The node's directory.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show one filesystem group.
    #[command(after_help = "Example:\n  forebay fs group show /srv/forebay archive")]
    Show(OneFsGroupArgs),
    /// Change times of a filesystem group, at once for all filesystems that have none of their own.
    #[command(
        after_help = "Refuses times that do not fit those that a filesystem of the group has of its own.

Example:
  forebay fs group update /srv/forebay archive --retention 2w"
    )]
    Update {
        /// The node's directory.
        dir: PathBuf,
        /// Its name.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// How long written content stays on drives. Default: unchanged.
        #[arg(long, value_name = "TIME", value_parser = duration, required_unless_present = "tiering_cue")]
        retention: Option<u64>,
        /// How long after it was written anything is copied to the store. Default: as it was.
        #[arg(long, value_name = "TIME", value_parser = duration)]
        tiering_cue: Option<u64>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove a filesystem group that no filesystem belongs to.
    #[command(after_help = "Example:\n  forebay fs group remove /srv/forebay archive")]
    Remove(OneFsGroupArgs),
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::super::{Command, FsCommand, parse};
    use super::*;

    #[test]
    fn a_group_has_times() {
        let create = parse("forebay fs group create /dir fast --retention 1w --tiering-cue 4m").unwrap();
        let Command::Fs(FsCommand::Group(FsGroupCommand::Create { name, retention, tiering_cue, .. })) =
            create
        else {
            panic!("{create:?} is something else")
        };
        assert_eq!((name.as_str(), retention, tiering_cue), ("fast", Some(604_800), Some(240)));
        let error = parse("forebay fs group create /dir fast --retention 1y").unwrap_err();
        assert!(error.contains("numbers with s, m, h, d or w"), "{error}");
    }

    #[test]
    fn an_update_names_a_time_and_a_change_of_a_filesystem_something() {
        assert!(parse("forebay fs group update /dir fast --tiering-cue 1m").is_ok());
        assert!(parse("forebay fs group update /dir fast").is_err());
        assert!(parse("forebay fs set /dir main --group fast").is_ok());
        assert!(parse("forebay fs set /dir main --group fast --profile r2").is_ok());
        assert!(parse("forebay fs set /dir main").is_err());
    }

    #[test]
    fn times_are_the_filesystems_own_or_the_groups() {
        assert!(parse("forebay fs attach /dir main cold --group-times").is_ok());
        assert!(parse("forebay fs attach /dir main cold --group-times --retention 1d").is_err());
    }
}
