//! The options of `check`.

use std::path::PathBuf;

use clap::Args;

const HELP: &str = "Looks at kernel, clock, processor, memory, limits, the disk of the node's directory, and the engine with the logs; reads from
the node's drives, one after another and then all at once; and sends to all other nodes. Nothing is written but a small
file in the directory, which is removed. Each finding says what it costs and what to do.

Works where no node runs yet, too; then without the network. Takes seconds, and more under load. What programs do
meanwhile is slower, and makes the figures smaller.

Exit status:
  0  nothing that would not work; there may be warnings
  1  something does not work
  2  it could not be looked at

Examples:
  forebay check /srv/forebay
  forebay check /srv/forebay --all --json";

#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct CheckArgs {
    /// The node's directory.
    pub(crate) dir: PathBuf,
    /// All nodes, one after another.
    #[arg(long)]
    pub(crate) all: bool,
    /// Do not read from drives.
    #[arg(long)]
    pub(crate) no_drives: bool,
    /// Do not send to other nodes.
    #[arg(long)]
    pub(crate) no_network: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
