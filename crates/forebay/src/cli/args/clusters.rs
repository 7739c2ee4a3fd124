//! Arguments of `cluster`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use layout::FailureDomain;

use crate::engine::EngineAddress;

const RECOVER_HELP: &str = "For a cluster whose logs are in etcd or PostgreSQL, when that has lost its data for good (of etcd: two of three members), or was restored
from a backup. Not for one that is only away: nothing is lost then, and everything goes on once it is back.

The logs begin anew behind what this node has. The last second before the loss may be missing, and is gone then: run the command at
the node that has most. Without --yes it only says what each node has, and what it would do. The process of this node must be
stopped; those of others may run, and follow by themselves afterwards.

Until `forebay meta settle`, content that only the lost metadata knew stays on the drives.

Examples:
  forebay cluster recover /srv/forebay                                look
  forebay cluster recover /srv/forebay --yes --without 1,2            nodes 1 and 2 are lost
  forebay cluster recover /srv/forebay --yes --log etcd://10.0.0.9:2379";

#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Begin the logs of the metadata anew, behind what this node has of them, after etcd or PostgreSQL was lost for good.
    #[command(after_help = RECOVER_HELP)]
    Recover(RecoverArgs),
    /// Show or change how much of the drives stays free, so that others can take over what a lost node or drive held.
    #[command(after_help = SPARES_HELP)]
    Spares(SparesArgs),
}

const SPARES_HELP: &str = "The capacity of the largest nodes, or of another level, stays free, spread over all drives, and a sixteenth of the rest, because shards are
not spread evenly: writes are refused before they take it. Repair takes it after a loss, and users do not notice. Until as much is added again, less stays free, and `status` says so. To take what is
left for whole, give the number again.

Refused if what was lost would find no other place: 4+2 over six nodes needs a seventh.

Examples:
  forebay cluster spares /srv/forebay                    look
  forebay cluster spares /srv/forebay 1                  one node, if shards are spread over nodes
  forebay cluster spares /srv/forebay 2 --level drive
  forebay cluster spares /srv/forebay 0                  nothing stays free";

#[derive(Debug, Args)]
pub(crate) struct SparesArgs {
    /// The node's directory.
    pub(crate) dir: PathBuf,
    /// How many may be lost; 0: nothing stays free.
    pub(crate) count: Option<u32>,
    /// Of what: drive, node, rack or zone. Default: that over which shards are spread.
    #[arg(long, value_name = "LEVEL", requires = "count")]
    pub(crate) level: Option<FailureDomain>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RecoverArgs {
    /// The directory of one of the first three nodes.
    pub(crate) dir: PathBuf,
    /// Do it.
    #[arg(long)]
    pub(crate) yes: bool,
    /// Nodes that do not answer, and whose copies are lost or may be given up.
    #[arg(long, value_name = "ID,…", value_delimiter = ',')]
    pub(crate) without: Vec<u32>,
    /// Where the logs are to be: etcd://HOST:PORT,…[?prefix=NAME&ca=FILE&cert=FILE&key=FILE], or
    /// postgres://HOST:PORT,…/DATABASE[?user=NAME&password-file=FILE&ca=FILE&prefix=NAME&single=yes]. Default: an etcd that Forebay runs, or
    /// the same engine at another place.
    #[arg(long, value_name = "ENGINE")]
    pub(crate) log: Option<EngineAddress>,
    /// Also if another node has more.
    #[arg(long)]
    pub(crate) force: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
