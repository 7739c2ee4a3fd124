//! Arguments of `log`.

use std::path::PathBuf;

use clap::Subcommand;

use crate::engine::EngineAddress;
use crate::node::{FILES, OWN_ENGINE};

fn engine(text: &str) -> Result<String, String> {
    if [OWN_ENGINE, FILES].contains(&text) {
        return Ok(text.to_owned());
    }
    text.parse::<EngineAddress>().map(|address| address.to_string()).map_err(|error| format!("{error:#}"))
}

const MOVE_HELP: &str = "In files of the first node: everything waits while that node is away. In an engine: the first three nodes of the cluster
follow the ledgers, and each can take them over. Metadata stands still for some seconds while the process of the node that
owns it begins anew; mounts in processes of their own wait, and lose nothing.

If a move fails, the logs stay where they are, and the command may be given again. `forebay log show` says where the logs are.

Examples:
  forebay log move /srv/forebay etcd                    # Forebay runs etcd on the first three nodes (Debian: etcd-server)
  forebay log move /srv/forebay etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379
  forebay log move /srv/forebay postgres://10.0.0.7:5432,10.0.0.8:5432/forebay?password-file=/etc/forebay/password
  forebay log move /srv/forebay files                   # back to one node";

#[derive(Debug, Subcommand)]
pub(crate) enum LogCommand {
    /// Show where the logs of the metadata are, and how far the nodes that follow them have come.
    #[command(after_help = "Example:\n  forebay log show /srv/forebay")]
    Show {
        /// The directory of any node.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Move the logs to an engine, so that other nodes can take over; to another engine; or back to files of the first node.
    #[command(after_help = MOVE_HELP)]
    Move {
        /// The directory of any node.
        dir: PathBuf,
        /// `etcd`: one that the first three nodes run themselves; or one of yours:
        /// etcd://HOST:PORT,…[?prefix=NAME&ca=FILE&cert=FILE&key=FILE], or PostgreSQL:
        /// postgres://HOST:PORT,…/DATABASE[?user=NAME&password-file=FILE&ca=FILE&prefix=NAME&single=yes]; or `files`: those of
        /// the first node. While it is away, everything waits then.
        #[arg(value_parser = engine)]
        to: String,
        /// From files: mounts in the first node's own process may end: programs that have files open there fail. They are made anew.
        #[arg(long)]
        remount: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

const LEDGERS_HELP: &str = "A ledger has the metadata of a filesystem; the ledger `cluster` has drives, nodes, users and the like. One node owns all of them, and
up to two others follow, each with a copy of its own. When the owner dies, one of them takes over by itself.

Examples:
  forebay ledger list /srv/forebay
  forebay ledger move /srv/forebay 1";

#[derive(Debug, Subcommand)]
pub(crate) enum LedgerCommand {
    /// List the ledgers, with the node that owns them and how far those that follow have come.
    #[command(after_help = LEDGERS_HELP)]
    List {
        /// The directory of any node.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Let another node own all ledgers, from the next seconds on. Programs wait for a moment. When that node dies, another one takes
    /// over as usual.
    #[command(after_help = LEDGERS_HELP)]
    Move {
        /// The directory of any node.
        dir: PathBuf,
        /// The number of the node that is to own them.
        node: u32,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}
