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
    /// Only events of at least this severity: info, warning or error.
    #[arg(long, value_name = "SEVERITY", default_value = "info")]
    pub(crate) severity: Severity,
    /// Only events of the last 2h, 1d or other time.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) since: Option<u64>,
    /// Only events that contain this text; letter case does not matter.
    #[arg(long, value_name = "TEXT")]
    pub(crate) find: Option<String>,
    /// How many at most, the last ones.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 50)]
    pub(crate) lines: usize,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
