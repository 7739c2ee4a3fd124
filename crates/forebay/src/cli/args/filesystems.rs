//! Arguments of `fs`.

use std::collections::BTreeSet;
use std::path::PathBuf;

use admin::Placement;
use clap::{Args, Subcommand, ValueEnum};
use layout::Profile;

use super::{AttachArgs, FsGroupCommand, size};

/// A size, or none, which is 0.
fn limit(text: &str) -> Result<u64, String> {
    match text {
        "none" => Ok(0),
        _ => size(text),
    }
}

/// How much a filesystem may hold.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct LimitArgs {
    /// Most bytes of content, on drives and in the object store together, and size in `df`; `none`: as much as the
    /// drives hold, which is the default.
    #[arg(long, value_name = "SIZE", value_parser = limit)]
    pub(crate) size: Option<u64>,
    /// Most bytes of content on drives, before redundancy; `none`: as much as the drives hold, which is the default.
    #[arg(long, value_name = "SIZE", value_parser = limit)]
    pub(crate) ssd: Option<u64>,
}

/// Where new data of a filesystem goes, within the rules of its profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlacementArg {
    /// Evenly to all drives.
    Spread,
    /// The first copy, or as many data shards as possible, to the node that writes; or else to its rack or zone. Reads of copies are served
    /// there.
    Local,
}

impl From<PlacementArg> for Placement {
    fn from(placement: PlacementArg) -> Self {
        match placement {
            PlacementArg::Spread => Self::Spread,
            PlacementArg::Local => Self::Local,
        }
    }
}

/// The nodes that a filesystem is for; none: all nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeList(pub(crate) BTreeSet<u32>);

fn node_list(text: &str) -> Result<NodeList, String> {
    if text == "all" {
        return Ok(NodeList(BTreeSet::new()));
    }
    let numbers: Result<BTreeSet<u32>, _> = text.split(',').map(str::parse).collect();
    numbers.map(NodeList).map_err(|_| "numbers of nodes, such as 1,2,3, or all".to_owned())
}

#[derive(Debug, Subcommand)]
pub(crate) enum FsCommand {
    /// Create a filesystem on the node's drives.
    #[command(after_help = "Example:\n  forebay fs create /srv/forebay scratch --profile 1+0 --size 500GiB")]
    Create {
        /// The node's directory.
        dir: PathBuf,
        /// Its name.
        name: String,
        /// How its data is protected.
        #[arg(long, value_name = "P")]
        profile: Profile,
        #[command(flatten)]
        limits: LimitArgs,
        /// The filesystem group that it belongs to: see `forebay fs group list`. Default: default.
        #[arg(long, value_name = "NAME")]
        group: Option<String>,
        /// Where new data goes. Default: spread.
        #[arg(long)]
        placement: Option<PlacementArg>,
        /// The nodes whose drives its data is for: their numbers, or `all`, which is the default.
        #[arg(long, value_name = "1,2,3", value_parser = node_list)]
        nodes: Option<NodeList>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// List filesystems.
    #[command(after_help = "Example:\n  forebay fs list /srv/forebay")]
    List {
        /// The node's directory.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Change a filesystem. New data gets a new profile at once; stored data is rewritten in the background.
    /// Limits and a new group hold at once.
    #[command(after_help = "Examples:
  forebay fs set /srv/forebay main --profile 4+2
  forebay fs set /srv/forebay main --size 10TiB --ssd 500GiB
  forebay fs set /srv/forebay main --group archive
  forebay fs set /srv/forebay scratch --placement local
  forebay fs set /srv/forebay scratch --nodes 4,5,6 --dry-run")]
    Set {
        /// The node's directory.
        dir: PathBuf,
        /// Its name.
        name: String,
        /// How its data is protected.
        #[arg(long, value_name = "P", required_unless_present_any = ["size", "ssd", "group", "placement", "nodes"])]
        profile: Option<Profile>,
        #[command(flatten)]
        limits: LimitArgs,
        /// The filesystem group that it belongs to from now on: see `forebay fs group list`.
        #[arg(long, value_name = "NAME")]
        group: Option<String>,
        /// Where new data goes from now on. Stored data stays where it is.
        #[arg(long)]
        placement: Option<PlacementArg>,
        /// The nodes whose drives its data is for: their numbers, or `all`. New data goes there at once, stored data follows in the
        /// background, as with `forebay fs balance`.
        #[arg(long, value_name = "1,2,3", value_parser = node_list, conflicts_with_all = ["profile", "size", "ssd", "group", "placement"])]
        nodes: Option<NodeList>,
        /// With --nodes: only say what would move.
        #[arg(long, requires = "nodes")]
        dry_run: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Move stored data until every drive has its share, for example after `forebay drive add`.
    #[command(
        after_help = "New data uses new drives without this. The command says first how much moves, how long that takes at the present rate, \
and what each drive holds then. The moves go on in the background, a few placement groups at a time and within the limits of \
`forebay upkeep`, of which --pause and --resume stop and continue them with all other background work. Data stays readable and \
protected. `forebay status` shows what is left.

Examples:
  forebay fs balance /srv/forebay main --dry-run
  forebay fs balance /srv/forebay main
  forebay fs balance /srv/forebay main --abort"
    )]
    Balance {
        /// The node's directory.
        dir: PathBuf,
        /// Its name.
        name: String,
        /// Only say what would move.
        #[arg(long)]
        dry_run: bool,
        /// End it: what is moving goes back to the drives that had it. Placement groups that have moved stay where they are.
        #[arg(long, conflicts_with = "dry_run")]
        abort: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Say whether the drives have all shards that the metadata expects, as of the last comparison of both. It runs by itself, once an
    /// hour; what is missing is restored. Fails if something was missing.
    #[command(after_help = "Examples:
  forebay fs verify /srv/forebay main
  forebay fs verify /srv/forebay main --now --json | jq .last")]
    Verify {
        /// The node's directory.
        dir: PathBuf,
        /// Its name.
        name: String,
        /// Compare everything now, and wait for the end.
        #[arg(long)]
        now: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Create, look at, change and remove filesystem groups: filesystems with the same retention and tiering cue.
    #[command(subcommand)]
    Group(FsGroupCommand),
    /// Move data of a filesystem to an object store as it ages. With the store that it has, change how.
    Attach(AttachArgs),
    /// Bring all content back from the object store, then detach it. Files stay readable and writable during that.
    #[command(
        after_help = "Refuses if the drives have no room for what only the store has. Until it is done, `forebay fs attach` \
with the same store goes back: what has come stays on the drives, the rest in the store.

Example:
  forebay fs detach /srv/forebay main --wait"
    )]
    Detach {
        /// The node's directory.
        dir: PathBuf,
        /// Its name.
        name: String,
        /// Wait until nothing is in the store any more. Without it, `forebay tier status` shows how far that is.
        #[arg(long)]
        wait: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show one filesystem.
    #[command(after_help = "Example:\n  forebay fs show /srv/forebay main")]
    Show {
        /// The node's directory.
        dir: PathBuf,
        /// Its name.
        name: String,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}
