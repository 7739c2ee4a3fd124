//! The options of `events`.

use std::path::PathBuf;

use clap::Args;
use wire::event::Severity;

use super::tiers::duration;

#[derive(Debug, Args)]
#[command(after_help = "The last 4096 events are kept, with the metadata. Nothing is deleted by age.

Examples:
  forebay events /srv/forebay --severity warning --since 1d
  forebay events /srv/forebay --find 'drive 3' --json")]
pub(crate) struct EventsArgs {
    /// The node's directory.
    pub(crate) dir: PathBuf,
    /// Only what matters as much: info, warning or error.
    #[arg(long, value_name = "SEVERITY", default_value = "info")]
    pub(crate) severity: Severity,
    /// Only what is not older, such as 2h or 1d.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) since: Option<u64>,
    /// Only what has this text in it, in whatever case.
    #[arg(long, value_name = "TEXT")]
    pub(crate) find: Option<String>,
    /// How many at most, the last ones.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 50)]
    pub(crate) lines: usize,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
